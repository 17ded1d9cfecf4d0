"""Resolution: every form of a spec on every kind of tree, and what it refuses."""

import collections
import dataclasses
import fnmatch
import functools
import re
from typing import Any, NamedTuple

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import optax_freeze as fz
from optax_freeze import linen
from optax_freeze import nnx as fnnx
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.resolve import make_plan


class Pair(NamedTuple):
    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    value: Any


@pytest.fixture
def other():
    return {"encoder": {"kernel": jnp.ones(2), "bias": jnp.zeros(2)}, "head": jnp.ones(2)}


class TestForms:
    def test_bools_and_prefix_trees(self, other):
        assert fz.resolve(other, True) == {"encoder": {"kernel": True, "bias": True}, "head": True}
        assert fz.resolve(other, np.False_) == {"encoder": {"kernel": False, "bias": False}, "head": False}
        expected = {"encoder": {"kernel": True, "bias": True}, "head": False}
        assert fz.resolve(other, {"encoder": True, "head": False}) == fz.resolve(other, expected) == expected

    @pytest.mark.parametrize("of", [np.array, jnp.array, np.bool_])
    def test_boolean_scalars_are_bools(self, other, of):
        expected = fz.resolve(other, {"encoder": True, "head": False})
        assert fz.resolve(other, {"encoder": of(True), "head": of(False)}) == expected
        assert fz.resolve(other, fz.rules({"encoder": of(True)}, default=of(False))) == expected
        assert fz.resolve(other, lambda shapes: {"encoder": of(True), "head": of(False)}) == expected
        assert fz.resolve(other, of(True)) == fz.resolve(other, True)
        jax.jit(functools.partial(fz.partition, frozen={"encoder": of(True), "head": False}))(other)

    @pytest.mark.parametrize("of", [np.array, jnp.array])
    def test_the_boolean_scalar_of_a_scalar_leaf_is_a_mask_that_may_change(self, of):
        params = {"scale": jnp.float32(1), "w": jnp.ones(2)}
        tx = fz.freeze(optax.sgd(1.0), {"scale": of(True), "w": of(False)})
        state = tx.init(params)
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        assert (float(updates["scale"]), updates["w"].tolist()) == (0, [-1, -1])
        state = jax.jit(lambda frozen: fz.replace_masks(state, tx, params, {"scale": frozen}))(False)
        assert float(tx.update(jax.tree.map(jnp.ones_like, params), state, params)[0]["scale"]) == -1

    @pytest.mark.parametrize("a", [dict, flax.core.FrozenDict, collections.OrderedDict])
    @pytest.mark.parametrize("b", [dict, flax.core.FrozenDict])
    def test_mappings_of_the_same_keys_are_the_same_structure(self, a, b):
        params = a(z=a(kernel=jnp.ones(2), bias=jnp.ones(1)), layers=[a(k=jnp.ones(3)), a()])
        answers = fz.resolve(params, b(layers=[b(k=True), b()], z=b(bias=False, kernel=True)))
        assert jax.tree.structure(answers) == jax.tree.structure(params)
        kernel, bias = answers["z"]["kernel"], answers["z"]["bias"]
        assert (kernel, bias, answers["layers"][0]["k"]) == (True, False, True)
        assert jax.tree.leaves(fz.resolve(params, b(z=True, layers=[False, True]))["z"]) == [True, True]
        with pytest.raises(ValueError, match=r"does not fit(.|\n)*at: layers"):
            fz.resolve(params, b(z=True))

    def test_callable_sees_shapes_alone(self, other):
        def spec(shapes):
            assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
            return jax.tree.map(lambda leaf: leaf.shape == (2,), shapes)

        assert fz.resolve(other, spec) == fz.resolve(other, True)
        assert fz.resolve(other, lambda shapes: {"encoder": True, "head": False})["encoder"]["bias"] is True
        assert fz.resolve(jnp.ones(2), lambda shapes: jax.tree.map(lambda leaf: leaf.ndim == 1, shapes)) is True
        assert fz.resolve(other, lambda shapes: fz.path("encoder")) == fz.resolve(other, "encoder")

    def test_shape_structs_are_enough_and_a_trace(self, other):
        assert fz.resolve(jax.eval_shape(lambda: other), "encoder") == fz.resolve(other, "encoder")
        traced = jax.jit(lambda params: jnp.array(jax.tree.leaves(fz.resolve(params, "encoder"))))
        assert traced(other).tolist() == [True, True, False]


ONE = jnp.ones(1)


class TestTrees:
    """The paths of containers; more are in ``test_what_people_bring.py``."""

    @pytest.mark.parametrize(
        ("tree", "pattern", "expected"),
        [
            ([ONE, (ONE, ONE)], "1/0", [False, True, False]),
            ([ONE, ONE], [True, False], [True, False]),
            (Layer(ONE, ONE), "value", [False, True]),  # a dataclass keeps a field called value
            (collections.OrderedDict(b=ONE, a=ONE), "b", [True, False]),
            ({"a": ONE, "b": None}, "a", [True]),
            ({}, "encoder", []),
            ({"a": None}, fz.rules({"encoder": True}), []),
        ],
    )
    def test_containers(self, tree, pattern, expected):
        answers = fz.resolve(tree, pattern)
        assert jax.tree.structure(answers) == jax.tree.structure(tree)
        assert jax.tree.leaves(answers) == expected

    def test_two_leaves_with_one_path_and_keys_that_do_not_sort(self):
        with pytest.raises(ValueError, match=r"same path\n  at: 1\n  got: \[1\] and \['1'\]\n"):
            fz.resolve(collections.OrderedDict([(1, jnp.ones(1)), ("1", jnp.ones(1)), ("a/b", jnp.ones(1))]), True)
        params = {"a": [{1: jnp.ones(1), "b": jnp.ones(1)}], "c": jnp.ones(1)}
        for use in (fz.resolve, fz.partition, fz.summary, lambda params, _: _tree.flatten(params)):
            with pytest.raises(ValueError, match=r"do not sort\n  at: a/0\n  got: \[1, 'b'\]\n"):
                use(params, "c")
        with pytest.raises(TypeError, match=r"got: a dict whose keys do not sort\n"):
            fz.path(params)
        with pytest.raises(ValueError, match=r"the keys of a dict do not sort(.|\n)*got: \[1, 'a'\]"):
            fz.resolve({"a": jnp.ones(2)}, {1: True, "a": False})

    def test_an_error_of_a_container_of_the_user_s_is_passed_on(self):
        class Broken:
            """Cannot be taken apart."""

        def flatten(_):
            raise ValueError("it is broken")

        jax.tree_util.register_pytree_node(Broken, flatten, lambda *_: Broken())
        with pytest.raises(ValueError, match="it is broken"):
            fz.resolve({"a": [Broken()]}, "a")

    def test_a_masked_node_is_a_frozen_leaf_with_its_path(self):
        tree = {"a": optax.MaskedNode(), "b": jnp.ones(1), "c": jnp.ones(1)}
        assert fz.resolve(tree, ["a", "c"]) == {"a": True, "b": False, "c": True}
        assert fz.resolve(tree, False) == {"a": True, "b": False, "c": False}
        assert fz.resolve(tree, fz.where(lambda path, leaf: path == "b")) == {"a": True, "b": True, "c": False}
        assert fz.resolve(tree, lambda shapes: jax.tree.map(lambda leaf: False, shapes))["a"] is True


STRINGS_AND_FIELDS = (np.array([None, "x"]), np.array(["x"]), np.zeros(2, [("a", np.float32)]))


class TestWhatCannotTrain:
    def test_is_frozen_whatever_the_spec(self):
        arrays = (jnp.arange(2), np.int8(1), jnp.array(True), jax.random.key(0), *STRINGS_AND_FIELDS)
        for leaf in (*arrays, jax.ShapeDtypeStruct((2,), jnp.uint32), jnp.tanh, "name", 3, True):
            assert fz.resolve({"a": leaf, "b": jnp.ones(1)}, False) == {"a": True, "b": False}

    def test_floating_and_complex_train(self):
        for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "float4_e2m1fn"):
            assert fz.resolve({"a": jax.ShapeDtypeStruct((1,), dtype)}, False) == {"a": False}
            assert fz.resolve({"a": np.ones(1, jnp.dtype(dtype))}, False) == {"a": False}


class TestRefusals:
    @pytest.mark.parametrize(
        ("spec", "error"),
        [
            (Pair(True, False), "does not fit"),
            ({"encoder": None, "head": True}, "at: encoder/"),
            ({"encoder": {"kernel": True, "bias": {"deep": True}}, "head": True}, "at: encoder/bias"),
            ({"encoder": True, "head": optax.MaskedNode()}, "where a bool is expected"),
            ({"encoder": True, "head": 0.5}, r"where a bool is expected\n  at: head"),
            ([], "to freeze nothing"),
        ],
        ids=repr,
    )
    def test_a_tree_of_the_wrong_structure(self, other, spec, error):
        """Without the error of JAX, which has the values of all arrays."""
        with pytest.raises(ValueError, match=error) as caught:
            fz.resolve(other, spec)
        assert caught.value.__context__ is None

    def test_a_callable_that_returns_one_bool(self, other):
        spec = lambda params: True  # noqa: E731
        for use in (
            *(lambda answer=answer: fz.resolve(other, lambda _: answer) for answer in (np.False_, jnp.array(True))),
            lambda: fz.resolve(other, functools.partial(bool)),  # whose signature Python does not know
            lambda: fz.labels(spec)(other),
            lambda: fnnx.freeze(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), spec),
            lambda: linen.Frozen(nn.Dense(1), spec).init(jax.random.key(0), jnp.ones((1, 1))),
        ):
            with pytest.raises(TypeError, match=r"got: (True|False), one bool for the whole tree\n(.|\n)*fz\.where\("):
                use()

    @pytest.mark.parametrize(
        ("function", "got"),
        [
            (lambda path: bool(re.match("encoder", path)), "expected string"),
            (lambda path: fnmatch.fnmatch(path, "encoder*"), "expected str"),
            (lambda leaf: leaf.ndim == 1, "'ndim'"),
            (lambda: True, "different arguments"),
            (functools.partial(lambda prefix, path: path.startswith(prefix), "encoder"), "'startswith'"),
        ],
    )
    def test_a_callable_of_paths_or_leaves(self, other, function, got):
        with pytest.raises(TypeError, match=rf"not a function of the tree(.|\n)*{got}(.|\n)*fz\.where\("):
            fz.resolve(other, function)

    def test_a_callable_that_mistypes_a_name_is_not_taken_for_one_of_leaves(self):
        with pytest.raises(TypeError, match=r"failed on shapes: .*'encodr'"):
            fz.resolve(Layer(jnp.ones(1), jnp.ones(1)), lambda module: module.encodr)


def nothing_or_all(path, leaf):
    return leaf.ndim == 7


USES = {
    "partition": lambda params, spec: fz.partition(params, spec),
    "freeze": lambda params, spec: fz.freeze(optax.sgd(1.0), spec).init(params),
    "under jit": lambda params, spec: jax.jit(fz.freeze(optax.sgd(1.0), spec).init)(params),
}


@flax.struct.dataclass
class Body:
    enc: Any
    head: Any


class TestMappingsForOtherContainers:
    @pytest.mark.parametrize("make", [Body, Pair, lambda *layers: [*layers]])
    def test_the_error_says_what_to_write(self, make):
        params = make({"k[0]": jnp.ones(2), "b": jnp.ones(2)}, jnp.ones(2))
        [_, _, last] = paths = _tree.paths(params)
        spec = {last.partition("/")[0]: False, paths[0].partition("/")[0]: {"k[0]": fz.rows(0), "b": True}}
        for above, tree, frozen in (("", params, spec), ("m/", {"m": params}, {"m": spec})):
            with pytest.raises(ValueError, match="does not fit") as caught:
                fz.resolve(tree, frozen)
            fix = str(caught.value).partition("fix: name the leaves by their paths: ")[2]
            found = make_plan(tree, eval(fix, {"fz": fz}))
            assert [leaf.path for leaf in found.leaves] == [above + path for path in paths]
            assert found.selections[0].is_frozen
            assert found.selections[1].count == 1
        with pytest.raises(ValueError, match=r"by their paths: fz.rules\(\{'\w+': \.\.\., '\w+': \.\.\.\}\)"):
            fz.resolve(params, {key: np.ones(2, bool) for key in spec})

    @pytest.mark.parametrize("container", [flax.core.freeze, nnx.State])
    def test_labels_and_masks_of_an_optimizer(self, container):
        params, groups = container({"a": jnp.ones(2), "b": jnp.ones(2)}), {"a": "slow", "b": "fast"}
        transforms = {"slow": optax.sgd(0.1), "fast": optax.sgd(0.2)}
        mask = {"a": True, "b": False}
        for wrap in (lambda tx: fz.freeze(tx, "b"), lambda tx: fz.freeze_when(tx, {"b": False})):
            for tx in (optax.multi_transform(transforms, groups), optax.masked(optax.sgd(0.1), mask)):
                with pytest.raises(ValueError, match="different types") as caught:
                    wrap(tx).init(params)
                assert "fz.labels_by_path({path: label})" in caught.value.__notes__[0]
            labelled = optax.multi_transform(transforms, fz.labels_by_path(groups))
            for tx in (labelled, optax.masked(optax.sgd(0.1), lambda params: fz.resolve(params, mask))):
                updates, _ = wrap(tx).update(params, wrap(tx).init(params), params)
                assert updates["a"][0] == -0.1


PROOFS = {
    "assert_frozen": lambda params, spec: fz.assert_frozen(params, params, spec),
    "fingerprint": lambda params, spec: fz.fingerprint(params, spec),
    "audit": lambda params, spec: fz.audit(params, spec, fz.freeze(optax.sgd(1.0), True), steps=1),
    "audit_step": lambda params, spec: fz.audit_step(lambda state: state, [params], params="0", frozen=spec, steps=1),
}


class TestFreezeWarning:
    @pytest.mark.parametrize(
        ("spec", "extent", "uses"),
        [
            (fz.where(nothing_or_all), "nothing", USES),
            (~fz.where(nothing_or_all), "everything", ["partition"]),
            ("**", "everything", ["partition"]),
            (fz.path("encoder") & "head", "nothing", ["partition"]),
            ("steps", "nothing", ["partition"]),
            (fz.rules({"encoder": np.True_}, default=True), "everything", ["partition"]),
            (lambda params: jax.tree.map(lambda leaf: False, params), "nothing", ["partition"]),
            (fz.rules({"encoder": fz.rows(slice(None)), "head": True}), "everything", ["partition"]),
        ],
    )
    def test_a_spec_that_freezes_nothing_or_everything(self, other, spec, extent, uses):
        params = {**other, "steps": jnp.int32(0)}
        told = rf"freezes {extent}\n(.|\n)*{3 if extent == 'everything' else 0} of 3 leaves are frozen"
        for name in uses:
            with pytest.warns(fz.FreezeWarning, match=told) as caught:
                USES[name](params, spec)
            assert len(caught) == 1
            assert name == "under jit" or caught[0].filename == __file__

    @pytest.mark.parametrize(
        "spec",
        [
            *(True, False, np.True_, np.array(False), {"encoder": False, "head": False}, "encoder"),
            {"encoder": True, "head": np.True_},
            {"encoder": True, "head": fz.rows(slice(None))},
            fz.rules({"head": fz.rows(0)}),
            fz.rules({"head": np.ones(2, bool)}, default=True),
        ],
    )
    def test_what_is_meant(self, other, spec):
        for use in USES.values():
            use(other, spec)

    def test_trees_with_masked_nodes_and_what_cannot_train_are_not_judged(self, other):
        trainable, rest = fz.partition(other, "encoder")
        for spec in ("encoder", fz.where(nothing_or_all), fz.all_except("encoder")):
            fz.freeze(optax.sgd(1.0), spec).init(trainable)
            fz.partition(rest, spec)
        fz.freeze(optax.sgd(1.0), "**").init(fz.partition(other, fz.rules({"head": fz.rows(0)}))[0])
        fz.partition({"a": jnp.arange(3)}, "a")
        fz.freeze(optax.sgd(1.0), "a").init({})

    def test_where_nothing_is_trained_there_is_none(self, other):
        for spec in ("**", fz.where(nothing_or_all)):
            for use in (fz.resolve, fz.summary, lambda params, spec: fz.labels(spec)(params)):
                use(other, spec)
        for proof in ("assert_frozen", "fingerprint"):
            PROOFS[proof](other, "**")

    @pytest.mark.parametrize("proof", ["assert_frozen", "fingerprint", "audit", "audit_step"])
    def test_a_proof_of_nothing(self, other, proof):
        params = {**other, "steps": jnp.int32(0)}
        all_false = lambda params: jax.tree.map(lambda leaf: False, params)  # noqa: E731
        for spec in (fz.where(nothing_or_all), fz.path("encoder") & "head", all_false):
            with pytest.warns(
                fz.FreezeWarning, match=r"freezes nothing\n(.|\n)*: 0 of 3 leaves are frozen\n"
            ) as caught:
                PROOFS[proof](params, spec)
            assert [each.filename for each in caught] == [__file__]
        with pytest.warns(fz.FreezeWarning):
            state = fz.freeze(optax.sgd(1.0), fz.where(nothing_or_all)).init(params)
        whole = {"encoder": False, "head": False, "steps": True}
        for spec in (False, whole, fz.spec_of(state), "encoder", "steps", fz.rules({"head": fz.rows(0)})):
            PROOFS[proof](params, spec)

    def test_a_proof_of_no_variable(self):
        model = nnx.Sequential(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.BatchNorm(1, rngs=nnx.Rngs(0)))
        for proof in ("fingerprint", "audit_step"):
            with pytest.warns(fz.FreezeWarning, match="at least one frozen leaf"):
                PROOFS[proof](model, nnx.LoRAParam)
            PROOFS[proof](model, nnx.PathContains("kernel"))

    def test_the_spec_of_a_state_is_told_once(self, other):
        tx = fz.freeze(optax.sgd(1.0), fz.where(nothing_or_all))
        with pytest.warns(fz.FreezeWarning):
            state = tx.init(other)
        tx.update(other, state, other)
        fz.partition(other, fz.spec_of(state))


class TestTied:
    def test_conflict(self):
        shared = jnp.ones(2)
        params = {"embed": shared, "head": shared, "other": jnp.ones(2)}
        freeze = lambda *args, **kw: fz.freeze(optax.sgd(1.0), *args, **kw)  # noqa: E731
        ways = (
            fz.partition,
            lambda params, *args, **kw: freeze(*args, **kw).init(params),
            lambda params, *args, **kw: fz.state_shardings(freeze(*args, **kw), params),
        )
        for make in ways:
            with pytest.raises(ValueError, match=r"at: embed\n  got: frozen at this path, but trained .* at head"):
                make(params, "embed")
            make(params, "embed", tied="ignore")
            make(params, ["embed", "head"])
            with pytest.raises(ValueError, match="unknown choice"):
                make(params, "other", tied="no")

    def test_tracers_shapes_and_integers_are_not_tied(self):
        for free in (jax.ShapeDtypeStruct((2,), jnp.float32), jnp.arange(2)):
            fz.partition({"a": free, "b": free}, "a")
        jax.jit(lambda x: fz.partition({"a": x, "b": x}, "a"))(jnp.ones(2))


class Keyed:
    """A node whose keys are of no type that JAX knows."""

    def __init__(self, child):
        self.child = child


class Unkeyed(Keyed):
    """A node without keys."""


jax.tree_util.register_pytree_with_keys(Keyed, lambda node: ([(("odd", 1), node.child)], None), lambda _, c: Keyed(*c))
jax.tree_util.register_pytree_node(Unkeyed, lambda node: ((node.child,), None), lambda _, c: Unkeyed(*c))


@pytest.mark.parametrize(
    "tree",
    [
        np.zeros(1),
        {"a": [np.zeros(1), (np.zeros(1), Keyed(np.zeros(1)))], "b/c": {}},
        {3: Pair(Unkeyed(np.zeros(1)), np.zeros(1)), 10: Keyed({"x": np.zeros(1)})},
    ],
    ids=["a leaf", "strings", "numbers"],
)
def test_paths_are_those_of_jax(tree):
    keys = [key for key, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert _tree.paths(tree) == [jax.tree_util.keystr(key, simple=True, separator="/") for key in keys]
