"""What is frozen, leaf by leaf, and what that saves: elements, bytes, and the optimizer's state.

Rows first, rendering apart, as in ``flax.linen.tabulate`` and CLU's parameter overview; unlike them it takes any pytree
and says of every element whether it trains. The optimizer's state is counted by ``jax.eval_shape`` of its own ``init``,
so that there is nothing to know about optimizers here.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._errors import described, is_array, is_concrete, type_error, value_error, whole_number
from optax_freeze._optimizer.freeze import FreezeState, freeze
from optax_freeze._optimizer.freeze_when import FreezeWhenState
from optax_freeze._report import table as _table
from optax_freeze._report import treemap as _treemap
from optax_freeze._report.table import Row
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Spec, Tied, make_plan
from optax_freeze._spec.selection import FROZEN, DenseMask, RowIndex, Selection
from optax_freeze._spec.tree import Leaf, PyTree


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """What :func:`optax_freeze.summary` found: print it, or let a notebook show it.

    In print, layers that differ in their number alone are one line: ``layer_0 … layer_31/kernel`` with the shape
    ``32 × (512, 512)``. Numbers in a line are for all of them, so that the columns add up. The rows keep every leaf.

    Attributes:
      rows: for each leaf its ``path``, ``shape``, ``dtype``, ``elements``, ``frozen_elements``, ``bytes`` and
        ``frozen_bytes``; ``leaves`` counts what ``depth=`` summed up. Shape and dtype are None where there is no array,
        or where several differ.
      state_bytes: of the optimizer's state with freezing, dense masks included; None if no optimizer was given.
      full_state_bytes: of the optimizer's state if nothing is frozen; integers, which have no gradient, have no state.
      extent: ``"nothing"`` or ``"everything"`` if that is what the spec freezes of what could train, else None.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jnp.ones((3, 2)), "head": jnp.ones(2)}
      >>> summary = fz.summary(params, "encoder")
      >>> summary.elements, summary.frozen_elements, summary.trainable_bytes
      (8, 6, 8)
      >>> [(row.path, row.frozen_elements) for row in summary.rows]
      [('encoder', 6), ('head', 0)]
    """

    rows: tuple[Row, ...]
    state_bytes: int | None = None
    full_state_bytes: int | None = None
    extent: Literal["nothing", "everything"] | None = None

    @property
    def elements(self) -> int:
        """How many elements there are."""
        return sum(row.elements for row in self.rows)

    @property
    def frozen_elements(self) -> int:
        """How many of them are frozen."""
        return sum(row.frozen_elements for row in self.rows)

    @property
    def trainable_elements(self) -> int:
        """How many of them train."""
        return self.elements - self.frozen_elements

    @property
    def bytes(self) -> int:
        """The size of the parameters."""
        return sum(row.bytes for row in self.rows)

    @property
    def frozen_bytes(self) -> int:
        """The size of what is frozen of them."""
        return sum(row.frozen_bytes for row in self.rows)

    @property
    def trainable_bytes(self) -> int:
        """The size of what trains of them."""
        return self.bytes - self.frozen_bytes

    def plot(self, ax: Any = None) -> Any:
        """Draws the parameters as a treemap: areas are elements, blue is frozen and orange trains.

        Args:
          ax: matplotlib axes; a figure is made if there are none.

        Returns:
          The axes.

        Raises:
          ImportError: if matplotlib is not installed; nothing else in this library needs it.
          ValueError: if there are no elements.
        """
        return _treemap.draw(self.rows, ax)

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
        if self.state_bytes is not None and self.full_state_bytes is not None:
            full = _table.size(self.full_state_bytes)
            totals.append(f"optimizer state {_table.size(self.state_bytes)} instead of {full}")
        if self.extent is not None:
            totals.append(f"the spec freezes {self.extent}")
        return _table.table(self.rows, totals)


def summary(
    params: PyTree,
    frozen: Spec,
    tx: optax.GradientTransformation | optax.MultiSteps | None = None,
    *,
    depth: int | None = None,
    tied: Tied = "error",
) -> Summary:
    """Says of each leaf how much of it is frozen, and what that saves in the optimizer's state.

    Args:
      params: any pytree of arrays or of ``jax.ShapeDtypeStruct``; values are not looked at, but for dense masks, whose
        frozen elements are counted.
      frozen: what is frozen, in any form.
      tx: the optimizer as it would be without freezing, not wrapped in :func:`optax_freeze.freeze`. Its state is
        counted for all leaves that can train (floating-point and complex arrays) and as :func:`optax_freeze.freeze`
        would hold it, by shapes alone.
      depth: so many segments of a path are told apart; what is below them is summed into one row.
      tied: ``"error"`` refuses one array object that stands at two paths of which only one is frozen; ``"ignore"``
        lets it pass. Tracers are never checked.

    Returns:
      A :class:`optax_freeze.Summary`. ``print`` gives plain text of a width of its own, for logs; a rich console a
      table that fits the terminal; a notebook an HTML table; and :meth:`optax_freeze.Summary.plot` a picture.

    Raises:
      ValueError: if the spec does not fit, leaves are tied as above, ``tied`` is neither word, a dense mask has no
        values (a tracer), ``tx`` freezes already, or ``depth`` is negative.
      TypeError: if ``tx`` is no optimizer, ``depth`` no int, a function of the spec looks at values, or a leaf holds an
        array and is none (a Keras variable). Errors of ``tx.init`` are passed on.

    Example:
      >>> import optax_freeze as fz
      >>> layers = {f"layer_{i}": {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)} for i in range(12)}
      >>> print(fz.summary(layers, fz.only("layer_11"), optax.adam(1e-3)))
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
        depth = whole_number("a depth counts segments of a path", depth, at="depth", fix=fix)
    plan = make_plan(params, frozen, tied=tied)
    rows = tuple(map(_row, plan.leaves, plan.selections))
    if depth is not None:
        rows = tuple(_table.summed(rows, depth))
    sizes = (None, None) if tx is None else _state_bytes(tx, params, plan)
    return Summary(rows, *sizes, extent=plan.extent(params))


def _row(leaf: Leaf, selection: Selection) -> Row:
    if leaf.shape is None:
        return Row(leaf.path, None, None, 0, 0, 0, 0)
    shape = leaf.shape if leaf.index is None else _shape_of_part(leaf.shape, leaf.index)
    elements, each = math.prod(shape), _itemsize(leaf.dtype)
    frozen = elements if selection is FROZEN else 0
    if selection.in_part and leaf.index is None:
        if isinstance(selection, DenseMask) and selection.count is None and not is_concrete(selection.array):
            raise value_error(
                "the frozen elements of a dense mask cannot be counted",
                at=leaf.path,
                got=f"a mask without values: {type(selection.array).__name__}",
                expected="an array with values",
                fix="call fz.summary outside of jit, or build the mask there",
            )
        frozen = elements - selection.elements(shape)
    return Row(leaf.path, shape, leaf.dtype, elements, frozen, elements * each, frozen * each)


def _shape_of_part(shape: tuple[int, ...], index: Any) -> tuple[int, ...]:
    return index.shape_of_part(shape) if isinstance(index, RowIndex) else (index,)


@functools.cache
def _itemsize(dtype: Any) -> int:
    return (dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)).itemsize


def _state_bytes(tx: Any, params: PyTree, plan: Plan) -> tuple[int, int]:
    """The bytes of the optimizer's state with freezing and without."""
    if not isinstance(tx, (optax.GradientTransformation, optax.MultiSteps)):
        factory = callable(tx) and not hasattr(tx, "init")
        raise type_error(
            "no optimizer",
            at="the third argument of fz.summary",
            got=described(tx),
            expected="an optax.GradientTransformation",
            fix="call the factory: optax.adam(1e-3), not optax.adam" if factory else "pass the optimizer itself",
        )
    full = _state(tx.init, params, keep=_can_train)
    kinds = (FreezeState, FreezeWhenState)
    nodes = jax.tree.leaves(full, is_leaf=lambda node: isinstance(node, kinds))
    if any(isinstance(node, kinds) for node in nodes):
        raise value_error(
            "the optimizer freezes already",
            at="the third argument of fz.summary",
            got="fz.freeze or fz.freeze_when, alone or within another",
            expected="the optimizer as it would be without freezing",
            fix="unwrap it: fz.summary(params, frozen, inner) for fz.freeze(inner, frozen)",
        )
    held = _state(freeze(tx, plan.known, tied="ignore").init, params, keep=is_array)
    return _nbytes(held), _nbytes(full)


def _state(init: Callable[[PyTree], PyTree], params: PyTree, keep: Callable[[Any], bool]) -> PyTree:
    """The shapes of an optimizer's state; what is not kept of the parameters is a hole there."""
    values, treedef = jax.tree.flatten(params)

    def of_arrays(arrays: list[Any]) -> PyTree:
        left = iter(arrays)
        return init(jax.tree.unflatten(treedef, [next(left) if keep(value) else _tree.HOLE for value in values]))

    return jax.eval_shape(of_arrays, [value for value in values if keep(value)])


def _can_train(leaf: Any) -> bool:
    """Whether a leaf can have a gradient: integers, random keys and objects are frozen under any spec."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _nbytes(shapes: PyTree) -> int:
    return sum(math.prod(leaf.shape) * _itemsize(leaf.dtype) for leaf in jax.tree.leaves(shapes))
