"""Functions that take their parameters at another position than the first."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from optax_freeze._errors import counted, described, is_int, value_error
from optax_freeze._spec.tree import PyTree

T = TypeVar("T")


def refuse_several(argnums: Any) -> None:
    """Raises ``ValueError`` unless ``argnums`` is one int."""
    if not is_int(argnums):
        raise value_error(
            "`argnums` must be a single int",
            at="argnums",
            got=described(argnums),
            expected="one int: the position of the parameters",
            fix="put the trees into one tree, such as a dict, and freeze parts of it by path",
        )


def of_parameters(
    fun: Callable[..., T], argnums: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[PyTree], T], PyTree]:
    """A call of ``fun`` as a function of its parameters alone, and the parameters."""
    i = _position(argnums, len(args))
    return lambda params: fun(*args[:i], params, *args[i + 1 :], **kwargs), args[i]


def parameters_first(fun: Callable[..., T], argnums: int) -> Callable[..., T]:
    """``fun``, which takes its parameters at ``argnums``, as a function of them and then of its other arguments."""

    @functools.wraps(fun)
    def of_parameters(params: PyTree, /, *args: Any, **kwargs: Any) -> T:
        i = _position(argnums, len(args) + 1)
        return fun(*args[:i], params, *args[i:], **kwargs)

    return of_parameters


def _position(argnums: int, count: int) -> int:
    """The position of the parameters in a call with ``count`` positional arguments."""
    if not -count <= argnums < count:
        raise value_error(
            "`argnums` is out of range",
            at=f"argnums={argnums}",
            got=f"a call with {counted(count, 'positional argument', 'positional arguments')}",
            expected="the parameters at that position",
            fix="pass the parameters, and the arguments before them, by position, not by keyword",
        )
    return argnums % count
