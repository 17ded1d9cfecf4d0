"""Train the last block and the head of a transformer on features: its frozen layers run once for each image.

Twelve blocks learn the digits 0 to 4. The last block and the head then learn all ten digits, twice with the same loss:
with the frozen blocks computed in every step, and with ``fz.precompute``, which computes them once for the whole data
set. The features are kept by example, so each epoch shuffles them, and the frozen parameters are not passed to the
step. Dropout, after the frozen blocks, is drawn anew in each step.

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

BLOCKS, WIDTH, BATCH = 12, 64, 64
FROZEN, ADAM = fz.only(f"block_{BLOCKS - 1}", "head"), optax.adam(1e-3)
IMAGES, KEY = jax.ShapeDtypeStruct((BATCH, 8, 8), jnp.float32), jax.random.key(0)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    """Images of shape (n, 8, 8), in 16 patches of 2 x 2 pixels, to ten logits."""

    @nn.compact
    def __call__(self, images: jax.Array, deterministic: bool) -> jax.Array:
        patches = images.reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 16, 4)
        x = nn.Dense(WIDTH, name="embed")(patches)
        x = x + self.param("positions", nn.initializers.normal(0.02), (16, WIDTH))
        for i in range(BLOCKS):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(10, name="head")(nn.Dropout(0.2)(x.mean(1), deterministic=deterministic))


def loss(params: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    logits = jnp.asarray(Transformer().apply({"params": params}, images, False, rngs={"dropout": key}))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(title: str, params: Any, tx: Any, grad: Any, data: Any, labels: np.ndarray, epochs: int) -> Any:
    """The parameters, the loss of each step, the seconds of each epoch and the FLOPs of a step."""

    def step(params: Any, state: Any, batch: Any, labels: jax.Array, key: jax.Array) -> Any:
        value, grads = grad(params, batch, labels, key)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    first, state = jax.tree.map(lambda array: array[:BATCH], data), tx.init(params)
    step = jax.jit(step).lower(params, state, first, labels[:BATCH], KEY).compile()
    rng, losses, seconds = np.random.default_rng(0), [], []
    for _ in track(range(epochs), title):
        start = time.perf_counter()
        for chosen in rng.permutation(len(labels))[: len(labels) // BATCH * BATCH].reshape(-1, BATCH):
            batch, key = jax.tree.map(lambda array, chosen=chosen: array[chosen], data), jax.random.key(len(losses))
            params, state, value = step(params, state, batch, labels[chosen], key)
            losses.append(value)
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - start)
    return params, np.array(losses), seconds, (step.cost_analysis() or {})["flops"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, help="epochs of each of the three trainings")
    parser.add_argument("--picture", type=pathlib.Path, default=pathlib.Path("train_on_features.png"))
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")
    console = Console()
    pixels, digits = load_digits(return_X_y=True)
    images, labels = (pixels / 16.0).reshape(-1, 8, 8).astype(np.float32)[: 28 * BATCH], digits[: 28 * BATCH]
    params = Transformer().init(KEY, images[:1], True)["params"]
    few = images[labels < 5], labels[labels < 5]
    params, *_ = train("0-4, everything trains", params, ADAM, jax.value_and_grad(loss), *few, args.epochs)

    once, unused = fz.precompute(loss, FROZEN, recurring="images", example_axis=0), (labels[:BATCH], KEY)
    before = jax.jit(once.before).lower(params, IMAGES, *unused).compile()  # of labels and key, only shapes are read
    start = time.perf_counter()
    parts = [before(params, images[i : i + BATCH], *unused) for i in range(0, len(images), BATCH)]
    features = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    took, needed = time.perf_counter() - start, once.needed(params, IMAGES, *unused)
    print(explanation := once.explain(params, IMAGES, *unused))

    def on_features(params: Any, features: Any, labels: jax.Array, key: jax.Array) -> Any:
        return fz.value_and_grad(once.after, FROZEN)(params, features, IMAGES, labels, key)  # pixels are not read

    tx, in_each_step = fz.freeze(ADAM, FROZEN), fz.value_and_grad(loss, FROZEN)
    runs = (
        train("0-9, the loss as it is", params, tx, in_each_step, images, labels, args.epochs),
        train("0-9, on features", needed, tx, on_features, features, labels, args.epochs),
    )
    (_, losses, seconds, _), (tuned, on, seconds_on, _) = runs
    np.testing.assert_allclose(losses, on, rtol=1e-3)
    fz.assert_frozen(params, fz.combine(fz.partition(tuned, FROZEN)[0], fz.partition(params, FROZEN)[1]), FROZEN)

    table = Table("", "frozen blocks in each step", "computed once", title=f"block {BLOCKS - 1} and the head train")
    table.add_row("last loss", *(f"{losses[-1]:.4f}" for _, losses, _, _ in runs))
    table.add_row("seconds per epoch", *(f"{np.median(seconds):.2f}" for _, _, seconds, _ in runs))
    table.add_row("compiled step", *(f"{flops / 1e6:.0f} MFLOP" for *_, flops in runs))
    sizes = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (params, needed))
    table.add_row("parameters in the step", *(f"{size / 2**20:.2f} MiB" for size in sizes))
    console.print(table)
    print(f"{np.sum(losses == on)} of {len(on)} losses are equal bit for bit")
    print(f"features of {len(images)} images: {features[0].nbytes / 2**20:.1f} MiB, computed once in {took:.1f} s")

    axes, bars = Figure(figsize=(9, 4), layout="constrained").subplots(1, 2)
    for x, y, name in ((np.cumsum(seconds), losses, "in each step"), (took + np.cumsum(seconds_on), on, "once")):
        axes.plot(x, y.reshape(args.epochs, -1).mean(1), ".-", label=f"frozen blocks computed {name}")
    axes.set(xlabel="seconds", ylabel="mean loss of an epoch", yscale="log")
    axes.legend()
    explanation.plot(bars)
    axes.figure.savefig(args.picture, dpi=150)
    console.print(f"picture: {args.picture}")


if __name__ == "__main__":
    main()
