"""Python floats and complex numbers among the parameters: each function takes them for the arrays that JAX makes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_freeze as fz
import optax_freeze.nnx as fnnx
from optax_freeze import checkpoint

FROZEN = ["bias", "body"]


def parameters(number):
    return {"scale": number, "bias": 2 * number, "body": jnp.ones(2), "head": jnp.ones(2)}


def loss(params, x):
    h = params["scale"] * (jnp.tanh(x * params["body"]) + params["bias"]) * params["head"]
    return jnp.sum(jnp.abs(h - 2) ** 2)


X = jnp.ones((3, 2))


def train(tx, spec_of=lambda state: FROZEN):
    def trained(params):
        state = tx.init(params)
        for _ in range(2):
            grads = fz.grad(loss, spec_of(state))(params, X)
            updates, state = tx.update(grads, state, params)
            params = fz.apply_updates(params, updates)
        return params, state

    return trained


def train_in_one_call(tx):
    def trained(params):
        state = tx.init(params)
        for _ in range(2):
            params, state, _ = fz.train_step(loss, tx)(params, state, X)
        return params, state

    return trained


def with_precompute(params):
    once = fz.precompute(loss, FROZEN)
    features = once.before(params, X)
    return fz.value_and_grad(once.after, FROZEN)(once.needed(params, X), features, X)


def moved(params):
    trainable, rest = fz.partition(params, FROZEN)
    return jax.grad(fz.restrict(loss, rest))(trainable, X), fz.combine(trainable, rest)


MASK = fz.rules({"scale": fz.elements(np.array(False)), "**": False})
COMPACT = fz.rules({"scale": fz.elements(np.array(False), compact=True), "**": False})
GROUPS = {"scale": fz.unfreeze_at(1), "bias": fz.alternate(1)}
FUNCTIONS = {
    "resolve": lambda params: fz.resolve(params, FROZEN),
    "partition": lambda params: fz.partition(params, FROZEN),
    "restrict, combine": moved,
    "value_and_grad": lambda params: fz.value_and_grad(loss, FROZEN)(params, X),
    "stop_gradient": lambda params: jax.grad(lambda p: loss(fz.stop_gradient(p, FROZEN), X))(params),
    "freeze": train(fz.freeze(optax.adam(0.1), FROZEN)),
    "freeze, MaskedNode": train(fz.freeze(optax.adam(0.1), FROZEN, full_updates=False)),
    "freeze around what takes arrays": train(fz.freeze(optax.contrib.schedule_free_sgd(0.1), FROZEN)),
    "a mask": train(fz.freeze(optax.sgd(0.1), MASK), lambda state: MASK),
    "a compact mask": train(fz.freeze(optax.sgd(0.1), COMPACT), lambda state: COMPACT),
    "partition by a mask": lambda params: fz.combine(*fz.partition(params, MASK)),
    "masked_zero_updates": train(optax.chain(optax.sgd(0.1), fz.masked_zero_updates(FROZEN)), lambda state: False),
    "labels": train(optax.multi_transform({"trainable": optax.sgd(0.1), "frozen": optax.sgd(0)}, fz.labels(FROZEN))),
    "freeze_when": train(fz.freeze_when(optax.adam(0.1), GROUPS), fz.spec_of),
    "freeze_when of elements": train(
        fz.freeze_when(optax.sgd(0.1), {"scale": (fz.elements(np.array(True)), fz.unfreeze_at(1))}), fz.spec_of
    ),
    "freeze_when, coupled": train(
        fz.freeze_when(optax.sgd(0.1), {"scale": True}, optax.clip_by_global_norm(0.1)), fz.spec_of
    ),
    "freeze_converged": train(fz.freeze_when(optax.sgd(0.1), fz.freeze_converged(["scale", "bias"], 1)), fz.spec_of),
    "train_step": train_in_one_call(fz.freeze(optax.adam(0.1), FROZEN)),
    "train_step of groups": train_in_one_call(fz.freeze_when(optax.adam(0.1), GROUPS)),
    "precompute": with_precompute,
    "fingerprint": lambda params: fz.fingerprint(params, FROZEN),
    "offload": lambda params: fz.offload(params, FROZEN),
}


def everything(params):
    return {name: function(params) for name, function in FUNCTIONS.items()}


@functools.cache
def expected_of(number):
    return jax.jit(everything)(jax.tree.map(jnp.asarray, parameters(number)))


@pytest.mark.parametrize(
    ("number", "compiled"),
    [(0.1, jax.jit), (1 - 0.5j, jax.jit), (np.float32(0.1), jax.jit), (0.1, lambda fn: fn)],
    ids=["float", "complex", "NumPy", "eager-float"],
)
def test_each_function_treats_a_number_as_an_array(number, compiled):
    got, expected = compiled(everything)(parameters(number)), expected_of(number)
    for name in FUNCTIONS:
        assert jax.tree.structure(got[name]) == jax.tree.structure(expected[name]), name
        chex.assert_trees_all_close(got[name], expected[name], rtol=1e-5)
    assert not got["resolve"]["scale"]
    assert got["freeze"][0]["scale"] != number


@pytest.mark.parametrize("tx", ["freeze", "freeze_when"])
def test_gradients_may_be_numbers(tx):
    params, mask = {"a": 1.0, "b": 1.0}, fz.elements(np.array(False))
    tx = {
        "freeze": optax.chain(fz.masked_zero_updates({"a": mask, "b": False}), fz.freeze(optax.sgd(0.5), "b")),
        "freeze_when": fz.freeze_when(optax.sgd(0.5), {"a": (~mask, False), "b": True}, optax.clip(10)),
    }[tx]
    updates, _ = tx.update(params, tx.init(params), params)
    assert fz.apply_updates(params, updates) == {"a": 0.5, "b": 1.0}


def test_numbers_that_a_jitted_step_closes_over():
    params, tx = parameters(0.1), fz.freeze_when(optax.adam(0.1), GROUPS)
    step, state = fz.train_step(loss, tx), tx.init(params)
    closed_over, given = jax.jit(lambda state: step(params, state, X))(state), jax.jit(step)(params, state, X)
    chex.assert_trees_all_close(closed_over, given, rtol=1e-5)


def test_a_number_comes_back_as_it_was():
    params = parameters(0.1)
    whole = fz.combine(*fz.partition(params, "bias"))
    assert whole["scale"] is params["scale"]
    assert whole["bias"] is params["bias"]
    assert fz.stop_gradient(params, FROZEN)["bias"] is params["bias"]
    new, _ = train(fz.freeze(optax.sgd(0.1), FROZEN))(params)
    assert new["bias"] is params["bias"]


def test_which_numbers_train():
    numbers = {"a": 1, "b": True, "c": np.int32(1), "d": 1.0, "e": 1j, "f": np.float64(1)}
    answers = fz.resolve(numbers, False)
    assert answers == {"a": True, "b": True, "c": True, "d": False, "e": False, "f": False}
    with pytest.raises(ValueError, match=r"the leaf has no such axis\n  at: d"):
        fz.resolve(numbers, fz.rules({"d": fz.rows(0)}))
    trainable, rest = fz.partition(dict.fromkeys("ab", 0.1), "a")  # equal numbers are not tied
    assert (trainable["b"], rest["a"]) == (0.1, 0.1)


@pytest.mark.parametrize("update", [0.0, -0.0])
def test_a_number_is_added_to_as_an_array(update):
    for new in (fz.apply_updates({"a": -0.0}, {"a": update}), jax.jit(fz.apply_updates)({"a": -0.0}, {"a": update})):
        assert np.signbit(new["a"]) == np.signbit(-0.0 + update)


def test_the_dtype_of_a_number_follows_the_64_bit_mode():
    seen = []
    for is_wide in (False, True):
        with jax.enable_x64(is_wide):
            fz.resolve({"a": 1.0, "b": 1j}, fz.where(lambda path, leaf: bool(seen.append(str(leaf.dtype)))))
    assert seen == ["float32", "complex64", "float64", "complex128"]


def test_the_summary_counts_numbers():
    params = parameters(0.1)
    got = fz.summary(params, FROZEN, optax.adam(0.1))
    expected = fz.summary(jax.tree.map(jnp.asarray, params), FROZEN, optax.adam(0.1))
    assert got == expected
    assert "scale  ()     float32         1    4 B  trains" in str(got)


def test_the_bits_of_frozen_numbers_are_compared():
    params = parameters(0.1)
    returned = jax.jit(lambda params: params)(params)
    fz.assert_frozen(params, returned, FROZEN)
    fz.assert_frozen(returned, params, FROZEN)
    assert (fz.fingerprint(params, FROZEN) == fz.fingerprint(returned, FROZEN)).all()
    with pytest.raises(AssertionError, match=r"at: bias: 1 of 1 elements, by up to 1.49e-08"):
        fz.assert_frozen(params, {**params, "bias": float(np.nextafter(np.float32(0.2), np.float32(1)))}, FROZEN)


def test_an_audit_follows_numbers():
    params = parameters(0.1)
    fz.audit(params, FROZEN, fz.freeze(optax.adamw(0.1), FROZEN)).raise_for_leaks()
    leaks = fz.audit(params, FROZEN, optax.sgd(0.1)).leaks
    assert {leak.path for leak in leaks} == {*FROZEN}


def test_numbers_in_nnx_variables():
    """``nnx.grad`` differentiates them."""

    class Model(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(1.0), nnx.Param(1.0)

    model = Model()
    optimizer = nnx.Optimizer(model, fz.freeze(optax.sgd(0.5), "b"), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda model: model.a[...] * model.b[...])(model))
    assert jax.tree.leaves(nnx.state(model)) == [0.5, 1.0]
    fnnx.freeze(model, "b")
    assert [type(variable) for variable in (model.a, model.b)] == [nnx.Param, fnnx.FrozenParam]


@pytest.mark.parametrize("number", [0.1, 1 - 0.5j])
def test_a_checkpoint_holds_numbers(number, tmp_path):
    params, tx = parameters(number), fz.freeze(optax.adam(0.1), FROZEN)
    checkpoint.save(tmp_path, params, FROZEN, step=0, opt_state=tx.init(params))
    new, state = train(tx)(params)
    checkpoint.save(tmp_path, new, FROZEN, step=1, opt_state=state)
    for step, saved in enumerate((params, new)):
        base = {**params, "scale": 50 * number}
        restored, _ = checkpoint.restore(tmp_path, base, step=step, opt_state=tx.init(base))
        assert restored["bias"] is params["bias"]
        assert jnp.asarray(restored["scale"]).tobytes() == jnp.asarray(saved["scale"]).tobytes()
