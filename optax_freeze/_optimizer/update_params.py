"""Updates parameters in place: the transformation adds its updates itself, without zeros for frozen parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_freeze._errors import described, in_one_line, is_array, type_error, value_error
from optax_freeze._optimizer.apply_updates import apply_updates
from optax_freeze._optimizer.transformation import Update, as_transformation
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.tree import Part, PyTree

_CALL = "fz.update_params(tx, grads, state, params)"


def update_params(
    tx: optax.GradientTransformation | optax.MultiSteps, grads: PyTree, state: PyTree, params: PyTree, **extra_args: Any
) -> tuple[PyTree, PyTree]:
    """Computes updates and applies them, without writing to frozen parameters.

    The new parameters are those of ``optax.apply_updates(params, tx.update(grads, state, params)[0])``, up to the
    rounding of operations that the compiler fuses. With :func:`optax_freeze.freeze_when`, a frozen group is neither
    read nor written. With :func:`optax_freeze.freeze`, a frozen leaf is neither read nor written, and rows are written
    in place, whatever ``full_updates`` is. Donate parameters and state to the jitted step, and frozen parameters are
    not copied either. With any other transformation, including a chain that contains one of these, it calls
    ``tx.update`` and :func:`optax_freeze.apply_updates`.

    Args:
      tx: the optimizer, or an ``optax.MultiSteps``.
      grads: gradients as for ``tx.update``: of all parameters, or of the trainable ones.
      state: the state of ``tx``.
      params: the parameters as given to ``tx.init``: all, or the trainable ones.
      extra_args: extra arguments of ``tx.update``.

    Returns:
      ``(params, state)``: the new parameters, of the structure, shapes and dtypes of ``params``, and the new state.
      If ``tx`` is ``fz.freeze`` or ``fz.freeze_when``, frozen parameters keep every bit; inside another transformation
      all but denormals and signalling NaNs, unless their updates are ``optax.MaskedNode()``.

    Raises:
      TypeError: if ``tx`` is not an optimizer, or ``params`` is None.
      ValueError: if gradients and parameters differ in structure; if ``tx`` needs the gradients of all parameters and
        ``grads`` are those of the trainable ones; whatever ``tx.update`` raises.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> tx = fz.freeze_when(optax.sgd(0.5), {"encoder": fz.unfreeze_at(2)})
      >>> params, state = fz.update_params(tx, params, tx.init(params), params)
      >>> params
      {'encoder': Array([1., 1.], dtype=float32), 'head': Array([0.5, 0.5], dtype=float32)}
    """
    transformation = as_transformation(tx, _CALL, other=grads)
    if params is None:
        raise type_error(
            "fz.update_params needs the parameters",
            at="params",
            got=described(params),
            expected=_CALL,
            fix="pass the parameters; only tx.update works without them",
        )
    treedef = _tree.flatten(params)[1]
    if _tree.flatten_beside(treedef, grads)[1] != treedef:
        _tree.refuse_other_structure(grads, params, "grads", f"pass the arguments in this order: {_CALL}")
    update: Any = transformation.update
    if isinstance(update, Update):
        return update.run(grads, state, params, extra_args, in_place=True)
    try:
        updates, state = update(grads, state, params, **extra_args)
    except (TypeError, ValueError) as error:
        full = with_zeros(grads, params)
        given = {name: full if value is grads else value for name, value in extra_args.items()}
        if full is grads or not succeeds(lambda: update(full, state, params, **given)):
            raise
        raise value_error(
            "a transformation outside of fz.freeze needs the gradients of all parameters",
            at="tx",
            got=f"gradients of the trainable parameters only: {in_one_line(error)}",
            expected="fz.freeze around the whole optimizer",
            fix="put everything inside, such as tx = fz.freeze(optax.MultiSteps(optax.adam(1e-3), 4), frozen); "
            "then state = tx.init(params)",
        ) from error
    return apply_updates(params, updates), state


def succeeds(call: Callable[[], Any]) -> bool:
    """Whether a call can be traced, which computes nothing."""
    try:
        jax.eval_shape(lambda: jax.tree.leaves(call()))
    except Exception:
        return False
    return True


def with_zeros(grads: PyTree, params: PyTree) -> PyTree:
    """Zeros in place of each gradient of less than its parameter; ``grads`` itself if there is none."""
    values, treedef = _tree.flatten(params)
    given = _tree.flatten_beside(treedef, grads)[0]
    is_less = lambda grad: _tree.is_masked_node(grad) or isinstance(grad, Part)  # noqa: E731
    less = [is_less(grad) and is_array(x) and not isinstance(x, Part) for grad, x in zip(given, values, strict=True)]
    full = [jnp.zeros_like(x) if part else grad for grad, x, part in zip(given, values, less, strict=True)]
    return jax.tree.unflatten(treedef, full) if any(less) else grads
