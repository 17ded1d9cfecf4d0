"""Bars: the bytes of each module, trainable and frozen, with optimizer state; the operations of a forward pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from optax_freeze._errors import message, printable
from optax_freeze._report.table import Row, prefix, share, size, unit

_MOST_BARS = 12
_PARTS = ("trainable", "frozen", "in the host's memory", "optimizer state")
_COLORS = ("#E69F00", "#0072B2", "#56B4E9", "#999999")
"""From the palette of Okabe and Ito, which the color-blind can tell apart."""


class _Bar(NamedTuple):
    trainable: int = 0
    frozen: int = 0
    on_host: int = 0
    state: int = 0


def draw(rows: Sequence[Row], state: Sequence[int], state_bytes: int | None, depth: int, ax: Any) -> Any:
    """Draws rows, of which ``state`` are the bytes of their optimizer state, on axes; None makes a figure."""
    ax = _new_axes("Summary.plot") if ax is None else ax
    bars = _bars(rows, state or [0] * len(rows), depth)
    one, name_of_unit = unit(max(map(sum, bars.values())))
    totals = _sum(*bars.values())._replace(state=state_bytes)
    for i, (part, total) in enumerate(zip(_PARTS, totals, strict=True)):
        if total is None or (i == 2 and not total):
            continue
        widths, left = [bar[i] / one for bar in bars.values()], [sum(bar[:i]) / one for bar in bars.values()]
        ax.barh(range(len(bars)), widths, left=left, color=_COLORS[i], label=f"{part}: {size(total)}")
    ax.set_yticks(range(len(bars)), [printable(name or "(the root)").replace("$", r"\$") for name in bars])
    ax.set_ylim(1.35 * len(bars) - 0.5, -0.5)  # the first bar at the top, and space for the legend below the last
    ax.set_xlabel(name_of_unit)
    ax.legend(loc="lower right")
    return ax


def draw_flops(counts: dict[str, int], ax: Any) -> Any:
    """Draws numbers of operations as bars on axes; None makes a figure."""
    ax = _new_axes("CutExplanation.plot") if ax is None else ax
    bars = ax.barh(list(counts), [count / 1e9 for count in counts.values()], color=_COLORS[1::-1])
    ax.bar_label(bars, [share(count, sum(counts.values())) for count in counts.values()], padding=3)
    ax.invert_yaxis()
    ax.margins(x=0.2)
    ax.set_xlabel("GFLOP of the forward pass")
    return ax


def _bars(rows: Sequence[Row], state: Sequence[int], depth: int) -> dict[str, _Bar]:
    """The bar of each module by its name; small modules share one."""
    bars: dict[str, _Bar] = {}
    for row, held in zip(rows, state, strict=True):
        name = prefix(row.path, depth)
        frozen = max(row.frozen_bytes - row.host_bytes, 0)  # what lies on the host is taken from them first
        bar = _Bar(row.bytes - row.host_bytes - frozen, frozen, row.host_bytes, held)
        bars[name] = _sum(bars.get(name, _Bar()), bar)
    small = sorted(bars, key=lambda name: sum(bars[name]), reverse=True)[_MOST_BARS:]
    if small:
        bars[f"{len(small)} smaller"] = _sum(*map(bars.pop, small))
    return bars


def _sum(*bars: _Bar) -> _Bar:
    return _Bar(*map(sum, zip(*bars, strict=True)))


def _new_axes(at: str) -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        expected, fix = "matplotlib, which only plots need", "pip install matplotlib"
        text = message("matplotlib is missing", at=at, got=str(error), expected=expected, fix=fix)
        raise ImportError(text) from error
    return plt.subplots(layout="constrained")[1]
