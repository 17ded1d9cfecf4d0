"""The operations that hold programs of their own: they are entered with arrays in two parts, and stay what they are.

``jit`` and ``remat`` hand the parts on. A ``scan`` over the rows becomes one scan for each stretch of rows: that of
frozen rows reads them by their number, so that nothing is copied and, before the first row that trains, nothing is
differentiated. A function with a derivative of its own keeps it: its rule is evaluated in parts, too.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.source_info_util import current

from optax_freeze._gradient.jaxprs import is_inlined, scan_counts
from optax_freeze._gradient.split_array import Frozen, Origin, Split, dense, numbers, segments, take

Evaluate: TypeAlias = Callable[..., list[Any]]
Control: TypeAlias = Callable[[Evaluate, Any, dict[str, Any], Sequence[Any]], Any]
"""A rule as in the rooms above, that is given the interpreter, and may read a :class:`Frozen` itself."""

_JAX = os.path.join(os.path.dirname(jax.__file__), "")
_MOST_SEGMENTS = 32
"""A scan of more stretches of rows would be a large program: it takes the merged array."""


def _has(values: Sequence[Any], kind: type = Split) -> bool:
    return any(isinstance(value, kind) for value in values)


def _inline(evaluate: Evaluate, primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    if not _has(values):
        return None
    closed = params["call_jaxpr"]
    return evaluate(closed, (), values) if isinstance(closed, Jaxpr) else evaluate(closed.jaxpr, closed.consts, values)


def _jit(evaluate: Evaluate, primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    placed = any(type(s).__name__ != "UnspecifiedValue" for s in (*params["in_shardings"], *params["out_shardings"]))
    if not _has(values) or placed or any(params["donated_invars"]):
        return None
    closed = params["jaxpr"]
    if _JAX in closed.jaxpr.debug_info.func_src_info:  # a function of jax.numpy, of which the user knows the call alone
        with jax.named_scope(params["name"]):
            return evaluate(closed.jaxpr, closed.consts, values, current())
    if is_inlined(params):
        return evaluate(closed.jaxpr, closed.consts, values)
    return _jitted(evaluate, closed, params["name"])(*values)


@functools.lru_cache(maxsize=512)
def _jitted(evaluate: Evaluate, closed: ClosedJaxpr, name: str) -> Callable[..., list[Any]]:
    def function(*values: Any) -> list[Any]:
        return evaluate(closed.jaxpr, closed.consts, values)

    function.__name__ = function.__qualname__ = name
    return jax.jit(function)


def _remat(evaluate: Evaluate, primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    rows_to_read = any(isinstance(value, Frozen) and value.at is not None for value in values)
    if params["differentiated"] or not (_has(values) or rows_to_read):
        return None
    prevent_cse = params["prevent_cse"]

    def function(*values: Any) -> list[Any]:
        return evaluate(params["jaxpr"], (), values)

    prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
    return jax.checkpoint(function, prevent_cse=prevent_cse, policy=params["policy"])(*values)


def _scan(evaluate: Evaluate, primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    first, carried = scan_counts(params)
    second = first + carried
    carry, xs, length = [dense(value) for value in values[first:second]], values[second:], params["length"]
    by_rows = [x for x in xs if isinstance(x, Split) and x.axis == 0]
    stretches = segments(by_rows, length) if by_rows else [(0, length)]
    if not _has((*values[:first], *xs)) or len(stretches) > _MOST_SEGMENTS:
        return None
    closed, reverse = params["jaxpr"], params["reverse"]
    consts = _merged_outside(evaluate, closed, values[:first])
    for split in by_rows:
        split.note(primitive.name, "read", current())
    for split in values[first:second]:
        _note_merged(split, primitive)

    ys = []
    for start, stop in stretches[::-1] if reverse else stretches:
        scanned = [_stretch(x, start, stop) for x in xs] if by_rows else [_read(x) for x in xs]

        def body(carry: Any, step: Any, scanned: Any = scanned) -> Any:
            i, sliced = step
            of_xs = [
                Frozen(x.array, i) if isinstance(x, Frozen) else _of_step(part)
                for x, part in zip(scanned, sliced, strict=True)
            ]
            outs = [dense(out) for out in evaluate(closed.jaxpr, closed.consts, [*consts, *carry, *of_xs])]
            return outs[: len(carry)], outs[len(carry) :]

        steps = stop - start
        rows = jnp.arange(start, stop, dtype=jnp.int32) if _has(scanned, Frozen) else None
        of_scan = rows, [None if isinstance(x, Frozen) else x for x in scanned]
        options = {"_split_transpose": True} if params.get("_split_transpose") else {}
        unroll = max(1, min(params["unroll"], steps))
        carry, y = jax.lax.scan(body, carry, of_scan, steps, reverse, unroll, **options)
        ys.append(y)
    ys = ys[::-1] if reverse else ys
    return [*carry, *(y[0] if len(y) == 1 else jnp.concatenate(y) for y in zip(*ys, strict=True))]


def _stretch(x: Any, start: int, stop: int) -> Any:
    """What a scan over the steps from ``start`` to ``stop`` is given: a :class:`Frozen` is read step by step."""
    if isinstance(x, Frozen):
        return Frozen(x.read())
    if not isinstance(x, Split):
        return jax.lax.slice_in_dim(x, start, stop)
    if x.axis:
        frozen, rows = (jax.lax.slice_in_dim(part, start, stop) for part in (x.frozen, x.rows))
        return x.like(frozen, rows)
    place = int(np.searchsorted(numbers(x.index), start))
    trains = place < x.index.count and numbers(x.index)[place] == start
    return jax.lax.slice_in_dim(x.rows, place, place + stop - start) if trains else Frozen(x.frozen)


def _note_merged(x: Any, primitive: Any) -> None:
    if isinstance(x, Split):
        x.note(primitive.name, "merged", current())


def _read(x: Any) -> Any:
    return x.read() if isinstance(x, Frozen) else x


def _of_step(x: Any) -> Any:
    """What the body of a scan is given: its rows are one axis further to the left there."""
    return x.like(x.frozen, x.rows, x.axis - 1) if isinstance(x, Split) else x


def _merged_outside(evaluate: Evaluate, closed: ClosedJaxpr, consts: Sequence[Any]) -> list[Any]:
    """The constants of a scan: those that its body would merge in every step are merged before it."""
    if not _has(consts):
        return list(consts)
    origins = [Origin() for _ in consts]
    heard = [x.heard(origin) if isinstance(x, Split) else x for x, origin in zip(consts, origins, strict=True)]

    def body(consts: Any, *others: Any) -> list[Any]:
        return [dense(out) for out in evaluate(closed.jaxpr, closed.consts, [*consts, *others])]

    jax.eval_shape(body, heard, *closed.in_avals[len(consts) :])
    merged = []
    for x, origin in zip(consts, origins, strict=True):
        if isinstance(x, Split) and origin.done("merged"):
            x.note(*origin.done("merged")[0])
            merged.append(x.merged())
        else:
            merged.append(x)
    return merged


def _custom_jvp(evaluate: Evaluate, primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    closed = params["call_jaxpr"]
    inexact = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in (*closed.in_avals, *closed.out_avals)]
    moves = inexact[: len(closed.in_avals)]
    if not _has(values) or params["symbolic_zeros"] or not all(inexact[len(moves) :]) or closed.effects:
        return None  # effects would happen once for each part
    values = [_read(value) for value in values]
    subfunctions, bound = _bound(primitive, params)
    _, rule = subfunctions or bound["subfuns"]

    def rule_of_moving(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        left = iter(tangents)
        zeros = [np.zeros(np.shape(p), jax.dtypes.float0) for p in primals]
        return rule.call_wrapped(*primals, *(next(left) if m else z for m, z in zip(moves, zeros, strict=True)))

    def function(*values: Any) -> list[Any]:
        return evaluate(closed.jaxpr, closed.consts, values)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        moving = [t for t, m in zip(tangents, moves, strict=True) if m]
        shapes = [aval for aval, m in zip(closed.in_avals, moves, strict=True) if m]
        of_rule = jax.make_jaxpr(rule_of_moving)(closed.in_avals, shapes)
        primals = [x.like(x.guarded(x.frozen), x.rows) if isinstance(x, Split) else x for x in primals]
        return evaluate(of_rule.jaxpr, of_rule.consts, [_in_rule(x) for x in (*primals, *moving)])

    def with_derivative(finish: Callable[[Any], Any], values: Sequence[Any] = values) -> list[Any]:
        of_parts = jax.custom_jvp(lambda *values: [finish(out) for out in function(*values)])

        @of_parts.defjvp
        def _(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            outs = [finish(out) for out in derivative(primals, tangents)]
            return outs[: len(outs) // 2], outs[len(outs) // 2 :]

        return of_parts(*values)

    def merge(out: Any) -> Any:
        _note_merged(out, primitive)
        return dense(out)

    index = _acts_on_rows(function, derivative, values)
    if index is None:
        return with_derivative(merge)
    rows = with_derivative(lambda out: out.rows if isinstance(out, Split) else take(index, out))
    if any(m and isinstance(value, Tracer) for value, m in zip(values, moves, strict=True)):
        constant = [x.like(x.frozen, take(x.index, x.frozen)) if isinstance(x, Split) else x for x in values]
        frozen = with_derivative(lambda out: out.frozen if isinstance(out, Split) else out, constant)
    else:
        frozen = bind(primitive, params, [x.frozen if isinstance(x, Split) else x for x in values])
    first = next(value for value in values if isinstance(value, Split))
    return [Split(*parts, index, first.origin) for parts in zip(frozen, rows, strict=True)]


def _in_rule(x: Any) -> Any:
    return x.heard((x.origin or Origin()).of_rule()) if isinstance(x, Split) else x


def _acts_on_rows(function: Any, derivative: Any, values: Sequence[Any]) -> Any:
    """The rows of the outputs, if a function and its derivative treat each row alone and all alike; else None.

    A derivative may call the function: asked about the derivative of the derivative, the function alone answers.
    """
    trying = any(isinstance(value, Split) and value.origin is not None and value.origin.trying for value in values)
    origin = Origin(trying=True)
    heard = [value.heard(origin) if isinstance(value, Split) else value for value in values]
    outs = jax.eval_shape(function, *heard)
    if not trying:
        outs = [*outs, *jax.eval_shape(derivative, heard, heard)]
    indices = {out.index if isinstance(out, Split) else None for out in outs}
    return indices.pop() if len(indices) == 1 and not origin.done("read") + origin.done("merged") else None


def bind(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """An equation of a jaxpr, as it is."""
    subfunctions, params = _bound(primitive, params)
    return primitive.bind(*subfunctions, *values, **params)


def _bound(primitive: Any, params: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """What ``bind`` takes for the parameters: functions to stand before the operands (up to JAX 0.9), and the rest."""
    bound = primitive.get_bind_params(params)
    return bound if isinstance(bound, tuple) else ((), bound)


CONTROL: dict[str, Control] = {
    "call": _inline,
    "checkpoint": _remat,
    "closed_call": _inline,
    "core_call": _inline,
    "custom_jvp_call": _custom_jvp,
    "jit": _jit,
    "pjit": _jit,
    "remat": _remat,
    "remat2": _remat,
    "scan": _scan,
}
