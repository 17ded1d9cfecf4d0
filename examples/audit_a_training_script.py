"""Find the leaks of an optimizer that is meant to freeze an encoder, and fix them.

The optimizer is a common one: a chain that clips, sets the gradients of frozen parameters to zero, and calls AdamW. It
looks correct and trains well, but it leaks in four ways. ``fz.audit`` finds them by running the chain on made-up
gradients, without the model or the data. Both optimizers then train on scikit-learn's digits, and the bits of the
encoder are compared.

Run with ``python examples/audit_a_training_script.py``.
"""

from typing import Any

import jax
import optax

import optax_freeze as fz

FROZEN = "encoder"


def as_found(params: Any) -> optax.GradientTransformation:
    """An optimizer with four leaks."""
    frozen = {"encoder": jax.tree.map(lambda _: True, params["encoder"]), "head": False}
    return optax.chain(
        optax.clip_by_global_norm(1.0),  # 1: the norm includes frozen gradients
        optax.masked(optax.set_to_zero(), frozen),  # too early: AdamW still moves frozen parameters
        optax.adamw(3e-3, weight_decay=1e-2),  # 2, 3 and 4: holds moments for the encoder, moves it by them, decays it
    )


def fixed() -> optax.GradientTransformation:
    """The same steps, inside ``fz.freeze``."""
    return fz.freeze(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=1e-2)), FROZEN)


def passes(tx: optax.GradientTransformation, params: Any) -> bool:
    """Prints each leak with its likely cause; returns whether there is none."""
    print(audit := fz.audit(params, FROZEN, tx))
    return bool(audit)


# %%
import argparse

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH = 64


def init(key: jax.Array) -> Any:
    """An encoder of two layers and a head."""
    shapes = zip(jax.random.split(key, 3), ((64, 128), (128, 64), (64, 10)), strict=True)
    first, second, head = (
        {"kernel": jax.random.normal(k, (n, m)) * np.sqrt(2 / n), "bias": jnp.zeros(m)} for k, (n, m) in shapes
    )
    return {"encoder": {"layer_0": first, "layer_1": second}, "head": head}


def logits_of(params: Any, images: jax.Array) -> jax.Array:
    """Images of shape (n, 64) to ten logits."""
    x = images
    for layer in params["encoder"].values():
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ params["head"]["kernel"] + params["head"]["bias"]


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels).mean()


def train(params: Any, tx: optax.GradientTransformation, data: Any, epochs: int) -> tuple[Any, Any]:
    """The loop of the script; the same for both optimizers."""
    images, _, labels, _ = data

    @jax.jit
    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(loss)(params, images, labels), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        order = rng.permutation(len(labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            params, state = step(params, state, images[chosen], labels[chosen])
    return params, state


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
    params = init(jax.random.key(0))

    columns = []
    for name, tx in (("as found", as_found(params)), ("fixed", fixed())):
        print(f"The optimizer, {name}:")
        audit = "passes" if passes(tx, params) else "leaks"
        after, state = train(params, tx, data, args.epochs)
        accuracy = np.mean(np.asarray(logits_of(after, data[1])).argmax(-1) == data[3])
        state_bytes = f"{sum(leaf.nbytes for leaf in jax.tree.leaves(state)):,} bytes"
        columns.append((audit, bits(params, after), state_bytes, f"{accuracy:.1%}"))

    table = Table("", "as found", "fixed", title=f"frozen: {FROZEN!r}")
    for cells in zip(("audit", "bits of the encoder", "optimizer state", "accuracy"), *columns, strict=True):
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
