"""Which values decide: one bit of them may change all of a result, as in a comparison.

A compiler rounds an operation otherwise where it is computed again, beside other operations. The derivative of a
maximum asks which elements are equal to it: if these are computed again, none may be. So what decides is computed once.
"""

from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from optax_freeze._jax_internals import Loop
from optax_freeze._program.operations import decides, is_cheap
from optax_freeze._program.propagation import Propagation
from optax_freeze._program.trace import Equation, Program, is_inexact


def decisive(program: Program, results: Collection[Any] = ()) -> set[int]:
    """The floats of a program from which decisions are computed, given those of its ``results`` that decide outside.

    Products and sums have only one wanted region in any case; the search goes no further.
    """
    found = {value for value in results if isinstance(value, int)}
    for eqn in reversed(program.eqns):
        here = _DECIDING.across(eqn, [number in found for number in eqn.outputs])
        found.update(value for value, mark in zip(eqn.inputs, here, strict=True) if mark and isinstance(value, int))
    return {n for n in found if hasattr(program.avals[n], "dtype") and is_inexact(program.avals[n])}


def results_that_decide(loop: Loop, marks: Sequence[bool]) -> list[bool]:
    """Which results of a step of a loop decide, in later steps, too."""
    return [*_DECIDING.across_steps(loop, marks)[0], *marks[loop.carried :]]


def _operands_that_decide(eqn: Equation, marks: Sequence[bool]) -> list[bool]:
    return [decides(eqn) or (any(marks) and is_cheap(eqn))] * len(eqn.inputs)


def _inputs_that_decide(program: Program, marks: Sequence[bool]) -> list[bool]:
    found = decisive(program, [value for value, mark in zip(program.outputs, marks, strict=True) if mark])
    return [number in found for number in range(program.num_inputs)]


_DECIDING = Propagation(_operands_that_decide, _inputs_that_decide, is_backward=True, found=WeakKeyDictionary())
