"""Adds updates to parameters; frozen parameters keep every bit, and trainable rows are written in place."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from optax_freeze._errors import value_error
from optax_freeze._optimizer.leaf_updates import is_nothing, stays, updated
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import is_on_host
from optax_freeze._spec.part_source import refuse_other_rows
from optax_freeze._spec.plan import refuse_on_host, refuse_other_leaf
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.selection import FROZEN, TRAINABLE
from optax_freeze._spec.tree import Leaf, Part, PyTree

Tree = TypeVar("Tree")


def apply_updates(params: Tree, updates: PyTree, frozen: Spec | None = None) -> Tree:
    """Adds updates to the parameters, like ``optax.apply_updates``, and leaves frozen parameters bitwise unchanged.

    Args:
      params: the full tree of parameters, or only the trainable part.
      updates: a tree of the same structure; it may contain ``optax.MaskedNode()``.
      frozen: the spec of the frozen parameters, which are then returned unchanged whatever their bits and updates. If
        None, only leaves whose update is ``optax.MaskedNode()`` are sure to stay unchanged.

    Returns:
      The new parameters, with the structure, shapes and dtypes of ``params``; an updated Python number is an array.
      Leaves that are not arrays or numbers are returned unchanged.

    Raises:
      ValueError: if the structures differ, or if the spec does not fit the parameters.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jax.numpy.float32(-0.0), "head": jax.numpy.float32(1)}
      >>> fz.apply_updates(params, {"encoder": 5.0, "head": 0.5}, "encoder")
      {'encoder': Array(-0., dtype=float32), 'head': Array(1.5, dtype=float32)}
    """
    values, treedef = _tree.flatten(params)
    changes, other = _tree.flatten_beside(treedef, updates)
    if treedef != other:
        _tree.refuse_other_structure(updates, params, "updates", "pass the updates that belong to these parameters")
    selections = [TRAINABLE] * len(values) if frozen is None else make_plan(params, frozen).selections
    paths = functools.cache(lambda: _tree.paths(params))
    for i, (value, change, selection) in enumerate(zip(values, changes, selections, strict=True)):
        if selection is FROZEN or is_nothing(change) or stays(value, change):
            continue
        if isinstance(change, Part) and not isinstance(value, Part) and not _tree.is_masked_node(value):
            index = change.index if selection is TRAINABLE else selection.part_index
            refuse_other_leaf(change, Leaf(paths()[i], jnp.shape(value), index=index), selection, "updates")
            refuse_other_rows(change, selection, paths()[i], "updates")
        elif not _fits(value, change):
            what, got = "updates: an update does not fit its parameter", "an update where the parameters have"
            got, expected = f"{got} optax.MaskedNode()", "fz.apply_updates(params, updates)"
            if not _tree.is_masked_node(value):
                got, expected = _shape(change), _shape(value)
            fix = "the parameters come first; pass the updates that belong to these parameters"
            raise value_error(what, at=paths()[i], got=got, expected=expected, fix=fix)
        elif is_on_host(value) and not isinstance(change, Part) and jnp.ndim(change):
            refuse_on_host(paths()[i], selection, value)
    return jax.tree.unflatten(treedef, list(map(updated, values, changes, selections)))


def _fits(value: Any, change: Any) -> bool:
    """Whether an update can be added to a leaf without changing its shape."""
    if isinstance(value, Part):
        return isinstance(change, Part) and change.index == value.index and change.values.shape == value.values.shape
    return not _tree.is_masked_node(value) and jnp.shape(change) in ((), jnp.shape(value))


def _shape(leaf: Any) -> str:
    return f"part of shape {leaf.values.shape}" if isinstance(leaf, Part) else f"shape {jnp.shape(leaf)}"
