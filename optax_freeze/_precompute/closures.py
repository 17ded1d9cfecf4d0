"""Refuses custom derivatives that hold traced values, which mean nothing once the function has been traced.

A ``jax.custom_vjp`` or ``custom_jvp`` that closes over an argument of the loss, or over what is computed from it, holds
a tracer. JAX differentiates it while it traces the loss; here the traced program is divided, and differentiated later.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import jax
from jax.core import Tracer

from optax_freeze._errors import value_error
from optax_freeze._jax_internals import ClosedJaxpr, closed_over, programs_in
from optax_freeze._program.dependence import dependent
from optax_freeze._program.trace import Equation, Program, flatten, is_inexact
from optax_freeze._spec.sharding import in_mesh_of_type, sharding_in, zeros


def refuse_closures(program: Program, trains: Sequence[int], again: Callable[[], Program]) -> None:
    """Raises ``ValueError`` if a derivative with respect to inputs that train holds tracers of this trace.

    Those that are the same when the function is traced ``again`` are of an enclosing trace.
    """
    held = _held(program, trains)
    others = _held(again(), trains) if held else {}
    for key, (_, function) in held.items():
        if key not in others:
            raise value_error(
                "a custom derivative closes over an argument of the function, or what is computed from it",
                at=function,
                got="a derivative that holds traced values, which fz.precompute cannot differentiate later",
                expected="a derivative that reads the arguments of its function alone",
                fix="pass the value to the jax.custom_vjp or custom_jvp function as an argument",
            )


def tracers_in(closed: ClosedJaxpr) -> Iterator[Tracer]:
    """The constants of a program, and of those in it, that are tracers."""
    yield from (const for const in closed.consts if isinstance(const, Tracer))
    for eqn in closed.jaxpr.eqns:
        for inner in programs_in(eqn):
            yield from tracers_in(inner)


def _held(program: Program, trains: Sequence[int]) -> dict[int, tuple[Tracer, str]]:
    """The tracers that custom derivatives of a program hold, by their ids, and the calls of these."""
    depends = dependent(program, trains)
    calls = [call for eqn in program.eqns if not depends.isdisjoint(eqn.outputs) for call in _custom_derivatives([eqn])]
    if _tracers_in_vjp(calls) == []:  # asked at once, since most programs have many and hold none
        return {}
    return {id(x): (x, str(eqn)) for eqn in calls for x in _tracers_in_vjp([eqn]) or ()}


def _custom_derivatives(eqns: Sequence[Equation]) -> Iterator[Equation]:
    for eqn in eqns:
        if closed_over(eqn) is not None:
            yield eqn
        for inner in programs_in(eqn):
            yield from _custom_derivatives(flatten(inner, enter_placed=True).eqns)


def _tracers_in_vjp(eqns: Sequence[Equation]) -> Sequence[Tracer] | None:
    """The tracers that the derivatives of operations read; None if one of these has no derivative."""
    arrays = [[jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_in(x)) for x in eqn.avals_in] for eqn in eqns]
    places = [
        [is_inexact(x) and i >= (closed_over(eqn) or 0) for i, x in enumerate(its)]
        for eqn, its in zip(eqns, arrays, strict=True)
    ]

    def bound(eqn: Equation, operands: Sequence[Any]) -> list[Any]:
        with eqn.source.scope():
            return eqn.bind_all(*map(in_mesh_of_type, operands, eqn.avals_in))

    def vjp(operands: Sequence[Sequence[Any]]) -> Any:
        each = [*zip(eqns, operands, places, strict=True)]

        def of_some(some: Sequence[Any]) -> list[Any]:
            left = iter(some)
            filled = (
                (eqn, [next(left) if t else x for x, t in zip(its, trains, strict=True)]) for eqn, its, trains in each
            )
            return [out for eqn, its in filled for out in bound(eqn, its) if is_inexact(out)]

        outs, pull = jax.vjp(of_some, [x for _, its, trains in each for x in compress(its, trains)])
        return pull([zeros(jax.typeof(out)) for out in outs])

    try:
        return [*tracers_in(jax.make_jaxpr(vjp)(arrays))]
    except Exception:
        return None
