"""The functions that make element masks: :func:`rows` and :func:`elements`."""

from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import described, is_array, is_bool, is_concrete, is_int, type_error, value_error
from optax_freeze._spec.masks import DynamicRows, Elements, StaticRows
from optax_freeze._spec.row_numbers import named_twice


@overload
def rows(
    index: slice | int | Sequence[int] | np.ndarray[Any, Any], axis: int = 0, *, allow_empty: bool = False
) -> StaticRows: ...
@overload
def rows(index: jax.Array, axis: int = 0, *, keep_state: bool = False) -> DynamicRows: ...
def rows(index: Any, axis: int = 0, *, allow_empty: bool = False, keep_state: bool = False) -> Any:
    """Freezes rows of a leaf along one axis.

    Args:
      index: the frozen rows: a slice, an int or a list of ints (static rows); negative numbers count from the end. Or,
        as in NumPy, a bool for each row of the axis, True where frozen: a list or an array with values (static, too).
        Or a JAX array of integers of shape (k,), which may be traced (dynamic rows): only k is static, the row numbers
        are in the optimizer state, where :func:`optax_freeze.replace_masks` replaces them.
      axis: the axis along which rows are counted; negative numbers count from the last.
      allow_empty: whether an open slice (``slice(n, None)``) may select no rows, as in a sweep over ``n``.
      keep_state: for the rows of a batch, ``~fz.rows(array, keep_state=True)``: the optimizer state is that of the
        whole leaf, and each step reads and writes the state of the rows that train now. Their numbers may be given
        again or be out of range, and only gradients and updates look at them: everywhere else the whole leaf trains.

    Returns:
      An element mask, for a tree of bools or as a value of :func:`optax_freeze.rules`; ``~`` gives the other rows. A
      mask of all rows of a leaf means True, of none False.

    Raises:
      TypeError: if ``index`` or ``axis`` has another type, or ``index`` is a traced array of bools.
      ValueError: if a row is named twice, or static rows shall keep their state; when resolved, if a row or the axis is
        out of range, if there are more or fewer bools than rows, if rows that keep their state are not those that
        train, or if an open slice selects no row: ``~fz.rows(slice(4, None))`` would freeze all of 4 rows. Traced
        numbers are not checked; one that is out of range, or given again, selects no row.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"embed": jnp.arange(6.0).reshape(3, 2)}
      >>> trainable, rest = fz.partition(params, {"embed": fz.rows([0, 1])})
      >>> trainable["embed"].values
      Array([[4., 5.]], dtype=float32)
    """
    bools = _bools_of(index)
    numbers = _numbers_of(index) if bools is None else tuple(np.flatnonzero(bools).tolist())
    if numbers is None or not is_int(axis):
        got = f"index={described(index)}, axis={described(axis)}"
        expected = "a slice, an int, a list of ints, a JAX array of integers of shape (k,) or a vector of bools with"
        what, expected, fix = "fz.rows takes row numbers", f"{expected} values", _fix_for(index, axis)
        raise type_error(what, at="fz.rows", got=got, expected=expected, fix=fix)
    if isinstance(numbers, jax.Array):
        return DynamicRows(numbers, int(axis), keep_state=bool(keep_state))
    if keep_state:
        raise value_error(
            "only dynamic rows keep their state",
            at="fz.rows",
            got=f"static rows: {described(index)}",
            expected="a JAX array of integers: the rows that train now, which change in each step",
            fix="~fz.rows(jnp.arange(k), keep_state=True), where k is the largest number of rows of a batch",
        )
    if isinstance(numbers, tuple) and len(set(numbers)) < len(numbers):
        raise named_twice("fz.rows", list(numbers)[:8])
    length = None if bools is None else len(bools)
    return StaticRows(numbers, int(axis), allow_empty=allow_empty, length=length)


def elements(array: Any, *, compact: bool = False) -> Elements:
    """Freezes the elements of a leaf where a boolean array is True, as such an array in a tree of bools does.

    Args:
      array: a boolean array of the leaf's shape, True where frozen.
      compact: whether an optimizer receives the trainable elements as a vector, whose size is fixed, and its state
        covers only these. Otherwise it receives the full leaf, with zeros at the frozen elements.

    Returns:
      An element mask, for a tree of bools or as a value of :func:`optax_freeze.rules`; ``~`` gives the other elements.
      It is a pytree whose one leaf is the array.

    Raises:
      TypeError: if ``array`` is not a boolean array.
      ValueError: when resolved, if it does not have the shape of the leaf, or is ``compact`` and traced.

    Example:
      >>> import optax_freeze as fz
      >>> mask = np.array([[False, True], [True, False]])
      >>> trainable, rest = fz.partition({"w": jnp.ones((2, 2))}, {"w": fz.elements(mask, compact=True)})
      >>> trainable["w"].values
      Array([1., 1.], dtype=float32)
    """
    if not is_array(array) or array.dtype != np.bool_:
        got, expected = described(array), "an array of bool, True where frozen"
        fix = "compare: fz.elements(scores < threshold); for rows use fz.rows(...)"
        if isinstance(array, (list, tuple)) and array and all(map(is_bool, array)):
            fix = f"fz.elements(np.array({list(array)}))"
        elif jnp.issubdtype(getattr(array, "dtype", np.int32), np.integer):
            fix = "from indices: mask = np.zeros(leaf.shape, bool); mask[indices] = True; for whole rows fz.rows(...)"
        raise type_error("fz.elements takes a boolean array", at="fz.elements", got=got, expected=expected, fix=fix)
    count = int(array.size - np.count_nonzero(np.asarray(array))) if compact and is_concrete(array) else None
    return Elements(array, compact, count)


def _fix_for(index: Any, axis: Any) -> str:
    """What to write for something that is not an index of rows."""
    if not is_int(axis):
        return "give the axis as an int: axis=0"
    if not is_array(index):
        return "list the row numbers: fz.rows([0, 1])"
    if index.dtype != np.bool_:
        return "convert the numbers: fz.rows(array.astype(int).ravel())"
    if index.ndim == 1:
        return "create the array outside jit; or, if k of its bools are True, fz.rows(jnp.flatnonzero(array, size=k))"
    return "for the elements of a leaf use fz.elements(array)"


def _bools_of(index: Any) -> np.ndarray | None:
    """A vector of bools with values, or None."""
    if is_concrete(index):
        return np.asarray(index) if index.ndim == 1 and index.dtype == np.bool_ else None
    is_list = isinstance(index, Sequence) and len(index) > 0 and not isinstance(index, str)
    return np.array(index) if is_list and all(isinstance(each, (bool, np.bool_)) for each in index) else None


def _numbers_of(index: Any) -> int | tuple[int, ...] | slice | jax.Array | None:
    """An index of Python ints, or a JAX array of integers; otherwise None."""
    if isinstance(index, jax.Array):
        return index if index.ndim == 1 and jnp.issubdtype(index.dtype, jnp.integer) else None
    if is_int(index):
        return int(index)
    if isinstance(index, slice):
        bounds = [index.start, index.stop, index.step]
        if index.step == 0 or not all(bound is None or is_int(bound) for bound in bounds):
            return None
        return slice(*(None if bound is None else int(bound) for bound in bounds))
    if isinstance(index, (Sequence, np.ndarray)) and all(map(is_int, index)):
        return tuple(map(int, index))
    return None
