"""Linen models with a wrapped backbone, compared with the same models with ``stop_gradient`` written by hand.

A training step of AdamW on the head, on top of eight convolutions with batch normalization or an 8-layer transformer,
compiled for one TPU v5e chip: FLOPs and temporary bytes, in brackets the ratio to the first row.

Run with ``python tests/benchmarks/flax_linen.py``.
"""

from collections.abc import Callable
from typing import Any

import measure  # first: it sets up the TPU compiler

import flax.linen as nn  # isort: skip
import jax
import jax.numpy as jnp
import optax
from rich.table import Table

import optax_freeze as fz
from optax_freeze.linen import Frozen, frozen_mask


class Convolutions(nn.Module):
    """Eight convolutions with batch normalisation; images of shape (n, 32, 32, 3)."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for i in range(8):
            x = nn.Conv(64, (3, 3), strides=2 if i % 4 == 3 else 1)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return x.mean(axis=(1, 2))


class Transformer(nn.Module):
    """Eight pre-norm blocks; tokens of shape (n, 128)."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Embed(4096, 256)(x)
        for _ in range(8):
            x = x + nn.MultiHeadDotProductAttention(8)(nn.LayerNorm()(x))
            x = x + nn.Dense(256)(nn.gelu(nn.Dense(1024)(nn.LayerNorm()(x))))
        return x.mean(axis=1)


class Classifier(nn.Module):
    """A backbone and a head."""

    backbone: nn.Module

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return nn.Dense(100, name="head")(self.backbone(x, train))


Loss = Callable[[Any, Any, jax.Array], jax.Array]


def loss_of(model: nn.Module, *, train: bool, by_hand: bool = False) -> Loss:
    """A loss function of the parameters, the batch statistics and a batch."""

    def loss(params: Any, stats: Any, x: jax.Array) -> jax.Array:
        if by_hand:
            params = {**params, "backbone": jax.lax.stop_gradient(params["backbone"])}
        logits, _ = model.apply({"params": params, **stats}, x, train, mutable=["batch_stats"])
        return jnp.mean(jax.nn.logsumexp(jnp.asarray(logits), axis=-1))

    return loss


def rows(name: str, backbone: nn.Module, x: jax.ShapeDtypeStruct, table: Table) -> None:
    """Adds the rows of one model to the table."""
    table.add_row(f"[bold]{name}")
    bare, wrapped = Classifier(backbone), Classifier(Frozen(backbone))
    variables = jax.eval_shape(lambda x: bare.init(jax.random.key(0), x, train=False), x)
    params, stats = variables["params"], {key: value for key, value in variables.items() if key != "params"}
    mask = frozen_mask(wrapped, x, train=True)
    tx = fz.freeze(optax.adamw(1e-3), mask)
    cases = {
        "stop_gradient by hand, stored statistics": (bare, loss_of(bare, train=False, by_hand=True)),
        "linen.Frozen(backbone)": (wrapped, loss_of(wrapped, train=True)),
        "nothing frozen": (bare, loss_of(bare, train=False)),
    }
    *_, (_, plain) = cases.values()
    trained = {
        case: measure.stepping(jax.value_and_grad(loss), tx if loss is not plain else optax.adamw(1e-3))
        for case, (_, loss) in cases.items()
    }
    sharding = measure.tpu_sharding()
    first = None
    for case, step in trained.items():
        state = jax.eval_shape((optax.adamw(1e-3) if case == "nothing frozen" else tx).init, params)
        figures = measure.figures(step, *(measure.on(sharding, tree) for tree in (params, state, stats, x)))
        first = first or figures
        table.add_row(
            case,
            measure.with_ratio(figures.flops / 1e9, first.flops / 1e9, ".2f"),
            measure.with_ratio(figures.temporary / 1e6, first.temporary / 1e6, ".2f"),
        )
    table.add_section()


def main() -> None:
    table = measure.table("One AdamW step (ratio to stop_gradient by hand)", "GFLOP", "MB temporary")
    rows("convolutions", Convolutions(), jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32), table)
    rows("transformer", Transformer(), jax.ShapeDtypeStruct((32, 128), jnp.int32), table)
    measure.show(table)


if __name__ == "__main__":
    main()
