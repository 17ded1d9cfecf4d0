"""Functions of the step for :func:`optax_freeze.freeze_when`, and the groups of gradual unfreezing."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from optax_freeze._errors import whole_number
from optax_freeze._spec.selectors import distinct


@dataclasses.dataclass(frozen=True, repr=False)
class _UnfreezeAt:
    at: int

    def __call__(self, step: Any) -> Any:
        return step < self.at

    def __repr__(self) -> str:
        return f"fz.unfreeze_at({self.at})"


@dataclasses.dataclass(frozen=True, repr=False)
class _FreezeAt:
    at: int

    def __call__(self, step: Any) -> Any:
        return step >= self.at

    def __repr__(self) -> str:
        return f"fz.freeze_at({self.at})"


@dataclasses.dataclass(frozen=True, repr=False)
class _Alternate:
    period: int
    offset: int

    def __call__(self, step: Any) -> Any:
        turns, rest = divmod(self.offset, self.period)
        # Not `step + offset`, which may overflow.
        return (step + (rest - self.period)) // self.period % 2 == (turns + 1) % 2

    def __repr__(self) -> str:
        return f"fz.alternate({self.period}{f', offset={self.offset}' if self.offset else ''})"


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
    return _UnfreezeAt(_whole("step", step))


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
    return _FreezeAt(_whole("step", step))


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
    return _Alternate(_whole("period", period, 1), _whole("offset", offset))


def gradual_unfreeze(patterns: Sequence[Any], every: int) -> dict[Any, Callable[[Any], Any]]:
    """Returns the groups of gradual unfreezing, as in ULMFiT.

    Args:
      patterns: patterns or selectors, starting at the output. The first group trains from step 0.
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
    every = _whole("every", every, 1)
    return {pattern: unfreeze_at(i * every) for i, pattern in enumerate(distinct("fz.gradual_unfreeze", patterns))}


def _whole(name: str, value: Any, least: int = 0) -> int:
    number = whole_number(name, value, least=least, fix="give a number of updates, such as 100")
    return min(number, np.iinfo(np.int32).max)  # the step does not count further
