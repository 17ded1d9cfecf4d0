"""What each group of ``freeze_when`` owns of the leaves: the spec of the groups that are frozen now."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_freeze._errors import value_error
from optax_freeze._spec.masks import Choice, Elements, choice_of, mask_of
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DynamicRowIndex, RowIndex, Selection
from optax_freeze._spec.selector_algebra import Choices, ResolvedSpec, Selector
from optax_freeze._spec.tree import Leaf


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["frozen", "selections"], meta_fields=["names", "leaves"]
)
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class GroupSpec(Selector):
    """The spec of a ``freeze_when`` state: the parameters of the groups that are frozen at the current step."""

    names: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    selections: tuple[tuple[Selection, ...], ...]  # of each group, then of the rest: what it owns of each leaf
    frozen: tuple[Any, ...]  # one bool or tracer per group: whether it is frozen

    @functools.cached_property
    def owned(self) -> list[dict[int, Selection]]:
        """For each group, then for the rest, what it owns of each of its leaves, by number."""
        return [{i: its for i, its in enumerate(own) if its is not FROZEN} for own in self.selections]

    @functools.cached_property
    def owners(self) -> list[dict[int, Selection]]:
        """For each leaf the numbers of the groups that own some of it, and what they own."""
        found: list[dict[int, Selection]] = [{} for _ in self.leaves]
        for n, own in enumerate(self.owned):
            for i, its in own.items():
                found[i][n] = its
        return found

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
        return self.spec_of_set(self.frozen).select(leaves)

    def spec_of_set(self, frozen: Sequence[Any]) -> ResolvedSpec:
        """The spec of the parameters that are frozen if these groups are frozen."""
        numbers = {n for n, is_frozen in enumerate(frozen) if is_frozen}
        choices = [
            _union(leaf, [its for n, its in own.items() if n in numbers])
            for leaf, own in zip(self.leaves, self.owners, strict=True)
        ]
        return ResolvedSpec(tuple(leaf.path for leaf in self.leaves), Choices(choices))

    def __repr__(self) -> str:
        return f"fz.spec_of(<state of {len(self.names)} groups>)"


def _union(leaf: Leaf, frozen: Sequence[Selection]) -> Choice:
    """The union of the frozen parts of a leaf, given the selections of the frozen groups."""
    if TRAINABLE in frozen or not frozen:
        return bool(frozen)
    if isinstance(frozen[0], RowIndex):
        rows = functools.reduce(operator.or_, [index.rows for index in frozen])  # type: ignore[attr-defined]
        return mask_of(rows, frozen[0].axis)
    if isinstance(frozen[0], DynamicRowIndex):  # of one group; if there is a second one, it has all other rows
        return len(frozen) > 1 or ~choice_of(frozen[0])  # type: ignore[return-value]
    arrays = [~jnp.asarray(selection.frozen(len(leaf.shape or ()))) for selection in frozen]
    return Elements(functools.reduce(jnp.logical_or, arrays))


def zeroed(values: Sequence[Any], frozen: Sequence[Any], own: Sequence[Sequence[Selection]]) -> list[Any]:
    """Replaces the gradients of frozen groups by zeros; ``own``: the selections of each group and of the rest."""
    zeros = [jax.tree.map(lambda x: jnp.zeros((), jnp.result_type(x)), value) for value in values]
    return replaced(values, zeros, frozen, own)


def replaced(
    values: Sequence[Any], others: Sequence[Any], frozen: Sequence[Any], own: Sequence[Sequence[Selection]]
) -> list[Any]:
    """Replaces what frozen groups own of each leaf by that of ``others``."""
    new = list(values)
    for is_frozen, selections in zip(frozen, own, strict=False):
        for i, selection in enumerate(selections):
            if selection is not FROZEN:
                other = jax.tree.map(lambda x, y, f=is_frozen: jnp.where(f, y, x), new[i], others[i])
                new[i] = selection.choose(new[i], other)
    return new
