"""Says which rows train now, of leaves whose rows keep their state."""

from collections.abc import Mapping
from typing import Any

from optax_freeze._optimizer.freeze import FreezeState
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.part_source import mark_replaced
from optax_freeze._spec.sharding import copy_like
from optax_freeze._spec.tree import PyTree
from optax_freeze._state.own_states import map_states


def with_rows(state: PyTree, numbers: Mapping[str, Any]) -> PyTree:
    """A state in which these rows train, by the paths of their leaves; nothing else changes."""

    def visit(node: FreezeState) -> FreezeState:
        kept = {i: node.plan.leaves[i].path for i in node.plan.kept}
        masks, treedef = _tree.flatten(node.masks)
        for i, path in kept.items():
            if path in numbers:
                old, masks[i] = masks[i], copy_like(numbers[path], masks[i])
                mark_replaced(masks[i], old, is_new=True)
        return node._replace(masks=treedef.unflatten(masks))

    return map_states(lambda node: visit(node) if node.plan.kept else node, state, FreezeState)
