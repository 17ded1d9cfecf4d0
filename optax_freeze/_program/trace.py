"""A traced function as one list of equations on numbered values.

Calls are entered: ``jit``, which would hide fusions and rows, and in a gradient also ``remat``, of which the barrier
against merging the repeated operations with the first ones remains. Loops and branches stay, and so do calls that have
derivatives of their own, for derivatives of the evaluated program. JAX may bind any call but ``jit`` as a primitive of
``jax.experimental.hijax``.
"""

import os
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, primitives
from jax.extend.source_info_util import current_name_stack, register_exclusion, summarize, user_context

from optax_freeze._program.regions import varies

_JAX = os.path.join(os.path.dirname(jax.__file__), "")
# The source of an operation is the user's line.
register_exclusion(os.path.join(os.path.dirname(os.path.dirname(__file__)), ""))

_CALLS = ("jit", "pjit", "closed_call", "core_call", "call", "eval_jaxpr")
_REMAT = ("checkpoint", "remat", "remat2", "RematTraced")


class Source(NamedTuple):
    """The line and the name scopes of an equation."""

    traceback: Any
    name_stack: Any

    def scope(self) -> Any:
        """A context in which operations have this source."""
        return user_context(self.traceback, name_stack=current_name_stack() + self.name_stack)


class Equation(NamedTuple):
    """An operation on numbered values."""

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Any, ...]  # numbers of values, or literals
    outputs: tuple[int, ...]
    avals_in: tuple[Any, ...]
    avals_out: tuple[Any, ...]
    context: Any
    effects: Any
    source: Source

    @property
    def name(self) -> str:
        """The name of the operation, or of the called function if it is a call."""
        name, params = operation_of(self)
        return params.get("name", name) if name in _CALLS else name

    @property
    def reads(self) -> set[int]:
        """The numbers of the values that the operation reads."""
        return {value for value in self.inputs if isinstance(value, int)}

    @property
    def has_effects(self) -> bool:
        """Whether the operation has side effects or reads a reference. Naming an axis of a mesh does not count."""
        named = any(type(effect).__name__ != "NamedAxisEffect" for effect in self.effects)
        return named or any(map(is_reference, self.avals_in))

    def bind(self, *operands: Any, **changed: Any) -> Any:
        """Applies the operation to arrays, with some of its params changed."""
        bound = self.primitive.get_bind_params({**self.params, **changed})
        functions, params = bound if isinstance(bound, tuple) else ((), bound)  # functions: up to JAX 0.9
        return self.primitive.bind(*functions, *operands, **params)

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
        return summarize(self.source) if self.source.traceback else ""  # type: ignore[arg-type]


class Program(NamedTuple):
    """The operations of a function in order. The inputs have the first numbers."""

    avals: list[Any]
    consts: dict[int, Any]
    eqns: list[Equation]
    num_inputs: int
    outputs: list[Any]
    on_host: Collection[int]  # the inputs in host memory
    of_steps: dict[int, int] = {}  # noqa: RUF012

    @property
    def made_by(self) -> dict[int, Equation]:
        """The operation that computes each value."""
        return {number: eqn for eqn in self.eqns for number in eqn.outputs}

    def copy(self, **changed: Any) -> "Program":
        """A copy, to which values can be added."""
        return self._replace(avals=list(self.avals), of_steps=dict(self.of_steps), **changed)

    def add(self, aval: Any, of_steps: int | None = None) -> int:
        """A number for a new value, which may be that of a loop's result ``of_steps`` after some of its steps."""
        self.avals.append(aval)
        if of_steps is not None:
            self.of_steps[len(self.avals) - 1] = of_steps
        return len(self.avals) - 1

    def like(self, number: int) -> int:
        """The number of the loop's result if this is its value after some steps; else the number itself."""
        return self.of_steps.get(number, number)


def flatten(closed: ClosedJaxpr, enter_remat: bool = True, enter_placed: bool = False) -> Program:
    """Lists the operations of a jaxpr, those of calls included; ``enter_placed``: with shardings or donation, too."""
    program = Program([], {}, [], len(closed.in_avals), [], (), {})
    values = [program.add(aval) for aval in closed.in_avals]
    program.outputs.extend(
        _Flatten(program, enter_remat, enter_placed).jaxpr(closed.jaxpr, closed.consts, values, None, None)
    )
    return program


class _Flatten(NamedTuple):
    program: Program
    enter_remat: bool
    enter_placed: bool

    def jaxpr(
        self, jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Any], stack: Any, traceback: Any
    ) -> list[Any]:
        """Adds the operations of a jaxpr. Operations of JAX's own functions get the user's ``traceback``."""
        program = self.program
        env: dict[Any, Any] = dict(zip(jaxpr.invars, values, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = program.add(var.aval)
            program.consts[env[var]] = const

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = tuple(map(read, eqn.invars))
            here = eqn.source_info.name_stack if stack is None else stack + eqn.source_info.name_stack
            line = traceback or eqn.source_info.traceback
            called = inner_program(eqn, self.enter_remat, self.enter_placed)
            name, params = operation_of(eqn)
            if called is not None:
                scope = "checkpoint" if name in _REMAT else params.get("name")
                inside = here.extend(scope) if scope else here
                if params.get("differentiated"):
                    inputs = self._barrier(eqn, inputs, Source(line, here))
                of_jax = _JAX in called.jaxpr.debug_info.func_src_info
                outs = self.jaxpr(called.jaxpr, called.consts, inputs, inside, line if of_jax else traceback)
            else:
                outs = tuple(program.add(var.aval) for var in eqn.outvars)
                is_name = name == "CheckpointName"
                operation = (primitives.name_p, params) if is_name else (eqn.primitive, eqn.params)
                given, found = (tuple(var.aval for var in each) for each in (eqn.invars, eqn.outvars))
                source = Source(line, here)
                program.eqns.append(Equation(*operation, inputs, outs, given, found, eqn.ctx, eqn.effects, source))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _barrier(self, eqn: Any, inputs: tuple[Any, ...], source: Source) -> tuple[Any, ...]:
        """The operands of a ``remat`` behind a barrier, which JAX puts there when it compiles one."""
        prevent, avals = eqn.params["prevent_cse"], [var.aval for var in eqn.invars]
        prevent = prevent if isinstance(prevent, tuple) else (prevent,) * len(inputs)
        behind = [i for i, value in enumerate(inputs) if prevent[i] and isinstance(value, int)]
        new = list(inputs)
        for axes in {varies(avals[i]) for i in behind}:  # operands of one equation vary over the same mesh axes
            places = [i for i in behind if varies(avals[i]) == axes]
            given = tuple(avals[i] for i in places)
            for i in places:
                new[i] = self.program.add(avals[i])
            before, after = (tuple(each[i] for i in places) for each in (inputs, new))
            self.program.eqns.append(
                Equation(jax.lax.optimization_barrier_p, {}, before, after, given, given, eqn.ctx, frozenset(), source)
            )
        return tuple(new)


def inner_program(eqn: Any, enter_remat: bool, enter_placed: bool) -> ClosedJaxpr | None:
    """The program of a call that can be replaced by its operations, or None."""
    name, params = operation_of(eqn)
    if name in _REMAT and enter_remat:
        return ClosedJaxpr(*opened(params["jaxpr"]))
    if name not in _CALLS:
        return None
    placement = {} if enter_placed else params
    shardings = (*placement.get("in_shardings", ()), *placement.get("out_shardings", ()))
    if any(type(s).__name__ != "UnspecifiedValue" for s in shardings) or any(placement.get("donated_invars", ())):
        return None
    return ClosedJaxpr(*opened(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]))


def operation_of(eqn: Any) -> tuple[str, dict[str, Any]]:
    """The name and the params of an operation, also of one that is called by JAX's primitive for all of ``hijax``."""
    if eqn.primitive.name != "call_hi_primitive":
        return eqn.primitive.name, eqn.params
    return type(eqn.params["_prim"]).__name__, eqn.params["_prim"].params


def opened(program: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns a jaxpr and its constants; before JAX 0.12 a ``Jaxpr`` has none, since then it is a ``ClosedJaxpr``."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of constant operands of a ``scan`` and the number of carried operands, which follow them."""
    if "ft_in" in params:  # since JAX 0.11
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def is_reference(aval: Any) -> bool:
    """Whether a type is that of a mutable array."""
    return hasattr(aval, "inner_aval")


def is_inexact(aval: Any) -> bool:
    """Whether the values of a type can be differentiated."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)
