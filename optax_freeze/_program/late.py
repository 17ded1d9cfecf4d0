"""Values that are computed from arrays in host memory where they are used, and never stored.

A value is *late* if cheap operations compute it from arrays in host memory, inputs on the device and numbers. They are
repeated where the value is read, on the rows that are wanted. So no copy of a weight waits for the backward pass.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name

from optax_freeze._jax_internals import Branches, Loop, Others, inside, primitives, programs_in
from optax_freeze._program.host_array import FEWEST_AXES
from optax_freeze._program.operations import is_cheap, is_move
from optax_freeze._program.regions import LAZY, Region
from optax_freeze._program.trace import Equation, Program, flatten

_MOST_OPERATIONS = 64
"""The most operations that are repeated for a late value; of more, the value is computed once."""

Origins: TypeAlias = frozenset[tuple[int, bool]]
"""The inputs of the outermost program from which a late value is computed, and whether it is a row of them."""


@functools.cache
def _naming() -> Equation:
    """An operation that returns its operand. Its primitive is not public in every release of JAX."""
    [naming] = flatten(jax.make_jaxpr(lambda x: checkpoint_name(x, ""))(0.0)).eqns
    return naming


class Late:
    """The late values of a program, given its inputs in host memory and the other inputs that are stored anyway.

    What is ``decisive`` is computed once, unless operations only moved it.
    """

    def __init__(
        self, program: Program, on_host: Mapping[int, Origins], available: Collection[int], decisive: set[int]
    ) -> None:
        self.program, self.on_host, self.decisive = program, on_host, decisive
        self.moved = set(on_host)
        self.available = {*program.consts, *available} - set(on_host)
        self.sizes: dict[int, int] = dict.fromkeys(on_host, 1)
        self.made_by: dict[int, Equation] = {}
        for eqn in program.eqns:
            self._add(eqn)

    def __contains__(self, value: Any) -> bool:
        return isinstance(value, int) and value in self.sizes

    def _add(self, eqn: Equation) -> None:
        if eqn.primitive is jax.lax.optimization_barrier_p:
            self.moved.update(out for value, out in zip(eqn.inputs, eqn.outputs, strict=True) if self.is_moved(value))
        elif eqn.reads <= self.moved | self.available and is_move(eqn):
            self.moved.update(eqn.outputs)
        if eqn.has_effects or not (self.decisive - self.moved).isdisjoint(eqn.outputs):
            return
        if eqn.primitive is jax.lax.optimization_barrier_p:
            for value, out, aval in zip(eqn.inputs, eqn.outputs, eqn.avals_out, strict=True):
                if value in self:
                    same = {"inputs": (value,), "outputs": (out,), "avals_in": (aval,), "avals_out": (aval,)}
                    self.made_by[out] = _naming()._replace(source=eqn.source, **same)
                    self.sizes[out] = self.sizes[value]
                elif self.is_given(value):
                    self.available.add(out)
        elif not any(value in self for value in eqn.inputs):
            if is_cheap(eqn) and all(map(self.is_given, eqn.inputs)):
                self.available.update(eqn.outputs)
        else:
            size = 1 + sum(self.sizes.get(value, 0) for value in eqn.inputs if isinstance(value, int))
            if size <= _MOST_OPERATIONS and self._is_late(eqn):
                self.sizes.update(dict.fromkeys(eqn.outputs, size))
                self.made_by.update(dict.fromkeys(eqn.outputs, eqn))

    def is_moved(self, value: Any) -> bool:
        """Whether a value has the bits of arrays in host memory."""
        return isinstance(value, int) and value in self.moved

    def is_given(self, value: Any) -> bool:
        """Whether a value is there, or can be, without storing much."""
        return not isinstance(value, int) or value in self.available

    def _is_late(self, eqn: Equation) -> bool:
        """Whether results are late of an operation that reads late values."""
        is_placed = eqn.primitive is jax.lax.scatter_p and eqn.inputs[0] in self
        once = (jax.lax.gather_p, primitives.scan_p)
        repeats = (is_repeated(eqn) and eqn.primitive not in once) or is_placed
        return repeats and all(v in self or self.is_given(v) or not self.program.avals[v].shape for v in eqn.inputs)

    def origins(self, value: int, by_rows: bool) -> Origins:
        """From which inputs of the outermost program a late value is computed; ``by_rows``: a row of it is read."""
        _, leaves = part_of(self.program, value, self.made_by)
        return frozenset((n, by_rows or rows) for leaf in leaves for n, rows in self.on_host.get(leaf, ()))

    def is_by_rows(self, number: int, region: Region) -> bool:
        """Whether a region of an input in host memory is read by rows."""
        return region is LAZY or (region.axis == 0 and len(self.program.avals[number].shape) >= FEWEST_AXES)


def is_repeated(eqn: Equation) -> bool:
    """Whether an operation may be repeated where its results are read, with the programs that it has."""
    found = inside(eqn)
    if eqn.has_effects or found is None or isinstance(found, Others):
        return is_cheap(eqn) and not eqn.has_effects
    is_branch = isinstance(found, Branches) and not found.by_platform
    is_open = is_branch or isinstance(found, Loop) or eqn.primitive is primitives.custom_jvp_call_p
    return is_open and all(is_repeated(each) for closed in programs_in(eqn) for each in flatten(closed).eqns)


def part_of(program: Program, value: int, made_by: Mapping[int, Equation]) -> tuple[Program, list[int]]:
    """The operations of a program that compute a value, and the values that they read."""
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
            left += eqn.reads
    consts = {n: program.consts[n] for n in leaves if n in program.consts}
    eqns = [needed[key] for key in sorted(needed)]
    return program._replace(eqns=eqns, consts=consts, outputs=[value], on_host=()), list(leaves)


def late_inputs(
    late: Late | None, inputs: Sequence[Any], from_rows: float = float("inf")
) -> tuple[dict[int, Origins], set[int]]:
    """The operands of a loop or a branch that are late, and others that are stored; rows are read ``from_rows`` on."""
    if late is None:
        return {}, set()
    on_host = {place: late.origins(value, place >= from_rows) for place, value in enumerate(inputs) if value in late}
    return on_host, {place for place, value in enumerate(inputs) if late.is_given(value)}
