"""Freezing that changes while training: groups that freeze and thaw in one compiled program.

Each group of leaves has an optimizer state of its own. While a group is frozen, its optimizer does not run and its
state stands still bit for bit, so that nothing decays, no momentum moves it, and no bias correction or schedule of
learning rates goes on without it. ``optax.multi_transform`` decides by labels what is frozen: other labels are another
state and another program. Here a condition decides, a value of the running program.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from optax_freeze._errors import described, is_array, type_error, value_error
from optax_freeze._optimizer.conditions import Condition, ask, check, refuse_no_bool
from optax_freeze._optimizer.freeze import copy_like, parameters_of
from optax_freeze._optimizer.groups import Claim, Division, all_masks, group_name
from optax_freeze._optimizer.inner_update import negative_zero, parts_outside, variables_outside, without_frozen, zero
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.element_index import Answer, RowIndex
from optax_freeze._spec.explicit_mesh import explicit_sharding, laid_out
from optax_freeze._spec.masks import Elements
from optax_freeze._spec.resolve import Masks, Resolved, Tied, register_with_flax
from optax_freeze._spec.selector_algebra import as_selector
from optax_freeze._spec.selectors import as_choice
from optax_freeze._spec.tree import Leaf, PyTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups that a state belongs to: their names, conditions (None: a switch) and leaves."""

    names: tuple[str, ...]
    conditions: tuple[Condition | None, ...]
    division: Division

    def __hash__(self) -> int:
        return hash(self.names)


class GroupState(NamedTuple):
    """State of one group: whether it is frozen (if it has no schedule), its dense masks, its optimizer's state."""

    frozen: Any
    masks: PyTree
    inner_state: optax.OptState


class FreezeWhenState(NamedTuple):
    """State of :func:`freeze_when`: the updates so far, the groups and their states by name, and those of the rest."""

    step: jax.Array
    spec: Groups
    groups: dict[str, GroupState]
    rest_state: optax.OptState
    coupled_state: optax.OptState


def freeze_when(
    inner: optax.GradientTransformation | optax.MultiSteps,
    groups: Mapping[Any, Any],
    coupled: optax.GradientTransformation | None = None,
    *,
    tied: Tied = "error",
) -> optax.GradientTransformationExtraArgs:
    """Freezes and thaws groups of leaves while training, without compiling again.

    Each group has a state of ``inner`` of its own. While it is frozen, its updates are -0.0, its optimizer does not
    run, and its state stands still: a group that thaws first at step N steps as if its optimizer had been created at
    N, and one that thaws again goes on where it stopped. Leaves in no group always train. The backward pass is that of
    all groups: to save it, train in static phases with :func:`optax_freeze.freeze` and :func:`optax_freeze.migrate`.

    Args:
      inner: the optimizer of each group, or an ``optax.MultiSteps``. What it computes over a whole tree (a global
        norm), it computes over one group.
      groups: a mapping from patterns or selectors to conditions, or to pairs of an element mask
        (:func:`optax_freeze.rows`, :func:`optax_freeze.elements`) and a condition: the group is then those elements of
        its leaves. A condition is a function ``step -> bool`` (True: frozen; ``step`` is an int32 scalar that counts
        the updates of this transformation from 0), or a bool, which :func:`optax_freeze.set_frozen` changes between
        steps. What two groups name belongs to the first.
      coupled: a transformation that runs first, over all groups together, the frozen ones zeroed: a clip by the global
        norm.
      tied: ``"error"`` refuses, in ``init``, one array object at two paths that are not in the same group.

    Returns:
      A transformation. Its ``init`` raises ``ValueError`` if a group matches nothing or has nothing of its own. Its
      ``update`` takes and gives updates of the structure given to ``init``, which may have holes.

    Raises:
      TypeError, ValueError: if an argument is none of these; in ``init``, if a condition returns no bool, or several.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> tx = fz.freeze_when(optax.sgd(0.5), {"encoder": fz.unfreeze_at(2)})
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     print(fz.currently_frozen(state), params["encoder"])
      ...     updates, state = tx.update(params, state, params)
      ...     params = optax.apply_updates(params, updates)
      {'encoder': True} [1. 1.]
      {'encoder': True} [1. 1.]
      {'encoder': False} [1. 1.]
      >>> params["encoder"]
      Array([0.5, 0.5], dtype=float32)
    """
    inner = _as_transformation(inner, "inner", groups)
    coupled = None if coupled is None else _as_transformation(coupled, "coupled")
    claims, conditions = _parse(groups)
    scheduled = tuple(condition if callable(condition) else None for condition in conditions)
    names = tuple(claim.name for claim in claims)
    known: collections.deque[Division] = collections.deque(maxlen=8)  # of states made here, or found to fit

    def init_fn(params: PyTree) -> PyTree:
        register_with_flax(Groups)
        for name, condition in zip(names, scheduled, strict=True):
            if condition is not None:
                check(name, condition)
        values, treedef = _tree.flatten(params)
        division, own = Division.of(claims, params, tied=tied)
        known.append(division)
        own = [
            [copy_like(mask, value) if is_array(mask) else mask for mask, value in zip(masks, values, strict=True)]
            for masks in own
        ]
        every = all_masks(division, own)
        states = [
            _init(inner, jax.tree.unflatten(treedef, spec.take(values, masks)))
            for spec, masks in zip(division.specs, every, strict=True)
        ]
        of_groups = {
            claim.name: GroupState(
                () if callable(condition) else jnp.array(condition),
                jax.tree.unflatten(treedef, masks) if isinstance(claim.mask, Elements) else (),
                state,
            )
            for claim, condition, masks, state in zip(claims, conditions, own, states[:-1], strict=True)
        }
        coupled_state = ()
        if coupled is not None:
            coupled_state = _init(coupled, jax.tree.unflatten(treedef, division.whole.take(values, every[-1])))
        spec = Groups(names, scheduled, division)
        return FreezeWhenState(jnp.zeros([], jnp.int32), spec, of_groups, states[-1], coupled_state)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        state = _with_division(state, claims, updates if params is None else params, known)
        _refuse_other_schedule(state.spec, scheduled)
        division = state.spec.division
        values, treedef = division.whole.align(updates, "updates", _ALL_GRADIENTS)
        olds, params_treedef = division.whole.align(params, "params") if params is not None else ([], None)
        masks = all_masks(division, [_tree.flatten(state.groups[name].masks)[0] for name in names])
        frozen = [
            state.groups[name].frozen if condition is None else ask(name, condition, state.step)
            for name, condition in zip(names, state.spec.conditions, strict=True)
        ]

        def run(tx: Any, frozen: Any, inner_state: Any, spec: Resolved, masks: Masks, values: Sequence[Any]) -> Any:
            if all(answer is True for answer in spec.answers):
                return [_tree.HOLE] * len(values), inner_state
            updates = jax.tree.unflatten(treedef, spec.take(values, masks))
            trainable = None if params is None else jax.tree.unflatten(params_treedef, spec.take(olds, masks))
            extra = without_frozen(extra_args, spec, masks, treedef, params)
            updates, inner_state = _unless(frozen, tx.update, updates, variables_outside(inner_state), trainable, extra)
            return _tree.flatten(updates)[0], parts_outside(inner_state)

        moves, coupled_state = values, state.coupled_state
        if coupled is not None:
            moves = _zeroed(values, division, masks, frozen)
            moves, coupled_state = run(coupled, False, coupled_state, division.whole, masks[-1], moves)
        states = [*(state.groups[name].inner_state for name in names), state.rest_state]
        sections = zip([*frozen, False], states, division.specs, masks, strict=True)
        parts, states = zip(*(run(inner, *section, moves) for section in sections), strict=True)
        new = [
            zero(leaf, value, olds[i] if params is not None else None)
            if answer is True
            else division.merge(i, [part[i] for part in parts], masks, olds[i] if olds else value)
            for i, (leaf, answer, value) in enumerate(
                zip(division.whole.leaves, division.whole.answers, values, strict=True)
            )
        ]
        of_groups = {
            name: state.groups[name]._replace(inner_state=inner_state)
            for name, inner_state in zip(names, states[:-1], strict=True)
        }
        return jax.tree.unflatten(treedef, new), FreezeWhenState(
            jnp.asarray(optax.safe_increment(state.step)), state.spec, of_groups, states[-1], coupled_state
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


_ALL_GRADIENTS = "give the gradient of every group, as a group may thaw: jax.grad(loss), or fz.grad(loss, False)"


def _init(inner: optax.GradientTransformation, trainable: PyTree) -> optax.OptState:
    try:
        return parts_outside(inner.init(trainable))
    except IndexError:  # Optax's line searches look at the first leaf
        if jax.tree.leaves(trainable):
            raise
        return ()


def _unless(
    frozen: Any, update: Callable[..., Any], updates: PyTree, state: PyTree, params: PyTree, extra_args: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    """``update``, or where ``frozen`` updates that change nothing and the state as it is.

    A loop of no or one round, and no ``lax.cond``: XLA updates the state of a loop in place, but copies what a branch
    passes on, into the conditional and out of it, even where it is donated (five times the time of Adam on a CPU).
    """
    if not isinstance(frozen, Tracer):
        if not frozen:
            return update(updates, state, params, **extra_args)
        leaves, treedef = jax.tree.flatten(updates)
        of = zip(leaves, leaves if params is None else jax.tree.leaves(params), strict=True)
        return jax.tree.unflatten(treedef, [zero(Leaf("", p.shape, p.dtype), u, p) for u, p in of]), state
    # Traced once, though called for its shapes and in the loop.
    train = jax.jit(lambda updates, state, params: update(updates, state, params, **extra_args))
    new, new_state = jax.eval_shape(train, updates, state, params)
    shapes, treedef = jax.tree.flatten(new)
    # Moments of bfloat16 parameters become float32 in the first update, if the gradients are.
    state = jax.tree.map(lambda old, new: old if old.dtype == new.dtype else old.astype(new.dtype), state, new_state)
    # What a loop starts from is written to: one buffer for each, as long as no two are equal.
    still = [
        _filled(u, jnp.where(frozen, negative_zero(shape.dtype), jnp.asarray(i, shape.dtype)), shape)
        for i, (u, shape) in enumerate(zip(jax.tree.leaves(updates), shapes, strict=True))
    ]

    def step(carry: Any) -> Any:
        return (True, *train(updates, carry[2], params))

    _, new, state = jax.lax.while_loop(
        lambda carry: ~carry[0], step, (frozen, jax.tree.unflatten(treedef, still), state)
    )
    return new, state


def _filled(like: Any, value: Any, shape: Any) -> jax.Array:
    """An array sharded as another one of its shape; the gradients of examples have an axis more than updates."""

    def filled(like: Any, value: Any) -> jax.Array:
        return jnp.full_like(like, value, shape.dtype, None if like.shape == shape.shape else shape.shape)

    return laid_out(explicit_sharding(like, shape.shape), filled, like, value)


def _zeroed(values: Sequence[Any], division: Division, masks: Sequence[Masks], frozen: Sequence[Any]) -> list[Any]:
    """The gradients with zeros in the place of what is frozen now."""
    new = list(values)
    for condition, spec, arrays in zip(frozen, division.specs[:-1], masks[:-1], strict=True):
        for i, answer in enumerate(spec.answers):
            if answer is not True:
                zeros = jax.tree.map(lambda x, c=condition: jnp.where(c, jnp.zeros((), x.dtype), x), new[i])
                new[i] = zeros if answer is False else answer.choose(new[i], zeros, arrays[i])
    return new


def _parse(groups: Any) -> tuple[list[Claim], list[Any]]:
    """The groups as claims, and for each its condition or whether it is frozen at first."""
    if not isinstance(groups, Mapping):
        raise type_error(
            "fz.freeze_when takes a mapping",
            at="its second argument",
            got=described(groups),
            expected="{pattern: condition}, {pattern: bool} or {pattern: (element mask, condition)}",
            fix="for what stays frozen all along, use fz.freeze(inner, frozen)",
        )
    claims, conditions = [], []
    for key, value in groups.items():
        name = group_name(key)
        mask = None
        if isinstance(value, tuple) and len(value) == 2:
            mask, value = as_choice(value[0], name), value[1]
        if any(claim.name == name for claim in claims) or isinstance(mask, bool):
            raise value_error(
                "a bool where an element mask belongs" if isinstance(mask, bool) else "two groups of one name",
                at=name,
                got=repr(groups[key]) if isinstance(mask, bool) else f"{key!r}, and an equal one before",
                expected="(element mask, condition), and each group once",
                fix="for whole leaves give the condition alone: {pattern: condition}",
            )
        if not callable(value):
            refuse_no_bool(name, value, "fz.freeze_when", "a function step -> bool, or ")
        claims.append(Claim(name, as_selector(key, "fz.freeze_when"), mask))
        conditions.append(value)
    return claims, conditions


def _as_transformation(tx: Any, name: str, groups: Any = None) -> optax.GradientTransformationExtraArgs:
    if isinstance(tx, optax.MultiSteps):
        update_fn: Any = tx.update
        return optax.GradientTransformationExtraArgs(tx.init, update_fn)
    if isinstance(tx, optax.GradientTransformation):
        return optax.with_extra_args_support(tx)
    fix = "call the factory: optax.adam(1e-3), not optax.adam" if callable(tx) else "pass an Optax optimizer"
    if isinstance(groups, (optax.GradientTransformation, optax.MultiSteps)):
        fix = "swap the two arguments"
    raise type_error(
        f"`{name}` is no optimizer",
        at="fz.freeze_when",
        got=described(tx),
        expected="fz.freeze_when(optimizer, {pattern: condition})",
        fix=fix,
    )


def _with_division(
    state: Any, claims: Sequence[Claim], tree: PyTree, known: collections.deque[Division]
) -> FreezeWhenState:
    """The state with its groups resolved, again after ``optax.tree_map_params``, which drops what is static."""
    if not isinstance(state, FreezeWhenState) or state.spec.names != tuple(claim.name for claim in claims):
        raise type_error(
            "the state of another transformation",
            at="the second argument of update",
            got=f"groups {list(state.spec.names)}" if isinstance(state, FreezeWhenState) else type(state).__name__,
            expected=f"FreezeWhenState of the groups {[claim.name for claim in claims]}",
            fix="state = tx.init(params), or fz.migrate(state, tx, params) for other groups than before",
        )
    its = state.spec.division
    if not its.whole.leaves:
        division, _ = Division.of(claims, tree, tied="ignore")
        return state._replace(spec=dataclasses.replace(state.spec, division=division))
    if not any(its is division for division in known):
        with jax.ensure_compile_time_eval():  # of two compact masks at one leaf: their union has a static count
            division, _ = Division.of(claims, parameters_of(its.whole, tree), tied="ignore")
        _refuse_other_groups(state.spec.names, its, division)
        known.append(its)
    return state


def _refuse_other_groups(names: Sequence[str], its: Division, mine: Division) -> None:
    """A ``ValueError`` for a state whose groups of these names own something else."""

    def has(answer: Answer) -> str:
        if isinstance(answer, bool):
            return "nothing of it" if answer else "all of it"
        return f"{~answer.source!r} of it" if isinstance(answer, RowIndex) else "some of its elements"

    for name, a, b in zip(names, its.specs, mine.specs, strict=False):
        for leaf, in_state, here in zip(its.whole.leaves, a.answers, b.answers, strict=True):
            if in_state != here:
                raise value_error(
                    "the state of other groups",
                    at=leaf.path,
                    got=f"a state in which the group {name!r} has {has(in_state)}",
                    expected=f"the state of this transformation, in which it has {has(here)}",
                    fix="state = fz.migrate(state, tx, params), whenever the groups change",
                )


def _refuse_other_schedule(spec: Groups, scheduled: Sequence[Condition | None]) -> None:
    """A ``ValueError`` for a switch where a condition is, and for other conditions, as far as they can be compared."""
    for name, mine, its in zip(spec.names, scheduled, spec.conditions, strict=True):
        both = dataclasses.is_dataclass(mine) and dataclasses.is_dataclass(its)
        if (mine is None) != (its is None) or (both and mine != its):
            raise value_error(
                "the state of another schedule",
                at=name,
                got=f"a state in which {its!r} decides" if its else "a state in which fz.set_frozen decides",
                expected=repr(mine) if mine else "a switch for fz.set_frozen",
                fix="state = fz.migrate(state, tx, params), which keeps the step and the moments",
            )
