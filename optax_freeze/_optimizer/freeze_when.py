"""Freezing that changes while training: groups that freeze and thaw in one compiled program.

Each group of leaves has an optimizer state of its own. While a group is frozen, its optimizer does not run and its
state stands still bit for bit, so that nothing decays, no momentum moves it, and no bias correction or schedule of
learning rates goes on without it. ``optax.multi_transform`` decides by labels what is frozen: other labels are another
state and another program. Here a condition decides, a value of the running program.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_freeze._errors import described, type_error, value_error
from optax_freeze._gradient.group_gradients import GradientOfGroups, zeroed
from optax_freeze._optimizer.accepted_plans import AcceptedPlans
from optax_freeze._optimizer.as_transformation import as_transformation
from optax_freeze._optimizer.conditions import Condition, ask, check
from optax_freeze._optimizer.convergence import global_norm, in_order, initial_stats, next_stats, stats_of
from optax_freeze._optimizer.given_groups import Group, parse_groups
from optax_freeze._optimizer.groups import GroupPlans, make_group_plans
from optax_freeze._optimizer.init_with import changed
from optax_freeze._optimizer.inner_update import parts_outside
from optax_freeze._optimizer.update_call import UpdateCall
from optax_freeze._optimizer.update_params import with_update_params
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.masks import choice_of
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Tied, register_with_flax
from optax_freeze._spec.selection import FROZEN, DenseMask, Selection
from optax_freeze._spec.tree import PyTree


class GroupState(NamedTuple):
    """State of one group: its switch, or the statistics that its condition takes; its dense masks; its optimizer's."""

    frozen: Any
    masks: PyTree
    inner_state: optax.OptState


class FreezeWhenState(NamedTuple):
    """State of :func:`freeze_when`: the updates so far, the groups and their states by name, and those of the rest."""

    step: jax.Array
    spec: GroupPlans
    groups: dict[str, GroupState]
    rest_state: optax.OptState
    coupled_state: optax.OptState


def freeze_when(
    inner: optax.GradientTransformation | optax.MultiSteps,
    groups: Mapping[Any, Any],
    coupled: optax.GradientTransformation | None = None,
    *,
    tied: Tied = "error",
) -> optax.GradientTransformationExtraArgs:
    """Freezes and unfreezes groups of leaves during training, without recompiling.

    Each group has its own state of ``inner``. While a group is frozen, its updates are -0.0, its optimizer does not
    run, and its state does not change. A group that is first unfrozen at step N is updated as if its optimizer had been
    created at N, and one that is unfrozen again continues where it stopped. Leaves that are in no group always train.
    Compute gradients with ``fz.value_and_grad(loss, fz.spec_of(state))``, which does not differentiate groups that are
    frozen now.

    Args:
      inner: the optimizer of each group, or an ``optax.MultiSteps``. Anything that it computes over a whole tree, such
        as a global norm, covers one group. Its learning rate schedule counts the updates of the group; for one
        schedule of all groups, use ``optax.scale_by_schedule`` after ``freeze_when`` in an ``optax.chain``.
      groups: a mapping from patterns or selectors to conditions, or to pairs of an element mask
        (:func:`optax_freeze.rows`, :func:`optax_freeze.elements`) and a condition: the group is then those elements of
        its leaves. A condition is a function ``step -> bool`` (True: frozen; ``step`` is an int32 scalar that counts
        the calls of ``update`` from 0, so batches if ``inner`` is an ``optax.MultiSteps``), or
        ``(step, stats) -> bool`` with the :class:`optax_freeze.GroupStats` of the group's gradients, or a bool, which
        :func:`optax_freeze.set_frozen` changes between steps. The key :func:`optax_freeze.each` makes each leaf a group
        of its own. Elements that two groups select belong to the first.
      coupled: a transformation that runs first, over all groups, with zeros for frozen ones, such as a clip by global
        norm.
      tied: ``"error"`` raises an error in ``init`` if the same array object is at two paths in different groups.

    Returns:
      A transformation. Its ``init`` raises ``ValueError`` if a group matches nothing or has no elements of its own. Its
      ``update`` takes and returns updates with the structure of the parameters given to ``init``.

    Raises:
      TypeError, ValueError: if an argument is none of these; in ``init``, if a condition does not return one bool.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> tx = fz.freeze_when(optax.sgd(0.5), {"encoder": fz.unfreeze_at(2)})
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     print(fz.currently_frozen(state), params["encoder"])
      ...     updates, state = tx.update(params, state, params)
      ...     params = optax.apply_updates(params, updates)
      {'encoder': True} [1. 1.]
      {'encoder': True} [1. 1.]
      {'encoder': False} [1. 1.]
      >>> params["encoder"]
      Array([0.5, 0.5], dtype=float32)
    """
    call = "fz.freeze_when(optimizer, {pattern: condition})"
    inner = as_transformation(inner, call, name="inner", other=groups)
    coupled = None if coupled is None else as_transformation(coupled, call, name="coupled")
    given = parse_groups(groups)
    accepted = _accepted_plans(given)

    def init_fn(params: PyTree) -> PyTree:
        register_with_flax(GroupPlans)
        for group in given:
            if group.condition is not None:
                check(group.name, group.condition)
        plans = changed(make_group_plans(given, params, tied, accepted.latest))
        values, treedef = _tree.flatten(params)
        by_key = {group.name: group for group in given}
        named = [by_key[key] for key in plans.keys]
        own = [
            plan.copied_masks(values) if group.has_array else []
            for group, plan in zip(named, plans.plans, strict=False)
        ]
        plans = plans.with_masks(own)
        *states, rest_state = [_init(inner, plan, treedef, values) for plan in plans.plans]
        coupled_state = () if coupled is None else _init(coupled, plans.whole, treedef, values)
        of_groups = {
            name: GroupState(
                jnp.array(group.frozen) if group.condition is None else initial_stats(group.condition),
                jax.tree.unflatten(treedef, masks) if group.has_array else (),
                state,
            )
            for name, group, masks, state in zip(plans.names, named, own, states, strict=True)
        }
        spec = accepted.add(plans.without_masks())
        return FreezeWhenState(jnp.zeros([], jnp.int32), spec, of_groups, rest_state, coupled_state)

    def update(
        of_groups: Any, updates: Any, state: PyTree, params: PyTree | None, extra_args: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        state = _with_plans(state, updates if params is None else params, given, accepted)
        plans = plans_of(state)
        olds, params_treedef, missing = [None] * len(plans.leaves), None, frozenset()
        if params is not None:
            olds, params_treedef = plans.whole.align(params, "params")
        frozen = list(frozen_groups(state).values())
        if isinstance(updates, GradientOfGroups) and coupled is not None:
            updates = updates.tree()
        if isinstance(updates, GradientOfGroups):
            values, treedef, of_group, after = olds, params_treedef, updates.of_group, updates.frozen
        else:
            values, treedef, missing = plans.whole.align_gradients(updates, params, _ALL_GRADIENTS)
            of_group, after = None, [*frozen, False]
        call = UpdateCall(treedef, values, params, olds, params_treedef, extra_args, missing)
        group_states = [state.groups[name] for name in plans.names]  # jit sorts the keys of a dict
        grads, coupled_state = values, state.coupled_state
        if coupled is not None:
            grads = zeroed(values, frozen, [plan.selections for plan in plans.plans])
            grads, coupled_state = call.run(coupled, plans.whole, coupled_state, grads, False)

        def gradient(n: int) -> tuple[Sequence[Any], jax.Array]:
            own = values if of_group is None else of_group(n)
            has_stats = n < len(plans.names) and stats_of(plans.conditions[n]) is not None
            norm = global_norm(plans.plans[n].trainable(treedef, own)) if has_stats else jnp.zeros([], jnp.float32)
            return grads if of_group is None else own, norm

        states = [*(group.inner_state for group in group_states), state.rest_state]
        new, [*states, rest_state], norms = of_groups(call, inner, plans, states, gradient, after)
        stats = next_stats(plans.conditions, [group.frozen for group in group_states], frozen, state.step, norms)
        by_name = {
            name: group_state._replace(frozen=its, inner_state=inner_state)
            for name, group_state, its, inner_state in zip(plans.names, group_states, stats, states, strict=True)
        }
        step = jnp.asarray(optax.safe_increment(state.step))
        return new, FreezeWhenState(step, state.spec, by_name, rest_state, coupled_state)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        return update(UpdateCall.updates, updates, state, params, extra_args)

    def update_params_fn(
        grads: PyTree | GradientOfGroups, state: PyTree, params: PyTree, extra_args: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        return update(UpdateCall.new_params, grads, state, params, extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, with_update_params(update_fn, update_params_fn))


def frozen_groups(state: FreezeWhenState) -> dict[str, Any]:
    """Whether each group is frozen in the next update, by its name."""
    [step] = jax.tree.leaves(state.step)
    names, conditions = state.spec.names, state.spec.conditions
    frozen = [
        jax.tree.leaves(state.groups[name].frozen)[0]
        if condition is None
        else ask(name, condition, jnp.maximum(step, 0), state.groups[name].frozen)
        for name, condition in zip(names, conditions, strict=True)
    ]
    return dict(zip(names, in_order(conditions, frozen), strict=True))


def plans_of(state: FreezeWhenState) -> GroupPlans:
    """The plans of a state, with its dense masks."""
    return state.spec.with_masks([_tree.flatten(state.groups[name].masks)[0] for name in state.spec.names])


_ALL_GRADIENTS = "give the gradient of every group, as a group may thaw: fz.grad(loss, fz.spec_of(state))"


def _init(tx: optax.GradientTransformation, plan: Plan, treedef: Any, values: Sequence[Any]) -> optax.OptState:
    trainable = plan.trainable(treedef, values)
    try:
        return parts_outside(tx.init(trainable), plan)
    except IndexError:  # Optax's line searches look at the first leaf
        if jax.tree.leaves(trainable):
            raise
        return ()


def _with_plans(
    state: Any, tree: PyTree, groups: Sequence[Group], accepted: AcceptedPlans[GroupPlans]
) -> FreezeWhenState:
    """The state with its plans, made again after ``optax.tree_map_params``, which drops static data."""
    if not isinstance(state, FreezeWhenState):
        raise _other_groups(type(state).__name__, [group.name for group in groups])
    spec = accepted.accept(state.spec, tree)
    if spec.names != state.spec.names:
        raise _other_groups(f"groups {list(state.spec.names)}", spec.names)
    return state._replace(spec=spec)


def _accepted_plans(groups: Sequence[Group]) -> AcceptedPlans[GroupPlans]:
    def make(tree: PyTree) -> GroupPlans:
        return make_group_plans(groups, tree, "ignore", accepted.latest).without_masks()

    def refuse_other(plans: GroupPlans, tree: PyTree) -> None:
        names = [group.name for group in groups if group.name in plans.keys or not group.each]
        if list(dict.fromkeys(plans.keys)) != names:
            raise _other_groups(f"groups {list(dict.fromkeys(plans.keys))}", names)
        own = make(plans.whole.parameters(tree))
        if plans.names != own.names:
            raise _other_groups(f"groups {list(plans.names)}", own.names)
        for name, its, mine in zip(plans.names, plans.conditions, own.conditions, strict=True):
            _refuse_other_condition(name, its, mine)
        for name, its, mine in zip(plans.names, plans.plans, own.plans, strict=False):
            for leaf, in_state, here in zip(plans.leaves, its.selections, mine.selections, strict=True):
                if in_state != here:
                    raise value_error(
                        "the state was created with different groups",
                        at=leaf.path,
                        got=f"the group {name!r} trains {_owned(in_state)} in the state",
                        expected=f"{_owned(here)}, as in this transformation",
                        fix="convert the state: state = fz.migrate(state, tx, params)",
                    )

    accepted = AcceptedPlans(make, refuse_other)
    return accepted


def _other_groups(got: str, names: Sequence[str]) -> TypeError:
    return type_error(
        "the state was created by a different transformation",
        at="the second argument of update",
        got=got,
        expected=f"a FreezeWhenState with the groups {list(names)}",
        fix="state = tx.init(params); or, if the groups have changed, state = fz.migrate(state, tx, params)",
    )


def _owned(selection: Selection) -> str:
    """How much of a leaf trains, for an error."""
    if isinstance(selection, DenseMask):
        return "some elements of the leaf"
    if not selection.in_part:
        return "nothing" if selection is FROZEN else "the whole leaf"
    return f"{~choice_of(selection)!r} of the leaf"


def _refuse_other_condition(name: str, condition: Condition | None, mine: Condition | None) -> None:
    """A ``ValueError`` for a switch where a condition is, and for another condition, as far as they can be compared."""
    comparable = dataclasses.is_dataclass(mine) and dataclasses.is_dataclass(condition)
    alike = (mine is None) == (condition is None) and stats_of(mine) == stats_of(condition)
    if not alike or (comparable and mine != condition):
        raise value_error(
            "the state was created with a different schedule",
            at=name,
            got=f"a group with the condition {described(condition)}"
            if condition
            else "a group controlled by fz.set_frozen",
            expected=f"the condition {described(mine)}" if mine else "a group controlled by fz.set_frozen",
            fix="convert the state: state = fz.migrate(state, tx, params), which keeps the step and the moments",
        )
