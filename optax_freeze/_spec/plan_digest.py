"""A digest of the plan in an optimizer state. It is stored with the state, and compared where the state is read.

It has no digest of masks and dynamic row numbers: these are arrays of the state, and are read with it.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from optax_freeze._errors import counted, value_error
from optax_freeze._spec.selection import FROZEN, DenseMask, DynamicRowIndex, RowIndex, Selection

_BYTES = 8
"""The size of the digest of one line."""


class PlanLine(NamedTuple):
    """What a plan says about a leaf or a group: in an error, and exactly."""

    path: str
    told: str
    exact: Any

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(repr((self.path, self.exact)).encode(), digest_size=_BYTES).digest()


class HasLines(Protocol):
    @property
    def lines(self) -> Iterable[PlanLine]: ...


def record_of(selection: Selection) -> Any:
    """A selection without its array, as JSON: True if all is frozen, False if nothing is, else a dict."""
    if isinstance(selection, RowIndex):
        return {"axis": selection.axis, "rows": selection.rows.as_json(), "train": not selection.rows.others}
    if isinstance(selection, DynamicRowIndex):
        kept = {"keep_state": True} if selection.keep_state else {}
        return {"axis": selection.axis, "count": selection.count, "dynamic": True, **kept}
    if isinstance(selection, DenseMask):
        return {"compact": selection.compact, "count": selection.count}
    return selection is FROZEN


def digest_of(plan: HasLines) -> np.ndarray:
    """The digest of a plan: uint8, one row for each line."""
    return np.frombuffer(b"".join(line.digest for line in plan.lines), np.uint8).reshape(-1, _BYTES)


def refuse_other_plan(plan: HasLines, stored: Any, what: str, fix: str) -> None:
    """A ``ValueError`` unless ``stored``, which belongs to the state ``what``, is the digest of a plan."""
    lines, stored = list(plan.lines), np.asarray(stored, np.uint8).tobytes()
    if digest_of(plan).tobytes() == stored:
        return
    found = {stored[i : i + _BYTES] for i in range(0, len(stored), _BYTES)}
    others = [line for line in lines if line.digest not in found]
    unknown = len(found - {line.digest for line in lines})
    raise value_error(
        f"{what} was created with a different spec or for different parameters",
        at=list(dict.fromkeys(line.path for line in others))[:3] or "the state",
        got=f"{counted(unknown, 'leaf or group', 'leaves or groups')} of another kind" if found else "no spec",
        expected=others[0].told if others else f"{counted(len(lines), 'leaf or group', 'leaves or groups')} in all",
        fix=fix,
    )
