"""The gradient of the trainable parameters: the dense gradient is traced, and only its wanted rows are computed."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from optax_freeze._errors import described, type_error
from optax_freeze._jax_tracing import needs_value
from optax_freeze._program.regions import EVERYTHING, Region, Values, region_of, zero_outside
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import is_on_host, to_device
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, RowSelection, Selection
from optax_freeze._spec.tree import Part, PyTree

if TYPE_CHECKING:
    from optax_freeze._program.tasks import Schedule


class DenseGradient:
    """The gradient of ``fun(params)`` with respect to the whole leaves of which something trains under a plan.

    Attributes:
      values: all leaves of the parameters, with their ``treedef``.
      trains: the numbers of the leaves that train.
      leaves: these leaves.
      others: the other leaves on the host.
      value_and_grad: called with ``leaves`` and ``others``, returns the value and the gradients of ``leaves``.
      traced: the program of ``value_and_grad``, and ``inputs`` its inputs, after :meth:`trace`.
    """

    def __init__(self, fun: Callable[..., Any], plan: Plan, params: PyTree, has_aux: bool, holomorphic: bool) -> None:
        self.values, self.treedef = plan.align(params, "params")
        self.trains = [i for i, selection in enumerate(plan.selections) if selection is not FROZEN]
        self.on_host = [i for i, value in enumerate(self.values) if is_on_host(value)]
        others = [i for i in self.on_host if i not in self.trains]

        def dense(leaves: Sequence[Any], arrays: Sequence[Any]) -> Any:
            filled = list(self.values)
            for i, leaf in zip([*self.trains, *others], [*leaves, *arrays], strict=True):
                filled[i] = leaf
            result = fun(jax.tree.unflatten(self.treedef, filled))
            refuse_other_aux(result, has_aux)
            return result

        self.leaves, self.others = [self.values[i] for i in self.trains], [self.values[i] for i in others]
        self.value_and_grad = jax.value_and_grad(dense, has_aux=has_aux, holomorphic=holomorphic)

    def trace(self) -> bool:
        """Traces ``value_and_grad``; False if the function cannot be traced."""
        from optax_freeze._program.traced_function import Traced, as_array, as_traced  # loads jax.extend: slow

        arrays, structure = jax.tree.flatten((self.leaves, self.others))

        def value_and_grad(*arrays: Any) -> Any:
            value, grads = self.value_and_grad(*jax.tree.unflatten(structure, arrays))
            return value, as_traced(grads)

        try:
            traced = Traced(value_and_grad, arrays)
        except Exception as error:
            if not needs_value(error):
                raise
            return False
        self.traced, self.inputs = traced, dict(enumerate(map(as_array, arrays)))
        return True

    def schedule(self, wanted: Sequence[tuple[int, Region, int]]) -> "Schedule":
        """The tasks for the value, and for these regions of the gradients of ``leaves``: their places and guards."""
        from optax_freeze._gradient.gradient_program import gradient_schedule

        return gradient_schedule(self.traced.program, len(self.leaves), wanted)


def refuse_other_aux(result: Any, has_aux: bool) -> None:
    """A ``TypeError`` if a function returns auxiliary outputs without ``has_aux``, or the reverse."""
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    if is_pair != has_aux:
        what, expected, fix = "`fun` returns no auxiliary outputs", "a pair (value, aux)", "leave out has_aux"
        if not has_aux:
            what, expected, fix = "`fun` returns auxiliary outputs", "a scalar", f"has_aux=True, if it is {expected}"
        raise type_error(what, at=f"has_aux={has_aux}", got=described(result), expected=expected, fix=fix)


def value_and_grad_of_plan(
    fun: Callable[..., Any], plan: Plan, params: PyTree, has_aux: bool, holomorphic: bool
) -> tuple[Any, PyTree]:
    """The value of ``fun(params)`` and its gradient with respect to the trainable part of a plan."""
    dense = DenseGradient(fun, plan, params, has_aux, holomorphic)
    parts = [plan.selections[i] for i in dense.trains]
    if (dense.on_host or any(isinstance(selection, RowSelection) for selection in parts)) and dense.trace():
        from optax_freeze._program.from_host import evaluate
        from optax_freeze._program.tasks import ALWAYS

        wanted = [(place, region, ALWAYS) for place, region in enumerate(map(region_of_leaf, parts, dense.leaves))]
        value, grads = dense.traced.result(evaluate(dense.schedule(wanted).run, Values(dense.inputs)))
        grads = map(as_part, parts, dense.leaves, grads)
    else:
        value, grads = dense.value_and_grad(*jax.tree.map(to_device, (dense.leaves, dense.others)))
        grads = map(taken, parts, grads)
    full: list[Any] = [_tree.MASKED_NODE] * len(dense.values)
    for i, grad in zip(dense.trains, grads, strict=True):
        full[i] = grad
    return value, jax.tree.unflatten(dense.treedef, plan.with_sources(full, dense.values))


def taken(selection: Selection, grad: Any) -> Any:
    """The gradient of the trainable part of a leaf, from its dense gradient."""
    return grad if isinstance(grad, Part) else selection.take(grad)


def region_of_leaf(selection: Selection, leaf: Any) -> Region:
    """The part of the gradient of a leaf that is computed; of a leaf that is a ``Part`` all of it."""
    return EVERYTHING if isinstance(leaf, Part) else region_of(selection)


def as_part(selection: Selection, leaf: Any, grad: Any) -> Any:
    """The gradient of the trainable part of a leaf, from that of :func:`region_of_leaf`."""
    if isinstance(selection, RowSelection) and not isinstance(leaf, Part):
        return Part(zero_outside(selection, grad), selection.part_index, leaf.shape)
    return taken(selection, grad)
