"""What users bring into ``fz.freeze``: functions of paths, transformations of this library, several in a chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_equal_up_to_rounding, bits
from flax import nnx
from flax.training.train_state import TrainState

import optax_freeze as fz

ODD = np.arange(12).reshape(4, 3) % 2 == 1
SPECS = {
    "leaf": {"fc": {"kernel": True, "bias": False}, "head": False},
    "rows": {"fc": {"kernel": fz.rows([0, 2], axis=1), "bias": fz.rows([1])}, "head": False},
    "compact": {"fc": {"kernel": fz.elements(ODD, compact=True), "bias": False}, "head": False},
    "dense": {"fc": {"kernel": fz.elements(ODD), "bias": False}, "head": False},
    "dynamic": {"fc": {"kernel": ~fz.rows(jnp.array([0, 3])), "bias": ~fz.rows(jnp.array([2]))}, "head": False},
}


@pytest.fixture
def params():
    return {"fc": {"kernel": jnp.arange(12.0).reshape(4, 3), "bias": jnp.arange(1.0, 4.0)}, "head": jnp.ones((3, 2))}


def not_bias(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "bias", params)


def dimensions(params):
    of_leaf = lambda path, x: optax.contrib.MuonDimensionNumbers() if path[-1].key == "kernel" and x.ndim == 2 else None  # noqa: E731
    return jax.tree_util.tree_map_with_path(of_leaf, params)


BY_PATH = {
    "decay mask": lambda: optax.adamw(0.1, weight_decay=0.5, mask=not_bias),
    "masked": lambda: optax.chain(optax.adam(0.1), optax.masked(optax.scale(3.0), not_bias)),
    "labels": lambda: optax.multi_transform(
        {"slow": optax.sgd(0.01), "fast": optax.adam(1.0)},
        fz.labels_by_path({"**/bias": "slow", "fc": "fast"}, default="slow"),
    ),
    "dimensions": lambda: optax.contrib.muon(0.1, muon_weight_dimension_numbers=dimensions),
}


class TestFunctionsOfPaths:
    @pytest.mark.parametrize("kind", SPECS)
    @pytest.mark.parametrize("name", BY_PATH)
    def test_see_the_paths_of_the_parameters(self, params, name, kind):
        spec, grads = SPECS[kind], jax.tree.map(lambda x: 1 + x / 7, params)
        trainable, rest = fz.partition(params, spec, as_arrays=True)
        by_hand, tx = BY_PATH[name](), fz.freeze(BY_PATH[name](), spec)
        expected, _ = by_hand.update(fz.partition(grads, spec, as_arrays=True)[0], by_hand.init(trainable), trainable)
        updates, state = tx.update(grads, tx.init(params), params)
        got = fz.partition(updates, spec, as_arrays=True)[0]
        assert bits(jax.tree.map(lambda x: x + 0.0, got)) == bits(jax.tree.map(lambda x: x + 0.0, expected))
        inner = state.inner_state.inner_states["trainable"].inner_state
        assert jax.tree.structure(inner) == jax.tree.structure(by_hand.init(trainable))
        assert jax.tree.map(jnp.shape, fz.combine(expected, rest)) == jax.tree.map(jnp.shape, params)

    @pytest.mark.parametrize(
        "mask", [fz.rows([1]), fz.rows(slice(1, None)), fz.elements(np.eye(3, dtype=bool)[0], compact=True)]
    )
    def test_in_groups(self, params, mask):
        """A group, and the leaves in no group, which have other elements of the leaf."""
        tx = fz.freeze_when(BY_PATH["decay mask"](), {fz.path("fc/bias"): (mask, False)})
        updates, _ = tx.update(params, tx.init(params), params)
        plain = BY_PATH["decay mask"]()
        expected, _ = plain.update(params, plain.init(params), params)
        assert_equal_up_to_rounding(updates["fc"]["bias"], expected["fc"]["bias"])

    @pytest.mark.parametrize("kind", ["rows", "compact"])
    def test_an_update_of_another_shape_is_refused(self, params, kind):
        tx = fz.freeze(optax.stateless(lambda updates, _: jax.tree.map(lambda u: u[:1], updates)), SPECS[kind])
        with pytest.raises(ValueError, match="inner optimizer returned an update of another shape\n  at: fc/"):
            tx.update(params, tx.init(params), params)


class TestInside:
    def test_rows_of_another_transformation_do_not_freeze_twice(self, params):
        inner = fz.freeze(optax.sgd(1.0), {"fc": {"kernel": False, "bias": fz.rows([0])}, "head": True})
        with pytest.raises(ValueError, match="not the trainable part of the leaf\n  at: fc/bias"):
            fz.freeze(inner, {"fc": {"kernel": False, "bias": fz.rows([0, 1])}, "head": False}).init(params)

    @pytest.mark.parametrize("kind", SPECS)
    @pytest.mark.parametrize("around", [lambda tx: tx, lambda tx: optax.chain(optax.clip(100.0), tx)])
    def test_whole_leaves_and_groups(self, params, kind, around):
        """``head`` is frozen inside, and the bias by a group; what is left is that of one ``fz.freeze``."""
        inner = fz.freeze_when(optax.adam(0.1), {"fc/bias": True})
        tx = fz.freeze(around(fz.freeze(inner, "head")), SPECS[kind])
        state = tx.init(params)
        updates, state = tx.update(params, state, params)
        assert not np.asarray(updates["head"]).any()
        assert not np.asarray(updates["fc"]["bias"]).any()
        only_kernel = {"fc": {"kernel": SPECS[kind]["fc"]["kernel"], "bias": True}, "head": True}
        alone = fz.freeze(optax.adam(0.1), only_kernel) if kind != "leaf" else fz.masked_zero_updates(True)
        expected, _ = alone.update(params, alone.init(params), params)
        assert bits(updates["fc"]["kernel"]) == bits(expected["fc"]["kernel"])

    def test_a_value_function_is_code_of_the_user(self, params):
        """A loss that trains a model of its own, with the structure of the parameters."""
        rows = {"fc": {"kernel": False, "bias": fz.rows([0])}, "head": True}

        def loss(p):
            tx = fz.freeze(optax.sgd(0.1), rows)
            updates, _ = tx.update(p, tx.init(p), p)
            return sum(jnp.sum(x**2) for x in jax.tree.leaves(optax.apply_updates(p, updates)))

        tx = fz.freeze(optax.lbfgs(), rows)
        value, grads = jax.value_and_grad(loss)(params)
        updates, _ = tx.update(grads, tx.init(params), params, value=value, grad=grads, value_fn=loss)
        assert updates["fc"]["bias"][1:].all()
        assert not updates["fc"]["bias"][0]


class Net(nnx.Module):
    def __init__(self):
        self.fc, self.head = (nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(2))


class TestAChain:
    MESSAGE = "two freezing transformations in a chain.*\n  at: fc/.*\n.*\n.*\n  fix: fz.union.*optax.multi_transform"

    @pytest.mark.parametrize("second", [fz.freeze(optax.sgd(1.0), "fc"), fz.freeze_when(optax.sgd(1.0), {"fc": True})])
    @pytest.mark.parametrize("way", ["eager", "jitted", "TrainState"])
    def test_of_two_specs_is_refused(self, params, second, way):
        tx = optax.chain(fz.freeze(optax.sgd(1.0), "head"), second)
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        update = lambda state, grads: state.apply_gradients(grads=grads)  # noqa: E731
        if way != "TrainState":
            update = lambda state, grads: tx.update(grads, state.opt_state, params)  # noqa: E731
        with pytest.raises(ValueError, match=self.MESSAGE):
            (jax.jit(update) if way == "jitted" else update)(state, params)

    def test_in_an_nnx_optimizer(self):
        model = Net()
        tx = optax.chain(fz.freeze(optax.sgd(1.0), "head"), fz.freeze(optax.sgd(1.0), "fc"))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        with pytest.raises(ValueError, match=self.MESSAGE):
            optimizer.update(model, nnx.state(model, nnx.Param))

    def test_with_other_masks(self, params):
        masks = [{"fc": True, "head": mask} for mask in (np.eye(3, 2, dtype=bool), ~np.eye(3, 2, dtype=bool))]
        tx = optax.chain(*(fz.freeze(optax.sgd(1.0), mask) for mask in masks))
        with pytest.raises(ValueError, match="two freezing transformations"):
            tx.update(params, tx.init(params), params)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: optax.chain(fz.freeze(optax.adam(0.1), "fc"), fz.freeze(optax.scale(2.0), "fc")),
            lambda: optax.chain(fz.freeze(optax.adam(0.2), "fc"), fz.masked_zero_updates("fc/bias")),
            lambda: fz.freeze(fz.freeze(optax.adam(0.2), "fc"), "fc/bias"),
            lambda: optax.chain(fz.masked_zero_updates("fc"), fz.freeze(optax.adam(0.2), "fc/bias")),
        ],
    )
    def test_that_freezes_as_written(self, params, make):
        tx = make()
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
        assert not jax.tree.reduce(jnp.logical_or, jax.tree.map(lambda u: u.any(), updates["fc"]))
        np.testing.assert_allclose(updates["head"], -0.2, rtol=1e-5)

    def test_one_gradient_for_two_optimizers(self, params):
        """Each of its own part, side by side: both are given the gradients themselves."""
        for inner in (optax.sgd(1.0), optax.identity()):
            parts = [fz.freeze(inner, spec) for spec in ("head", "fc")]
            updates = [tx.update(params, tx.init(params), params)[0] for tx in parts]
            assert all(np.asarray(u).any() for u in (updates[0]["fc"]["bias"], updates[1]["head"]))
