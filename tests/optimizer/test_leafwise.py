"""Optimizers that groups call with lists of their leaves, and those that read the tree."""

import functools
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import assert_equal_up_to_rounding, by_path

import optax_freeze as fz
from optax_freeze._optimizer import leafwise
from optax_freeze._optimizer.leafwise import is_leafwise, leafwise_transformations

LAYERS = {f"layer_{i}": {"kernel": jnp.full((2, 2), 1.0 + i), "bias": jnp.arange(2.0) - i} for i in range(3)}
LAYERS["head"] = jnp.ones(2)


@pytest.mark.parametrize("tx", leafwise_transformations(), ids=lambda tx: tx.update.__qualname__.partition(".")[0])
def test_a_list_gives_the_program_of_a_tree(tx):
    """Each transformation that is said to be leafwise, in the version of Optax that is installed."""
    tree = {"b": {"x": jnp.ones(3), "hole": optax.MaskedNode()}, "a": (optax.MaskedNode(), jnp.ones((2, 2)))}
    states = tx.init(tree), tx.init(jax.tree.leaves(tree))
    assert list(map(jnp.shape, jax.tree.leaves(states[0]))) == list(map(jnp.shape, jax.tree.leaves(states[1])))
    programs = [
        jax.make_jaxpr(lambda *args: jax.tree.leaves(tx.update(*args)))(given, state, given)
        for given, state in zip((tree, jax.tree.leaves(tree)), states, strict=True)
    ]
    assert str(programs[0]) == str(programs[1])


def chained(transforms, updates, state, params):
    new = []
    for tx, own in zip(transforms, state, strict=True):
        updates, own = tx.update(updates, own, params)
        new.append(own)
    return updates, tuple(new)


def one_more_cell(*transforms):
    name = "chain"
    update = lambda u, s, p=None, **_: chained(transforms, u, s, p) if name else None  # noqa: E731
    return optax.GradientTransformationExtraArgs(lambda params: tuple(tx.init(params) for tx in transforms), update)


def another_content(*transforms):
    by_number = dict(enumerate(transforms))
    update = lambda u, s, p=None, **_: chained(by_number.values(), u, s, p)  # noqa: E731
    return optax.GradientTransformationExtraArgs(lambda params: tuple(tx.init(params) for tx in transforms), update)


def no_cell(*transforms):
    update = lambda u, s, p=None, txs=transforms, **_: chained(txs, u, s, p)  # noqa: E731
    return optax.GradientTransformationExtraArgs(lambda params: tuple(tx.init(params) for tx in transforms), update)


@pytest.mark.parametrize("chain", [one_more_cell, another_content, no_cell])
def test_a_chain_as_in_another_version_of_optax(chain, monkeypatch):
    def step():
        tx = fz.freeze_when(optax.chain(optax.scale_by_adam(), optax.scale(-0.1)), {"layer_0": fz.unfreeze_at(0)})
        return tx.update(LAYERS, tx.init(LAYERS), LAYERS)[0]

    expected = step()
    monkeypatch.setattr(optax, "chain", chain)
    monkeypatch.setattr(leafwise, "_known_code", functools.cache(leafwise._known_code.__wrapped__))
    assert not is_leafwise(optax.chain(optax.identity()).update)
    assert_equal_up_to_rounding(step(), expected)


def reads_keys():
    """Halves the updates of the second layer."""

    def update(updates, state, params=None):
        return {key: jax.tree.map(lambda u, k=key: u / (1 + (k == "layer_1")), x) for key, x in updates.items()}, state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def no_bias(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "bias", params)


OPTIMIZERS = {
    "leaves alone": (optax.adamw(0.1), True),
    "all leaves": (optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)), True),
    "a schedule": (optax.lamb(optax.linear_schedule(0.1, 0.0, 4)), True),
    "a mask by paths": (optax.adamw(0.1, weight_decay=0.5, mask=no_bias), False),
    "a mask of all leaves": (optax.adamw(0.1, weight_decay=0.5, mask=no_bias(LAYERS)), False),
    "keys": (optax.chain(optax.adam(0.1), reads_keys()), False),
}


@pytest.mark.parametrize(("tx", "is_known"), OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("way", ["update", "update_params"])
def test_as_multi_transform(tx, is_known, way):
    assert all(map(is_leafwise, optax.with_extra_args_support(tx))) == is_known
    scheduled = fz.freeze_when(tx, {name: fz.unfreeze_at(0) for name in ("layer_0", "layer_1", "head")})
    labels = {name: jax.tree.map(lambda _, n=name: n, tree) for name, tree in LAYERS.items()}
    by_label = optax.multi_transform(dict.fromkeys(LAYERS, tx), labels)

    @jax.jit
    def ours(params, state, grads):
        if way == "update_params":
            return fz.update_params(scheduled, grads, state, params)
        updates, state = scheduled.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def theirs(params, state, grads):
        updates, state = by_label.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    (a, state), (b, other) = (LAYERS, scheduled.init(LAYERS)), (LAYERS, by_label.init(LAYERS))
    for _ in range(2):
        a, state = ours(a, state, jax.tree.map(jnp.cos, a))
        b, other = theirs(b, other, jax.tree.map(jnp.cos, b))
    assert_equal_up_to_rounding(a, b)
    inner = by_path(other.inner_states["layer_0"].inner_state)
    own = by_path(state.groups["layer_0"].inner_state)
    assert own.keys() == inner.keys()
    assert_equal_up_to_rounding(own, inner)


def test_equal_groups_share_a_traced_update():
    """The three layers have equal types, the head another; each trace of an update calls the schedule once."""
    called = []
    tx = fz.freeze_when(optax.sgd(lambda count: called.append(count) or 0.1), dict.fromkeys(LAYERS, fz.unfreeze_at(1)))
    state = tx.init(LAYERS)
    jax.jit(tx.update).trace(LAYERS, state, LAYERS)
    assert len(called) == 2


def calls(groups):
    """Calls of Python functions of Optax and this library, and of placeholders, in the trace of a step."""
    params = {f"layer_{i:02d}": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)} for i in range(groups)}
    tx = fz.freeze_when(optax.adamw(0.1), dict.fromkeys(params, False))
    state, counts = jax.eval_shape(tx.init, params), {"functions": 0, "placeholders": 0}

    def loss(params, x):
        for layer in params.values():
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return x.sum()

    def count(frame, event, _):
        if event == "call":
            counts["functions"] += "/optax" in frame.f_code.co_filename
            counts["placeholders"] += frame.f_code is optax.MaskedNode.__new__.__code__

    step = jax.jit(fz.train_step(loss, tx))
    sys.setprofile(count)
    try:
        step.trace(params, state, jnp.ones((1, 2)))
    finally:
        sys.setprofile(None)
    return counts


def test_tracing_a_step_is_linear_in_the_groups():
    calls(2)  # imports
    few, many = calls(20), calls(40)
    assert many["functions"] <= 2.05 * few["functions"]
    assert many["placeholders"] <= 2.05 * few["placeholders"]
