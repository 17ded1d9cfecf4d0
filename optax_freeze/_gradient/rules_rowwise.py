"""Rules for operations that treat each row separately and so keep the array split."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.source_info_util import current

from optax_freeze._gradient.frozen_array import Unread
from optax_freeze._gradient.jaxprs import ELEMENTWISE, OF_ONE
from optax_freeze._gradient.late_operations import is_number
from optax_freeze._gradient.row_numbers import numbers, of_numbers
from optax_freeze._gradient.rules import Equation, InRows, multilinear, rule
from optax_freeze._gradient.split_array import SplitArray, at_axis, made_of, on_device, trainable_rows, trains_in_any


@rule(*ELEMENTWISE.split(), late=True)
def elementwise(eqn: Equation, *operands: Any) -> Any:
    """Elementwise operations on any number of operands; each may be a scalar or broadcast along axes of size 1.

    If several operands are split, rows that are trainable in any of them are trainable in the result. The result is not
    split if an operand is an activation or if it is larger than the leaf: each operation on it would be done twice.
    """
    if eqn.primitive.multiple_results:  # pvary, before JAX 0.9
        return jax.tree.map(lambda part: eqn.bind(part)[0], list(operands))
    splits = [x for x in operands if isinstance(x, SplitArray)]
    if (
        len(splits) == 1
        and all(x is splits[0] or is_number(x) for x in operands)
        and isinstance(splits[0].frozen, Unread)
    ):
        frozen, rows = (
            [part if x is splits[0] else x for x in operands] for part in (splits[0].frozen, splits[0].rows)
        )
        return splits[0].like(eqn.bind(*frozen), eqn.bind(*rows))
    operands = tuple(on_device(x, eqn.primitive.name, current()) for x in operands)
    splits = [x for x in operands if isinstance(x, SplitArray)]
    trains = trains_in_any(splits)
    if eqn.params.get("sharding") is not None:
        return None
    shape = np.broadcast_shapes(*(np.shape(x.frozen if isinstance(x, SplitArray) else x) for x in operands))
    if (
        eqn.has_activation(operands)
        or math.prod(shape) > splits[0].elements
        or len(trains) == splits[0].size
        or len({x.axis for x in splits}) > 1
    ):
        return eqn.bind_whole(*operands)
    first = made_of(splits, trains)
    frozen, rows = [], []
    for x in operands:
        if isinstance(x, SplitArray):
            frozen.append(x.frozen if x.in_jvp else first.guarded(x.frozen, shape))
            rows.append(x.widened(trains).rows)
        else:
            by_rows = np.ndim(x) and np.shape(x)[first.axis] == first.size
            frozen.append(first.guarded(x, shape))
            rows.append(trainable_rows(first.index, x) if by_rows else x)
    return first.like(eqn.bind(*frozen), eqn.bind(*rows))


@rule(*OF_ONE.split(), dynamic=True, late=True)
def of_one(eqn: Equation, x: Any) -> Any:
    """Elementwise operations on one operand, also if its trainable rows are known only at run time."""
    if isinstance(x, SplitArray) and not isinstance(x.frozen, Unread):
        return elementwise(eqn, x)
    return None if eqn.params.get("sharding") is not None else x.like(eqn.bind(x.frozen), eqn.bind(x.rows))


@rule("optimization_barrier", dynamic=True)
def optimization_barrier(eqn: Equation, *operands: Any) -> Any:
    """Passes both parts of each operand through one barrier."""
    leaves, treedef = jax.tree.flatten(operands)
    return jax.tree.unflatten(treedef, eqn.bind(*leaves))


@rule("transpose", dynamic=True, late=True)
def transpose(eqn: Equation, x: Any) -> Any:
    """Transposes both parts, which moves the row axis."""
    return eqn.bind_parts(x, axis=eqn.params["permutation"].index(x.axis))


@rule("broadcast_in_dim")
def broadcast_in_dim(eqn: Equation, x: SplitArray, *dynamic_sizes: Any) -> Any:
    """Adds axes other than the row axis; a result larger than the leaf is not split."""
    shape = eqn.params["shape"]
    if dynamic_sizes or eqn.params.get("sharding") is not None:
        return None
    if math.prod(shape) > x.elements:
        return eqn.bind_whole(x)
    axis = eqn.params["broadcast_dimensions"][x.axis]
    return eqn.bind_parts(x, axis=axis, shape=at_axis(shape, axis, x.index.count))


@rule("squeeze", dynamic=True)
def squeeze(eqn: Equation, x: Any) -> Any:
    """Removes other axes than the row axis."""
    if x.axis in eqn.params["dimensions"]:  # the only row is trainable, which is known only at run time
        return None
    return eqn.bind_parts(x, axis=x.axis - sum(d < x.axis for d in eqn.params["dimensions"]))


@rule("rev")
def rev(eqn: Equation, x: SplitArray) -> Any:
    """Reverses axes, and the row numbers if the row axis is among them."""
    out = eqn.bind_parts(x)
    if x.axis not in eqn.params["dimensions"]:
        return out
    return out.like(out.frozen, out.rows, index=of_numbers(x.index, (x.size - 1 - numbers(x.index))[::-1], x.size))


@rule("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum")
def reduction(eqn: Equation, x: SplitArray) -> Any:
    """Reduces within the rows, or over them."""
    axes = eqn.params["axes"]
    if eqn.params.get("out_sharding") is not None:
        return None
    if x.axis not in axes:
        return eqn.bind_parts(x, axis=x.axis - sum(d < x.axis for d in axes))
    if eqn.primitive.name == "reduce_sum":
        return multilinear([x], eqn.bind, {0: InRows(eqn.bind, axis=None)})
    return eqn.bind_whole(x)


@rule("argmax", "argmin")
def without_gradient(eqn: Equation, x: SplitArray) -> Any:
    """The index of an extreme, within the rows or over them; it has no gradient."""
    if x.axis in eqn.params["axes"]:
        return eqn.bind_whole(x)
    return eqn.bind_parts(x, axis=x.axis - sum(d < x.axis for d in eqn.params["axes"]))


@rule("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")
def cumulative(eqn: Equation, x: SplitArray) -> Any:
    """Accumulates within the rows, or sums over them: each row gets the sum of the rows on one side of it."""
    axis = eqn.params["axis"]
    if axis != x.axis:
        return eqn.bind_parts(x)
    if eqn.primitive.name != "cumsum":
        return None

    reverse, trains, everywhere = eqn.params["reverse"], numbers(x.index), np.arange(x.size, dtype=np.int32)
    nearest = np.searchsorted(trains, everywhere, "left" if reverse else "right") - (not reverse)
    nearest = np.where(
        nearest < 0, x.index.count, nearest
    )  # no trainable row on that side: out of range, which gives zero

    def of_rows(rows: Any) -> jax.Array:
        return jnp.take(eqn.bind(rows), nearest, axis=axis, mode="fill", fill_value=0)

    return multilinear([x], eqn.bind, {0: InRows(of_rows, axis=None)})


@rule("sharding_constraint", dynamic=True)
def sharding_constraint(eqn: Equation, x: Any) -> Any:
    """Constrains both parts, but does not shard the row axis of the trainable rows, which are few."""
    frozen, sharding = eqn.bind(x.frozen), eqn.params["sharding"]
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    spec = [*sharding.spec, *[None] * (x.frozen.ndim - len(sharding.spec))]
    if spec[x.axis] is None:
        return x.like(frozen, eqn.bind(x.rows))
    spec[x.axis] = None
    of_rows = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
    return x.like(frozen, jax.lax.with_sharding_constraint(x.rows, of_rows))


@rule("all_gather")
def all_gather(eqn: Equation, x: SplitArray) -> Any:
    """Gathers shards inside ``jax.shard_map`` along another axis than the row axis."""
    along, tiled = eqn.params["all_gather_dimension"], eqn.params["tiled"]
    if tiled and along == x.axis:
        return None
    return eqn.bind_parts(x, axis=x.axis if tiled or along > x.axis else x.axis + 1)
