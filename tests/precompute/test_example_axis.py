"""Where the examples lie, operation by operation: features of a shuffled batch are the shuffled features."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_freeze as fz

N = 6
W = jnp.asarray(np.random.RandomState(0).randn(4, 4), jnp.float32)
KERNEL = np.random.RandomState(1).randn(3, 3, 2).astype(np.float32)
TABLE = jax.random.normal(jax.random.key(5), (N, 4))
ORDER = np.array([3, 1, 5, 0, 2, 4])
PARAMS, BATCH = {"trunk": W, "head": jnp.float32(2)}, jax.random.normal(jax.random.key(0), (N, 3, 4))
NUMBERS = {"trunk": jnp.float32(2), "head": jnp.float32(3)}


def over_layers(h, w):
    return lax.scan(lambda c, layer: (jnp.tanh(c * layer), c.sum(-1)), h, jnp.stack([w[0], w[1]]))


def noisy(h, _, impl="threefry2x32"):
    key = jax.random.key(0, impl=impl)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row[0, 0].astype(jnp.int32)))(h)
    return h + jax.vmap(lambda key: jax.random.uniform(key, (3, 4)))(keys)


def argmax_pooled(h, _):
    """The flat places of the maxima: a window over two operands, of which one belongs to all examples."""

    def larger(a, b):
        return jnp.where(a[0] >= b[0], a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1])

    places = jnp.arange(N * 12, dtype=jnp.float32).reshape(N, 3, 4)
    return lax.reduce_window((h, places), (-jnp.inf, -1.0), larger, (1, 1, 2), (1, 1, 2), "VALID")[1]


def of_other_examples(h, _):
    picked = jnp.broadcast_to(jnp.argmax(h[:, 0], 1)[None], (N, N))
    return jnp.take_along_axis(h[:, 0], picked, axis=1)


APART = {
    "elementwise": lambda h, w: jnp.tanh(h) * 2 + w[0],
    "transpose": lambda h, w: h.transpose(1, 2, 0),
    "reshape that joins": lambda h, w: h.reshape(N * 3, 4) @ w,
    "reshape that joins and splits": lambda h, w: (h.reshape(N * 3, 4) @ w).reshape(N, 12),
    "reshape behind": lambda h, w: h.reshape(N, 12)[:, ::-1],
    "reduction": lambda h, w: h.sum(1) + h.max(1) + h.argmin(1),
    "softmax": lambda h, w: jax.nn.softmax(h, axis=-1),
    "cumulative": lambda h, w: jnp.cumsum(h, 1) + lax.cummax(h, 2),
    "sort": lambda h, w: jnp.sort(h, axis=1),
    "top_k": lambda h, w: lax.top_k(h, 2)[0],
    "reverse": lambda h, w: h[:, ::-1],
    "slice": lambda h, w: h[:, 1:, :2],
    "split": lambda h, w: jnp.split(h, 2, axis=2)[1],
    "pad": lambda h, w: jnp.pad(h, ((0, 0), (1, 0), (0, 2))),
    "concatenate": lambda h, w: jnp.concatenate([jnp.broadcast_to(w[:1], (N, 1, 4)), h], axis=1),
    "tile": lambda h, w: jnp.tile(h, (1, 2, 1)) + jnp.tile(w[:1], (6, 1)),
    "unstack": lambda h, w: sum(jnp.unstack(h, axis=1)),
    "matmul": lambda h, w: h @ w,
    "matmul from the left": lambda h, w: jnp.einsum("ij,btj->ibt", w, h),
    "attention": lambda h, w: jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", h, h @ w)), h),
    "batched by a shared operand": lambda h, w: jnp.einsum("btd,td->bt", h, w[:3]),
    "mask": lambda h, w: jnp.where(jnp.tril(jnp.ones((3, 4), bool)), h, -1.0),
    "positions": lambda h, w: h + w[jnp.arange(3)],
    "positions of a batch": lambda h, w: h + w[jnp.broadcast_to(jnp.arange(3), (N, 3))],
    "convolution": lambda h, w: lax.conv_general_dilated(h, KERNEL, (1,), "SAME", None, None, ("NCH", "HIO", "HNC")),
    "window": lambda h, w: lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 1), (1, 1, 1), "VALID"),
    "lookup": lambda h, w: w[jnp.clip(h[..., 0].astype(jnp.int32), 0, 3)],
    "lookup in each example": lambda h, w: jnp.take_along_axis(h, jnp.argsort(h, axis=-1)[..., :2], axis=-1),
    "lookup at the same place": lambda h, w: h[:, jnp.array([2, 0])],
    "dynamic slice": lambda h, w: lax.dynamic_slice_in_dim(h, jnp.int32(1), 2, axis=1),
    "dynamic update": lambda h, w: lax.dynamic_update_slice_in_dim(h, h[:, :1] * 2, 2, axis=1),
    "jit": lambda h, w: jax.jit(lambda h: jnp.tanh(h @ w))(h),
    "remat": lambda h, w: jax.checkpoint(lambda h: jnp.tanh(h @ w))(h),
    "custom_jvp": lambda h, w: jax.nn.relu(h),
    "scan over layers": lambda h, w: over_layers(h, w)[0],
    "what a scan stacks": lambda h, w: over_layers(h, w)[1],
    "scan over time": lambda h, w: lax.scan(lambda c, x: (c + x, c * 2), jnp.zeros((N, 4)), h.swapaxes(0, 1))[1],
    "fori_loop": lambda h, w: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c @ w) * i, h),
    "while_loop": lambda h, w: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] + w[0])), (0, h))[
        1
    ],
    "cond": lambda h, w: lax.cond(w[0, 0] > 0, jnp.tanh, lambda h: h * 2, h),
    "barrier": lambda h, w: lax.optimization_barrier((h, w))[0],
    "fft": lambda h, w: jnp.abs(jnp.fft.fft(h, axis=-1)),
    "matrices": lambda h, w: jnp.linalg.cholesky(jnp.einsum("bij,bik->bjk", h, h) + jnp.eye(4)),
    "random numbers by example": noisy,
}

MIXED = {
    "mean": lambda h, w: h - h.mean(0),
    "softmax": lambda h, w: jax.nn.softmax(h, axis=0),
    "sort": lambda h, w: jnp.sort(h, axis=0),
    "cumulative": lambda h, w: jnp.cumsum(h, 0),
    "reverse": lambda h, w: h[::-1],
    "unstack": lambda h, w: jnp.unstack(h)[0],
    "shift": lambda h, w: jnp.roll(h, 1, axis=0),
    "slice": lambda h, w: h[:-1],
    "pad": lambda h, w: jnp.pad(h, ((1, 0), (0, 0), (0, 0))),
    "concatenate": lambda h, w: jnp.concatenate([h, h], 0),
    "matmul": lambda h, w: jnp.einsum("btd,bsd->ts", h, h),
    "examples with examples": lambda h, w: jnp.einsum("btd,csd->btcs", h, h),
    "a value for each place": lambda h, w: h * jnp.arange(N, dtype=jnp.float32)[:, None, None],
    "random numbers of the first key": functools.partial(noisy, impl="rbg"),
    "noise for each place": lambda h, w: h + jax.random.normal(jax.random.key(0), h.shape),
    "examples behind other axes": lambda h, w: h.transpose(1, 0, 2).reshape(3 * N, 4),
    "lookup of an example": lambda h, w: h + h[0],
    "permuted": lambda h, w: h[jnp.array([1, 0, 2, 3, 4, 5])],
    "scan over examples": lambda h, w: lax.scan(lambda c, x: (c + x, c), jnp.zeros((3, 4)), h)[1],
    "a branch by all": lambda h, w: lax.cond(h.sum() > 0, jnp.tanh, lambda h: h * 2, h),
    "a loop by all": lambda h, w: lax.while_loop(lambda c: c.max() > 1, lambda c: c / 2, h),
    "in a scan": lambda h, w: lax.scan(lambda c, layer: (c * layer - c.mean(0), None), h, w)[0],
    "window": lambda h, w: lax.reduce_window(h, 0.0, lax.add, (2, 1, 1), (1, 1, 1), "VALID"),
    "padded window": lambda h, w: lax.reduce_window(h, 0.0, lax.add, (3, 1, 1), (1, 1, 1), "SAME"),
    "update of an example": lambda h, w: h.at[0].set(1.0),
    "a lookup in a table with a row for each place": lambda h, w: (
        h[:, 0] + jnp.take_along_axis(TABLE, jnp.zeros((N, 1), int), 1)
    ),
    "a lookup by other examples": of_other_examples,
    "a window over two operands": argmax_pooled,
    "signs of zeros": lambda h, w: h * jnp.arctan2(jnp.array([0.0, -0.0] + 4 * [0.0])[:, None, None], -1.0),
    "every second example": lambda h, w: h[::2],
    "every second place of a block": lambda h, w: h.reshape(N * 3, 4)[::2],
    "a carry that begins as zeros": lambda h, w: lax.scan(
        lambda c, _: ((c[0] + c[1][:, None, None], c[1] + jnp.arange(6.0)), None), (h, jnp.zeros(N)), None, 3
    )[0][0],
    "array of NumPy": lambda h, w: h * np.arange(6.0, dtype=np.float32)[:, None, None],
}


def a_loss(function):
    """A loss whose trunk ends in the function, and in an operation that is never repeated, so that it is stored."""

    def loss(params, x):
        h = lax.bessel_i1e(function(x @ params["trunk"], params["trunk"]))
        return jnp.sum(h * params["head"])

    return loss


ANY_SIZE = [
    name
    for name in APART
    if name not in ("concatenate", "positions of a batch", "reshape behind", "scan over time")
    and not name.startswith("reshape that joins")
]


@pytest.mark.parametrize("name", APART)
def test_features_of_a_shuffled_batch_are_the_shuffled_features(name):
    """And a part of the batch has a part of the features, if the function takes any number of examples."""
    loss = a_loss(APART[name])
    once = fz.precompute(loss, "trunk", example_axis=0)
    before = jax.jit(once.before)
    features, shuffled = before(PARAMS, BATCH), before(PARAMS, BATCH[ORDER])
    assert features
    for feature, other in zip(features, shuffled, strict=True):
        assert feature.shape[0] == N
        np.testing.assert_allclose(feature[ORDER], other, rtol=1e-6)
    some = ORDER[:2] if name in ANY_SIZE else ORDER
    value = jax.jit(once.after)(PARAMS, jax.tree.map(lambda feature: feature[some], features), BATCH[some])
    np.testing.assert_allclose(value, jax.jit(loss)(PARAMS, BATCH[some]), rtol=1e-5)


@pytest.mark.parametrize("name", MIXED)
def test_mixed_examples_are_refused_and_the_operation_named(name):
    loss = a_loss(MIXED[name])
    with pytest.raises(ValueError, match=r"examples are mixed(.|\n)*test_example_axis.py"):
        fz.precompute(loss, "trunk", example_axis=0).needed(PARAMS, BATCH)
    assert fz.precompute(loss, "trunk").needed(PARAMS, BATCH)["head"] is PARAMS["head"]


def scaled(params, batch):
    scale = batch["scale"]
    if jnp.issubdtype(jnp.result_type(scale), jax.dtypes.prng_key):
        scale = jax.random.uniform(scale)
    scale = jnp.atleast_2d(scale).sum(0)
    return jnp.sum(lax.bessel_i1e(batch["x"] * params["trunk"] * scale) * params["head"])


@pytest.mark.parametrize(
    ("axis", "scale"),
    [
        *((0, shared) for shared in (jnp.float32(2), np.float64(2), jax.random.key(0), np.ones(3))),
        (0, np.ones((5, 3))),
        (2, np.ones((4, 3))),
    ],
)
def test_arrays_of_a_batch_without_a_common_axis(axis, scale):
    """Shared arrays do not recur, since features of one scale would be taken for those of another."""
    with pytest.raises(ValueError, match=r"(?s)no common axis of examples.*batch/scale of shape \("):
        fz.precompute(scaled, "trunk", example_axis=axis).before(NUMBERS, {"x": jnp.ones((4, 3)), "scale": scale})


def test_arrays_of_a_batch_with_a_common_axis():
    batch = {"x": np.ones((4, 3)), "scale": np.ones((5, 3))}
    [feature] = fz.precompute(scaled, "trunk", example_axis=1).before(NUMBERS, batch)
    assert feature.shape == (3, 4)


def test_a_number_that_all_examples_share_is_part_of_the_program():
    batch = {"x": jnp.ones((4, 3)), "scale": 2.0}
    once = fz.precompute(scaled, "trunk", example_axis=0)
    features = once.before(NUMBERS, batch)
    assert once.after(NUMBERS, features, batch) == scaled(NUMBERS, batch)
    with pytest.raises(ValueError, match="another program"):
        once.after(NUMBERS, features, {**batch, "scale": 4.0})
    with pytest.raises(ValueError, match=r"(?s)no common axis of examples.*jax.jit must not trace"):
        jax.jit(once.before)(NUMBERS, batch)


def test_features_of_other_examples_are_refused():
    """Pooled features of another resolution have the same shape."""

    def loss(params, x):
        return jnp.sum(jnp.sort(x * params["trunk"]).max((1, 2)) * params["head"])

    once = fz.precompute(loss, "trunk", example_axis=0)
    features = once.before(NUMBERS, jnp.ones((4, 8, 8)))
    assert once.after(NUMBERS, features, jnp.ones((4, 8, 8))) == 24
    with pytest.raises(ValueError, match="computed by another program"):
        once.after(NUMBERS, features, jnp.ones((4, 6, 6)))


def test_what_mixes_examples_of_the_batch_alone_is_computed_in_each_step():
    def loss(params, x):
        ranked = jnp.sort(x, axis=0)
        h, head = jnp.sort(x @ params["trunk"]), params["head"]
        return jnp.sum(h * head) + jnp.sum(ranked * 2 * head) - jnp.sum((ranked + 1) * head)

    once = fz.precompute(loss, "trunk", example_axis=0)
    shuffled = jax.tree.map(lambda feature: feature[ORDER], once.before(PARAMS, BATCH))
    np.testing.assert_allclose(once.after(PARAMS, shuffled, BATCH[ORDER]), loss(PARAMS, BATCH[ORDER]), rtol=1e-6)


@pytest.mark.parametrize("name", ["elementwise", "attention", "softmax", "flat"])
def test_a_batch_of_one_belongs_to_the_others(name):
    function = APART.get(name, lambda h, w: (h.reshape(-1, 4) @ w).reshape(-1, 12)[:, 1:])
    once = fz.precompute(a_loss(function), "trunk", example_axis=0)
    one, several = once.before(PARAMS, BATCH[:1]), once.before(PARAMS, BATCH)
    assert one.cut == several.cut
    np.testing.assert_allclose(one[0], several[0][:1], rtol=1e-5)


def test_a_shared_number_alone_gives_no_features():
    def loss(params, batch):
        return jnp.mean(batch["x"] @ params["head"]) * jnp.sum((batch["t"] * params["trunk"]) @ params["trunk"])

    params = {"trunk": W, "head": jnp.ones((4, 2))}
    with pytest.raises(ValueError, match="nothing to compute once"):
        fz.precompute(loss, "trunk", example_axis=0).before(params, {"x": jnp.ones((4, 4)), "t": 2.0})


BESIDE = {
    "a key of two numbers": lambda n: (
        lambda h, y, key: jnp.mean(h * jax.random.normal(key, h.shape) * y[:, None]),
        jnp.ones(n),
        jax.random.PRNGKey(0),
    ),
    "weights of classes": lambda n: (
        lambda h, y, weights: jnp.mean(h[jnp.arange(len(h)), y] * weights[y]),
        jnp.zeros(n, int),
        jnp.ones(4),
    ),
    "weights of classes, multiplied": lambda n: (
        lambda h, y, w: jnp.mean((h * w).sum(1) * y),
        jnp.ones(n),
        jnp.ones(4),
    ),
    "in one dict": lambda n: (
        lambda h, of: jnp.mean(h * of["y"][:, None] * jax.random.normal(of["key"], (4,))),
        {"key": jax.random.PRNGKey(0), "y": jnp.ones(n)},
    ),
    "a teacher": lambda n: (
        lambda h, teacher, y: jnp.mean((y @ teacher["kernel"] + teacher["bias"]) @ teacher["out"]["kernel"] * h),
        {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4), "out": {"kernel": jnp.ones((4, 4))}},
        jnp.ones((n, 4)),
    ),
    "pairs": lambda n: (lambda h, pairs: jnp.mean((h @ h.T - pairs) ** 2), jnp.ones((n, n))),
}


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("axis", [0, 1])
def test_what_does_not_recur_may_have_the_size_of_the_batch(name, axis):
    """Features of six examples belong to any others, also where another argument has as many entries by chance."""

    def loss(params, x, *others):
        h = jnp.sort(jnp.swapaxes(x, 0, axis) @ params["trunk"]) * params["head"]
        return BESIDE[name](0)[0](h, *others)

    before = fz.precompute(loss, "trunk", example_axis=axis).before
    batches = {n: jnp.swapaxes(jnp.ones((n, 4)), 0, axis) for n in (N, 2, 4)}
    assert len({jax.eval_shape(before, PARAMS, x, *BESIDE[name](n)[1:]).cut for n, x in batches.items()}) == 1


@pytest.mark.parametrize("trunk", [lambda h, n: h * n, lambda h, n: h**n], ids=["a factor", "a power"])
def test_features_with_the_number_of_examples_in_their_values_are_refused(trunk):
    def loss(params, x):
        return jnp.sum(jnp.sort(trunk(x * params["trunk"], x.shape[0])) * params["head"])

    once = fz.precompute(loss, "trunk", example_axis=0)
    features = once.before(NUMBERS, jnp.ones((4, 3)))
    assert once.after(NUMBERS, features, jnp.ones((4, 3))) == loss(NUMBERS, jnp.ones((4, 3)))
    with pytest.raises(ValueError, match="another program"):
        once.after(NUMBERS, jax.tree.map(lambda feature: feature[:2], features), jnp.ones((2, 3)))
