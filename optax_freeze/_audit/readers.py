"""The operations of a program that read some of its values, such as gradients, evaluated with others of these values.

What reads one value alone is evaluated for this value alone, so that a change of each of several hundred gradients
costs what reads them together: a norm of norms, and the updates of the parameters that train.
"""

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._audit.evaluation import Within, compiled, evaluate, live
from optax_freeze._audit.reactions import changed, differences
from optax_freeze._jax_internals import key_of
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
        alone: dict[int, list[Equation]] = {n: [] for n in elements}
        together: list[Equation] = []
        for eqn in after:
            mark = functools.reduce(operator.or_, (found.get(n, 0) for n in eqn.outputs))
            is_alone = mark in of_mark and not eqn.has_effects and within is None
            (alone[of_mark[mark]] if is_alone else together).append(eqn)
        owner = {m: n for n, eqns in alone.items() for m in (n, *(m for eqn in eqns for m in eqn.outputs))}
        places: dict[int | None, list[int]] = {n: [] for n in (None, *elements)}
        for place, m in enumerate(results):
            places[owner.get(m)].append(place)
        self._places = {n: np.asarray(each, int) for n, each in places.items()}
        wanted = [results[place] for place in self._places[None]]
        cheap = _cheap(program, owner)
        together = _cheap_before(program, together, cheap) + together
        self._read = _read_by(program, together, elements)
        kept = {*owner} & ({*results} | self._read)
        chains: dict[Any, Callable[..., Any]] = {}
        self._chains = {
            n: _chain(_cheap_before(program, eqns, cheap) + eqns, elements, kept, chains) for n, eqns in alone.items()
        }
        self._kept = kept & {*elements}
        passed = {m for chain in self._chains.values() for m in chain.inputs}.union(self._read) - {*program.consts}
        given = sorted((passed - {m for eqn in after for m in eqn.outputs if m in found}) | {*elements})
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
        for n in self._chains:
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
        chain, consts = self._chains[n], self._program.consts
        operands = [value if m == n else given[m] if m in given else consts[m] for m in chain.inputs]
        found = dict(zip(chain.kept, chain.run(*operands), strict=True)) if chain.kept else {}
        return found | {n: value} if n in self._kept else found


class _Chain(NamedTuple):
    """Some operations as a function: the values that they read, and those of their results that are needed."""

    inputs: list[int]
    kept: list[int]
    run: Callable[..., Any]


def _chain(
    eqns: Sequence[Equation], apart: Collection[int], kept: Collection[int], known: dict[Any, Callable[..., Any]]
) -> _Chain:
    """Some operations as a compiled function, the same as of those that are ``known`` and like it.

    Results of them that are ``apart`` are given.
    """
    own = [m for eqn in eqns for m in eqn.outputs if m not in apart]
    made = {*own}
    inputs = [*dict.fromkeys(m for eqn in eqns for m in eqn.inputs if isinstance(m, int) and m not in made)]
    kept = [m for m in own if m in kept]
    names = {m: k for k, m in enumerate((*inputs, *own))}

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(inputs, arrays, strict=True))
        evaluate(eqns, env, keep=apart)
        return [env[m] for m in kept]

    def named(x: Any) -> Any:
        return names.get(x) if isinstance(x, int) else (str(x.aval), np.asarray(x.val).tobytes())

    keys = [key_of(eqn) for eqn in eqns]
    if None in keys:
        return _Chain(inputs, kept, jax.jit(run))
    lines = [
        (key, eqn.source.settings, *map(named, (*eqn.inputs, *eqn.outputs)))
        for key, eqn in zip(keys, eqns, strict=True)
    ]
    return _Chain(inputs, kept, known.setdefault((len(inputs), *lines, *map(named, kept)), jax.jit(run)))


def _read_by(program: Program, eqns: Sequence[Equation], given: Collection[int]) -> set[int]:
    """The values that operations read, except for constants and those of their own results that are not given."""
    own = {m for eqn in eqns for m in eqn.outputs} - {*given}
    return {m for eqn in eqns for m in eqn.reads} - own - {*program.consts}


def _cheap(program: Program, apart: Collection[int]) -> dict[int, int]:
    """The results of cheap operations on inputs alone, which need not be stored, and the places of the operations."""
    found: dict[int, int] = {}
    for place, eqn in enumerate(program.eqns):
        is_known = all(m in found or m < program.num_inputs or m in program.consts for m in eqn.reads)
        if is_known and eqn.reads.isdisjoint(apart) and is_cheap(eqn) and not eqn.has_effects:
            found |= dict.fromkeys(eqn.outputs, place)
    return found


def _cheap_before(program: Program, eqns: Sequence[Equation], cheap: Mapping[int, int]) -> list[Equation]:
    """The cheap operations that others need."""
    left, needed = {m for eqn in eqns for m in eqn.reads}, set[int]()
    while left:
        place = cheap.get(left.pop())
        if place is not None and place not in needed:
            needed.add(place)
            left |= program.eqns[place].reads
    return [program.eqns[place] for place in sorted(needed)]


@jax.jit
def _changed(value: Any, elements: Any, change: Any) -> Any:
    return jnp.where(elements, changed(value, change), value)
