"""What the gradient of rows computes a second time has the same bits as the first time, where a decision reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_equal_up_to_rounding

import optax_freeze as fz

COUNTERS = {  # the first value, what each step adds, the steps, and whether the loop goes backwards
    "no step changes a large float": (16777216.0, 1.0, 8, False),
    "a time": (0.0, 0.1, 200, False),
    "a time of few bits": (jnp.bfloat16.dtype.type(0), 1, 300, False),
    "a number of 8 bits wraps around": (np.int8(100), 13, 30, False),
    "an unsigned number counts down": (np.uint8(3), -7, 40, False),
    "the last step is first": (1, 2, 9, True),
}


@pytest.mark.parametrize(("begin", "by", "length", "reverse"), COUNTERS.values(), ids=COUNTERS)
def test_counters_of_a_loop(begin, by, length, reverse):
    def loss(w):
        def step(carry, x):
            total, t = carry
            angle = jnp.sin(jnp.asarray(t, w.dtype))
            return (total + (w[2] * angle).sum() + (w * x).sum() * angle, t + by if by > 0 else t - -by), None

        (total, _), _ = jax.lax.scan(step, (0.0, begin), 0.1 * jnp.arange(length), reverse=reverse)
        return total

    w = jnp.cos(jnp.arange(24.0)).reshape(6, 4)
    [got] = jax.tree.leaves(jax.jit(fz.grad(loss, ~fz.rows([1, 2])))(w))
    assert_equal_up_to_rounding(got, jax.jit(jax.grad(loss))(w)[1:3])


W = jax.random.normal(jax.random.key(0), (128, 64))
TOKENS = jax.random.normal(jax.random.key(1), (5, 128, 64))
BY_ROW = jnp.cos(jnp.arange(128.0))


def squares(w):
    """Rounded otherwise where a compiler fuses the product with the sum."""
    return w * w + 0.3 * w


def normed(w):
    return jax.nn.standardize(w + 0.7 * TOKENS[0]) * 1.3 + 0.1


def placed(w, tokens=TOKENS):
    return jnp.tanh(w * 1.3 + tokens * 0.7)


def limit(w):
    return squares(w) - 0.5 * jnp.max(squares(w), axis=1, keepdims=True)


def over_steps(w):
    return jax.lax.map(lambda tokens: jnp.max(placed(w, tokens), axis=1), TOKENS).sum(0)


def thresholds(w):
    """The largest three of each row."""
    return jnp.where(squares(w) >= jax.lax.top_k(squares(w), 3)[0][:, 2:], jnp.sin(w), 0.0).sum(1)


DECISIONS = {  # a number for each row
    "max": lambda w: jnp.max(squares(w), axis=1),
    "max of a norm": lambda w: jnp.max(normed(w), axis=1),
    "pooling of positions": lambda w: jnp.max(placed(w), axis=2).sum(0),
    "norm of the largest": lambda w: jnp.linalg.norm(squares(w), jnp.inf, axis=1),
    "argmax": lambda w: jnp.take_along_axis(jnp.sin(w), jnp.argmax(squares(w), 1)[:, None], 1)[:, 0],
    "equal to the max": lambda w: jnp.where(limit(w) >= 0, jnp.sin(w), 0).sum(1),
    "relu": lambda w: jax.nn.relu(limit(w)).sum(1),
    "floor": lambda w: (w * jnp.floor(squares(w) / jnp.max(squares(w), axis=1, keepdims=True))).sum(1),
    "sort": lambda w: (jnp.sort(squares(w), axis=1) * BY_ROW[:64]).sum(1),
    "top_k": thresholds,
    "cummax": lambda w: (jax.lax.cummax(squares(w), axis=1) * BY_ROW[:64]).sum(1),
    "remat": lambda w: jax.checkpoint(lambda w: jnp.max(squares(w), axis=1))(w),
    "a loop": over_steps,
    "a branch": lambda w: jax.lax.cond(w[0, 0] < 9, lambda x: jnp.max(x, axis=1), lambda x: x[:, 0], squares(w)),
}


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize("name", DECISIONS)
def test_decisions(name):
    def loss(w):
        return jnp.sum(DECISIONS[name](w) * BY_ROW)

    rows = [3, 4, 11]
    expected = jax.jit(jax.value_and_grad(loss))(W)[1][jnp.array(rows)]
    dynamic = jax.jit(lambda w, rows: fz.value_and_grad(loss, ~fz.rows(rows))(w)[1].values)
    assert_equal_up_to_rounding(dynamic(W, jnp.array(rows)), expected, roundings=64)
    static = jax.jit(lambda w: fz.value_and_grad(loss, ~fz.rows(rows))(w)[1].values)
    assert_equal_up_to_rounding(static(W), expected, roundings=64)
