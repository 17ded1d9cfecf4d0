"""Finds leaks in a whole training step, of any framework: :func:`audit_step` runs it and reads its program."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from optax_freeze._audit.diagnosis import leaks_of
from optax_freeze._audit.report import Audit
from optax_freeze._audit.runs import Runs
from optax_freeze._audit.step import Step
from optax_freeze._errors import counted, described, in_one_line, type_error, value_error, whole_number
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.resolve import Spec
from optax_freeze._spec.selection import TRAINABLE
from optax_freeze._spec.tree import PyTree

if TYPE_CHECKING:
    from optax_freeze._audit.program import StepProgram


def audit_step(
    step: Callable[..., Any],
    state: PyTree,
    *batch: Any,
    params: str | Callable[[Any], Any],
    frozen: Spec,
    steps: int = 3,
    other_batch: Any = True,
    other_values: Any = True,
    **keywords: Any,
) -> Audit:
    """Finds out whether a training step freezes what it should, and how to fix it if not.

    :func:`optax_freeze.audit` sees an optimizer; leaks are also in the step around it: weight decay after a
    ``stop_gradient``, a router's bias that is set outside of the optimizer, an average that rounds, batch statistics.
    The step runs a few times from copies of the state: as it is, with another batch, with other frozen values, and with
    another state of frozen elements. No frozen bit may change. The program of the step is traced, too. It shows which
    gradients of frozen parameters are computed, what they cost, and what reads them. Whose gradient a value is,
    is decided by its numbers: the loss is differentiated again.

    Args:
      step: called as ``step(state, *batch)``, returns the new state or a tuple that begins with it. NNX objects may be
        changed in place instead. It may be jitted and donate its arguments, which are copied.
      state: any pytree, a Flax ``TrainState``, or NNX objects such as ``(model, optimizer)``. It is not changed.
      *batch: the other arguments.
      params: the path of the parameters in the state (``"params"``; of an NNX module its ``nnx.Param`` are meant), or a
        function that selects them, ``lambda state: state.params``.
      frozen: the spec of the parameters that should be frozen, in any form.
      steps: the steps of each run; for gradient accumulation at least its number of mini-steps.
      other_batch: the arguments of the run with another batch, as a tuple; False for no such run.
      other_values: parameters with other frozen values for a run with these; False for no such run.
      **keywords: keyword arguments of the step.

    Returns:
      An :class:`Audit`: true if there is no leak. Its ``note`` says what could not be known, ``calls`` how often the
      step was called, and so any logger in it. Emits a :class:`optax_freeze.FreezeWarning` if patterns, a selector or a
      function freeze nothing.

    Raises:
      ValueError: if ``params`` matches nothing, the spec does not fit or freezes everything, ``steps`` is less than 1,
        or the step returns a state of another structure.
      TypeError: if ``step`` is not a function, does not return a state, or ``steps`` is not an int. Errors of the step
        are passed on, with a note.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_freeze as fz
      >>> tx = optax.adamw(0.1)
      >>> @jax.jit
      ... def step(state, batch):
      ...     def loss(params):
      ...         return jnp.mean((jax.lax.stop_gradient(params["encoder"]) * params["head"] - batch) ** 2)
      ...     value, grads = jax.value_and_grad(loss)(state["params"])
      ...     updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
      ...     return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value
      >>> params = {"encoder": jnp.ones(3), "head": jnp.ones(3)}
      >>> state = {"params": params, "opt_state": tx.init(params)}
      >>> audit = fz.audit_step(step, state, jnp.zeros(3), params="params", frozen="encoder")
      >>> [(leak.kind, leak.path, leak.cause) for leak in audit.leaks][::2]
      [('moved', 'encoder', 'weight decay'), ('state', 'encoder', 'state for frozen elements')]
    """
    if not callable(step):
        expected, fix = "a function step(state, *batch)", "fz.audit_step(step, state, *batch, params=..., frozen=...)"
        raise type_error("`step` is not a function", at="step", got=described(step), expected=expected, fix=fix)
    steps = whole_number("steps", steps, least=1, fix="steps=3")
    audited = Step(step, state, batch, keywords, params, frozen)
    program, notes = _program(audited)
    runs = Runs(audited, program, steps, *_others(audited, other_batch, other_values))
    leaks = tuple(leaks_of(runs, program))
    notes += [*runs.notes, *(_notes(program) if program is not None else [])]
    selections = audited.plan.selections
    in_part_or_whole = sum(selection is not TRAINABLE for selection in selections)
    return Audit(leaks, len(selections), in_part_or_whole, steps, "; ".join(notes), audited.calls)


def _others(step: Step, batch: Any, values: Any) -> tuple[Any, Any]:
    """The batch and the frozen values of the runs with others, True for made-up ones."""
    if not isinstance(batch, bool):
        batch = batch if isinstance(batch, tuple) else (batch,)
    if isinstance(values, bool):
        return batch, values
    given, _ = _tree.flatten(values)
    if len(given) != len(step.plan.leaves):
        got, expected = f"{len(given)} leaves", f"{len(step.plan.leaves)}, as in the parameters"
        fix = "pass a tree of parameters, or False"
        raise value_error("`other_values` does not fit", at="other_values", got=got, expected=expected, fix=fix)
    return batch, {
        step.params[i]: step.plan.selections[i].choose(given[i], step.start[step.params[i]]) for i in step.frozen
    }


def _program(step: Step) -> "tuple[StepProgram | None, list[str]]":
    """The program of a step, if it can be read, and what is not known."""
    from optax_freeze._audit.program import StepProgram  # loads jax.extend, which takes longer than this library

    try:
        return StepProgram(step), []
    except Exception as error:
        text = f"the step cannot be traced ({type(error).__name__}: {in_one_line(error)[:60]}): {_UNKNOWN}"
        return None, [text]


_UNKNOWN = "which gradients are computed, and what reads them, is not known"


def _notes(program: "StepProgram") -> list[str]:
    """What a program does not show."""
    notes, gradients = [], program.for_results
    if not program.has_backward:
        notes.append(f"the program of the step has no backward pass of JAX: {_UNKNOWN}")
    if program.inner[1]:
        text = "a loop, a branch or a shard_map may compute gradients of frozen parameters"
        notes.append(f"{text}: whether it does, and what reads them, is not known")
    if program.ambiguous:
        shapes = ", ".join(map(str, sorted(program.ambiguous)))
        found = counted(len(program.ambiguous), "shape", "shapes")
        notes.append(f"gradients of {found} may belong to several parameters or to none, and are not judged: {shapes}")
    if program.flat:
        sizes = " and ".join(f"{size:,}" for size in program.flat)
        notes.append(f"a gradient of {sizes} numbers may contain those of frozen parameters, and is not judged")
    if kept := program.untrained[1]:
        paths = ", ".join(program.paths(kept)[:3])
        notes.append(f"the step returns {counted(len(kept), 'trainable leaf', 'trainable leaves')} as given: {paths}")
    if gradients:
        leaves = counted(len({g.leaves for g in gradients}), "frozen leaf", "frozen leaves")
        inside = any(g.flops is None for g in gradients)
        flops = f"{sum(g.flops or 0 for g in gradients):,} of {program.flops:,} FLOPs"
        cost = "in a loop, a branch or a shard_map" if inside else flops
        notes.append(f"gradients of {leaves} are computed only for results beside the state ({cost})")
    return notes
