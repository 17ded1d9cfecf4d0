"""A partially frozen array if the numbers of the trainable rows are known only at run time.

Like :class:`SplitArray`, it contains the full array and the trainable rows, and also an array with the numbers of these
rows. A loop over the rows reads them one by one (``dynamic_row_scan.py``). Most other operations get the merged array.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from optax_freeze._errors import value_error
from optax_freeze._gradient.operation_log import OperationLog
from optax_freeze._gradient.split_array import PartlyFrozen, varies
from optax_freeze._spec.selection import DynamicRowIndex
from optax_freeze._spec.tree import Part


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["frozen", "rows", "numbers"],
    meta_fields=["index", "log", "whole"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class DynamicSplitArray(PartlyFrozen):
    """An array whose rows with these ``numbers``, in ascending order, are ``rows``, and whose others are in ``frozen``.

    If ``whole``, ``frozen`` also contains the values of ``rows``.
    """

    numbers: Any
    index: DynamicRowIndex  # without its array
    log: OperationLog | None = None
    whole: bool = False

    @classmethod
    def of(
        cls, frozen: Any, rows: Any, index: DynamicRowIndex, log: OperationLog | None, whole: bool
    ) -> "DynamicSplitArray":
        """Creates the array; inside ``jax.shard_map`` both parts must vary over the same mesh axes."""
        if not varies(frozen) == varies(rows) >= varies(index.array):
            raise value_error(
                "dynamic rows vary over other mesh axes than their leaf",
                at=f"a leaf of shape {jnp.shape(frozen)}, inside of jax.shard_map",
                got=f"numbers over {_axes(index.array)}, rows over {_axes(rows)}, the leaf over {_axes(frozen)}",
                expected="the same axes for the leaf and its rows, and no other axes for the numbers of the rows",
                fix="params = jax.lax.pcast(params, axes, to='varying') before fz.grad or fz.partition",
            )
        return cls(frozen, rows, jnp.asarray(index.array), index.part_index, log, whole)

    @property
    def axis(self) -> int:
        """The axis of the rows."""
        return self.index.axis

    def like(self, frozen: Any, rows: Any, axis: int | None = None) -> "DynamicSplitArray":
        """Returns an array of two new parts with the same row numbers, possibly along another axis."""
        index = self.index if axis is None else dataclasses.replace(self.index, axis=axis)
        return dataclasses.replace(self, frozen=frozen, rows=rows, index=index)

    def merged(self) -> jax.Array:
        """The dense array: a copy of ``frozen`` unless it is whole."""
        index = self.index.with_array(self.numbers)
        if self.whole:
            from optax_freeze._gradient.with_rows import with_rows  # loads jax.extend

            return with_rows(index, self.frozen, self.rows)
        return index.put(self.frozen, Part(self.rows, self.index, jnp.shape(self.frozen)))


def _axes(array: Any) -> str:
    return str(sorted(varies(array)))
