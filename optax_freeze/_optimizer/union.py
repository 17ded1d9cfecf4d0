"""Several optimizers side by side: each trains a part of the parameters, which may be rows of a leaf.

A part is a :func:`optax_freeze.freeze`, whose update is that of one plan. The parts run in turn, as the groups of
:func:`optax_freeze.freeze_when` do.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from optax_freeze._errors import described, type_error, value_error
from optax_freeze._optimizer.accepted_plans import other_transformation
from optax_freeze._optimizer.call_init import with_own_buffers
from optax_freeze._optimizer.freeze import FreezeState, FreezingPart
from optax_freeze._optimizer.full_updates import merged
from optax_freeze._optimizer.inner_update import InnerUpdate
from optax_freeze._optimizer.outer_transformation import OF_PARAMS, around, as_parts, mapped
from optax_freeze._optimizer.transformation import Update
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.element_masks import rows
from optax_freeze._spec.masks import mask_of
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, RowIndex, Selection
from optax_freeze._spec.tree import Leaf, Part, PyTree

_CALL = "fz.union(fz.freeze(a, frozen), fz.freeze(b, also_frozen))"


class UnionState(NamedTuple):
    """State of :func:`union`: that of each part."""

    parts: tuple[FreezeState, ...]

    @property
    def current_plan(self) -> Plan:
        return joined([part.current_plan for part in self.parts])

    @property
    def as_one(self) -> FreezeState:
        """A state of one ``fz.freeze`` with this plan, without an optimizer."""
        return FreezeState(self.current_plan, (), ())

    @property
    def spec(self) -> "UnionState":
        return UnionState(tuple(part.spec for part in self.parts))

    def differs(self, other: Any) -> bool:
        if not isinstance(other, UnionState) or len(self.parts) != len(other.parts):
            return True
        return any(mine.differs(its) for mine, its in zip(self.parts, other.parts, strict=True))


def union(*transformations: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Trains several parts of the parameters, each with an optimizer of its own.

    What no part trains is frozen; ``fz.spec_of(state)`` is what all of them freeze. The parts are disjoint, also within
    a leaf: old rows of a table may train slowly and new rows fast. The state and the updates of a part are those of its
    optimizer alone. Anything that an optimizer computes over a whole tree, such as a global norm, covers its part.

    Args:
      transformations: the parts, each :func:`optax_freeze.freeze` of an optimizer, which may be
        :func:`optax_freeze.freeze_when`, and of a spec that freezes everything outside of the part. All have the same
        ``full_updates``.

    Returns:
      A transformation. Its ``init`` and ``update`` take and return what those of :func:`optax_freeze.freeze` do, with
      one gradient for all parts. Extra arguments are passed to each part. The functions among them (``value_fn``,
      ``obj_fn``, ``grad_fn``) are called with parameters that earlier parts have updated. ``init`` raises
      ``ValueError`` if two parts train the same element.

    Raises:
      TypeError: if an argument is not made by :func:`optax_freeze.freeze`.
      ValueError: if there is no argument, or some have ``full_updates=False`` and others have not.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> params = {"embed": jnp.ones(2), "encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> slow = fz.freeze(optax.sgd(0.25), fz.all_except("encoder"))
      >>> tx = fz.union(slow, fz.freeze(optax.sgd(0.5), fz.all_except("head")))
      >>> params, state = fz.update_params(tx, params, tx.init(params), params)
      >>> [(path, float(leaf[0])) for path, leaf in params.items()]
      [('embed', 1.0), ('encoder', 0.75), ('head', 0.5)]
    """
    parts = [_part_of(tx, n) for n, tx in enumerate(transformations)]
    _refuse_no_parts(parts)
    full_updates = parts[0].full_updates

    def init_fn(params: PyTree) -> PyTree:
        own = as_parts(params, around())
        _refuse_overlap([part.plan(own) for part in parts])
        states: Any = tuple(tx.init(params) for tx in transformations)
        return with_own_buffers(UnionState(states), params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None, extra_args: dict[str, Any], *, in_place: bool
    ) -> tuple[PyTree, PyTree]:
        if not isinstance(state, UnionState) or len(state.parts) != len(parts):
            got = type(state).__name__ + (f" of {len(state.parts)} parts" if isinstance(state, UnionState) else "")
            raise other_transformation(got, f"a UnionState of {len(parts)} parts")
        tree = updates if params is None else params
        states = [part.state(each, tree) for part, each in zip(parts, state.parts, strict=True)]
        plans = [each.current_plan for each in states]
        union = joined(plans)
        call = InnerUpdate.aligned(union, updates, params, extra_args)
        sees_updates = in_place or (params is not None and any(callable(extra_args.get(name)) for name in OF_PARAMS))
        changes: list[list[Any]] = []
        for n, (part, plan, its) in enumerate(zip(parts, plans, states, strict=True)):
            own = _narrowed(call, union, plan)
            new, inner_state = part.run(own, plan, its.inner_state)
            changes.append(new)
            states[n] = its._replace(inner_state=inner_state)
            if sees_updates:
                call = call.with_params_after(plan, new)
        new_state = UnionState(tuple(states))
        if in_place:
            return call.params, new_state
        return merged(call, union, plans, changes, full_updates), new_state

    return optax.GradientTransformationExtraArgs(init_fn, Update(update))


def _part_of(tx: Any, n: int) -> FreezingPart:
    update = getattr(tx, "update", None)
    if isinstance(update, Update) and update.part is not None and not update.only_freezes:
        return update.part
    got, fix = described(tx), "put everything inside: fz.union(fz.freeze(optax.adam(1e-3), frozen), ...)"
    if not isinstance(update, Update):
        got = got if update is None else "a transformation without a spec"
    elif update.only_freezes:
        got, fix = "fz.masked_zero_updates, which has no optimizer", "fz.freeze(optimizer, frozen)"
    elif update.of_groups is not None:
        got = "fz.freeze_when, which trains every leaf that is in no group"
        fix = "fz.freeze(fz.freeze_when(optimizer, groups), frozen), which freezes what other parts train"
    else:
        got, fix = "fz.union", "give all parts to one fz.union"
    what = "a part of fz.union is not made by fz.freeze"
    raise type_error(what, at=f"argument {n}", got=got, expected=_CALL, fix=fix)


def _refuse_no_parts(parts: Sequence[FreezingPart]) -> None:
    if not parts:
        fix = "give a fz.freeze for each part"
        raise value_error("fz.union needs a part", at="fz.union", got="no argument", expected=_CALL, fix=fix)
    if len({part.full_updates for part in parts}) > 1:
        raise value_error(
            "the parts of fz.union have different updates",
            at="full_updates",
            got=", ".join(str(part.full_updates) for part in parts),
            expected="the same `full_updates` in each fz.freeze",
            fix="give full_updates=False to all parts, or to none",
        )


def _narrowed(call: InnerUpdate, union: Plan, plan: Plan) -> InnerUpdate:
    """The arguments of a part: of a ``Part`` of the rows of several parts, its own."""
    shared = [i for i in plan.own if plan.selections[i] is not union.selections[i]]
    if not shared:
        return call

    def own(values: Sequence[Any]) -> list[Any]:
        values = list(values)
        for i in shared:
            values[i] = _own_rows(union.selections[i], plan.selections[i], values[i])
        return values

    def own_tree(tree: Any) -> Any:
        values, treedef = _tree.flatten(tree) if tree is None else _tree.flatten_beside(call.treedef, tree)
        has_parts = treedef == call.treedef and any(isinstance(value, Part) for value in values)
        return jax.tree.unflatten(treedef, own(values)) if has_parts else tree

    return call._replace(grads=own(call.grads), extra_args=mapped(call.extra_args, own_tree))


def _refuse_overlap(plans: Sequence[Plan]) -> None:
    """A ``ValueError`` if two parts train the same element, or may do so."""
    for i, leaf in enumerate(plans[0].leaves):
        owners = [(n, plan.selections[i].in_state) for n, plan in enumerate(plans) if plan.selections[i] is not FROZEN]
        for (n, other), (m, its) in itertools.combinations(owners, 2):
            if found := _overlap(leaf, other, its):
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


def _own_rows(union: Selection, own: Selection, value: Any) -> Any:
    """Of the rows of several parts those of one; any other value as it is."""
    if not (isinstance(value, Part) and isinstance(union, RowIndex) and isinstance(own, RowIndex)):
        return value
    positions = np.searchsorted(union.numbers, own.numbers).tolist()
    index = (~rows(positions, own.axis)).fit(Leaf("", value.values.shape, value.values.dtype))
    return Part(index.take(value.values).values, own, value.shape)
