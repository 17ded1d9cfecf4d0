"""Finds leaks in a whole training step, of any framework: :func:`audit_step` runs it with other gradients."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from optax_freeze._audit.changed_gradients import NO_LOSS, ChangedGradients, not_known
from optax_freeze._audit.diagnosis import audit_of
from optax_freeze._audit.probe import Probe
from optax_freeze._audit.reactions import Gradients
from optax_freeze._audit.report import Audit
from optax_freeze._audit.runs import Runs
from optax_freeze._audit.step import Step, opposite
from optax_freeze._audit.step import other_batch as made_up_batch
from optax_freeze._errors import described, type_error, value_error, whole_number
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.patterns import nearest
from optax_freeze._spec.prefix_tree import is_above
from optax_freeze._spec.resolve import Spec
from optax_freeze._spec.tree import PyTree

Loss: TypeAlias = Callable[..., Any] | tuple[Callable[..., Any], ...] | Mapping[str, Callable[..., Any]] | None


def audit_step(
    make_step: Callable[..., Any],
    state: PyTree,
    *batch: Any,
    loss: Loss = None,
    params: str | Callable[[Any], Any],
    frozen: Spec,
    steps: int = 3,
    other_batch: Any = True,
    other_values: Any = True,
    **keywords: Any,
) -> Audit:
    """Finds out whether a training step freezes what it should, and how to fix it if not.

    :func:`optax_freeze.audit` sees an optimizer; leaks are also in the step around it: weight decay after a
    ``stop_gradient``, a clip over all gradients, an average that rounds, batch statistics. The step runs some times
    from copies of the state: as it is, with another batch, with other frozen values, with another state of frozen
    elements, and with another gradient of frozen parameters, which the loss gives that ``make_step`` gets. No frozen
    bit may change, and nothing may depend on such a gradient.

    Args:
      make_step: called as ``make_step(loss)``, or with several losses, returns the step, which is called as
        ``step(state, *batch)`` and returns the new state or a tuple that begins with it. NNX objects may be changed in
        place instead. It may be jitted and donate its arguments, which are copied. Without ``loss`` it is the step.
      state: any pytree, a Flax ``TrainState``, or NNX objects such as ``(model, optimizer)``. It is not changed.
      *batch: the other arguments.
      loss: the function that the step differentiates, of any arguments, among them the parameters, a part of them, a
        tree that contains them, or an NNX module; or a tuple of such functions; or ``{path: function}`` for functions
        of parts that look alike, by the path of the part in the parameters. None: only what runs show is known.
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
      ValueError: if ``params`` or a path of ``loss`` matches nothing, the spec does not fit or freezes everything,
        ``steps`` is less than 1, or the step returns a state of another structure.
      TypeError: if ``make_step`` makes no step, a step does not return a state, a loss is not a function, or ``steps``
        is not an int. Errors of the step are passed on, with a note.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_freeze as fz
      >>> tx = optax.adamw(0.1)
      >>> def loss(params, batch):
      ...     return jnp.mean((jax.lax.stop_gradient(params["encoder"]) * params["head"] - batch) ** 2)
      >>> def make_step(loss):
      ...     @jax.jit
      ...     def step(state, batch):
      ...         grads = jax.grad(loss)(state["params"], batch)
      ...         updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
      ...         return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
      ...     return step
      >>> params = {"encoder": jnp.ones(3), "head": jnp.ones(3)}
      >>> state = {"params": params, "opt_state": tx.init(params)}
      >>> spec = {"params": "params", "frozen": "encoder"}
      >>> audit = fz.audit_step(make_step, state, jnp.zeros(3), loss=loss, **spec)
      >>> [(leak.kind, leak.path, leak.cause) for leak in audit.leaks][::2]
      [('moved', 'encoder', 'weight decay'), ('state', 'encoder', 'state for frozen elements')]
    """
    steps = whole_number("steps", steps, least=1, fix="steps=3")
    losses = _losses(loss)
    step = _made(make_step, losses.values()) if losses else make_step
    if not callable(step):
        expected, fix = "a function step(state, *batch)", "fz.audit_step(step, state, *batch, params=..., frozen=...)"
        raise type_error("`step` is not a function", at="step", got=described(step), expected=expected, fix=fix)
    audited = Step(step, state, batch, keywords, params, frozen)
    batches, values = _other_batches(audited, other_batch), _other_values(audited, other_values)
    if losses:
        gradients, note = _gradients(audited, make_step, losses, batches)
    else:
        _refuse_factory(audited)
        gradients, note = None, NO_LOSS
    from optax_freeze._audit.untaken_branches import UntakenBranches  # loads jax.extend: slow

    branches = None
    with contextlib.suppress(Exception):  # if it cannot be traced, Python decides which code runs
        branches = UntakenBranches(audited)
    runs = Runs(audited, gradients, steps, batches[:1], values, branches)
    return audit_of(runs, Gradients(notes=[note]) if gradients is None else gradients.found(runs.counters))


def _other_batches(step: Step, batch: Any) -> list[Any]:
    """The arguments of the run with another batch, and of a second one without gradients."""
    if isinstance(batch, bool):
        return [made_up_batch(step.batch), opposite(step.batch)] if batch else []
    return [(batch if isinstance(batch, tuple) else (batch,), step.batch[1])]


def _other_values(step: Step, values: Any) -> Mapping[int, Any] | bool:
    """The frozen values of the run with others, by position; True for made-up ones, False for no such run."""
    if isinstance(values, bool):
        return values
    given, _ = _tree.flatten(values)
    if len(given) != len(step.plan.leaves):
        got, expected = f"{len(given)} leaves", f"{len(step.plan.leaves)}, as in the parameters"
        fix = "pass a tree of parameters, or False"
        raise value_error("`other_values` does not fit", at="other_values", got=got, expected=expected, fix=fix)
    places = [(step.params[i], step.plan.selections[i], given[i]) for i in step.frozen]
    return {k: selection.choose(value, step.start[k]) for k, selection, value in places}


def _losses(loss: Any) -> "dict[str | int, Callable[..., Any]]":
    """The losses by the path of the subtree that they get, or by their number."""
    if loss is None:
        return {}
    several = loss if isinstance(loss, tuple) else (loss,)
    found: dict[str | int, Any] = dict(loss) if isinstance(loss, Mapping) else dict(enumerate(several))
    for key, fun in found.items():
        if not callable(fun):
            what, expected = "`loss` is not a function", "a function, a tuple of functions, or {path: function}"
            raise type_error(what, at=f"loss {key}", got=described(fun), expected=expected, fix="loss=loss")
    return found


def _made(make_step: Any, losses: Any) -> Any:
    losses = [*losses]
    names = ", ".join(["loss"] if len(losses) == 1 else [f"loss{n}" for n in range(len(losses))])
    expected = f"a function of the {'loss' if len(losses) == 1 else 'losses'} that returns step(state, *batch)"
    fix = f"def make_step({names}): ...; return step; or, without loss=, what runs show: fz.audit_step(step, ...)"

    def wrong(got: str) -> TypeError:
        what, at = "`make_step` does not make a step", f"make_step({names})"
        return type_error(what, at=at, got=got, expected=expected, fix=fix)

    if not callable(make_step):
        raise wrong(described(make_step))
    if not _takes(make_step, len(losses)):
        raise wrong(f"a function of {inspect.signature(make_step)}")
    try:
        step = make_step(*losses)
    except Exception as error:
        error.add_note(f"fz.audit_step: from make_step({names})")
        raise
    if not callable(step):
        raise wrong(described(step))
    return step


def _takes(fun: Callable[..., Any], count: int, keywords: Mapping[str, Any] = {}) -> bool:
    """Whether a function takes so many arguments, as far as its signature tells."""
    try:
        inspect.signature(fun).bind(*[None] * count, **keywords)
    except ValueError:
        return True
    except TypeError:
        return False
    return True


def _refuse_factory(step: Step) -> None:
    count = 1 + len(step.batch[0])
    if _takes(step.function, count, step.batch[1]) or not _takes(step.function, 1):
        return
    what, at = "`step` does not take the state and the batch", f"step{inspect.signature(step.function)}"
    fix = "if it makes the step of a loss, pass that: fz.audit_step(make_step, state, *batch, loss=loss, ...)"
    raise type_error(what, at=at, got=f"{count} arguments", expected="step(state, *batch)", fix=fix)


def _gradients(
    step: Step, make_step: Callable[..., Any], losses: "Mapping[str | int, Callable[..., Any]]", batches: Sequence[Any]
) -> tuple[ChangedGradients | None, str]:
    """The gradients of a step with changed losses; None and a note if the step runs only without."""
    leaves, paths = step.plan.leaves, {i: step.plan.leaves[i].path for i in step.params}
    masks = {i: True if step.is_frozen(i) else step.mask(i) if step.plan.selections[i].in_part else None for i in paths}
    probe = Probe({i: tuple(leaves[i].shape or ()) for i in paths}, paths, masks, len(losses))
    for at in losses:
        if isinstance(at, str) and not any(is_above(at, path) for path in paths.values()):
            fix = f"nearest paths: {nearest(at, list(paths.values()))}"
            got, expected = repr(at), "the path of the subtree of the parameters that the loss gets"
            raise value_error("`loss` has a path that matches nothing", at="loss", got=got, expected=expected, fix=fix)

    def make(way: str) -> Step:
        if way == "plain":
            return step.with_function(_made(make_step, losses.values()))
        paths = [at if isinstance(at, str) else None for at in losses]
        changed = [probe.loss(n, fun, at, way) for n, (at, fun) in enumerate(zip(paths, losses.values(), strict=True))]
        return step.with_function(_made(make_step, changed))

    plain = step.function
    step.function = make("tamper").function
    try:
        step.advance(step.start)
    except Exception as error:
        step.function = plain
        step.advance(step.start)  # an error of the step itself is raised here
        return None, not_known(error)
    return ChangedGradients(step, probe, make, batches), ""
