"""Path patterns as regular expressions, and what to say when one matches nothing."""

import difflib
import re

from optax_freeze._tree import message


def regex(pattern: str) -> re.Pattern[str]:
    """A regular expression, to be matched against a whole path."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            message(
                "no regular expression",
                at=f"fz.regex({pattern!r})",
                got=str(error),
                expected="an expression that `re.compile` takes",
                fix="for globs such as 'encoder/*', use fz.path(...)",
            )
        ) from error


def glob(pattern: str) -> re.Pattern[str]:
    """A glob on ``/``-separated segments; what it matches may go on with a ``/``."""
    segments = pattern.split("/")
    while segments[-1] == "**" and len(segments) > 1:
        segments.pop()
    if segments == ["**"]:
        return re.compile(".*", re.DOTALL)
    translated = ["(?:[^/]*/)*" if segment == "**" else _segment(segment, pattern) + "/" for segment in segments[:-1]]
    return re.compile("".join(translated) + _segment(segments[-1], pattern) + "(?:/.*)?", re.DOTALL)


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
            body = re.sub(r"([\\\[\]^&~|])", r"\\\1", chars[negated:])
            out += f"(?!/)[{'^' if negated else ''}{body}]"
        else:
            out += re.escape(char)
    return out


def no_match(pattern: str, paths: list[str]) -> str:
    """The text of the error for a pattern that matches none of ``paths``: it names the nearest."""
    above = {"/".join(p.split("/")[:n]) for p in paths for n in range(1, p.count("/") + 2)}
    near = difflib.get_close_matches(pattern.rstrip("/*"), sorted(above), n=3, cutoff=0.5)
    return message(
        f"the pattern {pattern!r} matches no leaf",
        at=repr(pattern),
        got=f"0 of {len(paths)} leaves",
        expected="at least one",
        fix=f"nearest paths: {', '.join(near or paths[:3]) or '(the root)'}",
    )
