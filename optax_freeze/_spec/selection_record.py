"""Reads a selection, without its array, in the records of checkpoints and of stored features."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from optax_freeze._errors import is_int
from optax_freeze._spec.masks import mask_of
from optax_freeze._spec.row_set import RowSet
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, DynamicRowIndex, Selection
from optax_freeze._spec.tree import MASKED_NODE, Leaf


def selection_of(record: Any, shape: Sequence[int] | None) -> Selection:
    """The selection of a leaf with this record, without its array; a ``ValueError`` if there is none."""
    match record:
        case bool():
            return FROZEN if record else TRAINABLE
        case _ if shape is None:
            pass
        case {"compact": bool(compact), "count": count, **others} if not others and (
            is_int(count) and 0 < count <= math.prod(shape) if compact else count is None
        ):
            return DenseMask(MASKED_NODE, compact, count)
        case {"axis": axis, "count": count, "dynamic": True, **others} if (
            not others and is_int(axis) and is_int(count) and axis in range(len(shape)) and 0 < count <= shape[axis]
        ):
            return DynamicRowIndex(MASKED_NODE, axis, shape[axis], count)
        case {"axis": axis, "rows": [_, *_] as rows, "train": bool(train), **others} if (
            not others and is_int(axis) and axis in range(len(shape))
        ):
            found = _row_set(shape[axis], rows, others=not train)
            if found is not None and 0 < found.count < found.size:
                return mask_of(~found, axis).fit(Leaf("", tuple(shape)))  # type: ignore[union-attr]
    raise ValueError(f"the frozen part {record!r}")


def _row_set(size: int, rows: Any, *, others: bool) -> RowSet | None:
    """The set with these progressions, if they are those of a set."""
    if not all(isinstance(each, list) and len(each) == 3 and all(map(is_int, each)) for each in rows):
        return None
    if not all(0 <= start < stop <= size and step > 0 for start, stop, step in rows):
        return None
    runs = RowSet(size, tuple(map(tuple, rows)), others).runs
    if not all(before[1] < after[0] for before, after in itertools.pairwise(runs)):
        return None
    found = RowSet.of_runs(size, runs)
    return found if (found.as_json(), found.others) == (rows, others) else None
