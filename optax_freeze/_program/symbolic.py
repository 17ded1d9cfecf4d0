"""Sizes without a number: the symbolic dimensions of ``jax.export``, of which some comparisons have no answer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax.errors import TracerArrayConversionError, TracerBoolConversionError

_INCONCLUSIVE: Any = getattr(jax.errors, "InconclusiveDimensionOperation", None)  # in JAX 0.8 it is in `jax.core`
_UNDECIDED = (
    _INCONCLUSIVE or jax.core.InconclusiveDimensionOperation,  # type: ignore[attr-defined]
    TracerArrayConversionError,  # such a size and an array of NumPy, or a float, make a traced array
    TracerBoolConversionError,
)


def if_undecided(answer: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator of a function that returns ``answer`` if it compares sizes of which nothing is known."""

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def decided(*args: Any) -> Any:
            try:
                return function(*args)
            except _UNDECIDED:
                return answer

        return decided

    return decorator
