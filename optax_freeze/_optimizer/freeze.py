"""Frozen updates for any Optax optimizer: :func:`masked_zero_updates` and :func:`freeze`.

In a chain ``optax.freeze`` is too early (weight decay and momentum come after it) or too late (moments are stored, and
frozen gradients reach norms and finite checks). :func:`freeze` wraps the optimizer instead.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
import optax

from optax_freeze._errors import described, is_array, is_concrete, type_error, value_error
from optax_freeze._optimizer.accepted_plans import AcceptedPlans, refuse_other_selections
from optax_freeze._optimizer.call_init import changed, saying_what_optax_calls, with_own_buffers
from optax_freeze._optimizer.full_updates import merged
from optax_freeze._optimizer.inner_update import InnerUpdate, init_inner
from optax_freeze._optimizer.kept_state import KeptState, refuse_part_of_kept
from optax_freeze._optimizer.nnx_variables import stored
from optax_freeze._optimizer.outer_transformation import around, as_parts
from optax_freeze._optimizer.transformation import Update, as_transformation, is_optimizer
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.part_source import refuse_other_rows
from optax_freeze._spec.plan import Plan, refuse_other_leaf
from optax_freeze._spec.resolve import Spec, Tied, make_plan, register_with_flax, warn_of_extent, warn_of_leaves
from optax_freeze._spec.tree import Part, PyTree


def masked_zero_updates(frozen: Spec, *, tied: Tied = "error") -> optax.GradientTransformationExtraArgs:
    """Sets the updates of frozen leaves to zero: :func:`freeze` of ``optax.identity()``.

    Like ``optax.freeze``, but it selects instead of multiplying (NaN times zero is NaN), and its zeros are -0.0, which
    preserve every normal number when added (:func:`optax_freeze.apply_updates` with ``frozen`` preserves every bit). As
    the last transformation of a chain it keeps frozen parameters unchanged. The transformations before it still receive
    frozen gradients and store moments for them; use :func:`freeze` to avoid that.

    Args:
      frozen: the spec of the frozen parameters, in any form.
      tied: ``"error"`` raises an error in ``init`` if an array is at two paths and only one of them is frozen, and
        emits a :class:`FreezeWarning` if both train; ``"ignore"`` allows it.

    Returns:
      A transformation. Its ``init`` resolves the spec and raises ``ValueError`` if it does not fit; its ``update``
      takes updates with the structure of the parameters. An integer leaf gets a zero with its own dtype, a PRNG key
      ``optax.MaskedNode()``, and an object that is not an array None, which ``equinox.apply_updates`` skips.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> tx = optax.chain(optax.adamw(0.1), fz.masked_zero_updates("encoder"))
      >>> updates, _ = tx.update(jax.tree.map(lambda p: p * jnp.nan, params), tx.init(params), params)
      >>> updates["encoder"]
      Array([-0., -0.], dtype=float32)
    """
    tx: Any = freeze(optax.identity(), frozen, tied=tied)
    return tx._replace(update=dataclasses.replace(tx.update, only_freezes=True))


class FreezeState(NamedTuple):
    """State of :func:`freeze`: the resolved spec, a node without leaves; its masks; the state of the optimizer.

    ``masks`` is a tree like the parameters, or empty; ``inner_state`` is that of ``optax.multi_transform``.
    """

    plan: Plan
    masks: PyTree
    inner_state: optax.OptState

    @property
    def current_plan(self) -> Plan:
        """The plan with the masks that the state has now."""
        return self.plan.with_masks(_tree.flatten(self.masks)[0])

    @property
    def spec(self) -> "FreezeState":
        """The state without that of the optimizer."""
        return self._replace(inner_state=())

    def differs(self, other: Any) -> bool:
        """Whether another state has another spec, or other masks as far as both have values."""
        if not isinstance(other, FreezeState) or self.plan != other.plan:
            return True
        pairs = zip(self.current_plan.masks, other.current_plan.masks, strict=False)
        return any(is_concrete(x) and is_concrete(y) and not np.array_equal(x, y) for x, y in pairs)


class FreezingPart(NamedTuple):
    """A transformation as a part of :func:`optax_freeze.union`.

    ``plan(params)`` resolves its spec, ``state(state, tree)`` refuses a state of another one, and
    ``run(call, plan, inner_state)`` gives the flat updates of its optimizer and the new state.
    """

    plan: Callable[[PyTree], Plan]
    state: Callable[[Any, PyTree], FreezeState]
    run: Callable[[InnerUpdate, Plan, optax.OptState], tuple[list[Any], optax.OptState]]
    full_updates: bool


def freeze(
    inner: optax.GradientTransformation | optax.MultiSteps,
    frozen: Spec | None = None,
    *,
    full_updates: bool = True,
    tied: Tied = "error",
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it runs only on the trainable parameters.

    Equivalent to ``optax.multi_transform`` with ``inner`` for the trainable parameters, followed by
    :func:`masked_zero_updates`. ``inner`` never receives a frozen leaf, so frozen parameters have no moments and no
    weight decay, are not part of a global norm, and cannot spread a NaN. Updates and state are those of ``inner`` on
    the trainable parameters alone. Put wrappers whose state has the shape of the parameters (``optax.MultiSteps``,
    ``optax.contrib.schedule_free``, averages) inside.

    Args:
      inner: the optimizer, or an ``optax.MultiSteps``.
      frozen: the spec of the frozen parameters, in any form.
      full_updates: if True, updates have the structure of the parameters, with -0.0 for frozen ones, for
        ``optax.apply_updates``, which preserves all but denormals and signalling NaNs. (A parameter in host memory gets
        a scalar -0.0, or the ``Part`` of its trainable rows.) If False, they have ``optax.MaskedNode()`` for frozen
        parameters, for :func:`optax_freeze.apply_updates`, which preserves every bit.
      tied: ``"error"`` raises an error in ``init`` if an array is at two paths and only one of them is frozen, and
        emits a :class:`FreezeWarning` if both train; ``"ignore"`` allows it.

    Returns:
      A transformation. Its ``init`` takes all parameters or only the trainable ones, resolves the spec, and raises
      ``ValueError`` if it does not fit. Its ``update`` takes full gradients or those of
      :func:`optax_freeze.value_and_grad`. Extra arguments are restricted to the trainable parameters before they are
      passed to ``inner``: trees with the structure of the gradients, and the functions ``value_fn``, ``obj_fn`` and
      ``grad_fn``, which are called with parameters as given to ``update``.

    Raises:
      TypeError: if ``inner`` is not an optimizer.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(3), "head": jnp.ones(2)}
      >>> tx = fz.freeze(optax.adamw(0.1), "encoder")
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> updates["encoder"]
      Array([-0., -0., -0.], dtype=float32)
    """
    if frozen is None:
        _refuse_no_spec(inner)
    inner = as_transformation(inner, _CALL, name="inner", other=frozen)
    accepted = AcceptedPlans(FreezeState, lambda plan, tree: _refuse_other_spec(plan, frozen, tree))

    def transform(plan: Plan) -> optax.GradientTransformationExtraArgs:
        labels = lambda tree: plan.labels(_tree.flatten(tree)[1])  # noqa: E731
        return optax.multi_transform({"trainable": inner, "frozen": optax.identity()}, labels)

    kept = KeptState(lambda plan: transform(plan).init)

    def init_fn(params: PyTree) -> PyTree:
        register_with_flax()
        params = as_parts(params, around())
        plan = changed(make_plan(params, frozen, tied=tied))
        warn_of_extent(plan, params, frozen, stacklevel=2)
        values = _tree.flatten(params)[0]
        warn_of_leaves(values, plan, plan, tied, stacklevel=2)
        _refuse_other_parts(plan, values)
        masks = _masks_of_state(plan, values, frozen, accepted.latest)
        state = FreezeState(accepted.add(plan.without_masks()), masks, ())
        plan = state.current_plan
        with saying_what_optax_calls():
            inner_state = init_inner(transform(plan), plan.in_state, params, frozen=frozen)
        if plan.kept:
            kept.refuse_what_does_not_fit(plan, inner_state)
        return with_own_buffers(state._replace(inner_state=inner_state), params)

    def run(call: InnerUpdate, plan: Plan, state: optax.OptState) -> tuple[list[Any], optax.OptState]:
        return call.run(transform(plan), plan, state, kept)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None, extra_args: dict[str, Any], *, in_place: bool
    ) -> tuple[PyTree, PyTree]:
        state = accepted.state(state, updates if params is None else params)
        plan: Plan = state.current_plan
        call = InnerUpdate.aligned(plan, updates, params, extra_args)
        changes, inner_state = run(call, plan, state.inner_state)
        if in_place:
            new = call.with_params_after(plan, changes).params
        else:
            new = merged(call, plan, [plan], [changes], full_updates)
        return new, state._replace(inner_state=inner_state)

    part = FreezingPart(lambda params: make_plan(params, frozen), accepted.state, run, full_updates)
    return optax.GradientTransformationExtraArgs(init_fn, Update(update, part=part))


def _refuse_other_parts(plan: Plan, values: Sequence[Any]) -> None:
    for leaf, selection, value in plan.entries(values):
        if isinstance(value, Part) and selection.in_part:
            refuse_part_of_kept(value, leaf, selection)
            refuse_other_leaf(value, leaf, selection, "params")
            refuse_other_rows(value, selection, leaf.path, "params")


def _masks_of_state(plan: Plan, values: Sequence[Any], frozen: Spec, latest: Plan | None) -> PyTree:
    """The masks as a state holds them; nothing if there are none.

    ``optax.tree_map_params`` maps the state of its placeholder together with the real one, so both must have masks, or
    neither. The placeholder has no leaves, of which masks could be: whether there are any says the ``latest`` plan.
    """
    masks = plan.copied_masks(values)
    has_masks = any(map(is_array, masks))
    if plan.is_placeholder:
        has_masks = any(map(is_array, jax.tree.leaves(frozen))) if latest is None else latest.has_masks
    return stored(plan, plan.treedef, masks) if has_masks else ()


def _refuse_other_spec(plan: Plan, frozen: Spec, tree: PyTree) -> None:
    try:
        own = make_plan(plan.parameters(tree), frozen, leaves=plan.leaves)
    except (ValueError, TypeError) as error:
        if plan.treedef is None:
            return  # unpickled, and the tree at hand may have other containers
        raise value_error(
            "the state was created with a different spec or for different parameters",
            at="the second argument of update",
            got=f"the state for {[leaf.path for leaf in plan.leaves[:3]]}: {str(error).splitlines()[0]}",
            expected="a state from `init` of this transformation",
            fix="state = tx.init(params)",
        ) from error
    refuse_other_selections(plan, own, "a different spec")


def _refuse_no_spec(inner: Any) -> NoReturn:
    if is_optimizer(inner):
        what, got, fix = "a spec", "only an optimizer", "fz.freeze(optimizer, 'encoder')"
    else:
        what, got = "an optimizer", described(inner)
        zeros = f"fz.masked_zero_updates({inner!r}), which corresponds to optax.freeze"
        fix = f"fz.freeze(optimizer, {inner!r}), or {zeros}"
    raise type_error(f"fz.freeze needs {what}", at="fz.freeze", got=got, expected=_CALL, fix=fix)


_CALL = "fz.freeze(optimizer, frozen)"
