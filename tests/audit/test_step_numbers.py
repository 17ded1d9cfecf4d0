"""A frozen number that is not an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_freeze as fz


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("value", [3, 0.5, np.float32(0.5), np.int64(3)], ids=lambda value: type(value).__name__)
def test_a_frozen_number_that_moves_is_a_leak(value, jit):
    def step(moves, state, x):
        grad = jax.grad(lambda head: jnp.sum(head * x))(state["head"])
        base = {**state["base"], "count": state["base"]["count"] + (1 if moves else 0)}
        return {"base": base, "head": state["head"] - 0.1 * grad, "other": state["other"] + 1}

    state = {"base": {"count": value, "same": value}, "head": jnp.ones(3), "other": value}
    for moves in (True, False):

        def one(state, x, moves=moves):
            return step(moves, state, x)

        report = fz.audit_step(jax.jit(one) if jit else one, state, jnp.ones(3), params="", frozen=["base", "other"])
        leaks = [("moved", "base/count")] * moves + [("moved", "other")]
        assert [(leak.kind, leak.path) for leak in report.leaks] == leaks, str(report)


@pytest.mark.parametrize("value", [3, 0.5])
def test_also_where_the_parameters_are_selected_by_a_number(value):
    def step(state, x):
        grad = jax.grad(lambda head: jnp.sum(head * x))(state["head"])
        return {**state, "base": state["base"] + 1, "head": state["head"] - 0.1 * grad}

    state = {"base": value, "same": value, "head": jnp.ones(3), "version": 2}
    params = lambda state: {2: {name: state[name] for name in ("base", "same", "head")}}[state["version"]]  # noqa: E731
    report = fz.audit_step(step, state, jnp.ones(3), params=params, frozen=["base", "same"])
    assert [(leak.kind, leak.path) for leak in report.leaks] == [("moved", "base")], str(report)
