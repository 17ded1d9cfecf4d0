"""Finds the axis of each array of an optimizer state along which the rows of a leaf are.

The shapes of ``tx.init`` are asked for with one row more, and with one row less: the axis that is longer and shorter
then is that of the rows. An optimizer whose layout depends on which axis of a leaf is the longest (Adafactor) may
answer differently, where there are as many rows as another axis is long. Shapes do not tell then.

Rows of a leaf that are not where they were, since the model has grown or was pruned, are moved along these axes.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._optimizer.call_init import eval_init, first_difference, init_with
from optax_freeze._optimizer.group_plans import GroupPlans
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.row_set import RowSet
from optax_freeze._spec.selection import TRAINABLE, DynamicRowIndex, RowIndex, RowSelection, Selection, shape_of_part
from optax_freeze._spec.tree import Part, PyTree
from optax_freeze._state.own_states import states_in
from optax_freeze._state.state_entries import Entry

Axes: TypeAlias = tuple[int | None, ...]
"""For each array at one place of a state the axis of its rows, or of its compact elements; None if it has none."""


class Resized(NamedTuple):
    """How many more rows of a leaf there are along ``axis``, or, if it trains in part, how many more train."""

    more: int
    axis: int = 0
    in_part: bool = True

    def whole(self, node: Any) -> Any:
        """The shape of a leaf that trains as a whole, or its ``Part``."""
        if isinstance(node, Part):
            return _longer(node, self.more)
        if self.in_part or not isinstance(node, jax.ShapeDtypeStruct):
            return node
        shape = tuple(n + self.more * (i == self.axis) for i, n in enumerate(node.shape))
        return jax.ShapeDtypeStruct(shape, node.dtype)


class Shapes(NamedTuple):
    """The shapes of a state, and for each state of this library in it which call of an ``init`` made it."""

    state: PyTree
    calls: list[int]


def init_shapes(tx: Any, params: PyTree, resize: Mapping[str, Resized] = {}, more: int = 0) -> Shapes:
    """The shapes of ``tx.init(params)``, for other numbers of rows or compact elements of leaves, by their paths.

    Leaves that ``resize`` does not name have ``more`` of them if they train in part.
    """
    resized_of = lambda path: resize.get(path, Resized(more))  # noqa: E731
    made: list[Any] = []

    def change(plans: Any) -> Any:
        made.append(plans.leaves)
        if isinstance(plans, GroupPlans):
            return dataclasses.replace(plans, plans=tuple(map(resized, plans.plans)))
        return resized(plans)

    def resized(plan: Plan) -> Plan:
        selections = (_resized(each, resized_of(leaf.path).more) for leaf, each in plan.entries())
        return dataclasses.replace(plan, selections=tuple(selections))

    nodes, treedef = _tree.flatten(jax.tree.map(_tree.struct_of, params))
    pairs = zip(_tree.paths(params), nodes, strict=True)
    params = jax.tree.unflatten(treedef, [resized_of(path).whole(node) for path, node in pairs])
    state = eval_init(lambda params: init_with(change, tx.init, params), params)
    return Shapes(state, [[its is node.plan.leaves for its in made].index(True) for node in states_in(state)])


def row_axes(nodes: Sequence[Any], tx: Any, params: PyTree) -> tuple[list[Axes], list[bool]]:
    """For each of the ``nodes`` of ``tx.init(params)`` the axes of the rows, and whether these are certain."""
    now = list(map(jax.tree.leaves, nodes))
    # Adafactor takes the two longest axes: with one row more, or one less, another pair may be the longest.
    longer = _differences(now, _arrays(nodes, tx, params, more=1))
    axes = [tuple(None if axis == "rank" else axis for axis in each) for each in longer]
    if all(map(_has_shape_of_part, nodes)):
        return axes, [True] * len(axes)
    shorter = _differences(now, _arrays(nodes, tx, params, more=-1))
    return axes, [a == b and "rank" not in a for a, b in zip(longer, shorter, strict=True)]


def _arrays(
    nodes: Sequence[Any], tx: Any, params: PyTree, resize: Mapping[str, Resized] = {}, more: int = 0
) -> list[list[Any]]:
    """The shapes of the arrays of each node, for other rows as :func:`init_shapes` has them."""
    found = iter(jax.tree.leaves(init_shapes(tx, params, resize, more).state))
    return [[next(found) for _ in jax.tree.leaves(node)] for node in nodes]


def _differences(nodes: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    return [tuple(map(first_difference, *pair)) for pair in zip(nodes, others, strict=True)]


def _certain_axes(base: Any, longer: Any, shorter: Any) -> list[tuple[Any, ...]]:
    """The axes of the rows, "rank" where one row more and one less do not tell the same."""
    pairs = zip(_differences(base, longer), _differences(base, shorter), strict=True)
    return [tuple(a if a == b else "rank" for a, b in zip(*pair, strict=True)) for pair in pairs]


def _has_shape_of_part(node: Any) -> bool:
    """Whether all arrays of a ``Part`` have the shape of the trainable part, or none."""
    if not isinstance(node, Part):
        return True
    part = shape_of_part(node.index, tuple(node.shape or ()))
    return all(array.shape in (part, ()) for array in jax.tree.leaves(node))


def _resized(selection: Any, more: int) -> Any:
    """A selection of so many more rows, whichever they are, or compact elements."""
    if selection.part_index is None or selection.keep_state:
        return selection
    count = selection.count + more
    if isinstance(selection, DynamicRowIndex):
        return dataclasses.replace(selection, array=jnp.arange(count), count=count)
    if isinstance(selection, RowIndex):
        return dataclasses.replace(selection, rows=RowSet(selection.size, ((0, count, 1),)))
    return dataclasses.replace(selection, count=count)


def _longer(part: Part, more: int) -> Part:
    axis = getattr(part.index, "axis", 0)
    shape = tuple(n + more * (i == axis) for i, n in enumerate(_tree.bare(part).shape))
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(shape, array.dtype), part)


class Moved(NamedTuple):
    """For each row of a leaf along an axis which one of the ``size`` old rows it was; -1 if it begins anew."""

    axis: int
    rows: np.ndarray
    size: int

    @property
    def loses_rows(self) -> bool:
        return len(np.unique(self.rows[self.rows >= 0])) < self.size

    def take(self, array: Any, fill: Any) -> Any:
        """The rows of an array of the old leaf, or of one that broadcasts to its shape; ``fill`` for new rows."""
        column = tuple(-1 if i == self.axis else 1 for i in range(array.ndim))
        if array.shape[self.axis] == 1:
            array = np.broadcast_to(array, tuple(self.size if i == self.axis else n for i, n in enumerate(array.shape)))
        found = array.take(np.maximum(self.rows, 0), self.axis)
        return np.where((self.rows >= 0).reshape(column), found, fill)


def rows_along(selection: Any, size: int) -> np.ndarray:
    """The numbers of the rows that train."""
    return np.arange(size) if selection is TRAINABLE else np.asarray(selection.indices())


def moved_axes(entries: Sequence[Entry], olds: Sequence[Sequence[Entry]], tx: Any, params: Any) -> dict[int, Axes]:
    """For the entries of leaves of which rows have moved the axes of these, where they are known.

    Both the old and the new selection have to be rows along this axis, or the whole leaf.
    """
    found: dict[int, Entry] = {}
    resize: dict[str, set[Resized]] = collections.defaultdict(set)
    for i, (entry, each) in enumerate(zip(entries, olds, strict=True)):
        if len(each) != 1 or each[0].moved is None or not (entry.arrays and each[0].arrays):
            continue
        [old] = each
        if _is_along(entry.selection, old.moved.axis) and _is_along(old.selection, old.moved.axis):
            before, now = rows_along(old.selection, old.moved.size), rows_along(entry.selection, len(old.moved.rows))
            more = len(before) - len(now)
            resize[str(entry.leaf)].add(Resized(more, old.moved.axis, entry.selection is not TRAINABLE))
            found[i] = old
    known = {path: one for path, (one, *others) in resize.items() if not others}
    found = {i: old for i, old in found.items() if entries[i].leaf in known}
    if not found:
        return {}
    nodes = [entry.value for entry in entries]

    def arrays(more: int, *, before: bool) -> list[list[Any]]:
        resized = {path: each._replace(more=more + each.more * before) for path, each in known.items()}
        return _arrays(nodes, tx, params, resized)

    try:
        now, then = ([arrays(more, before=before) for more in (0, 1, -1)] for before in (False, True))
    except Exception:  # an optimizer or a spec may refuse any number of rows
        return {}
    axes, axes_then = _certain_axes(*now), _certain_axes(*then)
    has_shapes = {i: [x.shape for x in then[0][i]] == list(map(np.shape, old.arrays)) for i, old in found.items()}
    return {i: axes[i] for i in found if axes[i] == axes_then[i] and "rank" not in axes[i] and has_shapes[i]}


def _is_along(selection: Selection | None, axis: int) -> bool:
    return selection is TRAINABLE or (isinstance(selection, RowSelection) and selection.axis == axis)
