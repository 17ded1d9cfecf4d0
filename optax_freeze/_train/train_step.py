"""Builds a whole training step, in which the gradient of a group is computed where the group is updated."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import optax

from optax_freeze._errors import described, in_one_line, type_error, value_error
from optax_freeze._gradient.argnums import parameters_first, refuse_several
from optax_freeze._gradient.grad import refuse_no_function, value_and_grad
from optax_freeze._gradient.group_gradients import gradient_of_groups
from optax_freeze._optimizer.transformation import Update, as_transformation
from optax_freeze._optimizer.update_params import succeeds, update_params, with_zeros
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.group_spec import GroupSpec
from optax_freeze._spec.tree import Part, PyTree
from optax_freeze._state.own_states import states_in
from optax_freeze._state.spec_of import spec_of
from optax_freeze._train.batch_rows import refuse_no_functions, with_rows_of

_CALL = "fz.train_step(loss, tx)"
_EXTRA_ARGS = ("value", "grad", "value_fn", "obj_fn", "grad_fn")
_KINDS = ("value",), ("obj_fn",), ("grad_fn",), ("value", "grad", "value_fn")  # what Optax's optimizers need


def train_step(
    loss: Callable[..., Any],
    tx: optax.GradientTransformation | optax.MultiSteps,
    has_aux: bool = False,
    *,
    argnums: int = 0,
    extra_args: Sequence[str] = (),
    rows: Mapping[Any, Callable[..., Any]] | None = None,
) -> Callable[..., tuple[PyTree, PyTree, Any]]:
    """Creates a training step that computes the gradients of the trainable parameters and updates them in place.

    The step calls :func:`optax_freeze.value_and_grad` with ``fz.spec_of(state)``, then
    :func:`optax_freeze.update_params`. With :func:`optax_freeze.freeze_when`, any set of frozen groups costs about as
    much as a step compiled for this set alone: gradients of frozen groups are not computed, written or read, and what
    only one group needs is computed where the group is updated.

    Args:
      loss: the function to differentiate, called as ``loss(params, *args, **kwargs)``, or with the parameters at
        ``argnums``. It returns a scalar, or with ``has_aux`` a pair of a scalar and anything.
      tx: :func:`optax_freeze.freeze_when` or :func:`optax_freeze.freeze`, alone or inside another transformation.
      has_aux: whether ``loss`` returns a pair.
      argnums: the position of the parameters among the arguments of ``loss``.
      extra_args: the names of extra arguments that the update of ``tx`` takes: ``"value"`` (the loss), ``"grad"``,
        ``"value_fn"`` or ``"obj_fn"`` (the loss as a function of the parameters), ``"grad_fn"`` (its gradient). Line
        searches such as L-BFGS take the first three.
      rows: for tables of which a batch reads few rows, a mapping from patterns of leaves with
        ``~fz.rows(array, keep_state=True)`` to functions of the batch, ``fn(*args, **kwargs)``, which return the row
        numbers that the loss reads: integers of any shape. Negative ones count from the end, those out of range are no
        rows, and equal ones are one row. These rows train in this step. Other leaves with such rows train in those of
        the state.

    Returns:
      A function ``(params, state, *args, **kwargs) -> (params, state, value)``, where ``value`` is the result of
      ``loss`` and ``args`` are its other arguments in their order. Donate the first two arguments.

    Raises:
      TypeError: if ``loss`` is not a function, ``tx`` is not an optimizer, or ``extra_args`` is a single string.
      ValueError: if ``argnums`` is not a single int, or ``extra_args`` contains another name; when the step is called,
        if ``argnums`` is out of range, if a batch may have more rows than the spec or ``rows`` matches no such leaf,
        and the errors of the functions above.

    Example:
      >>> import jax, jax.numpy as jnp, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> tx = fz.freeze_when(optax.sgd(0.5), {"encoder": fz.unfreeze_at(2)})
      >>> loss = lambda params, x: x @ (params["encoder"] + params["head"])
      >>> step = jax.jit(fz.train_step(loss, tx), donate_argnums=(0, 1))
      >>> params, state, value = step(params, tx.init(params), jnp.ones(2))
      >>> params, float(value)
      ({'encoder': Array([1., 1.], dtype=float32), 'head': Array([0.5, 0.5], dtype=float32)}, 4.0)
    """
    refuse_no_function(loss, tx, _CALL)
    refuse_several(argnums)
    _refuse_unknown(extra_args)
    if rows is not None:
        refuse_no_functions(rows)
    of_params_first = parameters_first(loss, argnums)
    update = as_transformation(tx, _CALL, other=loss).update
    of_groups = update.of_groups if isinstance(update, Update) else None

    def step(params: PyTree, state: PyTree, *args: Any, **kwargs: Any) -> tuple[PyTree, PyTree, Any]:
        of_params = lambda params: of_params_first(params, *args, **kwargs)  # noqa: E731
        with _saying_what_was_passed(params, state):
            state = state if rows is None else with_rows_of(state, rows, *args, **kwargs)
            spec, found = spec_of(state), None
            if isinstance(spec, GroupSpec) and not spec.is_known and of_groups is not None:
                found = gradient_of_groups(of_params, spec, params, has_aux)
            gradient = value_and_grad(of_params, spec, has_aux=has_aux)
            value, grads = gradient(params) if found is None else (found.value, None)
        value_fn = (lambda params: of_params(params)[0]) if has_aux else of_params
        known = {
            "value": value[0] if has_aux else value,
            "value_fn": value_fn,
            "obj_fn": value_fn,
            "grad_fn": lambda params, *_: gradient(params)[1],
        }

        def update_with(names: Sequence[str], grads: PyTree) -> tuple[PyTree, PyTree]:
            given = {name: grads if name == "grad" else known[name] for name in names}
            if found is not None and of_groups is not None:
                return of_groups(found, state, params, given)
            return update_params(tx, grads, state, params, **given)

        try:
            new, new_state = update_with(extra_args, grads)
        except (TypeError, ValueError) as error:
            full = grads if found is not None else with_zeros(grads, params)
            _refuse_missing_names(error, extra_args, lambda names: update_with(names, full))
            _refuse_dropped(extra_args, error)
            raise
        return new, new_state, value

    return step


@contextlib.contextmanager
def _saying_what_was_passed(params: PyTree, state: PyTree) -> Iterator[None]:
    """Says so where a step fails since it was given other trees than the parameters and the state."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        if not any(_tree.is_masked_node(leaf) or isinstance(leaf, Part) for leaf in _tree.flatten(params)[0]):
            raise
        raise type_error(
            "only the trainable part of the parameters",
            at="step",
            got=f"the first output of fz.partition, with which the loss fails: {in_one_line(error)}",
            expected="step(params, state, *args), with all parameters",
            fix="params = fz.combine(trainable, rest); state = tx.init(params)",
        ) from error
    except ValueError as error:
        if not states_in(params):
            raise
        what, got = "a whole training state as the parameters", "a state of an optimizer in the parameters"
        fix = "step(state.params, state.opt_state, *args)"
        if not states_in(state):  # the parameters, or a batch
            what, got = "the parameters and the state are swapped", "a state of an optimizer as the first argument"
            fix = "swap the first two arguments"
        raise value_error(what, at="step", got=got, expected="step(params, state, *args)", fix=fix) from error


def _refuse_missing_names(error: Exception, given: Sequence[str], update: Callable[[Sequence[str]], Any]) -> None:
    """Raises if the update that failed succeeds with more extra arguments."""
    if succeeds(lambda: update(given)):  # with other gradients than those that failed
        return
    for kinds in (*itertools.combinations(_KINDS, 1), *itertools.combinations(_KINDS, 2)):
        names = [name for name in _EXTRA_ARGS if name in {*given}.union(*kinds)]
        if len(names) > len({*given}) and succeeds(lambda names=names: update(names)):
            raise (type_error if isinstance(error, TypeError) else value_error)(
                "the optimizer takes extra arguments",
                at="extra_args",
                got=f"{list(given)}: {in_one_line(error)}",
                expected="the names of all that its update needs",
                fix=f"fz.train_step(loss, tx, extra_args={names})",
            ) from error


def _refuse_dropped(extra_args: Sequence[str], error: Exception) -> None:
    """A ``TypeError`` if an optimizer misses extra arguments that are given: something around it drops them."""
    text = in_one_line(error)
    dropped = [name for name in extra_args if "required keyword-only argument" in text and repr(name) in text]
    if dropped:
        raise type_error(
            "an optimizer in a wrapper does not get the extra arguments",
            at="update",
            got=f"{', '.join(dropped)}, which the wrapper does not pass on: {text}",
            expected="a wrapper whose update passes **extra_args to the optimizer in it",
            fix="remove the wrapper; for complex parameters, instead of split_real_and_imaginary around a line search, "
            "keep real and imaginary parts as two leaves",
        ) from error


def _refuse_unknown(extra_args: Sequence[str]) -> None:
    fix = 'extra_args=["value", "grad", "value_fn"]; for others, call fz.value_and_grad and fz.update_params'
    expected = f"names out of {', '.join(_EXTRA_ARGS)}"
    if isinstance(extra_args, str) or not isinstance(extra_args, Iterable):
        what = "`extra_args` is not a list of names"
        raise type_error(what, at="extra_args", got=described(extra_args), expected=expected, fix=fix)
    if unknown := [name for name in extra_args if name not in _EXTRA_ARGS]:
        what = "a training step does not know this extra argument"
        raise value_error(what, at="extra_args", got=", ".join(map(repr, unknown)), expected=expected, fix=fix)
