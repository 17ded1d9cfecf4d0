"""Rows about leaves, which fold into lines of text, a rich table or HTML."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from optax_freeze._errors import counted, printable
from optax_freeze._spec.folded_paths import Line, fold


class Row(NamedTuple):
    """One row of a summary: one leaf, or the sum of several.

    Attributes:
      path: the path of the leaf, or the one that several leaves begin with.
      shape, dtype: None for objects, and where leaves differ.
      elements, frozen_elements: how many there are.
      bytes, frozen_bytes: their size.
      leaves: the number of leaves.
      host_bytes: the size of what is in host memory.
      trainable_rows: of a leaf that trains by rows, which ones and of which axis.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: Any
    elements: int
    frozen_elements: int
    bytes: int
    frozen_bytes: int
    leaves: int = 1
    host_bytes: int = 0
    trainable_rows: str = ""


HEADER = {"path": "left", "shape": "left", "dtype": "left", "elements": "right", "bytes": "right", "": "left"}
"""The columns of leaves and their alignment."""


class Table(NamedTuple):
    """What every rendering shows: cells, sentences below them, and columns with their alignment.

    A line whose last cell begins with the word ``dim`` is dim in a terminal.
    """

    cells: list[tuple[str, ...]]
    totals: list[str]
    header: Mapping[str, str] = HEADER
    dim: str = "frozen"


def prefix(path: str, depth: int | None) -> str:
    """The first segments of a path; None for all of them."""
    return "/".join(path.split("/")[:depth])


def summed(rows: Iterable[Row], depth: int | None) -> list[Row]:
    """One row for each prefix of ``depth`` segments."""
    if depth is None:
        return list(rows)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(prefix(row.path, depth), []).append(row)
    return [group[0] if group[0].path == path else _sum(path, group) for path, group in groups.items()]


def _sum(path: str, rows: Sequence[Row]) -> Row:
    dtypes = {row.dtype for row in rows}
    totals = map(sum, zip(*(row[3:-1] for row in rows), strict=True))
    return Row._make([path, None, dtypes.pop() if len(dtypes) == 1 else None, *totals, ""])


def table(rows: Iterable[Row], totals: list[str]) -> Table:
    lines = fold((row.path, row._replace(path="")) for row in rows)
    return Table([tuple(map(printable, _cells(line))) for line in lines], totals)


def _cells(line: Line) -> tuple[str, ...]:
    path, times, row = line.path, line.times, line.content
    shape: Any = row.shape
    if shape is None:
        shape = "no array" if row.dtype is None and row.leaves == 1 else counted(row.leaves, "leaf", "leaves")
    elements, frozen = times * row.elements, times * row.frozen_elements
    nbytes, on_host = times * row.bytes, times * row.host_bytes
    status = "frozen" if frozen == elements else "trains"
    if 0 < frozen < elements:
        status = f"{elements - frozen:,} train ({share(elements - frozen, elements)})"
        status += f": {row.trainable_rows}" * bool(row.trainable_rows)
    if on_host:
        status += ", on the host" if on_host == nbytes else f", {size(on_host)} on the host"
    return (
        "/".join(path) or "(the root)",
        f"{times} × {shape}" if times > 1 else str(shape),
        "" if row.dtype is None else str(row.dtype),
        f"{elements:,}",
        size(nbytes),
        status if elements else "",
    )


def share(part: int, total: int) -> str:
    """A percentage; only nothing is 0 %, and only everything 100 %."""
    percent = 100 * part / total if total else 0.0
    if 0 < percent < 0.01:
        return "< 0.01 %"
    if percent > 99.99 and part < total:
        return "> 99.99 %"
    return f"{percent:.4g} %"


def unit(count: int) -> tuple[int, str]:
    """The largest binary unit of bytes that is not larger than ``count``, and its name."""
    power = min(max(count.bit_length() - 1, 0) // 10, 6)
    return 1024**power, f"{'KMGTPE'[power - 1]}iB" if power else "B"


def size(count: int, digits: int = 1) -> str:
    """Bytes in the largest binary unit."""
    one, name = unit(count)
    return f"{count} B" if one == 1 else f"{count / one:,.{digits}f} {name}"


def count(number: int) -> str:
    """A number in the largest decimal unit."""
    power = min((len(str(number)) - 1) // 3, 6)
    return f"{number / 1000**power:,.2f} {'kMGTPE'[power - 1]}" if power else str(number)


class Report:
    """What prints as a table: plain text, for rich, and in a notebook."""

    def _table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(table.header, *table.cells, strict=True)]
        lines = []
        for line in (table.header, ["-" * width for width in widths], *table.cells):
            cells = zip(line, widths, table.header.values(), strict=True)
            lines.append("  ".join(f"{cell:{'<>'[side == 'right']}{width}}" for cell, width, side in cells).rstrip())
        return "\n".join([*lines, "", *table.totals])

    __repr__ = __str__

    def __rich__(self) -> Any:
        """A rich table, whose paths wrap in a narrow terminal instead of being cut."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = self._table()
        shown = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for name, side in table.header.items():
            shown.add_column(name, justify=side, no_wrap=side == "right", overflow="fold")  # pyright: ignore[reportArgumentType]
        for line in table.cells:
            shown.add_row(*map(Text, line), style="dim" if line[-1].split(",")[0] == table.dim else "bold")
        return Group(shown, Text(), *map(Text, table.totals))

    def _repr_html_(self) -> str:
        table = self._table()
        head = "".join(f"<th>{name}</th>" for name in table.header)
        styles = [f'<td style="text-align: {side}">' for side in table.header.values()]
        rows = [map("{}{}</td>".format, styles, map(html.escape, line)) for line in table.cells]
        body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
        totals = "<br>".join(map(html.escape, table.totals))
        return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n<p>{totals}</p>"
