"""Branches of a training step that no run took, and that can write frozen parameters."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from optax_freeze._audit.step import State, Step
from optax_freeze._errors import listed
from optax_freeze._jax_internals import Branches, Literal, inside, programs_in
from optax_freeze._program.regions import EVERYTHING, Values
from optax_freeze._program.tasks import ALWAYS
from optax_freeze._program.trace import Program, flatten
from optax_freeze._program.walk import schedule


class UntakenBranches:
    """The branches on the way to the new values of frozen parameters, by the number that says which one is taken."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._leaves = [i for i in step.frozen if step.is_frozen(i)]
        places = [step.params[i] for i in self._leaves]
        arrays, filled = step.arrays_of(step.start, step.batch)

        def written(*arrays: Any) -> list[Any]:
            new, _ = step(*filled(arrays))
            return [new[k] for k in places]

        program = flatten(jax.make_jaxpr(written)(*arrays), enter_placed=True)
        given = {id(array): n for n, array in enumerate(arrays)}
        self._writers: dict[int, dict[int, set[int]]] = {}
        self._in_loops: set[int] = set()
        for i, k, out in zip(self._leaves, places, program.outputs, strict=True):
            self._add(program, i, given.get(id(step.start[k]), -1), out)
        self._taken: dict[int, set[int]] = {n: set() for n in self._writers}
        found = schedule(program, [(n, EVERYTHING, ALWAYS) for n in self._writers])
        self._which = jax.jit(lambda *arrays: found.run(Values(dict(enumerate(arrays)))))

    def _add(self, program: Program, i: int, own: int, out: Any) -> None:
        made_by, left, seen = program.made_by, [out], set[int]()
        while left:
            n = left.pop()
            eqn = made_by.get(n) if isinstance(n, int) and n not in seen else None
            if eqn is None:
                continue
            seen.add(n)
            left += eqn.reads
            if not isinstance(inside(eqn), Branches):
                self._in_loops |= {i} if any(map(_has_branches, programs_in(eqn))) else set()
                continue
            which, *operands = eqn.inputs
            writers = {
                number
                for number, branch in enumerate(programs_in(eqn))
                if not _keeps(branch, eqn.outputs.index(n), operands, own)
            }
            if isinstance(which, int):
                for number in writers:
                    self._writers.setdefault(which, {}).setdefault(number, set()).add(i)

    def see(self, state: State, batch: Any) -> None:
        """Records which branches a step from a state takes."""
        if self._writers:
            arrays, _ = self._step.arrays_of(state, self._step.batch if batch is None else batch)
            for n, which in zip(self._writers, jax.device_get(self._which(*arrays)), strict=True):
                self._taken[n].add(int(which))

    def note(self, moved: Sequence[int]) -> Iterator[str]:
        """Which frozen parameters a branch can write that was not taken."""
        can = {i for n, by in self._writers.items() for number in by.keys() - self._taken[n] for i in by[number]}
        for what, found in (("no run took a branch", can), ("a loop has a branch", self._in_loops)):
            paths = [self._step.plan.leaves[i].path for i in self._leaves if i in found and i not in moved]
            if paths:
                yield f"{what} that can write {listed(paths)}: whether it does is not known"


def _keeps(branch: Any, result: int, operands: Sequence[Any], own: int) -> bool:
    """Whether a branch returns the parameter itself, or zeros to be added to it."""
    jaxpr = branch.jaxpr
    out = jaxpr.outvars[result]
    if out in jaxpr.invars:
        return operands[jaxpr.invars.index(out)] == own
    eqn = next((eqn for eqn in jaxpr.eqns if out in eqn.outvars), None)
    given = out if eqn is None else eqn.invars[0] if eqn.primitive.name == "broadcast_in_dim" else None
    return isinstance(given, Literal) and not np.any(given.val)


def _has_branches(program: Any) -> bool:
    return any(
        isinstance(inside(eqn), Branches) or any(map(_has_branches, programs_in(eqn))) for eqn in program.jaxpr.eqns
    )
