"""Groups that freeze and thaw while training, in one compiled program."""

import copy
import itertools
import pickle

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_equal_up_to_rounding, bits, by_path

import optax_freeze as fz

MOMENTUM = optax.sgd(0.1, momentum=0.9)


def run(tx, params, steps, *, jit=True, before_step=lambda i, state: state):
    """Parameters and states before each step and after the last."""

    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step)
    history = [(params, tx.init(params))]
    for i in range(steps):
        params, state = history[-1]
        history.append((jitted if jit else step)(params, before_step(i, state)))
    assert jitted._cache_size() == jit
    return history


def last(tx, params, steps):
    """The parameters after some steps."""
    return run(tx, params, steps)[-1][0]


def small(step, stats):
    return stats.norm < 1.0


class TestTheContract:
    def test_a_group_is_an_optimizer_of_the_steps_in_which_it_trains(self, params):
        """It begins when first thawed, and goes on where it stopped; frozen, it keeps its bits and its state."""
        noisy = optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.5, key=0))
        adamw = optax.MultiSteps(optax.adamw(optax.cosine_decay_schedule(0.1, 10)), 2).gradient_transformation()
        inner = optax.multi_transform(
            {"matrix": adamw, "vector": noisy},
            lambda p: jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "vector", p),
        )
        groups = {"encoder": lambda step: (step < 2) | (step == 4) | (step == 5)}
        histories = [run(fz.freeze_when(inner, groups), params, 8, jit=jit) for jit in (False, True)]
        for history in histories:
            for step in (0, 1, 4, 5):
                (old, before), (new, after) = history[step : step + 2]
                assert bits(new["encoder"]) == bits(old["encoder"])
                assert bits(after.groups) == bits(before.groups)
        (new, state), (jitted, _) = (history[-1] for history in histories)
        chex.assert_trees_all_close(jitted, new, rtol=1e-4, atol=1e-4)
        groups = ("encoder", state.groups["encoder"].inner_state, 4), ("head", state.ungrouped_state, 8)
        for path, own, steps in groups:
            expected, expected_state = run(inner, fz.partition(params, fz.all_except(path))[0], steps, jit=False)[-1]
            assert bits(new[path]) == bits(expected[path])
            assert bits(by_path(own)) == bits(by_path(expected_state))

    @pytest.mark.parametrize("coupled", [None, optax.clip_by_global_norm(1.0)], ids=["", "coupled"])
    def test_whatever_the_gradient_of_a_frozen_group(self, params, coupled):
        tx = fz.freeze_when(optax.adam(0.1), {"encoder": True}, coupled)
        update = jax.jit(tx.update)
        for bad, its in ((np.nan, params), (np.inf, params), (3e38, None)):
            grads = {**params, "encoder": jax.tree.map(lambda p, bad=bad: p + bad, params["encoder"])}
            updates, state = update(grads, tx.init(params), its)
            assert bits(updates["encoder"]) == bits(jax.tree.map(lambda p: jnp.full_like(p, -0.0), params["encoder"]))
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, state)))

    def test_mixed_precision(self):
        """Updates of another dtype than the gradients; those of frozen rows have the dtype of the others."""
        narrow, wide, both = jnp.bfloat16, jnp.float32, jnp.complex64
        params, grads = (
            {name: jnp.ones((2, 2), dtype) for name, dtype in zip("abcw", dtypes, strict=True)}
            for dtypes in ((narrow, wide, both, wide), (wide, narrow, both, narrow))
        )
        tx = fz.freeze_when(optax.adamw(0.1), {fz.path("a", "b", "c"): fz.alternate(1), "w": (fz.rows([0]), True)})
        state, update = tx.init(params), jax.jit(tx.update)
        eager, _ = tx.update(grads, state, params)
        first, state = update(grads, state, params)
        chex.assert_trees_all_close(eager["w"], first["w"], rtol=1e-2)
        assert eager["w"].dtype == first["w"].dtype == jnp.float32
        second, _ = update(grads, state, params)
        for updates, stays in ((first, True), (second, False)):
            new = optax.apply_updates(params, updates)
            assert [bits(new[name]) == bits(params[name]) for name in "abc"] == [stays] * 3

    def test_the_program_skips_a_frozen_group(self, params):
        """The whole arithmetic of a group stands in one operation that the condition decides over."""
        tx = fz.freeze_when(optax.scale_by_adam(), {"**": True})
        jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
        assert "sqrt" in str(jaxpr)
        names = {"while", "sqrt", "div", "pow", "integer_pow"}
        assert names & {eqn.primitive.name for eqn in jaxpr.eqns} == {"while"}


class TestGroups:
    def test_the_first_that_selects_a_leaf_has_it(self, params):
        """A selector names a group as well as a pattern; each has moments of its own leaves alone."""
        biases = fz.where(lambda path, leaf: path.startswith("encoder") and leaf.ndim == 1)
        groups = {biases: True, "encoder/layer_0": False, fz.regex("encoder/.*"): True}
        new, state = run(fz.freeze_when(optax.adam(0.1), groups), params, 1)[-1]
        moved = jax.tree.map(lambda a, b: bits(a) != bits(b), new, params)
        assert jax.tree.leaves(moved) == [False, True, False, False, True, True]
        shapes = [
            {x.shape for x in jax.tree.leaves(s.inner_state[0].mu)} for s in map(state.groups.get, state.plan.names)
        ]
        assert shapes == [{(4,)}, {(3, 4)}, {(4, 4)}]
        assert {x.shape for x in jax.tree.leaves(state.ungrouped_state[0].mu)} == {(4, 2), (2,)}
        assert list(fz.currently_frozen(state)) == [repr(biases), "encoder/layer_0", "fz.regex('encoder/.*')"]
        assert fz.currently_frozen(fz.set_frozen(state, {biases: False}))[repr(biases)] is False

    def test_no_group_at_all(self, params):
        adam = optax.adam(0.1)
        chex.assert_trees_all_close(last(fz.freeze_when(adam, {}), params, 2), last(adam, params, 2), rtol=1e-6)

    @pytest.mark.parametrize("groups", [{"n": False, "**": True}, {fz.each("n"): False, "w": True}], ids=["**", "each"])
    def test_leaves_that_cannot_train_are_in_no_group(self, groups):
        params = {"n": jnp.arange(2), "key": jax.random.key(0), "w": jnp.ones(2), "none": None}
        tx = fz.freeze_when(optax.adamw(0.1), groups)
        state = pickle.loads(pickle.dumps(tx.init(params)))
        assert fz.currently_frozen(state).get("w", True) is True
        updates, _ = tx.update({**params, "n": np.zeros(2, jax.dtypes.float0)}, state, params)
        assert bits(fz.apply_updates(params, updates)) == bits(params)

    def test_one_array_in_two_groups(self):
        tied = dict.fromkeys("ab", jnp.ones(2))
        with pytest.raises(ValueError, match="the same array is frozen at one path"):
            fz.freeze_when(optax.sgd(0.1), {"a": True}).init(tied)
        with pytest.warns(fz.FreezeWarning, match=r"both train(.|\n)*at: a\n +b\n"):
            fz.freeze_when(optax.sgd(0.1), {"*": True}).init(tied)
        fz.freeze_when(optax.sgd(0.1), {"a": True}, tied="ignore").init(tied)

    @pytest.mark.parametrize("switch", [True, False])
    @pytest.mark.parametrize("own", [["a"], ["a", "**/a"]], ids=["one group", "two groups"])
    def test_compact_groups_of_every_element(self, own, switch):
        params = {"a": jnp.ones((4, 2)), "b": jnp.ones(3)}
        mask = np.arange(8).reshape(4, 2) % len(own) == 0
        masks = [fz.elements(mask, compact=True), fz.elements(~mask, compact=True)]
        tx = fz.freeze_when(optax.sgd(0.5), {name: (m, switch) for name, m in zip(own, masks, strict=False)})
        updates, _ = tx.update(params, tx.init(params), params)
        assert bits(updates["a"]) == bits(jnp.full((4, 2), -0.0 if switch else -0.5))


class TestEach:
    """A group of each leaf."""

    @pytest.mark.parametrize("value", [small, (~fz.rows(jnp.array([1])), small)], ids=["leaves", "dynamic rows"])
    def test_is_a_group_of_each_path(self, params, value):
        """The same states under the same names, and the same steps."""
        paths = ["encoder/layer_0/kernel", "encoder/layer_1/kernel", "head/kernel"]
        listed = fz.freeze_when(MOMENTUM, {"**/bias": False, **dict.fromkeys(paths, value)})
        tx = fz.freeze_when(MOMENTUM, {"**/bias": False, fz.each("**/kernel"): value})
        assert list(fz.currently_frozen(tx.init(params))) == ["**/bias", *paths]
        assert bits(run(tx, params, 2)) == bits(run(listed, params, 2))

    def test_a_threshold_on_every_leaf_freezes_any_set_in_one_program(self):
        """As GradES: each leaf freezes for good when the norm of its gradient falls below the threshold."""
        sizes = [2, 0, 4, 1, 3, 0, 2, 1]  # the step in which the gradient of a leaf is small
        params = {"weights": [jnp.ones(2) * i for i in range(8)], "head": jnp.ones(2)}
        tx = fz.freeze_when(MOMENTUM, {fz.each("weights"): small})
        state, update = tx.init(params), jax.jit(tx.update)
        for step in range(5):
            grads = {"weights": [jnp.full(2, 0.1 if size == step else 1.0) for size in sizes], "head": jnp.ones(2)}
            before = fz.currently_frozen(state)
            updates, state = update(grads, state, params)
            assert list(before.values()) == [size < step for size in sizes]
            for u, is_frozen in zip(updates["weights"], before.values(), strict=True):
                assert (bits(u) == bits(jnp.full(2, -0.0))) is is_frozen
        assert all(fz.currently_frozen(state).values())
        assert update._cache_size() == 1
        for key in (fz.each("a", "b"), fz.each(fz.path("a") & "b", "c")):
            assert eval(repr(key)) == key
        assert repr(fz.each(["a", "b"])) == repr(fz.each("a", "b")) == "fz.each('a', 'b')"

    def test_leaves_of_other_groups_are_left_out(self, params):
        groups = {"head": True, fz.each("encoder/layer_0", "**/bias"): fz.freeze_at(3), fz.each("**"): True}
        state = fz.freeze_when(optax.adam(0.1), groups).init({**params, "steps": jnp.int32(3)})
        layers = [f"encoder/layer_{i}/{name}" for i in range(2) for name in ("bias", "kernel")]
        frozen = [("head", True), *((path, False) for path in layers[:3]), (layers[3], True)]
        assert list(fz.currently_frozen(state).items()) == frozen
        groups = {fz.path("head/kernel"): (fz.rows(0), True), fz.each("head"): False}
        state = fz.freeze_when(optax.scale_by_adam(), groups).init(params)
        assert state.plan.names == ("fz.path('head/kernel')", "head/bias", "head/kernel")
        assert state.groups["head/kernel"].inner_state.mu["head"]["kernel"].shape == (3, 2)

    def test_a_lone_leaf_and_no_leaf(self):
        tx = fz.freeze_when(optax.adam(0.1), {fz.each("**"): fz.unfreeze_at(1)})
        assert last(tx, {}, 2) == {}
        assert fz.currently_frozen(tx.init(jnp.ones(2))) == {"": True}
        moved = [bits(new) != bits(jnp.ones(2)) for new, _ in run(tx, jnp.ones(2), 2)]
        assert moved == [False, False, True]
        assert last(tx, {}, 1) == {}
        tx = fz.freeze_when(optax.lbfgs(), {"**": False}, optax.lbfgs())
        assert tx.update({}, tx.init({}), {}, value=0.0, grad={}, value_fn=lambda params: 0.0)[0] == {}

    def test_switches_are_set_by_path_or_together(self, params):
        groups = {"head/bias": False, fz.each("**/bias"): False, fz.each("**/kernel"): fz.unfreeze_at(2)}
        tx = optax.chain(fz.freeze_when(optax.adam(0.1), groups))
        state = fz.set_frozen(tx.init(params), {fz.each("**/bias"): True, "encoder/layer_0/bias": False})
        switches = {"head/bias": False, "encoder/layer_0/bias": False, "encoder/layer_1/bias": True}
        assert dict(list(fz.currently_frozen(state).items())[:3]) == switches
        with pytest.raises(ValueError, match=r"frozen by a schedule\n  at: fz.each\('\*\*/kernel'\)"):
            fz.set_frozen(state, {fz.each("**/kernel"): True})
        with pytest.raises(KeyError, match="no group of this name"):
            fz.set_frozen(state, {fz.each("**"): True})
        of_two = [tx.init(params), fz.freeze_when(optax.sgd(0.1), {"head/bias": fz.unfreeze_at(2)}).init(params)]
        with pytest.raises(ValueError, match="frozen by a schedule\n  at: head/bias"):
            fz.set_frozen(of_two, {"head/bias": True})

    def test_the_state_of_other_leaves_or_groups(self, params):
        def make(key, value=True):
            return fz.freeze_when(optax.sgd(0.1), {key: value})

        state = make(fz.each("**/kernel")).init(params)
        make(fz.each("**/kernel")).update(params, state, params)
        names = [fz.where(lambda path, leaf, n=n: path.endswith("kernel") and path[0] in n) for n in ("eh", "h")]
        for tx, its in ((make(fz.each("**")), state), (make(fz.each(names[1])), make(fz.each(names[0])).init(params))):
            with pytest.raises(TypeError, match=r"created by a different transformation(.|\n)*fz.migrate"):
                tx.update(params, its, params)
        with pytest.raises(ValueError, match=r"a different schedule\n  at: encoder/layer_0/kernel"):
            make(fz.each("**/kernel"), small).update(params, state, params)


DENSE = np.arange(15).reshape(5, 3) % 2 == 0
ROW, COLUMN = np.indices((5, 3))
MASKS = {
    "rows": (fz.rows([0, 3]), ROW % 3 == 0),
    "axis": (fz.rows([1], axis=1), COLUMN == 1),
    "not": (~fz.rows([2]), ROW != 2),
    "elements": (DENSE, DENSE),
    "compact": (fz.elements(DENSE, compact=True), DENSE),
}


class TestElementMasks:
    @pytest.fixture
    def setting(self):
        return {"w": jax.random.normal(jax.random.key(0), (5, 3)), "v": jnp.ones(2)}

    @pytest.mark.parametrize("name", MASKS)
    def test_masked_elements_freeze_and_the_rest_of_the_leaf_trains(self, setting, name):
        """Either side steps, and has the state, as an optimizer of its own on these elements."""
        inner, (choice, mask) = optax.adamw(0.1), MASKS[name]
        tx = fz.freeze_when(inner, {"w": (choice, fz.unfreeze_at(1))})
        (_, _), (first, _), _, (third, state) = run(tx, setting, 3)
        rest = last(fz.freeze(inner, fz.rules({"w": choice})), setting, 3)
        own = last(fz.freeze(inner, fz.rules({"w": ~mask})), setting, 2)
        assert np.asarray(first["w"])[mask].tobytes() == np.asarray(setting["w"])[mask].tobytes()
        expected = {"w": jnp.where(mask, own["w"], rest["w"]), "v": rest["v"]}
        chex.assert_trees_all_close(third, expected, rtol=1e-6)
        if name != "elements":
            sizes = [s[0].mu["w"].size for s in (state.groups["w"].inner_state, state.ungrouped_state)]
            assert sizes == [mask.sum(), 15 - mask.sum()]

    @pytest.mark.parametrize("compact", [None, False, True], ids=["rows", "elements", "compact"])
    def test_another_group_has_what_is_left_of_the_leaf(self, setting, compact):
        """Overlapping masks: what two groups name belongs to the first."""
        masks = [
            fz.rows(rows) if compact is None else fz.elements(np.isin(ROW, rows), compact=compact)
            for rows in ([0, 1], [1, 2, 3])
        ]
        groups = {"w": (masks[0], False), "w/**": (masks[1], fz.unfreeze_at(1)), "**": fz.unfreeze_at(2)}
        tx = fz.freeze_when(optax.adam(0.1), groups)
        new = last(tx, setting, 3)
        assert jax.tree.structure(jax.eval_shape(tx.init, setting)) == jax.tree.structure(tx.init(setting))
        everything = run(optax.adam(0.1), setting, 3)
        for rows, thawed in ((slice(0, 2), 0), (slice(2, 4), 1), (slice(4, 5), 2)):
            np.testing.assert_allclose(new["w"][rows], everything[3 - thawed][0]["w"][rows], rtol=1e-6)
        np.testing.assert_allclose(new["v"], everything[1][0]["v"], rtol=1e-6)

    def test_a_dense_mask_is_in_the_state_and_no_constant(self):
        params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
        tx = fz.freeze_when(optax.adam(0.1), {"w": (np.eye(512, dtype=bool), True)})
        state = jax.eval_shape(tx.init, params)
        assert state.groups["w"].masks["w"].shape == (512, 512)
        assert len(jax.jit(tx.update).lower(params, state, params).as_text()) < 60_000


class TestConditions:
    def test_beyond_the_steps(self):
        never = {"a": fz.freeze_at(2**40), "b": fz.unfreeze_at(2**31)}
        state = fz.freeze_when(optax.sgd(0.1), never).init({"a": jnp.ones(2), "b": jnp.ones(2)})
        assert fz.currently_frozen(state) == {"a": False, "b": True}

    def test_the_step_counts_the_updates_of_this_transformation(self, params):
        tx = optax.MultiSteps(fz.freeze_when(optax.sgd(0.1), {"encoder": fz.unfreeze_at(1)}), 2)
        history = run(tx, params, 4)
        assert bits(history[3][0]["encoder"]) == bits(params["encoder"])
        assert bits(history[4][0]["encoder"]) != bits(params["encoder"])
        assert history[4][1].inner_opt_state.step == 2

    def test_conditions_combine(self, params):
        either = fz.unfreeze_at(3) | fz.alternate(1)
        both = either & fz.freeze_at(1)
        assert [either(step) for step in range(6)] == [True, True, True, False, True, False]
        assert [both(step) for step in range(6)] == [False, True, True, False, True, False]
        assert pickle.loads(pickle.dumps(both)) == both == eval(repr(both))
        assert len({both, eval(repr(both)), either}) == 2
        history = [p["encoder"] for p, _ in run(fz.freeze_when(MOMENTUM, {"encoder": both}), params, 6)]
        moved = [bits(new) != bits(old) for old, new in itertools.pairwise(history)]
        assert moved == [not both(step) for step in range(6)]


CHECKERED = np.arange(8).reshape(4, 2) % 3 == 0


def of_head(first, second):
    """Two groups of elements of one leaf."""
    return {"head/kernel": (first, True), "head/*": (second, True)}


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        ({fz.where(lambda path, leaf: False): True}, r"is empty(.|\n)*a selector that selects nothing"),
        ({fz.rules({"head/kernel": fz.rows(0)}): True}, "must select whole leaves"),
        ({"**": (fz.rows(0), True), "head/kernel": (fz.rows([0]), True)}, "is empty"),
        ({fz.each("head"): True, "head/bias": True}, r"'head/bias' is empty"),
        ({fz.path("a", "b"): True, ("a", "b"): False}, "two groups have the same name"),
        ({"encoder": (True, fz.unfreeze_at(3))}, "a bool where an element mask is expected"),
        ({"encoder": lambda: True}, r"must take \(step\) or \(step, stats\)"),
        (of_head(fz.rows([0]), fz.rows([0], axis=1)), "incompatible element masks"),
        (of_head(fz.rows([0]), CHECKERED), "incompatible element masks"),
        (of_head(CHECKERED, fz.elements(CHECKERED, compact=True)), "incompatible element masks"),
    ],
)
def test_bad_groups(params, groups, error):
    with pytest.raises((ValueError, TypeError), match=error):
        fz.freeze_when(optax.sgd(0.1), groups).init(params)


@pytest.mark.parametrize(
    ("frozen", "fix"),
    [
        ("encoder", "fz.path('encoder') & fz.all_except('encoder/layer_1')"),
        (fz.all_except("head"), "fz.all_except('head') & fz.all_except('encoder/layer_1')"),
        (True, "fz.all_except('encoder/layer_1')"),
        ({"encoder": True, "head": False}, "give these leaves False in it"),
    ],
)
def test_a_group_that_is_frozen_around_it_is_refused(params, frozen, fix):
    tx = fz.freeze_when(optax.sgd(0.1), {"encoder/layer_1": fz.unfreeze_at(0)})
    with pytest.raises(ValueError, match="the group 'encoder/layer_1' would never train") as error:
        fz.freeze(tx, frozen).init(params)
    assert str(error.value).endswith(fix)
    if fix.startswith("fz."):
        fz.freeze(tx, eval(fix)).init(params)


def test_a_group_of_which_a_part_is_frozen_around_it(params):
    tx = fz.freeze(fz.freeze_when(optax.sgd(0.1), {"encoder": fz.unfreeze_at(0)}), "**/bias")
    after = last(tx, params, 1)["encoder"]["layer_0"]
    assert bits(after["kernel"]) != bits(params["encoder"]["layer_0"]["kernel"])


def test_a_mask_for_a_leaf_that_is_a_part_already():
    tx = fz.freeze(fz.freeze_when(optax.sgd(0.1), {"w": (fz.rows(0), True)}), fz.rules({"w": fz.rows(1)}))
    with pytest.raises(ValueError, match=r"cannot select elements of a Part\n  at: w"):
        tx.init({"w": jnp.ones((3, 2))})


class TestSetFrozen:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda tx: optax.chain(optax.clip(1.0), tx),
            lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
            lambda tx: fz.freeze(tx, fz.rules({"head/kernel": fz.rows(0), "head/bias": True})),
            lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(rate=1.0),
            lambda tx: fz.freeze_when(tx, {"head/bias": False}),
        ],
        ids=["chain", "MultiSteps", "freeze", "hyperparams", "freeze_when"],
    )
    def test_it_finds_its_state_anywhere(self, params, wrap):
        tx = wrap(fz.freeze_when(optax.sgd(0.1), {"encoder/layer_0": True, "**/kernel": fz.alternate(1)}))

        def toggle(i, state):
            state = fz.set_frozen(state, {"encoder/layer_0": i % 2 == 0})
            assert fz.currently_frozen(state)["encoder/layer_0"] is (i % 2 == 0)
            return state

        layers = [new["encoder"]["layer_0"] for new, _ in run(tx, params, 4, before_step=toggle)]
        assert [bits(a) != bits(b) for a, b in itertools.pairwise(layers)] == [False, True, False, True]

    def test_the_state_given_stays_as_it_was_and_the_new_one_is_placed_alike(self, params):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        state = jax.device_put(fz.freeze_when(optax.sgd(0.1), {"encoder": True}).init(params), replicated)
        assert fz.set_frozen(state, {"encoder": False}).groups["encoder"].condition_state.sharding == replicated
        assert fz.currently_frozen(state) == {"encoder": True}

    @pytest.mark.parametrize("frozen", [True, fz.unfreeze_at(3)])
    def test_a_state_without_one_value(self, params, frozen):
        init = fz.freeze_when(optax.sgd(0.1), {"head": frozen}).init
        shapes, members = jax.eval_shape(init, params), jax.vmap(init)(jax.tree.map(lambda p: p[None], params))
        for state in (shapes, members):
            with pytest.raises(ValueError, match="does not say which groups are frozen"):
                fz.spec_of(state)
        with pytest.raises(ValueError, match="does not say which groups are frozen"):
            fz.currently_frozen(shapes)

    def test_members_of_an_ensemble(self, params):
        members = jax.tree.map(lambda p: jnp.stack([p, p + 1, p + 2]), params)
        tx = fz.freeze_when(optax.adam(0.1), {"head": False, "encoder": fz.unfreeze_at(1)})
        step = jax.jit(jax.vmap(lambda grads, state, params: fz.update_params(tx, grads, state, params)))
        state = fz.set_frozen(jax.vmap(tx.init)(members), {"head": np.array([False, True, False])})
        new, state = step(members, state, members)
        frozen = jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), fz.currently_frozen(state))
        assert frozen == {"head": [False, True, False], "encoder": [False] * 3}
        assert bits(jax.tree.map(lambda leaf: leaf[1], new["head"])) == bits(
            jax.tree.map(lambda leaf: leaf[1], members["head"])
        )
        state = fz.set_frozen(state, {"head": True})
        assert np.asarray(fz.currently_frozen(state)["head"]).tolist() == [True] * 3
        for flags in (np.array([True, False]), np.zeros((3, 1), bool)):
            with pytest.raises(ValueError, match=r"fz.set_frozen: expected a bool for the group\n  at: head"):
                fz.set_frozen(state, {"head": flags})


def test_a_clip_over_all_groups():
    """``coupled`` sees all groups, with zeros for frozen elements, and has a state that goes on."""
    params = {"w": jnp.ones((3, 2)), "v": jnp.ones(2), "u": jnp.ones(2)}
    grads = {"w": jnp.zeros((3, 2)).at[0].set(1e6).at[1, 0].set(3.0), "v": jnp.array([0.0, 4.0]), "u": jnp.ones(2)}
    coupled = optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.0))
    groups = {"w": (fz.rows([0]), fz.unfreeze_at(1)), "u": fz.unfreeze_at(1)}
    tx = fz.freeze_when(optax.sgd(1.0), groups, coupled)
    updates, state = tx.update(grads, tx.init(params), params)
    chex.assert_trees_all_close([updates["w"][1, 0], updates["v"][1]], [-0.6, -0.8], rtol=1e-6)
    assert bits(updates["w"][0]) == bits(jnp.full(2, -0.0))
    trace = state.coupled_state[1].trace
    assert not trace["w"][0].any()
    assert not trace["u"].any()
    assert trace["v"].any()
    plain = optax.chain(coupled, optax.sgd(1.0))
    expected, _ = plain.update(grads, plain.init(params), params)
    chex.assert_trees_all_close(tx.update(grads, state, params)[0], expected, rtol=1e-6)


def quadratic(params):
    return sum(jnp.sum((x - i) ** 2 * (i + 1)) for i, x in enumerate(jax.tree.leaves(params)))


TO_SEARCH = {"a": jnp.array([3.0, -4.0]), "b": jnp.array([[1.0, 5.0]]), "c": jnp.array([-7.0])}


@pytest.mark.parametrize("way", ["update", "train_step"])
class TestALineSearch:
    """Its ``value``, ``grad`` and ``value_fn`` are those of one loss, whatever ``coupled`` does to the gradient."""

    def steps(self, tx, params, way, loss=quadratic):
        state = tx.init(params)
        for _ in range(3):
            if way == "train_step":
                params, state, _ = fz.train_step(loss, tx, extra_args=["value", "grad", "value_fn"])(params, state)
                continue
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss)
            params = optax.apply_updates(params, updates)
        return params

    def test_in_a_group(self, way):
        clip = optax.clip_by_global_norm(1.0)
        tx = fz.freeze_when(optax.lbfgs(), {"**": fz.unfreeze_at(0)}, clip)
        expected = self.steps(optax.chain(clip, optax.lbfgs()), TO_SEARCH, "update")
        assert_equal_up_to_rounding(self.steps(tx, TO_SEARCH, way), expected)

    def test_over_the_groups_that_train(self, way):
        groups = {"a": fz.unfreeze_at(9), "b": (fz.rows(0, axis=1), fz.unfreeze_at(9))}
        tx = fz.freeze_when(optax.identity(), groups, optax.lbfgs())
        frozen = {"a": True, "b": fz.rows(0, axis=1), "c": False}
        trainable, rest = fz.partition(TO_SEARCH, frozen)
        expected = fz.combine(self.steps(optax.lbfgs(), trainable, "update", fz.restrict(quadratic, rest)), rest)
        got = self.steps(tx, TO_SEARCH, way)
        assert_equal_up_to_rounding(got, expected)
        assert bits(got["a"]) == bits(TO_SEARCH["a"])


class TestResume:
    """Stop at any step, restore parameters and state, and go on: bit-equal to not having stopped."""

    def test_in_the_middle_of_a_schedule_and_right_after_a_toggle(self, params):
        groups = {"encoder/**": fz.alternate(2), "**/bias": False}
        groups[fz.each("head")] = fz.rows([0]), fz.unfreeze_at(3)
        tx = optax.chain(optax.clip(1.0), fz.freeze_when(optax.adamw(optax.linear_schedule(0.1, 0.0, 8)), groups))

        @jax.jit
        def step(params, state):
            updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
            return optax.apply_updates(params, updates), state

        def go_on(at, state, steps):
            for i in steps:
                at, state = step(at, fz.set_frozen(state, {"**/bias": i >= 3}))
            return at, state

        first = params, tx.init(params)
        end = go_on(*first, range(5))
        at, state = go_on(*first, range(3))
        saved = at, fz.set_frozen(state, {"**/bias": True})
        for restored in (
            flax.serialization.from_bytes(first, flax.serialization.to_bytes(saved)),
            pickle.loads(pickle.dumps(saved)),
            copy.deepcopy(saved),
        ):
            assert bits(restored) == bits(saved)
            assert jax.tree.structure(restored) == jax.tree.structure(saved)
            assert fz.currently_frozen(restored) == fz.currently_frozen(saved)
            assert bits(go_on(*restored, range(3, 5))) == bits(end)

    def test_tree_map_params(self):
        params = {"w": jnp.ones((5, 3)), "v": jnp.ones(3)}
        groups = {"w": (DENSE, True), fz.each("v"): fz.alternate(2)}
        tx, grads = optax.chain(optax.clip(1.0), fz.freeze_when(optax.adam(0.1), groups)), params
        _, state = tx.update(grads, tx.init(params), params)
        mapped = optax.tree_map_params(tx, lambda leaf: leaf, state)
        assert bits(mapped) == bits(state)
        assert bits(tx.update(grads, mapped, params)) == bits(tx.update(grads, state, params))
        assert fz.currently_frozen(mapped) == fz.currently_frozen(state)
        counted = optax.tree_map_params(tx, lambda leaf: leaf, state, transform_non_params=lambda leaf: leaf + leaf)
        assert counted[1].step == 2 * state[1].step
        names = optax.tree_map_params(tx, lambda leaf: "param", state, transform_non_params=lambda leaf: "other")[1]
        assert names.groups["w"].masks["w"] == "param"
        assert names.groups["v"].inner_state[0].mu == {"v": "param"}
        assert names.step == names.groups["w"].condition_state == names.groups["v"].inner_state[0].count == "other"


class TestTheStateOf:
    @pytest.mark.parametrize(
        ("before", "after", "error"),
        [
            (fz.unfreeze_at(3), True, "a different schedule"),
            (True, fz.unfreeze_at(3), "a different schedule"),
            (fz.unfreeze_at(3), fz.unfreeze_at(4), "a different schedule"),
            ((fz.rows([0]), True), (fz.rows([1]), True), "different groups"),
            ((fz.rows([0]), True), True, "different groups"),
            (True, (CHECKERED, True), "different groups"),
            ((fz.elements(CHECKERED, compact=True), True), (CHECKERED, True), "different groups"),
        ],
    )
    def test_another_schedule_or_other_elements(self, before, after, error):
        params = {"a": jnp.ones((4, 2)), "b": jnp.ones(2)}
        _, state = run(fz.freeze_when(optax.adam(0.1), {"a": before}), params, 1)[-1]
        tx = fz.freeze_when(optax.adam(0.1), {"a": after})
        for update, its in ((tx.update, params), (tx.update, None), (jax.jit(tx.update), params)):
            with pytest.raises(ValueError, match=rf"created with {error}\n  at: a(.|\n)*fz.migrate"):
                update(params, state, its)
        if error == "a different schedule":
            migrated = fz.migrate(state, tx, params)
            assert migrated.step == 1
            assert bits(migrated.ungrouped_state) == bits(state.ungrouped_state)
            tx.update(params, migrated, params)

    def test_equal_groups(self):
        """From another process, and two compact masks at one leaf, jitted; a switch may begin otherwise."""
        params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
        first, second = (fz.elements(np.arange(6).reshape(3, 2) == i, compact=True) for i in (0, 1))

        def make(switch):
            return fz.freeze_when(optax.adam(0.1), {"a": (first, True), "**/a": (second, switch)})

        state = make(True).init(params)
        copied = pickle.loads(pickle.dumps(state))
        updates = [jax.jit(make(False).update)(params, s, params)[0] for s in (state, copied)]
        assert bits(updates[0]) == bits(updates[1])


def test_types_of_a_state_that_come_to_rest_after_two_updates():
    """A number becomes float32 in the first one, and so do moments of bfloat16 in the second."""
    params = {"a": jnp.ones(3), "b": jnp.ones(2, jnp.bfloat16)}
    tx = fz.freeze_when(optax.contrib.dadapt_adamw(), {"**": fz.unfreeze_at(0)})
    update = jax.jit(tx.update)
    _, state = update(params, tx.init(params), params)
    _, after = update(params, state, params)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    assert after.groups["**"].inner_state.count == 2
