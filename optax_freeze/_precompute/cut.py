"""Divides a program into a part that is computed once and the rest, so that the fewest bytes are stored in between.

This is a minimum cut. Storing a value costs its bytes, repeating a cheap operation on available operands costs nothing,
and inputs of the program are always available. The flow algorithm comes from scipy, a dependency of JAX.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from optax_freeze._precompute.graph import Graph, Node
from optax_freeze._program.operations import ELEMENTWISE

CHEAP = f"""{ELEMENTWISE}
argmax argmin axis_index bitcast_convert_type broadcast_in_dim clz complex concatenate dynamic_slice expand_dims iota
layout_constraint log2 mesh_cast optimization_barrier pad pcast random_unwrap random_wrap reduce_and reduce_max
reduce_min reduce_or reduce_prod reduce_sum reduce_xor reshape reshard rev sharding_constraint slice split squeeze stack
tile transpose unstack
"""
"""Operations that cost about as much as reading their operands. Each step repeats them instead of storing results."""

_PROGRAMS = "checkpoint custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr jit pjit remat remat2"
"""Operations that contain a program, and are cheap if all operations in it are."""

_INFINITE = 2**30
"""More than the bytes of all values, counted in units chosen so that this holds: scipy's flow is limited to 32 bits."""


class Cut(NamedTuple):
    """The values to store, and the operations before and after the cut."""

    stored: list[int]
    before: list[Node]
    after: list[Node]


class NoCut(NamedTuple):
    """There is no cut, because this value would have to be stored and cannot be."""

    value: int


def is_cheap(eqn: Any) -> bool:
    """Whether an operation is repeated in each step rather than its results stored."""
    name = eqn.primitive.name
    if name in CHEAP.split():
        return True
    programs = [getattr(value, "jaxpr", value) for value in eqn.params.values()]
    inner = [program for program in programs if isinstance(program, Jaxpr)]
    return name in _PROGRAMS.split() and bool(inner) and all(is_cheap(eqn) for program in inner for eqn in program.eqns)


def after_of(graph: Graph) -> tuple[list[Node], set[int]]:
    """The operations needed in each step, and the known values read by these operations or by the outputs.

    These are the operations that cannot be computed beforehand and that an output depends on, or that have effects.
    """
    wanted = set(graph.outputs)
    nodes = []
    for node in reversed(graph.nodes):
        matters = any(value in wanted and not graph.known[value] for value in node.outputs)
        if matters or node.eqn.has_effects:
            nodes.append(node)
            wanted |= node.reads
    return nodes[::-1], {value for value in wanted if graph.known[value]}


def first_dependent(graph: Graph, why_not: Sequence[str]) -> list[tuple[Node, str]]:
    """On each path, the first operation that reads a computed value but cannot be computed beforehand, and why.

    ``why_not`` gives the reason why each input is not known, or an empty string if it is known.
    """
    inputs = {i: value for i, (value, _) in enumerate(graph.regions) if value < len(why_not)}
    why = {i: why_not[value] for i, value in inputs.items() if not graph.known[i]}
    computed = {i for i in inputs if graph.known[i]}
    passed, found = set(), []
    matters = {id(node) for node in after_of(graph)[0]}
    for node in graph.nodes:
        reasons = [why[value] for value in node.reads if value in why]
        if all(graph.known[value] for value in node.outputs) and not node.eqn.has_effects:
            if not computed.isdisjoint(node.reads):
                computed.update(node.outputs)
            continue
        reason = reasons[0] if reasons else "an effect" if node.eqn.has_effects else "a value of an enclosing trace"
        why.update(dict.fromkeys(node.outputs, reason))
        if not passed.isdisjoint(node.reads):
            passed.update(node.outputs)
        elif not computed.isdisjoint(node.reads) or node.eqn.has_effects:
            passed.update(node.outputs)
            if id(node) in matters:
                found.append((node, reason))
    return found


def minimum_cut(graph: Graph, dear: Sequence[bool], cost: Sequence[int | None]) -> Cut | NoCut:
    """Finds the values to store with the fewest bytes in total; among equal cuts, the last one in the program.

    Args:
      graph: the tasks of the program.
      dear: for each node, whether it is too expensive to repeat.
      cost: for each value, its bytes, or None if it cannot be stored.
    """
    after, wanted = after_of(graph)
    made_by = {value: i for i, node in enumerate(graph.nodes) for value in node.outputs if graph.known[value]}

    def upwards(values: Iterable[int], stop: Callable[[int], bool]) -> set[int]:
        """These values and all that they are computed from. The search does not go beyond a value with ``stop``."""
        found, left = set(), [value for value in values if value in made_by]
        while left:
            if (value := left.pop()) not in found:
                found.add(value)
                left += [] if stop(value) else [read for read in graph.nodes[made_by[value]].reads if read in made_by]
        return found

    values = sorted(upwards(wanted, lambda value: dear[made_by[value]]))
    place = {value: i for i, value in enumerate(values)}
    source, sink = 2 * len(values), 2 * len(values) + 1  # a value enters at 2 i and leaves at 2 i + 1
    unit = 1 + 2 * sum(cost[value] or 0 for value in values) // _INFINITE
    edges = []
    for value, i in place.items():
        bytes_of = cost[value]
        edges.append((2 * i, 2 * i + 1, _INFINITE if bytes_of is None else -(-bytes_of // unit)))
        if dear[made_by[value]]:
            edges.append((source, 2 * i, _INFINITE))
        else:
            reads = graph.nodes[made_by[value]].reads
            edges += [(2 * place[read] + 1, 2 * i, _INFINITE) for read in reads if read in place]
        if value in wanted:
            edges.append((2 * i + 1, sink, _INFINITE))
    start, end, capacity = (np.array(column, np.int32) for column in zip(*edges, strict=True)) if edges else [[]] * 3
    flow = csr_array((capacity, (start, end)), shape=(sink + 1, sink + 1), dtype=np.int32)
    unlimited = csr_array(flow == _INFINITE)
    if sink in (from_source := _reached(unlimited, source)):
        between = from_source & _reached(csr_array(unlimited.T), sink)
        return NoCut(next(value for value, i in place.items() if 2 * i in between))
    left_over = csr_array(flow - maximum_flow(flow, source, sink).flow)
    left_over.eliminate_zeros()
    to_sink = _reached(csr_array(left_over.T), sink)
    stored = {value for value, i in place.items() if 2 * i + 1 in to_sink and 2 * i not in to_sink}
    before = {made_by[value] for value in upwards(stored, lambda _: False)}
    again = {made_by[value] for value in upwards(wanted, stored.__contains__) if value not in stored}
    kept = {id(node) for node in after}
    return Cut(
        sorted(stored),
        [node for i, node in enumerate(graph.nodes) if i in before],
        [node for i, node in enumerate(graph.nodes) if i in again or id(node) in kept],
    )


def _reached(graph: csr_array, start: int) -> set[int]:
    return set(breadth_first_order(graph, start, return_predecessors=False).tolist())
