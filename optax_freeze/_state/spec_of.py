"""What the state of a frozen optimizer knows: its spec, and dense masks that can be replaced between steps."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._errors import is_array, is_concrete, refuse_no_mapping, value_error
from optax_freeze._gradient.groups_now import GroupsNow, sets_of
from optax_freeze._optimizer.conditions import occurring
from optax_freeze._optimizer.freeze import FreezeState, MaskedZeroUpdatesState, plan_of
from optax_freeze._optimizer.freeze_when import FreezeWhenState, frozen_groups, plans_of
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.fit_mask import fit_mask
from optax_freeze._spec.layout import copy_like
from optax_freeze._spec.masks import Elements, elements
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import DenseMask
from optax_freeze._spec.selector_algebra import Selector
from optax_freeze._spec.tree import Leaf, Part, PyTree
from optax_freeze._state.parameter_of import parameter_of


def spec_of(state: optax.OptState) -> Selector:
    """The spec that an optimizer state carries, with its dense masks as they are now.

    Give it to :func:`optax_freeze.value_and_grad` and :func:`optax_freeze.apply_updates` inside a jitted step: the
    masks are then arguments of the program. A mask closed over is a constant of it.

    The spec of a :func:`optax_freeze.freeze_when` state says which groups are frozen now. Inside a jitted step that is
    a value, and only :func:`optax_freeze.value_and_grad` and :func:`optax_freeze.grad` take it.

    Args:
      state: from :func:`optax_freeze.freeze`, :func:`optax_freeze.masked_zero_updates` or
        :func:`optax_freeze.freeze_when`, alone or within another.

    Returns:
      A selector, for trees with the leaves given to ``init``.

    Raises:
      ValueError: if there is no such state in it, or several that differ.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
      >>> state = fz.freeze(optax.sgd(0.1), {"w": jnp.eye(2, dtype=bool), "b": True}).init(params)
      >>> fz.resolve(params, fz.spec_of(state))
      {'b': True, 'w': fz.elements(<bool[2, 2]>)}
    """
    states = [node for node in _states(state) if node.spec.leaves]
    scheduled = [node for node in _scheduled(state) if node.spec.leaves]
    if not states and len(scheduled) == 1:
        return _groups_now(scheduled[0])
    if not states or any(_differ(states[0], other) for other in states[1:]):
        raise value_error(
            "no spec to be found" if not states else "several specs that differ",
            at="state",
            got=f"{len(states)} states of fz.freeze or fz.masked_zero_updates, {len(scheduled)} of fz.freeze_when",
            expected="one, or several of fz.freeze with the same spec",
            fix="pass the state of fz.freeze (optax.tree_map_params drops its spec until the next update)",
        )
    return plan_of(states[0]).known


def replace_masks(state: optax.OptState, masks: Mapping[str, Any]) -> optax.OptState:
    """Puts other dense masks into an optimizer state, between steps and without recompiling.

    Moments of elements that go on training stay as they are. Where the leaf's elements are compact, their moments move
    to their new places in the vector, and those of elements thawed now are zero.

    Args:
      state: from :func:`optax_freeze.freeze` or :func:`optax_freeze.masked_zero_updates`, alone or within another.
      masks: for each leaf by its path, a boolean array of the leaf's shape, True where frozen.

    Returns:
      The state with the new masks.

    Raises:
      ValueError: if a path has no dense mask in the state, an array is of another shape, or the number of trainable
        elements of a compact mask changes. The state is then as it was.
      TypeError: if an array is not boolean.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"w": jnp.ones((2, 2))}
      >>> tx = fz.freeze(optax.sgd(1.0), {"w": jnp.eye(2, dtype=bool)})
      >>> state = fz.replace_masks(tx.init(params), {"w": ~jnp.eye(2, dtype=bool)})
      >>> updates, state = tx.update(params, state, params)
      >>> optax.apply_updates(params, updates)["w"]
      Array([[0., 1.],
             [1., 0.]], dtype=float32)
    """
    fix = "name each mask by the path of its leaf"
    refuse_no_mapping("fz.replace_masks", masks, "{path: boolean array}", fix=fix)
    known = {
        leaf.path
        for node in _states(state)
        for leaf, selection in zip(node.spec.leaves, node.spec.selections, strict=True)
        if isinstance(selection, DenseMask)
    }
    for path in masks:
        if path not in known:
            raise value_error(
                "no dense mask in the state",
                at=path,
                got=f"a mask for {path!r}",
                expected=f"a path among {sorted(known)}" if known else "a state with dense masks",
                fix="freeze the leaf by fz.elements(...) or a boolean array from the start",
            )
    return jax.tree.map(lambda node: _with_masks(node, masks) if _is_state(node) else node, state, is_leaf=_is_state)


def _differ(a: Any, b: Any) -> bool:
    """Whether two states have other specs or, as far as they have values, other masks."""
    pairs = zip(plan_of(a).masks, plan_of(b).masks, strict=False)
    return a.spec != b.spec or any(is_concrete(x) and is_concrete(y) and not np.array_equal(x, y) for x, y in pairs)


def _groups_now(state: FreezeWhenState) -> GroupsNow:
    """Which groups are frozen now, and what each of them has."""
    plans = plans_of(state)
    schedules = [i for i, condition in enumerate(plans.conditions) if condition is not None]
    known = occurring([condition for condition in plans.conditions if condition is not None])
    places = [] if known is None else schedules
    sets = sets_of(len(plans.names) - len(places), known or [()], places)
    own = tuple(plan.selections for plan in plans.plans[:-1])
    return GroupsNow(plans.names, plans.leaves, own, tuple(frozen_groups(state).values()), sets)


def _scheduled(state: optax.OptState) -> list[FreezeWhenState]:
    is_scheduled = lambda node: isinstance(node, FreezeWhenState)  # noqa: E731
    return list(filter(is_scheduled, jax.tree.leaves(state, is_leaf=is_scheduled)))


def _is_state(node: Any) -> bool:
    return isinstance(node, (FreezeState, MaskedZeroUpdatesState))


def _states(state: optax.OptState) -> list[Any]:
    return [node for node in jax.tree.leaves(state, is_leaf=_is_state) if _is_state(node)]


def _with_masks(state: Any, new: Mapping[str, Any]) -> Any:
    plan = plan_of(state)
    arrays = plan.masks
    for i, (leaf, selection) in enumerate(zip(plan.leaves, plan.selections, strict=True)):
        if leaf.path in new and isinstance(selection, DenseMask):
            arrays[i] = copy_like(_new_mask(new[leaf.path], leaf, selection), selection.array)
    if isinstance(state, FreezeState):
        state = state._replace(inner_state=_moved_parts(state.inner_state, plan, plan.with_masks(arrays)))
    masks, treedef = _tree.flatten(state.masks)
    return state._replace(masks=jax.tree.unflatten(treedef, arrays)) if masks else state


def _new_mask(mask: Any, leaf: Leaf, selection: DenseMask) -> Any:
    """The array that replaces that of a dense mask."""
    new = elements(mask.array if isinstance(mask, Elements) else mask, selection.compact)
    fit_mask(dataclasses.replace(new, count=selection.count), leaf)
    if new.count != selection.count:
        raise value_error(
            "the number of trainable elements of a compact mask is fixed",
            at=leaf.path,
            got="a traced mask" if new.count is None else f"{new.count} trainable elements",
            expected=f"{selection.count}, as in the state",
            fix="keep their number and replace it outside jit, or use compact=False",
        )
    return new.array


def _moved_parts(inner_state: PyTree, old: Plan, new: Plan) -> PyTree:
    """The optimizer's state, in which each vector of compact elements is in the order of the new mask."""
    replaced = {
        leaf.path: (before, after)
        for leaf, before, after in zip(old.leaves, old.selections, new.selections, strict=True)
        if isinstance(before, DenseMask) and before.compact and before.array is not getattr(after, "array", None)
    }
    if not replaced:
        return inner_state
    nodes, treedef = _tree.flatten(inner_state)
    paths = _tree.paths(inner_state)
    owner_of = parameter_of(paths, [leaf.path for leaf in old.leaves])
    for i, (path, part) in enumerate(zip(paths, nodes, strict=True)):
        owner, values = owner_of(path), _tree.bare(part)
        if owner in replaced and isinstance(part, Part) and is_array(values):
            before, after = replaced[owner]
            if part.index == before.count and values.shape == (before.count,):
                full = before.put(jnp.zeros(part.shape, values.dtype), Part(values))
                nodes[i] = jax.tree.unflatten(jax.tree.structure(part), [after.take(full).values])
    return jax.tree.unflatten(treedef, nodes)
