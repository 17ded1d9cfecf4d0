"""Estimates what the tasks of a program cost beside computing everything, as a compiler counts it.

Memory is read and written by operations that a compiler does not repeat, and by those that compute their operands; all
other operations are fused into these. Rows cost more than they save where rows along several axes are wanted of a
value, or rows of a value that is stored: an operand of a product is a copy of them.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from optax_freeze._jax_internals import Loop, inside
from optax_freeze._program.flops import flops_of_tasks
from optax_freeze._program.operations import REDUCTIONS, is_cheap
from optax_freeze._program.regions import EVERYTHING, Region, stored_region
from optax_freeze._program.tasks import Read, Schedule
from optax_freeze._program.trace import Equation

_MOST_READS = 16
"""The most regions in memory that fused operations read."""
_MORE = 0.01
"""Rows are computed if this share of the FLOPs, or of the bytes, of everything is all that they cost more."""

Key: TypeAlias = tuple[int, Region]


def dearer_rows(found: Schedule) -> set[int]:
    """The outputs of which rows are wanted that cost more, in FLOPs or in bytes, than everything and a cut of it."""
    outputs = [(value, region) for value, region in found.outputs if isinstance(value, int)]
    partial = [(value, region) for value, region in outputs if region is not EVERYTHING]
    if not partial:
        return set()
    in_rows, whole = _by_equation(found), _by_equation(_whole(found))
    most = _MORE * sum(whole.values(), np.zeros(2))
    more = {outs: cost - whole[outs] for outs, cost in in_rows.items()}
    dearer = set()
    for value, region in partial:
        copy = np.array([0, 2 * _bytes(found, (value, region))])
        if (sum((more[outs] for outs in _equations_of(found, value)), np.zeros(2)) - copy > most).any():
            dearer.add(value)
    return dearer


def _whole(found: Schedule) -> Schedule:
    """The same operations, of which everything is computed."""
    tasks = {}
    for task in found.tasks:
        reads = [Read(value, EVERYTHING) for value in task.eqn.inputs]
        writes = [(number, EVERYTHING) for number in task.eqn.outputs]
        bodies = [_whole(body) for body in task.bodies]
        tasks[task.eqn.outputs] = task._replace(reads=reads, writes=writes, share=1.0, bodies=bodies)
    return found._replace(tasks=[*tasks.values()], outputs=[(value, EVERYTHING) for value in found.program.outputs])


def _equations_of(found: Schedule, output: int) -> set[tuple[int, ...]]:
    """The operations, by their results, of which a part is computed for an output."""
    needed, equations = {output}, set()
    for task in reversed(found.tasks):
        if any(write and write[0] in needed and write[1] is not EVERYTHING for write in task.writes):
            equations.add(task.eqn.outputs)
            needed.update(task.read_numbers)
    return equations


def _by_equation(found: Schedule) -> dict[tuple[int, ...], np.ndarray]:
    """The FLOPs and the bytes of each operation, by its results."""
    costs: dict[tuple[int, ...], np.ndarray] = {}
    for task, number_of_bytes in zip(found.tasks, _bytes_of_tasks(found), strict=True):
        if task.bodies:
            each = [sum(_by_equation(body).values(), np.zeros(2)) for body in task.bodies]
            loop = inside(task.eqn)
            times = loop.length if isinstance(loop, Loop) else 1
            cost = task.share * times * np.max(each, axis=0)
        else:
            cost = np.array([flops_of_tasks([task]), 0.0])
        cost[1] += number_of_bytes
        costs[task.eqn.outputs] = costs.get(task.eqn.outputs, 0) + cost
    return costs


def _bytes_of_tasks(found: Schedule) -> list[int]:
    """The bytes that each task reads from memory and writes to it."""
    stored: dict[int, dict[Region, frozenset[Key]]] = {}  # of each value: its regions, and what they are computed from
    of_products = {key for task in found.tasks if not _is_fused(task.eqn) for key in _keys(task.reads)}
    of_products.update(key for key in found.outputs if isinstance(key[0], int))

    def read(key: Key) -> tuple[Region | None, frozenset[Key]]:
        """The region that one is read from, and what is in memory of it."""
        regions = stored.get(key[0], {})
        region = stored_region(regions, key[1])
        found = frozenset([key]) if region is None else regions[region]
        return region, frozenset([key]) if (key[0], region) in found else found

    costs = []
    for task in found.tasks:
        cost, sources = 0, set()
        for key in _keys(task.reads):
            region, given = read(key)
            is_copied = key[1] is not EVERYTHING and region != key[1] and not _is_fused(task.eqn)
            sources |= {key} if is_copied else given
            cost += 2 * _bytes(found, key) if is_copied else 0
        for key in filter(None, task.writes):
            is_stored = not is_cheap(task.eqn) or key in of_products or len(sources) > _MOST_READS
            stored.setdefault(key[0], {})[key[1]] = frozenset([key]) if is_stored else frozenset(sources)
            cost += _bytes(found, key) if is_stored else 0
        if cost:
            cost += sum(_bytes(found, key) for key in sources)
        costs.append(cost)
    return costs


def _is_fused(eqn: Equation) -> bool:
    """Whether a compiler fuses operations before this one into it."""
    return is_cheap(eqn) or eqn.primitive.name in REDUCTIONS


def _keys(reads: Iterable[Any]) -> Iterable[Key]:
    return (key for read in reads if read is not None for key in read.wanted)


def _bytes(found: Schedule, key: Key) -> int:
    aval = found.program.avals[key[0]]
    shape = getattr(aval, "shape", ())
    return int(np.prod(key[1].shape(shape))) * getattr(getattr(aval, "dtype", None), "itemsize", 0)
