"""Path patterns as regular expressions, and what to say when one matches nothing."""

import difflib
import re

from optax_freeze._tree import message


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
    whole = "".join(translated) + _segment(segments[-1], pattern) + "(?:/.*)?"
    return _compile(whole, "no pattern", f"fz.path({pattern!r})", "a glob", "write ranges in ascending order: [0-7]")


def _compile(expression: str, what: str, at: str, expected: str, fix: str) -> re.Pattern[str]:
    """An expression in which ``.`` is any character: a key may hold a line break."""
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        raise ValueError(message(what, at=at, got=error.msg, expected=expected, fix=fix)) from error


def _segment(segment: str, pattern: str) -> str:
    if "**" in re.sub(r"\[[^]]*\]", "", segment):
        raise ValueError(
            message(
                "'**' stands for whole segments",
                at=f"fz.path({pattern!r})",
                got=repr(segment),
                expected="'**' between slashes, or '*' within a segment",
                fix=f"write {segment.replace('**', '*')!r}: a pattern matches everything below its match anyway",
            )
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


def no_match(pattern: str, paths: list[str], hint: str = "") -> str:
    """The text of the error for a pattern that matches none of ``paths``: it names the nearest."""
    above = {"/".join(p.split("/")[:n]) for p in paths for n in range(1, p.count("/") + 2)}
    near = difflib.get_close_matches(pattern.rstrip("/*"), sorted(above), n=3, cutoff=0.5)
    if paths == [""]:
        return message(
            f"the pattern {pattern!r} matches no leaf",
            at=repr(pattern),
            got="one leaf without a path, and no tree",
            expected="a tree of parameters",
            fix="look at the order of the arguments; where the parameters are not the first of a loss, give argnums",
        )
    return message(
        f"the pattern {pattern!r} matches no leaf",
        at=repr(pattern),
        got=f"0 of {len(paths)} leaves",
        expected="at least one",
        fix=f"nearest paths: {', '.join(near or paths[:3]) or 'none'}{hint}",
    )
