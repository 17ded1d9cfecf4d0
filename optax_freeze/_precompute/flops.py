"""Counts the floating-point operations of a program.

XLA's own count includes the body of a loop only once, and many models are loops over layers.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from optax_freeze._jax_internals import Branches, Loop, inside, programs_in
from optax_freeze._program.operations import Cost, rule_of
from optax_freeze._program.tasks import Task
from optax_freeze._program.trace import Equation

_FREE = {Cost.BARRIER, Cost.COPY, Cost.LOOKUP, Cost.MOVE}


def flops(eqns: Iterable[Any]) -> int:
    """Counts two operations per multiply-add in a product, and one per element of any other result.

    A ``while`` loop counts as one iteration, and a ``cond`` as its most expensive branch.
    """
    return sum(_of_operation(eqn, *([x.aval for x in each] for each in (eqn.invars, eqn.outvars))) for eqn in eqns)


def flops_of_program(eqns: Iterable[Equation]) -> int:
    """Counts the operations of a list of them without calls."""
    return sum(_of_operation(eqn, eqn.avals_in, eqn.avals_out) for eqn in eqns)


def flops_of_tasks(tasks: Iterable[Task]) -> int:
    """Counts the operations of tasks, each of which may compute a part of the results of an operation."""
    return sum(round(task.share * _of_operation(task.eqn, task.eqn.avals_in, task.eqn.avals_out)) for task in tasks)


def _of_operation(eqn: Any, avals_in: Sequence[Any], avals_out: Sequence[Any]) -> int:
    params = eqn.params
    operands: list[Any] = [getattr(aval, "shape", ()) for aval in avals_in]
    out: int = max((math.prod(getattr(aval, "shape", ())) for aval in avals_out), default=0)
    if eqn.primitive is jax.lax.dot_general_p:
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * out * math.prod(operands[0][axis] for axis in contracted)
    if eqn.primitive is jax.lax.conv_general_dilated_p:
        kernel, spec = operands[1], params["dimension_numbers"].rhs_spec
        return 2 * out * math.prod(kernel) // max(kernel[spec[0]], 1)
    if of_each := [flops(program.eqns) for program in programs_in(eqn)]:
        found = inside(eqn)
        times = found.length if isinstance(found, Loop) else 1
        return times * (max(of_each) if isinstance(found, Branches) else sum(of_each))
    cost = rule_of(eqn).cost
    return 0 if cost in _FREE else max([out, *map(math.prod, operands)]) if cost is Cost.REDUCTION else out
