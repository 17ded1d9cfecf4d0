"""Traces a function of some arrays, whose result may be any pytree.

All other inputs of the function are constants of the program and not arguments, because Python may branch on the values
of constants, and not on those of arguments, which are tracers.
"""

import dis
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_freeze._errors import ASKED_FOR_A_VALUE
from optax_freeze._program.residuals import program_of
from optax_freeze._program.trace import Program
from optax_freeze._spec.memory_kinds import is_on_host, to_device
from optax_freeze._spec.sharding import explicit_sharding

_TRACED = object()
_OF_NO_VALUE = (
    "Tracer.__format__",
    "sequences of concrete values",
    "must be static integers",
    "must have static start/stop/step",
)
"""Texts of other errors about a traced array that has no value: in a string, as a size, or as the edge of a slice.

Python raises the first itself, JAX the others, so errors of a user with such a text are told apart by what raised them.
"""


class Traced:
    """The program of ``fun(*arrays)``, and how its outputs are put together."""

    def __init__(self, fun: Callable[..., Any], arrays: Sequence[Any], enter_remat: bool = True) -> None:
        self._treedef, self._flat = None, []

        def traced(*arrays: Any) -> list[Any]:
            outs, self._treedef = jax.tree.flatten(fun(*arrays))
            self._flat = [_TRACED if isinstance(out, Tracer) else out for out in outs]
            return [out for out in outs if isinstance(out, Tracer)]

        self.closed = closed = jax.make_jaxpr(traced)(*map(as_argument, arrays))
        on_host = [number for number, array in enumerate(arrays) if is_on_host(array)]
        self.program: Program = program_of(closed, enter_remat)._replace(on_host=on_host)

    def result(self, outputs: Sequence[Any]) -> Any:
        """The result of the function, given the outputs of the program."""
        found = iter(outputs)
        return jax.tree.unflatten(self._treedef, [next(found) if x is _TRACED else x for x in self._flat])


def as_argument(value: Any) -> Any:
    """An array on the device unchanged, and the shape of one on the host: the trace must not depend on the memory.

    Shapes get a dtype that JAX has: without 64-bit types it warns of float64, which a NumPy array may have.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        value = value.update(dtype=jax.dtypes.canonicalize_dtype(value.dtype, allow_extended_dtype=True))
    if not is_on_host(value):
        return value
    if isinstance(value, Tracer):
        return jax.eval_shape(to_device, value)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=explicit_sharding(value))


def as_array(value: Any) -> Any:
    """A value as an operand of an equation; Python numbers stay weakly typed."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def as_traced(outs: Any) -> Any:
    """The outputs of a traced function, of which constants are outputs, too: a custom derivative may return them."""
    return jax.tree.map(lambda x: x if isinstance(x, Tracer) else jnp.array(x), outs)


def needs_value(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that a traced array has no value."""
    if error is None or isinstance(error, ASKED_FOR_A_VALUE):
        return error is not None
    is_of_text = isinstance(error, TypeError | IndexError) and any(text in str(error) for text in _OF_NO_VALUE)
    return (is_of_text and not _is_of_user(error)) or needs_value(error.__cause__ or error.__context__)


def _is_of_user(error: BaseException) -> bool:
    """Whether a ``raise`` statement outside of JAX raised an error."""
    last: Any = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    frame = last.tb_frame
    is_of_jax = frame.f_globals.get("__name__", "").partition(".")[0] == "jax"
    return not is_of_jax and frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
