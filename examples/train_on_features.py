"""Train the last block and the head of a transformer: its frozen blocks run once for each image.

Eight blocks learn the digits 0 to 4. The last block and the head then learn all ten, twice with the
same loss: with the frozen blocks in every step, and with ``fz.precompute``, which runs them once
for the whole data set. The features are kept by example, so each epoch shuffles them; dropout,
after the frozen blocks, is drawn anew in every step.
"""

from typing import Any

import jax
import numpy as np

import optax_freeze as fz

FROZEN = fz.all_except("block_7", "head")  # all other parameters


def divide(loss: Any) -> Any:
    return fz.precompute(loss, FROZEN, recurring="images", example_axis=0)


def features_of(images: Any, params: Any, before: Any, size: int, *rest: Any) -> Any:
    """The features of all images on the host, computed batch by batch."""
    parts = [before(params, images[i : i + size], *rest) for i in range(0, len(images), size)]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def training(loss: Any, optimizer: Any, frozen: Any = FROZEN) -> Any:
    """The optimizer of the trainable parameters, and a compiled step."""
    tx = fz.freeze(optimizer, frozen)
    return tx, jax.jit(fz.train_step(loss, tx))


# %%
import argparse
import time

import flax.linen as nn
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

WIDTH, BATCH, KEY, ADAM = 64, 64, jax.random.key(0), optax.adam(1e-3)


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


def train(params: Any, method: Any, data: Any, epochs: int) -> Any:
    """The loss of each step, the seconds of each epoch, the FLOPs of a step, bytes of parameters; the parameters."""
    (tx, step), rng, losses, seconds, count = method, np.random.default_rng(0), [], [], len(data[-1])
    batch, state = jax.tree.map(lambda array: array[:BATCH], data), tx.init(params)
    compiled = step.lower(params, state, *batch, KEY).compile()
    for _ in range(epochs):
        start = time.perf_counter()
        for chosen in rng.permutation(count)[: count // BATCH * BATCH].reshape(-1, BATCH):
            batch, key = jax.tree.map(lambda array, chosen=chosen: array[chosen], data), jax.random.key(len(losses))
            params, state, value = compiled(params, state, *batch, key)
            losses.append(value)
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - start)
    size, cost = sum(leaf.nbytes for leaf in jax.tree.leaves(params)), compiled.cost_analysis() or {}
    return np.array(losses), seconds, cost["flops"], size, params


def compare(epochs: int) -> Any:
    """Both trainings, the features, the seconds that they took, and what ``precompute`` divided."""
    pixels, labels = (array[: 28 * BATCH] for array in load_digits(return_X_y=True))
    images = (pixels / 16.0).reshape(-1, 8, 8, 1).astype(np.float32)
    few, example = (images[labels < 5], labels[labels < 5]), (images[:BATCH], labels[:BATCH], KEY)
    params = jax.jit(Transformer().init)({"params": KEY, "dropout": KEY}, images[:1])["params"]
    *_, params = train(params, training(loss, ADAM, False), few, epochs)
    in_each_step = train(params, training(loss, ADAM), (images, labels), epochs)
    once = divide(loss)
    before, start = jax.jit(once.before).lower(params, *example).compile(), time.perf_counter()
    features = features_of(images, params, before, BATCH, *example[1:])
    took, needed = time.perf_counter() - start, once.needed(params, *example)
    on_features = train(needed, training(once.after, ADAM), (features, images, labels), epochs)
    np.testing.assert_allclose(on_features[0], in_each_step[0], rtol=1e-3)
    return (in_each_step, on_features), features[0], took, once.explain(params, *example)


def report(runs: Any, features: Any, took: float, explanation: Any) -> Figure:
    losses, times, flops, sizes, _ = zip(*runs, strict=True)
    table = Table("", "frozen blocks in each step", "computed once", title="block 7 and the head train")
    table.add_row("last loss", *(f"{values[-1]:.4f}" for values in losses))
    table.add_row("seconds per epoch", *(f"{np.median(seconds):.2f}" for seconds in times))
    table.add_row("compiled step", *(f"{cost / 1e6:.0f} MFLOP" for cost in flops))
    table.add_row("parameters in the step", *(f"{size / 2**20:.2f} MiB" for size in sizes))
    Console(force_jupyter=False).print(table)
    print(f"the {len(losses[0])} losses differ by at most {abs(losses[0] - losses[1]).max():.0e}")
    print(f"features of {len(features)} images: {features.nbytes / 2**20:.1f} MiB, computed in {took:.1f} s")
    axes, bars = Figure(figsize=(9, 4), layout="constrained").subplots(1, 2)
    for name, before, seconds, values in zip(("in each step", "once"), (0, took), times, losses, strict=True):
        axes.plot(before + np.cumsum(seconds), values.reshape(len(seconds), -1).mean(1), ".-", label=name)
    axes.set(xlabel="seconds", ylabel="mean loss of an epoch")
    axes.legend(title="frozen blocks computed")
    return explanation.plot(bars).figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="epochs of each training")
    parser.add_argument("--picture", default="train_on_features.png")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")
    print((results := compare(args.epochs))[-1])
    report(*results).savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
