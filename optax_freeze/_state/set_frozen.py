"""Reads and sets which groups of :func:`optax_freeze.freeze_when` are frozen now."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from optax_freeze._errors import described, is_array, message, refuse_no_mapping, value_error
from optax_freeze._optimizer.conditions import Switch, refuse_no_bool
from optax_freeze._optimizer.freeze_when import FreezeWhenState, frozen_groups
from optax_freeze._optimizer.parse_groups import group_name
from optax_freeze._spec.sharding import copy_like
from optax_freeze._spec.tree import PyTree
from optax_freeze._state.own_states import map_states, states_in


def set_frozen(state: optax.OptState, groups: Mapping[Any, Any]) -> optax.OptState:
    """Freezes or unfreezes groups that have no schedule, between steps and without recompiling.

    Args:
      state: from :func:`optax_freeze.freeze_when`, alone or inside another state (a chain, ``MultiSteps``, a train
        state).
      groups: a bool for each group to change, by the pattern that names it: True to freeze, False to unfreeze. The
        groups of :func:`optax_freeze.each` are named by the paths of their leaves; ``fz.each`` sets all of them. If
        ``jax.vmap`` made the state, a bool is for all members, and an array of bools has one for each.

    Returns:
      The state with the groups set.

    Raises:
      KeyError: if there is no group with this pattern; the message lists the groups.
      ValueError: if the group has a schedule, or the state has no groups.
      TypeError, ValueError: if a value is neither a single bool nor an array with one for each member.

    Example:
      >>> import jax.numpy as jnp, optax, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> state = fz.freeze_when(optax.adam(0.5), {"encoder": True}).init(params)
      >>> state = fz.set_frozen(state, {"encoder": False})
      >>> fz.currently_frozen(state)
      {'encoder': False}
    """
    fix = "name each group by its pattern: fz.set_frozen(state, {'encoder': True})"
    refuse_no_mapping("fz.set_frozen", groups, "{pattern: bool}", fix=fix)
    states = _states(state)
    plans = [node.plan for node in states]
    known = [each for plan in plans for each in zip(plan.names, plan.keys, plan.conditions, strict=True)]
    new = {}
    for key, value in groups.items():
        name = group_name(key)
        own = {each for each, _, _ in known if each == name} or {each for each, key, _ in known if key == name}
        if not own:
            what, expected = "there is no group of this name", f"one of {sorted({each for each, _, _ in known})}"
            fix = "use the pattern that names the group in fz.freeze_when"
            raise KeyError(_Text(message(what, at=name, got=described(key), expected=expected, fix=fix)))
        for condition in (condition for each, _, condition in known if each in own):
            if not isinstance(condition, Switch):
                raise value_error(
                    "this group is frozen by a schedule",
                    at=name,
                    got=f"{value!r}, for a group with {condition}",
                    expected="a group that was given a bool in fz.freeze_when",
                    fix="in fz.freeze_when, give this group True or False instead of a condition",
                )
        switches = [node.groups[each].condition_state for node in states for each in own & {*node.groups}]
        if not _is_of_members(value, switches):
            refuse_no_bool(name, value, "fz.set_frozen", fix=f"fz.set_frozen(state, {{{key!r}: True}})")
        new |= dict.fromkeys(own, value)

    def visit(node: Any) -> Any:
        groups = dict(node.groups)
        for name in groups.keys() & new.keys():
            place = lambda old, value=new[name]: copy_like(jnp.broadcast_to(value, np.shape(old)), old)  # noqa: E731
            switch = jax.tree.map(place, groups[name].condition_state)
            groups[name] = groups[name]._replace(condition_state=switch)
        return node._replace(groups=groups)

    return map_states(visit, state, FreezeWhenState)


def currently_frozen(state: optax.OptState) -> dict[str, Any]:
    """Returns which groups are frozen in the next update.

    Args:
      state: from :func:`optax_freeze.freeze_when`, alone or inside another state.

    Returns:
      A bool for each group, by the pattern that names it, or by the path of its leaf if it is one of
      :func:`optax_freeze.each`; a traced bool inside a jitted function; an array with a bool for each member of a
      state that ``jax.vmap`` made.

    Raises:
      ValueError: if there is no such state, or one without values; if two states have a group of the same name and only
        one of these groups is frozen.

    Example:
      >>> import jax.numpy as jnp, optax, optax_freeze as fz
      >>> tx = fz.freeze_when(optax.sgd(0.5), fz.gradual_unfreeze(["head", "encoder"], every=10))
      >>> fz.currently_frozen(tx.init({"encoder": jnp.ones(2), "head": jnp.ones(2)}))
      {'head': False, 'encoder': True}
    """
    answers = {}
    for node in _states(state):
        for name, frozen in _frozen_groups(node).items():
            frozen = frozen if isinstance(frozen, Tracer) or np.shape(frozen) else bool(frozen)
            if not isinstance(frozen, Tracer) and not np.array_equal(answers.get(name, frozen), frozen):
                raise value_error(
                    "two groups have the same name, but only one is frozen",
                    at=name,
                    got="two states of fz.freeze_when",
                    expected="one state, or groups with different names",
                    fix="call fz.currently_frozen on each of the two states",
                )
            answers[name] = frozen
    return answers


def _frozen_groups(node: FreezeWhenState) -> dict[str, Any]:
    """Whether each group is frozen, of a state that may have axes of members."""
    of_groups = {name: group.condition_state for name, group in node.groups.items()}

    def frozen(step: Any, states: dict[str, Any]) -> dict[str, Any]:
        groups = {name: group._replace(condition_state=states[name]) for name, group in node.groups.items()}
        return frozen_groups(node._replace(step=step, groups=groups))

    [step] = jax.tree.leaves(node.step)
    if isinstance(step, jax.ShapeDtypeStruct):
        return frozen_groups(node)
    for _ in np.shape(step):
        frozen = jax.vmap(frozen)
    return frozen(node.step, of_groups)


def _is_of_members(value: Any, switches: Sequence[Any]) -> bool:
    """Whether a value has a bool for each member of a state with an axis of members."""
    if not is_array(value) or value.dtype != np.bool_ or not value.shape:
        return False
    return all(value.shape == np.shape(switch) for switch in jax.tree.leaves(switches))


class _Text(str):
    """A string that ``KeyError``, which shows the ``repr`` of its key, prints without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _states(tree: PyTree) -> list[FreezeWhenState]:
    found = states_in(tree, FreezeWhenState)
    if not found:
        raise value_error(
            "the state contains no state of fz.freeze_when",
            at="state",
            got=type(tree).__name__,
            expected="the state of an optimizer that contains fz.freeze_when",
            fix="create the optimizer by fz.freeze_when(inner, {pattern: condition}); for another spec, fz.migrate",
        )
    return found
