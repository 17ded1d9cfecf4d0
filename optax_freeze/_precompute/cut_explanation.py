"""Explains what is computed once, what is stored, and which operations prevent computing more once."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from optax_freeze._errors import counted
from optax_freeze._gradient.explanation import Explanation
from optax_freeze._report import plot as _plot
from optax_freeze._report.table import share, size

_MOST = 8


@dataclasses.dataclass(frozen=True)
class Feature:
    """A value that is stored, and the operation that computes it, with the source line."""

    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    operation: str


@dataclasses.dataclass(frozen=True)
class CutExplanation(Explanation):
    """How :func:`optax_freeze.precompute` divides a function, with the attributes that ``explain`` describes."""

    features: tuple[Feature, ...]
    flops_before: int
    flops_after: int
    not_needed: tuple[str, ...]
    not_needed_bytes: int
    stopped_by: tuple[tuple[str, str], ...]

    @property
    def bytes(self) -> int:
        """The bytes of all features."""
        return sum(feature.bytes for feature in self.features)

    @property
    def lines(self) -> list[str]:
        total = self.flops_before + self.flops_after
        leaves = counted(len(self.not_needed), "frozen leaf", "frozen leaves")
        return [
            f"computed once: {_flop(self.flops_before)}, {share(self.flops_before, total)} of the forward pass",
            f"computed in each step: {_flop(self.flops_after)}, {share(self.flops_after, total)}",
            f"stored: {counted(len(self.features), 'array', 'arrays')}, {size(self.bytes)}",
            *(f"  {f.dtype} {list(f.shape)}, {size(f.bytes)}: {f.operation}" for f in self.features),
            f"not read in a step: {leaves}, {size(self.not_needed_bytes)}",
            *_first(path or "(the root)" for path in self.not_needed),
            "first on its path that cannot be computed once:",
            *_first(f"{operation}: depends on {why}" for operation, why in self.stopped_by),
        ]

    def plot(self, ax: Any = None) -> Any:
        """Draws two bars: the operations of the forward pass computed once, and those computed in each step.

        Args:
          ax: matplotlib axes. By default a new figure is created.

        Returns:
          The axes.

        Raises:
          ImportError: if matplotlib is not installed.
        """
        return _plot.draw_flops({"computed once": self.flops_before, "in each step": self.flops_after}, ax)


def _first(items: Iterable[str]) -> list[str]:
    lines = [f"  {item}" for item in items]
    return lines if len(lines) <= _MOST else [*lines[:_MOST], f"  and {len(lines) - _MOST} more"]


def _flop(count: int) -> str:
    power = min(max(len(str(count)) - 1, 0) // 3, 5)
    return f"{count / 1000**power:.3g} {' kMGTP'[power].strip()}FLOP"
