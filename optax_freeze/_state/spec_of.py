"""Reads the spec from an optimizer state, including masks that were replaced between steps."""

from typing import Any

import jax
import numpy as np
import optax

from optax_freeze._errors import is_concrete, value_error
from optax_freeze._gradient.group_gradients import GroupSpec
from optax_freeze._optimizer.freeze import FreezeState
from optax_freeze._optimizer.freeze_when import FreezeWhenState, frozen_groups
from optax_freeze._spec.selector_algebra import Selector


def spec_of(state: optax.OptState) -> Selector:
    """Returns the spec in an optimizer state, with the current masks.

    In a step without :func:`optax_freeze.train_step`, pass it to :func:`optax_freeze.value_and_grad` and
    :func:`optax_freeze.apply_updates`. The masks are then arguments of the compiled program, whereas a mask in a
    closure would be a constant. The spec of a :func:`optax_freeze.freeze_when` state says which groups are frozen now.
    Inside a jitted step this is a traced value, which only :func:`optax_freeze.value_and_grad` and
    :func:`optax_freeze.grad` accept.

    Args:
      state: from :func:`optax_freeze.freeze`, :func:`optax_freeze.masked_zero_updates` or
        :func:`optax_freeze.freeze_when`, alone or inside another state.

    Returns:
      A selector, for trees with the same leaves as the parameters given to ``init``.

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
    states, scheduled = _states(state, FreezeState), _states(state, FreezeWhenState)
    if not states and len(scheduled) == 1:
        plans = scheduled[0].current_plan
        own = tuple(plan.selections for plan in plans.plans)
        return GroupSpec(plans.names, plans.leaves, own, tuple(frozen_groups(scheduled[0]).values()))
    if not states or any(_differ(states[0], other) for other in states[1:]):
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


def _states(state: optax.OptState, kind: type) -> list[Any]:
    """The states of a kind that are in no other one; a builtin looks for them, since many groups have many nodes."""
    found = jax.tree.leaves(state, is_leaf=kind.__instancecheck__)
    return [x for x in found if isinstance(x, kind)]


def _differ(a: Any, b: Any) -> bool:
    """Whether two states have different specs, or different masks as far as these have values."""
    pairs = zip(a.current_plan.masks, b.current_plan.masks, strict=False)
    return a.plan != b.plan or any(is_concrete(x) and is_concrete(y) and not np.array_equal(x, y) for x, y in pairs)
