"""A selection without its array as JSON, in the records of checkpoints and of stored features."""

import math
from collections.abc import Sequence
from typing import Any

from optax_freeze._errors import is_int
from optax_freeze._spec.masks import mask_of
from optax_freeze._spec.row_set import RowSet
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, DynamicRowIndex, RowIndex, Selection
from optax_freeze._spec.tree import MASKED_NODE, Leaf


def record_of(selection: Selection) -> Any:
    """The record of a selection: True if all is frozen, False if nothing is, a dict of the frozen part otherwise."""
    if isinstance(selection, RowIndex):
        return {"axis": selection.axis, "rows": selection.rows.as_json(), "train": not selection.rows.others}
    if isinstance(selection, DynamicRowIndex):
        kept = {"keep_state": True} if selection.keep_state else {}
        return {"axis": selection.axis, "count": selection.count, "dynamic": True, **kept}
    if isinstance(selection, DenseMask):
        return {"compact": selection.compact, "count": selection.count}
    return selection is FROZEN


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
            found = RowSet.of_json(shape[axis], rows, others=not train)
            if found is not None and 0 < found.count < found.size:
                return mask_of(~found, axis).fit(Leaf("", tuple(shape)))  # type: ignore[union-attr]
    raise ValueError(f"the frozen part {record!r}")
