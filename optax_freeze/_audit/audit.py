"""Finds leaks, where an optimizer does not freeze what it should: :func:`audit` runs it with made-up gradients."""

import jax
import jax.numpy as jnp
import optax

from optax_freeze._audit.diagnosis import audit_of
from optax_freeze._audit.optimizer_step import ExtraArgs, OptimizerStep, given_gradients, made_up
from optax_freeze._audit.report import Audit
from optax_freeze._audit.runs import Runs
from optax_freeze._errors import is_number, value_error, whole_number
from optax_freeze._optimizer.transformation import as_transformation, is_optimizer
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.resolve import Spec, make_plan, warn_of_no_proof
from optax_freeze._spec.tree import Part, PyTree


def audit(
    params: PyTree,
    frozen: Spec,
    tx: optax.GradientTransformation | optax.MultiSteps,
    steps: int = 3,
    *,
    extra_args: ExtraArgs = None,
    full_grads: bool = True,
) -> Audit:
    """Finds out whether an optimizer freezes what it should, and how to fix it if not.

    ``tx`` takes a few steps several times from the same start: with ordinary, huge, infinite and NaN gradients for the
    frozen elements and with those of the other sign, with other frozen parameters, with a state that has moments for
    them, and with larger counters. No frozen element may have an update, and no other update may differ between the
    runs by a single bit. Leaks are found whatever ``tx`` consists of; their causes are inferred.

    Args:
      params: the parameters, or their shapes (``jax.ShapeDtypeStruct``), for which values are made up. Those in
        host memory are copied to the device.
      frozen: the spec of the parameters that should be frozen, in any form.
      tx: the whole optimizer, including ``fz.freeze``, ``optax.masked`` or anything else that freezes parameters.
      steps: the steps of each run; for gradient accumulation at least its number of mini-steps.
      extra_args: extra arguments of ``tx.update``, as a mapping or a function ``(params, grads) -> mapping``. The
        ``value``, ``grad``, ``value_fn``, ``obj_fn`` or ``grad_fn`` of a made-up loss are given if ``tx`` takes them.
      full_grads: False if ``tx`` gets only gradients of trainable parameters (:func:`optax_freeze.value_and_grad`).

    Returns:
      An :class:`Audit`: true if there is no leak. Emits a :class:`optax_freeze.FreezeWarning` if patterns, a selector
      or a function freeze nothing.

    Raises:
      ValueError: if the spec does not fit or freezes everything, ``steps`` is less than 1, or there is a ``Part`` among
        the parameters.
      TypeError: if ``tx`` is not an optimizer or ``steps`` not an int. Errors of ``tx`` are passed on, with a note.

    Example:
      >>> import jax.numpy as jnp, optax, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(3), "head": jnp.ones(2)}
      >>> mask = {"encoder": True, "head": False}
      >>> tx = optax.chain(optax.freeze(mask), optax.add_decayed_weights(0.1), optax.sgd(0.5))
      >>> print(fz.audit(params, "encoder", tx))
      audit: 1 leak (1 of 2 leaves frozen, 3 steps a run)
      <BLANKLINE>
      moved: weight decay
        at: encoder
        got: 3 of 3 frozen elements move in step 1, by up to 0.05
        expected: the same bits after each step, whatever the gradient, the batch, the parameters and the state
        fix: fz.freeze(optax.chain(..., optax.add_decayed_weights(...)), frozen): ...
      >>> fz.audit(params, "encoder", fz.freeze(optax.adamw(0.1), "encoder")).raise_for_leaks()
    """
    other = params if is_optimizer(params) else frozen
    tx = as_transformation(tx, "fz.audit(params, frozen, tx)", other=other)
    steps = whole_number("steps", steps, least=1, fix="steps=3")
    plan = make_plan(params, frozen).in_state
    values, treedef = _tree.flatten(params)
    for value, leaf in zip(values, plan.leaves, strict=True):
        if isinstance(value, Part):
            got, fix = "a Part, from fz.partition", "pass the parameters from before fz.partition"
            what = "fz.audit needs the full parameters"
            raise value_error(what, at=leaf.path, got=got, expected="the full leaf", fix=fix)
    plan.refuse_all_frozen("there is nothing to audit", frozen)
    warn_of_no_proof(plan, params, frozen, stacklevel=2)
    start = [
        jnp.asarray(value, leaf.dtype) if leaf.inexact and is_number(value) else made_up(value)
        for value, leaf in zip(values, plan.leaves, strict=True)
    ]
    step = OptimizerStep(tx, plan, start, treedef, extra_args, full_grads)
    with jax.debug_nans(False), jax.debug_infs(False):  # some of the gradients are NaN or infinite on purpose
        values = step.other_values()
        gradients = given_gradients(step, steps, values)
        return audit_of(Runs(step, None, steps, values=values), gradients)
