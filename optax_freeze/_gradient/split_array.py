"""Partially frozen arrays, split into the full array, which is not differentiated, and the trainable rows.

The gradient with respect to ``SplitArray.rows`` has the size of the trainable rows. The rules for JAX operations share
the functions in this file, for example to take the trainable rows of a dense array or to merge both parts.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._gradient.frozen_array import read, record_reads, with_log_of_host
from optax_freeze._gradient.operation_log import Logged, OperationLog
from optax_freeze._gradient.row_numbers import locate, numbers, of_numbers, padding
from optax_freeze._spec.indexing import get_rows
from optax_freeze._spec.layout import explicit_sharding, laid_out
from optax_freeze._spec.selection import RowIndex
from optax_freeze._spec.tree import Part


@dataclasses.dataclass(frozen=True, eq=False)
class PartlyFrozen(Logged):
    """A partially frozen array in two parts. ``frozen`` may be an array that is not read yet."""

    frozen: Any
    rows: Any

    def merged(self) -> jax.Array:
        """Returns the array as one dense array."""
        raise NotImplementedError


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["frozen", "rows"],
    meta_fields=["index", "elements", "log", "whole", "in_jvp"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class SplitArray(PartlyFrozen):
    """An array whose trainable rows are ``rows`` and whose frozen rows are in ``frozen``.

    ``frozen`` has the full shape. Its values at the trainable rows are stale and may be NaN. They are removed by
    selection, never multiplied by zero, in values and in gradients. An operation on ``frozen`` may compute anything at
    these rows, as long as its other operands are :meth:`guarded`.

    If ``whole``, ``frozen`` also contains the values of ``rows``, for example if the gradient is taken at the given
    parameters. An operation may then read the whole array, and add the gradient of the rows to its result.

    ``elements`` is the size of the leaf that the array was computed from. ``in_jvp`` marks an operand of a custom JVP
    rule. The rule may be transposed, so ``frozen`` is not a constant there.
    """

    index: RowIndex
    elements: int
    log: OperationLog | None = None  # only set by `explain` and in trials
    whole: bool = False
    in_jvp: bool = False

    @classmethod
    def of(cls, frozen: Any, rows: Any, index: RowIndex, log: OperationLog | None, whole: bool) -> "SplitArray":
        """Creates an array of two parts, which are made to vary over the same mesh axes inside ``jax.shard_map``."""
        if varies(frozen) != varies(rows):
            rows = jnp.where(True, rows, trainable_rows(index, frozen))
            frozen = jnp.where(True, frozen, join(index, index.axis, frozen, jax.lax.stop_gradient(rows)))
        return cls(frozen, rows, index, np.size(frozen), log, whole)

    @property
    def axis(self) -> int:
        """The axis of the rows."""
        return self.index.axis

    @property
    def size(self) -> int:
        """The length of that axis."""
        return self.index.size

    def like(self, frozen: Any, rows: Any, axis: int | None = None, index: RowIndex | None = None) -> "SplitArray":
        """Returns an array of two new parts, with the same row numbers unless ``axis`` or ``index`` is given."""
        if index is None:
            index = self.index if axis is None else dataclasses.replace(self.index, axis=axis)
        return dataclasses.replace(self, frozen=frozen, rows=rows, index=index)

    def widened(self, trains: np.ndarray) -> "SplitArray":
        """Returns the same array with more trainable rows: those with the numbers ``trains``."""
        if len(trains) == self.index.count:
            return self
        index = of_numbers(self.index, trains, self.size)
        places = of_numbers(self.index, np.searchsorted(trains, numbers(self.index)), len(trains))
        frozen = on_device(self).frozen
        rows = trainable_rows(index, frozen)
        return self.like(frozen, join(places, self.axis, rows, self.rows), index=index)

    def guarded(self, operand: Any, shape: tuple[int, ...]) -> Any:
        """Makes an operand of an elementwise operation with a result of this shape constant at the stale rows.

        The derivative may be infinite there. Multiplied by the zero cotangent of these rows, it would be NaN.
        """
        if not isinstance(operand, Tracer) or not jnp.issubdtype(operand.dtype, jnp.inexact):
            return operand
        operand = jnp.broadcast_to(operand, shape)
        if self.in_jvp:
            return jnp.where(self.index.frozen(operand.ndim), operand, jnp.zeros((), operand.dtype))
        return jnp.where(self.index.frozen(operand.ndim), operand, jax.lax.stop_gradient(operand))

    def merged(self) -> jax.Array:
        """Returns the array as one dense array: a copy of ``frozen`` unless it is whole."""
        if self.whole:
            from optax_freeze._gradient.with_rows import with_rows  # loads jax.extend

            return with_rows(self.index, self.frozen, self.rows)
        if self.in_jvp:
            return join(self.index, self.axis, self.frozen, self.rows)
        return self.index.put(self.frozen, Part(self.rows, self.index, jnp.shape(self.frozen)))

    def made_whole(self) -> "SplitArray":
        """Returns the same array with ``whole=True``."""
        if self.whole:
            return self
        fuse = functools.partial(join, self.index, self.axis)
        rows = jax.lax.stop_gradient(self.rows)
        whole = laid_out(explicit_sharding(self.frozen), fuse, self.frozen, rows)
        return dataclasses.replace(self, frozen=whole, whole=True)

    def joined(self) -> jax.Array:
        """Returns a dense array, for an operation that XLA fuses with the selection of the rows and its gradient."""
        if self.in_jvp:
            return join(self.index, self.axis, self.frozen, self.rows)
        return self.made_whole().merged()


def on_device(value: Any, operation: str = "", source: Any = None) -> Any:
    """Returns ``value`` after reading it, or its frozen part, for an operation."""
    unread = value.frozen if isinstance(value, PartlyFrozen) else value
    record_reads(unread, operation, source)
    return dataclasses.replace(value, frozen=read(unread)) if isinstance(value, PartlyFrozen) else read(unread)


def dense(value: Any) -> Any:
    """Returns ``value`` as one dense array."""
    return on_device(value).merged() if isinstance(value, PartlyFrozen) else read(value)


def trainable_rows(index: RowIndex, array: Any, axis: int | None = None) -> jax.Array:
    """Returns the trainable rows of a dense array, also of a tangent, along ``axis``: that of the index by default."""
    array, axis = jnp.asarray(array), index.axis if axis is None else axis

    def rows(array: Any) -> jax.Array:
        if index.run is not None:
            return jax.lax.slice_in_dim(array, *index.run, axis=axis)
        return get_rows(axis, index.indices(), array)

    sharding = explicit_sharding(array, at_axis(array.shape, axis, index.count))
    return laid_out(sharding, rows, array)


def join(index: RowIndex, axis: int, frozen: Any, rows: Any) -> jax.Array:
    """Merges computed parts into a dense array by a selection that fuses with their computation."""
    i = jax.lax.broadcasted_iota(jnp.int32, [index.size if d == axis else 1 for d in range(jnp.ndim(frozen))], axis)
    if edges := padding(index, axis, jnp.ndim(frozen)):
        spread = jax.lax.pad(rows, jnp.zeros((), rows.dtype), edges)
        start, after, between = edges[axis]
        inside = (i >= start) & (i < index.size - after)
        return jnp.where(inside & ((i - start) % (between + 1) == 0) if between else inside, spread, frozen)
    trains, position = locate(index, jnp.arange(index.size, dtype=jnp.int32))
    spread = jnp.take(rows, position, axis=axis, mode="clip")
    return jnp.where(trains.reshape(i.shape), spread, frozen)


def segments(splits: Sequence[SplitArray], length: int) -> list[tuple[int, int]]:
    """Returns the runs of consecutive rows in which each array is all frozen or all trainable."""
    trains = np.zeros((len(splits), length), bool)
    for row, split in zip(trains, splits, strict=True):
        row[numbers(split.index)] = True
    inner = (np.flatnonzero((trains[:, 1:] != trains[:, :-1]).any(0)) + 1).tolist()
    return list(zip([0, *inner], [*inner, length], strict=True))


def varies(array: Any) -> Any:
    """Returns the mesh axes over which an array varies inside ``jax.shard_map``."""
    aval: Any = jax.typeof(array)
    return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying


def at_axis(sizes: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    """Returns a shape with another size at one axis."""
    return (*sizes[:axis], size, *sizes[axis + 1 :])


def has_split(values: Sequence[Any]) -> bool:
    """Whether any of these values is split."""
    return any(isinstance(value, PartlyFrozen) for value in values)


def trains_in_any(splits: Sequence[SplitArray]) -> np.ndarray:
    """Returns the numbers of the rows that are trainable in any of these arrays."""
    return functools.reduce(np.union1d, [numbers(x.index) for x in splits])


def made_of(splits: Sequence[SplitArray], trains: np.ndarray) -> SplitArray:
    """Returns the first array with the rows ``trains`` trainable, as a template for a result of several arrays."""
    return dataclasses.replace(splits[0].widened(trains), whole=all(x.whole for x in splits))


def with_log(value: Any, log: OperationLog) -> Any:
    """Returns ``value`` with another log if it is split or read from the host."""
    if isinstance(value, PartlyFrozen):
        return dataclasses.replace(value, frozen=with_log_of_host(value.frozen, log), log=log)
    return with_log_of_host(value, log)


def undifferentiated(x: SplitArray, operand: Any) -> Any:
    """Returns a dense operand that can be written to stale rows of ``x.frozen``: it is not differentiated there."""
    if not isinstance(operand, Tracer) or not jnp.issubdtype(operand.dtype, jnp.inexact):
        return operand
    if x.in_jvp:  # the custom rule may be transposed
        return jnp.where(False, operand, jnp.zeros((), operand.dtype))
    return jax.lax.stop_gradient(operand)


def with_guarded_rows(x: SplitArray) -> SplitArray:
    """Stops the gradient at the stale rows of ``x``, after dense operands were written into ``x.frozen``."""
    return x.like(x.guarded(x.frozen, jnp.shape(x.frozen)), x.rows)
