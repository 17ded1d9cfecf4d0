"""Which values does a compiler store? It computes cheap operations again wherever their results are read.

Rows of what is stored are cut out of it. Rows of anything else are computed from rows, because a slice would make the
compiler store it.
"""

import collections

from optax_freeze._program.operations import Cost, is_cheap, rule_of
from optax_freeze._program.trace import Program

_ELEMENTWISE = (Cost.COPY, Cost.ELEMENTWISE)


class Materialized:
    """What a compiler fuses: elementwise operations into the product before them, if nothing else reads it."""

    def __init__(self, program: Program) -> None:
        readers = collections.Counter(number for eqn in program.eqns for number in eqn.reads)
        self._again: set[int] = set()
        fused: set[int] = set()
        for eqn in program.eqns:
            cost = rule_of(eqn).cost
            follows = cost in _ELEMENTWISE and any(value in fused for value in eqn.reads)
            if cost is Cost.PRODUCT:
                self._again.difference_update(eqn.reads)
            if is_cheap(eqn) and not follows:
                self._again.update(eqn.outputs)
            if follows or cost is Cost.PRODUCT:
                fused.update(number for number in eqn.outputs if readers[number] == 1)

    def is_stored(self, number: int) -> bool:
        """Whether all of a value is in memory, if all of it is wanted."""
        return number not in self._again
