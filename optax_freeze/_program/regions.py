"""Regions: which part of a value is wanted.

A region is :data:`EVERYTHING`, :class:`Rows` that are known while a program is traced, or :class:`DynamicRows`, whose
numbers are values of the program; or a name of them, in the plan of a custom derivative: each of its passes binds it to
an array of its own. All rows are ascending. A value may be stored in several regions.
"""

import functools
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._program.symbolic import if_undecided
from optax_freeze._spec.indexing import get_rows, of_each_row
from optax_freeze._spec.selection import DynamicRowIndex, RowIndex, Selection
from optax_freeze._spec.sharding import explicit_sharding, in_mesh_of, in_this_mesh, with_sharding, zeros

_FEW = 16
"""Rows in up to this many runs are sliced; of more runs, they are looked up."""


class Region:
    """A part of a value: all of it, or rows along an axis."""

    axis: int = -1
    count: int = 0
    is_named: bool = False  # whether it has :class:`Numbers`

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

    def bound(self, numbers: "Mapping[Numbers, jax.Array]") -> "Region":
        """The same region, with the array of the numbers that it names."""
        return self

    def __repr__(self) -> str:
        return "EVERYTHING"


EVERYTHING = Region()


class _SomeRows(Region):
    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[: self.axis], self.count, *shape[self.axis + 1 :])

    @if_undecided(1.0)
    def share(self, shape: Sequence[int]) -> float:
        return self.count / max(int(shape[self.axis]), 1)

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
        position = jnp.take(self._positions(size), i, mode="clip")
        return jnp.where((i >= 0) & (i < size), position, -1), False

    def _positions(self, size: int) -> jax.Array:
        """The position of each of ``size`` rows among these rows, the same for equal ones, or -1."""
        positions = jnp.arange(self.count, dtype=jnp.int32)
        table = jnp.full(size, -1, jnp.int32)
        return table.at[self.indices].max(positions, mode="drop", wrap_negative_indices=False)

    def joined(self, array: Any, size: int) -> Any:
        """An array of these rows in which only those that :meth:`find` finds were changed, with the change in all."""
        return array

    def _then(self, *step: Any) -> Any:
        """The rows whose numbers are those of these rows after a step, see :func:`_after`."""
        raise NotImplementedError

    def shifted(self, by: int) -> Any:
        """The rows that have these numbers plus ``by``."""
        return self._then("shifted", by) if by else self

    def finer(self, each: int) -> Any:
        """The rows of a value that has ``each`` rows for one."""
        return self._then("finer", int(each))

    def repeated(self, times: int, size: int) -> Any:
        """The rows of a value in which all rows, ``size`` of them, are repeated."""
        return self._then("repeated", int(times), int(size))


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

        def rows(array: Any) -> Any:
            cut = functools.partial(jax.lax.slice_in_dim, array, axis=self.axis)
            if not self.count:
                return cut(0, 0)
            if self.step is not None:
                return cut(int(self.numbers[0]), int(self.numbers[-1]) + 1, self.step)
            if len(self.runs) <= _FEW:
                return jnp.concatenate([cut(start, stop) for start, stop in self.runs], self.axis)
            return get_rows(self.axis, self.indices, array, exist=True)

        with in_mesh_of(array):
            return with_sharding(explicit_sharding(array, self.shape(shape)), rows, jnp.asarray(array))

    def along(self, axis: int) -> "Rows":
        return Rows(axis, self.numbers)

    def _then(self, *step: Any) -> "Rows":
        return Rows(self.axis, _after(self.numbers, step))

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


class Numbers(NamedTuple):
    """The name of an array of row numbers, which is known when a plan is evaluated."""

    name: Hashable
    size: int

    @property
    def shape(self) -> tuple[int]:
        """The shape of the array."""
        return (self.size,)


class DynamicRows(_SomeRows):
    """Rows whose numbers are values of the program, computed from ``numbers``, int32 and ascending, in some ``steps``.

    ``numbers`` is an array, or :class:`Numbers`; then the region can be asked for its shape only.
    Where a row of a value is in no row of an operand, its number there is clamped: a row is read that exists, because
    the derivative of what is computed from zeros, and not used, may be NaN. Clamped numbers may be equal.
    """

    def __init__(self, axis: int, numbers: Any, steps: tuple[tuple[Any, ...], ...] = ()) -> None:
        self.axis, self.numbers, self.steps = axis, numbers, steps
        self.is_named = isinstance(numbers, Numbers)
        self.count = numbers.shape[0] * math.prod(step[1] for step in steps if step[0] in ("finer", "repeated"))

    @functools.cached_property
    def _key(self) -> Any:
        return self.axis, self.numbers if self.is_named else id(self.numbers), self.steps

    def bound(self, numbers: Mapping[Numbers, jax.Array]) -> "DynamicRows":
        return DynamicRows(self.axis, numbers[self.numbers], self.steps) if self.is_named else self

    @property
    def indices(self) -> jax.Array:
        return self._after(self.steps)

    @property
    def unclamped(self) -> jax.Array:
        """The numbers of the rows, out of range for rows that are not there."""
        return self._after(step for step in self.steps if step[0] != "clamped")

    def _after(self, steps: Iterable[tuple[Any, ...]]) -> jax.Array:
        return functools.reduce(_after, steps, in_this_mesh(jnp.asarray(self.numbers)))

    @property
    def is_shifted(self) -> bool:
        """Whether the numbers have a distance to those of the outermost value."""
        return any(step[0] == "shifted" for step in self.steps)

    @property
    def _is_clamped(self) -> bool:
        return any(step[0] == "clamped" for step in self.steps)

    def take(self, array: Any) -> Any:
        sharding = explicit_sharding(array, self.shape(jnp.shape(array)))
        exist = self._is_clamped
        rows = functools.partial(get_rows, self.axis, is_unique=not exist, exist=exist)
        with in_mesh_of(array):
            return with_sharding(sharding, rows, self.indices, jnp.asarray(array))

    def along(self, axis: int) -> "DynamicRows":
        return DynamicRows(axis, self.numbers, self.steps)

    def _then(self, *step: Any) -> "DynamicRows":
        return DynamicRows(self.axis, self.numbers, (*self.steps, step))

    def clamped(self, size: int) -> "DynamicRows":
        """The rows of a value that has ``size`` of them."""
        return self._then("clamped", size)

    def find(self, i: Any, size: int) -> tuple[jax.Array, bool]:
        i = jnp.asarray(i)
        if any(name == "repeated" for name, *_ in self.steps) or not self._is_searched(i.size, size):
            return super().find(i, size)
        numbers, wanted = self.indices, i.astype(jnp.int32)  # the other steps keep the order of the numbers
        position = jnp.searchsorted(numbers, wanted, side="right", method="scan_unrolled") - 1
        found = (jnp.take(numbers, position, mode="clip") == wanted) & (position >= 0) & (i >= 0) & (i < size)
        return jnp.where(found, position, -1).astype(jnp.int32), False

    def _is_searched(self, wanted: int, size: int) -> bool:
        """Whether to search each row reads less than a table of all rows."""
        return wanted * self.count.bit_length() < size

    def joined(self, array: Any, size: int) -> Any:
        if not self._is_clamped:
            return array
        return DynamicRows(self.axis, self._last_equal(size), (("clamped", self.count),)).take(array)

    def _last_equal(self, size: int) -> jax.Array:
        """For each row the position of the last one that has its number."""
        numbers = self.indices
        if any(name not in ("shifted", "clamped") for name, *_ in self.steps):
            return self.find(numbers, size)[0]
        first, last = numbers == numbers[:1], numbers == numbers[-1:]  # only clamped numbers are equal: at both ends
        positions = jnp.where(first, jnp.sum(first) - 1, jnp.arange(self.count))
        return jnp.where(last, self.count - 1, positions).astype(jnp.int32)

    def __repr__(self) -> str:
        return f"DynamicRows({self.axis}, {self.numbers}, {self.steps})"


def _after(numbers: Any, step: tuple[Any, ...]) -> Any:
    """The numbers of rows after one of the steps by which those of others are computed from them."""
    name, by, *size = step
    if name == "shifted":
        return numbers + by
    if name == "clamped":
        return jnp.clip(numbers, 0, by - 1)
    if name == "finer":
        return (numbers[:, None] * by + np.arange(by, dtype=np.int32)).reshape(-1)
    [size] = size
    rows = np.arange(by, dtype=numbers.dtype)[:, None] * size + numbers
    if isinstance(numbers, np.ndarray):
        return rows.reshape(-1)
    return jnp.where((numbers >= 0) & (numbers < size), rows, by * size).reshape(-1)


def region_of(selection: Selection, name: Hashable = None) -> Region:
    """The trainable part of a leaf; of dynamic rows with a ``name``, the numbers are known when a plan is evaluated."""
    if isinstance(selection, RowIndex):
        return Rows(selection.axis, selection.numbers)
    if isinstance(selection, DynamicRowIndex):
        numbers = selection.array if name is None else Numbers(name, selection.count)
        return DynamicRows(selection.axis, numbers).clamped(selection.size)
    return EVERYTHING


def names_of(selections: Iterable[Selection | None]) -> list[int]:
    """A name for the dynamic rows of each leaf, the same for leaves with the same array."""
    first: dict[int, int] = {}
    arrays = [selection.array if isinstance(selection, DynamicRowIndex) else None for selection in selections]
    return [n if array is None else first.setdefault(id(array), n) for n, array in enumerate(arrays)]


def numbers_of(names: Iterable[Hashable], selections: Iterable[Selection | None]) -> dict[Numbers, jax.Array]:
    """The numbers of the dynamic rows of leaves with these names."""
    dynamic = ((name, each) for name, each in zip(names, selections, strict=True) if isinstance(each, DynamicRowIndex))
    return {Numbers(name, each.count): jnp.asarray(each.array) for name, each in dynamic}


def zero_outside(selection: Selection, part: Any) -> Any:
    """The trainable part of a leaf, zero in dynamic rows whose numbers are out of range."""
    if not isinstance(selection, DynamicRowIndex):
        return part
    return _zero_rows_outside(selection.array, part, selection.axis, selection.size)


@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _zero_rows_outside(numbers: Any, array: Any, axis: int, size: int) -> jax.Array:
    inside = of_each_row((numbers >= 0) & (numbers < size), axis, array.ndim)
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


def clipped(i: Any, last: int) -> jax.Array:
    """Integers clipped to 0 ... ``last``, as int32. It is done in their own dtype: int32 may not hold them."""
    i = jnp.asarray(i)
    last = min(last, int(jnp.iinfo(i.dtype).max))
    return jnp.clip(i, jnp.zeros((), i.dtype), jnp.asarray(last, i.dtype)).astype(jnp.int32)


def stored_region(stored: Collection[Region], region: Region) -> Region | None:
    """Which of the stored regions of a value another region of it is read from."""
    if region in stored or EVERYTHING in stored:
        return region if region in stored else EVERYTHING
    if not isinstance(region, Rows):
        return None
    return next((other for other in stored if isinstance(other, Rows) and region.within(other) is not None), None)


class Empty(NamedTuple):
    """A part of a value that has no elements, as an operand whose ``val`` is known."""

    aval: Any
    shape: tuple[int, ...]

    @property
    def val(self) -> jax.Array:
        """The array without elements."""
        return zeros(self.aval, self.shape)


def without_elements(region: Region, aval: Any) -> Empty | None:
    """A region of rows of a value of this type, if it has no elements."""
    shape = getattr(aval, "shape", ())
    if not isinstance(region, _SomeRows) or 0 not in (shape := region.shape(shape)):
        return None
    return None if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else Empty(aval, shape)


class Values:
    """The stored regions of the values of a program, by number."""

    def __init__(self, given: dict[int, Any] | None = None) -> None:
        self._stored: dict[int, dict[Region, Any]] = {n: {EVERYTHING: x} for n, x in (given or {}).items()}

    def write(self, number: int, region: Region, array: Any) -> None:
        """Stores a region of a value."""
        self._stored.setdefault(number, {})[region] = array

    def has(self, number: int) -> bool:
        """Whether any region of a value is stored."""
        return number in self._stored

    def read(self, number: int, region: Region) -> Any:
        """A region of a value, which is stored or part of one that is."""
        stored = self._stored[number]
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

    @property
    def arrays(self) -> list[Any]:
        """All that is stored."""
        return [array for stored in self._stored.values() for array in stored.values()]

    def with_arrays(self, arrays: Iterable[Any]) -> "Values":
        """The same regions of the same values, with these :attr:`arrays`."""
        new, left = Values(), iter(arrays)
        new._stored = {n: {region: next(left) for region in stored} for n, stored in self._stored.items()}
        return new

    def only(self, numbers: Iterable[int]) -> "Values":
        """The values with these numbers."""
        new = Values()
        new._stored = {number: dict(self._stored[number]) for number in numbers}
        return new

    def drop(self, number: int) -> None:
        """Forgets a value that is not read any more."""
        self._stored.pop(number, None)
