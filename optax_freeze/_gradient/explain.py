"""``explain``: reports how each operation reads leaves that are frozen by rows or stored in host memory.

The function is traced as in :func:`optax_freeze.restrict`, with a log for each of these leaves.
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import jax

from optax_freeze._errors import ASKED_FOR_A_VALUE, is_array, printable, type_error
from optax_freeze._gradient import operation_log
from optax_freeze._gradient.in_parts import OfParts, call_in_parts
from optax_freeze._gradient.operation_log import OperationLog
from optax_freeze._gradient.restrict import refuse_no_function
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory import is_on_host, to_memory_of
from optax_freeze._spec.partition import split
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.selection import FROZEN, RowSelection
from optax_freeze._spec.tree import PyTree


@dataclasses.dataclass(frozen=True)
class Operation:
    """The name of a JAX operation and the line of the user's program that it comes from."""

    name: str
    source: str

    def __str__(self) -> str:
        return f"{self.name} at {self.source}" if self.source else self.name


@dataclasses.dataclass(frozen=True)
class LeafExplanation:
    """How the operations of a function read one leaf that is frozen by rows.

    Attributes:
      path: the path of the leaf.
      rows: the number of rows of the leaf.
      trainable_rows: the number of trainable rows.
      in_parts: the operations that read frozen and trainable rows separately, in program order.
      whole: the operations that read the whole array, but compute only the gradient of the trainable rows.
      merged: the first operation that computes the gradient of the whole array, or None.
    """

    path: str
    rows: int
    trainable_rows: int
    in_parts: tuple[Operation, ...]
    whole: tuple[Operation, ...]
    merged: Operation | None

    def __str__(self) -> str:
        verdict = "never merged" if self.whole else "in parts throughout"
        verdict = verdict if self.merged is None else f"merged by {self.merged}"
        path = self.path or "(the root)"
        lines = [f"{path}: {self.trainable_rows} of {self.rows} rows train; {verdict}"]
        lines += [f"  in parts: {operation}" for operation in self.in_parts]
        lines += [f"  whole forward, gradient of the rows: {operation}" for operation in self.whole]
        return "\n".join(map(printable, lines))


@dataclasses.dataclass(frozen=True)
class HostExplanation:
    """How the operations of a function read one frozen leaf, if some parameters are in host memory.

    Attributes:
      path: the path of the leaf.
      on_host: whether the leaf is in host memory. Leaves on the device are listed if only lookups read them.
      by_rows: the operations that copy only some rows at a time from the host, in program order.
      whole: the operations that copy the whole leaf to the device; for a leaf on the device, those that read it.
    """

    path: str
    on_host: bool
    by_rows: tuple[Operation, ...]
    whole: tuple[Operation, ...]

    def __str__(self) -> str:
        path = self.path or "(the root)"
        if not self.on_host:
            return printable(f"{path}: stays on the device, where it is looked up by {self.whole[0]}")
        how = [*(["by rows"] if self.by_rows else []), *(["whole"] if self.whole else [])]
        lines = [f"{path}: from the host, {' and '.join(how) or 'and not read'}"]
        lines += [f"  by rows: {operation}" for operation in self.by_rows]
        lines += [f"  whole: {operation}; better kept on the device" for operation in self.whole]
        return "\n".join(map(printable, lines))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of :func:`optax_freeze.explain`; prints one line for each operation.

    Attributes:
      rows: one entry for each leaf that is frozen by rows: its path, its number of rows and of trainable rows, the
        operations that read it in parts or as a whole (name and source line), and the first that merged it, or None.
      host: empty if no leaf is in host memory (:func:`optax_freeze.offload`). Otherwise one entry for each leaf in host
        memory, with its path and the operations that read it ``by_rows`` or ``whole``, and one for each frozen leaf on
        the device that is only read by lookups.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"embed": jax.numpy.ones((4, 2))}
      >>> explanation = fz.explain(lambda p: p["embed"][0].sum(), params, {"embed": fz.rows([0])})
      >>> [(row.path, row.merged) for row in explanation.rows]
      [('embed', None)]
    """

    rows: tuple[LeafExplanation, ...]
    host: tuple[HostExplanation, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.rows, *self.host))) or "no leaf is frozen by rows"


def explain(fun: Callable[..., Any], params: PyTree, frozen: Spec, *args: Any, **kwargs: Any) -> Explanation:
    """Reports how the operations of a function read leaves that are frozen by rows or stored in host memory.

    An operation reads a leaf frozen by rows in parts, as a whole with a gradient of the trainable rows only, or merged.
    In the first two cases no gradient of frozen rows is computed. With the merged array the result is the same, but the
    gradient of the whole leaf is computed. The function is traced and not executed: none of its operations or callbacks
    runs.

    Args:
      fun: the function, called as ``fun(params, *args, **kwargs)``.
      params: the parameters, or their shapes (``jax.ShapeDtypeStruct``).
      frozen: the spec of the frozen parameters, in any form.
      *args: the other positional arguments of ``fun``; arrays may be given as shapes, too.
      **kwargs: the keyword arguments of ``fun``.

    Returns:
      An :class:`optax_freeze.Explanation`, to be printed.

    Raises:
      TypeError: if ``fun`` is not a function, or is ``after`` of :func:`optax_freeze.precompute`.
      ValueError: if the spec does not fit the parameters.

    Example:
      >>> import optax_freeze as fz
      >>> def loss(params, tokens):
      ...   x = params["embed"][tokens]
      ...   return jax.numpy.sum(jax.numpy.sort(params["head"], axis=0)) + x.sum()
      >>> params = {"embed": jax.numpy.ones((4, 2)), "head": jax.numpy.ones((3, 2))}
      >>> frozen = {"embed": fz.rows(slice(0, 3)), "head": fz.rows([0])}
      >>> print(fz.explain(loss, params, frozen, jax.numpy.array([3])))
      embed: 1 of 4 rows train; in parts throughout
        in parts: gather at ...
      head: 2 of 3 rows train; merged by sort at ...
    """
    refuse_no_function(fun, params, "fz.explain(fun, params, frozen, *args)")
    if isinstance(fun, OfParts):
        raise type_error(
            "fz.explain does not take `after` of fz.precompute",
            at="the first argument",
            got=repr(fun),
            expected="the function that was passed to fz.precompute, which reads rows in the same way",
            fix="fz.explain(loss, params, frozen, *args); `explain` of fz.precompute lists what is computed once",
        )
    plan = make_plan(params, frozen)
    pairs = zip(plan.leaves, plan.selections, strict=True)
    indices = {leaf.path: index for leaf, index in pairs if isinstance(index, RowSelection)}
    values = _tree.flatten(params)[0]
    on_host = [leaf.path for leaf, value in zip(plan.leaves, values, strict=True) if is_on_host(value)]
    logs = {leaf.path: OperationLog() for leaf in plan.leaves if on_host or leaf.path in indices}
    log_of_each = [logs.get(leaf.path) for leaf in plan.leaves]
    everything, treedef = jax.tree.flatten((params, args, kwargs))
    abstract = [is_array(leaf) for leaf in jax.tree.leaves(params)]
    abstract += [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in everything[len(abstract) :]]

    def traced(arrays: Sequence[Any]) -> None:
        left = map(to_memory_of, compress(everything, abstract), arrays)
        leaves = [next(left) if here else leaf for leaf, here in zip(everything, abstract, strict=True)]
        params, args, kwargs = jax.tree.unflatten(treedef, leaves)
        call_in_parts(fun, *split(params, plan), args, kwargs, log_of_each, whole=True)

    try:
        jax.eval_shape(traced, list(compress(everything, abstract)))
    except ASKED_FOR_A_VALUE:
        if not any(log.with_effect("merged") for log in logs.values()):
            raise
    whole = {leaf.path for leaf, selection in zip(plan.leaves, plan.selections, strict=True) if selection is FROZEN}
    of_host = [_of_host_leaf(path, path in on_host, logs[path]) for path in logs if path in whole or path in on_host]
    return Explanation(
        tuple(_of_leaf(path, index, logs[path]) for path, index in indices.items()),
        tuple(found for found in of_host if found.on_host or {read.name for read in found.whole} == {"gather"}),
    )


def _operations(log: OperationLog, *effects: str) -> tuple[Operation, ...]:
    return tuple(dict.fromkeys(map(_with_line, log.with_effect(*effects))))


def _of_host_leaf(path: str, on_host: bool, log: OperationLog) -> HostExplanation:
    whole = _operations(log, "host whole" if on_host else "device")
    return HostExplanation(path, on_host, _operations(log, "host rows"), whole)


def _of_leaf(path: str, index: RowSelection, log: OperationLog) -> LeafExplanation:
    in_parts, whole = _operations(log, "kept", "read"), _operations(log, "whole")
    merged = next(map(_with_line, log.with_effect("merged")), None)
    return LeafExplanation(path, index.size, index.count, in_parts, whole, merged)


def _with_line(operation: operation_log.Operation) -> Operation:
    from jax.extend.source_info_util import summarize

    return Operation(operation.name, "" if operation.source is None else summarize(operation.source))
