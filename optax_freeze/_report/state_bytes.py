"""Counts the bytes of an optimizer's state, without and with freezing."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import value_error
from optax_freeze._optimizer.as_transformation import as_transformation
from optax_freeze._optimizer.freeze import FreezeState, freeze
from optax_freeze._optimizer.freeze_when import FreezeWhenState
from optax_freeze._optimizer.init_with import eval_init
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import TRAINABLE
from optax_freeze._spec.tree import PyTree
from optax_freeze._state.entries import entries_of
from optax_freeze._state.own_states import states_in


def state_bytes(tx: Any, params: PyTree, plan: Plan) -> tuple[int, int, Mapping[str, int]]:
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
    return sum(-(-math.prod(leaf.shape) * bits_of(leaf.dtype) // 8) for leaf in jax.tree.leaves(shapes))


@functools.cache
def bits_of(dtype: Any) -> int:
    """The bits of a number, of which GPUs and TPUs pack several narrow ones into a byte."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 * (dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)).itemsize
