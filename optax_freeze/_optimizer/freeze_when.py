"""Freezing that changes during training: groups freeze and unfreeze in one compiled program.

``optax.multi_transform`` decides by labels what is frozen: other labels are another state and another program. Here a
condition decides, from the step and values of the program. Each group has an optimizer state of its own, which does not
change while the group is frozen.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._errors import described, value_error
from optax_freeze._optimizer.accepted_plans import AcceptedPlans, other_transformation, refuse_other_selections
from optax_freeze._optimizer.call_init import changed, saying_what_optax_calls, with_own_buffers
from optax_freeze._optimizer.conditions import decide, global_norm
from optax_freeze._optimizer.coupled_update import update_coupled
from optax_freeze._optimizer.full_updates import merged
from optax_freeze._optimizer.group_plans import GroupPlans, make_group_plans, register_groups_with_flax
from optax_freeze._optimizer.group_state import GroupState, without_others
from optax_freeze._optimizer.group_update import GroupUpdate
from optax_freeze._optimizer.inner_update import InnerUpdate, init_inner
from optax_freeze._optimizer.nnx_variables import stored
from optax_freeze._optimizer.outer_transformation import around, as_parts
from optax_freeze._optimizer.parse_groups import GivenGroup, parse_groups
from optax_freeze._optimizer.transformation import Update, as_transformation
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.masks import DynamicRows, Elements
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Tied, warn_of_leaves
from optax_freeze._spec.tree import PyTree


class GradientOfGroups(Protocol):
    """A gradient that is computed in the update: that of a group where the group is updated, or all at once."""

    frozen: list[Any]  # whether each group and the rest is frozen, known after parameters of it have been read

    def of_group(self, n: int) -> dict[int, Any]: ...
    def tree(self) -> PyTree: ...


class FreezeWhenState(NamedTuple):
    """State of :func:`freeze_when`: the number of updates, the groups with their states, and that of other leaves."""

    step: jax.Array
    plan: GroupPlans
    groups: dict[str, GroupState]
    ungrouped_state: optax.OptState
    coupled_state: optax.OptState

    @property
    def current_plan(self) -> GroupPlans:
        return self.plan.with_masks([_tree.flatten(self.groups[name].masks)[0] for name in self.plan.names])

    @property
    def spec(self) -> "FreezeWhenState":
        return self._replace(groups={}, ungrouped_state=(), coupled_state=())

    def differs(self, other: Any) -> bool:
        """Whether another state has other groups or conditions."""
        return not isinstance(other, FreezeWhenState) or self.plan != other.plan


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
    Train with :func:`optax_freeze.train_step`, which does not differentiate groups that are frozen now.

    Args:
      inner: the optimizer of each group, or an ``optax.MultiSteps``. Anything that it computes over a whole tree, such
        as a global norm, covers one group. Its learning rate schedule counts the updates of the group; for one
        schedule of all groups, use ``optax.scale_by_schedule`` after ``freeze_when`` in an ``optax.chain``.
      groups: a mapping from patterns or selectors to conditions, or to pairs of an element mask
        (:func:`optax_freeze.rows`, :func:`optax_freeze.elements`) and a condition: the group is then those elements of
        its leaves. A condition is a function ``step -> bool`` (True: frozen; ``step`` is an int32 scalar that counts
        the calls of ``update`` from 0, so batches if ``inner`` is an ``optax.MultiSteps``), or
        ``(step, stats) -> bool`` with the :class:`optax_freeze.typing.GroupStats` of the group's gradients, or a bool,
        which :func:`optax_freeze.set_frozen` changes between steps. The key :func:`optax_freeze.each` makes each leaf a
        group of its own. Elements that two groups select belong to the first.
      coupled: a transformation that runs first, over all leaves, with zeros for frozen groups, such as a clip by
        global norm.
      tied: ``"error"`` raises an error in ``init`` if the same array object is at two paths in different groups, and
        emits a :class:`FreezeWarning` if it is at two paths in one group; ``"ignore"`` allows it.

    Returns:
      A transformation. Its ``init`` raises ``ValueError`` if a group matches nothing, has no elements of its own, or is
      frozen by :func:`optax_freeze.freeze` around it. Its ``update`` takes and returns updates with the structure of
      the parameters given to ``init``.

    Raises:
      TypeError, ValueError: if an argument is not as described; in ``init``, if a condition does not return one bool.

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
    by_key = {group.name: group for group in given}
    accepted = AcceptedPlans(FreezeWhenState, lambda plans, tree: _refuse_other_groups(plans, given, tree))

    def init_fn(params: PyTree) -> PyTree:
        register_groups_with_flax()
        for group in given:
            group.condition.check()
        params = as_parts(params, around())
        plans = changed(make_group_plans(given, params, tied, accepted.latest))
        values, treedef = _tree.flatten(params)
        warn_of_leaves(values, plans.everything, plans.plans[-1], tied, stacklevel=2)
        has_array = [isinstance(by_key[key].mask, (Elements, DynamicRows)) for key in plans.keys]
        own = [plan.copied_masks(values) if has else [] for has, plan in zip(has_array, plans.plans, strict=False)]
        plans = plans.with_masks(own)
        *of_groups, rest = plans.plans
        groups = {}
        for name, condition, has, plan, masks in zip(
            plans.names, plans.conditions, has_array, of_groups, own, strict=True
        ):
            inner_state = _init(inner, plan, params, store=without_others)
            groups[name] = GroupState(condition.initial(), stored(plan, treedef, masks) if has else (), inner_state)
        coupled_state = () if coupled is None else _init(coupled, plans.everything, params)
        static, step = accepted.add(plans.without_masks()), jnp.zeros([], jnp.int32)
        state = FreezeWhenState(step, static, groups, _init(inner, rest, params), coupled_state)
        return with_own_buffers(state, params)

    def of_groups(
        gradient_of: GradientOfGroups, state: PyTree, params: PyTree, extra_args: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        if coupled is None:
            return update(None, state, params, extra_args, in_place=True, gradient_of=gradient_of)
        grads = gradient_of.tree()
        given = {**extra_args, "grad": grads} if "grad" in extra_args else extra_args
        return update(grads, state, params, given, in_place=True)

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None,
        extra_args: dict[str, Any],
        *,
        in_place: bool,
        gradient_of: GradientOfGroups | None = None,
    ) -> tuple[PyTree, PyTree]:
        state = accepted.state(state, updates if params is None else params)
        plans: GroupPlans = state.current_plan
        if gradient_of is None:
            call = InnerUpdate.aligned(plans.everything, updates, params, extra_args, _ALL_GRADIENTS)
        else:
            call = InnerUpdate.computing_grads(plans.everything, params, extra_args)
        frozen = list(frozen_groups(state).values())
        grads, coupled_state = call.grads, state.coupled_state
        if coupled is not None:
            grads, coupled_state = update_coupled(coupled, call, plans, frozen, coupled_state)

        def gradient(n: int) -> tuple[Sequence[Any], jax.Array]:
            # Conditions see the norm before `coupled`, which may clip it. It costs a pass, so only if it is read.
            own = call.grads if gradient_of is None else plans.everything.full(gradient_of.of_group(n))
            is_read = n < len(plans.names) and plans.conditions[n].takes_norm
            norm = global_norm(plans.plans[n].trainable(call.treedef, own)) if is_read else jnp.zeros([], jnp.float32)
            return grads if gradient_of is None else own, norm

        now = [*frozen, False] if gradient_of is None else gradient_of.frozen
        now = [plan.all_frozen or is_frozen for plan, is_frozen in zip(plans.plans, now, strict=True)]
        olds = [state.groups[name] for name in plans.names]
        states = [*(group.inner_state for group in olds), state.ungrouped_state]
        run = GroupUpdate(call, inner, plans.plans, states, gradient, now)
        new, [*states, ungrouped_state], norms = run.new_params() if in_place else run.updates()
        new = new if in_place else merged(call, plans.everything, plans.plans, new, True)
        of_conditions = [group.condition_state for group in olds]
        of_conditions = decide(plans.conditions, "next", state.step, of_conditions, frozen, norms[:-1])
        groups = {
            name: old._replace(condition_state=its, inner_state=inner_state)
            for name, old, its, inner_state in zip(plans.names, olds, of_conditions, states, strict=True)
        }
        step = jnp.asarray(optax.safe_increment(state.step))
        return new, FreezeWhenState(step, state.plan, groups, ungrouped_state, coupled_state)

    return optax.GradientTransformationExtraArgs(init_fn, Update(update, of_groups))


def frozen_groups(state: FreezeWhenState) -> dict[str, Any]:
    """Whether each group is frozen in the next update, by its name."""
    [step] = jax.tree.leaves(state.step)
    if isinstance(step, jax.ShapeDtypeStruct) or np.shape(step) != ():
        raise value_error(
            "the state does not say which groups are frozen",
            at="step",
            got=described(step),
            expected="the state of one optimizer, with values",
            fix="pass a state with values; after vmap, select one state: jax.tree.map(lambda x: x[0], state)",
        )
    names = state.plan.names
    states = [state.groups[name].condition_state for name in names]
    return dict(zip(names, decide(state.plan.conditions, "frozen", jnp.maximum(step, 0), states), strict=True))


_ALL_GRADIENTS = "give the gradient of every group, as a group may thaw: fz.grad(loss, fz.spec_of(state))"


def _init(tx: optax.GradientTransformation, plan: Plan, params: PyTree, **options: Any) -> optax.OptState:
    try:
        with saying_what_optax_calls():
            return init_inner(tx, plan, params, **options)
    except IndexError:  # Optax's line searches look at the first leaf
        if not plan.all_frozen:
            raise
        return ()


def _refuse_other_groups(plans: GroupPlans, groups: Sequence[GivenGroup], tree: PyTree) -> None:
    keys = list(dict.fromkeys(plans.keys))
    expected = [group.name for group in groups if group.name in keys or not group.each]
    if keys != expected:
        raise other_transformation(f"groups {keys}", f"groups {expected}")
    own = make_group_plans(groups, plans.everything.parameters(tree), "ignore", plans)
    if plans.names != own.names:
        raise other_transformation(f"groups {list(plans.names)}", f"groups {list(own.names)}")
    for name, its, mine in zip(plans.names, plans.conditions, own.conditions, strict=True):
        if mine.differs(its):
            raise value_error(
                "the state was created with a different schedule",
                at=name,
                got=str(its),
                expected=str(mine),
                fix="convert the state: state = fz.migrate(state, tx, params), which keeps the step and the moments",
            )
    for name, its, mine in zip(plans.names, plans.plans, own.without_masks().plans, strict=False):
        refuse_other_selections(its, mine, "different groups", f"in the group {name!r}, ")
