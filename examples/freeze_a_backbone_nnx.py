"""Freeze a sharded NNX backbone with BatchNorm: its parameters only, or its statistics as well.

The backbone learns to tell the handwritten digits 0 to 4 apart. Then a new head learns all ten
digits on it, in three ways: the backbone trains as well; ``fnnx.freeze`` freezes its parameters,
but its running statistics still move; ``fnnx.Frozen`` freezes both. Kernels, their moments and the
batches are divided over the devices.

Run with ``python examples/freeze_a_backbone_nnx.py``; ``--epochs 4`` for a quick look. For eight
devices on a CPU, set ``XLA_FLAGS=--xla_force_host_platform_device_count=8 NPROC=32``.
"""

from typing import Any

import jax
import optax
from flax import nnx

import optax_freeze as fz
import optax_freeze.nnx as fnnx

freeze = lambda backbone: fnnx.freeze(backbone, True)
WAYS = {"everything trains": lambda x: x, "fnnx.freeze": freeze, "fnnx.Frozen": fnnx.Frozen}


def optimizer_of(model: nnx.Module) -> nnx.Optimizer:
    """AdamW of the trainable parameters, the ``nnx.Param``s; its state is sharded as they are."""
    params, tx = nnx.state(model, nnx.Param), optax.adamw(3e-3)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state = jax.jit(tx.init, out_shardings=fz.state_shardings(tx, params))(params)
    nnx.update(optimizer.opt_state, nnx.state(state))
    return optimizer


@nnx.jit
def step(model: Any, optimizer: nnx.Optimizer, images: Any, labels: Any) -> None:
    """A training step; it is the same in all three ways."""

    def loss(model: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    optimizer.update(model, nnx.grad(loss)(model))


# %%
import argparse

import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH = 64
MESH = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))  # 32 channels divide over it
KERNEL = nnx.initializers.lecun_normal()
CHANNELS = nnx.with_partitioning(KERNEL, (None, None, None, "data"), mesh=MESH)
FEATURES = nnx.with_partitioning(KERNEL, ("data", None), mesh=MESH)


class Backbone(nnx.Module):
    """Images of shape (n, 8, 8, 1) to features of shape (n, 64)."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv_0 = nnx.Conv(1, 32, (3, 3), kernel_init=CHANNELS, rngs=rngs)
        self.norm_0 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.conv_1 = nnx.Conv(32, 64, (3, 3), strides=2, kernel_init=CHANNELS, rngs=rngs)
        self.norm_1 = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm_0(self.conv_0(images)))
        return nnx.relu(self.norm_1(self.conv_1(x))).max(axis=(1, 2))


class Classifier(nnx.Module):
    """A backbone and a new head."""

    def __init__(self, backbone: nnx.Module, rngs: nnx.Rngs):
        self.backbone = backbone
        self.head = nnx.Linear(64, 10, kernel_init=FEATURES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.head(self.backbone(images))


def train(model: Classifier, images: np.ndarray, labels: np.ndarray, epochs: int) -> tuple[int, int]:
    """Trains in place; returns the bytes of the optimizer state: of all devices, and of the first."""
    model.train()
    optimizer, rng, batches = optimizer_of(model), np.random.default_rng(0), NamedSharding(MESH, PartitionSpec("data"))
    for _ in range(epochs):
        for chosen in rng.permutation(len(labels))[: len(labels) // BATCH * BATCH].reshape(-1, BATCH):
            step(model, optimizer, *jax.device_put((images[chosen], labels[chosen]), batches))
    leaves = jax.tree.leaves(nnx.state(optimizer, nnx.OptState))
    return sum(leaf.nbytes for leaf in leaves), sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def accuracy(model: Classifier, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images that are classified correctly."""
    model.eval()
    return float((nnx.jit(lambda model, x: model(x))(model, images).argmax(-1) == labels).mean())


def moved_bits(before: nnx.Module, after: nnx.Module, kind: Any) -> int:
    """How many bits of the variables of a type differ between two modules."""
    pairs = zip(*(jax.tree.leaves(nnx.state(module, kind)) for module in (before, after)), strict=True)
    return sum(int(jnp.bitwise_count(a.view(jnp.uint32) ^ b.view(jnp.uint32)).sum()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, choices=range(1, 1001), metavar="N", help="1 to 1000")
    epochs = parser.parse_args().epochs

    pixels, digits = map(np.asarray, load_digits(return_X_y=True))
    pixels = (pixels / 16.0).reshape(-1, 8, 8, 1).astype(np.float32)
    chosen, held_out = train_test_split(np.arange(len(digits)), random_state=0, stratify=digits)
    images, labels = pixels[chosen], digits[chosen]
    base = Classifier(Backbone(nnx.Rngs(0)), nnx.Rngs(1))
    train(base, images[labels < 5], labels[labels < 5], epochs)
    before = base.backbone

    table = Table("", "accuracy", "optimizer state", "of a device", "parameter bits moved", "statistic bits moved")
    table.title = f"a new head for all ten digits, on a backbone that knows five; devices: {MESH.size}"
    for title, wrap in WAYS.items():
        after = nnx.clone(before)
        model = Classifier(wrap(after), nnx.Rngs(2))
        sizes = train(model, images, labels, epochs)
        moved = [moved_bits(before, fnnx.thaw(after), kind) for kind in (nnx.Param, nnx.BatchStat)]
        right = accuracy(model, pixels[held_out], digits[held_out])
        table.add_row(title, f"{right:.1%}", *(f"{size:,} bytes" for size in sizes), *(f"{bits:,}" for bits in moved))
    Console().print(table)


if __name__ == "__main__":
    main()
