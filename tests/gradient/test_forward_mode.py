"""Restricted functions in forward mode, and in mixtures of both modes."""

import jax
import jax.numpy as jnp
import pytest
from conftest import assert_equal_up_to_rounding
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_freeze as fz

KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {
    "embed": jax.random.normal(KEYS[0], (5, 3)),
    "stack": jax.random.normal(KEYS[1], (4, 3, 3)) / 2,
    "encoder": jax.random.normal(KEYS[2], (3, 3)),
}
FROZEN = {"embed": fz.rows(slice(0, 3)), "stack": fz.rows([0, 2]), "encoder": True}
TANGENT = jax.tree.map(lambda x: jnp.cos(7 * x), PARAMS)
SCALES = jnp.arange(1.0, 4)


def loss(params, scale=1.0):
    x = jnp.tanh(scale * params["embed"][jnp.array([0, 4, 3])] @ params["encoder"])
    x, _ = lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w) + x, None)), x, params["stack"])
    return jnp.sum(x**3)


def restricted(params, scale=1.0):
    trainable, rest = fz.partition(params, FROZEN)
    return fz.restrict(loss, jax.tree.map(lax.stop_gradient, rest))(trainable, scale)


def dense(params, scale=1.0):
    return loss(fz.stop_gradient(params, FROZEN), scale)


def of_tangent(f):
    return lambda params: jax.jvp(f, (params,), (TANGENT,))[1]


def in_mesh(f):
    mesh = jax.make_mesh((3,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    tangent = lambda scale: jax.jvp(lambda p: lax.psum(f(p, scale[0]), "data"), (PARAMS,), (TANGENT,))[1]  # noqa: E731
    return jax.shard_map(tangent, mesh=mesh, in_specs=P("data"), out_specs=P())(SCALES)


WAYS = {
    "jvp": lambda f: jax.jvp(f, (PARAMS,), (TANGENT,)),
    "linearize": lambda f: jax.linearize(f, PARAMS)[1](TANGENT),
    "transpose_of_linearize": lambda f: jax.linear_transpose(jax.linearize(f, PARAMS)[1], PARAMS)(1.0),
    "of_another_argument": lambda f: jax.jvp(lambda s: f(PARAMS, s), (0.5,), (1.0,)),
    "of_examples": lambda f: jax.vmap(lambda s: jax.jvp(lambda p: f(p, s), (PARAMS,), (TANGENT,)))(SCALES),
    "jacobian": lambda f: jax.jacfwd(lambda embed: f({**PARAMS, "embed": embed}))(PARAMS["embed"]),
    "forward_over_reverse": lambda f: jax.jvp(jax.grad(f), (PARAMS,), (TANGENT,)),
    "reverse_over_forward": lambda f: jax.grad(of_tangent(f))(PARAMS),
    "forward_over_forward": lambda f: jax.jvp(of_tangent(f), (PARAMS,), (TANGENT,)),
    "reverse_of_the_tangent": lambda f: jax.grad(lambda t: jax.jvp(f, (PARAMS,), (t,))[1])(TANGENT),
    "reverse_over_a_map": lambda f: jax.grad(lambda p: jnp.sum(jax.vmap(f, (None, 0))(p, SCALES)))(PARAMS),
    "scan": lambda f: jax.jvp(lambda p: jnp.sum(lax.map(lambda s: f(p, s), SCALES)), (PARAMS,), (TANGENT,)),
    "checkpoint": lambda f: jax.jvp(jax.checkpoint(f), (PARAMS,), (TANGENT,)),
    "shard_map": in_mesh,
}


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_are_those_of_the_dense_function(way):
    functions = fz.freeze_loss(loss, FROZEN), restricted, dense
    *found, expected = jax.jit(lambda: [WAYS[way](function) for function in functions])()
    for each in found:
        assert_equal_up_to_rounding(each, expected, roundings=256)


def test_op_by_op():
    found, expected = (WAYS["jvp"](f) for f in (fz.freeze_loss(loss, FROZEN), dense))
    assert_equal_up_to_rounding(found, expected, roundings=64)


def test_what_cannot_be_differentiated_in_reverse_mode(compiled):
    def loop(params):
        step = lambda state: (state[0] + 1, jnp.tanh(state[1] @ params["encoder"]))  # noqa: E731
        return jnp.sum(lax.while_loop(lambda state: state[0] < 4, step, (0, params["embed"]))[1])

    function = fz.freeze_loss(loop, FROZEN)
    tangent = lambda f: compiled(lambda p: jax.jvp(f, (p,), (TANGENT,)))(PARAMS)  # noqa: E731
    expected = tangent(lambda p: loop(fz.stop_gradient(p, FROZEN)))
    assert_equal_up_to_rounding(tangent(function), expected, roundings=64)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        compiled(jax.grad(function))(PARAMS)
