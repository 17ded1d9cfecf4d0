"""The parameters of NNX modules: what checks look at in a tree that contains modules.

A module also holds batch statistics, and keys and counters of random numbers, which change in each step and have the
paths of the layers that own them. Flax is found among the loaded modules, never imported.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import jax

from optax_freeze._errors import described, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.tree import PyTree

_FIX = "to check other variables pass their state, which is compared whole: nnx.state(model, nnx.BatchStat)"


def parameters_of_modules(tree: PyTree) -> PyTree:
    """The tree with an ``nnx.State`` of the parameters, each at all of its paths, in place of each NNX module."""
    if "flax.nnx" not in sys.modules:
        return tree
    return jax.tree.map(lambda node: _state(node) if is_module(node) else node, tree, is_leaf=_is_leaf)


def plan_of_parameters(parameters: PyTree, frozen: Spec, *, of: PyTree) -> Plan:
    """The plan of a spec for ``parameters``, which are :func:`parameters_of_modules` of the tree ``of``."""
    try:
        return make_plan(parameters, parameters_of_modules(frozen)).in_state
    except ValueError as error:
        has_module = any(map(is_module, jax.tree.leaves(of, is_leaf=_is_leaf)))
        if has_module and _fits(of, frozen):
            what, got = "the spec matches variables of an NNX module that are not parameters", described(frozen)
            expected = "a spec of its parameters, nnx.Param and FrozenParam, alone"
            raise value_error(what, at="frozen", got=got, expected=expected, fix=_FIX) from error
        raise


def variables_of(
    node: Any, above: tuple[Any, ...] = (), path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each variable of a module at each of its paths; ``nnx.iter_graph`` gives only the first."""
    is_list = isinstance(node, sys.modules["flax.nnx"].List)
    for name, value in vars(node).items():
        for key, leaf in jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_node)[0]:
            here = (*path, int(name) if is_list and str(name).isdigit() else name, *map(_tree.name_of, key))
            if _tree.is_variable(leaf):
                yield here, leaf
            elif is_module(leaf) and not any(leaf is other for other in (*above, node)):
                yield from variables_of(leaf, (*above, node), here)


def is_module(node: Any) -> bool:
    """Whether ``node`` is an NNX module or another object of NNX that holds variables, a pytree or not."""
    return isinstance(node, getattr(sys.modules.get("flax.nnx"), "Pytree", ()))


def _state(module: Any) -> Any:
    nnx, own = sys.modules["flax.nnx"], sys.modules.get("optax_freeze.nnx")
    types = (nnx.Param,) if own is None else (nnx.Param, own.FrozenParam)
    found = [(path, variable) for path, variable in variables_of(module) if isinstance(variable, types)]
    if not found:
        what, got = "an NNX module without parameters", f"a {type(module).__name__}"
        raise value_error(what, at="params", got=got, expected="a module with an nnx.Param", fix=_FIX)
    return nnx.from_flat_state(found)


def _fits(params: PyTree, frozen: Spec) -> bool:
    with contextlib.suppress(ValueError, TypeError):
        make_plan(params, frozen)
        return True
    return False


def _is_node(value: Any) -> bool:
    return is_module(value) or _tree.is_variable(value)


def _is_leaf(node: Any) -> bool:
    return is_module(node) or _tree.is_leaf(node)
