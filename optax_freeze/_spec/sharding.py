"""Shardings: a result has the sharding of the leaf that it belongs to.

On a mesh with explicit axes JAX refuses operations whose output sharding is ambiguous: a gather along a sharded axis, a
flattened array. Here every result gets the sharding of its leaf, and XLA partitions the operation as on another mesh.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
    reshard,
    use_abstract_mesh,
)

from optax_freeze._errors import is_concrete

NO_MESH = AbstractMesh((), ())


def explicit_sharding(like: Any, shape: Sequence[int] | None = None) -> NamedSharding | None:
    """The sharding of an array, or a similar one for ``shape``; None unless its mesh has explicit axes."""
    return sharding_in(jax.typeof(like), shape)


def sharding_in(aval: Any, shape: Sequence[int] | None = None) -> NamedSharding | None:
    """:func:`explicit_sharding` of an array of this type."""
    sharding: Any = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding if shape is None else fitting(sharding, len(aval.shape), shape)


def eval_types(function: Callable[..., Any], *args: Any) -> Any:
    """``jax.eval_shape``, which drops the shardings on a mesh that has other than explicit axes."""
    traced = jax.jit(function).trace(*args)
    structs, treedef = jax.tree.flatten(traced.out_info)
    pairs = zip(structs, map(sharding_in, traced.jaxpr.out_avals), strict=True)
    return treedef.unflatten([x if sharding is None else x.update(sharding=sharding) for x, sharding in pairs])


def fitting(sharding: NamedSharding, ndim: int, shape: Sequence[int]) -> NamedSharding:
    """The sharding of an array of ``ndim`` axes for ``shape``, aligned at the last axes, where the mesh divides it."""
    mesh, spec = sharding.mesh, sharding.spec
    ahead = len(shape) - ndim
    names = (*[None] * ahead, *spec, *[None] * (ndim - len(spec))) if ahead >= 0 else [None] * len(shape)
    axes = [
        axis if size % math.prod(mesh.shape[name] for name in _names(axis)) == 0 else None
        for size, axis in zip(shape, names, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*axes), memory_kind=sharding.memory_kind)


def with_sharding(sharding: NamedSharding | None, operation: Callable[..., jax.Array], *args: Any) -> jax.Array:
    """``operation(*args)``; if ``sharding`` is given, partitioned by XLA and with this output sharding."""
    if sharding is None:
        return operation(*args)
    kinds = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    automatic: Any = jax.sharding.auto_axes(operation, axes=axes, out_sharding=sharding)
    return automatic(*args)


def laid_out(array: Any, aval: Any) -> Any:
    """A part of an array of this type with its explicit sharding, where the mesh divides the part."""
    if sharding_in(aval) is None or not isinstance(array, jax.Array):
        return array
    sharding: Any = sharding_in(aval, array.shape)
    if sharding.spec == jax.typeof(array).sharding.spec:
        return array
    with in_mesh_of(array):
        return reshard(array, sharding)


def undivided(array: Any) -> Any:
    """The whole array on each device, if explicit axes of a mesh divide it."""
    sharding = explicit_sharding(array)
    if sharding is None or not any(sharding.spec):
        return array
    with in_mesh_of(array):
        return reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))


def in_mesh_of(array: Any) -> contextlib.AbstractContextManager[Any]:
    """A context with the mesh of an array's type: inside of ``jax.sharding.auto_axes`` it is another than outside."""
    return _in_mesh(jax.typeof(array).sharding.mesh)


def _in_mesh(mesh: AbstractMesh) -> contextlib.AbstractContextManager[Any]:
    current = get_abstract_mesh()
    return contextlib.nullcontext() if current.empty or mesh in (current, NO_MESH) else use_abstract_mesh(mesh)


def in_this_mesh(array: Any) -> Any:
    """An array in the mesh of the context, divided along the axes that are explicit in it, too."""
    mesh, sharding = get_abstract_mesh(), jax.typeof(array).sharding
    if mesh.empty or sharding.mesh in (mesh, NO_MESH):
        return array
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = [tuple(n for n in _names(axis) if kinds.get(n) == AxisType.Explicit) for axis in sharding.spec]
    return reshard(array, NamedSharding(mesh, PartitionSpec(*(axis or None for axis in axes))))


def in_mesh_of_type(array: Any, aval: Any) -> Any:
    """An array in the mesh of a type."""
    with _in_mesh(aval.sharding.mesh):
        return in_this_mesh(array)


def varies(aval: Any) -> frozenset[str]:
    """The mesh axes over which a value varies inside ``jax.shard_map``, by its type."""
    if hasattr(aval, "vma"):
        return aval.vma
    return aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else frozenset()


def cast_to_vary(array: Any, axes: Any) -> jax.Array:
    """An array that varies over these mesh axes, too, inside ``jax.shard_map``."""
    new, lax = tuple(sorted(set(axes) - varies(jax.typeof(array)))), jax.lax
    if not new:
        return array
    return lax.pcast(array, new, to="varying") if hasattr(lax, "pcast") else lax.pvary(array, new)  # type: ignore[attr-defined]


def filled(aval: Any, value: Any, shape: Any = None) -> jax.Array:
    """An array of one value, laid out as an array of this type, or of another ``shape``."""
    shape = aval.shape if shape is None else tuple(shape)
    with _in_mesh(aval.sharding.mesh):
        return cast_to_vary(jax.lax.full(shape, value, aval.dtype, sharding=sharding_in(aval, shape)), varies(aval))


def zeros(aval: Any, shape: Any = None) -> jax.Array:
    """Zeros laid out as an array of this type, or of another ``shape``."""
    return filled(aval, 0, shape)


def _names(axis: Any) -> tuple[str, ...]:
    return () if axis in (None, PartitionSpec.UNCONSTRAINED) else axis if isinstance(axis, tuple) else (axis,)


def copy_like(array: Any, like: Any) -> jax.Array:
    """A copy of ``array`` on the devices of ``like``."""
    copy = jnp.array(array)
    if is_concrete(copy) and isinstance(like, jax.Array) and is_concrete(like) and like.committed:
        return jax.device_put(copy, like.sharding if copy.shape == like.shape else replicated(like.sharding))
    return copy


def replicated(sharding: Any) -> Any:
    """The sharding of an array of another shape on the same devices."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
