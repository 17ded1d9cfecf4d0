"""Fine-tune a classifier of handwritten digits with its encoder frozen, beside the same run without freezing.

A small convolutional net learns the digits 0 to 4. Its encoder is then frozen by path, and the head learns all ten
digits: the usual case of a trained backbone and a new task. A third run does the same with the encoder's features
computed once for each image, not in every epoch. The images are scikit-learn's, which come with its wheel.

Run with ``python examples/finetune_digits.py``.
"""

import argparse
import functools
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
    """The parameters, the held-out accuracy after each epoch, the FLOPs of a step and the seconds of all steps."""

    @jax.jit
    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grad(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    state, curve, rng, seconds = tx.init(params), [accuracy(params, *test)], np.random.default_rng(1), 0.0
    compiled = step.lower(params, state, *jax.tree.map(lambda array: array[:BATCH], data)).compile()
    for _ in track(range(epochs), title):
        start, count = time.perf_counter(), len(data[-1])
        for chosen in rng.permutation(count)[: count // BATCH * BATCH].reshape(-1, BATCH):
            params, state = compiled(params, state, *jax.tree.map(lambda array, i=chosen: array[i], data))
        params = jax.block_until_ready(params)
        seconds += time.perf_counter() - start
        curve.append(accuracy(params, *test))
    return params, curve, (compiled.cost_analysis() or {})["flops"], seconds


def draw(full: Any, tuned: Any, once: Any, summary: fz.Summary, picture: pathlib.Path) -> None:
    axes, bars = Figure(figsize=(9, 4), layout="constrained").subplots(1, 2)
    axes.plot(full, label="everything trains", color="tab:gray")
    axes.plot(tuned, label="encoder frozen", color="tab:blue")
    axes.plot(once, "--", label="the same, features computed once", color="tab:orange")
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
    halves = train_test_split(pixels, digits, train_size=21 * BATCH, random_state=0)
    images, test_images, labels, test_labels = map(np.asarray, halves)
    data, few = (images, labels), (images[labels < 5], labels[labels < 5])
    run = functools.partial(train, test=(test_images, test_labels), epochs=args.epochs)
    params = Classifier().init(jax.random.key(0), images[:1])["params"]

    base, curve, *_ = run("0-4", params, tx, jax.grad(loss), few)
    console.print(summary := fz.summary(base, FROZEN, tx))
    full = run("0-9, everything trains", base, tx, jax.grad(loss), data)
    tx = fz.freeze(tx, FROZEN)
    tuned = run("0-9, encoder frozen", base, tx, fz.grad(loss, FROZEN), data)
    fz.assert_frozen(base, tuned[0], FROZEN)

    once = fz.precompute(loss, FROZEN, recurring="images", example_axis=0)
    before = jax.jit(once.before)
    batches = [before(base, *(array[i : i + BATCH] for array in data)) for i in range(0, len(labels), BATCH)]
    features = jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)
    same = run("0-9, features computed once", base, tx, fz.grad(once.after, FROZEN), (features, *data))
    differ = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(abs(a - b).max()), tuned[0], same[0])))

    runs, title = (full, tuned, same), "fine-tuned on all ten digits"
    table = Table("", "before", "everything\ntrains", "encoder\nfrozen", "features\nonce", title=title)
    table.add_row("held-out accuracy", *(f"{accuracies[-1]:.1%}" for accuracies in (curve, *(run[1] for run in runs))))
    sizes = (summary.full_state_bytes, summary.state_bytes, summary.state_bytes)
    table.add_row("optimizer state", "", *(f"{size:,} B" for size in sizes))
    table.add_row("compiled step, MFLOP", "", *(f"{flops / 1e6:.1f}" for _, _, flops, _ in runs))
    table.add_row("seconds of all steps", "", *(f"{seconds:.2f}" for *_, seconds in runs))
    digests = (np.asarray(fz.fingerprint(params, FROZEN)) for params in (base, *(run[0] for run in runs)))
    table.add_row("fingerprint of the encoder", *(digest.tobytes().hex()[:8] for digest in digests))
    console.print(table)
    draw(full[1], tuned[1], same[1], summary, args.picture)
    print("no bit of the frozen encoder moved (fz.assert_frozen)")
    print(f"with features computed once, the trained parameters differ by at most {differ:.1g}")
    print(f"picture: {args.picture}")


if __name__ == "__main__":
    main()
