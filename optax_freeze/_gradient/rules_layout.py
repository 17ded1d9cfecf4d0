"""Rules for operations that join, pad and reshape arrays, which renumber the trainable rows."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.source_info_util import current

from optax_freeze._gradient.frozen_array import Unread, read
from optax_freeze._gradient.row_numbers import numbers, of_numbers
from optax_freeze._gradient.rules import Equation, Whole, rule
from optax_freeze._gradient.split_array import (
    PartlyFrozen,
    SplitArray,
    at_axis,
    has_split,
    made_of,
    on_device,
    trainable_rows,
    trains_in_any,
    undifferentiated,
    with_guarded_rows,
)

_MOST_NUMBERS = 2**20  # the maximum length of an axis after a reshape, because its row numbers are listed


@rule("device_put", enters=True)
def device_put(eqn: Equation, *values: Any) -> Any:
    """Arrays that are not read from the host yet stay there until they are used on the device."""
    unread = [value.frozen if isinstance(value, PartlyFrozen) else value for value in values]
    to_device = all(target == jax.memory.Space.Device for target in eqn.params["devices"])
    return list(values) if to_device and all(isinstance(value, Unread) for value in unread) else None


@rule("reshape")
def reshape(eqn: Equation, x: SplitArray, *dynamic_sizes: Any) -> Any:
    """Keeps the array split if frozen and trainable elements are separate along one axis of the result.

    This can be the row axis itself, a part of it, or an axis that it is merged into.
    """
    if dynamic_sizes or eqn.params["dimensions"] is not None or eqn.params.get("sharding") is not None:
        return None
    sizes = eqn.params["new_sizes"]
    for axis in range(len(sizes)):
        trains = _trains_after_reshape(x, sizes, axis)
        if trains is not None:
            index = of_numbers(dataclasses.replace(x.index, axis=axis), np.flatnonzero(trains), len(trains))
            rows = eqn.bind(x.rows, new_sizes=at_axis(sizes, axis, index.count))
            return x.like(eqn.bind(x.frozen), rows, index=index)
    return None


def _trains_after_reshape(x: SplitArray, sizes: Sequence[int], axis: int) -> np.ndarray | None:
    """Which entries along an axis of the result are trainable; None if an entry has both frozen and trainable elements.

    In row-major order, an entry of the new axis contains several rows, or a row contains several entries.
    """
    before, new_before, size = math.prod(x.frozen.shape[: x.axis]), math.prod(sizes[:axis]), sizes[axis]
    trains = np.zeros(x.size, bool)
    trains[numbers(x.index)] = True
    if before % new_before == 0:
        trains = np.tile(trains, before // new_before) if before * x.size <= _MOST_NUMBERS * new_before else trains[:0]
    elif new_before % before == 0 and x.size % (new_before // before) == 0:
        blocks = trains.reshape(new_before // before, -1)
        trains = blocks[0] if (blocks == blocks[0]).all() else trains[:0]
    else:
        return None
    if not len(trains) or size == 1:
        return None
    if size % len(trains) == 0 and (size == len(trains) or size <= _MOST_NUMBERS):
        return np.repeat(trains, size // len(trains))
    if len(trains) % size == 0:
        groups = trains.reshape(size, -1)
        return groups[:, 0] if (groups == groups[:, :1]).all() else None
    return None


@rule("concatenate", enters=True)
def concatenate(eqn: Equation, *operands: Any) -> Any:
    """Joins arrays along the row axis or along another axis."""
    axis = eqn.params["dimension"]
    if not has_split(operands):
        return None
    operands = tuple(on_device(x, eqn.primitive.name, current()) if has_split([x]) else x for x in operands)
    splits = [x for x in operands if isinstance(x, SplitArray)]
    if eqn.has_activation(operands) or any(x.axis != splits[0].axis for x in splits):
        return eqn.bind_whole(*operands)
    if axis != splits[0].axis:
        return _side_by_side(eqn, operands, splits[0].axis)
    joined = _one_after_another(eqn, operands, axis)
    eqn.record("kept", *operands)
    return joined


def _one_after_another(eqn: Equation, operands: Sequence[Any], axis: int) -> SplitArray:
    """Joins the rows of all operands. The rows of a dense operand are trainable if it may have a gradient."""
    splits = [x for x in operands if isinstance(x, SplitArray)]
    first = made_of(splits, numbers(splits[0].index))
    frozen, rows, trains, size = [], [], [], 0
    for x in operands:
        if isinstance(x, SplitArray):
            frozen.append(x.frozen)
            rows.append(x.rows)
            trains.append(size + numbers(x.index))
        elif isinstance(x, Tracer):
            frozen.append(undifferentiated(first, x))
            rows.append(x)
            trains.append(size + np.arange(x.shape[axis]))
        else:
            frozen.append(read(x))
        size += np.shape(frozen[-1])[axis]
    index = of_numbers(first.index, np.concatenate(trains), size)
    return first.like(eqn.bind(*frozen), jnp.concatenate(rows, axis), index=index)


@rule("stack", enters=True)
def stack(eqn: Equation, *operands: Any) -> Any:
    """Joins arrays along a new axis."""
    if not has_split(operands):
        return None
    operands = tuple(on_device(x, eqn.primitive.name, current()) if has_split([x]) else x for x in operands)
    splits = [x for x in operands if isinstance(x, SplitArray)]
    if eqn.has_activation(operands) or any(x.axis != splits[0].axis for x in splits):
        return eqn.bind_whole(*operands)
    return _side_by_side(eqn, operands, splits[0].axis + (eqn.params["axis"] <= splits[0].axis))


def _side_by_side(eqn: Equation, operands: Sequence[Any], axis: int) -> SplitArray | Whole:
    """Joins operands along another axis than the row axis ``axis``; rows trainable in any operand are trainable."""
    splits = [x for x in operands if isinstance(x, SplitArray)]
    trains = trains_in_any(splits)
    if len(trains) == splits[0].size:
        return eqn.bind_whole(*operands)
    first = made_of(splits, trains)
    frozen = [x.frozen if isinstance(x, SplitArray) else read(x) for x in operands]
    rows = [
        x.widened(trains).rows if isinstance(x, SplitArray) else trainable_rows(first.index, dense, first.axis)
        for x, dense in zip(operands, frozen, strict=True)
    ]
    eqn.record("kept", *operands)
    return with_guarded_rows(first.like(eqn.bind(*frozen), eqn.bind(*rows), axis))


@rule("pad")
def pad(eqn: Equation, x: SplitArray, value: Any) -> Any:
    """Pads within rows, and adds frozen rows between and around them; negative padding removes rows."""
    config, axis = eqn.params["padding_config"], x.axis
    low, _, interior = map(int, config[axis])
    frozen = _padded(eqn, x, x.frozen, value, config)
    size, moved = frozen.shape[axis], low + numbers(x.index) * (1 + interior)
    inside = (moved >= 0) & (moved < size)
    if not inside.any():
        return frozen
    rows = x.rows if inside.all() else jnp.take(x.rows, np.flatnonzero(inside), axis, mode="clip", unique_indices=True)
    rows = _padded(eqn, x, rows, value, (*config[:axis], (0, 0, 0), *config[axis + 1 :]))
    if rows.shape[axis] == size:
        return rows
    return with_guarded_rows(x.like(frozen, rows, index=of_numbers(x.index, moved[inside], size)))


def _padded(eqn: Equation, x: SplitArray, part: Any, value: Any, config: Sequence[Any]) -> jax.Array:
    """Pads one part of ``x``. A padding value that may have a gradient is inserted by a selection.

    JAX cannot transpose a padding if only its value is differentiated.
    """
    padded = eqn.bind(part, undifferentiated(x, value), padding_config=config)
    if not isinstance(value, Tracer):
        return padded
    is_padding = eqn.bind(np.zeros(part.shape, bool), np.bool_(True), padding_config=config)
    return jnp.where(is_padding, value, padded)
