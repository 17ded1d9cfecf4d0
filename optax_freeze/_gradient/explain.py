"""Reports of which operations of a gradient only rows are computed, and of which everything: :func:`explain`.

It also reports how operations read leaves in host memory.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_freeze._errors import is_array
from optax_freeze._gradient.dense_gradient import refuse_other_aux, region_of_leaf
from optax_freeze._gradient.explanation import GradientExplanation, LeafExplanation, Operation
from optax_freeze._gradient.grad import refuse_no_function
from optax_freeze._jax_tracing import needs_value
from optax_freeze._program.regions import EVERYTHING, Values
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import is_on_host
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.selection import FROZEN, RowSelection
from optax_freeze._spec.sharding import eval_types
from optax_freeze._spec.tree import PyTree

if TYPE_CHECKING:
    from optax_freeze._program.tasks import Schedule
    from optax_freeze._program.trace import Equation, Program


def explain(
    fun: Callable[..., Any], params: PyTree, frozen: Spec, *args: Any, has_aux: bool = False, **kwargs: Any
) -> GradientExplanation:
    """Reports how the gradient of leaves that are frozen by rows is computed, and how leaves in host memory are read.

    Of most operations only the rows that are wanted are computed. An operation computes everything if nothing is known
    about its rows. The result is the same, but costs as much as the gradient of the whole leaf up to this operation.
    What the value or another gradient needs as a whole anyway is not listed.
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
    refuse_no_function(fun, params, "fz.explain(fun, params, frozen, *args)")
    plan, values = make_plan(params, frozen), _tree.flatten(params)[0]
    paths = [leaf.path for leaf in plan.leaves]
    in_rows = {i: s for i, s in enumerate(plan.selections) if isinstance(s, RowSelection)}
    on_host = {i for i, value in enumerate(values) if is_on_host(value)}
    if not in_rows and not on_host:
        return GradientExplanation(())
    traced = _traced(fun, plan, params, args, kwargs, has_aux)
    if traced is None:
        python = (Operation("Python that needs a value", ""),)
        return GradientExplanation(
            tuple(LeafExplanation(paths[i], (), python, s.size, s.count) for i, s in in_rows.items()),
            tuple(LeafExplanation(paths[i], (), python, on_host=True) for i in sorted(on_host)),
        )
    from optax_freeze._program.tasks import ALWAYS
    from optax_freeze._program.walk import schedule

    program, trains, inputs, _ = traced
    regions = [region_of_leaf(plan.selections[i], values[i]) for i in trains]
    regions += [EVERYTHING] * (len(program.outputs) - len(trains))
    wanted = zip(program.outputs, regions, [ALWAYS] * len(regions), strict=True)
    tasks = schedule(program, [*wanted])
    of_gradient = [_of_gradient(tasks, traced, paths[i], i, selection) for i, selection in in_rows.items()]
    frozen = [n for n, i in enumerate(inputs) if on_host and (i in on_host or plan.selections[i] is FROZEN)]
    reads = _reads(tasks, traced, frozen) if frozen else []
    of_reads = [_of_reads(reads, paths[inputs[n]], n, inputs[n] in on_host) for n in frozen]
    return GradientExplanation(tuple(of_gradient), tuple(filter(None, of_reads)))


class _Traced(NamedTuple):
    """The program of a gradient, whose first outputs are the gradients of the leaves that train.

    Attributes:
      trains: the numbers of these leaves.
      inputs: for each of the first inputs the number of its leaf.
      types: of all inputs.
    """

    program: "Program"
    trains: list[int]
    inputs: list[int]
    types: list[Any]


def _traced(
    fun: Callable[..., Any], plan: Plan, params: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any], has_aux: bool
) -> _Traced | None:
    """The gradient of all outputs of a function, traced with shapes; None if Python needs a value."""
    from optax_freeze._program.traced_function import Traced, as_argument, as_traced, filled

    values = _tree.flatten(params)[0]
    trains = [i for i, leaf in enumerate(plan.leaves) if plan.selections[i] is not FROZEN and leaf.inexact]
    everything, treedef = jax.tree.flatten((params, args, kwargs))
    of_leaf = [i for i, value in enumerate(values) for leaf in jax.tree.leaves(value)]
    abstract = [is_array(leaf) for leaf in everything[: len(of_leaf)]]
    # Python may branch on the values of other arguments, so only those that are shapes are inputs.
    abstract += [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in everything[len(of_leaf) :]]

    def gradient(*arrays: Any) -> Any:
        params, args, kwargs = jax.tree.unflatten(treedef, filled(everything, abstract, arrays))
        values, params_treedef = _tree.flatten(params)

        def outs(leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            given = dict(zip(trains, leaves, strict=True))
            tree = jax.tree.unflatten(params_treedef, [given.get(i, x) for i, x in enumerate(values)])
            out = fun(tree, *args, **kwargs)
            if has_aux:
                refuse_other_aux(out, has_aux)
            found, aux = map(jax.tree.leaves, out if has_aux else (out, ()))
            differentiated = [x for x in found if is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)]
            return differentiated, list(filter(is_array, aux))

        found, vjp, aux = jax.vjp(outs, [values[i] for i in trains], has_aux=True)
        return as_traced(vjp([jnp.ones_like(x) for x in found])[0]), found, aux

    arrays = [*map(as_argument, compress(everything, abstract))]
    try:
        program = Traced(gradient, arrays).program
    except Exception as error:
        if not needs_value(error):
            raise
        return None
    return _Traced(program, trains, list(compress(of_leaf, abstract)), arrays)


def _of_gradient(tasks: "Schedule", traced: _Traced, path: str, i: int, selection: RowSelection) -> LeafExplanation:
    """How the gradient of a leaf that is frozen by rows is computed."""
    grad = traced.trains.index(i)
    found = [*tasks.of([tasks.outputs[grad]]).all_tasks]
    rows = _operations(task.eqn for task in found if task.extent == "rows")
    everything = _operations(task.eqn for task in reversed(found) if task.extent == "everything")
    whole = _operations(_reading_all(traced.program, traced.inputs.index(i))) if selection.keep_state else ()
    return LeafExplanation(path, rows, everything, selection.size, selection.count, whole=whole)


def _reads(tasks: "Schedule", traced: _Traced, frozen: Sequence[int]) -> list[tuple[int, "Equation", bool]]:
    """The reads of some inputs as if they were in host memory: the input, the operation, and whether rows are read."""
    from optax_freeze._program.from_host import evaluate
    from optax_freeze._program.host_array import HostArray

    reads: list[Any] = []

    def run(*arrays: Any) -> list[Any]:
        values = {n: HostArray(x, name=n) if n in frozen else x for n, x in enumerate(arrays)}
        return evaluate(tasks.run, Values(values), reads=reads)

    eval_types(run, *traced.types)
    return reads


def _of_reads(
    reads: Sequence[tuple[int, "Equation", bool]], path: str, n: int, on_host: bool
) -> LeafExplanation | None:
    """How a leaf in host memory is read; None of one on the device unless it is only looked up."""
    found = [(eqn, by_rows and on_host) for number, eqn, by_rows in reads if number == n]
    rows, whole = (_operations(eqn for eqn, each in found if each == by_rows) for by_rows in (True, False))
    is_told = on_host or {operation.name for operation in whole} == {"gather"}
    return LeafExplanation(path, rows, whole, on_host=on_host) if is_told else None


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
