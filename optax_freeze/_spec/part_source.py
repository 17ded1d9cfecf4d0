"""Where the rows of a ``Part`` come from, and whether they are those of another selection.

A gradient of dynamic rows does not contain their numbers: a leaf of integers would break ``jax.grad`` and norms. Its
source has them, and whether they were read from an optimizer state. At the border of a program, where JAX
keeps the objects of one call for all calls with equal static data, it forgets the numbers.

Where the numbers are traced or forgotten, the order of events tells: rows that ``fz.replace_masks`` put into a state
after a gradient was computed are not those of the gradient.
"""

import dataclasses
import itertools
import weakref
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._errors import is_concrete, value_error
from optax_freeze._jax_tracing import current_trace
from optax_freeze._spec.selection import Selection
from optax_freeze._spec.tree import Part, is_masked_node

T = TypeVar("T")


class ArrayNotes(Generic[T]):
    """A mapping from array objects, which neither hash nor compare, to notes; it keeps no array alive."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Any], T]] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def __setitem__(self, array: Any, note: T) -> None:
        number = id(array)
        self._notes[number] = weakref.ref(array, lambda _: self._notes.pop(number, None)), note

    def get(self, array: Any, default: T) -> T:
        """The note about this very object."""
        made, note = self._notes.get(id(array), (lambda: None, default))
        return note if made() is array else default


@dataclasses.dataclass(frozen=True)
class PartSource:
    """Where the rows or elements of a ``Part`` come from; two are equal if they differ in their arrays alone."""

    of_state: bool  # whether they were read from an optimizer state, and are not a constant of the program
    array: Any = dataclasses.field(default=None, compare=False, repr=False)  # None if unknown or traced
    trace: Any = dataclasses.field(default=None, compare=False, repr=False)  # in which the other fields are known
    time: int = dataclasses.field(default=0, compare=False, repr=False)  # when the `Part` was there at the latest

    def around(self, children: Any) -> "PartSource":
        """The source of a ``Part`` with these children: as an argument of another program it may have other rows.

        ``Part.tree_unflatten`` calls it and so is not pure: it reads a clock, and what JAX traces now. Its results have
        the same arrays and are equal (``array``, ``trace`` and ``time`` are not compared); they differ in which wrong
        rows are noticed later. A pure function would miss some. Whoever reads a ``Part`` could ask for the trace, but
        not when it left a jitted function, where JAX calls nothing else: rows that were replaced since then would pass
        for its own. A note about its arrays is lost there, since these are new objects; and static data are those of
        the first call of the program, for all calls.
        """
        is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(children))
        if self.trace == current_trace() if is_traced else self.array is not None:
            return self
        return PartSource.now(self.of_state)

    @classmethod
    def now(cls, of_state: bool, array: Any = None) -> "PartSource":
        return cls(of_state, array, current_trace(), next(_CLOCK))

    def __reduce__(self) -> Any:
        return PartSource.now, (self.of_state,)


_CLOCK = itertools.count()
_REPLACED = ArrayNotes[int]()
"""When ``fz.replace_masks`` has put arrays into states."""


def mark_replaced(array: Any, old: Any, *, is_new: bool) -> None:
    """Remembers that an array of a state took the place of another just now, or, if not new, when that one did."""
    time = next(_CLOCK) if is_new else _REPLACED.get(old, -1)
    if time >= 0:
        _REPLACED[array] = time


def source_of(selection: Selection, beside: Any) -> PartSource | None:
    """The source of the trainable part of ``beside``; None if the selection has no array."""
    if is_masked_node(selection.array) or selection.part_index is None:
        return None
    if not is_concrete(selection.array) or not _is_readable(selection.array):
        return PartSource.now(selection.of_state)
    return PartSource.now(selection.of_state and not isinstance(beside, Tracer), selection.array)


def with_source(part: Any, selection: Selection, leaf: Any) -> Any:
    """The trainable part of a leaf, its gradient or update, with its source: that of the leaf if it is a ``Part``."""
    if not isinstance(part, Part):
        return part
    return dataclasses.replace(part, source=leaf.source if isinstance(leaf, Part) else source_of(selection, leaf))


def refuse_other_rows(part: Any, selection: Selection, path: str, name: str) -> None:
    if not isinstance(part, Part) or part.source is None or not selection.in_part:
        return
    mine, its = part.source, source_of(selection, next(iter(jax.tree.leaves(part.values)), None))
    if its is None:
        return
    which = "elements" if isinstance(part.index, int) else "rows"
    fix = "compute it with the spec of this state, in the same program: fz.grad(loss, fz.spec_of(state))"
    if name == "trainable":
        fix = "pass both outputs of one fz.partition; the masks in `rest` are leaves, so jax.tree.map changes them: "
        fix += "fz.partition(jax.tree.map(f, params), frozen)[1]"
    # Without values, only what is certain is refused: rows replaced since, or a constant beside rows of a state.
    of_one_spec = name == "trainable" or not (mine.of_state or selection.of_state)
    if mine.array is not None and its.array is not None:
        if _same(mine.array, its.array):
            return
        what, got, expected = f"{name}: a Part of other {which}", _told(mine.array), _told(its.array)
    elif mine.time < _REPLACED.get(selection.array, -1):
        what, got = f"{name}: a Part of other {which}", f"{which} that fz.replace_masks has replaced since"
        expected = f"a Part of the {which} in the state"
        fix = f"call fz.replace_masks before the gradient, or after the update; {fix}"
    elif of_one_spec or which == "elements" or (mine.of_state and its.of_state and mine.array is None):
        return
    else:
        what = f"{name}: a Part that may have other rows"
        spec = "a state, and a state or spec that is a constant of the program"
        spec = spec if mine.of_state and its.array is not None else "a spec that is not fz.spec_of(state)"
        got = "rows that are a constant of the program" if mine.array is not None else f"rows of {spec}"
        expected = "rows read from the optimizer state, which is an argument of the program"
        fix += "; or, if the rows never change, give fz.rows a list of ints"
    raise value_error(what, at=path, got=got, expected=expected, fix=fix)


def values_of(part: Part, selection: Selection) -> Any:
    """The values of a ``Part``; NaN if its elements are a constant of the program and not those of the selection."""
    constant = None if part.source is None else part.source.array
    if constant is None or not isinstance(part.index, int) or not isinstance(selection.array, Tracer):
        return part.values
    same = jnp.array_equal(constant, selection.array)
    return jnp.where(same, part.values, jnp.asarray(jnp.nan, part.dtype))


def _same(a: Any, b: Any) -> bool:
    return a is b or not _is_readable(a) or np.array_equal(jax.device_get(a), jax.device_get(b))


def _is_readable(array: Any) -> bool:
    """Whether this process has the values of an array: it was not donated, and is not sharded over processes."""
    if not isinstance(array, jax.Array):
        return True
    return not array.is_deleted() and (array.is_fully_addressable or array.is_fully_replicated)


def _told(array: Any) -> str:
    array = np.asarray(jax.device_get(array))
    if array.dtype == np.bool_:
        return f"{array.size - np.count_nonzero(array)} elements, the first at {np.argmin(array.ravel())}"
    return f"rows {array[:8].tolist()}" + ", ..." * (len(array) > 8)
