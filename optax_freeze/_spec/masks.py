"""Which elements of one leaf are frozen: rows by their numbers, single elements by a boolean array."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import described, is_array, is_concrete, type_error, value_error
from optax_freeze._spec.row_numbers import named_twice, rows_named, trainable_rows
from optax_freeze._spec.row_set import RowSet
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, DynamicRowIndex, RowIndex, Selection
from optax_freeze._spec.tree import Leaf


class MaskOperators:
    """Element masks do not combine by themselves: which elements they freeze depends on the shape of a leaf."""

    def __or__(self, other: Any) -> Any:
        raise _no_operator(self, other, "|")

    def __and__(self, other: Any) -> Any:
        raise _no_operator(self, other, "&")

    __ror__, __rand__ = __or__, __and__


def _no_operator(a: Any, b: Any, symbol: str) -> TypeError:
    what, expected = f"an element mask has no {symbol}", "selectors: fz.rules says for which leaves a mask is"
    is_selector = isinstance(b, str) or hasattr(b, "select")
    if is_selector or (_is_static(a) and _is_static(b) and a.axis == b.axis):
        fix = f" {symbol} ".join(repr(each) if each is b and is_selector else _for_leaves(each) for each in (a, b))
    else:
        fix = as_arrays(a, b, symbol, "leaf.shape")
    return type_error(what, at=symbol, got=f"{a!r} and {described(b)}", expected=expected, fix=fix)


def _for_leaves(mask: Any) -> str:
    return f"fz.rules({{pattern: {mask!r}}})"


def as_arrays(a: Any, b: Any, symbol: str, shape: Any) -> str:
    """What to write for two masks of one leaf that do not combine."""
    code = [_as_array(name, mask, shape) for name, mask in (("a", a), ("b", b)) if _is_static(mask)]
    if len(code) < 2 or len(repr(a) + repr(b)) > 200:
        return f"combine the masks as arrays: one fz.elements(a {symbol} b)"
    return f"combine them as arrays: {'; '.join(code)}; fz.elements(a {symbol} b)"


def _as_array(name: str, mask: Any, shape: Any) -> str:
    index: Any = list(mask.index) if isinstance(mask.index, tuple) else mask.index
    if isinstance(index, slice):
        index = ":".join("" if bound is None else str(bound) for bound in (index.start, index.stop, index.step))
    before, after = (":, " * mask.axis, "") if mask.axis >= 0 else ("..., ", ", :" * (-mask.axis - 1))
    made = "np.ones" if mask.inverted else "np.zeros"
    return f"{name} = {made}({shape}, bool); {name}[{before}{index}{after}] = {not mask.inverted}"


def _is_static(mask: Any) -> TypeGuard[Any]:
    """Whether a mask is of static rows, the only one with an index."""
    return isinstance(mask, MaskOperators) and hasattr(mask, "index")


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
        axis, frozen = self._axis_and_size(leaf)[0], self.frozen_rows(leaf)
        if frozen.count == frozen.size:
            return FROZEN
        return RowIndex(self, axis, ~frozen) if frozen.count else TRAINABLE

    def frozen_rows(self, leaf: Leaf) -> RowSet:
        """The rows of a leaf that are frozen; a ``ValueError`` if the mask does not fit it."""
        _, size = self._axis_and_size(leaf)
        if self.length not in (None, size):
            what, got = "a vector of bools differs in length from its axis", f"{self.length} bools"
            expected = f"{size}, the length of axis {self.axis} of shape {leaf.shape}"
            same = [n for n, length in enumerate(leaf.shape or ()) if length == self.length]
            fix = f"axis={same[0]}" if same else "give one bool for each row, or the numbers of the rows"
            raise value_error(what, at=leaf.path, got=got, expected=expected, fix=fix)
        if isinstance(self.index, slice):
            named = RowSet.of_runs(size, self._runs_of_slice(self.index, size, leaf))
        else:
            numbers = (self.index,) if isinstance(self.index, int) else self.index
            named = RowSet.of_numbers(size, self._ascending(numbers, size, leaf))
        return ~named if self.inverted else named

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
        if self.keep_state and not self.inverted:
            raise value_error(
                "rows that keep their state are those that train",
                at=leaf.path,
                got=repr(self),
                expected=f"~{self!r}: all other rows are frozen in this step",
                fix="~fz.rows(array, keep_state=True)",
            )
        if named > size and not self.keep_state:
            got = f"{named} row numbers, for {size} rows along axis {self.axis} of shape {leaf.shape}"
            raise named_twice(leaf.path, got)
        count = min(named, size) if self.inverted else size - named
        if count == 0:
            return FROZEN
        if is_concrete(array) and not (self.ascending or self.keep_state):
            self._ascending(np.asarray(array).tolist(), size, leaf)
        if isinstance(array, jax.ShapeDtypeStruct):
            array = jax.ShapeDtypeStruct((count,), jnp.int32)
        elif self.keep_state and not self.ascending:
            array = rows_named(array, size, count)
        elif not (self.ascending and self.inverted):
            array = trainable_rows(array, size, count, self.inverted)
        return DynamicRowIndex(array, axis, size, count, self.of_state, self.keep_state)

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
            ends = zip(reversed(self.array.shape), reversed(leaf.shape or ()), strict=False)
            if len(self.array.shape) <= len(leaf.shape or ()) and all(size in (1, whole) for size, whole in ends):
                fix += f" jnp.broadcast_to(mask, leaf.shape); {rows}"
            else:
                fix = rows if axis is not None else "mask = np.ones(leaf.shape, bool), and False where elements train"
            raise value_error(what, at=leaf.path, got=got, expected=expected, fix=fix)
        if self.compact and self.count is None:
            what = "the elements of a compact mask cannot be counted"
            expected = "an array with values: the number of trainable elements is static"
            fix = "resolve it outside jit (tx.init, fz.spec_of), or leave compact=False"
            raise value_error(what, at=leaf.path, got="a traced array, or only a shape", expected=expected, fix=fix)
        return FROZEN if self.count == 0 else DenseMask(self.array, self.compact, self.count, self.of_state)

    def __invert__(self) -> "Elements":
        array = ~jnp.asarray(self.array)
        return Elements(array, self.compact, None if self.count is None else array.size - self.count)

    def __repr__(self) -> str:
        shape = getattr(self.array, "shape", "?")
        return f"fz.elements(<bool{list(shape)}>{', compact=True' if self.compact else ''})"


ElementMask: TypeAlias = StaticRows | DynamicRows | Elements
Choice: TypeAlias = bool | ElementMask
"""What a spec says about a leaf: True freezes it, False trains it, an element mask freezes a part of it."""


def mask_of(frozen: RowSet, axis: int) -> Choice:
    """What a spec says about a leaf of which these rows are frozen; a slice if they are one run, or all others are."""
    if frozen.count in (0, frozen.size):
        return frozen.count > 0
    for named, inverted in ((frozen, False), (~frozen, True)):
        if named.run is not None:
            return StaticRows(slice(*named.run), axis, inverted)
    return StaticRows(tuple(frozen.numbers.tolist()), axis)


def combined(a: Choice, b: Choice, leaf: Leaf, selector: Any, *, either: bool) -> Choice:
    """What at least one of two masks freezes if ``either``, else what both do; an error unless these are rows."""
    if isinstance(a, StaticRows) and isinstance(b, StaticRows):
        first, second = a.frozen_rows(leaf), b.frozen_rows(leaf)
        for rows, other in ((first, b), (second, a)):
            if rows.count in (0, rows.size):
                return either if (rows.count == rows.size) is either else other
        axes = {each.fit(leaf).axis for each in (a, b)}  # type: ignore[attr-defined]
        if len(axes) == 1:
            return mask_of(first | second if either else first & second, *axes)
    what, got = f"{selector!r}: two element masks for one leaf", f"{a!r} and {b!r}"
    expected = "one mask for a leaf, or static rows along one axis"
    fix = as_arrays(a, b, "|" if either else "&", leaf.shape)
    raise value_error(what, at=leaf.path, got=got, expected=expected, fix=fix)


def choice_of(selection: Selection) -> Choice:
    """What a spec says about a leaf that has this selection."""
    if isinstance(selection, DynamicRowIndex):
        options = {"of_state": selection.of_state, "keep_state": selection.keep_state}
        return DynamicRows(selection.array, selection.axis, True, ascending=True, **options)
    if isinstance(selection, DenseMask):
        return Elements(selection.array, selection.compact, selection.count, selection.of_state)
    return selection.mask if isinstance(selection, RowIndex) else selection is FROZEN
