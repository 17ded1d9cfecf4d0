"""Train a few single weights of a net and freeze the others at their initial values.

A net for scikit-learn's digits trains densely. The weights that moved most are its winning ticket:
the net starts again from the same initial values, and only these weights train. The others are
frozen at their initial values, not at zero, and the optimizer has state for the ticket only. For
comparison, as many randomly chosen weights train.

Run with ``python examples/lottery_ticket.py``; it draws ``lottery_ticket.png``.
"""

from typing import Any

import jax
import numpy as np
import optax

import optax_freeze as fz


def all_but_largest(scores: Any, share: float) -> Any:
    """A mask for each leaf: frozen are all elements but the share with the net's largest scores."""
    flat = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(scores)])
    threshold = np.sort(flat)[-max(1, round(share * flat.size))]
    small = lambda leaf: np.asarray(leaf) < threshold
    return jax.tree.map(lambda leaf: fz.elements(small(leaf), compact=True), scores)


def training(loss: Any, frozen: Any) -> tuple[Any, Any]:
    """An optimizer with state for the trainable elements only, and its training step."""
    tx = fz.freeze(optax.adam(3e-3), frozen)  # its state has the masks, as arguments of the step
    return tx, jax.jit(fz.train_step(loss, tx))


# %%
import argparse

import jax.numpy as jnp
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SIZES, BATCH, SHARES = (64, 128, 64, 10), 64, (0.3, 0.1, 0.03, 0.01)


def init(key: jax.Array) -> Any:
    """A multilayer perceptron."""
    return {
        f"layer_{i}": {"kernel": jax.random.normal(k, (a, b)) * np.sqrt(2 / a), "bias": jnp.zeros(b)}
        for i, (k, a, b) in enumerate(zip(jax.random.split(key, 3), SIZES[:-1], SIZES[1:], strict=True))
    }


def logits_of(params: Any, images: jax.Array) -> jax.Array:
    """Images of shape (n, 64) to ten logits."""
    x = images
    for i in range(len(SIZES) - 1):
        x = (jax.nn.relu(x) if i else x) @ params[f"layer_{i}"]["kernel"] + params[f"layer_{i}"]["bias"]
    return x


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels).mean()


def train(params: Any, frozen: Any, data: Any, epochs: int) -> tuple[Any, float, str]:
    """The parameters after training, the held-out accuracy, and the bytes of the moments and of the masks."""
    images, test_images, labels, test_labels = data
    tx, step = training(loss, frozen)
    state, rng = jax.jit(tx.init)(params), np.random.default_rng(0)
    sizes = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(state) if (leaf.dtype == bool) == mask) for mask in (False, True)
    ]
    for _ in range(epochs):
        for chosen in rng.permutation(len(labels))[: len(labels) // BATCH * BATCH].reshape(-1, BATCH):
            params, state, _ = step(params, state, images[chosen], labels[chosen])
    accuracy = float((logits_of(params, test_images).argmax(-1) == test_labels).mean())
    return params, accuracy, " + ".join(f"{size:,}" for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each training")
    parser.add_argument("--picture", default="lottery_ticket.png")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")
    console = Console()

    pixels, digits = load_digits(return_X_y=True)
    data = train_test_split(pixels.astype(np.float32) / 16, digits, random_state=0, stratify=digits)
    params = init(jax.random.key(0))
    dense, accuracy, state = train(params, False, data, args.epochs)
    moved = jax.tree.map(lambda a, b: jnp.abs(a - b), dense, params)
    rng = np.random.default_rng(0)
    noise = jax.tree.map(lambda leaf: rng.random(leaf.shape), params)

    table = Table("trainable weights", "most moved", "at random", "moments + masks, bytes", title="held-out accuracy")
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    table.add_row(f"{total:,} (100 %)", f"{accuracy:.1%}", f"{accuracy:.1%}", state)
    curves = {"most moved": [accuracy], "at random": [accuracy]}
    for share in track(SHARES, "tickets"):
        for name, scores in {"at random": noise, "most moved": moved}.items():
            mask = all_but_largest(scores, share)
            trained, accuracy, state = train(params, mask, data, args.epochs)
            fz.assert_frozen(params, trained, mask)
            curves[name].append(accuracy)
        cells = (f"{curve[-1]:.1%}" for curve in curves.values())
        table.add_row(f"{round(share * total):,} ({share:.1%})", *cells, state)
    console.print(fz.summary(params, all_but_largest(moved, 0.1)))
    console.print(table)
    console.print("no frozen weight moved (fz.assert_frozen, after each training)")

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    for name, curve in curves.items():
        axes.plot([1, *SHARES], curve, ".-", label=name)
    axes.set(xscale="log", xlabel="trainable share of the weights", ylabel="held-out accuracy")
    axes.set_xticks([1, *SHARES], [f"{share:.0%}" for share in (1, *SHARES)])
    axes.legend(title="weights chosen")
    figure.savefig(args.picture, dpi=100)


if __name__ == "__main__":
    main()
