"""Which values of a program its backward passes compute."""

from collections.abc import Collection
from typing import Any, NamedTuple

from optax_freeze._audit.evaluation import live
from optax_freeze._jax_internals import is_backward, programs_in
from optax_freeze._program.trace import Program, is_inexact


def contains_backward(eqn: Any) -> bool:
    """Whether a loop, a branch or a call contains a backward pass."""
    inner = [each for program in programs_in(eqn) for each in program.eqns]
    return any(is_backward(each) or contains_backward(each) for each in inner)


def is_around_backward(eqn: Any) -> bool:
    """Whether an equation is a loop, a branch or a call around a backward pass, and not a part of one."""
    return not is_backward(eqn) and contains_backward(eqn)


class Backward(NamedTuple):
    """The values of the backward passes of a program.

    Attributes:
      made: all of them.
      ends: those that other operations read.
      around: those that loops, branches and calls return.
    """

    made: set[int]
    ends: list[int]
    around: set[int]


def values_of_backward(
    program: Program, results: Collection[int], leaving: Collection[int] = (), state: Collection[int] = ()
) -> Backward:
    """The values of the backward passes of a program.

    Args:
      results: the results of the program.
      leaving: other values that a jitted function returns.
      state: the results that are the new state, which is no gradient where a loop of whole steps returns it.
    """
    made = {n for eqn in program.eqns if is_backward(eqn) or contains_backward(eqn) for n in eqn.outputs}
    read, around = {*results}, set()
    for eqn in live(program.eqns, results):
        if not is_backward(eqn):
            read |= eqn.reads
            around |= {*eqn.outputs} if contains_backward(eqn) else set()
    ends = (made & (read | {*leaving})) - (around & {*state})
    return Backward(made, sorted(n for n in ends if is_inexact(program.avals[n])), around)
