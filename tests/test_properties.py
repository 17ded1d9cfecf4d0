"""Properties that hold for any tree and any spec, tested on random ones with a fixed seed."""

import operator
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import optax_freeze as fz
from optax_freeze._spec import tree as _tree

bounded = settings(
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SHAPES = [(2, 3), (3,), (), (2, 3), (3,), (0, 3)]  # few, for XLA compiles each operation once for each
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float32, jnp.float16, jnp.bfloat16, jnp.int32, jnp.bool_]
MASKS = (type(fz.rows(0)), type(fz.elements(np.ones(1, bool))))


class Pair(typing.NamedTuple):
    """A container whose paths are names."""

    left: typing.Any
    right: typing.Any


@st.composite
def arrays(draw):
    """An array of any bits: NaN payloads, denormals and zeros of both signs among them."""
    shape, dtype = draw(st.sampled_from(SHAPES)), np.dtype(draw(st.sampled_from(DTYPES)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


NAMES = st.sampled_from(["a", "b", "kernel", "layer_0", "layer_1"])


def containers(children):
    return st.one_of(
        st.dictionaries(NAMES, children, min_size=1, max_size=3),
        st.lists(children, min_size=1, max_size=3),
        st.tuples(children, children),
        st.builds(Pair, children, children),
    )


trees = st.dictionaries(
    NAMES, st.recursive(arrays() | arrays() | st.none(), containers, max_leaves=4), min_size=2, max_size=3
)


@st.composite
def patterns(draw, params):
    """A glob that matches a leaf: its path or a beginning of it, some segments replaced."""
    segments = draw(st.sampled_from(_tree.paths(params))).split("/")
    segments = segments[: draw(st.integers(1, len(segments)))]
    pattern = "/".join(
        draw(st.sampled_from([segment, "*", segment[:1] + "*", "?" * len(segment)])) for segment in segments
    )
    return draw(st.sampled_from([pattern, "**/" + pattern, pattern + "/**"])) if pattern else pattern


def selectors(params):
    """Selectors of all kinds, without element masks."""
    globs = st.lists(patterns(params), min_size=1, max_size=2)
    functions = [
        lambda path, leaf: leaf.ndim == 1,
        lambda path, leaf: leaf.dtype == "float32",
        lambda path, leaf: "a" in path,
    ]
    simple = st.one_of(
        globs.map(lambda found: fz.path(*found)),
        globs.map(lambda found: fz.all_except(*found)),
        st.sampled_from(_tree.paths(params)).map(lambda path: fz.regex(path[: len(path) // 2] + ".*")),
        st.sampled_from(functions).map(fz.where),
    )

    pairs = (operator.or_, operator.and_)
    compound = lambda inner: st.one_of(*(st.builds(pair, inner, inner) for pair in pairs), inner.map(operator.invert))  # noqa: E731
    return st.recursive(simple, compound, max_leaves=4)


@st.composite
def choices(draw, leaf):
    """What may be said of one leaf: a bool, rows, elements, a boolean array."""
    kinds = ["array", "elements", "compact", "bool"] + ["rows", "rows"] * (leaf.ndim > 0 and 0 not in leaf.shape)
    kind = draw(st.sampled_from(kinds))
    if kind == "bool" or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return draw(st.booleans())
    if kind == "rows":
        axis = draw(st.integers(-leaf.ndim, leaf.ndim - 1))
        index = draw(st.sampled_from([0, [0, -1], slice(1, None), slice(None, None, 2), []]))
        rows = fz.rows(index, axis, allow_empty=True)
        return draw(st.sampled_from([rows, ~rows]))
    mask = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 2, leaf.shape).astype(bool)
    return {"array": mask, "elements": fz.elements(mask), "compact": ~fz.elements(mask, compact=True)}[kind]


@st.composite
def prefixes(draw, params):
    """A tree of choices, some of which stand for a whole subtree."""
    if params is None:
        return None
    if isinstance(params, np.ndarray):
        return draw(choices(params))
    if draw(st.integers(0, 9)) == 9:
        return draw(st.booleans())
    if isinstance(params, dict):
        return {key: draw(prefixes(child)) for key, child in params.items()}
    children = [draw(prefixes(child)) for child in params]
    return Pair(*children) if isinstance(params, Pair) else type(params)(children)


@st.composite
def ruled(draw, params):
    """Rules with element masks: leaves by their whole paths, then some selectors."""
    leaves = dict(zip(_tree.paths(params), jax.tree.leaves(params), strict=True))
    named = draw(st.lists(st.sampled_from(list(leaves)), unique=True, min_size=1, max_size=3))
    rules = {fz.regex(path): draw(choices(leaves[path])) for path in named}
    if len(named) < len(leaves) and draw(st.booleans()):
        rules[fz.regex(".*")] = draw(st.booleans())
    return fz.rules(rules, default=draw(st.booleans()))


@st.composite
def cases(draw, specs=None):
    """A tree and a spec for it, in any form."""
    params = draw(trees)
    if draw(st.booleans()):
        params = jax.tree.map(jnp.asarray, params)
    host = jax.tree.map(np.asarray, params)
    assume(_tree.paths(host))
    masked = st.one_of(ruled(host), ruled(host).map(operator.invert))
    forms = st.one_of(
        prefixes(host),
        patterns(host),
        st.lists(patterns(host), min_size=1, max_size=2),
        selectors(host),
        masked,
        st.builds(operator.and_, masked, selectors(host)),
        st.booleans(),
        prefixes(host).filter(lambda tree: not isinstance(tree, bool)).map(lambda tree: lambda shapes: tree),
        st.just(lambda shapes: jax.tree.map(lambda leaf: leaf.ndim > 1, shapes)),
    )
    return params, draw(forms if specs is None else specs(host))


def frozen_elements(params, frozen):
    """For each leaf by its path, where it is frozen, as a NumPy array; read off ``fz.resolve``."""
    answers = jax.tree.leaves(fz.resolve(params, frozen), is_leaf=lambda node: isinstance(node, MASKS))
    return {
        path: where(answer, np.shape(leaf))
        for path, answer, leaf in zip(_tree.paths(params), answers, jax.tree.leaves(params), strict=True)
    }


def where(answer, shape):
    if isinstance(answer, bool):
        return np.full(shape, answer)
    if isinstance(answer, MASKS[1]):
        return np.asarray(answer.array)
    hit = np.zeros(shape[answer.axis], bool)
    hit[answer.index if isinstance(answer.index, slice) else np.asarray(answer.index, int)] = True
    column = [1] * len(shape)
    column[answer.axis] = -1
    return np.broadcast_to((hit ^ answer.inverted).reshape(column), shape)


def said(params, frozen):
    """What is frozen in a form that can be compared; or that two masks met, which is an error whichever way round."""
    try:
        return [(path, mask.tobytes()) for path, mask in frozen_elements(params, frozen).items()]
    except ValueError as error:
        assert "two element masks for one leaf" in str(error)  # noqa: PT017
        return None


def raw(array):
    return np.asarray(array).tobytes()


def flipped(leaf, at):
    """A leaf with the lowest bit of some elements flipped."""
    if leaf.dtype == np.bool_:
        return leaf ^ at
    unsigned = np.dtype(f"uint{leaf.dtype.itemsize * 8}")
    return (leaf.view(unsigned) ^ at.astype(unsigned)).view(leaf.dtype)


class TestOneAnswer:
    """Every function agrees with ``resolve``, element by element."""

    @given(cases(prefixes))
    @bounded
    def test_a_tree_means_what_it_says(self, case):
        params, frozen = case
        choices = jax.tree.broadcast(frozen, params, is_leaf=lambda node: isinstance(node, MASKS))
        choices = jax.tree.leaves(choices, is_leaf=lambda node: isinstance(node, MASKS))
        for (path, mask), choice, leaf in zip(
            frozen_elements(params, frozen).items(), choices, jax.tree.leaves(params), strict=True
        ):
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                expected = choice if isinstance(choice, np.ndarray) else where(choice, leaf.shape)
                assert (mask == expected).all(), path

    @given(cases())
    @bounded
    def test_labels_partition_combine_and_summary(self, case):
        params, frozen = case
        is_leaf = lambda node: isinstance(node, (optax.MaskedNode, fz.Part))  # noqa: E731
        trainable, rest = fz.partition(params, frozen)
        whole, masks = fz.combine(trainable, rest), frozen_elements(params, frozen)
        assert jax.tree.structure(whole) == jax.tree.structure(params)
        assert bits(whole) == bits(params)
        counted = {row.path: row.frozen_elements for row in fz.summary(params, frozen).rows}
        assert counted == {path: mask.sum() for path, mask in masks.items()}
        parts, labels = jax.tree.leaves(trainable, is_leaf=is_leaf), jax.tree.leaves(fz.labels(frozen)(params))
        answers = jax.tree.leaves(fz.resolve(params, frozen), is_leaf=lambda node: isinstance(node, MASKS))
        each = zip(labels, parts, answers, jax.tree.leaves(params), masks.values(), strict=True)
        for label, part, answer, leaf, mask in each:
            assert (label == "frozen") == (answer is True) == isinstance(part, optax.MaskedNode)
            leaf = np.asarray(leaf)
            assert jnp.issubdtype(leaf.dtype, jnp.inexact) or mask.all()
            if isinstance(part, fz.Part):
                assert raw(part.values) == leaf[~mask].tobytes()
            elif label == "trainable":
                assert raw(part) == np.where(mask, np.zeros((), leaf.dtype), leaf).tobytes()

    @given(cases())
    @bounded
    def test_freeze(self, case):
        params, frozen = case
        masks = jax.tree.unflatten(jax.tree.structure(params), frozen_elements(params, frozen).values())

        def gradient(leaf, mask):
            is_inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
            return jnp.asarray(np.where(mask, np.nan, 1.0) if is_inexact else np.ones(leaf.shape), leaf.dtype)

        grads = jax.tree.map(gradient, params, masks)
        tx = fz.freeze(optax.sgd(1.0), frozen)
        updates, _ = tx.update(grads, tx.init(params), params)
        moved = fz.apply_updates(params, updates, frozen)
        for leaf, update, new, mask in zip(*map(jax.tree.leaves, (params, updates, moved, masks)), strict=True):
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                assert raw(update) == np.where(mask, -0.0, -1.0).astype(leaf.dtype).tobytes()
            else:
                assert not np.any(update)
            assert raw(np.asarray(new)[mask]) == raw(np.asarray(leaf)[mask])

    @given(cases(), st.integers(0, 99))
    @bounded
    def test_fingerprint_and_assert_frozen(self, case, seed):
        params, frozen = case
        params = jax.tree.map(np.asarray, params)
        masks = jax.tree.unflatten(jax.tree.structure(params), frozen_elements(params, frozen).values())
        digest = fz.fingerprint(params, frozen)
        trained = jax.tree.map(lambda leaf, mask: flipped(leaf, ~mask), params, masks)
        assert (fz.fingerprint(trained, frozen) == digest).all()
        fz.assert_frozen(params, trained, frozen)
        numbers = [np.flatnonzero(mask) for mask in jax.tree.leaves(masks)]
        total = sum(map(len, numbers))
        assert total or not digest.any()
        if total:
            one = [np.zeros(mask.shape, bool) for mask in jax.tree.leaves(masks)]
            places = [(i, number) for i, found in enumerate(numbers) for number in found]
            i, number = places[seed % total]
            one[i].flat[number] = True
            moved = jax.tree.map(flipped, params, jax.tree.unflatten(jax.tree.structure(params), one))
            assert (fz.fingerprint(moved, frozen) != digest).all()
            with pytest.raises(AssertionError, match=r"1 of \d+ frozen leaves changed\n.*: 1 of \d+ elements"):
                fz.assert_frozen(params, moved, frozen)


class TestAlgebra:
    @given(cases(lambda params: st.tuples(selectors(params) | ruled(params), selectors(params) | ruled(params))))
    @bounded
    def test_de_morgan(self, case):
        params, (a, b) = case
        assert said(params, ~(a | b)) == said(params, ~a & ~b)
        assert said(params, ~(a & b)) == said(params, ~a | ~b)
        assert said(params, ~~a) == said(params, a)
        assert ~~~a == ~a

    @given(cases(lambda params: st.tuples(selectors(params), selectors(params))))
    @bounded
    def test_or_and_and(self, case):
        params, (a, b) = case
        left, right = frozen_elements(params, a), frozen_elements(params, b)
        both, either = frozen_elements(params, a & b), frozen_elements(params, a | b)
        for path in left:
            assert (both[path] == (left[path] & right[path])).all()
            assert (either[path] == (left[path] | right[path])).all()
