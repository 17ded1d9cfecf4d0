"""The updates of all leaves, from those that inner optimizers return for what trains."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_freeze._optimizer.inner_update import InnerUpdate
from optax_freeze._optimizer.leaf_updates import negative_zero, zero
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import is_on_host
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, DynamicRowIndex, Selection
from optax_freeze._spec.tree import Leaf, Part, PyTree


def merged(
    call: InnerUpdate, union: Plan, plans: Sequence[Plan], changes: Sequence[Sequence[Any]], full_updates: bool
) -> PyTree:
    """The updates of all leaves from those of each plan, the parts of ``union``."""
    owners: list[list[tuple[Selection, Any]]] = [[] for _ in union.leaves]
    for plan, its in zip(plans, changes, strict=True):
        for i in plan.own:
            owners[i].append((plan.selections[i], its[i]))
    new = []
    for i, (leaf, selection, grad, old) in enumerate(union.entries(call.grads, call.olds)):
        if i in call.missing or len(owners[i]) < 2:
            its, change = (FROZEN, None) if i in call.missing or not owners[i] else owners[i][0]
            new.append(_updated_leaf(leaf, its, change, grad, old, full_updates))
        else:
            whole = _merged_leaf(owners[i], old, grad)
            in_rows = selection.part_index is not None and (not full_updates or is_on_host(old))
            new.append(selection.take(whole) if in_rows else whole)
    return jax.tree.unflatten(call.treedef, union.with_sources(new, call.grads))


def _merged_leaf(owners: Sequence[tuple[Selection, Any]], old: Any, grad: Any) -> Any:
    """The update of a leaf of which several plans train some, -0.0 where none does."""
    dtype = jnp.result_type(*(change.dtype for _, change in owners))
    fill, whole = negative_zero(dtype), None
    for selection, change in owners:
        change = jax.tree.map(lambda x: x.astype(dtype), change)
        if whole is not None:
            whole = selection.put(whole, change)
        elif isinstance(change, Part):
            whole = selection.spread(change, fill, _full_leaf(old, grad))
        else:
            whole = selection.choose(fill, change)
    return whole


def _updated_leaf(leaf: Leaf, selection: Selection, new: Any, update: Any, param: Any, full_updates: bool) -> Any:
    """The update of a leaf from the one of the inner optimizer, ``new``; ``update`` and ``param`` are as given."""
    if selection is FROZEN:
        return zero(leaf, update, param) if full_updates else _tree.MASKED_NODE
    if not selection.in_part:
        return new
    if not isinstance(new, Part):
        return selection.choose(negative_zero(jnp.result_type(new)), new)
    if not full_updates:
        is_dynamic = isinstance(selection, DynamicRowIndex)
        return dataclasses.replace(new, trains=~selection.frozen_rows()) if is_dynamic else new
    if leaf.index is not None or is_on_host(param):
        return new
    return selection.spread(new, negative_zero(new.dtype), _full_leaf(param, update))


def _full_leaf(*arrays: Any) -> Any:
    """The first of these that is not a ``Part``; its layout is that of the update."""
    return next((array for array in arrays if array is not None and not isinstance(array, Part)), None)
