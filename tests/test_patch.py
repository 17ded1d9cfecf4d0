"""A patch has what trained, bit for bit, in a file that others read; it returns onto its base, and onto no other."""

import json
import pathlib
import pickle
import subprocess
import sys

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from conftest import bits
from flax import nnx
from flax.core import FrozenDict
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


class Norm(eqx.Module):
    scale: jax.Array
    act: object
    eps: float = 1e-5


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(2, name="head")(nn.Dense(3, kernel_init=init, name="encoder")(x))


TREES = {
    "dict": (lambda: {"encoder": normal(0, 4, 3), "head": normal(1, 2)}, "encoder"),
    "FrozenDict": (lambda: FrozenDict({"encoder": normal(0, 4, 3), "head": normal(1, 2)}), "encoder"),
    "boxed Linen": (lambda: Boxed().init(jax.random.key(0), jnp.ones((1, 4)))["params"], "encoder/bias"),
    "nnx.State": (lambda: nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param), "bias"),
    "Equinox": (lambda: [Norm(normal(0, 3), jax.nn.relu), Norm(normal(1, 3), jax.nn.gelu)], "0"),
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
    "dynamic rows, one out of range": (lambda: {"a": normal(0, 6, 3)}, jax.jit(lambda n: {"a": ~fz.rows(n)})),
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
    if name == "dynamic rows, one out of range":
        frozen = frozen(jnp.array([2, 6]))
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
