"""Moves the optimizer state of groups that are frozen now, which updates do not read, to host memory."""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from optax_freeze._errors import value_error
from optax_freeze._optimizer.freeze_when import FreezeWhenState
from optax_freeze._optimizer.group_state import GroupState
from optax_freeze._spec.memory_kinds import is_on_host
from optax_freeze._spec.tree import PyTree
from optax_freeze._state.own_states import map_states
from optax_freeze._state.set_frozen import currently_frozen


def with_idle_groups(
    state: PyTree, min_bytes: int, to_host: Callable[[Any], Any], to_device: Callable[[Any], Any]
) -> PyTree:
    """Moves the arrays of frozen groups to the host, except small ones, and those of the other groups to the device."""

    def placed(leaf: Any, is_idle: bool) -> Any:
        if not isinstance(leaf, jax.Array) or not leaf.ndim or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            return leaf
        if not is_idle:
            return to_device(leaf)
        return to_host(leaf) if is_on_host(leaf) or leaf.nbytes >= min_bytes else leaf

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
