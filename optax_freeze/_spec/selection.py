"""One leaf's selection: which of its elements are frozen.

A spec comes to one selection per leaf: :data:`FROZEN`, :data:`TRAINABLE`, :class:`RowIndex`, :class:`DynamicRowIndex`
or :class:`DenseMask`, all with the same methods: ``take`` the trainable part out of a leaf, ``put`` it back, ``spread``
it over a constant, ``add`` to it in place, ``choose`` between two arrays. Nothing is multiplied by a mask, since NaN
times zero is NaN.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._spec import host_rows as _host_rows
from optax_freeze._spec.indexing import at, cut, gather, scatter, select, write
from optax_freeze._spec.layout import explicit_sharding, laid_out
from optax_freeze._spec.masks import DynamicRows, Elements, Rows
from optax_freeze._spec.memory import is_on_host, to_memory_of
from optax_freeze._spec.tree import HOLE, Part, Rest

_FEW = 16
"""Up to this many runs of rows, the row numbers are computed as iotas; beyond it they are a constant."""

_TOLD = 8
"""At most this many runs of rows are named in an error."""


class Selection:
    """Which elements of one leaf are frozen; a pytree, whose leaf is its array, if it has one."""

    in_part = True
    """Whether some elements are frozen and others train."""

    part_index: Any = None
    """The ``index`` of the ``Part`` that :meth:`take` gives, if it gives one."""

    array: Any = HOLE
    """The array of frozen elements or row numbers, if it is data; the state contains it, and it can be replaced."""

    of_state: Any = False
    """Whether the array was read from an optimizer state."""

    def with_array(self, array: Any, of_state: bool = False) -> "Selection":
        """The selection with another array, or with a hole in its place: as static data."""
        return self

    def take(self, leaf: Any) -> Any:
        """The trainable part of a leaf: a hole, the leaf, a ``Part``, or the leaf with zeros at frozen elements."""

    def rest(self, leaf: Any) -> Any:
        """The other part of :func:`optax_freeze.partition`, from which :meth:`put` makes the leaf again."""
        return Rest(leaf, self)

    def put(self, full: Any, part: Any) -> Any:
        """``full`` with its trainable elements replaced."""

    def spread(self, part: Part, fill: Any, like: Any = None) -> Any:
        """An array of the leaf's shape, laid out as ``like``: a part at its trainable elements, ``fill`` elsewhere."""

    def add(self, full: Any, update: Any) -> Any:
        """``full`` with an update, of its shape or a part of it, added to its trainable elements."""
        if isinstance(update, Part):
            return self._add_part(full, update)
        return self.choose(full, optax.apply_updates(full, update))

    def _add_part(self, full: Any, part: Part) -> Any: ...

    def choose(self, frozen: Any, trainable: Any) -> Any:
        """An array with ``frozen`` at the frozen elements and ``trainable`` at the others."""

    def frozen(self, ndim: int) -> Any:
        """Where a leaf of ``ndim`` axes is frozen: a bool, or a boolean array that broadcasts against it."""

    def elements(self, shape: tuple[int, ...]) -> Any:
        """How many elements of a leaf train."""

    def as_spec(self) -> Any:
        """The value in a spec that means this selection."""

    def __str__(self) -> str:
        """Describes the selection in an error: which elements train, not how the user wrote it."""
        raise NotImplementedError


@jax.tree_util.register_static
class _Whole(Selection):
    """All elements of a leaf, or none; :data:`FROZEN` and :data:`TRAINABLE` are the only two objects of it."""

    in_part = False

    def __init__(self, name: str) -> None:
        self.is_frozen, self._name = name == "FROZEN", name

    def take(self, leaf: Any) -> Any:
        return self.choose(HOLE, leaf)

    def rest(self, leaf: Any) -> Any:
        return self.choose(leaf, HOLE)

    def put(self, full: Any, part: Any) -> Any:
        return self.choose(full, part)

    def add(self, full: Any, update: Any) -> Any:
        if self.is_frozen or (is_on_host(full) and isinstance(update, np.ndarray) and update == 0):
            return full
        return optax.apply_updates(full, to_memory_of(full, update))

    def choose(self, frozen: Any, trainable: Any) -> Any:
        return frozen if self.is_frozen else trainable

    def elements(self, shape: tuple[int, ...]) -> int:
        return 0 if self.is_frozen else math.prod(shape)

    def frozen(self, ndim: int) -> bool:
        return self.is_frozen

    def as_spec(self) -> bool:
        return self.is_frozen

    def __reduce__(self) -> str:
        return self._name  # a copy is the same object

    def __str__(self) -> str:
        return "is frozen" if self.is_frozen else "trains"


FROZEN, TRAINABLE = _Whole("FROZEN"), _Whole("TRAINABLE")


class RowSelection(Selection):
    """Rows of a leaf: ``count`` of ``size`` rows along ``axis`` train."""

    axis: int
    size: int
    count: Any
    run: Any = None
    """The trainable rows as one run (start, stop), if they are known to be one."""

    def shape_of_part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the trainable rows of a leaf."""
        return (*shape[: self.axis], self.count, *shape[self.axis + 1 :])

    def elements(self, shape: tuple[int, ...]) -> int:
        return math.prod(self.shape_of_part(shape))

    def indices(self, *array: Any) -> jax.Array:
        """The numbers of the trainable rows, int32, ascending; ``array``: that of the selection, if it has one."""
        raise NotImplementedError

    def frozen_rows(self) -> jax.Array:
        """For each row whether it is frozen."""
        raise NotImplementedError

    def frozen(self, ndim: int) -> jax.Array:
        return jnp.expand_dims(self.frozen_rows(), tuple(i for i in range(ndim) if i != self.axis))

    def take(self, leaf: Any) -> Part:
        def rows(leaf: Any, *array: Any) -> jax.Array:
            if is_on_host(leaf):
                return _host_rows.read(self.axis, self.run, leaf, self._numbers(*array))
            if self.run is not None:
                return cut(self.axis, leaf, *self.run)
            return gather(self.axis, leaf, self.indices(*array))

        leaf = jnp.asarray(leaf)
        sharding = explicit_sharding(leaf, self.shape_of_part(leaf.shape))
        return Part(laid_out(sharding, rows, leaf, *jax.tree.leaves(self)), self.part_index, leaf.shape)

    def put(self, full: Any, part: Part) -> jax.Array:
        def put(full: Any, values: Any, *array: Any) -> jax.Array:
            if is_on_host(full):
                return _host_rows.write(self.axis, self.run, full, values, self._numbers(*array))
            return scatter(self.axis, full, self.indices(*array), values)

        full = jnp.asarray(full)
        return laid_out(explicit_sharding(full), put, full, part.values, *jax.tree.leaves(self))

    def spread(self, part: Part, fill: Any, like: Any = None) -> jax.Array:
        shape: Any = part.shape

        def spread(values: Any, *array: Any) -> jax.Array:
            if self.run is not None:
                start, stop = self.run
                edges = [(start, self.size - stop, 0) if axis == self.axis else (0, 0, 0) for axis in range(len(shape))]
                return jax.lax.pad(values, fill, edges)
            return scatter(self.axis, jnp.full(shape, fill), self.indices(*array), values)

        sharding = explicit_sharding(part.values if like is None else like, shape)
        return laid_out(sharding, spread, part.values, *jax.tree.leaves(self))

    def _numbers(self, *array: Any) -> jax.Array | None:
        """:meth:`indices`; None if the rows are one :attr:`run`."""
        return self.indices(*array) if self.run is None else None

    def add(self, full: Any, update: Any) -> jax.Array:
        if is_on_host(full) and not isinstance(update, Part):
            update = self.take(jnp.broadcast_to(update, full.shape))
        return super().add(full, update)

    def _add_part(self, full: Any, part: Part) -> jax.Array:
        """``full`` with a part added to its trainable rows, in place where ``full`` is donated.

        The sums stand behind a barrier and the rows are found by an iota: a scatter that fuses with what computes its
        values moves the whole leaf, and a slice update of a sharded leaf gathers it. Sums are set, and not added by the
        scatter itself: XLA shards a scatter-add by its values, and then sums the whole leaf over the devices.
        """

        def add(full: Any, values: Any, *array: Any) -> jax.Array:
            indices = self.indices(*array)
            rows = at(full, self.axis, indices).get(unique_indices=True, indices_are_sorted=True, mode="fill")
            return write(self.axis, full, indices, jax.lax.optimization_barrier((rows + values).astype(full.dtype)))

        if is_on_host(full):
            return self.put(full, dataclasses.replace(part, values=self.take(full).values + part.values))
        full = jnp.asarray(full)
        return laid_out(explicit_sharding(full), add, full, part.values, *jax.tree.leaves(self))

    def choose(self, frozen: Any, trainable: Any) -> jax.Array:
        if is_on_host(frozen) or is_on_host(trainable):
            part = self.take(trainable)
            return self.put(frozen, part) if jnp.ndim(frozen) else self.spread(part, frozen)
        return laid_out(explicit_sharding(trainable), select, self.frozen(jnp.ndim(trainable)), frozen, trainable)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class RowIndex(RowSelection):
    """Rows of a leaf that are known when a program is traced."""

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

    @property
    def run(self) -> tuple[int, int] | None:
        return self.runs[0] if self.runs is not None and len(self.runs) == 1 else None

    @functools.cached_property
    def count(self) -> int:
        """How many rows train."""
        picked = sum(len(range(*progression)) for progression in self.picked)
        return picked if self.picked_train else self.size - picked

    @property
    def part_index(self) -> "RowIndex":
        return self

    def as_spec(self) -> Rows:
        return self.source

    def __str__(self) -> str:
        picked = [f"{a}:{b}" + f":{step}" * (step > 1) for a, b, step in self.picked]
        rows = ", ".join(picked[:_TOLD]) + f" and {len(picked) - _TOLD} more" * (len(picked) > _TOLD)
        return f"trains {'in' if self.picked_train else 'except in'} rows {rows} of {self.size} along axis {self.axis}"

    def canonical(self) -> "RowIndex":
        """The same rows in the form that they have however the user named them, so that equal rows are equal.

        These are the runs of trainable rows. If they are many, it is one progression instead, if there is one: of the
        trainable rows or else of the frozen rows.
        """
        runs = self.runs
        if runs is None or len(runs) > _FEW:
            named = np.zeros(self.size, bool)
            for progression in self.picked:
                named[slice(*progression)] = True
            trains = named == self.picked_train
            runs = np.flatnonzero(np.diff(trains, prepend=False, append=False)).reshape(-1, 2).tolist()
            for rows, train in [(trains, True), (~trains, False)] if len(runs) > _FEW else []:
                numbers = np.flatnonzero(rows).tolist()
                if len(steps := set(np.diff(numbers).tolist())) == 1:
                    progression = numbers[0], numbers[-1] + 1, steps.pop()
                    return dataclasses.replace(self, picked=(progression,), picked_train=train)
        return dataclasses.replace(self, picked=tuple((a, b, 1) for a, b in runs), picked_train=True)

    def indices(self, *array: Any) -> jax.Array:
        """From iotas where they are few runs."""
        if self.runs is not None and len(self.runs) <= _FEW:
            return jnp.concatenate([start + jnp.arange(stop - start, dtype=jnp.int32) for start, stop in self.runs])
        if self.runs is not None:
            return jnp.asarray(np.concatenate([np.arange(*run, dtype=np.int32) for run in self.runs]))
        if self.picked_train and len(self.picked) == 1:
            start, _, step = self.picked[0]
            return start + step * jnp.arange(self.count, dtype=jnp.int32)
        return jnp.nonzero(~self.frozen_rows(), size=self.count)[0].astype(jnp.int32)

    def frozen_rows(self) -> jax.Array:
        if len(self.picked) > _FEW:
            rows = [np.arange(*progression) for progression in self.picked]
            hit = jnp.zeros(self.size, bool).at[np.concatenate(rows)].set(True)
        else:
            i = jnp.arange(self.size, dtype=jnp.int32)
            hits = [(i >= a) & (i < b) & ((i - a) % step == 0 if step > 1 else True) for a, b, step in self.picked]
            hit = functools.reduce(jnp.logical_or, hits)
        return ~hit if self.picked_train else hit


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["axis", "size", "count", "of_state"]
)
@dataclasses.dataclass(frozen=True)
class DynamicRowIndex(RowSelection):
    """Rows of a leaf that are known when the program runs: ``array`` has the numbers of those that train.

    It is int32 and ascending. Two are equal if they differ in their array alone.
    """

    array: Any = dataclasses.field(compare=False)
    axis: int
    size: int
    count: int
    of_state: bool = dataclasses.field(default=False, compare=False, repr=False)

    @property
    def part_index(self) -> "DynamicRowIndex":
        return self.with_array(HOLE)

    def with_array(self, array: Any, of_state: bool = False) -> "DynamicRowIndex":
        return dataclasses.replace(self, array=array, of_state=of_state)

    def indices(self, *array: Any) -> jax.Array:
        return array[0] if array else self.array

    def frozen_rows(self) -> jax.Array:
        return jnp.ones(self.size, bool).at[self.array].set(False, mode="drop")

    def of_rows(self, trains: Any) -> "DynamicRowIndex":
        """The index of the rows at which a boolean array is True, as many as before."""
        return self.with_array(jnp.nonzero(trains, size=self.count, fill_value=self.size)[0].astype(jnp.int32))

    def without(self, array: Any) -> jax.Array:
        """The numbers of as many rows: those that are not in ``array``."""
        return self.of_rows(jnp.ones(self.size, bool).at[array].set(False, mode="drop")).array

    def __str__(self) -> str:
        return f"trains in {self.count} of {self.size} rows along axis {self.axis}"

    def as_spec(self) -> DynamicRows:
        return DynamicRows(self.array, self.axis, inverted=True, ascending=True, of_state=self.of_state)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["compact", "count", "of_state"]
)
@dataclasses.dataclass(frozen=True)
class DenseMask(Selection):
    """A boolean array of the leaf's shape, True where frozen; of a compact one ``count`` elements train.

    Two are equal if they differ in their array alone: it may be replaced between steps, and may be traced.
    """

    array: Any = dataclasses.field(compare=False)
    compact: bool
    count: int | None
    of_state: bool = dataclasses.field(default=False, compare=False, repr=False)

    @property
    def part_index(self) -> int | None:
        return self.count

    def elements(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) - int(np.count_nonzero(np.asarray(self.array))) if self.count is None else self.count

    def frozen(self, ndim: int) -> Any:
        return self.array

    def as_spec(self) -> Elements:
        return Elements(self.array, self.compact, self.count, self.of_state)

    def __str__(self) -> str:
        return "trains in part" if self.count is None else f"trains in {self.count} elements"

    def with_array(self, array: Any, of_state: bool = False) -> "DenseMask":
        return dataclasses.replace(self, array=array, of_state=of_state)

    def take(self, leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if not self.compact:
            return self.choose(jnp.zeros((), leaf.dtype), leaf)

        def take(leaf: Any, mask: Any) -> jax.Array:
            return gather(0, leaf.ravel(), self.indices(mask))

        vector: Any = (self.count,)
        return Part(laid_out(explicit_sharding(leaf, vector), take, leaf, self.array), self.count, leaf.shape)

    def put(self, full: Any, part: Any) -> jax.Array:
        full = jnp.asarray(full)
        if not self.compact:
            return self.choose(full, jnp.asarray(part, full.dtype))

        def put(full: Any, values: Any, mask: Any) -> jax.Array:
            return scatter(0, full.ravel(), self.indices(mask), values).reshape(full.shape)

        return laid_out(explicit_sharding(full), put, full, part.values, self.array)

    def spread(self, part: Part, fill: Any, like: Any = None) -> jax.Array:
        shape: Any = part.shape

        def spread(values: Any, mask: Any) -> jax.Array:
            return scatter(0, jnp.full(math.prod(shape), fill), self.indices(mask), values).reshape(shape)

        return laid_out(explicit_sharding(self.array if like is None else like, shape), spread, part.values, self.array)

    def _add_part(self, full: Any, part: Part) -> jax.Array:
        def add(full: Any, values: Any, mask: Any) -> jax.Array:
            flat, indices = full.ravel(), self.indices(mask)
            moved = (gather(0, flat, indices) + values).astype(full.dtype)
            return scatter(0, flat, indices, moved).reshape(full.shape)

        full = jnp.asarray(full)
        return laid_out(explicit_sharding(full), add, full, part.values, self.array)

    def choose(self, frozen: Any, trainable: Any) -> jax.Array:
        return laid_out(explicit_sharding(trainable), select, self.array, frozen, trainable)

    def indices(self, *array: Any) -> jax.Array:
        """The numbers of the elements that train, if they are counted; ``array``: the mask.

        The barrier keeps XLA from evaluating ``nonzero`` of a constant mask at compile time, which takes minutes.
        """
        mask = jax.lax.optimization_barrier(jnp.asarray(*(array or (self.array,))).ravel())
        return jnp.nonzero(~mask, size=self.count, fill_value=mask.size)[0]
