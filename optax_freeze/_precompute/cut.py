"""Divides a program into a part that is computed once and the rest, so that the fewest bytes are stored in between.

This is a minimum cut. Storing a value costs its bytes, repeating a cheap operation on available operands costs nothing,
and inputs of the program are always available. The flow algorithm comes from scipy, a dependency of JAX.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from optax_freeze._jax_internals import Call, inside
from optax_freeze._precompute.graph import Graph, Key, Node
from optax_freeze._precompute.inputs import Input
from optax_freeze._precompute.words import is_comparable
from optax_freeze._program.operations import Cost, rule_of

_REPEATED = {Cost.BARRIER, Cost.COPY, Cost.ELEMENTWISE, Cost.MOVE, Cost.REDUCTION}
"""The costs of operations that each step repeats instead of storing results: about that of reading their operands."""

_INFINITE = 2**30
"""More than the bytes of all values, counted in units chosen so that this holds: scipy's flow is limited to 32 bits."""


class Cut(NamedTuple):
    """The regions to store, and the numbers of the nodes before and after the cut."""

    stored: list[Key]
    before: list[int]
    after: list[int]


def is_cheap(eqn: Any) -> bool:
    """Whether an operation is repeated in each step rather than its results stored."""
    found = inside(eqn)
    if isinstance(found, Call):
        return all(map(is_cheap, found.program.eqns))
    return rule_of(eqn).cost in _REPEATED or eqn.primitive.name in ("axis_index", "layout_constraint")


def after_of(graph: Graph) -> tuple[list[int], set[Key]]:
    """The nodes that are needed and cannot be computed beforehand, and the known regions that they or outputs read."""
    wanted, nodes = set(graph.outputs), []
    for i, node in reversed([*enumerate(graph.nodes)]):
        if node.eqn.has_effects or (not node.is_known and not wanted.isdisjoint(node.writes)):
            nodes.append(i)
            wanted |= node.reads
    return nodes[::-1], {key for key in wanted if graph.known[key]}


def first_dependent(graph: Graph, inputs: Sequence[Input]) -> list[tuple[Node, str]]:
    """On each path, the first operation that reads a computed value but cannot be computed beforehand, and why."""
    given = [key for key in graph.known if key[0] < len(inputs)]
    why = {key: inputs[key[0]].why for key in given if not graph.known[key]}
    computed = {key for key in given if graph.known[key]}
    behind, found, needed = set(), [], set(after_of(graph)[0])
    for i, node in enumerate(graph.nodes):
        reads_computed = not computed.isdisjoint(node.reads)
        if node.is_known:
            computed.update(node.writes if reads_computed else ())
            continue
        other = "an effect" if node.eqn.has_effects else "a value of an enclosing trace"
        if not is_comparable(node.eqn):
            other = "a Python function, which cannot be compared"
        reason = next((why[key] for key in node.reads if key in why), other)
        why.update(dict.fromkeys(node.writes, reason))
        is_behind = not behind.isdisjoint(node.reads)
        if is_behind or reads_computed or node.eqn.has_effects:
            behind.update(node.writes)
            if i in needed and not is_behind:
                found.append((node, reason))
    return found


def minimum_cut(graph: Graph, dear: Sequence[bool], cost: Mapping[Key, int | None]) -> Cut:
    """Finds the regions to store with the fewest bytes in total; among equal cuts, the last one in the program.

    Args:
      graph: the tasks of the program.
      dear: for each node, whether it is too expensive to repeat.
      cost: for each region its bytes, or None if it is never stored because it depends on no dear node.
    """
    after, wanted = after_of(graph)
    made_by = {key: i for i, node in enumerate(graph.nodes) if node.is_known for key in node.writes}

    def upwards(keys: Iterable[Key], stop: Callable[[Key], bool]) -> set[Key]:
        """These regions and all that they are computed from. The search does not go beyond a region with ``stop``."""
        found, left = set(), [key for key in keys if key in made_by]
        while left:
            if (key := left.pop()) not in found:
                found.add(key)
                left += [] if stop(key) else [read for read in graph.nodes[made_by[key]].reads if read in made_by]
        return found

    needed = upwards(wanted, lambda key: dear[made_by[key]])
    place = {key: i for i, key in enumerate(key for key in graph.known if key in needed)}
    # A value is stored if the flow fills the edge through it: so the edge has its bytes, and all others are infinite.
    source, sink = 2 * len(place), 2 * len(place) + 1  # a region is entered at 2 i and left at 2 i + 1
    unit = 1 + 2 * sum(cost[key] or 0 for key in place) // _INFINITE
    edges = []
    for key, i in place.items():
        bytes_of, node = cost[key], made_by[key]
        edges.append((2 * i, 2 * i + 1, _INFINITE if bytes_of is None else -(-bytes_of // unit)))
        reads = [2 * place[read] + 1 for read in graph.nodes[node].reads if read in place]
        edges += [(start, 2 * i, _INFINITE) for start in ([source] if dear[node] else reads)]
        edges += [(2 * i + 1, sink, _INFINITE)] if key in wanted else []
    start, end, capacity = np.array(edges, np.int32).reshape(-1, 3).T
    flow = csr_array((capacity, (start, end)), shape=(sink + 1, sink + 1), dtype=np.int32)
    # Of several minimum cuts, that nearest to the sink is the last one in the program: it leaves the least to repeat.
    left_over = csr_array((flow - maximum_flow(flow, source, sink).flow).T)
    left_over.eliminate_zeros()
    to_sink = set(breadth_first_order(left_over, sink, return_predecessors=False).tolist())
    stored = [key for key, i in place.items() if 2 * i + 1 in to_sink and 2 * i not in to_sink]
    again = upwards(wanted, stored.__contains__) - {*stored}
    before = {made_by[key] for key in upwards(stored, lambda _: False)}
    return Cut(stored, sorted(before), sorted({*after, *(made_by[key] for key in again)}))
