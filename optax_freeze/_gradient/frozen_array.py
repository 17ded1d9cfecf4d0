"""Frozen arrays that are read as late as possible, row by row, and copied from host memory if they are stored there.

If any frozen leaf is in host memory, frozen arrays are ``late``: an operation that depends on them only, such as a cast
or a transpose, is delayed until its result is used, and computed only for the rows that are used.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from optax_freeze._gradient.operation_log import Logged, OperationLog
from optax_freeze._spec.memory import to_device


class _Shaped:
    """Array attributes that are derived from ``shape``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its axes."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "start"],
    meta_fields=["count", "axes", "is_late", "on_host", "log"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class FrozenArray(_Shaped, Logged):
    """A wholly frozen leaf, or ``count`` of its rows from ``start`` on, counted over its first ``axes`` axes."""

    array: Any
    start: Any = None
    count: int | None = None
    axes: int = 1
    is_late: bool = False
    on_host: bool = False
    log: OperationLog | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows that are read, or of the whole array."""
        return self.array.shape if self.count is None else (self.count, *self.array.shape[self.axes :])

    @property
    def dtype(self) -> Any:
        """The dtype of the leaf."""
        return self.array.dtype

    def stretch(self, start: Any, count: int) -> "FrozenArray | None":
        """Returns ``count`` consecutive rows; None if there are no rows, or if they cannot be sliced."""
        if not self.shape[0] or (self.axes > 1 and count > 1):
            return None
        return dataclasses.replace(self, start=start if self.start is None else self.start + start, count=count)

    def of_rows(self, start: Any) -> "FrozenArray | None":
        """Selects one row along the next axis of the selected rows; None if no rows are selected."""
        if self.count is None:
            return None
        size = self.array.shape[self.axes]
        return dataclasses.replace(self, start=self.start * size + start, count=1, axes=self.axes + 1)

    def read(self, done: dict[int, Any]) -> Any:
        """Returns the array on the device; ``done`` caches arrays, so that each is read once."""
        if id(self) not in done:
            array = self.array
            if self.count is not None:
                array = self._rows()
                # The TPU compiler aborts if a transposed layout reaches the slice of an array on the host.
                array = with_layout_constraint(array, Layout(tuple(range(array.ndim)))) if self.on_host else array
            done[id(self)] = to_device(array)
        return done[id(self)]

    def _rows(self) -> Any:
        assert self.count is not None
        if self.axes == 1:
            of_rows = _slice_rows if self.on_host else jax.lax.dynamic_slice_in_dim
            return of_rows(self.array, self.start, self.count)
        ahead, rest = self.array.shape[: self.axes], self.array.shape[self.axes :]
        starts, left = [], self.start
        for size in ahead[::-1]:
            starts, left = [left % size, *starts], left // size
        starts += [np.int32(0)] * len(rest)
        row = jax.lax.dynamic_slice(self.array, starts, (*[1] * self.axes, *rest))
        return jax.lax.squeeze(row, tuple(range(self.axes - 1)))


def _slice_rows(array: Any, start: Any, count: int) -> Any:
    """Slices ``count`` rows of an array on the host; under ``jax.vmap``, the array is copied to the device first."""

    @jax.custom_batching.custom_vmap
    def rows(array: Any, start: Any) -> Any:
        return jax.lax.dynamic_slice_in_dim(array, start, count)

    @rows.def_vmap
    def _(size: int, mapped: Any, array: Any, start: Any) -> Any:
        of_one = lambda array, start: jax.lax.dynamic_slice_in_dim(array, start, count)  # noqa: E731
        return jax.vmap(of_one, [0 if here else None for here in mapped])(to_device(array), start), True

    return rows(array, start)


@dataclasses.dataclass(frozen=True, eq=False)
class LateOperation:
    """An operation on frozen arrays only, which is applied when its result is read.

    ``stretch(operands, start, count)`` returns some rows of the result, computed from some rows of the operands. It
    returns None if all rows of the operands are needed.
    """

    name: str
    apply: Callable[..., Any]
    struct: jax.ShapeDtypeStruct
    stretch: Callable[[Sequence[Any], Any, int], Any]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["operands"], meta_fields=["operation"])
@dataclasses.dataclass(frozen=True, eq=False)
class Computed(_Shaped):
    """The result of an operation on frozen arrays and numbers that is not computed yet."""

    operands: tuple[Any, ...]
    operation: LateOperation

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.operation.struct.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the result."""
        return self.operation.struct.dtype

    def stretch(self, start: Any, count: int) -> Any:
        """Returns some rows of the result, not computed yet; None if all rows have to be computed."""
        return self.operation.stretch(self.operands, start, count)

    def read(self, done: dict[int, Any]) -> Any:
        """Returns the array on the device."""
        if id(self) not in done:
            done[id(self)] = self.operation.apply(*(_read(operand, done) for operand in self.operands))
        return done[id(self)]


Unread = FrozenArray | Computed


def _read(value: Any, done: dict[int, Any]) -> Any:
    return value.read(done) if isinstance(value, Unread) else value


def read(value: Any) -> Any:
    """Returns ``value``, as a dense array if it was not read yet."""
    return _read(value, {})


def read_all(values: Sequence[Any]) -> list[Any]:
    """Like :func:`read` for several values, but reads each frozen array only once."""
    done: dict[int, Any] = {}
    return [_read(value, done) for value in values]


def size_of(value: Any) -> int:
    """The number of operations and arrays that a value is computed from; repeated ones count each time."""
    return 1 + sum(map(size_of, value.operands)) if isinstance(value, Computed) else 1


def sources(value: Any) -> Iterator[FrozenArray]:
    """The frozen arrays that a value is read from."""
    if isinstance(value, FrozenArray):
        yield value
    elif isinstance(value, Computed):
        for operand in value.operands:
            yield from sources(operand)


def is_late(value: Any) -> bool:
    """Whether a value should be read as late as possible."""
    return any(source.is_late for source in sources(value))


def has_late(values: Sequence[Any]) -> bool:
    """Whether any of these values is late."""
    return any(map(is_late, values))


def record_reads(value: Any, operation: str, source: Any) -> None:
    """Adds an operation to the logs of the frozen arrays that ``value`` is read from."""
    for array in sources(value):
        effect = "host whole" if array.count is None else "host rows"
        array.record(operation, effect if array.on_host else "device", source)


def with_log_of_host(value: Any, log: OperationLog) -> Any:
    """Returns ``value`` with another log for reads from the host."""
    if isinstance(value, FrozenArray):
        return dataclasses.replace(value, log=log)
    if isinstance(value, Computed):
        return dataclasses.replace(value, operands=tuple(with_log_of_host(x, log) for x in value.operands))
    return value


def reshaped(value: Unread, shape: tuple[int, ...]) -> Unread:
    """Returns ``value`` with another shape, not read yet."""
    if isinstance(value, Computed) and value.operation.name == "reshape":
        (value,) = value.operands
    if value.shape == shape:
        return value

    def stretch(operands: Sequence[Any], start: Any, count: int) -> Any:
        (x,) = operands
        if isinstance(x, FrozenArray) and x.count == 1 and x.shape == (1, *shape) and count == 1:
            return x.of_rows(start)
        if not shape or not shape[0] or not x.ndim or x.shape[0] % shape[0]:
            return None
        rows = x.shape[0] // shape[0]
        part = x.stretch(start * rows, count * rows)
        return None if part is None else reshaped(part, (count, *shape[1:]))

    def apply(x: Any) -> Any:
        return jax.lax.squeeze(x, (0,)) if x.shape == (1, *shape) else jax.lax.reshape(x, shape)

    return Computed((value,), LateOperation("reshape", apply, jax.ShapeDtypeStruct(shape, value.dtype), stretch))


def row_of(value: Unread, i: Any) -> Unread | None:
    """Returns row ``i`` without the row axis, not read yet; None if all rows have to be read."""
    row = value.stretch(i, 1) if value.ndim else None
    return None if row is None else reshaped(row, value.shape[1:])


def has_rows(value: Unread) -> bool:
    """Whether one row can be read without the others."""
    return row_of(value, 0) is not None


def selected(which: Any, position: Any, rows: Any, frozen: Unread, axis: int) -> Computed:
    """Selects ``rows`` at these positions if they are trainable, otherwise frozen rows, which are not read yet."""

    def apply(which: Any, position: Any, rows: Any, frozen: Any) -> Any:
        return jnp.where(which, jnp.take(rows, position, axis=axis, mode="clip"), frozen)

    struct = jax.ShapeDtypeStruct(frozen.shape, frozen.dtype)
    return Computed((which, position, rows, frozen), LateOperation("select", apply, struct, lambda *_: None))
