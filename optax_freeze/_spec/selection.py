"""One leaf's selection: which of its elements are frozen.

It is :data:`FROZEN`, :data:`TRAINABLE`, a :class:`RowIndex`, :class:`DynamicRowIndex` or :class:`DenseMask`, all with
the same methods. Nothing is multiplied by a mask, since NaN times zero is NaN.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from optax_freeze._errors import counted, value_error
from optax_freeze._spec import host_rows as _host_rows
from optax_freeze._spec.indexing import at, cut, gather, integer_of, numbers_where, of_each_row, scatter, select, write
from optax_freeze._spec.memory_kinds import is_on_host, to_memory_of
from optax_freeze._spec.row_set import FEW, RowSet
from optax_freeze._spec.sharding import explicit_sharding, with_sharding
from optax_freeze._spec.tree import MASKED_NODE, Part, Rest


class Selection:
    """Which elements of one leaf are frozen; a pytree, whose leaf is its array, if it has one."""

    in_part = True  # whether only a part of the leaf is frozen
    part_index: Any = None  # the `index` of the `Part` that `take` gives, if it gives one
    array: Any = MASKED_NODE  # the array of frozen elements or row numbers, if it is data, which can be replaced
    of_state: Any = False  # whether the array was read from an optimizer state
    keep_state: Any = False  # whether the optimizer state is that of the whole leaf, whatever rows train now

    @property
    def in_state(self) -> "Selection":
        """What an optimizer state holds and a run trains: of rows that keep their state the whole leaf."""
        return TRAINABLE if self.keep_state else self

    def with_array(self, array: Any, of_state: bool = False) -> "Selection":
        """The selection with another array, or with ``MaskedNode`` in its place."""
        return self

    def take(self, leaf: Any) -> Any:
        """The trainable part: ``MaskedNode``, the leaf, a ``Part``, or the leaf with zeros at frozen elements."""

    def rest(self, leaf: Any) -> Any:
        """The other part of :func:`optax_freeze.partition`, from which :meth:`put` makes the leaf again."""
        return Rest(leaf, self)

    def put(self, full: Any, part: Any) -> Any:
        """``full`` with its trainable elements replaced."""

    def spread(self, part: Part, fill: Any, like: Any = None) -> Any:
        """An array of the leaf's shape, sharded as ``like``: a part at its trainable elements, ``fill`` elsewhere."""

    def add(self, full: Any, update: Any) -> Any:
        """``full`` with an update, of its shape or a part of it, added to its trainable elements."""
        return self.choose(full, optax.apply_updates(full, update))

    def choose(self, frozen: Any, trainable: Any) -> Any:
        """An array with ``frozen`` at the frozen elements and ``trainable`` at the others."""

    def frozen(self, ndim: int) -> Any:
        """Where a leaf of ``ndim`` axes is frozen: a bool, or a boolean array that broadcasts against it."""

    def elements(self, shape: tuple[int, ...]) -> Any:
        """How many elements of a leaf train."""

    def __str__(self) -> str:
        """Describes the selection in an error: which elements train, not how the user wrote it."""
        raise NotImplementedError


@jax.tree_util.register_static
class _AllOrNone(Selection):
    """All elements of a leaf, or none; :data:`FROZEN` and :data:`TRAINABLE` are the only two objects of it."""

    in_part = False

    def __init__(self, name: str) -> None:
        self.is_frozen, self._name = name == "FROZEN", name

    def take(self, leaf: Any) -> Any:
        return self.choose(MASKED_NODE, leaf)

    def rest(self, leaf: Any) -> Any:
        return self.choose(leaf, MASKED_NODE)

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

    def __reduce__(self) -> str:
        return self._name  # a copy is the same object

    def __str__(self) -> str:
        return "is frozen" if self.is_frozen else "trains"


FROZEN, TRAINABLE = _AllOrNone("FROZEN"), _AllOrNone("TRAINABLE")


class _Numbered(Selection):
    """Rows of a leaf, or elements of the flattened leaf, of which ``count`` train along ``axis``."""

    axis: int
    size: Any
    count: Any
    run: Any = None  # the trainable rows as one run (start, stop), if they are known to be one

    def indices(self) -> jax.Array:
        """The numbers of the trainable rows or elements, int32, ascending."""
        raise NotImplementedError

    def shape_of_part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.axis], self.count, *shape[self.axis + 1 :])

    def _numbered(self, leaf: Any) -> Any:
        """The array in which ``indices`` count along ``axis``."""
        return leaf

    def take(self, leaf: Any) -> Part:
        leaf = jnp.asarray(leaf)
        sharding = explicit_sharding(leaf, self.shape_of_part(leaf.shape))
        return Part(self._traced_once("_take", sharding, leaf), self.part_index, leaf.shape)

    def _take(self, leaf: Any) -> jax.Array:
        if is_on_host(leaf):
            return _host_rows.read(self.axis, self.run, leaf, None if self.run else self.indices())
        if self.run is not None:
            return cut(self.axis, leaf, *self.run)
        return gather(self.axis, self._numbered(leaf), self.indices())

    def put(self, full: Any, part: Part) -> jax.Array:
        full = jnp.asarray(full)
        return self._traced_once("_put", explicit_sharding(full), full, part.values)

    def _put(self, full: Any, values: Any) -> jax.Array:
        if is_on_host(full):
            return _host_rows.write(self.axis, self.run, full, values, None if self.run else self.indices())
        return scatter(self.axis, self._numbered(full), self.indices(), values).reshape(full.shape)

    def fused_put(self, full: Any, part: Part) -> jax.Array:
        """:meth:`put` by operations that a compiler for TPU fuses into a product, if the rows are one run."""
        if self.run is None or jnp.issubdtype(full.dtype, jax.dtypes.extended):
            return self.put(full, part)
        return self._traced_once("_fused_put", explicit_sharding(full), full, part.values)

    def _fused_put(self, full: Any, values: Any) -> jax.Array:
        def put(full: Any, values: Any) -> jax.Array:
            return jnp.where(self.frozen(full.ndim), full, self._padded(values, jnp.zeros((), full.dtype)))

        if integer_of(full.dtype):  # only a TPU keeps the bits of narrow floats in a fusion
            return jax.lax.platform_dependent(full, values, tpu=put, default=self._put)
        return put(full, values)

    def _padded(self, values: Any, fill: Any) -> jax.Array:
        start, stop = self.run
        edges = [(start, self.size - stop, 0) if axis == self.axis else (0, 0, 0) for axis in range(values.ndim)]
        return jax.lax.pad(values, fill, edges)

    def spread(self, part: Part, fill: Any, like: Any = None) -> jax.Array:
        shape: Any = part.shape

        def spread(self: _Numbered, values: Any) -> jax.Array:
            if self.run is not None:
                return self._padded(values, fill)
            full = self._numbered(jnp.full(shape, fill))
            return scatter(self.axis, full, self.indices(), values).reshape(shape)

        return with_sharding(explicit_sharding(part.values if like is None else like, shape), spread, self, part.values)

    def _traced_once(self, method: str, sharding: Any, *arrays: Any) -> jax.Array:
        """The result of a method: JAX traces it once for all leaves that are alike."""
        is_traced = any(isinstance(x, Tracer) and not is_on_host(x) for x in jax.tree.leaves((self, arrays)))
        call = _of_selection if is_traced else with_sharding
        return call(sharding, getattr(type(self), method), self, *arrays)

    def add(self, full: Any, update: Any) -> jax.Array:
        """``full`` with an update added, a part in place where ``full`` is donated.

        The sums stand behind a barrier and the rows are found by an iota: a scatter that fuses with what computes its
        values moves the whole leaf, and a slice update of a sharded leaf gathers it. Sums are set, and not added by the
        scatter itself: XLA shards a scatter-add by its values, and then sums the whole leaf over the devices.
        """

        def add(self: _Numbered, full: Any, values: Any) -> jax.Array:
            numbered, indices = self._numbered(full), self.indices()
            old = at(numbered, self.axis, indices).get(unique_indices=True, indices_are_sorted=True, mode="fill")
            new = jax.lax.optimization_barrier((old + values).astype(full.dtype))
            return write(self.axis, numbered, indices, new).reshape(full.shape)

        if not isinstance(update, Part):
            return super().add(full, update)
        if is_on_host(full):
            return self.put(full, dataclasses.replace(update, values=self.take(full).values + update.values))
        full = jnp.asarray(full)
        return with_sharding(explicit_sharding(full), add, self, full, update.values)


_of_selection = jax.jit(with_sharding, static_argnums=(0, 1), inline=True)


class RowSelection(_Numbered):
    """Rows of a leaf."""

    def elements(self, shape: tuple[int, ...]) -> int:
        return math.prod(self.shape_of_part(shape))

    def frozen_rows(self) -> jax.Array:
        """For each row whether it is frozen."""
        raise NotImplementedError

    def which(self) -> str:
        """Which rows train, and of which axis."""
        raise NotImplementedError

    def frozen(self, ndim: int) -> jax.Array:
        return of_each_row(self.frozen_rows(), self.axis, ndim)

    def add(self, full: Any, update: Any) -> jax.Array:
        if is_on_host(full) and not isinstance(update, Part):
            update = self.take(jnp.broadcast_to(update, full.shape))
        return super().add(full, update)

    def choose(self, frozen: Any, trainable: Any) -> jax.Array:
        if is_on_host(frozen) or is_on_host(trainable):
            part = self.take(trainable)
            return self.put(frozen, part) if jnp.ndim(frozen) else self.spread(part, frozen)
        return with_sharding(explicit_sharding(trainable), select, self.frozen(jnp.ndim(trainable)), frozen, trainable)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class RowIndex(RowSelection):
    """Static rows: those of a set train."""

    mask: Any = dataclasses.field(compare=False)  # as the user wrote it
    axis: int
    rows: RowSet

    @property
    def size(self) -> int:
        return self.rows.size

    @property
    def count(self) -> int:
        return self.rows.count

    @property
    def run(self) -> tuple[int, int] | None:
        return self.rows.run

    @property
    def numbers(self) -> np.ndarray:
        return self.rows.numbers

    @property
    def part_index(self) -> "RowIndex":
        return self

    def which(self) -> str:
        return f"{'all except ' * self.rows.others}rows {self.rows} of axis {self.axis}"

    def __str__(self) -> str:
        return f"trains {'except ' * self.rows.others}in rows {self.rows} of {self.size} along axis {self.axis}"

    @property
    def _dtype(self) -> Any:
        if self.size <= np.iinfo(np.int32).max or jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            return jnp.int32 if self.size <= np.iinfo(np.int32).max else jnp.int64
        raise value_error(
            "JAX has no numbers for so many rows",
            at=repr(self.mask),
            got=f"{self.size} rows along axis {self.axis}",
            expected=f"at most {np.iinfo(np.int32).max} rows, or 64-bit numbers; one run of rows is a slice",
            fix='jax.config.update("jax_enable_x64", True)',
        )

    def indices(self) -> jax.Array:
        dtype = self._dtype
        if self.rows.others:
            return numbers_where(~self.frozen_rows(), self.count).astype(dtype)
        if len(self.rows.progressions) > FEW:
            return jnp.asarray(self.numbers.astype(dtype))
        iotas = [(each, jnp.arange(len(range(*each)), dtype=dtype)) for each in self.rows.progressions]
        return jnp.concatenate([start + (step * iota if step > 1 else iota) for (start, _, step), iota in iotas])

    def frozen_rows(self) -> jax.Array:
        progressions = self.rows.progressions
        if len(progressions) > FEW:
            return jnp.ones(self.size, bool).at[self.numbers].set(False)
        i = jnp.arange(self.size, dtype=self._dtype)
        hits = [(i >= a) & (i < b) & ((i - a) % step == 0 if step > 1 else True) for a, b, step in progressions]
        hit = functools.reduce(jnp.logical_or, hits)
        return hit if self.rows.others else ~hit


def shape_of_part(index: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the ``values`` of a ``Part`` with this index, of a leaf of a shape."""
    return index.shape_of_part(shape) if isinstance(index, RowSelection) else (index,)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array"],
    meta_fields=["axis", "size", "count", "of_state", "keep_state"],
)
@dataclasses.dataclass(frozen=True)
class DynamicRowIndex(RowSelection):
    """Dynamic rows: ``array`` has the numbers of the trainable ones, int32 and ascending, as a value of the program."""

    array: Any = dataclasses.field(compare=False)
    axis: int
    size: int
    count: int
    of_state: bool = dataclasses.field(default=False, compare=False, repr=False)
    keep_state: bool = False

    @property
    def part_index(self) -> "DynamicRowIndex":
        return self.with_array(MASKED_NODE)

    def with_array(self, array: Any, of_state: bool = False) -> "DynamicRowIndex":
        return dataclasses.replace(self, array=array, of_state=of_state)

    def indices(self) -> jax.Array:
        return self.array

    def frozen_rows(self) -> jax.Array:
        return jnp.ones(self.size, bool).at[self.array].set(False, mode="drop")

    def with_trainable(self, trains: Any) -> "DynamicRowIndex":
        """The index of the rows at which a boolean array is True, as many as before."""
        return self.with_array(numbers_where(trains, self.count).astype(jnp.int32))

    def without(self, array: Any) -> jax.Array:
        """The numbers of as many rows: those that are not in ``array``."""
        return self.with_trainable(jnp.ones(self.size, bool).at[array].set(False, mode="drop")).array

    def which(self) -> str:
        return f"{counted(self.count, 'row', 'rows')} of axis {self.axis}"

    def __str__(self) -> str:
        kept = ", which keep their state" * self.keep_state
        return f"trains in {self.count} of {self.size} rows along axis {self.axis}{kept}"


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["compact", "count", "of_state"]
)
@dataclasses.dataclass(frozen=True)
class DenseMask(_Numbered):
    """A boolean array of the leaf's shape, True where frozen; if compact, ``count`` elements train."""

    axis = 0
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

    def __str__(self) -> str:
        return "trains in part" if self.count is None else f"trains in {self.count} elements"

    def with_array(self, array: Any, of_state: bool = False) -> "DenseMask":
        return dataclasses.replace(self, array=array, of_state=of_state)

    def take(self, leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        return super().take(leaf) if self.compact else self.choose(jnp.zeros((), leaf.dtype), leaf)

    def put(self, full: Any, part: Any) -> jax.Array:
        full = jnp.asarray(full)
        return super().put(full, part) if self.compact else self.choose(full, jnp.asarray(part, full.dtype))

    def spread(self, part: Part, fill: Any, like: Any = None) -> jax.Array:
        return super().spread(part, fill, self.array if like is None else like)

    def shape_of_part(self, shape: tuple[int, ...]) -> Any:
        return (self.count,)

    def _numbered(self, leaf: Any) -> Any:
        return leaf.ravel()

    def choose(self, frozen: Any, trainable: Any) -> jax.Array:
        return with_sharding(explicit_sharding(trainable), select, self.array, frozen, trainable)

    def indices(self) -> jax.Array:
        # The barrier keeps XLA from evaluating `nonzero` of a constant mask at compile time, which takes minutes.
        mask = jax.lax.optimization_barrier(jnp.asarray(self.array).ravel())
        assert self.count is not None
        return numbers_where(~mask, self.count)
