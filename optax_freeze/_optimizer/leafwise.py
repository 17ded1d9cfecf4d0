"""Optimizers that need no tree: groups give them a list of their leaves, and equal groups share a traced update.

A group's tree has a placeholder for each leaf of the other groups, which Optax maps in each of its operations: the time
to trace all groups would grow with the square of their number. In general an update may read paths. Those of
:func:`leafwise_transformations` do not, which the tests check.
"""

import functools
from typing import Any

import optax


@functools.cache
def leafwise_transformations() -> tuple[optax.GradientTransformation, ...]:
    """One of each kind of Optax's transformations that map leaves, or add numbers of all leaves."""
    return (
        optax.identity(),
        optax.scale(0.1),
        optax.scale_by_schedule(lambda count: 0.1 * count),
        optax.scale_by_adam(),
        optax.scale_by_amsgrad(),
        optax.scale_by_lion(),
        optax.scale_by_rms(),
        optax.scale_by_sign(),
        optax.scale_by_trust_ratio(),
        optax.trace(0.9),
        optax.ema(0.9),
        optax.add_decayed_weights(0.1),
        optax.clip(0.1),
        optax.clip_by_global_norm(0.1),
        optax.clip_by_block_rms(0.1),
    )


@functools.cache
def _known_code() -> tuple[set[Any], set[Any]]:
    """The code of functions that do not depend on the tree; and of those that only call others in their closure."""
    plain = optax.GradientTransformation(*optax.identity())
    leafwise = {_code(function) for tx in leafwise_transformations() for function in tx}
    combining = {_code(each) for tx in (optax.chain(plain), optax.with_extra_args_support(plain)) for each in tx}
    return leafwise - {None}, combining - leafwise - {None}


def _code(function: Any) -> Any:
    """What all functions have in common that one ``def`` makes; None for other callables."""
    return id(function.__code__) if hasattr(function, "__code__") else None


def is_leafwise(function: Any) -> bool:
    """Whether ``init`` or ``update`` of a transformation does the same for a list of leaves as for any tree of them.

    A function that combines others is leafwise if its closure holds nothing else, and these are leafwise.
    """
    leafwise, combining = _known_code()
    if _code(function) not in combining:
        return _code(function) in leafwise
    try:
        [content] = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # in another version of Optax: another number of cells, or an empty one
        return False
    of_one = isinstance(content, optax.GradientTransformation)
    functions = [content.update] if of_one else content if isinstance(content, tuple) else []
    return bool(functions) and all(map(is_leafwise, functions))
