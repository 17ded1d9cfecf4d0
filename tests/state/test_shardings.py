"""Parameters on a mesh of eight devices: every function keeps their shardings, and nothing frozen moves."""

import math
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_equal_up_to_rounding, bits
from flax import nnx
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


CASES = [(layout, name) for i, layout in enumerate(LAYOUTS) for j, name in enumerate(SPECS) if (i + j) % 3]
"""Each spec on two layouts at least."""


def loss(params, tokens):
    return jnp.mean((jnp.tanh(params["embed"][tokens] @ params["encoder"]) @ params["head"]) ** 2)


def shardings(tree):
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def placed_alike(got, expected):
    chex.assert_trees_all_equal_structs(got, expected)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_a_training_step_keeps_every_sharding(layout, name):
    sharded = model(LAYOUTS[layout])
    frozen = SPECS[name]
    tx = fz.freeze(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)), frozen)
    state = jax.jit(tx.init, out_shardings=fz.state_shardings(tx, sharded))(sharded)

    @jax.jit
    def step(params, state, tokens):
        grads = fz.grad(loss, fz.spec_of(state))(params, tokens)
        updates, state = tx.update(grads, state, params)
        return fz.apply_updates(params, updates, fz.spec_of(state)), state

    tokens = jax.device_put(jnp.arange(64), NamedSharding(MESH, P("data")))
    new, new_state = step(sharded, state, tokens)
    assert placed_alike(new, sharded)
    assert placed_alike(jax.device_put(new_state, shardings(state)), state)
    frozen_before, frozen_after = (fz.partition(params, ~fz.spec_of(state))[0] for params in (sharded, new))
    assert bits(frozen_before) == bits(frozen_after)
    whole = jax.device_put(sharded, jax.devices()[0])
    alone, _ = step(whole, tx.init(whole), jnp.arange(64))
    chex.assert_trees_all_close(jax.device_get(new), jax.device_get(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_no_collective_touches_what_is_frozen(place, name):
    """What is exchanged is the norm of the clip, and trainable rows on their way from the shard that holds them."""
    sharded = model(LAYOUTS[place])
    tx = fz.freeze(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), SPECS[name], full_updates=False)
    layout = fz.state_shardings(tx, sharded)
    state = jax.jit(tx.init, out_shardings=layout)(sharded)

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return fz.apply_updates(params, updates, fz.spec_of(state)), state

    where = shardings(sharded)
    jitted = jax.jit(step, in_shardings=(where, layout, where), out_shardings=(where, layout), donate_argnums=(1, 2))
    program = jitted.lower(sharded, state, sharded).compile().as_text()
    moved = [math.prod(int(n) for n in shape.split(",") if n) for shape in MOVED.findall(program)]
    assert max(moved, default=0) <= TRAINABLE_ROWS
    new, new_state = jitted(sharded, state, jax.tree.map(jnp.copy, sharded))
    assert shardings(new) == where
    assert shardings(new_state) == layout


@pytest.mark.parametrize(
    "inner",
    [
        optax.adafactor(0.1),
        optax.contrib.muon(0.1),
        optax.lbfgs(),
        optax.MultiSteps(optax.adam(0.1), 2),
        optax.contrib.schedule_free_adamw(0.1),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    ],
    ids=["adafactor", "muon", "lbfgs", "MultiSteps", "schedule_free", "inject_hyperparams"],
)
def test_the_state_of_any_optimizer_has_shardings(inner):
    params = model(LAYOUTS["both"])
    tx = fz.freeze(inner, SPECS["three rows"])
    layout = fz.state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=layout)(params)
    assert bits(state) == bits(tx.init(params))
    of_head = [leaf for leaf in jax.tree.leaves(state) if leaf.shape[-2:] == (128, 8)]
    assert of_head
    assert all(leaf.sharding.spec[-2:] == ("model", "data") for leaf in of_head)


def test_trainable_rows_are_sharded_where_the_mesh_divides_them():
    params = model(LAYOUTS["both"])
    for first, expected in ((504, P("model", "data")), (509, P(None, "data"))):
        tx = fz.freeze(optax.trace(0.9), fz.only("embed") | fz.rules({"embed": fz.rows(slice(0, first))}))
        assert [leaf.spec for leaf in jax.tree.leaves(fz.state_shardings(tx, params))] == [expected]


def test_the_trainable_part_keeps_its_shardings():
    params = model(LAYOUTS["both"])
    trainable, rest = fz.partition(params, SPECS["rows"])
    assert placed_alike(fz.combine(trainable, rest), params)
    layout = fz.state_shardings(optax.adam(0.1), trainable)
    state = jax.jit(optax.adam(0.1).init, out_shardings=layout)(trainable)
    assert placed_alike(state[0].mu, trainable)


def test_a_single_device_is_a_sharding_too():
    params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
    layout = fz.state_shardings(fz.freeze(optax.adam(0.1), "encoder"), params)
    assert set(jax.tree.leaves(layout)) == {params["head"].sharding}


def test_inside_shard_map_whole_leaves_are_frozen():
    params = model(LAYOUTS["FSDP"])
    tx = fz.freeze(optax.adam(0.1), "encoder")
    state = jax.jit(tx.init, out_shardings=fz.state_shardings(tx, params))(params)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, (params, state))

    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.jit(jax.shard_map(step, mesh=MESH, in_specs=specs, out_specs=specs))
    new, _ = mapped(params, state)
    assert placed_alike(new, params)
    assert bits(new["encoder"]) == bits(params["encoder"])
    assert_equal_up_to_rounding(new, jax.jit(step)(params, state)[0])


def test_linen_partition_metadata():
    layer = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model")))
    shapes = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((1, 16)))["params"]
    where = nn.get_sharding(shapes, MESH)
    variables = jax.jit(layer.init, out_shardings={"params": where})(jax.random.key(0), jnp.ones((1, 16)))
    tx = fz.freeze(optax.adam(0.1), "bias")
    layout = fz.state_shardings(tx, variables["params"])
    state = jax.jit(tx.init, out_shardings=layout)(variables["params"])
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(state) if leaf.ndim] == [P("data", "model")] * 2


def test_nnx_partition_metadata():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
    with jax.set_mesh(MESH):
        layer = nnx.Linear(16, 8, kernel_init=init, rngs=nnx.Rngs(0))
    params = nnx.state(layer, nnx.Param)
    where = nnx.get_named_sharding(params, MESH)
    params = jax.device_put(params, where)
    tx = fz.freeze(optax.adam(0.1), "bias")
    state = jax.jit(tx.init, out_shardings=fz.state_shardings(tx, params))(params)
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(state) if leaf.ndim] == [P("data", "model")] * 2


EXPLICIT = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
TABLE = np.arange(256 * 64).reshape(256, 64)
EXPLICIT_LAYOUTS = [P("data", "model"), P(("data", "model")), P(None, "model")]
EXPLICIT_SPECS = {
    "leaf": True,
    "one run": fz.rows(slice(0, 248)),
    "runs": ~fz.rows([3, 7, 8, 200, 255]),
    "steps": ~fz.rows(slice(0, 256, 64)),
    "dense": fz.elements(TABLE % 3 == 0),
    "compact": fz.elements(TABLE >= 16, compact=True),
}


EXPLICIT_CASES = [(name, EXPLICIT_LAYOUTS[(i + j) % 3]) for i, name in enumerate(EXPLICIT_SPECS) for j in (0, 1)]
"""Each spec on two layouts, each layout with four specs."""


def explicit_model(layout):
    key = jax.random.key(0)
    return {
        "embed": jax.device_put(jax.random.normal(key, TABLE.shape), NamedSharding(EXPLICIT, layout)),
        "head": jax.device_put(jnp.ones((64, 8)), NamedSharding(EXPLICIT, P(None, "model"))),
    }


@pytest.mark.skipif(not hasattr(jax.sharding, "auto_axes"), reason="this JAX has no jax.sharding.auto_axes")
@pytest.mark.parametrize(("name", "layout"), EXPLICIT_CASES, ids=str)
class TestExplicitMesh:
    """Where shardings are part of the types, and JAX refuses what it cannot shard without being told."""

    @pytest.fixture(autouse=True)
    def _mesh(self):
        with jax.set_mesh(EXPLICIT):
            yield

    def test_a_training_step(self, name, layout):
        """Jitted with full updates on the first layout of a spec, and eagerly with those of the part on the second."""
        full_updates = EXPLICIT_CASES.index((name, layout)) % 2 == 0
        compiled = jax.jit if full_updates else lambda step: step
        params = explicit_model(layout)
        frozen = {"embed": EXPLICIT_SPECS[name], "head": False}
        tx = fz.freeze(optax.adamw(0.1), frozen, full_updates=full_updates)

        def step(grads, state, params):
            updates, state = tx.update(grads, state, params)
            return fz.apply_updates(params, updates, fz.spec_of(state)), state

        grads = jax.tree.map(jnp.cos, params)
        state = tx.init(params)
        layout_of_state = fz.state_shardings(tx, params)
        assert placed_alike(state, jax.jit(tx.init, out_shardings=layout_of_state)(params))
        new, new_state = compiled(step)(grads, state, params)
        assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, params)
        assert placed_alike(new_state, state)
        fz.assert_frozen(params, new, frozen)
        grads, params = jax.tree.map(np.asarray, (grads, params))
        with jax.set_mesh(MESH):
            expected, _ = step(grads, tx.init(params), params)
        chex.assert_trees_all_close(jax.device_get(new), jax.device_get(expected), rtol=1e-5, atol=1e-6)

    def test_no_collective_of_the_size_of_the_table(self, name, layout):
        if name == "compact":
            pytest.skip("gathered from the whole leaf, on any mesh")
        params = explicit_model(layout)
        tx = fz.freeze(optax.adamw(0.1), {"embed": EXPLICIT_SPECS[name], "head": False}, full_updates=False)

        def step(grads, state, params):
            updates, state = tx.update(grads, state, params)
            return fz.apply_updates(params, updates, fz.spec_of(state)), state

        jitted = jax.jit(step, donate_argnums=(1, 2))
        program = jitted.lower(params, tx.init(params), params).compile().as_text()
        moved = [math.prod(int(n) for n in shape.split(",") if n) for shape in MOVED.findall(program)]
        assert max(moved, default=0) <= 8 * 64

    def test_the_parts(self, name, layout):
        params = explicit_model(layout)
        frozen = {"embed": EXPLICIT_SPECS[name], "head": False}
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

    def test_groups(self, name, layout):
        params = explicit_model(layout)
        mask = EXPLICIT_SPECS[name]
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

    def test_migrate(self, name, layout):
        params = explicit_model(layout)
        tx = fz.freeze(optax.trace(0.9), {"embed": EXPLICIT_SPECS[name], "head": False})
        _, state = tx.update(params, tx.init(params), params)
        rows = fz.freeze(optax.trace(0.9), {"embed": ~fz.rows([3, 255]), "head": False})
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


def test_objects_among_the_parameters():
    params = {"encoder": jnp.ones(2), "head": jnp.ones(2), "activation": jnp.tanh}
    tx = fz.freeze(optax.adam(0.1), "encoder")
    layout = fz.state_shardings(tx, params)
    assert jax.tree.structure(layout) == jax.tree.structure(tx.init(params))


def test_a_parameter_named_as_a_field_of_the_state_is():
    """Of ``mu/x`` in the state of Adam the end says too little: there is a parameter ``x``, and one ``mu/x``."""
    mesh = jax.make_mesh((8,), ("d",))
    place = {
        "x": NamedSharding(mesh, P("d")),
        "mu": {"x": NamedSharding(mesh, P())},
        "count": NamedSharding(mesh, P("d")),
    }
    params = jax.tree.map(lambda sharding: jax.device_put(jnp.ones(8), sharding), place)
    state = fz.state_shardings(optax.adam(0.1), params)[0]
    assert state.mu == state.nu == place
    assert state.count.spec == P()
