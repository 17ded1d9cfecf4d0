"""The states of this library's transformations inside any optimizer state."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax

from optax_freeze._optimizer.freeze import FreezeState
from optax_freeze._optimizer.freeze_when import FreezeWhenState
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.part_source import mark_replaced
from optax_freeze._spec.sharding import copy_like
from optax_freeze._spec.tree import PyTree

Kinds: TypeAlias = type | tuple[type, ...]

OWN = FreezeState, FreezeWhenState


def map_states(visit: Callable[[Any], Any], tree: PyTree, kinds: Kinds = OWN) -> PyTree:
    """Applies ``visit`` to each state of some kinds in a tree, then to those inside the result."""

    def below(node: Any) -> Any:
        if not isinstance(node, kinds):
            return node
        node = visit(node)
        return jax.tree.map(below, node, is_leaf=lambda x: isinstance(x, kinds) and x is not node)

    return jax.tree.map(below, tree, is_leaf=lambda x: isinstance(x, kinds))


def states_in(tree: PyTree, kinds: Kinds = OWN) -> list[Any]:
    """The states of some kinds in a tree; each is followed by those inside it."""
    found: list[Any] = []
    map_states(lambda node: found.append(node) or node, tree, kinds)
    return found


def outermost_states(tree: PyTree, kinds: Kinds = OWN) -> Iterator[tuple[str, Any]]:
    """The states of some kinds in a tree that are in no other one, with their paths."""
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))[0]
    return ((_tree.keystr(key), node) for key, node in nodes if isinstance(node, kinds))


def masks_in(state: PyTree) -> list[tuple[str, Any]]:
    """The arrays of masks and of dynamic rows in a state, with the paths of their leaves.

    Not those of rows that keep their state, which are other ones in each step.
    """
    found = []
    for own in states_in(state):
        for holder in [own] if isinstance(own, FreezeState) else own.groups.values():
            walk = _tree.walk(holder.masks)
            kept = own.plan.kept if isinstance(own, FreezeState) else []
            pairs = enumerate(zip(walk.paths, walk.values, strict=True))
            found += [each for i, each in pairs if i not in kept and not _tree.is_masked_node(each[1])]
    return found


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
