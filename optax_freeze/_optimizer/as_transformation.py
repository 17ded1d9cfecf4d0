"""Checks that an argument is an optimizer."""

from typing import Any

import optax

from optax_freeze._errors import described, type_error


def as_transformation(
    tx: Any, call: str, *, name: str = "tx", other: Any = None
) -> optax.GradientTransformationExtraArgs:
    """An Optax optimizer, or an ``optax.MultiSteps``, as a transformation that takes extra arguments.

    The error for any other value shows ``call``; ``other`` is the argument with which it may have been swapped.
    """
    if isinstance(tx, optax.MultiSteps):
        update_fn: Any = tx.update
        return optax.GradientTransformationExtraArgs(tx.init, update_fn)
    if is_optimizer(tx):
        return optax.with_extra_args_support(tx)
    if is_optimizer(other):
        fix = "swap the arguments"
    elif callable(tx) and hasattr(tx, "__name__"):
        fix = "call the factory: optax.adam(1e-3), not optax.adam"
    elif callable(tx):
        fix = "pass an Optax optimizer; for a module of Flax, see optax_freeze.nnx.freeze and optax_freeze.linen.Frozen"
    else:
        fix = "pass an Optax optimizer"
    at = call.partition("(")[0]
    raise type_error(f"`{name}` is not an optimizer", at=at, got=described(tx), expected=call, fix=fix)


def is_optimizer(value: Any) -> bool:
    """Whether a value has the methods of ``optax.GradientTransformation``."""
    return hasattr(value, "init") and hasattr(value, "update") and not isinstance(value, type)
