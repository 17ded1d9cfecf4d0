"""Frozen updates: zeros that keep bits, an optimizer that sees what trains alone, and a state that travels."""

import collections
import copy
import pickle

import chex
import equinox as eqx
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from conftest import bits, state_bytes
from flax import nnx
from flax.training.train_state import TrainState

import optax_freeze as fz

HOLE = optax.MaskedNode()

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "clip and adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1, weight_decay=0.1)),
    "lion": optax.lion(0.1),
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "muon": optax.contrib.muon(0.1),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "noise": optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.5, key=0)),
    "non-negative": optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "multi steps": optax.MultiSteps(optax.adamw(0.1), 2),
    "apply if finite": optax.apply_if_finite(optax.adamw(0.1), 3),
    "schedule free": optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "ema": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "schedule": optax.adam(optax.cosine_decay_schedule(0.1, 10)),
}


def train(tx, params, grads, steps=3):
    """A few steps on constant gradients; the parameters and the state."""
    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


class TestMaskedZeroUpdates:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
    def test_zero_whatever_came_in(self, params, frozen, bad, compiled):
        tx = fz.masked_zero_updates(frozen)
        updates = jax.tree.map(lambda p: jnp.full_like(p, bad), params)
        out, _ = compiled(tx.update)(updates, tx.init(params))
        for leaf in jax.tree.leaves(out["encoder"]):
            assert np.asarray(leaf).tobytes() == np.full(leaf.shape, -0.0, np.float32).tobytes()
        assert bits(out["head"]) == bits(updates["head"])

    def test_last_in_a_chain_it_undoes_decay_and_noise(self, params, frozen):
        tx = optax.chain(optax.adamw(0.1), optax.add_noise(0.1, 0.5, key=0), fz.masked_zero_updates(frozen))
        new, _ = train(tx, params, params)
        assert bits(new["encoder"]) == bits(params["encoder"])
        assert bits(new["head"]) != bits(params["head"])

    def test_first_in_a_chain_it_keeps_nan_from_a_norm(self, params, frozen):
        tx = optax.chain(fz.masked_zero_updates(frozen), optax.clip_by_global_norm(1.0))
        grads = {"encoder": jax.tree.map(lambda p: p * np.nan, params["encoder"]), "head": params["head"]}
        updates, _ = tx.update(grads, tx.init(params))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))

    def test_awkward_leaves(self, awkward, compiled):
        tx = fz.masked_zero_updates("frozen", tied="ignore")
        state = tx.init(awkward)
        out, _ = compiled(tx.update)(awkward, state)
        zeros = out["frozen"]
        assert zeros["key"] == HOLE
        assert zeros["integer"].dtype == jnp.int32
        assert zeros["boolean"].dtype == jnp.bool_
        assert zeros["float8"].dtype == jnp.float8_e4m3fn
        for name in ("negative_zero", "nan", "bfloat16", "float16", "float8", "scalar"):
            assert np.signbit(np.asarray(zeros[name]).astype(np.float32)).all()
        assert np.signbit(np.asarray(zeros["complex"]).view(np.float32)).all()
        assert not np.isnan(np.asarray(zeros["float8_without_negative_zero"]).astype(np.float32)).any()

    def test_a_hole_becomes_zero(self, params, frozen):
        tx = fz.masked_zero_updates(frozen)
        trainable, _ = fz.partition(params, frozen)
        out, _ = tx.update(trainable, tx.init(params))
        assert bits(optax.apply_updates(params, out)["encoder"]) == bits(params["encoder"])

    def test_no_dense_constant(self, params, frozen):
        tx = fz.masked_zero_updates(True)
        big = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
        state = jax.eval_shape(tx.init, big)
        assert len(jax.jit(tx.update).lower(big, state).as_text()) < 2000


class TestFreeze:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_the_contract(self, params, frozen, name):
        """Frozen bits stay; what trains moves, and has the state, as if it were alone: bit for bit."""
        inner = OPTIMIZERS[name]
        grads = jax.tree.map(lambda p: jnp.cos(p), params)
        wild = {"encoder": jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params["encoder"]), "head": grads["head"]}
        new, state = train(fz.freeze(inner, frozen), params, wild, steps=4)
        alone, alone_state = train(inner, fz.partition(params, frozen)[0], fz.partition(grads, frozen)[0], steps=4)
        assert bits(new["encoder"]) == bits(params["encoder"])
        assert bits(new["head"]) == bits(alone["head"])
        assert bits(new["head"]) != bits(params["head"])
        assert [b[1:] for b in bits(state)] == [b[1:] for b in bits(alone_state)]

    @pytest.mark.parametrize("structure", ["full", "trainable"])
    @pytest.mark.parametrize("full_updates", [True, False])
    @pytest.mark.parametrize("with_params", [True, False])
    def test_gradients_and_updates_of_either_structure(self, params, frozen, structure, full_updates, with_params):
        tx = fz.freeze(optax.sgd(0.1), frozen, full_updates=full_updates)
        trainable, _ = fz.partition(params, frozen)
        grads = params if structure == "full" else trainable
        updates, _ = tx.update(grads, tx.init(params), params if with_params else None)
        assert jax.tree.structure(updates) == jax.tree.structure(params if full_updates else trainable)
        new = (optax if full_updates else fz).apply_updates(params, updates)
        assert bits(new["encoder"]) == bits(params["encoder"])
        assert bits(new["head"]) == bits(jax.tree.map(lambda p: p - 0.1 * p, params["head"]))

    def test_init_on_the_trainable_part(self, params, frozen):
        tx = fz.freeze(optax.adam(0.1), frozen)
        trainable, _ = fz.partition(params, frozen)
        state = tx.init(trainable)
        updates, _ = tx.update(trainable, state, trainable)
        assert jax.tree.structure(updates) == jax.tree.structure(trainable)
        assert bits(fz.apply_updates(params, updates)["encoder"]) == bits(params["encoder"])

    def test_awkward_leaves_keep_their_bits(self, awkward, compiled):
        tx = fz.freeze(optax.adamw(0.1), "frozen", tied="ignore")

        def step(params, state):
            grads = {**jax.tree.map(lambda p: jnp.full(p.shape, jnp.nan), params), "trains": jnp.ones(2)}
            updates, state = tx.update(grads, state, params)
            return fz.apply_updates(params, updates), state

        new, _ = compiled(step)(awkward, tx.init(awkward))
        assert bits(new["frozen"]) == bits(awkward["frozen"])
        assert bits(new["trains"]) != bits(awkward["trains"])

    def test_optax_keeps_numbers_too(self, awkward, compiled):
        del awkward["frozen"]["key"]
        tx = fz.freeze(optax.adamw(0.1), "frozen", tied="ignore")

        def step(params, state):
            updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
            return optax.apply_updates(params, updates)

        assert bits(compiled(step)(awkward, tx.init(awkward))["frozen"]) == bits(awkward["frozen"])

    def test_whatever_the_dtype_of_the_gradient(self):
        params = {
            "n": jnp.array([2**30 + 1], jnp.int32),
            "c": jnp.array([complex(-0.0, -0.0)], jnp.complex64),
            "h": jnp.array([-0.0, 1.1], jnp.bfloat16),
            "w": jnp.ones(1),
        }
        tx = fz.freeze(optax.sgd(0.1), fz.only("w"))
        grads = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), params)
        for with_params in (params, None):
            updates, _ = tx.update(grads, tx.init(params), with_params)
            new = optax.apply_updates(params, updates)
            assert bits({**new, "w": 0}) == bits({**params, "w": 0})

    def test_frozen_python_numbers_have_a_zero(self):
        params = {"scale": -0.0, "count": 3, "w": jnp.ones(1)}
        tx = fz.freeze(optax.sgd(0.1), "scale")
        for grads in (params, fz.grad(lambda p: p["w"].sum() * p["scale"], "scale")(params)):
            updates, _ = tx.update(grads, tx.init(params), params)
            new = optax.apply_updates(params, updates)
            assert (new["scale"], np.signbit(new["scale"]), new["count"]) == (0.0, True, 3)

    def test_64_bit_numpy_leaves(self):
        params = {"a": np.ones(1), "n": np.arange(2), "w": jnp.ones(1)}
        tx = fz.freeze(optax.sgd(0.1), ["a", "n"])
        updates, _ = tx.update(params, tx.init(params), params)
        assert (updates["a"].dtype, updates["n"].dtype) == (jnp.float32, jnp.int32)

    def test_strict_dtype_promotion(self, params, loss, batch, frozen):
        with jax.numpy_dtype_promotion("strict"):
            tx = fz.freeze(
                optax.sgd(0.1, momentum=0.9), {"encoder": True, "head": {"kernel": fz.rows(0), "bias": False}}
            )
            updates, _ = tx.update(fz.grad(loss, frozen)(params, batch), tx.init(params), params)
            assert bits(optax.apply_updates(params, updates)["encoder"]) == bits(params["encoder"])

    @pytest.mark.parametrize("spec", [True, False])
    def test_all_or_nothing(self, params, spec, compiled):
        new, _ = compiled(lambda p: train(fz.freeze(optax.adam(0.1), spec), p, p))(params)
        if spec:
            assert bits(new) == bits(params)
        else:
            plain, _ = compiled(lambda p: train(optax.adam(0.1), p, p))(params)
            chex.assert_trees_all_close(new, plain, rtol=1e-6)

    def test_a_lone_leaf(self):
        assert bits(train(fz.freeze(optax.adam(0.1), True), jnp.ones(2), jnp.ones(2))[0]) == bits(jnp.ones(2))
        assert bits(train(fz.freeze(optax.adam(0.1), False), jnp.ones(2), jnp.ones(2))[0]) != bits(jnp.ones(2))

    def test_state_of_what_trains_alone(self, params, frozen):
        trainable, _ = fz.partition(params, frozen)
        for inner in (optax.adam(0.1), optax.MultiSteps(optax.adam(0.1), 4)):
            assert state_bytes(fz.freeze(inner, frozen).init(params)) == state_bytes(inner.init(trainable))

    def test_on_eight_devices(self):
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
        w = jax.random.normal(jax.random.key(0), (8, 4))
        plain = {name: w + i for i, name in enumerate("abcd")}
        mask = np.asarray(w > 0)
        spec = {"a": True, "b": False, "c": fz.rows(slice(0, 3)), "d": mask}
        tx = fz.freeze(optax.adamw(0.1), spec)

        @jax.jit
        def step(params, state):
            updates, state = tx.update(
                fz.grad(lambda p: sum(jnp.cos(x).sum() for x in p.values()), spec)(params), state, params
            )
            return fz.apply_updates(params, updates, fz.spec_of(state)), state

        sharded = jax.device_put(plain, sharding)
        state = tx.init(sharded)
        assert optax.tree.get(state, "mu")["b"].sharding == sharding
        assert state.masks["d"].sharding == sharding
        new, _ = step(sharded, state)
        alone, _ = step(plain, tx.init(plain))
        chex.assert_trees_all_close(new, alone, rtol=1e-6)
        assert bits(new["a"]) == bits(plain["a"])
        assert bits(new["c"][:3]) == bits(plain["c"][:3])
        assert np.asarray(new["d"])[mask].tobytes() == np.asarray(plain["d"])[mask].tobytes()
        updates, _ = tx.update(sharded, state, sharded)
        assert updates["a"].sharding == sharding


class TestWrongArguments:
    @pytest.mark.parametrize(
        ("args", "error"),
        [
            (("encoder",), r"needs an optimizer(.|\n)*masked_zero_updates\('encoder'\)"),
            (({"encoder": True, "head": False},), "needs an optimizer"),
            (("encoder", optax.sgd(1.0)), r"not an optimizer(.|\n)*swap"),
            ((optax.sgd(1.0),), "needs a spec"),
            ((optax.adam, "encoder"), r"not an optimizer(.|\n)*call the factory"),
            ((3, "encoder"), "not an optimizer"),
        ],
        ids=["optax.freeze", "mask alone", "swapped", "optimizer alone", "factory", "number"],
    )
    def test_the_error_says_what_was_meant(self, args, error):
        with pytest.raises(TypeError, match=error):
            fz.freeze(*args)

    def test_a_pattern_that_matches_nothing(self, params):
        for tx in (fz.freeze(optax.sgd(1.0), "decoder"), fz.masked_zero_updates("decoder")):
            with pytest.raises(ValueError, match="matches no leaf"):
                tx.init(params)

    def test_gradients_of_another_structure(self, params, frozen):
        for tx in (fz.freeze(optax.sgd(1.0), frozen), fz.masked_zero_updates(frozen)):
            state = tx.init(params)
            with pytest.raises(ValueError, match=r"updates: different tree structure(.|\n)*at: encoder"):
                tx.update({"head": params["head"]}, state, params)
            with pytest.raises(ValueError, match=r"updates: different tree structure(.|\n)*\['tail'\]"):
                tx.update({**params, "tail": jnp.ones(1)}, state, params)

    def test_parameters_of_another_structure(self, params, frozen):
        tx = fz.freeze(optax.sgd(1.0), frozen)
        with pytest.raises(ValueError, match="params: different tree structure"):
            tx.update(params, tx.init(params), {"head": params["head"]})

    def test_the_gradient_of_another_spec(self, params, loss, batch, frozen):
        tx = fz.freeze(optax.sgd(1.0), frozen)
        grads = fz.grad(loss, "head")(params, batch)
        with pytest.raises(ValueError, match=r"a trainable leaf is missing\n  at: head/bias"):
            tx.update(grads, tx.init(params), params)

    def test_no_parameters_where_they_are_needed(self, params, frozen):
        tx = fz.freeze(optax.adamw(0.1), frozen)
        with pytest.raises(ValueError, match=r"failed without parameters(.|\n)*tx\.update\(grads, state, params\)"):
            tx.update(params, tx.init(params))

    def test_gradients_in_other_containers(self):
        tx = fz.freeze(optax.sgd(1.0), "0")
        state = tx.init([jnp.ones(1), jnp.ones(1)])
        with pytest.raises(ValueError, match="the same paths in different containers"):
            tx.update((jnp.ones(1), jnp.ones(1)), state)
        ordered = collections.OrderedDict(b=jnp.ones(1), a=jnp.ones(1))
        tx = fz.freeze(optax.sgd(1.0), "a")
        with pytest.raises(ValueError, match="the same paths in a different order"):
            tx.update(dict(ordered), tx.init(ordered))
        with pytest.raises(ValueError, match="the same paths in different containers"):
            fz.apply_updates([jnp.ones(1)], (jnp.ones(1),))
        with pytest.raises(ValueError, match="the same paths in different containers"):
            fz.combine([jnp.ones(1)], (HOLE,))

    def test_the_state_of_another_transformation(self, params, frozen):
        for tx in (fz.freeze(optax.adam(1.0), frozen), fz.masked_zero_updates(frozen)):
            for wrong in (optax.adam(1.0).init(params), params):
                with pytest.raises(
                    TypeError, match=r"the state was created by a different transformation(.|\n)*tx\.init\(params\)"
                ):
                    tx.update(params, wrong, params)

    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("with_params", [True, False])
    @pytest.mark.parametrize("transformation", [fz.masked_zero_updates, lambda f: fz.freeze(optax.adam(0.1), f)])
    def test_the_state_of_another_spec(self, transformation, with_params, compiled):
        params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
        state = transformation("a").init(params)
        copied = pickle.loads(pickle.dumps(state))
        for other in ("b", False, {"a": fz.rows(0), "b": False}, np.arange(6).reshape(3, 2) == 1):
            other = {"a": other, "b": True} if isinstance(other, np.ndarray) else other
            update = transformation(other).update
            for of_another in (state, copied):
                with pytest.raises(ValueError, match=r"created with a different spec(.|\n)*at: a(.|\n)*fz.migrate"):
                    (jax.jit(update) if compiled else update)(params, of_another, params if with_params else None)

    @pytest.mark.parametrize("frozen", ["encoder", fz.rules({"head": fz.rows(0)})], ids=repr)
    def test_the_state_of_other_parameters(self, frozen):
        state = fz.freeze(optax.sgd(0.1), True).init({"tail": jnp.ones(2)})
        params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
        with pytest.raises(
            ValueError, match=r"a different spec or for different parameters(.|\n)*'tail'(.|\n)*matches no leaf"
        ):
            fz.freeze(optax.sgd(0.1), frozen).update(params, state)

    def test_the_gradient_of_the_trainable_part_tells_nothing_of_the_spec(self, params, loss, batch):
        """It has holes at what another spec freezes, which this one does not."""
        spec = fz.rules({"encoder/layer_0/kernel": fz.rows([0]), "encoder": True})
        tx = fz.freeze(optax.sgd(0.1), spec)
        grads = fz.grad(loss, spec)(params, batch)
        state = pickle.loads(pickle.dumps(tx.init(params)))
        assert bits(tx.update(grads, state)[0]) == bits(tx.update(grads, tx.init(params))[0])
        with pytest.raises(ValueError, match="the state was created with a different spec"):
            fz.freeze(optax.sgd(0.1), "encoder").update(grads, tx.init(params))

    @pytest.mark.parametrize(
        "same", ["a/**", ["a"], fz.only("b"), {"a": True, "b": False}, lambda p: {"a": True, "b": False}]
    )
    def test_the_state_of_the_same_spec_in_other_words(self, same):
        params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
        state = fz.freeze(optax.adam(0.1), "a").init(params)
        copied = pickle.loads(pickle.dumps(state))
        updates = [fz.freeze(optax.adam(0.1), same).update(params, s, params)[0] for s in (state, copied)]
        assert bits(updates[0]) == bits(updates[1])
        assert (updates[0]["a"] == 0).all()

    @pytest.mark.parametrize("frozen", ["encoder", fz.rules({"encoder/layer_0/kernel": fz.rows(0)})], ids=repr)
    def test_the_trainable_part_for_the_parameters(self, params, frozen):
        tx = fz.freeze(optax.adam(0.1), frozen)
        trainable, rest = fz.partition(params, fz.path("head"))
        with pytest.raises(
            ValueError, match=r"params: a trainable leaf is missing(.|\n)*fz\.combine\(trainable, rest\)"
        ):
            tx.update(params, tx.init(params), trainable)
        tx.update(params, tx.init(params), fz.combine(trainable, rest))

    def test_a_frozen_gradient_of_another_shape_moves_nothing(self):
        params = {"a": jnp.ones(1), "b": jnp.ones(1)}
        tx = fz.freeze(optax.sgd(0.1), "a")
        updates, _ = tx.update({"a": jnp.ones(4), "b": jnp.ones(1)}, tx.init(params), params)
        assert bits(optax.apply_updates(params, updates)["a"]) == bits(params["a"])


class TestExtraArguments:
    def test_trees_lose_their_frozen_part(self, params, frozen):
        seen = {}

        def update_fn(updates, state, params=None, **extra_args):
            seen.update(extra_args, params=params)
            return updates, state

        inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)
        tx = fz.freeze(inner, frozen)
        trainable, _ = fz.partition(params, frozen)
        for grads in (params, trainable):
            tx.update(grads, tx.init(params), params, grad=params, value=jnp.float32(2), name="x", other={"a": 1})
            assert jax.tree.structure(seen["grad"]) == jax.tree.structure(trainable)
            assert jax.tree.structure(seen["params"]) == jax.tree.structure(trainable)
            assert (seen["value"], seen["name"], seen["other"]) == (2, "x", {"a": 1})

    def test_multi_steps_forwards_them(self, params, frozen):
        tx = fz.freeze(optax.MultiSteps(optax.contrib.reduce_on_plateau(), 2), frozen)
        updates, _ = tx.update(params, tx.init(params), params, value=jnp.float32(1.0))
        assert jax.tree.structure(updates) == jax.tree.structure(params)

    def test_functions_of_the_parameters_are_restricted(self, params, loss, batch, frozen):
        def of(params):
            return loss(params, batch)

        def gradient(params, _):
            return jax.grad(of)(params)

        grads = jax.grad(of)(params)
        sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), sync_period=2, opaque_mode=True)
        for inner, extra in ((optax.contrib.sophia(0.1), {"obj_fn": of}), (sam, {"grad_fn": gradient})):
            tx = fz.freeze(inner, frozen)
            updates, _ = tx.update(grads, tx.init(params), params, **extra)
            new = optax.apply_updates(params, updates)
            assert bits(new["encoder"]) == bits(params["encoder"])
            assert bits(new["head"]) != bits(params["head"])

    def test_a_scalar_beside_a_lone_frozen_leaf(self):
        tx = fz.freeze(optax.contrib.reduce_on_plateau(), True)
        updates, _ = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), value=jnp.float32(1))
        assert bits(updates) == bits(jnp.full(2, -0.0))

    def test_a_loss_with_any_argument_names(self, frozen):
        _, rest = fz.partition({"encoder": jnp.ones(1), "head": jnp.ones(1)}, frozen)
        restricted = fz.restrict(lambda params, trainable: trainable, rest)
        assert restricted({"encoder": HOLE, "head": jnp.ones(1)}, trainable=2.0) == 2.0

    def test_lbfgs_with_full_gradients(self, params, loss, batch, frozen):
        tx = fz.freeze(optax.lbfgs(), frozen)
        state, before = tx.init(params), params
        for _ in range(5):
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss, x=batch)
            params = optax.apply_updates(params, updates)
        assert bits(params["encoder"]) == bits(before["encoder"])
        assert loss(params, batch) < 0.5 * loss(before, batch)


class TestCompany:
    """Inside and around what users have already."""

    def test_in_a_chain(self, params, loss, batch, frozen, compiled):
        tx = optax.chain(optax.clip_by_global_norm(0.1), fz.freeze(optax.adamw(0.1), frozen))

        def step(params, state):
            updates, state = tx.update(fz.grad(loss, frozen)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        new, _ = compiled(step)(params, tx.init(params))
        inside = fz.freeze(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)), frozen)
        grads = jax.grad(loss)(params, batch)
        updates, _ = inside.update(grads, inside.init(params), params)
        assert bits(new["encoder"]) == bits(params["encoder"])
        chex.assert_trees_all_close(new["head"], optax.apply_updates(params, updates)["head"], rtol=1e-5)

    def test_in_inject_hyperparams(self, params, frozen, compiled):
        @optax.inject_hyperparams
        def make(learning_rate):
            return fz.freeze(optax.adamw(learning_rate), frozen)

        tx = make(learning_rate=optax.linear_schedule(0.1, 0.0, 10))
        new, state = compiled(lambda p: train(tx, p, p))(params)
        assert bits(new["encoder"]) == bits(params["encoder"])
        assert 0 < state.hyperparams["learning_rate"] < 0.1

    def test_in_multi_transform(self, params, compiled):
        tx = optax.multi_transform(
            {"a": fz.freeze(optax.adam(0.1), "encoder/layer_0"), "b": optax.sgd(0.1)},
            lambda p: {"encoder": "a", "head": "b"},
        )
        new, _ = compiled(lambda p: train(tx, p, p))(params)
        assert bits(new["encoder"]["layer_0"]) == bits(params["encoder"]["layer_0"])
        assert bits(new["encoder"]["layer_1"]) != bits(params["encoder"]["layer_1"])
        assert bits(new["head"]) != bits(params["head"])

    def test_in_apply_if_finite(self, params, loss, batch, frozen, compiled):
        tx = optax.apply_if_finite(fz.freeze(optax.adam(0.1), frozen, full_updates=False), 3)

        def step(params, state):
            updates, state = tx.update(fz.grad(loss, frozen)(params, batch), state, params)
            return fz.apply_updates(params, updates), state

        new, state = compiled(step)(params, tx.init(params))
        assert bits(new["encoder"]) == bits(params["encoder"])
        assert bits(new["head"]) != bits(params["head"])
        assert state.total_notfinite == 0

    def test_in_multi_steps(self, params, frozen, compiled):
        tx = optax.MultiSteps(fz.freeze(optax.adam(0.1), frozen), 2)
        new, _ = compiled(lambda p: train(tx, p, p, steps=4))(params)
        assert bits(new["encoder"]) == bits(params["encoder"])
        assert bits(new["head"]) != bits(params["head"])

    def test_in_masked(self, params, frozen):
        tx = optax.masked(fz.freeze(optax.adam(0.1), frozen), True)
        assert bits(train(tx, params, params)[0]["encoder"]) == bits(params["encoder"])

    def test_train_state(self, frozen):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(1, name="head")(nn.Dense(3, name="encoder")(x))

        model, x = Model(), jnp.ones((2, 3))
        params = model.init(jax.random.key(0), x)["params"]
        state = TrainState.create(apply_fn=model.apply, params=params, tx=fz.freeze(optax.adamw(0.1), frozen))

        @jax.jit
        def step(state):
            grads = fz.grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2), frozen)(state.params)
            return state.apply_gradients(grads=grads)

        new = step(step(state))
        assert bits(new.params["encoder"]) == bits(params["encoder"])
        assert bits(new.params["head"]) != bits(params["head"])
        restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(new))
        assert bits(step(restored).params) == bits(step(new).params)

    @pytest.mark.parametrize("inner", [optax.adamw(0.1), optax.MultiSteps(optax.adamw(0.1), 2)], ids=["adamw", "multi"])
    def test_nnx_optimizer(self, inner):
        class Model(nnx.Module):
            def __init__(self, rngs):
                self.encoder = nnx.Linear(3, 3, rngs=rngs)
                self.head = nnx.Linear(3, 1, rngs=rngs)

        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, fz.freeze(inner, "encoder/kernel"), wrt=nnx.Param)
        before = {name: np.asarray(getattr(model, name).kernel[...]) for name in ("encoder", "head")}
        bias = np.asarray(model.encoder.bias[...])

        @nnx.jit
        def step(model, optimizer):
            grads = nnx.grad(lambda m: jnp.mean(m.head(jax.nn.relu(m.encoder(jnp.ones((2, 3))))) ** 2))(model)
            optimizer.update(model, grads)

        for _ in range(4):
            step(model, optimizer)
        assert np.asarray(model.encoder.kernel[...]).tobytes() == before["encoder"].tobytes()
        assert np.asarray(model.head.kernel[...]).tobytes() != before["head"].tobytes()
        assert np.asarray(model.encoder.bias[...]).tobytes() != bias.tobytes()


class TestStateTravels:
    @pytest.fixture(params=["freeze", "masked_zero_updates", "freeze around MultiSteps"])
    def tx(self, request, frozen):
        return {
            "freeze": fz.freeze(optax.adamw(0.1), frozen),
            "masked_zero_updates": optax.chain(optax.adamw(0.1), fz.masked_zero_updates(frozen)),
            "freeze around MultiSteps": fz.freeze(optax.MultiSteps(optax.adamw(0.1), 2), frozen),
        }[request.param]

    def test_jit_and_donation(self, params, tx):
        step = jax.jit(lambda p, s: tx.update(jax.tree.map(jnp.cos, p), s, p), donate_argnums=1)
        _, state = tx.update(jax.tree.map(jnp.cos, params), tx.init(params), params)
        _, state = step(params, state)
        _, state = step(params, state)
        assert step._cache_size() == 1

    def test_scan(self, params, tx):
        def body(carry, _):
            params, state = carry
            updates, state = tx.update(params, state, params)
            return (optax.apply_updates(params, updates), state), None

        (new, _), _ = jax.lax.scan(body, (params, tx.init(params)), length=3)
        assert bits(new["encoder"]) == bits(params["encoder"])

    def test_vmap_over_an_ensemble(self, params, tx):
        stacked = jax.tree.map(lambda p: jnp.stack([p, p + 1]), params)
        updates, _ = jax.vmap(tx.update)(stacked, jax.vmap(tx.init)(stacked), stacked)
        assert bits(optax.apply_updates(stacked, updates)["encoder"]) == bits(stacked["encoder"])

    def test_flax_serialization(self, params, tx):
        _, state = tx.update(params, tx.init(params), params)
        restored = flax.serialization.from_bytes(tx.init(params), flax.serialization.to_bytes(state))
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        assert bits(restored) == bits(state)

    def test_orbax(self, params, tx, tmp_path):
        _, state = tx.update(params, tx.init(params), params)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "state", tx.init(params))
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        assert bits(restored) == bits(state)

    def test_pickle(self, params, tx):
        state = pickle.loads(pickle.dumps(tx.init(params)))
        updates, _ = tx.update(params, state, params)
        assert bits(optax.apply_updates(params, updates)["encoder"]) == bits(params["encoder"])

    @pytest.mark.parametrize("non_params", [None, lambda leaf: leaf], ids=["", "non_params"])
    def test_tree_map_params(self, params, tx, non_params):
        grads = jax.tree.map(jnp.cos, params)
        _, state = tx.update(grads, tx.init(params), params)
        mapped = optax.tree_map_params(tx, lambda leaf: leaf, state, transform_non_params=non_params)
        assert bits(mapped) == bits(state)
        updates, after = tx.update(grads, mapped, params)
        expected, expected_after = tx.update(grads, state, params)
        assert bits(updates) == bits(expected)
        assert bits(after) == bits(expected_after)
        assert fz.resolve(params, fz.spec_of(after)) == fz.resolve(params, "encoder")
        counted = optax.tree_map_params(tx, lambda leaf: leaf, state, transform_non_params=lambda leaf: leaf + 1)
        assert optax.tree.get(counted, "count") == optax.tree.get(state, "count") + 1

    def test_tree_map_params_with_the_parameters(self, params, tx):
        mapped = optax.tree_map_params(
            tx,
            lambda leaf, param: (leaf, param),
            tx.init(params),
            params,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
        leaf, param = optax.tree.get(mapped, "mu")["head"]["kernel"]
        assert leaf.shape == param.shape == (4, 2)

    def test_deepcopy(self, params, tx):
        state = copy.deepcopy(tx.init(params))
        updates, _ = tx.update(params, state, params)
        assert bits(optax.apply_updates(params, updates)["encoder"]) == bits(params["encoder"])


class TestPartsTravel:
    """States that hold parts of leaves and dense masks."""

    @pytest.fixture
    def setting(self):
        w = jax.random.normal(jax.random.key(0), (6, 2))
        params = {"rows": w, "dense": w + 1, "compact": w + 2, "frozen": w + 3}
        mask = np.asarray(w > 0)
        spec = fz.rules(
            {"rows": fz.rows(slice(0, 4)), "dense": mask, "compact": fz.elements(mask, compact=True), "frozen": True}
        )
        tx = fz.freeze(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), spec)
        grads = jax.tree.map(jnp.cos, params)
        return tx, params, grads, tx.update(grads, tx.init(params), params)[1]

    def same(self, setting, state):
        tx, params, grads, original = setting
        assert bits(tx.update(grads, state, params)) == bits(tx.update(grads, original, params))

    def test_flax_serialization(self, setting):
        tx, params, _, state = setting
        restored = flax.serialization.from_bytes(tx.init(params), flax.serialization.to_bytes(state))
        assert bits(restored) == bits(state)
        self.same(setting, restored)

    def test_orbax(self, setting, tmp_path):
        tx, params, _, state = setting
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "state", tx.init(params))
        assert bits(restored) == bits(state)
        self.same(setting, restored)

    def test_tree_map_params(self, setting):
        tx, _, _, state = setting
        mapped = optax.tree_map_params(tx, lambda leaf: leaf, state)
        assert bits(mapped) == bits(state)
        self.same(setting, mapped)
        names = optax.tree_map_params(tx, lambda leaf: "param", state, transform_non_params=lambda leaf: "other")
        assert names.masks["dense"] == "param"
        assert optax.tree.get(names, "count") == "other"

    def test_pickle_and_deepcopy(self, setting):
        for copied in (pickle.loads(pickle.dumps(setting[3])), copy.deepcopy(setting[3])):
            self.same(setting, copied)

    def test_scan_and_donation(self, setting):
        tx, params, grads, state = setting

        def body(carry, _):
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        run = jax.jit(lambda p, s: jax.lax.scan(body, (p, s), length=2)[0], donate_argnums=(0, 1))
        before = bits(params["frozen"])
        new, _ = run(jax.tree.map(jnp.copy, params), jax.tree.map(jnp.copy, state))
        assert bits(new["frozen"]) == before
        assert bits(new["rows"][:4]) == bits(params["rows"][:4])

    @pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.MultiSteps(tx, 2)], ids=["adamw", "multi"])
    def test_nnx_optimizer(self, wrap):
        model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1)))
        mask = np.arange(3).reshape(3, 1) == 1
        spec = fz.rules({"layers/0/kernel": fz.rows([0, 2]), "layers/1/kernel": mask, "layers/0/bias": True})
        optimizer = nnx.Optimizer(model, fz.freeze(wrap(optax.adamw(0.1)), spec), wrt=nnx.Param)
        before = [np.asarray(layer.kernel[...]) for layer in model.layers]

        @nnx.jit
        def step(model, optimizer):
            grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((2, 4))) ** 2))(model)
            optimizer.update(model, grads)

        for _ in range(4):
            step(model, optimizer)
        after = [np.asarray(layer.kernel[...]) for layer in model.layers]
        assert after[0][[0, 2]].tobytes() == before[0][[0, 2]].tobytes()
        assert (after[0][[1, 3]] != before[0][[1, 3]]).all()
        assert after[1][mask].tobytes() == before[1][mask].tobytes()
        assert (after[1][~mask] != before[1][~mask]).all()

    def test_equinox_loop(self):
        model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
        params, static = eqx.partition(model, eqx.is_inexact_array)
        tx = fz.freeze(optax.adamw(0.1), "layers/0")
        grads = eqx.filter_grad(lambda model: jnp.sum(jax.vmap(model)(jnp.ones((3, 2)))))(model)
        updates, _ = tx.update(grads, tx.init(params), params)
        new = eqx.combine(optax.apply_updates(params, updates), static)
        assert bits(new.layers[0].weight) == bits(model.layers[0].weight)
        assert bits(new.layers[1].weight) != bits(model.layers[1].weight)


@pytest.mark.parametrize(
    "frozen",
    [
        {"w": fz.rows([0]), "b": True},
        {"w": fz.elements(np.eye(3, 2, dtype=bool)), "b": True},
        {"w": fz.elements(np.eye(3, 2, dtype=bool), compact=True), "b": True},
    ],
    ids=["rows", "elements", "compact"],
)
def test_an_extra_argument_of_one_number_for_each_leaf(frozen):
    def update(updates, state, params=None, *, rates):
        return jax.tree.map(lambda u, rate: -rate * u, updates, rates), state

    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    tx = fz.freeze(optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update), frozen)
    updates, _ = tx.update(params, tx.init(params), params, rates={"w": 0.1, "b": 0.2})
    moved = (updates["w"] != 0).sum()
    assert set(np.unique(updates["w"])) == {np.float32(0), np.float32(-0.1)}
    assert 0 < moved < 6


@pytest.mark.parametrize("frozen", [{"w": True}, {"w": ~fz.rows([1, 2])}, {"w": ~fz.rows(jnp.array([1, 2]))}])
def test_gradients_of_single_examples_for_private_training(frozen):
    params, x = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}, jnp.arange(8.0).reshape(2, 4)
    frozen = {**frozen, "b": False}
    of_example = lambda params, x: jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))  # noqa: E731
    grads = jax.vmap(fz.grad(of_example, frozen), (None, 0))(params, x)
    trainable, _ = fz.partition(params, frozen)
    private = optax.contrib.differentially_private_aggregate(1.0, noise_multiplier=0.0, key=jax.random.key(0))
    tx = optax.chain(private, optax.sgd(0.1))
    updates, _ = tx.update(grads, tx.init(trainable), trainable)
    fz.assert_frozen(params, fz.apply_updates(params, updates, frozen), frozen)
    norms = jnp.sqrt(
        sum(jnp.sum(jnp.square(g.reshape(2, -1)), 1) for g in jax.tree.leaves(grads) if g.dtype == jnp.float32)
    )
    expected = jnp.mean(grads["b"] / jnp.maximum(1.0, norms)[:, None], 0)
    np.testing.assert_allclose(updates["b"], -0.1 * expected, rtol=1e-5)
