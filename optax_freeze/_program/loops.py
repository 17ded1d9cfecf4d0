"""Loops and branches: only the steps, the results and the regions of them that are wanted.

A ``scan`` is divided into segments of steps of which the same results are wanted, and ends after the last wanted one.
Its inputs are read by index, since a slice is a copy. What is wanted of the carry is the same at both ends.
"""

import dataclasses
import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._jax_internals import Branches, ClosedJaxpr, Loop, Mapped, names_axes
from optax_freeze._program.decisions import results_that_decide
from optax_freeze._program.dependence import Known
from optax_freeze._program.propagation import settled
from optax_freeze._program.regions import EVERYTHING, DynamicRows, Region, Rows, Values, covering
from optax_freeze._program.tasks import (
    ALWAYS,
    Context,
    Read,
    Schedule,
    Task,
    joined_guard,
    new_guards,
    one_region,
    regions_apart,
)
from optax_freeze._program.trace import Equation, Program, flatten
from optax_freeze._spec.sharding import in_mesh_of, in_this_mesh, zeros

_MOST_SEGMENTS = 8
_MOST_GROWTHS = 8


class Planner(Protocol):
    """What a loop or a branch needs of the walk over the program that it is in."""

    program: Program
    known: Known | None

    def body(self, closed: ClosedJaxpr) -> Program: ...
    def inside(self, program: Program, outputs: Sequence[Any], marks: Sequence[bool]) -> Schedule: ...
    def decide(self, eqn: Equation) -> list[bool]: ...
    def add(self, task: Task) -> None: ...
    def everything(self, eqn: Equation, wanted: Sequence[Any], without_rule: bool) -> None: ...


class _Output(NamedTuple):
    """What is wanted of a stacked result: a region of it at some steps."""

    place: int  # among the stacked results
    region: Region  # of one step
    steps: Rows  # all, if they are known only while the program runs
    written: Region  # of the stacked result
    guard: int

    @property
    def dynamic(self) -> DynamicRows | None:
        """The steps, if they are known only while the program runs."""
        is_dynamic = isinstance(self.written, DynamicRows) and self.written.axis == 0
        return self.written if is_dynamic else None  # type: ignore[return-value]


class _Carried(NamedTuple):
    """What is wanted of a value that a loop carries.

    A stencil adds its neighbors in each step: its rows become more and more, until everything is computed.
    """

    shape: Sequence[int]
    region: Region | None
    guard: int
    growths: int = 0

    @classmethod
    def of(cls, wanted: Mapping[Region, int], shape: Sequence[int]) -> "_Carried":
        """What is wanted in several regions."""
        return cls(shape, one_region(wanted, shape), joined_guard([wanted]))

    def joined(self, other: "_Carried") -> "_Carried":
        """What is wanted if one or the other is."""
        region = one_region([each for each in (self.region, other.region) if each is not None], self.shape)
        growths = self.growths + (self.region not in (None, region))
        region = EVERYTHING if growths > _MOST_GROWTHS else region
        return _Carried(self.shape, region, self.guard | other.guard if region is not None else 0, growths)


def cond(walk: Planner, eqn: Equation, found: Branches, wanted: Sequence[Any]) -> bool:
    """Adds the task of a branch; False if its branches have to be left as they are."""
    if found.by_platform or eqn.has_effects:
        return False
    regions = [one_region(each, aval.shape) for each, aval in zip(wanted, eqn.avals_out, strict=True)]
    guard = joined_guard(wanted)
    branches = []
    for program in map(walk.body, found.programs):
        outs = [(value, r, guard) for value, r in zip(program.outputs, regions, strict=True) if r is not None]
        branches.append(walk.inside(program, outs, walk.decide(eqn)))
    reads = []
    for place, (value, aval) in enumerate(zip(eqn.inputs[1:], eqn.avals_in[1:], strict=True)):
        wanted_of = [region for branch in branches for region in branch.given.get(place, ())]
        reads += [(place, read) for read in _reads(value, aval, wanted_of)]

    def apply(context: Context, operands: Sequence[Any]) -> Sequence[Any]:
        def run(branch: Schedule) -> list[Any]:
            values = Values()
            for (place, read), x in zip(reads, operands[1:], strict=True):
                values.write(place, context.bound(read.region), x)
            return branch.run(values, context.inside(guard))

        return jax.lax.switch(operands[0], [functools.partial(run, branch) for branch in branches])

    writes = [(n, r) for n, r in zip(eqn.outputs, regions, strict=True) if r is not None]
    reads_of_all = [Read(eqn.inputs[0], EVERYTHING), *(read for _, read in reads)]
    walk.add(Task(eqn, reads_of_all, writes, apply, guard, inner=branches))
    return True


def _reads(value: Any, aval: Any, wanted: Collection[Region]) -> list[Read]:
    """The reads of an operand for what is wanted of it in a step or a branch."""
    return [Read(value, region) for region in covering(list(dict.fromkeys(wanted)), aval.shape)] if wanted else []


def scan(walk: Planner, eqn: Equation, found: Loop, wanted: Sequence[Any]) -> None:
    """Adds the tasks of a loop: one for each segment."""
    if not found.length:
        walk.everything(eqn, wanted, without_rule=False)
    else:
        _PartOfLoop(walk, eqn, found, wanted).add(wanted)


def _outputs(eqn: Equation, wanted: Sequence[Any], carried: int, length: int) -> list[_Output]:
    """What is wanted of each stacked result, in the regions in which it will be stored."""
    everything, found = Rows(0, np.arange(length)), []
    for place, each in enumerate(wanted):
        chosen = regions_apart(each, eqn.avals_out[carried + place].shape)
        if len({region.axis == 0 for region in chosen}) > 1 or any(getattr(r, "is_shifted", False) for r in chosen):
            chosen = {EVERYTHING: joined_guard([each])}
        for region, guard in chosen.items():
            steps = region if isinstance(region, Rows) and region.axis == 0 else everything
            found.append(_Output(place, EVERYTHING if region.axis == 0 else region.inside(), steps, region, guard))
    return found


class _PartOfLoop:
    """A ``scan`` of which some results are wanted."""

    def __init__(self, walk: Planner, eqn: Equation, found: Loop, wanted: Sequence[Any]) -> None:
        self.walk, self.eqn = walk, eqn
        self.consts, self.carried = found.consts, found.carried
        self.length, self.reverse, self.unroll, self.stacked = found.length, found.reverse, found.unroll, found.stacked
        self.body = walk.body(found.body)
        self.marks = results_that_decide(found, walk.decide(eqn))
        self.outputs = _outputs(eqn, wanted[self.carried :], self.carried, self.length)
        self.known = walk.known.steps.get(eqn.outputs[0], 0) if walk.known and eqn.outputs else 0
        self.known_stop = self.length - self.known if self.reverse else self.known

    def is_read_in_place(self, start: int) -> bool:
        """Whether steps from ``start`` on read rows in place: slices take memory, but are transposed at less cost."""
        is_known = start >= self.known_stop if self.reverse else start < self.known
        return self.walk.known is None or is_known

    def add(self, wanted: Sequence[Any]) -> None:
        """Adds the tasks, given what is wanted of the results."""
        eqn = self.eqn
        carry = [_Carried.of(w, aval.shape) for w, aval in zip(wanted, eqn.avals_out[: self.carried], strict=False)]
        segments = self._segments()
        if len(segments) > _MOST_SEGMENTS:
            self.outputs = list(map(_hull, self.outputs))
            segments = self._segments()
        segments = segments[::-1] if self.reverse else segments
        numbers = {o: eqn.outputs[self.carried + o.place] for o in self.outputs}
        ends: Sequence[Any] = eqn.outputs[: self.carried]
        avals = eqn.avals_in[self.consts : self.stacked]
        for n, segment in reversed(list(enumerate(segments))):
            if not segment.outputs and not any(each.region for each in carry) and not eqn.has_effects:
                continue
            starts = eqn.inputs[self.consts :] if n == 0 else [*map(self.walk.program.add, avals, eqn.outputs)]
            earlier = {o for other in segments[:n] for o in other.outputs}
            before = {o: self.walk.program.add(*self._result(o)) for o in segment.outputs if o in earlier}
            part = _Segment(self, segment, starts, ends, dict(numbers), before, carry)
            part.add()
            carry = [each._replace(guard=part.guard) for each in part.needed]
            numbers |= before
            ends = starts

    def _result(self, output: _Output) -> tuple[Any, int]:
        place = self.carried + output.place
        return self.eqn.avals_out[place], self.eqn.outputs[place]

    def _segments(self) -> list["_Steps"]:
        """The runs of steps at which the same results are wanted, divided after the known steps."""
        marks = np.zeros((len(self.outputs), self.length), bool)
        for row, output in zip(marks, self.outputs, strict=True):
            row[output.steps.numbers] = True
        edges = {*(np.flatnonzero((marks[:, 1:] != marks[:, :-1]).any(0)) + 1).tolist(), self.known_stop}
        inner = sorted(edges - {0, self.length})
        spans = zip([0, *inner], [*inner, self.length], strict=True)
        return [_Steps(a, b, tuple(o for o, row in zip(self.outputs, marks, strict=True) if row[a])) for a, b in spans]


def _hull(output: _Output) -> _Output:
    """All steps between the first and the last wanted one."""
    if output.dynamic is not None or output.written is not output.steps:
        return output
    numbers = output.steps.numbers
    steps = Rows(0, np.arange(numbers[0], numbers[-1] + 1))
    return output._replace(steps=steps, written=steps)


class _Steps(NamedTuple):
    """Steps from ``start`` to ``stop``, at which the same outputs are wanted."""

    start: int
    stop: int
    outputs: tuple[_Output, ...]


@dataclasses.dataclass
class _Segment:
    """A part of a loop: steps at which the same results are wanted.

    Attributes:
      starts, ends: the carry before and after the steps.
      after: the numbers of the outputs; ``before``: those of what earlier segments wrote of them.
      wanted: what is wanted of the carry after the steps.
      carry, needed: what a step computes of the carry, and what is needed of it before the steps.
    """

    loop: _PartOfLoop
    steps: _Steps
    starts: Sequence[Any]
    ends: Sequence[Any]
    after: dict[_Output, int]
    before: dict[_Output, int]
    wanted: Sequence[_Carried]

    def __post_init__(self) -> None:
        eqn = self.loop.eqn
        self.outputs, self.numbers = self.steps.outputs, Rows(0, np.arange(self.steps.start, self.steps.stop))
        # A step that other devices or examples wait for is not skipped.
        self.waits = any(map(names_axes, eqn.effects))
        self.conditions = self._conditions([each.guard for each in (*self.wanted, *self.outputs)])
        is_dynamic = all(o in self.conditions for o in self.outputs)
        is_last = not any(each.region for each in self.wanted)
        self.ends_early = is_last and is_dynamic and not eqn.has_effects and not self.waits
        if self.numbers.count == 1:
            self.carry, self.needed = self.wanted, self._planned(self.wanted)
        else:  # a step computes what the next one needs
            self.carry = self.needed = settled(self.wanted, self._planned, _Carried.joined)
        self.guard = functools.reduce(operator.or_, [each.guard for each in (*self.carry, *self.outputs)], 0)
        if eqn.has_effects:
            self.guard = ALWAYS
        self.reads = self._reads()

    def add(self) -> None:
        """Adds the task of the segment."""
        loop, eqn = self.loop, self.loop.eqn
        extent = "rows" if any(o.written is not EVERYTHING for o in self.outputs) else ""
        reads = [*(read for _, read in self.reads), *(Read(number, o.written) for o, number in self.before.items())]
        writes = [(n, each.region) for n, each in zip(self.ends, self.carry, strict=True) if each.region is not None]
        writes += [(self.after[o], o.written) for o in self.outputs]
        carried = dict(enumerate(loop.consts + k for k, each in enumerate(self.carry) if each.region is not None))
        share = self.numbers.count / loop.length
        loop.walk.add(Task(eqn, reads, writes, self.apply, self.guard, share, extent, [self.body], carried))

    def _reads(self) -> list[tuple[int, Any]]:
        """What the steps read, with the places of the operands."""
        loop, eqn = self.loop, self.loop.eqn
        first, last = loop.consts, loop.consts + loop.carried
        found: list[tuple[int, Any]] = []
        for place, value in enumerate(eqn.inputs):
            wanted = self.body.given.get(place, {})
            if first <= place < last:
                region = self.needed[place - first].region
                reads = [] if region is None else [Read(self.starts[place - first], region)]
            elif place < first:
                reads = _reads(value, eqn.avals_in[place], wanted)
            else:
                in_place = loop.is_read_in_place(self.steps.start)
                reads = [Read(value, self.numbers, in_place)] if wanted else []
            found += [(place, read) for read in reads]
        return found

    def _conditions(self, others: Sequence[int]) -> dict[_Output, int]:
        """The outputs at steps that are known while the program runs, with a guard of each set of steps."""
        dynamic = {o: (o.dynamic, o.guard) for o in self.outputs if o.dynamic is not None}
        if self.waits:
            return dict.fromkeys(dynamic, ALWAYS)
        keys = list(dict.fromkeys(dynamic.values()))
        guards = dict(zip(keys, new_guards(len(keys), others), strict=True))
        return {o: guards[key] for o, key in dynamic.items()}

    def _planned(self, carry: Sequence[_Carried]) -> list[_Carried]:
        """Plans a step that computes this of the carry; returns what it needs of it."""
        loop = self.loop
        pairs = zip(loop.body.outputs, carry, strict=False)
        wanted = [(x, each.region, each.guard) for x, each in pairs if each.region is not None]
        stacked = loop.body.outputs[loop.carried :]
        wanted += [(stacked[o.place], o.region, self.conditions.get(o, o.guard)) for o in self.outputs]
        self.body = loop.walk.inside(loop.body, wanted, loop.marks)
        needed = [_Carried.of(self.body.given.get(p, {}), each.shape) for p, each in enumerate(carry, loop.consts)]
        return [each._replace(guard=self._outside(each.guard)) for each in needed]

    def _outside(self, guard: int) -> int:
        """A guard of a task of a step as one outside of the loop."""
        for output, bit in self.conditions.items():
            guard = guard & ~bit | output.guard if guard >= 0 and guard & bit else guard
        return guard

    def apply(self, context: Context, operands: Sequence[Any]) -> Sequence[Any]:
        """Runs the steps."""
        first, last, start = self.loop.consts, self.loop.stacked, self.steps.start
        carried, given = [], []
        for (place, read), x in zip(self.reads, operands, strict=False):
            is_placed = place < last or isinstance(x, tuple)
            (carried if first <= place < last else given).append((place, read, x if is_placed else (x, start)))
        previous = dict(zip(self.before, operands[len(self.reads) :], strict=True))
        # Those that later segments write, too.
        goes_on = [o for o in self.outputs if self.after[o] not in self.loop.eqn.outputs]
        buffered = [o for o in self.outputs if o in self.before or o in self.conditions or o in goes_on]
        stacked = [o for o in self.outputs if o not in buffered]
        numbers = {o: context.bound(o.written).unclamped for o in self.conditions}  # type: ignore[attr-defined]
        step = _Step(self, context, given, [(place, read.region) for place, read, _ in carried], buffered, numbers)
        # A `scan` takes its rows from a stack of as many steps; of a longer one, a slice would be a copy.
        stacks = {p: x[0] for p, _, x in given if p >= last}
        sliced = {p: x for p, x in stacks.items() if x.shape[0] == self.numbers.count}
        state: Any = [x for *_, x in carried], [previous[o] if o in previous else self._buffer(o) for o in buffered]
        if self.numbers.count == 1:
            (carry, buffers), ys = step(state, (start, {}))
            ys = [*map(_of_one_step, ys)]
        elif self.ends_early:
            (carry, buffers), ys = self._until_last(step, state, numbers.values()), []
        else:
            i = jnp.arange(start, self.steps.stop, dtype=jnp.int32)
            options = {"reverse": self.loop.reverse, "unroll": self.loop.unroll}
            (carry, buffers), ys = jax.lax.scan(step, state, (i, sliced), **options)
        found = dict(zip([*buffered, *stacked], [*buffers, *ys], strict=True))
        return [*carry, *(found[o] for o in self.outputs)]

    def _buffer(self, output: _Output) -> jax.Array:
        aval, _ = self.loop._result(output)
        return zeros(aval, output.written.shape(aval.shape))

    def _until_last(self, step: Any, state: Any, numbers: Collection[Any]) -> Any:
        """Runs the steps until the last one with a wanted result, whose number is a value of the program."""
        (start, stop, _), reverse = self.steps, self.loop.reverse
        if reverse:
            steps = stop - jnp.maximum(functools.reduce(jnp.minimum, [each[0] for each in numbers]), start)
        else:
            steps = jnp.minimum(functools.reduce(jnp.maximum, [each[-1] for each in numbers]) + 1, stop) - start

        def once(state: Any) -> Any:
            n, state = state
            return n + 1, step(state, (stop - 1 - n if reverse else start + n, {}))[0]

        return jax.lax.while_loop(lambda state: state[0] < steps, once, (jnp.int32(0), state))[1]


@dataclasses.dataclass(eq=False)
class _Step:
    """One step of a segment, as a function of ``jax.lax.scan``.

    Attributes:
      given: the places of constant and stacked operands, their reads, and what was read.
      carried: the places of the carry, and the regions of it.
      buffered: the outputs that are written into arrays, one step after the other; the others are stacked.
      numbers: those of the steps of which outputs are wanted, if they are values of the program.
    """

    part: _Segment
    context: Context
    given: Sequence[tuple[int, Any, Any]]
    carried: Sequence[tuple[int, Region]]
    buffered: Sequence[_Output]
    numbers: Mapping[_Output, jax.Array]

    def __call__(self, state: Any, of_step: Any) -> Any:
        part, (carry, buffers), (i, rows) = self.part, state, of_step
        is_wanted = {o: each == i for o, each in self.numbers.items()}
        hits = {o: jnp.any(each) for o, each in is_wanted.items()}
        conditions = {
            bit: hits[o] if o.guard in (ALWAYS, part.guard) else hits[o] & self.context.holds(o.guard)
            for o, bit in part.conditions.items()
            if bit != ALWAYS
        }
        outs = part.body.run(self._values(carry, i, rows), self.context.inside(part.guard, conditions))
        last = len(outs) - len(part.outputs)
        rows_of, new = dict(zip(part.outputs, outs[last:], strict=True)), []
        for o, buffer in zip(self.buffered, buffers, strict=True):
            before = int(np.searchsorted(o.steps.numbers, part.steps.start)) - part.steps.start
            place = jnp.argmax(is_wanted[o]) if o in is_wanted else i + before
            new.append(_written(buffer, rows_of[o], place, hits.get(o)))
        return (outs[:last], new), [rows_of[o] for o in part.outputs if o not in self.buffered]

    def _values(self, carry: Sequence[Any], i: Any, rows: Mapping[int, Any]) -> Values:
        """What the step reads; ``rows`` are those of stacks that the loop slices."""
        values = Values()
        for place, read, x in self.given:
            if place < self.part.loop.consts:
                values.write(place, self.context.bound(read.region), x)
            else:
                values.write(place, EVERYTHING, rows[place] if place in rows else _row_of(x, i))
        for (place, region), x in zip(self.carried, carry, strict=True):
            values.write(place, self.context.bound(region), x)
        return values


def _row_of(stack: tuple[Any, int], i: Any) -> Any:
    """The row of a step."""
    array, begins = stack
    place = i - begins
    with in_mesh_of(array):
        # Of a single step: the compiler for TPUs refuses some slices of arrays in host memory by computed numbers.
        if isinstance(place, int):
            return jax.lax.index_in_dim(array, place, 0, keepdims=False)
        return jax.lax.dynamic_index_in_dim(array, in_this_mesh(place), 0, keepdims=False)


def _of_one_step(row: Any) -> Any:
    """A stacked result of a single step."""
    with in_mesh_of(row):
        return row[None]


def _written(buffer: Any, row: Any, place: Any, hit: Any) -> Any:
    """A stacked result with the row of one step; ``hit`` says whether it is wanted."""

    def write(_: Any, buffer: Any) -> Any:
        return jax.lax.dynamic_update_index_in_dim(buffer, row, in_this_mesh(place), 0)

    with in_mesh_of(buffer):
        if hit is None:
            return write(None, buffer)
        return jax.lax.fori_loop(0, in_this_mesh(hit).astype(jnp.int32), write, buffer)


def shard_map(walk: Planner, eqn: Equation, found: Mapped, wanted: Sequence[Any]) -> bool:
    """Adds the task of a ``jax.shard_map`` of whose results only rows are wanted; False if everything is wanted."""
    regions = []
    for each, aval, spec in zip(wanted, eqn.avals_out, found.out_specs, strict=True):
        region = one_region(each, aval.shape)
        is_cut = isinstance(region, Rows) and (len(spec) <= region.axis or spec[region.axis] is None)
        regions.append(region if region is None or is_cut else EVERYTHING)
    if eqn.has_effects or not any(isinstance(region, Rows) for region in regions):
        return False
    program = flatten(found.program)
    outs = [(x, r, ALWAYS) for x, r in zip(program.outputs, regions, strict=True) if r is not None]
    inner = walk.inside(program, outs, walk.decide(eqn))
    places = [place for place in range(len(eqn.inputs)) if place in inner.given]

    def apply(context: Context, operands: Sequence[Any]) -> Sequence[Any]:
        of_shards = lambda *shards: inner.run(Values(dict(zip(places, shards, strict=True))), context)  # noqa: E731
        out_specs = [spec for spec, r in zip(found.out_specs, regions, strict=True) if r is not None]
        return found.map(of_shards, [found.in_specs[n] for n in places], out_specs)(*operands)

    reads = [Read(eqn.inputs[n], EVERYTHING) for n in places]
    writes = [(n, r) for n, r in zip(eqn.outputs, regions, strict=True) if r is not None]
    walk.add(Task(eqn, reads, writes, apply, joined_guard(wanted), inner=[inner]))
    return True
