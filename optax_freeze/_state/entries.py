"""What is in an optimizer state: each array, whatever wraps around it, at a place that freezing does not change.

The moment of ``encoder/kernel`` stands in the state of Adam at ``0/mu/encoder/kernel``; inside
:func:`optax_freeze.freeze`, in a group of :func:`optax_freeze.freeze_when`, under a label of ``optax.multi_transform``
it has another path, and the same place.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._optimizer.freeze import FreezeState, MaskedZeroUpdatesState, masks_of
from optax_freeze._optimizer.freeze_when import FreezeWhenState
from optax_freeze._optimizer.groups import all_masks
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.element_index import Dense, RowIndex
from optax_freeze._spec.resolve import Masks, Resolved
from optax_freeze._spec.tree import Part, PyTree
from optax_freeze._state.parameter_of import parameter_of

_WRAPPERS = (FreezeState, FreezeWhenState, MaskedZeroUpdatesState, optax.transforms.PartitionState, optax.MaskedState)


class Owner(NamedTuple):
    """The groups and labels around an array, and the parameters that they are about, as far as it is known."""

    names: tuple[str, ...] = ()
    trains: frozenset[str] | None = None


class _Region(NamedTuple):
    """A part of a state: its path and its place."""

    path: str
    place: str | None  # None: this library's own, made anew
    owner: Owner = Owner()
    parts: tuple[Mapping[str, tuple[Any, Any]], ...] = ()  # of specs around it: the leaves frozen in part
    optional: bool = False

    def within(self, name: str, group: str | None = None, spec: Resolved | None = None, masks: Masks = ()) -> "_Region":
        """The region of what stands inside, at the same place."""
        names, trains = self.owner
        inner = self._replace(path=join(self.path, name))
        if spec is not None:
            answers = list(zip(spec.leaves, spec.answers, masks, strict=False))
            trains = frozenset(leaf.path for leaf, answer, _ in answers if answer is not True)
            parts = {leaf.path: (answer, mask) for leaf, answer, mask in answers if not isinstance(answer, bool)}
            inner = inner._replace(parts=(*self.parts, parts))
        return inner._replace(owner=Owner(names if group is None else (*names, group), trains))


def _regions(node: Any, at: _Region) -> Iterator[_Region]:
    if isinstance(node, _WRAPPERS):
        yield _Region(at.path, None)
    if isinstance(node, optax.MaskedState):
        yield from _regions(node.inner_state, at.within("inner_state"))
    elif isinstance(node, optax.transforms.PartitionState):
        for label, inner in node.inner_states.items():
            name = _tree.keystr([jax.tree_util.DictKey(label)])
            yield from _regions(inner, at.within(f"inner_states/{name}", name))
    elif isinstance(node, FreezeState):
        partition: Any = node.inner_state
        inside = at.within("inner_state/inner_states/trainable", None, node.spec, masks_of(node))
        yield from _regions(partition.inner_states["trainable"], inside)
    elif isinstance(node, FreezeWhenState):
        names, division = node.spec.names, node.spec.division
        masks = all_masks(division, [_tree.flatten(node.groups[name].masks)[0] for name in names])
        yield _Region(join(at.path, "step"), join(at.place, "step"), optional=True)
        for name, spec, arrays in zip(names, division.specs, masks, strict=False):
            switch = f"groups/{name}/frozen"
            yield _Region(join(at.path, switch), join(at.place, switch), optional=True)
            inside = at.within(f"groups/{name}/inner_state", name, spec, arrays)
            yield from _regions(node.groups[name].inner_state, inside)
        yield from _regions(node.rest_state, at.within("rest_state", "", division.specs[-1], masks[-1]))
        coupled = at._replace(path=join(at.path, "coupled_state"), place=join(at.place, "coupled_state"))
        yield from _regions(node.coupled_state, coupled)
    elif not isinstance(node, MaskedZeroUpdatesState):
        yield at
        for key, inner in jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: isinstance(x, _WRAPPERS))[0]:
            if isinstance(inner, _WRAPPERS):
                name = _tree.keystr(key)
                yield from _regions(inner, at._replace(path=join(at.path, name), place=join(at.place, name)))


def join(*paths: str | None) -> str:
    """One path out of several, some of which may be empty."""
    return "/".join(path for path in paths if path)


class Entry(NamedTuple):
    """One array, ``Part`` or hole of a state."""

    place: str | None  # None: this library's own
    value: Any
    owner: Owner = Owner()
    optional: bool = False  # a switch or step of `freeze_when`, which other states do not have
    parts: tuple[Mapping[str, tuple[Any, Any]], ...] = ()
    leaf: str | None = None  # the path of the parameter that it belongs to
    shape: tuple[int, ...] = ()  # of that parameter
    frozen: Any = None  # a dense mask of that parameter, True where the value holds nothing of it

    @property
    def holds(self) -> bool:
        """Whether there is an array, and no hole."""
        return not _tree.is_hole(getattr(self.value, "values", self.value))

    @property
    def name(self) -> str:
        """The place, and the groups around it."""
        return str(self.place) + (
            f" [{', '.join(name or 'the rest' for name in self.owner.names)}]" * bool(self.owner.names)
        )

    @property
    def slot(self) -> str:
        """The place of the tree in which it stands at its parameter's path."""
        return str(self.place).removesuffix(self.leaf or "").rstrip("/")

    @property
    def elementwise(self) -> bool:
        """Whether its elements are those of its parameter: not so for factored moments and memories of gradients."""
        if self.leaf is None or not isinstance(self.value, Part):
            return self.leaf is not None and jnp.shape(self.value) == self.shape
        index = self.value.index
        if isinstance(index, RowIndex):
            rows = (index.count if axis == index.axis else n for axis, n in enumerate(self.shape))
            return self.value.values.shape == tuple(rows)
        return self.frozen is not None and self.value.values.shape == (index,)

    @property
    def held(self) -> np.ndarray:
        """True at the elements of its parameter that it holds; broadcasts against it."""
        if isinstance(self.value, Part) and isinstance(self.value.index, RowIndex):
            return ~np.asarray(self.value.index.frozen(len(self.shape)))
        return np.ones((1,) * len(self.shape), bool) if self.frozen is None else ~np.asarray(self.frozen)


def entries_of(state: PyTree, shapes: Mapping[str, Any]) -> list[Entry]:
    """What is in a state, in its order; ``shapes`` are those of the parameters by their paths."""
    regions = sorted(_regions(state, _Region("", "")), key=lambda region: -len(region.path))
    entries: list[Entry] = []
    for path, node in zip(_tree.paths(state), _tree.flatten(state)[0], strict=True):
        value = dataclasses.replace(node, values=_tree.bare(node)) if isinstance(node, Part) else node
        region = next(r for r in regions if not r.path or path == r.path or path.startswith(r.path + "/"))
        if region.place is None:
            entries.append(Entry(None, value, optional=True))
            continue
        place = join(region.place, path[len(region.path) :].lstrip("/"))
        entry = Entry(place, value, region.owner, region.optional, region.parts)
        entries.append(entry)
    owner_of = parameter_of((entry.place for entry in entries if entry.place is not None), shapes)
    return [entry if entry.optional else _of_leaf(entry, shapes, owner_of) for entry in entries]


def _of_leaf(entry: Entry, shapes: Mapping[str, Any], owner_of: Callable[[str], str | None]) -> Entry:
    """The entry with the parameter that it belongs to, if it belongs to one."""
    leaf = owner_of(str(entry.place))
    if leaf is None or (leaf == "" and np.shape(entry.value) != shapes[""] and not isinstance(entry.value, Part)):
        return entry
    answers = [parts[leaf] for parts in entry.parts if leaf in parts]
    dense = [mask for answer, mask in answers if isinstance(answer, Dense)]
    frozen = functools.reduce(jnp.logical_or, dense) if dense else None
    return entry._replace(leaf=leaf, shape=shapes[leaf] or (), frozen=frozen)
