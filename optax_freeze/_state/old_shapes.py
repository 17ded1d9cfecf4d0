"""The shapes that the leaves of an old model had, from the plans and the arrays of a state."""

import collections
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from optax_freeze._spec import tree as _tree
from optax_freeze._spec.prefix_tree import is_above
from optax_freeze._spec.tree import Part, PyTree
from optax_freeze._state.own_states import outermost_states
from optax_freeze._state.row_axes import Resized, init_shapes
from optax_freeze._state.state_entries import Entry, entries_of, join

Shape: TypeAlias = tuple[int, ...] | None
"""The shape of a leaf, or None if it is not known."""


def shapes_before(state: PyTree, fresh: Sequence[Entry]) -> dict[str, Shape]:
    """The shape of each leaf of an old state by its path: from the plans in it, or from its moments."""
    found: dict[str, Shape] = {}
    for _, own in outermost_states(state):
        for leaf in own.plan.leaves:
            found[leaf.path] = found.get(leaf.path) or (None if leaf.dtype is None else leaf.shape)
    trees: dict[str, bool] = {}
    for entry in fresh:
        if entry.leaf is not None:
            fits = all(np.shape(array) == entry.shape_of_part for array in entry.arrays)
            trees[entry.tree] = trees.get(entry.tree, True) and fits
    others = {entry.address for entry in fresh if entry.leaf is None}
    inner = {entry.address: entry for entry in fresh if entry.leaf is not None}
    for entry in entries_of(state, {}):
        address = str(entry.address)
        tree = max((tree for tree in trees if is_above(tree, address)), key=len, default=None)
        if entry.address is None or entry.optional or address in others or tree is None:
            continue
        new = inner.get(address) or inner.get(address.rpartition("/")[0])  # of several arrays, which are one entry
        path = address[len(tree) :].lstrip("/") if new is None else str(new.leaf)
        shape = None  # of a list of arrays
        if isinstance(entry.value, Part):
            shape = entry.value.shape
        elif not _tree.is_masked_node(entry.value) and not isinstance(entry.value, list) and trees[tree]:
            shape = tuple(np.shape(entry.value))
        if new is not None and shape is not None and len(shape) != len(new.shape):
            shape = None  # of a factor of the leaf, or of one array of a list
        found.setdefault(path, shape)
        if shape is not None:
            found[path] = found[path] or shape
    return found


def searched(
    names: Mapping[str, str | None],
    before: Mapping[str, Shape],
    old: Sequence[Entry],
    fresh: Sequence[Entry],
    tx: Any,
    params: PyTree,
) -> dict[str, Shape]:
    """The shapes of old leaves of which no array of the state has the shape: those for which ``init`` makes its arrays.

    A leaf keeps its shape if its arrays do; else one axis may be as long as one of an old array.
    """
    held: dict[str, list[Any]] = collections.defaultdict(list)
    now: dict[str, list[Any]] = collections.defaultdict(list)
    for entry in old:
        new = names.get(str(entry.leaf))
        if entry.leaf is not None and entry.arrays and new is not None and before.get(new, ()) is None:
            held[new].append((join(entry.tree, new), [np.shape(array) for array in entry.arrays]))
    for entry in fresh:
        if entry.leaf in held and entry.arrays:
            now[str(entry.leaf)].append((entry.address, [np.shape(array) for array in entry.arrays]))
    found: dict[str, Shape] = {}
    for path, its in held.items():
        [shape] = {entry.shape for entry in fresh if entry.leaf == path} or {()}
        if sorted(its) == sorted(now[path]) or not shape:
            continue
        fits = []
        for axis, size in itertools.product(
            range(len(shape)), {n for _, shapes in its for each in shapes for n in each}
        ):
            resize = {path: Resized(size - shape[axis], axis, False)}
            with contextlib.suppress(Exception):  # an optimizer or a spec may refuse any number of rows
                made = init_shapes(tx, params, resize).state
                nodes = iter(jax.tree.leaves(made))
                arrays = [(entry, [next(nodes).shape for _ in entry.arrays]) for entry in fresh]
                if sorted((e.address, a) for e, a in arrays if e.leaf == path and a) == sorted(its):
                    fits.append(tuple(size if i == axis else n for i, n in enumerate(shape)))
        found[path] = fits[0] if len(fits) == 1 else ()
    return found
