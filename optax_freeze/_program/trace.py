"""A traced function as one list of equations on numbered values.

Calls are entered: ``jit``, which would hide fusions and rows, and in a gradient also ``remat``, of which the barrier
against merging the repeated operations with the first ones remains. Loops and branches stay, and so do calls that have
derivatives of their own, for derivatives of the evaluated program. JAX may bind any call but ``jit`` as a primitive of
``jax.experimental.hijax``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from optax_freeze._jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    Source,
    bind,
    inlined,
    is_reference,
    name_of,
    names_axes,
    source_of,
    without_hijax,
)
from optax_freeze._spec.sharding import varies


class Equation(NamedTuple):
    """An operation on numbered values."""

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Any, ...]  # numbers of values, or literals
    outputs: tuple[int, ...]
    avals_in: tuple[Any, ...]
    avals_out: tuple[Any, ...]
    effects: Any
    source: Source

    @property
    def name(self) -> str:
        """The name of the operation, or of the called function if it is a call."""
        return name_of(self)

    @property
    def reads(self) -> set[int]:
        """The numbers of the values that the operation reads."""
        return {value for value in self.inputs if isinstance(value, int)}

    @property
    def has_effects(self) -> bool:
        """Whether the operation has side effects or reads a reference. Naming an axis of a mesh does not count."""
        return not all(map(names_axes, self.effects)) or any(map(is_reference, self.avals_in))

    def bind(self, *operands: Any, **changed: Any) -> Any:
        """Applies the operation to arrays, with some of its params changed."""
        return bind(self, *operands, **changed)

    def bind_all(self, *operands: Any, **changed: Any) -> list[Any]:
        """:meth:`bind` with the list of all results."""
        outs = self.bind(*operands, **changed)
        return list(outs) if self.primitive.multiple_results else [outs]

    def __str__(self) -> str:
        line = self.line
        return f"{self.name} at {line}" if line else self.name

    @property
    def line(self) -> str:
        """The line of the user's program that the operation comes from."""
        return self.source.line


class Program(NamedTuple):
    """The operations of a function in order. The inputs have the first numbers."""

    avals: list[Any]
    consts: dict[int, Any]
    eqns: list[Equation]
    num_inputs: int
    outputs: list[Any]
    of_steps: dict[int, int]  # of the values of a loop's result after some of its steps: the number of the result

    @property
    def made_by(self) -> dict[int, Equation]:
        """The operation that computes each value."""
        return {number: eqn for eqn in self.eqns for number in eqn.outputs}

    def add(self, aval: Any, of_steps: int | None = None) -> int:
        """A number for a new value, which may be that of a loop's result ``of_steps``, after some of its steps."""
        self.avals.append(aval)
        if of_steps is not None:
            self.of_steps[len(self.avals) - 1] = of_steps
        return len(self.avals) - 1

    def like(self, number: int) -> int:
        """The number of the loop's result if this is its value after some steps; else the number itself."""
        return self.of_steps.get(number, number)


def flatten(closed: ClosedJaxpr, enter_remat: bool = True, enter_placed: bool = False) -> Program:
    """Lists the operations of a jaxpr, those of calls included; ``enter_placed``: with shardings or donation, too."""
    known, key = _FLAT.setdefault(closed.jaxpr, {}), (enter_remat, enter_placed)
    if key not in known:
        program = Program([], {}, [], len(closed.in_avals), [], {})
        values = [program.add(aval) for aval in closed.in_avals]
        consts = [program.add(var.aval) for var in closed.jaxpr.constvars]
        program.outputs.extend(_Flatten(program, *key).jaxpr(closed.jaxpr, consts, values, None, None))
        known[key] = program, consts
    program, consts = known[key]
    given = program.consts | dict(zip(consts, closed.consts, strict=True))
    avals, eqns, outputs, of_steps = [*program.avals], [*program.eqns], [*program.outputs], {**program.of_steps}
    return Program(avals, given, eqns, program.num_inputs, outputs, of_steps)


_FLAT: WeakKeyDictionary[Jaxpr, dict[tuple[bool, bool], tuple[Program, list[int]]]] = WeakKeyDictionary()
"""The programs of jaxprs without their constants: the body of a loop is listed for each question to the loop."""


class _Flatten(NamedTuple):
    program: Program
    enter_remat: bool
    enter_placed: bool

    def jaxpr(
        self, jaxpr: Jaxpr, consts: Sequence[int], values: Sequence[Any], stack: Any, traceback: Any
    ) -> list[Any]:
        """Adds the operations of a jaxpr. Operations of JAX's own functions get the user's ``traceback``."""
        program = self.program
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = tuple(map(read, eqn.invars))
            source = source_of(eqn, stack, traceback)
            call = inlined(eqn, self.enter_remat, self.enter_placed)
            if call is not None:
                inputs = self._barrier(eqn, inputs, call.barriers, source)
                scopes, line = source.scopes_inside(call), source.traceback if call.is_of_jax else traceback
                consts = [program.add(var.aval) for var in call.program.jaxpr.constvars]
                program.consts.update(zip(consts, call.program.consts, strict=True))
                outs = self.jaxpr(call.program.jaxpr, consts, inputs, scopes, line)
            else:
                outs = tuple(program.add(var.aval) for var in eqn.outvars)
                given, found = (tuple(var.aval for var in each) for each in (eqn.invars, eqn.outvars))
                program.eqns.append(Equation(*without_hijax(eqn), inputs, outs, given, found, eqn.effects, source))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _barrier(self, eqn: Any, inputs: tuple[Any, ...], barriers: Sequence[bool], source: Source) -> tuple[Any, ...]:
        """The operands of a ``remat`` behind a barrier, which JAX puts there when it compiles one."""
        avals = [var.aval for var in eqn.invars]
        behind = [i for i, value in enumerate(inputs) if barriers[i] and isinstance(value, int)]
        new = list(inputs)
        for axes in {varies(avals[i]) for i in behind}:  # operands of one equation vary over the same mesh axes
            places = [i for i in behind if varies(avals[i]) == axes]
            given = tuple(avals[i] for i in places)
            for i in places:
                new[i] = self.program.add(avals[i])
            before, after = (tuple(each[i] for i in places) for each in (inputs, new))
            self.program.eqns.append(
                Equation(jax.lax.optimization_barrier_p, {}, before, after, given, given, frozenset(), source)
            )
        return tuple(new)


def is_inexact(aval: Any) -> bool:
    """Whether the values of a type can be differentiated."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)
