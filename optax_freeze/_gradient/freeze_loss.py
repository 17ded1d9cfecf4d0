"""Freezes parameters in a loss that somebody else differentiates, such as a trainer: :func:`freeze_loss`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.core import Tracer

from optax_freeze._errors import value_error
from optax_freeze._gradient.argnums import of_parameters, refuse_several
from optax_freeze._gradient.grad import plan_of, refuse_no_function
from optax_freeze._spec.group_spec import GroupSpec
from optax_freeze._spec.partition import split
from optax_freeze._spec.resolve import Spec
from optax_freeze._spec.selection import DynamicRowIndex
from optax_freeze._spec.tree import Part, PyTree, flatten

P = ParamSpec("P")
T = TypeVar("T")


def freeze_loss(fun: Callable[P, T], frozen: Spec, argnums: int = 0) -> Callable[P, T]:
    """Wraps a loss so that whoever differentiates it computes only the gradient of the trainable parameters.

    For a trainer with a training step of its own: pass it ``fz.freeze_loss(loss, frozen)`` and
    ``fz.freeze(optimizer, frozen)``. The gradient has the structure of all parameters. It is zero for frozen ones, even
    if that of ``fun`` is NaN, and equal to that of ``fun`` for the others. The zeros are constants of the compiled
    program: a norm or a clip outside of the optimizer sees only trainable parameters and costs no more than theirs.

    Args:
      fun: the function that is differentiated. It may return anything.
      frozen: the spec of the frozen parameters, in any form except dynamic rows and the spec of a
        :func:`optax_freeze.freeze_when` state, which change during training.
      argnums: the position of the parameters among the arguments of ``fun``.

    Returns:
      A function with the arguments and the result of ``fun``. It can be called, transformed and differentiated with
      respect to any arguments like ``fun``; in forward mode, leaves of which rows are frozen are computed as a whole.

    Raises:
      TypeError: if ``fun`` is not a function.
      ValueError: if ``argnums`` is not a single int; when called, if ``argnums`` is out of range, if the spec does not
        fit the parameters, if every parameter is frozen, or if the spec changes during training.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jax.numpy.float32(2), "head": jax.numpy.float32(3)}
      >>> jax.grad(fz.freeze_loss(lambda params: params["encoder"] * params["head"], "encoder"))(params)
      {'encoder': Array(0., dtype=float32), 'head': Array(2., dtype=float32)}
    """
    refuse_no_function(fun, frozen, "fz.freeze_loss(fun, frozen)")
    refuse_several(argnums)

    @functools.wraps(fun)
    def frozen_fn(*args: P.args, **kwargs: P.kwargs) -> T:
        of_params, params = of_parameters(fun, argnums, args, kwargs)
        return call_frozen(of_params, params, frozen)

    return frozen_fn


def call_frozen(fun: Callable[[PyTree], T], params: PyTree, frozen: Spec) -> T:
    """``fun(params)``, with a gradient for the trainable parameters only."""
    from optax_freeze._gradient.leaf_in_rows import with_gradient_set  # loads jax.extend: slow
    from optax_freeze._gradient.restricted_call import call_restricted

    if isinstance(frozen, GroupSpec):
        _refuse_change("the frozen groups change during training", repr(frozen))
    plan = plan_of(params, frozen)
    for leaf, selection in zip(plan.leaves, plan.selections, strict=True):
        if isinstance(selection, DynamicRowIndex):
            _refuse_change("the trainable rows change during training", f"{leaf.path}: a leaf that {selection}")
    trainable, rest = split(params, plan)
    parts, treedef = flatten(trainable)
    for i, (part, leaf) in enumerate(zip(parts, flatten(params)[0], strict=True)):
        selection: Any = plan.selections[i]
        if isinstance(part, Part) and isinstance(leaf, Tracer) and selection.run is None:
            parts[i] = dataclasses.replace(part, values=with_gradient_set(selection, leaf, part.values))
    trainable = treedef.unflatten(parts)
    rest = jax.tree.map(lambda x: jax.lax.stop_gradient(x) if isinstance(x, Tracer) else x, rest)
    return call_restricted(fun, trainable, rest, complete=True)


def _refuse_change(what: str, got: str) -> None:
    """A ``ValueError`` for a spec that only the state of an optimizer knows."""
    raise value_error(
        what,
        at="fz.freeze_loss",
        got=got,
        expected="whole leaves, static rows or elements: a trainer does not pass the optimizer state to the loss",
        fix="in a step of your own, fz.value_and_grad(loss, fz.spec_of(state))",
    )
