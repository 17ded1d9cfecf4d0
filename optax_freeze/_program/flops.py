"""Counts the floating-point operations of a program, on all devices.

XLA's own count includes the body of a loop only once, and many models are loops over layers.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from optax_freeze._jax_internals import Branches, Literal, Loop, Mapped, While, inside, programs_in
from optax_freeze._program.operations import Cost, rule_of
from optax_freeze._program.tasks import Task

_Range: TypeAlias = tuple[float, float]

_ANY = (-math.inf, math.inf)
_RANGES: dict[str, Callable[..., _Range]] = {
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
}
"""The least and the largest value of a number that operations compute from others."""

_FREE = {Cost.BARRIER, Cost.COPY, Cost.LOOKUP, Cost.MOVE}


def flops(eqns: Iterable[Any]) -> int:
    """Counts two operations per multiply-add in a product, and one per element of any other result.

    A ``cond`` counts as its most expensive branch. A ``while`` loop counts as one iteration, unless its number of
    iterations has a limit that the program shows, as for dynamic rows; then as the most iterations.
    """
    ranges: dict[Any, _Range] = {}
    range_of = lambda atom: _of_literal(atom) if isinstance(atom, Literal) else ranges.get(atom, _ANY)  # noqa: E731
    total = 0
    for eqn in eqns:
        found = inside(eqn)
        most = _most_iterations(eqn, found, range_of) if isinstance(found, While) else 1
        total += most * _of_operation(eqn, *([x.aval for x in each] for each in (eqn.invars, eqn.outvars)))
        if eqn.primitive.name in _RANGES:
            ranges[eqn.outvars[0]] = _RANGES[eqn.primitive.name](*map(range_of, eqn.invars))
    return total


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
        return _times(eqn, found) * (max(of_each) if isinstance(found, Branches) else sum(of_each))
    cost = rule_of(eqn).cost
    return 0 if cost in _FREE else max([out, *map(math.prod, operands)]) if cost is Cost.REDUCTION else out


def _times(eqn: Any, found: Any) -> int:
    """How often an equation applies its program: steps, devices of a ``jax.shard_map``, cells of a Pallas grid."""
    if isinstance(found, Mapped):
        return math.prod(found.mesh.shape[name] for name in found.axis_names)
    if eqn.primitive.name == "pallas_call":
        return math.prod(size for size in eqn.params["grid_mapping"].grid if isinstance(size, int))
    return found.length if isinstance(found, Loop) else 1


def _of_literal(literal: Any) -> _Range:
    is_int = literal.aval.shape == () and np.issubdtype(literal.aval.dtype, np.integer)
    return (int(literal.val), int(literal.val)) if is_int else _ANY


def _most_iterations(eqn: Any, found: While, range_of: Callable[[Any], _Range]) -> int:
    """The most iterations of a loop that counts up to a number; 1 if it does not, or the number has no limit."""
    test, body, consts = found.condition.jaxpr, found.body.jaxpr, found.condition_consts
    carried, before, after = eqn.invars[consts + found.body_consts :], body.invars[found.body_consts :], body.outvars
    given = [*eqn.invars[:consts], *carried]
    if len(test.eqns) != 1 or test.eqns[0].primitive.name != "lt" or test.outvars != test.eqns[0].outvars:
        return 1
    count, limit = (test.invars.index(x) if x in test.invars else -1 for x in test.eqns[0].invars)
    if min(count - consts, limit) < 0 or (limit >= consts and after[limit - consts] is not before[limit - consts]):
        return 1
    counter, new = before[count - consts], after[count - consts]
    is_next = [e for e in body.eqns if e.primitive.name == "add" and e.invars[0] is counter and new in e.outvars]
    if not is_next or not isinstance(is_next[0].invars[1], Literal) or is_next[0].invars[1].val != 1:
        return 1
    most = range_of(given[limit])[1] - range_of(given[count])[0]
    return max(int(most), 0) if math.isfinite(most) else 1
