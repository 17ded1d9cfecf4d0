"""Freezing that changes while training: groups that freeze and thaw in one compiled program.

Each group of leaves has an optimizer state of its own. While a group is frozen, its optimizer does not run and its
state stands still bit for bit, so that nothing decays, no momentum moves it, and no bias correction or schedule of
learning rates goes on without it. ``optax.multi_transform`` decides by labels what is frozen: other labels are another
state and another program. Here a condition decides, a value of the running program.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from optax_freeze._errors import described, is_array, type_error, value_error
from optax_freeze._optimizer.accepted_plans import AcceptedPlans
from optax_freeze._optimizer.conditions import Condition, ask, check, refuse_no_bool
from optax_freeze._optimizer.groups import Group, GroupPlans, group_name, make_group_plans
from optax_freeze._optimizer.inner_update import negative_zero, parts_outside, variables_outside, without_frozen, zero
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.layout import copy_like, explicit_sharding, laid_out
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Tied, register_with_flax
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, Selection
from optax_freeze._spec.selector_algebra import as_selector
from optax_freeze._spec.selectors import as_choice
from optax_freeze._spec.tree import Leaf, PyTree


class GroupState(NamedTuple):
    """State of one group: whether it is frozen (if it has no schedule), its dense masks, its optimizer's state."""

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
    """Freezes and thaws groups of leaves while training, without compiling again.

    Each group has a state of ``inner`` of its own. While it is frozen, its updates are -0.0, its optimizer does not
    run, and its state stands still: a group that thaws first at step N steps as if its optimizer had been created at
    N, and one that thaws again goes on where it stopped. Leaves in no group always train. The backward pass is that of
    all groups: to save it, train in static phases with :func:`optax_freeze.freeze` and :func:`optax_freeze.migrate`.

    Args:
      inner: the optimizer of each group, or an ``optax.MultiSteps``. What it computes over a whole tree (a global
        norm), it computes over one group.
      groups: a mapping from patterns or selectors to conditions, or to pairs of an element mask
        (:func:`optax_freeze.rows`, :func:`optax_freeze.elements`) and a condition: the group is then those elements of
        its leaves. A condition is a function ``step -> bool`` (True: frozen; ``step`` is an int32 scalar that counts
        the updates of this transformation from 0), or a bool, which :func:`optax_freeze.set_frozen` changes between
        steps. What two groups name belongs to the first.
      coupled: a transformation that runs first, over all groups together, the frozen ones zeroed: a clip by the global
        norm.
      tied: ``"error"`` refuses, in ``init``, one array object at two paths that are not in the same group.

    Returns:
      A transformation. Its ``init`` raises ``ValueError`` if a group matches nothing or has nothing of its own. Its
      ``update`` takes and gives updates of the structure given to ``init``, which may have holes.

    Raises:
      TypeError, ValueError: if an argument is none of these; in ``init``, if a condition returns no bool, or several.

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
    inner = _as_transformation(inner, "inner", groups)
    coupled = None if coupled is None else _as_transformation(coupled, "coupled")
    named = _parse(groups)
    accepted = _accepted_plans(named)

    def init_fn(params: PyTree) -> PyTree:
        register_with_flax(GroupPlans)
        for group in named:
            if group.condition is not None:
                check(group.name, group.condition)
        plans = make_group_plans(named, params, tied)
        values, treedef = _tree.flatten(params)
        own = [
            _copies(plan.masks, values) if group.has_array else []
            for group, plan in zip(named, plans.plans, strict=False)
        ]
        plans = plans.with_masks(own)
        *states, rest_state = [
            _init(inner, jax.tree.unflatten(treedef, plan.take(values)), plan) for plan in plans.plans
        ]
        coupled_state = (
            ()
            if coupled is None
            else _init(coupled, jax.tree.unflatten(treedef, plans.whole.take(values)), plans.whole)
        )
        of_groups = {
            group.name: GroupState(
                jnp.array(group.frozen) if group.condition is None else (),
                jax.tree.unflatten(treedef, masks) if group.has_array else (),
                state,
            )
            for group, masks, state in zip(named, own, states, strict=True)
        }
        spec = accepted.add(plans.without_masks())
        return FreezeWhenState(jnp.zeros([], jnp.int32), spec, of_groups, rest_state, coupled_state)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        state = _with_plans(state, updates if params is None else params, named, accepted)
        plans = plans_of(state)
        values, treedef = plans.whole.align(updates, "updates", _ALL_GRADIENTS)
        olds, params_treedef = [None] * len(values), None
        if params is not None:
            olds, params_treedef = plans.whole.align(params, "params")
        call = _Call(treedef, params, olds, params_treedef, extra_args)
        frozen = [
            state.groups[group.name].frozen if group.condition is None else ask(group.name, group.condition, state.step)
            for group in named
        ]
        grads, coupled_state = values, state.coupled_state
        if coupled is not None:
            zeroed = _zeroed(values, plans, frozen)
            grads, coupled_state = call.update(coupled, plans.whole, coupled_state, zeroed)
        states = [*(state.groups[group.name].inner_state for group in named), state.rest_state]
        calls = zip(plans.plans, states, [*frozen, False], strict=True)
        parts, states = zip(*(call.update(inner, plan, each, grads, now) for plan, each, now in calls), strict=True)
        new = []
        for i, (leaf, selection) in enumerate(zip(plans.leaves, plans.whole.selections, strict=True)):
            if selection is FROZEN:
                new.append(zero(leaf, values[i], olds[i]))
            else:
                new.append(plans.merge(i, [part[i] for part in parts], values[i] if olds[i] is None else olds[i]))
        *states, rest_state = states
        of_groups = {
            group.name: state.groups[group.name]._replace(inner_state=inner_state)
            for group, inner_state in zip(named, states, strict=True)
        }
        step = jnp.asarray(optax.safe_increment(state.step))
        return jax.tree.unflatten(treedef, new), FreezeWhenState(step, state.spec, of_groups, rest_state, coupled_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Call(NamedTuple):
    """The arguments of one update: the treedef of the updates, the parameters as given and flattened, the rest."""

    treedef: Any
    params: PyTree | None
    olds: Sequence[Any]
    params_treedef: Any
    extra_args: dict[str, Any]

    def update(
        self,
        tx: optax.GradientTransformationExtraArgs,
        plan: Plan,
        state: Any,
        values: Sequence[Any],
        frozen: Any = False,
    ) -> tuple[list[Any], Any]:
        """One update of ``tx`` with the trainable part of a plan, unless it is frozen; flat updates and the state."""
        if all(selection is FROZEN for selection in plan.selections):
            return [_tree.HOLE] * len(values), state
        updates = jax.tree.unflatten(self.treedef, plan.take(values))
        params = None if self.params is None else jax.tree.unflatten(self.params_treedef, plan.take(self.olds))
        extra_args = without_frozen(self.extra_args, plan, self.treedef, self.params)
        updates, state = _unless(frozen, tx.update, updates, variables_outside(state, plan), params, extra_args)
        return _tree.flatten(updates)[0], parts_outside(state, plan)


def plans_of(state: FreezeWhenState) -> GroupPlans:
    """The plans of a state, with its dense masks."""
    return state.spec.with_masks([_tree.flatten(state.groups[name].masks)[0] for name in state.spec.names])


def _copies(masks: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    return [copy_like(mask, value) if is_array(mask) else mask for mask, value in zip(masks, values, strict=True)]


_ALL_GRADIENTS = "give the gradient of every group, as a group may thaw: jax.grad(loss), or fz.grad(loss, False)"


def _init(inner: optax.GradientTransformation, trainable: PyTree, plan: Plan) -> optax.OptState:
    try:
        return parts_outside(inner.init(trainable), plan)
    except IndexError:  # Optax's line searches look at the first leaf
        if jax.tree.leaves(trainable):
            raise
        return ()


def _unless(
    frozen: Any, update: Callable[..., Any], updates: PyTree, state: PyTree, params: PyTree, extra_args: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    """``update``, or where ``frozen`` updates that change nothing and the state as it is.

    A loop of no or one round, and no ``lax.cond``: XLA updates the state of a loop in place, but copies what a branch
    passes on, into the conditional and out of it, even where it is donated (five times the time of Adam on a CPU).
    """
    if not isinstance(frozen, Tracer):
        if not frozen:
            return update(updates, state, params, **extra_args)
        leaves, treedef = jax.tree.flatten(updates)
        of = zip(leaves, leaves if params is None else jax.tree.leaves(params), strict=True)
        return jax.tree.unflatten(treedef, [zero(Leaf("", p.shape, p.dtype), u, p) for u, p in of]), state
    # Traced once, though called for its shapes and in the loop.
    train = jax.jit(lambda updates, state, params: update(updates, state, params, **extra_args))
    new, new_state = jax.eval_shape(train, updates, state, params)
    shapes, treedef = jax.tree.flatten(new)
    # Moments of bfloat16 parameters become float32 in the first update, if the gradients are.
    state = jax.tree.map(lambda old, new: old if old.dtype == new.dtype else old.astype(new.dtype), state, new_state)
    # What a loop starts from is written to: one buffer for each, as long as no two are equal.
    still = [
        _filled(u, jnp.where(frozen, negative_zero(shape.dtype), jnp.asarray(i, shape.dtype)), shape)
        for i, (u, shape) in enumerate(zip(jax.tree.leaves(updates), shapes, strict=True))
    ]

    def step(carry: Any) -> Any:
        return (True, *train(updates, carry[2], params))

    _, new, state = jax.lax.while_loop(
        lambda carry: ~carry[0], step, (frozen, jax.tree.unflatten(treedef, still), state)
    )
    return new, state


def _filled(like: Any, value: Any, shape: Any) -> jax.Array:
    """An array sharded as another one of its shape; the gradients of examples have an axis more than updates."""

    def filled(like: Any, value: Any) -> jax.Array:
        return jnp.full_like(like, value, shape.dtype, None if like.shape == shape.shape else shape.shape)

    return laid_out(explicit_sharding(like, shape.shape), filled, like, value)


def _zeroed(values: Sequence[Any], plans: GroupPlans, frozen: Sequence[Any]) -> list[Any]:
    """The gradients with zeros at the groups that are frozen now."""
    new = list(values)
    for is_frozen, plan in zip(frozen, plans.plans, strict=False):
        for i, selection in enumerate(plan.selections):
            if selection is not FROZEN:
                zeros = jax.tree.map(lambda x, f=is_frozen: jnp.where(f, jnp.zeros((), x.dtype), x), new[i])
                new[i] = selection.choose(new[i], zeros)
    return new


def _parse(groups: Any) -> list[Group]:
    if not isinstance(groups, Mapping):
        raise type_error(
            "fz.freeze_when takes a mapping",
            at="its second argument",
            got=described(groups),
            expected="{pattern: condition}, {pattern: bool} or {pattern: (element mask, condition)}",
            fix="for what stays frozen all along, use fz.freeze(inner, frozen)",
        )
    parsed: dict[str, Group] = {}
    for key, value in groups.items():
        name, mask, condition = group_name(key), None, value
        if isinstance(value, tuple) and len(value) == 2:
            mask, condition = as_choice(value[0], name), value[1]
        if name in parsed or isinstance(mask, bool):
            raise value_error(
                "a bool where an element mask belongs" if isinstance(mask, bool) else "two groups of one name",
                at=name,
                got=repr(value) if isinstance(mask, bool) else f"{key!r}, and an equal one before",
                expected="(element mask, condition), and each group once",
                fix="for whole leaves give the condition alone: {pattern: condition}",
            )
        selector = as_selector(key, "fz.freeze_when")
        if callable(condition):
            parsed[name] = Group(name, selector, mask, condition, None)
        else:
            refuse_no_bool(name, condition, "fz.freeze_when", "a function step -> bool, or ")
            parsed[name] = Group(name, selector, mask, None, condition)
    return list(parsed.values())


def _as_transformation(tx: Any, name: str, groups: Any = None) -> optax.GradientTransformationExtraArgs:
    if isinstance(tx, optax.MultiSteps):
        update_fn: Any = tx.update
        return optax.GradientTransformationExtraArgs(tx.init, update_fn)
    if isinstance(tx, optax.GradientTransformation):
        return optax.with_extra_args_support(tx)
    fix = "call the factory: optax.adam(1e-3), not optax.adam" if callable(tx) else "pass an Optax optimizer"
    if isinstance(groups, (optax.GradientTransformation, optax.MultiSteps)):
        fix = "swap the two arguments"
    raise type_error(
        f"`{name}` is no optimizer",
        at="fz.freeze_when",
        got=described(tx),
        expected="fz.freeze_when(optimizer, {pattern: condition})",
        fix=fix,
    )


def _with_plans(
    state: Any, tree: PyTree, groups: Sequence[Group], accepted: AcceptedPlans[GroupPlans]
) -> FreezeWhenState:
    """The state with its plans, made again after ``optax.tree_map_params``, which drops static data."""
    names = tuple(group.name for group in groups)
    if not isinstance(state, FreezeWhenState) or state.spec.names != names:
        raise type_error(
            "the state of another transformation",
            at="the second argument of update",
            got=f"groups {list(state.spec.names)}" if isinstance(state, FreezeWhenState) else type(state).__name__,
            expected=f"FreezeWhenState of the groups {list(names)}",
            fix="state = tx.init(params), or fz.migrate(state, tx, params) for other groups than before",
        )
    for group, condition in zip(groups, state.spec.conditions, strict=True):
        _refuse_other_condition(group, condition)
    return state._replace(spec=accepted.accept(state.spec, tree))


def _accepted_plans(groups: Sequence[Group]) -> AcceptedPlans[GroupPlans]:
    def make(tree: PyTree) -> GroupPlans:
        return make_group_plans(groups, tree, "ignore").without_masks()

    def refuse_other(plans: GroupPlans, tree: PyTree) -> None:
        with jax.ensure_compile_time_eval():  # of two compact masks at one leaf: their union has a static count
            own = make(plans.whole.parameters(tree))
        for name, its, mine in zip(plans.names, plans.plans, own.plans, strict=False):
            for leaf, in_state, here in zip(plans.leaves, its.selections, mine.selections, strict=True):
                if in_state != here:
                    raise value_error(
                        "the state of other groups",
                        at=leaf.path,
                        got=f"a state in which the group {name!r} has {_owned(in_state)}",
                        expected=f"the state of this transformation, in which it has {_owned(here)}",
                        fix="state = fz.migrate(state, tx, params), whenever the groups change",
                    )

    return AcceptedPlans(make, refuse_other)


def _owned(selection: Selection) -> str:
    """How much of a leaf trains, in the words of an error."""
    if isinstance(selection, DenseMask):
        return "some of its elements"
    return {FROZEN: "nothing of it", TRAINABLE: "all of it"}.get(selection) or f"{~selection.as_spec()!r} of it"


def _refuse_other_condition(group: Group, condition: Condition | None) -> None:
    """A ``ValueError`` for a switch where a condition is, and for another condition, as far as they can be compared."""
    mine = group.condition
    comparable = dataclasses.is_dataclass(mine) and dataclasses.is_dataclass(condition)
    if (mine is None) != (condition is None) or (comparable and mine != condition):
        raise value_error(
            "the state of another schedule",
            at=group.name,
            got=f"a state in which {condition!r} decides" if condition else "a state in which fz.set_frozen decides",
            expected=repr(mine) if mine else "a switch for fz.set_frozen",
            fix="state = fz.migrate(state, tx, params), which keeps the step and the moments",
        )
