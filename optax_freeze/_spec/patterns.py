"""Path patterns as regular expressions, and the error for a pattern that matches nothing."""

import contextlib
import difflib
import re
from collections.abc import Callable, Sequence

from optax_freeze._errors import listed, value_error

_CLASS = r"\[!?+[^/][^]/]*\]"  # `[]]` and `[!]]` are closed by the second bracket, and `[]` is not a class
_TOKEN = re.compile(rf"(?<![^/])\*\*/|\A\*\*\Z|{_CLASS}|.", re.DOTALL)
_WILDCARDS = {"**": ".*", "**/": "(?:[^/]*/)*", "*": "[^/]*", "?": "[^/]"}
_NUMBERS = re.compile(r"\[(!?)(\d+(?:-\d+)?(?:, *\d+(?:-\d+)?)*)\]")


def regex(pattern: str) -> re.Pattern[str]:
    """A regular expression, to be matched against a whole path."""
    expected, fix = "an expression that `re.compile` takes", "for globs such as 'encoder/*', use fz.path(...)"
    return _compile(pattern, "not a regular expression", f"fz.regex({pattern!r})", expected, fix)


def glob(pattern: str) -> re.Pattern[str]:
    """A glob on ``/``-separated segments as a regular expression, which matches everything below a match, too."""
    _refuse_stars_within_a_segment(pattern)
    _refuse_numbers(pattern)
    translated = _TOKEN.sub(_translate, re.sub(r"(/\*\*)+\Z", "", pattern))
    fix = "write ranges in ascending order: [0-7]"
    return _compile(f"{translated}(?:/.*)?", "not a valid pattern", f"fz.path({pattern!r})", "a glob", fix)


def _translate(token: re.Match[str]) -> str:
    text = token[0]
    if text in _WILDCARDS:
        return _WILDCARDS[text]
    if len(text) == 1:
        return re.escape(text)
    negated = text[1] == "!"
    characters = re.sub(r"([\\\[\]^&~|])", r"\\\1", text[1 + negated : -1]).replace("--", r"-\-")
    return f"(?!/)[{'^' * negated}{characters}]"


def _compile(expression: str, what: str, at: str, expected: str, fix: str) -> re.Pattern[str]:
    """An expression in which ``.`` is any character: a key may hold a line break."""
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        raise value_error(what, at=at, got=error.msg, expected=expected, fix=fix) from error


def _refuse_stars_within_a_segment(pattern: str) -> None:
    for segment in pattern.split("/"):
        if segment != "**" and "**" in re.sub(_CLASS, "", segment):
            at, expected = f"fz.path({pattern!r})", "'**' between slashes, or '*' within a segment"
            written = "/".join(part if part == "**" else re.sub(r"\*+", "*", part) for part in pattern.split("/"))
            fix = f"write {written!r}: a pattern matches everything below its match anyway"
            raise value_error("'**' stands for whole segments", at=at, got=repr(segment), expected=expected, fix=fix)


def _refuse_numbers(pattern: str) -> None:
    """A ``ValueError`` for numbers of several digits in brackets, which stand for one character: ``layer_[0-11]``."""
    text, loops, found = pattern.replace("{", "{{").replace("}", "}}"), "", []
    for brackets in _NUMBERS.finditer(pattern):
        ranges = re.findall(r"(\d+)-?(\d*)", brackets[2])
        one_digit = all(len(low) == 1 and len(high) <= 1 for low, high in ranges)
        descending = any(high and int(low) >= int(high) for low, high in ranges)
        if one_digit or descending or brackets[2].isdigit():
            continue
        name = "ijklmnopqrstuvwxyz"[len(found)]
        width = max(len(low) if low[0] == "0" else 0 for low, _ in ranges)
        numbers = [f"range({int(low)}, {int(high) + 1})" if high else f"{int(low)}" for low, high in ranges]
        every = numbers[0] if len(numbers) == 1 else f"[{', '.join('*' * (n[0] == 'r') + n for n in numbers)}]"
        text = text.replace(brackets[0], f"{{{name}:0{width}}}" if width > 1 else f"{{{name}}}", 1)
        loops += f" for {name} in {every}"
        found.append(brackets)
    if found:
        fix = f"for these numbers use fz.path(*[f{text!r}{loops}]), or fz.regex(...)"
        if any(brackets[1] for brackets in found):
            fix = "fz.where(lambda path, leaf: ...), which can read the number off the path"
        what, at = "brackets match one character, not a number", f"fz.path({pattern!r})"
        got, expected = f"{found[0][0]}, a class of characters", "a class of single digits, such as [0-7]"
        raise value_error(what, at=at, got=got, expected=expected, fix=fix)


def no_match(pattern: str, paths: Sequence[str], *, is_regex: bool) -> ValueError:
    """The error for a pattern that matches none of ``paths``: it names the nearest."""
    got, expected = f"0 of {len(paths)} leaves", "at least one"
    if paths == [""]:
        got, expected = "a single leaf, not a tree", "a tree of parameters"
        fix = "check the order of the arguments; if the parameters are not the first argument of the loss, pass argnums"
    elif is_regex:
        fix = _meant_by_regex(pattern, paths)
    else:
        fix = _meant(pattern, paths) or f"nearest paths: {nearest(pattern, paths, literal)}"
    what = f"the pattern {pattern!r} matches no leaf"
    return value_error(what, at=repr(pattern), got=got, expected=expected, fix=fix)


def nearest(pattern: str, paths: Sequence[str], written: Callable[[str], str] = str) -> str:
    """The nearest paths, and paths above them, each as it is to be written."""
    above = {"/".join(p.split("/")[:n]) for p in paths for n in range(1, p.count("/") + 2)}
    near = difflib.get_close_matches(pattern.rstrip("/*"), sorted(above), n=3, cutoff=0.5)
    return ", ".join(map(written, near or paths[:3])) or "none"


def literal(path: str) -> str:
    """A glob that matches this path."""
    return re.sub(r"[\[?]|\*", r"[\g<0>]", path)


def _meant(pattern: str, paths: Sequence[str]) -> str | None:
    """What to write for a glob that matches a leaf literally, at any depth, in another case or as an expression."""
    escaped = pattern.replace("[", "[[]")
    if escaped != pattern and _matches(glob(escaped).pattern, paths):
        return f"brackets match one of the characters in them; for a literal bracket write {escaped!r}"
    at_any_depth = f"**/{pattern}"
    if pattern and _matches(glob(at_any_depth).pattern, paths):
        return f"a pattern begins at the root; at any depth write {at_any_depth!r}"
    for each in (pattern, at_any_depth) if pattern else ():
        if found := _matches(f"(?i:{glob(each).pattern})", paths):
            tops = dict.fromkeys(_top(path, re.compile(f"(?is:{glob(each).pattern})")) for path in found)
            return f"case differs: {listed(map(literal, tops))}"
    if re.search(r"\.[*+?]|[\\|()^$+{]", pattern):
        for expression in (pattern, f"{pattern}/.*"):
            if _matches(expression, paths):
                return f"for a regular expression write fz.regex({expression!r})"
    return None


def _meant_by_regex(pattern: str, paths: Sequence[str]) -> str:
    """What to write for an expression that matches no whole path."""
    with contextlib.suppress(ValueError):
        if re.search(r"[*?]", pattern) and _matches(glob(pattern).pattern, paths):
            return f"for a glob write fz.path({pattern!r})"
    for expression in (f".*/{pattern}", f"{pattern}/.*", f".*/{pattern}/.*", f".*(?:{pattern}).*"):
        if _matches(expression, paths):
            near = ", ".join(difflib.get_close_matches(pattern, paths, n=3, cutoff=0.5)) or paths[0]
            return f"nearest paths: {near}; a regex must match the whole path: {expression!r}"
    for expression in (f"(?i){pattern}", f"(?i).*(?:{pattern}).*"):
        if found := _matches(expression, paths):
            return f"case differs: {listed(found)}; ignore it by {expression!r}"
    near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.5) or paths[:3]
    return f"nearest paths: {', '.join(path if _matches(path, [path]) else re.escape(path) for path in near)}"


def _matches(expression: str, paths: Sequence[str]) -> list[str]:
    """The paths that an expression matches; none if it is not one."""
    with contextlib.suppress(re.error):
        matches = re.compile(expression, re.DOTALL).fullmatch
        return [path for path in paths if matches(path)]
    return []


def _top(path: str, expression: re.Pattern[str]) -> str:
    """The shortest beginning of a path, in whole segments, that an expression matches."""
    segments = path.split("/")
    return next(top for n in range(1, len(segments) + 1) if expression.fullmatch(top := "/".join(segments[:n])))
