"""Row numbers: which rows an index given to ``fz.rows`` names, and which ones train."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import is_concrete, value_error
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
