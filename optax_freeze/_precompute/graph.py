"""The tasks of a program as a graph: what each of them reads and writes, and what can be computed beforehand."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from optax_freeze._precompute.inputs import Input
from optax_freeze._precompute.words import has_values, is_comparable
from optax_freeze._program.dependence import dependent, known_in_part
from optax_freeze._program.regions import EVERYTHING, Region, Rows, stored_region
from optax_freeze._program.tasks import ALWAYS, Schedule, Task
from optax_freeze._program.trace import Equation, Program
from optax_freeze._program.walk import schedule

Key: TypeAlias = tuple[int, Region]
"""A region of a value."""


class Node(NamedTuple):
    """A task, the stored regions that it reads, and those that it writes."""

    task: Task
    operands: tuple[Any, ...]  # for each read of the task: a key, a literal, or None
    reads: frozenset[Key]
    writes: tuple[Key, ...]
    is_known: bool  # whether it can be computed from the known inputs

    @property
    def eqn(self) -> Equation:
        return self.task.eqn

    def __str__(self) -> str:
        return str(self.eqn)


class Graph(NamedTuple):
    """All tasks of a program."""

    schedule: Schedule
    nodes: list[Node]
    known: dict[Key, bool]  # whether a region can be computed from the known inputs; in the order of the program
    outputs: list[Key]

    @property
    def program(self) -> Program:
        return self.schedule.program

    def tasks(self, nodes: Sequence[int]) -> list[Task]:
        return [self.nodes[i].task for i in nodes]

    def struct(self, key: Key) -> jax.ShapeDtypeStruct:
        """The shape and dtype of a region."""
        aval = self.program.avals[key[0]]
        return jax.ShapeDtypeStruct(key[1].shape(aval.shape), aval.dtype)

    def without(self, excluded: Collection[Key]) -> "Graph":
        """The graph in which these regions, and what is computed from them, are not known beforehand."""
        known, nodes = {key: is_known and key not in excluded for key, is_known in self.known.items()}, []
        for node in self.nodes:
            is_known = node.is_known and all(known[key] for key in (*node.reads, *node.writes))
            nodes.append(node._replace(is_known=is_known))
            known |= dict.fromkeys(node.writes, is_known)
        return self._replace(nodes=nodes, known=known)


def graph(program: Program, inputs: Sequence[Input]) -> Graph:
    # Rows that train make the whole leaf unknown, but loops and cheap operations may read its frozen rows alone.
    is_known = lambda number, region: inputs[number].is_known(region)  # noqa: E731
    in_part = [number for number, given in enumerate(inputs) if isinstance(given.trainable, Rows)]
    unknown = {number for number in range(program.num_inputs) if not is_known(number, EVERYTHING)}
    unknown |= {number for number, const in program.consts.items() if not has_values(const)}
    divided = known_in_part(program, dependent(program, unknown), in_part, is_known)
    tasks = schedule(program, [(value, EVERYTHING, ALWAYS) for value in program.outputs], known=divided)
    known: dict[Key, bool] = {}
    stored: dict[int, list[Region]] = {}
    nodes = []

    def read(value: int, region: Region) -> Key:
        if value in stored:
            region = stored_region(stored[value], region)  # type: ignore[assignment]
        elif value < program.num_inputs:
            known[value, region] = is_known(value, region)
        else:
            known[value, region] = value not in unknown
        return value, region

    for task in tasks.tasks:
        given = [[] if x is None else [read(*key) for key in x.wanted] for x in task.reads]
        operands = (keys[0] if keys else getattr(x, "value", None) for keys, x in zip(given, task.reads, strict=True))
        reads = frozenset(key for keys in given for key in keys)
        writes = tuple(write for write in task.writes if write is not None)
        is_known_too = all(known[key] for key in reads) and not task.eqn.has_effects and is_comparable(task.eqn)
        nodes.append(Node(task, tuple(operands), reads, writes, is_known_too))
        known |= dict.fromkeys(writes, is_known_too)
        for value, region in writes:
            stored.setdefault(value, []).append(region)
    return Graph(tasks, nodes, known, [read(value, EVERYTHING) for value in program.outputs if isinstance(value, int)])
