"""What does an optimizer's state of a row begin with, where other rows may begin to train without a new ``init``?"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, DynamicRowIndex
from optax_freeze._spec.tree import Part, PyTree

Init: TypeAlias = Callable[[PyTree], PyTree]
"""The ``init`` of an optimizer."""


def with_initial_rows(plan: Plan, init: Init | None) -> Plan:
    """The plan with what the arrays of an optimizer's state begin with, where some rows are dynamic.

    ``init`` is called with an array of one element in the place of each leaf, once with zeros and once with ones: an
    array that differs begins from its parameters. It is None for a transformation without a state of its own.
    """
    if init is None or not any(isinstance(selection, DynamicRowIndex) for selection in plan.selections):
        return plan
    with jax.ensure_compile_time_eval():
        try:
            zeros, ones = (_numbers(init(_of_one_element(plan, fill))) for fill in (0, 1))
        except Exception:  # an optimizer may need parameters of other shapes
            return plan.with_initial((("", None),))
    found = ((path, number if ones.get(path) == number else None) for path, number in zeros.items())
    return plan.with_initial(tuple((path, number) for path, number in found if number != 0))


def _of_one_element(plan: Plan, fill: int) -> PyTree:
    def leaf_of(leaf: Any, selection: Any) -> Any:
        if selection is FROZEN:
            return _tree.HOLE
        index = selection.part_index if selection.in_part else leaf.index
        array = jnp.full((1,) * (1 if isinstance(index, int) else len(leaf.shape)), fill, leaf.dtype)
        return array if index is None else Part(array, index, leaf.shape)

    return jax.tree.unflatten(plan.treedef, map(leaf_of, plan.leaves, plan.selections))


def _numbers(state: PyTree) -> dict[str, float | None]:
    """The number that each array of a state is full of, by its path."""
    found = {}
    for path, node in zip(_tree.paths(state), _tree.flatten(state)[0], strict=True):
        values = np.asarray(_tree.bare(node)) if isinstance(node, Part) else None
        if values is not None and values.size:
            same = (values == values.flat[0]).all()
            found[path] = float(values.flat[0]) if same else None
    return found
