"""Groups that freeze and thaw while training, in one compiled program."""

import copy
import itertools
import pickle

import chex
import equinox as eqx
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from conftest import bits
from flax import nnx
from flax.training.train_state import TrainState

import optax_freeze as fz

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "adam with a schedule": optax.adam(optax.cosine_decay_schedule(0.1, 10)),
    "lamb": optax.lamb(0.1),
    "noise": optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.5, key=0)),
    "multi steps": optax.MultiSteps(optax.adamw(0.1), 2),
    "schedule free": optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.1, 0.0, 9)),
    "labels": optax.multi_transform(
        {"matrix": optax.adam(0.1), "vector": optax.sgd(0.1)},
        lambda p: jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "vector", p),
    ),
}


def run(tx, params, steps, *, grads=jnp.cos, state=None, jit=False, before_step=None):
    """Parameters and states before each step and after the last; ``grads`` is a function of one leaf."""
    state = tx.init(params) if state is None else state

    traced = []

    def step(params, state):
        traced.append(True)
        updates, state = tx.update(jax.tree.map(grads, params), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    history = [(params, state)]
    for i in range(steps):
        if before_step is not None:
            state = before_step(i, state)
        params, state = step(params, state)
        history.append((params, state))
    assert len(traced) == 1 or not jit
    return history


def alone(inner, params, path, steps):
    """A part of the parameters trained by an optimizer of its own."""
    return run(inner, fz.partition(params, fz.only(path))[0], steps)


class TestTheContract:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_a_group_first_thawed_at_a_step_is_a_new_optimizer(self, params, name):
        """While frozen nothing moves, bits and state; then it steps as an optimizer created now; so does the rest."""
        inner = OPTIMIZERS[name]
        history = run(fz.freeze_when(inner, {"encoder": fz.unfreeze_at(2)}), params, 4)
        for later, state in history[:3]:
            assert bits(later["encoder"]) == bits(params["encoder"])
            assert bits(state.groups["encoder"]) == bits(history[0][1].groups["encoder"])
        new, state = history[-1]
        for path, of_path, steps in (
            ("encoder", state.groups["encoder"].inner_state, 2),
            ("head", state.rest_state, 4),
        ):
            expected, expected_state = alone(inner, params, path, steps)[-1]
            assert bits(new[path]) == bits(expected[path])
            assert bits(of_path) == bits(expected_state)

    @pytest.mark.parametrize("name", ["adam with a schedule", "noise", "multi steps", "hyperparameters", "labels"])
    def test_compiled_once_and_close_to_eager(self, params, name):
        tx = fz.freeze_when(OPTIMIZERS[name], {"encoder": fz.alternate(1), "head/bias": True})
        jitted, eager = run(tx, params, 3, jit=True), run(tx, params, 3)
        chex.assert_trees_all_close(jitted[-1][0], eager[-1][0], rtol=1e-4, atol=1e-4)
        for (a, state_a), (b, state_b) in zip(jitted[0::2], jitted[1::2], strict=True):  # frozen at even steps
            assert bits(a["encoder"]) == bits(b["encoder"])
            assert bits(state_a.groups["encoder"]) == bits(state_b.groups["encoder"])

    def test_a_group_that_thaws_again_goes_on_where_it_stopped(self, params):
        tx = fz.freeze_when(optax.adam(0.1), {"encoder": lambda step: (step >= 2) & (step < 5)})
        history = run(tx, params, 8)
        expected = alone(optax.adam(0.1), params, "encoder", 5)[-1][0]
        assert bits(history[-1][0]["encoder"]) == bits(expected["encoder"])

    @pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
    def test_whatever_the_gradient_of_a_frozen_group(self, params, bad, compiled):
        for coupled in (None, optax.clip_by_global_norm(1.0)):
            tx = fz.freeze_when(optax.adamw(0.1), {"encoder": True}, coupled)
            grads = {"encoder": jax.tree.map(lambda p: p + bad, params["encoder"]), "head": params["head"]}
            updates, state = compiled(tx.update)(grads, tx.init(params), params)
            assert all(
                np.asarray(u).tobytes() == np.full_like(u, -0.0).tobytes() for u in jax.tree.leaves(updates["encoder"])
            )
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, state)))

    def test_awkward_leaves_keep_their_bits(self, awkward, compiled):
        tx = fz.freeze_when(optax.adamw(0.1), {"frozen": fz.unfreeze_at(9)}, tied="ignore")

        def step(params, state):
            grads = {**jax.tree.map(lambda p: jnp.full(p.shape, jnp.nan), params), "trains": jnp.ones(2)}
            updates, state = tx.update(grads, state, params)
            return fz.apply_updates(params, updates), state

        new, _ = compiled(step)(awkward, tx.init(awkward))
        del awkward["frozen"]["nan"], new["frozen"]["nan"]
        assert bits(new["frozen"]) == bits(awkward["frozen"])
        assert bits(new["trains"]) != bits(awkward["trains"])

    def test_mixed_precision(self, compiled):
        """Updates of another dtype than the gradients."""
        params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2), "c": jnp.ones(2, jnp.complex64)}
        tx = fz.freeze_when(optax.adamw(0.1), {"*": fz.alternate(1)})
        grads = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16), "c": jnp.ones(2, jnp.complex64)}
        state = tx.init(params)
        for _ in range(2):
            updates, state = compiled(tx.update)(grads, state, params)
            new = optax.apply_updates(params, updates)
            if fz.currently_frozen(state) == {"*": False}:
                assert bits(new) == bits(params)
        assert all(bits(new[name]) != bits(params[name]) for name in params)

    def test_gradients_of_examples(self, params, compiled):
        mean = optax.stateless(lambda updates, params: jax.tree.map(lambda g: g.mean(axis=0), updates))
        tx = fz.freeze_when(mean, {"encoder": fz.unfreeze_at(1)})
        grads = jax.tree.map(lambda p: jnp.stack([jnp.ones_like(p), jnp.full_like(p, 3.0)]), params)
        first, state = compiled(tx.update)(grads, tx.init(params), params)
        second, _ = compiled(tx.update)(grads, state, params)
        assert bits(first["encoder"]) == bits(jax.tree.map(lambda p: jnp.full_like(p, -0.0), params["encoder"]))
        assert bits(second) == bits(jax.tree.map(lambda p: jnp.full_like(p, 2.0), params))

    def test_no_parameters_given(self, params, compiled):
        tx = fz.freeze_when(optax.adam(0.1), {"encoder": True})
        updates, _ = compiled(lambda g, s: tx.update(g, s))(params, tx.init(params))
        assert not any(leaf.any() for leaf in jax.tree.leaves(updates["encoder"]))

    def test_the_program_skips_a_frozen_group(self, params):
        """The whole arithmetic of a group stands in one operation that the condition decides over."""
        tx = fz.freeze_when(optax.scale_by_adam(), {"**": True})
        jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
        assert "sqrt" in str(jaxpr)
        outside = {eqn.primitive.name for eqn in jaxpr.eqns}
        assert "while" in outside
        assert not outside & {"sqrt", "div", "pow", "integer_pow"}


class TestGroups:
    def test_the_first_of_two_groups_has_the_leaf(self, params):
        tx = fz.freeze_when(optax.sgd(0.1), {"encoder/layer_0": False, "encoder": True})
        new = run(tx, params, 1)[-1][0]
        assert bits(new["encoder"]["layer_0"]) != bits(params["encoder"]["layer_0"])
        assert bits(new["encoder"]["layer_1"]) == bits(params["encoder"]["layer_1"])

    def test_each_has_moments_of_its_own_leaves_alone(self, params):
        state = fz.freeze_when(optax.scale_by_adam(), {"encoder/*/bias": True, "encoder": True}).init(params)
        shapes = {
            name: {x.shape for x in jax.tree.leaves(group.inner_state.mu)} for name, group in state.groups.items()
        }
        assert shapes == {"encoder/*/bias": {(4,)}, "encoder": {(3, 4), (4, 4)}}
        assert {x.shape for x in jax.tree.leaves(state.rest_state.mu)} == {(4, 2), (2,)}

    def test_a_selector_names_a_group(self, params):
        small = fz.where(lambda path, leaf: leaf.ndim == 1)
        tx = fz.freeze_when(optax.sgd(0.1), {small: True, fz.regex("head/.*"): False})
        state = tx.init(params)
        assert list(fz.currently_frozen(state)) == [repr(small), "fz.regex('head/.*')"]
        assert fz.currently_frozen(fz.set_frozen(state, {small: False}))[repr(small)] is False
        new = run(tx, params, 1)[-1][0]
        assert bits(new["head"]["bias"]) == bits(params["head"]["bias"])

    def test_no_group_at_all(self, params):
        assert bits(run(fz.freeze_when(optax.adam(0.1), {}), params, 2)[-1][0]) == bits(
            run(optax.adam(0.1), params, 2)[-1][0]
        )

    def test_everything_in_groups(self, params):
        tx = fz.freeze_when(optax.adam(0.1), {"encoder": fz.freeze_at(1), "head": fz.unfreeze_at(1)})
        history = run(tx, params, 2)
        assert bits(history[2][0]["encoder"]) == bits(history[1][0]["encoder"]) != bits(params["encoder"])
        assert bits(history[2][0]["head"]) != bits(history[1][0]["head"]) == bits(params["head"])

    def test_a_lone_leaf(self, compiled):
        tx = fz.freeze_when(optax.adam(0.1), {"**": fz.unfreeze_at(1)})
        params, state = jnp.ones(2), tx.init(jnp.ones(2))
        updates, state = compiled(tx.update)(params, state, params)
        assert bits(optax.apply_updates(params, updates)) == bits(params)
        updates, state = compiled(tx.update)(params, state, params)
        assert bits(optax.apply_updates(params, updates)) != bits(params)

    def test_what_cannot_train_is_in_no_group(self, compiled):
        params = {"n": jnp.arange(2), "key": jax.random.key(0), "w": jnp.ones(2), "none": None}
        tx = fz.freeze_when(optax.adamw(0.1), {"n": False, "**": False})
        grads = {**params, "n": np.zeros(2, jax.dtypes.float0)}
        updates, _ = tx.update(grads, tx.init(params), params)
        new = fz.apply_updates(params, updates)
        assert bits({**new, "w": 0}) == bits({**params, "w": 0})
        assert bits(new["w"]) != bits(params["w"])

    def test_one_array_in_two_groups(self, params):
        shared = jnp.ones(2)
        tied = {"a": shared, "b": shared}
        with pytest.raises(ValueError, match="the same array is frozen at one path"):
            fz.freeze_when(optax.sgd(0.1), {"a": True}).init(tied)
        fz.freeze_when(optax.sgd(0.1), {"*": True}).init(tied)
        fz.freeze_when(optax.sgd(0.1), {"a": True}, tied="ignore").init(tied)


MOMENTUM = optax.sgd(0.1, momentum=0.9)
MASKED = fz.masked_zero_updates("encoder")


def small(step, stats):
    return stats.norm < 1.0


class TestEach:
    """A group of each leaf."""

    @pytest.mark.parametrize(
        "value",
        [fz.alternate(2), small, True, (~fz.rows(jnp.array([1])), small)],
        ids=["step", "stats", "switch", "dynamic rows"],
    )
    def test_is_a_group_of_each_path(self, params, value):
        """The same states under the same names, and the same steps."""
        paths = ["encoder/layer_0/kernel", "encoder/layer_1/kernel", "head/kernel"]
        listed = fz.freeze_when(MOMENTUM, {"**/bias": False, **dict.fromkeys(paths, value)})
        tx = fz.freeze_when(MOMENTUM, {"**/bias": False, fz.each("**/kernel"): value})
        assert list(fz.currently_frozen(tx.init(params))) == ["**/bias", *paths]
        assert bits(run(tx, params, 3, jit=True)) == bits(run(listed, params, 3, jit=True))

    def test_a_threshold_on_every_leaf_freezes_any_set_in_one_program(self):
        """As GradES: each leaf of 30 freezes for good when the norm of its gradient falls below the threshold."""
        params = {"weights": [jnp.ones(2) * i for i in range(30)], "head": jnp.ones(2)}
        tx = fz.freeze_when(MOMENTUM, {fz.each("weights"): small})
        sizes = np.random.default_rng(0).permutation(30) % 5  # the step in which the gradient of a leaf is small
        state, update = tx.init(params), jax.jit(tx.update)
        for step in range(5):
            grads = jax.tree.map(jnp.ones_like, params)
            grads["weights"] = [jnp.full(2, 0.1 if size == step else 1.0) for size in sizes]
            before = fz.currently_frozen(state)
            updates, state = update(grads, state, params)
            assert list(before.values()) == [size < step for size in sizes]
            for u, is_frozen in zip(updates["weights"], before.values(), strict=True):
                assert (bits(u) == bits(jnp.full(2, -0.0))) is is_frozen
        assert all(fz.currently_frozen(state).values())
        assert update._cache_size() == 1

    def test_leaves_of_other_groups_are_left_out(self, params):
        groups = {"head": True, fz.each("encoder/layer_0", "**/bias"): fz.freeze_at(3), fz.each("**"): True}
        state = fz.freeze_when(optax.adam(0.1), groups).init({**params, "steps": jnp.int32(3)})
        layers = [f"encoder/layer_{i}/{name}" for i in range(2) for name in ("bias", "kernel")]
        assert list(fz.currently_frozen(state).items()) == [
            ("head", True),
            *((path, False) for path in layers[:3]),
            (layers[3], True),
        ]

    def test_what_is_left_of_a_leaf(self, params):
        groups = {fz.path("head/kernel"): (fz.rows(0), True), fz.each("head"): False}
        state = fz.freeze_when(optax.scale_by_adam(), groups).init(params)
        assert state.spec.names == ("fz.path('head/kernel')", "head/bias", "head/kernel")
        assert state.groups["head/kernel"].inner_state.mu["head"]["kernel"].shape == (4, 2)

    def test_leaves_that_cannot_train_are_in_no_group(self):
        params = {"n": jnp.arange(2), "w": jnp.ones(2)}
        tx = fz.freeze_when(optax.sgd(0.1), {fz.each("n"): False, "w": True})
        state = pickle.loads(pickle.dumps(tx.init(params)))
        assert fz.currently_frozen(state) == {"w": True}
        updates, _ = tx.update({**params, "n": np.zeros(2, jax.dtypes.float0)}, state, params)
        assert not updates["w"].any()

    def test_a_lone_leaf_and_no_leaf(self):
        tx = fz.freeze_when(optax.adam(0.1), {fz.each("**"): fz.unfreeze_at(1)})
        assert run(tx, {}, 2)[-1][0] == {}
        assert fz.currently_frozen(tx.init(jnp.ones(2))) == {"": True}
        updates = [bits(new) != bits(jnp.ones(2)) for new, _ in run(tx, jnp.ones(2), 2)]
        assert updates == [False, False, True]
        assert run(tx, {}, 1)[-1][0] == {}

    @pytest.mark.parametrize(
        ("patterns", "shown"),
        [
            (("a",), "fz.each('a')"),
            (("a", "b"), "fz.each('a', 'b')"),
            ((["a", "b"],), "fz.each('a', 'b')"),
            ((fz.path("a") & "b", "c"), "fz.each((fz.path('a') & fz.path('b')) | fz.path('c'))"),
        ],
    )
    def test_patterns_and_selectors(self, patterns, shown):
        assert repr(fz.each(*patterns)) == shown
        assert fz.each(*patterns) == eval(shown)

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

    @pytest.mark.parametrize(
        ("groups", "error"),
        [
            ({fz.each("decoder"): True}, "matches no leaf"),
            ({"head": True, fz.each("head/*"): True}, r"is empty\n  at: head/bias"),
            ({fz.each("head"): True, "head/bias": True}, r"'head/bias' is empty"),
            (
                {fz.each("**/kernel"): (fz.rows(0), True), "head/kernel": True},
                r"same name\n  at: head/kernel\n  got: elements of this leaf in fz.each\(.* and in head/kernel",
            ),
            ({fz.each(fz.rules({"head/kernel": fz.rows(0)})): True}, "must select whole leaves"),
            ({~fz.each("head"): True}, "only a key of the groups"),
        ],
        ids=["nothing", "of another group", "before a group", "one name", "rules", "not each"],
    )
    def test_refused_in_init(self, params, groups, error):
        with pytest.raises((ValueError, TypeError), match=error):
            fz.freeze_when(optax.sgd(0.1), groups).init(params)

    @pytest.mark.parametrize(
        "use",
        [
            lambda params: fz.freeze(optax.sgd(0.1), fz.each("head")).init(params),
            lambda params: fz.resolve(params, fz.rules({fz.each("head"): True})),
            lambda params: fz.partition(params, "encoder" | fz.each("head")),
            lambda params: fz.labels_by_path({fz.each("head"): "a"}, default="b")(params),
            lambda params: fz.replace_masks(MASKED.init(params), MASKED, params, {fz.each("head"): True}),
        ],
        ids=["freeze", "rules", "|", "labels", "masks"],
    )
    def test_is_not_a_spec(self, params, use):
        with pytest.raises(
            TypeError, match=r"fz.each is only a key of the groups of fz.freeze_when\n  at: fz.each\('head"
        ):
            use(params)

    def test_freeze_converged_compares_whole_groups(self):
        with pytest.raises(TypeError, match=r"fz\.freeze_converged cannot compare the groups of fz\.each"):
            fz.freeze_when(optax.sgd(0.1), fz.freeze_converged([fz.each("encoder"), "head"], 5))

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


ROWS = {"slice": fz.rows(slice(0, 2)), "list": fz.rows([0, 3]), "axis": fz.rows([1], axis=1), "not": ~fz.rows([2])}
DENSE = np.arange(15).reshape(5, 3) % 2 == 0
MASKS = {**ROWS, "elements": fz.elements(DENSE), "array": DENSE, "compact": fz.elements(DENSE, compact=True)}


def mask_of(choice, shape=(5, 3)):
    """An element mask as a boolean array."""
    chosen = fz.stop_gradient({"w": jnp.ones(shape)}, {"w": choice})  # only to have it resolved
    grads = jax.grad(lambda p: fz.stop_gradient(p, {"w": choice})["w"].sum())(chosen)["w"]
    return np.asarray(grads) == 0


class TestElementMasks:
    @pytest.fixture
    def setting(self):
        return {"w": jax.random.normal(jax.random.key(0), (5, 3)), "v": jnp.ones(2)}

    @pytest.mark.parametrize("name", MASKS)
    def test_masked_elements_freeze_and_the_rest_of_the_leaf_trains(self, setting, name):
        """Either side steps as an optimizer of its own on these elements."""
        inner = optax.adamw(0.1)
        choice, mask = MASKS[name], mask_of(MASKS[name])
        history = run(fz.freeze_when(inner, {"w": (choice, fz.unfreeze_at(2))}), setting, 5)
        rest = run(fz.freeze(inner, fz.rules({"w": choice})), setting, 5)[-1][0]
        late = [np.asarray(params["w"]) for params, _ in history]
        for w in late[:3]:
            assert w[mask].tobytes() == late[0][mask].tobytes()
        own = run(fz.freeze(inner, fz.rules({"w": ~mask})), setting, 3)[-1][0]
        np.testing.assert_allclose(late[5][mask], own["w"][mask], rtol=1e-6)
        assert bits(jnp.where(mask, 0, late[5])) == bits(jnp.where(mask, 0, rest["w"]))
        assert bits(history[-1][0]["v"]) == bits(rest["v"])

    @pytest.mark.parametrize("name", ["list", "array", "compact"])
    def test_compiled_once(self, setting, name):
        tx = fz.freeze_when(optax.adamw(0.1), {"w": (MASKS[name], fz.alternate(2))})
        jitted, eager = run(tx, setting, 5, jit=True), run(tx, setting, 5)
        chex.assert_trees_all_close(jitted[-1][0], eager[-1][0], rtol=1e-4)
        mask = mask_of(MASKS[name])
        assert np.asarray(jitted[2][0]["w"])[mask].tobytes() == np.asarray(setting["w"])[mask].tobytes()

    @pytest.mark.parametrize("name", [*ROWS, "compact"])
    def test_state_of_the_elements_alone(self, setting, name):
        state = fz.freeze_when(optax.scale_by_adam(), {"w": (MASKS[name], True)}).init(setting)
        own, rest = (s.mu["w"].values.size for s in (state.groups["w"].inner_state, state.rest_state))
        assert own == mask_of(MASKS[name]).sum()
        assert own + rest == 15

    @pytest.mark.parametrize("kind", ["rows", "elements", "compact"])
    def test_another_group_has_what_is_left_of_the_leaf(self, setting, kind):
        """Overlapping masks: what two groups name belongs to the first."""
        a, b = np.zeros((5, 3), bool), np.zeros((5, 3), bool)
        a[:2], b[1:4] = True, True
        masks = {
            "rows": (fz.rows(slice(0, 2)), fz.rows([1, 2, 3])),
            "elements": (a, b),
            "compact": (fz.elements(a, compact=True), fz.elements(b, compact=True)),
        }[kind]
        groups = {"w": (masks[0], fz.unfreeze_at(1)), "w/**": (masks[1], fz.unfreeze_at(2)), "**": fz.unfreeze_at(3)}
        tx = fz.freeze_when(optax.adam(0.1), groups)
        state = jax.jit(tx.init)(setting)
        assert bits(fz.migrate(state, tx, setting)) == bits(state)
        history = run(tx, setting, 5)
        everything = run(optax.adam(0.1), setting, 5)
        for rows, thawed in ((slice(0, 2), 1), (slice(2, 4), 2), (slice(4, 5), 3)):
            got, expected = history[5][0]["w"][rows], everything[5 - thawed][0]["w"][rows]
            assert bits(got) == bits(expected)
        assert bits(history[5][0]["v"]) == bits(everything[2][0]["v"])

    def test_coupled_sees_zeros_at_the_elements(self, setting):
        tx = fz.freeze_when(optax.sgd(1.0), {"w": (fz.rows([0]), True)}, optax.clip_by_global_norm(1.0))
        grads = {"w": jnp.zeros((5, 3)).at[0].set(1e6).at[1, 0].set(3.0), "v": jnp.array([0.0, 4.0])}
        updates, _ = tx.update(grads, tx.init(setting), setting)
        assert updates["w"][1, 0] == pytest.approx(-0.6)
        assert updates["v"][1] == pytest.approx(-0.8)
        assert np.asarray(updates["w"][0]).tobytes() == np.full(3, -0.0, np.float32).tobytes()

    def test_a_dense_mask_is_in_the_state_and_no_constant(self):
        params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
        tx = fz.freeze_when(optax.adam(0.1), {"w": (np.eye(512, dtype=bool), True)})
        state = jax.eval_shape(tx.init, params)
        assert state.groups["w"].masks["w"].shape == (512, 512)
        assert len(jax.jit(tx.update).lower(params, state, params).as_text()) < 60_000

    def test_a_subtree_of_stacked_layers(self):
        params = {"layers": {"kernel": jnp.ones((4, 2, 2)), "bias": jnp.ones((4, 2))}, "head": jnp.ones(2)}
        tx = fz.freeze_when(optax.adam(0.1), {"layers": (fz.rows(slice(0, 3)), True)})
        new = run(tx, params, 1)[-1][0]
        moved = jax.tree.map(lambda a, b: [bits(x) != bits(y) for x, y in zip(a, b, strict=True)], new, params)
        assert moved["layers"] == {"kernel": [False] * 3 + [True], "bias": [False] * 3 + [True]}

    @pytest.mark.parametrize(
        ("masks", "error"),
        [
            ((fz.rows([0]), fz.rows([0], axis=1)), "incompatible element masks"),
            ((fz.rows([0]), DENSE), "incompatible element masks"),
            ((DENSE, fz.elements(DENSE, compact=True)), "incompatible element masks"),
            ((fz.rows([0, 1]), fz.rows([1])), "is empty"),
            ((DENSE[:2], DENSE), "shape of an element mask differs"),
            ((fz.rows([9]), DENSE), "out of range"),
        ],
        ids=["axes", "kinds", "compact", "shadowed", "shape", "range"],
    )
    def test_masks_that_do_not_fit(self, setting, masks, error):
        tx = fz.freeze_when(optax.sgd(0.1), {"w": (masks[0], True), "w/**": (masks[1], True)})
        with pytest.raises(ValueError, match=error):
            tx.init(setting)


class TestConditions:
    def test_what_they_say(self):
        steps = range(6)
        assert [fz.unfreeze_at(3)(s) for s in steps] == [True, True, True, False, False, False]
        assert [fz.freeze_at(3)(s) for s in steps] == [False, False, False, True, True, True]
        assert [fz.alternate(2)(s) for s in steps] == [True, True, False, False, True, True]
        assert [fz.alternate(2, offset=1)(s) for s in steps] == [True, False, False, True, True, False]
        assert [fz.alternate(2, 2)(s) for s in steps] == [not fz.alternate(2)(s) for s in steps]

    def test_gradual_unfreezing_starts_at_the_output_end(self):
        groups = fz.gradual_unfreeze(["head", fz.path("layer_1"), ["layer_0", "embed"]], every=10)
        assert list(groups) == ["head", fz.path("layer_1"), fz.path("layer_0", "embed")]
        assert list(groups.values()) == [fz.unfreeze_at(0), fz.unfreeze_at(10), fz.unfreeze_at(20)]

    def test_the_step_counts_the_updates_of_this_transformation(self, params):
        tx = optax.MultiSteps(fz.freeze_when(optax.sgd(0.1), {"encoder": fz.unfreeze_at(2)}), 2)
        history = run(tx, params, 6)
        assert bits(history[4][0]["encoder"]) == bits(params["encoder"])
        assert bits(history[6][0]["encoder"]) != bits(params["encoder"])
        assert history[6][1].inner_opt_state.step == 3

    @pytest.mark.parametrize(
        ("make", "error"),
        [
            (lambda: fz.unfreeze_at(1.5), TypeError),
            (lambda: fz.unfreeze_at(True), TypeError),
            (lambda: fz.freeze_at(-1), ValueError),
            (lambda: fz.alternate(0), ValueError),
            (lambda: fz.alternate(2, -1), ValueError),
            (lambda: fz.gradual_unfreeze("head", 3), TypeError),
            (lambda: fz.gradual_unfreeze(["head", "head"], 3), ValueError),
            (lambda: fz.gradual_unfreeze(["head", 3], 3), TypeError),
            (lambda: fz.gradual_unfreeze(["head"], 0), ValueError),
        ],
    )
    def test_bad_arguments(self, make, error):
        with pytest.raises(error, match="expected: "):
            make()

    @pytest.mark.parametrize(
        ("condition", "error"),
        [
            (lambda step: jnp.array([True, False]), ValueError),
            (lambda step: step * 0.5, TypeError),
            (lambda step: 0.5, TypeError),
            (lambda step: None, TypeError),
            (lambda step: step % 2, TypeError),
            (lambda step: step < 5 and step > 2, TypeError),
            (lambda step: int(step) < 5, TypeError),
        ],
        ids=["array", "float array", "float", "None", "int", "and", "value"],
    )
    def test_a_condition_that_gives_no_bool(self, params, condition, error):
        with pytest.raises(error, match=r"(.|\n)*at: encoder(.|\n)*fix: compare"):
            fz.freeze_when(optax.sgd(0.1), {"encoder": condition}).init(params)

    @pytest.mark.parametrize("value", [0.5, 1, None, "encoder", jnp.ones(2, bool), (True,)], ids=repr)
    def test_a_value_that_is_neither_a_condition_nor_a_bool(self, value):
        with pytest.raises((TypeError, ValueError), match=r"expected a bool for the group\n  at: encoder"):
            fz.freeze_when(optax.sgd(0.1), {"encoder": value})


class TestBadGroups:
    @pytest.mark.parametrize(
        ("groups", "error"),
        [
            ({"decoder": True}, "matches no leaf"),
            (
                {"encoder": True, "encoder/layer_0": True},
                r"'encoder/layer_0' is empty\n  at: encoder/layer_0",
            ),
            ({fz.where(lambda path, leaf: False): True}, r"is empty(.|\n)*a selector that selects nothing"),
            ({fz.rules({"head/kernel": fz.rows(0)}): True}, "must select whole leaves"),
            ({"head/kernel": (fz.rows([]), True)}, "is empty"),
            ({"**": (fz.rows(0), True), "head/kernel": (fz.rows([0]), True)}, "is empty"),
        ],
        ids=["nothing", "shadowed", "where", "rules", "no rows", "rows of another group"],
    )
    def test_refused_in_init(self, params, groups, error):
        with pytest.raises(ValueError, match=error):
            fz.freeze_when(optax.sgd(0.1), groups).init(params)

    @pytest.mark.parametrize(
        ("args", "error"),
        [
            ((optax.sgd(0.1), "encoder"), "takes a mapping"),
            ((optax.sgd, {"encoder": True}), r"not an optimizer(.|\n)*call the factory"),
            (({"encoder": True}, optax.sgd(0.1)), "not an optimizer"),
            ((optax.sgd(0.1), {3: True}), "neither a pattern nor a selector"),
            ((optax.sgd(0.1), {"encoder": True}, 1.0), "`coupled` is not an optimizer"),
        ],
    )
    def test_refused_at_once(self, args, error):
        with pytest.raises(TypeError, match=error):
            fz.freeze_when(*args)

    def test_a_bool_for_a_mask(self):
        with pytest.raises(ValueError, match="a bool where an element mask is expected"):
            fz.freeze_when(optax.sgd(0.1), {"encoder": (True, fz.unfreeze_at(3))})

    def test_one_group_spelled_twice(self):
        with pytest.raises(ValueError, match="two groups have the same name"):
            fz.freeze_when(optax.sgd(0.1), {fz.path("a", "b"): True, ("a", "b"): False})

    def test_the_state_of_other_groups(self, params):
        tx, other = (fz.freeze_when(optax.sgd(0.1), {name: True}) for name in ("encoder", "head"))
        without_leaves = optax.tree_map_params(other, lambda leaf: leaf, other.init(params))
        of_another_model = fz.freeze_when(optax.sgd(0.1), {"w": True}).init({"w": jnp.ones(2)})
        for state in (optax.sgd(0.1).init(params), other.init(params), without_leaves, of_another_model):
            with pytest.raises(TypeError, match="the state was created by a different transformation"):
                tx.update(params, state, params)

    def test_gradients_of_another_structure(self, params):
        tx = fz.freeze_when(optax.sgd(0.1), {"encoder": True})
        with pytest.raises(ValueError, match="updates: different tree structure"):
            tx.update({"head": params["head"]}, tx.init(params), params)


class TestSetFrozen:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda tx: tx,
            lambda tx: optax.chain(optax.clip(1.0), tx),
            lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
            lambda tx: optax.apply_if_finite(tx, 3),
            lambda tx: fz.freeze(tx, "head/bias"),
            lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(rate=1.0),
            lambda tx: optax.multi_transform({"x": tx}, lambda p: jax.tree.map(lambda _: "x", p)),
            lambda tx: fz.freeze_when(tx, {"head/bias": False}),
        ],
        ids=[
            "alone",
            "chain",
            "MultiSteps",
            "apply_if_finite",
            "freeze",
            "hyperparams",
            "multi_transform",
            "freeze_when",
        ],
    )
    def test_it_finds_its_state_anywhere(self, params, wrap):
        tx = wrap(fz.freeze_when(optax.adam(0.1), {"encoder/layer_0": True, "**/kernel": fz.alternate(1)}))

        def toggle(i, state):
            state = fz.set_frozen(state, {"encoder/layer_0": i % 2 == 0})
            assert fz.currently_frozen(state)["encoder/layer_0"] is (i % 2 == 0)
            return state

        history = run(tx, params, 4, jit=True, before_step=toggle)
        moved = [
            bits(a["encoder"]["layer_0"]) != bits(b["encoder"]["layer_0"])
            for (a, _), (b, _) in itertools.pairwise(history)
        ]
        assert moved == [False, True, False, True]

    def test_a_hundred_toggles_are_one_program(self):
        params = {name: jnp.ones(3) * i for i, name in enumerate("abcd")}
        tx = fz.freeze_when(optax.adam(0.1), dict.fromkeys("abcd", False))
        rng = np.random.default_rng(0)

        def toggle(i, state):
            return fz.set_frozen(state, {name: bool(rng.integers(2)) for name in "abcd"})

        run(tx, params, 100, jit=True, before_step=toggle)

    def test_inside_a_jitted_function(self, params):
        tx = fz.freeze_when(optax.sgd(0.1), {"encoder": True})

        @jax.jit
        def f(state, frozen):
            state = fz.set_frozen(state, {"encoder": frozen})
            return fz.currently_frozen(state)["encoder"], tx.update(params, state, params)[0]

        for frozen in (True, False):
            now, updates = f(tx.init(params), jnp.asarray(frozen))
            assert bool(now) is frozen
            assert bool(updates["encoder"]["layer_0"]["kernel"].any()) is not frozen

    def test_the_state_given_stays_as_it_was(self, params):
        state = fz.freeze_when(optax.sgd(0.1), {"encoder": True}).init(params)
        fz.set_frozen(state, {"encoder": False})
        assert fz.currently_frozen(state) == {"encoder": True}

    def test_bad_input(self, params):
        state = optax.chain(fz.freeze_when(optax.sgd(0.1), {"encoder": True, "head": fz.unfreeze_at(3)})).init(params)
        with pytest.raises(KeyError, match=r"(?s)no group of this name.*\['encoder', 'head'\]"):
            fz.set_frozen(state, {"encodr": True})
        with pytest.raises(ValueError, match=r"frozen by a schedule(.|\n)*fz.unfreeze_at\(3\)"):
            fz.set_frozen(state, {"head": True})
        for value in (1, 0.5, None, jnp.ones(2, bool)):
            with pytest.raises((TypeError, ValueError), match="expected a bool for the group"):
                fz.set_frozen(state, {"encoder": value})
        with pytest.raises(TypeError, match="takes a mapping"):
            fz.set_frozen(state, "encoder")
        for function in (fz.currently_frozen, lambda state: fz.set_frozen(state, {"encoder": True})):
            with pytest.raises(ValueError, match="no state of"):
                function(optax.sgd(0.1).init(params))

    def test_placed_as_before(self, params):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        state = jax.device_put(fz.freeze_when(optax.sgd(0.1), {"encoder": True}).init(params), replicated)
        assert fz.set_frozen(state, {"encoder": False}).groups["encoder"].frozen.sharding == replicated


class TestCoupled:
    def test_a_clip_over_all_groups(self, params):
        tx = fz.freeze_when(optax.sgd(1.0), {"encoder": fz.unfreeze_at(1)}, optax.clip_by_global_norm(1.0))
        grads = jax.tree.map(jnp.cos, params)
        state = tx.init(params)
        updates, state = tx.update(grads, state, params)
        norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(updates["head"])))
        assert norm == pytest.approx(1.0)
        updates, _ = tx.update(grads, state, params)
        plain = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
        assert bits(updates) == bits(plain.update(grads, plain.init(params), params)[0])

    def test_its_state_goes_on(self, params, compiled):
        tx = fz.freeze_when(optax.sgd(1.0), {"encoder": True}, optax.ema(0.5))
        _, state = compiled(tx.update)(params, tx.init(params), params)
        assert state.coupled_state.count == 1
        assert not any(leaf.any() for leaf in jax.tree.leaves(state.coupled_state.ema["encoder"]))


class TestCompany:
    """Holes and parts in the gradient, extra arguments, and what users have already."""

    def test_inside_freeze(self, params, loss, batch):
        spec = {"encoder": {"layer_0": True, "layer_1": {"kernel": fz.rows([0, 1]), "bias": False}}, "head": False}
        tx = fz.freeze(fz.freeze_when(optax.adam(0.1), {"encoder": fz.unfreeze_at(1)}), spec)
        state = tx.init(params)

        @jax.jit
        def step(params, state):
            updates, state = tx.update(fz.grad(loss, spec)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        first, state = step(params, state)
        assert bits(first["encoder"]) == bits(params["encoder"])
        second, state = step(first, state)
        kernel = second["encoder"]["layer_1"]["kernel"]
        assert bits(kernel[:2]) == bits(params["encoder"]["layer_1"]["kernel"][:2])
        assert bits(kernel[2:]) != bits(params["encoder"]["layer_1"]["kernel"][2:])
        assert bits(second["encoder"]["layer_0"]) == bits(params["encoder"]["layer_0"])

    def test_on_the_trainable_part(self, params, loss, batch, compiled):
        spec = "encoder/layer_0"
        trainable, rest = fz.partition(params, spec)
        tx = fz.freeze_when(optax.adam(0.1), {"encoder": fz.unfreeze_at(1)})

        def step(trainable, state):
            updates, state = tx.update(jax.grad(fz.restrict(loss, rest))(trainable, batch), state, trainable)
            return optax.apply_updates(trainable, updates), state

        new, state = compiled(step)(trainable, tx.init(trainable))
        assert bits(new["encoder"]) == bits(trainable["encoder"])
        assert bits(compiled(step)(new, state)[0]["encoder"]) != bits(trainable["encoder"])
        assert bits(new["head"]) != bits(trainable["head"])

    def test_a_mask_for_a_leaf_that_is_a_part_already(self):
        tx = fz.freeze(fz.freeze_when(optax.sgd(0.1), {"w": (fz.rows(0), True)}), fz.rules({"w": fz.rows(1)}))
        with pytest.raises(ValueError, match=r"cannot select elements of a Part\n  at: w"):
            tx.init({"w": jnp.ones((3, 2))})

    def test_extra_arguments(self, params, loss, batch):
        """A line search of each group, over its own leaves."""
        tx = fz.freeze_when(optax.lbfgs(), {"encoder": fz.unfreeze_at(1), "head": False})
        state, before = tx.init(params), params

        @jax.jit
        def step(params, state):
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss, x=batch)
            return optax.apply_updates(params, updates), state

        first, state = step(params, state)
        assert bits(first["encoder"]) == bits(before["encoder"])
        assert loss(first, batch) < loss(before, batch)
        second, _ = step(first, state)
        assert bits(second["encoder"]) != bits(before["encoder"])

    def test_scan_over_steps_is_the_loop(self, params):
        tx = fz.freeze_when(optax.adamw(0.1), {"encoder": fz.alternate(2), "head/bias": False})

        def body(carry, _):
            params, state = carry
            updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
            return (optax.apply_updates(params, updates), state), fz.currently_frozen(state)["encoder"]

        (new, state), frozen = jax.lax.scan(body, (params, tx.init(params)), length=5)
        assert frozen.tolist() == [True, False, False, True, True]
        chex.assert_trees_all_close((new, state), run(tx, params, 5)[-1], rtol=1e-5)

    def test_donated_state(self, params):
        tx = fz.freeze_when(optax.adamw(0.1), {"encoder": fz.alternate(1)})
        step = jax.jit(lambda p, s: tx.update(p, s, p), donate_argnums=1)
        state = tx.init(params)
        for _ in range(3):
            _, state = step(params, state)
        assert step._cache_size() == 1
        assert bits(state) == bits(run(tx, params, 3, grads=lambda p: p, jit=True)[-1][1]) or state.step == 3

    def test_no_copy_of_a_donated_state(self):
        """XLA updates the state in place: no temporary memory of its size."""
        params = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in "abcd"}
        tx = fz.freeze_when(optax.adam(0.1), dict.fromkeys("abcd", False))
        step = jax.jit(lambda s, g, p: tx.update(g, s, p)[::-1], donate_argnums=0)
        memory = step.lower(jax.eval_shape(tx.init, params), params, params).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 256 * 256

    def test_vmap_over_an_ensemble(self, params):
        tx = fz.freeze_when(optax.adam(0.1), {"encoder": fz.unfreeze_at(1), "head": True})
        stacked = jax.tree.map(lambda p: jnp.stack([p, p + 1]), params)
        state = jax.vmap(tx.init)(stacked)
        state = state._replace(
            groups={**state.groups, "head": state.groups["head"]._replace(frozen=jnp.array([True, False]))}
        )
        updates, _ = jax.vmap(tx.update)(stacked, state, stacked)
        new = optax.apply_updates(stacked, updates)
        assert bits(new["encoder"]) == bits(stacked["encoder"])
        moved = [
            bits(jax.tree.map(lambda p, i=i: p[i], new["head"]))
            != bits(jax.tree.map(lambda p, i=i: p[i], stacked["head"]))
            for i in (0, 1)
        ]
        assert moved == [False, True]

    def test_on_eight_devices(self):
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
        plain = {name: jax.random.normal(jax.random.key(i), (8, 4)) for i, name in enumerate("abc")}
        tx = fz.freeze_when(optax.adamw(0.1), {"a": fz.alternate(1), "b": (plain["b"] > 0, True)})
        sharded = jax.device_put(plain, sharding)
        state = tx.init(sharded)
        assert state.groups["a"].inner_state[0].mu["a"].sharding == sharding
        assert state.groups["b"].masks["b"].sharding == sharding
        got, expected = run(tx, sharded, 3)[-1][0], run(tx, plain, 3)[-1][0]
        chex.assert_trees_all_close(got, expected, rtol=1e-5)
        assert got["a"].sharding == sharding
        step = jax.jit(tx.update).lower(sharded, state, sharded).compile().as_text()
        assert not any(name in step for name in ("all-gather", "all-reduce", "collective-permute"))

    def test_train_state(self, params):
        tx = fz.freeze_when(optax.adamw(0.1), {"encoder": True})
        state = TrainState.create(apply_fn=None, params=params, tx=tx).replace(step=jnp.int32(0))
        step = jax.jit(lambda state: state.apply_gradients(grads=jax.tree.map(jnp.cos, state.params)))
        first = step(state)
        assert bits(first.params["encoder"]) == bits(params["encoder"])
        second = step(first.replace(opt_state=fz.set_frozen(first.opt_state, {"encoder": False})))
        assert bits(second.params["encoder"]) != bits(params["encoder"])
        assert step._cache_size() == 1
        restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(second))
        assert fz.currently_frozen(restored) == {"encoder": False}
        assert bits(step(restored).params) == bits(step(second).params)

    def test_nnx_optimizer(self):
        model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1)))
        mask = np.arange(3).reshape(3, 1) == 1
        groups = {
            "layers/0/kernel": (fz.rows([0, 2]), fz.unfreeze_at(2)),
            "layers/1/kernel": (mask, True),
            "**/bias": True,
        }
        optimizer = nnx.Optimizer(model, fz.freeze_when(optax.adamw(0.1), groups), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((2, 4))) ** 2))(model)
            optimizer.update(model, grads)

        def values():
            return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Param))["layers"])

        history = [values()]
        for i in range(4):
            if i == 3:
                optimizer.opt_state = fz.set_frozen(optimizer.opt_state, {"**/bias": False})
            step(model, optimizer)
            history.append(values())
        assert fz.currently_frozen(optimizer.opt_state) == {
            "layers/0/kernel": False,
            "layers/1/kernel": True,
            "**/bias": False,
        }
        first, third, last = history[0], history[3], history[4]
        assert bits(history[2][0]["kernel"][[0, 2]]) == bits(first[0]["kernel"][[0, 2]])
        assert (history[3][0]["kernel"][[0, 2]] != first[0]["kernel"][[0, 2]]).all()
        assert (history[1][0]["kernel"][[1, 3]] != first[0]["kernel"][[1, 3]]).all()
        assert last[1]["kernel"][mask].tobytes() == first[1]["kernel"][mask].tobytes()
        assert (last[1]["kernel"][~mask] != first[1]["kernel"][~mask]).all()
        assert bits(third[0]["bias"]) == bits(first[0]["bias"]) != bits(last[0]["bias"])

    def test_equinox_and_linen(self):
        model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
        tx = fz.freeze_when(optax.adamw(0.1), {"layers/0": True})
        grads = eqx.filter_grad(lambda model: jnp.sum(jax.vmap(model)(jnp.ones((3, 2)))))(model)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        updates, _ = tx.update(grads, tx.init(params), params)
        new = eqx.combine(optax.apply_updates(params, updates), static)
        assert bits(new.layers[0].weight) == bits(model.layers[0].weight)
        assert bits(new.layers[1].weight) != bits(model.layers[1].weight)
        params = nn.Dense(2).init(jax.random.key(0), jnp.ones((1, 3)))
        new = run(fz.freeze_when(optax.adamw(0.1), {"params/kernel": True}), params, 1)[-1][0]
        assert bits(new["params"]["kernel"]) == bits(params["params"]["kernel"])
        assert bits(new["params"]["bias"]) != bits(params["params"]["bias"])


GROUPS = {
    "encoder/**": fz.alternate(2),
    "**/bias": False,
    fz.each("head"): (fz.rows([0]), fz.unfreeze_at(3)),
}


class TestResume:
    """Stop at any step, restore parameters and state, and go on: bit-equal to not having stopped."""

    @pytest.fixture
    def tx(self):
        return optax.chain(optax.clip(1.0), fz.freeze_when(optax.adamw(optax.linear_schedule(0.1, 0.0, 8)), GROUPS))

    @staticmethod
    def toggle(i, state):
        return fz.set_frozen(state, {"**/bias": i >= 3})

    @staticmethod
    def by_orbax(tree, like, directory):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory / "state", tree)
            checkpointer.wait_until_finished()
            return checkpointer.restore(directory / "state", like)

    @staticmethod
    def by_flax(tree, like, directory):
        return flax.serialization.from_bytes(like, flax.serialization.to_bytes(tree))

    @staticmethod
    def by_pickle(tree, like, directory):
        return pickle.loads(pickle.dumps(tree))

    @staticmethod
    def by_deepcopy(tree, like, directory):
        return copy.deepcopy(tree)

    @pytest.mark.parametrize(("how", "stop"), [("orbax", 2), ("orbax", 3), ("flax", 3), ("pickle", 4), ("deepcopy", 5)])
    def test_in_the_middle_of_a_schedule_and_right_after_a_toggle(self, params, tx, stop, how, tmp_path):
        @jax.jit
        def step(params, state):
            updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
            return optax.apply_updates(params, updates), state

        def go_on(at, state, steps):
            for i in steps:
                at, state = step(at, self.toggle(i, state))
            return at, state

        at, state = go_on(params, tx.init(params), range(stop))
        saved = at, self.toggle(stop, state)
        restored = getattr(self, f"by_{how}")(saved, (params, tx.init(params)), tmp_path)
        assert bits(restored) == bits(saved)
        assert jax.tree.structure(restored) == jax.tree.structure(saved)
        assert fz.currently_frozen(restored) == fz.currently_frozen(saved)
        assert bits(go_on(*restored, range(stop, 6))) == bits(go_on(at, state, range(stop, 6)))

    def test_tree_map_params(self, params, tx):
        grads = jax.tree.map(jnp.cos, params)
        _, state = tx.update(grads, tx.init(params), params)
        mapped = optax.tree_map_params(tx, lambda leaf: leaf, state)
        assert bits(mapped) == bits(state)
        assert bits(tx.update(grads, mapped, params)) == bits(tx.update(grads, state, params))
        assert fz.currently_frozen(mapped) == fz.currently_frozen(state)
        counted = optax.tree_map_params(tx, lambda leaf: leaf, state, transform_non_params=lambda leaf: leaf + leaf)
        assert counted[1].step == 2 * state[1].step

    def test_tree_map_params_of_a_dense_mask(self):
        params = {"w": jnp.ones((5, 3)), "v": jnp.ones(3)}
        tx = fz.freeze_when(optax.adam(0.1), {"w": (DENSE, True)})
        state = tx.init(params)
        names = optax.tree_map_params(tx, lambda leaf: "param", state, transform_non_params=lambda leaf: "other")
        assert names.groups["w"].masks["w"] == "param"
        assert names.step == names.groups["w"].frozen == "other"
        mapped = optax.tree_map_params(tx, lambda leaf: leaf, state)
        assert bits(tx.update(params, mapped, params)) == bits(tx.update(params, state, params))


def test_two_players_each_frozen_in_turn():
    """Two scalars x and y with the loss |y - x|, each frozen for five steps in turn, over 100 steps with Adam."""
    params = {"x": jnp.float32(0.0), "y": jnp.float32(3.0)}
    grad = jax.grad(lambda p: jnp.abs(p["y"] - p["x"]))
    tx = fz.freeze_when(optax.adam(0.1), {"x": fz.alternate(5), "y": fz.alternate(5, 5)})

    @jax.jit
    def step(params, state):
        updates, state = tx.update(grad(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    expected, states = dict(params), {name: optax.adam(0.1).init(params[name]) for name in params}
    update = jax.jit(optax.adam(0.1).update)
    live = []
    for i in range(100):
        moving, still = ("y", "x") if i // 5 % 2 == 0 else ("x", "y")
        updates, states[moving] = update(grad(expected)[moving], states[moving], expected[moving])
        expected[moving] = optax.apply_updates(expected[moving], updates)
        new, new_state = step(params, state)
        assert bits(new[still]) == bits(params[still])
        assert bits(new_state.groups[still]) == bits(state.groups[still])
        params, state = new, new_state
        live.append(len(jax.live_arrays()))
    assert bits(params) == bits(expected)
    for name in params:
        assert [b[1:] for b in bits(state.groups[name].inner_state)] == [b[1:] for b in bits(states[name])]
    assert step._cache_size() == 1
    assert live[20] == live[-1]


@pytest.mark.parametrize("frozen", ["encoder", fz.rules({"head/kernel": fz.rows(0)})], ids=repr)
@pytest.mark.parametrize("groups", [{"encoder": True}, {"head/kernel": (fz.rows(0), fz.unfreeze_at(2))}], ids=repr)
def test_the_gradient_of_a_part_of_the_groups(params, loss, batch, frozen, groups):
    tx = fz.freeze_when(optax.sgd(0.1), groups)
    with pytest.raises(ValueError, match=r"fix: give the gradient of every group(.|\n)*fz\.grad\(loss, fz\.spec_of"):
        tx.update(fz.grad(loss, frozen)(params, batch), tx.init(params), params)
    tx.update(fz.grad(loss, False)(params, batch), tx.init(params), params)


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("own", [["a"], ["a", "**/a"]], ids=["one group", "two groups"])
def test_compact_groups_of_every_element(own, switch):
    params = {"a": jnp.ones((4, 2)), "b": jnp.ones(3)}
    mask = np.arange(8).reshape(4, 2) % len(own) == 0
    masks = [fz.elements(mask, compact=True), fz.elements(~mask, compact=True)]
    tx = fz.freeze_when(optax.sgd(0.5), {name: (m, switch) for name, m in zip(own, masks, strict=False)})
    updates, _ = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert bits(updates["a"]) == bits(jnp.full((4, 2), -0.0 if switch else -0.5))
    assert optax.apply_updates(params, updates)["a"].shape == (4, 2)


class TestTheStateOfAnotherSchedule:
    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize(
        ("before", "after"),
        [(fz.unfreeze_at(3), True), (True, fz.unfreeze_at(3)), (fz.unfreeze_at(3), fz.unfreeze_at(4))],
        ids=["now a switch", "was a switch", "another step"],
    )
    def test_is_refused_and_migrates(self, before, after, compiled):
        params = {"a": jnp.ones(2), "b": jnp.ones(2)}
        _, state = run(fz.freeze_when(optax.adam(0.1), {"a": before}), params, 2)[-1]
        tx = fz.freeze_when(optax.adam(0.1), {"a": after})
        update = jax.jit(tx.update) if compiled else tx.update
        with pytest.raises(ValueError, match=r"a different schedule(.|\n)*at: a(.|\n)*fz.migrate"):
            update(params, state, params)
        migrated = fz.migrate(state, tx, params)
        assert migrated.step == 2
        assert bits(migrated.rest_state) == bits(state.rest_state)
        update(params, migrated, params)

    @pytest.mark.parametrize("with_params", [True, False])
    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ((fz.rows([0]), True), (fz.rows([1]), True)),
            ((fz.rows([0]), True), True),
            (True, (fz.elements(np.eye(3, 2, dtype=bool)), True)),
            (
                (fz.elements(np.eye(3, 2, dtype=bool), compact=True), True),
                (fz.elements(np.eye(3, 2, dtype=bool)), True),
            ),
        ],
        ids=["other rows", "all rows", "some elements", "not compact"],
    )
    def test_the_state_of_other_groups(self, before, after, with_params, compiled):
        params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
        state = fz.freeze_when(optax.adam(0.1), {"a": before}).init(params)
        update = fz.freeze_when(optax.adam(0.1), {"a": after}).update
        with pytest.raises(ValueError, match=r"the state was created with different groups\n  at: a(.|\n)*fz.migrate"):
            (jax.jit(update) if compiled else update)(params, state, params if with_params else None)

    def test_the_state_of_equal_groups(self):
        """From another process, and two compact masks at one leaf, jitted."""
        params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
        first, second = (fz.elements(np.arange(6).reshape(3, 2) == i, compact=True) for i in (0, 1))

        def make():
            return fz.freeze_when(optax.adam(0.1), {"a": (first, True), "**/a": (second, True)})

        state = make().init(params)
        copied = pickle.loads(pickle.dumps(state))
        updates = [jax.jit(make().update)(params, s, params)[0] for s in (state, copied)]
        assert bits(updates[0]) == bits(updates[1])

    def test_what_cannot_be_compared_is_as_the_state_says(self):
        params = {"a": jnp.ones(2), "b": jnp.ones(2)}
        state = fz.freeze_when(optax.sgd(0.1), {"a": lambda step: step < 3}).init(params)
        assert fz.currently_frozen(state) == {"a": True}
        updates, _ = fz.freeze_when(optax.sgd(0.1), {"a": lambda step: step >= 3}).update(params, state, params)
        assert (updates["a"] == 0).all()


def test_rows_of_a_frozen_group_have_the_dtype_of_what_trains():
    params, grads = {"w": jnp.ones((2, 2))}, {"w": jnp.full((2, 2), 0.1, jnp.bfloat16)}
    tx = fz.freeze_when(optax.adam(0.1), {"w": (fz.rows([0]), True)})
    eager, _ = tx.update(grads, tx.init(params), params)
    jitted, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert eager["w"].dtype == jitted["w"].dtype == jnp.float32
    chex.assert_trees_all_close(eager, jitted, rtol=1e-2)


def test_never_is_a_number_beyond_the_steps():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = fz.freeze_when(optax.sgd(0.1), {"a": fz.freeze_at(2**40), "b": fz.unfreeze_at(2**31)})
    assert fz.currently_frozen(tx.init(params)) == {"a": False, "b": True}


class TestCurrentlyFrozenRefuses:
    def test_two_groups_of_one_name_that_disagree(self):
        params = {"a": jnp.ones(2), "b": jnp.ones(2)}
        first, second = (fz.freeze_when(optax.sgd(0.1), {"a": frozen}) for frozen in (True, False))
        assert fz.currently_frozen(optax.chain(first, first).init(params)) == {"a": True}
        with pytest.raises(ValueError, match="two groups have the same name"):
            fz.currently_frozen(optax.chain(first, second).init(params))

    @pytest.mark.parametrize("frozen", [True, fz.unfreeze_at(3)])
    def test_a_state_without_one_value(self, frozen):
        params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
        init = fz.freeze_when(optax.sgd(0.1), {"a": frozen}).init
        for state in (jax.eval_shape(init, params), jax.vmap(init)(params)):
            with pytest.raises(ValueError, match="does not say which groups are frozen"):
                fz.currently_frozen(state)
