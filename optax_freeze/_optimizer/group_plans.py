"""Divides the parameters into groups, each with a plan in which the others are frozen; the last one is for the rest."""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_freeze._errors import counted, described, is_bool, value_error
from optax_freeze._optimizer.conditions import Condition
from optax_freeze._optimizer.group_state import GroupLeaves
from optax_freeze._optimizer.outer_transformation import Around, around
from optax_freeze._optimizer.parse_groups import GivenGroup
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.element_masks import elements
from optax_freeze._spec.masks import Choice, Elements, StaticRows, mask_of
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.plan_digest import PlanLine
from optax_freeze._spec.plan_nodes import register_as_static
from optax_freeze._spec.resolve import Tied, plan_of_choices, refuse_untrainable, register_with_flax
from optax_freeze._spec.selection import FROZEN, DenseMask, DynamicRowIndex
from optax_freeze._spec.selector_algebra import Not, Path, as_selector, is_selector
from optax_freeze._spec.tree import Leaf, Part, PyTree


@register_as_static
@dataclasses.dataclass(frozen=True)
class GroupPlans:
    """The plans of all groups for given parameters, all about the same leaves: what a state holds as its spec."""

    names: tuple[str, ...]
    keys: tuple[str, ...]  # the names as given to `freeze_when`: several groups may come from one `fz.each`
    conditions: tuple[Condition, ...]
    everything: Plan  # all leaves train
    plans: tuple[Plan, ...]  # one for each group, then that of all other leaves and elements

    def __hash__(self) -> int:
        return hash(self.names)

    @property
    def is_placeholder(self) -> bool:
        return self.everything.is_placeholder

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.everything.leaves

    @property
    def lines(self) -> list[PlanLine]:
        """What is compared where a state is read: what each group owns, and the conditions."""
        found = []
        for name, plan in zip([*self.names, None], self.plans, strict=True):
            group = "no group" if name is None else f"the group {name!r}"
            for line in map(plan.line, plan.own):
                found.append(PlanLine(line.path, f"in {group}, {line.told}", (name, line.exact)))
        of_groups = zip(self.names, self.conditions, strict=True)
        return found + [PlanLine(name, str(condition), condition.recorded) for name, condition in of_groups]

    def without_masks(self) -> "GroupPlans":
        return dataclasses.replace(self, plans=tuple(plan.without_masks() for plan in self.plans))

    def with_masks(self, own: Sequence[Sequence[Any]]) -> "GroupPlans":
        """The same plans with the arrays that the state of each group holds, if it holds any.

        Plans without arrays of their own have the elements, or rows, that are in no other group.
        """
        if not any(own):
            return self
        plans = []
        for plan, arrays in zip(self.plans, [*own, []], strict=True):
            masks = list(arrays) or [_tree.MASKED_NODE] * len(self.leaves)
            for i, selection in enumerate(plan.selections):
                others = [other[i] for other in own if other and not _tree.is_masked_node(other[i])]
                if isinstance(selection, DenseMask) and _tree.is_masked_node(masks[i]):
                    masks[i] = ~functools.reduce(jnp.logical_and, others)
                if isinstance(selection, DynamicRowIndex) and _tree.is_masked_node(masks[i]):
                    masks[i] = selection.without(*others)
            plans.append(plan.with_masks(masks))
        return dataclasses.replace(self, plans=tuple(plans))


def make_group_plans(
    groups: Sequence[GivenGroup], params: PyTree, tied: Tied, latest: GroupPlans | None = None
) -> GroupPlans:
    """Divides the parameters; in the plans are the arrays of dense masks.

    ``optax.tree_map_params`` gives a placeholder without leaves for the parameters, and maps the resulting state
    together with the real one. The groups of ``fz.each`` are then those of ``latest``, the last plans.
    """
    walk = _tree.walk(params)
    leaves = walk.leaves()
    taken: list[Choice] = [False] * len(leaves)  # by the groups so far
    everything = plan_of_choices(walk, leaves, taken, "ignore")
    made: dict[str, tuple[GivenGroup, Plan]] = {}
    for group in groups if leaves else ():
        selected = _selected(group, leaves)
        _refuse_kept_rows(group)
        refuse_untrainable(True if group.mask is None else group.mask, [leaves[i] for i in selected])
        owned = [(leaves[i].path, [i]) for i in selected] if group.each else [(group.name, selected)]
        pairs = [
            (name, plan_of_choices(walk, leaves, _claim(group, walk, leaves, numbers, taken), tied))
            for name, numbers in owned
        ]
        if all(plan.all_frozen for _, plan in pairs):
            if all(leaves[i].inexact for i in selected):
                raise _empty(group, [leaves[i].path for i in selected])
            _refuse_frozen_outside(group, [leaves[i].path for i in selected if not leaves[i].inexact], around())
        for name, plan in pairs:
            if group.each and plan.all_frozen:
                continue
            if name in made:
                raise _same_name(name, made[name][0], group)
            made[name] = group, plan
    if not leaves:
        by_key = {group.name: group for group in groups}
        keys = names = [group.name for group in groups if not group.each]
        if everything.is_placeholder and latest is not None:
            keys, names = latest.keys, latest.names
        made = {name: (by_key[key], everything) for name, key in zip(names, keys, strict=True)}
    plans = *(plan for _, plan in made.values()), plan_of_choices(walk, leaves, taken, tied)
    owners = [group for group, _ in made.values()]
    keys, conditions = tuple(group.name for group in owners), tuple(group.condition for group in owners)
    return GroupPlans(tuple(made), keys, conditions, everything, plans)


def _refuse_kept_rows(group: GivenGroup) -> None:
    if getattr(group.mask, "keep_state", False):
        what = "a group of fz.freeze_when has no rows that keep their state"
        fix = "fz.freeze(optimizer, {path: mask}), without groups for this leaf"
        raise value_error(what, at=group.name, got=repr(group.mask), expected="rows without keep_state", fix=fix)


def _empty(group: GivenGroup, selected: Sequence[str]) -> ValueError:
    at, got, fix = group.name, "a selector that selects nothing", "correct the pattern"
    if selected:
        at, fix = selected[0], "put the narrower group first, or remove this group"
        got = f"{counted(len(selected), 'leaf', 'leaves')}, already in earlier groups"
    expected = "at least one element that is not in an earlier group"
    return value_error(f"the group {group.name!r} is empty", at=at, got=got, expected=expected, fix=fix)


def _refuse_frozen_outside(group: GivenGroup, paths: Sequence[str], outer: Around | None) -> None:
    """A ``ValueError`` if these, the leaves of a group, are frozen by the ``fz.freeze`` around it."""
    if outer is None or outer.frozen is None:
        return
    frozen = {leaf.path: leaf.inexact for leaf, selection in outer.plan.entries() if selection is FROZEN}
    if not frozen.keys() >= {*paths} or not any(frozen[path] for path in paths):
        return
    others, fix = Not(group.selector, is_all_except=isinstance(group.selector, Path)), "give these leaves False in it"
    if is_bool(outer.frozen):
        fix = repr(others)
    elif is_selector(outer.frozen):
        fix = repr(as_selector(outer.frozen, "frozen") & others)
    raise value_error(
        f"the group {group.name!r} would never train",
        at=paths[0],
        got=f"{counted(len(paths), 'leaf', 'leaves')}, frozen by the fz.freeze around it: {described(outer.frozen)}",
        expected="a leaf that the spec of fz.freeze, which is for all of training, does not freeze",
        fix=f"leave the group out of that spec: {fix}",
    )


def _same_name(name: str, first: GivenGroup, second: GivenGroup) -> ValueError:
    got = f"elements of this leaf in {first.name} and in {second.name}"
    expected = "at most one group that is named by the path of the leaf"
    fix = f"name the other group by a selector: fz.path({name!r})"
    return value_error("two groups have the same name", at=name, got=got, expected=expected, fix=fix)


def _selected(group: GivenGroup, leaves: Sequence[Leaf]) -> list[int]:
    hits = group.selector.select(leaves)
    for leaf, hit in zip(leaves, hits, strict=True):
        if not isinstance(hit, bool):
            raise value_error(
                "the pattern or selector of a group must select whole leaves",
                at=leaf.path,
                got=f"{group.name!r}, which selects part of the leaf",
                expected="the element mask next to the condition",
                fix="fz.freeze_when(inner, {pattern: (mask, condition)})",
            )
    return [i for i, hit in enumerate(hits) if hit]


def _claim(
    group: GivenGroup, walk: _tree.Walk, leaves: Sequence[Leaf], selected: Sequence[int], taken: list[Choice]
) -> list[Choice]:
    """The elements of each selected leaf that a group does not own; adds those that it owns to ``taken``."""
    others: list[Choice] = [True] * len(leaves)
    for i, leaf in ((i, leaves[i]) for i in selected if taken[i] is not True and leaves[i].inexact):
        if group.mask is None:
            taken[i], others[i] = True, taken[i]
            continue
        if isinstance(walk.values[i], Part):
            raise value_error(
                "an element mask cannot select elements of a Part",
                at=leaf.path,
                got=f"{group.mask!r} in the group {group.name!r}, and a Part from fz.freeze or fz.partition",
                expected="a full leaf",
                fix="give the group the whole Part: a condition without a mask",
            )
        taken[i], others[i] = (group.mask, ~group.mask) if taken[i] is False else _join(taken[i], group.mask, leaf)
    return others


def _join(before: Any, mask: Any, leaf: Leaf) -> tuple[Any, Any]:
    """The union of two element masks of a leaf, and all but what of the second is not in the first."""
    if isinstance(before, Elements) and isinstance(mask, Elements) and before.compact == mask.compact:
        with jax.ensure_compile_time_eval():  # compact elements are counted
            a, b = jnp.asarray(before.array), jnp.asarray(mask.array)
            return elements(a | b, compact=mask.compact), elements(a | ~b, compact=mask.compact)
    ndim = len(leaf.shape or ()) or 1
    if isinstance(before, StaticRows) and isinstance(mask, StaticRows) and before.axis % ndim == mask.axis % ndim:
        a, b = before.frozen_rows(leaf), mask.frozen_rows(leaf)
        return mask_of(a | b, mask.axis), mask_of(a | ~b, mask.axis)
    raise value_error(
        "groups have incompatible element masks",
        at=leaf.path,
        got=f"{before!r} and {mask!r}",
        expected="rows along one axis, or elements that are all compact or all dense",
        fix="use the same kind of mask for every group of the leaf",
    )


def register_groups_with_flax() -> None:
    """``register_with_flax`` for the nodes of a state of groups."""
    register_with_flax(GroupPlans)
    if serialization := sys.modules.get("flax.serialization"):

        def restored(leaves: GroupLeaves, state: Any) -> GroupLeaves:
            return GroupLeaves(serialization.from_state_dict(dict(leaves), state))

        to_dict = lambda leaves: serialization.to_state_dict(dict(leaves))  # noqa: E731
        serialization.register_serialization_state(GroupLeaves, to_dict, restored, override=True)
