"""Selectors decide for each leaf whether it is frozen. They combine by ``|``, ``&`` and ``~``.

They are pytrees whose leaves are the arrays of element masks: a spec can be an argument of a jitted function.
"""

import copy
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import jax
import numpy as np

from optax_freeze._errors import counted, described, in_one_line, type_error, value_error
from optax_freeze._spec import patterns as _glob
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.masks import Choice, DynamicRows, ElementMask, Elements, combined
from optax_freeze._spec.tree import Leaf, VariableLeaf


class FilterOfNnx(Protocol):
    def __call__(self, path: Any, x: Any) -> Any: ...


class Selector:
    """Chooses leaves by path, shape and dtype. Combine selectors with ``|``, ``&`` and ``~``."""

    def select(self, leaves: Sequence[Leaf]) -> list[Choice]:
        """Whether each leaf is selected; for rules the choice may also be an element mask."""
        raise NotImplementedError

    def __or__(self, other: "Selectable") -> "Selector":
        return Or.of(self, as_selector(other, "|"))

    def __ror__(self, other: "Selectable") -> "Selector":
        return Or.of(as_selector(other, "|"), self)

    def __and__(self, other: "Selectable") -> "Selector":
        return And.of(self, as_selector(other, "&"))

    def __rand__(self, other: "Selectable") -> "Selector":
        return And.of(as_selector(other, "&"), self)

    def __invert__(self) -> "Selector":
        return Not(self)

    def __bool__(self) -> bool:
        got, fix = "`not`, `and`, `or` or `if` on a selector", "use ~, & and |"
        raise type_error("a selector has no truth value", at=repr(self), got=got, expected="~a, a & b, a | b", fix=fix)


Selectable: TypeAlias = Selector | str | Sequence[str] | FilterOfNnx | type[Any]
"""What :func:`as_selector` accepts, types of NNX variables among it."""


@dataclasses.dataclass(frozen=True, repr=False)
class _Patterns(Selector):
    patterns: tuple[str, ...]
    name: ClassVar[str]
    compile: ClassVar[Callable[[str], re.Pattern[str]]]

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            self.compile(pattern)

    def select(self, leaves: Sequence[Leaf]) -> list[Choice]:
        found = {i for pattern in self.patterns for i in self.find(pattern, leaves)}
        return [i in found for i in range(len(leaves))]

    def find(self, pattern: str, leaves: Sequence[Leaf]) -> list[int]:
        """The leaves that a pattern matches; none is an error."""
        matches = self.compile(pattern).fullmatch
        found = [i for i, leaf in enumerate(leaves) if matches(leaf.path) or any(map(matches, leaf.aliases))]
        if not found:
            paths = [path for leaf in leaves for path in (leaf.path, *leaf.aliases)]
            raise _glob.no_match(pattern, paths, is_regex=self.name == "regex")
        return found

    def __repr__(self) -> str:
        return f"fz.{self.name}({', '.join(map(repr, self.patterns))})"


@jax.tree_util.register_static
class Path(_Patterns):
    name, compile = "path", staticmethod(_glob.glob)

    def select(self, leaves: Sequence[Leaf]) -> list[Choice]:
        first = _first_glob(self.patterns, leaves)
        for n in sorted({*range(len(self.patterns))}.difference(first)):
            self.find(self.patterns[n], leaves)
        return [n is not None for n in first]


@jax.tree_util.register_static
class Regex(_Patterns):
    name, compile = "regex", staticmethod(_glob.regex)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class Where(Selector):
    fn: Callable[[str, jax.ShapeDtypeStruct], bool]

    def select(self, leaves: Sequence[Leaf]) -> list[Choice]:
        return [any(self._ask(leaf, path) for path in (leaf.path, *leaf.aliases)) for leaf in leaves]

    def _ask(self, leaf: Leaf, path: str) -> bool:
        if leaf.dtype is None:
            return False
        answer = ask_without_values(lambda: self.fn(path, leaf.struct), repr(self), path)
        if not isinstance(answer, (bool, np.bool_)):
            got, expected = described(answer), "True (frozen) or False"
            fix = "compare the path, the shape or the dtype"
            raise type_error(f"{self!r} did not return a bool", at=path, got=got, expected=expected, fix=fix)
        return bool(answer)

    def __repr__(self) -> str:
        return f"fz.where({getattr(self.fn, '__qualname__', repr(self.fn))})"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class NnxFilter(Selector):
    """Selects NNX variables by a filter of ``flax.nnx``, which is called with shapes instead of values."""

    filter: Callable[[tuple[Any, ...], Any], bool]

    def select(self, leaves: Sequence[Leaf]) -> list[Choice]:
        if leaves and not any(isinstance(leaf, VariableLeaf) for leaf in leaves):
            what = "an NNX filter needs NNX variables"
            at, got = leaves[0].path, f"{self!r} for {counted(len(leaves), 'leaf', 'leaves')} without a variable"
            fix = "for other trees use fz.path('**/bias') or fz.where(lambda path, leaf: ...)"
            raise value_error(what, at=at, got=got, expected="an NNX module, or an nnx.State of one", fix=fix)
        return [isinstance(leaf, VariableLeaf) and self._ask(leaf) for leaf in leaves]

    def _ask(self, leaf: VariableLeaf) -> bool:
        shapes = jax.tree.map(_tree.struct_of, leaf.variable, is_leaf=_tree.is_leaf)
        selects = lambda: any(self.filter(names, shapes) for names in leaf.names)  # noqa: E731
        return ask_without_values(selects, repr(self), leaf.path)

    def __repr__(self) -> str:
        return repr(self.filter)


@dataclasses.dataclass(frozen=True, repr=False)
class _Joined(Selector):
    """Selectors that are joined by one operator, in a tuple: nested pairs would exceed Python's stack.

    Parentheses around operands on the right are kept, but none within them.
    """

    operands: tuple[Selector, ...]
    symbol: ClassVar[str]
    winner: ClassVar[bool]  # the choice for a leaf that is made if any operand makes it

    @classmethod
    def of(cls, left: Selector, right: Selector) -> Selector:
        if isinstance(right, cls):
            right = cls(tuple(itertools.chain.from_iterable(map(cls._operands, right.operands))))
        return cls((*cls._operands(left), right))

    @classmethod
    def _operands(cls, selector: Selector) -> tuple[Selector, ...]:
        return selector.operands if isinstance(selector, cls) else (selector,)

    def select(self, leaves: Sequence[Leaf]) -> list[Choice]:
        choices = zip(*(each.select(leaves) for each in self.operands), strict=True)
        pairs = list(zip(leaves, choices, strict=True))
        fit = functools.cache(lambda: {id(choice) for leaf, found in pairs if leaf.may_train for choice in found})
        return [functools.reduce(functools.partial(self._combine, leaf, fit), found) for leaf, found in pairs]

    def _combine(self, leaf: Leaf, fit: Callable[[], set[int]], a: Choice, b: Choice) -> Choice:
        """What two choices are together; ``fit`` returns the masks of leaves that may train."""
        if a is self.winner or b is (not self.winner):
            return a
        if b is self.winner or a is (not self.winner):
            return b
        unfit = [] if leaf.may_train else [mask for mask in (a, b) if id(mask) not in fit()]
        if not leaf.inexact and not unfit:
            return True
        both = combined(a, b, leaf, self, either=self.winner)
        return unfit[0] if unfit and both is not True else both  # a mask of leaves none of which can train is refused

    def __repr__(self) -> str:
        return f" {self.symbol} ".join(map(_operand, self.operands))


@jax.tree_util.register_dataclass
class Or(_Joined):
    symbol, winner = "|", True


@jax.tree_util.register_dataclass
class And(_Joined):
    symbol, winner = "&", False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Not(Selector):
    operand: Selector
    is_all_except: bool = dataclasses.field(default=False, compare=False, metadata={"static": True})

    def select(self, leaves: Sequence[Leaf]) -> list[Choice]:
        choices = self.operand.select(leaves)
        inverted = {id(c): not c if isinstance(c, bool) else ~c for c in choices}
        return [inverted[id(c)] for c in choices]

    def __invert__(self) -> Selector:
        return self.operand

    def __repr__(self) -> str:
        if self.is_all_except:
            return repr(self.operand).replace("fz.path", "fz.all_except", 1)
        return f"~{_operand(self.operand)}"


@jax.tree_util.register_pytree_node_class
class Choices(tuple[Choice, ...]):
    """Choices as a pytree, whose children are the masks that have an array."""

    def tree_flatten(self) -> tuple[Any, Any]:
        has_array = [isinstance(choice, Elements | DynamicRows) for choice in self]
        static = tuple(None if has else choice for choice, has in zip(self, has_array, strict=True))
        return list(itertools.compress(self, has_array)), static

    @classmethod
    def tree_unflatten(cls, static: Any, masks: Any) -> "Choices":
        masks = iter(masks)
        return cls(next(masks) if choice is None else choice for choice in static)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Rules(Selector):
    selectors: tuple[Selector, ...]
    choices: Choices  # one for each selector, and the default

    def select(self, leaves: Sequence[Leaf]) -> list[Choice]:
        choices = list(map(copy.copy, self.choices))  # one object for each rule
        return [choices[-1 if n is None else n] for n in first_match(self.selectors, leaves)]

    def __repr__(self) -> str:
        *choices, default = self.choices
        keys = (s.patterns[0] if isinstance(s, Path) and len(s.patterns) == 1 else s for s in self.selectors)
        pairs = ", ".join(f"{key!r}: {choice!r}" for key, choice in zip(keys, choices, strict=True))
        return f"fz.rules({{{pairs}}}{'' if default is False else f', default={default!r}'})"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ResolvedSpec(Selector):
    """A spec that is already resolved: one choice for each path; ``of`` says where it was read from."""

    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    choices: Choices
    of: str = dataclasses.field(default="state", metadata={"static": True})

    def select(self, leaves: Sequence[Leaf]) -> list[Choice]:
        fix = f"use the spec of the {self.of} that belongs to these parameters"
        fix = _tree.with_fix_of_module(fix, leaves, self.paths)
        _tree.refuse_other_paths([leaf.path for leaf in leaves], self.paths, repr(self), fix)
        return list(self.choices)

    def __repr__(self) -> str:
        leaves = f"<{self.of} of {len(self.paths)} leaves>"
        return f"fz.spec_of({leaves})" if self.of == "state" else f"{leaves}.frozen"


def _operand(selector: Selector) -> str:
    return f"({selector!r})" if isinstance(selector, _Joined) else repr(selector)


def as_selector(value: Any, name: str) -> Selector:
    """The selector for a selector, a pattern, a list of patterns or an NNX filter."""
    if isinstance(value, Selector):
        return value
    if (nnx_filter := _tree.nnx_filter(value)) is not None:
        return NnxFilter(nnx_filter)
    if isinstance(value, str):
        return Path((value,))
    if is_patterns(value):
        return Path(tuple(value))
    what = f"{name}: neither a pattern nor a selector"
    at, expected = described(value), "a glob pattern or fz.path / all_except / regex / where"
    fix = "wrap a function in fz.where(...)"
    if isinstance(value, ElementMask):
        fix = f"say for which leaves: fz.rules({{pattern: {value!r}}})"
    raise type_error(what, at=at, got=type(value).__name__, expected=expected, fix=fix)


def is_selector(value: Any) -> bool:
    """Whether :func:`as_selector` accepts a value."""
    return isinstance(value, (str, Selector)) or is_patterns(value) or _tree.nnx_filter(value) is not None


def is_patterns(value: Any) -> bool:
    """Whether ``value`` is a list of strings."""
    return type(value) in (list, tuple) and bool(value) and all(isinstance(item, str) for item in value)


def first_match(selectors: Sequence[Selector], leaves: Sequence[Leaf]) -> list[int | None]:
    """The index of the first selector that selects each leaf; a selector that is first for no leaf is an error."""
    of_glob = [
        (each, n) for n, selector in enumerate(selectors) if isinstance(selector, Path) for each in selector.patterns
    ]
    if len({n for _, n in of_glob}) == len(selectors):
        found = _first_glob([glob for glob, _ in of_glob], leaves)
        if {*range(len(of_glob))}.issubset(found):
            return [None if k is None else of_glob[k][1] for k in found]
    first: list[int | None] = [None] * len(leaves)
    for n, selector in enumerate(selectors):
        selected = [i for i, hit in enumerate(selector.select(leaves)) if hit]
        free = [i for i in selected if first[i] is None]
        if selected and not free:
            what = f"rule {selector!r} never applies: earlier rules match all its leaves"
            at, got = leaves[selected[0]].path, f"{counted(len(selected), 'leaf', 'leaves')}, already matched"
            fix = "put the narrower rule first, or delete this rule"
            raise value_error(what, at=at, got=got, expected="at least one leaf that no earlier rule matches", fix=fix)
        for i in free:
            first[i] = n
    return first


def _first_glob(globs: Sequence[str], leaves: Sequence[Leaf]) -> list[int | None]:
    """The first of these globs that matches each leaf, by one regular expression."""
    match = re.compile("|".join(f"({_glob.glob(each).pattern})" for each in globs), re.DOTALL).fullmatch
    paths = ((leaf.path, *leaf.aliases) for leaf in leaves)
    return [
        min((found.lastindex - 1 for found in map(match, each) if found and found.lastindex), default=None)
        for each in paths
    ]


def ask_without_values(ask: Callable[[], Any], name: str, at: str) -> Any:
    """The result of a user's function of shapes; a ``TypeError`` if it looks at values."""
    try:
        return ask()
    except (TypeError, AttributeError) as error:
        got, fix = "a function that looks at values", "decide by leaf.shape, leaf.dtype or the path"
        fix += "; compute a value-dependent tree of bools beforehand"
        if "positional argument" in str(error):
            got = "a function of different arguments"
            fix = "fz.where(lambda path, leaf: ...) for each leaf, or pass a function of the whole tree directly"
        expected = "a function of paths, shapes and dtypes: it is called with jax.ShapeDtypeStruct leaves"
        what = f"{name} failed on shapes: {in_one_line(error)}"
        raise type_error(what, at=at, got=got, expected=expected, fix=fix) from error
