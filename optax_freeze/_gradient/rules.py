"""The table of rules for evaluating operations on split arrays.

A rule is a function ``rule(eqn, *operands)``, where some operands are a :class:`SplitArray`. It returns a split result
if the operation keeps rows separate, a dense result if it reads rows, or None if it needs the merged array. A rule is
exact in both parts, so it can be differentiated any number of times with respect to either part. A rule that reads the
whole array and computes only the gradient of the trainable rows returns its result as :class:`Whole`.
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
    """An equation of a jaxpr without its operands; ``evaluate`` interprets the programs that it contains."""

    primitive: Any
    params: dict[str, Any]
    evaluate: Any = None
    of_params: Sequence[bool] = ()  # which operands are computed from parameters and constants alone

    def bind_params(self, **changed: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the arguments of ``primitive.bind``, with some params changed."""
        return bind_params(self.primitive, {**self.params, **changed})

    def bind(self, *operands: Any, **changed: Any) -> Any:
        """Applies the operation to dense operands, with some of its params changed.

        If operands are late, it is delayed, or reads them; its derivative reads them again.
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
        """Applies the operation to both parts of ``x``; ``of_rows`` are the params that differ for the rows."""
        return x.like(self.bind(x.frozen, *others), self.bind(x.rows, *others, **of_rows), axis)

    def bind_whole(self, *operands: Any) -> Whole:
        """Applies the operation to whole arrays. XLA must be able to fuse it with the slice of its gradient."""
        return Whole(self.bind(*(x.joined() if isinstance(x, SplitArray) else dense(x) for x in operands)))

    def has_activation(self, operands: Sequence[Any]) -> bool:
        """Whether one of the operands depends on other values than parameters and constants."""
        return any(np.ndim(x) and not known for x, known in zip(operands, self.of_params, strict=True))

    def dense(self, value: Any) -> Any:
        """Returns ``value`` as one dense array, read for the operation."""
        return dense(on_device(value, self.primitive.name, current()))

    def record(self, effect: str, *values: Any) -> None:
        """Adds the operation to the logs of the split arrays among the values."""
        for value in values:
            if isinstance(value, PartlyFrozen):
                value.record(self.primitive.name, effect, current())


class InRows(NamedTuple):
    """How an operation is applied to only the trainable rows of one operand."""

    apply: Callable[..., Any]  # called with the operands, with only the trainable rows of this one
    axis: int | None  # the row axis of the result; None if the operation sums over the rows


def multilinear(operands: Sequence[Any], of_whole: Callable[..., Any], of_rows: dict[int, InRows]) -> Whole | None:
    """Applies an operation that is linear in each operand to whole arrays; only rows of split ones are differentiated.

    Args:
      operands: the operands, split or dense.
      of_whole: the operation on dense arrays.
      of_rows: for each position of a split operand, how the operation is applied to only its trainable rows.
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
    """Returns the tangent of the result ``out``, given the tangent of ``x``; None if it is zero."""
    if not is_zero(tangent.frozen) or _is_dearer_in_rows(x, of_rows.axis, operands, out):
        part = spread_tangent(x.index, tangent.frozen, tangent.rows, x.frozen)
        return None if part is None else with_operand(of_whole, part)
    if is_zero(tangent.rows):
        return None
    term = with_operand(of_rows.apply, tangent.rows)
    if of_rows.axis is None:
        return term
    index = dataclasses.replace(x.index, axis=of_rows.axis)
    return jax.lax.optimization_barrier(spread(index, term, out))  # otherwise a TPU stores the gradient of `out` twice


def _with_operand(operands: Sequence[Any], i: int, apply: Callable[..., Any], value: Any) -> Any:
    return apply(*operands[:i], value, *operands[i + 1 :])


def _is_dearer_in_rows(x: SplitArray, axis: int | None, operands: Sequence[Any], out: Any) -> bool:
    """Whether looking up scattered rows would read more elements of activations than the leaf has."""
    if padding(x.index, x.axis, x.frozen.ndim) is not None:
        return False
    read = [out] if axis is not None else [y for y in operands if np.shape(y) != np.shape(x.frozen)]
    return sum(map(np.size, read)) * x.index.count > x.frozen.size * x.size


def static_rows(eqn: Equation, value: Any) -> Any:
    """Returns ``value``, merged if its row numbers are known only at run time."""
    if not isinstance(value, DynamicSplitArray):
        return value
    eqn.record("merged", value)
    return dense(value)


class Rule(NamedTuple):
    """A rule in the table.

    Attributes:
      apply: the rule.
      enters: whether the rule evaluates programs; it then reads frozen arrays and records operations itself.
      dynamic: whether the rule accepts a :class:`DynamicSplitArray`; for other rules it is merged first.
      late: whether the rule accepts a split array whose frozen part is not read from the host yet.
    """

    apply: Callable[..., Any]
    enters: bool = False
    dynamic: bool = False
    late: bool = False


NO_RULE = Rule(lambda eqn, *operands: None)

RULES: dict[str, Rule] = {}
"""The rules by the names of their primitives."""


def rule(
    *names: str, enters: bool = False, dynamic: bool = False, late: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that registers a function as the rule for the primitives with these names."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, Rule(function, enters, dynamic, late)))
        return function

    return register
