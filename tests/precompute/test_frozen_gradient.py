"""Gradients of the frozen rows that features were computed from are NaN, and never lack a part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_equal_up_to_rounding
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze._precompute import divide

KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {"table": jax.random.normal(KEYS[0], (12, 4)), "w": jax.random.normal(KEYS[1], (4, 4)), "head": jnp.ones(4)}
X = jax.random.normal(KEYS[2], (3, 4))


def loss(params, x):
    """Reads rows 0, 4 and 8 of the table before the cut, and all rows after it."""
    h = jnp.sort(jnp.tanh(x * params["table"][:9:4]) @ params["w"])
    return jnp.sum((h @ params["head"]) ** 2) + jnp.sum(jnp.tanh(params["table"]) ** 2 * params["head"])


SPECS = {
    "one run": fz.rows(slice(0, 9)),
    "nearly all": fz.rows(slice(0, 11)),
    "scattered": fz.rows([0, 2, 4, 7, 8, 10]),
}


def spec_of(rows):
    return {"table": rows, "w": True, "head": False}


def in_a_scan(function):
    return lambda *args: lax.scan(lambda total, _: (total + function(*args), None), 0.0, length=1)[0]


def in_a_cond(function):
    return lambda *args: lax.cond(args[-1].sum() < jnp.inf, function, lambda *args: 0.0, *args)


def in_vmap(function):
    return lambda params, *args: jax.vmap(lambda _: function(params, *args))(jnp.arange(2)).mean()


def in_vmap_over_parameters(function):
    def mapped(params, *args):
        stacked = jax.tree.map(lambda x: jnp.stack([x, x]), params)
        return jax.vmap(lambda params: function(params, *args))(stacked).mean()

    return mapped


def in_shard_map(function):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    mapped = lambda *args: lax.pmean(function(*args), "data")  # noqa: E731
    return jax.shard_map(mapped, mesh=mesh, in_specs=P(), out_specs=P())


WRAPS = {"directly": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint, "scan": in_a_scan, "cond": in_a_cond}
WRAPS |= {"vmap": in_vmap, "vmap of parameters": in_vmap_over_parameters, "shard_map": in_shard_map}


def restricted(after, frozen):
    def grad(params, *args):
        trainable, rest = fz.partition(params, frozen)
        return jax.grad(fz.restrict(after, rest))(trainable, *args)

    return grad


def frozen_loss(after, frozen):
    return lambda *args: fz.partition(jax.grad(fz.freeze_loss(after, frozen))(*args), frozen)[0]


def cases(*others):
    """``fz.grad`` with each wrapper, and other gradients with some."""
    some = [(way, name) for way in others for name in ("directly", "scan", "vmap of parameters", "shard_map")]
    return [*((fz.grad, name) for name in WRAPS), *some]


@pytest.mark.parametrize(("grad", "wrap"), cases(restricted, frozen_loss))
def test_trainable_rows_alone_have_a_gradient(wrap, grad):
    frozen = spec_of(SPECS["one run"])
    once = fz.precompute(loss, frozen)
    got = jax.jit(grad(WRAPS[wrap](once.after), frozen))(PARAMS, once.before(PARAMS, X), X)
    assert_equal_up_to_rounding(got, fz.grad(loss, frozen)(PARAMS, X))


@pytest.mark.parametrize("name", SPECS)
def test_rows_of_which_everything_is_computed_and_cut(name):
    """The cotangent of scattered or nearly all rows is computed whole."""
    frozen = spec_of(SPECS[name])
    once = fz.precompute(loss, frozen)
    got = fz.grad(once.after, frozen)(PARAMS, once.before(PARAMS, X), X)
    assert_equal_up_to_rounding(got, fz.grad(loss, frozen)(PARAMS, X))


@pytest.mark.parametrize(("way", "wrap"), cases(jax.grad, restricted))
def test_rows_that_are_frozen_there_are_not_a_number(way, wrap):
    once, frozen = fz.precompute(loss, spec_of(SPECS["one run"])), spec_of(fz.rows(slice(0, 5)))
    after = WRAPS[wrap](once.after)
    args = once.before(PARAMS, X), X
    if way is jax.grad:
        got = jax.grad(lambda table: after({**PARAMS, "table": table}, *args))(PARAMS["table"])[5:]
    else:
        got = way(after, frozen)(PARAMS, *args)["table"].values
    assert np.isnan(got[:4]).all()
    assert_equal_up_to_rounding(got[4:], fz.grad(loss, frozen)(PARAMS, X)["table"].values[4:])


@pytest.mark.parametrize("way", [fz.grad, restricted])
def test_it_costs_nothing(way, monkeypatch):
    frozen = spec_of(SPECS["one run"])
    once = fz.precompute(loss, frozen)
    features = once.before(PARAMS, X)

    def cost():
        compiled = jax.jit(way(once.after, frozen)).lower(PARAMS, features, X).compile()
        analysis = compiled.cost_analysis() or {}
        return [analysis[name] for name in ("flops", "bytes accessed")]

    refusing = cost()
    monkeypatch.setattr(divide, "with_unknown_gradient", lambda features, rows: features)
    assert refusing == cost()


def test_frozen_rows_that_no_feature_was_computed_from_have_a_gradient():
    frozen = {"table": True, "w": fz.rows(slice(0, 2)), "head": False}
    once = fz.precompute(loss, frozen)
    grad = jax.grad(lambda w: once.after({**PARAMS, "w": w}, once.before(PARAMS, X), X))(PARAMS["w"])
    assert_equal_up_to_rounding(grad, jax.grad(loss)(PARAMS, X)["w"])


def test_features_of_integers_have_no_derivative():
    def of_integers(params, x):
        best = jnp.argsort(x @ params["table"][:9].T)
        return jnp.sum(best @ jnp.broadcast_to(params["head"][:1], (9,))) + jnp.sum(params["table"] ** 2)

    once = fz.precompute(of_integers, spec_of(SPECS["one run"]))
    grad = fz.grad(once.after, "w")(PARAMS, once.before(PARAMS, X), X)
    assert_equal_up_to_rounding(grad["table"], 2 * PARAMS["table"])


class TestOtherModes:
    frozen = spec_of(SPECS["one run"])
    once = fz.precompute(loss, frozen)

    def test_forward_mode(self):
        features = self.once.before(PARAMS, X)
        tangents = jnp.zeros((12, 4)).at[9:].set(1)
        jvp = lambda fun, t: jax.jvp(lambda x: fun({**PARAMS, "table": x}), (PARAMS["table"],), (t,))[1]  # noqa: E731
        after = lambda params: self.once.after(params, features, X)  # noqa: E731
        assert_equal_up_to_rounding(jvp(after, tangents), jvp(lambda params: loss(params, X), tangents))
        assert np.isnan(jvp(after, tangents.at[0].set(1)))

    @pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="explicit axes changed much")
    def test_forward_mode_inside_of_automatic_axes(self):
        with jax.set_mesh(jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))):
            once = fz.precompute(jax.sharding.auto_axes(loss, out_sharding=P()), self.frozen)
            params = {**PARAMS, "table": jax.sharding.reshard(PARAMS["table"], P(None, "d"))}
            after = lambda t: once.after({**PARAMS, "table": t}, once.before(PARAMS, X), X)  # noqa: E731
            jvp = jax.jit(lambda t: jax.jvp(after, (params["table"],), (t * params["table"],))[1])
            assert jvp(0) == 0
            assert np.isnan(jvp(1))

    def test_a_second_derivative(self):
        trainable, rest = fz.partition(PARAMS, self.frozen)

        def second(fun, *args):
            of_trainable = jax.grad(fz.restrict(fun, rest))
            total = lambda t: sum(jnp.sum(x**2) for x in jax.tree.leaves(of_trainable(t, *args)))  # noqa: E731
            return jax.grad(total)(trainable)

        got = second(self.once.after, self.once.before(PARAMS, X), X)
        assert_equal_up_to_rounding(got, second(loss, X), roundings=8)
        value = lambda p: fz.value_and_grad(self.once.after, self.frozen)(p, self.once.before(PARAMS, X), X)[0]  # noqa: E731
        assert np.isnan(fz.grad(value, "w")(PARAMS)["table"][:9]).all()
