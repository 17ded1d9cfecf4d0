"""Leaks made up one by one are each caught and named with their cure; what freezes as it should passes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits

import optax_freeze as fz

PARAMS = {
    "encoder": {"kernel": jnp.linspace(-1.0, 2.0, 12).reshape(4, 3), "bias": jnp.zeros(3)},
    "head": jnp.linspace(-1.0, 1.0, 3),
}
FROZEN = "encoder"
TRUE = {"encoder": {"kernel": True, "bias": True}, "head": False}
FALSE = jax.tree.map(lambda frozen: not frozen, TRUE)
SGD, MOMENTUM, ADAM = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.1)
FREEZE = fz.freeze(MOMENTUM, FROZEN)


def times_mask(updates, params):
    return jax.tree.map(lambda update, frozen: update * (1 - frozen), updates, TRUE)


NORM = ("changed", "norm", "fz.freeze(optax.chain(optax.clip_by_global_norm(...)")
FINITE = ("changed", "finite check", "fz.freeze(optax.apply_if_finite(")
STATE = ("state", "state for frozen elements", "with MultiSteps and optax.flatten inside")
MOMENTS = ("moved", "the state of an optimizer", "only before a stateful optimizer")
DECAY = ("moved", "weight decay", "optax.add_decayed_weights(...)), frozen)")
TRAINS = ("moved", "it trains", "fz.freeze(tx, frozen)")
IGNORED = ("untrained", "its gradient is ignored", "optax.selective_transform was given a function")
AFTER = ("moved", "a transformation after the freeze", "fz.freeze(optax.chain(tx, ...), frozen)")
STATISTIC = ("changed", "statistic over frozen elements", "trust ratio")
PRODUCT = ("moved", "NaN * 0 is NaN", "which select")

chain, zeroed = optax.chain, fz.masked_zero_updates(FROZEN)


def times_norm(updates, params):
    return jax.tree.map(lambda update: update * optax.tree.norm(params), updates)


def plus_log_of_check(updates, params):
    return jax.tree.map(lambda update: update + 0 * jnp.log(jnp.isfinite(optax.tree.sum(updates))), updates)


def late_decay():
    def update_fn(updates, state, params):
        rate = jnp.where(state.count < 50, 0.0, 0.1)
        updates = jax.tree.map(lambda update, param: update - rate * param, updates, params)
        return updates, optax.ScaleByScheduleState(state.count + 1)

    return optax.GradientTransformation(lambda params: optax.ScaleByScheduleState(jnp.int32(0)), update_fn)


SKIPPING = optax.MultiSteps(FREEZE, 2, should_skip_update_fn=optax.skip_not_finite)
SCHEDULE_FREE = optax.contrib.schedule_free(fz.freeze(SGD, FROZEN), learning_rate=0.1)
SWAPPED = optax.multi_transform({"a": MOMENTUM, "b": optax.set_to_zero()}, {"encoder": "a", "head": "b"})
LEAKS = {
    "decay after the freeze": (chain(FREEZE, optax.add_decayed_weights(-0.01)), [DECAY]),
    "a decay too small for a bit": (chain(FREEZE, optax.add_decayed_weights(-1e-12)), [DECAY]),
    "a decay after a warm-up": (chain(FREEZE, late_decay()), [DECAY]),
    "the freeze before adamw": (chain(optax.freeze(TRUE), optax.adamw(0.1)), [DECAY, MOMENTS, STATE]),
    "decay before Adam": (chain(optax.freeze(TRUE), optax.add_decayed_weights(0.1), ADAM), [AFTER, MOMENTS, STATE]),
    "a clip outside": (chain(optax.clip_by_global_norm(1.0), FREEZE), [NORM]),
    "a clip outside that only the huge reach": (chain(optax.clip_by_global_norm(1e3), FREEZE), [NORM]),
    "apply_if_finite outside": (optax.apply_if_finite(FREEZE, 5), [FINITE]),
    "MultiSteps outside": (optax.MultiSteps(FREEZE, 2), [STATE]),
    "MultiSteps outside that skips": (SKIPPING, [FINITE, STATE]),
    "noise after": (chain(FREEZE, optax.add_noise(0.1, 0.5, key=0)), [AFTER]),
    "optax.masked for a freeze": (optax.masked(MOMENTUM, FALSE), [TRAINS]),
    "a callable for selective_transform": (optax.selective_transform(ADAM, freeze_mask=lambda _: TRUE), [IGNORED]),
    "labels the other way round": (SWAPPED, [TRAINS, STATE, IGNORED]),
    "one vector for all": (chain(optax.flatten(MOMENTUM), zeroed), [STATE]),
    "a product with a mask": (chain(SGD, optax.stateless(times_mask)), [PRODUCT]),
    "nothing that freezes": (MOMENTUM, [TRAINS, STATE]),
    "schedule_free outside": (SCHEDULE_FREE, [AFTER, MOMENTS, STATE]),
    "a distance over all parameters": (chain(optax.contrib.dog(1.0), zeroed), [NORM, STATE]),
    "a norm of all parameters": (chain(SGD, optax.stateless(times_norm), zeroed), [STATISTIC]),
    "a finite check of its own": (chain(optax.stateless(plus_log_of_check), FREEZE), [FINITE]),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_caught_and_named_with_its_cure(name):
    tx, expected = LEAKS[name]
    audit = fz.audit(PARAMS, FROZEN, tx)
    assert not audit
    assert not audit.ok
    found = {(leak.kind, leak.cause, leak.fix) for leak in audit.leaks}
    assert len(found) == len(expected), str(audit)
    for kind, cause, fix in expected:
        assert any(k == kind and cause in c and fix in f for k, c, f in found), str(audit)
    for leak in audit.leaks:
        trains = leak.kind in ("changed", "untrained")
        assert leak.path in (("head",) if trains else ("encoder/kernel", "encoder/bias", ""))
        assert (leak.nbytes > 0) == (leak.kind == "state")
        if name == "nothing that freezes" and leak.kind == "state":
            assert (leak.nbytes, leak.got) == (4 * leak.elements, f"{leak.nbytes} bytes, at 0/trace")
        assert 0 < leak.elements <= 15
    with pytest.raises(AssertionError, match=r"leaks? \(2 of 3 leaves frozen, 3 steps a run\)\n\n\w+: ") as error:
        audit.raise_for_leaks()
    assert all(leak.fix in str(error.value) for leak in audit.leaks)


MASK = np.arange(12).reshape(4, 3) % 2 == 0
SPECS = {
    "leaves": FROZEN,
    "rows": {"encoder": {"kernel": fz.rows(slice(1, 3)), "bias": True}, "head": False},
    "axis": {"encoder": {"kernel": fz.rows([0, 2], axis=1), "bias": False}, "head": True},
    "dense": {"encoder": {"kernel": MASK, "bias": True}, "head": False},
    "compact": {"encoder": {"kernel": fz.elements(MASK, compact=True), "bias": True}, "head": fz.rows(0)},
}
BACKTRACKING = optax.scale_by_backtracking_linesearch(5, store_grad=True)
INSIDE = {
    "adamw and a clip": (chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), "leaves"),
    "MultiSteps": (optax.MultiSteps(MOMENTUM, 2), "rows"),
    "apply_if_finite": (optax.apply_if_finite(MOMENTUM, 2), "axis"),
    "keep_params_nonnegative": (chain(SGD, optax.keep_params_nonnegative()), "dense"),
    "warm-up": (optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.0, 1.0, 10)), "compact"),
    "sophia": (optax.contrib.sophia(0.1), "rows"),  # these ask for the loss or its gradient
    "sam": (optax.contrib.sam(SGD, SGD, opaque_mode=True), "rows"),
    "momo": (optax.contrib.momo(0.1), "rows"),
    "a line search": (chain(SGD, BACKTRACKING), "rows"),
    "freeze": (fz.freeze(MOMENTUM, False), "leaves"),
}


@pytest.mark.parametrize("name", INSIDE)
def test_any_optimizer_inside_the_freeze_passes(name):
    tx, spec = INSIDE[name]
    audit = fz.audit(PARAMS, SPECS[spec], fz.freeze(tx, SPECS[spec], full_updates=name != "MultiSteps"))
    assert audit, str(audit)
    assert audit.note == ""
    audit.raise_for_leaks()


def causes(tx, params=PARAMS, frozen=FROZEN, **options):
    """The causes of the leaks by their paths."""
    return {leak.path: leak.cause for leak in fz.audit(params, frozen, tx, **options).leaks}


FREEZING = {
    "optax.partition": optax.partition({"trainable": ADAM, "frozen": optax.set_to_zero()}, fz.labels(FROZEN)),
    "selective_transform": optax.selective_transform(ADAM, freeze_mask=TRUE),
    "zeroed": chain(SGD, zeroed),
    "optax.freeze": chain(SGD, optax.freeze(TRUE)),
    "freeze_when": fz.freeze_when(ADAM, {"encoder": fz.unfreeze_at(9)}, optax.clip_by_global_norm(1.0)),
    "freeze_when in a freeze": fz.freeze(fz.freeze_when(MOMENTUM, {"head": True}), FROZEN),
}


@pytest.mark.parametrize("tx", FREEZING.values(), ids=FREEZING)
def test_other_chains_that_freeze_pass(tx):
    assert causes(tx) == {}


def test_a_leaf_that_the_chain_freezes_beyond_the_spec():
    found = causes(fz.freeze(MOMENTUM, ["encoder", "tail"]), {**PARAMS, "tail": jnp.ones(2)})
    assert found == {"tail": "its gradient is ignored"}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.complex64])
def test_other_dtypes_and_their_strict_promotion(dtype):
    params = jax.tree.map(lambda leaf: (leaf - 1).astype(dtype), PARAMS)
    with jax.numpy_dtype_promotion("strict"):
        assert not causes(fz.freeze(SGD, FROZEN), params)
        assert set(causes(SGD, params).values()) == {"it trains"}
    if dtype is not jnp.float8_e4m3fn:
        assert set(causes(LEAKS["decay after the freeze"][0], params).values()) == {"weight decay"}
        assert causes(LEAKS["a clip outside"][0], params) == {"head": "a norm over frozen gradients"}


def test_a_line_search_outside():
    leaks = fz.audit(PARAMS, FROZEN, chain(SGD, BACKTRACKING, zeroed)).leaks
    assert {leak.kind for leak in leaks} == {"changed", "state"}


def test_a_group_that_waits_is_no_leak_and_one_that_thaws_is():
    tx = fz.freeze_when(MOMENTUM, {"encoder/kernel": (fz.rows(0), True), "encoder": fz.unfreeze_at(1)})
    assert not causes(tx, frozen={"encoder": {"kernel": fz.rows(0), "bias": False}, "head": False})
    assert causes(tx) == dict.fromkeys(["encoder/bias", "encoder/kernel"], "it trains")


def test_statistics_of_a_leaf_that_is_frozen_in_part():
    tx = chain(optax.lars(0.1), fz.masked_zero_updates(SPECS["dense"]))
    audit = fz.audit(PARAMS, SPECS["dense"], tx)
    kernel = {leak.kind: leak for leak in audit.leaks if leak.path == "encoder/kernel"}
    assert set(kernel) == {"changed", "state"}
    assert kernel["changed"].cause == "a statistic over frozen elements"
    assert "compact=True" in kernel["changed"].fix
    assert kernel["state"].nbytes == 24
    assert "compact=True" in kernel["state"].fix


def test_a_clip_outside_is_right_for_gradients_of_the_trainable_structure():
    """With ``full_grads=False`` the clip sees no frozen gradients; decay after the freeze is still a leak."""
    tx, rows = chain(optax.clip_by_global_norm(1.0), fz.freeze(SGD, SPECS["rows"])), SPECS["rows"]
    assert causes(tx, frozen=rows) == dict.fromkeys(["encoder/kernel", "head"], "a norm over frozen gradients")
    assert not causes(tx, frozen=rows, full_grads=False)
    tx = chain(fz.freeze(MOMENTUM, rows), optax.add_decayed_weights(0.1))
    decay = dict.fromkeys(["encoder/bias", "encoder/kernel"], "weight decay")
    assert causes(tx, frozen=rows, full_grads=False) == decay


def test_a_zero_that_takes_a_sign():
    params = {"encoder": jnp.array([-0.0, 1.0]), "head": jnp.ones(2)}
    tx = optax.selective_transform(SGD, freeze_mask={"encoder": True, "head": False})
    [leak] = fz.audit(params, FROZEN, tx).leaks
    assert leak.cause == "a transformation after the freeze"
    assert leak.got == "1 of 2 frozen elements moves in step 1"
    assert not causes(fz.freeze(SGD, FROZEN), params)


def test_leaves_of_every_kind_pass_and_nothing_is_changed(awkward, odd_bits):
    tree = {
        "frozen": {**awkward["frozen"], **odd_bits["frozen"], "function": jnp.tanh, "number": 1.5},
        "trains": jnp.ones(2),
    }
    before = bits(tree)
    audit = fz.audit(tree, "frozen", fz.freeze(ADAM, "frozen"))
    assert audit, str(audit)
    assert bits(tree) == before


def test_an_integer_that_decays():
    params = {"table": jnp.array([5, 1000], jnp.int32), "frozen": jnp.ones(1), "head": jnp.ones(2)}
    decay = optax.stateless(lambda updates, params: jax.tree.map(lambda u, p: u - 0.1 * p, updates, params))
    found = causes(chain(fz.freeze(SGD, "frozen"), decay), params, "frozen")
    assert found == {"frozen": "weight decay", "table": "a transformation after the freeze"}


def test_shapes_are_enough():
    shapes = jax.eval_shape(lambda: {**PARAMS, "key": jax.random.key(0), "step": jnp.int32(1)})
    assert not causes(FREEZE, shapes)
    found = {leak.cause for leak in fz.audit(shapes, FROZEN, MOMENTUM).leaks}
    assert found == {"it trains", "state for frozen elements"}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_parameters(kind):
    kinds = (jax.sharding.AxisType[kind], jax.sharding.AxisType.Auto)
    mesh = jax.make_mesh((2, 1), ("x", "y"), axis_types=kinds, devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = {"encoder": jax.device_put(jnp.ones((4, 2)), sharding), "head": jnp.ones(2)}
    spec = {"encoder": fz.rows(slice(0, 2)), "head": False}
    with jax.set_mesh(mesh):
        assert fz.audit(params, spec, fz.freeze(MOMENTUM, spec))


def test_a_parameter_with_the_name_of_a_count_has_no_state():
    params = {"count": jnp.ones(()), "mu": jnp.ones(2), "nu": jnp.ones(2)}
    assert fz.audit(params, ["count", "nu"], fz.freeze(ADAM, ["count", "nu"]))


def test_an_optimizer_that_looks_at_values_runs_eagerly():
    def update_fn(updates, state, params=None):
        return jax.tree.map(lambda u: -u if float(jnp.sum(u)) == float(jnp.sum(u)) else u * 0, updates), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)
    assert not causes(fz.freeze(tx, FROZEN))
    assert set(causes(tx).values()) == {"it trains"}


def scaled(updates, state, params=None, *, batch, **extra_args):
    return jax.tree.map(lambda update: update * batch, updates), state


BATCHED = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scaled)


def test_extra_arguments_of_your_own():
    of_frozen_parameters = lambda params, grads: {"batch": optax.tree.norm(params)}  # noqa: E731
    for extra_args in ({"batch": 2.0}, of_frozen_parameters):
        assert fz.audit(PARAMS, FROZEN, fz.freeze(BATCHED, FROZEN), extra_args=extra_args)


def test_errors_of_the_optimizer_are_passed_on():
    with pytest.raises(TypeError, match="batch") as error:
        fz.audit(PARAMS, FROZEN, fz.freeze(BATCHED, FROZEN))
    assert "fz.audit: from tx.update" in error.value.__notes__[-1]
    with pytest.raises(ValueError, match="matches no leaf") as error:
        fz.audit(PARAMS, FROZEN, fz.freeze(SGD, "decoder"))
    assert error.value.__notes__ == ["fz.audit: from tx.init(params)"]


def test_what_the_runs_cannot_show_is_noted():
    audit = fz.audit(PARAMS, FROZEN, fz.freeze(optax.MultiSteps(SGD, 9), FROZEN))
    assert audit
    assert "note: trainable parameters had no update in these steps" in str(audit)
    assert fz.audit(PARAMS, FROZEN, fz.freeze(optax.MultiSteps(SGD, 4), FROZEN), steps=4).note == ""
    nan = optax.stateless(lambda updates, params: jax.tree.map(lambda u: u * np.nan, updates))
    audit = fz.audit(PARAMS, FROZEN, fz.freeze(nan, FROZEN))
    assert audit.leaks == ()
    assert "NaN whatever is frozen" in audit.note


def test_what_is_random_is_not_compared():
    random = np.random.default_rng(0)

    def update_fn(updates, params):
        noise = jax.pure_callback(lambda: np.float32(random.normal()), jax.ShapeDtypeStruct((), np.float32))
        return jax.tree.map(lambda update: update + noise, updates)

    audit = fz.audit(PARAMS, FROZEN, fz.freeze(optax.stateless(update_fn), FROZEN))
    assert audit
    assert "two equal runs" in audit.note
    noisy = causes(chain(FREEZE, optax.stateless(update_fn)))
    assert noisy == dict.fromkeys(["encoder/bias", "encoder/kernel"], "a transformation after the freeze")


def test_the_text_folds_leaves_of_one_cause():
    params = {f"layer_{i}": jnp.ones(4) for i in range(12)} | {"head": jnp.ones(2)}
    audit = fz.audit(params, "layer_*", chain(SGD, optax.ema(0.9), fz.masked_zero_updates("layer_*")), steps=1)
    assert len(audit.leaks) == audit.frozen == 12
    lines = str(audit).splitlines()
    assert lines[0] == "audit: 1 leak (12 of 13 leaves frozen, 1 step a run)"
    assert "  at: layer_0, layer_1, layer_10 and 9 more" in lines
    assert "  got: 16 bytes, at 1/ema (layer_0); 192 bytes in all" in lines
    assert repr(audit) == str(audit)
    assert str(fz.audit(PARAMS, False, SGD)) == "audit: no leak (0 of 3 leaves frozen, 3 steps a run)"


def test_made_up_infinities_are_none_of_the_debugger_s_business():
    with jax.debug_nans(True), jax.debug_infs(True):
        assert fz.audit(PARAMS, FROZEN, FREEZE).ok
        assert {leak.kind for leak in fz.audit(PARAMS, FROZEN, SGD).leaks} == {"moved"}


@pytest.mark.parametrize(("dtype", "shapes"), [(np.float64, True), (np.complex128, False)])
def test_double_precision_of_numpy_without_x64(dtype, shapes):
    """Warnings are errors here."""
    made = (lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype)) if shapes else lambda leaf: np.asarray(leaf, dtype)
    params = jax.tree.map(made, PARAMS)
    decay = chain(zeroed, optax.add_decayed_weights(0.3), optax.sgd(0.7))
    assert not causes(FREEZE, params)
    assert set(causes(decay, params).values()) == {"weight decay"}


def test_wrong_arguments():
    """Those in ``wrong_calls.md`` are not repeated here."""
    with pytest.raises(TypeError, match=r"not an optimizer(.|\n)*fix: swap the arguments"):
        fz.audit(PARAMS, SGD, FROZEN)  # pyright: ignore
    with pytest.raises(TypeError, match=r"at: steps\n  got: True"):
        fz.audit(PARAMS, FROZEN, SGD, True)
    with pytest.raises(ValueError, match=r"the full parameters\n  at: encoder/kernel"):
        fz.audit(fz.partition(PARAMS, SPECS["rows"])[0], False, SGD)
