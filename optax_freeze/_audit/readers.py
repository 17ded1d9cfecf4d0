"""The operations of a program that read some of its values, such as gradients, evaluated with others of these values.

What reads one value alone is evaluated for this value alone, so that a change of each of several hundred gradients
costs what reads them together: a norm of norms, and the updates of the parameters that train.
"""

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._audit.evaluation import Within, compiled, evaluate, live
from optax_freeze._audit.reactions import changed, differences
from optax_freeze._program.dependence import reached
from optax_freeze._program.operations import is_cheap
from optax_freeze._program.trace import Equation, Program

Counts = Callable[[Sequence[int], Sequence[int]], np.ndarray]


class Readers:
    """What reads some values of a program.

    ``elements`` has the elements of each value that change, ``results`` the results that may differ, and ``frozen``
    where each of them is frozen.
    """

    def __init__(
        self,
        program: Program,
        elements: Mapping[int, Any],
        results: Sequence[int],
        frozen: Sequence[Any],
        within: Within | None = None,
    ) -> None:
        self._program, self._elements, self._results, self._frozen = program, elements, results, frozen
        found = reached(program, {n: 2 << k for k, n in enumerate(elements)})
        after = [eqn for eqn in live(program.eqns, results, elements) if not found.keys().isdisjoint(eqn.outputs)]
        of_mark = {2 << k: n for k, n in enumerate(elements)}
        self._alone: dict[int, list[Equation]] = {n: [] for n in elements}
        together: list[Equation] = []
        for eqn in after:
            mark = functools.reduce(operator.or_, (found.get(n, 0) for n in eqn.outputs))
            is_alone = mark in of_mark and not eqn.has_effects and within is None
            (self._alone[of_mark[mark]] if is_alone else together).append(eqn)
        owner = {m: n for n, eqns in self._alone.items() for m in (n, *(m for eqn in eqns for m in eqn.outputs))}
        places: dict[int | None, list[int]] = {n: [] for n in (None, *elements)}
        for place, m in enumerate(results):
            places[owner.get(m)].append(place)
        self._places = {n: np.asarray(each, int) for n, each in places.items()}
        wanted = [results[place] for place in self._places[None]]
        together = _cheap_before(program, together, owner) + together
        self._read = _read_by(program, together, elements)
        self._kept = {*owner} & ({*results} | self._read)
        passed = _read_by(program, [eqn for eqns in self._alone.values() for eqn in eqns], elements) | self._read
        given = sorted((passed - {m for eqn in after for m in eqn.outputs}) | {*elements})
        self._inputs = [m for m in given if m < program.num_inputs]  # as outputs they would be copies
        computed = given[len(self._inputs) :]
        first = live(program.eqns, computed)

        def before(inputs: Sequence[Any]) -> dict[int, Any]:
            env = {**program.consts, **dict(enumerate(inputs))}
            evaluate(first, env)
            return {m: env[m] for m in computed}

        def after_all(given: Mapping[int, Any]) -> list[Any]:
            env = {**program.consts, **given}
            evaluate(together, env, keep=elements)
            return [env[m] for m in wanted]

        self._before, self._together = compiled(before, within), compiled(after_all, within)

    def counts(self, inputs: Sequence[Any]) -> Counts:
        """A function of numbers of values and of changes, which counts for each change how many elements differ.

        It returns an array whose last axes are the results, and frozen elements and others.
        """
        given = self._before(inputs) | {m: inputs[m] for m in self._inputs}
        common: dict[int, Any] = {m: x for m, x in given.items() if m in self._read}
        for n in self._alone:
            common |= self._read_of(self._of_one(n, given, given[n]))
        expected, frozen = self._together(common), [self._frozen[place] for place in self._places[None]]

        def differing(n: int, change: int) -> tuple[dict[int, Any], Any]:
            new = self._of_one(n, given, _changed(given[n], self._elements[n], change))
            places = self._places[n]
            if not places.size:
                return self._read_of(new), np.zeros((0, 2), int)
            # Computed again for each change: to keep it for all values would be another copy of the state.
            plain, own = self._of_one(n, given, given[n]), [self._results[place] for place in places]
            masks = [self._frozen[place] for place in places]
            return self._read_of(new), differences([new[m] for m in own], [plain[m] for m in own], masks)

        def counts(numbers: Sequence[int], changes: Sequence[int]) -> np.ndarray:
            total = np.zeros((len(changes), len(self._results), 2), np.int64)
            for row, change in zip(total, changes, strict=True):
                each = [differing(n, change) for n in numbers]
                changed = common | {m: x for parts, _ in each for m, x in parts.items()}
                found = [own for _, own in each] + (
                    [differences(self._together(changed), expected, frozen)] if expected else []
                )
                for n, own in zip([*numbers, None], jax.device_get(found), strict=False):
                    row[self._places[n]] = own
            return total

        return counts

    def _read_of(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """What operations read that also read other values."""
        return {m: x for m, x in values.items() if m in self._read}

    def _of_one(self, n: int, given: Mapping[int, Any], value: Any) -> dict[int, Any]:
        """What reads one value alone, as far as other operations or results need it."""
        env = {**self._program.consts, **given, n: value}
        evaluate(self._alone[n], env, keep=self._elements)
        return {m: env[m] for m in (n, *(m for eqn in self._alone[n] for m in eqn.outputs)) if m in self._kept}


def _read_by(program: Program, eqns: Sequence[Equation], given: Collection[int]) -> set[int]:
    """The values that operations read, except for constants and those of their own results that are not given."""
    own = {m for eqn in eqns for m in eqn.outputs} - {*given}
    return {m for eqn in eqns for m in eqn.reads} - own - {*program.consts}


def _cheap_before(program: Program, eqns: Sequence[Equation], apart: Collection[int]) -> list[Equation]:
    """The cheap operations on inputs alone that others read: computed with these, their results are not stored."""
    found, known = [], {*range(program.num_inputs), *program.consts} - {*apart}
    for eqn in program.eqns:
        if is_cheap(eqn) and not eqn.has_effects and eqn.reads <= known:
            found.append(eqn)
            known.update(eqn.outputs)
    return live(found, _read_by(program, eqns, apart), apart)


@jax.jit
def _changed(value: Any, elements: Any, change: Any) -> Any:
    return jnp.where(elements, changed(value, change), value)
