"""The update of ``coupled``: the transformation of ``freeze_when`` that runs first, with zeros for frozen groups."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from optax_freeze._optimizer.group_plans import GroupPlans
from optax_freeze._optimizer.inner_update import InnerUpdate
from optax_freeze._optimizer.outer_transformation import OF_PARAMS, mapped
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.group_spec import replaced, zeroed
from optax_freeze._spec.selection import Selection
from optax_freeze._spec.tree import PyTree


def update_coupled(
    coupled: optax.GradientTransformation, call: InnerUpdate, plans: GroupPlans, frozen: Sequence[Any], state: PyTree
) -> tuple[list[Any], PyTree]:
    """The gradients that the groups get, and the new state."""
    if plans.everything.all_frozen:
        return list(call.grads), state
    own = [plan.selections for plan in plans.plans]
    grads, call = zeroed(call.grads, frozen, own), _without_frozen_groups(call, frozen, own)
    return call._replace(grads=grads).run(coupled, plans.everything, state)


def _without_frozen_groups(call: InnerUpdate, frozen: Sequence[Any], own: Sequence[Sequence[Selection]]) -> InnerUpdate:
    """The call with extra arguments about a loss in which frozen groups are constants."""

    def zeroed_tree(tree: PyTree) -> PyTree:
        values, treedef = _tree.flatten_beside(call.treedef, tree)
        return jax.tree.unflatten(treedef, zeroed(values, frozen, own)) if treedef == call.treedef else tree

    def with_frozen(fn: Callable[..., Any]) -> Callable[..., Any]:
        def called(params: PyTree, *args: Any, **kwargs: Any) -> Any:
            values, treedef = _tree.flatten(params)
            return fn(jax.tree.unflatten(treedef, replaced(values, call.olds, frozen, own)), *args, **kwargs)

        return fn if call.params is None else called

    of_loss = {name: x for name, x in call.extra_args.items() if name in ("grad", *OF_PARAMS)}
    return call._replace(extra_args={**call.extra_args, **mapped(of_loss, zeroed_tree, with_frozen)})
