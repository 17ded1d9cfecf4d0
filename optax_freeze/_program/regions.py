"""Regions: which part of a value is wanted.

A region is :data:`EVERYTHING`, :class:`Rows` that are known while a program is traced, or :class:`DynamicRows`, whose
numbers are values of the program. All rows are ascending. A value may be stored in several regions.
"""

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from optax_freeze._spec.indexing import get_rows
from optax_freeze._spec.selection import DynamicRowIndex, RowIndex, Selection
from optax_freeze._spec.sharding import explicit_sharding, fitting, with_sharding

_FEW = 16
"""Rows in up to this many runs are sliced; of more runs, they are looked up."""


class Region:
    """A part of a value: all of it, or rows along an axis."""

    axis: int = -1
    count: int = 0

    def take(self, array: Any) -> Any:
        """This part of a whole array."""
        return array

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of this part of a value."""
        return tuple(shape)

    def along(self, axis: int) -> "Region":
        """The same rows along another axis."""
        return self

    def inside(self) -> "Region":
        """The same rows of one row along the first axis."""
        return self.along(self.axis - 1)

    def share(self, shape: Sequence[int]) -> float:
        """How much of a value this part is."""
        return 1.0

    def __repr__(self) -> str:
        return "EVERYTHING" if self is EVERYTHING else "LAZY"


EVERYTHING = Region()
LAZY = Region()
"""Of an array in host memory: the parts that turn out to be needed, each where it is read."""


class Unread:
    """An array of which parts are brought to the device, or computed, where they are read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        raise NotImplementedError

    def read(self, region: Region, beside: Any = None) -> jax.Array:
        """A region on the device; ``beside``: an array that is there before a second read of the same region."""
        raise NotImplementedError

    def rows(self, region: Region, is_row: bool = False) -> "Unread":
        """Rows along the first axis, unread; or one row, without this axis."""
        raise NotImplementedError

    def row(self, i: Any) -> "Unread":
        """One row along the first axis, unread."""
        return self.rows(Rows(0, [i]) if isinstance(i, int) else DynamicRows(0, i[None]), is_row=True)

    def inside(self) -> "Unread":
        """The same array inside a loop."""
        return self

    def as_operand(self) -> Any:
        """The array in host memory, or else on the device."""
        return self.read(EVERYTHING)


class _SomeRows(Region):
    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[: self.axis], self.count, *shape[self.axis + 1 :])

    def share(self, shape: Sequence[int]) -> float:
        return self.count / max(shape[self.axis], 1)

    @functools.cached_property
    def _key(self) -> Any: ...

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key == other._key  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def indices(self) -> jax.Array:
        """The numbers of the rows, int32."""
        raise NotImplementedError

    def find(self, i: Any, size: int) -> tuple[jax.Array, bool]:
        """The positions of rows ``i`` among these rows, -1 for others; and whether different rows stay different.

        Without others, only those within ``size`` rows count.
        """
        i = jnp.asarray(i)
        table = jnp.full(size, -1, jnp.int32)
        positions = jnp.arange(self.count, dtype=jnp.int32)
        table = table.at[self.indices].set(positions, mode="drop", wrap_negative_indices=False)
        position = jnp.take(table, i, mode="clip")
        return jnp.where((i >= 0) & (i < size), position, -1), False


class Rows(_SomeRows):
    """Rows with these numbers, which are ascending."""

    def __init__(self, axis: int, numbers: Any) -> None:
        self.axis, self.numbers = axis, np.asarray(numbers, np.int64)
        self.count = len(self.numbers)

    @functools.cached_property
    def _key(self) -> Any:
        return self.axis, self.numbers.tobytes()

    @functools.cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The rows as runs (start, stop)."""
        edges = np.flatnonzero(np.diff(self.numbers) != 1) + 1
        return [(int(run[0]), int(run[-1]) + 1) for run in np.split(self.numbers, edges)] if self.count else []

    @functools.cached_property
    def step(self) -> int | None:
        """The distance between the rows, if it is always the same."""
        steps = set(np.diff(self.numbers).tolist())
        return None if len(steps) > 1 else steps.pop() if steps else 1

    @property
    def indices(self) -> jax.Array:
        if self.step is not None:
            return int(self.numbers[0]) + self.step * jnp.arange(self.count, dtype=jnp.int32)
        if len(self.runs) <= _FEW:
            return jnp.concatenate([jnp.arange(start, stop, dtype=jnp.int32) for start, stop in self.runs])
        return jnp.asarray(self.numbers.astype(np.int32))

    def find(self, i: Any, size: int) -> tuple[jax.Array, bool]:
        i = jnp.asarray(i)
        if len(self.runs) > 1 or not self.count:
            return super().find(i, size)
        start = self.runs[0][0]
        i = i if jnp.issubdtype(i.dtype, jnp.signedinteger) and i.dtype.itemsize >= 4 else i.astype(jnp.int32)
        return i - start, start == 0

    def take(self, array: Any) -> Any:
        shape = jnp.shape(array)
        if self.count == shape[self.axis]:
            return array

        array = jnp.asarray(array)

        def rows(array: Any) -> Any:
            cut = functools.partial(jax.lax.slice_in_dim, array, axis=self.axis)
            if not self.count:
                return cut(0, 0)
            if self.step is not None:
                return cut(int(self.numbers[0]), int(self.numbers[-1]) + 1, self.step)
            if len(self.runs) <= _FEW:
                return jnp.concatenate([cut(start, stop) for start, stop in self.runs], self.axis)
            return get_rows(self.axis, self.indices, array)

        return with_sharding(explicit_sharding(array, self.shape(shape)), rows, array)

    def along(self, axis: int) -> "Rows":
        return Rows(axis, self.numbers)

    def shifted(self, by: int) -> "Rows":
        """The rows that have these numbers plus ``by``."""
        return Rows(self.axis, self.numbers + by)

    def within(self, other: "Rows") -> "Rows | None":
        """The positions of these rows among ``other`` rows, if it has them all."""
        if self.axis != other.axis:
            return None
        positions = np.searchsorted(other.numbers, self.numbers)
        if (positions.size and positions[-1] >= other.count) or not np.array_equal(
            other.numbers[positions], self.numbers
        ):
            return None
        return Rows(self.axis, positions)

    def __or__(self, other: "Rows") -> "Rows":
        return Rows(self.axis, np.union1d(self.numbers, other.numbers))

    def __repr__(self) -> str:
        return f"Rows({self.axis}, {self.numbers.tolist()})"


class DynamicRows(_SomeRows):
    """Rows whose numbers, int32 and ascending, are values of the program, plus ``offset``; zeros if out of range."""

    def __init__(self, axis: int, numbers: Any, offset: int = 0) -> None:
        self.axis, self.numbers, self.offset, self.count = axis, numbers, offset, numbers.shape[0]

    @functools.cached_property
    def _key(self) -> Any:
        return self.axis, id(self.numbers), self.offset

    @property
    def indices(self) -> jax.Array:
        return self.numbers + self.offset if self.offset else self.numbers

    def take(self, array: Any) -> Any:
        array = jnp.asarray(array)
        sharding = explicit_sharding(array, self.shape(array.shape))
        return with_sharding(sharding, functools.partial(get_rows, self.axis), self.indices, array)

    def along(self, axis: int) -> "DynamicRows":
        return DynamicRows(axis, self.numbers, self.offset)

    def shifted(self, by: int) -> "DynamicRows":
        """The rows that have these numbers plus ``by``."""
        return DynamicRows(self.axis, self.numbers, self.offset + by)

    def __repr__(self) -> str:
        return f"DynamicRows({self.axis}, {self.numbers} + {self.offset})"


def region_of(selection: Selection) -> Region:
    """The trainable part of a leaf."""
    if isinstance(selection, RowIndex):
        return Rows(selection.axis, selection.numbers)
    if isinstance(selection, DynamicRowIndex):
        return DynamicRows(selection.axis, jnp.asarray(selection.array))
    return EVERYTHING


def zero_outside(region: Region, array: Any, shape: Sequence[int]) -> Any:
    """An array with this region of a value, zero in rows whose numbers are out of range."""
    if not isinstance(region, DynamicRows):
        return array
    inside = (region.indices >= 0) & (region.indices < shape[region.axis])
    inside = jnp.expand_dims(inside, tuple(i for i in range(array.ndim) if i != region.axis))
    return jnp.where(inside, array, jnp.zeros((), array.dtype))


def is_whole(region: Region, shape: Sequence[int]) -> bool:
    """Whether a region is all of a value of this shape."""
    return region is EVERYTHING or (isinstance(region, Rows) and region.count == shape[region.axis])


def is_scattered(region: Region, shape: Sequence[int]) -> bool:
    """Whether rows are so many and so scattered that reading them costs more than computing everything."""
    return (
        isinstance(region, Rows) and region.step is None and len(region.runs) > _FEW // 2 and region.share(shape) > 0.5
    )


def covering(regions: Sequence[Region], shape: Sequence[int]) -> list[Region]:
    """Regions in which an operation is computed that computes nothing twice, and not much more than these regions."""
    rows: dict[int, Rows] = {}
    others: list[Region] = []
    for region in regions:
        if is_whole(region, shape):
            return [EVERYTHING]
        if isinstance(region, Rows):
            rows[region.axis] = rows[region.axis] | region if region.axis in rows else region
        elif region not in others:
            others.append(region)
    found = [*rows.values(), *others]
    everything = any(is_whole(region, shape) for region in found)
    if everything or (len(found) > 1 and math.fsum(region.share(shape) for region in found) >= 1):
        return [EVERYTHING]
    return found


def varies(aval: Any) -> frozenset[str]:
    """The mesh axes over which a value varies inside ``jax.shard_map``, by its type."""
    if hasattr(aval, "vma"):
        return aval.vma
    return aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else frozenset()


def cast_to_vary(array: Any, axes: Any) -> jax.Array:
    """An array that varies over these mesh axes, too, inside ``jax.shard_map``."""
    new, lax = tuple(sorted(set(axes) - varies(jax.typeof(array)))), jax.lax
    if not new:
        return array
    return lax.pcast(array, new, to="varying") if hasattr(lax, "pcast") else lax.pvary(array, new)  # type: ignore[attr-defined]


def zeros(aval: Any, shape: Any = None) -> jax.Array:
    """Zeros laid out as a value of this type, or of another ``shape``."""
    shape = aval.shape if shape is None else tuple(shape)
    sharding: Any = getattr(aval, "sharding", None)
    is_explicit = isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types
    new = jax.lax.full(
        shape, 0, aval.dtype, sharding=fitting(sharding, len(aval.shape), shape) if is_explicit else None
    )
    return cast_to_vary(new, varies(aval))


def stored_region(stored: Collection[Region], region: Region) -> Region | None:
    """Which of the stored regions of a value another region of it is read from."""
    if region in stored or EVERYTHING in stored:
        return region if region in stored else EVERYTHING
    if not isinstance(region, Rows):
        return None
    return next((other for other in stored if isinstance(other, Rows) and region.within(other) is not None), None)


class Values:
    """The stored regions of the values of a program, by number."""

    def __init__(self, given: dict[int, Any] | None = None) -> None:
        self._stored: dict[int, dict[Region, Any]] = {n: {EVERYTHING: x} for n, x in (given or {}).items()}
        self.beside: Any = None  # an operand of the task that reads

    def write(self, number: int, region: Region, array: Any) -> None:
        """Stores a region of a value."""
        self._stored.setdefault(number, {})[region] = array

    def has(self, number: int) -> bool:
        """Whether any region of a value is stored."""
        return number in self._stored

    def read(self, number: int, region: Region) -> Any:
        """A region of a value, which is stored or part of one that is."""
        stored = self._stored[number]
        if isinstance(stored.get(EVERYTHING), Unread) and region is not LAZY:
            return stored[EVERYTHING].read(region, self.beside)
        other = stored_region(stored, region)
        if other is None:
            raise KeyError((number, region, list(stored)))
        if other == region:
            return stored[other]
        positions = region if other is EVERYTHING else region.within(other)  # type: ignore[attr-defined]
        return positions.take(stored[other])

    def read_run(self, number: int, rows: Rows) -> tuple[Any, int]:
        """An array with these consecutive first-axis rows, not cut, and the number of its first row."""
        stored = self._stored[number]
        if EVERYTHING in stored:
            return self.read(number, EVERYTHING), 0
        for other, array in stored.items():
            positions = rows.within(other) if isinstance(other, Rows) else None
            if positions is not None:
                return array, int(rows.numbers[0] - positions.numbers[0])
        raise KeyError((number, rows, list(stored)))

    def only(self, numbers: Iterable[int]) -> "Values":
        """The values with these numbers."""
        new = Values()
        new._stored = {number: dict(self._stored[number]) for number in numbers}
        return new

    def drop(self, number: int) -> None:
        """Forgets a value that is not read any more."""
        self._stored.pop(number, None)

    def copy(self) -> "Values":
        """A copy, to which values can be written that are not stored here."""
        return self.only(self._stored)
