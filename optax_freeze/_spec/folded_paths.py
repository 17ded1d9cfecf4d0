"""Paths that differ in a number, and have equal contents, fold into one line: ``layer_0 … layer_31/kernel``."""

import collections
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Line(NamedTuple):
    """The segments of a path, how many paths differ from it in their numbers alone, and the content of each."""

    path: tuple[str, ...]
    times: int
    content: Any


def fold(contents: Iterable[tuple[str, Any]]) -> list[Line]:
    """Pairs of a path and a content as lines."""
    root: dict[str | None, Any] = {}
    for path, content in contents:
        node = root
        for segment in path.split("/"):
            node = node.setdefault(segment, {})
        node[None] = content
    return _lines(root)


def _lines(node: dict[str | None, Any]) -> list[Line]:
    lines = [Line((), 1, node[None])] if None in node else []
    if len(node) == len(lines):
        return lines
    children = {name: tuple(_lines(child)) for name, child in node.items() if name is not None}
    for names in _alike(children):
        for path, times, content in children[names[0]]:
            lines.append(Line((_label(names), *path), times * len(names), content))
    return lines


_NUMBER = re.compile(r"(?<![0-9])([0-9]{1,18})(?![0-9])")


def _alike(contents: dict[str, Any]) -> list[list[str]]:
    """Names of siblings in groups of equal contents that differ in one number, by which each group is ordered."""
    if not any(map(_NUMBER.search, contents)):
        return [[name] for name in contents]
    patterns: dict[str, list[tuple[Any, ...]]] = {
        name: [(content, name[: m.start()], name[m.end() :]) for m in _NUMBER.finditer(name)] or [(name,)]
        for name, content in contents.items()
    }
    sizes = collections.Counter(pattern for found in patterns.values() for pattern in found)
    groups: dict[Any, list[str]] = {}
    for name, found in patterns.items():  # of several numbers the one that most names share, the last of equals
        groups.setdefault(max(reversed(found), key=sizes.__getitem__), []).append(name)
    return [sorted(names, key=_natural) for names in groups.values()]


def _natural(name: str) -> list[Any]:
    """A key by which ``layer_2`` is before ``layer_10``."""
    return [(int(piece), piece) if i % 2 else piece for i, piece in enumerate(_NUMBER.split(name))]


def _label(names: Sequence[str]) -> str:
    """``layer_0 … layer_31`` for these names; ``layers.{0 … 31}.kernel`` where something follows the number."""
    if len(names) == 1:
        return names[0]
    pieces = list(map(_NUMBER.split, names))
    spot = next(i for i, (a, b) in enumerate(zip(pieces[0], pieces[1], strict=True)) if a != b)
    head, tail = "".join(pieces[0][:spot]), "".join(pieces[0][spot + 1 :])
    runs: list[list[str]] = []
    for number in (piece[spot] for piece in pieces):
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    ranges = [" … ".join(number if tail else head + number for number in run) for run in runs]
    if len(ranges) > 4:
        ranges = [*ranges[:3], "…", ranges[-1]]
    return f"{head}{{{', '.join(ranges)}}}{tail}" if tail else ", ".join(ranges)
