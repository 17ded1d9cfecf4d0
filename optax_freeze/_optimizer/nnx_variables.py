"""NNX variables, and metadata boxes of Linen, in an optimizer state.

Tools of Flax and trainers expect an array in every variable of a state, with the axes of its parameter: they read its
dtype, and place it by the sharding in the metadata of the variable. So a hole stands in place of the variable of a
frozen parameter, and an array with other axes, or with rows that the mesh does not divide, stands alone. An optimizer
is called with the values of variables, as ``nnx.Optimizer`` does, since holes and variables do not line up.

An array with other axes stands alone in place of a box, too; an optimizer is called with all boxes.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_freeze._errors import is_array
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.tree import Leaf, PyTree


def stored(plan: Plan, treedef: Any, values: Sequence[Any]) -> PyTree:
    """A tree of the parameters as it is stored in a state, with values that may be holes, vectors or row numbers."""
    tree = jax.tree.unflatten(treedef, values)
    return _stored(plan, tree, _tree.flatten(tree, _is_node)[0]) if plan.variables or plan.boxed else tree


def _stored(plan: Plan, tree: PyTree, parameters: Sequence[Any]) -> PyTree:
    """``parameters`` are the variables of the parameters; one with several leaves is stored as it is."""
    nodes, treedef = _tree.flatten(tree, _is_node)
    leaves, placed = iter(plan.leaves), []
    for node, parameter in zip(nodes, parameters, strict=True):
        its = [next(leaves) for _ in _tree.flatten(parameter)[0]]
        keeps = len(its) != 1 or _fits(node, its[0]) or (plan.boxed and not is_array(_content(node)))
        placed.append(node if keeps else _content(node))
    return treedef.unflatten(placed)


def _fits(node: Any, leaf: Leaf) -> bool:
    """Whether a value has the axes of its parameter, which row numbers do not, and the mesh divides its rows."""
    value: Any = _content(node)
    if not is_array(value) or value.ndim != len(leaf.shape or ()) or jnp.issubdtype(value.dtype, jnp.integer):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if not _tree.is_wrapper(node) or value.shape == leaf.shape or mesh.empty:
        return True
    library = sys.modules["flax.nnx" if _tree.is_variable(node) else "flax.linen"]
    spec = _content(library.get_partition_spec(node)) or ()
    axes = [[name] if isinstance(name, str) else name or () for name in spec]
    return all(
        size % math.prod(mesh.shape.get(name, 1) for name in names) == 0
        for size, names in zip(value.shape, axes, strict=False)
    )


def stored_state(state: PyTree, plan: Plan, params: PyTree) -> PyTree:
    """A state as it is stored, which an optimizer has made for ``params``; it may have made holes of its own."""
    if not (plan.variables or plan.boxed):
        return state
    parameters = _tree.flatten(params, _is_node)[0]
    return _map_trees(lambda tree: _stored(plan, tree, parameters), state, params)


def values_in(tree: PyTree, plan: Plan) -> PyTree:
    """A tree with the values of variables in their places."""
    return jax.tree.map(_content, tree, is_leaf=_is_node) if plan.variables else tree


def called_with(state: PyTree, plan: Plan, treedef: Any) -> PyTree:
    """A stored state as an optimizer is called with it: the values of variables, and each array in its box."""
    if not plan.boxed:
        return values_in(state, plan)
    params = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    boxes, structure = _tree.flatten(params, _is_node)

    def boxed(tree: PyTree) -> PyTree:
        pairs = zip(_tree.flatten(tree, _is_node)[0], boxes, strict=True)
        return structure.unflatten([jax.tree.map(lambda _, x=x: x, b) if is_array(x) else x for x, b in pairs])

    return _map_trees(boxed, state, params)


def as_before(state: PyTree, like: PyTree, called: PyTree, plan: Plan) -> PyTree:
    """The inverse of :func:`called_with` for a new state: as ``like``, which an optimizer was given as ``called``."""
    if not (plan.variables or plan.boxed) or jax.tree.structure(called) != jax.tree.structure(state):
        return state
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(state))


def _map_trees(change: Callable[[PyTree], PyTree], state: PyTree, params: PyTree) -> PyTree:
    """A state with ``change(tree)`` in place of each tree that has the structure of the parameters."""
    structure = _tree.flatten(params, _is_node)[1]

    def is_like_params(node: Any) -> bool:
        return type(node) is type(params) and _tree.flatten(node, _is_node)[1] == structure

    changed = lambda node: change(node) if is_like_params(node) else node  # noqa: E731
    return jax.tree.map(changed, state, is_leaf=lambda node: _is_node(node) or is_like_params(node))


def _is_node(node: Any) -> bool:
    return _tree.is_wrapper(node) or _tree.is_leaf(node)


def _content(node: Any) -> Any:
    """What is in a variable or a box; any other node as it is."""
    if not _tree.is_wrapper(node):
        return node
    children = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
    return children[0] if len(children) == 1 else node
