"""A whole training step, with a program for each set of groups that can be frozen together.

``fz.value_and_grad`` and ``fz.update_params`` each decide for themselves what is frozen now, so the gradients stand
between them, those of frozen groups as zeros. Here the decision is taken once, around both of them.
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
    """A training step: the gradient of what trains, and the update of the parameters in place.

    It is :func:`optax_freeze.value_and_grad` of ``fz.spec_of(state)`` and :func:`optax_freeze.update_params`. With
    :func:`optax_freeze.freeze_when` there is a program of both for each set of groups that can be frozen together, in
    one compilation. Each costs what the static phase costs: no gradient of a frozen group is computed, written or
    read, and an update follows its gradient at once.

    Args:
      loss: the function to differentiate, of the parameters and other arguments; returns a scalar, or a pair of a
        scalar and anything if ``has_aux``.
      tx: :func:`optax_freeze.freeze_when` or :func:`optax_freeze.freeze`, alone or within another transformation.
      has_aux: whether ``loss`` returns a pair.
      branches: the most programs there may be, as in :func:`optax_freeze.value_and_grad`.

    Returns:
      A function ``(params, state, *args, **kwargs) -> (params, state, value)``, where ``value`` is what
      ``loss(params, *args, **kwargs)`` returns. Donate its first two arguments.

    Raises:
      TypeError: if ``loss`` is not a function or ``tx`` not an optimizer.
      ValueError: if ``branches`` is less than 1; when called, whatever the functions above raise.

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
    most = whole_number("`branches` must be a positive int", branches, at="branches", least=1, fix="give branches=16")

    def step(params: PyTree, state: PyTree, *args: Any, **kwargs: Any) -> tuple[PyTree, PyTree, Any]:
        now = spec_of(state)

        def of_set(known: FrozenSet | None, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree, Any]:
            """The step with these groups frozen; None: as the state says."""
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
            # A loop of zero or one iterations for each set, since a `lax.switch` copies what it passes on.
            carry = unless(which != i, lambda carry, known=known: of_set(known, *carry[:2]), carry)
        return carry

    return step
