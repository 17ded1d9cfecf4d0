"""A spec resolved for given parameters: one selection per leaf, and the paths, shapes and dtypes of the leaves.

It is made once, in ``init``, and not again for the updates, whose leaves may be missing or have other dtypes or paths.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import described, is_number, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.masks import choice_of
from optax_freeze._spec.memory_kinds import HOST, is_on_host
from optax_freeze._spec.part_source import refuse_other_rows, values_of, with_source
from optax_freeze._spec.plan_digest import PlanLine, record_of
from optax_freeze._spec.plan_nodes import is_placeholder, register_as_static
from optax_freeze._spec.selection import (
    FROZEN,
    TRAINABLE,
    DenseMask,
    DynamicRowIndex,
    RowIndex,
    RowSelection,
    Selection,
)
from optax_freeze._spec.selector_algebra import Choices, ResolvedSpec
from optax_freeze._spec.sharding import copy_like
from optax_freeze._spec.tree import Leaf, Part, PyTree


@register_as_static
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """One selection per leaf of the parameters; an optimizer state keeps the arrays of masks beside it.

    Plans are equal if they have the same leaves, of which the same elements train, in whatever containers.
    """

    leaves: tuple[Leaf, ...]
    selections: tuple[Selection, ...]
    treedef: Any = dataclasses.field(repr=False)  # None in a state that was unpickled
    variables: bool = False  # NNX variables: `update` is given their values, in other containers
    boxed: bool = False  # metadata boxes of Linen, and no NNX variables

    @functools.cached_property
    def is_placeholder(self) -> bool:
        """Whether it was made for the placeholder of ``optax.tree_map_params``."""
        return is_placeholder(self.treedef)

    @functools.cached_property
    def own(self) -> list[int]:
        """The numbers of the leaves of which something trains."""
        return [i for i, selection in enumerate(self.selections) if selection is not FROZEN]

    @property
    def all_frozen(self) -> bool:
        return not self.own

    @functools.cached_property
    def part_indices(self) -> list[Any]:
        """For each leaf the index of the ``Part`` that is its trainable part, or None."""
        return [selection.part_index if leaf.index is None else leaf.index for leaf, selection in self.entries()]

    @property
    def has_parts(self) -> bool:
        return any(index is not None for index in self.part_indices)

    @functools.cached_property
    def kept(self) -> list[int]:
        """The numbers of the leaves whose rows keep their state."""
        return [i for i, selection in enumerate(self.selections) if selection.keep_state]

    @property
    def in_state(self) -> "Plan":
        """The plan of what an optimizer state holds: a leaf whose rows keep their state trains as a whole."""
        if not self.kept:
            return self
        return dataclasses.replace(self, selections=tuple(selection.in_state for selection in self.selections))

    def with_treedef(self, treedef: Any) -> "Plan":
        """The plan, which has lost its treedef if it was unpickled."""
        return self if self.treedef is not None else dataclasses.replace(self, treedef=treedef)

    @property
    def has_masks(self) -> bool:
        return any(isinstance(selection, (DenseMask, DynamicRowIndex)) for selection in self.selections)

    @property
    def lines(self) -> list[PlanLine]:
        """What is compared where a state is read."""
        return list(map(self.line, range(len(self.leaves))))

    def line(self, i: int) -> PlanLine:
        """The shape of a leaf, and which of its elements train."""
        leaf, selection = self.leaves[i], self.selections[i]
        told = f"a leaf of shape {leaf.shape} that {selection}"
        return PlanLine(leaf.path, told, (leaf.shape, record_of(selection)))

    def entries(self, *values: Sequence[Any]) -> Iterator[Any]:
        """For each leaf the leaf, its selection, and what lists of all leaves have for it."""
        return zip(self.leaves, self.selections, *values, strict=True)

    @property
    def as_spec(self) -> ResolvedSpec:
        """The plan as a spec, for trees with the same leaves."""
        return ResolvedSpec(tuple(leaf.path for leaf in self.leaves), Choices(map(choice_of, self.selections)))

    @property
    def masks(self) -> list[Any]:
        """For each leaf the array of its selection, or ``MaskedNode``."""
        return [s.array for s in self.selections]

    def copied_masks(self, values: Sequence[Any]) -> list[Any]:
        """:attr:`masks` with a copy of each array, on the devices of its parameter."""
        pairs = zip(self.selections, values, strict=True)
        return [s.array if _tree.is_masked_node(s.array) else copy_like(s.array, value) for s, value in pairs]

    def with_masks(self, masks: Sequence[Any]) -> "Plan":
        """The plan with these arrays of a state in its selections; an empty list changes nothing."""
        pairs = zip(self.selections, masks, strict=True) if masks else ()
        selections = tuple(s if _tree.is_masked_node(x) else s.with_array(x, of_state=True) for s, x in pairs)
        return dataclasses.replace(self, selections=selections) if masks else self

    def without_masks(self) -> "Plan":
        """The static part of the plan, which jit compares by value."""
        return dataclasses.replace(self, selections=tuple(s.with_array(_tree.MASKED_NODE) for s in self.selections))

    def parameters(self, tree: PyTree) -> PyTree:
        """The shapes of the parameters given to ``init``; ``tree`` itself if the plan was unpickled."""
        shapes = [_tree.MASKED_NODE if leaf.dtype is None else leaf.struct for leaf in self.leaves]
        return tree if self.treedef is None else jax.tree.unflatten(self.treedef, shapes)

    def extent(self, params: PyTree) -> Literal["nothing", "everything"] | None:
        """Whether nothing or everything is frozen; None otherwise, or if leaves are missing."""
        found = {s for leaf, s in self.entries() if leaf.inexact}
        if len(found) != 1 or any(map(_tree.is_leaf, _tree.flatten(params)[0])):
            return None
        return {TRAINABLE: "nothing", FROZEN: "everything"}.get(*found)  # type: ignore[return-value]

    def labels(self, treedef: Any = None) -> PyTree:
        labels = ["frozen" if s is FROZEN else "trainable" for s in self.selections]
        return jax.tree.unflatten(self.treedef if treedef is None else treedef, labels)

    def refuse_all_frozen(self, what: str, frozen: Any) -> None:
        if self.all_frozen:
            could_train = sum(leaf.inexact for leaf in self.leaves)
            got = f"{described(frozen)}: all {len(self.leaves)} leaves, {could_train} of them could be trained"
            expected = "at least one trainable floating-point or complex array"
            fix = "freeze less; True means frozen (fz.all_except(...) freezes everything else)"
            raise value_error(f"{what}: every leaf is frozen", at="frozen", got=got, expected=expected, fix=fix)

    def align(self, tree: PyTree, name: str, fix: str | None = None, params: PyTree = None) -> tuple[list[Any], Any]:
        """The leaves and the treedef of a tree that must have the trainable leaves of the parameters.

        That of a Python number in ``params`` may be missing: some libraries differentiate only arrays.
        """
        values, treedef = _tree.flatten_beside(self.treedef, tree)
        if self.treedef is None or treedef != self.treedef:
            self._refuse_other_tree(tree, name)
        numbers = functools.cache(lambda: {i for i, x in enumerate(_tree.flatten(params)[0]) if is_number(x)})
        for i, (leaf, selection, value) in enumerate(self.entries(values)):
            if selection is not FROZEN and not (_is_missing(value) and i in numbers()):
                refuse_other_leaf(value, leaf, selection, name, fix)
                refuse_other_rows(value, selection, leaf.path, name)
        return values, treedef

    def align_gradients(
        self, updates: PyTree, params: PyTree, fix: str | None
    ) -> tuple[list[Any], Any, frozenset[int]]:
        """:meth:`align` with zeros for the trainable Python numbers that have no gradient, and their positions."""
        values, treedef = self.align(updates, "updates", fix, params)
        missing = frozenset(i for i, s in enumerate(self.selections) if s is not FROZEN and _is_missing(values[i]))
        for i in missing:
            values[i] = jnp.zeros((), self.leaves[i].dtype)
        return values, treedef, missing

    def _refuse_other_tree(self, tree: PyTree, name: str) -> None:
        fix = "pass the tree that belongs to the parameters given to `init`"
        if self.variables:
            fix += "; after freezing or thawing a module, create a new nnx.Optimizer (fz.migrate keeps its moments)"
        expected = [leaf.path for leaf in self.leaves]
        fix = _tree.with_fix_of_module(fix, _tree.leaves(tree), expected)
        _tree.refuse_other_paths(_tree.paths(tree), expected, name, fix)
        if self.treedef is not None and not self.variables:
            _tree.refuse_other_structure(tree, jax.tree.unflatten(self.treedef, range(len(expected))), name, fix)

    def take(self, values: Sequence[Any]) -> list[Any]:
        """The trainable part of each leaf for an optimizer; of a ``Part`` the values alone."""
        return self.full(self._taken(values))

    def _taken(self, values: Sequence[Any]) -> dict[int, Any]:
        found = {}
        for i in self.own:
            selection, value = self.selections[i], values[i]
            refuse_on_host(self.leaves[i].path, selection, value)
            if isinstance(value, Part):
                found[i] = dataclasses.replace(value, values=values_of(value, selection), trains=None, source=None)
            else:
                found[i] = selection.take(value)
        return found

    def full(self, own: Mapping[int, Any]) -> list[Any]:
        """A list of all leaves, given some of them by their numbers."""
        taken: list[Any] = [_tree.MASKED_NODE] * len(self.leaves)
        for i, value in own.items():
            taken[i] = value
        return taken

    def trainable(self, treedef: Any, values: Sequence[Any]) -> PyTree:
        """The trainable part as a tree for an optimizer: arrays, also of the leaves that train in part."""
        return jax.tree.unflatten(treedef, self.full(self.trainable_leaves(values)))

    def trainable_leaves(self, values: Sequence[Any]) -> dict[int, Any]:
        """The trainable part of leaves as arrays, by their numbers."""
        taken = {i: value.values if isinstance(value, Part) else value for i, value in self._taken(values).items()}
        return {i: jnp.asarray(value) if is_number(value) else value for i, value in taken.items()}

    def parts_of(self, values: Sequence[Any]) -> list[Any]:
        """The inverse of :meth:`trainable`: each array of a leaf that trains in part as its ``Part``."""
        found = list(values)
        for i, (value, leaf, index) in enumerate(zip(values, self.leaves, self.part_indices, strict=True)):
            if index is not None and not _tree.is_leaf(value):
                found[i] = Part(value, index, leaf.shape)
        return found

    def with_sources(self, parts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Each ``Part`` says where its rows come from."""
        return [with_source(*each) for each in zip(parts, self.selections, values, strict=True)]

    def rest(self, values: Sequence[Any]) -> list[Any]:
        """The rest of each leaf; ``MaskedNode`` beside a ``Part``."""
        pairs = zip(self.selections, values, strict=True)
        return [_tree.MASKED_NODE if isinstance(v, Part) and s is not FROZEN else s.rest(v) for s, v in pairs]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self is other or (self.selections, self.leaves) == (other.selections, other.leaves)

    def __hash__(self) -> int:
        return len(self.leaves)  # that of all leaves would take time at each call of a jitted function

    def __reduce__(self) -> Any:
        return Plan, (self.leaves, self.selections, None, self.variables, self.boxed)


def _is_missing(value: Any) -> bool:
    return value is None or _tree.is_masked_node(value)


def may_stay_on_host(selection: Selection) -> bool:
    """Whether a leaf may be in host memory: if it is frozen, or its trainable rows are static."""
    return selection is FROZEN or isinstance(selection, RowIndex)


def refuse_on_host(path: str, selection: Selection, value: Any) -> None:
    if is_on_host(value) and not may_stay_on_host(selection):
        got = f"{described(value)} in {HOST}, which {selection}"
        expected = "an array in device memory; frozen leaves and leaves with static rows may be in host memory"
        fix = "bring it back with this spec: params = fz.offload(params, frozen)"
        raise value_error("a trainable parameter is in host memory", at=path, got=got, expected=expected, fix=fix)


def refuse_other_leaf(value: Any, leaf: Leaf, selection: Selection, name: str, fix: str | None = None) -> None:
    """Refuses a value that is neither an array of the leaf's shape nor the ``Part`` of its trainable elements."""
    index = selection.part_index if selection.in_part else leaf.index
    what, got = f"{name}: not the trainable part of the leaf", ""
    if _is_missing(value):
        what, got = f"{name}: a trainable leaf is missing", "None" if value is None else "optax.MaskedNode()"
    elif isinstance(value, Part):
        if index is None or value.index != index or value.shape != leaf.shape:
            is_rows = isinstance(value.index, RowSelection)
            rows = f"a leaf frozen by {choice_of(value.index)}" if is_rows else "single elements"
            got = f"a Part of {rows}, of shape {value.shape}"
    elif leaf.index is not None or (selection.in_part and not _fits(np.shape(value), leaf, selection, name)):
        got = f"an array of shape {np.shape(value)}"
    if got:
        part = ", or its trainable Part" * (selection.in_part or leaf.index is not None)
        if name == "params" and _tree.is_masked_node(value):
            fix = "pass the full parameters: fz.combine(trainable, rest)"
        if fix is None or not (isinstance(value, Part) or _tree.is_masked_node(value)):
            fix = "give the same `frozen` to the gradient, the optimizer and fz.apply_updates"
        raise value_error(what, at=leaf.path, got=got, expected=f"an array of shape {leaf.shape}{part}", fix=fix)


def _fits(shape: tuple[int, ...], leaf: Leaf, selection: Selection, name: str) -> bool:
    """Whether an array has the leaf's shape; updates may have an axis of examples, over which a mask broadcasts."""
    broadcasts = name == "updates" and isinstance(selection, DenseMask) and not selection.compact
    return shape == leaf.shape or (broadcasts and shape[1:] == leaf.shape)
