"""Differentiates a scan over stacked parameters if the numbers of the trainable rows are known only at run time.

JAX would compute the gradient of every row. The loop in this file has its own backward pass, which runs from the last
step to the first step with trainable parameters. In it, a branch computes the gradients of the parameters only at steps
whose parameters are trainable.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from optax_freeze._errors import type_error
from optax_freeze._gradient.dynamic_split_array import DynamicSplitArray
from optax_freeze._gradient.frozen_array import has_rows, is_late, read
from optax_freeze._gradient.jaxprs import outputs_of
from optax_freeze._gradient.rules import Equation
from optax_freeze._gradient.split_array import SplitArray, dense
from optax_freeze._gradient.stacked_step import Inputs, Stack, is_inexact, linearized, row_at
from optax_freeze._gradient.with_rows import is_zero


def scan_dynamic_rows(eqn: Equation, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    """Evaluates a ``scan`` over the rows of a :class:`DynamicSplitArray` and returns its outputs."""
    leaves, treedef = jax.tree.flatten([read(x) for x in consts])
    loop = _Loop(eqn, treedef)
    call = jax.custom_vjp(loop.run)
    call.defvjp(loop.forward, loop.backward, symbolic_zeros=True)
    try:
        return call(Inputs(leaves, list(carry), [_source(eqn, x) for x in xs]))
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise _first_order_only("forward mode (jax.jvp, jax.jacfwd)") from error


def _source(eqn: Equation, x: Any) -> Any:
    """Converts an input of which the loop reads one row in each step to an array or a :class:`Stack`."""
    if is_late(x) and has_rows(x):
        return Stack(x, None, None, whole=True)
    x = read(x)
    if isinstance(x, DynamicSplitArray | SplitArray) and x.axis == 0:
        eqn.record("read", x)
        numbers = x.numbers if isinstance(x, DynamicSplitArray) else x.index.indices()
        return Stack(x.frozen, x.rows, numbers, x.whole)
    eqn.record("merged", x)
    return dense(x)


def _first_order_only(got: str) -> TypeError:
    return type_error(
        "a scan over dynamic rows supports only first derivatives in reverse mode",
        at="the scan over the stacked parameters",
        got=got,
        expected="one jax.grad, fz.grad or fz.value_and_grad, with respect to the trainable parameters",
        fix="differentiate lambda t: fun(fz.combine(t, rest)), or give the rows as a list, fz.rows([...])",
    )


class _Loop:
    """Evaluates the scan of an equation, and its derivative."""

    def __init__(self, eqn: Equation, consts: Any) -> None:
        self.eqn, self.consts, self.params = eqn, consts, eqn.params
        self.length: int = eqn.params["length"]
        self.inexact = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in eqn.params["jaxpr"].out_avals]

    def step(self, inputs: Inputs) -> list[Any]:
        """Runs one step, where ``inputs.xs`` are single rows. Returns the next carry and the outputs."""
        closed = self.params["jaxpr"]
        values = [*jax.tree.unflatten(self.consts, inputs.consts), *inputs.carry, *inputs.xs]
        return [dense(out) for out in self.eqn.evaluate(closed.jaxpr, closed.consts, values)]

    def scan(self, of_step: Callable[..., list[Any]], inputs: Inputs) -> tuple[list[Any], list[Any]]:
        """Returns the last carry, and the stacked values of each other output of ``of_step``."""

        def body(carry: list[Any], i: Any) -> Any:
            outs = of_step(inputs.of_step(i, carry))
            return outs[: len(carry)], outs[len(carry) :]

        i = jnp.arange(self.length, dtype=jnp.int32)
        return jax.lax.scan(body, inputs.carry, i, reverse=self.params["reverse"], unroll=self.params["unroll"])

    def run(self, inputs: Inputs) -> list[Any]:
        """Returns the outputs of the scan, without a derivative."""
        carry, ys = self.scan(lambda values: self.step(inputs.divided(values)), inputs)
        return [*carry, *ys]

    def forward(self, inputs: Inputs) -> tuple[list[Any], Any]:
        """Returns the outputs of the scan and the residuals of :meth:`backward`."""
        is_primal = lambda x: hasattr(x, "perturbed")  # noqa: E731
        perturbed = jax.tree.map(lambda x: x.perturbed and is_inexact(x.value), inputs, is_leaf=is_primal)
        if any(isinstance(x, Stack) and any(jax.tree.leaves(x.frozen)) for x in perturbed.xs):
            raise _first_order_only("the gradient of frozen rows")
        inputs = jax.tree.map(lambda x: x.value, inputs, is_leaf=is_primal)
        linear = linearized(self.step, inputs, perturbed)
        wanted = [*range(linear.outs), *(linear.outs + i for i in linear.stored)]
        carry, others = self.scan(lambda values: outputs_of(linear.program, wanted, values, effects=True), inputs)
        n = linear.outs - len(carry)
        return [*carry, *others[:n]], (linear, inputs, others[n:])

    def backward(self, residuals: Any, cotangents: list[Any]) -> tuple[Inputs]:
        """Returns the cotangents of the inputs, given the cotangents of the outputs."""
        linear, inputs, stored = residuals
        trained = inputs.divided(linear.trained)
        given = [_dense(ct) for ct in compress(cotangents, self.inexact)]
        of_last, of_ys = given[: sum(trained.carry)], given[sum(trained.carry) :]
        constant = linear.values(linear.constant, inputs.of_step(0, inputs.carry))
        in_rows = [trains and isinstance(x, Stack) for x, trains in zip(inputs.xs, trained.xs, strict=True)]
        stacks: list[Stack] = list(compress(inputs.xs, in_rows))

        def transposed(i: Any, of_outs: list[Any]) -> tuple[Inputs, list[Any]]:
            """Returns the cotangents of the inputs of step ``i``, and separately those of the rows of the stacks."""
            values = constant | dict(zip(linear.stored, [row_at(x, i) for x in stored], strict=True))
            values |= linear.values(linear.of_rows, inputs.of_step(i, inputs.carry))
            found = inputs.divided(linear.transposed(values, of_outs))
            others = [None if here else ct for ct, here in zip(found.xs, in_rows, strict=True)]
            return found._replace(xs=others), list(compress(found.xs, in_rows))

        def without_rows(i: Any, of_outs: list[Any]) -> tuple[Inputs, list[Any]]:
            found, of_rows = transposed(i, of_outs)
            return found, [jnp.zeros_like(ct) for ct in of_rows]

        def step(state: Any) -> Any:
            n, sums, to_rows = state
            i = n if self.params["reverse"] else self.length - 1 - n
            places = [stack.place(i) for stack in stacks]
            trains = functools.reduce(jnp.logical_or, [trains for trains, _ in places], jnp.bool_(False))
            of_outs = [*(ct for ct in sums.carry if ct is not None), *(row_at(ct, i) for ct in of_ys)]
            if linear.alone:
                found, of_rows = jax.lax.cond(trains, transposed, without_rows, i, of_outs)
            else:
                found, of_rows = transposed(i, of_outs)

            def write(_: Any, to_rows: list[Any]) -> list[Any]:
                new = zip(to_rows, places, of_rows, strict=True)
                return [to.at[position].set(row, mode="drop") for to, (_, position), row in new]

            consts = jax.tree.map(jnp.add, sums.consts, found.consts)
            update = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
            sums = Inputs(consts, found.carry, jax.tree.map(update, sums.xs, found.xs))
            return n + 1, sums, jax.lax.fori_loop(0, trains.astype(jnp.int32), write, to_rows)

        left = iter(of_last)
        start = Inputs(
            [jnp.zeros_like(x) if trains else None for x, trains in zip(inputs.consts, trained.consts, strict=True)],
            [next(left) if trains else None for trains in trained.carry],
            [
                jnp.zeros_like(x) if trains and not here else None
                for x, trains, here in zip(inputs.xs, trained.xs, in_rows, strict=True)
            ],
        )
        steps = self._steps(stacks) if linear.alone and not linear.reaches_back and stacks else self.length
        state = (jnp.int32(0), start, [jnp.zeros_like(stack.rows) for stack in stacks])
        _, found, to_rows = jax.lax.while_loop(lambda state: state[0] < steps, step, state)
        to_rows = iter(to_rows)
        xs = [
            Stack(None, next(to_rows) if here else None, None, x.whole) if isinstance(x, Stack) else ct
            for x, ct, here in zip(inputs.xs, found.xs, in_rows, strict=True)
        ]
        return (_refusing_a_second(found._replace(xs=xs)),)

    def _steps(self, stacks: Sequence[Stack]) -> Any:
        """The number of steps of the backward pass, which ends at the first step with trainable parameters."""
        if self.params["reverse"]:
            last = functools.reduce(jnp.maximum, [stack.numbers[-1] for stack in stacks])
            return jnp.minimum(last + 1, self.length)
        return self.length - functools.reduce(jnp.minimum, [stack.numbers[0] for stack in stacks])


def _dense(cotangent: Any) -> Any:
    """Converts a cotangent, which may be a symbolic zero, to an array."""
    return jnp.zeros(cotangent.shape, cotangent.dtype) if is_zero(cotangent) else cotangent


@jax.custom_jvp
def _refusing_a_second(tree: Any) -> Any:
    """Returns ``tree``, but raises an error if it is differentiated."""
    return tree


@_refusing_a_second.defjvp
def _(*_: Any) -> Any:
    raise _first_order_only("a derivative of the gradient (jax.hessian, jax.grad of fz.grad)")
