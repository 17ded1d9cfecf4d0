"""Counts the bytes of an optimizer's state, without and with freezing."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import is_scalar, value_error
from optax_freeze._optimizer.call_init import eval_init
from optax_freeze._optimizer.freeze import FreezeState, freeze
from optax_freeze._optimizer.freeze_when import FreezeWhenState
from optax_freeze._optimizer.transformation import as_transformation
from optax_freeze._optimizer.union import UnionState
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import TRAINABLE
from optax_freeze._spec.tree import Leaf, PyTree
from optax_freeze._state.own_states import states_in
from optax_freeze._state.state_entries import entries_of


def state_bytes(tx: Any, params: PyTree, plan: Plan) -> tuple[int, int, Mapping[str, int]]:
    """The bytes of the optimizer state without freezing; with freezing; and with freezing for each leaf.

    Tracing ``init`` takes long for many leaves. So with freezing it is traced for one leaf of each shape, dtype and
    size of its state without freezing, and for all that are partially frozen. If what these and the rest of the state
    hold is the same as without freezing, so it is for all other trainable leaves.
    """
    tx = as_transformation(tx, "fz.summary(params, frozen, tx)")
    full = _State(tx.init, params, plan.leaves, [leaf.inexact for leaf in plan.leaves])
    fix = "unwrap it: fz.summary(params, frozen, inner) for fz.freeze(inner, frozen)"
    if states_in(full.shapes, UnionState):
        fix = "leave it out: fz.summary(params, fz.spec_of(tx.init(params)))"
    refuse_freezing(full.shapes, at="the third argument of fz.summary", fix=fix)
    leaves = [*plan.entries()]
    kinds = {
        leaf.path: (leaf.shape, leaf.dtype, leaf.index, full.by_leaf[leaf.path])
        for leaf, selection in leaves
        if selection is TRAINABLE
    }
    sample = {kind: path for path, kind in kinds.items()}
    some = {*sample.values(), *(leaf.path for leaf, selection in leaves if selection.in_part)}
    keep = [leaf.path in some for leaf in plan.leaves]
    kept, selections = (tuple(itertools.compress(each, keep)) for each in (plan.leaves, plan.selections))
    spec = dataclasses.replace(plan, leaves=kept, selections=selections).as_spec
    with contextlib.suppress(Exception):  # an optimizer may expect the structure of its parameters
        held = _State(freeze(tx, spec, tied="ignore").init, params, plan.leaves, keep, as_dict=True)
        if held.rest == full.rest and all(held.by_leaf[path] == full.by_leaf[path] for path in sample.values()):
            others = {path: full.by_leaf[path] for path in kinds.keys() - some}
            return full.nbytes, held.nbytes + sum(others.values()), held.by_leaf | others
    keep = [leaf.dtype is not None for leaf in plan.leaves]
    held = _State(freeze(tx, plan.as_spec, tied="ignore").init, params, plan.leaves, keep)
    return full.nbytes, held.nbytes, held.by_leaf


def refuse_freezing(state: PyTree, *, at: str, fix: str) -> None:
    if states_in(state, (FreezeState, FreezeWhenState)):
        got = "fz.freeze, fz.freeze_when or fz.union, alone or within another transformation"
        expected = "the optimizer that you would use without freezing"
        raise value_error("the optimizer already freezes parameters", at=at, got=got, expected=expected, fix=fix)


class _State:
    """The shapes of an optimizer's state, and its bytes: of each leaf, and of what belongs to none but no mask.

    Leaves for which ``keep`` is False are replaced by ``MaskedNode`` before ``init``; or it is given a dictionary from
    paths to the others, in which nothing is in their places.
    """

    def __init__(
        self,
        init: Callable[[PyTree], PyTree],
        params: PyTree,
        leaves: Sequence[Leaf],
        keep: Sequence[bool],
        as_dict: bool = False,
    ) -> None:
        values, treedef = _tree.flatten(params)
        kept = [_struct(value) if here else _tree.MASKED_NODE for value, here in zip(values, keep, strict=True)]
        paths = [*itertools.compress((leaf.path for leaf in leaves), keep)]
        if as_dict:
            given = dict(zip(paths, itertools.compress(kept, keep), strict=True))
            paths = sorted(paths)
        else:
            given = jax.tree.unflatten(treedef, kept)
        self.shapes = eval_init(init, given)
        self.nbytes = nbytes(self.shapes)
        self.rest, self.by_leaf = 0, Counter[str]()
        others = self._without_copies(jax.tree.structure(given), paths)
        for entry in entries_of(others, {leaf.path: leaf.shape for leaf in leaves}, len(self.by_leaf)):
            if entry.leaf is not None:
                self.by_leaf[entry.leaf] += nbytes(entry.value)
            elif entry.address is not None:
                self.rest += nbytes(entry.value)

    def _without_copies(self, structure: Any, paths: Sequence[str]) -> PyTree:
        """The state without trees of the structure of the parameters, whose arrays are added to their leaves."""

        def is_copy(node: Any) -> bool:
            return jax.tree.structure(node) == structure

        if not 1 < len(paths) == structure.num_leaves:
            return self.shapes
        nodes, treedef = jax.tree.flatten(self.shapes, is_leaf=is_copy)
        copies = {i: jax.tree.leaves(node) for i, node in enumerate(nodes) if is_copy(node)}
        for arrays in copies.values():
            for path, array in zip(paths, arrays, strict=True):
                self.by_leaf[path] += nbytes_of(array.shape, array.dtype)
        return jax.tree.unflatten(treedef, [None if i in copies else node for i, node in enumerate(nodes)])


def _struct(value: Any) -> Any:
    """The shape of a parameter; optimizers take a Python number for an array."""
    return jax.eval_shape(jnp.asarray, value) if is_scalar(value) else _tree.struct_of(value)


def nbytes(shapes: PyTree) -> int:
    return sum(nbytes_of(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes))


@functools.cache
def nbytes_of(shape: tuple[int, ...], dtype: Any) -> int:
    return -(-math.prod(shape) * bits_of(dtype) // 8)


@functools.cache
def bits_of(dtype: Any) -> int:
    """The bits of a number, of which GPUs and TPUs pack several narrow ones into a byte."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 * (dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)).itemsize
