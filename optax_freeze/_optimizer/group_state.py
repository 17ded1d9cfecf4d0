"""What a group owns of each tree of the parameters in the state of its optimizer, without placeholders.

An optimizer makes the state of a group from a tree in which ``MaskedNode`` stands for the leaves of all other groups:
n groups of n leaves would have n * n of them, which JAX visits in each call of a step. The state of a group has
:class:`GroupLeaves` in place of each such tree, and the tree itself only where the optimizer is called.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from optax_freeze._optimizer.nnx_variables import stored_state
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.tree import MASKED_NODE, Part, PyTree


@jax.tree_util.register_pytree_with_keys_class
class GroupLeaves(dict):
    """The leaves of a group by path, in the order of the parameters: in the state of a group a tree of parameters.

    As in a tree of dictionaries, ``leaves["encoder"]["kernel"]`` is ``leaves["encoder/kernel"]``.
    """

    def __missing__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return self[str(key)]
        below = {path.removeprefix(f"{key}/"): leaf for path, leaf in self.items() if path.startswith(f"{key}/")}
        if not below:
            raise KeyError(key)
        return GroupLeaves(below)

    def tree_flatten(self) -> tuple[Iterable[Any], Any]:
        return self.values(), tuple(self)

    def tree_flatten_with_keys(self) -> tuple[Iterable[Any], Any]:
        return [(jax.tree_util.DictKey(path), value) for path, value in self.items()], tuple(self)

    @classmethod
    def tree_unflatten(cls, paths: Any, values: Iterable[Any]) -> "GroupLeaves":
        return cls(zip(paths, values, strict=True))


class GroupState(NamedTuple):
    """State of one group: that of its switch or condition, its dense masks, and that of its optimizer.

    The functions below leave it as it is: if the optimizer of a group has groups itself, their leaves are its own.
    """

    condition_state: Any
    masks: PyTree
    inner_state: optax.OptState


def is_tree(plan: Plan) -> bool:
    """Whether the parameters are a tree: no lone leaf, and no placeholder of ``optax.tree_map_params``."""
    return [leaf.path for leaf in plan.leaves] not in ([], [""])


def without_others(state: PyTree, plan: Plan, params: PyTree) -> PyTree:
    """A state with :class:`GroupLeaves` in place of each tree like ``params``, which the optimizer got in ``init``."""
    if plan.variables:
        state = stored_state(state, plan, params)
    if not is_tree(plan):
        return state
    # A variable of one leaf stays around it, since its metadata may have a sharding.
    is_node = _is_node if len(_tree.flatten(params, _is_node)[0]) == len(plan.leaves) else _tree.is_leaf
    structure, own = _tree.flatten(params, is_node)[1], {*plan.own}

    def is_like_params(node: Any) -> bool:
        if type(node) is not type(params):
            return False
        its, other = _tree.flatten(node, is_node)
        return other == structure and not any(jax.tree.leaves(x) for i, x in enumerate(its) if i not in own)

    def of_group(node: Any) -> Any:
        if not is_like_params(node):
            return node
        its = _tree.flatten(node, is_node)[0]
        return GroupLeaves({plan.leaves[i].path: its[i] for i in plan.own})

    return jax.tree.map(of_group, state, is_leaf=lambda node: isinstance(node, GroupState) or is_like_params(node))


def opened(state: PyTree, form: Callable[[list[Any]], Any]) -> PyTree:
    """A state with ``form(leaves)`` in place of all :class:`GroupLeaves`."""
    found = lambda node: form(list(map(_content, node.values()))) if isinstance(node, GroupLeaves) else node  # noqa: E731
    return jax.tree.map(found, state, is_leaf=_is_of_group)


def closed(state: PyTree, like: PyTree, own: Callable[[Any], Sequence[Any]]) -> PyTree:
    """The inverse of :func:`opened`: ``own`` gives the leaves again, ``like`` is a state before :func:`opened`."""
    olds, structure = jax.tree.flatten(like, is_leaf=_is_of_group)

    def of_group(old: Any, new: Any) -> Any:
        if not isinstance(old, GroupLeaves):
            return new
        pairs = zip(old.items(), own(new), strict=True)
        return GroupLeaves({path: jax.tree.structure(x).unflatten(jax.tree.leaves(y)) for (path, x), y in pairs})

    return structure.unflatten(map(of_group, olds, structure.flatten_up_to(state)))


def _is_of_group(node: Any) -> bool:
    return isinstance(node, (GroupLeaves, GroupState))


def _is_node(node: Any) -> bool:
    return _tree.is_variable(node) or _tree.is_leaf(node)


def _content(node: Any) -> Any:
    """A leaf or its ``Part``, without an NNX variable; a ``Part`` of several arrays (sm3) as it is."""
    array, *others = jax.tree.leaves(node) or [MASKED_NODE]
    if others:
        return node
    return dataclasses.replace(node, values=array) if isinstance(node, Part) else array
