"""Parameters on a mesh of eight devices: every function keeps their shardings, and nothing frozen moves."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
LAYOUTS = {
    "FSDP": {"embed": P(("data", "model")), "encoder": P("data"), "head": P("data")},
    "tensor parallel": {"embed": P("model"), "encoder": P(None, "model"), "head": P("model", None)},
    "both": {"embed": P("model", "data"), "encoder": P("data", "model"), "head": P("model", "data")},
}
DENSE = np.arange(1024).reshape(128, 8) % 3 == 0
SPECS = {
    "leaves": "encoder",
    "rows": fz.rules({"embed": fz.rows(slice(0, 504)), "encoder": True}),
    "three rows": fz.rules({"embed": fz.rows(slice(0, 509)), "encoder": True}),
    "dense": {"embed": True, "encoder": False, "head": DENSE},
    "compact": {"embed": True, "encoder": True, "head": fz.elements(DENSE, compact=True)},
}
TRAINABLE_ROWS = 8 * 128  # less than the shard of any frozen leaf
MOVED = re.compile(r"= \(?\w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce)")


def model(layout):
    key = iter(jax.random.split(jax.random.key(0), 3))
    shapes = {"embed": (512, 128), "encoder": (128, 128), "head": (128, 8)}
    return {
        path: jax.device_put(jax.random.normal(next(key), shape), NamedSharding(MESH, layout[path]))
        for path, shape in shapes.items()
    }


ONCE, TWICE = (
    [(layout, name) for i, layout in enumerate(LAYOUTS) for j, name in enumerate(SPECS) if (i + j) % 3 in which]
    for which in ((1,), (1, 2))
)
"""Each spec on one layout, and on two."""


def loss(params, tokens):
    return jnp.mean((jnp.tanh(params["embed"][tokens] @ params["encoder"]) @ params["head"]) ** 2)


def shardings(tree):
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def placed_alike(got, expected):
    chex.assert_trees_all_equal_structs(got, expected)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)


def step_of(tx):
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return fz.apply_updates(params, updates, fz.spec_of(state)), state

    return step


def largest_exchanged(program):
    """The elements of the largest array that a collective of a compiled program returns."""
    return max((math.prod(int(n) for n in shape.split(",") if n) for shape in MOVED.findall(program)), default=0)


@pytest.mark.parametrize(("layout", "name"), ONCE)
def test_a_training_step_keeps_every_sharding(layout, name):
    sharded = model(LAYOUTS[layout])
    tx = fz.freeze(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)), SPECS[name])
    state = jax.jit(tx.init, out_shardings=fz.state_shardings(tx, sharded))(sharded)

    @jax.jit
    def step(params, state, tokens):
        return step_of(tx)(fz.grad(loss, fz.spec_of(state))(params, tokens), state, params)

    tokens = jax.device_put(jnp.arange(64), NamedSharding(MESH, P("data")))
    new, new_state = step(sharded, state, tokens)
    assert placed_alike(new, sharded)
    assert placed_alike(jax.device_put(new_state, shardings(state)), state)
    frozen_before, frozen_after = (fz.partition(params, ~fz.spec_of(state))[0] for params in (sharded, new))
    assert bits(frozen_before) == bits(frozen_after)
    whole = jax.device_put(sharded, jax.devices()[0])
    alone, _ = step(whole, tx.init(whole), jnp.arange(64))
    chex.assert_trees_all_close(jax.device_get(new), jax.device_get(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layout", "name"), TWICE)
def test_no_collective_touches_what_is_frozen(layout, name):
    """What is exchanged is the norm of the clip, and trainable rows on their way from the shard that holds them."""
    sharded = model(LAYOUTS[layout])
    tx = fz.freeze(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), SPECS[name], full_updates=False)
    where, of_state = shardings(sharded), fz.state_shardings(tx, sharded)
    jitted = jax.jit(
        step_of(tx), in_shardings=(where, of_state, where), out_shardings=(where, of_state), donate_argnums=(1, 2)
    )
    program = jitted.lower(sharded, jax.eval_shape(tx.init, sharded), sharded).compile().as_text()
    assert largest_exchanged(program) <= TRAINABLE_ROWS


@pytest.mark.parametrize(
    "inner",
    [
        optax.adafactor(0.1),
        optax.contrib.muon(0.1),
        optax.lbfgs(),
        optax.inject_hyperparams(lambda rate: optax.MultiSteps(optax.adam(rate), 2).gradient_transformation())(0.1),
    ],
    ids=["adafactor", "muon", "lbfgs", "wrappers"],
)
def test_the_state_of_any_optimizer_has_shardings(inner):
    params = model(LAYOUTS["both"])
    tx = fz.freeze(inner, SPECS["three rows"])
    state = jax.jit(tx.init, out_shardings=fz.state_shardings(tx, params))(params)
    assert bits(state) == bits(tx.init(params))
    of_head = [leaf.sharding.spec[-2:] for leaf in jax.tree.leaves(state) if leaf.shape[-2:] == (128, 8)]
    assert set(of_head) == {("model", "data")}


def test_the_state_of_each_group_is_sharded_as_its_leaf():
    params = model(LAYOUTS["both"])
    tx = fz.freeze_when(optax.trace(0.9), {fz.each("**"): fz.unfreeze_at(1)})
    of_state = fz.state_shardings(tx, params)
    moments = {path: group.inner_state.trace[path] for path, group in of_state.groups.items()}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    expected = {jax.tree_util.keystr(key, simple=True, separator="/"): leaf.sharding for key, leaf in leaves}
    assert moments == expected


def test_trainable_rows_are_sharded_where_the_mesh_divides_them():
    params = model(LAYOUTS["both"])
    for first, expected in ((504, P("model", "data")), (509, P(None, "data"))):
        tx = fz.freeze(optax.trace(0.9), fz.all_except("embed") | fz.rules({"embed": fz.rows(slice(0, first))}))
        assert [leaf.spec for leaf in jax.tree.leaves(fz.state_shardings(tx, params))] == [expected]


def test_the_trainable_part_keeps_its_shardings():
    params = model(LAYOUTS["both"])
    trainable, rest = fz.partition(params, SPECS["rows"])
    assert placed_alike(fz.combine(trainable, rest), params)
    layout = fz.state_shardings(optax.adam(0.1), trainable)
    state = jax.jit(optax.adam(0.1).init, out_shardings=layout)(trainable)
    assert placed_alike(state[0].mu, trainable)


def test_a_single_device_is_a_sharding_too_and_objects_have_none():
    params = {"encoder": jnp.ones(2), "head": jnp.ones(2), "activation": jnp.tanh}
    tx = fz.freeze(optax.adam(0.1), "encoder")
    layout = fz.state_shardings(tx, params)
    assert jax.tree.structure(layout) == jax.tree.structure(tx.init(params))
    assert set(jax.tree.leaves(layout)) == {params["head"].sharding}


EXPLICIT = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
TABLE = np.arange(64 * 16).reshape(64, 16)
EXPLICIT_SPECS = {  # the five rows of `runs` and the four of `steps` do not divide among the devices
    "leaf": (True, P(None, "model")),
    "one run": (fz.rows(slice(0, 56)), P("data", "model")),
    "runs": (~fz.rows([3, 7, 8, 50, 63]), P("data", "model")),
    "steps": (~fz.rows(slice(0, 64, 16)), P(("data", "model"))),
    "dense": (fz.elements(TABLE % 3 == 0), P(None, "model")),
    "compact": (fz.elements(TABLE >= 16, compact=True), P(("data", "model"))),
}


@pytest.mark.skipif(not hasattr(jax.sharding, "auto_axes"), reason="this JAX has no jax.sharding.auto_axes")
@pytest.mark.parametrize("name", EXPLICIT_SPECS)
class TestExplicitMesh:
    """Where shardings are part of the types, and JAX refuses what it cannot shard without being told."""

    @pytest.fixture(autouse=True)
    def _mesh(self):
        with jax.set_mesh(EXPLICIT):
            yield

    @pytest.fixture
    def params(self, name):
        arrays = {"embed": jax.random.normal(jax.random.key(0), TABLE.shape), "head": jnp.ones((16, 8))}
        layouts = {"embed": EXPLICIT_SPECS[name][1], "head": P(None, "model")}
        return {path: jax.device_put(x, NamedSharding(EXPLICIT, layouts[path])) for path, x in arrays.items()}

    @pytest.fixture
    def frozen(self, name):
        return {"embed": EXPLICIT_SPECS[name][0], "head": False}

    def test_a_training_step(self, params, frozen, name):
        """Jitted with full updates, or eagerly with those of the part."""
        full_updates = name in ("leaf", "runs", "dense")
        tx = fz.freeze(optax.adamw(0.1), frozen, full_updates=full_updates)
        step = jax.jit(step_of(tx)) if full_updates else step_of(tx)
        grads, state = jax.tree.map(jnp.cos, params), tx.init(params)
        assert placed_alike(state, jax.jit(tx.init, out_shardings=fz.state_shardings(tx, params))(params))
        new, new_state = step(grads, state, params)
        assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, params)
        assert placed_alike(new_state, state)
        fz.assert_frozen(params, new, frozen)
        grads, params = jax.tree.map(np.asarray, (grads, params))
        with jax.set_mesh(MESH):
            expected, _ = step_of(tx)(grads, tx.init(params), params)
        chex.assert_trees_all_close(jax.device_get(new), jax.device_get(expected), rtol=1e-5, atol=1e-6)

    def test_no_collective_of_the_size_of_the_table(self, params, frozen, name):
        if name == "compact":
            pytest.skip("gathered from the whole leaf, on any mesh")
        tx = fz.freeze(optax.adamw(0.1), frozen, full_updates=False)
        jitted = jax.jit(step_of(tx), donate_argnums=(1, 2))
        program = jitted.lower(params, tx.init(params), params).compile().as_text()
        assert largest_exchanged(program) <= 8 * 16

    def test_the_parts(self, params, frozen):
        whole = jax.jit(lambda params: fz.combine(*fz.partition(params, frozen)))(params)
        assert jax.tree.map(jax.typeof, whole) == jax.tree.map(jax.typeof, params)
        assert bits(whole) == bits(params)

        def squares(params):
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

        grads = jax.jit(fz.grad(squares, frozen))(params)
        chex.assert_trees_all_close(grads, fz.partition(jax.tree.map(lambda x: 2 * x, params), frozen)[0])
        stopped = jax.grad(lambda params: squares(fz.stop_gradient(params, frozen)))(params)
        tx = fz.freeze(optax.sgd(1.0), frozen)
        for given in (params, fz.partition(params, frozen)[0]):
            full, _ = tx.update(given, tx.init(params), params)
            assert jax.tree.map(jax.typeof, full) == jax.tree.map(jax.typeof, params)
        zeros = fz.masked_zero_updates(frozen)
        updates, _ = zeros.update(jax.tree.map(lambda x: 2 * x, params), zeros.init(params), params)
        chex.assert_trees_all_close(stopped, updates)

    def test_groups(self, params, name):
        mask, _ = EXPLICIT_SPECS[name]
        group = fz.unfreeze_at(1) if mask is True else (~mask, fz.unfreeze_at(1))
        tx = fz.freeze_when(optax.sgd(0.5, momentum=0.9), {"embed": group}, optax.clip_by_global_norm(1.0))
        step = jax.jit(lambda grads, state, params: tx.update(grads, state, params))
        state, moved = tx.init(params), params
        for _ in range(2):
            updates, state = step(params, state, moved)
            assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, params)
            moved = fz.apply_updates(moved, updates)
            if int(state.step) == 1:
                fz.assert_frozen(params, moved, {"embed": True if mask is True else ~mask, "head": False})
        assert (moved["embed"] != params["embed"]).all()

    def test_migrate(self, params, frozen):
        tx = fz.freeze(optax.trace(0.9), frozen)
        _, state = jax.block_until_ready(jax.jit(tx.update)(params, tx.init(params), params))
        rows = fz.freeze(optax.trace(0.9), {"embed": ~fz.rows([3, 63]), "head": False})
        wider, report = fz.migrate(state, rows, params, report=True)
        assert placed_alike(wider, rows.init(params))
        assert "trace/head" in report.carried
        assert fz.migrate(wider, tx, params).plan == state.plan


def test_wrong_arguments():
    tx = fz.freeze(optax.adam(0.1), "head")
    other = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    params = model(LAYOUTS["FSDP"])
    params["head"] = jax.device_put(params["head"], NamedSharding(other, P("x")))
    with pytest.raises(ValueError, match=r"different meshes\n  at: head"):
        fz.state_shardings(tx, params)


def test_a_parameter_named_as_a_field_of_the_state_is():
    """Of ``mu/x`` in the state of Adam the end says too little: there is a parameter ``x``, and one ``mu/x``."""
    specs = {"x": P("data"), "mu": {"x": P()}, "count": P("data")}
    place = jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs)
    params = jax.tree.map(lambda sharding: jax.device_put(jnp.ones(8), sharding), place)
    state = fz.state_shardings(optax.adam(0.1), params)[0]
    assert state.mu == state.nu == place
    assert state.count.spec == P()
