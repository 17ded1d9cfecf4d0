"""Rules for operations that contain programs, which are entered with split arrays.

``jit`` and ``remat`` pass the split arrays on. A ``scan`` over the rows becomes one scan for each stretch of rows: that
of frozen rows reads them by their number, so that nothing is copied and, before the first trainable row, nothing is
differentiated. A function with a custom JVP rule keeps it: the rule is evaluated with split arrays, too.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.source_info_util import current

from optax_freeze._gradient.jaxprs import is_inlined, scan_counts
from optax_freeze._gradient.rules import Equation, rule
from optax_freeze._gradient.split_array import (
    FrozenArray,
    OperationLog,
    SplitArray,
    dense,
    numbers,
    segments,
    trainable_rows,
)

_JAX = os.path.join(os.path.dirname(jax.__file__), "")
_MOST_SEGMENTS = 32  # a scan of more stretches would be a large program: it takes the merged array


def _has_split(values: Sequence[Any]) -> bool:
    return any(isinstance(value, SplitArray) for value in values)


@rule("call", "closed_call", "core_call", enters=True)
def inline(eqn: Equation, *values: Any) -> Any:
    """Evaluates the program in place of the call."""
    if not _has_split(values):
        return None
    closed = eqn.params["call_jaxpr"]
    jaxpr, consts = (closed, ()) if isinstance(closed, Jaxpr) else (closed.jaxpr, closed.consts)
    return eqn.evaluate(jaxpr, consts, values)


@rule("jit", "pjit", enters=True)
def jit(eqn: Equation, *values: Any) -> Any:
    """Keeps the call, except of functions of ``jax.numpy`` and where the program is to be inlined."""
    params = eqn.params
    placed = any(type(s).__name__ != "UnspecifiedValue" for s in (*params["in_shardings"], *params["out_shardings"]))
    if not _has_split(values) or placed or any(params["donated_invars"]):
        return None
    closed = params["jaxpr"]
    if _JAX in closed.jaxpr.debug_info.func_src_info:  # the user knows the line of the call only
        with jax.named_scope(params["name"]):
            return eqn.evaluate(closed.jaxpr, closed.consts, values, current())
    if is_inlined(params):
        return eqn.evaluate(closed.jaxpr, closed.consts, values)
    return _jitted(eqn.evaluate, closed, params["name"])(*values)


@functools.lru_cache(maxsize=512)
def _jitted(evaluate: Callable[..., list[Any]], closed: ClosedJaxpr, name: str) -> Callable[..., list[Any]]:
    def function(*values: Any) -> list[Any]:
        return evaluate(closed.jaxpr, closed.consts, values)

    function.__name__ = function.__qualname__ = name
    return jax.jit(function)


@rule("checkpoint", "remat", "remat2", enters=True)
def remat(eqn: Equation, *values: Any) -> Any:
    """Keeps the rematerialisation; rows of frozen arrays are read again in the backward pass."""
    params = eqn.params
    rows_to_read = any(isinstance(value, FrozenArray) and value.row is not None for value in values)
    if params["differentiated"] or not (_has_split(values) or rows_to_read):
        return None

    def function(*values: Any) -> list[Any]:
        return eqn.evaluate(params["jaxpr"], (), values)

    prevent_cse = params["prevent_cse"]
    prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
    return jax.checkpoint(function, prevent_cse=prevent_cse, policy=params["policy"])(*values)


@rule("scan", enters=True)
def scan(eqn: Equation, *values: Any) -> Any:
    """One scan for each stretch of rows that are all frozen or all trainable; a constant stays split."""
    num_consts, num_carry = scan_counts(eqn.params)
    consts, xs = values[:num_consts], values[num_consts + num_carry :]
    carry = [dense(value) for value in values[num_consts:][:num_carry]]
    by_rows = [x for x in xs if isinstance(x, SplitArray) and x.axis == 0]
    stretches = segments(by_rows, eqn.params["length"]) if by_rows else [(0, eqn.params["length"])]
    if not _has_split((*consts, *xs)) or len(stretches) > _MOST_SEGMENTS:
        return None
    consts = _merged_outside(eqn, consts)
    eqn.record("read", *by_rows)
    eqn.record("merged", *values[num_consts:][:num_carry])

    reverse, ys = eqn.params["reverse"], []
    for start, stop in stretches[::-1] if reverse else stretches:
        inputs = [_stretch(x, start, stop) for x in xs] if by_rows else [_read(x) for x in xs]
        carry, y = _scan_stretch(eqn, consts, carry, inputs, start, stop)
        ys.append(y)
    ys = ys[::-1] if reverse else ys
    return [*carry, *(y[0] if len(y) == 1 else jnp.concatenate(y) for y in zip(*ys, strict=True))]


def _scan_stretch(
    eqn: Equation, consts: Sequence[Any], carry: Sequence[Any], inputs: Sequence[Any], start: int, stop: int
) -> tuple[list[Any], list[Any]]:
    """The scan over the steps from ``start`` to ``stop``, which reads the rows of a :class:`FrozenArray` by number."""
    closed, reads_rows = eqn.params["jaxpr"], any(isinstance(x, FrozenArray) for x in inputs)

    def body(carry: Sequence[Any], step: Any) -> Any:
        i, slices = step
        xs = [_of_step(x, i, part) for x, part in zip(inputs, slices, strict=True)]
        outs = [dense(out) for out in eqn.evaluate(closed.jaxpr, closed.consts, [*consts, *carry, *xs])]
        return outs[: len(carry)], outs[len(carry) :]

    steps = stop - start
    rows = jnp.arange(start, stop, dtype=jnp.int32) if reads_rows else None
    sliced = [None if isinstance(x, FrozenArray) else x for x in inputs]
    unroll = max(1, min(eqn.params["unroll"], steps))
    options = {"_split_transpose": True} if eqn.params.get("_split_transpose") else {}
    return jax.lax.scan(body, list(carry), (rows, sliced), steps, eqn.params["reverse"], unroll, **options)


def _stretch(x: Any, start: int, stop: int) -> Any:
    """The input of a scan over the steps from ``start`` to ``stop``: a :class:`FrozenArray` is read step by step."""
    if isinstance(x, FrozenArray):
        return FrozenArray(x.read())
    if not isinstance(x, SplitArray):
        return jax.lax.slice_in_dim(x, start, stop)
    if x.axis:
        return x.like(jax.lax.slice_in_dim(x.frozen, start, stop), jax.lax.slice_in_dim(x.rows, start, stop))
    position = int(np.searchsorted(numbers(x.index), start))
    trains = position < x.index.count and numbers(x.index)[position] == start
    return jax.lax.slice_in_dim(x.rows, position, position + stop - start) if trains else FrozenArray(x.frozen)


def _of_step(x: Any, i: Any, part: Any) -> Any:
    """One step of an input ``x`` of a scan, sliced to ``part``; the rows are one axis further to the left there."""
    if isinstance(x, FrozenArray):
        return FrozenArray(x.array, i)
    if isinstance(part, SplitArray):
        part = dataclasses.replace(part, elements=part.frozen.size)
        return part.like(part.frozen, part.rows, part.axis - 1)
    return part


def _read(x: Any) -> Any:
    return x.read() if isinstance(x, FrozenArray) else x


def _merged_outside(eqn: Equation, consts: Sequence[Any]) -> list[Any]:
    """The constants of a scan: those that its body would merge in every step are merged before it."""
    if not _has_split(consts):
        return list(consts)
    closed, logs = eqn.params["jaxpr"], [OperationLog() for _ in consts]
    logged = [_with_log(x, log) for x, log in zip(consts, logs, strict=True)]

    def body(consts: Any, *others: Any) -> list[Any]:
        return [dense(out) for out in eqn.evaluate(closed.jaxpr, closed.consts, [*consts, *others])]

    jax.eval_shape(body, logged, *closed.in_avals[len(consts) :])
    merged = list(consts)
    for i, log in enumerate(logs):
        if merges := log.with_effect("merged"):
            consts[i].record(*merges[0])
            merged[i] = consts[i].merged()
    return merged


def _with_log(x: Any, log: OperationLog) -> Any:
    return dataclasses.replace(x, log=log) if isinstance(x, SplitArray) else x


class _CustomJvp(NamedTuple):
    """The function of a ``custom_jvp`` call and its rule, evaluated with split arrays."""

    eqn: Equation
    inexact: Sequence[bool]  # which inputs have tangents

    def function(self, *values: Any) -> list[Any]:
        closed = self.eqn.params["call_jaxpr"]
        return self.eqn.evaluate(closed.jaxpr, closed.consts, values)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """The outputs and their tangents, by the custom rule."""
        avals = self.eqn.params["call_jaxpr"].in_avals
        closed = jax.make_jaxpr(self._rule)(avals, list(compress(avals, self.inexact)))
        primals = [x.like(x.guarded(x.frozen), x.rows) if isinstance(x, SplitArray) else x for x in primals]
        operands = [*primals, *compress(tangents, self.inexact)]
        in_jvp = functools.partial(dataclasses.replace, in_jvp=True, whole=False)
        operands = [in_jvp(x) if isinstance(x, SplitArray) else x for x in operands]
        return self.eqn.evaluate(closed.jaxpr, closed.consts, operands)

    def _rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        functions, params = self.eqn.bind_params()
        _, rule = functions or params["subfuns"]
        inexact_tangents = iter(tangents)
        every_tangent = [
            next(inexact_tangents) if inexact else np.zeros(np.shape(primal), jax.dtypes.float0)
            for primal, inexact in zip(primals, self.inexact, strict=True)
        ]
        return rule.call_wrapped(*primals, *every_tangent)

    def apply(self, finish: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
        """The outputs, each passed through ``finish``, with the custom rule for their tangents."""
        function = jax.custom_jvp(lambda *values: [finish(out) for out in self.function(*values)])

        @function.defjvp
        def _(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            outs = [finish(out) for out in self.jvp(primals, tangents)]
            return outs[: len(outs) // 2], outs[len(outs) // 2 :]

        return function(*values)

    def index_of_outputs(self, values: Sequence[Any]) -> Any:
        """The rows of the outputs, if the function and its rule treat each row alone and all alike; else None.

        A custom rule may call the function. In a trial of the rule only the function is tried, not the rule again.
        """
        splits = [value for value in values if isinstance(value, SplitArray)]
        in_trial = any(x.log is not None and x.log.is_trial for x in splits)
        log = OperationLog(is_trial=True)
        logged = [_with_log(x, log) for x in values]
        outs = jax.eval_shape(self.function, *logged)
        if not in_trial:
            outs = [*outs, *jax.eval_shape(self.jvp, logged, logged)]
        indices = {out.index if isinstance(out, SplitArray) else None for out in outs}
        return indices.pop() if len(indices) == 1 and not log.with_effect("read", "whole", "merged") else None


@rule("custom_jvp_call", enters=True)
def custom_jvp(eqn: Equation, *values: Any) -> Any:
    """Keeps the custom rule: for each part if it treats each row alone, else for the merged outputs."""
    closed = eqn.params["call_jaxpr"]
    inexact = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in closed.in_avals]
    outs_inexact = all(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in closed.out_avals)
    if not _has_split(values) or eqn.params["symbolic_zeros"] or not outs_inexact or closed.effects:
        return None  # effects would happen once for each part
    values = tuple(_read(value) for value in values)
    call = _CustomJvp(eqn, inexact)

    def merge(out: Any) -> Any:
        eqn.record("merged", out)
        return dense(out)

    index = call.index_of_outputs(values)
    if index is None:
        return call.apply(merge, values)
    rows = call.apply(lambda out: out.rows if isinstance(out, SplitArray) else trainable_rows(index, out), values)
    if any(isinstance(value, Tracer) for value in compress(values, inexact)):
        constant = [
            x.like(x.frozen, trainable_rows(x.index, x.frozen)) if isinstance(x, SplitArray) else x for x in values
        ]
        frozen = call.apply(lambda out: out.frozen if isinstance(out, SplitArray) else out, constant)
    else:
        frozen = eqn.bind(*(x.frozen if isinstance(x, SplitArray) else x for x in values))
    splits = [value for value in values if isinstance(value, SplitArray)]
    first = dataclasses.replace(splits[0], whole=all(x.whole for x in splits))
    return [first.like(*parts, index=index) for parts in zip(frozen, rows, strict=True)]
