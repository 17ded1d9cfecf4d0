"""Counts the frozen elements and bytes of each leaf, and the optimizer state that freezing saves: :func:`summary`."""

import dataclasses
import math
from collections import Counter
from typing import Any, Literal

import optax

from optax_freeze._errors import is_concrete, value_error, whole_number
from optax_freeze._report import plot as _plot
from optax_freeze._report import table as _table
from optax_freeze._report.state_bytes import bits_of, state_bytes
from optax_freeze._report.table import Row
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import is_on_host
from optax_freeze._spec.resolve import Spec, Tied, make_plan
from optax_freeze._spec.selection import FROZEN, DenseMask, RowSelection, Selection, shape_of_part
from optax_freeze._spec.tree import Leaf, PyTree, Rest


@dataclasses.dataclass(frozen=True, repr=False)
class Summary(_table.Report):
    """The result of :func:`optax_freeze.summary`, which can be printed, shown in a notebook or drawn by :meth:`plot`.

    Printed tables combine layers whose names differ only in a number: ``layer_0 … layer_31/kernel`` with the shape
    ``32 × (512, 512)`` and the totals of all of them.

    Attributes:
      rows: one row for each leaf, with its ``path``, ``shape``, ``dtype``, ``elements``, ``frozen_elements``, ``bytes``
        and ``frozen_bytes``, where 4-bit numbers count half a byte, as GPUs and TPUs store them. ``leaves`` is the
        number of leaves that ``depth=`` combined in the row, ``host_bytes`` the number of bytes in host memory, and
        ``trainable_rows`` says which rows of which axis train. Shape and dtype are None for objects, and for
        combined leaves that differ.
      state_bytes: the bytes of the optimizer state with freezing, dense masks included; None without an optimizer.
      full_state_bytes: the bytes of the optimizer state without freezing; None without an optimizer.
      extent: ``"nothing"`` or ``"everything"`` if the spec freezes none or all of the leaves that can train, else None.
      row_state_bytes: the bytes of the optimizer state with freezing, for each row; empty without an optimizer.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> params = {"encoder": jnp.ones((3, 2)), "head": jnp.ones(2)}
      >>> summary = fz.summary(params, "encoder")
      >>> summary.elements, summary.trainable_bytes
      (8, 8)
      >>> [(row.path, row.frozen_elements) for row in summary.rows]
      [('encoder', 6), ('head', 0)]
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
      >>> import jax.numpy as jnp, optax_freeze as fz
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
    plan = make_plan(params, frozen, tied=tied).in_state
    rows = tuple(_table.summed(map(_row, plan.leaves, plan.selections, _tree.flatten(params)[0]), depth))
    extent = plan.extent(params)
    if tx is None:
        return Summary(rows, extent=extent)
    full_bytes, held_bytes, by_leaf = state_bytes(tx, params, plan)
    by_row: Counter[str] = Counter()
    for path, nbytes in by_leaf.items():
        by_row[_table.prefix(path, depth)] += nbytes
    return Summary(rows, held_bytes, full_bytes, extent, tuple(by_row[row.path] for row in rows))


def _row(leaf: Leaf, selection: Selection, value: Any) -> Row:
    if leaf.shape is None:
        return Row(leaf.path, None, None, 0, 0, 0, 0)
    shape = leaf.shape if leaf.index is None else shape_of_part(leaf.index, leaf.shape)
    elements = math.prod(shape)
    frozen = elements if selection is FROZEN else 0
    if selection.in_part and leaf.index is None:
        if isinstance(selection, DenseMask) and selection.count is None and not is_concrete(selection.array):
            what, got = "the frozen elements of a dense mask cannot be counted", type(selection.array).__name__
            expected, fix = "an array with values", "call fz.summary outside of jit, or build the mask outside of jit"
            raise value_error(what, at=leaf.path, got=f"a mask without values: {got}", expected=expected, fix=fix)
        frozen = elements - selection.elements(shape)
    nbytes, of_frozen = (-(-bits_of(leaf.dtype) * count // 8) for count in (elements, frozen))
    on_host = nbytes if is_on_host(value.array if isinstance(value, Rest) else value) else 0
    rows = selection.which() if isinstance(selection, RowSelection) and 0 < frozen < elements else ""
    sizes = elements, frozen, nbytes, of_frozen
    return Row(leaf.path, shape, leaf.dtype, *sizes, host_bytes=on_host, trainable_rows=rows)


def print_trainable(params: PyTree, frozen: Spec, *, tied: Tied = "error") -> None:
    """Prints how many parameters train, in the format of PEFT's ``print_trainable_parameters``.

    The numbers count elements, as in :func:`optax_freeze.summary`. Integers count as frozen, since they cannot train.

    Args:
      params: any pytree of arrays or of ``jax.ShapeDtypeStruct``.
      frozen: the spec of the frozen parameters, in any form.
      tied: as in :func:`optax_freeze.partition`.

    Returns:
      None. For the numbers themselves use :func:`optax_freeze.summary`.

    Raises:
      TypeError, ValueError: as :func:`optax_freeze.summary` does.

    Example:
      >>> import numpy as np, optax_freeze as fz
      >>> params = {"base": np.ones(4444, np.float32), "adapter": np.ones(1234, np.float32)}
      >>> fz.print_trainable(params, "base")
      trainable params: 1,234 || all params: 5,678 || trainable%: 21.7330
    """
    counted = summary(params, frozen, tied=tied)
    trains, elements = counted.trainable_elements, counted.elements
    percent = 100 * trains / elements if elements else 0.0
    print(f"trainable params: {trains:,} || all params: {elements:,} || trainable%: {percent:.4f}")
