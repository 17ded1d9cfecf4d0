"""Splits a leaf into its trainable part and its frozen part."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from optax_freeze._errors import is_array, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.layout import fitting
from optax_freeze._spec.memory import on_device
from optax_freeze._spec.selection import FROZEN, TRAINABLE, RowIndex, Selection
from optax_freeze._spec.tree import HOLE, Leaf, Part, Rest


class LeafParts(NamedTuple):
    """The trainable part of a leaf, and the frozen array; a hole for a part that does not exist."""

    trainable: Any
    frozen: Any


def of_leaf(selection: Selection, value: Any) -> LeafParts:
    """Both parts of a full leaf. The gradient treats the frozen part as a constant."""
    if selection is FROZEN:
        return LeafParts(HOLE, _constant(value))
    if selection is TRAINABLE or _tree.is_leaf(value) or isinstance(value, jax.ShapeDtypeStruct):
        return LeafParts(value, HOLE)
    return LeafParts(selection.take(value), _constant(value))


def of_pair(leaf: Leaf, selection: Selection, trainable: Any, rest: Any) -> LeafParts:
    """Both parts of a leaf, given as in the two trees of :func:`optax_freeze.partition`."""
    if _tree.is_hole(trainable):
        return of_leaf(selection, rest)
    if selection is TRAINABLE:
        return LeafParts(rest.selection.put(rest.array, trainable) if isinstance(rest, Rest) else trainable, HOLE)
    index = trainable.index if isinstance(trainable, Part) else None
    if selection.in_part and index == selection.part_index and (isinstance(rest, Rest) or index is not None):
        return LeafParts(trainable, rest.array if isinstance(rest, Rest) else HOLE)
    raise value_error(
        "the features were computed with a different spec",
        at=leaf.path,
        got="a leaf with more trainable elements",
        expected=f"a leaf that {selection}, as in fz.precompute",
        fix="pass the same `frozen` to fz.precompute and to the gradient",
    )


def _constant(value: Any) -> Any:
    return jax.lax.stop_gradient(value) if is_array(value) and not isinstance(value, jax.ShapeDtypeStruct) else value


def without_frozen(selection: Selection, leaf: Leaf, value: Any) -> Any:
    """The leaf without its frozen part."""
    if selection is FROZEN:
        return value if leaf.dtype is None else HOLE
    if not isinstance(selection, RowIndex):
        return value
    if not isinstance(value, jax.ShapeDtypeStruct):
        return selection.take(value)
    part = jax.eval_shape(selection.take, value)
    shape, sharding = part.values.shape, value.sharding and on_device(value.sharding)
    if isinstance(sharding, NamedSharding):
        sharding = fitting(sharding, len(shape), shape)
    return dataclasses.replace(part, values=jax.ShapeDtypeStruct(shape, part.dtype, sharding=sharding))
