"""What a loop or a branch stores for a later one is computed again, if cheap operations give it.

JAX stores what the backward pass of a ``scan`` reads, also a weight that each step casts: a copy of the whole stack.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_freeze._jax_internals import (
    Branches,
    ClosedJaxpr,
    Loop,
    Others,
    evaluate_program,
    inside,
    params_of,
    primitives,
    programs_in,
    without_unused,
)
from optax_freeze._program.decisions import decisive
from optax_freeze._program.operations import is_cheap
from optax_freeze._program.trace import Equation, Program, flatten


def program_of(closed: ClosedJaxpr, enter_remat: bool = True) -> Program:
    """The operations of a jaxpr, as :func:`flatten` lists them; those of a gradient compute such values again."""
    program = flatten(closed, enter_remat)
    if not enter_remat:
        return program
    made_by: dict[int, tuple[Equation, int]] = {}
    decides = decisive(program)
    for k, eqn in enumerate(program.eqns):
        found = inside(eqn)
        if isinstance(found, Branches) or (isinstance(found, Loop) and found.length):
            stored = {i: made_by[x] for i, x in enumerate(eqn.inputs) if isinstance(x, int) and x in made_by}
            again = {i: _again(program, eqn, i, *maker, eqn.inputs[i] in decides) for i, maker in stored.items()}
            program.eqns[k] = _with(eqn, {i: each for i, each in again.items() if each is not None})
            made_by.update({n: (eqn, result) for result, n in enumerate(eqn.outputs)})
    return program


class _Again(NamedTuple):
    """How the step of a loop, or each branch, computes an operand from others."""

    programs: list[ClosedJaxpr]
    reads: list[list[int]]  # which operands each program reads
    operands: dict[int, tuple[Any, Any, Any]]  # values, their types, and those in one step
    consts: int  # operands from this number on are stacked


def _places(eqn: Equation) -> tuple[int, int, int]:
    """How many operands the programs of a loop or a branch lack; the place of the first carried and stacked operand."""
    found = inside(eqn)
    return (0, found.consts, found.stacked) if isinstance(found, Loop) else (1, len(eqn.inputs), len(eqn.inputs))


def _again(program: Program, eqn: Equation, place: int, maker: Equation, result: int, decides: bool) -> _Again | None:
    """How an equation computes its operand at ``place``, which is a result of another one, if it can.

    What decides, or is decided, from a value that the other one computes is not computed again.
    """
    lacks, consts, last = _places(maker)
    # All steps compute a carried result, one after the other: no step of another loop can do that.
    if maker.primitive is not eqn.primitive or result < last - consts:
        return None
    if maker.inputs[0] != eqn.inputs[0] if lacks else place < _places(eqn)[2]:
        return None
    again = _Again([], [], {}, consts)
    for closed in programs_in(maker):
        needed, used = without_unused(closed, [n == result for n in range(len(maker.outputs))])
        again.programs.append(needed)
        again.reads.append((np.flatnonzero(used) + lacks).tolist())
        for i in again.reads[-1]:
            value, aval = maker.inputs[i], maker.avals_in[i]
            if consts <= i < last:
                counts = _counts(maker, i)
                if counts is None:
                    return None
                aval = jax.typeof(counts)
                value = program.add(aval)
                program.consts[value] = counts
            again.operands[i] = value, aval, closed.jaxpr.invars[i - lacks].aval
    programs = [flatten(closed) for closed in again.programs]
    for each in programs:
        computed = {n for eqn in each.eqns for n in eqn.outputs}
        if not computed.isdisjoint(decisive(each, each.outputs if decides else ())):
            return None
    is_cheap = all(is_repeated(each) for program in programs for each in program.eqns)
    return again if is_cheap and (lacks or any(i >= consts for i in again.operands)) else None


def _with(eqn: Equation, again: Mapping[int, _Again]) -> Equation:
    """The equation that computes some of its operands itself."""
    if not again:
        return eqn
    bodies, (lacks, consts, _) = programs_in(eqn), _places(eqn)
    types = [var.aval for var in bodies[0].jaxpr.invars]
    own = dict(enumerate(zip(eqn.inputs[lacks:], eqn.avals_in[lacks:], types, strict=True), lacks))
    new = {(p, i): operand for p, each in again.items() for i, operand in each.operands.items()}
    first = {(p, i): operand for (p, i), operand in new.items() if i < again[p].consts}
    operands = first | {p: operand for p, operand in own.items() if p not in again} | new

    def body(n: int) -> ClosedJaxpr:
        def computing(*given: Any) -> list[Any]:
            found = dict(zip(operands, given, strict=True))
            for p, each in again.items():
                [found[p]] = evaluate_program(each.programs[n], *(found[p, i] for i in each.reads[n]))
            return evaluate_program(bodies[n], *(found[p] for p in own))

        return jax.make_jaxpr(computing)(*(of_step for *_, of_step in operands.values()))

    found = inside(eqn)
    if isinstance(found, Loop):
        found = found._replace(body=body(0), consts=consts + len(first))
    else:
        assert isinstance(found, Branches)
        found = found._replace(programs=[*map(body, range(len(bodies)))])
    params = params_of(found)
    values, avals, _ = zip(*operands.values(), strict=True)
    return eqn._replace(params=params, inputs=(*eqn.inputs[:lacks], *values), avals_in=(*eqn.avals_in[:lacks], *avals))


def _counts(eqn: Equation, place: int) -> np.ndarray | None:
    """The values in each step of a carried integer that counts the steps; sums of floats are rounded in each step."""
    loop = inside(eqn)
    assert isinstance(loop, Loop)
    body = flatten(loop.body)
    begin, end = eqn.inputs[place], body.outputs[place - loop.consts]
    add = next((each for each in body.eqns if end in each.outputs), eqn)
    sign, numbers = {jax.lax.add_p: 1, jax.lax.sub_p: -1}.get(add.primitive), (begin, *add.inputs[1:])
    dtype, shape = body.avals[place].dtype, body.avals[place].shape
    if sign is None or add.inputs[0] != place or shape or any(isinstance(x, int) for x in numbers):
        return None
    if dtype.kind not in "iu":
        return None
    first, by = (np.array(int(x) % 2**64, np.uint64) for x in (begin.val, sign * int(add.inputs[1].val)))
    steps = np.arange(loop.length, dtype=np.uint64)[:: -1 if loop.reverse else 1]
    return (first + by * steps).astype(dtype)  # wraps around as in each step


def is_repeated(eqn: Equation) -> bool:
    """Whether an operation may be repeated where its results are read, with the programs that it has."""
    found = inside(eqn)
    if eqn.has_effects or found is None or isinstance(found, Others):
        return is_cheap(eqn) and not eqn.has_effects
    is_branch = isinstance(found, Branches) and not found.by_platform
    is_open = is_branch or isinstance(found, Loop) or eqn.primitive is primitives.custom_jvp_call_p
    return is_open and all(is_repeated(each) for closed in programs_in(eqn) for each in flatten(closed).eqns)
