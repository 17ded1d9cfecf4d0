"""Flax modules with a wrapped backbone, compared with ``stop_gradient`` written by hand.

1. Linen: a training step of AdamW on the head, on top of eight convolutions with batch normalization or an 8-layer
   transformer.
2. NNX: the gradient of a first layer and a head, with six convolutions with batch normalization or an 8-layer
   transformer between them.

FLOPs and temporary bytes, compiled for one TPU v5e chip; in brackets the ratio to ``stop_gradient`` by hand.

Run with ``python tests/benchmarks/flax_modules.py``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import measure  # first: it sets up the TPU compiler

import flax.linen as nn  # isort: skip
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import optax_freeze as fz
import optax_freeze.nnx as fnnx
from optax_freeze.linen import Frozen, frozen_mask

BY_HAND = "stop_gradient by hand"


def show(title: str, models: Mapping[str, Mapping[str, measure.Figures]], form: str) -> None:
    """Shows the figures of several programs of each model."""
    table = measure.table(f"{title} (ratio to {BY_HAND})", "GFLOP", "MB temporary")
    for model, programs in models.items():
        table.add_section()
        table.add_row(f"[bold]{model}")
        [best] = (row for name, row in programs.items() if name.startswith(BY_HAND))
        for name, row in programs.items():
            flops = measure.with_ratio(row.flops / 1e9, best.flops / 1e9, ".2f", form)
            table.add_row(name, flops, measure.with_ratio(row.temporary / 1e6, best.temporary / 1e6, ".2f", form))
    measure.show(table)


class Convolutions(nn.Module):
    """Eight convolutions with batch normalization; images of shape (n, 32, 32, 3)."""

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


def linen(backbone: nn.Module, x: jax.ShapeDtypeStruct) -> dict[str, measure.Figures]:
    """Steps of AdamW with and without ``linen.Frozen``."""
    bare, wrapped = Classifier(backbone), Classifier(Frozen(backbone))
    stats: Any = jax.eval_shape(lambda x: bare.init(jax.random.key(0), x, train=False), x)
    params = stats.pop("params")
    adamw = optax.adamw(1e-3)
    tx = fz.freeze(adamw, frozen_mask(wrapped, x, train=True))

    def figures(model: nn.Module, tx: Any, *, train: bool = False, by_hand: bool = False) -> measure.Figures:
        def loss(params: Any, stats: Any, x: jax.Array) -> jax.Array:
            if by_hand:
                params = {**params, "backbone": jax.lax.stop_gradient(params["backbone"])}
            logits, _ = model.apply({"params": params, **stats}, x, train, mutable=["batch_stats"])
            return jnp.mean(jax.nn.logsumexp(jnp.asarray(logits), axis=-1))

        step = measure.stepping(jax.value_and_grad(loss), tx)
        return measure.figures(step, params, jax.eval_shape(tx.init, params), stats, x)

    return {
        f"{BY_HAND}, stored statistics": figures(bare, tx, by_hand=True),
        "linen.Frozen(backbone)": figures(wrapped, tx, train=True),
        "nothing frozen": figures(bare, adamw),
    }


class NnxConvolutions(nnx.Module):
    """Six convolutions with batch normalization."""

    inputs, width = (32, 32, 32, 64), 64

    def __init__(self, rngs: nnx.Rngs):
        self.convs = nnx.List([nnx.Conv(64, 64, (3, 3), rngs=rngs) for _ in range(6)])
        self.norms = nnx.List([nnx.BatchNorm(64, rngs=rngs) for _ in range(6)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return x


class Block(nnx.Module):
    """Attention and two dense layers, each after a layer norm."""

    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(256, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(8, 256, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(256, 1024, rngs=rngs), nnx.Linear(1024, 256, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class NnxTransformer(nnx.Sequential):
    """Eight blocks."""

    inputs, width = (8, 128, 256), 256

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(*(Block(rngs) for _ in range(8)))


class ByHand(nnx.Module):
    """A module in evaluation mode, with a ``stop_gradient`` on its parameters."""

    def __init__(self, module: Any):
        self.module = module

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, params, rest = nnx.split(self.module, nnx.Param, ...)
        module = nnx.merge(graphdef, jax.lax.stop_gradient(params), rest)
        module.eval()
        return module(x)


def of_nnx(backbone: type[Any], wrap: Callable[[Any], Any]) -> measure.Figures:
    """The gradient of a layer before the backbone and a head after it."""

    def build() -> nnx.Module:
        rngs = nnx.Rngs(0)
        first, head = (nnx.Linear(backbone.width, backbone.width, rngs=rngs) for _ in range(2))
        return nnx.Sequential(first, wrap(backbone(rngs)), head)

    graphdef, params, rest = nnx.split(nnx.eval_shape(build), nnx.Param, ...)

    def step(params: Any, rest: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            model: Any = nnx.merge(graphdef, params, rest, copy=True)
            return jnp.mean(model(x) ** 2), nnx.state(model, nnx.BatchStat)

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, stats, [grads["layers"][i] for i in (0, 2)]

    return measure.figures(step, params, rest, jax.ShapeDtypeStruct(backbone.inputs, jnp.float32), donate=())


def main() -> None:
    images = jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32)
    tokens = jax.ShapeDtypeStruct((32, 128), jnp.int32)
    models = {"convolutions": linen(Convolutions(), images), "transformer": linen(Transformer(), tokens)}
    show("Linen: one AdamW step", models, ".2f")
    wraps = {"not wrapped": lambda module: module, BY_HAND: ByHand, "fnnx.Frozen": fnnx.Frozen}
    models = {
        name: {way: of_nnx(backbone, wrap) for way, wrap in wraps.items()}
        for name, backbone in (("convolutions", NnxConvolutions), ("transformer", NnxTransformer))
    }
    show("NNX: one gradient", models, ".3f")


if __name__ == "__main__":
    main()
