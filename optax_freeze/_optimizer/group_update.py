"""One update of the groups of ``fz.freeze_when`` and of the rest: what is frozen now is skipped."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from optax_freeze._optimizer.group_state import closed, is_tree, opened
from optax_freeze._optimizer.inner_update import InnerUpdate, Trees, in_memory, parts_of
from optax_freeze._optimizer.leaf_updates import updated
from optax_freeze._optimizer.leafwise import is_leafwise
from optax_freeze._optimizer.nnx_variables import as_before, called_with, values_in
from optax_freeze._optimizer.skip_update import unless, update_unless
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.tree import PyTree


class GroupUpdate(NamedTuple):
    """An update of several plans: the groups, then the rest.

    ``gradient(n)`` is the gradient for plan ``n``, in a list of all leaves, and its norm.
    """

    call: InnerUpdate
    tx: optax.GradientTransformation
    plans: Sequence[Plan]
    states: Sequence[PyTree]
    gradient: Callable[[int], tuple[Sequence[Any], Any]]
    frozen: Sequence[Any]

    def updates(self) -> tuple[list[list[Any]], list[PyTree], list[Any]]:
        """For each plan the flat updates of its trainable part, the new state and the norm of the gradient."""
        runs = []
        for n, (form, is_frozen) in enumerate(zip(self._forms(), self.frozen, strict=True)):
            grads, norm = self.gradient(n)
            update = functools.partial(update_unless, is_frozen, form.update)
            changes, state = self.call._replace(grads=grads).results(form._replace(update=update))
            runs.append((changes, form.stored(state), norm))
        changes, states, norms = map(list, zip(*runs, strict=True))
        return changes, states, norms

    def new_params(self) -> tuple[PyTree, list[PyTree], list[Any]]:
        """The new parameters, and for each plan the new state and the norm; what is frozen is not computed.

        Plans that share a leaf add to it in turn.
        """
        new, states, norms = list(self.call.olds), [], []
        for n, (form, is_frozen) in enumerate(zip(self._forms(), self.frozen, strict=True)):
            own = [i for i in form.plan.own if i not in self.call.missing]

            def step(carry: Any, n: int = n, form: Any = form, own: Sequence[int] = own) -> Any:
                grads, norm = self.gradient(n)
                olds = list(self.call.olds)
                for i in own:
                    olds[i] = carry[0][i]
                changes, state = self.call._replace(grads=grads, olds=olds).results(form._replace(state=carry[1]))
                return {i: updated(olds[i], changes[i], form.plan.selections[i]) for i in own}, state, norm

            # The norm is carried, since the gradient exists only inside of the step, which a frozen group skips.
            carry = {i: new[i] for i in own}, form.state, jnp.zeros([], jnp.float32)
            leaves, state, norm = unless(is_frozen, step, carry)
            for i in own:
                new[i] = leaves[i]
            states.append(form.stored(state))
            norms.append(norm)
        return jax.tree.unflatten(self.call.params_treedef, new), states, norms

    def _forms(self) -> "list[Trees | Lists]":
        """How ``tx`` is called for each plan.

        If it is leafwise, groups call it with lists, and groups of equal leaves share what JAX traces.
        """
        update, calls_lists = in_memory(self.tx.update), all(map(is_leafwise, self.tx))
        traced_once = jax.jit(update)

        def update_of_lists(*args: Any) -> tuple[PyTree, PyTree]:
            is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
            return (traced_once if is_traced else update)(*args)

        def form(plan: Plan, state: PyTree) -> Trees | Lists:
            if calls_lists and is_tree(plan):
                return Lists(update_of_lists, opened(state, list), plan, lambda new: closed(new, state, list))
            return _trees(update, plan, state, self.call.treedef)

        *groups, rest = zip(self.plans, self.states, strict=True)
        return [*(form(*each) for each in groups), self.call.form(update, *rest)]


class Lists(NamedTuple):
    """How a leafwise transformation is called for a group: with lists of the leaves that train, also in its state."""

    update: Callable[..., Any]
    state: PyTree
    plan: Plan
    stored: Callable[[PyTree], PyTree]

    def trainable(self, _: Any, values: Sequence[Any]) -> list[Any]:
        return list(self.plan.trainable_leaves(values).values())

    def extra_args(self, call: InnerUpdate, updates: PyTree) -> dict[str, Any]:
        return {}

    def flat(self, changes: Sequence[Any]) -> list[Any]:
        return parts_of(self.plan, self.plan.full(dict(zip(self.plan.own, changes, strict=True))))


def _trees(update: Callable[..., Any], plan: Plan, state: PyTree, treedef: Any) -> Trees:
    """How any update is called for a group, whose state has no placeholders."""

    def tree_of(own: Sequence[Any]) -> PyTree:
        return jax.tree.unflatten(treedef, plan.full(dict(zip(plan.own, own, strict=True))))

    def own(tree: PyTree) -> list[Any]:
        leaves = _tree.flatten(tree)[0]
        return [leaves[i] for i in plan.own]

    def stored(new: PyTree) -> PyTree:
        values = values_in(state, plan)
        return as_before(closed(new, values, own), state, values, plan)

    return Trees(update, called_with(opened(state, tree_of), plan, treedef), plan, stored)
