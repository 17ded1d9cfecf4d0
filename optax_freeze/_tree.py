"""Paths, holes and leaves: how this library looks at a pytree.

Patterns, error messages and tables all name a leaf by the same path, and every function walks a tree by the same
:func:`flatten`, in which a *hole* (``optax.MaskedNode()``, the place of a leaf that was taken out) still has a path.
Optax, for comparison, walks past its own holes: they are nodes without children there.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

PyTree: TypeAlias = Any
"""Any nesting of containers known to JAX."""

HOLE = optax.MaskedNode()
"""The place of a leaf that was taken out: a node without leaves, which every Optax transformation skips."""


class Leaf(NamedTuple):
    """What a selector may see of a leaf: never its values.

    ``shape`` and ``dtype`` are None for a hole and for an object that is no array.
    """

    path: str
    shape: tuple[int, ...] | None = None
    dtype: Any = None

    @property
    def inexact(self) -> bool:
        """Whether a gradient can move the leaf: a floating-point (float8 too) or complex array."""
        return self.dtype is not None and bool(jnp.issubdtype(self.dtype, jnp.inexact))

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The leaf without its values; only for arrays."""
        assert self.shape is not None
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


def is_hole(node: Any) -> bool:
    """Whether ``node`` is the place of a leaf that was taken out."""
    return isinstance(node, optax.MaskedNode)


def is_array(leaf: Any) -> bool:
    """Whether ``leaf`` has a shape and a dtype: an array, a tracer, a NumPy scalar or a ``jax.ShapeDtypeStruct``."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_concrete(leaf: Any) -> bool:
    """Whether ``leaf`` is an array with values of its own, and not a tracer, which JAX reuses freely."""
    return isinstance(leaf, (jax.Array, np.ndarray)) and not isinstance(leaf, Tracer)


def flatten(tree: PyTree) -> tuple[list[Any], Any]:
    """``jax.tree.flatten``, in which a hole is a leaf."""
    return jax.tree.flatten(tree, is_leaf=is_hole)


def paths(tree: PyTree) -> list[str]:
    """The path of each leaf and hole, in order; the ``value`` segment of an NNX variable is left out."""
    keys = [key for key, _ in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_hole)[0]]
    variables = _nnx_variables(tree, keys)
    if variables:
        keys = [_without_value(key, variables) for key in keys]
    return [keystr(key) for key in keys]


def keystr(key: Sequence[Any]) -> str:
    """``encoder/layer_0/kernel`` for a JAX key path."""
    return jax.tree_util.keystr(tuple(key), simple=True, separator="/")


def leaves(tree: PyTree) -> list[Leaf]:
    """A :class:`Leaf` for each leaf and hole.

    Raises:
      ValueError: if two leaves have the same path (a key that holds a ``/`` reads as several segments).
    """
    described = [
        Leaf(path, tuple(leaf.shape), leaf.dtype) if is_array(leaf) else Leaf(path)
        for path, leaf in zip(paths(tree), flatten(tree)[0], strict=True)
    ]
    seen: set[str] = set()
    for path, _, _ in described:
        if path in seen:
            raise ValueError(
                message(
                    "two leaves have the same path",
                    at=path,
                    got="a tree in which a key holds a '/' and so spells the path of another leaf",
                    expected="a path of its own for each leaf",
                    fix="rename one of the keys",
                )
            )
        seen.add(path)
    return described


def _nnx_variables(tree: PyTree, keys: list[Any]) -> set[Any]:
    """The key paths of NNX variables in ``tree``, found without importing Flax."""
    nnx = sys.modules.get("flax.nnx")
    value = jax.tree_util.GetAttrKey("value")
    if nnx is None or not any(value in key for key in keys):
        return set()
    variable = getattr(nnx, "Variable", ())
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, variable) or is_hole(x))[0]
    return {key for key, node in found if isinstance(node, variable)}


def _without_value(key: Any, variables: set[Any]) -> Any:
    for length in range(len(key) - 1, -1, -1):
        if key[:length] in variables:
            return (*key[:length], *key[length + 1 :])
    return key


def message(what: str, *, at: str, got: Any, expected: Any, fix: str) -> str:
    """The text of an error: what is wrong, at which path, got against expected, the likely fix.

    >>> print(message("a leaf is missing", at="encoder/kernel", got="nothing", expected="an array", fix="add it"))
    a leaf is missing
      at: encoder/kernel
      got: nothing
      expected: an array
      fix: add it
    """
    return f"{what}\n  at: {at or '(the root)'}\n  got: {got}\n  expected: {expected}\n  fix: {fix}"
