"""Gradients of only those groups of ``freeze_when`` that are trainable at the current step.

The dense gradient is one program, of which each operation is evaluated if a group that needs it is trainable now.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_freeze._errors import is_concrete, value_error
from optax_freeze._gradient.dense_gradient import DenseGradient, as_part, region_of_leaf, value_and_grad_of_plan
from optax_freeze._program.regions import Values
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.group_spec import GroupSpec, zeroed
from optax_freeze._spec.resolve import make_plan
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DynamicRowIndex, Selection
from optax_freeze._spec.tree import MASKED_NODE, Leaf, Part, PyTree


class GradientOfGroups:
    """The value of a function, and for each group its gradient, which is computed where it is asked for.

    What several groups need is evaluated at once.

    Attributes:
      value: the value.
      frozen: whether each group and the rest is frozen, known only after gradients of other groups have read its
        parameters. Without this order XLA copies parameters that are updated in place.
    """

    def __init__(self, dense: DenseGradient, spec: GroupSpec) -> None:
        from optax_freeze._program.from_host import evaluate  # loads jax.extend: slow
        from optax_freeze._program.tasks import ALWAYS, Context, new_guards, read_all

        self._dense, self._spec = dense, spec
        self._owners = [*new_guards(len(spec.names)), ALWAYS]
        place_of = {i: place for place, i in enumerate(dense.trains)}
        owned = {(n, i): its for n, own in enumerate(spec.owned) for i, its in own.items()}
        wanted = [(place_of[i], region_of_leaf(its, dense.values[i]), self._owners[n]) for (n, i), its in owned.items()]
        schedule = dense.schedule(wanted)
        outs = len(schedule.outputs) - len(wanted)
        left = iter(schedule.outputs[outs:])
        self._trains = [~jnp.asarray(each) for each in spec.frozen]
        self._context = Context(dict(zip(self._owners, self._trains, strict=False)))
        numbers = [{place_of[i] for i in own} for own in spec.owned]
        first, postponed = schedule.postponed(dict(zip(self._owners[:-1], numbers, strict=False)))
        self._of_groups = [
            schedule._replace(tasks=postponed.get(guard, ()), outputs=[*itertools.islice(left, len(own))])
            for guard, own in zip(self._owners, spec.owned, strict=True)
        ]
        kept = set[int]().union(*(each.read_numbers for each in self._of_groups))
        after: dict[int, Any] = {}
        stored: list[Values] = []

        def run(values: Values) -> list[Any]:
            after.update(first.run_tasks(values, self._context, kept))
            found = read_all(schedule.outputs[:outs], values, self._context, schedule.program)
            stored.append(values)
            return [*found, *after.values(), *values.arrays]

        found = evaluate(run, Values(dense.inputs), outs)
        self.value = dense.traced.result([*found[:outs], *[None] * len(dense.leaves)])[0]
        after = dict(zip(after, found[outs:], strict=False))
        self._values = stored[0].with_arrays(found[outs + len(after) :])
        self.frozen = [
            functools.reduce(jnp.logical_or, (after[number] for number in own if number in after), is_frozen)
            for is_frozen, own in zip([*spec.frozen, False], numbers, strict=True)
        ]

    def of_group(self, n: int) -> dict[int, Any]:
        """The gradient of what a group owns of its leaves, computed here; the rest has the number after the last."""
        from optax_freeze._program.from_host import evaluate
        from optax_freeze._program.tasks import copied

        schedule, context, found = self._of_groups[n], self._context.inside(self._owners[n]), {}
        values = copied(schedule.tasks, self._values, schedule.outputs)
        grads = evaluate(lambda values: schedule.run(values, context), values)
        for (i, selection), grad in zip(self._spec.owned[n].items(), grads, strict=True):
            leaf = self._dense.values[i]
            grad = jax.tree.unflatten(jax.tree.structure(leaf), [grad])
            found[i] = as_part(selection, leaf, grad)
        return found

    def tree(self) -> PyTree:
        """The gradient of all leaves, with zeros for frozen groups."""
        from optax_freeze._program.tasks import if_

        found = [MASKED_NODE] * len(self._dense.values)
        for n, own in enumerate(self._spec.selections):
            run = functools.partial(self.of_group, n)
            grads = if_(self._trains[n], run) if n < len(self._trains) else run()
            for i, grad in grads.items():
                found[i] = _joined(found[i], grad, own[i], self._dense.values[i])
        return jax.tree.unflatten(self._dense.treedef, found)


def _joined(others: Any, grad: Any, selection: Selection, value: Any) -> Any:
    """The gradient of a leaf with that of a group put to what other groups own."""
    if selection is TRAINABLE or isinstance(value, Part):
        return grad
    if _tree.is_masked_node(others):
        return selection.spread(grad, jnp.zeros((), grad.dtype), value) if isinstance(grad, Part) else grad
    return selection.put(others, grad)


def gradient_of_groups(
    fun: Callable[..., Any], spec: GroupSpec, params: PyTree, has_aux: bool, holomorphic: bool = False
) -> GradientOfGroups | None:
    """The gradient of ``fun(params)`` for each group; None if the function cannot be traced."""
    _refuse_constant_rows(spec, params)
    plan = make_plan(params, spec.spec_of_set(()))
    could_train = [leaf.inexact for leaf in plan.leaves]  # not an object in a group of `optax.partition`
    own = [[s if could else FROZEN for s, could in zip(its, could_train, strict=True)] for its in spec.selections]
    spec = dataclasses.replace(spec, selections=tuple(map(tuple, own)))
    dense = DenseGradient(fun, plan, params, has_aux, holomorphic)
    return GradientOfGroups(dense, spec) if dense.trace() else None


def value_and_grad_of_groups(
    fun: Callable[..., Any], spec: GroupSpec, params: PyTree, has_aux: bool, holomorphic: bool
) -> tuple[Any, PyTree]:
    """The value of ``fun(params)`` and the gradient of the groups that are trainable now, with zeros for the others."""
    if spec.is_known:
        _refuse_constant_rows(spec, params)
        plan, (values, treedef) = make_plan(params, spec.spec_of_set(spec.frozen)), _tree.flatten(params)
        if plan.all_frozen:
            value, grads = fun(params), [MASKED_NODE] * len(values)
        else:
            value, tree = value_and_grad_of_plan(fun, plan, params, has_aux, holomorphic)
            grads = _tree.flatten(tree)[0]
        return value, jax.tree.unflatten(treedef, map(_full, plan.leaves, plan.selections, values, grads))
    found = gradient_of_groups(fun, spec, params, has_aux, holomorphic)
    if found is not None:
        return found.value, found.tree()
    plan = make_plan(params, spec.spec_of_set(()))
    value, grads = value_and_grad_of_plan(fun, plan, params, has_aux, holomorphic)
    values, treedef = _tree.flatten(grads)
    return value, jax.tree.unflatten(treedef, zeroed(values, spec.frozen, spec.selections))


def _refuse_constant_rows(spec: GroupSpec, params: PyTree) -> None:
    """A ``ValueError`` if rows of groups are constants: the gradient of those that begin to train would be zero."""
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params)):
        return
    for leaf, own in zip(spec.leaves, spec.owners, strict=True):
        if any(isinstance(its, DynamicRowIndex) and is_concrete(its.array) for its in own.values()):
            raise value_error(
                "the rows of the groups are a constant of the program",
                at=leaf.path,
                got="fz.spec_of(state) of a state that is not an argument of the program",
                expected="rows read from the optimizer state, which is an argument of the program",
                fix="pass the state to the jitted function and call fz.spec_of(state) inside it",
            )


def _full(leaf: Leaf, selection: Selection, value: Any, grad: Any) -> Any:
    """Expands the gradient of a leaf to the leaf's shape."""
    if not leaf.inexact:
        return grad
    if selection is FROZEN:
        return jax.tree.map(lambda x: jnp.where(True, jnp.zeros((), jnp.result_type(x)), x), value)
    if isinstance(grad, Part) and not isinstance(value, Part):
        zero = jnp.zeros((), grad.dtype)
        return jnp.where(True, selection.spread(grad, zero, value), value)
    return grad
