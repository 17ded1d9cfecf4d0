"""Lists the arrays of an optimizer state by *address*: the path without the wrappers that freezing adds.

The moment of ``encoder/kernel`` in the state of Adam has the address ``0/mu/encoder/kernel``. Inside
:func:`optax_freeze.freeze`, a group of :func:`optax_freeze.freeze_when` or a label of ``optax.multi_transform``, its
path is different, but its address is the same.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._errors import value_error
from optax_freeze._optimizer.freeze import FreezeState
from optax_freeze._optimizer.freeze_when import FreezeWhenState
from optax_freeze._optimizer.union import UnionState
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import (
    FROZEN,
    TRAINABLE,
    DenseMask,
    DynamicRowIndex,
    RowSelection,
    Selection,
    shape_of_part,
)
from optax_freeze._spec.tree import Part, PyTree
from optax_freeze._state.own_states import outermost_states
from optax_freeze._state.owning_parameter import parameter_of

_WRAPPERS = (FreezeState, FreezeWhenState, UnionState, optax.transforms.PartitionState, optax.MaskedState)

_COUNTING_WRAPPERS = (
    optax.MultiStepsState,
    optax.ApplyIfFiniteState,
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
    optax.ConditionallyTransformState,
    optax.ConditionallyMaskState,
)
"""States around that of an optimizer, with numbers of their own."""


class Scope(NamedTuple):
    """The names of the groups, labels and parts around an array, and their trainable leaves, or None if unknown."""

    names: tuple[str, ...] = ()
    trains: frozenset[str] | None = None


class _Subtree(NamedTuple):
    """A subtree of a state with one address and one scope."""

    path: str
    address: str | None  # None for fields of this library's own states, which `init` creates
    scope: Scope = Scope()
    parts: tuple[Mapping[str, Selection], ...] = ()  # the partially frozen leaves of the plans around it
    indices: Mapping[str, tuple[Any, Any]] = {}  # `index` and `shape` of each `Part` that an optimizer has as an array
    optional: bool = False
    wrapper_field: bool = False

    def inside(self, name: str, plan: Plan | None = None, group: str | None = None) -> "_Subtree":
        """The subtree at ``name``, with the same address."""
        (names, trains), parts, indices = self.scope, self.parts, self.indices
        if plan is not None:
            plan = plan.in_state
            selections = [(leaf.path, selection) for leaf, selection in plan.entries()]
            trains = frozenset(path for path, selection in selections if selection is not FROZEN)
            parts = (*parts, {path: selection for path, selection in selections if selection.in_part})
            pairs = zip(plan.leaves, plan.part_indices, strict=True)
            indices = {leaf.path: (index, leaf.shape) for leaf, index in pairs if index is not None}
        names = names if group is None else (*names, group)
        return self._replace(path=join(self.path, name), scope=Scope(names, trains), parts=parts, indices=indices)

    def below(self, name: str, *, optional: bool = False, wrapper_field: bool = False) -> "_Subtree":
        """The subtree at ``name``, which is appended to the address."""
        path, address = join(self.path, name), join(self.address, name)
        return self._replace(path=path, address=address, optional=optional, wrapper_field=wrapper_field)


def _subtrees(node: Any, at: _Subtree) -> Iterator[_Subtree]:
    if isinstance(node, _WRAPPERS):
        yield _Subtree(at.path, None)
    if isinstance(node, optax.MaskedState):
        yield from _subtrees(node.inner_state, at.inside("inner_state"))
    elif isinstance(node, optax.transforms.PartitionState):
        for label, inner in node.inner_states.items():
            name = _tree.keystr([jax.tree_util.DictKey(label)])
            yield from _subtrees(inner, at.inside(f"inner_states/{name}", group=name))
    elif isinstance(node, FreezeState):
        partition: Any = node.inner_state
        inside = at.inside("inner_state/inner_states/trainable/inner_state", node.current_plan)
        yield from _subtrees(partition.inner_states["trainable"].inner_state, inside)
    elif isinstance(node, UnionState):
        for n, part in enumerate(node.parts):
            yield from _subtrees(part, at.inside(f"parts/{n}", group=f"part {n}"))
    elif isinstance(node, FreezeWhenState):
        yield at.below("step", optional=True)
        *plans, ungrouped = node.current_plan.plans
        for name, plan in zip(node.plan.names, plans, strict=True):
            yield at.below(f"groups/{name}/condition_state", optional=True)
            yield from _subtrees(node.groups[name].inner_state, at.inside(f"groups/{name}/inner_state", plan, name))
        yield from _subtrees(node.ungrouped_state, at.inside("ungrouped_state", ungrouped, ""))
        yield from _subtrees(node.coupled_state, at.below("coupled_state"))
    elif isinstance(node, _COUNTING_WRAPPERS):
        for name, inner in node._asdict().items():
            yield from _subtrees(inner, at.below(name, wrapper_field=getattr(inner, "shape", None) == ()))
    else:
        yield at
        for path, inner in outermost_states(node, (*_WRAPPERS, *_COUNTING_WRAPPERS)):
            yield from _subtrees(inner, at.below(path))


def join(*paths: str | None) -> str:
    """Joins several paths, some of which may be empty."""
    return "/".join(path for path in paths if path)


class Entry(NamedTuple):
    """One array, ``Part`` or ``MaskedNode`` of a state.

    What an optimizer has for a leaf that trains in part is a ``Part`` here: of an array, or of a list of arrays. Real
    and imaginary parts are a list of arrays.
    """

    address: str | None  # None for a field of this library's own states
    value: Any
    scope: Scope = Scope()
    optional: bool = False  # a switch or step of `freeze_when`, which other states do not have
    parts: tuple[Mapping[str, Selection], ...] = ()
    wrapper_field: bool = False  # a number of a wrapper around optimizers, such as the steps of `MultiSteps`
    leaf: str | None = None  # the path of the parameter that the array belongs to
    shape: tuple[int, ...] = ()  # the shape of this parameter
    selection: Selection | None = TRAINABLE  # the elements of this parameter that train, or None if unknown
    nodes: int = 1  # how many leaves of the state it is
    moved: Any = None  # of an old state: the `Moved` rows of its parameter, if these are not where they were

    @property
    def arrays(self) -> list[Any]:
        """The array, the arrays in the ``Part``, or none."""
        return jax.tree.leaves(self.value)

    @property
    def name(self) -> str:
        """The address, and the groups around it."""
        groups = ", ".join(name or "no group" for name in self.scope.names)
        return f"{self.address} [{groups}]" if self.scope.names else str(self.address)

    @property
    def tree(self) -> str:
        """The address of the tree that contains the entry at the path of its parameter."""
        return str(self.address).removesuffix(self.leaf or "").rstrip("/")

    @property
    def shape_of_part(self) -> tuple[int, ...]:
        """The shape of what an optimizer receives of its parameter."""
        if not isinstance(self.value, Part):
            return self.shape
        return shape_of_part(self.value.index, self.shape)

    @property
    def held(self) -> np.ndarray:
        """A mask of the elements of its parameter that it holds, which broadcasts to the parameter's shape now."""
        frozen = False if self.selection is None else self.selection.frozen(len(self.shape))
        held = ~np.asarray(frozen).reshape(np.shape(frozen) or (1,) * len(self.shape))
        return held if self.moved is None else self.moved.take(held, False)


def entries_of(state: PyTree, shapes: Mapping[str, Any], largest: int = 0) -> list[Entry]:
    """The entries of a state, in its order. ``shapes`` gives the shape of each parameter by path.

    ``largest`` is the number of parameters in a tree that was taken out of the state.
    """
    # The longest path is that of the innermost wrapper around an array, which says most about it.
    subtrees = sorted(_subtrees(state, _Subtree("", "")), key=lambda subtree: -len(subtree.path))
    entries: list[Entry] = []
    indices: list[Mapping[str, Any]] = []
    for path, value in zip(_tree.paths(state), _tree.flatten(state)[0], strict=True):
        at = next(at for at in subtrees if not at.path or path == at.path or path.startswith(at.path + "/"))
        if at.address is None:
            entry = Entry(None, value, optional=True)
        else:
            address = join(at.address, path[len(at.path) :].lstrip("/"))
            entry = Entry(address, value, at.scope, at.optional, at.parts, at.wrapper_field)
        address = _address_of_list(entry, at.indices, shapes)
        if address is not None and entries and (entries[-1].address, entries[-1].scope) == (address, entry.scope):
            entries[-1] = entries[-1]._replace(value=[*entries[-1].value, value], nodes=entries[-1].nodes + 1)
        else:
            entries.append(entry if address is None else entry._replace(address=address, value=[value]))
            indices.append(at.indices)
    owner_of = parameter_of((entry.address for entry in entries if entry.address is not None), shapes, largest)
    pairs = zip(entries, indices, strict=True)
    entries = [entry if entry.optional else _with_leaf(entry, its, shapes, owner_of) for entry, its in pairs]
    return _joined(entries, indices, shapes)


def _address_of_list(entry: Entry, indices: Mapping[str, Any], shapes: Mapping[str, Any]) -> str | None:
    """The address of the list that an array is in, if it is one for a leaf that trains in part: SM3 has such lists."""
    segments = str(entry.address).split("/")
    ends = lambda n: ("/".join(segments[i:n]) for i in range(n))  # noqa: E731
    if entry.optional or not segments[-1].isdigit() or any(path in shapes for path in ends(len(segments))):
        return None
    is_of_part = any(path in indices for path in ("", *ends(len(segments) - 1)))
    return "/".join(segments[:-1]) if is_of_part else None


def _with_leaf(
    entry: Entry, indices: Mapping[str, Any], shapes: Mapping[str, Any], owner_of: Callable[..., str | None]
) -> Entry:
    """Adds the parameter that an entry belongs to, if there is one."""
    leaf = owner_of(str(entry.address), True)
    if leaf is None or not _is_part(entry.value, indices.get(leaf)):
        leaf = owner_of(str(entry.address))
    return entry if leaf is None else _of_leaf(entry, leaf, indices, shapes)


def _joined(entries: Sequence[Entry], indices: Sequence[Mapping[str, Any]], shapes: Mapping[str, Any]) -> list[Entry]:
    """The entries; real and imaginary parts are one: several arrays below the path of a parameter, all of its shape."""
    below: dict[Any, list[int]] = collections.defaultdict(list)
    for i, entry in enumerate(entries):
        segments = [] if entry.leaf is not None or entry.optional else str(entry.address).split("/")
        for start, stop in itertools.combinations(range(len(segments)), 2):
            if (path := "/".join(segments[start:stop])) in shapes:
                below["/".join(segments[:stop]), path, entry.scope].append(i)
    found = dict(enumerate(entries))
    for (address, leaf, _), places in below.items():
        its, of_parts = [entries[i] for i in places], indices[places[0]]
        shape = shape_of_part(*of_parts[leaf]) if leaf in of_parts else shapes[leaf]
        # Of paths that end alike, the longest comes first.
        is_first = all(found.get(i) is entry for i, entry in zip(places, its, strict=True))
        is_run = places[-1] - places[0] == len(places) - 1 > 0
        if is_first and is_run and shape and all(np.shape(entry.value) == shape for entry in its):
            joined = its[0]._replace(address=address, value=[e.value for e in its], nodes=sum(e.nodes for e in its))
            for i in places[1:]:
                del found[i]
            found[places[0]] = _of_leaf(joined, leaf, of_parts, shapes)
    return [*found.values()]


def _of_leaf(entry: Entry, leaf: str, indices: Mapping[str, Any], shapes: Mapping[str, Any]) -> Entry:
    """An entry that belongs to a parameter."""
    if leaf in indices and not _tree.is_leaf(entry.value):
        entry = entry._replace(value=Part(entry.value, *indices[leaf]))
    # A leaf that is a hole among trainable parameters has no shape.
    shape: Any = shapes[leaf] or (entry.value.shape if isinstance(entry.value, Part) else ())
    if leaf == "" and not isinstance(entry.value, Part) and np.shape(entry.value)[-len(shape) :] != shape:
        return entry  # neither of the shape of the only parameter, nor a history of it
    around = [parts[leaf] for parts in entry.parts if leaf in parts]
    return entry._replace(leaf=leaf, shape=shape, selection=_selection(entry.value, around))


def _is_part(value: Any, part: tuple[Any, Any] | None) -> bool:
    """Whether what is at the path of a leaf is known to be its own: several arrays, or one of the shape of its part."""
    if isinstance(value, Part) or part is None or _tree.is_leaf(value):
        return isinstance(value, Part)
    return isinstance(value, list) or np.shape(value) == shape_of_part(part[0], part[1] or ())


def _selection(value: Any, around: Sequence[Selection]) -> Selection | None:
    """Which elements of its parameter an array or ``Part`` holds, from the selections of the plans around it."""
    masks = [selection.array for selection in around if isinstance(selection, DenseMask)]
    frozen = functools.reduce(jnp.logical_or, masks) if masks else None
    if not isinstance(value, Part):
        return TRAINABLE if frozen is None else DenseMask(frozen, False, None)
    if isinstance(value.index, DynamicRowIndex):
        return next((selection for selection in around if isinstance(selection, DynamicRowIndex)), None)
    if isinstance(value.index, RowSelection):
        return value.index
    return None if frozen is None else DenseMask(frozen, True, value.index)


def no_fit(
    entry: Entry, got: str, expected: str = "the same arrays in the old state and in the state of `tx`"
) -> ValueError:
    return value_error(
        "the state belongs to other parameters or to another optimizer",
        at=entry.name,
        got=got,
        expected=expected,
        fix="give the state of the same optimizer, for these parameters or for some that rename= and rows= lead to",
    )
