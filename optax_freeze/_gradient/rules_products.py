"""Rules for matmuls, convolutions and ragged matmuls of experts, which are linear in each operand.

The product is computed from the whole array. Only its tangent is computed from the trainable rows, so the gradient is a
product of their size, and nothing of the size of the result is computed twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._gradient.row_numbers import numbers
from optax_freeze._gradient.rules import Equation, InRows, multilinear, rule
from optax_freeze._gradient.split_array import SplitArray, trainable_rows
from optax_freeze._spec.selection import RowIndex


@rule("dot_general")
def dot_general(eqn: Equation, *operands: Any) -> Any:
    """A matmul whose rows are a free, batch or contracted dimension."""
    return multilinear(operands, eqn.bind, {i: _in_product(eqn, i, x, operands) for i, x in _splits(operands)})


def _in_product(eqn: Equation, mine: int, x: SplitArray, operands: Sequence[Any]) -> InRows:
    """Returns how a matmul is applied to the trainable rows of its first or second operand."""
    contracting, batch = eqn.params["dimension_numbers"]
    if x.axis in contracting[mine]:
        other_axis, out = contracting[1 - mine][contracting[mine].index(x.axis)], None
    elif x.axis in batch[mine]:
        out = batch[mine].index(x.axis)
        other_axis = batch[1 - mine][out]
    else:
        free = [d for d in range(x.frozen.ndim) if d not in (*contracting[mine], *batch[mine])]
        of_lhs = np.ndim(operands[0].frozen if isinstance(operands[0], SplitArray) else operands[0])
        before = 0 if mine == 0 else of_lhs - len(contracting[0]) - len(batch[0])
        other_axis, out = None, len(batch[0]) + before + free.index(x.axis)

    return InRows(eqn.bind if other_axis is None else _with_cut(eqn, x.index, 1 - mine, other_axis), out)


def _splits(operands: Sequence[Any]) -> list[tuple[int, SplitArray]]:
    return [(i, x) for i, x in enumerate(operands) if isinstance(x, SplitArray)]


def _with_cut(eqn: Equation, index: RowIndex, other: int, axis: int) -> Callable[..., Any]:
    """Returns the operation on trainable rows, which slices the same rows out of another operand."""

    def function(*values: Any) -> Any:
        return eqn.bind(*(trainable_rows(index, v, axis) if i == other else v for i, v in enumerate(values)))

    return function


@rule("conv_general_dilated")
def conv_general_dilated(eqn: Equation, *operands: Any) -> Any:
    """A convolution whose rows are output channels, input channels or examples."""
    if eqn.params["feature_group_count"] > 1 or eqn.params["batch_group_count"] > 1:
        return None
    (batch, of_inputs, *_), (of_outputs, of_kernel, *_), out = (tuple(spec) for spec in eqn.params["dimension_numbers"])
    of_rows = {}
    for i, x in _splits(operands):
        free, contracted, other_axis = [(batch, of_inputs, of_kernel), (of_outputs, of_kernel, of_inputs)][i]
        if x.axis == free:
            of_rows[i] = InRows(eqn.bind, out[i])
        elif x.axis == contracted:
            of_rows[i] = InRows(_with_cut(eqn, x.index, 1 - i, other_axis), None)
        else:  # along the window
            return None
    return multilinear(operands, eqn.bind, of_rows)


@rule("ragged_dot_general")
def ragged_dot(eqn: Equation, lhs: Any, rhs: Any, sizes: Any) -> Any:
    """A matmul of groups of rows, each with its own expert, if some experts are frozen."""
    groups = eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
    if isinstance(lhs, SplitArray) or isinstance(sizes, SplitArray) or tuple(groups) != (rhs.axis,):
        return None

    index = rhs.index

    def of_experts(lhs: Any, experts: Any, sizes: Any) -> Any:
        return eqn.bind(lhs, *_among_zeros(index, experts, sizes))

    return multilinear([lhs, rhs, sizes], eqn.bind, {1: InRows(of_experts, axis=None)})


def _among_zeros(index: RowIndex, experts: Any, sizes: Any) -> tuple[jax.Array, jax.Array]:
    """The trainable experts and their group sizes, with one expert of zeros for each run of frozen experts between."""
    zeros = jnp.zeros_like(jax.lax.slice_in_dim(experts, 0, 1, axis=index.axis))
    arrays, of_groups, end = [], [], 0
    for i, number in enumerate(numbers(index).tolist()):
        if number > end:
            arrays.append(zeros)
            of_groups.append(sizes[..., end:number].sum(-1, keepdims=True, dtype=sizes.dtype))
        arrays.append(jax.lax.slice_in_dim(experts, i, i + 1, axis=index.axis))
        of_groups.append(sizes[..., number : number + 1])
        end = number + 1
    return jnp.concatenate(arrays, index.axis), jnp.concatenate(of_groups, -1)
