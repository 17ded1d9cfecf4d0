"""What is a rule, and which operation has which?

A rule is ``rule(eqn, *operands)``, where some operands are a :class:`SplitArray`. It returns the result, split as long
as the rows stay apart and dense where they are read, or None where the operation needs the merged array. A rule is
exact in both parts, so it holds whichever part is differentiated, and how often. A rule that reads the whole array and
has the gradient of the rows alone returns its result as :class:`Whole`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.source_info_util import current

from optax_freeze._gradient.split_array import SplitArray, dense
from optax_freeze._gradient.with_rows import is_zero, spread, spread_tangent


class Whole(NamedTuple):
    """The result of an operation on a whole array, of which only the trainable rows are differentiated."""

    out: Any


class Equation(NamedTuple):
    """An equation of a jaxpr without its operands, and the interpreter, for the programs that it contains."""

    primitive: Any
    params: dict[str, Any]
    evaluate: Callable[..., list[Any]]
    of_params: Sequence[bool] = ()  # which operands are computed from parameters and constants alone

    def bind_params(self, **changed: Any) -> tuple[Any, dict[str, Any]]:
        """The arguments of ``primitive.bind``: functions that come before the operands (up to JAX 0.9), and params."""
        bound = self.primitive.get_bind_params({**self.params, **changed})
        return bound if isinstance(bound, tuple) else ((), bound)

    def bind(self, *operands: Any, **changed: Any) -> Any:
        """The operation applied to dense operands, with some of its params changed."""
        functions, params = self.bind_params(**changed)
        return self.primitive.bind(*functions, *operands, **params)

    def bind_parts(self, x: SplitArray, *others: Any, axis: int | None = None, **of_rows: Any) -> SplitArray:
        """The operation applied to both parts of ``x``; ``of_rows`` are the params that differ for the rows."""
        return x.like(self.bind(x.frozen, *others), self.bind(x.rows, *others, **of_rows), axis)

    def bind_whole(self, *operands: Any) -> Whole:
        """The operation applied to whole arrays, if XLA fuses it, and so the cut of its gradient to the rows."""
        return Whole(self.bind(*(x.joined() if isinstance(x, SplitArray) else x for x in operands)))

    def record(self, effect: str, *values: Any) -> None:
        """Adds the operation to the logs of the split arrays among the values."""
        for value in values:
            if isinstance(value, SplitArray):
                value.record(self.primitive.name, effect, current())


class InRows(NamedTuple):
    """What an operation makes of the trainable rows of one operand."""

    apply: Callable[..., Any]  # called with the operands, of which this one has its trainable rows alone
    axis: int | None  # of the rows in the result; None if the operation sums over them


def multilinear(operands: Sequence[Any], of_whole: Callable[..., Any], of_rows: dict[int, InRows]) -> Whole | None:
    """The result of an operation on whole arrays, which is linear in each of its operands.

    Args:
      operands: split or dense.
      of_whole: the operation.
      of_rows: for each split operand, by its position, what the operation makes of the trainable rows.
    """
    if any(isinstance(x, SplitArray) and x.in_jvp for x in operands):
        return None
    wholes = [x.made_whole() if isinstance(x, SplitArray) else x for x in operands]

    @jax.custom_jvp
    def function(*values: Any) -> Any:
        return of_whole(*map(dense, values))

    def jvp(values: Any, tangents: Any) -> Any:
        out = function(*values)
        dense_values = [dense(x) for x in values]
        terms = []
        for i, (x, tangent) in enumerate(zip(values, tangents, strict=True)):
            apply, part = of_whole, tangent
            if isinstance(x, SplitArray):
                part = spread_tangent(x.index, tangent.frozen, tangent.rows, x.frozen)
                if is_zero(tangent.frozen):
                    apply, part = of_rows[i].apply, tangent.rows
            if part is None or is_zero(part):
                continue
            term = apply(*dense_values[:i], part, *dense_values[i + 1 :])
            if apply is not of_whole and of_rows[i].axis is not None:
                term = spread(dataclasses.replace(x.index, axis=of_rows[i].axis), term, out)
            terms.append(term)
        return out, functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(out)

    function.defjvp(jvp, symbolic_zeros=True)
    return Whole(function(*wholes))


class Rule(NamedTuple):
    """A rule in the table. One that ``enters`` programs reads frozen arrays and records operations by itself."""

    apply: Callable[..., Any]
    enters: bool


NO_RULE = Rule(lambda eqn, *operands: None, enters=False)

RULES: dict[str, Rule] = {}
"""The rule for each primitive, by the name of the primitive."""


def rule(*names: str, enters: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the rule for the primitives of these names."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, Rule(function, enters)))
        return function

    return register
