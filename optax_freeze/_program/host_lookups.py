"""Operations whose rows of an operand are values of the program: lookups, and products with the experts of a layer.

If the operand is in host memory, only these rows are brought to the device.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode
from jax.sharding import AxisType, NamedSharding

from optax_freeze._program.deferred import Reader, part_of
from optax_freeze._program.regions import EVERYTHING, DynamicRows, clipped
from optax_freeze._program.symbolic import if_undecided
from optax_freeze._program.trace import Equation
from optax_freeze._spec.sharding import zeros

_MOST_TOKENS = 512
"""The most rows of the left operand that are multiplied by an expert at once."""


@if_undecided(None)
def host_lookup(eqn: Equation) -> tuple[int, Callable[..., jax.Array]] | None:
    """Which operand an operation reads row by row, and how it is applied if this operand is unread."""
    if eqn.primitive is jax.lax.gather_p and _is_lookup(eqn):
        axes = _axes(eqn)
        is_matrix = len(eqn.avals_in[0].shape) == 2  # `offload` moves matrices only if their rows are not divided
        return (0, _looked_up) if not axes or (axes == {AxisType.Auto} and is_matrix) else None
    if eqn.primitive.name == "ragged_dot_general" and _has_experts(eqn) and not _axes(eqn):
        return 1, _by_experts
    return None


def _axes(eqn: Equation) -> set[AxisType]:
    """The kinds of mesh axes that may divide rows of an operand; its type does not say it of automatic axes."""
    shardings = [aval.sharding for aval in eqn.avals_in]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    return {kind for mesh in meshes if mesh.size > 1 for kind in mesh.axis_types} - {AxisType.Manual}


def _is_lookup(eqn: Equation) -> bool:
    """Whether each index of a gather reads one row; more indices than rows would read the rows several times."""
    numbers, (operand, indices) = eqn.params["dimension_numbers"], eqn.avals_in
    return 0 in numbers.start_index_map and 0 in numbers.collapsed_slice_dims and _count(indices) < operand.shape[0]


def _count(indices: Any) -> int:
    return math.prod(indices.shape[:-1])


def _has_experts(eqn: Equation) -> bool:
    """Whether rows of a matrix are multiplied, each by the expert of its group; not a gradient of the experts."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (of_left, of_right), batch = numbers.dot_dimension_numbers
    ranks = [len(aval.shape) for aval in eqn.avals_in]
    is_product = (*map(tuple, batch), tuple(of_left), len(of_right)) == ((), (), (1,), 1) and ranks == [2, 3, 1]
    return is_product and tuple(numbers.rhs_group_dimensions) == (0,) and eqn.params["group_offset"] is None


def _looked_up(eqn: Equation, operands: Sequence[Any], reader: Reader) -> jax.Array:
    """The lookup in an array of the rows that are read, each once; rows out of range are again out of range."""
    table, indices = operands[0], jnp.asarray(operands[1])
    place, size = eqn.params["dimension_numbers"].start_index_map.index(0), table.shape[0]
    row, count = indices[..., place], _count(indices)
    inside = clipped(row, size - 1)
    rows, found = jnp.unique(inside, return_inverse=True, size=count)
    found = found.reshape(row.shape)
    if eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP:
        found = jnp.where((row >= 0) & (row <= inside.astype(row.dtype)), found, count)
    indices = indices.astype(jnp.int32).at[..., place].set(found)
    unsorted = {"indices_are_sorted": False, "unique_indices": False}
    return eqn.bind(table.read(DynamicRows(0, rows), reader), indices, **unsorted)


def _by_experts(eqn: Equation, operands: Sequence[Any], reader: Reader) -> jax.Array:
    """The product of each group with its expert, one expert after the other. Experts without rows are not read."""
    experts = operands[1]
    left, sizes = jnp.asarray(operands[0]), jnp.asarray(operands[2], jnp.int32)  # of any integer type, maybe NumPy
    [_, [summed]], _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    ends, count = jnp.cumsum(sizes), left.shape[0]
    at_once = min(count, _MOST_TOKENS)
    used, (aval,) = jnp.argsort(sizes == 0, stable=True), eqn.avals_out

    def product(rows: jax.Array, expert: jax.Array) -> jax.Array:
        how = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
        return jax.lax.dot_general(rows, expert, (((1,), (summed - 1,)), ((), ())), **how)

    def of_expert(n: Any, out: jax.Array) -> jax.Array:
        i = used[n]
        expert, stop = part_of(experts.row(i), EVERYTHING, reader._replace(beside=None)), ends[i]
        first = stop - sizes[i]

        def of_rows(k: Any, out: jax.Array) -> jax.Array:
            start = jnp.minimum(first + k * at_once, count - at_once)
            rows = jax.lax.dynamic_slice_in_dim(left, start, at_once)
            before = jax.lax.dynamic_slice_in_dim(out, start, at_once)
            numbers = start + jnp.arange(at_once)
            is_here = ((numbers >= first) & (numbers < stop))[:, None]
            new = jnp.where(is_here, product(rows, expert), before)
            return jax.lax.dynamic_update_slice_in_dim(out, new, start, 0)

        return jax.lax.fori_loop(0, -(-sizes[i] // at_once), of_rows, out)

    return jax.lax.fori_loop(0, jnp.count_nonzero(sizes), of_expert, zeros(aval))
