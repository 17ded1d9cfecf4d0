"""One update of the groups of ``freeze_when``: to the updates of all leaves, or to new parameters."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from optax_freeze._optimizer.groups import GroupPlans
from optax_freeze._optimizer.inner_update import parts_outside, variables_outside, without_frozen, zero
from optax_freeze._optimizer.update_unless import unless, update_unless
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.apply_updates import updated
from optax_freeze._spec.memory_kinds import is_on_host, to_device, to_memory_of
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN
from optax_freeze._spec.tree import PyTree

GradientOf: TypeAlias = Callable[[int], tuple[Sequence[Any], Any]]
"""Called with the number of a group: the gradient of its leaves, in a list of all leaves, and its norm."""


class UpdateCall(NamedTuple):
    """The arguments of one update: the updates flattened, the parameters as given and flattened, the others.

    ``missing`` are the positions of trainable leaves that have no gradient, and so no update.
    """

    treedef: Any
    values: Sequence[Any]
    params: PyTree | None
    olds: Sequence[Any]
    params_treedef: Any
    extra_args: dict[str, Any]
    missing: frozenset[int] = frozenset()

    def updates(
        self, tx: Any, plans: GroupPlans, states: Sequence[PyTree], gradient: GradientOf, frozen: Sequence[Any]
    ) -> tuple[PyTree, list[PyTree], list[Any]]:
        """The updates of all leaves, and the state and the gradient norm of each group."""
        runs = []
        for n, (plan, state, is_frozen) in enumerate(zip(plans.plans, states, frozen, strict=True)):
            grads, norm = gradient(n)
            runs.append((*self.run(tx, plan, state, grads, is_frozen), norm))
        new = [
            zero(leaf, value, old)
            if selection is FROZEN or i in self.missing
            else plans.merge(i, [parts[i] for parts, *_ in runs], value if old is None else old)
            for i, (leaf, selection, value, old) in enumerate(
                zip(plans.leaves, plans.whole.selections, self.values, self.olds, strict=True)
            )
        ]
        new = plans.whole.with_sources(new, self.values)
        return jax.tree.unflatten(self.treedef, new), [state for _, state, _ in runs], [norm for *_, norm in runs]

    def new_params(
        self, tx: Any, plans: GroupPlans, states: Sequence[PyTree], gradient: GradientOf, frozen: Sequence[Any]
    ) -> tuple[PyTree, list[PyTree], list[Any]]:
        """The new parameters, and the state and the gradient norm of each group; what is frozen is not computed.

        Groups that share a leaf add to it in turn.
        """
        new, new_states, norms = list(self.olds), [], []
        for n, (plan, state, is_frozen) in enumerate(zip(plans.plans, states, frozen, strict=True)):
            own = [i for i, s in enumerate(plan.selections) if s is not FROZEN and i not in self.missing]

            def step(carry: Any, n: int = n, plan: Plan = plan, own: Sequence[int] = own) -> Any:
                leaves, (grads, norm) = list(self.olds), gradient(n)
                for i, leaf in zip(own, carry[0], strict=True):
                    leaves[i] = leaf
                changes, state = self._replace(olds=leaves).run(tx, plan, carry[1], grads, False)
                return [updated(leaves[i], changes[i], plan.selections[i]) for i in own], state, norm

            leaves, state, norm = unless(is_frozen, step, ([new[i] for i in own], state, jnp.zeros([], jnp.float32)))
            for i, leaf in zip(own, leaves, strict=True):
                new[i] = leaf
            new_states.append(state)
            norms.append(norm)
        return jax.tree.unflatten(self.params_treedef, new), new_states, norms

    def run(self, tx: Any, plan: Plan, state: PyTree, grads: Sequence[Any], frozen: Any) -> tuple[list[Any], PyTree]:
        """One update of ``tx`` with the trainable part of a plan, unless it is frozen: flat updates and the state."""
        if plan.all_frozen:
            return [_tree.HOLE] * len(grads), state
        updates = plan.trainable(self.treedef, grads)
        params = None if self.params is None else plan.trainable(self.params_treedef, self.olds)
        extra_args = without_frozen(self.extra_args, plan, self.treedef, self.params)
        state = variables_outside(state, plan)
        updates, state = update_unless(frozen, _in_place(tx.update), updates, state, params, extra_args)
        return _tree.flatten(updates)[0], parts_outside(state, plan)


def _in_place(update: Any) -> Any:
    """An update whose new state stays in the memory of the old one: host or device memory."""

    def update_fn(updates: PyTree, state: PyTree, params: PyTree | None, **extra_args: Any) -> tuple[PyTree, PyTree]:
        if not any(map(is_on_host, jax.tree.leaves(state))):
            return update(updates, state, params, **extra_args)
        updates, new = update(updates, jax.tree.map(to_device, state), params, **extra_args)
        return updates, jax.tree.map(to_memory_of, state, new)

    return update_fn
