"""An update that is skipped by a value of the running program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_freeze._optimizer.inner_update import negative_zero, zero
from optax_freeze._spec.layout import explicit_sharding, laid_out
from optax_freeze._spec.tree import Leaf, PyTree


def update_unless(
    frozen: Any, update: Callable[..., Any], updates: PyTree, state: PyTree, params: PyTree, extra_args: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    """``update(updates, state, params)``; if ``frozen``, updates that change nothing and the same state.

    It is a loop of zero or one iterations instead of a ``lax.cond``. XLA updates the state of a loop in place, but
    copies the operands of a conditional that its branches return, even donated ones (five times the time of Adam).
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
