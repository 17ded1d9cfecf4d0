"""The gradient of dynamic rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_equal_up_to_rounding, programs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze._program.regions import DynamicRows

LAYERS, WIDTH = 6, 4
X = jax.random.normal(jax.random.key(0), (8, WIDTH))


def init(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), 5)
    normal = lambda i, *shape: (jax.random.normal(keys[i], shape) / 2).astype(dtype)  # noqa: E731
    return {
        "embed": normal(0, WIDTH, WIDTH),
        "layers": {"kernel": normal(1, LAYERS, WIDTH, WIDTH), "bias": normal(2, LAYERS, WIDTH)},
        "scale": normal(3, WIDTH) + 1,
        "head": normal(4, WIDTH),
    }


def layer(x, params, scale=1.0):
    return jnp.tanh(x @ params["kernel"] + params["bias"]) * scale


def forward(params, x, **options):
    return jax.lax.scan(
        lambda x, p: (layer(x, p, params["scale"]), None), x @ params["embed"], params["layers"], **options
    )[0]


def of_scan(**options):
    return lambda params, x: jnp.mean((forward(params, x, **options) @ params["head"]) ** 2)


def with_remat(params, x):
    step = jax.checkpoint(layer)
    x, _ = jax.lax.scan(lambda x, p: (step(x, p, params["scale"]), None), x @ params["embed"], params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def with_outputs(params, x):
    def step(x, p):
        x = layer(x, p)
        return x, (x.mean(), jnp.argmax(x), x)

    x, (means, places, every) = jax.lax.scan(step, x @ params["embed"], params["layers"])
    return jnp.mean(x @ params["head"]) + jnp.sum(means**2) + jnp.mean(every[2:4]) + 0 * places.sum()


def with_other_carries(params, x):
    def step(carry, p):
        i, x, total, key = carry
        key, sub = jax.random.split(key)
        x = jnp.where(i % 2 == 0, layer(x, p), x + p["bias"]) + jax.random.normal(sub, x.shape) / 9
        return (i + 1, x, total + jnp.sum(x**2), key), i

    start = (jnp.int32(0), x @ params["embed"], jnp.zeros(()), jax.random.key(3))
    (_, x, total, _), numbers = jax.lax.scan(step, start, params["layers"])
    return jnp.mean(x @ params["head"]) + total * numbers.sum()


def with_data(params, x):
    def step(x, inputs):
        p, scale, number = inputs
        return layer(x, p) * scale + number, None

    inputs = (params["layers"], jnp.outer(jnp.arange(1.0, 1 + LAYERS), params["scale"]), jnp.arange(LAYERS))
    return jnp.mean(jax.lax.scan(step, x @ params["embed"], inputs)[0] @ params["head"])


def with_microbatches(params, x):
    def micro(total, x):
        return total + of_scan()(params, x), None

    return jax.lax.scan(micro, jnp.zeros(()), x.reshape(4, 2, WIDTH))[0]


def with_cond(params, x):
    return jax.lax.cond(x.sum() > 0, of_scan(), of_scan(reverse=True), params, x)


def with_gradient_of_inputs(params, x):
    return jnp.sum(jax.grad(of_scan(), argnums=1)(params, x) ** 2)


LOSSES = {
    "forward": of_scan(),
    "reverse": of_scan(reverse=True),
    "unroll": of_scan(unroll=4),
    "remat of all": jax.checkpoint(of_scan()),
    "remat": with_remat,
    "outputs": with_outputs,
    "other carries": with_other_carries,
    "data": with_data,
    "microbatches": with_microbatches,
    "cond": with_cond,
    "vmap over examples": lambda params, x: jnp.mean(jax.vmap(of_scan(), (None, 0))(params, x[:, None])),
}

ROWS_ALONE = {"embed": True, "scale": True, "head": True}
EVERYTHING_ELSE = {"embed": False, "scale": False, "head": False}


def trains(*numbers, axis=0):
    return ~fz.rows(jnp.array(numbers), axis)


def close(got, expected, rtol=1e-5, atol=1e-6):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), got, expected)


def values(tree):
    is_part = lambda x: isinstance(x, fz.Part)  # noqa: E731
    return jax.tree.map(lambda x: x.values if is_part(x) else x, tree, is_leaf=is_part)


def dense(loss, frozen, params, x=X):
    """The dense gradient, cut to the trainable rows."""
    return values(fz.partition(jax.jit(jax.grad(loss))(params, x), frozen)[0])


def rows_of(loss, frozen, params, x=X):
    return values(fz.grad(loss, frozen)(params, x))


def check(loss, frozen, params=None, run=jax.jit, rtol=1e-5, atol=1e-6, whole=None):
    """The gradient of the rows is the dense one, and no other operation of it than ``whole`` computes everything."""
    params = init() if params is None else params
    got = run(functools.partial(rows_of, loss, frozen))(params)
    close(got, dense(loss, frozen, params), rtol, atol)
    for row in fz.explain(loss, params, frozen, X).rows:
        assert (row.merged and row.merged.name) == whole


@pytest.mark.parametrize("others", [ROWS_ALONE, EVERYTHING_ELSE], ids=["rows alone", "everything else"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_that_of_the_rows(loss, others):
    params, traces, of = init(), [], LOSSES[loss]

    @jax.jit
    def grads(params, index):
        traces.append(1)
        return fz.value_and_grad(of, {**others, "layers": ~fz.rows(index)})(params, X)

    value, whole = jax.jit(jax.value_and_grad(of))(params, X)
    for index in ([4, 5], [3, 1], [0, 1], [-1, 0]):
        of_rows, got = grads(params, jnp.array(index))
        close(of_rows, value)
        frozen = {**others, "layers": trains(*(i % LAYERS for i in index))}
        close(values(got), values(fz.partition(whole, frozen)[0]))
    assert len(traces) == 1
    if loss != "vmap over examples":  # vmap is applied before the scan is traced, and moves no rows
        for row in fz.explain(of, params, frozen, X).rows:
            assert row.merged is None
            assert "scan" in {operation.name for operation in row.by_rows}
            assert (row.rows, row.trainable_rows) == (LAYERS, 2)


def of_kernels(fun):
    return lambda params, x: jnp.sum(fun(params["layers"]["kernel"], x) ** 2)


def cast_before(params, x):
    return of_scan()(jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), params), x)


def in_a_loop(w, x):
    return functools.reduce(lambda x, i: jnp.tanh(x @ w[i]), range(LAYERS), x)


CASES = {
    "the named rows are frozen": (of_scan(), fz.rows(jnp.array([5, 0, 2]))),
    "every row": (of_scan(), trains(3, 1, 0, 2, 5, 4)),
    "another axis of the scan": (of_scan(), {"bias": True, "kernel": trains(3, 1, axis=2)}),
    "a cast": (cast_before, trains(2, 4)),
    "other rows of a leaf": (of_scan(), {"kernel": trains(5, 2), "bias": trains(3)}),
    "static rows of a leaf": (of_scan(), {"kernel": trains(1, 3), "bias": ~fz.rows([0, 4])}),
    "all rows of a leaf": (of_scan(), {"kernel": trains(2, 3), "bias": False}),
    "matmul": (of_kernels(lambda w, x: w @ x.T), {"bias": True, "kernel": trains(3, 1)}),
    "loop": (of_kernels(in_a_loop), {"bias": True, "kernel": trains(3, 1)}),
    "gradient of the inputs": (with_gradient_of_inputs, trains(1, 2)),  # as a gradient penalty
}


@pytest.mark.parametrize("name", CASES)
def test_of_one_program(name):
    loss, layers = CASES[name]
    check(loss, {**ROWS_ALONE, "layers": layers}, rtol=1e-4, whole="pad" if name == "loop" else None)


@pytest.mark.parametrize("run", [jax.jit, lambda fun: fun], ids=["jitted", "eager"])
def test_restrict_reads_the_rows_that_it_is_given(run):
    """Whatever the rest has at these rows."""
    params, frozen = init(), {**ROWS_ALONE, "layers": trains(4, 1)}
    trainable, rest = fz.partition(params, frozen)
    moved = jax.tree.map(lambda x: x * 1.5, trainable)
    stale = jax.tree.map(lambda x: x.at[jnp.array([1, 4])].set(jnp.nan) if x.shape[0] == LAYERS else x, rest)
    value, got = run(jax.value_and_grad(fz.restrict(of_scan(), stale)))(moved, X)
    whole = fz.combine(moved, rest)
    close(value, of_scan()(whole, X))
    close(values(got), dense(of_scan(), frozen, whole))


@pytest.mark.parametrize("in_parts", [False, True], ids=["value_and_grad", "restrict"])
def test_leaves_with_one_mask_have_one_region(in_parts):
    """What both need is computed once, for these rows."""
    tree = {name: jnp.ones((6, 64)) for name in "ab"} | {"m": jnp.ones((64, 64))}
    loss = lambda p: jnp.sum(jnp.tanh((p["a"] + p["b"]) @ p["m"]) ** 2)  # noqa: E731

    def grads(p, index, names):
        mask = fz.resolve(tree, {"a": ~fz.rows(index), "b": True, "m": True})["a"]
        frozen = {name: mask if name in names else True for name in tree}
        if not in_parts:
            return fz.grad(loss, frozen)(p)
        trainable, rest = fz.partition(p, frozen)
        return jax.grad(fz.restrict(loss, rest))(trainable)

    def cost(names):
        lowered = jax.jit(functools.partial(grads, names=names)).lower(tree, jnp.array([0, 2, 5]))
        return lowered.compile().cost_analysis()["flops"]

    assert cost("ab") <= 1.02 * cost("a")


def test_examples_may_have_rows_of_their_own():
    indices, xs = jnp.array([[0, 1], [4, 2]]), jnp.stack([X, X + 1])
    for loss in (of_scan(), of_kernels(lambda w, x: w @ x.T)):
        grads = lambda index, x, loss=loss: rows_of(loss, {**ROWS_ALONE, "layers": ~fz.rows(index)}, init(), x)  # noqa: E731
        got = jax.vmap(grads)(indices, xs)
        for i, index in enumerate(indices.tolist()):
            expected = dense(loss, {**ROWS_ALONE, "layers": trains(*index)}, init(), xs[i])
            close(jax.tree.map(lambda g, i=i: g[i], got), expected)


@jax.custom_vjp
def normed(w):
    """The identity, whose cotangents are divided by their norms."""
    return w


normed.defvjp(lambda w: (w, w), lambda w, ct: (w * ct / jnp.sqrt(jnp.sum(ct**2, 1, keepdims=True)),))
READ = jnp.array([0, 1, 1, 2, 3, 6])

OF_PIECES = {  # of a number, which is differentiated after the rows of the table
    "concatenate": lambda v, w: jnp.sum(jnp.concatenate([v * jnp.log(w), v / w, jnp.sqrt(w * v)])),
    "pad": lambda v, w: jnp.sum(v * jnp.log(w[:2])) + jnp.sum(v / w[2:]) + jnp.sum((v * w[3:]) ** 1.5),
    "update": lambda v, w: jnp.sum(v / jax.lax.dynamic_update_slice(w, 1 / w[1:2], (2, 0))),
    "iota": lambda v, w: jnp.sum(v * jnp.concatenate([w, w / (1 + jnp.arange(4.0))[:, None]])),
    "repeat": lambda v, w: jnp.sum(v / jnp.repeat(w, 3, 0)[:5]) + jnp.sum(v / jnp.tile(w, (3, 1))[1:5]),
    "scatter": lambda v, w: jnp.sum(v * jnp.log(jnp.concatenate([normed(w), 2 * w])[READ])),
}


class TestSecondDerivatives:
    FROZEN = {**ROWS_ALONE, "layers": trains(1, 2)}  # noqa: RUF012

    def of_scale(self, fun):
        """A function of one number, by which the trainable rows are multiplied."""
        trainable, rest = fz.partition(init(), self.FROZEN)
        scaled = lambda w: jax.tree.map(lambda x: x * w if jnp.issubdtype(x.dtype, jnp.floating) else x, trainable)  # noqa: E731
        return lambda w: fun(scaled(w), rest)

    def test_of_the_gradient(self):
        """Forward over reverse as of the dense gradient; JAX refuses reverse over a loop that ends early."""
        rows, whole = (functools.partial(f, of_scan(), self.FROZEN, init()) for f in (rows_of, dense))
        assert jax.tree.structure(jax.eval_shape(rows, X)) == jax.tree.structure(whole(X))
        for derivative in (jax.jacfwd, lambda f: lambda x: (jax.jvp(f, (x,), (x,)), jax.linearize(f, x)[1](x))):
            close(jax.jit(derivative(rows))(X), jax.jit(derivative(whole))(X), rtol=1e-4, atol=1e-5)
        of_combine = self.of_scale(lambda trainable, rest: of_scan()(fz.combine(trainable, rest), X))
        of_restrict = self.of_scale(lambda trainable, rest: fz.restrict(of_scan(), rest)(trainable, X))
        close(*(jax.jit(jax.hessian(f))(jnp.ones(())) for f in (of_restrict, of_combine)), rtol=1e-4)
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.jacrev(rows)(X)

    def test_the_gradient_of_frozen_rows(self):
        """With respect to the rest, of which the rows that train are no part."""
        trainable, rest = fz.partition(init(), self.FROZEN)
        of_rest = lambda call: jax.grad(lambda rest: call(trainable, rest), allow_int=True)(rest)  # noqa: E731
        got = of_rest(lambda t, rest: fz.restrict(of_scan(), rest)(t, X))
        dense = of_rest(lambda t, rest: of_scan()(fz.combine(t, rest), X))
        close(got["layers"]["kernel"].array, dense["layers"]["kernel"].array)

    @pytest.mark.parametrize("numbers", [[1, 3], [2, 3], [0, 7]], ids=str)
    def test_of_what_is_selected(self, numbers):
        """What is read for rows of another piece is not used, and has no derivative that is NaN."""
        w, index = jnp.sin(jnp.arange(8.0)).reshape(4, 2) + 2, jnp.array(numbers)

        def sums(derivative):
            def total(loss, v):
                return jnp.sum(jnp.sin(derivative(functools.partial(OF_PIECES[loss], v))))

            return [f(functools.partial(total, loss)) for loss in OF_PIECES for f in (jax.grad, jax.hessian)]

        @jax.jit
        def ours(v, index):
            of_rows = lambda loss: fz.grad(loss, ~fz.rows(index))(w).values  # noqa: E731
            return [f(v) for f in sums(of_rows)]

        inside = index[index < len(w)]
        expected = jax.jit(lambda v: [f(v) for f in sums(lambda loss: jax.grad(loss)(w)[inside])])(1.0)
        close(ours(1.0, index), expected, rtol=1e-4)

    def test_rows_that_may_be_equal_are_not_called_unique(self):
        clamped = DynamicRows(0, jnp.array([3, 7])).clamped(4)
        for rows, is_unique in [(clamped, False), (DynamicRows(0, jnp.array([1, 3])), True)]:
            [gather] = [
                e
                for p in programs(jax.make_jaxpr(rows.take)(jnp.ones((4, 2))).jaxpr)
                for e in p.eqns
                if e.primitive.name == "gather"
            ]
            assert gather.params["unique_indices"] is is_unique


def pcast(tree):
    """The arrays of a tree as values that vary over the devices."""
    if hasattr(jax.lax, "pcast"):
        return jax.tree.map(lambda x: jax.lax.pcast(x, ("data",), to="varying"), tree)
    return jax.tree.map(lambda x: jax.lax.pvary(x, ("data",)), tree)


@pytest.mark.parametrize("own", ["everything", "everything, not checked", "numbers", "rows"])
def test_devices_may_have_rows_of_their_own(own):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    index, is_checked = jnp.array([[0, 1], [5, 2], [4, 3], [1, 5]]), own != "everything, not checked"
    index = index[:1] if own == "rows" else index

    def grads(params, index, x):
        params = pcast(params) if own == "everything" else params
        trainable, rest = fz.partition(params, {**ROWS_ALONE, "layers": ~fz.rows(index[0])})
        trainable = pcast(trainable) if own == "rows" else trainable
        whole = jax.grad(fz.restrict(of_scan(), rest))(trainable, x)
        return jax.tree.map(lambda g: g[None], values(whole))

    specs = P(), P() if own == "rows" else P("data"), P("data")
    got = jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=is_checked))(
        init(), index, X
    )
    for i in range(4):
        frozen = {**ROWS_ALONE, "layers": trains(*index[i % len(index)].tolist())}
        close(jax.tree.map(lambda g, i=i: g[i], got), dense(of_scan(), frozen, init(), X[2 * i : 2 * i + 2]))


def test_a_collective_in_the_layers():
    """A step that others wait for is not skipped, where examples have rows of their own."""

    def loss(params, x):
        def step(x, p):
            y = layer(x, p)
            return y - 0.3 * jax.lax.pmean(y, "examples"), None

        return jnp.mean(jax.lax.scan(step, x, params["layers"])[0] ** 2)

    def both(index, x):
        frozen = {**ROWS_ALONE, "layers": ~fz.rows(index)}
        return rows_of(loss, frozen, init(), x), dense(loss, frozen, init(), x)

    close(*jax.vmap(both, axis_name="examples")(jnp.array([[4, 5], [0, 1]]), X.reshape(2, 4, WIDTH)))


def test_eager_on_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        params = {"layers": jax.device_put(init()["layers"]["kernel"], NamedSharding(mesh, P(None, "data")))}
        got = fz.grad(lambda params: jnp.sum(jnp.tanh(params["layers"]) ** 2), {"layers": ~fz.rows(jnp.array([2, 5]))})(
            params
        )
        assert got["layers"].values.shape == (2, WIDTH, WIDTH)


class TestCost:
    def test_no_array_of_the_gradient_has_every_row(self):
        """The gradient of a stack, and what sums it up, would have the shape of the stack."""
        grads = lambda params, index: rows_of(of_scan(), {**ROWS_ALONE, "layers": ~fz.rows(index)}, params)  # noqa: E731
        jaxprs = programs(jax.make_jaxpr(grads)(init(), jnp.array([1, 2])).jaxpr)
        made = {v.aval.shape for jaxpr in jaxprs for eqn in jaxpr.eqns for v in eqn.outvars}
        assert (LAYERS, WIDTH, WIDTH) not in made

    def test_no_row_of_the_parameters_is_stored(self):
        """Neither as it is nor cast: the backward pass reads it again."""
        params, x = {"layers": jnp.ones((16, 64, 64), jnp.bfloat16)}, jnp.ones((2, 64))

        def loss(params, x):
            step = lambda x, p: (jnp.tanh(x @ p.astype(jnp.float32)), None)  # noqa: E731
            return jnp.mean(jax.lax.scan(step, x, params["layers"])[0])

        grads = lambda params, index, x: fz.grad(loss, {"layers": ~fz.rows(index)})(params, x)  # noqa: E731
        temporary = lambda f, *args: jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes  # noqa: E731
        forward = temporary(loss, params, x)  # with a cast stack, on a CPU
        assert temporary(grads, params, jnp.array([3]), x) - forward < 0.5 * 4 * params["layers"].size

    @pytest.mark.parametrize("reverse", [False, True])
    def test_steps_without_anything_that_trains_are_skipped(self, reverse):
        """Counted by calls to the host in the derivative, of which those that nothing needs are not made."""
        counts = {"kernel": 0, "x": 0}

        def counted(name):
            def count(x):
                counts[name] += 1
                return x

            def backward(_, ct):
                return (jax.pure_callback(count, ct, ct),)

            identity = jax.custom_vjp(lambda x: x)
            identity.defvjp(lambda x: (x, None), backward)
            return identity

        def loss(params, x):
            def step(x, p):
                return jnp.tanh(counted("x")(x) @ counted("kernel")(p["kernel"]) + p["bias"]), None

            return jnp.mean(jax.lax.scan(step, x @ params["embed"], params["layers"], reverse=reverse)[0])

        grads = jax.jit(lambda p, index: rows_of(loss, {**ROWS_ALONE, "layers": ~fz.rows(index)}, p))
        for index in ([4, 5], [3, 1], [0, 1], [0, 5]):
            counts.update(kernel=0, x=0)
            jax.block_until_ready(grads(init(), jnp.array(index)))
            last = max(index) + 1 if reverse else LAYERS - min(index)
            assert counts["kernel"] == 2
            assert last - 1 <= counts["x"] <= last


def test_a_tree_of_halves_is_not_computed_for_each_row():
    """JAX differentiates a product by halving the rows again and again: each half has other row numbers."""

    def loss(w):
        return jnp.prod(1 + 0.1 * jnp.tanh(w), axis=0).sum()

    def gradient(rows, w):
        trainable, rest = fz.partition(w, ~fz.rows(rows))
        return jax.grad(fz.restrict(loss, rest))(trainable).values

    w, rows = jnp.cos(jnp.arange(256.0)).reshape(64, 4), jnp.array([5, 40])
    assert len(jax.make_jaxpr(gradient)(rows, w).eqns) < 1000  # and not tens of thousands
    assert_equal_up_to_rounding(jax.jit(gradient)(rows, w), jax.grad(loss)(w)[rows], roundings=64)
