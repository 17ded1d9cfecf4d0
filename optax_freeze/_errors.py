"""Error messages: what is wrong, at which path, got and expected, and the likely fix; and checks of arguments."""

import difflib
import functools
import importlib.util
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def is_array(leaf: Any) -> bool:
    """Whether ``leaf`` has a shape and a dtype of JAX: an array, a tracer, a NumPy scalar or a shape of one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and _is_of_jax(leaf.dtype)


def is_number(leaf: Any) -> bool:
    """Whether ``leaf`` is a Python float or complex number, which JAX differentiates as an array without axes."""
    return isinstance(leaf, (float, complex)) and not is_array(leaf)


def is_scalar(leaf: Any) -> bool:
    """Whether ``leaf`` is a Python number or bool, which JAX takes for an array without axes."""
    return isinstance(leaf, (int, float, complex)) and not is_array(leaf)


@functools.cache
def _is_of_jax(dtype: Any) -> bool:
    kinds = (np.number, np.bool_, jax.dtypes.extended)
    return dtype == jax.dtypes.float0 or any(jnp.issubdtype(dtype, kind) for kind in kinds)


def is_int(value: Any) -> bool:
    """Whether ``value`` is an int of Python or NumPy, but not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_bool(value: Any) -> bool:
    """Whether ``value`` is one bool: of Python, of NumPy, or a boolean array without axes and with a value."""
    if is_concrete(value):
        return value.dtype == np.bool_ and value.shape == ()
    return isinstance(value, (bool, np.bool_))


def is_concrete(leaf: Any) -> bool:
    """Whether ``leaf`` is an array with values of its own, and not a tracer, which JAX reuses freely."""
    return isinstance(leaf, (jax.Array, np.ndarray)) and not isinstance(leaf, Tracer)


def described(value: Any) -> str:
    """What was given, in a few words for an error: never an address, nor the values of an array."""
    if is_array(value):
        return f"an array of {value.dtype} of shape {tuple(value.shape)}"
    if hasattr(value, "__qualname__"):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__qualname__}"
    try:
        leaves = jax.tree.leaves(value) if isinstance(value, (Mapping, Sequence)) else []
    except ValueError:
        return f"{with_article(type(value).__name__)} whose keys do not sort"
    if any(map(is_array, leaves)):
        return f"{with_article(type(value).__name__)} of {counted(len(leaves), 'leaf', 'leaves')}"
    text = repr(value)
    return with_article(type(value).__name__) if " at 0x" in text else text if len(text) <= 200 else f"{text[:200]}..."


def counted(number: int, one: str, several: str) -> str:
    """``1 leaf``, ``2 leaves``."""
    return f"{number} {one if number == 1 else several}"


def listed(texts: Iterable[str], most: int = 3) -> str:
    """The first of some texts, and how many more there are."""
    found = [*texts]
    return ", ".join(found[:most]) + f" and {len(found) - most} more" * (len(found) > most)


def with_article(name: str) -> str:
    return f"a{'n' * (name[0] in 'aeiouAEIOU')} {name}"


def printable(text: str) -> str:
    """Text that may hold names, on one line: a key can hold a line break, or what a terminal takes for a command."""
    return text if text.isprintable() else repr(text)


def in_one_line(error: Exception) -> str:
    """The text of another error, to stand within a message; not all of a text with the values of arrays."""
    return textwrap.shorten(str(error), 400, placeholder=" ...")


def message(what: str, *, at: str | list[str], got: Any, expected: Any, fix: str) -> str:
    """The text of an error, in which every part is :func:`printable`; ``at`` is a path, or a list of paths."""
    places = "\n      ".join(map(printable, [at] if isinstance(at, str) else at))
    what, got, expected, fix = (printable(str(part)) for part in (what, got, expected, fix))
    return f"{what}\n  at: {places or '(the root)'}\n  got: {got}\n  expected: {expected}\n  fix: {fix}"


def whole_number(name: str, value: Any, *, least: int = 0, fix: str) -> int:
    """The argument ``name`` as an int: a ``ValueError`` if it is less than ``least``, a ``TypeError`` if not an int."""
    if is_int(value) and value >= least:
        return int(value)
    error = value_error if is_int(value) else type_error
    what = f"`{name}` must be a {'positive' if least else 'non-negative'} int"
    raise error(what, at=name, got=described(value), expected=f"an int of at least {least}", fix=fix)


def refuse_no_mapping(function: str, value: Any, expected: str, *, at: str = "its second argument", fix: str) -> None:
    if not isinstance(value, Mapping):
        raise type_error(f"{function} takes a mapping", at=at, got=described(value), expected=expected, fix=fix)


def refuse_unknown_choice(value: Any, choices: Sequence[str], *, at: str) -> None:
    if value not in choices:
        expected = " or ".join(map(repr, choices))
        raise value_error("unknown choice", at=at, got=described(value), expected=expected, fix="use one of them")


def value_error(what: str, *, at: str | list[str], got: Any, expected: Any, fix: str) -> ValueError:
    """A ``ValueError`` with the text of :func:`message`."""
    return ValueError(message(what, at=at, got=got, expected=expected, fix=fix))


def type_error(what: str, *, at: str, got: Any, expected: Any, fix: str) -> TypeError:
    """A ``TypeError`` with the text of :func:`message`."""
    return TypeError(message(what, at=at, got=got, expected=expected, fix=fix))


_MEANT = {"only": "fz.all_except", "trainable": "fz.all_except", "mask": "fz.elements"}


def _missing_name(name: str) -> Any:
    package = "optax_freeze"
    what = f"module {package!r} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(what, name=name)
    public = [each for each in vars(sys.modules[package]) if not each.startswith("_")]
    meant = [_MEANT[name]] if name in _MEANT else [f"fz.{each}" for each in difflib.get_close_matches(name, public)]
    fix = f"did you mean {' or '.join(meant)}?" if meant else "dir(fz) lists the names"
    if importlib.util.find_spec(f"{package}.{name}"):
        fix = f"import {package}.{name}, which {package} does not load"
    expected = "a public name"
    raise AttributeError(message(what, at=f"fz.{name}", got=repr(name), expected=expected, fix=fix), name=name)


# The ``__getattr__`` of the package. Type checkers take a name without a known type for no function, and so they still
# report names that do not exist.
missing_name: object = _missing_name
