"""A leaf frozen by rows in a restricted call: its frozen array and its trainable rows."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from optax_freeze._gradient.custom_derivative import bind_tangents
from optax_freeze._program.deferred import Deferred, Input, Reader, part_of, type_of
from optax_freeze._program.from_host import Evaluation
from optax_freeze._program.regions import EVERYTHING
from optax_freeze._program.trace import Program, flatten
from optax_freeze._spec.indexing import set_rows
from optax_freeze._spec.memory_kinds import to_device
from optax_freeze._spec.selection import RowSelection, Selection
from optax_freeze._spec.sharding import explicit_sharding, in_mesh_of, zeros
from optax_freeze._spec.tree import Part


class LeafInRows(NamedTuple):
    """A leaf frozen by rows, in parts."""

    array: Any
    selection: RowSelection
    rows: Any

    def with_numbers(self, numbers: Sequence[Any]) -> RowSelection:
        """The selection with these numbers of dynamic rows."""
        return jax.tree.unflatten(jax.tree.structure(self.selection), numbers)

    def whole(self) -> jax.Array:
        """The leaf."""
        return self.put_together(self.array, self.rows, jax.tree.leaves(self.selection))

    def put_together(self, array: Any, rows: Any, numbers: Sequence[Any]) -> jax.Array:
        """The leaf, put together from these arrays."""
        selection, array = self.with_numbers(numbers), to_device(array).astype(self.rows.dtype)
        return selection.fused_put(array, Part(rows, selection.part_index, array.shape))

    @property
    def is_read_whole(self) -> bool:
        """Whether no rows are read alone: an explicit mesh divides them, on which JAX writes no single rows."""
        sharding = explicit_sharding(self.array)
        spec = sharding.spec[self.selection.axis :] if sharding else ()
        return len(spec) > 0 and spec[0] is not None


class DeferredLeaf(Input):
    """A leaf of which only the rows are put together that are read; or once all of it, if all of it is read."""

    def __init__(self, leaf: LeafInRows, array: Any, rows: Any, numbers: Sequence[Any], struct: Any) -> None:
        array = array if isinstance(array, Deferred) else Input(array)
        self.on_host, self.note = array.on_host, lambda: None
        self.leaf, self.given, self.type, self.shape = leaf, [array, rows, *numbers], struct, struct.shape

    @property
    def at_once(self) -> bool:  # type: ignore[override]
        return not self.on_host and not self.is_looked_up

    def whole(self, reader: Reader) -> Any:
        array, rows, *numbers = self.given
        with in_mesh_of(rows):
            return self.leaf.put_together(part_of(array, EVERYTHING, reader), rows, numbers)

    @property
    def value(self) -> Deferred:  # type: ignore[override]
        """The rows, written into the array where they are read: made by each reader, which may be in a loop."""
        with in_mesh_of(self.given[1]):
            return Evaluation(self._program, range(len(self.given))).run(self.given)[0]

    @functools.cached_property
    def _program(self) -> Program:
        def put(array: Any, rows: Any, *numbers: Any) -> list[jax.Array]:
            selection = self.leaf.with_numbers(numbers)
            return [set_rows(selection.axis, selection.indices(), array.astype(rows.dtype), rows)]

        return flatten(jax.make_jaxpr(put)(*map(type_of, self.given)))


class CompleteLeaf(LeafInRows):
    """A leaf whose array already contains the rows, which are there for their gradient: nothing is put together."""

    def put_together(self, array: Any, rows: Any, numbers: Sequence[Any]) -> jax.Array:
        return _rows_of(self.with_numbers(numbers), array, rows)

    @property
    def is_read_whole(self) -> bool:
        return True


def types_of(leaves: Sequence[LeafInRows | None]) -> tuple[list[LeafInRows | None], list[Any]]:
    """The parts of leaves on the device, and the leaves, of which only the types are asked."""
    return jax.tree.map(to_device, leaves), [leaf and leaf.whole() for leaf in leaves]


def with_gradient_set(selection: Selection, leaf: Any, rows: Any) -> jax.Array:
    """``rows``, the trainable ones of a leaf, whose gradient is set in that of the leaf.

    JAX adds it: XLA shards a scatter-add by its values, sums the whole leaf over the devices, and if the devices do not
    divide the number of rows, adds values of the padding to row 0.
    """

    @jax.custom_jvp
    def given(leaf: Any, rows: Any) -> jax.Array:
        return rows

    @given.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        aval, rows = jax.typeof(primals[0]), given(*primals)
        known, treedef = jax.tree.flatten(selection)

        def take(known: Any, tangents: Any) -> list[jax.Array]:
            return [treedef.unflatten(known).take(*tangents).values]

        def spread(known: Any, cotangents: Any) -> list[jax.Array]:
            part = Part(cotangents[0], selection.part_index, aval.shape)
            return [treedef.unflatten(known).put(zeros(aval), part)]

        return rows, bind_tangents(take, spread, known, tangents[:1], [jax.typeof(rows).to_tangent_aval()])[0]

    return given(leaf, jax.lax.stop_gradient(rows))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rows_of(selection: RowSelection, array: Any, rows: Any) -> jax.Array:
    """``array``, whose derivative with respect to its trainable elements is that with respect to ``rows``."""
    return array


@_rows_of.defjvp
def _rows_of_jvp(selection: RowSelection, primals: Any, tangents: Any) -> Any:
    def put(array: Any, rows: Any) -> jax.Array:
        return selection.put(array, Part(rows, selection.part_index, array.shape))

    return _rows_of(selection, *primals), jax.jvp(put, primals, tangents)[1]  # `put` may move integers
