"""What the primitives of JAX make of an array in two parts, one rule for each kind of operation.

A rule is ``rule(primitive, params, values)``, where some of the values are a :class:`~optax_freeze._split.Split`. It
returns the result, in two parts as long as the rows stay apart and dense where they are read. It returns None where the
operation needs the array in one piece. Each is exact in both parts: it holds whichever of them is differentiated, and
how often.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._split import Split, dense, join, locate, numbers, of_numbers, take

Rule = Callable[[Any, dict[str, Any], Sequence[Any]], Any]

ELEMENTWISE = frozenset(
    "abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp conj convert_element_type copy copy_p cos cosh "
    "digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic "
    "lt max min mul name ne neg nextafter not or pow pvary real reduce_precision rem round rsqrt select_n sign sin sinh "
    "sqrt square stop_gradient sub tan tanh xor".split()
)


def rule_of(primitive: Any) -> Rule | None:
    """The rule for a primitive, if there is one. Primitives are known by their names."""
    return elementwise if primitive.name in ELEMENTWISE else RULES.get(primitive.name)


def elementwise(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """Any number of operands of one shape, or scalars."""
    if params.get("sharding") is not None:
        return None
    first = next(v for v in values if isinstance(v, Split))
    frozen, rows = [], []
    for value in values:
        if isinstance(value, Split) and value.index == first.index:
            frozen.append(value.frozen)
            rows.append(value.rows)
        else:
            value = dense(value)
            frozen.append(value)
            rows.append(take(first.index, value) if np.ndim(value) else value)
    return first.like(primitive.bind(*frozen, **params), primitive.bind(*rows, **params))


def transpose(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """The axis of the rows moves along."""
    [x] = values
    parts = (primitive.bind(part, **params) for part in (x.frozen, x.rows))
    return x.like(*parts, axis=params["permutation"].index(x.axis))


def reshape(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """Where an axis of the result is that of the rows: as long, and with as much before it."""
    if len(values) > 1 or params["dimensions"] is not None or params.get("sharding") is not None:
        return None
    [x] = values
    before, sizes = math.prod(x.frozen.shape[: x.axis]), params["new_sizes"]
    for axis, size in enumerate(sizes):
        if size == x.size and math.prod(sizes[:axis]) == before:
            of_rows = {**params, "new_sizes": _at(sizes, axis, x.index.count)}
            return x.like(primitive.bind(x.frozen, **params), primitive.bind(x.rows, **of_rows), axis)
    return None


def broadcast_in_dim(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """New axes beside that of the rows."""
    if len(values) > 1 or params.get("sharding") is not None:
        return None
    [x] = values
    axis = params["broadcast_dimensions"][x.axis]
    of_rows = {**params, "shape": _at(params["shape"], axis, x.index.count)}
    return x.like(primitive.bind(x.frozen, **params), primitive.bind(x.rows, **of_rows), axis)


def squeeze(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """Other axes go; that of the rows has several."""
    [x] = values
    axis = x.axis - sum(d < x.axis for d in params["dimensions"])
    return x.like(primitive.bind(x.frozen, **params), primitive.bind(x.rows, **params), axis)


def rev(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """Another order, of the rows as well."""
    [x] = values
    out = x.like(primitive.bind(x.frozen, **params), primitive.bind(x.rows, **params))
    if x.axis not in params["dimensions"]:
        return out
    index = of_numbers(x.index, (x.size - 1 - numbers(x.index))[::-1], x.size)
    return Split(out.frozen, out.rows, index, x.origin)


def cut(x: Split, start: int, stop: int, step: int = 1) -> Any:
    """The rows of a static slice; dense where all of them are frozen or all train."""
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


def slice_rule(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """A static slice."""
    [x] = values
    start, stop = list(params["start_indices"]), list(params["limit_indices"])
    step = list(params["strides"] or [1] * len(start))
    bounds = start[x.axis], stop[x.axis], step[x.axis]
    start[x.axis], step[x.axis] = 0, 1
    parts = (
        jax.lax.slice(part, start, _at(stop, x.axis, part.shape[x.axis]), step) for part in (x.frozen, x.rows)
    )
    return cut(x.like(*parts), *bounds)


def split_rule(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """Static slices one after another."""
    [x] = values
    sizes, axis = params["sizes"], params["axis"]
    if axis == x.axis:
        edges = np.cumsum([0, *sizes]).tolist()
        return [cut(x, *edge) for edge in zip(edges[:-1], edges[1:], strict=True)]
    return [x.like(*parts) for parts in zip(*(primitive.bind(p, **params) for p in (x.frozen, x.rows)), strict=True)]


def dynamic_slice(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """All rows, or some from a row that is known only when the program runs."""
    x, *starts = values
    if any(isinstance(start, Split) for start in starts):
        return None
    sizes = params["slice_sizes"]
    if sizes[x.axis] == x.size:
        of_rows = {**params, "slice_sizes": _at(sizes, x.axis, x.index.count)}
        return x.like(primitive.bind(x.frozen, *starts, **params), primitive.bind(x.rows, *starts, **of_rows))
    start = starts[x.axis]
    if not isinstance(start, Tracer):
        first = min(max(int(start), 0), x.size - sizes[x.axis])
        whole = {**params, "slice_sizes": _at(sizes, x.axis, x.size)}
        out = dynamic_slice(primitive, whole, [x, *starts])
        return cut(out, first, first + sizes[x.axis])
    start = jnp.clip(_wide(start), 0, x.size - sizes[x.axis])
    trains, place = locate(x.index, start + jnp.arange(sizes[x.axis], dtype=start.dtype))
    of_rows = {**params, "slice_sizes": _at(sizes, x.axis, x.index.count)}
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
        of_rows = {**params, "slice_sizes": _at(sizes, x.axis, x.index.count)}
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
    rows = primitive.bind(x.rows, jnp.stack(columns, -1), **{**params, "unique_indices": False, **_UNSORTED})
    frozen = primitive.bind(x.frozen, indices, **params)
    return jnp.where(jax.lax.broadcast_in_dim(trains, frozen.shape, of_batch), rows, frozen)


_UNSORTED = {"indices_are_sorted": False}


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
        zeros = jnp.zeros((), x.frozen.dtype)
        return product(jnp.where(x.index.frozen(x.frozen.ndim), x.frozen, zeros), other) + rows
    if params.get("out_sharding") is not None:
        return None
    if x.axis in batch[mine]:
        at = batch[mine].index(x.axis)
        out, axis = at, batch[1 - mine][at]
        rows = product(x.rows, take(x.index, other, axis))
        if rest is None:
            return join(x.index, out, product(x.frozen, other), rows)
        frozen = product(take(rest, x.frozen), take(rest, other, axis))
    else:
        free = [d for d in range(x.frozen.ndim) if d not in (*contracting[mine], *batch[mine])]
        before = len(batch[0]) + (0 if mine == 0 else _ndim(other) - len(contracting[1]) - len(batch[1]))
        out = before + free.index(x.axis)
        rows = product(x.rows, other)
        if rest is None:
            return join(x.index, out, product(x.frozen, other), rows)
        frozen = product(take(rest, x.frozen), other)
    order = np.argsort(np.concatenate([numbers(rest), trains]))
    together = jnp.concatenate([frozen, rows], axis=out)
    return jnp.take(together, order, axis=out, mode="clip", unique_indices=True)


def reduction(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """Within the rows; or a sum over them."""
    [x] = values
    if params.get("out_sharding") is not None:
        return None
    if x.axis not in params["axes"]:
        parts = (primitive.bind(part, **params) for part in (x.frozen, x.rows))
        return x.like(*parts, axis=x.axis - sum(d < x.axis for d in params["axes"]))
    if primitive.name != "reduce_sum":
        return None
    zeros = jnp.zeros((), x.frozen.dtype)
    frozen = jnp.where(x.index.frozen(x.frozen.ndim), x.frozen, zeros)
    return primitive.bind(frozen, **params) + primitive.bind(x.rows, **params)


def sharding_constraint(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """The same for both parts, but that the axis of the trainable rows, which are few, is not sharded."""
    [x] = values
    frozen, sharding = primitive.bind(x.frozen, **params), params["sharding"]
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    spec = [*sharding.spec, *[None] * (x.frozen.ndim - len(sharding.spec))]
    if spec[x.axis] is None:
        return x.like(frozen, primitive.bind(x.rows, **params))
    spec[x.axis] = None
    of_rows = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
    return x.like(frozen, jax.lax.with_sharding_constraint(x.rows, of_rows))


RULES: dict[str, Rule] = {
    "broadcast_in_dim": broadcast_in_dim,
    "dot_general": dot_general,
    "dynamic_slice": dynamic_slice,
    "gather": gather,
    "reduce_and": reduction,
    "reduce_max": reduction,
    "reduce_min": reduction,
    "reduce_or": reduction,
    "reduce_prod": reduction,
    "reduce_sum": reduction,
    "reshape": reshape,
    "rev": rev,
    "sharding_constraint": sharding_constraint,
    "slice": slice_rule,
    "split": split_rule,
    "squeeze": squeeze,
    "transpose": transpose,
}


def _ndim(value: Any) -> int:
    return np.ndim(value.frozen if isinstance(value, Split) else value)


def _at(sizes: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    return (*sizes[:axis], size, *sizes[axis + 1 :])


def _wide(i: Any) -> jax.Array:
    """Row numbers in at least 32 bits, so that any row can be named."""
    i = jnp.asarray(i)
    return i.astype(jnp.int32) if i.dtype.itemsize < 4 else i
