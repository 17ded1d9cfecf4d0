"""Which memory is an array in: device memory, or host memory, from which programs read it over the link?"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

HOST = "pinned_host"  # JAX's name for host memory that a device can read directly

ROWS_AT_ONCE, COLUMNS = 8, 128
"""The TPU stores matrices in tiles of as many rows and columns, and reads rows of whole tiles from the host."""


def is_on_host(leaf: Any) -> bool:
    """Whether an array, a tracer or a shape is in host memory."""
    if isinstance(leaf, Tracer):
        return jax.typeof(leaf).memory_space == jax.memory.Space.Host
    return isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array)) and getattr(leaf.sharding, "memory_kind", None) == HOST


def to_device(leaf: Any) -> Any:
    """``leaf`` in device memory; ``leaf`` itself if it is already there."""
    return jax.device_put(leaf, jax.memory.Space.Device) if is_on_host(leaf) else leaf


def on_device(sharding: Any) -> Any:
    """The same sharding in device memory."""
    return sharding.with_memory_kind("device") if sharding.memory_kind == HOST else sharding


def to_memory_of(like: Any, leaf: Any) -> Any:
    """``leaf`` in the same memory as ``like``."""
    if not is_on_host(like) or is_on_host(leaf):
        return leaf
    # In JAX 0.8, the sharding of an array that is put into a memory space remains that of the device.
    is_placed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST) if is_placed else jax.memory.Space.Host)


def is_in_blocks(shape: Sequence[int]) -> bool:
    """Whether a matrix in host memory consists of whole tiles, so that a row is read with those of its tiles."""
    return len(shape) == 2 and shape[0] % ROWS_AT_ONCE == shape[1] % COLUMNS == 0
