"""Finds shapes of the other arguments that fit a batch of another size.

No argument says which axes of the labels, weights or keys given beside a batch have one entry per example, and an axis
may have the size of the batch by chance: two examples and the two numbers of a ``PRNGKey``, ten examples and ten class
weights. The function itself tells, since it can be traced only with shapes that fit.
"""

import itertools
from collections.abc import Iterator, Sequence

_MOST = 16
"""At most this many combinations of shapes are tried."""

Shapes = list[tuple[int, ...]]


def shapes_for(count: int, shapes: Shapes, arguments: Sequence[str], axis: int, now: int) -> Iterator[Shapes]:
    """Yields the shapes that arrays may have beside a batch of ``count`` examples, the likely ones first.

    Args:
      count: the number of examples.
      shapes: the shapes beside a batch of ``now`` examples.
      arguments: for each array the name of the argument that contains it; its arrays are likely to be of one kind.
      axis: the axis of the examples in the batch.
      now: the number of examples beside which the arrays have ``shapes``.
    """
    choices = [_choices(shape, axis, now) for shape in shapes]
    names = sorted({name for name, several in zip(arguments, choices, strict=True) if len(several) > 1})
    by_argument = (
        [several[0] if name in chosen else () for name, several in zip(arguments, choices, strict=True)]
        for few in range(len(names) + 1)
        for chosen in itertools.combinations(names, len(names) - few)
    )
    seen = set()
    for chosen in itertools.chain(by_argument, itertools.product(*choices)):
        if (key := tuple(chosen)) not in seen:
            seen.add(key)
            yield [resized(shape, axes, count) for shape, axes in zip(shapes, chosen, strict=True)]
        if len(seen) == _MOST:
            return


def resized(shape: Sequence[int], axes: Sequence[int], size: int) -> tuple[int, ...]:
    """A shape with another size along ``axes``."""
    return tuple(size if axis in axes else n for axis, n in enumerate(shape))


def _choices(shape: Sequence[int], axis: int, count: int) -> list[tuple[int, ...]]:
    """The axes along which an array may have one entry per example, the likely ones first; at last none."""
    here = sorted((i for i, size in enumerate(shape) if size == count), key=lambda i: i != axis)
    return [chosen for k in range(1, len(here) + 1) for chosen in itertools.combinations(here, k)] + [()]
