"""Computes the shardings of an optimizer state from the shardings of the parameters.

``tx.init`` does not read the values of the parameters. So a jitted ``init`` does not determine the sharding of its
zeros, and XLA replicates them. Here arrays of the state are matched to parameters by path. A moment, its rows or a mask
gets the sharding of its parameter.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from optax_freeze._errors import described, is_array, value_error
from optax_freeze._optimizer.as_transformation import as_transformation
from optax_freeze._optimizer.init_with import eval_init
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import on_device
from optax_freeze._spec.sharding import fitting
from optax_freeze._spec.tree import PyTree
from optax_freeze._state.parameter_of import parameter_of


class Placed(NamedTuple):
    """The shape and the sharding of a parameter."""

    shape: tuple[int, ...]
    sharding: Sharding


def state_shardings(tx: optax.GradientTransformation | optax.MultiSteps, params: PyTree) -> PyTree:
    """Computes the shardings of an optimizer state from the shardings of the parameters.

    Args:
      tx: any optimizer, with or without freezing.
      params: the argument of ``tx.init``: sharded arrays, or ``jax.ShapeDtypeStruct`` with a ``sharding``.

    Returns:
      A tree with the structure of ``tx.init(params)`` and a sharding for each array. Moments, accumulators and dense
      masks have the sharding of their parameter. So do trainable rows, except along an axis whose size the mesh does
      not divide, where they are replicated. A history of a parameter has its leading axes unsharded, followed by the
      parameter's sharding. Arrays of any other shape (counts, factored moments, compact elements) are replicated. All
      shardings are in device memory, even if parameters are in host memory.

    Raises:
      TypeError: if ``tx`` is not an optimizer.
      ValueError: if an array of the parameters has no sharding, or one that is neither a ``NamedSharding`` nor a
        ``SingleDeviceSharding``; if the parameters are on different meshes.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> kernel = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
      >>> params = {"encoder": kernel, "head": kernel}
      >>> tx = fz.freeze(optax.adam(1e-3), "encoder")
      >>> shardings = fz.state_shardings(tx, params)
      >>> [tuple(sharding.spec) for sharding in jax.tree.leaves(shardings)]  # a count, two moments of the head
      [(), ('data',), ('data',)]
      >>> init = jax.jit(tx.init, out_shardings=shardings)
    """
    tx = as_transformation(tx, "fz.state_shardings(tx, params)", other=params)
    leaves = _tree.flatten(params)[0]
    arrays = {path: leaf for path, leaf in zip(_tree.paths(params), leaves, strict=True) if is_array(leaf)}
    placed = {path: _placed(path, _tree.bare(leaf)) for path, leaf in arrays.items()}
    default = _replicated(placed)

    nodes, treedef = _tree.flatten(eval_init(tx.init, params))
    paths = _tree.paths(jax.tree.unflatten(treedef, nodes))
    owner_of = parameter_of(paths, placed)
    shardings = []
    for path, node in zip(paths, nodes, strict=True):
        owner = owner_of(path)
        parameter = None if owner is None else placed[owner]
        shardings.append(jax.tree.map(lambda x, p=parameter: beside(x, p, default) if is_array(x) else x, node))
    return jax.tree.unflatten(treedef, shardings)


def _placed(path: str, leaf: Any) -> Placed:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
        raise value_error(
            "a parameter without a usable sharding",
            at=path,
            got=described(leaf) if sharding is None else repr(sharding),
            expected="a jax.sharding.NamedSharding, or an array on a single device",
            fix="jax.device_put(params, shardings), or jax.ShapeDtypeStruct(shape, dtype, sharding=...)",
        )
    return Placed(tuple(leaf.shape), on_device(sharding))


def _replicated(placed: Mapping[str, Placed]) -> Sharding:
    """The sharding of arrays that do not belong to a parameter: replicated over the mesh of the parameters."""
    named = {path: sharding for path, (_, sharding) in placed.items() if isinstance(sharding, NamedSharding)}
    if not named:
        return next((sharding for _, sharding in placed.values()), SingleDeviceSharding(jax.devices()[0]))
    first, mesh = next((path, sharding.mesh) for path, sharding in named.items())
    for path, sharding in named.items():
        if sharding.mesh != mesh:
            raise value_error(
                "parameters on different meshes",
                at=path,
                got=f"{sharding.mesh}, and {mesh} at {first}",
                expected="one mesh",
                fix="give all parameters shardings over one mesh; jax.sharding.PartitionSpec() replicates",
            )
    return NamedSharding(mesh, PartitionSpec())


def beside(array: Any, owner: Placed | None, default: Sharding) -> Sharding:
    """The sharding of an array of the state, given the parameter that it belongs to."""
    if owner is None or not isinstance(owner.sharding, NamedSharding):
        return default
    if array.shape == owner.shape:
        return owner.sharding
    ahead = len(array.shape) - len(owner.shape)
    sizes = array.shape[max(ahead, 0) :]
    if ahead < 0 or sum(size != whole for size, whole in zip(sizes, owner.shape, strict=True)) > 1:
        return default
    return fitting(owner.sharding, len(owner.shape), array.shape)
