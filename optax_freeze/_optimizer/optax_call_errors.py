"""Says that Optax calls a pytree of masks or labels that is callable, as an Equinox module is.

``optax.masked`` looks whether its mask is a pytree. ``optax.inject_hyperparams`` takes every callable for a schedule,
and ``optax.partition`` every callable for a function of the parameters.
"""

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import jax

from optax_freeze._errors import is_bool, type_error


@contextlib.contextmanager
def saying_what_optax_calls() -> Iterator[None]:
    """A ``TypeError`` in place of an error for which a called pytree is the cause."""
    try:
        yield
    except Exception as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            scope = frame.f_locals
            schedule, labels = getattr(scope.get("self"), "schedule_fn", None), scope.get("param_labels")
            if _is_tree_of(is_bool, schedule):
                raise _called(
                    schedule,
                    "for a schedule",
                    "name the argument: optax.inject_hyperparams(optax.adamw, static_args='mask')(...)",
                ) from error
            if _is_tree_of(lambda leaf: isinstance(leaf, str), labels):
                raise _called(labels, "for a function", "optax.partition(transforms, lambda _: labels)") from error
        raise


def _is_tree_of(is_kind: Any, value: Any) -> bool:
    leaves = jax.tree.leaves(value) if callable(value) else []
    return bool(leaves) and all(map(is_kind, leaves))


def _called(tree: Any, what: str, fix: str) -> TypeError:
    return type_error(
        f"Optax takes a callable pytree {what}",
        at="init",
        got=f"a tree of type {type(tree).__name__}",
        expected="a tree that Optax does not call",
        fix=fix,
    )
