"""An optimizer state from one model to another: grown, pruned, split, renamed and reset, compared with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from jax.sharding import NamedSharding, PartitionSpec

import optax_freeze as fz

ADAM = optax.adam(0.1)


def make_params(**shapes):
    return {path: jnp.arange(1.0, np.prod(shape) + 1).reshape(shape) / 10 for path, shape in shapes.items()}


OLD = make_params(embed=(6, 4), head=(4, 6), body=(4, 4))
NEW = make_params(embed=(8, 4), head=(4, 8), body=(4, 4))


def trained(tx, params, steps=2):
    state = tx.init(params)
    for _ in range(steps):
        _, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
    return state


def mask_of(choice, shape):
    """Which elements of the leaf a choice trains."""
    if choice == "dense" or choice == "compact":
        return np.arange(np.prod(shape)).reshape(shape) % 3 > 0
    mask = np.ones(shape, bool)
    if choice != "whole":
        mask[(slice(None),) * choice[0] + (choice[1],)] = False
    return mask


def spec_of(choice, shape):
    if choice == "whole":
        return False
    if choice in ("dense", "compact"):
        return fz.elements(~mask_of(choice, shape), compact=choice == "compact")
    axis, frozen = choice
    kept = [i for i in range(shape[axis]) if i not in frozen]
    return ~fz.rows(jnp.array(kept), axis) if len(frozen) == 3 else fz.rows(frozen, axis)


def full(array, mask):
    """The array of a leaf of which the elements of a mask train, in the leaf's shape."""
    found = np.zeros(mask.shape, np.float32)
    found[mask] = array[mask] if array.shape == mask.shape else np.asarray(array).ravel()
    return found


CHOICES = ["whole", (0, [1, 4]), (1, [0]), (0, [0, 1, 5]), "dense", "compact"]


@pytest.mark.parametrize("now", CHOICES, ids=str)
@pytest.mark.parametrize("before", CHOICES, ids=str)
def test_a_leaf_that_grew_keeps_the_state_of_its_leading_rows(before, now):
    """Each choice grows along either axis."""
    sizes = (6, 4), (6, 7) if (CHOICES.index(before) + CHOICES.index(now)) % 2 else (8, 4)
    old, new = (make_params(w=size, b=(3,)) for size in sizes)
    txs = [
        fz.freeze(ADAM, {"w": spec_of(choice, size), "b": False})
        for choice, size in zip((before, now), sizes, strict=True)
    ]
    state = trained(txs[0], old)
    migrated, report = fz.migrate(state, txs[1], new, report=True)
    masks = [mask_of(choice, size) for choice, size in zip((before, now), sizes, strict=True)]
    for field in ("mu", "nu"):
        was, found = (optax.tree.get(each, field)["w"] for each in (state, migrated))
        expected = np.zeros(sizes[1], np.float32)
        expected[: sizes[0][0], : sizes[0][1]] = full(was, masks[0])
        np.testing.assert_array_equal(full(found, masks[1]), np.where(masks[1], expected, 0))
        assert bits(optax.tree.get(migrated, field)["b"]) == bits(optax.tree.get(state, field)["b"])
    assert {"0/mu/w", "0/nu/w"} <= {*report.carried} & {*report.created}
    assert optax.tree.get(migrated, "count") == 2
    txs[1].update(new, migrated, new)


ROWS = {
    "pruned": [0, 2, 5],
    "kept": np.array([True, False, True, False, False, True]),
    "split": [0, 1, 2, 3, 4, 5, 2, 2],
    "reordered": jnp.array([5, 4, 3, 2, 1, 0]),
}


@pytest.mark.parametrize("choice", ["whole", (0, [1, 2]), "dense"], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_rows_take_the_state_of_the_old_rows_that_they_were(name, choice):
    numbers = np.asarray(ROWS[name])
    numbers = np.flatnonzero(numbers) if numbers.dtype == bool else numbers
    old, new = make_params(w=(6, 4)), {"w": make_params(w=(6, 4))["w"][numbers]}
    before, after = (fz.freeze(ADAM, {"w": spec_of(choice, p["w"].shape)}) for p in (old, new))
    state = trained(before, old)
    migrated, report = fz.migrate(state, after, new, rows={"w": ROWS[name]}, report=True)
    mask, now = (mask_of(choice, p["w"].shape) for p in (old, new))
    for field in ("mu", "nu"):
        was, found = (optax.tree.get(each, field)["w"] for each in (state, migrated))
        np.testing.assert_array_equal(full(found, now), np.where(now, full(was, mask)[numbers], 0))
    if choice == "whole":
        assert report.created == ()
        assert bool(report.dropped) == (name in ("pruned", "kept"))


def test_a_state_that_holds_nothing_of_any_leaf_fits_any_rows_and_names():
    old, new = make_params(w=(6, 4)), make_params(w=(3, 4))
    state = trained(tx := optax.sgd(optax.linear_schedule(0.1, 0.0, 10)), old)
    assert bits(fz.migrate(state, tx, new, rows={"w": ROWS["kept"]}, rename={"layer/w": "w"})) == bits(state)
    with pytest.raises(ValueError, match=r"got: row -1\n  expected: numbers from 0\n"):
        fz.migrate(state, tx, new, rows={"w": [0, 1, -1]})
    with pytest.raises(ValueError, match="an array of the state contains several leaves"):
        fz.migrate(trained(tx := optax.flatten(ADAM), old), tx, new, rows={"w": [0, 2, 5]})


def test_leaves_that_are_new_gone_renamed_or_of_another_shape():
    old = {"layers": [jnp.ones((2, 2)), jnp.full((2, 2), 2.0)], "head": jnp.ones((2, 3)), "gone": jnp.ones(7)}
    new = {"layers": [jnp.ones((2, 2))] * 3, "head": jnp.ones((3, 5)), "fresh": jnp.ones(9)}
    for tx in (ADAM, fz.freeze(ADAM, "layers/0")):
        state = trained(tx, old)
        with pytest.raises(ValueError, match=r"rename: (.|\n)*lead to one path"):
            fz.migrate(state, ADAM, new, rename={"layers/0": "layers/2", "layers/1": "layers/2"})
        migrated, report = fz.migrate(state, ADAM, new, rename={"layers/1": "layers/2"}, reset="layers/1", report=True)
        mu = [optax.tree.get(each, "mu") for each in (migrated, state)]
        assert bits(mu[0]["layers"][2]) == bits(mu[1]["layers"][1])
        for path in ("head", "fresh"):
            assert bits(mu[0][path]) == bits(jnp.zeros_like(new[path]))
        assert {"0/mu/gone", "0/mu/head"} <= {*report.dropped}
        assert {"0/mu/fresh", "0/mu/head", "0/mu/layers/1"} <= {*report.created}
        assert optax.tree.get(migrated, "count") == 2


def test_a_leaf_gone_beside_a_new_one_of_its_shape_is_named():
    state, new = trained(ADAM, make_params(a=(3,), b=(2,))), make_params(c=(3,), b=(2,))
    with pytest.raises(ValueError, match=r"rename=\{'a': 'c'\} if it is, else reset=\['c'\]"):
        fz.migrate(state, ADAM, new)
    renamed, anew = fz.migrate(state, ADAM, new, rename={"a": "c"}), fz.migrate(state, ADAM, new, reset=["c"])
    assert bits(renamed[0].mu["c"]) == bits(state[0].mu["a"])
    assert bits(anew[0].mu["c"]) == bits(jnp.zeros(3))


def test_what_is_reset_begins_anew_and_the_rest_stays():
    schedule = optax.adamw(optax.linear_schedule(0.1, 0.0, 20))
    for tx in (schedule, fz.freeze(schedule, "body")):
        state = trained(tx, OLD)
        migrated = fz.migrate(state, tx, OLD, reset={"embed": fz.rows([1, 3]), "head": True, "body": False})
        was, found = (optax.tree.get(each, "nu") for each in (state, migrated))
        expected = np.array(was["embed"])
        expected[[1, 3]] = 0
        assert bits(found["embed"]) == bits(jnp.asarray(expected))
        assert bits(found["head"]) == bits(jnp.zeros((4, 6)))
        assert bits(found["body"]) == bits(was["body"])
        counts = [int(x) for _, x in optax.tree.get_all_with_path(migrated, "count")]
        assert counts == [2, 2]
        assert bits(fz.migrate(state, tx, OLD, reset=True)) == bits(tx.init(OLD))


def test_a_group_whose_leaves_are_all_reset_counts_from_zero():
    tx = fz.freeze_when(ADAM, {"embed": False})
    migrated = fz.migrate(trained(tx, OLD), tx, OLD, reset="embed")
    assert (int(migrated.groups["embed"].inner_state[0].count), int(migrated.ungrouped_state[0].count)) == (0, 2)
    assert int(migrated.step) == 2


@pytest.mark.parametrize("frozen", [None, "body", {"embed": fz.rows([0, 1, 2]), "head": True, "body": True}], ids=str)
def test_factors_follow_their_rows_or_begin_anew(frozen):
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
    tx = tx if frozen is None else fz.freeze(tx, frozen)
    state, fresh = trained(tx, OLD), tx.init(NEW)
    migrated = fz.migrate(state, tx, NEW)
    row, column = (
        [optax.tree.get(each, name)["embed"] for each in (state, migrated, fresh)] for name in ("v_row", "v_col")
    )
    if isinstance(frozen, dict):  # from 3 x 4 rows to 5 x 4: the factors change places
        assert bits((row[1], column[1])) == bits((row[2], column[2]))
    else:
        assert bits(row[1]) == bits(row[0])
        assert bits(column[1]) == bits(jnp.concatenate([column[0], column[2][6:]]))
    square = make_params(w=(6, 6), b=(4, 3)), make_params(w=(8, 6), b=(4, 3))
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
    state, migrated = trained(tx, square[0]), fz.migrate(trained(tx, square[0]), tx, square[1])
    assert bits(optax.tree.get(migrated, "v_row")["w"]) == bits(optax.tree.get(tx.init(square[1]), "v_row")["w"])
    assert bits(optax.tree.get(migrated, "v_row")["b"]) == bits(optax.tree.get(state, "v_row")["b"])


INNER = {
    "MultiSteps": optax.MultiSteps(ADAM, 3).gradient_transformation(),
    "inject": optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    "sm3": optax.sm3(0.1),
    "schedule free": optax.contrib.schedule_free_sgd(0.1),
    "ema": optax.chain(ADAM, optax.ema(0.9)),
    "groups": fz.freeze_when(ADAM, {"embed": (fz.rows([0, 1]), True), "head": fz.unfreeze_at(1)}),
    "each": fz.freeze_when(ADAM, {fz.each("**"): False}),
    "union": fz.union(
        fz.freeze(ADAM, {"embed": ~fz.rows([0, 1]), "head": True, "body": True}),
        fz.freeze(optax.sgd(0.1, 0.9), {"embed": fz.rows([0, 1]), "head": False, "body": True}),
    ),
}


@pytest.mark.parametrize("name", INNER)
def test_states_of_other_transformations(name):
    tx = INNER[name]
    state = trained(tx, OLD)
    migrated, report = fz.migrate(state, tx, NEW, report=True)
    assert jax.tree.map(jnp.shape, migrated) == jax.tree.map(jnp.shape, tx.init(NEW))
    assert name in ("sm3", "each") or not report.dropped
    tx.update(jax.tree.map(jnp.cos, NEW), migrated, NEW)
    both = zip(*(jax.tree.leaves(each) for each in (state, migrated, tx.init(NEW))), strict=True)
    for was, found, fresh in both:
        if name == "sm3" or was.shape == fresh.shape:  # the accumulators of `sm3` begin anew
            assert bits(found) in (bits(was), bits(fresh)) or name == "sm3"
        else:
            expected = np.array(fresh)
            expected[tuple(map(slice, was.shape))] = was
            np.testing.assert_array_equal(found, expected)


def test_a_history_begins_anew_and_an_array_of_all_leaves_is_refused():
    tx = optax.lbfgs(0.1, linesearch=None)
    assert bits(fz.migrate(trained(tx, OLD), tx, NEW)) == bits(tx.init(NEW))
    tx = optax.flatten(ADAM)
    with pytest.raises(ValueError, match=r"an array of the state contains several leaves\n  at: 0/mu"):
        fz.migrate(trained(tx, OLD), tx, OLD, reset="embed")
    with pytest.raises(ValueError, match=r"at: 0/mu(.|\n)*\(64,\)"):
        fz.migrate(trained(tx, OLD), tx, NEW)
    assert bits(fz.migrate(trained(tx, OLD), tx, OLD, reset=True)) == bits(tx.init(OLD))


def test_on_a_mesh():
    """The arrays of a leaf that kept its shape lie, too, where those of the new parameters are."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    layouts = zip((16, 32), (PartitionSpec("data"), PartitionSpec(None, "data")), strict=True)
    old, new = (jax.device_put(make_params(w=(n, 8), b=(8, 8)), NamedSharding(mesh, spec)) for n, spec in layouts)
    tx = fz.freeze(ADAM, {"w": False, "b": False})
    states = fz.migrate(trained(tx, old), tx, new), tx.init(new)
    got, expected = (jax.tree.map(lambda x: x.sharding, optax.tree.get(state, "mu")) for state in states)
    assert got == expected


def test_the_report_names_layers_as_a_summary_does():
    old = {f"layer_{i}": jnp.ones((2, 2)) for i in range(12)}
    new = {f"layer_{i}": jnp.ones((3, 2)) for i in range(12)}
    text = str(fz.migrate(trained(ADAM, old), ADAM, new, report=True)[1])
    assert text.splitlines()[1] == "created: 0/mu/layer_0 … layer_11, 0/nu/layer_0 … layer_11"
