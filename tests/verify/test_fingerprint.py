"""Comparing what is frozen bit by bit, and its digest."""

import contextlib
import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze import checkpoint
from optax_freeze._spec.selection import FROZEN
from optax_freeze._verify import bits as _bits

DTYPES = [
    *("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64"),
    *("int32", "int8", "uint8", "uint32", "int4", "bool"),
]


WORDS = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2**31, 2**16, 0x3F800000, 2**32 - 1]))


@contextlib.contextmanager
def _parts_of(size, patch):
    """Arrays of this many elements are large."""
    patch.setattr(_bits, "_LARGE", size)
    jax.clear_caches()
    yield
    jax.clear_caches()


def same(a, b):
    """Whether two digests agree, or a stack of digests and one."""
    return (np.asarray(a) == np.asarray(b)).all(axis=-1)


def leaf_of(dtype, shape=(3, 2)):
    """A leaf of awkward numbers: zeros of both signs, NaNs, infinities."""
    numbers = np.resize(np.array([0.0, -0.0, np.nan, 1.5, -2.0, np.inf], np.float32), shape)
    if dtype == "bool" or "int" in dtype:
        numbers = np.resize(np.array([0, 1, 5, 7, 2, 3]), shape)
    return np.asarray(numbers.astype(jnp.dtype(dtype)))


def flips(leaf):
    """The leaf with each single bit of each element flipped, and the number of that element."""
    size = leaf.dtype.itemsize * 8
    width = {"int4": 4, "bool": 1}.get(str(leaf.dtype), size)
    raw = np.tile(leaf.reshape(-1, 1).view(np.uint8), (leaf.size * width, 1, 1))
    at = np.repeat(np.arange(leaf.size), width)
    bit = np.tile(np.arange(width), leaf.size)
    raw[np.arange(len(at)), at, bit // 8] ^= (1 << (bit % 8)).astype(np.uint8)
    if str(leaf.dtype) == "int4":  # NumPy keeps it in a byte with the sign spread out
        raw = ((raw ^ 8) & 15) - np.uint8(8)
    return raw.view(leaf.dtype).reshape(-1, *leaf.shape), at


MASK = np.array([[True, False], [False, False], [True, True]])
MASKS = {
    "all": (True, np.ones((3, 2), bool)),
    "rows": (fz.rows([0, 2]), np.array([[True, True], [False, False], [True, True]])),
    "dynamic": (fz.rows(jnp.array([2, 0])), np.array([[True, True], [False, False], [True, True]])),
    "columns": (fz.rows(slice(1, None), axis=1), np.array([[False, True]] * 3)),
    "elements": (fz.elements(MASK), MASK),
    "compact": (fz.elements(MASK, compact=True), MASK),
}
IN_PART = [*(("float32", mask) for mask in MASKS if mask != "all"), ("complex64", "rows")]


def communicated(compiled):
    """The sizes of the arrays that a compiled program exchanges between devices."""
    lines = re.findall(r"= (.*?) (?:all-|collective-|reduce-scatter|ragged-all)[\w-]*\(", compiled.as_text())
    shapes = [shape for line in lines for shape in re.findall(r"\[([\d,]*)\]", line)]
    return [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]


class TestFingerprint:
    @pytest.mark.parametrize(("dtype", "mask"), [*((dtype, "all") for dtype in DTYPES), *IN_PART])
    def test_a_flipped_bit_changes_every_lane_if_and_only_if_it_is_frozen(self, dtype, mask):
        leaf, (frozen, where) = leaf_of(dtype), MASKS[mask]
        changed, at = flips(leaf)
        assert len({row.tobytes() for row in changed} | {leaf.tobytes()}) == len(changed) + 1
        digests = jax.jit(jax.vmap(lambda w: fz.fingerprint({"w": w}, {"w": frozen})))(changed)
        unchanged = np.asarray(digests == fz.fingerprint({"w": leaf}, {"w": frozen}))
        assert (unchanged == ~where.reshape(-1)[at][:, None]).all()

    def test_every_flipped_bit_of_a_key(self):
        data = np.array(jax.random.key_data(jax.random.split(jax.random.key(3), 2)))
        changed, _ = flips(data)
        digests = jax.jit(jax.vmap(lambda d: fz.fingerprint(jax.random.wrap_key_data(d), False)))(changed)
        assert (digests != fz.fingerprint(jax.random.wrap_key_data(data), False)).all()

    @pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64, np.complex128])
    @pytest.mark.parametrize("x64", [True, False])
    def test_64_bits_of_numpy_are_those_of_the_array_that_jax_makes_of_them(self, dtype, x64):
        with jax.enable_x64(x64):
            leaf = np.array([2.0**40 + 1 / 3, 3]).astype(dtype)
            digest = lambda w: fz.fingerprint({"w": w}, True)  # noqa: E731
            assert same(digest(leaf), digest(jnp.asarray(leaf)))
            assert same(digest(leaf), jax.jit(digest)(leaf))
            changed, _ = flips(leaf)
            digests = np.stack([digest(w) for w in changed])
            assert not x64 or (digests != digest(leaf)).all()

    def test_a_frozen_numpy_array_that_a_jitted_step_converts(self, tmp_path):
        wide = {"w": np.ones(3) / 3, "n": np.array([2**40]), "few": np.arange(2), "head": np.ones(2, np.float32)}
        narrow = jax.tree.map(jnp.asarray, wide)
        tx = fz.freeze(optax.sgd(0.1), "w")
        told = r"NumPy array will not stay(.|\n)*at: n\n +w\n.*2 leaves of int64, float64\n(.|\n)*jnp\.asarray"
        for each in (tx, fz.freeze_when(optax.sgd(0.1), {"w": True})):
            with pytest.warns(fz.FreezeWarning, match=told):
                each.init(wide)
        fz.freeze(optax.sgd(0.1), "few").init({"w": wide["w"], "few": wide["few"]})  # it trains
        step = jax.jit(lambda params, state: fz.update_params(tx, params, state, params)[0])
        new = step(wide, tx.init(narrow))
        checkpoint.save(tmp_path / "narrow", new, "w", step=0)
        fix = r"fix: params = jax\.tree\.map\(jnp\.asarray, params\) before training"
        with pytest.raises(AssertionError, match=fix):
            fz.assert_frozen(wide, new, "w")
        with pytest.raises(ValueError, match=fix):
            checkpoint.restore(tmp_path / "narrow", wide)
        fz.assert_frozen(narrow, new, "w")
        checkpoint.restore(tmp_path / "narrow", narrow)
        checkpoint.save(tmp_path / "wide", wide, "w", step=0)
        with pytest.raises(ValueError, match="fix: give the NumPy arrays"):
            checkpoint.restore(tmp_path / "wide", narrow)
        checkpoint.restore(tmp_path / "wide", wide)

    def test_eager_and_jitted_and_in_64_bit_mode(self, awkward, odd_bits):
        for tree in (awkward, odd_bits):
            for frozen in ("frozen", False):
                digest = fz.fingerprint(tree, frozen)
                assert same(jax.jit(lambda p, frozen=frozen: fz.fingerprint(p, frozen))(tree), digest)
            digest = fz.fingerprint(tree, "frozen")
            with jax.enable_x64(True):
                assert same(fz.fingerprint(tree, "frozen"), digest)

    def test_is_four_words_that_never_change(self):
        params = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [jnp.bfloat16(1.5), None, 2.0]}
        digest = fz.fingerprint(params, True)
        assert (digest.shape, digest.dtype) == ((4,), jnp.uint32)
        assert [f"{word:08x}" for word in digest.tolist()] == GOLDEN  # checkpoints hold such digests

    def test_places_paths_dtypes_and_shapes_count(self):
        w = np.arange(6, dtype=np.float32).reshape(2, 3)
        zeros = np.zeros(4, np.float32)
        others = [{"a": w + 1, "b": w}, {"a": w, "c": w + 1}]
        forms = [w, w[::-1], w[:, ::-1], w.reshape(3, 2), w.ravel(), w[:, :, None], w.view("int32"), w.view("uint32")]
        more = [zeros, zeros[:3], zeros.view(np.uint32), zeros.view(jnp.bfloat16)]
        trees = others + [{"a": a, "b": w + 1} for a in forms] + [{"a": w, "b": w + 1, "z": z} for z in more]
        digests = [tuple(fz.fingerprint(tree, True).tolist()) for tree in trees]
        assert all(len(set(lane)) == len(trees) for lane in zip(*digests, strict=True))

    def test_random_changes_of_many_elements_are_seen_in_every_lane(self):
        rng = np.random.default_rng(0)
        words = np.tile(rng.integers(0, 4, (4, 5), np.uint32), (20_000, 1, 1))  # many equal ones, and small
        for row in words[1:]:
            row[...] = rng.permuted(row)
        unique = len({row.tobytes() for row in words})
        digests = np.asarray(jax.jit(jax.vmap(lambda w: fz.fingerprint(w, True)))(words))
        assert all(abs(len(set(lane.tolist())) - unique) <= 1 for lane in digests.T)
        assert len({row.tobytes() for row in digests}) == unique

    @settings(derandomize=True, deadline=None)
    @given(old=WORDS, new=WORDS, at=st.tuples(st.integers(0, 1), st.integers(0, 2)))
    def test_any_change_within_32_bits_changes_every_lane(self, old, new, at):
        before = np.full((2, 3), old, np.uint32)
        after = before.copy()
        after[at] = new
        differ = np.asarray(fz.fingerprint(before, True)) != np.asarray(fz.fingerprint(after, True))
        assert differ.tolist() == [old != new] * 4

    def test_two_changes_that_cancel_in_one_lane_do_not_cancel_in_another(self):
        """Of 2**35 pairs of numbers whose signs flip, about 2**10 have the same sum before and after in a lane."""
        numbers = np.unique(np.random.default_rng(0).random(2**18, np.float32) + 1)[:, None]
        digest = jax.jit(jax.vmap(lambda w: fz.fingerprint(w, True)))
        changes = np.asarray(digest(-numbers) - digest(numbers))
        for lane in range(4):
            change, opposite = changes[:, lane], -changes[:, lane]
            cancel = np.flatnonzero(np.isin(change, opposite))
            assert len(cancel) < 2**11
            same = change[cancel][:, None] == opposite[cancel]
            others = (changes[cancel][:, None] == -changes[cancel][None]) & same[..., None]
            assert (others.sum(axis=(0, 1)) > 0).tolist() == [other == lane for other in range(4)]

    @pytest.mark.parametrize("shape", [(2**11,), (6, 7, 11), (2, 2000), (1, 19)])
    def test_the_same_in_parts(self, shape, monkeypatch):
        """Large arrays are summed part by part, which the cores of a CPU share."""
        w = {"w": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
        moved = {"w": w["w"].copy()}
        moved["w"].flat[-1] += 1
        specs = [True, {"w": w["w"] > 0}, *([{"w": fz.rows([0, shape[0] // 2 + 1])}] if shape[0] > 2 else [])]
        found = [[jax.jit(lambda w, spec=spec: fz.fingerprint(w, spec))(w) for spec in specs]]
        with monkeypatch.context() as patch, _parts_of(16, patch):
            found.append([jax.jit(lambda w, spec=spec: fz.fingerprint(w, spec))(w) for spec in specs])
            fz.assert_frozen(w, w, True)
            with pytest.raises(AssertionError, match=f"w: 1 of {w['w'].size:,} elements"):
                fz.assert_frozen(w, moved, True)
            text = jax.jit(lambda w: fz.fingerprint(w, True)).lower(w).compile().as_text()
            assert (re.search(r"u32\[\d+\]\S*, u32\[\d+\]\S*, ", text) is None) == (shape[0] == 1)
        assert same(*found).all()

    def test_one_set_of_elements_however_it_is_said(self):
        w = {"w": leaf_of("float32")}
        _, where = MASKS["rows"]
        said = [
            fz.rows([0, 2]),
            ~fz.rows(1),
            fz.rows(slice(None, None, 2)),
            jnp.asarray(where),
            ~fz.rows(jnp.array([1])),
        ]
        said += [fz.elements(where, compact=compact) for compact in (False, True)]
        assert same([fz.fingerprint(w, {"w": mask}) for mask in said], fz.fingerprint(w, {"w": said[0]})).all()
        assert same(fz.fingerprint(w, {"w": np.ones((3, 2), bool)}), fz.fingerprint(w, True))
        others = [fz.fingerprint(w, {"w": fz.rows(i)}).tolist() for i in range(3)]
        assert len({*map(tuple, others), tuple(fz.fingerprint(w, {"w": said[0]}).tolist())}) == 4

    def test_masks_as_arguments_of_a_jitted_function(self):
        w = {"w": leaf_of("float32")}
        jitted = jax.jit(lambda p, mask: fz.fingerprint(p, {"w": fz.elements(mask)}))
        assert same(jitted(w, MASK), fz.fingerprint(w, {"w": MASK}))
        assert not same(jitted(w, ~MASK), fz.fingerprint(w, {"w": MASK}))
        of_rows = jax.jit(lambda p, index: fz.fingerprint(p, {"w": fz.rows(index)}))
        assert same(of_rows(w, jnp.array([2, 0])), fz.fingerprint(w, {"w": fz.rows([0, 2])}))

    def test_nothing_frozen(self, params):
        nothing = {"empty": jnp.zeros((0, 3)), "masked": optax.MaskedNode()}
        assert not jax.jit(lambda p: fz.fingerprint(p, False))(params).any()
        assert not (fz.fingerprint({}, True) | fz.fingerprint(nothing, True)).any()

    @pytest.mark.parametrize("frozen", ["encoder", {"encoder": fz.rows(slice(1, 3)), "head": True}])
    def test_rest_has_the_fingerprint_of_the_whole(self, frozen):
        params = {"encoder": jnp.arange(8.0).reshape(4, 2), "head": jnp.ones(3)}
        _, rest = fz.partition(params, frozen)
        digest = fz.fingerprint(params, frozen)
        assert same(jax.jit(lambda p: fz.fingerprint(p, True))(rest), digest)
        assert same(fz.fingerprint(rest, frozen), digest)

    def test_objects(self):
        def digest(value, path="f"):
            return tuple(fz.fingerprint({path: value}, True).tolist())

        model = eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))
        assert same(fz.fingerprint(model, False), fz.fingerprint(eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(1)), False))
        assert digest(jnp.tanh) == digest(jnp.tanh) != digest(jnp.sin)
        assert digest(jnp.tanh) != digest(jnp.tanh, "g")
        assert digest(object()) == digest(object())
        numbers = [1.0, 1, True, 2.0, 0.0, -0.0, float("nan"), "1.0", b"1.0", 1.0 + 0j]
        assert len({digest(number) for number in numbers}) == len(numbers)

    @pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
    def test_the_same_under_any_sharding(self, axis_type):
        params = {"w": jax.random.normal(jax.random.key(0), (16, 8, 6)), "b": jnp.arange(24, dtype=jnp.bfloat16)}
        frozen = {"w": fz.rows(slice(3, 9)), "b": np.arange(24) % 3 == 0}
        expected, in_part = fz.fingerprint(params, True), fz.fingerprint(params, frozen)
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
        for w, b in [(P("y", "x"), P(("x", "y"))), (P(None, "x", "y"), P())]:
            placed = jax.device_put(params, {"w": NamedSharding(mesh, w), "b": NamedSharding(mesh, b)})
            assert same(fz.fingerprint(placed, frozen), in_part)
            assert same(jax.jit(lambda p: fz.fingerprint(p, True))(placed), expected)

    def test_leaves_and_masks_on_different_devices_and_on_the_host(self):
        devices = jax.devices()
        params = {"a": jnp.ones(4), "b": jnp.arange(16.0)}
        sharding = NamedSharding(Mesh(devices[::-1], "x"), P("x"))
        mask = jax.device_put(jnp.arange(16) % 3 == 0, devices[3])
        frozen = {"a": True, "b": mask}
        expected = fz.fingerprint(params, {"a": True, "b": np.asarray(mask)})
        for place in (sharding, sharding.with_memory_kind("pinned_host")):
            placed = {"a": jax.device_put(params["a"], devices[1]), "b": jax.device_put(params["b"], place)}
            assert same(fz.fingerprint(placed, frozen), expected)

    def test_only_digests_and_counts_are_communicated(self):
        sharding = NamedSharding(jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2), P("x", "y"))
        w = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharding)
        masks = fz.rows(slice(3, 50)), fz.elements(np.zeros((64, 32), bool))
        programs = [jax.jit(lambda w, mask=mask: fz.fingerprint(w, mask)).lower(w) for mask in masks]
        for program in (*programs, _bits.count.lower(w, w, FROZEN)):
            assert 0 < max(communicated(program.compile())) <= 8  # one word from each device

    @pytest.mark.parametrize(
        ("dtype", "mask"), [("float32", "rows"), ("bfloat16", "all"), ("float8_e4m3fn", "rows"), ("complex64", "all")]
    )
    def test_reads_the_data_once(self, dtype, mask):
        w = jax.ShapeDtypeStruct((32, 256, 512), jnp.dtype(dtype))
        frozen = True if mask == "all" else fz.rows(slice(5, 200), axis=1)
        compiled = jax.jit(lambda w: fz.fingerprint(w, frozen)).lower(w).compile()
        nbytes = w.size * w.dtype.itemsize
        assert compiled.cost_analysis()["bytes accessed"] <= 1.05 * nbytes
        assert compiled.memory_analysis().temp_size_in_bytes <= 0.01 * nbytes

    def test_leaves_of_one_kind_are_one_program(self):
        before = _bits.digest._cache_size()
        fz.fingerprint([jnp.full((5, 7), i) for i in range(20)], True)
        assert _bits.digest._cache_size() == before + 1

    def test_only_frozen_leaves_are_read(self, params, frozen):
        jax.tree.map(lambda p: p.delete(), params["encoder"]["layer_1"])
        with pytest.raises(ValueError, match=r"params: the array has been deleted\n  at: encoder/layer_1/bias"):
            fz.fingerprint(params, frozen)
        assert fz.fingerprint(params, "head").any()


GOLDEN = ["c17337f5", "f646c2df", "7a83f5dd", "448e703f"]


class TestAssertFrozen:
    def test_passes_where_nothing_frozen_moved(self, awkward, odd_bits):
        for tree in (awkward, odd_bits):
            copy = jax.tree.map(jnp.copy, tree)
            assert fz.assert_frozen(tree, copy, "frozen") is None
            fz.assert_frozen(tree, {**copy, "trains": jnp.zeros(2)}, "frozen")
            fz.assert_frozen(tree, tree, True)

    @pytest.mark.parametrize(("dtype", "mask"), [("bfloat16", "all"), ("float8_e4m3fn", "all"), *IN_PART])
    def test_every_flipped_bit_fails_if_and_only_if_it_is_frozen(self, dtype, mask):
        leaf, (frozen, where) = leaf_of(dtype), MASKS[mask]
        changed, at = flips(leaf)
        for new, i in zip(changed[::3], at[::3], strict=True):
            if where.reshape(-1)[i]:
                with pytest.raises(AssertionError, match="w: 1 of 6 elements"):
                    fz.assert_frozen({"w": leaf}, {"w": new}, {"w": frozen})
            else:
                fz.assert_frozen({"w": leaf}, {"w": new}, {"w": frozen})

    def test_names_every_path_and_says_how_far(self, params, frozen):
        moved = jax.tree.map(lambda p: p.at[0].add(0.5), params)
        with pytest.raises(AssertionError) as error:
            fz.assert_frozen(params, moved, frozen)
        text = str(error.value)
        first = "encoder/layer_0/bias: 1 of 4 elements, by up to 0.5"
        assert text.startswith(f"4 of 4 frozen leaves changed\n  at: {first}\n")
        assert "encoder/layer_1/kernel: 4 of 16 elements, by up to 0.5" in text
        assert "head" not in text
        assert all(part in text for part in ("\n  got: ", "\n  expected: ", "\n  fix: "))

    def test_many_paths(self):
        before = {f"layer_{i:03}": jnp.zeros(()) for i in range(120)}
        told = r"(?s)120 of 120.*layer_099: 1 of 1 elements, by up to 1\n *layer_100: 1 of 1 elements\n.*layer_119"
        with pytest.raises(AssertionError, match=told):
            fz.assert_frozen(before, jax.tree.map(jnp.ones_like, before), True)

    @pytest.mark.parametrize(
        ("old", "new", "told"),
        [
            ([0.0, 1.0], [-0.0, 1.0], "1 of 2 elements, in bits alone"),
            ([1.0, 2.0], [np.nan, 2.5], "2 of 2 elements, by up to 0.5, to or from NaN"),
            ([1.0, np.nan], [1.0, 2.0], "1 of 2 elements, to or from NaN"),
            ([1.0, np.inf], [1.0, -np.inf], "1 of 2 elements, by up to inf"),
            (np.float16([65504, 0]), np.float16([-65504, 0]), r"1 of 2 elements, by up to 1.31e\+05"),
            (np.int32([2**30, 0]), np.int32([2**30 - 3, 0]), "1 of 2 elements, by up to 3"),
            (np.int32([-(2**31), 0]), np.int32([2**31 - 1, 0]), r"1 of 2 elements, by up to 4.29e\+09"),
            (np.uint8([0, 255]), np.uint8([1, 255]), "1 of 2 elements, by up to 1"),
            (np.array([-8, 7], jnp.int4), np.array([7, 7], jnp.int4), "1 of 2 elements, by up to 15"),
            (np.array([True, False]), np.array([False, False]), "1 of 2 elements"),
            (np.complex64([3j, 0]), np.complex64([4, 0]), "1 of 2 elements, by up to 5"),
            (np.float64([1.0, 2.0]), np.float64([1.0, 2.0 + 1e-12]), "1 of 2 elements, by up to 1e-12"),
            (np.int64([2**60, 0]), np.int64([2**60, 2]), "1 of 2 elements, by up to 2"),
            (np.complex128([1, np.nan]), np.complex128([1, 0]), "1 of 2 elements, to or from NaN"),
            (np.float32([1.0]), np.float32(1.0), r"float32\[1\] became float32\[\]"),
            (np.float32([1.0]), jnp.ones(1, jnp.bfloat16), r"float32\[1\] became bfloat16\[1\]"),
            (1.0, np.float16(1.0), r"float32\[\] became float16\[\]"),
            (1, np.int32(1), r"int became int32\[\]"),
            (1.0, 2.0, "1 of 1 elements, by up to 1"),
            (0.0, -0.0, "1 of 1 elements, in bits alone"),
            (1, 2, "another object: 1 became 2"),
            (jnp.tanh, jax.nn.relu, "another object: .* became .*"),
        ],
        ids=lambda value: None if isinstance(value, str) else "",
    )
    def test_tells(self, old, new, told):
        old, new = (np.asarray(x, np.float32) if isinstance(x, list) else x for x in (old, new))
        with pytest.raises(AssertionError, match=rf"1 of 1 frozen leaves changed\n  at: w: {told}\n"):
            fz.assert_frozen({"w": old}, {"w": new}, True)
        fz.assert_frozen({"w": old}, {"w": old}, True)

    def test_keys_and_integers_are_frozen_whatever_the_spec(self):
        fz.assert_frozen(jax.random.key(0), jax.random.key(0), False)
        for old, new, told in (
            (jax.random.key(0), jax.random.key(1), r"at: \(the root\): 1 of 1 elements\n"),
            ({"step": jnp.int32(1)}, {"step": jnp.int32(2)}, "step: 1 of 1 elements, by up to 1"),
        ):
            with pytest.raises(AssertionError, match=told):
                fz.assert_frozen(old, new, False)

    def test_nnx_modules_change_in_place(self):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        before, values = nnx.state(model, nnx.Param), nnx.to_pure_dict(nnx.state(model, nnx.Param))
        copy = jax.tree.map(jnp.copy, before)
        model.kernel[...] += 1.0
        for old, new in ((before, nnx.state(model, nnx.Param)), (model, model), (before, before)):
            with pytest.raises(ValueError, match=r"the same NNX variables(.|\n)*nnx\.to_pure_dict"):
                fz.assert_frozen(old, new, "bias")
        for old, new in ((values, before), (copy, before), (copy, nnx.to_pure_dict(before))):
            fz.assert_frozen(old, new, "bias")
            with pytest.raises(AssertionError, match="kernel: 6 of 6 elements, by up to 1"):
                fz.assert_frozen(old, new, "kernel")

    def test_shardings_of_all_kinds(self):
        w = jax.random.normal(jax.random.key(0), (16, 8))
        moved = w.at[3, 5].add(1.0)
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
        turned = Mesh(mesh.devices[::-1], ("x", "y"), axis_types=(AxisType.Auto,) * 2)
        places = [NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P()), NamedSharding(turned, P("y"))]
        places += [NamedSharding(mesh, P("x"), memory_kind="pinned_host"), jax.devices()[3], None]
        mask = np.zeros((16, 8), bool)
        mask[3, 5] = True
        pairs = [pair for n in (1, 2, 3) for pair in zip(places, places[n:] + places[:n], strict=True)]
        for a, b in pairs:  # each pair of places once
            at = ((w, a), (moved, b), (w, b))
            old, new, copy = (np.asarray(x) if place is None else jax.device_put(x, place) for x, place in at)
            fz.assert_frozen({"w": old}, {"w": copy}, True)
            fz.assert_frozen({"w": old}, {"w": new}, {"w": ~mask})
            with pytest.raises(AssertionError, match="w: 1 of 128 elements, by up to 1"):
                fz.assert_frozen({"w": old}, {"w": new}, {"w": mask})

    def test_counts_carry_into_a_second_word(self):
        words = (jnp.full(9, 2**30, jnp.uint32), jnp.zeros(9, jnp.uint32))
        low, high = jax.jit(lambda words: _bits._sum(lambda _: words, words[0], _bits._carry))(words)
        assert int(low) + (int(high) << 32) == 9 * 2**30

    def test_the_larger_shards_go_to_the_smaller_ones(self):
        mesh = Mesh(jax.devices(), "x")
        sharded = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, P("x")))
        for other in (np.ones((8, 2)), jnp.ones((8, 2)), jax.device_put(sharded, NamedSharding(mesh, P()))):
            for arrays in ((sharded, other), (other, sharded)):
                assert all(array.sharding == sharded.sharding for array in _bits.placed(*arrays))

    def test_a_rest_is_compared_with_the_whole(self):
        params = {"w": jnp.arange(8.0).reshape(4, 2), "b": jnp.ones(2), "head": jnp.ones(1)}
        frozen = {"w": fz.rows(0), "b": True, "head": False}
        _, rest = fz.partition(params, frozen)
        moved = {**params, "w": params["w"].at[1:].add(1.0), "head": jnp.zeros(1)}
        fz.assert_frozen(rest, moved, frozen)
        fz.assert_frozen(moved, rest, frozen)
        fz.assert_frozen(rest, jax.tree.map(jnp.copy, rest), True)
        with pytest.raises(AssertionError, match="w: 2 of 8 elements"):
            fz.assert_frozen(rest, {**params, "w": params["w"] + 1}, frozen)

    def test_a_missing_leaf(self, params, frozen):
        trainable, rest = fz.partition(params, frozen)
        with pytest.raises(
            ValueError, match=r"missing\n  at: encoder/layer_0/bias\n  got: optax.MaskedNode\(\) in `after`"
        ):
            fz.assert_frozen(params, trainable, frozen)
        with pytest.raises(ValueError, match=r"missing\n  at: head/bias\n  got: optax.MaskedNode\(\) in `before`"):
            fz.assert_frozen(rest, params, True)
        part, _ = fz.partition({"w": jnp.ones((4, 2))}, {"w": fz.rows(0)})
        with pytest.raises(ValueError, match=r"after: the trainable part of a leaf(.|\n)*at: w"):
            fz.assert_frozen({"w": jnp.ones((4, 2))}, part, {"w": fz.rows(0)})
        with pytest.raises(ValueError, match="different containers"):
            fz.assert_frozen([jnp.ones(1)], (jnp.ones(1),), True)

    def test_a_mask_under_jit(self):
        leaf = {"w": np.ones(2, np.float32)}
        with pytest.raises(TypeError, match="mask of a leaf"):
            jax.jit(lambda m: fz.assert_frozen(leaf, leaf, {"w": m}))(np.ones(2, bool))
