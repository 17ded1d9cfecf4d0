"""Evaluates small constants of a program, such as row numbers and written values in ``w.at[0].set(0)``.

Inside ``jit``, even an operation on constants returns a tracer, whose value is unknown when rules are applied.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

_MOST_ELEMENTS = 4096


def _broadcast(x: np.ndarray, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any) -> np.ndarray:
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, **_: x + y,
    "concatenate": lambda *arrays, dimension: np.concatenate(arrays, dimension),
    "ge": lambda x, y: x >= y,
    "iota": lambda *, shape, dimension, **_: np.indices(shape)[dimension],
    "lt": lambda x, y: x < y,
    "mul": lambda x, y, **_: x * y,
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "select_n": lambda which, *cases: np.choose(which, cases),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "sub": lambda x, y, **_: x - y,
}
_OF_ANY: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
}


def folded(eqn: Any, values: Sequence[Any]) -> np.ndarray | None:
    """Returns the result of an equation if it is a small constant (integers, or one number cast or broadcast)."""
    name = eqn.primitive.name
    operation = _OF_NUMBERS.get(name) or _OF_ANY.get(name)
    if operation is None or len(eqn.outvars) != 1 or not all(map(_is_small, values)):
        return None
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    exact = all(jnp.issubdtype(aval.dtype, jnp.integer) or aval.dtype == bool for aval in avals)
    to_number = jnp.issubdtype(avals[-1].dtype, jnp.number) and jnp.issubdtype(avals[0].dtype, jnp.number)
    if not exact and (name in _OF_NUMBERS or not to_number or avals[0].ndim or avals[-1].weak_type):
        return None
    if avals[-1].size > _MOST_ELEMENTS or eqn.params.get("sharding") is not None:
        return None
    operands = [known(value) for value in values]
    if not all(isinstance(operand, np.ndarray) for operand in operands):
        return None
    operands = [operand.astype(v.aval.dtype) for operand, v in zip(operands, eqn.invars, strict=True)]
    with np.errstate(over="ignore"):
        return np.asarray(operation(*operands, **eqn.params), avals[-1].dtype)


def known(value: Any) -> Any:
    """Returns ``value`` as a NumPy array if it is a constant, otherwise unchanged."""
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        return np.asarray(value) if value.is_fully_addressable else value
    return np.asarray(value) if isinstance(value, (np.ndarray, np.generic, bool, int, float)) else value


def _is_small(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic, bool, int, float)) and np.size(value) <= _MOST_ELEMENTS


def as_array(value: Any) -> Any:
    """Returns ``value`` as a JAX array if it was folded."""
    return jnp.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else value
