"""What the parts of :func:`optax_freeze.union` train together: the plan of all, and that no element is in two parts."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._errors import value_error
from optax_freeze._spec.masks import mask_of, rows
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, RowIndex, Selection
from optax_freeze._spec.tree import Leaf, Part


def refuse_overlap(plans: Sequence[Plan]) -> None:
    """A ``ValueError`` if two parts train the same element, or may do so."""
    for i, leaf in enumerate(plans[0].leaves):
        owners = [(n, plan.selections[i].in_state) for n, plan in enumerate(plans) if plan.selections[i] is not FROZEN]
        for k, (m, its) in enumerate(owners):
            for n, other in owners[:k]:
                found = _overlap(leaf, other, its)
                if found is not None:
                    raise value_error(
                        "two parts of fz.union train the same elements",
                        at=leaf.path,
                        got=f"{found}: in part {n} a leaf that {other}, in part {m} a leaf that {its}",
                        expected="parts that are disjoint; masks and rows of a leaf in several parts have values",
                        fix="freeze in each part what the others train",
                    )


def _overlap(leaf: Leaf, a: Selection, b: Selection) -> str | None:
    """What two parts both train of a leaf, or may both train."""
    if TRAINABLE in (a, b):
        return "the leaf"
    if isinstance(a, RowIndex) and isinstance(b, RowIndex) and a.axis == b.axis:
        shared = a.rows & b.rows
        return f"row {shared.numbers[0]}" if shared.count else None
    if any(isinstance(each.array, Tracer) for each in (a, b)):
        return "elements that are not known while the program is traced"
    with jax.ensure_compile_time_eval():
        trains = [~jnp.asarray(each.frozen(len(leaf.shape or ()))) for each in (a, b)]
        count = int(jnp.count_nonzero(jnp.broadcast_to(trains[0] & trains[1], leaf.shape or ())))
    return f"{count} elements" if count else None


def joined(plans: Sequence[Plan]) -> Plan:
    """The plan of what any part trains."""
    pairs = zip(plans[0].leaves, *(plan.selections for plan in plans), strict=True)
    return dataclasses.replace(plans[0], selections=tuple(_joined_leaf(leaf, its) for leaf, *its in pairs))


def _joined_leaf(leaf: Leaf, selections: Sequence[Selection]) -> Selection:
    owners = [selection for selection in selections if selection is not FROZEN]
    if len(owners) < 2:
        return owners[0] if owners else FROZEN
    if all(isinstance(each, RowIndex) and each.axis == owners[0].axis for each in owners):  # type: ignore[attr-defined]
        trains = functools.reduce(operator.or_, [each.rows for each in owners])  # type: ignore[attr-defined]
        choice = mask_of(~trains, owners[0].axis)  # type: ignore[attr-defined]
        return TRAINABLE if choice is False else choice.fit(leaf)  # type: ignore[union-attr]
    frozen = functools.reduce(jnp.logical_and, (jnp.asarray(each.frozen(len(leaf.shape or ()))) for each in owners))
    return DenseMask(jnp.broadcast_to(frozen, leaf.shape or ()), False, None, of_state=True)


def own_rows(union: Selection, own: Selection, value: Any) -> Any:
    """Of the rows of several parts those of one; any other value as it is."""
    if not (isinstance(value, Part) and isinstance(union, RowIndex) and isinstance(own, RowIndex)):
        return value
    positions = np.searchsorted(union.numbers, own.numbers).tolist()
    index = (~rows(positions, own.axis)).fit(Leaf("", value.values.shape, value.values.dtype))
    return Part(index.take(value.values).values, own, value.shape)
