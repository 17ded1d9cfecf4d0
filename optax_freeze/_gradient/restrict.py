"""The loss as a function of the trainable parameters.

``jax.grad`` of the whole tree computes a gradient for every leaf, and as soon as anything looks at all of them (a
global norm, an accumulator, a finite check, a ``jit`` boundary) the compiler has to keep that work. A loss restricted
to the trainable parameters has no other gradients, neither of whole leaves nor of frozen rows.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax
import optax

from optax_freeze._errors import described, is_int, type_error, value_error, whole_number
from optax_freeze._gradient.groups_now import GroupsNow, value_and_grad_of_groups
from optax_freeze._gradient.in_parts import call_in_parts
from optax_freeze._spec.partition import split
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.selector_algebra import Selector
from optax_freeze._spec.tree import PyTree

P = ParamSpec("P")
T = TypeVar("T")
Aux = TypeVar("Aux")
Tree = TypeVar("Tree", bound=Any)  # not `object`, which would be the type of the argument of a lambda


def restrict(fun: Callable[P, T], rest: PyTree) -> Callable[P, T]:
    """Restricts a function of the parameters to the trainable parameters.

    Frozen parameters are not differentiated. The gradient of a leaf frozen by rows has the size of the trainable rows,
    as long as the operations of ``fun`` allow it (:func:`optax_freeze.explain`); other operations get the merged array.
    For such leaves ``fun`` is traced first, which executes nothing: callbacks and other effects happen once, as under
    ``jax.grad``. If it cannot be traced (Python branches on a value), it is called again, with merged arrays.

    Args:
      fun: called as ``fun(params, *args, **kwargs)``.
      rest: the second part of :func:`optax_freeze.partition`.

    Returns:
      ``g(trainable, *args, **kwargs)``, equal to ``fun(combine(trainable, rest), *args, **kwargs)``, up to rounding
      where a sum over rows is split.

    Raises:
      TypeError: if the first argument is not a function, or the second is a spec.

    Example:
      >>> import optax_freeze as fz
      >>> loss = lambda params, x: (params["encoder"] * params["head"] * x) ** 2
      >>> params = {"encoder": jax.numpy.float32(2), "head": jax.numpy.float32(3)}
      >>> trainable, rest = fz.partition(params, "encoder")
      >>> jax.grad(fz.restrict(loss, rest))(trainable, 1.0)
      {'encoder': MaskedNode(), 'head': Array(24., dtype=float32)}
    """
    if isinstance(rest, (bool, str, Selector)) or not callable(fun):
        raise type_error(
            "fz.restrict takes a function, and the rest of the parameters",
            at="its arguments",
            got=f"{described(fun)} and {described(rest)}",
            expected="fz.restrict(fun, rest), with rest from fz.partition(params, frozen)",
            fix="trainable, rest = fz.partition(params, frozen); from the spec itself: fz.grad(fun, frozen)",
        )

    return functools.wraps(fun)(_restricted(fun, rest, whole=False))


@overload
def value_and_grad(
    fun: Callable[Concatenate[Tree, P], T],
    frozen: Spec,
    argnums: Literal[0] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    branches: int = 16,
) -> Callable[Concatenate[Tree, P], tuple[T, Tree]]: ...
@overload
def value_and_grad(
    fun: Callable[P, T],
    frozen: Spec,
    argnums: int = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    branches: int = 16,
) -> Callable[P, tuple[T, PyTree]]: ...
def value_and_grad(
    fun: Callable[..., Any],
    frozen: Spec,
    argnums: int = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    branches: int = 16,
) -> Callable[..., tuple[Any, PyTree]]:
    """``jax.value_and_grad`` with respect to the trainable parameters.

    With the spec of a :func:`optax_freeze.freeze_when` state (:func:`optax_freeze.spec_of`), the groups that train now
    are differentiated: for each set of groups that can be frozen together there is a program, and the state chooses
    between them in the running step. Gradients of frozen groups are zeros.

    Args:
      fun: the function to differentiate; returns a scalar, or a pair of a scalar and anything if ``has_aux``.
      frozen: what is frozen of the parameters, in any form.
      argnums: the position of the parameters among the arguments.
      has_aux: whether ``fun`` returns a pair.
      holomorphic: as in JAX.
      branches: the most programs there may be for the groups of ``freeze_when``. Where more sets of frozen groups can
        occur, some of them are differentiated with groups that do not train now.

    Returns:
      A function with the arguments of ``fun``, called with the full tree. It returns the value (with the auxiliary
      output, if any) and the gradient, which has the structure of ``partition(params, frozen)[0]``: holes at what is
      frozen. :func:`optax_freeze.freeze` and every Optax transformation take it as it is.

    Raises:
      TypeError: if ``fun`` is not a function.
      ValueError: if ``argnums`` is not a single int; when called, if there is no such argument, if the spec does not
        fit, or if every parameter is frozen.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jax.numpy.float32(2), "head": jax.numpy.float32(3)}
      >>> value, grads = fz.value_and_grad(lambda p: p["encoder"] * p["head"], "encoder")(params)
      >>> float(value), grads
      (6.0, {'encoder': MaskedNode(), 'head': Array(2., dtype=float32)})
    """
    refuse_no_function(fun, frozen, "fz.value_and_grad(fun, frozen)")
    if not is_int(argnums):
        raise value_error(
            "one argument can be differentiated with respect to",
            at="argnums",
            got=described(argnums),
            expected="one int: the position of the parameters",
            fix="put the trees into one tree, such as a dict, and freeze parts of it by path",
        )

    most = whole_number("branches counts programs", branches, at="branches", least=1, fix="give branches=16")

    @functools.wraps(fun)
    def value_and_grad_fn(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        if not -len(args) <= argnums < len(args):
            raise value_error(
                "there is no such argument",
                at=f"argnums={argnums}",
                got=f"a call with {len(args)} positional arguments",
                expected="the parameters at that position",
                fix="pass the parameters by position, not by keyword",
            )
        i = argnums % len(args)
        if isinstance(frozen, GroupsNow):
            return value_and_grad_of_groups(
                lambda spec: value_and_grad(fun, spec, argnums, has_aux, holomorphic=holomorphic)(*args, **kwargs),
                lambda: fun(*args, **kwargs),
                frozen,
                make_plan,
                args[i],
                most,
            )
        trainable, rest = split(args[i], _something_trains(args[i], frozen))

        def of_params(params: PyTree, /, *others: Any, **kwargs: Any) -> Any:
            with_params: Any = (*others[:i], params, *others[i:])
            return fun(*with_params, **kwargs)

        restricted = _restricted(of_params if i else fun, rest, whole=True)
        at_params = jax.value_and_grad(restricted, has_aux=has_aux, holomorphic=holomorphic)
        return at_params(trainable, *args[:i], *args[i + 1 :], **kwargs)

    return value_and_grad_fn


@overload
def grad(
    fun: Callable[Concatenate[Tree, P], Any],
    frozen: Spec,
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    *,
    holomorphic: bool = False,
    branches: int = 16,
) -> Callable[Concatenate[Tree, P], Tree]: ...
@overload
def grad(
    fun: Callable[Concatenate[Tree, P], tuple[Any, Aux]],
    frozen: Spec,
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    holomorphic: bool = False,
    branches: int = 16,
) -> Callable[Concatenate[Tree, P], tuple[Tree, Aux]]: ...
@overload
def grad(
    fun: Callable[P, Any],
    frozen: Spec,
    argnums: int = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    branches: int = 16,
) -> Callable[P, Any]: ...
def grad(
    fun: Callable[..., Any],
    frozen: Spec,
    argnums: int = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    branches: int = 16,
) -> Callable[..., Any]:
    """``jax.grad`` with respect to the trainable parameters: :func:`value_and_grad` without the value.

    Args:
      fun: the function to differentiate; returns a scalar, or a pair of a scalar and anything if ``has_aux``.
      frozen: what is frozen of the parameters, in any form.
      argnums: the position of the parameters among the arguments.
      has_aux: whether ``fun`` returns a pair.
      holomorphic: as in JAX.
      branches: the most programs there may be for the groups of ``freeze_when``.

    Returns:
      A function with the arguments of ``fun`` that returns the gradient, or ``(gradient, aux)`` if ``has_aux``.

    Raises:
      TypeError, ValueError: as :func:`value_and_grad` does.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jax.numpy.float32(2), "head": jax.numpy.float32(3)}
      >>> fz.grad(lambda p: p["encoder"] * p["head"], "encoder")(params)
      {'encoder': MaskedNode(), 'head': Array(2., dtype=float32)}
    """
    both = value_and_grad(fun, frozen, argnums, has_aux, holomorphic=holomorphic, branches=branches)

    @functools.wraps(fun)
    def grad_fn(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fn


def value_and_grad_from_state(
    fun: Callable[Concatenate[Tree, ...], Any], frozen: Spec
) -> Callable[Concatenate[Tree, ...], tuple[Any, Tree]]:
    """``optax.value_and_grad_from_state`` of the trainable parameters: reuses a line search's last value and gradient.

    Args:
      fun: called as ``fun(params, *args, **kwargs)``; returns a scalar.
      frozen: what is frozen, in any form: the one given to :func:`optax_freeze.freeze`.

    Returns:
      A function called as ``(params, *args, state=state, **kwargs)`` with the full tree and the state of a
      :func:`optax_freeze.freeze` around a line search. It returns the value and the gradient of the trainable part.

    Raises:
      TypeError: if ``fun`` is not a function.
      ValueError: if the spec does not fit, if every parameter is frozen, or if the state has no value and gradient.

    Example:
      >>> import optax_freeze as fz
      >>> def loss(params):
      ...   return (params["encoder"] * params["head"] - 1.0) ** 2
      >>> params = {"encoder": jax.numpy.float32(2), "head": jax.numpy.float32(3)}
      >>> tx = fz.freeze(optax.lbfgs(), "encoder")
      >>> state = tx.init(params)
      >>> value_and_grad = fz.value_and_grad_from_state(loss, "encoder")
      >>> for _ in range(3):
      ...   value, grads = value_and_grad(params, state=state)
      ...   updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss)
      ...   params = optax.apply_updates(params, updates)
      >>> print(f"{params['encoder']:.1f} {params['head']:.1f}")
      2.0 0.5
    """
    refuse_no_function(fun, frozen, "fz.value_and_grad_from_state(fun, frozen)")

    @functools.wraps(fun)
    def value_and_grad_fn(params: Tree, /, *args: Any, state: Any, **kwargs: Any) -> tuple[Any, Any]:
        trainable, rest = split(params, _something_trains(params, frozen))
        return optax.value_and_grad_from_state(_restricted(fun, rest, whole=True))(
            trainable, *args, state=state, **kwargs
        )

    return value_and_grad_fn


def _restricted(fun: Callable[..., T], rest: PyTree, whole: bool) -> Callable[..., T]:
    """:func:`restrict`; ``whole`` if the function is called with the trainable part of the same parameters."""

    def restricted(trainable: PyTree, /, *args: Any, **kwargs: Any) -> T:
        return call_in_parts(fun, trainable, rest, args, kwargs, whole=whole)

    return restricted


def refuse_no_function(fun: Any, frozen: Any, call: str) -> None:
    """A ``TypeError`` unless ``fun`` is a function."""
    if not callable(fun):
        raise type_error(
            "a function is differentiated",
            at="the first argument",
            got=described(fun),
            expected=call,
            fix="swap the arguments" if callable(frozen) else "pass the loss function first",
        )


def _something_trains(params: PyTree, frozen: Spec) -> Plan:
    plan = make_plan(params, frozen)
    plan.refuse_all_frozen("there is nothing to differentiate", frozen)
    return plan
