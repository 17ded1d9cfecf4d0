"""Where a training step does not freeze what it should, according to its runs and its program, and the likeliest cause.

Runs show which frozen bits move, with whatever part of the step. The program shows what gradients are used for.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

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
    "average only what trains: fz.partition(params, frozen)[0]; or average + (1 - decay) * (params - average), which"
    " keeps a value that it equals",
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


class Runs:
    """The runs of a step, and which frozen bits move in them."""

    def __init__(self, step: Step, steps: int) -> None:
        self.step = step
        self.held = [k for k in step.entries if self._is_held(k)]
        self.averages = self._averages()
        self.given = step.run(steps)
        ones = {
            k: jnp.asarray(step.start[k]) + 1
            for k in self.held
            if k not in self.averages and jnp.issubdtype(step.start[k].dtype, jnp.inexact)
        }
        self.others: dict[str, list[State]] = {
            "another batch": step.run(steps, batch=other_batch(step.batch)),
            "other frozen values": step.run(steps, other_values(step)),
            "another state of frozen elements": step.run(steps, ones) if ones else self.given,
        }

    @property
    def all(self) -> dict[str, list[State]]:
        """All runs, by what differs from the state and the batch that were given."""
        return {"": self.given, **self.others}

    def _is_held(self, k: int) -> bool:
        """Whether a leaf of the state holds values for frozen elements."""
        step, entry = self.step, self.step.entries[k]
        if k in step.kept or entry.address is None or isinstance(entry.value, Part) or not is_array(entry.value):
            return False
        if entry.leaf is None:
            total = sum(int(np.prod(step.plan.leaves[i].shape or ())) for i in step.params)
            return len(step.params) > 1 and bool(step.frozen) and entry.value.shape[-1:] == (total,)
        i = step.index_of.get(entry.leaf)
        return i is not None and is_of_frozen(step.plan.selections[i], entry)

    def _averages(self) -> dict[int, tuple[bool, Any]]:
        """The averages of frozen values: whether one keeps the bits of a value that it equals, and the new value.

        An average is state that is close to the parameters, and that follows a frozen value.
        """
        step, close = self.step, set()
        owned = [k for k, entry in step.entries.items() if entry.leaf in step.index_of]
        for tree in {step.tree(k) for k in self.held}:
            of_tree = [k for k in owned if step.tree(k) == tree]
            pairs = [(step.start[k], step.start[step.params[step.index_of[step.entries[k].leaf]]]) for k in of_tree]
            if all(np.shape(a) == np.shape(b) for a, b in pairs):
                norms = [(jnp.sum(jnp.abs(jnp.asarray(a) - b) ** 2), jnp.sum(jnp.abs(b) ** 2)) for a, b in pairs]
                far, size = np.sum(norms, axis=0) if norms else (1, 0)
                close |= set(of_tree) if far < 0.25 * size else set()
        close &= set(self.held)
        if not close:
            return {}
        values = other_values(step)
        own = {k: values[step.params[step.index_of[step.entries[k].leaf]]] for k in close}
        _, equal = step.run(1, values | {k: value.astype(step.start[k].dtype) for k, value in own.items()})
        _, far = step.run(1, {k: value * 1024 for k, value in values.items()} | own)
        found = {}
        for k, value in own.items():
            i = step.index_of[step.entries[k].leaf]
            selection, position = step.plan.selections[i], step.params[i]
            if moved_elements(far[k], equal[k], selection) and not moved_elements(
                values[position], equal[position], selection
            ):
                found[k] = (
                    not moved_elements(value.astype(step.start[k].dtype), equal[k], selection),
                    (value, equal[k]),
                )
        return found

    def differ(self, name: str, position: int, selection: Selection) -> bool:
        """Whether a frozen element has another value than in the first run, from the same start."""
        pairs = zip(self.given[1:], self.others[name][1:], strict=True)
        return any(moved_elements(a[position], b[position], selection) for a, b in pairs)

    def moves(self, position: int, selection: Selection) -> dict[str, str]:
        """For each run in which a frozen element moves, how many do in which step, and how far."""
        found = {}
        for name, states in self.all.items():
            for n, state in enumerate(states[1:], 1):
                if count := moved_elements(states[0][position], state[position], selection):
                    with_other = f" with {name}" if name else ""
                    far = how_far(states[0][position], state[position], selection)
                    found[name] = f"{count} frozen elements move in step {n}{with_other}{far}"
                    break
        return found

    def decays(self, position: int, selection: Selection) -> bool:
        """Whether a frozen leaf moves in proportion to itself, at one rate in two runs."""
        rates = [
            decay_rate(self.all[name][0][position], self.all[name][1][position], selection)
            for name in ("", "other frozen values")
        ]
        known = [rate for rate in rates if rate]
        return bool(known) and bool(np.allclose(known, known[0], rtol=0.1, atol=0))


def leaks_of(runs: Runs, program: "StepProgram | None") -> Iterator[Leak]:
    """All leaks, by kind."""
    step = runs.step
    for i in step.frozen:
        yield from _moved_leaf(runs, program, i)
    yield from _moved_state(runs)
    if program is not None:
        yield from _changed(step, program.gradients)
        yield from (_computed(step, program, g) for g in program.gradients if not g.for_results)
    yield from _held(runs)
    for i in program.untrained() if program else []:
        got = "no gradient reaches it or its state, although gradients of the step depend on it"
        yield _leak("untrained", IGNORED, step.plan.leaves[i].path, got, np.size(step.start[step.params[i]]))


def _moved_leaf(runs: Runs, program: "StepProgram | None", i: int) -> Iterator[Leak]:
    step = runs.step
    path, position, selection = step.plan.leaves[i].path, step.params[i], step.plan.selections[i]
    moves = runs.moves(position, selection)
    warm = "another state of frozen elements"
    reacts = runs.others[warm] is not runs.given and runs.differ(warm, position, selection)

    def leak(cause: Cause, names: Sequence[str] = ("", *runs.others)) -> Leak:
        got = next((moves[name] for name in names if name in moves), "")
        return _leak("moved", cause, path, got, int(got.split()[0]) if got else 0)

    if moves.keys() - {warm}:
        if program is not None and i in program.trained:
            yield leak(OTHER_SPEC if path in step.trains_in_state else TRAINS)
            return
        decays = runs.decays(position, selection)
        differs = runs.differ("another batch", position, selection)
        is_set = program is not None and program.has_backward and not program.reads_gradients(i)
        if is_set and not decays and program.reads_batch(i):
            yield leak(SET)
        elif differs:
            yield leak(OTHER_SPEC if path in step.trains_in_state else BATCH)
            return
        elif decays or not reacts:
            yield leak(DECAY if decays else AFTER)
    if reacts:
        yield leak(diagnosis.STATE_AFTER, (warm,))
    if program is not None and not moves and any(i in g.nan.frozen for g in program.gradients if g.leaf == i):
        got = "frozen elements are NaN with a gradient of NaN"
        yield _leak("moved", diagnosis.PRODUCT, path, got, 0)


def _moved_state(runs: Runs) -> Iterator[Leak]:
    """Averages of frozen values, and statistics of frozen modules."""
    step = runs.step
    for k, (keeps, (value, new)) in runs.averages.items():
        selection = step.plan.selections[step.index_of[step.entries[k].leaf]]
        if not keeps:
            count, far = moved_elements(value.astype(new.dtype), new, selection), how_far(value, new, selection)
            got = f"{count} elements of an average that equals the frozen value move in a step{far}"
            yield _leak("moved", AVERAGE, step.paths[k], got, count)
    for k in step.statistics():
        if moves := runs.moves(k, FROZEN):
            got = next(iter(moves.values())).replace("frozen elements", "elements")
            yield _leak("moved", STATISTICS, step.paths[k], got, int(got.split()[0]))


def _changed(step: Step, gradients: "Sequence[Gradient]") -> Iterator[Leak]:
    """Updates of trainable elements that depend on gradients of frozen ones."""
    found: dict[tuple[int, Cause], list[str]] = {}
    for g in gradients:
        path = step.plan.leaves[g.leaf].path
        by_size, by_nan = ({j for j in a.trainable | a.state if not step.is_frozen(j)} for a in (g.huge, g.nan))
        if not step.is_frozen(g.leaf):
            by_size, by_nan = by_size - (g.huge.state & {g.leaf}), by_nan - (g.nan.state & {g.leaf})
        for j in sorted(by_size):
            found.setdefault((j, diagnosis.STATISTIC if by_size == {g.leaf} else NORM), []).append(path)
        for j in sorted(by_nan if by_nan and not g.nan.nan else by_nan - by_size):
            found.setdefault((j, FINITE_CHECK), []).append(path)
    for (j, cause), paths in found.items():
        numbers = "of NaN" if cause is FINITE_CHECK else "of 1e15"
        more = f" or of {counted(len(paths) - 1, 'other frozen leaf', 'other frozen leaves')}" * (len(paths) > 1)
        got = f"another update with a gradient {numbers} of {paths[0]}{more}"
        yield _leak("changed", cause, step.plan.leaves[j].path, got, step.elements(j, frozen=False))


def _computed(step: Step, program: "StepProgram", g: "Gradient") -> Leak:
    """A gradient of frozen elements that something reads."""
    others = {j for a in (g.huge, g.nan) for j in a.trainable | a.state if j != g.leaf and not step.is_frozen(j)}
    readers = {
        "a norm or a finite check": bool(others),
        "its state": g.leaf in g.huge.state | g.nan.state,
        "its update": g.leaf in g.huge.frozen | g.nan.frozen,
        "other state": g.huge.other or g.nan.other,
        "a result": g.huge.results or g.nan.results,
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
