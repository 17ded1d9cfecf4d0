"""Stores frozen parameters in fewer bits than trainable ones."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import counted, described, is_array, is_concrete, type_error, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import to_device, to_memory_of
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.selection import FROZEN
from optax_freeze._spec.tree import PyTree, Rest


def cast(tree: PyTree, frozen: Spec, dtype: Any) -> PyTree:
    """Converts frozen parameters to another floating-point type, and leaves trainable ones as they are.

    In ``params``, leaves that are frozen completely are converted. A leaf that is frozen in part is one array of one
    type and stays as it is. In the second output of :func:`optax_freeze.partition`, the array with its frozen rows or
    elements is converted, too. The leaf keeps its type: :func:`optax_freeze.combine` converts the array back, and
    :func:`optax_freeze.restrict` only what is read, in a loop over rows one row at a time.

    Args:
      tree: the parameters, or the second output of :func:`optax_freeze.partition`. NumPy arrays stay NumPy arrays, and
        arrays in host memory stay there. A ``jax.ShapeDtypeStruct`` gets the type, and nothing is allocated.
      frozen: the spec of the frozen parameters, in any form; True for everything in ``tree``.
      dtype: a real floating-point type: ``jnp.bfloat16``, ``jnp.float16``, ``jnp.float8_e4m3fn``, ...

    Returns:
      The tree with the converted leaves. Integers, complex numbers, PRNG keys, Python numbers and objects are returned
      unchanged, and arrays that have the type already as the same objects.

    Raises:
      TypeError: if ``dtype`` is not a real floating-point type.
      ValueError: if the spec does not fit; outside ``jit``, if ``dtype`` does not have a value of a leaf: a number
        outside of its range, a negative number or 0 in ``float8_e8m0fnu``, a NaN in ``float4_e2m1fn``.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> params = {"encoder": jnp.ones((4, 2)), "head": jnp.ones(2)}
      >>> params = fz.cast(params, "encoder", jnp.bfloat16)
      >>> params["encoder"].dtype, params["head"].dtype
      (dtype(bfloat16), dtype('float32'))
    """
    to = _floating(dtype)
    plan = make_plan(tree, frozen)
    values, treedef = _tree.flatten(tree)
    done: dict[int, Any] = {}  # an array at two paths is converted once

    def converted(array: Any, path: str) -> Any:
        if id(array) not in done:
            done[id(array)] = _converted(array, to, path)
        return done[id(array)]

    new = []
    for value, leaf, selection in zip(values, plan.leaves, plan.selections, strict=True):
        if isinstance(value, Rest):
            array = converted(value.array, leaf.path)
            new.append(dataclasses.replace(value, array=array, dtype=value.dtype or value.array.dtype))
        else:
            new.append(converted(value, leaf.path) if selection is FROZEN else value)
    return jax.tree.unflatten(treedef, new)


def _floating(dtype: Any) -> np.dtype:
    try:
        to = None if dtype is None else jnp.dtype(dtype)  # None would be float64
    except TypeError:
        to = None
    if to is None or not jnp.issubdtype(to, jnp.floating):
        raise type_error(
            "fz.cast needs a floating-point type",
            at="dtype",
            got=described(dtype) if to is None else str(to),
            expected="a real floating-point type",
            fix="fz.cast(params, frozen, jnp.bfloat16); for integers use a library that quantizes, such as Qwix",
        )
    return to


def _converted(value: Any, to: np.dtype, path: str) -> Any:
    is_shape = isinstance(value, jax.ShapeDtypeStruct)
    if not (is_shape or is_array(value)) or not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype == to:
        return value
    if is_shape:
        return value.update(dtype=to)
    if isinstance(value, np.ndarray):
        with np.errstate(over="ignore", invalid="ignore"):
            between = value.astype(np.float32) if value.itemsize == 1 else value  # NumPy needs it
            new = between.astype(to)
    else:
        new = to_memory_of(value, to_device(value).astype(to))
    largest = jnp.finfo(to).max
    has_all = to.itemsize > 1 and jnp.finfo(value.dtype).max <= largest  # also negative numbers, zeros and NaN
    if is_concrete(value) and not has_all:
        lost = int(_is_lost(np if isinstance(value, np.ndarray) else jnp, to_device(value), to_device(new)).sum())
        if lost:
            is_signed = float(jnp.finfo(to).min) < 0
            raise value_error(
                f"{to} does not have all frozen values",
                at=path,
                got=f"{counted(lost, 'number', 'numbers')} of {value.dtype} that it does not have",
                expected=f"values of at most {float(largest):g}" if is_signed else "positive values",
                fix="fz.cast(params, frozen, jnp.bfloat16) has the range of float32",
            )
    return new


def _is_lost(numpy: Any, value: Any, new: Any) -> Any:
    """Where a value is outside of the range of its new type; some types have no NaN, no zero or no negative numbers."""
    limits = jnp.finfo(new.dtype)
    rounded_to_largest = float(limits.max) + float(limits.eps) * 2.0 ** (math.frexp(float(limits.max))[1] - 2)
    value = value if value.dtype == np.float64 else value.astype(np.float32)
    too_large = numpy.isfinite(value) & (numpy.abs(value) > rounded_to_largest)
    return too_large | (numpy.isfinite(value) != numpy.isfinite(new.astype(np.float32)))
