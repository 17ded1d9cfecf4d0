"""A program evaluated with some of its values in two parts, as long as its operations allow.

The usual interpreter of a jaxpr, but that an operation with a :class:`~optax_freeze._split.Split` among its operands is
done by its rule, and without a rule gets the arrays merged. ``jit`` and ``remat`` are entered and stay what they are. A
``scan`` over the rows becomes one scan for each stretch of rows: those of frozen rows read them by their number, so that
nothing is copied and, before the first row that trains, nothing is differentiated.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.source_info_util import current, current_name_stack, user_context

from optax_freeze._rules import rule_of
from optax_freeze._split import Frozen, Split, dense, numbers, segments

_MOST_SEGMENTS = 32


def call(fun: Callable[..., Any], leaves: Sequence[Split], frozen: Sequence[Any] = ()) -> Any:
    """``fun`` of leaves in two parts, itself called once and with tracers in their place.

    What is concrete stays so, as under ``jax.grad``: other arguments are closed over, and outside of ``jit`` what is
    computed from them alone is computed at once. Where ``fun`` needs the value of a leaf, it gets the merged arrays.

    Args:
      fun: of as many arrays; may return anything.
      leaves: the arrays.
      frozen: arrays that ``fun`` closes over and that are never differentiated.
    """
    structure: list[Any] = []

    def traced(*arrays: Any) -> list[Any]:
        flat, treedef = jax.tree.flatten(fun(*arrays))
        outs = [x for x in flat if isinstance(x, Tracer)]
        structure[:] = treedef, [_TRACED if isinstance(x, Tracer) else x for x in flat]
        return outs

    eager = not isinstance(jnp.zeros(()), Tracer)
    try:
        with jax.ensure_compile_time_eval() if eager else contextlib.nullcontext():
            closed = jax.make_jaxpr(traced)(*(leaf.frozen for leaf in leaves))
    except _NEEDS_VALUES:
        closed = None
    if closed is None:
        for leaf in leaves:
            leaf.note("the function needs its value", False, None)
        return fun(*(leaf.merged() for leaf in leaves))
    known = {id(array) for array in frozen}
    consts = [Frozen(const) if id(const) in known else const for const in closed.consts]
    outs = iter(evaluate(closed.jaxpr, consts, leaves))
    treedef, flat = structure
    return jax.tree.unflatten(treedef, [dense(next(outs)) if x is _TRACED else x for x in flat])


_TRACED = object()
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr, dense or in two parts."""
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, Literal)}
    kept = {v for v in jaxpr.outvars if not isinstance(v, Literal)}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for i, eqn in enumerate(jaxpr.eqns):
        name_stack = current_name_stack() + eqn.source_info.name_stack
        with user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
            outs = _apply(eqn.primitive, eqn.params, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
        for v in {v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal)} - kept:
            if last.get(v, i) <= i:
                env.pop(v, None)
    return [read(v) for v in jaxpr.outvars]


def _apply(primitive: Any, params: dict[str, Any], values: list[Any]) -> Any:
    control = CONTROL.get(primitive.name)
    if control is None:
        values = [value.read() if isinstance(value, Frozen) else value for value in values]
    splits = [value for value in values if isinstance(value, Split)]
    if splits:
        rule = control or rule_of(primitive)
        out = None if rule is None else rule(primitive, params, values)
        for split in splits:
            split.note(primitive.name, out is not None, current())
        if out is not None:
            return out
    elif control is _remat and any(isinstance(value, Frozen) and value.at is not None for value in values):
        out = _remat(primitive, params, values)
        if out is not None:
            return out
    return bind(primitive, params, [dense(value) for value in values])


def bind(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """The equation of a jaxpr itself."""
    bound = primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # JAX before 0.10 gives the functions apart
    return primitive.bind(*functions, *values, **params)


def _inline(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    closed = params["call_jaxpr"]
    return evaluate(closed, (), values) if isinstance(closed, Jaxpr) else evaluate(closed.jaxpr, closed.consts, values)


def _jit(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    closed = params["jaxpr"]
    if params.get("inline"):
        return evaluate(closed.jaxpr, closed.consts, values)
    placed = (*params["in_shardings"], *params["out_shardings"])
    if any(params["donated_invars"]) or any(type(s).__name__ != "UnspecifiedValue" for s in placed):
        return None
    return _jitted(closed, params["name"])(*values)


@functools.lru_cache(maxsize=512)
def _jitted(closed: ClosedJaxpr, name: str) -> Callable[..., list[Any]]:
    def function(*values: Any) -> list[Any]:
        return evaluate(closed.jaxpr, closed.consts, values)

    function.__name__ = function.__qualname__ = name
    return jax.jit(function)


def _remat(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    if params["differentiated"]:
        return None
    prevent_cse = params["prevent_cse"]
    prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)

    @functools.partial(jax.checkpoint, prevent_cse=prevent_cse, policy=params["policy"])
    def function(*values: Any) -> list[Any]:
        return evaluate(params["jaxpr"], (), values)

    return function(*values)


def _scan(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    closed, reverse, length = params["jaxpr"], params["reverse"], params["length"]
    first = params["num_consts"]
    second = first + params["num_carry"]
    consts = _merge_for_good(closed, values, first)
    carry, xs = [dense(value) for value in values[first:second]], list(values[second:])
    by_rows = [x for x in xs if isinstance(x, Split) and x.axis == 0]
    stretches = segments(by_rows, length) if by_rows else [(0, length)]
    if len(stretches) > _MOST_SEGMENTS or not any(isinstance(v, Split) for v in (*consts, *xs)):
        return None
    trains = [set(numbers(x.index).tolist()) if isinstance(x, Split) else set() for x in xs]
    whole = len(stretches) == 1
    ys = []
    for start, stop in stretches[::-1] if reverse else stretches:
        scanned, by_number = [], []
        for x, its_rows in zip(xs, trains, strict=True):
            by_number.append(None)
            if isinstance(x, Frozen) and not whole:
                by_number[-1] = x.read()
                scanned.append(None)
            elif not isinstance(x, Split):
                scanned.append(dense(x) if whole else jax.lax.slice_in_dim(dense(x), start, stop))
            elif x.axis:
                parts = [jax.lax.slice_in_dim(part, start, stop) for part in (x.frozen, x.rows)]
                scanned.append(x.like(*parts, axis=x.axis))
            elif start in its_rows:
                place = sum(row < start for row in its_rows)
                scanned.append(jax.lax.slice_in_dim(x.rows, place, place + stop - start))
            else:
                by_number[-1] = x.frozen
                scanned.append(None)

        def body(carry: Any, x: Any, by_number: Any = tuple(by_number)) -> Any:
            i, scanned = x
            of_xs = [
                _row(value) if frozen is None else Frozen(frozen, i)
                for value, frozen in zip(scanned, by_number, strict=True)
            ]
            outs = evaluate(closed.jaxpr, closed.consts, [*consts, *carry, *of_xs])
            outs = [dense(out) for out in outs]
            return outs[: len(carry)], outs[len(carry) :]

        i = jnp.arange(start, stop, dtype=jnp.int32) if any(b is not None for b in by_number) else None
        carry, y = jax.lax.scan(
            body, carry, (i, scanned), stop - start, reverse, max(1, min(params["unroll"], stop - start))
        )
        ys.append(y)
    ys = ys[::-1] if reverse else ys
    return [*carry, *(y[0] if whole else jnp.concatenate(y) for y in zip(*ys, strict=True))]


def _row(x: Any) -> Any:
    """What the body of a scan is given of a value in two parts: its rows are one axis further to the left there."""
    if not isinstance(x, Split):
        return x
    return x.like(x.frozen, x.rows, x.axis - 1)


def _merge_for_good(closed: ClosedJaxpr, values: Sequence[Any], count: int) -> list[Any]:
    return list(values[:count])


CONTROL: dict[str, Callable[[Any, dict[str, Any], Sequence[Any]], Any]] = {
    "call": _inline,
    "checkpoint": _remat,
    "closed_call": _inline,
    "core_call": _inline,
    "jit": _jit,
    "pjit": _jit,
    "remat": _remat,
    "remat2": _remat,
    "scan": _scan,
}
