"""Rows of a leaf that are not where they were, since the model has grown or was pruned."""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_freeze._spec.selection import TRAINABLE, RowSelection, Selection
from optax_freeze._state.row_axes import Axes, Resized, axes_of_moved
from optax_freeze._state.state_entries import Entry


class Moved(NamedTuple):
    """For each row of a leaf along an axis which one of the ``size`` old rows it was; -1 if it begins anew."""

    axis: int
    rows: np.ndarray
    size: int

    @property
    def loses_rows(self) -> bool:
        return len(np.unique(self.rows[self.rows >= 0])) < self.size

    def take(self, array: Any, fill: Any) -> Any:
        """The rows of an array of the old leaf, or of one that broadcasts to its shape; ``fill`` for new rows."""
        column = tuple(-1 if i == self.axis else 1 for i in range(array.ndim))
        if array.shape[self.axis] == 1:
            array = np.broadcast_to(array, tuple(self.size if i == self.axis else n for i, n in enumerate(array.shape)))
        found = array.take(np.maximum(self.rows, 0), self.axis)
        return np.where((self.rows >= 0).reshape(column), found, fill)


def rows_along(selection: Any, size: int) -> np.ndarray:
    """The numbers of the rows that train."""
    return np.arange(size) if selection is TRAINABLE else np.asarray(selection.indices(selection.array))


def moved_axes(entries: Sequence[Entry], olds: Sequence[Sequence[Entry]], tx: Any, params: Any) -> dict[int, Axes]:
    """For the entries of leaves of which rows have moved the axes of these, where they are known.

    Both the old and the new selection have to be rows along this axis, or the whole leaf.
    """
    found: dict[int, Entry] = {}
    resize: dict[str, set[Resized]] = collections.defaultdict(set)
    for i, (entry, each) in enumerate(zip(entries, olds, strict=True)):
        if len(each) != 1 or each[0].moved is None or not (entry.arrays and each[0].arrays):
            continue
        [old] = each
        if _is_along(entry.selection, old.moved.axis) and _is_along(old.selection, old.moved.axis):
            before, now = rows_along(old.selection, old.moved.size), rows_along(entry.selection, len(old.moved.rows))
            more = len(before) - len(now)
            resize[str(entry.leaf)].add(Resized(old.moved.axis, more, entry.selection is not TRAINABLE))
            found[i] = old
    known = {path: each.copy().pop() for path, each in resize.items() if len(each) == 1}
    found = {i: old for i, old in found.items() if entries[i].leaf in known}
    axes = axes_of_moved([entry.value for entry in entries], tx, params, known) if found else None
    if axes is None:
        return {}
    now, before, shapes = axes
    fits = {
        i: now[i] == before[i] and "rank" not in now[i] and shapes[i] == [np.shape(array) for array in old.arrays]
        for i, old in found.items()
    }
    return {i: now[i] for i, fit in fits.items() if fit}


def _is_along(selection: Selection | None, axis: int) -> bool:
    return selection is TRAINABLE or (isinstance(selection, RowSelection) and selection.axis == axis)
