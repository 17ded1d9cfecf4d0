"""Frozen weights that lie in the host's memory: gradients are those of the same program on the device, up to rounding.

A program must not bring a stack of weights to the device as a whole, nor keep its rows until the backward pass.
"""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_equal_up_to_rounding, programs
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_freeze as fz
from optax_freeze._program import host_lookups

LAYERS, WIDTH = 4, 6
STACKED = ("up", "down", "scale", "lora_a", "lora_b")


def params():
    def array(i, *shape):
        return jax.random.normal(jax.random.key(i), shape) / np.sqrt(shape[-1])

    return {
        "up": array(0, LAYERS, WIDTH, WIDTH),
        "down": array(1, LAYERS, WIDTH, WIDTH),
        "scale": jnp.ones((LAYERS, WIDTH)),
        "lora_a": array(2, LAYERS, WIDTH, 2),
        "lora_b": array(3, LAYERS, 2, WIDTH),
        "head": array(4, WIDTH, 3),
    }


X = jax.random.normal(jax.random.key(9), (5, WIDTH))


def block(x, p):
    return jnp.tanh(x @ p["up"] + x @ p["lora_a"] @ p["lora_b"]) * p["scale"] @ p["down"].T


def stacks(p):
    return {name: p[name] for name in STACKED}


def scan(p, x, *, body=block, cast=None, **options):
    xs = stacks(p) if cast is None else jax.tree.map(lambda w: w.astype(cast).astype(w.dtype), stacks(p))
    x, _ = jax.lax.scan(lambda x, p: (body(x, p), None), x, xs, **options)
    return jnp.sum((x @ p["head"]) ** 2)


def unrolled(p, x, *, body=block):
    for i in range(LAYERS):
        x = body(x, jax.tree.map(lambda w, i=i: w[i], stacks(p)))
    return jnp.sum((x @ p["head"]) ** 2)


def backwards_by_index(p, x):
    def body(i, x):
        return block(x, jax.tree.map(lambda w: w[LAYERS - 1 - i], stacks(p)))

    return jnp.sum((jax.lax.fori_loop(0, LAYERS, body, x) @ p["head"]) ** 2)


def by_two_indices(p, x):
    def group(i, x):
        return jax.lax.fori_loop(0, 2, lambda j, x: block(x, jax.tree.map(lambda w: w[2 * i + j], stacks(p))), x)

    return jnp.sum((jax.lax.fori_loop(0, LAYERS // 2, group, x) @ p["head"]) ** 2)


def counting_down(p, x):
    """The carry counts the steps of a scan in reverse."""

    def body(carry, _):
        i, x = carry
        return (i - 1, block(x, jax.tree.map(lambda w: w[i], stacks(p)))), None

    (_, x), _ = jax.lax.scan(body, (LAYERS - 1, x), length=LAYERS, reverse=True)
    return jnp.sum((x @ p["head"]) ** 2)


def in_groups(p, x):
    groups = jax.tree.map(lambda w: w.reshape(LAYERS // 2, 2, *w.shape[1:]), stacks(p))

    @jax.checkpoint
    def group(x, layers):
        return jax.lax.scan(lambda x, p: (block(x, p), None), x, layers)[0], None

    x, _ = jax.lax.scan(group, x, groups)
    return jnp.sum((x @ p["head"]) ** 2)


def halves(p, x):
    for start in (2, 0):
        half = jax.tree.map(lambda w, start=start: w[start : start + 2], stacks(p))
        x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, half)
    return jnp.sum((x @ p["head"]) ** 2)


def transposed(p, x):
    xs = {**stacks(p), "up": p["up"].swapaxes(1, 2)}
    return scan({**p, **xs}, x)


def in_branches(p, x):
    def run(x):
        return scan(p, x)

    return jax.lax.cond(x[0, 0] > 0, run, lambda x: run(-x), x)


def in_jit(p, x):
    @jax.jit
    def run(p, x):
        return scan(p, x)

    return run(p, x)


BY_ROWS = {
    "scan": scan,
    "unroll": functools.partial(scan, unroll=2),
    "reverse": functools.partial(scan, reverse=True),
    "remat": functools.partial(scan, body=jax.checkpoint(block)),
    "remat in reverse": functools.partial(scan, body=jax.checkpoint(block), reverse=True),
    "remat with a policy": functools.partial(
        scan, body=jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "remat of all": jax.checkpoint(scan),
    "a cast of the stack": functools.partial(scan, cast=jnp.bfloat16),
    "a transposed stack": transposed,
    "unrolled": unrolled,
    "unrolled, remat": functools.partial(unrolled, body=jax.checkpoint(block)),
    "by index, in reverse": backwards_by_index,
    "by two indices": by_two_indices,
    "counting down": counting_down,
    "a scan of each half": halves,
    "jit": in_jit,
    "branches": in_branches,
}
LORA = {"up": True, "down": True, "scale": True, "lora_a": False, "lora_b": False, "head": True}
SPECS = {
    "all but the head": fz.all_except("head"),
    "LoRA": LORA,
    "last layer": dict.fromkeys(STACKED, fz.rows(slice(0, LAYERS - 1))) | {"head": False},
    "first layer": dict.fromkeys(STACKED, fz.rows(slice(1, None))) | {"head": False},
    "scattered": dict.fromkeys(STACKED, fz.rows([0, 2])) | {"head": False},
}


def parts(frozen, on_host):
    """The trainable part, and the rest with its stacks on the host."""
    trainable, rest = fz.partition(params(), frozen)
    return trainable, fz.offload(rest, True, min_bytes=0) if on_host else rest


def gradient(loss, trainable, rest, *args):
    return jax.value_and_grad(fz.restrict(loss, rest))(trainable, *args)


def whole_stacks(function, *args):
    """The operations of a program that have a stack of matrices on the device."""
    traced = jax.make_jaxpr(function)(*args)
    return [
        eqn.primitive.name
        for jaxpr in programs(traced.jaxpr)
        for eqn in jaxpr.eqns
        for out in eqn.outvars
        if getattr(out.aval, "memory_space", None) == jax.memory.Space.Device
        and out.aval.shape[-2:] == (WIDTH, WIDTH)
        and out.aval.size >= LAYERS // 2 * WIDTH * WIDTH
    ]


def check(step, on_host, on_device, *args, run=jax.jit, moves_stacks=False):
    """The results are those of parameters on the device, to which no stack is brought."""
    assert_equal_up_to_rounding(run(step)(on_host, *args), run(step)(on_device, *args))
    assert moves_stacks or whole_stacks(step, on_host, *args) == []


def check_loss(loss, frozen, tree, x=X, **options):
    check(fz.value_and_grad(loss, frozen), fz.offload(tree, frozen, min_bytes=0), tree, x, **options)


def check_restricted(loss, frozen, **options):
    step = lambda parts, x: gradient(loss, *parts, x)  # noqa: E731
    check(step, parts(frozen, on_host=True), parts(frozen, on_host=False), X, **options)


@pytest.mark.parametrize("loss", BY_ROWS.values(), ids=BY_ROWS.keys())
@pytest.mark.parametrize("frozen", [LORA, SPECS["last layer"]], ids=["LoRA", "last layer"])
def test_the_gradient_of_the_device(loss, frozen):
    check_restricted(loss, frozen, moves_stacks=frozen is not LORA)


@pytest.mark.parametrize("loss", [*BY_ROWS.values(), in_groups], ids=[*BY_ROWS, "in groups"])
def test_no_stack_comes_to_the_device(loss):
    rest = parts(SPECS["all but the head"], on_host=True)
    assert whole_stacks(functools.partial(gradient, loss), *rest, X) == []
    assert whole_stacks(fz.value_and_grad(loss, LORA), fz.offload(params(), LORA, min_bytes=0), X) == []


def test_a_step_reads_its_row_once():
    base = fz.offload(three(), HEAD, min_bytes=0)
    loss = lambda p, x: jnp.sum(jax.lax.scan(lambda x, w: (x @ w @ w, None), x, p["up"])[0] @ p["head"])  # noqa: E731
    traced = jax.make_jaxpr(fz.grad(loss, HEAD))(base, X)
    names = [eqn.primitive.name for inner in programs(traced.jaxpr) for eqn in inner.eqns]
    assert names.count("device_put") == 1


def test_what_is_compared_is_computed_once():
    def loss(p, x):
        scaled = p["up"] * 0.3
        return jnp.sum(jnp.where(scaled == scaled.max(), x[0, 0] * p["head"][0], 0.0))

    traced = jax.make_jaxpr(fz.grad(loss, HEAD))(fz.offload(three(), HEAD, min_bytes=0), X)
    names = [eqn.primitive.name for inner in programs(traced.jaxpr) for eqn in inner.eqns]
    assert names.count("device_put") == 1


def test_a_while_loop_reads_a_row_in_each_step():
    def loss(p, x):
        x = jax.lax.while_loop(
            lambda carry: carry[0] < p["scale"].shape[0],
            lambda carry: (carry[0] + 1, block(carry[1], jax.tree.map(lambda w: w[carry[0]], stacks(p)))),
            (0, x),
        )[1]
        return jnp.sum((x @ p["head"]) ** 2)

    check_loss(loss, SPECS["all but the head"], params())


@pytest.mark.parametrize("in_parts", [False, True], ids=["value_and_grad", "restrict"])
def test_the_backward_pass_reads_an_unrolled_layer_again(in_parts):
    """A second read waits for an operand of the backward pass, or XLA would merge it with the first."""
    base = fz.offload(params(), LORA, min_bytes=0)
    step = functools.partial(gradient, unrolled) if in_parts else fz.value_and_grad(unrolled, LORA)
    jaxpr = jax.make_jaxpr(step)(*(parts(LORA, on_host=True) if in_parts else (base,)), X).jaxpr
    waits = {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"}
    stacks = [eqn.invars[0] for eqn in jaxpr.eqns if eqn.invars and "<host>[4,6,6]" in str(eqn.invars[0].aval)]
    read = [stack in waits for stack in stacks if stack in {*waits, *jaxpr.invars}]
    waiting = sum(eqn.primitive.name == "optimization_barrier" for eqn in jaxpr.eqns)
    read = [read.count(False) - waiting, read.count(True)]
    assert read == [2 * LAYERS, 2 * LAYERS - 1]  # the batch needs no gradient, so "up" of the first layer is read once


@pytest.mark.parametrize(
    "of_matrix",
    [
        lambda p, x: jax.lax.scan(lambda x, w: (x + w, None), x, p["up"])[0],
        lambda p, x: x @ p["up"][2:].T @ p["up"][jnp.array([0, 1, 1, 3])],
    ],
)
def test_a_matrix_is_brought_to_the_device_once_and_cut_there(of_matrix):
    matrix = {"up": params()["up"][0], "head": jnp.ones(WIDTH)}
    host = {**matrix, "up": jax.device_put(matrix["up"], matrix["up"].sharding.with_memory_kind("pinned_host"))}
    step = fz.value_and_grad(lambda p, x: jnp.sum(of_matrix(p, x * p["head"]) ** 2), "up")
    check(step, host, matrix, X)
    inner = [eqn for jaxpr in [*programs(jax.make_jaxpr(step)(host, X).jaxpr)][1:] for eqn in jaxpr.eqns]
    assert "device_put" not in {eqn.primitive.name for eqn in inner}


def test_stacks_on_the_device_are_found():
    assert whole_stacks(functools.partial(gradient, in_groups), *parts(LORA, on_host=False), X)


@pytest.mark.parametrize("frozen", SPECS.values(), ids=SPECS.keys())
def test_value_and_grad_of_the_whole_tree(frozen):
    assert fz.offload(params(), frozen, min_bytes=0)["up"].sharding.memory_kind == "pinned_host"
    check_loss(scan, frozen, params(), moves_stacks=True)


def test_eagerly():
    check_restricted(scan, LORA, run=lambda fun: fun)


class TestReadAsAWhole:
    @staticmethod
    def sums(p, x):
        return jnp.sum(p["up"] ** 2) * scan(p, x) + jnp.einsum("bd,lde->", x, p["down"])

    @pytest.mark.parametrize("frozen", [LORA, SPECS["last layer"]], ids=["LoRA", "last layer"])
    def test_the_gradient_of_the_device(self, frozen):
        for loss in (self.sums, in_groups):
            check_restricted(loss, frozen, moves_stacks=True)

    def test_a_function_that_cannot_be_traced(self):
        def loss(p, x):
            return scan(p, x) * (2 if float(p["head"][0, 0]) > 100 else 3)

        trainable, rest = parts(LORA, on_host=True)
        got = fz.restrict(loss, rest)(trainable, X)
        np.testing.assert_allclose(got, loss(params(), X), rtol=1e-5)

    def test_what_a_loop_would_read_as_a_whole_in_each_step_is_read_before_it(self):
        def loss(p, x):
            return jax.lax.fori_loop(0, 3, lambda _, x: x + jnp.einsum("bd,lde->be", x, p["up"]), x).sum()

        base = fz.offload(params(), LORA, min_bytes=0)
        jaxpr = jax.make_jaxpr(fz.grad(loss, LORA))(base, X)
        moved = [[eqn.primitive.name for eqn in inner.eqns].count("device_put") for inner in programs(jaxpr.jaxpr)]
        assert moved[0] == 1
        assert sum(moved) == 1


def on_the_device(function, shape, *args):
    """The operations of a program that have an array of this shape on the device."""
    traced = jax.make_jaxpr(function)(*args)
    outs = [(eqn.primitive.name, out.aval) for j in programs(traced.jaxpr) for eqn in j.eqns for out in eqn.outvars]
    return [name for name, aval in outs if aval.shape == shape and "<host>" not in str(aval)]


class TestLookups:
    """Rows of a table on the host are brought to the device in blocks of eight, each row once."""

    ROWS, COLUMNS = 64, 128
    TOKENS = jnp.array([[63, 0, 8, 8, 7], [-1, 5, 62, 63, 64]])
    FROZEN: ClassVar = {"embed": True, "head": False}

    def tree(self, like=jnp.float32):
        keys = jax.random.split(jax.random.key(0))
        embed = jax.random.normal(keys[0], (self.ROWS, self.COLUMNS)).astype(like)
        return {"embed": embed, "head": jax.random.normal(keys[1], (self.COLUMNS, 3))}

    def through(self, p, rows):
        return jnp.sum(jnp.tanh(jnp.nan_to_num(rows.astype(jnp.float32)) @ p["head"] / 8) ** 2)

    def by_index(self, p, tokens):
        return self.through(p, p["embed"][tokens])

    def filled(self, p, tokens):
        return self.through(p, jnp.take(p["embed"], tokens, axis=0))

    def clipped(self, p, tokens):
        rows = jnp.take(p["embed"] * 2, tokens.astype(jnp.int8), axis=0, mode="clip")
        return jnp.sum(jnp.tanh(rows @ p["head"] / 8) ** 2)  # no comparison reads the products

    def of_elements(self, p, tokens):
        return self.through(p, p["embed"][tokens, tokens][..., None] * jnp.ones(self.COLUMNS))

    def in_a_scan(self, p, tokens):
        def body(total, tokens):
            return total + jax.checkpoint(self.by_index)(p, tokens), None

        return jax.lax.scan(body, 0.0, tokens)[0]

    @pytest.mark.parametrize("name", ["by_index", "filled", "clipped", "of_elements", "in_a_scan"])
    def test_the_gradient_of_the_device(self, name):
        step, tree = fz.value_and_grad(getattr(self, name), self.FROZEN), self.tree()
        host = fz.offload(tree, self.FROZEN, tables="embed", min_bytes=0)
        check(step, host, tree, self.TOKENS)
        assert on_the_device(step, tree["embed"].shape, host, self.TOKENS) == []

    def test_new_rows(self):
        frozen, tree = {"embed": fz.rows(slice(0, 60)), "head": True}, self.tree()
        trainable, rest = fz.partition(tree, frozen)
        host = fz.offload(rest, True, tables="embed", min_bytes=0)
        assert host["embed"].array.sharding.memory_kind == "pinned_host"
        step = lambda parts, tokens: gradient(self.by_index, *parts, tokens)  # noqa: E731
        check(step, (trainable, host), (trainable, rest), self.TOKENS)
        assert on_the_device(step, tree["embed"].shape, (trainable, host), self.TOKENS) == []

    def test_as_many_tokens_as_rows(self):
        """Then the table itself is smaller than what is looked up."""
        step, tree = fz.value_and_grad(self.by_index, self.FROZEN), self.tree()
        host = fz.offload(tree, self.FROZEN, tables="embed", min_bytes=0)
        check(step, host, tree, tokens := jnp.arange(self.ROWS))
        assert on_the_device(step, tree["embed"].shape, host, tokens)[0] == "device_put"
        [found] = fz.explain(self.by_index, host, self.FROZEN, tokens).host
        assert [op.name for op in found.everything] == ["gather"]

    def test_rows_of_a_stack(self):
        frozen = {**LORA, "head": False}
        loss = lambda p, x: jnp.sum(x @ p["up"][jnp.array([3, 3])] @ p["head"])  # noqa: E731
        check_loss(loss, frozen, params(), moves_stacks=True)
        found = {
            leaf.path: leaf for leaf in fz.explain(loss, fz.offload(params(), frozen, min_bytes=0), frozen, X).host
        }
        assert [op.name for op in found["up"].by_rows] == ["gather"]

    @pytest.mark.parametrize("columns", [None, "model"])
    def test_on_a_mesh(self, columns):
        mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        sharding = NamedSharding(mesh, PartitionSpec(None, columns))
        tree = {
            name: jax.device_put(leaf, sharding) for name, leaf in self.tree(jnp.bfloat16).items() if name == "embed"
        }
        tree["head"] = jax.device_put(self.tree()["head"], NamedSharding(mesh, PartitionSpec()))
        host = {**tree, "embed": jax.device_put(tree["embed"], sharding.with_memory_kind("pinned_host"))}
        tokens = jax.device_put(self.TOKENS, NamedSharding(mesh, PartitionSpec("model")))
        check(fz.value_and_grad(self.by_index, self.FROZEN), host, tree, tokens)

    def test_explained(self):
        host = fz.offload(self.tree(), self.FROZEN, tables="embed", min_bytes=0)
        [found] = fz.explain(self.by_index, host, self.FROZEN, self.TOKENS).host
        assert str(found).startswith("embed: from the host, by rows\n  by rows: gather at ")
        tied = lambda p, tokens: self.by_index(p, tokens) + self.through(p, p["embed"].sum(0))  # noqa: E731
        [found] = fz.explain(tied, host, self.FROZEN, self.TOKENS).host
        assert [op.name for op in found.everything] == ["reduce_sum"]


class TestExperts:
    """``jax.lax.ragged_dot`` with experts on the host, of which each comes when its rows are multiplied."""

    EXPERTS, WIDTH, HIDDEN = 4, 6, 10
    SIZES = jnp.array([5, 0, 9, 3])  # three of the 20 rows are in no group
    FROZEN: ClassVar = {"up": True, "down": True, "head": False, "scale": False}

    def tree(self):
        keys, shape = jax.random.split(jax.random.key(0), 3), (2, self.EXPERTS, self.WIDTH, self.HIDDEN)
        up, down = jax.random.normal(keys[0], shape) / 3, jax.random.normal(keys[1], shape).swapaxes(2, 3) / 3
        return {"up": up, "down": down, "head": jnp.ones((self.WIDTH, 2)), "scale": jnp.ones((self.WIDTH,))}

    X = jax.random.normal(jax.random.key(5), (20, 6))

    def layer(self, x, p):
        hidden = jax.lax.ragged_dot(x, p["up"].astype(jnp.bfloat16).astype(x.dtype), self.SIZES)
        return x + jax.lax.ragged_dot(jnp.tanh(hidden), p["down"], self.SIZES)

    def loss(self, p, x, loop=True):
        stacks, x = {"up": p["up"], "down": p["down"]}, x * p["scale"]
        if loop:
            x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(self.layer)(x, w), None), x, stacks)
        else:
            x = self.layer(x, stacks)
        return jnp.mean((x @ p["head"]) ** 2)

    def of_experts(self, step, *args):
        shapes = [(self.EXPERTS, *each) for each in ((self.WIDTH, self.HIDDEN), (self.HIDDEN, self.WIDTH))]
        return [
            name for shape in shapes for lead in ((), (1,), (2,)) for name in on_the_device(step, lead + shape, *args)
        ]

    @pytest.mark.parametrize(("loop", "at_once"), [(True, 512), (False, 2)], ids=["scan", "one layer"])
    def test_the_gradient_of_the_device(self, loop, at_once, monkeypatch):
        monkeypatch.setattr(host_lookups, "_MOST_TOKENS", at_once)
        step = fz.value_and_grad(functools.partial(self.loss, loop=loop), self.FROZEN)
        tree = self.tree() if loop else self.tree() | {name: self.tree()[name][0] for name in ("up", "down")}
        host = fz.offload(tree, self.FROZEN, min_bytes=0)
        check(step, host, tree, self.X)
        assert self.of_experts(step, host, self.X) == []

    def test_features_of_experts_on_the_host(self):
        once = fz.precompute(self.loss, {**self.FROZEN, "scale": True})
        host = fz.offload(self.tree(), self.FROZEN, min_bytes=0)
        features = jax.jit(once.before)(host, self.X)
        assert_equal_up_to_rounding(features, jax.jit(once.before)(self.tree(), self.X))

    def test_what_may_be_divided_among_devices_is_read_as_a_whole(self):
        mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        tree = jax.device_put(self.tree(), NamedSharding(mesh, PartitionSpec()))
        x = jax.device_put(self.X, NamedSharding(mesh, PartitionSpec()))
        step, host = fz.value_and_grad(self.loss, self.FROZEN), fz.offload(tree, self.FROZEN, min_bytes=0)
        check(step, host, tree, x)
        assert self.of_experts(step, host, x)

    def test_in_shard_map(self):
        mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
        specs = {
            name: PartitionSpec(None, None, *axes) for name, axes in (("up", (None, "model")), ("down", ("model",)))
        }
        tree = {**self.tree(), **{k: jax.device_put(self.tree()[k], NamedSharding(mesh, v)) for k, v in specs.items()}}

        def layer(x, p):
            hidden = jax.lax.ragged_dot(varying(x, "model"), p["up"], self.SIZES)
            return x + jax.lax.psum(jax.lax.ragged_dot(jnp.tanh(hidden), p["down"], self.SIZES), "model"), None

        def scanned(p, x):
            return jax.lax.scan(layer, x, p)[0]

        def loss(p, x):
            mapped = jax.shard_map(scanned, mesh=mesh, in_specs=(specs, PartitionSpec()), out_specs=PartitionSpec())
            return jnp.mean((mapped({"up": p["up"], "down": p["down"]}, x * p["scale"]) @ p["head"]) ** 2)

        step, host = fz.value_and_grad(loss, self.FROZEN), fz.offload(tree, self.FROZEN, min_bytes=0)
        check(step, host, tree, self.X)
        local = (self.EXPERTS, self.WIDTH, self.HIDDEN // 2)
        assert [on_the_device(step, lead + local, host, self.X) for lead in ((), (1,))] == [[], []]


def test_derivatives_of_other_kinds():
    trainable, rest = parts(LORA, on_host=True)
    _, on_device = parts(LORA, on_host=False)

    def of(rest):
        fun = fz.restrict(scan, rest)
        tangent = jax.tree.map(jnp.ones_like, trainable)
        second = jax.jvp(jax.grad(lambda t: fun(t, X)), (trainable,), (tangent,))[1]
        examples = jax.vmap(jax.grad(fun), (None, 0))(trainable, X[:, None])
        return second, examples

    assert_equal_up_to_rounding(jax.jit(of)(rest), jax.jit(of)(on_device))


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eagerly", "jitted"])
def test_the_gradient_of_what_is_frozen_is_on_the_host_too(run):
    """Whoever differentiates with respect to the rest, too, gets what JAX gives: a gradient beside each array."""
    of_both = jax.grad(lambda trainable, rest: fz.restrict(scan, rest)(trainable, X), argnums=(0, 1))
    (trainable, on_host), (_, on_device) = (parts(SPECS["last layer"] | {"up": True}, here) for here in (True, False))
    of_trainable, of_rest = run(of_both)(trainable, on_host)
    assert jax.tree.map(lambda x: x.sharding.memory_kind, of_rest) == jax.tree.map(
        lambda x: x.sharding.memory_kind, on_host
    )
    assert_equal_up_to_rounding((of_trainable, jax.device_get(of_rest)), jax.device_get(of_both(trainable, on_device)))


def test_rows_that_are_values_of_the_program_beside_a_base_on_the_host():
    frozen = {"up": True, "down": True, "scale": True, "head": True}
    frozen |= dict.fromkeys(("lora_a", "lora_b"), ~fz.rows(jnp.array([1, 3])))

    base = fz.offload(params(), fz.path("up", "down"), min_bytes=0)
    check(fz.value_and_grad(scan, frozen), base, params(), X)


def test_on_a_mesh():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec(None, "data", "model"))
    tree = {k: jax.device_put(v, sharding if v.shape[1:] == (WIDTH, WIDTH) else None) for k, v in params().items()}
    assert fz.offload(tree, LORA, min_bytes=0)["up"].sharding == sharding.with_memory_kind("pinned_host")
    check_loss(scan, LORA, tree)


def varying(x, axis):
    return jax.lax.pcast(x, axis, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axis)


@pytest.mark.parametrize("frozen", ["up", {"up": fz.rows([0, 1, 2]), "head": False}], ids=["whole", "rows"])
@pytest.mark.parametrize("inside", [False, True])
def test_in_shard_map(inside, frozen):
    """Either the whole gradient is taken within ``jax.shard_map``, or the model calls it."""
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    spec = PartitionSpec(None, None, "model")
    weights = jax.device_put(params()["up"], NamedSharding(mesh, spec))
    tree = {"up": weights, "head": jnp.ones(WIDTH)}

    def loss(p, x):
        def body(x, w):
            return jax.lax.all_gather(jnp.tanh(x @ w), "model", axis=1, tiled=True), None

        x, _ = jax.lax.scan(body, varying(x, "model"), p["up"])
        return jax.lax.pmean(jnp.sum(x * p["head"]), "model")

    specs = {"up": spec, "head": PartitionSpec()}
    mapped = functools.partial(jax.shard_map, mesh=mesh)

    def step(tree, x):
        if inside:
            of_head = mapped(
                lambda tree, x: fz.grad(loss, frozen)(tree, x)["head"],
                in_specs=(specs, PartitionSpec()),
                out_specs=PartitionSpec(),
            )
            return of_head(tree, x)
        of_params = mapped(loss, in_specs=(specs, PartitionSpec()), out_specs=PartitionSpec())
        return fz.grad(of_params, frozen)(tree, x)["head"]

    check(step, fz.offload(tree, frozen, min_bytes=0), tree, X)


@pytest.mark.parametrize("rows", [[1, 4], jnp.array([1, 4])], ids=["known", "dynamic"])
@pytest.mark.parametrize("in_parts", [False, True], ids=["value_and_grad", "restrict"])
def test_what_every_shard_reads_twice(rows, in_parts):
    """The second read waits for no value that varies: it would vary, too."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    everywhere, by_shard = PartitionSpec(), PartitionSpec("data")
    tree = {"embed": jnp.cos(jnp.arange(42.0)).reshape(7, WIDTH), "up": params()["up"]}

    def of_shard(p, x):
        y = x + p["embed"][jnp.array([1, 3, 6])]
        for layer in (0, 1, 0):
            y = jnp.tanh(y @ p["up"][layer])
        return jax.lax.pmean(jnp.mean((y @ p["embed"].T) ** 2), "data")

    loss = jax.shard_map(of_shard, mesh=mesh, in_specs=(everywhere, by_shard), out_specs=everywhere)
    frozen, x = {"embed": ~fz.rows(rows), "up": True}, jnp.stack([X[:3], -X[:3]]).reshape(6, WIDTH)
    host = NamedSharding(mesh, everywhere, memory_kind="pinned_host")
    placed = {**tree, "up": jax.device_put(tree["up"], host)}
    if in_parts:
        got = jax.jit(lambda parts, x: gradient(loss, *parts, x)[1])(fz.partition(placed, frozen), x)
    else:
        got = jax.jit(lambda p, x: fz.grad(loss, frozen)(p, x))(placed, x)
    expected = jax.jit(jax.grad(loss))(tree, x)["embed"][jnp.array([1, 4])]
    assert_equal_up_to_rounding(got["embed"].values, expected, roundings=64)


HEAD = {"up": True, "down": True, "head": False}


def three(**other):
    return {"up": params()["up"], "down": params()["down"], "head": jnp.ones(WIDTH), **other}


def through(weights, p, x):
    """A scan over stacked weights after something that trains."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x * p["head"], weights)
    return jnp.sum(x @ p["head"])


def by_index(p, x):
    return jnp.sum(jax.lax.fori_loop(0, LAYERS, lambda i, x: jnp.tanh(x @ p["up"][i]), x * p["head"]))


def nested(p, x):
    def group(x, layers):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0], None

    return jnp.sum(jax.lax.scan(group, x * p["head"], p["up"])[0])


class TestAwkward:
    """Found by a fuzzer."""

    @pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint32, jnp.int32])
    def test_an_index_out_of_range_is_clamped(self, dtype):
        def loss(p, x):
            i = jnp.asarray(jnp.iinfo(dtype).max, dtype) - (x[0, 0] * 0).astype(dtype)
            return jnp.sum(jnp.tanh(x @ jax.lax.dynamic_index_in_dim(p["up"], i, 0, keepdims=False)) @ p["head"])

        check_loss(loss, HEAD, three())

    @pytest.mark.parametrize(
        ("loss", "tree", "frozen"),
        [
            (
                lambda p, x: jnp.sum(
                    jax.lax.scan(lambda x, w: (jnp.tanh(x @ jax.nn.relu(w)), None), x * p["head"], p["up"])[0]
                ),
                three(),
                HEAD,
            ),
            (nested, three(up=params()["up"].reshape(2, 2, WIDTH, WIDTH)), HEAD),
            (by_index, three(), HEAD),
            (by_index, three(), {"up": fz.rows([0, 1, 2]), "down": True, "head": False}),
        ],
        ids=["custom_jvp of a row", "nested", "by index", "rows by index"],
    )
    def test_no_row_waits_on_the_device_for_the_backward_pass(self, loss, tree, frozen):
        trainable, rest = fz.partition(fz.offload(tree, frozen, min_bytes=0), frozen)

        def residuals(trainable):
            return jax.tree.leaves(jax.vjp(lambda t: fz.restrict(loss, rest)(t, X), trainable)[1])

        waiting = [v.aval for v in jax.make_jaxpr(residuals)(trainable).jaxpr.outvars]
        stacked = [aval for aval in waiting if aval.size >= tree["up"].size and "host" not in str(aval)]
        assert stacked == []
        check_loss(loss, frozen, tree)

    @pytest.mark.parametrize(
        "joined",
        [
            lambda a, b, x: jnp.stack([a, b], 1)[:, 0],
            lambda a, b, x: jnp.concatenate([a, b], 1)[:, :WIDTH],
            lambda a, b, x: jnp.concatenate([a, b]),
            lambda a, b, x: jax.lax.cond(x[0, 0] > 0, lambda: a, lambda: b),
            lambda a, b, x: jax.lax.cond(x[0, 0] > 0, lambda: a, lambda: b * 2),
            lambda a, b, x: a.astype(jnp.bfloat16).swapaxes(1, 2).astype(jnp.float32) * 0.5,
            lambda a, b, x: jnp.roll(a, 1, 0),
        ],
    )
    @pytest.mark.parametrize("rows", [([0, 2], [1]), (None, None)])
    def test_stacks_that_are_joined(self, joined, rows):
        frozen = HEAD if rows[0] is None else {"up": fz.rows(rows[0]), "down": fz.rows(rows[1]), "head": False}

        def loss(p, x):
            return through(joined(p["up"], p["down"], x), p, x)

        check_loss(loss, frozen, three(), moves_stacks=True)
        for leaf in fz.explain(loss, fz.offload(three(), frozen, min_bytes=0), frozen, X).host:
            assert (leaf.by_rows or leaf.everything) or leaf.path == "down"

    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
    def test_vmap_over_indices_and_over_stacks(self, transform):
        def loss(p, i):
            return jnp.sum(jnp.tanh(X @ p["up"][i]) @ p["head"])

        def of_indices(p):
            return jax.vmap(transform(lambda i: fz.grad(loss, HEAD)(p, i)))(jnp.array([0, 3]))

        of_stacks = jax.vmap(transform(lambda p: fz.grad(lambda p: through(p["up"], p, X), HEAD)(p)))
        many = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), three())
        for step, tree in ((of_indices, three()), (of_stacks, many)):
            check(step, fz.offload(tree, HEAD, min_bytes=0), tree, run=lambda fun: fun, moves_stacks=True)

    def test_no_layers(self):
        for shape in ((0, WIDTH, WIDTH), (0, 2, WIDTH // 2, WIDTH)):
            tree = three(up=jnp.zeros(shape))
            check_loss(lambda p, x: through(p["up"].reshape(0, WIDTH, WIDTH), p, x), HEAD, tree)

    def test_a_long_expression_of_weights_is_traced_in_time(self):
        def loss(p, x):
            w = p["up"]
            for _ in range(12):
                w = w * w * 0.1 + w
            return through(w, p, x)

        base = fz.offload(three(), HEAD, min_bytes=0)
        jaxpr = jax.make_jaxpr(fz.value_and_grad(loss, HEAD))(base, X)
        assert sum(len(inner.eqns) for inner in programs(jaxpr.jaxpr)) < 1000


class TestPrecompute:
    @pytest.mark.parametrize("frozen", [SPECS["all but the head"], SPECS["last layer"]], ids=["head", "last layer"])
    @pytest.mark.parametrize("loss", [BY_ROWS["remat"], unrolled], ids=["remat", "unrolled"])
    def test_before_and_after(self, loss, frozen):
        once = fz.precompute(loss, frozen)
        base = fz.offload(params(), frozen, min_bytes=0)
        before = jax.jit(once.before)
        features = before(base, X)
        assert_equal_up_to_rounding(features, before(params(), X))
        assert whole_stacks(once.before, base, X) == []
        step = jax.jit(functools.partial(gradient, once.after))
        assert_equal_up_to_rounding(step(*parts(frozen, True), features, X), step(*parts(frozen, False), features, X))

    def test_features_of_the_device_serve_parameters_on_the_host(self):
        once = fz.precompute(scan, fz.all_except("head"))
        base = fz.offload(params(), fz.all_except("head"), min_bytes=0)
        step = jax.jit(fz.value_and_grad(once.after, fz.all_except("head")))
        features = jax.jit(once.before)(params(), X)
        assert_equal_up_to_rounding(step(once.needed(base, X), features, X), step(base, features, X))


class TestExplain:
    def test_by_rows(self):
        base = fz.offload(params(), LORA, min_bytes=0)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), base)
        for tree in (base, shapes):
            found = {leaf.path: leaf for leaf in fz.explain(scan, tree, LORA, X).host}
            assert set(found) == {"up", "down"}
            assert {op.name for op in found["up"].by_rows} == {"dot_general"}
            assert found["up"].everything == ()
            assert str(found["up"]).startswith("up: from the host, by rows\n  by rows: dot_general at ")

    def test_whole(self):
        base = fz.offload(params(), LORA, min_bytes=0)
        found = {leaf.path: leaf for leaf in fz.explain(TestReadAsAWhole.sums, base, LORA, X).host}
        assert [op.name for op in found["up"].everything] == ["reduce_sum"]
        assert str(found["up"]).startswith("up: from the host, by rows and whole\n")

    def test_what_is_only_looked_up_stays_on_the_device(self):
        tree = {**params(), "embed": jnp.ones((7, WIDTH))}
        frozen = {**LORA, "embed": True}
        base = fz.offload(tree, frozen, min_bytes=0)
        explained = fz.explain(lambda p, i: scan(p, p["embed"][i]), base, frozen, jnp.array([1, 2]))
        found = {leaf.path: leaf for leaf in explained.host}
        assert not found["embed"].on_host
        assert str(found["embed"]).startswith("embed: stays on the device, where it is looked up by gather at ")
        assert "head" not in found

    def test_nothing_on_the_host(self):
        assert fz.explain(scan, params(), LORA, X).host == ()
