"""Computes the shardings of an optimizer state from the shardings of the parameters.

A jitted ``init`` does not read the values of the parameters, so XLA stores the zeros that it makes as a whole. Here a
moment, its rows or a mask gets the sharding of its parameter.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from optax_freeze._errors import described, is_array, value_error
from optax_freeze._optimizer.call_init import eval_init
from optax_freeze._optimizer.transformation import as_transformation
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import on_device
from optax_freeze._spec.sharding import fitting
from optax_freeze._spec.tree import PyTree
from optax_freeze._state.owning_parameter import parameter_of
from optax_freeze._state.state_entries import entries_of


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
        ``SingleDeviceSharding``; if the parameters are on different meshes; if ``tx.init(params)`` raises it.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> params = {"head": jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, PartitionSpec("data")))}
      >>> tx = optax.adam(1e-3)
      >>> shardings = fz.state_shardings(tx, params)
      >>> [tuple(sharding.spec) for sharding in jax.tree.leaves(shardings)]  # a count, two moments
      [(), ('data',), ('data',)]
      >>> state = jax.jit(tx.init, out_shardings=shardings)(params)
    """
    tx = as_transformation(tx, "fz.state_shardings(tx, params)", other=params)
    leaves = zip(_tree.paths(params), _tree.flatten(params)[0], strict=True)
    placed = {path: _placed(path, _tree.bare(leaf)) for path, leaf in leaves if is_array(leaf)}
    default = _replicated(placed)
    addresses: list[str] = []

    def init(params: PyTree) -> PyTree:
        state = tx.init(params)
        # By their addresses, but not by their paths, the moments of all groups are one tree of parameters.
        entries = entries_of(state, {path: its.shape for path, its in placed.items()})
        found = [entry.address for entry in entries for _ in range(entry.nodes)]
        pairs = zip(_tree.paths(state), found, strict=True)
        addresses.extend(path if address is None else address for path, address in pairs)
        return state

    state = eval_init(init, params)
    nodes, treedef = _tree.flatten(state)
    owner_of = parameter_of(addresses, placed)
    shardings = []
    for owner, node in zip(map(owner_of, addresses), nodes, strict=True):
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
