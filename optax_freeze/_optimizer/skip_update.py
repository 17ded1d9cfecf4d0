"""Skips an update, depending on a value of the running program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_freeze._errors import is_scalar
from optax_freeze._optimizer.leaf_updates import negative_zero, zero
from optax_freeze._spec.sharding import cast_to_vary, eval_types, explicit_sharding, varies, with_sharding
from optax_freeze._spec.tree import Leaf, PyTree

_MOST_CHANGES = 4
"""How often the types of a state may change until they stay."""


def update_unless(
    frozen: Any, update: Callable[..., Any], updates: PyTree, state: PyTree, params: PyTree, **extra_args: Any
) -> tuple[PyTree, PyTree]:
    """``update(updates, state, params)``; if ``frozen``, updates that change nothing and the same state."""
    if not isinstance(frozen, Tracer):
        if not frozen:
            return update(updates, state, params, **extra_args)
        leaves, treedef = jax.tree.flatten(updates)
        pairs = zip(leaves, leaves if params is None else jax.tree.leaves(params), strict=True)
        return jax.tree.unflatten(treedef, [zero(Leaf("", p.shape, p.dtype), u, p) for u, p in pairs]), state
    leaves, treedef = jax.tree.flatten(state)
    structures = []

    @jax.jit  # traced once, though called for its shapes and in the loop
    def train(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        new, state = update(updates, jax.tree.unflatten(treedef, leaves), params, **extra_args)
        new, structure = jax.tree.flatten(new)
        structures.append(structure)
        return new, treedef.flatten_up_to(state)

    shapes = eval_types(train, leaves)[0]
    # What a loop starts from is written to: one buffer for each, as long as no two are equal.
    still = [
        _filled(u, jnp.where(frozen, negative_zero(shape.dtype), jnp.asarray(i, shape.dtype)), shape)
        for i, (u, shape) in enumerate(zip(jax.tree.leaves(updates), shapes, strict=True))
    ]
    new, leaves = unless(frozen, lambda carry: train(carry[1]), (still, leaves))
    return jax.tree.unflatten(structures[0], new), jax.tree.unflatten(treedef, leaves)


def unless(frozen: Any, step: Callable[[Any], Any], carry: PyTree) -> PyTree:
    """``step(carry)``; if ``frozen``, the same ``carry``.

    It is a loop of zero or one iterations instead of a ``lax.cond``. XLA updates the state of a loop in place, but
    copies the operands of a conditional that its branches return, even donated ones (five times the time of Adam).
    """
    if not isinstance(frozen, Tracer):
        return carry if frozen else step(carry)
    # Of a group most leaves are holes, and JAX opens a tree several times for each function that it traces.
    leaves, treedef = jax.tree.flatten(carry)

    @jax.jit  # traced once, though called for its shapes and in the loop
    def new(leaves: list[Any]) -> list[Any]:
        return treedef.flatten_up_to(step(jax.tree.unflatten(treedef, leaves)))

    for _ in range(_MOST_CHANGES):  # a number that becomes float32 may make moments float32 in the next step
        after, before = eval_types(new, leaves), leaves
        leaves = [_of_type(*each, frozen) for each in zip(leaves, after, strict=True)]
        if all(now is old or is_scalar(old) for now, old in zip(leaves, before, strict=True)):
            break

    def once(carry: Any) -> Any:
        # A constant, or XLA would copy the carry; inside `jax.shard_map` it varies over devices as `frozen` does.
        vary_alike = lambda new, old: cast_to_vary(new, varies(jax.typeof(old)))  # noqa: E731
        return jnp.ones_like(carry[0]), list(map(vary_alike, new(carry[1]), carry[1]))

    start: Any = (frozen, leaves)
    return jax.tree.unflatten(treedef, jax.lax.while_loop(lambda carry: ~carry[0], once, start)[1])


def _of_type(old: Any, new: Any, frozen: Any) -> Any:
    """A value of the carry with the type that it has after the step.

    Moments of bfloat16 parameters become float32 in the first update, if the gradients are. Inside ``jax.shard_map``,
    what is equal on all devices before the step may vary after it.
    """
    old = jnp.asarray(old, new.dtype) if is_scalar(old) else old
    old = cast_to_vary(old, varies(jax.typeof(new)) | varies(jax.typeof(frozen)))
    return old if old.dtype == new.dtype else old.astype(new.dtype)


def _filled(like: Any, value: Any, shape: Any) -> jax.Array:
    """An array sharded as another one of its shape; the gradients of examples have an axis more than updates."""
    size = None if like.shape == shape.shape else shape.shape
    fill = lambda like, value: jnp.full_like(like, value, shape.dtype, size)  # noqa: E731
    return with_sharding(explicit_sharding(like, shape.shape), fill, like, value)
