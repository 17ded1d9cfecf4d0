"""One training routine for three models, each of which declares what it freezes.

A perceptron with a frozen first layer, a stack of scanned layers with a frozen embedding, and a
convolutional net in which only the biases and the head train. The routine knows none of these
architectures: it asks ``frozen_mask`` which parameters a model freezes, and trains the others with
L-BFGS, each step on the same 500 of scikit-learn's digits. The differences that L-BFGS stores, ten
of parameters and ten of gradients, are those of trainable parameters.

Run with ``python examples/freeze_at_construction.py``.
"""

from typing import Any

import flax.linen as nn
import jax
import optax

import optax_freeze as fz
from optax_freeze.linen import Frozen, frozen_mask


class Perceptron(nn.Module):
    """The first layer is random and frozen."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(Frozen(nn.Dense(256, name="random"))(images.reshape(len(images), -1)))
        return nn.Dense(10, name="head")(nn.relu(nn.Dense(32, name="hidden")(x)))


def training(model: nn.Module, loss: Any, images: jax.Array) -> tuple[Any, Any, Any]:
    """The mask of what a model freezes; L-BFGS of the rest, and a step with its line search."""
    frozen = frozen_mask(model, images)
    tx = fz.freeze(optax.lbfgs(), frozen)
    return frozen, tx, jax.jit(fz.train_step(loss, tx, extra_args=["value", "grad", "value_fn"]))


# %%
import argparse

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class Layer(nn.Module):
    """A layer of the stack."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.Dense(x.shape[-1])(nn.relu(nn.LayerNorm()(x))), None


class Stack(nn.Module):
    """Four scanned layers on a frozen embedding."""

    def setup(self) -> None:
        self.embed = Frozen(nn.Dense(64))
        self.layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)()
        self.head = nn.Dense(10)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.head(self.layers(self.embed(images.reshape(len(images), -1)), None)[0])


class Convolutions(nn.Module):
    """A convolutional body in which only the biases train."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        body = nn.Sequential([nn.Conv(16, (3, 3)), nn.relu, nn.Conv(32, (3, 3)), nn.relu])
        return nn.Dense(10, name="head")(Frozen(body, fz.all_except("**/bias"))(images).reshape(len(images), -1))


def train(model: nn.Module, data: Any, steps: int) -> tuple[Any, Any, Any, int]:
    """The mask of frozen parameters, the parameters before and after training, and the bytes of the optimizer state."""
    images, labels = data
    params = before = jax.jit(model.init)(jax.random.key(0), images[:1])["params"]

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = jnp.asarray(model.apply({"params": params}, images))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    frozen, tx, step = training(model, loss, images[:1])
    # Optax's first state of a line search has weakly typed numbers, with which the second step would compile again.
    state = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf.astype(leaf.dtype), tx.init(params)))(params)
    for _ in track(range(steps), type(model).__name__):
        params, state, _ = step(params, state, images, labels)
    return frozen, before, params, sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps of each of the three trainings")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps: got {args.steps}, expected at least 1")
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).reshape(-1, 8, 8, 1).astype(np.float32)
    data = train_test_split(images, labels, train_size=500, random_state=0, stratify=labels)
    images, test_images, labels, test_labels = data

    table = Table("model", "frozen", "trains", "optimizer state", "accuracy", "frozen leaves that moved")
    for model in (Perceptron(), Stack(), Convolutions()):
        frozen, before, after, state_bytes = train(model, (images, labels), args.steps)
        logits = np.asarray(model.apply({"params": after}, test_images))
        accuracy = np.mean(logits.argmax(-1) == test_labels)
        (trains, rest), (_, same) = fz.partition(before, frozen), fz.partition(after, frozen)
        moved = sum(
            a.tobytes() != b.tobytes() for a, b in zip(jax.tree.leaves(rest), jax.tree.leaves(same), strict=True)
        )
        sizes = [f"{sum(leaf.size for leaf in jax.tree.leaves(tree)):,}" for tree in (rest, trains)]
        table.add_row(type(model).__name__, *sizes, f"{state_bytes:,} bytes", f"{accuracy:.1%}", f"{moved}")
    Console().print(table)


if __name__ == "__main__":
    main()
