"""Path patterns as regular expressions, and what to say when one matches nothing."""

import contextlib
import difflib
import re
from collections.abc import Sequence

from optax_freeze._errors import value_error


def regex(pattern: str) -> re.Pattern[str]:
    """A regular expression, to be matched against a whole path."""
    expected, fix = "an expression that `re.compile` takes", "for globs such as 'encoder/*', use fz.path(...)"
    return _compile(pattern, "no regular expression", f"fz.regex({pattern!r})", expected, fix)


def glob(pattern: str) -> re.Pattern[str]:
    """A glob on ``/``-separated segments; what it matches may go on with a ``/``."""
    segments = pattern.split("/")
    while segments[-1] == "**" and len(segments) > 1:
        segments.pop()
    if segments == ["**"]:
        return re.compile(".*", re.DOTALL)
    translated = ["(?:[^/]*/)*" if segment == "**" else _segment(segment, pattern) + "/" for segment in segments[:-1]]
    _refuse_numbers(pattern)
    whole = "".join(translated) + _segment(segments[-1], pattern) + "(?:/.*)?"
    return _compile(whole, "no pattern", f"fz.path({pattern!r})", "a glob", "write ranges in ascending order: [0-7]")


def _compile(expression: str, what: str, at: str, expected: str, fix: str) -> re.Pattern[str]:
    """An expression in which ``.`` is any character: a key may hold a line break."""
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        raise value_error(what, at=at, got=error.msg, expected=expected, fix=fix) from error


def _segment(segment: str, pattern: str) -> str:
    if "**" in re.sub(r"\[[^]]*\]", "", segment):
        raise value_error(
            "'**' stands for whole segments",
            at=f"fz.path({pattern!r})",
            got=repr(segment),
            expected="'**' between slashes, or '*' within a segment",
            fix=f"write {segment.replace('**', '*')!r}: a pattern matches everything below its match anyway",
        )
    out, i = "", 0
    while i < len(segment):
        char, i = segment[i], i + 1
        end = segment.find("]", i + (segment[i : i + 1] == "!") + 1) if char == "[" else -1
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif end > 0:
            chars, i = segment[i:end], end + 1
            negated = chars.startswith("!")
            body = re.sub(r"([\\\[\]^&~|])", r"\\\1", chars[negated:]).replace("--", r"-\-")
            out += f"(?!/)[{'^' if negated else ''}{body}]"
        else:
            out += re.escape(char)
    return out


_NUMBERS = re.compile(r"\[(!?)(\d+(?:-\d+)?(?:, *\d+(?:-\d+)?)*)\]")


def _refuse_numbers(pattern: str) -> None:
    """A ``ValueError`` for numbers in brackets, which stand for one character: ``layer_[0-11]``."""
    found = _first_numbers(pattern)
    if found is None:
        return
    fix = "fz.where(lambda path, leaf: ...), which can read the number off the path"
    raise value_error(
        "brackets stand for one character, and not for a number",
        at=f"fz.path({pattern!r})",
        got=f"{found[0]}, a class of characters",
        expected="a class of single digits, such as [0-7]",
        fix=fix if found[1] else f"for these numbers {_spelled(pattern)}, or fz.regex(...)",
    )


def _first_numbers(pattern: str) -> re.Match[str] | None:
    """The first brackets that hold a range or a list with a number of several digits, in ascending order."""
    for found in _NUMBERS.finditer(pattern):
        ranges = [numbers.partition("-") for numbers in found[2].split(",")]
        several = any(len(low.strip()) > 1 or len(high) > 1 for low, _, high in ranges)
        is_list = len(ranges) > 1 or bool(ranges[0][1])
        if several and is_list and all(not high or int(low) < int(high) for low, _, high in ranges):
            return found
    return None


def _spelled(pattern: str) -> list[str]:
    """Globs for what a pattern with numbers in brackets was meant to match."""
    found = _first_numbers(pattern)
    if found is None:
        return [pattern]
    ranges = [numbers.strip().partition("-") for numbers in found[2].split(",")]
    globs = [glob for low, _, high in ranges for glob in _numbers(low, high or low)]
    return [whole for glob in globs for whole in _spelled(pattern[: found.start()] + glob + pattern[found.end() :])]


def _numbers(low: str, high: str) -> list[str]:
    """Globs for the numbers between two, both of them too."""
    globs = []
    for n in range(len(low), len(high) + 1):
        globs += _same_length(low if n == len(low) else "1" + "0" * (n - 1), high if n == len(high) else "9" * n)
    return globs


def _same_length(low: str, high: str) -> list[str]:
    if low == high:
        return [low]
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if first == last:
        return [low[0] + glob for glob in _same_length(low[1:], high[1:])]
    head, tail = [], []
    if rest and low[1:] != "0" * rest:
        head, first = [low[0] + glob for glob in _same_length(low[1:], "9" * rest)], first + 1
    if rest and high[1:] != "9" * rest:
        tail, last = [high[0] + glob for glob in _same_length("0" * rest, high[1:])], last - 1
    digits = {0: f"{first}", 1: f"[{first}{last}]"}.get(last - first, f"[{first}-{last}]")
    return [*head, *([digits + "[0-9]" * rest] if first <= last else []), *tail]


def no_match(pattern: str, paths: Sequence[str], *, is_regex: bool) -> ValueError:
    """The error for a pattern that matches none of ``paths``: it names the nearest."""
    above = {"/".join(p.split("/")[:n]) for p in paths for n in range(1, p.count("/") + 2)}
    near = difflib.get_close_matches(pattern.rstrip("/*"), sorted(above), n=3, cutoff=0.5)
    if paths == [""]:
        return value_error(
            f"the pattern {pattern!r} matches no leaf",
            at=repr(pattern),
            got="one leaf without a path, and no tree",
            expected="a tree of parameters",
            fix="look at the order of the arguments; where the parameters are not the first of a loss, give argnums",
        )
    hint = "; a regex has to match the whole path: '.*/kernel'" if is_regex else ""
    meant = None if is_regex else _meant(pattern, paths)
    return value_error(
        f"the pattern {pattern!r} matches no leaf",
        at=repr(pattern),
        got=f"0 of {len(paths)} leaves",
        expected="at least one",
        fix=meant or f"nearest paths: {', '.join(near or paths[:3]) or 'none'}{hint}",
    )


def _meant(pattern: str, paths: Sequence[str]) -> str | None:
    """What to write for a glob that was meant literally or as a regular expression, if that matches a leaf."""
    literal = pattern.replace("[", "[[]")
    if literal != pattern and any(map(glob(literal).fullmatch, paths)):
        return f"brackets stand for one of the characters in them; for a bracket itself write {literal!r}"
    if re.search(r"\.[*+?]|[\\|()^$+{]", pattern):
        for expression in (pattern, f"{pattern}/.*"):
            with contextlib.suppress(re.error):
                if any(re.fullmatch(expression, path, re.DOTALL) for path in paths):
                    return f"for a regular expression write fz.regex({expression!r})"
    return None
