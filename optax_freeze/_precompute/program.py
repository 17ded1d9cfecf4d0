"""Flattens a jaxpr into one list of operations, and marks the ones that can be evaluated beforehand.

Calls (``jit`` and the like) are replaced by their operations, so that a program can be divided within them. Loops,
branches, ``remat`` and custom derivatives stay as they are.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.source_info_util import current_name_stack, summarize, user_context

from optax_freeze._gradient.frozen_array import has_late
from optax_freeze._gradient.interpreter import apply
from optax_freeze._gradient.jaxprs import opened
from optax_freeze._gradient.rules import Equation
from optax_freeze._gradient.split_array import dense

_JAX = os.path.join(os.path.dirname(jax.__file__), "")


class Node(NamedTuple):
    """An operation on numbered values."""

    eqn: Any
    inputs: tuple[Any, ...]  # numbers of values, or literals
    outputs: tuple[int, ...]
    name_stack: Any
    traceback: Any

    @property
    def reads(self) -> set[int]:
        """The numbers of the values that the operation reads."""
        return {value for value in self.inputs if isinstance(value, int)}

    @property
    def name(self) -> str:
        """The name of the operation, or of the called function if it is a call."""
        name = self.eqn.primitive.name
        return self.eqn.params.get("name", name) if name in _CALLS else name

    def __str__(self) -> str:
        source: Any = _Source(self.traceback)
        line = summarize(source)
        return f"{self.name} at {line}" if line else self.name


class _Source(NamedTuple):
    traceback: Any


class Program(NamedTuple):
    """The operations of a function in order, on numbered values. The inputs have the first numbers."""

    avals: list[Any]
    known: list[bool]  # whether a value can be computed from the known inputs
    consts: dict[int, Any]
    nodes: list[Node]
    outputs: list[Any]

    def evaluate(self, nodes: Iterable[Node], values: dict[int, Any], outputs: Sequence[Any]) -> list[Any]:
        """Evaluates ``nodes``, given ``values`` by number, and returns the values numbered ``outputs``."""
        nodes = list(nodes)
        env = {**self.consts, **values}
        last = {value: i for i, node in enumerate(nodes) for value in node.reads}
        last |= {value: len(nodes) for value in outputs if isinstance(value, int)}

        def read(value: Any) -> Any:
            return value.val if isinstance(value, Literal) else env[value]

        for i, node in enumerate(nodes):
            eqn, operands = node.eqn, [read(value) for value in node.inputs]
            stack = current_name_stack() + node.name_stack
            with user_context(node.traceback, name_stack=stack), eqn.ctx.manager:
                outs = (
                    apply(eqn, operands) if has_late(operands) else Equation(eqn.primitive, eqn.params).bind(*operands)
                )
            env.update(zip(node.outputs, outs if eqn.primitive.multiple_results else [outs], strict=True))
            for value in {*node.reads, *node.outputs}:
                if last.get(value, i) <= i:
                    del env[value]
        return [dense(read(value)) for value in outputs]


_CALLS = ("jit", "pjit", "closed_call", "core_call", "call")


def flatten(closed: ClosedJaxpr, known: Sequence[bool]) -> Program:
    """Flattens a jaxpr. ``known`` says for each input whether it is known beforehand."""
    program = Program([], [], {}, [], [])
    values = [_add(program, aval, here) for aval, here in zip(closed.in_avals, known, strict=True)]
    program.outputs.extend(_walk(program, closed.jaxpr, closed.consts, values, None, None))
    return program


def _add(program: Program, aval: Any, known: bool) -> int:
    program.avals.append(aval)
    program.known.append(known)
    return len(program.avals) - 1


def _walk(
    program: Program, jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Any], stack: Any, traceback: Any
) -> list[Any]:
    """Adds the operations of a jaxpr. Operations of JAX's own functions get the ``traceback`` of the user's call."""
    env: dict[Any, Any] = dict(zip(jaxpr.invars, values, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = _add(program, var.aval, not isinstance(const, Tracer))
        program.consts[env[var]] = const

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = tuple(map(read, eqn.invars))
        known = [isinstance(value, Literal) or program.known[value] for value in inputs]
        here = eqn.source_info.name_stack if stack is None else stack + eqn.source_info.name_stack
        line = traceback or eqn.source_info.traceback
        called = _called(eqn)
        if called and (all(known) or _computes_from(called.jaxpr, known)):
            inside = here.extend(eqn.params["name"]) if "name" in eqn.params else here
            of_jax = _JAX in called.jaxpr.debug_info.func_src_info
            outs = _walk(program, called.jaxpr, called.consts, inputs, inside, line if of_jax else traceback)
        else:
            is_known = all(known) and not has_effects(eqn)
            outs = tuple(_add(program, var.aval, is_known) for var in eqn.outvars)
            program.nodes.append(Node(eqn, inputs, outs, here, line))
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _called(eqn: Any) -> ClosedJaxpr | None:
    """The program of a call that can be replaced by its operations, or None."""
    if eqn.primitive.name not in _CALLS:
        return None
    params = eqn.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    if any(type(s).__name__ != "UnspecifiedValue" for s in shardings) or any(params.get("donated_invars", ())):
        return None
    closed = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    return ClosedJaxpr(*opened(closed))


def _computes_from(jaxpr: Jaxpr, known: Sequence[bool]) -> bool:
    """Whether a program computes anything from the known inputs alone."""
    marked = {var for var, here in zip(jaxpr.invars, known, strict=True) if here}
    for eqn in jaxpr.eqns:
        here = [isinstance(atom, Literal) or atom in marked for atom in eqn.invars]
        if any(atom in marked for atom in eqn.invars if not isinstance(atom, Literal)):
            called = _called(eqn)
            if all(here) or (called and _computes_from(called.jaxpr, here)):
                return True
    return False


def has_effects(eqn: Any) -> bool:
    """Whether an operation has side effects. Naming an axis of a mesh does not count."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)
