"""Row numbers: which rows an index given to ``fz.rows`` names, and which ones train."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import is_array, is_concrete, is_int, value_error
from optax_freeze._spec.indexing import numbers_where
from optax_freeze._spec.sharding import undivided


def named_twice(at: str, got: Any) -> ValueError:
    fix = "sorted(set(rows)), with negative numbers counted from the end"
    return value_error("a row is named twice", at=at, got=got, expected="each row once", fix=fix)


def trainable_rows(named: Any, size: int, count: int, inverted: bool) -> Any:
    """The numbers of ``count`` trainable rows, ascending, and concrete wherever ``named`` is.

    If rows are named twice or out of range, the array ends with ``size``, which is not a row.
    """
    if not is_concrete(named):
        return _traced_trainable_rows(named, size, count, inverted)
    trains, named = np.full(size, not inverted), np.asarray(named).astype(int)
    trains[named[named < size]] = inverted
    numbers = np.append(np.flatnonzero(trains), np.full(count, size))[:count].astype(np.int32)
    array = jnp.asarray(numbers)
    return array if is_concrete(array) else numbers


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)  # traced once for all leaves that are alike
def _traced_trainable_rows(named: Any, size: int, count: int, inverted: bool) -> jax.Array:
    trains = jnp.full(size, not inverted).at[_wide(named)].set(inverted, mode="drop")
    return numbers_where(trains, count).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def rows_named(named: Any, size: int, count: int) -> jax.Array:
    """The rows that integers name, int32 of shape (count,), ascending and each once.

    Negative numbers count from the end. If fewer than ``count`` of ``size`` rows are named, numbers that are not rows
    follow, from ``size`` on. It sorts what is given, and does not make an array with an entry for each row.
    """
    named = _wide(named).ravel()
    named = jnp.where(named < 0, named + size, named)
    named = jnp.where((named >= 0) & (named < size), named, size).astype(jnp.int32)
    numbers = jnp.unique(named, size=count, fill_value=size)
    return jnp.where(numbers < size, numbers, size + jnp.arange(count, dtype=jnp.int32))


def _wide(named: Any) -> Any:
    """Integers to which the number of rows can be added without an overflow, all of them on each device."""
    named = undivided(named)
    return named.astype(jnp.int32) if named.dtype.itemsize < 4 else named


def fix_for(index: Any, axis: Any) -> str:
    """What to write for something that is not an index of rows."""
    if not is_int(axis):
        return "give the axis as an int: axis=0"
    if not is_array(index):
        return "list the row numbers: fz.rows([0, 1])"
    if index.dtype != np.bool_:
        return "convert the numbers: fz.rows(array.astype(int).ravel())"
    if index.ndim == 1:
        return "create the array outside jit; or, if k of its bools are True, fz.rows(jnp.flatnonzero(array, size=k))"
    return "for the elements of a leaf use fz.elements(array)"


def bools_of(index: Any) -> np.ndarray | None:
    """A vector of bools with values, or None."""
    if is_concrete(index):
        return np.asarray(index) if index.ndim == 1 and index.dtype == np.bool_ else None
    is_list = isinstance(index, Sequence) and len(index) > 0 and not isinstance(index, str)
    return np.array(index) if is_list and all(isinstance(each, (bool, np.bool_)) for each in index) else None


def numbers_of(index: Any) -> int | tuple[int, ...] | slice | jax.Array | None:
    """An index of Python ints, or a JAX array of integers; otherwise None."""
    if isinstance(index, jax.Array):
        return index if index.ndim == 1 and jnp.issubdtype(index.dtype, jnp.integer) else None
    if is_int(index):
        return int(index)
    if isinstance(index, slice):
        bounds = [index.start, index.stop, index.step]
        if index.step == 0 or not all(bound is None or is_int(bound) for bound in bounds):
            return None
        return slice(*(None if bound is None else int(bound) for bound in bounds))
    if isinstance(index, (Sequence, np.ndarray)) and all(map(is_int, index)):
        return tuple(map(int, index))
    return None
