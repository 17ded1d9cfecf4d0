"""Builds a whole training step, with one program for each set of groups that can be frozen together.

``fz.value_and_grad`` and ``fz.update_params`` each check which groups are frozen now. So all gradients are passed from
one to the other, with zeros for frozen groups. Here the check is made once, around both of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_freeze._errors import whole_number
from optax_freeze._gradient.groups_now import FrozenSet, GroupsNow
from optax_freeze._gradient.restrict import refuse_no_function, value_and_grad
from optax_freeze._optimizer.as_transformation import as_transformation
from optax_freeze._optimizer.update_params import update_where_frozen
from optax_freeze._optimizer.update_unless import unless
from optax_freeze._spec.tree import PyTree
from optax_freeze._state.spec_of import spec_of

_CALL = "fz.train_step(loss, tx)"


def train_step(
    loss: Callable[..., Any],
    tx: optax.GradientTransformation | optax.MultiSteps,
    has_aux: bool = False,
    *,
    branches: int = 16,
) -> Callable[..., tuple[PyTree, PyTree, Any]]:
    """Creates a training step that computes the gradients of the trainable parameters and updates them in place.

    The step calls :func:`optax_freeze.value_and_grad` with ``fz.spec_of(state)``, then
    :func:`optax_freeze.update_params`. With :func:`optax_freeze.freeze_when`, one compilation contains a program for
    each set of groups that can be frozen together. Each program costs as much as a step compiled for this set alone:
    gradients of frozen groups are not computed, written or read, and each update directly follows its gradient.

    Args:
      loss: the function to differentiate, called as ``loss(params, *args, **kwargs)``. It returns a scalar, or with
        ``has_aux`` a pair of a scalar and anything.
      tx: :func:`optax_freeze.freeze_when` or :func:`optax_freeze.freeze`, alone or inside another transformation.
      has_aux: whether ``loss`` returns a pair.
      branches: the maximum number of programs, as in :func:`optax_freeze.value_and_grad`.

    Returns:
      A function ``(params, state, *args, **kwargs) -> (params, state, value)``, where ``value`` is the result of
      ``loss(params, *args, **kwargs)``. Donate its first two arguments.

    Raises:
      TypeError: if ``loss`` is not a function, or ``tx`` is not an optimizer.
      ValueError: if ``branches`` is less than 1. When the step is called: the errors of the functions above.

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
    as_transformation(tx, _CALL, other=loss)
    most = whole_number("branches", branches, least=1, fix="branches=16")

    def step(params: PyTree, state: PyTree, *args: Any, **kwargs: Any) -> tuple[PyTree, PyTree, Any]:
        now = spec_of(state)

        def of_set(known: FrozenSet | None, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree, Any]:
            """The step with these groups frozen, or with those frozen in the state if ``known`` is None."""
            spec, frozen = spec_of(state), None
            if known is not None:
                assert isinstance(spec, GroupsNow)
                others = [False] * len(known) if exact else spec.frozen
                frozen = [is_known or other for is_known, other in zip(known, others, strict=True)]
                spec = dataclasses.replace(spec, frozen=known)
            value, grads = value_and_grad(loss, spec, has_aux=has_aux)(params, *args, **kwargs)
            params, state = update_where_frozen(tx, grads, state, params, frozen)
            return params, state, value

        if not isinstance(now, GroupsNow) or now.is_known:
            return of_set(None, params, state)
        sets = now.branches(most)
        exact = now.sets is not None and len(now.sets) == len(sets)
        if len(sets) == 1:
            return of_set(sets[0], params, state)
        which, value = now.which(sets), jax.eval_shape(functools.partial(of_set, sets[0]), params, state)[2]
        carry = (params, state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), value))
        for i, known in enumerate(sets):
            # A loop of zero or one iterations for each set, since a `lax.switch` would copy its operands.
            carry = unless(which != i, lambda carry, known=known: of_set(known, *carry[:2]), carry)
        return carry

    return step
