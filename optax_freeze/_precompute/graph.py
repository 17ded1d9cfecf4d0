"""The tasks of a program as a graph: what each of them reads and writes, and what can be computed beforehand."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.core import Tracer

from optax_freeze._program.dependence import dependent, known_in_part
from optax_freeze._program.regions import EVERYTHING, Region, stored_region
from optax_freeze._program.schedule import schedule
from optax_freeze._program.tasks import ALWAYS, Schedule, Task
from optax_freeze._program.trace import Equation, Program


class Node(NamedTuple):
    """A task, with the numbers in the graph of what it reads and writes."""

    task: Task
    operands: tuple[int | None, ...]  # for each read of the task; None for a literal
    reads: frozenset[int]
    outputs: tuple[int, ...]

    @property
    def eqn(self) -> Equation:
        return self.task.eqn

    def __str__(self) -> str:
        return str(self.eqn)


class Graph(NamedTuple):
    """The tasks of a program. The regions that they read and write are numbered in order."""

    schedule: Schedule
    nodes: list[Node]
    regions: list[tuple[int, Region]]
    known: list[bool]  # whether a region can be computed from the known inputs
    outputs: list[int]

    @property
    def program(self) -> Program:
        return self.schedule.program

    def shape(self, number: int) -> tuple[int, ...]:
        """The shape of a region."""
        value, region = self.regions[number]
        return region.shape(self.program.avals[value].shape)

    def dtype(self, number: int) -> Any:
        """The dtype of a region."""
        return self.program.avals[self.regions[number][0]].dtype

    def tasks(self, nodes: Iterable[Node], outputs: Sequence[int]) -> Schedule:
        """The part of the schedule that computes these regions."""
        found = [self.regions[number] for number in outputs]
        return self.schedule._replace(tasks=[node.task for node in nodes], outputs=found)


def graph(program: Program, in_part: Iterable[int], is_known: Callable[[int, Region], bool]) -> Graph:
    """The graph of a program, given the inputs that are known ``in_part``, and which regions of inputs are known."""
    unknown = {n for n in range(program.num_inputs) if not is_known(n, EVERYTHING)}
    unknown |= {n for n, const in program.consts.items() if isinstance(const, Tracer)}
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
        given = [[] if x is None else [read(*key) for key in x.wanted if isinstance(key[0], int)] for x in task.reads]
        operands = tuple(each[0] if len(each) == 1 else None for each in given)
        reads = frozenset(number for each in given for number in each)
        is_known_too = all(found.known[number] for number in reads) and not task.eqn.has_effects
        outs = tuple(add(*write, is_known_too) for write in task.writes if write is not None)
        found.nodes.append(Node(task, operands, reads, outs))
    found.outputs.extend(read(value, EVERYTHING) for value in program.outputs if isinstance(value, int))
    return found
