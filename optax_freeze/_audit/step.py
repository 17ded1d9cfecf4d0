"""Runs of a whole training step, from copies of its state.

The step is a function of the arrays of its state: any pytree, a Flax ``TrainState``, or NNX objects, which are pytrees
as well. A copy of the state is made for each call, so that a step may donate it, or change it in place.
"""

import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy as copy_of
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._audit import causes
from optax_freeze._errors import described, is_array, is_scalar, type_error, value_error
from optax_freeze._optimizer.freeze import FreezeState
from optax_freeze._optimizer.freeze_when import FreezeWhenState
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import to_device, to_memory_of
from optax_freeze._spec.patterns import nearest
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Spec, choose, make_plan, warn_of_no_proof
from optax_freeze._spec.selection import FROZEN
from optax_freeze._spec.sharding import copy_like
from optax_freeze._spec.tree import Part, PyTree
from optax_freeze._state.own_states import outermost_states, states_in
from optax_freeze._state.state_entries import Entry, entries_of

_LATER = 100, 1000, 720_719_999, 720_720_000

State = list[Any]
"""The arrays of a state, and its other leaves."""


class Step:
    """A training step, the state from which each run starts, and what the leaves of this state are.

    Attributes:
      paths: the paths of the leaves of the state.
      start: these leaves.
      plan: the resolved spec.
      params: from the number of a parameter in the plan to its position among the leaves of the state; floating-point
        and complex arrays alone.
      index_of: from the path of such a parameter to its number.
      entries: from positions to entries of optimizer states and averages.
      kept: the positions of state that groups of ``freeze_when`` keep while they are frozen.
      in_groups: the paths of parameters that a group of ``freeze_when`` may freeze and thaw.
      group_steps: the positions of the steps by which ``freeze_when`` decides.
      trains_in_state: the paths of parameters that a state of ``freeze`` says are trainable.
      bits: the frozen leaves that are not floating-point arrays, from their paths to their positions.
      in_optimizer: the positions of state in a tuple of a type of Optax or of this library.
      updates: from positions of parameters to those of their last updates, of a step that keeps them.
      is_fresh: whether an optimizer has not taken a step before.
      other_part: the cause of moves that nothing else explains.
      donates: whether the step may delete its arguments.
      objects: whether the state has NNX variables, which a step may change in place.
      calls: how often the step was called.
      function: ``function(state, *batch)``.
    """

    is_fresh, other_part, donates = False, causes.OTHER_PART, True
    updates: Mapping[int, int] = {}
    trains_in_state: Collection[str] = ()
    in_groups: Collection[str] = ()
    group_steps: Collection[int] = ()

    def __init__(
        self,
        step: Callable[..., Any],
        state: PyTree,
        batch: Sequence[Any],
        keywords: Mapping[str, Any],
        params: Any,
        frozen: Spec,
    ) -> None:
        self.function, self.batch, self.calls = step, (tuple(batch), dict(keywords)), 0
        walk = _tree.walk(state)
        self.objects = bool(walk.variables)
        self._treedef, self._type = jax.tree.structure(state), type(state)
        self._graph = _graph(state) if len({id(v) for _, v in walk.variables}) < len(walk.variables) else None
        self.paths = [path for path, value in zip(walk.paths, walk.values, strict=True) for _ in jax.tree.leaves(value)]
        self.start: State = _distinct(jax.tree.leaves(state))
        own = self._state(self.start)
        tree = _parameters(own, params)
        positions = {id(leaf): position for position, leaf in enumerate(self.start) if is_array(leaf)}
        self.bits = self._other_frozen_leaves(tree, params, frozen)
        self.plan: Plan = make_plan(tree, frozen).in_state
        self.plan.refuse_all_frozen("there is nothing to audit", frozen)
        warn_of_no_proof(self.plan, tree, frozen, stacklevel=3)
        self.params: dict[int, int] = {}
        for i, (leaf, value) in enumerate(zip(self.plan.leaves, _tree.flatten(tree)[0], strict=True)):
            if isinstance(value, Part) or (is_array(value) and id(value) not in positions):
                got = "a Part, from fz.partition" if isinstance(value, Part) else "a new array"
                expected = "a leaf of the state"
                fix = "params=lambda state: state.params; of a model that is kept as one vector, that vector, with"
                fix += " frozen=fz.elements(mask)"
                raise value_error("`params` must select leaves", at=leaf.path, got=got, expected=expected, fix=fix)
            if leaf.inexact and id(value) in positions:
                self.params[i] = positions[id(value)]
        self.index_of = {self.plan.leaves[i].path: i for i in self.params}
        self.entries: dict[int, Entry] = {}
        self.kept: set[int] = set()
        self.in_optimizer = _of_optimizers(own)
        self._find_entries(own)
        of_groups = states_in(own, FreezeWhenState)
        groups = [plan for state in of_groups for plan in state.plan.plans[:-1]]
        self.in_groups = {plan.leaves[i].path for plan in groups for i in plan.own}
        self.group_steps = {positions[id(step)] for each in of_groups for step in jax.tree.leaves(each.step)}
        plans = [state.plan for state in states_in(own, FreezeState)]
        self.trains_in_state = {plan.leaves[i].path for plan in plans for i in plan.own}

    def _other_frozen_leaves(self, tree: PyTree, params: Any, frozen: Spec) -> dict[str, int]:
        """The integers, bools, keys and Python numbers that a spec freezes; not the streams of NNX."""
        # Equal numbers are one object, so their positions are those of others in their place.
        leaves = [_own_number(leaf) for leaf in self.start]
        positions = {id(x): position for position, x in enumerate(leaves) if is_array(x) or is_scalar(x)}
        places = _tree.walk(_parameters(self._state(leaves), params)).values
        walk = _tree.walk(tree)
        found = walk.leaves()
        streams = getattr(sys.modules.get("flax.nnx"), "RngState", ())
        variables = [variable for _, variable in walk.variables] or walk.values
        chosen = zip(found, walk.values, places, variables, choose(frozen, tree, found), strict=True)
        return {
            leaf.path: positions[id(place)]
            for leaf, value, place, variable, choice in chosen
            if choice is True and (not leaf.inexact or is_scalar(value))
            if id(place) in positions and not isinstance(variable, streams)
        }

    def with_function(self, function: Callable[..., Any]) -> "Step":
        other = copy_of(self)
        other.function = function
        return other

    @property
    def frozen(self) -> list[int]:
        """The parameters with frozen elements."""
        return [i for i in self.params if self.is_frozen(i) or self.plan.selections[i].in_part]

    def is_frozen(self, i: int) -> bool:
        """Whether a parameter is frozen as a whole."""
        return self.plan.selections[i] is FROZEN

    def mask(self, i: int) -> np.ndarray:
        """Where a parameter is frozen; broadcasts against it."""
        leaf = self.plan.leaves[i]
        return np.asarray(self.plan.selections[i].frozen(len(leaf.shape or ())))

    def run(self, steps: int, changes: Mapping[int, Any] = {}, batch: Any = None) -> Iterator[State]:
        """The states after each of some steps, from the start with some leaves changed.

        A state may be deleted by the next step, which gets it without a copy.
        """
        state = [self._given(changes.get(position, leaf)) for position, leaf in enumerate(self.start)]
        for _ in range(steps):
            with jax.debug_nans(False), jax.debug_infs(False):
                state = self(state, jax.tree.map(self._given, self.batch if batch is None else batch))[0]
            yield state

    def arrays_of(self, state: State, batch: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """The arrays of a state and a batch, and what puts other arrays into their places."""
        leaves, structure = jax.tree.flatten((state, batch))
        places = [k for k, leaf in enumerate(leaves) if is_array(leaf)]

        def filled(arrays: Sequence[Any]) -> Any:
            given = dict(zip(places, arrays, strict=True))
            return jax.tree.unflatten(structure, [given.get(k, leaf) for k, leaf in enumerate(leaves)])

        return [to_device(leaves[k]) for k in places], filled

    def advance(self, state: State, batch: Any = None) -> tuple[State, list[Any]]:
        """:meth:`__call__` with copies of a state and of a batch, which remain."""
        with jax.debug_nans(False), jax.debug_infs(False):
            return self([*map(self._given, state)], jax.tree.map(self._given, self.batch if batch is None else batch))

    def _given(self, leaf: Any) -> Any:
        return copy(leaf) if self.donates else leaf

    def __call__(self, leaves: State, batch: Any) -> tuple[State, list[Any]]:
        """The leaves of the new state, and those of the other results; the step may delete what it is given."""
        given, self.calls = self._state(leaves), self.calls + 1
        try:
            out = self.function(given, *batch[0], **batch[1])
        except Exception as error:
            error.add_note("fz.audit_step: from step(state, *batch)")
            raise
        new, others = self._new_state(out, given)
        return jax.tree.leaves(new), jax.tree.leaves(others)

    def _state(self, leaves: State) -> PyTree:
        if self._graph is None:
            return jax.tree.unflatten(self._treedef, leaves)
        graphdef, structure, places = self._graph
        return sys.modules["flax.nnx"].merge(graphdef, jax.tree.unflatten(structure, [leaves[k] for k in places]))

    def _new_state(self, out: Any, given: PyTree) -> tuple[PyTree, Any]:
        """The new state and the other results: of a tuple the first item, or the first of a state that is a tuple."""
        candidates: list[tuple[Any, Any]] = [(out, None)]
        if isinstance(out, (tuple, list)) and out:
            candidates.append((out[0], out[1:]))
            if self._type in (tuple, list):
                candidates.append((self._type(out[: len(given)]), out[len(given) :]))
        if self.objects:
            candidates.append((given, out))
        for new, others in candidates:
            if jax.tree.structure(new) == self._treedef:
                return new, others
        what, expected = "the step must return the new state", "the new state, or a tuple that begins with it"
        fix = "fz.audit_step(lambda state, *batch: ..., state, *batch), whose function returns the new state"
        items = list(out) if isinstance(out, (tuple, list)) and type(out) is not self._type else []
        place = next((n for n, item in enumerate(items) if jax.tree.structure(item) == self._treedef), None)
        if place is not None:
            got, fix = f"the state is item {place}", f"lambda state, *batch: step(state, *batch)[{place}]"
            raise type_error(what, at="step(state, *batch)", got=got, expected=expected, fix=fix)
        if out is None or self.objects or not _resembles(items[0] if items else out, given):
            got = "NNX objects of another structure" if self.objects and out is not None else described(out)
            raise type_error(what, at="step(state, *batch)", got=got, expected=expected, fix=fix)
        _tree.refuse_other_structure(items[0] if items else out, given, "the new state", fix)
        raise AssertionError  # two trees of the same structure

    def owner(self, k: int) -> int | None:
        """The parameter that a leaf of the state belongs to."""
        entry = self.entries.get(k)
        return None if entry is None or entry.leaf is None else self.index_of.get(entry.leaf)

    def ends_with(self, k: int, i: int) -> bool:
        """Whether the path of a leaf of the state ends with that of a parameter, whose shape it has."""
        path, at = self.plan.leaves[i].path, self.paths[k]
        return np.shape(self.start[k]) == np.shape(self.start[self.params[i]]) and f"/{at}".endswith(f"/{path}")

    def later(self, counters: Sequence[int]) -> Iterator[tuple[int, dict[int, Any]]]:
        """Large numbers, divisible by many and one less, and the changes of a state with such counters."""
        for number in _LATER if counters else ():
            fits = [k for k in counters if np.iinfo(self.start[k].dtype).max >= number]
            yield number, {k: like(self.start[k], jnp.asarray(number, self.start[k].dtype)) for k in fits}

    def tree(self, k: int) -> str:
        """The path of the tree that has the structure of the parameters, and a leaf of the state in it."""
        leaf = self.entries[k].leaf if k in self.entries else None
        return self.paths[k].removesuffix(leaf or "").rstrip("/")

    def elements(self, i: int, *, frozen: bool) -> int:
        return int(np.sum(np.broadcast_to(self.mask(i), self.plan.leaves[i].shape or ()) == frozen))

    def statistics(self) -> list[int]:
        """The positions of numbers that belong to a module of which all parameters are frozen."""
        frozen = {leaf.path: self.is_frozen(i) for i, leaf in enumerate(self.plan.leaves)}

        def is_of_frozen(path: str) -> bool:
            names = path.split("/")[:-1]
            for ahead in range(len(names)):
                for end in range(len(names), ahead, -1):
                    module = "/".join(names[ahead:end]) + "/"
                    if found := [is_frozen for path, is_frozen in frozen.items() if path.startswith(module)]:
                        return all(found)
            return False

        own = {*self.params.values()}
        others = [k for k in range(len(self.start)) if k not in own and is_array(self.start[k])]
        numbers = [k for k in others if np.ndim(self.start[k]) and jnp.issubdtype(self.start[k].dtype, jnp.inexact)]
        return [k for k in numbers if self.owner(k) is None and is_of_frozen(self.paths[k])]

    def other_values(self) -> dict[int, Any]:
        """Other values for the frozen elements of all parameters, none of them zero, by position."""

        def other(i: int, given: Any) -> Any:
            value = to_device(given)
            noise = np.random.default_rng(i).uniform(0.05, 0.1, np.shape(value)).astype(np.float32)
            return to_memory_of(given, copy_like(self.plan.selections[i].choose(_moved(value, noise), value), value))

        return {self.params[i]: other(i, self.start[self.params[i]]) for i in self.frozen}

    def _find_entries(self, state: PyTree) -> None:
        """Finds the entries of all subtrees of the state without parameters."""
        own = {id(self.start[position]) for position in self.params.values()}
        has_none = lambda node: own.isdisjoint(map(id, jax.tree.leaves(node)))  # noqa: E731
        nodes = jax.tree.leaves(state, is_leaf=lambda node: is_array(node) or has_none(node))
        position = 0
        for node in nodes:
            position = position + 1 if is_array(node) else self._add_entries(node, position)

    def _add_entries(self, node: PyTree, position: int) -> int:
        """Adds the entries of a state whose first leaf has a position; returns the position after the last."""
        shapes = {leaf.path: leaf.shape for leaf in self.plan.leaves}
        groups = tuple(f"{path}/" if path else "" for path, _ in outermost_states(node, FreezeWhenState))
        paths = iter(_tree.paths(node))
        for entry in entries_of(node, shapes):
            path, *_ = itertools.islice(paths, entry.nodes)
            places = range(position, position + len(entry.arrays))
            self.entries |= dict.fromkeys(places, entry)
            self.kept.update(places if path.startswith(groups) else ())
            position += len(entry.arrays)
        return position


def _distinct(leaves: State) -> State:
    """The leaves of a state; copies of those that may change in place, or that are one array at several places."""
    seen: set[int] = set()
    found = []
    for leaf in leaves:
        found.append(leaf if isinstance(leaf, jax.Array) and id(leaf) not in seen else copy(leaf))
        seen.add(id(leaf))
    return found


def copy(leaf: Any) -> Any:
    if not is_array(leaf):
        return leaf
    return np.array(leaf) if isinstance(leaf, np.ndarray) else to_memory_of(leaf, jnp.copy(to_device(leaf)))


def like(given: Any, value: Any) -> Any:
    """A value with the dtype, the devices and the memory of another one."""
    return to_memory_of(given, copy_like(value.astype(given.dtype), to_device(given)))


@jax.jit
def _moved(value: Any, noise: Any) -> Any:
    return (value * 1.25 + noise).astype(value.dtype)


def other_batch(batch: Any) -> Any:
    """A batch with other values: floating-point numbers are mixed along the first axis, others in reverse order."""

    def other(leaf: Any) -> Any:
        if not is_array(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended) or not np.ndim(leaf):
            return leaf
        return _mixed(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf[::-1]

    return jax.tree.map(other, batch)


def opposite(batch: Any) -> Any:
    """A batch whose floating-point numbers have the other sign."""
    is_inexact = lambda leaf: is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)  # noqa: E731
    return jax.tree.map(lambda leaf: -leaf if is_inexact(leaf) else leaf, batch)


@jax.jit
def _mixed(leaf: Any) -> Any:
    return (0.75 * leaf + 0.5 * leaf[::-1]).astype(leaf.dtype)


class _Int(int):
    """An int that is an object of its own; small ones of Python are not."""


def _own_number(leaf: Any) -> Any:
    """A Python number as an object of its own; another leaf as it is."""
    if not is_scalar(leaf):
        return leaf
    if isinstance(leaf, complex):
        return complex(leaf.real, leaf.imag)
    return _Int(leaf) if isinstance(leaf, int) else float(str(leaf))


def _of_optimizers(state: PyTree) -> set[int]:
    """The positions of the leaves in tuples whose type is one of Optax or of this library."""

    def is_of_optimizer(node: Any) -> bool:
        return hasattr(node, "_fields") and type(node).__module__.partition(".")[0] in ("optax", "optax_freeze")

    found, position = set(), 0
    for node in jax.tree.leaves(state, is_leaf=is_of_optimizer):
        count = len(jax.tree.leaves(node))
        found.update(range(position, position + count) if is_of_optimizer(node) else ())
        position += count
    return found


def _resembles(out: Any, state: PyTree) -> bool:
    """Whether a tree is a state with other leaves, rather than metrics."""
    return type(out) is type(state) and len(jax.tree.leaves(out)) * 2 > len(jax.tree.leaves(state))


def _parameters(state: PyTree, params: Any) -> PyTree:
    if callable(params):
        return params(state)
    if not isinstance(params, str):
        got, expected = described(params), "a function of the state, or the path of a subtree"
        raise type_error("unknown `params`", at="params", got=got, expected=expected, fix='params="params"')
    found = _subtree(state, params)
    if not found:
        paths = _tree.paths(state)
        fix = f"nearest paths: {nearest(params, paths)}; or params=lambda state: state.params"
        expected = "the path of a subtree of the state"
        raise value_error("`params` matches nothing", at="params", got=repr(params), expected=expected, fix=fix)
    return found[0]


def _graph(state: PyTree) -> Any:
    """NNX objects with shared variables, which a pytree would repeat: their graph, and the positions of its leaves."""
    graphdef, variables = sys.modules["flax.nnx"].split(state)
    first: dict[int, int] = {}
    for k, leaf in enumerate(jax.tree.leaves(state)):
        first.setdefault(id(leaf), k)
    leaves, structure = jax.tree.flatten(variables)
    return graphdef, structure, [first[id(leaf)] for leaf in leaves]


def _subtree(node: PyTree, path: str) -> list[PyTree]:
    """The subtree at a path, or nothing; of an NNX module its parameters."""
    if not path:
        nnx: Any = sys.modules.get("flax.nnx")
        if nnx is None or not isinstance(node, nnx.Module):
            return [node]
        own = sys.modules.get("optax_freeze.nnx")
        return [nnx.state(node, nnx.Param if own is None else (nnx.Param, own.FrozenParam))]
    for key, child in jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]:
        if _tree.is_wrapper(node):
            return _subtree(child, path)
        name = _tree.keystr(key)
        if path == name or path.startswith(f"{name}/"):
            return _subtree(child, path[len(name) + 1 :])
    return []
