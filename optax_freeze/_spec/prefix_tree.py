"""Specs in the form of an Optax mask: a tree of bools and element masks, or a function that returns one."""

import contextlib
import copy
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from optax_freeze._errors import described, is_array, is_bool, is_concrete, type_error, value_error, with_article
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.masks import ElementMask, Elements, StaticRows
from optax_freeze._spec.patterns import glob, literal, nearest
from optax_freeze._spec.selector_algebra import (
    Choice,
    Path,
    Selector,
    as_selector,
    ask_without_values,
    is_patterns,
    is_selector,
)
from optax_freeze._spec.tree import Leaf, PyTree

_WRITTEN = 8  # at most this many rules are written out in an error
_NO_LABELS = "a tree cannot contain labels or patterns; use fz.rules({pattern: True}), or fz.resolve(subtree, pattern)"


def from_prefix(prefix: PyTree, params: PyTree) -> list[Choice]:
    """One choice per leaf of ``params``, from a tree of its structure or a prefix of it; one object for each entry."""
    choices, treedef = _tree.flatten(prefix, _is_choice)
    for choice in choices:
        refuse_condition(choice, "frozen")
    subtrees = None
    with contextlib.suppress(ValueError, TypeError, KeyError):  # whose text has the values of all arrays
        subtrees = treedef.flatten_up_to(params)
    if subtrees is None:
        other = _in_mappings_of(params, prefix)
        if _tree.flatten(other, _is_choice)[1] == treedef:
            raise _no_fit(prefix, params)
        return from_prefix(other, params)
    answers: list[Choice] = []
    for choice, at, subtree in zip(choices, _prefix_paths(prefix), subtrees, strict=True):
        if _tree.is_masked_node(choice) and _tree.is_masked_node(subtree):
            answers.append(True)
        elif is_array(subtree) and subtree.shape == () and is_concrete(choice) and is_bool(choice):
            answers.append(Elements(choice))  # an element mask, so that `replace_masks` can replace it
        else:
            fix = _without_patterns(prefix, params) if is_selector(choice) else None
            answers += [copy.copy(as_choice(choice, at, fix))] * len(_tree.flatten(subtree)[0])
    return answers


def from_function(function: Callable[[PyTree], PyTree], params: PyTree, leaves: Sequence[Leaf]) -> PyTree:
    """The spec that a function of the tree of shapes returns; a ``TypeError`` if it is not such a function."""
    values, treedef = _tree.flatten(params)
    structs = [leaf.struct if leaf.dtype is not None else value for value, leaf in zip(values, leaves, strict=True)]
    shapes = jax.tree.unflatten(treedef, structs)
    name = described(function)
    try:
        with contextlib.suppress(ValueError):  # no signature: a class implemented in C, such as bool
            inspect.signature(function).bind(None)
    except TypeError as error:
        raise _of_each_leaf(name, "a function of different arguments") from error
    try:
        answer = ask_without_values(lambda: function(shapes), name, "frozen")
    except TypeError as error:
        cause = error.__cause__
        if _expects_a_leaf(cause, shapes):
            raise _of_each_leaf(name, f"a function of a path or a leaf: {cause}") from cause
        raise
    if is_bool(answer) and not jax.tree_util.treedef_is_leaf(treedef):
        raise _of_each_leaf(name, f"{bool(answer)}, one bool for the whole tree")
    return answer


def _expects_a_leaf(error: BaseException | None, tree: PyTree) -> bool:
    """Whether a function raised ``error`` because it expects a path or a ``jax.ShapeDtypeStruct`` and not a tree."""
    if isinstance(error, AttributeError):
        return error.obj is tree and error.name in {*dir(str), *dir(jax.ShapeDtypeStruct)}
    return "expected str" in str(error)  # `re.match` and `fnmatch` on a dict


def _of_each_leaf(name: str, got: str) -> TypeError:
    at, expected = "frozen", "a function of the whole tree of shapes that returns a tree of bools, True for frozen"
    fix = "decide leaf by leaf: fz.where(lambda path, leaf: ...)"
    return type_error(f"{name} is not a function of the tree of parameters", at=at, got=got, expected=expected, fix=fix)


def _in_mappings_of(params: PyTree, prefix: PyTree) -> PyTree:
    """A prefix with its mappings converted to the types in ``params``: FrozenDict and dict."""
    if any(_is_choice(node) or jax.tree_util.all_leaves([node], _tree.is_leaf) for node in (params, prefix)):
        return prefix
    pairs, treedef = _children(params)
    names = [_tree.name_of(*key) for key, _ in pairs]
    others, other = _children(prefix)
    if isinstance(params, Mapping) and isinstance(prefix, Mapping) and set(names) == set(prefix):
        own = [prefix[name] for name in names]
    elif treedef == other:
        own = [child for _, child in others]
    else:
        return prefix
    return jax.tree.unflatten(treedef, [_in_mappings_of(child, o) for (_, child), o in zip(pairs, own, strict=True)])


def _children(node: PyTree) -> tuple[list[tuple[Any, PyTree]], Any]:
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)


def _is_choice(node: Any) -> bool:
    return isinstance(node, ElementMask | Selector | optax.MaskedNode)


def _prefix_paths(prefix: PyTree) -> list[str]:
    return _tree.paths(jax.tree.map(lambda choice: True, prefix, is_leaf=_is_choice))


def _no_fit(prefix: PyTree, params: PyTree) -> ValueError:
    covers, covered = _prefix_paths(prefix), _tree.paths(params)
    bare = [p for p in covered if not any(is_above(c, p) for c in covers)]
    loose = [c for c in covers if not any(is_above(c, p) for p in covered)]
    missing = f"no entry for {bare[:3]}" if bare else ""
    unknown = f"an entry for {loose[:3]}, which the parameters do not have" if loose else ""
    got = "; ".join(filter(None, [missing, unknown])) or f"{type(prefix).__name__}: {jax.tree.structure(prefix)}"
    fix = "build it from the parameters: jax.tree.map(lambda leaf: ..., params)"
    if isinstance(params, (str, Selector)):
        got = f"{params!r}, which is not a tree of parameters"
        fix = f"swap the arguments: {params!r} is a spec, and was passed as the parameters"
    elif isinstance(prefix, optax.GradientTransformation):
        fix = "an optimizer is not a spec; to wrap it, use fz.freeze(optimizer, frozen)"
    elif any(isinstance(choice, (str, Selector)) for choice in jax.tree.leaves(prefix, is_leaf=_is_choice)):
        fix = _without_patterns(prefix, params)
    elif leaf := next((above for c in loose if (above := c.rpartition("/")[0]) in covered), None):
        fix = f"{leaf!r} is one leaf: for some of its elements give an array of bools, np.array([...])"
    elif not loose and _has_a_mapping_for_another(prefix, params):
        fix = f"name the leaves by their paths: {_as_rules(prefix, covers)}"
    elif loose and bare and isinstance(prefix, Mapping):
        fix = f"for {loose[0]!r}, the nearest paths are {nearest(loose[0], covered)}"
    elif bare and isinstance(prefix, Mapping):
        fix = f"name only what is frozen, by its path: {_as_rules(prefix, covers)}"
    elif not covers:
        fix = "to freeze nothing, pass False"
    expected = f"the structure of the parameters or a prefix of it, in the same containers ({type(params).__name__})"
    at = [*bare, *loose, ""][0]
    return value_error("`frozen` does not fit the parameters", at=at, got=got, expected=expected, fix=fix)


def _without_patterns(prefix: PyTree, params: PyTree) -> str:
    """How to write a tree or a list in which there are patterns or selectors."""
    if isinstance(prefix, (list, tuple)):
        if all(map(is_selector, prefix)):
            return f"combine them with |: {functools.reduce(operator.or_, (as_selector(x, '|') for x in prefix))!r}"
        groups = "name what is frozen; for groups of optimizers, optax.partition(transforms, fz.labels_by_path({...}))"
        return groups if any(isinstance(node, Mapping) for node in prefix) else _NO_LABELS
    nodes = jax.tree_util.tree_leaves_with_path(prefix, is_leaf=lambda node: _is_choice(node) or is_patterns(node))
    written: dict[str, bool] = {}
    for key, node in nodes:
        at = literal(_tree.keystr(key))
        if is_bool(node):
            written[at] = bool(node)
        elif is_selector(node) and isinstance(found := as_selector(node, at), Path):
            written |= {f"{at}/{each}": True for each in found.patterns}
    matches = lambda each: any(map(glob(each).fullmatch, _tree.paths(params)))  # noqa: E731
    fits = len(nodes) <= len(written) <= _WRITTEN and all(map(matches, written))
    return f"a tree cannot contain patterns; name whole paths: fz.rules({written})" if fits else _NO_LABELS


def _has_a_mapping_for_another(prefix: PyTree, params: PyTree) -> bool:
    """Whether a prefix has a mapping in the place of another container: a module, a dataclass, a list."""
    if not isinstance(prefix, Mapping) or jax.tree_util.all_leaves([params], _tree.is_leaf):
        return False
    if not isinstance(params, Mapping):
        return True
    return any(_has_a_mapping_for_another(child, params[key]) for key, child in prefix.items() if key in params)


def _as_rules(prefix: PyTree, paths: Sequence[str]) -> str:
    choices = _tree.flatten(prefix, _is_choice)[0]
    written = [repr(bool(x)) if is_bool(x) else repr(x) if isinstance(x, StaticRows) else "..." for x in choices]
    pairs = [f"{literal(path)!r}: {choice}" for path, choice in zip(paths, written, strict=True)]
    return f"fz.rules({{{', '.join(pairs[:_WRITTEN] + ['...'] * (len(pairs) > _WRITTEN))}}})"


class NotASpec:
    """A condition of :func:`optax_freeze.freeze_when`, which somebody may take for a spec."""


def refuse_condition(value: Any, at: str) -> None:
    """A ``TypeError`` for a condition where it is said what is frozen."""
    if isinstance(value, NotASpec):
        expected, fix = "what is frozen in every step", "fz.freeze_when(optimizer, {pattern: condition})"
        raise type_error("a condition is not a spec", at=at, got=described(value), expected=expected, fix=fix)


def as_choice(value: Any, at: str, fix_of_patterns: str | None = None) -> Choice:
    """A bool or an element mask, also for a boolean array; a ``ValueError`` for anything else."""
    refuse_condition(value, at)
    if is_bool(value):
        return bool(value)
    if isinstance(value, ElementMask):
        return value
    if is_array(value) and value.dtype == np.bool_:
        return Elements(value)
    kind = f"an array of {value.dtype}" if is_array(value) else with_article(type(value).__name__)
    fix = "True freezes a leaf, False trains it; fz.rows and fz.elements freeze part of a leaf"
    if isinstance(value, (str, Selector)) or _tree.nnx_filter(value) is not None:
        kind = "a selector" if isinstance(value, Selector) else kind
        fix = fix_of_patterns or _NO_LABELS
    elif isinstance(value, (set, frozenset)):
        fix = "unpack it: fz.path(*patterns)"
    elif callable(value):
        fix = "decide leaf by leaf with a selector: fz.path(pattern) & fz.where(lambda path, leaf: ...)"
    expected = "True (frozen), False, an element mask or a boolean array"
    raise value_error(f"{kind} where a bool is expected", at=at, got=described(value), expected=expected, fix=fix)


def is_above(prefix: str, path: str) -> bool:
    """Whether ``prefix`` is a path, or the beginning of it that ends before a ``/``."""
    return not prefix or path == prefix or path.startswith(prefix + "/")
