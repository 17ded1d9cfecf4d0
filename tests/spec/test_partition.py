"""Splitting, combining and updating parameters."""

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import bits

import optax_freeze as fz

MASKED_NODE = optax.MaskedNode()


class TestPartition:
    def test_two_parts(self, params, frozen):
        trainable, rest = fz.partition(params, frozen)
        assert bits(trainable) == bits({"head": params["head"]})
        assert bits(rest) == bits({"encoder": params["encoder"]})
        assert trainable["encoder"]["layer_0"]["kernel"] == rest["head"]["bias"] == MASKED_NODE
        again, nothing = fz.partition(trainable, frozen)
        assert bits(again) == bits(trainable)
        assert jax.tree.leaves(nothing) == []

    def test_awkward_leaves_are_in_the_rest(self, awkward):
        trainable, rest = fz.partition(awkward, False)
        assert isinstance(trainable["frozen"]["float8"], jax.Array)
        assert isinstance(trainable["frozen"]["complex"], jax.Array)
        for name in ("integer", "boolean", "key"):
            assert trainable["frozen"][name] == MASKED_NODE
            assert rest["frozen"][name] is awkward["frozen"][name]


class TestCombine:
    def test_is_the_inverse(self, awkward, odd_bits):
        for tree in (awkward, odd_bits):
            for spec in ("frozen", False, True, fz.all_except("frozen")):
                whole = fz.combine(*fz.partition(tree, spec, tied="ignore"))
                assert jax.tree.structure(whole) == jax.tree.structure(tree)
                assert bits(whole) == bits(tree)

    def test_another_structure(self, params, frozen):
        trainable, rest = fz.partition(params, frozen)
        with pytest.raises(ValueError, match=r"`trainable` and `rest` have a leaf at the same path\n  at: head/bias"):
            fz.combine(trainable, params)
        del rest["head"]["bias"]
        with pytest.raises(ValueError, match=r"different tree structure(.|\n)*at: head/bias"):
            fz.combine(trainable, rest)

    def test_a_masked_node_in_both_stays(self):
        assert fz.combine({"a": MASKED_NODE, "b": 1.0}, {"a": MASKED_NODE, "b": MASKED_NODE}) == {
            "a": MASKED_NODE,
            "b": 1.0,
        }


class TestStopGradient:
    def test_keeps_bits_and_objects(self, awkward):
        tree = {**awkward, "function": jnp.tanh}
        assert bits(fz.stop_gradient(tree, True)) == bits(tree)


class TestApplyUpdates:
    def test_as_optax_where_it_trains(self, params):
        params["head"] = optax.tree.cast(params["head"], jnp.bfloat16)
        updates = jax.tree.map(lambda p: jnp.float32(p) * 0.1 + 0.3, params)
        assert bits(jax.jit(fz.apply_updates)(params, updates)) == bits(jax.jit(optax.apply_updates)(params, updates))

    def test_every_bit_pattern_is_kept(self, awkward, odd_bits, compiled):
        for tree in (awkward, odd_bits):
            wild = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan), tree)
            new = compiled(lambda p, u: fz.apply_updates(p, u, "frozen"))(tree, {**wild, "trains": jnp.ones(2)})
            assert bits(new["frozen"]) == bits(tree["frozen"])
            assert new["trains"].tolist() == [2.0, 2.0]

    def test_masked_nodes_give_the_leaf_back(self, params, frozen):
        trainable, _ = fz.partition(params, frozen)
        new = jax.jit(fz.apply_updates)(params, trainable)
        assert bits(new["encoder"]) == bits(params["encoder"])
        assert bits(new["head"]) == bits(jax.tree.map(lambda p: p + p, params["head"]))
        assert bits(fz.apply_updates(trainable, trainable)["head"]) == bits(new["head"])

    def test_an_update_of_another_leaf_is_refused(self):
        masked, whole = optax.MaskedNode(), jnp.ones((3, 2))
        rows, other = (fz.partition(whole, fz.rows([i]))[0] for i in (0, 1))
        for leaf, update in [(masked, rows), (masked, whole), (rows, whole), (rows, other), (whole, jnp.ones((1, 2)))]:
            with pytest.raises(ValueError, match=r"updates: an update does not fit its parameter\n  at: w\n"):
                fz.apply_updates({"w": leaf}, {"w": update})


def test_zeros_of_python_numbers_keep_their_bits():
    params = {"w": complex(1, -0.0), "b": -0.0}
    updates, _ = fz.masked_zero_updates(True).update(params, fz.masked_zero_updates(True).init(params))
    assert {name: repr(params[name] + updates[name]) for name in params} == {"w": "(1-0j)", "b": "-0.0"}
