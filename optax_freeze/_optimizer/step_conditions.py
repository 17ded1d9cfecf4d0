"""Conditions of the step for :func:`optax_freeze.freeze_when`, and the groups of gradual unfreezing."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from optax_freeze._errors import described, type_error, whole_number
from optax_freeze._optimizer.each import Each
from optax_freeze._spec.prefix_tree import NotASpec
from optax_freeze._spec.selectors import distinct


@dataclasses.dataclass(frozen=True, repr=False)
class NamedSchedule(NotASpec):
    """A function of the step, equal to any other that the same call makes. Combine them with ``|`` and ``&``."""

    call: str
    function: Callable[[Any], Any] = dataclasses.field(compare=False)

    def __call__(self, step: Any) -> Any:
        return self.function(step)

    def __or__(self, other: "NamedSchedule") -> "NamedSchedule":
        return self._joined("|", operator.or_, other)

    def __and__(self, other: "NamedSchedule") -> "NamedSchedule":
        return self._joined("&", operator.and_, other)

    def _joined(self, symbol: str, join: Callable[[Any, Any], Any], other: "NamedSchedule") -> "NamedSchedule":
        if not isinstance(other, NamedSchedule):
            got, fix = described(other), f"lambda step: {self.call}(step) {symbol} (step % 2 == 0)"
            expected = "fz.unfreeze_at, fz.freeze_at, fz.alternate, or what combines them"
            raise type_error("not a condition of the step", at=symbol, got=got, expected=expected, fix=fix)
        return NamedSchedule(f"({self.call} {symbol} {other.call})", functools.partial(_join, join, self, other))

    def __repr__(self) -> str:
        return self.call


def _join(join: Callable[[Any, Any], Any], a: NamedSchedule, b: NamedSchedule, step: Any) -> Any:
    return join(a(step), b(step))


def unfreeze_at(step: int) -> NamedSchedule:
    """A condition for :func:`optax_freeze.freeze_when`: frozen before ``step``, trainable afterwards.

    Args:
      step: the number of updates after which the group trains; 0 never freezes it.

    Returns:
      A function ``step -> bool``, which combines with others by ``|`` and ``&``.

    Raises:
      TypeError, ValueError: if ``step`` is not an int, or negative.

    Example:
      >>> import optax_freeze as fz
      >>> [fz.unfreeze_at(2)(step) for step in range(4)]
      [True, True, False, False]
    """
    step = number_of_updates("step", step)
    return NamedSchedule(f"fz.unfreeze_at({step})", functools.partial(operator.gt, step))


def freeze_at(step: int) -> NamedSchedule:
    """A condition for :func:`optax_freeze.freeze_when`: trainable before ``step``, frozen afterwards.

    Args:
      step: the number of updates after which the group is frozen.

    Returns:
      A function ``step -> bool``, which combines with others by ``|`` and ``&``.

    Raises:
      TypeError, ValueError: if ``step`` is not an int, or negative.

    Example:
      >>> import optax_freeze as fz
      >>> [fz.freeze_at(2)(step) for step in range(4)]
      [False, False, True, True]
    """
    step = number_of_updates("step", step)
    return NamedSchedule(f"fz.freeze_at({step})", functools.partial(operator.le, step))


def alternate(period: int, offset: int = 0) -> NamedSchedule:
    """A condition for :func:`optax_freeze.freeze_when`: frozen and trainable in turn.

    Args:
      period: the number of updates per turn.
      offset: how many updates into the first turn it starts: ``alternate(period)`` and ``alternate(period, period)``
        are never frozen together.

    Returns:
      A function ``step -> bool``: frozen while ``(step + offset) // period`` is even. It combines with others by ``|``
      and ``&``: ``fz.unfreeze_at(500) | fz.alternate(1)`` is frozen until step 500, then in turn.

    Raises:
      TypeError, ValueError: if an argument is not an int, ``period`` is less than 1 or ``offset`` negative.

    Example:
      >>> import optax_freeze as fz
      >>> [fz.alternate(2)(step) for step in range(6)]
      [True, True, False, False, True, True]
    """
    period, offset = number_of_updates("period", period, 1), number_of_updates("offset", offset)
    call = f"fz.alternate({period}{f', offset={offset}' if offset else ''})"
    return NamedSchedule(call, functools.partial(_alternate, period, offset))


def _alternate(period: int, offset: int, step: Any) -> Any:
    turns, ahead = divmod(offset, period)
    # Not `step + offset`, which may overflow.
    return (step + (ahead - period)) // period % 2 == (turns + 1) % 2


def gradual_unfreeze(patterns: Sequence[Any], every: int) -> dict[Any, Callable[[Any], Any]]:
    """Returns the groups of gradual unfreezing, as in ULMFiT.

    Args:
      patterns: patterns or selectors in the order in which the groups thaw: starting at the **output**. The first
        group trains from step 0. (:func:`optax_freeze.freeze_converged` starts at the input.)
      every: the number of updates between one group and the next.

    Returns:
      The groups for :func:`optax_freeze.freeze_when`: group ``i`` is frozen until step ``i * every``.

    Raises:
      TypeError, ValueError: if ``patterns`` is not a list of patterns, one is named twice, ``every`` is less than 1,
        or one is made by :func:`optax_freeze.each`.

    Example:
      >>> import optax_freeze as fz
      >>> fz.gradual_unfreeze(["head", "encoder/layer_1", "encoder/layer_0"], every=100)
      {'head': fz.unfreeze_at(0), 'encoder/layer_1': fz.unfreeze_at(100), 'encoder/layer_0': fz.unfreeze_at(200)}
    """
    every, name = number_of_updates("every", every, 1), "fz.gradual_unfreeze"
    listed = distinct(name, patterns)
    for pattern in listed:
        if isinstance(pattern, Each):
            got, expected = repr(pattern), "one pattern or selector for all leaves that thaw at the same step"
            fix = f"name the layers one by one, from the output; for all of them at once {pattern.selector!r}"
            raise type_error(f"{name} cannot order the leaves of fz.each", at=name, got=got, expected=expected, fix=fix)
    return {pattern: unfreeze_at(i * every) for i, pattern in enumerate(listed)}


def number_of_updates(name: str, value: Any, least: int = 0) -> int:
    number = whole_number(name, value, least=least, fix="give a number of updates, such as 100")
    return min(number, np.iinfo(np.int32).max)  # the step does not count further
