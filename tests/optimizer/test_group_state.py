"""The state of a group has its own leaves alone, whatever the optimizer."""

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import bits
from flax import nnx

import optax_freeze as fz

PARAMS = {
    "a": {"w": jnp.full((3, 2), 2.0), "b": jnp.ones(2)},
    "b": jnp.array([3.0, -1.0]),
    "c": [jnp.ones(3), jnp.zeros(3)],
}
GRADS = jax.tree.map(jnp.cos, PARAMS)
GROUPS = {"a/w": (fz.rows([0, 2]), False), "a/b": False, "c/1": fz.unfreeze_at(1), "c/0": False}
OWN = {"a/w": (2, 2), "a/b": (2,), "c/1": (3,), "c/0": (3,)}
NO_BIAS = {"a": {"w": True, "b": False}, "b": True, "c": [True, False]}
ADAM = {
    "leafwise": optax.adam(0.1),
    "a mask of all leaves": optax.adamw(0.1, mask=NO_BIAS),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(0.1),
    "accumulation": optax.MultiSteps(optax.adam(0.1), 2),
    "labels": optax.multi_transform({"m": optax.adam(0.1), "v": optax.sgd(0.1)}, lambda tree: jax.tree.map(rank, tree)),
    "a mask of adam": optax.masked(optax.adam(0.1), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
}


def rank(x):
    return "m" if x.ndim > 1 else "v"


def placeholders(tree):
    found = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    return sum(isinstance(node, optax.MaskedNode) for node in found)


@pytest.mark.parametrize("inner", ADAM.values(), ids=ADAM)
def test_a_group_has_no_placeholders_of_others(inner):
    tx = fz.freeze_when(inner, GROUPS)
    state = tx.init(PARAMS)
    for name, shape in OWN.items():
        arrays = [x.shape for x in jax.tree.leaves(state.groups[name].inner_state) if x.ndim]
        assert set(arrays) <= {shape}
        assert placeholders(state.groups[name].inner_state) <= 2  # that of its own leaf with another label
    new = tx.update(GRADS, state, PARAMS)[1]
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert bits(new.groups["c/1"].inner_state) == bits(state.groups["c/1"].inner_state)
    moved = [bits(new.groups[name].inner_state) != bits(state.groups[name].inner_state) for name in ("a/w", "a/b")]
    assert moved == [True, True]


def test_moments_are_dictionaries_from_paths():
    state = fz.freeze_when(optax.adam(0.1), GROUPS).init(PARAMS)
    adam = state.groups["c/1"].inner_state[0]
    assert {path: x.shape for path, x in adam.mu.items()} == {"c/1": (3,)}
    assert state.ungrouped_state[0].mu["b"].shape == (2,)
    assert adam.mu["c"][1] is adam.mu["c/1"]
    with pytest.raises(KeyError, match="d"):
        adam.mu["d"]
    names = [jax.tree_util.keystr(key, simple=True, separator="/") for key, _ in jax.tree.leaves_with_path(state)]
    assert "groups/c/1/inner_state/0/mu/c/1" in names


def test_a_dictionary_with_the_names_of_the_parameters_is_not_one_of_their_leaves():
    """An optimizer whose state has a number for each name."""

    def update(updates, state, params=None):
        rates = jax.tree.map(lambda x: x + 1.0, state)
        return jax.tree.map(lambda u: -u * rates["b"], updates), rates

    inner = optax.GradientTransformation(lambda _: {"a": jnp.float32(1), "b": jnp.float32(2)}, update)
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = fz.freeze_when(inner, {"a": False})
    updates, state = tx.update(params, tx.init(params), params)
    assert state.groups["a"].inner_state == {"a": 2.0, "b": 3.0}
    assert updates["a"].tolist() == [-3.0, -3.0]


def test_a_variable_keeps_its_metadata():
    model = nnx.Linear(2, 3, kernel_init=nnx.with_metadata(nnx.initializers.ones, note="kept"), rngs=nnx.Rngs(0))
    tx = fz.freeze_when(optax.adam(0.1), {"kernel": False, "bias": False})
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    plain = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    moment = optimizer.opt_state.groups["kernel"].inner_state[0].mu["kernel"]
    expected = plain.opt_state[0].mu["kernel"]
    assert type(moment) is type(expected)
    assert moment.get_metadata() == expected.get_metadata()
