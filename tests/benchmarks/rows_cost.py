"""Cost of the gradient when only rows of a position embedding, an output bias or an untied head are trainable.

A network of 4 layers; 8 sequences of 512 tokens, width 512, a vocabulary of 32,768. The last rows (of the head, the
last columns) are trainable, with and without the layers. Peers: the whole leaf trainable, and the parameter
concatenated by hand from a part behind ``stop_gradient`` and a trainable part. The last column is temporary plus output
bytes, because XLA uses output buffers for temporary values until it writes the outputs. Compiled for one TPU v5e chip.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import jax.numpy as jnp
import optax

import optax_freeze as fz

LAYERS, BATCH, LENGTH, WIDTH, VOCABULARY = 4, 8, 512, 512, 32_768
PARAMS = {
    "positions": jax.ShapeDtypeStruct((LENGTH, WIDTH), jnp.float32),
    "layers": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),
    "head": jax.ShapeDtypeStruct((WIDTH, VOCABULARY), jnp.float32),
    "bias": jax.ShapeDtypeStruct((VOCABULARY,), jnp.float32),
}
X = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
LABELS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)


class Case(NamedTuple):
    """A leaf whose last ``trainable`` rows along ``axis`` are trainable."""

    leaf: str
    axis: int
    trainable: int


CASES = [Case("positions", 0, 128), Case("bias", 0, 64), Case("head", 1, 64)]


def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    x = x + params["positions"]
    for w in params["layers"]:
        x = x + jax.nn.gelu(x @ w)
    logits = x @ params["head"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gradients(case: Case, layers_train: bool) -> dict[str, Callable[..., Any]]:
    """The gradient of the rows, and of the layers if they are trainable, computed in three ways."""
    size = PARAMS[case.leaf].shape[case.axis]
    frozen = {name: name != "layers" or not layers_train for name in PARAMS}
    rows = {**frozen, case.leaf: fz.rows(slice(0, size - case.trainable), axis=case.axis)}
    leaf = {**frozen, case.leaf: False}

    def by_hand(params: Any, *batch: Any) -> Any:
        old = jax.lax.slice_in_dim(params[case.leaf], 0, size - case.trainable, axis=case.axis)
        new = jax.lax.slice_in_dim(params[case.leaf], size - case.trainable, size, axis=case.axis)
        trainable = {case.leaf: new} | ({"layers": params["layers"]} if layers_train else {})

        def of_trainable(trainable: Any) -> jax.Array:
            joined = jnp.concatenate([old, trainable[case.leaf]], case.axis)
            return loss({**params, **trainable, case.leaf: joined}, *batch)

        return jax.grad(of_trainable)(trainable)

    return {
        "whole leaf trainable": lambda params, *batch: fz.grad(loss, leaf)(params, *batch),
        "concatenated by hand": by_hand,
        "fz.grad": lambda params, *batch: fz.grad(loss, rows)(params, *batch),
    }


def main() -> None:
    chip = measure.tpu_sharding()
    table = measure.table("One gradient", "GFLOP", "GB accessed", "MB temporary + output")
    for case in CASES:
        for layers_train in (False, True):
            where = f"{case.trainable} {'columns' if case.axis else 'rows'} of {case.leaf}" + (
                " and the layers" if layers_train else ""
            )
            for name, gradient in gradients(case, layers_train).items():
                row = measure.figures(gradient, *measure.on(chip, (PARAMS, X, LABELS)), donate=())
                used = row.temporary + row.output
                cells = [f"{row.flops / 1e9:.1f}", f"{row.accessed / 1e9:.3f}", f"{used / 1e6:.1f}"]
                table.add_row(f"{where}: {name}", *cells)
    measure.show(table)


if __name__ == "__main__":
    main()
