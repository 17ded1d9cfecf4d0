"""Dynamic rows in specs, optimizers, states, reports and checkpoints."""

import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
from conftest import bits, state_bytes
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze import checkpoint

LAYERS = 5
X = jax.random.normal(jax.random.key(0), (4, 3))


def init(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), 4)
    normal = lambda key, *shape: (jax.random.normal(key, shape) / 2).astype(dtype)  # noqa: E731
    return {
        "layers": {"kernel": normal(keys[0], LAYERS, 3, 3), "bias": normal(keys[1], LAYERS, 3)},
        "embed": normal(keys[2], 3, 3),
        "head": normal(keys[3], 3),
    }


def loss(params, x):
    x, _ = jax.lax.scan(
        lambda x, p: (jnp.tanh(x @ p["kernel"] + p["bias"]), None), x @ params["embed"], params["layers"]
    )
    return jnp.mean((x @ params["head"]) ** 2)


def only(*index, head=False):
    return {"layers": ~fz.rows(jnp.array(index)), "embed": True, "head": head}


def static(*index, head=False):
    return {"layers": ~fz.rows(sorted(i % LAYERS for i in index)), "embed": True, "head": head}


close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-6)


def step_of(tx, full=True):
    apply = optax.apply_updates if full else fz.apply_updates

    def step(params, state, x=X):
        grads = fz.grad(loss, fz.spec_of(state))(params, x)
        updates, state = tx.update(grads, state, params)
        return apply(params, updates), state

    return step


class TestSpec:
    def test_the_numbers_may_be_traced_and_in_any_order(self):
        params = init()
        assert repr(fz.resolve(params, only(3, -4))["layers"]["bias"]) == "~fz.rows(<int32[2]>)"

        @jax.jit
        def there_and_back(params, *index):
            trainable, rest = fz.partition(params, only(*index))
            return trainable, fz.combine(trainable, rest)

        for index in ([3, 1], [1, 3], [-2, -4]):
            trainable, whole = there_and_back(params, *index)
            assert len(jax.tree.leaves(trainable)) == 3
            assert bits(trainable["layers"]["kernel"].values) == bits(params["layers"]["kernel"][jnp.array([1, 3])])
            assert bits(whole) == bits(params)
        assert there_and_back._cache_size() == 1

    def test_all_rows_or_none(self):
        params = init()
        assert fz.resolve(params, {**only(0), "layers": ~fz.rows(jnp.array([], int))})["layers"]["bias"] is True
        assert fz.resolve(params, {**only(0), "layers": fz.rows(jnp.arange(5))})["layers"]["bias"] is True
        trainable, _ = fz.partition(params, {**only(0), "layers": ~fz.rows(jnp.arange(5)[::-1])})
        assert bits(trainable["layers"]["kernel"].values) == bits(params["layers"]["kernel"])

    def test_labels_selectors_and_stop_gradient(self):
        params = init()
        assert fz.labels(only(1))(params)["layers"] == {"kernel": "trainable", "bias": "trainable"}
        spec = fz.rules({"layers/**": fz.rows(jnp.array([0, 1]))}) | fz.path("embed")
        close(
            jax.grad(lambda p: loss(fz.stop_gradient(p, spec), X))(params),
            jax.grad(lambda p: loss(fz.stop_gradient(p, static(2, 3, 4)), X))(params),
        )


@pytest.mark.parametrize(("full", "dtype"), [(True, jnp.float32), (False, jnp.bfloat16)])
def test_training_is_that_of_static_rows(full, dtype):
    params = init(dtype)
    results = []
    for spec in (only(4, 1), static(4, 1)):
        tx = fz.freeze(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)), spec, full_updates=full)
        state, p = tx.init(params), params
        step = jax.jit(step_of(tx, full))
        for _ in range(3):
            p, state = step(p, state)
        fz.assert_frozen(params, p, fz.spec_of(state))
        results.append((p, optax.tree.get(state, "mu")["layers"]["kernel"]))
    close(*jax.tree.map(lambda x: x.astype(jnp.float32), results), rtol=1e-2 if dtype == jnp.bfloat16 else 1e-5)


def test_the_state_and_the_gradient_have_as_many_rows_as_train():
    params, tx = init(), fz.freeze(optax.adam(0.1), only(0, 2), full_updates=False)
    state = tx.init(params)
    grads = fz.grad(loss, fz.spec_of(state))(params, X)
    assert [g.shape for g in jax.tree.leaves(grads)] == [(3,), (2, 3), (2, 3, 3)]
    assert state_bytes(state) == 4 * 2 * (3 + 2 * 3 + 2 * 9) + 4 * 2 * 2  # moments, and the numbers of two leaves
    updates, _ = tx.update(grads, state, params)
    assert updates["layers"]["bias"].trains.tolist() == [True, False, True, False, False]
    assert optax.tree.norm(grads) < 10  # no row number is taken for a gradient


def test_init_allocates_nothing_for_shapes():
    params = {"layers": jax.ShapeDtypeStruct((100, 10**6, 10**6), jnp.float32)}
    state = jax.eval_shape(fz.freeze(optax.adam(0.1), {"layers": ~fz.rows(jnp.array([3, 1]))}).init, params)
    assert optax.tree.get(state, "mu")["layers"].shape == (2, 10**6, 10**6)


def test_frozen_rows_keep_every_bit():
    params = init()
    odd = jnp.array([jnp.nan, -0.0, 1e-42])
    params["layers"]["bias"] = params["layers"]["bias"].at[jnp.array([0, 2])].set(odd)
    loss_of_others = lambda p: jnp.sum(p["layers"]["kernel"] ** 2) + jnp.sum(p["layers"]["bias"][1] ** 2)  # noqa: E731
    rows_of = lambda tree: jax.tree.map(lambda x: x[jnp.array([0, 2, 3])], tree)  # noqa: E731
    for full in (True, False):
        tx = fz.freeze(optax.adamw(0.1), only(1, 4, head=True), full_updates=full)
        state = tx.init(params)
        updates, _ = tx.update(fz.grad(loss_of_others, fz.spec_of(state))(params), state, params)
        new = fz.apply_updates(params, updates, fz.spec_of(state))
        assert bits(rows_of(new["layers"])) == bits(rows_of(params["layers"]))
        if not full:
            assert bits(fz.apply_updates(params, updates)) == bits(new)


def moved(a, b):
    """The rows whose bias has moved."""
    return np.flatnonzero((np.asarray(a["layers"]["bias"]) != np.asarray(b["layers"]["bias"])).any(1)).tolist()


@pytest.mark.parametrize("axis", [0, 1])
def test_a_traced_number_may_be_given_twice(axis):
    """The rows are those that are named, once each; ``fz.rows`` of the numbers leaves as many others as fit."""
    params = {"w": jnp.arange(36.0).reshape(6, 6) + 1}
    frozen = lambda index: {"w": ~fz.rows(index, axis)}  # noqa: E731

    @functools.partial(jax.jit, static_argnums=1)
    def step(index, way):
        tx = fz.freeze(optax.adam(1.0), frozen(jnp.zeros_like(index)), full_updates=way == "full")
        state = fz.replace_masks(tx.init(params), tx, params, frozen(index))
        grads = fz.grad(lambda p: (p["w"] ** 2).sum(), fz.spec_of(state))(params)
        if way == "update_params":
            return fz.update_params(tx, grads, state, params)[0]
        updates, state = tx.update(grads, state, params)
        return fz.apply_updates(params, updates, fz.spec_of(state) if way == "spec" else None)

    for way in ("full", "parts", "spec", "update_params"):
        for numbers, rows in (([2, 2, 5], [2, 5]), ([5, -4, 2], [2, 5]), ([4, 127, 4], [4]), ([-128, -7, 5], [5])):
            new = step(jnp.array(numbers, jnp.int8), way)
            moved = np.isin(np.indices((6, 6))[axis], rows)
            assert ((np.asarray(new["w"]) != params["w"]) == moved).all(), (way, numbers)
            np.testing.assert_allclose(new["w"], params["w"] - moved, rtol=1e-5)

    @jax.jit
    def parts(index):
        halves = fz.partition(params, frozen(index)), fz.partition(params, {"w": fz.rows(index, axis)})
        return [(trainable["w"].values, fz.combine(trainable, rest)) for trainable, rest in halves]

    last = jax.jit(lambda index: fz.partition(jnp.arange(200.0), ~fz.rows(index))[0].values)
    assert last(jnp.array([-1], jnp.int8)) == 199
    assert bits(fz.partition(jnp.arange(200.0), ~fz.rows(jnp.array([-8, 7], jnp.int4)))[0].values) == bits(
        jnp.array([7.0, 192.0])
    )
    (rows, whole), (others, again) = parts(jnp.array([2, 2, 5]))
    assert bits(whole) == bits(again) == bits(params)
    take = lambda *index: jnp.take(params["w"], jnp.array(index), axis, mode="fill", fill_value=0)  # noqa: E731
    assert bits(rows) == bits(take(2, 5, 6))
    assert bits(others) == bits(take(0, 1, 3))


@pytest.mark.parametrize("restricted", [False, True])
def test_the_gradient_of_a_number_that_is_no_row_is_zero(restricted):
    """It must not count in a norm of the gradient."""
    w = jnp.ones((6, 2))

    @jax.jit
    def gradient(index):
        spec, loss = ~fz.rows(index), lambda w: jnp.sum(2 * w.T)
        trainable, rest = fz.partition(w, spec)
        return (jax.grad(fz.restrict(loss, rest))(trainable) if restricted else fz.grad(loss, spec)(w)).values

    for index in ([2, 2, 5], [2, 5, 9]):
        assert gradient(jnp.array(index)).tolist() == [[2, 2], [2, 2], [0, 0]]


def test_numbers_that_are_no_row_do_not_stay():
    params = {"w": jnp.ones((6, 2))}
    tx = fz.freeze(optax.adam(0.1), {"w": ~fz.rows(jnp.array([2, 3, 5]))})
    _, state = tx.update(params, tx.init(params), params)
    replace = jax.jit(lambda state, index: fz.replace_masks(state, tx, params, {"w": ~fz.rows(index)}))
    for index, count in (([2, 2, 4], 1), ([3, 3, 0], 0)):
        state = replace(state, jnp.array(index))
        assert optax.tree.get(state, "count") == count


PARAMS = {"w": jnp.arange(12.0).reshape(6, 2) + 1}
SUM = lambda p: jnp.sum(jnp.arange(6.0)[:, None] * p["w"] ** 2)  # noqa: E731


@pytest.mark.parametrize("kind", ["rows", "elements"])
class TestGradientsOfOtherRows:
    """A gradient belongs to the rows, or elements, that train in the state."""

    def spec(self, kind, *index):
        elements = fz.elements(~np.isin(np.indices((6, 2))[0], index), compact=True)
        return {"w": ~fz.rows(jnp.array(index)) if kind == "rows" else elements}

    def states(self, kind):
        tx = fz.freeze(optax.sgd(1.0), self.spec(kind, 4, 5), full_updates=False)
        state = tx.init(PARAMS)
        return tx, state, fz.replace_masks(state, tx, PARAMS, self.spec(kind, 0, 2))

    def step(self, tx, spec=fz.spec_of):
        def step(params, state):
            updates, new = tx.update(fz.grad(SUM, spec(state))(params), state, params)
            return fz.apply_updates(params, updates, fz.spec_of(new))

        return step

    @pytest.mark.parametrize(
        "make",
        [
            lambda frozen: fz.grad(SUM, frozen)(PARAMS),
            lambda frozen: jax.jit(lambda p: jax.tree.map(lambda g: g * 1, fz.grad(SUM, frozen)(p)))(PARAMS),
            lambda frozen: jax.grad(fz.restrict(SUM, fz.partition(PARAMS, frozen)[1]))(fz.partition(PARAMS, frozen)[0]),
        ],
        ids=["eager", "scaled", "restrict"],
    )
    def test_outside_of_a_program_they_are_compared(self, kind, make):
        tx, state, replaced = self.states(kind)
        for given, index in ((state, (4, 5)), (replaced, (0, 2))):
            grads = make(self.spec(kind, *index))
            assert jax.tree.structure(grads) == jax.tree.structure(fz.partition(PARAMS, self.spec(kind, *index))[0])
            updates, _ = tx.update(grads, given, PARAMS)
            new = fz.apply_updates(PARAMS, updates, fz.spec_of(given))
            assert bits(new) == bits(self.step(tx)(PARAMS, given))
            other = replaced if given is state else state
            for update in (tx.update, functools.partial(fz.update_params, tx)):
                with pytest.raises(ValueError, match=f"a Part of other {kind}"):
                    update(grads, other, PARAMS)
            with pytest.raises(ValueError, match=f"a Part of other {kind}"):
                fz.apply_updates(PARAMS, updates, fz.spec_of(other))

    def test_inside_of_a_program_only_those_of_its_state_are_accepted(self, kind):
        tx, state, replaced = self.states(kind)
        frozen, grads = self.spec(kind, 4, 5), fz.grad(SUM, self.spec(kind, 4, 5))(PARAMS)
        spec, update = fz.spec_of(state), jax.jit(tx.update)
        of_state = fz.grad(SUM, spec)(PARAMS)
        accepted = [
            lambda state: jax.jit(self.step(tx))(PARAMS, state),
            lambda state: jax.jit(lambda p, s, spec: self.step(tx, lambda _: spec)(p, s))(
                PARAMS, state, fz.spec_of(state)
            ),
            lambda state: update(fz.grad(SUM, fz.spec_of(state))(PARAMS), state, PARAMS),
        ]
        refused = [
            lambda: jax.jit(self.step(tx, lambda _: spec))(PARAMS, state),
            lambda: jax.jit(lambda state: tx.update(of_state, state, PARAMS))(state),
            lambda: jax.jit(lambda grads: tx.update(grads, state, PARAMS))(of_state),
            lambda: tx.update(jax.jit(lambda grads: jax.tree.map(lambda g: g * 1, grads))(grads), state, PARAMS),
            lambda: jax.jit(lambda p, s, spec: self.step(tx, lambda _: spec)(p, s))(PARAMS, state, frozen),
        ]
        for run in accepted:
            run(state)
            run(replaced)
        if kind == "elements":  # which are compared while the program runs
            literal = jax.jit(self.step(tx, lambda _: frozen))
            assert bits(literal(PARAMS, state)) == bits(jax.jit(self.step(tx))(PARAMS, state))
            assert np.isnan(np.asarray(literal(PARAMS, replaced)["w"])[[0, 2]]).all()
            fz.assert_frozen(PARAMS, literal(PARAMS, replaced), fz.spec_of(replaced))
            return
        for run in refused:
            with pytest.raises(ValueError, match="a Part that may have other rows"):
                run()

    def test_what_jit_remembers_of_one_call_refuses_no_other(self, kind):
        tx, state, replaced = self.states(kind)
        scaled = jax.jit(lambda grads: jax.tree.map(lambda g: g * 1, grads))
        for each in (state, replaced, state):
            grads = scaled(fz.grad(SUM, fz.spec_of(each))(PARAMS))
            updates, _ = tx.update(grads, each, PARAMS)
            new = fz.apply_updates(PARAMS, updates, fz.spec_of(each))
            assert bits(new) == bits(self.step(tx)(PARAMS, each))
        assert scaled._cache_size() == 1
        assert pickle.loads(pickle.dumps(grads))["w"].source == grads["w"].source

    def test_rows_that_were_replaced_after_the_gradient(self, kind):
        """Also where the numbers are not known: in a program, and for a gradient from one."""
        tx, state, _ = self.states(kind)
        params = {**PARAMS, "v": PARAMS["w"]}
        two = fz.freeze(optax.sgd(1.0), {**self.spec(kind, 4, 5), "v": self.spec(kind, 1)["w"]}, tied="ignore")
        replace = lambda state: fz.replace_masks(state, tx, PARAMS, self.spec(kind, 0, 2))  # noqa: E731
        of_v = lambda state: fz.replace_masks(state, two, params, {"v": self.spec(kind, 3)["w"]})  # noqa: E731
        of_w = lambda state: fz.replace_masks(state, two, params, self.spec(kind, 0, 2))  # noqa: E731
        gradient = jax.jit(lambda state: fz.grad(SUM, fz.spec_of(state))(PARAMS))
        there_and_back = [
            lambda state: jax.lax.fori_loop(0, 2, lambda _, state: state, state),
            lambda state: jax.lax.cond(state.plan is None, lambda state: state, lambda state: state, state),
            lambda state: jax.lax.with_sharding_constraint(state, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
        ]

        def step(state, between, tx=tx, params=PARAMS, gradient=None):
            grads = (gradient or (lambda state: fz.grad(SUM, fz.spec_of(state))(params)))(state)
            return fz.update_params(tx, grads, between(state), params)[0]

        for run in (jax.jit(step, static_argnums=1), functools.partial(step, gradient=gradient)):
            with pytest.raises(ValueError, match=f"a Part of other {kind}"):
                run(state, replace)
            expected = run(state, lambda state: state)
            for each in there_and_back:
                assert bits(run(state, each)) == bits(expected)
        of_two = jax.jit(functools.partial(step, tx=two, params=params), static_argnums=1)
        for path, change in (("w", of_w), ("v", of_v), ("v", lambda state: of_w(of_v(state)))):
            with pytest.raises(ValueError, match=f"a Part of other {kind}(.|\n)*at: {path}\n"):
                of_two(two.init(params), change)
        at_once = lambda state: step(state, lambda state: state, gradient=gradient)  # noqa: E731
        accepted = jax.jit(lambda state: (at_once(state), at_once(replace(state))))
        assert bits(accepted(state)[0]) == bits(expected)
        for each in (state, replace(state), state):
            grads = gradient(each)
            assert bits(tx.update(grads, each, PARAMS)) == bits(jax.jit(tx.update)(grads, each, PARAMS))
            tx.update(pickle.loads(pickle.dumps(grads)), each, PARAMS)

    def test_the_two_parts_of_different_partitions(self, kind):
        tx, state, _ = self.states(kind)
        (trainable, rest), (other, of_other) = (fz.partition(PARAMS, self.spec(kind, *at)) for at in ((4, 5), (0, 2)))
        for wrong in (lambda: fz.combine(trainable, of_other), lambda: tx.init(other)):
            with pytest.raises(ValueError, match=f"a Part of other {kind}"):
                wrong()
        of_state = fz.partition(PARAMS, fz.spec_of(state))
        for pair in ((trainable, rest), (other, of_other), of_state):
            assert bits(jax.jit(fz.combine)(*pair)) == bits(PARAMS)
            assert bits(jax.jit(lambda trainable, rest=pair[1]: fz.combine(trainable, rest))(pair[0])) == bits(PARAMS)

    def test_updates_have_the_structure_of_their_gradients(self, kind):
        frozen = self.spec(kind, 4, 5)
        trainable, _ = fz.partition(PARAMS, frozen)
        whole = fz.freeze_when(optax.sgd(1.0), {"w": False})
        updates, _ = whole.update(trainable, whole.init(trainable), trainable)
        assert not any(x.any() for x in jax.tree.leaves(optax.apply_updates(trainable, updates)))
        if kind == "elements":
            tx = fz.freeze(optax.sgd(1.0), frozen, full_updates=False)
            updates, _ = tx.update(trainable, tx.init(trainable), trainable)
            assert not optax.apply_updates(trainable, updates)["w"].values.any()

    def test_a_gradient_that_a_line_search_stored(self, kind):
        tx = fz.freeze(
            optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(5, store_grad=True)), self.spec(kind, 4, 5)
        )
        state, params = tx.init(PARAMS), PARAMS
        for _ in range(2):
            value, grads = fz.value_and_grad_from_state(SUM, fz.spec_of(state))(params, state=state)
            updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=SUM)
            params = optax.apply_updates(params, updates)
        fz.assert_frozen(PARAMS, params, fz.spec_of(state))
        assert SUM(params) < SUM(PARAMS)
        _, grads = fz.value_and_grad_from_state(SUM, self.spec(kind, 0, 2))(params, state=state)
        with pytest.raises(ValueError, match=f"a Part of other {kind}"):
            tx.update(grads, state, params, value=value, grad=grads, value_fn=SUM)


ROWS = {"first": [0, 1, 4], "other": [2, 3, 5], "some": [1, 4, 5]}

GO_ON = (
    optax.AddNoiseState,
    optax.ZoomLinesearchInfo,
    optax.contrib.DifferentiallyPrivateAggregateState,
    optax.contrib.HutchinsonState,
    optax.contrib.ReduceLROnPlateauState,
)
"""Random keys and schedules, and what a line search tells of its last step."""


class TestEveryOptimizer:
    """``replace_masks`` with every optimizer of Optax."""

    def tx(self, optimizer, rows, static=False):
        mask = ~fz.rows(ROWS[rows] if static else jnp.array(ROWS[rows]))
        return fz.freeze(optimizer.make(), {"w": mask, "b": mask})

    def step(self, optimizer, tx, params, state):
        def loss(params):
            return jnp.sum((params["w"] - 0.5) ** 2) + jnp.sum((params["b"] + 0.3) ** 2)

        grads = jax.grad(loss)(params)
        extra_args = optimizer.extra(loss(params), grads, loss)
        if optimizer.per_example:
            grads = fz.partition(grads, fz.spec_of(state))[0]
            grads = jax.tree.map(lambda g: jnp.stack([g, g / 2]), grads)
        return tx.update(grads, state, params, **extra_args)

    def trained(self, optimizer):
        tx = self.tx(optimizer, "first")
        params = {"w": jnp.linspace(-1.0, 1.0, 24).reshape(6, 4), "b": jnp.linspace(1.0, 2.0, 6)}
        state = tx.init(params)
        for _ in range(2):
            updates, state = self.step(optimizer, tx, params, state)
            params = optax.apply_updates(params, updates)
        return params, state

    def replaced(self, optimizer, params, state, rows):
        return fz.replace_masks(state, self.tx(optimizer, "first"), params, {"*": ~fz.rows(jnp.array(ROWS[rows]))})

    @pytest.mark.parametrize("name", optimizers.found())
    def test_the_first_step_on_new_rows_and_the_state_of_some(self, name):
        optimizer = optimizers.found()[name]
        params, state = self.trained(optimizer)
        if name == "flatten":  # which has an array for several leaves
            with pytest.raises(ValueError, match="contains the rows of several leaves"):
                self.replaced(optimizer, params, state, "other")
            return
        new, tx = self.replaced(optimizer, params, state, "other"), self.tx(optimizer, "other")
        expected = jax.tree.map(
            lambda fresh, kept: kept if isinstance(kept, GO_ON) else fresh,
            tx.init(params),
            new,
            is_leaf=lambda node: isinstance(node, GO_ON),
        )
        assert bits(new) == bits(expected)
        assert bits(self.step(optimizer, tx, params, new)) == bits(self.step(optimizer, tx, params, expected))
        for rows in ROWS:
            replaced = self.replaced(optimizer, params, state, rows)
            assert bits(replaced) == bits(fz.migrate(state, self.tx(optimizer, rows), params))

    @pytest.mark.parametrize(
        "name", sorted({"adafactor", "adam", "contrib.galore", "novograd"} & optimizers.found().keys())
    )
    def test_static_rows_migrate_as_dynamic_rows_are_replaced(self, name):
        optimizer = optimizers.found()[name]
        params, state = self.trained(optimizer)
        static = fz.migrate(state, self.tx(optimizer, "first", static=True), params)
        static = fz.migrate(static, self.tx(optimizer, "some", static=True), params)
        back = fz.migrate(static, self.tx(optimizer, "some"), params)
        assert bits(back) == bits(self.replaced(optimizer, params, state, "some"))

    def test_an_array_of_several_leaves_migrates_only_to_the_same_rows(self):
        optimizer = optimizers.found()["flatten"]
        params, state = self.trained(optimizer)
        for static in (False, True):
            same = fz.migrate(state, self.tx(optimizer, "first", static), params)
            assert bits(same.inner_state) == bits(state.inner_state)
            with pytest.raises(ValueError, match=r"contains the rows of several leaves(.|\n)*at: 0/mu"):
                fz.migrate(state, self.tx(optimizer, "some", static), params)


def momentum(init, numbers):
    """Momentum that is divided by a number of steps; ``numbers`` are the names, or the fields, of its state."""

    def update(updates, state, params=None):
        del params
        count, trace = numbers(state)
        trace = jax.tree.map(lambda u, t: u + t, updates, trace)
        return jax.tree.map(lambda t: t / (count + 1), trace), init(count + 1, trace)

    def start(params):
        return init(jnp.zeros([], int), jax.tree.map(jnp.zeros_like, params))

    return optax.GradientTransformation(start, update)


def others(*index):
    """The argument of ``replace_masks`` for other rows."""
    return {"layers/**": ~fz.rows(jnp.array(index))}


class TestReplaceMasks:
    def replaced(self, inner, masks, head=True, steps=2):
        """Parameters and state after some steps with rows 3 and 1, and the state with other masks."""
        tx, params = fz.freeze(inner, only(3, 1, head=head), full_updates=False), init()
        state, step = tx.init(params), jax.jit(step_of(tx, False))
        for _ in range(steps):
            params, state = step(params, state)
        new = fz.replace_masks(state, tx, params, masks)
        step(params, new)
        assert step._cache_size() == 1
        return params, state, new

    def test_rows_that_stay_keep_their_moments(self):
        _, before, after = self.replaced(optax.adam(0.1), others(3, 0), head=False)
        for name, leaf in (("mu", "kernel"), ("nu", "bias")):
            old, new = (optax.tree.get(state, name)["layers"][leaf] for state in (before, after))
            assert bits(new[1]) == bits(old[1])
            assert not new[0].any()
            assert old[1].any()
        assert optax.tree.get(after, "count") == 2  # the head trains in the same optimizer
        assert jax.tree.structure(before) == jax.tree.structure(after)
        assert fz.resolve(init(), fz.spec_of(after))["layers"]["bias"].array.tolist() == [0, 3]

    @pytest.mark.parametrize(
        ("masks", "count"), [(others(3, 0), 2), (others(4, 0), 0), ({"layers/bias": ~fz.rows(jnp.array([4, 0]))}, 2)]
    )
    def test_the_count_begins_anew_where_all_rows_change(self, masks, count):
        _, _, new = self.replaced(optax.adam(0.1), masks)
        assert optax.tree.get(new, "count") == count

    def test_a_label_begins_anew_and_a_schedule_goes_on(self):
        labels = fz.labels_by_path({"layers": "turns"}, default="stays")
        adam = optax.adam(optax.linear_schedule(1.0, 0.0, 10))
        _, _, new = self.replaced(
            optax.multi_transform({"turns": adam, "stays": adam}, labels), others(4, 0), head=False
        )
        inner = new.inner_state.inner_states["trainable"].inner_state.inner_states
        counts = {name: [int(x) for x in jax.tree.leaves(inner[name]) if x.shape == ()] for name in inner}
        assert counts == {"turns": [0, 2], "stays": [2, 2]}

    def test_a_state_that_begins_with_the_parameters(self):
        """Rows that begin to train start from the parameters as they are now."""
        params, *states = self.replaced(optax.contrib.schedule_free_sgd(0.1), others(4, 3), head=False)
        before, after = (optax.tree.get(state, "z")["layers"]["bias"] for state in states)
        assert bits(after) == bits(jnp.stack([before[1], params["layers"]["bias"][4]]))
        assert bits(before[1]) != bits(params["layers"]["bias"][3])

    def test_a_line_search_computes_its_gradient_again(self):
        inner = optax.chain(optax.sgd(0.5), optax.scale_by_backtracking_linesearch(10, store_grad=True))
        tx, params = fz.freeze(inner, only(1, 2), full_updates=False), init()
        state, fun = tx.init(params), lambda params: loss(params, X)

        def step(params, state):
            value, grads = fz.value_and_grad_from_state(fun, fz.spec_of(state))(params, state=state)
            updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=fun)
            return fz.apply_updates(params, updates), state

        params, state = step(params, state)
        state = fz.replace_masks(state, tx, params, others(3, 4))
        assert moved(params, step(params, state)[0]) == [3, 4]

    @pytest.mark.parametrize("kind", ["rows", "elements"])
    def test_a_history_begins_anew_with_any_new_row_or_element(self, kind):
        """The numbers of L-BFGS are about all elements together."""
        make = TestGradientsOfOtherRows().spec
        tx, params = fz.freeze(optax.lbfgs(linesearch=None), make(kind, 2, 3)), PARAMS
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(fz.grad(SUM, fz.spec_of(state))(params), state, params)
            params = optax.apply_updates(params, updates)

        replace = lambda state, params, masks: fz.replace_masks(state, tx, params, masks)  # noqa: E731
        replace = jax.jit(replace) if kind == "rows" else replace
        assert bits(replace(state, params, make(kind, 2, 3))) == bits(state)
        other = fz.freeze(optax.lbfgs(linesearch=None), make(kind, 3, 4))
        assert bits(replace(state, params, make(kind, 3, 4))) == bits(other.init(params))
        assert bits(fz.migrate(state, other, params)) == bits(other.init(params))

    @pytest.mark.parametrize("specs", [("b", False), (False, "b")])
    def test_a_history_begins_anew_where_other_leaves_train(self, specs):
        params = {"a": jnp.ones(2), "b": jnp.ones(3)}
        tx, other = (fz.freeze(optax.lbfgs(linesearch=None), spec) for spec in specs)
        _, state = tx.update(params, tx.init(params), params)
        assert bits(fz.migrate(state, other, params)) == bits(other.init(params))
        assert bits(fz.migrate(state, tx, params)) == bits(state)

    def test_several_arrays_for_a_leaf_move_with_its_rows(self):
        _, *states = self.replaced(optax.sm3(0.1), others(4, 1), head=False)
        before, after = (jax.tree.leaves(optax.tree.get(state, "mu")["layers"]["kernel"]) for state in states)
        assert [old.shape for old in before] == [(2,), (3,), (3,)]
        assert bits(after[0]) == bits(before[0].at[1].set(0))
        assert bits(after[1:]) == bits(before[1:])

    def test_a_count_by_any_name(self):
        in_dict = lambda count, trace: {"t": count, "m": trace}, lambda state: (state["t"], state["m"])
        for inner in (momentum(lambda *both: both, lambda state: state), momentum(*in_dict)):
            params, _, new = self.replaced(inner, others(4, 0))
            assert bits(new) == bits(fz.freeze(inner, only(4, 0, head=True)).init(params))

    def test_a_count_of_moments_in_another_container_goes_on(self):
        """It may as well be that of a schedule."""
        inner = momentum(lambda count, trace: (count, {"m": trace}), lambda state: (state[0], state[1]["m"]))
        _, _, new = self.replaced(inner, others(4, 0))
        count, moments = new.inner_state.inner_states["trainable"].inner_state
        assert count == 2
        assert not any(leaf.any() for leaf in jax.tree.leaves(moments))

    def test_a_number_that_depends_on_the_parameters(self):
        inner = momentum(lambda *both: both, lambda state: state)
        inner = inner._replace(init=lambda params: (optax.tree.norm(params), optax.tree.zeros_like(params)))
        params, _, new = self.replaced(inner, others(4, 0), steps=0)
        assert bits(new) == bits(fz.freeze(inner, only(4, 0, head=True)).init(params))

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda tx: optax.MultiSteps(tx, 3),
            lambda tx: optax.apply_if_finite(tx, 3),
            lambda tx: optax.inject_hyperparams(lambda learning_rate: tx)(learning_rate=0.1),
            lambda tx: optax.conditionally_transform(tx, lambda step: step >= 0),
        ],
    )
    def test_numbers_of_wrappers_go_on(self, wrap):
        """Those of the optimizer inside, whose state is a dict of moments, begin anew."""
        inner = momentum(lambda count, trace: {"t": count, "m": trace}, lambda state: (state["t"], state["m"]))
        _, *states = self.replaced(wrap(inner), others(4, 0), steps=4)
        fields = [state.inner_state.inner_states["trainable"].inner_state._asdict() for state in states]
        numbers = [[bits(x) for x in each.values() if getattr(x, "shape", None) == ()] for each in fields]
        assert numbers[0] == numbers[1]
        assert optax.tree.get(states[1], "t") == 0

    def test_a_factored_moment_without_rows_stays(self):
        state, new = self.factored(12)
        assert bits(new["v_col"]) == bits(state["v_col"])
        assert bits(new["v_row"][:6]) == bits(state["v_row"][6:])
        assert not new["v_row"][6:].any()

    @pytest.mark.parametrize("count", [4, 15, 16])
    def test_factors_of_which_shapes_do_not_tell_the_axis_begin_anew(self, count):
        """Adafactor swaps its factors, or has others, with a row more or less."""
        assert not any(leaf.any() for leaf in jax.tree.leaves(self.factored(count, count if count < 16 else 4)[1]))

    @staticmethod
    def factored(count, least=4):
        params = {"w": jax.random.normal(jax.random.key(0), (32, 16))}
        adafactor = optax.adafactor(0.1, min_dim_size_to_factor=least)
        tx = fz.freeze(adafactor, {"w": ~fz.rows(jnp.arange(count))})
        _, state = tx.update(params, tx.init(params), params)
        new = fz.replace_masks(state, tx, params, {"w": ~fz.rows(jnp.arange(6, count + 6))})
        return [{name: optax.tree.get(s, name)["w"] for name in ("v_row", "v_col")} for s in (state, new)]


class TestOtherStates:
    """``replace_masks`` of a state inside other states, from a program, or in other memory."""

    def test_the_same_rows_keep_everything_beside_a_leaf_that_never_trains(self):
        """Of Adafactor's means it is not known which axis the rows are; other rows begin anew."""
        params = {"w": jnp.ones((4, 3)), "count": jnp.arange(2)}
        frozen = {"w": ~fz.rows(jnp.array([1, 2, 3])), "count": False}
        tx = fz.freeze(optax.adafactor(0.1, min_dim_size_to_factor=2), frozen)
        _, state = tx.update(params, tx.init(params), params)
        assert bits(fz.replace_masks(state, tx, params, {"w": frozen["w"]})) == bits(state)

    def test_several_states_that_differ_in_their_masks_alone(self):
        """Each ``init`` gets the masks of its own state, also in a dict that ``jit`` has sorted."""
        params = {"a": jnp.arange(4.0), "b": jnp.arange(4.0)}
        frozen = [dict.fromkeys("ab", ~fz.rows(jnp.array(index))) for index in ([0, 1], [2, 3])]
        tx = optax.named_chain(*((name, fz.freeze(optax.trace(0.9), each)) for name, each in zip("zy", frozen)))  # noqa: B905
        state = jax.jit(lambda state: state)(tx.init(params))
        new = fz.replace_masks(state, tx, params, {"a": ~fz.rows(jnp.array([1, 2]))})
        assert [new[name].masks["a"].tolist() for name in "zy"] == [[1, 2], [1, 2]]
        assert [new[name].masks["b"].tolist() for name in "zy"] == [[0, 1], [2, 3]]

    def test_inside_another_freeze_and_without_static_data(self):
        def make(*index):
            inner = fz.freeze(optax.adam(0.1), {**only(*index), "embed": False, "head": False})
            return fz.freeze(optax.MultiSteps(inner, 1), {"layers": False, "embed": False, "head": True})

        tx, params = make(3, 1), init()
        _, state = tx.update(params, tx.init(params), params)
        new = fz.replace_masks(state, tx, params, others(0, 3))
        assert bits(new) == bits(fz.migrate(state, make(0, 3), params))
        assert bits(optax.tree.get(new, "mu")["layers"]["bias"][1]) == bits(0.1 * params["layers"]["bias"][3])
        mapped = optax.tree_map_params(tx, lambda x: x, state)
        assert bits(fz.replace_masks(mapped, tx, params, others(0, 3))) == bits(new)

    def test_in_a_scan_with_donated_state(self):
        tx, params = fz.freeze(optax.MultiSteps(optax.adam(0.1), 2), only(3, 1), full_updates=False), init()

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def run(params, state, indices):
            def step(carry, index):
                params, state = carry
                state = fz.replace_masks(state, tx, params, {"layers/**": ~fz.rows(index)})
                return step_of(tx, False)(params, state), None

            return jax.lax.scan(step, (params, state), indices)[0]

        last, state = run(jax.tree.map(jnp.copy, params), tx.init(params), jnp.array([[0, 1], [1, 2], [0, 4], [4, 2]]))
        assert moved(params, last) == [1, 2, 4]
        assert state.inner_state.inner_states["trainable"].inner_state.gradient_step == 2

    def test_in_an_nnx_optimizer(self):
        model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        frozen = fz.rules({"kernel": ~fz.rows(jnp.array([3, 1]))})
        optimizer = nnx.Optimizer(model, fz.freeze(optax.adam(0.1), frozen), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, index):
            params, new = nnx.state(model, nnx.Param), {"kernel": ~fz.rows(index)}
            optimizer.opt_state = fz.replace_masks(optimizer.opt_state, optimizer.tx, params, new)
            optimizer.update(model, jax.tree.map(jnp.ones_like, params))

        for index in ([0, 3], [2, 1]):
            before = np.asarray(model.kernel[...])
            step(model, optimizer, jnp.array(index))
            assert np.flatnonzero((np.asarray(model.kernel[...]) != before).any(1)).tolist() == sorted(index)

    def test_in_host_memory(self):
        tx, params, new = TestGroups().tx(), init(), TestGroups.rows(3, 0)
        _, state = step_of(tx)(params, tx.init(params))
        moved = fz.offload(state, min_bytes=0)
        replaced = fz.replace_masks(moved, tx, params, new)
        assert bits(replaced) == bits(fz.replace_masks(state, tx, params, new))
        assert jax.tree.map(lambda x: x.sharding, replaced) == jax.tree.map(lambda x: x.sharding, moved)


class TestGroups:
    def tx(self, condition=True, **others):
        groups = {"layers/**": (fz.rows(jnp.array([3, 1])), condition), "embed": False, **others}
        return fz.freeze_when(optax.adam(0.1), groups)

    @staticmethod
    def rows(*index):
        return {"layers/**": fz.rows(jnp.array(index))}

    def test_the_group_has_the_rows_and_other_leaves_the_others(self):
        params, tx = init(), self.tx()
        state = tx.init(params)
        step = jax.jit(step_of(tx))
        after, state = step(params, state)
        assert moved(params, after) == [0, 2, 4]
        state = fz.replace_masks(state, tx, after, self.rows(0, 1))
        last, state = step(after, state)
        assert moved(after, last) == [2, 3, 4]
        state = fz.set_frozen(state, {"layers/**": False})
        assert moved(last, step(last, state)[0]) == [0, 1, 2, 3, 4]
        assert (state.groups["layers/**"].inner_state[0].count, state.ungrouped_state[0].count) == (0, 2)

    def test_moments_and_counts_go_with_the_rows(self):
        params, tx = init(), self.tx(False)
        _, state = step_of(tx)(params, tx.init(params))
        new = fz.replace_masks(state, tx, params, self.rows(0, 3))
        bias = lambda s: np.asarray(s[0].mu["layers"]["bias"])  # noqa: E731
        group, rest = (bias(s) for s in (new.groups["layers/**"].inner_state, new.ungrouped_state))
        assert bits(group[1]) == bits(bias(state.groups["layers/**"].inner_state)[1])
        assert not group[0].any()
        assert bits(rest[1:]) == bits(bias(state.ungrouped_state)[1:])
        assert not rest[0].any()
        other = fz.replace_masks(state, tx, params, self.rows(0, 2))
        counts = [(s.groups["layers/**"].inner_state[0].count, s.ungrouped_state[0].count) for s in (new, other)]
        assert counts == [(1, 1), (0, 1)]

    def test_a_group_and_the_remainder_of_its_leaf(self):
        params, tx = init(), self.tx(**{"**": True})
        state = tx.init(params)
        grads = jax.jit(lambda params, state: fz.grad(loss, fz.spec_of(state))(params, X))(params, state)
        assert not any(np.asarray(g).any() for g in jax.tree.leaves({**grads, "embed": 0}))
        assert fz.resolve(params, fz.spec_of(state))["layers"] == {"bias": True, "kernel": True}
        state = fz.replace_masks(state, tx, params, self.rows(0, 1))
        state = fz.set_frozen(state, {"**": False})
        assert moved(params, step_of(tx)(params, state)[0]) == [2, 3, 4]

    def test_what_is_coupled_goes_on(self):
        groups = {"layers/**": (fz.rows(jnp.array([3, 1])), False)}
        tx, params = fz.freeze_when(optax.adan(0.1), groups, coupled=optax.scale_by_adam()), init()
        _, state = step_of(tx)(params, tx.init(params))
        new = fz.replace_masks(state, tx, params, self.rows(0, 2))
        assert bits(new.coupled_state) == bits(state.coupled_state)
        assert [new.groups["layers/**"].inner_state[0].t, new.ungrouped_state[0].t] == [0, 1]


def test_summary():
    text = str(fz.summary(init(), only(1, 3), optax.adam(0.1)))
    assert "6 train (40 %): 2 rows of axis 0" in text
    assert "18 train (40 %): 2 rows of axis 0" in text


def test_assert_frozen_and_fingerprint():
    params = init()
    moved = {**params, "layers": {**params["layers"], "bias": params["layers"]["bias"].at[2].add(1)}}
    fz.assert_frozen(params, moved, only(2, 3))
    with pytest.raises(AssertionError, match="layers/bias: 3 of"):
        fz.assert_frozen(params, moved, only(1, 3))
    digest = jax.jit(lambda params, *index: fz.fingerprint(params, only(*index)))
    expected = bits(fz.fingerprint(params, static(2, 3)))
    assert bits(digest(params, 2, 3)) == bits(digest(moved, 3, 2)) == expected
    assert bits(digest(params, 1, 3)) != bits(digest(moved, 1, 3))


def test_rows_that_trained_before_belong_to_the_checkpoint(tmp_path):
    """Saved with what never trains as frozen, a checkpoint has all rows."""
    base, tx = init(), fz.freeze(optax.adam(0.1), only(3, 1), full_updates=False)
    step = step_of(tx, False)
    params, state = step(base, tx.init(base))
    params, state = step(params, fz.replace_masks(state, tx, params, others(0, 2)))
    checkpoint.save(tmp_path / "a", params, fz.spec_of(state), step=1)
    with pytest.raises(ValueError, match="the base differs"):
        checkpoint.restore(tmp_path / "a", base)
    checkpoint.save(tmp_path / "b", params, "embed", step=1, opt_state=state)
    restored = checkpoint.restore(tmp_path / "b", base, opt_state=jax.eval_shape(tx.init, base))[:2]
    assert bits(restored) == bits((params, state))
    assert bits(step(*restored)) == bits(step(params, state))


class TestSharded:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    @pytest.mark.parametrize("spec", [P(None, None, "data"), P("data")])
    def test_fingerprint_and_checkpoint(self, spec, tmp_path):
        params = jax.device_put(jnp.ones((8, 4, 8)), NamedSharding(self.mesh, spec))
        trains = lambda *index: ~fz.rows(jnp.array(index))  # noqa: E731
        assert bits(fz.fingerprint(params, trains(5, 2))) == bits(fz.fingerprint(params, ~fz.rows([2, 5])))
        checkpoint.save(tmp_path, params, trains(5, 2), step=0)
        assert bits(checkpoint.restore(tmp_path, params, frozen=trains(2, 5))[0]) == bits(params)
        with pytest.raises(ValueError, match="the spec differs"):
            checkpoint.restore(tmp_path, params, frozen=trains(1, 5))

    def test_the_state_lies_beside_the_parameters(self):
        params = {"layers": jnp.ones((LAYERS, 8, 4)), "head": jnp.ones(4)}
        specs = {"layers": P(None, "data", "model"), "head": P()}
        params = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec)), params, specs)
        frozen = {"layers": ~fz.rows(jnp.array([3, 1])), "head": False}
        tx = fz.freeze(optax.adam(0.1), frozen, full_updates=False)
        state = jax.jit(tx.init, out_shardings=fz.state_shardings(tx, params))(params)
        assert optax.tree.get(state, "mu")["layers"].sharding.spec == specs["layers"]
        assert state.masks["layers"].sharding.is_fully_replicated
        replaced = fz.replace_masks(state, tx, params, {"layers": ~fz.rows(jnp.array([0, 1]))})
        assert jax.tree.map(lambda x: x.sharding, replaced) == jax.tree.map(lambda x: x.sharding, state)

    def test_each_device_trains_other_rows_of_its_own(self):
        params = {"w": jnp.arange(32.0).reshape(8, 4) + 1}

        def step(params, index):
            tx = fz.freeze(optax.sgd(1.0), {"w": ~fz.rows(index)}, full_updates=False)
            state = tx.init(params)
            updates, _ = tx.update(fz.grad(lambda p: (p["w"] ** 2).sum() / 2, fz.spec_of(state))(params), state, params)
            return fz.apply_updates(params, updates)

        sharded = jax.jit(jax.shard_map(step, mesh=self.mesh, in_specs=(P("data"), P("data")), out_specs=P("data")))
        new = sharded(params, jnp.array([0, 1, 1, 0]))
        assert bits(new["w"]) == bits(params["w"].at[jnp.array([0, 3, 5, 6])].set(0))
