"""What conditions know of the gradients of their groups, and freezing by itself: :func:`freeze_converged`.

The statistics of a group are a few scalars in its state. They are computed from the gradients given to ``update``, and
only for groups whose condition asks for them. What is frozen in an update follows from the state before it.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import described, type_error, value_error, whole_number
from optax_freeze._spec.selectors import distinct
from optax_freeze._spec.tree import PyTree


class GroupStats(NamedTuple):
    """Gradient statistics of a group, for a condition ``(step, stats) -> bool`` of :func:`optax_freeze.freeze_when`.

    They describe the gradients passed to ``update``, before ``coupled``, and do not change while the group is frozen: a
    condition that only compares them freezes the group forever. ``<`` and ``>`` with NaN are False.

    Attributes:
      norm: float32, the global norm of the gradient in the last update in which the group trained; infinity before the
        first.
      total: float32, the sum of these norms, without those that are infinite or NaN.
      updates: int32, the number of norms in ``total``; their mean is ``total / updates``.

    Example:
      >>> import optax, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(4), "head": jnp.ones(4)}
      >>> def settled(step, stats):
      ...     return stats.norm < 0.5 * stats.total / stats.updates
      >>> tx = fz.freeze_when(optax.sgd(0.1), {"encoder": settled})
      >>> state = tx.init(params)
      >>> for size in (1.0, 1.0, 0.25):
      ...     _, state = tx.update(jax.tree.map(lambda p: size * p, params), state, params)
      >>> state.groups["encoder"].frozen
      GroupStats(norm=Array(0.5, dtype=float32), total=Array(4.5, dtype=float32), updates=Array(3, dtype=int32))
      >>> fz.currently_frozen(state)
      {'encoder': True}
    """

    norm: jax.Array
    total: jax.Array
    updates: jax.Array


class Interval(NamedTuple):
    """Of a group of :func:`freeze_converged`: the sum of its norms so far in this interval, how many they are, their
    mean in the interval before (0 if there is none, or not a finite one), and whether the group is frozen for good.
    """

    sum: jax.Array
    seen: jax.Array
    previous: jax.Array
    converged: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class Converged:
    """The condition of one of the groups of a call of :func:`freeze_converged`, which are compared with each other."""

    patterns: tuple[Any, ...]
    interval: int
    percentile: float
    place: int  # of its pattern

    def __call__(self, step: Any, stats: Interval) -> Any:
        return stats.converged

    @property
    def call(self) -> tuple[Any, ...]:
        """Equal for all conditions of a call."""
        return self.patterns, self.interval, self.percentile

    def __repr__(self) -> str:
        percentile = "" if self.percentile == 50 else f", percentile={self.percentile:g}"
        call = f"fz.freeze_converged({list(self.patterns)!r}, interval={self.interval}{percentile})"
        return f"{call}[{self.patterns[self.place]!r}]"


def freeze_converged(patterns: Sequence[Any], interval: int, percentile: float = 50.0) -> dict[Any, Converged]:
    """Returns groups that freeze as their gradients settle, starting at the input, as in AutoFreeze.

    The norms of a group's gradients are averaged over each interval. At its end, each trainable group has a relative
    change, ``|previous - now| / previous``, and the threshold is a percentile of these changes. The first trainable
    group is frozen if its change is below the threshold, then the next one, and so on, up to the first group whose
    change is not. So the frozen groups are always the first ones, and stay frozen. The group with the largest change
    keeps training, so the last group never freezes. If :func:`optax_freeze.migrate` adds a group before a frozen one,
    or removes all groups after it, the frozen group trains again, until it converges anew.

    Nothing freezes before the end of the second interval. A group whose gradient was infinite or NaN, or zero
    throughout, in one of two intervals has no change. It is not frozen, nor are the groups after it.

    Args:
      patterns: patterns or selectors, starting at the **input**. The last one, at the output, always trains.
        (:func:`optax_freeze.gradual_unfreeze` starts at the output.)
      interval: the number of updates between decisions. It should average over many batches, such as an epoch.
      percentile: from 0, which freezes nothing, to 100, which freezes all groups before the one with the largest
        change.

    Returns:
      The groups for :func:`optax_freeze.freeze_when`. Only groups of the same call are compared. For a group of
      elements, use ``(element mask, condition)``.

    Raises:
      TypeError, ValueError: if ``patterns`` is not a list of at least two, or one is named twice; if ``interval`` is
        not an int or less than 1, or ``percentile`` not a number from 0 to 100.

    Example:
      >>> import optax, optax_freeze as fz
      >>> params = {"embed": jnp.ones(4), "encoder": jnp.ones(4), "head": jnp.ones(4)}
      >>> tx = fz.freeze_when(optax.sgd(0.1), fz.freeze_converged(["embed", "encoder", "head"], interval=2))
      >>> state = tx.init(params)
      >>> for sizes in ([1, 1, 1], [1, 1, 1], [0.9, 0.7, 0.5], [0.9, 0.7, 0.5]):
      ...     grads = {name: size * params[name] for name, size in zip(params, sizes, strict=True)}
      ...     _, state = tx.update(grads, state, params)
      >>> fz.currently_frozen(state)  # the changes are 0.1, 0.3 and 0.5, their median is 0.3
      {'embed': True, 'encoder': False, 'head': False}

    The rule is that of `AutoFreeze <https://arxiv.org/abs/2102.01386>`_ (Liu, Agarwal and Venkataraman, 2021), which
    takes the norm of the sum of an interval's gradients, an array of the size of the parameters, instead of the mean
    of their norms.
    """
    name = "fz.freeze_converged"
    listed = tuple(distinct(name, patterns, "from the input to the output layers"))
    if len(listed) < 2:
        raise value_error(
            f"{name} needs at least two groups",
            at=name,
            got=described(patterns),
            expected="at least two patterns, from the input to the output layers",
            fix="add the next layer (the last never freezes); or use {pattern: lambda step, stats: stats.norm < 0.01}",
        )
    interval = whole_number("interval", interval, least=1, fix="give a number of updates, such as 100")
    is_number = isinstance(percentile, (int, float, np.integer, np.floating)) and not isinstance(percentile, bool)
    if not is_number or not 0 <= percentile <= 100:
        raise (value_error if is_number else type_error)(
            "`percentile` must be a number from 0 to 100",
            at="percentile",
            got=described(percentile),
            expected="a number from 0 to 100",
            fix="percentile=50 is the median; larger values freeze groups sooner",
        )
    interval = min(interval, np.iinfo(np.int32).max)
    return {pattern: Converged(listed, interval, float(percentile), place) for place, pattern in enumerate(listed)}


def stats_of(condition: Any) -> type[GroupStats] | type[Interval] | None:
    """Which statistics a condition takes beside the step, if any.

    Raises:
      TypeError: if it takes neither ``(step)`` nor ``(step, stats)``.
    """
    if condition is None or isinstance(condition, Converged):
        return None if condition is None else Interval
    try:
        parameters = inspect.signature(condition).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    required = [p for p in positional if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if not positional or len(required) > 2:
        raise type_error(
            "a condition must take (step) or (step, stats)",
            at=described(condition),
            got=f"a function of ({', '.join(p.name for p in parameters)})",
            expected="a function of (step) or (step, stats)",
            fix="lambda step, stats: stats.norm < 0.01; set other parameters by functools.partial or a default",
        )
    return GroupStats if len(required) == 2 else None


def initial_stats(condition: Any) -> Any:
    """The statistics before the first update, as a group's state holds them; ``()`` if the condition takes none."""
    kind = stats_of(condition)
    if kind is None:
        return ()
    if kind is GroupStats:
        return GroupStats(jnp.full([], jnp.inf, jnp.float32), jnp.zeros([], jnp.float32), jnp.zeros([], jnp.int32))
    return Interval(
        jnp.zeros([], jnp.float32), jnp.zeros([], jnp.int32), jnp.zeros([], jnp.float32), jnp.zeros([], bool)
    )


def calls_of(conditions: Sequence[Any]) -> list[list[int]]:
    """The numbers of the groups of each call of :func:`freeze_converged`, from the input end."""
    calls: dict[Any, list[int]] = {}
    for i, condition in enumerate(conditions):
        if isinstance(condition, Converged):
            calls.setdefault(condition.call, []).append(i)
    return [sorted(groups, key=lambda i: conditions[i].place) for groups in calls.values()]


def in_order(conditions: Sequence[Any], frozen: Sequence[Any]) -> list[Any]:
    """Which groups are frozen: groups of a call of :func:`freeze_converged` only after all before them, its last never.

    The flags in a state may say otherwise if it was migrated to other groups, restored or edited.
    """
    new = list(frozen)
    for groups in calls_of(conditions):
        *first, last = groups
        for i, so_far in zip(first, itertools.accumulate((frozen[i] for i in first), jnp.logical_and), strict=True):
            new[i] = so_far
        new[last] = False
    return new


def next_stats(
    conditions: Sequence[Any],
    stats: Sequence[Any],
    frozen: Sequence[Any],
    step: jax.Array,
    norms: Sequence[Any],
) -> list[Any]:
    """The statistics of all groups after an update.

    Args:
      conditions: of the groups; None for a switch.
      stats: those before the update, and whatever stands in their place for groups that have none.
      frozen: whether each group was frozen in the update.
      step: the number of updates before it.
      norms: the norms of the gradients, of those groups that have statistics and were trainable.
    """
    new = list(stats)
    for i, condition in enumerate(conditions):
        kind = stats_of(condition)
        if kind is None:
            continue
        old, norm = kind(*jax.tree.leaves(stats[i])), norms[i]
        trained = ~jnp.asarray(frozen[i])
        if isinstance(old, Interval):
            old = old._replace(converged=~trained)
            of_interval = old._replace(sum=old.sum + norm, seen=old.seen + 1)
            new[i] = jax.tree.map(lambda a, b, t=trained: jnp.where(t, a, b), of_interval, old)
        else:
            counts = trained & jnp.isfinite(norm)
            total = jnp.where(counts, old.total + norm, old.total)
            new[i] = GroupStats(jnp.where(trained, norm, old.norm), total, old.updates + counts.astype(jnp.int32))
    for groups in calls_of(conditions):
        _, interval, percentile = conditions[groups[0]].call
        decided = _decided([new[i] for i in groups], interval, percentile, (step + 1) % interval == 0)
        for i, its in zip(groups, decided, strict=True):
            new[i] = its
    return new


def global_norm(gradient: PyTree) -> jax.Array:
    """The global norm in float32."""
    squares = [jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32))) for x in jax.tree.leaves(gradient)]
    return jnp.sqrt(sum(squares, jnp.zeros([], jnp.float32)))


def _decided(groups: Sequence[Interval], interval: int, percentile: float, at_end: jax.Array) -> list[Interval]:
    """The groups of a call, from the input end, after the decision at the end of an interval."""
    each: Interval = jax.tree.map(lambda *leaves: jnp.stack(leaves), *groups)
    # A state that was migrated in mid-interval has not seen all of it.
    whole = (each.seen == interval) & jnp.isfinite(each.sum)
    mean = jnp.where(whole, each.sum / interval, 0)
    ends = at_end & ~each.converged  # what is frozen stands still
    known = ends & (mean > 0) & (each.previous > 0)
    change = jnp.abs(each.previous - mean) / jnp.where(known, each.previous, 1)
    known &= jnp.isfinite(change)
    settled = each.converged | (known & (change < _percentile(change, known, percentile)))
    converged = each.converged | (jnp.cumsum(~settled) == 0)
    after = Interval(
        jnp.where(ends, 0, each.sum), jnp.where(ends, 0, each.seen), jnp.where(ends, mean, each.previous), converged
    )
    return [jax.tree.map(lambda x, i=i: x[i], after) for i in range(len(groups))]


def _percentile(values: jax.Array, known: jax.Array, percentile: float) -> jax.Array:
    """``numpy.percentile`` of the known values, of which there may be none."""
    number = np.arange(len(values) + 1)
    position = percentile / 100 * np.maximum(number - 1, 0)  # among the sorted, for each number of known values
    below = np.floor(position).astype(np.int32)
    ordered = jnp.sort(jnp.where(known, values, jnp.finfo(values.dtype).max))
    many = jnp.sum(known)
    low, high = (ordered[jnp.asarray(at)[many]] for at in (below, np.minimum(below + 1, np.maximum(number - 1, 0))))
    return low + (high - low) * jnp.asarray(position - below, values.dtype)[many]
