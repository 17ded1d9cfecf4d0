"""What this package knows of the way in which JAX traces, for all versions: its traces, and its errors for tracers."""

import dis
from typing import Any

import jax
import jax.core


def current_trace() -> Any:
    """What JAX traces now; equal only to itself."""
    import jax.extend.core as extend  # takes longer to load than this package

    either: Any = extend if hasattr(extend, "get_opaque_trace_state") else jax.core  # where it is in JAX 0.8
    return either.get_opaque_trace_state("flax")


_TYPES_OF_NO_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_TEXTS_OF_NO_VALUE = (
    "Tracer.__format__",
    "sequences of concrete values",
    "must be static integers",
    "must have static start/stop/step",
    "parameters to jaxpr equations must have __hash__",
)
"""What JAX raises if Python needs the value of a traced array: types, and texts where JAX has no type.

These are a traced array in a string, as a size, and as the edge of a slice. Python raises the first itself, JAX the
others.
"""


def needs_value(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that a traced array has no value.

    Errors of a user with such a text are told apart by what raised them.
    """
    if error is None or isinstance(error, _TYPES_OF_NO_VALUE):
        return error is not None
    is_of_text = isinstance(error, TypeError | IndexError) and any(text in str(error) for text in _TEXTS_OF_NO_VALUE)
    return (is_of_text and not _is_of_user(error)) or needs_value(error.__cause__ or error.__context__)


def lacks_reverse_mode(error: ValueError) -> bool:
    """Whether an error says that a loop has no fixed length, so that it can only be differentiated in forward mode."""
    return "Reverse-mode differentiation does not work" in str(error) and not _is_of_user(error)


def _is_of_user(error: BaseException) -> bool:
    """Whether a ``raise`` statement outside of JAX raised an error."""
    last: Any = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    frame = last.tb_frame
    is_of_jax = frame.f_globals.get("__name__", "").partition(".")[0] == "jax"
    return not is_of_jax and frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
