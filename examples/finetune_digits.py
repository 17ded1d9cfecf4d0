"""Fine-tune a classifier of handwritten digits with its encoder frozen, beside the same run without freezing.

A small convolutional net learns the digits 0 to 4. Its encoder is then frozen by path, and the head learns all ten
digits: the usual case of a trained backbone and a new task. The images are scikit-learn's, which come with its wheel.

Run with ``python examples/finetune_digits.py``.
"""

import argparse
import functools
import pathlib
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
from sklearn.model_selection import train_test_split

import optax_freeze as fz

FROZEN, BATCH = "encoder/**", 64


class Classifier(nn.Module):
    """Images of shape (n, 8, 8, 1) to ten logits."""

    def setup(self) -> None:
        convolutions = (nn.Conv(16, (3, 3)), nn.Conv(32, (3, 3), strides=2), nn.Conv(64, (3, 3)))
        self.encoder = nn.Sequential([layer for convolution in convolutions for layer in (convolution, nn.relu)])
        self.head = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.head(self.encoder(images).max(axis=(1, 2)))


def logits_of(params: Any, images: jax.Array) -> jax.Array:
    return jnp.asarray(Classifier().apply({"params": params}, images))


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels).mean()


@jax.jit
def accuracy(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    return (logits_of(params, images).argmax(-1) == labels).mean()


def train(title: str, params: Any, tx: Any, grad: Any, data: Any, test: Any, epochs: int) -> Any:
    """The parameters, the held-out accuracy after each epoch, and the FLOPs of a step."""

    @jax.jit
    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(grad(params, images, labels), state, params)
        return optax.apply_updates(params, updates), state

    (images, labels), state, curve = data, tx.init(params), [accuracy(params, *test)]
    compiled = step.lower(params, state, images[:BATCH], labels[:BATCH]).compile()
    rng = np.random.default_rng(1)
    for _ in track(range(epochs), title):
        for chosen in rng.permutation(len(labels))[: len(labels) // BATCH * BATCH].reshape(-1, BATCH):
            params, state = compiled(params, state, images[chosen], labels[chosen])
        curve.append(accuracy(params, *test))
    return params, curve, (compiled.cost_analysis() or {})["flops"]


def draw(full: Any, tuned: Any, summary: fz.Summary, picture: pathlib.Path) -> None:
    axes, bars = Figure(figsize=(9, 4), layout="constrained").subplots(1, 2)
    axes.plot(full, label="everything trains", color="tab:gray")
    axes.plot(tuned, label="encoder frozen", color="tab:blue")
    axes.set(xlabel="epoch", ylabel="held-out accuracy", title="From the digits 0-4 to all ten", ylim=(0, 1))
    axes.locator_params("x", integer=True)
    axes.legend(loc="lower right")
    summary.plot(bars).set_title("Bytes")
    axes.figure.savefig(picture, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each of the three trainings")
    parser.add_argument("--picture", type=pathlib.Path, default=pathlib.Path("finetune_digits.png"))
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")
    console, tx = Console(), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))

    pixels, digits = load_digits(return_X_y=True)
    pixels = (pixels / 16.0).reshape(-1, 8, 8, 1).astype(np.float32)
    images, test_images, labels, test_labels = map(np.asarray, train_test_split(pixels, digits, random_state=0))
    data, few = (images, labels), (images[labels < 5], labels[labels < 5])
    run = functools.partial(train, test=(test_images, test_labels), epochs=args.epochs)
    params = Classifier().init(jax.random.key(0), images[:1])["params"]

    base, curve, _ = run("0-4", params, tx, jax.grad(loss), few)
    console.print(summary := fz.summary(base, FROZEN, tx))
    full, full_curve, full_flops = run("0-9, everything trains", base, tx, jax.grad(loss), data)
    tuned, tuned_curve, flops = run("0-9, encoder frozen", base, fz.freeze(tx, FROZEN), fz.grad(loss, FROZEN), data)
    fz.assert_frozen(base, tuned, FROZEN)

    table = Table("", "before", "everything trains", "encoder frozen", title="fine-tuned on all ten digits")
    table.add_row("held-out accuracy", *(f"{accuracies[-1]:.1%}" for accuracies in (curve, full_curve, tuned_curve)))
    table.add_row("optimizer state", "", f"{summary.full_state_bytes:,} bytes", f"{summary.state_bytes:,} bytes")
    table.add_row("compiled step", "", f"{full_flops / 1e6:.1f} MFLOP", f"{flops / 1e6:.1f} MFLOP")
    digests = (np.asarray(fz.fingerprint(params, FROZEN)) for params in (base, full, tuned))
    table.add_row("fingerprint of the encoder", *(digest.tobytes().hex()[:12] for digest in digests))
    console.print(table)
    draw(full_curve, tuned_curve, summary, args.picture)
    console.print(f"no bit of the frozen encoder moved (fz.assert_frozen)\npicture: {args.picture}")


if __name__ == "__main__":
    main()
