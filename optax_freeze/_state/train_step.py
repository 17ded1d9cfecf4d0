"""Builds a whole training step, in which the gradient of a group is computed where the group is updated."""

from collections.abc import Callable
from typing import Any

import optax

from optax_freeze._gradient.grad import refuse_no_function, value_and_grad
from optax_freeze._gradient.group_gradients import GroupSpec, gradient_of_groups
from optax_freeze._optimizer.as_transformation import as_transformation
from optax_freeze._optimizer.update_params import Update, update_params
from optax_freeze._spec.tree import PyTree
from optax_freeze._state.spec_of import spec_of

_CALL = "fz.train_step(loss, tx)"


def train_step(
    loss: Callable[..., Any],
    tx: optax.GradientTransformation | optax.MultiSteps,
    has_aux: bool = False,
) -> Callable[..., tuple[PyTree, PyTree, Any]]:
    """Creates a training step that computes the gradients of the trainable parameters and updates them in place.

    The step calls :func:`optax_freeze.value_and_grad` with ``fz.spec_of(state)``, then
    :func:`optax_freeze.update_params`. With :func:`optax_freeze.freeze_when`, any set of frozen groups costs about as
    much as a step compiled for this set alone: gradients of frozen groups are not computed, written or read, and what
    only one group needs is computed where the group is updated.

    Args:
      loss: the function to differentiate, called as ``loss(params, *args, **kwargs)``. It returns a scalar, or with
        ``has_aux`` a pair of a scalar and anything.
      tx: :func:`optax_freeze.freeze_when` or :func:`optax_freeze.freeze`, alone or inside another transformation.
      has_aux: whether ``loss`` returns a pair.

    Returns:
      A function ``(params, state, *args, **kwargs) -> (params, state, value)``, where ``value`` is the result of
      ``loss(params, *args, **kwargs)``. Donate its first two arguments.

    Raises:
      TypeError: if ``loss`` is not a function, or ``tx`` is not an optimizer.
      ValueError: when the step is called: the errors of the functions above.

    Example:
      >>> import jax, jax.numpy as jnp, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> tx = fz.freeze_when(optax.sgd(0.5), {"encoder": fz.unfreeze_at(2)})
      >>> step = jax.jit(fz.train_step(lambda p, x: x @ (p["encoder"] + p["head"]), tx), donate_argnums=(0, 1))
      >>> params, state, value = step(params, tx.init(params), jnp.ones(2))
      >>> params, float(value)
      ({'encoder': Array([1., 1.], dtype=float32), 'head': Array([0.5, 0.5], dtype=float32)}, 4.0)
    """
    refuse_no_function(loss, tx, _CALL)
    in_place = isinstance(as_transformation(tx, _CALL, other=loss).update, Update)

    def step(params: PyTree, state: PyTree, *args: Any, **kwargs: Any) -> tuple[PyTree, PyTree, Any]:
        spec = spec_of(state)
        if isinstance(spec, GroupSpec) and not spec.is_known and in_place:
            of_params = lambda params: loss(params, *args, **kwargs)  # noqa: E731
            grads = gradient_of_groups(of_params, spec, params, has_aux)
            if grads is not None:
                return *update_params(tx, grads, state, params), grads.value
        value, grads = value_and_grad(loss, spec, has_aux=has_aux)(params, *args, **kwargs)
        return *update_params(tx, grads, state, params), value

    return step
