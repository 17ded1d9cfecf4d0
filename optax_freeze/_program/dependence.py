"""Which values of a program depend on some of its inputs, and how many steps of a loop do not.

All results of an operation that is not understood depend on each of its operands, and so do reads of a reference.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from optax_freeze._jax_internals import Loop, closed, inside
from optax_freeze._program.operations import computation, is_cheap
from optax_freeze._program.propagation import ENTERED, Propagation
from optax_freeze._program.regions import EVERYTHING, Region, Rows
from optax_freeze._program.trace import Equation, Program, flatten


def dependent(program: Program, marked: Iterable[int]) -> set[int]:
    """The values that depend on marked ones, or on side effects."""
    found = set(marked)
    for eqn in program.eqns:
        given = [isinstance(value, int) and value in found for value in eqn.inputs]
        if any(given) or eqn.has_effects:
            is_unknown = eqn.has_effects and not isinstance(inside(eqn), ENTERED)
            marks = [True] * len(eqn.outputs) if is_unknown else _REACHING.across(eqn, given)
            found.update(compress(eqn.outputs, marks))
    return found


def depends_on(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Returns for each output of a jaxpr whether it depends on one of the marked inputs.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x, y: (x + 1, jax.jit(lambda a, b: (a, b))(x, y)))(1.0, 2.0)
    >>> depends_on(jaxpr, [True, False])
    [True, True, False]
    """
    return _outputs_that_depend(flatten(closed(jaxpr)), inputs)


def _outputs_that_depend(program: Program, marks: Sequence[bool]) -> list[bool]:
    found = dependent(program, compress(range(program.num_inputs), marks))
    return [isinstance(value, int) and value in found for value in program.outputs]


def _results_that_depend(eqn: Equation, marks: Sequence[bool]) -> list[bool]:
    return [any(marks)] * len(eqn.outputs)


_REACHING = Propagation(_results_that_depend, _outputs_that_depend, is_backward=False, found=WeakKeyDictionary())


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
