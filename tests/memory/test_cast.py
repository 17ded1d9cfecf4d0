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
    "static rows on the host": fz.rows([0, 1, 2]),
    "dynamic rows": ~fz.rows(jnp.array([3])),
    "compact elements": fz.elements(ELEMENTS, compact=True),
    "dense elements": fz.elements(ELEMENTS),
}
PARAMS = {
    "layers": jax.random.normal(jax.random.key(0), (4, 8, 8)) / 3,
    "head": jax.random.normal(jax.random.key(1), (8, 2)),
    "count": jnp.arange(3),
    "key": jax.random.key(2),
}
FROZEN = {"layers": True, "head": False, "count": True, "key": True}


def loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.astype(x.dtype)), None), x, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32])
def test_frozen_leaves_are_converted_and_no_others(dtype, compiled):
    new = compiled(lambda params: fz.cast(params, fz.all_except("head"), dtype))(PARAMS)
    assert new["layers"].dtype == dtype
    assert bits(new) == bits(PARAMS | {"layers": PARAMS["layers"].astype(dtype)})


@pytest.mark.parametrize("name", MASKS)
def test_a_partly_frozen_leaf_has_the_type_of_its_trainable_part(name):
    x, frozen = jnp.ones((3, 8)), FROZEN | {"layers": MASKS[name]}
    trainable, rest = fz.partition(PARAMS, frozen)
    rest = fz.offload(rest, frozen, min_bytes=0) if name.endswith("host") else rest
    rest = fz.cast(rest, frozen, jnp.bfloat16)
    assert rest["layers"].array.dtype == jnp.bfloat16
    assert bits(fz.partition(fz.combine(trainable, rest), frozen)[0]) == bits(trainable)
    rounded = PARAMS | {"layers": PARAMS["layers"].astype(jnp.bfloat16).astype(jnp.float32)}
    full = fz.combine(trainable, fz.partition(rounded, frozen)[1])
    got = jax.jit(lambda trainable, rest: jax.value_and_grad(fz.restrict(loss, rest))(trainable, x))(trainable, rest)
    expected = fz.value_and_grad(loss, frozen)(full, x)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_shapes_numpy_arrays_and_an_array_at_two_paths():
    struct = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert fz.cast({"w": struct}, "w", jnp.bfloat16)["w"].dtype == jnp.bfloat16
    array = np.ones((2, 3), np.float32)
    new = fz.cast({"a": array, "b": array, "c": 1.0}, True, jnp.bfloat16)
    assert isinstance(new["a"], np.ndarray)
    assert new["a"] is new["b"]
    assert new["c"] == 1.0


@pytest.mark.parametrize("make", [np.array, jnp.array])
@pytest.mark.parametrize(
    ("source", "dtype", "kept", "lost"),
    [
        ("float16", "float8_e8m0fnu", (1.0, 3.0), (0.0, -1.0)),
        ("float8_e4m3fn", "float8_e8m0fnu", (1.0, 3.0), (0.0, -1.0)),
        ("float4_e2m1fn", "float8_e8m0fnu", (1.0, 3.0), (0.0, -1.0)),
        ("float32", "float4_e2m1fn", (0.0, -6.9), (7.1, np.nan, np.inf)),
        ("float32", "float8_e4m3fn", (460.0, np.nan), (465.0,)),
        ("float32", "float16", (65519.0, np.inf), (65521.0,)),
    ],
)
def test_a_value_that_the_type_does_not_have(make, source, dtype, kept, lost):
    array = make(kept, source)
    assert bits(fz.cast({"w": array}, True, dtype)) == bits({"w": array.astype(np.float32).astype(dtype)})
    for value in lost:
        with pytest.raises(ValueError, match=f"{dtype} does not have all frozen values"):
            fz.cast({"w": make([*kept, value], source)}, True, dtype)


def test_no_type():
    with pytest.raises(TypeError, match="needs a floating-point type"):
        fz.cast({"w": np.ones(2, np.float32)}, True, None)


def test_reports_checkpoints_and_migration_take_the_converted_tree(tmp_path):
    params = fz.cast(PARAMS, FROZEN, jnp.bfloat16)
    assert "bfloat16" in str(fz.summary(params, FROZEN))
    state = fz.freeze(optax.adam(0.1), FROZEN).init(params)
    arrays = {name: params[name] for name in ("layers", "head")}
    checkpoint.save(tmp_path, arrays, "layers", step=0)
    assert bits(checkpoint.restore(tmp_path, arrays)[0]) == bits(arrays)
    with pytest.raises(ValueError, match="a leaf differs"):
        checkpoint.restore(tmp_path, {name: PARAMS[name] for name in arrays})
    everything = fz.freeze(optax.adam(0.1), FROZEN | {"layers": False})
    assert jax.tree.leaves(fz.migrate(state, everything, params))[1].dtype == params["head"].dtype
