"""What the optimizer inside of a freeze is given, and the zeros that stand in the place of what it never sees.

Everything with the structure of the gradients loses its frozen part on the way in. On the way out an update of -0.0 is
the one that changes no bit of any number.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import is_array
from optax_freeze._gradient.restrict import restrict
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.apply_updates import no_change
from optax_freeze._spec.memory_kinds import is_on_host
from optax_freeze._spec.partition import split
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import Selection
from optax_freeze._spec.tree import Leaf, Part, PyTree


def without_frozen(extra_args: dict[str, Any], plan: Plan, treedef: Any, params: PyTree | None) -> dict[str, Any]:
    """The extra arguments of ``inner``: what has the gradients' structure loses its frozen part."""

    def trainable_of(tree: PyTree) -> PyTree:
        values, structure = _tree.flatten(tree) if tree is None else _tree.flatten_beside(treedef, tree)
        lone = len(values) == 1 and jnp.shape(values[0]) != plan.leaves[0].shape  # a scalar beside a lone leaf
        if structure != treedef or lone:
            return tree
        values = [_beside_part(*each) for each in zip(values, plan.leaves, plan.selections, strict=True)]
        return plan.trainable(treedef, values)

    if params is not None and any(callable(extra_args.get(name)) for name in _OF_PARAMS):
        rest = split(params, plan)[1]
        for name in _OF_PARAMS:
            if callable(extra_args.get(name)):
                fun = restrict(extra_args[name], rest)
                extra_args = {**extra_args, name: _composed(trainable_of, fun) if name == "grad_fn" else fun}
    return {name: value if name in _OF_PARAMS else trainable_of(value) for name, value in extra_args.items()}


def _beside_part(value: Any, leaf: Leaf, selection: Selection) -> Any:
    """A scalar for a leaf becomes a scalar beside its trainable part; other values are taken apart like the leaf."""
    is_number = isinstance(value, (int, float, complex)) or getattr(value, "shape", None) == ()
    if not selection.in_part or not leaf.shape or not is_number:
        return value
    index = selection.part_index
    return jnp.full(leaf.shape, value) if index is None else Part(value, index, leaf.shape)


_OF_PARAMS = ("value_fn", "obj_fn", "grad_fn")
"""Extra arguments that Optax's transformations call with the parameters."""


def _composed(after: Callable[[PyTree], PyTree], fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    @functools.wraps(fun)
    def composed(*args: Any, **kwargs: Any) -> PyTree:
        return after(fun(*args, **kwargs))

    return composed


def parts_outside(state: PyTree, plan: Plan) -> PyTree:
    """A state with each ``Part`` around the NNX variable that it was in.

    ``nnx.Optimizer`` gives a variable the ``nnx.State`` of its new value: an array comes back as it was, a node as an
    ``nnx.State``.
    """

    def swap(node: Any) -> Any:
        [value], variable = _opened(node)
        swapped = isinstance(value, Part)
        return dataclasses.replace(value, values=variable.unflatten([value.values])) if swapped else node

    return _swapped(swap, state, plan, _tree.is_variable)


def variables_outside(state: PyTree, plan: Plan) -> PyTree:
    """The inverse of :func:`parts_outside`, for parameters in variables."""

    def swap(node: Any) -> Any:
        if not isinstance(node, Part) or not _tree.is_variable(node.values):
            return node
        [value], variable = _opened(node.values)
        return variable.unflatten([dataclasses.replace(node, values=value)])

    return _swapped(swap, state, plan, lambda node: isinstance(node, Part))


def _swapped(swap: Callable[[Any], Any], state: PyTree, plan: Plan, is_leaf: Callable[[Any], bool]) -> PyTree:
    """``swap`` at each node of a state, if it may hold a ``Part`` and NNX variables."""
    may_hold_both = "flax.nnx" in sys.modules and plan.has_parts
    return jax.tree.map(swap, state, is_leaf=is_leaf) if may_hold_both else state


def _opened(node: Any) -> tuple[list[Any], Any]:
    """What is directly in a node, and its treedef."""
    return jax.tree.flatten(node, is_leaf=lambda x: x is not node)


def zero(leaf: Leaf, update: Any, param: Any = None) -> Any:
    """The update that changes no bit of a leaf: -0.0, or the integer 0, in the parameter's shape.

    For a leaf in host memory a NumPy scalar, which adds to an array in any memory, and has no bytes to move.

    A hole for an array without such a zero (PRNG keys), None for an object that is not an array: what
    ``equinox.apply_updates`` skips.
    """
    numbers = [x for x in (param, update) if isinstance(x, (int, float, complex))]
    if numbers:
        return _NoUpdate(-0.0) if isinstance(numbers[0], bool) else no_change(numbers[0])
    like: Any = next((x for x in (param, update) if is_array(x)), leaf)
    dtype = like.dtype if leaf.dtype is None else leaf.dtype
    if dtype is None:
        return _tree.HOLE if _tree.is_hole(update if param is None else param) else None
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return _tree.HOLE
    if is_array(update) and _adds_exactly(dtype, update.dtype):
        dtype = update.dtype
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    value = negative_zero(dtype)
    if value != 0:
        return _tree.HOLE
    if is_on_host(like):
        return value
    return jnp.full(leaf.shape or (), value, dtype) if like is leaf else jnp.full_like(like, value, dtype)


class _NoUpdate(float):
    """The update of a Python bool, to which Python itself adds a number as to an int."""

    __slots__ = ()

    def __radd__(self, value: Any) -> Any:
        return value


def negative_zero(dtype: Any) -> Any:
    """The number of a dtype that, added to any other, changes nothing."""
    return np.asarray(complex(-0.0, -0.0) if jnp.issubdtype(dtype, jnp.complexfloating) else -0.0).astype(dtype)


def _adds_exactly(param: Any, update: Any) -> bool:
    """Whether JAX adds a -0.0 of the update's dtype to a parameter, and the parameter keeps its bits."""
    if param == update:
        return True
    kinds = (jnp.floating, jnp.complexfloating)
    wide = min(jnp.dtype(param).itemsize, jnp.dtype(update).itemsize) > 1  # JAX promotes no narrower float by itself
    return wide and any(jnp.issubdtype(param, kind) and jnp.issubdtype(update, kind) for kind in kinds)
