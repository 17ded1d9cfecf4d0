# pyright: strict
# Optax has no stubs, and jnp.ones a parameter that pyright does not know:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""What a user writes: pyright checks it in strict mode, and it runs.

``assert_type`` is what an editor shows: parameters, values and arguments keep their types.
"""

from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
import optax

import optax_freeze as fz


class Params(NamedTuple):
    encoder: jax.Array
    head: jax.Array


def loss(params: Params, batch: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(batch @ params.encoder) @ params.head) ** 2)


def fine_tune(params: Params, batch: jax.Array) -> Params:
    frozen = fz.path("encoder") & fz.where(lambda path, leaf: leaf.ndim == 2)
    tx = fz.freeze(optax.adam(0.1), frozen)
    assert_type(tx, optax.GradientTransformationExtraArgs)
    state = tx.init(params)
    value, grads = fz.value_and_grad(loss, frozen)(params, batch=batch)
    assert_type(value, jax.Array)
    updates, state = tx.update(grads, state, params)
    new = fz.apply_updates(params, updates, frozen)
    assert_type(new, Params)
    fz.assert_frozen(params, new, frozen)
    assert_type(fz.fingerprint(new, frozen), jax.Array)
    assert_type(fz.summary(new, frozen, optax.adam(0.1)).trainable_elements, int)
    return new


def in_parts(params: Params, batch: jax.Array) -> jax.Array:
    trainable, rest = fz.partition(params, fz.rules({"encoder": fz.rows(slice(0, 2))}))
    restricted = fz.restrict(loss, rest)
    assert_type(restricted(trainable, batch), jax.Array)
    assert_type(jax.grad(restricted)(trainable, batch), Any)
    return loss(fz.stop_gradient(params, "encoder"), batch)


def by_step(params: Params) -> dict[str, bool]:
    tx = fz.freeze_when(optax.adam(0.1), {"encoder": fz.unfreeze_at(100), "head": False}, coupled=optax.clip(1.0))
    state = fz.set_frozen(tx.init(params), {"head": True})
    return fz.currently_frozen(state)


def main() -> None:
    params = Params(jnp.ones((3, 4)), jnp.ones((4, 1)))
    batch = jnp.ones((2, 3))
    print(fine_tune(params, batch), in_parts(params, batch), by_step(params))


if __name__ == "__main__":
    main()
