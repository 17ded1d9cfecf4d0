"""Replaces the dense masks and dynamic rows in an optimizer state, between steps or inside ``jit``."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_freeze._errors import counted, refuse_no_mapping, value_error
from optax_freeze._optimizer.freeze import FreezeState, MaskedZeroUpdatesState
from optax_freeze._optimizer.freeze_when import FreezeWhenState, plans_of
from optax_freeze._optimizer.plan_in_state import plan_of
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.fit_mask import fit_mask
from optax_freeze._spec.indexing import at, select
from optax_freeze._spec.layout import copy_like
from optax_freeze._spec.masks import ElementMask, Elements, elements
from optax_freeze._spec.plan import InitialRows, Plan
from optax_freeze._spec.selection import DenseMask, DynamicRowIndex, RowSelection, Selection
from optax_freeze._spec.selector_algebra import Selector, Where, as_selector, first_match
from optax_freeze._spec.tree import Leaf, Part, PyTree
from optax_freeze._state.entries import Entry, Group, entries_of


def replace_masks(state: optax.OptState, masks: Mapping[Any, Any]) -> optax.OptState:
    """Replaces the dense masks or dynamic rows in an optimizer state, without recompiling.

    Call it between steps or inside a jitted function. Elements that stay trainable keep their moments, and newly
    trainable ones start as in ``init``. What the rows share continues: counts, and arrays without rows, such as the
    column factors of Adafactor, the norms of NovoGrad and some projections of GaLore. So Adam's first step on a new row
    is up to 3.2 times the usual one. :func:`optax_freeze.migrate` gives the same moments and counts.

    If an optimizer trains nothing but rows that are all replaced (a label of ``optax.multi_transform``, a group of
    :func:`optax_freeze.freeze_when`), everything beside its moments starts as in ``init``, too, and its next step is
    that of a new optimizer. Only here ``fz.migrate`` differs, which keeps the counts. Steps of schedules and wrappers
    (``optax.MultiSteps``) and random keys always continue.

    Args:
      state: from :func:`optax_freeze.freeze`, :func:`optax_freeze.masked_zero_updates` or
        :func:`optax_freeze.freeze_when` (only dynamic rows), alone or inside another state.
      masks: the new masks. A key is the path of a leaf, or a pattern or selector for all matching leaves with a mask;
        the first match counts. A value is a boolean array of the leaf's shape, True where frozen. For leaves frozen by
        :func:`optax_freeze.rows` of a JAX array, it is such rows again, with as many trainable rows as before.

    Returns:
      The state with the new masks.

    Raises:
      ValueError: if a key matches no leaf with such a mask; if an array has the wrong shape; if the number of trainable
        rows, or of trainable elements of a compact mask, changes; if the initial state of a row is unknown: it depends
        on the values of the parameters, which are not given here, or it is not found where the rows are, as in a
        history or in ``optax.flatten``. The given state is not changed.
      TypeError: if a mask has another type.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"layers": jnp.ones((4, 2)), "head": jnp.ones(2)}
      >>> tx = fz.freeze(optax.sgd(1.0), {"layers": ~fz.rows(jnp.array([2, 3])), "head": False})
      >>> state = fz.replace_masks(tx.init(params), {"layers": ~fz.rows(jnp.array([0, 3]))})
      >>> updates, state = tx.update(params, state, params)
      >>> optax.apply_updates(params, updates)["layers"][:, 0]
      Array([0., 1., 1., 0.], dtype=float32)
    """
    fix = "name each mask by the path of its leaf, or by a pattern"
    refuse_no_mapping("fz.replace_masks", masks, "{path or pattern: mask}", fix=fix)
    nodes = [node for node in jax.tree.leaves(state, is_leaf=_is_state) if _is_state(node)]
    leaves = {leaf.path: leaf for node in nodes for plan in _plans(node) for leaf in plan.leaves}
    with_mask = {
        leaf.path
        for node in nodes
        for plan in _plans(node)
        for leaf, selection in zip(plan.leaves, plan.selections, strict=True)
        if _is_replaceable(selection, node)
    }
    new = {path: masks[key] for path, key in _matched(masks, list(leaves.values()), with_mask).items()}
    return jax.tree.map(lambda node: _replaced(node, new) if _is_state(node) else node, state, is_leaf=_is_state)


def _is_state(node: Any) -> bool:
    return isinstance(node, (FreezeState, MaskedZeroUpdatesState, FreezeWhenState)) and bool(node.spec.leaves)


def _plans(node: Any) -> Sequence[Plan]:
    return node.spec.plans[:-1] if isinstance(node, FreezeWhenState) else [node.spec]


def _is_replaceable(selection: Selection, node: Any) -> bool:
    dense = isinstance(selection, DenseMask) and not isinstance(node, FreezeWhenState)
    return dense or isinstance(selection, DynamicRowIndex)


def _matched(masks: Mapping[Any, Any], leaves: Sequence[Leaf], with_mask: Collection[str]) -> dict[str, Any]:
    """The key of ``masks`` for each leaf that gets a new mask."""
    keys = list(masks)
    found: dict[str, Any] = {}
    for n, leaf in zip(first_match([_selector(key, leaves) for key in keys], leaves), leaves, strict=True):
        if n is not None and leaf.path in with_mask:
            found[leaf.path] = keys[n]
    for key in keys:
        if key not in found.values():
            raise value_error(
                "the state has no replaceable mask for this path",
                at=str(key),
                got=f"a mask for {key!r}",
                expected=f"the path or a pattern of one of {sorted(with_mask)}" if with_mask else "a state with masks",
                fix="correct the path; fz.elements(...), boolean arrays and fz.rows(jnp.array([...])) are replaceable",
            )
    return found


def _selector(key: Any, leaves: Sequence[Leaf]) -> Selector:
    """The selector of a key. An existing path is matched literally; a path that does not exist selects nothing."""
    paths = [leaf.path for leaf in leaves]
    is_pattern = not isinstance(key, str) or any(sign in key for sign in "*?[")
    if key in paths or not (is_pattern or any(path.startswith(f"{key}/") for path in paths)):
        return Where(lambda path, _: path == key)
    return as_selector(key, "fz.replace_masks")


def _replaced(node: Any, new: Mapping[str, Any]) -> Any:
    """A state of this library with new masks."""
    if isinstance(node, FreezeWhenState):
        return _with_rows_of_groups(node, new)
    old = plan_of(node)
    plan = old.with_masks(_new_masks(old, new))
    masks, treedef = _tree.flatten(node.masks)
    node = node._replace(masks=jax.tree.unflatten(treedef, plan.masks)) if masks else node
    if not isinstance(node, FreezeState):
        return node
    partition: Any = node.inner_state
    of_trainable = partition.inner_states["trainable"]
    moved = of_trainable._replace(inner_state=_moved(of_trainable.inner_state, old, plan))
    states = {**partition.inner_states, "trainable": moved}
    return node._replace(inner_state=partition._replace(inner_states=states))


def _with_rows_of_groups(node: FreezeWhenState, new: Mapping[str, Any]) -> FreezeWhenState:
    """The state of ``freeze_when`` with new rows for its groups, and so other rows for the remaining optimizers."""
    olds = plans_of(node)
    new = {path: ~mask if isinstance(mask, ElementMask) else mask for path, mask in new.items()}  # rows of the group
    own = [
        _new_masks(plan, new) if node.groups[name].masks != () else []
        for name, plan in zip(olds.names, olds.plans, strict=False)
    ]
    groups = {}
    for name, masks in zip(olds.names, own, strict=True):
        group, treedef = node.groups[name], _tree.flatten(node.groups[name].masks)[1]
        groups[name] = group._replace(masks=jax.tree.unflatten(treedef, masks)) if masks else group
    replaced = node._replace(groups=groups)
    plans = plans_of(replaced)
    states = [*(groups[name].inner_state for name in olds.names), node.rest_state]
    *states, rest_state = [_moved(*each) for each in zip(states, olds.plans, plans.plans, strict=True)]
    for name, state in zip(olds.names, states, strict=True):
        groups[name] = groups[name]._replace(inner_state=state)
    return replaced._replace(rest_state=rest_state)


def _new_masks(plan: Plan, new: Mapping[str, Any]) -> list[Any]:
    """The mask arrays of a plan, with the new ones in their places."""
    return [
        copy_like(_new_mask(new[leaf.path], leaf, selection), selection.array)
        if leaf.path in new and not _tree.is_hole(selection.array)
        else selection.array
        for leaf, selection in zip(plan.leaves, plan.selections, strict=True)
    ]


def _new_mask(mask: Any, leaf: Leaf, old: Selection) -> Any:
    """The array that replaces the array of a selection."""
    if isinstance(old, DynamicRowIndex):
        return _new_rows(mask, leaf, old)
    assert isinstance(old, DenseMask)
    if isinstance(mask, ElementMask) and not isinstance(mask, Elements):
        raise _another_kind(mask, leaf, "a boolean array of the leaf's shape, or fz.elements of one")
    new = elements(mask.array if isinstance(mask, Elements) else mask, old.compact)
    fit_mask(dataclasses.replace(new, count=old.count), leaf)
    if new.count != old.count:
        raise value_error(
            "the number of trainable elements of a compact mask is fixed",
            at=leaf.path,
            got="a traced mask" if new.count is None else f"{new.count} trainable elements",
            expected=f"{old.count}, as in the state",
            fix="keep their number and replace it outside jit, or use compact=False",
        )
    return new.array


def _new_rows(mask: Any, leaf: Leaf, old: DynamicRowIndex) -> Any:
    if not isinstance(mask, ElementMask) or isinstance(mask, Elements):
        raise _another_kind(mask, leaf, "rows of a JAX array: ~fz.rows(jnp.array([...]))")
    new = fit_mask(mask, leaf)
    if not isinstance(new, RowSelection) or (new.axis, new.count) != (old.axis, old.count):
        rows = _told(new) if isinstance(new, RowSelection) else f"a leaf that {new}"
        raise value_error(
            "the number of trainable rows is fixed",
            at=leaf.path,
            got=rows,
            expected=f"{_told(old)}, as in the state",
            fix="keep the number of rows, or convert the state: fz.migrate(state, tx, params)",
        )
    return new.indices()


def _told(rows: RowSelection) -> str:
    return f"{counted(rows.count, 'trainable row', 'trainable rows')} along axis {rows.axis}"


def _another_kind(mask: Any, leaf: Leaf, expected: str) -> ValueError:
    return value_error(
        "the mask is of a different kind than in the state",
        at=leaf.path,
        got=repr(mask) if isinstance(mask, ElementMask) else type(mask).__name__,
        expected=expected,
        fix="use the same kind of mask as before, or convert the state: fz.migrate(state, tx, params)",
    )


def _moved(state: PyTree, old: Plan, new: Plan) -> PyTree:
    """The state of an optimizer, with its arrays rearranged for the new masks of its leaves."""
    changed = {
        leaf.path: (before, after)
        for leaf, before, after in zip(old.leaves, old.selections, new.selections, strict=True)
        if before.array is not after.array
    }
    if not changed:
        return state
    nodes, treedef = _tree.flatten(state)
    initial = dict(old.initial)
    entries = entries_of(state, {leaf.path: leaf.shape for leaf in old.leaves})
    trees = _trees(entries)
    anew = _begins_anew(trees, changed)
    _refuse_unclear_numbers(state, entries, anew)
    for i, (path, entry) in enumerate(zip(_tree.paths(state), entries, strict=True)):
        beside, start = trees.get(_place(entry), {}), initial.get(path)
        if entry.leaf is not None:
            if entry.leaf in changed and isinstance(entry.value, Part) and jax.tree.leaves(entry.value):
                values = _moved_part(entry.value, *changed[entry.leaf], start, anew.get(_place(entry)), path)
                nodes[i] = jax.tree.unflatten(jax.tree.structure(nodes[i]), [values])
        elif start is not None and start.axis is not None:
            raise _refused(
                path, "an array that contains the rows of several leaves", "create a new state: tx.init(params)"
            )
        elif "grad" in beside and path.endswith("value") and not changed.keys().isdisjoint(*beside.values()):
            nodes[i] = jnp.full_like(entry.value, jnp.inf)  # a line search: the gradient is that of other elements
        elif _place(entry) in anew and _is_number(entry):
            if start is None or start.number is None:
                raise _refused(path, "a number that depends on the parameters")
            nodes[i] = jnp.where(anew[_place(entry)], jnp.full_like(entry.value, start.number), entry.value)
    return jax.tree.unflatten(treedef, nodes)


def _moved_part(part: Part, old: Any, new: Any, initial: InitialRows | None, anew: Any, path: str) -> Any:
    """The values of a part for its new mask. Values in both masks are moved, and the others get initial values.

    An array without rows (a column factor, a norm) stays as it is, unless ``anew``.
    """
    values = jnp.asarray(_tree.bare(part))
    if isinstance(old, DenseMask):
        if part.index != old.count or values.shape != (old.count,):
            return values
        full = old.put(jnp.zeros(part.shape, values.dtype), Part(values))
        return new.take(full).values
    if initial is None or initial.number is None or (initial.axis is not None and initial.axis > old.axis):
        raise _refused(
            path, "an array initialized from the parameters, a history of them, or several arrays for one leaf"
        )
    if initial.axis is None:
        return values if anew is None else jnp.where(anew, jnp.full_like(values, initial.number), values)
    position = jnp.searchsorted(old.array, new.array)
    stays = jnp.take(old.array, position, mode="clip") == new.array
    rows = at(values, initial.axis, position).get(mode="clip")
    shape = [-1 if d == initial.axis else 1 for d in range(values.ndim)]
    return select(stays.reshape(shape), rows, jnp.full_like(rows, initial.number))


_NEW_STATE = "create a new state: tx.init(params), or fz.migrate(state, tx, params) for a `tx` with the new rows"

_Place: TypeAlias = tuple[Group, str]
"""The group and the address of the state of one transformation."""


def _place(entry: Entry) -> _Place:
    return entry.group, (str(entry.address) if entry.leaf is None else entry.tree).rpartition("/")[0]


def _is_number(entry: Entry) -> bool:
    """Whether an entry is a number that belongs to moments, and not a random key or a number of a wrapper."""
    value = entry.value
    is_scalar = entry.leaf is None and not entry.optional and getattr(value, "shape", None) == ()
    return is_scalar and not entry.of_wrapper and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _trees(entries: Sequence[Entry]) -> dict[_Place, dict[str, set[str]]]:
    """The trees like the parameters in the state of each transformation, by field, and their leaves."""
    trees: dict[_Place, dict[str, set[str]]] = {}
    for entry in entries:
        if entry.leaf is not None and entry.is_array:
            field = entry.tree.rpartition("/")[2]
            trees.setdefault(_place(entry), {}).setdefault(field, set()).add(entry.leaf)
    return trees


def _begins_anew(
    trees: Mapping[_Place, Mapping[str, set[str]]], changed: Mapping[str, tuple[Selection, Selection]]
) -> dict[_Place, jax.Array]:
    """Whether all rows of a transformation are replaced, for those whose leaves all get new rows."""
    replaced = {
        path: ~(jnp.isin(new.array, old.array) & (new.array < new.size)).any()
        for path, (old, new) in changed.items()
        if isinstance(old, DynamicRowIndex) and isinstance(new, DynamicRowIndex)
    }
    owned_by = {place: set().union(*by_field.values()) for place, by_field in trees.items()}
    return {
        place: functools.reduce(jnp.logical_and, [replaced[leaf] for leaf in sorted(owned)])
        for place, owned in owned_by.items()
        if owned <= replaced.keys()
    }


def _refuse_unclear_numbers(state: PyTree, entries: Sequence[Entry], anew: Collection[_Place]) -> None:
    """Refuses a number beside a tuple, list or dict of moments: it may count their steps, or those of a schedule."""
    keys = [key for key, _ in jax.tree_util.tree_flatten_with_path(state, is_leaf=_tree.is_leaf)[0]]
    trees = [
        key[
            : next(
                n
                for n in range(len(key) + 1)
                if _tree.keystr(key[:n]) == path.removesuffix(str(entry.leaf)).rstrip("/")
            )
        ]
        for key, path, entry in zip(keys, _tree.paths(state), entries, strict=True)
        if entry.leaf is not None and entry.is_array and _place(entry) in anew
    ]
    for key, path, entry in zip(keys, _tree.paths(state), entries, strict=True):
        n = len(key) - 1
        inside = [tree[n + 1 :] for tree in trees if tree[:n] == key[:n]]
        named = [any(isinstance(each, jax.tree_util.GetAttrKey) for each in tree) for tree in inside]
        if _is_number(entry) and all(inside) and not all(named):
            raise _refused(path, "a number that may count the steps of moments in another container")


def _refused(path: str, got: str, fix: str = _NEW_STATE) -> ValueError:
    return value_error(
        "the optimizer state of a single row cannot be reset",
        at=path,
        got=got,
        expected="a state with a constant initial value for each element, as in Adam",
        fix=fix,
    )
