"""Operations that read rows: slices, lookups and matmuls, each from the part in which the rows are.

Neither part is copied or padded to the size of the leaf, and the gradient of what trains has its size. The room below
says what a rule is.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._gradient.split_array import Split, at_axis, join, locate, numbers, of_numbers, take

Rule: TypeAlias = Callable[[Any, dict[str, Any], Sequence[Any]], Any]


def cut(x: Split, start: int, stop: int, step: int = 1) -> Any:
    """The rows of a static slice; dense where all of them are frozen or all train."""
    if (start, stop, step) == (0, x.size, 1):
        return x
    trains = numbers(x.index)
    inside = (trains >= start) & (trains < stop) & ((trains - start) % step == 0)
    size = len(range(start, stop, step))
    frozen = jax.lax.slice_in_dim(x.frozen, start, stop, step, x.axis)
    places = np.flatnonzero(inside)
    if not places.size:
        return frozen
    if places[-1] - places[0] == places.size - 1:
        rows = jax.lax.slice_in_dim(x.rows, int(places[0]), int(places[-1]) + 1, axis=x.axis)
    else:
        rows = jnp.take(x.rows, places, axis=x.axis, mode="clip", unique_indices=True, indices_are_sorted=True)
    if places.size == size:
        return rows
    return Split(frozen, rows, of_numbers(x.index, (trains[inside] - start) // step, size), x.origin)


def static_slice(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """A static slice."""
    [x] = values
    start, stop = params["start_indices"], params["limit_indices"]
    step = params["strides"] or (1,) * len(start)
    bounds = start[x.axis], stop[x.axis], step[x.axis]
    start, step = at_axis(start, x.axis, 0), at_axis(step, x.axis, 1)
    if (start, at_axis(stop, x.axis, x.size)) != ((0,) * len(start), x.frozen.shape) or set(step) != {1}:
        frozen, rows = (
            jax.lax.slice(part, start, at_axis(stop, x.axis, part.shape[x.axis]), step) for part in (x.frozen, x.rows)
        )
        x = x.like(frozen, rows)
    return cut(x, *bounds)


def consecutive_slices(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """Static slices one after another."""
    [x] = values
    sizes, axis = params["sizes"], params["axis"]
    if axis == x.axis:
        edges = np.cumsum([0, *sizes]).tolist()
        return [cut(x, *edge) for edge in itertools.pairwise(edges)]
    return [x.like(*parts) for parts in zip(*(primitive.bind(p, **params) for p in (x.frozen, x.rows)), strict=True)]


def dynamic_slice(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """All rows, or some from a row that is known only when the program runs."""
    x, *starts = values
    if any(isinstance(start, Split) for start in starts):
        return None
    sizes = params["slice_sizes"]
    if sizes[x.axis] == x.size:
        of_rows = {**params, "slice_sizes": at_axis(sizes, x.axis, x.index.count)}
        return x.like(primitive.bind(x.frozen, *starts, **params), primitive.bind(x.rows, *starts, **of_rows))
    start = starts[x.axis]
    if not isinstance(start, Tracer):
        first = min(max(int(start), 0), x.size - sizes[x.axis])
        whole = at_axis(sizes, x.axis, x.size)
        if whole != x.frozen.shape:
            x = dynamic_slice(primitive, {**params, "slice_sizes": whole}, [x, *starts])
        return cut(x, first, first + sizes[x.axis])
    start = jnp.clip(_wide(start), 0, x.size - sizes[x.axis])
    trains, place = locate(x.index, start + jnp.arange(sizes[x.axis], dtype=start.dtype))
    of_rows = {**params, "slice_sizes": at_axis(sizes, x.axis, x.index.count)}
    others = [jnp.zeros_like(s) if d == x.axis else s for d, s in enumerate(starts)]
    rows = jnp.take(primitive.bind(x.rows, *others, **of_rows), place, axis=x.axis, mode="clip")
    shape = [-1 if d == x.axis else 1 for d in range(rows.ndim)]
    return jnp.where(trains.reshape(shape), rows, primitive.bind(x.frozen, *starts, **params))


def gather(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """A lookup: one row for each index, from the part that it is in; or other axes of all rows."""
    x, indices = values
    numbering, sizes = params["dimension_numbers"], params["slice_sizes"]
    if not isinstance(x, Split) or isinstance(indices, Split) or x.axis in numbering.operand_batching_dims:
        return None
    rank = len(numbering.offset_dims) + indices.ndim - 1
    of_batch = [d for d in range(rank) if d not in numbering.offset_dims]
    gone = (*numbering.collapsed_slice_dims, *numbering.operand_batching_dims)
    if x.axis not in numbering.start_index_map:
        kept = [d for d in range(x.frozen.ndim) if d not in gone]
        if x.axis not in kept or sizes[x.axis] != x.size:
            return None
        of_rows = {**params, "slice_sizes": at_axis(sizes, x.axis, x.index.count)}
        axis = numbering.offset_dims[kept.index(x.axis)]
        return x.like(primitive.bind(x.frozen, indices, **params), primitive.bind(x.rows, indices, **of_rows), axis)
    if sizes[x.axis] != 1:
        return None
    column = numbering.start_index_map.index(x.axis)
    number = _wide(indices[..., column])
    if params["mode"] == jax.lax.GatherScatterMode.CLIP:
        number = jnp.clip(number, 0, x.size - 1)
    trains, place = locate(x.index, number)
    columns = [place if c == column else _wide(indices[..., c]) for c in range(indices.shape[-1])]
    frozen = primitive.bind(x.frozen, indices, **params)

    def broadcast(of_batches: Any) -> jax.Array:
        return jax.lax.broadcast_in_dim(of_batches, frozen.shape, of_batch)

    def looked_up() -> jax.Array:
        unordered = {**params, "unique_indices": False, "indices_are_sorted": False}
        return jnp.where(broadcast(trains), primitive.bind(x.rows, jnp.stack(columns, -1), **unordered), frozen)

    def selected() -> jax.Array:
        chosen, across = frozen, [d for d in range(frozen.ndim) if d not in of_batch]
        for i in range(x.index.count):
            row = jax.lax.index_in_dim(x.rows, i, x.axis, keepdims=False)
            row = jax.lax.broadcast_in_dim(row, frozen.shape, across)
            chosen = jnp.where(broadcast(trains & (place == i)), row, chosen)
        return chosen

    whole_rows = sizes == at_axis(x.frozen.shape, x.axis, 1) and numbering.collapsed_slice_dims == (x.axis,)
    explicit = jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    if x.index.count <= _FEW_ROWS and len(columns) == 1 and whole_rows and not explicit:
        return jax.lax.platform_dependent(tpu=selected, default=looked_up)
    return looked_up()


_FEW_ROWS = 16
"""So many rows a TPU selects, fused with what reads them, instead of a second lookup in memory."""


def dot_general(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """A matmul of which the rows are a free, a batch or a contracted dimension."""
    left, right = values
    mine = 0 if isinstance(left, Split) else 1
    x, other = (left, right) if mine == 0 else (right, left)
    contracting, batch = params["dimension_numbers"]
    if isinstance(other, Split) and x.axis in (*contracting[mine], *batch[mine]):
        return None

    def product(part: Any, with_other: Any) -> Any:
        operands = (part, with_other) if mine == 0 else (with_other, part)
        if isinstance(with_other, Split):
            return dot_general(primitive, params, operands)
        return primitive.bind(*operands, **params)

    few = 4 * x.index.count <= x.size
    trains = numbers(x.index)
    rest = None if few else of_numbers(x.index, np.setdiff1d(np.arange(x.size), trains), x.size)

    if x.axis in contracting[mine]:
        axis = contracting[1 - mine][contracting[mine].index(x.axis)]
        rows = product(x.rows, take(x.index, other, axis))
        if rest is not None:
            return product(take(rest, x.frozen), take(rest, other, axis)) + rows
        return product(x.cleared(), x.cleared(other, axis)) + rows
    if params.get("out_sharding") is not None:
        return None
    if x.axis in batch[mine]:
        at = batch[mine].index(x.axis)
        out, axis = at, batch[1 - mine][at]
        rows = product(x.rows, take(x.index, other, axis))
        if rest is None:
            return join(x.index, out, product(x.cleared(), other), rows)
        frozen = product(take(rest, x.frozen), take(rest, other, axis))
    else:
        free = [d for d in range(x.frozen.ndim) if d not in (*contracting[mine], *batch[mine])]
        before = len(batch[0]) + (0 if mine == 0 else _ndim(other) - len(contracting[1]) - len(batch[1]))
        out = before + free.index(x.axis)
        rows = product(x.rows, other)
        if rest is None:
            return join(x.index, out, product(x.cleared(), other), rows)
        frozen = product(take(rest, x.frozen), other)
    order = np.argsort(np.concatenate([numbers(rest), trains]))
    together = jnp.concatenate([frozen, rows], axis=out)
    return jnp.take(together, order, axis=out, mode="clip", unique_indices=True)


def _ndim(value: Any) -> int:
    return np.ndim(value.frozen if isinstance(value, Split) else value)


def _wide(i: Any) -> jax.Array:
    """Row numbers in at least 32 bits, so that any row can be named."""
    i = jnp.asarray(i)
    return i.astype(jnp.int32) if i.dtype.itemsize < 4 else i
