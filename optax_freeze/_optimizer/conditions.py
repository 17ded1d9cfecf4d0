"""When a group is frozen: functions of the step, for :func:`optax_freeze.freeze_when`, and what conditions say."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import described, is_array, type_error, value_error, whole_number
from optax_freeze._optimizer.convergence import initial_stats, stats_of
from optax_freeze._spec.selectors import distinct

Condition: TypeAlias = Callable[..., Any]
"""``step -> bool`` or ``(step, stats) -> bool``: whether a group is frozen in the update after ``step`` updates."""


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


def unfreeze_at(step: int) -> Condition:
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


def freeze_at(step: int) -> Condition:
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


def alternate(period: int, offset: int = 0) -> Condition:
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


def gradual_unfreeze(patterns: Sequence[Any], every: int) -> dict[Any, Condition]:
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


def check(name: str, condition: Condition) -> None:
    """Refuses, before the first step, a condition that returns no bool."""
    stats = jax.eval_shape(lambda: initial_stats(condition))
    step = jax.ShapeDtypeStruct((), jnp.int32)
    jax.eval_shape(lambda step, stats: jnp.asarray(ask(name, condition, step, stats)), step, stats)


def ask(name: str, condition: Condition, step: jax.Array, stats: Any) -> Any:
    """Whether a group is frozen at a step, with its statistics: a bool, or a scalar array of one."""
    kind = stats_of(condition)
    try:
        answer = condition(step) if kind is None else condition(step, kind(*jax.tree.leaves(stats)))
    except jax.errors.JAXTypeError as error:
        raise type_error(
            "a condition needs the value of a traced array",
            at=name,
            got=described(condition),
            expected="a function step -> bool or (step, stats) -> bool that jax.jit can trace",
            fix="compare without `if`, `and` and `or`: lambda step: (step < 5) | (step >= 10)",
        ) from error
    refuse_no_bool(name, answer, described(condition))
    return answer


_COMPARE = "compare: lambda step: step < 100; for elements of a leaf, (element mask, condition)"


def refuse_no_bool(name: str, value: Any, where: str, also: str = "", fix: str = _COMPARE) -> None:
    """A ``TypeError`` for a value that is not a bool, a ``ValueError`` for an array of bools."""
    array: Any = value if is_array(value) else None
    is_bool = isinstance(value, bool) or (array is not None and array.dtype == np.bool_)
    if is_bool and np.shape(value) == ():
        return
    raise (value_error if is_bool else type_error)(
        f"{where}: expected a bool for the group",
        at=name,
        got=described(value),
        expected=f"{also}True (frozen) or False, one for the whole group",
        fix=fix,
    )


def _whole(name: str, value: Any, least: int = 0) -> int:
    number = whole_number(name, value, least=least, fix="give a number of updates, such as 100")
    return min(number, np.iinfo(np.int32).max)  # the step does not count further
