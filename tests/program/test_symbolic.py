"""`jax.export` with a symbolic batch: what cannot be decided of its size is computed whole, or not repeated."""

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import assert_equal_up_to_rounding
from jax import export

import optax_freeze as fz

KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "embed": jax.random.normal(KEYS[0], (64, 16)),
    "positions": jax.random.normal(KEYS[1], (8, 16)),
    "head": jax.random.normal(KEYS[2], (16, 64)),
    "bias": jnp.zeros(64),
}
TOKENS = jax.random.randint(KEYS[3], (3, 8), 0, 64)


def lookup(p, tokens):
    logits = jnp.tanh(p["embed"][tokens] + p["positions"]) @ p["head"] + p["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def rows_after_the_batch(p, tokens):
    x = jnp.concatenate([p["embed"][tokens[:, 0]], p["positions"]])[::-1]
    return jnp.sum(jnp.tanh(jnp.cumsum(x, 0) @ p["head"] + p["bias"]) ** 2)


def rows_before_the_batch(p, tokens):
    x = jnp.concatenate([p["positions"], p["embed"][tokens[:, 0]]])
    return jnp.sum(jnp.tanh(x @ p["head"]) ** 2)


def repeated(p, tokens):
    count = tokens.shape[0]
    x = jnp.repeat(p["positions"], count, 0) + jnp.tile(p["positions"], (count, 1)) + p["embed"][tokens].reshape(-1, 16)
    return jnp.sum(jnp.tanh(jnp.pad(x, ((count, 0), (0, 0))) @ p["head"]) ** 2)


@pytest.mark.parametrize("loss", [lookup, rows_after_the_batch, rows_before_the_batch, repeated])
@pytest.mark.parametrize(
    "rows",
    [
        {"embed": fz.rows(slice(0, 60))},
        {"positions": fz.rows([1, 3, 6])},
        {"head": fz.rows(slice(0, 60), axis=1), "bias": fz.rows(slice(0, 60))},
        {"embed": ~fz.rows(jnp.arange(3)), "positions": ~fz.rows(jnp.arange(2))},
    ],
    ids=["embed", "positions", "head", "dynamic"],
)
def test_gradients_of_rows(loss, rows):
    frozen = dict.fromkeys(PARAMS, True) | rows
    shapes = jax.eval_shape(lambda: PARAMS), jax.ShapeDtypeStruct((*export.symbolic_shape("batch"), 8), jnp.int32)
    expected = fz.partition(jax.grad(loss)(PARAMS, TOKENS), frozen)[0]

    def restricted(p, tokens):
        trainable, rest = fz.partition(p, frozen)
        return jax.grad(fz.restrict(loss, rest))(trainable, tokens)

    for gradient in (fz.grad(loss, frozen), restricted):
        exported = export.export(jax.jit(lambda p, t, f=gradient: jax.tree.leaves(f(p, t))))(*shapes)
        assert_equal_up_to_rounding(exported.call(PARAMS, TOKENS), jax.tree.leaves(expected), roundings=256)


def test_what_is_computed_once_needs_numbers():
    loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["embed"].T) @ p["embed"])  # noqa: E731
    once = fz.precompute(lambda p, x: loss(p, x) * p["bias"].sum(), fz.all_except("bias"))
    shapes = jax.eval_shape(lambda: PARAMS), jax.ShapeDtypeStruct((*export.symbolic_shape("batch"), 16), jnp.float32)
    with pytest.raises(ValueError, match=r"shape \(batch, 16\)") as error:
        export.export(jax.jit(once.before))(*shapes)
    fix = eval(str(error.value).partition("by itself: ")[2])
    assert jax.jit(once.before).lower(shapes[0], fix).out_info
