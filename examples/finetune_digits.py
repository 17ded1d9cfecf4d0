"""Fine-tune a classifier of handwritten digits with its encoder frozen, beside the same run without freezing.

A small convolutional net learns the digits 0 to 4. Its encoder is then frozen by path, and the head learns all ten
digits: the usual case of a trained backbone and a new task. The images are scikit-learn's, which come with its wheel.

Run with ``python examples/finetune_digits.py``; takes half a minute on two cores.
"""

import argparse
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_freeze as fz

FROZEN = "encoder/**"
BATCH = 64


class Encoder(nn.Module):
    """Images of shape (n, 8, 8, 1) to features of shape (n, 64)."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3), name="conv_0")(images))
        x = nn.relu(nn.Conv(32, (3, 3), strides=(2, 2), name="conv_1")(x))
        x = nn.relu(nn.Conv(64, (3, 3), name="conv_2")(x))
        return x.max(axis=(1, 2))


class Classifier(nn.Module):
    """Images to ten logits."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = Encoder(name="encoder")(images)
        x = nn.relu(nn.Dense(64, name="hidden")(x))
        return nn.Dense(10, name="head")(x)


class Split(NamedTuple):
    """Images of shape (n, 8, 8, 1) and labels of shape (n,)."""

    images: np.ndarray
    labels: np.ndarray

    def only(self, digits: range) -> "Split":
        """The images of some digits."""
        keep = np.isin(self.labels, digits)
        return Split(self.images[keep], self.labels[keep])

    def batches(self, epochs: int, seed: int) -> Iterator["Split"]:
        """Shuffled batches of one size, the same for the same seed."""
        rng = np.random.default_rng(seed)
        for _ in range(epochs):
            order = rng.permutation(len(self.labels))
            for start in range(0, len(order) - BATCH + 1, BATCH):
                chosen = order[start : start + BATCH]
                yield Split(self.images[chosen], self.labels[chosen])


def load() -> tuple[Split, Split]:
    """Images to train on and held-out ones."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).reshape(-1, 8, 8, 1).astype(np.float32)
    train, test = train_test_split(np.arange(len(labels)), random_state=0, stratify=labels)
    return Split(images[train], labels[train]), Split(images[test], labels[test])


model = Classifier()


def loss(params: Any, batch: Split) -> jax.Array:
    """Mean cross entropy."""
    logits = model.apply({"params": params}, batch.images)
    return optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), batch.labels).mean()


@jax.jit
def accuracy(params: Any, split: Split) -> jax.Array:
    """The share of images that are classified right."""
    logits = jnp.asarray(model.apply({"params": params}, split.images))
    return (logits.argmax(-1) == split.labels).mean()


def make_step(tx: optax.GradientTransformation, value_and_grad: Callable[..., Any]) -> Any:
    """A jitted step; the only lines that differ between the two runs are its two arguments."""

    def step(params: Any, state: Any, batch: Split) -> tuple[Any, Any, jax.Array]:
        value, grads = value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))


class Run(NamedTuple):
    """What a fine-tuning run came to."""

    params: Any
    curve: list[float]
    state_bytes: int
    flops: float


def train(
    title: str, params: Any, tx: Any, value_and_grad: Any, data: Split, test: Split, epochs: int, progress: Progress
) -> Run:
    """Trains a copy of ``params`` and measures the accuracy after each epoch."""
    params = jax.tree.map(jnp.copy, params)
    state = tx.init(params)
    step = make_step(tx, value_and_grad)
    first = next(data.batches(1, 0))
    flops = step.lower(params, state, first).compile().cost_analysis()["flops"]
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))

    batches = list(data.batches(epochs, seed=1))
    per_epoch = len(batches) // epochs
    curve = [float(accuracy(params, test))]
    for i, batch in enumerate(progress.track(batches, description=title), start=1):
        params, state, _ = step(params, state, batch)
        if i % per_epoch == 0:
            curve.append(float(accuracy(params, test)))
    return Run(params, curve, state_bytes, flops)


def moved_bits(before: Any, after: Any) -> int:
    """How many bits differ between two trees."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return sum(int(np.unpackbits(np.bitwise_xor(view(a), view(b))).sum()) for a, b in pairs)


def view(leaf: jax.Array) -> np.ndarray:
    """The bytes of an array."""
    return np.frombuffer(np.asarray(leaf).tobytes(), np.uint8)


def draw(frozen: Run, full: Run, picture: pathlib.Path) -> None:
    """The two learning curves."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(full.curve, label="everything trains", color="tab:gray")
    axes.plot(frozen.curve, label="encoder frozen", color="tab:blue")
    axes.set(xlabel="epoch", ylabel="held-out accuracy", title="From the digits 0-4 to all ten", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each of the three trainings")
    parser.add_argument("--picture", type=pathlib.Path, default=pathlib.Path("finetune_digits.png"))
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")
    console = Console()

    data, test = load()
    params = model.init(jax.random.key(0), data.images[:1])["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))

    with Progress(console=console) as progress:
        digits = range(5)
        base = train(
            "train on 0-4",
            params,
            tx,
            jax.value_and_grad(loss),
            data.only(digits),
            test.only(digits),
            args.epochs,
            progress,
        )
        console.print(fz.summary(base.params, FROZEN, tx))
        full = train(
            "fine-tune, everything", base.params, tx, jax.value_and_grad(loss), data, test, args.epochs, progress
        )
        frozen = train(
            "fine-tune, encoder frozen",
            base.params,
            fz.freeze(tx, FROZEN),
            fz.value_and_grad(loss, FROZEN),
            data,
            test,
            args.epochs,
            progress,
        )

    table = Table("", "everything trains", "encoder frozen", title="fine-tuned on all ten digits")
    table.add_row("held-out accuracy before", f"{full.curve[0]:.1%}", f"{frozen.curve[0]:.1%}")
    table.add_row("held-out accuracy after", f"{full.curve[-1]:.1%}", f"{frozen.curve[-1]:.1%}")
    table.add_row("optimizer state", f"{full.state_bytes:,} bytes", f"{frozen.state_bytes:,} bytes")
    table.add_row("compiled step", f"{full.flops / 1e6:.1f} MFLOP", f"{frozen.flops / 1e6:.1f} MFLOP")
    moved = [moved_bits(base.params["encoder"], run.params["encoder"]) for run in (full, frozen)]
    table.add_row("encoder bits that moved", f"{moved[0]:,}", f"{moved[1]:,}")
    console.print(table)

    draw(frozen, full, args.picture)
    console.print(f"learning curves: {args.picture}")


if __name__ == "__main__":
    main()
