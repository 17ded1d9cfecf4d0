"""Keeps frozen stacks of weights in host memory, from where each layer is read when it is needed.

Programs read frozen weights layer by layer in a known order, so the weights need not be stored on the device. With JAX
alone you call ``jax.device_put`` with a memory kind for each leaf. Here the spec decides which leaves can be moved.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from optax_freeze._errors import type_error, value_error, whole_number
from optax_freeze._optimizer.freeze_when import FreezeWhenState
from optax_freeze._optimizer.group_state import GroupState
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import HOST, is_in_blocks, is_on_host, on_device, to_device
from optax_freeze._spec.numpy_leaves import is_converted
from optax_freeze._spec.plan import may_stay_on_host
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.selection import FROZEN, Selection
from optax_freeze._spec.tree import Leaf, PyTree, Rest
from optax_freeze._state.own_states import map_states, states_in
from optax_freeze._state.set_frozen import currently_frozen


def offload(tree: PyTree, frozen: Spec | None = None, *, tables: Spec | None = None, min_bytes: int = 2**20) -> PyTree:
    """Moves frozen stacks of weights to host memory, from where programs read them layer by layer.

    A leaf is moved if it has three or more axes and at least ``min_bytes`` bytes, and is frozen completely or by static
    rows; a matrix also if it is named in ``tables``. It keeps its sharding, with the memory kind ``pinned_host``. All
    other leaves are returned unchanged, as the same objects: trainable parameters, leaves with dense masks or dynamic
    rows, vectors and other matrices, PRNG keys, and objects. A leaf that is on the host already stays there while it is
    frozen, and returns to the device if it is trainable under this spec. An array at several paths is moved only if it
    can be moved at each of them.

    No test has run on a GPU or a TPU yet: compare the gradients on yours with those from device memory first. A
    released XLA for GPU read stacks on the host in the wrong order in reversed scans (openxla/xla#46231).

    For an optimizer state of :func:`optax_freeze.freeze_when`, ``fz.offload(state)`` moves the arrays of groups that
    are frozen now to the host, and those of trainable groups back to the device. Updates work with either. Call it
    again between steps whenever groups freeze or unfreeze. Each such change needs another compiled step.

    Args:
      tree: any pytree of arrays. NumPy arrays are moved to pinned host memory directly, without using device memory.
        NumPy arrays whose dtype JAX would truncate (float64 without 64-bit mode) are not moved. Inside ``jit``, the
        compiler moves the arrays (since JAX 0.10). A ``jax.ShapeDtypeStruct`` gets the sharding of the moved array,
        and nothing is allocated.
      frozen: the spec of the frozen parameters, in any form. Omit it for an optimizer state.
      tables: a spec of the matrices in which the loss only looks up rows, such as embeddings. They are moved like
        stacks. Each needs a multiple of 8 rows and of 128 columns, and its rows may not be divided among devices.
      min_bytes: the minimum size of a leaf to be moved, in bytes over all devices.

    Returns:
      The tree with the moved leaves. Drop the old tree to free device memory.

    Raises:
      ValueError: if the spec does not fit; if rows of a table cannot be read from the host; if ``min_bytes`` is
        negative; if the devices have no pinned host memory; if the array types of this JAX release do not include the
        memory space.
      TypeError: if ``min_bytes`` is not an int, or ``frozen`` is missing.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> params = {"layers": jnp.ones((4, 256, 512)), "head": jnp.ones((512, 8))}
      >>> params = fz.offload(params, "layers")
      >>> params["layers"].sharding.memory_kind, params["head"].sharding.memory_kind
      ('pinned_host', 'device')
      >>> trainable, rest = fz.partition(params, "layers")
      >>> rest["layers"] is params["layers"]
      True
    """
    fix = "min_bytes=2**20, or 0 to move every frozen array of three or more axes"
    min_bytes = whole_number("min_bytes", min_bytes, fix=fix)
    if frozen is None and tables is None and states_in(tree, FreezeWhenState):
        return _with_idle_groups(tree, min_bytes)
    if frozen is None:
        raise type_error(
            "fz.offload needs a spec",
            at="fz.offload",
            got="a tree without a spec",
            expected="fz.offload(params, frozen), or fz.offload(state) with the state of fz.freeze_when",
            fix='give the spec: fz.offload(params, "layers"), fz.offload(params, fz.all_except("head"))',
        )
    plan = make_plan(tree, frozen).in_state
    values, treedef = _tree.flatten(tree)
    named = [False] * len(values)
    if tables is not None:
        named = [selection is FROZEN for selection in make_plan(tree, tables).in_state.selections]
    streams = [_streams(*each, min_bytes=min_bytes) for each in plan.entries(values, named)]
    stays = {id(value) for value, moves in zip(values, streams, strict=True) if not moves}
    moves = {id(value): value for value in values if id(value) not in stays}  # an array at two paths only once
    moved = {number: _to_host(value) for number, value in moves.items()}
    back = [v if may_stay_on_host(selection) else _to_device(v) for _, selection, v in plan.entries(values)]
    return jax.tree.unflatten(treedef, [moved.get(id(v), other) for v, other in zip(values, back, strict=True)])


def _with_idle_groups(state: PyTree, min_bytes: int) -> PyTree:
    """Moves the arrays of frozen groups to the host, except small ones, and those of the other groups to the device."""

    def placed(leaf: Any, is_idle: bool) -> Any:
        if not isinstance(leaf, jax.Array) or not leaf.ndim or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            return leaf
        if not is_idle:
            return _to_device(leaf)
        return _to_host(leaf) if is_on_host(leaf) or leaf.nbytes >= min_bytes else leaf

    def in_group(group: GroupState, is_idle: bool) -> GroupState:
        return group._replace(inner_state=jax.tree.map(lambda leaf: placed(leaf, is_idle), group.inner_state))

    def visit(node: Any) -> Any:
        frozen = currently_frozen(node)
        if any(isinstance(idle, Tracer) for idle in frozen.values()):
            raise value_error(
                "the currently frozen groups are not known inside jit",
                at="fz.offload(state)",
                got="a traced state",
                expected="a state with values, since the memory of its arrays is part of the compiled program",
                fix="call fz.offload(state) between steps, after the step in which groups freeze or thaw",
            )
        return node._replace(groups={name: in_group(node.groups[name], frozen[name]) for name in node.groups})

    return map_states(visit, state, FreezeWhenState)


def _streams(leaf: Leaf, selection: Selection, value: Any, is_table: bool, *, min_bytes: int) -> bool:
    """Whether a leaf can be read from the host: a large stack or table that is frozen completely or by static rows."""
    selection = value.selection if isinstance(value, Rest) else selection
    if leaf.shape is None or leaf.index is not None or not may_stay_on_host(selection):
        return False
    if len(leaf.shape) < (2 if is_table else 3) or is_converted(value):
        return False
    is_number = not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended) and leaf.dtype != jax.dtypes.float0
    if not is_number or math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize < min_bytes:
        return False
    if len(leaf.shape) == 2:
        _refuse_unreadable_rows(value, leaf.path, leaf.shape)
    return True


def _refuse_unreadable_rows(value: Any, path: str, shape: tuple[int, ...]) -> None:
    sharding = getattr(value.array if isinstance(value, Rest) else value, "sharding", None)
    of_device = shape if sharding is None else sharding.shard_shape(shape)
    if not (is_in_blocks(of_device) and of_device[0] == shape[0]):
        raise value_error(
            "rows of this table cannot be read from the host",
            at=path,
            got=f"shape {shape}" + f", of which each device has {of_device}" * (of_device != shape),
            expected="all rows on each device, a multiple of 8, and a multiple of 128 columns",
            fix="leave it out of tables=, so that it stays on the device, or add rows that are never looked up",
        )


def _to_host(value: Any) -> Any:
    """The leaf in host memory; the same object if it is there already."""
    if isinstance(value, Rest):
        return dataclasses.replace(value, array=_to_host(value.array))
    if is_on_host(value) or not isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return value
    if isinstance(value, Tracer):
        return jax.device_put(value, jax.memory.Space.Host)
    sharding = getattr(value, "sharding", None) or default_sharding()
    _refuse_no_host_memory(sharding)
    return _placed(value, _with_rows_apart(value, sharding.with_memory_kind(HOST)))


def _to_device(value: Any) -> Any:
    if not is_on_host(value):
        return value
    return to_device(value) if isinstance(value, Tracer) else _placed(value, on_device(value.sharding))


def _with_rows_apart(value: Any, sharding: Sharding) -> Any:
    """A sharding in host memory, for 8-bit values on a TPU with a layout from which it can read single rows.

    By default a TPU stores 8-bit values in tiles of 32 rows. It cannot slice these tiles, and copies the whole stack.
    """
    platforms = {device.platform for device in _devices(sharding)}
    if platforms != {"tpu"} or np.dtype(value.dtype).itemsize != 1:
        return sharding
    return Format(Layout(tuple(range(value.ndim)), ((8, 128), (4, 1))), sharding)


def _placed(value: Any, sharding: Any) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding, weak_type=value.weak_type)
    return jax.device_put(value, sharding)


def default_sharding() -> Sharding:
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if not device or isinstance(device, str):  # the name of a backend
        device = jax.local_devices(backend=device)[0]
    return SingleDeviceSharding(device)


def _refuse_no_host_memory(sharding: Sharding) -> None:
    for device in _devices(sharding):
        kinds = _memory_kinds(device)
        if kinds is not None and HOST not in kinds:
            raise value_error(
                "a device without pinned host memory",
                at=str(device),
                got=f"memory of the kinds {', '.join(kinds)}",
                expected=f"a device that reads from {HOST!r}, as GPUs, TPUs and JAX's CPU backend do",
                fix="keep the parameters on the device; on a mesh with more devices, each device stores less",
            )


def _devices(sharding: Sharding) -> set[Any]:
    """The devices of a sharding; an empty set for an ``AbstractMesh``."""
    is_abstract = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)
    return set() if is_abstract else sharding.device_set


def _memory_kinds(device: Any) -> list[str] | None:
    """The memory kinds of a device, or None if unknown, as for devices of other processes or of a topology."""
    try:
        return [memory.kind for memory in device.addressable_memories()] or None
    except Exception:
        return None
