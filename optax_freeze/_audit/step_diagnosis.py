"""The leaks that the runs and the program of a training step show, with the most likely cause and the fix of each.

Runs show which frozen bits move, with whatever part of the step. The program shows what gradients are used for.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._audit import diagnosis
from optax_freeze._audit.diagnosis import Cause, Kind, Leak, is_of_frozen
from optax_freeze._audit.measurements import decay_rate, how_far, moved_elements
from optax_freeze._audit.step_runs import State, Step, other_batch, other_values
from optax_freeze._errors import counted, is_array
from optax_freeze._spec.selection import FROZEN, Selection
from optax_freeze._spec.tree import Part

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


_BATCH, _VALUES, _STATE = "another batch", "other frozen values", "another state of frozen elements"


class Runs:
    """The runs of a step, by what differs from the state and the batch that were given; the first as they are.

    Attributes:
      held: the positions of state for frozen elements.
      averages: for each average of frozen values a value that it equals, and what it is after a step.
    """

    def __init__(self, step: Step, steps: int) -> None:
        self.step = step
        self.held = [k for k in step.entries if self._is_held(k)]
        values = other_values(step)
        self.averages = self._averages(steps, values)
        inexact = [k for k in self.held if jnp.issubdtype(step.start[k].dtype, jnp.inexact)]
        moments = {k: jnp.asarray(step.start[k]) + 1 for k in inexact if k not in self.averages}
        self.states: dict[str, list[State]] = {
            "": step.run(steps),
            _BATCH: step.run(steps, batch=other_batch(step.batch)),
            _VALUES: step.run(steps, values),
        }
        self.states[_STATE] = step.run(steps, moments) if moments else self.states[""]

    def _is_held(self, k: int) -> bool:
        """Whether a leaf of the state holds values for frozen elements."""
        step, entry = self.step, self.step.entries[k]
        if k in step.kept or entry.address is None or isinstance(entry.value, Part) or not is_array(entry.value):
            return False
        if entry.leaf is None:  # all parameters in one vector
            size = sum(int(np.size(step.start[position])) for position in step.params.values())
            return len(step.params) > 1 and bool(step.frozen) and entry.value.shape[-1:] == (size,)
        i = step.owner(k)
        return i is not None and is_of_frozen(step.plan.selections[i], entry)

    def _averages(self, steps: int, values: dict[int, Any]) -> dict[int, tuple[Any, Any]]:
        """State that is close to the parameters, and that follows a frozen value which does not move."""
        step, close = self.step, set()
        params = {k: step.params[i] for k in step.entries if (i := step.owner(k)) is not None}
        for tree in {step.tree(k) for k in self.held}:
            pairs = {k: (step.start[k], step.start[at]) for k, at in params.items() if step.tree(k) == tree}
            if pairs and all(np.shape(a) == np.shape(b) for a, b in pairs.values()):
                far = optax.tree.norm([jnp.asarray(a) - b for a, b in pairs.values()])
                close |= {*pairs} & {*self.held} if far < optax.tree.norm([b for _, b in pairs.values()]) / 2 else set()
        if not close:
            return {}
        own = {k: values[params[k]].astype(step.start[k].dtype) for k in close}
        equal = step.run(steps, values | own)[-1]
        follows = step.run(steps, {position: value * 1024 for position, value in values.items()} | own)[-1]
        return {
            k: (value, equal[k])
            for k, value in own.items()
            if moved_elements(follows[k], equal[k]) and not moved_elements(values[params[k]], equal[params[k]])
        }

    def differ(self, name: str, position: int, selection: Selection) -> bool:
        """Whether a frozen element has another value than in the first run."""
        pairs = zip(self.states[""][1:], self.states[name][1:], strict=True)
        return any(moved_elements(a[position], b[position], selection) for a, b in pairs)

    def moves(self, position: int, selection: Selection = FROZEN) -> dict[str, tuple[int, str]]:
        """For each run in which frozen elements move, how many do, in which step, and how far."""
        found = {}
        for name, states in self.states.items():
            for n, state in enumerate(states[1:], 1):
                pair = states[0][position], state[position]
                if name not in found and (count := moved_elements(*pair, selection)):
                    with_other = f" with {name}" if name else ""
                    text = f"{count} frozen elements move in step {n}{with_other}{how_far(*pair, selection)}"
                    found[name] = count, text
        return found

    def decays(self, position: int, selection: Selection) -> bool:
        """Whether a frozen leaf moves in proportion to itself, at one rate in two runs."""
        pairs = [self.states[name][:2] for name in ("", _VALUES)]
        rates = [rate for a, b in pairs if (rate := decay_rate(a[position], b[position], selection))]
        epsilon = float(jnp.finfo(self.step.start[position].dtype).eps)  # a rate of Adam is often smaller
        return bool(rates) and bool(np.allclose(rates, rates[0], rtol=0.1, atol=epsilon))


def leaks_of(runs: Runs, program: "StepProgram | None") -> Iterator[Leak]:
    """All leaks; without a program those that runs show."""
    step = runs.step
    for i in step.frozen:
        yield from _moved(runs, program, i)
    yield from _moved_state(runs)
    yield from _held(runs)
    if program is not None:
        yield from _changed(step, program.gradients)
        yield from (_computed(step, program, g) for g in program.gradients if not g.for_results)
        for i in program.untrained():
            got = "no gradient reaches it or its state, although gradients depend on it"
            yield _leak("untrained", IGNORED, step.plan.leaves[i].path, got, step.elements(i, frozen=False))


def _moved(runs: Runs, program: "StepProgram | None", i: int) -> Iterator[Leak]:
    """Frozen elements of a parameter with other bits after a step."""
    step = runs.step
    path, position, selection = step.plan.leaves[i].path, step.params[i], step.plan.selections[i]
    moves = runs.moves(position, selection)

    def leak(cause: Cause, name: str | None = None) -> Leak:
        count, got = moves[next(iter(moves)) if name is None else name]
        return _leak("moved", cause, path, got, count)

    reacts = _STATE in moves and runs.differ(_STATE, position, selection)
    unexplained = next(iter(moves), "")  # the first run in which it moves
    if moves.keys() - {_STATE}:
        decays = runs.decays(position, selection)
        is_set = program is not None and program.sets(i) and not decays
        trains = program is not None and i in program.trained
        if trains or (not is_set and runs.differ(_BATCH, position, selection)):
            yield leak(OTHER_SPEC if path in step.trains_in_state else TRAINS if trains else BATCH)
            return
        if is_set or decays:
            unexplained = _STATE
            yield leak(SET if is_set else DECAY)
        elif not reacts:
            yield leak(AFTER)
    if reacts:
        yield leak(diagnosis.STATE_AFTER, unexplained)
    if program is not None and not moves and any(("frozen", i) in g.nan for g in program.gradients):
        yield _leak("moved", diagnosis.PRODUCT, path, "NaN with a gradient of NaN", step.elements(i, frozen=True))


def _moved_state(runs: Runs) -> Iterator[Leak]:
    """Averages of frozen values, and statistics of frozen modules, with other bits after a step."""
    step = runs.step
    for k, (value, new) in runs.averages.items():
        if count := moved_elements(value, new):
            got = f"{count} elements of an average that equals the frozen value move in some steps{how_far(value, new)}"
            yield _leak("moved", AVERAGE, step.paths[k], got, count)
    for k in step.statistics():
        for count, got in [*runs.moves(k).values()][:1]:
            yield _leak("moved", STATISTICS, step.paths[k], got.replace("frozen elements", "elements"), count)


def _changed(step: Step, gradients: "Sequence[Gradient]") -> Iterator[Leak]:
    """Updates of trainable elements that depend on gradients of frozen ones."""
    found: dict[tuple[int, Cause], list[str]] = {}
    for g in gradients:
        path = step.plan.leaves[g.leaf].path
        by_size, by_nan = ({j for j in g.trainable(answer) if not step.is_frozen(j)} for answer in (g.huge, g.nan))
        for j in sorted(by_size):
            found.setdefault((j, diagnosis.STATISTIC if by_size == {g.leaf} else NORM), []).append(path)
        spreads = any(name == "nan" for name, _ in g.nan)
        for j in sorted(by_nan - by_size if spreads else by_nan):
            found.setdefault((j, FINITE_CHECK), []).append(path)
    for (j, cause), paths in found.items():
        numbers = "of NaN" if cause is FINITE_CHECK else "of 1e15"
        more = f" or of {counted(len(paths) - 1, 'other frozen leaf', 'other frozen leaves')}" * (len(paths) > 1)
        got = f"another update with a gradient {numbers} of {paths[0]}{more}"
        yield _leak("changed", cause, step.plan.leaves[j].path, got, step.elements(j, frozen=False))


def _computed(step: Step, program: "StepProgram", g: "Gradient") -> Leak:
    """A gradient of frozen elements that something reads."""
    answers, names = (g.huge, g.nan), {name for name, _ in g.huge | g.nan}
    readers = {
        "a norm or a finite check": any(j != g.leaf and not step.is_frozen(j) for a in answers for j in g.trainable(a)),
        "its state": ("state", g.leaf) in g.huge | g.nan,
        "its update": ("frozen", g.leaf) in g.huge | g.nan,
        "other state": "other" in names,
        "a result": "result" in names,
    }
    read_by = [name for name, reads in readers.items() if reads]
    cost = "computed in a loop" if g.flops is None else f"{g.flops:,} of {program.flops:,} FLOPs of a step"
    got = f"{cost}; read by {', '.join(read_by)}"
    cause = Cause(f"a gradient that is read by {read_by[0]}", _NO_GRADIENT)
    elements = step.elements(g.leaf, frozen=True)
    return _leak("gradient", cause, step.plan.leaves[g.leaf].path, got, elements, flops=g.flops or 0)


def _held(runs: Runs) -> Iterator[Leak]:
    """State that is held for frozen elements; averages that follow the parameters are not counted."""
    step = runs.step
    by_leaf: dict[str | None, list[int]] = {}
    for k in runs.held:
        if k not in runs.averages:
            by_leaf.setdefault(step.entries[k].leaf, []).append(k)
    for path, places in by_leaf.items():
        whole = [step.index_of[path]] if path is not None else [*step.params]
        frozen, trains = (sum(step.elements(i, frozen=each) for i in whole) for each in (True, False))
        nbytes = sum(step.start[k].nbytes for k in places) * frozen // max(frozen + trains, 1)
        trees = dict.fromkeys(map(step.tree, places))
        got = f"{nbytes:,} bytes, at {', '.join(trees)}"
        yield _leak("state", STATE, path or "", got, frozen, nbytes)


def _leak(kind: Kind, cause: Cause, path: str, got: str, elements: int, nbytes: int = 0, flops: int = 0) -> Leak:
    return Leak(kind, path, cause.name, got, _EXPECTED[kind], cause.fix, int(elements), nbytes, flops)
