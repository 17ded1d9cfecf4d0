"""Runs of a training step from the state as it is and from others, and the bits that they change.

Only the first and the current state of a run are kept: leaves are compared on the device, step by step.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._audit.measurements import Change, changes_of, is_cast_of, moved_elements, share
from optax_freeze._audit.reactions import difference
from optax_freeze._audit.step import State, Step, like
from optax_freeze._errors import in_one_line, is_array
from optax_freeze._spec.memory_kinds import to_device
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, Selection
from optax_freeze._spec.tree import Part
from optax_freeze._state.state_entries import Entry

if TYPE_CHECKING:
    from optax_freeze._audit.changed_gradients import ChangedGradients
    from optax_freeze._audit.untaken_branches import UntakenBranches

ANOTHER_BATCH, ANOTHER_VALUES = "another batch", "other frozen values"
ANOTHER_STATE = "another state of frozen elements"


@dataclasses.dataclass(frozen=True)
class Move:
    """How many frozen elements of a leaf have other bits after a step of a run."""

    run: str
    step: int
    count: int
    total: int
    changes: list[Change] = dataclasses.field(default_factory=list)  # in this step and in each after it
    digests: list[bytes] = dataclasses.field(default_factory=list)  # of the new bits, likewise

    def __str__(self) -> str:
        more = f" with {self.run}" if self.run else ""
        verb = "moves" if self.count == 1 else "move"
        return f"{self.count} of {self.total} frozen elements {verb} in step {self.step}{more}{self.changes[0].far}"


class Record:
    """What some steps do to the frozen leaves and other leaves that are watched."""

    def __init__(self, runs: "Runs", name: str, before: State) -> None:
        self.runs, self.name, self._before, self._steps = runs, name, before, 0
        self.moves: dict[int, Move] = {}

    def add(self, state: State) -> None:
        """Compares the state after a step with the one before the first."""
        self._steps += 1
        watched, still = self.runs.watched, [k for k in self.runs.watched if k not in self.moves]
        counts = moved_elements(*((self._before[k], state[k], watched[k]) for k in still))
        for k, count, updated in zip(still, counts, self._updated(still, state), strict=True):
            if count or updated:
                total = np.sum(np.broadcast_to(watched[k].frozen(np.ndim(self._before[k])), np.shape(self._before[k])))
                self.moves[k] = Move(self.name, self._steps, max(count, updated), int(total))
        updates = {k: state[at] for k, at in self.runs.step.updates.items()}
        leaves = [(self._before[k], state[k], watched[k], updates.get(k)) for k in self.moves]
        for move, (change, digest) in zip(self.moves.values(), changes_of(*leaves), strict=True):
            move.changes.append(change)
            move.digests.append(digest)

    def _updated(self, positions: Sequence[int], state: State) -> list[int]:
        """How many frozen elements of parameters have updates, which may be too small to change a bit."""
        step, counts = self.runs.step, {}
        for k in (k for k in positions if k in step.updates):
            update, frozen = state[step.updates[k]], self.runs.watched[k].frozen(np.ndim(self._before[k]))
            counts[k] = difference(update, jnp.zeros_like(update), np.asarray(frozen))[0]
        found = jax.device_get(counts)
        return [int(found.get(k, 0)) for k in positions]


class Runs:
    """The runs of a step, by what differs from the state and the batch that were given; the first as they are.

    Attributes:
      watched: the positions of leaves that are compared, with their frozen elements.
      held: the positions of state for frozen elements, with the number of their parameter; None: all of them.
      averages: for each average of frozen values its parameter, and how many elements rounding changes.
      copies: the other copies of frozen values that move, with their parameters.
      counters: the positions of integers that count steps.
      thawed: the runs with larger counters, and positions, in which only the thawing of a group moves frozen elements.
      notes: the runs that could not be made, and what they would have shown.
    """

    def __init__(
        self,
        step: Step,
        gradients: "ChangedGradients | None",
        steps: int,
        batches: Sequence[Any] = (),
        values: Mapping[int, Any] | bool = True,
        branches: "UntakenBranches | None" = None,
    ) -> None:
        self.step, self.gradients, self.steps, self.branches = step, gradients, steps, branches
        self.notes: list[str] = []
        self.thawed: set[tuple[str, int]] = set()
        self._statistics = step.statistics()
        self.watched = {step.params[i]: step.plan.selections[i] for i in step.frozen}
        self.watched |= dict.fromkeys(step.bits.values(), FROZEN) | dict.fromkeys(self._statistics, FROZEN)
        pairs = {} if step.is_fresh else self._copies()
        self.watched |= dict.fromkeys(pairs, FROZEN)
        self.records: dict[str, Record] = {"": self._first()}
        own = values if isinstance(values, Mapping) else step.other_values() if values else {}
        self.averages = self._averages(pairs, own)
        self.copies = self._other_copies(pairs)
        for batch in batches:
            self._run(ANOTHER_BATCH, "other_batch", {}, batch)
        if values is not False:
            self._run_with_values(own)
        self._candidates = self._of_state()
        self._run_with_state()
        self._run_later()
        self.held = self._held()
        if branches is not None:
            self.notes += branches.note([i for i in step.frozen if self.moves(step.params[i])])

    def _run_with_values(self, values: Mapping[int, Any]) -> None:
        """With other frozen values; averages that equal these begin as their copies, as they did before."""
        start, at = self.step.start, {k: self.step.params[i] for k, (i, *_) in self.averages.items()}
        equal = {k: like(start[k], to_device(values[at[k]])) for k in at if at[k] in values}
        self._run(ANOTHER_VALUES, "other_values", {**values, **equal})

    def _run_with_state(self) -> None:
        """With moments for frozen elements, if there is state for them; the integers of an optimizer count steps."""
        step = self.step
        inexact = {k for k in self._candidates if jnp.issubdtype(step.start[k].dtype, jnp.inexact)}
        places = [k for k in self._candidates if np.size(step.start[k]) and k not in step.in_optimizer - inexact]
        if places:
            moments = {k: like(step.start[k], jnp.asarray(to_device(step.start[k])) + 1) for k in places}
            self._run(ANOTHER_STATE, "", moments)

    def _first(self) -> Record:
        step, gradients = self.step, self.gradients
        record, before = Record(self, "", step.start), step.start
        for _ in range(self.steps):
            self._see(before)
            if gradients is None:
                before, _ = step.advance(before)
                record.add(before)
            else:
                before = gradients.repeat(before, record.add)
        self.counters = self._counters_of(before)
        return record

    def _see(self, state: State, batch: Any = None) -> None:
        if self.branches is not None:
            self.branches.see(state, batch)

    def _counters_of(self, last: State) -> list[int]:
        step = self.step
        own = {*step.params.values()} | {*step.bits.values()}
        return [
            k
            for k, (a, b) in enumerate(zip(step.start, last, strict=True))
            if k not in own and is_array(a) and np.shape(a) == () and jnp.issubdtype(a.dtype, jnp.integer)
            if int(b) - int(a) == self.steps
        ]

    def _run(self, name: str, option: str, changes: Mapping[int, Any], batch: Any = None, steps: int = 0) -> None:
        step = self.step
        given = [changes.get(k, leaf) for k, leaf in enumerate(step.start)]
        record, left = Record(self, name, given), steps or self.steps
        try:
            self._see(given, batch)
            for state in step.run(left, changes, batch):
                record.add(state)
                if left := left - 1:
                    self._see(state, batch)
        except Exception as error:
            fix = f": pass {option}=, or {option}=False" if option else ""
            text = f"{type(error).__name__}: {in_one_line(error)[:60]}"
            self.notes.append(f"the step does not run with {name} ({text}), so what this would show is not known{fix}")
            return
        self.records[name] = record

    def _run_later(self) -> None:
        """One step each with larger counters, for what a schedule hides in the first steps."""
        for number, changes in self.step.later(self.counters):
            quiet, name, held = len(self.notes), f"counters at {number:,}", "groups as they are now"
            self._run(name, "", changes, steps=1)
            if self.step.group_steps and name in self.records and self.records[name].moves:
                self._run(held, "", {k: v for k, v in changes.items() if k not in self.step.group_steps}, steps=1)
                still = self.records.pop(held).moves if held in self.records else self.records[name].moves
                self.thawed |= {(name, k) for k in self.records[name].moves if k not in still}
            del self.notes[quiet:]

    def _copies(self) -> dict[int, int]:
        """The leaves of the state that have the values of a parameter with frozen elements, and may be its copies."""
        step, pairs = self.step, {}
        own = {*step.params.values()}
        for k, leaf in enumerate(step.start):
            if k in own or not is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact) or not np.size(leaf):
                continue
            alike = [i for i in step.frozen if np.shape(step.start[step.params[i]]) == np.shape(leaf)]
            equal = [i for i in alike if is_cast_of(leaf, step.start[step.params[i]])]
            equal = [i for i in equal if step.owner(k) == i or step.ends_with(k, i)] or equal
            if equal:
                pairs[k] = equal[0]
        return pairs

    def _averages(self, pairs: Mapping[int, int], values: Mapping[int, Any]) -> dict[int, tuple[int, int, str]]:
        """State that remains what a frozen value is, up to rounding, and that follows one that is another."""
        step = self.step
        if not pairs:
            return {}
        values = {**{step.params[i]: step.start[step.params[i]] for i in step.frozen}, **values}
        own = {k: like(step.start[k], to_device(values[step.params[i]])) for k, i in pairs.items()}
        first, found = self.records[""].moves, {}
        try:
            equal = _last(step.run(self.steps, {**values, **own}))
            for k, i in pairs.items():
                selection, at = step.plan.selections[i], step.params[i]
                leaves = (values[at], equal[at], selection), (own[k], equal[k], selection)
                moved, count = moved_elements(*leaves)
                [(change, _)] = changes_of((*leaves[1], None))
                if not moved and change.ulps <= 4 * self.steps:
                    found[k] = i, count, change.far
            del equal
            if not found:
                return {}
            far = {k: like(v, to_device(v) * 1024) for k, v in values.items()}
            follows = _last(step.run(self.steps, {**far, **own}))
        except Exception:  # said by the run with other values
            return {}
        for k, (i, count, _) in [*found.items()]:
            selection, at = step.plan.selections[i], step.params[i]
            given = step.start[k], like(step.start[k], to_device(step.start[at])), selection
            if moved_elements((own[k], follows[k], selection)) == [0]:
                del found[k]
            elif not count and k in first and at not in first and moved_elements(given) == [0]:
                found[k] = i, first[k].count, first[k].changes[0].far
        return found

    def _other_copies(self, pairs: Mapping[int, int]) -> dict[int, int]:
        """Copies of frozen values, up to a cast, that move by themselves; values that are all equal prove no copy."""
        moves, start = self.records[""].moves, self.step.start
        moved = {k: i for k, i in pairs.items() if k in moves and k not in self.averages and self.step.is_frozen(i)}
        return {k: i for k, i in moved.items() if bool((to_device(start[k]) != to_device(start[k]).ravel()[0]).any())}

    def _of_state(self) -> dict[int, int | None]:
        """The leaves of the state that may be moments of frozen elements, with their parameters."""
        step, found = self.step, {}
        others = {*step.params.values(), *self.averages, *self.copies, *step.kept, *self._statistics}
        for k, leaf in enumerate(step.start):
            is_number = is_array(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended) and leaf.dtype != bool
            if k in others or not is_number:
                continue
            if k in step.in_optimizer or self.gradients is None:
                if self._is_of_frozen(k):
                    found[k] = step.owner(k)
            elif k in self.gradients.state_of:
                found[k] = self.gradients.state_of[k]
            elif alike := [i for i in step.frozen if step.is_frozen(i) and step.ends_with(k, i)]:
                found[k] = alike[0]
        return found

    def _is_of_frozen(self, k: int) -> bool:
        """Whether a leaf of an optimizer state holds values for frozen elements, by its path."""
        step, entry = self.step, self.step.entries.get(k)
        if entry is None or k in step.kept or entry.address is None:
            return False
        if isinstance(entry.value, Part) or not is_array(entry.value):
            return False
        if entry.leaf is None:  # all parameters in one vector
            size = sum(int(np.size(step.start[position])) for position in step.params.values())
            return len(step.params) > 1 and bool(step.frozen) and entry.value.shape[-1:] == (size,)
        i = step.owner(k)
        return i is not None and _is_of_frozen_elements(step.plan.selections[i], entry)

    def _held(self) -> dict[int, int | None]:
        """The state for frozen elements: of an optimizer, or a frozen parameter or its gradient proves it."""
        step, gradients = self.step, self.gradients
        held = {
            k: i
            for k, i in self._candidates.items()
            if k in step.in_optimizer or (i is not None and self.reacts(step.params[i]))
        }
        for k, i in (gradients.state_of if gradients is not None else {}).items():
            if k not in self.averages and k not in self.copies and k not in step.kept:
                held.setdefault(k, i)
        return held

    def statistics(self) -> list[int]:
        """The leaves of frozen modules that move as running averages do, and that no loss reads."""
        step, start = self.step, self.step.start
        moved = [k for k in self._statistics if self.moves(k) and k not in self.averages and k not in self.held]
        if not moved:
            return []
        [plain] = step.run(1)
        plain = {k: plain[k] for k in moved}
        shifts = {k: like(start[k], 1 + jnp.abs(to_device(start[k]))) for k in moved}
        [shifted] = step.run(1, {k: like(start[k], to_device(start[k]) + shift) for k, shift in shifts.items()})
        moved = [k for k in moved if 0 < share(shifts[k], plain[k], shifted[k]) < 1]
        read = [k for k in moved if self.gradients is not None and self.gradients.reads(k)]
        if read:
            paths = ", ".join(step.paths[k] for k in read[:3])
            self.notes.append(
                f"running averages of a frozen module move, and the loss reads them ({paths}): right for a codebook, a"
                " leak if they are batch statistics, as of BatchRenorm"
            )
        return [k for k in moved if k not in read]

    def reacts(self, position: int) -> bool:
        """Whether frozen elements move with another state, and in another way than with the given one."""
        return ANOTHER_STATE in self.moves(position) and self.differ(ANOTHER_STATE, position)

    def differ(self, name: str, position: int) -> bool:
        """Whether frozen elements have other values than in the first run."""
        if name not in self.records:
            return False
        moves = self.moves(position)
        a, b = ((moves[each].step, moves[each].digests) if each in moves else None for each in ("", name))
        return a != b

    def moves(self, position: int) -> dict[str, Move]:
        """How frozen elements move, in each run in which they do."""
        return {name: record.moves[position] for name, record in self.records.items() if position in record.moves}

    def decays(self, position: int, names: Sequence[str]) -> bool:
        """Whether a leaf moves in proportion to itself, at one rate; at a rate of a few roundings further each step."""
        found = [move for name, move in self.moves(position).items() if name in names]
        rates = [move.changes[0].rate for move in found]
        epsilon = float(jnp.finfo(self.step.start[position].dtype).eps)  # a rate of Adam is often smaller
        if not rates or not all(rates) or not np.allclose(rates, rates[0], rtol=0.1, atol=epsilon):
            return False
        if self.step.updates:  # of each step alone
            return True
        all_rates = [[change.rate for change in move.changes] for move in found]
        if abs(rates[0]) > 16 * epsilon:  # a projection moves once
            return not all(len(each) > 2 and np.ptp(each) <= 1e-3 * abs(each[0]) for each in all_rates)
        return all(len(each) > 1 and 0.7 * len(each) <= each[-1] / each[0] for each in all_rates)

    def is_rounding(self, position: int) -> bool:
        """Whether frozen elements move by units of the last place, if the step runs as it is."""
        moved = self.moves(position)
        found = [moved[name] for name in ("", ANOTHER_BATCH) if name in moved] or [*moved.values()]
        return all(move.changes[0].ulps <= 2 for move in found)


def _is_of_frozen_elements(selection: Selection, entry: Entry) -> bool:
    """Whether an entry of the state of a leaf holds values for frozen elements; a dense mask keeps them by design."""
    value = entry.value
    if selection is FROZEN:
        is_number = entry.shape == () and jnp.issubdtype(value.dtype, jnp.inexact)
        return value.size > 0 and (value.ndim > 0 or is_number)
    is_full = isinstance(selection, DenseMask) and not selection.compact
    by_design = is_full and entry.selection is not TRAINABLE
    return selection is not TRAINABLE and not by_design and value.shape[value.ndim - len(entry.shape) :] == entry.shape


def _last(states: Iterator[State]) -> State:
    return collections.deque(states, maxlen=1).pop()
