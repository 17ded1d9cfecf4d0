"""The inputs of a function, and which have the same values in each epoch: frozen parameters, recurring arguments."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import described, is_array, is_int, type_error, value_error
from optax_freeze._program.regions import EVERYTHING, Region, Rows, Values
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, RowIndex
from optax_freeze._spec.tree import Part, name_of


class Input(NamedTuple):
    """A leaf of the parameters or of the other arguments."""

    value: Any  # an array, a shape, the trainable rows as a part, or a constant
    name: str
    why: str = ""  # the value is not known beforehand; empty if it is known
    leaf: int | None = None  # the number of the parameter, if it is one
    trainable: Region | None = None  # the part of a parameter that trains
    is_constant: bool = False  # like a static argument of `jit`

    def is_known(self, region: Region) -> bool:
        """Whether a region of the value is known beforehand."""
        if not self.why or not isinstance(self.trainable, Rows):
            return not self.why
        is_rows = isinstance(region, Rows) and region.axis == self.trainable.axis
        return is_rows and not np.intersect1d(region.numbers, self.trainable.numbers).size  # type: ignore[attr-defined]

    def is_frozen(self, region: Region) -> bool:
        """Whether a region has elements of a frozen parameter, or of frozen rows."""
        if isinstance(self.trainable, Rows):
            return not isinstance(region, Rows) or region.within(self.trainable) is None
        return self.leaf is not None and self.trainable is None

    @property
    def frozen_rows(self) -> Any:
        """The frozen rows of a leaf of which rows train."""
        assert isinstance(self.trainable, Rows)
        axis, size = self.trainable.axis, self.value.shape[self.trainable.axis]
        frozen = Rows(axis, np.setdiff1d(np.arange(size), self.trainable.numbers))
        return Values({0: self.value}).read(0, frozen)

    @property
    def is_batch(self) -> bool:
        """Whether the value is that of a recurring argument."""
        return self.leaf is None and not self.why

    @property
    def struct(self) -> Any:
        """The value to trace the function with."""
        return jax.ShapeDtypeStruct(self.value.shape, self.value.dtype) if isinstance(self.value, Part) else self.value


def parameters(plan: Plan, values: Sequence[Any]) -> list[Input]:
    found = []
    for i, (leaf, selection, value) in enumerate(zip(plan.leaves, plan.selections, values, strict=True)):
        why, trainable = f"{leaf.path or 'the parameters'}, which trains", EVERYTHING
        if selection is FROZEN:
            is_key = leaf.dtype is not None and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            why, trainable = f"{leaf.path}, a random key among the parameters" if is_key else "", None
        elif isinstance(selection, RowIndex):
            trainable = Rows(selection.axis, selection.numbers)
        found.append(Input(value, leaf.path, why, i, trainable, is_constant=leaf.dtype is None))
    return found


class Arguments:
    """The arguments of a function beside its parameters, which are at ``argnums``, and which of them recur.

    In ``names`` and ``recurring``, and in the calls, the parameters are the first argument.
    """

    def __init__(self, fun: Callable[..., Any], argnums: int, recurring: int | str | Sequence[int | str]) -> None:
        self._argnums = argnums
        several: Any = recurring if isinstance(recurring, (list, tuple)) else [recurring]
        batch, call = (0, "loss(batch, params)") if argnums else (1, "loss(params, batch)")
        fix = f"recurring={batch} for the batch of {call}"
        if not several or not all(is_int(which) or isinstance(which, str) for which in several):
            raise type_error(
                "`recurring` does not name an argument",
                at="recurring",
                got=described(recurring),
                expected="the position or the name of an argument, or several of these",
                fix=fix,
            )
        try:
            named = [*inspect.signature(fun).parameters.values()]
        except (TypeError, ValueError):
            named = []
        variadic = next((i for i, each in enumerate(named) if each.kind is each.VAR_POSITIONAL), len(named))
        self.names = [each.name for each in named[:variadic]]
        self.keyword_only = {each.name for each in named if each.kind is each.KEYWORD_ONLY}
        of_params = self.names.pop(argnums) if argnums < variadic else None
        self.names.insert(0, of_params or "the parameters")
        places = [which + (which < argnums) if is_int(which) else which for which in several if which != argnums]
        self.recurring = {self._name(which) for which in places}
        if len(places) < len(several) or of_params in places or any(is_int(w) and w < 0 for w in several):
            after = f"positions from 0 on, except {argnums}" if argnums else "positions from 1 on"
            raise value_error(
                "`recurring` must name other arguments than the parameters",
                at="recurring",
                got=described(recurring),
                expected=f"{after}, or names of other arguments than the parameters",
                fix=fix,
            )

    def _name(self, which: Any) -> Any:
        """The name of an argument, or its position if the name is not known."""
        return self.names[which] if is_int(which) and 0 <= which < len(self.names) else which

    def _given(self, argument: Any) -> Any:
        """A name, or a position as the user counts: among the arguments of the function."""
        return argument - (argument <= self._argnums) if is_int(argument) else argument

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Input], Any]:
        """The leaves of the arguments of a call, and the treedef of ``(args, kwargs)``.

        Python numbers that recur are constants, so Python may branch on them; others are inputs.
        """
        given = [*map(self._name, range(1, len(args) + 1)), *kwargs]
        if missing := self.recurring.difference(given):
            raise value_error(
                "`recurring` names an argument that is not in the call",
                at=f"recurring={self._given(missing.pop())!r}",
                got=f"a call with the arguments {[*map(self._given, given)]}",
                expected="the position or the name of an argument of this call",
                fix="recurring counts the parameters, too; `after` takes the features before the other arguments",
            )
        with_paths, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
        found = []
        for (place, key, *rest), value in with_paths:
            argument = self._name(key.idx + 1) if place.idx == 0 else key.key
            first = argument if isinstance(argument, str) else f"argument {self._given(argument)}"
            name = "/".join([first, *(str(name_of(entry)) for entry in rest)])
            why = "" if argument in self.recurring else f"{name}, which does not recur"
            is_number = isinstance(value, (int, float, complex)) and not isinstance(value, bool)
            is_constant = not (is_array(value) or (is_number and why))
            found.append(Input(value, name, why, is_constant=is_constant))
        return found, treedef
