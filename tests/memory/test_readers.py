"""Parameters in the host's memory pass through whatever reads trees: there they stay, and their rows train."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze import checkpoint

SPEC = {"layers": fz.rows([0, 1, 4]), "embed": True, "head": False}
ROWS = {
    "a run": fz.rows(slice(0, 4)),
    "two runs": fz.rows([2, 3]),
    "every other": fz.rows(slice(0, 6, 2)),
    "another axis": fz.rows([1, 2], axis=1),
}


def model():
    key = iter(jax.random.split(jax.random.key(0), 3))
    return {
        "layers": jax.random.normal(next(key), (6, 8, 2)),
        "embed": jax.random.normal(next(key), (3, 2, 2)),
        "head": jax.random.normal(next(key), (3,)),
    }


def offloaded(tree, spec=SPEC):
    return fz.offload(tree, spec, min_bytes=0)


def kinds(tree):
    return {name: leaf.sharding.memory_kind for name, leaf in tree.items()}


THERE = {"layers": "pinned_host", "embed": "pinned_host", "head": "device"}


def _programs_return_host_arrays():
    host = jax.device_put(jnp.ones(2), jax.memory.Space.Host)
    return jax.jit(lambda x: jax.lax.dynamic_update_slice(x, x[:1], (0,)))(host).sharding.memory_kind == "pinned_host"


pytestmark = pytest.mark.skipif(
    not _programs_return_host_arrays(), reason="on a CPU, programs of this JAX return arrays in device memory"
)


class TestTwoParts:
    @pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
    @pytest.mark.parametrize("dtype", ["float32", "float8_e5m2"])
    def test_rows_come_to_the_device_and_go_back(self, rows, dtype):
        width = jnp.dtype(dtype).itemsize
        stack = np.random.default_rng(0).integers(0, 256, (6, 8, 2, width), np.uint8).view(jnp.dtype(dtype))[..., 0]
        spec = {"layers": rows}
        params = offloaded({"layers": stack}, spec)
        trainable, rest = jax.jit(lambda tree: fz.partition(tree, spec))(params)
        expected, _ = fz.partition({"layers": jnp.asarray(stack)}, spec)
        assert bits(trainable) == bits(expected)
        assert trainable["layers"].values.sharding.memory_kind == "device"
        whole = jax.jit(fz.combine)(trainable, rest)
        assert kinds(whole) == {"layers": "pinned_host"}
        assert bits(whole) == bits({"layers": stack})

    def test_whole_leaves_are_the_same_objects(self):
        params = offloaded(model())
        trainable, rest = fz.partition(params, SPEC)
        assert rest["embed"] is params["embed"]
        assert rest["layers"].array is params["layers"]
        assert fz.combine(trainable, rest)["embed"] is params["embed"]

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    @pytest.mark.parametrize("layout", [P(None, "x"), P("x"), P()])
    def test_on_a_mesh(self, layout, kind):
        mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
        params = {"layers": jax.device_put(model()["layers"], NamedSharding(mesh, layout))}
        spec = {"layers": SPEC["layers"]}
        trainable, rest = fz.partition(offloaded(params, spec), spec)
        expected, _ = fz.partition(params, spec)
        assert bits(trainable) == bits(expected)
        whole = fz.combine(trainable, rest)
        assert whole["layers"].sharding.memory_kind == "pinned_host"
        assert whole["layers"].sharding.is_equivalent_to(rest["layers"].array.sharding, 3)
        assert bits(whole) == bits(params)

    @pytest.mark.parametrize("spec", [SPEC, {**SPEC, "layers": True}])
    def test_stop_gradient(self, spec):
        params = offloaded(model(), spec)
        stopped = jax.jit(lambda tree: fz.stop_gradient(tree, spec))(params)
        assert kinds(stopped) == THERE
        assert bits(stopped) == bits(params)
        assert fz.stop_gradient(params, spec)["embed"] is params["embed"]


def updates_of(kind):
    full = jax.tree.map(jnp.ones_like, model())
    return {
        "full": full,
        "on the host": {**full, "layers": offloaded(full)["layers"]},
        "trainable": fz.partition(full, SPEC)[0],
    }[kind]


class TestUpdates:
    @pytest.mark.parametrize(
        ("kind", "given"), [("full", SPEC), ("on the host", SPEC), ("trainable", SPEC), ("trainable", None)]
    )
    def test_apply_updates(self, kind, given):
        params, updates = offloaded(model()), updates_of(kind)
        new = jax.jit(lambda tree: fz.apply_updates(tree, updates, given))(params)
        assert kinds(new) == THERE
        assert bits(new) == bits(fz.apply_updates(model(), fz.partition(updates_of("full"), SPEC)[0], given))

    @pytest.mark.parametrize("kind", ["full", "on the host", "trainable"])
    @pytest.mark.parametrize("full_updates", [True, False])
    def test_freeze(self, kind, full_updates):
        tx = fz.freeze(optax.sgd(0.5), SPEC, full_updates=full_updates)
        params, grads = offloaded(model()), updates_of(kind)
        state = tx.init(params)

        def step(params, state):
            updates, _ = tx.update(grads, state, params)
            return fz.apply_updates(params, updates), fz.update_params(tx, grads, state, params)[0]

        plain = fz.freeze(optax.sgd(0.5), SPEC)
        expected = fz.update_params(plain, updates_of("full"), plain.init(model()), model())[0]
        for new in jax.jit(step)(params, state):
            assert kinds(new) == THERE
            assert bits(new) == bits(expected)

    def test_a_frozen_stack_is_passed_on(self):
        params = offloaded(model())
        tx = fz.freeze(optax.adam(0.1), SPEC)
        state, grads = tx.init(params), updates_of("trainable")
        updates, _ = tx.update(grads, state, params)
        for new in (fz.apply_updates(params, updates), fz.update_params(tx, grads, state, params)[0]):
            assert new["embed"] is params["embed"]

    def test_optax_adds_such_updates_in_the_same_program(self):
        spec = {**SPEC, "layers": True}
        params = offloaded(model(), spec)
        tx = fz.freeze(optax.sgd(0.5), spec)

        @jax.jit
        def step(params, state):
            updates, state = tx.update(updates_of("full"), state, params)
            return optax.apply_updates(params, updates), state

        new, _ = step(params, tx.init(params))
        assert kinds(new) == THERE
        assert bits({**new, "head": 0}) == bits({**params, "head": 0})

    @pytest.mark.parametrize("spec", [SPEC, {**SPEC, "layers": True}])
    def test_masked_zero_updates(self, spec):
        params = offloaded(model(), spec)
        tx = fz.masked_zero_updates(spec)
        state = tx.init(params)

        def step(params):
            updates, _ = tx.update(updates_of("full"), state, params)
            return fz.apply_updates(params, updates)

        new = jax.jit(step)(params)
        assert kinds(new) == THERE
        assert bits(new) == bits(fz.apply_updates(model(), updates_of("full"), spec))

    def test_a_donated_stack_is_updated_in_place(self):
        params = jax.tree.map(jnp.copy, offloaded(model()))
        expected = fz.apply_updates(model(), updates_of("full"), SPEC)
        places = {name: leaf.unsafe_buffer_pointer() for name, leaf in params.items() if name != "head"}
        step = jax.jit(lambda tree: fz.apply_updates(tree, updates_of("trainable")), donate_argnums=0)
        new = step(params)
        assert {name: new[name].unsafe_buffer_pointer() for name in places} == places
        assert bits(new) == bits(expected)


class TestStates:
    def test_the_state_lies_on_the_device(self):
        params = offloaded(model())
        tx = fz.freeze(optax.adam(0.1), SPEC)
        state = tx.init(params)
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves((state, fz.migrate(state, tx, params)))} == {
            "device"
        }
        for opt in (tx, optax.adam(0.1)):
            assert {s.memory_kind for s in jax.tree.leaves(fz.state_shardings(opt, params))} == {"device"}
        assert fz.resolve(params, fz.spec_of(state)) == fz.resolve(params, SPEC)

    def test_on_a_mesh_too(self):
        mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
        sharding = NamedSharding(mesh, P(None, "x"))
        shapes = {"layers": jax.ShapeDtypeStruct((6, 8, 2), jnp.float32, sharding=sharding)}
        host = offloaded(shapes, True)
        assert jax.tree.leaves(fz.state_shardings(optax.trace(0.9), host)) == [sharding]

    def test_a_checkpoint(self, tmp_path):
        params = offloaded(model())
        tx = fz.freeze(optax.adam(0.1), SPEC)
        state = tx.init(params)
        checkpoint.save(tmp_path, params, SPEC, step=0, opt_state=state)
        for base, there in ((params, THERE), (model(), dict.fromkeys(THERE, "device"))):
            other = fz.apply_updates(base, updates_of("trainable"))
            restored, back = checkpoint.restore(tmp_path, other, opt_state=state)
            assert kinds(restored) == there
            assert bits((restored, back)) == bits((model(), state))
            assert restored["embed"] is base["embed"]

    def test_an_audit(self):
        for make in (lambda: offloaded(model()), lambda: offloaded(jax.eval_shape(model))):
            assert fz.audit(make(), SPEC, fz.freeze(optax.adam(0.1), SPEC), steps=1)

    def test_precompute_needs_rows_that_train_on_the_device(self):
        def loss(params, x):
            return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w @ w.T), None), x, params["layers"])[0])

        spec, x = {"layers": fz.rows(slice(0, 4))}, jnp.ones((3, 8))
        params = offloaded({"layers": model()["layers"]}, spec)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), params)
        for given in (params, shapes):
            assert kinds(given) == {"layers": "pinned_host"}
            values = fz.precompute(loss, spec).needed(given, x)["layers"].values
            assert values.shape == (2, 8, 2)
            assert values.sharding.memory_kind == "device"
