"""The functions that make selectors: ``path``, ``all_except``, ``regex``, ``where`` and ``rules``.

``True`` always means frozen, unlike in ``optax.masked`` (transformed) and ``equinox.partition`` (kept).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from optax_freeze._errors import described, refuse_no_mapping, type_error, value_error
from optax_freeze._spec.prefix_tree import as_choice
from optax_freeze._spec.selector_algebra import (
    Choices,
    Not,
    Path,
    Regex,
    Rules,
    Selector,
    Where,
    as_selector,
    is_patterns,
)


def path(*patterns: str | Sequence[str]) -> Selector:
    """Selects leaves by glob patterns on their paths.

    A path looks like ``encoder/layer_0/kernel``. Within a segment ``*`` matches any characters, ``?`` one character and
    ``[a-c]`` one of these characters (``[[]`` matches a bracket); the segment ``**`` matches any number of segments. A
    pattern also selects everything below its match: ``"encoder"`` means the same as ``"encoder/**"``.

    Args:
      *patterns: one or more patterns, or one list of them; a leaf is selected if any of them matches.

    Returns:
      A selector. Resolving it raises ``ValueError``, with the nearest paths, if a pattern matches no leaf.

    Raises:
      TypeError: if a pattern is not a string.
      ValueError: if there is no pattern, ``**`` is only part of a segment, or brackets contain a number of several
        digits (``layer_[0-11]``).

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": {"kernel": 0.0, "bias": 0.0}, "head": {"kernel": 0.0}}
      >>> fz.resolve(params, fz.path("**/kernel"))
      {'encoder': {'bias': False, 'kernel': True}, 'head': {'kernel': True}}
    """
    return Path(_checked("path", patterns))


def all_except(*patterns: str | Sequence[str]) -> Selector:
    """Selects every leaf that no glob pattern matches, so that only the matched leaves train.

    Args:
      *patterns: one or more patterns, as in :func:`path`.

    Returns:
      A selector, equal to ``~fz.path(*patterns)``.

    Example:
      >>> import optax_freeze as fz
      >>> fz.resolve({"encoder": 0.0, "head": 0.0}, fz.all_except("head"))
      {'encoder': True, 'head': False}
    """
    return Not(Path(_checked("all_except", patterns)), is_all_except=True)


def regex(*patterns: str | Sequence[str]) -> Selector:
    """Selects leaves whose whole path matches a regular expression (``re.fullmatch``).

    Args:
      *patterns: one or more regular expressions, or one list of them; a leaf is selected if any of them matches.

    Returns:
      A selector. Resolving it raises ``ValueError`` if an expression matches no leaf.

    Raises:
      TypeError: if a pattern is not a string.
      ValueError: if there is no pattern, or one is not a regular expression.

    Example:
      >>> import optax_freeze as fz
      >>> fz.resolve({"layer_10": 0.0, "head": 0.0}, fz.regex(r"layer_[0-9]+"))
      {'head': False, 'layer_10': True}
    """
    return Regex(_checked("regex", patterns))


def where(fn: Callable[[str, jax.ShapeDtypeStruct], bool]) -> Selector:
    """Selects leaves by a function of their path, shape and dtype.

    Args:
      fn: called as ``fn(path, leaf)`` with a ``jax.ShapeDtypeStruct``, for arrays only; returns a bool.

    Returns:
      A selector; it may select nothing.

    Raises:
      TypeError: if ``fn`` is not callable; when used, if ``fn`` looks at values or does not return a bool.

    Example:
      >>> import numpy as np, optax_freeze as fz
      >>> params = {"kernel": np.zeros((2, 2), np.float32), "bias": np.zeros(2, np.float32)}
      >>> fz.resolve(params, fz.where(lambda path, leaf: leaf.ndim == 1))
      {'bias': True, 'kernel': False}
    """
    if not callable(fn):
        got, expected = described(fn), "fn(path, leaf) -> bool"
        fix = "for patterns, use fz.path(...) or fz.regex(...)"
        raise type_error("fz.where takes a function", at="its first argument", got=got, expected=expected, fix=fix)
    return Where(fn)


def rules(rules: Mapping[Any, Any], *, default: Any = False) -> Selector:
    """Freezes leaves by ordered rules, of which the first match applies.

    Args:
      rules: a mapping from glob patterns or selectors to True (frozen), False or an element mask
        (:func:`optax_freeze.rows`, :func:`optax_freeze.elements` or a boolean array).
      default: the value for leaves that no rule matches.

    Returns:
      A selector. Resolving it raises ``ValueError`` if a pattern matches no leaf, or if a rule never applies because
      earlier rules match all its leaves.

    Raises:
      TypeError: if ``rules`` is not a mapping, or a key is neither a pattern nor a selector.
      ValueError: if a value is neither a bool nor an element mask.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": {"kernel": 0.0, "norm": 0.0}, "head": 0.0}
      >>> fz.resolve(params, fz.rules({"**/norm": False, "encoder": True}))
      {'encoder': {'kernel': True, 'norm': False}, 'head': False}
    """
    expected = "{pattern or selector: True, False or an element mask}"
    fix = "for a list of patterns, use fz.path(*patterns)"
    refuse_no_mapping("fz.rules", rules, expected, at="its first argument", fix=fix)
    selectors = tuple(as_selector(key, "fz.rules") for key in rules)
    choices = [as_choice(value, f"rule {key!r}") for key, value in rules.items()]
    return Rules(selectors, Choices([*choices, as_choice(default, "default")]))


def distinct(name: str, patterns: Any, order: str = "from the output to the input layers") -> list[Any]:
    """A list of patterns and selectors; an error if one is named twice."""
    if isinstance(patterns, (str, Selector, Mapping)) or not isinstance(patterns, Sequence):
        got, expected = described(patterns), f"patterns or selectors, {order}"
        fix = "pass a list: [pattern, ...]"
        raise type_error(f"{name} takes a list of patterns", at=name, got=got, expected=expected, fix=fix)
    for i, pattern in enumerate(patterns):
        as_selector(pattern, name)
        if pattern in patterns[:i]:
            got, expected = described(pattern), "each pattern once"
            raise value_error("a pattern is named twice", at=name, got=got, expected=expected, fix="delete one of them")
    return [path(*pattern) if is_patterns(pattern) else pattern for pattern in patterns]


def _checked(name: str, patterns: Sequence[Any]) -> tuple[str, ...]:
    if len(patterns) == 1 and is_patterns(patterns[0]):
        [patterns] = patterns
    if not patterns:
        what, expected = f"fz.{name} needs a pattern", "at least one pattern"
        fix = "to freeze everything use True, to freeze nothing False"
        raise value_error(what, at=f"fz.{name}()", got="nothing", expected=expected, fix=fix)
    for pattern in patterns:
        if not isinstance(pattern, str):
            fix = f"give patterns, or one list of them; wrap a function in {'~' * (name == 'all_except')}fz.where(...)"
            if isinstance(pattern, Selector):
                fix = f"pass the selector itself: {~pattern if name == 'all_except' else pattern!r}"
            got, expected = described(pattern), "a pattern such as 'encoder/**'"
            raise type_error(f"fz.{name} takes strings", at=f"fz.{name}", got=got, expected=expected, fix=fix)
    return tuple(patterns)
