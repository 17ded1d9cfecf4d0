"""Computes only some rows of the outputs of a program.

The operations before such an output are applied to rows of their operands, as far back as each row of a result depends
only on the same row of an operand. The compiler removes the original operations if nothing else needs them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from optax_freeze._gradient.jaxprs import ELEMENTWISE
from optax_freeze._gradient.rules import Equation
from optax_freeze._gradient.split_array import at_axis, trainable_rows
from optax_freeze._spec.selection import RowIndex


class _Program:
    """An evaluated program, with the value of each variable and the equation that computes it."""

    def __init__(self, closed: ClosedJaxpr, arguments: Sequence[Any]) -> None:
        self.values: dict[Any, Any] = {}
        self.sources: dict[Any, Any] = {}
        jaxpr = closed.jaxpr
        self.values.update(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))
        for eqn in jaxpr.eqns:
            outs = _bind(eqn, *(self.value(v) for v in eqn.invars))
            self.values.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
            self.sources.update(dict.fromkeys(eqn.outvars, eqn))

    def value(self, v: Any) -> Any:
        return v.val if isinstance(v, Literal) else self.values[v]

    def rows(self, v: Any, index: RowIndex) -> jax.Array:
        """Returns the rows of a variable."""
        eqn = None if isinstance(v, Literal) else self.sources.get(v)
        cut = None if eqn is None else _CUTS.get(eqn.primitive.name)
        rows = None if cut is None else cut(self, eqn, index)
        return trainable_rows(index, self.value(v)) if rows is None else rows


def rows_of_outputs(
    closed: ClosedJaxpr, arguments: Sequence[Any], indices: dict[int, RowIndex]
) -> tuple[list[Any], dict[int, Any]]:
    """Returns the outputs of a program, and the requested rows of some outputs by their position."""
    program = _Program(closed, arguments)
    rows = {i: program.rows(closed.jaxpr.outvars[i], index) for i, index in indices.items()}
    return [program.value(v) for v in closed.jaxpr.outvars], rows


def has_rows(closed: ClosedJaxpr, output: int) -> bool:
    """Whether some rows of an output can be computed without its other rows."""
    sources = {v: eqn.primitive.name for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    v = closed.jaxpr.outvars[output]
    return not isinstance(v, Literal) and sources.get(v) in _CUTS


def _elementwise(program: _Program, eqn: Any, index: RowIndex) -> Any:
    operands = [
        program.rows(v, index) if v.aval.ndim and v.aval.shape[index.axis] == index.size else program.value(v)
        for v in eqn.invars
    ]
    return _bind(eqn, *operands) if eqn.params.get("sharding") is None else None


def _transpose(program: _Program, eqn: Any, index: RowIndex) -> Any:
    return _bind(eqn, program.rows(eqn.invars[0], _along(index, eqn.params["permutation"][index.axis])))


def _broadcast(program: _Program, eqn: Any, index: RowIndex) -> Any:
    if len(eqn.invars) > 1 or eqn.params.get("sharding") is not None:
        return None
    [operand], axes = eqn.invars, eqn.params["broadcast_dimensions"]
    axis = axes.index(index.axis) if index.axis in axes else None
    by_rows = axis is not None and operand.aval.shape[axis] == index.size
    part = program.rows(operand, _along(index, axis)) if by_rows else program.value(operand)
    return _bind(eqn, part, shape=at_axis(eqn.params["shape"], index.axis, index.count))


def _reduce_sum(program: _Program, eqn: Any, index: RowIndex) -> Any:
    if eqn.params.get("out_sharding") is not None:
        return None
    kept = [d for d in range(eqn.invars[0].aval.ndim) if d not in eqn.params["axes"]]
    return _bind(eqn, program.rows(eqn.invars[0], _along(index, kept[index.axis])))


def _dot_general(program: _Program, eqn: Any, index: RowIndex) -> Any:
    if eqn.params.get("out_sharding") is not None:
        return None
    contracting, batch = eqn.params["dimension_numbers"]
    free = [[d for d in range(v.aval.ndim) if d not in (*contracting[i], *batch[i])] for i, v in enumerate(eqn.invars)]
    axes = [[*batch[0], *free[0], *[None] * len(free[1])], [*batch[1], *[None] * len(free[0]), *free[1]]]
    parts = [
        program.value(v) if axes[i][index.axis] is None else program.rows(v, _along(index, axes[i][index.axis]))
        for i, v in enumerate(eqn.invars)
    ]
    return _bind(eqn, *parts)


def _bind(eqn: Any, *operands: Any, **changed: Any) -> Any:
    with eqn.ctx.manager:
        return Equation(eqn.primitive, eqn.params).bind(*operands, **changed)


def _along(index: RowIndex, axis: Any) -> RowIndex:
    return dataclasses.replace(index, axis=int(axis))


_CUTS: dict[str, Callable[[_Program, Any, RowIndex], Any]] = {
    **dict.fromkeys((*ELEMENTWISE.split(), "add_any"), _elementwise),
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reduce_sum": _reduce_sum,
    "dot_general": _dot_general,
}
