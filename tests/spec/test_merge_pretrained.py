"""What was pretrained is frozen, what is new trains: values, specs and reports of ``fz.merge_pretrained``."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from flax import nnx
from flax.core import FrozenDict
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_freeze as fz
from optax_freeze import checkpoint

PARAMS = {"body": jnp.zeros(3), "embed": jnp.zeros((5, 2)), "head": jnp.zeros(2)}
PRETRAINED = {"body": np.ones(3, np.float32), "embed": np.ones((3, 2), np.float32)}
FROZEN = {"body": True, "embed": fz.rows(slice(0, 3)), "head": False}


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_any_tree(data):
    """Against NumPy: each leaf is the same, grown along one axis, new, or left out because it has no place."""
    rng, params, pretrained, expected, frozen, ignored = np.random.default_rng(0), {}, {}, {}, {}, []
    for i in range(data.draw(st.integers(1, 5))):
        name, shape = f"w{i}", tuple(data.draw(st.lists(st.integers(0, 3), max_size=3)))
        kind = data.draw(st.sampled_from(["same", "grown", "new", "gone", "shrunk", "twice"][: 6 if shape else 4]))
        dtype = data.draw(st.sampled_from([np.float32, jnp.bfloat16, np.int32]))
        old = rng.integers(0, 9, shape).astype(dtype)
        axes = [data.draw(st.integers(0, len(shape) - 1))] if shape else []
        kind = "new" if (kind == "grown" and not axes) or (kind == "twice" and len(shape) < 2) else kind
        by = {"grown": 2, "shrunk": 1, "twice": 1}.get(kind, 0)
        longer = [n + by * (i in axes or kind == "twice") for i, n in enumerate(shape)]
        own = rng.integers(10, 19, longer).astype(dtype)
        if kind == "shrunk":
            own, old = old, own
        if kind != "gone":
            params[name], expected[name], frozen[name] = own, own.copy(), np.zeros(own.shape, bool)
        if kind != "new":
            pretrained[name] = old
        if kind in ("gone", "shrunk", "twice"):
            ignored.append(name)
        elif kind != "new":
            expected[name][tuple(map(slice, old.shape))] = old
            frozen[name][tuple(map(slice, old.shape))] = True
    if ignored:
        with pytest.raises(ValueError, match="without a place"):
            fz.merge_pretrained(params, pretrained)
    for place in (lambda tree: tree, lambda tree: jax.tree.map(jnp.asarray, tree)):
        merged, spec, report = fz.merge_pretrained(place(params), pretrained, ignore=ignored)
        assert bits(merged) == bits(expected)
        assert set(report.ignored) == set(ignored)
        assert len(report.loaded) + len(report.grown) + len(report.new) == len(params)
        said = fz.resolve(params, spec)
        for name, mask in frozen.items():
            leaf, choice = params[name], said[name]
            if not jnp.issubdtype(leaf.dtype, jnp.inexact) or isinstance(choice, bool):
                assert choice is (not jnp.issubdtype(leaf.dtype, jnp.inexact) or bool(name in report.loaded))
                continue
            found = np.zeros(leaf.shape, bool)
            found[(slice(None),) * choice.axis + (choice.index,)] = True
            np.testing.assert_array_equal(found, mask)


@pytest.mark.parametrize("make", [dict, FrozenDict, lambda tree: list(tree.values())], ids=["dict", "frozen", "list"])
def test_containers_and_the_report(make):
    pretrained = PRETRAINED if make is not list and isinstance(make(PARAMS), (dict, FrozenDict)) else None
    pretrained = pretrained or {"0": PRETRAINED["body"], "1": PRETRAINED["embed"]}
    merged, frozen, report = fz.merge_pretrained(make(PARAMS), pretrained)
    assert jax.tree.structure(merged) == jax.tree.structure(make(PARAMS))
    assert jax.tree.leaves(fz.resolve(merged, frozen)) == jax.tree.leaves(FROZEN)
    assert json.loads(json.dumps(report.as_dict())) == report.as_dict()
    assert str(report).startswith("loaded: 1 leaf\ngrown: 1 leaf: ")
    assert repr(frozen) == "<spec of fz.merge_pretrained: 1 leaves frozen, 1 in rows, 1 trained>"


def test_the_spec_combines_and_trains(tmp_path):
    merged, frozen, _ = fz.merge_pretrained(PARAMS, PRETRAINED)
    assert fz.resolve(merged, frozen & fz.all_except("body")) == FROZEN | {"body": False}
    assert fz.resolve(merged, frozen & fz.all_except("embed")) == FROZEN | {"embed": False}
    assert fz.resolve(merged, frozen | "embed") == FROZEN | {"embed": True}
    assert fz.resolve(merged, ~frozen) == {"body": False, "embed": ~fz.rows(slice(0, 3)), "head": True}
    tx = fz.freeze(optax.adamw(0.1), frozen)
    loss = lambda params: sum(jnp.sum((leaf - 2) ** 2) for leaf in jax.tree.leaves(params))  # noqa: E731
    new, _, _ = jax.jit(fz.train_step(loss, tx))(merged, tx.init(merged))
    fz.assert_frozen(merged, new, frozen)
    assert (np.asarray(new["embed"])[3:] != 0).all()
    assert fz.summary(merged, frozen).trainable_elements == 6
    checkpoint.save(tmp_path, new, frozen, step=1)  # onto the merged parameters
    assert bits(checkpoint.restore(tmp_path, merged, frozen=frozen)[0]) == bits(new)
    with pytest.raises(ValueError, match="a leaf that was not merged\n  at: other"):
        fz.resolve({"other": 1.0}, frozen)


def test_nnx():
    model, old = (nnx.Linear(2, n, rngs=nnx.Rngs(n)) for n in (5, 3))
    pure = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(old)))
    for pretrained in (pure, {name: {"value": value} for name, value in pure.items()}, nnx.state(old), old):
        merged, frozen, report = fz.merge_pretrained(nnx.state(model, nnx.Param), pretrained)
        assert [(leaf.path, leaf.axis, leaf.rows, leaf.size) for leaf in report.grown] == [
            ("bias", 0, 3, 5),
            ("kernel", 1, 3, 5),
        ]
        np.testing.assert_array_equal(merged["kernel"][...][:, :3], pure["kernel"])
    nnx.update(model, merged)
    optimizer = nnx.Optimizer(model, fz.freeze(optax.adamw(0.1), frozen), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda model: model(jnp.ones(2)).sum())(model))
    np.testing.assert_array_equal(model.kernel[...][:, :3], pure["kernel"])


class Setting(eqx.Module):
    w: jax.Array
    rate: float
    size: int


def test_settings_of_an_equinox_module_stay():
    merged, _, report = fz.merge_pretrained(Setting(jnp.zeros(2), 0.1, 3), Setting(jnp.ones(2), 0.5, 4))
    assert (merged.rate, merged.size, report.loaded, report.new) == (0.1, 3, ("w",), ())


def test_shapes():
    shapes, old = jax.eval_shape(lambda: PARAMS), jax.eval_shape(lambda: PRETRAINED)
    for params, pretrained in ((shapes, old), (shapes, PRETRAINED), (PARAMS, old)):
        merged, frozen, _ = fz.merge_pretrained(params, pretrained)
        assert fz.resolve(merged, frozen) == FROZEN
        struct = jax.ShapeDtypeStruct
        assert isinstance(merged["embed"], struct)
        assert isinstance(merged["body"], struct) == (pretrained is old)
        assert isinstance(merged["head"], struct) == (params is shapes)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), merged) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    jitted = jax.jit(lambda a, b: fz.merge_pretrained(a, b)[0])(PARAMS, PRETRAINED)
    assert bits(jitted) == bits(fz.merge_pretrained(PARAMS, PRETRAINED)[0])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shardings_are_those_of_the_parameters(kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    sharded = NamedSharding(mesh, PartitionSpec("x"))
    params = {"table": jax.device_put(jnp.zeros((8, 2)), sharded), "w": jax.device_put(jnp.zeros((4, 2)), sharded)}
    for old in (np.ones, jnp.ones, lambda shape, dtype: jax.device_put(jnp.ones(shape, dtype), jax.devices()[7])):
        for rows, dtype in ((4, jnp.float32), (5, jnp.bfloat16)):
            pretrained = {"table": old((rows, 2), dtype), "w": old((4, 2), dtype)}
            merged, _, _ = fz.merge_pretrained(params, pretrained)
            assert {x.sharding for x in merged.values()} == {sharded}
            assert {x.dtype.name for x in merged.values()} == {"float32"}
            np.testing.assert_array_equal(merged["table"][:, 0], [1] * rows + [0] * (8 - rows))
    on_host = sharded.with_memory_kind("pinned_host")
    params = jax.device_put({"table": jnp.zeros((8, 2)), "w": jnp.zeros((8, 2))}, on_host)
    merged, _, _ = fz.merge_pretrained(params, {"table": np.ones((3, 2)), "w": np.ones((8, 2))})
    assert {x.sharding for x in merged.values()} == {on_host}


def test_what_was_not_put_on_a_device_is_not():
    merged, _, _ = fz.merge_pretrained(PARAMS, PRETRAINED)
    assert not any(leaf.committed for leaf in jax.tree.leaves(merged))
    merged, _, _ = fz.merge_pretrained({"w": np.zeros(2), "s": 1.0}, {"w": jnp.ones(2), "s": np.float32(2)})
    assert (type(merged["w"]), merged["w"].dtype, merged["s"]) == (np.ndarray, np.float64, 2.0)


@pytest.mark.parametrize("own", [np.asarray, jnp.asarray])
def test_dtypes(own):
    params = {name: own(np.zeros(4, dtype)) for name, dtype in (("b", jnp.bfloat16), ("f", np.float32), ("c", "c8"))}
    params["grown"] = own(np.zeros(5, np.float32))
    pretrained = {name: np.array([-0.0, 1, np.nan, 2], jnp.float8_e4m3fn) for name in params}
    assert {name: x.dtype for name, x in fz.merge_pretrained(params, pretrained)[0].items()} == {
        name: x.dtype for name, x in params.items()
    }
    kept, _, _ = fz.merge_pretrained(params, pretrained, dtype="pretrained")
    assert kept["f"].dtype == jnp.float8_e4m3fn
    assert kept["grown"].dtype == np.float32
    assert np.asarray(kept["f"]).tobytes() == pretrained["f"].tobytes()
    for value in (np.ones(4, np.complex64), np.ones(4, np.int32)):
        with pytest.raises(ValueError, match=f"f: {value.dtype} in `pretrained`, float32"):
            fz.merge_pretrained(params, {"f": value})


def test_tied_leaves():
    table = jnp.zeros(3)
    params = {"embed": table, "head": table}
    with pytest.raises(ValueError, match="tied leaves"):
        fz.merge_pretrained(params, {"embed": np.ones(3)})
    assert fz.resolve(params, fz.merge_pretrained(params, {"embed": np.ones(3)}, tied="ignore")[1])["head"] is False
    fz.merge_pretrained(params, {"embed": np.ones(3), "head": np.ones(3)})


def test_keys():
    keys = jax.random.split(jax.random.key(1), 3)
    merged, _, _ = fz.merge_pretrained({"a": jax.random.key(0), "b": keys}, {"a": keys[0], "b": keys[1:]})
    assert bits(merged) == bits({"a": keys[0], "b": jnp.concatenate([keys[1:], keys[2:]])})


def test_rename():
    pretrained = {"m": {"x": {"w": np.ones(2)}, "y": {"w": np.full(2, 2)}}, "w": np.full(2, 3.0)}
    params = {"a": {"w": jnp.zeros(2)}, "b": {"w": jnp.zeros(2)}, "w": jnp.zeros(2)}
    pretrained["m"]["y"]["w"] = np.full(2, 2.0)
    for rename in ({"m/x": "a", "m": "", "m/y": "b"}, {"m/x": "a", "m/y/w": "b/w"}):
        if "m" in rename:
            with pytest.raises(ValueError, match="'m' never applies: longer names match all its leaves"):
                fz.merge_pretrained(params, pretrained, rename=rename)
        else:
            merged, _, _ = fz.merge_pretrained(params, pretrained, rename=rename)
            assert [float(leaf[0]) for leaf in jax.tree.leaves(merged)] == [1, 2, 3]
    swapped, _, _ = fz.merge_pretrained(
        {"a": jnp.zeros(1), "b": jnp.zeros(1)}, {"a": np.ones(1), "b": np.zeros(1)}, rename={"a": "b", "b": "a"}
    )
    assert (float(swapped["a"][0]), float(swapped["b"][0])) == (0, 1)
    added, _, _ = fz.merge_pretrained({"m": {"w": jnp.zeros(1)}}, {"w": np.ones(1)}, rename={"": "m"})
    assert float(added["m"]["w"][0]) == 1


def test_the_longest_name_applies():
    pretrained = {"m": {"x": np.ones(1), "y": np.zeros(1)}}
    merged, _, _ = fz.merge_pretrained({"a": jnp.zeros(1), "y": jnp.ones(1)}, pretrained, rename={"m": "", "m/x": "a"})
    assert (float(merged["a"][0]), float(merged["y"][0])) == (1, 0)


def test_ignore():
    pretrained = PRETRAINED | {"old": np.ones(2), "head": np.ones((2, 2))}
    for ignore in ("**", ["old", "head"], fz.regex("old|head"), ["old", fz.path("head")]):
        merged, _, report = fz.merge_pretrained(PARAMS, pretrained, ignore=ignore)
        assert (report.ignored, report.new) == (("head", "old"), ("head",))
        assert not merged["head"].any()
    assert fz.merge_pretrained(PARAMS, PRETRAINED, ignore="**")[2].ignored == ()
    with pytest.raises(ValueError, match="matches no leaf") as caught:
        fz.merge_pretrained(PARAMS, PRETRAINED, ignore="head")
    assert "what is only in `params` is new without it" in caught.value.__notes__[0]
