"""The groups of ``freeze_when``: patterns, perhaps with element masks, divide the parameters into groups and the rest.

Every floating-point element belongs to one group or to the rest. Each of them has a plan in which everything else is
frozen, so that its elements are taken out of a leaf and put back as everywhere in this library.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import counted, refuse_no_mapping, value_error
from optax_freeze._optimizer.conditions import Condition, refuse_no_bool
from optax_freeze._optimizer.convergence import stats_of
from optax_freeze._optimizer.initial_rows import with_initial_rows
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.fit_mask import fit_mask
from optax_freeze._spec.layout import explicit_sharding, laid_out
from optax_freeze._spec.masks import DynamicRows, ElementMask, Elements, Rows, elements, rows
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Tied, plan_of_choices
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, DynamicRowIndex, RowIndex
from optax_freeze._spec.selector_algebra import Choice, Selector, as_selector
from optax_freeze._spec.selectors import as_choice
from optax_freeze._spec.tree import Leaf, Part, PyTree


def group_name(key: Any) -> str:
    """The name of a group: its pattern, or its selector as it is written."""
    return key if isinstance(key, str) else repr(as_selector(key, "a group"))


class Group(NamedTuple):
    """A group as it is given to ``freeze_when``: some leaves, or those of their elements at which a mask is True."""

    name: str
    selector: Selector
    mask: ElementMask | None
    condition: Condition | None  # None: a switch
    frozen: Any  # whether a group with a switch is frozen at first

    @property
    def has_array(self) -> bool:
        """Whether the state holds the group's dense masks."""
        return isinstance(self.mask, (Elements, DynamicRows))


def parse_groups(groups: Any) -> list[Group]:
    """The groups of a mapping given to ``freeze_when``."""
    forms = "{pattern: condition}, {pattern: bool} or {pattern: (element mask, condition)}"
    refuse_no_mapping("fz.freeze_when", groups, forms, fix="for a spec that never changes, fz.freeze(inner, frozen)")
    parsed: dict[str, Group] = {}
    for key, value in groups.items():
        name, mask, condition = group_name(key), None, value
        if isinstance(value, tuple) and len(value) == 2:
            mask, condition = as_choice(value[0], name), value[1]
        if name in parsed or isinstance(mask, bool):
            raise value_error(
                "a bool where an element mask is expected"
                if isinstance(mask, bool)
                else "two groups have the same name",
                at=name,
                got=repr(value) if isinstance(mask, bool) else f"{key!r} twice",
                expected="(element mask, condition), and each group once",
                fix="for whole leaves give the condition alone: {pattern: condition}",
            )
        selector = as_selector(key, "fz.freeze_when")
        if callable(condition):
            stats_of(condition)
            parsed[name] = Group(name, selector, mask, condition, None)
        else:
            refuse_no_bool(name, condition, "fz.freeze_when", "a function step -> bool, or ")
            parsed[name] = Group(name, selector, mask, None, condition)
    return list(parsed.values())


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class GroupPlans:
    """The plans of all groups for given parameters, all about the same leaves: what a state holds as its spec."""

    names: tuple[str, ...]
    conditions: tuple[Condition | None, ...]
    whole: Plan  # everything trains
    plans: tuple[Plan, ...]  # one for each group, then that of the rest

    def __hash__(self) -> int:
        return hash(self.names)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves of the parameters."""
        return self.whole.leaves

    def with_initial_rows(self, init: Callable[[PyTree], PyTree]) -> "GroupPlans":
        """The same plans with what the state of a row begins with; ``init`` is that of each group's optimizer."""
        return dataclasses.replace(self, plans=tuple(with_initial_rows(plan, init) for plan in self.plans))

    def without_masks(self) -> "GroupPlans":
        """The static part of the plans."""
        return dataclasses.replace(self, plans=tuple(plan.without_masks() for plan in self.plans))

    def with_masks(self, own: Sequence[Sequence[Any]]) -> "GroupPlans":
        """The same plans with arrays in their selections.

        ``own`` has for each group the arrays that its state holds, or none. The masks of the rest, and of a group that
        has the remainder of a leaf, are True at what other groups own; the rows of the rest are those of no group.
        """
        if not any(own):
            return self
        plans = []
        for plan, arrays in zip(self.plans, [*own, []], strict=True):
            masks = list(arrays) or [_tree.HOLE] * len(self.leaves)
            for i, selection in enumerate(plan.selections):
                others = [other[i] for other in own if other and not _tree.is_hole(other[i])]
                if isinstance(selection, DenseMask) and _tree.is_hole(masks[i]):
                    masks[i] = ~functools.reduce(jnp.logical_and, others)
                if isinstance(selection, DynamicRowIndex) and _tree.is_hole(masks[i]):
                    masks[i] = selection.without(*others)
            plans.append(plan.with_masks(masks))
        return dataclasses.replace(self, plans=tuple(plans))

    def merge(self, i: int, parts: Sequence[Any], like: Any) -> Any:
        """The update of one leaf, from those of its groups, laid out as ``like``."""
        owners = [(plan.selections[i], part) for plan, part in zip(self.plans, parts, strict=True)]
        owners = [(selection, part) for selection, part in owners if selection is not FROZEN]
        if owners[0][0] is TRAINABLE:
            return owners[0][1]
        shape, dtype = self.leaves[i].shape or (), jnp.result_type(*(part.dtype for _, part in owners))
        merged = laid_out(explicit_sharding(like), lambda: jnp.zeros(shape, dtype))
        for selection, part in owners:
            merged = selection.put(merged, part)
        return merged


def make_group_plans(groups: Sequence[Group], params: PyTree, tied: Tied) -> GroupPlans:
    """Divides the parameters; in the plans are the arrays of dense masks.

    Raises:
      ValueError: if a group is empty, masks for one leaf are incompatible, or leaves are tied across
        groups.
    """
    walk = _tree.walk(params)
    leaves = walk.leaves()
    taken: list[Choice] = [False] * len(leaves)  # by the groups so far
    whole = plan_of_choices(walk, leaves, taken, "ignore")
    plans = []
    for group in groups if leaves else ():
        selected, others = _divide(group, leaves, walk.values, taken)
        plans.append(plan_of_choices(walk, leaves, others, tied))
        if all(leaves[i].inexact and plans[-1].selections[i] is FROZEN for i in selected):
            raise _nothing_left(group, leaves, selected)
    plans.append(plan_of_choices(walk, leaves, taken, tied))
    # Without leaves (`optax.tree_map_params` gives a placeholder) every plan is that of no leaves.
    plans += [whole] * (len(groups) + 1 - len(plans))
    names, conditions = zip(*((group.name, group.condition) for group in groups), strict=True) if groups else ((), ())
    return GroupPlans(names, conditions, whole, tuple(plans))


def _divide(
    group: Group, leaves: Sequence[Leaf], values: Sequence[Any], taken: list[Choice]
) -> tuple[list[int], list[Choice]]:
    """The leaves that a group names, and what is not its own at each leaf; ``taken`` gains what it owns."""
    selected: list[int] = []
    others: list[Choice] = [True] * len(leaves)
    for i, (leaf, hit) in enumerate(zip(leaves, group.selector.select(leaves), strict=True)):
        if not isinstance(hit, bool):
            raise value_error(
                "the pattern or selector of a group must select whole leaves",
                at=leaf.path,
                got=f"{group.name!r}, which selects part of the leaf",
                expected="the element mask next to the condition",
                fix="fz.freeze_when(inner, {pattern: (mask, condition)})",
            )
        if not hit:
            continue
        selected.append(i)
        if taken[i] is True or not leaf.inexact:
            continue
        if group.mask is None:
            taken[i], others[i] = True, taken[i]
            continue
        if isinstance(values[i], Part):
            raise value_error(
                "an element mask cannot select elements of a Part",
                at=leaf.path,
                got=f"{group.mask!r} in the group {group.name!r}, and a Part from fz.freeze or fz.partition",
                expected="a full leaf",
                fix="give the group the whole Part: a condition without a mask",
            )
        taken[i], own = (group.mask, group.mask) if taken[i] is False else _join(taken[i], group.mask, leaf)
        others[i] = ~own
    return selected, others


def _join(before: Any, mask: Any, leaf: Leaf) -> tuple[Any, Any]:
    """The union of two element masks of a leaf, and what of the second is not in the first."""
    if isinstance(before, Elements) and isinstance(mask, Elements) and before.compact == mask.compact:
        a, b = jnp.asarray(before.array), jnp.asarray(mask.array)
        return elements(a | b, mask.compact), elements(b & ~a, mask.compact)
    ndim = len(leaf.shape or ()) or 1
    if isinstance(before, Rows) and isinstance(mask, Rows) and before.axis % ndim == mask.axis % ndim:
        a, b = (_rows_named(each, leaf) for each in (before, mask))
        both, new = (rows(np.flatnonzero(named).tolist(), mask.axis) for named in (a | b, b & ~a))
        return both, new
    raise value_error(
        "groups have incompatible element masks",
        at=leaf.path,
        got=f"{before!r} and {mask!r}",
        expected="rows along one axis, or elements that are all compact or all dense",
        fix="use the same kind of mask for every group of the leaf",
    )


def _rows_named(mask: Rows, leaf: Leaf) -> np.ndarray:
    """Which rows a mask names, as booleans."""
    assert leaf.shape is not None
    selection = fit_mask(mask, leaf)
    named = np.full(leaf.shape[mask.axis], selection is FROZEN)
    if isinstance(selection, RowIndex):
        named[:] = selection.picked_train
        for progression in selection.picked:
            named[slice(*progression)] = not selection.picked_train
    return named


def _nothing_left(group: Group, leaves: Sequence[Leaf], selected: Sequence[int]) -> ValueError:
    if not selected:
        got, fix = "a selector that selects nothing", "correct the pattern, or remove the group"
    else:
        got = f"{counted(len(selected), 'leaf', 'leaves')}, already in earlier groups"
        fix = "put the narrower group first, or remove this group"
    return value_error(
        f"the group {group.name!r} is empty",
        at=leaves[selected[0]].path if selected else group.name,
        got=got,
        expected="at least one element that is not in an earlier group",
        fix=fix,
    )
