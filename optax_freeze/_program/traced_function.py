"""Traces a function of some arrays, whose result may be any pytree.

All other inputs of the function are constants of the program and not arguments, because Python may branch on the values
of constants, and not on those of arguments, which are tracers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_freeze._program.recompute import program_of
from optax_freeze._program.trace import Program
from optax_freeze._spec.memory_kinds import is_on_host, to_device
from optax_freeze._spec.sharding import eval_types, explicit_sharding

_TRACED = object()


class Traced:
    """The program of ``fun(*arrays)``, and how its outputs are put together."""

    def __init__(self, fun: Callable[..., Any], arrays: Sequence[Any], enter_remat: bool = True) -> None:
        self._treedef, self._flat = None, []

        def traced(*arrays: Any) -> list[Any]:
            outs, self._treedef = jax.tree.flatten(fun(*arrays))
            self._flat = [_TRACED if isinstance(out, Tracer) else out for out in outs]
            return [out for out in outs if isinstance(out, Tracer)]

        self.closed = closed = jax.make_jaxpr(traced)(*map(as_argument, arrays))
        self.program: Program = program_of(closed, enter_remat)

    def result(self, outputs: Sequence[Any]) -> Any:
        """The result of the function, given the outputs of the program."""
        found = iter(outputs)
        return jax.tree.unflatten(self._treedef, [next(found) if x is _TRACED else x for x in self._flat])


def filled(values: Sequence[Any], marks: Sequence[bool], some: Sequence[Any]) -> list[Any]:
    """The values, with ``some`` in place of the marked ones."""
    left = iter(some)
    return [next(left) if here else x for x, here in zip(values, marks, strict=True)]


def as_argument(value: Any) -> Any:
    """An array on the device unchanged, and the shape of one on the host: the trace must not depend on the memory.

    Shapes get a dtype that JAX has: without 64-bit types it warns of float64, which a NumPy array may have.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        value = value.update(dtype=jax.dtypes.canonicalize_dtype(value.dtype, allow_extended_dtype=True))
    if not is_on_host(value):
        return value
    if isinstance(value, Tracer):
        return eval_types(to_device, value)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=explicit_sharding(value))


def as_array(value: Any) -> Any:
    """A value as an operand of an equation; Python numbers stay weakly typed."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def as_traced(outs: Any) -> Any:
    """The outputs of a traced function, of which constants are outputs, too: a custom derivative may return them."""
    return jax.tree.map(lambda x: x if isinstance(x, Tracer) else jnp.array(x), outs)
