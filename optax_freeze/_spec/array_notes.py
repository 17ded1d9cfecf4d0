"""Remembers something about array objects, tracers included, for as long as they exist."""

import weakref
from typing import Any, Generic, TypeVar

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

    def get(self, array: Any) -> T | None:
        """The note about this very object, or None."""
        made, note = self._notes.get(id(array), (lambda: None, None))
        return note if made() is array else None
