"""Slices, gathers, scatters and selects that keep every bit of the values that they move, also the payload of a NaN.

Floats of 8 and 16 bits are moved as unsigned integers: on some devices XLA converts them to float32 even to move them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_freeze._errors import is_concrete


def select(mask: Any, a: Any, b: Any) -> jax.Array:
    """``jnp.where(mask, a, b)``."""
    return _keep_bits(jnp.where, mask, jnp.asarray(a), jnp.asarray(b))


def cut(axis: int, full: Any, start: int, stop: int) -> jax.Array:
    """The slice from ``start`` to ``stop`` along an axis."""

    move = lambda _, full: jax.lax.slice_in_dim(full, start, stop, axis=axis)  # noqa: E731
    # On CPU, XLA converts even the slice of an 8-bit float to another float since JAX 0.12.
    return _keep_bits(move, None, full) if full.dtype.itemsize == 1 else move(None, full)


def gather(axis: int, full: Any, indices: Any) -> jax.Array:
    """The values at ascending ``indices`` along an axis, zero for those out of range."""
    return _keep_bits(lambda indices, full: get_rows(axis, indices, full), indices, full)


def scatter(axis: int, full: Any, indices: Any, values: Any) -> jax.Array:
    """``full`` with ``values`` at ascending ``indices`` along an axis; those out of range are dropped."""
    values = jnp.asarray(values, full.dtype)  # a line search tries parameters of the updates' dtype
    return _keep_bits(functools.partial(set_rows, axis), indices, full, values)


def write(axis: int, full: Any, indices: Any, values: Any) -> jax.Array:
    """:func:`scatter` in place. On TPU without bitcasts: XLA would copy the array there, and keeps bits anyway."""
    if is_concrete(full) or not integer_of(full.dtype):
        return scatter(axis, full, indices, values)
    return jax.lax.platform_dependent(full, indices, values, **_writers(axis))


@functools.cache  # one function per axis: JAX traces and compiles a function once
def _writers(axis: int) -> dict[str, Callable[..., jax.Array]]:
    on_tpu = lambda full, indices, values: set_rows(axis, indices, full, values)  # noqa: E731
    return {"tpu": on_tpu, "default": functools.partial(scatter, axis)}


def get_rows(axis: int, indices: Any, full: Any, *, is_unique: bool = True, exist: bool = False) -> jax.Array:
    """:func:`gather` of values that are moved as they are; it can be transposed.

    If all ``exist``, nothing is compared with the size. Those that are not unique need not ascend.
    """
    if not full.shape[axis]:
        return jnp.zeros(resized(full.shape, axis, len(indices)), full.dtype)
    others = tuple(i for i in range(full.ndim) if i != axis)
    return jax.lax.gather(
        full,
        indices[:, None],
        jax.lax.GatherDimensionNumbers(others, (axis,), (axis,)),
        slice_sizes=resized(full.shape, axis, 1),
        unique_indices=is_unique,
        indices_are_sorted=is_unique,
        mode="promise_in_bounds" if exist else "fill",
        fill_value=None if exist else 0,
    )


def set_rows(axis: int, indices: Any, full: Any, values: Any) -> jax.Array:
    """:func:`scatter` of values that are moved as they are; it can be transposed."""
    if not full.shape[axis]:
        return full
    others = tuple(i for i in range(full.ndim) if i != axis)
    numbers = jax.lax.ScatterDimensionNumbers(others, (axis,), (axis,))
    return jax.lax.scatter(
        full, indices[:, None], values, numbers, indices_are_sorted=True, unique_indices=True, mode="drop"
    )


def numbers_where(chosen: Any, count: int) -> jax.Array:
    """The first ``count`` numbers at which a boolean array of one axis is True; if they are fewer, its size follows.

    ``jnp.nonzero`` divides each number by the strides of an array of any shape: twice the work. Here no index is out of
    range, which ``checkify`` reports even if it is dropped.
    """
    numbers = jnp.where(chosen, jnp.arange(chosen.size), chosen.size)
    places = jnp.maximum(jnp.cumsum(chosen) - 1, 0)
    of_places = jnp.full(count, chosen.size).at[places]
    return of_places.min(numbers, mode="drop", indices_are_sorted=True, wrap_negative_indices=False)


def of_each_row(values: Any, axis: int, ndim: int) -> jax.Array:
    """A vector with a value for each row, as an array that broadcasts against one of ``ndim`` axes."""
    return jnp.expand_dims(values, tuple(i for i in range(ndim) if i != axis))


def resized(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    """A shape with another size along an axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def at(array: Any, axis: int, indices: Any) -> Any:
    """``array.at[...]`` for indices along an axis."""
    return array.at[(slice(None),) * axis + (indices,)]


def integer_of(dtype: Any) -> Any:
    """The unsigned integer dtype as which a float of 8 or 16 bits is moved, or None."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    return {8: jnp.uint8, 16: jnp.uint16}.get(jnp.finfo(dtype).bits)


def _keep_bits(move: Callable[..., jax.Array], where: Any, *arrays: Any) -> jax.Array:
    """``move(where, *arrays)`` for a function that only moves values."""
    narrow = integer_of(arrays[-1].dtype) and all(array.dtype == arrays[-1].dtype for array in arrays)
    return _move_integers(move, where, *arrays) if narrow else move(where, *arrays)


def move_bits(move: Callable[..., jax.Array], where: Any, *arrays: Any) -> jax.Array:
    """``move(where, *arrays)`` for a function that only moves values; on TPU, which keeps bits anyway, no bitcasts."""
    if not integer_of(arrays[-1].dtype):
        return move(where, *arrays)
    return jax.lax.platform_dependent(
        where, *arrays, tpu=move, default=lambda where, *arrays: _keep_bits(move, where, *arrays)
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _move_integers(move: Callable[..., jax.Array], where: Any, *arrays: Any) -> jax.Array:
    dtype = arrays[-1].dtype
    moved = move(where, *(jax.lax.bitcast_convert_type(array, integer_of(dtype)) for array in arrays))
    return jax.lax.bitcast_convert_type(moved, dtype)


@_move_integers.defjvp
def _move_integers_jvp(move: Callable[..., jax.Array], primals: Any, tangents: Any) -> Any:
    return _move_integers(move, *primals), move(primals[0], *tangents[1:])
