"""Evaluates some operations of a program."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._jax_internals import Mapped
from optax_freeze._program.trace import Equation

Within: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What turns a function that evaluates a program into one that does so where the names of its mesh axes are known."""


def compiled(fun: Callable[..., Any], within: Within | None) -> Callable[..., Any]:
    """A compiled function, for a program that a ``shard_map`` may apply."""
    return jax.jit(fun if within is None else within(fun))


def on_each_device(mapped: Mapped) -> Within:
    """Evaluates what a ``shard_map`` applies to a shard with the same values on each device."""
    names, spec = mapped.axis_names, jax.sharding.PartitionSpec()
    options: dict[str, Any] = {"mesh": mapped.mesh, "axis_names": names, "check_vma": False}
    return lambda fun: jax.shard_map(fun, in_specs=spec, out_specs=spec, **options)


def first_shard(array: Any, shape: tuple[int, ...]) -> Any:
    """The part of an array that the first device has."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.extended)
    return (array if is_key else np.asarray(array))[tuple(map(slice, shape))]


def live(eqns: Iterable[Equation], outputs: Iterable[Any], given: Collection[int] = ()) -> list[Equation]:
    """The operations that some values need."""
    wanted, found = {n for n in outputs if isinstance(n, int)} - {*given}, []
    for eqn in reversed([*eqns]):
        if not wanted.isdisjoint(eqn.outputs):
            found.append(eqn)
            wanted |= eqn.reads - {*given}
    return found[::-1]


class Needed:
    """The operations that some values need, while one value after the other is no longer computed."""

    def __init__(self, eqns: Iterable[Equation], outputs: Iterable[Any]) -> None:
        eqns, outputs = [*eqns], [*outputs]
        self._made_by = {n: eqn for eqn in eqns for n in eqn.outputs}
        self._uses = Counter(n for eqn in live(eqns, outputs) for n in eqn.reads)
        self._uses.update({n for n in outputs if isinstance(n, int)})

    def without(self, number: int) -> list[Equation]:
        """The operations that are no longer needed without a value."""
        left, found = [number], []
        self._uses[number] = 0
        while left:
            eqn = self._made_by.get(left.pop())
            if eqn is not None and all(self._uses[n] <= 0 for n in eqn.outputs):
                found.append(eqn)
                for n in eqn.reads:
                    self._uses[n] -= 1
                    left += [n] * (self._uses[n] == 0)
        return found


def array_of(literal: Any) -> Any:
    """The value of a literal with its type; JAX does not differentiate a loop that begins with a Python bool."""
    return np.asarray(literal.val, literal.aval.dtype)


def evaluate(eqns: Iterable[Equation], env: dict[int, Any], keep: Collection[int] = ()) -> None:
    """Computes the results of operations, in order, except for those to keep."""
    for eqn in eqns:
        with eqn.source.scope():
            outs = eqn.bind_all(*(env[x] if isinstance(x, int) else array_of(x) for x in eqn.inputs))
        env.update((n, out) for n, out in zip(eqn.outputs, outs, strict=True) if n not in keep)
