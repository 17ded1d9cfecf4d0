"""A selection as JSON, in the records of checkpoints and of stored features.

A record says which elements train, not how the user wrote it: equal selections have equal records. The array of a
selection, if it has one, is not part of its record.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from optax_freeze._errors import is_int
from optax_freeze._spec.masks import Rows, Slice
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, DynamicRowIndex, RowIndex, Selection
from optax_freeze._spec.tree import HOLE


def record_of(selection: Selection) -> Any:
    """The record of a selection: True if all is frozen, False if nothing is, a dict of the frozen part otherwise."""
    if isinstance(selection, RowIndex):
        picked = [list(progression) for progression in selection.picked]
        return {"axis": selection.axis, "rows": picked, "train": selection.picked_train}
    if isinstance(selection, DynamicRowIndex):
        return {"axis": selection.axis, "count": selection.count, "dynamic": True}
    if isinstance(selection, DenseMask):
        return {"compact": selection.compact, "count": selection.count}
    return selection is FROZEN


def selection_of(record: Any, shape: Sequence[int] | None) -> Selection:
    """The selection of a leaf of this shape with this record, with a hole in the place of its array.

    A leaf without a shape is frozen or trains as a whole.

    Raises:
      ValueError: if no selection has this record.
    """
    match record:
        case bool():
            return FROZEN if record else TRAINABLE
        case _ if shape is None:
            pass
        case {"compact": bool(compact), "count": count, **others} if not others and (
            is_int(count) and 0 < count <= math.prod(shape) if compact else count is None
        ):
            return DenseMask(HOLE, compact, count)
        case {"axis": axis, "count": count, "dynamic": True, **others} if (
            not others and is_int(axis) and is_int(count) and axis in range(len(shape)) and 0 < count <= shape[axis]
        ):
            return DynamicRowIndex(HOLE, axis, shape[axis], count)
        case {"axis": axis, "rows": [_, *_] as picked, "train": bool(train), **others} if (
            not others and is_int(axis) and axis in range(len(shape)) and are_ascending(picked, shape[axis])
        ):
            numbers = tuple(n for run in picked for n in range(*run)) if len(picked) > 1 else Slice(*picked[0])
            index = RowIndex(Rows(numbers, axis, train), axis, shape[axis], tuple(map(tuple, picked)), train)
            if 0 < index.count < index.size and record_of(index.canonical()) == record:
                return index
    raise ValueError(f"the frozen part {record!r}")


def are_ascending(runs: Any, size: float) -> bool:
    """Whether these are rows of a record: progressions ``[start, stop, step]`` in order, in a leaf of ``size`` rows."""
    if not all(isinstance(run, list) and len(run) == 3 and all(map(is_int, run)) for run in runs):
        return False
    if not all(0 <= start < stop <= size and step > 0 for start, stop, step in runs):
        return False
    return all(before[1] < after[0] for before, after in itertools.pairwise(runs))
