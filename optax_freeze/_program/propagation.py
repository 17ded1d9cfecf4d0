"""Propagates marks through a program, from operands to results or backwards, also through loops, branches and calls."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from optax_freeze._jax_internals import Branches, Call, ClosedJaxpr, Loop, Mapped, inside
from optax_freeze._program.trace import Equation, Program, flatten

T = TypeVar("T")

ENTERED = (Branches, Call, Loop, Mapped)
"""The operations whose programs are entered."""


def settled(
    carry: Sequence[T],
    step: Callable[[Sequence[T]], Sequence[T]],
    join: Callable[[T, T], T],
    is_same: Callable[[Sequence[T], Sequence[T]], bool] = operator.eq,
) -> Sequence[T]:
    """What is known of the carry of a loop at each of its steps; ``step`` returns at least the carry after one.

    A step may be the first one or a later one, so what is known of both is joined until it stays the same.
    """
    while True:
        joined = [*map(join, carry, step(carry))]
        if is_same(joined, [*carry]):
            return carry
        carry = joined


class Propagation(NamedTuple):
    """How marks are propagated.

    Attributes:
      through: called with an operation whose programs are not entered, and the marks of its operands (or results); it
        returns those of its results (or operands).
      of_program: called with a program, and the marks of its inputs (or outputs); it returns those of its outputs (or
        inputs).
      is_backward: whether marks are propagated from results to operands.
      found: what was found for programs inside of operations, which are asked again and again: a loop is planned once
        for each region of its carry, and so is each loop in it.
    """

    through: Callable[[Equation, Sequence[bool]], Sequence[bool]]
    of_program: Callable[[Program, Sequence[bool]], Sequence[bool]]
    is_backward: bool
    found: WeakKeyDictionary[Any, dict[tuple[bool, ...], Sequence[bool]]]

    def across(self, eqn: Equation, marks: Sequence[bool]) -> Sequence[bool]:
        """The marks of the results of an operation, given those of its operands; backwards, the reverse."""
        found = inside(eqn)
        if isinstance(found, Branches):
            which, given = ([], marks) if self.is_backward else (marks[:1], marks[1:])
            each = zip(*(self.across_program(program, given) for program in found.programs), strict=True)
            return [False] * self.is_backward + [any([*which, *its]) for its in each]
        if isinstance(found, Call | Mapped):
            return self.across_program(found.program, marks)
        if isinstance(found, Loop):
            carry, results = self.across_steps(found, marks)
            return results if self.is_backward else [*carry, *results[found.carried :]]
        return self.through(eqn, marks)

    def across_steps(self, loop: Loop, marks: Sequence[bool]) -> tuple[Sequence[bool], Sequence[bool]]:
        """The marks of the carry before each step, or after it, and those of the results or operands of a step."""
        first = 0 if self.is_backward else loop.consts
        last, others = first + loop.carried, []

        def step(carry: Sequence[bool]) -> Sequence[bool]:
            passed = self.across_program(loop.body, [*marks[:first], *carry, *marks[last:]])
            others[:] = passed
            return passed[loop.consts : loop.stacked] if self.is_backward else passed

        return settled(marks[first:last], step, operator.or_), others

    def across_program(self, closed: ClosedJaxpr, marks: Sequence[bool]) -> Sequence[bool]:
        """:meth:`across` for a program inside of an operation."""
        known, key = self.found.setdefault(closed.jaxpr, {}), tuple(marks)
        if key not in known:
            known[key] = self.of_program(flatten(closed), marks)
        return known[key]
