"""Tasks: the operations of a program, each with the regions that it reads and writes, and their evaluation.

A task may be needed only under a condition of the running program: its guard is the set of conditions, as bits, of
which one must hold. What a task reads is needed at least as often, so all tasks of one guard stand in one ``lax.cond``,
and those of larger sets come first.
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._program.propagation import settled
from optax_freeze._program.regions import EVERYTHING, Numbers, Region, Rows, Values, covering
from optax_freeze._program.trace import Equation, Program
from optax_freeze._spec.sharding import in_this_mesh, laid_out, zeros

ALWAYS = -1
"""The guard of what is always needed."""


def new_guards(count: int, others: Iterable[int] = ()) -> list[int]:
    """Guards of one new condition each, which are no part of the ``others``."""
    first = max((guard.bit_length() for guard in others if guard != ALWAYS), default=0)
    return [1 << (first + i) for i in range(count)]


Wanted: TypeAlias = dict[Region, int]
"""The wanted regions of a value, and the guard of each."""


def joined_guard(wanted: Sequence[Mapping[Region, int]]) -> int:
    """The guard of a task that computes all that is wanted."""
    return functools.reduce(operator.or_, [guard for each in wanted for guard in each.values()], 0)


def regions_apart(wanted: Wanted, shape: Sequence[int]) -> dict[Region, int]:
    """:func:`covering` for each guard on its own; where regions of different guards overlap, they stay together."""
    guards = {guard: [region for region, other in wanted.items() if other == guard] for guard in wanted.values()}
    apart = [(region, guard) for guard, regions in guards.items() for region in covering(regions, shape)]
    if len(guards) == 1 or not overlap([region for region, _ in apart], shape):
        return dict(apart)
    together = covering(list(wanted), shape)
    if len(together) > 1 and all(region in wanted for region in together):
        return {region: wanted[region] for region in together}
    return dict.fromkeys(together, joined_guard([wanted]))


def overlap(regions: Sequence[Region], shape: Sequence[int]) -> bool:
    """Whether two regions have elements in common, as far as it is known."""
    if EVERYTHING in regions or len({region.axis for region in regions}) > 1:
        return True
    known = [np.zeros(0, np.int64), *(region.numbers for region in regions if isinstance(region, Rows))]
    numbers = np.concatenate(known)
    return len(np.unique(numbers)) < len(numbers) or sum(region.share(shape) for region in regions) > 1.001


def one_region(wanted: Iterable[Region], shape: Sequence[int]) -> Region | None:
    """One region that covers what is wanted of a value; None for nothing."""
    found = covering(list(wanted), shape)
    return (found[0] if len(found) == 1 else EVERYTHING) if found else None


class Read(NamedTuple):
    """A region that a task reads; ``in_place``: an array with these rows, not cut, and the number of its first row."""

    value: Any  # a number, or a literal
    region: Region
    in_place: bool = False
    aval: Any = None  # of the whole value, for the layout of what is read

    @property
    def wanted(self) -> Sequence[tuple[int, Region]]:
        """The regions of stored values that are read."""
        return [(self.value, self.region)] if isinstance(self.value, int) else []

    def of(self, values: Values, context: "Context") -> Any:
        """What is read."""
        if not isinstance(self.value, int):
            return self.value.val
        if self.in_place and isinstance(self.region, Rows):
            return values.read_run(self.value, self.region)
        return laid_out(values.read(self.value, context.bound(self.region)), self.aval)


def read_all(outputs: Iterable[tuple[Any, Region]], values: Values, context: "Context", program: Program) -> list[Any]:
    """These regions of values of a program; literals as arrays."""
    read = lambda x, region: Read(x, region, aval=program.avals[x]).of(values, context)  # noqa: E731
    return [read(x, region) if isinstance(x, int) else jnp.asarray(x.val) for x, region in outputs]


class Context(NamedTuple):
    """What is known while tasks run."""

    conditions: Mapping[int, Any] = MappingProxyType({})  # by their bits
    guard: int = ALWAYS  # of tasks that run anyway
    numbers: Mapping[Numbers, jax.Array] = MappingProxyType({})  # of dynamic rows

    def bound(self, region: Region) -> Region:
        """A region with known numbers."""
        return region.bound(self.numbers)

    def holds(self, guard: int) -> Any:
        """Whether one of the conditions of a guard holds."""
        return self.each_holds([guard])[guard]

    def each_holds(self, guards: Iterable[int]) -> dict[int, Any]:
        """:meth:`holds` for several guards; each begins with the largest one that it contains."""
        found: dict[int, Any] = {}
        for guard in sorted(guards, key=int.bit_count):
            largest = next((each for each in reversed(found) if each | guard == guard), 0)
            bits = [bit for bit in _bits(guard & ~largest) if bit in self.conditions]
            others = [in_this_mesh(self.conditions[bit]) for bit in bits]
            found[guard] = functools.reduce(jnp.logical_or, [*([found[largest]] if largest else []), *others])
        return found

    def inside(self, guard: int, conditions: Mapping[int, Any] = MappingProxyType({})) -> "Context":
        """The context of tasks within a task of this guard."""
        return Context({**self.conditions, **conditions}, guard, self.numbers)


PLAIN = Context()  # without conditions and dynamic rows


def _bits(guard: int) -> Iterator[int]:
    """The conditions of a guard."""
    while guard:
        yield guard & -guard
        guard &= guard - 1


class Task(NamedTuple):
    """An operation on regions of values: ``apply(context, values that are read)`` returns those that are written.

    Attributes:
      share: how much of the operation is computed.
      extent: whether "rows" are computed, or "everything" although only rows are wanted.
      inner: the tasks of its programs, whose outputs are the regions that it writes.
      carried: by the place of such an output, the input that has its value in the next step of a loop.
    """

    eqn: Equation
    reads: Sequence["Read | None"]
    writes: Sequence[tuple[int, Region] | None]
    apply: Callable[[Context, Sequence[Any]], Sequence[Any]]
    guard: int
    share: float = 1.0
    extent: str = ""
    inner: Sequence["Schedule"] = ()
    carried: Mapping[int, int] = MappingProxyType({})

    def needed_for(self, numbers: Collection[int]) -> "Task":
        """The task with those of its inner tasks that some of the values which it writes need."""
        inner = []
        for schedule in self.inner:

            def step(marks: Sequence[bool], schedule: Schedule = schedule) -> list[bool]:
                read = schedule.of([*compress(schedule.outputs, marks)]).read_numbers
                return [self.carried.get(place) in read for place in range(len(marks))]

            marks = [write is not None and write[0] in numbers for write in self.writes]
            inner.append(schedule.of([*compress(schedule.outputs, settled(marks, step, operator.or_))]))
        return self._replace(inner=inner)

    def run(self, context: Context, values: Values) -> None:
        """Evaluates the task."""
        with self.eqn.source.scope():
            outs = self.apply(context, [read and read.of(values, context) for read in self.reads])
        for write, out in zip(self.writes, outs, strict=True):
            if write is not None:
                values.write(write[0], context.bound(write[1]), out)

    @property
    def read_numbers(self) -> Iterable[int]:
        """The numbers of the values that are read."""
        return (number for read in self.reads if read is not None for number, _ in read.wanted)

    @property
    def written_numbers(self) -> Iterable[int]:
        """The numbers of the values that are written."""
        return (write[0] for write in self.writes if write is not None)


class Schedule(NamedTuple):
    """The tasks of a program in order, and the regions that they read of its inputs and constants."""

    program: Program
    tasks: Sequence[Task]
    given: Mapping[int, Mapping[Region, int]]  # of inputs and constants: regions and their guards
    outputs: Sequence[tuple[Any, Region]]

    def of(self, outputs: Sequence[tuple[Any, Region]]) -> "Schedule":
        """The tasks that compute these regions of values."""
        needed, tasks = {value for value, _ in outputs}, []
        for task in reversed(self.tasks):
            if not needed.isdisjoint(task.written_numbers):
                tasks.append(task.needed_for(needed))
                needed.update(task.read_numbers)
        return self._replace(tasks=tasks[::-1], outputs=outputs)

    @property
    def read_numbers(self) -> set[int]:
        """The numbers of the values that are read, also as outputs."""
        outputs = {value for value, _ in self.outputs if isinstance(value, int)}
        return outputs.union(*(task.read_numbers for task in self.tasks))

    @property
    def all_tasks(self) -> Iterator[Task]:
        """The tasks, each before its inner ones."""
        for task in self.tasks:
            yield task
            for schedule in task.inner:
                yield from schedule.all_tasks

    def run(self, values: Values, context: Context = PLAIN) -> list[Any]:
        """Evaluates the tasks, given the inputs, and returns the outputs."""
        self.run_tasks(values, context)
        return read_all(self.outputs, values, context, self.program)

    def run_tasks(self, values: Values, context: Context, kept: Collection[int] = ()) -> dict[int, Any]:
        """Evaluates the tasks, given the inputs. Values are dropped that no output reads, if they are not ``kept``.

        Returns a bool for each input that is read inside of a ``lax.cond``. It is False, but the compiler does not know
        that: whoever writes to an input in place and depends on it writes after the last read, so nothing is copied.
        """
        for number, const in self.program.consts.items():
            if not values.has(number):
                values.write(number, EVERYTHING, const)
        kept = {*kept, *(value for value, _ in self.outputs if isinstance(value, int))}
        sets: dict[int, list[Task]] = {}  # one `lax.cond` for each guard: a chain of n groups has about 2 n of them
        for task in self.tasks:
            sets.setdefault(ALWAYS if task.guard & context.guard == context.guard else task.guard, []).append(task)
        _run_all(sets.pop(ALWAYS, []), values, context, kept if not sets else None)
        read_by: dict[int, set[int]] = {}  # the guards of the tasks that read a value
        for guard, tasks in sets.items():
            for number in {number for task in tasks for number in task.read_numbers}:
                read_by.setdefault(number, set()).add(guard)
        conditions, after = context.each_holds(sets), {}
        # What a task reads is needed at least as often, so its guard is as large or larger.
        for guard in sorted(sets, key=lambda guard: -guard.bit_count()):
            tasks = sets[guard]
            written = {number for task in tasks for number in task.written_numbers}
            outside = {number for number in written if number in kept or read_by.get(number, set()) - {guard}}
            is_read = _run_if(conditions[guard], tasks, values, context.inside(guard), outside) != conditions[guard]
            for number in {n for task in tasks for n in task.read_numbers if n < self.program.num_inputs}:
                after[number] = after[number] | is_read if number in after else is_read
        return after

    def postponed(self, inputs: Mapping[int, Collection[int]]) -> tuple["Schedule", dict[int, list[Task]]]:
        """For each guard the tasks whose results no other task reads first, and that read only these of the inputs.

        They are taken out of the schedule.
        """
        needed: dict[int, set[int]] = {guard: set() for guard in inputs}
        found: dict[int, list[Task]] = {guard: [] for guard in inputs}
        others = []
        for task in reversed(self.tasks):
            guard = task.guard
            own = guard in inputs and all(n >= self.program.num_inputs or n in inputs[guard] for n in task.read_numbers)
            if own and needed[guard].isdisjoint(task.written_numbers):
                found[guard].append(task)
            else:
                others.append(task)
                needed.get(guard, set()).update(task.read_numbers)
        return self._replace(tasks=others[::-1]), {guard: tasks[::-1] for guard, tasks in found.items()}


def copied(tasks: Iterable[Task], values: Values, outputs: Iterable[tuple[Any, Region]] = ()) -> Values:
    """A copy of the values that tasks and outputs read, to which the tasks can write."""
    numbers = {number for task in tasks for number in (*task.read_numbers, *task.written_numbers)}
    numbers.update(number for number, _ in outputs if isinstance(number, int))
    return values.only(number for number in numbers if values.has(number))


def _run_all(tasks: Sequence[Task], values: Values, context: Context, kept: set[int] | None) -> None:
    """Evaluates tasks in order; with ``kept``, values that no later task reads are dropped, except these."""
    last = {n: i for i, task in enumerate(tasks) for n in (*task.written_numbers, *task.read_numbers)}
    for i, task in enumerate(tasks):
        task.run(context, values)
        for number in (*task.written_numbers, *task.read_numbers):
            if kept is not None and number not in kept and last[number] == i:
                values.drop(number)


def _run_if(condition: Any, tasks: Sequence[Task], values: Values, context: Context, outside: Collection[int]) -> Any:
    """Evaluates tasks if a condition holds, or else writes zeros for the values that are read ``outside``.

    Returns the condition as a result of the tasks.
    """
    writes = [(n, context.bound(region)) for task in tasks for n, region in filter(None, task.writes) if n in outside]

    def run() -> tuple[list[Any], Any]:
        inside = copied(tasks, values)
        _run_all(tasks, inside, context, None)
        return [inside.read(*write) for write in writes], jnp.ones((), bool)

    outs, has_run = if_(condition, run)
    for write, out in zip(writes, outs, strict=True):
        values.write(*write, out)
    return has_run


def if_(condition: Any, run: Callable[[], Any]) -> Any:
    """``run()`` if a condition holds, or else zeros."""
    run = jax.jit(run)  # traced once, though called for its types and in the branch
    traced = run.trace()
    treedef = jax.tree.structure(traced.out_info)
    return jax.lax.cond(condition, run, lambda: treedef.unflatten(map(zeros, traced.jaxpr.out_avals)))
