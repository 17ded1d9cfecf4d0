"""Gradients of frozen parameters in a loop or a branch, and which of its results read them.

A branch, and the first step of a loop, is a program of its own, which is read as that of a training step is. What a
``while_loop`` or a ``shard_map`` computes is not known.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from optax_freeze._audit.evaluation import live
from optax_freeze._audit.gradient_owners import Owners, contains_backward
from optax_freeze._audit.reactions import CHANGES
from optax_freeze._audit.readers import Readers
from optax_freeze._jax_internals import Branches, ClosedJaxpr, Loop, inside, is_backward, programs_in, without_unused
from optax_freeze._program.dependence import depends_on, reached
from optax_freeze._program.trace import Equation, Program, flatten, is_inexact


class InnerGradient(NamedTuple):
    """A gradient of a frozen parameter, and for each change of it the results of the equation that differ."""

    leaf: int
    changed: list[set[int]]


def inner_gradients(
    eqn: Equation,
    operands: Sequence[Any],
    leaves: Mapping[int, int],
    frozen_elements: Mapping[int, Any],
    wanted: Collection[int],
) -> tuple[list[InnerGradient], bool]:
    """The gradients of frozen parameters that an equation computes, and whether some may be there that are not known.

    Args:
      leaves: from the places of operands that are parameters to the numbers of these.
      frozen_elements: for each parameter with frozen elements which they are.
      wanted: the results of the equation that are needed.
    """
    found, unknown = [], False
    for inner, values, place_of in _steps(eqn, operands):
        needed = _needed(eqn, inner, [n in wanted for n in eqn.outputs])
        program = flatten(inner, enter_placed=True)
        outs = {n: k for k, n in enumerate(program.outputs) if needed[k] and isinstance(n, int)}
        leaf_of = {place_of[j]: i for j, i in leaves.items() if j in place_of}
        ends = _ends(program, outs, leaf_of, frozen_elements)
        owned: dict[int, int] = {}
        if ends and values is not None:
            inputs = [n for n in range(program.num_inputs) if is_inexact(program.avals[n])]
            owners = Owners(program, values, inputs, leaf_of).find(ends)
            owned = {n: leaf_of.get(min(numbers), -1) for n, numbers in owners.items() if len(numbers) == 1}
        unknown |= any(n not in owned and _is_mixed(program, n, outs) for n in ends)
        for n, i in owned.items():
            if i in frozen_elements:
                assert values is not None
                after = [out for out in outs if out in reached_from(program, n)]
                readers = Readers(program, {n: frozen_elements[i]}, after, [np.asarray(False)] * len(after))
                differ = np.any(readers.counts(values)([n], range(len(CHANGES[:4]))), axis=-1)
                places = [{outs[out] for out in compress(after, row)} for row in differ]
                found.append(InnerGradient(i, [_later(eqn, inner, each) for each in places]))
    return found, unknown


def _steps(eqn: Equation, operands: Sequence[Any]) -> Iterator[tuple[ClosedJaxpr, list[Any] | None, dict[int, int]]]:
    """The inner programs with the values of their inputs, and the places of these from those of operands."""
    found = inside(eqn)
    if isinstance(found, Loop):
        carried = found.stacked
        rows = [x[-1 if found.reverse else 0] for x in operands[carried:]] if found.length else []
        yield found.body, [*operands[:carried], *rows] if found.length else None, {j: j for j in range(carried)}
    elif isinstance(found, Branches):
        for program in found.programs:
            yield program, [*operands[1:]], {j: j - 1 for j in range(1, len(operands))}
    else:
        for program in programs_in(eqn):
            yield program, None, {}


def _needed(eqn: Equation, inner: ClosedJaxpr, wanted: list[bool]) -> list[bool]:
    """The results of an inner program that the wanted results of the equation need."""
    found = inside(eqn)
    if len(inner.out_avals) != len(wanted):
        return [True] * len(inner.out_avals)
    while isinstance(found, Loop):
        used = without_unused(inner, wanted)[1][found.consts : found.stacked]
        more = [a or b for a, b in zip(wanted, [*used, *[False] * len(wanted)], strict=False)]
        if more == wanted:
            break
        wanted = more
    return wanted


def _ends(
    program: Program, outs: Collection[int], leaf_of: Mapping[int, int], frozen_elements: Mapping[int, Any]
) -> list[int]:
    """The values of a backward pass that other operations read, of the shapes of parameters with frozen elements."""
    made, read = set(), {*outs}
    for eqn in live(program.eqns, outs):
        if is_backward(eqn) or contains_backward(eqn):
            made.update(eqn.outputs)
        if not is_backward(eqn):
            read |= eqn.reads
    shapes = {program.avals[m].shape for m, i in leaf_of.items() if i in frozen_elements}
    shapes |= {np.shape(elements) for elements in frozen_elements.values()}
    avals = program.avals
    return [n for n in sorted(made & read) if is_inexact(avals[n]) and {avals[n].shape, avals[n].shape[1:]} & shapes]


def _is_mixed(program: Program, n: int, outs: Collection[int]) -> bool:
    """Whether something else than a sum of gradients is computed from a value."""
    after = reached_from(program, n)
    return any(out in after and program.avals[out].shape != program.avals[n].shape for out in outs)


def reached_from(program: Program, *numbers: int) -> set[int]:
    """The values that are computed from others."""
    return {m for m, mark in reached(program, dict.fromkeys(numbers, 2)).items() if mark & 2}


def _later(eqn: Equation, inner: ClosedJaxpr, places: set[int]) -> set[int]:
    """The results of an equation that depend on these results of its inner program, in later steps, too."""
    found = inside(eqn)
    while isinstance(found, Loop):
        carried = range(found.consts, found.stacked)
        marks = [j in carried and j - found.consts in places for j in range(len(inner.in_avals))]
        more = places | {k for k, depends in enumerate(depends_on(inner.jaxpr, marks)) if depends}
        if more == places:
            break
        places = more
    return {eqn.outputs[k] for k in places}
