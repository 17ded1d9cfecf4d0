"""Rows that keep their state: tables that train at the cost of a batch."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_equal_up_to_rounding, bits
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matrix import OPTIMIZERS

import optax_freeze as fz
from optax_freeze import checkpoint

N, K = 11, 3  # rows of the table, and of a batch; no other axis has so many
BATCHES = [([3, -1, 5], 1.0), ([5, 3, 0], 2.0), ([10, 9, 1], -1.0)]
Y = jnp.ones(())


def kept(k=K, axis=0):
    return ~fz.rows(jnp.arange(k), axis, keep_state=True)


def init(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2)
    return {"table": jax.random.normal(keys[0], (N, 2), dtype), "head": jax.random.normal(keys[1], (2, 2), dtype)}


def loss(params, ids, y):
    return jnp.mean((params["table"][ids] @ params["head"] - y) ** 2)


def step_of(tx, loss=loss, rows=lambda ids, y: ids, **others):
    return fz.train_step(loss, tx, rows={"table": rows}, **others)


def trained(tx, params, batches=BATCHES, state=None, **others):
    step, state = jax.jit(step_of(tx, **others)), tx.init(params) if state is None else state
    for ids, y in batches:
        params, state, _ = step(params, state, jnp.array(ids), y)
    return params, state


SPEC = {"table": kept(), "head": False}
ADAM = fz.freeze(optax.adam(0.1), SPEC)


def lazy(optimizer):
    """A step by hand: the optimizer sees these rows of the table and of each array of its state that has its rows."""
    tx = optimizer.make()

    def step(params, state, ids, y):
        rows = jnp.sort(ids % N)
        at = lambda x: (slice(None),) * x.shape.index(N) + (rows,)  # noqa: E731
        take = functools.partial(jax.tree.map, lambda x: x[at(x)] if N in np.shape(x) else x)
        put = functools.partial(jax.tree.map, lambda x, new: x.at[at(x)].set(new) if N in np.shape(x) else new)
        value, grads = jax.value_and_grad(loss)(params, ids, y)
        part, grads, state_of_rows = map(take, (params, grads, state))
        extra = optimizer.extra(value, grads, lambda part: loss(put(params, part), ids, y))
        updates, new = tx.update(grads, state_of_rows, part, **extra)
        return put(params, optax.apply_updates(part, updates)), put(state, new), value

    return jax.jit(step)


REFUSED = {"contrib.sam", "flatten", "lbfgs", "lookahead"}


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"contrib.dpsgd"}))  # which takes a gradient of each example
def test_every_optimizer_is_its_lazy_self(name):
    params, optimizer = init(), OPTIMIZERS[name]
    tx = fz.freeze(optimizer.make(), SPEC)
    if name in REFUSED:
        with pytest.raises(ValueError, match="keep_state: this optimizer cannot train other rows in each step"):
            tx.init(params)
        return
    step, by_hand = jax.jit(step_of(tx, extra_args=optimizer.extra_args)), lazy(optimizer)
    got, expected = (params, tx.init(params), 0), (params, optimizer.make().init(params), 0)
    for ids, y in BATCHES:
        got = step(*got[:2], jnp.array(ids), y)
        expected = by_hand(*expected[:2], jnp.array(ids), y)
    inner = got[1].inner_state.inner_states["trainable"].inner_state
    assert_equal_up_to_rounding((got[0], inner, got[2]), expected, roundings=64)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.MultiSteps(tx, 2),
        lambda tx: optax.chain(tx, optax.apply_every(2)),
        lambda tx: fz.freeze(tx, {"table": False, "head": True}),
    ],
)
def test_what_needs_the_same_rows_in_several_steps_is_refused(wrap):
    with pytest.raises(ValueError, match="keep_state"):
        fz.freeze(wrap(optax.adam(0.1)), SPEC).init(init())


def test_rows_at_rest_keep_every_bit_of_parameters_and_state():
    params, odd = init(), jnp.array([jnp.nan, -0.0])
    params["table"] = params["table"].at[2].set(odd).at[7].set(odd)
    tx = fz.freeze(optax.adamw(0.1, weight_decay=0.5), SPEC)
    params, state = trained(tx, params)
    table = lambda params, state: (params["table"], optax.tree.get(state, "mu")["table"])  # noqa: E731
    before = table(params, state)
    after = table(*trained(tx, params, [([4, 4, 4], 1.0)], state))
    rest = jnp.delete(jnp.arange(N), 4)
    assert bits([x[rest] for x in after]) == bits([x[rest] for x in before])
    assert all((a[4] != b[4]).all() for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        (np.array([[3], [-1]], np.int8), [3, 10]),
        (np.array([[[5, 5]], [[5, -6]]], np.int64), [5]),
        (np.array([2, 250, 2], np.uint8), [2]),
        (jnp.array([-N - 1, N, 2**31 - 1]), []),
        (jnp.array([2**32 - 1, 4], jnp.uint32), [4]),
        (jnp.zeros((0, 3), int), []),
        (jnp.int32(-2), [9]),
    ],
)
def test_ids_of_any_shape_and_dtype(ids, rows, compiled):
    params, tx = init(), fz.freeze(optax.sgd(1.0), {"table": kept(4), "head": True})
    whole = lambda params, ids: jnp.sum(params["table"] ** 2) / 2  # noqa: E731
    step = compiled(step_of(tx, whole, lambda ids: ids))
    new, _, _ = step(params, tx.init(params), ids)
    assert np.flatnonzero((np.asarray(new["table"]) != params["table"]).any(1)).tolist() == rows
    assert bits(new["table"]) == bits(params["table"].at[jnp.array(rows, int)].set(0))


def test_one_program_for_any_ids():
    step = jax.jit(step_of(ADAM), donate_argnums=(0, 1))
    params, state = init(), ADAM.init(init())
    for ids, y in BATCHES:
        params, state, _ = step(params, state, jnp.array(ids), y)
    assert step._cache_size() == 1


def test_several_tables_and_the_rows_of_the_state():
    params = {"users": jnp.ones((7, 2)), "items": jnp.ones((2, 9)), "tags": jnp.ones((5, 2)), "few": jnp.ones((2, 2))}
    tx = fz.freeze(optax.sgd(1.0), {"users": kept(4), "items": kept(2, axis=1), "tags": kept(2), "few": kept(8)})
    step = fz.train_step(
        lambda params, batch: sum(map(jnp.sum, params.values())),
        tx,
        rows={
            "users": lambda batch: batch["user"],
            "items": lambda batch: batch["item"],
            "few": lambda _: jnp.arange(9),
        },
    )
    params, _, _ = jax.jit(step)(params, tx.init(params), {"user": jnp.array([[6, 1]]), "item": jnp.array([-1])})
    moved = lambda name, axis=1: np.flatnonzero((np.asarray(params[name]) == 0).all(axis)).tolist()  # noqa: E731
    assert (moved("users"), moved("items", 0), moved("tags"), moved("few")) == ([1, 6], [8], [0, 1], [0, 1])


def test_a_spec_of_more_rows_than_the_leaf_means_all():
    dense = fz.freeze(optax.adam(0.1), False)
    all_rows = fz.freeze(optax.adam(0.1), {"table": kept(100), "head": False})
    batch = [(range(N), 1.0)] * 2
    expected, state = init(), dense.init(init())
    for ids, y in batch:
        expected, state, _ = fz.train_step(loss, dense)(expected, state, jnp.array(ids), y)
    assert_equal_up_to_rounding(trained(all_rows, init(), batch)[0], expected)


def test_too_many_rows_of_a_batch_are_refused_with_the_number_that_is_enough():
    with pytest.raises(ValueError, match=r"jnp.arange\(4\), keep_state=True"):
        jax.eval_shape(step_of(ADAM), init(), ADAM.init(init()), jnp.zeros((2, 2), int), 1.0)
    enough = fz.freeze(optax.adam(0.1), {"table": kept(N), "head": False})
    jax.eval_shape(step_of(enough), init(), enough.init(init()), jnp.zeros((40, 2), int), 1.0)


def of_dense(params, batches=BATCHES):
    """What dense Adam has learned from these batches."""
    tx = fz.freeze(optax.adam(0.1), False)
    state = tx.init(params)
    for ids, y in batches:
        params, state, _ = fz.train_step(loss, tx)(params, state, jnp.array(ids), y)
    return params, tx, state


@pytest.mark.parametrize("full_updates", [True, False])
def test_in_a_loop_of_ones_own(full_updates):
    tx = fz.freeze(optax.adam(0.1), SPEC, full_updates=full_updates)

    @jax.jit
    def step(params, state, ids, y):
        state = fz.replace_masks(state, tx, params, {"table": ~fz.rows(ids)})
        updates, state = tx.update(fz.grad(loss, fz.spec_of(state))(params, ids, y), state, params)
        return fz.apply_updates(params, updates, fz.spec_of(state)), state

    params, state = init(), tx.init(init())
    for ids, y in BATCHES:
        params, state = step(params, state, jnp.array(ids), y)
    assert_equal_up_to_rounding(
        (params, jax.tree.leaves(state)), (trained(tx, init())[0], jax.tree.leaves(trained(tx, init())[1]))
    )


def test_in_a_scan_for_many_models_in_a_group_and_beside_other_rows():
    params = {**init(), "layers": jnp.ones((6, 2))}
    of_table = fz.freeze(optax.adam(0.1), {"table": kept(), "head": False, "layers": ~fz.rows(jnp.array([1]))})
    tx = optax.partition({"a": of_table, "b": optax.sgd(0.1)}, {"table": "a", "head": "b", "layers": "a"})
    with_layers = lambda params, ids, y: loss(params, ids, y) + jnp.sum(params["layers"] ** 2)  # noqa: E731
    ids, ys = (jnp.array(each) for each in zip(*BATCHES, strict=True))
    step = step_of(tx, with_layers)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, None))
    def run(params, state, batches):
        return jax.lax.scan(lambda carry, batch: (step(*carry, *batch)[:2], None), (params, state), batches)[0]

    two = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    got, _ = run(two, jax.vmap(tx.init)(two), (ids, ys))
    expected, new = trained(tx, params, loss=with_layers)
    assert_equal_up_to_rounding(jax.tree.map(lambda x: x[1], got), expected)
    other = fz.replace_masks(new, tx, expected, {"layers": ~fz.rows(jnp.array([2]))})
    assert bits(optax.tree.get(other, "mu")["table"]) == bits(optax.tree.get(new, "mu")["table"])


class TestTheState:
    def test_replace_masks_changes_the_numbers_alone(self, compiled):
        params, state = trained(ADAM, init())
        new = compiled(lambda s: fz.replace_masks(s, ADAM, params, {"table": ~fz.rows(jnp.array([4, -2, 0]))}))(state)
        assert new.masks["table"].tolist() == [0, 4, 9]
        assert bits(new.inner_state) == bits(state.inner_state)
        step = compiled(fz.train_step(loss, ADAM))  # without `rows`, those of the state
        moved, _, _ = step(params, new, jnp.arange(N), 1.0)
        assert np.flatnonzero((np.asarray(moved["table"]) != params["table"]).any(1)).tolist() == [0, 4, 9]

    def test_migrate_from_and_to_the_whole_leaf_loses_nothing(self):
        params, dense, state = of_dense(init())
        there = fz.migrate(state, ADAM, params)
        assert bits(jax.tree.leaves(there.inner_state)) == bits(jax.tree.leaves(state.inner_state))
        params, there = trained(ADAM, params, BATCHES[:1], there)
        back = fz.migrate(there, dense, params)
        assert bits(jax.tree.leaves(back.inner_state)) == bits(jax.tree.leaves(there.inner_state))

    def test_checkpoints(self, tmp_path):
        base = init()
        params, state = trained(ADAM, base)
        checkpoint.save(tmp_path, params, SPEC, step=3, opt_state=state)
        other = {"table": jnp.zeros_like(base["table"]), "head": base["head"]}  # the whole table is in the checkpoint
        restored = checkpoint.restore(tmp_path, other, frozen=SPEC, opt_state=jax.eval_shape(ADAM.init, base))
        assert bits(restored[:2]) == bits((params, state))
        assert bits(trained(ADAM, *restored[:1], BATCHES, restored[1])) == bits(trained(ADAM, params, BATCHES, state))

    def test_bfloat16(self):
        params, state = trained(ADAM, init(jnp.bfloat16))
        assert params["table"].dtype == jnp.bfloat16
        rows = {int(i) % N for ids, _ in BATCHES for i in ids}
        assert np.flatnonzero(np.asarray(optax.tree.get(state, "mu")["table"] != 0).any(1)).tolist() == sorted(rows)

    def test_in_an_nnx_optimizer(self):
        model = nnx.Embed(N, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, fz.freeze(optax.adam(0.1), {"embedding": kept()}), wrt=nnx.Param)
        assert optax.tree.get(optimizer.opt_state, "mu")["embedding"].shape == (N, 2)
        loss = lambda params, ids: jnp.mean(params["embedding"][ids] ** 2)  # noqa: E731
        step = jax.jit(fz.train_step(loss, optimizer.tx, rows={"embedding": lambda ids: ids}))
        params = nnx.state(model, nnx.Param)
        new, state, _ = step(params, optimizer.opt_state, jnp.array([9, -3]))
        assert np.flatnonzero((new["embedding"][...] != params["embedding"][...]).any(1)).tolist() == [8, 9]
        _, again, _ = step(new, state, jnp.array([9, 0]))
        assert again.masks["embedding"][...][:2].tolist() == [0, 9]

    def test_conditional_updates_and_hyperparameters(self):
        tx = fz.freeze(optax.inject_hyperparams(optax.adam)(learning_rate=0.1), SPEC)
        assert_equal_up_to_rounding(trained(tx, init())[0], trained(ADAM, init())[0])
        finite = fz.freeze(optax.apply_if_finite(optax.adam(0.1), 3), SPEC)
        params, state = trained(finite, init(), [*BATCHES, ([1, 2, 4], np.inf)])
        assert bits(params) == bits(trained(finite, init())[0])
        assert optax.tree.get(state, "notfinite_count") == 1


class TestSuchALeafTrains:
    def test_for_reports_and_checks(self):
        params = init()
        summaries = [fz.summary(params, {"table": table, "head": True}, optax.adam(0.1)) for table in (kept(), False)]
        assert [each.trainable_elements for each in summaries] == [2 * N] * 2
        assert summaries[0].state_bytes == summaries[1].state_bytes
        moved, _ = trained(ADAM, params)
        fz.assert_frozen(params, moved, SPEC)
        frozen = {"table": kept(), "head": True}
        assert bits(fz.fingerprint(moved, frozen)) == bits(fz.fingerprint(moved, {"table": False, "head": True}))
        assert fz.cast(params, frozen, jnp.bfloat16)["table"].dtype == jnp.float32
        large = {"table": jnp.ones((8, 128)), "head": params["head"]}
        assert fz.offload(large, frozen, tables={"table": kept(), "head": False}, min_bytes=0) == large

    def test_for_audits(self):
        params, spec = init(), {"table": kept(), "head": True}
        tx = fz.freeze(optax.adamw(0.1), spec)
        fz.audit(params, spec, tx).raise_for_leaks()
        step = jax.jit(lambda state, *batch: step_of(tx)(*state, *batch)[:2])
        state = params, tx.init(params)
        fz.audit_step(step, state, jnp.array([0, 3]), 1.0, params="0", frozen=spec).raise_for_leaks()

    def test_for_precompute(self):
        of_table = lambda params, ids: jnp.sum(jnp.tanh(params["head"] @ params["head"]) * params["table"][ids])  # noqa: E731
        once, params, ids = fz.precompute(of_table, {"table": kept(2), "head": True}), init(), jnp.array([1, 2])
        features = once.before(params, ids)
        needed = once.needed(params, ids)
        assert bits(needed["table"]) == bits(params["table"])
        assert_equal_up_to_rounding(once.after(needed, features, ids), of_table(params, ids))


class TestErrors:
    def test_multi_steps_around_it(self):
        tx = optax.MultiSteps(ADAM, 2)
        with pytest.raises(ValueError, match="keep_state"):
            jax.eval_shape(step_of(tx), init(), tx.init(init()), jnp.array([1]), 1.0)


MESH = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))


def cost(rows, batch=16, donate=(0, 1), columns=64):
    """A compiled step with Adam of a table of so many rows."""
    params = {
        "table": jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        "head": jax.ShapeDtypeStruct((columns, 2), "f"),
    }
    tx = fz.freeze(optax.adam(0.1), {"table": kept(batch), "head": False})
    args = params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((batch,), int), 1.0
    return jax.jit(step_of(tx), donate_argnums=donate).lower(*args).compile()


@pytest.mark.usefixtures("as_users_compile")
class TestCost:
    def test_a_larger_table_costs_nothing_more(self):
        small, large = cost(10_000), cost(320_000)
        memory = [each.memory_analysis() for each in (small, large)]
        assert large.cost_analysis()["flops"] <= 1.05 * small.cost_analysis()["flops"]
        assert memory[1].temp_size_in_bytes <= 1.05 * memory[0].temp_size_in_bytes < 10_000 * 64
        assert memory[1].alias_size_in_bytes >= 3 * 320_000 * 64 * 4  # the table and both moments, in place

    def test_a_sharded_table_stays_where_it_is(self):
        rows, of_rows = 4096, NamedSharding(MESH, P("rows"))
        params = {"table": jax.device_put(jnp.ones((rows, 8)), of_rows), "head": jnp.ones((8, 2))}
        params["head"] = jax.device_put(params["head"], NamedSharding(MESH, P()))
        tx = fz.freeze(optax.adam(0.1), {"table": kept(16), "head": False})
        state = jax.jit(tx.init, out_shardings=fz.state_shardings(tx, params))(params)
        assert optax.tree.get(state, "mu")["table"].sharding == of_rows
        step = jax.jit(step_of(tx), donate_argnums=(0, 1))
        args = params, state, jnp.arange(16) * 200, 1.0
        text = step.lower(*args).compile().as_text()
        assert not re.search(rf"= \(?\w+\[{rows},8\]", text)  # not even the result of a collective
        alone = jax.device_put(params, jax.devices()[0])
        expected = jax.jit(step_of(tx))(alone, tx.init(alone), *args[2:])
        params, state, _ = step(*args)
        assert params["table"].sharding == optax.tree.get(state, "mu")["table"].sharding == of_rows
        assert_equal_up_to_rounding((params, state), expected[:2])
