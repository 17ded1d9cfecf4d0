"""Calls ``init`` of an optimizer: for shapes alone, with other masks than those of its specs, or telling its errors.

Optax calls a pytree of masks or labels that is callable, as an Equinox module is. ``optax.masked`` looks whether its
mask is a pytree, but ``optax.inject_hyperparams`` takes every callable for a schedule, ``optax.partition`` for labels.
"""

import contextlib
import contextvars
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_freeze._errors import is_array, is_bool, type_error
from optax_freeze._spec.tied_leaves import traced_from
from optax_freeze._spec.tree import PyTree

Init: TypeAlias = Callable[[PyTree], PyTree]

_CHANGE: contextvars.ContextVar[Callable[[Any], Any]] = contextvars.ContextVar("change", default=lambda plan: plan)


def changed(plan: Any) -> Any:
    """The plan, or the plans of groups, with which an ``init`` continues that resolved its spec to ``plan``."""
    return _CHANGE.get()(plan)


def init_with(change: Callable[[Any], Any], init: Init, params: PyTree) -> PyTree:
    """``init(params)``, in which each transformation of this library continues with ``change(plan)``."""
    token = _CHANGE.set(change)
    try:
        return init(params)
    finally:
        _CHANGE.reset(token)


def init_of(tx: optax.GradientTransformation, params: PyTree) -> PyTree:
    """``tx.init(params)``; an error says how to write a dict of labels or bools for parameters in another mapping."""
    try:
        return tx.init(params)
    except (TypeError, ValueError) as error:
        nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Mapping) and not isinstance(node, dict))
        if found := [type(node).__name__ for node in nodes if isinstance(node, Mapping)]:
            error.add_note(
                f"fix: if the optimizer has a dict of labels or bools, which does not fit a {found[0]}, give"
                " fz.labels_by_path({path: label}) as its labels, lambda params: fz.resolve(params, mask) as its mask"
            )
        raise


def each_once(arrays: Iterable[Any], others: Iterable[Any] = ()) -> list[Any]:
    """The arrays, copied if they were there before or are among ``others``: a buffer can be donated only once."""
    seen, found = {id(array) for array in others}, []
    for array in arrays:
        found.append(jnp.copy(array) if id(array) in seen and isinstance(array, jax.Array) else array)
        seen.add(id(array))
    return found


def with_own_buffers(state: PyTree, params: PyTree) -> PyTree:
    """A state that can be donated with the parameters: some optimizers return the parameters themselves in it."""
    arrays, treedef = jax.tree.flatten(state)
    return jax.tree.unflatten(treedef, each_once(arrays, jax.tree.leaves(params)))


def eval_init(init: Init, params: PyTree) -> PyTree:
    """``jax.eval_shape(init, params)`` for parameters among which may be other objects than arrays."""
    leaves, treedef = jax.tree.flatten(params)

    def init_of(arrays: dict[int, Any]) -> PyTree:
        with traced_from({id(tracer): leaves[i] for i, tracer in arrays.items()}):
            return init(jax.tree.unflatten(treedef, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]))

    return jax.eval_shape(init_of, {i: leaf for i, leaf in enumerate(leaves) if is_array(leaf)})


def first_difference(a: Any, b: Any) -> int | Literal["rank"] | None:
    """The first axis along which two shapes differ; "rank" if one has more axes."""
    if a.ndim != b.ndim:
        return "rank"
    return next((i for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m), None)


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
