"""Whose gradient a value of a program is, which numbers decide.

A backward pass starts from a scalar of the program, or from one for each example. The program up to a scalar is
differentiated with respect to the parameters, at several sets of values. A value that equals one of these derivatives
each time, up to one factor, is that gradient.
"""

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._audit.backward import contains_backward, is_around_backward
from optax_freeze._audit.evaluation import Within, array_of, compiled, evaluate, live
from optax_freeze._jax_internals import Loop, inside, is_backward
from optax_freeze._program.dependence import dependent
from optax_freeze._program.trace import Equation, Program, flatten, is_inexact
from optax_freeze._verify.bits import scrambled

_TRIES = 8
"""The scalars that are tried for one backward pass, the last one first."""
_SUMS = 16
"""The weighted sums by which arrays are compared."""
_ROUNDINGS = 4
"""How many times what one rounding of the inputs changes, two programs of one gradient may differ."""
_UNDECIDED = 0.25
"""A point where rounding may change more than this of a derivative tells nothing about it."""
_NO_DERIVATIVE = (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError)
"""What JAX raises for an operation that it cannot differentiate."""


class _Scalar(NamedTuple):
    """A scalar, or one for each example or for each step of a loop."""

    place: int  # of the operation that computes it
    number: int
    inner: int | None = None  # its number in the body of the loop


class Owners:
    """Finds the owners of values of a program; ``leaves`` are those of its inputs that are parameters.

    Attributes:
      scalars: for each value with an owner the scalar whose derivative it is.
      undecided: the values that are zero or not finite, whatever the inputs are.
    """

    def __init__(
        self,
        program: Program,
        given: Sequence[Any],
        leaves: Collection[int],
        in_loops: Mapping[int, Sequence[int]],
        within: Within | None = None,
    ) -> None:
        """``in_loops``: for results of loops the scalars in the body whose derivatives they may add up."""
        self._program, self._given, self._leaves = program, given, leaves
        self._in_loops, self._within = in_loops, within
        self._inputs = [n for n in range(program.num_inputs) if is_inexact(program.avals[n])]
        self.scalars: dict[int, int] = {}
        self.undecided: set[int] = set()
        kinds = [jnp.finfo(aval.dtype) for aval in program.avals if is_inexact(aval)]
        self._epsilon = max((float(kind.eps) for kind in kinds if kind.bits > 8), default=0.0)  # the coarsest

    def find(self, values: Iterable[int], others: Iterable[int] = ()) -> dict[int, set[int]]:
        """For each value that is a gradient the inputs whose gradient it is.

        ``others`` are compared with the gradients that are found for the values.
        """
        found: dict[int, set[int]] = {}
        program, starts = self._program, self._starts()
        around = {n: place for place, eqn in enumerate(program.eqns) if is_around_backward(eqn) for n in eqn.outputs}
        values = {*values}
        every = sorted(values.union(others))
        left = {n: starts.get(n, len(program.eqns)) for n in every if n not in around}
        tried: set[_Scalar] = set()
        scalars = self._scalars({size for n in left for size in program.avals[n].shape[:1]})
        for start in sorted({first for n, first in left.items() if n in values}):
            for scalar in [each for each in scalars if each.place <= start][: -_TRIES - 1 : -1]:
                open_now = [n for n, first in left.items() if first == start and n not in found and n in values]
                if open_now and scalar not in tried:
                    tried.add(scalar)
                    later = [n for n, first in left.items() if first >= scalar.place and n not in found]
                    found |= self._equal(scalar, later)
        of_loops: dict[_Scalar, list[int]] = {}
        for n in every:
            for inner in self._in_loops.get(n, ()):
                scalar = _Scalar(around[n], program.eqns[around[n]].outputs[0], inner)
                of_loops.setdefault(scalar, []).append(n)
        for scalar, results in of_loops.items():
            left_over = [n for n in results if n not in found]
            found |= self._equal(scalar, left_over) if left_over else {}
        return found

    def _starts(self) -> dict[int, int]:
        """For each value that a backward pass reaches the place of the first operation of the last such pass."""
        found: dict[int, int] = {}
        in_pass: set[int] = set()
        for place, eqn in enumerate(self._program.eqns):
            reads = eqn.reads & (in_pass if is_backward(eqn) else found.keys())
            first = [found[n] for n in reads]
            if is_backward(eqn):
                in_pass.update(eqn.outputs)
                found |= dict.fromkeys(eqn.outputs, min(first, default=place))
            elif contains_backward(eqn):
                found |= dict.fromkeys(eqn.outputs, place)
            elif first:
                found |= dict.fromkeys(eqn.outputs, max(first))
        return found

    def _scalars(self, lengths: set[int]) -> list[_Scalar]:
        """The values that a backward pass may start from, in the order of the program."""
        program, found = self._program, []
        depends = dependent(program, self._inputs)
        for place, eqn in enumerate(program.eqns):
            for n in [] if is_backward(eqn) else eqn.outputs:
                aval = program.avals[n]
                if n in depends and is_inexact(aval) and len(aval.shape) < 2 and {*aval.shape} <= lengths:
                    found.append(_Scalar(place, n))
        return found

    def in_body(self) -> list[int]:
        """The last scalars before the first backward pass."""
        first = min(self._starts().values(), default=len(self._program.eqns))
        found = [each.number for each in self._scalars(set()) if each.place < first]
        return found[-_TRIES:]

    def _equal(self, scalar: _Scalar, values: Sequence[int]) -> dict[int, set[int]]:
        """The values that equal the derivative of a scalar with respect to some inputs, at all points."""
        avals = self._program.avals
        shapes = {avals[n].shape for n in values} | {avals[n].shape[1:] for n in values}
        inputs = [n for n in self._inputs if avals[n].shape in shapes]
        if not inputs:
            return {}
        compute = compiled(functools.partial(self._sketches, scalar, inputs, values), self._within)
        here, near = [], []
        try:
            for seed in range(3):
                here.append(jax.device_get(compute(self._point(seed))))
                near.append(jax.device_get(compute(self._point(seed, self._epsilon))))
        except _NO_DERIVATIVE:  # no backward pass starts from such a scalar
            return {}
        found: dict[int, set[int]] = {}
        for each, n in (key[1:] for key in here[0] if key[0] == "value"):
            alike = [i for i in inputs if avals[i].shape == avals[n].shape[each:]]
            slopes, rounded = (
                np.array([[row["slope", each, i] for row in rows] for i in alike], np.float64) for rows in (here, near)
            )
            value = np.array([row["value", each, n] for row in here], np.float64)
            self.undecided |= {n} if not (np.isfinite(value).all(1) & (value != 0).any(1)).any() else set()
            is_owner = _is_one_factor(value, slopes, rounded, self._epsilon) if alike else []
            if owners := {*compress(alike, is_owner)}:
                found.setdefault(n, set()).update(owners)
                self.scalars[n] = scalar.number
        return found

    def _point(self, seed: int, epsilon: float = 0.0) -> list[Any]:
        """The inputs, with other parameters of the same order unless the seed is 0, rounded by ``epsilon``."""
        found = []
        for n, x in enumerate(self._given):
            far = 0.1 if seed and n in self._leaves else 0.0
            is_same = not is_inexact(x) or far == epsilon == 0
            found.append(x if is_same else _shaken(x, (seed << 16) + n, far, epsilon))
        return found

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
                    operands = [env[x] if isinstance(x, int) else array_of(x) for x in eqn.inputs]
                    return _lifted(eqn, operands, scalar.inner)
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
        weights = {size: _uniform((size,), 0) for size in {x.size for x in rows.values()}}
        return {key: _sketch(x, weights[x.size]) for key, x in rows.items()}


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
    kept: set[int] = set()  # of what is carried, what the value is computed from
    while True:
        eqns = live(body.eqns, [number, *(body.outputs[k] for k in kept)])
        read = {n for eqn in eqns for n in eqn.reads} | {number, *(body.outputs[k] for k in kept)}
        if kept == (more := {k for k in range(carried) if consts + k in read}):
            break
        kept = more
    places = sorted(kept)

    def step(carry: Any, xs: Any) -> Any:
        env = {**body.consts, **dict(enumerate(operands[:consts]))}
        env |= dict(zip((consts + k for k in places), carry, strict=True)) | dict(enumerate(xs, consts + carried))
        for each in eqns:
            _evaluate_forward(each, env)
        outs = [body.outputs[k] for k in places]
        return [env[x] if isinstance(x, int) else array_of(x) for x in outs], env[number]

    rest = operands[consts + carried :]
    options = {"length": loop.length, "reverse": loop.reverse}
    return jax.lax.scan(step, [operands[consts + k] for k in places], rest, **options)[1]


def _sketch(value: Any, weights: Any) -> Any:
    """A few weighted sums of the numbers of an array."""
    rows = jnp.pad(jnp.ravel(_wide(value)) * weights, (0, -value.size % _SUMS))
    sums = rows.reshape(-1, _SUMS).sum(0)
    return jnp.concatenate([sums.real, sums.imag]) if jnp.iscomplexobj(sums) else sums


def _is_one_factor(value: np.ndarray, slopes: np.ndarray, rounded: np.ndarray, epsilon: float) -> np.ndarray:
    """Whether a value and each of several derivatives differ by one factor at all points, up to what rounding explains.

    Args:
      value: sketches, of shape (points, numbers).
      slopes: those of the derivatives, of shape (derivatives, points, numbers).
      rounded: the same at inputs that differ by one rounding.
    """
    a, b, c = np.broadcast_to(value, slopes.shape), slopes, rounded
    norm, dot = functools.partial(np.linalg.norm, axis=-1), lambda x, y: (x * y).sum(-1)
    with np.errstate(all="ignore"):
        sizes = np.stack([norm(a), norm(b), norm(c)])
        allowed = _ROUNDINGS * (epsilon + norm(c - b) / sizes[1])
        is_none = ~np.isfinite(sizes).all(0) | (sizes[:2] == 0).all(0) | (allowed > _UNDECIDED)
        factor = dot(a, b) / dot(b, b)
        is_alike = (sizes[:2] != 0).all(0) & (norm(a - factor[..., None] * b) <= allowed * sizes[0])
        known = (~is_none).sum(-1) > 1
        low, high = (f(factor, -1, where=~is_none, initial=x) for f, x in ((np.min, np.inf), (np.max, -np.inf)))
        most = np.max(allowed, -1, where=~is_none, initial=0)
        return (is_alike | is_none).all(-1) & known & (high - low <= 2 * most * np.maximum(abs(low), abs(high)))


@jax.jit
def _shaken(value: Any, seed: Any, far: Any, epsilon: Any) -> Any:
    """Other values of the same order, as ``far`` says, and these rounded up or down."""
    noise, sign = _uniform(value.shape, seed), jnp.sign(_uniform(value.shape, ~seed))
    other = (_wide(value) * (1 + far * noise) + far * noise / 4).astype(value.dtype)
    return (_wide(other) * (1 + epsilon * sign)).astype(value.dtype)


def _wide(value: Any) -> Any:
    """Numbers of at least 32 bits: those of 8 have no products."""
    return value.astype(np.float32) if jnp.finfo(value.dtype).bits < 32 else value


def _uniform(shape: tuple[int, ...], seed: Any) -> Any:
    """Numbers between -1 and 1, by operations that are compiled faster than a random generator."""
    words = jax.lax.iota(np.uint32, math.prod(shape)) + scrambled(jnp.asarray(seed).astype(np.uint32))
    return (scrambled(words) >> 8).astype(np.float32).reshape(shape) / 2**23 - 1
