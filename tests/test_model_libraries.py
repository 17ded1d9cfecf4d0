"""Equinox, Haiku and Keras models need no wrapper, only a spec."""

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import optax
import pytest
from conftest import bits
from flax import nnx

import optax_freeze as fz


def test_keras_values_are_parameters_and_its_variables_are_refused():
    layers = [keras.Input((3,)), keras.layers.Dense(2, name="body"), keras.layers.Dense(1, name="head")]
    variables = keras.Sequential(layers, name="net").trainable_variables
    for use in (fz.freeze(optax.sgd(0.1), "**/body").init, lambda params: fz.partition(params, "**/body")):
        with pytest.raises(TypeError, match=r"at: net/body/bias\n  got: a Variable(.|\n)*variable\.value"):
            use({variable.path: variable for variable in variables})
    answers = fz.resolve({variable.path: variable.value for variable in variables}, "**/body")
    trainable, rest = fz.partition([variable.value for variable in variables], [answers[v.path] for v in variables])
    assert bits(trainable) == bits([*[optax.MaskedNode()] * 2, *[v.value for v in variables[2:]]])
    assert bits(rest) == bits([v.value for v in variables[:2]])


class Layer(eqx.Module):
    """Leaves that are not arrays: a bool, a string, numbers, a function; and None, which is no leaf."""

    w: jax.Array
    b: jax.Array
    steps: jax.Array
    activation: Callable
    name: str = "layer"
    inference: bool = False
    width: int = 3
    rate: float = 0.5
    nothing: Any = None


LAYER = Layer(jnp.ones((3, 2)), jnp.ones(2), jnp.int32(3), jax.nn.relu)


def sum_of_layer(layer):
    return jnp.sum(layer.activation(layer.w) ** 2) + jnp.sum(layer.b**2)


@pytest.mark.parametrize("gradient", ["equinox", "ours", "the module"])
@pytest.mark.parametrize("kind", ["freeze", "masked_zero_updates", "freeze_when"])
def test_what_is_not_an_array_of_a_module_has_no_update(kind, gradient):
    tx, frozen = {
        "freeze": (fz.freeze(optax.sgd(0.5), "w"), "w"),
        "masked_zero_updates": (fz.masked_zero_updates("w"), "w"),
        "freeze_when": (fz.freeze_when(optax.sgd(0.5), {"w": True}), False),
    }[kind]
    gradients = {"equinox": eqx.filter_grad(sum_of_layer), "ours": fz.grad(sum_of_layer, frozen)}
    grads = gradients[gradient](LAYER) if gradient in gradients else LAYER
    state = tx.init(LAYER)
    for update in (tx.update, eqx.filter_jit(tx.update)):
        updates, _ = update(grads, state, LAYER)
        applied = [fz.apply_updates(LAYER, updates), fz.apply_updates(LAYER, updates, "w")]
        if (kind, gradient) != ("masked_zero_updates", "ours"):  # its updates have the ``MaskedNode`` of the gradient
            applied.append(eqx.apply_updates(LAYER, updates))
        for new in applied:
            assert new.inference is False
            assert (new.name, new.width, new.rate, new.activation) == ("layer", 3, 0.5, jax.nn.relu)
            assert (type(new.width), type(new.rate), new.nothing) == (int, float, None)
            assert bits([new.w, new.steps]) == bits([LAYER.w, LAYER.steps])
            assert bits(new.b) != bits(LAYER.b)


def test_optax_adds_the_updates_of_numbers_and_bools():
    params = {"w": jnp.ones(2), "flag": True, "scale": -0.0, "count": 3, "c": complex(1, -0.0)}
    tx = fz.freeze(optax.sgd(0.5), ["scale", "c"])
    updates, _ = tx.update(params, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    assert (new["flag"].dtype, bool(new["flag"]), int(new["count"]), complex(new["c"])) == (bool, True, 3, 1)
    jitted = jax.jit(lambda params: tx.update(params, tx.init(params), params)[0])(params)
    assert jax.tree.structure(jitted) == jax.tree.structure(params)
    new = fz.apply_updates({"scale": 1.0, "flag": True, "count": 2}, {"scale": 0.5, "flag": 1.0, "count": 0.0})
    assert (float(new["scale"]), new["flag"], new["count"]) == (1.5, True, 2)


class Dropped(eqx.Module):
    """A module without functions, which ``jax.jit`` takes as it is."""

    w: jax.Array
    rate: float = 0.5


def scaled_sum(params):
    return params["scale"] * (1 - params["module"].rate) * jnp.sum(params["module"].w)


def test_numbers_of_an_equinox_module_are_settings():
    params = {"scale": 2.0, "module": Dropped(jnp.ones(2))}
    answers = fz.resolve(params, False)
    assert (answers["scale"], answers["module"].rate, answers["module"].w) == (False, True, False)
    grads = fz.grad(scaled_sum, "scale")(params)
    assert grads["module"].rate == optax.MaskedNode()
    assert fz.summary(params, False).elements == 3
    modules = [params["module"], {"again": params["module"]}]
    assert fz.partition([*modules, 2.0], False)[1][1]["again"].rate == 0.5
    assert fz.partition([*modules, 2.0], False)[0][2] == 2.0


DECAYED = optax.adamw(0.1, weight_decay=0.1)
KINDS = {
    "freeze": fz.freeze(DECAYED, False),
    "MaskedNode": fz.freeze(DECAYED, False, full_updates=False),
    "freeze_when": fz.freeze_when(DECAYED, {"scale": False, "module": False}),
    "masked_zero_updates": fz.masked_zero_updates({"scale": False, "module": True}),
}


@pytest.mark.parametrize("jit_init", [False, True])
@pytest.mark.parametrize("tx", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("gradient", [eqx.filter_grad, lambda loss: fz.grad(loss, "scale")], ids=["equinox", "ours"])
def test_a_number_without_a_gradient_has_no_update(tx, jit_init, gradient):
    """Equinox differentiates arrays; under ``jax.jit`` the numbers of a module are arrays for it, and for ``init``."""
    params = {"scale": 2.0, "module": Dropped(jnp.ones(2))}
    state = (jax.jit(tx.init) if jit_init else tx.init)(params)
    grads = gradient(scaled_sum)(params)
    updates, _ = tx.update(grads, state, params)
    news = [fz.apply_updates(params, updates), fz.update_params(tx, grads, state, params)[0]]
    for new in news:
        assert (new["scale"], new["module"].rate) == (2.0, 0.5)


CALLED = {
    "mask": (
        lambda tree: optax.inject_hyperparams(optax.adamw)(0.1, mask=tree),
        lambda tree: optax.inject_hyperparams(optax.adamw, static_args="mask")(0.1, mask=tree),
        eqx.is_array,
        "static_args='mask'",
    ),
    "labels": (
        lambda tree: optax.partition({"all": optax.adam(0.1)}, tree),
        lambda tree: optax.partition({"all": optax.adam(0.1)}, lambda _: tree),
        lambda _: "all",
        "lambda _: labels",
    ),
}


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("freeze", [fz.freeze, lambda tx, frozen: fz.freeze_when(tx, {frozen: fz.unfreeze_at(1)})])
def test_a_module_that_optax_calls(name, freeze):
    """A mask or labels of the type of the model is callable."""
    wrong, right, kind, fix = CALLED[name]
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    tree = jax.tree.map(kind, model)
    with pytest.raises(TypeError, match=rf"(?s)Optax takes a callable pytree .*fix: .*{fix}"):
        freeze(wrong(tree), "layers/0/**").init(model)
    tx = freeze(right(tree), "layers/0/**")
    step = eqx.filter_jit(fz.train_step(lambda model, x: jnp.sum(model(x) ** 2), tx))
    new, *_ = step(model, tx.init(model), jnp.ones(2))
    fz.assert_frozen(model, new, "layers/0/**")


def test_an_error_of_a_module_that_is_a_schedule_is_its_own():
    class Broken(eqx.Module):
        rate: float = 0.1

        def __call__(self, count):
            raise KeyError("no rate")

    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    with pytest.raises(KeyError, match="no rate"):
        fz.freeze(optax.inject_hyperparams(optax.sgd)(Broken()), "bias").init(model)


def test_a_bool_in_the_state_of_a_group():
    """As where ``optax.inject_hyperparams`` calls a function for a mask."""
    init = lambda params: {"is_first": True, "n": 3}  # noqa: E731
    inner = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    tx = fz.freeze_when(inner, {"bias": fz.unfreeze_at(1)})
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    step = eqx.filter_jit(fz.train_step(lambda model, x: jnp.sum(model(x)), tx))
    new, *_ = step(*step(model, tx.init(model), jnp.ones(2))[:2], jnp.ones(2))
    assert bool((new.bias != model.bias).all())


def test_an_array_without_a_gradient_is_still_an_error():
    params = {"scale": jnp.array(2.0), "w": jnp.ones(2)}
    tx = fz.freeze(optax.sgd(0.1), False)
    with pytest.raises(ValueError, match=r"updates: a trainable leaf is missing\n  at: scale"):
        tx.update({"scale": None, "w": jnp.ones(2)}, tx.init(params), params)


def test_equinox_gradients_as_an_extra_argument():
    """Of a line search, which is given them a second time."""
    tx = fz.freeze(optax.lbfgs(), "w")
    extra = {"value": sum_of_layer(LAYER), "value_fn": sum_of_layer}
    both = []
    for grads in (eqx.filter_grad(sum_of_layer)(LAYER), fz.grad(sum_of_layer, "w")(LAYER)):
        updates, _ = tx.update(grads, tx.init(LAYER), LAYER, grad=grads, **extra)
        both.append(bits(updates))
    assert both[0] == both[1]


@pytest.mark.parametrize("keep", [eqx.is_array, eqx.is_inexact_array])
def test_equinox_gradients_for_a_state_of_any_filter(keep):
    params, grads = eqx.filter(LAYER, keep), eqx.filter_grad(sum_of_layer)(LAYER)
    tx = fz.freeze(optax.adam(0.5), fz.rules({"w": fz.rows(0)}))
    new = eqx.apply_updates(LAYER, tx.update(grads, tx.init(params), params)[0])
    assert bits([new.w[0], new.steps]) == bits([LAYER.w[0], LAYER.steps])
    assert (new.w[1:] != LAYER.w[1:]).all()
    for tx in (fz.freeze(optax.adam(0.5), "w"), fz.freeze_when(optax.adam(0.5), {"w": True})):
        state, told = tx.init(params), r"module in both places, state = tx\.init\(model\), or eqx\.filter\("
        with pytest.raises(ValueError, match=told):
            tx.update(grads, state, LAYER)
        with pytest.raises(ValueError, match=told):
            fz.value_and_grad(sum_of_layer, fz.spec_of(state))(LAYER)
        with pytest.raises(ValueError, match=told):
            eqx.filter_jit(fz.train_step(sum_of_layer, tx))(LAYER, state)
        eqx.filter_jit(fz.train_step(sum_of_layer, tx))(LAYER, tx.init(LAYER))


NORMS = fz.regex(r"(?i)(.*/)?[^/]*norm(alization)?_?\d*/(scale|bias|offset|weight|gamma|beta)")  # of docs/specs.md


class LinenNorms(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RMSNorm()(nn.LayerNorm()(nn.Dense(4)(x)))
        x = nn.GroupNorm(2, name="encoder_norm")(nn.BatchNorm(use_running_average=True)(x))
        return nn.Dense(1, name="normalizer")(x)


def haiku_norms(x):
    x = hk.RMSNorm(-1)(hk.LayerNorm(-1, True, True)(hk.Linear(4)(x)))
    return hk.BatchNorm(True, True, 0.9)(hk.GroupNorm(2)(x), True)


def keras_norms(x):
    layers = keras.layers
    norms = [layers.BatchNormalization(), layers.LayerNormalization(), layers.GroupNormalization(2)]
    model = keras.Sequential([layers.Dense(4), *norms, layers.RMSNormalization()])
    model(x)
    return {variable.path: variable.value for variable in model.trainable_variables}


@pytest.mark.parametrize("library", ["linen", "haiku", "keras"])
def test_the_pattern_of_normalization_layers_selects_what_each_library_calls_them(library):
    make = {
        "linen": lambda: LinenNorms().init(jax.random.key(0), jnp.ones((8, 4)))["params"],
        "haiku": lambda: hk.transform_with_state(haiku_norms).init(jax.random.key(0), jnp.ones((8, 4)))[0],
        "keras": lambda: keras_norms(jnp.ones((8, 4))),
    }
    params = make[library]()
    leaves = jax.tree.leaves_with_path(fz.resolve(params, NORMS))
    chosen = {jax.tree_util.keystr(path, simple=True, separator="/"): on for path, on in leaves}
    dense = {path for path in chosen if re.search(r"dense|linear|normalizer", path, re.IGNORECASE)}
    assert {path for path, on in chosen.items() if not on} == dense
    assert len(dense) >= 2


def test_normalization_layers_of_any_name_are_selected_by_their_type():
    types = (nnx.LayerNorm, nnx.RMSNorm, nnx.BatchNorm)
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.LayerNorm(4, rngs=rngs), nnx.RMSNorm(4, rngs=rngs))
    found = ["/".join(map(str, path)) for path, module in nnx.iter_modules(model) if isinstance(module, types)]
    frozen = nnx.to_pure_dict(fz.resolve(nnx.state(model, nnx.Param), fz.all_except(*found)))["layers"]
    assert frozen == {0: {"bias": True, "kernel": True}, 1: {"bias": False, "scale": False}, 2: {"scale": False}}
    layers = [eqx.nn.BatchNorm(4, "batch", mode="batch"), eqx.nn.GroupNorm(2, 4), eqx.nn.LayerNorm(4)]
    module, types = eqx.nn.Sequential(layers), (eqx.nn.BatchNorm, eqx.nn.GroupNorm)
    frozen = fz.resolve(
        module,
        lambda model: jax.tree.map(lambda m: not isinstance(m, types), model, is_leaf=lambda m: isinstance(m, types)),
    )
    assert [layer.weight for layer in frozen.layers] == [layer.bias for layer in frozen.layers] == [False, False, True]
