"""What is a transformation: any optimizer as an argument, and the ``update`` of those of this library."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from optax_freeze._errors import described, type_error
from optax_freeze._optimizer.outer_transformation import around, as_parts, mapped, refuse_updates_of_another, remember
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.tree import PyTree


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


@dataclasses.dataclass(frozen=True)
class Update:
    """The ``update`` of a transformation that can add its updates to the parameters itself.

    ``run(grads, state, params, extra_args, in_place=...)`` gives updates or new parameters, and the new state;
    ``of_groups(gradient, state, params, extra_args)`` new parameters from gradients that are computed in the update,
    one of which takes the place of the extra argument ``grad`` in each group. ``only_freezes`` if there is no optimizer
    inside. ``part`` says what ``fz.union`` needs to know of ``fz.freeze``. It has the name of a function, for
    ``jax.named_call`` around it.
    """

    __name__ = "update"

    run: Callable[..., tuple[PyTree, PyTree]]
    of_groups: Callable[..., tuple[PyTree, PyTree]] | None = None
    only_freezes: bool = False
    part: Any = None

    def __call__(
        self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        outer, trains = around(), hasattr(state, "differs") and not self.only_freezes
        if trains:
            refuse_updates_of_another(updates, state.differs)
        parts = lambda tree: as_parts(tree, outer)  # noqa: E731
        extra_args = extra_args if outer is None else mapped(extra_args, parts)
        new, next_state = self.run(parts(updates), state, parts(params), extra_args, in_place=False)
        new = new if outer is None else _tree.as_arrays(new)
        if trains:
            remember(jax.tree.leaves(new), state.spec, jax.tree.leaves((updates, params)))
        return new, next_state
