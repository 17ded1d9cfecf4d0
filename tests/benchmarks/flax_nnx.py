"""NNX models with a wrapped backbone between two trainable layers, compared with ``stop_gradient`` written by hand.

The gradient of the first layer and the head, with six convolutions with batch normalization or an 8-layer transformer
between them: FLOPs and temporary bytes, in brackets the ratio to ``stop_gradient`` by hand.

Run with ``python tests/benchmarks/flax_nnx.py``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx

import optax_freeze.nnx as fnnx


class ConvNet(nnx.Module):
    """Six convolutions with batch norm."""

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


class Transformer(nnx.Module):
    """Eight blocks."""

    inputs, width = (8, 128, 256), 256

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(8)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class ByHand(nnx.Module):
    """A module in evaluation mode, with a ``stop_gradient`` on its parameters."""

    def __init__(self, module: Any):
        self.module = module

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, params, rest = nnx.split(self.module, nnx.Param, ...)
        module = nnx.merge(graphdef, jax.lax.stop_gradient(params), rest)
        module.eval()
        return module(x)


class Program(NamedTuple):
    step: Callable[..., Any]
    args: tuple[Any, ...]


def program(backbone: type[Any], wrap: Callable[[Any], Any]) -> Program:
    """The gradient of a layer before the backbone and a head after it, with shapes as arguments."""

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

    return Program(step, (params, rest, jax.ShapeDtypeStruct(backbone.inputs, jnp.float32)))


def main() -> None:
    chip = measure.tpu_sharding()
    title = (
        f"One gradient, compiled for {'one TPU v5e chip' if chip else 'this device'} (ratio to stop_gradient by hand)"
    )
    table = measure.table(title, "GFLOP", "MB temporary")
    for backbone in (ConvNet, Transformer):
        table.add_section()
        table.add_row(f"[bold]{backbone.__name__}")
        wraps = {"not wrapped": lambda module: module, "stop_gradient by hand": ByHand, "fnnx.Frozen": fnnx.Frozen}
        programs = {name: program(backbone, wrap) for name, wrap in wraps.items()}
        rows = {name: measure.figures(p.step, *measure.on(chip, p.args), donate=()) for name, p in programs.items()}
        best = rows["stop_gradient by hand"]
        for name, row in rows.items():
            flops = measure.with_ratio(row.flops / 1e9, best.flops / 1e9, ".2f", ".3f")
            temporary = measure.with_ratio(row.temporary / 1e6, best.temporary / 1e6, ".2f", ".3f")
            table.add_row(name, flops, temporary)
    measure.show(table)


if __name__ == "__main__":
    main()
