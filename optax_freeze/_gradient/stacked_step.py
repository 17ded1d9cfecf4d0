"""Reads stacked parameters in the steps of a scan, and traces one step as a program that can be transposed."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from optax_freeze._gradient.frozen_array import Unread, read
from optax_freeze._gradient.frozen_array import row_of as row_of_unread
from optax_freeze._gradient.jaxprs import depends_on, outputs_of


@functools.partial(jax.tree_util.register_dataclass, data_fields=["frozen", "rows", "numbers"], meta_fields=["whole"])
@dataclasses.dataclass(frozen=True)
class Stack:
    """Stacked parameters: the full array, the trainable rows, and the numbers of these rows in ascending order."""

    frozen: Any
    rows: Any
    numbers: Any
    whole: bool  # whether the full array also contains the values of the trainable rows

    def row(self, i: Any) -> Any:
        """Returns the parameters of step ``i``."""
        values = row_at(self.frozen, i)
        if self.whole:
            return values
        trains, position = self.place(i)
        return jnp.where(trains, row_at(self.rows, jnp.minimum(position, len(self.numbers) - 1)), values)

    def place(self, i: Any) -> tuple[Any, Any]:
        """Whether row ``i`` is trainable, and its position among the trainable rows (past the end if it is frozen)."""
        here = self.numbers == i
        trains = jnp.any(here)
        return trains, jnp.where(trains, jnp.argmax(here), len(self.numbers))


def row_at(array: Any, i: Any) -> Any:
    """Returns row ``i`` of an array, without the row axis."""
    if isinstance(array, Unread):
        return read(row_of_unread(array, i))
    return jax.lax.dynamic_index_in_dim(array, i, 0, keepdims=False)


def row_of(x: Any, i: Any) -> Any:
    """Returns row ``i`` of an array or a stack."""
    return x.row(i) if isinstance(x, Stack) else row_at(x, i)


class Inputs(NamedTuple):
    """The inputs of a scan: constants, carried values, and arrays with one row per step."""

    consts: list[Any]
    carry: list[Any]
    xs: list[Any]

    def of_step(self, i: Any, carry: Sequence[Any]) -> list[Any]:
        """Returns the inputs of one step."""
        return [*self.consts, *carry, *(row_of(x, i) for x in self.xs)]

    def divided(self, values: Sequence[Any]) -> "Inputs":
        """Divides a list with one value per input of a step into these three lists."""
        n, m = len(self.consts), len(self.consts) + len(self.carry)
        return Inputs(list(values[:n]), list(values[n:m]), list(values[m:]))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class LinearStep:
    """One differentiated step: a program that computes its outputs and the residuals that its transpose needs.

    Residuals that depend only on constants, or also on rows of parameters, are computed again in the backward pass,
    because the loop would store a copy for every row. All others are stored in every step.
    """

    program: ClosedJaxpr
    transpose: Any  # the treedef of the function that takes cotangents back
    trained: Sequence[bool]  # for each input of a step, whether it has a cotangent
    reaches_back: bool  # whether steps before the first trainable row have inputs to differentiate
    alone: bool  # whether steps can be skipped: no communication with devices that may have other rows
    outs: int
    constant: Sequence[int]  # the positions of the residuals of each kind
    of_rows: Sequence[int]
    stored: Sequence[int]

    def values(self, positions: Sequence[int], inputs: Sequence[Any]) -> dict[int, Any]:
        """Computes the residuals at these positions."""
        outs = outputs_of(self.program, [self.outs + i for i in positions], inputs)
        return dict(zip(positions, outs, strict=True))

    def transposed(self, values: dict[int, Any], cotangents: list[Any]) -> list[Any]:
        """Returns the cotangent of each input of a step, or None for inputs that have none."""
        found = iter(jax.tree.unflatten(self.transpose, [values[i] for i in range(len(values))])(cotangents))
        return [next(found) if trains else None for trains in self.trained]


def linearized(step: Callable[[Inputs], list[Any]], inputs: Inputs, perturbed: Inputs) -> LinearStep:
    """Differentiates one step with respect to the carry and the ``perturbed`` inputs."""
    # A parameter of one step reaches the carry of the next.
    of_xs = [x.rows if isinstance(x, Stack) else x for x in perturbed.xs]
    trained = (*perturbed.consts, *map(is_inexact, inputs.carry), *of_xs)
    inexact: list[bool] = []
    transpose: Any = None

    def program(*values: Any) -> list[Any]:
        nonlocal transpose

        def of_trained(*primals: Any) -> tuple[list[Any], list[Any]]:
            left = iter(primals)
            outs = step(inputs.divided([next(left) if t else x for x, t in zip(values, trained, strict=True)]))
            inexact[:] = map(is_inexact, outs)
            return list(compress(outs, inexact)), [out for out in outs if not is_inexact(out)]

        found, back, others = jax.vjp(of_trained, *compress(values, trained), has_aux=True)
        saved, transpose = jax.tree.flatten(back)
        left, right = iter(found), iter(others)
        return [*(next(left) if of_left else next(right) for of_left in inexact), *saved]

    closed = jax.make_jaxpr(program)(*jax.eval_shape(lambda: inputs.of_step(0, inputs.carry)))
    kinds = _kinds(closed, inputs)[len(inexact) :]
    constant, of_rows, stored = (tuple(i for i, kind in enumerate(kinds) if kind is k) for k in _Kind)
    reaches_back = any((*perturbed.consts, *perturbed.carry)) or any(
        trains and not isinstance(x, Stack) for trains, x in zip(of_xs, inputs.xs, strict=True)
    )
    alone = not any(type(effect).__name__ == "NamedAxisEffect" for effect in closed.effects)
    return LinearStep(closed, transpose, trained, reaches_back, alone, len(inexact), constant, of_rows, stored)


class _Kind(enum.Enum):
    """Which inputs a value of one step depends on."""

    CONSTANT = enum.auto()
    ROWS = enum.auto()
    OTHERS = enum.auto()


def _kinds(program: ClosedJaxpr, inputs: Inputs) -> list[_Kind]:
    """The kind of each output of a step's program. A row of an array counts as ``ROWS``, as it can be read again."""
    consts = [False] * len(inputs.consts)
    of_step = depends_on(program, [*consts, *[True] * (len(inputs.carry) + len(inputs.xs))])
    others = [*consts, *[True] * len(inputs.carry), *(not isinstance(x, Stack) for x in inputs.xs)]
    rows = set(program.jaxpr.invars[len(program.jaxpr.invars) - len(inputs.xs) :])
    kinds = []
    for v, varies, needs_others in zip(program.jaxpr.outvars, of_step, depends_on(program, others), strict=True):
        is_row = not isinstance(v, Literal) and v in rows
        kind = _Kind.ROWS if is_row or (varies and not needs_others) else _Kind.OTHERS if varies else _Kind.CONSTANT
        kinds.append(kind)
    return kinds


def is_inexact(value: Any) -> bool:
    """Whether a value is floating-point or complex, and so has a derivative."""
    return jnp.issubdtype(jax.typeof(value).dtype, jnp.inexact)
