"""Single elements: rows and dense masks through every function, and the contract as a property."""

import itertools
import json
import operator
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits, state_bytes

import optax_freeze as fz
from optax_freeze._spec.plan_digest import record_of
from optax_freeze._spec.resolve import make_plan
from optax_freeze._spec.selection_record import selection_of

DIAGONAL = np.eye(2, dtype=bool)


def eagerly(fn):
    return fn


ROWS = {  # how else they may be named is in `SAME_ROWS`
    "slice": (fz.rows(slice(2, 5)), [2, 3, 4]),
    "strided": (fz.rows(slice(1, None, 2)), [1, 3, 5]),
    "int": (fz.rows(-1), [6]),
    "list": (fz.rows([5, 0, -6]), [0, 1, 5]),
    "inverted": (~fz.rows(slice(4, None)), [0, 1, 2, 3]),
}

RECORD = {"axis": 0, "rows": [[0, 2, 1]], "train": True}
SCATTERED = [0, 1, 3, 5, 6, 8, 10, 12, 14, 16, 19, 21, 23, 25, 27, 29, 31, 33, 35, 39]
SAME_ROWS = {
    "one run": [
        *(fz.rows(slice(0, 36)), fz.rows(slice(0, 36), axis=-2), fz.rows(slice(35, None, -1))),
        *(~fz.rows([39, 36, 38, 37]), fz.rows(range(35, -1, -1)), ~fz.rows(slice(-4, None))),
    ],
    "one row": [fz.rows(7), fz.rows(np.array([7])), fz.rows(-33), fz.rows(slice(7, 8)), fz.rows(slice(7, 9, 2))],
    "few runs": [fz.rows(slice(0, 8, 2)), fz.rows([0, 2, 4, 6]), fz.rows(slice(6, None, -2))],
    "every second row": [
        *(fz.rows(slice(0, None, 2)), fz.rows(range(0, 40, 2)), fz.rows(slice(-2, None, -2))),
        *(~fz.rows(slice(1, None, 2)), ~fz.rows(range(1, 40, 2))),
    ],
    "every third row": [
        *(fz.rows(slice(1, None, 3)), fz.rows(range(1, 40, 3))),
        ~fz.rows([i for i in range(40) if i % 3 != 1]),
    ],
    "the others of every third row": [~fz.rows(slice(1, None, 3)), fz.rows([i for i in range(40) if i % 3 != 1])],
    "scattered rows": [
        *(fz.rows(SCATTERED), fz.rows([i - 40 for i in SCATTERED])),
        ~fz.rows([i for i in range(40) if i not in SCATTERED]),
    ],
}


def frozen_rows(size, frozen, axis, ndim):
    mask = np.zeros(size, bool)
    mask[frozen] = True
    return mask.reshape([-1 if i == axis else 1 for i in range(ndim)])


def a_mask(name, axis):
    """An element mask, where it freezes an array, and a function that gives the trainable part of the array."""
    shape = [3, 2, 4]
    shape[axis] = 7
    if name in ROWS:
        rows, expected = ROWS[name]
        frozen = np.broadcast_to(frozen_rows(7, expected, axis % 3, 3), shape)
        trains = jnp.array([i for i in range(7) if i not in expected])
        return type(rows)(rows.index, axis, rows.inverted), frozen, lambda x: jnp.take(x, trains, axis)
    frozen = np.asarray(jax.random.bernoulli(jax.random.key(1), 0.5, shape))
    library, compact = (jnp, True) if name == "compact" else (np, False)
    take = (lambda x: jnp.asarray(np.asarray(x)[~frozen])) if compact else lambda x: jnp.where(frozen, 0, x)
    return fz.elements(library.asarray(frozen), compact=compact), frozen, take


KINDS = [(name, (0, 1, -1)[i % 3], jax.jit) for i, name in enumerate([*ROWS, "dense", "compact"])]
KINDS += [("strided", 1, eagerly), ("compact", 0, eagerly)]


@pytest.mark.parametrize(("name", "axis", "compiled"), KINDS)
def test_every_function(name, axis, compiled):
    element_mask, frozen, take = a_mask(name, axis)
    w = jax.random.normal(jax.random.key(0), frozen.shape)
    params, spec = {"w": w, "b": jnp.ones(2)}, {"w": element_mask, "b": False}
    wild = {"w": jnp.where(frozen, jnp.nan, 1.0), "b": jnp.ones(2)}
    zero, tx = fz.masked_zero_updates(spec), fz.freeze(optax.adamw(0.1), spec)

    def loss(p):
        return jnp.sum(jnp.sin(p["w"])) * p["b"].sum()

    @compiled
    def run(params, wild, state):
        trainable, rest = fz.partition(params, spec)
        nan = jax.tree.map(lambda x: x * np.nan, params)
        return {
            "partition": (trainable, rest),
            "combine": fz.combine(trainable, rest),
            "combine twice": fz.combine(jax.tree.map(lambda x: x * 2, trainable), rest),
            "apply a part": fz.apply_updates(params, trainable, spec),
            "apply updates": fz.apply_updates(params, nan, spec),
            "grad": fz.grad(loss, spec)(params),
            "stopped grad": jax.grad(lambda p: loss(fz.stop_gradient(p, spec)))(params),
            "stopped": fz.stop_gradient(params, spec),
            "zeroed": zero.update(wild, zero.init(params))[0],
            "updates": tx.update(wild, state, params)[0],
        }

    state = tx.init(params)
    values = lambda tree: getattr(tree["w"], "values", tree["w"])  # noqa: E731
    masks = frozen.size if name in ("dense", "compact") else 0
    assert state_bytes(state) == 8 * (take(w).size + 2) + masks
    got = run(params, wild, state)
    trainable, rest = got["partition"]
    assert bits(values(trainable)) == bits(take(w))
    assert trainable["w"].shape == w.shape
    assert bits(got["combine"]) == bits(fz.combine(trainable, rest)) == bits(got["stopped"]) == bits(params)
    assert bits(got["combine twice"]["w"]) == bits(jnp.where(frozen, w, w * 2))
    assert bits(got["apply a part"]["w"]) == bits(jnp.where(frozen, w, w + w))
    moved = np.asarray(got["apply updates"]["w"])
    assert np.array_equal(np.isnan(moved), ~frozen)
    assert moved[frozen].tobytes() == np.asarray(w)[frozen].tobytes()
    chex.assert_trees_all_close(values(got["grad"]), take(2 * jnp.cos(w)), rtol=1e-6)
    chex.assert_trees_all_close(got["stopped grad"]["w"], jnp.where(frozen, 0, 2 * jnp.cos(w)), rtol=1e-6)
    assert bits(got["zeroed"]["w"]) == bits(jnp.where(frozen, -0.0, 1.0))
    updates = np.asarray(got["updates"]["w"])
    assert updates[frozen].tobytes() == np.full(frozen.sum(), -0.0, np.float32).tobytes()
    assert (updates[~frozen] != 0).all()
    assert fz.labels(spec)(params) == {"w": "trainable", "b": "trainable"}
    assert masks or fz.resolve(params, spec) == spec


class TestRows:
    def test_all_or_none_fold_to_the_whole_leaf(self):
        params = {"w": jnp.ones((3, 2))}
        for rows, expected in [
            (fz.rows(slice(None)), True),
            (fz.rows([0, 1, 2]), True),
            (~fz.rows(slice(3, None), allow_empty=True), True),
            (fz.rows(slice(0, 0)), False),
            (fz.rows([]), False),
            (~fz.rows(slice(None)), False),
        ]:
            assert fz.resolve(params, {"w": rows}) == {"w": expected}
        assert fz.resolve({"w": jnp.ones((0, 2))}, {"w": fz.rows(slice(None))}) == {"w": True}

    @pytest.mark.parametrize("index", [slice(4, None), slice(4, None, 2)], ids=str)
    def test_an_open_slice_that_selects_no_row(self, index):
        params, rows = {"w": jnp.ones((4, 2))}, fz.rows(index, axis=-2)
        for refused in (rows, ~rows):
            with pytest.raises(ValueError, match=r"there are no rows from 4 on\n  at: w\n  got: none of 4 rows"):
                fz.resolve(params, {"w": refused})
        allowed = fz.rows(index, axis=-2, allow_empty=True)
        assert fz.resolve(params, {"w": allowed}) == {"w": False}
        assert fz.resolve(params, {"w": ~allowed}) == {"w": True}
        assert eval(repr(~allowed), {"fz": fz}) == ~allowed != ~rows
        assert fz.resolve({"w": jnp.ones((5, 2))}, {"w": ~~rows}) == {"w": rows}

    @pytest.mark.parametrize("rows", [fz.rows([0, -8]), fz.rows(slice(-8, None)), fz.rows(0, axis=-3)], ids=str)
    def test_what_does_not_fit_the_leaf(self, rows):
        """Other rows that do not are in ``wrong_calls.md``."""
        with pytest.raises(ValueError, match=r"out of range\n  at: w|no such axis\n  at: w"):
            fz.resolve({"w": jnp.ones((7, 2))}, {"w": rows})
        with pytest.raises(ValueError, match="at least one axis"):
            fz.resolve({"w": jnp.ones(())}, {"w": rows})

    def test_selectors_with_masks(self):
        params = {"a": jnp.ones((4, 2)), "b": jnp.ones((4, 2))}
        first = fz.rules({"a": fz.rows(0)})
        assert fz.resolve(params, ~first) == {"a": ~fz.rows(0), "b": True}
        assert fz.resolve(params, first | "b") == {"a": fz.rows(0), "b": True}
        assert fz.resolve(params, first & fz.path("a")) == {"a": fz.rows(0), "b": False}
        assert fz.resolve(params, first | "a") == {"a": True, "b": False}
        assert fz.resolve(params, first & "b") == {"a": False, "b": False}
        assert fz.resolve(params, ~first & fz.path("a")) == {"a": ~fz.rows(0), "b": False}

    @pytest.mark.parametrize("axes", [(0, 0), (-1, 1)], ids=str)
    def test_rows_with_rows(self, axes):
        """``|`` freezes the rows that either mask freezes, ``&`` those that both do, however they are named."""
        leaf = {"w": jax.ShapeDtypeStruct((7, 7), jnp.float32)}
        indices = [slice(0, 4), slice(None, None, 3), [0, -1, 4], 2, slice(0, 0), slice(None)]
        rows = [[each for index in indices for each in (fz.rows(index, axis), ~fz.rows(index, axis))] for axis in axes]
        where = lambda spec: np.broadcast_to(make_plan(leaf, spec).selections[0].frozen(2), (7, 7))  # noqa: E731
        for a, b in itertools.product(*rows):
            for combine in (operator.or_, operator.and_):
                spec = combine(fz.rules({"w": a}), fz.rules({"w": b}))
                np.testing.assert_array_equal(where(spec), combine(where({"w": a}), where({"w": b})), repr(spec))
                assert fz.resolve(leaf, fz.resolve(leaf, spec)) == fz.resolve(leaf, spec)

    def test_a_vector_of_bools(self):
        """``True`` names a row, as in NumPy."""
        params, bools = {"w": jnp.ones((4, 3))}, np.array([True, False, True, True])
        for given in (bools, jnp.asarray(bools), list(bools), bools.tolist(), tuple(bools.tolist())):
            rows = fz.rows(given)
            assert rows == fz.rows(bools) != fz.rows([0, 2, 3])
            assert fz.partition(params, {"w": rows})[0]["w"].index.numbers.tolist() == [1]
            assert (
                fz.partition(params, {"w": ~rows})[0]["w"].index
                == fz.partition(params, {"w": fz.rows(1)})[0]["w"].index
            )
        assert fz.rows([True, False]) != fz.rows([1, 0])
        assert eval(repr(~fz.rows(bools, axis=-2))) == ~fz.rows(bools, axis=-2)
        assert fz.resolve(params, {"w": fz.rows(np.ones(4, bool))}) == {"w": True}
        both = fz.rules({"w": fz.rows(bools)}) | fz.rules({"w": fz.rows(1)})
        assert fz.resolve(params, both) == {"w": True}
        with pytest.raises(ValueError, match=r"got: 0 bools\n  expected: 4, "):
            fz.resolve(params, {"w": fz.rows(bools[:0])})
        with pytest.raises(
            ValueError, match=r"at: w\n  got: 4 bools\n  expected: 3, the length of axis 1.*\n  fix: axis=0"
        ):
            fz.resolve(params, {"w": fz.rows(bools, axis=1)})
        with pytest.raises(ValueError, match=r"fix: for whole rows use fz.rows\Z"):
            fz.resolve(params, {"w": fz.elements(bools)})
        with pytest.raises(ValueError, match=r"for whole rows use fz.rows\(mask, axis=1\)"):
            fz.resolve(params, {"w": fz.elements(bools[:3])})

    def test_the_fix_for_masks_that_do_not_combine(self):
        leaf = jnp.ones((5, 4, 3))
        masks = fz.rows(0), ~fz.rows([1, -1], axis=-2), fz.rows(slice(None, None, 2), axis=2), fz.rows([3])
        where = lambda spec: np.broadcast_to(make_plan(leaf, spec).selections[0].frozen(3), leaf.shape)  # noqa: E731
        for (a, b), join in itertools.product(itertools.product(masks, masks), (operator.or_, operator.and_)):
            for call in (lambda: join(a, b), lambda: fz.resolve(leaf, join(fz.rules({"**": a}), fz.rules({"**": b})))):  # noqa: B023
                try:
                    found = call()
                except (TypeError, ValueError) as error:
                    *code, spec = str(error).partition("fix: ")[2].removeprefix("combine them as arrays: ").split("; ")
                    names = {"np": np, "fz": fz, "leaf": leaf, "pattern": "**"}
                    exec("\n".join(code), names)
                    found = eval(spec, names)
                np.testing.assert_array_equal(where(found), join(where(a), where(b)))

    def test_masks_that_do_not_combine(self):
        params = {"a": jnp.ones((4, 2)), "steps": jnp.arange(4)}
        first = fz.rules({"**": fz.rows(0)})
        for other in (fz.rules({"**": fz.rows(slice(1, 3))}), fz.rules({"a": fz.rows(slice(1, 3)), "steps": True})):
            assert fz.resolve(params, first | other) == {"a": fz.rows(slice(0, 3)), "steps": True}
        alone = fz.rules({"a": True, "steps": fz.rows(slice(1, 3))})
        for spec in (first | alone, alone & first, alone | fz.rules({"steps": fz.rows(0)}) | first):
            with pytest.raises(ValueError, match=r"fz\.rows\(.* cannot train\n  at: steps"):
                fz.resolve(params, spec)
        assert fz.resolve(params, alone | fz.rules({"steps": ~fz.rows(slice(1, 3))})) == dict.fromkeys(params, True)
        for other in (fz.rows(1, axis=1), fz.rows(jnp.array([1])), fz.elements(np.eye(4, 2, dtype=bool))):
            for spec in (first | fz.rules({"a": other}), fz.rules({"a": other}) & first):
                with pytest.raises(ValueError, match=r"two element masks for one leaf\n  at: a"):
                    fz.resolve(params, spec)
        with pytest.raises(ValueError, match=r"out of range\n  at: a"):
            fz.resolve(params, first & fz.rules({"a": fz.rows(4)}))

    @pytest.mark.parametrize("form", ["a tree", "a prefix", "a function", "rules", "a default", "not rules"])
    def test_a_mask_of_leaves_that_cannot_train(self, form):
        """It asks to train what cannot, unless it covers a leaf that can, or a hole in its place, too."""
        at_0 = np.arange(3)[:, None] == np.zeros(2)
        params = {"a": {"q": jnp.ones((3, 2), jnp.int8), "flags": np.ones((3, 2), bool)}, "w": jnp.ones((3, 2))}
        shared = fz.rows([0])
        for mask in (
            shared,
            ~fz.rows(1),
            fz.rows(jnp.array([0])),
            at_0,
            ~fz.elements(at_0),
            fz.elements(at_0, compact=True),
        ):
            spec = {
                "a tree": {"a": {"q": mask, "flags": True}, "w": mask},
                "a prefix": {"a": mask, "w": mask},
                "a function": lambda params, mask=mask: {"a": mask, "w": False},
                "rules": fz.rules({"a/q": mask, "w": mask}),
                "a default": fz.rules({"w": False}, default=mask),
                "not rules": ~fz.rules({"a": mask, "w": mask}),
            }[form]
            with pytest.raises(ValueError, match=r"cannot train\n  at: a/.*\n  got: (int8|bool) of shape \(3, 2\)"):
                fz.resolve(params, spec)
        with pytest.raises(ValueError, match="cannot train"):
            fz.freeze_when(optax.sgd(0.1), {"a": (shared, False)}).init(params)
        assert fz.resolve(params, shared) == {"a": {"q": True, "flags": True}, "w": shared}
        assert fz.resolve(params, fz.rules({"**": shared}))["w"] == shared
        everything = {"a": fz.rows(slice(None)), "w": np.zeros((3, 2), bool)}
        assert fz.resolve(params, everything)["a"] == {"q": True, "flags": True}
        holes = {"a": {"q": params["a"]["q"], "flags": optax.MaskedNode()}, "w": params["w"]}
        assert fz.resolve(holes, {"a": shared, "w": False})["a"]["q"] is True
        grown = {"a": np.ones((2, 2), np.int8)}, {"a": np.ones((3, 2), np.int8)}
        merged, frozen, _ = fz.merge_pretrained(grown[1], grown[0])
        assert fz.resolve(merged, frozen) == {"a": True}

    @pytest.mark.parametrize("name", SAME_ROWS)
    def test_the_same_rows_however_they_are_named(self, name):
        """They have one index, one structure of the state and one record, from which they can be read again."""
        w, others = jnp.ones((40, 2)), SAME_ROWS[name]
        parts = [fz.partition(w, rows)[0] for rows in others]
        states = [fz.freeze(optax.sgd(0.1), rows).init(w) for rows in others]
        assert len({part.index for part in parts}) == len({jax.tree.structure(state) for state in states}) == 1
        assert len({str(part.index) for part in parts}) == 1
        for part, rows in zip(parts, others, strict=True):
            assert json.loads(json.dumps(record_of(part.index))) == record_of(parts[0].index)
            assert selection_of(record_of(part.index), w.shape) == part.index
            fz.freeze(optax.sgd(0.1), rows).update(parts[0], states[0])
        assert [fz.partition(w, rows[0])[0].index == parts[0].index for rows in SAME_ROWS.values()].count(True) == 1

    @pytest.mark.parametrize(
        "record",
        [
            *("trains", 1, None, {}, {"compact": True, "count": None}, {"compact": False, "count": 3}),
            {"axis": 2, "count": 2, "dynamic": True},
            *({**RECORD, "axis": 2}, {**RECORD, "axis": -1}, {**RECORD, "train": False}, {**RECORD, "more": 1}),
            *(
                {**RECORD, "rows": rows}
                for rows in ([], [[0, 8, 1]], [[0, 9, 1]], [[0, 4, 2]], [[0, 3, 2]], [[0, 1, 1], [1, 2, 1]])
            ),
            {**RECORD, "rows": [[2, 4, 1], [0, 1, 1]]},
        ],
    )
    def test_a_record_of_no_selection(self, record):
        assert selection_of(RECORD, (8, 2)).run == (0, 2)
        with pytest.raises(ValueError, match="the frozen part"):
            selection_of(record, (8, 2))

    def test_many_runs(self):
        listed, w = list(range(0, 100, 2)), jnp.arange(300.0).reshape(100, 3)
        for rows in (fz.rows(listed), ~fz.rows(listed), fz.rows([*listed, 1])):
            mask = frozen_rows(100, list(rows.index), 0, 2) ^ rows.inverted
            moved = jax.jit(lambda w, r=rows: fz.apply_updates(w, fz.partition(w, r)[0]))(w)
            assert bits(moved) == bits(jnp.where(mask, w, 2 * w))

    def test_an_update_of_another_dtype(self):
        w = jnp.full((4, 2), 1.0, jnp.bfloat16)
        updates = jax.tree.map(lambda x: x.astype(jnp.float32) * 0.3, fz.partition(w, fz.rows(0))[0])
        whole = optax.apply_updates(w, jnp.full((4, 2), 0.3))
        assert bits(fz.apply_updates(w, updates)) == bits(whole.at[0].set(1.0))


class TestElements:
    @pytest.mark.parametrize("compact", [False, True])
    def test_gradients_of_examples(self, compact):
        """Of the trainable structure, as of ``jax.vmap(fz.grad(...))``; beside a dense mask that is a full array."""
        params = {"w": jnp.arange(4.0).reshape(2, 2), "b": jnp.ones(3)}
        spec = {"w": fz.elements(DIAGONAL, compact=compact), "b": True}
        mean = optax.stateless(lambda updates, params: jax.tree.map(lambda g: g.mean(axis=0), updates))
        tx = fz.freeze(mean, spec)
        grads = jax.vmap(fz.grad(lambda p, x: x * jnp.sum(p["w"] ** 2), spec), (None, 0))(params, jnp.array([1.0, 3.0]))
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        assert bits(updates["w"]) == bits(jnp.where(DIAGONAL, -0.0, 4 * params["w"]))
        assert bits(updates["b"]) == bits(jnp.full(3, -0.0))
        wrong = {"w": jnp.ones((2, 2, 2, 2)), "b": jnp.ones((2, 3))}
        with pytest.raises(ValueError, match=r"at: w\n  got: an array of shape \(2, 2, 2, 2\)"):
            tx.update(wrong, tx.init(params), params)

    def test_a_boolean_array_means_elements(self):
        params, trains = {"w": jnp.ones((2, 2))}, bits(jnp.array([[0.0, 1.0], [1.0, 0.0]]))
        for array in (DIAGONAL, jnp.asarray(DIAGONAL)):
            for spec in ({"w": array}, fz.rules({"w": array}), lambda shapes, a=array: {"w": a}):
                assert bits(fz.partition(params, spec)[0]["w"]) == trains
        assert bits(fz.partition(params["w"], DIAGONAL)[0]) == trains
        assert bits(fz.partition(params, {"w": ~fz.elements(~DIAGONAL)})[0]["w"]) == trains
        inverted = ~fz.elements(DIAGONAL, compact=True)
        assert (inverted.compact, inverted.array.tolist()) == (True, (~DIAGONAL).tolist())

    def test_dense_masks_never_fold(self):
        params = {"w": jnp.ones((2, 2))}
        for value in (True, False):
            assert repr(fz.resolve(params, {"w": np.full((2, 2), value)})) == "{'w': fz.elements(<bool[2, 2]>)}"

    def test_a_spec_is_an_argument_of_a_jitted_function(self):
        params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}

        @jax.jit
        def f(params, spec):
            return fz.apply_updates(params, params, spec)

        inverted = ~fz.rules({"w": ~DIAGONAL, "b": False})
        for spec in (fz.rules({"w": fz.elements(DIAGONAL), "b": True}), fz.rules({"w": DIAGONAL}) | "b", inverted):
            assert bits(f(params, spec)) == bits({"w": jnp.array([[1.0, 2.0], [2.0, 1.0]]), "b": params["b"]})
        size = f._cache_size()
        f(params, fz.rules({"w": fz.elements(~DIAGONAL), "b": True}))
        assert f._cache_size() == size

    def test_the_part_of_another_spec(self):
        params = {"w": jnp.ones((4, 2))}
        part = fz.partition(params, {"w": fz.rows(1)})[0]
        says = r"not the trainable part of the leaf\n  at: w\n  got: (a Part|an array)"
        for frozen, wrong in (({"w": fz.rows(0)}, part), (False, part), ({"w": fz.rows(0)}, {"w": jnp.ones((3, 2))})):
            tx = fz.freeze(optax.sgd(0.1), frozen)
            with pytest.raises(ValueError, match=says):
                tx.update(wrong, tx.init(params))

    @pytest.mark.parametrize("mask", [fz.rows(0), fz.elements(DIAGONAL), fz.elements(DIAGONAL, compact=True)], ids=repr)
    def test_a_wider_part_takes_the_dtype_of_the_leaf(self, mask):
        """A line search tries parameters of the updates' dtype."""
        params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
        trainable, rest = fz.partition(params, {"w": mask})
        wide = jax.tree.map(lambda leaf: 2 * leaf.astype(jnp.float32), trainable)
        whole = fz.combine(wide, rest)["w"]
        assert whole.dtype == jnp.bfloat16
        assert sorted(np.ravel(whole).tolist()) == [1, 1, 2, 2]
        assert bits(fz.restrict(lambda p: p["w"].sum(), rest)(wide)) == bits(whole.sum())

    def test_combine_without_what_trains(self):
        _, rest = fz.partition({"w": jnp.ones((2, 2))}, {"w": fz.rows(0)})
        with pytest.raises(ValueError, match=r"the trainable part of a leaf is missing\n  at: w"):
            fz.combine({"w": optax.MaskedNode()}, rest)


@pytest.mark.usefixtures("as_users_compile")
class TestEveryBitPattern:
    """Narrow floats are moved as integers: XLA computes them in float32 on a CPU, which changes NaN payloads."""

    @pytest.mark.parametrize(
        ("dtype", "compiled"),
        [*((dtype, jax.jit) for dtype in ("bfloat16", "float16", "float8_e5m2")), ("bfloat16", eagerly)],
    )
    def test_of_what_is_frozen_in_part(self, dtype, compiled):
        width = jnp.finfo(dtype).bits
        patterns = np.arange(2**width, dtype=f"uint{width}").reshape(16, -1)
        mask = np.random.default_rng(0).random(patterns.shape) < 0.5
        specs = {
            "rows": fz.rows(slice(0, 7)),
            "last axis": fz.rows(slice(3, None), axis=1),
            "strided": fz.rows(slice(0, None, 3)),
            "list": fz.rows([0, 5, 9]),
            "elements": fz.elements(mask),
            "compact": fz.elements(mask, compact=True),
        }
        leaves = {kind: jax.lax.bitcast_convert_type(jnp.asarray(patterns), jnp.dtype(dtype)) for kind in specs}
        ones = {kind: jnp.ones(mask.shape) for kind in specs}
        stopped = jax.grad(lambda p: sum(map(jnp.sum, jax.tree.leaves(fz.stop_gradient(p, specs)))))(ones)

        @compiled
        def run(leaves):
            news = []
            for full_updates in (True, False):
                tx = fz.freeze(optax.sgd(0.1), specs, full_updates=full_updates)
                updates, state = tx.update(jax.tree.map(jnp.ones_like, leaves), tx.init(leaves), leaves)
                news.append(fz.apply_updates(leaves, updates, fz.spec_of(state)))
            return fz.combine(*fz.partition(leaves, specs)), fz.stop_gradient(leaves, specs), news

        combined, unchanged, news = run(leaves)
        assert bits(combined) == bits(unchanged) == bits(leaves)
        for new in news:
            for kind in specs:
                got = np.asarray(jax.lax.bitcast_convert_type(new[kind], jnp.dtype(f"uint{width}")))
                frozen = np.asarray(stopped[kind]) == 0
                assert 0 < frozen.sum() < frozen.size
                assert np.array_equal(got[frozen], patterns[frozen])

    def test_the_gradient_passes_through(self):
        mask = np.arange(8).reshape(4, 2) % 2 == 0
        specs = [fz.rows([0, 2]), fz.rows(slice(0, None, 2)), mask, fz.elements(mask, compact=True)]
        params = [jnp.ones((4, 2), jnp.bfloat16) for _ in specs]

        def loss(params):
            whole = fz.combine(*fz.partition(params, specs))
            return sum(jnp.sum(w.astype(jnp.float32) ** 2) for w in whole)

        batched = jax.jit(jax.vmap(jax.grad(loss)))([jnp.stack([w, 2 * w]) for w in params])
        for one, two in zip(jax.jit(jax.grad(loss))(params), batched, strict=True):
            assert one.tolist() == jnp.full((4, 2), 2.0).tolist()
            assert two[1].tolist() == jnp.full((4, 2), 4.0).tolist()

    def test_a_dtype_without_a_zero(self):
        w = jnp.ones((2, 2), jnp.float8_e8m0fnu)
        with pytest.raises(ValueError, match=r"no zero cannot be frozen in part\n  at: w"):
            fz.resolve({"w": w}, {"w": fz.rows(0)})
        assert fz.resolve({"w": w}, {"w": True}) == {"w": True}


class TestPartsOfAnotherLeaf:
    def test_are_refused(self):
        params = {"w": jnp.zeros((6, 2))}
        updates, rest = fz.partition(params, {"w": fz.rows(slice(0, 4))})
        for frozen in ({"w": fz.rows(slice(4, 6))}, {"w": np.ones((6, 2), bool)}):
            with pytest.raises(ValueError, match=r"at: w"):
                fz.apply_updates(params, updates, frozen)
        for shape in ((5, 2), (16, 2), (6, 3)):
            with pytest.raises(ValueError, match=r"updates: not the trainable part of the leaf\n  at: w"):
                fz.apply_updates({"w": jnp.zeros(shape)}, updates)
        assert bits(fz.apply_updates(params, updates, {"w": True})) == bits(params)
        for trainable in (fz.partition(params, {"w": fz.rows(slice(2, 6))})[0], params):
            with pytest.raises(ValueError, match=r"trainable: not the trainable part of the leaf\n  at: w"):
                fz.combine(trainable, rest)

    def test_tied_leaves_in_part(self):
        w, mask = jnp.ones((4, 3)), np.zeros((4, 3), bool)
        fz.partition({"x": w, "y": w}, {"x": mask, "y": mask.copy()})
        with pytest.raises(ValueError, match="frozen at one path and trained at another"):
            fz.partition({"x": w, "y": w}, {"x": mask, "y": ~mask})
        with pytest.raises(ValueError, match="frozen at one path and trained at another"):
            fz.partition({"x": w, "y": w}, {"x": fz.rows(0), "y": fz.rows(1)})


class TestReplaceMasks:
    @pytest.mark.parametrize("compact", [False, True])
    def test_moments_of_what_goes_on_training_stay(self, compact):
        old, new = np.array([True, True, False, False, False]), np.array([False, True, True, False, False])
        params = {"a": {"w": jnp.zeros(5)}, "w": jnp.zeros(5)}
        spec = {"a": {"w": fz.elements(old, compact=compact)}, "w": fz.elements(old, compact=compact)}
        tx = fz.freeze(optax.sgd(1.0, momentum=0.5), spec)
        grads = jax.tree.map(lambda p: jnp.arange(1.0, 6.0), params)
        _, state = tx.update(grads, tx.init(params), params)
        replaced = fz.replace_masks(state, tx, params, {"a/w": new})
        zero = jax.tree.map(jnp.zeros_like, params)
        updates, _ = tx.update(zero, replaced, params)
        assert updates["a"]["w"].tolist() == [0.0, 0.0, 0.0, -2.0, -2.5]
        assert updates["w"].tolist() == [0.0, 0.0, -1.5, -2.0, -2.5]
        assert bits(state) == bits(tx.update(grads, tx.init(params), params)[1])

    @pytest.mark.parametrize("inner", [optax.sm3(0.1), optax.adafactor(0.1)], ids=["sm3", "adafactor"])
    def test_state_that_is_no_vector_is_left_alone(self, inner):
        params = {"w": jnp.ones((2, 4)), "m": jnp.ones((4, 4))}
        mask = np.arange(8).reshape(2, 4) < 4
        tx = fz.freeze(inner, {"w": fz.elements(mask, compact=True), "m": False})
        _, state = tx.update(params, tx.init(params), params)
        replaced = fz.replace_masks(state, tx, params, {"w": ~mask})
        chex.assert_trees_all_equal_shapes(replaced, state)
        updates, _ = tx.update(params, replaced, params)
        assert np.signbit(updates["w"][1]).all()

    def test_what_is_refused(self):
        """Other masks that are refused are in ``wrong_calls.md``."""
        tx, params = fz.freeze(optax.sgd(1.0), fz.elements(np.array([True, False]), compact=True)), jnp.ones(2)
        replace = lambda mask: fz.replace_masks(tx.init(params), tx, params, {"": mask})  # noqa: E731
        with pytest.raises(ValueError, match="compact mask, is fixed"):
            jax.jit(replace)(np.array([True, True]))
        with pytest.raises(TypeError, match="takes a boolean array"):
            replace(np.ones(2))

    def test_the_state_has_a_copy_of_its_own(self):
        mask = jnp.asarray(DIAGONAL)
        tx = fz.freeze(optax.sgd(0.1), {"w": mask})
        state = tx.init({"w": jnp.ones((2, 2))})
        step = jax.jit(lambda u, s: tx.update(u, s), donate_argnums=1)
        step({"w": jnp.ones((2, 2))}, state)
        assert mask.tolist() == DIAGONAL.tolist()


class TestPrograms:
    """What is compiled."""

    @pytest.mark.parametrize(
        "mask_of",
        [
            lambda n: jnp.ones((n, 64), bool),
            *(lambda n, index=index: fz.rows(index) for index in (slice(0, 100), [3, 5], slice(0, None, 3))),
            *(lambda n, index=index: ~fz.rows(index) for index in (slice(100, 400), slice(0, None, 3))),
        ],
        ids=["dense", "run", "list", "stride", "others of a run", "others of a stride"],
    )
    def test_the_program_does_not_grow_with_the_rows(self, mask_of):
        sizes = []
        for n in (512, 16384):
            params = {"w": jax.ShapeDtypeStruct((n, 64), jnp.float32)}
            tx = fz.freeze(optax.adamw(0.1), {"w": mask_of(n)})
            state = jax.eval_shape(tx.init, params)
            sizes.append(len(jax.jit(tx.update).lower(params, state, params).as_text()))
        assert sizes[1] < 1.1 * sizes[0]

    @pytest.mark.usefixtures("as_users_compile")
    def test_the_compiler_does_not_search_a_mask_for_what_trains(self):
        """It would take minutes for a million elements, and would leave their numbers in the program."""
        params = {"w": jnp.ones((64, 64))}
        frozen = {"w": fz.elements(np.arange(64**2).reshape(64, 64) % 3 == 0, compact=True)}
        gradient = fz.grad(lambda params: jnp.sum(params["w"] ** 2), frozen)
        step = jax.jit(lambda params: fz.apply_updates(params, gradient(params), frozen))
        program = step.lower(params).compile().as_text()
        numbers = re.findall(r" = [su]\d+\[([\d,]+)\]\S* constant\(", program)
        assert all(np.prod([int(size) for size in shape.split(",")]) < 64 for shape in numbers)


class TestCompactElements:
    def test_of_which_none_train_are_a_frozen_leaf(self):
        params = {"w": jnp.ones(3)}
        frozen = {"w": fz.elements(np.ones(3, bool), compact=True)}
        assert fz.resolve(params, frozen) == {"w": True}
        with pytest.raises(ValueError, match="nothing"):
            fz.grad(lambda p: p["w"].sum(), frozen)(params)

    def test_the_others_of_a_traced_mask_are_counted(self):
        params, mask = {"w": jnp.arange(4.0)}, np.array([True, False, False, False])
        trains = jax.jit(lambda spec: fz.partition(params, ~spec)[0]["w"].values)
        assert bits(trains(fz.rules({"w": fz.elements(mask, compact=True)}))) == bits(jnp.zeros(1))


def test_updates_of_the_trainable_part_without_parameters():
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    trainable, _ = fz.partition(params, {"w": fz.rows([0]), "b": False})
    tx = fz.freeze(optax.sgd(1.0), {"w": fz.rows([0]), "b": False})
    updates, _ = tx.update(trainable, tx.init(trainable))
    assert bits(fz.apply_updates(trainable, updates)) == bits(jax.tree.map(jnp.zeros_like, trainable))
