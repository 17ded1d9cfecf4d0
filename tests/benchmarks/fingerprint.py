"""Bytes that ``fz.fingerprint`` reads, compared with ``jnp.sum``.

1 GiB of data in several shapes and dtypes, frozen as a whole or in part: bytes accessed, divided by the bytes of the
data (and of a dense mask); in brackets the same ratio for ``jnp.sum``. Compiled for TPU v5e, and for the device of the
machine. A TPU program copies small leaves into on-chip memory in advance, and the compiler includes these copies.

Run with ``python tests/benchmarks/fingerprint.py``; ``--gib 0.25`` for less data.
"""

import argparse
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


def shapes(name: str, dtype: str, nbytes: int) -> Any:
    """A tree of shapes with ``nbytes`` bytes in total."""
    size = nbytes // jnp.dtype(dtype).itemsize
    leaf = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    if name == "one vector":
        return leaf((size,))
    if name == "32 stacked layers":
        width = size // (32 * 8192)
        return {"up": leaf((32, 4096, width)), "down": leaf((32, width, 4096)), "norm": leaf((32, 4096))}
    if name == "64 leaves":
        return [leaf((size // (64 * 1024), 1024)) for _ in range(64)]
    return leaf((size // 2048, 2048))


def digest(name: str, params: Any, mask: Any) -> jax.Array:
    """The fingerprint, which is measured."""
    spec = SPECS[name]
    return fz.fingerprint(params, fz.elements(mask) if spec is None else spec)


def total(params: Any, mask: Any) -> Any:
    """The peer, which reads each leaf, and its mask, once."""
    return [jnp.sum(leaf) for leaf in jax.tree.leaves((params, mask))]


def arguments(name: str, dtype: str, nbytes: int) -> tuple[Any, Any]:
    """The shapes of the data and of its dense mask."""
    params = shapes(name, dtype, nbytes)
    return params, jax.ShapeDtypeStruct(params.shape, jnp.bool_) if SPECS[name] is None else ()


def bytes_table(sharding: Any, device: str, nbytes: int) -> None:
    """Prints what the compiled programs read, by shape and dtype."""
    dtypes = ["float32", "bfloat16", "float8_e4m3fn", "uint8"]
    title = f"{device}, {nbytes / 2**30:g} GiB: bytes accessed / bytes of the data (the same for jnp.sum)"
    table = measure.table(title, *dtypes, label="frozen")
    for name, spec in SPECS.items():
        row = []
        for dtype in dtypes:
            if dtype == "uint8" and spec is not True:  # integer leaves are always frozen as a whole
                continue
            args = measure.on(sharding, arguments(name, dtype, nbytes))
            ours, plain = (
                measure.figures(fn, *args, donate=()).accessed / measure.nbytes(args)
                for fn in (functools.partial(digest, name), total)
            )
            row.append(f"{ours:.3f} ({plain:.3f})")
        table.add_row(name, *row)
    measure.show(table)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    nbytes = int(parser.parse_args().gib * 2**30)
    chip = measure.tpu_sharding()
    if chip is not None:
        bytes_table(chip, "TPU v5e", nbytes)
    bytes_table(None, jax.devices()[0].device_kind, nbytes)


if __name__ == "__main__":
    main()
