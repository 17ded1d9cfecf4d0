"""The rows that two element masks of one leaf freeze: their union for ``|``, their intersection for ``&``."""

from typing import Any

import numpy as np

from optax_freeze._errors import value_error
from optax_freeze._spec.mask_operators import as_arrays
from optax_freeze._spec.masks import Choice, StaticRows
from optax_freeze._spec.selection import RowIndex
from optax_freeze._spec.tree import Leaf


def combined(a: Choice, b: Choice, leaf: Leaf, selector: Any, *, either: bool) -> Choice:
    """What at least one of two masks freezes if ``either``, else what both do; an error unless these are rows."""
    if isinstance(a, StaticRows) and isinstance(b, StaticRows):
        first, second = a.fit(leaf), b.fit(leaf)
        if not isinstance(first, RowIndex):
            return either if first.frozen(0) is either else b
        if not isinstance(second, RowIndex):
            return either if second.frozen(0) is either else a
        if first.axis == second.axis:
            operation = np.logical_or if either else np.logical_and
            return _rows(operation(*(~np.isin(np.arange(s.size), s.numbers) for s in (first, second))), first.axis)
    what, got = f"{selector!r}: two element masks for one leaf", f"{a!r} and {b!r}"
    expected = "one mask for a leaf, or static rows along one axis"
    fix = as_arrays(a, b, "|" if either else "&", leaf.shape)
    raise value_error(what, at=leaf.path, got=got, expected=expected, fix=fix)


def _rows(frozen: np.ndarray, axis: int) -> bool | StaticRows:
    """Rows, frozen where a boolean vector is True; a slice if they are one run, or all others are."""
    if frozen.all() or not frozen.any():
        return bool(frozen.all())
    for named, inverted in ((frozen, False), (~frozen, True)):
        numbers = np.flatnonzero(named).tolist()
        if len(numbers) == numbers[-1] + 1 - numbers[0]:
            return StaticRows(slice(numbers[0], numbers[-1] + 1), axis, inverted)
    return StaticRows(tuple(np.flatnonzero(frozen).tolist()), axis)
