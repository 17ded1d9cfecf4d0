"""Arrays in host memory, of which rows are brought to the device where they are read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from optax_freeze._program.regions import EVERYTHING, DynamicRows, Region, Rows, Unread
from optax_freeze._spec import host_rows
from optax_freeze._spec.memory import to_device

FEWEST_AXES = 3
"""The TPU compiler slices arrays in host memory of three axes or more only."""

_MOST_RUNS = 16


class HostArray(Unread):
    """An array in host memory, or a row of it at the indices ``starts`` of its first axes, or some of its rows.

    An array that was read in the forward pass is read again in the backward pass.
    """

    def __init__(
        self,
        array: Any,
        starts: tuple[Any, ...] = (),
        numbers: Any = None,
        in_loop: bool = False,
        was_read: bool = False,
    ) -> None:
        self.array, self.starts, self.numbers, self.in_loop, self.was_read = array, starts, numbers, in_loop, was_read
        self.regions_read: set[Any] = set()

    @property
    def shape(self) -> tuple[int, ...]:
        rest = self.array.shape[len(self.starts) :]
        return rest if self.numbers is None else (len(self.numbers), *rest[1:])

    def read(self, region: Region, beside: Any = None) -> jax.Array:
        if self.numbers is not None or (region.axis == 0 and len(self.shape) >= FEWEST_AXES):
            return self._some_rows(region, beside)
        array = self._fresh(EVERYTHING, beside)
        if not self.starts:
            return region.take(to_device(array))
        return region.take(jnp.squeeze(_slice(array, self.starts, 1), tuple(range(len(self.starts)))))

    def _some_rows(self, region: Region, beside: Any) -> jax.Array:
        array = self._fresh(region, beside)
        if self.numbers is None and isinstance(region, Rows) and len(region.runs) <= _MOST_RUNS:
            parts = [self._one(array, start, stop - start) for start, stop in region.runs]
        else:
            numbers = self._rows_of(region)
            if region.axis > 0:
                return region.take(self._some_rows(EVERYTHING, beside))
            if len(numbers) > _MOST_RUNS:
                return jax.lax.map(lambda i: self._one(array, i, 1)[0], numbers)
            parts = [self._one(array, numbers[k], 1) for k in range(len(numbers))]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _one(self, array: Any, start: Any, count: int) -> jax.Array:
        rows = _slice(array, (*self.starts, start), count)
        return jnp.squeeze(rows, tuple(range(len(self.starts))))

    def _fresh(self, region: Region, beside: Any) -> Any:
        """The array, on which a second read waits for another operand, so that it is not merged with the first."""
        key = (DynamicRows if isinstance(region, DynamicRows) else region, *self.starts)
        if self.in_loop or beside is None:
            return self.array
        if key not in self.regions_read and not self.was_read:
            self.regions_read.add(key)
            return self.array
        return jax.lax.optimization_barrier((self.array, beside))[0]

    def _rows_of(self, region: Region) -> Any:
        numbers = self.numbers
        if region is EVERYTHING or region.axis > 0:
            return numbers
        indices = region.indices  # type: ignore[attr-defined]
        return indices if numbers is None else jnp.take(numbers, indices)

    def rows(self, region: Any) -> "HostArray":
        return self._with(self.starts, self._rows_of(region), True)

    def row(self, i: Any) -> "HostArray":
        i = i if self.numbers is None else self.numbers[i]
        return self._with((*self.starts, i), None, self.in_loop or not isinstance(i, int))

    def inside(self) -> "HostArray":
        return self._with(self.starts, self.numbers, True)

    def as_operand(self) -> Any:
        return self.read(EVERYTHING) if self.starts or self.numbers is not None else self.array

    def _with(self, starts: tuple[Any, ...], numbers: Any, in_loop: bool) -> "HostArray":
        new = HostArray(self.array, starts, numbers, in_loop, self.was_read)
        new.regions_read = self.regions_read
        return new


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
    return to_device(with_layout_constraint(rows, Layout(tuple(range(len(shape))))))
