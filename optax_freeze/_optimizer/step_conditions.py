"""Conditions of the step for :func:`optax_freeze.freeze_when`, and the groups of gradual unfreezing."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from optax_freeze._errors import whole_number
from optax_freeze._spec.prefix_tree import NotASpec
from optax_freeze._spec.selectors import distinct


@dataclasses.dataclass(frozen=True, repr=False)
class NamedSchedule(NotASpec):
    """A function of the step, equal to any other that the same call makes."""

    call: str
    function: Callable[[Any], Any] = dataclasses.field(compare=False)

    def __call__(self, step: Any) -> Any:
        return self.function(step)

    def __repr__(self) -> str:
        return self.call


def unfreeze_at(step: int) -> Callable[[Any], Any]:
    """A condition for :func:`optax_freeze.freeze_when`: frozen before ``step``, trainable afterwards.

    Args:
      step: the number of updates after which the group trains; 0 never freezes it.

    Returns:
      A function ``step -> bool``.

    Raises:
      TypeError, ValueError: if ``step`` is not an int, or negative.

    Example:
      >>> import optax_freeze as fz
      >>> [fz.unfreeze_at(2)(step) for step in range(4)]
      [True, True, False, False]
    """
    step = _updates("step", step)
    return NamedSchedule(f"fz.unfreeze_at({step})", functools.partial(operator.gt, step))


def freeze_at(step: int) -> Callable[[Any], Any]:
    """A condition for :func:`optax_freeze.freeze_when`: trainable before ``step``, frozen afterwards.

    Args:
      step: the number of updates after which the group is frozen.

    Returns:
      A function ``step -> bool``.

    Raises:
      TypeError, ValueError: if ``step`` is not an int, or negative.

    Example:
      >>> import optax_freeze as fz
      >>> [fz.freeze_at(2)(step) for step in range(4)]
      [False, False, True, True]
    """
    step = _updates("step", step)
    return NamedSchedule(f"fz.freeze_at({step})", functools.partial(operator.le, step))


def alternate(period: int, offset: int = 0) -> Callable[[Any], Any]:
    """A condition for :func:`optax_freeze.freeze_when`: frozen and trainable in turn.

    Args:
      period: the number of updates per turn.
      offset: how many updates into the first turn it starts: ``alternate(period)`` and ``alternate(period, period)``
        are never frozen together.

    Returns:
      A function ``step -> bool``: frozen while ``(step + offset) // period`` is even.

    Raises:
      TypeError, ValueError: if an argument is not an int, ``period`` is less than 1 or ``offset`` negative.

    Example:
      >>> import optax_freeze as fz
      >>> [fz.alternate(2)(step) for step in range(6)]
      [True, True, False, False, True, True]
    """
    period, offset = _updates("period", period, 1), _updates("offset", offset)
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
        group trains from step 0. Name each layer: all leaves of an ``fz.each`` thaw
        together. (:func:`optax_freeze.freeze_converged` starts at the input.)
      every: the number of updates between one group and the next.

    Returns:
      The groups for :func:`optax_freeze.freeze_when`: group ``i`` is frozen until step ``i * every``.

    Raises:
      TypeError, ValueError: if ``patterns`` is not a list of patterns, one is named twice, or ``every`` is less than 1.

    Example:
      >>> import optax_freeze as fz
      >>> fz.gradual_unfreeze(["head", "encoder/layer_1", "encoder/layer_0"], every=100)
      {'head': fz.unfreeze_at(0), 'encoder/layer_1': fz.unfreeze_at(100), 'encoder/layer_0': fz.unfreeze_at(200)}
    """
    every = _updates("every", every, 1)
    return {pattern: unfreeze_at(i * every) for i, pattern in enumerate(distinct("fz.gradual_unfreeze", patterns))}


def _updates(name: str, value: Any, least: int = 0) -> int:
    number = whole_number(name, value, least=least, fix="give a number of updates, such as 100")
    return min(number, np.iinfo(np.int32).max)  # the step does not count further
