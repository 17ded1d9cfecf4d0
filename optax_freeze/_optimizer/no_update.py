"""The update of a frozen leaf: a -0.0, which changes no bit of any number."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import is_array
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.apply_updates import no_change
from optax_freeze._spec.memory_kinds import is_on_host
from optax_freeze._spec.tree import Leaf, Part


def zero(leaf: Leaf, update: Any, param: Any = None) -> Any:
    """The update that changes no bit of a leaf: -0.0, or the integer 0, in the parameter's shape.

    For a ``Part`` one of zeros; for a leaf in host memory a NumPy scalar, which adds to an array in any memory, and has
    no bytes to move.
    ``MaskedNode`` for an array without such a zero (PRNG keys), None for an object that is not an array, which Equinox
    skips.
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
