"""An optimizer state from one spec to another: what survives is kept, bit for bit, and nothing is lost silently."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from flax import nnx

import optax_freeze as fz
import optax_freeze.nnx as fnnx

SCHEDULE = optax.linear_schedule(0.1, 0.0, 20)
OPTIMIZERS = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
    "named chain": optax.named_chain(("clip", optax.adaptive_grad_clip(0.1)), ("adam", optax.adam(0.1))),
    "multi_transform": optax.multi_transform(
        {"matrix": optax.adam(SCHEDULE), "vector": optax.sgd(0.1, momentum=0.9)},
        lambda p: jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "vector", p),
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, weight_decay=0.1),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "masked": optax.masked(optax.adam(0.1), lambda p: jax.tree.map(lambda leaf: leaf.ndim == 2, p)),
    "noise": optax.chain(optax.adam(0.1), optax.add_noise(0.1, 0.5, key=0)),
}


def train(tx, params, steps=3, state=None):
    state = tx.init(params) if state is None else state
    for _ in range(steps):
        updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def at(state, path):
    """The bits of what a state has of a parameter, and of what belongs to no parameter."""
    return [row[1:] for row in bits(state) if path in row[0]]


class TestFreeze:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_there_and_back(self, params, name):
        """What goes on training is kept, what thaws is new, what freezes is dropped."""
        tx, wider = fz.freeze(OPTIMIZERS[name], "encoder"), OPTIMIZERS[name]
        params, state = train(tx, params)
        assert bits(fz.migrate(state, tx, params)) == bits(state)
        there, report = fz.migrate(state, wider, params, report=True)
        fresh = wider.init(params)
        assert jax.tree.structure(there) == jax.tree.structure(fresh)
        assert at(there, "head") == at(state, "head")
        assert at(there, "encoder") == at(fresh, "encoder")
        assert report.dropped == ()
        assert all("encoder" in place for place in report.created)
        assert len(report.carried) + len(report.created) == len(jax.tree.leaves(there))
        back, report = fz.migrate(there, tx, params, report=True)
        assert bits(back) == bits(state)
        assert jax.tree.structure(back) == jax.tree.structure(state)
        assert all("encoder" in place for place in report.dropped)
        assert report.created == ()
        train(tx, params, 1, back)

    def test_nested(self, params):
        """Whatever the composition: freeze in a chain in MultiSteps in freeze."""

        def make(spec):
            inner = optax.chain(
                optax.clip(1.0), fz.freeze(optax.adam(SCHEDULE), spec), fz.masked_zero_updates("head/bias")
            )
            return fz.freeze(optax.MultiSteps(inner, 2), "head/bias")

        _, state = train(make("encoder"), params)
        new, report = fz.migrate(state, make("encoder/layer_0"), params, report=True)
        assert at(new, "head") == at(state, "head")
        assert at(new, "acc_grads") == at(state, "acc_grads")
        assert report.dropped == ()
        assert all("layer_1" in place for place in report.created)
        train(make("encoder/layer_0"), params, 2, new)


THIRDS, HALVES, QUARTERS = (np.arange(18).reshape(6, 3) % n == 0 for n in (3, 2, 4))
ROW, COLUMN = np.indices((6, 3))
MASKS = {
    "leaf": (False, ROW < 0),
    "few rows": (fz.rows(slice(0, 4)), ROW < 4),
    "dynamic rows": (fz.rows(jnp.array([1, 0])), ROW < 2),
    "other rows": (~fz.rows([0, 4]), ~np.isin(ROW, [0, 4])),
    "columns": (fz.rows(1, axis=1), COLUMN == 1),
    "elements": (THIRDS, THIRDS),
    "other elements": (HALVES, HALVES),
    "compact": (fz.elements(QUARTERS, compact=True), QUARTERS),
}


class TestParts:
    params = {"w": jax.random.normal(jax.random.key(0), (6, 3)), "v": jnp.ones(2)}  # noqa: RUF012

    @pytest.mark.parametrize("before", MASKS)
    @pytest.mark.parametrize("after", MASKS)
    def test_surviving_elements_keep_their_moments(self, before, after):
        (spec, was_frozen), (new_spec, is_frozen) = MASKS[before], MASKS[after]
        tx, new_tx = (fz.freeze(optax.scale_by_adam(), fz.rules({"w": choice})) for choice in (spec, new_spec))
        _, state = train(tx, self.params)
        new, report = fz.migrate(state, new_tx, self.params, report=True)
        for name in ("mu", "nu"):
            kept = jnp.where(was_frozen | is_frozen, 0, self.whole(state, name))
            assert bits(self.whole(new, name)) == bits(kept)
        assert optax.tree.get(new, "count") == 3
        assert any("w" in place for place in report.created) == bool((was_frozen & ~is_frozen).any())
        assert any("w" in place for place in report.dropped) == bool((~was_frozen & is_frozen).any())
        train(new_tx, self.params, 1, new)

    @staticmethod
    def whole(state, name):
        """A moment of the whole leaf, zero where it is frozen."""
        moment = getattr(state.inner_state.inner_states["trainable"].inner_state, name)
        zeros = {"w": jnp.zeros((6, 3)), "v": jnp.zeros(2)}
        return fz.combine(moment, fz.partition(zeros, fz.spec_of(state))[1])["w"]

    @pytest.mark.parametrize("masks", [("leaf", "columns"), ("columns", "elements"), ("compact", "few rows")])
    def test_several_arrays_for_a_leaf(self, masks):
        """A list of arrays in SM3, of which a ``Part`` is around them all."""
        txs = [fz.freeze(optax.sm3(0.1), fz.rules({"w": MASKS[mask][0]})) for mask in masks]
        for tx, other in (txs, txs[::-1]):
            _, state = train(tx, self.params)
            new, report = fz.migrate(state, other, self.params, report=True)
            assert jax.tree.structure(new) == jax.tree.structure(other.init(self.params))
            assert bits(optax.tree.get(new, "mu")["v"]) == bits(optax.tree.get(state, "mu")["v"])
            assert any("mu/w" in place for place in report.dropped)
            train(other, self.params, 1, new)

    @pytest.mark.parametrize("mask", ["few rows", "compact", "elements"])
    def test_a_leaf_in_part_to_a_hole_of_the_trainable_part(self, mask):
        _, state = train(fz.freeze(optax.adam(0.1), fz.rules({"w": MASKS[mask][0]})), self.params)
        new = fz.migrate(state, optax.adam(0.1), fz.partition(self.params, "w")[0])
        assert bits(new[0].mu["v"]) == bits(optax.tree.get(state, "mu")["v"])

    def test_rows_of_the_trainable_part(self):
        tx = optax.adam(0.1)
        few, more = (fz.partition(self.params, fz.rules({"w": fz.rows(slice(0, n))}))[0] for n in (4, 2))
        _, state = train(tx, few)
        mu, old = (optax.tree.get(s, "mu")["w"] for s in (fz.migrate(state, tx, more), state))
        assert mu.index == more["w"].index
        assert bits(mu.values) == bits(jnp.concatenate([jnp.zeros((2, 3)), old.values]))


class TestGroups:
    """Counts go with the leaves."""

    def test_a_count_continues_with_the_moments_of_a_complex_leaf(self):
        """Its moments have two arrays each."""
        params = {"a": jnp.ones(2), "x": jnp.ones(2) * 1j}
        tx = optax.contrib.split_real_and_imaginary(optax.adam(0.1))
        _, state = train(fz.freeze(tx, "a"), params, 1)
        new = fz.migrate(state, fz.freeze(tx, False), params)
        assert optax.tree.get(new, "count") == 1
        swapped = fz.migrate(state, fz.freeze(tx, "x"), params)
        assert optax.tree.get(swapped, "count") == 0

    def test_the_moments_of_complex_leaves_whose_paths_end_alike(self):
        params = {"x": jnp.ones((2, 3)) * 1j, "o": {"x": jnp.ones((2, 3)) * 1j}}
        tx = optax.contrib.split_real_and_imaginary(optax.adam(0.1))
        _, state = train(tx, params, 1)
        new = fz.migrate(state, tx, {**params, "x": jnp.ones((4, 3)) * 1j})
        mu = optax.tree.get(new, "mu")
        assert [x.shape for x in jax.tree.leaves(mu)] == [(2, 3)] * 2 + [(4, 3)] * 2
        assert bits(mu["o"]) == bits(optax.tree.get(state, "mu")["o"])

    def test_a_group_of_its_own_counts_from_zero(self, params):
        """The remedy for fresh moments under an old count."""
        _, state = train(fz.freeze(optax.adam(0.1), "encoder"), params, 5)
        tx = fz.freeze_when(optax.adam(0.1), {"encoder": False})
        new, report = fz.migrate(state, tx, params, report=True)
        assert new.groups["encoder"].inner_state[0].count == 0
        assert new.ungrouped_state[0].count == 5
        assert at(new.ungrouped_state, "head") == at(state, "head")
        assert "0/count [encoder]" in report.created
        assert "0/count [no group]" in report.carried

    def test_a_label_of_its_own_counts_from_zero(self, params):
        def make(labels):
            transforms = {"head": optax.adam(0.1), "encoder": optax.adam(0.1), "frozen": optax.set_to_zero()}
            return optax.multi_transform(transforms, fz.labels_by_path(labels))

        _, state = train(make({"head": "head", "encoder": "frozen"}), params, 5)
        tx = make({"head": "head", "encoder": "encoder"})
        new = fz.migrate(state, tx, params)
        assert optax.tree.get(new.inner_states["head"], "count") == 5
        assert optax.tree.get(new.inner_states["encoder"], "count") == 0
        assert at(new, "'head'") == at(state, "'head'")

    def test_to_a_group_of_each_leaf_and_back(self, params):
        """Every group of leaves that trained has their count."""
        _, state = train(optax.adam(0.1), params, 5)
        tx = fz.freeze_when(optax.adam(0.1), {fz.each("encoder"): True})
        new, report = fz.migrate(state, tx, params, report=True)
        assert {int(s[0].count) for s in (new.ungrouped_state, *(g.inner_state for g in new.groups.values()))} == {5}
        assert report.created == ("step", *(f"groups/{name}/condition_state" for name in new.groups))
        assert bits(fz.migrate(new, tx, params)) == bits(new)
        assert bits(fz.migrate(new, optax.adam(0.1), params)) == bits(state)
        jax.jit(lambda state: state, donate_argnums=0)(new)  # no buffer stands there twice

    def test_groups_that_join_have_the_count_of_the_one_that_trained_most(self, params):
        _, state = train(fz.freeze_when(optax.adam(0.1), {"encoder": fz.unfreeze_at(3)}), params, 5)
        new, report = fz.migrate(state, fz.freeze(optax.adam(0.1), False), params, report=True)
        assert optax.tree.get(new, "count") == 5
        assert at(new, "layer_0") == at(state, "layer_0")
        assert "0/count [encoder]" in report.dropped

    def test_other_groups_keep_the_step_and_the_switches(self, params):
        tx = fz.freeze_when(optax.adam(0.1), {"encoder/layer_0": True, "head": fz.unfreeze_at(2)})
        _, state = train(tx, params, 4)
        state = fz.set_frozen(state, {"encoder/layer_0": False})
        tx = fz.freeze_when(
            optax.adam(0.1), {"encoder/layer_0": True, "head/bias": fz.unfreeze_at(9), "head": fz.freeze_at(3)}
        )
        new = fz.migrate(state, tx, params)
        assert new.step == 4
        assert fz.currently_frozen(new) == {"encoder/layer_0": False, "head/bias": True, "head": True}
        counts = {name: int(group.inner_state[0].count) for name, group in new.groups.items()}
        assert counts == {"encoder/layer_0": 0, "head/bias": 2, "head": 2}
        mu, old = (s.groups["head"].inner_state[0].mu["head"]["kernel"] for s in (new, state))
        assert bits(mu) == bits(old)

    def test_schedules_without_moments(self, params):
        """No array says which leaves an optimizer has: labels and specs do."""
        sgd = optax.sgd(SCHEDULE)
        _, state = train(fz.freeze(sgd, "encoder"), params)
        new = fz.migrate(state, fz.freeze_when(sgd, {"encoder": False}), params)
        assert [int(s[1].count) for s in (new.groups["encoder"].inner_state, new.ungrouped_state)] == [0, 3]

        def make(default):
            return optax.multi_transform({"a": sgd, "b": sgd}, fz.labels_by_path({"head": "a"}, default=default))

        _, state = train(make("b"), params)
        assert bits(fz.migrate(state, make("b"), params)) == bits(state)

    def test_rows_of_a_leaf_from_a_group_and_the_rest(self, params):
        tx = fz.freeze_when(optax.adam(0.1), {"head/kernel": (fz.rows([0, 1]), fz.unfreeze_at(1))})
        params, state = train(tx, params)
        new = fz.migrate(state, optax.adam(0.1), params)
        own, rest = state.groups["head/kernel"].inner_state[0], state.ungrouped_state[0]
        joined = jnp.concatenate([own.mu["head"]["kernel"], rest.mu["head"]["kernel"]])
        assert bits(new[0].mu["head"]["kernel"]) == bits(joined)
        assert bits(fz.migrate(new, tx, params).ungrouped_state[0].mu) == bits(rest.mu)


@pytest.mark.parametrize("new", ["freeze", "freeze_when", "the same labels inside"])
def test_from_the_labels_of_a_running_experiment(params, new):
    """It continues as if nothing had changed."""
    body, head = optax.adamw(SCHEDULE), optax.adam(0.1)
    labels = {"encoder": {"layer_0": "frozen", "layer_1": "body"}, "head": "head"}
    old = optax.multi_transform({"body": body, "head": head, "frozen": optax.set_to_zero()}, labels)
    tx = fz.freeze(old, "encoder/layer_0")
    if new != "the same labels inside":
        labels["head"] = "body"
        old = optax.multi_transform({"body": body, "frozen": optax.set_to_zero()}, labels)
        conditions = {"encoder/layer_0": True, "head": False}
        tx = fz.freeze(body, "encoder/layer_0") if new == "freeze" else fz.freeze_when(body, conditions)
    params, state = train(old, params)
    migrated, report = fz.migrate(state, tx, params, report=True)
    assert report.dropped == ()
    assert all("layer_0" in name or "/condition_state" in name or name == "step" for name in report.created)
    expected, _ = train(old, params, state=state)
    got, _ = train(tx, params, state=migrated)
    assert bits(got["head"]) == bits(expected["head"])
    assert bits(got["encoder"]["layer_1"]) == bits(expected["encoder"]["layer_1"])
    assert bits(got["encoder"]["layer_0"]) == bits(params["encoder"]["layer_0"])


def test_a_report_names_the_counts_of_all_labels():
    params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
    _, state = train(optax.adam(0.1), params)
    labelled = optax.multi_transform(
        {"slow": optax.adam(0.01), "fast": optax.adam(0.1)}, {"encoder": "slow", "head": "fast"}
    )
    new, report = fz.migrate(state, labelled, params, report=True)
    assert [int(count) for _, count in optax.tree.get_all_with_path(new, "count")] == [3, 3]
    carried, *_ = str(report).splitlines()
    assert carried.startswith("carried: 0/count [fast], 0/count [slow], 0/mu/head [fast], 0/mu/encoder [slow]")


class TestNNX:
    @pytest.fixture
    def model(self):
        return nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1)))

    @staticmethod
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: jnp.sum(model(jnp.ones((2, 4))) ** 2))(model))

    def test_parameters_frozen_and_thawed_by_type(self, model):
        tx = optax.adam(0.1)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        self.step(model, optimizer)
        fnnx.freeze(model, "layers/0")
        narrow, report = fz.migrate(optimizer.opt_state, tx, nnx.state(model, nnx.Param), report=True)
        assert all("layers/0" in place for place in report.dropped)
        assert report.created == ()
        after = nnx.Optimizer(model, tx, wrt=nnx.Param)
        nnx.update(after.opt_state, nnx.state(narrow))
        self.step(model, after)
        fnnx.thaw(model)
        wide, report = fz.migrate(after.opt_state, tx, nnx.state(model, nnx.Param), report=True)
        assert all("layers/0" in place for place in report.created)
        assert report.dropped == ()
        assert wide[0].count == 2
        with pytest.raises(ValueError, match="belongs to other parameters or"):
            fz.migrate(after.opt_state, optax.sgd(0.1, momentum=0.9), nnx.state(model, nnx.Param))


class TestItDoesNotFit:
    @pytest.mark.parametrize(
        "other",
        [
            optax.chain(optax.clip(1.0), optax.adam(0.1)),
            optax.sgd(0.1),
            optax.sgd(0.1, momentum=0.9),
            optax.adam(SCHEDULE),
        ],
        ids=["longer chain", "no state", "momentum", "schedule"],
    )
    def test_a_state_of_another_optimizer(self, params, other):
        state = fz.freeze(optax.chain(optax.adam(0.1), optax.ema(0.9)), "encoder").init(params)
        with pytest.raises(ValueError, match="or to another optimizer"):
            fz.migrate(state, fz.freeze(other, "encoder/layer_0"), params)

    def test_compact_elements_of_the_trainable_part(self, params):
        """Their mask is in the other part: another of the same count would mix up their moments."""
        first = fz.elements(np.arange(8).reshape(4, 2) < 4, compact=True)
        first, second = (fz.partition(params, fz.rules({"head/kernel": mask}))[0] for mask in (first, ~first))
        with pytest.raises(ValueError, match=r"does not contain the mask of a leaf(.|\n)*at: 0/mu/head/kernel"):
            fz.migrate(optax.adam(0.1).init(first), optax.adam(0.1), second)

    def test_what_trained_freezes_and_what_was_frozen_thaws(self, params):
        """Nothing survives, and that is right."""
        tx, other = (fz.freeze(optax.sgd(0.1, momentum=0.9), spec) for spec in ("encoder", "head"))
        _, state = train(tx, params, 1)
        new, report = fz.migrate(state, other, params, report=True)
        assert bits(new) == bits(other.init(params))
        assert report.carried == ()


class TestAParameterNamedAsAFieldOfTheState:
    def test_compact_elements_move_with_all_their_moments(self):
        before, after = (
            fz.elements(np.array(mask), compact=True) for mask in ([True, False] * 2, [True] * 2 + [False] * 2)
        )
        tx = fz.freeze(optax.adam(0.1), {"x": before, "mu": {"x": False}})
        params, old = train(tx, {"x": jnp.ones(4), "mu": {"x": jnp.ones(4)}}, 1)
        new = fz.replace_masks(old, tx, params, {"x": after})
        old, new = (state.inner_state.inner_states["trainable"].inner_state[0] for state in (old, new))
        for moment in ("mu", "nu"):
            assert bits(getattr(new, moment)["x"]) == bits(getattr(old, moment)["x"].at[0].set(0))

    def test_counts_of_groups(self):
        params = {"a": jnp.ones(2), "count": jnp.ones(())}
        tx = fz.freeze_when(optax.adam(0.1), {"a": fz.unfreeze_at(3)})
        _, state = train(tx, params, 4)
        assert bits(fz.migrate(state, tx, params)) == bits(state)
