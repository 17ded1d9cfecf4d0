"""The number of examples in a batch, and shapes of the other arguments that fit another number.

An axis of the labels, weights or keys beside a batch may have its size by chance: two examples and the two numbers of a
``PRNGKey``. The function itself tells, since it can be traced only with shapes that fit.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from optax_freeze._errors import value_error
from optax_freeze._precompute.inputs import Input

_MOST = 16
"""At most this many combinations of shapes are tried."""

Shapes = list[tuple[int, ...]]


def number_of_examples(inputs: Sequence[Input], axis: int) -> int:
    sizes: dict[Any, str] = {}
    for given in inputs:
        if given.is_batch:
            shape = np.shape(given.value)
            sizes.setdefault(shape[axis] if axis < len(shape) else None, f"{given.name} of shape {shape}")
    if len(sizes) != 1 or None in sizes:
        raise value_error(
            "the recurring arguments have no common axis of examples",
            at=f"example_axis={axis}",
            got="; ".join(sizes.values()) or "no array",
            expected=f"arrays with the examples of the batch along axis {axis}",
            fix="put arrays that all examples share into the parameters, and freeze them; "
            "give a number as a Python number, which jax.jit must not trace (static_argnames)",
        )
    [count] = sizes
    return count


def with_examples(count: int, inputs: Sequence[Input], axis: int) -> Iterator[list[Input]]:
    """Yields the inputs for a batch of ``count`` examples, the likely ones first; what does not recur may vary."""
    free = {i: np.shape(x.value) for i, x in enumerate(inputs) if x.leaf is None and x.why}
    batch = {i: _resized(np.shape(x.value), [axis], count) for i, x in enumerate(inputs) if x.is_batch}
    arguments, now = [inputs[i].name.split("/")[0] for i in free], number_of_examples(inputs, axis)
    for found in shapes_for(count, [*free.values()], arguments, axis, now):
        others = list(inputs)
        for i, shape in (batch | dict(zip(free, found, strict=True))).items():
            if shape != np.shape(inputs[i].value):
                others[i] = inputs[i]._replace(value=jax.ShapeDtypeStruct(shape, inputs[i].value.dtype))
        yield others


def shapes_for(count: int, shapes: Shapes, arguments: Sequence[str], axis: int, now: int) -> Iterator[Shapes]:
    """Yields the shapes that arrays may have beside a batch of ``count`` examples, the likely ones first.

    ``now`` is the number of examples beside which they have ``shapes``, along ``axis`` of the batch. ``arguments`` are
    the names of the arguments that contain them; the arrays of one argument are likely to be of one kind.
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
            yield [_resized(shape, axes, count) for shape, axes in zip(shapes, chosen, strict=True)]
        if len(seen) == _MOST:
            return


def _resized(shape: Sequence[int], axes: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(size if axis in axes else n for axis, n in enumerate(shape))


def _choices(shape: Sequence[int], axis: int, count: int) -> list[tuple[int, ...]]:
    """The axes along which an array may have one entry per example, the likely ones first; at last none."""
    here = sorted((i for i, size in enumerate(shape) if size == count), key=lambda i: i != axis)
    return [chosen for k in range(1, len(here) + 1) for chosen in itertools.combinations(here, k)] + [()]
