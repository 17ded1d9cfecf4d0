"""An element mask that has met its leaf: how what trains of a leaf is taken out of it, and put back.

Rows and dense masks answer the same questions: ``take`` what trains, ``put`` it back, ``spread`` it over zeros, ``add``
to it in place, ``choose`` between two arrays. All of them select; nothing is multiplied by a mask (NaN times zero is
NaN).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import is_concrete, value_error
from optax_freeze._spec.explicit_mesh import explicit_sharding, laid_out
from optax_freeze._spec.masks import ElementMask, Rows, Slice, named_twice
from optax_freeze._spec.tree import HOLE, Leaf, Part

_FEW = 16
"""The numbers of up to so many runs of rows are iotas; those of more are a constant."""


@dataclasses.dataclass(frozen=True)
class RowIndex:
    """Rows of one leaf: which of ``size`` rows along ``axis`` train."""

    source: Rows = dataclasses.field(compare=False)
    axis: int
    size: int
    picked: tuple[tuple[int, int, int], ...]  # ascending progressions (start, stop, step)
    picked_train: bool

    @functools.cached_property
    def runs(self) -> tuple[tuple[int, int], ...] | None:
        """The trainable rows as runs (start, stop); None where there is a step, and they would be many."""
        if any(step != 1 for _, _, step in self.picked):
            return None
        if self.picked_train:
            return tuple((start, stop) for start, stop, _ in self.picked)
        edges = [0, *(edge for start, stop, _ in self.picked for edge in (start, stop)), self.size]
        return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)

    @functools.cached_property
    def count(self) -> int:
        """How many rows train."""
        picked = sum(len(range(*progression)) for progression in self.picked)
        return picked if self.picked_train else self.size - picked

    @property
    def part_index(self) -> "RowIndex":
        """What a ``Part`` of this leaf has for its index."""
        return self

    def elements(self, shape: tuple[int, ...], mask: Any) -> int:
        """How many elements of a leaf train."""
        del mask
        return math.prod(shape) // self.size * self.count

    def indices(self) -> jax.Array:
        """The numbers of the trainable rows, int32, ascending; from iotas where they are few runs."""
        if self.runs is not None and len(self.runs) <= _FEW:
            return jnp.concatenate([start + jnp.arange(stop - start, dtype=jnp.int32) for start, stop in self.runs])
        if self.runs is not None:
            return jnp.asarray(np.concatenate([np.arange(*run, dtype=np.int32) for run in self.runs]))
        if self.picked_train and len(self.picked) == 1:
            start, _, step = self.picked[0]
            return start + step * jnp.arange(self.count, dtype=jnp.int32)
        return jnp.nonzero(~self._frozen_rows(), size=self.count)[0].astype(jnp.int32)

    def frozen(self, ndim: int) -> jax.Array:
        """A boolean array, True at frozen rows, that broadcasts against the leaf."""
        return jnp.expand_dims(self._frozen_rows(), tuple(i for i in range(ndim) if i != self.axis))

    def _frozen_rows(self) -> jax.Array:
        if len(self.picked) > _FEW:
            rows = [np.arange(*progression) for progression in self.picked]
            hit = jnp.zeros(self.size, bool).at[np.concatenate(rows)].set(True)
        else:
            i = jnp.arange(self.size, dtype=jnp.int32)
            hits = [(i >= a) & (i < b) & ((i - a) % step == 0 if step > 1 else True) for a, b, step in self.picked]
            hit = functools.reduce(jnp.logical_or, hits)
        return ~hit if self.picked_train else hit

    def take(self, value: Any, mask: Any) -> Part:
        """The trainable rows."""
        del mask
        value = jnp.asarray(value)
        if self.runs is not None and len(self.runs) == 1:
            [(start, stop)] = self.runs

            def cut(_: Any, full: Any) -> jax.Array:
                return jax.lax.slice_in_dim(full, start, stop, axis=self.axis)

            def rows(value: Any) -> jax.Array:
                # On a CPU XLA computes even the slice of an 8-bit float in another float, since JAX 0.12.
                return _move(cut, (), value) if value.dtype.itemsize == 1 else cut((), value)
        else:

            def rows(value: Any) -> jax.Array:
                return _gather(self.axis, value, self.indices())

        shape = (*value.shape[: self.axis], self.count, *value.shape[self.axis + 1 :])
        return Part(laid_out(explicit_sharding(value, shape), rows, value), self, value.shape)

    def put(self, full: Any, part: Part, mask: Any) -> jax.Array:
        """``full`` with its trainable rows replaced."""
        del mask

        def put(full: Any, values: Any) -> jax.Array:
            return _scatter(self.axis, full, self.indices(), values)

        full = jnp.asarray(full)
        return laid_out(explicit_sharding(full), put, full, part.values)

    def spread(self, part: Part, fill: Any, mask: Any, like: Any = None) -> jax.Array:
        """An array of the leaf's shape, laid out as ``like``, with a part at its trainable rows, else ``fill``."""
        del mask
        shape: Any = part.shape

        def spread(values: Any) -> jax.Array:
            if self.runs is not None and len(self.runs) == 1:
                [(start, stop)] = self.runs
                edges = [(start, self.size - stop, 0) if axis == self.axis else (0, 0, 0) for axis in range(len(shape))]
                return jax.lax.pad(values, fill, edges)
            return _scatter(self.axis, jnp.full(shape, fill), self.indices(), values)

        return laid_out(explicit_sharding(part.values if like is None else like, shape), spread, part.values)

    def add(self, full: Any, part: Part, mask: Any) -> jax.Array:
        """``full`` with a part added to its trainable rows, in place where ``full`` is donated.

        The sums stand behind a barrier and the rows are found by an iota: a scatter that fuses with what computes its
        values moves the whole leaf, and a slice update of a sharded leaf gathers it. Sums are set, and not added by the
        scatter itself: XLA shards a scatter-add by its values, and then sums the whole leaf over the devices.
        """
        del mask

        def add(full: Any, values: Any) -> jax.Array:
            indices = self.indices()
            moved = _at(full, self.axis, indices).get(**_ASCENDING, mode="fill") + values
            return _write(self.axis, full, indices, jax.lax.optimization_barrier(moved.astype(full.dtype)))

        full = jnp.asarray(full)
        return laid_out(explicit_sharding(full), add, full, part.values)

    def choose(self, frozen: Any, trains: Any, mask: Any) -> jax.Array:
        """An array with ``frozen`` at the frozen rows and ``trains`` at the others."""
        del mask
        return laid_out(explicit_sharding(trains), _select, self.frozen(jnp.ndim(trains)), frozen, trains)


@dataclasses.dataclass(frozen=True)
class Dense:
    """A dense mask of one leaf, whose array is kept elsewhere; ``count`` elements train if it is compact."""

    compact: bool
    count: int | None

    @property
    def part_index(self) -> int:
        """What a ``Part`` of this leaf has for its index; a mask that is not compact has none."""
        return -1 if self.count is None else self.count

    def elements(self, shape: tuple[int, ...], mask: Any) -> int:
        """How many elements of a leaf train; the mask of one that is not compact must have values."""
        return math.prod(shape) - int(np.count_nonzero(np.asarray(mask))) if self.count is None else self.count

    def take(self, value: Any, mask: Any) -> Any:
        """The trainable elements: the full leaf, zero at the frozen ones, or a vector if compact."""
        value = jnp.asarray(value)
        if not self.compact:
            return self.choose(jnp.zeros((), value.dtype), value, mask)

        def take(value: Any, mask: Any) -> jax.Array:
            return _gather(0, value.ravel(), self._indices(mask))

        vector: Any = (self.count,)
        values = laid_out(explicit_sharding(value, vector), take, value, mask)
        return Part(values, self.count, value.shape)

    def put(self, full: Any, part: Any, mask: Any) -> jax.Array:
        """``full`` with its trainable elements replaced."""
        full = jnp.asarray(full)
        if not self.compact:
            return self.choose(full, jnp.asarray(part, full.dtype), mask)

        def put(full: Any, values: Any, mask: Any) -> jax.Array:
            return _scatter(0, full.ravel(), self._indices(mask), values).reshape(full.shape)

        return laid_out(explicit_sharding(full), put, full, part.values, mask)

    def spread(self, part: Part, fill: Any, mask: Any, like: Any = None) -> jax.Array:
        """An array of the leaf's shape, laid out as ``like``, with a part at its trainable elements, else ``fill``."""
        shape: Any = part.shape

        def spread(values: Any, mask: Any) -> jax.Array:
            return _scatter(0, jnp.full(math.prod(shape), fill), self._indices(mask), values).reshape(shape)

        return laid_out(explicit_sharding(mask if like is None else like, shape), spread, part.values, mask)

    def add(self, full: Any, part: Part, mask: Any) -> jax.Array:
        """``full`` with a vector added to its trainable elements."""

        def add(full: Any, values: Any, mask: Any) -> jax.Array:
            flat, indices = full.ravel(), self._indices(mask)
            moved = (_gather(0, flat, indices) + values).astype(full.dtype)
            return _scatter(0, flat, indices, moved).reshape(full.shape)

        full = jnp.asarray(full)
        return laid_out(explicit_sharding(full), add, full, part.values, mask)

    def choose(self, frozen: Any, trains: Any, mask: Any) -> jax.Array:
        """An array with ``frozen`` at the frozen elements and ``trains`` at the others."""
        return laid_out(explicit_sharding(trains), _select, mask, frozen, trains)

    def _indices(self, mask: Any) -> jax.Array:
        return jnp.nonzero(~jnp.asarray(mask).ravel(), size=self.count, fill_value=mask.size)[0]


def _bits_of(dtype: Any) -> Any:
    """The unsigned integer that a narrow float is moved as, or None.

    XLA computes these on some devices in float32, even where they are only moved, and that changes NaN payloads.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    return {8: jnp.uint8, 16: jnp.uint16}.get(jnp.finfo(dtype).bits)


def _move(move: Callable[..., jax.Array], operands: tuple[Any, ...], *arrays: Any) -> jax.Array:
    """``move(operands, *arrays)``, linear in the arrays, whose elements it moves about: it keeps every bit pattern."""
    narrow = _bits_of(arrays[-1].dtype) and all(array.dtype == arrays[-1].dtype for array in arrays)
    return _move_bits(move, operands, *arrays) if narrow else move(operands, *arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _move_bits(move: Callable[..., jax.Array], operands: tuple[Any, ...], *arrays: Any) -> jax.Array:
    dtype = arrays[-1].dtype
    moved = move(operands, *(jax.lax.bitcast_convert_type(array, _bits_of(dtype)) for array in arrays))
    return jax.lax.bitcast_convert_type(moved, dtype)


@_move_bits.defjvp
def _move_bits_jvp(move: Callable[..., jax.Array], primals: Any, tangents: Any) -> Any:
    return _move_bits(move, *primals), move(primals[0], *tangents[1:])


def _select(mask: Any, a: Any, b: Any) -> jax.Array:
    """``jnp.where``."""
    return _move(lambda mask, a, b: jnp.where(mask[0], a, b), (mask,), jnp.asarray(a), jnp.asarray(b))


def _scatter(axis: int, full: Any, indices: Any, values: Any) -> jax.Array:
    """``full`` with ``values`` at ascending ``indices`` along an axis; those out of range are dropped."""
    values = jnp.asarray(values, full.dtype)  # a line search tries parameters of the updates' dtype

    def move(indices: Any, full: Any, values: Any) -> jax.Array:
        return _at(full, axis, indices[0]).set(values, **_ASCENDING, mode="drop")

    return _move(move, (indices,), full, values)


def _write(axis: int, full: Any, indices: Any, values: Any) -> jax.Array:
    """:func:`_scatter` in place: XLA for TPU copies what goes through a bitcast, and leaves the other rows alone."""
    if is_concrete(full) or not _bits_of(full.dtype):
        return _scatter(axis, full, indices, values)
    return jax.lax.platform_dependent(full, indices, values, **_writes(axis))


@functools.cache  # one function an axis: JAX traces and compiles a function once
def _writes(axis: int) -> dict[str, Callable[..., jax.Array]]:
    def on_tpu(full: Any, indices: Any, values: Any) -> jax.Array:
        return _at(full, axis, indices).set(values, **_ASCENDING, mode="drop")

    return {"tpu": on_tpu, "default": functools.partial(_scatter, axis)}


def _gather(axis: int, full: Any, indices: Any) -> jax.Array:
    """The values at ascending ``indices`` along an axis, zero for those out of range."""

    def move(indices: Any, full: Any) -> jax.Array:
        return _at(full, axis, indices[0]).get(**_ASCENDING, mode="fill", fill_value=0)

    return _move(move, (indices,), full)


_ASCENDING: dict[str, Any] = {"unique_indices": True, "indices_are_sorted": True}


def _at(array: Any, axis: int, indices: Any) -> Any:
    return array.at[(slice(None),) * axis + (indices,)]


Answer: TypeAlias = bool | RowIndex | Dense
"""What holds for one leaf: True is frozen, False trains, anything else is frozen in part."""


def resolve_mask(choice: bool | ElementMask, leaf: Leaf) -> tuple[Answer, Any]:
    """The answer for one leaf, and the array of a dense mask or a hole."""
    if isinstance(choice, bool):
        return _WHOLE[choice]
    if np.zeros((), leaf.dtype) != 0:
        raise value_error(
            "a leaf whose dtype has no zero cannot be frozen in part",
            at=leaf.path,
            got=f"{choice!r} for {leaf.dtype}",
            expected="True or False",
            fix="freeze the whole leaf, or train it",
        )
    if isinstance(choice, Rows):
        return _resolve_rows(choice, leaf), HOLE
    if tuple(choice.array.shape) != leaf.shape:
        traced = choice.array.shape == () and not is_concrete(choice.array)
        raise value_error(
            "a bool that is traced" if traced else "an element mask of another shape than its leaf",
            at=leaf.path,
            got="a boolean without a value" if traced else f"a mask of shape {tuple(choice.array.shape)}",
            expected=f"{'True or False, or a mask of shape ' if traced else ''}{leaf.shape}, the shape of the leaf",
            fix=f"{'give the bool outside jit, or' if traced else 'broadcast it:'} "
            "jnp.broadcast_to(mask, leaf.shape); for whole rows use fz.rows",
        )
    if choice.compact and choice.count is None:
        raise value_error(
            "the elements of a compact mask cannot be counted",
            at=leaf.path,
            got="an array that is traced, or a shape alone",
            expected="an array with values: the number of trainable elements is static",
            fix="resolve it outside jit (tx.init, fz.spec_of), or leave compact=False",
        )
    if choice.count == 0:
        return True, HOLE
    return Dense(choice.compact, choice.count), choice.array


_WHOLE: tuple[tuple[Answer, Any], ...] = ((False, HOLE), (True, HOLE))


def _resolve_rows(rows: Rows, leaf: Leaf) -> Answer:
    assert leaf.shape is not None
    ndim = len(leaf.shape)
    if not -ndim <= rows.axis < ndim:
        raise value_error(
            f"{rows!r}: the leaf has no such axis",
            at=leaf.path,
            got=f"axis={rows.axis} for shape {leaf.shape}",
            expected=f"an axis from {-ndim} to {ndim - 1}" if ndim else "a leaf with at least one axis",
            fix="give the axis along which rows are counted, or narrow the pattern",
        )
    axis = rows.axis % ndim
    size = leaf.shape[axis]
    index = RowIndex(rows, axis, size, _progressions(rows, size, leaf), rows.inverted)
    if size and not index.picked and isinstance(rows.index, Slice) and rows.index.stop is None and not rows.allow_empty:
        raise value_error(
            f"{rows!r}: there are no rows from {rows.index.start} on",
            at=leaf.path,
            got=f"none of {size} rows along axis {rows.axis} of shape {leaf.shape}",
            expected="at least one row",
            fix="grow the table first, or correct the number; if there may be none, allow_empty=True",
        )
    if index.runs is not None:  # the same rows however they were named
        index = dataclasses.replace(index, picked=tuple((*run, 1) for run in index.runs), picked_train=True)
    return {0: True, size: False}.get(index.count, index) if size else True


def _progressions(rows: Rows, size: int, leaf: Leaf) -> tuple[tuple[int, int, int], ...]:
    index = rows.index
    if isinstance(index, Slice):
        outside = [b for b in (index.start, index.stop) if b is not None and not -size <= b <= size]
        if outside:
            raise _out_of_range(rows, outside[0], size, leaf)
        found = range(*slice(*index).indices(size))
        found = found[::-1] if found.step < 0 else found
        return ((found[0], found[-1] + 1, found.step if len(found) > 1 else 1),) if found else ()
    numbers = index if isinstance(index, tuple) else (index,)
    for number in numbers:
        if not -size <= number < size:
            raise _out_of_range(rows, number, size, leaf)
    ordered = sorted(number % size for number in numbers)
    if len(set(ordered)) < len(ordered):
        raise named_twice(leaf.path, numbers)
    breaks = [i for i in range(1, len(ordered)) if ordered[i] != ordered[i - 1] + 1]
    starts, ends = [0, *breaks], [*breaks, len(ordered)]
    return tuple((ordered[a], ordered[b - 1] + 1, 1) for a, b in zip(starts, ends, strict=True)) if ordered else ()


def _out_of_range(rows: Rows, number: int, size: int, leaf: Leaf) -> ValueError:
    return value_error(
        f"{rows!r}: a row out of range",
        at=leaf.path,
        got=f"{number}, for {size} rows along axis {rows.axis} of shape {leaf.shape}",
        expected=f"numbers from {-size} to {size - 1}",
        fix="leave an end of a slice open (None) to go to the last row",
    )
