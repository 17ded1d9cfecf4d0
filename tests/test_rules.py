"""Each operation on an array frozen by rows: read in parts, and equal to the dense one."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from conftest import bits
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

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
ROWS = [slice(0, 5), [0, 2, 5], slice(1, 3), [3], slice(None, None, 2)]


def check(fun, w, rows, *, axis=0, in_parts=True, run=lambda fn: fn):
    """``fun`` of a leaf of which some rows are frozen, beside ``fun`` of the whole leaf.

    What the full array holds at the trainable rows is stale, and must not be seen.
    """
    weights = [jax.random.normal(jax.random.key(7), x.shape) for x in jax.tree.leaves(jax.eval_shape(fun, w))]

    def loss(params):
        return sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(fun(params["w"])), weights, strict=True))

    params, frozen = {"w": w}, {"w": fz.rows(rows, axis)}
    trainable, rest = fz.partition(params, frozen)
    nothing = {"w": dataclasses.replace(trainable["w"], values=jnp.full_like(trainable["w"].values, jnp.nan))}
    _, stale = fz.partition(fz.combine(nothing, rest), frozen)
    value, grads = run(jax.value_and_grad(fz.restrict(loss, stale)))(trainable)
    expected_value, expected = run(jax.value_and_grad(loss))(params)
    chex.assert_trees_all_close(value, expected_value, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(grads, fz.partition(expected, frozen)[0], rtol=1e-5, atol=1e-5)
    [row] = fz.explain(loss, params, frozen).rows
    assert (row.merged is None) == in_parts, str(row)
    assert row.in_parts or not in_parts


@pytest.mark.parametrize(("i", "name"), list(enumerate(TABLE)))
def test_a_table_in_parts(i, name):
    check(TABLE[name], jax.random.normal(jax.random.key(0), (6, 4)), ROWS[i % len(ROWS)])


@pytest.mark.parametrize(("i", "name"), list(enumerate(STACK)))
def test_a_stack_in_parts(i, name):
    check(STACK[name], jax.random.normal(jax.random.key(0), (6, 4, 4)), ROWS[i % len(ROWS)])


@pytest.mark.parametrize("name", MERGED)
def test_merged(name):
    check(MERGED[name], jax.random.normal(jax.random.key(0), (6, 4)), slice(0, 4), in_parts=False)


def test_in_jit():
    """One program of many operations, compiled."""
    names = ("tied head", "take, fill", "dynamic rows", "contracted", "custom_jvp of a lookup", "a constant of a scan")

    def together(w):
        return [TABLE[name](w) for name in names]

    for rows in ROWS:
        check(together, jax.random.normal(jax.random.key(0), (6, 4)), rows, run=jax.jit)
    for rows in ROWS[:3]:
        check(jax.checkpoint(scanned), jax.random.normal(jax.random.key(0), (6, 4, 4)), rows, run=jax.jit)


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

    for run in (jax.jit, lambda fn: fn):
        value, grads = run(fz.value_and_grad(loss, frozen))(params)
        expected_value, expected = run(jax.value_and_grad(loss))(params)
        chex.assert_trees_all_close(value, expected_value, rtol=1e-5)
        chex.assert_trees_all_close(grads, fz.partition(expected, frozen)[0], rtol=1e-5, atol=1e-5)
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
        trainable, rest = fz.partition(params, frozen)

        def loss(p):
            return jnp.sum(jnp.tanh(p["w"][TOKENS] @ p["w"][3:7].T))

        program = jax.make_jaxpr(jax.grad(fz.restrict(loss, rest)))(trainable)
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
        trainable, rest = fz.partition(params, frozen)

        def loss(p):
            return jnp.sum(scanned(p["w"])[0])

        program = jax.make_jaxpr(jax.grad(fz.restrict(loss, rest)))(trainable)
        assert not {(6, 4, 4), (4, 4, 4), (5, 4, 4)} & set(shapes_in(program.jaxpr))

    def test_other_frozen_leaves_are_not_copied_either(self):
        params = {"w": jnp.ones((6, 4, 4)), "frozen": jnp.ones((6, 4, 4)), "trains": jnp.ones((6, 4))}
        trainable, rest = fz.partition(params, {"w": fz.rows(slice(0, 4)), "frozen": True, "trains": False})

        def loss(p):
            def body(x, of_layer):
                w, frozen, scale = of_layer
                return jnp.tanh(x @ w @ frozen) * scale, None

            return jnp.sum(jax.lax.scan(jax.checkpoint(body), X, (p["w"], p["frozen"], p["trains"]))[0])

        for program in (
            jax.make_jaxpr(jax.grad(fz.restrict(loss, rest)))(trainable),
            jax.make_jaxpr(lambda t, rest: jax.grad(fz.restrict(loss, rest))(t))(trainable, rest),
        ):
            assert not {(6, 4, 4), (4, 4, 4)} & set(shapes_in(program.jaxpr))

    def test_a_row_is_read_again_in_the_backward_pass_of_remat(self):
        params = {"w": jnp.ones((6, 4, 4)), "x": X}
        frozen = {"w": fz.rows(slice(0, 4)), "x": False}
        trainable, rest = fz.partition(params, frozen)

        def loss(p):
            return jnp.sum(scanned(p["w"], body=jax.checkpoint(layer))[0] + p["x"])

        program = jax.make_jaxpr(jax.grad(fz.restrict(loss, rest)))(trainable)
        assert not {(6, 4, 4), (4, 4, 4)} & set(shapes_in(program.jaxpr))


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
        for fn in (jax.grad(ours), jax.jit(jax.grad(ours))):
            grads = jax.vmap(fn, (None, 0))(trainable, xs)
            chex.assert_trees_all_close(
                grads, jax.vmap(jax.grad(dense), (None, 0))(trainable, xs), rtol=1e-5, atol=1e-6
            )
        many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), trainable)
        chex.assert_trees_all_close(
            jax.vmap(jax.grad(ours), (0, None))(many, xs[0]),
            jax.vmap(jax.grad(dense), (0, None))(many, xs[0]),
            rtol=1e-5,
        )

    def test_second_derivatives(self, restricted):
        ours, dense, trainable = restricted
        x = X[:2]
        chex.assert_trees_all_close(
            jax.hessian(ours)(trainable, x), jax.hessian(dense)(trainable, x), rtol=1e-4, atol=1e-6
        )
        both = [jax.grad(lambda x, f=f: jnp.sum(jax.grad(f)(trainable, x)["w"].values ** 2))(x) for f in (ours, dense)]
        chex.assert_trees_all_close(*both, rtol=1e-4, atol=1e-6)

    def test_second_derivative_of_custom_jvp(self):
        params = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
        trainable, rest = fz.partition(params, {"w": fz.rows(slice(0, 4))})

        def loss(p):
            return jnp.sum(quantised(jnp.sin(p["w"])) ** 3) + jnp.sum(jnp.sin(looked_up(p["w"], TOKENS)))

        ours, dense = fz.restrict(loss, rest), lambda t: loss(fz.combine(t, rest))
        chex.assert_trees_all_close(jax.hessian(ours)(trainable), jax.hessian(dense)(trainable), rtol=1e-4, atol=1e-5)

    def test_the_gradient_of_the_rest(self, restricted):
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

    def test_shard_map_around(self):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        params = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
        frozen = {"w": fz.rows(slice(0, 4))}
        tokens = jax.random.randint(jax.random.key(1), (8, 3), 0, 6)

        def loss(p, tokens):
            return jnp.mean(jax.nn.logsumexp(jnp.tanh(p["w"][tokens]) @ p["w"].T, -1))

        spec = jax.sharding.PartitionSpec

        def on_each(grad):
            return jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec()))

        ours = on_each(fz.grad(loss, frozen))(params, tokens)
        theirs = on_each(jax.grad(loss))(params, tokens)
        chex.assert_trees_all_close(ours, fz.partition(theirs, frozen)[0], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("which", ["trainable", "rest"])
    def test_one_part_varies_over_a_mesh(self, which):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        trainable, rest = fz.partition({"w": jnp.ones((6, 4))}, {"w": fz.rows(slice(0, 4))})
        spec = jax.sharding.PartitionSpec

        def vary(x):
            return jax.lax.pcast(x, "data", to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, "data")

        def local(trainable, rest, tokens, restrict):
            def loss(p):
                return jnp.sum(jnp.tanh(p["w"][tokens]) @ p["w"].T)

            if which == "trainable":
                trainable = jax.tree.map(vary, trainable)
                return jax.lax.psum(jax.grad(restrict(loss, rest))(trainable), "data")
            return jax.grad(restrict(loss, jax.tree.map(vary, rest)))(trainable)

        def run(restrict):
            fn = functools.partial(local, restrict=restrict)
            fn = jax.shard_map(fn, mesh=mesh, in_specs=(spec(), spec(), spec("data")), out_specs=spec())
            return jax.jit(fn)(trainable, rest, jnp.full((8, 3), 5))

        merged = run(lambda loss, rest: lambda t: loss(fz.combine(t, rest)))
        chex.assert_trees_all_close(run(fz.restrict), merged, rtol=1e-5)

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


class TestLikeJaxGrad:
    PARAMS, FROZEN = {"w": jnp.ones((6, 4)), "b": jnp.float32(2)}, {"w": fz.rows(slice(0, 4)), "b": False}

    def test_branches_on_what_is_concrete(self):
        calls = []

        def loss(params, x, flag, *, power=2):
            calls.append(1)
            scale = 3.0 if float(x.sum()) > 0 and flag == "yes" else 1.0
            y = scale * jnp.sum(params["w"][TOKENS] ** power)
            return y, {"text": f"{float(x.mean()):.1f}", "scale": scale, "none": None, "fn": jnp.tanh, "x": x, "y": y}

        x = jnp.ones(3)
        (value, aux), grads = fz.value_and_grad(loss, self.FROZEN, has_aux=True)(self.PARAMS, x, "yes", power=3)
        (expected_value, expected_aux), expected = jax.value_and_grad(loss, has_aux=True)(
            self.PARAMS, x, "yes", power=3
        )
        assert len(calls) == 2
        assert value == expected_value
        assert {k: v for k, v in aux.items() if k not in "xy"} == {
            k: v for k, v in expected_aux.items() if k not in "xy"
        }
        assert aux["x"] is x
        assert aux["y"] == value
        chex.assert_trees_all_close(grads, fz.partition(expected, self.FROZEN)[0])
        assert fz.explain(loss, self.PARAMS, self.FROZEN, x, "yes").rows[0].merged is None

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

    def test_an_error_of_the_function_is_its_own(self):
        def loss(params):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            fz.grad(loss, self.FROZEN)(self.PARAMS)


class TestFlax:
    """Models as they are: nothing in them knows of rows."""

    def check(self, loss, params, frozen):
        value, grads = jax.jit(fz.value_and_grad(loss, frozen))(params)
        expected_value, expected = jax.jit(jax.value_and_grad(loss))(params)
        chex.assert_trees_all_close(value, expected_value, rtol=1e-5)
        chex.assert_trees_all_close(grads, fz.partition(expected, frozen)[0], rtol=1e-5, atol=1e-5)
        rows = fz.explain(loss, params, frozen).rows
        assert rows
        assert all(row.merged is None and row.in_parts for row in rows), "\n".join(map(str, rows))

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

    params, frozen = {"w": jax.random.normal(jax.random.key(0), shape)}, {"w": fz.rows(rows, axis)}
    value, grads = fz.value_and_grad(program, frozen)(params)
    expected_value, expected = jax.value_and_grad(program)(params)
    chex.assert_trees_all_close(value, expected_value, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(grads, fz.partition(expected, frozen)[0], rtol=1e-4, atol=1e-5)
    [row] = fz.explain(program, params, frozen).rows
    assert row.merged is None, str(row)
