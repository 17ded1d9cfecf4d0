"""A set of rows along an axis: what masks, selections, groups and records have in common.

Rows are stored as runs, so that a set has no size of its own, or as one progression, where there would be many runs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from optax_freeze._errors import listed

FEW = 16  # up to this many runs of rows, row numbers are computed as iotas; beyond it they are a constant


@dataclasses.dataclass(frozen=True)
class RowSet:
    """Those of ``size`` rows that are in ``progressions``, or all ``others``; equal sets are equal objects."""

    size: int
    progressions: tuple[tuple[int, int, int], ...]  # (start, stop, step), ascending
    others: bool = False

    @classmethod
    def of_runs(cls, size: int, runs: Sequence[tuple[int, int]]) -> "RowSet":
        """The rows of ascending runs (start, stop)."""
        for rows, others in [(runs, False), (_gaps(size, runs), True)] if len(runs) > FEW else []:
            progression = rows[0][0], rows[-1][1], rows[1][0] - rows[0][0]
            if rows[0][1] == rows[0][0] + 1 and list(rows) == [(i, i + 1) for i in range(*progression)]:
                return cls(size, (progression,), others)
        return cls(size, tuple((start, stop, 1) for start, stop in runs))

    @classmethod
    def of_numbers(cls, size: int, numbers: Sequence[int]) -> "RowSet":
        """The rows with these numbers, ascending and each once."""
        named = {*numbers}
        starts, stops = [n for n in numbers if n - 1 not in named], [n + 1 for n in numbers if n + 1 not in named]
        return cls.of_runs(size, list(zip(starts, stops, strict=True)))

    def as_json(self) -> list[list[int]]:
        return list(map(list, self.progressions))

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The ascending runs (start, stop)."""
        steps = ([(a, b)] if step == 1 else [(n, n + 1) for n in range(a, b, step)] for a, b, step in self.progressions)
        named = [*itertools.chain.from_iterable(steps)]
        return _gaps(self.size, named) if self.others else named

    @property
    def run(self) -> tuple[int, int] | None:
        """The rows as one run, if they are one."""
        (start, stop, step), *more = self.progressions or [(0, 0, 0)]
        return (start, stop) if step == 1 and not more else None

    @functools.cached_property
    def count(self) -> int:
        named = sum(len(range(*progression)) for progression in self.progressions)
        return self.size - named if self.others else named

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of the rows, ascending."""
        named = np.concatenate([np.arange(0), *(np.arange(*progression) for progression in self.progressions)])
        return np.setdiff1d(np.arange(self.size), named) if self.others else named

    def __invert__(self) -> "RowSet":
        return RowSet.of_runs(self.size, _gaps(self.size, self.runs))

    def __or__(self, other: "RowSet") -> "RowSet":
        return RowSet.of_numbers(self.size, np.union1d(self.numbers, other.numbers).tolist())

    def __and__(self, other: "RowSet") -> "RowSet":
        return RowSet.of_numbers(self.size, np.intersect1d(self.numbers, other.numbers).tolist())

    def __str__(self) -> str:
        """The runs or the progression, without saying whether it is all others."""
        return listed((f"{start}:{stop}" + f":{step}" * (step > 1) for start, stop, step in self.progressions), 8)


def _gaps(size: int, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The runs of all other rows."""
    edges = [0, *itertools.chain.from_iterable(runs), size]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
