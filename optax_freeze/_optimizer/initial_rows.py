"""What does an optimizer's state have of a row, where other rows may begin to train without a new ``init``?"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import InitialRows, Plan
from optax_freeze._spec.selection import FROZEN, DynamicRowIndex, RowSelection
from optax_freeze._spec.tree import Part, PyTree

Init: TypeAlias = Callable[[PyTree], PyTree]
"""The ``init`` of an optimizer."""


def with_initial_rows(plan: Plan, init: Init | None) -> Plan:
    """The plan with what the arrays of an optimizer's state begin with, where some rows train.

    The shapes of ``init`` are asked for with one row more: the axis that is longer then is that of the rows. Where rows
    are dynamic, ``init`` is also called with parameters of one element, of zeros and of ones: an array that differs
    begins from its parameters. It is None for a transformation without a state of its own.
    """
    indices = [leaf.index or selection.part_index for leaf, selection in zip(plan.leaves, plan.selections, strict=True)]
    dynamic = any(isinstance(selection, DynamicRowIndex) for selection in plan.selections)
    if init is None or not any(isinstance(index, RowSelection) for index in indices):
        return plan
    zeros, ones = {}, {}
    try:
        shapes, longer = (_arrays(jax.eval_shape(init, _of_rows(plan, more))) for more in (0, 1))
        if dynamic:
            with jax.ensure_compile_time_eval():
                zeros, ones = (_arrays(init(_of_one_element(plan, fill))) for fill in (0, 1))
    except Exception:  # an optimizer may need parameters of other shapes
        return plan
    found = []
    for path in shapes.keys() & longer.keys():
        shape, other = (np.shape(_tree.bare(arrays[path])) for arrays in (shapes, longer))
        axes = [i for i, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b]
        if isinstance(shapes[path], Part) or not shape or axes:
            number = 0 if 0 in shape else _number(zeros.get(path), ones.get(path))
            found.append((path, InitialRows(axes[0] if axes else None, number)))
    return plan.with_initial(tuple(sorted(found)))


def _of_rows(plan: Plan, more: int) -> PyTree:
    """The shapes of what trains, with some rows more."""

    def leaf_of(leaf: Any, selection: Any) -> Any:
        index = leaf.index or selection.part_index
        if not isinstance(index, RowSelection):
            return jax.eval_shape(selection.take, leaf.struct) if leaf.index is None else leaf.struct
        shape = (n + more * (axis == index.axis) for axis, n in enumerate(index.shape_of_part(leaf.shape)))
        return Part(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype), index, leaf.shape)

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


def _arrays(state: PyTree) -> dict[str, Any]:
    """The arrays in a state by path, each perhaps in its ``Part``; parts of several arrays are left out."""
    nodes = zip(_tree.paths(state), _tree.flatten(state)[0], strict=True)
    return {path: node for path, node in nodes if not isinstance(node, Part) or len(jax.tree.leaves(node)) == 1}


def _number(zeros: Any, ones: Any) -> Any:
    """The number that an array is full of, for parameters of zeros and of ones; None if there is no such number."""
    zeros, ones = _tree.bare(zeros), _tree.bare(ones)
    if not _is_numeric(zeros) or not _is_numeric(ones):
        return None
    values = np.unique(np.concatenate([np.ravel(zeros), np.ravel(ones)]))
    return values[0].item() if len(values) == 1 else None


def _is_numeric(array: Any) -> bool:
    return hasattr(array, "dtype") and not jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
