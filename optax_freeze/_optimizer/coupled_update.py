"""The update of ``coupled``: the transformation of ``freeze_when`` that runs first, with zeros for frozen groups."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from optax_freeze._optimizer.group_plans import GroupPlans
from optax_freeze._optimizer.inner_update import OF_PARAMS, Inner, InnerUpdate
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.group_spec import replaced, zeroed
from optax_freeze._spec.selection import Selection
from optax_freeze._spec.tree import PyTree


def update_coupled(
    coupled: optax.GradientTransformation, call: InnerUpdate, plans: GroupPlans, frozen: Sequence[Any], state: PyTree
) -> tuple[list[Any], PyTree]:
    """The gradients that the groups get, and the new state."""
    everything, own = plans.everything, [plan.selections for plan in plans.plans]
    grads, call = zeroed(call.grads, frozen, own), _without_frozen_groups(call, frozen, own)
    return call.run(Inner(coupled), everything, state, everything.all_frozen, grads)


def _without_frozen_groups(call: InnerUpdate, frozen: Sequence[Any], own: Sequence[Sequence[Selection]]) -> InnerUpdate:
    """The call with extra arguments about a loss in which frozen groups are constants."""

    def zeroed_tree(tree: PyTree) -> PyTree:
        values, treedef = _tree.flatten_beside(call.treedef, tree)
        return jax.tree.unflatten(treedef, zeroed(values, frozen, own)) if treedef == call.treedef else tree

    def of_others(fn: Callable[..., Any]) -> Callable[..., Any]:
        def called(params: PyTree, *args: Any, **kwargs: Any) -> Any:
            values, treedef = _tree.flatten(params)
            return fn(jax.tree.unflatten(treedef, replaced(values, call.olds, frozen, own)), *args, **kwargs)

        return called

    extra_args = dict(call.extra_args)
    if "grad" in extra_args:
        extra_args["grad"] = zeroed_tree(extra_args["grad"])
    if call.params is not None:
        extra_args |= {name: of_others(fn) for name, fn in extra_args.items() if name in OF_PARAMS and callable(fn)}
    if callable(grad_fn := extra_args.get("grad_fn")):
        extra_args["grad_fn"] = lambda *args, **kwargs: zeroed_tree(grad_fn(*args, **kwargs))
    return call._replace(extra_args=extra_args)
