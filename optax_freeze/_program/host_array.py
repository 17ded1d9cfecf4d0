"""Arrays in host memory, of which rows are brought to the device where they are read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from optax_freeze._program.deferred import Deferred, Reader
from optax_freeze._program.regions import EVERYTHING, DynamicRows, Region, Rows
from optax_freeze._spec import host_rows
from optax_freeze._spec.memory_kinds import ROWS_AT_ONCE, is_in_blocks, to_device
from optax_freeze._spec.sharding import in_mesh_of, varies, zeros

FEWEST_AXES = 3
"""The TPU compiler slices arrays in host memory of three axes or more only."""

_MOST_RUNS = 16


def _second_read() -> Callable[[Any], bool]:
    """A function that says whether it was called with the same key before."""
    keys: set[Any] = set()
    return lambda key: key in keys or bool(keys.add(key))


class HostArray(Deferred):
    """An array in host memory, or a row of it at the indices ``starts`` of its first axes, or the rows of a ``region``.

    ``waits(region)``: whether a read waits for another operand, so that it is not merged with an earlier one.
    ``name``: under which reads are noted.
    """

    def __init__(
        self,
        array: Any,
        waits: Callable[[Any], bool] | None = None,
        starts: tuple[Any, ...] = (),
        region: Any = EVERYTHING,
        name: Any = None,
    ) -> None:
        self.array, self.waits, self.starts, self.region = array, waits or _second_read(), starts, region
        self.name, self.shape = name, region.shape(array.shape[len(starts) :])

    def read(self, region: Any, reader: Reader) -> jax.Array:
        with in_mesh_of(self.array):
            return self._read(region, reader)

    def _read(self, region: Any, reader: Reader) -> jax.Array:
        if 0 in (shape := region.shape(self.shape)):
            return zeros(jax.typeof(to_device(self.array)), shape)
        is_whole = self.region is EVERYTHING and len(self.shape) < FEWEST_AXES
        is_in_rows = bool(self.starts) or self.region is not EVERYTHING
        if region.axis > 0 or (region.axis == 0 and is_whole):
            if isinstance(region, DynamicRows) and region.axis == 0 and not self.starts and is_in_blocks(self.shape):
                self._note(reader, by_rows=True)
                return jax.lax.map(lambda i: _row_of_block(self.array, i), region.indices)
            return region.take(self.read(EVERYTHING, reader))
        self._note(reader, is_in_rows or region is not EVERYTHING)
        region, array = self._rows_of(region), self.array
        # XLA merges two equal copies into one that waits in device memory between its readers: so the second one waits
        # for another operand of its reader.
        key, beside = (DynamicRows if isinstance(region, DynamicRows) else region, *self.starts), reader.beside
        # Inside `jax.shard_map`, what it is read beside would make it vary, and what is the same everywhere is merged.
        if beside is not None and self.waits(key) and varies(jax.typeof(beside)) <= varies(jax.typeof(array)):
            array = jax.lax.optimization_barrier((array, beside))[0]
        if region is EVERYTHING:
            return self._slice(array) if self.starts else to_device(array)
        if isinstance(region, Rows) and len(region.runs) <= _MOST_RUNS:
            parts = [self._slice(array, start, stop - start) for start, stop in region.runs]
        elif region.count > _MOST_RUNS:
            return jax.lax.map(lambda i: self._slice(array, i)[0], region.indices)
        else:
            parts = [self._slice(array, region.indices[k]) for k in range(region.count)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _note(self, reader: Reader, by_rows: bool) -> None:
        if reader.reads is not None:
            reader.reads.append((self.name, reader.eqn, by_rows))

    def is_by_rows(self, region: Region, in_blocks: bool = False) -> bool:
        is_block = in_blocks and isinstance(region, DynamicRows) and is_in_blocks(self.shape)
        return region.axis == 0 and (len(self.shape) >= FEWEST_AXES or is_block)

    def _slice(self, array: Any, start: Any = None, count: int = 1) -> jax.Array:
        """``count`` rows from ``start`` on of the row, or the row itself."""
        starts = self.starts if start is None else (*self.starts, start)
        return jnp.squeeze(_slice(array, starts, count), tuple(range(len(self.starts))))

    def _rows_of(self, region: Any) -> Any:
        """The region of the row that a region of these rows is."""
        if EVERYTHING in (region, self.region):
            return self.region if region is EVERYTHING else region
        if isinstance(region, Rows) and isinstance(self.region, Rows):
            return Rows(0, self.region.numbers[region.numbers])
        return DynamicRows(0, jnp.take(self.region.indices, region.indices))

    def rows(self, region: Region, is_row: bool = False) -> "HostArray":
        rows = self._rows_of(region)
        if not is_row:
            return HostArray(self.array, _never, self.starts, rows, self.name)
        is_known = isinstance(rows, Rows)
        start = int(rows.numbers[0]) if is_known else rows.indices[0]
        return HostArray(self.array, self.waits if is_known else _never, (*self.starts, start), name=self.name)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the array in host memory."""
        return not self.starts and self.region is EVERYTHING


def _never(_: Any) -> bool:
    """In a loop, nothing is merged with what is outside of it."""
    return False


def _slice(array: Any, starts: tuple[Any, ...], count: int) -> jax.Array:
    """``count`` rows from the last of the ``starts`` on; under ``jax.vmap``, of the array on the device."""
    if len(starts) == 1 and isinstance(starts[0], int | np.integer):
        return host_rows.read(0, (int(starts[0]), int(starts[0]) + count), array, None)
    shape = array.shape
    sizes = (*(1,) * (len(starts) - 1), count, *shape[len(starts) :])
    starts = (*starts, *[np.int32(0)] * (len(shape) - len(starts)))

    def sliced(array: Any, *starts: Any) -> Any:
        return jax.lax.dynamic_slice(array, starts, sizes)

    at_once = jax.custom_batching.custom_vmap(sliced)

    @at_once.def_vmap
    def _(size: int, mapped: Any, array: Any, *starts: Any) -> Any:
        return jax.vmap(sliced, [0 if here else None for here in mapped])(to_device(array), *starts), True

    rows = at_once(array, *starts)
    # The TPU compiler aborts if a transposed layout reaches the slice of an array on the host.
    return with_layout_constraint(to_device(rows), Layout(tuple(range(len(shape)))))


def _row_of_block(matrix: Any, i: Any) -> jax.Array:
    """A row of a matrix in host memory, cut out of a block of rows on the device."""
    start = jnp.clip(i, 0, matrix.shape[0] - 1) & -ROWS_AT_ONCE
    block = jnp.squeeze(_slice(matrix, (start,), ROWS_AT_ONCE))
    return jax.lax.dynamic_index_in_dim(block, i - start, 0, keepdims=False)
