"""Freezes each group when its gradients have converged: :func:`freeze_converged`."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import described, type_error, value_error
from optax_freeze._optimizer.conditions import Condition
from optax_freeze._optimizer.step_conditions import number_of_updates
from optax_freeze._spec.selectors import distinct


class Interval(NamedTuple):
    """The norms of a group in this interval and in the one before, and whether it is frozen for good."""

    sum: jax.Array
    seen: jax.Array  # the number of norms in the sum
    previous: jax.Array  # the mean in the interval before; 0 if there is none, or not a finite one
    converged: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class Converged(Condition):
    """The condition of one of the groups of a call of :func:`freeze_converged`, which are compared with each other.

    A group is frozen only after all groups before it, and the last one never, whatever the flags in a state that was
    migrated to other groups, restored or edited.
    """

    patterns: tuple[Any, ...]
    every: int
    percentile: float
    place: int  # of its pattern
    takes_norm = True

    @property
    def call(self) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.patterns, self.every, self.percentile

    def initial(self) -> Interval:
        return Interval(*(jnp.zeros([], dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, bool)))

    def frozen(self, step: jax.Array, states: Sequence[Any]) -> list[Any]:
        *before_last, _ = [Interval(*jax.tree.leaves(state)).converged for state in states]
        return [*itertools.accumulate(before_last, jnp.logical_and), False]

    def next(
        self, step: jax.Array, states: Sequence[Any], frozen: Sequence[Any], norms: Sequence[Any]
    ) -> list[Interval]:
        old = Interval(*map(jnp.stack, zip(*map(jax.tree.leaves, states), strict=True)))
        converged, norm = jnp.stack([jnp.asarray(each) for each in frozen]), jnp.stack(norms)
        total = jnp.where(converged, old.sum, old.sum + norm)
        seen = jnp.where(converged, old.seen, old.seen + 1)
        at_end = (step + 1) % self.every == 0
        # A state that was migrated in mid-interval has not seen all of it.
        is_full = (seen == self.every) & jnp.isfinite(total)
        mean = jnp.where(is_full, total / self.every, 0)
        ends = at_end & ~converged  # what is frozen stands still
        comparable = ends & (mean > 0) & (old.previous > 0)
        change = jnp.abs(old.previous - mean) / jnp.where(comparable, old.previous, 1)
        comparable &= jnp.isfinite(change)
        settled = converged | (comparable & (change < _percentile(change, comparable, self.percentile)))
        converged |= jnp.cumsum(~settled) == 0
        total, seen = jnp.where(ends, 0, total), jnp.where(ends, 0, seen)
        after = total, seen, jnp.where(ends, mean, old.previous), converged
        return [Interval(*(x[i] for x in after)) for i in range(len(states))]

    def __repr__(self) -> str:
        percentile = "" if self.percentile == 50 else f", percentile={self.percentile:g}"
        call = f"fz.freeze_converged({list(self.patterns)!r}, every={self.every}{percentile})"
        return f"{call}[{self.patterns[self.place]!r}]"

    def __str__(self) -> str:
        return f"the condition {self!r}"


def freeze_converged(patterns: Sequence[Any], every: int, percentile: float = 50.0) -> dict[Any, Converged]:
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
      patterns: patterns or selectors in the order in which the groups freeze: starting at the **input**. The last
        one, at the output, always trains. (:func:`optax_freeze.gradual_unfreeze` starts at the output.)
      every: the number of updates in an interval. It should average over many batches, such as an epoch.
      percentile: from 0, which freezes nothing, to 100, which freezes all groups before the one with the largest
        change.

    Returns:
      The groups for :func:`optax_freeze.freeze_when`. Only groups of the same call are compared. For a group of
      elements, use ``(element mask, condition)``.

    Raises:
      TypeError, ValueError: if ``patterns`` is not a list of at least two, or one is named twice; if ``every`` is
        not an int or less than 1, or ``percentile`` not a number from 0 to 100.

    Example:
      >>> import optax, optax_freeze as fz
      >>> params = {"embed": jnp.ones(4), "encoder": jnp.ones(4), "head": jnp.ones(4)}
      >>> tx = fz.freeze_when(optax.sgd(0.1), fz.freeze_converged(["embed", "encoder", "head"], every=2))
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
    every = number_of_updates("every", every, 1)
    is_number = isinstance(percentile, (int, float, np.integer, np.floating)) and not isinstance(percentile, bool)
    if not is_number or not 0 <= percentile <= 100:
        raise (value_error if is_number else type_error)(
            "`percentile` must be a number from 0 to 100",
            at="percentile",
            got=described(percentile),
            expected="a number from 0 to 100",
            fix="percentile=50 is the median; larger values freeze groups sooner",
        )
    return {pattern: Converged(listed, every, float(percentile), place) for place, pattern in enumerate(listed)}


def _percentile(values: jax.Array, comparable: jax.Array, percentile: float) -> jax.Array:
    """``numpy.percentile`` of the comparable values, of which there may be none."""
    number = np.arange(len(values) + 1)
    position = percentile / 100 * np.maximum(number - 1, 0)  # among the sorted, for each number of comparable values
    below = np.floor(position).astype(np.int32)
    ordered = jnp.sort(jnp.where(comparable, values, jnp.finfo(values.dtype).max))
    many = jnp.sum(comparable)
    low, high = (ordered[jnp.asarray(at)[many]] for at in (below, np.minimum(below + 1, np.maximum(number - 1, 0))))
    return low + (high - low) * jnp.asarray(position - below, values.dtype)[many]
