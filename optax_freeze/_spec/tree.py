"""How this library traverses a pytree: leaves and their paths, and ``Part``, the trainable part of a leaf.

``optax.MaskedNode()`` in place of a leaf that was taken out counts as a leaf here and has a path; for JAX it is a node
without children.
"""

import collections
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_freeze._errors import counted, is_array, is_number, is_scalar, type_error, value_error

PyTree: TypeAlias = Any
"""Any nesting of containers known to JAX."""

MASKED_NODE = optax.MaskedNode()
"""Stands in the place of a leaf that was taken out; every Optax transformation skips it."""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Part:
    """The trainable rows or elements of a partially frozen leaf: a pytree node whose child is an array.

    An array of a few rows would silently broadcast against the full leaf; a ``Part`` combines only with a ``Part`` of
    the same rows.

    Attributes:
      values: the trainable rows, with the shape of the leaf except along their axis; or a vector of the trainable
        elements.
      index: which rows they are, or how many elements; static.
      shape: the shape of the full leaf; static.
      trains: in updates of dynamic rows a second child: for each row of the leaf whether it trains.
        :func:`optax_freeze.apply_updates` reads it. Otherwise None.
      source: where dynamic rows, or elements, come from; static. None in an optimizer state.

    Example:
      >>> import optax_freeze as fz
      >>> trainable, _ = fz.partition({"embed": jnp.zeros((5, 2))}, {"embed": fz.rows(slice(0, 3))})
      >>> trainable["embed"].values.shape, trainable["embed"].shape
      ((2, 2), (5, 2))
    """

    values: Any
    index: Any = None
    shape: tuple[int, ...] | None = None
    trains: Any = None
    source: Any = None

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        children = [("values", self.values), *([] if self.trains is None else [("trains", self.trains)])]
        static = self.index, self.shape, self.source
        return [(jax.tree_util.GetAttrKey(name), child) for name, child in children], static

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "Part":
        """A ``Part`` of these children, whose source depends on the trace: see :meth:`PartSource.around`."""
        (index, shape, source), (values, *trains) = static, children
        source = None if source is None else source.around(children)
        return cls(values, index, shape, trains[0] if trains else None, source)

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def __radd__(self, full: Any) -> Any:
        what, at = "a Part cannot be added to the full leaf", f"a leaf of shape {self.shape}"
        got = "optax.apply_updates, or a sum, with updates of only the trainable parameters"
        fix = "use fz.apply_updates, or fz.freeze(optimizer, frozen) with full_updates=True"
        raise type_error(what, at=at, got=got, expected="fz.apply_updates(params, updates)", fix=fix)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rest:
    """The frozen part of a partially frozen leaf, stored as the full array, with the selection of what is frozen.

    ``dtype`` is that of the leaf, where ``array`` has been converted to another.
    """

    array: Any
    selection: Any
    dtype: Any = dataclasses.field(default=None, metadata={"static": True})


class Leaf(NamedTuple):
    """What a selector sees of a leaf, which never includes its values.

    ``shape`` and ``dtype`` are None for ``MaskedNode`` and objects. ``aliases`` are the other paths of a shared NNX
    variable; a pattern may match any of them. ``index`` is the index of a ``Part``.
    """

    path: str
    shape: tuple[int, ...] | None = None
    dtype: Any = None
    aliases: tuple[str, ...] = ()
    index: Any = None

    @property
    def inexact(self) -> bool:
        """Whether the leaf can have a gradient."""
        return self.dtype is not None and _is_inexact(self.dtype)

    @property
    def may_train(self) -> bool:
        """Whether the leaf can have a gradient, or is not an array: it may be the ``MaskedNode`` of one that can."""
        return self.dtype is None or self.inexact

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        assert self.shape is not None
        return _struct(self.shape, self.dtype)


class VariableLeaf(Leaf):
    """A leaf of a tree of NNX variables, with what an NNX filter sees: the keys of each path, and the variable."""

    names: tuple[tuple[Any, ...], ...]
    variable: Any

    @classmethod
    def of(cls, leaf: Leaf, names: Sequence[tuple[Any, ...]], variable: Any) -> "VariableLeaf":
        self = cls(*leaf)
        self.names, self.variable = tuple(names), variable
        return self


class ShapeDtypeStruct(jax.ShapeDtypeStruct):
    """A shape and dtype that raise where a value is needed; JAX's are true, and unequal to any number."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a jax.ShapeDtypeStruct has no values")

    __bool__ = __array__ = __float__ = __int__ = _refuse

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, jax.ShapeDtypeStruct):
            return super().__eq__(other)
        return self._refuse()

    __hash__ = jax.ShapeDtypeStruct.__hash__


_struct = functools.lru_cache(ShapeDtypeStruct)


def struct_of(value: Any) -> Any:
    """The shape and dtype of an array; anything else as it is."""
    return _struct(tuple(value.shape), value.dtype) if is_array(value) else value


def is_weak(value: Any) -> bool:
    """Whether a value takes the dtype of its other operand, as Python numbers do."""
    return is_number(value) or bool(getattr(value, "weak_type", False))


def is_masked_node(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def is_leaf(node: Any) -> bool:
    """Whether ``node`` stands for one leaf of the parameters: a ``MaskedNode``, a ``Part`` or a ``Rest``."""
    return isinstance(node, (optax.MaskedNode, Part, Rest))


def bare(node: Any) -> Any:
    """The array of a ``Part``, even of one around an NNX variable, or the array itself."""
    return next(iter(jax.tree.leaves(node)), MASKED_NODE) if isinstance(node, Part) else node


def as_arrays(tree: PyTree) -> PyTree:
    """A tree in which each ``Part`` is the array of its values."""
    return jax.tree.map(lambda node: node.values if isinstance(node, Part) else node, tree, is_leaf=is_leaf)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def flatten(tree: PyTree, is_leaf: Callable[[Any], bool] = is_leaf) -> tuple[list[Any], Any]:
    """``jax.tree.flatten`` in which ``MaskedNode``, and nodes that stand for a partially frozen leaf, are leaves."""
    with _refuse_unsortable(tree):
        return jax.tree.flatten(tree, is_leaf=is_leaf)


def flatten_beside(treedef: Any, tree: PyTree) -> tuple[list[Any], Any]:
    """:func:`flatten`; a leaf of ``treedef`` may be None in ``tree``, which in Equinox means "no gradient"."""
    values, other = flatten(tree)
    if treedef is None or other == treedef:
        return values, other
    with contextlib.suppress(ValueError, TypeError):
        beside = treedef.flatten_up_to(tree)
        full = jax.tree.unflatten(treedef, [MASKED_NODE if value is None else value for value in beside])
        if flatten(full)[1] == treedef:
            return beside, treedef
    return values, other


@contextlib.contextmanager
def _refuse_unsortable(tree: PyTree) -> Iterator[None]:
    """Adds the path of the dict to JAX's error for keys that do not sort."""
    try:
        yield
    except ValueError as error:
        pairs = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_does_not_sort)[0]
        for key, node in pairs:
            if _does_not_sort(node):
                what = "the keys of a dict do not sort"
                got = f"{[*node][:3]}" + (f" and {len(node) - 3} more" if len(node) > 3 else "")
                expected = "keys that can be compared: JAX orders the leaves of a dict by its keys"
                fix = "write every key as a string, or use a list"
                raise value_error(what, at=keystr(key), got=got, expected=expected, fix=fix) from error
        raise


def _does_not_sort(node: Any) -> bool:
    try:
        jax.tree.structure(node, is_leaf=lambda child: child is not node)
    except ValueError:
        return isinstance(node, dict)
    return False


class Walk(NamedTuple):
    """The path and the value of each leaf and ``MaskedNode`` of a tree, in order, and the treedef.

    ``variables`` has for each leaf the key path and the NNX variable, or the leaf itself; it is empty if there are
    none. ``wrapped`` says whether there are NNX variables or metadata boxes of Linen, whose segment (``value``) paths
    omit. ``settings`` are the positions of numbers without a gradient.
    """

    paths: list[str]
    values: list[Any]
    treedef: Any
    variables: list[tuple[Any, Any]]
    wrapped: bool = False
    settings: frozenset[int] = frozenset()

    def leaves(self) -> list[Leaf]:
        """A :class:`Leaf` for each leaf and ``MaskedNode``; an error for objects with an array and for equal paths."""
        described = list(map(_describe, self.paths, self.values))
        for i in self.settings:
            described[i] = Leaf(self.paths[i])
        if len(set(self.paths)) < len(self.paths):
            [(twice, _)] = collections.Counter(self.paths).most_common(1)
            numbered = jax.tree.unflatten(self.treedef, range(len(self.paths)))
            keys = [jax.tree_util.keystr(key) for key, _ in jax.tree_util.tree_leaves_with_path(numbered)]
            got = " and ".join(key for key, path in zip(keys, self.paths, strict=True) if path == twice)
            expected, fix = "a unique path for each leaf: str(key) of each key, joined by '/'", "rename one of the keys"
            raise value_error("two leaves have the same path", at=twice, got=got, expected=expected, fix=fix)
        if not self.variables:
            return described
        pairs = zip(described, self.variables, strict=True)
        return [VariableLeaf.of(leaf, [tuple(map(name_of, key))], variable) for leaf, (key, variable) in pairs]


def walk(tree: PyTree, is_leaf: Callable[[Any], bool] = is_leaf) -> Walk:
    """The paths, leaves and ``MaskedNode`` of a tree."""
    kinds, wrappers = _wrapper_types(), []

    def stops(node: Any) -> bool:
        if isinstance(node, kinds):
            wrappers.append(node)
        return is_leaf(node)

    with _refuse_unsortable(tree):
        pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stops if kinds else is_leaf)
    paths, values, variables = [keystr(key) for key, _ in pairs], [value for _, value in pairs], []
    if wrappers:
        found = dict(_wrappers(tree, is_leaf))
        for i, (key, value) in enumerate(pairs):
            around = [n for n in range(len(key)) if key[:n] in found]
            paths[i] = keystr([entry for n, entry in enumerate(key) if n not in around])
            n = next((n for n in around if is_variable(found[key[:n]])), None)
            variables.append((key, value) if n is None else (key[:n], found[key[:n]]))
    of_nnx = any(map(is_variable, wrappers))
    return Walk(paths, values, treedef, variables if of_nnx else [], len(wrappers) > 0, _settings(tree, values))


def _wrappers(
    tree: PyTree, is_leaf: Callable[[Any], bool], above: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The key path of each NNX variable and metadata box with one child, whose own key is not in a path."""
    for key, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: is_wrapper(x) or is_leaf(x)):
        if is_wrapper(node):
            here = (*above, *key)
            children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x, node=node: x is not node)
            if len(children) == 1:
                yield here, node
            for [entry], child in children:
                yield from _wrappers(child, is_leaf, (*here, entry))


def _settings(tree: PyTree, values: Sequence[Any]) -> frozenset[int]:
    """The positions of Python numbers in Equinox modules: ``equinox.filter_grad`` differentiates arrays alone."""
    module = getattr(sys.modules.get("equinox"), "Module", None)
    if module is None or not any(map(is_scalar, values)):
        return frozenset()
    found, start = set(), 0
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, module) or is_leaf(node)):
        inside = flatten(node)[0] if isinstance(node, module) else []
        found |= {start + i for i, value in enumerate(inside) if is_scalar(value)}
        start += len(inside) if isinstance(node, module) else 1
    return frozenset(found)


def paths(tree: PyTree, is_leaf: Callable[[Any], bool] = is_leaf) -> list[str]:
    return walk(tree, is_leaf).paths


def keystr(key: Sequence[Any]) -> str:
    """``encoder/layer_0/kernel``: a faster ``jax.tree_util.keystr(simple=True, separator="/")``."""
    return "/".join([str(name_of(entry)) for entry in key])


def name_of(entry: Any) -> Any:
    return getattr(entry, _NAME[type(entry)]) if type(entry) in _NAME else entry


_NAME: dict[type, str] = {
    jax.tree_util.DictKey: "key",
    jax.tree_util.SequenceKey: "idx",
    jax.tree_util.GetAttrKey: "name",
    jax.tree_util.FlattenedIndexKey: "key",
}


def leaves(tree: PyTree) -> list[Leaf]:
    return walk(tree).leaves()


def _describe(path: str, value: Any) -> Leaf:
    value = value.array if isinstance(value, Rest) else value
    if is_number(value):
        return Leaf(path, (), jnp.result_type(value))
    if not is_array(value):
        return Leaf(path)
    if isinstance(value.dtype, str):  # jit and grad do not accept such an object either
        got, expected = f"a {type(value).__name__} of {value.dtype}", "a JAX or NumPy array"
        fix = "pass the arrays: for Keras {variable.path: variable.value for variable in variables}"
        raise type_error("not an array, but an object that contains one", at=path, got=got, expected=expected, fix=fix)
    return Leaf(path, tuple(value.shape), value.dtype, (), value.index if isinstance(value, Part) else None)


def refuse_other_structure(tree: PyTree, like: PyTree, name: str, fix: str, *, boxes_are_values: bool = False) -> None:
    """Raises a ``ValueError`` that names the first path at which two trees differ; NNX variables equal their values."""
    got, expected = walk(tree), walk(like)
    refuse_other_paths(got.paths, expected.paths, name, fix)
    wrapped = [each.wrapped if boxes_are_values else each.variables for each in (got, expected)]
    if not any(wrapped):
        what = f"{name}: the same paths in different containers"
        at = got.paths[0] if got.paths else ""
        raise value_error(what, at=at, got=str(got.treedef)[:200], expected=str(expected.treedef)[:200], fix=fix)


def refuse_other_paths(got: Sequence[str], expected: Sequence[str], name: str, fix: str) -> None:
    """A ``ValueError`` if two lists of paths differ; it names the first path that is in one of them only."""
    if list(got) == list(expected):
        return
    in_got, in_expected = set(got), set(expected)
    missing = [path for path in expected if path not in in_got]
    unknown = [path for path in got if path not in in_expected]
    what = f"{name}: different tree structure" if missing or unknown else f"{name}: the same paths in a different order"
    more = f", including {unknown[:3]}, which should not be there" * bool(unknown)
    also = f", including {missing[:3]}" if missing else f": {list(expected[:3])}"
    sizes = [counted(len(each), "leaf", "leaves") for each in (got, expected)]
    at = [*missing, *unknown, *got][0]
    raise value_error(what, at=at, got=sizes[0] + more, expected=sizes[1] + also, fix=fix)


def with_fix_of_module(fix: str, got: Sequence[Leaf], paths: Sequence[str]) -> str:
    """A fix, with that for an Equinox module of which a state has a filtered tree: no leaf that it lacks can train."""
    extra = [leaf for leaf in got if leaf.path not in paths]
    if "equinox" not in sys.modules or not extra or any(leaf.inexact for leaf in extra):
        return fix
    both = "pass the full Equinox module in both places, state = tx.init(model)"
    return f"{fix}; {both}, or eqx.filter(model, eqx.is_inexact_array) in both"


def is_variable(node: Any) -> bool:
    """Whether ``node`` is an NNX variable, found without importing Flax."""
    return isinstance(node, getattr(sys.modules.get("flax.nnx"), "Variable", ()))


def is_wrapper(node: Any) -> bool:
    """Whether ``node`` is an NNX variable or a metadata box of Linen (``nn.Partitioned``), found as above."""
    return isinstance(node, _wrapper_types())


def _wrapper_types() -> tuple[type, ...]:
    names = (("flax.nnx", "Variable"), ("flax.core.meta", "AxisMetadata"))
    found = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(kind for kind in found if kind is not None)


def nnx_filter(value: Any) -> Any:
    """The NNX filter for a type of NNX variable, ``value`` if it is a filter, else None."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(value, type):
        return nnx.OfType(value) if issubclass(value, nnx.Variable) else None
    return value if nnx is not None and type(value).__module__ == nnx.OfType.__module__ else None


def refuse_half_a_tree(params: PyTree, what: str, expected: str, fix: str) -> None:
    """A ``ValueError`` at the first leaf of which not all is there."""
    for i, value in enumerate(flatten(params)[0]):
        if is_leaf(value):
            got = "optax.MaskedNode()" if is_masked_node(value) else "part of a leaf"
            raise value_error(what, at=paths(params)[i], got=got, expected=expected, fix=fix)
