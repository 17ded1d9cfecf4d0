"""The trainable part of a leaf as the tensors of a file: the whole leaf, or rows or elements with their numbers."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

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


class TrainedLeaf(NamedTuple):
    """A leaf that trains, and the tensors of its file, in which its own begin with its name there."""

    leaf: LeafRecord
    name: str
    tensors: Mapping[str, np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.struct.shape  # type: ignore[union-attr]

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of its rows, or of its elements in the flattened leaf."""
        return self.tensors[self.name + (ROWS if isinstance(self.leaf.selection, RowSelection) else INDICES)]

    def structs(self) -> dict[str, Any]:
        """The shape and dtype of each of its tensors; how many elements of a dense mask there are, its indices say."""
        struct, selection, name = self.leaf.struct, self.leaf.selection, self.name
        assert struct is not None
        if isinstance(selection, RowSelection):
            values = jax.ShapeDtypeStruct(selection.shape_of_part(struct.shape), struct.dtype)
            return {f"{name}{VALUES}": values, f"{name}{ROWS}": jax.ShapeDtypeStruct((selection.count,), np.int32)}
        if isinstance(selection, DenseMask):
            indices = self.tensors.get(f"{name}{INDICES}")
            count = selection.count if indices is None or selection.compact else indices.size
            count = jax.ShapeDtypeStruct((count or 0,), index_dtype(struct.shape))
            return {f"{name}{VALUES}": count.update(dtype=struct.dtype), f"{name}{INDICES}": count}
        return {name: struct}

    def numbers_fit(self) -> bool:
        """Whether the numbers of rows or elements ascend, and are those of the leaf."""
        selection = self.leaf.selection
        if selection is TRAINABLE:
            return True
        size = selection.size if isinstance(selection, RowSelection) else math.prod(self.shape)
        return bool(np.all(np.diff(self.numbers) > 0) and np.all((self.numbers >= 0) & (self.numbers < size)))

    def choice(self, shape: tuple[int, ...]) -> Choice:
        """What the spec of a patch says about the leaf, in a shape that may be longer than the recorded one."""
        selection = self.leaf.selection
        if isinstance(selection, RowSelection):
            start, stop = int(self.numbers[0]), int(self.numbers[-1]) + 1
            is_run = stop - start == len(self.numbers)
            return ~rows(slice(start, stop) if is_run else self.numbers.tolist(), selection.axis)
        return isinstance(selection, DenseMask) and elements(~self.trained(shape), compact=selection.compact)

    def trained(self, shape: tuple[int, ...]) -> np.ndarray:
        """Where the patch has values of the leaf in this shape: a boolean array that broadcasts against it."""
        selection, old = self.leaf.selection, self.shape
        if isinstance(selection, RowSelection):
            found = np.zeros(shape[selection.axis], bool)
            found[self.numbers] = True
            return np.expand_dims(found, tuple(i for i in range(len(shape)) if i != selection.axis))
        if selection is TRAINABLE and shape == old:
            return np.ones((1,) * len(shape), bool)
        found = np.zeros(shape, bool)
        if selection is TRAINABLE:
            found[tuple(map(slice, old))] = True
        else:
            indices = self.numbers
            found.flat[indices if shape == old else np.ravel_multi_index(np.unravel_index(indices, old), shape)] = True
        return found
