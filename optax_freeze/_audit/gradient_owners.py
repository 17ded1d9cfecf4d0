"""Whose gradient a value of a program is, which numbers decide.

A backward pass starts from a scalar of the program, or from one for each example. The program up to a scalar is
differentiated with respect to the parameters, at several sets of values. A value that equals one of these derivatives
each time, up to one factor, is that gradient.
"""

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._audit.evaluation import evaluate, live
from optax_freeze._jax_internals import Loop, inside, is_backward, programs_in
from optax_freeze._program.dependence import dependent
from optax_freeze._program.trace import Equation, Program, flatten, is_inexact

_TRIES = 8
"""The scalars that are tried for one backward pass, the last one first."""
_SUMS = 16
"""The weighted sums by which arrays are compared."""
_ROUNDINGS = 4
"""How many times what one rounding of the inputs changes, two programs of one gradient may differ."""
_UNDECIDED = 0.25
"""Where rounding may change more than this of a derivative, no value is told from it."""


def contains_backward(eqn: Any) -> bool:
    """Whether a loop, a branch or a call contains a backward pass."""
    inner = [each for program in programs_in(eqn) for each in program.eqns]
    return any(is_backward(each) or contains_backward(each) for each in inner)


class _Scalar(NamedTuple):
    """A scalar, or one for each example or for each step of a loop."""

    place: int  # of the operation that computes it
    number: int
    inner: int | None = None  # its number in the body of the loop


class Owners:
    """Finds the owners of values of a program; ``inputs`` are its floating-point inputs, ``leaves`` among them."""

    def __init__(
        self, program: Program, given: Sequence[Any], inputs: Collection[int], leaves: Collection[int]
    ) -> None:
        self._program, self._given, self._inputs, self._leaves = program, given, inputs, leaves
        self._place = {n: place for place, eqn in enumerate(program.eqns) for n in eqn.outputs}
        kinds = [jnp.finfo(aval.dtype) for aval in program.avals if is_inexact(aval)]
        self._epsilon = max((float(kind.eps) for kind in kinds if kind.bits > 8), default=0.0)  # the coarsest

    def find(self, values: Iterable[int]) -> dict[int, set[int]]:
        """For each value that is a gradient the inputs whose gradient it is."""
        found: dict[int, set[int]] = {}
        left = {n: self._start(n) for n in values}
        tried: set[_Scalar] = set()
        scalars = self._scalars({size for n in left for size in self._program.avals[n].shape[:1]})
        for start in sorted({*left.values()}):
            for scalar in [each for each in scalars if each.place <= start][: -_TRIES - 1 : -1]:
                open_now = [n for n, first in left.items() if first == start and n not in found]
                if open_now and scalar not in tried:
                    tried.add(scalar)
                    later = [n for n, first in left.items() if first >= scalar.place and n not in found]
                    found |= self._equal(scalar, later)
        return found

    def _start(self, number: int) -> int:
        """The place of the first operation of the backward pass that computes a value."""
        wanted, first = [number], len(self._program.eqns)
        seen: set[int] = set()
        while wanted:
            place = self._place.get(wanted.pop())
            if place is not None and place not in seen:
                seen.add(place)
                eqn = self._program.eqns[place]
                if is_backward(eqn):
                    first = min(first, place)
                    wanted += eqn.reads
                elif contains_backward(eqn):
                    first = min(first, place)
        return first

    def _scalars(self, lengths: set[int]) -> list[_Scalar]:
        """The values that a backward pass may start from, in the order of the program."""
        program, found = self._program, []
        depends = dependent(program, self._inputs)
        for place, eqn in enumerate(program.eqns):
            if is_backward(eqn) or depends.isdisjoint(eqn.outputs):
                continue
            for n in eqn.outputs:
                aval = program.avals[n]
                if n in depends and is_inexact(aval) and len(aval.shape) < 2 and {*aval.shape} <= lengths:
                    found.append(_Scalar(place, n))
            if isinstance(inside(eqn), Loop) and contains_backward(eqn):
                body = flatten(programs_in(eqn)[0])
                first = next((k for k, each in enumerate(body.eqns) if is_backward(each)), 0)
                inner = [n for each in body.eqns[:first] for n in each.outputs]
                scalars = [n for n in inner if body.avals[n].shape == () and is_inexact(body.avals[n])]
                found += [_Scalar(place, eqn.outputs[0], n) for n in scalars[-_TRIES:]]
        return found

    def _equal(self, scalar: _Scalar, values: Sequence[int]) -> dict[int, set[int]]:
        """The values that equal the derivative of a scalar with respect to some inputs, at all points."""
        avals = self._program.avals
        shapes = {avals[n].shape for n in values} | {avals[n].shape[1:] for n in values}
        inputs = [n for n in self._inputs if avals[n].shape in shapes]
        if not inputs:
            return {}
        compute = jax.jit(functools.partial(self._sketches, scalar, inputs, values))
        here, near = [], []
        try:
            for seed in range(3):
                point = self._point(seed)
                here.append(jax.device_get(compute(point)))
                near.append(jax.device_get(compute(_rounded(point, self._epsilon, seed))))
        except Exception:  # an operation without a derivative, which no backward pass starts from
            return {}
        found: dict[int, set[int]] = {}
        for each, n in (key[1:] for key in here[0] if key[0] == "value"):
            for i in inputs:
                if avals[i].shape == avals[n].shape[each:]:
                    value, slope = ("value", each, n), ("slope", each, i)
                    rows = [(row[value], row[slope], other[slope]) for row, other in zip(here, near, strict=True)]
                    if _is_one_factor(rows, self._epsilon):
                        found.setdefault(n, set()).add(i)
        return found

    def _point(self, seed: int) -> list[Any]:
        """The inputs, with other parameters of the same order unless the seed is 0."""

        return [_perturbed(x, (seed << 16) + n) if seed and n in self._leaves else x for n, x in enumerate(self._given)]

    def _sketches(self, scalar: _Scalar, inputs: Sequence[int], values: Sequence[int], given: Sequence[Any]) -> Any:
        """A few numbers of each value and of the derivative with respect to each input, summed or for each example."""
        program = self._program
        computed = {**program.consts, **dict(enumerate(given))}
        evaluate(live(program.eqns, values), computed)

        def start(leaves: Sequence[Any]) -> Any:
            env = {**program.consts, **dict(enumerate(given)), **dict(zip(inputs, leaves, strict=True))}
            wanted = [scalar.number]
            for eqn in live(program.eqns, wanted):
                if scalar.inner is not None and eqn is program.eqns[scalar.place]:
                    return _lifted(eqn, [env[x] if isinstance(x, int) else x.val for x in eqn.inputs], scalar.inner)
                _evaluate_forward(eqn, env)
            return env[scalar.number]

        value, pull = jax.vjp(start, [given[i] for i in inputs])
        slopes = pull(jnp.ones_like(value))[0]
        rows: dict[Any, Any] = {("value", 0, n): computed[n] for n in values}
        rows |= {("slope", 0, i): slope for i, slope in zip(inputs, slopes, strict=True)}
        if value.shape:
            weights = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, value.shape), value.dtype)
            of_each = [n for n in values if computed[n].shape[:1] == value.shape]
            rows |= {("value", 1, n): jnp.tensordot(weights.astype(computed[n].dtype), computed[n], 1) for n in of_each}
            rows |= {("slope", 1, i): slope for i, slope in zip(inputs, pull(weights)[0], strict=True)}
        return {key: _sketch(x) for key, x in rows.items()}


def _evaluate_forward(eqn: Equation, env: dict[int, Any]) -> None:
    """Computes the results of an operation; those of another backward pass are constants."""
    given = {n: jax.lax.stop_gradient(env[n]) for n in eqn.reads} if is_backward(eqn) else env
    evaluate([eqn], given)
    env.update((n, given[n]) for n in eqn.outputs)


def _lifted(eqn: Equation, operands: Sequence[Any], number: int) -> Any:
    """A value in each step of a loop."""
    loop = inside(eqn)
    assert isinstance(loop, Loop)
    body, consts, carried = flatten(loop.body), loop.consts, loop.carried

    def step(carry: Any, xs: Any) -> Any:
        env = {**body.consts, **dict(enumerate([*operands[:consts], *carry, *xs]))}
        for each in live(body.eqns, [*body.outputs[:carried], number]):
            _evaluate_forward(each, env)
        return [env[x] if isinstance(x, int) else jnp.asarray(x.val) for x in body.outputs[:carried]], env[number]

    rest = operands[consts + carried :]
    options = {"length": loop.length, "reverse": loop.reverse}
    return jax.lax.scan(step, operands[consts : consts + carried], rest, **options)[1]


def _sketch(value: Any) -> Any:
    """The largest absolute number of an array, and weighted sums of its numbers divided by it."""
    value = jnp.ravel(value)
    parts = [value.real, value.imag] if jnp.iscomplexobj(value) else [value]
    parts = [x.astype(jnp.promote_types(jnp.float32, x.dtype)) for x in parts]
    largest = jnp.max(jnp.abs(jnp.stack(parts)), initial=0)
    weights = _uniform(value.shape, 0) / jnp.where(largest > 0, largest, 1)
    missing = -value.size % _SUMS
    sums = [jnp.pad(x * weights, (0, missing)).reshape(-1, _SUMS).sum(0) for x in parts]
    return jnp.concatenate([largest[None], *sums])


def _is_one_factor(rows: Iterable[Any], epsilon: float) -> bool:
    """Whether sketches of values and derivatives differ by one factor at all points, up to what rounding explains.

    The third sketch of each point is of the derivative at inputs that differ by one rounding.
    """
    factors, most = [], 0.0
    for value, slope, rounded in rows:
        if value[0] == slope[0] == 0 or not np.isfinite([value[0], slope[0], rounded[0]]).all():
            continue
        if value[0] == 0 or slope[0] == 0:
            return False
        a, b, c = (np.asarray(x[1:], np.float64) for x in (value, slope, rounded))
        noise = np.linalg.norm(c * (rounded[0] / slope[0]) - b) / np.linalg.norm(b)
        allowed, factor = _ROUNDINGS * (epsilon + noise), (a @ b) / (b @ b)
        if allowed > _UNDECIDED or np.linalg.norm(a - factor * b) > allowed * np.linalg.norm(a):
            return False
        factors.append(factor * (value[0] / slope[0]))
        most = max(most, allowed)
    return len(factors) > 1 and bool(np.ptp(factors) <= 2 * most * abs(factors[0]))


def _rounded(point: Sequence[Any], epsilon: float, seed: int) -> list[Any]:
    """The inputs with their floating-point numbers rounded up or down."""
    return [_shaken(x, epsilon, (seed << 16) + n) if is_inexact(x) else x for n, x in enumerate(point)]


@jax.jit
def _shaken(value: Any, epsilon: Any, seed: Any) -> Any:
    return (value * (1 + epsilon * jnp.sign(_uniform(value.shape, seed)))).astype(value.dtype)


@jax.jit
def _perturbed(value: Any, seed: Any) -> Any:
    noise = _uniform(value.shape, seed) / 10
    return (value * (1 + noise) + noise / 4).astype(value.dtype)


def _uniform(shape: tuple[int, ...], seed: Any) -> Any:
    """Numbers between -1 and 1, each a hash of its place and the seed."""
    word = jnp.arange(math.prod(shape), dtype=jnp.uint32) + jnp.asarray(seed, jnp.uint32) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return ((word >> 8).astype(jnp.float32) * np.float32(2**-23) - 1).reshape(shape)
