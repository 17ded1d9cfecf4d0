"""Finds leaks, where an optimizer does not freeze what it should: :func:`audit` runs it with made-up gradients."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import optax

from optax_freeze._audit.diagnosis import Kind, Leak, diagnose
from optax_freeze._audit.runs import ExtraArgs, Run, Simulation, made_up
from optax_freeze._errors import counted, is_number, message, value_error, whole_number
from optax_freeze._optimizer.as_transformation import as_transformation, is_optimizer
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.selection import TRAINABLE
from optax_freeze._spec.tree import Part, PyTree


@dataclasses.dataclass(frozen=True, repr=False)
class Audit:
    """The result of :func:`audit`: true if there is no leak. ``str`` gives a text for logs.

    Attributes:
      leaks: one for each leaf and cause, a named tuple. Its ``kind`` is ``"moved"`` (a frozen element has an update),
        ``"changed"`` (the update of trainable elements depends on frozen ones), ``"gradient"`` (a step uses a gradient
        of them), ``"state"`` (state is stored for them) or ``"untrained"`` (the gradient of trainable elements affects
        neither updates nor state). ``path``, ``cause``, ``got``, ``expected`` and ``fix`` say where, why, and what to
        do; ``elements``, ``nbytes`` and ``flops`` are the elements concerned, the size of the state, and the cost of
        the gradient.
      leaves: the number of leaves.
      frozen: the number of leaves that are frozen, in whole or in part.
      steps: the steps of each run.
      calls: how often the step was called, of :func:`audit_step`.
      note: why the runs may not show every leak; empty if there is no reason.

    Example:
      >>> import jax.numpy as jnp, optax, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(3), "head": jnp.ones(2)}
      >>> audit = fz.audit(params, "encoder", optax.masked(optax.sgd(0.1), {"encoder": False, "head": True}))
      >>> audit.ok, [(leak.kind, leak.path, leak.cause) for leak in audit.leaks]
      (False, [('moved', 'encoder', 'it trains')])
    """

    leaks: tuple[Leak, ...]
    leaves: int
    frozen: int
    steps: int
    note: str = ""
    calls: int = 0

    @property
    def ok(self) -> bool:
        """Whether there is no leak."""
        return not self.leaks

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        groups: dict[tuple[str, str], list[Leak]] = {}
        for leak in sorted(self.leaks, key=lambda leak: get_args(Kind).index(leak.kind)):
            groups.setdefault((leak.kind, leak.cause), []).append(leak)
        found = counted(len(groups), "leak", "leaks") if groups else "no leak"
        steps = counted(self.steps, "step", "steps") + " a run"
        steps += f", {self.calls} calls of the step" * bool(self.calls)
        text = f"audit: {found} ({self.frozen} of {self.leaves} leaves frozen, {steps})"
        text += f"\nnote: {self.note}" * bool(self.note)
        return "\n\n".join([text, *map(_text, groups.values())])

    __repr__ = __str__

    def raise_for_leaks(self) -> None:
        """Raises an ``AssertionError`` that lists the leaks and their fixes, if there is any."""
        if self.leaks:
            raise AssertionError(str(self))


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

    ``tx`` takes a few steps several times from the same start: with gradients of zero and with ordinary, huge, infinite
    and NaN gradients for the frozen elements, with other frozen parameters, and with a state that has moments for them.
    No frozen element may change, and no other update may differ between the runs by a single bit. Leaks are found
    whatever ``tx`` consists of; their causes are inferred. Later steps of a schedule are not checked.

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
      An :class:`Audit`: true if there is no leak.

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
        got: 3 of 3 frozen elements move in step 1 with a gradient of zero, by up to 0.05
        expected: an update of zero, whatever the gradient, the parameter and the state
        fix: fz.freeze(optax.chain(..., optax.add_decayed_weights(...)), frozen): decay belongs inside the freeze
      >>> fz.audit(params, "encoder", fz.freeze(optax.adamw(0.1), "encoder")).raise_for_leaks()
    """
    other = params if is_optimizer(params) else frozen
    tx = as_transformation(tx, "fz.audit(params, frozen, tx)", other=other)
    steps = whole_number("steps", steps, least=1, fix="steps=3")
    plan = make_plan(params, frozen)
    values, treedef = _tree.flatten(params)
    for value, leaf in zip(values, plan.leaves, strict=True):
        if isinstance(value, Part):
            got, fix = "a Part, from fz.partition", "pass the parameters from before fz.partition"
            what = "fz.audit needs the full parameters"
            raise value_error(what, at=leaf.path, got=got, expected="the full leaf", fix=fix)
    plan.refuse_all_frozen("there is nothing to audit", frozen)
    start = [
        jnp.asarray(value, leaf.dtype) if leaf.inexact and is_number(value) else made_up(value)
        for value, leaf in zip(values, plan.leaves, strict=True)
    ]
    simulation = Simulation(tx, plan, start, treedef, steps, extra_args, full_grads)
    with jax.debug_nans(False), jax.debug_infs(False):  # some of the gradients are NaN or infinite on purpose
        leaks, runs = diagnose(simulation)
    in_part_or_whole = sum(selection is not TRAINABLE for selection in plan.selections)
    return Audit(tuple(leaks), len(values), in_part_or_whole, steps, _note(simulation, runs, leaks))


def _note(simulation: Simulation, runs: Mapping[str, Run], leaks: Sequence[Leak]) -> str:
    numbers, zero = simulation.numbers, runs["zero"]
    if any(runs["again"].shows("changed", i) for i in numbers):
        return "two equal runs gave different updates: what trainable parameters depend on cannot be judged"
    if any(zero.shows("nan", i) for i in numbers):
        return "updates of trainable parameters are NaN whatever is frozen: what they depend on cannot be judged"
    if not any(zero.shows("live", i) for i in numbers) and all(leak.kind != "untrained" for leak in leaks):
        return "trainable parameters had no update in these steps: give more, for gradient accumulation or a warm-up"
    return ""


def _text(rows: list[Leak]) -> str:
    """Leaks of one cause as one entry, with the details of the largest."""
    most, paths = max(rows, key=lambda leak: leak.elements), [leak.path or "(all leaves)" for leak in rows]
    got = most.got
    if len(rows) > 1:
        got += f" ({most.path})" + f"; {sum(leak.nbytes for leak in rows):,} bytes in all" * (most.kind == "state")
        got += f"; {sum(leak.flops for leak in rows):,} FLOPs in all" * (most.flops > 0)
    at = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    return message(f"{most.kind}: {most.cause}", at=at, got=got, expected=most.expected, fix=most.fix)
