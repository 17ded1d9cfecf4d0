"""The operations of a program that read some of its values, such as gradients, evaluated with others of these values.

What reads one value alone is evaluated for this value alone, so that a change of each of several hundred gradients
costs what reads them together: a norm of norms, and the updates of the parameters that train.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._audit.evaluation import evaluate, live
from optax_freeze._audit.reactions import changed, differences
from optax_freeze._program.dependence import reached
from optax_freeze._program.trace import Equation, Program

Counts = Callable[[Sequence[int], Sequence[int]], np.ndarray]


class Readers:
    """What reads some values of a program.

    ``elements`` has the elements of each value that change, ``results`` the results that may differ, and ``frozen``
    where each of them is frozen.
    """

    def __init__(
        self, program: Program, elements: Mapping[int, Any], results: Sequence[int], frozen: Sequence[Any]
    ) -> None:
        self._program, self._elements, self._results, self._frozen = program, elements, results, frozen
        found = reached(program, {n: 2 << k for k, n in enumerate(elements)})
        after = [eqn for eqn in live(program.eqns, results, elements) if not found.keys().isdisjoint(eqn.outputs)]
        of_mark = {2 << k: n for k, n in enumerate(elements)}
        self._alone: dict[int, list[Equation]] = {n: [] for n in elements}
        together: list[Equation] = []
        for eqn in after:
            mark = functools.reduce(operator.or_, (found.get(n, 0) for n in eqn.outputs))
            (self._alone[of_mark[mark]] if mark in of_mark and not eqn.has_effects else together).append(eqn)
        owner = {m: n for n, eqns in self._alone.items() for m in (n, *(m for eqn in eqns for m in eqn.outputs))}
        places: dict[int | None, list[int]] = {n: [] for n in (None, *elements)}
        for place, m in enumerate(results):
            places[owner.get(m)].append(place)
        self._places = {n: np.asarray(each, int) for n, each in places.items()}
        later = {m for eqn in after for m in eqn.outputs} | {*elements}
        passed = sorted({m for eqn in after for m in eqn.reads} - later - {*program.consts})
        first = live(program.eqns, [*passed, *elements])
        wanted = [results[place] for place in self._places[None]]
        self._read = {m for eqn in together for m in eqn.reads} - {*program.consts}
        self._kept = {*owner} & ({*results} | self._read)

        def before(inputs: Sequence[Any]) -> dict[int, Any]:
            env = {**program.consts, **dict(enumerate(inputs))}
            evaluate(first, env)
            return {m: env[m] for m in (*passed, *elements)}

        def after_all(given: Mapping[int, Any]) -> list[Any]:
            env = {**program.consts, **given}
            evaluate(together, env, keep=elements)
            return [env[m] for m in wanted]

        self._before, self._together = jax.jit(before), jax.jit(after_all)

    def counts(self, inputs: Sequence[Any]) -> Counts:
        """A function of numbers of values and of changes, which counts for each change how many elements differ.

        It returns an array whose last axes are the results, and frozen elements and others.
        """
        given = self._before(inputs)
        plain: dict[int, Any] = {m: x for n in self._alone for m, x in self._of_one(n, given, given[n]).items()}
        common = {m: x for m, x in given.items() if m in self._read}

        def together(new: dict[int, Any]) -> list[Any]:
            return self._together(common | {m: x for m, x in (plain | new).items() if m in self._read})

        expected = together({})

        def differing(numbers: Sequence[int], change: int) -> list[tuple[np.ndarray, Any]]:
            new: dict[int, Any] = {}
            for n in numbers:
                new |= self._of_one(n, given, _changed(given[n], self._elements[n], change))
            pairs: list[Any] = [(None, together(new), expected)] if expected else []
            for n in numbers:
                own = [self._results[place] for place in self._places[n]]
                pairs.append((n, [new[m] for m in own], [plain[m] for m in own]))
            found = []
            for n, a, b in pairs:
                if (places := self._places[n]).size:
                    found.append((places, differences(a, b, [self._frozen[place] for place in places])))
            return found

        def counts(numbers: Sequence[int], changes: Sequence[int]) -> np.ndarray:
            total = np.zeros((len(changes), len(self._results), 2), np.int64)
            for row, change in zip(total, changes, strict=True):
                found = jax.device_get(differing(numbers, change))
                for places, each in found:
                    row[places] = each
            return total

        return counts

    def _of_one(self, n: int, given: Mapping[int, Any], value: Any) -> dict[int, Any]:
        """What reads one value alone, as far as other operations or results need it."""
        env = {**self._program.consts, **given, n: value}
        evaluate(self._alone[n], env, keep=self._elements)
        return {m: env[m] for m in (n, *(m for eqn in self._alone[n] for m in eqn.outputs)) if m in self._kept}


@jax.jit
def _changed(value: Any, elements: Any, change: Any) -> Any:
    return jnp.where(elements, changed(value, change), value)
