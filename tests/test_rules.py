"""Each operation on an array frozen by rows: read in parts, and equal to the dense one."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

import optax_freeze as fz

TOKENS = jnp.array([[0, 5, 3], [-1, 2, 5]])
X = jax.random.normal(jax.random.key(1), (3, 4))


@jax.custom_jvp
def quantised(w):
    return jnp.round(4 * w) / 4


@quantised.defjvp
def _(primals, tangents):
    [w], [dw] = primals, tangents
    return quantised(w), 3 * dw * (jnp.abs(w) < 1)


@jax.custom_jvp
def looked_up(w, tokens):
    return jnp.tanh(w[tokens])


@looked_up.defjvp
def _(primals, tangents):
    (w, tokens), (dw, _) = primals, tangents
    return looked_up(w, tokens), 2 * dw[tokens]


@jax.custom_jvp
def normalised(w):
    return w / jnp.sum(w)


@normalised.defjvp
def _(primals, tangents):
    [w], [dw] = primals, tangents
    return normalised(w), dw - jnp.mean(dw)


@functools.partial(jax.custom_vjp, nondiff_argnums=())
def backwards_doubled(w):
    return w


backwards_doubled.defvjp(lambda w: (w, None), lambda _, ct: (2 * ct,))


def layer(x, w):
    return jnp.tanh(x @ w), x.sum()


def scanned(w, reverse=False, unroll=1, body=layer, **more):
    return jax.lax.scan(body, X, w, reverse=reverse, unroll=unroll, **more)


def unrolled(w):
    x = X
    for i in range(w.shape[0]):
        x, _ = layer(x, w[i])
    return x


def chunked_head(w):
    """The leaf is a constant of a scan."""
    return jax.lax.map(lambda x: jax.nn.logsumexp(x @ w.T), X)


TABLE = {
    "lookup": lambda w: w[TOKENS],
    "lookup of one": lambda w: w[TOKENS[0, 1]],
    "lookup of other columns": lambda w: w[:, TOKENS % 4],
    "lookup of rows and columns": lambda w: w[TOKENS, 1:3],
    "lookup of elements": lambda w: w[TOKENS, TOKENS % 4],
    "take": lambda w: jnp.take(w, TOKENS, axis=0),
    "take, clip": lambda w: jnp.take(w, TOKENS * 3, axis=0, mode="clip"),
    "take, wrap": lambda w: jnp.take(w, TOKENS * 3, axis=0, mode="wrap"),
    "take, fill": lambda w: jnp.take(w, TOKENS * 3, axis=0, mode="fill", fill_value=7.0),
    "take by bytes": lambda w: jnp.take(w, TOKENS.astype(jnp.uint8) % 6, axis=0),
    "take_along_axis": lambda w: jnp.take_along_axis(w, TOKENS.T % 4, axis=1) if w.shape[0] == 3 else w[:, 0],
    "one row": lambda w: w[4],
    "last row": lambda w: w[-1],
    "some rows": lambda w: w[2:5],
    "rows with a step": lambda w: w[1::2],
    "reversed": lambda w: w[::-1][1:3],
    "columns": lambda w: w[:, 1:3],
    "a dynamic row": lambda w: jax.lax.dynamic_index_in_dim(w, TOKENS[0, 2]),
    "dynamic rows": lambda w: jax.lax.dynamic_slice_in_dim(w, TOKENS[0, 1], 3),
    "dynamic columns": lambda w: jax.lax.dynamic_slice_in_dim(w, TOKENS[0, 1], 2, axis=1),
    "pieces": lambda w: [a * b for a, b in zip(jnp.split(w, 3), (1, 2, 3), strict=True)],
    "pieces of columns": lambda w: jnp.split(w, 2, axis=1)[0][TOKENS],
    "cast": lambda w: w.astype(jnp.bfloat16)[TOKENS].astype(jnp.float32),
    "copy": lambda w: jnp.copy(w)[TOKENS],
    "transpose": lambda w: w.T[:, TOKENS],
    "reshape": lambda w: w.reshape(6, 2, 2)[TOKENS],
    "more axes": lambda w: w[:, None, :, None][TOKENS],
    "broadcast": lambda w: jnp.broadcast_to(w, (2, 6, 4))[:, TOKENS],
    "squeeze": lambda w: jnp.squeeze(w[None], 0)[TOKENS],
    "unary": lambda w: jnp.tanh(jnp.exp(-jnp.abs(w)))[TOKENS],
    "relu": lambda w: jax.nn.relu(w)[TOKENS],
    "silu": lambda w: jax.nn.silu(w)[TOKENS],
    "binary": lambda w: (w * 2.0 + jnp.arange(24.0).reshape(6, 4))[TOKENS],
    "norm of each row": lambda w: (w / jnp.linalg.norm(w, axis=1, keepdims=True))[TOKENS],
    "softmax of each row": lambda w: jax.nn.softmax(w, -1)[TOKENS],
    "sum": lambda w: jnp.sum(w**2),
    "where": lambda w: jnp.where(w > 0, w, 0.1 * w)[TOKENS],
    "head": lambda w: X @ w.T,
    "tied head": lambda w: jax.nn.log_softmax(jnp.tanh(w[TOKENS]) @ w.T),
    "head on the left": lambda w: w @ X.T,
    "contracted": lambda w: jax.nn.one_hot(TOKENS, 6) @ w,
    "contracted on the left": lambda w: w.T @ jnp.ones((6, 2)),
    "batched": lambda w: jnp.einsum("rd,rd->r", w, jnp.arange(24.0).reshape(6, 4)),
    "with itself": lambda w: w @ w.T,
    "jit": lambda w: jax.jit(lambda w, x: x @ w.T)(w, X),
    "remat": lambda w: jax.checkpoint(lambda w, x: jnp.tanh(x @ w.T))(w, X),
    "remat with a policy": jax.checkpoint(lambda w: X @ w.T, policy=jax.checkpoint_policies.dots_saveable),
    "vmap": lambda w: jax.vmap(lambda t, x: w[t] @ x)(TOKENS[0], X),
    "inner gradient": lambda w: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w.T)))(X),
    "a constant of a scan": chunked_head,
    "fori_loop": lambda w: jax.lax.fori_loop(0, 6, lambda i, x: jnp.tanh(x + w[i]), jnp.ones(4)),
    "custom_jvp of elements": lambda w: quantised(w)[TOKENS],
    "custom_jvp of a lookup": lambda w: looked_up(w, TOKENS),
    "stop_gradient": lambda w: (w - jax.lax.stop_gradient(w) * 2)[TOKENS],
    "optimization_barrier": lambda w: jax.lax.optimization_barrier(w)[TOKENS],
    "checkpoint_name": lambda w: checkpoint_name(w, "embed")[TOKENS],
    "returned": lambda w: jnp.mean(w[TOKENS]) * 1.0,
}
STACK = {
    "scan": scanned,
    "reverse scan": functools.partial(scanned, reverse=True),
    "unrolled scan": functools.partial(scanned, unroll=2),
    "unrolled reverse scan": functools.partial(scanned, unroll=4, reverse=True),
    "scan of remat": functools.partial(scanned, body=jax.checkpoint(layer)),
    "scan of jit": functools.partial(scanned, body=jax.jit(layer)),
    "scan in remat": jax.checkpoint(scanned),
    "scan in jit": jax.jit(scanned),
    "scan of a cast": lambda w: scanned(w.astype(jnp.bfloat16).astype(jnp.float32)),
    "scan of a part": lambda w: scanned(w[1:5]),
    "map": lambda w: jax.lax.map(lambda w: X @ w, w),
    "layers in a loop": unrolled,
    "layers of einsum": lambda w: jnp.einsum("xd,lde->lxe", X, w),
    "vmap over layers": jax.vmap(lambda w: jnp.tanh(X @ w)),
}
MERGED = {
    "sort": lambda w: jnp.sort(w, axis=0),
    "concatenate": lambda w: jnp.concatenate([w, w])[TOKENS],
    "cond": lambda w: jax.lax.cond(X[0, 0] > 0, lambda w: w[TOKENS], lambda w: w[TOKENS] * 2, w),
    "custom_vjp": lambda w: backwards_doubled(w)[TOKENS],
    "custom_jvp across rows": normalised,
    "flattened": lambda w: w.reshape(-1),
    "a constant of a scan, sorted": lambda w: jax.lax.map(lambda x: jnp.sort(w, axis=0) @ x, X),
    "all rows": lambda w: jnp.max(w, axis=0),
}
ROWS = [slice(0, 5), [0, 2, 5], slice(1, 3)]


def check(fun, w, rows, *, axis=0, in_parts=True, run=lambda fn: fn):
    """``fun`` of a leaf of which some rows are frozen, beside ``fun`` of the whole leaf."""
    weights = [jax.random.normal(jax.random.key(7), x.shape) for x in jax.tree.leaves(jax.eval_shape(fun, w))]

    def loss(params):
        return sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(fun(params["w"])), weights, strict=True))

    params, frozen = {"w": w}, {"w": fz.rows(rows, axis)}
    value, grads = run(fz.value_and_grad(loss, frozen))(params)
    expected_value, expected = run(jax.value_and_grad(loss))(params)
    chex.assert_trees_all_close(value, expected_value, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(grads, fz.partition(expected, frozen)[0], rtol=1e-5, atol=1e-5)
    [row] = fz.explain(loss, params, frozen).rows
    assert (row.merged is None) == in_parts, str(row)
    return row


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("name", TABLE)
def test_a_table_in_parts(name, rows):
    check(TABLE[name], jax.random.normal(jax.random.key(0), (6, 4)), rows)


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("name", STACK)
def test_a_stack_in_parts(name, rows):
    check(STACK[name], jax.random.normal(jax.random.key(0), (6, 4, 4)), rows)


@pytest.mark.parametrize("name", MERGED)
def test_merged(name):
    check(MERGED[name], jax.random.normal(jax.random.key(0), (6, 4)), slice(0, 4), in_parts=False)
