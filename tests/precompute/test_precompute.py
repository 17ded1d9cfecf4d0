"""What is computed once: which values are stored, and that nothing else changes."""

import functools
import itertools
import os
import pickle
import subprocess
import sys

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_equal_up_to_rounding, bits
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze._jax_internals import inside
from optax_freeze._precompute import example_axis as example_axis_module
from optax_freeze._program import dependence
from optax_freeze._program.operations import computation

X = jax.random.normal(jax.random.key(0), (32, 8))
TOKENS = jax.random.randint(jax.random.key(1), (4, 7), 0, 50)
FROZEN = ["encoder", "middle"]


def normal(seed, **shapes):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


PARAMS = normal(2, encoder=(8, 16), middle=(16, 16), head=(16, 3))
STACKED = PARAMS | {"layers": normal(3, layers=(6, 16, 16))["layers"] / 4}
SCALED = STACKED | {"scales": jnp.arange(6.0)}
TEXT = normal(4, embed=(50, 16), middle=(16, 16), head=(16, 3))


def mlp(params, x):
    h = jnp.tanh(jnp.tanh(x @ params["encoder"]) @ params["middle"])
    return jnp.mean(jnp.square(h @ params["head"]))


MLP = fz.precompute(mlp, FROZEN)


def scanned(params, x, wrap=lambda f: f, **options):
    step = wrap(lambda h, w: h + jnp.tanh(h @ w))
    h, _ = lax.scan(lambda h, w: (step(h, w), None), x @ params["encoder"], params["layers"], **options)
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


def tied(params, tokens):
    return jnp.mean(jnp.tanh(params["embed"][tokens] @ params["middle"]) @ params["embed"].T)


def activated(params, x):
    return jnp.sum(jax.nn.gelu(jax.nn.relu(x @ params["encoder"])) @ params["middle"] @ params["head"])


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


MASK = jnp.asarray(np.random.RandomState(0).rand(16, 16) < 0.5)
LAST_TWO = {"layers": fz.rows(slice(0, 4)), "encoder": True, "middle": True, "head": False}
FIRST_TWO = LAST_TWO | {"layers": fz.rows(slice(2, 6))}
COLUMNS = {"encoder": True, "middle": True, "head": fz.rows(slice(0, 2), axis=1)}

CASES = {
    "custom_jvp": (activated, PARAMS, "encoder", X),
    "while_loop": (until, PARAMS, FROZEN, X),
    "scan, whole": (scanned, STACKED, fz.all_except("head"), X),
    "scan, rows": (scanned, STACKED, LAST_TWO, X),
    "scan, rows, remat": (functools.partial(scanned, wrap=jax.checkpoint), STACKED, LAST_TWO, X),
    "scan, rows, reversed": (functools.partial(scanned, reverse=True), STACKED, FIRST_TWO, X),
    "scan, two stacks": (stacked_results, SCALED, LAST_TWO | {"scales": fz.rows(slice(0, 5))}, X),
    "scan, one stack trains": (stacked_results, SCALED, LAST_TWO | {"scales": False, "encoder": True}, X),
    "Python loop, rows": (in_a_python_loop, STACKED, LAST_TWO, X),
    "tied": (tied, TEXT, ["embed", "head"], TOKENS),
    "elements": (mlp, PARAMS, {"encoder": True, "middle": fz.elements(MASK), "head": False}, X),
    "compact": (mlp, PARAMS, {"encoder": True, "middle": fz.elements(MASK, compact=True), "head": False}, X),
    "mixed precision": (mixed_precision, PARAMS, FROZEN, X),
    "integers": (lambda params, x: mlp(params, x.astype(jnp.float32)), PARAMS, FROZEN, X.astype(jnp.int8)),
    "vmap": (lambda params, x: jnp.mean(jax.vmap(lambda row: mlp(params, row[None]))(x)), PARAMS, FROZEN, X),
    "elementwise": (
        lambda params, x: jnp.sum(params["head"] * jnp.sin(params["encoder"] * x)),
        {"encoder": jnp.ones(3), "head": jnp.ones(3)},
        "encoder",
        jnp.ones((5, 3)),
    ),
    "NumPy": (mlp, jax.tree.map(np.asarray, PARAMS), FROZEN, np.asarray(X)),
}


def all_close(got, expected, rtol=1e-5, atol=0):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), got, expected)


def trained_on_features(once, frozen, params, *args):
    """Value and gradient from the features, with the needed parameters alone."""
    features = jax.jit(once.before)(params, *args)
    return jax.jit(fz.value_and_grad(once.after, frozen))(once.needed(params, *args), features, *args)


def check(loss, frozen, params, *args, **options):
    """The value and the gradient of the trainable part, from the features, are those of the function."""
    got = trained_on_features(fz.precompute(loss, frozen, **options), frozen, params, *args)
    assert_equal_up_to_rounding(got, jax.jit(fz.value_and_grad(loss, frozen))(params, *args))


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_function(name):
    """What trains is not read before."""
    loss, params, frozen, batch = CASES[name]
    once = fz.precompute(loss, frozen)
    rounded, options = {}, {}
    if name == "mixed precision":  # XLA computes a chain of bfloat16 operations in float32, unless it is stored between
        rounded, options = {"dtype": jnp.bfloat16, "roundings": 1}, {"xla_allow_excess_precision": False}
    whole = jax.jit(fz.value_and_grad(loss, frozen), compiler_options=options)(params, batch)
    assert_equal_up_to_rounding(trained_on_features(once, frozen, params, batch), whole, **rounded)
    before = jax.jit(once.before)
    trainable, rest = fz.partition(params, frozen)
    poisoned = fz.combine(jax.tree.map(lambda x: x * np.nan, trainable), rest)
    assert bits(before(poisoned, batch)) == bits(before(params, batch))


class TestWhatIsStored:
    def test_one_activation_where_one_suffices(self):
        def loss(params, tokens):
            h = params["embed"][tokens]
            for w in params["layers"]:
                h = h + jnp.tanh((h - h.mean(-1, keepdims=True)) @ w)
            return jnp.sum((h.mean(1) @ params["head"]) ** 2)

        params = TEXT | {"layers": list(STACKED["layers"])}
        for trains, shape in {
            ("layers/5", "head"): (4, 7, 16),  # the residual stream, which is read three times
            ("head",): (4, 16),  # behind the mean
        }.items():
            report = fz.precompute(loss, fz.all_except(*trains)).explain(params, TOKENS)
            assert [f.shape for f in report.features] == [shape]

    @pytest.mark.parametrize("recurring", ["x", ("x", "keys")])
    def test_mean_and_spread_unless_the_keys_of_the_samples_recur(self, recurring):
        def loss(params, x, keys):
            mean, log_variance = jnp.split(jnp.tanh(x @ params["encoder"]) @ params["middle"], 2, axis=-1)
            noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(keys)
            sample = mean + jnp.exp(0.5 * jnp.clip(log_variance, -30, 20)) * noise
            return jnp.mean((sample @ params["head"][:8]) ** 2)

        params, keys = PARAMS, jax.random.split(jax.random.key(4), (2, 32))
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

        [feature] = MLP.explain(PARAMS, X).features
        assert feature.operation.startswith("tanh")
        [feature] = fz.precompute(narrow, "encoder").before(PARAMS, X)
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
        assert [f.shape for f in once.before(PARAMS, batch)] == [(32, 16)]
        assert once.needed(PARAMS, batch)["encoder"] == optax.MaskedNode()
        assert once.needed(PARAMS, batch)["middle"].shape == (16, 16)

    @pytest.mark.usefixtures("as_users_compile")
    def test_a_comparison_instead_of_one_of_its_operands(self):
        """Thresholds that are stored, compared with values that are computed again, select others."""

        def loss(params, x):
            y = x * params["encoder"][0, :8] * 1.3 + 0.1
            y = y * y + 0.3 * y
            y = jnp.where(y >= lax.top_k(y, 3)[0][:, 2:], jnp.sin(x @ params["head"][:8, :1]), 0.0)
            return jnp.sum(y * jnp.cos(jnp.arange(len(x)))[:, None])

        once, x = fz.precompute(loss, "encoder"), jax.random.normal(jax.random.key(4), (128, 8))
        [feature] = features = jax.jit(once.before)(PARAMS, x)
        assert (feature.shape, feature.dtype) == ((128, 8), bool)
        grad = jax.jit(fz.grad(once.after, FROZEN))(PARAMS, features, x)["head"]
        assert_equal_up_to_rounding(grad, jax.jit(jax.grad(loss))(PARAMS, x)["head"], roundings=64)

    def test_two_where_two_are_read(self):
        def loss(params, x):
            one, other = x @ params["encoder"], jnp.sort(x @ params["middle"][:8])
            return jnp.sum(one @ params["head"]) + jnp.sum(other @ params["head"])

        assert len(fz.precompute(loss, FROZEN).before(PARAMS, X)) == 2

    def test_known_outputs(self):
        def loss(params, x):
            h = jnp.tanh(x @ params["encoder"])
            return jnp.mean((h @ params["head"]) ** 2), {"h": h, "x": x, "name": "loss", "encoder": params["encoder"]}

        once = fz.precompute(loss, "encoder")
        [feature] = once.before(PARAMS, X)
        (value, aux), grads = fz.value_and_grad(once.after, "encoder", has_aux=True)(PARAMS, [feature], X)
        expected = fz.value_and_grad(loss, "encoder", has_aux=True)(PARAMS, X)
        assert aux["name"] == "loss"
        assert once.needed(PARAMS, X)["encoder"] is PARAMS["encoder"]  # it is returned
        all_close((value, grads), (expected[0][0], expected[1]))
        assert bits(aux["h"]) == bits(feature)


class TestArguments:
    def test_a_key_may_differ_each_time(self):
        once = fz.precompute(dropped_out, FROZEN)
        features = once.before(PARAMS, X, jax.random.key(0))
        assert bits(features) == bits(once.before(PARAMS, X, jax.eval_shape(jax.random.key, 0)))
        report = once.explain(PARAMS, X, jax.random.key(0))
        assert [why for _, why in report.stopped_by] == ["key, which does not recur"]
        for key in jax.random.split(jax.random.key(0), 3):
            value = once.after(PARAMS, features, X, key)
            np.testing.assert_allclose(value, dropped_out(PARAMS, X, key), rtol=1e-6)

    @pytest.mark.parametrize("recurring", [(1, 2), [1, "key"], ("x", "key"), ("key", 1)])
    def test_a_key_that_recurs_is_read_before(self, recurring):
        once = fz.precompute(dropped_out, FROZEN, recurring)
        assert jax.tree.leaves(once.needed(PARAMS, X, jax.random.key(0))) == [PARAMS["head"]]
        features = once.before(PARAMS, X, jax.random.key(0))
        assert bits(features) == bits(once.before(PARAMS, key=jax.random.key(0), x=X))
        value = once.after(PARAMS, features, X, jax.random.key(5))
        assert_equal_up_to_rounding(value, dropped_out(PARAMS, X, jax.random.key(0)))

    @pytest.mark.parametrize("argnums", [1, 2])
    def test_parameters_at_another_position(self, argnums):
        at_1 = lambda x, params, key: dropped_out(params, x, key)  # noqa: E731
        at_2 = lambda *args: dropped_out(args[2], *args[:2])  # noqa: E731
        once = fz.precompute([at_1, at_2][argnums - 1], FROZEN, argnums=argnums)
        key, expected = jax.random.key(0), fz.precompute(dropped_out, FROZEN)
        small, features, its = once.needed(PARAMS, X, key), once.before(PARAMS, X, key), expected.before(PARAMS, X, key)
        assert bits(features) == bits(its)
        assert bits(once.after(small, features, X, key)) == bits(expected.after(small, its, X, key))
        [(_, why)] = once.explain(PARAMS, X, key).stopped_by
        assert why == f"{'key' if argnums == 1 else 'argument 1'}, which does not recur"
        both = fz.precompute(at_1, FROZEN, (0, 2), argnums=1)
        assert jax.tree.leaves(both.needed(PARAMS, X, key)) == [PARAMS["head"]]

    def test_positions_among_any_number_of_arguments(self):
        def loss(params, *arrays, scale):
            return jnp.sum(arrays[0] @ params["encoder"] + arrays[1] @ params["encoder"] * scale)

        report = fz.precompute(loss, "encoder", 2).explain(PARAMS | {"b": 1.0}, X, X, scale=2.0)
        assert {why for _, why in report.stopped_by} == {
            "argument 1, which does not recur",
            "scale, which does not recur",
        }

    def test_python_values_and_nested_batches(self):
        def loss(params, batch, train, *, scale=2.0):
            h = jnp.tanh(batch["x"][0] @ params["encoder"])
            return jnp.mean(jnp.square((h * 2 if train else h) @ params["head"])) * scale

        once, batch = fz.precompute(loss, "encoder"), {"x": [X], "name": "digits", "none": None}
        features = once.before(PARAMS, batch, True, scale=0.5)
        value = once.after(PARAMS, features, batch, True, scale=3.0)
        np.testing.assert_allclose(value, loss(PARAMS, batch, True, scale=3.0), rtol=1e-6)
        with pytest.raises(ValueError, match="computed by another program"):
            once.after(PARAMS, features, batch, False, scale=3.0)

    def test_python_may_loop_over_a_number_that_recurs(self):
        def loss(params, x, steps):
            for _ in range(steps):
                x = jnp.tanh(x)
            return jnp.sum(x @ params["encoder"] @ params["head"])

        once = fz.precompute(loss, "encoder", ("x", "steps"))
        assert_equal_up_to_rounding(once.after(PARAMS, once.before(PARAMS, X, 2), X, 2), loss(PARAMS, X, 2))

    def test_a_batch_that_only_before_reads_may_be_a_shape(self):
        value = MLP.after(PARAMS, MLP.before(PARAMS, X), jax.eval_shape(lambda: X))
        assert_equal_up_to_rounding(value, mlp(PARAMS, X))

    def test_a_loss_may_close_over_a_random_key(self):
        key = jax.random.key(0)
        once = fz.precompute(lambda p, x: dropped_out(p, x, key), FROZEN)
        value = once.after(PARAMS, once.before(PARAMS, X), X)
        np.testing.assert_allclose(value, dropped_out(PARAMS, X, key), rtol=1e-6)
        with pytest.raises(ValueError, match="examples are mixed"):  # the noise of an example depends on its place
            fz.precompute(once.fun, FROZEN, example_axis=0).before(PARAMS, X)

    def test_a_loss_may_close_over_a_tracer_that_is_not_stored(self):
        @jax.jit
        def features_of(scale):
            loss = lambda p, x: mlp(p, x) + jnp.sum(jnp.sort(x * scale) @ p["encoder"])  # noqa: E731
            return fz.precompute(loss, FROZEN).before(PARAMS, X)

        assert [f.shape for f in features_of(2.0)] == [(32, 16)]

    def test_a_frozen_number_may_become_an_array_of_its_dtype(self):
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
    def test_weak_types_of_missing_parameters_are_known(self, scale):
        params = {"encoder": jnp.ones((8, 16)), "scale": scale, "head": jnp.ones((16, 3))}
        assert jax.typeof(scale).weak_type

        def loss(params, x):
            h = jnp.tanh(x @ params["encoder"].astype(x.dtype)) * params["scale"]
            return jnp.sum(jnp.sort(h) @ params["head"].astype(x.dtype))

        once, x = fz.precompute(loss, ["encoder", "scale"]), X.astype(jnp.bfloat16)
        features = once.before(params, x)
        assert features[0].dtype == jnp.bfloat16
        assert_equal_up_to_rounding(once.after(once.needed(params, x), features, x), loss(params, x))


def in_a_scan(function):
    return lambda *args: lax.scan(lambda total, _: (total + function(*args), None), 0.0, length=1)[0]


class TestTransformations:
    def test_vmap_and_scan_over_batches(self):
        batches = X.reshape(4, 8, 8)
        features, needed = jax.vmap(MLP.before, (None, 0))(PARAMS, batches), MLP.needed(PARAMS, batches[0])
        got = jax.vmap(fz.value_and_grad(MLP.after, FROZEN), (None, 0, 0))(PARAMS, features, batches)
        expected = jax.vmap(fz.value_and_grad(mlp, FROZEN), (None, 0))(PARAMS, batches)
        all_close(got, expected)
        _, values = lax.scan(lambda _, pair: (None, MLP.after(needed, *pair)), None, (features, batches))
        all_close(values, expected[0])

    @pytest.mark.parametrize("wrap", [lambda f: lambda *args: f(*args), jax.jit, jax.checkpoint, in_a_scan])
    def test_a_gradient_of_what_is_frozen_is_refused_in_any_function(self, wrap):
        """It would be zero, or lack the path through the features."""
        once = fz.precompute(tied, ["embed", "head"])
        features, after = once.before(TEXT, TOKENS), wrap(once.after)
        for grad in (jax.grad(after), jax.jit(fz.grad(after, "head")), fz.grad(after, "middle")):
            with pytest.raises(ValueError, match=r"different spec\n  at: embed"):
                grad(TEXT, features, TOKENS)
        grads = fz.grad(after, ["embed", "head"])(TEXT, features, TOKENS)
        assert_equal_up_to_rounding(grads, fz.grad(tied, ["embed", "head"])(TEXT, TOKENS))

    def test_a_stack_that_trains_is_differentiated_step_by_step(self):
        """Zeros of the size of the whole stack in each step would take as much memory as the stack."""

        def loss(params, x):
            stacks = params["layers"], params["scales"]
            h, _ = lax.scan(lambda h, ws: (jnp.tanh(h @ ws[0] @ ws[1]), None), x @ params["encoder"], stacks)
            return jnp.sum(h @ params["head"])

        params = STACKED | {"scales": STACKED["layers"] + 1}
        once = fz.precompute(loss, LAST_TWO | {"scales": fz.rows(slice(0, 3))})
        stacks, features = {name: params[name] for name in ("layers", "scales")}, once.before(params, X)
        closed = jax.make_jaxpr(jax.grad(lambda stacks: once.after(params | stacks, features, X)))(stacks)
        scans = [eqn for eqn in closed.eqns if eqn.primitive.name == "scan"]
        carried = [v.aval.shape for eqn in scans for v in eqn.outvars[: inside(eqn).carried]]
        assert [eqn.params["length"] for eqn in scans] == [3, 3]
        assert (6, 16, 16) not in carried

    def test_remat_in_a_step_of_a_loop_stays(self):
        once = fz.precompute(functools.partial(scanned, wrap=jax.checkpoint), LAST_TWO)
        text = str(jax.make_jaxpr(once.after)(STACKED, once.before(STACKED, X), X))
        assert "remat" in text or "checkpoint" in text

    def test_other_operations_stay_as_they_are(self):
        def loss(params, x):
            halves = jnp.split(jnp.tanh(x @ params["encoder"]) @ params["middle"], 2, 1)
            return jnp.sum(jnp.tanh(halves[0]) * halves[1]) + jnp.sum(params["head"])

        once = fz.precompute(loss, "encoder")
        names = [eqn.primitive.name for eqn in jax.make_jaxpr(once.after)(PARAMS, once.before(PARAMS, X), X).eqns]
        assert [name for name in names if "sl" in name or "sp" in name] == ["split"]

    def test_a_restricted_function(self):
        once, (trainable, rest) = fz.precompute(scanned, LAST_TWO), fz.partition(STACKED, LAST_TWO)
        grads = jax.grad(fz.restrict(once.after, rest))(trainable, once.before(STACKED, X), X)
        assert_equal_up_to_rounding(grads, fz.grad(scanned, LAST_TWO)(STACKED, X))

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

        once = fz.precompute(loss, "encoder")
        features = jax.jit(once.before)(PARAMS, X)
        once.needed(PARAMS, X)
        once.explain(PARAMS, X)
        jax.effects_barrier()
        assert calls == []
        got = jax.jit(fz.value_and_grad(once.after, "encoder"))(PARAMS, features, X)
        all_close(got, fz.value_and_grad(loss, "encoder")(PARAMS, X))
        jax.effects_barrier()
        assert calls == [(32, 16), (32, 16)]

    def test_names_of_operations_are_kept(self):
        def loss(params, x):
            with jax.named_scope("trunk"):
                h = jnp.tanh(x @ params["encoder"])
            with jax.named_scope("top"):
                return jnp.sum(h @ params["head"])

        once = fz.precompute(loss, "encoder")
        before = jax.jit(once.before).lower(PARAMS, X).as_text(debug_info=True)
        after = jax.jit(once.after).lower(PARAMS, once.before(PARAMS, X), X).as_text(debug_info=True)
        assert "trunk/dot_general" in before
        assert "trunk" not in after
        assert "top/dot_general" in after


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


class TestDevices:
    def test_sharded(self):
        mesh = mesh_of(AxisType.Auto)
        place = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))  # noqa: E731
        specs = {"encoder": (None, "model"), "middle": ("model", None), "head": ()}
        params, x = {name: place(array, *specs[name]) for name, array in PARAMS.items()}, place(X, "data")

        def loss(params, x):
            h = lax.with_sharding_constraint(jnp.tanh(x @ params["encoder"]), NamedSharding(mesh, P("data", None)))
            return jnp.mean(jnp.square(jnp.tanh(h @ params["middle"]) @ params["head"]))

        [feature] = jax.jit(fz.precompute(loss, FROZEN, example_axis=0).before)(params, x)
        assert feature.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
        check(loss, FROZEN, params, x, example_axis=0)

    @pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="explicit axes changed much")
    @pytest.mark.parametrize(
        "place", [lambda x: x, lambda x: jax.device_put(np.asarray(x), P())], ids=["of jit", "of a file"]
    )
    def test_features_of_automatic_axes(self, place):
        """Features that come from a file have the explicit axes of the mesh."""
        inside = jax.sharding.auto_axes(mlp, axes="data", out_sharding=P())
        once = fz.precompute(inside, FROZEN)
        with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)):
            features = jax.tree.map(place, jax.jit(once.before)(PARAMS, X))
            found = jax.jit(fz.value_and_grad(once.after, FROZEN))(PARAMS, features, X)
        assert_equal_up_to_rounding(found, fz.value_and_grad(mlp, FROZEN)(PARAMS, X))

    def test_shard_map_in_the_function(self):
        shard_map = functools.partial(jax.shard_map, mesh=mesh_of(AxisType.Auto))

        def loss(params, x):
            trunk = shard_map(lambda w, x: jnp.tanh(x @ w), in_specs=(P(), P("data")), out_specs=P("data"))
            head = lambda w, h: lax.pmean(jnp.mean(jnp.square(h @ w)), "data")  # noqa: E731
            h = trunk(params["encoder"], x)
            return shard_map(head, in_specs=(P(), P("data")), out_specs=P())(params["head"], h)

        check(loss, FROZEN, PARAMS, X)

    def test_inside_of_shard_map(self):
        once = fz.precompute(mlp, FROZEN, example_axis=0)
        shard_map = functools.partial(jax.shard_map, mesh=mesh_of(AxisType.Auto))
        features = jax.jit(shard_map(once.before, in_specs=(P(), P("data")), out_specs=P("data")))(PARAMS, X)
        needed = once.needed(PARAMS, X)
        all_close(once.after(needed, features, X), mlp(PARAMS, X))  # features may leave it

        def step(params, features, x):
            return fz.value_and_grad(lambda p: lax.pmean(once.after(p, features, x), "data"), FROZEN)(params)

        after = shard_map(step, in_specs=(P(), P("data"), P("data")), out_specs=P())
        all_close(jax.jit(after)(needed, features, X), fz.value_and_grad(mlp, FROZEN)(PARAMS, X), 1e-4, 1e-5)


class TestModels:
    def test_nnx_and_a_random_key_among_the_parameters(self):
        model = nnx.Sequential(
            nnx.Linear(8, 16, rngs=nnx.Rngs(0)),
            nnx.Dropout(0.3, rngs=nnx.Rngs(1)),
            nnx.Linear(16, 16, rngs=nnx.Rngs(2)),
            nnx.Linear(16, 4, rngs=nnx.Rngs(3)),
        )

        def explain():
            graph, state = nnx.split(model)
            loss = lambda state, x: jnp.mean(nnx.merge(graph, state)(x) ** 2)  # noqa: E731
            return fz.precompute(loss, fz.all_except("layers/3/**")).explain(state, X)

        report = explain()
        assert set(report.not_needed) == {"layers/0/bias", "layers/0/kernel"}
        assert any("a random key among the parameters" in why for _, why in report.stopped_by)
        model.eval()
        assert "layers/2/kernel" in explain().not_needed

    def test_training_gives_the_same_parameters(self):
        params, once, tx = STACKED, fz.precompute(scanned, LAST_TWO), fz.freeze(optax.adamw(1e-2), LAST_TWO)
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


class TestCombine:
    """After steps that donate what ``needed`` returned, ``params`` lacks each array that both share."""

    @pytest.mark.parametrize("name", ["leaves", "a frozen leaf that is read again", "rows", "rows that are read again"])
    def test_after_donating_steps(self, name):
        fun, frozen, base, shared = {
            "leaves": (mlp, FROZEN, PARAMS, {"head"}),
            "a frozen leaf that is read again": (tied, "embed", TEXT, {"embed"}),
            "rows": (scanned, LAST_TWO, STACKED, {"head"}),
            "rows that are read again": (mlp, COLUMNS, PARAMS, {"head"}),
        }[name]
        x = TOKENS if fun is tied else X
        params, kept = jax.tree.map(jnp.copy, base), jax.tree.map(np.asarray, base)
        once, tx = fz.precompute(fun, frozen), fz.freeze(optax.adamw(1e-2), frozen)
        features, small = jax.jit(once.before)(params, x), once.needed(params, x)
        step, state = jax.jit(fz.train_step(once.after, tx), donate_argnums=(0, 1)), tx.init(small)
        for _ in range(2):
            small, state, _ = step(small, state, features, x)
        assert {name for name, leaf in params.items() if leaf.is_deleted()} >= shared
        trained = once.combine(small, params)
        fz.assert_frozen(kept, trained, frozen)
        trainable = fz.partition(trained, frozen)[0]
        assert bits(trainable) == bits(fz.partition(once.combine(trainable, kept), frozen)[0])
        dense, full = jax.jit(fz.train_step(fun, tx)), (kept, tx.init(kept))
        for _ in range(2):
            full = dense(*full, x)[:2]
        assert_equal_up_to_rounding(trained, full[0])

    def test_in_a_compiled_function(self):
        once = fz.precompute(scanned, LAST_TWO)
        small = once.needed(STACKED, X)
        assert bits(jax.jit(once.combine)(small, STACKED)) == bits(STACKED)


class TestErrors:
    """Those in ``wrong_calls.md`` are not repeated here."""

    def test_features_that_do_not_fit(self):
        features = MLP.before(PARAMS, X)
        for wrong in ([*features, X], [], None, features[0][:3]):
            with pytest.raises(ValueError, match=r"do not fit(.|\n)*float32\[32, 16\]"):
                MLP.after(PARAMS, wrong, X)
        assert_equal_up_to_rounding(MLP.after(PARAMS, [features[0]], X), mlp(PARAMS, X))

    def test_features_in_another_place(self):
        features = MLP.before(PARAMS, X)
        for function in (MLP.after, fz.grad(MLP.after, FROZEN)):
            with pytest.raises(ValueError, match="features come after the parameters"):
                function(PARAMS, X, features)
            with pytest.raises(ValueError, match="takes the features before the other arguments"):
                function(PARAMS, X)

    def test_a_gradient_of_less_than_the_spec_says(self):
        once = fz.precompute(mlp, "encoder")
        grads = fz.grad(once.after, FROZEN)(PARAMS, once.before(PARAMS, X), X)
        assert_equal_up_to_rounding(grads, fz.grad(mlp, FROZEN)(PARAMS, X))

    def test_frozen_rows_that_are_read(self):
        once = fz.precompute(scanned, FIRST_TWO)
        assert once.needed(STACKED, X)["layers"] is STACKED["layers"]
        rows = fz.partition(STACKED["layers"], FIRST_TWO["layers"])[0]
        with pytest.raises(ValueError, match=r"missing\n  at: layers\n  got: only the trainable rows"):
            once.after(STACKED | {"layers": rows}, once.before(STACKED, X), X)


class TestExplain:
    def test_counts_and_lists(self):
        report = fz.precompute(mlp, "encoder").explain(PARAMS, X)
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
        frozen = FIRST_TWO if kind == "reverse" else LAST_TWO
        loss = in_a_python_loop if kind == "Python loop" else functools.partial(scanned, reverse=kind == "reverse")
        report = fz.precompute(loss, frozen).explain(STACKED, X)
        assert report.flops_before == pytest.approx(2 * 32 * 8 * 16 + 4 * (2 * 32 * 16 * 16 + 2 * 32 * 16), rel=1e-3)
        assert report.not_needed_bytes == (8 * 16 + 16 * 16 + 4 * 16 * 16) * 4
        assert [feature.shape for feature in report.features] == [(32, 16)]

    def test_of_shapes_which_keep_their_shardings(self):
        shapes, x = jax.eval_shape(lambda: (STACKED, X))
        sharding = NamedSharding(mesh_of(AxisType.Auto), P("data", "model"))
        shapes["layers"] = shapes["layers"].update(sharding=sharding)
        once = fz.precompute(scanned, LAST_TWO)
        assert str(once.explain(shapes, x)) == str(once.explain(STACKED, X))
        needed = once.needed(shapes, x)
        assert jax.tree.map(jnp.shape, needed) == jax.tree.map(jnp.shape, once.needed(STACKED, X))
        assert tuple(needed["layers"].values.sharding.spec)[:2] == (None, "model")  # 2 rows do not divide among 4

    @pytest.mark.parametrize(("count", "example_axis"), [(1100, None), (400, 0)])
    def test_a_long_chain_of_values_that_are_read_twice(self, count, example_axis, monkeypatch):
        """Takes work in proportion to its length, and no depth of Python's stack."""
        work = itertools.count()

        def chain(x):
            for _ in range(count):
                x = x + x
            return x

        def loss(params, x):
            if example_axis is None:
                h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ params["encoder"], chain(params["layers"]))
            else:
                h = x @ params["encoder"] * chain(jnp.broadcast_to(params["scales"].sum(), (len(x), 16)))
            return jnp.sum(h @ params["head"])

        def counted(*args):
            assert next(work) < 50 * count
            return computation(*args)

        for module in (dependence, example_axis_module):
            monkeypatch.setattr(module, "computation", counted)
        once = fz.precompute(loss, LAST_TWO | {"scales": True}, example_axis=example_axis)
        assert "encoder" in once.explain(SCALED, X).not_needed

    def test_plot(self):
        axes = MLP.explain(PARAMS, X).plot()
        assert [bar.get_width() for bar in axes.patches] == [25_600 / 1e9, pytest.approx(3_265 / 1e9, rel=0.1)]


def test_features_are_a_pytree_that_keeps_its_type():
    features = MLP.before(PARAMS, X)
    for other in (jax.tree.map(np.asarray, features), pickle.loads(pickle.dumps(features)), jax.device_get(features)):
        assert type(other) is fz.typing.Features
        assert_equal_up_to_rounding(MLP.after(MLP.needed(PARAMS, X), other, X), mlp(PARAMS, X))


def in_scan(step, **options):
    return lambda p, x: lax.scan(step, x @ p["encoder"], p["middle"], **options)[0]


def summed(n):
    inside = jax.checkpoint(lambda h: jnp.cumsum(h, 1) * h[:, :n].sum(1, keepdims=True))
    return lambda p, x: inside(x @ p["encoder"])


ONE, OTHER = jnp.arange(8.0), 2 * jnp.arange(8.0)
HARDLY_DIFFERENT = {
    "operations": [
        lambda p, x: jnp.tanh(x @ p["encoder"]) @ p["middle"],
        lambda p, x: jnp.tanh(x @ p["encoder"]) @ p["middle"].T,
        lambda p, x: jnp.sin(x @ p["encoder"]) @ p["middle"],
        lambda p, x: jnp.tanh(2 * x @ p["encoder"]) @ p["middle"],
    ],
    "operations in a loop": [
        in_scan(lambda h, w: (h - w, None)),
        in_scan(lambda h, w: (w - h, None)),
        in_scan(lambda h, w: (h - w, None), reverse=True),
    ],
    "constants": [lambda p, x: (x - ONE) @ p["encoder"], lambda p, x: (x - OTHER) @ p["encoder"]],
    "constants of NumPy": [
        lambda p, x: (x - np.asarray(ONE)) @ p["encoder"],
        lambda p, x: (x - np.asarray(OTHER)) @ p["encoder"],
    ],
    "sizes inside of operations": [summed(2), summed(3)],
    "sizes of what all examples share": [
        lambda p, x: x @ p["encoder"] * p["middle"][:4].sum(),
        lambda p, x: x @ p["encoder"] * p["middle"][:7].sum(),
    ],
}


class TestDigest:
    @pytest.mark.parametrize("example_axis", [0, None])
    @pytest.mark.parametrize("name", HARDLY_DIFFERENT)
    def test_tells_hardly_different_programs_apart(self, name, example_axis):
        def digest(trunk):
            once = fz.precompute(lambda p, x: jnp.sum(trunk(p, x) @ p["head"]), FROZEN, example_axis=example_axis)
            return jax.eval_shape(once.before, PARAMS, X).cut

        assert len(set(map(digest, HARDLY_DIFFERENT[name]))) == len(HARDLY_DIFFERENT[name])

    def test_covers_each_value_of_a_large_constant(self):
        large = np.zeros((2**24 + 2, 1), np.float32)
        other = large.copy()
        other[1] = 1

        def digest(constant):
            def loss(p, x):
                return jnp.sum(lax.bessel_i1e(x @ p["encoder"] + jnp.take(constant, 1)) @ p["middle"])

            return jax.eval_shape(fz.precompute(loss, "encoder").before, PARAMS, X).cut

        assert digest(large) != digest(other)

    @pytest.mark.parametrize("wrap", [lambda f, h: f(h), lambda f, h: lax.map(f, h), lambda f, h: jax.jit(f)(h)])
    def test_a_python_function_is_called_in_each_step(self, wrap):
        """Whether two are the same cannot be known, so their results are no features."""

        def after_of(function):
            def loss(params, x):
                def called(h):
                    return jax.pure_callback(lambda h: function(h), jax.eval_shape(lambda: h), h)

                return jnp.sum(wrap(called, x @ params["encoder"]) @ params["middle"] @ params["head"])

            return fz.precompute(loss, FROZEN), loss

        (one, _), (other, loss) = after_of(np.sin), after_of(np.cos)
        assert_equal_up_to_rounding(other.after(PARAMS, one.before(PARAMS, X), X), loss(PARAMS, X))
        [(_, why)] = one.explain(PARAMS, X).stopped_by
        assert why == "a Python function, which cannot be compared"

    def test_of_a_parameter_and_an_argument_of_one_name(self):
        params, x = {"x": jnp.ones((3, 3)), "head": jnp.ones((3, 1))}, jnp.ones((3, 3))
        one = fz.precompute(lambda p, x: jnp.sum(jnp.sort(p["x"] @ x) @ p["head"]), "x")
        other = fz.precompute(lambda p, x: jnp.sum(jnp.sort(x @ p["x"]) @ p["head"]), "x")
        assert one.before(params, x).cut != other.before(params, x).cut

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
        one, other = (
            subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed})
            for seed in ("1", "7")
        )
        assert one == other != b""
