"""Label functions for ``optax.multi_transform`` and the learning rates that go with them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from flax import nnx

import optax_freeze as fz


@pytest.fixture
def other():
    return {"encoder": {"kernel": jnp.ones(2), "bias": jnp.zeros(2)}, "head": jnp.ones(2)}


class TestLabels:
    def test_labels(self, other):
        label_fn = fz.labels("encoder")
        assert label_fn(other) == {"encoder": {"kernel": "frozen", "bias": "frozen"}, "head": "trainable"}
        assert label_fn({**other, "head": optax.MaskedNode()})["head"] == "frozen"


class TestLabelsByPath:
    def test_the_first_match_counts(self, other):
        label_fn = fz.labels_by_path({"**/bias": "b", "encoder": "a"}, default="c")
        assert label_fn(other) == {"encoder": {"kernel": "a", "bias": "b"}, "head": "c"}
        trainable, _ = fz.partition(other, "encoder")
        assert label_fn(trainable) == label_fn(other)

    def test_selectors_and_any_label(self, other):
        is_kernel = fz.where(lambda path, leaf: path.endswith(("kernel", "head")))
        label_fn = fz.labels_by_path({is_kernel: 1, fz.regex("no|head"): 2}, default=3)
        with pytest.raises(ValueError, match="matches no leaf"):
            label_fn({"x": jnp.ones(1)})
        expected = {"encoder": {"kernel": 1, "bias": 3}, "head": 1, "no": 2, "x": None}
        assert label_fn({**other, "no": other["head"], "x": None}) == expected

    def test_in_multi_transform(self, other):
        labels = fz.labels_by_path({"head": "fast"}, default="slow")
        tx = fz.freeze(optax.multi_transform({"fast": optax.sgd(1.0), "slow": optax.sgd(0.5)}, labels), "encoder/bias")
        updates, _ = jax.jit(tx.update)(other, tx.init(other), other)
        assert updates["head"].tolist() == [-1, -1]
        assert updates["encoder"]["kernel"].tolist() == [-0.5, -0.5]

    def test_inside_freeze_when(self, params):
        """Each group sees the labels of its own leaves; patterns of other groups match ``MaskedNode``."""
        labels = fz.labels_by_path({"encoder": "slow", "head": "fast"})
        inner = optax.multi_transform({"fast": optax.sgd(1.0), "slow": optax.sgd(0.5)}, labels)
        tx = fz.freeze_when(inner, fz.gradual_unfreeze(["head", "encoder"], 1))
        state, ones = tx.init(params), jax.tree.map(jnp.ones_like, params)
        first, state = tx.update(ones, state, params)
        second, state = tx.update(ones, state, params)
        assert first["head"]["bias"].tolist() == second["head"]["bias"].tolist() == [-1, -1]
        assert not first["encoder"]["layer_0"]["bias"].any()
        assert second["encoder"]["layer_0"]["bias"].tolist() == [-0.5] * 4

    def test_nnx(self):
        """``nnx.Optimizer`` gives other paths to ``update`` than to ``init``."""
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        labels = fz.labels_by_path({"kernel": "fast"}, default="slow")
        tx = optax.multi_transform({"fast": optax.sgd(1.0), "slow": optax.sgd(0.0)}, labels)
        kernel, bias = (np.asarray(variable[...]) for variable in (model.kernel, model.bias))
        grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        nnx.Optimizer(model, tx, wrt=nnx.Param).update(model, grads)
        assert bits([model.kernel[...], model.bias[...]]) == bits([kernel - 1, bias])

    def test_tree_map_params(self, other):
        tx = optax.multi_transform({"a": optax.adam(0.1)}, fz.labels_by_path({"head": "a"}, default="a"))
        state = tx.init(other)
        assert bits(optax.tree_map_params(tx, lambda leaf: leaf, state)) == bits(state)

    def test_frozen_leaves_need_no_label(self, params):
        labels = fz.labels_by_path({"**/kernel": "a", "head/bias": "b"})
        tx = fz.freeze(optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, labels), "encoder")
        updates, _ = tx.update(params, tx.init(params), params)
        assert bits(updates["head"]["bias"]) == bits(-0.1 * params["head"]["bias"])

    def test_strict(self, other):
        with pytest.raises(ValueError, match=r"matches no leaf(.|\n)*nearest paths: head"):
            fz.labels_by_path({"hed": "a"}, default="b")(other)
        with pytest.raises(ValueError, match="never applies"):
            fz.labels_by_path({"encoder": "a", "encoder/bias": "b"}, default="c")(other)

    @pytest.mark.parametrize(
        "labels",
        [*("encoder", {3: "a"}), *({"encoder": label} for label in (None, ["a"], np.ones(2), jnp.ones(2)))],
        ids=repr,
    )
    def test_bad_arguments(self, labels):
        with pytest.raises(TypeError, match="expected: "):
            fz.labels_by_path(labels)

    def test_rates_of_selectors(self, params):
        rates = fz.layerwise_decay([fz.path("head"), fz.all_except("head")], 1.0, 0.5)
        with pytest.raises(TypeError, match=r"fix: .*\{pattern: repr\(pattern\)\}"):
            fz.labels_by_path({pattern: pattern for pattern in rates})
        transforms = {repr(pattern): optax.sgd(rate) for pattern, rate in rates.items()}
        tx = optax.multi_transform(transforms, fz.labels_by_path({pattern: repr(pattern) for pattern in rates}))
        updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
        assert [u.tolist()[0] for u in (updates["head"]["bias"], updates["encoder"]["layer_0"]["bias"])] == [-1, -0.5]


class TestLayerwiseDecay:
    def test_the_first_pattern_has_the_base(self):
        rates = fz.layerwise_decay(["head", fz.path("b", "c"), "a"], 1e-2, 1 / 2.6)
        assert list(rates) == ["head", fz.path("b", "c"), "a"]
        assert list(rates.values()) == pytest.approx([1e-2, 1e-2 / 2.6, 1e-2 / 2.6**2])

    def test_of_a_schedule(self):
        rates = fz.layerwise_decay(["head", "a"], optax.linear_schedule(1.0, 0.0, 10), 0.5)
        assert [float(rate(5)) for rate in rates.values()] == [0.5, 0.25]

    @pytest.mark.parametrize(
        ("args", "error"),
        [
            ((["head", "head"], 1.0, 0.5), ValueError),
            *(((["head"], 1.0, factor), ValueError) for factor in (float("nan"), np.float32("nan"), float("inf"))),
            *(((["head"], base, 0.5), TypeError) for base in ([1.0], True, np.ones(2))),
        ],
    )
    def test_bad_arguments(self, args, error):
        with pytest.raises(error, match="expected: "):
            fz.layerwise_decay(*args)
