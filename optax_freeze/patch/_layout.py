"""The trainable part of a leaf as the tensors of a file: the whole leaf, or rows or elements with their numbers."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from optax_freeze._errors import is_number
from optax_freeze._spec.element_masks import elements, rows
from optax_freeze._spec.masks import Choice
from optax_freeze._spec.memory_kinds import to_device
from optax_freeze._spec.selection import (
    FROZEN,
    TRAINABLE,
    DenseMask,
    DynamicRowIndex,
    RowIndex,
    RowSelection,
    Selection,
)
from optax_freeze._spec.tree import MASKED_NODE
from optax_freeze._verify.processes import on_host
from optax_freeze._verify.saved_base import LeafRecord

VALUES, ROWS, INDICES = ".values", ".rows", ".indices"
"""What follows the name of a leaf that trains in part."""


def taken(selection: Selection, value: Any) -> tuple[Selection, dict[str, np.ndarray]]:
    """The selection of a leaf as it is recorded, and its tensors by what follows its name."""
    if selection is FROZEN:
        return FROZEN, {}
    value = np.asarray(value, jax.numpy.result_type(value)) if is_number(value) else value
    if isinstance(selection, RowSelection):
        return _rows_of(selection, value)
    if isinstance(selection, DenseMask):
        return selection.with_array(MASKED_NODE), _elements_of(selection, value)
    return TRAINABLE, {"": on_host(value)}


def _rows_of(selection: RowSelection, value: Any) -> tuple[Selection, dict[str, np.ndarray]]:
    numbers, axis = selection.numbers if isinstance(selection, RowIndex) else on_host(selection.array), selection.axis
    # Dynamic numbers may be out of range, or given again: those are no rows.
    numbers, places = np.unique(numbers, return_index=True)
    places = places[(numbers >= 0) & (numbers < selection.size)]
    numbers = numbers[(numbers >= 0) & (numbers < selection.size)].astype(np.int32)
    if not numbers.size:
        return FROZEN, {}
    if isinstance(value, jax.Array):
        values = np.take(on_host(selection.take(value).values), places, axis)
    else:
        values = np.take(value, numbers, axis)
    found = DynamicRowIndex(MASKED_NODE, axis, selection.size, len(numbers))
    return found, {VALUES: np.asarray(values, order="C"), ROWS: numbers}


def _elements_of(selection: DenseMask, value: Any) -> dict[str, np.ndarray]:
    mask = on_host(selection.array)
    indices = np.flatnonzero(~mask).astype(index_dtype(mask.shape))
    if isinstance(value, jax.Array) and indices.size and indices.dtype == np.int32:
        values = on_host(DenseMask(mask, True, len(indices)).take(to_device(value)).values)
    else:
        values = np.take(on_host(value), indices)
    return {VALUES: values, INDICES: indices}


def index_dtype(shape: tuple[int, ...]) -> Any:
    return np.dtype(np.int32 if math.prod(shape) < 2**31 else np.int64)


def tensors_of(leaf: LeafRecord, tensors: Mapping[str, np.ndarray], name: str) -> dict[str, Any]:
    """The shape and dtype of each tensor of a leaf; how many elements of a dense mask there are, its indices say."""
    struct, selection = leaf.struct, leaf.selection
    assert struct is not None
    if isinstance(selection, RowSelection):
        values = jax.ShapeDtypeStruct(selection.shape_of_part(struct.shape), struct.dtype)
        return {f"{name}{VALUES}": values, f"{name}{ROWS}": jax.ShapeDtypeStruct((selection.count,), np.int32)}
    if isinstance(selection, DenseMask):
        indices = tensors.get(f"{name}{INDICES}")
        count = selection.count if indices is None or selection.compact else indices.size
        count = jax.ShapeDtypeStruct((count or 0,), index_dtype(struct.shape))
        return {f"{name}{VALUES}": count.update(dtype=struct.dtype), f"{name}{INDICES}": count}
    return {} if selection is FROZEN else {name: struct}


def numbers_fit(leaf: LeafRecord, tensors: Mapping[str, np.ndarray], name: str) -> bool:
    """Whether the numbers of rows or elements ascend, and are those of a leaf."""
    if isinstance(leaf.selection, RowSelection):
        numbers, size = tensors[f"{name}{ROWS}"], leaf.selection.size
    elif isinstance(leaf.selection, DenseMask):
        numbers, size = tensors[f"{name}{INDICES}"], math.prod(leaf.struct.shape)  # type: ignore[union-attr]
    else:
        return True
    return bool(np.all(np.diff(numbers) > 0) and np.all((numbers >= 0) & (numbers < size)))


def indices_in(shape: tuple[int, ...], leaf: LeafRecord, tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """The flat indices of the elements in a leaf of a shape that may be longer than the recorded one."""
    indices, old = tensors[f"{name}{INDICES}"], leaf.struct.shape  # type: ignore[union-attr]
    return indices if shape == old else np.ravel_multi_index(np.unravel_index(indices, old), shape)


def choice_of_leaf(leaf: LeafRecord, tensors: Mapping[str, np.ndarray], name: str, shape: Any) -> Choice:
    """What the spec of a patch says about a leaf of this shape."""
    selection = leaf.selection
    if isinstance(selection, RowSelection):
        numbers = tensors[f"{name}{ROWS}"]
        start, stop = int(numbers[0]), int(numbers[-1]) + 1
        index = slice(start, stop) if stop - start == len(numbers) else numbers.tolist()
        return ~rows(index, selection.axis)
    if isinstance(selection, DenseMask):
        return elements(_frozen(indices_in(shape, leaf, tensors, name), shape), compact=selection.compact)
    return selection is FROZEN


def _frozen(indices: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    mask = np.ones(shape, bool)
    mask.flat[indices] = False
    return mask


def trained(leaf: LeafRecord, tensors: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Where a patch has values of a leaf: a boolean array that broadcasts against it."""
    if isinstance(leaf.selection, RowSelection):
        found = np.zeros(shape[leaf.selection.axis], bool)
        found[tensors[f"{name}{ROWS}"]] = True
        return np.expand_dims(found, tuple(i for i in range(len(shape)) if i != leaf.selection.axis))
    if isinstance(leaf.selection, DenseMask):
        return ~_frozen(indices_in(shape, leaf, tensors, name), shape)
    old = leaf.struct.shape  # type: ignore[union-attr]
    if shape == old:
        return np.ones((1,) * len(shape), bool)
    found = np.zeros(shape, bool)
    found[tuple(map(slice, old))] = True
    return found
