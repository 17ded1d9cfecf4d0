"""Update and apply in one, without a write to what is frozen."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz

MASK = np.arange(15).reshape(5, 3) % 2 == 0
GROUPS = {
    "leaves": {"w": fz.alternate(1), "v": False},
    "rows": {"w": (fz.rows([0, 3]), fz.alternate(1)), "w/**": (fz.rows([1]), True)},
    "rows and a group of the others": {"w": (fz.rows(slice(0, 2)), True), "**": fz.alternate(1)},
    "elements": {"w": (MASK, fz.alternate(1)), "v": fz.alternate(1)},
    "compact elements": {"w": (fz.elements(MASK, compact=True), fz.alternate(1))},
}
NOISY = optax.chain(optax.adamw(optax.cosine_decay_schedule(0.1, 10)), optax.add_noise(0.1, 0.5, key=0))
WRAPPED = {
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "extra arguments": optax.with_extra_args_support,
    "freeze": lambda tx: fz.freeze(tx, "u"),
    "freeze_when": lambda tx: fz.freeze_when(tx, {"u": True}),
}
FROZEN = {
    "leaf": "w",
    "rows": fz.rules({"w": fz.rows([0, 2])}),
    "elements": fz.rules({"w": MASK}),
    "compact": fz.rules({"w": fz.elements(MASK, compact=True), "v": True}),
    "nothing": False,
}


@pytest.fixture
def setting():
    w = jax.random.normal(jax.random.key(0), (5, 3))
    return {"w": w, "v": jnp.ones(2), "u": jnp.full(2, 0.5), "n": jnp.arange(2), "none": None}


def gradient(params):
    return jax.tree.map(lambda p: jnp.cos(p) if jnp.issubdtype(p.dtype, jnp.inexact) else p * 0, params)


def by_update(tx, grads, state, params, **extra_args):
    updates, state = tx.update(grads, state, params, **extra_args)
    return fz.apply_updates(params, updates), state


def run(update, tx, params, steps, grads):
    state, history = tx.init(params), [params]
    for _ in range(steps):
        params, state = update(grads(params), state, params)
        history.append(params)
    return history, state


def same(tx, params, steps=3, grads=gradient, jit=True):
    """Both ways give the same bits; jitted they may round otherwise, where other operations are fused."""
    ways = (functools.partial(by_update, tx), functools.partial(fz.update_params, tx))
    (expected, state), (got, new_state) = (run(jax.jit(way) if jit else way, tx, params, steps, grads) for way in ways)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert [x.shape for x in jax.tree.leaves(new_state)] == [x.shape for x in jax.tree.leaves(state)]
    if jit:
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
    else:
        assert bits((got, new_state)) == bits((expected, state))
    return got


class TestIsUpdateAndApply:
    @pytest.mark.parametrize("name", GROUPS)
    def test_groups(self, setting, name):
        same(fz.freeze_when(NOISY, GROUPS[name], optax.clip_by_global_norm(1.0)), setting)

    def test_bit_for_bit_if_not_compiled(self, setting):
        inner = optax.MultiSteps(optax.adamw(0.1), 2)
        for tx in (fz.freeze_when(inner, GROUPS["rows"]), fz.freeze(inner, FROZEN["rows"])):
            same(tx, setting, jit=False)

    @pytest.mark.parametrize("name", WRAPPED)
    def test_in_other_transformations(self, setting, name):
        same(WRAPPED[name](fz.freeze_when(optax.adam(0.1), {"w": fz.alternate(1)})), setting)

    @pytest.mark.parametrize("name", FROZEN)
    def test_freeze(self, setting, name):
        """Whatever ``full_updates`` is, and whether the gradients are full."""
        frozen = FROZEN[name]
        tx, full = (fz.freeze(optax.adamw(0.1), frozen, full_updates=full) for full in (False, True))
        expected, _ = run(jax.jit(functools.partial(by_update, full)), full, setting, 2, gradient)
        for grads in (gradient, lambda params: fz.partition(gradient(params), frozen)[0]):
            got, _ = run(jax.jit(functools.partial(fz.update_params, tx)), tx, setting, 2, grads)
            chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)

    def test_any_other_optimizer(self, setting):
        same(optax.masked(optax.adamw(0.1), {**dict.fromkeys("wvu", True), "n": False, "none": False}), setting)

    def test_the_trainable_part_alone(self, setting):
        adamw = optax.adamw(0.1)
        for tx in (fz.freeze_when(adamw, {"w": fz.alternate(1)}), fz.freeze(adamw, "u"), optax.sgd(0.1)):
            same(tx, fz.partition(setting, fz.rules({"w": fz.rows([0, 2]), "v": True}))[0])

    def test_extra_arguments(self):
        """A line search of each group evaluates the loss at the parameters before the update."""
        inner = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(4))
        tx = fz.freeze_when(inner, {"a": fz.unfreeze_at(1), "b": False})
        loss = lambda p: jnp.sum(p["a"] ** 2) + jnp.sum((p["b"] - p["a"]) ** 4)  # noqa: E731
        ways = []
        for update in (functools.partial(by_update, tx), functools.partial(fz.update_params, tx)):
            params = {"a": jnp.ones(2), "b": jnp.zeros(2)}
            state, step = tx.init(params), jax.jit(functools.partial(update, value_fn=loss))
            for _ in range(2):
                value, grads = jax.value_and_grad(loss)(params)
                params, state = step(grads, state, params, value=value, grad=grads)
            ways.append((params, state))
        chex.assert_trees_all_close(*ways, rtol=1e-5)
        assert (ways[1][0]["a"] != 1).all()

    def test_a_lone_leaf_and_gradients_of_examples(self):
        """A lone leaf; gradients with an axis of examples."""
        same(fz.freeze_when(optax.adam(0.1), {"**": fz.unfreeze_at(1)}), jnp.ones(2))
        mean = optax.stateless(lambda updates, params: jax.tree.map(lambda g: g.mean(axis=0), updates))
        examples = lambda p: jax.tree.map(lambda x: jnp.stack([x, 2 * x]), p)  # noqa: E731
        same(fz.freeze_when(mean, {"head": fz.unfreeze_at(1)}), {"head": jnp.ones(2), "w": jnp.ones(1)}, grads=examples)


@pytest.mark.parametrize("tx", [fz.freeze(optax.sgd(0.5), "v"), fz.freeze_when(optax.sgd(0.5), {"v": True})])
def test_an_update_has_a_name_for_named_call(tx):
    params = {"v": jnp.ones(2), "w": jnp.ones(3)}
    updates, _ = jax.named_call(tx.update)(params, tx.init(params), params)
    assert bits(optax.apply_updates(params, updates)["v"]) == bits(params["v"])


class TestFrozenBits:
    def test_are_kept_whatever_the_gradient(self, awkward, odd_bits):
        params = {"frozen": {**awkward["frozen"], **odd_bits["frozen"]}, "trains": jnp.ones(2)}
        grads = {**jax.tree.map(lambda p: jnp.full(p.shape, jnp.nan), params), "trains": jnp.ones(2)}
        adamw = optax.adamw(0.1)
        for tx in (fz.freeze_when(adamw, {"frozen": True}, tied="ignore"), fz.freeze(adamw, "frozen")):
            new, _ = jax.jit(functools.partial(fz.update_params, tx))(grads, tx.init(params), params)
            assert bits(new["frozen"]) == bits(params["frozen"])
            assert bits(new["trains"]) != bits(params["trains"])

    @pytest.mark.parametrize(
        ("kind", "dtype"), [("rows", jnp.float32), ("elements", jnp.float8_e4m3fn), ("compact", jnp.float32)]
    )
    def test_of_elements(self, kind, dtype):
        size = jnp.dtype(dtype).itemsize
        patterns = (np.arange(15).reshape(5, 3) * (7 if size == 1 else 1)).astype(f"uint{8 * size}")  # denormals
        patterns[0] |= 1 << (8 * size - 1)  # negative ones, and -0.0
        params = {"w": jax.lax.bitcast_convert_type(jnp.asarray(patterns), dtype)}
        choice = {"rows": fz.rows([0, 2]), "elements": MASK, "compact": fz.elements(MASK, compact=True)}[kind]
        frozen = np.isin(np.indices((5, 3))[0], [0, 2]) if kind == "rows" else MASK
        tx, grads = fz.freeze_when(optax.sgd(0.5), {"w": (choice, True)}), {"w": jnp.ones((5, 3), dtype)}
        new, _ = jax.jit(functools.partial(fz.update_params, tx))(grads, tx.init(params), params)
        before, after = (np.asarray(tree["w"]).view(f"uint{8 * size}") for tree in (params, new))
        assert np.array_equal(before[frozen], after[frozen])
        assert (before[~frozen] != after[~frozen]).any()


SHAPES = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in "abcd"}
SIZE = 256 * 256 * 4


def compile_for(tx, params=SHAPES):
    """The compiled update, with donated parameters and state."""
    update = jax.jit(lambda p, s, g: fz.update_params(tx, g, s, p), donate_argnums=(0, 1))
    return update.lower(params, jax.eval_shape(tx.init, params), params).compile()


class TestInPlace:
    @pytest.mark.parametrize(
        "groups",
        [dict.fromkeys("abcd", True), {"**": fz.alternate(1)}, {"a": (fz.rows(slice(0, 8)), True)}],
        ids=["switches", "one condition", "rows and the rest"],
    )
    def test_nothing_of_the_size_of_a_leaf_is_allocated(self, groups):
        memory = compile_for(fz.freeze_when(optax.adam(0.1), groups)).memory_analysis()
        assert memory.temp_size_in_bytes < SIZE
        assert memory.alias_size_in_bytes >= 12 * SIZE

    def test_outside_of_the_loops_nothing_is_read_or_written(self):
        """So a group that is frozen, whose loop has no iteration, costs nothing."""
        tx = fz.freeze_when(optax.adamw(0.1), dict.fromkeys("abcd", True))
        text = compile_for(tx).as_text()
        [program] = re.findall(r"^ENTRY.*?^}", text, re.DOTALL | re.MULTILINE)
        made = re.findall(r"= f32\[(?:256,256|65536)\]\S* (\w[\w-]*)\(", program)
        assert set(made) == {"parameter", "get-tuple-element"}
        assert len(re.findall(r" while\(", text)) == 4

    @pytest.mark.parametrize("full_updates", [True, False])
    def test_frozen_leaves_are_not_touched(self, full_updates):
        compiled = compile_for(fz.freeze(optax.adamw(0.1), fz.all_except("d"), full_updates=full_updates))
        alone = compile_for(optax.adamw(0.1), {"d": SHAPES["d"]})
        accessed = [each.cost_analysis()["bytes accessed"] for each in (compiled, alone)]
        assert accessed == [pytest.approx(10 * SIZE, 1e-3)] * 2
        assert compiled.memory_analysis().temp_size_in_bytes < SIZE

    def test_rows_of_a_static_freeze_are_written_in_place(self):
        tx = fz.freeze(optax.adamw(0.1), fz.rules({"a": ~fz.rows(slice(0, 8)), "*": True}))
        memory = compile_for(tx).memory_analysis()
        assert memory.temp_size_in_bytes < SIZE // 8


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("update", "exchanged"), [(by_update, r"all-|permute"), (fz.update_params, "all-gather")])
def test_on_eight_devices_nothing_is_exchanged(update, exchanged, axis_type):
    """Rows of another shard are."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    sharding = NamedSharding(mesh, P("x", "y"))
    plain = {name: jax.random.normal(jax.random.key(i), (8, 4)) for i, name in enumerate("abcd")}
    groups = {"a": fz.alternate(1), "b": (plain["b"] > 0, fz.alternate(1))}
    if update is fz.update_params:
        groups["c"] = fz.rows([1, 5]), fz.alternate(1)
    tx = fz.freeze_when(optax.adamw(0.1), groups)
    expected, _ = run(functools.partial(by_update, tx), tx, plain, 2, gradient)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(plain, sharding)
        update = jax.jit(functools.partial(update, tx))
        got, state = run(update, tx, sharded, 2, gradient)
        text = update.lower(sharded, state, sharded).compile().as_text()
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(expected), rtol=1e-5, atol=1e-6)
    assert {leaf.sharding for leaf in (*jax.tree.leaves(got[-1]), state.groups["b"].masks["b"])} == {sharding}
    assert not re.search(exchanged, text)


@pytest.mark.parametrize("wrapper", [optax.MultiSteps, optax.apply_if_finite])
def test_what_is_outside_of_the_freeze_is_said_to_belong_inside(wrapper):
    params = {"w": jnp.ones(2), "v": jnp.ones(2)}
    tx = wrapper(fz.freeze(optax.adam(0.1), "w"), 2)
    with pytest.raises(ValueError, match=r"(?s)outside of fz\.freeze needs .*fix: put everything inside"):
        fz.update_params(tx, fz.partition(params, "w")[0], tx.init(params), params)
