"""Puts a pretrained value in the place of a leaf: its dtype is converted, and its sharding is that of the leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from optax_freeze._errors import is_array, is_concrete, is_scalar
from optax_freeze._spec.dtype_conversion import converted
from optax_freeze._spec.element_masks import rows
from optax_freeze._spec.memory_kinds import is_on_host, to_device, to_memory_of
from optax_freeze._spec.merge_report import Grown
from optax_freeze._spec.selection import FROZEN, RowIndex, Selection
from optax_freeze._spec.sharding import explicit_sharding, fitting, replicated
from optax_freeze._spec.tree import Leaf, Part

KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
_FIX = 'use a wider dtype in `params`, or dtype="pretrained" for leaves that are frozen as a whole'


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if is_array(value) else ()


def dtype_of(value: Any) -> Any:
    """The dtype of an array or a Python number, in the byte order of this machine."""
    dtype = value.dtype if is_array(value) else jnp.result_type(value)
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype


def kind_of(dtype: Any) -> Any:
    """What kind of numbers a dtype has, one of ``KINDS``; the dtype itself if it has none."""
    return next((kind for kind in KINDS if jnp.issubdtype(dtype, kind)), dtype)


def growth_of(path: str, mine: Any, value: Any) -> Grown | None:
    """How a leaf grew along one axis, if it did."""
    new, old = shape_of(mine), shape_of(value)
    axes = [i for i, (a, b) in enumerate(zip(new, old, strict=False)) if a != b]
    if len(new) != len(old) or len(axes) != 1 or new[axes[0]] < old[axes[0]]:
        return None
    return Grown(path, axes[0], old[axes[0]], new[axes[0]])


def has_values(value: Any) -> bool:
    """Whether a leaf is more than a shape and a dtype."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return False
    return isinstance(value, (jax.Array, np.ndarray, np.generic)) or is_scalar(value) or hasattr(value, "__array__")


def loaded(own: Any, value: Any, path: str, *, keep_dtype: bool = False, fix: str = _FIX) -> Any:
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
        array = converted(np.asarray(value), dtype, path, fix)
        return array if isinstance(own, np.ndarray) else array[()]
    value = value if isinstance(value, np.ndarray) else _placed(value, own)
    return _placed(converted(value, dtype, path, fix), own)


def grown(own: Any, value: Any, path: str, axis: int, fix: str = _FIX) -> Any:
    """A leaf with pretrained values in its leading rows; its shape if one of the two has no values."""
    if not (has_values(own) and has_values(value)):
        return jax.ShapeDtypeStruct(shape_of(own), dtype_of(own), sharding=_sharding(own))
    selection = (~rows(slice(0, shape_of(value)[axis]), axis)).fit(Leaf(path, shape_of(own), dtype_of(own)))
    return put(own, value if isinstance(value, jax.Array) else np.asarray(value), selection, path, fix)


def put(own: Any, value: Any, selection: Selection, path: str, fix: str = _FIX) -> Any:
    """A leaf with other values in its trainable rows or compact elements."""
    if selection is FROZEN:
        return own  # the array has no rows
    is_rows = isinstance(selection, RowIndex)
    if isinstance(own, np.ndarray) and not isinstance(value, Tracer):
        new = np.array(own)
        places = (slice(None),) * selection.axis + (selection.numbers,) if is_rows else ~np.asarray(selection.array)
        new[places] = converted(np.asarray(value), dtype_of(own), path, fix)
        return new
    if isinstance(value, np.ndarray):
        value = converted(value, dtype_of(own), path, fix)
    full = own if is_rows else to_device(own)
    if isinstance(full, jax.Array) and is_concrete(full) and full.committed:
        sharding = full.sharding
        if isinstance(sharding, NamedSharding):
            sharding = fitting(sharding, value.ndim, value.shape) if is_rows else replicated(sharding)
        value = jax.device_put(value, sharding)
    value = converted(jnp.asarray(value), dtype_of(own), path, fix)
    if not is_concrete(full) or is_on_host(full) or not isinstance(full, jax.Array):
        return _placed(_put(full, value, selection), own)
    new = jax.jit(_put, out_shardings=full.sharding if full.committed else None)(full, value, selection)
    return to_memory_of(own, new)


def _put(full: Any, value: Any, selection: Selection) -> Any:
    return selection.put(full, Part(value))


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
