"""Stores frozen parameters in fewer bits than trainable ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import described, is_array, type_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.dtype_conversion import converted
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.selection import FROZEN
from optax_freeze._spec.tree import PyTree, Rest

_FIX = "fz.cast(params, frozen, jnp.bfloat16) has the range of float32"


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
    plan = make_plan(tree, frozen).in_state
    values, treedef = _tree.flatten(tree)
    done: dict[int, Any] = {}  # an array at two paths is converted once

    def once(array: Any, path: str) -> Any:
        if id(array) not in done:
            is_float = is_array(array) and jnp.issubdtype(array.dtype, jnp.floating)
            done[id(array)] = converted(array, to, path, _FIX) if is_float else array
        return done[id(array)]

    new = []
    for leaf, selection, value in plan.entries(values):
        if isinstance(value, Rest):
            array = once(value.array, leaf.path)
            new.append(dataclasses.replace(value, array=array, dtype=value.dtype or value.array.dtype))
        else:
            new.append(once(value, leaf.path) if selection is FROZEN else value)
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
