"""Whether the state given to ``update`` belongs to this transformation, without resolving the spec in every update."""

import collections
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from optax_freeze._spec.tree import PyTree

P = TypeVar("P")


class AcceptedPlans(Generic[P]):
    """The plans of states that a transformation made in ``init`` or has compared with its own spec.

    It is kept in the closure of the transformation and changes what is compared, never what is computed. Only
    ``optax.tree_map_params``, which calls ``init`` with a placeholder, needs the latest plan to make a state like it.
    """

    def __init__(self, make: Callable[[PyTree], P], refuse_other: Callable[[P, PyTree], None]) -> None:
        """``make(tree)`` makes a plan; ``refuse_other(plan, tree)`` raises if a plan is not that of the spec."""
        self._make = make
        self._refuse_other = refuse_other
        self._latest: collections.deque[P] = collections.deque(maxlen=8)

    @property
    def latest(self) -> P | None:
        """The plan that was accepted last."""
        return self._latest[-1] if self._latest else None

    def add(self, plan: P) -> P:
        """Accepts a plan without a comparison."""
        self._latest.append(plan)
        return plan

    def accept(self, plan: Any, tree: PyTree) -> P:
        """The plan of a state, made again for ``tree`` if it is empty: ``optax.tree_map_params`` drops static data.

        Raises:
          ValueError: if it is the plan of another spec.
        """
        if not plan.leaves:
            return self._make(tree)
        if not any(plan is other for other in self._latest):
            self._refuse_other(plan, tree)
            self.add(plan)
        return plan
