"""Which values does a compiler store? It computes cheap operations again wherever their results are read.

Rows of what is stored are cut out of it. Rows of anything else are computed from rows, because a slice would make the
compiler store it.
"""

import collections
import functools
import math
from typing import Any

from optax_freeze._program.operations import Cost, is_cheap, rule_of
from optax_freeze._program.symbolic import if_undecided
from optax_freeze._program.trace import Program

_ELEMENTWISE = (Cost.COPY, Cost.ELEMENTWISE)
_MOST_SOURCES = 32
"""So many stored values are told apart from which one that is not stored is computed; planning stays linear."""


class Materialized:
    """What a compiler fuses: elementwise operations into the product before them, if nothing else reads it."""

    def __init__(self, program: Program) -> None:
        self._program = program
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

    @if_undecided(False)
    def is_repeated(self, number: int, shares: float) -> bool:
        """Whether regions of a value, of which it has ``shares``, are computed one by one, though they overlap.

        Then no more is read again, of the stored values that it is computed from, than would be written and kept to
        compute it once.
        """
        if shares <= 1 or self.is_stored(number):
            return shares <= 1
        return (shares - 1) * sum(self._sources[number].values()) <= _nbytes(self._program.avals[number])

    @functools.cached_property
    def _sources(self) -> dict[int, dict[int, float]]:
        """For each value that is not stored: the bytes that are read of stored ones to compute all of it."""
        found: dict[int, dict[int, float]] = {}
        total: dict[int, float] = {}
        for eqn in self._program.eqns:
            for number, out in zip(eqn.outputs, eqn.avals_out, strict=True):
                if self.is_stored(number):
                    continue
                read: dict[int, float] = {}
                for operand in eqn.reads:
                    aval = self._program.avals[operand]
                    if operand not in found:
                        found[operand] = {operand: total.setdefault(operand, _nbytes(aval))}
                    share = min(1.0, _size(out) / max(_size(aval), 1))
                    for source, part in found[operand].items():
                        read[source] = min(read.get(source, 0.0) + share * part, total[source])
                if len(read) > _MOST_SOURCES:
                    read = {number: sum(read.values())}
                    total |= read
                found[number] = read
        return found


def _size(aval: Any) -> int:
    return int(math.prod(aval.shape))  # of a symbolic size: undecided


def _nbytes(aval: Any) -> int:
    return _size(aval) * aval.dtype.itemsize
