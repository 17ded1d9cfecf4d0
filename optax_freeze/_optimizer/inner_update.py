"""What an inner optimizer receives in an update, and where its results go: into updates or into new parameters."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from optax_freeze._errors import counted, in_one_line, type_error, value_error
from optax_freeze._optimizer.call_init import init_of
from optax_freeze._optimizer.extra_args import OF_PARAMS, mapped
from optax_freeze._optimizer.group_state import closed, is_tree, opened, without_others
from optax_freeze._optimizer.kept_state import KeptRows, KeptState
from optax_freeze._optimizer.leaf_updates import updated
from optax_freeze._optimizer.leafwise import is_leafwise
from optax_freeze._optimizer.nnx_variables import as_before, called_with, stored, stored_state, values_in
from optax_freeze._optimizer.outer_transformation import Around, inside
from optax_freeze._optimizer.skip_update import unless, update_unless
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import is_on_host, to_device, to_memory_of
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.restricted import restricted
from optax_freeze._spec.selection import Selection, shape_of_part
from optax_freeze._spec.tree import Leaf, Part, PyTree

GradientOf: TypeAlias = Callable[[int], tuple[Sequence[Any], Any]]
"""Called with the number of a plan: the gradient of its leaves, in a list of all leaves, and its norm."""


class InnerUpdate(NamedTuple):
    """The arguments of an update, with gradients and parameters flattened.

    ``missing`` are the positions of trainable Python numbers that have no gradient, and so no update. If gradients
    are computed in the update, ``grads`` are the parameters, and each is also the extra argument ``grad``.
    """

    treedef: Any
    grads: Sequence[Any]
    params: PyTree | None
    olds: Sequence[Any]
    params_treedef: Any
    extra_args: dict[str, Any]
    missing: frozenset[int] = frozenset()
    computes_grads: bool = False

    @classmethod
    def aligned(
        cls, plan: Plan, grads: Any, params: PyTree | None, extra_args: dict[str, Any], fix: str | None = None
    ) -> "InnerUpdate":
        """Refuses trees that do not fit a plan; ``fix`` is for a trainable leaf that has no gradient."""
        values, treedef, missing = plan.align_gradients(grads, params, fix)
        olds, params_treedef = ([None] * len(plan.leaves), None) if params is None else plan.align(params, "params")
        return cls(treedef, values, params, olds, params_treedef, extra_args, missing)

    @classmethod
    def computing_grads(cls, plan: Plan, params: PyTree, extra_args: dict[str, Any]) -> "InnerUpdate":
        """The arguments of an update in which the gradients are computed."""
        olds, treedef = plan.align(params, "params")
        return cls(treedef, olds, params, olds, treedef, extra_args, computes_grads=True)

    def updates(
        self, tx: "Inner", plans: Sequence[Plan], states: Sequence[PyTree], gradient: GradientOf, frozen: Sequence[Any]
    ) -> tuple[list[list[Any]], list[PyTree], list[Any]]:
        """For each plan the flat updates of its trainable part, the new state and the norm of the gradient.

        All plans but the last are groups.
        """
        runs = []
        for n, (plan, state, is_frozen) in enumerate(zip(plans, states, frozen, strict=True)):
            grads, norm = gradient(n)
            runs.append((*self.run(tx, plan, state, is_frozen, grads, of_group=n < len(plans) - 1), norm))
        changes, states, norms = map(list, zip(*runs, strict=True))
        return changes, states, norms

    def new_params(
        self, tx: "Inner", plans: Sequence[Plan], states: Sequence[PyTree], gradient: GradientOf, frozen: Sequence[Any]
    ) -> tuple[PyTree, list[PyTree], list[Any]]:
        """The new parameters, and for each plan the new state and the norm; what is frozen is not computed.

        Plans that share a leaf add to it in turn.
        """
        new, new_states, norms = list(self.olds), [], []
        for n, (plan, state, is_frozen) in enumerate(zip(plans, states, frozen, strict=True)):
            own = [i for i in plan.own if i not in self.missing]
            form = tx.form(plan, self.treedef, state, of_group=n < len(plans) - 1)

            def step(carry: Any, n: int = n, plan: Plan = plan, own: Sequence[int] = own, form: Any = form) -> Any:
                grads, norm = gradient(n)
                leaves = list(self.olds)
                for i in own:
                    leaves[i] = carry[0][i]
                changes, state = self._replace(olds=leaves)._run(form._replace(state=carry[1]), False, grads)
                return {i: updated(leaves[i], changes[i], plan.selections[i]) for i in own}, state, norm

            carry = {i: new[i] for i in own}, form.state, jnp.zeros([], jnp.float32)
            leaves, state, norm = unless(is_frozen, step, carry)
            for i in own:
                new[i] = leaves[i]
            new_states.append(form.closed(state))
            norms.append(norm)
        return jax.tree.unflatten(self.params_treedef, new), new_states, norms

    def run(
        self, tx: "Inner", plan: Plan, state: PyTree, frozen: Any, grads: Sequence[Any], *, of_group: bool = False
    ) -> tuple[list[Any], PyTree]:
        """One update of ``tx`` with the trainable part of a plan, unless it is frozen: flat updates and the state."""
        form = tx.form(plan, self.treedef, state, of_group)
        changes, state = self._run(form, frozen, grads)
        return changes, form.closed(state)

    def _run(self, form: "Trees | Lists", frozen: Any, grads: Sequence[Any]) -> tuple[list[Any], PyTree]:
        updates = form.trainable(self.treedef, grads)
        params = None if self.params is None else form.trainable(self.params_treedef, self.olds)
        extra_args = form.extra_args(self, updates)
        update = inside(Around(form.plan, _tree.flatten(updates)[1]), form.update)
        try:
            updates, state = update_unless(frozen, update, updates, form.state, params, extra_args)
        except (ValueError, TypeError, AttributeError) as error:
            if params is not None:
                raise
            raise (type_error if isinstance(error, TypeError) else value_error)(
                f"the inner optimizer failed without parameters: {in_one_line(error)}",
                at="update",
                got="params=None",
                expected="the parameters, if the optimizer uses them (weight decay, a trust ratio)",
                fix="if so, tx.update(grads, state, params)",
            ) from error
        return form.flat(updates), state


class Inner:
    """A transformation in one update of several plans.

    If it is leafwise, groups call it with lists, and groups of equal leaves share what JAX traces.
    """

    def __init__(self, tx: optax.GradientTransformation, kept: KeptState | None = None) -> None:
        self._kept = kept
        self._update, self._is_leafwise = _in_memory(tx.update), all(map(is_leafwise, tx))
        self._traced_once = jax.jit(self._update)

    def form(self, plan: Plan, treedef: Any, state: PyTree, of_group: bool) -> "Trees | Lists":
        """How it is called for a plan."""
        if of_group and self._is_leafwise and is_tree(plan):
            return Lists(self._of_lists, opened(state, list), plan, state)
        tree_of = lambda own: jax.tree.unflatten(treedef, plan.full(dict(zip(plan.own, own, strict=True))))  # noqa: E731
        own = called_with(opened(state, tree_of) if of_group else state, plan, treedef)
        rows = KeptRows(self._kept, plan.with_treedef(treedef), own) if self._kept is not None and plan.kept else None
        return Trees(self._update, own if rows is None else rows.read(), plan, state, of_group, rows)

    def _of_lists(self, *args: Any) -> tuple[PyTree, PyTree]:
        is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
        return (self._traced_once if is_traced else self._update)(*args)


class Trees(NamedTuple):
    """How any transformation is called for a plan: with trees in which a placeholder stands for all other leaves."""

    update: Callable[..., Any]
    state: PyTree
    plan: Plan
    stored: PyTree
    of_group: bool  # whether `stored` has `GroupLeaves`
    kept: KeptRows | None = None

    def trainable(self, treedef: Any, values: Sequence[Any]) -> PyTree:
        return values_in(self.plan.trainable(treedef, values), self.plan)

    def extra_args(self, call: InnerUpdate, updates: PyTree) -> dict[str, Any]:
        found = _without_frozen(call.extra_args, self.plan, call.treedef, call.params)
        return {**found, "grad": updates} if call.computes_grads and "grad" in found else found

    def flat(self, updates: PyTree) -> list[Any]:
        return _parts_of(self.plan, _tree.flatten(updates)[0])

    def closed(self, state: PyTree) -> PyTree:
        state = state if self.kept is None else self.kept.written(state)
        if not self.of_group:
            return as_before(state, self.stored, self.state, self.plan)

        def own(tree: PyTree) -> list[Any]:
            leaves = _tree.flatten(tree)[0]
            return [leaves[i] for i in self.plan.own]

        values = values_in(self.stored, self.plan)
        return as_before(closed(state, values, own), self.stored, values, self.plan)


class Lists(NamedTuple):
    """How a leafwise transformation is called for a group: with lists of the leaves that train, also in its state."""

    update: Callable[..., Any]
    state: PyTree
    plan: Plan
    stored: PyTree

    def trainable(self, _: Any, values: Sequence[Any]) -> list[Any]:
        return list(self.plan.trainable_leaves(values).values())

    def extra_args(self, call: InnerUpdate, updates: PyTree) -> dict[str, Any]:
        return {}

    def flat(self, changes: Sequence[Any]) -> list[Any]:
        return _parts_of(self.plan, self.plan.full(dict(zip(self.plan.own, changes, strict=True))))

    def closed(self, state: PyTree) -> PyTree:
        return closed(state, self.stored, list)


def _parts_of(plan: Plan, updates: list[Any]) -> list[Any]:
    """The updates of an inner optimizer, with the ``Part`` of leaves that train in part."""
    what = "the inner optimizer returned"
    if len(updates) != len(plan.leaves):
        got, expected = (counted(n, "leaf", "leaves") for n in (len(updates), len(plan.leaves)))
        fix = "return updates of the structure that the inner optimizer receives"
        raise value_error(f"{what} updates of another structure", at="update", got=got, expected=expected, fix=fix)
    for update, leaf, index in zip(updates, plan.leaves, plan.part_indices, strict=True):
        if index is None:
            continue
        shape = shape_of_part(index, leaf.shape or ())
        if not _tree.is_leaf(update) and jnp.shape(update) != shape:
            got, fix = f"shape {jnp.shape(update)}", "compute it from the updates and params that `update` receives"
            expected = f"shape {shape}: of the leaf, of shape {leaf.shape}, only this part trains"
            raise value_error(f"{what} an update of another shape", at=leaf.path, got=got, expected=expected, fix=fix)
    return plan.parts_of(updates)


def init_inner(
    tx: optax.GradientTransformation, plan: Plan, params: PyTree, *, is_static: bool = False
) -> optax.OptState:
    """The state of an inner optimizer for the trainable part of the parameters."""
    trainable = _trainable(plan, params)
    return stored_state(_init(tx, plan, trainable, is_static), plan, trainable)


def init_group(tx: optax.GradientTransformation, plan: Plan, params: PyTree) -> optax.OptState:
    """The state of an inner optimizer for a group."""
    trainable = _trainable(plan, params)
    state = _init(tx, plan, trainable)
    return without_others(stored_state(state, plan, trainable) if plan.variables else state, plan, trainable)


def _init(tx: optax.GradientTransformation, plan: Plan, trainable: PyTree, is_static: bool = False) -> optax.OptState:
    return inside(Around(plan, _tree.flatten(trainable)[1], is_static), init_of)(tx, trainable)


def _trainable(plan: Plan, params: PyTree) -> PyTree:
    values, treedef = _tree.flatten(params)
    values = plan.full(plan.trainable_leaves(values))
    return stored(plan, treedef, values) if plan.variables else jax.tree.unflatten(treedef, values)


def _in_memory(update: Any) -> Any:
    """An update whose new state stays in the memory of the old one: host or device memory."""

    def update_fn(updates: PyTree, state: PyTree, params: PyTree | None, **extra_args: Any) -> tuple[PyTree, PyTree]:
        if not any(map(is_on_host, jax.tree.leaves(state))):
            return update(updates, state, params, **extra_args)
        updates, new = update(updates, jax.tree.map(to_device, state), params, **extra_args)
        return updates, jax.tree.map(to_memory_of, state, new)

    return update_fn


def _without_frozen(extra_args: dict[str, Any], plan: Plan, treedef: Any, params: PyTree | None) -> dict[str, Any]:
    """The extra arguments of an inner optimizer: what has the structure of the gradients loses its frozen part."""

    def trainable(tree: PyTree) -> PyTree:
        values, structure = _tree.flatten(tree) if tree is None else _tree.flatten_beside(treedef, tree)
        # A scalar beside a lone leaf has its structure, too.
        if structure != treedef or (len(values) == 1 and jnp.shape(values[0]) != plan.leaves[0].shape):
            return tree
        values = [_beside_part(*each) for each in plan.entries(values)]
        return values_in(plan.trainable(treedef, values), plan)

    if params is None or not any(callable(extra_args.get(name)) for name in OF_PARAMS):
        return {name: value if name in OF_PARAMS else trainable(value) for name, value in extra_args.items()}
    values, structure = _tree.flatten(params)
    rest = values_in(jax.tree.unflatten(structure, plan.rest(values)), plan)

    def restrict(fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` of the trainable part, called as code of the user with the containers of the parameters."""
        call = inside(None, fn)

        @functools.wraps(call)
        def called(full: PyTree, *args: Any, **kwargs: Any) -> Any:
            return call(structure.unflatten(_tree.flatten(full)[0]), *args, **kwargs)

        return restricted(called, rest)

    return mapped(extra_args, trainable, restrict)


def _beside_part(leaf: Leaf, selection: Selection, value: Any) -> Any:
    """A scalar for a leaf becomes a scalar beside its trainable part; other values are taken apart like the leaf."""
    is_number = isinstance(value, (int, float, complex)) or getattr(value, "shape", None) == ()
    if not selection.in_part or not leaf.shape or not is_number:
        return value
    index = selection.part_index
    return jnp.full(leaf.shape, value) if index is None else Part(value, index, leaf.shape)
