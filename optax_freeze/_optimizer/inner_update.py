"""What an inner optimizer receives in an update, and where its results go: into updates or into new parameters."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_freeze._errors import counted, in_one_line, type_error, value_error
from optax_freeze._optimizer.call_init import init_of
from optax_freeze._optimizer.kept_state import KeptRows, KeptState
from optax_freeze._optimizer.leaf_updates import updated
from optax_freeze._optimizer.nnx_variables import as_before, called_with, stored, stored_state, values_in
from optax_freeze._optimizer.outer_transformation import OF_PARAMS, Around, inside, mapped
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import is_on_host, to_device, to_memory_of
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.restricted import restricted
from optax_freeze._spec.selection import Selection, shape_of_part
from optax_freeze._spec.tree import Leaf, Part, PyTree


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
        olds, treedef = plan.align(params, "params")
        return cls(treedef, olds, params, olds, treedef, extra_args, computes_grads=True)

    def run(
        self, tx: optax.GradientTransformation, plan: Plan, state: PyTree, kept: KeptState | None = None
    ) -> tuple[list[Any], PyTree]:
        """One update of ``tx`` with the trainable part of a plan: flat updates and the new state."""
        form = self.form(in_memory(tx.update), plan, state, kept)
        changes, state = self.results(form)
        return changes, form.stored(state)

    def with_params_after(self, plan: Plan, changes: Sequence[Any]) -> "InnerUpdate":
        """The arguments with the parameters after these updates of a plan."""
        olds = list(self.olds)
        for i in plan.own:
            if i not in self.missing:
                olds[i] = updated(olds[i], changes[i], plan.selections[i])
        return self._replace(olds=olds, params=jax.tree.unflatten(self.params_treedef, olds))

    def form(self, update: Callable[..., Any], plan: Plan, state: PyTree, kept: KeptState | None = None) -> "Trees":
        """How an update is called with the trainable part of a plan, and this state."""
        called = called_with(state, plan, self.treedef)
        if kept is None or not plan.kept:
            return Trees(update, called, plan, lambda new: as_before(new, state, called, plan))
        rows = KeptRows(kept, plan.with_treedef(self.treedef), called)
        return Trees(update, rows.read(), plan, lambda new: as_before(rows.written(new), state, called, plan))

    def results(self, form: Any) -> tuple[list[Any], PyTree]:
        """The flat updates and the new state of :class:`Trees`, or of another form."""
        updates = form.trainable(self.treedef, self.grads)
        params = None if self.params is None else form.trainable(self.params_treedef, self.olds)
        extra_args = form.extra_args(self, updates)
        update = inside(Around(form.plan, _tree.flatten(updates)[1]), form.update)
        try:
            updates, state = update(updates, form.state, params, **extra_args)
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


class Trees(NamedTuple):
    """How any transformation is called for a plan: with trees in which a placeholder stands for all other leaves.

    ``stored(state)`` is a new state as it is stored.
    """

    update: Callable[..., Any]
    state: PyTree
    plan: Plan
    stored: Callable[[PyTree], PyTree]

    def trainable(self, treedef: Any, values: Sequence[Any]) -> PyTree:
        return values_in(self.plan.trainable(treedef, values), self.plan)

    def extra_args(self, call: InnerUpdate, updates: PyTree) -> dict[str, Any]:
        found = _without_frozen(call.extra_args, self.plan, call.treedef, call.params)
        return {**found, "grad": updates} if call.computes_grads and "grad" in found else found

    def flat(self, updates: PyTree) -> list[Any]:
        return parts_of(self.plan, _tree.flatten(updates)[0])


def parts_of(plan: Plan, updates: list[Any]) -> list[Any]:
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
    tx: optax.GradientTransformation,
    plan: Plan,
    params: PyTree,
    *,
    frozen: Any = None,
    store: Callable[[PyTree, Plan, PyTree], PyTree] = stored_state,
) -> optax.OptState:
    """The state of an inner optimizer for the trainable part of the parameters, of ``fz.freeze`` with its spec."""
    values, treedef = _tree.flatten(params)
    values = plan.full(plan.trainable_leaves(values))
    trainable = stored(plan, treedef, values) if plan.variables else jax.tree.unflatten(treedef, values)
    state = inside(Around(plan, _tree.flatten(trainable)[1], frozen), init_of)(tx, trainable)
    return store(state, plan, trainable)


def in_memory(update: Any) -> Any:
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
