"""Walks a program backwards: which region of each value is wanted, and so which tasks are needed."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax

from optax_freeze._jax_internals import Branches, Loop, Mapped, inside, key_of
from optax_freeze._program import loops
from optax_freeze._program.decisions import decisive
from optax_freeze._program.dependence import Known
from optax_freeze._program.materialized import Materialized
from optax_freeze._program.operations import Computation, Cost, computation, from_rows, is_cheap, rule_of
from optax_freeze._program.recompute import program_of
from optax_freeze._program.regions import EVERYTHING, Region, Rows, is_scattered, is_whole, without_elements
from optax_freeze._program.tasks import (
    ALWAYS,
    Context,
    Read,
    Schedule,
    Task,
    Wanted,
    joined_guard,
    one_region,
    overlap,
    regions_apart,
)
from optax_freeze._program.trace import Equation, Program

_NEARLY_WHOLE = 0.95
"""Of a larger share of a value everything is computed, and cut: rows may cost more than they save."""
_MOST_REPEATS = 4
"""A cheap operation is repeated for so many regions that overlap. A tree of halves would want one for each row."""


class Inner(NamedTuple):
    """What one walk learns of the programs of loops and branches for later ones."""

    programs: dict[tuple[int, ...], tuple[Any, Program]]  # by the ids of a jaxpr and its constants
    compared: dict[int, tuple[Program, set[int]]]  # comparisons of which everything is computed, by the id of a program


def schedule(
    program: Program,
    outputs: Sequence[tuple[Any, Region, int]],
    known: Known | None = None,
    deciding: Collection[Any] = (),
    inner: Inner | None = None,
) -> Schedule:
    """The tasks that compute these regions of values, each with its guard.

    Args:
      known: of a program that will be differentiated: loops are divided after their known steps. What later steps read
        is cut, since the transpose of a row that is read in place is an array of zeros in each step.
      deciding: the values of which one bit decides about what is computed from the outputs.
    """
    decides = decisive(program, deciding)
    inner = Inner({}, {}) if inner is None else inner
    _, compared = inner.compared.setdefault(id(program), (program, set()))
    walk = Walk(program, known, decides, inner, compared)
    wanted = walk.run(outputs)
    if more := walk.compared_in_part() - compared:
        compared |= more
        walk = Walk(program, known, decides, inner, compared)
        wanted = walk.run(outputs)
    computed = {n for eqn in program.eqns for n in eqn.outputs}
    computed.update(n for task in walk.tasks for n in task.written_numbers)
    given = {n: wanted for n, wanted in walk.wanted.items() if n not in computed}
    return Schedule(program, walk.tasks[::-1], given, [(value, region) for value, region, _ in wanted])


@dataclasses.dataclass
class Walk:
    """The state of a walk: what is wanted of each value, and the tasks found, the last first.

    ``compared`` are the comparisons of which everything is computed, by the numbers of their results.
    """

    program: Program
    known: Known | None
    decisive: Collection[int]
    inner: Inner
    compared: Collection[int]

    def __post_init__(self) -> None:
        self.wanted: dict[int, Wanted] = {}
        self.tasks: list[Task] = []
        self.completed: set[int] = set()  # of which everything is computed, though not all is wanted
        self.in_part = set[int]() if self.known is None else self.known.in_part
        self.equals = _equal_products(self.program)
        self.wanted_of_equals: dict[int, dict[int, Wanted]] = {}
        self.materialized = Materialized(self.program)

    def operand(self, value: Any, region: Region) -> tuple[Any, Region]:
        """A region of a value; of one without elements nothing is computed."""
        empty = without_elements(region, self.program.avals[value]) if isinstance(value, int) else None
        return (value, region) if empty is None else (empty, EVERYTHING)

    def want(self, value: Any, region: Region, guard: int) -> None:
        """Adds a region to those wanted of a value; literals are known."""
        if isinstance(value, int):
            aval = self.program.avals[value]
            shape = getattr(aval, "shape", ())
            is_cuttable = guard == ALWAYS and region.axis >= 0 and self.known is None
            if aval is not None and is_whole(region, shape):
                region = EVERYTHING
            elif is_cuttable and _NEARLY_WHOLE < region.share(shape) < 1:
                self.completed.add(value)
                region = EVERYTHING
            if self.known is not None and value not in self.in_part:
                region = EVERYTHING
            wanted = self.wanted.setdefault(value, {})
            wanted[region] = wanted.get(region, 0) | guard

    def add(self, task: Task) -> None:
        """Adds a task, and wants what it reads."""
        extent = task.extent if self.completed.isdisjoint(task.eqn.outputs) else "everything"
        reads = [read and self.read(read) for read in task.reads]
        self.tasks.append(task := task._replace(reads=reads, extent=extent))
        for read in task.reads:
            if read is not None:
                self.want(read.value, read.region, task.guard)

    def read(self, read: Read) -> Read:
        """A read of a part without elements reads nothing."""
        value, region = self.operand(read.value, read.region)
        return Read(value, region, read.in_place, self.program.avals[value] if isinstance(value, int) else None)

    def body(self, closed: Any) -> Program:
        """The program of a loop or a branch."""
        key = (id(closed.jaxpr), *map(id, closed.consts))
        if key not in self.inner.programs:
            self.inner.programs[key] = closed, program_of(closed, enter_remat=self.known is None)
        return self.inner.programs[key][1]

    def inside(self, program: Program, outputs: Sequence[Any], marks: Sequence[bool]) -> Schedule:
        """The tasks of a step or a branch that compute these regions of values; ``marks``: whether results decide."""
        deciding = list(compress(program.outputs, marks))
        known = None if self.known is None else Known()  # only the outermost program has inputs that are known in part
        return schedule(program, outputs, known, deciding, self.inner)

    def decide(self, eqn: Equation) -> list[bool]:
        """Which results of an operation decide."""
        return [number in self.decisive for number in eqn.outputs]

    def run(self, outputs: Sequence[tuple[Any, Region, int]]) -> list[tuple[Any, Region, int]]:
        """Walks over all equations, the last first, and returns what is wanted of the outputs."""
        found = [(*self.operand(value, region), guard) for value, region, guard in outputs]
        for each in found:
            self.want(*each)
        for eqn in reversed(self.program.eqns):
            wanted: list[Wanted] = [self.wanted.get(number, {}) for number in eqn.outputs]
            if eqn.has_effects:
                wanted = [{EVERYTHING: ALWAYS}] * len(wanted)
            if not any(wanted) and not eqn.has_effects and self.wanted_of_equals.keys().isdisjoint(eqn.outputs):
                continue
            if self._enters(eqn, wanted):
                continue
            if not self.equals.keys().isdisjoint(eqn.outputs):
                self._product(eqn, wanted[0])
            elif len(wanted) == 1 or (is_cheap(eqn) and (self.known is None or self._is_in_part(eqn))):
                for place in reversed(range(len(wanted))):
                    self._single(eqn, place, wanted[place])
            else:
                self._several(eqn, wanted)
        return found

    def compared_in_part(self) -> set[int]:
        """The comparisons that are wanted in rows, of arrays that another operation reads as a whole.

        XLA computes the rows of such an array a second time, beside the comparison, and rounds them in another way. A
        maximum then differs from all numbers that it was taken of, and its gradient is zero.
        """
        found = set()
        for eqn in self.program.eqns if self.decisive else ():
            arrays = [n for n in eqn.inputs if isinstance(n, int) and n in self.decisive]
            if len(arrays) == 2 and is_cheap(eqn) and eqn.avals_out[0].dtype == bool:
                wanted = self.wanted.get(eqn.outputs[0], {})
                in_part = bool(wanted) and EVERYTHING not in wanted
                again = any(EVERYTHING in self.wanted.get(n, {}) and not self.materialized.is_stored(n) for n in arrays)
                found |= {eqn.outputs[0]} if in_part and again else set()
        return found

    def _enters(self, eqn: Equation, wanted: Sequence[Wanted]) -> bool:
        """Adds the tasks of an equation with programs of its own, if they can be divided."""
        found = inside(eqn)
        if isinstance(found, Loop):
            loops.scan(self, eqn, found, wanted)
            return True
        if isinstance(found, Branches):
            return loops.cond(self, eqn, found, wanted)
        return isinstance(found, Mapped) and loops.shard_map(self, eqn, found, wanted)

    def _product(self, eqn: Equation, wanted: Wanted) -> None:
        """The tasks of a product that occurs several times, at the first time.

        A compiler merges equal products, but not some rows of one with other rows of the other.
        """
        [number], [aval], first = eqn.outputs, eqn.avals_out, self.equals[eqn.outputs[0]]
        each = self.wanted_of_equals.setdefault(first, {})
        each |= {number: wanted} if wanted else {}
        if number != first:
            return
        region = one_region([r for of_one in each.values() for r in of_one], aval.shape)
        is_less = region is not EVERYTHING or sum(_share(of_one, aval.shape) for of_one in each.values()) > 1
        guards = {guard for of_one in each.values() for guard in of_one.values()}
        if len(each) == 1 or len(guards) > 1 or not is_less:
            for n, of_one in each.items():
                self._single(eqn._replace(outputs=(n,)), 0, of_one)
        elif found := computation(eqn, [region]):
            self._compute(eqn, found, [region], joined_guard([*each.values()]), [*each])
        else:
            self.everything(eqn, [*each.values()], region is not EVERYTHING, [*each])

    def _single(self, eqn: Equation, place: int, wanted: Wanted) -> None:
        """The tasks of one result of an equation, which is computed on its own."""
        in_part = self._is_in_part(eqn)
        chosen = wanted if [*wanted] == [EVERYTHING] else self._chosen(eqn, place, wanted, in_part)
        part = None
        if in_part and EVERYTHING in chosen:
            part = from_rows(eqn, place, [isinstance(x, int) and x in self.in_part for x in eqn.inputs])
        for region, guard in chosen.items():
            regions = [region if i == place else None for i in range(len(eqn.outputs))]
            found = part if part is not None and region is EVERYTHING else computation(eqn, regions)
            if found is not None:
                self._compute(eqn, found, regions, guard)
            elif region is EVERYTHING:
                self.everything(eqn, [{region: guard}], without_rule=False)
            else:
                self.everything(eqn, [wanted], without_rule=True)
                return

    def _chosen(self, eqn: Equation, place: int, wanted: Wanted, in_part: bool) -> Wanted:
        """The regions of a result that are computed, each on its own."""
        # What is stored, or decides, is computed once: a compiler would not merge two computations of different rows.
        # What is cheap is repeated for each region: a slice of its result would make the compiler store all of it.
        shape = getattr(eqn.avals_out[place], "shape", ())
        everything = {EVERYTHING: joined_guard([wanted])}
        if eqn.outputs[place] in self.compared and not in_part:
            return everything
        is_stored = EVERYTHING in wanted and self.materialized.is_stored(eqn.outputs[place]) and not in_part
        decides = eqn.outputs[place] in self.decisive and not in_part
        is_static = all(isinstance(region, Rows) for region in wanted)
        is_few = len(wanted) <= _MOST_REPEATS or (is_static and not overlap(list(wanted), shape))
        if rule_of(eqn).cost is Cost.ELEMENTWISE:
            shares = math.fsum(region.share(shape) for region in wanted)
            is_few &= self.materialized.is_repeated(eqn.outputs[place], shares)
        if is_cheap(eqn) and is_few and not is_stored and not decides:
            return wanted
        apart = regions_apart(wanted, shape)
        is_dear = (decides and len(apart) > 1) or any(is_scattered(region, shape) for region in apart)
        return everything if is_dear or self._everything_is_as_cheap(eqn, apart, shape) else apart

    def _is_in_part(self, eqn: Equation) -> bool:
        """Whether only some rows of an operand should be read, even if all of the result is wanted."""
        return is_cheap(eqn) and not eqn.reads.isdisjoint(self.in_part)

    def _everything_is_as_cheap(self, eqn: Equation, chosen: Wanted, shape: Any) -> bool:
        """Whether all of a sum over a value that is there is as cheap, or of a convolution of which half is wanted."""
        if rule_of(eqn).cost is Cost.REDUCTION:
            operand = eqn.inputs[0]
            return isinstance(operand, int) and EVERYTHING in self.wanted.get(operand, {})
        half = any(region is not EVERYTHING and region.share(shape) >= 0.5 for region in chosen)
        return eqn.primitive is jax.lax.conv_general_dilated_p and half

    def _several(self, eqn: Equation, wanted: Sequence[Wanted]) -> None:
        """The task of an equation with several results."""
        regions = [
            one_region(each, getattr(aval, "shape", ())) for each, aval in zip(wanted, eqn.avals_out, strict=True)
        ]
        guard = joined_guard(wanted)
        partial = any(region not in (None, EVERYTHING) for region in regions)
        found = computation(eqn, regions)
        if found is None:
            self.everything(eqn, wanted, without_rule=partial)
        else:
            self._compute(eqn, found, regions, guard)

    def _compute(
        self, eqn: Equation, found: Computation, asked: Sequence[Region | None], guard: int, numbers: Sequence[int] = ()
    ) -> None:
        """The task that computes regions of results, or others than are asked, if the rule does.

        A single result may have several ``numbers``.
        """
        regions = found.outputs or asked
        is_named = any(region is not None and region.is_named for region in asked)
        extent = "rows" if any(region not in (None, EVERYTHING) for region in regions) else ""
        if extent and eqn.primitive is jax.lax.pad_p and found.regions[0] is EVERYTHING:
            extent = "everything"
        reads = [None if r is None else Read(v, r) for v, r in zip(eqn.inputs, found.regions, strict=True)]
        copies = max(len(numbers), 1)
        pairs = zip(numbers or eqn.outputs, [*regions] * copies, strict=True)
        writes = [None if r is None else (n, r) for n, r in pairs]
        shares = [0.0 if r is None else r.share(v.shape) for r, v in zip(regions, eqn.avals_out, strict=True)]

        def apply(context: Context, operands: Sequence[Any]) -> Sequence[Any]:
            known = computation(eqn, [r and context.bound(r) for r in asked]) if is_named else found
            return [*known.apply(*operands)] * copies  # type: ignore[union-attr]

        self.add(Task(eqn, reads, writes, apply, guard, max(shares, default=1.0), extent))

    def everything(
        self, eqn: Equation, wanted: Sequence[Wanted], without_rule: bool, numbers: Sequence[int] = ()
    ) -> None:
        """The task that computes all of an equation; ``without_rule`` although less is wanted.

        A single result may have several ``numbers``.
        """
        reads = [Read(value, EVERYTHING) for value in eqn.inputs]
        writes = [(number, EVERYTHING) for number in numbers or eqn.outputs]
        guard = ALWAYS if eqn.has_effects else joined_guard(wanted)

        def apply(_: Any, operands: Sequence[Any]) -> Sequence[Any]:
            out = eqn.bind_all(*operands)
            if without_rule and eqn.primitive is jax.lax.top_k_p:
                # XLA's compiler for CPUs makes a sort of a `top_k` whose result is cut. One barrier for both results
                # crashes it where they are sharded.
                return [*map(jax.lax.optimization_barrier, out)]
            return out * max(len(numbers), 1)

        self.add(Task(eqn, reads, writes, apply, guard, extent="everything" if without_rule else ""))


def _equal_products(program: Program) -> dict[int, int]:
    """For the results of products that occur several times, the number of the first one."""
    found: dict[Any, list[int]] = {}
    for eqn in program.eqns:
        is_product = rule_of(eqn).cost is Cost.PRODUCT and all(isinstance(x, int) for x in eqn.inputs)
        if is_product and (key := key_of(eqn)) is not None:
            found.setdefault((key, eqn.inputs), []).append(eqn.outputs[0])
    return {n: numbers[0] for numbers in found.values() if len(numbers) > 1 for n in numbers}


def _share(wanted: Wanted, shape: Sequence[int]) -> float:
    """How much of a value is wanted, at most all of it."""
    return min(1.0, sum(region.share(shape) for region in wanted))
