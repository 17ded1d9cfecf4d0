"""Rules for function calls, whose programs are evaluated with split arrays.

``jit`` and ``remat`` pass split arrays to their function. A function with a custom JVP rule keeps its rule, which is
evaluated with split arrays, too.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.extend.source_info_util import current

from optax_freeze._gradient.frozen_array import Computed, FrozenArray, has_late, read
from optax_freeze._gradient.jaxprs import is_inlined, opened
from optax_freeze._gradient.operation_log import OperationLog
from optax_freeze._gradient.row_numbers import numbers, padding
from optax_freeze._gradient.rows_of_outputs import has_rows, rows_of_outputs
from optax_freeze._gradient.rules import Equation, Whole, rule, static_rows
from optax_freeze._gradient.split_array import (
    PartlyFrozen,
    SplitArray,
    dense,
    has_split,
    made_of,
    on_device,
    trainable_rows,
    with_log,
)

_JAX = os.path.join(os.path.dirname(jax.__file__), "")


@rule("call", "closed_call", "core_call", enters=True)
def inline(eqn: Equation, *values: Any) -> Any:
    """Evaluates the program in place of the call."""
    if not has_split(values) and not has_late(values):
        return None
    return eqn.evaluate(*opened(eqn.params["call_jaxpr"]), values)


@rule("jit", "pjit", enters=True)
def jit(eqn: Equation, *values: Any) -> Any:
    """Keeps the call, except for functions of ``jax.numpy`` and programs that should be inlined."""
    params = eqn.params
    placed = any(type(s).__name__ != "UnspecifiedValue" for s in (*params["in_shardings"], *params["out_shardings"]))
    if not (has_split(values) or has_late(values)) or placed or any(params["donated_invars"]):
        return None
    closed = params["jaxpr"]
    if _JAX in closed.jaxpr.debug_info.func_src_info:  # report the line of the call, not one inside JAX
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
    """Keeps the rematerialisation; the backward pass reads rows of frozen arrays again."""
    params = eqn.params
    if params["differentiated"] or not (has_split(values) or any(map(_is_read_in_parts, values))):
        return None

    def function(*values: Any) -> list[Any]:
        return eqn.evaluate(params["jaxpr"], (), values)

    prevent_cse = params["prevent_cse"]
    prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
    return jax.checkpoint(function, prevent_cse=prevent_cse, policy=params["policy"])(*values)


def _is_read_in_parts(value: Any) -> bool:
    """Whether a value is a frozen array that is late or of which only rows are read."""
    return isinstance(value, Computed) or (
        isinstance(value, FrozenArray) and (value.is_late or value.count is not None)
    )


@rule("shard_map", enters=True)
def shard_map(eqn: Equation, *values: Any) -> Any:
    """Each device reads its shard of an array on the host inside the function."""
    if not any(has_late([value.frozen if has_split([value]) else value]) for value in values):
        return None
    params = eqn.params
    specs = list(params["in_specs"])
    values = tuple(
        value if _has_shards(value, spec) else eqn.dense(value) for value, spec in zip(values, specs, strict=True)
    )
    arrays, treedef = jax.tree.flatten(values)
    of_arrays = [spec for value, spec in zip(values, specs, strict=True) for _ in jax.tree.leaves(value)]

    def function(*shards: Any) -> list[Any]:
        of_shards = [
            dataclasses.replace(value, elements=np.size(value.rows)) if isinstance(value, SplitArray) else value
            for value in jax.tree.unflatten(treedef, shards)
        ]
        return list(map(eqn.dense, eqn.evaluate(*opened(params["jaxpr"]), of_shards)))

    return jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=tuple(of_arrays),
        out_specs=list(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]),
    )(*arrays)


def _has_shards(value: Any, spec: Any) -> bool:
    """Whether all arrays of a value can be sharded like the whole array."""
    if isinstance(value, SplitArray):
        rows_together = len(spec) <= value.axis or spec[value.axis] is None
        return rows_together and isinstance(value.frozen, FrozenArray) and value.frozen.count is None
    return not isinstance(value, PartlyFrozen | Computed) and getattr(value, "count", None) is None


class _CustomJvp(NamedTuple):
    """The function of a ``custom_jvp`` call and its rule, evaluated with split arrays."""

    eqn: Equation
    inexact: Sequence[bool]  # which inputs have tangents

    def function(self, *values: Any) -> list[Any]:
        closed = self.eqn.params["call_jaxpr"]
        return self.eqn.evaluate(closed.jaxpr, closed.consts, values)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Returns the outputs and their tangents, computed by the custom rule."""
        avals = self.eqn.params["call_jaxpr"].in_avals
        closed = jax.make_jaxpr(self._rule)(avals, list(compress(avals, self.inexact)))
        primals = [
            x.like(x.guarded(x.frozen, x.frozen.shape), x.rows) if isinstance(x, SplitArray) else x for x in primals
        ]
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
        """Returns the outputs, passed through ``finish``; the custom rule computes their tangents."""
        function = jax.custom_jvp(lambda *values: [finish(out) for out in self.function(*values)])

        @function.defjvp
        def _(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            outs = [finish(out) for out in self.jvp(primals, tangents)]
            return outs[: len(outs) // 2], outs[len(outs) // 2 :]

        return function(*values)

    def index_of_outputs(self, values: Sequence[Any]) -> Any:
        """Returns the row index of the outputs; None if the function or its rule does not treat rows independently.

        None is also returned if the indices of the outputs differ. A custom rule may call its own function; inside a
        trial, only the function is tried, not the rule again.
        """
        splits = [value for value in values if isinstance(value, SplitArray)]
        in_trial = any(x.log is not None and x.log.is_trial for x in splits)
        log = OperationLog(is_trial=True)
        logged = [with_log(x, log) for x in values]
        outs = jax.eval_shape(self.function, *logged)
        if not in_trial:
            outs = [*outs, *jax.eval_shape(self.jvp, logged, logged)]
        indices = {out.index if isinstance(out, SplitArray) else None for out in outs}
        return indices.pop() if len(indices) == 1 and not log.with_effect("read", "whole", "merged") else None


@rule("custom_jvp_call", enters=True)
def custom_jvp(eqn: Equation, *values: Any) -> Any:
    """Keeps the custom rule: for both parts if it treats rows independently, otherwise for the merged outputs."""
    closed = eqn.params["call_jaxpr"]
    inexact = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in closed.in_avals]
    outs_inexact = all(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in closed.out_avals)
    if not has_split(values) or eqn.params["symbolic_zeros"] or not outs_inexact or closed.effects:
        return None  # effects would happen twice, once for each part
    values = tuple(on_device(static_rows(eqn, read(value)), eqn.primitive.name, current()) for value in values)
    call = _CustomJvp(eqn, inexact)

    def merge(out: Any) -> Any:
        eqn.record("merged", out)
        return dense(out)

    index = call.index_of_outputs(values)
    if index is None:
        return call.apply(merge, values)

    def of_index(out: Any) -> Any:  # more rows may be trainable in the trial, where all values are tracers
        return out.widened(numbers(index)).rows if isinstance(out, SplitArray) else trainable_rows(index, out)

    rows = call.apply(of_index, values)
    if any(isinstance(value, Tracer) for value in compress(values, inexact)):
        constant = [
            x.like(x.frozen, trainable_rows(x.index, x.frozen)) if isinstance(x, SplitArray) else x for x in values
        ]
        frozen = call.apply(lambda out: out.frozen if isinstance(out, SplitArray) else out, constant)
    else:
        frozen = eqn.bind(*(x.frozen if isinstance(x, SplitArray) else x for x in values))
    first = made_of([value for value in values if isinstance(value, SplitArray)], numbers(index))
    return [first.like(*parts, index=index) for parts in zip(frozen, rows, strict=True)]


def _inexact(avals: Iterable[Any]) -> list[int]:
    """Returns the positions of the floating-point and complex values, which have derivatives."""
    return [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]


@rule("custom_vjp_call")
def custom_vjp(eqn: Equation, *operands: Any) -> Any:
    """Keeps the custom rule for the whole array, if only the trainable rows of its cotangent can be computed."""
    splits = {i: x for i, x in enumerate(operands) if isinstance(x, SplitArray)}
    arrays = [x.frozen if isinstance(x, SplitArray) else x for x in operands]
    inexact = _inexact(map(jax.typeof, arrays))
    scattered = any(padding(x.index, x.axis, x.frozen.ndim) is None for x in splits.values())
    if eqn.params["symbolic_zeros"] or scattered or any(x.in_jvp for x in splits.values()):
        return None
    outs = jax.eval_shape(eqn.bind, *arrays)
    if not {*splits} <= {*inexact} or len(_inexact(outs)) < len(outs):
        return None

    def forward(*values: Any) -> tuple[Any, Callable[..., Any]]:
        return jax.vjp(eqn.bind, *map(dense, values))

    def cotangents(back: Callable[..., Any], of_outs: Any) -> list[Any]:
        every = back(of_outs)
        return [every[i] for i in inexact]

    def of_ones(*values: Any) -> list[Any]:
        outs, back = forward(*values)
        return cotangents(back, jax.tree.map(jnp.ones_like, outs))

    program = jax.make_jaxpr(of_ones)(*arrays)
    if not all(has_rows(program, inexact.index(i)) for i in splits):
        return None

    def backward(back: Callable[..., Any], of_outs: Any) -> tuple[Any, ...]:
        program = jax.make_jaxpr(cotangents)(back, of_outs)
        indices = {inexact.index(i): x.index for i, x in splits.items()}
        wholes, rows = rows_of_outputs(program, jax.tree.leaves((back, of_outs)), indices)
        every: list[Any] = [None] * len(operands)
        for position, (i, whole) in enumerate(zip(inexact, wholes, strict=True)):
            every[i] = whole
            if position in rows:
                of_frozen = splits[i].index.choose(whole, jnp.zeros_like(whole))
                every[i] = dataclasses.replace(splits[i], frozen=of_frozen, rows=rows[position], whole=True)
        return tuple(every)

    function = jax.custom_vjp(lambda *values: eqn.bind(*map(dense, values)))
    function.defvjp(forward, backward)
    return Whole(function(*(x.made_whole() if isinstance(x, SplitArray) else x for x in operands)))
