"""Evaluates some operations of a program."""

from collections.abc import Collection, Iterable
from typing import Any

from optax_freeze._program.trace import Equation


def live(eqns: Iterable[Equation], outputs: Iterable[Any], given: Collection[int] = ()) -> list[Equation]:
    """The operations that some values need."""
    wanted, found = {n for n in outputs if isinstance(n, int)} - {*given}, []
    for eqn in reversed([*eqns]):
        if not wanted.isdisjoint(eqn.outputs):
            found.append(eqn)
            wanted |= eqn.reads - {*given}
    return found[::-1]


def evaluate(eqns: Iterable[Equation], env: dict[int, Any], keep: Collection[int] = ()) -> None:
    """Computes the results of operations, in order, except for those to keep."""
    for eqn in eqns:
        with eqn.source.scope():
            outs = eqn.bind_all(*(env[x] if isinstance(x, int) else x.val for x in eqn.inputs))
        env.update((n, out) for n, out in zip(eqn.outputs, outs, strict=True) if n not in keep)
