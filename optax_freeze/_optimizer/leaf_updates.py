"""The update of one leaf: added to it, or, of a frozen one, a -0.0, which changes no bit of any number."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._errors import is_array, is_number, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import is_on_host
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DynamicRowIndex, RowIndex, Selection
from optax_freeze._spec.tree import Leaf, Part


def zero(leaf: Leaf, update: Any, param: Any = None) -> Any:
    """The update that changes no bit of a leaf: -0.0, or the integer 0, in the parameter's shape.

    For a ``Part`` one of zeros; for a leaf in host memory a NumPy scalar, which adds to an array in any memory, and has
    no bytes to move; ``MaskedNode`` for an array without such a zero (PRNG keys); None for an object that is not an
    array, which Equinox skips.
    """
    if part := next((x for x in (param, update) if leaf.index is not None and isinstance(x, Part)), None):
        values = [x.values if isinstance(x, Part) else None for x in (update, param)]
        return Part(zero(Leaf(leaf.path, jnp.shape(part.values), leaf.dtype), *values), part.index, part.shape)
    numbers = [x for x in (param, update) if isinstance(x, (int, float, complex))]
    if numbers:
        return _NoUpdate(-0.0) if isinstance(numbers[0], bool) else no_change(numbers[0])
    like: Any = next((x for x in (param, update) if is_array(x)), leaf)
    dtype = like.dtype if leaf.dtype is None else leaf.dtype
    if dtype is None:
        return _tree.MASKED_NODE if _tree.is_masked_node(update if param is None else param) else None
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return _tree.MASKED_NODE
    if is_array(update) and _adds_exactly(dtype, update.dtype):
        dtype = update.dtype
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    value = negative_zero(dtype)
    if value != 0:
        return _tree.MASKED_NODE
    if is_on_host(like):
        return value
    return jnp.full(leaf.shape or (), value, dtype) if like is leaf else jnp.full_like(like, value, dtype)


class _NoUpdate(float):
    """The update of a Python bool, to which Python itself adds a number as to an int."""

    __slots__ = ()

    def __radd__(self, value: Any) -> Any:
        return value


def negative_zero(dtype: Any) -> Any:
    """The number of a dtype that, added to any other, changes nothing."""
    return np.asarray(complex(-0.0, -0.0) if jnp.issubdtype(dtype, jnp.complexfloating) else -0.0).astype(dtype)


def _adds_exactly(param: Any, update: Any) -> bool:
    """Whether JAX adds a -0.0 of the update's dtype to a parameter, and the parameter keeps its bits."""
    if param == update:
        return True
    kinds = (jnp.floating, jnp.complexfloating)
    wide = min(jnp.dtype(param).itemsize, jnp.dtype(update).itemsize) > 1  # JAX promotes no narrower float by itself
    return wide and any(jnp.issubdtype(param, kind) and jnp.issubdtype(update, kind) for kind in kinds)


def updated(value: Any, change: Any, selection: Selection) -> Any:
    if selection is FROZEN or is_nothing(change) or stays(value, change):
        return value
    if isinstance(value, Part):
        return dataclasses.replace(value, values=jax.tree.map(optax.apply_updates, value.values, change.values))
    if isinstance(change, Part) and selection is TRAINABLE:
        selection = _places(change)
    return selection.add(value, change)


def _places(part: Part) -> Selection:
    """The selection of a part's elements; a ``ValueError`` if the part does not contain it."""
    if isinstance(part.index, RowIndex):
        return part.index
    if isinstance(part.index, DynamicRowIndex) and part.trains is not None and part.trains.dtype == bool:
        return part.index.with_trainable(part.trains)
    is_rows = isinstance(part.index, DynamicRowIndex)
    mask = "no mask with their positions" if part.trains is None else f"a mask of {part.trains.dtype}"
    what = f"the positions of a Part of {'dynamic rows' if is_rows else 'single elements'} are unknown"
    at = f"a leaf of shape {part.shape}"
    got = f"{'rows' if is_rows else 'a vector of elements'} and {mask}"
    fix = "fz.apply_updates(params, updates, fz.spec_of(state))"
    raise value_error(what, at=at, got=got, expected="`frozen` with the mask that is in the optimizer state", fix=fix)


def stays(value: Any, change: Any) -> bool:
    """Whether a leaf that is not an array keeps its value; Python numbers do if their update changes nothing."""
    if isinstance(value, Part) or _tree.is_masked_node(value) or is_array(value):
        return False
    if is_number(value):  # 0.0 added to -0.0 is 0.0
        return is_number(change) and repr(change) == repr(no_change(change))
    return isinstance(value, bool) or not isinstance(value, int) or (isinstance(change, (int, float)) and change == 0)


def no_change(number: Any) -> Any:
    """The Python number that, added to any other of this type, changes nothing."""
    if isinstance(number, complex):
        return complex(-0.0, -0.0)
    return -0.0 if isinstance(number, float) else 0


def is_nothing(change: Any) -> bool:
    """Whether an update is empty: ``MaskedNode``, None, or the float0 gradient of an integer leaf."""
    return change is None or _tree.is_masked_node(change) or getattr(change, "dtype", None) == jax.dtypes.float0
