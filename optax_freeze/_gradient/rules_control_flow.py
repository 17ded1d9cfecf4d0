"""Rules for loops and branches, whose programs are evaluated with split arrays.

A ``scan`` over the rows becomes one scan for each run of consecutive rows that are all frozen or all trainable. Scans
of frozen rows read them by index, so nothing is copied, and before the first trainable row nothing is differentiated.
Values that are the same in every step of a loop stay split inside the loop, and so do the operands of a branch.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.extend.source_info_util import current

from optax_freeze._gradient.dynamic_row_scan import scan_dynamic_rows
from optax_freeze._gradient.dynamic_split_array import DynamicSplitArray
from optax_freeze._gradient.frozen_array import FrozenArray, Unread, has_late, has_rows, is_late, row_of
from optax_freeze._gradient.jaxprs import scan_counts
from optax_freeze._gradient.operation_log import OperationLog
from optax_freeze._gradient.row_numbers import numbers
from optax_freeze._gradient.rules import Equation, rule, static_rows
from optax_freeze._gradient.split_array import (
    SplitArray,
    dense,
    has_split,
    made_of,
    on_device,
    segments,
    trains_in_any,
    with_log,
)

_MOST_SEGMENTS = 32  # with more runs of rows, the program would become large, so the array is merged


@rule("scan", enters=True)
def scan(eqn: Equation, *values: Any) -> Any:
    """One scan for each run of rows that are all frozen or all trainable; constants stay split."""
    num_consts, num_carry = scan_counts(eqn.params)
    consts, xs = values[:num_consts], values[num_consts + num_carry :]
    carry = [eqn.dense(value) for value in values[num_consts:][:num_carry]]
    if any(isinstance(x, DynamicSplitArray) and x.axis == 0 for x in xs):
        eqn.record("merged", *values[num_consts:][:num_carry])
        return scan_dynamic_rows(eqn, _merged_outside(eqn, eqn.params["jaxpr"], consts), carry, xs)
    xs = [static_rows(eqn, x) for x in xs]
    by_rows = [x for x in xs if isinstance(x, SplitArray) and x.axis == 0]
    stretches = segments(by_rows, eqn.params["length"]) if by_rows else [(0, eqn.params["length"])]
    if not (has_split((*consts, *xs)) or has_late((*consts, *xs))) or len(stretches) > _MOST_SEGMENTS:
        return None
    consts = _merged_outside(eqn, eqn.params["jaxpr"], consts)
    eqn.record("read", *by_rows)
    eqn.record("merged", *values[num_consts:][:num_carry])

    reverse, ys = eqn.params["reverse"], []
    for start, stop in stretches[::-1] if reverse else stretches:
        inputs = [_stretch(eqn, x, start, stop) if by_rows else _late_or_read(eqn, x) for x in xs]
        carry, y = _scan_stretch(eqn, consts, carry, inputs, start, stop)
        ys.append(y)
    ys = ys[::-1] if reverse else ys
    return [*carry, *(y[0] if len(y) == 1 else jnp.concatenate(y) for y in zip(*ys, strict=True))]


def _scan_stretch(
    eqn: Equation, consts: Sequence[Any], carry: Sequence[Any], inputs: Sequence[Any], start: int, stop: int
) -> tuple[list[Any], list[Any]]:
    """Scans over the steps from ``start`` to ``stop``, and reads the rows of frozen arrays by index."""
    closed, reads_rows = eqn.params["jaxpr"], any(isinstance(x, Unread) for x in inputs)

    def body(carry: Sequence[Any], step: Any) -> Any:
        i, slices = step
        xs = [_of_step(x, i, part) for x, part in zip(inputs, slices, strict=True)]
        outs = [eqn.dense(out) for out in eqn.evaluate(closed.jaxpr, closed.consts, [*consts, *carry, *xs])]
        return outs[: len(carry)], outs[len(carry) :]

    steps = stop - start
    rows = jnp.arange(start, stop, dtype=jnp.int32) if reads_rows else None
    sliced = [None if isinstance(x, Unread) else x for x in inputs]
    unroll = max(1, min(eqn.params["unroll"], steps))
    options = {"_split_transpose": True} if eqn.params.get("_split_transpose") else {}
    return jax.lax.scan(body, list(carry), (rows, sliced), steps, eqn.params["reverse"], unroll, **options)


def _late_or_read(eqn: Equation, x: Any) -> Any:
    """Reads an input of a scan, unless it is late and its rows can be read one by one in the steps."""
    return x if is_late(x) and has_rows(x) else on_device(x, eqn.primitive.name, current())


def _stretch(eqn: Equation, x: Any, start: int, stop: int) -> Any:
    """The input of a scan over the steps from ``start`` to ``stop``. Frozen arrays are read step by step."""
    if isinstance(x, Unread):
        x = _late_or_read(eqn, x)
        return x if isinstance(x, Unread) else FrozenArray(x)
    if not isinstance(x, SplitArray):
        return jax.lax.slice_in_dim(x, start, stop)
    if x.axis:
        x = on_device(x, eqn.primitive.name, current())
        return x.like(jax.lax.slice_in_dim(x.frozen, start, stop), jax.lax.slice_in_dim(x.rows, start, stop))
    position = int(np.searchsorted(numbers(x.index), start))
    trains = position < x.index.count and numbers(x.index)[position] == start
    return jax.lax.slice_in_dim(x.rows, position, position + stop - start) if trains else _frozen_rows(eqn, x.frozen)


def _frozen_rows(eqn: Equation, frozen: Any) -> Any:
    return _stretch(eqn, frozen if isinstance(frozen, Unread) else FrozenArray(frozen), 0, 0)


def _of_step(x: Any, i: Any, part: Any) -> Any:
    """The value of the scan input ``x`` in step ``i``, where ``part`` is its slice without the axis of the steps."""
    if isinstance(x, Unread):
        return row_of(x, i)
    if isinstance(part, SplitArray):
        part = dataclasses.replace(part, elements=part.frozen.size)
        return part.like(part.frozen, part.rows, part.axis - 1)
    return part


@rule("while", enters=True)
def while_loop(eqn: Equation, *values: Any) -> Any:
    """Constants of the condition and the body stay split; carried values are merged."""
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    read_in_steps = values[: of_condition + of_body]
    if not has_split(read_in_steps) and not has_late(read_in_steps):
        return None
    for_condition = _merged_outside(eqn, condition, values[:of_condition])
    for_body = _merged_outside(eqn, body, values[of_condition:][:of_body])
    carry = values[of_condition + of_body :]
    eqn.record("merged", *carry)

    def goes_on(carry: Sequence[Any]) -> Any:
        return dense(*eqn.evaluate(condition.jaxpr, condition.consts, [*for_condition, *carry]))

    def step(carry: Sequence[Any]) -> list[Any]:
        outs = [eqn.dense(out) for out in eqn.evaluate(body.jaxpr, body.consts, [*for_body, *carry])]
        if not np.ndim(condition.out_avals[0]):
            return outs
        here = goes_on(carry)
        return [
            jnp.where(jnp.expand_dims(here, range(here.ndim, out.ndim)), out, old)
            for out, old in zip(outs, carry, strict=True)
        ]

    # Under vmap, the condition may differ between examples. Examples that have ended keep their carry.
    return jax.lax.while_loop(lambda carry: jnp.any(goes_on(carry)), step, [eqn.dense(value) for value in carry])


@rule("cond", enters=True)
def cond(eqn: Equation, which: Any, *operands: Any) -> Any:
    """Branches with split operands. An output is split if it is split along the same axis in every branch."""
    if not (has_split(operands) or has_late(operands)) or eqn.params.get("branches_platforms") is not None:
        return None

    def outputs(branch: ClosedJaxpr) -> list[Any]:
        outs = eqn.evaluate(branch.jaxpr, branch.consts, operands)
        return [on_device(out, eqn.primitive.name, current()) for out in outs]

    branches = eqn.params["branches"]
    results = zip(*(jax.eval_shape(functools.partial(outputs, branch)) for branch in branches), strict=True)
    layouts = [_common(alternatives) for alternatives in results]

    def taken(branch: ClosedJaxpr) -> list[Any]:
        return [_finished(eqn, out, layout) for out, layout in zip(outputs(branch), layouts, strict=True)]

    finished = jax.lax.switch(which, [functools.partial(taken, branch) for branch in branches])
    return [layout.like(*out) if layout else out for out, layout in zip(finished, layouts, strict=True)]


def _common(alternatives: Sequence[Any]) -> SplitArray | None:
    """The layout of an output, given its value in each branch; None if the output has to be merged.

    Rows that are trainable in any branch are trainable in the output.
    """
    first = alternatives[0]
    if not all(isinstance(out, SplitArray) and out.axis == first.axis for out in alternatives):
        return None
    trains = trains_in_any(alternatives)
    return None if len(trains) == first.size else jax.eval_shape(lambda *splits: made_of(splits, trains), *alternatives)


def _finished(eqn: Equation, out: Any, layout: SplitArray | None) -> Any:
    """Returns both parts of an output of a branch, or the merged array."""
    if layout is None:
        eqn.record("merged", out)
        return eqn.dense(out)
    out = out.widened(numbers(layout.index))
    return out.frozen, out.rows


def _merged_outside(eqn: Equation, body: ClosedJaxpr, consts: Sequence[Any]) -> list[Any]:
    """Merges or reads constants of a loop ahead of it if the loop body would merge or fully read them in every step."""
    if not has_split(consts) and not has_late(consts):
        return list(consts)
    logs = [OperationLog() for _ in consts]
    logged = [with_log(x, log) for x, log in zip(consts, logs, strict=True)]

    def outputs(consts: Any, *others: Any) -> list[Any]:
        return [dense(out) for out in eqn.evaluate(body.jaxpr, body.consts, [*consts, *others])]

    jax.eval_shape(outputs, logged, *body.in_avals[len(consts) :])
    merged = list(consts)
    for i, log in enumerate(logs):
        if merges := log.with_effect("merged"):
            consts[i].record(*merges[0])
            merged[i] = dense(consts[i])
        elif wholes := log.with_effect("host whole"):
            merged[i] = on_device(consts[i], wholes[0].name, wholes[0].source)
    return merged
