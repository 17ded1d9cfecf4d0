"""Other names for leaves: a path, or the beginning of paths, in place of another."""

from collections.abc import Mapping, Sequence
from typing import Any

from optax_freeze._errors import counted, described, refuse_no_mapping, type_error, value_error
from optax_freeze._spec.patterns import nearest
from optax_freeze._spec.prefix_tree import is_above


def renamed(
    paths: Sequence[str],
    rename: Mapping[str, str] | None,
    known: Sequence[str] | None = None,
    *,
    of: str = "pretrained",
) -> list[str]:
    """Other names for the leaves of the argument ``of``; the longest name applies.

    They are paths in the parameters, whose paths are ``known``; or if None, names in a file, with dots for slashes.
    Leaves of a checkpoint have different paths then; in a state, a name may lead to the path of a leaf that is dropped,
    and any name fits a state that holds nothing of any leaf, as that of plain SGD.
    """
    separator = "." if known is None else "/"
    names = _checked(rename, of, "name in the file" if known is None else "path in params")
    longest = [next((name for name in names if is_above(name, path)), None) for path in paths]
    new = [
        path.replace("/", separator) if name is None else _joined(names[name], path[len(name) :], separator)
        for path, name in zip(paths, longest, strict=True)
    ]
    for name, target in names.items() if paths or of != "state" else ():
        of_name = [path for path in paths if is_above(name, path)]
        results = [path for path, other in zip(new, longest, strict=True) if other == name]
        if not results:
            what = f"rename: {name!r} matches no leaf of `{of}`"
            got, fix = f"0 of {counted(len(paths), 'leaf', 'leaves')}", f"nearest paths: {nearest(name, paths)}"
            if of_name:
                what = f"rename: {name!r} never applies: longer names match all its leaves"
                got, fix = f"{counted(len(of_name), 'leaf', 'leaves')} with longer names", "delete this name"
            expected = f"a path of `{of}`, or the beginning of paths, without wildcards"
            raise value_error(what, at=name, got=got, expected=expected, fix=fix)
        if known is not None and not set(results) & set(known):
            what, got = f"rename: {name!r} leads to no leaf of `params`", f"{target!r}: {results[0]}"
            expected, fix = "paths of `params`", f"nearest paths: {nearest(target, known)}"
            raise value_error(what, at=name, got=got, expected=expected, fix=fix)
    first: dict[str, str] = {}
    for path, target, name in zip(paths, new, longest, strict=True):
        is_given = known is not None and (of == "pretrained" or name is not None)
        if is_given and first.setdefault(target, path) != path:
            what, got = f"rename: two leaves of `{of}` lead to one path", f"{first[target]} and {path}"
            expected, fix = "one leaf for each path", "rename only one of them"
            fix += ", or delete the other from `pretrained`" * (of == "pretrained")
            raise value_error(what, at=target, got=got, expected=expected, fix=fix)
    return new


def _checked(rename: Mapping[str, str] | None, of: str, to: str) -> dict[str, str]:
    """The names, the longest first."""
    if rename is None:
        return {}
    expected, fix = f"{{path in {of}: {to}}}", 'rename={"backbone": "encoder"}'
    refuse_no_mapping("rename", rename, expected, at="rename", fix=fix)
    for each in (*rename, *rename.values()):
        if not isinstance(each, str):
            what, got = "rename takes paths as strings", described(each)
            raise type_error(what, at="rename", got=got, expected=expected, fix=fix)
    return {name: rename[name] for name in sorted(rename, key=len, reverse=True)}


def _joined(target: str, rest: str, separator: str) -> str:
    rest = rest.lstrip("/").replace("/", separator)
    return f"{target}{separator}{rest}".strip(separator) if rest else target


def suggested(unplaced: Mapping[str, Any], free: Mapping[str, Any]) -> dict[str, str] | None:
    """A name that leads most ``unplaced`` leaves to ``free`` ones with as many axes; both give axes by path."""
    by_end: dict[Any, list[str]] = {}
    for path, shape in free.items():
        by_end.setdefault((path.split("/")[-1], shape), []).append(path)
    votes: dict[tuple[str, str], int] = {}
    for path, shape in unplaced.items():
        here = path.split("/")
        for other in by_end.get((here[-1], shape), []):
            there = other.split("/")
            same = next((n for n, (a, b) in enumerate(zip(here[::-1], there[::-1], strict=False)) if a != b), None)
            same = min(len(here), len(there)) if same is None else same
            pair = "/".join(here[: len(here) - same]), "/".join(there[: len(there) - same])
            votes[pair] = votes.get(pair, 0) + 1
    [name, target] = max(votes, key=votes.__getitem__, default=("", ""))
    return {name: target} if votes and 2 * votes[name, target] >= len(unplaced) else None
