"""A table of which a batch reads 4,096 rows: dense Optax, ``fz.train_step(..., rows=...)`` and lazy optimizers by hand.

1. The compiler's figures of a step for a CPU: FLOPs, and MB of temporary arrays. The table and its moments are
   arguments, and are written in place.
2. The time of a step / the time of the step by hand, medians of alternating runs in one process. The
   ``SparseAdam`` and ``Adagrad`` of PyTorch, with sparse gradients, take turns with them if ``make gallery`` has
   installed PyTorch, or if ``PYTORCH`` names a Python that has it.

By hand means: unique ids, a gather of the rows of the table and of its moments, the update, and a scatter in place. A
dense step of 10,000,000 rows is left out: it needs 15 GB.

Run with ``python tests/benchmarks/batch_rows.py``.
"""

import functools
import os
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import measure

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax

import optax_freeze as fz

WIDTH, BATCH, ROUNDS = 64, 4096, 25
OPTIMIZERS = {"Adam": optax.adam(1e-3), "Adagrad": optax.adagrad(1e-3), "momentum": optax.sgd(1e-3, 0.9)}
SIZES = (100_000, 1_000_000, 10_000_000)
OF_DENSE = SIZES[:2]
PYTORCH = pathlib.Path(os.environ.get("PYTORCH", ".venv/pytorch/bin/python"))


def loss(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((params["table"][ids] @ params["head"] - y) ** 2)


def params_of(rows: int) -> Any:
    return {"table": jnp.full((rows, WIDTH), 0.5, jnp.float32), "head": jnp.ones(WIDTH)}


def dense(tx: optax.GradientTransformation) -> tuple[Any, Any]:
    return tx.init, measure.stepping(jax.value_and_grad(loss), tx)


def ours(optimizer: optax.GradientTransformation) -> tuple[Any, Any]:
    tx = fz.freeze(optimizer, {"table": ~fz.rows(jnp.arange(BATCH), keep_state=True), "head": False})
    return tx.init, fz.train_step(loss, tx, rows={"table": lambda ids, y: ids})


def by_hand(tx: optax.GradientTransformation) -> tuple[Any, Any]:
    def step(params: Any, state: Any, ids: jax.Array, y: jax.Array) -> Any:
        size = len(params["table"])
        rows, places = jnp.unique(ids, size=len(ids), fill_value=size, return_inverse=True)
        is_table = lambda x: x.shape[:1] == (size,)  # noqa: E731
        take = lambda x: x.at[rows].get(mode="fill", fill_value=0) if is_table(x) else x  # noqa: E731
        put = lambda x, new: x.at[rows].set(new, mode="drop", unique_indices=True) if is_table(x) else new  # noqa: E731
        part = jax.tree.map(take, params)
        value, grads = jax.value_and_grad(loss)(part, places, y)
        updates, new = tx.update(grads, jax.tree.map(take, state), part)
        return (jax.tree.map(put, params, optax.apply_updates(part, updates)), jax.tree.map(put, state, new), value)

    return tx.init, step


WAYS: dict[str, Callable[..., Any]] = {"dense Optax": dense, "fz": ours, "by hand": by_hand}


def batches(rows: int) -> Any:
    """Ids of a few batches, of which few are alike, and their targets."""
    rng = np.random.default_rng(0)
    return [(rng.integers(0, rows, BATCH).astype(np.int32), np.ones(BATCH, np.float32)) for _ in range(8)]


def compiled_figures() -> None:
    for name, optimizer in OPTIMIZERS.items():
        table = measure.table(
            f"A step with {name} of a table of {WIDTH} columns",
            *(f"{w}: {f}" for w in WAYS for f in ("MFLOP", "temporary MB")),
            label="rows",
        )
        for rows in SIZES:
            cells = []
            for make in WAYS.values():
                init, step = make(optimizer)
                params = jax.eval_shape(functools.partial(params_of, rows))
                batch = jax.eval_shape(lambda rows=rows: batches(rows)[0])
                found = measure.figures(step, params, jax.eval_shape(init, params), *batch, tpu=False)
                cells += [f"{found.flops / 1e6:,.1f}", f"{found.temporary / 1e6:,.1f}"]
            table.add_row(f"{rows:,}", *cells)
        measure.show(table)


def steps_of(make: Callable[..., Any], optimizer: Any, rows: int) -> Callable[[], float]:
    """A function that takes one step with the next batch, and returns its seconds."""
    init, step = make(optimizer)
    params = params_of(rows)
    state, found, n = init(params), jax.jit(step, donate_argnums=(0, 1)), 0
    every = [jax.device_put(batch) for batch in batches(rows)]

    def run() -> float:
        nonlocal params, state, n
        start = time.perf_counter()
        params, state, _ = jax.block_until_ready(found(params, state, *every[n % len(every)]))
        n += 1
        return time.perf_counter() - start

    run()
    return run


class Torch:
    """A process of PyTorch that takes a step for each line that it reads, and writes its seconds."""

    def __init__(self, optimizer: str, rows: int) -> None:
        script = pathlib.Path(__file__).with_name("sparse_pytorch.py")
        arguments = [str(PYTORCH), str(script), optimizer, *map(str, (rows, WIDTH, BATCH))]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self()

    def __call__(self) -> float:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


OF_PYTORCH = {"Adam": "SparseAdam", "Adagrad": "Adagrad", "momentum": None}  # its SGD has no sparse momentum


def times() -> None:
    for name, optimizer in OPTIMIZERS.items():
        others = ["PyTorch, sparse"] if PYTORCH.exists() and OF_PYTORCH[name] else []
        table = measure.table(
            f"Time of a step with {name} / time of the step by hand",
            timed=["by hand, ms", "dense Optax", "fz", *others],
            label="rows",
        )
        for rows in SIZES:
            ways = {way: make for way, make in WAYS.items() if way != "dense Optax" or rows in OF_DENSE}
            runs: dict[str, Any] = {way: steps_of(make, optimizer, rows) for way, make in ways.items()}
            torch = Torch(str(OF_PYTORCH[name]), rows) if others else None
            runs |= {others[0]: torch} if torch else {}
            found = [{way: run() for way, run in runs.items()} for _ in range(ROUNDS)]
            median = {way: statistics.median(each[way] for each in found) for way in runs}
            if torch:
                torch.close()
            ratios = (
                f"{median[way] / median['by hand']:.2f}" if way in median else "" for way in ("dense Optax", "fz")
            )
            rest = [f"{median[way] / median['by hand']:.2f}" for way in others]
            table.add_row(f"{rows:,}", f"{1e3 * median['by hand']:.2f}", *ratios, *rest)
        measure.show(table)


def main() -> None:
    compiled_figures()
    times()


if __name__ == "__main__":
    main()
