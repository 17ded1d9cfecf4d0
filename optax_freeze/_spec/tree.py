"""Paths, holes and leaves: how this library looks at a pytree.

Patterns, error messages and tables all name a leaf by the same path, and every function walks a tree by the same
:func:`flatten`, in which a *hole* (``optax.MaskedNode()``, the place of a leaf that was taken out) still has a path.
Optax, for comparison, walks past its own holes: they are nodes without children there.
"""

import collections
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_freeze._errors import counted, is_array, type_error, value_error

PyTree: TypeAlias = Any
"""Any nesting of containers known to JAX."""

HOLE = optax.MaskedNode()
"""The place of a leaf that was taken out: a node without leaves, which every Optax transformation skips."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["index", "shape"])
@dataclasses.dataclass(frozen=True)
class Part:
    """The trainable part of a partially frozen leaf: a pytree node whose one child is an array.

    A bare array of a few rows would broadcast silently against the full leaf; a ``Part`` combines only with a ``Part``
    of the same rows. Optax's transformations map over it as over any node.

    Attributes:
      values: the trainable rows, of the leaf's shape but for the axis of the rows; or the trainable elements, a vector.
      index: which rows they are, or how many elements; static.
      shape: the shape of the full leaf; static.

    Example:
      >>> import optax_freeze as fz
      >>> trainable, _ = fz.partition({"embed": jnp.zeros((5, 2))}, {"embed": fz.rows(slice(0, 3))})
      >>> trainable["embed"].values.shape, trainable["embed"].shape
      ((2, 2), (5, 2))
    """

    values: Any
    index: Any = None
    shape: tuple[int, ...] | None = None

    @property
    def dtype(self) -> Any:
        """The dtype of the leaf."""
        return self.values.dtype

    def __radd__(self, full: Any) -> Any:
        raise type_error(
            "part of a leaf does not add to all of it",
            at=f"a leaf of shape {self.shape}",
            got="optax.apply_updates, or a sum, with updates of what trains alone",
            expected="fz.apply_updates(params, updates)",
            fix="use that, or fz.freeze(optimizer, frozen) with full updates",
        )


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array", "selection"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Rest:
    """The frozen part of a partially frozen leaf, stored as the full array, with the selection of what is frozen."""

    array: Any
    selection: Any


class Leaf(NamedTuple):
    """What a selector may see of a leaf: never its values.

    ``shape`` and ``dtype`` are None for a hole and for an object that is no array. ``aliases`` are the other paths of
    a shared NNX variable: a pattern may match any of them. ``index`` is that of a ``Part``.
    """

    path: str
    shape: tuple[int, ...] | None = None
    dtype: Any = None
    aliases: tuple[str, ...] = ()
    index: Any = None

    @property
    def inexact(self) -> bool:
        """Whether a gradient can move the leaf: a floating-point (float8 too) or complex array."""
        return self.dtype is not None and _is_inexact(self.dtype)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The leaf without its values; only for arrays."""
        assert self.shape is not None
        return _struct(self.shape, self.dtype)


class VariableLeaf(Leaf):
    """A leaf of a tree of NNX variables, while a spec is resolved: what an NNX filter may see of it.

    ``names`` are the keys of its path and of each alias; ``variable`` is the variable, or the leaf outside of any.
    """

    names: tuple[tuple[Any, ...], ...]
    variable: Any

    @classmethod
    def of(cls, leaf: Leaf, names: Sequence[tuple[Any, ...]], variable: Any) -> "VariableLeaf":
        self = cls(*leaf)
        self.names, self.variable = tuple(names), variable
        return self


class _Struct(jax.ShapeDtypeStruct):
    """A shape that refuses to be taken for its values, instead of being true, or equal to nothing."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a jax.ShapeDtypeStruct has no values")

    __bool__ = __array__ = __float__ = __int__ = _refuse

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, jax.ShapeDtypeStruct):
            return super().__eq__(other)
        return self._refuse()

    __hash__ = jax.ShapeDtypeStruct.__hash__


_Struct.__name__ = "ShapeDtypeStruct"  # as Python's own errors name it


def struct_of(value: Any) -> Any:
    """An array without its values; anything else as it is."""
    return _struct(tuple(value.shape), value.dtype) if is_array(value) else value


@functools.lru_cache
def _struct(shape: tuple[int, ...], dtype: Any) -> _Struct:
    return _Struct(shape, dtype)


def is_hole(node: Any) -> bool:
    """Whether ``node`` is the place of a leaf that was taken out."""
    return isinstance(node, optax.MaskedNode)


def is_leaf(node: Any) -> bool:
    """Whether ``node`` stands in the place of one leaf of the parameters: a hole, a ``Part`` or a ``Rest``."""
    return isinstance(node, (optax.MaskedNode, Part, Rest))


def bare(node: Any) -> Any:
    """The array of a ``Part``, even of one around an NNX variable, or the array itself."""
    return next(iter(jax.tree.leaves(node)), HOLE) if isinstance(node, Part) else node


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def flatten(tree: PyTree, is_leaf: Callable[[Any], bool] = is_leaf) -> tuple[list[Any], Any]:
    """``jax.tree.flatten``, in which a hole is a leaf, and so is what stands for a leaf frozen in part."""
    try:
        return jax.tree.flatten(tree, is_leaf=is_leaf)
    except ValueError:
        _refuse_unsortable(tree)
        raise


def flatten_beside(treedef: Any, tree: PyTree) -> tuple[list[Any], Any]:
    """:func:`flatten`, in which None may stand beside a leaf of ``treedef``: Equinox's "no gradient"."""
    values, other = flatten(tree)
    if treedef is None or other == treedef:
        return values, other
    try:
        beside = treedef.flatten_up_to(tree)
    except (ValueError, TypeError):
        return values, other
    full = jax.tree.unflatten(treedef, [HOLE if value is None else value for value in beside])
    return (beside, treedef) if flatten(full)[1] == treedef else (values, other)


def _refuse_unsortable(tree: PyTree, path: tuple[Any, ...] = ()) -> None:
    """A ``ValueError`` for a dict in ``tree`` that JAX cannot flatten, since its keys do not compare."""
    try:
        children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    except ValueError as error:
        if isinstance(tree, dict):
            raise value_error(
                "the keys of a dict do not sort",
                at=keystr(path),
                got=f"{[*tree][:3]}" + (f" and {len(tree) - 3} more" if len(tree) > 3 else ""),
                expected="keys that compare with one another: JAX takes the leaves of a dict in their order",
                fix="write every key as a string, or use a list",
            ) from error
        raise
    for key, child in children:
        if child is not tree:
            _refuse_unsortable(child, (*path, *key))


class Walk(NamedTuple):
    """What one walk over a tree finds: of each leaf and hole the path and the value, in order, and the treedef.

    ``variables`` has the key path and the NNX variable that each leaf is of, or else the leaf itself; it is empty where
    there are none. The ``value`` segment of a variable is left out of the paths.
    """

    paths: list[str]
    values: list[Any]
    treedef: Any
    variables: list[tuple[Any, Any]]

    def leaves(self) -> list[Leaf]:
        """A :class:`Leaf` for each leaf and hole, as :func:`leaves` gives them."""
        values = (node.array if isinstance(node, Rest) else node for node in self.values)
        described = [_describe(path, value) for path, value in zip(self.paths, values, strict=True)]
        if len(set(self.paths)) < len(self.paths):
            twice = next(path for path, count in collections.Counter(self.paths).items() if count > 1)
            numbered = jax.tree.unflatten(self.treedef, range(len(self.paths)))
            keys = [jax.tree_util.keystr(key) for key, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]
            raise value_error(
                "two leaves have the same path",
                at=twice,
                got=" and ".join(key for key, path in zip(keys, self.paths, strict=True) if path == twice),
                expected="a path of its own for each leaf: str(key) of each key, joined by '/'",
                fix="rename one of the keys",
            )
        if self.variables:
            pairs = zip(described, self.variables, strict=True)
            return [VariableLeaf.of(leaf, [tuple(map(name_of, key))], variable) for leaf, (key, variable) in pairs]
        return described


def walk(tree: PyTree) -> Walk:
    """The paths, leaves and holes of a tree, from one walk over it."""
    try:
        pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    except ValueError:
        _refuse_unsortable(tree)
        raise
    paths = [keystr(key) for key, _ in pairs]
    found = _nnx_variables(tree, [key for (key, _), path in zip(pairs, paths, strict=True) if "value" in path])
    variables = []
    for i, (key, value) in enumerate(pairs if found else ()):
        n = next((n for n in range(len(key) - 1, -1, -1) if key[:n] in found), None)
        if n is not None:
            paths[i] = keystr((*key[:n], *key[n + 1 :]))
        variables.append((key, value) if n is None else (key[:n], found[key[:n]]))
    return Walk(paths, [value for _, value in pairs], treedef, variables)


def paths(tree: PyTree) -> list[str]:
    """The path of each leaf and hole, in order; the ``value`` segment of an NNX variable is left out."""
    return walk(tree).paths


def keystr(key: Sequence[Any]) -> str:
    """``encoder/layer_0/kernel`` for a JAX key path: ``jax.tree_util.keystr``, simple, in a third of its time."""
    return "/".join([str(name_of(entry)) for entry in key])


def name_of(entry: Any) -> Any:
    """The key, index or field name that one entry of a JAX key path holds."""
    return getattr(entry, _NAME[type(entry)]) if type(entry) in _NAME else entry


_NAME: dict[type, str] = {
    jax.tree_util.DictKey: "key",
    jax.tree_util.SequenceKey: "idx",
    jax.tree_util.GetAttrKey: "name",
    jax.tree_util.FlattenedIndexKey: "key",
}


def leaves(tree: PyTree) -> list[Leaf]:
    """A :class:`Leaf` for each leaf and hole.

    Raises:
      ValueError: if two leaves have the same path (a key that holds a ``/`` reads as several segments).
      TypeError: if a leaf holds an array and is none: a Keras ``Variable``.
    """
    return walk(tree).leaves()


def _describe(path: str, value: Any) -> Leaf:
    if not is_array(value):
        return Leaf(path)
    if isinstance(value.dtype, str):  # neither jit nor grad takes such an object, and nothing here can update it
        raise type_error(
            "no array, but an object that holds one",
            at=path,
            got=f"a {type(value).__name__} of {value.dtype}",
            expected="a JAX or NumPy array",
            fix="pass the arrays: for Keras {variable.path: variable.value for variable in variables}",
        )
    return Leaf(path, tuple(value.shape), value.dtype, (), value.index if isinstance(value, Part) else None)


def refuse_other_structure(tree: PyTree, like: PyTree, name: str, fix: str) -> None:
    """A ``ValueError`` that names the first path at which two trees differ.

    Trees of NNX variables and of their values have the same paths, and pass.
    """
    got, expected = paths(tree), paths(like)
    if got == expected and (has_variables(tree) or has_variables(like)):
        return
    refuse_other_paths(got, expected, name, fix)
    raise value_error(
        f"{name}: the same paths in other containers",
        at=got[0] if got else "",
        got=str(jax.tree.structure(tree))[:200],
        expected=str(jax.tree.structure(like))[:200],
        fix=fix,
    )


def refuse_other_paths(got: Sequence[str], expected: Sequence[str], name: str, fix: str) -> None:
    """A ``ValueError`` that names the first path by which two lists differ, and their order if that is all."""
    if list(got) == list(expected):
        return
    in_got, in_expected = set(got), set(expected)
    missing = [path for path in expected if path not in in_got]
    unknown = [path for path in got if path not in in_expected]
    also = f", among them {missing[:3]}" if missing else f": {list(expected[:3])}"
    raise value_error(
        f"{name}: another structure" if missing or unknown else f"{name}: the same paths in another order",
        at=[*missing, *unknown, *got][0],
        got=counted(len(got), "leaf", "leaves")
        + (f", among them {unknown[:3]}, which do not belong" if unknown else ""),
        expected=f"{counted(len(expected), 'leaf', 'leaves')}{also}",
        fix=fix,
    )


def has_variables(tree: PyTree) -> bool:
    """Whether there are NNX variables in a tree."""
    return bool(walk(tree).variables)


def is_variable(node: Any) -> bool:
    """Whether ``node`` is an NNX variable, found without importing Flax."""
    return isinstance(node, getattr(sys.modules.get("flax.nnx"), "Variable", ()))


def _nnx_variables(tree: PyTree, keys: list[Any]) -> dict[Any, Any]:
    """The NNX variables in ``tree`` by key path; ``keys`` may be in one."""
    value = jax.tree_util.GetAttrKey("value")
    if "flax.nnx" not in sys.modules or not any(value in key for key in keys):
        return {}
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: is_variable(x) or is_leaf(x))[0]
    return {key: node for key, node in found if is_variable(node)}


def nnx_filter(value: Any) -> Any:
    """``value`` if it is an NNX filter, one for a type of NNX variable, else None; found without importing Flax."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    if isinstance(value, type):
        return nnx.OfType(value) if issubclass(value, nnx.Variable) else None
    return value if type(value).__module__ == nnx.OfType.__module__ else None
