"""Frozen weights that Qwix has quantized: the block of the guide, and what else takes such a tree."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits

import optax_freeze as fz
from optax_freeze import checkpoint

qwix = pytest.importorskip(
    "qwix", reason="Qwix, which quantizes, is not installed (make gallery)", exc_type=ImportError
)
PAGE = pathlib.Path(__file__).parents[2] / "docs/offload.md"


@pytest.fixture(params=["nf4", "int4", "int8"])
def names(request):
    [block] = re.findall(r"^```python\n(import qwix\n.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    found = {"jax": jax, "jnp": jnp, "optax": optax, "fz": fz}
    exec(block.replace('"nf4"', repr(request.param)), found)
    return found


def test_only_lora_matrices_and_the_head_train(names):
    params, state, x = names["params"], names["state"], jnp.ones((2, 256))
    before, start = bits(params["layers"]["kernel"]), float(names["loss"](params, x))
    assert {leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim} == {(6, 256, 8), (6, 8, 256), (256,)}
    for _ in range(20):
        params, state, value = names["step"](params, state, x)
    assert value < 0.5 * start
    assert bits(params["layers"]["kernel"]) == before


def test_a_quantized_base_is_summarized_offloaded_precomputed_and_saved(names, tmp_path):
    params, frozen, loss, x = names["params"], names["frozen"], names["loss"], jnp.ones((2, 256))
    table = str(fz.summary(params, frozen))
    assert re.search(rf"layers/kernel/qvalue .* {params['layers']['kernel'].qvalue.dtype} .* frozen", table)
    expected = jax.jit(fz.value_and_grad(loss, frozen))(params, x)
    host = fz.offload(params, frozen, min_bytes=0)
    assert host["layers"]["kernel"].qvalue.sharding.memory_kind == "pinned_host"
    trainable, rest = fz.partition(host, frozen)
    restricted = jax.jit(jax.value_and_grad(fz.restrict(loss, rest)))(trainable, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), restricted, expected)
    checkpoint.save(tmp_path, params, frozen, step=0)
    assert bits(checkpoint.restore(tmp_path, params)[0]) == bits(params)
    kernel = jax.tree.map(jnp.zeros_like, params["layers"]["kernel"])
    with pytest.raises(ValueError, match="the base differs"):
        checkpoint.restore(tmp_path, {**params, "layers": {**params["layers"], "kernel": kernel}})

    def first_layer(params, x):
        first = jax.tree.map(lambda leaf: leaf[0], params["layers"]["kernel"])
        return jnp.mean(jnp.tanh(x @ qwix.dequantize(first)) @ params["head"])

    once = fz.precompute(first_layer, frozen)
    features = once.before(params, x)
    np.testing.assert_allclose(once.after(params, features, x), first_layer(params, x), rtol=1e-5)
