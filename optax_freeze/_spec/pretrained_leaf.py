"""Puts a pretrained value in the place of a leaf: its dtype is converted, and its sharding is that of the leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from optax_freeze._errors import is_array, is_concrete, is_scalar
from optax_freeze._spec.conversion import converted
from optax_freeze._spec.masks import rows
from optax_freeze._spec.memory_kinds import is_on_host
from optax_freeze._spec.selection import FROZEN
from optax_freeze._spec.sharding import explicit_sharding, fitting
from optax_freeze._spec.tree import Leaf, Part

_FIX = 'use a wider dtype in `params`, or dtype="pretrained" for leaves that are frozen as a whole'


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if is_array(value) else ()


def dtype_of(value: Any) -> Any:
    """The dtype of an array or a Python number, in the byte order of this machine."""
    dtype = value.dtype if is_array(value) else jnp.result_type(value)
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype


def has_values(value: Any) -> bool:
    """Whether a leaf is more than a shape and a dtype."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return False
    return isinstance(value, (jax.Array, np.ndarray, np.generic)) or is_scalar(value) or hasattr(value, "__array__")


def loaded(own: Any, value: Any, path: str, *, keep_dtype: bool) -> Any:
    """The pretrained value of a whole leaf, or its shape if it has no values."""
    dtype: Any = dtype_of(value) if keep_dtype else dtype_of(own)
    if keep_dtype and _is_of_jax(own):
        dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    if not has_values(value):
        return jax.ShapeDtypeStruct(shape_of(value), dtype, sharding=_sharding(own))
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
    if is_scalar(own) and not isinstance(value, Tracer):
        return type(own)(np.asarray(value).item())
    if isinstance(own, (np.ndarray, np.generic)) and not isinstance(value, Tracer):
        array = converted(np.asarray(value), dtype, path, _FIX)
        return array if isinstance(own, np.ndarray) else array[()]
    if isinstance(value, np.ndarray):
        return _placed(converted(value, dtype, path, _FIX), own)
    return _placed(converted(_placed(value, own), dtype, path, _FIX), own)


def grown(own: Any, value: Any, path: str, axis: int) -> Any:
    """A leaf with pretrained values in its leading rows; its shape if one of the two has no values."""
    rows_of_value, dtype = shape_of(value)[axis], dtype_of(own)
    if not (has_values(own) and has_values(value)):
        return jax.ShapeDtypeStruct(shape_of(own), dtype, sharding=_sharding(own))
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
    if isinstance(own, np.ndarray) and not isinstance(value, Tracer):
        new = np.array(own)
        new[(slice(None),) * axis + (slice(rows_of_value),)] = converted(np.asarray(value), dtype, path, _FIX)
        return new
    selection = (~rows(slice(0, rows_of_value), axis)).fit(Leaf(path, shape_of(own), dtype))
    if selection is FROZEN:
        return own  # the pretrained array has no rows
    if isinstance(value, np.ndarray):
        value = converted(value, dtype, path, _FIX)
    if isinstance(own, jax.Array) and is_concrete(own) and own.committed:
        sharding = own.sharding
        if isinstance(sharding, NamedSharding):
            sharding = fitting(sharding, len(value.shape), value.shape)
        value = jax.device_put(value, sharding)
    value = converted(jnp.asarray(value), dtype, path, _FIX)
    put = lambda own, value: selection.put(own, Part(value))  # noqa: E731
    if not is_concrete(own) or is_on_host(own) or not isinstance(own, jax.Array):
        return _placed(put(own, value), own)
    return jax.jit(put, out_shardings=own.sharding if own.committed else None)(own, value)


def _is_of_jax(own: Any) -> bool:
    return isinstance(own, (jax.Array, jax.ShapeDtypeStruct))


def _sharding(own: Any) -> Any:
    if isinstance(own, Tracer) or not _is_of_jax(own):
        return None
    return own.sharding


def _placed(array: Any, own: Any) -> Any:
    """An array where ``own`` is; a shape without a sharding leaves it where it is."""
    if isinstance(own, Tracer) or isinstance(array, Tracer):
        sharding = explicit_sharding(own) if isinstance(own, Tracer) else None
        return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)
    sharding = _sharding(own)
    if sharding is None:
        return array
    committed = isinstance(array, jax.Array) and bool(array.committed)
    if isinstance(own, jax.Array) and not own.committed and not committed:
        if isinstance(array, jax.Array) and array.sharding == sharding:
            return array
        if not jnp.issubdtype(array.dtype, jax.dtypes.extended):
            [device] = sharding.device_set
            with jax.default_device(device):
                return jnp.array(np.asarray(array))
    return array if committed and array.sharding == sharding else jax.device_put(array, sharding)
