"""A leaf frozen by rows costs no more than the whole leaf, as the compiler for a CPU counts it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_freeze as fz

BATCH, LENGTH, WIDTH, VOCABULARY = 8, 64, 128, 2048
KEYS = jax.random.split(jax.random.key(0), 8)
PARAMS = {
    "positions": jax.random.normal(KEYS[0], (LENGTH, WIDTH)),
    "layers": jax.random.normal(KEYS[1], (4, WIDTH, WIDTH)) / 16,
    "scale": jnp.ones(WIDTH),
    "head": jax.random.normal(KEYS[2], (WIDTH, VOCABULARY)) / 16,
    "bias": jnp.zeros(VOCABULARY),
    "kernel": jax.random.normal(KEYS[3], (3, 3, 16, 32)) / 16,
    "experts": jax.random.normal(KEYS[4], (8, WIDTH, WIDTH)) / 16,
    "codes": jax.random.normal(KEYS[5], (128, WIDTH)),
}
X = jax.random.normal(KEYS[6], (BATCH, LENGTH, WIDTH))
LABELS = jnp.zeros((BATCH, LENGTH), int)


def body(params, x):
    for w in params["layers"]:
        x = x + jax.nn.gelu(x @ w)
    return x


def cross_entropy(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def positions(params, x):
    return jnp.mean(body(params, x + params["positions"]) ** 2)


def positions_of_one_example(params, x):
    return jnp.mean(body(params, x[0] + params["positions"]) ** 2)


def scale(params, x):
    return jnp.mean(body(params, jax.nn.standardize(x) * params["scale"]) ** 2)


def bias(params, x):
    return cross_entropy(body(params, x) @ jax.lax.stop_gradient(params["head"]) + params["bias"])


def head(params, x):
    return cross_entropy(body(params, x) @ params["head"])


def convolution(params, x):
    images = x.reshape(BATCH, 16, 32, 16)
    dimensions = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(images, params["kernel"], (1, 1), "SAME", dimension_numbers=dimensions)
    return jnp.mean(jnp.tanh(y) ** 2)


def experts(params, x):
    sizes = jnp.full(8, BATCH * LENGTH // 8)
    return jnp.mean(jax.lax.ragged_dot(x.reshape(-1, WIDTH), params["experts"], sizes) ** 2)


def nearest_code(params, x):
    codes = params["codes"]
    distance = jnp.sum(x**2, -1, keepdims=True) - 2 * x @ codes.T + jnp.sum(codes**2, -1)
    return jnp.mean((x - codes[jnp.argmin(distance, -1)]) ** 2)


def quantised(params, x):
    step = jnp.max(jnp.abs(params["head"])) / 127
    rounded = jnp.round(params["head"] / step) * step
    return cross_entropy(x @ (params["head"] + jax.lax.stop_gradient(rounded - params["head"])))


CASES = [  # the loss, the leaf, and its trainable rows
    (positions, "positions", fz.rows(slice(0, 48))),
    (positions_of_one_example, "positions", fz.rows(slice(0, 48))),
    (positions, "positions", fz.rows(slice(None, None, 2))),
    (scale, "scale", fz.rows(slice(0, 96))),
    (bias, "bias", fz.rows(slice(0, 2000))),
    (head, "head", fz.rows(slice(0, 2000), axis=1)),
    (head, "head", fz.rows(slice(0, 32), axis=0)),
    (head, "head", fz.rows(slice(0, 100, 7), axis=1)),
    (head, "head", fz.rows([1, 5, 9], axis=0)),
    (convolution, "kernel", fz.rows(slice(0, 24), axis=3)),
    (convolution, "kernel", fz.rows(slice(0, 8), axis=2)),
    (experts, "experts", fz.rows(slice(0, 6))),
    (experts, "experts", fz.rows([1, 3, 4])),
    (nearest_code, "codes", fz.rows(slice(0, 100))),
    (quantised, "head", fz.rows(slice(0, 2000), axis=1)),
]


def cost(compiled):
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    outputs = memory.output_size_in_bytes  # which hold temporaries, too, until they are written
    return np.array([cost["flops"], cost["bytes accessed"], memory.temp_size_in_bytes + outputs])


FUSED_OTHERWISE = (3, False), (7, False), (7, True), (8, False)  # sums are fused otherwise; runs of columns are cut
NEARLY_ALL = (7, 8)  # more than 95 % of the rows


@pytest.mark.parametrize("body_trains", [False, True])
@pytest.mark.parametrize("i", range(len(CASES)), ids=lambda i: f"{i}-{CASES[i][0].__name__}")
def test_no_dearer_than_the_whole_leaf(i, body_trains):
    loss, name, rows = CASES[i]
    spec = {path: path != "layers" or not body_trains for path in PARAMS}
    specs = [{**spec, name: rows}, {**spec, name: False}]
    in_parts, whole = (jax.jit(fz.grad(loss, frozen)).lower(PARAMS, X).compile() for frozen in specs)
    ratios = cost(in_parts) / cost(whole)
    assert (ratios <= (1.13 if (i, body_trains) in FUSED_OTHERWISE else 1.05)).all(), dict(
        zip(("FLOPs", "bytes", "memory"), ratios, strict=True)
    )
    assert all((row.merged is None) == (i not in NEARLY_ALL) for row in fz.explain(loss, PARAMS, specs[0], X).rows)
    found, expected = in_parts(PARAMS, X), fz.partition(whole(PARAMS, X), specs[0])[0]
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-6 + 1e-5 * np.abs(wanted).max())


def attends(params):
    codes = params["codes"]
    return jnp.sum((jax.nn.softmax(codes @ codes.T) @ codes) ** 2)


@pytest.mark.parametrize("rows", [slice(0, 127), np.arange(127)], ids=["static", "dynamic"])
def test_all_rows_but_one_cost_as_much_as_all(rows):
    spec = dict.fromkeys(PARAMS, True) | {"codes": ~fz.rows(rows if isinstance(rows, slice) else jnp.array(rows))}
    in_parts, whole = (jax.jit(fz.grad(attends, {**spec, **own})).lower(PARAMS) for own in ({}, {"codes": False}))
    assert (cost(in_parts.compile())[:2] <= 1.02 * cost(whole.compile())[:2] + 128 * WIDTH * 16).all()
    assert [leaf.merged.name for leaf in fz.explain(attends, PARAMS, spec).rows if leaf.merged] == ["add_any"]


SEGMENTS = jnp.arange(128) % 32
MATRIX = PARAMS["layers"][0, :32]
OF_ROWS = {  # the loss, and rows that would cost more than all
    "sort static": (lambda w: jnp.sort(w, axis=0) * X[0, :32].reshape(w.shape), [3, 100]),
    "sort dynamic": (lambda w: jnp.sort(w, axis=0) * X[0, :32].reshape(w.shape), jnp.arange(64)),
    "sum of segments": (lambda w: jax.ops.segment_sum(jnp.tanh(w @ MATRIX), SEGMENTS, 32) ** 2, jnp.arange(64)),
    "split": (lambda w: sum(jnp.tanh(part @ MATRIX) for part in jnp.split(w, 4)), jnp.arange(64)),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_of_an_operation_no_dearer_than_all(name):
    of_leaf, rows = OF_ROWS[name]
    is_static, w = not isinstance(rows, jax.Array), PARAMS["codes"][:, :32]
    loss = lambda params: jnp.sum(of_leaf(params["w"]))  # noqa: E731

    def in_rows(params, rows):
        return fz.grad(loss, {"w": ~fz.rows(OF_ROWS[name][1] if is_static else rows)})(params)

    found = jax.jit(in_rows).lower({"w": w}, None if is_static else rows).compile()
    whole = jax.jit(jax.grad(loss)).lower({"w": w}).compile()
    copy = np.array([2 * w.size, 2 * w.nbytes])  # which reads the gradient, and selects from it
    assert (cost(found)[:2] <= 1.02 * cost(whole)[:2] + copy).all(), (cost(found)[:2] - copy) / cost(whole)[:2]


@pytest.mark.parametrize("trained", [10, 64, 115])
@pytest.mark.parametrize("way", ["static", "dynamic"])
def test_a_product_that_occurs_several_times_is_no_dearer_than_once(way, trained):
    """The cotangents of four products with one matrix, and of two leaves that one operand is multiplied with."""
    w, x = PARAMS["codes"], PARAMS["layers"][0]

    def loss(params):
        rolled = sum(jnp.roll(params["w"], i, 0) @ x for i in range(4))
        return jnp.sum(jnp.tanh(rolled)) + jnp.sum(jnp.tanh(x @ params["w"] + x @ params["v"]))

    params = {"w": w, "v": 2 * w}
    rows = [slice(trained), slice(2, trained + 2)]
    rows = [jnp.arange(128)[each] for each in rows] if way == "dynamic" else rows
    spec = {name: ~fz.rows(own) for name, own in zip(params, rows, strict=True)}
    in_parts, whole = (jax.jit(fz.grad(loss, frozen)).lower(params).compile() for frozen in (spec, False))
    limit = {("static", 10): 0.79, ("static", 64): 0.9, ("dynamic", 10): 0.84}.get((way, trained), 1.02)
    assert (cost(in_parts) / cost(whole))[0] <= limit
    found, expected = in_parts(params), fz.partition(whole(params), spec)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (6, 7, 9)])
def test_a_tree_of_slices_is_no_dearer_than_the_whole_leaf(rows):
    """`cumlogsumexp` adds halves of halves: most of each value is read by several slices, and computed once."""
    w = jnp.ones((64, 96))

    def loss(w):
        return jnp.sum(jnp.sin(jax.lax.cumlogsumexp(w, 0)) ** 2)

    in_parts, whole = (jax.jit(fz.grad(loss, frozen)).lower(w).compile() for frozen in (fz.rows(rows), False))
    assert (cost(in_parts) / cost(whole))[0] <= 1.04
