"""Differentiates functions with respect to the trainable parameters only.

``jax.grad`` of the full tree computes a gradient for every leaf, and the compiler cannot remove the work for frozen
ones if anything reads it, such as a global norm. The functions in this file never request gradients
of frozen parameters. Specs of whole leaves need nothing but ``jax.value_and_grad``.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax
import optax

from optax_freeze._errors import described, type_error
from optax_freeze._gradient.argnums import of_parameters, refuse_several
from optax_freeze._gradient.dense_gradient import value_and_grad_of_plan
from optax_freeze._gradient.group_gradients import value_and_grad_of_groups
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.group_spec import GroupSpec
from optax_freeze._spec.masks import ElementMask
from optax_freeze._spec.partition import split
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.restricted import restricts
from optax_freeze._spec.selector_algebra import Selector
from optax_freeze._spec.tree import Part, PyTree

P = ParamSpec("P")
T = TypeVar("T")
Aux = TypeVar("Aux")
Tree = TypeVar("Tree", bound=Any)  # with the bound `object`, type checkers would give lambda arguments that type


@restricts
def restrict(fun: Callable[P, T], rest: PyTree) -> Callable[P, T]:
    """Turns a function of all parameters into a function of the trainable parameters.

    Frozen parameters are constants of the returned function, so they are not differentiated. The gradient of a leaf
    frozen by rows has the size of its trainable rows. The leaf is assembled where it is read: in a loop over its rows
    one row at a time, elsewhere as one copy, which ``fz.value_and_grad`` of the full parameters does not need. For
    such leaves ``fun`` is traced first, which executes nothing, so callbacks and other effects happen once, as under
    ``jax.grad``. If ``fun`` needs a value while it is traced (Python branches on it), it is called with whole leaves.

    Args:
      fun: the function, called as ``fun(params, *args, **kwargs)``.
      rest: the second output of :func:`optax_freeze.partition`, which holds the frozen parameters.

    Returns:
      A function ``g(trainable, *args, **kwargs)`` that is equal to ``fun(combine(trainable, rest), *args, **kwargs)``,
      up to rounding where a sum over rows is computed in two parts.

    Raises:
      TypeError: if ``fun`` is not a function, or ``rest`` is a spec.

    Example:
      >>> import optax_freeze as fz
      >>> loss = lambda params, x: (params["encoder"] * params["head"] * x) ** 2
      >>> params = {"encoder": jax.numpy.float32(2), "head": jax.numpy.float32(3)}
      >>> trainable, rest = fz.partition(params, "encoder")
      >>> jax.grad(fz.restrict(loss, rest))(trainable, 1.0)
      {'encoder': MaskedNode(), 'head': Array(24., dtype=float32)}
    """
    is_of_spec = lambda node: isinstance(node, ElementMask | Selector)  # noqa: E731
    if isinstance(rest, (bool, str)) or any(map(is_of_spec, jax.tree.leaves(rest, is_of_spec))) or not callable(fun):
        raise type_error(
            "fz.restrict takes a function and the second output of fz.partition",
            at="its arguments",
            got=f"{described(fun)} and {described(rest)}",
            expected="fz.restrict(fun, rest), with rest from fz.partition(params, frozen)",
            fix="trainable, rest = fz.partition(params, frozen); or pass the spec to fz.grad(fun, frozen)",
        )

    return functools.wraps(fun)(_restricted(fun, rest))


@overload
def value_and_grad(
    fun: Callable[Concatenate[Tree, P], T],
    frozen: Spec,
    argnums: Literal[0] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
) -> Callable[Concatenate[Tree, P], tuple[T, Tree]]: ...
@overload
def value_and_grad(
    fun: Callable[P, T], frozen: Spec, argnums: int = 0, has_aux: bool = False, *, holomorphic: bool = False
) -> Callable[P, tuple[T, PyTree]]: ...
def value_and_grad(
    fun: Callable[..., Any], frozen: Spec, argnums: int = 0, has_aux: bool = False, *, holomorphic: bool = False
) -> Callable[..., tuple[Any, PyTree]]:
    """Like ``jax.value_and_grad``, but differentiates only with respect to the trainable parameters.

    If ``frozen`` is the spec of a :func:`optax_freeze.freeze_when` state (from :func:`optax_freeze.spec_of`), only the
    groups that are trainable at this step are differentiated: each operation of the gradient is evaluated if a group
    that needs it is trainable. Gradients of frozen groups are zeros.

    Args:
      fun: the function to differentiate. It returns a scalar, or a pair of a scalar and auxiliary data if ``has_aux``.
      frozen: the spec of the frozen parameters, in any form.
      argnums: the position of the parameters among the arguments of ``fun``.
      has_aux: whether ``fun`` returns a pair.
      holomorphic: as in ``jax.value_and_grad``.

    Returns:
      A function with the arguments of ``fun``, called with the full tree of parameters. It returns the value (with the
      auxiliary data, if any) and the gradient, which has the structure of ``partition(params, frozen)[0]``, with
      ``optax.MaskedNode()`` for frozen leaves. :func:`optax_freeze.freeze` and every Optax transformation accept it.

    Raises:
      TypeError: if ``fun`` is not a function.
      ValueError: if ``argnums`` is not a single int; when called, if ``argnums`` is out of range, if the spec does not
        fit the parameters, or if every parameter is frozen.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jax.numpy.float32(2), "head": jax.numpy.float32(3)}
      >>> value, grads = fz.value_and_grad(lambda p: p["encoder"] * p["head"], "encoder")(params)
      >>> float(value), grads
      (6.0, {'encoder': MaskedNode(), 'head': Array(2., dtype=float32)})
    """
    refuse_no_function(fun, frozen, "fz.value_and_grad(fun, frozen)")
    refuse_several(argnums)

    @functools.wraps(fun)
    def value_and_grad_fn(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        of_params, params = of_parameters(fun, argnums, args, kwargs)
        if isinstance(frozen, GroupSpec):
            return value_and_grad_of_groups(of_params, frozen, params, has_aux, holomorphic)
        return value_and_grad_of_plan(of_params, plan_of(params, frozen), params, has_aux, holomorphic)

    return value_and_grad_fn


@overload
def grad(
    fun: Callable[Concatenate[Tree, P], Any],
    frozen: Spec,
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    *,
    holomorphic: bool = False,
) -> Callable[Concatenate[Tree, P], Tree]: ...
@overload
def grad(
    fun: Callable[Concatenate[Tree, P], tuple[Any, Aux]],
    frozen: Spec,
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    holomorphic: bool = False,
) -> Callable[Concatenate[Tree, P], tuple[Tree, Aux]]: ...
@overload
def grad(
    fun: Callable[P, Any], frozen: Spec, argnums: int = 0, has_aux: bool = False, *, holomorphic: bool = False
) -> Callable[P, Any]: ...
def grad(
    fun: Callable[..., Any], frozen: Spec, argnums: int = 0, has_aux: bool = False, *, holomorphic: bool = False
) -> Callable[..., Any]:
    """Like ``jax.grad``, but differentiates only with respect to the trainable parameters.

    Args:
      fun: the function to differentiate. It returns a scalar, or a pair of a scalar and auxiliary data if ``has_aux``.
      frozen: the spec of the frozen parameters, in any form.
      argnums: the position of the parameters among the arguments of ``fun``.
      has_aux: whether ``fun`` returns a pair.
      holomorphic: as in ``jax.grad``.

    Returns:
      A function with the arguments of ``fun``, called with the full tree of parameters. It returns the gradient as
      :func:`value_and_grad` does, or ``(gradient, aux)`` if ``has_aux``.

    Raises:
      TypeError, ValueError: in the same cases as :func:`value_and_grad`.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jax.numpy.float32(2), "head": jax.numpy.float32(3)}
      >>> fz.grad(lambda p: p["encoder"] * p["head"], "encoder")(params)
      {'encoder': MaskedNode(), 'head': Array(2., dtype=float32)}
    """
    both = value_and_grad(fun, frozen, argnums, has_aux, holomorphic=holomorphic)

    @functools.wraps(fun)
    def grad_fn(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fn


def value_and_grad_from_state(
    fun: Callable[Concatenate[Tree, ...], Any], frozen: Spec
) -> Callable[Concatenate[Tree, ...], tuple[Any, Tree]]:
    """Like ``optax.value_and_grad_from_state``, but differentiates only with respect to the trainable parameters.

    The returned function reuses the value and the gradient that a line search stored in its state.

    Args:
      fun: the function to differentiate, called as ``fun(params, *args, **kwargs)``. It returns a scalar.
      frozen: the spec of the frozen parameters, in any form; the same that was passed to :func:`optax_freeze.freeze`.

    Returns:
      A function called as ``(params, *args, state=state, **kwargs)``, with the full tree of parameters and the state of
      :func:`optax_freeze.freeze` around a line search. It returns the value and the gradient, which has the structure
      of ``partition(params, frozen)[0]``.

    Raises:
      TypeError: if ``fun`` is not a function.
      ValueError: if the spec does not fit the parameters, if every parameter is frozen, or if the state contains no
        value and gradient.

    Example:
      >>> import optax_freeze as fz
      >>> loss = lambda params: (params["encoder"] * params["head"] - 1.0) ** 2
      >>> params = {"encoder": jax.numpy.float32(2), "head": jax.numpy.float32(3)}
      >>> state = fz.freeze(optax.lbfgs(), "encoder").init(params)
      >>> fz.value_and_grad_from_state(loss, "encoder")(params, state=state)[1]
      {'encoder': MaskedNode(), 'head': Array(20., dtype=float32)}
    """
    refuse_no_function(fun, frozen, "fz.value_and_grad_from_state(fun, frozen)")

    @functools.wraps(fun)
    def value_and_grad_fn(params: Tree, /, *args: Any, state: Any, **kwargs: Any) -> tuple[Any, Any]:
        plan = plan_of(params, frozen)
        values, treedef = plan.align(params, "params")
        restricted, stored = _restricted(fun, split(params, plan)[1]), optax.tree.get(state, "grad")
        # In the state of NNX variables a hole, or a vector, stands in place of its variable.
        structure = treedef if stored is None else _tree.flatten(stored)[1]

        def as_stored(trainable: PyTree, *args: Any, **kwargs: Any) -> Any:
            return restricted(jax.tree.unflatten(treedef, _tree.flatten(trainable)[0]), *args, **kwargs)

        # Optax also returns the gradient in the state, which has arrays, or parts without a source.
        trainable = plan.trainable_leaves(values)
        if any(isinstance(node, Part) for node in _tree.flatten(state)[0]):
            trainable = dict(enumerate(plan.parts_of(plan.full(trainable))))
        trainable = jax.tree.unflatten(structure, plan.full(trainable))
        value, grads = optax.value_and_grad_from_state(as_stored)(trainable, *args, state=state, **kwargs)
        grads = plan.with_sources(plan.parts_of(_tree.flatten(grads)[0]), values)
        return value, jax.tree.unflatten(treedef, grads)

    return value_and_grad_fn


def _restricted(fun: Callable[..., T], rest: PyTree) -> Callable[..., T]:
    """:func:`restrict` without checks."""

    def restricted(trainable: PyTree, /, *args: Any, **kwargs: Any) -> T:
        from optax_freeze._gradient.restricted_call import call_restricted  # loads jax.extend: slow

        return call_restricted(lambda params: fun(params, *args, **kwargs), trainable, rest)

    return restricted


def refuse_no_function(fun: Any, frozen: Any, call: str) -> None:
    """Raises ``TypeError`` unless ``fun`` is a function."""
    if not callable(fun):
        what, at = "the first argument must be a function", "the first argument"
        fix = "swap the arguments" if callable(frozen) else "pass the loss function first"
        raise type_error(what, at=at, got=described(fun), expected=call, fix=fix)


def plan_of(params: PyTree, frozen: Spec) -> Plan:
    """The plan of a spec; a ``ValueError`` if nothing trains."""
    plan = make_plan(params, frozen)
    plan.refuse_all_frozen("there is nothing to differentiate", frozen)
    return plan
