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
import numpy as np
from jax.extend.source_info_util import current

from optax_freeze._gradient.dynamic_split_array import DynamicSplitArray
from optax_freeze._gradient.frozen_array import has_late
from optax_freeze._gradient.jaxprs import bind_params
from optax_freeze._gradient.late_operations import read_again, waiting
from optax_freeze._gradient.row_numbers import padding
from optax_freeze._gradient.split_array import PartlyFrozen, SplitArray, dense, on_device
from optax_freeze._gradient.with_rows import is_zero, spread, spread_tangent


class Whole(NamedTuple):
    """The result of an operation on a whole array, of which only the trainable rows are differentiated."""

    out: Any


class Equation(NamedTuple):
    """An equation of a jaxpr without its operands, and the interpreter, for the programs that it contains."""

    primitive: Any
    params: dict[str, Any]
    evaluate: Any = None
    of_params: Sequence[bool] = ()  # which operands are computed from parameters and constants alone

    def bind_params(self, **changed: Any) -> tuple[Any, dict[str, Any]]:
        """The arguments of ``primitive.bind``, with some params changed."""
        return bind_params(self.primitive, {**self.params, **changed})

    def bind(self, *operands: Any, **changed: Any) -> Any:
        """The operation applied to dense operands, with some of its params changed.

        Where operands are late, it waits, or reads them; so does its derivative.
        """
        if has_late(operands):
            name, bind = self.primitive.name, functools.partial(self.bind, **changed)
            result = waiting(name, {**self.params, **changed}, bind, operands)
            if result is None:
                return read_again(name, bind, operands)
            return [result] if self.primitive.multiple_results else result
        functions, params = self.bind_params(**changed)
        return self.primitive.bind(*functions, *operands, **params)

    def bind_parts(self, x: Any, *others: Any, axis: int | None = None, **of_rows: Any) -> Any:
        """The operation applied to both parts of ``x``; ``of_rows`` are the params that differ for the rows."""
        return x.like(self.bind(x.frozen, *others), self.bind(x.rows, *others, **of_rows), axis)

    def bind_whole(self, *operands: Any) -> Whole:
        """The operation applied to whole arrays, if XLA fuses it, and so the cut of its gradient to the rows."""
        return Whole(self.bind(*(x.joined() if isinstance(x, SplitArray) else dense(x) for x in operands)))

    def has_activation(self, operands: Sequence[Any]) -> bool:
        """Whether one of the operands is computed from more than parameters and constants."""
        return any(np.ndim(x) and not known for x, known in zip(operands, self.of_params, strict=True))

    def dense(self, value: Any) -> Any:
        """``value`` as one array, read for the operation."""
        return dense(on_device(value, self.primitive.name, current()))

    def record(self, effect: str, *values: Any) -> None:
        """Adds the operation to the logs of the split arrays among the values."""
        for value in values:
            if isinstance(value, PartlyFrozen):
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
        out, operands = function(*values), [dense(x) for x in values]
        terms = []
        for i, (x, tangent) in enumerate(zip(values, tangents, strict=True)):
            with_operand = functools.partial(_with_operand, operands, i)
            if isinstance(x, SplitArray):
                terms.append(_of_split(x, tangent, of_whole, of_rows[i], with_operand, operands, out))
            elif not is_zero(tangent):
                terms.append(with_operand(of_whole, tangent))
        terms = [term for term in terms if term is not None]
        return out, functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(out)

    function.defjvp(jvp, symbolic_zeros=True)
    return Whole(function(*wholes))


def _of_split(
    x: SplitArray,
    tangent: SplitArray,
    of_whole: Callable[..., Any],
    of_rows: InRows,
    with_operand: Callable[..., Any],
    operands: Sequence[Any],
    out: Any,
) -> Any:
    """The tangent of the result ``out`` from that of ``x``; None if it is zero."""
    if not is_zero(tangent.frozen) or _is_dearer_in_rows(x, of_rows.axis, operands, out):
        part = spread_tangent(x.index, tangent.frozen, tangent.rows, x.frozen)
        return None if part is None else with_operand(of_whole, part)
    if is_zero(tangent.rows):
        return None
    term = with_operand(of_rows.apply, tangent.rows)
    if of_rows.axis is None:
        return term
    index = dataclasses.replace(x.index, axis=of_rows.axis)
    return jax.lax.optimization_barrier(spread(index, term, out))  # else a TPU stores the gradient of `out` twice


def _with_operand(operands: Sequence[Any], i: int, apply: Callable[..., Any], value: Any) -> Any:
    return apply(*operands[:i], value, *operands[i + 1 :])


def _is_dearer_in_rows(x: SplitArray, axis: int | None, operands: Sequence[Any], out: Any) -> bool:
    """Whether scattered rows had to be looked up in more elements of activations than the leaf has."""
    if padding(x.index, x.axis, x.frozen.ndim) is not None:
        return False
    read = [out] if axis is not None else [y for y in operands if np.shape(y) != np.shape(x.frozen)]
    return sum(map(np.size, read)) * x.index.count > x.frozen.size * x.size


def static_rows(eqn: Equation, value: Any) -> Any:
    """``value``, merged if its rows are not known while the program is traced."""
    if not isinstance(value, DynamicSplitArray):
        return value
    eqn.record("merged", value)
    return dense(value)


class Rule(NamedTuple):
    """A rule in the table.

    One that ``enters`` programs reads frozen arrays and records operations by itself. A rule that is ``dynamic`` is
    given a :class:`DynamicSplitArray` as it is; for others it is merged. A rule that is ``late`` is given a split array
    whose frozen part is not read from the host yet.
    """

    apply: Callable[..., Any]
    enters: bool = False
    dynamic: bool = False
    late: bool = False


NO_RULE = Rule(lambda eqn, *operands: None)

RULES: dict[str, Rule] = {}
"""The rule for each primitive, by the name of the primitive."""


def rule(
    *names: str, enters: bool = False, dynamic: bool = False, late: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the rule for the primitives of these names."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, Rule(function, enters, dynamic, late)))
        return function

    return register
