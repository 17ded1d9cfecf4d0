"""The gradient of rows, and that of each operation of the table: equal to the dense one, and computed by rows."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import bits, programs
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from operation_cases import TABLE

import optax_freeze as fz
from optax_freeze._program.walk import Walk

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=QUICK)
"""``jax.jit`` of programs that run once."""
TOKENS = jnp.array([[0, 5, 3], [-1, 2, 5]])
W, X = jax.random.normal(jax.random.key(0), (6, 4)), jax.random.normal(jax.random.key(1), (6, 4))
STACKED = jax.random.normal(jax.random.key(2), (6, 4, 4)) / 2
REPLICATED = P()


def at(x):
    """Three row numbers that are values of the program: 2, 3 or 5."""
    return 3 + (x[:3, 0] > 0) * 2 - (x[:3, 0] < -1)


@jax.custom_jvp
def arranged(w, x):
    return jnp.concatenate([w, x])


@arranged.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    written = dw.at[0].add(1.5 * dx[0]).at[:, 1].multiply(x[0, 0])
    return arranged(w, x), jnp.concatenate([jnp.cumsum(written, 1), dx * 2])


def with_backward(function, backward):
    """A function with a rule of its own for its cotangents."""
    function = jax.custom_vjp(function)
    function.defvjp(lambda *args: (function(*args), args), backward)
    return function


doubled = with_backward(lambda w: w, lambda _, ct: (2 * ct,))
sorted_backwards = with_backward(lambda w: w, lambda _, ct: (jnp.sort(ct, axis=0),))
product = with_backward(
    lambda w, x: 3 * x @ w.T, lambda args, ct: (6 * (args[1].T @ ct).T + jnp.zeros((1, 4)), 3 * ct @ args[0])
)


def layer(x, w):
    return jnp.tanh(x @ w), x.sum()


def scanned(w, x=X, body=layer, **options):
    return lax.scan(body, x, w, **options)


def scattered(w, i, block, mode=None):
    return lax.scatter(w, i, block, lax.ScatterDimensionNumbers((0, 1), (), (0,)), unique_indices=True, mode=mode)


OF_ROWS = {
    "lookup": lambda w, x: w[at(x)] * x[:3],
    "take, clip": lambda w, x: jnp.take(w, TOKENS * 3, axis=0, mode="clip"),
    "take, fill": lambda w, x: jnp.take(w, TOKENS * 3, axis=0, mode="fill", fill_value=7.0),
    "take by bytes": lambda w, x: jnp.take(w, at(x).astype(jnp.uint8), axis=0),
    "dynamic rows": lambda w, x: lax.dynamic_slice_in_dim(w, at(x)[0], 3) * x[:3],
    "dynamic columns": lambda w, x: lax.dynamic_slice_in_dim(w, at(x)[0] - 2, 2, axis=1),
    "cast": lambda w, x: w.astype(jnp.bfloat16)[TOKENS].astype(jnp.float32),
    "over": lambda w, x: w / x,
    "where": lambda w, x: jnp.where(w > x, w, 0.1 * x),
    "clip": lambda w, x: jnp.clip(w, x[0, 0], x[0, 0] + 1),
    "silu": lambda w, x: jax.nn.silu(w) * x,
    "norm of each row": lambda w, x: w / jnp.linalg.norm(w, axis=1, keepdims=True) * x,
    "custom_jvp": lambda w, x: arranged(w, x) * 2,
    "custom_vjp": lambda w, x: doubled(w)[TOKENS],
    "custom_vjp of a product": lambda w, x: product(w, x),
    "sum": lambda w, x: (w * x).sum(0),
    "maximum over the rows": lambda w, x: jnp.max(w * 2.0, axis=0) * x,
    "tied head": lambda w, x: jax.nn.log_softmax(jnp.tanh(w[at(x)]) @ w.T),
    "contracted": lambda w, x: x.T @ w,
    "one-hot": lambda w, x: jax.nn.one_hot(TOKENS[0], 6) @ w * x[:3],
    "with itself": lambda w, x: jnp.tanh(w @ w.T),
    "jit": lambda w, x: jax.jit(lambda w, x: jax.nn.gelu(w) @ x.T)(w, x),
    "remat": lambda w, x: jax.checkpoint(lambda w, x: jax.nn.softplus(w) @ x.T)(w, x),
    "vmap": lambda w, x: jax.vmap(lambda r: jax.nn.silu(w @ r))(x),
    "inner gradient": lambda w, x: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w.T)))(x),
    "scan": lambda w, x: lax.scan(lambda c, r: (jnp.sin(c * r[0] + r[1]), c.sum()), jnp.ones_like(x[0]), (w, x)),
    "a constant of a scan": lambda w, x: lax.map(lambda r: jax.nn.logsumexp(r @ w.T), x),
    "a constant of a scan, reversed": lambda w, x: lax.scan(
        lambda c, r: (jnp.tanh(c + w[2]), r @ w.T), x[0], x, reverse=True
    ),
    "a constant of a scan of remat": lambda w, x: lax.map(jax.checkpoint(lambda r: jax.nn.gelu(r @ w.T)), x),
    "a constant of a scan in a scan": lambda w, x: lax.map(lambda r: lax.map(lambda q: w @ (q * r), x[:2]), x[:2]),
    "a constant of a scan, sorted": lambda w, x: lax.map(lambda r: jnp.sort(w, axis=0) @ r, x),
    "fori_loop": lambda w, x: lax.fori_loop(0, 6, lambda i, c: jnp.tanh(c + w[i]), x[0]),
    "broadcast": lambda w, x: jnp.sin(jnp.ones((3, 6, 4)) * x.sum() + w) * w,
    "nearest row": lambda w, x: w[jnp.argmin(jnp.sum((x[:, None] - w) ** 2, -1), 0)],
    "stop_gradient": lambda w, x: (w - lax.stop_gradient(w) * 2)[TOKENS],
    "optimization_barrier": lambda w, x: lax.optimization_barrier((w, x))[0][TOKENS],
    "joined": lambda w, x: jnp.concatenate([x[:2], w, jnp.ones((2, 4)), w])[TOKENS * 2 + 3] ** 2,
    "joined along two axes": lambda w, x: jnp.concatenate([w[1:5], w[1:5].T])[TOKENS],
    "side by side": lambda w, x: jnp.concatenate([w, x[:, 1:]], axis=1) ** 2,
    "stacked": lambda w, x: jnp.stack([w, x]).sum(0) ** 2,
    "padded": lambda w, x: jnp.cumprod(jnp.pad(w * x, ((1, 0), (1, 1)), constant_values=2.0), axis=1),
    "a padding that trains": lambda w, x: jnp.pad(w, ((1, 1), (2, 0)), constant_values=x[0, 0]) ** 2,
    "rolled": lambda w, x: jnp.roll(w, 2, axis=0)[TOKENS],
    "rows set": lambda w, x: w.at[jnp.array([0, 5])].set(x[1:3]) * 2,
    "a row set to another": lambda w, x: w.at[1].set(w[5] * 2).at[0].set(x[1])[TOKENS],
    "an unknown row set": lambda w, x: jnp.sqrt(jnp.abs(w.at[TOKENS[0, 1]].set(x[1]))),
    "unknown rows set twice": lambda w, x: w.at[at(x)].set(x[:3])[TOKENS],
    "unknown rows added": lambda w, x: w.at[jnp.abs(TOKENS)].add(x.reshape(2, 3, 4))[TOKENS],
    "rows multiplied": lambda w, x: w.at[TOKENS[0] % 4].multiply(x[:3], unique_indices=True)[TOKENS],
    "a column set": lambda w, x: w.at[:, 1].set(x[:, 1]) ** 2,
    "a block added": lambda w, x: w.at[1:3, 1].add(x[:2, 1]) ** 2,
    "an unknown block set": lambda w, x: scattered(w, TOKENS[0, :1], x[:3])[TOKENS],
    "an unknown block set, clip": lambda w, x: scattered(w, TOKENS[0, 1:2], x[:3], "clip")[TOKENS],
    "updated at an unknown row": lambda w, x: lax.dynamic_update_slice(w, x[1:3], (TOKENS[0, 1], 0)) ** 2,
    "updated at an unknown row in a byte": lambda w, x: lax.dynamic_update_slice(
        jnp.pad(w, ((0, 300), (0, 0))), x, (TOKENS[0, 1].astype(jnp.uint8), jnp.uint8(0))
    )[TOKENS],
    "flattened": lambda w, x: (w * x).reshape(-1)[1:] ** 2,
    "cumsum": lambda w, x: jnp.cumsum(w, axis=0) * x,
    "cumlogsumexp within rows": lambda w, x: lax.cumlogsumexp(w, 1) * x,
    "sort": lambda w, x: jnp.sort(w, axis=0) * x,
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda w, x: w[:3], lambda w, x: (w * x)[3:], w, x),
    "cond of what is split": lambda w, x: lax.cond(x[0, 0] > 0, lambda w: w, lambda w: w[::-1] / x, w)[TOKENS],
    "cond of a product": lambda w, x: lax.cond(x[0, 0] > 0, lambda w: w @ x.T, lambda w: x @ w.T, w),
    "switch": lambda w, x: lax.switch(TOKENS[0, 2] - 2, [lambda w: x @ w.T, lambda w: w @ x.T, lambda w: w @ w.T], w),
    "cond in a scan": lambda w, x: lax.map(lambda i: lax.cond(i > 1, lambda: w[i], lambda: w[0] * 2), TOKENS[0]),
    "mapped cond": lambda w, x: jax.vmap(lambda i: lax.cond(i > 1, lambda: w[i], lambda: w[0] * 2))(TOKENS[0]),
}  # fmt: skip
"""Functions of a table of which rows train, and of another array of its shape."""

OF_STACK = {
    "scan": scanned,
    "scan of what is left": lambda w, x: scanned(w, jnp.broadcast_to(w[0, 0], (3, 4))),
    "reverse scan": functools.partial(scanned, reverse=True),
    "unrolled reverse scan": functools.partial(scanned, unroll=4, reverse=True),
    "scan of remat": functools.partial(scanned, body=jax.checkpoint(layer)),
    "scan of silu": functools.partial(scanned, body=lambda c, w: (jax.nn.silu(c @ jax.nn.relu(w)), None), reverse=True),
    "scan in remat of jit": jax.checkpoint(functools.partial(scanned, body=jax.jit(layer))),
    "scan of a cast": lambda w, x: scanned(w.astype(jnp.bfloat16).astype(jnp.float32), x),
    "scan of a part": lambda w, x: scanned(w[1:5], x),
    "map": lambda w, x: lax.map(lambda w: x @ w, w),
    "layers in a loop": lambda w, x: functools.reduce(lambda x, i: jax.nn.silu(x @ w[i]), range(6), x),
    "layers in fori_loop": lambda w, x: lax.fori_loop(0, 6, lambda i, c: jax.nn.silu(c @ w[i]), x),
    "layers of einsum": lambda w, x: jnp.einsum("xd,lde->lxe", x, w),
    "vmap over layers": lambda w, x: jax.vmap(lambda w: jnp.tanh(x @ w))(w),
}
ROWS = [slice(0, 5), [0, 2, 5], slice(1, 3), [3], slice(None, None, 2)]


def weighted(outs):
    """A sum of all results, with different weights."""
    outs = [y for y in jax.tree.leaves(outs) if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum(jnp.sum(y * np.cos(np.arange(y.size)).reshape(y.shape).astype(y.dtype)) for y in outs)


def ways(cases):
    """The losses of cases, and a function of their parameters: values and gradients of restrict, of rows, and dense.

    ``cases`` by name: a function of the parameters by keyword, the parameters, and what is frozen of them.
    """
    losses = {name: lambda params, fun=fun: weighted(fun(**params)) for name, (fun, *_) in cases.items()}

    def restricted(loss, params, frozen):
        trainable, rest = fz.partition(params, frozen)
        return jax.value_and_grad(fz.restrict(loss, rest))(trainable)

    def dense(loss, params, frozen):
        value, grads = jax.value_and_grad(loss)(params)
        return value, fz.partition(grads, frozen)[0]

    of_rows = lambda loss, params, frozen: fz.value_and_grad(loss, frozen)(params)  # noqa: E731
    return losses, lambda params: [
        {name: way(loss, params[name], cases[name][2]) for name, loss in losses.items()}
        for way in (restricted, of_rows, dense)
    ]


def same(found, rtol=1e-5, atol=1e-5):
    of_restrict, of_rows, dense = found
    chex.assert_trees_all_close(of_restrict, dense, rtol=rtol, atol=atol)
    chex.assert_trees_all_close(of_rows, dense, rtol=rtol, atol=atol)


DEARER = ("a constant of a scan, sorted", "custom_vjp", "nearest row", "sort")
"""Cases whose rows are dearer to find than to compute."""


def check(cases, run=jit, everything=None, **tolerance):
    """Both gradients of the rows are the dense ones, in one program. ``everything``: what computes all of a leaf."""
    losses, all_ways = ways(cases)
    same(run(all_ways)({name: params for name, (_, params, _) in cases.items()}), **tolerance)
    for name, (_, params, frozen) in cases.items():
        rows = () if everything == "not asked" else fz.explain(losses[name], params, frozen).rows
        found = {row.path: row.merged.name for row in rows if row.merged and row.merged.name != "custom_jvp_call"}
        expected = everything or ({"w": "scatter-add"} if name in DEARER else {})
        assert not rows or found == expected, (name, *map(str, rows))


def of_rows(table, rows=slice(0, 5), w=W, axis=0, x=X):
    """The cases of a table of functions."""
    return {name: (fun, {"w": w, "x": x}, {"w": fz.rows(rows, axis), "x": False}) for name, fun in table.items()}


def some(table, i, of):
    """Every ``of``-th entry of a table, from the one numbered ``i``."""
    return {name: table[name] for name in list(table)[i::of]}


@pytest.mark.parametrize("i", range(10))
def test_a_table(i):
    check(of_rows(some(OF_ROWS, i, 10), ROWS[i % len(ROWS)]))


@pytest.mark.parametrize("i", range(len(ROWS)))
def test_a_stack(i):
    check(of_rows(some(OF_STACK, i, len(ROWS)), ROWS[i], STACKED))


def operations():
    """The gradient of each operation of the table with respect to each of its operands."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    for name, (fun, operands, *_) in TABLE.items():
        flat, treedef = jax.tree.flatten(operands)
        if name in ("ragged_dot, gradient", "scatter of elements"):  # JAX cannot differentiate them
            continue
        for i, w in enumerate(flat):
            if max(w.shape, default=0) > 1 and is_float(w):

                def of_operand(w, x, fun=fun, flat=flat, treedef=treedef, i=i):
                    return fun(*jax.tree.unflatten(treedef, [*flat[:i], w, *flat[i + 1 :]]))

                if any(map(is_float, jax.tree.leaves(jax.eval_shape(of_operand, w, X)))):
                    axis = -1 if i % 2 and w.shape[-1] > 1 else int(np.argmax(w.shape))
                    yield from of_rows({f"{name}, {i}": of_operand}, slice(None, None, 2), w, axis).items()


@pytest.mark.parametrize("i", range(12))
def test_each_operation(i):
    check(some(dict(operations()), i, 12), everything="not asked")


def test_what_computes_everything():
    check(of_rows({"custom_vjp": lambda w, x: sorted_backwards(w)[TOKENS]}), everything={"w": "sort"})
    check(of_rows({"reshape": lambda w, x: w.reshape(8, 3)}), everything={"w": "reshape"})


OF_NOTHING = {
    "split": lambda w, x: jnp.split(jnp.concatenate([w, x]), [0, 6, 6]),
    "split columns": lambda w, x: jnp.split(jnp.concatenate([w, x], 1), [0, 4, 4], axis=1),
    "concatenate": lambda w, x: [jnp.tanh(jnp.concatenate([w[:0], x[:0]])) @ w.T, w],
    "pad": lambda w, x: jnp.pad(w[:0], ((1, 2), (0, 0)), constant_values=1.0) * w[:3],
    "update": lambda w, x: lax.dynamic_update_slice(w, w[1:1], (1, 0)) ** 2,
    "lookup": lambda w, x: [w[jnp.zeros((0, 2), int)], w.at[jnp.zeros(0, int)].add(w[:0]) * x],
    "scan": lambda w, x: [lax.scan(lambda c, row: (jnp.tanh(c * row), c), x[0], w[:0]), w * x],
    "scan in a scan": lambda w, x: lax.scan(
        lambda c, row: (lax.scan(lambda d, each: (d * each, None), c, w[:0])[0] * row, c * row), x[0], w
    ),
}


@pytest.mark.parametrize("index", [[0, 2, 5], jnp.array([0, 2, 5])], ids=["static", "dynamic"])
def test_parts_without_elements(index):
    cases = of_rows(OF_NOTHING)
    check(
        {name: (fun, p, {**frozen, "w": fz.rows(index)}) for name, (fun, p, frozen) in cases.items()}, jit, "not asked"
    )


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_random_numbers_that_are_drawn_again(impl):
    """Those of a batch of keys are not those of each key."""
    keys = jax.random.split(jax.random.key(3, impl=impl), 6)

    def noisy(w):
        split = jax.vmap(jax.random.split)(keys)[:, 1]
        return jnp.tanh(w * jax.vmap(lambda key: jax.random.normal(key, (4,)))(split))

    check(of_rows({"noise": lambda w, x: jax.checkpoint(noisy)(w)}), everything={"w": "random_bits"})


def test_rows_along_two_axes_of_a_square():
    funs = {
        "times": lambda w, x: w * w.T,
        "where": lambda w, x: jnp.where(w > 0, w.T, 1.0),
        "minus": lambda w, x: w.T - w**2,
    }
    check(of_rows(funs, slice(0, 2), W[:4]))


def test_eagerly():
    """Outside of ``jit``, where the numbers of rows are concrete."""
    names = ("dynamic rows", "lookup", "take, fill")
    check(of_rows({name: OF_ROWS[name] for name in names}, [0, 2, 5]), run=lambda fn: fn)


def nested(w, x):
    return lax.scan(lambda x, w: (scanned(w, x)[0], None), x, w)[0]


def test_rows_along_another_axis():
    groups = jax.random.normal(jax.random.key(0), (2, 6, 4, 4))
    check(
        of_rows({"lookup": lambda w, x: w[:, TOKENS]}, slice(0, 5), W.T, axis=1)
        | of_rows({"head": lambda w, x: x @ w}, [1, 4], W.T, axis=1)
        | of_rows({"contracted": lambda w, x: w @ x[:, :2]}, slice(2, 3), W.T, axis=-1)
        | of_rows(
            {"as MaxText": lambda w, x: scanned(jnp.moveaxis(w, 1, 0), x)}, slice(0, 4), STACKED.swapaxes(0, 1), 1
        )
        | of_rows({"nested": nested}, slice(0, 4), groups, axis=1)
        | of_rows({"nested, groups": nested}, slice(0, 1), groups)
    )


def test_leaves_with_different_boundaries():
    params = {"w": STACKED, "scale": W, "bias": jnp.ones((6, 4)), "frozen": X, "head": jnp.ones((4, 3))}
    frozen = {"w": fz.rows(slice(0, 4)), "scale": fz.rows([0, 2, 3, 5]), "bias": False, "frozen": True, "head": False}

    def loss(head, **layers):
        def block(x, p):
            x = jnp.tanh(x @ p["w"]) * p["scale"] + p["bias"] * p["frozen"]
            return x, x.sum()

        x, sums = lax.scan(jax.checkpoint(block), X, layers)
        mixed = layers["scale"] * layers["w"].sum(-1) + layers["bias"]
        return jnp.sum((x @ head) ** 2) + sums @ jnp.arange(6.0) + mixed[2:5].sum()

    check({"": (loss, params, frozen)}, rtol=1e-4, atol=1e-4)


def shapes_of(fun, *args):
    """Shapes of all values that a program computes."""
    jaxprs = programs(jax.make_jaxpr(fun)(*args).jaxpr)
    return {v.aval.shape for jaxpr in jaxprs for eqn in jaxpr.eqns for v in eqn.outvars}


class TestCost:
    def test_a_lookup_and_a_tied_head_compute_nothing_of_the_size_of_the_table(self):
        params, frozen = {"w": jnp.ones((100, 4))}, {"w": fz.rows(slice(0, 98))}
        lookup = lambda p: jnp.sum(jnp.tanh(p["w"][TOKENS] @ p["w"][3:7].T))  # noqa: E731
        tied = lambda p: jnp.sum(jnp.tanh(p["w"][TOKENS]) @ p["w"].T)  # noqa: E731
        for loss in (lookup, tied):
            assert (100, 4) not in shapes_of(fz.grad(loss, frozen), params)
            assert (100, 4) in shapes_of(jax.grad(loss), params)

    def test_the_first_layers_have_no_backward(self):
        params, x = {"w": jnp.ones((8, 32, 32)) / 32}, jnp.ones((64, 32))
        flops = lambda fun: jax.jit(fun).lower(params, x).compile().cost_analysis()["flops"]  # noqa: E731

        def loss(params, x):
            return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"], unroll=8)[0])

        matmul = 2 * 64 * 32 * 32
        assert flops(fz.grad(loss, {"w": fz.rows(slice(0, 7))})) == pytest.approx(9 * matmul, rel=0.05)
        assert flops(jax.grad(loss)) > 20 * matmul

    def test_a_scan_by_halves_is_as_long_as_its_dense_gradient(self):
        loss = lambda p: jnp.sum(jnp.sin(lax.associative_scan(jnp.add, p["w"])))  # noqa: E731
        equations = lambda fun: len(jax.make_jaxpr(fun)({"w": jnp.ones((256, 4))}).eqns)  # noqa: E731
        assert equations(fz.grad(loss, {"w": ~fz.rows([1, 3])})) < 2 * equations(jax.grad(loss))

    @pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
    def test_frozen_layers_are_not_copied(self, wrap):
        """Neither the frozen rows of a stack nor another frozen stack; under remat, a row is read again."""
        params = {"w": STACKED, "frozen": STACKED, "trains": W, "x": X}
        frozen = {"w": fz.rows(slice(0, 4)), "frozen": True, "trains": False, "x": False}

        def loss(p):
            body = wrap(lambda x, of_layer: jnp.tanh(x @ of_layer[0] @ of_layer[1]) * of_layer[2])
            stacks = p["w"], p["frozen"], p["trains"]
            return jnp.sum(lax.scan(lambda x, each: (body(x, each), None), p["x"], stacks)[0])

        assert not {(6, 4, 4), (5, 4, 4), (4, 4, 4)} & shapes_of(fz.grad(loss, frozen), params)


SEVERAL = {"w": W, "v": W[::-1] + 1, "x": X[:3], "frozen": X[3:5]}
FROZEN = {"w": fz.rows(slice(0, 4)), "v": fz.rows([0, 2, 5]), "x": False, "frozen": True}
JOINED = {
    "all": lambda w, v, x, frozen: jnp.concatenate([w, x, v, frozen])[TOKENS * 2 + 3] ** 2,
    "reversed": lambda w, v, x, frozen: jnp.concatenate([w, w[::-1], v, v[::-1]], 1)[TOKENS] ** 2,
    "stacked": lambda w, v, x, frozen: jnp.stack([v, w], 1)[TOKENS] ** 2,
    "written into a frozen row": lambda w, v, x, frozen: w.at[0].set(x[1])[TOKENS] ** 2 * v.sum(),
    "branches": lambda w, v, x, frozen: lax.cond(x[0, 0] > 0, lambda: w @ frozen.T, lambda: v @ frozen.T),
    "rows or not": lambda w, v, x, frozen: v * lax.cond(x[0, 0] < 9, lambda: w, lambda: x[:1] * jnp.ones((6, 1))),
    "many": lambda w, v, x, frozen: lax.switch(jnp.argmax(x[0]), [lambda: w, lambda: v * 2, lambda: w + v] * 2),
}


def test_several_leaves():
    check({name: (fun, SEVERAL, FROZEN) for name, fun in JOINED.items()})
    loss = lambda p: jnp.sum(jnp.concatenate([p["frozen"], p["w"]])[TOKENS] * p["v"].sum())  # noqa: E731
    assert (4, 4) not in shapes_of(fz.grad(loss, FROZEN), SEVERAL)  # two trainable rows, and the frozen leaf
    platform = lambda w, v, x, frozen: v * lax.platform_dependent(w, cpu=lambda w: w * 2, default=lambda w: w)  # noqa: E731
    check({"": (platform, SEVERAL, FROZEN)}, everything={"w": "cond"})  # for v, the value needs it


def test_what_jax_differentiates_forward_only():
    """A ``while_loop``: the gradient is refused as by ``jax.grad``."""
    params, frozen = {"w": W}, {"w": fz.rows([0, 1, 4])}

    def loss(p):
        step = lambda state: (state[0] + 1, jnp.tanh(state[1] @ p["w"].T @ p["w"] / 9))  # noqa: E731
        return lax.while_loop(lambda state: state[0] < 4, step, (0, X))[1].sum()

    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        fz.grad(loss, frozen)(params)
    trainable, rest = fz.partition(params, frozen)
    np.testing.assert_allclose(fz.restrict(loss, rest)(trainable), loss(params), rtol=1e-5)


@pytest.mark.parametrize("i", range(6))
def test_what_is_not_finite(i):
    """Gradients are NaN and infinite where the dense ones are: zero is selected, and never multiplied."""
    rows, trains, frozen = [([0, 1, 3, 4], 5, 1), (slice(0, 5), 5, 2), ([2], 3, 2)][i % 3]
    cases = of_rows(some(OF_ROWS, i, 6), rows)
    all_ways = jit(ways(cases)[1])
    for value in (jnp.inf, -jnp.inf, jnp.nan, 0.0, 1e38):
        for row in (trains, frozen):
            w, x = (array.at[row, 1].set(value) for array in (W, X))
            for params in ({"w": w, "x": X}, {"w": W, "x": x}, {"w": w, "x": x}):
                same(all_ways(dict.fromkeys(cases, params)), rtol=1e-4)


class TestTransformations:
    @pytest.fixture
    def restricted(self):
        trainable, rest = fz.partition({"w": W}, {"w": fz.rows(slice(0, 4))})

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
        grads = jax.vmap(fz.grad(lambda p, x: x * p["w"][5].sum(), {"w": fz.rows(slice(0, 4))}), (None, 0))
        chex.assert_trees_all_close(grads({"w": W}, jnp.arange(3.0))["w"].values[:, 1, 0], jnp.arange(3.0))

    def test_second_derivatives(self, restricted):
        ours, dense, trainable = restricted

        def second(fun, x):
            through_x = jax.grad(lambda x: jnp.sum(jax.grad(fun)(trainable, x)["w"].values ** 2))(x)
            return jax.hessian(fun)(trainable, x), through_x

        both = jit(lambda x: (second(ours, x), second(dense, x)))
        chex.assert_trees_all_close(*both(X[:2]), rtol=1e-4, atol=1e-6)

    def test_second_derivatives_of_operations(self):
        names = ("over", "custom_jvp", "lookup", "contracted", "stacked", "rows set", "cumsum", "cond")
        frozen = {"w": fz.rows(slice(0, 5)), "x": False}

        def norm(grad):
            return lambda p: sum(jnp.sum(g**2) for n in names for g in jax.tree.leaves(grad(n)(p)))

        losses = {name: lambda p, name=name: weighted(jnp.sin(OF_ROWS[name](**p))) for name in names}
        of_rows = norm(lambda name: fz.grad(losses[name], frozen))
        of_all = norm(lambda name: lambda p: fz.partition(jax.grad(losses[name])(p), frozen)[0])
        both = jit(lambda p: (jax.grad(of_rows)(p), jax.grad(of_all)(p)))
        chex.assert_trees_all_close(*both({"w": W, "x": X}), rtol=1e-4, atol=1e-4)

    def test_the_gradient_of_the_rest(self):
        """Rules are exact in both parts: an outer gradient with respect to the frozen rows is right, too."""

        def loss(p):
            return jnp.sum(jnp.tanh(p["w"][TOKENS]) @ p["w"].T) + jnp.sum(p["w"].T @ jnp.ones((6, 2)) ** 2)

        def whole(params, restrict):
            trainable, rest = fz.partition(params, {"w": fz.rows([0, 1, 4])})
            return restrict(loss, rest)(trainable)

        ours = jax.grad(whole)({"w": W}, fz.restrict)
        dense = jax.grad(whole)({"w": W}, lambda loss, rest: lambda t: loss(fz.combine(t, rest)))
        chex.assert_trees_all_close(ours, dense, rtol=1e-5, atol=1e-6)

    @pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="explicit axes changed much")
    def test_explicit_axes(self):
        mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(AxisType.Explicit,) * 2)
        with jax.set_mesh(mesh):
            w = jax.device_put(jax.random.normal(jax.random.key(0), (6, 8)), jax.NamedSharding(mesh, P(None, "tp")))

            def loss(p):
                looked_up = p["w"].at[TOKENS].get(out_sharding=P(None, None, "tp"))
                head = jnp.einsum("xd,rd->xr", jnp.ones((3, 8)), jnp.tanh(p["w"]), out_sharding=P())
                return jnp.sum(looked_up**2) + jnp.sum(head)

            frozen = {"w": fz.rows(slice(0, 4))}
            expected = fz.partition(jax.jit(jax.grad(loss))({"w": w}), frozen)[0]
            chex.assert_trees_all_close(jax.jit(fz.grad(loss, frozen))({"w": w}), expected, rtol=1e-5)

    @pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="explicit axes changed much")
    def test_another_mesh_inside_of_the_loss(self):
        """Rules are applied under the mesh of the operation."""
        mesh = functools.partial(jax.make_mesh, (4, 2), ("data", "tp"))
        auto, explicit = (mesh(axis_types=(kind,) * 2) for kind in (AxisType.Auto, AxisType.Explicit))
        params, frozen = {"w": jax.random.normal(jax.random.key(0), (6, 8))}, {"w": fz.rows([0, 1, 4])}

        def operations(w):
            head = jnp.tanh(w[TOKENS]) @ w.T
            scanned = lax.scan(lambda c, r: (jnp.sin(c + r), None), jnp.ones(8), w)[0]
            return jnp.sum(head**2) + jnp.sum(scanned * w[2:4]) + jnp.sum(jax.nn.one_hot(TOKENS, 6) @ w)

        def changed(w):
            with jax.sharding.use_abstract_mesh(auto.abstract_mesh):
                return operations(lax.with_sharding_constraint(w, P(None, "tp")))

        for fun, outer in ((changed, None), (jax.sharding.auto_axes(operations, out_sharding=P()), explicit)):
            with contextlib.nullcontext() if outer is None else jax.set_mesh(outer):
                check({"": (lambda w, fun=fun: fun(w), params, frozen)}, run=jax.jit)

    def test_a_checkpoint_policy_is_kept(self):
        params, frozen = {"w": jnp.ones((6, 4, 4))}, {"w": fz.rows(slice(0, 4))}

        def saved(policy):
            body = jax.checkpoint(lambda x, w: (jnp.sin(checkpoint_name(x @ w, "product")), None), policy=policy)

            def loss(p):
                return jnp.sum(lax.scan(body, X, p["w"])[0])

            program = jax.make_jaxpr(fz.grad(loss, frozen))(params)
            return str(program).count("dot_general")

        policies = jax.checkpoint_policies
        assert saved(policies.save_only_these_names("product")) < saved(policies.nothing_saveable)


ON_MESH = {
    "rows of its own": lambda w, x: lax.dynamic_slice_in_dim(w, lax.axis_index("data"), 2),
    "columns of its own": lambda w, x: lax.dynamic_slice_in_dim(w, lax.axis_index("data"), 1, axis=1),
    "updated at a row of its own": lambda w, x: lax.dynamic_update_slice(w, x[:2], (lax.axis_index("data"), 0))[TOKENS],
    "reduced": lambda w, x: lax.pmean(jax.nn.relu(w) @ x.T, "data"),
    "gathered": lambda w, x: lax.all_gather(w * x[0, 0], "data")[:, TOKENS],
    "cond of itself": lambda w, x: lax.cond(x[0, 0] > 0, lambda w: w @ x.T, lambda w: 2 * w @ x.T, w),
    "switch of what does not vary": lambda w, x: lax.switch(TOKENS[0, 2], [jnp.sin, jnp.tanh] * 2, w)[TOKENS],
    **{name: fun for name, fun in OF_ROWS.items() if not name.startswith(("custom_vjp", "cond", "switch"))},
}
STACK_ON_MESH = {
    "exchanged": lambda w, x: lax.scan(
        lambda c, w: (lax.ppermute(jnp.tanh(c @ w), "data", [(i, (i + 1) % 4) for i in range(4)]), None), x, w
    ),
    **OF_STACK,
}
SOME_ON_MESH = ("tied head", "custom_jvp", "silu", "a constant of a scan of remat", "scan")


def on_mesh(params, x, names=(*ON_MESH, *STACK_ON_MESH)):
    """A loss of many operations on a shard of ``x``."""
    outs = [fun(params["table"], x) for name, fun in ON_MESH.items() if name in names]
    outs += [fun(params["stack"], x) for name, fun in STACK_ON_MESH.items() if name in names]
    return sum(jnp.sum(jnp.sin(out + 1)) for out in jax.tree.leaves(outs))


some_on_mesh = functools.partial(on_mesh, names=SOME_ON_MESH)


def traced(fun):
    """``fun`` of zeros, whose result are zeros: traced, and not run."""
    return lambda *args: jax.tree.map(lambda x: np.zeros(x.shape), jax.eval_shape(fun, *args))


class TestShardMap:
    """Inside of ``jax.shard_map`` each value varies over axes of the mesh, or does not, and JAX checks which."""

    FROZEN = {"table": fz.rows([0, 2, 3]), "stack": fz.rows(slice(0, 4))}  # noqa: RUF012

    @pytest.fixture
    def mesh(self):
        return jax.make_mesh((4, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)

    def check(self, local, mesh, of_params=REPLICATED, out_specs=REPLICATED, run=jit, **more):
        """``local(trainable, rest, x, restrict)`` of each shard, beside that of the combined parameters."""

        def merged(loss, rest):
            return lambda trainable, x: loss(fz.combine(trainable, rest), x)

        def both(params, x):
            trainable, rest = fz.partition(params, self.FROZEN)
            return [jax.tree.leaves(local(trainable, rest, x, restrict)) for restrict in (fz.restrict, merged)]

        mapped = jax.shard_map(both, mesh=mesh, in_specs=(of_params, P("data")), out_specs=out_specs, **more)
        results = run(mapped)({"table": W, "stack": STACKED}, jax.random.normal(jax.random.key(3), (24, 4)))
        chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-4)

    def test_each_operation(self, mesh):
        def local(trainable, rest, x, restrict):
            value, grads = jax.value_and_grad(restrict(on_mesh, rest))(trainable, x)
            return lax.psum(value, "data"), grads

        self.check(local, mesh)

    def test_a_mapped_loss(self, mesh):
        """Each device computes the wanted rows of the gradient alone."""

        def local(p, x):
            return lax.psum(jnp.sum(jnp.tanh(x @ p["v"] @ p["w"]) ** 2), ("data", "tp"))

        loss = jax.shard_map(local, mesh=mesh, in_specs=({"w": P(None, "tp"), "v": P()}, P("data")), out_specs=P())
        params, x = {"w": W, "v": STACKED[0, :, :3].repeat(2, 1)}, X[:4]
        gradient = lambda p, x: fz.grad(loss, {"w": fz.rows([0, 1, 2, 4]), "v": True})(p, x)["w"].values  # noqa: E731
        [mapped] = [eqn for eqn in jax.make_jaxpr(gradient)(params, x).eqns if eqn.outvars[0].aval.shape == (2, 4)]
        assert mapped.primitive.name == "shard_map"
        expected = jit(jax.grad(loss))(params, x)["w"][jnp.array([3, 5])]
        chex.assert_trees_all_close(jit(gradient)(params, x), expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("varies", ["the trainable part", "the rest"])
    def test_what_varies(self, mesh, varies):
        """JAX sums the gradient of what does not vary over the mesh; ``out_specs`` has it checked."""
        trains, rests = varies == "the trainable part", varies == "the rest"

        def vary(x):
            return lax.pcast(x, "data", to="varying") if hasattr(lax, "pcast") else lax.pvary(x, "data")

        def local(trainable, rest, x, restrict):
            trainable = jax.tree.map(vary, trainable) if trains else trainable
            rest = jax.tree.map(vary, rest) if rests else rest
            grads = jax.grad(restrict(loss, rest))(trainable, x)
            return lax.pmean(grads, "data") if trains else grads

        loss = on_mesh
        self.check(local, mesh, run=traced)
        loss = some_on_mesh
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

        self.check(local, mesh, out_specs=P("data"), run=traced)
        assert [row.path for row in explained[:2]] == ["stack", "table"]
        whole = {row.path: row.merged and row.merged.name for row in explained}
        assert whole == {"stack": None, "table": "custom_jvp_call"}, "\n".join(map(str, explained))

    def test_sharded_leaves(self, mesh):
        """Shards of the columns, gathered before they are used."""
        merged = []

        def loss(params, x):
            table = lax.all_gather(params["table"], "tp", axis=1, tiled=True)
            layers = lax.all_gather(params["stack"], "tp", axis=0)
            x = table[at(x)] + lax.map(lambda r: jax.nn.silu(table) @ r, x[:3]).sum(-1, keepdims=True)
            x, _ = lax.scan(layer, x, jnp.moveaxis(layers, 0, -2).reshape(6, 4, 4))
            return lax.psum(jnp.sum(x), "tp")

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
            table = lax.with_sharding_constraint(params["table"], P("tp", None))
            stack = lax.with_sharding_constraint(params["stack"], P(None, None, "tp"))
            x, _ = lax.scan(layer, table[at(x)], stack)
            return jnp.sum(lax.map(lambda r: jax.nn.logsumexp(r @ table.T), x))

        def local(trainable, rest, x, restrict):
            return jax.grad(restrict(loss, rest))(trainable, x)

        with jax.set_mesh(mesh):
            self.check(local, mesh, axis_names={"data"})


needs_refs = pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="JAX had no jax.new_ref")
FLOAT = jax.ShapeDtypeStruct((), jnp.float32)


def a_ref_in_a_scan():
    ref = jax.new_ref(jnp.zeros(()))

    def loss(p):
        def body(carry, x):
            ref[...] += lax.stop_gradient(carry) + 1
            return carry + ref[...] * (jnp.cumsum(p["w"], 0) @ x).sum(), None

        rows = lax.scan(lambda carry, w: (carry * w.sum(), ref[...]), p["b"], p["w"])
        return lax.scan(body, p["b"], jnp.ones((2, 2)))[0] + rows[0]

    return loss, lambda: float(ref[...])


def callbacks_in_order():
    seen = []

    def loss(p):
        x = p["w"][2]
        jax.debug.callback(lambda: seen.append("constant"), ordered=True)
        io_callback(lambda x: seen.append(float(x)), None, lax.stop_gradient(x).sum(), ordered=True)
        jax.debug.callback(lambda: seen.append("again"), ordered=True)
        y = io_callback(lambda: np.float32(len(seen)), FLOAT, ordered=True)
        return x.sum() * y * p["b"] + p["w"].sum()

    return loss, lambda: list(seen)


def only_what_is_taken():
    seen = []

    def call(name, w):
        jax.debug.callback(lambda s: seen.append((str(name), float(s))), lax.stop_gradient(w.sum()), ordered=True)
        return 2 * w

    def loss(p):
        w, yes, of = p["w"], jnp.ones(()).sum() > 0, functools.partial
        w = lax.cond(yes, of(call, "taken"), of(call, "not taken"), w)
        w = lax.switch(jnp.argmax(jnp.arange(3) % 2), [of(call, i) for i in range(3)], w)
        return (w * lax.scan(lambda y, _: (call("step", y), None), jnp.ones(()).sum(), length=3)[0]).sum() * p["b"]

    return loss, lambda: list(seen)


def in_functions():
    seen = []
    note = lambda: jax.debug.callback(lambda: seen.append(1))  # noqa: E731

    @jax.custom_jvp
    def scaled(w, b):
        note()
        return w * b

    @scaled.defjvp
    def _(primals, tangents):
        return scaled(*primals), primals[0] * tangents[1] + tangents[0] * primals[1]

    def product(w, b):
        note()
        return jnp.sin(w @ w.T) * b

    def loss(p):
        functions = (jax.jit(product), jax.checkpoint(product), scaled)
        return sum(f(p["w"], b).sum() for f in functions for b in (p["b"], 2.0))

    return loss, lambda: list(seen)


EFFECTS = [pytest.param(a_ref_in_a_scan, marks=needs_refs), callbacks_in_order, only_what_is_taken, in_functions]


class TestEffects:
    """Effects happen as under ``jax.grad``: as often, in the same order, and none while a function is traced."""

    PARAMS, FROZEN = {"w": jnp.arange(6.0).reshape(3, 2) + 1, "b": jnp.float32(2)}, {"w": fz.rows([0, 1]), "b": False}

    def check(self, make, run, merged=None):
        """``make()`` gives a loss, and a function that returns what it has done so far."""

        def done(transform):
            loss, seen = make()
            value, grads = run(transform(loss))(self.PARAMS)
            jax.effects_barrier()
            return value, grads, seen()

        value, grads, ours = done(lambda loss: fz.value_and_grad(loss, self.FROZEN))
        expected_value, expected, theirs = done(jax.value_and_grad)
        assert ours == theirs
        chex.assert_trees_all_close((value, grads), (expected_value, fz.partition(expected, self.FROZEN)[0]), rtol=1e-6)
        loss, seen = make()
        before = seen()
        [row] = fz.explain(loss, self.PARAMS, self.FROZEN).rows
        jax.effects_barrier()
        assert seen() == before
        assert (row.merged and row.merged.name) == merged

    @pytest.mark.parametrize("make", EFFECTS)
    def test_as_under_jax_grad(self, make):
        self.check(make, jax.jit)

    @pytest.mark.parametrize("make", [callbacks_in_order, only_what_is_taken])
    def test_eagerly(self, make):
        self.check(make, lambda fun: fun)

    @needs_refs
    def test_a_ref_that_is_an_argument(self):
        @jax.jit
        def counted(w, ref):
            ref[...] += 1
            return (w[2] * ref[...]).sum()

        def loss(p, ref):
            return counted(p["w"], ref) * counted(p["w"], ref) * p["b"]

        ours, theirs, untouched = (jax.new_ref(jnp.zeros(2)) for _ in range(3))
        grads = jax.jit(fz.grad(loss, self.FROZEN))(self.PARAMS, ours)
        expected = jax.jit(jax.grad(loss))(self.PARAMS, theirs)
        chex.assert_trees_all_close(grads, fz.partition(expected, self.FROZEN)[0])
        assert ours[...].tolist() == theirs[...].tolist() == [2, 2]
        fz.explain(loss, self.PARAMS, self.FROZEN, untouched)
        assert untouched[...].tolist() == [0, 0]

    def test_where_python_needs_a_value(self):
        """It needs a call of the function itself, which is then the only one that runs anything."""

        def make():
            seen = []

            def loss(p):
                io_callback(lambda: seen.append("before"), None, ordered=True)
                x = 3 * p["w"][2] if p["w"][0, 0] > 0 else p["w"][2]
                io_callback(lambda: seen.append("after"), None, ordered=True)
                return x.sum() * p["b"]

            return loss, lambda: list(seen)

        self.check(make, lambda fun: fun, merged="Python that needs a value")


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
        assert len(calls) == 1 + computed
        expected, _ = jax.grad(loss, has_aux=True)(self.PARAMS, x, "yes", power=3)
        assert aux.pop("x") is x
        assert aux == {"text": "1.0", "scale": 3.0, "none": None, "fn": jnp.tanh, "y": value}
        chex.assert_trees_all_close(grads, fz.partition(expected, self.FROZEN)[0])
        [row] = fz.explain(loss, self.PARAMS, self.FROZEN, x, "yes").rows
        assert (row.merged is not None) == computed

    def test_aux_of_the_leaf_itself(self):
        def loss(p):
            return (jnp.sum(p["w"][TOKENS]), (p["w"], p["b"], "text"))

        (_, aux), _ = fz.value_and_grad(loss, self.FROZEN, has_aux=True)(self.PARAMS)
        assert bits(aux) == bits((self.PARAMS["w"], self.PARAMS["b"], "text"))

    @pytest.mark.parametrize("rows", [slice(0, 4), jnp.arange(4)], ids=["static", "dynamic"])
    def test_constants_that_a_function_returns_are_arrays(self, rows):
        def loss(p):
            return jnp.sum(p["w"]), {"float": jnp.zeros(()), "int": jnp.asarray(1), "bool": jnp.bool_(1), "n": 2}

        spec = {"w": fz.rows(rows), "b": False}
        (_, expected), _ = jax.value_and_grad(loss, has_aux=True)(self.PARAMS)
        (_, aux), _ = fz.value_and_grad(loss, spec, has_aux=True)(self.PARAMS)
        trainable, rest = fz.partition(self.PARAMS, spec)
        for found in (aux, fz.restrict(loss, rest)(trainable)[1]):
            assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)
            assert jax.tree.map(type, found) == jax.tree.map(type, expected)
        constant = fz.value_and_grad(lambda p: jnp.float32(3), spec)(self.PARAMS)[0]
        assert isinstance(constant, jax.Array)

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


class TestPlanning:
    """How often programs are walked."""

    @staticmethod
    def walks(monkeypatch, loss, params):
        found = []
        run = Walk.run
        with monkeypatch.context() as patched:
            patched.setattr(Walk, "run", lambda *args: (found.append(1), run(*args))[1])
            grads = jit(fz.grad(loss, fz.rows(slice(4, None))))(params)
        np.testing.assert_allclose(grads.values, jax.grad(loss)(params)[:4], rtol=1e-4)
        return len(found)

    def test_branches_in_branches_with_comparisons(self, monkeypatch):
        def branches(depth, c):
            if not depth:
                return jnp.tanh(c)
            inner = lambda c: branches(depth - 1, c) * jnp.maximum(c, 1.0)  # noqa: E731
            return jax.lax.cond(jnp.sum(c) > 0, inner, jnp.sin, c)

        few, many = (self.walks(monkeypatch, lambda w, d=d: jnp.sum(branches(d, w)), W) for d in (3, 6))
        assert many <= 4 * few

    def test_a_stencil(self, monkeypatch):
        """Each step reads the neighbors of its rows, so that more rows are wanted of each step before."""

        def loss(w):
            step = lambda u, _: (u + jnp.tanh(jnp.roll(u, 1) - u), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(step, w, None, length=3)[0] ** 2)

        few, many = (self.walks(monkeypatch, loss, jnp.linspace(0, 1, size)) for size in (64, 128))
        assert few == many


class TestFlax:
    """Models as they are: nothing in them knows of rows."""

    def check(self, loss, params, frozen):
        both = jit(lambda params: (fz.grad(loss, frozen)(params), fz.partition(jax.grad(loss)(params), frozen)[0]))
        chex.assert_trees_all_close(*both(params), rtol=1e-5, atol=1e-5)
        rows = fz.explain(loss, params, frozen).rows
        assert rows
        assert all(row.merged is None and (row.by_rows or row.everything) for row in rows), "\n".join(map(str, rows))

    @pytest.mark.parametrize(("remat", "check"), [(False, True), (True, False)])
    def test_linen_scan_of_what_is_not_stacked(self, remat, check):
        """Flax first evaluates what does not depend on the step, to have it before the loop."""

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, tokens):
                embed = nn.Embed(6, 4)
                return nn.tanh(nn.Dense(4)(x)) + embed(tokens) + embed.attend(x).sum(), None

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                layer = nn.remat(Layer, prevent_cse=False) if remat else Layer
                options = {
                    "split_rngs": {"params": False},
                    "check_constancy_invariants": check or self.is_initializing(),
                }
                scan = nn.scan(layer, variable_broadcast="params", **options)
                return scan(name="layer")(x, jnp.arange(6).reshape(2, 3))[0]

        params = Model().init(jax.random.key(0), X[:3])
        frozen = fz.rules({"**/embedding": fz.rows([0, 1, 4]), "**/kernel": fz.rows([1])}, default=True)
        self.check(lambda params: jnp.sum(Model().apply(params, X[:3]) ** 2), params, frozen)
