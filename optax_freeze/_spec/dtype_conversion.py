"""Conversion of an array to another dtype, which must have all of its values."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import counted, is_concrete, value_error
from optax_freeze._spec.memory_kinds import to_device, to_memory_of


def converted(value: Any, to: np.dtype, path: str, fix: str) -> Any:
    """An array or a shape in another dtype and the same memory; an error for concrete values that it does not have."""
    if value.dtype == to:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.update(dtype=to)
    if isinstance(value, np.ndarray):
        with np.errstate(over="ignore", invalid="ignore"):
            between = value.astype(np.float32) if value.itemsize == 1 and _is_float(value) else value  # NumPy needs it
            new = between.astype(to)
    else:
        new = to_memory_of(value, to_device(value).astype(to))
    if is_concrete(value):
        _refuse_lost(to_device(value), to_device(new), path, fix)
    return new


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def _refuse_lost(value: Any, new: Any, path: str, fix: str) -> None:
    numpy, to, got = np if isinstance(value, np.ndarray) else jnp, new.dtype, ""
    if jnp.issubdtype(to, jnp.integer):
        limits, [least, most] = (
            jnp.iinfo(to),
            [int(each(value)) if value.size else 0 for each in (numpy.min, numpy.max)],
        )
        expected = f"numbers from {limits.min} to {limits.max}"
        got = f"numbers from {least} to {most}" if least < limits.min or most > limits.max else ""
    else:
        lost = 0
        limits = jnp.finfo(to)
        if not _is_float(value):  # complex
            lost = int((numpy.isfinite(value) & ~numpy.isfinite(new)).sum())
        elif _is_float(new):
            has_all = to.itemsize > 1 and jnp.finfo(value.dtype).max <= limits.max  # also negative ones, zeros and NaN
            lost = 0 if has_all else int(_is_lost(numpy, value, new).sum())
        expected = f"values of at most {float(limits.max):g}" if float(limits.min) < 0 else "positive values"
        got = f"{counted(lost, 'number', 'numbers')} of {value.dtype} that it does not have" if lost else ""
    if got:
        raise value_error(f"{to} does not have all frozen values", at=path, got=got, expected=expected, fix=fix)


def _is_lost(numpy: Any, value: Any, new: Any) -> Any:
    """Where a value is outside of the range of its new type; some types have no NaN, no zero or no negative numbers."""
    limits = jnp.finfo(new.dtype)
    rounded_to_largest = float(limits.max) + float(limits.eps) * 2.0 ** (math.frexp(float(limits.max))[1] - 2)
    value = value if value.dtype == np.float64 else value.astype(np.float32)
    too_large = numpy.isfinite(value) & (numpy.abs(value) > rounded_to_largest)
    return too_large | (numpy.isfinite(value) != numpy.isfinite(new.astype(np.float32)))
