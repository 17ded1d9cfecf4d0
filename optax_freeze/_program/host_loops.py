"""Loops, branches and ``jax.shard_map`` that read values which are not on the device: each step reads its own rows."""

import functools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from optax_freeze._jax_internals import Branches, ClosedJaxpr, Loop, Mapped, While, evaluate_program
from optax_freeze._program.decisions import results_that_decide
from optax_freeze._program.deferred import Deferred, Input, Outer, Reader, part_of
from optax_freeze._program.host_array import HostArray
from optax_freeze._program.regions import EVERYTHING
from optax_freeze._program.trace import Equation, flatten


def scan(outer: Outer, eqn: Equation, loop: Loop, operands: Sequence[Any], reader: Reader) -> Sequence[Any]:
    """The results of a loop whose step reads its row of each stack, and what it needs of other values."""
    first, stacked = loop.consts, loop.stacked
    program = flatten(loop.body)
    deciding = [*compress(program.outputs, results_that_decide(loop, outer.decide(eqn)))]
    given = {p for p, x in enumerate(eqn.inputs) if outer.is_repeated(x) and not first <= p < stacked}
    consts: list[Any] = [*map(outer.operand, eqn.inputs[:first])]
    carry = [part_of(x, EVERYTHING, reader) for x in operands[first:stacked]]
    stacks = [
        x if isinstance(x, Deferred) and x.has_rows() else part_of(x, EVERYTHING, reader) for x in operands[stacked:]
    ]
    sliced = [not isinstance(x, Deferred) for x in stacks]
    types = [var.aval for var in loop.body.jaxpr.invars]

    def step(passed: Sequence[Any], reads: Any, i: Any, carry: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
        inner, left = outer.level.inside(program, given, deciding, reads, waits=False), iter(rows)
        of_step = [next(left) if here else _row(x, i) for x, here in zip(stacks, sliced, strict=True)]
        return inner.run_whole([*passed, *carry, *of_step])

    number = jax.ShapeDtypeStruct((), jnp.int32)
    of_step = number, types[first:stacked], [*compress(types[stacked:], sliced)]
    body = _traced(step, consts, of_step, reader)

    def run(carry: Sequence[Any], of_step: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        outs = evaluate_program(body, of_step[0], *carry, *of_step[1])
        return outs[: loop.carried], outs[loop.carried :]

    xs = jnp.arange(loop.length, dtype=jnp.int32), [*compress(stacks, sliced)]
    carry, rows = jax.lax.scan(run, carry, xs, loop.length, loop.reverse, loop.unroll)
    return [*carry, *rows]


def while_loop(outer: Outer, eqn: Equation, loop: While, operands: Sequence[Any], reader: Reader) -> Sequence[Any]:
    """The results of a ``while_loop`` whose step reads what it needs."""
    program, first = flatten(loop.body), loop.condition_consts
    last = first + loop.body_consts
    given = {p for p, x in enumerate(eqn.inputs[first:last]) if outer.is_repeated(x)}
    consts: list[Any] = [*map(outer.operand, eqn.inputs[first:last])]
    of_condition, carry = (
        [part_of(x, EVERYTHING, reader) for x in each] for each in (operands[:first], operands[last:])
    )

    def step(passed: Sequence[Any], reads: Any, carry: Sequence[Any]) -> list[Any]:
        inner = outer.level.inside(program, given, program.outputs, reads, waits=False)
        return inner.run_whole([*passed, *carry])

    body = _traced(step, consts, ([var.aval for var in loop.body.jaxpr.invars[loop.body_consts :]],), reader)
    goes_on = lambda carry: evaluate_program(loop.condition, *of_condition, *carry)[0]  # noqa: E731
    return jax.lax.while_loop(goes_on, lambda carry: evaluate_program(body, *carry), carry)


def _row(stack: Deferred, i: jax.Array) -> Any:
    row = stack.row(i)
    return Input(row) if isinstance(row, Deferred) else row


def _traced(step: Callable[..., list[Any]], consts: list[Any], types: Sequence[Any], reader: Reader) -> ClosedJaxpr:
    """The program of a step; what each step would read as a whole is read before the loop."""
    while True:
        whole: set[int] = set()
        reads: list[Any] = []
        passed = [
            Input(x, functools.partial(whole.add, p)) if isinstance(x, Deferred) and x.computed is None else x
            for p, x in enumerate(consts)
        ]
        body = jax.make_jaxpr(functools.partial(step, passed, reads))(*types)
        if not whole:
            break
        for place in whole:
            consts[place] = part_of(consts[place], EVERYTHING, reader)
    if reader.reads is not None:
        reader.reads.extend(reads)
    return body


def cond(outer: Outer, eqn: Equation, found: Branches, operands: Sequence[Any], reader: Reader) -> Sequence[Any]:
    """The results of the branch that is taken, which reads what it needs."""
    given = {p for p, x in enumerate(eqn.inputs[1:]) if outer.is_repeated(x)}
    pairs = [*zip(eqn.inputs[1:], operands[1:], strict=True)]

    def run(branch: ClosedJaxpr) -> list[Any]:
        program = flatten(branch)
        passed = [Input(x) if isinstance(x, Deferred) else outer.operand(n) for n, x in pairs]
        deciding = [*compress(program.outputs, outer.decide(eqn))]
        return outer.level.inside(program, given, deciding, reader.reads, waits=False).run_whole(passed)

    return jax.lax.switch(part_of(operands[0], EVERYTHING, reader), [functools.partial(run, b) for b in found.programs])


def shard_map(
    outer: Outer, eqn: Equation, found: Mapped, operands: Sequence[Any], reader: Reader
) -> Sequence[Any] | None:
    """The results of a ``jax.shard_map`` in which each device reads its shard of arrays in host memory."""
    shards = {p: x for p, x in enumerate(map(_host_array, operands)) if x is not None}
    if not shards:
        return None
    program = flatten(found.program)
    given = {p for p, x in enumerate(eqn.inputs) if outer.is_repeated(x)}
    deciding = [*compress(program.outputs, outer.decide(eqn))]

    def of_shards(*arrays: Any) -> list[Any]:
        values = [HostArray(x, name=shards[p].name) if p in shards else x for p, x in enumerate(arrays)]
        return outer.level.inside(program, given, deciding, reader.reads).run_whole(values)

    mapped = found.map(of_shards, found.in_specs, found.out_specs)
    return mapped(*(shards[p].array if p in shards else part_of(x, EVERYTHING, reader) for p, x in enumerate(operands)))


def _host_array(value: Any) -> HostArray | None:
    """A whole array in host memory, as such or passed into a loop or a branch."""
    while isinstance(value, Input):
        value = value.value
    return value if isinstance(value, HostArray) and value.is_whole else None
