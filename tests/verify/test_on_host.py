"""What is frozen in the host's memory is compared and hashed in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze._spec.selection import FROZEN
from optax_freeze._verify import bits as _bits

SHAPE = (6, 16, 2)
SPECS = {
    "all": True,
    "rows": {"w": fz.rows([0, 4])},
    "rows of another axis": {"w": fz.rows(slice(3, 9), axis=1)},
    "elements": {"w": np.arange(192).reshape(SHAPE) % 3 == 0},
    "dynamic rows": {"w": fz.rows(jnp.array([1, 5]))},
}
SHARDINGS = {"one device": None, "a mesh": P(None, "x"), "its first axis": P(("x",)), "replicated": P()}


def leaf(dtype):
    raw = np.random.default_rng(0).integers(0, 256, (*SHAPE, np.dtype(jnp.dtype(dtype)).itemsize), np.uint8)
    return raw.view(jnp.dtype(dtype))[..., 0] if dtype != "bool" else raw[..., 0] > 99


def sharding_of(name, kind=AxisType.Auto):
    if SHARDINGS[name] is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    return NamedSharding(mesh, SHARDINGS[name], memory_kind="pinned_host")


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_bits, "_BLOCK_BYTES", 400)
        yield


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", SHARDINGS)
def test_the_digest_is_that_of_the_device(name, spec):
    value = leaf("float32")
    host = {"w": jax.device_put(value, sharding_of(name))}
    assert (fz.fingerprint(host, spec) == fz.fingerprint({"w": value}, spec)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "int8", "bool", "complex64"])
def test_of_any_dtype_also_inside_of_jit(dtype):
    host = {"w": jax.device_put(leaf(dtype), sharding_of("a mesh"))}
    digest = fz.fingerprint({"w": leaf(dtype)}, True)
    assert (fz.fingerprint(host, True) == digest).all()
    assert dtype != "bfloat16" or (jax.jit(lambda tree: fz.fingerprint(tree, True))(host) == digest).all()


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="XLA could not partition it")
def test_on_a_mesh_with_explicit_axes():
    for name in ("a mesh", "its first axis"):
        host = {"w": jax.device_put(leaf("float32"), sharding_of(name, AxisType.Explicit))}
        for spec in (True, SPECS["rows"], SPECS["elements"]):
            assert (fz.fingerprint(host, spec) == fz.fingerprint({"w": leaf("float32")}, spec)).all()


@pytest.mark.parametrize("shape", [(), (5,), (0, 3, 2)])
def test_of_any_shape(shape):
    array = np.ones(shape, np.float32)
    host = {"w": jax.device_put(array, sharding_of("one device"))}
    assert (fz.fingerprint(host, True) == fz.fingerprint({"w": array}, True)).all()
    fz.assert_frozen(host, {"w": array}, True)


@pytest.mark.parametrize(("name", "spec"), list(zip(SHARDINGS, SPECS.values(), strict=False)))
def test_a_moved_element_is_found(name, spec):
    value = np.where(np.isnan(leaf("float32")), np.float32(1), leaf("float32"))
    other = value.copy()
    other[4, 3, 1] = np.nan
    other[5, 9, 1] = value[5, 9, 1] + 1
    host = jax.device_put(value, sharding_of(name))
    fz.assert_frozen({"w": host}, {"w": value}, spec)

    def told(before, after):
        with pytest.raises(AssertionError) as error:
            fz.assert_frozen({"w": before}, {"w": after}, spec)
        return str(error.value)

    expected = told(value, other)
    assert told(host, other) == told(jnp.asarray(value), jax.device_put(other, sharding_of("a mesh"))) == expected
    assert told(host, jax.device_put(other, sharding_of("a mesh"))) == expected


def test_no_array_of_the_size_of_the_stack_is_made_on_the_device():
    host = jax.device_put(np.zeros((64, 256, 256), np.float32), sharding_of("one device"))
    for program in (_bits.digest.lower(host, np.zeros(4, np.uint32), FROZEN), _bits.count.lower(host, host, FROZEN)):
        assert program.compile().memory_analysis().temp_size_in_bytes < host.nbytes / 2
