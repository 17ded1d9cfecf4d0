"""Put a new head on a trained Linen backbone with BatchNorm, and freeze it where it is built.

A small convolutional net learns scikit-learn's digits 0 to 4. Its backbone then gets a head for all
ten digits, and only the head trains, in two ways: with ``Frozen`` around the backbone, and with the
parameters frozen by the optimizer alone. In the second, the running statistics still move, and with
them the backbone's features of the old digits.

Run with ``python examples/freeze_a_backbone_linen.py``.
"""

from typing import Any

import flax.linen as nn
import jax
import optax

import optax_freeze as fz
from optax_freeze.linen import Frozen, frozen_mask

TX = optax.adamw(3e-3)


def freeze_backbone(model: Any, images: Any) -> tuple[nn.Module, Any]:
    """The model with a frozen backbone, parameters and statistics, and the mask of parameters."""
    model = model.clone(backbone=Frozen(model.backbone))
    return model, frozen_mask(model, images, train=True)


def training(loss: Any, frozen: Any) -> tuple[Any, Any]:
    """An optimizer and a step for ``loss(params, stats, *batch)``, which returns new statistics."""
    tx = fz.freeze(TX, frozen)
    return tx, jax.jit(fz.train_step(loss, tx, has_aux=True))


# %%
import argparse

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH = 64


class Backbone(nn.Module):
    """Images of shape (n, 8, 8, 1) to features of shape (n, 32)."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = images
        for i, features in enumerate((16, 32)):
            x = nn.Conv(features, (3, 3), name=f"conv_{i}")(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name=f"norm_{i}")(x))
        return x.max(axis=(1, 2))


class Classifier(nn.Module):
    """A backbone and a head."""

    backbone: nn.Module
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        return nn.Dense(self.classes, name="head")(self.backbone(images, train))


def train(model: nn.Module, variables: Any, frozen: Any, images: Any, labels: Any, epochs: int, title: str) -> Any:
    """The variables after training; the loop is the same with a frozen backbone and without."""
    params, stats = variables["params"], variables["batch_stats"]

    def loss(params: Any, stats: Any, images: jax.Array, labels: jax.Array) -> Any:
        variables = {"params": params, "batch_stats": stats}
        logits, moved = model.apply(variables, images, train=True, mutable="batch_stats")
        entropy = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), labels)
        return entropy.mean(), moved["batch_stats"]

    tx, step = training(loss, frozen)
    state, rng = tx.init(params), np.random.default_rng(0)
    for _ in track(range(epochs), title):
        for chosen in rng.permutation(len(labels))[: len(labels) // BATCH * BATCH].reshape(-1, BATCH):
            params, state, (_, stats) = step(params, state, stats, images[chosen], labels[chosen])
    return {"params": params, "batch_stats": stats}


def bits(before: Any, after: Any) -> str:
    """Whether the backbone kept its bits."""
    return "the same" if (fz.fingerprint(before, "backbone") == fz.fingerprint(after, "backbone")).all() else "moved"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15, help="epochs of each of the three trainings")
    epochs = parser.parse_args().epochs
    if epochs < 1:
        parser.error(f"--epochs: got {epochs}, expected at least 1")

    pixels, digits = load_digits(return_X_y=True)
    pixels = (pixels / 16.0).reshape(-1, 8, 8, 1).astype(np.float32)
    images, held_out, labels, held_out_labels = map(np.asarray, train_test_split(pixels, digits, random_state=0))

    five, few = Classifier(Backbone(), classes=5), labels < 5
    start = five.init(jax.random.key(0), images[:1], train=False)
    base = train(five, start, False, images[few], labels[few], epochs, "0-4, everything")
    old_logits = np.asarray(five.apply(base, held_out, train=False))

    columns = {}
    ten = Classifier(Backbone(), classes=10)
    ways = {"Frozen(backbone)": freeze_backbone(ten, images[:1]), "optimizer alone": (ten, "backbone")}
    for title, (model, frozen) in ways.items():
        variables = model.init(jax.random.key(1), images[:1], train=False)
        variables = {name: {**variables[name], "backbone": base[name]["backbone"]} for name in variables}
        after = train(model, variables, frozen, images, labels, epochs, f"0-9, {title}")
        right = np.asarray(model.apply(after, held_out, train=False)).argmax(-1) == held_out_labels
        drifted = five.apply({**base, "batch_stats": after["batch_stats"]}, held_out, train=False)
        columns[title] = {
            "held-out accuracy on all ten": f"{right.mean():.1%}",
            "optimizer state": f"{fz.summary(variables['params'], frozen, TX).state_bytes:,} bytes",
            "parameters of the backbone": bits(variables["params"], after["params"]),
            "statistics of the backbone": bits(variables["batch_stats"], after["batch_stats"]),
            "old head: largest change of a logit": f"{np.abs(np.asarray(drifted) - old_logits).max():.3f}",
        }
    table = Table("", *columns, title="a new head for all ten digits")
    for name in columns["optimizer alone"]:
        table.add_row(name, *(column[name] for column in columns.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
