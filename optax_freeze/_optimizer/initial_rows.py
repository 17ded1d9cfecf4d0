"""What does an optimizer's state have of a row, where other rows may begin to train without a new ``init``?"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import InitialRows, Plan
from optax_freeze._spec.selection import FROZEN, DynamicRowIndex
from optax_freeze._spec.tree import Part, PyTree

Init: TypeAlias = Callable[[PyTree], PyTree]
"""The ``init`` of an optimizer."""


def with_initial_rows(plan: Plan, init: Init | None) -> Plan:
    """The plan with what the arrays of an optimizer's state begin with, where some rows are dynamic.

    ``init`` is called with parameters of one element, of zeros and of ones: an array that differs begins from its
    parameters. Its shapes are asked for with one row more: the axis that is longer then is that of the rows. It is None
    for a transformation without a state of its own.
    """
    if init is None or not any(isinstance(selection, DynamicRowIndex) for selection in plan.selections):
        return plan
    try:
        with jax.ensure_compile_time_eval():
            zeros, ones = (_parts(init(_of_one_element(plan, fill))) for fill in (0, 1))
        shapes, longer = (_parts(jax.eval_shape(init, _of_rows(plan, more))) for more in (0, 1))
    except Exception:  # an optimizer may need parameters of other shapes
        return plan
    found = []
    for path, values in shapes.items():
        if path in longer and path in zeros:
            axes = [i for i, (a, b) in enumerate(zip(values.shape, longer[path].shape, strict=False)) if a != b]
            found.append((path, InitialRows(axes[0] if axes else None, _number(zeros[path], ones.get(path)))))
    return plan.with_initial(tuple(found))


def _of_rows(plan: Plan, more: int) -> PyTree:
    """The shapes of what trains, with some rows more."""

    def leaf_of(leaf: Any, selection: Any) -> Any:
        part = jax.eval_shape(selection.take, leaf.struct) if leaf.index is None else leaf.struct
        if not isinstance(selection, DynamicRowIndex) or leaf.index is not None:
            return part
        shape = dataclasses.replace(selection, count=selection.count + more).shape_of_part(leaf.shape)
        return dataclasses.replace(part, values=jax.ShapeDtypeStruct(shape, leaf.dtype))

    return _trainable(plan, leaf_of)


def _of_one_element(plan: Plan, fill: int) -> PyTree:
    def leaf_of(leaf: Any, selection: Any) -> Any:
        index = selection.part_index if selection.in_part else leaf.index
        array = jnp.full((1,) * (1 if isinstance(index, int) else len(leaf.shape)), fill, leaf.dtype)
        return array if index is None else Part(array, index, leaf.shape)

    return _trainable(plan, leaf_of)


def _trainable(plan: Plan, leaf_of: Callable[[Any, Any], Any]) -> PyTree:
    """The trainable structure of a plan, of what ``leaf_of`` makes of each leaf and its selection."""
    pairs = zip(plan.leaves, plan.selections, strict=True)
    leaves = [_tree.HOLE if selection is FROZEN else leaf_of(leaf, selection) for leaf, selection in pairs]
    return jax.tree.unflatten(plan.treedef, leaves)


def _parts(state: PyTree) -> dict[str, Any]:
    """The array of each part in a state, by its path; parts of several arrays are left out."""
    nodes = zip(_tree.paths(state), _tree.flatten(state)[0], strict=True)
    parts = {path: node for path, node in nodes if isinstance(node, Part)}
    return {path: _tree.bare(part) for path, part in parts.items() if len(jax.tree.leaves(part)) == 1}


def _number(zeros: Any, ones: Any) -> Any:
    """The number that an array is full of, for parameters of zeros and of ones; None if there is no such number."""
    values = np.unique(np.concatenate([np.ravel(zeros), np.ravel(ones)]))
    return values[0].item() if len(values) == 1 else None
