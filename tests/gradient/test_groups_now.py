"""The gradient of the groups of ``freeze_when`` that train now."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze._optimizer.conditions import occurring
from optax_freeze._precompute.flops import flops

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


SETS = [(), ("a",), ("b",), ("a", "b"), ("a", "b", "c"), ("c",)]


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_are_those_of_the_groups_that_train_and_zeros(jit):
    state, params, traces = state_of(dict.fromkeys("abc", True)), init(), []

    def grads(state, params):
        traces.append(1)
        return grad_of(state, params)

    grads = jax.jit(grads) if jit else grads
    for frozen in SETS:
        state = fz.set_frozen(state, {name: name in frozen for name in "abc"})
        got = grads(state, params)
        close(got, masked(params, frozen))
        assert all(not got[name].any() for name in frozen)
        assert got["steps"] == optax.MaskedNode()
    assert len(traces) == (1 if jit else len(SETS))


def branches_of(fun, *args):
    """The programs of the one switch in a function."""
    eqns = jax.make_jaxpr(fun)(*args).eqns
    [switch] = [eqn for eqn in eqns if eqn.primitive.name == "cond"]
    return switch.params["branches"]


def test_a_program_costs_what_its_groups_cost():
    state, params = state_of(dict.fromkeys("abc", True)), init()
    costs = {flops(branch.eqns) for branch in branches_of(lambda state, params: grad_of(state, params), state, params)}
    assert len(costs) > 4
    step = jax.make_jaxpr(lambda params: fz.grad(loss, fz.only("head"))(params, X))(params)
    whole = jax.make_jaxpr(lambda params: fz.grad(loss, False)(params, X))(params)
    assert min(costs) == pytest.approx(flops(step.eqns), rel=0.1)  # and zeros
    assert max(costs) == pytest.approx(flops(whole.eqns), rel=0.1)


@pytest.mark.parametrize(
    ("groups", "sets"),
    [
        (fz.gradual_unfreeze(["c", "b", "a"], 10), 3),  # c trains from step 0
        ({"a": fz.freeze_at(5), "b": fz.unfreeze_at(5)}, 2),
        ({"a": fz.freeze_at(5), "b": fz.unfreeze_at(9)}, 3),
        ({"a": fz.alternate(3), "b": fz.alternate(3, 3)}, 2),
        ({"a": fz.alternate(3), "b": fz.alternate(2)}, 4),
        ({"a": fz.alternate(3), "b": fz.unfreeze_at(4), "c": False}, 8),
        ({"a": lambda step: step < 3, "b": fz.unfreeze_at(3)}, 4),
        ({"a": True, "b": True, "c": False}, 8),
    ],
)
def test_there_is_a_program_for_each_set_that_can_occur(groups, sets):
    state, params = state_of(groups), init()
    step = lambda state, params: grad_of(state, params)  # noqa: E731
    assert len(branches_of(step, state, params)) == sets
    few = branches_of(lambda state, params: grad_of(state, params, branches=2), state, params)
    assert len(few) == 2
    for step_now in (0, 2, 3, 4, 5, 9, 10, 20):
        now = state._replace(step=jnp.int32(step_now))
        frozen = [name for name, is_frozen in fz.currently_frozen(now).items() if is_frozen]
        for options in ({}, {"branches": 2}, {"branches": 1}):
            close(jax.jit(functools.partial(grad_of, **options))(now, params), masked(params, frozen))


def test_the_sets_that_occur_are_those_of_all_steps():
    for conditions in (
        [fz.alternate(3, 1), fz.alternate(5), fz.unfreeze_at(17)],
        [fz.alternate(4), fz.freeze_at(9), fz.unfreeze_at(22)],
        [fz.unfreeze_at(0), fz.freeze_at(0)],
    ):
        of_steps = {tuple(bool(condition(step)) for condition in conditions) for step in range(200)}
        assert set(occurring(conditions)) == of_steps


def test_many_switches_take_the_programs_that_save_most():
    params = {f"w{i:02d}": jnp.full((2, 2), 0.1) for i in range(14)}

    def loss(params):
        return functools.reduce(lambda x, w: jnp.tanh(x @ w + 1), params.values(), jnp.eye(2)).sum()

    state = fz.freeze_when(optax.sgd(0.1), dict.fromkeys([*params][:13], True)).init(params)
    step = lambda state, params: fz.grad(loss, fz.spec_of(state))(params)  # noqa: E731
    assert len(branches_of(step, state, params)) == 16
    got = jax.jit(step)(state, params)
    np.testing.assert_allclose(got["w13"], fz.grad(loss, False)(params)["w13"], rtol=1e-5)
    assert not got["w00"].any()


def test_layers_that_freeze_in_their_order_have_programs():
    names = [f"w{i}" for i in range(8)]
    params = {name: jnp.full((2, 2), 0.1) for name in names}
    state = fz.freeze_when(optax.sgd(0.1), dict.fromkeys(names[:7], True)).init(params)
    branches = fz.spec_of(state).branches(16)
    assert len(branches) == 16
    for n in range(8):
        assert tuple(i < n for i in range(7)) in branches
        assert tuple(i >= n for i in range(7)) in branches


class TestElements:
    def test_rows_and_masks(self):
        mask = jnp.arange(64).reshape(8, 8) % 3 == 0
        groups = {"a": (fz.rows(slice(0, 5)), True), "b": (fz.elements(mask), True), "c": True}
        params, state = init(), state_of(groups)
        exact = fz.grad(loss, False)(params, X)
        for frozen in ((), ("a",), ("b",), ("a", "b", "c")):
            now = fz.set_frozen(state, {name: name in frozen for name in groups})
            got = jax.jit(grad_of)(now, params)
            rows = jnp.where((jnp.arange(8) < 5)[:, None] & ("a" in frozen), 0, exact["a"])
            ones = jnp.where(mask & ("b" in frozen), 0, exact["b"])
            whole = jnp.where("c" in frozen, 0, exact["c"])
            close(got, {**exact, "a": rows, "b": ones, "c": whole})

    def test_two_groups_of_rows_in_one_leaf(self):
        groups = {"a": (fz.rows(slice(0, 3)), True), "[a]": (fz.rows(slice(3, 6)), False)}
        params, state = init(), state_of(groups)
        exact = fz.grad(loss, False)(params, X)
        for first in (False, True):
            for second in (False, True):
                now = fz.set_frozen(state, {"a": first, "[a]": second})
                rows = np.arange(8)
                zero = ((rows < 3) & first) | ((rows >= 3) & (rows < 6) & second)
                close(jax.jit(grad_of)(now, params)["a"], jnp.where(zero[:, None], 0, exact["a"]))


def test_training_is_that_of_the_full_gradient_in_one_compilation():
    tx = fz.freeze_when(optax.adamw(1e-2), fz.gradual_unfreeze(["head", "c", "b", "a"], 2))
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def step(saves, params, state, x):
        traces.append(saves)
        grads = grad_of(state, params, x) if saves else fz.grad(loss, False)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    runs = {}
    for saves in (False, True):
        params, state = init(), tx.init(init())
        for i in range(8):
            params, state = step(saves, params, state, X + i)
            if i == 3:
                assert bits(params["a"]) == bits(init()["a"])
        runs[saves] = params
    close(runs[True], runs[False])
    assert traces == [False, True]


def test_value_auxiliary_output_and_argnums():
    state, params = state_of({"a": True, "b": False}), init()

    def with_aux(x, params):
        return loss(params, x), {"x": x}

    step = jax.jit(lambda state, params: fz.value_and_grad(with_aux, fz.spec_of(state), 1, has_aux=True)(X, params))
    (value, aux), grads = step(state, params)
    np.testing.assert_allclose(value, loss(params, X), rtol=1e-6)
    assert bits(aux["x"]) == bits(X)
    close(grads, masked(params, "a"))


def test_everything_frozen_gives_the_value_and_zeros():
    state, params = state_of(dict.fromkeys(NAMES, True)), init()
    value, grads = jax.jit(lambda s, p: fz.value_and_grad(loss, fz.spec_of(s))(p, X))(state, params)
    np.testing.assert_allclose(value, loss(params, X), rtol=1e-6)
    assert not any(grads[name].any() for name in NAMES)


def test_within_other_states_and_scan():
    params = init()
    tx = optax.chain(optax.clip_by_global_norm(1.0), fz.freeze_when(optax.adam(1e-2), {"a": fz.unfreeze_at(2)}))

    def step(carry, x):
        params, state = carry
        updates, state = tx.update(grad_of(state, params, x), state, params)
        return (optax.apply_updates(params, updates), state), params["a"]

    _, history = jax.lax.scan(step, (params, tx.init(params)), jnp.stack([X] * 4))
    assert bits(history[2]) == bits(params["a"])
    assert bits(history[3]) != bits(params["a"])


def test_inside_of_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    state, params = state_of({"a": True, "b": False}), init()

    def step(state, params, x):
        return fz.grad(lambda p: jax.lax.pmean(loss(p, x), "data"), fz.spec_of(state))(params)

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    close(jax.jit(sharded)(state, params, X), masked(params, "a"))


@pytest.mark.parametrize("kind", ["switches", "elements", "converged"])
def test_under_strict_promotion(kind):
    """Of dtypes and of ranks, in every function that takes the state of groups."""
    groups = {
        "switches": {"a": True, "b": fz.alternate(1), "c": lambda step, stats: stats.norm < 0.1},
        "elements": {"a": (fz.rows([0, 3]), True), "b": (fz.elements(np.eye(8, dtype=bool)), fz.unfreeze_at(3))},
        "converged": {**fz.freeze_converged(["a", "b"], 2), "c": (fz.rows(jnp.array([0, 3])), fz.freeze_at(3))},
    }
    tx = fz.freeze_when(optax.sgd(0.1, momentum=0.9), groups[kind], optax.clip(1.0))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        params = init()
        state = tx.init(params)
        jax.eval_shape(grad_of, state, params)
        jax.eval_shape(tx.update, params, state, params)
        jax.eval_shape(fz.train_step(loss, tx, branches=2), params, state, X)
        new, _ = fz.update_params(tx, grad_of(state, params), state, params)
        assert str(fz.summary(params, fz.spec_of(state)))
        assert fz.currently_frozen(fz.migrate(state, tx, params)) == fz.currently_frozen(state)
        fz.assert_frozen(params, new, fz.spec_of(state))


class TestErrors:
    def test_elsewhere_inside_of_jit(self):
        state, params = state_of({"a": True}), init()
        with pytest.raises(ValueError, match="the frozen groups are not known while the program is traced"):
            jax.jit(lambda state: fz.partition(params, fz.spec_of(state)))(state)
        assert fz.resolve(params, fz.spec_of(state))["a"] is True
        assert fz.resolve(params, fz.spec_of(fz.set_frozen(state, {"a": False})))["a"] is False

    @pytest.mark.parametrize(("branches", "error"), [(0, ValueError), ("all", TypeError)])
    def test_branches(self, branches, error):
        with pytest.raises(error, match="`branches` must be a positive int"):
            fz.grad(loss, False, branches=branches)

    def test_other_parameters(self):
        with pytest.raises(ValueError, match="encoder"):
            grad_of(state_of({"a": True}), {"encoder": jnp.ones(2)})

    def test_two_schedules(self):
        params, tx = init(), fz.freeze_when(optax.sgd(0.1), {"a": True})
        with pytest.raises(ValueError, match="2 of fz"):
            fz.spec_of((tx.init(params), tx.init(params)))
