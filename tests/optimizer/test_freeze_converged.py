"""Groups that freeze by themselves: AutoFreeze's rule, and conditions that see the gradients of their groups."""

import functools
import itertools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from flax import nnx
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
    return np.stack([np.sqrt((g**2).sum(axis=1)) for g in each], axis=1)


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
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    state = tx.init(params) if state is None else state
    first = fz.currently_frozen(state)
    frozen, after = scanned(tx, params, state, grads)
    return [first, *[{name: bool(frozen[name][i]) for name in first} for i in range(len(grads["a"]))]], after


def settle(names, **options):
    return fz.freeze_converged(list(names), **{"interval": 5, **options})


class TestTheRule:
    @pytest.mark.parametrize("percentile", [0, 30, 50, 77.7, 100])
    def test_is_that_of_autofreeze(self, percentile):
        tx, last = fz.freeze_when(optax.sgd(0.1), settle(NAMES, percentile=percentile)), []
        for seed in range(5):
            grads = recorded(seed)
            frozen, _ = run(tx, grads)
            expected = autofreeze(norms_of(grads), 5, percentile)
            assert [[now[name] for name in NAMES] for now in frozen] == [[i < n for i in range(5)] for n in expected]
            last.append(expected[-1])
        assert any(last) is (percentile > 0)

    @pytest.mark.parametrize("interval", [1, 7, 30])
    def test_at_the_ends_of_intervals_from_the_second_on(self, interval):
        grads = recorded(0)
        frozen, _ = run(fz.freeze_when(optax.sgd(0.1), settle(NAMES, interval=interval, percentile=100)), grads)
        expected = autofreeze(norms_of(grads), interval, 100)
        assert [sum(now.values()) for now in frozen] == expected
        changed = {i for i, (before, after) in enumerate(itertools.pairwise(expected), 1) if before != after}
        assert changed
        assert all(step % interval == 0 and step >= 2 * interval for step in changed)

    def test_the_order_is_that_of_the_patterns(self):
        """And not that of the leaves, nor of the mapping given to ``freeze_when``."""
        grads = recorded(1)
        conditions = settle(NAMES[::-1])
        frozen, _ = run(fz.freeze_when(optax.sgd(0.1), {name: conditions[name] for name in ("c", "a", "head")}), grads)
        norms = norms_of(grads)[:, [4, 2, 0]]
        expected = autofreeze(norms, 5, 50)
        assert [[now[name] for name in ("head", "c", "a")] for now in frozen] == [
            [i < n for i in range(3)] for n in expected
        ]
        assert expected[-1] == 2

    def test_the_group_that_changes_most_goes_on(self):
        frozen, _ = run(fz.freeze_when(optax.sgd(0.1), settle(NAMES, interval=2, percentile=100)), recorded(2))
        assert list(frozen[-1].values()) == [True] * 4 + [False]

    def test_a_group_alone_has_nothing_to_be_compared_with(self):
        frozen, _ = run(fz.freeze_when(optax.sgd(0.1), {"b": settle(NAMES)["b"]}), recorded(2))
        assert not any(now["b"] for now in frozen)

    def test_two_calls_are_compared_by_themselves(self):
        grads = recorded(3)
        frozen, _ = run(fz.freeze_when(optax.sgd(0.1), settle("ab") | settle(["c", "d", "head"], interval=3)), grads)
        norms = norms_of(grads)
        for names, group, interval in (("ab", norms[:, :2], 5), (("c", "d", "head"), norms[:, 2:], 3)):
            assert [sum(now[name] for name in names) for now in frozen] == autofreeze(group, interval, 50)

    def test_the_statistics_are_scalars_of_the_gradient(self):
        grads = recorded(0, steps=12)
        _, (_, state) = run(fz.freeze_when(optax.sgd(0.1), settle(NAMES)), grads)
        norms = norms_of(grads)
        group = jax.tree.map(lambda x: x[-1], state.groups["head"].frozen)
        chex.assert_trees_all_close(group.sum, norms[10:, 4].sum().astype(np.float32), rtol=1e-5)
        chex.assert_trees_all_close(group.previous, norms[5:10, 4].mean().astype(np.float32), rtol=1e-5)
        assert group.seen == 2
        assert all(leaf.shape == () for leaf in jax.tree.leaves(group))


class TestGradientsThatAreNotNumbers:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
    def test_no_change_in_that_interval_and_the_next(self, bad):
        """A group of such a gradient does not freeze, nor those behind it; the others are compared without it."""
        tx, grads = fz.freeze_when(optax.sgd(0.1), settle(NAMES, percentile=100)), recorded(4, steps=40)
        assert run(tx, grads)[0][10] == dict(zip(NAMES, [True, True, True, False, False], strict=True))
        grads["b"] = grads["b"].at[7, 0, 0].set(bad)
        frozen, _ = run(tx, grads)
        assert [sum(now.values()) for now in frozen[:20]] == [0] * 10 + [1] * 10
        assert frozen[20]["b"]

    @pytest.mark.parametrize("zero", [0, 1], ids=["first", "second"])
    def test_a_gradient_of_zeros_is_not_settled(self, zero):
        grads = recorded(4, steps=40)
        grads[NAMES[zero]] *= 0
        frozen, (_, state) = run(fz.freeze_when(optax.sgd(0.1), settle(NAMES, percentile=100)), grads)
        assert all(sum(now.values()) <= zero for now in frozen)
        assert frozen[-1]["a"] is (zero == 1)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))

    def test_a_frozen_group_keeps_still_whatever_its_gradient(self):
        tx = fz.freeze_when(optax.adamw(0.1), settle(NAMES, percentile=100))
        frozen, (_, states) = run(tx, recorded(4, steps=40))
        state = jax.tree.map(lambda x: x[-1], states)
        assert frozen[-1]["a"]
        assert state.groups["a"].frozen.previous > 0, "what it was frozen by"
        for value in (0.0, np.nan):
            grads = {name: jnp.full(shape, value if name == "a" else 1.0) for name, shape in SHAPES.items()}
            new, update = state, jax.jit(tx.update)
            for _ in range(11):
                updates, new = update(grads, new, PARAMS)
                assert bits(optax.apply_updates(PARAMS, updates)["a"]) == bits(PARAMS["a"])
                assert bits(new.groups["a"]) == bits(state.groups["a"])
            assert bits(new.groups["head"].frozen) != bits(state.groups["head"].frozen)

    def test_norms_in_float32(self):
        params = {"a": jnp.ones(4096, jnp.bfloat16), "b": jnp.ones(2, jnp.complex64)}
        tx = fz.freeze_when(optax.sgd(0.1), settle("ab"))
        grads = {"a": params["a"], "b": jnp.full(2, 3 + 4j)}
        _, state = jax.jit(tx.update)(grads, tx.init(params), params)
        assert [state.groups[name].frozen.sum.dtype for name in "ab"] == [jnp.float32] * 2
        assert state.groups["a"].frozen.sum == 64
        np.testing.assert_allclose(state.groups["b"].frozen.sum, 50**0.5, rtol=1e-6)


X = jax.random.normal(jax.random.key(0), (4, 8))


def loss(params, x):
    for name in "abc":
        x = jnp.tanh(x @ params[name])
    return jnp.mean((x @ params["head"]) ** 2)


def net():
    keys = jax.random.split(jax.random.key(1), 4)
    return {name: jax.random.normal(key, (8, 8)) / 3 for name, key in zip([*"abc", "head"], keys, strict=True)}


LAYERS = [*"abc", "head"]


class TestTheBackwardPass:
    def test_training_is_that_of_the_full_gradient_in_one_compilation(self):
        tx = fz.freeze_when(optax.adam(1e-2), settle(LAYERS, interval=3, percentile=100))
        traces, runs = [], {}

        @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
        def step(saves, params, state, x):
            traces.append(saves)
            grads = fz.grad(loss, fz.spec_of(state) if saves else False)(params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for saves in (False, True):
            params, state = net(), tx.init(net())
            runs[saves] = [(fz.currently_frozen(state), jax.tree.map(np.array, params))]
            for i in range(20):
                params, state = step(saves, params, state, X + i / 10)
                runs[saves].append((fz.currently_frozen(state), jax.tree.map(np.array, params)))
        assert traces == [False, True]
        chex.assert_trees_all_close(runs[False], runs[True], rtol=1e-4, atol=1e-6)
        assert 0 < sum(runs[True][-1][0].values()) < 4
        for (frozen, before), (_, after) in itertools.pairwise(runs[True]):
            for name, is_frozen in frozen.items():
                assert (bits(before[name]) == bits(after[name])) is is_frozen

    def test_what_the_state_says_is_what_the_update_does(self):
        tx = fz.freeze_when(optax.sgd(0.1), settle(LAYERS, interval=2, percentile=100))
        params, state = net(), tx.init(net())
        for i in range(8):
            frozen = [name for name, is_frozen in fz.currently_frozen(state).items() if is_frozen]
            spec = fz.resolve(params, fz.spec_of(state))
            assert [name for name in spec if spec[name] is True] == frozen
            updates, state = tx.update(fz.grad(loss, False)(params, X + i), state, params)
            assert [name for name in params if not updates[name].any()] == frozen
            params = optax.apply_updates(params, updates)
        assert frozen

    def test_set_frozen_refuses(self):
        state = fz.freeze_when(optax.sgd(0.1), settle(LAYERS)).init(net())
        with pytest.raises(ValueError, match=r"frozen by a schedule(.|\n)*freeze_converged\(\['a', 'b', 'c', 'head'\]"):
            fz.set_frozen(state, {"a": True})


class TestCompany:
    def test_parts_of_leaves(self):
        """Each group has the norm of its own elements."""
        params = {"layers": jnp.ones((3, 4)), "head": jnp.ones(2)}
        calls = fz.freeze_converged(["layers", fz.path("layers"), "layers/**", "head"], 1)
        mask = np.arange(12).reshape(3, 4) % 3 == 0
        grads = {"layers": jnp.arange(12.0).reshape(3, 4), "head": jnp.array([3.0, 4.0])}
        for masks in (
            [fz.rows(i) for i in range(3)],
            [fz.elements(mask & (np.arange(3)[:, None] == i), compact=c) for c in (False,) for i in range(3)],
            [fz.elements(mask & (np.arange(3)[:, None] == i), compact=True) for i in range(3)],
        ):
            pairs = zip(calls.items(), masks, strict=False)
            groups = {pattern: (m, condition) for (pattern, condition), m in pairs} | {"head": calls["head"]}
            tx = fz.freeze_when(optax.adam(0.1), groups)
            _, state = jax.jit(tx.update)(grads, tx.init(params), params)
            rows = np.arange(12.0).reshape(3, 4)
            own = [np.linalg.norm(rows[i] if masks[0] == fz.rows(0) else rows[i][mask[i]]) for i in range(3)]
            means = [state.groups[name].frozen.previous for name in state.spec.names]
            np.testing.assert_allclose(means, [*own, 5.0], rtol=1e-6)

    def test_rows_of_a_stack_freeze_one_after_the_other(self):
        names = ["layers", fz.path("layers"), "layers/**"]
        conditions = fz.freeze_converged(names, interval=5)
        groups = {name: (fz.rows(i), condition) for i, (name, condition) in enumerate(conditions.items())}
        grads, shape = recorded(1), (3, 80)
        rows = [np.resize(np.asarray(grads[name]).reshape(60, -1), (60, 80)) for name in "abc"]
        stacked = {"a": jnp.asarray(np.stack(rows, axis=1)), "layers": jnp.asarray(np.stack(rows, axis=1))}
        params = {"a": jnp.ones(shape), "layers": jnp.ones(shape)}
        frozen, (after, _) = run(fz.freeze_when(optax.sgd(0.1), groups), stacked, params=params)
        norms = np.stack([np.linalg.norm(row, axis=1) for row in rows], axis=1)
        expected = autofreeze(norms, 5, 50)
        assert [sum(now.values()) for now in frozen] == expected
        assert expected[-1] > 0
        last = np.asarray(after["layers"])
        assert last[-2, 0].tobytes() == last[-1, 0].tobytes()
        assert last[-2, 2].tobytes() != last[-1, 2].tobytes()

    @pytest.mark.parametrize(
        "make",
        [
            lambda groups: fz.freeze_when(optax.adamw(0.1), groups, coupled=optax.clip_by_global_norm(0.1)),
            lambda groups: fz.freeze_when(optax.MultiSteps(optax.adamw(0.1), 2), groups),
            lambda groups: optax.chain(fz.freeze_when(optax.adamw(0.1), groups), optax.scale(2.0)),
        ],
        ids=["coupled", "MultiSteps", "chain"],
    )
    def test_the_gradients_are_those_given_to_update(self, make):
        grads = recorded(1)
        frozen, _ = run(make(settle(NAMES)), grads)
        assert [sum(now.values()) for now in frozen] == autofreeze(norms_of(grads), 5, 50)

    def test_accumulated_before(self):
        grads = recorded(1)
        frozen, _ = run(optax.MultiSteps(fz.freeze_when(optax.sgd(0.1), settle(NAMES)), 2), grads)
        pairs = jax.tree.map(lambda g: g.reshape(30, 2, *g.shape[1:]).mean(axis=1), grads)
        assert [sum(now.values()) for now in frozen[::2]] == autofreeze(norms_of(pairs), 5, 50)

    def test_vmap_over_an_ensemble(self):
        tx = fz.freeze_when(optax.sgd(0.1), settle(NAMES))
        runs = [recorded(seed) for seed in (0, 1)]
        stacked = jax.tree.map(lambda *g: jnp.stack(g, axis=1), *runs)
        state = jax.vmap(tx.init)(jax.tree.map(lambda p: jnp.stack([p, p]), PARAMS))
        state, _ = jax.lax.scan(
            lambda s, g: (None, jax.vmap(lambda g, s: tx.update(g, s)[1])(g, s))[::-1], state, stacked
        )
        for i, grads in enumerate(runs):
            counts = sum(int(state.groups[name].frozen.converged[i]) for name in NAMES)
            assert counts == autofreeze(norms_of(grads), 5, 50)[-1] > 0

    @pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
    def test_on_eight_devices(self, axis_type):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
        names = ["a", "b", "c"]
        params = {name: jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, P("x"))) for name in names}
        tx = fz.freeze_when(optax.adam(0.1), settle(names, interval=1))
        shardings = fz.state_shardings(tx, params)
        assert all(s.spec == P() for s in jax.tree.leaves(shardings.groups["a"].frozen))
        sizes = np.array([[4, 4, 4], [3.9, 3, 2], [3.8, 2.9, 1]])
        with jax.set_mesh(mesh):
            state = jax.jit(tx.init, out_shardings=shardings)(params)
            step = jax.jit(tx.update, out_shardings=(jax.tree.map(lambda p: p.sharding, params), shardings))
            counts = []
            for row in sizes:
                grads = {name: params[name] * size for name, size in zip(names, row, strict=True)}
                _, state = step(grads, state, params)
                counts.append(sum(fz.currently_frozen(state).values()))
        assert step._cache_size() == 1
        assert counts == autofreeze(sizes * 8, 1, 50)[1:] == [0, 1, 2]
        np.testing.assert_allclose([state.groups[name].frozen.previous for name in "bc"], [2.9 * 8, 8], rtol=1e-6)

    def test_inside_of_shard_map(self):
        """The gradients are taken as given: here averaged, so that every device decides alike."""
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        tx = fz.freeze_when(optax.sgd(0.1), settle(LAYERS, interval=2, percentile=100))

        def step(params, state, x):
            grads = jax.grad(lambda p: jax.lax.pmean(loss(p, x), "data"))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P()))
        plain, here = (net(), tx.init(net())), (net(), tx.init(net()))
        for i in range(8):
            here = sharded(*here, X + i / 10)
            updates, state = tx.update(fz.grad(loss, False)(plain[0], X + i / 10), plain[1], plain[0])
            plain = optax.apply_updates(plain[0], updates), state
        chex.assert_trees_all_close(here[0], plain[0], rtol=1e-4, atol=1e-6)
        assert fz.currently_frozen(here[1]) == fz.currently_frozen(plain[1])
        assert any(fz.currently_frozen(here[1]).values())

    def test_nnx_optimizer(self):
        model = nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(3)))
        groups = {"layers/2/bias": lambda step, stats: stats.norm < 0}
        groups |= fz.freeze_converged([f"layers/{i}" for i in range(3)], 1, 100)
        optimizer = nnx.Optimizer(model, fz.freeze_when(optax.adam(0.1), groups, tied="ignore"), wrt=nnx.Param)
        traces = []

        @nnx.jit
        def step(model, optimizer, x):
            traces.append(1)
            optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model))

        for _ in range(5):
            frozen = fz.currently_frozen(optimizer.opt_state)
            before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Param))["layers"])
            step(model, optimizer, X)
            after = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Param))["layers"])
            for i in range(3):
                assert (bits(before[i]["kernel"]) == bits(after[i]["kernel"])) is frozen[f"layers/{i}"]
        assert any(frozen.values())
        assert len(traces) == 1


class TestResume:
    """In the middle of an interval, with some groups frozen and others not."""

    @pytest.fixture(params=["freeze_converged", "own"])
    def tx(self, request):
        if request.param == "own":
            return fz.freeze_when(optax.adam(0.1), {"a": small, "b": fz.alternate(2)})
        return fz.freeze_when(optax.adam(0.1), settle(NAMES, percentile=30))

    @pytest.mark.parametrize("how", ["checkpoint", "pickle"])
    @pytest.mark.parametrize("stop", [12, 23])
    def test_goes_on_bit_for_bit(self, tx, how, stop, tmp_path):
        grads = recorded(3)
        whole, (all_params, all_states) = run(tx, grads)
        at, state = jax.tree.map(lambda x: x[stop - 1], (all_params, all_states))
        if how == "checkpoint":
            checkpoint.save(tmp_path, at, False, step=stop, opt_state=state)
            at, state = checkpoint.restore(tmp_path, PARAMS, opt_state=tx.init(PARAMS))[:2]
        else:
            at, state = pickle.loads(pickle.dumps((at, state)))
        rest, after = run(tx, jax.tree.map(lambda g: g[stop:], grads), state, at)
        assert rest == whole[stop:]
        assert len({str(now) for now in whole}) > 1
        assert bits(jax.tree.map(lambda x: x[-1], after)) == bits(
            jax.tree.map(lambda x: x[-1], (all_params, all_states))
        )

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
        assert "groups/a/frozen/converged" in report.carried
        assert "groups/head/frozen/converged" in report.dropped

    @pytest.mark.parametrize(
        ("before", "after", "frozen"),
        [
            ("bcd", "abcd", ""),  # a new group at the input trains, and so do the groups after it
            ("abd", "abcd", "ab"),
            ("acd", "abcd", "a"),
            ("abc", "bc", "b"),
            ("abcd", "ab", "a"),  # the last group never freezes
        ],
    )
    def test_migrated_to_other_groups_they_freeze_from_the_input_end(self, before, after, frozen):
        """Groups that train again converge anew."""
        old, new = (fz.freeze_when(optax.sgd(0.1), settle(names)) for names in (before, after))
        state = old.init(PARAMS)
        for name in before[:-1]:
            stats = state.groups[name].frozen._replace(converged=jnp.array(True))
            state.groups[name] = state.groups[name]._replace(frozen=stats)
        assert fz.currently_frozen(state) == {name: name != before[-1] for name in before}
        state = fz.migrate(state, new, PARAMS)
        says = {name: name in frozen for name in after}
        for _ in range(2):
            assert fz.currently_frozen(state) == says
            updates, state = new.update(PARAMS, state, PARAMS)
            assert {name: not updates[name].any() for name in after} == says
            assert {name: bool(state.groups[name].frozen.converged) for name in after} == says

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

    def test_another_interval_waits_for_a_whole_one_too(self):
        grads = recorded(2)
        _, (_, states) = run(
            fz.freeze_when(optax.sgd(0.1), settle(NAMES, percentile=0)), jax.tree.map(lambda g: g[:8], grads)
        )
        new = fz.freeze_when(optax.sgd(0.1), settle(NAMES, interval=10, percentile=100))
        state = fz.migrate(jax.tree.map(lambda x: x[-1], states), new, PARAMS)
        frozen, _ = run(new, jax.tree.map(lambda g: g[8:], grads), state)
        assert [sum(now.values()) for now in frozen[2:]] == autofreeze(norms_of(grads)[10:], 10, 100)

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (settle(NAMES), settle(NAMES, percentile=60)),
            (settle(NAMES), {**settle(NAMES), "a": lambda step: step > 3}),
            ({**settle(NAMES), "a": lambda step: step > 3}, settle(NAMES)),
            ({**settle(NAMES), "a": lambda step: step > 3}, {**settle(NAMES), "a": lambda step, stats: step > 3}),
        ],
        ids=["percentile", "a function now", "was a function", "took the step alone"],
    )
    def test_the_state_of_another_schedule_is_refused(self, before, after):
        state = fz.freeze_when(optax.sgd(0.1), before).init(PARAMS)
        tx = fz.freeze_when(optax.sgd(0.1), after)
        with pytest.raises(ValueError, match=r"a different schedule\n  at: a"):
            tx.update(PARAMS, state, PARAMS)
        tx.update(PARAMS, fz.migrate(state, tx, PARAMS), PARAMS)


def small(step, stats):
    return (step > 5) & (stats.norm < 0.5)


class TestConditionsOfOnesOwn:
    def test_see_the_gradients_of_their_group(self):
        grads = recorded(0)
        norms = norms_of(grads)[:, 1]
        seen = []

        def condition(step, stats):
            jax.debug.callback(lambda *values: seen.append(values), step, *stats, ordered=True)
            return step % 3 == 2

        tx = fz.freeze_when(optax.sgd(0.1), {"b": condition})
        state = tx.init(PARAMS)
        update = jax.jit(tx.update)
        for i in range(9):
            _, state = update(jax.tree.map(lambda g, i=i: g[i], grads), state, PARAMS)
        jax.effects_barrier()
        trained = [i for i in range(9) if i % 3 != 2]
        assert np.isinf(seen[0][1])
        for step, norm, total, updates in seen[1:9]:
            before = [i for i in trained if i < step]
            np.testing.assert_allclose([norm, total], [norms[before[-1]], norms[before].sum()], rtol=1e-5)
            assert updates == len(before)

    def test_freezes_for_good_by_a_comparison(self):
        grads = recorded(0)
        frozen, (after, _) = run(fz.freeze_when(optax.adam(0.1), {"a": small, "b": small}), grads)
        norms = norms_of(grads)
        for i, name in enumerate("ab"):
            first = next((n for n in range(6, 61) if norms[n - 1, i] < 0.5), 61)
            assert [now[name] for now in frozen] == [n >= first for n in range(61)]
            if first < 60:
                assert bits(after[name][first - 1]) == bits(after[name][-1])
        assert frozen[-1]["a"]

    def test_a_gradient_that_is_not_a_number(self):
        grads = jax.tree.map(lambda g: jnp.abs(g) + 1, recorded(0, steps=4))
        grads["a"] = grads["a"].at[1].set(jnp.nan).at[2].set(jnp.inf)
        frozen, (_, state) = run(fz.freeze_when(optax.sgd(0.1), {"a": lambda step, stats: stats.norm < 1e9}), grads)
        assert [now["a"] for now in frozen] == [False, True, True, True, True]
        frozen, (_, state) = run(fz.freeze_when(optax.sgd(0.1), {"a": lambda step, stats: stats.norm < 1.0}), grads)
        assert [now["a"] for now in frozen] == [False] * 5
        stats = state.groups["a"].frozen
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
        frozen, _ = run(fz.freeze_when(optax.sgd(0.1), {"a": condition}), recorded(0, steps=3))
        assert [now["a"] for now in frozen] == [False, True, True, True]

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

    @pytest.mark.parametrize("condition", [lambda step, stats, bound: True, lambda: True, lambda *, step: True])
    def test_take_the_step_or_the_step_and_stats(self, condition):
        with pytest.raises(
            TypeError,
            match=r"must take \(step\) or \(step, stats\)(.|\n)*expected: a function of \(step\) or \(step, stats\)",
        ):
            fz.freeze_when(optax.sgd(0.1), {"a": condition})

    @pytest.mark.parametrize(
        ("condition", "error"),
        [
            (lambda step, stats: stats.norm, "expected a bool for the group"),
            (lambda step, stats: stats.norm < 1 and step > 3, "the value of a traced array"),
            (lambda step, stats: float(stats.norm) < 1, "the value of a traced array"),
        ],
        ids=["float", "and", "value"],
    )
    def test_give_a_bool(self, condition, error):
        with pytest.raises(TypeError, match=error):
            fz.freeze_when(optax.sgd(0.1), {"a": condition}).init(PARAMS)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("head", 5), TypeError),
        ((["a"], 5), ValueError),
        (([], 5), ValueError),
        ((["a", "a"], 5), ValueError),
        ((["a", 3], 5), TypeError),
        ((["a", "b"], 0), ValueError),
        ((["a", "b"], 1.5), TypeError),
        ((["a", "b"], 5, -1), ValueError),
        ((["a", "b"], 5, 101), ValueError),
        ((["a", "b"], 5, np.nan), ValueError),
        ((["a", "b"], 5, "50"), TypeError),
        ((["a", "b"], 5, True), TypeError),
    ],
)
def test_bad_arguments(args, error):
    with pytest.raises(error, match=r"(.|\n)*expected: (.|\n)*fix: "):
        fz.freeze_converged(*args)


def test_each_says_how_it_was_made():
    groups = fz.freeze_converged(["a", fz.path("b"), ("c", "d")], 10, 75)
    assert list(groups) == ["a", fz.path("b"), fz.path("c", "d")]
    assert repr(groups["a"]).endswith(", interval=10, percentile=75)['a']")
    assert eval(repr(groups["a"])) == groups["a"] != groups[fz.path("b")]
    assert eval(repr(settle("ab")["b"])) == settle("ab")["b"] != settle("ab", interval=6)["b"]
