"""Rows of an array in host memory: read into device memory, and written in place; no other part of it is moved."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from optax_freeze._spec.indexing import move_bits
from optax_freeze._spec.memory_kinds import to_device, to_memory_of


@functools.partial(jax.jit, static_argnums=(0, 1))
def read(axis: int, run: tuple[int, int] | None, full: Any, indices: Any) -> jax.Array:
    """The rows of ``run`` (start, stop), or else those at ``indices``, on the device."""

    def row(full: Any, i: Any) -> jax.Array:
        return to_device(jax.lax.dynamic_index_in_dim(full, i, axis, keepdims=False))

    def rows(indices: Any, full: Any) -> jax.Array:
        if run is not None:
            return to_device(jax.lax.slice_in_dim(full, *run, axis=axis))
        return jnp.moveaxis(jax.lax.map(functools.partial(row, full), indices), 0, axis)

    return move_bits(rows, indices, full)


@functools.partial(jax.jit, static_argnums=(0, 1))
def write(axis: int, run: tuple[int, int] | None, full: Any, values: Any, indices: Any) -> jax.Array:
    """``full`` on the host with ``values`` at the rows of ``run`` (start, stop), or else at ``indices``."""

    def rows(indices: Any, full: Any, values: Any) -> jax.Array:
        if run is not None:
            return jax.lax.dynamic_update_slice_in_dim(full, to_memory_of(full, values), run[0], axis)

        def step(i: Any, full: Any) -> jax.Array:
            row = to_memory_of(full, jax.lax.dynamic_slice_in_dim(values, i, 1, axis))
            return jax.lax.dynamic_update_slice_in_dim(full, row, indices[i], axis)

        return jax.lax.fori_loop(0, values.shape[axis], step, full)

    return move_bits(rows, indices, full, jnp.asarray(values, full.dtype))
