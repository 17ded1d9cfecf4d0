"""`fz.union`, compared with its parts one after the other by hand."""

import itertools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_equal_up_to_rounding, bits

import optax_freeze as fz
from optax_freeze import checkpoint

OLD = slice(0, 4)
CORNER = np.zeros((6, 3), bool)
CORNER[1:4, 1:] = True


def make_params():
    rng = np.random.default_rng(0)
    shapes = {"table": (6, 3), "encoder": (3, 3), "head": (3, 2)}
    return {path: jnp.asarray(rng.normal(size=shape), jnp.float32) for path, shape in shapes.items()}


def loss(params, ids):
    return jnp.sum(jnp.tanh(params["table"][ids] @ params["encoder"] @ params["head"]) ** 2)


IDS = jnp.array([0, 1, 2, 3, 4, 5, 0])
ADAM = optax.adam(0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1))
OTHERS = dict.fromkeys(("table", "encoder", "head"), True)
PARTS = {
    "leaves": ({"encoder": False}, {"head": False}),
    "rows": ({"table": ~fz.rows(OLD)}, {"table": fz.rows(OLD), "head": False}),
    "some rows": ({"table": ~fz.rows([0, 2])}, {"table": ~fz.rows([3, 5]), "head": False}),
    "elements": ({"table": CORNER}, {"table": ~CORNER, "head": False}),
    "compact": ({"table": fz.elements(CORNER, compact=True)}, {"table": fz.elements(~CORNER, compact=True)}),
    "rows and elements": ({"table": ~fz.rows([0, 5])}, {"table": fz.elements(~CORNER), "encoder": False}),
    "dynamic": ({"table": ~fz.rows(jnp.array([5, 0]))}, {"table": ~fz.rows([1, 2]), "head": False}),
}


def parts_of(kind, full_updates=True):
    inners = optax.adam(1e-2), CLIPPED
    pairs = zip(inners, PARTS[kind], strict=True)
    return [fz.freeze(inner, OTHERS | trains, full_updates=full_updates) for inner, trains in pairs]


def by_hand(parts, params, steps):
    states = [part.init(params) for part in parts]
    for _ in range(steps):
        grads = jax.grad(loss)(params, IDS)
        for n, part in enumerate(parts):
            updates, states[n] = part.update(grads, states[n], params)
            params = fz.apply_updates(params, updates, fz.spec_of(states[n]))
    return params, states


@pytest.mark.parametrize("full_updates", [True, False])
@pytest.mark.parametrize("kind", PARTS)
def test_parts_do_what_they_do_alone(kind, full_updates):
    parts = parts_of(kind, full_updates)
    tx, params = fz.union(*parts), make_params()
    expected, states = by_hand(parts, params, 3)
    state = tx.init(params)
    others = {"in place": (params, state), "holes": (params, state)}
    for _ in range(3):
        updates, state = tx.update(jax.grad(loss)(params, IDS), state, params)
        params = fz.apply_updates(params, updates, fz.spec_of(state))
        p, s = others["in place"]
        others["in place"] = fz.update_params(tx, jax.grad(loss)(p, IDS), s, p)
        p, s = others["holes"]
        updates, s = tx.update(fz.grad(loss, fz.spec_of(s))(p, IDS), s, p)
        others["holes"] = fz.apply_updates(p, updates, fz.spec_of(s)), s
    assert bits((params, [*state.parts])) == bits((expected, states))
    assert bits(others["in place"]) == bits((params, state))
    assert_equal_up_to_rounding(others["holes"][0], params)


@pytest.mark.parametrize("kind", ["rows", "some rows", "dynamic"])
def test_a_compiled_step_leaves_what_no_part_trains(kind):
    parts, params = parts_of(kind), make_params()
    tx = fz.union(*parts)
    state = jax.jit(tx.init)(params)
    step = jax.jit(fz.train_step(loss, tx), donate_argnums=(0, 1))
    trained = jax.tree.map(jnp.copy, params)
    for _ in range(3):
        trained, state, _ = step(trained, state, IDS)
    fz.assert_frozen(params, trained, fz.spec_of(state))
    assert_equal_up_to_rounding(trained, by_hand(parts, params, 3)[0])


def test_updates_of_rows_are_a_part_of_the_rows_of_all_parts():
    tx, params = fz.union(*parts_of("some rows", full_updates=False)), make_params()
    updates, _ = tx.update(params, tx.init(params), params)
    assert isinstance(updates["table"], fz.Part)
    assert updates["table"].values.shape == (4, 3)
    assert isinstance(updates["encoder"], optax.MaskedNode)


def test_numbers_without_a_gradient_stay():
    params = {"number": 2.0, "other": 3.0, "kernel": jnp.ones(3)}
    tx = fz.union(fz.freeze(ADAM, "kernel"), fz.freeze(optax.sgd(1.0), fz.all_except("kernel")))
    state, grads = tx.init(params), {"number": None, "other": 1.0, "kernel": jnp.ones(3)}
    updates, _ = tx.update(grads, state, params)
    new = fz.apply_updates(params, updates)
    assert (new["number"], bits(new["kernel"])) == (2.0, bits(jnp.zeros(3)))
    assert new["other"] != 3.0


def test_value_functions_see_what_earlier_parts_have_updated():
    params = make_params()
    specs = OTHERS | {"table": ~fz.rows([0, 1])}, OTHERS | {"table": ~fz.rows([5]), "encoder": False}
    parts = [fz.freeze(optax.lbfgs(), frozen, full_updates=False) for frozen in specs]
    tx, names = fz.union(*parts), ("value", "grad", "value_fn")
    value_fn = lambda p: loss(p, IDS)  # noqa: E731
    p, states = params, [part.init(params) for part in parts]
    got, state = params, tx.init(params)
    trained, in_place = params, tx.init(params)
    for _ in range(2):
        value, grads = jax.value_and_grad(value_fn)(p)
        for n, part in enumerate(parts):
            extra = {"value": value, "grad": grads, "value_fn": value_fn}
            updates, states[n] = part.update(grads, states[n], p, **extra)
            p = fz.apply_updates(p, updates)
        value, grads = fz.value_and_grad(value_fn, fz.spec_of(state))(got)
        extra = {"value": value, "grad": grads, "value_fn": value_fn}
        updates, state = tx.update(grads, state, got, **extra)
        got = fz.apply_updates(got, updates)
        trained, in_place, _ = fz.train_step(loss, tx, extra_args=names)(trained, in_place, IDS)
    for found in (got, trained):
        assert_equal_up_to_rounding(found, p)


def test_groups_in_a_part_freeze_and_thaw():
    params = make_params()
    groups = fz.freeze_when(optax.adam(0.1), {"encoder": fz.unfreeze_at(2), "head": True})
    parts = fz.freeze(groups, "table"), fz.freeze(optax.sgd(0.1), fz.all_except("table"))
    tx = fz.union(*parts)
    state = tx.init(params)
    assert fz.currently_frozen(state) == {"encoder": True, "head": True}
    step = jax.jit(fz.train_step(loss, tx))
    trained = params
    for n, moved in enumerate([["table"], ["head", "table"], ["encoder", "head", "table"]]):
        state = fz.set_frozen(state, {"head": n == 0})
        before = trained
        trained, state, _ = step(trained, state, IDS)
        assert [path for path in sorted(before) if bits(before[path]) != bits(trained[path])] == moved


def test_the_fix_for_two_wrappers_in_a_chain_works():
    params, a, b = make_params(), ADAM, optax.sgd(0.1)
    chain = optax.chain(fz.freeze(a, ["table", "encoder"]), fz.freeze(b, ["head", "encoder"]))
    with pytest.raises(ValueError, match=r"fix: fz\.union\(fz\.freeze\(a, \.\.\.\), fz\.freeze\(b, \.\.\.\)\)"):
        chain.update(params, chain.init(params), params)
    tx = fz.union(fz.freeze(a, ["table", "encoder"]), fz.freeze(b, ["head", "encoder"]))
    updates, _ = tx.update(params, tx.init(params), params)
    moved = [path for path in params if bits(optax.apply_updates(params, updates)[path]) != bits(params[path])]
    assert sorted(moved) == ["head", "table"]
    chain = optax.chain(tx, fz.freeze(optax.identity(), "head"))
    with pytest.raises(ValueError, match="two freezing transformations in a chain"):
        chain.update(params, chain.init(params), params)


def test_other_tools_know_the_union(tmp_path):
    parts, params = parts_of("rows"), make_params()
    tx = fz.union(*parts)
    state = tx.update(params, tx.init(params), params)[1]
    frozen = fz.spec_of(state)
    assert fz.audit(params, frozen, tx)
    assert fz.summary(params, frozen).trainable_elements == 18 + 6
    with pytest.raises(ValueError, match=r"fz.summary\(params, fz.spec_of\(tx.init\(params\)\)\)"):
        fz.summary(params, frozen, tx)
    checkpoint.save(tmp_path, params, frozen, step=1, opt_state=state)
    restored = checkpoint.restore(tmp_path, params, opt_state=tx.init(params))
    assert bits(restored) == bits((params, state))
    other = fz.union(*parts[::-1])
    with pytest.raises(ValueError, match="different"):
        checkpoint.restore(tmp_path, params, opt_state=other.init(params))
    data = flax.serialization.to_bytes(state)
    assert bits(flax.serialization.from_bytes(tx.init(params), data)) == bits(state)
    with pytest.raises(ValueError, match="different spec"):
        other.update(params, state, params)
    with pytest.raises(TypeError, match="different transformation"):
        parts[0].update(params, state, params)
    with pytest.raises(TypeError, match="different transformation"):
        tx.update(params, parts[0].init(params), params)


def test_states_migrate_to_and_from_a_union():
    params, adam = make_params(), optax.adam(0.1)
    whole = fz.freeze(adam, "encoder")
    state = whole.update(params, whole.init(params), params)[1]
    tx = fz.union(*(fz.freeze(adam, OTHERS | trains) for trains in PARTS["rows"]))
    divided = fz.migrate(state, tx, params)
    nu = optax.tree_utils.tree_get(state, "nu")
    slow, fast = (optax.tree_utils.tree_get(part, "nu") for part in divided.parts)
    assert bits((slow["table"], fast["table"], fast["head"])) == bits((nu["table"][:4], nu["table"][4:], nu["head"]))
    assert [int(optax.tree_utils.tree_get(part, "count")) for part in divided.parts] == [1, 1]
    assert bits(fz.migrate(divided, whole, params)) == bits(state)


def test_masks_are_replaced_in_a_leaf_of_one_part():
    params, adam = make_params(), optax.adam(0.1)
    turning = OTHERS | {"table": ~fz.rows(jnp.array([0, 1]))}
    tx = fz.union(fz.freeze(adam, turning), fz.freeze(adam, fz.all_except("head")))
    state = tx.update(params, tx.init(params), params)[1]
    new = fz.replace_masks(state, tx, params, {"table": ~fz.rows(jnp.array([1, 4]))})
    before, after = (optax.tree_utils.tree_get(each.parts[0], "nu")["table"] for each in (state, new))
    assert bits(after) == bits(jnp.stack([before[1], jnp.zeros(3)]))
    assert bits(new.parts[1]) == bits(state.parts[1])
    tx = fz.union(*parts_of("elements"))
    with pytest.raises(ValueError, match="several parts"):
        fz.replace_masks(tx.init(params), tx, params, {"table": CORNER})


@pytest.mark.parametrize(
    "choices",
    [*itertools.combinations([False, ~fz.rows([0, 1]), ~fz.rows([1], axis=1), ~CORNER, ~fz.rows(jnp.array([1]))], 2)],
)
def test_parts_that_overlap_are_refused_in_init(choices):
    tx = fz.union(*(fz.freeze(optax.sgd(0.1), OTHERS | {"table": each}) for each in choices))
    for init in (tx.init, jax.jit(tx.init)):
        with pytest.raises(ValueError, match=r"two parts of fz.union train the same elements\n  at: table"):
            init(make_params())


def test_a_part_whose_rows_keep_their_state():
    """It trains as alone; another part that trains the table is refused."""
    params = {"table": jnp.arange(12.0).reshape(6, 2), "head": jnp.ones(2)}
    rows = {"table": ~fz.rows(jnp.arange(2), keep_state=True), "head": True}
    loss = lambda p, ids: jnp.sum(jnp.tanh(p["table"][ids] * p["head"]))  # noqa: E731
    alone = fz.freeze(optax.adam(0.1), rows)
    both = fz.union(alone, fz.freeze(optax.sgd(0.1), {"table": True, "head": False}))
    results = []
    for tx in (alone, both):
        new, state = params, tx.init(params)
        for ids in ([1, 4], [0, 4]):
            step = fz.train_step(loss, tx, rows={"table": lambda ids: ids})
            new, state, _ = step({**new, "head": params["head"]}, state, jnp.array(ids))
        results.append(new)
    assert bits(results[0]["table"]) == bits(results[1]["table"])
    assert bits(results[1]["head"]) != bits(params["head"])
    with pytest.raises(ValueError, match=r"two parts of fz.union train the same elements\n  at: table"):
        fz.union(alone, fz.freeze(optax.sgd(0.1), {"table": fz.rows([0, 1]), "head": True})).init(params)
