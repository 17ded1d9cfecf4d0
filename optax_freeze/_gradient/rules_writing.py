"""Rules for operations that write into an array: scatters and slice updates.

They write into both parts, so nothing is merged. If a value that may have a gradient is written into a frozen row whose
number is known, the row becomes trainable.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._gradient.constants import known
from optax_freeze._gradient.row_numbers import locate, numbers
from optax_freeze._gradient.rules import Equation, rule
from optax_freeze._gradient.split_array import (
    SplitArray,
    has_split,
    trainable_rows,
    undifferentiated,
    with_guarded_rows,
)

_CLIP = jax.lax.GatherScatterMode.CLIP


@rule("dynamic_update_slice")
def dynamic_update_slice(eqn: Equation, x: Any, updates: Any, *starts: Any) -> Any:
    """Writes a block into all or some rows."""
    if has_split((updates, *starts)):
        return None
    length = np.shape(updates)[x.axis]
    if length == x.size:
        return _write_all(x, updates, x.axis, lambda array, block: eqn.bind(array, block, *starts))

    def write(array: Any, block: Any, start: Any) -> Any:
        return eqn.bind(array, block, *starts[: x.axis], start, *starts[x.axis + 1 :])

    return _write_block(x, updates, x.axis, known(starts[x.axis]), write, clips=True)


@rule("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub")
def scatter(eqn: Equation, x: Any, indices: Any, updates: Any) -> Any:
    """Writes columns into all rows, single rows, or one block of rows; products and extremes only into all rows."""
    numbering = eqn.params["dimension_numbers"]
    indices, gone = known(indices), (*numbering.inserted_window_dims, *numbering.operand_batching_dims)
    if has_split((indices, updates)) or x.axis in numbering.operand_batching_dims:
        return None
    indexed = x.axis in numbering.scatter_dims_to_operand_dims
    linear = eqn.primitive.name in ("scatter", "scatter-add", "scatter-sub")
    if x.axis in gone:
        return _write_single_rows(eqn, x, indices, updates) if indexed and linear else None
    along = numbering.update_window_dims[[d for d in range(x.frozen.ndim) if d not in gone].index(x.axis)]
    if not indexed:
        if np.shape(updates)[along] != x.size:
            return None
        return _write_all(x, updates, along, lambda array, block: eqn.bind(array, indices, block))
    column = numbering.scatter_dims_to_operand_dims.index(x.axis)
    if not linear or np.ndim(indices) != 1:
        return None

    def write(array: Any, block: Any, start: Any) -> Any:
        at = [start if c == column else indices[c] for c in range(len(indices))]
        return eqn.bind(array, (np if isinstance(indices, np.ndarray) else jnp).stack(at), block)

    return _write_block(x, updates, along, indices[column], write, eqn.params["mode"] == _CLIP)


def _write_all(x: SplitArray, updates: Any, along: int, write: Callable[..., Any]) -> SplitArray:
    """Writes into all rows; ``updates`` has one entry per row on the axis ``along``."""
    is_frozen = dataclasses.replace(x.index, axis=along).frozen(np.ndim(updates))
    for_frozen = jnp.where(is_frozen, updates, undifferentiated(x, updates))
    return x.like(write(x.frozen, for_frozen), write(x.rows, trainable_rows(x.index, updates, along)))


def _write_block(
    x: SplitArray, updates: Any, along: int, start: Any, write: Callable[..., Any], clips: bool
) -> SplitArray:
    """Writes a block of rows, which lie on the axis ``along`` of ``updates``, from row ``start`` on.

    A block that is out of range is moved into range (``clips``) or dropped.
    """
    length = np.shape(updates)[along]
    most, number = x.size - length, _wide(start)
    number = _clipped(number, most) if clips else number
    x, for_frozen = _prepared(x, updates, number + np.arange(length))
    offsets = numbers(x.index) - number
    inside = (offsets >= 0) & (offsets < length) & (number >= 0) & (number <= most)
    inside = inside.reshape([-1 if d == x.axis else 1 for d in range(x.rows.ndim)])
    block = jnp.take(updates, offsets.clip(0, length - 1), axis=along, mode="clip")
    first = (jnp if isinstance(start, jax.Array) else np).zeros_like(start)
    rows = jnp.where(inside, write(x.rows, block, first), x.rows)
    return with_guarded_rows(x.like(write(x.frozen, for_frozen, start), rows))


def _write_single_rows(eqn: Equation, x: SplitArray, indices: Any, updates: Any) -> SplitArray | None:
    """Writes one row for each index; indices of frozen rows are out of range for the part with the trainable rows."""
    numbering, clips = eqn.params["dimension_numbers"], eqn.params["mode"] == _CLIP
    if clips and indices.shape[-1] > 1:
        return None
    column = numbering.scatter_dims_to_operand_dims.index(x.axis)
    number = _wide(indices[..., column])
    number = _clipped(number, x.size - 1) if clips else number
    x, for_frozen = _prepared(x, updates, number)
    trains, position = locate(x.index, jnp.asarray(number))
    nowhere = x.index.count + np.arange(number.size, dtype=np.int32).reshape(number.shape)  # unique, as indices may be
    columns = [
        jnp.where(trains, position, nowhere) if c == column else indices[..., c] for c in range(indices.shape[-1])
    ]
    rows = eqn.bind(
        x.rows,
        jnp.stack(columns, -1),
        updates,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        indices_are_sorted=False,
    )
    return with_guarded_rows(x.like(eqn.bind(x.frozen, indices, for_frozen), rows))


def _prepared(x: SplitArray, updates: Any, written: Any) -> tuple[SplitArray, Any]:
    """Returns ``x`` and the updates for its frozen part, before ``updates`` are written into the rows ``written``.

    These rows become trainable if their numbers are known and the updates may have a gradient, unless all rows of ``x``
    would be trainable.
    """
    if not (isinstance(written, np.ndarray) and isinstance(updates, Tracer)):
        return x, updates
    written = np.unique(written)
    trains = np.union1d(numbers(x.index), written[(written >= 0) & (written < x.size)])
    if len(trains) == x.size:
        return x, updates
    x = x.widened(trains)
    return x, undifferentiated(x, updates)


def _wide(i: Any) -> Any:
    """Casts row numbers to at least 32 bits, so that they can represent any row."""
    return i if i.dtype.itemsize >= 4 else i.astype(np.int32)


def _clipped(start: Any, most: int) -> Any:
    return (jnp if isinstance(start, jax.Array) else np).clip(start, 0, most)
