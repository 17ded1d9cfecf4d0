"""Train the last block and the head of a transformer on features: its frozen blocks run once for each image.

Eight blocks learn the digits 0 to 4. The last block and the head then learn all ten, twice with the same loss: with
the frozen blocks in every step, and with ``fz.precompute``, which runs them once for the whole data set. The features
are kept by example, so each epoch shuffles them; dropout, after the frozen blocks, is drawn anew in every step.

Run with ``python examples/train_on_features.py``.
"""

import argparse
import pathlib
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import optax_freeze as fz

WIDTH, BATCH, KEY, ADAM, FROZEN = 64, 64, jax.random.key(0), optax.adam(1e-3), fz.only("block_7", "head")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (2, 2), strides=2, name="patches")(images).reshape(-1, 16, WIDTH)
        x = x + self.param("positions", nn.initializers.normal(0.02), (16, WIDTH))
        for i in range(8):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(10, name="head")(nn.Dropout(0.2, deterministic=False)(x.mean(1)))


def loss(params: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
    logits = jnp.asarray(Transformer().apply({"params": params}, images, rngs={"dropout": key}))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(title: str, params: Any, tx: Any, grad: Any, data: Any, epochs: int) -> Any:
    """The parameters, the loss of each step, the seconds of each epoch and the MFLOP of a step."""

    @jax.jit
    def step(params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
        value, grads = grad(params, *batch, key)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, count, rng, losses, seconds = tx.init(params), len(data[-1]), np.random.default_rng(0), [], []
    compiled = step.lower(params, state, jax.tree.map(lambda array: array[:BATCH], data), KEY).compile()
    for _ in track(range(epochs), title):
        start = time.perf_counter()
        for chosen in rng.permutation(count)[: count // BATCH * BATCH].reshape(-1, BATCH):
            batch, key = jax.tree.map(lambda array, chosen=chosen: array[chosen], data), jax.random.key(len(losses))
            params, state, value = compiled(params, state, batch, key)
            losses.append(value)
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - start)
    return params, np.array(losses), seconds, (compiled.cost_analysis() or {})["flops"] / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="epochs of each training")
    parser.add_argument("--picture", type=pathlib.Path, default=pathlib.Path("train_on_features.png"))
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")
    pixels, labels = (array[: 28 * BATCH] for array in load_digits(return_X_y=True))
    images = (pixels / 16.0).reshape(-1, 8, 8, 1).astype(np.float32)
    few, batch = (images[labels < 5], labels[labels < 5]), (images[:BATCH], labels[:BATCH], KEY)
    params = jax.jit(Transformer().init)({"params": KEY, "dropout": KEY}, images[:1])["params"]
    params, *_ = train("0-4, everything trains", params, ADAM, jax.value_and_grad(loss), few, args.epochs)

    once = fz.precompute(loss, FROZEN, recurring="images", example_axis=0)
    before, start = jax.jit(once.before).lower(params, *batch).compile(), time.perf_counter()
    parts = [before(params, images[i : i + BATCH], *batch[1:]) for i in range(0, len(images), BATCH)]
    features = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    took, needed = time.perf_counter() - start, once.needed(params, *batch)
    print(explanation := once.explain(params, *batch))

    tx, grad, data = fz.freeze(ADAM, FROZEN), fz.value_and_grad(loss, FROZEN), (images, labels)
    _, losses, times, flops = train("0-9, as it is", params, tx, grad, data, args.epochs)
    grad, data = fz.value_and_grad(once.after, FROZEN), (features, images, labels)
    _, same, fast, fewer = train("0-9, on features", needed, tx, grad, data, args.epochs)
    np.testing.assert_allclose(same, losses, rtol=1e-3)

    table = Table("", "frozen blocks in each step", "computed once", title="block 7 and the head train")
    table.add_row("last loss", f"{losses[-1]:.4f}", f"{same[-1]:.4f}")
    table.add_row("seconds per epoch", f"{np.median(times):.2f}", f"{np.median(fast):.2f}")
    table.add_row("compiled step", f"{flops:.0f} MFLOP", f"{fewer:.0f} MFLOP")
    sizes = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (params, needed))
    table.add_row("parameters in the step", *(f"{size / 2**20:.2f} MiB" for size in sizes))
    Console().print(table)
    print(f"{np.sum(losses == same)} of {len(losses)} losses are equal bit for bit")
    print(f"features of {len(images)} images: {features[0].nbytes / 2**20:.1f} MiB, computed in {took:.1f} s")

    axes, bars = Figure(figsize=(9, 4), layout="constrained").subplots(1, 2)
    for name, x, y in (("in each step", np.cumsum(times), losses), ("once", took + np.cumsum(fast), same)):
        axes.plot(x, y.reshape(args.epochs, -1).mean(1), ".-", label=name)
    axes.set(xlabel="seconds", ylabel="mean loss of an epoch")
    axes.legend(title="frozen blocks computed")
    explanation.plot(bars).figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
