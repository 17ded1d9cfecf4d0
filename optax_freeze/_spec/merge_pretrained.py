"""Puts a checkpoint into parameters, and freezes what came from it: :func:`merge_pretrained`."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp

from optax_freeze._errors import counted, described, is_array, is_scalar, refuse_unknown_choice, type_error, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.element_masks import rows
from optax_freeze._spec.masks import Choice
from optax_freeze._spec.merge_report import TOLD, Grown, MergeReport, told
from optax_freeze._spec.prefix_tree import is_above
from optax_freeze._spec.pretrained_leaf import KINDS, dtype_of, grown, growth_of, kind_of, loaded, shape_of
from optax_freeze._spec.rename import renamed, suggested
from optax_freeze._spec.resolve import Tied, make_plan
from optax_freeze._spec.selector_algebra import Path, Selectable, Selector, as_selector, is_selector
from optax_freeze._spec.tree import Leaf, PyTree

Tree = TypeVar("Tree")
_Dtype = Literal["params", "pretrained"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class MergedSpec(Selector):
    """One choice for each leaf of a merged tree, for that tree or a part of its leaves, such as its ``nnx.Param``s."""

    paths: tuple[str, ...]
    choices: tuple[Choice, ...]

    def select(self, leaves: Sequence[Leaf]) -> list[Choice]:
        known = dict(zip(self.paths, self.choices, strict=True))
        found = []
        for leaf in leaves:
            names = [path for path in (leaf.path, *leaf.aliases) if path in known]
            if not names:
                what, got = f"{self!r}: a leaf that was not merged", f"one of {counted(len(leaves), 'leaf', 'leaves')}"
                expected = f"paths of the tree that was merged, such as {list(self.paths[:3])}"
                fix = "merge the tree that the optimizer gets: the one below its top key, or"
                fix += " nnx.state(model, nnx.Param)"
                raise value_error(what, at=leaf.path, got=got, expected=expected, fix=fix)
            found.append(known[names[0]])
        return found

    def __repr__(self) -> str:
        whole, none = self.choices.count(True), self.choices.count(False)
        in_rows = len(self.choices) - whole - none
        return f"<spec of fz.merge_pretrained: {whole} leaves frozen, {in_rows} in rows, {none} trained>"


class _Given(NamedTuple):
    """A leaf of ``pretrained``: its own path, its path in ``params``, and its value."""

    name: str
    path: str
    value: Any


def merge_pretrained(
    params: Tree,
    pretrained: PyTree,
    *,
    rename: Mapping[str, str] | None = None,
    ignore: Selectable | Sequence[Selectable] = (),
    dtype: _Dtype = "params",
    tied: Tied = "error",
) -> tuple[Tree, Selector, MergeReport]:
    """Puts a checkpoint into parameters, and freezes what is pretrained: what is new trains.

    A leaf with the same path and shape takes the pretrained value and is frozen. One that is longer along one axis,
    such as an embedding with new tokens, takes it in its leading rows, which are frozen by :func:`optax_freeze.rows`. A
    leaf that is only in ``params`` keeps its value and trains.

    Args:
      params: any pytree of arrays, or of their shapes. Its structure, dtypes and shardings are those of the result.
      pretrained: a pytree with the same paths, such as a nested dict, or a flat one with keys like
        ``"encoder/kernel"``; of JAX or NumPy arrays, or shapes. It is not copied where nothing has to change.
      rename: ``{path in pretrained: path in params}`` for other names, of leaves or of everything below a path. The
        longest name applies; ``{"model": ""}`` removes a prefix, ``{"": "model"}`` adds one.
      ignore: patterns or selectors for leaves of ``pretrained`` that may be without a place in ``params``, or have
        another shape there; others are an error. A leaf that fits is loaded nevertheless. ``"**"`` allows all.
      dtype: ``"params"`` converts to the dtypes of ``params``; ``"pretrained"`` keeps those of the checkpoint where a
        leaf is frozen as a whole.
      tied: as in :func:`optax_freeze.partition`, for arrays that are at two paths of ``params``.

    Returns:
      ``(params, frozen, report)``: the merged parameters; the spec, which combines with selectors, as in
      ``frozen & fz.all_except("layers/11")`` to train these as well; and a report that can be printed, with
      ``as_dict()`` for logs. Where a value is needed of which only the shape is known, the result is a
      ``jax.ShapeDtypeStruct``: also for a leaf that grew if ``params`` has only its shape. Leaves that are not arrays
      or numbers, and the Python numbers of an Equinox module, are those of ``params``.

    Raises:
      ValueError: if a leaf of ``pretrained`` has no place in ``params`` or another shape there, and no pattern of
        ``ignore`` matches; if its numbers are of another kind (complex for real) or out of the range of the dtype; if a
        pattern of ``ignore`` or a name of ``rename`` applies to nothing, or two leaves get one path; or if tied leaves
        are pretrained at one path only.
      TypeError: if ``pretrained`` is a file name, or a path of ``rename`` is not a string.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"embed": jnp.zeros((5, 2)), "body": jnp.zeros(3), "head": jnp.zeros(2)}
      >>> pretrained = {"embed": jnp.ones((3, 2)), "body": jnp.ones(3)}
      >>> params, frozen, report = fz.merge_pretrained(params, pretrained)
      >>> print(report)
      loaded: 1 leaf
      grown: 1 leaf: embed (rows 0:3 of 5 along axis 0)
      new: 1 leaf: head
      ignored: nothing
      >>> fz.resolve(params, frozen)
      {'body': True, 'embed': fz.rows(slice(0, 3, None)), 'head': False}
    """
    refuse_unknown_choice(dtype, get_args(_Dtype), at="dtype")
    if isinstance(pretrained, (str, os.PathLike)):
        fix = "read it first: safetensors.numpy.load_file(name), or a checkpointer of Orbax"
        what, expected = "fz.merge_pretrained takes a tree, not a file", "a pytree of arrays or shapes"
        raise type_error(what, at="pretrained", got=described(pretrained), expected=expected, fix=fix)
    for tree, name in ((params, "params"), (pretrained, "pretrained")):
        what, fix = f"fz.merge_pretrained needs whole leaves in `{name}`", "pass the tree from before fz.partition"
        _tree.refuse_half_a_tree(tree, what, "a tree without optax.MaskedNode() and Part", fix)
    walk = _tree.walk(params)
    own = dict(zip(walk.paths, walk.values, strict=True))
    fixed = {path for i, (path, value) in enumerate(own.items()) if i in walk.settings or not _is_parameter(value)}
    given = _given(pretrained, rename, list(own), wrapped=walk.wrapped)
    reasons = {i: reason for i, each in enumerate(given) if (reason := _misfit(each, own, fixed, dtype))}
    placed = {each.path: each for i, each in enumerate(given) if i not in reasons and each.path not in fixed}
    ignored = _ignored(ignore, given, reasons)
    if not ignored >= reasons.keys():
        left = [(given[i], reason) for i, reason in reasons.items() if i not in ignored]
        raise _unplaced(left, given, {path: value for path, value in own.items() if path not in placed})
    growth = {path: growth_of(path, own[path], each.value) for path, each in placed.items()}
    choices = tuple(_choice(growth[path], own[path]) if path in placed else False for path in own)
    spec = MergedSpec(tuple(own), choices)
    make_plan(params, spec, tied=tied)

    def merged(path: str) -> Any:
        if path not in placed:
            return own[path]
        value, longer = placed[path].value, growth[path]
        if longer is not None:
            return grown(own[path], value, path, longer.axis)
        return loaded(own[path], value, path, keep_dtype=dtype == "pretrained")

    report = MergeReport(
        loaded=tuple(path for path in own if path in placed and growth[path] is None),
        grown=tuple(longer for path in own if (longer := growth.get(path)) is not None),
        new=tuple(path for path in own if path not in placed and path not in fixed),
        ignored=tuple(given[i].name for i in sorted(ignored)),
    )
    return jax.tree.unflatten(walk.treedef, list(map(merged, own))), spec, report


def _is_parameter(value: Any) -> bool:
    return is_array(value) or is_scalar(value)


def _given(pretrained: PyTree, rename: Mapping[str, str] | None, known: list[str], *, wrapped: bool) -> list[_Given]:
    walk = _tree.walk(pretrained)
    names = [leaf.path for leaf in walk.leaves()]
    suffix = "/value"  # Orbax stores an NNX variable, or a metadata box, as a dict with this key
    if wrapped and not walk.wrapped and not any(name.endswith(suffix) for name in known):
        names = [name.removesuffix(suffix) for name in names]
    return list(map(_Given, names, renamed(names, rename, known), walk.values))


def _misfit(given: _Given, own: Mapping[str, Any], fixed: set[str], dtype: str) -> str:
    """Why a pretrained leaf has no place in the parameters; empty if it has one."""
    if given.path not in own:
        return "only in `pretrained`"
    mine, value = own[given.path], given.value
    if given.path in fixed:
        return "an array in `pretrained`, and none in `params`" if shape_of(value) else ""
    if not _is_parameter(value):
        return f"a {type(value).__name__} in `pretrained`, and an array in `params`"
    if shape_of(value) != shape_of(mine) and growth_of(given.path, mine, value) is None:
        return f"shape {shape_of(value)} in `pretrained`, {shape_of(mine)} in `params`"
    kinds = [kind_of(dtype_of(each)) for each in (value, mine)]
    keeps = dtype == "pretrained" and shape_of(value) == shape_of(mine) and set(kinds) <= set(KINDS)
    if kinds[0] == kinds[1] or kinds == [jnp.floating, jnp.complexfloating] or keeps:
        return ""
    return f"{dtype_of(value)} in `pretrained`, {dtype_of(mine)} in `params`"


def _choice(longer: Grown | None, mine: Any) -> Choice:
    if longer is None or not jnp.issubdtype(dtype_of(mine), jnp.inexact):
        return True
    return rows(slice(0, longer.rows), longer.axis)


def _ignored(ignore: Any, given: Sequence[_Given], reasons: Mapping[int, str]) -> set[int]:
    """The positions of leaves without a place that a pattern allows; an error for a pattern that allows none."""
    leaves = []
    for name, path, value in given:
        dtype = value.dtype if is_array(value) else None
        leaves.append(Leaf(path, shape_of(value), dtype, (name,) * (name != path)))
    found: set[int] = set()
    for pattern in [ignore] if is_selector(ignore) and not isinstance(ignore, (list, tuple)) else ignore:
        selector = as_selector(pattern, "ignore")
        try:
            hits = [i for i, hit in enumerate(selector.select(leaves)) if hit]
        except ValueError as error:
            error.add_note("in `ignore`, for leaves of `pretrained`: what is only in `params` is new without it")
            raise
        if hits and not any(i in reasons for i in hits) and selector != Path(("**",)):
            what, at = f"ignore: {pattern!r} allows nothing", given[hits[0]].name
            got = f"{counted(len(hits), 'leaf', 'leaves')}, with a place in `params`"
            expected = "a leaf that is only in `pretrained`, or has another shape"
            fix = "to train what was loaded, frozen & ~fz.path(pattern); "
            fix += "not to load it, delete it from `pretrained` and `ignore`"
            raise value_error(what, at=at, got=got, expected=expected, fix=fix)
        found |= {i for i in hits if i in reasons}
    return found


def _unplaced(left: Sequence[tuple[_Given, str]], given: Sequence[_Given], free: Mapping[str, Any]) -> ValueError:
    """The error for leaves without a place: ``free`` are the leaves of the parameters that nothing was loaded to."""
    what = f"{counted(len(left), 'leaf', 'leaves')} of `pretrained` without a place in `params`"
    at = told([f"{each.name}: {reason}" for each, reason in left])
    alone = {each.path: len(shape_of(each.value)) for each, _ in left if each.path not in free}
    dotted = [path for path in alone if "." in path and path.replace(".", "/") in free]
    names = suggested(alone, {path: len(shape_of(value)) for path, value in free.items()})
    fix = f"ignore={_shortest([each.name for each, _ in left], [each.name for each in given])}, if they may be left out"
    if dotted:
        fix = 'replace the dots: {name.replace(".", "/"): value for name, value in pretrained.items()}'
    elif names:
        fix = f"rename={names}, if these are the same leaves; {fix}"
    got = f"{counted(len(given), 'leaf', 'leaves')} of `pretrained`"
    expected = "the path of a leaf of `params`, and its shape or one that is shorter along one axis"
    return value_error(what, at=at, got=got, expected=expected, fix=fix)


def _shortest(left: Sequence[str], names: Sequence[str]) -> list[str]:
    """The shortest patterns that match only the paths in ``left``, a few of them."""
    found: list[str] = []
    for path in left:
        segments = path.split("/")
        above = ["/".join(segments[:n]) for n in range(1, len(segments) + 1)]
        taken = set(left)
        short = next(each for each in above if all(name in taken for name in names if is_above(each, name)))
        short = short.replace("[", "[[]")
        found += [short] * (short not in found)
        if len(found) == TOLD:
            break
    return found
