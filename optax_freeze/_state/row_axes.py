"""Finds the axis of each array of an optimizer state along which the rows of a leaf are.

The shapes of ``tx.init`` are asked for with one row more: the axis that is longer then is that of the rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from optax_freeze._optimizer.groups import GroupPlans
from optax_freeze._optimizer.init_with import eval_init, init_with
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import DynamicRowIndex, RowIndex
from optax_freeze._spec.tree import Part, PyTree
from optax_freeze._state.own_states import states_in

Axes: TypeAlias = tuple[int | None, ...]
"""For each array at one place of a state the axis of its rows, or of its compact elements; None if it has none."""


class Shapes(NamedTuple):
    """The shapes of a state, and for each state of this library in it which call of an ``init`` made it."""

    state: PyTree
    calls: list[int]


def init_shapes(tx: Any, params: PyTree, more: int = 0) -> Shapes:
    """The shapes of ``tx.init(params)``, with ``more`` rows or compact elements of each leaf that trains in part."""
    made: list[Any] = []

    def change(plans: Any) -> Any:
        made.append(plans.leaves)
        if isinstance(plans, GroupPlans):
            return dataclasses.replace(plans, plans=tuple(map(resized, plans.plans)))
        return resized(plans)

    def resized(plan: Plan) -> Plan:
        return dataclasses.replace(plan, selections=tuple(_resized(each, more) for each in plan.selections))

    nodes, treedef = _tree.flatten(jax.tree.map(_tree.struct_of, params))
    params = jax.tree.unflatten(treedef, [_longer(node, more) if isinstance(node, Part) else node for node in nodes])
    state = eval_init(lambda params: init_with(change, tx.init, params), params)
    return Shapes(state, [[its is node.plan.leaves for its in made].index(True) for node in states_in(state)])


def row_axes(nodes: Sequence[Any], tx: Any, params: PyTree) -> list[Axes]:
    """The axes of the rows for each leaf and ``MaskedNode`` of ``tx.init(params)``."""
    longer = _tree.flatten(init_shapes(tx, params, more=1).state)[0]
    pairs = zip(map(jax.tree.leaves, nodes), map(jax.tree.leaves, longer), strict=True)
    return [tuple(_first_difference(*each) for each in zip(*pair, strict=True)) for pair in pairs]


def _first_difference(a: Any, b: Any) -> int | None:
    return next((i for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m), None)


def _resized(selection: Any, more: int) -> Any:
    """A selection of more rows, whichever they are, or compact elements."""
    if selection.part_index is None:
        return selection
    count = selection.count + more
    if isinstance(selection, DynamicRowIndex):
        return dataclasses.replace(selection, array=jnp.arange(count), count=count)
    if isinstance(selection, RowIndex):
        return dataclasses.replace(selection, progressions=((0, count, 1),), others=False)
    return dataclasses.replace(selection, count=count)


def _longer(part: Part, more: int) -> Part:
    axis = getattr(part.index, "axis", 0)
    shape = tuple(n + more * (i == axis) for i, n in enumerate(_tree.bare(part).shape))
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(shape, array.dtype), part)
