"""Carries values of an optimizer state into another one, in which other elements of the parameters train.

Arrays are merged element by element, or row by row along the axis of their rows, or continue as they are if the rows of
a leaf share them. Numbers beside moments, such as a count, continue, unless no element of the moments does.
"""

import collections
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import is_array, is_concrete, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.indexing import at, of_each_row, select
from optax_freeze._spec.memory_kinds import to_device
from optax_freeze._spec.selection import RowSelection, Selection
from optax_freeze._spec.sharding import explicit_sharding, with_sharding
from optax_freeze._spec.tree import Part
from optax_freeze._state.row_axes import Axes, moved_axes, row_axes, rows_along
from optax_freeze._state.state_entries import Entry, no_fit

Bool: TypeAlias = Any
"""A bool, or a boolean array that may be traced."""


class Carried(NamedTuple):
    """An old entry from which a new one takes values.

    ``by`` is ``"rows"`` for each row, or compact element, that ``stays``, from its ``position`` along ``axes``;
    ``"elements"`` for each element of the parameter that ``stays``; ``"arrays"`` for the arrays as they are.
    """

    old: Entry
    by: Literal["rows", "elements", "arrays"]
    kept: Bool = True  # whether any element continues to train
    changed: Bool = False  # whether the elements differ
    stays: Bool = True
    position: Any = None
    axes: Axes = ()

    def merge(self, entry: Entry, arrays: Sequence[Any]) -> list[Any]:
        """The arrays of a new entry with the values of the old one."""
        olds = self.old.arrays
        if self.by == "arrays":
            return olds
        if self.by == "rows":
            each = zip(self.axes, arrays, olds, strict=True)
            return [old if axis is None else self._move(axis, new, old) for axis, new, old in each]
        return [self._elements(entry, *pair) for pair in zip(arrays, olds, strict=True)]

    def _elements(self, entry: Entry, new: Any, old: Any) -> Any:
        full = _full(self.old, old)
        if (moved := self.old.moved) is not None:
            full = at(full, moved.axis, jnp.asarray(moved.rows)).get(mode="clip")
        if self.stays is not True:
            full = _choose(~self.stays, _full(entry, new), full)
        selection = entry.selection if isinstance(entry.value, Part) else None
        return full if selection is None else selection.take(full).values

    def _move(self, axis: int, new: Any, old: Any) -> jax.Array:
        def moved(new: Any, old: Any, position: Any, stays: Any) -> jax.Array:
            rows = at(old, axis, position).get(mode="clip")
            return select(of_each_row(stays, axis, new.ndim), rows, new)

        new, old = jnp.asarray(new, old.dtype), to_device(jnp.asarray(old))
        return with_sharding(explicit_sharding(new), moved, new, old, self.position, self.stays)


class CarriedValues:
    """The values of an old state in a new one, with ``entries``: for each, ``sources`` are those of the old one.

    ``anew`` says whether the transformation at a place begins anew: if all its elements are new, or if some are and it
    has a history, whose numbers are about all of them together, the gradient of a line search, or an array of which it
    is not known along which axis the rows are.
    """

    def __init__(
        self, entries: Sequence[Entry], old: Sequence[Entry], olds: Sequence[Sequence[Entry]], tx: Any, params: Any
    ) -> None:
        """``entries`` are of ``tx.init(params)``, ``old`` of the old state, ``olds`` those at the address of each."""
        self.entries = entries
        moved = moved_axes(entries, olds, tx, params)
        in_part = any(entry.parts or isinstance(entry.value, Part) for entry in entries)
        nodes = [entry.value for entry in entries]
        axes, certain = row_axes(nodes, tx, params) if in_part else ([()] * len(entries), [True] * len(entries))
        self.sources = [
            [found for old in each if (found := _source(entry, old, its_axes, moved.get(i))) is not None]
            for i, (entry, each, its_axes) in enumerate(zip(entries, olds, axes, strict=True))
        ]
        self.sources = _without_some(entries, self.sources, olds)
        self._uncertain = {i for i, is_certain in enumerate(certain) if not is_certain}
        self._held: dict[Any, set[str]] = collections.defaultdict(set)  # the leaves of each place before
        for entry in old:
            if entry.leaf is not None and entry.arrays:
                self._held[_place(entry)[0]].add(entry.leaf)
        by_place: dict[Any, list[int]] = collections.defaultdict(list)
        for i, entry in enumerate(entries):
            by_place[_place(entry)[0]].append(i)
        self.anew: dict[Any, Bool] = {place: self._begins_anew_at(place, inside) for place, inside in by_place.items()}

    def _begins_anew_at(self, place: tuple[Any, str], inside: Sequence[int]) -> Bool:
        """:attr:`anew` at a place, which has the entries with these numbers."""
        entries, sources = self.entries, self.sources
        moments = [i for i in inside if entries[i].leaf is not None]
        # Adam with new moments and an old count would take a first step of up to 3.2 times the usual one.
        flags = [_not(_any([source.kept for i in moments for source in sources[i]]))]
        fields = {_place(entries[i])[1] for i in inside}
        # The inner products of L-BFGS, and a line search, are about all elements: with others they mean another loss.
        if {"grad", "value"} <= fields or any(_is_history(entries[i]) or i in self._uncertain for i in moments):
            leaves = {entries[i].leaf for i in moments if entries[i].arrays}
            before = [source for i in moments for source in sources[i]]
            flags += [source.changed for source in before]
            flags += [self._held[_place(source.old)[0]] != leaves for source in before]
            flags += [bool(entries[i].arrays) for i in moments if not sources[i]]
        return any(entries[i].arrays for i in moments) and _any(flags)

    def begins_anew(self, entry: Entry) -> Bool:
        """Whether a new entry keeps its initial values."""
        return self.anew[_place(entry)[0]] if entry.leaf is not None or _is_number(entry) else False

    def values(self) -> Iterator[Any]:
        """The arrays of the new state, in its order."""
        for entry, sources in zip(self.entries, self.sources, strict=True):
            anew, arrays = self.begins_anew(entry), entry.arrays
            for source in [] if anew is True else sources:
                arrays = source.merge(entry, arrays)
            if not isinstance(anew, bool):
                arrays = [_choose(anew, *pair) for pair in zip(entry.arrays, arrays, strict=True)]
            yield from arrays


def _place(entry: Entry) -> tuple[Any, str]:
    """The scope and the address of the state of one transformation, and the field there."""
    path, _, field = (str(entry.address) if entry.leaf is None else entry.tree).rpartition("/")
    return (entry.scope, path), field


def _is_number(entry: Entry) -> bool:
    """Whether an entry has numbers that may belong to moments: no random key, and no number of a wrapper."""
    if entry.optional or entry.wrapper_field or not is_array(entry.value):
        return False
    dtype = entry.value.dtype
    is_scalar = entry.value.shape == () and not jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return is_scalar or jnp.issubdtype(dtype, jnp.inexact)


def _is_history(entry: Entry) -> bool:
    """Whether an entry has several arrays of the shape of its parameter, or of a part of it."""
    shape, shapes = entry.shape_of_part, map(np.shape, entry.arrays)
    return any(shape and len(its) > len(shape) and its[-len(shape) :] == shape for its in shapes)


def _source(entry: Entry, old: Entry, axes: Axes, axes_of_moved: Axes | None = None) -> Carried | None:
    """How a new entry takes values from an old one."""
    if not entry.arrays or not old.arrays:
        return None
    _refuse_unknown_rows(entry, old, axes)
    before: Any = old.selection
    now: Any = entry.selection
    if old.moved is not None:
        return _source_of_moved(entry, old, axes_of_moved)
    shape, *others = [[np.shape(array) for array in each.arrays] for each in (entry, old)]
    in_parts = isinstance(entry.value, Part), isinstance(old.value, Part)
    same, fits = _same(before, now), [shape] == others
    if same and fits:
        return Carried(old, "arrays")
    axis_of = lambda each: each.axis if isinstance(each, RowSelection) else None  # noqa: E731
    if all(in_parts) and axis_of(before) == axis_of(now):
        return _source_of_rows(entry, old, axes)
    frozen = [selection.frozen(len(entry.shape)) for selection in (before, now)]
    stays = _not(_any(frozen))
    kept, changed = (x if isinstance(x, bool) else x.any() for x in (stays, not same and jnp.not_equal(*frozen)))
    if _are_moments(entry, old):
        return Carried(old, "elements", kept, changed, stays)
    if any(in_parts):
        return None
    if not fits:
        raise no_fit(old, f"shape {others[0][0]}", f"shape {shape[0]}")
    return Carried(old, "arrays", kept, changed)


def _refuse_unknown_rows(entry: Entry, old: Entry, axes: Axes) -> None:
    if old.selection is None or entry.selection is None:
        raise value_error(
            "the state does not contain the mask of a leaf",
            at=old.name,
            got="compact elements or dynamic rows, without their mask",
            expected="the state of fz.freeze around the optimizer, which has the mask",
            fix="train with fz.freeze(tx, frozen), or rows, or fz.elements(mask) without compact",
        )
    if entry.leaf is None and any(axis is not None for axis in axes) and not _same_rows(entry, old):
        raise value_error(
            "an array of the state contains the rows of several leaves",
            at=old.name,
            got="a spec with other rows",
            expected="the same rows, or an optimizer with an array for each leaf",
            fix="create a new state: tx.init(params)",
        )


def _source_of_rows(entry: Entry, old: Entry, axes: Axes) -> Carried | None:
    """:func:`_source` if both have rows along one axis, or compact elements."""
    before: Any = old.selection
    now: Any = entry.selection
    pairs = zip(axes, entry.arrays, old.arrays, strict=False)
    expected = [tuple(before.count if i == axis else n for i, n in enumerate(np.shape(new))) for axis, new, _ in pairs]
    if expected != list(map(np.shape, old.arrays)):
        return None
    size = now.size if isinstance(now, RowSelection) else math.prod(entry.shape)
    a, b = before.indices(), now.indices()
    position = jnp.minimum(jnp.searchsorted(a, b), before.count - 1)
    stays = (jnp.take(a, position, mode="clip") == b) & (b < size)
    changed = before.count != now.count or (a != b).any()
    return Carried(old, "rows", stays.any(), changed, stays, position, axes)


def _source_of_moved(entry: Entry, old: Entry, axes: Axes | None) -> Carried | None:
    """:func:`_source` if rows of the parameter are not where they were; ``axes`` are those of its rows, if known."""
    before: Any = old.selection
    now: Any = entry.selection
    moved = old.moved
    if axes is not None:
        a, b = rows_along(before, moved.size), rows_along(now, len(moved.rows))
        wanted = moved.rows[np.minimum(b, len(moved.rows) - 1)]
        position = np.searchsorted(a, wanted)
        stays = (a.take(position, mode="clip") == wanted) & (wanted >= 0) & (b < len(moved.rows))
        return Carried(old, "rows", bool(stays.any()), True, jnp.asarray(stays), jnp.asarray(position), axes)
    if not _are_moments(entry, old):
        return None
    frozen = np.broadcast_to(np.asarray(before.frozen(len(old.shape))), old.shape)
    stays = ~(moved.take(frozen, True) | np.asarray(now.frozen(len(entry.shape))))
    return Carried(old, "elements", bool(stays.any()), True, jnp.asarray(stays))


def _are_moments(entry: Entry, old: Entry) -> bool:
    """Whether all arrays of both entries have an element for each of the parameter, or of its trainable part."""
    fits = (all(np.shape(x) == e.shape_of_part and e.leaf is not None for x in e.arrays) for e in (entry, old))
    return all(fits) and len(entry.arrays) == len(old.arrays)


def _without_some(
    entries: Sequence[Entry], sources: Sequence[list[Carried]], olds: Sequence[Sequence[Entry]]
) -> list[list[Carried]]:
    """The sources without those of a leaf of which rows have moved, if one of its arrays cannot follow them."""
    stuck = {
        (_place(entry)[0], entry.leaf)
        for entry, its, each in zip(entries, sources, olds, strict=True)
        if entry.arrays and len(its) < len(each) and any(old.moved is not None for old in each)
    }
    return [[] if (_place(entry)[0], entry.leaf) in stuck else its for entry, its in zip(entries, sources, strict=True)]


def _same(a: Selection, b: Selection) -> bool:
    """Whether two selections are the same whatever the values of their arrays."""
    return a is b or (a == b and (_tree.is_masked_node(a.array) or a.array is b.array))


def _same_rows(entry: Entry, old: Entry) -> bool:
    """Whether the same rows of each leaf are known to train around two entries."""
    pair = entry, old
    rows, others = ([s for parts in e.parts for s in parts.values() if isinstance(s, RowSelection)] for e in pair)
    frozen = [(a.frozen_rows(), b.frozen_rows()) for a, b in zip(rows, others, strict=False) if not _same(a, b)]
    equal = all(is_concrete(a) and is_concrete(b) and np.array_equal(a, b) for a, b in frozen)
    return len(rows) == len(others) and equal


def _full(entry: Entry, array: Any) -> Any:
    """The array of an entry in the shape of its parameter, with zeros for missing elements."""
    if entry.selection is None or not isinstance(entry.value, Part):
        return to_device(array)
    part = Part(to_device(array), entry.value.index, entry.value.shape)
    return entry.selection.spread(part, np.zeros((), array.dtype))


def _choose(mask: Any, new: Any, old: Any) -> Any:
    """``new`` where a mask is True and ``old`` elsewhere, with the dtype and the layout of the latter."""
    old = to_device(jnp.asarray(old))
    return with_sharding(explicit_sharding(old), select, mask, jnp.asarray(new, old.dtype), old)


def _any(flags: Sequence[Bool]) -> Bool:
    if any(flag is True for flag in flags):
        return True
    unknown = [flag for flag in flags if flag is not False]
    return functools.reduce(jnp.logical_or, unknown) if unknown else False


def _not(flag: Bool) -> Bool:
    return not flag if isinstance(flag, bool) else ~flag
