"""Frozen updates: zeros that keep bits, an optimizer of the trainable parameters alone, and a state that travels."""

import collections
import copy
import itertools
import pickle

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import orbax.checkpoint as ocp
import pytest
from conftest import bits
from flax import nnx

import optax_freeze as fz

OPTIMIZERS = optimizers.found()


def train(tx, params, grads, steps=2):
    """The parameters after some steps on constant gradients."""
    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("make", [fz.freeze, lambda tx, frozen, **tied: fz.freeze_when(tx, {frozen: True}, **tied)])
def test_awkward_leaves_keep_their_bits(awkward, make):
    """And those of numbers, if Optax adds the updates; each zero has the dtype and the sign that adds nothing."""
    tx = make(optax.adamw(0.1), "frozen", tied="ignore")

    @jax.jit
    def step(params, state):
        grads = {**jax.tree.map(lambda p: jnp.full(p.shape, jnp.nan), params), "trains": jnp.ones(2)}
        updates, state = tx.update(grads, state, params)
        new = fz.apply_updates(params, updates)
        del params["frozen"]["key"], updates["frozen"]["key"]
        return new, optax.apply_updates(params, updates), updates["frozen"]

    new, by_optax, zeros = step(awkward, tx.init(awkward))
    assert bits(new["frozen"]) == bits(awkward["frozen"])
    assert bits(new["trains"]) != bits(awkward["trains"])
    del awkward["frozen"]["key"]
    assert bits(by_optax["frozen"]) == bits(awkward["frozen"])
    assert (zeros["integer"].dtype, zeros["boolean"].dtype) == (jnp.int32, jnp.bool_)
    for name in ("negative_zero", "nan", "bfloat16", "float16", "float8", "scalar"):
        assert np.signbit(np.asarray(zeros[name]).astype(np.float32)).all()
    assert np.signbit(np.asarray(zeros["complex"]).view(np.float32)).all()
    assert not np.isnan(np.asarray(zeros["float8_without_negative_zero"]).astype(np.float32)).any()


class TestFreeze:
    @pytest.mark.parametrize("part", [False, fz.rows([0]), np.eye(2, dtype=bool), fz.rows(jnp.array([1]))])
    def test_one_array_at_two_paths_that_both_train(self, part):
        tied, pair = dict.fromkeys("ab", jnp.ones((2, 2))), {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
        make = lambda part, **tied: fz.freeze(optax.sgd(0.1), {"a": part, "b": part}, **tied)  # noqa: E731
        with pytest.warns(fz.FreezeWarning, match=r"both train: they will differ(.|\n)*at: a\n +b\n"):
            make(part).init(tied)
        for tx, params in ((make(part, tied="ignore"), tied), (make(True), tied), (make(part), pair)):
            tx.init(params)

    def test_what_keeps_a_tie(self):
        variable, keys = nnx.Param(jnp.ones(2)), jax.random.split(jax.random.key(0))
        layers = [eqx.nn.Linear(2, 2, key=key) for key in keys]
        for params in (
            nnx.state(nnx.Dict(a=nnx.Dict(w=variable), b=nnx.Dict(w=variable)), nnx.Param),
            eqx.nn.Shared(layers, lambda pair: pair[0].weight, lambda pair: pair[1].weight),
            dict.fromkeys("ab", jnp.ones(0)),
        ):
            fz.freeze(optax.sgd(0.1), False).init(params)

    @pytest.mark.parametrize("full_updates", [True, False])
    def test_gradients_and_updates_of_either_structure(self, params, frozen, full_updates):
        tx = fz.freeze(optax.sgd(0.1), frozen, full_updates=full_updates)
        trainable, _ = fz.partition(params, frozen)
        for grads, its in itertools.product((params, trainable), (params, None)):
            updates, _ = tx.update(grads, tx.init(params), its)
            assert jax.tree.structure(updates) == jax.tree.structure(params if full_updates else trainable)
            new = (optax if full_updates else fz).apply_updates(params, updates)
            assert bits(new["encoder"]) == bits(params["encoder"])
            assert bits(new["head"]) == bits(jax.tree.map(lambda p: p - 0.1 * p, params["head"]))

    def test_whatever_the_dtype_of_the_gradient(self):
        numbers = jnp.array([2**30 + 1], jnp.int32), jnp.array([complex(-0.0, -0.0)]), jnp.array([-0.0], jnp.bfloat16)
        params = {**dict(zip("nch", numbers, strict=True)), "w": jnp.ones(1)}
        tx = fz.freeze(optax.sgd(0.1), fz.all_except("w"))
        grads = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), params)
        for with_params in (params, None):
            updates, _ = tx.update(grads, tx.init(params), with_params)
            new = optax.apply_updates(params, updates)
            assert bits({**new, "w": 0}) == bits({**params, "w": 0})
        wide = {"n": np.arange(2), "w": jnp.ones(1)}  # 64 bits, which JAX does not have
        assert tx.update(wide, tx.init(wide), wide)[0]["n"].dtype == jnp.int32


class TestWrongArguments:
    def test_gradients_in_other_containers(self):
        tx = fz.freeze(optax.sgd(1.0), "0")
        with pytest.raises(ValueError, match="the same paths in different containers"):
            tx.update((jnp.ones(1), jnp.ones(1)), tx.init([jnp.ones(1), jnp.ones(1)]))
        ordered = collections.OrderedDict(b=jnp.ones(1), a=jnp.ones(1))
        tx = fz.freeze(optax.sgd(1.0), "a")
        with pytest.raises(ValueError, match="the same paths in a different order"):
            tx.update(dict(ordered), tx.init(ordered))

    @pytest.mark.parametrize("other", ["b", False, {"a": fz.rows(0), "b": False}, {"a": np.eye(3, 2) == 1, "b": True}])
    def test_the_state_of_another_spec(self, other):
        params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
        state, update = (fz.freeze(optax.adam(0.1), "a").init(params), fz.masked_zero_updates(other).update)
        copied = pickle.loads(pickle.dumps(state))
        for call, its, given in ((update, state, params), (update, copied, None), (jax.jit(update), copied, params)):
            with pytest.raises(ValueError, match=r"created with a different spec(.|\n)*at: a(.|\n)*fz.migrate"):
                call(params, its, given)

    def test_the_gradient_of_the_trainable_part_tells_nothing_of_the_spec(self, params, loss, batch):
        """It has ``MaskedNode`` at what another spec freezes, which this one does not."""
        spec = fz.rules({"encoder/layer_0/kernel": fz.rows([0]), "encoder": True})
        tx = fz.freeze(optax.sgd(0.1), spec)
        grads = fz.grad(loss, spec)(params, batch)
        state = pickle.loads(pickle.dumps(tx.init(params)))
        assert bits(tx.update(grads, state)[0]) == bits(tx.update(grads, tx.init(params))[0])
        with pytest.raises(ValueError, match="the state was created with a different spec"):
            fz.freeze(optax.sgd(0.1), "encoder").update(grads, tx.init(params))

    @pytest.mark.parametrize(
        "same", ["a/**", ["a"], fz.all_except("b"), {"a": True, "b": False}, lambda p: {"a": True, "b": False}]
    )
    def test_the_state_of_the_same_spec_in_other_words(self, same):
        params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
        state = fz.freeze(optax.adam(0.1), "a").init(params)
        copied = pickle.loads(pickle.dumps(state))
        updates = [fz.freeze(optax.adam(0.1), same).update(params, s, params)[0] for s in (state, copied)]
        assert bits(updates[0]) == bits(updates[1])
        assert (updates[0]["a"] == 0).all()


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

    def test_functions_of_the_parameters_are_restricted(self, params, loss, batch, frozen):
        grad = lambda params, _=None: jax.grad(loss)(params, batch)  # noqa: E731
        sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), sync_period=2, opaque_mode=True)
        tx = fz.freeze(sam, frozen)
        updates, _ = tx.update(grad(params), tx.init(params), params, grad_fn=grad)
        moved = jax.tree.map(lambda u: bool(u.any()), updates)
        assert jax.tree.leaves(moved) == [False] * 4 + [True] * 2

    @pytest.mark.parametrize("compact", [None, False, True], ids=["rows", "elements", "compact"])
    def test_one_number_for_each_leaf(self, compact):
        def update(updates, state, params=None, *, rates):
            return jax.tree.map(lambda u, rate: -rate * u, updates, rates), state

        params, mask = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, np.eye(3, 2, dtype=bool)
        frozen = {"w": fz.rows(0) if compact is None else fz.elements(mask, compact=compact), "b": True}
        tx = fz.freeze(optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update), frozen)
        updates, _ = tx.update(params, tx.init(params), params, rates={"w": 0.1, "b": 0.2})
        assert sorted(updates["w"].ravel().tolist()) == pytest.approx([-0.1] * 4 + [0] * 2)

    def test_a_scalar_beside_a_lone_frozen_leaf(self):
        tx = fz.freeze(optax.contrib.reduce_on_plateau(), True)
        updates, _ = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), value=jnp.float32(1))
        assert bits(updates) == bits(jnp.full(2, -0.0))


SOME = np.arange(12).reshape(6, 2) % 3 == 0
PARTS = fz.rules(
    {"rows": fz.rows(slice(0, 4)), "dense": SOME, "compact": fz.elements(SOME, compact=True), "frozen": True}
)


class TestTheStateTravels:
    """A state that holds parts of leaves and dense masks."""

    tx = optax.chain(optax.clip(9.0), fz.freeze(optax.MultiSteps(optax.adamw(0.1), 2), PARTS))

    params = {name: jnp.arange(12.0).reshape(6, 2) for name in ("rows", "dense", "compact", "frozen")}  # noqa: RUF012

    def test_into_copies_and_files(self, tmp_path):
        tx, params, update = self.tx, self.params, jax.jit(self.tx.update)
        grads = jax.tree.map(jnp.cos, params)
        like = tx.init(params)
        _, state = update(grads, like, params)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            by_orbax = checkpointer.restore(tmp_path / "state", like)
        by_flax = flax.serialization.from_bytes(like, flax.serialization.to_bytes(state))
        mapped = optax.tree_map_params(tx, lambda leaf: leaf, state)
        expected = update(grads, state, params)
        for copied in (by_orbax, by_flax, pickle.loads(pickle.dumps(state)), copy.deepcopy(state), mapped):
            assert bits(copied) == bits(state)
            assert bits(update(grads, copied, params)) == bits(expected)
            assert jax.tree.structure(copied) == jax.tree.structure(state)
        names = optax.tree_map_params(tx, lambda _: "param", state, transform_non_params=lambda _: "other")
        assert optax.tree.get(names, "masks")["dense"] == "param"
        assert jax.tree.leaves(optax.tree.get(names, "mu")) == ["param"] * 3
        assert optax.tree.get(names, "count") == "other"
        assert bits(fz.partition(params, fz.spec_of(mapped))[0]) == bits(fz.partition(params, PARTS)[0])

    @pytest.mark.parametrize(
        "make",
        [
            lambda spec: fz.freeze(optax.adam(0.1), fz.rules(spec)),
            lambda spec: fz.freeze(optax.adam(0.1), lambda params: {**dict.fromkeys(params, False), **spec}),
            lambda spec: fz.freeze_when(optax.adam(0.1), {name: (mask, True) for name, mask in spec.items()}),
        ],
    )
    def test_equal_plans_are_those_of_one_spec(self, make):
        """`jax.jit` returns the plan of the first state that it was called with for all that are equal."""
        txs = [make({"dense": np.eye(6, 2, shift, dtype=bool), "rows": fz.rows([shift])}) for shift in (0, 1)]
        states = [tx.init(self.params) for tx in txs]
        mapped = [optax.tree_map_params(tx, jnp.zeros_like, state) for tx, state in zip(txs, states, strict=True)]
        of_nothing = fz.freeze(optax.adam(0.1), False).init({})
        plans = [state.plan for state in (*states, of_nothing, *mapped)]
        assert [[a == b for b in plans] for a in plans] == [[i % 3 == j % 3 for j in range(5)] for i in range(5)]
        same = jax.jit(lambda state: state)
        assert all(same(state).plan == state.plan for state in (*mapped, *states, of_nothing))

    def test_by_flax_with_labels_by_leaf(self):
        """A `Part` in the state holds a `MaskedNode`."""
        by_rank = lambda p: jax.tree.map(lambda leaf: f"rank {leaf.ndim}", p)  # noqa: E731
        inner = optax.multi_transform({"rank 1": optax.adam(0.1), "rank 2": optax.sgd(0.1, 0.9)}, by_rank)
        state = fz.freeze(inner, PARTS).init(self.params)
        assert bits(flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))) == bits(state)


@pytest.mark.parametrize("make", [lambda tx: fz.freeze(tx, "frozen"), lambda tx: fz.freeze_when(tx, {"w": False})])
@pytest.mark.parametrize("transform", [lambda init: init, jax.jit], ids=["eager", "jitted"])
def test_parameters_and_state_can_be_donated(make, transform):
    """No buffer is twice in them, though some optimizers return the parameters in their state."""
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(3), "frozen": jnp.ones(2)}
    names = OPTIMIZERS if transform is not jax.jit else ["contrib.prodigy", "contrib.cocob"]
    for name in names:
        state = transform(make(OPTIMIZERS[name].make()).init)(params)
        arrays = [leaf for leaf in jax.tree.leaves((params, state)) if isinstance(leaf, jax.Array) and leaf.size]
        arrays = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in arrays]
        pointers = [array.unsafe_buffer_pointer() for array in arrays]
        assert len(set(pointers)) == len(pointers), name
