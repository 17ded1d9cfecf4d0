"""From an element mask and a leaf to a selection; a ``ValueError`` if the mask does not fit the leaf."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import is_concrete, value_error
from optax_freeze._spec.masks import DynamicRows, ElementMask, Rows, Slice, named_twice
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, DynamicRowIndex, RowIndex, Selection
from optax_freeze._spec.tree import Leaf


def fit_mask(choice: bool | ElementMask, leaf: Leaf) -> Selection:
    """The selection that a bool or an element mask means for a leaf.

    Raises:
      ValueError: if the mask does not fit the leaf, or the elements of a compact one cannot be counted.
    """
    if isinstance(choice, bool):
        return FROZEN if choice else TRAINABLE
    if np.zeros((), leaf.dtype) != 0:
        raise value_error(
            "a leaf whose dtype has no zero cannot be frozen in part",
            at=leaf.path,
            got=f"{choice!r} for {leaf.dtype}",
            expected="True or False",
            fix="freeze the whole leaf, or train it",
        )
    if isinstance(choice, Rows):
        return _fit_rows(choice, leaf)
    if isinstance(choice, DynamicRows):
        return _fit_dynamic_rows(choice, leaf)
    if tuple(choice.array.shape) != leaf.shape:
        traced = choice.array.shape == () and not is_concrete(choice.array)
        raise value_error(
            "a bool in the spec is traced" if traced else "the shape of an element mask differs from its leaf",
            at=leaf.path,
            got="a traced boolean" if traced else f"a mask of shape {tuple(choice.array.shape)}",
            expected=f"{'True or False, or a mask of shape ' if traced else ''}{leaf.shape}, the shape of the leaf",
            fix=f"{'create the bool outside jit, or use' if traced else 'broadcast it:'} "
            "jnp.broadcast_to(mask, leaf.shape); for whole rows use fz.rows",
        )
    if choice.compact and choice.count is None:
        raise value_error(
            "the elements of a compact mask cannot be counted",
            at=leaf.path,
            got="a traced array, or only a shape",
            expected="an array with values: the number of trainable elements is static",
            fix="resolve it outside jit (tx.init, fz.spec_of), or leave compact=False",
        )
    return FROZEN if choice.count == 0 else DenseMask(choice.array, choice.compact, choice.count, choice.of_state)


def _axis_of(rows: Rows | DynamicRows, leaf: Leaf) -> tuple[int, int]:
    """The axis of the rows, and how many there are along it."""
    assert leaf.shape is not None
    ndim = len(leaf.shape)
    if not -ndim <= rows.axis < ndim:
        raise value_error(
            f"{rows!r}: the leaf has no such axis",
            at=leaf.path,
            got=f"axis={rows.axis} for shape {leaf.shape}",
            expected=f"an axis from {-ndim} to {ndim - 1}" if ndim else "a leaf with at least one axis",
            fix="correct the axis, or select fewer leaves with the pattern",
        )
    return rows.axis % ndim, leaf.shape[rows.axis]


def _fit_dynamic_rows(rows: DynamicRows, leaf: Leaf) -> Selection:
    axis, size = _axis_of(rows, leaf)
    [named] = rows.array.shape
    if named > size:
        raise value_error(
            f"{rows!r}: more row numbers than rows in the leaf",
            at=leaf.path,
            got=f"{named}, for {size} rows along axis {rows.axis} of shape {leaf.shape}",
            expected=f"at most {size} numbers",
            fix="give each row once, or correct the axis",
        )
    count = named if rows.inverted else size - named
    if count == 0:
        return FROZEN
    array = rows.array
    if is_concrete(array) and not rows.ascending:
        numbers = np.asarray(array).tolist()
        _refuse_outside(rows, numbers, leaf)
        if len({number % size for number in numbers}) < named:
            raise named_twice(leaf.path, numbers)
    index = DynamicRowIndex(array, axis, size, count, rows.of_state)
    if isinstance(array, jax.ShapeDtypeStruct):
        return dataclasses.replace(index, array=jax.ShapeDtypeStruct((count,), jnp.int32))
    if rows.ascending and rows.inverted:
        return index
    return dataclasses.replace(index, array=_trainable_rows(array, size, count, rows.inverted))


def _trainable_rows(named: Any, size: int, count: int, inverted: bool) -> Any:
    """The numbers of ``count`` trainable rows, ascending, where ``named`` are the frozen rows, or the trainable ones.

    Those that are named twice or out of range leave fewer rows: the array ends with ``size``, which is no row. It is
    concrete wherever ``named`` is, also while a program is traced.
    """
    if not is_concrete(named):
        named = named.astype(jnp.int32) if named.dtype.itemsize < 4 else named  # -1 plus the size must not overflow
        trains = jnp.full(size, not inverted).at[named].set(inverted, mode="drop")
        return jnp.nonzero(trains, size=count, fill_value=size)[0].astype(jnp.int32)
    trains, named = np.full(size, not inverted), np.asarray(named)
    trains[named[named < size]] = inverted
    numbers = np.full(count, size, np.int32)
    found = np.flatnonzero(trains)[:count]
    numbers[: len(found)] = found
    array = jnp.asarray(numbers)
    return array if is_concrete(array) else numbers


def _fit_rows(rows: Rows, leaf: Leaf) -> Selection:
    axis, size = _axis_of(rows, leaf)
    index = RowIndex(rows, axis, size, _progressions(rows, size, leaf), rows.inverted)
    if size and not index.picked and isinstance(rows.index, Slice) and rows.index.stop is None and not rows.allow_empty:
        raise value_error(
            f"{rows!r}: there are no rows from {rows.index.start} on",
            at=leaf.path,
            got=f"none of {size} rows along axis {rows.axis} of shape {leaf.shape}",
            expected="at least one row",
            fix="grow the table first, or correct the number; if there may be none, allow_empty=True",
        )
    if index.count == 0:
        return FROZEN
    return TRAINABLE if index.count == size else index.canonical()


def _refuse_outside(rows: Rows | DynamicRows, numbers: Sequence[int], leaf: Leaf) -> None:
    _, size = _axis_of(rows, leaf)
    last = size if isinstance(rows, Rows) and isinstance(rows.index, Slice) else size - 1
    outside = [n for n in numbers if not -size <= n <= last]
    if outside:
        raise value_error(
            f"{rows!r}: a row is out of range",
            at=leaf.path,
            got=f"{outside[0]}, for {size} rows along axis {rows.axis} of shape {leaf.shape}",
            expected=f"numbers from {-size} to {last}",
            fix="correct the number; a slice with an open end (None) goes to the last row",
        )


def _progressions(rows: Rows, size: int, leaf: Leaf) -> tuple[tuple[int, int, int], ...]:
    """The named rows as ascending progressions (start, stop, step)."""
    index = (rows.index,) if isinstance(rows.index, int) else rows.index
    numbers = [n for n in (index[:2] if isinstance(index, Slice) else index) if n is not None]
    _refuse_outside(rows, numbers, leaf)
    if isinstance(index, Slice):
        found = range(*slice(*index).indices(size))
        found = found[::-1] if found.step < 0 else found
        return ((found[0], found[-1] + 1, found.step if len(found) > 1 else 1),) if found else ()
    ordered = sorted(number % size for number in numbers)
    named = set(ordered)
    if len(named) < len(ordered):
        raise named_twice(leaf.path, numbers)
    starts = [n for n in ordered if n - 1 not in named]
    stops = [n + 1 for n in ordered if n + 1 not in named]
    return tuple((start, stop, 1) for start, stop in zip(starts, stops, strict=True))
