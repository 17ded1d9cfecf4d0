"""Memory of fine-tuning an 8B decoder whose frozen weights have 4 bits, on one GPU, from the compiler, without a GPU.

The matrices of the frozen blocks are 4-bit integers with a bfloat16 scale for each tile of 64 inputs, in the form of a
``QArray`` of Qwix; each layer is dequantized where it is read. Embedding, norms and head are bfloat16. Trainable are
LoRA matrices of rank 16 beside every matrix, or the last block (not quantized), the norm and the head; AdamW with
float32 moments behind ``clip_by_global_norm(1.0)``, one sequence.

Run with ``python tests/benchmarks/quantized.py`` where the CUDA packages of JAX are installed (``make bench-gpu``).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import measure  # first: it sets up the compilers

import jax  # isort: skip
import jax.numpy as jnp
import scale
from decoder import ADAMW, SHAPES, Decoder
from gpu_devices import GPUS, devices
from jax.sharding import Mesh

import optax_freeze as fz

TILE, RANK = 64, 16
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
LENGTHS = (2048, 4096, 8192, 16384)
CHIP = "rtx4090"


def dot(x: jax.Array, w: Any) -> jax.Array:
    """A product with a matrix: an array, or a quantized one with its LoRA matrices, if any."""
    if not isinstance(w, dict):
        return x @ w
    tiles = w["qvalue"].reshape(-1, TILE, w["qvalue"].shape[-1]).astype(w["scale"].dtype) * w["scale"][:, None]
    y = x @ tiles.reshape(w["qvalue"].shape)
    return y + (x @ w["a"]) @ w["b"] if "a" in w else y


def quantized(w: jax.ShapeDtypeStruct, lora: bool) -> dict[str, jax.ShapeDtypeStruct]:
    def leaf(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=w.sharding)

    n, inputs, outputs = w.shape
    parts = {"qvalue": leaf(w.shape, jnp.int4), "scale": leaf((n, inputs // TILE, outputs), w.dtype)}
    return parts | ({"a": leaf((n, inputs, RANK), w.dtype), "b": leaf((n, RANK, outputs), w.dtype)} if lora else {})


def base(blocks: dict[str, Any], lora: bool) -> dict[str, Any]:
    """The stack of blocks with quantized matrices."""
    return {name: quantized(leaf, lora) if name in MATRICES else leaf for name, leaf in blocks.items()}


def with_lora(params: Any) -> tuple[Any, Any]:
    params = {**params, "blocks": base(params["blocks"], lora=True)}
    return params, fz.all_except("blocks/*/a", "blocks/*/b")


def with_last_block(params: Any) -> tuple[Any, Any]:
    def layers(count: int) -> Any:
        return jax.tree.map(lambda x: x.update(shape=(count, *x.shape[1:])), params["blocks"])

    depth = params["blocks"]["q"].shape[0]
    params = {**params, "blocks": [base(layers(depth - 1), lora=False), layers(1)]}
    return params, fz.all_except("blocks/1", "norm", "head")


def memory(mesh: Mesh, decoder: Decoder, trained: Callable[[Any], tuple[Any, Any]]) -> float:
    """GiB of a step that trains in place."""
    params, frozen = trained(decoder.params(mesh))
    tx = fz.freeze(ADAMW, frozen, full_updates=False)
    state = scale.in_float32(tx, params)
    step = fz.train_step(decoder.loss(mesh, dot), tx)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, decoder.tokens(mesh)).compile()
    found = compiled.memory_analysis()
    assert found, "the compiler gives no memory analysis"
    taken = found.argument_size_in_bytes + found.temp_size_in_bytes
    return (taken + found.output_size_in_bytes - found.alias_size_in_bytes) / 2**30


def main() -> None:
    title = f"8B with a frozen base in 4 bits on one {GPUS[CHIP].name}: GiB of a step, by the length of the sequence"
    table = measure.table(title, *map(str, LENGTHS), label="trainable")
    decoder = Decoder(*SHAPES["8B"], topology="", tensor_parallel=1)
    mesh = decoder.mesh(devices(CHIP, 1))
    for name, trained in {"LoRA of rank 16": with_lora, "last block, norm and head": with_last_block}.items():
        sizes = (memory(mesh, dataclasses.replace(decoder, length=length), trained) for length in LENGTHS)
        table.add_row(name, *(f"{size:.1f}" for size in sizes))
    measure.show(table)


if __name__ == "__main__":
    main()
