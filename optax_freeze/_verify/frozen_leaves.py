"""Collects the frozen leaves of a tree, and checks that their values can be read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._errors import is_number, type_error, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, TRAINABLE, Selection
from optax_freeze._spec.tree import Part, Rest


def frozen_leaves(plan: Plan, values: list[Any], name: str, *, traced: bool) -> dict[str, tuple[Any, Selection]]:
    """The frozen leaves by path, without ``MaskedNode``: a ``Rest`` as its array, a float as JAX's array of it."""
    found = {}
    for leaf, selection, value in plan.entries(values):
        if selection is TRAINABLE or _tree.is_masked_node(value) or leaf.dtype == jax.dtypes.float0:
            continue
        if isinstance(value, Rest):
            selection = value.selection if selection is FROZEN else selection
            value = value.array
        value = np.asarray(value, jnp.result_type(value)) if is_number(value) else value
        refuse_unreadable(value, leaf.path, name, traced=traced)
        for mask in jax.tree.leaves(selection):
            refuse_unreadable(mask, leaf.path, "the mask of a leaf", traced=traced)
        found[leaf.path] = (value, selection)
    return found


def refuse_unreadable(value: Any, path: str, name: str, *, traced: bool = False) -> None:
    """An error for a value that cannot be read, or not outside of ``jit`` unless it may be ``traced``."""
    if isinstance(value, Part):
        what, got = "the trainable part of a leaf instead of the full leaf", f"a Part of a leaf of shape {value.shape}"
        fix = "pass the full parameters, fz.combine(trainable, rest), or `rest` alone"
        raise value_error(f"{name}: {what}", at=path, got=got, expected="the full leaf", fix=fix)
    if isinstance(value, jax.ShapeDtypeStruct) or (isinstance(value, Tracer) and not traced):
        got = f"a {type(value).__name__} of shape {value.shape}"
        fix = "initialize the parameters: model.init, not jax.eval_shape of it"
        if isinstance(value, Tracer):
            fix = "call it outside jit; inside, return fz.fingerprint(params, frozen) and compare that outside"
        what, expected = f"{name}: an array without values", "an array with values"
        raise type_error(what, at=path, got=got, expected=expected, fix=fix)
    if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_deleted():
        got, expected = "an array that was donated to a jitted function", "an array that still has its values"
        fix = "before training, keep a copy, jax.tree.map(jnp.copy, params), or only fz.fingerprint(params, frozen)"
        raise value_error(f"{name}: the array has been deleted", at=path, got=got, expected=expected, fix=fix)
