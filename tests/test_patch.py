"""A patch has what trained, bit for bit, in a file that others read; it returns onto its base, and onto no other."""

import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
import safetensors.numpy
from conftest import bits
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze import patch

MASK = np.array([[True, False, True], [False, True, True], [True, True, True], [True, True, False]])


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def moved(tree, frozen):
    """A tree of which everything that trains has other bits."""
    plan = jax.tree.map(lambda leaf: -leaf if hasattr(leaf, "dtype") else leaf, fz.partition(tree, frozen)[0])
    return fz.combine(plan, fz.partition(tree, frozen)[1])


TREES = {
    "dict": (lambda: {"encoder": normal(0, 4, 3), "head": normal(1, 2)}, "encoder"),
    "bfloat16": (lambda: {"a": normal(0, 4, 3, dtype=jnp.bfloat16), "b": normal(1, 2)}, "b"),
    "float8": (lambda: {"a": normal(0, 4, 3, dtype=jnp.float8_e4m3fn), "b": normal(1, 2)}, {"a": MASK, "b": True}),
    "complex": (lambda: {"a": jax.lax.complex(normal(0, 4, 3), normal(1, 4, 3)), "b": normal(1, 2)}, "b"),
    "scalar": (lambda: {"a": jnp.float32(1.5), "b": normal(1, 2), "key": jax.random.key(0), "n": jnp.arange(3)}, "b"),
    "Python number": (lambda: {"a": 1.5, "b": normal(1, 2)}, "b"),
    "empty": (lambda: {"a": normal(0, 0, 3), "b": normal(1, 2), "c": normal(2, 2)}, "b"),
    "a lone leaf": (lambda: normal(0, 4, 3), False),
    "rows": (lambda: {"a": normal(0, 6, 3), "b": normal(1, 2)}, {"a": fz.rows(slice(0, 4)), "b": True}),
    "rows of axis 1": (lambda: {"a": normal(0, 4, 3, 2)}, {"a": fz.rows([0, 2], axis=1)}),
    "rows here and there": (lambda: {"a": normal(0, 99, 3)}, {"a": fz.rows([i for i in range(99) if i % 7])}),
    "dynamic rows": (lambda: {"a": normal(0, 6, 3)}, {"a": ~fz.rows(jnp.array([4, 1]))}),
    "compact mask": (lambda: {"a": normal(0, 4, 3)}, {"a": fz.elements(MASK, compact=True)}),
    "dense mask": (lambda: {"a": normal(0, 4, 3, dtype=jnp.float16)}, {"a": MASK}),
    "a mask of nothing": (lambda: {"a": normal(0, 4, 3), "b": normal(1, 2)}, {"a": np.ones((4, 3), bool), "b": False}),
    "NumPy": (lambda: {"a": np.arange(12.0).reshape(4, 3), "b": np.ones(2)}, {"a": MASK, "b": True}),
    "NumPy in Fortran's order": (lambda: {"a": np.asfortranarray(np.arange(12.0).reshape(4, 3))}, {"a": MASK}),
    "NumPy whole": (lambda: {"a": np.asfortranarray(np.arange(12.0).reshape(4, 3)), "b": np.float32(2)}, False),
    "NumPy rows": (lambda: {"a": np.arange(12.0).reshape(4, 3).T}, {"a": fz.rows([0], axis=1)}),
}


def case(name):
    make, frozen = TREES[name]
    base = make()
    return base, moved(base, frozen), frozen


@pytest.mark.parametrize("name", TREES)
def test_a_patch_makes_of_the_base_what_was_trained(name, tmp_path):
    base, tuned, frozen = case(name)
    if name.startswith("NumPy"):
        tuned = jax.tree.map(lambda old, new: np.asarray(new, old.dtype), base, tuned)
    before = bits(base)
    written = patch.save(tmp_path / "new" / "a.safetensors", tuned, frozen)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.safetensors"]
    for found in (written, patch.load(tmp_path / "new" / "a.safetensors"), pickle.loads(pickle.dumps(written))):
        assert bits(found.tensors) == bits(written.tensors)
        new = patch.apply(base, found)
        assert jax.tree.structure(new) == jax.tree.structure(base)
        assert bits(new) == bits(tuned)
        assert [type(leaf) for leaf in jax.tree.leaves(new)] == [type(leaf) for leaf in jax.tree.leaves(base)]
        fz.assert_frozen(base, new, found.frozen)
        assert bits(fz.partition(base, found.frozen)[0]) or name == "a mask of nothing"
        assert found.nbytes == sum(array.nbytes for array in found.tensors.values())
        assert str(found).splitlines()[1:]
        assert bits(patch.apply(base, found, base=False)) == bits(tuned)
    assert bits(base) == before


BASE = {"embed": normal(0, 6, 4), "body": {"kernel": normal(1, 4, 4)}, "head": normal(2, 4)}
SPEC = {"embed": fz.rows([0, 1, 3]), "body": {"kernel": True}, "head": False}
TUNED = moved(BASE, SPEC)


def test_others_read_the_file(tmp_path):
    masked = {
        "embed": fz.rows([0, 2, 3], axis=1),
        "body": {"kernel": fz.elements(MASK[:, [0, 1, 2, 0]])},
        "head": False,
    }
    names = {"head": "lm_head/weight", "body": "model.layers.0", "embed": "embed"}
    tuned = moved(BASE, masked)
    patch.save(tmp_path / "a", tuned, masked, rename=names, metadata={"format": "pt"})
    found = safetensors.numpy.load_file(tmp_path / "a")
    kernel, flat = np.array(BASE["body"]["kernel"]), found["model.layers.0.kernel.indices"]
    np.put(kernel, flat, found["model.layers.0.kernel.values"])
    assert bits(kernel) == bits(tuned["body"]["kernel"])
    assert flat.tolist() == sorted(flat)
    assert found["embed.rows"].tolist() == [1]
    assert bits(found["embed.values"]) == bits(np.asarray(tuned["embed"][:, 1:2]))
    assert bits(found["lm_head/weight"]) == bits(np.asarray(tuned["head"]))
    assert {name: found[name].dtype for name in ("embed.rows", "model.layers.0.kernel.indices")} == {
        "embed.rows": np.int32,
        "model.layers.0.kernel.indices": np.int32,
    }
    loaded = patch.load(tmp_path / "a")
    assert loaded.metadata == {"format": "pt"}
    assert bits(patch.apply(BASE, loaded)) == bits(tuned)
    assert "head: float32[4], as lm_head/weight" in str(loaded)


def test_the_record_is_small(tmp_path):
    base = {f"layer_{i}": {"kernel": normal(i, 1000, 3)} for i in range(20)}
    patch.save(tmp_path / "a", base, fz.rules({"**": fz.rows(list(range(0, 1000, 7)))}))
    data = (tmp_path / "a").read_bytes()
    with safetensors.safe_open(tmp_path / "a", "numpy") as file:
        record = file.metadata()["optax_freeze.patch"]
    assert len(record) < 20 * 500
    assert len(data) < patch.load(tmp_path / "a").nbytes + 20 * 800


def test_each_damaged_byte_is_refused(tmp_path):
    patch.save(tmp_path / "a", TUNED, SPEC, metadata={"note": "mine"})
    data = (tmp_path / "a").read_bytes()
    mine = data.index(b"note"), data.index(b"mine") + 4
    for i in range(len(data)):
        for byte in (data[i] ^ 1, 0x09 if data[i] == 0x20 else data[i] ^ 0xFF):
            if not mine[0] <= i < mine[1]:
                (tmp_path / "b").write_bytes(data[:i] + bytes([byte]) + data[i + 1 :])
                with pytest.raises(ValueError, match=r"damaged|not a patch"):
                    patch.load(tmp_path / "b")
    for other in (data[:-1], data + b"\0", data[:9], b"", data[:8] + data[9:]):
        (tmp_path / "b").write_bytes(other)
        with pytest.raises(ValueError, match=r"damaged|not a patch"):
            patch.load(tmp_path / "b")
    (tmp_path / "b").write_bytes(data.replace(b"mine", b"ours"))
    assert patch.load(tmp_path / "b").metadata == {"note": "ours"}


@pytest.mark.parametrize(
    ("change", "at"),
    [
        (lambda base: {**base, "body": {"kernel": base["body"]["kernel"].at[0, 0].multiply(2)}}, "body/kernel"),
        (lambda base: {**base, "embed": base["embed"].at[3, 0].multiply(2)}, "embed"),
        (lambda base: {**base, "head": base["head"].astype(jnp.bfloat16)}, "head"),
        (lambda base: {**base, "embed": jnp.ones((7, 4))}, "embed"),
        (lambda base: {"embed": base["embed"], "body": base["body"]}, "head"),
        (lambda base: fz.partition(base, "head")[0], "head"),
        (lambda base: fz.partition(base, {"embed": SPEC["embed"], "body": False, "head": False})[0], "embed"),
    ],
)
def test_another_base_is_refused(change, at):
    with pytest.raises(ValueError, match=f"at: {at}\n"):
        patch.apply(change(BASE), patch.take(TUNED, SPEC))


def test_patches_that_were_learned_apart_are_applied_together():
    specs = [
        {"embed": fz.rows([0, 1, 2, 3, 4]), "body": True, "head": True},
        {"embed": fz.rows([0, 1, 2, 3, 5]), "body": {"kernel": fz.rows(slice(0, 2))}, "head": True},
        {"embed": True, "body": {"kernel": fz.elements(np.arange(16).reshape(4, 4) != 3)}, "head": False},
    ]
    found = [patch.take(moved(BASE, spec), spec) for spec in specs]
    for order in (found, found[::-1]):
        new = patch.apply(BASE, *order)
        expected = BASE
        for spec in specs:
            expected = fz.combine(fz.partition(moved(BASE, spec), spec)[0], fz.partition(expected, spec)[1])
        assert bits(new) == bits(expected)
    for spec in (
        {"embed": fz.rows([0, 1, 2, 3]), "body": True, "head": True},
        {"embed": fz.rows([0], axis=1), "body": True, "head": True},
        {"embed": False, "body": True, "head": True},
        {"embed": fz.elements(np.arange(24).reshape(6, 4) != 23), "body": True, "head": True},
    ):
        with pytest.raises(ValueError, match="two patches have a value for the same element\n  at: embed\n"):
            patch.apply(BASE, *found, patch.take(BASE, spec))
    with pytest.raises(ValueError, match=r"patch\.apply\(params, one, other\)"):
        patch.apply(patch.apply(BASE, found[0]), found[1])


def test_leaves_that_a_patch_does_not_know_keep_their_values():
    new = patch.apply({**BASE, "other": jnp.ones(3)}, patch.take(TUNED, SPEC))
    assert bits(new) == bits({**TUNED, "other": jnp.ones(3)})


def test_onto_another_base():
    mask = np.ones((6, 4), bool)
    mask[5, 3] = mask[0, 1] = False
    for frozen, axis in ((SPEC["embed"], 0), (fz.elements(mask), 0), (fz.elements(mask), 1), (False, 1), (False, 0)):
        found = patch.take(moved(BASE, spec := {**SPEC, "embed": frozen}), spec)
        longer = jnp.concatenate([BASE["embed"]] * 2, axis).astype(jnp.bfloat16)
        other = {"embed": longer, "body": {"kernel": jnp.zeros((4, 4), jnp.int8)}, "head": BASE["head"]}
        expected = jnp.array(longer).at[:6, :4].set(moved(BASE, spec)["embed"].astype(jnp.bfloat16))
        for convert in (jnp.asarray, np.asarray):
            new = patch.apply(jax.tree.map(convert, other), found, base=False)
            assert bits(new) == bits({**other, "embed": expected, "head": TUNED["head"]})
    for embed in (jnp.ones((5, 4)), jnp.ones((6, 5)), jnp.ones((7, 5)), jnp.ones((6, 4), int), "a name"):
        with pytest.raises(ValueError, match="does not fit\n  at: embed\n"):
            patch.apply({**BASE, "embed": embed}, patch.take(TUNED, SPEC), base=False)
    with pytest.raises(ValueError, match="missing\n  at: body/kernel\n"):
        patch.apply({**BASE, "body": {}}, patch.take(TUNED, SPEC), base=False)
    large = patch.take({**TUNED, "head": jnp.full(4, 1e30)}, SPEC)
    with pytest.raises(ValueError, match="float16 does not have all frozen values\n  at: head\n"):
        patch.apply({**BASE, "head": BASE["head"].astype(jnp.float16)}, large, base=False)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("frozen", [SPEC, {**SPEC, "embed": MASK[[0, 1, 2, 3, 0, 1]][:, [0, 1, 2, 2]]}])
def test_shardings_and_host_memory_stay(axis_type, frozen):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType[axis_type],) * 2)
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    for where in (NamedSharding(mesh, P("a", "b")), NamedSharding(mesh, P(None, "b")), host):
        base = {**BASE, "embed": jax.device_put(BASE["embed"], where)}
        tuned = moved(BASE, frozen)
        placed = {**tuned, "embed": jax.device_put(tuned["embed"], where)}
        found = patch.take(placed, frozen)
        assert bits(found.tensors) == bits(patch.take(tuned, frozen).tensors)
        new = patch.apply(base, found)
        assert bits(new) == bits(tuned)
        assert new["embed"].sharding == where
        whole = patch.apply(base, patch.take(placed, {**frozen, "embed": False}))
        assert bits(whole) == bits(tuned)
        assert whole["embed"].sharding == where


def test_donated_parameters_do_not_take_the_patch_with_them():
    params = jax.tree.map(jnp.copy, TUNED)
    found = patch.take(params, SPEC)
    jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(params)
    new = patch.apply(jax.tree.map(jnp.copy, BASE), found)
    assert bits(new) == bits(TUNED)
    jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(new)
    assert bits(patch.apply(BASE, found)) == bits(TUNED)
    with pytest.raises(ValueError, match="deleted"):
        patch.take(params, SPEC)


def test_rows_that_are_no_rows_are_left_out():
    tx = fz.freeze(optax.sgd(0.1), {"a": ~fz.rows(jnp.array([4, 1]))})
    base = {"a": normal(0, 6, 3)}
    state = jax.jit(lambda n: fz.replace_masks(tx.init(base), tx, base, {"a": ~fz.rows(n)}))(jnp.array([2, 9]))
    tuned = {"a": base["a"].at[2].set(0.0)}
    found = patch.take(tuned, fz.spec_of(state))
    assert found.tensors["a.rows"].tolist() == [2]
    assert bits(patch.apply(base, found)) == bits(tuned)


def test_names_in_a_file_are_one_for_each_tensor(tmp_path):
    for tree in ({"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}}, {"a/values": jnp.ones(2), "a": jnp.ones((3, 2))}):
        frozen = fz.rules({"a": fz.rows([0])}) if "a/values" in tree else False
        with pytest.raises(ValueError, match="two tensors with one name"):
            patch.take(tree, frozen)
        [path, _] = tree
        found = patch.take(tree, frozen, rename={path: "other"})
        assert bits(patch.apply(tree, found)) == bits(tree)
    assert patch.take(BASE, SPEC, rename={"body/kernel": "frozen.too"}).tensors.keys() >= {"head"}


def test_a_file_is_complete_or_does_not_exist(tmp_path, monkeypatch):
    patch.save(tmp_path / "a", TUNED, SPEC)
    before = (tmp_path / "a").read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        patch.save(tmp_path / "a", BASE, SPEC)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == before


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (lambda: patch.save(tmp_path / "a", TUNED, SPEC), lambda: patch.load(tmp_path / "a")):
        with pytest.raises(ImportError, match="pip install safetensors"):
            call()
    assert list(tmp_path.iterdir()) == []
    assert bits(patch.apply(BASE, patch.take(TUNED, SPEC))) == bits(TUNED)


def test_rows_that_keep_their_state_leave_as_a_whole_leaf():
    """Other rows train in each step, so the whole table has changed."""
    params = {"table": jnp.arange(8.0).reshape(4, 2), "body": jnp.ones(2)}
    frozen = {"table": ~fz.rows(jnp.array([1]), keep_state=True), "body": True}
    found = patch.take(params, frozen)
    assert found.tensors.keys() == {"table"}
    assert bits(patch.apply({**params, "table": jnp.zeros((4, 2))}, found)) == bits(params)
