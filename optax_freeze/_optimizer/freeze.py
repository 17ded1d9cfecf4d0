"""Frozen updates for any Optax optimizer: :func:`masked_zero_updates` and :func:`freeze`.

``optax.freeze`` zeroes updates where it stands in a chain, so that it is either too early (weight decay and momentum
come after it) or too late (moments are held, and frozen gradients reach norms and finite checks). :func:`freeze` goes
around the optimizer instead: what is inside never sees a frozen leaf.
"""

import dataclasses
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax

from optax_freeze._errors import described, in_one_line, type_error, value_error
from optax_freeze._optimizer.as_transformation import as_transformation, is_optimizer
from optax_freeze._optimizer.inner_update import negative_zero, parts_outside, variables_outside, without_frozen, zero
from optax_freeze._optimizer.plan_in_state import plan_and_masks, plan_of, plans_of_spec, with_plan
from optax_freeze._optimizer.update_params import with_update_params
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.apply_updates import add_updates
from optax_freeze._spec.memory_kinds import is_on_host
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Spec, Tied
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DynamicRowIndex, Selection
from optax_freeze._spec.tree import Leaf, Part, PyTree


def masked_zero_updates(frozen: Spec, *, tied: Tied = "error") -> optax.GradientTransformationExtraArgs:
    """Sets the updates of frozen leaves to zero: :func:`freeze` of ``optax.identity()``.

    Like ``optax.freeze``, but it selects instead of multiplying (NaN times zero is NaN), and its zeros are -0.0, which
    preserve every normal number when added (:func:`optax_freeze.apply_updates` with ``frozen`` preserves every bit). As
    the last transformation of a chain it keeps frozen parameters unchanged. The transformations before it still receive
    frozen gradients and store moments for them; use :func:`freeze` to avoid that.

    Args:
      frozen: the spec of the frozen parameters, in any form.
      tied: ``"error"`` raises an error in ``init`` if an array is at two paths and only one of them is frozen;
        ``"ignore"`` allows it.

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
    return freeze(optax.identity(), frozen, tied=tied)


class FreezeState(NamedTuple):
    """State of :func:`freeze`: the resolved spec, a node without leaves, its dense masks, and the optimizer's state.

    The last is that of ``optax.multi_transform`` around the optimizer.
    """

    spec: Plan
    masks: PyTree
    inner_state: optax.OptState


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
        ``optax.apply_updates``, which preserves all but denormals and signalling NaNs (for a parameter in host memory,
        one number or the ``Part`` of its rows). If False, they have ``optax.MaskedNode()`` for frozen parameters, for
        :func:`optax_freeze.apply_updates`, which preserves every bit.
      tied: ``"error"`` raises an error in ``init`` if an array is at two paths and only one of them is frozen;
        ``"ignore"`` allows it.

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
      >>> tx = fz.freeze(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), "encoder")
      >>> state = tx.init(params)
      >>> grads = {"encoder": jnp.full(3, jnp.nan), "head": jnp.ones(2)}
      >>> updates, state = tx.update(grads, state, params)
      >>> updates["encoder"]
      Array([-0., -0., -0.], dtype=float32)
      >>> [leaf.shape for leaf in jax.tree.leaves(state)]  # a count, two moments of the head
      [(), (2,), (2,)]
    """
    if frozen is None:
        _refuse_no_spec(inner)
    inner = as_transformation(inner, _CALL, name="inner", other=frozen)
    accepted = plans_of_spec(frozen)

    def transform(labels: PyTree) -> optax.GradientTransformationExtraArgs:
        # A function, since a tree of labels may itself be callable: an Equinox module is.
        return optax.multi_transform({"trainable": inner, "frozen": optax.identity()}, lambda _: labels)

    def init_fn(params: PyTree) -> PyTree:
        state = FreezeState(*plan_and_masks(params, frozen, tied, accepted), ())
        plan = plan_of(state)
        values, treedef = _tree.flatten(params)
        inner_state = transform(plan.labels(treedef)).init(plan.trainable(treedef, values))
        return state._replace(inner_state=parts_outside(inner_state, plan))

    def update(
        full: bool, updates: PyTree, state: PyTree, params: PyTree | None, extra_args: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        state = with_plan(state, FreezeState, updates if params is None else params, accepted)
        plan = plan_of(state)
        values, treedef, missing = plan.align_gradients(updates, params)
        trainable, olds = None, [None] * len(values)
        if params is not None:
            olds, params_treedef = plan.align(params, "params")
            trainable = plan.trainable(params_treedef, olds)
        extra_args = without_frozen(extra_args, plan, treedef, params)
        inner_state = variables_outside(state.inner_state, plan)
        tx = transform(plan.labels(treedef))
        try:
            new, inner_state = tx.update(plan.trainable(treedef, values), inner_state, trainable, **extra_args)
        except (ValueError, TypeError, AttributeError) as error:
            if params is not None:
                raise
            raise (type_error if isinstance(error, TypeError) else value_error)(
                f"the optimizer inside fz.freeze failed without parameters: {in_one_line(error)}",
                at="update",
                got="params=None",
                expected="the parameters, if the optimizer uses them (weight decay, a trust ratio)",
                fix="if so, tx.update(grads, state, params)",
            ) from error
        selections = [FROZEN if i in missing else selection for i, selection in enumerate(plan.selections)]
        leaves = zip(selections, plan.leaves, _tree.flatten(new)[0], values, olds, strict=True)
        new = [_full_update(*leaf) if full else _trainable_update(*leaf) for leaf in leaves]
        new = jax.tree.unflatten(treedef, plan.with_sources(new, values))
        return new, state._replace(inner_state=parts_outside(inner_state, plan))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        return update(full_updates, updates, state, params, extra_args)

    def update_params_fn(
        grads: PyTree, state: PyTree, params: PyTree, extra_args: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        updates, state = update(False, grads, state, params, extra_args)
        return add_updates(params, updates, plan_of(state).selections), state

    return optax.GradientTransformationExtraArgs(init_fn, with_update_params(update_fn, update_params_fn))


def _trainable_update(selection: Selection, leaf: Leaf, new: Any, update: Any, param: Any) -> Any:
    """The update of one leaf with ``full_updates=False``, from the inner optimizer's ``new``."""
    del update, param
    if not selection.in_part:
        return selection.take(new)
    if not isinstance(new, Part):
        return _zeroed(selection, leaf, new)
    return dataclasses.replace(new, trains=~selection.frozen_rows()) if isinstance(selection, DynamicRowIndex) else new


def _full_update(selection: Selection, leaf: Leaf, new: Any, update: Any, param: Any) -> Any:
    """The update of one leaf in its full shape; ``update`` and ``param`` are those given to ``update_fn``."""
    if selection is FROZEN:
        return zero(leaf, update, param)
    if not selection.in_part or (isinstance(new, Part) and leaf.index is not None):
        return new
    if not isinstance(new, Part):
        return _zeroed(selection, leaf, new)
    if is_on_host(param):
        return new
    like = next((full for full in (param, update) if full is not None and not isinstance(full, Part)), None)
    return selection.spread(new, negative_zero(new.dtype), like)


def _zeroed(selection: Selection, leaf: Leaf, update: Any, param: Any = None) -> Any:
    """A full update with zeros at frozen elements; for rows of a parameter in host memory their ``Part``."""
    if selection is TRAINABLE:
        return update
    if is_on_host(param):
        return zero(leaf, update, param) if selection is FROZEN else selection.take(update)
    zeros = zero(leaf, update) if selection is FROZEN else negative_zero(jnp.result_type(update))
    return selection.choose(zeros, update)


def _refuse_no_spec(inner: Any) -> NoReturn:
    """A ``TypeError`` for a call with one argument."""
    if is_optimizer(inner):
        what, got, fix = (
            "fz.freeze needs a spec",
            "only an optimizer",
            "fz.freeze(optimizer, 'encoder')",
        )
    else:
        what, got = "fz.freeze needs an optimizer", described(inner)
        fix = (
            f"fz.freeze(optimizer, {inner!r}), or fz.masked_zero_updates({inner!r}), which corresponds to optax.freeze"
        )
    raise type_error(what, at="fz.freeze", got=got, expected=_CALL, fix=fix)


_CALL = "fz.freeze(optimizer, frozen)"
