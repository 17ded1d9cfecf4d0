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
