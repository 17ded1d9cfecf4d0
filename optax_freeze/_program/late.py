"""Values that are computed from arrays in host memory where they are used, and never stored.

A value is *late* if cheap operations compute it from arrays in host memory, inputs on the device and numbers. An
operation that reads such a value brings the wanted rows to the device and repeats the cheap operations there. So no
copy of a weight waits on the device for the backward pass, and a loop reads only the row of its step.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from optax_freeze._program.host_array import FEWEST_AXES
from optax_freeze._program.operations import is_cheap
from optax_freeze._program.regions import EVERYTHING, LAZY, DynamicRows, Region, Unread, Values
from optax_freeze._program.tasks import ALWAYS, Read, Schedule
from optax_freeze._program.trace import Equation, Program, flatten, opened, scan_counts

_MOST_OPERATIONS = 64
"""The most operations that are repeated for a late value; of more, the value is computed once."""


_LOOKUPS = ("gather",)

_ONE_ROW = DynamicRows(0, np.zeros(1, np.int32))


class LateValue(Unread):
    """A value of a program of cheap operations, given its inputs, of which some are unread; or one row of it."""

    def __init__(self, program: Program, number: int, values: Values) -> None:
        self.program, self.number, self.values = program, number, values

    @property
    def shape(self) -> tuple[int, ...]:
        return self.program.avals[self.number].shape

    def read(self, region: Region, beside: Any = None) -> jax.Array:
        values = self.values.copy()
        values.beside = beside
        return _schedule(self.program, self.number, region).run(values)[0]

    def rows(self, region: Any) -> Unread:
        return _Part(self, region)

    def row(self, i: Any) -> Unread:
        return _Part(self, DynamicRows(0, jnp.asarray(i, jnp.int32)[None]), is_row=True)

    def inside(self) -> "LateValue":
        return self


class _Part(Unread):
    """Rows of a late value, or one row without its axis."""

    def __init__(self, of: LateValue, region: Any, is_row: bool = False) -> None:
        self.of, self.region, self.is_row = of, region, is_row

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.region.shape(self.of.shape)
        return shape[1:] if self.is_row else shape

    def read(self, region: Region, beside: Any = None) -> jax.Array:
        if region is not EVERYTHING:
            return self._late().read(region, beside)
        rows = self.of.read(self.region, beside)
        return jnp.squeeze(rows, 0) if self.is_row else rows

    def _late(self) -> LateValue:
        """This part as the value of a program of parts of the arrays, of which again rows can be read.

        It belongs to the trace in which it is made, so it is made anew for each read.
        """
        found, given, parts = _schedule(self.of.program, self.of.number, self.region), Values(), []
        for n, wanted in found.given.items():
            for region in wanted:
                x = self.of.values.unread(n)
                if x is None or region.axis > 0:
                    given.write(n, region, self.of.values.read(n, region))
                elif region is LAZY:
                    given.write_whole(n, x)
                else:
                    parts.append((n, region, x if region is EVERYTHING else x.rows(region)))

        def part(*arrays: Any) -> Any:
            values = given.copy()
            for (n, region, _), array in zip(parts, arrays, strict=True):
                values.write(n, region, array)
            [rows] = found.run(values)
            return jnp.squeeze(rows, 0) if self.is_row else rows

        shapes = [jax.eval_shape(functools.partial(x.read, EVERYTHING)) for *_, x in parts]
        program = flatten(jax.make_jaxpr(part)(*shapes))
        return LateValue(program, program.outputs[0], Values({k: x for k, (*_, x) in enumerate(parts)}))

    def rows(self, region: Any) -> Unread:
        return self._late().rows(region)

    def row(self, i: Any) -> Unread:
        return self._late().row(i)

    def inside(self) -> Unread:
        return self


_schedulers: list[Callable[..., Schedule]] = []


def register(schedule: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """Registers the function that lists the tasks of a late value, which needs late values itself."""
    _schedulers.append(schedule)
    return schedule


def _schedule(program: Program, number: int, region: Region) -> Schedule:
    return _schedulers[0](program, [(number, region, ALWAYS)], is_late=True)


class LateRead(NamedTuple):
    """A region of a late value, computed where it is read."""

    schedule: Schedule
    in_place: bool = False

    @property
    def wanted(self) -> Sequence[tuple[int, Region]]:
        """The regions of stored values that are read."""
        return [(n, region) for n, wanted in self.schedule.given.items() for region in wanted]

    def of(self, values: Values, beside: Any) -> Any:
        """What is read; ``beside``: another operand of the operation that reads it."""
        inner = values.only(self.schedule.given)
        inner.beside = beside
        [out] = self.schedule.run(inner)
        return (out, 0) if self.in_place else out


class LazyRead(NamedTuple):
    """A late value that is passed on unread."""

    program: Program
    number: int
    leaves: Collection[int]
    region: Region = LAZY

    @property
    def wanted(self) -> Sequence[tuple[int, Region]]:
        """The regions of stored values that are read."""
        return [(n, LAZY) for n in self.leaves]

    def of(self, values: Values, _: Any) -> Any:
        """The value, or the one of which its rows are read."""
        if not self.program.eqns:
            found = values.unread(self.number)
            return values.read(self.number, EVERYTHING) if found is None else found
        return LateValue(self.program, self.number, values.only(self.leaves))


class Late:
    """The late values of a program, given its inputs in host memory and the other inputs that are stored anyway.

    Without ``scalars``, a late value does not depend on numbers that the program computes from its other inputs.
    """

    def __init__(
        self, program: Program, on_host: Collection[int], available: Collection[int], scalars: bool = True
    ) -> None:
        self.program, self.on_host, self.scalars = program, on_host, scalars
        self.available = {*program.consts, *available} - set(on_host)
        self.sizes: dict[int, int] = dict.fromkeys(on_host, 1)
        self.made_by: dict[int, Equation] = {}
        self.reads: dict[Any, LateRead] = {}
        for eqn in program.eqns:
            self._add(eqn)

    def __contains__(self, value: Any) -> bool:
        return isinstance(value, int) and value in self.sizes

    def _add(self, eqn: Equation) -> None:
        if eqn.has_effects:
            return
        is_barrier = eqn.primitive.name == "optimization_barrier"
        if not any(value in self for value in eqn.inputs):
            if (is_cheap(eqn) or is_barrier) and all(map(self.is_given, eqn.inputs)):
                self.available.update(eqn.outputs)
            return
        if is_barrier:
            for value, out in zip(eqn.inputs, eqn.outputs, strict=True):
                if value in self:
                    self._make(eqn, out, self.sizes[value])
                elif self.is_given(value):
                    self.available.add(out)
            return
        size = 1 + sum(self.sizes.get(value, 0) for value in eqn.inputs if isinstance(value, int))
        for out, is_late in zip(eqn.outputs, self._outputs(eqn), strict=True):
            if is_late and size <= _MOST_OPERATIONS:
                self._make(eqn, out, size)

    def _make(self, eqn: Equation, out: int, size: int) -> None:
        self.sizes[out], self.made_by[out] = size, eqn

    def is_given(self, value: Any) -> bool:
        """Whether a value is there, or can be, without storing much."""
        return not isinstance(value, int) or value in self.available

    def is_operand(self, value: Any) -> bool:
        return value in self or self.is_given(value) or (self.scalars and self.program.avals[value].shape == ())

    def _outputs(self, eqn: Equation) -> Sequence[bool]:
        name = eqn.primitive.name
        if name == "scan":
            return _late_outputs(self, eqn)
        if name == "cond":
            return _late_branches(self, eqn)
        repeats = (is_cheap(eqn) and name not in _LOOKUPS) or (name == "scatter" and eqn.inputs[0] in self)
        if name == "custom_jvp_call":
            inner = flatten(ClosedJaxpr(*opened(eqn.params["call_jaxpr"]))).eqns
            repeats = all(is_cheap(each) or each.primitive.name == "custom_jvp_call" for each in inner)
        return [repeats and all(map(self.is_operand, eqn.inputs))] * len(eqn.outputs)

    def computed_by(self, value: int) -> tuple[Program, list[int]]:
        """The operations that compute a late value, and the stored values that they read."""
        return part_of(self.program, value, self.made_by)

    def read(self, read: Read) -> LateRead:
        """The read of a late value where it is used."""
        key = read.value, read.region, read.in_place
        if key not in self.reads:
            region = EVERYTHING if read.in_place else read.region
            self.reads[key] = LateRead(_schedule(self.computed_by(read.value)[0], read.value, region), read.in_place)
        return self.reads[key]

    def lazy(self, value: int) -> LazyRead:
        """A late value that is passed on unread."""
        program, leaves = self.computed_by(value)
        return LazyRead(program, value, leaves)

    def inputs_of(self, value: int) -> list[int]:
        """The inputs in host memory of a late value."""
        return [n for n in self.computed_by(value)[1] if n in self.sizes]

    def has_rows(self, value: int) -> bool:
        """Whether one row of a late value can be computed from rows of the arrays in host memory."""
        shape = self.program.avals[value].shape
        if not shape or not shape[0]:
            return False
        found = self.read(Read(value, _ONE_ROW))
        return all(self.is_by_rows(number, region) for number, region in found.wanted if number in self)

    def is_by_rows(self, number: int, region: Region) -> bool:
        """Whether a region of an input in host memory is read by rows."""
        return region is LAZY or (region.axis == 0 and len(self.program.avals[number].shape) >= FEWEST_AXES)


def part_of(program: Program, value: int, made_by: Any = None) -> tuple[Program, list[int]]:
    """The operations of a program that compute a value, and the values that they read."""
    if made_by is None:
        made_by = {out: eqn for eqn in program.eqns for out in eqn.outputs}
    needed: dict[int, Equation] = {}
    leaves: dict[int, None] = {}
    left = [value]
    while left:
        number = left.pop()
        eqn = made_by.get(number)
        if eqn is None:
            leaves[number] = None
        elif eqn.outputs[0] not in needed:
            needed[eqn.outputs[0]] = eqn
            left += eqn.reads if eqn.primitive.name != "optimization_barrier" else []
        if eqn is not None and eqn.primitive.name == "optimization_barrier":
            left.append(eqn.inputs[eqn.outputs.index(number)])
    consts = {n: program.consts[n] for n in leaves if n in program.consts}
    eqns = [needed[key] for key in sorted(needed)]
    return program._replace(eqns=eqns, consts=consts, outputs=[value], on_host=()), list(leaves)


def late_inputs(late: Late | None, inputs: Sequence[Any]) -> tuple[set[int], set[int]]:
    """Of the operands of a loop or a branch, those that are late values, and others that are stored anyway."""
    if late is None:
        return set(), set()
    on_host = {place for place, value in enumerate(inputs) if value in late}
    return on_host, {place for place, value in enumerate(inputs) if late.is_given(value)}


def counters_of(eqn: Equation, body: Program) -> dict[int, tuple[Any, Any]]:
    """The carried numbers that count the steps: where they begin, and what each step adds."""
    consts, carried = scan_counts(eqn.params)
    made_by = {out: each for each in body.eqns for out in each.outputs}
    found = {}
    for place in range(consts, consts + carried):
        begin, add = eqn.inputs[place], made_by.get(body.outputs[place - consts])
        if add is None or isinstance(begin, int) or add.primitive.name != "add" or body.avals[place].shape:
            continue
        first, second = add.inputs
        if first == place and not isinstance(second, int):
            found[place] = begin.val, second.val
    return found


def _late_outputs(late: Late, eqn: Equation) -> Sequence[bool]:
    """Which results of a loop are late: rows of them are computed from rows of its inputs, and not from its carry."""
    consts, carried = scan_counts(eqn.params)
    body = flatten(eqn.params["jaxpr"])
    on_host, available = late_inputs(late, eqn.inputs)
    available -= set(range(consts, consts + carried))
    inside = Late(body, on_host, available | set(counters_of(eqn, body)), scalars=False)
    return [n >= carried and value in inside for n, value in enumerate(body.outputs)]


def _late_branches(late: Late, eqn: Equation) -> Sequence[bool]:
    """Which results of a branch are late."""
    if not late.is_operand(eqn.inputs[0]) or eqn.params.get("branches_platforms") is not None:
        return [False] * len(eqn.outputs)
    on_host, available = late_inputs(late, eqn.inputs[1:])
    insides = [
        (program, Late(program, on_host, available, scalars=False)) for program in map(flatten, eqn.params["branches"])
    ]
    found = []
    for n in range(len(eqn.outputs)):
        values = [(program.outputs[n], inside) for program, inside in insides]
        any_late = any(value in inside for value, inside in values)
        found.append(any_late and all(value in inside or inside.is_given(value) for value, inside in values))
    return found
