"""The gradient of rows that are a value of the running program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz

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


def with_remat(policy=None, prevent_cse=True):
    def loss(params, x):
        step = jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)
        x, _ = jax.lax.scan(lambda x, p: (step(x, p, params["scale"]), None), x @ params["embed"], params["layers"])
        return jnp.mean((x @ params["head"]) ** 2)

    return loss


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


def with_while(params, x):
    x = jax.lax.fori_loop(0, 2, lambda _, x: x + forward(jax.lax.stop_gradient(params), x), x)
    return of_scan()(params, x)


def with_gradient_of_inputs(params, x):
    return jnp.sum(jax.grad(of_scan(), argnums=1)(params, x) ** 2)


LOSSES = {
    "forward": of_scan(),
    "reverse": of_scan(reverse=True),
    "unroll": of_scan(unroll=4),
    "unrolled": of_scan(unroll=True),
    "jit": jax.jit(of_scan()),
    "remat of all": jax.checkpoint(of_scan()),
    "remat": with_remat(),
    "remat without barriers": with_remat(prevent_cse=False),
    "remat that saves products": with_remat(jax.checkpoint_policies.dots_saveable),
    "outputs": with_outputs,
    "other carries": with_other_carries,
    "data": with_data,
    "microbatches": with_microbatches,
    "cond": with_cond,
    "while": with_while,
    "vmap over examples": lambda params, x: jnp.mean(jax.vmap(of_scan(), (None, 0))(params, x[:, None])),
}

TRAINED = {
    "rows alone": {"embed": True, "scale": True, "head": True},
    "head too": {"embed": True, "scale": True, "head": False},
    "what every step reads too": {"embed": True, "scale": False, "head": False},
    "everything else": {"embed": False, "scale": False, "head": False},
}


def rows_of(array, index, axis=0):
    return jnp.take(array, jnp.asarray(sorted(index)), axis)


def close(got, expected, rtol=1e-5, atol=1e-6):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), got, expected)


def values(tree):
    return jax.tree.map(
        lambda x: x.values if isinstance(x, fz.Part) else x, tree, is_leaf=lambda x: isinstance(x, fz.Part)
    )


def expected_of(loss, params, frozen, index, *args):
    """The dense gradient, cut to what trains."""
    dense = jax.grad(loss)(params, *args)
    layers = jax.tree.map(lambda g: rows_of(g, index), dense["layers"])
    return {**{k: optax.MaskedNode() if frozen[k] else dense[k] for k in frozen}, "layers": layers}


@pytest.mark.parametrize(
    ("loss", "trained"),
    [
        *((loss, trained) for loss in LOSSES for trained in ("rows alone", "everything else")),
        *(("forward", trained) for trained in ("head too", "what every step reads too")),
    ],
)
def test_the_gradient_is_that_of_the_rows(loss, trained):
    params, traces, loss, trained = init(), [], LOSSES[loss], TRAINED[trained]

    @jax.jit
    def grads(params, index, x):
        traces.append(1)
        return fz.value_and_grad(loss, {**trained, "layers": ~fz.rows(index)})(params, x)

    for index in ([4, 5], [3, 1], [0, 1], [-1, 0]):
        value, got = grads(params, jnp.array(index), X)
        close(value, loss(params, X))
        close(values(got), expected_of(loss, params, trained, [i % LAYERS for i in index], X))
    assert len(traces) == 1


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_no_operation_merges_the_rows(loss):
    if loss is LOSSES["vmap over examples"]:
        pytest.skip("vmap is applied before the scan is traced, and moves no rows")
    frozen = {"embed": True, "layers": ~fz.rows(jnp.array([1, 2])), "scale": False, "head": False}
    for row in fz.explain(loss, init(), frozen, X).rows:
        assert row.merged is None
        assert "scan" in {operation.name for operation in row.by_rows}
        assert (row.rows, row.trainable_rows) == (LAYERS, 2)


def test_leaves_may_have_other_rows_and_static_ones():
    params = init()
    frozen = {"embed": True, "scale": True, "head": True, "layers": {"bias": ~fz.rows([0, 4]), "kernel": True}}
    for kernel, bias in [([1, 3], ~fz.rows([0, 4])), ([5, 2], ~fz.rows(jnp.array([3]))), ([2, 3], False), ([2], True)]:
        frozen["layers"] = {"kernel": ~fz.rows(jnp.array(kernel)), "bias": bias}
        got, dense = fz.grad(of_scan(), frozen)(params, X), jax.grad(of_scan())(params, X)
        close(got["layers"]["kernel"].values, rows_of(dense["layers"]["kernel"], kernel))
        if bias is not True:
            expected = fz.partition(dense["layers"], {"kernel": True, "bias": bias})[0]["bias"]
            close(values(got["layers"]["bias"]), values(expected))


def test_the_rows_that_are_named_may_be_the_frozen_ones():
    params, frozen = init(), {"embed": True, "scale": True, "head": True, "layers": fz.rows(jnp.array([5, 0, 2]))}
    close(values(fz.grad(of_scan(), frozen)(params, X)), expected_of(of_scan(), params, {**frozen}, [1, 3, 4], X))


@pytest.mark.parametrize("jit", [False, True])
def test_restrict_reads_the_rows_that_it_is_given(jit):
    params = init()
    trainable, rest = fz.partition(
        params, {"embed": True, "scale": True, "head": True, "layers": ~fz.rows(jnp.array([4, 1]))}
    )
    moved = jax.tree.map(lambda x: x * 1.5, trainable)
    value_and_grad = jax.value_and_grad(fz.restrict(of_scan(), rest))
    value, got = (jax.jit(value_and_grad) if jit else value_and_grad)(moved, X)
    whole = fz.combine(moved, rest)
    close(value, of_scan()(whole, X))
    frozen = {"embed": True, "scale": True, "head": True}
    close(values(got), expected_of(of_scan(), whole, frozen, [1, 4], X))


def test_stale_rows_may_be_nan():
    params = init()
    trainable, rest = fz.partition(
        params, {"embed": True, "scale": True, "head": True, "layers": ~fz.rows(jnp.array([2, 3]))}
    )
    stale = jax.tree.map(lambda x: x.at[2:4].set(jnp.nan) if x.shape[0] == LAYERS else x, rest)
    close(jax.grad(fz.restrict(of_scan(), stale))(trainable, X), jax.grad(fz.restrict(of_scan(), rest))(trainable, X))


@pytest.mark.parametrize("cast", [jnp.bfloat16, jnp.float32])
def test_parameters_that_are_cast_before_the_scan(cast):
    def loss(params, x):
        return of_scan()(jax.tree.map(lambda p: p.astype(cast), params), x)

    params, frozen = init(), {"embed": True, "scale": True, "head": False, "layers": ~fz.rows(jnp.array([2, 4]))}
    got, dense = fz.grad(loss, frozen)(params, X), jax.grad(loss)(params, X)
    tolerance = 2e-2 if cast is jnp.bfloat16 else 1e-5
    close(got["layers"]["kernel"].values, rows_of(dense["layers"]["kernel"], [2, 4]), rtol=tolerance, atol=tolerance)
    assert got["layers"]["kernel"].dtype == jnp.float32
    assert all(row.merged is None for row in fz.explain(loss, params, frozen, X).rows)


@pytest.mark.parametrize("name", ["lookup", "matmul", "loop over layers", "einsum", "other axis"])
def test_other_operations_compute_the_rows(name):
    def loss(params, x):
        kernel = params["layers"]["kernel"]
        if name == "lookup":
            return jnp.sum(kernel[jnp.array([1, 2, 1])] ** 2)
        if name == "matmul":
            return jnp.sum((kernel @ x.T) ** 2)
        if name == "einsum":
            return jnp.sum(jnp.einsum("lij,bj->bli", kernel, x) ** 2)
        for i in range(LAYERS):
            x = jnp.tanh(x @ kernel[i])
        return jnp.mean(x**2)

    params, axis = init(), 1 if name == "other axis" else 0
    frozen = {
        "embed": True,
        "scale": True,
        "head": True,
        "layers": {"bias": True, "kernel": ~fz.rows(jnp.array([3, 1]), axis)},
    }
    got = fz.grad(loss, frozen)(params, X)["layers"]["kernel"].values
    close(got, rows_of(jax.grad(loss)(params, X)["layers"]["kernel"], [1, 3], axis))
    [row] = fz.explain(loss, params, frozen, X).rows
    assert row.merged is None


def test_rows_along_another_axis_of_the_scan():
    params = init()
    frozen = {
        "embed": True,
        "scale": True,
        "head": True,
        "layers": {"bias": True, "kernel": ~fz.rows(jnp.array([3, 1]), axis=2)},
    }
    got = fz.grad(of_scan(), frozen)(params, X)["layers"]["kernel"].values
    close(got, rows_of(jax.grad(of_scan())(params, X)["layers"]["kernel"], [1, 3], 2))


def test_layers_stacked_along_another_axis():
    """As in MaxText: the scan is over the array with its axes in another order."""

    def loss(params, x):
        layers = jax.tree.map(lambda p: jnp.moveaxis(p, 1, 0), params["layers"])
        return of_scan()({**params, "layers": layers}, x)

    params = init()
    params["layers"] = jax.tree.map(lambda p: jnp.moveaxis(p, 0, 1), params["layers"])
    frozen = {"embed": True, "scale": True, "head": True, "layers": ~fz.rows(jnp.array([5, 2]), axis=1)}
    got, dense = fz.grad(loss, frozen)(params, X), jax.grad(loss)(params, X)
    close(values(got["layers"]), jax.tree.map(lambda g: rows_of(g, [2, 5], 1), dense["layers"]))
    for row in fz.explain(loss, params, frozen, X).rows:
        assert row.merged is None


def test_every_row_may_train():
    params = init()
    frozen = {"embed": True, "scale": True, "head": True, "layers": ~fz.rows(jnp.array([3, 1, 0, 2, 5, 4]))}
    got = fz.grad(of_scan(), frozen)(params, X)
    close(values(got), expected_of(of_scan(), params, {**frozen}, range(LAYERS), X))


def test_examples_may_have_rows_of_their_own():
    params = init()

    def grads(index, x):
        return fz.grad(of_scan(), {"embed": True, "scale": True, "head": True, "layers": ~fz.rows(index)})(params, x)

    indices = jnp.array([[0, 1], [4, 2]])
    got = jax.vmap(grads)(indices, jnp.stack([X, X + 1]))
    for i, index in enumerate(indices.tolist()):
        one = jax.tree.map(lambda g, i=i: g[i], got)
        frozen = {"embed": True, "scale": True, "head": True}
        close(values(one), expected_of(of_scan(), params, frozen, index, X + i))

    def merged(index, x):
        loss = lambda params, x: jnp.sum((params["layers"]["kernel"] @ x) ** 2)  # noqa: E731
        frozen = {"embed": True, "scale": True, "head": True, "layers": {"bias": True, "kernel": ~fz.rows(index)}}
        return fz.grad(loss, frozen)(params, x)["layers"]["kernel"].values

    got = jax.vmap(merged)(indices, X[:2])
    for i in range(2):
        close(got[i], merged(indices[i], X[i]))


class TestSecondDerivatives:
    FROZEN = {"embed": True, "scale": True, "head": True, "layers": ~fz.rows(jnp.array([1, 2]))}  # noqa: RUF012

    def of_scale(self, fun):
        """A function of one number, by which the trainable rows are multiplied."""
        trainable, rest = fz.partition(init(), self.FROZEN)
        scaled = lambda w: jax.tree.map(lambda x: x * w if jnp.issubdtype(x.dtype, jnp.floating) else x, trainable)  # noqa: E731
        return lambda w: fun(scaled(w), rest)

    def test_of_the_gradient(self, compiled):
        """Forward over reverse as of the dense gradient; JAX refuses reverse over a loop that ends early."""
        dense = lambda x: values(fz.partition(jax.grad(of_scan())(init(), x), self.FROZEN)[0])  # noqa: E731
        rows = lambda x: values(fz.grad(of_scan(), self.FROZEN)(init(), x))  # noqa: E731
        assert jax.tree.structure(rows(X)) == jax.tree.structure(dense(X))
        for derivative in (
            jax.jacfwd,
            lambda fun: lambda x: jax.jvp(fun, (x,), (x,)),
            lambda f: lambda x: jax.linearize(f, x)[1](x),
        ):
            close(compiled(derivative(rows))(X), derivative(dense)(X), rtol=1e-4, atol=1e-5)
        of_combine = self.of_scale(lambda trainable, rest: of_scan()(fz.combine(trainable, rest), X))
        of_restrict = self.of_scale(lambda trainable, rest: fz.restrict(of_scan(), rest)(trainable, X))
        close(compiled(jax.hessian(of_restrict))(jnp.ones(())), jax.hessian(of_combine)(jnp.ones(())), rtol=1e-4)
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.jacrev(rows)(X)

    def test_the_hessian_of_combine(self):
        of_combine = self.of_scale(lambda trainable, rest: of_scan()(fz.combine(trainable, rest), X))
        slope, step = jax.grad(of_combine), 1e-2
        expected = (slope(1 + step) - slope(1 - step)) / (2 * step)
        close(jax.hessian(of_combine)(jnp.ones(())), expected, rtol=1e-2)

    def test_the_gradient_of_frozen_rows(self):
        """With respect to the rest, of which the rows that train are no part."""
        trainable, rest = fz.partition(init(), self.FROZEN)
        of_rest = lambda call: jax.grad(lambda rest: call(trainable, rest), allow_int=True)(rest)  # noqa: E731
        got = of_rest(lambda t, rest: fz.restrict(of_scan(), rest)(t, X))
        dense = of_rest(lambda t, rest: of_scan()(fz.combine(t, rest), X))
        close(got["layers"]["kernel"].array, dense["layers"]["kernel"].array)

    def test_a_gradient_inside_of_the_loss_is_differentiated(self):
        """With respect to the inputs, as a gradient penalty: its scans are those of a first derivative."""
        params = init()
        got = fz.grad(with_gradient_of_inputs, self.FROZEN)(params, X)
        frozen = {"embed": True, "scale": True, "head": True}
        close(values(got), expected_of(with_gradient_of_inputs, params, frozen, [1, 2], X), rtol=1e-4)

    def test_other_operations_have_them(self):
        params = init()
        loss = lambda params: jnp.sum(params["layers"]["kernel"] ** 4)  # noqa: E731
        trainable, rest = fz.partition(
            params,
            {"embed": True, "scale": True, "head": True, "layers": {"bias": True, "kernel": ~fz.rows(jnp.array([2]))}},
        )
        hessian = jax.hessian(
            lambda v: fz.restrict(loss, rest)({**trainable, "layers": {**trainable["layers"], "kernel": v}})
        )
        found = jax.tree.leaves(hessian(trainable["layers"]["kernel"]))[0]
        close(jnp.einsum("aijaij->aij", found), 12 * params["layers"]["kernel"][2:3] ** 2)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_on_a_mesh(explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    specs = {
        "embed": P(None, "model"),
        "layers": {"kernel": P(None, None, "model"), "bias": P(None, None)},
        "scale": P(),
        "head": P(),
    }
    params = init()
    placed = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))

    def loss(params, x):
        def step(x, p):
            kernel, bias = p["kernel"], p["bias"]
            if explicit:
                kernel = jax.sharding.reshard(kernel, P(None, None))
            return jnp.tanh(x @ kernel + bias) * params["scale"], None

        embed = jax.sharding.reshard(params["embed"], P(None, None)) if explicit else params["embed"]
        x, _ = jax.lax.scan(step, x @ embed, params["layers"])
        return jnp.mean((x @ params["head"]) ** 2)

    frozen = {"embed": True, "scale": False, "head": False}

    @jax.jit
    def grads(params, index, x):
        return fz.grad(loss, {**frozen, "layers": ~fz.rows(index)})(params, x)

    with jax.set_mesh(mesh):
        for index in ([5, 2], [0, 1]):
            got = grads(placed, jnp.array(index), x)
            expected = expected_of(of_scan(), params, frozen, index, X)
            close(jax.device_get(values(got)), jax.device_get(expected))


def test_inside_of_shard_map():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, frozen = init(), {"embed": True, "scale": False, "head": False}

    def grads(params, index, x):
        return fz.grad(
            lambda params, x: jax.lax.pmean(of_scan()(params, x), "data"), {**frozen, "layers": ~fz.rows(index)}
        )(params, x)

    sharded = jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P()))
    for index in ([5, 2], [0, 1]):
        close(values(sharded(params, jnp.array(index), X)), expected_of(of_scan(), params, frozen, index, X))


def pcast(tree):
    """The arrays of a tree as values that vary over the devices."""
    if hasattr(jax.lax, "pcast"):
        return jax.tree.map(lambda x: jax.lax.pcast(x, ("data",), to="varying"), tree)
    return jax.tree.map(lambda x: jax.lax.pvary(x, ("data",)), tree)


@pytest.mark.parametrize("check_vma", [False, True])
def test_devices_may_have_rows_of_their_own(check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    params, frozen = init(), {"embed": True, "scale": True, "head": True}
    index = jnp.array([[0, 1], [5, 2], [4, 3], [1, 5]])

    def grads(params, index, x):
        params = pcast(params) if check_vma else params
        got = fz.grad(of_scan(), {**frozen, "layers": ~fz.rows(index[0])})(params, x)
        return jax.tree.map(lambda g: g[None], got)

    options = {"mesh": mesh, "in_specs": (P(), P("data"), P("data")), "out_specs": P("data"), "check_vma": check_vma}
    got = jax.jit(jax.shard_map(grads, **options))(params, index, X)
    for i, rows in enumerate(index.tolist()):
        one = jax.tree.map(lambda g, i=i: g[i], got)
        close(values(one), expected_of(of_scan(), params, frozen, rows, X[2 * i : 2 * i + 2]))


@pytest.mark.parametrize("own", ["numbers", "rows"])
def test_devices_with_rows_of_their_own_and_common_parameters(own):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    frozen = {"embed": True, "scale": True, "head": True}

    def grads(params, index, x):
        trainable, rest = fz.partition(params, {**frozen, "layers": ~fz.rows(index)})
        trainable = pcast(trainable) if own == "rows" else trainable
        return jax.grad(fz.restrict(of_scan(), rest))(trainable, x)["layers"]["bias"].values[None]

    specs = (P(), P("data") if own == "numbers" else P(), P("data"))
    sharded = jax.shard_map(grads, mesh=mesh, in_specs=specs, out_specs=P("data"))
    index = jnp.arange(8) % LAYERS if own == "numbers" else jnp.array([5])
    got = sharded(init(), index, X)
    for i in range(8):
        rows = [int(index[i % len(index)])]
        expected = expected_of(of_scan(), init(), frozen, rows, X[i : i + 1])["layers"]["bias"]
        close(got[i], expected)


def test_a_collective_in_the_layers():
    """A step that others wait for is not skipped, where examples have rows of their own."""

    def loss(params, x):
        def step(x, p):
            y = layer(x, p)
            return y - 0.3 * jax.lax.pmean(y, "examples"), None

        return jnp.mean(jax.lax.scan(step, x, params["layers"])[0] ** 2)

    def grads(index, x):
        return fz.grad(loss, {"embed": True, "scale": True, "head": True, "layers": ~fz.rows(index)})(init(), x)

    indices, x = jnp.array([[5, 4], [1, 0]]), X.reshape(2, 4, WIDTH)
    got = jax.vmap(grads, axis_name="examples")(indices, x)["layers"]["bias"].values
    dense = jax.vmap(lambda x: jax.grad(loss)(init(), x), axis_name="examples")(x)["layers"]["bias"]
    for i, index in enumerate(indices.tolist()):
        close(got[i], rows_of(dense[i], index))


def test_eager_on_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        params = {"layers": jax.device_put(init()["layers"]["kernel"], NamedSharding(mesh, P(None, "data")))}
        got = fz.grad(lambda params: jnp.sum(jnp.tanh(params["layers"]) ** 2), {"layers": ~fz.rows(jnp.array([2, 5]))})(
            params
        )
        assert got["layers"].values.shape == (2, WIDTH, WIDTH)


def test_nn_scan():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(WIDTH)(x)), None

    class Model(nn.Module):
        remat: bool = False

        @nn.compact
        def __call__(self, x):
            layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
            stack = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            return nn.Dense(1)(stack(name="layers")(x, None)[0])

    for remat in (False, True):
        model = Model(remat)
        params = model.init(jax.random.key(0), X)["params"]
        loss = lambda params, x, model=model: jnp.mean(model.apply({"params": params}, x) ** 2)  # noqa: E731
        frozen = {"layers": ~fz.rows(jnp.array([4, 1])), "Dense_0": False}
        got, dense = jax.jit(fz.grad(loss, frozen))(params, X), jax.grad(loss)(params, X)
        close(values(got["layers"]), jax.tree.map(lambda g: rows_of(g, [1, 4]), dense["layers"]))
        close(got["Dense_0"], dense["Dense_0"])
        assert all(row.merged is None for row in fz.explain(loss, params, frozen, X).rows)


def test_nnx_scan():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.linear(x))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = (
                nnx.vmap(Layer)(nnx.Rngs(rngs.params()).fork(split=LAYERS))
                if False
                else nnx.vmap(lambda key: Layer(nnx.Rngs(key)))(jax.random.split(rngs.params(), LAYERS))
            )
            self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x, layer):
                return layer(x)

            return self.head(run(x, self.layers))

    graph, params = nnx.split(Model(nnx.Rngs(0)))
    loss = lambda params, x: jnp.mean(nnx.merge(graph, params)(x) ** 2)  # noqa: E731
    frozen = fz.rules({"layers/**": ~fz.rows(jnp.array([4, 1]))}, default=False)
    got, dense = jax.jit(fz.grad(loss, frozen))(params, X), jax.grad(loss)(params, X)
    close(
        [g.values for g in jax.tree.leaves(got, is_leaf=lambda g: isinstance(g, fz.Part)) if isinstance(g, fz.Part)],
        [rows_of(g, [1, 4]) for g in jax.tree.leaves(dense["layers"])],
    )
    assert all(row.merged is None for row in fz.explain(loss, params, frozen, X).rows)


class TestCost:
    def compiled(self, grads, *args):
        return jax.jit(grads).lower(*args).compile()

    def test_no_array_of_the_gradient_has_every_row(self):
        """The gradient of a stack, and what sums it up, would have the shape of the stack."""
        params = init()
        frozen = lambda index: {"embed": True, "scale": True, "head": True, "layers": ~fz.rows(index)}  # noqa: E731
        grads = lambda params, index, x: fz.grad(of_scan(), frozen(index))(params, x)  # noqa: E731
        program = jax.make_jaxpr(grads)(params, jnp.array([1, 2]), X)
        stacks = {(LAYERS, WIDTH, WIDTH)}

        def shapes(jaxpr):
            for eqn in jaxpr.eqns:
                yield from (v.aval.shape for v in eqn.outvars)
                for value in eqn.params.values():
                    for inner in value if isinstance(value, (tuple, list)) else [value]:
                        inner = getattr(inner, "jaxpr", inner)
                        if hasattr(inner, "eqns"):
                            yield from shapes(inner)

        assert stacks.isdisjoint(shapes(program.jaxpr))

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_no_row_of_the_parameters_is_stored(self, dtype):
        """Neither as it is nor cast: the backward pass reads it again."""
        stack, x = jnp.ones((16, 64, 64), dtype), jnp.ones((2, 64))

        def loss(params, x):
            step = lambda x, p: (jnp.tanh(x @ p.astype(jnp.float32)), None)  # noqa: E731
            return jnp.mean(jax.lax.scan(step, x, params["layers"])[0])

        def grads(params, index, x):
            return fz.grad(loss, {"layers": ~fz.rows(index)})(params, x)

        params = {"layers": stack}
        forward = self.compiled(loss, params, x).memory_analysis().temp_size_in_bytes  # with a cast stack, on a CPU
        both = self.compiled(grads, params, jnp.array([3]), x).memory_analysis().temp_size_in_bytes
        assert both - forward < 0.5 * 4 * stack.size

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

        @jax.jit
        def grads(params, index, x):
            return fz.grad(loss, {"embed": True, "scale": True, "head": True, "layers": ~fz.rows(index)})(params, x)

        for index in ([4, 5], [3, 1], [0, 1], [0, 5]):
            counts.update(kernel=0, x=0)
            jax.block_until_ready(grads(init(), jnp.array(index), X))
            last = max(index) + 1 if reverse else LAYERS - min(index)
            assert counts["kernel"] == 2
            assert last - 1 <= counts["x"] <= last
