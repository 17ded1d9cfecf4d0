"""Gradients of frozen parameters in loops and branches, and which of their results read them.

A branch, the first step of a loop, and what a ``shard_map`` applies to a shard, are programs of their own, which are
read as that of a training step is. What a ``while_loop`` computes is not known.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from optax_freeze._audit.backward import is_around_backward, values_of_backward
from optax_freeze._audit.evaluation import Within, array_of, compiled, evaluate, first_shard, live, on_each_device
from optax_freeze._audit.gradient_owners import Owners
from optax_freeze._audit.reactions import CHANGES
from optax_freeze._audit.readers import Readers
from optax_freeze._jax_internals import (
    Branches,
    ClosedJaxpr,
    Loop,
    Mapped,
    inside,
    programs_in,
    without_unused,
    without_vma,
)
from optax_freeze._program.dependence import depends_on, reached
from optax_freeze._program.trace import Equation, Program, flatten, is_inexact


class Frozen(NamedTuple):
    """A value that is computed from a frozen parameter alone, and where it is frozen, which may be broadcast."""

    leaf: int
    shape: tuple[int, ...]
    elements: np.ndarray

    def row(self, k: int) -> "Frozen":
        """One row along the first axis."""
        elements = np.broadcast_to(self.elements, self.shape)[k] if self.elements.ndim else self.elements
        return Frozen(self.leaf, self.shape[1:], elements)


AllFrozen: TypeAlias = Mapping[int, Frozen]
"""By the numbers of values."""


class InnerGradients(NamedTuple):
    """What is known of an equation that contains a backward pass.

    Attributes:
      found: for each gradient of a frozen parameter this parameter, and for each change the results that differ.
      unknown: whether there may be others.
      scalars: for results of a loop that may be sums of gradients the scalars in its body whose gradients they may be.
    """

    eqn: Equation
    found: list[tuple[int, list[set[int]]]]
    unknown: bool
    scalars: dict[int, Sequence[int]]


def inner_gradients(
    program: Program,
    given: Sequence[Any] | None,
    frozen: AllFrozen,
    wanted: Collection[int],
    within: Within | None = None,
) -> Iterator[InnerGradients]:
    """Reads the loops, the branches and what each ``shard_map`` of a program applies to its shards.

    Args:
      given: the values of its inputs, if they are known.
      frozen: the inputs that are frozen parameters, at least in part.
      wanted: the results that are needed.
      within: how the program is evaluated, if a ``shard_map`` applies it.
    """
    needed = live(program.eqns, wanted)
    eqns = [eqn for eqn in needed if is_around_backward(eqn)]
    read = sorted({n for eqn in eqns for n in eqn.reads})

    def values(inputs: Sequence[Any]) -> list[Any]:
        env = {**program.consts, **dict(enumerate(inputs))}
        evaluate(live(program.eqns, read), env)
        return [env[n] for n in read]

    env = dict(zip(read, compiled(values, within)(given), strict=True)) if eqns and given is not None else None
    computed = _computed_from(program, frozen) if eqns else {}
    results = {n for eqn in needed for n in eqn.reads} | {*wanted}
    for eqn in eqns:
        operands = None if env is None else [env[x] if isinstance(x, int) else array_of(x) for x in eqn.inputs]
        found: list[tuple[int, list[set[int]]]] = []
        unknown, scalars, contents = False, {}, inside(eqn)
        on_shards = on_each_device(contents) if isinstance(contents, Mapped) and within is None else None
        for inner, inputs, own in _steps(eqn, operands, computed):
            kept = _kept(eqn, inner, [n in results for n in eqn.outputs])
            body = flatten(inner, enter_placed=True)
            try:
                of_step, more, summed = _of_step(body, inputs, own, kept, on_shards or within)
            except Exception:
                if on_shards is None:
                    raise
                of_step, more, summed = _of_step(body, None, own, kept)  # it depends on what each device has
            later = functools.cache(functools.partial(_later, eqn, inner))
            found += [(i, [later(frozenset(places)) for places in changed]) for i, changed in of_step]
            unknown |= more
            scalars |= {eqn.outputs[k]: each for k, each in summed.items()} if isinstance(contents, Loop) else {}
        yield InnerGradients(eqn, found, unknown, scalars)


def _computed_from(program: Program, frozen: AllFrozen) -> dict[int, Frozen]:
    """The values that are computed from frozen parameters alone, such as their cast."""
    whole = [n for n, each in frozen.items() if not each.elements.ndim]
    bits = {n: 4 << k for k, n in enumerate(whole)}
    marks = reached(program, {n: bits.get(n, 2) for n in range(program.num_inputs)})
    found = {}
    for n, mark in marks.items():
        if not mark & 3:  # no side effect, and no other input
            first = whole[((mark >> 2) & -(mark >> 2)).bit_length() - 1]
            found[n] = frozen[first]._replace(shape=getattr(program.avals[n], "shape", ()))
    return found | {**frozen}


def _steps(
    eqn: Equation, operands: Sequence[Any] | None, frozen: AllFrozen
) -> Iterator[tuple[ClosedJaxpr, Sequence[Any] | None, AllFrozen]]:
    """The inner programs, with the values of their inputs and those that are frozen."""
    found = inside(eqn)
    own = {j: frozen[x] for j, x in enumerate(eqn.inputs) if isinstance(x, int) and x in frozen}
    if isinstance(found, Loop) and found.length:
        start, first = found.stacked, -1 if found.reverse else 0
        inputs = None if operands is None else [*operands[:start], *(x[first] for x in operands[start:])]
        yield found.body, inputs, {j: each.row(first) if j >= start else each for j, each in own.items()}
    elif isinstance(found, Branches):
        inputs = None if operands is None else operands[1:]
        yield from ((program, inputs, {j - 1: each for j, each in own.items()}) for program in found.programs)
    else:
        for program in programs_in(eqn):
            parts, inputs = {}, None
            if isinstance(found, Mapped):
                shapes = [aval.shape for aval in program.in_avals]
                parts = {j: each._replace(shape=shapes[j]) for j, each in own.items()}
                is_cut = any(each.elements.ndim and each.shape != shapes[j] for j, each in own.items())
                if operands is not None and not is_cut:
                    is_here = all(getattr(x, "is_fully_addressable", True) for x in operands)
                    inputs = [*map(first_shard, operands, shapes)] if is_here else None
            yield program, inputs, parts | {-1 - j: each for j, each in own.items()}


def _kept(eqn: Equation, inner: ClosedJaxpr, wanted: list[bool]) -> list[bool]:
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


def _of_step(
    program: Program,
    given: Sequence[Any] | None,
    frozen: AllFrozen,
    kept: Sequence[bool],
    within: Within | None = None,
) -> tuple[list[tuple[int, list[set[int]]]], bool, dict[int, Sequence[int]]]:
    """As :class:`InnerGradients` has them, with the places of results."""
    if within is not None:
        program = program._replace(eqns=[*map(without_vma, program.eqns)])
    outs = {n: k for k, n in enumerate(program.outputs) if kept[k] and isinstance(n, int)}
    inside_of_it = [*inner_gradients(program, given, frozen, outs, within)]
    avals, shapes = program.avals, {each.shape for each in frozen.values()}
    is_alike = lambda n: is_inexact(avals[n]) and bool({avals[n].shape, avals[n].shape[1:]} & shapes)  # noqa: E731
    ends = [n for n in values_of_backward(program, outs).ends if is_alike(n)]
    owned: dict[int, int] = {}
    scalars: dict[int, Sequence[int]] = {}
    if ends and given is not None:
        in_loops = {n: each for inner in inside_of_it for n, each in inner.scalars.items()}
        owners = Owners(program, given, frozen, in_loops, within)
        found_owners = owners.find(ends, filter(is_alike, outs))
        owned = {n: min(found_owners[n]) for n in ends if len(found_owners.get(n, ())) == 1}
        decided = [*dict.fromkeys(owners.scalars.values())] or owners.in_body()
        scalars = {k: decided for n, k in outs.items() if n in owners.undecided}
        scalars |= {k: [owners.scalars[n]] for n, k in outs.items() if n in owners.scalars}
    found = []
    judged = {n for inner in inside_of_it if not inner.unknown for n in inner.eqn.outputs}
    unknown = any(_is_mixed(program, n, outs) for n in {*ends} - {*owned} - judged)
    own = {n: frozen[m] for n, m in owned.items() if m in frozen}
    if own and given is not None:
        changing = reached_from(program, *own)
        after = [out for out in outs if out in changing]
        elements = {n: each.elements for n, each in own.items()}
        counts = Readers(program, elements, after, [np.asarray(False)] * len(after), within).counts(given)
        changes = range(len(CHANGES[:4]))
        for n, each in own.items() if counts([*own], changes).any() else ():
            differ = np.any(counts([n], changes), axis=-1)
            found.append((each.leaf, [{outs[out] for out in compress(after, row)} for row in differ]))
    for inner in inside_of_it:
        unknown |= inner.unknown
        for i, changed in inner.found:
            after = [reached_from(program, *(numbers - {*own})) for numbers in changed]
            found.append((i, [{k for out, k in outs.items() if out in each} for each in after]))
    return found, unknown, scalars


def _is_mixed(program: Program, n: int, outs: Collection[int]) -> bool:
    """Whether something else than a sum of gradients is computed from a value."""
    after = reached_from(program, n)
    return any(out in after and program.avals[out].shape != program.avals[n].shape for out in outs)


def reached_from(program: Program, *numbers: int) -> set[int]:
    """The values that are computed from others, and these."""
    return {m for m, mark in reached(program, dict.fromkeys(numbers, 2)).items() if mark & 2}


def _later(eqn: Equation, inner: ClosedJaxpr, places: frozenset[int]) -> set[int]:
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
