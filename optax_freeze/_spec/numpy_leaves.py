"""NumPy arrays among the parameters that JAX converts to another dtype: numbers of 64 bits without 64-bit mode."""

from typing import Any

import jax
import numpy as np

from optax_freeze._errors import is_array

AS_ARRAYS_OF_JAX = "params = jax.tree.map(jnp.asarray, params) before training"
"""The fix for an array that JAX converted in a jitted step."""


def dtype_in_jax(dtype: Any) -> Any:
    """The dtype of the array that JAX makes of a NumPy array."""
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def is_converted(value: Any) -> bool:
    """Whether ``value`` is a NumPy array or scalar that JAX converts to another dtype."""
    is_of_numpy = isinstance(value, (np.ndarray, np.generic)) and is_array(value)
    return is_of_numpy and dtype_in_jax(value.dtype) != value.dtype


def is_lost(value: Any) -> bool:
    """Whether JAX gives a NumPy array other values: floats are rounded, and integers may not fit."""
    return is_converted(value) and (value.dtype.kind in "fc" or not np.array_equal(value, as_in_jax(value)))


def as_in_jax(value: Any) -> Any:
    """A NumPy array with the values that JAX gives it; anything else as it is."""
    if not is_converted(value):
        return value
    with np.errstate(all="ignore"):
        return value.astype(dtype_in_jax(value.dtype))
