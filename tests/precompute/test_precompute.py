"""What is computed once: which values are stored, and that nothing else changes."""

import functools
import math
import os
import pickle
import subprocess
import sys

import equinox as eqx
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_equal_up_to_rounding, bits
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze._program.trace import scan_counts

X = jax.random.normal(jax.random.key(0), (32, 8))
FROZEN = ["encoder", "middle"]
TOKENS = jax.random.randint(jax.random.key(1), (4, 7), 0, 50)


def three_layers():
    keys = jax.random.split(jax.random.key(2), 3)
    shapes = {"encoder": (8, 16), "middle": (16, 16), "head": (16, 3)}
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def mlp(params, x):
    h = jnp.tanh(jnp.tanh(x @ params["encoder"]) @ params["middle"])
    return jnp.mean(jnp.square(h @ params["head"]))


def stacked():
    keys = jax.random.split(jax.random.key(3), 2)
    return {**three_layers(), "layers": jax.random.normal(keys[0], (6, 16, 16)) / 4}


def scanned(params, x, wrap=lambda f: f, **options):
    h, _ = lax.scan(
        lambda h, w: (wrap(lambda h, w: h + jnp.tanh(h @ w))(h, w), None),
        x @ params["encoder"],
        params["layers"],
        **options,
    )
    return jnp.mean(jnp.square(h @ params["head"]))


def in_a_python_loop(params, x):
    h, layers = x @ params["encoder"], params["layers"].astype(jnp.bfloat16).astype(jnp.float32)
    for i in range(6):
        h = h + jnp.tanh(h @ layers[i])
    return jnp.mean(jnp.square(h @ params["head"]))


def stacked_results(params, x):
    def step(h, of_layer):
        w, scale = of_layer
        h = h + jnp.tanh(h @ w) * scale
        return h, h.sum(-1)

    h, sums = lax.scan(step, x @ params["encoder"], (params["layers"] * 2, params["scales"]))
    return jnp.mean(jnp.square(h @ params["head"])) + jnp.sum(jnp.sort(sums, 0)[:2])


def scaled_stack():
    return {**stacked(), "scales": jnp.arange(6.0)}


def text():
    keys = jax.random.split(jax.random.key(4), 3)
    shapes = {"embed": (50, 16), "middle": (16, 16), "head": (16, 3)}
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def of_tokens(params, tokens):
    return jnp.mean(jnp.square(jnp.tanh(params["embed"][tokens] @ params["middle"]) @ params["head"]))


def tied(params, tokens):
    return jnp.mean(jnp.tanh(params["embed"][tokens] @ params["middle"]) @ params["embed"].T)


@jax.custom_vjp
def sine(x, w):
    return jnp.sin(x @ w)


sine.defvjp(lambda x, w: (sine(x, w), (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def with_layer(layer):
    return lambda params, x: jnp.sum(layer(layer(x, params["encoder"]), params["middle"]) @ params["head"])


def dense(x, w):
    return jnp.tanh(x @ w)


def branched(params, x):
    h = lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ params["encoder"]), lambda x: x @ params["encoder"], x)
    return jnp.sum(h @ params["middle"] @ params["head"])


def looped(params, x):
    h = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ params["middle"]), x @ params["encoder"])
    return jnp.sum(h @ params["head"])


def until(params, x):
    h = lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ params["middle"])), (0, x @ params["encoder"])
    )
    return jnp.sum(h[1] @ params["head"])


def dropped_out(params, x, key):
    h = jnp.tanh(x @ params["encoder"])
    h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0)
    return jnp.mean(jnp.square(jnp.tanh(h @ params["middle"]) @ params["head"]))


def mixed_precision(params, x):
    h = jnp.tanh(x.astype(jnp.bfloat16) @ params["encoder"].astype(jnp.bfloat16))
    return jnp.mean(jnp.square((h @ params["middle"].astype(jnp.bfloat16)).astype(jnp.float32) @ params["head"]))


def in_vmap(params, x):
    return jnp.mean(jax.vmap(lambda row: mlp(params, row[None]))(x))


def batch_normalized(params, x):
    h = x @ params["encoder"] @ params["middle"]
    return jnp.sum(jnp.tanh((h - h.mean(0)) / h.std(0)) @ params["head"])


def with_callback(params, x):
    h = x @ params["encoder"]
    jax.debug.callback(lambda _: None, h.sum())
    return jnp.sum(h @ params["middle"] @ params["head"])


def elementwise(params, x):
    return jnp.sum(params["head"] * jnp.sin(params["encoder"] * x))


MASK = jnp.asarray(np.random.RandomState(0).rand(16, 16) < 0.5)
FLAT = {"encoder": jnp.ones(3), "head": jnp.ones(3)}
LAST_TWO = {"layers": fz.rows(slice(0, 4)), "encoder": True, "middle": True, "head": False}
FIRST_TWO = {"layers": fz.rows(slice(2, 6)), "encoder": True, "middle": True, "head": True}

CASES = {
    "two layers": (mlp, three_layers, FROZEN, X),
    "one layer": (mlp, three_layers, "encoder", X),
    "jit": (jax.jit(mlp), three_layers, "encoder", X),
    "jit in jit": (with_layer(jax.jit(dense)), three_layers, "encoder", X),
    "remat": (with_layer(jax.checkpoint(dense)), three_layers, "encoder", X),
    "custom_vjp": (with_layer(sine), three_layers, "encoder", X),
    "custom_jvp": (with_layer(lambda x, w: jax.nn.gelu(jax.nn.relu(x @ w))), three_layers, "encoder", X),
    "cond": (branched, three_layers, "encoder", X),
    "fori_loop": (looped, three_layers, FROZEN, X),
    "while_loop": (until, three_layers, FROZEN, X),
    "scan, whole": (scanned, stacked, fz.only("head"), X),
    "scan, rows": (scanned, stacked, LAST_TWO, X),
    "scan, rows, remat": (functools.partial(scanned, wrap=jax.checkpoint), stacked, LAST_TWO, X),
    "scan, rows, reversed": (functools.partial(scanned, reverse=True), stacked, FIRST_TWO | {"head": False}, X),
    "scan, two stacks": (stacked_results, scaled_stack, LAST_TWO | {"scales": fz.rows(slice(0, 5))}, X),
    "scan, one stack trains": (stacked_results, scaled_stack, LAST_TWO | {"scales": False, "encoder": True}, X),
    "Python loop, rows": (in_a_python_loop, stacked, LAST_TWO, X),
    "lookup": (of_tokens, text, ["embed", "middle"], TOKENS),
    "tied": (tied, text, ["embed", "head"], TOKENS),
    "elements": (mlp, three_layers, {"encoder": True, "middle": fz.elements(MASK), "head": False}, X),
    "compact": (mlp, three_layers, {"encoder": True, "middle": fz.elements(MASK, compact=True), "head": False}, X),
    "mixed precision": (mixed_precision, three_layers, FROZEN, X),
    "integers": (lambda params, x: mlp(params, x.astype(jnp.float32)), three_layers, FROZEN, X.astype(jnp.int8)),
    "vmap": (in_vmap, three_layers, FROZEN, X),
    "batch statistics": (batch_normalized, three_layers, FROZEN, X),
    "callback": (with_callback, three_layers, FROZEN, X),
    "elementwise": (elementwise, lambda: dict(FLAT), "encoder", jnp.ones((5, 3))),
    "NumPy": (mlp, lambda: jax.tree.map(np.asarray, three_layers()), FROZEN, np.asarray(X)),
}


def trained_on_features(once, frozen, params, *args):
    """Value and gradient from the features, with the needed parameters alone."""
    features = jax.jit(once.before)(params, *args)
    return jax.jit(fz.value_and_grad(once.after, frozen))(once.needed(params, *args), features, *args)


def check(loss, frozen, params, *args, run=jax.jit, **options):
    """The value and the gradient of what trains, from the features, are those of the function."""
    got = trained_on_features(fz.precompute(loss, frozen, **options), frozen, params, *args)
    assert_equal_up_to_rounding(got, run(fz.value_and_grad(loss, frozen))(params, *args))


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_function(name):
    """What trains is not read before."""
    loss, init, frozen, batch = CASES[name]
    params, once = init(), fz.precompute(loss, frozen)
    rounded, options = {}, {}
    if name == "mixed precision":  # XLA computes a chain of bfloat16 operations in float32, unless it is stored between
        rounded, options = {"dtype": jnp.bfloat16, "roundings": 1}, {"xla_allow_excess_precision": False}
    whole = jax.jit(fz.value_and_grad(loss, frozen), compiler_options=options)(params, batch)
    assert_equal_up_to_rounding(trained_on_features(once, frozen, params, batch), whole, **rounded)
    before = jax.jit(once.before)
    features = before(params, batch)
    again = jax.jit(fz.value_and_grad(lambda params: once.after(params, features, batch), frozen))(params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), again, whole)
    trainable, rest = fz.partition(params, frozen)
    poisoned = fz.combine(jax.tree.map(lambda x: x * np.nan, trainable), rest)
    assert bits(before(poisoned, batch)) == bits(features)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(50, 16)(tokens)
        for _ in range(3):
            x = Block()(x)
        return nn.Dense(5)(nn.LayerNorm()(x).mean(1))


class TestWhatIsStored:
    def test_one_activation_where_one_suffices(self):
        params = Transformer().init(jax.random.key(0), TOKENS)["params"]

        def loss(params, tokens):
            return jnp.sum(Transformer().apply({"params": params}, tokens) ** 2)

        for trains, shapes in {
            ("Block_2", "LayerNorm_0", "Dense_0"): [(4, 7, 16)],  # the residual stream, which is read three times
            ("LayerNorm_0", "Dense_0"): [(4, 7, 16)],
            ("Dense_0",): [(4, 16)],  # behind the mean
        }.items():
            once = fz.precompute(loss, fz.only(*trains))
            assert [f.shape for f in once.explain(params, TOKENS).features] == shapes
        check(loss, fz.only("Dense_0"), params, TOKENS)

    @pytest.mark.parametrize("recurring", ["x", ("x", "keys")])
    def test_mean_and_spread_unless_the_keys_of_the_samples_recur(self, recurring):
        def loss(params, x, keys):
            mean, log_variance = jnp.split(jnp.tanh(x @ params["encoder"]) @ params["middle"], 2, axis=-1)
            noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(keys)
            sample = mean + jnp.exp(0.5 * jnp.clip(log_variance, -30, 20)) * noise
            return jnp.mean((sample @ params["head"][:8]) ** 2)

        params, keys = three_layers(), jax.random.split(jax.random.key(4), (2, 32))
        once = fz.precompute(loss, FROZEN, recurring, example_axis=0)
        stored = {f.operation.split()[0]: f.shape for f in once.explain(params, X, keys[0]).features}
        assert stored == ({"split": (32, 8), "exp": (32, 8)} if recurring == "x" else {"add": (32, 8)})
        before = jax.jit(once.before)
        features = before(params, X, keys[1])
        assert (bits(features) == bits(before(params, X, keys[0]))) is (recurring == "x")
        sampled = jax.jit(once.after)(once.needed(params, X, keys[1]), features, X, keys[1])
        assert_equal_up_to_rounding(sampled, jax.jit(loss)(params, X, keys[1]))

    def test_the_last_of_equal_ones_and_the_narrowest(self):
        def narrow(params, x):
            h = jnp.maximum(x @ params["encoder"], 0).astype(jnp.bfloat16)
            return jnp.sum((jnp.tile(h, (1, 4)) @ jnp.tile(params["head"], (4, 1))).astype(jnp.float32))

        [feature] = fz.precompute(mlp, FROZEN).explain(three_layers(), X).features
        assert feature.operation.startswith("tanh")
        [feature] = fz.precompute(narrow, "encoder").before(three_layers(), X)
        assert (feature.size, feature.dtype) == (32 * 16, jnp.bfloat16)

    def test_nothing_that_is_an_argument_and_nothing_that_is_cheap(self):
        def loss(params, batch):
            x, labels, mask = batch
            h = jnp.tanh(x @ params["encoder"])
            causal = jnp.where(jnp.tril(jnp.ones((32, 32), bool)) & mask[:, None], 1.0, 0.0)
            logits = causal @ (h @ params["head"]) + x[:, :3] + params["middle"][0, :3].astype(jnp.float32)
            return jnp.sum(logits * jax.nn.one_hot(labels, 3))

        batch = X, jnp.zeros(32, jnp.int32), jnp.ones(32, bool)
        once = fz.precompute(loss, FROZEN)
        assert [f.shape for f in once.before(three_layers(), batch)] == [(32, 16)]
        assert once.needed(three_layers(), batch)["encoder"] == optax.MaskedNode()
        assert once.needed(three_layers(), batch)["middle"].shape == (16, 16)

    def test_two_where_two_are_read(self):
        def loss(params, x):
            return jnp.sum((x @ params["encoder"]) @ params["head"]) + jnp.sum(
                jnp.sort(x @ params["middle"][:8]) @ params["head"]
            )

        assert len(fz.precompute(loss, FROZEN).before(three_layers(), X)) == 2

    def test_known_outputs(self):
        def loss(params, x):
            h = jnp.tanh(x @ params["encoder"])
            return jnp.mean((h @ params["head"]) ** 2), {"h": h, "x": x, "name": "loss", "encoder": params["encoder"]}

        params = three_layers()
        once = fz.precompute(loss, "encoder")
        features = once.before(params, X)
        assert len(features) == 1
        (value, aux), grads = fz.value_and_grad(once.after, "encoder", has_aux=True)(params, features, X)
        expected = fz.value_and_grad(loss, "encoder", has_aux=True)(params, X)
        assert aux["name"] == "loss"
        assert once.needed(params, X)["encoder"] is params["encoder"]  # it is returned
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5), (value, grads), (expected[0][0], expected[1])
        )
        assert bits(aux["h"]) == bits(features[0])


class TestArguments:
    def test_a_key_may_differ_each_time(self):
        params, once = three_layers(), fz.precompute(dropped_out, FROZEN)
        features = once.before(params, X, jax.random.key(0))
        assert bits(features) == bits(once.before(params, X, jax.eval_shape(jax.random.key, 0)))
        report = once.explain(params, X, jax.random.key(0))
        assert [why for _, why in report.stopped_by] == ["key, which does not recur"]
        for seed in range(3):
            key = jax.random.key(seed)
            value = once.after(params, features, X, key)
            np.testing.assert_allclose(value, dropped_out(params, X, key), rtol=1e-6)

    @pytest.mark.parametrize("recurring", [(1, 2), [1, "key"], ("x", "key"), ("key", 1)])
    def test_a_key_that_recurs_is_read_before(self, recurring):
        params, once = three_layers(), fz.precompute(dropped_out, FROZEN, recurring)
        assert jax.tree.leaves(once.needed(params, X, jax.random.key(0))) == [params["head"]]
        features = once.before(params, X, jax.random.key(0))
        assert bits(features) == bits(once.before(params, key=jax.random.key(0), x=X))
        value = once.after(params, features, X, jax.random.key(5))
        assert_equal_up_to_rounding(value, dropped_out(params, X, jax.random.key(0)))

    def test_python_values(self):
        def loss(params, x, train, scale=2.0):
            h = jnp.tanh(x @ params["encoder"])
            return jnp.mean(jnp.square((h * 2 if train else h) @ params["head"])) * scale

        params, once = three_layers(), fz.precompute(loss, "encoder")
        features = once.before(params, X, True, 0.5)
        np.testing.assert_allclose(once.after(params, features, X, True, 3.0), loss(params, X, True, 3.0), rtol=1e-6)
        with pytest.raises(ValueError, match="computed by another program"):
            once.after(params, features, X, False, 3.0)

    def test_a_number_that_does_not_recur_is_not_looked_at(self):
        def loss(params, x, steps):
            for _ in range(steps):
                x = jnp.tanh(x)
            return jnp.sum(x @ params["encoder"] @ params["head"])

        params = three_layers()
        with pytest.raises(ValueError, match=r"cannot be traced\n  at: .*loss"):
            fz.precompute(loss, "encoder").before(params, X, 2)
        once = fz.precompute(loss, "encoder", ("x", "steps"))
        assert_equal_up_to_rounding(once.after(params, once.before(params, X, 2), X, 2), loss(params, X, 2))

    def test_nested_batches(self):
        def loss(params, batch, *, weight):
            return mlp(params, batch["x"][0]) * weight

        params, once = three_layers(), fz.precompute(loss, FROZEN)
        batch = {"x": [X], "name": "digits", "none": None}
        features = once.before(params, batch, weight=1.0)
        np.testing.assert_allclose(once.after(params, features, batch, weight=2.0), 2 * mlp(params, X), rtol=1e-6)


class TestTransformations:
    def test_vmap_and_scan_over_batches(self):
        params, once, batches = three_layers(), fz.precompute(mlp, FROZEN), X.reshape(4, 8, 8)
        features, needed = jax.vmap(once.before, (None, 0))(params, batches), once.needed(params, batches[0])
        got = jax.vmap(fz.value_and_grad(once.after, FROZEN), (None, 0, 0))(params, features, batches)
        expected = jax.vmap(fz.value_and_grad(mlp, FROZEN), (None, 0))(params, batches)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, expected)
        _, values = lax.scan(lambda _, pair: (None, once.after(needed, *pair)), None, (features, batches))
        np.testing.assert_allclose(values, expected[0], rtol=1e-6)

    def test_jax_grad_gives_zeros_at_what_is_frozen(self):
        params, once = text(), fz.precompute(tied, ["embed", "head"])
        grads = jax.grad(once.after)(params, once.before(params, TOKENS), TOKENS)
        assert not grads["embed"].any()
        assert grads["middle"].any()

    def test_a_stack_that_trains_is_differentiated_step_by_step(self):
        """Zeros of the size of the whole stack in each step would take as much memory as the stack."""

        def loss(params, x):
            stacks = params["layers"], params["scales"]
            h, _ = lax.scan(lambda h, ws: (jnp.tanh(h @ ws[0] @ ws[1]), None), x @ params["encoder"], stacks)
            return jnp.sum(h @ params["head"])

        params = {**stacked(), "scales": stacked()["layers"] + 1}
        frozen = LAST_TWO | {"scales": fz.rows(slice(0, 3))}
        once = fz.precompute(loss, frozen)
        features = once.before(params, X)
        closed = jax.make_jaxpr(jax.grad(once.after))(params, features, X)
        scans = [eqn for eqn in closed.eqns if eqn.primitive.name == "scan"]
        carried = [v.aval.shape for eqn in scans for v in eqn.outvars[: scan_counts(eqn.params)[1]]]
        assert [eqn.params["length"] for eqn in scans] == [3, 3]
        assert (6, 16, 16) not in carried

    def test_remat_in_a_step_of_a_loop_stays(self):
        params, once = stacked(), fz.precompute(functools.partial(scanned, wrap=jax.checkpoint), LAST_TWO)
        text = str(jax.make_jaxpr(once.after)(params, once.before(params, X), X))
        assert "remat" in text or "checkpoint" in text

    def test_other_operations_stay_as_they_are(self):
        def loss(params, x):
            halves = jnp.split(jnp.tanh(x @ params["encoder"]) @ params["middle"], 2, 1)
            return jnp.sum(jnp.tanh(halves[0]) * halves[1]) + jnp.sum(params["head"])

        params, once = three_layers(), fz.precompute(loss, "encoder")
        closed = jax.make_jaxpr(once.after)(params, once.before(params, X), X)
        assert [
            eqn.primitive.name for eqn in closed.eqns if "sl" in eqn.primitive.name or "sp" in eqn.primitive.name
        ] == ["split"]

    def test_a_restricted_function(self):
        params, once = stacked(), fz.precompute(scanned, LAST_TWO)
        trainable, rest = fz.partition(params, LAST_TWO)
        grads = jax.grad(fz.restrict(once.after, rest))(trainable, once.before(params, X), X)
        assert_equal_up_to_rounding(grads, fz.grad(scanned, LAST_TWO)(params, X))

    def test_second_derivatives(self):
        params, once = three_layers(), fz.precompute(mlp, FROZEN)
        features = once.before(params, X)
        trainable, rest = fz.partition(params, FROZEN)
        of_loss = jax.hessian(fz.restrict(mlp, rest))(trainable, X)
        of_after = jax.hessian(lambda t: once.after(fz.combine(t, rest), features, X))(trainable)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), of_after, of_loss)

    @pytest.mark.parametrize("has_result", [False, True])
    def test_a_trace_runs_nothing_and_a_callback_is_called_in_each_step(self, has_result):
        calls = []

        def called(h):
            calls.append(h.shape)
            return 2 * h

        def loss(params, x):
            h = x @ params["encoder"]
            if has_result:
                h = jax.experimental.io_callback(called, jax.ShapeDtypeStruct(h.shape, h.dtype), h, ordered=True)
            else:
                jax.debug.callback(called, h, ordered=True)
            return jnp.sum(h @ params["head"])

        params, once = three_layers(), fz.precompute(loss, "encoder")
        features = jax.jit(once.before)(params, X)
        once.needed(params, X)
        once.explain(params, X)
        jax.effects_barrier()
        assert calls == []
        np.testing.assert_allclose(jax.jit(once.after)(params, features, X), loss(params, X), rtol=1e-5)
        jax.effects_barrier()
        assert calls == [(32, 16), (32, 16)]

    def test_one_compilation_and_no_tracer_leaks(self):
        params, once, traces = three_layers(), fz.precompute(mlp, FROZEN), []

        @jax.jit
        def step(params, features, x):
            traces.append(x.shape)
            return fz.value_and_grad(once.after, FROZEN)(params, features, x)

        with jax.checking_leaks():
            features = jax.jit(once.before)(params, X)
            for _ in range(3):
                step(once.needed(params, X), features, X)
        assert len(traces) == 1

    def test_names_of_operations_are_kept(self):
        def loss(params, x):
            with jax.named_scope("trunk"):
                h = jnp.tanh(x @ params["encoder"])
            with jax.named_scope("top"):
                return jnp.sum(h @ params["head"])

        params, once = three_layers(), fz.precompute(loss, "encoder")
        before = jax.jit(once.before).lower(params, X).as_text(debug_info=True)
        after = jax.jit(once.after).lower(params, once.before(params, X), X).as_text(debug_info=True)
        assert "trunk/dot_general" in before
        assert "trunk" not in after
        assert "top/dot_general" in after

    def test_closed_over_tracers_are_not_stored(self):
        params = three_layers()

        @jax.jit
        def features_of(scale):
            return fz.precompute(lambda p, x: mlp(p, x) + jnp.sum(jnp.sort(x * scale) @ p["encoder"]), FROZEN).before(
                params, X
            )

        assert [f.shape for f in features_of(2.0)] == [(32, 16)]


class TestDevices:
    def test_sharded(self):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        place = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))  # noqa: E731
        specs = {"encoder": (None, "model"), "middle": ("model", None), "head": ()}
        params = {name: place(array, *specs[name]) for name, array in three_layers().items()}
        x = place(X, "data")

        def loss(params, x):
            h = lax.with_sharding_constraint(jnp.tanh(x @ params["encoder"]), NamedSharding(mesh, P("data", None)))
            return jnp.mean(jnp.square(jnp.tanh(h @ params["middle"]) @ params["head"]))

        once = fz.precompute(loss, FROZEN, example_axis=0)
        [feature] = jax.jit(once.before)(params, x)
        assert feature.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
        check(loss, FROZEN, params, x, example_axis=0)

    def test_explicit_axes(self):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
        with jax.set_mesh(mesh):
            params = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P(None, None))), three_layers())
            x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
            once = fz.precompute(mlp, FROZEN, example_axis=0)
            check(mlp, FROZEN, params, x, example_axis=0)
            assert jax.typeof(jax.jit(once.before)(params, x)[0]).sharding.spec[0] == "data"

    def test_shard_map_in_the_function(self):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        shard_map = functools.partial(jax.shard_map, mesh=mesh)

        def loss(params, x):
            trunk = shard_map(lambda w, x: jnp.tanh(x @ w), in_specs=(P(), P("data")), out_specs=P("data"))
            head = lambda w, h: lax.pmean(jnp.mean(jnp.square(h @ w)), "data")  # noqa: E731
            return shard_map(head, in_specs=(P(), P("data")), out_specs=P())(
                params["head"], trunk(params["encoder"], x)
            )

        check(loss, FROZEN, three_layers(), X)

    def test_inside_of_shard_map(self):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        params, once = three_layers(), fz.precompute(mlp, FROZEN, example_axis=0)
        shard_map = functools.partial(jax.shard_map, mesh=mesh)
        before = shard_map(once.before, in_specs=(P(), P("data")), out_specs=P("data"))
        features = jax.jit(before)(params, X)
        # features may leave it
        np.testing.assert_allclose(once.after(once.needed(params, X), features, X), mlp(params, X), rtol=1e-6)

        def step(params, features, x):
            return fz.value_and_grad(lambda p: lax.pmean(once.after(p, features, x), "data"), FROZEN)(params)

        after = shard_map(step, in_specs=(P(), P("data"), P("data")), out_specs=P())
        value, grads = jax.jit(after)(once.needed(params, X), features, X)
        expected = fz.value_and_grad(mlp, FROZEN)(params, X)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), (value, grads), expected)


class TestModels:
    def test_equinox(self):
        model = eqx.nn.MLP(8, 4, 16, 3, key=jax.random.key(0))
        loss, frozen = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2), fz.only("layers/[23]/**")
        once = fz.precompute(loss, frozen, example_axis=0)
        features = eqx.filter_jit(once.before)(model, X)
        got = eqx.filter_jit(fz.value_and_grad(once.after, frozen))(once.needed(model, X), features, X)
        assert_equal_up_to_rounding(got, eqx.filter_jit(fz.value_and_grad(loss, frozen))(model, X))

    def test_nnx_and_a_random_key_among_the_parameters(self):
        class Model(nnx.Module):
            def __init__(self, rngs):
                self.encoder = nnx.Linear(8, 16, rngs=rngs)
                self.dropout = nnx.Dropout(0.3, rngs=rngs)
                self.middle, self.head = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

            def __call__(self, x):
                return self.head(nnx.relu(self.middle(self.dropout(nnx.relu(self.encoder(x))))))

        model = Model(nnx.Rngs(0))
        graph, state = nnx.split(model)
        frozen = fz.only("head/**")
        once = fz.precompute(lambda state, x: jnp.mean(nnx.merge(graph, state)(x) ** 2), frozen)
        report = once.explain(state, X)
        assert set(report.not_needed) == {"encoder/bias", "encoder/kernel"}
        assert any("a random key among the parameters" in why for _, why in report.stopped_by)
        model.eval()
        graph, state = nnx.split(model)
        assert "middle/kernel" in once.explain(state, X).not_needed

    def test_training_gives_the_same_parameters(self):
        params, once, tx = stacked(), fz.precompute(scanned, LAST_TWO), fz.freeze(optax.adamw(1e-2), LAST_TWO)
        features, needed = jax.jit(once.before)(params, X), once.needed(params, X)
        assert jax.tree.map(jnp.shape, needed)["layers"].values == (2, 16, 16)

        @functools.partial(jax.jit, static_argnums=0)
        def step(fun, params, state, *args):
            grads = fz.grad(fun, LAST_TWO)(params, *args)
            updates, state = tx.update(grads, state, params)
            return fz.apply_updates(params, updates), state

        states = tx.init(params), tx.init(needed)
        for _ in range(3):
            params, full = step(scanned, params, states[0], X)
            needed, small = step(once.after, needed, states[1], features, X)
            states = full, small
        assert_equal_up_to_rounding(needed["head"], params["head"])
        assert_equal_up_to_rounding(needed["layers"].values, params["layers"][4:])


class TestErrors:
    def test_features_of_another_spec_or_shape(self):
        params, once = three_layers(), fz.precompute(mlp, FROZEN)
        features = once.before(params, X)
        with pytest.raises(ValueError, match="computed by another program"):
            once.after(params, fz.precompute(mlp, "encoder").before(params, X), X)
        with pytest.raises(ValueError, match="computed by another program"):
            once.after(params, once.before(params, X[:5]), X)
        for wrong in (X, [*features, X], [], None, features[0][:3]):
            with pytest.raises(ValueError, match=r"do not fit(.|\n)*float32\[32, 16\]"):
                once.after(params, wrong, X)
        assert_equal_up_to_rounding(once.after(params, [features[0]], X), mlp(params, X))

    def test_a_gradient_of_more_than_the_spec_says(self):
        params, once = three_layers(), fz.precompute(mlp, FROZEN)
        features = once.before(params, X)
        with pytest.raises(ValueError, match=r"computed with a different spec\n  at: middle"):
            fz.grad(once.after, "encoder")(params, features, X)
        assert fz.grad(once.after, [*FROZEN])(params, features, X)["head"].any()

    def test_a_gradient_of_less_than_the_spec_says(self):
        params, once = three_layers(), fz.precompute(mlp, "encoder")
        grads = fz.grad(once.after, FROZEN)(params, once.before(params, X), X)
        assert_equal_up_to_rounding(grads, fz.grad(mlp, FROZEN)(params, X))

    def test_missing_parameters(self):
        params, once = text(), fz.precompute(tied, ["embed", "head"])
        features, hole = once.before(params, TOKENS), optax.MaskedNode()
        with pytest.raises(ValueError, match=r"missing\n  at: middle(.|\n)*a trainable leaf"):
            once.after({**params, "middle": hole}, features, TOKENS)
        with pytest.raises(ValueError, match=r"missing\n  at: embed(.|\n)*read by transpose at .*test_precompute.py"):
            once.after({**params, "embed": hole}, features, TOKENS)
        with pytest.raises(ValueError, match="full parameters"):
            once.before({**params, "embed": hole}, TOKENS)
        with pytest.raises(ValueError, match="shapes of the missing"):
            once.after({**params, "head": hole}, list(features), TOKENS)
        value = once.after({**params, "head": hole}, features, TOKENS)
        np.testing.assert_allclose(value, tied(params, TOKENS), rtol=1e-6)

    def test_frozen_rows_that_are_read(self):
        params, once = stacked(), fz.precompute(scanned, FIRST_TWO)
        assert once.needed(params, X)["layers"] is params["layers"]
        rows = fz.partition(params["layers"], FIRST_TWO["layers"])[0]
        with pytest.raises(ValueError, match=r"missing\n  at: layers\n  got: only the trainable rows"):
            once.after({**params, "layers": rows}, once.before(params, X), X)


class TestExplain:
    def test_counts_and_lists(self):
        report = fz.precompute(mlp, "encoder").explain(three_layers(), X)
        assert report.flops_before == 2 * 32 * 8 * 16 + 32 * 16
        assert report.bytes == 32 * 16 * 4
        assert (report.not_needed, report.not_needed_bytes) == (("encoder",), 8 * 16 * 4)
        [(operation, why)] = report.stopped_by
        assert operation.startswith("dot_general at")
        assert "test_precompute.py" in operation
        assert why == "middle, which trains"
        assert "computed once: 8.7 kFLOP" in str(report)

    @pytest.mark.parametrize("kind", ["forward", "reverse", "Python loop"])
    def test_a_scan_counts_with_its_length(self, kind):
        frozen = FIRST_TWO | {"head": False} if kind == "reverse" else LAST_TWO
        loss = in_a_python_loop if kind == "Python loop" else functools.partial(scanned, reverse=kind == "reverse")
        report = fz.precompute(loss, frozen).explain(stacked(), X)
        assert report.flops_before == pytest.approx(2 * 32 * 8 * 16 + 4 * (2 * 32 * 16 * 16 + 2 * 32 * 16), rel=1e-3)
        assert report.not_needed_bytes == (8 * 16 + 16 * 16 + 4 * 16 * 16) * 4
        assert [feature.shape for feature in report.features] == [(32, 16)]

    def test_of_shapes(self):
        shapes = jax.eval_shape(stacked), jax.ShapeDtypeStruct(X.shape, X.dtype)
        once = fz.precompute(scanned, LAST_TWO)
        assert str(once.explain(*shapes)) == str(once.explain(stacked(), X))
        assert jax.tree.map(jnp.shape, once.needed(*shapes)) == jax.tree.map(jnp.shape, once.needed(stacked(), X))

    def test_shapes_keep_their_shardings(self):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        shardings = {"layers": NamedSharding(mesh, P("data", "model"))}
        shapes = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings.get(name))
            for name, leaf in jax.eval_shape(stacked).items()
        }
        needed = fz.precompute(scanned, LAST_TWO).needed(shapes, jax.ShapeDtypeStruct(X.shape, X.dtype))
        assert tuple(needed["layers"].values.sharding.spec)[:2] == (None, "model")  # 2 rows do not divide among 4

    def test_plot(self):
        axes = fz.precompute(mlp, FROZEN).explain(three_layers(), X).plot()
        assert [bar.get_width() for bar in axes.patches] == [25_600 / 1e9, pytest.approx(3_265 / 1e9, rel=0.1)]


def test_features_are_a_pytree_that_keeps_its_type():
    params, once = three_layers(), fz.precompute(mlp, FROZEN)
    features = once.before(params, X)
    for other in (jax.tree.map(np.asarray, features), pickle.loads(pickle.dumps(features)), jax.device_get(features)):
        assert type(other) is fz.Features
        assert_equal_up_to_rounding(once.after(once.needed(params, X), other, X), mlp(params, X))
    assert math.prod(features[0].shape) == 32 * 16


def test_importing_it_loads_no_flow_algorithm():
    code = "import sys, optax_freeze; sys.exit('scipy.sparse.csgraph' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestDigest:
    def digest(self, loss, *args):
        return fz.precompute(loss, FROZEN, example_axis=0).before(three_layers(), *(args or (X,))).cut

    def test_is_the_same_in_every_process(self):
        code = """
import jax, jax.numpy as jnp, optax_freeze as fz
spec, mesh = jax.sharding.PartitionSpec(), jax.make_mesh((1, 1), ("data", "model"))
sort = jax.shard_map(jnp.sort, mesh=mesh, in_specs=spec, out_specs=spec)
def loss(p, x):
    h = jax.lax.scan(lambda h, w: (jax.nn.gelu(h * w), None), sort(x @ p["encoder"]), p["middle"])[0]
    return jnp.sum(h @ p["head"])
p = {"encoder": jnp.ones((8, 16)), "middle": jnp.ones((16, 16)), "head": jnp.ones((16, 3))}
print(fz.precompute(loss, ["encoder", "middle"]).before(p, jnp.ones((4, 8))).cut)
"""
        run = functools.partial(
            subprocess.run, [sys.executable, "-c", code], check=True, capture_output=True, text=True
        )
        one, other = (run(env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "7"))
        assert one == other != ""

    def test_does_not_depend_on_the_number_of_examples(self):
        assert self.digest(mlp, X) == self.digest(mlp, X[:7])

    def test_tells_programs_apart(self):
        def in_scan(step, **options):
            return lambda p, x: lax.scan(step, x @ p["encoder"], p["middle"], **options)[0]

        trunks = [
            lambda p, x: jnp.tanh(x @ p["encoder"]) @ p["middle"],
            lambda p, x: jnp.tanh(x @ p["encoder"]) @ p["middle"].T,
            lambda p, x: jnp.sin(x @ p["encoder"]) @ p["middle"],
            lambda p, x: jnp.tanh(2 * x @ p["encoder"]) @ p["middle"],
            in_scan(lambda h, w: (h - w, None)),
            in_scan(lambda h, w: (w - h, None)),
            in_scan(lambda h, w: (h - w, None), reverse=True),
        ]
        digests = {self.digest(lambda p, x, trunk=trunk: jnp.sum(trunk(p, x) @ p["head"])) for trunk in trunks}
        assert len(digests) == len(trunks)


def test_a_batch_that_only_before_reads_may_be_a_shape():
    params, once = three_layers(), fz.precompute(mlp, FROZEN)
    value = once.after(params, once.before(params, X), jax.eval_shape(lambda: X))
    assert_equal_up_to_rounding(value, mlp(params, X))


def test_a_loss_may_close_over_a_random_key():
    key = jax.random.key(0)
    params, once = three_layers(), fz.precompute(lambda p, x: dropped_out(p, x, key), FROZEN)
    np.testing.assert_allclose(once.after(params, once.before(params, X), X), dropped_out(params, X, key), rtol=1e-6)
    with pytest.raises(ValueError, match="examples are mixed"):  # the noise of an example depends on its place
        fz.precompute(lambda p, x: dropped_out(p, x, key), FROZEN, example_axis=0).before(params, X)


def summed(n):
    inside = jax.checkpoint(lambda h: jnp.cumsum(h, 1) * h[:, :n].sum(1, keepdims=True))
    return lambda p, x: inside(x @ p["encoder"])


ONE, OTHER = jnp.arange(8.0), 2 * jnp.arange(8.0)
HARDLY_DIFFERENT = {
    "constants": (lambda p, x: (x - ONE) @ p["encoder"], lambda p, x: (x - OTHER) @ p["encoder"]),
    "constants of NumPy": (
        lambda p, x: (x - np.asarray(ONE)) @ p["encoder"],
        lambda p, x: (x - np.asarray(OTHER)) @ p["encoder"],
    ),
    "sizes inside of operations": (summed(2), summed(3)),
    "sizes of what all examples share": (
        lambda p, x: x @ p["encoder"] * p["middle"][:4].sum(),
        lambda p, x: x @ p["encoder"] * p["middle"][:7].sum(),
    ),
}


@pytest.mark.parametrize("example_axis", [0, None])
@pytest.mark.parametrize("name", HARDLY_DIFFERENT)
def test_features_of_a_program_that_is_hardly_different_are_refused(name, example_axis):
    params = three_layers()
    a, b = (
        fz.precompute(lambda p, x, f=f: jnp.sum(f(p, x) @ p["head"]), FROZEN, example_axis=example_axis)
        for f in HARDLY_DIFFERENT[name]
    )
    assert a.after(params, a.before(params, X), X) != b.after(params, b.before(params, X), X)
    with pytest.raises(ValueError, match="computed by another program"):
        b.after(params, a.before(params, X), X)


def test_a_parameter_and_an_argument_of_one_name():
    params = {"x": jnp.arange(9.0).reshape(3, 3), "head": jnp.ones((3, 1))}
    x = jnp.ones((3, 3)).at[0, 1].set(2)
    one = fz.precompute(lambda p, x: jnp.sum(jnp.sort(p["x"] @ x) @ p["head"]), "x")
    other = fz.precompute(lambda p, x: jnp.sum(jnp.sort(x @ p["x"]) @ p["head"]), "x")
    with pytest.raises(ValueError, match="computed by another program"):
        other.after(params, one.before(params, x), x)


def test_a_frozen_number_may_become_an_array_of_its_dtype():
    """As in the first update of a jitted step, which adds -0.0 to it."""
    params = {"encoder": jnp.ones((3, 8)), "scale": 2.0, "head": jnp.ones((8, 1))}

    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["encoder"] * params["scale"]) @ params["head"])

    once, x = fz.precompute(loss, ["encoder", "scale"]), jnp.ones((4, 3))
    features = once.before(params, x)
    for scale in (2.0, jnp.array(2.0), jnp.float32(2.0)):
        assert once.after({**params, "scale": scale}, features, x) == once.after(params, features, x)
        assert once.before({**params, "scale": scale}, x).cut == features.cut


@pytest.mark.parametrize("scale", [jnp.array(2.0), 2.0], ids=["array", "number"])
def test_weak_types_of_missing_parameters_are_known(scale):
    params = {"encoder": jnp.ones((8, 16)), "scale": scale, "head": jnp.ones((16, 3))}
    assert jax.typeof(scale).weak_type

    def loss(params, x):
        h = jnp.tanh(x @ params["encoder"].astype(x.dtype)) * params["scale"]
        return jnp.sum(jnp.sort(h) @ params["head"].astype(x.dtype))

    once, x = fz.precompute(loss, ["encoder", "scale"]), X.astype(jnp.bfloat16)
    features = once.before(params, x)
    assert features[0].dtype == jnp.bfloat16
    assert_equal_up_to_rounding(once.after(once.needed(params, x), features, x), loss(params, x))


def test_features_in_another_place():
    params, once = three_layers(), fz.precompute(mlp, FROZEN)
    features = once.before(params, X)
    for function in (once.after, fz.grad(once.after, FROZEN)):
        with pytest.raises(ValueError, match="features come after the parameters"):
            function(params, X, features)
        with pytest.raises(ValueError, match="takes the features before the other arguments"):
            function(params, X)
