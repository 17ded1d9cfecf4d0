"""The loss as a function of the trainable parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_equal_up_to_rounding, bits

import optax_freeze as fz


class TestValueAndGrad:
    def test_the_gradient_of_what_trains(self, params, loss, batch, frozen, compiled):
        value, grads = compiled(fz.value_and_grad(loss, frozen))(params, batch)
        expected_value, expected = compiled(jax.value_and_grad(loss))(params, batch)
        assert_equal_up_to_rounding(value, expected_value)
        assert_equal_up_to_rounding(grads["head"], expected["head"])
        assert jax.tree.structure(grads) == jax.tree.structure(fz.partition(params, frozen)[0])

    def test_argnums_and_aux(self, params, loss, batch, frozen):
        def with_aux(x, params):
            return loss(params, x), {"x": x}

        for argnums in (1, -1):
            (value, aux), grads = fz.value_and_grad(with_aux, frozen, argnums, has_aux=True)(batch, params)
            assert value == loss(params, batch)
            assert aux["x"] is batch
            assert bits(grads) == bits(fz.grad(loss, frozen)(params, batch))
            assert bits(fz.grad(with_aux, frozen, argnums, has_aux=True)(batch, params)[0]) == bits(grads)

    def test_integers_keys_and_functions_are_no_trouble(self):
        params = {"w": jnp.ones(2), "n": jnp.int32(3), "key": jax.random.key(0), "act": jnp.tanh}

        def loss(params):
            noise = jax.random.normal(params["key"], (2,))
            return params["act"](params["w"] * params["n"] + noise).sum()

        grads = fz.grad(loss, False)(params)
        assert jax.tree.structure(grads) == jax.tree.structure(fz.partition(params, False)[0])
        assert grads["w"].shape == (2,)

    def test_holomorphic(self):
        params = {"a": jnp.array(1 + 2j, jnp.complex64), "b": jnp.array(3j, jnp.complex64)}
        grads = fz.grad(lambda p: p["a"] * p["b"], "a", holomorphic=True)(params)
        assert grads["b"] == 1 + 2j

    def test_tied_arrays_are_left_to_the_optimizer(self):
        shared = jnp.ones(2)
        assert fz.grad(lambda p: (p["a"] * p["b"]).sum(), "a")({"a": shared, "b": shared})["b"].shape == (2,)

    def test_does_no_work_for_the_frozen(self, params, loss, batch):
        def flops(fn):
            return jax.jit(fn).lower(params, batch).compile().cost_analysis()["flops"]

        forward = flops(loss)
        assert flops(fz.value_and_grad(loss, fz.all_except("head/bias"))) <= forward * 1.2
        assert flops(jax.value_and_grad(loss)) > forward * 2


class TestValueAndGradFromState:
    @pytest.mark.parametrize(
        "solver",
        [
            optax.lbfgs(),
            optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15, store_grad=True)),
            optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(15)),
        ],
        ids=["lbfgs", "backtracking", "zoom"],
    )
    def test_the_line_search_of_the_trainable_part(self, params, loss, batch, frozen, solver):
        def run(tx, params, loss, value_and_grad, state):
            for _ in range(3):
                value, grads = value_and_grad(params, batch, state=state)
                updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss, x=batch)
                params = optax.apply_updates(params, updates)
            return params

        tx = fz.freeze(solver, frozen)
        ours = jax.jit(lambda p: run(tx, p, loss, fz.value_and_grad_from_state(loss, frozen), tx.init(p)))(params)

        def alone(params):
            trainable, rest = fz.partition(params, frozen)
            restricted = fz.restrict(loss, rest)
            value_and_grad = optax.value_and_grad_from_state(restricted)
            return run(solver, trainable, restricted, value_and_grad, solver.init(trainable))

        theirs = jax.jit(alone)(params)
        assert bits(ours["encoder"]) == bits(params["encoder"])
        assert loss(ours, batch) < loss(params, batch)
        assert_equal_up_to_rounding(ours["head"], theirs["head"])


TABLE, STACK = jnp.sin(jnp.arange(8.0)).reshape(4, 2), jnp.sin(jnp.arange(24.0)).reshape(4, 3, 2)
X = jnp.cos(jnp.arange(18.0)).reshape(6, 3)
SIZES = np.array([1, 2, 0, 3], np.int32)
OF_LEAVES = {
    "finer rows": (lambda w: jnp.repeat(w, 3, 0)[:5] ** 2, TABLE),
    "kron": (lambda w: jnp.tanh(jnp.kron(w, jnp.ones((2, 3)))), TABLE),
    "sizes of NumPy": (lambda w: jnp.tanh(jax.lax.ragged_dot(X, w, SIZES)), STACK),
}


@pytest.mark.parametrize("index", [jnp.array([1, 3]), [1, 3]], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", OF_LEAVES)
def test_of_a_leaf_in_rows(name, index):
    of_leaf, w = OF_LEAVES[name]
    loss = lambda params: jnp.sum(of_leaf(params["w"]))  # noqa: E731
    trainable, rest = fz.partition({"w": w}, {"w": ~fz.rows(index)})
    value, grads = jax.value_and_grad(fz.restrict(loss, rest))(trainable)
    assert_equal_up_to_rounding(value, loss({"w": w}))
    assert_equal_up_to_rounding(grads["w"].values, jax.grad(loss)({"w": w})["w"][jnp.array([1, 3])])


OF_NO_VALUE = {  # Python code that needs the value of the sum
    "text": lambda total: f"{total:.2f}",
    "shape": lambda total: jnp.zeros(total.astype(int)),
    "tile": lambda total: jnp.tile(jnp.zeros(3), total.astype(int)),
    "slice": lambda total: jnp.zeros(3)[: total.astype(int)],
}


class TestErrors:
    """The function is called again if Python needs a value, and only then."""

    TEXTS = ("Slice entries must be static integers.", "unsupported format string passed to MyTracer.__format__")

    def calls(self, way, needs):
        calls = []

        def loss(params):
            calls.append(1)
            needs(jax.lax.stop_gradient(params["w"]).sum())
            return jnp.sum(params["w"] ** 2)

        params, frozen = {"w": jnp.ones((3, 2))}, {"w": fz.rows([0])}
        trainable, rest = fz.partition(params, frozen)
        try:
            grads = fz.grad(loss, frozen)(params) if way == "grad" else jax.grad(fz.restrict(loss, rest))(trainable)
        except Exception as error:
            return len(calls), error
        assert jnp.array_equal(grads["w"].values, 2 * jnp.ones((2, 2)))
        return len(calls), None

    @pytest.mark.parametrize("way", ["grad", "restrict"])
    @pytest.mark.parametrize("kind", OF_NO_VALUE)
    def test_that_a_value_is_needed(self, way, kind):
        def chained(total):
            try:
                OF_NO_VALUE[kind](total)
            except (TypeError, IndexError) as error:
                raise RuntimeError("while logging") from error

        for needs in (OF_NO_VALUE[kind], chained):
            assert self.calls(way, needs) == (2, None)

    @pytest.mark.parametrize("way", ["grad", "restrict"])
    @pytest.mark.parametrize("text", TEXTS)
    def test_of_the_user_with_the_words_of_jax(self, way, text):
        def raising(_):
            raise IndexError(text)

        calls, error = self.calls(way, raising)
        assert (calls, type(error), str(error)) == (1, IndexError, text)


@pytest.mark.parametrize("frozen", [slice(0, 6), slice(0, 7)], ids=["two rows", "one row"])
def test_a_stack_is_put_together_by_rows(frozen):
    """No operation of the gradient makes an array as large as the stack."""

    def loss(params, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])[0])

    params, x = {"stack": jax.random.normal(jax.random.key(0), (8, 4, 4))}, jnp.ones((2, 4))
    trainable, rest = fz.partition(params, {"stack": fz.rows(frozen)})
    gradient = jax.grad(fz.restrict(loss, rest))
    made = {var.aval.shape for eqn in jax.make_jaxpr(gradient)(trainable, x).eqns for var in eqn.outvars}
    assert (8, 4, 4) not in made
    expected = jax.grad(loss)(params, x)["stack"][frozen.stop :]
    assert_equal_up_to_rounding(jax.jit(gradient)(trainable, x)["stack"].values, expected)


@pytest.mark.parametrize("with_scale", [False, True])
def test_a_custom_derivative_closes_over_a_value_of_the_loss(compiled, with_scale):
    """JAX holds its functions, and with them tracers of the trace of the loss."""

    def loss(params, x, scale):
        total = (x * params["frozen"]).sum()
        scaled = jax.custom_vjp(lambda y: jnp.sin(y) * total)
        scaled.defvjp(lambda y: (scaled(y), y), lambda y, ct: (2 * ct * jnp.cos(y) * total,))
        return scaled(params["w"]).sum() * scale, jnp.float32(3)

    params = {"w": jnp.arange(12.0).reshape(4, 3) / 7, "frozen": jnp.array([0.5, 2.0])}
    trainable, rest = fz.partition(params, {"w": fz.rows([0, 2]), "frozen": True})
    x, scale = jnp.array([1.0, 3.0]), jnp.float32(0.5)
    argnums = (0, 2) if with_scale else (0,)
    found, aux = compiled(jax.grad(fz.restrict(loss, rest), argnums, has_aux=True))(trainable, x, scale)
    assert aux == 3

    def dense(w, x, scale):
        return loss({**params, "w": w}, x, scale)

    expected, _ = compiled(jax.grad(dense, argnums, has_aux=True))(params["w"], x, scale)
    assert_equal_up_to_rounding(found[0]["w"].values, expected[0][jnp.array([1, 3])])
    assert_equal_up_to_rounding(list(found[1:]), list(expected[1:]))


def test_the_derivative_of_an_operation_is_traced_once(monkeypatch):
    """As of the functions of `jax.numpy`: 400 layers do not ask 400 times."""
    from jax.interpreters import ad

    asked, rule = [], ad.primitive_jvps[jax.lax.atan2_p]
    monkeypatch.setitem(
        ad.primitive_jvps, jax.lax.atan2_p, lambda *args, **params: asked.append(1) or rule(*args, **params)
    )

    def loss(params):
        x = jnp.float32(1.5) * params["w"].sum(0)
        for _ in range(20):
            x = jnp.arctan2(x, 0.5)
        return x.sum()

    trainable, rest = fz.partition({"w": jnp.ones((7, 5))}, fz.rules({"w": fz.rows([0, 1])}))
    jax.grad(fz.restrict(loss, rest))(trainable)
    assert 0 < len(asked) <= 4


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e5m2])
def test_one_run_of_rows_keeps_each_bit_of_a_nan(dtype):
    words = jnp.uint8 if jnp.finfo(dtype).bits == 8 else jnp.uint16
    bits_of_nan = {jnp.bfloat16: 0x7F81, jnp.float16: 0x7C01, jnp.float8_e5m2: 0x7D}[dtype]
    leaf = jax.lax.bitcast_convert_type(jnp.full((6, 4), bits_of_nan, words), dtype)
    trainable, rest = fz.partition({"w": leaf}, fz.rules({"w": fz.rows(slice(0, 4))}))
    whole = jax.jit(fz.restrict(lambda p: p["w"], rest))(trainable)
    assert bits(whole) == bits(leaf)


def test_an_operation_with_minus_zero_is_not_that_with_zero():
    trainable, rest = fz.partition({"w": jnp.ones((8, 4))}, fz.rules({"w": fz.rows(slice(0, 5))}))

    def loss(params, fill):
        beyond = params["w"].at[jnp.array([99])].get(mode="fill", fill_value=fill)
        return jnp.sum(1 / beyond) + jnp.sum(params["w"] ** 2)

    for fill in (np.float32(0.0), np.float32(-0.0)):
        value, _ = jax.jit(jax.value_and_grad(lambda t: fz.restrict(loss, rest)(t, fill)))(trainable)  # noqa: B023
        assert value == np.copysign(np.inf, fill)
