"""Each operation on an array frozen by rows: read in parts, and equal to the dense one."""

import contextlib
import dataclasses
import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import bits
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import optax_freeze as fz

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=QUICK)
"""``jax.jit`` of programs that run once."""
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


@jax.custom_vjp
def sorted_backwards(w):
    return w


sorted_backwards.defvjp(lambda w: (w, None), lambda _, ct: (jnp.sort(ct, axis=0),))


@jax.custom_vjp
def with_integers(w, tokens):
    return w, tokens


with_integers.defvjp(lambda w, tokens: ((w, tokens), None), lambda _, cts: (2 * cts[0], None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product_of_own_rule(w, x, scale):
    return scale * x @ w.T


def _own_cotangents(scale, operands, ct):
    """Twice the cotangent of ``w``, to tell it from the derivative."""
    w, x = operands
    return 2 * scale * (x.T @ ct).T + jnp.zeros((1, w.shape[1])), scale * ct @ w


product_of_own_rule.defvjp(lambda w, x, scale: (scale * x @ w.T, (w, x)), _own_cotangents)


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


def _scattered(w, start, block, mode=None):
    numbering = jax.lax.ScatterDimensionNumbers((0, 1), (), (0,))
    return jax.lax.scatter(w, jnp.array([start]), block, numbering, unique_indices=True, mode=mode)[TOKENS]


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
    "added to activations": lambda w: jnp.tanh(X) + w[:3],
    "broadcast to activations": lambda w: jnp.sin(jnp.ones((3, 6, 4)) * X.sum() + w) * w,
    "a column times activations": lambda w: w[:3, :1] * 2 + jnp.sin(jnp.arange(6.0) * X[0, 0]),
    "joined with activations": lambda w: jnp.sin(jnp.concatenate([w, X, w[:1]])) @ jnp.ones((4, 3)),
    "maximum over the rows": lambda w: jnp.max(w * 2.0, axis=0),
    "nearest row": lambda w: w[jnp.argmin(jnp.sum((X[:, None] - w) ** 2, -1), 0)],
    "convolution": lambda w: jax.lax.conv_general_dilated(
        jnp.sin(jnp.arange(24.0)).reshape(1, 6, 4), w[None], (1,), "SAME", dimension_numbers=("NWC", "WOI", "NWC")
    ),
    "stop_gradient": lambda w: (w - jax.lax.stop_gradient(w) * 2)[TOKENS],
    "optimization_barrier": lambda w: jax.lax.optimization_barrier(w)[TOKENS],
    "checkpoint_name": lambda w: checkpoint_name(w, "embed")[TOKENS],
    "joined": lambda w: jnp.concatenate([X, w, X, w])[TOKENS + 4],
    "joined, all rows": lambda w: jnp.concatenate([w * 2, X.astype(jnp.float32), w]) ** 2,
    "side by side": lambda w: jnp.concatenate([w, jnp.ones((6, 2)), w * 2], axis=1)[TOKENS],
    "stacked": lambda w: jnp.stack([w, jnp.ones((6, 4)), 2 * w])[:, TOKENS],
    "stacked within rows": lambda w: jnp.stack([w, w * w], axis=-1)[TOKENS],
    "padded": lambda w: jnp.pad(w, ((2, 1), (1, 0)), constant_values=3.0) ** 2,
    "padded and cut": lambda w: jax.lax.pad(w, 2.0, ((-2, 3, 0), (0, 0, 0)))[TOKENS],
    "padded between": lambda w: jax.lax.pad(w, 0.0, ((-1, 0, 2), (1, -1, 1)))[:9],
    "vocabulary of a multiple of 8": lambda w: X @ jnp.pad(w, ((0, -w.shape[0] % 8), (0, 0))).T,
    "rolled": lambda w: jnp.roll(w, 2, axis=0)[TOKENS],
    "a row set": lambda w: w.at[0].set(0.0)[TOKENS],
    "a row set to another": lambda w: w.at[1].set(w[5] * 2)[TOKENS],
    "rows set": lambda w: w.at[jnp.array([0, -1])].set(X[:2])[TOKENS],
    "unknown rows set": lambda w: w.at[TOKENS[0]].set(X, unique_indices=True)[TOKENS],
    "unknown rows set twice": lambda w: w.at[jnp.abs(TOKENS[0])].set(X)[TOKENS],
    "rows set, clip": lambda w: w.at[TOKENS[0] + 3].set(X[:, :1] + jnp.zeros(4), mode="clip")[TOKENS],
    "rows set, dropped": lambda w: w.at[TOKENS[0] + 3].set(X, mode="drop")[TOKENS],
    "rows with a step set": lambda w: w.at[::2].set(1.0)[TOKENS],
    "a block set": lambda w: w.at[1:4].set(X)[TOKENS],
    "nearly all rows set": lambda w: w.at[:5].set(X[TOKENS[0, [0, 0, 0, 0, 0]]])[TOKENS],
    "an unknown block set": lambda w: _scattered(w, TOKENS[0, 1], X),
    "an unknown block set, clip": lambda w: _scattered(w, TOKENS[0, 1], X, "clip"),
    "a block dropped": lambda w: _scattered(w, 4, X),
    "a block of columns set": lambda w: w.at[1:4, 1].set(X[:, 0])[TOKENS],
    "a column set": lambda w: w.at[:, 0].set(0.0)[TOKENS],
    "columns multiplied": lambda w: w.at[:, jnp.array([0, 2])].multiply(3.0, unique_indices=True)[TOKENS],
    "an element set": lambda w: w.at[1, 2].set(5.0)[TOKENS],
    "rows added": lambda w: w.at[TOKENS].add(1.5)[TOKENS],
    "a block added": lambda w: w.at[2:5].add(X)[TOKENS],
    "updated": lambda w: jax.lax.dynamic_update_slice(w, X[:2], (3, 0))[TOKENS],
    "updated beyond the end": lambda w: jax.lax.dynamic_update_slice(w, X[:2, :3], (9, 1))[TOKENS],
    "updated at an unknown row": lambda w: jax.lax.dynamic_update_slice(w, X, (TOKENS[0, 1], 0))[TOKENS],
    "updated at a row in a byte": lambda w: jax.lax.dynamic_update_slice(
        jnp.pad(w, ((0, 300), (0, 0))), X, (jnp.uint8(2), jnp.uint8(0))
    )[TOKENS],
    "updated at an unknown row in a byte": lambda w: jax.lax.dynamic_update_slice(
        jnp.pad(w, ((0, 300), (0, 0))), X, (TOKENS[0, 1].astype(jnp.uint8), jnp.uint8(0))
    )[TOKENS],
    "updated columns": lambda w: jax.lax.dynamic_update_slice(w, jnp.ones((6, 2)), (0, TOKENS[0, 2]))[TOKENS],
    "rows flattened": lambda w: w.reshape(-1)[TOKENS],
    "rows flattened after others": lambda w: jnp.stack([w, w]).reshape(12, 4)[TOKENS],
    "rows unflattened": lambda w: w.reshape(-1).reshape(6, 2, 2)[TOKENS],
    "cumsum": lambda w: jnp.cumsum(w, axis=0),
    "reverse cumsum": lambda w: jax.lax.cumsum(w, reverse=True)[TOKENS],
    "cumprod within rows": lambda w: jnp.cumprod(w, axis=1)[TOKENS],
    "cummax within rows": lambda w: jax.lax.cummax(w, 1)[TOKENS],
    "cond": lambda w: jax.lax.cond(X[0, 0] > 0, lambda w: X @ w.T, lambda w: X * w[0] @ jnp.tanh(w.T), w),
    "cond of constants": lambda w: jax.lax.cond(X[0, 0] > 0, lambda: w[TOKENS], lambda: w[TOKENS] * 2),
    "cond of what is split": lambda w: jax.lax.cond(X[0, 0] > 0, lambda w: w, jnp.tanh, w)[TOKENS],
    "switch": lambda w: jax.lax.switch(
        TOKENS[0, 2] - 2, [lambda w: X @ w.T, lambda w: (w @ X.T).T, lambda w: X * w[0] @ w.T], w
    ),
    "cond in a scan": lambda w: jax.lax.map(lambda i: jax.lax.cond(i > 1, lambda: w[i], lambda: w[0] * 2), TOKENS[0]),
    "mapped cond": lambda w: jax.vmap(lambda i: jax.lax.cond(i > 1, lambda: w[i], lambda: w[0] * 2))(TOKENS[0]),
    "joined along two axes": lambda w: jnp.concatenate([w[1:5], w[1:5].T])[TOKENS],
    "joined, all rows trainable": lambda w: jnp.concatenate([w[3:5], w[3:5][::-1]], 1),
    "returned": lambda w: jnp.mean(w[TOKENS]) * 1.0,
    "sort": lambda w: jnp.sort(w, axis=0),
    "a column set in some rows": lambda w: jnp.zeros((6, 4)).at[:, 1].set(w[:, 0]),
    "cond of a sort": lambda w: jax.lax.cond(X[0, 0] > 0, lambda w: jnp.sort(w, 0), lambda w: w, w),
    "cumprod": lambda w: jnp.cumprod(w, axis=0),
    "rows multiplied": lambda w: w.at[TOKENS[0] % 3].multiply(X, unique_indices=True)[TOKENS],
    "custom_jvp across rows": normalised,
    "a constant of a scan, sorted": lambda w: jax.lax.map(lambda x: jnp.sort(w, axis=0) @ x, X),
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
    "custom_vjp": lambda w: sorted_backwards(w)[TOKENS],
    "reshaped across rows": lambda w: w.reshape(8, 3),
}
ROWS = [slice(0, 5), [0, 2, 5], slice(1, 3), [3], slice(None, None, 2)]


def check(funs, w, rows, *, axis=0, in_parts=True, run=jit):
    """Functions, by name, of a leaf of which some rows are frozen, beside those of the whole leaf, in one program.

    What the full array holds at the trainable rows is stale, and must not be seen.
    """
    funs = funs if isinstance(funs, dict) else {"": funs}
    params, frozen, random = {"w": w}, {"w": fz.rows(rows, axis)}, np.random.default_rng(7)
    sizes = {name: jax.tree.leaves(jax.eval_shape(fun, w)) for name, fun in funs.items()}
    weights = {name: [random.normal(size=x.shape).astype(x.dtype) for x in each] for name, each in sizes.items()}

    def loss(name, params):
        outs = jax.tree.leaves(funs[name](params["w"]))
        return sum(jnp.sum(a * b) for a, b in zip(outs, weights[name], strict=True))

    losses = {name: functools.partial(loss, name) for name in funs}

    def all_ways(params):
        trainable, rest = fz.partition(params, frozen)
        nothing = {"w": dataclasses.replace(trainable["w"], values=jnp.full_like(trainable["w"].values, jnp.nan))}
        _, stale = fz.partition(fz.combine(nothing, rest), frozen)
        dense = {name: jax.value_and_grad(loss)(params) for name, loss in losses.items()}
        return (
            {name: jax.value_and_grad(fz.restrict(loss, stale))(trainable) for name, loss in losses.items()},
            {name: fz.value_and_grad(loss, frozen)(params) for name, loss in losses.items()},
            {name: (value, fz.partition(grads, frozen)[0]) for name, (value, grads) in dense.items()},
        )

    of_stale, of_whole, expected = run(all_ways)(params)
    chex.assert_trees_all_close(of_stale, expected, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(of_whole, expected, rtol=1e-5, atol=1e-5)
    for name, loss in losses.items():
        [row] = fz.explain(loss, params, frozen).rows
        assert (row.merged is None) == in_parts, f"{name}: {row}"
        assert row.by_rows or row.everything or not in_parts, name


def some(table, i, of):
    """Every ``of``-th entry of a table, from the one numbered ``i``."""
    return {name: table[name] for name in list(table)[i::of]}


@pytest.mark.parametrize("i", range(10))
def test_a_table_in_parts(i):
    check(some(TABLE, i, 10), jax.random.normal(jax.random.key(0), (6, 4)), ROWS[i % len(ROWS)])


@pytest.mark.parametrize("i", range(len(ROWS)))
def test_a_stack_in_parts(i):
    check(some(STACK, i, len(ROWS)), jax.random.normal(jax.random.key(0), (6, 4, 4)), ROWS[i])


def test_cond_of_other_rows():
    def fun(w):
        return jax.lax.cond(X[0, 0] > 9, lambda w: w, lambda w: w[::-1], w * 2)[TOKENS]

    check(fun, jax.random.normal(jax.random.key(0), (6, 4)), slice(0, 4))


def test_custom_vjp():
    """Its own rule is a part of the gradient, of which the rows are computed as of any other."""

    def fun(w):
        return backwards_doubled(w)[TOKENS]

    w = jax.random.normal(jax.random.key(0), (6, 4))
    own_rules = {
        "doubled": fun,
        "with integers": lambda w: with_integers(w, TOKENS)[0][TOKENS],
        "product": lambda w: product_of_own_rule(w, X, 3.0),
    }
    check(own_rules, w, slice(0, 4))
    check(fun, w, [3])


def test_merged():
    check(MERGED, jax.random.normal(jax.random.key(0), (6, 4)), slice(0, 4), in_parts=False)


@pytest.mark.parametrize("rows", [slice(0, 5), slice(1, 6)])
def test_a_clipped_lookup_of_the_edges(rows):
    """Numbers out of range name the first and the last row, which train."""
    check(TABLE["take, clip"], jax.random.normal(jax.random.key(0), (6, 4)), rows)


def test_rows_along_two_axes_of_a_square():
    funs = {
        "times": lambda w: w * w.T,
        "where": lambda w: jnp.where(w > 0, w.T, 1.0),
        "minus": lambda w: w.T - w**2,
    }
    check(funs, jax.random.normal(jax.random.key(0), (4, 4)), slice(0, 2))


def test_a_donated_argument_of_an_inner_jit():
    """The inner function would lose its donation."""

    def loss(p):
        return jnp.sum(jax.jit(lambda w: jnp.tanh(w) * 2, donate_argnums=0)(p["w"] * 1.0) ** 2)

    params, frozen = {"w": jax.random.normal(jax.random.key(0), (6, 4))}, {"w": fz.rows(slice(0, 4))}
    [row] = fz.explain(loss, params, frozen).rows
    assert row.merged.name in ("jit", "pjit")
    assert "donated_invars=(True" in str(
        jax.make_jaxpr(fz.restrict(loss, fz.partition(params, frozen)[1]))(fz.partition(params, frozen)[0])
    )
    expected = fz.partition(jax.grad(loss)(params), frozen)[0]
    chex.assert_trees_all_close(fz.grad(loss, frozen)(params), expected, rtol=1e-5)


def test_eagerly():
    """Outside of ``jit``, where the numbers of rows are concrete."""
    names = ("a dynamic row", "dynamic rows", "lookup", "take, fill")
    funs = {name: TABLE[name] for name in names}
    check(funs, jax.random.normal(jax.random.key(0), (6, 4)), [0, 2, 5], run=lambda fn: fn)


@pytest.mark.parametrize("rows", ROWS)
def test_other_rows(rows):
    names = ("tied head", "dynamic rows", "contracted", "a constant of a scan")
    check({name: TABLE[name] for name in names}, jax.random.normal(jax.random.key(0), (6, 4)), rows)
    check(jax.checkpoint(scanned), jax.random.normal(jax.random.key(0), (6, 4, 4)), rows)


def test_rows_along_another_axis():
    w = jax.random.normal(jax.random.key(0), (4, 6))
    check(lambda w: w[:, TOKENS], w, slice(0, 5), axis=1)
    check(lambda w: X @ w, w, [1, 4], axis=1)
    check(lambda w: w @ jnp.ones((6, 2)), w, slice(2, 3), axis=-1)
    stack = jax.random.normal(jax.random.key(0), (4, 6, 4))  # as MaxText stacks its layers
    check(lambda w: scanned(jnp.moveaxis(w, 1, 0)), stack, slice(0, 4), axis=1)
    groups = jax.random.normal(jax.random.key(0), (2, 6, 4, 4))

    def nested(w):
        return jax.lax.scan(lambda x, w: (scanned(w)[0], None), X, w)[0]

    check(nested, groups, slice(0, 4), axis=1)
    check(nested, groups, slice(0, 1), axis=0)


def test_leaves_with_different_boundaries():
    params = {
        "w": jax.random.normal(jax.random.key(0), (6, 4, 4)),
        "scale": jax.random.normal(jax.random.key(1), (6, 4)),
        "bias": jnp.ones((6, 4)),
        "frozen": jax.random.normal(jax.random.key(2), (6, 4)),
        "head": jnp.ones((4, 3)),
    }
    frozen = {"w": fz.rows(slice(0, 4)), "scale": fz.rows([0, 2, 3, 5]), "bias": False, "frozen": True, "head": False}

    def loss(params):
        def block(x, p):
            x = jnp.tanh(x @ p["w"]) * p["scale"] + p["bias"] * p["frozen"]
            return x, x.sum()

        layers = {name: params[name] for name in ("w", "scale", "bias", "frozen")}
        x, sums = jax.lax.scan(jax.checkpoint(block), X, layers)
        mixed = params["scale"] * params["w"].sum(-1) + params["bias"]
        return jnp.sum((x @ params["head"]) ** 2) + sums @ jnp.arange(6.0) + mixed[2:5].sum()

    @jit
    def both(params):
        value, grads = jax.value_and_grad(loss)(params)
        return fz.value_and_grad(loss, frozen)(params), (value, fz.partition(grads, frozen)[0])

    chex.assert_trees_all_close(*both(params), rtol=1e-4, atol=1e-4)
    assert all(row.merged is None for row in fz.explain(loss, params, frozen).rows)


def shapes_in(jaxpr):
    """Shapes of all values that a program computes."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(param, "jaxpr") or hasattr(param, "eqns"):
                yield from shapes_in(getattr(param, "jaxpr", param))


class TestCost:
    def test_a_lookup_computes_nothing_of_the_size_of_the_table(self):
        params, frozen = {"w": jnp.ones((100, 4))}, {"w": fz.rows(slice(0, 98))}

        def loss(p):
            return jnp.sum(jnp.tanh(p["w"][TOKENS] @ p["w"][3:7].T))

        program = jax.make_jaxpr(fz.grad(loss, frozen))(params)
        assert (100, 4) not in set(shapes_in(program.jaxpr))
        assert (100, 4) in set(shapes_in(jax.make_jaxpr(jax.grad(loss))(params).jaxpr))

    def test_the_gradient_of_a_tied_head_has_the_rows_that_train(self):
        params, frozen = {"w": jnp.ones((100, 4))}, {"w": fz.rows(slice(0, 98))}
        trainable, rest = fz.partition(params, frozen)

        def loss(p):
            return jnp.sum(jnp.tanh(p["w"][TOKENS]) @ p["w"].T)

        program = jax.make_jaxpr(jax.grad(fz.restrict(loss, rest)))(trainable)
        shapes = [v.aval.shape for eqn in program.eqns for v in eqn.outvars if eqn.primitive.name == "dot_general"]
        assert (2, 4) in shapes
        assert (100, 4) not in shapes

    def test_the_first_layers_have_no_backward(self):
        w, x = jnp.ones((8, 32, 32)) / 32, jnp.ones((64, 32))

        def flops(fun, *args):
            return jax.jit(fun).lower(*args).compile().cost_analysis()["flops"]

        def loss(params, x):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"], unroll=8)
            return jnp.sum(x)

        def in_a_loop(params, x):
            for i in range(8):
                x = jnp.tanh(x @ params["w"][i])
            return jnp.sum(x)

        frozen = {"w": fz.rows(slice(0, 7))}
        matmul = 2 * 64 * 32 * 32
        for fun in (loss, in_a_loop):
            assert flops(fz.grad(fun, frozen), {"w": w}, x) == pytest.approx(9 * matmul, rel=0.05)
            assert flops(jax.grad(fun), {"w": w}, x) > 20 * matmul

    def test_the_frozen_layers_are_not_copied(self):
        params, frozen = {"w": jnp.ones((6, 4, 4))}, {"w": fz.rows(slice(0, 4))}

        def loss(p):
            return jnp.sum(scanned(p["w"])[0])

        program = jax.make_jaxpr(fz.grad(loss, frozen))(params)
        assert not {(6, 4, 4), (4, 4, 4), (5, 4, 4)} & set(shapes_in(program.jaxpr))

    def test_other_frozen_leaves_are_not_copied_either(self):
        params = {"w": jnp.ones((6, 4, 4)), "frozen": jnp.ones((6, 4, 4)), "trains": jnp.ones((6, 4))}
        frozen = {"w": fz.rows(slice(0, 4)), "frozen": True, "trains": False}

        def loss(p):
            def body(x, of_layer):
                w, frozen, scale = of_layer
                return jnp.tanh(x @ w @ frozen) * scale, None

            return jnp.sum(jax.lax.scan(jax.checkpoint(body), X, (p["w"], p["frozen"], p["trains"]))[0])

        program = jax.make_jaxpr(fz.grad(loss, frozen))(params)
        assert not {(6, 4, 4), (4, 4, 4)} & set(shapes_in(program.jaxpr))

    def test_a_row_is_read_again_in_the_backward_pass_of_remat(self):
        params = {"w": jnp.ones((6, 4, 4)), "x": X}
        frozen = {"w": fz.rows(slice(0, 4)), "x": False}

        def loss(p):
            return jnp.sum(scanned(p["w"], body=jax.checkpoint(layer))[0] + p["x"])

        program = jax.make_jaxpr(fz.grad(loss, frozen))(params)
        assert not {(6, 4, 4), (4, 4, 4)} & set(shapes_in(program.jaxpr))


def multiplied(w, x):
    return w * x


@jax.custom_jvp
def ratio(w, x):
    return w / x


@ratio.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return ratio(w, x), dw / x - dx * w / x**2


@jax.custom_jvp
def arranged(w, x):
    return jnp.concatenate([w, x])


@arranged.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    written = dw.at[0].add(1.5 * dx[0]).at[:, 1].multiply(x[0, 0])
    return arranged(w, x), jnp.concatenate([jnp.cumsum(written, 1), dx * 2])


@jax.custom_jvp
def joined(w, x):
    return jnp.concatenate([w, x])


@joined.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return joined(w, x), jax.lax.pad(jnp.concatenate([2 * dw * w, dx]), 0.0, ((0, 0, 0), (1, -1, 0)))


OF_TWO = {
    "times": multiplied,
    "over": lambda w, x: w / x,
    "under": lambda w, x: x / w,
    "minus": lambda w, x: w - x,
    "to the power": lambda w, x: jnp.abs(w) ** x,
    "power of": lambda w, x: jnp.abs(x) ** w,
    "atan2": jnp.arctan2,
    "maximum": jnp.maximum,
    "log": lambda w, x: jnp.log(jnp.abs(w * x)),
    "exp": lambda w, x: jnp.exp(w * x),
    "sqrt": lambda w, x: jnp.sqrt(jnp.abs(w)) * x,
    "square": lambda w, x: (w * x) ** 2,
    "where": lambda w, x: jnp.where(w > x, w, x),
    "clip": lambda w, x: jnp.clip(w, x[0, 0], x[0, 0] + 1),
    "logaddexp": jnp.logaddexp,
    "xlogy": lambda w, x: jax.scipy.special.xlogy(jnp.abs(w), jnp.abs(x)),
    "custom_jvp": ratio,
    "custom_jvp, broadcast": lambda w, x: ratio(w, x[:1]),
    "custom_jvp, rearranged": lambda w, x: arranged(w, x) * 2,
    "custom_jvp, joined": lambda w, x: joined(w, x) ** 2,
    "custom_jvp, joined constants": lambda w, x: joined(w, jnp.ones((2, 3))) * 2,
    "relu": lambda w, x: jax.nn.relu(w * x),
    "silu": lambda w, x: jax.nn.silu(w) * x,
    "norm of each row": lambda w, x: w / jnp.linalg.norm(w, axis=1, keepdims=True) * x,
    "a row": lambda w, x: w * x[:1],
    "a column": lambda w, x: w * x[:, :1],
    "a scalar": lambda w, x: w / x[0, 0],
    "transpose": lambda w, x: w.T * x.T,
    "sum": lambda w, x: (w * x).sum(0),
    "sum within rows": lambda w, x: (w * x).sum(1),
    "sum, times": lambda w, x: w.sum(0) * x,
    "contracted": lambda w, x: x.T @ w,
    "contracted on the left": lambda w, x: w.T @ x,
    "head": lambda w, x: x @ w.T,
    "head on the left": lambda w, x: w @ x.T,
    "batched": lambda w, x: jnp.einsum("rd,rd->r", w, x),
    "one-hot": lambda w, x: jax.nn.one_hot(TOKENS[0], 6) @ w * x[:3],
    "lookup of a product": lambda w, x: (w * x)[TOKENS],
    "product of a lookup": lambda w, x: w[TOKENS] * x[:3],
    "dynamic rows": lambda w, x: jax.lax.dynamic_slice_in_dim(w, TOKENS[0, 2], 2) * x[:2],
    "scan": lambda w, x: jax.lax.scan(lambda c, r: (c * r[0] + r[1], c.sum()), jnp.ones(3), (w, x)),
    "a constant of a scan": lambda w, x: jax.lax.map(lambda r: w @ r, x),
    "jit": jax.jit(multiplied),
    "remat": jax.checkpoint(multiplied),
    "joined": lambda w, x: jnp.concatenate([x[:2], w, x]) ** 2,
    "joined, times": lambda w, x: jnp.concatenate([w, x[1:3]])[1:7] * x,
    "side by side": lambda w, x: jnp.prod(jnp.concatenate([w, x[:, 1:]], axis=1), axis=1),
    "stacked": lambda w, x: jnp.prod(jnp.stack([w, x]), axis=0),
    "padded": lambda w, x: jnp.cumprod(jnp.pad(w * x, ((1, 0), (1, 1)), constant_values=2.0), axis=1),
    "rows set": lambda w, x: w.at[jnp.array([0, 5])].set(x[1:3]) * 2,
    "a frozen row set": lambda w, x: jnp.log(jnp.abs(w.at[0].set(x[1]))),
    "an unknown row set": lambda w, x: jnp.sqrt(jnp.abs(w.at[TOKENS[0, 1]].set(x[1]))),
    "unknown rows added": lambda w, x: w.at[jnp.abs(TOKENS)].add(x.reshape(2, 3, 3))[TOKENS],
    "a column set": lambda w, x: jnp.prod(w.at[:, 1].set(x[:, 1]), axis=1),
    "a column multiplied": lambda w, x: w.at[:, 1].multiply(x[:, 1]),
    "a block set": lambda w, x: w.at[0:2].set(x[1:3]) ** 2,
    "a block added": lambda w, x: w.at[1:3, 1].add(x[:2, 1]) ** 2,
    "updated": lambda w, x: jax.lax.dynamic_update_slice(w, x[1:3, :2], (4, 1)) ** 2,
    "an unknown block": lambda w, x: jax.lax.dynamic_update_slice(w, x[1:3], (TOKENS[0, 1], 0)) ** 2,
    "flattened": lambda w, x: (w * x).reshape(-1)[1:] ** 2,
    "cumsum": lambda w, x: jnp.cumsum(w, axis=0) * x,
    "reverse cumsum": lambda w, x: jax.lax.cumsum(w * x, reverse=True),
    "cumprod within rows": lambda w, x: jnp.cumprod(w * x, axis=1),
    "cumlogsumexp within rows": lambda w, x: jax.lax.cumlogsumexp(w, 1) * x,
    "cond": lambda w, x: jax.lax.cond(TOKENS[0, 0] > 0, lambda w, x: w[:3], lambda w, x: (w * x)[3:], w, x),
    "cond of what is split": lambda w, x: jax.lax.cond(TOKENS[0, 0] > 0, lambda w: w, lambda w: w / x, w) * x,
    "cond of x": lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda w: w @ x.T, lambda w: x @ w.T, w),
}
"""Operations on the rows and another array of their shape, (6, 3)."""


class TestOfSeveral:
    """Operations that combine leaves, or their rows with other arrays."""

    PARAMS = {  # noqa: RUF012
        "w": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32),
        "v": np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32),
        "x": np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32),
        "frozen": np.random.default_rng(3).normal(size=(2, 4)).astype(np.float32),
    }
    FROZEN = {"w": fz.rows(slice(0, 4)), "v": fz.rows([0, 2, 5]), "x": False, "frozen": True}  # noqa: RUF012

    def check(self, fun, merged=()):
        def loss(p):
            out = fun(**p)
            return sum(jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)) for y in jax.tree.leaves(out))

        @jit
        def both(params):
            value, grads = jax.value_and_grad(loss)(params)
            return fz.value_and_grad(loss, self.FROZEN)(params), (value, fz.partition(grads, self.FROZEN)[0])

        chex.assert_trees_all_close(*both(self.PARAMS), rtol=1e-5, atol=1e-5)
        rows = fz.explain(loss, self.PARAMS, self.FROZEN).rows
        assert [row.path for row in rows if row.merged] == list(merged), "\n".join(map(str, rows))
        return set(shapes_in(jax.make_jaxpr(fz.grad(loss, self.FROZEN))(self.PARAMS).jaxpr))

    def test_joined(self):
        self.check(lambda w, v, x, frozen: jnp.concatenate([w, x, v, frozen])[TOKENS * 2 + 3] ** 2)
        self.check(lambda w, v, x, frozen: jnp.concatenate([v, w, jnp.cos(v)], 1)[TOKENS] ** 2)
        self.check(lambda w, v, x, frozen: jnp.concatenate([w, w[::-1], v, v[::-1]], 1)[TOKENS] ** 2)
        self.check(lambda w, v, x, frozen: jnp.stack([v, w], 1)[TOKENS] ** 2)

    def test_a_frozen_leaf_stays_frozen_in_a_join(self):
        shapes = self.check(lambda w, v, x, frozen: jnp.concatenate([frozen, w])[TOKENS] * v.sum())
        assert (4, 4) not in shapes  # two trainable rows, and those of the frozen leaf

    def test_what_is_written_into_a_frozen_row_trains(self):
        def written(w, v, x, frozen):
            return w.at[0].set(x[1])[TOKENS] ** 2 * v.sum()

        self.check(written)

    def test_a_padding_that_trains(self):
        self.check(lambda w, v, x, frozen: jnp.pad(w, ((1, 1), (2, 0)), constant_values=x[0, 0]) ** 2 * v.sum())

    def test_branches_with_different_rows(self):
        def branches(w, v, x, frozen):
            of_x = jax.lax.switch(jnp.argmax(x[0]), [lambda w, v: w, lambda w, v: v * 2, lambda w, v: w + v] * 2, w, v)
            return of_x[TOKENS] ** 2

        self.check(branches)
        self.check(lambda w, v, x, frozen: jax.lax.cond(x[0, 0] > 0, lambda: w @ frozen.T, lambda: v @ frozen.T))

    def test_a_branch_that_returns_rows(self):
        self.check(lambda w, v, x, frozen: jax.lax.cond(x[0, 0] < 9, lambda: w, lambda: x[:1] * jnp.ones((6, 1))))

    def test_platform_dependent(self):
        def loss(w, v, x, frozen):
            return jax.lax.platform_dependent(w, cpu=lambda w: w[TOKENS] * 2, default=lambda w: w[TOKENS])

        self.check(loss, merged=["w"])


def test_what_jax_differentiates_forward_only():
    """A ``while_loop``: the gradient is refused as by ``jax.grad``, and forward mode is that of the whole leaf."""
    params, frozen = {"w": jax.random.normal(jax.random.key(0), (6, 4))}, {"w": fz.rows([0, 1, 4])}

    def loss(p):
        step = lambda state: (state[0] + 1, jnp.tanh(state[1] @ p["w"].T @ p["w"] / 9))  # noqa: E731
        return jax.lax.while_loop(lambda state: state[0] < 4, step, (0, X))[1].sum()

    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        fz.grad(loss, frozen)(params)
    trainable, rest = fz.partition(params, frozen)
    np.testing.assert_allclose(fz.restrict(loss, rest)(trainable), loss(params), rtol=1e-5)
    forward = lambda t: jax.jvp(fz.restrict(lambda p: jnp.sum(p["w"] ** 2), rest), (t,), (t,))  # noqa: E731
    with pytest.raises(TypeError, match=r"differentiate lambda t: fun\(fz.combine\(t, rest\)\)"):
        forward(trainable)
    with pytest.raises(TypeError, match="forward-mode"):
        jit(forward)(trainable)


class TestNotFinite:
    """Values and gradients are NaN and infinite where the dense ones are: zero is selected, and never multiplied."""

    VALUES = (jnp.inf, -jnp.inf, jnp.nan, 0.0, 1e38)

    def both(self, names, rows):
        """Outputs and gradients of two leaves, in parts and dense, in one program; what is stale in a leaf is NaN."""
        frozen = {"w": fz.rows(rows), "x": False}

        def loss(name, p):
            out = OF_TWO[name](p["w"], p["x"])
            return sum(jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)) for y in jax.tree.leaves(out)), out

        def both(params):
            trainable, rest = fz.partition(params, frozen)
            filled = dataclasses.replace(trainable["w"], values=jnp.full_like(trainable["w"].values, jnp.nan))
            _, stale = fz.partition(fz.combine({**trainable, "w": filled}, rest), frozen)
            value_and_grad, ours, theirs = functools.partial(jax.value_and_grad, has_aux=True), {}, {}
            for name in names:
                of_name = functools.partial(loss, name)
                dense, grads = value_and_grad(of_name)(params)
                ours[name] = value_and_grad(fz.restrict(of_name, stale))(trainable)
                theirs[name] = dense, fz.partition(grads, frozen)[0]
            return ours, theirs

        return both

    def params(self, w=(), x=()):
        """Two leaves; ``w`` and ``x``: rows with a value that each of them has there."""
        arrays = np.random.default_rng(0).normal(size=(2, 6, 3)).astype(np.float32)
        for array, (row, value) in zip(arrays, (w or (0, None), x or (0, None)), strict=True):
            array[row, 1] = array[row, 1] if value is None else value
        return {"w": arrays[0], "x": arrays[1]}

    def same(self, ours, dense):
        chex.assert_trees_all_close(ours, dense, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("i", range(6))
    def test_as_dense(self, i):
        rows, trains, frozen = [([0, 1, 3, 4], 5, 1), (slice(0, 5), 5, 2), ([2], 3, 2)][i % 3]
        both = jit(self.both(list(OF_TWO)[i::6], rows))
        for value in self.VALUES:
            for row in (trains, frozen):
                at = (row, value)
                for params in (self.params(w=at), self.params(x=at), self.params(w=at, x=at)):
                    self.same(*both(params))

    @pytest.mark.parametrize("rows", [[1, 2], [5], slice(1, 6)])
    def test_other_rows_eagerly_and_mapped(self, rows):
        names = (
            "times",
            "over",
            "custom_jvp",
            "contracted",
            "clip",
            "joined",
            "rows set",
            "a block added",
            "cond of x",
        )
        places = [*((0, value) for value in self.VALUES), (5, jnp.inf), (5, 0.0)]
        params = [self.params(**{leaf: place}) for leaf in ("w", "x") for place in places]
        many = jax.tree.map(lambda *arrays: np.stack(arrays), *params)
        self.same(*self.both(names[:3], rows)(self.params(x=(0, jnp.inf))))
        self.same(*jit(jax.vmap(self.both(names, rows)))(many))

    def test_the_gradient_of_the_rest(self):
        """It reaches the frozen rows, and of the trainable ones only the part."""
        names = ("times", "over", "minus", "log", "sqrt", "logaddexp", "head", "contracted")

        def of_all(params):
            def value(params, i):
                found = self.both(names, slice(0, 5))(params)[i]
                return sum(found[name][0][0] for name in names)

            return [jax.grad(value)(params, i) for i in range(2)]

        of_all = jit(of_all)
        for value in self.VALUES[3:]:
            for params in (self.params(w=(5, value)), self.params(x=(5, value))):
                self.same(*of_all(params))

    def test_in_shard_map(self):
        mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        names = ("times", "over", "custom_jvp", "contracted", "a scalar", "clip")
        both = jit(jax.shard_map(self.both(names, slice(0, 5)), mesh=mesh, in_specs=P(), out_specs=P()))
        for at in ((5, jnp.inf), (5, 0.0), (1, jnp.nan)):
            self.same(*both(self.params(w=at)))
            self.same(*both(self.params(x=at)))

    def test_second_derivatives(self):
        names = ("times", "over", "custom_jvp", "contracted", "log", "stacked", "rows set", "cumsum", "cond of x")

        def second(i):
            def norm(params):
                found = self.both(names, slice(0, 5))(params)[i]
                return {name: sum(jnp.sum(g**2) for g in jax.tree.leaves(found[name][1])) for name in names}

            return jax.jacrev(norm)

        params = self.params()
        self.same(*jit(lambda params: [second(i)(params) for i in range(2)])(params))


class TestTransformations:
    @pytest.fixture
    def restricted(self):
        params = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
        trainable, rest = fz.partition(params, {"w": fz.rows(slice(0, 4))})

        def loss(p, x):
            return jnp.mean(jax.nn.logsumexp(jnp.tanh(x + p["w"][TOKENS[:, 0]]) @ p["w"].T, -1) ** 2)

        return fz.restrict(loss, rest), lambda t, x: loss(fz.combine(t, rest), x), trainable

    def test_vmap_around(self, restricted):
        ours, dense, trainable = restricted
        xs = jax.random.normal(jax.random.key(1), (3, 2, 4))

        def mapped(fun):
            many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), trainable)
            over_xs = [jax.vmap(grad, (None, 0))(trainable, xs) for grad in (jax.grad(fun), jax.jit(jax.grad(fun)))]
            return over_xs, jax.vmap(jax.grad(fun), (0, None))(many, xs[0])

        chex.assert_trees_all_close(*jit(lambda: (mapped(ours), mapped(dense)))(), rtol=1e-5, atol=1e-6)

    def test_vmap_around_eagerly(self):
        params = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
        grads = jax.vmap(fz.grad(lambda p, x: x * p["w"][5].sum(), {"w": fz.rows(slice(0, 4))}), (None, 0))
        chex.assert_trees_all_close(grads(params, jnp.arange(3.0))["w"].values[:, 1, 0], jnp.arange(3.0))

    def test_second_derivatives(self, restricted):
        ours, dense, trainable = restricted

        def second(fun, x):
            through_x = jax.grad(lambda x: jnp.sum(jax.grad(fun)(trainable, x)["w"].values ** 2))(x)
            return jax.hessian(fun)(trainable, x), through_x

        both = jit(lambda x: (second(ours, x), second(dense, x)))
        chex.assert_trees_all_close(*both(X[:2]), rtol=1e-4, atol=1e-6)

    def test_second_derivative_of_custom_jvp(self):
        params = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
        trainable, rest = fz.partition(params, {"w": fz.rows(slice(0, 4))})

        def loss(p):
            return jnp.sum(quantised(jnp.sin(p["w"])) ** 3) + jnp.sum(jnp.sin(looked_up(p["w"], TOKENS)))

        ours, dense = fz.restrict(loss, rest), lambda t: loss(fz.combine(t, rest))
        both = jit(lambda t: (jax.hessian(ours)(t), jax.hessian(dense)(t)))
        chex.assert_trees_all_close(*both(trainable), rtol=1e-4, atol=1e-5)

    def test_the_gradient_of_the_rest(self):
        """Rules are exact in both parts: an outer gradient with respect to the frozen rows is right, too."""
        params = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
        frozen = {"w": fz.rows([0, 1, 4])}

        def loss(p):
            return jnp.sum(jnp.tanh(p["w"][TOKENS]) @ p["w"].T) + jnp.sum(p["w"].T @ jnp.ones((6, 2)) ** 2)

        def whole(params, restrict):
            trainable, rest = fz.partition(params, frozen)
            return restrict(loss, rest)(trainable)

        ours = jax.grad(whole)(params, fz.restrict)
        dense = jax.grad(whole)(params, lambda loss, rest: lambda t: loss(fz.combine(t, rest)))
        chex.assert_trees_all_close(ours, dense, rtol=1e-5, atol=1e-6)

    @pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="explicit axes changed much")
    def test_explicit_axes(self):
        mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
        spec = jax.sharding.PartitionSpec
        with jax.set_mesh(mesh):
            w = jax.device_put(jax.random.normal(jax.random.key(0), (6, 8)), jax.NamedSharding(mesh, spec(None, "tp")))

            def loss(p):
                looked_up = p["w"].at[TOKENS].get(out_sharding=spec(None, None, "tp"))
                head = jnp.einsum("xd,rd->xr", jnp.ones((3, 8)), jnp.tanh(p["w"]), out_sharding=spec())
                return jnp.sum(looked_up**2) + jnp.sum(head)

            frozen = {"w": fz.rows(slice(0, 4))}
            expected = fz.partition(jax.jit(jax.grad(loss))({"w": w}), frozen)[0]
            chex.assert_trees_all_close(jax.jit(fz.grad(loss, frozen))({"w": w}), expected, rtol=1e-5)

    @pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="explicit axes changed much")
    def test_another_mesh_inside_of_the_loss(self):
        """Rules are applied under the mesh of the operation."""
        mesh = functools.partial(jax.make_mesh, (4, 2), ("data", "tp"))
        auto, explicit = (
            mesh(axis_types=(kind,) * 2) for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
        )
        params, frozen = {"w": jax.random.normal(jax.random.key(0), (6, 8))}, {"w": fz.rows([0, 1, 4])}

        def operations(w):
            head = jnp.tanh(w[TOKENS]) @ w.T
            scanned = jax.lax.scan(lambda c, r: (jnp.sin(c + r), None), jnp.ones(8), w)[0]
            return jnp.sum(head**2) + jnp.sum(scanned * w[2:4]) + jnp.sum(jax.nn.one_hot(TOKENS, 6) @ w)

        def changed(p):
            with jax.sharding.use_abstract_mesh(auto.abstract_mesh):
                return operations(jax.lax.with_sharding_constraint(p["w"], P(None, "tp")))

        def automatic(p):
            return jax.sharding.auto_axes(operations, out_sharding=P())(p["w"])

        for loss, outer in ((changed, None), (automatic, explicit)):
            with contextlib.nullcontext() if outer is None else jax.set_mesh(outer):
                expected = fz.partition(jax.jit(jax.grad(loss))(params), frozen)[0]
                chex.assert_trees_all_close(jax.jit(fz.grad(loss, frozen))(params), expected, rtol=1e-5)
                [row] = fz.explain(loss, params, frozen).rows
                assert row.merged is None

    def test_sharded_parameters(self):
        mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

        def place(x, *spec):
            return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

        params = {"w": place(jax.random.normal(jax.random.key(0), (6, 8, 8)), None, "fsdp", "tp")}
        frozen = {"w": fz.rows(slice(0, 5))}
        on = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "fsdp", "tp"))

        def loss(params):
            w = jax.lax.with_sharding_constraint(params["w"], on)
            return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.ones((4, 8)), w)[0])

        expected = fz.partition(jax.jit(jax.grad(loss))(params), frozen)[0]
        chex.assert_trees_all_close(jax.jit(fz.grad(loss, frozen))(params), expected, rtol=1e-5, atol=1e-6)
        assert fz.explain(loss, params, frozen).rows[0].merged is None

    def test_a_checkpoint_policy_is_kept(self):
        params, frozen = {"w": jnp.ones((6, 4, 4))}, {"w": fz.rows(slice(0, 4))}

        def saved(policy):
            body = jax.checkpoint(lambda x, w: (jnp.sin(checkpoint_name(x @ w, "product")), None), policy=policy)

            def loss(p):
                return jnp.sum(jax.lax.scan(body, X, p["w"])[0])

            program = jax.make_jaxpr(fz.grad(loss, frozen))(params)
            return str(program).count("dot_general")

        policies = jax.checkpoint_policies
        assert saved(policies.save_only_these_names("product")) < saved(policies.nothing_saveable)

    def test_effects_and_randomness_are_kept(self):
        params, frozen = {"w": jnp.ones((6, 4, 4))}, {"w": fz.rows(slice(0, 4))}
        seen = []

        def loss(params, key):
            def body(x, of_layer):
                w, key = of_layer
                jax.debug.callback(lambda s: seen.append(float(s)), w.sum(), ordered=True)
                keep = jax.random.bernoulli(key, 0.5, x.shape)
                return jnp.where(keep, jnp.tanh(x @ w), 0), None

            return jnp.sum(jax.lax.scan(body, X, (params["w"], jax.random.split(key, 6)))[0])

        key = jax.random.key(3)
        ours = jax.jit(fz.grad(loss, frozen))(params, key)
        jax.effects_barrier()
        assert seen == [16.0] * 6
        chex.assert_trees_all_close(ours, fz.partition(jax.jit(jax.grad(loss))(params, key), frozen)[0], rtol=1e-5)

    def test_name_scopes_are_kept(self):
        def loss(params):
            with jax.named_scope("embedding"):
                x = params["w"][TOKENS]
            with jax.named_scope("tower"):
                return jax.jit(lambda x, w: jnp.sum(jnp.tanh(x @ w.T)))(x, params["w"])

        params, frozen = {"w": jnp.ones((6, 4))}, {"w": fz.rows(slice(0, 4))}
        program = jax.jit(fz.restrict(loss, fz.partition(params, frozen)[1]))
        text = program.lower(fz.partition(params, frozen)[0]).as_text(debug_info=True)
        assert "embedding/gather" in text
        assert "tower/jit(<lambda>)" in text or "tower/<lambda>" in text

    def test_a_jitted_loss_is_compiled_once(self):
        traces = []

        @jax.jit
        def loss(params, x):
            traces.append(1)
            return jnp.sum(jnp.tanh(x @ params["w"].T))

        params, frozen = {"w": jnp.ones((6, 4))}, {"w": fz.rows(slice(0, 4))}
        for _ in range(3):
            fz.grad(loss, frozen)(params, X)
        assert len(traces) == 1


@jax.custom_jvp
def projected(w, x):
    return jnp.tanh(w) @ x.T


@projected.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return projected(w, x), 3 * dw @ x.T + jnp.tanh(w) @ dx.T


def of_shapes(fun):
    """``fun`` of zeros, whose result are zeros: traced, and not run."""
    return lambda *args: jax.tree.map(lambda x: np.zeros(x.shape), jax.eval_shape(fun, *args))


def by_device(x):
    """Values that vary over the mesh: positions of rows, one for each row of ``x``."""
    return (3 + 2 * jnp.sign(x[:, 0])).astype(jnp.int32)


TABLE_ON_MESH = {
    "lookup": lambda w, x: w[by_device(x)],
    "dynamic rows": lambda w, x: jax.lax.dynamic_slice_in_dim(w, jax.lax.axis_index("data"), 2),
    "dynamic columns": lambda w, x: jax.lax.dynamic_slice_in_dim(w, jax.lax.axis_index("data"), 1, axis=1),
    "tied head": lambda w, x: jax.nn.log_softmax(jnp.tanh(w[by_device(x)]) @ w.T),
    "contracted": lambda w, x: jnp.tanh(w @ x.T).T @ w,
    "binary": lambda w, x: jnp.where(x[:1] > 0, w * x[1:], 0.1 * w)[TOKENS],
    "sum": lambda w, x: (w * x[0, 0]).sum(0),
    "reduced over the mesh": lambda w, x: jax.lax.pmean(jax.nn.relu(w) @ x.T, "data"),
    "gathered over the mesh": lambda w, x: jax.lax.all_gather(w * x[0, 0], "data")[:, TOKENS],
    "relu": lambda w, x: jax.nn.relu(w) @ x.T,
    "silu of what does not vary": lambda w, x: jax.nn.silu(w),
    "gelu in jit": lambda w, x: jax.jit(lambda w, x: jax.nn.gelu(w) @ x.T)(w, x),
    "softplus in remat": jax.checkpoint(lambda w, x: jax.nn.softplus(w) @ x.T),
    "logsumexp": lambda w, x: jax.nn.logsumexp(w, axis=-1),
    "custom_jvp of elements": lambda w, x: quantised(w) @ x.T,
    "custom_jvp of a lookup": lambda w, x: looked_up(w, by_device(x)),
    "custom_jvp of a matmul": lambda w, x: projected(w, x),
    "a constant of a scan": lambda w, x: jax.lax.map(lambda r: jax.nn.logsumexp(r @ w.T), x),
    "a constant of a scan, reversed": lambda w, x: jax.lax.scan(
        lambda c, r: (jnp.tanh(c + w[2]), r @ w.T), x[0], x, reverse=True
    ),
    "a constant of a scan of silu": lambda w, x: jax.lax.map(lambda r: jax.nn.silu(w) @ r, x),
    "a constant of a scan of remat": lambda w, x: jax.lax.map(jax.checkpoint(lambda r: jax.nn.gelu(r @ w.T)), x),
    "a constant of a scan in a scan": lambda w, x: jax.lax.map(lambda r: jax.lax.map(lambda q: w @ (q * r), x), x),
    "fori_loop": lambda w, x: jax.lax.fori_loop(0, 6, lambda i, c: jnp.tanh(c + w[i]), x[0]),
    "vmap": lambda w, x: jax.vmap(lambda r: jax.nn.silu(w @ r))(x),
    "inner gradient": lambda w, x: jax.grad(lambda x: jnp.sum(jax.nn.silu(x @ w.T)))(x),
    "optimization_barrier": lambda w, x: jax.lax.optimization_barrier((w, x))[0][TOKENS],
    "joined": lambda w, x: jnp.concatenate([x, w, jnp.ones((2, 4))])[TOKENS * 2 + 3],
    "joined, what does not vary": lambda w, x: jnp.concatenate([w * 2, w])[TOKENS + 3],
    "side by side": lambda w, x: jnp.concatenate([w, w * x[:1]], 1)[TOKENS],
    "padded": lambda w, x: jnp.pad(w, ((1, 1), (0, 2)), constant_values=x[0, 0])[TOKENS],
    "a row set": lambda w, x: w.at[0].set(x[0]).at[1].set(2.0)[TOKENS],
    "rows added": lambda w, x: w.at[by_device(x)].add(x)[TOKENS],
    "a block set": lambda w, x: w.at[1:3].set(x[:2]).at[:, 0].set(x[0, 0])[TOKENS],
    "updated": lambda w, x: jax.lax.dynamic_update_slice(w, x[:2], (jax.lax.axis_index("data"), 0))[TOKENS],
    "flattened": lambda w, x: w.reshape(-1)[TOKENS] * x[0, 0],
    "cumsum": lambda w, x: jnp.cumsum(w, 0) * x[0],
    "cond": lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda w: w @ x.T, lambda w: 2 * w @ x.T, w),
    "cond of what is split": lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda w: w * x[:1], lambda w: w * x[1], w)[TOKENS],
    "switch on what does not vary": lambda w, x: jax.lax.switch(TOKENS[0, 2], [jnp.sin, jnp.tanh] * 2, w)[TOKENS],
}
STACK_ON_MESH = {
    "scan": lambda w, x: jax.lax.scan(layer, x, w),
    "scan of what does not vary": lambda w, x: jax.lax.scan(layer, jnp.broadcast_to(w[0, 0], (3, 4)), w),
    "reverse scan": lambda w, x: jax.lax.scan(
        lambda c, w: (jax.nn.silu(c @ jax.nn.relu(w)), None), x, w, reverse=True, unroll=2
    ),
    "scan of remat": lambda w, x: jax.lax.scan(jax.checkpoint(layer), x, w),
    "scan in remat of jit": jax.checkpoint(lambda w, x: jax.lax.scan(jax.jit(layer), x, w)),
    "layers in a loop": lambda w, x: functools.reduce(lambda x, i: jax.nn.silu(x @ w[i]), range(6), x),
    "layers in fori_loop": lambda w, x: jax.lax.fori_loop(0, 6, lambda i, c: jax.nn.silu(c @ w[i]), x),
    "vmap over layers": lambda w, x: jax.vmap(lambda w: jax.nn.silu(x @ w))(w),
    "exchange in a scan": lambda w, x: jax.lax.scan(
        lambda c, w: (jax.lax.ppermute(jnp.tanh(c @ w), "data", [(i, (i + 1) % 4) for i in range(4)]), None), x, w
    ),
}
SOME_ON_MESH = (
    "tied head",
    "custom_jvp of a matmul",
    "silu of what does not vary",
    "a constant of a scan of remat",
    "scan",
)


def on_mesh(params, x, names=(*TABLE_ON_MESH, *STACK_ON_MESH)):
    """A loss of many operations on a shard of ``x``."""
    outs = [fun(params["table"], x) for name, fun in TABLE_ON_MESH.items() if name in names]
    outs += [fun(params["stack"], x) for name, fun in STACK_ON_MESH.items() if name in names]
    return sum(jnp.sum(jnp.sin(out + 1)) for out in jax.tree.leaves(outs))


some_on_mesh = functools.partial(on_mesh, names=SOME_ON_MESH)


REPLICATED = P()


class TestShardMap:
    """Inside of ``jax.shard_map`` each value varies over axes of the mesh, or does not, and JAX checks which."""

    FROZEN = {"table": fz.rows([0, 2, 3]), "stack": fz.rows(slice(0, 4))}  # noqa: RUF012

    @pytest.fixture
    def mesh(self):
        return jax.make_mesh((4, 2), ("data", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def check(self, local, mesh, of_params=REPLICATED, out_specs=REPLICATED, run=jit, **more):
        """``local(trainable, rest, x, restrict)`` of each shard, beside that of the combined parameters."""

        def merged(loss, rest):
            return lambda trainable, x: loss(fz.combine(trainable, rest), x)

        def both(params, x):
            trainable, rest = fz.partition(params, self.FROZEN)
            return [jax.tree.leaves(local(trainable, rest, x, restrict)) for restrict in (fz.restrict, merged)]

        keys = jax.random.split(jax.random.key(0), 3)
        table, stack = jax.random.normal(keys[0], (6, 4)), jax.random.normal(keys[1], (6, 4, 4)) / 2
        mapped = jax.shard_map(both, mesh=mesh, in_specs=(of_params, P("data")), out_specs=out_specs, **more)
        results = run(mapped)({"table": table, "stack": stack}, jax.random.normal(keys[2], (8, 4)))
        chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-4)

    def test_each_operation(self, mesh):
        def local(trainable, rest, x, restrict):
            value, grads = jax.value_and_grad(restrict(on_mesh, rest))(trainable, x)
            return jax.lax.psum(value, "data"), grads

        self.check(local, mesh)

    @pytest.mark.parametrize("varies", ["nothing", "everything", "what trains", "the rest"])
    def test_what_varies(self, mesh, varies):
        """JAX sums the gradient of what does not vary over the mesh; ``out_specs`` has it checked."""
        trains, rests = varies in ("everything", "what trains"), varies in ("everything", "the rest")

        def vary(x):
            return jax.lax.pcast(x, "data", to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, "data")

        def local(trainable, rest, x, restrict):
            trainable = jax.tree.map(vary, trainable) if trains else trainable
            rest = jax.tree.map(vary, rest) if rests else rest
            grads = jax.grad(restrict(loss, rest))(trainable, x)
            return jax.lax.pmean(grads, "data") if trains else grads

        loss = on_mesh
        self.check(local, mesh, run=of_shapes)
        if trains != rests:
            loss = some_on_mesh
            self.check(local, mesh)

    def test_vmap(self, mesh):
        def local(trainable, rest, x, restrict):
            return jax.vmap(jax.grad(restrict(some_on_mesh, rest)), (None, 0))(trainable, jnp.stack([x, 2 * x]))

        self.check(local, mesh)

    @pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="JAX could not transpose the transpose of concatenate")
    def test_second_derivatives(self, mesh):
        def local(trainable, rest, x, restrict):
            grad = jax.grad(restrict(some_on_mesh, rest))
            return jax.grad(lambda t: sum(jnp.sum(g**2) for g in jax.tree.leaves(grad(t, x))))(trainable)

        self.check(local, mesh)

    def test_explained(self, mesh):
        explained = []

        def local(trainable, rest, x, restrict):
            explained.extend(fz.explain(on_mesh, fz.combine(trainable, rest), self.FROZEN, x).rows)
            return x

        self.check(local, mesh, out_specs=P("data"), run=of_shapes)
        assert [row.path for row in explained[:2]] == ["stack", "table"]
        whole = {row.path: row.merged and row.merged.name for row in explained}
        assert whole == {"stack": None, "table": "custom_jvp_call"}, "\n".join(map(str, explained))

    def test_sharded_leaves(self, mesh):
        """Shards of the columns, gathered before they are used."""
        merged = []

        def loss(params, x):
            table = jax.lax.all_gather(params["table"], "tp", axis=1, tiled=True)
            layers = jax.lax.all_gather(params["stack"], "tp", axis=0)
            x = table[by_device(x)] + jax.lax.map(lambda r: jax.nn.silu(table) @ r, x).sum(-1, keepdims=True)
            x, _ = jax.lax.scan(layer, x, jnp.moveaxis(layers, 0, -2).reshape(6, 4, 4))
            return jax.lax.psum(jnp.sum(x), "tp")

        def local(trainable, rest, x, restrict):
            merged.extend(row.merged for row in fz.explain(loss, fz.combine(trainable, rest), self.FROZEN, x).rows)
            return jax.grad(restrict(loss, rest))(trainable, x)

        columns = {"table": P(None, "tp"), "stack": P(None, None, "tp")}
        self.check(local, mesh, columns, [[columns["stack"], columns["table"]]] * 2)
        assert merged == [None] * 4

    @pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="JAX had it not implemented")
    def test_some_axes_of_the_mesh(self, mesh):
        """The compiler partitions along the others."""

        def loss(params, x):
            table = jax.lax.with_sharding_constraint(params["table"], P("tp", None))
            stack = jax.lax.with_sharding_constraint(params["stack"], P(None, None, "tp"))
            x, _ = jax.lax.scan(layer, table[by_device(x)], stack)
            return jnp.sum(jax.lax.map(lambda r: jax.nn.logsumexp(r @ table.T), x))

        def local(trainable, rest, x, restrict):
            return jax.grad(restrict(loss, rest))(trainable, x)

        with jax.set_mesh(mesh):
            self.check(local, mesh, axis_names={"data"})


needs_refs = pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="JAX had no jax.new_ref")


class TestEffects:
    """Effects happen as under ``jax.grad``: as often, in the same order, and none while a function is traced."""

    PARAMS, FROZEN = {"w": jnp.arange(6.0).reshape(3, 2) + 1, "b": jnp.float32(2)}, {"w": fz.rows([0, 1]), "b": False}

    def check(self, make, run, merged=None):
        """``make()`` gives a loss, and a function that returns what it has done so far."""

        def done(loss_and_done, transform):
            loss, seen = loss_and_done
            value, grads = run(transform(loss))(self.PARAMS)
            jax.effects_barrier()
            return value, grads, seen()

        value, grads, ours = done(make(), lambda loss: fz.value_and_grad(loss, self.FROZEN))
        expected_value, expected, theirs = done(make(), jax.value_and_grad)
        assert ours == theirs
        chex.assert_trees_all_close((value, grads), (expected_value, fz.partition(expected, self.FROZEN)[0]), rtol=1e-6)
        loss, seen = make()
        before = seen()
        [row] = fz.explain(loss, self.PARAMS, self.FROZEN).rows
        jax.effects_barrier()
        assert seen() == before
        assert (row.merged and row.merged.name) == merged

    @needs_refs
    def test_a_ref_made_in_the_loss(self, compiled):
        def make():
            def loss(p):
                ref = jax.new_ref(jnp.zeros(2))
                for i in range(3):
                    ref[...] = ref[...] * 2 + p["w"][i]
                ref[0] = p["w"][2, 1] * ref[1]
                return ref[...].sum() * p["b"]

            return loss, lambda: None

        self.check(make, compiled)

    @needs_refs
    def test_a_ref_closed_over(self, compiled):
        def make():
            ref = jax.new_ref(jnp.zeros(2))

            def loss(p):
                ref[...] += 1
                y = (p["w"][2] * ref[...]).sum() * p["b"]
                ref[0] = jax.lax.stop_gradient(p["w"][2, 1])
                return y + ref[0] * p["w"].sum()

            return loss, lambda: ref[...].tolist()

        self.check(make, compiled)

    @needs_refs
    @pytest.mark.parametrize("inner", [jax.jit, lambda fun: fun])
    def test_a_ref_that_is_an_argument(self, compiled, inner):
        @inner
        def counted(w, ref):
            ref[...] += 1
            return (w[2] * ref[...]).sum()

        def loss(p, ref):
            return counted(p["w"], ref) * counted(p["w"], ref) * p["b"]

        ours, theirs, untouched = (jax.new_ref(jnp.zeros(2)) for _ in range(3))
        grads = compiled(fz.grad(loss, self.FROZEN))(self.PARAMS, ours)
        expected = compiled(jax.grad(loss))(self.PARAMS, theirs)
        chex.assert_trees_all_close(grads, fz.partition(expected, self.FROZEN)[0])
        assert ours[...].tolist() == theirs[...].tolist() == [2, 2]
        fz.explain(loss, self.PARAMS, self.FROZEN, untouched)
        assert untouched[...].tolist() == [0, 0]

    @needs_refs
    @pytest.mark.parametrize("sort", [False, True])
    def test_a_ref_in_a_scan(self, compiled, sort):
        def make():
            ref = jax.new_ref(jnp.zeros(()))

            def loss(p):
                def body(carry, x):
                    ref[...] += jax.lax.stop_gradient(carry) + 1
                    w = jnp.sort(p["w"], 0) if sort else p["w"]
                    return carry + ref[...] * (w @ x).sum(), None

                rows = jax.lax.scan(lambda carry, w: (carry * w.sum(), ref[...]), p["b"], p["w"])
                return jax.lax.scan(body, p["b"], jnp.ones((2, 2)))[0] + rows[0]

            return loss, lambda: float(ref[...])

        self.check(make, compiled)

    def test_callbacks_are_called_in_order(self, compiled):
        def make():
            seen = []

            def loss(p):
                x = p["w"][2]
                jax.debug.callback(lambda: seen.append("constant"), ordered=True)
                io_callback(lambda x: seen.append(float(x)), None, jax.lax.stop_gradient(x).sum(), ordered=True)
                jax.debug.callback(lambda: seen.append("again"), ordered=True)
                io_callback(lambda x: seen.append(float(x)), None, jnp.float32(3), ordered=True)
                shape = jax.ShapeDtypeStruct((), jnp.float32)
                y = io_callback(lambda: np.float32(len(seen)), shape, ordered=True)
                return x.sum() * y * p["b"] + p["w"].sum()

            return loss, lambda: list(seen)

        self.check(make, compiled)

    def test_a_pure_callback(self, compiled):
        def make():
            seen = []

            def count(x):
                seen.append(float(x))
                return np.float32(x)

            def loss(p):
                y = jax.pure_callback(count, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(3))
                return p["w"].sum() * y * p["b"]

            return loss, lambda: list(seen)

        self.check(make, compiled)

    @pytest.mark.parametrize("kind", ["cond", "switch", "while_loop", "scan"])
    def test_only_what_is_taken_runs(self, compiled, kind):
        def make():
            seen = []

            def call(name, x):
                jax.debug.callback(lambda: seen.append(name), ordered=kind != "while_loop")
                return 2 * x

            def loss(p):
                x, yes = p["w"][2], jnp.ones(()).sum() > 0
                if kind == "cond":
                    x = jax.lax.cond(yes, functools.partial(call, "taken"), functools.partial(call, "not taken"), x)
                elif kind == "switch":
                    branches = [functools.partial(call, i) for i in range(3)]
                    x = jax.lax.switch(jnp.argmax(jnp.arange(3) % 2), branches, x)
                elif kind == "while_loop":
                    i, y = jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, call(s[0], s[1])), (0, 1.0))
                    x = x * y * i
                else:
                    x = x * jax.lax.scan(lambda y, _: (call("step", y), None), jnp.ones(()).sum(), length=3)[0]
                return x.sum() * p["b"]

            return loss, lambda: list(map(str, seen))

        self.check(make, compiled)

    def test_an_error_in_the_branch_not_taken(self, compiled):
        def make():
            def loss(p):
                failing = lambda x: eqx.error_if(x, x[0] == x[0], "not taken")  # noqa: E731
                x = jax.lax.cond(jnp.ones(()).sum() > 0, lambda x: 2 * x, failing, p["w"][2])
                x = jax.lax.switch(jnp.argmin(jnp.ones(3)), [lambda x: x, failing, failing], x)
                return eqx.error_if(x, x.sum() < 0, "negative").sum() * p["b"]

            return loss, lambda: None

        self.check(make, compiled)

    @pytest.mark.parametrize("value", ["a frozen row", "a leaf", "a constant", "a text"])
    def test_where_python_needs_a_value(self, value):
        """It needs a call of the function itself, which is then the only one that runs anything."""

        def make():
            seen = []

            def loss(p):
                io_callback(lambda: seen.append("before"), None, ordered=True)
                x, one = p["w"][2], jnp.ones(()).sum()
                if value == "a text":
                    assert f"{one:.1f}" == "1.0"
                elif {"a frozen row": p["w"][0, 0], "a leaf": p["b"], "a constant": one}[value] > 0:
                    x = 3 * x
                io_callback(lambda: seen.append("after"), None, ordered=True)
                return x.sum() * p["b"]

            return loss, lambda: list(seen)

        self.check(make, lambda fun: fun, merged="Python that needs a value")

    @pytest.mark.parametrize("kind", ["cond", "switch", "while_loop"])
    def test_only_the_branch_taken_runs_on_parts(self, compiled, kind):
        def make():
            seen = []

            def call(name, w, x):
                jax.debug.callback(lambda s: seen.append((name, float(s))), jax.lax.stop_gradient(w.sum()))
                return w @ x

            def loss(p):
                w, x, yes = p["w"] * 2, jnp.ones(2) * p["b"], jnp.ones(()).sum() > 0
                taken, other = functools.partial(call, "taken"), functools.partial(call, "not taken")
                if kind == "cond":
                    out = jax.lax.cond(yes, taken, other, w, x)
                elif kind == "switch":
                    out = jax.lax.switch(jnp.argmax(jnp.arange(3) % 2), [other, taken, other], w, x)
                else:
                    last = jax.lax.stop_gradient(x)
                    state = jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1]), (0, last))
                    out = call("after", w, x) + state[1].sum()
                return out.sum()

            return loss, lambda: list(seen)

        self.check(make, compiled)

    @needs_refs
    def test_a_ref_in_a_branch(self, compiled):
        def make():
            ref = jax.new_ref(jnp.zeros(()))

            def loss(p):
                def taken(w):
                    ref[...] += jax.lax.stop_gradient(w[0].sum())
                    return w @ jnp.ones(2) * ref[...]

                return jax.lax.cond(jnp.ones(()).sum() > 0, taken, lambda w: w @ jnp.zeros(2), p["w"]).sum() * p["b"]

            return loss, lambda: float(ref[...])

        self.check(make, compiled)

    @pytest.mark.parametrize("several", [False, True])
    def test_in_custom_jvp(self, compiled, several):
        def make():
            seen = []

            @jax.custom_jvp
            def product(w, b):
                jax.debug.callback(lambda: seen.append(1))
                return w * b

            @product.defjvp
            def _(primals, tangents):
                return product(*primals), primals[0] * tangents[1] + tangents[0] * primals[1]

            return lambda p: product(p["w"], p["b"] if several else 2.0).sum(), lambda: list(seen)

        self.check(make, compiled)

    @pytest.mark.parametrize("inner", [jax.jit, jax.checkpoint])
    def test_in_functions(self, compiled, inner):
        def make():
            seen = []

            @inner
            def product(w, b):
                jax.debug.callback(lambda: seen.append(1))
                return jnp.sin(w @ w.T) * b

            return lambda p: product(p["w"], p["b"]).sum(), lambda: list(seen)

        self.check(make, compiled)


def asserted(condition):
    """Raises another error in place of JAX's."""
    try:
        assert condition
    except TypeError:
        raise ValueError("not a number") from None


class TestLikeJaxGrad:
    PARAMS, FROZEN = {"w": jnp.ones((6, 4)), "b": jnp.float32(2)}, {"w": fz.rows(slice(0, 4)), "b": False}

    @pytest.mark.parametrize("computed", [False, True])
    def test_branches_on_what_is_concrete(self, computed):
        calls = []

        def loss(params, x, flag, *, power=2):
            calls.append(1)
            number = x * 1 if computed else x
            scale = 3.0 if float(number) > 0 and flag == "yes" else 1.0
            y = scale * jnp.sum(params["w"][TOKENS] ** power)
            return y, {"text": f"{float(number):.1f}", "scale": scale, "none": None, "fn": jnp.tanh, "x": x, "y": y}

        x = jnp.float32(1)
        (value, aux), grads = fz.value_and_grad(loss, self.FROZEN, has_aux=True)(self.PARAMS, x, "yes", power=3)
        (expected_value, expected_aux), expected = jax.value_and_grad(loss, has_aux=True)(
            self.PARAMS, x, "yes", power=3
        )
        assert len(calls) == 2 + computed
        assert value == expected_value
        assert {k: v for k, v in aux.items() if k not in "xy"} == {
            k: v for k, v in expected_aux.items() if k not in "xy"
        }
        assert aux["x"] is x
        assert aux["y"] == value
        chex.assert_trees_all_close(grads, fz.partition(expected, self.FROZEN)[0])
        [row] = fz.explain(loss, self.PARAMS, self.FROZEN, x, "yes").rows
        assert (row.merged is not None) == computed

    def test_branches_on_parameters(self):
        def loss(params):
            return jnp.sum(params["w"][TOKENS]) * (params["b"] if params["b"] > 0 else 1) + float(len(params["w"]))

        def of_rows(params):
            return jnp.sum(params["w"][TOKENS] ** 2) if params["w"][0, 0] > 0 else 0.0

        for fun in (loss, of_rows):
            expected = fz.partition(jax.grad(fun)(self.PARAMS), self.FROZEN)[0]
            chex.assert_trees_all_close(fz.grad(fun, self.FROZEN)(self.PARAMS), expected)
        [row] = fz.explain(of_rows, self.PARAMS, self.FROZEN).rows
        assert row.merged.name == "Python that needs a value"
        with pytest.raises(jax.errors.TracerBoolConversionError):
            jax.jit(fz.grad(of_rows, self.FROZEN))(self.PARAMS)

    def test_aux_of_the_leaf_itself(self):
        def loss(p):
            return (jnp.sum(p["w"][TOKENS]), (p["w"], p["b"], "text"))

        for run in (jax.jit, lambda f: f):

            def with_arrays(p):
                return (loss(p)[0], loss(p)[1][:2])

            (_, aux), _ = run(fz.value_and_grad(with_arrays, self.FROZEN, has_aux=True))(self.PARAMS)
            assert bits(aux) == bits((self.PARAMS["w"], self.PARAMS["b"]))

    def test_whole_leaves_are_traced_as_by_jax(self):
        params = {"a": jnp.ones((3, 3)), "b": jnp.ones(3)}
        calls = []

        def loss(p, x):
            calls.append(1)
            return jnp.sum(jnp.tanh(x @ p["a"]) * p["b"])

        trainable, rest = fz.partition(params, "a")
        ours = jax.make_jaxpr(jax.grad(fz.restrict(loss, rest)))(trainable, X[:, :3])
        theirs = jax.make_jaxpr(jax.grad(lambda t, x: loss(fz.combine(t, rest), x)))(trainable, X[:, :3])
        assert str(ours) == str(theirs)
        assert len(calls) == 2

    @pytest.mark.parametrize("error", [KeyError, TypeError, IndexError, jax.errors.UnexpectedTracerError])
    def test_an_error_of_the_function_is_its_own(self, error):
        calls = []

        def loss(params):
            calls.append(params["w"].sum())
            raise error("mine")

        with pytest.raises(error, match="mine"):
            fz.grad(loss, self.FROZEN)(self.PARAMS)
        assert len(calls) == 1

    @pytest.mark.parametrize(
        "use",
        [
            float,
            np.asarray,
            "{:.1f}".format,
            lambda x: range(x.astype(int)),
            lambda x: jnp.zeros(x.astype(int)),
            lambda x: jnp.ones(3)[: x.astype(int)],
            lambda x: jnp.ones(3)[x < jnp.ones(3)],
            lambda x: asserted(x > 0),
        ],
    )
    def test_a_function_that_needs_a_value_is_called_again(self, use):
        def loss(params):
            use(jnp.ones(()).sum())
            return params["w"].sum() * params["b"]

        chex.assert_trees_all_close(
            fz.grad(loss, self.FROZEN)(self.PARAMS), fz.partition(jax.grad(loss)(self.PARAMS), self.FROZEN)[0]
        )


class TestFlax:
    """Models as they are: nothing in them knows of rows."""

    def check(self, loss, params, frozen):
        @jit
        def both(params):
            value, grads = jax.value_and_grad(loss)(params)
            return fz.value_and_grad(loss, frozen)(params), (value, fz.partition(grads, frozen)[0])

        chex.assert_trees_all_close(*both(params), rtol=1e-5, atol=1e-5)
        rows = fz.explain(loss, params, frozen).rows
        assert rows
        assert all(row.merged is None and (row.by_rows or row.everything) for row in rows), "\n".join(map(str, rows))

    @pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
    def test_linen_embed(self, dtype):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, tokens):
                embed = nn.Embed(6, 4, dtype=dtype)
                return embed.attend(nn.tanh(embed(tokens)))

        model = Model()
        params = model.init(jax.random.key(0), TOKENS % 6)

        def loss(params):
            return jnp.mean(model.apply(params, TOKENS % 6).astype(jnp.float32) ** 2)

        if dtype is None:
            self.check(loss, params, fz.rules({"**": fz.rows(slice(0, 4))}))
        assert fz.explain(loss, params, fz.rules({"**": fz.rows(slice(0, 4))})).rows[0].merged is None

    def test_nnx_embed(self):
        model = nnx.Embed(6, 4, rngs=nnx.Rngs(0))
        graph, params = nnx.split(model)

        def loss(params):
            embed = nnx.merge(graph, params)
            return jnp.mean(embed.attend(jnp.tanh(embed(TOKENS % 6))) ** 2)

        self.check(loss, params, fz.rules({"**": fz.rows(slice(0, 4))}))

    @pytest.mark.parametrize("axis", [0, 1])
    def test_linen_scan(self, axis):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.tanh(nn.Dense(4)(x)) + x, None

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                layer = nn.remat(Layer, prevent_cse=False)
                scan = nn.scan(layer, variable_axes={"params": axis}, split_rngs={"params": True}, length=6)
                return nn.Dense(2, name="head")(scan(name="layers")(x, None)[0])

        model = Model()
        params = model.init(jax.random.key(0), X)["params"]
        frozen = {"layers": fz.rows(slice(0, 4), axis), "head": False}
        self.check(lambda params: jnp.sum(model.apply({"params": params}, X) ** 2), params, frozen)

    def test_linen_remat_scan(self):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.tanh(nn.Dense(4)(x)) + x

        model = nn.remat_scan(Layer, lengths=(2, 3))()
        params = model.init(jax.random.key(0), X)
        for rows in (fz.rows(slice(0, 1)), fz.rows(slice(0, 2), 1)):
            self.check(lambda params: jnp.sum(model.apply(params, X) ** 2), params, fz.rules({"**": rows}))

    @pytest.mark.parametrize("remat", [False, True])
    @pytest.mark.parametrize("check", [False, True])
    def test_linen_scan_of_what_is_not_stacked(self, remat, check):
        """Flax first evaluates what does not depend on the step, to have it before the loop."""

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, tokens):
                embed = nn.Embed(6, 4)
                return nn.tanh(nn.Dense(4)(x)) + embed(tokens) + embed.attend(x).sum(), None

        class Model(nn.Module):
            check: bool = True

            @nn.compact
            def __call__(self, x):
                layer = nn.remat(Layer, prevent_cse=False) if remat else Layer
                scan = nn.scan(
                    layer,
                    variable_broadcast="params",
                    split_rngs={"params": False},
                    check_constancy_invariants=self.check,
                )
                return scan(name="layer")(x, jnp.arange(6).reshape(2, 3))[0]

        params = Model().init(jax.random.key(0), X)
        frozen = fz.rules({"**/embedding": fz.rows([0, 1, 4]), "**/kernel": fz.rows([1])}, default=True)
        self.check(lambda params: jnp.sum(Model(check).apply(params, X) ** 2), params, frozen)

    @pytest.mark.parametrize("remat", [lambda fun: fun, nnx.remat])
    def test_nnx_scan_of_what_is_not_stacked(self, remat):
        graph, params = nnx.split(nnx.Embed(6, 4, rngs=nnx.Rngs(0)))

        def loss(params):
            @nnx.scan(in_axes=(None, nnx.Carry, 0), out_axes=nnx.Carry)
            @remat
            def forward(embed, x, tokens):
                return jnp.tanh(embed(tokens) + embed.attend(x).sum())

            return jnp.sum(forward(nnx.merge(graph, params), X, jnp.arange(6).reshape(2, 3)) ** 2)

        self.check(loss, params, fz.rules({"**": fz.rows(slice(0, 4))}))

    @pytest.mark.parametrize("kind", ["cond", "switch"])
    def test_branches(self, kind):
        """State passes through the branches, and is returned by them."""
        graph, params = nnx.split(nnx.Embed(6, 4, rngs=nnx.Rngs(0)))

        def loss(params):
            embed, functions = nnx.merge(graph, params), [lambda e, x: e(x), lambda e, x: e(x) * 2, lambda e, x: e(x)]
            if kind == "cond":
                x = nnx.cond(params["embedding"][0, 0] > 0, *functions[:2], embed, TOKENS % 6)
            else:
                x = nnx.switch(TOKENS[0, 0], functions, embed, TOKENS % 6)
            return jnp.mean(embed.attend(x) ** 2)

        self.check(loss, params, fz.rules({"**": fz.rows(slice(0, 4))}))

    def test_nnx_scan(self):
        @nnx.split_rngs(splits=6)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(4, 4, rngs=rngs)

        graph, params = nnx.split(make(nnx.Rngs(0)))

        def loss(params):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            @nnx.remat
            def forward(layer, x):
                return jnp.tanh(layer(x))

            return jnp.sum(forward(nnx.merge(graph, params), X) ** 2)

        self.check(loss, params, fz.rules({"**": fz.rows(slice(0, 4))}))


LAYOUTS = {
    "join": (lambda w: jnp.concatenate([w * 2, w])[2 : 2 + len(w)], lambda axis: axis),
    "beside": (
        lambda w: jnp.concatenate([w[:, :2], jnp.ones((len(w), 1)), w], 1)[:, 1 : 1 + w.shape[1]],
        lambda axis: axis,
    ),
    "pad": (lambda w: jnp.pad(w, ((1, 2), (2, 1)), constant_values=0.5)[2:-1, 1:-2], lambda axis: axis),
    "roll": (lambda w: jnp.roll(w, 1, 1), lambda axis: axis),
    "flatten": (lambda w: (w.reshape(-1) * 2).reshape(w.shape), lambda axis: axis),
    "set": (lambda w: w.at[1].set(0.5).at[:, 0].add(1.0), lambda axis: axis),
    "update": (lambda w: jax.lax.dynamic_update_slice(w, jnp.ones((2, 2)), (0, 1)), lambda axis: axis),
    "cumsum": (lambda w: jnp.cumsum(w, axis=1), lambda axis: axis),
    "cond": (lambda w: jax.lax.cond(jnp.ones(()).sum() > 0, jnp.sin, lambda w: w, w), lambda axis: axis),
    "transpose": (lambda w: w.T, lambda axis: 1 - axis),
    "cast": (lambda w: w.astype(jnp.float16).astype(jnp.float32), lambda axis: axis),
    "tanh": (jnp.tanh, lambda axis: axis),
    "times": (lambda w: w * 1.5 + 0.25, lambda axis: axis),
    "dense": (lambda w: w * jnp.cos(jnp.arange(w.size, dtype=w.dtype)).reshape(w.shape), lambda axis: axis),
    "flip": (lambda w: w[::-1], lambda axis: axis),
    "copy": (jnp.copy, lambda axis: axis),
    "axes": (lambda w: w[:, None][:, 0], lambda axis: axis),
    "remat": (jax.checkpoint(lambda w: jnp.sin(w) * 2), lambda axis: axis),
    "jit": (jax.jit(lambda w: jnp.abs(w) + 1), lambda axis: axis),
    "relu": (jax.nn.relu, lambda axis: axis),
}
READS = {
    "row": lambda w, i: w[i[0]],
    "rows": lambda w, i: w[i],
    "columns": lambda w, i: w[:, i],
    "take": lambda w, i: jnp.take(w, i, axis=1, mode="clip"),
    "left": lambda w, i: w @ jnp.cos(jnp.arange(w.shape[1] * 2.0)).reshape(-1, 2),
    "right": lambda w, i: jnp.sin(jnp.arange(w.shape[0] * 2.0)).reshape(2, -1) @ w,
    "slice": lambda w, i: w[1:, :-1] * 2,
    "dynamic": lambda w, i: jax.lax.dynamic_slice_in_dim(w, i[0], 2, axis=0),
    "scan": lambda w, i: jax.lax.scan(lambda c, r: (jnp.sin(c + r), c), jnp.ones(w.shape[1]), w)[0],
    "reverse": lambda w, i: jax.lax.scan(lambda c, r: (c * 0.5 + r, c), jnp.ones(w.shape[1]), w, reverse=True)[1],
    "sum": lambda w, i: w.sum(0),
}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_programs(data):
    """Random programs of covered operations, on random rows: value and gradient of the dense ones."""
    shape = data.draw(st.sampled_from([(5, 3), (4, 7), (9, 2)]))
    axis = data.draw(st.integers(0, 1))
    rows = sorted(data.draw(st.sets(st.integers(0, shape[axis] - 1), min_size=1, max_size=shape[axis] - 1)))
    layouts = data.draw(st.lists(st.sampled_from(sorted(LAYOUTS)), max_size=4))
    reads = data.draw(st.lists(st.sampled_from(sorted(READS)), min_size=1, max_size=2))
    i = jnp.array(data.draw(st.lists(st.integers(0, 1), min_size=3, max_size=3)))

    def program(params):
        w = params["w"]
        for name in layouts:
            w = LAYOUTS[name][0](w)
        return sum(jnp.sum(READS[name](w, i) ** 2) for name in reads)

    @jit
    def both(params):
        value, grads = jax.value_and_grad(program)(params)
        return fz.value_and_grad(program, frozen)(params), (value, fz.partition(grads, frozen)[0])

    params, frozen = {"w": jax.random.normal(jax.random.key(0), shape)}, {"w": fz.rows(rows, axis)}
    chex.assert_trees_all_close(*both(params), rtol=1e-4, atol=1e-5)
    [row] = fz.explain(program, params, frozen).rows
    assert row.merged is None, str(row)
