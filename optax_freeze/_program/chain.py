"""Cheap operations on values that are not read yet, which are repeated where their results are read."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_freeze._jax_internals import Branches, inside
from optax_freeze._program.deferred import Deferred, Level, Reader, part_of, type_of
from optax_freeze._program.operations import Computation, computation, from_rows, is_cheap
from optax_freeze._program.regions import EVERYTHING, DynamicRows, Numbers, Region, clipped, without_elements
from optax_freeze._program.symbolic import if_undecided
from optax_freeze._program.trace import Equation, Program, flatten


class Chain(Deferred):
    """A result of a cheap operation on values that are not read yet, or on arrays that are stored anyway.

    Attributes:
      eqn: the operation; ``place``: of the result.
      operands: values, of which arrays are stored anyway.
      computed: the result, if it is computed anyway. Rows of it are computed again from rows.
    """

    def __init__(self, eqn: Equation, place: int, operands: Sequence[Any], level: Level | None = None) -> None:
        self.eqn, self.place, self.operands, self.level = eqn, place, operands, level
        self.on_host = any(isinstance(x, Deferred) and x.on_host for x in operands)
        self.type = eqn.avals_out[place]
        self.shape = self.type.shape
        self.operations = 1 + sum(x.operations for x in operands if isinstance(x, Deferred))

    def enter(self, level: Level) -> None:
        if self.level is None:
            self.level = level
            for x in self.operands:
                if isinstance(x, Deferred):
                    x.enter(level)

    def read(self, region: Region, reader: Reader) -> Any:
        return self._read(region, reader, {})

    def rows(self, region: Region, is_row: bool = False) -> Deferred:
        parts = {(id(x), r): (x, r) for x, r in self._requests(region, {})}
        values: list[Any] = []
        for x, r in parts.values():
            values.append(x if r is EVERYTHING else x.rows(r) if x.is_by_rows(r) else x.read(r, Reader()))

        def computed(*arrays: Any) -> list[Any]:
            rows = self._read(region, Reader(), dict(zip(parts, arrays, strict=True)))
            return [jnp.squeeze(rows, 0) if is_row else rows]

        program = flatten(jax.make_jaxpr(computed)(*map(type_of, values)))
        return self._inside(program).run(values)[0]

    def _inside(self, program: Program) -> Any:
        assert self.level is not None  # the evaluation that made it, or whose input it is
        return self.level.inside(program, range(program.num_inputs), waits=False)

    def is_by_rows(self, region: Region, in_blocks: bool = False) -> bool:
        return region.axis == 0 and all(x.is_by_rows(r, in_blocks) for x, r in self._requests(region, {}))

    @if_undecided(None)
    def _computation(self, region: Region) -> Computation | None:
        """How a region is computed from regions of the operands; all of it, too, if these are not whole."""
        if region is EVERYTHING:
            is_open = is_cheap(self.eqn) and all(isinstance(size, int) for size in self.shape)
            cut = [isinstance(x, Deferred) for x in self.operands]
            return from_rows(self.eqn, self.place, cut) if is_open else None
        return computation(self.eqn, [region if i == self.place else None for i in range(len(self.eqn.outputs))])

    @functools.cached_property
    def _sliced(self) -> int:
        """How many rows a slice has whose first row is a value of the program; 0 of another operation."""
        eqn = self.eqn
        is_slice = eqn.primitive is jax.lax.dynamic_slice_p and isinstance(eqn.inputs[1], int)
        return self.shape[0] if is_slice and self.shape[0] != eqn.avals_in[0].shape[0] else 0

    def _of_branches(self, use: Callable[[Any], Any], branches: Branches) -> Any:
        """What ``use`` makes of the results of each branch, not read yet; of the one that is taken."""

        def run(branch: Any, operands: Sequence[Any]) -> Any:
            program = flatten(branch)
            return use(self._inside(program).run(operands)[self.place])

        each = [functools.partial(run, branch, self.operands[1:]) for branch in branches.programs]
        return jax.lax.switch(part_of(self.operands[0], EVERYTHING, Reader()), each)

    def _requests(self, region: Region, found: dict[Any, Any]) -> list[tuple[Deferred, Region]]:
        """The regions of other values than chains, not read yet, from which a region is computed."""
        is_empty = without_elements(region, self.eqn.avals_out[self.place]) is not None
        if self.computed is not None or (self, region) in found or is_empty:
            return []
        found[self, region] = True
        branches = inside(self.eqn)
        if isinstance(branches, Branches):
            of_branches: list[tuple[Deferred, Region]] = []
            jax.eval_shape(lambda: self._of_branches(lambda x: of_branches.extend(_requests(x, region, {})), branches))
            return of_branches
        computed = None if self._sliced else self._computation(region)
        regions: list[Any] = [EVERYTHING] * len(self.operands) if computed is None else [*computed.regions]
        if self._sliced:
            regions[0] = DynamicRows(0, Numbers(None, self._sliced))
        pairs = zip(self.operands, regions, strict=True)
        return [each for x, r in pairs if r is not None for each in _requests(x, r, found)]

    def _read(self, region: Region, reader: Reader, known: dict[Any, Any]) -> Any:
        """A region; ``known``: regions of values that are computed."""
        is_here = reader.level is not None and reader.level is self.level
        if is_here and not self.on_host and self.computed is None:
            self.computed = self._compute(EVERYTHING, reader, known)
        if self.computed is not None and (region is EVERYTHING or is_here):
            return region.take(self.computed)
        if (id(self), region) in known:
            return known[id(self), region]
        known[id(self), region] = self._compute(region, reader, known)
        return known[id(self), region]

    def _compute(self, region: Region, reader: Reader, known: dict[Any, Any]) -> Any:
        eqn, branches = self.eqn, inside(self.eqn)
        empty = without_elements(region, eqn.avals_out[self.place])
        with eqn.source.scope():
            if empty is not None:
                out = empty.val
            elif isinstance(branches, Branches):
                of_branch = reader._replace(beside=None, level=None)
                out = self._of_branches(lambda x: _read(x, region, of_branch, {**known}), branches)
            elif self._sliced:
                array, start, *others = self.operands
                start, *others = (_read(x, EVERYTHING, reader, known) for x in (start, *others))
                first = clipped(start, eqn.avals_in[0].shape[0] - self._sliced)
                out = _read(array, DynamicRows(0, first + jnp.arange(self._sliced, dtype=jnp.int32)), reader, known)
                if out.shape != self.shape:
                    out = eqn.bind(out, jnp.zeros_like(start), *others)
                out = region.take(out)
            elif (computed := self._computation(region)) is None:
                operands = [_read(x, EVERYTHING, reader, known) for x in self.operands]
                out = region.take(eqn.bind_all(*operands)[self.place])
            else:
                pairs = zip(self.operands, computed.regions, strict=True)
                operands = [None if r is None else _read(x, r, reader, known) for x, r in pairs]
                out = computed.apply(*operands)[self.place]
        return out


def _requests(value: Any, region: Region, found: dict[Any, Any]) -> list[tuple[Deferred, Region]]:
    if isinstance(value, Chain):
        return value._requests(region, found)
    return [(value, region)] if isinstance(value, Deferred) else []


def _read(value: Any, region: Region, reader: Reader, known: dict[Any, Any]) -> Any:
    if isinstance(value, Chain):
        return value._read(region, reader, known)
    return known[id(value), region] if (id(value), region) in known else part_of(value, region, reader)


class Recipes:
    """How values that may not be read yet are made again of ``inputs`` and ``arrays``, to which arrays are added."""

    def __init__(self, values: Sequence[Any], inputs: Sequence[Any], arrays: list[Any]) -> None:
        self._steps: list[Any] = [*range(len(inputs))]  # an input, an array as a list of its place, or a chain
        found = {id(x): place for place, x in enumerate(inputs)}

        def add(value: Any) -> int:
            if id(value) not in found:
                step: Any = value
                if isinstance(value, Chain):
                    step = value.eqn, value.place, [*map(add, value.operands)]
                elif isinstance(value, jax.Array):
                    step = [len(arrays)]
                    arrays.append(value)
                found[id(value)] = len(self._steps)
                self._steps.append(step)
            return found[id(value)]

        self._values = [*map(add, values)]

    def __call__(self, inputs: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """The values."""
        found = [*inputs]
        for step in self._steps[len(inputs) :]:
            if isinstance(step, tuple):
                eqn, place, operands = step
                step = Chain(eqn, place, [found[n] for n in operands])
            found.append(arrays[step[0]] if isinstance(step, list) else step)
        return [found[n] for n in self._values]
