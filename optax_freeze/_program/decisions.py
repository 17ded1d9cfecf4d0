"""Which values decide: one bit of them may change all of a result, as in a comparison.

A compiler rounds an operation otherwise where it is computed again, beside other operations. The derivative of a
maximum asks which elements are equal to it: if these are computed again, none may be. So what decides is computed once.
"""

from collections.abc import Collection, Sequence
from typing import Any

from optax_freeze._program.dependence import programs_in
from optax_freeze._program.operations import RULES, decides, is_cheap
from optax_freeze._program.trace import Equation, Program, flatten, is_inexact, scan_counts


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
    name, inner = eqn.primitive.name, []
    if name not in RULES:
        inner = [flatten(closed) for closed in programs_in(eqn)]
    if not inner:
        return [decides(eqn) or (any(marks) and is_cheap(eqn))] * len(eqn.inputs)
    lacks = name == "cond"
    if any((len(p.outputs), p.num_inputs) != (len(marks), len(eqn.inputs) - lacks) for p in inner):
        return [True] * len(eqn.inputs)
    if name == "scan":
        marks = results_that_decide(eqn, inner[0], marks)
    found = [_inputs_that_decide(program, marks) for program in inner]
    return [False] * lacks + [any(each) for each in zip(*found, strict=True)]


def results_that_decide(eqn: Equation, body: Program, marks: Sequence[bool]) -> list[bool]:
    """Which results of a step of a ``scan`` decide, in later steps, too."""
    first, carried = scan_counts(eqn.params)
    while True:
        carry = _inputs_that_decide(body, marks)[first : first + carried]
        joined = [old or new for old, new in zip(marks, carry, strict=False)] + list(marks[carried:])
        if joined == list(marks):
            return joined
        marks = joined


def _inputs_that_decide(program: Program, marks: Sequence[bool]) -> list[bool]:
    found = decisive(program, [value for value, mark in zip(program.outputs, marks, strict=True) if mark])
    return [number in found for number in range(program.num_inputs)]
