"""A loss whose gradient, whoever takes it, is that of the trainable parameters, and zero elsewhere."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_equal_up_to_rounding, bits
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_freeze as fz

TOKENS, LABELS = jnp.array([0, 5, 3]), jnp.arange(3)
KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "embed": jax.random.normal(KEYS[0], (6, 4)),
    "stack": jax.random.normal(KEYS[1], (5, 4, 4)) / 2,
    "out": jax.random.normal(KEYS[2], (4, 3)),
    "encoder": jax.random.normal(KEYS[3], (4, 4)),
}
DENSE = np.arange(12).reshape(4, 3) % 5 < 3
SPECS = {
    "leaves": fz.path("embed", "encoder"),
    "rows": {"embed": fz.rows(slice(0, 4)), "stack": fz.rows([0, 2]), "out": fz.rows([0, 2], axis=1), "encoder": True},
    "compact": {"embed": False, "stack": True, "out": fz.elements(DENSE, compact=True), "encoder": True},
    "dense": {"embed": True, "stack": fz.rows(slice(0, 3)), "out": fz.elements(DENSE), "encoder": False},
}


def loss(params, tokens, labels, factor=1.0):
    x = jnp.tanh(params["embed"][tokens] @ params["encoder"])
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w) + x, None)), x, params["stack"])
    return factor * optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], labels).mean()


def of_one(function):
    return lambda params, token, label: function(params, token[None], label[None])


def summed(function):
    """The gradients that a scan over the examples adds up."""

    def gradient(params, *batch):
        def body(total, each):
            return jax.tree.map(jnp.add, total, jax.grad(of_one(function))(params, *each)), None

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), batch)[0]

    return gradient


def sharded(function):
    mesh = jax.make_mesh((3,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])

    def step(params, tokens, labels):
        return jax.lax.pmean(jax.grad(function)(params, tokens, labels), "data")

    return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())(PARAMS, TOKENS, LABELS)


DIFFERENTIATED = {
    "grad": lambda f: jax.grad(f)(PARAMS, TOKENS, LABELS),
    "keywords": lambda f: jax.grad(f)(PARAMS, TOKENS, labels=LABELS, factor=2.0),
    "vjp": lambda f: jax.vjp(lambda p: f(p, TOKENS, LABELS), PARAMS)[1](jnp.float32(1))[0],
    "aux": lambda f: jax.grad(lambda *args: (f(*args), {"n": 3}), has_aux=True)(PARAMS, TOKENS, LABELS)[0],
    "argnums": lambda f: jax.grad(f, argnums=(3, 0))(PARAMS, TOKENS, LABELS, 2.0),
    "examples": lambda f: jax.vmap(jax.grad(of_one(f)), (None, 0, 0))(PARAMS, TOKENS, LABELS),
    "members": lambda f: jax.vmap(jax.grad(f), (0, None, None))(
        jax.tree.map(lambda x: jnp.stack([x, x / 2]), PARAMS), TOKENS, LABELS
    ),
    "accumulated": lambda f: summed(f)(PARAMS, TOKENS, LABELS),
    "shard_map": sharded,
    "pmap": lambda f: jax.pmap(jax.grad(of_one(f)), in_axes=(None, 0, 0))(PARAMS, TOKENS, LABELS),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(PARAMS, TOKENS, LABELS),
    "equinox": lambda f: eqx.filter_grad(f)(PARAMS, TOKENS, LABELS),
    "haiku": lambda f: hk.transform(lambda: hk.value_and_grad(lambda p: f(p, TOKENS, LABELS))(PARAMS)[1]).apply(
        {}, None
    ),
}


@pytest.mark.parametrize("spec", SPECS)
def test_the_value_is_that_of_the_function(spec):
    frozen_loss = fz.freeze_loss(loss, SPECS[spec])
    assert_equal_up_to_rounding(frozen_loss(PARAMS, TOKENS, LABELS), loss(PARAMS, TOKENS, LABELS))


CASES = [(way, "rows") for way in DIFFERENTIATED] + [(w, s) for w in ("grad", "examples") for s in SPECS if s != "rows"]


@pytest.mark.parametrize(("way", "spec"), CASES)
def test_frozen_gradients_are_zeros_and_the_others_those_of_the_function(way, spec):
    """For whoever differentiates it."""
    frozen_loss = fz.freeze_loss(loss, SPECS[spec])
    run = DIFFERENTIATED[way]
    grads, dense = (run(f) if way == "pmap" else jax.jit(lambda f=f: run(f))() for f in (frozen_loss, loss))
    if way == "argnums":
        assert_equal_up_to_rounding(grads[0], dense[0])
        grads, dense = grads[1], dense[1]
    frozen = jax.tree.map(lambda p: np.asarray(p) == 0, trainable_is_one(SPECS[spec], PARAMS))
    zeroed = jax.tree.map(lambda f, d: np.where(f, 0, np.asarray(d)), frozen, dense)
    assert_equal_up_to_rounding(grads, zeroed, roundings=64)
    of_frozen = jax.tree.map(lambda f, g: np.asarray(g)[np.broadcast_to(f, g.shape)], frozen, grads)
    assert not any(row.tobytes().strip(b"\0") for row in jax.tree.leaves(of_frozen))


def trainable_is_one(spec, params):
    return jax.grad(lambda p: sum(jnp.sum(x) for x in jax.tree.leaves(fz.stop_gradient(p, spec))))(params)


def test_without_leaked_tracers():
    with jax.checking_leaks():
        jax.eval_shape(jax.grad(fz.freeze_loss(loss, SPECS["rows"])), PARAMS, TOKENS, LABELS)


@pytest.mark.parametrize("spec", ["rows", "dense"])
def test_second_derivatives(spec):
    """Those of the gradient of what trains: a gradient penalty."""

    def penalty(function):
        norm = lambda params: sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(jax.grad(function)(params)))  # noqa: E731
        return jax.jit(jax.grad(norm))(PARAMS)

    got = penalty(lambda params: fz.freeze_loss(loss, SPECS[spec])(params, TOKENS, LABELS))
    expected = penalty(lambda params: loss(fz.stop_gradient(params, SPECS[spec]), TOKENS, LABELS))
    assert_equal_up_to_rounding(got, expected, roundings=64)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64])
def test_nan_at_frozen_elements_and_other_dtypes(dtype):
    params = {"a": jnp.array([0, 1], dtype), "b": jnp.array([[0], [4]], dtype), "c": jnp.array([0, 4], dtype)}

    def infinite(params):
        return sum(jnp.sum(jnp.sqrt(x) / jnp.abs(x)).real.astype(jnp.float32) for x in params.values())

    frozen = {"a": True, "b": fz.rows([0]), "c": fz.elements(np.array([True, False]))}
    grads, dense = jax.grad(fz.freeze_loss(infinite, frozen))(params), jax.grad(infinite)(params)
    assert all(jnp.isnan(dense[name].ravel()[0]) for name in params)
    assert not any(np.asarray(grads[name]).ravel()[0].tobytes().strip(b"\0") for name in params)
    assert bits(grads["b"][1]) == bits(dense["b"][1])
    assert bits(grads["c"][1]) == bits(dense["c"][1])
    assert {g.dtype for g in grads.values()} == {jnp.dtype(dtype)}


def test_modules_of_equinox_and_leaves_that_are_no_floats():
    model = eqx.nn.MLP(4, 1, width_size=8, depth=2, key=jax.random.key(1))
    frozen = fz.rules({"layers/1/weight": fz.rows(slice(0, 5))}, default=True)
    function = fz.freeze_loss(lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2), frozen)
    _, grads = eqx.filter_jit(eqx.filter_value_and_grad(function))(model, jnp.ones((3, 4)))
    assert not grads.layers[1].weight[:5].any()
    assert grads.layers[1].weight[5:].any()
    assert not grads.layers[0].weight.any()
    params = {"w": jnp.ones(3), "key": jax.random.key(0), "n": 2, "scale": 3.0}
    noisy = lambda p: jnp.sum(p["w"] * jax.random.normal(p["key"], (3,))) * p["n"] * p["scale"]  # noqa: E731
    function = fz.freeze_loss(noisy, {"w": fz.rows([0]), "key": True, "n": True, "scale": False})
    assert jax.grad(lambda w: function({**params, "w": w}))(params["w"])[0] == 0
    assert function(params) == noisy(params)


def test_rows_of_16_bits_if_a_custom_derivative_closes_over_a_value():
    """Only JAX can differentiate it: the leaf is put together, and its gradient transposed."""

    def gradient(params, x, scale):
        def closed(params):
            total = (x * 2).sum()
            scaled = jax.custom_vjp(lambda y: y * total)
            scaled.defvjp(lambda y: (scaled(y), y), lambda y, ct: (3 * ct * total,))
            return scaled(params["w"]).sum() * scale

        return fz.freeze_loss(closed, {"w": fz.rows([0])})(params)

    params, one = {"w": jnp.ones((3, 2), jnp.bfloat16)}, jnp.ones((), jnp.bfloat16)
    grads, of_scale = jax.jit(jax.grad(gradient, (0, 2)))(params, one, one)
    assert grads["w"].tolist() == [[0, 0], [6, 6], [6, 6]]
    assert of_scale == 12


def test_any_result():
    def with_aux(params):
        return params["w"].sum(), {"text": "a", "none": None, "array": params["w"] * 2}

    value, aux = fz.freeze_loss(with_aux, {"w": fz.rows([0])})({"w": jnp.ones(3)})
    assert (float(value), aux["text"], aux["none"], aux["array"].tolist()) == (3.0, "a", None, [2.0, 2.0, 2.0])


def test_results_and_arguments_that_are_constants_or_not_differentiable(compiled):
    """As those of Kauldron, whose trainers differentiate everything that a step computes."""

    def with_aux(context, params):
        noise = jax.random.normal(params["key"], (2,)) * params["n"]
        aux = {"n": params["n"] + 1, "ones": jnp.ones(2), "size": jnp.float32(32), "key": params["key"], **context}
        return jnp.sum(jnp.sin(params["w"]) @ noise * context["x"]), aux

    params = {"w": jnp.arange(8.0).reshape(4, 2), "n": jnp.int32(3), "key": jax.random.key(1), "none": None}
    args = {"x": jnp.float32(2), "ids": jnp.arange(3)}, params
    gradient = lambda f: compiled(jax.value_and_grad(f, (0, 1), has_aux=True, allow_int=True))(*args)  # noqa: E731
    (value, aux), grads = gradient(fz.freeze_loss(with_aux, fz.rules({"w": fz.rows(slice(0, 2))}), 1))
    (expected, expected_aux), dense = gradient(with_aux)
    dense[1]["w"] = dense[1]["w"].at[:2].set(0)
    assert jax.tree.structure(grads) == jax.tree.structure(dense)
    assert [g.dtype for g in jax.tree.leaves(grads)] == [g.dtype for g in jax.tree.leaves(dense)]
    of_floats = lambda grads: (grads[0]["x"], grads[1]["w"])  # noqa: E731
    assert_equal_up_to_rounding((value, of_floats(grads)), (expected, of_floats(dense)))
    assert jax.tree.map(bits, aux) == jax.tree.map(bits, expected_aux)


@pytest.mark.parametrize("constant", [np.full((4, 2), 3, np.float32), jnp.full((4, 2), 3.0)])
def test_a_custom_derivative_that_is_a_constant(constant):
    @jax.custom_vjp
    def straight(w, b):
        return jnp.sum(w) * b

    straight.defvjp(lambda w, b: (straight(w, b), None), lambda _, ct: (constant, 2.0))
    function = lambda p: straight(p["w"], p["b"])  # noqa: E731
    params, frozen = {"b": jnp.float32(1), "w": jnp.ones((4, 2))}, fz.rules({"w": fz.rows(slice(0, 3))})
    trainable, rest = fz.partition(params, frozen)
    full = jax.grad(fz.freeze_loss(function, frozen))(params)
    assert full["w"].tolist() == [[0, 0]] * 3 + [[3, 3]]
    assert full["b"] == 2
    for grads in (fz.grad(function, frozen)(params), jax.grad(fz.restrict(function, rest))(trainable)):
        assert grads["w"].values.tolist() == [[3, 3]]
        assert grads["b"] == 2
    assert fz.explain(function, params, frozen).rows[0].path == "w"


@pytest.mark.parametrize("how", ["rows", "compact", "vmap"])
def test_rows_that_the_devices_do_not_divide(how):
    """XLA would add values of their padding to row 0."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    params = {"w": jax.device_put(jnp.arange(6.0), jax.NamedSharding(mesh, P("x")))}
    frozen = fz.elements(np.isin(range(6), [0, 3, 5]), compact=True) if how == "compact" else fz.rows([0, 3, 5])
    loss = fz.freeze_loss(lambda params, x: jnp.sum(jnp.where(params["w"] > 9, 0, params["w"] * x)), {"w": frozen})
    grad = jax.grad(loss)
    if how == "vmap":
        grad = lambda params, x: jax.tree.map(lambda g: g[0], jax.vmap(jax.grad(loss), (None, 0))(params, x[None]))  # noqa: E731
    with jax.set_mesh(mesh):
        assert jax.jit(grad)(params, jnp.float32(7))["w"].tolist() == [0, 7, 7, 0, 7, 0]


@pytest.mark.parametrize("mask", [fz.rows(slice(0, 6)), fz.rows([1, 3]), fz.elements(np.eye(8, 4) > 0)])
def test_zeros_have_the_sharding_of_their_leaf_on_an_explicit_mesh(mask):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        leaf = jax.device_put(jnp.arange(32.0).reshape(8, 4), P("x", "y"))
        params = {"stack": leaf, "frozen": leaf}
        rows = lambda p: sum(jnp.sum(jax.sharding.reshard(p["stack"], P())[i] ** 2) for i in range(8))  # noqa: E731
        function = fz.freeze_loss(lambda p: rows(p) + jnp.sum(p["frozen"]), {"stack": mask, "frozen": True})
        grads = jax.jit(jax.grad(function))(params)
        assert {g.sharding.spec for g in grads.values()} == {P("x", "y")}


class TestCost:
    def step(self, function, frozen, grad=jax.grad):
        tx = optax.chain(optax.clip_by_global_norm(1.0), fz.freeze(optax.adamw(1e-3), frozen))

        def step(params, state, tokens, labels):
            grads = grad(function)(params, tokens, labels)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

        return step, tx

    @pytest.mark.parametrize("spec", ["leaves", "rows"])
    def test_the_gradient_costs_that_of_the_trainable_parameters(self, spec):
        frozen = SPECS[spec]
        args = PARAMS, TOKENS, LABELS
        flops = lambda gradient: jax.jit(gradient).lower(*args).compile().cost_analysis()["flops"]  # noqa: E731

        assert flops(jax.grad(fz.freeze_loss(loss, frozen))) <= 1.05 * flops(fz.grad(loss, frozen))

    def test_frozen_gradients_are_constants_without_cost(self, as_users_compile):
        """Their norm, their sum over micro-batches, and the program of the clip."""
        wide = {**PARAMS, "encoder": jnp.ones((4, 4)), "frozen": jnp.ones((1000, 1000))}

        def of_frozen(params, tokens, labels):
            both = lambda p, *batch: loss(p, *batch) + jnp.sum(p["frozen"] ** 2)  # noqa: E731
            function = fz.freeze_loss(both, fz.all_except("out"))
            total, _ = jax.lax.scan(
                lambda total, batch: (jax.tree.map(jnp.add, total, jax.grad(of_one(function))(params, *batch)), None),
                jax.tree.map(jnp.zeros_like, params),
                (tokens, labels),
            )
            return optax.tree.norm(total)

        only_loss = lambda p, *batch: loss(p, *batch) + jnp.sum(p["frozen"] ** 2)  # noqa: E731
        accessed = [
            jax.jit(f).lower(wide, TOKENS, LABELS).compile().cost_analysis()["bytes accessed"]
            for f in (of_frozen, only_loss)
        ]
        assert accessed[0] < accessed[1] + 1e5

    @pytest.mark.parametrize(
        ("spec", "grad"), [*((spec, jax.grad) for spec in SPECS), ("rows", summed), ("leaves", summed)]
    )
    def test_the_step_of_a_trainer_has_no_leak_even_with_a_clip_outside(self, spec, grad):
        self.audit(fz.freeze_loss(loss, SPECS[spec]), spec, grad).raise_for_leaks()

    @pytest.mark.parametrize(("spec", "grad"), [("rows", jax.grad), ("dense", summed)])
    def test_a_gradient_that_is_computed_is_a_leak_with_a_clip_outside(self, spec, grad):
        """Even where it is zero for the tokens of the batch."""
        leaks = self.audit(loss, spec, grad).leaks
        frozen = {name for name, mask in SPECS[spec].items() if mask is not False}
        assert {leak.path for leak in leaks if leak.kind == "gradient"} == frozen
        assert {leak.kind for leak in leaks} == {"gradient", "changed"}

    def audit(self, function, spec, grad):
        def make_step(function):
            step, _ = self.step(function, SPECS[spec], grad)
            of_state = lambda state, *batch: (step(*state, *batch)[:2],)  # noqa: E731
            return jax.jit(of_state) if grad is summed else of_state

        _, tx = self.step(function, SPECS[spec], grad)
        return fz.audit_step(
            make_step,
            (PARAMS, tx.init(PARAMS)),
            TOKENS,
            LABELS,
            loss=function,
            params=lambda state: state[0],
            frozen=SPECS[spec],
            steps=1,
        )
