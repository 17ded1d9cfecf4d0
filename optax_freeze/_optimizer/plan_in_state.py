"""How a state of :func:`optax_freeze.freeze` holds its plan: what is static in a node, and the masks beside it."""

from typing import Any

import jax

from optax_freeze._errors import is_array, type_error, value_error
from optax_freeze._optimizer.accepted_plans import AcceptedPlans
from optax_freeze._optimizer.init_with import changed
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan, refuse_other_leaf
from optax_freeze._spec.resolve import Spec, Tied, make_plan, register_with_flax, warn_of_extent
from optax_freeze._spec.source import refuse_other_rows
from optax_freeze._spec.tree import Part, PyTree


def plan_of(state: Any) -> Plan:
    """The plan of a state of :func:`freeze` or :func:`masked_zero_updates`, with its dense masks."""
    return state.spec.with_masks(_tree.flatten(state.masks)[0])


def plan_and_masks(params: PyTree, frozen: Spec, tied: Tied, accepted: AcceptedPlans[Plan]) -> tuple[Plan, PyTree]:
    """The static plan for a state, and copies of its masks: a tree like the parameters, empty without masks."""
    register_with_flax()
    plan = changed(make_plan(params, frozen, tied=tied))
    warn_of_extent(plan, params, frozen, stacklevel=3)
    values = _tree.flatten(params)[0]
    for value, leaf, selection in zip(values, plan.leaves, plan.selections, strict=True):
        if isinstance(value, Part) and selection.in_part:
            refuse_other_leaf(value, leaf, selection, "params")
            refuse_other_rows(value, selection, leaf.path, "params")
    copies = plan.copied_masks(values)
    # `optax.tree_map_params` builds a state from a placeholder without leaves: it takes the place of the masks.
    dense = any(map(is_array, copies if copies else jax.tree.leaves(frozen)))
    masks = jax.tree.unflatten(plan.treedef, copies) if dense else ()
    return accepted.add(plan.without_masks()), masks


def with_plan(state: Any, kind: type, tree: PyTree, accepted: AcceptedPlans[Plan]) -> Any:
    """The state with its plan, made again after ``optax.tree_map_params``, which drops static data."""
    if not isinstance(state, kind):
        raise type_error(
            "the state was created by a different transformation",
            at="the second argument of update",
            got=type(state).__name__,
            expected=f"a {kind.__name__}, from `init` of this transformation",
            fix="call state = tx.init(params) again after wrapping the optimizer, then tx.update(grads, state, params)",
        )
    return state._replace(spec=accepted.accept(state.spec, tree))


def plans_of_spec(frozen: Spec) -> AcceptedPlans[Plan]:
    """The plans of a spec that a transformation accepts in a state."""

    def make(tree: PyTree) -> Plan:
        return make_plan(tree, frozen).without_masks()

    def refuse_other(plan: Plan, tree: PyTree) -> None:
        try:
            own = make_plan(plan.parameters(tree), frozen, leaves=plan.leaves)
        except (ValueError, TypeError) as error:
            if plan.treedef is None:
                return  # unpickled, and the tree at hand may have other containers
            raise value_error(
                "the state was created with a different spec or for different parameters",
                at="the second argument of update",
                got=f"the state for {[leaf.path for leaf in plan.leaves[:3]]}: {str(error).splitlines()[0]}",
                expected="a state from `init` of this transformation",
                fix="state = tx.init(params)",
            ) from error
        for leaf, mine, its in zip(plan.leaves, own.selections, plan.selections, strict=True):
            if mine != its:
                raise value_error(
                    "the state was created with a different spec",
                    at=leaf.path,
                    got=f"a leaf that {its}",
                    expected=f"a leaf that {mine}, as in this transformation",
                    fix="convert the state: state = fz.migrate(state, tx, params)",
                )

    return AcceptedPlans(make, refuse_other)
