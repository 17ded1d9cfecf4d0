"""Find the leaks of an optimizer that should freeze the encoder of an Equinox model, and fix them.

The optimizer is a common one: a chain that clips, sets the gradients of frozen parameters to zero,
and calls AdamW. It looks correct and trains well, but it leaks in four ways. ``fz.audit`` finds
them by running the chain on made-up gradients, without the model or the data. Both optimizers then
train on scikit-learn's digits, and the bits of the encoder are compared.

Run with ``python examples/audit_a_training_script.py``.
"""

from typing import Any

import jax
import optax

import optax_freeze as fz

FROZEN = "encoder"  # the field of the module


def as_found(model: Any) -> optax.GradientTransformation:
    """An optimizer with four leaks."""
    frozen = jax.tree.map_with_path(lambda path, _: path[0].name == FROZEN, model)
    return optax.chain(
        optax.clip_by_global_norm(1.0),  # 1: the norm includes frozen gradients
        optax.masked(optax.set_to_zero(), frozen),  # too early: AdamW still moves frozen parameters
        optax.adamw(3e-3, weight_decay=1e-2),  # 2, 3, 4: has moments for it, moves it, decays it
    )


def fixed() -> optax.GradientTransformation:
    """The same steps, inside ``fz.freeze``."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=1e-2))
    return fz.freeze(tx, FROZEN)


def passes(tx: optax.GradientTransformation, model: Any) -> bool:
    """Prints each leak with its likely cause; returns whether there is none."""
    print(audit := fz.audit(model, FROZEN, tx))
    return bool(audit)


# %%
import argparse

import equinox as eqx
import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH = 64


class Classifier(eqx.Module):
    """An encoder of two layers and a head: an image of shape (64,) to ten logits."""

    encoder: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        first, second, head = jax.random.split(key, 3)
        self.encoder = [eqx.nn.Linear(64, 128, key=first), eqx.nn.Linear(128, 64, key=second)]
        self.head = eqx.nn.Linear(64, 10, key=head)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = image
        for layer in self.encoder:
            x = jax.nn.relu(layer(x))
        return self.head(x)


def loss(model: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels).mean()


def train(model: Any, tx: optax.GradientTransformation, data: Any, epochs: int) -> tuple[Any, Any]:
    """The loop of the script; the same for both optimizers."""
    images, _, labels, _ = data

    @eqx.filter_jit
    def step(model: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(eqx.filter_grad(loss)(model, images, labels), state, model)
        return eqx.apply_updates(model, updates), state

    state = tx.init(model)
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        order = rng.permutation(len(labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            model, state = step(model, state, images[chosen], labels[chosen])
    return model, state


def bits(before: Any, after: Any) -> str:
    """Whether the encoder kept its bits, or how many leaves moved."""
    try:
        fz.assert_frozen(before, after, FROZEN)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return "the same"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")

    images, labels = load_digits(return_X_y=True)
    data: Any = train_test_split((images / 16.0).astype(np.float32), labels, random_state=0, stratify=labels)
    model = Classifier(jax.random.key(0))

    columns = []
    for name, tx in (("as found", as_found(model)), ("fixed", fixed())):
        print(f"The optimizer, {name}:")
        audit = "passes" if passes(tx, model) else "leaks"
        after, state = train(model, tx, data, args.epochs)
        accuracy = np.mean(np.asarray(jax.vmap(after)(data[1])).argmax(-1) == data[3])
        state_bytes = f"{sum(leaf.nbytes for leaf in jax.tree.leaves(state)):,} bytes"
        columns.append((audit, bits(model, after), state_bytes, f"{accuracy:.1%}"))

    table = Table("", "as found", "fixed", title=f"frozen: {FROZEN!r}")
    for cells in zip(("audit", "bits of the encoder", "optimizer state", "accuracy"), *columns, strict=True):
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
