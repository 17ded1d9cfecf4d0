"""Replaces the dense masks and dynamic rows in an optimizer state, between steps or inside ``jit``."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from optax_freeze._errors import described, is_concrete, refuse_no_mapping, value_error
from optax_freeze._optimizer.call_init import init_with
from optax_freeze._optimizer.group_plans import GroupPlans
from optax_freeze._optimizer.transformation import as_transformation
from optax_freeze._optimizer.union import UnionState
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.element_masks import elements
from optax_freeze._spec.masks import DynamicRows, ElementMask, Elements
from optax_freeze._spec.memory_kinds import to_memory_of
from optax_freeze._spec.part_source import mark_replaced
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import DenseMask, DynamicRowIndex, RowSelection, Selection
from optax_freeze._spec.selector_algebra import Selector, Where, as_selector, first_match
from optax_freeze._spec.sharding import copy_like
from optax_freeze._spec.tree import Leaf, PyTree
from optax_freeze._state.carried_values import CarriedValues
from optax_freeze._state.own_states import masks_in, outermost_states, states_in, with_rows
from optax_freeze._state.row_axes import init_shapes
from optax_freeze._state.state_entries import entries_of


def replace_masks(
    state: optax.OptState,
    tx: optax.GradientTransformation | optax.MultiSteps,
    params: PyTree,
    masks: Mapping[Any, Any],
) -> optax.OptState:
    """Replaces the dense masks or dynamic rows in an optimizer state, without recompiling.

    Call it between steps or inside a jitted function. Elements that stay trainable keep their moments, and newly
    trainable ones start as in ``tx.init(params)``. Of rows that keep their state, only the numbers change.
    Everything else is as in :func:`optax_freeze.migrate`: values that rows share, such as counts, continue, so
    Adam's first step on a new row is up to 3.2 times the usual one. If all elements that an optimizer trains are
    new (those of a label of ``optax.multi_transform``, of a group of :func:`optax_freeze.freeze_when`), everything
    beside its moments starts as in ``init``, too, and its next step is that of a new optimizer. An optimizer with a
    history of gradients (L-BFGS) or a line search starts as in ``init`` if any element is new, and so does
    Adafactor where the shapes do not tell which of its factors is that of the rows. Steps of schedules and wrappers
    (``optax.MultiSteps``) and random keys always continue.

    Args:
      state: from :func:`optax_freeze.freeze`, :func:`optax_freeze.masked_zero_updates` or
        :func:`optax_freeze.freeze_when` (only dynamic rows), alone or inside another state.
      tx: the optimizer of the state.
      params: the parameters as given to ``tx.init``, with their current values.
      masks: the new masks. A key is the path of a leaf, or a pattern or selector for all matching leaves with a mask;
        the first match counts. A value is a boolean array of the leaf's shape, True where frozen. For dynamic
        rows it is :func:`optax_freeze.rows` of a JAX array again, with as many trainable rows as before.

    Returns:
      The state with the new masks.

    Raises:
      ValueError: if the state is not one of ``tx`` for these parameters; if a key matches no leaf with such a mask; if
        an array has the wrong shape; if the number of trainable rows, or of trainable elements of a compact mask,
        changes; if one array covers several leaves (``optax.flatten``) whose rows change. The given state stays.
      TypeError: if a mask has another type, or ``tx`` is not an optimizer.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> params = {"layers": jnp.ones((4, 2)), "head": jnp.ones(2)}
      >>> tx = fz.freeze(optax.sgd(1.0), {"layers": ~fz.rows(jnp.array([2, 3])), "head": False})
      >>> state = fz.replace_masks(tx.init(params), tx, params, {"layers": ~fz.rows(jnp.array([0, 3]))})
      >>> updates, state = tx.update(params, state, params)
      >>> optax.apply_updates(params, updates)["layers"][:, 0]
      Array([0., 1., 1., 0.], dtype=float32)
    """
    fix = "name each mask by the path of its leaf, or by a pattern"
    refuse_no_mapping("fz.replace_masks", masks, "{path or pattern: mask}", at="its fourth argument", fix=fix)
    tx = as_transformation(tx, "fz.replace_masks(state, tx, params, masks)", other=state)
    shapes = init_shapes(tx, params)
    fix = "give the optimizer and the parameters of this state; for another spec, fz.migrate(state, tx, params)"
    _tree.refuse_other_paths(_tree.paths(state), _tree.paths(shapes.state), "fz.replace_masks: the state", fix)
    _refuse_other_shapes(state, shapes.state, fix)
    olds = [old._replace(plan=new.plan) for new, old in zip(states_in(shapes.state), states_in(state), strict=True)]
    plans = [old.current_plan for old in olds]
    leaves = {leaf.path: leaf for each in plans for leaf in each.leaves}
    with_mask = {
        leaf.path
        for each in plans
        for plan in (each.plans[:-1] if isinstance(each, GroupPlans) else [each])
        for leaf, selection in plan.entries()
        if isinstance(selection, DynamicRowIndex) or (isinstance(selection, DenseMask) and isinstance(each, Plan))
    }
    new = {path: masks[key] for path, key in _matched(masks, list(leaves.values()), with_mask).items()}
    _refuse_several_parts(new, state)
    kept = {each.leaves[i].path: (each, i) for each in plans if isinstance(each, Plan) for i in each.kept}
    of_kept = {path: its for path, its in kept.items() if path in new}
    numbers = {path: _new_array(new[path], each.leaves[i], each.selections[i]) for path, (each, i) in of_kept.items()}
    if len(numbers) == len(new):
        return with_rows(state, numbers)
    by_call = {call: _new_arrays(each, old, new) for call, each, old in zip(shapes.calls, plans, olds, strict=True)}
    call = itertools.count()
    fresh = init_with(lambda plans: plans.with_masks(by_call.get(next(call), [])), tx.init, params)

    arrays, structure = jax.tree.flatten(state)
    sizes = {leaf.path: leaf.shape for leaf in _tree.leaves(params)}
    entries = entries_of(fresh, sizes)
    old_entries = entries_of(jax.tree.unflatten(jax.tree.structure(fresh), arrays), sizes)
    sources = [
        [] if entry.address is None else [old if entry.leaf in new else old._replace(selection=entry.selection)]
        for entry, old in zip(entries, old_entries, strict=True)
    ]
    values = CarriedValues(entries, old_entries, sources, tx, params).values()
    replaced = jax.tree.unflatten(structure, map(_placed_as, values, arrays))
    for (path, array), (_, before) in zip(masks_in(replaced), masks_in(state), strict=True):
        mark_replaced(array, before, is_new=path in new)
    return with_rows(replaced, numbers)


def _refuse_other_shapes(state: PyTree, own: PyTree, fix: str) -> None:
    nodes = (map(_tree.bare, _tree.flatten(tree)[0]) for tree in (state, own))
    for path, got, expected in zip(_tree.paths(state), *nodes, strict=True):
        if np.shape(got) != np.shape(expected):
            raise value_error(
                "fz.replace_masks: the state has other shapes than that of `tx`",
                at=path,
                got=described(got),
                expected=f"shape {expected.shape}, as from tx.init(params)",
                fix=fix,
            )


def _refuse_several_parts(paths: Collection[str], state: PyTree) -> None:
    """A ``ValueError`` if several parts of a ``fz.union`` train a leaf: a new mask in one could reach into another."""
    for _, union in outermost_states(state, UnionState):
        owners: dict[str, list[int]] = {path: [] for path in paths}
        for n, part in enumerate(union.parts):
            for path in owners.keys() & {part.plan.leaves[i].path for i in part.plan.own}:
                owners[path].append(n)
        for path, parts in owners.items():
            if len(parts) > 1:
                raise value_error(
                    "a leaf that several parts of fz.union train cannot get another mask",
                    at=path,
                    got=f"a mask for a leaf of the parts {parts}",
                    expected="a leaf that one part trains",
                    fix="create the fz.union with other masks, then state = fz.migrate(state, tx, params)",
                )


def _new_arrays(plans: Plan | GroupPlans, old: Any, new: Mapping[str, Any]) -> list[Any]:
    """The mask arrays for ``with_masks`` of these plans, with the new ones in their places."""
    if isinstance(plans, GroupPlans):
        # In the plan of a group, the rows of the group train.
        new = {path: ~mask if isinstance(mask, ElementMask) else mask for path, mask in new.items()}
        pairs = zip(plans.names, plans.plans, strict=False)
        return [_new_arrays(plan, old, new) if old.groups[name].masks != () else [] for name, plan in pairs]
    return [
        copy_like(_new_array(new[leaf.path], leaf, selection), selection.array)
        if leaf.path in new and not _tree.is_masked_node(selection.array)
        else selection.array
        for leaf, selection in plans.entries()
    ]


def _placed_as(new: Any, old: Any) -> Any:
    """A new array on the devices and in the memory of the old one."""
    if new is old or not isinstance(old, jax.Array) or not is_concrete(new):
        return to_memory_of(old, new)
    return jax.device_put(new, old.sharding) if is_concrete(old) and old.committed else new


def _matched(masks: Mapping[Any, Any], leaves: Sequence[Leaf], with_mask: Collection[str]) -> dict[str, Any]:
    """The key of ``masks`` for each leaf that gets a new mask."""
    keys = list(masks)
    first = zip(first_match([_selector(key, leaves) for key in keys], leaves), leaves, strict=True)
    found = {leaf.path: keys[n] for n, leaf in first if n is not None and leaf.path in with_mask}
    for key in keys:
        if key not in found.values():
            raise value_error(
                "the state has no dense mask or dynamic rows for this path",
                at=str(key),
                got=f"a mask for {key!r}",
                expected=f"the path or a pattern of one of {sorted(with_mask)}" if with_mask else "a state with masks",
                fix="correct the path, or put fz.elements(...) or fz.rows(jnp.array([...])) into the spec",
            )
    return found


def _selector(key: Any, leaves: Sequence[Leaf]) -> Selector:
    """The selector of a key. An existing path is matched literally; a path that does not exist selects nothing."""
    paths = [leaf.path for leaf in leaves]
    is_pattern = not isinstance(key, str) or any(sign in key for sign in "*?[")
    if key in paths or not (is_pattern or any(path.startswith(f"{key}/") for path in paths)):
        return Where(lambda path, _: path == key)
    return as_selector(key, "fz.replace_masks")


def _new_array(mask: Any, leaf: Leaf, old: Selection) -> Any:
    """The array that replaces the array of a selection, of the same kind and count."""
    is_mask, is_elements = isinstance(mask, ElementMask), isinstance(mask, Elements)
    fix = "keep the kind of the mask and that number, or convert the state: fz.migrate(state, tx, params)"
    if isinstance(old, DynamicRowIndex):
        fits, expected = is_mask and not is_elements, "dynamic rows: ~fz.rows(jnp.array([...]))"
    else:
        fits, expected = is_elements or not is_mask, "a boolean array of the leaf's shape, or fz.elements of one"
    if not fits:
        what, got = "the mask is of a different kind than in the state", repr(mask) if is_mask else type(mask).__name__
        raise value_error(what, at=leaf.path, got=got, expected=expected, fix=fix)
    if isinstance(old, DynamicRowIndex):
        is_dynamic = isinstance(mask, DynamicRows)
        new = (dataclasses.replace(mask, keep_state=old.keep_state) if is_dynamic else mask).fit(leaf)
        if isinstance(new, RowSelection) and (new.axis, new.count) == (old.axis, old.count):
            return new.indices()
        got = f"a leaf that {new}"
    else:
        assert isinstance(old, DenseMask)
        new = elements(mask.array if is_elements else mask, compact=old.compact)
        dataclasses.replace(new, count=old.count).fit(leaf)
        if new.count == old.count:
            return new.array
        got = "a traced mask" if new.count is None else f"a leaf that trains in {new.count} elements"
    what = "the number of trainable rows, or elements of a compact mask, is fixed"
    raise value_error(what, at=leaf.path, got=got, expected=f"a leaf that {old}, as in the state", fix=fix)
