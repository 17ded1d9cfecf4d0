"""Time of ``fz.summary`` for a tree of 100,000 leaves in nested dictionaries, compared with ``jax.tree.map``.

CPU times without garbage collection, medians of alternating runs, for several forms of spec; the function that
``jax.tree.map`` applies is the identity. The last table has the time of formatting a summary as text.

Run with ``python tests/benchmarks/summary.py``.
"""

import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np

import optax_freeze as fz

LAYERS, ROUNDS = 10_000, 5
SPECS = {
    "True": True,
    '"layer_1/**"': "layer_1/**",
    'fz.only("layer_1*")': fz.only("layer_1*"),
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


def seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of one call, without garbage collection, as in ``timeit``."""
    return timeit.timeit(call, timer=time.process_time, number=1)


def main() -> None:
    trees = {
        "tree of shapes": model(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)),
        "tree of NumPy arrays": model(lambda shape: np.zeros(shape, np.float32)),
    }
    title = f"fz.summary of {10 * LAYERS:,} leaves: time / time of one jax.tree.map"
    table = measure.table(title, timed=tuple(trees), label="frozen")
    cells: dict[str, list[str]] = {name: [] for name in SPECS}
    for tree in trees.values():
        times: dict[str, list[float]] = {name: [] for name in ("map", *SPECS)}
        for _ in range(ROUNDS + 1):
            times["map"].append(seconds(lambda tree=tree: jax.tree.map(lambda leaf: leaf, tree)))
            for name, spec in SPECS.items():
                times[name].append(seconds(lambda tree=tree, spec=spec: fz.summary(tree, spec)))
        base = statistics.median(times["map"][1:])
        for name in SPECS:
            cells[name].append(f"{statistics.median(times[name][1:]) / base:.1f}")
    for name, ratios in cells.items():
        table.add_row(name, *ratios)
    measure.show(table)
    summary = fz.summary(trees["tree of shapes"], "layer_1/**")
    table = measure.table('Text of the summary with frozen="layer_1/**"', "lines", timed=["seconds"])
    table.add_row("str(summary)", f"{len(str(summary).splitlines())}", f"{seconds(lambda: str(summary)):.1f}")
    measure.show(table)


if __name__ == "__main__":
    main()
