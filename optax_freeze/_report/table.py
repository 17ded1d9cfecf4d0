"""Rows about leaves, and how they are shown: like ones fold, and what is left becomes text, a rich table or HTML.

A table of every leaf, as ``flax.linen.tabulate`` prints it, has some 700 lines for a model of 80 layers. Here siblings
whose names differ in one number alone and that hold the same are one line, so that a model that repeats its layers
reads on one screen, and what is frozen of them is seen at a glance.
"""

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from optax_freeze._errors import printable


class Row(NamedTuple):
    """One leaf, or several summed up; ``shape`` and ``dtype`` are None for what is no array, and where they differ."""

    path: str
    shape: tuple[int, ...] | None
    dtype: Any
    elements: int
    frozen_elements: int
    bytes: int
    frozen_bytes: int
    leaves: int = 1


class Line(NamedTuple):
    """Of a table: so many rows that are alike but for a number in their paths, and one of them."""

    path: str
    times: int
    row: Row


class Table(NamedTuple):
    """What every rendering shows: cells, and sentences below them."""

    header: tuple[str, ...]
    cells: list[tuple[str, ...]]
    totals: list[str]


NUMBERS = ("elements", "bytes")
"""The columns that stand to the right."""


def summed(rows: Iterable[Row], depth: int) -> list[Row]:
    """One row for each prefix of so many segments; what is not below that depth stays as it is."""
    below: dict[str, list[Row]] = {}
    for row in rows:
        below.setdefault("/".join(row.path.split("/")[:depth]), []).append(row)
    return [group[0] if group[0].path == path else _sum(path, group) for path, group in below.items()]


def _sum(path: str, rows: Sequence[Row]) -> Row:
    dtypes = {row.dtype for row in rows}
    totals = map(sum, zip(*(row[3:] for row in rows), strict=True))
    return Row(path, None, dtypes.pop() if len(dtypes) == 1 else None, *totals)


def nested(rows: Iterable[Row]) -> dict[str | None, Any]:
    """Rows by the segments of their paths; a row stands at the key None."""
    root: dict[str | None, Any] = {}
    for row in rows:
        node = root
        for segment in row.path.split("/"):
            node = node.setdefault(segment, {})
        node[None] = row
    return root


def fold(rows: Iterable[Row]) -> list[Line]:
    """Rows as lines: siblings whose names differ in one number, and that hold the same, are one."""
    root = nested(rows)
    kinds: dict[Any, int] = {}
    kind_of: dict[int, int] = {}

    def classify(node: dict[str | None, Any]) -> int:
        held = tuple((name, child[1:] if name is None else classify(child)) for name, child in node.items())
        return kind_of.setdefault(id(node), kinds.setdefault(held, len(kinds)))

    classify(root)
    return [Line("/".join(path), times, row) for path, times, row in _lines(root, kind_of)]


def _lines(node: dict[str | None, Any], kind_of: dict[int, int]) -> Iterator[tuple[list[str], int, Row]]:
    if None in node:
        yield [], 1, node[None]
    for names in _alike({name: kind_of[id(child)] for name, child in node.items() if name is not None}):
        for path, times, row in _lines(node[names[0]], kind_of):
            yield [_label(names), *path], times * len(names), row


_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,18}(?![0-9])")


def _alike(kinds: dict[str, int]) -> list[list[str]]:
    """Names of siblings in groups of one kind that differ in one number, by which each group is ordered."""
    spots: dict[str, list[tuple[Any, ...]]] = {}
    for name, kind in kinds.items():
        spots[name] = [(kind, name[: m.start()], name[m.end() :]) for m in _NUMBER.finditer(name)] or [(name,)]
    sizes: dict[Any, int] = {}
    for spot in (spot for found in spots.values() for spot in found):
        sizes[spot] = sizes.get(spot, 0) + 1
    groups: dict[Any, list[str]] = {}
    for name, found in spots.items():  # of several numbers the one that most names share, the last of equals
        groups.setdefault(max(reversed(found), key=sizes.__getitem__), []).append(name)
    return [sorted(names, key=natural) for names in groups.values()]


def natural(name: str) -> list[Any]:
    """A key by which names sort with their numbers as numbers: ``layer_2`` before ``layer_10``."""
    return [(int(piece), piece) if i % 2 else piece for i, piece in enumerate(_pieces(name))]


def _pieces(name: str) -> list[str]:
    return re.split(f"({_NUMBER.pattern})", name)


def _label(names: Sequence[str]) -> str:
    """``layer_0 … layer_31`` for these names; ``layers.{0 … 31}.kernel`` where something follows the number."""
    if len(names) == 1:
        return names[0]
    pieces = [_pieces(name) for name in names]
    spot = next(i for i, (a, b) in enumerate(zip(pieces[0], pieces[1], strict=True)) if a != b)
    head, tail = "".join(pieces[0][:spot]), "".join(pieces[0][spot + 1 :])
    runs: list[list[str]] = []
    for number in (piece[spot] for piece in pieces):
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    ranges = [" … ".join(number if tail else head + number for number in run) for run in runs]
    if len(ranges) > _FEW:
        ranges = [*ranges[: _FEW - 1], "…", ranges[-1]]
    return f"{head}{{{', '.join(ranges)}}}{tail}" if tail else ", ".join(ranges)


_FEW = 4
"""So many ranges of numbers are spelled out."""


def table(rows: Iterable[Row], totals: list[str]) -> Table:
    """What to show of rows, like ones folded."""
    header = ("path", "shape", "dtype", "elements", "bytes", "")
    return Table(header, [tuple(map(printable, _cells(*line))) for line in fold(rows)], totals)


def _cells(path: str, times: int, row: Row) -> tuple[str, ...]:
    shape = row.shape
    if shape is None:
        some = "1 leaf" if row.leaves == 1 else f"{row.leaves} leaves"
        shape = "no array" if row.dtype is None and row.leaves == 1 else some
    return (
        path or "(the root)",
        f"{times} × {shape}" if times > 1 else str(shape),
        "" if row.dtype is None else str(row.dtype),
        f"{times * row.elements:,}",
        size(times * row.bytes),
        _status(times * row.elements, times * row.frozen_elements),
    )


def _status(elements: int, frozen: int) -> str:
    if frozen == elements:
        return "frozen" if elements else ""
    return f"{elements - frozen:,} train ({share(elements - frozen, elements)})" if frozen else "trains"


def share(part: int, whole: int) -> str:
    """A percentage that is 0 % for nothing and 100 % for everything alone."""
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 0.01:
        return "< 0.01 %"
    if percent > 99.99 and part < whole:
        return "> 99.99 %"
    return f"{percent:.4g} %"


def size(count: int) -> str:
    """Bytes in the largest binary unit of which there is one at least."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 6)
    return f"{count / 1024**power:,.1f} {'KMGTPE'[power - 1]}iB"


def as_text(table: Table) -> str:
    """Plain text, as wide as it needs to be whatever the terminal: for logs."""
    lines = [table.header, *table.cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    just = [str.rjust if name in NUMBERS else str.ljust for name in table.header]
    body = [
        "  ".join(pad(cell, width) for pad, cell, width in zip(just, line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([*body, "", *table.totals])


def as_rich(table: Table) -> Any:
    """A rich table, whose paths wrap in a narrow terminal rather than be cut."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for name in table.header:
        right = name in NUMBERS
        shown.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for line in table.cells:
        shown.add_row(*map(Text, line), style="dim" if line[-1] == "frozen" else "bold")
    return Group(shown, Text(), *map(Text, table.totals))


def as_html(table: Table) -> str:
    """An HTML table, escaped: for notebooks."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.header)
    body = "\n".join(f"<tr>{''.join(map(_html_cell, table.header, line))}</tr>" for line in table.cells)
    totals = "<br>".join(map(html.escape, table.totals))
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n<p>{totals}</p>"


def _html_cell(name: str, cell: str) -> str:
    return f'<td style="text-align: {"right" if name in NUMBERS else "left"}">{html.escape(cell)}</td>'
