"""Meshes with explicit axes, and with explicit and automatic ones: the gradient of the dense one, laid out alike."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_equal_up_to_rounding
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="explicit axes changed much")

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = {"explicit": (EXPLICIT, EXPLICIT), "data": (EXPLICIT, AUTO), "model": (AUTO, EXPLICIT)}
LAYOUTS = {"rows": (P("data"), P(None, "data")), "columns": (P(None, "model"), P(None, None, "model"))}
W, S = jax.random.normal(jax.random.key(0), (8, 8)), jax.random.normal(jax.random.key(1), (3, 8, 8))
TOKENS, NUMBERS = jnp.array([1, 3, 3, 7, 0, 2, 5, 6]), np.array([1, 2])
ALONG = ("data", "model"), ("data",)


def explicit(*names):
    """A spec of those of these axes that are explicit in the mesh of the context."""
    mesh = jax.sharding.get_abstract_mesh()
    return P(*(name if name in mesh.explicit_axes else None for name in names))


def steps(w, s, of_step):
    return lax.scan(lambda h, r: (jnp.tanh(h + of_step(r)), None), jnp.ones(8), s)[0] * jnp.sum(w)


def automatic(function, x):
    return jax.sharding.auto_axes(function, axes=jax.sharding.get_abstract_mesh().explicit_axes, out_sharding=P())(x)


LOSSES = {
    "a loop of Python": lambda w, s: sum(jnp.mean(jnp.tanh(s[i]) ** 2) for i in range(3)) + jnp.sum(w**2),
    "a row of a loop": lambda w, s: jnp.sum(lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + s[i], w)),
    "padding": lambda w, s: jnp.sum(jnp.pad(jnp.sin(w), ((8, 0), (0, 8))) ** 2) + jnp.sum(s),
    "a lookup": lambda w, s: jnp.sum(w.at[TOKENS].get(out_sharding=explicit("data", None)) ** 2) + jnp.sum(s),
    "a lookup in each step": lambda w, s: jnp.sum(
        steps(w, s, lambda r: jnp.sum(r.at[TOKENS].get(out_sharding=explicit(None, "model")) ** 2))
    ),
    "automatic axes": lambda w, s: jnp.sum(steps(w, s, lambda r: jnp.sum(automatic(lambda r: jnp.sin(r[::2]), r)))),
}
SPECS = {
    "rows": lambda n: {"w": fz.rows([0, 3]), "s": ~fz.rows([1])},
    "columns": lambda n: {"w": fz.rows([0, 3], 1), "s": fz.rows([0, 4], 2)},
    "dynamic": lambda n: {"w": ~fz.rows(n), "s": ~fz.rows(n, 2)},
}


def placed(mesh, layout):
    return {name: jax.device_put(x, NamedSharding(mesh, s)) for name, x, s in zip("ws", (W, S), layout, strict=True)}


def of_part(loss, frozen, params):
    trainable, rest = fz.partition(params, frozen)
    return jax.grad(fz.restrict(loss, rest))(trainable)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("spec", SPECS)
def test_gradients(kind, layout, spec):
    """By their types for each loss; the sum of all of them in values, too."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=MESHES[kind])
    each = [lambda p, of=of: of(p["w"], p["s"]) for of in LOSSES.values()]
    with jax.set_mesh(mesh):
        params = placed(mesh, LAYOUTS[layout])
        for loss in (*each, lambda p: sum(loss(p) for loss in each)):

            def grads(numbers, params, way, loss=loss):
                return way(loss, SPECS[spec](numbers), params)

            ways = {
                "grad": lambda loss, frozen, params: fz.grad(loss, frozen)(params),
                "restrict": of_part,
                "dense": lambda loss, frozen, params: fz.partition(jax.grad(loss)(params), frozen)[0],
            }
            if spec != "dynamic":
                ways["freeze_loss"] = lambda loss, frozen, params: fz.partition(
                    jax.grad(fz.freeze_loss(loss, frozen))(params), frozen
                )[0]
            traced = {name: jax.jit(grads, static_argnums=2).trace(NUMBERS, params, way) for name, way in ways.items()}
            for each_of in traced.values():
                assert each_of.jaxpr.out_avals == traced["dense"].jaxpr.out_avals
        got = {name: program.lower().compile()(NUMBERS, params) for name, program in traced.items()}
    for name in got:
        assert_equal_up_to_rounding(got[name], got["dense"])


@pytest.mark.parametrize("kind", MESHES)
def test_groups_that_change(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=MESHES[kind])
    tx = fz.freeze_when(optax.adam(0.1), {"w": lambda step: step < 1, "s": lambda step: step >= 1})
    step = jax.jit(fz.train_step(lambda p: LOSSES["a lookup"](p["w"], p["s"]), tx))
    with jax.set_mesh(mesh):
        params, first = placed(mesh, LAYOUTS["columns"]), placed(mesh, LAYOUTS["columns"])
        state = tx.init(params)
        for _ in range(2):
            params, state, _ = step(params, state)
    assert jax.tree.map(jax.typeof, params) == jax.tree.map(jax.typeof, first)
    assert step._cache_size() == 1


@pytest.mark.parametrize("kind", MESHES)
def test_rows_whose_numbers_are_divided(kind):
    """Rows of a batch of ids, and rows with given numbers."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=MESHES[kind])
    tx = fz.freeze(optax.adam(0.1), {"w": ~fz.rows(jnp.arange(8), keep_state=True), "s": True})

    def of_lookup(p, ids, out=None):
        return jnp.sum(jnp.sin(p["w"].at[ids].get(out_sharding=out)))

    def trained(params, ids, numbers, *out):
        step = fz.train_step(lambda p, ids: of_lookup(p, ids, *out), tx, rows={"w": lambda ids: ids})
        grads = fz.grad(lambda p: of_lookup(p, ids, *out), {"w": ~fz.rows(numbers), "s": True})(params)
        return step(params, tx.init(params), ids), grads

    ids, numbers = TOKENS.reshape(4, 2), jnp.array([1, 3, 5, 7])
    want = jax.jit(trained)({"w": W, "s": S}, ids, numbers)
    with jax.set_mesh(mesh):
        ids, numbers = (
            jax.device_put(x, NamedSharding(mesh, P(*axes))) for x, axes in zip((ids, numbers), ALONG, strict=True)
        )
        got = jax.jit(trained, static_argnums=3)(
            placed(mesh, LAYOUTS["rows"]), ids, numbers, explicit("data", None, None)
        )
    assert_equal_up_to_rounding(got, want)
