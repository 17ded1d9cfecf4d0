"""Tied leaves: one array at two paths is frozen at both or trained at both."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from optax_freeze._errors import is_concrete, value_error
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, Selection
from optax_freeze._spec.tree import Leaf

_TRACED: contextvars.ContextVar[Mapping[int, Any]] = contextvars.ContextVar("traced", default=MappingProxyType({}))


@contextlib.contextmanager
def traced_from(arrays: Mapping[int, Any]) -> Iterator[None]:
    """Compares these arrays in place of their tracers, which are found by their ids."""
    token = _TRACED.set(arrays)
    try:
        yield
    finally:
        _TRACED.reset(token)


def ties(values: Sequence[Any], leaves: Sequence[Leaf]) -> Iterator[tuple[int, int]]:
    """For each leaf whose array is at an earlier path, too: the numbers of the first such leaf, and of this one."""
    first: dict[int, int] = {}
    traced = _TRACED.get()
    for i, value in enumerate(traced.get(id(value), value) for value in values):
        if leaves[i].inexact and is_concrete(value) and value.size:
            j = first.setdefault(id(value), i)
            if i != j:
                yield j, i


def refuse_tied(values: Sequence[Any], leaves: Sequence[Leaf], selections: Sequence[Selection]) -> None:
    for j, i in ties(values, leaves):
        if not _same(selections[i], selections[j]):
            frozen, trains = (j, i) if selections[j] is FROZEN or selections[i] is TRAINABLE else (i, j)
            what = "tied leaves: the same array is frozen at one path and trained at another"
            got = f"frozen at this path, but trained (in whole or in part) at {leaves[trains].path}"
            expected = "tied leaves frozen together or trained together"
            fix = 'freeze both or neither, copy the array, or pass tied="ignore"'
            raise value_error(what, at=leaves[frozen].path, got=got, expected=expected, fix=fix)


def _same(a: Selection, b: Selection) -> bool:
    if a != b or not isinstance(a, DenseMask) or not isinstance(b, DenseMask) or a.array is b.array:
        return a == b
    return is_concrete(a.array) and is_concrete(b.array) and np.array_equal(a.array, b.array)
