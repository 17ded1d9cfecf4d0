"""Time of tracing an AdamW update of a tree of 10,000 leaves, half of them frozen, compared with ``optax.partition``.

CPU seconds, medians of alternating runs. ``optax.partition`` receives its labels from a function of the tree or from
``fz.labels``; ratios are to the former.

Run with ``python tests/benchmarks/tracing.py``.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import measure
import optax

import optax_freeze as fz

LAYERS, LEAVES, ROUNDS = 100, 100, 5
FROZEN = "frozen_*"


def seconds(trace: Callable[[], Any]) -> float:
    """CPU seconds of one call with empty caches."""
    jax.clear_caches()
    start = time.process_time()
    trace()
    return time.process_time() - start


def main() -> None:
    leaf = jax.ShapeDtypeStruct((8,), jnp.float32)
    names = [f"{'frozen' if i % 2 else 'trains'}_{i:03d}" for i in range(LAYERS)]
    params = {name: {f"leaf_{j:03d}": leaf for j in range(LEAVES)} for name in names}

    def label_fn(tree: Any) -> Any:
        return {name: "frozen" if name.startswith("frozen") else "trainable" for name in tree}

    inner = optax.adamw(1e-3)
    transformations = {
        "optax.partition, label function": optax.partition(
            {"trainable": inner, "frozen": optax.set_to_zero()}, label_fn
        ),
        "optax.partition, fz.labels": optax.partition(
            {"trainable": inner, "frozen": optax.set_to_zero()}, fz.labels(FROZEN)
        ),
        "fz.freeze": fz.freeze(inner, FROZEN),
        "fz.freeze, full_updates=False": fz.freeze(inner, FROZEN, full_updates=False),
    }
    states = {name: jax.eval_shape(tx.init, params) for name, tx in transformations.items()}
    times: dict[str, list[float]] = {name: [] for name in transformations}
    for _ in range(ROUNDS + 1):
        for name, tx in transformations.items():
            times[name].append(seconds(lambda tx=tx, s=states[name]: jax.jit(tx.update).trace(params, s, params)))

    table = measure.table(f"Tracing an AdamW update of {LAYERS * LEAVES:,} leaves", timed=("seconds", "ratio"))
    base = statistics.median(times["optax.partition, label function"][1:])
    for name, measured in times.items():
        median = statistics.median(measured[1:])
        table.add_row(name, f"{median:.2f}", f"{median / base:.2f}")
    measure.show(table)


if __name__ == "__main__":
    main()
