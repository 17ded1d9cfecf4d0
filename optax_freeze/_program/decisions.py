"""Which values decide: one bit of them may change all of a result, as in a comparison.

A compiler rounds an operation otherwise where it is computed again, beside other operations. The derivative of a
maximum asks which elements are equal to it: if these are computed again, none may be. So what decides is computed once.
"""

from collections.abc import Collection, Sequence
from typing import Any

from optax_freeze._jax_internals import Branches, Call, Loop, Mapped, inside, programs_in
from optax_freeze._program.operations import RULES, decides, is_cheap
from optax_freeze._program.trace import Equation, Program, flatten, is_inexact


def decisive(program: Program, results: Collection[Any] = ()) -> set[int]:
    """The floats of a program from which decisions are computed, given those of its ``results`` that decide outside.

    Products and sums have only one wanted region in any case; the search goes no further.
    """
    found = {value for value in results if isinstance(value, int)}
    for eqn in reversed(program.eqns):
        here = operands_that_decide(eqn, [number in found for number in eqn.outputs])
        found.update(value for value, mark in zip(eqn.inputs, here, strict=True) if mark and isinstance(value, int))
    return {n for n in found if hasattr(program.avals[n], "dtype") and is_inexact(program.avals[n])}


def operands_that_decide(eqn: Equation, marks: Sequence[bool]) -> list[bool]:
    """Which operands of an operation decide, given which results do."""
    found = None if eqn.primitive.name in RULES else inside(eqn)
    if found is None:
        return [decides(eqn) or (any(marks) and is_cheap(eqn))] * len(eqn.inputs)
    if not isinstance(found, Branches | Call | Loop | Mapped):
        return [True] * len(eqn.inputs)
    inner = [flatten(closed) for closed in programs_in(eqn)]
    if isinstance(found, Loop):
        marks = results_that_decide(found, inner[0], marks)
    each = zip(*(_inputs_that_decide(program, marks) for program in inner), strict=True)
    return [False] * isinstance(found, Branches) + [any(marks) for marks in each]


def results_that_decide(loop: Loop, body: Program, marks: Sequence[bool]) -> list[bool]:
    """Which results of a step of a loop decide, in later steps, too."""
    first, carried = loop.consts, loop.carried
    while True:
        carry = _inputs_that_decide(body, marks)[first : first + carried]
        joined = [old or new for old, new in zip(marks, carry, strict=False)] + list(marks[carried:])
        if joined == list(marks):
            return joined
        marks = joined


def _inputs_that_decide(program: Program, marks: Sequence[bool]) -> list[bool]:
    found = decisive(program, [value for value, mark in zip(program.outputs, marks, strict=True) if mark])
    return [number in found for number in range(program.num_inputs)]
