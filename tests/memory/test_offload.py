"""What moves to the host's memory, what stays, and what refuses to move."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmarks.decoder import Decoder
from benchmarks.measure import on, tpu_sharding
from conftest import bits
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import optax_freeze as fz
from optax_freeze._memory import offload as _offload


def kinds(tree):
    """Where each leaf is; None for what is not an array of JAX."""
    return jax.tree.map(lambda leaf: getattr(getattr(leaf, "sharding", None), "memory_kind", None), tree)


def params(stack=None):
    stack = jnp.arange(24.0).reshape(4, 3, 2) if stack is None else stack
    return {"stack": stack, "head": jnp.ones((3, 2))}


def moved(tree, frozen, **kwargs):
    return fz.offload(tree, frozen, min_bytes=0, **kwargs)


class TestWhatMoves:
    def test_a_frozen_stack(self):
        before = params()
        after = moved(before, "stack")
        assert kinds(after) == {"stack": "pinned_host", "head": "device"}
        assert after["head"] is before["head"]
        assert bits(after) == bits(before)
        assert after["stack"].committed

    @pytest.mark.parametrize(
        ("shape", "spec", "frozen", "kind"),
        [
            ((16, 128), (), {"table": True, "head": True}, "pinned_host"),
            ((16, 256), (None, "x"), {"table": fz.rows(slice(0, 9)), "head": True}, "pinned_host"),
            ((16, 128), (), "head", "device"),
            ((16, 128), ("x",), {"table": True, "head": True}, None),
            ((16, 128), (None, "x"), {"table": True, "head": True}, None),
            ((15, 128), (), {"table": True, "head": True}, None),
            ((16, 96), (), {"table": True, "head": True}, None),
            ((128,), (), {"table": True, "head": True}, "device"),
        ],
    )
    def test_a_table(self, shape, spec, frozen, kind):
        mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
        table = jax.device_put(jnp.ones(shape), NamedSharding(mesh, PartitionSpec(*spec)))
        tree = {"table": table, "head": jnp.ones((16, 128))}
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
        for each in (tree, shapes):
            if kind:
                assert kinds(moved(each, frozen, tables="table")) == {"table": kind, "head": "device"}
            else:
                with pytest.raises(ValueError, match="rows of this table cannot be read"):
                    moved(each, frozen, tables="table")
        assert kinds(fz.offload(tree, frozen, tables="table"))["table"] == "device"

    def test_of_at_least_so_many_bytes(self):
        assert kinds(fz.offload(params(), "stack"))["stack"] == "device"
        assert kinds(fz.offload(params(), "stack", min_bytes=97))["stack"] == "device"
        assert kinds(fz.offload(params(), "stack", min_bytes=np.int32(96)))["stack"] == "pinned_host"
        assert kinds(fz.offload(params(jnp.zeros((4, 256, 257))), "stack"))["stack"] == "pinned_host"

    @pytest.mark.parametrize(
        ("rows", "kind"),
        [
            (fz.rows([0, 2]), "pinned_host"),
            (fz.rows([1], axis=1), "pinned_host"),
            (fz.rows(jnp.array([0, 2])), "device"),
            (np.arange(24).reshape(4, 3, 2) > 3, "device"),
            (False, "device"),
        ],
        ids=["rows", "rows of another axis", "dynamic rows", "a dense mask", "all of it trains"],
    )
    def test_frozen_by(self, rows, kind):
        before = params()
        after = moved(before, {"stack": rows, "head": True})
        assert kinds(after)["stack"] == kind
        assert (after["stack"] is before["stack"]) == (kind == "device")

    def test_no_leaf_that_does_not_stream(self, awkward):
        before = {**awkward, "keys": jax.random.split(jax.random.key(0), (2, 3, 4)), "loss": jnp.sum}
        after = moved(before, True)
        assert all(a is b for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))

    @pytest.mark.parametrize("dtype", [jnp.int8, jnp.bool_, jnp.bfloat16, jnp.float8_e4m3fn, jnp.complex64])
    def test_of_any_dtype(self, dtype):
        before = params(jnp.ones((4, 3, 2), dtype))
        assert kinds(after := moved(before, "stack"))["stack"] == "pinned_host"
        assert bits(after) == bits(before)

    def test_the_trainable_part_stays_and_the_rest_moves(self):
        spec = {"stack": fz.rows([0, 2]), "head": False}
        trainable, rest = fz.partition(params(), spec)
        assert moved(trainable, False)["stack"].values is trainable["stack"].values
        rest = moved(rest, True)
        assert kinds(rest)["stack"].array == "pinned_host"
        assert bits(fz.combine(trainable, rest)) == bits(params())

    def test_numpy_arrays(self):
        before = params(np.arange(24, dtype=np.float32).reshape(4, 3, 2))
        with jax.default_device(jax.devices()[3]):
            after = moved(before, "stack")
        assert after["stack"].sharding == SingleDeviceSharding(jax.devices()[3], memory_kind="pinned_host")
        assert bits(after) == bits(before)
        trains = moved(before, "head")
        assert trains["stack"] is before["stack"]
        wide = params(np.ones((4, 3, 2)))
        assert moved(wide, "stack")["stack"] is wide["stack"]

    def test_a_tied_array_moves_once_or_not_at_all(self):
        one = jnp.ones((4, 3, 2))
        both = moved({"a": one, "b": one, "head": jnp.ones(2)}, ["a", "b"])
        assert both["a"] is both["b"]
        assert kinds(both)["a"] == "pinned_host"
        tied = moved({"a": one, "b": one, "head": jnp.ones(2)}, "a")
        assert tied["a"] is tied["b"] is one
        with pytest.raises(ValueError, match="the same array is frozen at one path"):
            fz.partition(tied, "a")


class TestAgain:
    def test_the_same_objects(self):
        once = moved(params(), "stack")
        twice = moved(once, "stack")
        assert all(a is b for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True))

    def test_what_is_there_and_frozen_stays(self):
        host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        matrix = jax.device_put(jnp.ones((3, 2)), host)
        assert fz.offload({"head": matrix}, True)["head"] is matrix

    @pytest.mark.parametrize("spec", [False, np.zeros((4, 3, 2), bool), fz.rows(jnp.array([1]))])
    def test_what_trains_now_comes_back(self, spec):
        once = moved(params(), "stack")
        after = moved(once, {"stack": spec, "head": True})
        assert kinds(after)["stack"] == "device"
        assert bits(after) == bits(once)
        fz.partition(after, {"stack": spec, "head": True})

    def test_shapes_too(self):
        shapes = moved(jax.eval_shape(params), "stack")
        assert kinds(moved(shapes, False))["stack"] == "device"
        assert moved(shapes, "stack")["stack"] is shapes["stack"]


class TestWhere:
    @pytest.mark.parametrize("explicit", [False, True])
    @pytest.mark.parametrize("spec", [PartitionSpec(None, "data"), PartitionSpec("data"), PartitionSpec()])
    def test_a_sharding_is_kept(self, spec, explicit):
        kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
        sharding = NamedSharding(jax.make_mesh((8,), ("data",), axis_types=(kind,)), spec)
        stack = jax.device_put(jnp.arange(8 * 16 * 2.0).reshape(8, 16, 2), sharding)
        after = moved(params(stack), "stack")["stack"]
        assert after.sharding == sharding.with_memory_kind("pinned_host")
        assert bits(after) == bits(stack)
        assert moved({"stack": after, "head": jnp.ones(2)}, "head")["stack"].sharding == stack.sharding

    def test_the_device_of_an_array_that_nobody_placed(self):
        with jax.default_device(jax.devices()[2]):
            stack = jnp.ones((4, 3, 2))
        assert moved(params(stack), "stack")["stack"].devices() == {jax.devices()[2]}

    def test_shapes_get_a_sharding_and_nothing_is_allocated(self):
        huge = jax.ShapeDtypeStruct((4, 10**9, 10**9), jnp.bfloat16)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        sharded = NamedSharding(mesh, PartitionSpec(None, "data"))
        before = {"a": huge, "b": huge.update(sharding=sharded), "head": jax.ShapeDtypeStruct((3, 2), jnp.float32)}
        after = fz.offload(before, fz.all_except("head"))
        assert after["head"] is before["head"]
        assert after["a"].sharding == SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        assert after["b"].sharding == sharded.with_memory_kind("pinned_host")
        assert [(x.shape, x.dtype) for x in after.values()] == [(x.shape, x.dtype) for x in before.values()]

    def test_shapes_on_a_mesh_without_devices(self):
        sharding = NamedSharding(AbstractMesh((64,), ("data",)), PartitionSpec(None, "data"))
        before = params(jax.ShapeDtypeStruct((4, 128, 2), jnp.float32, sharding=sharding))
        after = moved(before, "stack")["stack"]
        assert after.sharding == sharding.with_memory_kind("pinned_host")
        assert moved({**before, "stack": after}, "head")["stack"].sharding.memory_kind == "device"

    @pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="this jit returns arrays in device memory")
    def test_inside_of_jit(self):
        after = jax.jit(lambda tree: moved(tree, "stack"))(params())
        assert kinds(after) == {"stack": "pinned_host", "head": "device"}
        back = jax.jit(lambda tree: moved(tree, "head"))(after)
        assert kinds(back)["stack"] == "device"
        assert bits(back) == bits(params())


class TestRefusals:
    def test_arguments_in_another_order(self):
        with pytest.raises((ValueError, TypeError), match=r"frozen|pattern"):
            fz.offload("stack", params())

    def test_a_device_without_such_memory(self, monkeypatch):
        monkeypatch.setattr(_offload, "_memory_kinds", lambda device: ["device", "unpinned_host"])
        moved(params(), "head")
        for tree in (params(), jax.eval_shape(params)):
            with pytest.raises(ValueError, match="a device without pinned host memory") as error:
                moved(tree, "stack")
            assert "device, unpinned_host" in str(error.value)

    def test_a_device_that_does_not_say_may_have_it(self):
        @dataclasses.dataclass(frozen=True)
        class Described:
            def addressable_memories(self):
                raise RuntimeError("not supported")

        class OfAnotherProcess:
            def addressable_memories(self):
                return []

        assert _offload._memory_kinds(Described()) is None
        assert _offload._memory_kinds(OfAnotherProcess()) is None

    def test_what_trains_may_not_lie_there(self):
        host = moved(params(), "stack")
        for call in (
            lambda: fz.partition(host, "head"),
            lambda: fz.partition(host, {"stack": np.arange(24).reshape(4, 3, 2) > 3, "head": False}),
            lambda: fz.partition(host, {"stack": fz.rows(jnp.array([0])), "head": False}),
            lambda: fz.freeze(optax.adam(0.1), "head").init(host),
            lambda: fz.apply_updates(host, jax.tree.map(jnp.ones_like, params())),
            lambda: jax.jit(lambda tree: fz.partition(tree, "head"))(host),
        ):
            with pytest.raises(ValueError, match="a trainable parameter is in host memory\n  at: stack"):
                call()
        fz.partition(moved(host, "head"), "head")


SOME = {"last": [0, 1, 2, 3, 4], "within": [1, 2, 5]}


def permutations(remat, reverse):
    """A loss of six layers that permute and change signs: exact in any precision, and other in any other order."""
    rng = np.random.default_rng(0)
    stack = np.stack([np.eye(128, dtype=np.float32)[rng.permutation(128)] for _ in range(6)])
    stack *= rng.choice([-1, 1], (6, 1, 128)).astype(np.float32)

    def layer(x, w):
        x = x @ w
        return jnp.where(x > 0, x, 2 * x), None

    def loss(params, x):
        x, _ = jax.lax.scan(
            jax.checkpoint(layer) if remat else layer, x * params["in"], params["stack"], reverse=reverse
        )
        return jnp.sum(x @ params["head"])

    ends = {name: jnp.asarray(rng.integers(-3, 4, 128), jnp.float32) for name in ("in", "head")}
    return loss, {"stack": jnp.asarray(stack), **ends}


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("remat", [False, True], ids=["stored", "remat"])
@pytest.mark.parametrize("rows", [*SOME.values(), None], ids=[*SOME, "all"])
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_gradients_are_those_from_the_device(backend, rows, remat, reverse):
    """XLA for GPU has read arrays on the host in the wrong order in a reversed scan (openxla/xla#46231)."""
    if jax.default_backend() != backend:
        pytest.skip(f"JAX has no {backend.upper()} here, so gradients from the host are not tested on it")
    loss, start = permutations(remat, reverse)
    spec = {"stack": True if rows is None else fz.rows(rows), "in": False, "head": False}
    x = jnp.asarray(np.random.default_rng(1).integers(-3, 4, (4, 128)), jnp.float32)
    step = jax.jit(fz.value_and_grad(loss, spec))
    host = moved(start, spec)
    assert kinds(host)["stack"] == "pinned_host"
    assert bits(step(host, x)) == bits(step(start, x))


compiles_for_tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which compiles for TPU, is not installed"
)


@compiles_for_tpu
@pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache:UserWarning")
@pytest.mark.parametrize("rows", SOME.values(), ids=SOME)
def test_tpu_compiles_to_the_end(rows):
    """The TPU compiler aborts, while it writes machine code, if a row of a stack on the host gets another layout."""
    spec = {"stack": fz.rows(rows), "head": False}
    shapes = {"stack": jnp.zeros((6, 128, 128)), "head": jnp.zeros((128, 8))}
    host = moved(on(chip := tpu_sharding(), shapes), spec)

    def attend(x, w):
        heads = (x @ w).reshape(*x.shape[:2], 4, -1)
        return x + jax.nn.dot_product_attention(heads, heads, heads).reshape(x.shape), None

    def loss(params, x):
        return jnp.mean((jax.lax.scan(attend, x, params["stack"])[0] @ params["head"]) ** 2)

    def grads(params, x):
        stack = jax.device_put(params["stack"], jax.memory.Space.Host)  # JAX traces a shape as if it were on the device
        return fz.grad(loss, spec)({**params, "stack": stack}, x)

    x = jax.ShapeDtypeStruct((1, 128, 128), jnp.float32, sharding=chip)
    memory = jax.jit(grads).lower(host, x).compile().memory_analysis()
    assert memory.host_argument_size_in_bytes == shapes["stack"].nbytes


@compiles_for_tpu
@pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache:UserWarning")
def test_tpu_compiles_rows_that_are_narrow_on_each_chip():
    """The layout of a stack with fewer than 128 columns is another one, which the slice on the host has to keep."""
    decoder = Decoder(512, 4, 1024, 4, "v5e:2x2", 4, kv_heads=2, vocabulary=1024, length=512)
    mesh = decoder.mesh()
    shapes = fz.offload(decoder.params(mesh), frozen := fz.all_except("**/before"))

    def on_the_host(x, shape):
        return jax.device_put(x, jax.memory.Space.Host) if shape.sharding.memory_kind == "pinned_host" else x

    def grads(params, tokens):
        return fz.grad(decoder.loss(mesh), frozen)(jax.tree.map(on_the_host, params, shapes), tokens)

    memory = jax.jit(grads).lower(shapes, decoder.tokens(mesh)).compile().memory_analysis()
    assert memory.host_argument_size_in_bytes > 0
