"""Features on disk have the bits that `before` computed, in any order; those of another run are refused."""

import itertools
import json
import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_equal_up_to_rounding, bits

import optax_freeze as fz
from optax_freeze import features
from optax_freeze.features import _record


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


PARAMETERS = {"encoder": normal(0, 6, 8), "head": normal(1, 8, 2)}


def squared(params, x):
    return jnp.mean((jnp.tanh(x @ params["encoder"]) @ params["head"] - 1) ** 2)


def folded(params, x):
    x, keys = x
    keys = jax.vmap(jax.random.fold_in)(keys, jnp.argmax(x @ params["encoder"], 1))
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, params["head"][0, 0].astype(int))
    return jnp.mean(jax.vmap(jax.random.normal)(keys) * params["head"][0, 1])


def in_two(params, x):
    x = x @ params["encoder"]
    return jnp.sum(x @ params["head"]) + jnp.sum(params["head"][0, 0] * jnp.argsort(x, axis=1)[:, :3])


X = [normal(10, 5, 6), normal(11, 5, 6), normal(12, 2, 6)]
KEYS = [(x, jax.random.split(jax.random.key(i), len(x))) for i, x in enumerate(X)]


def in_float8(params, x):
    return jnp.sum((x @ params["encoder"]).astype(jnp.float8_e4m3fn).astype(jnp.float32) @ params["head"])


LOSSES = {
    "float8": (in_float8, X, 0, ["float8_e4m3fn[8]"]),
    "bool": (lambda p, x: jnp.sum(jnp.where(x @ p["encoder"] > 0, p["head"][:, 0], 0)), X, 0, ["bool[8]"]),
    "one number": (lambda p, x: jnp.sum((x @ p["encoder"]).sum(1) * p["head"][0, 0]), X, 0, ["float32[]"]),
    "two": (in_two, X, 0, ["float32[8]", "float32[3]"]),
    "random keys": (folded, KEYS, 0, ["key<fry>[]"]),
    "another axis": (
        lambda p, x: jnp.sum(p["head"].T @ jnp.tanh(p["encoder"].T @ x)),
        [x.T for x in X],
        1,
        ["float32[8]"],
    ),
    "a blocked axis": (
        lambda p, x: jnp.sum(x.reshape(-1, 6) @ p["encoder"] @ p["head"]),
        [jnp.stack([x, x + 1, x + 2], 1) for x in X],
        0,
        ["float32[3, 8]"],
    ),
}


def precomputed(frozen="encoder", loss=squared):
    return fz.precompute(loss, frozen, example_axis=0)


SQUARED = precomputed()


def write(directory, once=SQUARED, params=PARAMETERS, batches=X, *others, **options):
    features.write(directory, once, params, batches, *others, progress=False, **options)


def of_all(batches, once=SQUARED, params=PARAMETERS):
    """The features of all examples of some batches, computed in memory."""
    before = jax.jit(once.before)
    found = [before(params, batch) for batch in batches]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *found)


@pytest.fixture
def stored(tmp_path):
    """A directory of features."""
    write(tmp_path / "features")
    return tmp_path / "features"


def content(directory):
    """What is in a directory, but for when."""
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_read_is_what_before_computes(name, tmp_path):
    loss, batches, axis, shapes = LOSSES[name]
    once = fz.precompute(loss, "encoder", example_axis=axis)
    write(tmp_path, once, batches=batches)
    stored = features.read(tmp_path, once, PARAMETERS)
    before = jax.jit(once.before)
    expected = of_all(batches, once)
    assert [f"{array.dtype}{list(array.shape[1:])}" for array in expected] == shapes
    assert re.search(re.escape(f"12 examples of {', '.join(shapes)})"), repr(stored))
    assert len(stored) == 12
    assert bits(stored[:]) == bits(expected)
    assert bits(stored[5:10]) == bits(before(PARAMETERS, batches[1]))
    assert jax.tree.structure(stored[5:10]) == jax.tree.structure(before(PARAMETERS, batches[1]))
    for index in (7, -5, np.int64(7), jnp.int32(7)):
        assert bits(stored[index]) == bits(jax.tree.map(lambda array: array[7], expected))
    shuffled = np.random.default_rng(0).permutation(12)
    assert bits(stored[shuffled]) == bits(jax.tree.map(lambda array: array[shuffled], expected))


def test_examples_are_numpy_arrays_in_the_order_of_the_index(stored):
    found = features.read(stored)
    for chosen in (3, [1, 2], slice(2), slice(5, 1)):
        assert isinstance(found[chosen], fz.typing.Features)
        assert all(type(array) is np.ndarray for array in found[chosen])
    whole = found[:][0]
    for chosen in ([3, 3, -1], (0, 11), jnp.array([11, 0]), [], range(4), slice(9, 2, -3), slice(None, None, 5)):
        numbers = chosen if isinstance(chosen, slice) else np.asarray(chosen, int)
        assert bits(found[chosen][0]) == bits(whole[numbers])
    assert bits(jax.tree.map(lambda *arrays: np.stack(arrays), *found)) == bits(found[:])
    order = np.random.default_rng(1).permutation(5)
    assert_equal_up_to_rounding(found[order], jax.device_get(jax.jit(SQUARED.before)(PARAMETERS, X[0][order])))
    needed = SQUARED.needed(PARAMETERS, X[0])
    got = jax.jit(fz.value_and_grad(SQUARED.after, "encoder"))(needed, found[:5], X[0])
    assert_equal_up_to_rounding(got, jax.jit(fz.value_and_grad(squared, "encoder"))(PARAMETERS, X[0]))


def test_rows_functions_and_variables_among_the_parameters(tmp_path):
    params = {"embed": normal(3, 9, 6), "act": jnp.tanh, "none": None, "empty": jnp.zeros((0, 2)), **PARAMETERS}
    frozen = fz.rules({"embed": fz.rows(slice(0, 5)), "encoder": True, "act": True, "empty": True})

    def loss(params, x):
        return jnp.mean(params["act"](x @ params["encoder"]) @ params["head"]) + jnp.sum(params["embed"] ** 2)

    once = fz.precompute(loss, frozen, example_axis=0)
    write(tmp_path, once, params)
    found = features.read(tmp_path, once, params)
    expected = jax.jit(lambda trees, x: once.before({**params, **trees}, x))({"encoder": params["encoder"]}, X[0])
    assert bits(found[:5]) == bits(expected)
    assert bits(once.after(params, found[:5], X[0])) == bits(once.after(params, expected, X[0]))
    other = {**params, "embed": params["embed"].at[0, 0].add(1)}
    with pytest.raises(ValueError, match=r"(?s)the base differs.*at: embed"):
        features.read(tmp_path, once, other)
    features.read(tmp_path, once, {**params, "embed": params["embed"].at[8, 0].add(1)})  # trains


def between(params, x, rate, y, *, scale):
    assert scale == 2.0  # Python may compare a number that recurs
    return jnp.mean(jnp.tanh(x @ params["encoder"] * scale + y) @ params["head"] * rate)


@pytest.mark.parametrize(
    ("recurring", "by_name"), [((1, 3, 4), True), (("x", "y", "scale"), False), (("scale", 3, "x"), True), (None, True)]
)
def test_several_arguments_that_recur_stand_in_their_places(recurring, by_name, tmp_path):
    once = fz.precompute(between, "encoder", recurring, example_axis=0)
    if recurring is None:  # the parameters come third
        at_2 = lambda x, rate, params, y, *, scale: between(params, x, rate, y, scale=scale)  # noqa: E731
        once, by_name = fz.precompute(at_2, "encoder", (0, 3, "scale"), argnums=2, example_axis=0), False
    batches = [(x, x[:, :1], 2.0) for x in X]
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    if by_name:
        write(tmp_path, once, PARAMETERS, batches, rate=rate)
    else:
        write(tmp_path, once, PARAMETERS, batches, rate)
    before = jax.jit(lambda x, y: once.before(PARAMETERS, x, 1.0, y, scale=2.0))
    expected = [before(x, y)[0] for x, y, _ in batches]
    assert bits(features.read(tmp_path)[:][0]) == bits(jnp.concatenate(expected))
    with pytest.raises(ValueError, match=r"(?s)must contain all recurring arguments.*a tuple of 3: x, y, scale"):
        write(tmp_path / "new", once, PARAMETERS, X, rate)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def computed(monkeypatch):
    """The sizes of the batches that are computed and stored."""
    sizes = []
    append = features.Writer.append

    def spied(writer, arrays):
        sizes.append(len(arrays[0]))
        append(writer, arrays)

    monkeypatch.setattr(features.Writer, "append", spied)
    return sizes


def stopping(batches, after):
    yield from batches[:after]
    raise InterruptedError


@pytest.mark.parametrize("sizes", [(1, 5, 1), (700, 301, 2)])
def test_stopped_anywhere_it_goes_on(sizes, tmp_path, computed):
    batches = [normal(i, size, 6) for i, size in enumerate(sizes)]
    for stop in range(len(batches) + 1):
        with pytest.raises(InterruptedError):
            write(tmp_path / "new", batches=stopping(batches, stop))
        with pytest.raises(FileNotFoundError if stop == 0 else ValueError, match=r"not complete|no features"):
            features.read(tmp_path / "new")
    write(tmp_path / "new", batches=iter(batches))
    assert bits(features.read(tmp_path / "new")[:]) == bits(of_all(batches))
    before = content(tmp_path)
    write(tmp_path / "new", batches=batches)
    assert content(tmp_path) == before
    assert computed == list(sizes)


@pytest.mark.parametrize(("at", "torn"), [(2, 0), (3, 1), (4, 30), (5, 10_000), (3, 10_000), (5, 0)])
def test_stopped_between_the_arrays_and_the_record(at, torn, tmp_path, monkeypatch, computed):
    """Or while a line of the record is written, of which a part is there: also all but the line break."""
    calls, line = [], _record.Record.line

    def dying(record, content):
        found = line(record, content)
        calls.append(record)
        if len(calls) == at:
            with (tmp_path / "features.record").open("ab") as file:
                file.write(found[:-1][:torn])
            raise InterruptedError
        return found

    monkeypatch.setattr(_record.Record, "line", dying)
    with pytest.raises(InterruptedError):
        write(tmp_path)
    with pytest.raises(ValueError, match="not complete"):
        features.read(tmp_path)
    write(tmp_path)
    assert bits(features.read(tmp_path)[:]) == bits(of_all(X))
    sizes = [5, 5, 2]
    assert computed == [*sizes[: at - 1], *sizes[at - 2 :]]


def test_what_is_not_in_the_record_may_become_shorter(tmp_path, monkeypatch):
    add = _record.add_batch
    monkeypatch.setattr(_record, "add_batch", lambda *args: add(*args) if args[3] == 5 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(tmp_path)
    monkeypatch.undo()
    batches = [*X[:2], X[2][:1]]
    write(tmp_path, batches=batches)
    assert bits(features.read(tmp_path)[:]) == bits(of_all(batches))


def test_the_record_grows_by_a_line_for_each_batch(tmp_path):
    """And nothing that was written is written again."""
    file, before = tmp_path / "features.record", []

    def batches():
        for x in [*X, X[0]]:
            before.append(file.read_bytes() if file.exists() else b"")
            yield x

    write(tmp_path, batches=batches())
    texts = [*before[2:], file.read_bytes()]  # one batch is computed while the one before it is written
    assert all(new.startswith(old) for old, new in itertools.pairwise(texts))
    assert [text.count(b"\n") for text in texts] == [2, 3, 6]


VIEWS = [[x, x + 1, -x] for x in X]
SEEDS = [[(x, jax.random.split(jax.random.key(seed), len(x))) for seed in range(3)] for x in X]
WITH_VARIANTS = {"two": (in_two, VIEWS), "random keys": (folded, SEEDS)}


@pytest.fixture
def of_views(tmp_path):
    write(tmp_path / "views", batches=VIEWS, variants=3)
    return tmp_path / "views"


@pytest.mark.parametrize("name", WITH_VARIANTS)
def test_one_variant_of_each_example_is_read(name, tmp_path):
    loss, items = WITH_VARIANTS[name]
    once = precomputed(loss=loss)
    write(tmp_path, once, batches=items, variants=3)
    stored = features.read(tmp_path, once, PARAMETERS, seed=1).epoch(4)
    assert (len(stored), stored.variants) == (12, 3)
    assert repr(stored).endswith(", 3 variants each: epoch 4 of seed 1)")
    views = [of_all(batches, once) for batches in zip(*items, strict=True)]
    assert bits(views[0]) != bits(views[1])
    for chosen in (-5, slice(3, 9), slice(5, 1), [4, 4, -1, 2, 3, 0]):
        drawn = stored.drawn(chosen)
        number = np.arange(12)[chosen if isinstance(chosen, (int, slice)) else np.array(chosen, int)]
        expected = jax.tree.map(lambda *arrays, at=(drawn, number): jnp.stack(arrays)[at], *views)
        assert bits(stored[chosen]) == bits(expected)
        assert np.shape(drawn) == np.shape(number)


def test_variants_are_drawn_by_seed_epoch_and_example(of_views):
    stored = features.read(of_views)
    assert stored.drawn(slice(None)).tolist() == [1, 1, 1, 0, 2, 1, 2, 1, 1, 0, 0, 0]  # everywhere
    order = np.random.default_rng(0).permutation(12)
    for epoch, sequence in {0: stored, 2: stored.epoch(3).epoch(2)}.items():
        drawn = sequence.drawn(slice(None))
        again = pickle.loads(pickle.dumps(features.read(of_views, seed=0).epoch(epoch)))
        assert again.drawn(order).tolist() == drawn[order].tolist() == [sequence.drawn(int(i)) for i in order]
        assert bits(again[order]) == bits(jax.tree.map(lambda array: array[order], sequence[:]))
    draws = [features.read(of_views, seed=s).epoch(e).drawn(range(12)) for s in (0, 1) for e in range(50)]
    assert len({drawn.tobytes() for drawn in draws}) == 100
    np.testing.assert_allclose(np.bincount(np.concatenate(draws)), 400, atol=60)  # 3.7 standard deviations


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint64"])
def test_numbers_of_few_bits_name_the_same_examples(dtype, tmp_path):
    x = jnp.arange(300.0)[:, None] * jnp.ones(6)
    write(tmp_path, batches=[[x + 1000 * i for i in range(3)]], variants=3)
    found, numbers = features.read(tmp_path), [0, 99, 100, 127]
    expected = bits(found[numbers])
    for integers in (
        np.array(numbers, dtype),
        list(np.array(numbers, dtype)),
        jnp.array(numbers, jax.dtypes.canonicalize_dtype(dtype)),
    ):
        assert bits(found[integers]) == expected
        assert bits(found[integers[1]]) == bits(found[99])
        assert found.drawn(integers).tolist() == found.drawn(numbers).tolist()
    if dtype.startswith("int"):
        assert bits(found[np.array([-1, -128], dtype)]) == bits(found[[299, 172]])
    assert bits(found[[np.uint64(3), -1]]) == bits(found[[3, 299]])
    for wrong in (2**70, [0, 2**64], np.uint64(2**64 - 1)):
        with pytest.raises(IndexError, match=r"there is no example (1844|1180)"):
            found[wrong]


def test_one_variant_is_always_drawn(stored):
    found = features.read(stored, seed=5)
    assert found.variants == 1
    assert bits(found.epoch(7)[3:]) == bits(found[3:])
    assert found.drawn([3, 4]).tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"(?s)`number` must be a non-negative int.*got: -1"):
        found.epoch(-1)
    with pytest.raises(TypeError, match=r"(?s)`seed` must be a non-negative int.*got: 0.5"):
        features.read(stored, seed=0.5)


def test_variants_that_were_stopped_go_on(tmp_path, computed):
    for stop in range(4):
        with pytest.raises(InterruptedError):
            write(tmp_path, batches=stopping(VIEWS, stop), variants=3)
    before = content(tmp_path)
    for items, variants, message in (
        (X, 1, "different number of variants.*at: variants.*got: 1.*expected: 3"),
        ([VIEWS[0], [VIEWS[1][0], VIEWS[1][2], VIEWS[1][1]]], 3, "a batch differs.*at: batch 2 of 2"),
        ([VIEWS[0], [*VIEWS[1][:2], X[1] + 2]], 3, "a batch differs.*at: batch 2 of 2"),
    ):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            write(tmp_path, batches=items, variants=variants)
        assert content(tmp_path) == before
    write(tmp_path, batches=VIEWS, variants=3)
    assert computed == [15, 15, 6]
    views = jnp.stack([of_all(batches)[0] for batches in zip(*VIEWS, strict=True)])
    stored = features.read(tmp_path, SQUARED, PARAMETERS)
    assert stored[:][0].tobytes() == views[stored.drawn(slice(None)), np.arange(12)].tobytes()


def cubed(params, x):
    return jnp.mean((jnp.sin(x @ params["encoder"]) @ params["head"] - 1) ** 3)


MASK = np.arange(16).reshape(8, 2) % 3 == 0
MASKED = precomputed({"encoder": True, "head": MASK})
ONE_ROW = precomputed({"encoder": True, "head": fz.rows([0])})
OTHERS = {  # than SQUARED, PARAMETERS and X
    "base": ({"params": {**PARAMETERS, "encoder": PARAMETERS["encoder"].at[0, 0].set(7)}}, "base differs.*at: encoder"),
    "spec": ({"once": precomputed(["encoder", "head"])}, "the spec differs.*at: head.*is frozen.*trains"),
    "rows": ({"once": ONE_ROW}, "the spec differs.*at: head.*trains in rows 1:8 of 8 .*leaf that trains\n"),
    "program": ({"once": precomputed(loss=cubed)}, "another program.*at: batch 1"),
    "parameters": ({"params": {**PARAMETERS, "head": normal(1, 8, 3)}}, r"leaf differs.*at: head.*\[8, 3\].*\[8, 2\]"),
    "examples": ({"batches": [X[0], X[1][:, None]]}, "another program.*at: batch 2.*arguments of the same shapes"),
    "names": ({"params": {**PARAMETERS, "tail": jnp.ones(1)}}, "different tree structure.*tail"),
    "values": ({"batches": [X[0], X[1].at[4, 5].add(1), X[2]]}, "a batch differs.*at: batch 2 of 3"),
    "order": ({"batches": [X[1], X[0], X[2]]}, "a batch differs.*at: batch 1 of 3"),
    "dtype": ({"batches": [X[0], X[1], X[2].astype(jnp.bfloat16)]}, "at: batch 3"),
    "size": ({"batches": [X[0], jnp.concatenate(X[1:])]}, "a batch differs.*at: batch 2"),
    "fewer": ({"batches": X[:2]}, "fewer batches.*got: 2 batches.*the 3 that are stored"),
    "none": ({"batches": []}, "fewer batches.*got: 0 batches"),
    "more": ({"batches": [*X, X[0]]}, "more batches than are stored.*batch 4.*3 batches"),
}


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_nothing_goes_behind_features_of_something_else(name, complete, tmp_path):
    other, message = OTHERS[name]
    if complete or name == "more":
        write(tmp_path)
    else:
        with pytest.raises(InterruptedError):
            write(tmp_path, batches=stopping([*X, X[0], X[0]], 4))
    before = content(tmp_path)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        write(tmp_path, **other)
    assert content(tmp_path) == before


def test_reading_says_whether_they_are_of_these_parameters(stored, tmp_path):
    for name in ("base", "spec", "rows", "parameters", "names"):
        other, message = OTHERS[name]
        with pytest.raises(ValueError, match=f"(?s){message}"):
            features.read(stored, **{"once": SQUARED, "params": PARAMETERS, **other})
        assert len(features.read(stored, other.get("once"))) == 12
    write(tmp_path / "masked", MASKED)
    with pytest.raises(ValueError, match=r"(?s)the base differs.*at: head"):
        features.read(tmp_path / "masked", precomputed({"encoder": True, "head": ~MASK}), PARAMETERS)


SAME_ROWS = [fz.rows(slice(0, 2)), fz.rows([1, 0]), ~fz.rows(slice(2, None)), fz.rows([-8, -7], axis=-2)]


def test_the_same_rows_however_they_are_named(tmp_path):
    def of(rows):
        return precomputed({"encoder": True, "head": rows})

    write(tmp_path, of(SAME_ROWS[1]))
    before = content(tmp_path)
    for rows in SAME_ROWS:
        assert len(features.read(tmp_path, of(rows), PARAMETERS)) == 12
        write(tmp_path, of(rows))
    assert content(tmp_path) == before
    with pytest.raises(ValueError, match=r"(?s)trains in rows 0:1, 3:8 of 8 .*trains in rows 2:8 of 8 along axis 0"):
        features.read(tmp_path, of(fz.rows([1, 2])), PARAMETERS)


def test_trainable_parameters_may_differ(stored):
    for head in (PARAMETERS["head"] + 1, jax.ShapeDtypeStruct((8, 2), jnp.float32)):
        params = {**PARAMETERS, "head": head}
        assert len(features.read(stored, SQUARED, params)) == 12
        write(stored, params=params)


def test_a_loader_may_reuse_its_memory(tmp_path):
    def loss(params, x):
        for _ in range(8):
            x = jnp.tanh(x @ params["encoder"])
        return jnp.mean(x @ params["head"])

    params = {"encoder": normal(0, 800, 800), "head": normal(1, 800, 2)}
    once, batches = precomputed(loss=loss), [np.asarray(normal(i, 400, 800)) for i in range(2)]

    def loaded():
        memory = np.empty(400 * 800 + 16, np.float32)
        memory = memory[-memory.ctypes.data % 64 // 4 :][: 400 * 800].reshape(400, 800)  # JAX reads it in place
        for batch in batches:
            memory[:] = batch
            yield memory
        memory[:] = 0

    write(tmp_path, once, params, loaded())
    assert bits(features.read(tmp_path)[:]) == bits(of_all(batches, once, params))


def labelled(params, x, labels, key, *, weights):
    h = jnp.tanh(x @ params["encoder"]) @ params["head"] + jax.random.normal(key, (2,))
    return jnp.mean(h[jnp.arange(len(h)), labels] * weights[labels])


@pytest.mark.parametrize("sizes", [(5, 5, 2), (2, 1, 3)])
def test_labels_fit_batches_of_any_size(sizes, tmp_path):
    """Of two examples, the key and the weights of two classes have as many entries, and keep them."""
    batches = [normal(i, size, 6) for i, size in enumerate(sizes)]
    labels, key, weights = jnp.zeros(sizes[0], int), jax.random.PRNGKey(0), jnp.ones(2)
    of_labels = precomputed(loss=labelled)
    write(tmp_path, of_labels, PARAMETERS, batches, labels, key, weights=weights)
    found = features.read(tmp_path, of_labels, PARAMETERS)[:]
    assert bits(found) == bits(of_all(batches))
    whole = jnp.concatenate(batches), jnp.zeros(len(found[0]), int), key
    assert jax.eval_shape(of_labels.after, PARAMETERS, found, *whole, weights=weights).shape == ()


def of_five(params, x, labels):
    return jnp.mean(jnp.tanh(x @ params["encoder"]).reshape(5, 8) @ params["head"]) + jnp.mean(labels)


def test_batches_that_do_not_fit(tmp_path):
    """What is stored stays, and is continued by the batches that do."""
    once, labels = precomputed(loss=of_five), jnp.ones(5)
    for directory, batches, message in (
        ("empty", [X[0][:0]], "(?s)a batch has no examples.*at: batch 1"),
        ("fit", [*X[:2], X[2][:0]], "(?s)a batch has no examples.*at: batch 3"),
        ("fit", X, r"(?s)other arguments do not fit.*at: batch 3.*2 examples, and 5 in batch 1: .*reshape.*recurring"),
    ):
        with pytest.raises(ValueError, match=message):
            write(tmp_path / directory, once, PARAMETERS, batches, labels)
    assert not (tmp_path / "empty").exists()
    write(tmp_path / "fit", once, PARAMETERS, X[:2], labels)
    assert len(features.read(tmp_path / "fit")) == 10


def test_batches_of_dicts(tmp_path):
    of_dicts = precomputed(loss=lambda params, batch: squared(params, batch["x"]) * jnp.mean(batch["y"]))
    write(tmp_path, of_dicts, batches=[{"y": x[:, 0], "x": x, "name": "digits"} for x in X])
    assert bits(features.read(tmp_path)[:]) == bits(of_all(X))


def test_wrong_arguments(tmp_path, stored):
    """Those in ``wrong_calls.md`` are not repeated here."""
    new = tmp_path / "new"
    for call, error, message in (
        (lambda: features.read(stored, fz.precompute(squared, "encoder")), ValueError, "of whole batches"),
        (lambda: write(new, batches=[]), ValueError, "there are no batches"),
        (lambda: write(new, batches={"x": X[0]}), TypeError, "(?s)not an iterable of batches.*a dict of 1 leaf"),
        (lambda: features.read(stored, SQUARED, SQUARED.needed(PARAMETERS, X[0])), ValueError, "full parameters"),
        (lambda: features.read(SQUARED), TypeError, "the first argument"),
        (lambda: features.read(new), FileNotFoundError, "(?s)there are no features.*no such directory"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert not new.exists()
    (tmp_path / "file").write_text("")
    for call in (write, features.read):
        for path, got in ((tmp_path / "file", "a file"), ("gs://bucket/features", "an address")):
            with pytest.raises(ValueError, match=rf"(?s)not a directory.*got: {got}"):
                call(path)
    new.mkdir()
    (new / "notes").write_text("mine")
    with pytest.raises(ValueError, match="other files"):
        write(new)
    assert content(new) == {str(new / "notes"): b"mine"}


def rewritten(pattern, change):
    """Damage to one file of a directory: a function of its content."""

    def damage(directory):
        file = next(path for path in directory.rglob(pattern) if path.is_file())
        file.write_bytes(change(file.read_bytes()))

    return damage


def edited(at=0, **fields):
    """A record with other fields in one of its lines, or without those that are None, and with right checksums."""

    def change(content):
        texts = [json.loads(line[:-9]) for line in content.splitlines()]
        texts[at] = {k: v for k, v in (texts[at] | fields).items() if v is not None}
        record = _record.Record([], "", [])
        return b"".join(map(record.line, texts))

    return rewritten("features.record", change)


def flipped(content):
    """One bit after the header."""
    return content[:128] + bytes([content[128] ^ 1]) + content[129:]


SHAPE = {"shape": [9], "dtype": "float32", "weak": False}
DAMAGES = {
    "a truncated record": (rewritten("features.record", lambda text: text[:99]), "features.record: line 1"),
    "an empty record": (rewritten("features.record", lambda _: b""), "features.record.*an empty file"),
    "no JSON object": (rewritten("features.record", lambda _: _record.Record([], "", []).line([])), "the whole file"),
    "a line that is lost": (
        rewritten("features.record", lambda text: re.sub(b"\n.*\n", b"\n", text, count=1)),
        "line 2",
    ),
    "a flipped bit in the record": (rewritten("features.record", lambda text: text.replace(b"5", b"4", 1)), "line 1"),
    **{f"no {name}": (edited(**{name: None}), name) for name in ("cut", "features", "format", "leaves")},
    **{f"no {name}": (edited(2, **{name: None}), name) for name in ("batch", "examples")},
    "a shape that is none": (edited(features=[{**SHAPE, "shape": [-1]}]), "features.*-1"),
    "a dtype that is none": (edited(features=[{**SHAPE, "dtype": "float31"}]), "features.*float31"),
    "another shape": (edited(features=[SHAPE]), r"/0.npy\n.*float32\[12, 8\].*float32\[12, 9\]"),
    "another dtype": (edited(features=[{**SHAPE, "shape": [8], "dtype": "int32"}]), r"/0.npy\n.*float32.*int32"),
    "no number of variants": (edited(variants=None), "features.record: variants"),
    "zero variants": (edited(variants=0), "features.record: variants.*0.*1 or more"),
    "more variants": (edited(variants=2), r"uint32\[12\].*uint32\[24\]"),
    "fewer examples": (edited(3, examples=11), r"uint32\[12\].*uint32\[11\]"),
    "more examples": (edited(3, examples=13), r"uint32\[12\].*uint32\[13\]"),
    "no array": (lambda path: (path / "0.npy").unlink(), r"/0.npy\n.*no such file"),
    "no checksums": (lambda path: (path / "checksums.npy").unlink(), r"/checksums.npy\n.*no such file"),
    "a truncated header": (rewritten("0.npy", lambda data: data[:99]), r"/0.npy\n"),
    "a truncated array": (rewritten("0.npy", lambda data: data[:-1]), r"/0.npy\n.*511 bytes.*512 bytes"),
    "a longer array": (rewritten("0.npy", lambda data: data + b"0"), r"/0.npy\n.*513 bytes.*512 bytes"),
    "a flipped bit": (rewritten("0.npy", flipped), "entry 0 with another checksum"),
    "a flipped bit of a checksum": (rewritten("checksums.npy", flipped), "entry 0 with another checksum"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_features_are_not_read(name, stored):
    damage, message = DAMAGES[name]
    damage(stored)
    with pytest.raises(ValueError, match=f"(?s)the features are damaged.*{message}"):
        features.read(stored)[0]


def test_a_newer_format(stored):
    edited(format=2)(stored)
    for call in (features.read, write):
        with pytest.raises(ValueError, match=r"(?s)newer optax_freeze.*format 2"):
            call(stored)


@pytest.mark.parametrize("left", [0, 200, 128 + 7 * 32])
def test_what_a_loss_of_power_took_is_computed_again(left, tmp_path, computed):
    with pytest.raises(InterruptedError):
        write(tmp_path, batches=stopping(X, 3))
    os.truncate(tmp_path / "0.npy", left)
    write(tmp_path)
    assert bits(features.read(tmp_path)[:]) == bits(of_all(X))
    assert computed[2:] == ([5, 5, 2] if left < 128 + 5 * 32 else [5, 2])


def test_beyond_the_end(stored):
    found = features.read(stored)
    for index in (12, -13, [0, 12], np.array([-13])):
        with pytest.raises(IndexError, match=r"there is no example -?1[23]: 12 are stored"):
            found[index]
    assert found[12:][0].shape == (0, 8)
    assert found[8:99][0].shape == (4, 8)
    assert len(list(found)) == 12
    for index in ("0", 1.0, [0.5], np.ones(12, bool), np.zeros((2, 2), int), None):
        with pytest.raises(TypeError, match="index does not select examples"):
            found[index]


def test_it_is_pickled_without_what_it_opened_and_read_by_threads(stored):
    found = features.read(stored)
    expected, data = found[:], pickle.dumps(found)
    assert len(data) < 2000
    again = pickle.loads(data)
    assert len(again) == 12
    assert again._reader is None
    numbers = np.random.default_rng(0).integers(0, 12, (200, 3))
    with ThreadPoolExecutor(8) as threads:
        for chosen, [array] in zip(numbers, threads.map(again.__getitem__, numbers), strict=True):
            assert array.tobytes() == expected[0][chosen].tobytes()
    assert jax.tree.structure(again[0]) == jax.tree.structure(found[0])
    assert bits(pickle.loads(pickle.dumps(again))[:]) == bits(expected)


def test_an_array_of_several_processes_is_refused(tmp_path, monkeypatch):
    for spread, says in (((5, 6), "at: a batch.*its own directory"), ((5, 8), "at: the features")):
        is_here = property(lambda array, spread=spread: array.shape != spread)
        monkeypatch.setattr(type(X[0]), "is_fully_addressable", is_here)
        with pytest.raises(ValueError, match=f"(?s)several processes.*{says}"):
            write(tmp_path)


def test_progress_goes_to_stderr(tmp_path, capsys):
    features.write(tmp_path / "loud", SQUARED, PARAMETERS, X)
    write(tmp_path / "quiet")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("3/3") == 1
    assert re.search(r"batches/s.*examples/s", printed.err)


@pytest.mark.parametrize("width", [8, 2**15])
def test_the_files_are_those_of_numpy(width, tmp_path):
    """Large examples are read one by one, and small ones many at once."""
    params = {"encoder": normal(0, 6, width), "head": normal(1, width, 2)}
    write(tmp_path, params=params)
    expected, found = of_all(X, params=params), features.read(tmp_path)
    assert bits(np.load(tmp_path / "0.npy")) == bits(expected[0])
    assert bits(found[3:9]) == bits(jax.tree.map(lambda array: array[3:9], expected))
    rewritten("0.npy", flipped)(tmp_path)
    for index in (0, slice(0, 3), [4, 0]):
        with pytest.raises(ValueError, match="entry 0 with another checksum"):
            found[index]
    assert bits(found[1:]) == bits(jax.tree.map(lambda array: array[1:], expected))


def test_parameters_without_axes_and_without_elements(tmp_path):
    params = {**PARAMETERS, "scale": jnp.float32(2), "none": jnp.ones((0, 6))}

    def loss(params, x):
        h = jnp.tanh(x @ params["encoder"]) * params["scale"]
        empty = jnp.zeros((*h.shape[:-1], len(params["none"])))
        return jnp.mean(jnp.sort(jnp.concatenate([h, empty], -1)) @ params["head"])

    once, x = precomputed(fz.all_except("head"), loss), jnp.ones((2, 6))
    for _ in range(2):
        write(tmp_path, once, params, [x])
    stored = features.read(tmp_path, once, params)[:]
    assert_equal_up_to_rounding(jax.jit(once.after)(once.needed(params, x), stored, x), jax.jit(loss)(params, x))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_numpy_arrays_of_64_bits(tmp_path, dtype):
    params, x = jax.tree.map(lambda array: np.asarray(array, dtype), (PARAMETERS, X[0]))
    write(tmp_path, params=params, batches=[x])
    found = features.read(tmp_path, SQUARED, params)[:]
    assert_equal_up_to_rounding(found, jax.jit(SQUARED.before)(PARAMETERS, X[0]))
    grads = jax.jit(fz.grad(SQUARED.after, "encoder"))(params, SQUARED.before(params, x), x)
    assert_equal_up_to_rounding(grads["head"], jax.grad(squared)(PARAMETERS, X[0])["head"])


def test_one_writer_at_a_time(tmp_path):
    """By whatever path; the lock is in the directory, since its parent may be read-only."""
    here, link = tmp_path / "here", tmp_path / "link"
    here.mkdir()
    link.symlink_to(here)

    def batches():
        yield X[0]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link"]
        for path in (here, link, f"{tmp_path}/link/../here/", os.path.relpath(link)):
            with pytest.raises(ValueError, match="another process or thread is writing to this directory"):
                write(path)
        yield X[1]

    write(link, batches=batches())
    assert len(features.read(here)) == 10
    assert not (here / ".lock").exists()
