"""Counts the frozen elements and bytes of each leaf, and the optimizer state that freezing saves: :func:`summary`."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._errors import is_concrete, value_error, whole_number
from optax_freeze._optimizer.as_transformation import as_transformation
from optax_freeze._optimizer.freeze import FreezeState, freeze
from optax_freeze._optimizer.freeze_when import FreezeWhenState
from optax_freeze._optimizer.init_with import eval_init
from optax_freeze._report import plot as _plot
from optax_freeze._report import table as _table
from optax_freeze._report.table import Row
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import is_on_host
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Spec, Tied, make_plan
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, RowSelection, Selection
from optax_freeze._spec.tree import Leaf, PyTree, Rest
from optax_freeze._state.entries import entries_of
from optax_freeze._state.own_states import states_in


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """The result of :func:`optax_freeze.summary`, which can be printed, shown in a notebook or drawn by :meth:`plot`.

    Printed tables combine layers whose names differ only in a number: ``layer_0 … layer_31/kernel`` with the shape
    ``32 × (512, 512)`` and the totals of all of them.

    Attributes:
      rows: one row for each leaf, with its ``path``, ``shape``, ``dtype``, ``elements``, ``frozen_elements``, ``bytes``
        and ``frozen_bytes``, where 4-bit numbers count half a byte, as GPUs and TPUs store them. ``leaves`` is the
        number of leaves that ``depth=`` combined in the row, ``host_bytes`` the number of bytes in host memory. Shape
        and dtype are None for objects, and for combined leaves that differ.
      state_bytes: the bytes of the optimizer state with freezing, dense masks included; None without an optimizer.
      full_state_bytes: the bytes of the optimizer state without freezing; None without an optimizer.
      extent: ``"nothing"`` or ``"everything"`` if the spec freezes none or all of the leaves that can train, else None.
      row_state_bytes: the bytes of the optimizer state with freezing, for each row; empty without an optimizer.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jnp.ones((3, 2)), "head": jnp.ones(2)}
      >>> summary = fz.summary(params, "encoder")
      >>> summary.elements, summary.trainable_bytes, [(row.path, row.frozen_elements) for row in summary.rows]
      (8, 8, [('encoder', 6), ('head', 0)])
    """

    rows: tuple[Row, ...]
    state_bytes: int | None = None
    full_state_bytes: int | None = None
    extent: Literal["nothing", "everything"] | None = None
    row_state_bytes: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """The number of elements of all parameters."""
        return sum(row.elements for row in self.rows)

    @property
    def frozen_elements(self) -> int:
        """The number of frozen elements."""
        return sum(row.frozen_elements for row in self.rows)

    @property
    def trainable_elements(self) -> int:
        """The number of trainable elements."""
        return self.elements - self.frozen_elements

    @property
    def bytes(self) -> int:
        """The size of all parameters, in bytes."""
        return sum(row.bytes for row in self.rows)

    @property
    def frozen_bytes(self) -> int:
        """The size of the frozen parameters, in bytes."""
        return sum(row.frozen_bytes for row in self.rows)

    @property
    def trainable_bytes(self) -> int:
        """The size of the trainable parameters, in bytes."""
        return self.bytes - self.frozen_bytes

    @property
    def host_bytes(self) -> int:
        """The size of the parameters in host memory, in bytes."""
        return sum(row.host_bytes for row in self.rows)

    @property
    def device_bytes(self) -> int:
        """The size of the parameters in device memory, in bytes."""
        return self.bytes - self.host_bytes

    def plot(self, ax: Any = None, *, depth: int = 1) -> Any:
        """Draws one bar per module with its trainable bytes, frozen bytes, and optimizer state if ``tx`` was given.

        Bytes in host memory are a separate section of the bar. The 12 largest modules have their own bars. Step counts
        and masks are only counted in the legend.

        Args:
          ax: the matplotlib axes to draw on; by default those of a new figure.
          depth: how many segments of a path name a module.

        Returns:
          The axes.

        Raises:
          ImportError: if matplotlib is not installed.
          ValueError: if there are no elements, or if ``depth`` is negative.
        """
        depth = whole_number("depth", depth, fix="depth=1")
        if not self.elements:
            got, expected = f"{len(self.rows)} rows without elements", "at least one array with elements"
            fix = "pass the full parameters to fz.summary, not a tree of optax.MaskedNode()"
            raise value_error("there is nothing to draw", at="Summary.plot", got=got, expected=expected, fix=fix)
        return _plot.draw(self.rows, self.row_state_bytes, self.state_bytes, depth, ax)

    def __str__(self) -> str:
        return _table.as_text(self._table())

    __repr__ = __str__

    def __rich__(self) -> Any:
        return _table.as_rich(self._table())

    def _repr_html_(self) -> str:
        return _table.as_html(self._table())

    def _table(self) -> _table.Table:
        def part(name: str, elements: int, size: int) -> str:
            share = _table.share(elements, self.elements)
            of = f"{_table.size(size)} of {_table.size(self.bytes)}"
            return f"{name} {elements:,} of {self.elements:,} elements ({share}), {of}"

        totals = [
            part("trainable", self.trainable_elements, self.trainable_bytes),
            part("frozen", self.frozen_elements, self.frozen_bytes),
            f"all {self.elements:,} elements, {_table.size(self.bytes)}",
        ]
        if self.host_bytes:
            on_device, on_host = _table.size(self.device_bytes), _table.size(self.host_bytes)
            totals.append(f"in the device's memory {on_device}, in the host's {on_host}")
        if self.state_bytes is not None and self.full_state_bytes is not None:
            full = _table.size(self.full_state_bytes)
            totals.append(f"optimizer state {_table.size(self.state_bytes)} instead of {full}")
        if self.extent is not None:
            of_others = self.extent == "nothing" and self.frozen_elements
            always = "; leaves that are not floating-point or complex arrays are always frozen" if of_others else ""
            totals.append(f"the spec freezes {self.extent}{always}")
        return _table.table(self.rows, totals)


def summary(
    params: PyTree,
    frozen: Spec,
    tx: optax.GradientTransformation | optax.MultiSteps | None = None,
    *,
    depth: int | None = None,
    tied: Tied = "error",
) -> Summary:
    """Counts the frozen elements and bytes of each leaf, and the optimizer state with and without freezing.

    Args:
      params: any pytree of arrays or of ``jax.ShapeDtypeStruct``. No values are read, except those of dense masks.
      frozen: the spec of the frozen parameters, in any form.
      tx: the optimizer that you would use without freezing, not wrapped in :func:`optax_freeze.freeze`; the size of its
        state is computed from shapes.
      depth: the number of path segments that a row is named by; leaves with the same first segments share a row. By
        default, each leaf has its own row.
      tied: as in :func:`optax_freeze.partition`.

    Returns:
      A :class:`optax_freeze.typing.Summary`. ``print`` shows it as plain text, a rich console as a table that fits the
      terminal, and a notebook as an HTML table. :meth:`optax_freeze.typing.Summary.plot` draws it.

    Raises:
      ValueError: if the spec does not fit the parameters, leaves are tied, a dense mask has no values (a tracer),
        ``tx`` already freezes parameters, or ``depth`` is negative.
      TypeError: if ``tx`` is not an optimizer or ``depth`` not an int. Errors of ``tx.init`` are passed on.

    Example:
      >>> import optax_freeze as fz
      >>> layers = {f"layer_{i}": {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)} for i in range(12)}
      >>> print(fz.summary(layers, fz.all_except("layer_11"), optax.adam(1e-3)))
      path                       shape        dtype    elements    bytes
      -------------------------  -----------  -------  --------  -------  ------
      layer_0 … layer_10/bias    11 × (8,)    float32        88    352 B  frozen
      layer_0 … layer_10/kernel  11 × (8, 8)  float32       704  2.8 KiB  frozen
      layer_11/bias              (8,)         float32         8     32 B  trains
      layer_11/kernel            (8, 8)       float32        64    256 B  trains
      <BLANKLINE>
      trainable 72 of 864 elements (8.333 %), 288 B of 3.4 KiB
      frozen 792 of 864 elements (91.67 %), 3.1 KiB of 3.4 KiB
      all 864 elements, 3.4 KiB
      optimizer state 580 B instead of 6.8 KiB
    """
    if depth is not None:
        fix = "depth=1 gives a row for each top-level name, and None one for each leaf"
        depth = whole_number("depth", depth, fix=fix)
    plan = make_plan(params, frozen, tied=tied)
    rows = tuple(_table.summed(map(_row, plan.leaves, plan.selections, _tree.flatten(params)[0]), depth))
    extent = plan.extent(params)
    if tx is None:
        return Summary(rows, extent=extent)
    full_bytes, held_bytes, by_leaf = _state_bytes(tx, params, plan)
    by_row: Counter[str] = Counter()
    for path, nbytes in by_leaf.items():
        by_row[_table.prefix(path, depth)] += nbytes
    return Summary(rows, held_bytes, full_bytes, extent, tuple(by_row[row.path] for row in rows))


def _row(leaf: Leaf, selection: Selection, value: Any) -> Row:
    if leaf.shape is None:
        return Row(leaf.path, None, None, 0, 0, 0, 0)
    shape = leaf.shape
    if leaf.index is not None:
        shape = leaf.index.shape_of_part(shape) if isinstance(leaf.index, RowSelection) else (leaf.index,)
    elements = math.prod(shape)
    frozen = elements if selection is FROZEN else 0
    if selection.in_part and leaf.index is None:
        if isinstance(selection, DenseMask) and selection.count is None and not is_concrete(selection.array):
            what, got = "the frozen elements of a dense mask cannot be counted", type(selection.array).__name__
            expected, fix = "an array with values", "call fz.summary outside of jit, or build the mask outside of jit"
            raise value_error(what, at=leaf.path, got=f"a mask without values: {got}", expected=expected, fix=fix)
        frozen = elements - selection.elements(shape)
    nbytes, of_frozen = (-(-_bits(leaf.dtype) * count // 8) for count in (elements, frozen))
    on_host = nbytes if is_on_host(value.array if isinstance(value, Rest) else value) else 0
    return Row(leaf.path, shape, leaf.dtype, elements, frozen, nbytes, of_frozen, host_bytes=on_host)


@functools.cache
def _bits(dtype: Any) -> int:
    """The bits of a number, of which GPUs and TPUs pack several narrow ones into a byte."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 * (dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)).itemsize


def _state_bytes(tx: Any, params: PyTree, plan: Plan) -> tuple[int, int, Mapping[str, int]]:
    """The bytes of the optimizer state without freezing; with freezing; and with freezing for each leaf.

    Tracing ``init`` takes long for many leaves. So with freezing it is traced for one leaf of each shape, dtype and
    size of its state without freezing, and for all that are partially frozen. If what these and the rest of the state
    hold is the same as without freezing, so it is for all other trainable leaves.
    """
    tx = as_transformation(tx, "fz.summary(params, frozen, tx)")
    full = _state(tx.init, params, [leaf.inexact for leaf in plan.leaves])
    if states_in(full, (FreezeState, FreezeWhenState)):
        at = "the third argument of fz.summary"
        got = "fz.freeze or fz.freeze_when, alone or within another transformation"
        expected = "the optimizer that you would use without freezing"
        fix = "unwrap it: fz.summary(params, frozen, inner) for fz.freeze(inner, frozen)"
        raise value_error("the optimizer already freezes parameters", at=at, got=got, expected=expected, fix=fix)
    shapes = {leaf.path: leaf.shape for leaf in plan.leaves}
    rest, by_leaf = _bytes_by_leaf(full, shapes)
    whole = [leaf for leaf, its in zip(plan.leaves, plan.selections, strict=True) if its is TRAINABLE]
    kinds = {leaf.path: (leaf.shape, leaf.dtype, leaf.index, by_leaf[leaf.path]) for leaf in whole}
    sample = {kind: path for path, kind in kinds.items()}
    left_out = kinds.keys() - sample.values()
    init = freeze(tx, plan.as_spec, tied="ignore").init

    def with_freezing(left_out: Collection[str]) -> tuple[PyTree, int, Counter[str]]:
        keep = [leaf.dtype is not None and leaf.path not in left_out for leaf in plan.leaves]
        state = _state(init, params, keep)
        return state, *_bytes_by_leaf(state, shapes)

    held, held_rest, held_by_leaf = with_freezing(left_out)
    if left_out and (held_rest != rest or any(held_by_leaf[path] != by_leaf[path] for path in sample.values())):
        held, _, held_by_leaf = with_freezing(())
        left_out = ()
    others = {path: by_leaf[path] for path in left_out}
    return _nbytes(full), _nbytes(held) + sum(others.values()), held_by_leaf | others


def _bytes_by_leaf(state: PyTree, shapes: Mapping[str, Any]) -> tuple[int, Counter[str]]:
    """The bytes of a state that belong to no leaf, without the masks of ``freeze``, and those of each leaf."""
    rest, by_leaf = 0, Counter[str]()
    for entry in entries_of(state, shapes):
        if entry.leaf is not None:
            by_leaf[entry.leaf] += _nbytes(entry.value)
        elif entry.address is not None:
            rest += _nbytes(entry.value)
    return rest, by_leaf


def _state(init: Callable[[PyTree], PyTree], params: PyTree, keep: Sequence[Any]) -> PyTree:
    """The shapes of an optimizer's state; leaves for which ``keep`` is False or None are replaced by ``MaskedNode``."""

    def struct(value: Any) -> Any:  # optimizers take a Python number for an array
        is_number = isinstance(value, (int, float, complex))
        return jax.eval_shape(jnp.asarray, value) if is_number else _tree.struct_of(value)

    values, treedef = _tree.flatten(jax.tree.map(struct, params))
    kept = [value if here else _tree.MASKED_NODE for value, here in zip(values, keep, strict=True)]
    return eval_init(init, jax.tree.unflatten(treedef, kept))


def _nbytes(shapes: PyTree) -> int:
    return sum(-(-math.prod(leaf.shape) * _bits(leaf.dtype) // 8) for leaf in jax.tree.leaves(shapes))
