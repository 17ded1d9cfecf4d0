"""Rows that a loop stores for a later loop are computed again, if cheap operations on the rows of its inputs give them.

JAX stores what the backward pass of a ``scan`` reads, also a weight that each step casts: a copy of the whole stack.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal, jaxpr_as_fun

from optax_freeze._program.operations import RULES
from optax_freeze._program.trace import Equation, Program, scan_counts


def computed_again(program: Program) -> Program:
    """The program, of which loops compute such rows themselves."""
    made_by = {n: (eqn, k) for eqn in program.eqns if eqn.primitive.name == "scan" for k, n in enumerate(eqn.outputs)}
    eqns = [_with_rows(eqn, made_by) if eqn.primitive.name == "scan" else eqn for eqn in program.eqns]
    return program._replace(eqns=eqns)


def _with_rows(eqn: Equation, made_by: dict[int, tuple[Equation, int]]) -> Equation:
    consts, carried = scan_counts(eqn.params)
    found = {}
    for place, value in list(enumerate(eqn.inputs))[consts + carried :]:
        maker, result = made_by.get(value, (None, 0)) if isinstance(value, int) else (None, 0)
        if maker is not None:
            rows = _Rows(maker, result)
            if rows.is_cheap:
                found[place] = rows
    if not found:
        return eqn
    kept = [i for i in range(len(eqn.inputs)) if i not in found]
    new_consts, new_xs = ([x for rows in found.values() for x in rows.operands(stacked)] for stacked in (False, True))
    body = jaxpr_as_fun(eqn.params["jaxpr"])

    def step(*operands: Any) -> list[Any]:
        own = dict(zip(kept, operands[len(new_consts) : len(operands) - len(new_xs)], strict=True))
        left = iter(operands[: len(new_consts)]), iter(operands[len(operands) - len(new_xs) :])
        for place, rows in found.items():
            own[place] = rows.compute([next(left[stacked]) for stacked in rows.stacked])
        return body(*(own[i] for i in range(len(eqn.inputs))))

    of_own = [var.aval for i, var in enumerate(eqn.params["jaxpr"].jaxpr.invars) if i not in found]
    avals = [*(aval for _, aval, _ in new_consts), *of_own, *(row for _, _, row in new_xs)]
    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    params |= {"jaxpr": jax.make_jaxpr(step)(*avals), "num_consts": consts + len(new_consts), "num_carry": carried}
    inputs = (*(x for x, *_ in new_consts), *(eqn.inputs[i] for i in kept), *(x for x, *_ in new_xs))
    avals_in = (*(a for _, a, _ in new_consts), *(eqn.avals_in[i] for i in kept), *(a for _, a, _ in new_xs))
    return eqn._replace(params=params, inputs=inputs, avals_in=avals_in)


class _Rows:
    """A stacked result of a loop, as a function of the rows and constants that the loop reads."""

    def __init__(self, eqn: Equation, result: int) -> None:
        self.eqn, jaxpr = eqn, eqn.params["jaxpr"].jaxpr
        self.consts, self.carried = scan_counts(eqn.params)
        self.out = jaxpr.outvars[result]
        made_by = {var: each for each in jaxpr.eqns for var in each.outvars}
        self.eqns: list[Any] = []
        self.places: list[int] = []
        self.is_cheap = result >= self.carried and not isinstance(self.out, Literal) and not jaxpr.constvars
        places, waiting, seen = {var: i for i, var in enumerate(jaxpr.invars)}, [self.out], set()
        while waiting and self.is_cheap:
            var = waiting.pop()
            if isinstance(var, Literal) or var in seen:
                continue
            seen.add(var)
            if var in places:
                self.places.append(places[var])
                self.is_cheap = not self.consts <= places[var] < self.consts + self.carried
            else:
                each = made_by[var]
                rule = RULES.get(each.primitive.name)
                self.is_cheap = rule is not None and rule.cheap and not each.effects and each.primitive.name != "iota"
                self.eqns.append(each)
                waiting += each.invars
        self.is_cheap = self.is_cheap and any(place >= self.consts for place in self.places)
        self.stacked = [place >= self.consts for place in self.places]
        order = {id(each): i for i, each in enumerate(jaxpr.eqns)}
        self.eqns = sorted({id(each): each for each in self.eqns}.values(), key=lambda each: order[id(each)])

    def operands(self, stacked: bool) -> list[tuple[Any, Any, Any]]:
        """The inputs of the loop that are read, their types, and those of one row."""
        invars = self.eqn.params["jaxpr"].jaxpr.invars
        pairs = zip(self.places, self.stacked, strict=True)
        return [(self.eqn.inputs[i], self.eqn.avals_in[i], invars[i].aval) for i, here in pairs if here == stacked]

    def compute(self, operands: Sequence[Any]) -> Any:
        """The row of one step."""
        invars = self.eqn.params["jaxpr"].jaxpr.invars
        env = {invars[i]: x for i, x in zip(self.places, operands, strict=True)}
        for eqn in self.eqns:
            given = [x.val if isinstance(x, Literal) else env[x] for x in eqn.invars]
            bound = eqn.primitive.get_bind_params(eqn.params)
            functions, params = bound if isinstance(bound, tuple) else ((), bound)
            with eqn.ctx.manager:
                outs = eqn.primitive.bind(*functions, *given, **params)
            env.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
        return env[self.out]
