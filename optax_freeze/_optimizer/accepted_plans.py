"""Checks that a state belongs to a transformation: each plan in a state is compared with the spec once."""

import collections
from collections.abc import Callable
from typing import Any

from optax_freeze._errors import type_error, value_error
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.tree import PyTree


class AcceptedPlans:
    """The plans of states that a transformation made in ``init`` or has compared with its own spec.

    It is kept in the closure of the transformation and changes what is compared, never what is computed. Only
    ``optax.tree_map_params``, which calls ``init`` with a placeholder, needs to know what the latest state was like.
    """

    def __init__(self, kind: type, refuse_other: Callable[[Any, PyTree], None]) -> None:
        """``refuse_other(plan, tree)`` raises if a plan is not that of the spec."""
        self._kind, self._refuse_other = kind, refuse_other
        self._plans = collections.deque([None], maxlen=8)

    @property
    def latest(self) -> Any:
        return self._plans[-1]

    def add(self, plan: Any) -> Any:
        """Accepts a plan without a comparison."""
        if not plan.is_placeholder:
            self._plans.append(plan)
        return plan

    def state(self, state: Any, tree: PyTree) -> Any:
        """The state, if its plan is that of the spec for ``tree``."""
        if not isinstance(state, self._kind):
            raise other_transformation(type(state).__name__, f"a {self._kind.__name__}")
        if not any(state.plan is plan for plan in self._plans):
            self._refuse_other(state.plan, tree)
            self.add(state.plan)
        return state


def other_transformation(got: str, expected: str) -> TypeError:
    return type_error(
        "the state was created by a different transformation",
        at="the second argument of update",
        got=got,
        expected=f"{expected}, from `init` of this transformation",
        fix="state = tx.init(params); or, if the spec or the groups changed, state = fz.migrate(state, tx, params)",
    )


def refuse_other_selections(plan: Plan, own: Plan, what: str, where: str = "") -> None:
    for leaf, its, mine in plan.entries(own.selections):
        if its != mine:
            raise value_error(
                f"the state was created with {what}",
                at=leaf.path,
                got=f"{where}a leaf that {its}",
                expected=f"a leaf that {mine}, as in this transformation",
                fix="convert the state: state = fz.migrate(state, tx, params)",
            )
