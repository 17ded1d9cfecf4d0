"""Which elements of one leaf are frozen: whole rows by their numbers, single elements by a boolean array.

``rows`` is a description and no array: a slice leaves no constant in a compiled program and takes no memory. A dense
mask is an array: a leaf of the pytree that its ``elements`` is, so that it can be an argument of a jitted function.
Optax and Equinox know whole leaves only.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import described, is_array, is_concrete, is_int, type_error, value_error


class Slice(NamedTuple):
    """A slice that can be hashed."""

    start: int | None
    stop: int | None
    step: int | None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class Rows:
    """Frozen rows, before a leaf is known: made by :func:`rows`."""

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


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["compact", "count"])
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Elements:
    """Frozen elements as a boolean array: made by :func:`elements`."""

    array: Any
    compact: bool = False
    count: int | None = None  # how many elements train; known if compact

    def __invert__(self) -> "Elements":
        array = ~jnp.asarray(self.array)
        return Elements(array, self.compact, None if self.count is None else array.size - self.count)

    def __repr__(self) -> str:
        shape = getattr(self.array, "shape", "?")
        return f"fz.elements(<bool{list(shape)}>{', compact=True' if self.compact else ''})"


ElementMask: TypeAlias = Rows | Elements


def rows(index: slice | int | Sequence[int], axis: int = 0, *, allow_empty: bool = False) -> Rows:
    """Freezes rows of a leaf along one axis.

    Args:
      index: a slice, an int or a list of ints: the frozen rows. Negative numbers count from the end.
      axis: the axis along which rows are counted; negative numbers count from the last.
      allow_empty: whether an open slice (``slice(n, None)``) may select no row of a leaf, as in a sweep over ``n``.

    Returns:
      An element mask, for a tree of bools or a value of :func:`optax_freeze.rules`; ``~`` gives the other rows. It is
      resolved against each leaf that it is given for: rows that name all or none of a leaf's are True or False there.

    Raises:
      TypeError: if ``index`` or ``axis`` is none of these.
      ValueError: if a row is named twice; when resolved, if a row or the axis is out of range, or if an open slice
        selects no row of a leaf that has rows: ``~fz.rows(slice(4, None))`` would freeze all of 4 rows in silence.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"embed": jnp.arange(6.0).reshape(3, 2)}
      >>> trainable, rest = fz.partition(params, {"embed": fz.rows([0, 1])})
      >>> trainable["embed"].values
      Array([[4., 5.]], dtype=float32)
      >>> ~fz.rows(slice(32000, None))  # only the rows from 32000 on train
      ~fz.rows(slice(32000, None, None))
    """
    if not is_int(axis):
        pass
    elif isinstance(index, slice):
        bounds = [
            bound if bound is None else int(bound)
            for bound in (index.start, index.stop, index.step)
            if _is_bound(bound)
        ]
        if len(bounds) == 3 and index.step != 0:
            return Rows(Slice(*bounds), int(axis), allow_empty=allow_empty)
    elif isinstance(index, (Sequence, np.ndarray)):
        if all(map(is_int, index)):
            numbers = tuple(map(int, index))
            if len(set(numbers)) < len(numbers):
                raise named_twice("fz.rows", numbers)
            return Rows(numbers, int(axis), allow_empty=allow_empty)
    elif is_int(index):
        return Rows(int(index), int(axis), allow_empty=allow_empty)
    raise type_error(
        "fz.rows takes the numbers of rows",
        at="fz.rows",
        got=f"index={described(index)}, axis={described(axis)}",
        expected="a slice, an int or a list of ints, and an int for the axis",
        fix="for a boolean array use fz.elements(array)",
    )


def elements(array: Any, compact: bool = False) -> Elements:
    """Freezes single elements of a leaf: those where a boolean array is True.

    A boolean array (NumPy or JAX) in a tree of bools means the same.

    Args:
      array: a boolean array of the leaf's shape, True where frozen.
      compact: False: an optimizer sees the full leaf, zero at the frozen elements, and holds state of its shape. True:
        it sees the trainable elements as one vector and holds state for them alone; their number is then fixed.

    Returns:
      An element mask, for a tree of bools or a value of :func:`optax_freeze.rules`; ``~`` gives the other elements.
      It is a pytree whose one leaf is the array.

    Raises:
      TypeError: if ``array`` is no boolean array.
      ValueError: when resolved, if the shape is not the leaf's; if ``compact`` and the array is traced, so that its
        elements cannot be counted.

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
    count = None
    if compact and is_concrete(array):
        count = int(array.size - np.count_nonzero(np.asarray(array)))
    return Elements(array, compact, count)


def named_twice(at: str, numbers: Sequence[int]) -> ValueError:
    """The error for a list that names a row twice."""
    return value_error(
        "a row is named twice",
        at=at,
        got=f"{list(numbers)[:8]}",
        expected="each row once",
        fix="sorted(set(rows)), with negative numbers counted from the end",
    )


def _is_bound(value: Any) -> bool:
    return value is None or is_int(value)
