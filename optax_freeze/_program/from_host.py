"""Evaluates a program some of whose inputs are in host memory, or not read yet.

The program is a gradient of which only the wanted regions are computed, as for arrays on the device. Here it is
evaluated once more with *chains*: cheap operations on arrays in host memory, on inputs on the device and on numbers,
which are repeated where their results are read, on the rows that are wanted. So no copy of a weight waits for the
backward pass. Whatever else reads such a value brings it to the device.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_freeze._jax_internals import Branches, Loop, Mapped, While, inside, primitives
from optax_freeze._program import host_loops
from optax_freeze._program.chain import Chain
from optax_freeze._program.decisions import decisive
from optax_freeze._program.deferred import Deferred, Input, Level, Reader, part_of, type_of
from optax_freeze._program.host_array import HostArray
from optax_freeze._program.host_lookups import host_lookup
from optax_freeze._program.operations import is_cheap, is_move
from optax_freeze._program.recompute import is_repeated
from optax_freeze._program.regions import EVERYTHING, Values
from optax_freeze._program.trace import Equation, Program, flatten, is_reference
from optax_freeze._spec.memory_kinds import is_on_host

_SLICES = (jax.lax.slice_p, jax.lax.dynamic_slice_p)
_MOST_LOOKUPS = 2
"""The most lookups in an array on the device that put together only the rows that they read."""
_MOST_OPERATIONS = 64
"""The most operations that are repeated for each read; of more, the value is computed once."""


def evaluate(
    fun: Callable[[Values], Sequence[Any]], values: Values, count: int | None = None, reads: list[Any] | None = None
) -> list[Any]:
    """``fun(values)``, a list of arrays, where some of the values may be in host memory or not read yet.

    Args:
      count: how many of the results have to be read; by default all.
      reads: where reads of arrays in host memory are noted.
    """
    arrays = [HostArray(x) if is_on_host(x) else x for x in values.arrays]
    if not any(isinstance(x, Deferred) for x in arrays):
        return [*fun(values)]
    of_arrays = lambda *arrays: fun(values.with_arrays(arrays))  # noqa: E731
    program = flatten(jax.make_jaxpr(of_arrays)(*map(type_of, arrays)))
    evaluation = Evaluation(program, range(len(arrays)), reads=reads)
    found = evaluation.run(arrays)
    reader = Reader(level=evaluation.level, reads=reads)
    return [part_of(x, EVERYTHING, reader) if count is None or n < count else x for n, x in enumerate(found)]


class Evaluation:
    """Evaluates a program whose inputs may not be read yet.

    Args:
      program: the program.
      given: the inputs that are stored anyway, or not read yet.
      deciding: the outputs of which one bit decides about what is computed from them.
      reads: where reads of arrays in host memory are noted.
      waits: whether a second read of an array in host memory waits for another operand of its reader.
    """

    def __init__(
        self,
        program: Program,
        given: Collection[int],
        deciding: Collection[Any] = (),
        reads: Any = None,
        waits: bool = True,
    ) -> None:
        self.program, self.reads, self._waits, self.level = program, reads, waits, Level(Evaluation)
        self._given, self._moved = {*program.consts, *given}, set[int]()
        self._decisive = decisive(program, deciding)
        self._values: dict[int, Any] = dict(program.consts)
        self._chains: dict[int, Chain] = {}  # of values that are computed, too

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs, some of which may not be read yet."""
        for number, value in enumerate(inputs):
            self._write(number, value)
            if isinstance(value, Deferred):
                self._moved.add(number)
                value.enter(self.level)
        last: dict[int, Equation] = {}
        on_device = [n for n, x in enumerate(inputs) if isinstance(x, Input) and not x.on_host]
        readers: dict[int, list[Equation]] = {n: [] for n in on_device}
        for eqn in self.program.eqns:
            for number in (*eqn.outputs, *eqn.reads):
                last[number] = eqn
                if number in readers:
                    readers[number].append(eqn)
        for number, eqns in readers.items():
            others = [eqn for eqn in eqns if inside(eqn) is None and eqn.primitive not in _SLICES]
            lookups = [host_lookup(eqn) is not None for eqn in others]
            inputs[number].is_looked_up = all(lookups) and len(lookups) <= _MOST_LOOKUPS
        kept = {x for x in self.program.outputs if isinstance(x, int)}
        for eqn in self.program.eqns:
            with eqn.source.scope():
                outs = self._apply(eqn, [*map(self.value, eqn.inputs)])
            for number, out in zip(eqn.outputs, outs, strict=True):
                self._write(number, out)
            for number in {*eqn.outputs, *eqn.reads} - kept:
                if last[number] is eqn:
                    del self._values[number]
        return [self.value(x) if isinstance(x, int) else jnp.asarray(x.val) for x in self.program.outputs]

    def run_whole(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs on the device."""
        return [part_of(x, EVERYTHING, Reader(level=self.level, reads=self.reads)) for x in self.run(inputs)]

    def value(self, x: Any) -> Any:
        """An array, a number, or a value that is not read yet."""
        return self._values[x] if isinstance(x, int) else x.val

    def operand(self, x: Any) -> Any:
        """A value, or how it is computed again, for operations that are repeated where their results are read."""
        return self._chains[x] if isinstance(x, int) and x in self._chains else self.value(x)

    def is_given(self, x: Any) -> bool:
        """Whether a value is stored anyway, or computed from such values by cheap operations."""
        return not isinstance(x, int) or (x in self._given and not isinstance(self._values[x], Deferred))

    def is_repeated(self, x: Any) -> bool:
        """Whether operations that are repeated where their results are read may read a value."""
        return self.is_given(x) or isinstance(self.value(x), Deferred)

    def decide(self, eqn: Equation) -> list[bool]:
        """Which results of an operation decide."""
        return [number in self._decisive for number in eqn.outputs]

    def _write(self, number: int, value: Any) -> None:
        if isinstance(value, Chain) and value.computed is not None:
            self._chains[number], value = value, value.computed
        self._values[number] = value

    def _apply(self, eqn: Equation, operands: list[Any]) -> Sequence[Any]:
        """The results of an operation."""
        if eqn.primitive is jax.lax.optimization_barrier_p:
            return self._behind_barrier(eqn)
        if is_move(eqn) and all(self.is_given(x) or x in self._moved for x in eqn.inputs):
            self._moved.update(eqn.outputs)
        is_deferred = any(isinstance(x, Deferred) for x in operands)
        chains = self._chained(eqn, is_deferred)
        if not is_deferred:
            outs = eqn.bind_all(*operands)
            for chain, out in zip(chains, outs, strict=False):
                chain.computed = out
            self._given.update(eqn.outputs if chains else ())
            return chains or outs
        if chains:
            return chains
        beside = next((x for x in operands if self._waits and isinstance(x, jax.Array)), None)
        reader = Reader(eqn, beside, self.level, self.reads)
        outs = self._by_parts(eqn, operands, reader)
        return eqn.bind_all(*(part_of(x, EVERYTHING, reader) for x in operands)) if outs is None else outs

    def _by_parts(self, eqn: Equation, operands: list[Any], reader: Reader) -> Sequence[Any] | None:
        """The results of an operation that reads only parts of values that are not read yet; None of another one."""
        found = inside(eqn)
        if isinstance(found, Loop) and found.length:
            return host_loops.scan(self, eqn, found, operands, reader)
        if isinstance(found, While):
            return host_loops.while_loop(self, eqn, found, operands, reader)
        if isinstance(found, Branches) and not found.by_platform and not eqn.has_effects:
            return host_loops.cond(self, eqn, found, operands, reader)
        if isinstance(found, Mapped) and not eqn.has_effects:
            return host_loops.shard_map(self, eqn, found, operands, reader)
        if (lookup := host_lookup(eqn)) is None:
            return None
        place, apply = lookup
        table = operands[place]
        if not isinstance(table, Deferred) or not table.has_rows(in_blocks=True):
            return None
        if not table.on_host and not (isinstance(table, Input) and table.is_looked_up):
            return None
        others = [x if i == place else part_of(x, EVERYTHING, reader) for i, x in enumerate(operands)]
        return [apply(eqn, others, reader._replace(level=None))]  # only the rows

    def _behind_barrier(self, eqn: Equation) -> Sequence[Any]:
        """What is not read yet passes a barrier. A reference is not a result of one."""
        numbers = [x for x, aval in zip(eqn.inputs, eqn.avals_in, strict=True) if not is_reference(aval)]
        for known in (self._moved, self._given):
            pairs = zip(numbers, eqn.outputs, strict=True)
            known.update(out for x, out in pairs if not isinstance(x, int) or x in known)
        arrays = [x for x in map(self.value, eqn.inputs) if not isinstance(x, Deferred)]
        outs, found = iter(eqn.bind_all(*arrays) if arrays else ()), []
        for x, number in zip(numbers, eqn.outputs, strict=True):
            is_deferred = isinstance(self.value(x), Deferred)
            found.append(self.value(x) if is_deferred else next(outs))
            if isinstance(x, int) and x in self._chains:
                self._chains[number] = self._chains[x]
        return found

    def _chained(self, eqn: Equation, is_deferred: bool) -> list[Chain]:
        """The results as chains; none if the operation is not repeated.

        What decides is computed once, unless operations only moved it.
        """
        if eqn.has_effects or not (self._decisive - self._moved).isdisjoint(eqn.outputs):
            return []
        is_placed = eqn.primitive is jax.lax.scatter_p and isinstance(self.value(eqn.inputs[0]), Deferred)
        once = (jax.lax.gather_p, primitives.scan_p)
        if not is_placed and not (is_repeated(eqn) and eqn.primitive not in once if is_deferred else is_cheap(eqn)):
            return []
        pairs = zip(eqn.inputs, eqn.avals_in, strict=True)
        if not all(self.is_repeated(x) or (is_deferred and not aval.shape) for x, aval in pairs):
            return []
        operands = [*map(self.operand, eqn.inputs)]
        chains = [Chain(eqn, place, operands, self.level) for place in range(len(eqn.outputs))]
        return chains if chains and chains[0].operations <= _MOST_OPERATIONS else []
