"""Gradients of rows with the flags of JAX that turn calls into primitives of ``jax.experimental.hijax``.

From JAX 0.12 on, some functions of ``jax.numpy`` bind such primitives without flags, too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import optax_freeze as fz

hijax = pytest.importorskip("jax.experimental.hijax")
W = jnp.arange(1.0, 25.0).reshape(6, 4) / 25
TRAINS = np.array([1, 4, 5])
FROZEN = {"w": fz.rows([0, 2, 3])}
SAVED = jax.checkpoint_policies.save_only_these_names("sin")


@pytest.fixture
def turn_on():
    """Turns flags of JAX on for one test."""
    before = {}

    def turn_on(*names):
        for name in names:
            if not hasattr(jax.config, name):
                pytest.skip(f"JAX {jax.__version__} has no flag {name}")
            before[name] = getattr(jax.config, name)
            jax.config.update(name, True)

    yield turn_on
    for name, value in before.items():
        jax.config.update(name, value)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))


def body(x):
    return jnp.sin(jnp.sin(x) * x)


def named(x):
    return jnp.cos(checkpoint_name(jnp.sin(x), "sin"))


def of_scan(w):
    return jax.lax.scan(lambda c, row: (c, jax.checkpoint(body)(c * row)), 2.0, w)[1]


CALLS = {
    "remat": jax.checkpoint(body),
    "remat of what is not differentiated": lambda w: w * jax.checkpoint(body)(W + 1),
    "remat without a barrier": jax.checkpoint(body, prevent_cse=False),
    "remat with a policy": jax.checkpoint(named, policy=SAVED),
    "remat in remat": jax.checkpoint(lambda x: jax.checkpoint(body)(x) * x),
    "remat in scan": of_scan,
    "checkpoint_name": named,
    "custom_vjp": doubled,
    "remat of custom_vjp": jax.checkpoint(lambda x: doubled(jnp.sin(x))),
}


def check(of_w):
    """The gradient of the rows is that of the whole leaf, and so is its derivative."""

    def loss(params):
        return jnp.sum(of_w(params["w"]) ** 2)

    def rows(w):
        return fz.grad(loss, FROZEN)({"w": w})["w"].values

    def dense(w):
        return jax.grad(loss)({"w": w})["w"][TRAINS]

    np.testing.assert_allclose(jax.jit(rows)(W), dense(W), rtol=1e-5, atol=1e-6)
    found, expected = (jax.jvp(f, (W,), (jnp.cos(9 * W),))[1] for f in (rows, dense))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    [row] = fz.explain(loss, {"w": W}, FROZEN).rows
    return [operation.name for operation in row.everything]


@pytest.mark.parametrize("call", CALLS)
def test_calls_are_entered(turn_on, call):
    turn_on("jax_remat3", "jax_custom_vjp3")
    assert check(CALLS[call]) == []


def test_a_name_is_still_seen_by_a_policy_outside(turn_on):
    turn_on("jax_remat3")
    gradient = fz.grad(lambda params: jnp.sum(named(params["w"])), FROZEN)
    assert "name=sin" in str(jax.make_jaxpr(gradient)({"w": W}))


FUNCTIONS = {
    "searchsorted": lambda w: w * jnp.searchsorted(jnp.sort(w.ravel()), w / 2),
    "nonzero": lambda w: w.ravel()[jnp.nonzero(w.ravel() > 0.5, size=9)[0]],
    "ldexp": lambda w: jnp.ldexp(w, 3) * w,
    "frexp": lambda w: jnp.frexp(w)[0] * w,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_jax_numpy(name):
    assert "call_hi_primitive" not in check(FUNCTIONS[name])


class Cubed(getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive):
    """A primitive of a user, whose derivative is not that of its operations."""

    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x):
        return x**3

    def vjp_fwd(self, _, x):
        return self(x), x

    def vjp_bwd_retval(self, x, g):
        return (5 * g * x**2,)

    def jvp(self, primals, tangents):
        return self(*primals), 5 * tangents[0] * primals[0] ** 2


def test_a_primitive_of_a_user_keeps_its_derivative():
    assert check(lambda w: Cubed(jax.typeof(w))(w)) == []  # the value needs all of it, too
    backwards = jax.custom_vjp(lambda w: w)
    backwards.defvjp(lambda w: (w, None), lambda _, ct: (Cubed(jax.typeof(ct))(ct),))
    assert check(backwards) == ["Cubed"]


def test_a_reference_among_the_operands_of_remat(turn_on):
    turn_on("jax_remat3")
    if jax.__version_info__ < (0, 12):
        pytest.skip(f"JAX {jax.__version__} cannot differentiate it")
    scale = jnp.arange(4.0)

    def gradient(grad):
        def of_ref(w):
            ref = jax.new_ref(scale)
            return grad(lambda params: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x * ref[...]))(params["w"])))({"w": w})

        return jax.jit(of_ref)(W)["w"]

    found = gradient(lambda loss: fz.grad(loss, FROZEN))
    np.testing.assert_allclose(found.values, gradient(jax.grad)[TRAINS], rtol=1e-6)


def test_scan_as_a_primitive_is_right_or_refused(turn_on):
    turn_on("jax_scan3")

    def loss(params):
        return jnp.sum(jax.lax.scan(lambda c, row: (jnp.sin(c * row), None), params["w"][0], params["w"])[0])

    trainable, rest = fz.partition({"w": W}, FROZEN)
    np.testing.assert_array_equal(fz.restrict(loss, rest)(trainable), loss({"w": W}))
    for refused in (fz.grad(loss, FROZEN), lambda _: jax.grad(fz.restrict(loss, rest))(trainable)):
        with pytest.raises(NotImplementedError):
            refused({"w": W})
