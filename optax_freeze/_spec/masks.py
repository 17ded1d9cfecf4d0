"""Which elements of one leaf are frozen: rows by their numbers, single elements by a boolean array.

``rows`` holds numbers and not an array, so a slice takes no memory and adds no constant to a compiled program. Of a JAX
array it is a pytree whose leaf is the array, as ``elements`` is: it can be an argument of a jitted function.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import described, is_array, is_concrete, is_int, type_error, value_error


class Slice(NamedTuple):
    """A hashable slice."""

    start: int | None
    stop: int | None
    step: int | None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class Rows:
    """Frozen rows of any leaf, made by :func:`rows`."""

    index: int | tuple[int, ...] | Slice
    axis: int = 0
    inverted: bool = False
    allow_empty: bool = False

    def __invert__(self) -> "Rows":
        return dataclasses.replace(self, inverted=not self.inverted)

    def __repr__(self) -> str:
        index = self.index
        if isinstance(index, tuple):
            index = slice(*index) if isinstance(index, Slice) else list(index)
        options = f"{f', axis={self.axis}' if self.axis else ''}{', allow_empty=True' if self.allow_empty else ''}"
        return f"{'~' * self.inverted}fz.rows({index}{options})"


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["axis", "inverted", "ascending", "of_state"]
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DynamicRows:
    """Frozen rows of which only the number is static, made by :func:`rows` of a JAX array."""

    array: Any
    axis: int = 0
    inverted: bool = False
    ascending: bool = False  # whether the numbers are known to be in order, and not negative
    of_state: bool = False  # whether they were read from an optimizer state

    def __invert__(self) -> "DynamicRows":
        return dataclasses.replace(self, inverted=not self.inverted)

    def __repr__(self) -> str:
        array = f"<{self.array.dtype}{list(self.array.shape)}>" if is_array(self.array) else "..."
        return f"{'~' * self.inverted}fz.rows({array}{f', axis={self.axis}' if self.axis else ''})"


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["compact", "count", "of_state"]
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Elements:
    """Frozen elements as a boolean array, made by :func:`elements`."""

    array: Any
    compact: bool = False
    count: int | None = None  # of trainable elements, if `compact` and the array has values
    of_state: bool = False  # whether it was read from an optimizer state

    def __invert__(self) -> "Elements":
        array = ~jnp.asarray(self.array)
        return Elements(array, self.compact, None if self.count is None else array.size - self.count)

    def __repr__(self) -> str:
        shape = getattr(self.array, "shape", "?")
        return f"fz.elements(<bool{list(shape)}>{', compact=True' if self.compact else ''})"


ElementMask: TypeAlias = Rows | DynamicRows | Elements


@overload
def rows(index: slice | int | Sequence[int], axis: int = 0, *, allow_empty: bool = False) -> Rows: ...
@overload
def rows(index: jax.Array, axis: int = 0) -> DynamicRows: ...
def rows(index: Any, axis: int = 0, *, allow_empty: bool = False) -> Any:
    """Freezes rows of a leaf along one axis.

    Args:
      index: a slice, an int or a list of ints: the frozen rows. Negative numbers count from the end. Or a JAX array of
        integers with shape (k,), in any order, which may be traced. Then only the number of rows is static. The row
        numbers are part of the optimizer state, and :func:`optax_freeze.replace_masks` replaces them; gradients use
        :func:`optax_freeze.spec_of` the state.
      axis: the axis along which rows are counted; negative numbers count from the last.
      allow_empty: whether an open slice (``slice(n, None)``) may select no rows, as in a sweep over ``n``.

    Returns:
      An element mask, to be used in a tree of bools or as a value of :func:`optax_freeze.rules`; ``~`` gives the other
      rows. If all rows of a leaf or none are selected, it means True or False.

    Raises:
      TypeError: if ``index`` or ``axis`` has another type.
      ValueError: if a row is named twice; when resolved, if a row or the axis is out of range, or if an open slice
        selects no row of a leaf that has rows: ``~fz.rows(slice(4, None))`` would silently freeze all of 4 rows. Traced
        row numbers are not checked; a number that is out of range, or given again, selects no row.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"embed": jnp.arange(6.0).reshape(3, 2)}
      >>> trainable, rest = fz.partition(params, {"embed": fz.rows([0, 1])})
      >>> trainable["embed"].values
      Array([[4., 5.]], dtype=float32)
      >>> ~fz.rows(slice(32000, None))  # only the rows from 32000 on train
      ~fz.rows(slice(32000, None, None))
    """
    if isinstance(index, jax.Array) and is_int(axis):
        _refuse_no_numbers(index)
        return DynamicRows(index, int(axis))
    hashable = _hashable(index)
    if hashable is None or not is_int(axis):
        raise type_error(
            "fz.rows takes row numbers",
            at="fz.rows",
            got=f"index={described(index)}, axis={described(axis)}",
            expected="a slice, an int or a list of ints, and an int for the axis",
            fix="for a boolean array use fz.elements(array)",
        )
    if not isinstance(hashable, (int, Slice)) and len(set(hashable)) < len(hashable):
        raise named_twice("fz.rows", hashable)
    return Rows(hashable, int(axis), allow_empty=allow_empty)


def elements(array: Any, compact: bool = False) -> Elements:
    """Freezes the elements of a leaf where a boolean array is True.

    A boolean array (NumPy or JAX) in a tree of bools means the same.

    Args:
      array: a boolean array of the leaf's shape, True where frozen.
      compact: if False, an optimizer receives the full leaf, with zeros at the frozen elements, and its state has the
        shape of the leaf. If True, it receives the trainable elements as a vector, and its state covers only these.
        Their number is then fixed.

    Returns:
      An element mask, to be used in a tree of bools or as a value of :func:`optax_freeze.rules`; ``~`` gives the other
      elements. It is a pytree whose one leaf is the array.

    Raises:
      TypeError: if ``array`` is not a boolean array.
      ValueError: when resolved, if its shape is not the shape of the leaf, or if ``compact`` and the array is traced,
        so that its elements cannot be counted.

    Example:
      >>> import optax_freeze as fz
      >>> mask = np.array([[False, True], [True, False]])
      >>> fz.elements(mask)
      fz.elements(<bool[2, 2]>)
      >>> trainable, rest = fz.partition({"w": jnp.ones((2, 2))}, {"w": fz.elements(mask, compact=True)})
      >>> trainable["w"].values
      Array([1., 1.], dtype=float32)
    """
    if not is_array(array) or array.dtype != np.bool_:
        raise type_error(
            "fz.elements takes a boolean array",
            at="fz.elements",
            got=described(array),
            expected="an array of bool, True where frozen",
            fix="compare: fz.elements(scores < threshold); for rows use fz.rows(...)",
        )
    counts = compact and is_concrete(array)
    return Elements(array, compact, int(array.size - np.count_nonzero(np.asarray(array))) if counts else None)


def named_twice(at: str, numbers: Sequence[int]) -> ValueError:
    """The error for a list in which a row is named twice."""
    return value_error(
        "a row is named twice",
        at=at,
        got=f"{list(numbers)[:8]}",
        expected="each row once",
        fix="sorted(set(rows)), with negative numbers counted from the end",
    )


def _refuse_no_numbers(array: Any) -> None:
    if jnp.issubdtype(array.dtype, jnp.integer) and len(array.shape) == 1:
        return
    raise type_error(
        "fz.rows takes row numbers",
        at="fz.rows",
        got=f"a JAX array of {array.dtype}, of shape {tuple(array.shape)}",
        expected="an array of integers, of shape (k,)",
        fix="for a boolean array use fz.elements(array)" if array.dtype == np.bool_ else "array.astype(int).ravel()",
    )


def _hashable(index: Any) -> int | tuple[int, ...] | Slice | None:
    """An index of ints as a hashable value, or None if it is not one."""
    if is_int(index):
        return int(index)
    if isinstance(index, slice):
        bounds = [index.start, index.stop, index.step]
        if index.step == 0 or not all(bound is None or is_int(bound) for bound in bounds):
            return None
        return Slice(*(None if bound is None else int(bound) for bound in bounds))
    if isinstance(index, (Sequence, np.ndarray)) and all(map(is_int, index)):
        return tuple(map(int, index))
    return None
