"""Reads the spec from an optimizer state, including masks that were replaced between steps."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from optax_freeze._errors import value_error
from optax_freeze._optimizer.freeze import FreezeState
from optax_freeze._optimizer.freeze_when import FreezeWhenState, frozen_groups
from optax_freeze._optimizer.group_plans import GroupPlans
from optax_freeze._optimizer.union import UnionState
from optax_freeze._spec.group_spec import GroupSpec
from optax_freeze._spec.masks import choice_of
from optax_freeze._spec.selection import TRAINABLE, Selection
from optax_freeze._spec.selector_algebra import Choices, ResolvedSpec, Selector
from optax_freeze._spec.tree import Leaf
from optax_freeze._state.own_states import OWN, outermost_states


def spec_of(state: optax.OptState) -> Selector:
    """Returns the spec in an optimizer state, with the current masks.

    In a step without :func:`optax_freeze.train_step`, pass it to :func:`optax_freeze.value_and_grad` and
    :func:`optax_freeze.apply_updates`. The masks are then arguments of the compiled program, whereas a mask in a
    closure would be a constant. The spec of a :func:`optax_freeze.freeze_when` state says which groups are frozen now.
    Inside a jitted step this is a traced value, which only :func:`optax_freeze.value_and_grad` and
    :func:`optax_freeze.grad` accept.

    Args:
      state: from :func:`optax_freeze.freeze`, :func:`optax_freeze.masked_zero_updates`,
        :func:`optax_freeze.freeze_when` or :func:`optax_freeze.union` (what all parts freeze), alone or inside another
        state.

    Returns:
      A selector, for trees with the same leaves as the parameters given to ``init``. States in the groups of one
      ``optax.partition``, or in ``optax.masked``, give one spec, in which leaves that none of them was given train.

    Raises:
      ValueError: if the state contains no such state, or several with different specs; if a state of
        :func:`optax_freeze.freeze_when` has no values.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
      >>> state = fz.freeze(optax.sgd(0.1), {"w": jnp.eye(2, dtype=bool), "b": True}).init(params)
      >>> fz.resolve(params, fz.spec_of(state))
      {'b': True, 'w': fz.elements(<bool[2, 2]>)}
    """
    if _states(state, UnionState):
        as_one = lambda node: node.as_one if isinstance(node, UnionState) else node  # noqa: E731
        state = jax.tree.map(as_one, state, is_leaf=UnionState.__instancecheck__)
    if (spec := _spec_of_masked(state)) is not None:
        return spec
    states, scheduled = _states(state, FreezeState), _states(state, FreezeWhenState)
    if not states and len(scheduled) == 1:
        plans = scheduled[0].current_plan
        return _group_spec(scheduled, plans.leaves, plans.plans[-1].selections)
    if not states or any(states[0].differs(other) for other in states[1:]):
        what, fix = (
            "the state contains different specs",
            "one fz.freeze around the whole optimizer, also around fz.freeze_when or optax.multi_transform",
        )
        if not states and not scheduled:
            what, fix = "the state contains no spec", "tx = fz.freeze(optimizer, frozen), state = tx.init(params)"
        got = f"{len(states)} states of fz.freeze or fz.masked_zero_updates, {len(scheduled)} of fz.freeze_when"
        expected = "one, or several of fz.freeze with the same spec"
        raise value_error(what, at="state", got=got, expected=expected, fix=fix)
    return states[0].current_plan.as_spec


def _group_spec(states: Sequence[FreezeWhenState], leaves: tuple[Leaf, ...], rest: tuple[Selection, ...]) -> GroupSpec:
    """The spec of the groups of all states, and of ``rest``: what is in no group and trains."""
    names, own, frozen = [], [], []
    for state in states:
        names += state.plan.names
        own += [plan.selections for plan in state.current_plan.plans[:-1]]
        frozen += frozen_groups(state).values()
    return GroupSpec(tuple(names), leaves, (*own, rest), tuple(frozen))


def _spec_of_masked(state: optax.OptState) -> Selector | None:
    """The spec of a state whose outermost states are all in ``optax.masked``; None for another, or if two overlap.

    A leaf that a state of ``optax.masked`` was not given belongs to another optimizer, which may train it.
    """
    outer = [node for _, node in outermost_states(state, (*OWN, optax.MaskedState))]
    states = [x for node in outer for _, x in outermost_states(node) if x.plan.leaves]
    if not states or any(isinstance(node, OWN) for node in outer):
        return None
    plans = [state.current_plan for state in states]
    paths, *others = [tuple(leaf.path for leaf in plan.leaves) for plan in plans]
    given = [[n for n, plan in enumerate(plans) if plan.leaves[i].dtype is not None] for i in range(len(paths))]
    if any(its != paths for its in others) or any(len(numbers) > 1 for numbers in given):
        return None
    rests = [(plan.plans[-1] if isinstance(plan, GroupPlans) else plan).selections for plan in plans]
    rest = tuple(rests[numbers[0]][i] if numbers else TRAINABLE for i, numbers in enumerate(given))
    groups = [state for state in states if isinstance(state, FreezeWhenState)]
    if not groups:
        return ResolvedSpec(paths, Choices(map(choice_of, rest)))
    return _group_spec(groups, tuple(plans[its[0] if its else 0].leaves[i] for i, its in enumerate(given)), rest)


def _states(state: optax.OptState, kind: type) -> list[Any]:
    """The states of a kind that are in no other one; a builtin looks for them, since many groups have many nodes."""
    found = jax.tree.leaves(state, is_leaf=kind.__instancecheck__)
    return [x for x in found if isinstance(x, kind)]
