"""Frozen parameters in another floating-point type."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits

import optax_freeze as fz
from optax_freeze import checkpoint

ELEMENTS = np.arange(256).reshape(4, 8, 8) % 3 > 0
MASKS = {
    "static rows": fz.rows([0, 1, 2]),
    "dynamic rows": ~fz.rows(jnp.array([3])),
    "compact elements": fz.elements(ELEMENTS, compact=True),
    "dense elements": fz.elements(ELEMENTS),
}


def init():
    keys = jax.random.split(jax.random.key(0), 3)
    layers, head = jax.random.normal(keys[0], (4, 8, 8)) / 3, jax.random.normal(keys[1], (8, 2))
    return {"layers": layers, "head": head, "count": jnp.arange(3), "key": keys[2]}


def loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.astype(x.dtype)), None), x, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float32])
def test_frozen_leaves_are_converted_and_no_others(dtype, compiled):
    params = init()
    new = compiled(lambda params: fz.cast(params, fz.only("head"), dtype))(params)
    assert {name: leaf.dtype for name, leaf in new.items()} == {
        name: dtype if name == "layers" else leaf.dtype for name, leaf in params.items()
    }
    assert bits(new["layers"]) == bits(params["layers"].astype(dtype))
    assert bits(new | {"layers": 0}) == bits(params | {"layers": 0})


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_partly_frozen_leaf_has_the_type_of_its_trainable_part(mask, host):
    if host and mask is not MASKS["static rows"]:
        pytest.skip("only stacks frozen by static rows can be in host memory")
    params, x = init(), jnp.ones((3, 8))
    frozen = {"layers": mask, "head": False, "count": True, "key": True}
    trainable, rest = fz.partition(params, frozen)
    rest = fz.cast(fz.offload(rest, frozen, min_bytes=0) if host else rest, frozen, jnp.bfloat16)
    assert rest["layers"].array.dtype == jnp.bfloat16
    combined = fz.combine(trainable, rest)
    assert bits(fz.partition(combined, frozen)[0]) == bits(trainable)
    rounded = {**params, "layers": params["layers"].astype(jnp.bfloat16).astype(jnp.float32)}
    full = fz.combine(trainable, fz.partition(rounded, frozen)[1])
    value, grads = jax.jit(lambda trainable, rest: jax.value_and_grad(fz.restrict(loss, rest))(trainable, x))(
        trainable, rest
    )
    expected, expected_grads = fz.value_and_grad(loss, frozen)(full, x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for grad, other in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert grad.dtype == jnp.float32
        np.testing.assert_allclose(grad, other, rtol=1e-5, atol=1e-7)


def test_shapes_numpy_arrays_and_an_array_at_two_paths():
    struct = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert fz.cast({"w": struct}, "w", jnp.bfloat16)["w"].dtype == jnp.bfloat16
    array = np.ones((2, 3), np.float32)
    new = fz.cast({"a": array, "b": array, "c": 1.0}, True, jnp.bfloat16)
    assert isinstance(new["a"], np.ndarray)
    assert new["a"] is new["b"]
    assert new["c"] == 1.0


def test_reports_checkpoints_and_migration_take_the_converted_tree(tmp_path):
    frozen = {"layers": True, "head": False, "count": True, "key": True}
    params = fz.cast(init(), frozen, jnp.bfloat16)
    assert "bfloat16" in str(fz.summary(params, frozen))
    tx = fz.freeze(optax.adam(0.1), frozen)
    state = tx.init(params)
    arrays = {name: params[name] for name in ("layers", "head")}
    checkpoint.save(tmp_path, arrays, "layers", step=0)
    assert bits(checkpoint.restore(tmp_path, arrays)[0]) == bits(arrays)
    with pytest.raises(ValueError, match="a leaf differs"):
        checkpoint.restore(tmp_path, {name: init()[name] for name in arrays})
    everything = fz.freeze(optax.adam(0.1), {**frozen, "layers": False})
    assert jax.tree.leaves(fz.migrate(state, everything, params))[1].dtype == params["head"].dtype
