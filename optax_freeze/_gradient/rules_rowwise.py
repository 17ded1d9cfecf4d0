"""What the primitives of JAX make of an array in two parts, one rule for each kind of operation.

A rule is ``rule(primitive, params, values)``, where some of the values are a ``Split``. It
returns the result, in two parts as long as the rows stay apart and dense where they are read, or None where the
operation needs the array in one piece. A rule is exact in both parts: it holds whichever is differentiated, and how
often. Here are the operations on each row alone, which keep the rows apart, and the table of all.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optax_freeze._gradient.rules_indexing import (
    Rule,
    consecutive_slices,
    dot_general,
    dynamic_slice,
    gather,
    static_slice,
)
from optax_freeze._gradient.split_array import Split, at_axis, numbers, of_numbers, take

_NAMES = """
abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp conj convert_element_type copy copy_p cos
cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p
logistic lt max min mul name ne neg nextafter not or pow pvary real reduce_precision rem round rsqrt select_n
sign sin sinh sqrt square stop_gradient sub tan tanh xor
"""
ELEMENTWISE = frozenset(_NAMES.split())
"""Operations on the elements at one place, by name."""


def rule_of(primitive: Any) -> Rule | None:
    """The rule for a primitive, if there is one. Primitives are known by their names."""
    return elementwise if primitive.name in ELEMENTWISE else RULES.get(primitive.name)


def elementwise(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """Any number of operands, each of which may be a scalar or broadcast along axes of size 1.

    Where several are in parts, the rows that train in any of them are the trainable rows of the result.
    """
    if primitive.multiple_results:  # pvary, before JAX 0.9
        return jax.tree.map(lambda part: primitive.bind(part, **params)[0], list(values))
    splits = [value for value in values if isinstance(value, Split)]
    first = splits[0]
    trains = functools.reduce(np.union1d, [numbers(split.index) for split in splits])
    if params.get("sharding") is not None or len(trains) == first.size or len({x.axis for x in splits}) > 1:
        return None
    first = first.widened(trains)
    frozen, rows = [], []
    for value in values:
        if isinstance(value, Split):
            frozen.append(value.frozen if value.in_rule else first.guarded(value.frozen))
            rows.append(value.widened(trains).rows)
        else:
            by_rows = np.ndim(value) and np.shape(value)[first.axis] == first.size
            frozen.append(first.guarded(value))
            rows.append(take(first.index, value) if by_rows else value)
    return first.like(primitive.bind(*frozen, **params), primitive.bind(*rows, **params))


def optimization_barrier(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """Both parts of each operand behind one barrier."""
    leaves, treedef = jax.tree.flatten(list(values))
    return jax.tree.unflatten(treedef, primitive.bind(*leaves, **params))


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
            of_rows = {**params, "new_sizes": at_axis(sizes, axis, x.index.count)}
            return x.like(primitive.bind(x.frozen, **params), primitive.bind(x.rows, **of_rows), axis)
    return None


def broadcast_in_dim(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """New axes beside that of the rows."""
    if len(values) > 1 or params.get("sharding") is not None:
        return None
    [x] = values
    axis = params["broadcast_dimensions"][x.axis]
    of_rows = {**params, "shape": at_axis(params["shape"], axis, x.index.count)}
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
    return primitive.bind(x.cleared(), **params) + primitive.bind(x.rows, **params)


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


def all_gather(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """The shards of a leaf, inside of ``jax.shard_map``, along another axis than that of the rows."""
    [x] = values
    along, tiled = params["all_gather_dimension"], params["tiled"]
    if tiled and along == x.axis:
        return None
    axis = x.axis if tiled or along > x.axis else x.axis + 1
    return x.like(primitive.bind(x.frozen, **params), primitive.bind(x.rows, **params), axis)


RULES: dict[str, Rule] = {
    "all_gather": all_gather,
    "broadcast_in_dim": broadcast_in_dim,
    "dot_general": dot_general,
    "dynamic_slice": dynamic_slice,
    "gather": gather,
    "optimization_barrier": optimization_barrier,
    "reduce_and": reduction,
    "reduce_max": reduction,
    "reduce_min": reduction,
    "reduce_or": reduction,
    "reduce_prod": reduction,
    "reduce_sum": reduction,
    "reshape": reshape,
    "rev": rev,
    "sharding_constraint": sharding_constraint,
    "slice": static_slice,
    "split": consecutive_slices,
    "squeeze": squeeze,
    "transpose": transpose,
}
