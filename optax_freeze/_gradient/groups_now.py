"""Gradients of only those groups of ``freeze_when`` that are trainable at the current step.

Which groups are frozen is known only at run time. There is one program for each set of groups that can be frozen at the
same time, and a ``lax.switch`` selects one of them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._errors import is_concrete, value_error
from optax_freeze._gradient.row_numbers import numbers
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.masks import elements, rows
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, DynamicRowIndex, RowIndex, Selection
from optax_freeze._spec.selector_algebra import Choice, Choices, ResolvedSpec, Selector
from optax_freeze._spec.tree import HOLE, Leaf, Part, PyTree

FrozenSet = tuple[bool, ...]
"""One bool per group: whether it is frozen."""

_MOST_SETS = 4096


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["frozen", "selections"], meta_fields=["names", "leaves", "sets"]
)
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class GroupsNow(Selector):
    """The spec of a ``freeze_when`` state: the parameters of the groups that are frozen at the current step."""

    names: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    selections: tuple[tuple[Selection, ...], ...]  # for each group and leaf, the part that the group owns, as trainable
    frozen: tuple[Any, ...]  # one bool or tracer per group: whether it is frozen
    sets: tuple[FrozenSet, ...] | None  # the sets that can occur; None if there are too many to list

    @property
    def is_known(self) -> bool:
        """Whether the frozen groups are known at trace time."""
        return not any(isinstance(each, Tracer) for each in self.frozen)

    def select(self, leaves: Sequence[Leaf]) -> list[Choice]:
        if not self.is_known:
            raise value_error(
                "the frozen groups are not known while the program is traced",
                at="frozen",
                got=repr(self),
                expected="a spec that is known when the program is traced",
                fix="inside jit, pass it only to fz.value_and_grad and fz.grad; frozen groups are not updated",
            )
        return self.spec_of_set(tuple(map(bool, self.frozen))).select(leaves)

    def spec_of_set(self, frozen: FrozenSet) -> ResolvedSpec:
        """The spec of the parameters that are frozen if these groups are frozen."""
        by_leaf = zip(*self.selections, strict=True) if self.selections else [()] * len(self.leaves)
        choices = [
            _union(leaf, [s for s, is_frozen in zip(own, frozen, strict=True) if is_frozen])
            for leaf, own in zip(self.leaves, by_leaf, strict=True)
        ]
        return ResolvedSpec(tuple(leaf.path for leaf in self.leaves), Choices(choices))

    def branches(self, most: int) -> list[FrozenSet]:
        """The sets that get their own program: all that can occur, or up to ``most`` that save the most work."""
        sizes = [self._elements(own) for own in self.selections]
        none = (False,) * len(self.names)
        alone = [tuple(i == n for i in range(len(sizes))) for n in range(len(sizes))]
        sets = list(self.sets) if self.sets is not None else list(dict.fromkeys(_from_ends(len(sizes)) + alone))
        if len(sets) <= most and self.sets is not None:
            return sets
        common = tuple(map(all, zip(*sets, strict=True))) if self.sets is not None else none
        return _saving_most(sets, common, sizes, most)

    def which(self, branches: Sequence[FrozenSet]) -> jax.Array:
        """The index of the cheapest program among those that freeze no group that is trainable now."""
        now = jnp.stack([jnp.asarray(each, bool) for each in self.frozen])
        sizes = [self._elements(own) for own in self.selections]
        # Ranks instead of sizes: only the order matters, and sizes would be rounded in float32.
        saved = [sum(size for size, here in zip(sizes, each, strict=True) if here) for each in branches]
        rank = np.argsort(np.argsort(saved, kind="stable"), kind="stable").astype(np.int32)
        fits = jnp.all(now[None] | ~jnp.array(branches, bool).reshape(len(branches), len(sizes)), axis=1)
        return jnp.argmax(jnp.where(fits, rank, -1))

    def _elements(self, own: Sequence[Selection]) -> int:
        return sum(
            leaf.struct.size if isinstance(selection, DenseMask) else int(selection.elements(leaf.shape or ()))
            for leaf, selection in zip(self.leaves, own, strict=True)
            if leaf.shape is not None and selection is not FROZEN
        )

    def __repr__(self) -> str:
        return f"fz.spec_of(<state of {len(self.names)} groups>)"


def _union(leaf: Leaf, frozen: Sequence[Selection]) -> Choice:
    """The union of the frozen parts of a leaf, given the selections of the frozen groups."""
    frozen = [selection for selection in frozen if selection is not FROZEN]
    if TRAINABLE in frozen or not frozen:
        return bool(frozen)
    if isinstance(frozen[0], RowIndex):
        axis, size = frozen[0].axis, frozen[0].size
        found = functools.reduce(np.union1d, [numbers(index) for index in frozen if isinstance(index, RowIndex)])
        return len(found) == size or rows(found.tolist(), axis)
    if isinstance(frozen[0], DynamicRowIndex):  # of one group; if there is a second one, it has all other rows
        return len(frozen) > 1 or ~frozen[0].as_spec()
    arrays = [~jnp.asarray(selection.frozen(len(leaf.shape or ()))) for selection in frozen]
    return elements(functools.reduce(jnp.logical_or, arrays))


def _from_ends(groups: int) -> list[FrozenSet]:
    """The sets of the first n groups and of the last n groups, for every n."""
    first = [tuple(i < n for i in range(groups)) for n in range(groups + 1)]
    return list(dict.fromkeys(first + [tuple(i >= n for i in range(groups)) for n in range(groups)]))


def _saving_most(sets: Sequence[FrozenSet], common: FrozenSet, sizes: Sequence[int], most: int) -> list[FrozenSet]:
    """Chooses up to ``most`` sets greedily: first ``common``, which fits every set, then those that save the most.

    Sets from one end of the list of groups have more weight than all others together, because layers mostly freeze in
    order.
    """
    ordered = set(_from_ends(len(sizes)))
    importance = np.array([len(sets) if each in ordered else 1 for each in sets])
    matrix, weights = np.array(sets, bool), np.array(sizes, float)
    saves = matrix @ weights
    fits = np.array([(matrix | ~row).all(axis=1) for row in matrix])  # [candidate, set]
    chosen, best = [common], np.full(len(sets), float(np.array(common, bool) @ weights))
    for _ in range(most - 1):
        gains = np.where(fits, np.maximum(saves[:, None] - best, 0) * importance, 0).sum(axis=1)
        i = int(gains.argmax())
        if gains[i] <= 0:
            break
        chosen.append(sets[i])
        best = np.where(fits[i], np.maximum(best, saves[i]), best)
    return chosen


def sets_of(free: int, known: Sequence[FrozenSet], places: Sequence[int]) -> tuple[FrozenSet, ...] | None:
    """The sets that can occur: one of the ``known`` sets for the groups at ``places``, any set of ``free`` others."""
    if len(known) << free > _MOST_SETS:
        return None
    total, found = free + len(places), []
    others = [i for i in range(total) if i not in places]
    for these in known:
        for those in itertools.product([False, True], repeat=free):
            of_group = dict(zip([*places, *others], [*these, *those], strict=True))
            found.append(tuple(of_group[i] for i in range(total)))
    return tuple(found)


def value_and_grad_of_groups(
    at_params: Callable[..., tuple[Any, PyTree]],
    value_of: Callable[..., Any],
    spec: GroupsNow,
    make_plan: Callable[[PyTree, Any], Plan],
    params: PyTree,
    most: int,
) -> tuple[Any, PyTree]:
    """Returns the value and the gradient of the groups that are trainable now, with zeros for the others.

    Args:
      at_params: called with a spec, returns the value and the gradient of the parameters that are trainable under it.
      value_of: returns only the value, if every parameter is frozen.
      spec: the spec of the groups.
      make_plan: makes the plan of a spec.
      params: the parameters.
      most: the maximum number of programs.
    """

    def of_set(frozen: FrozenSet) -> tuple[Any, PyTree]:
        resolved = spec.spec_of_set(frozen)
        plan = make_plan(params, resolved)
        values, treedef = _tree.flatten(params)
        if plan.all_frozen:
            value, grads = value_of(), [HOLE] * len(values)
        else:
            value, tree = at_params(resolved)
            grads = _tree.flatten(tree)[0]
        full = [
            _full(leaf, selection, x, g)
            for leaf, selection, x, g in zip(plan.leaves, plan.selections, values, grads, strict=True)
        ]
        return value, jax.tree.unflatten(treedef, full)

    _refuse_constant_rows(spec, params)
    if spec.is_known:
        return of_set(tuple(map(bool, spec.frozen)))
    branches = spec.branches(most)
    programs = [functools.partial(of_set, each) for each in branches]
    value, grads = jax.lax.switch(spec.which(branches), programs) if len(programs) > 1 else programs[0]()
    if spec.sets and len(spec.sets) == len(branches):
        return value, grads
    values, treedef = _tree.flatten(grads)  # a program may also have computed gradients of frozen groups
    return value, jax.tree.unflatten(treedef, zeroed(values, spec.frozen, spec.selections))


def _refuse_constant_rows(spec: GroupsNow, params: PyTree) -> None:
    """A ``ValueError`` if a program contains the rows of the groups as constants, which ``replace_masks`` may change.

    The gradient of rows that begin to train would be zero.
    """
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params)):
        return
    for i, leaf in enumerate(spec.leaves):
        if any(isinstance(own[i], DynamicRowIndex) and is_concrete(own[i].array) for own in spec.selections):
            raise value_error(
                "the rows of the groups are a constant of the program",
                at=leaf.path,
                got="fz.spec_of(state) of a state that is not an argument of the program",
                expected="rows read from the optimizer state, which is an argument of the program",
                fix="pass the state to the jitted function and call fz.spec_of(state) inside it",
            )


def zeroed(values: Sequence[Any], frozen: Sequence[Any], own: Sequence[Sequence[Selection]]) -> list[Any]:
    """Replaces the gradients of frozen groups by zeros; ``own`` contains the selections of each group."""
    new = list(values)
    for is_frozen, selections in zip(frozen, own, strict=True):
        for i, selection in enumerate(selections):
            if selection is not FROZEN:
                zeros = jax.tree.map(lambda x, f=is_frozen: jnp.where(f, jnp.zeros((), jnp.result_type(x)), x), new[i])
                new[i] = selection.choose(new[i], zeros)
    return new


def _full(leaf: Leaf, selection: Selection, value: Any, grad: Any) -> Any:
    """Expands the gradient of a leaf to the leaf's shape."""
    if not leaf.inexact or isinstance(value, Part):
        return grad
    if selection is FROZEN:
        return jnp.where(True, jnp.zeros((), jnp.result_type(value)), value)
    if isinstance(grad, Part):
        zero = jnp.zeros((), grad.dtype)
        return jnp.where(True, selection.spread(grad, zero, value), value)
    return grad
