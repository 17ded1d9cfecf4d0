"""Calls a function of the parameters with the trainable part and the rest, without merging leaves frozen by rows."""

import dataclasses
from collections.abc import Callable, Iterable
from itertools import islice, repeat
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from optax_freeze._errors import is_array
from optax_freeze._gradient.dynamic_split_array import DynamicSplitArray
from optax_freeze._gradient.frozen_array import FrozenArray
from optax_freeze._gradient.operation_log import OperationLog
from optax_freeze._gradient.split_array import PartlyFrozen, SplitArray
from optax_freeze._spec.memory import is_on_host, to_device
from optax_freeze._spec.partition import assemble
from optax_freeze._spec.selection import DynamicRowIndex, RowIndex, RowSelection
from optax_freeze._spec.tree import PyTree, Rest, is_leaf

T = TypeVar("T")


class OfParts:
    """Base class of functions that handle the trainable part and the rest of the parameters themselves.

    Such a function can also be called with the full parameters, like any other function.
    """

    def of_parts(self, trainable: PyTree, rest: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function with both parts and its other arguments."""
        raise NotImplementedError


def call_in_parts(
    fun: Callable[..., T],
    trainable: PyTree,
    rest: PyTree,
    args: Iterable[Any],
    kwargs: dict[str, Any],
    logs: Iterable[OperationLog | None] = repeat(None),
    whole: bool = False,
) -> T:
    """Calls ``fun`` with the combined parameters, in which leaves frozen by rows are split arrays.

    ``logs`` has a log or None for each leaf. ``whole`` says that the rows in ``trainable`` have the same values as in
    the arrays of ``rest``.
    """
    if isinstance(fun, OfParts):
        return fun.of_parts(trainable, rest, tuple(args), kwargs)

    def combine_part(of_rest: Rest, part: Any) -> Any:
        index = of_rest.selection
        if not isinstance(index, RowSelection):
            return index.put(of_rest.array, part)
        array = jnp.asarray(of_rest.array)
        rows = jnp.asarray(part.values, array.dtype)
        if isinstance(index, DynamicRowIndex):
            return DynamicSplitArray.of(array, rows, index, None, whole)
        assert isinstance(index, RowIndex)
        return SplitArray.of(array, rows, index, None, whole)

    leaves, treedef = assemble(trainable, rest, combine_part)
    logs = list(islice(logs, len(leaves)))
    log_of = {id(leaf): log for leaf, log in zip(leaves, logs, strict=True)}
    leaves = list(map(_read_in_parts, leaves, logs))
    in_parts = [leaf for leaf in leaves if isinstance(leaf, PartlyFrozen | FrozenArray)]
    if not in_parts:
        return fun(jax.tree.unflatten(treedef, leaves), *args, **kwargs)

    def of_arrays(*arrays: Any) -> T:
        left = iter(arrays)
        filled = [to_device(next(left)) if isinstance(leaf, PartlyFrozen | FrozenArray) else leaf for leaf in leaves]
        return fun(jax.tree.unflatten(treedef, filled), *args, **kwargs)

    from optax_freeze._gradient.interpreter import call  # imports jax.extend, which takes longer than this library

    frozen = {id(x): log_of.get(id(x)) for x in jax.tree.leaves(rest, is_leaf=is_leaf) if is_array(x)}
    return call(of_arrays, in_parts, frozen, leaves, jax.tree.leaves((args, kwargs)))


def _read_in_parts(leaf: Any, log: OperationLog | None) -> Any:
    """Adds the log to a leaf that is frozen by rows or on the host, and marks arrays on the host as late."""
    if isinstance(leaf, PartlyFrozen):
        return dataclasses.replace(leaf, frozen=_read_in_parts(leaf.frozen, log), log=log)
    return FrozenArray(leaf, is_late=True, on_host=True, log=log) if is_on_host(leaf) else leaf
