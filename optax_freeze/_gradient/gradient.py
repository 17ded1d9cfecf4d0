"""The gradient of what trains: the dense gradient is traced, and only the wanted rows of it are computed."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_freeze._program.function import Traced, as_array, needs_value
from optax_freeze._program.regions import EVERYTHING, Region, Values, region_of
from optax_freeze._program.schedule import schedule
from optax_freeze._program.tasks import ALWAYS
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory import is_on_host, to_device
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, RowSelection, Selection
from optax_freeze._spec.tree import Part, PyTree


def value_and_grad_of_plan(
    fun: Callable[..., Any], plan: Plan, params: PyTree, has_aux: bool, holomorphic: bool
) -> tuple[Any, PyTree]:
    """The value of ``fun(params)`` and its gradient with respect to what trains under a plan."""
    values, treedef = plan.align(params, "params")
    trains = [i for i, selection in enumerate(plan.selections) if selection is not FROZEN]
    late = [i for i, value in enumerate(values) if is_on_host(value)]

    def dense(leaves: Sequence[Any], others: Sequence[Any]) -> Any:
        filled = list(values)
        for i, leaf in zip([*trains, *(i for i in late if i not in trains)], [*leaves, *others], strict=True):
            filled[i] = leaf
        return fun(jax.tree.unflatten(treedef, filled))

    at_leaves = jax.value_and_grad(dense, has_aux=has_aux, holomorphic=holomorphic)
    leaves, others = [values[i] for i in trains], [values[i] for i in late if i not in trains]
    parts = [plan.selections[i] for i in trains]
    found = None
    if late or any(isinstance(selection, RowSelection) for selection in parts):
        found = _of_rows(at_leaves, leaves, others, parts)
    if found is None:
        value, grads = at_leaves(list(map(to_device, leaves)), list(map(to_device, others)))
        found = value, [taken(selection, grad) for selection, grad in zip(parts, grads, strict=True)]
    value, grads = found
    full: list[Any] = [_tree.HOLE] * len(values)
    for i, grad in zip(trains, grads, strict=True):
        full[i] = grad
    return value, jax.tree.unflatten(treedef, plan.with_sources(full, values))


def taken(selection: Selection, grad: Any) -> Any:
    """The gradient of what trains of a leaf, of its dense gradient."""
    return grad if isinstance(grad, Part) else selection.take(grad)


def _of_rows(
    at_leaves: Callable[..., Any], leaves: Sequence[Any], others: Sequence[Any], parts: Sequence[Selection]
) -> tuple[Any, list[Any]] | None:
    """The value and the gradient, of which only rows are computed; None if the function cannot be traced."""
    arrays, structure = jax.tree.flatten((list(leaves), list(others)))

    def at_arrays(*arrays: Any) -> Any:
        value, grads = at_leaves(*jax.tree.unflatten(structure, arrays))
        return value, grads

    try:
        traced = Traced(at_arrays, arrays)
    except Exception as error:
        if not needs_value(error):
            raise
        return None
    program = traced.program
    number = len(jax.tree.leaves(list(leaves)))
    regions: list[Region] = [EVERYTHING] * (len(program.outputs) - number)
    of_leaf = [
        region_of(selection) if not isinstance(x, Part) else EVERYTHING
        for selection, x in zip(parts, leaves, strict=True)
    ]
    regions += of_leaf
    wanted = [(value, region, ALWAYS) for value, region in zip(program.outputs, regions, strict=True)]
    outs = schedule(program, wanted).run(Values(dict(enumerate(map(as_array, arrays)))))
    value, grads = traced.result(outs)
    return value, [_as_part(selection, leaf, grad) for selection, leaf, grad in zip(parts, leaves, grads, strict=True)]


def _as_part(selection: Selection, leaf: Any, grad: Any) -> Any:
    if isinstance(selection, RowSelection) and not isinstance(leaf, Part):
        return Part(grad, selection.part_index, leaf.shape)
    return taken(selection, grad)
