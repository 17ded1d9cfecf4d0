"""Sizes without a number: the symbolic dimensions of ``jax.export``, of which some comparisons have no answer."""

import functools
from collections.abc import Callable
from typing import Any

from optax_freeze._jax_internals import InconclusiveDimensionOperation


def if_undecided(answer: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator of a function that returns ``answer`` if it compares sizes of which nothing is known."""

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def decided(*args: Any) -> Any:
            try:
                return function(*args)
            except InconclusiveDimensionOperation:
                return answer

        return decided

    return decorator
