"""Bytes that ``fz.fingerprint`` reads, compared with ``jnp.sum``.

1 GiB of data in several shapes and dtypes, frozen as a whole or in part: bytes accessed, divided by the bytes of the
data (and of a dense mask); in brackets the same ratio for ``jnp.sum``. Compiled for TPU v5e, and for the device of the
machine. A TPU program copies small leaves into on-chip memory in advance, and the compiler includes these copies.

Run with ``python tests/benchmarks/fingerprint.py``.
"""

import functools
from typing import Any

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import jax.numpy as jnp

import optax_freeze as fz

SPECS = {
    "one vector": True,
    "one matrix": True,
    "32 stacked layers": True,
    "64 leaves": True,
    "rows of a matrix": ~fz.rows(slice(-16, None)),
    "elements of a matrix": None,  # a dense mask, which is an argument of the program
}


DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "uint8")


def shapes(name: str, dtype: str) -> Any:
    """A tree of shapes with 1 GiB in total."""
    size = 2**30 // jnp.dtype(dtype).itemsize
    leaf = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    if name == "one vector":
        return leaf((size,))
    if name == "32 stacked layers":
        width = size // (32 * 8192)
        return {"up": leaf((32, 4096, width)), "down": leaf((32, width, 4096)), "norm": leaf((32, 4096))}
    if name == "64 leaves":
        return [leaf((size // (64 * 1024), 1024)) for _ in range(64)]
    return leaf((size // 2048, 2048))


def ratios(name: str, dtype: str, *, tpu: bool) -> str:
    """Bytes that the fingerprint reads, divided by the bytes of the data and of a dense mask; and with a sum."""
    spec, params = SPECS[name], shapes(name, dtype)
    mask = jax.ShapeDtypeStruct(params.shape, jnp.bool_) if spec is None else ()

    def digest(params: Any, mask: Any) -> jax.Array:
        return fz.fingerprint(params, fz.elements(mask) if spec is None else spec)

    def total(params: Any, mask: Any) -> Any:
        return [jnp.sum(leaf) for leaf in jax.tree.leaves((params, mask))]

    ours, plain = (
        measure.figures(fn, params, mask, donate=(), tpu=tpu).accessed / measure.nbytes((params, mask))
        for fn in (digest, total)
    )
    return f"{ours:.3f} ({plain:.3f})"


def main() -> None:
    devices = {"TPU v5e": True} if measure.tpu_sharding() else {}
    for device, tpu in (devices | {jax.devices()[0].device_kind: False}).items():
        title = f"{device}, 1 GiB: bytes accessed / bytes of the data (the same for jnp.sum)"
        table = measure.table(title, *DTYPES, label="frozen")
        for name, spec in SPECS.items():
            dtypes = DTYPES if spec is True else DTYPES[:-1]  # integer leaves are always frozen as a whole
            table.add_row(name, *(ratios(name, dtype, tpu=tpu) for dtype in dtypes))
        measure.show(table)


if __name__ == "__main__":
    main()
