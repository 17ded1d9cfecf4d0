"""Reports of which operations of a gradient only rows are computed, and of which everything: :func:`explain`.

It also reports how operations read leaves in host memory.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from optax_freeze._errors import is_array, printable
from optax_freeze._gradient.dense_gradient import refuse_other_aux, region_of_leaf
from optax_freeze._gradient.grad import refuse_no_function
from optax_freeze._program.regions import EVERYTHING, region_of
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.folded_paths import fold
from optax_freeze._spec.memory_kinds import is_on_host
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.selection import FROZEN, RowSelection
from optax_freeze._spec.tree import PyTree

if TYPE_CHECKING:
    from optax_freeze._program.trace import Equation, Program


@dataclasses.dataclass(frozen=True)
class Operation:
    """The name of a JAX operation of the gradient and the line of the user's program that it comes from.

    Attributes:
      is_cheap: whether the operation is elementwise or changes only the layout.
    """

    name: str
    source: str
    is_cheap: bool = False

    def __str__(self) -> str:
        return f"{self.name} at {self.source}" if self.source else self.name


class Explanation:
    """Explains how a function is computed; prints one line for each leaf, stored value or operation.

    The result of :func:`optax_freeze.explain` and of the ``explain`` of :func:`optax_freeze.precompute`.

    Attributes:
      lines: the lines that are printed.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"embed": jax.numpy.ones((4, 2))}
      >>> fz.explain(lambda p: p["embed"][0].sum(), params, {"embed": fz.rows([1])}).lines
      ['embed: 3 of 4 rows train; only their gradient is computed']
    """

    @property
    def lines(self) -> Sequence[str]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(map(printable, self.lines))


@dataclasses.dataclass(frozen=True)
class LeafExplanation(Explanation):
    """How operations compute the gradient of one leaf that is frozen by rows, or read one frozen leaf.

    Attributes:
      path: the path of the leaf.
      by_rows: the operations of the gradient of which only some rows are computed, or those that copy only some rows at
        a time from the host, in program order.
      everything: the operations of the gradient that compute everything although only some rows are wanted, because
        nothing is known about their rows; the last one in program order is first. Or the operations that copy the whole
        leaf to the device, and for a leaf on the device, those that read it.
      rows: the number of rows, and ``trainable_rows`` of those that train; None for a leaf in ``Explanation.host``.
      on_host: whether the leaf is in host memory.
      whole: for rows that keep their state, the operations of the gradient that read all rows, where a lookup reads
        those of the batch. Through these operations other rows get no gradient.
    """

    path: str
    by_rows: tuple[Operation, ...]
    everything: tuple[Operation, ...]
    rows: int | None = None
    trainable_rows: int | None = None
    on_host: bool = False
    whole: tuple[Operation, ...] = ()

    @property
    def merged(self) -> Operation | None:
        """The last operation of the gradient that computes everything, whose result is cut; None if there is none."""
        return self.everything[0] if self.everything else None

    @property
    def lines(self) -> list[str]:
        return list(_folded([self]))

    @property
    def said(self) -> list[str]:
        """What is said of the leaf: the lines without its path."""
        if self.rows is not None:
            how = f"everything is computed by {self.merged}" if self.merged else "only their gradient is computed"
            costly = [f"  rows: {operation}" for operation in self.by_rows if not operation.is_cheap]
            whole = [f"  whole: {operation}; other rows that it reads get no gradient" for operation in self.whole]
            return [f"{self.trainable_rows} of {self.rows} rows train; {how}", *costly, *whole]
        if not self.on_host:
            return [f"stays on the device, where it is looked up by {self.everything[0]}"]
        how = " and ".join(["by rows"] * bool(self.by_rows) + ["whole"] * bool(self.everything))
        return [
            f"from the host, {how or 'and not read'}",
            *(f"  by rows: {operation}" for operation in self.by_rows),
            *(f"  whole: {operation}; better kept on the device" for operation in self.everything),
        ]


@dataclasses.dataclass(frozen=True)
class GradientExplanation(Explanation):
    """The result of :func:`optax_freeze.explain`.

    Attributes:
      rows: one entry for each leaf that is frozen by rows: its path, its number of rows and of trainable rows, and the
        operations of its gradient (name and source line) of which some rows or everything is computed.
      host: empty if no leaf is in host memory (:func:`optax_freeze.offload`). Otherwise one entry for each leaf in host
        memory, with its path and the operations that read it by rows or as a whole, and one for each frozen leaf on the
        device that is only read by lookups.
    """

    rows: tuple[LeafExplanation, ...]
    host: tuple[LeafExplanation, ...] = ()

    @property
    def lines(self) -> list[str]:
        found = [line for leaves in (self.rows, self.host) for line in _folded(leaves)]
        return found or ["no leaf is frozen by rows"]


def _folded(leaves: Iterable[LeafExplanation]) -> Iterator[str]:
    """The lines of leaves, once for those whose paths differ in a number and whose lines are the same."""
    for path, _, (first, *others) in fold((leaf.path, tuple(leaf.said)) for leaf in leaves):
        yield f"{'/'.join(path) or '(the root)'}: {first}"
        yield from others


def explain(
    fun: Callable[..., Any], params: PyTree, frozen: Spec, *args: Any, has_aux: bool = False, **kwargs: Any
) -> GradientExplanation:
    """Reports how the gradient of leaves that are frozen by rows is computed, and how leaves in host memory are read.

    Of most operations only the rows that are wanted are computed. An operation computes everything if nothing is known
    about its rows. The result is the same, but costs as much as the gradient of the whole leaf up to this operation.
    The function is traced and not executed: none of its operations or callbacks runs.

    Args:
      fun: the function, called as ``fun(params, *args, **kwargs)``.
      params: the parameters, or their shapes (``jax.ShapeDtypeStruct``).
      frozen: the spec of the frozen parameters, in any form.
      *args: the other positional arguments of ``fun``; arrays may be given as shapes, too.
      has_aux: whether ``fun`` returns a pair of the differentiated value and of auxiliary outputs, as in
        :func:`jax.value_and_grad`. Otherwise all outputs are differentiated.
      **kwargs: the keyword arguments of ``fun``.

    Returns:
      An :class:`optax_freeze.typing.Explanation`, to be printed. Its attribute ``rows`` has one entry for each leaf
      that is frozen by rows, ``host`` one for each leaf in host memory, and for each frozen leaf on the device that is
      only looked up. An entry has the ``path`` and two tuples of operations (``name`` and ``source`` line):
      ``by_rows``, of which only some rows are computed or copied, and ``everything``, which compute or copy the whole
      leaf. Entries of ``rows`` also have the numbers ``rows`` and ``trainable_rows``, and ``whole``, the operations
      that read all rows of a leaf whose rows keep their state.

    Raises:
      TypeError: if ``fun`` is not a function, or does not return a pair although ``has_aux`` says so.
      ValueError: if the spec does not fit the parameters.

    Example:
      >>> import optax_freeze as fz
      >>> def loss(params, tokens):
      ...   x = params["embed"][tokens]
      ...   return jax.numpy.sum(params["head"].reshape(2, 3)) + x.sum()
      >>> params = {"embed": jax.numpy.ones((4, 2)), "head": jax.numpy.ones((3, 2))}
      >>> frozen = {"embed": fz.rows(slice(0, 3)), "head": fz.rows([0])}
      >>> print(fz.explain(loss, params, frozen, jax.numpy.array([3])))
      embed: 1 of 4 rows train; only their gradient is computed
        rows: scatter-add at ...
      head: 2 of 3 rows train; everything is computed by reshape at ...
    """
    from optax_freeze._jax_internals import needs_value
    from optax_freeze._program.traced_function import Traced, as_traced

    refuse_no_function(fun, params, "fz.explain(fun, params, frozen, *args)")
    plan, values = make_plan(params, frozen), _tree.flatten(params)[0]
    selections, paths = plan.selections, [leaf.path for leaf in plan.leaves]
    in_rows = {i: s for i, s in enumerate(selections) if isinstance(s, RowSelection)}
    on_host = {i for i, value in enumerate(values) if is_on_host(value)}
    if not in_rows and not on_host:
        return GradientExplanation(())
    trains = [i for i, leaf in enumerate(plan.leaves) if selections[i] is not FROZEN and leaf.inexact]
    everything, treedef = jax.tree.flatten((params, args, kwargs))
    of_leaf = [i for i, value in enumerate(values) for leaf in jax.tree.leaves(value)]
    abstract = [is_array(leaf) for leaf in everything[: len(of_leaf)]]
    abstract += [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in everything[len(of_leaf) :]]

    def gradient(*arrays: Any) -> Any:
        left = iter(arrays)
        leaves = [next(left) if here else leaf for leaf, here in zip(everything, abstract, strict=True)]
        params, args, kwargs = jax.tree.unflatten(treedef, leaves)
        values, params_treedef = _tree.flatten(params)

        def outs(leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            filled = dict(zip(trains, leaves, strict=True))
            tree = jax.tree.unflatten(params_treedef, [filled.get(i, x) for i, x in enumerate(values)])
            out = fun(tree, *args, **kwargs)
            if has_aux:
                refuse_other_aux(out, has_aux)
            found, aux = map(jax.tree.leaves, out if has_aux else (out, ()))
            differentiated = [x for x in found if is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)]
            return differentiated, list(filter(is_array, aux))

        found, vjp, aux = jax.vjp(outs, [values[i] for i in trains], has_aux=True)
        return as_traced(vjp([jnp.ones_like(x) for x in found])[0]), found, aux

    try:
        program = Traced(gradient, list(compress(everything, abstract))).program
    except Exception as error:
        if not needs_value(error):
            raise
        python = (Operation("Python that needs a value", ""),)
        return GradientExplanation(
            tuple(LeafExplanation(paths[i], (), python, s.size, s.count) for i, s in in_rows.items()),
            tuple(LeafExplanation(paths[i], (), python, on_host=True) for i in sorted(on_host)),
        )
    grads, of_gradient, of_reads = dict(zip(trains, program.outputs, strict=False)), [], []
    inputs = [n for n, here in zip(of_leaf, abstract, strict=False) if here]
    for i, selection in in_rows.items():
        log = _log(program, [(grads[i], region_of(selection, i))], on_host=())
        rows = _operations(eqn for eqn, extent in reversed(log) if extent == "rows")
        everything = _operations(eqn for eqn, extent in log if extent == "everything")
        whole = _operations(_reading_all(program, inputs.index(i))) if selection.keep_state else ()
        of_rows = LeafExplanation(paths[i], rows, everything, selection.size, selection.count, whole=whole)
        of_gradient.append(of_rows)
    if not on_host:
        return GradientExplanation(tuple(of_gradient))
    frozen = [n for n, i in enumerate(inputs) if i in on_host or selections[i] is FROZEN]
    regions = [region_of_leaf(selections[i], values[i], i) for i in trains]
    regions += [EVERYTHING] * (len(program.outputs) - len(trains))
    log = _log(program, list(zip(program.outputs, regions, strict=True)), frozen)
    for n in frozen:
        from_host = inputs[n] in on_host
        found = [(eqn, extent[1] and from_host) for eqn, extent in reversed(log) if extent in ((n, True), (n, False))]
        rows, everything = (_operations(eqn for eqn, each in found if each == by_rows) for by_rows in (True, False))
        if from_host or {operation.name for operation in everything} == {"gather"}:
            of_reads.append(LeafExplanation(paths[inputs[n]], rows, everything, on_host=from_host))
    return GradientExplanation(tuple(of_gradient), tuple(of_reads))


def _log(program: "Program", wanted: Sequence[Any], on_host: Sequence[int]) -> list[tuple["Equation", Any]]:
    """Which operations compute or read rows or everything for these regions of values, the last one first."""
    from optax_freeze._program.tasks import ALWAYS
    from optax_freeze._program.walk import schedule

    log: list[tuple[Equation, Any]] = []
    schedule(program._replace(on_host=on_host), [(*each, ALWAYS) for each in wanted], log)
    return log


def _reading_all(program: "Program", number: int) -> list["Equation"]:
    """The products and reductions of an array, which read all of it, also of what elementwise operations make of it.

    What lookups, loops and operations without a rule read is not known, and they are left out.
    """
    from optax_freeze._program.operations import Cost, rule_of

    whole, found = {number}, []
    for eqn in program.eqns:
        if not eqn.reads & whole:
            continue
        cost = rule_of(eqn).cost
        if cost in (Cost.PRODUCT, Cost.REDUCTION):
            found.append(eqn)
        elif cost is Cost.BARRIER:
            whole.update(out for value, out in zip(eqn.inputs, eqn.outputs, strict=True) if value in whole)
        elif cost in (Cost.COPY, Cost.MOVE, Cost.ELEMENTWISE):
            size = math.prod(program.avals[number].shape)
            whole.update(n for n in eqn.outputs if math.prod(program.avals[n].shape) >= size)
    return found


def _operations(eqns: Iterable["Equation"]) -> tuple[Operation, ...]:
    from optax_freeze._jax_internals import operation_of  # loads jax.extend, which takes longer than this library
    from optax_freeze._program.operations import is_cheap

    return tuple(dict.fromkeys(Operation(operation_of(eqn)[0], eqn.line, is_cheap(eqn)) for eqn in eqns))
