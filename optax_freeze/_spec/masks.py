"""Which elements of one leaf are frozen: rows by their numbers, single elements by a boolean array."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import described, is_array, is_concrete, is_int, type_error, value_error
from optax_freeze._spec.mask_operators import MaskOperators
from optax_freeze._spec.row_numbers import bools_of, fix_for, named_twice, numbers_of, rows_named, trainable_rows
from optax_freeze._spec.selection import FROZEN, DenseMask, DynamicRowIndex, RowIndex, Selection, row_index
from optax_freeze._spec.tree import Leaf


class _RowMask(MaskOperators):
    """Rows along an axis, which are frozen; if ``inverted``, all others are."""

    axis: int
    inverted: bool

    def __invert__(self) -> Any:
        return dataclasses.replace(self, inverted=not self.inverted)  # type: ignore[type-var]

    def _axis_and_size(self, leaf: Leaf) -> tuple[int, int]:
        assert leaf.shape is not None
        ndim = len(leaf.shape)
        if not -ndim <= self.axis < ndim:
            got = f"axis={self.axis} for shape {leaf.shape}"
            expected = f"an axis from {-ndim} to {ndim - 1}" if ndim else "a leaf with at least one axis"
            fix = "correct the axis, or select fewer leaves with the pattern"
            raise value_error(f"{self!r}: the leaf has no such axis", at=leaf.path, got=got, expected=expected, fix=fix)
        return self.axis % ndim, leaf.shape[self.axis]

    def _ascending(self, numbers: Sequence[int], size: int, leaf: Leaf) -> list[int]:
        self._refuse_outside(numbers, size, size - 1, leaf)
        ordered = sorted(number % size for number in numbers)
        if len(set(ordered)) < len(ordered):
            raise named_twice(leaf.path, list(numbers)[:8])
        return ordered

    def _refuse_outside(self, numbers: Sequence[int], size: int, last: int, leaf: Leaf) -> None:
        outside = [number for number in numbers if not -size <= number <= last]
        if outside:
            got = f"{outside[0]}, for {size} rows along axis {self.axis} of shape {leaf.shape}"
            expected = f"numbers from {-size} to {last}"
            fix = "correct the number; a slice with an open end (None) goes to the last row"
            raise value_error(f"{self!r}: a row is out of range", at=leaf.path, got=got, expected=expected, fix=fix)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class StaticRows(_RowMask):
    """Frozen rows of any leaf, made by :func:`rows`."""

    index: int | tuple[int, ...] | slice
    axis: int = 0
    inverted: bool = False
    allow_empty: bool = False
    length: int | None = None  # of the vector of bools that named the rows

    def fit(self, leaf: Leaf) -> Selection:
        """The selection of a leaf; a ``ValueError`` if the mask does not fit it."""
        axis, size = self._axis_and_size(leaf)
        if self.length not in (None, size):
            what, got = "a vector of bools differs in length from its axis", f"{self.length} bools"
            expected = f"{size}, the length of axis {self.axis} of shape {leaf.shape}"
            same = [n for n, length in enumerate(leaf.shape or ()) if length == self.length]
            fix = f"axis={same[0]}" if same else "give one bool for each row, or the numbers of the rows"
            raise value_error(what, at=leaf.path, got=got, expected=expected, fix=fix)
        if isinstance(self.index, slice):
            return row_index(self, axis, size, self._runs_of_slice(self.index, size, leaf), self.inverted)
        numbers = self._ascending((self.index,) if isinstance(self.index, int) else self.index, size, leaf)
        named = set(numbers)
        starts, stops = [n for n in numbers if n - 1 not in named], [n + 1 for n in numbers if n + 1 not in named]
        return row_index(self, axis, size, list(zip(starts, stops, strict=True)), self.inverted)

    def _runs_of_slice(self, index: slice, size: int, leaf: Leaf) -> list[tuple[int, int]]:
        self._refuse_outside([bound for bound in (index.start, index.stop) if bound is not None], size, size, leaf)
        found = range(*index.indices(size))
        found = found[::-1] if found.step < 0 else found
        if size and not found and index.stop is None and not self.allow_empty:
            what = f"{self!r}: there are no rows from {index.start} on"
            got = f"none of {size} rows along axis {self.axis} of shape {leaf.shape}"
            fix = "grow the table first, or correct the number; if there may be none, allow_empty=True"
            raise value_error(what, at=leaf.path, got=got, expected="at least one row", fix=fix)
        return [(found[0], found[-1] + 1)] if found and found.step == 1 else [(n, n + 1) for n in found]

    def __repr__(self) -> str:
        index: Any = list(self.index) if isinstance(self.index, tuple) else self.index
        if self.length is not None:
            index = [n in {*index} for n in range(self.length)]
        options = f", axis={self.axis}" * (self.axis != 0) + ", allow_empty=True" * self.allow_empty
        return f"{'~' * self.inverted}fz.rows({index}{options})"

    def __hash__(self) -> int:
        index = repr(self.index) if isinstance(self.index, slice) else self.index  # Python 3.11 cannot hash a slice
        return hash((index, self.axis, self.inverted, self.length))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array"],
    meta_fields=["axis", "inverted", "ascending", "of_state", "keep_state"],
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DynamicRows(_RowMask):
    """Dynamic rows, made by :func:`rows` of a JAX array: only how many of them are frozen is static."""

    array: Any
    axis: int = 0
    inverted: bool = False
    ascending: bool = False  # whether the numbers are known to be in order, and not negative
    of_state: bool = False  # whether they were read from an optimizer state
    keep_state: bool = False  # whether the optimizer state is that of the whole leaf

    def fit(self, leaf: Leaf) -> Selection:
        """The selection of a leaf; a ``ValueError`` if the mask does not fit it."""
        axis, size = self._axis_and_size(leaf)
        array, [named] = self.array, self.array.shape
        if self.keep_state:
            return self._fit_kept(leaf, axis, size)
        if named > size:
            got = f"{named} row numbers, for {size} rows along axis {self.axis} of shape {leaf.shape}"
            raise named_twice(leaf.path, got)
        count = named if self.inverted else size - named
        if count == 0:
            return FROZEN
        if is_concrete(array) and not self.ascending:
            self._ascending(np.asarray(array).tolist(), size, leaf)
        if isinstance(array, jax.ShapeDtypeStruct):
            array = jax.ShapeDtypeStruct((count,), jnp.int32)
        elif not (self.ascending and self.inverted):
            array = trainable_rows(array, size, count, self.inverted)
        return DynamicRowIndex(array, axis, size, count, self.of_state)

    def _fit_kept(self, leaf: Leaf, axis: int, size: int) -> Selection:
        if not self.inverted:
            raise value_error(
                "rows that keep their state are those that train",
                at=leaf.path,
                got=repr(self),
                expected=f"~{self!r}: all other rows are frozen in this step",
                fix="~fz.rows(array, keep_state=True)",
            )
        array, count = self.array, min(self.array.shape[0], size)
        if count == 0:
            return FROZEN
        if isinstance(array, jax.ShapeDtypeStruct):
            array = jax.ShapeDtypeStruct((count,), jnp.int32)
        elif not self.ascending:
            array = rows_named(array, size, count)
        return DynamicRowIndex(array, axis, size, count, self.of_state, keep_state=True)

    def __repr__(self) -> str:
        array = f"<{self.array.dtype}{list(self.array.shape)}>" if is_array(self.array) else "..."
        options = f", axis={self.axis}" * (self.axis != 0) + ", keep_state=True" * self.keep_state
        return f"{'~' * self.inverted}fz.rows({array}{options})"


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["compact", "count", "of_state"]
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Elements(MaskOperators):
    """Frozen elements as a boolean array, made by :func:`elements`."""

    array: Any
    compact: bool = False
    count: int | None = None  # of trainable elements, if `compact` and the array has values
    of_state: bool = False  # whether it was read from an optimizer state

    def fit(self, leaf: Leaf) -> Selection:
        """The selection of a leaf; a ``ValueError`` if the mask does not fit it, or cannot be counted."""
        if tuple(self.array.shape) != leaf.shape:
            what = "the shape of an element mask differs from its leaf"
            got = f"a mask of shape {tuple(self.array.shape)}"
            expected, fix = f"{leaf.shape}, the shape of the leaf", "broadcast it:"
            if self.array.shape == () and not is_concrete(self.array):
                what, got = "a bool in the spec is traced", "a traced boolean"
                expected, fix = f"True or False, or a mask of shape {expected}", "create the bool outside jit, or use"
            axis = next((n for n, size in enumerate(leaf.shape or ()) if self.array.shape == (size,)), None)
            rows = f"for whole rows use fz.rows{f'(mask, axis={axis})' if axis else ''}"
            if self._broadcasts(leaf.shape or ()):
                fix += f" jnp.broadcast_to(mask, leaf.shape); {rows}"
            else:
                fix = rows if axis is not None else "mask = np.ones(leaf.shape, bool); mask[trains] = False"
            raise value_error(what, at=leaf.path, got=got, expected=expected, fix=fix)
        if self.compact and self.count is None:
            what = "the elements of a compact mask cannot be counted"
            expected = "an array with values: the number of trainable elements is static"
            fix = "resolve it outside jit (tx.init, fz.spec_of), or leave compact=False"
            raise value_error(what, at=leaf.path, got="a traced array, or only a shape", expected=expected, fix=fix)
        return FROZEN if self.count == 0 else DenseMask(self.array, self.compact, self.count, self.of_state)

    def _broadcasts(self, shape: tuple[int, ...]) -> bool:
        with contextlib.suppress(ValueError):
            return np.broadcast_shapes(self.array.shape, shape) == shape
        return False

    def __invert__(self) -> "Elements":
        array = ~jnp.asarray(self.array)
        return Elements(array, self.compact, None if self.count is None else array.size - self.count)

    def __repr__(self) -> str:
        shape = getattr(self.array, "shape", "?")
        return f"fz.elements(<bool{list(shape)}>{', compact=True' if self.compact else ''})"


ElementMask: TypeAlias = StaticRows | DynamicRows | Elements
Choice: TypeAlias = bool | ElementMask
"""What a spec says about a leaf: True freezes it, False trains it, an element mask freezes a part of it."""


def choice_of(selection: Selection) -> Choice:
    """What a spec says about a leaf that has this selection."""
    if isinstance(selection, DynamicRowIndex):
        options = {"of_state": selection.of_state, "keep_state": selection.keep_state}
        return DynamicRows(selection.array, selection.axis, True, ascending=True, **options)
    if isinstance(selection, DenseMask):
        return Elements(selection.array, selection.compact, selection.count, selection.of_state)
    return selection.mask if isinstance(selection, RowIndex) else selection is FROZEN


@overload
def rows(
    index: slice | int | Sequence[int] | np.ndarray[Any, Any], axis: int = 0, *, allow_empty: bool = False
) -> StaticRows: ...
@overload
def rows(index: jax.Array, axis: int = 0, *, keep_state: bool = False) -> DynamicRows: ...
def rows(index: Any, axis: int = 0, *, allow_empty: bool = False, keep_state: bool = False) -> Any:
    """Freezes rows of a leaf along one axis.

    Args:
      index: the frozen rows: a slice, an int or a list of ints (static rows); negative numbers count from the end. Or,
        as in NumPy, a bool for each row of the axis, True where frozen: a list or an array with values (static, too).
        Or a JAX array of integers of shape (k,), which may be traced (dynamic rows): only k is static, the row numbers
        are in the optimizer state, where :func:`optax_freeze.replace_masks` replaces them.
      axis: the axis along which rows are counted; negative numbers count from the last.
      allow_empty: whether an open slice (``slice(n, None)``) may select no rows, as in a sweep over ``n``.
      keep_state: for the rows of a batch, ``~fz.rows(array, keep_state=True)``: the optimizer state is that of the
        whole leaf, and each step reads and writes the state of the rows that train now. Their numbers may be given
        again or be out of range, and only gradients and updates look at them: everywhere else the whole leaf trains.

    Returns:
      An element mask, for a tree of bools or as a value of :func:`optax_freeze.rules`; ``~`` gives the other rows. A
      mask of all rows of a leaf means True, of none False.

    Raises:
      TypeError: if ``index`` or ``axis`` has another type, or ``index`` is a traced array of bools.
      ValueError: if a row is named twice, or static rows shall keep their state; when resolved, if a row or the axis is
        out of range, if there are more or fewer bools than rows, if rows that keep their state are not those that
        train, or if an open slice selects no row: ``~fz.rows(slice(4, None))`` would freeze all of 4 rows. Traced
        numbers are not checked; one that is out of range, or given again, selects no row.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"embed": jnp.arange(6.0).reshape(3, 2)}
      >>> trainable, rest = fz.partition(params, {"embed": fz.rows([0, 1])})
      >>> trainable["embed"].values
      Array([[4., 5.]], dtype=float32)
    """
    bools = bools_of(index)
    numbers = numbers_of(index) if bools is None else tuple(np.flatnonzero(bools).tolist())
    if numbers is None or not is_int(axis):
        got = f"index={described(index)}, axis={described(axis)}"
        expected = (
            "a slice, an int, a list of ints, a JAX array of integers of shape (k,) or a vector of bools with values"
        )
        raise type_error(
            "fz.rows takes row numbers", at="fz.rows", got=got, expected=expected, fix=fix_for(index, axis)
        )
    if isinstance(numbers, jax.Array):
        return DynamicRows(numbers, int(axis), keep_state=bool(keep_state))
    if keep_state:
        raise value_error(
            "only dynamic rows keep their state",
            at="fz.rows",
            got=f"static rows: {described(index)}",
            expected="a JAX array of integers: the rows that train now, which change in each step",
            fix="~fz.rows(jnp.arange(k), keep_state=True), where k is the largest number of rows of a batch",
        )
    if isinstance(numbers, tuple) and len(set(numbers)) < len(numbers):
        raise named_twice("fz.rows", list(numbers)[:8])
    length = None if bools is None else len(bools)
    return StaticRows(numbers, int(axis), allow_empty=allow_empty, length=length)


def elements(array: Any, *, compact: bool = False) -> Elements:
    """Freezes the elements of a leaf where a boolean array is True, as such an array in a tree of bools does.

    Args:
      array: a boolean array of the leaf's shape, True where frozen.
      compact: whether an optimizer receives the trainable elements as a vector, whose size is fixed, and its state
        covers only these. Otherwise it receives the full leaf, with zeros at the frozen elements.

    Returns:
      An element mask, for a tree of bools or as a value of :func:`optax_freeze.rules`; ``~`` gives the other elements.
      It is a pytree whose one leaf is the array.

    Raises:
      TypeError: if ``array`` is not a boolean array.
      ValueError: when resolved, if it does not have the shape of the leaf, or is ``compact`` and traced.

    Example:
      >>> import optax_freeze as fz
      >>> mask = np.array([[False, True], [True, False]])
      >>> trainable, rest = fz.partition({"w": jnp.ones((2, 2))}, {"w": fz.elements(mask, compact=True)})
      >>> trainable["w"].values
      Array([1., 1.], dtype=float32)
    """
    if not is_array(array) or array.dtype != np.bool_:
        got, expected = described(array), "an array of bool, True where frozen"
        fix = "np.array([True, False]); of indices, mask = np.zeros(shape, bool); mask[indices] = True"
        raise type_error("fz.elements takes a boolean array", at="fz.elements", got=got, expected=expected, fix=fix)
    count = int(array.size - np.count_nonzero(np.asarray(array))) if compact and is_concrete(array) else None
    return Elements(array, compact, count)
