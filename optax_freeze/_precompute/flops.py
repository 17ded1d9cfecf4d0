"""Counts the floating-point operations of a program.

XLA's own count includes the body of a loop only once, and many models are loops over layers.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Jaxpr

from optax_freeze._program.tasks import Task

_FREE = """
bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy copy_p device_put dynamic_slice
dynamic_update_slice expand_dims gather iota optimization_barrier pad random_unwrap random_wrap reshape rev
sharding_constraint slice split squeeze stop_gradient transpose
"""


def flops(eqns: Iterable[Any]) -> int:
    """Counts two operations per multiply-add in a product, and one per element of any other result.

    A ``while`` loop counts as one iteration, and a ``cond`` as its most expensive branch.
    """
    return sum(_of_operation(eqn, *([x.aval for x in each] for each in (eqn.invars, eqn.outvars))) for eqn in eqns)


def flops_of_tasks(tasks: Iterable[Task]) -> int:
    """Counts the operations of tasks, each of which may compute a part of the results of an operation."""
    found = ((task.share, task.eqn) for task in tasks)
    return sum(round(share * _of_operation(eqn, eqn.avals_in, eqn.avals_out)) for share, eqn in found)


def _of_operation(eqn: Any, avals_in: Sequence[Any], avals_out: Sequence[Any]) -> int:
    name, params = eqn.primitive.name, eqn.params
    out: int = max((math.prod(getattr(aval, "shape", ())) for aval in avals_out), default=0)
    operands: list[Any] = [getattr(aval, "shape", ()) for aval in avals_in]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * out * math.prod(operands[0][axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, spec = operands[1], params["dimension_numbers"].rhs_spec
        return 2 * out * math.prod(kernel) // max(kernel[spec[0]], 1)
    programs = [program for value in params.values() for program in _programs(value)]
    if programs:
        of_each = [flops(program.eqns) for program in programs]
        return params["length"] * of_each[0] if name == "scan" else max(of_each) if name == "cond" else sum(of_each)
    if name in _FREE.split():
        return 0
    return max([out, *map(math.prod, operands)]) if name.startswith(("reduce_", "arg", "cum")) else out


def _programs(value: Any) -> list[Jaxpr]:
    values = value if isinstance(value, (tuple, list)) else [value]
    inner = (getattr(each, "jaxpr", each) for each in values)
    return [each for each in inner if isinstance(each, Jaxpr)]
