"""Groups that freeze by themselves: AutoFreeze's rule, and conditions that see the gradients of their groups."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze import checkpoint

NAMES = ("a", "b", "c", "d", "head")
SHAPES = {"a": (3,), "b": (40, 2), "c": (2, 2, 2), "d": (1,), "head": (5,)}
PARAMS = {name: jnp.ones(shape) for name, shape in SHAPES.items()}


def recorded(seed, steps=60):
    """Gradients that shrink, each group at a pace of its own, with noise."""
    rng = np.random.default_rng(seed)
    pace = rng.uniform(0.9, 1.01, len(NAMES))
    grads = [
        {
            name: rng.normal(size=SHAPES[name]).astype(np.float32) * rng.uniform(0.5, 2) * pace[i] ** step
            for i, name in enumerate(NAMES)
        }
        for step in range(steps)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)


def autofreeze(norms, interval, percentile):
    """How many groups are frozen before each update and after the last, by the rule of the paper's program."""
    start, previous, history = 0, None, [0]
    for step in range(len(norms)):
        if (step + 1) % interval == 0:
            now = norms[step + 1 - interval : step + 1].sum(axis=0)
            if previous is not None:
                changes = np.abs(previous - now) / previous
                threshold = np.percentile(changes[start:], percentile)
                start = next(i for i in range(start, len(now)) if changes[i] >= threshold)
            previous = now
        history.append(start)
    return history


def norms_of(grads):
    each = [np.asarray(grads[name], np.float64).reshape(len(grads[name]), -1) for name in NAMES]
    return np.stack([np.linalg.norm(g, axis=1) for g in each], axis=1)


@functools.partial(jax.jit, static_argnums=0)
def scanned(tx, params, state, grads):
    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        carry = optax.apply_updates(params, updates), state
        return carry, (fz.currently_frozen(state), carry)

    return jax.lax.scan(step, (params, state), grads)[1]


def run(tx, grads, state=None, params=PARAMS):
    """What is frozen before each update and after the last; the parameters and states after each."""
    state = tx.init(params) if state is None else state
    first = fz.currently_frozen(state)
    frozen, after = scanned(tx, params, state, grads)
    return [first, *[{name: bool(frozen[name][i]) for name in first} for i in range(len(grads["a"]))]], after


def settle(names, **options):
    return fz.freeze_converged(list(names), **{"every": 5, **options})


EAGER_TO_FREEZE = fz.freeze_when(optax.sgd(0.1), settle(NAMES, percentile=100))


class TestTheRule:
    @pytest.mark.parametrize(("interval", "percentile"), [(5, 0), (5, 30), (7, 77.7), (1, 100)])
    def test_is_that_of_autofreeze(self, interval, percentile):
        """Which decides at the ends of intervals, from the second on."""
        tx, last = fz.freeze_when(optax.sgd(0.1), settle(NAMES, every=interval, percentile=percentile)), []
        for seed in range(3):
            grads = recorded(seed)
            frozen, (_, states) = run(tx, grads)
            expected = autofreeze(norms_of(grads), interval, percentile)
            assert [[now[name] for name in NAMES] for now in frozen] == [[i < n for i in range(5)] for n in expected]
            flags = [states.groups[name].condition_state.converged for name in NAMES]
            assert np.array_equal(np.stack(flags).sum(axis=0), expected[1:])
            assert all(leaf.shape == (60,) for leaf in jax.tree.leaves(states.groups))
            last.append(expected[-1])
        assert any(last) is (percentile > 0)

    def test_the_order_is_that_of_the_patterns(self):
        """And not that of the leaves, nor of the mapping given to ``freeze_when``."""
        grads = recorded(1)
        conditions = settle(NAMES[::-1])
        frozen, _ = run(fz.freeze_when(optax.sgd(0.1), {name: conditions[name] for name in ("c", "a", "head")}), grads)
        expected = autofreeze(norms_of(grads)[:, [4, 2, 0]], 5, 50)
        order = [[now[name] for name in ("head", "c", "a")] for now in frozen]
        assert order == [[i < n for i in range(3)] for n in expected]
        assert expected[-1] == 2

    def test_two_calls_are_compared_by_themselves(self):
        """And a group alone is compared with nothing."""
        grads = recorded(3)
        groups = settle("ab") | settle("cd", every=3) | {"head": settle(["head", "other"])["head"]}
        tx = fz.freeze_when(optax.sgd(0.1), groups)
        jax.jit(lambda state: state, donate_argnums=0)(tx.init(PARAMS))  # each buffer once
        frozen, _ = run(tx, grads)
        norms = norms_of(grads)
        for names, its, interval in (("ab", norms[:, :2], 5), ("cd", norms[:, 2:4], 3)):
            assert [sum(now[name] for name in names) for now in frozen] == autofreeze(its, interval, 50)
        assert not any(now["head"] for now in frozen)


class TestGradientsThatAreNotNumbers:
    def test_no_change_in_that_interval_and_the_next(self):
        """A group of such a gradient does not freeze, nor those behind it; the others are compared without it."""
        tx, grads = EAGER_TO_FREEZE, recorded(4)
        assert run(tx, grads)[0][10] == dict(zip(NAMES, [True, True, True, False, False], strict=True))
        for bad in (np.nan, np.inf, 1e30):
            frozen, _ = run(tx, {**grads, "b": grads["b"].at[7, 0, 0].set(bad)})
            assert [sum(now.values()) for now in frozen[:20]] == [0] * 10 + [1] * 10
            assert frozen[20]["b"]

    def test_a_gradient_of_zeros_is_not_settled(self):
        for zero in (0, 1):
            grads = recorded(4)
            grads[NAMES[zero]] *= 0
            frozen, (_, state) = run(EAGER_TO_FREEZE, grads)
            assert all(sum(now.values()) <= zero for now in frozen)
            assert frozen[-1]["a"] is (zero == 1)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))

    def test_a_frozen_group_keeps_still_whatever_its_gradient(self):
        tx = fz.freeze_when(optax.adamw(0.1), settle(NAMES, percentile=100))
        frozen, (_, states) = run(tx, recorded(4, steps=40))
        state = jax.tree.map(lambda x: x[-1], states)
        assert frozen[-1]["a"]
        assert state.groups["a"].condition_state.previous > 0, "what it was frozen by"
        for value in (0.0, np.nan):
            grads = {name: jnp.full(shape, value if name == "a" else 1.0) for name, shape in SHAPES.items()}
            new, update = state, jax.jit(tx.update)
            for _ in range(6):
                updates, new = update(grads, new, PARAMS)
                assert bits(optax.apply_updates(PARAMS, updates)["a"]) == bits(PARAMS["a"])
                assert bits(new.groups["a"]) == bits(state.groups["a"])
            assert bits(new.groups["head"].condition_state) != bits(state.groups["head"].condition_state)

    def test_norms_in_float32(self):
        params = {"a": jnp.ones(4096, jnp.bfloat16), "b": jnp.ones(2, jnp.complex64)}
        tx = fz.freeze_when(optax.sgd(0.1), settle("ab"))
        grads = {"a": params["a"], "b": jnp.full(2, 3 + 4j)}
        _, state = jax.jit(tx.update)(grads, tx.init(params), params)
        assert [state.groups[name].condition_state.sum.dtype for name in "ab"] == [jnp.float32] * 2
        assert state.groups["a"].condition_state.sum == 64
        np.testing.assert_allclose(state.groups["b"].condition_state.sum, 50**0.5, rtol=1e-6)


class TestCompany:
    def test_parts_of_leaves(self):
        """Each group has the norm of its own elements."""
        params = {"layers": jnp.ones((3, 4)), "head": jnp.ones(2)}
        mask = np.arange(12).reshape(3, 4) % 3 == 0
        grads = {"layers": jnp.arange(12.0).reshape(3, 4), "head": jnp.array([3.0, 4.0])}
        elements = [mask & (np.arange(3)[:, None] == i) for i in range(3)]
        for masks, its in (
            ([fz.rows(i) for i in range(3)], np.ones((3, 4))),
            (elements, mask),
            ([fz.elements(each, compact=True) for each in elements], mask),
        ):
            groups = {name: (each, small) for name, each in zip(["*", "layers", "layers/**"], masks, strict=True)}
            groups = {"head": small, **groups}
            tx = fz.freeze_when(optax.sgd(0.1), groups)
            _, state = jax.jit(tx.update)(grads, tx.init(params), params)
            norms = [state.groups[name].condition_state.norm for name in state.plan.names]
            np.testing.assert_allclose(norms, [5.0, *np.linalg.norm(grads["layers"] * its, axis=1)], rtol=1e-6)

    def test_the_gradients_are_those_given_to_update(self):
        """Before what is coupled, and each of those that are accumulated."""
        grads, inner = recorded(1), optax.MultiSteps(optax.adamw(0.1), 2)
        frozen, _ = run(fz.freeze_when(inner, settle(NAMES), coupled=optax.clip_by_global_norm(0.1)), grads)
        assert [sum(now.values()) for now in frozen] == autofreeze(norms_of(grads), 5, 50)

    def test_on_eight_devices(self):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
        params = {name: jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, P("x"))) for name in "abc"}
        tx = fz.freeze_when(optax.adam(0.1), settle("abc", every=1))
        shardings = fz.state_shardings(tx, params)
        assert all(s.spec == P() for s in jax.tree.leaves(shardings.groups["a"].condition_state))
        sizes, counts = np.array([[4, 4, 4], [3.9, 3, 2], [3.8, 2.9, 1]]), []
        with jax.set_mesh(mesh):
            state = jax.jit(tx.init, out_shardings=shardings)(params)
            step = jax.jit(tx.update, out_shardings=(jax.tree.map(lambda p: p.sharding, params), shardings))
            for row in sizes:
                _, state = step({n: params[n] * size for n, size in zip("abc", row, strict=True)}, state, params)
                counts.append(sum(fz.currently_frozen(state).values()))
        assert step._cache_size() == 1
        assert counts == autofreeze(sizes * 8, 1, 50)[1:] == [0, 1, 2]
        previous = [state.groups[name].condition_state.previous for name in "bc"]
        np.testing.assert_allclose(previous, [2.9 * 8, 8], rtol=1e-6)


def small(step, stats):
    return (step > 5) & (stats.norm < 0.5)


class TestResume:
    """In the middle of an interval, with some groups frozen and others not."""

    @pytest.mark.parametrize("groups", [settle(NAMES, percentile=30), {"a": small, "b": fz.alternate(2)}])
    def test_goes_on_bit_for_bit(self, groups, tmp_path):
        tx, grads, stop = fz.freeze_when(optax.adam(0.1), groups), recorded(3), 23
        whole, (all_params, all_states) = run(tx, grads)
        at, state = jax.tree.map(lambda x: x[stop - 1], (all_params, all_states))
        end = jax.tree.map(lambda x: x[-1], (all_params, all_states))
        checkpoint.save(tmp_path, at, False, step=stop, opt_state=state)
        restored = checkpoint.restore(tmp_path, PARAMS, opt_state=tx.init(PARAMS))[:2]
        for its_params, its_state in (restored, pickle.loads(pickle.dumps((at, state)))):
            rest, after = run(tx, jax.tree.map(lambda g: g[stop:], grads), its_state, its_params)
            assert rest == whole[stop:]
            assert bits(jax.tree.map(lambda x: x[-1], after)) == bits(end)
        assert len({str(now) for now in whole}) > 1

    def test_migrate_carries_it(self):
        """Of the groups that are left, to another percentile: what was frozen stays frozen, and counting goes on."""
        grads = recorded(2, steps=33)
        frozen, (_, states) = run(fz.freeze_when(optax.adam(0.1), settle(NAMES, percentile=30)), grads)
        assert frozen[-1]["a"]
        state = jax.tree.map(lambda x: x[-1], states)
        tx = fz.freeze_when(optax.adam(0.1), {name: settle(NAMES, percentile=60)[name] for name in "abcd"})
        migrated, report = fz.migrate(state, tx, PARAMS, report=True)
        for name in "abcd":
            assert bits(migrated.groups[name]) == bits(state.groups[name])
        assert fz.currently_frozen(migrated) == {name: frozen[-1][name] for name in "abcd"}
        assert "groups/a/condition_state/converged" in report.carried
        assert "groups/head/condition_state/converged" in report.dropped

    @pytest.mark.parametrize(
        ("before", "after", "frozen"),
        [
            ("bcd", "abcd", ""),  # a new group at the input trains, and so do the groups after it
            ("abd", "abcd", "ab"),
            ("abc", "bc", "b"),
            ("abcd", "ab", "a"),  # the last group never freezes
        ],
    )
    def test_migrated_to_other_groups_they_freeze_from_the_input_end(self, before, after, frozen):
        """Groups that train again converge anew."""
        old, new = (fz.freeze_when(optax.sgd(0.1), settle(names)) for names in (before, after))
        state = old.init(PARAMS)
        for name in before[:-1]:
            stats = state.groups[name].condition_state._replace(converged=jnp.array(True))
            state.groups[name] = state.groups[name]._replace(condition_state=stats)
        state = fz.migrate(state, new, PARAMS)
        says = {name: name in frozen for name in after}
        assert fz.currently_frozen(state) == says
        updates, state = new.update(PARAMS, state, PARAMS)
        assert {name: not updates[name].any() for name in after} == says
        assert {name: bool(state.groups[name].condition_state.converged) for name in after} == says

    def test_migrated_in_mid_interval_a_new_group_waits_for_a_whole_one(self):
        grads, names = recorded(2), NAMES[1:]
        tx = fz.freeze_when(optax.sgd(0.1), fz.gradual_unfreeze(NAMES, 1))
        _, (_, states) = run(tx, jax.tree.map(lambda g: g[:12], grads))
        new = fz.freeze_when(optax.sgd(0.1), settle(NAMES, percentile=100))
        state = fz.migrate(jax.tree.map(lambda x: x[-1], states), new, PARAMS)
        assert state.step == 12
        frozen, _ = run(new, jax.tree.map(lambda g: g[12:], grads), state)
        expected = autofreeze(norms_of(grads)[15:], 5, 100)
        assert [sum(now.values()) for now in frozen[3:]] == expected
        assert len(names) >= expected[-1] > 0


class TestConditionsOfOnesOwn:
    def test_see_the_gradients_of_their_group(self):
        """The norms of the updates in which it trained."""
        grads = recorded(0, steps=9)
        tx = fz.freeze_when(optax.sgd(0.1), {"b": lambda step, stats: (step % 3 == 2) | (stats.norm < 0)})
        assert np.isinf(tx.init(PARAMS).groups["b"].condition_state.norm)
        frozen, (_, states) = run(tx, grads)
        assert [now["b"] for now in frozen] == [step % 3 == 2 for step in range(10)]
        stats, norms = states.groups["b"].condition_state, norms_of(grads)[:, 1]
        trained = [[i for i in range(step + 1) if i % 3 != 2] for step in range(9)]
        np.testing.assert_allclose(stats.norm, [norms[its[-1]] for its in trained], rtol=1e-5)
        np.testing.assert_allclose(stats.total, [norms[its].sum() for its in trained], rtol=1e-5)
        assert stats.updates.tolist() == [len(its) for its in trained]

    def test_a_gradient_that_is_not_a_number(self):
        grads = jax.tree.map(lambda g: jnp.abs(g) + 1, recorded(0, steps=4))
        grads["a"] = grads["a"].at[1].set(jnp.nan).at[2].set(jnp.inf)
        frozen, (_, state) = run(fz.freeze_when(optax.sgd(0.1), {"a": lambda step, stats: stats.norm < 1e9}), grads)
        assert [now["a"] for now in frozen] == [False, True, True, True, True]
        frozen, (_, state) = run(fz.freeze_when(optax.sgd(0.1), {"a": lambda step, stats: stats.norm < 1.0}), grads)
        assert [now["a"] for now in frozen] == [False] * 5
        stats = state.groups["a"].condition_state
        assert stats.updates[-1] == 2
        np.testing.assert_allclose(stats.total[-1], norms_of(grads)[[0, 3], 0].sum(), rtol=1e-5)

    @pytest.mark.parametrize(
        "condition",
        [
            functools.partial(lambda step, stats, bound: stats.norm < bound, bound=1e9),
            lambda step, stats, bound=1e9: stats.norm < bound,
            jax.jit(lambda step, stats: stats.norm < 1e9),
            type("Small", (), {"__call__": lambda self, step, stats: stats.norm < 1e9})(),
        ],
        ids=["partial", "default", "jit", "object"],
    )
    def test_are_told_by_their_signature(self, condition):
        tx = fz.freeze_when(optax.sgd(0.1), {"a": condition})
        state = tx.init(PARAMS)
        assert fz.currently_frozen(state) == {"a": False}
        assert fz.currently_frozen(tx.update(PARAMS, state, PARAMS)[1]) == {"a": True}

    @pytest.mark.parametrize(
        "condition",
        [lambda step: step < 2, lambda step, stats=None: step < 2, lambda *args: args[-1] < 2, fz.unfreeze_at(2), True],
        ids=["step", "default", "args", "unfreeze_at", "switch"],
    )
    def test_others_have_no_state_and_no_arithmetic(self, condition):
        tx = fz.freeze_when(optax.sgd(0.1), {"a": condition, "b": fz.freeze_at(3)})
        state = tx.init(PARAMS)
        assert len(jax.tree.leaves(state)) == (2 if condition is True else 1)
        assert "sqrt" not in str(jax.make_jaxpr(tx.update)(PARAMS, state, PARAMS))
        seeing = fz.freeze_when(optax.sgd(0.1), {"a": small, "b": fz.freeze_at(3)})
        assert "sqrt" in str(jax.make_jaxpr(seeing.update)(PARAMS, seeing.init(PARAMS), PARAMS))


def test_each_says_how_it_was_made():
    groups = fz.freeze_converged(["a", fz.path("b"), ("c", "d")], 10, 75)
    assert list(groups) == ["a", fz.path("b"), fz.path("c", "d")]
    assert repr(groups["a"]).endswith(", every=10, percentile=75)['a']")
    assert eval(repr(groups["a"])) == groups["a"] != groups[fz.path("b")]
    assert eval(repr(settle("ab")["b"])) == settle("ab")["b"] != settle("ab", every=6)["b"]
