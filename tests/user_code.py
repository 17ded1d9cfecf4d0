# pyright: strict
# Optax has no type stubs, and pyright does not know the type of a parameter of jnp.ones:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# A call that is wrong on purpose must be reported:
# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Code as users write it, which pyright checks in strict mode and a test runs.

``assert_type`` checks the types that an editor shows: parameters, values and arguments keep theirs.
"""

import dataclasses
from typing import Any, NamedTuple, assert_type

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

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
    assert_type(grads, Params)
    updates, state = tx.update(grads, state, params)
    new = fz.apply_updates(params, updates, frozen)
    assert_type(new, Params)
    fz.assert_frozen(params, new, frozen)
    assert_type(fz.fingerprint(new, frozen), jax.Array)
    assert_type(fz.summary(new, frozen, optax.adam(0.1)).trainable_elements, int)
    return new


def in_parts(params: Params, batch: jax.Array) -> jax.Array:
    trainable, rest = fz.partition(params, fz.rules({"encoder": fz.rows(slice(0, 2))}))
    assert_type(trainable, Params)
    assert_type(rest, Params)
    restricted = fz.restrict(loss, rest)
    assert_type(restricted(trainable, batch), jax.Array)
    assert_type(jax.grad(restricted)(trainable, batch), Any)
    return loss(fz.stop_gradient(params, "encoder"), batch)


def with_aux(params: Params, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    value = loss(params, batch)
    return value, {"loss": value}


def loss_of_batch(batch: jax.Array, params: Params) -> jax.Array:
    return loss(params, batch)


def gradients(params: Params, batch: jax.Array, state: optax.OptState) -> None:
    assert_type(fz.grad(loss, "encoder")(params, batch), Params)
    assert_type(fz.grad(with_aux, "encoder", has_aux=True)(params, batch), tuple[Params, dict[str, jax.Array]])
    (value, aux), grads = fz.value_and_grad(with_aux, "encoder", has_aux=True)(params, batch)
    assert_type(value, jax.Array)
    assert_type(aux, dict[str, jax.Array])
    assert_type(grads, Params)
    assert_type(fz.grad(loss_of_batch, "encoder", argnums=1)(batch, params), Any)
    assert_type(fz.value_and_grad_from_state(loss, "encoder")(params, batch, state=state)[1], Params)
    fz.grad(loss, "encoder")(batch, params)  # pyright: ignore[reportArgumentType]
    fz.grad(loss, "encoder")(params)  # pyright: ignore[reportCallIssue]


def mask_of_tree(params: Params) -> Params:
    """A spec as well, if it returns a tree of bools."""
    return params


@dataclasses.dataclass
class Layers:
    """A tree of a class of your own, as those of ``flax.struct`` and Equinox."""

    encoder: bool


def take(*specs: fz.typing.Spec) -> None:
    pass


def specs(params: Params, tx: optax.GradientTransformation, variables: nnx.State[str, Any]) -> None:
    """Each form of a spec, and what is not one."""
    masks: list[fz.typing.ElementMask] = [fz.rows([0]), fz.rows(jnp.array([0])), fz.elements(np.ones(2, bool))]
    selectors: list[fz.typing.Selector] = [
        fz.path("encoder") | "head" | ["bias"],
        fz.path("encoder") & nnx.PathContains("kernel"),
        nnx.PathContains("kernel") | fz.path("encoder"),
        ~fz.rules({"encoder": masks[0], nnx.LoRAParam: False}),
    ]
    take(True, np.bool_(True), "encoder", ["encoder", "head"], ("encoder", "head"), *selectors)
    take(*masks, np.ones(2, bool), jnp.ones(2, bool), {"encoder": True, "head": masks[0]}, [True, {"b": False}])
    take((True, False), params, Layers(True), flax.core.FrozenDict({"encoder": True}), jax.tree.map(bool, params))
    take(variables, nnx.Not(nnx.LoRAParam), nnx.LoRAParam, mask_of_tree, fz.spec_of(tx.init(params)))
    take(1)  # pyright: ignore[reportArgumentType]
    take({"encoder", "head"})  # pyright: ignore[reportArgumentType]
    take(None)  # pyright: ignore[reportArgumentType]
    take(lambda path, leaf: True)  # pyright: ignore
    fz.freeze(tx, 1)  # pyright: ignore[reportArgumentType]
    fz.freeze(tx, {"encoder"})  # pyright: ignore[reportArgumentType]
    fz.freeze("encoder", tx)  # pyright: ignore[reportArgumentType]
    fz.grad(loss, 1)  # pyright: ignore[reportCallIssue, reportArgumentType]
    fz.value_and_grad(loss, {"encoder"})  # pyright: ignore[reportCallIssue, reportArgumentType]


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
