"""The numbers of the trainable rows of a ``RowIndex``, as a list or as a lookup in a traced program."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._spec.selection import RowIndex


@functools.lru_cache(maxsize=256)
def numbers(index: RowIndex) -> np.ndarray:
    """The numbers of the trainable rows, ascending."""
    picked = np.concatenate([np.arange(*progression) for progression in index.picked])
    return picked if index.picked_train else np.setdiff1d(np.arange(index.size), picked)


def of_numbers(index: RowIndex, trains: np.ndarray, size: int) -> RowIndex:
    """Returns an index along the same axis for ``size`` rows, with the numbers ``trains`` of the trainable ones."""
    breaks = np.flatnonzero(np.diff(trains) != 1) + 1
    runs = tuple((int(run[0]), int(run[-1]) + 1, 1) for run in np.split(trains, breaks))
    return dataclasses.replace(index, size=size, picked=runs, picked_train=True).canonical()


@functools.lru_cache(maxsize=256)
def padding(index: RowIndex, axis: int, ndim: int) -> list[tuple[int, int, int]] | None:
    """The padding that moves the trainable rows to their positions; None if these are not evenly spaced.

    The gradient of a padding is a slice.
    """
    steps = np.unique(np.diff(numbers(index)))
    if len(steps) > 1:
        return None
    first, last = numbers(index)[[0, -1]].tolist()
    of_rows = (first, index.size - 1 - last, int(steps[0]) - 1 if len(steps) else 0)
    return [of_rows if d == axis else (0, 0, 0) for d in range(ndim)]


def locate(index: RowIndex, i: Any) -> tuple[jax.Array, jax.Array]:
    """Whether rows ``i`` are trainable, and their positions among the trainable rows (0 if frozen or out of range)."""
    runs = index.runs
    if runs is not None and len(runs) <= 8:
        trains, position, before = jnp.zeros(jnp.shape(i), bool), jnp.zeros_like(i), 0
        for start, stop in runs:
            here = (i >= start) & (i < stop)
            trains, position = trains | here, jnp.where(here, i - (start - before), position)
            before += stop - start
        return trains, position
    positions = jnp.full(index.size, -1, jnp.int32).at[index.indices()].set(jnp.arange(index.count, dtype=jnp.int32))
    position = jnp.take(positions, i, mode="clip")
    return (i >= 0) & (i < index.size) & (position >= 0), jnp.maximum(position, 0).astype(jnp.result_type(i))
