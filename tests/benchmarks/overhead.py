"""Time that this library takes in Python: tracing, importing and summarizing.

1. Tracing an AdamW update of a tree of 10,000 leaves, half of them frozen, compared with ``optax.partition``, which
   receives its labels from a function of the tree or from ``fz.labels``; and of 1,000 leaves that are all masked,
   compared with unmasked ones.
2. What ``import optax_freeze`` adds to the time of ``import jax, optax``, in several processes, all byte-compiled as in
   an installed wheel. In the first row, garbage is collected between the two imports. Otherwise a collection of all
   objects of JAX and Optax happens during the second import, whatever is imported; it takes almost half of the time in
   the second row.
3. ``fz.summary`` of a tree of 100,000 leaves in nested dictionaries, for several forms of spec, compared with
   ``jax.tree.map`` of the identity; the same with AdamW, compared with ``jax.eval_shape`` of its ``init``; and the text
   of a summary.

CPU times; medians of alternating runs without garbage collection, except for imports.

Run with ``python tests/benchmarks/overhead.py``.
"""

import functools
import os
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax

import optax_freeze as fz

ADAMW = optax.adamw(1e-3)


def tracing(title: str, params: Any, transformations: dict[str, Any]) -> None:
    """Shows the time of tracing an update, and its ratio to the first transformation."""
    traced = lambda tx, state: jax.jit(tx.update).trace(params, state, params)  # noqa: E731
    states = {name: jax.eval_shape(tx.init, params) for name, tx in transformations.items()}
    traces = {name: functools.partial(traced, tx, states[name]) for name, tx in transformations.items()}
    seconds = measure.tracing_in_turn(traces)
    table = measure.table(f"Tracing an AdamW update of {title}", timed=("seconds", "ratio"))
    for name, median in seconds.items():
        table.add_row(name, f"{median:.2f}", f"{median / next(iter(seconds.values())):.2f}")
    measure.show(table)


def half_frozen() -> None:
    names = [f"{'frozen' if i % 2 else 'trains'}_{i:03d}" for i in range(100)]
    params = {name: {f"leaf_{j:03d}": jax.ShapeDtypeStruct((8,), jnp.float32) for j in range(100)} for name in names}

    def label_fn(tree: Any) -> Any:
        return {name: "frozen" if name.startswith("frozen") else "trainable" for name in tree}

    by_label = functools.partial(optax.partition, {"trainable": ADAMW, "frozen": optax.set_to_zero()})
    transformations = {
        "optax.partition, label function": by_label(label_fn),
        "optax.partition, fz.labels": by_label(fz.labels("frozen_*")),
        "fz.freeze": fz.freeze(ADAMW, "frozen_*"),
        "fz.freeze, full_updates=False": fz.freeze(ADAMW, "frozen_*", full_updates=False),
    }
    tracing("10,000 leaves, half of them frozen", params, transformations)


def masked() -> None:
    params = {f"leaf_{i:04d}": jax.ShapeDtypeStruct((8, 8), jnp.float32) for i in range(1000)}
    specs = {
        "nothing frozen": False,
        "fz.rows in every leaf": fz.rules({"**": fz.rows(slice(0, 4))}),
        "fz.elements in every leaf": fz.rules({"**": jnp.eye(8, dtype=bool)}),
    }
    freeze = functools.partial(fz.freeze, ADAMW, full_updates=False)
    tracing("1,000 leaves by fz.freeze", params, {name: freeze(spec) for name, spec in specs.items()})


IMPORT = """
import time
start = time.process_time()
import jax, optax
taken = time.process_time() - start
{between}
start = time.process_time()
import optax_freeze
print((time.process_time() - start) / taken)
"""
BETWEEN = {"garbage collected in between": "import gc; gc.collect()", "no collection in between": ""}


def imports() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    table = measure.table("Time of import optax_freeze / time of import jax, optax", timed=("median", "maximum"))
    for name, between in BETWEEN.items():
        run = [sys.executable, "-c", IMPORT.format(between=between)]
        _, *ratios = [float(subprocess.check_output(run, env=env)) for _ in range(16)]  # the first writes byte code
        table.add_row(name, f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}")
    measure.show(table)


LAYERS = 10_000
SPECS = {
    "True": True,
    '"layer_1/**"': "layer_1/**",
    'fz.all_except("layer_1*")': fz.all_except("layer_1*"),
    'fz.where(path ends with "bias")': fz.where(lambda path, leaf: path.endswith("bias")),
    "fz.rules of three patterns": fz.rules({"**/norm": False, "layer_1*": True, "**/attention": True}),
}


def model(make: Callable[[tuple[int, ...]], Any]) -> Any:
    """Layers of ten leaves each, in nested dictionaries."""

    def dense(inputs: int, outputs: int) -> Any:
        return {"kernel": make((inputs, outputs)), "bias": make((outputs,))}

    def layer() -> Any:
        attention = {name: {"kernel": make((4, 4))} for name in ("query", "key", "value", "out")}
        norm = {"scale": make((4,)), "bias": make((4,))}
        return {"attention": attention, "mlp": {"up": dense(4, 16), "down": dense(16, 4)}, "norm": norm}

    return {f"layer_{i}": layer() for i in range(LAYERS)}


def summaries() -> None:
    trees = {
        "tree of shapes": model(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)),
        "tree of NumPy arrays": model(lambda shape: np.zeros(shape, np.float32)),
    }
    title = f"fz.summary of {10 * LAYERS:,} leaves: time / time of one jax.tree.map"
    table = measure.table(title, timed=tuple(trees), label="frozen")
    columns = []
    for tree in trees.values():
        calls = {name: functools.partial(fz.summary, tree, spec) for name, spec in SPECS.items()}
        columns.append(measure.tracing_in_turn({**calls, "map": functools.partial(jax.tree.map, lambda x: x, tree)}))
    for name in SPECS:
        table.add_row(name, *(f"{seconds[name] / seconds['map']:.1f}" for seconds in columns))
    measure.show(table)
    shapes = trees["tree of shapes"]
    calls = {
        "jax.eval_shape(adamw.init, shapes)": lambda: jax.eval_shape(ADAMW.init, shapes),
        "fz.summary(shapes, frozen, adamw)": lambda: fz.summary(shapes, "layer_1/**", ADAMW),
    }
    table = measure.table(f"fz.summary of {10 * LAYERS:,} leaves with AdamW", timed=("seconds", "ratio"))
    seconds = measure.tracing_in_turn(calls, rounds=1)
    for name, median in seconds.items():
        table.add_row(name, f"{median:.1f}", f"{median / next(iter(seconds.values())):.2f}")
    measure.show(table)
    summary = fz.summary(shapes, "layer_1/**")
    seconds = timeit.timeit(lambda: str(summary), timer=time.process_time, number=1)
    table = measure.table('Text of the summary with frozen="layer_1/**"', "lines", timed=["seconds"])
    table.add_row("str(summary)", f"{len(str(summary).splitlines())}", f"{seconds:.1f}")
    measure.show(table)


def main() -> None:
    half_frozen()
    masked()
    imports()
    summaries()


if __name__ == "__main__":
    main()
