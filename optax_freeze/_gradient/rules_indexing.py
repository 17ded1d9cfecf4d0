"""Rules for slices and lookups, which read each row from the part that contains it.

Neither part is copied or padded to the size of the leaf, and the gradient has the size of the trainable rows.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.source_info_util import current

from optax_freeze._gradient.frozen_array import Unread, selected
from optax_freeze._gradient.row_numbers import locate, numbers, of_numbers
from optax_freeze._gradient.rules import Equation, rule
from optax_freeze._gradient.split_array import SplitArray, at_axis, on_device

_FEW_ROWS = 16  # up to this many, a TPU selects the rows in a fused operation instead of a second lookup in memory


def _slice_rows(x: SplitArray, start: int, stop: int, step: int = 1) -> Any:
    """Returns the rows of a static slice; as a dense array if all of them are frozen or all are trainable."""
    if (start, stop, step) == (0, x.size, 1):
        return x
    trains = numbers(x.index)
    inside = (trains >= start) & (trains < stop) & ((trains - start) % step == 0)
    size = len(range(start, stop, step))
    frozen = _frozen_slice(x, start, stop, step)
    places = np.flatnonzero(inside)
    if not places.size:
        return frozen
    if places[-1] - places[0] == places.size - 1:
        rows = jax.lax.slice_in_dim(x.rows, int(places[0]), int(places[-1]) + 1, axis=x.axis)
    else:
        rows = jnp.take(x.rows, places, axis=x.axis, mode="clip", unique_indices=True, indices_are_sorted=True)
    if places.size == size:
        return rows
    return x.like(frozen, rows, index=of_numbers(x.index, (trains[inside] - start) // step, size))


def _frozen_slice(x: SplitArray, start: int, stop: int, step: int) -> Any:
    if isinstance(x.frozen, Unread):
        if x.axis == 0 and step == 1 and (rows := x.frozen.stretch(start, stop - start)) is not None:
            return rows
        x = on_device(x, "slice", current())
    return jax.lax.slice_in_dim(x.frozen, start, stop, step, x.axis)


@rule("slice", late=True)
def static_slice(eqn: Equation, x: SplitArray) -> Any:
    """A static slice, applied first to the other axes and then to the rows."""
    start, stop = eqn.params["start_indices"], eqn.params["limit_indices"]
    step = eqn.params["strides"] or (1,) * len(start)
    bounds = start[x.axis], stop[x.axis], step[x.axis]
    start, step = at_axis(start, x.axis, 0), at_axis(step, x.axis, 1)
    if (start, at_axis(stop, x.axis, x.size)) != ((0,) * len(start), x.frozen.shape) or set(step) != {1}:
        x = on_device(x, "slice", current())
        frozen, rows = (
            jax.lax.slice(part, start, at_axis(stop, x.axis, part.shape[x.axis]), step) for part in (x.frozen, x.rows)
        )
        x = x.like(frozen, rows)
    return _slice_rows(x, *bounds)


@rule("split")
def consecutive_slices(eqn: Equation, x: SplitArray) -> Any:
    """A split into consecutive static slices."""
    if eqn.params["axis"] == x.axis:
        return [_slice_rows(x, *edge) for edge in itertools.pairwise(np.cumsum([0, *eqn.params["sizes"]]).tolist())]
    return [x.like(*parts) for parts in zip(eqn.bind(x.frozen), eqn.bind(x.rows), strict=True)]


@rule("dynamic_slice", late=True)
def dynamic_slice(eqn: Equation, x: Any, *starts: Any) -> Any:
    """A slice of all rows, or of some rows from a start that is known only at run time."""
    if any(isinstance(start, SplitArray) for start in starts):
        return None
    sizes, start = eqn.params["slice_sizes"], starts[x.axis]
    if at_axis(sizes, x.axis, x.size) != x.frozen.shape:
        x = on_device(x, "dynamic_slice", current())
    of_rows = at_axis(sizes, x.axis, x.index.count)
    if sizes[x.axis] == x.size:
        return eqn.bind_parts(x, *starts, slice_sizes=of_rows)
    if not isinstance(start, Tracer):
        first = min(max(int(start), 0), x.size - sizes[x.axis])
        whole = at_axis(sizes, x.axis, x.size)
        if whole != x.frozen.shape:
            x = dynamic_slice(eqn._replace(params={**eqn.params, "slice_sizes": whole}), x, *starts)
        return _slice_rows(x, first, first + sizes[x.axis])
    start = jnp.clip(_wide(start), 0, x.size - sizes[x.axis])
    trains, position = locate(x.index, start + jnp.arange(sizes[x.axis], dtype=start.dtype))
    others = [jnp.zeros_like(s) if d == x.axis else s for d, s in enumerate(starts)]
    part, shape = (
        eqn.bind(x.rows, *others, slice_sizes=of_rows),
        [-1 if d == x.axis else 1 for d in range(x.frozen.ndim)],
    )
    frozen = eqn.bind(x.frozen, *starts)
    if isinstance(frozen, Unread):
        return selected(trains.reshape(shape), position, part, frozen, x.axis)
    rows = jnp.take(part, position, axis=x.axis, mode="clip")
    return jnp.where(trains.reshape(shape), rows, frozen)


@rule("gather")
def gather(eqn: Equation, x: Any, indices: Any) -> Any:
    """A lookup of rows, or a lookup along other axes in all rows."""
    numbering, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if not isinstance(x, SplitArray) or isinstance(indices, SplitArray) or x.axis in numbering.operand_batching_dims:
        return None
    if x.axis in numbering.start_index_map:
        return _look_up_rows(eqn, x, indices) if sizes[x.axis] == 1 else None
    gone = (*numbering.collapsed_slice_dims, *numbering.operand_batching_dims)
    kept = [d for d in range(x.frozen.ndim) if d not in gone]
    if x.axis not in kept or sizes[x.axis] != x.size:
        return None
    axis = numbering.offset_dims[kept.index(x.axis)]
    return eqn.bind_parts(x, indices, axis=axis, slice_sizes=at_axis(sizes, x.axis, x.index.count))


def _look_up_rows(eqn: Equation, x: SplitArray, indices: Any) -> jax.Array:
    """Looks up one row for each index, in the part that contains it."""
    numbering = eqn.params["dimension_numbers"]
    column = numbering.start_index_map.index(x.axis)
    number = _wide(indices[..., column])
    if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
        number = jnp.clip(number, 0, x.size - 1)
    trains, position = locate(x.index, number)
    columns = [position if c == column else _wide(indices[..., c]) for c in range(indices.shape[-1])]
    frozen = eqn.bind(x.frozen, indices)
    index_axes = [d for d in range(frozen.ndim) if d not in numbering.offset_dims]

    def with_second_lookup() -> jax.Array:
        is_trainable = jax.lax.broadcast_in_dim(trains, frozen.shape, index_axes)
        rows = eqn.bind(x.rows, jnp.stack(columns, -1), unique_indices=False, indices_are_sorted=False)
        return jnp.where(is_trainable, rows, frozen)

    whole_rows = (
        len(columns) == 1
        and eqn.params["slice_sizes"] == at_axis(x.frozen.shape, x.axis, 1)
        and numbering.collapsed_slice_dims == (x.axis,)
    )
    explicit = jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    if not whole_rows or explicit or x.index.count > _FEW_ROWS:
        return with_second_lookup()
    return jax.lax.platform_dependent(
        tpu=lambda: _select_rows(x, frozen, trains, position, index_axes), default=with_second_lookup
    )


def _select_rows(x: SplitArray, frozen: Any, trains: Any, position: Any, index_axes: Sequence[int]) -> jax.Array:
    """Returns ``frozen`` with the trainable rows of ``x`` selected at the indices that refer to them."""
    chosen, row_axes = frozen, [d for d in range(frozen.ndim) if d not in index_axes]
    position = jax.lax.broadcast_in_dim(jnp.where(trains, position, -1), frozen.shape, index_axes)
    for i in range(x.index.count):
        row = jax.lax.index_in_dim(x.rows, i, x.axis, keepdims=False)
        chosen = jnp.where(position == i, jax.lax.broadcast_in_dim(row, frozen.shape, row_axes), chosen)
    return chosen


def _wide(i: Any) -> jax.Array:
    """Casts row numbers to at least 32 bits, so that they can represent any row."""
    i = jnp.asarray(i)
    return i.astype(jnp.int32) if i.dtype.itemsize < 4 else i
