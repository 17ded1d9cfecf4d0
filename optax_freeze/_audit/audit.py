"""Where an optimizer does not freeze what it should: :func:`audit` finds out by running it.

What is frozen leaks at many places of a chain, and each of them looks right when read: a mask, a label, the order of
two transformations. So nothing is read here. The whole chain runs with made-up gradients, and the audit says what it
does to frozen places, and what these do to the others. The rows come first, their text apart.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from optax_freeze._audit.diagnosis import Leak, leaks_of, reaches, runs_of
from optax_freeze._audit.runs import ExtraArgs, Probe, Run, made_up
from optax_freeze._errors import counted, described, is_int, message, type_error, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.selection import TRAINABLE
from optax_freeze._spec.tree import Part, PyTree


@dataclasses.dataclass(frozen=True, repr=False)
class Audit:
    """What :func:`audit` found; true if there is no leak, and a text for a log as a ``str``.

    Attributes:
      leaks: a row for each leak and leaf.
      leaves: how many leaves there are.
      frozen: how many of them are frozen, in whole or in part.
      steps: the steps of each run.
      note: what keeps the runs from showing everything; empty if nothing does.

    Example:
      >>> import jax.numpy as jnp, optax, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(3), "head": jnp.ones(2)}
      >>> audit = fz.audit(optax.masked(optax.sgd(0.1), {"encoder": False, "head": True}), params, "encoder")
      >>> audit.ok, [(leak.kind, leak.path, leak.cause) for leak in audit.leaks]
      (False, [('moved', 'encoder', 'the raw gradient is passed on')])
    """

    leaks: tuple[Leak, ...]
    leaves: int
    frozen: int
    steps: int
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether there is no leak."""
        return not self.leaks

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        rows: dict[Any, list[Leak]] = {}
        for leak in sorted(self.leaks, key=lambda leak: _KINDS.index(leak.kind)):
            rows.setdefault((leak.kind, leak.cause, leak.fix), []).append(leak)
        groups = list(rows.values())
        found = counted(len(groups), "leak", "leaks") if groups else "no leak"
        steps = counted(self.steps, "step", "steps")
        text = f"audit: {found} ({self.frozen} of {self.leaves} leaves frozen, {steps} a run)"
        text += f"\nnote: {self.note}" * bool(self.note)
        return "\n\n".join([text, *map(_text, groups)])

    __repr__ = __str__

    def raise_for_leaks(self) -> None:
        """Raises an ``AssertionError`` that lists all leaks and what to do about each, if there is any."""
        if self.leaks:
            raise AssertionError(str(self))


def audit(
    tx: optax.GradientTransformation | optax.MultiSteps,
    params: PyTree,
    frozen: Spec,
    steps: int = 3,
    *,
    extra_args: ExtraArgs = None,
    full_grads: bool = True,
) -> Audit:
    """Runs a whole optimizer, and says where it does not freeze what it should, and what to do about it.

    ``tx`` takes a few steps again and again from the same start, with gradients of zero, ordinary, huge, infinite and
    NaN ones at the frozen places, with other parameters there, and with a state that holds moments for them. Nothing
    may move there, and no bit of any other update may change. Neither ``tx`` nor ``params`` is changed.

    A leak is found whatever ``tx`` is made of; its cause is judged from what was seen. What a schedule does after these
    steps is not seen.

    Args:
      tx: the optimizer as it is given to the training, with ``fz.freeze``, ``optax.masked`` or whatever freezes in it.
      params: the parameters, or their shapes (``jax.ShapeDtypeStruct``), for which values are made up.
      frozen: what should be frozen, in any form.
      steps: how many steps each run takes; more than the mini-steps of gradient accumulation, to see its update.
      extra_args: extra arguments of ``tx.update``, as a mapping or a function ``(params, grads) -> mapping``. The
        ``value``, ``grad``, ``value_fn``, ``obj_fn`` and ``grad_fn`` of a made-up loss are given without being asked
        for. With arguments of your own, what trains may depend on frozen parameters: a loss does.
      full_grads: False for a training whose gradients have the trainable structure
        (:func:`optax_freeze.value_and_grad`), so that nothing reaches ``tx`` from the gradients of what is frozen.

    Returns:
      An :class:`Audit`: true if there is no leak.

    Raises:
      ValueError: if the spec does not fit, or nothing trains under it; if ``steps`` is not at least 1, or a ``Part`` is
        among the parameters.
      TypeError: if ``tx`` is no optimizer, ``steps`` is no int, a function of the spec looks at values, or a leaf holds
        an array and is none (a Keras variable). Errors of ``tx`` are passed on, with a note.

    Example:
      >>> import jax.numpy as jnp, optax, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(3), "head": jnp.ones(2)}
      >>> mask = {"encoder": True, "head": False}
      >>> tx = optax.chain(optax.freeze(mask), optax.add_decayed_weights(0.1), optax.sgd(0.5))
      >>> print(fz.audit(tx, params, "encoder"))
      audit: 1 leak (1 of 2 leaves frozen, 3 steps a run)
      <BLANKLINE>
      moved: weight decay
        at: encoder
        got: 3 of 3 frozen elements move in step 1 with a gradient of zero, by up to 0.05
        expected: an update of zero, whatever the gradient, the parameter and the state
        fix: fz.freeze(optax.chain(..., optax.add_decayed_weights(...)), frozen): decay belongs inside the freeze
      >>> fz.audit(fz.freeze(optax.adamw(0.1), "encoder"), params, "encoder").raise_for_leaks()
    """
    tx = _as_transformation(tx)
    is_number = is_int(steps)
    if not is_number or steps < 1:
        raise (value_error if is_number else type_error)(
            "no steps to take", at="steps", got=described(steps), expected="an int, at least 1", fix="steps=3"
        )
    plan = make_plan(params, frozen)
    values, treedef = _tree.flatten(params)
    _refuse_nothing_to_audit(values, plan, frozen)
    start = [made_up(value) for value in values]
    probe = Probe(tx, plan, start, treedef, int(steps), extra_args, full_grads)
    with jax.debug_nans(False), jax.debug_infs(False):  # the gradients made up are NaN and infinite on purpose
        runs = runs_of(probe)
        leaks = leaks_of(probe, runs)
    in_part_or_whole = sum(selection is not TRAINABLE for selection in plan.selections)
    return Audit(tuple(leaks), len(values), in_part_or_whole, probe.steps, _note(probe, runs, leaks))


def _note(probe: Probe, runs: Mapping[str, Run], leaks: Sequence[Leak]) -> str:
    facts = [leaf for step in runs["zero"].facts for leaf in step.values()]
    if any(reaches(runs["again"], i) for i in probe.seen):
        return "two equal runs gave what trains other updates: it cannot be said what reaches them"
    if any(leaf.nan for leaf in facts):
        return "what trains has updates that are NaN whatever is frozen: it cannot be said what reaches them"
    if not any(leaf.live for leaf in facts) and all(leak.kind != "untrained" for leak in leaks):
        return "what trains had no update in these steps: give more, for gradient accumulation or a warm-up"
    return ""


def _as_transformation(tx: Any) -> optax.GradientTransformationExtraArgs:
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if isinstance(tx, optax.GradientTransformation):
        return optax.with_extra_args_support(tx)
    raise type_error(
        "fz.audit takes the optimizer first",
        at="its first argument",
        got=described(tx),
        expected="fz.audit(tx, params, frozen)",
        fix="call the factory: optax.adam(1e-3), not optax.adam" if callable(tx) else "pass the optimizer",
    )


def _refuse_nothing_to_audit(values: Sequence[Any], plan: Plan, frozen: Spec) -> None:
    for value, leaf in zip(values, plan.leaves, strict=True):
        if isinstance(value, Part):
            raise value_error(
                "fz.audit takes the whole parameters",
                at=leaf.path,
                got="a Part, from fz.partition",
                expected="the full leaf",
                fix="pass the parameters as they were before fz.partition",
            )
    plan.refuse_all_frozen("there is nothing to audit", frozen)


_KINDS = ("moved", "changed", "state", "untrained")


def _text(rows: list[Leak]) -> str:
    """Leaks of one cause, as one: that with the most elements speaks for all."""
    most, paths = max(rows, key=lambda leak: leak.elements), [leak.path or "(all leaves)" for leak in rows]
    got = most.got
    if len(rows) > 1:
        got += f" ({most.path})" + f"; {sum(leak.nbytes for leak in rows):,} bytes in all" * (most.kind == "state")
    at = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    return message(f"{most.kind}: {most.cause}", at=at, got=got, expected=most.expected, fix=most.fix)
