"""Values that are computed from arrays in host memory where they are used, and never stored.

A value is *late* if cheap operations compute it from arrays in host memory, inputs on the device and numbers. An
operation that reads such a value brings the wanted rows to the device and repeats the cheap operations there. So no
copy of a weight waits on the device for the backward pass, and a loop reads only the row of its step.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import ClosedJaxpr

from optax_freeze._program.operations import is_cheap
from optax_freeze._program.regions import EVERYTHING, LAZY, DynamicRows, Region, Rows, Unread, Values
from optax_freeze._program.tasks import ALWAYS, Read, Schedule
from optax_freeze._program.trace import Equation, Program, flatten, opened
from optax_freeze._spec.memory import to_device

_FEWEST_AXES = 3
"""The TPU compiler slices arrays in host memory of three axes or more only."""

_MOST_OPERATIONS = 64
"""The most operations that are repeated for a late value; of more, the value is computed once."""

_MOST_RUNS = 16

_LOOKUPS = ("gather",)

_ONE_ROW = DynamicRows(0, np.zeros(1, np.int32))


class HostArray(Unread):
    """An array in host memory, or a row of it at the indices ``starts`` of its first axes, or some of its rows.

    An array that was read in the forward pass is read again in the backward pass.
    """

    def __init__(
        self,
        array: Any,
        starts: tuple[Any, ...] = (),
        numbers: Any = None,
        in_loop: bool = False,
        was_read: bool = False,
    ) -> None:
        self.array, self.starts, self.numbers, self.in_loop, self.was_read = array, starts, numbers, in_loop, was_read
        self.regions_read: set[Any] = set()

    @property
    def shape(self) -> tuple[int, ...]:
        rest = self.array.shape[len(self.starts) :]
        return rest if self.numbers is None else (len(self.numbers), *rest[1:])

    def read(self, region: Region, beside: Any = None) -> jax.Array:
        if self.numbers is not None or (region.axis == 0 and len(self.shape) >= _FEWEST_AXES):
            return self._some_rows(region, beside)
        array = self._fresh(EVERYTHING, beside)
        if not self.starts:
            return region.take(to_device(array))
        return region.take(jnp.squeeze(_slice(array, self.starts, 1), tuple(range(len(self.starts)))))

    def _some_rows(self, region: Region, beside: Any) -> jax.Array:
        array = self._fresh(region, beside)
        if self.numbers is None and isinstance(region, Rows) and len(region.runs) <= _MOST_RUNS:
            parts = [self._one(array, start, stop - start) for start, stop in region.runs]
        else:
            numbers = self._rows_of(region)
            if region.axis > 0:
                return region.take(self._some_rows(EVERYTHING, beside))
            if len(numbers) > _MOST_RUNS:
                return jax.lax.map(lambda i: self._one(array, i, 1)[0], numbers)
            parts = [self._one(array, numbers[k], 1) for k in range(len(numbers))]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _one(self, array: Any, start: Any, count: int) -> jax.Array:
        rows = _slice(array, (*self.starts, start), count)
        return jnp.squeeze(rows, tuple(range(len(self.starts))))

    def _fresh(self, region: Region, beside: Any) -> Any:
        """The array, on which a second read waits for another operand, so that it is not merged with the first."""
        key = (DynamicRows if isinstance(region, DynamicRows) else region, *self.starts)
        if self.in_loop or beside is None:
            return self.array
        if key not in self.regions_read and not self.was_read:
            self.regions_read.add(key)
            return self.array
        return jax.lax.optimization_barrier((self.array, beside))[0]

    def _rows_of(self, region: Region) -> Any:
        numbers = self.numbers
        if region is EVERYTHING or region.axis > 0:
            return numbers
        indices = region.indices  # type: ignore[attr-defined]
        return indices if numbers is None else jnp.take(numbers, indices)

    def rows(self, region: Any) -> "HostArray":
        return self._with(self.starts, self._rows_of(region), True)

    def row(self, i: Any) -> "HostArray":
        i = i if self.numbers is None else self.numbers[i]
        return self._with((*self.starts, i), None, self.in_loop or not isinstance(i, int))

    def inside(self) -> "HostArray":
        return self._with(self.starts, self.numbers, True)

    def as_operand(self) -> Any:
        return self.read(EVERYTHING) if self.starts or self.numbers is not None else self.array

    def _with(self, starts: tuple[Any, ...], numbers: Any, in_loop: bool) -> "HostArray":
        new = HostArray(self.array, starts, numbers, in_loop, self.was_read)
        new.regions_read = self.regions_read
        return new


def _slice(array: Any, starts: tuple[Any, ...], count: int) -> jax.Array:
    """``count`` rows from the last of the ``starts`` on; under ``jax.vmap``, of the array on the device."""
    shape = array.shape
    sizes = (*(1,) * (len(starts) - 1), count, *shape[len(starts) :])
    starts = (*starts, *[np.int32(0)] * (len(shape) - len(starts)))

    def sliced(array: Any, *starts: Any) -> Any:
        return jax.lax.dynamic_slice(array, starts, sizes)

    at_once = jax.custom_batching.custom_vmap(sliced)

    @at_once.def_vmap
    def _(size: int, mapped: Any, array: Any, *starts: Any) -> Any:
        return jax.vmap(sliced, [0 if here else None for here in mapped])(to_device(array), *starts), True

    rows = at_once(array, *starts)
    # The TPU compiler aborts if a transposed layout reaches the slice of an array on the host.
    return to_device(with_layout_constraint(rows, Layout(tuple(range(len(shape))))))


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


def _schedule(program: Program, number: int, region: Region) -> Schedule:
    from optax_freeze._program.schedule import schedule

    return schedule(program, [(number, region, ALWAYS)], is_late=True)


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
        from optax_freeze._program import loops

        name = eqn.primitive.name
        if name == "scan":
            return loops.late_outputs(self, eqn)
        if name == "cond":
            return loops.late_branches(self, eqn)
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
        return region is LAZY or (region.axis == 0 and len(self.program.avals[number].shape) >= _FEWEST_AXES)


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
