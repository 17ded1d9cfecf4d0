"""A whole training step, in which each group is updated where its gradient is computed."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from jax.sharding import PartitionSpec as P

import optax_freeze as fz

X = jax.random.normal(jax.random.key(0), (4, 8))
NAMES = ("a", "b", "c", "head")


@pytest.fixture
def params():
    keys = jax.random.split(jax.random.key(1), 4)
    return {name: jax.random.normal(key, (8, 8)) / 3 for name, key in zip(NAMES, keys, strict=True)}


def loss(params, x):
    for name in NAMES:
        x = jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


close = functools.partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-6)


def steps_as_in_two(tx, params, steps, *, loss=loss, jit=True):
    """Parameters and state after each step, compared with those of the gradient and then the update."""
    step = jax.jit(fz.train_step(loss, tx)) if jit else fz.train_step(loss, tx)
    one = two = params, tx.init(params)
    for _ in range(steps):
        *one, value = step(*one, X)
        expected, grads = fz.value_and_grad(loss, fz.spec_of(two[1]))(two[0], X)
        two = fz.update_params(tx, grads, two[1], two[0])
        close((*one, value), (*two, expected))
        yield one


GROUPS = {
    "gradual": fz.gradual_unfreeze(["c", "b", "a"], 1),
    "in turn": {"a": fz.alternate(1), "b": fz.alternate(1, 1)},
    "switches": {"a": True, "b": False, "c": True},
    "rows": {"a": (fz.rows([0, 3]), fz.alternate(1)), "b": True},
    "elements": {"a": (np.eye(8, dtype=bool), fz.alternate(1))},
    "everything": {"**": fz.alternate(1)},
    "constants": {"a": lambda step: True, "b": lambda step: False, "c": fz.alternate(1)},
    "statistics": {**fz.freeze_converged(["b", "c"], 1), "a": lambda step, stats: stats.updates == 2},
}


@pytest.mark.parametrize(("name", "jit"), [*((name, True) for name in GROUPS), ("statistics", False)])
def test_is_the_gradient_and_the_update(params, name, jit):
    for coupled in (None, optax.clip_by_global_norm(1e-3)):
        tx = fz.freeze_when(optax.adamw(0.1), GROUPS[name], coupled)
        old, before = params, tx.init(params)
        for new, state in steps_as_in_two(tx, params, 4, jit=jit):
            for key in (key for key, is_frozen in fz.currently_frozen(before).items() if is_frozen):
                assert bits(state.groups[key]) == bits(before.groups[key])
                assert bits(new.get(key)) == bits(old.get(key)) or name in ("rows", "elements")
            old, before = new, state


def test_parts_and_accumulated_gradients(params):
    """A group whose leaf is a ``Part``, and whose optimizer takes every second gradient."""
    trainable, rest = fz.partition(params, {"a": fz.rows([0, 3]), "b": False, "c": True, "head": False})
    of_parts = lambda trainable, x: loss(fz.combine(trainable, rest), x)  # noqa: E731
    tx = fz.freeze_when(optax.MultiSteps(optax.adam(0.1), 2), {"a": fz.alternate(1), "b": fz.alternate(2)})
    [*_, (new, _)] = steps_as_in_two(tx, trainable, 5, loss=of_parts)
    assert new["a"].index == trainable["a"].index
    assert bits(new["a"]) != bits(trainable["a"])


def test_toggles_compile_nothing_and_choose_what_runs(params):
    tx = fz.freeze_when(optax.adam(0.1), dict.fromkeys("abc", True))
    step, state, new = jax.jit(fz.train_step(loss, tx)), tx.init(params), params
    for flags in itertools.product([True, False], repeat=3):
        now = dict(zip("abc", flags, strict=True))
        state, before = fz.set_frozen(state, now), new
        new, state, _ = step(new, state, X)
        assert fz.currently_frozen(state) == now
        assert {name: bits(new[name]) == bits(before[name]) for name in now} == now
        assert bits(new["head"]) != bits(before["head"])
    assert step._cache_size() == 1


def with_flags(state, converged):
    """The state of ``freeze_converged`` with these flags, as a migration or an edit may leave them."""
    groups = dict(state.groups)
    for (name, group), flag in zip(state.groups.items(), converged, strict=True):
        groups[name] = group._replace(condition_state=group.condition_state._replace(converged=jnp.array(flag)))
    return state._replace(groups=groups)


class TestAnyState:
    """One program for any set, also for those that no schedule reaches."""

    def frozen_in(self, states, groups, params):
        """Which groups are frozen in each state, after a check that a step does so."""
        tx = fz.freeze_when(optax.adam(0.1), groups)
        step = jax.jit(fz.train_step(loss, tx))
        grad = jax.jit(lambda state: fz.grad(loss, fz.spec_of(state))(params, X))
        seen = []
        for state in states(tx.init(params)):
            frozen = fz.currently_frozen(state)
            grads, (new, after, _) = grad(state), step(params, state, X)
            assert {name: bits(new[name]) == bits(params[name]) for name in frozen} == frozen
            assert {name: not grads[name].any() for name in frozen} == frozen
            assert {name: not after.groups[name].inner_state[0].count for name in frozen} == frozen
            seen.append(tuple(frozen.values()))
        assert step._cache_size() == 1
        return seen

    def test_any_flags_of_groups_that_converge(self, params):
        """They freeze from the input end, and the last never."""
        flags = list(itertools.product([False, True], repeat=4))
        groups = fz.freeze_converged(NAMES, every=2)
        seen = self.frozen_in(lambda state: [with_flags(state, each) for each in flags], groups, params)
        first = [[*each[:3], False].index(False) for each in flags]
        assert seen == [tuple(i < n for i in range(4)) for n in first]

    def test_any_step(self, params):
        groups = {"a": fz.alternate(3), "b": fz.alternate(3, 3), "c": fz.unfreeze_at(0)}
        steps = (-1, -4, 0, 3, 2**31 - 2, 2**31 - 1)
        seen = self.frozen_in(lambda state: [state._replace(step=jnp.int32(step)) for step in steps], groups, params)
        a = [True, True, True, False, *(step // 3 % 2 == 0 for step in steps[-2:])]
        assert seen == [(frozen, not frozen, False) for frozen in a]


def test_in_place_and_without_zeros():
    """The parameters and the state are written where they lie, and nothing writes zeros for a frozen group."""
    shapes = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in NAMES}
    x = jax.ShapeDtypeStruct((4, 256), jnp.float32)
    tx = fz.freeze_when(optax.adam(0.1), {name: fz.unfreeze_at(i + 1) for i, name in enumerate("cba")})
    step = jax.jit(fz.train_step(loss, tx), donate_argnums=(0, 1))
    compiled = step.lower(shapes, jax.eval_shape(tx.init, shapes), x).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= 12 * 256 * 256 * 4
    text = compiled.as_text()
    outside = [part for part in text.split("\n\n") if not part.startswith("%fused")]
    assert not re.search(r"= f32\[256,256\]\S* (broadcast|copy)\(", "".join(outside))
    assert len(re.findall(r" while\(", text)) == 4


def test_other_transformations(params):
    inside = optax.chain(optax.clip(1.0), fz.freeze_when(optax.adam(0.1), {"a": fz.alternate(1)}))
    for tx in (inside, fz.freeze(optax.adam(0.1), "a"), optax.chain(optax.clip(1.0), fz.freeze(optax.adam(0.1), "a"))):
        for i, (new, _) in enumerate(steps_as_in_two(tx, params, 2)):
            assert (bits(new["a"]) == bits(params["a"])) is (i == 0 or tx is not inside)


def test_auxiliary_output_and_keywords(params):
    tx = fz.freeze_when(optax.adam(0.1), {"a": fz.alternate(1), "b": True})
    step = jax.jit(fz.train_step(lambda p, x, *, scale: (loss(p, x) * scale, {"x": x, "n": 3}), tx, has_aux=True))
    _, _, (value, aux) = step(params, tx.init(params), X, scale=2.0)
    assert value == pytest.approx(2 * loss(params, X))
    assert bits(aux["x"]) == bits(X)
    assert aux["n"] == 3


@pytest.mark.parametrize("argnums", [1, -2])
def test_parameters_at_another_position(params, argnums):
    tx = fz.freeze_when(optax.adam(0.1), {"a": fz.alternate(1), "b": True})
    of_batch_first = lambda x, p, scale: loss(p, x) * scale  # noqa: E731
    one, two = (params, tx.init(params)), (params, tx.init(params))
    for _ in range(2):
        *one, value = fz.train_step(of_batch_first, tx, argnums=argnums)(*one, X, 2.0)
        *two, expected = fz.train_step(lambda p, x: loss(p, x) * 2.0, tx)(*two, X)
        assert bits((one, value)) == bits((two, expected))


EXTRA_ARGS = {
    "line search": (optax.lbfgs(), ["value", "grad", "value_fn"]),
    "Hessian": (optax.contrib.sophia(0.1, update_interval=1), ["obj_fn"]),
    "gradients": (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2, opaque_mode=True), ["grad_fn"]),
}


@pytest.mark.parametrize("name", EXTRA_ARGS)
@pytest.mark.parametrize("coupled", [None, optax.scale(0.5)], ids=["in the update", "before the update"])
def test_extra_arguments(params, name, coupled):
    """A step in which one group trains is that of ``fz.freeze``, and both are those of the arguments given by hand."""
    inner, names = EXTRA_ARGS[name]
    spec = ["a", "b"]
    with_aux = lambda p, x: (loss(p, x), x)  # noqa: E731
    of_params = lambda p: loss(p, X)  # noqa: E731
    tx = fz.freeze(optax.chain(coupled or optax.identity(), inner), spec)
    by_hand, state = params, tx.init(params)
    for _ in range(2):
        value, grads = fz.value_and_grad(of_params, spec)(by_hand)
        every = {"value": value, "grad": grads, "value_fn": of_params, "obj_fn": of_params}
        every["grad_fn"] = lambda p, _: fz.grad(of_params, spec)(p)
        by_hand, state = fz.update_params(tx, grads, state, by_hand, **{each: every[each] for each in names})
    for each in (tx, fz.freeze_when(inner, {"a": True, "b": True}, coupled)):
        step = jax.jit(fz.train_step(with_aux, each, has_aux=True, extra_args=names))
        new, state, _ = step(params, each.init(params), X)
        new, state, _ = step(new, state, X)
        close(new, by_hand)
        for some in ([], names[1:]) if len(names) > 1 else ([],):
            with pytest.raises((TypeError, ValueError), match="the optimizer takes extra arguments") as caught:
                fz.train_step(loss, each, extra_args=some)(params, each.init(params), X)
            assert str(caught.value).endswith(f"fix: fz.train_step(loss, tx, extra_args={names})")


OUTSIDE = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "its transformation": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 2),
    "momentum": lambda tx: optax.chain(optax.trace(0.9), tx),
    "SAM": lambda tx: optax.contrib.sam(tx, optax.sgd(0.05), sync_period=2),
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("mask", ["leaf", "dynamic"])
def test_a_state_for_all_parameters_around_freeze(params, name, mask):
    inner, frozen = optax.adam(0.1), fz.rules({"a": MASKS[mask]})
    tx = OUTSIDE[name](fz.freeze(inner, frozen))
    with pytest.raises(ValueError, match=r"^a transformation outside of fz\.freeze needs"):
        jax.jit(fz.train_step(loss, tx))(params, tx.init(params), X)
    tx = fz.freeze(OUTSIDE[name](inner), frozen)
    jax.jit(fz.train_step(loss, tx))(params, tx.init(params), X)


def test_a_line_search_around_freeze_needs_both(params):
    search = optax.scale_by_backtracking_linesearch(5)
    tx, names = optax.chain(fz.freeze(optax.sgd(1.0), "a"), search), ["value", "grad", "value_fn"]
    for given, what in (
        ([], "the optimizer takes extra arguments"),
        (names, r"^a transformation outside of fz\.freeze"),
    ):
        with pytest.raises((TypeError, ValueError), match=what):
            fz.train_step(loss, tx, extra_args=given)(params, tx.init(params), X)
    tx = fz.freeze(optax.chain(optax.sgd(1.0), search), "a")
    fz.train_step(loss, tx, extra_args=names)(params, tx.init(params), X)


def in_groups(**of_group):
    """One optimizer for the leaves ``a`` and ``b``, and another for ``c`` and ``head``."""
    return optax.partition(of_group, {"a": "first", "b": "first", "c": "second", "head": "second"})


MASKS = {
    "leaf": True,
    "rows": fz.rows([0, 3]),
    "compact": fz.elements(np.eye(8, dtype=bool), compact=True),
    "dense": fz.elements(np.eye(8, dtype=bool)),
    "dynamic": fz.rows(jnp.array([0, 3])),
}
PARTITIONED = {
    **{
        name: in_groups(first=fz.freeze(optax.adam(0.1), fz.rules({"a": mask})), second=optax.sgd(0.1))
        for name, mask in MASKS.items()
    },
    "two of freeze": in_groups(first=fz.freeze(optax.adam(0.1), "a"), second=fz.freeze(optax.sgd(0.1), "c")),
    "two of freeze_when": in_groups(
        first=fz.freeze_when(optax.adam(0.1), {"a": fz.alternate(1)}),
        second=fz.freeze_when(optax.sgd(0.1), {"c": (fz.rows([0, 3]), True)}),
    ),
    "freeze_when alone": in_groups(
        first=fz.freeze_when(optax.adam(0.1), {"a": fz.alternate(1)}), second=optax.sgd(0.1)
    ),
    "both": in_groups(
        first=fz.freeze_when(optax.adam(0.1), {"a": fz.alternate(1)}),
        second=fz.freeze(optax.sgd(0.1), fz.rules({"c": fz.rows([0, 3]), "head": True})),
    ),
}


@pytest.mark.parametrize(("name", "jit"), [*((name, True) for name in PARTITIONED), ("both", False)])
def test_in_the_groups_of_a_partition(params, name, jit):
    """A leaf of another group trains, also where its optimizer freezes nothing."""
    tx = PARTITIONED[name]
    step = jax.jit(fz.train_step(loss, tx)) if jit else fz.train_step(loss, tx)
    (new, state), (expected, of_update) = (params, tx.init(params)), (params, tx.init(params))
    for _ in range(3):
        new, state, _ = step(new, state, X)
        updates, of_update = tx.update(jax.grad(loss)(expected, X), of_update, expected)
        expected = optax.apply_updates(expected, updates)
        close(new, expected)
    assert bits(new["c"]) != bits(params["c"]) or name == "two of freeze"


class TestInsideOfShardMap:
    """What is equal on all devices before a step may vary after it."""

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = fz.freeze_when(optax.adam(0.1), {"a": True, "b": False})

    def test_each_device_with_groups_of_its_own(self, params):
        frozen = [i % 2 == 0 for i in range(8)]

        @functools.partial(jax.shard_map, mesh=self.mesh, in_specs=(P(), P(), P("data")), out_specs=P("data"))
        def step(params, state, frozen):
            state = fz.set_frozen(state, {"a": frozen[0]})
            updates, _ = self.tx.update(params, state, params)
            params, *_ = fz.train_step(loss, self.tx)(params, state, X)
            return jax.tree.map(lambda x: x[None], (params, updates))

        new, updates = jax.jit(step)(params, self.tx.init(params), jnp.array(frozen))
        assert [bits(new["a"][i]) == bits(params["a"]) for i in range(8)] == frozen
        assert [not updates["a"][i].any() for i in range(8)] == frozen
        assert updates["b"].all()

    def test_parameters_of_which_each_device_has_rows(self, params):
        def gathered(params, x):
            return loss(jax.tree.map(lambda p: jax.lax.all_gather(p, "data", tiled=True), params), x)

        def step(params, state):
            params, state, value = fz.train_step(gathered, self.tx)(params, state, X)
            return params, state, value[None]

        state = self.tx.init(params)
        specs = P("data"), jax.tree.map(lambda x: P("data") if x.ndim else P(), state)
        step = jax.shard_map(step, mesh=self.mesh, in_specs=specs, out_specs=(*specs, P("data")))
        new, _, values = jax.jit(step)(params, state)
        assert {name: bits(new[name]) == bits(params[name]) for name in "ab"} == fz.currently_frozen(state)
        np.testing.assert_allclose(values, loss(params, X), rtol=1e-5)
