"""Draws the bars of the performance page from ``tests/benchmarks/results``.

``python docs/draw_bars.py`` writes ``docs/_static/memory_bars.png`` and ``docs/_static/cost_bars.png``. Each picture
holds a digest of the files that it was drawn from, which a test compares.
"""

import hashlib
import json
import pathlib
import re
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

STATIC = pathlib.Path(__file__).parent / "_static"
RESULTS = pathlib.Path(__file__).parents[1] / "tests/benchmarks/results"
COLORS = {"fz.offload": "#1b7837", "fz.freeze": "#5aae61", "fz.precompute": "#1b7837"}
OTHER = "#9e9ac8"
PANELS = {  # title: results, size and chip, chips, memory of a chip in GiB, tools
    "8B on one v5e chip": ("scale", "8B on v5e", 1, 15.75),
    "70B on 16 v5e chips": ("scale", "70B on v5e", 16, 15.75),
    "8B on one H100": ("scale_gpu", "8B on h100", 1, 79.11),
    "70B on two H100s": ("scale_gpu", "70B on h100", 2, 79.11),
}
TOOLS = ("optax.partition", "fz.freeze", "fz.offload")
WAYS = {  # rows of the first table of ``transformer``: optimizer state, FLOPs and temporary memory
    "chain(clip, adamw, optax.freeze)": "chain(clip, adamw,\noptax.freeze)",
    "optax.partition, clip outside": "optax.partition,\nclip outside",
    "optax.partition, clip inside": "optax.partition,\nclip inside",
    "fz.freeze, fz.train_step": "fz.freeze",
}


def table(name: str, title: str) -> list[dict[str, str]]:
    """The rows of the first table whose title begins so."""
    results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]
    found = next(each for each in results if isinstance(each, dict) and each["title"].startswith(title))
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def number(cell: str) -> float:
    return float(re.match(r"[\d.]+", cell)[0])


def memory(name: str, title: str, chips: int) -> dict[str, tuple[float, bool]]:
    """For each tool GiB per chip, and whether this is only what the arguments take, since these alone do not fit."""
    [row] = [row for row in table(name, title) if row["chips, trainable"] == f"{chips}, last block and head"]
    cells = {tool: row[tool] for tool in TOOLS if tool in row}
    return {tool: (number(cell.split("= ")[-1]), " alone" in cell) for tool, cell in cells.items()}


def costs() -> dict[str, list[tuple[str, float]]]:
    """The bars of each panel of the second picture."""
    rows = {row[""]: row for row in reversed(table("transformer", "One training step"))}  # the first of each name
    panels = {
        title: [(label, number(rows[way][column])) for way, label in WAYS.items()]
        for title, column in (
            ("optimizer state, MB", "state MB"),
            ("a step, GFLOP", "GFLOP"),
            ("temporary memory, MB", "MB temporary"),
        )
    }
    [once] = [row for row in table("precompute", "A decoder of 8 layers") if row[""] == "fz.precompute"]
    panels["a step, GFLOP"].append(("fz.precompute", number(once["GFLOP"])))
    return panels


def epochs() -> dict[str, list[tuple[str, float]]]:
    """Seconds of an epoch after the first, on a CPU."""
    rows = [row for row in table("precompute", "An epoch after the first") if row["fz.freeze, s"]]
    names = ("ViT, head", None, "ViT, last block", "ResNet, head", "ResNet, last block")
    chosen = [(name, row) for name, row in zip(names, rows, strict=True) if name]
    return {name: [(way, number(row[f"{way}, s"])) for way in ("fz.freeze", "fz.precompute")] for name, row in chosen}


def bars(axes: Axes, values: list[tuple[str, float]], texts: list[str] | None = None, line: float = 0.0) -> None:
    """Horizontal bars, the first on top. A label that would stand on a dashed line stands behind it."""
    names, lengths = zip(*values, strict=True)
    axes.barh(range(len(names)), lengths, color=[COLORS.get(name, OTHER) for name in names])
    texts = texts or [f"{length:.4g}" if length >= 1 else f"{length:.2g}" for length in lengths]
    for i, (length, text) in enumerate(zip(lengths, texts, strict=True)):
        start = line if length < line < length + 0.2 * max(lengths) else length
        axes.annotate(text, (start, i), (4, 0), textcoords="offset points", va="center")
    if line:
        axes.axvline(line, color="#b2182b", linestyle="--")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.45)


def draw_memory() -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (title, (name, of, chips, fits)) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        values = memory(name, f"{of}, GiB per chip", chips)
        texts = [f"{'over ' if alone else ''}{gib:.1f}" for gib, alone in values.values()]
        bars(axes, [(tool, gib) for tool, (gib, _) in values.items()], texts, line=fits)
        axes.set_title(f"{title}", fontsize="medium")
    figure.suptitle("Last block, norm and head trainable: GiB per chip. Dashed: what a chip has")
    return figure


def draw_costs() -> Figure:
    figure = Figure(figsize=(11, 6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12)
    upper, lower = figure.subfigures(2, 1, height_ratios=(3, 2))
    for axes, (title, values) in zip(upper.subplots(1, 3), costs().items(), strict=True):
        bars(axes, values)
        axes.set_title(title, fontsize="medium")
    for axes, (title, values) in zip(lower.subplots(1, 4), epochs().items(), strict=True):
        bars(axes, values)
        axes.set_title(title, fontsize="medium")
    upper.suptitle("Last block and head of a decoder of 8 layers")
    lower.suptitle("Seconds of an epoch after the first, on a CPU: ViT-tiny, ResNet-18")
    return figure


PICTURES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "memory_bars": (draw_memory, ("scale", "scale_gpu")),
    "cost_bars": (draw_costs, ("transformer", "precompute")),
}


def digest(names: tuple[str, ...]) -> str:
    """Of the results that a picture is drawn from."""
    return hashlib.sha256(b"".join((RESULTS / f"{name}.json").read_bytes() for name in names)).hexdigest()


if __name__ == "__main__":
    for picture, (draw, names) in PICTURES.items():
        draw().savefig(STATIC / f"{picture}.png", dpi=110, metadata={"Source": digest(names), "Software": None})
