"""Situations that go wrong with other tools, as their docstrings say: here each gives the right result or an error.

Others are tested with the function that they concern.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from conftest import bits
from flax.training.train_state import TrainState

import optax_freeze as fz

ONES = {"a": jnp.ones(1), "b": jnp.ones(1)}


def step(tx, params, grads):
    updates, state = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates), state


def test_01_weight_decay_reaches_a_frozen_leaf():
    """`chain(optax.freeze(m), adamw)` decays the frozen leaf: the order matters, silently."""
    adamw = optax.adamw(0.5, weight_decay=0.1)
    for tx in (
        optax.chain(optax.clip(1.0), fz.freeze(adamw, "a")),
        fz.freeze(optax.chain(optax.clip(1.0), adamw), "a"),
        optax.chain(adamw, fz.masked_zero_updates("a")),
    ):
        new, _ = step(tx, ONES, ONES)
        assert bits(new["a"]) == bits(ONES["a"])
        assert bits(new["b"]) != bits(ONES["b"])


def test_06_a_traced_mask():
    """A traced mask under jit is a TracerBoolConversionError."""
    params = {"w": jnp.ones(3)}

    @jax.jit
    def f(mask):
        return step(fz.freeze(optax.adam(0.5), {"w": mask}), params, params)[0]

    new = f(np.array([True, False, True]))
    assert bits(new["w"][::2]) == bits(jnp.ones(2))
    assert new["w"][1] != 1
    f(np.array([False, False, True]))
    assert f._cache_size() == 1


@pytest.mark.parametrize("frozen", [np.nan, 1e3])
def test_07_and_08_a_frozen_gradient_reaches_the_norm(frozen):
    """With `clip_by_global_norm` outside the partition, a frozen NaN spoils every leaf, 1e3 takes all of the norm."""
    clip, sgd, grads = optax.clip_by_global_norm(1.0), optax.sgd(1.0), {"a": jnp.array([frozen]), "b": jnp.array([1.0])}
    outside = optax.chain(clip, fz.freeze(sgd, "a"))
    for tx, its in (
        (fz.freeze(optax.chain(clip, sgd), "a"), grads),
        (outside, fz.partition(grads, "a")[0]),
        (optax.chain(fz.masked_zero_updates("a"), outside), grads),
    ):
        assert bits(step(tx, ONES, its)[0]) == bits({"a": jnp.ones(1), "b": jnp.zeros(1)})


def test_09_a_finite_check_rejects_the_step_for_a_frozen_nan():
    """`apply_if_finite(partition(...))` rejects the whole step for a NaN in a frozen gradient."""
    sgd, grads = optax.sgd(1.0), {"a": jnp.array([jnp.nan]), "b": jnp.array([0.5])}
    for tx, its in (
        (fz.freeze(optax.apply_if_finite(sgd, 3), "a"), grads),
        (optax.apply_if_finite(fz.freeze(sgd, "a", full_updates=False), 3), fz.partition(grads, "a")[0]),
    ):
        updates, _ = tx.update(its, tx.init(ONES), ONES)
        assert bits(fz.apply_updates(ONES, updates)) == bits({"a": jnp.ones(1), "b": jnp.array([0.5])})


@pytest.mark.parametrize("mask", [np.array([True, False]), fz.rows(0)], ids=["elements", "rows"])
def test_15_a_nan_times_zero_is_nan(mask):
    """`u * (1 - mask)` with a NaN in `u` is NaN."""
    for bad in (np.nan, np.inf):
        grad = jax.grad(lambda w, bad=bad: jnp.sum(fz.stop_gradient(w, mask) * jnp.array([bad, 0.5])))
        assert bits(grad(jnp.array([-0.0, 1.0]))) == bits(jnp.array([0.0, 0.5]))


def test_16_a_label_that_depends_on_the_dtype():
    """`partition(label_fn)` calls it again on the updates, inside `update`."""
    params = {"a": jnp.ones(1, jnp.bfloat16), "b": jnp.ones(1)}
    tx = fz.freeze(optax.sgd(0.5), fz.where(lambda path, leaf: leaf.dtype == jnp.bfloat16))
    new, _ = jax.jit(lambda grads: step(tx, params, grads))({"a": jnp.ones(1), "b": jnp.ones(1)})
    assert bits(new) == bits({"a": params["a"], "b": jnp.array([0.5])})


def test_20_an_integer_leaf_with_a_float0_gradient():
    """A frozen integer leaf with its float0 gradient: `Called add with a float0 array`."""
    params = {"table": jnp.array([2**30 + 1], jnp.int32), "mask": jnp.array([True]), "w": jnp.ones(1)}
    grads = jax.grad(lambda p: (p["w"] * p["table"]).sum(), allow_int=True)(params)
    assert grads["table"].dtype == jax.dtypes.float0
    for tx in (fz.freeze(optax.adamw(0.1), False), fz.masked_zero_updates(False)):
        new, _ = jax.jit(lambda p, tx=tx: step(tx, p, grads))(params)
        assert bits({**new, "w": 0}) == bits({**params, "w": 0})
        assert bits(new["w"]) != bits(params["w"])
    assert bits({**fz.apply_updates(params, grads), "w": 0}) == bits({**params, "w": 0})


def test_22_restoring_a_state_after_the_mask_changed(tmp_path):
    """Orbax puts None in the place of the missing moments, without an error; Flax fails on the structure."""
    narrow, wide = fz.freeze(optax.adam(0.1), "a"), fz.freeze(optax.adam(0.1), False)
    params, state = step(narrow, ONES, ONES)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored, wrong = (checkpointer.restore(tmp_path / "state", tx.init(ONES)) for tx in (narrow, wide))
    assert bits(fz.migrate(restored, wide, params)) == bits(fz.migrate(state, wide, params))
    assert optax.tree.get(wrong, "mu")["a"] is None
    with pytest.raises(ValueError, match=r"belongs to other parameters or(.|\n)*at: 0/mu/a"):
        fz.migrate(wrong, wide, params)


def test_23_a_transformation_after_the_freeze_moves_frozen_leaves():
    """`add_noise` or `keep_params_nonnegative` after the freeze move frozen leaves."""
    params = {"a": jnp.array([-1.0]), "b": jnp.array([-1.0])}
    after = (optax.add_noise(1.0, 0.5, key=0), optax.keep_params_nonnegative())
    for tx in (
        fz.freeze(optax.chain(optax.sgd(0.1), *after), "a"),
        optax.chain(fz.freeze(optax.sgd(0.1), "a"), *after, fz.masked_zero_updates("a")),
    ):
        assert bits(step(tx, params, params)[0]["a"]) == bits(params["a"])


TWO_LAYERS = {"encoder": jnp.ones((3, 2)), "head": jnp.ones((2, 2))}


class TestErrorsOfOthers:
    """Errors of other libraries, as `docs/errors.md` lists them: each occurs as it says, and the fix removes it."""

    @staticmethod
    def loss(params):
        return jnp.sum(jnp.tanh(params["encoder"] @ params["head"]) ** 2)

    @pytest.mark.parametrize(
        ("tx", "spec"),
        [(optax.adam(0.1), "encoder"), (optax.MultiSteps(optax.adam(0.1), 2), fz.rules({"encoder": fz.rows(0)}))],
        ids=["leaf", "rows"],
    )
    def test_gradients_with_masked_nodes_for_a_state_of_the_full_parameters(self, tx, spec):
        grads = fz.grad(self.loss, spec)(TWO_LAYERS)
        with pytest.raises(ValueError, match=r"(?s)different types at key path.*(MaskedNode|Part)"):
            tx.update(grads, tx.init(TWO_LAYERS), TWO_LAYERS)
        with pytest.raises(ValueError, match=r"(?s)different types at key path.*(MaskedNode|Part)"):
            jax.tree.map(jnp.add, grads, TWO_LAYERS)
        trainable, _ = fz.partition(TWO_LAYERS, spec)
        tx.update(grads, tx.init(trainable), trainable)
        frozen = fz.freeze(tx, spec)
        frozen.update(grads, frozen.init(TWO_LAYERS), TWO_LAYERS)

    @pytest.mark.parametrize("spec", ["encoder", fz.rules({"encoder": fz.rows(0)})], ids=["leaf", "rows"])
    def test_updates_of_the_trainable_part_added_by_others(self, spec):
        tx = fz.freeze(optax.adam(0.1), spec, full_updates=False)
        updates, _ = tx.update(TWO_LAYERS, tx.init(TWO_LAYERS), TWO_LAYERS)
        says = r"unsupported operand type\(s\) for \+: '[\w.]*ArrayImpl' and 'MaskedNode'|a Part cannot be added"
        with pytest.raises(TypeError, match=says):
            optax.apply_updates(TWO_LAYERS, updates)
        with pytest.raises(TypeError, match=says):
            TrainState.create(apply_fn=None, params=TWO_LAYERS, tx=tx).apply_gradients(grads=TWO_LAYERS)
        fz.apply_updates(TWO_LAYERS, updates)

    def test_the_loss_of_the_trainable_part(self):
        trainable, rest = fz.partition(TWO_LAYERS, "encoder")
        with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for @: 'MaskedNode'"):
            self.loss(trainable)
        fz.restrict(self.loss, rest)(trainable)
