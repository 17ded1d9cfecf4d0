"""Train low-rank adapters on a frozen base of 8-bit integers, in one tree of parameters.

A small net learns scikit-learn's digits. Its kernels are then rounded to int8, with a scale for
each column, and the images are rotated by 90 degrees: the base fails on them. Adapters of rank 4
beside the frozen base learn the rotated images. The integers have neither gradients nor optimizer
state, and the same training loop trained the base.

Run with ``python examples/lora_and_frozen_base.py``.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_freeze as fz

RANK, FROZEN = 4, fz.all_except("**/adapter_in", "**/adapter_out")
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=1e-3))


def quantized(layer: Any, key: jax.Array) -> Any:
    """A layer with an int8 kernel, a scale a column, and an adapter that adds zero at first."""
    (n, m), scale = layer["kernel"].shape, jnp.abs(layer["kernel"]).max(axis=0) / 127
    return {
        "kernel": jnp.round(layer["kernel"] / scale).astype(jnp.int8),
        "scale": scale,
        "bias": layer["bias"].astype(jnp.bfloat16),
        "adapter_in": jax.random.normal(key, (n, RANK)) * n**-0.5,
        "adapter_out": jnp.zeros((RANK, m)),
    }


def training(loss: Any, frozen: Any) -> tuple[Any, Any]:
    """An optimizer with state for the trainable parameters only, and its training step."""
    tx = fz.freeze(TX, frozen)
    return tx, jax.jit(fz.train_step(loss, tx))


# %%
import argparse

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SIZES, BATCH = (64, 256, 256, 10), 64


def init(key: jax.Array) -> Any:
    """A multilayer perceptron."""
    return {
        f"layer_{i}": {"kernel": jax.random.normal(k, (n, m)) * np.sqrt(2 / n), "bias": jnp.zeros(m)}
        for i, (k, n, m) in enumerate(zip(jax.random.split(key, 3), SIZES[:-1], SIZES[1:], strict=True))
    }


def logits_of(params: Any, images: Any) -> jax.Array:
    """Images of shape (n, 64) to ten logits, with adapters or without."""
    x = images
    for i, layer in enumerate(params.values()):
        x = jax.nn.relu(x) if i else x
        y = x @ layer["kernel"].astype(jnp.float32) * layer.get("scale", 1.0) + layer["bias"]
        x = y + x @ layer["adapter_in"] @ layer["adapter_out"] if "adapter_in" in layer else y
    return x


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels).mean()


def train(title: str, params: Any, frozen: Any, images: Any, labels: Any, epochs: int) -> Any:
    """The parameters after training those that are not frozen."""
    tx, step = training(loss, frozen)
    state, rng = tx.init(params), np.random.default_rng(0)
    for _ in track(range(epochs), title):
        for chosen in rng.permutation(len(labels))[: len(labels) // BATCH * BATCH].reshape(-1, BATCH):
            params, state, _ = step(params, state, images[chosen], labels[chosen])
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each of the two trainings")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")
    console = Console()

    pixels, digits = load_digits(return_X_y=True)
    pixels = (pixels / 16.0).astype(np.float32)
    images, held_out, labels, held_out_labels = map(np.asarray, train_test_split(pixels, digits, random_state=0))
    rotated, held_out_rotated = (np.rot90(x.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64) for x in (images, held_out))

    dense = train("the base, upright", init(jax.random.key(0)), False, images, labels, args.epochs)
    keys = jax.random.split(jax.random.key(1), len(dense))
    base = {name: quantized(dense[name], key) for name, key in zip(dense, keys, strict=True)}
    console.print(fz.summary(base, FROZEN, TX))
    try:
        jax.grad(loss)(base, rotated, labels)
    except TypeError as error:
        console.print(f"jax.grad of all parameters refuses: {error}", style="red", highlight=False)
    tuned = train("the adapters, rotated", base, FROZEN, rotated, labels, args.epochs)
    fz.assert_frozen(base, tuned, FROZEN)

    table = Table("held-out accuracy", "upright", "rotated by 90 degrees")
    for name, params in {"float32": dense, "int8 alone": base, "int8 and adapters": tuned}.items():
        right = (np.asarray(logits_of(params, x)).argmax(-1) == held_out_labels for x in (held_out, held_out_rotated))
        table.add_row(name, *(f"{hits.mean():.1%}" for hits in right))
    console.print(table)
    digests = (np.asarray(fz.fingerprint(params, FROZEN)).tobytes().hex()[:12] for params in (base, tuned))
    console.print(
        f"fingerprint of the base: {next(digests)} before, {next(digests)} after (and fz.assert_frozen passes)"
    )


if __name__ == "__main__":
    main()
