"""Fine-tune a classifier of handwritten digits with its encoder frozen, beside the same run without freezing.

A small convolutional net learns the digits 0 to 4. Its encoder is then frozen by path, and the head learns all ten
digits: the usual case of a trained backbone and a new task. A third run does the same with the encoder's features
computed once for each image, not in every epoch. The images are scikit-learn's, which come with its wheel.

Run with ``python examples/finetune_digits.py``.
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
from sklearn.model_selection import train_test_split

import optax_freeze as fz

FROZEN, BATCH = "encoder/**", 64


class Classifier(nn.Module):
    """Images of shape (n, 8, 8, 1) to ten logits."""

    def setup(self) -> None:
        small, middle, large = nn.Conv(16, (3, 3)), nn.Conv(32, (3, 3), strides=2), nn.Conv(64, (3, 3))
        self.encoder = nn.Sequential([small, nn.relu, middle, nn.relu, large, nn.relu])
        self.head = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.head(self.encoder(images).max(axis=(1, 2)))


def logits_of(params: Any, images: jax.Array) -> jax.Array:
    return jnp.asarray(Classifier().apply({"params": params}, images))


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels).mean()


accuracy = jax.jit(lambda params, images, labels: (logits_of(params, images).argmax(-1) == labels).mean())


def train(title: str, params: Any, tx: Any, grad: Any, data: Any, test: Any, epochs: int) -> Any:
    """The parameters, the held-out accuracy after each epoch, the FLOPs of a step, and the seconds."""

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grad(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    state, rng, count, every = tx.init(params), np.random.default_rng(1), len(data[-1]), [params]
    compiled = step.lower(params, state, jax.tree.map(lambda array: array[:BATCH], data)).compile()
    start = time.perf_counter()
    for _ in track(range(epochs), title):
        for chosen in rng.permutation(count)[: count // BATCH * BATCH].reshape(-1, BATCH):
            params, state = compiled(params, state, jax.tree.map(lambda array, i=chosen: array[i], data))
        every.append(jax.block_until_ready(params))
    seconds, curve = time.perf_counter() - start, [accuracy(each, *test) for each in every]
    return params, curve, (compiled.cost_analysis() or {})["flops"], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each training")
    parser.add_argument("--picture", type=pathlib.Path, default=pathlib.Path("finetune_digits.png"))
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")
    console, tx = Console(), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))

    pixels, digits = load_digits(return_X_y=True)
    pixels = (pixels / 16.0).reshape(-1, 8, 8, 1).astype(np.float32)
    images, test_images, labels, test_labels = map(np.asarray, train_test_split(pixels, digits, random_state=0))
    data, few = (images, labels), (images[labels < 5], labels[labels < 5])
    params, rest = Classifier().init(jax.random.key(0), images[:1])["params"], ((test_images, test_labels), args.epochs)
    first = base, *_ = train("0-4", params, tx, jax.grad(loss), few, *rest)
    console.print(summary := fz.summary(base, FROZEN, tx))
    full = train("0-9, everything trains", base, tx, jax.grad(loss), data, *rest)
    tx, once = fz.freeze(tx, FROZEN), fz.precompute(loss, FROZEN, recurring="images", example_axis=0)
    tuned = train("0-9, encoder frozen", base, tx, fz.grad(loss, FROZEN), data, *rest)
    features = jax.tree.map(np.asarray, jax.jit(once.before)(base, *data))
    same = train("0-9, features once", base, tx, fz.grad(once.after, FROZEN), (features, *data), *rest)
    fz.assert_frozen(base, tuned[0], FROZEN)
    equal = jax.tree.all(jax.tree.map(np.array_equal, tuned[0], same[0]))

    names = ["everything trains", "encoder frozen", "features once"]
    table = Table("", "before", *(name.replace(" ", "\n") for name in names), title="fine-tuned on all ten digits")
    trees, curves, flops, seconds = zip(first, full, tuned, same, strict=True)
    table.add_row("held-out accuracy", *(f"{curve[-1]:.1%}" for curve in curves))
    table.add_row("optimizer state", "", f"{summary.full_state_bytes:,} B", *[f"{summary.state_bytes:,} B"] * 2)
    table.add_row("compiled step, MFLOP", "", *(f"{each / 1e6:.1f}" for each in flops[1:]))
    table.add_row("training, seconds", "", *(f"{each:.2f}" for each in seconds[1:]))
    digests = (np.asarray(fz.fingerprint(tree, FROZEN)) for tree in trees)
    table.add_row("fingerprint of the encoder", *(digest.tobytes().hex()[:8] for digest in digests))
    console.print(table)

    axes, bars = Figure(figsize=(9, 4), layout="constrained").subplots(1, 2)
    axes.plot(np.stack(curves[1:], 1), label=names)[-1].set_linestyle("--")
    axes.set(xlabel="epoch", ylabel="held-out accuracy", title="From the digits 0-4 to all ten", ylim=(0, 1))
    axes.locator_params("x", integer=True)
    axes.legend(loc="lower right")
    summary.plot(bars).set_title("Bytes").figure.savefig(args.picture, dpi=150)
    print(f"with features computed once: {'the same parameters, bit for bit' if equal else 'other roundings'}")
    print(f"no bit of the frozen encoder moved (fz.assert_frozen)\npicture: {args.picture}")


if __name__ == "__main__":
    main()
