"""What reads the gradients of frozen parameters in a training step: it runs with other values of them.

Each step of a run is repeated from its state before: with other gradients of all frozen parameters, and, if something
reacts, of one after the other, or of at most 16 groups. Zeros in place of all gradients show what else moves
parameters.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._audit.measurements import digests_of
from optax_freeze._audit.probe import ZERO, Probe
from optax_freeze._audit.reactions import CHANGES, Answer, Gradient
from optax_freeze._audit.step import State, Step, like, other_values
from optax_freeze._errors import counted, in_one_line, is_array, listed
from optax_freeze._spec.memory_kinds import to_device
from optax_freeze._spec.selection import TRAINABLE

_GROUPS = 16
_LONG = 64
_ZEROS_ONLY = (CHANGES.index("huge"), CHANGES.index("nan"))
_NOT_KNOWN = "which gradients of frozen parameters are computed, and what reads them, is not known"

Digests: TypeAlias = dict[int, tuple[np.ndarray, np.ndarray]]
"""For each array, by its position, a digest of its frozen elements and one of all others."""

Make: TypeAlias = Callable[[str], Step]
"""The step with losses that stop the gradients of frozen parameters (``"stop"``), do not (``"plain"``), or tell which
gradients are zero (``"watch"``)."""


class ChangedGradients:
    """The reactions of a step to other gradients of frozen parameters.

    Attributes:
      state_of: from the positions of state that takes in the gradient of a frozen parameter to this parameter.
      counters: the positions of integers that count steps.
      by_values: none; see ``GivenGradients``.
    """

    by_values: frozenset[int] = frozenset()
    counters: Sequence[int] = ()

    def __init__(self, step: Step, probe: Probe, make: Make, batches: Sequence[Any]) -> None:
        self._step, self._probe, self._make, self._batches = step, probe, make, [*batches]
        self._param_at = {k: i for i, k in step.params.items()}
        self.state_of: dict[int, int] = {}
        self._answers: dict[tuple[int, ...], list[set[tuple[str, int | None]]]] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._computed: set[int] = set()
        self._random: set[int] = set()
        self._steps = 0
        self._moved: set[int] = set()
        self._reached: set[int] = set()
        self._set: set[int] = set()
        self._by_values: set[int] = set()
        self._of_zeros: set[int] = set()

    def react(self, before: State, plain: Digests) -> None:
        """Repeats a step from the state before it with other gradients, and compares the results with those of it."""
        computed = sorted(self._probe.computed & {*self._step.frozen})
        self._computed |= {*computed}
        self._steps += 1
        if before is self._step.start:
            self._random |= {*self._differing(plain, self._plain)}
        self._without_gradients(before, plain)
        if computed:
            self._with_others(before, plain, computed)

    def compare(self, before: Digests, plain: Digests, again: Digests) -> None:
        """Which trainable parameters a step moves, and what differs in two equal runs of it."""
        moved = self._differing(before, plain)
        self._moved |= {i for k, i in self._param_at.items() if moved.get(k, (False, False))[1]}
        self._random |= {*self._differing(plain, again)}

    def digests(self, results: State) -> Digests:
        """A digest of each array of a state, and of the other results: of frozen elements and of all others."""
        found: Digests = {}
        for k, x in enumerate(results):
            if is_array(x):
                i = self._param_at.get(k)
                selection = TRAINABLE if i is None else self._step.plan.selections[i]
                found[k] = digests_of(x, selection)
        return dict(zip(found, jax.device_get([*found.values()]), strict=True))

    def begin(self, before: State) -> None:
        """Before each step of the run that is repeated."""
        self._probe.begin({i: before[k] for i, k in self._step.params.items()})

    def _run(
        self, before: State, change: int | None = None, leaves: Collection[int] = (), batch: Any = None
    ) -> Digests:
        """The digests of the new state, and of the other results, of one step with other gradients."""
        probe = self._probe
        self.begin(before)
        probe.change, probe.chosen = change, frozenset(leaves)
        try:
            new, others = self._step.advance(before, batch)
            return self.digests([*new, *others])
        finally:
            probe.change = None

    @functools.cached_property
    def _plain(self) -> Digests:
        """The digests after one step from the start, as it is."""
        return self._run(self._step.start)

    def _with(self, changes: Mapping[int, Any]) -> State:
        """The state at the start with other arrays at some positions."""
        return [changes.get(k, leaf) for k, leaf in enumerate(self._step.start)]

    def _differing(self, a: Digests, b: Digests) -> dict[int, tuple[bool, bool]]:
        """The positions at which two states differ: whether frozen elements do, and whether others do."""
        pairs = ((k, [bool((x != y).any()) for x, y in zip(a[k], b[k], strict=True)]) for k in a.keys() - self._random)
        return {k: (frozen, elsewhere) for k, (frozen, elsewhere) in pairs if frozen or elsewhere}

    def _without_gradients(self, before: State, results: Digests) -> None:
        """What depends on the gradients of the losses, and what on the batch without them."""
        plain = results
        if self._probe.nonzero:
            plain = self._run(before, ZERO, self._step.params)
            self._reached |= {*self._differing(results, plain)}
        if before is self._step.start:
            given = self._with(other_values(self._step))
            with contextlib.suppress(Exception):  # the run with other values says so
                self._by_values = {*self._differing(plain, self._run(given, ZERO, self._step.params))}
        while self._batches:
            with contextlib.suppress(Exception):  # the run with another batch says so
                self._set |= {*self._differing(plain, self._run(before, ZERO, self._step.params, self._batches.pop()))}

    def _with_others(self, before: State, results: Digests, computed: Sequence[int]) -> None:
        """Asks all gradients at once, and one after the other if something reacts that has not reacted before."""
        changes = range(ZERO)
        rows = {c: self._differing(results, self._run(before, c, computed)) for c in changes}
        cells = {(c, k, *hits) for c, row in rows.items() for k, hits in row.items()}
        if cells <= self._seen:  # one by one only once for each reaction, since each leaf costs a run of the step
            return
        self._seen |= cells
        groups = [tuple(map(int, group)) for group in np.array_split(computed, min(len(computed), _GROUPS))]
        for group in groups:
            for c in (c for c in changes if rows[c]):
                row = rows[c] if len(groups) == 1 else self._differing(results, self._run(before, c, group))
                self._add(group, c, row)

    def ask_zeros(self) -> None:
        """If nothing reacts, the gradients that are zero in these steps are changed, too."""
        if self._seen or not self._computed:
            return
        step, probe = self._step, self._probe
        results = self._plain
        probe.zeros = True
        try:
            for c in _ZEROS_ONLY:
                found = self._differing(results, self._run(step.start, c, self._computed))
                self._of_zeros |= {k for k in found if k < len(step.start)}
        finally:
            probe.zeros = False

    def _add(self, group: tuple[int, ...], change: int, row: Mapping[int, tuple[bool, bool]]) -> None:
        step, answers = self._step, self._answers.setdefault(group, [set() for _ in CHANGES])
        for k, (in_frozen, elsewhere) in row.items():
            if k >= len(step.start):
                answers[change].add(("result", None))
            elif (i := self._param_at.get(k)) is not None:
                hits = ("frozen", in_frozen), ("trainable", elsewhere)
                answers[change] |= {(name, i) for name, hit in hits if hit}
            else:
                owner = step.owner(k)
                if change == CHANGES.index("negative") and (held := self._holds(k, group)) is not None:
                    self.state_of[k] = owner = held
                answers[change].add(("other" if owner is None else "state", owner))

    def _holds(self, k: int, group: tuple[int, ...]) -> int | None:
        """The parameter of the same size whose gradient an array of the state takes in, with its sign."""
        step, alone = self._step, len(group) == 1
        for i in group:
            fits = np.size(step.start[k]) == np.size(step.start[step.params[i]])
            if fits and (step.owner(k) == i or (step.owner(k) is None and (alone or step.ends_with(k, i)))):
                return i
        return None

    @functools.cached_property
    def gradients(self) -> list[Gradient]:
        """The gradients of parameters with frozen elements that something reads, or that leave a jitted function."""
        negative, huge, nan, inf, signed, _ = range(len(CHANGES))
        found = []
        for group, answers in self._answers.items():
            sets: list[Answer] = [frozenset(answers[c]) for c in (negative, huge, nan, inf)]
            sets[huge] |= answers[signed]
            found.append(Gradient.of(group, sets, self.flops[1]))
        leaving, _ = self._unread
        return found + [Gradient.of((i,), (), self.flops[1], True) for i in leaving]

    @property
    def for_results(self) -> list[Gradient]:
        """The gradients that only results beside the state read."""
        return [g for g in self.gradients if not g.leaves_call and g.read <= {"result"}]

    @functools.cached_property
    def _unread(self) -> tuple[list[int], list[int]]:
        """The gradients that are computed though nothing reacts to them: those that leave a jitted function, and those
        that an effect reads, or that are computed outside of any jitted function."""
        read = {i for group, answers in self._answers.items() if any(answers) for i in group}
        left = [i for i in sorted(self._computed - read) if self._step.is_frozen(i) and not self._of_zeros]
        inside = [i for i in left if i not in self._probe.eager]
        if inside:
            self._probe.computed.clear()
            try:
                arrays, _ = self._step.arrays_of(self._step.start, self._step.batch)
                jax.block_until_ready(jax.jit(_results(self._step))(*arrays))
                jax.effects_barrier()
            except Exception:  # it reads values, and cannot be compiled as a whole
                return [], left
        needed = self._probe.computed
        return [i for i in inside if i not in needed], [i for i in left if i not in inside or i in needed]

    @functools.cached_property
    def flops(self) -> tuple[int, int | None]:
        """The FLOPs of a step, and of the gradients of frozen parameters in it; None if it cannot be traced."""
        from optax_freeze._jax_internals import without_unused  # loads jax.extend: slow
        from optax_freeze._program.flops import flops

        found = []
        for way in ("plain", "stop"):
            step = self._make(way)
            try:
                closed = jax.make_jaxpr(_results(step))(*step.arrays_of(step.start, step.batch)[0])
            except Exception:
                return 0, None
            program, _ = without_unused(closed, [True] * len(closed.jaxpr.outvars))
            found.append(flops(program.jaxpr.eqns))
        return found[0], max(found[0] - found[1], 0)

    def sets(self, i: int) -> bool:
        """Whether the new value of a parameter depends on the batch without the gradient of a loss."""
        return self._step.params[i] in self._set

    @functools.cached_property
    def untrained(self) -> tuple[list[int], list[int]]:
        """The trainable parameters that do not move, and whose gradient neither they nor their state reads.

        The second list has those with respect to which no loss is differentiated.
        """
        step, probe = self._step, self._probe
        still = [i for i in step.params if not step.is_frozen(i) and i in probe.given and i not in self._moved]
        still = [i for i in still if step.plan.leaves[i].path not in step.in_groups]
        kept = [i for i in still if i not in probe.differentiated]
        left = [i for i in still if i in probe.differentiated and (i in probe.nonzero or self._is_read(i))]
        left = self._still_later(left) if left else []
        return self._not_zero(left) if left else [], kept

    def _still_later(self, leaves: Sequence[int]) -> list[int]:
        """The parameters that do not move either with larger counters, which a schedule may read, or, if their state
        does, in many more steps, which an accumulation may need."""
        step = self._step

        def still(new: Digests) -> list[int]:
            moved = self._differing(self.digests(step.start), new)
            return [i for i in leaves if not moved.get(step.params[i], (False, False))[1]]

        for _, counters in step.later(self.counters):
            leaves = still(self._run(self._with(counters)))
        state = step.start
        for _ in range(_LONG if any(map(self._reaches_state, leaves)) else 0):
            state, _ = step.advance(state)
        return still(self.digests(state))

    def _not_zero(self, leaves: Sequence[int]) -> list[int]:
        """The parameters whose gradient is not zero in these steps, or a symbolic zero."""
        step, probe = self._make("watch"), self._probe
        state = step.start
        for _ in range(self._steps):
            state, _ = step.advance(state)
        jax.effects_barrier()
        return [i for i in leaves if i in probe.not_zero or i not in probe.nonzero]

    def _reaches_state(self, i: int) -> bool:
        """Whether an array of the state that may belong to a parameter depends on the gradients."""
        step = self._step
        state = (k for k in self._reached if k < len(step.start) and k not in self._param_at)
        size = np.size(step.start[step.params[i]])
        return any(step.owner(k) == i or (step.owner(k) is None and np.size(step.start[k]) >= size) for k in state)

    def _is_read(self, i: int) -> bool:
        """Whether something else in the step depends on the value of a parameter."""
        step, k = self._step, self._step.params[i]
        given = to_device(step.start[k])
        other = like(step.start[k], (jnp.asarray(given) * 1.25 + 0.1).astype(given.dtype))
        return bool({*self._differing(self._plain, self._run(self._with({k: other})))} - {k})

    def reads(self, k: int) -> bool:
        """Whether trainable parameters, or results beside the state, depend on an array of the state."""
        step = self._step
        shifted = like(step.start[k], 1 + 1.5 * jnp.abs(jnp.asarray(to_device(step.start[k]))))
        found = self._differing(self._plain, self._run(self._with({k: shifted})))
        return any(at in self._param_at and hit[1] for at, hit in found.items())

    def notes(self) -> Iterator[str]:
        """What is not known, and what is no leak but worth knowing."""
        yield from self._notes_of_losses()
        yield from self._notes_of_reactions()

    def _paths(self, leaves: Iterable[int]) -> str:
        return _paths(self._step.plan.leaves[i].path for i in leaves)

    def _notes_of_losses(self) -> Iterator[str]:
        """What the losses were given, and what of it nobody differentiates."""
        step, probe, paths = self._step, self._probe, self._paths
        for number in sorted({*range(probe.losses)} - probe.called):
            which = f"loss {number}" if probe.losses > 1 else "the loss"
            yield f"{which} is not called by the step that `make_step` returns: {_NOT_KNOWN}"
        if probe.called and probe.several:
            several = " or ".join(" and ".join(each) for each in sorted(probe.several))
            yield f"what a loss gets may be one of several parts ({several}): {_NOT_KNOWN}: pass loss={{path: loss}}"
        elif probe.called and not probe.given:
            yield f"the loss is called with something else than the parameters, at other paths: {_NOT_KNOWN}"
        elif probe.called and not probe.differentiated:
            yield f"the step takes no gradient of the loss, which it calls: {_NOT_KNOWN}"
        unseen = [i for i in step.frozen if probe.given and i not in probe.given]
        if unseen:
            leaves = counted(len(unseen), "frozen leaf is", "frozen leaves are")
            yield f"{leaves} given to no loss ({paths(unseen)}): whether a gradient of them is computed is not known"
        parts = "a loss gets a part of {}, of which some elements are frozen: whether their gradient is read"
        others = "a loss gets other values of {} than the parameters have, in another order or changed: whether the"
        others += " gradient of its frozen elements is read"
        twice = "the gradient of the loss is differentiated again ({}): what else reads this derivative"
        not_judged = {parts: probe.other_shape, others: probe.other_values, twice: probe.twice}
        yield from (f"{text.format(paths(sorted(i)))} is not known" for text, i in not_judged.items() if i)

    def _notes_of_reactions(self) -> Iterator[str]:
        """What the results depend on, or do not."""
        step, probe, paths = self._step, self._probe, self._paths
        if self._random:
            names = _paths(step.paths[k] if k < len(step.start) else "a result" for k in sorted(self._random))
            yield f"two equal runs differ ({names}): what this depends on is not known"
        for what, found in (("the batch", self._set), ("frozen values", self._by_values)):
            leaves = [i for k, i in self._param_at.items() if k in found and not step.is_frozen(i)]
            if leaves:
                yield (
                    f"trainable leaves depend on {what} without the gradient of a given loss ({paths(leaves)}): if"
                    " there is another loss, what reads its gradients is not known"
                )
        if self._of_zeros:
            names = _paths(step.paths[k] for k in sorted(self._of_zeros))
            yield f"the gradients of frozen parameters are zero in these steps; others would reach {names}"
        untrained, kept = self.untrained
        if kept:
            text = counted(len(kept), "trainable leaf", "trainable leaves")
            yield f"the step returns {text} as given: {paths(kept)}"
        if probe.nonzero and not self._moved and not untrained:
            yield "trainable parameters do not move in these steps: give more, for gradient accumulation or a warm-up"
        results = {i for g in self.for_results for i in g.leaves}
        logged = [*results, *self._unread[1]]
        if logged:
            total, of_frozen = self.flops
            cost = "" if of_frozen is None else f" ({of_frozen:,} of {total:,} FLOPs)"
            leaves = counted(len(logged), "frozen leaf", "frozen leaves")
            yield (
                f"gradients of {leaves} are computed{cost}, but no parameter and no state depends on them: results"
                " beside the state, a callback or what did not run may read them"
            )


def _results(step: Step) -> Callable[..., list[Any]]:
    """A step as a function of arrays alone, which returns those that it computes."""
    _, filled = step.arrays_of(step.start, step.batch)

    def results(*arrays: Any) -> list[Any]:
        new, others = step(*filled(arrays))
        return [x for x in (*new, *others) if isinstance(x, jax.Array)]

    return results


def not_known(error: Exception) -> str:
    """The note if a step does not run with a probe, but runs without."""
    text = f"{type(error).__name__}: {in_one_line(error)[:80]}"
    return f"the loss cannot be changed while the step runs, as in forward mode ({text}): {_NOT_KNOWN}"


NO_LOSS = f"no loss is given: {_NOT_KNOWN}: fz.audit_step(make_step, ..., loss=loss), where make_step(loss) is the step"


def _paths(paths: Iterable[str]) -> str:
    return listed(path or "the parameter" for path in dict.fromkeys(paths))
