"""What a loop or a branch stores for a later one is computed again, if cheap operations give it.

JAX stores what the backward pass of a ``scan`` reads, also a weight that each step casts: a copy of the whole stack.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from optax_freeze._program.late import is_repeated
from optax_freeze._program.trace import Equation, Program, flatten, scan_counts


class _Operand(NamedTuple):
    """An operand of a loop or a branch: its value, its type, and its type in one step."""

    value: Any
    aval: Any
    of_step: Any
    stacked: bool = False


class _Again(NamedTuple):
    """A result of a loop or a branch as the function of a step, or of each branch, of some operands."""

    programs: list[ClosedJaxpr]
    operands: dict[int, _Operand]  # by their places
    used: list[list[int]]  # the operands of each program


def computed_again(program: Program) -> Program:
    """The program, of which loops and branches compute such values themselves."""
    program = program.copy(consts=dict(program.consts), eqns=list(program.eqns))
    made_by: dict[int, tuple[Equation, int]] = {}
    for k, eqn in enumerate(program.eqns):
        if eqn.primitive.name in ("scan", "cond"):
            found = {
                place: made_by[value]
                for place, value in enumerate(eqn.inputs)
                if isinstance(value, int) and value in made_by
            }
            again = {place: _again(program, eqn, place, *maker) for place, maker in found.items()}
            program.eqns[k] = _with(eqn, {place: each for place, each in again.items() if each is not None})
            made_by.update({n: (eqn, result) for result, n in enumerate(eqn.outputs)})
    return program


def _again(program: Program, eqn: Equation, place: int, maker: Equation, result: int) -> _Again | None:
    """How an equation can compute its operand at ``place``, which is a result of another one."""
    is_loop, consts, carried = eqn.primitive.name == "scan", len(maker.inputs), 0
    if maker.primitive is not eqn.primitive:
        return None
    if is_loop:
        consts, carried = scan_counts(maker.params)
    if result < carried or (place < sum(scan_counts(eqn.params)) if is_loop else maker.inputs[0] != eqn.inputs[0]):
        return None
    again, first = _Again([], {}, []), 0 if is_loop else 1
    for closed in [maker.params["jaxpr"]] if is_loop else maker.params["branches"]:
        jaxpr, used = dce_jaxpr(closed.jaxpr, [n == result for n in range(len(maker.outputs))])
        again.programs.append(ClosedJaxpr(jaxpr, closed.consts))
        again.used.append((np.flatnonzero(used) + first).tolist())
        if not all(map(is_repeated, flatten(again.programs[-1]).eqns)):
            return None
        for i in again.used[-1]:
            value, aval = maker.inputs[i], maker.avals_in[i]
            if consts <= i < consts + carried:
                counts = _counts(maker, i)
                if counts is None:
                    return None
                aval = jax.typeof(counts)
                value = program.add(aval)
                program.consts[value] = counts
            again.operands[i] = _Operand(value, aval, closed.jaxpr.invars[i - first].aval, i >= consts)
    return again if not is_loop or any(operand.stacked for operand in again.operands.values()) else None


def _with(eqn: Equation, again: Mapping[int, _Again]) -> Equation:
    """The equation that computes some of its operands itself."""
    if not again:
        return eqn
    is_loop = eqn.primitive.name == "scan"
    first = [] if is_loop else [0]
    bodies = [eqn.params["jaxpr"]] if is_loop else eqn.params["branches"]
    of_step = [*first, *(var.aval for var in bodies[0].jaxpr.invars)]
    own = {p: _Operand(*each) for p, each in enumerate(zip(eqn.inputs, eqn.avals_in, of_step, strict=True))}
    new = {(p, i): operand for p, each in again.items() for i, operand in each.operands.items()}
    kept = {p: operand for p, operand in own.items() if p not in again}
    before = {key: operand for key, operand in new.items() if is_loop and not operand.stacked}
    operands = {**before, **kept, **{key: operand for key, operand in new.items() if key not in before}}
    keys = [key for key in operands if is_loop or key != 0]

    def body(n: int) -> ClosedJaxpr:
        def computing(*given: Any) -> list[Any]:
            found = dict(zip(keys, given, strict=True))
            for p, each in again.items():
                [found[p]] = jaxpr_as_fun(each.programs[n])(*(found[p, i] for i in each.used[n]))
            return jaxpr_as_fun(bodies[n])(*(found[p] for p in own if is_loop or p != 0))

        return jax.make_jaxpr(computing)(*(operands[key].of_step for key in keys))

    if is_loop:
        consts, carried = scan_counts(eqn.params)
        params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        params |= {"jaxpr": body(0), "num_consts": consts + len(before), "num_carry": carried}
    else:
        params = {**eqn.params, "branches": tuple(map(body, range(len(bodies))))}
    values, avals, *_ = zip(*operands.values(), strict=True)
    return eqn._replace(params=params, inputs=values, avals_in=avals)


def _counts(eqn: Equation, place: int) -> np.ndarray | None:
    """The values in each step of a carried number that counts the steps."""
    body, consts = flatten(eqn.params["jaxpr"]), scan_counts(eqn.params)[0]
    begin, end = eqn.inputs[place], body.outputs[place - consts]
    for add in body.eqns:
        sign = {"add": 1, "sub": -1}.get(add.primitive.name)
        if end not in add.outputs or sign is None or add.inputs[0] != place or body.avals[place].shape:
            continue
        if not isinstance(begin, int) and not isinstance(add.inputs[1], int):
            steps = np.arange(eqn.params["length"])[:: -1 if eqn.params["reverse"] else 1]
            return (begin.val + sign * add.inputs[1].val * steps).astype(body.avals[place].dtype)
    return None
