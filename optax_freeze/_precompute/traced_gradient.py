"""Traces a function together with its gradient, where its program alone cannot be differentiated.

A ``jax.custom_vjp`` or ``custom_jvp`` that closes over an argument of the loss, or over what is computed from it, holds
a tracer that means nothing once the loss is traced. So its gradient is traced from Python, and divided like the loss.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple, NoReturn

import jax
from jax.core import Tracer

from optax_freeze._errors import value_error
from optax_freeze._gradient.gradient_program import GradientProgram
from optax_freeze._gradient.unknown_derivative import without_gradient
from optax_freeze._jax_internals import ClosedJaxpr, closed_over, programs_in
from optax_freeze._precompute.inputs import Input
from optax_freeze._program.regions import EVERYTHING, Region, Rows, Values
from optax_freeze._program.tasks import Schedule
from optax_freeze._program.trace import Equation, Program, flatten, is_inexact
from optax_freeze._program.traced_function import Traced, as_array, as_traced
from optax_freeze._spec.sharding import zeros

COTANGENT = "a cotangent of the result"


class Gradient(NamedTuple):
    """The gradient that the program of a function computes, too.

    Attributes:
      function: the call of a ``jax.custom_vjp`` or ``custom_jvp`` that holds tracers.
      leaves: the inputs of which the program computes gradients, its last outputs; none if it cannot.
      cotangents: the inputs that are cotangents of the results of the function.
      is_last: whether also the program of the gradient holds tracers, so that it has no derivative.
    """

    function: str
    leaves: Sequence[int]
    cotangents: range
    is_last: bool

    def call(self, schedule: Schedule, values: Values, inputs: Sequence[Input]) -> list[Any]:
        """The outputs of the program, without gradients, of which the last tasks compute the derivative."""
        program = GradientProgram(schedule, len(schedule.outputs) - len(self.leaves), self.cotangents)
        given, arrays = [], []  # functions that JAX keeps do not close over arrays
        for number, region, array in values.arrays():
            given.append((number, region))
            arrays.append(array)
        trains = [number in self.leaves for number, _ in given]

        def backward(residuals: Any, cotangents: Sequence[Any]) -> Any:
            keys = [*given, *((number, EVERYTHING) for number in self.cotangents)]
            inexact = [ct for ct in cotangents if ct.dtype != jax.dtypes.float0]
            return program.backward(_filled(keys, [*residuals[: len(given)], *inexact]), residuals[len(given) :])

        def forward(arrays: Sequence[Any]) -> Any:
            found, kept = program.forward(_filled(given, arrays))
            return found, [*arrays, *kept]

        def of_leaves(residuals: Any, cotangents: Sequence[Any]) -> Any:
            cotangents = [ct if hasattr(ct, "dtype") else as_array(ct) for ct in cotangents]  # JAX takes Python numbers
            found = self._last(backward, residuals, cotangents)
            by_number = dict(zip(self.leaves, found, strict=True))
            return ([by_number.get(number) for number, _ in given],)

        call = jax.custom_vjp(lambda arrays: forward(arrays)[0])
        call.defvjp(functools.partial(self._last, forward), of_leaves)
        others = [i for i, here in enumerate(trains) if not here and is_inexact(arrays[i])]
        names = [inputs[given[i][0]].name if given[i][0] < len(inputs) else "a value from outside" for i in others]
        found = call([x if here else jax.lax.stop_gradient(x) for x, here in zip(arrays, trains, strict=True)])
        refuse = [functools.partial(self._refuse, f"a gradient with respect to {name}") for name in names]
        return without_gradient(found, [arrays[i] for i in others], refuse, in_part=False)

    def _last(self, fun: Callable[..., Any], *args: Any) -> Any:
        """``fun(*args)``, of which there is no derivative if the program holds tracers."""
        if not self.is_last:
            return fun(*args)
        arrays = [x for x in jax.tree.leaves(args) if is_inexact(x)]
        outs, treedef = jax.tree.flatten(fun(*jax.lax.stop_gradient(args)))
        refuse = [functools.partial(self._refuse, "a second derivative")] * len(arrays)
        return jax.tree.unflatten(treedef, without_gradient(outs, arrays, refuse, in_part=False))

    def _refuse(self, got: str) -> NoReturn:
        raise value_error(
            "a function with a custom derivative closes over an argument of the function, or what is computed from it",
            at=self.function,
            got=f"{got}, of `after`",
            expected="a gradient with respect to trainable leaves, none of them frozen by rows or closed over",
            fix="pass the value to the jax.custom_vjp or custom_jvp function as an argument",
        )


def _filled(keys: Sequence[tuple[int, Region]], arrays: Sequence[Any]) -> Values:
    values = Values()
    for key, array in zip(keys, arrays, strict=True):
        values.write(*key, array)
    return values


def with_gradient(
    fun: Callable[..., Any], inputs: Sequence[Input], trace: Callable[[Callable[..., Any], Sequence[Any]], Traced]
) -> tuple[Traced, list[Input], Gradient | None]:
    """The program of a function, with its gradient only if it has to be traced from Python; and the inputs of it."""
    structs = [given.struct for given in inputs]
    traced = trace(fun, structs)
    held = _held(traced.program)
    # Those that are the same in another trace are of an enclosing one.
    others = _held(trace(fun, structs).program) if held else {}
    own = [function for key, (_, function) in held.items() if key not in others]
    if not own:
        return traced, list(inputs), None
    types = traced.closed.in_avals
    leaves = [i for i, x in enumerate(inputs) if x.leaf is not None and x.why and is_inexact(types[i])]
    avals = [aval for aval in traced.closed.out_avals if is_inexact(aval)]
    with_cotangents = [*inputs, *(Input(jax.ShapeDtypeStruct(x.shape, x.dtype), COTANGENT, COTANGENT) for x in avals)]

    def value_and_grads(*given: Any) -> Any:
        arrays, cotangents = list(given[: len(inputs)]), list(given[len(inputs) :])

        def of_leaves(some: Sequence[Any]) -> Any:
            filled = dict(zip(leaves, some, strict=True))
            out = fun(*(filled.get(i, x) for i, x in enumerate(arrays)))
            return [x for x in jax.tree.leaves(out) if isinstance(x, Tracer) and is_inexact(x)], out

        _, vjp, out = jax.vjp(of_leaves, [arrays[i] for i in leaves], has_aux=True)
        return out, as_traced(vjp(cotangents)[0])

    if not any(isinstance(x.trainable, Rows) for x in inputs):
        known = {id(x) for x in tracers_in(traced.closed)} | others.keys()
        try:
            found = trace(value_and_grads, [given.struct for given in with_cotangents])
        except Exception:  # it closes over a leaf that trains, or has no derivative
            found = None
        if found is not None and all(id(x) in known for x in tracers_in(found.closed)):
            cotangents = range(len(inputs), len(with_cotangents))
            is_last = not known.issuperset(_held(found.program))
            return found, with_cotangents, Gradient(own[0], leaves, cotangents, is_last)
    return traced, list(inputs), Gradient(own[0], (), range(0), is_last=True)


def tracers_in(closed: ClosedJaxpr) -> Iterator[Tracer]:
    """The constants of a program, and of those in it, that are tracers."""
    yield from (const for const in closed.consts if isinstance(const, Tracer))
    for eqn in closed.jaxpr.eqns:
        for inner in programs_in(eqn):
            yield from tracers_in(inner)


def _held(program: Program) -> dict[int, tuple[Tracer, str]]:
    """The tracers that custom derivatives of a program hold, by their ids, and the calls of these."""
    calls = [*_custom_derivatives(program)]
    if _tracers_in_vjp(*calls) == []:
        return {}
    return {id(x): (x, str(eqn)) for eqn in calls for x in _tracers_in_vjp(eqn) or ()}


def _custom_derivatives(program: Program) -> Iterator[Equation]:
    for eqn in program.eqns:
        if closed_over(eqn) is not None:
            yield eqn
        for inner in programs_in(eqn):
            yield from _custom_derivatives(flatten(inner, enter_placed=True))


def _tracers_in_vjp(*eqns: Equation) -> Sequence[Tracer] | None:
    """The tracers that the derivatives of operations read; None if one of these has no derivative."""
    arrays = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in eqn.avals_in] for eqn in eqns]
    places = [
        [is_inexact(x) and i >= (closed_over(eqn) or 0) for i, x in enumerate(its)]
        for eqn, its in zip(eqns, arrays, strict=True)
    ]

    def vjp(*operands: Any) -> Any:
        given = jax.tree.unflatten(jax.tree.structure(arrays), operands)
        each = [*zip(eqns, given, places, strict=True)]

        def of_some(some: Sequence[Any]) -> list[Any]:
            left = iter(some)
            filled = (
                (eqn, [next(left) if t else x for x, t in zip(its, trains, strict=True)]) for eqn, its, trains in each
            )
            return [out for eqn, its in filled for out in eqn.bind_all(*its) if is_inexact(out)]

        outs, pull = jax.vjp(of_some, [x for _, its, trains in each for x in compress(its, trains)])
        return pull([zeros(jax.typeof(out)) for out in outs])

    try:
        return [*tracers_in(jax.make_jaxpr(vjp)(*jax.tree.leaves(arrays)))]
    except Exception:
        return None
