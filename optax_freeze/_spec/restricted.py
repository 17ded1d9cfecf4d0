"""A function of all parameters as one of the trainable part: what line searches in an optimizer call.

Optimizers stand below gradients, which read the program of the function, so these say how.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from optax_freeze._spec.tree import PyTree

Way = TypeVar("Way", bound=Callable[..., Any])

_RESTRICT: list[Callable[[Callable[..., Any], PyTree], Callable[..., Any]]] = []


def restricts(way: Way) -> Way:
    """Makes ``way(fun, rest)`` what :func:`restricted` calls; it reads programs, which files here cannot do."""
    _RESTRICT.append(way)
    return way


def restricted(fun: Callable[..., Any], rest: PyTree) -> Callable[..., Any]:
    """``fun(combine(trainable, rest))`` as a function of ``trainable`` whose gradient costs only what trains."""
    return _RESTRICT[-1](fun, rest)
