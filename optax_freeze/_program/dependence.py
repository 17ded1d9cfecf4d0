"""Which values of a program depend on some of its inputs, and how many steps of a loop do not.

All results of an operation that is not understood depend on each of its operands, and so do reads of a reference.
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from optax_freeze._jax_internals import Loop, closed, inside
from optax_freeze._program.operations import computation, is_cheap
from optax_freeze._program.propagation import ENTERED, Propagation
from optax_freeze._program.regions import EVERYTHING, Region, Rows
from optax_freeze._program.tasks import Task
from optax_freeze._program.trace import Equation, Program, flatten


def dependent(program: Program, marked: Iterable[int]) -> set[int]:
    """The values that depend on marked ones, or on side effects."""
    return {*reached(program, dict.fromkeys(marked, 1))}


def reached(program: Program, marks: Mapping[int, int]) -> dict[int, int]:
    """The values that depend on marked ones, or on side effects, with the marks that reach them.

    A mark is an int whose bits stand for sources; a value has the bits of all that it depends on.
    """
    found, every = dict(marks), functools.reduce(operator.or_, marks.values(), 1)
    for eqn in program.eqns:
        given = [found.get(value, 0) if isinstance(value, int) else 0 for value in eqn.inputs]
        if any(given) or eqn.has_effects:
            is_unknown = eqn.has_effects and not isinstance(inside(eqn), ENTERED)
            new = [every] * len(eqn.outputs) if is_unknown else _REACHING.across(eqn, given)
            found.update((n, found.get(n, 0) | mark) for n, mark in zip(eqn.outputs, new, strict=True) if mark)
    return found


def depends_on(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Returns for each output of a jaxpr whether it depends on one of the marked inputs.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x, y: (x + 1, jax.jit(lambda a, b: (a, b))(x, y)))(1.0, 2.0)
    >>> depends_on(jaxpr, [True, False])
    [True, True, False]
    """
    return [bool(mark) for mark in _of_outputs(flatten(closed(jaxpr)), [int(mark) for mark in inputs])]


def _of_outputs(program: Program, marks: Sequence[int]) -> list[int]:
    """The marks of the outputs of a program, given those of its inputs."""
    found = reached(program, {n: mark for n, mark in enumerate(marks) if mark})
    return [found.get(value, 0) if isinstance(value, int) else 0 for value in program.outputs]


def _joined(eqn: Equation, marks: Sequence[int]) -> list[int]:
    return [functools.reduce(operator.or_, marks)] * len(eqn.outputs)


_REACHING = Propagation(_joined, _of_outputs, is_backward=False, found=WeakKeyDictionary())


class Known(NamedTuple):
    """Where a program can be divided, if some rows of its inputs are known and others are not.

    Attributes:
      steps: from the first result of a ``scan`` to the number of its first steps that read known values alone.
      in_part: the values that cheap operations compute from such inputs.
    """

    steps: Mapping[int, int] = MappingProxyType({})
    in_part: Collection[int] = ()


def known_in_part(
    program: Program, unknown: set[int], in_part: Iterable[int], is_known: Callable[[int, Region], bool]
) -> Known:
    """Where a program can be divided, given the inputs that are known ``in_part``, and which regions are known."""
    partly, made_by = set(in_part), program.made_by
    known: set[tuple[Any, Region | None]] = set()

    def are_rows_known(reads: Iterable[tuple[Any, Region | None]]) -> bool:
        """Whether regions can be computed from known ones."""
        # A search with a list of its own: a chain of cheap operations may be longer than Python's stack.
        found, left = set(), [*reads]
        while left:
            value, region = key = left.pop()
            if region is None or value not in unknown or key in known or key in found:
                continue
            found.add(key)
            if value < program.num_inputs or value not in partly:
                if value not in partly or not is_known(value, region):
                    return False
                continue
            eqn = made_by[value]
            computed = computation(eqn, [region]) if len(eqn.outputs) == 1 and region is not EVERYTHING else None
            if computed is None:
                return False
            left += ((x, r) for x, r in zip(eqn.inputs, computed.regions, strict=True) if isinstance(x, int))
        known.update(found)
        return True

    steps = {}
    for eqn in program.eqns:
        if is_cheap(eqn) and not partly.isdisjoint(eqn.reads):
            partly.update(eqn.outputs)
        loop = inside(eqn)
        if not isinstance(loop, Loop) or eqn.has_effects or not eqn.outputs:
            continue
        first, length = loop.stacked, loop.length
        stacked = [value for value in eqn.inputs[first:] if value in unknown]
        # A step with an unknown constant or carry is unknown; after the first step with an unknown row all carries are.
        if stacked and unknown.isdisjoint(value for value in eqn.inputs[:first] if isinstance(value, int)):
            numbers = range(length)[:: -1 if loop.reverse else 1]
            rows = (are_rows_known((value, Rows(0, [k])) for value in stacked) for k in numbers)
            steps[eqn.outputs[0]] = next((n for n, known in enumerate(rows) if not known), length)
    return Known(steps, partly)


def divided(
    tasks: Iterable[Task], marked: Iterable[int], later: Iterable[Any]
) -> tuple[list[Task], list[Task], list[tuple[int, Region]]]:
    """The tasks that do not depend on marked values, those that do, and what these, and ``later`` reads, need of them.

    ``later``: values, of which literals are ignored.
    """
    first, second, found = [], [], set(marked)
    for task in tasks:
        depends = not found.isdisjoint(task.read_numbers)
        found.update(task.written_numbers if depends else ())
        (second if depends else first).append(task)
    needed = {number for task in second for number in task.read_numbers}
    needed |= {value for value in later if isinstance(value, int)}
    keys = [write for task in first for write in task.writes if write is not None]
    return first, second, [key for key in keys if key[0] in needed]
