"""Put a new head on a trained Flax Linen backbone with batch normalisation, and freeze the backbone where it is built.

A small convolutional net learns scikit-learn's digits 0 to 4. Its backbone then gets a head for all ten digits, and
only the head trains: once with ``Frozen`` around the backbone, and once with the parameters frozen by the optimizer
alone, where the running statistics go on moving, and with them what the backbone says of the old digits.

Run with ``python examples/freeze_a_backbone_linen.py``; takes half a minute on two cores.
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_freeze as fz
from optax_freeze.linen import Frozen, frozen_mask

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
    """A backbone, frozen or not, and a head: the training below knows nothing of either."""

    backbone: nn.Module
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        return nn.Dense(self.classes, name="head")(self.backbone(images, train))


def train(model: nn.Module, variables: Any, frozen: Any, data: Any, epochs: int, title: str) -> Any:
    """The variables after training with AdamW what is not frozen, and the bytes of the optimizer's state."""
    params, stats = variables["params"], variables["batch_stats"]
    tx = fz.freeze(optax.adamw(3e-3), frozen)
    images, labels = data

    @jax.jit
    def step(params: Any, stats: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            variables = {"params": params, "batch_stats": stats}
            logits, moved = model.apply(variables, images, train=True, mutable=["batch_stats"])
            entropy = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), labels)
            return entropy.mean(), moved["batch_stats"]

        (_, stats), grads = fz.value_and_grad(loss, frozen, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), stats, state

    state = tx.init(params)
    rng = np.random.default_rng(0)
    for _ in track(range(epochs), title):
        for chosen in rng.permutation(len(labels))[: len(labels) // BATCH * BATCH].reshape(-1, BATCH):
            params, stats, state = step(params, stats, state, images[chosen], labels[chosen])
    return {"params": params, "batch_stats": stats}, sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def moved_bits(before: Any, after: Any) -> int:
    """How many bits of the backbone differ between two trees."""
    pairs = zip(jax.tree.leaves(before["backbone"]), jax.tree.leaves(after["backbone"]), strict=True)
    return sum(int(np.unpackbits(np.asarray(a).view(np.uint8) ^ np.asarray(b).view(np.uint8)).sum()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15, help="epochs of each of the three trainings")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).reshape(-1, 8, 8, 1).astype(np.float32)
    parts = train_test_split(images, labels, random_state=0, stratify=labels)
    images, test_images, labels, test_labels = map(np.asarray, parts)

    five = Classifier(Backbone(), classes=5)
    few = labels < 5
    start = five.init(jax.random.key(0), images[:1], train=False)
    base, _ = train(five, start, False, (images[few], labels[few]), args.epochs, "0-4, everything")

    table = Table("", "Frozen(backbone)", "optimizer alone", title="a new head for all ten digits")
    columns = []
    for backbone, title in ((Frozen(Backbone()), "0-9, Frozen"), (Backbone(), "0-9, optimizer alone")):
        model = Classifier(backbone, classes=10)
        variables = model.init(jax.random.key(1), images[:1], train=False)
        variables = {name: {**variables[name], "backbone": base[name]["backbone"]} for name in variables}
        frozen = frozen_mask(model, images[:1], train=True) if isinstance(backbone, Frozen) else "backbone"
        after, state_bytes = train(model, variables, frozen, (images, labels), args.epochs, title)
        logits = np.asarray(model.apply(after, test_images, train=False))
        accuracy = (logits.argmax(-1) == test_labels).mean()
        drifted = five.apply({**base, "batch_stats": after["batch_stats"]}, test_images, train=False)
        change = np.abs(np.asarray(drifted) - np.asarray(five.apply(base, test_images, train=False))).max()
        moved = [f"{moved_bits(variables[name], after[name]):,}" for name in ("params", "batch_stats")]
        columns.append([f"{accuracy:.1%}", f"{state_bytes:,} bytes", *moved, f"{change:.3f}"])
    rows = (
        "held-out accuracy on all ten",
        "optimizer state",
        "backbone parameters: bits moved",
        "backbone statistics: bits moved",
        "old head: largest change of a logit",
    )
    for cells in zip(rows, *columns, strict=True):
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
