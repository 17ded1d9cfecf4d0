"""The optimizer state of NNX parameters and of boxed ones, read as tools of Flax and trainers read it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from flax import nnx
from jax.sharding import AxisType, NamedSharding

import optax_freeze as fz

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(0.1),
    "masked": lambda: optax.masked(optax.adam(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
}
SPECS = {
    "leaf": fz.path("a"),
    "rows": fz.rules({"a/kernel": fz.rows([0]), "b/bias": fz.rows([0, 1])}, default=False),
    "compact": fz.rules({"a/kernel": fz.elements(np.eye(4, dtype=bool), compact=True)}, default=False),
    "dense": fz.rules({"a/kernel": fz.elements(np.eye(4, dtype=bool))}, default=False),
    "dynamic": fz.rules({"b/kernel": ~fz.rows(jnp.array([0, 2])), "a/bias": ~fz.rows(jnp.array([1]))}, default=False),
}
MAKE = {**{name: lambda inner, spec=spec: fz.freeze(inner, spec) for name, spec in SPECS.items()}}
CASES = [("masked", "leaf"), ("adafactor", "rows"), ("adamw", "compact"), ("masked", "dense"), ("adafactor", "dynamic")]
CASES += [("adamw", "groups"), ("adafactor", "groups")]
MAKE["groups"] = lambda inner: fz.freeze_when(inner, {"a": True, "b/kernel": (fz.rows([1]), False)}, optax.ema(0.9))


def kernel(*axes):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


class Model(nnx.Module):
    def __init__(self):
        self.a = nnx.Linear(4, 4, kernel_init=kernel(None, "x"), rngs=nnx.Rngs(0))
        self.b = nnx.Linear(4, 4, kernel_init=kernel("x", None), rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.b(self.a(x))


def step(model, optimizer, x):
    grads = nnx.grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    optimizer.update(model, grads)


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_every_variable_has_an_array_with_the_axes_of_its_metadata(name, spec):
    tx, mesh = MAKE[spec](OPTIMIZERS[name]()), jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        make = lambda: nnx.Optimizer(Model(), tx, wrt=nnx.Param)  # noqa: E731
        nnx.eval_shape(make)
        optimizer = make()
        state = nnx.state(optimizer)
        jax.tree.map(lambda x, spec: (x, spec), state, nnx.get_partition_spec(state))
        variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        assert all(hasattr(x, "dtype") for x in variables)
        model, structure = Model(), jax.tree.structure(state)
        before = nnx.to_pure_dict(nnx.state(model))
        nnx.jit(step)(model, optimizer, jnp.ones((2, 4)))
        assert jax.tree.structure(nnx.state(optimizer)) == structure
        fz.assert_frozen(before, nnx.to_pure_dict(nnx.state(model)), SPECS.get(spec, "a"))


@pytest.mark.parametrize("spec", MAKE)
def test_variables_and_values_give_the_same_updates(spec):
    """``tx`` called with an ``nnx.State`` of variables, as in a step without ``nnx.Optimizer``."""
    tx = MAKE[spec](optax.adam(0.1))
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))):
        params = nnx.state(Model(), nnx.Param)
        state = tx.init(params)
        updates, new = tx.update(params, state, params)
        pure, _ = tx.update(nnx.as_pure(params), nnx.as_pure(state), nnx.as_pure(params))
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert bits(nnx.as_pure(updates)) == bits(pure)


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = lambda *axes: nn.with_partitioning(nn.initializers.lecun_normal(), axes)  # noqa: E731
        x = nn.Dense(4, kernel_init=init(None, "x"), name="a")(x)
        return nn.Dense(4, kernel_init=init("x", None), name="b")(x)


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_the_boxes_of_linen_place_an_optimizer_state(name, spec):
    tx, mesh = MAKE[spec](OPTIMIZERS[name]()), jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    x = jnp.ones((2, 4))

    def init():
        params = Boxed().init(jax.random.key(0), x)["params"]
        return params, tx.init(params)

    with jax.set_mesh(mesh):
        specs = nn.get_partition_spec(jax.eval_shape(init))
        params, state = jax.jit(init, out_shardings=jax.tree.map(lambda s: NamedSharding(mesh, s), specs))()
        step = fz.train_step(lambda params: jnp.mean((Boxed().apply({"params": params}, x) - 1) ** 2), tx)
        new, after, _ = jax.jit(step)(params, state)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        nn.unbox(after)
    fz.assert_frozen(params, new, SPECS.get(spec, "a"))
