"""A loss with a custom derivative that closes over an argument, or over what is computed from it."""

import jax
import jax.numpy as jnp
import pytest
from conftest import assert_equal_up_to_rounding
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_freeze as fz

KEYS = jax.random.split(jax.random.key(0), 4)
SHAPES = {"encoder": (4, 4), "middle": (4, 4), "head": (4, 3)}
PARAMS = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(KEYS, SHAPES.items(), strict=False)}
X, NOISE = jax.random.normal(KEYS[3], (5, 4)), jnp.arange(1.0, 4.0)
FROZEN = ["encoder", "middle"]


def scaled(scale, kind=jax.custom_vjp):
    """A sine whose derivative is scaled by a value from outside of it."""
    f = kind(jnp.sin)
    if kind is jax.custom_vjp:
        f.defvjp(lambda y: (f(y), y), lambda y, ct: (ct * y * scale,))
    else:
        f.defjvp(lambda ys, ts: (f(*ys), ts[0] * ys[0] * scale))
    return f


def closing_over(what, wrap=lambda f: f, kind=jax.custom_vjp):
    def loss(params, x, noise):
        h = jnp.sort(jnp.tanh(x @ params["encoder"]) @ params["middle"])
        outside = {"leaf": params["middle"], "value": h, "batch": x, "argument": noise, "trained": h @ params["head"]}
        f = scaled(outside[what].mean(), kind)
        return jnp.sum(jax.nn.relu(wrap(f)(jax.nn.relu(h) @ params["head"])) ** 2)

    return loss


def in_a_scan(function):
    return lambda rows: lax.map(function, rows)


@pytest.mark.parametrize(
    ("loss", "rows"),
    [
        (closing_over("leaf"), False),
        (closing_over("value", jax.checkpoint), False),
        (closing_over("value", in_a_scan), False),
        (closing_over("value", jax.jit), False),
        (closing_over("batch", kind=jax.custom_jvp), False),
        (closing_over("argument"), True),
        (closing_over("trained", kind=jax.custom_jvp), True),
    ],
)
def test_is_refused_with_its_line(loss, rows):
    once = fz.precompute(loss, {"encoder": True, "middle": True, "head": rows and fz.rows(0)})
    with pytest.raises(ValueError, match=r"closes over an argument(.|\n)*at: custom_[jv]+p_call(.|\n)*as an argument"):
        once.before(PARAMS, X, NOISE)


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="explicit axes changed much")
@pytest.mark.parametrize("is_automatic", [False, True])
def test_is_refused_on_a_mesh_with_explicit_axes(is_automatic):
    divided = lambda f: lambda y: f(y if is_automatic else jax.sharding.reshard(y.T, P(None, "d")))  # noqa: E731
    loss = closing_over("batch", lambda f: lambda y: divided(f)(y[:4]))
    with jax.set_mesh(jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))):
        loss = jax.sharding.auto_axes(loss, out_sharding=P()) if is_automatic else loss
        with pytest.raises(ValueError, match="closes over an argument"):
            fz.precompute(loss, FROZEN).before(PARAMS, X, NOISE)


def test_is_not_asked_of_what_is_computed_once_nor_of_an_enclosing_trace():
    def loss(params, x, scale):
        h = scaled(x.mean())(x @ params["encoder"])
        return jnp.sum(scaled(scale)(jnp.sort(h) @ params["head"]))

    @jax.jit
    def gradients(scale):
        of_scale = lambda params, x: loss(params, x, scale)  # noqa: E731
        frozen = {"encoder": True, "middle": True, "head": fz.rows(0)}
        once = fz.precompute(of_scale, frozen)
        return fz.grad(once.after, frozen)(PARAMS, once.before(PARAMS, X), X), fz.grad(of_scale, frozen)(PARAMS, X)

    assert_equal_up_to_rounding(*gradients(2.0))
