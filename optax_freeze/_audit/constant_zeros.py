"""Which elements of a value are zero whatever the inputs of the program are, such as the padding of a gradient of rows.

The operations that compute the value are evaluated with NaN in place of all numbers that depend on the inputs. Since
NaN remains in the sums and products of the operations below, which otherwise only move numbers, a zero in the result
comes from constants alone. The results of other operations are not known.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._audit.evaluation import array_of, live
from optax_freeze._jax_internals import Loop, inside, is_known_primitive
from optax_freeze._program.dependence import dependent
from optax_freeze._program.trace import Equation, Program, flatten, is_inexact

_PLACES = frozenset(
    "concatenate dynamic_update_slice gather optimization_barrier pad scan scatter scatter-add select_n".split()  # noqa: SIM905
)
"""Operations of which some numbers may be known though others are not."""
_KEEPS_NAN = frozenset(
    """
    add add_any broadcast_in_dim convert_element_type copy div dynamic_slice mul neg reduce_sum reshape rev
    sharding_constraint slice squeeze sub transpose
    """.split()  # noqa: SIM905
)
_ROUNDS = 4


def constant_zeros(program: Program, numbers: Sequence[int]) -> dict[int, np.ndarray]:
    """Where some values are zero, whatever the inputs are; broadcasts against each."""
    with jax.debug_nans(False):
        values = _evaluate(program, [None] * program.num_inputs, numbers)
    zeros = [None if x is None else np.asarray(x == 0) for x in values]
    return {n: np.asarray(False) if x is None or not x.any() else x for n, x in zip(numbers, zeros, strict=True)}


def _evaluate(program: Program, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The outputs, with NaN where they depend on NaN in the inputs; None if nothing is known."""
    unknown = [i for i, x in enumerate(inputs) if x is None or (is_inexact(x) and np.isnan(x).any())]
    depends = dependent(program, unknown)
    env = {**program.consts, **{i: x for i, x in enumerate(inputs) if x is not None}}
    known, found = {*env}, []
    for eqn in program.eqns:
        name = eqn.primitive.name if is_known_primitive(eqn.primitive) else None
        is_move = name in _PLACES or (name in _KEEPS_NAN and eqn.reads <= known)
        if is_move or depends.isdisjoint(eqn.outputs):
            found.append(eqn)
            known.update(eqn.outputs)
    is_loop = lambda eqn: eqn.primitive.name == "scan" and not depends.isdisjoint(eqn.outputs)  # noqa: E731
    groups = [(of_loops, [*group]) for of_loops, group in itertools.groupby(live(found, outputs), is_loop)]
    for place, (of_loops, group) in enumerate(groups):
        if of_loops:
            for eqn in group:
                outs = _scan(eqn, [env.get(x) if isinstance(x, int) else array_of(x) for x in eqn.inputs])
                env |= {n: x for n, x in zip(eqn.outputs, outs, strict=True) if is_inexact(program.avals[n])}
        else:
            later = {n for _, eqns in groups[place + 1 :] for eqn in eqns for n in eqn.reads}
            env |= _together(program, group, depends, env, later | {n for n in outputs if isinstance(n, int)})
    return [env.get(n) if isinstance(n, int) else array_of(n) for n in outputs]


def _together(
    program: Program,
    eqns: Sequence[Equation],
    depends: Collection[int],
    known: Mapping[int, Any],
    wanted: Collection[int],
) -> dict[int, Any]:
    """The wanted results of operations, compiled together."""
    read = {n for eqn in eqns for n in eqn.reads}
    given = {n: x for n, x in known.items() if n in read and x is not None}

    @jax.jit
    def run(given: dict[int, Any]) -> dict[int, Any]:
        env = dict(given)
        for eqn in eqns:
            outs = _with_nan(eqn, [env.get(x) if isinstance(x, int) else array_of(x) for x in eqn.inputs])
            pairs = [(n, x) for n, x in zip(eqn.outputs, outs, strict=True) if x is not None]
            env |= {n: x for n, x in pairs if n not in depends or is_inexact(program.avals[n])}
        return {n: env[n] for eqn in eqns for n in eqn.outputs if n in env and n in wanted}

    return {n: x if _is_key(x) else np.asarray(x) for n, x in run(given).items()}


def _with_nan(eqn: Equation, operands: Sequence[Any]) -> list[Any]:
    """The results of an operation, with NaN in place of numbers that are not known; nothing without its integers."""
    pairs = list(zip(operands, eqn.avals_in, strict=True))
    if any(x is None and not is_inexact(aval) for x, aval in pairs):
        return [None] * len(eqn.outputs)
    with eqn.source.scope():
        return eqn.bind_all(*(jnp.full(aval.shape, jnp.nan, aval.dtype) if x is None else x for x, aval in pairs))


def _scan(eqn: Equation, operands: Sequence[Any]) -> list[Any]:
    """The results of a loop: what is the same in all of its steps."""
    loop = inside(eqn)
    assert isinstance(loop, Loop)
    body, first, carried = flatten(loop.body), loop.consts, loop.carried
    consts, carry, xs = operands[:first], operands[first : first + carried], operands[first + carried :]
    xs = [None if x is None or not len(x) else _same([*x]) for x in xs]
    for attempt in range(_ROUNDS):
        outs = _evaluate(body, [*consts, *carry, *xs], body.outputs)
        new = [_same(pair) for pair in zip(carry, outs, strict=False)]
        if all(map(_equal, carry, new)):
            break
        carry = [b if _equal(a, b) or attempt < _ROUNDS - 2 else None for a, b in zip(carry, new, strict=True)]
    else:
        return [None] * len(eqn.outputs)
    ys = zip(outs[carried:], eqn.avals_out[carried:], strict=True)
    return [*carry, *(None if y is None else np.broadcast_to(y, aval.shape) for y, aval in ys)]


def _same(arrays: Sequence[Any]) -> Any:
    """The elements that all of some arrays have, NaN elsewhere; None if nothing is known."""
    if any(x is None or _is_key(x) for x in arrays):
        return None
    stacked = np.stack(arrays)
    same = (stacked == stacked[0]).all(0)
    if is_inexact(stacked):
        return np.where(same, stacked[0], np.nan).astype(stacked.dtype)
    return stacked[0] if bool(same.all()) else None


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _equal(a: Any, b: Any) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b, equal_nan=True))
