"""Tells the recurring arguments of a function (same values in every epoch) from the others."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from optax_freeze._errors import described, is_array, is_int, type_error, value_error
from optax_freeze._spec.tree import name_of


class Argument(NamedTuple):
    """A leaf of the arguments: its value, its name in messages, and whether it recurs with the features."""

    value: Any
    name: str
    recurs: bool

    @property
    def is_input(self) -> bool:
        """Whether the leaf is traced as an input; otherwise it is a constant, like a static argument of ``jit``.

        Recurring Python numbers are constants, so Python may branch on them; other Python numbers are traced.
        """
        number = isinstance(self.value, (int, float, complex)) and not isinstance(self.value, bool)
        return is_array(self.value) or (number and not self.recurs)


class Arguments:
    """The arguments of a function after the parameters, and which of them recur."""

    def __init__(self, fun: Callable[..., Any], recurring: int | str | Sequence[int | str]) -> None:
        several: Any = recurring if isinstance(recurring, (list, tuple)) else [recurring]
        if not several or not all(is_int(which) or isinstance(which, str) for which in several):
            raise type_error(
                "`recurring` does not name an argument",
                at="recurring",
                got=described(recurring),
                expected="the position or the name of an argument, or several of these",
                fix="recurring=1 for the batch of loss(params, batch)",
            )
        try:
            self.names = [*inspect.signature(fun).parameters]
        except (TypeError, ValueError):
            self.names = []
        self.recurring = {self._name(which) for which in several}
        if self._name(0) in self.recurring or any(is_int(w) and w < 0 for w in several):
            raise value_error(
                "`recurring` must name arguments after the parameters",
                at="recurring",
                got=described(recurring),
                expected="positions from 1 on, or names of arguments after the parameters",
                fix="recurring=1 for the batch of loss(params, batch)",
            )

    def _name(self, which: Any) -> Any:
        """The name of an argument, or its position if the name is not known."""
        return self.names[which] if is_int(which) and 0 <= which < len(self.names) else which

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Argument], Any]:
        """Returns the leaves of the arguments of a call, and the treedef of ``(args, kwargs)``."""
        given = [*map(self._name, range(1, len(args) + 1)), *kwargs]
        if missing := self.recurring.difference(given):
            raise value_error(
                "`recurring` names an argument that is not in the call",
                at=f"recurring={missing.pop()!r}",
                got=f"a call with the arguments {given}",
                expected="the position or the name of an argument of this call",
                fix="recurring counts the parameters as 0; `after` takes the features before the other arguments",
            )
        with_paths, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
        arguments = []
        for (place, key, *rest), value in with_paths:
            number = key.idx + 1 if place.idx == 0 else None
            name = key.key if number is None else self._name(number)
            first = name if isinstance(name, str) else f"argument {name}"
            path = "/".join([first, *(str(name_of(entry)) for entry in rest)])
            arguments.append(Argument(value, path, name in self.recurring))
        return arguments, treedef
