"""The gradient of the groups of ``freeze_when`` that train now."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits, counting_flops, programs

import optax_freeze as fz
from optax_freeze._program.flops import flops
from optax_freeze._program.regions import Values
from optax_freeze._program.tasks import Task

X = jax.random.normal(jax.random.key(0), (4, 8))
NAMES = ("a", "b", "c", "head")


def init():
    keys = jax.random.split(jax.random.key(1), 5)
    params = {name: jax.random.normal(key, (8, 8)) / 3 for name, key in zip(NAMES, keys[1:], strict=True)}
    return {**params, "steps": jnp.int32(3)}


def loss(params, x):
    for name in NAMES:
        x = jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


def masked(params, frozen, x=X):
    """The gradient of everything, zeroed at frozen groups."""
    grads = fz.grad(loss, False)(params, x)
    return {name: jnp.zeros_like(g) if name in frozen else g for name, g in grads.items()}


def state_of(groups, params=None):
    return fz.freeze_when(optax.sgd(0.1), groups).init(init() if params is None else params)


def grad_of(state, params, x=X, **options):
    return fz.grad(loss, fz.spec_of(state), **options)(params, x)


def close(got, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), got, expected)


SETS = [(), ("a",), ("b",), ("a", "b"), NAMES, ("c",)]


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_are_those_of_the_groups_that_train_and_zeros(jit):
    state, params, traces = state_of(dict.fromkeys(NAMES, True)), init(), []

    def grads(state, params):
        traces.append(1)
        return grad_of(state, params)

    grads = jax.jit(grads) if jit else grads
    for frozen in SETS:
        state = fz.set_frozen(state, {name: name in frozen for name in NAMES})
        got = grads(state, params)
        close(got, masked(params, frozen))
        assert all(not got[name].any() for name in frozen)
        assert got["steps"] == optax.MaskedNode()
    assert len(traces) == (1 if jit else len(SETS))


def sets_of(names):
    """Every set of these groups."""
    return itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))


def costs(loss, groups, params, sets, spec_of):
    """The FLOPs of gradients with these groups frozen, and with the spec of each set; checks the gradients."""
    state = fz.freeze_when(optax.sgd(0.1), groups).init(params)
    gradient = lambda state, params: fz.value_and_grad(loss, fz.spec_of(state))(params, X)  # noqa: E731
    counted, compiled, found = counting_flops(jax.make_jaxpr(gradient)(state, params)), jax.jit(gradient), []
    for frozen in sets:
        now, spec = fz.set_frozen(state, {name: name in frozen for name in groups}), spec_of(frozen)
        close(compiled(now, params), gradient(now, params))
        static = jax.make_jaxpr(lambda params, spec=spec: fz.value_and_grad(loss, spec)(params, X))(params)
        found.append((counted(now, params), flops(static.eqns)))
    assert compiled._cache_size() == 1
    return np.array(found).T


def test_any_set_costs_what_its_static_spec_costs():
    spec_of = lambda frozen: dict.fromkeys(NAMES, False) | {"steps": True} | dict.fromkeys(frozen, True)  # noqa: E731
    got, expected = costs(loss, dict.fromkeys("abc", True), init(), sets_of("abc"), spec_of)
    np.testing.assert_allclose(got, expected, rtol=0.02)
    assert min(got) < 0.6 * max(got)


def stacked(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
    return jnp.mean((x @ params["head"]) ** 2)


def matrix(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"].T) @ params["head"]) ** 2)


@pytest.mark.parametrize(("loss", "shape"), [(stacked, (8, 8, 8)), (matrix, (256, 8))])
def test_rows_cost_what_their_static_spec_costs(loss, shape):
    n = shape[0] // 8
    rows = {"w": range(3 * n), "[w]": range(3 * n, 5 * n), "w*": range(5 * n, 8 * n)}
    params = {"w": jax.random.normal(jax.random.key(2), shape) / 3, "head": jnp.eye(8 * n, 8) + 0.1}
    groups = {name: (fz.rows([*here]), True) for name, here in rows.items()}

    def spec_of(frozen):
        numbers = [i for name in frozen for i in rows[name]]
        return {"w": fz.rows(numbers) if numbers else False, "head": False}

    got, expected = costs(loss, groups, params, sets_of(groups), spec_of)
    np.testing.assert_allclose(got, expected, rtol=0.03, atol=3 * params["w"].size)  # zeros are joined with rows
    assert min(got) < 0.8 * max(got)


def equations(jaxpr):
    return sum(len(each.eqns) for each in programs(jaxpr))


def test_28_groups_are_one_program_of_the_size_of_few():
    names = [f"w{i:02d}" for i in range(28)]
    params = dict(zip(names, jax.random.normal(jax.random.key(3), (28, 8, 8)) / 3, strict=True))

    def loss(params, x):
        return jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), params.values(), x) ** 2)

    mixed = [names[i] for i in np.flatnonzero(np.random.default_rng(0).integers(2, size=28))]
    sets = [(), names[::2], names[:20], mixed, names[:3] + names[4:], names[:-1]]
    groups = dict.fromkeys(names, True)
    got, expected = costs(loss, groups, params, sets, lambda frozen: {name: name in frozen for name in names})
    np.testing.assert_allclose(got, expected, rtol=0.01, atol=28 * 20)  # the conditions
    state = fz.freeze_when(optax.sgd(0.1), groups).init(params)
    program = jax.make_jaxpr(lambda state, params: fz.grad(loss, fz.spec_of(state))(params, X))(state, params)
    assert equations(program.jaxpr) < 6 * equations(jax.make_jaxpr(jax.grad(loss))(params, X).jaxpr)


def test_each_task_is_visited_as_often_with_few_groups_as_with_many(monkeypatch):
    visits = []
    monkeypatch.setattr(Task, "read_numbers", property(lambda task, read=Task.read_numbers.fget: counted(read(task))))
    monkeypatch.setattr(Values, "only", lambda values, numbers, only=Values.only: only(values, counted(numbers)))

    def counted(numbers):
        numbers = list(numbers)
        visits.append(1 + len(numbers))
        return numbers

    def of(count):
        params = {f"w{i:03d}": jax.ShapeDtypeStruct((8, 8), jnp.float32) for i in range(count)}
        tx = fz.freeze_when(optax.sgd(0.1), dict.fromkeys(params, False))
        step = fz.train_step(lambda params: jnp.sum(functools.reduce(jnp.matmul, params.values(), X)), tx)
        visits.clear()
        jax.eval_shape(step, params, jax.eval_shape(tx.init, params))
        return sum(visits)

    assert of(48) < 4.2 * of(12)


def test_leaves_of_other_groups_are_no_results_of_a_condition(monkeypatch):
    """Otherwise each group would pass as many placeholders as the parameters have leaves."""
    made = []
    monkeypatch.setattr(optax.MaskedNode, "__new__", lambda cls: made.append(cls) or tuple.__new__(cls))
    params = {name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for name in "abcd"}
    state = jax.eval_shape(fz.freeze_when(optax.sgd(0.1), dict.fromkeys(params, False)).init, params)
    loss = lambda params: jnp.sum(functools.reduce(jnp.matmul, params.values(), X))  # noqa: E731
    jax.eval_shape(lambda params, state: fz.grad(loss, fz.spec_of(state))(params), params, state)
    assert not made


class TestSharedOperations:
    """What groups share, whatever is frozen."""

    W = jnp.arange(1.0, 5).reshape(2, 2)

    def check(self, loss, jit=jax.jit):
        params = {"a": self.W, "b": 2 * self.W}
        tx = fz.freeze_when(optax.sgd(0.5), {"a": True, "b": True})
        exact = jax.grad(loss)(params)
        step = jit(fz.train_step(loss, tx))
        for frozen in sets_of("ab"):
            state = fz.set_frozen(tx.init(params), {name: name in frozen for name in "ab"})
            expected = {name: g * (name not in frozen) for name, g in exact.items()}
            value, grads = jit(lambda state: fz.value_and_grad(loss, fz.spec_of(state))(params))(state)
            close((value, grads), (loss(params), expected))
            new, _, value = step(params, state)
            close((new, value), (jax.tree.map(lambda p, g: p - g / 2, params, expected), loss(params)))
            assert [bits(new[name]) == bits(params[name]) for name in frozen] == [True] * len(frozen)

    def test_gradients_that_read_the_parameters_of_each_other(self):
        self.check(lambda p: jnp.sum(p["a"] * p["b"]))
        self.check(lambda p: jnp.sum((p["a"] + p["b"]) ** 2) + jnp.sum(p["a"]) + 3 * p["b"][0, 0])
        scaled = jax.custom_vjp(jnp.multiply)  # only with respect to the first
        scaled.defvjp(lambda a, b: (a * b, b), lambda b, ct: (ct * b, jnp.zeros_like(b)))
        self.check(lambda p: jnp.sum(jnp.sin(scaled(p["a"], p["b"])) + p["b"]))

    def test_conditions_that_are_constants(self):
        params = {"a": self.W, "b": 2 * self.W, "c": self.W + 1}
        groups = {"a": lambda step: True, "b": lambda step: False, "c": True}
        state = fz.freeze_when(optax.sgd(0.5), groups).init(params)
        grads = jax.jit(lambda state: fz.grad(lambda p: sum(map(jnp.sum, p.values())), fz.spec_of(state))(params))(
            state
        )
        close(grads, {"a": 0 * self.W, "b": jnp.ones((2, 2)), "c": 0 * self.W})

    def test_a_function_that_cannot_be_traced(self):
        def loss(params):
            return jnp.sum(params["a"] ** 2 * (2 if params["b"][0, 0] > 1 else 3) + params["b"])

        params = {"a": self.W, "b": 2 * self.W}
        state = fz.freeze_when(optax.sgd(0.5), {"a": True}).init(params)
        states = jax.tree.map(lambda *x: jnp.stack(x), state, fz.set_frozen(state, {"a": False}))
        for f in (loss, lambda p: jnp.sum(p["a"] ** 2 * 2 + p["b"])):  # and one that can
            value, grads = jax.vmap(lambda state, f=f: fz.value_and_grad(f, fz.spec_of(state))(params))(states)
            close(value[0], loss(params))
            close(grads, {"a": jnp.stack([0 * self.W, 4 * self.W]), "b": jnp.ones((2, 2, 2))})


@pytest.mark.parametrize("step", [False, True])
def test_effects_happen_once_in_order_whatever_is_frozen(step):
    seen = []

    @jax.custom_vjp
    def told(x):
        return x

    def backward(_, ct):
        jax.debug.callback(lambda: seen.append("backward"), ordered=True)
        return (ct,)

    told.defvjp(lambda x: (x, None), backward)

    def loss(params, x):
        jax.debug.callback(lambda: seen.append("first"), ordered=True)
        x = told(jnp.tanh(x @ params["a"]))
        jax.debug.callback(lambda: seen.append("second"), ordered=True)
        return jnp.mean((x @ params["b"]) ** 2)

    params, tx = {name: init()[name] for name in "ab"}, fz.freeze_when(optax.sgd(0.1), {"a": True, "b": True})
    fun = fz.train_step(loss, tx) if step else lambda p, s, x: fz.value_and_grad(loss, fz.spec_of(s))(p, x)
    fun = jax.jit(fun)
    for frozen in sets_of("ab"):
        seen.clear()
        jax.block_until_ready(fun(params, fz.set_frozen(tx.init(params), {n: n in frozen for n in "ab"}), X))
        jax.effects_barrier()
        assert seen == ["first", "second", "backward"]


def test_rows_and_masks():
    mask = jnp.arange(64).reshape(8, 8) % 3 == 0
    groups = {"a": (fz.rows(slice(0, 5)), True), "b": (fz.elements(mask), True), "c": True}
    params, state = init(), state_of(groups)
    exact = fz.grad(loss, False)(params, X)
    for frozen in ((), ("a",), ("b",), ("a", "b", "c")):
        got = jax.jit(grad_of)(fz.set_frozen(state, {name: name in frozen for name in groups}), params)
        rows = jnp.where((jnp.arange(8) < 5)[:, None] & ("a" in frozen), 0, exact["a"])
        ones = jnp.where(mask & ("b" in frozen), 0, exact["b"])
        close(got, {**exact, "a": rows, "b": ones, "c": exact["c"] * ("c" not in frozen)})


def test_two_groups_of_rows_in_one_leaf():
    params, state = init(), state_of({"a": (fz.rows(slice(0, 3)), True), "[a]": (fz.rows(slice(3, 6)), False)})
    exact, rows = fz.grad(loss, False)(params, X), np.arange(8)
    for first, second in itertools.product([False, True], repeat=2):
        got = jax.jit(grad_of)(fz.set_frozen(state, {"a": first, "[a]": second}), params)
        zero = ((rows < 3) & first) | ((rows >= 3) & (rows < 6) & second)
        close(got["a"], jnp.where(zero[:, None], 0, exact["a"]))


@pytest.mark.parametrize("kind", ["elements", "converged"])
def test_under_strict_promotion(kind):
    """Of dtypes and of ranks, in every function that takes the state of groups."""
    groups = {
        "elements": {
            "a": (fz.rows([0, 3]), True),
            "b": (fz.elements(np.eye(8, dtype=bool)), fz.unfreeze_at(3)),
            "c": lambda step, stats: stats.norm < 0.1,
            "head": fz.alternate(1),
        },
        "converged": {**fz.freeze_converged(["a", "b"], 2), "c": (fz.rows(jnp.array([0, 3])), fz.freeze_at(3))},
    }
    tx = fz.freeze_when(optax.sgd(0.1, momentum=0.9), groups[kind], optax.clip(1.0))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        params = init()
        state = tx.init(params)
        jax.eval_shape(grad_of, state, params)
        jax.eval_shape(tx.update, params, state, params)
        jax.eval_shape(fz.train_step(loss, tx), params, state, X)
        new, _ = fz.update_params(tx, grad_of(state, params), state, params)
        assert str(fz.summary(params, fz.spec_of(state)))
        assert fz.currently_frozen(fz.migrate(state, tx, params)) == fz.currently_frozen(state)
        fz.assert_frozen(params, new, fz.spec_of(state))
