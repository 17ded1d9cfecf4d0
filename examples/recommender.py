"""Train tables of a million users and items at the cost of a batch.

A matrix factorization learns ratings that the script makes, a few users rating most. A batch reads
4,096 rows of each table; all other rows are frozen in this step, and keep their optimizer state.
Dense steps of the same optimizers are trained beside it. ``python examples/recommender.py`` draws
``recommender.png``.
"""

from typing import Any

import jax
import jax.numpy as jnp

import optax_freeze as fz


def rows_of_the_batch(loss: Any, optimizer: Any, params: Any, batch: int) -> tuple[Any, Any]:
    """The optimizer state, and a step of users, items and ratings that trains the rows it reads."""
    rows = ~fz.rows(jnp.arange(batch), keep_state=True)  # as many as one batch may name
    tx = fz.freeze(optimizer, {"users": rows, "items": rows})
    read = {"users": lambda users, items, _: users, "items": lambda users, items, _: items}
    step = jax.jit(fz.train_step(loss, tx, rows=read), donate_argnums=(0, 1))
    return tx.init(params), step


# %%
import argparse
import time

import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

RANK, WIDTH, NOISE = 4, 16, 0.1


def rowwise_adagrad(learning_rate: float) -> optax.GradientTransformation:
    """Adagrad with one number for each row, as in large recommenders."""

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.zeros((len(p), 1), p.dtype), params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        state = jax.tree.map(lambda s, g: s + jnp.mean(g**2, axis=1, keepdims=True), state, updates)
        return jax.tree.map(lambda g, s: -learning_rate * g / (jnp.sqrt(s) + 1e-10), updates, state), state

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {"Adam": optax.adam(0.02), "row-wise Adagrad": rowwise_adagrad(0.1)}


def loss(params: Any, users: jax.Array, items: jax.Array, ratings: jax.Array) -> jax.Array:
    return jnp.mean((jnp.sum(params["users"][users] * params["items"][items], axis=1) - ratings) ** 2)


def dense(optimizer: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    """The state and the step of the same training with gradients and updates of all rows."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return optimizer.init(params), jax.jit(step, donate_argnums=(0, 1))


def sampler(users: int, items: int) -> Any:
    """A function of a number of ratings; the probability of a user or an item falls with its number."""
    rng = np.random.default_rng(0)
    true = [rng.normal(size=(n, RANK)).astype(np.float32) / RANK**0.5 for n in (users, items)]

    def sample(count: int) -> Any:
        ids = [(n ** rng.random(count)).astype(np.int32) - 1 for n in (users, items)]
        ratings = np.sum(true[0][ids[0]] * true[1][ids[1]], axis=1) + NOISE * rng.normal(size=count)
        return *ids, ratings.astype(np.float32)

    return sample


def init(users: int, items: int) -> Any:
    a, b = (0.3 * jax.random.normal(jax.random.key(n), (n, WIDTH)) for n in (users, items))
    return {"users": a, "items": b}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=900_000)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=400, choices=range(1, 1001), metavar="N")
    parser.add_argument("--picture", default="recommender.png")
    args = parser.parse_args()
    sample, console = sampler(args.users, args.items), Console()
    held_out, batches = sample(20_000), [sample(args.batch) for _ in range(args.steps)]
    error = jax.jit(lambda params: jnp.sqrt(loss(params, *held_out)))
    read = {"users": np.unique([batch[0] for batch in batches]), "items": np.unique([batch[1] for batch in batches])}
    table = Table("", "ms a step", "MFLOP", "temporary MB", "held-out error")
    curves = {}
    for name, optimizer in OPTIMIZERS.items():
        for way in ("dense", "rows of the batch"):
            params = init(args.users, args.items)
            by_rows = rows_of_the_batch(loss, optimizer, params, args.batch)
            state, step = dense(optimizer, params) if way == "dense" else by_rows
            compiled: Any = step.lower(params, state, *batches[0]).compile()
            seconds, curve = [], []
            for i, batch in enumerate(batches, 1):
                start = time.perf_counter()
                params, state, _ = jax.block_until_ready(compiled(params, state, *batch))
                seconds.append(time.perf_counter() - start)
                if i % max(args.steps // 20, 1) == 0:
                    curve.append((sum(seconds), float(error(params))))
            curves[name, way] = np.array(curve)
            mflop, temporary = compiled.cost_analysis()["flops"] / 1e6, compiled.memory_analysis().temp_size_in_bytes
            row = f"{1e3 * np.median(seconds):.1f}", f"{mflop:,.1f}", f"{temporary / 1e6:,.1f}", f"{curve[-1][1]:.3f}"
            table.add_row(f"{name}, {way}", *row)
        start = init(args.users, args.items)
        for each, rows in read.items():
            rest = np.setdiff1d(np.arange(len(start[each])), rows)
            assert np.asarray(params[each])[rest].tobytes() == np.asarray(start[each])[rest].tobytes()
    console.print(table)
    users, items = map(len, read.values())
    console.print(f"{users:,} users and {items:,} items were read; no bit of the other rows changed")

    axes = (figure := Figure(figsize=(8, 3.8), layout="constrained")).subplots()
    for (name, way), curve in curves.items():
        line, color = "--" if way == "dense" else "-", f"C{[*OPTIMIZERS].index(name)}"
        axes.plot(*curve.T, line, color=color, label=f"{name}, {way}")
    axes.set(xlabel="seconds of training", ylabel="held-out error", xscale="log")
    axes.set_title(f"{args.users + args.items:,} rows, {args.batch:,} of each table a batch")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(args.picture, dpi=100)


if __name__ == "__main__":
    main()
