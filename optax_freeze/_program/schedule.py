"""Walks a program backwards: which region of each value is wanted, and so which tasks are needed."""

from collections.abc import Sequence
from typing import Any

from optax_freeze._program import loops
from optax_freeze._program.operations import computation, gives_list, is_apart, is_cheap
from optax_freeze._program.regions import EVERYTHING, Region, is_scattered
from optax_freeze._program.tasks import ALWAYS, Read, Schedule, Task, Wanted, joined_label, one_region, regions_apart
from optax_freeze._program.trace import Equation, Program, flatten


def schedule(program: Program, outputs: Sequence[tuple[Any, Region, int]], log: Any = None) -> Schedule:
    """The tasks that compute these regions of values, each with its label."""
    walk = Walk(program, log)
    for value, region, label in outputs:
        walk.want(value, region, label)
    walk.run()
    given = {n: wanted for n, wanted in walk.wanted.items() if n < program.num_inputs or n in program.consts}
    return Schedule(program, walk.tasks[::-1], given, [(value, region) for value, region, _ in outputs])


class Walk:
    """The state of a walk: what is wanted of each value, and the tasks found, the last first."""

    def __init__(self, program: Program, log: Any = None) -> None:
        self.program, self.log = program, log
        self.wanted: dict[int, Wanted] = {}
        self.tasks: list[Task] = []

    def want(self, value: Any, region: Region, label: int) -> None:
        """Adds a region to those wanted of a value; literals are known."""
        if isinstance(value, int):
            wanted = self.wanted.setdefault(value, {})
            wanted[region] = wanted.get(region, 0) | label

    def record(self, eqn: Equation, extent: str) -> None:
        """Adds an operation to the log: of which some rows are computed, or everything although less is wanted."""
        if self.log is not None:
            self.log.append((eqn, extent))

    def add(self, task: Task) -> None:
        """Adds a task, and wants what it reads."""
        self.tasks.append(task)
        for read in task.reads:
            if read is not None:
                self.want(read.value, read.region, task.label)

    def body(self, closed: Any) -> Program:
        """The program of a loop or a branch."""
        return flatten(closed)

    def run(self) -> None:
        """Walks over all equations, the last first."""
        for eqn in reversed(self.program.eqns):
            wanted = [self.wanted.get(number, {}) for number in eqn.outputs]
            if eqn.has_effects:
                wanted = [{EVERYTHING: ALWAYS}] * len(wanted)
            if not any(wanted) and not eqn.has_effects:
                continue
            if eqn.primitive.name == "scan":
                loops.scan(self, eqn, wanted)
            elif eqn.primitive.name == "cond" and loops.cond(self, eqn, wanted):
                pass
            elif len(wanted) == 1 or is_apart(eqn):
                for place in reversed(range(len(wanted))):
                    self._single(eqn, place, wanted[place])
            else:
                self._several(eqn, wanted)

    def _single(self, eqn: Equation, place: int, wanted: Wanted) -> None:
        """The tasks of one result of an equation, which is computed on its own."""
        shape = getattr(eqn.avals_out[place], "shape", ())
        chosen = regions_apart(wanted, shape)
        if EVERYTHING not in chosen and is_cheap(eqn):
            chosen = wanted
        elif any(is_scattered(region, shape) for region in chosen):
            chosen = {EVERYTHING: joined_label([wanted])}
        for region, label in chosen.items():
            regions = [region if i == place else None for i in range(len(eqn.outputs))]
            found = None if region is EVERYTHING and not is_apart(eqn) else computation(eqn, regions)
            if found is None:
                self.whole(eqn, [wanted], without_rule=region is not EVERYTHING)
                return
            self._compute(eqn, found, regions, label)

    def _several(self, eqn: Equation, wanted: Sequence[Wanted]) -> None:
        """The task of an equation with several results."""
        regions = [
            one_region(each, getattr(aval, "shape", ())) for each, aval in zip(wanted, eqn.avals_out, strict=True)
        ]
        label = joined_label(wanted)
        partial = any(region not in (None, EVERYTHING) for region in regions)
        found = computation(eqn, regions) if partial or eqn.primitive.name == "optimization_barrier" else None
        if found is None:
            self.whole(eqn, wanted, without_rule=partial)
        else:
            self._compute(eqn, found, found.outputs or regions, label)

    def _compute(self, eqn: Equation, found: Any, regions: Sequence[Region | None], label: int) -> None:
        if any(region not in (None, EVERYTHING) for region in regions):
            self.record(eqn, "rows")
        reads = [None if r is None else Read(v, r) for v, r in zip(eqn.inputs, found.regions, strict=True)]
        writes = [None if r is None else (n, r) for n, r in zip(eqn.outputs, regions, strict=True)]

        def apply(_: Any, operands: Sequence[Any]) -> Sequence[Any]:
            out = found.apply(*operands)
            return out if gives_list(eqn) else [out] * len(writes)

        self.add(Task(eqn, reads, writes, apply, label))

    def whole(self, eqn: Equation, wanted: Sequence[Wanted], without_rule: bool) -> None:
        """The task that computes all of an equation; ``without_rule`` although less is wanted."""
        if without_rule:
            self.record(eqn, "everything")
        reads = [Read(value, EVERYTHING) for value in eqn.inputs]
        writes = [(number, EVERYTHING) for number in eqn.outputs]
        label = ALWAYS if eqn.has_effects else joined_label(wanted)
        self.add(Task(eqn, reads, writes, lambda _, operands: eqn.bind_all(*operands), label))
