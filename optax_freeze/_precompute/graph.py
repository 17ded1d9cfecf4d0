"""The tasks of a program as a graph: what each of them reads and writes, and what can be computed beforehand."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from optax_freeze._precompute.inputs import Input
from optax_freeze._program.dependence import dependent, known_in_part
from optax_freeze._program.regions import EVERYTHING, Region, Rows, stored_region
from optax_freeze._program.schedule import schedule
from optax_freeze._program.tasks import ALWAYS, Schedule, Task
from optax_freeze._program.trace import Equation, Program


class Node(NamedTuple):
    """A task, with the numbers of the regions that it reads and writes."""

    task: Task
    operands: tuple[Any, ...]  # for each read of the task: the number of the region, a literal, or None
    reads: frozenset[int]
    outputs: tuple[int, ...]
    is_known: bool  # whether it can be computed from the known inputs

    @property
    def eqn(self) -> Equation:
        return self.task.eqn

    def __str__(self) -> str:
        return str(self.eqn)


class Graph(NamedTuple):
    """All tasks of a program. The regions that they read and write are numbered in order."""

    schedule: Schedule
    nodes: list[Node]
    regions: list[tuple[int, Region]]
    known: list[bool]  # for each region, whether it can be computed from the known inputs
    outputs: list[int]

    @property
    def program(self) -> Program:
        return self.schedule.program

    def tasks(self, nodes: Sequence[int]) -> list[Task]:
        """The tasks of some nodes."""
        return [self.nodes[i].task for i in nodes]

    def struct(self, number: int) -> jax.ShapeDtypeStruct:
        """The shape and dtype of a region."""
        value, region = self.regions[number]
        aval = self.program.avals[value]
        return jax.ShapeDtypeStruct(region.shape(aval.shape), aval.dtype)

    def without(self, is_excluded: Sequence[bool]) -> "Graph":
        """The graph in which these regions, and what is computed from them, are not known beforehand."""
        known, nodes = [a and not b for a, b in zip(self.known, is_excluded, strict=True)], []
        for node in self.nodes:
            is_known = node.is_known and all(known[number] for number in (*node.reads, *node.outputs))
            nodes.append(node._replace(is_known=is_known))
            for number in node.outputs:
                known[number] = is_known
        return self._replace(nodes=nodes, known=known)


def graph(program: Program, inputs: Sequence[Input]) -> Graph:
    """The graph of a program with these inputs."""
    is_known = lambda number, region: inputs[number].is_known(region)  # noqa: E731
    in_part = [number for number, given in enumerate(inputs) if isinstance(given.trainable, Rows)]
    unknown = {number for number in range(program.num_inputs) if not is_known(number, EVERYTHING)}
    unknown |= {number for number, const in program.consts.items() if isinstance(const, Tracer)}
    known = known_in_part(program, dependent(program, unknown), in_part, is_known)
    whole = [(value, EVERYTHING, ALWAYS) for value in program.outputs]
    found = Graph(schedule(program, whole, known=known), [], [], [], [])
    numbers: dict[int, dict[Region, int]] = {}

    def add(value: int, region: Region, known: bool) -> int:
        of_value = numbers.setdefault(value, {})
        if region not in of_value:
            of_value[region] = len(found.regions)
            found.regions.append((value, region))
            found.known.append(known)
        return of_value[region]

    def read(value: int, region: Region) -> int:
        if value < program.num_inputs:
            return add(value, region, is_known(value, region))
        if value in program.consts:
            return add(value, region, value not in unknown)
        source = stored_region(numbers[value], region)
        assert source is not None
        return numbers[value][source]

    for task in found.schedule.tasks:
        given = [[] if x is None else [read(*key) for key in x.wanted] for x in task.reads]
        operands = tuple(
            each[0] if each else getattr(x, "value", None) for each, x in zip(given, task.reads, strict=True)
        )
        reads = frozenset(number for each in given for number in each)
        is_known_too = all(found.known[number] for number in reads) and not task.eqn.has_effects
        outputs = tuple(add(*write, is_known_too) for write in task.writes if write is not None)
        found.nodes.append(Node(task, operands, reads, outputs, is_known_too))
    found.outputs.extend(read(value, EVERYTHING) for value in program.outputs if isinstance(value, int))
    return found
