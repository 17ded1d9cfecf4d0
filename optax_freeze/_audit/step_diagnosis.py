"""The leaks that the runs and the program of a training step show, with the most likely cause and the fix of each.

Runs show which frozen bits move, with whatever part of the step. The program shows what gradients are used for.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from optax_freeze._audit import diagnosis
from optax_freeze._audit.diagnosis import Cause, Kind, Leak
from optax_freeze._audit.step_comparison import ANOTHER_BATCH, ANOTHER_STATE, ANOTHER_VALUES, Runs
from optax_freeze._audit.step_runs import Step
from optax_freeze._errors import counted

if TYPE_CHECKING:
    from optax_freeze._audit.step_program import Gradient, StepProgram

_EXPECTED: dict[Kind, str] = {
    "moved": "the same bits after each step, whatever the batch, the parameters and the state",
    "changed": "the same update, whatever the gradients of frozen elements are",
    "gradient": "no gradient of frozen parameters, or one that nothing reads, which compilers remove",
    "state": "no state for frozen elements",
    "untrained": "an update that depends on its gradient",
}

_INSIDE = "the whole optimizer inside fz.freeze(tx, frozen)"
_NO_GRADIENT = f"fz.value_and_grad(loss, frozen), which computes no gradient of frozen parameters; or {_INSIDE}"

TRAINS = diagnosis.TRAINS._replace(
    fix=f"{_INSIDE}: nothing freezes this leaf, a label or a mask matches something else, a stop_gradient is at another"
    " place, or optax.masked was taken for a freeze: it passes the gradient on where its mask is False"
)
OTHER_SPEC = Cause(
    "the state of fz.freeze has another spec",
    "one spec everywhere; convert a state of an earlier run: fz.migrate(opt_state, fz.freeze(tx, frozen), params)",
)
SET = Cause(
    "a value from the batch, set outside of the optimizer",
    "leave frozen leaves out where the step writes to parameters: fz.apply_updates(params, updates, frozen); most"
    " likely a router's bias, or statistics among the parameters",
)
BATCH = Cause("a value that depends on the batch", f"{_INSIDE}; or leave it out where the step writes to parameters")
DECAY = diagnosis.DECAY._replace(
    fix=f"{_INSIDE}, with its weight decay: a stop_gradient, or a gradient of zero, does not stop the decay"
)
AFTER = diagnosis.AFTER._replace(
    name="another part of the step",
    fix=f"{_INSIDE}; most likely noise, a projection, a conversion of the dtype or a copy of the parameters",
)
AVERAGE = Cause(
    "an average that rounds",
    "average only the trainable part: fz.partition(params, frozen)[0]; or average + (1 - decay) * (params - average),"
    " which keeps a value that it equals",
)
STATISTICS = Cause(
    "statistics of a frozen module",
    "run the module with use_running_average=True, or in optax_freeze.linen.Frozen or optax_freeze.nnx.Frozen",
)
NORM = diagnosis.NORM._replace(fix=f"{_INSIDE}, with its clip or normalization; or fz.value_and_grad(loss, frozen)")
FINITE_CHECK = diagnosis.FINITE_CHECK._replace(
    fix=f"{_INSIDE}, with its finite check or loss scale; or fz.value_and_grad(loss, frozen)"
)
STATE = diagnosis.STATE._replace(
    fix=f"{_INSIDE}, with MultiSteps and accumulators: create the state with tx.init after this change. A"
    " stop_gradient in the loss does not affect the state"
)
IGNORED = diagnosis.IGNORED._replace(
    fix="one spec everywhere: most likely a mask is inverted, a label or a pattern matches more, or a stop_gradient"
    " stops more than is frozen"
)


COUPLED = Cause(
    "a sum or a preconditioner over frozen gradients",
    "compute it of the gradients of trainable parameters alone: those of fz.value_and_grad(loss, frozen), or of"
    " fz.restrict and fz.partition; most likely a preconditioner of all parameters, or a sum of their gradients",
)
ROUNDING = Cause(
    "values are computed again, and rounded",
    "leave frozen leaves out where the step writes to parameters: fz.apply_updates(params, updates, frozen); most"
    " likely a projection, a conversion of the dtype, or an average with themselves",
)


def leaks_of(runs: Runs, program: "StepProgram | None") -> Iterator[Leak]:
    """All leaks; without a program those that runs show."""
    step, gradients = runs.step, program.gradients if program is not None else []
    for i in step.frozen:
        yield from _moved(runs, program, i)
    for path, position in step.bits.items():
        for count, got in [*runs.moves(position).values()][:1]:
            yield _leak("moved", AFTER, path, got, count)
    yield from _moved_state(runs)
    yield from _held(runs)
    if program is not None:
        yield from _changed(step, gradients)
        of_results = {id(g) for g in program.for_results}
        yield from (_computed(step, program, g) for g in gradients if id(g) not in of_results)
        for i in program.untrained[0]:
            got = "no gradient reaches it or its state, although gradients depend on it"
            yield _leak("untrained", IGNORED, step.plan.leaves[i].path, got, step.elements(i, frozen=False))


def _moved(runs: Runs, program: "StepProgram | None", i: int) -> Iterator[Leak]:
    """Frozen elements of a parameter with other bits after a step."""
    step = runs.step
    path, position = step.plan.leaves[i].path, step.params[i]
    moves = runs.moves(position)
    later = [name for name in moves if name.startswith("counters")]
    now = {name: move for name, move in moves.items() if name not in later}

    def leak(cause: Cause, name: str | None = None) -> Leak:
        count, got = moves[next(iter(moves)) if name is None else name]
        return _leak("moved", cause, path, got, count)

    reacts = runs.reacts(position)
    unexplained = next(iter(now), "")  # the first run in which it moves
    if now.keys() - {ANOTHER_STATE}:
        decays = runs.decays(position, ["", ANOTHER_VALUES] if ANOTHER_VALUES in runs.records else [""])
        is_set = program is not None and program.sets(i) and not decays
        trains = program is not None and i in program.trained
        if trains or (not is_set and runs.differ(ANOTHER_BATCH, position)):
            yield leak(OTHER_SPEC if path in step.trains_in_state else TRAINS if trains else BATCH)
            return
        if is_set or decays:
            unexplained = ANOTHER_STATE
            yield leak(SET if is_set else DECAY)
        elif runs.is_rounding(position):
            unexplained = ANOTHER_STATE
            yield leak(ROUNDING)
        elif not reacts:
            yield leak(AFTER)
    elif later and runs.decays(position, later[:1]):
        yield leak(DECAY, later[0])
    elif later:
        runs.notes.append(f"{path or 'the parameter'} moves in a later step ({later[0]}), as a schedule may want it")
    if reacts and unexplained in moves:
        yield leak(diagnosis.STATE_AFTER, unexplained)
    if program is not None and not now and any(("frozen", i) in g.nan for g in program.gradients):
        yield _leak("moved", diagnosis.PRODUCT, path, "NaN with a gradient of NaN", step.elements(i, frozen=True))


def _moved_state(runs: Runs) -> Iterator[Leak]:
    """Averages of frozen values, and statistics of frozen modules, with other bits after a step."""
    step = runs.step
    for k, (_, count, far) in runs.averages.items():
        if count:
            got = f"{count} elements of an average that equals the frozen value move in some steps{far}"
            yield _leak("moved", AVERAGE, step.paths[k], got, count)
    for k in runs.statistics():
        for count, got in [*runs.moves(k).values()][:1]:
            yield _leak("moved", STATISTICS, step.paths[k], got.replace("frozen elements", "elements"), count)


def _changed(step: Step, gradients: "Sequence[Gradient]") -> Iterator[Leak]:
    """Updates of trainable elements that depend on gradients of frozen ones."""
    found: dict[tuple[int, Cause], list[str]] = {}
    for g in gradients:
        path = step.plan.leaves[g.leaf].path
        signs, by_size, by_nan = (
            {j for j in g.trainable(answer) if not step.is_frozen(j)} for answer in (g.negative, g.huge, g.nan)
        )
        spoiled = {j for name, j in g.nan if name == "nan"}
        for j in sorted(by_size | by_nan):
            if j in signs and j != g.leaf:
                cause = COUPLED
            elif j in by_size:
                cause = diagnosis.STATISTIC if by_size == {g.leaf} else NORM
            else:
                cause = NORM if j in spoiled else FINITE_CHECK
            found.setdefault((j, cause), []).append(path)
    for (j, cause), paths in found.items():
        numbers = {FINITE_CHECK: "of NaN", COUPLED: "of the other sign"}.get(cause, "of 1e15 or NaN")
        more = f" or of {counted(len(paths) - 1, 'other frozen leaf', 'other frozen leaves')}" * (len(paths) > 1)
        got = f"another update with a gradient {numbers} of {paths[0]}{more}"
        yield _leak("changed", cause, step.plan.leaves[j].path, got, step.elements(j, frozen=False))


def _computed(step: Step, program: "StepProgram", g: "Gradient") -> Leak:
    """A gradient of frozen elements that something reads."""
    answers, names = (g.huge, g.nan), g.read
    together = {j for a in answers for j in g.trainable(a) if j != g.leaf and not step.is_frozen(j)}
    readers = {
        "a norm or a finite check": together - g.trainable(g.negative),
        "a sum or a preconditioner": together & g.trainable(g.negative),
        "its state": ("state", g.leaf) in g.negative | g.huge | g.nan,
        "its update": ("frozen", g.leaf) in g.negative | g.huge | g.nan,
        "other state": "other" in names or "state" in names,
        "a result": "result" in names,
        "nothing, but it leaves a jitted function": g.leaves_call,
    }
    read_by = [name for name, reads in readers.items() if reads] or ["its own leaf"]
    cost = "computed in a loop" if g.flops is None else f"{g.flops:,} of {program.flops:,} FLOPs of a step"
    got = f"{cost}; read by {', '.join(read_by)}"
    cause = Cause(f"a gradient that is read by {read_by[0]}", _NO_GRADIENT)
    elements = step.elements(g.leaf, frozen=True)
    return _leak("gradient", cause, step.plan.leaves[g.leaf].path, got, elements, flops=g.flops or 0)


def _held(runs: Runs) -> Iterator[Leak]:
    """State that is held for frozen elements; averages that follow the parameters are not counted."""
    step = runs.step
    by_leaf: dict[int | None, list[int]] = {}
    for k, i in runs.held.items():
        by_leaf.setdefault(i, []).append(k)
    for i, places in by_leaf.items():
        whole = [i] if i is not None else [*step.params]
        frozen, trains = (sum(step.elements(i, frozen=each) for i in whole) for each in (True, False))
        nbytes = sum(step.start[k].nbytes for k in places) * frozen // max(frozen + trains, 1)
        trees = dict.fromkeys(map(step.tree, places))
        got = f"{nbytes:,} bytes, at {', '.join(trees)}"
        yield _leak("state", STATE, "" if i is None else step.plan.leaves[i].path, got, frozen, nbytes)


def _leak(kind: Kind, cause: Cause, path: str, got: str, elements: int, nbytes: int = 0, flops: int = 0) -> Leak:
    return Leak(kind, path, cause.name, got, _EXPECTED[kind], cause.fix, int(elements), nbytes, flops)
