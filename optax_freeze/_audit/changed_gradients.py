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
from optax_freeze._audit.reactions import CHANGES, Gradient, Gradients
from optax_freeze._audit.step import State, Step, like
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
    """

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

    def repeat(self, before: State, see: Callable[[State], None]) -> State:
        """The state after a step, which ``see`` gets, too, and which is repeated with other gradients."""
        step = self._step
        self._begin(before)
        state, others = step.advance(before)
        see(state)
        plain = self._digests([*state, *others])
        del state, others  # a large model has room for two states, not for three
        computed = sorted(self._probe.computed & {*step.frozen})
        self._computed |= {*computed}
        self._steps += 1
        if before is step.start:
            self._random |= {*self._differing(plain, self._plain)}
        self._without_gradients(before, plain)
        if computed:
            self._with_others(before, plain, computed)
        state, others = step.advance(before)
        moved = self._differing(self._digests(before), plain)
        self._moved |= {i for k, i in self._param_at.items() if moved.get(k, (False, False))[1]}
        self._random |= {*self._differing(plain, self._digests([*state, *others]))}
        return state

    def _digests(self, results: State) -> Digests:
        """A digest of each array of a state, and of the other results: of frozen elements and of all others."""
        selections = {k: self._step.plan.selections[i] for k, i in self._param_at.items()}
        arrays = {k: x for k, x in enumerate(results) if is_array(x)}
        return jax.device_get({k: digests_of(x, selections.get(k, TRAINABLE)) for k, x in arrays.items()})

    def _begin(self, before: State) -> None:
        self._probe.begin({i: before[k] for i, k in self._step.params.items()})

    def _run(
        self, before: State, change: int | None = None, leaves: Collection[int] = (), batch: Any = None
    ) -> Digests:
        """The digests of the new state, and of the other results, of one step with other gradients."""
        probe = self._probe
        self._begin(before)
        probe.change, probe.chosen = change, frozenset(leaves)
        try:
            new, others = self._step.advance(before, batch)
            return self._digests([*new, *others])
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
            given = self._with(self._step.other_values())
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
                if row:
                    self._add(group, c, row)

    def _ask_zeros(self) -> None:
        """Changes the gradients that are zero in these steps, too."""
        start = self._step.start
        self._probe.zeros = True
        for c in _ZEROS_ONLY:
            found = self._differing(self._plain, self._run(start, c, self._computed))
            self._of_zeros |= {k for k in found if k < len(start)}
        self._probe.zeros = False

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

    def found(self, counters: Sequence[int]) -> Gradients:
        """What the runs showed; and, where they showed nothing, what more of them do, also with larger counters."""
        if self._computed and not self._seen:
            self._ask_zeros()
        found = []
        for group, (negative, huge, nan, inf, signed, _) in self._answers.items():
            found.append(Gradient(group, False, *map(frozenset, (negative, huge | signed, nan, inf))))
        leaving, left = self._unread()
        found += [Gradient((i,), leaves_call=True) for i in leaving]
        flops = self._flops() if found or left else (0, None)
        logged = [*{i for g in found if g.is_logged for i in g.leaves}, *left]
        step, probe = self._step, self._probe
        still = [i for i in step.params if not step.is_frozen(i) and i in probe.given and i not in self._moved]
        still = [i for i in still if step.plan.leaves[i].path not in step.in_groups]
        kept = [i for i in still if i not in probe.differentiated]
        untrained = self._untrained([i for i in still if i in probe.differentiated], counters)
        notes = [*self._notes_of_losses(), *self._notes_of_reactions(kept, bool(untrained), logged, flops)]
        by_batch = {i for k, i in self._param_at.items() if k in self._set}
        return Gradients(found, set_by_batch=by_batch, untrained=untrained, flops=flops, notes=notes)

    def _unread(self) -> tuple[list[int], list[int]]:
        """The gradients that are computed though nothing reacts to them: those that leave a jitted function, and those
        that an effect reads, or that are computed outside of any jitted function."""
        read = {i for group in self._answers for i in group}
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

    def _flops(self) -> tuple[int, int | None]:
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

    def _untrained(self, still: Sequence[int], counters: Sequence[int]) -> list[int]:
        """The parameters that do not move in more steps either, and whose gradient nothing reads."""
        at = self._step.params
        left = [i for i in still if i in self._probe.nonzero or self._with_other(at[i]).keys() - {at[i]}]
        left = self._still_later(left, counters) if left else []
        return self._not_zero(left) if left else []

    def _still_later(self, leaves: Sequence[int], counters: Sequence[int]) -> list[int]:
        """The parameters that do not move either with larger counters, which a schedule may read, or, if their state
        does, in many more steps, which an accumulation may need."""
        step = self._step

        def still(new: Digests) -> list[int]:
            moved = self._differing(self._digests(step.start), new)
            return [i for i in leaves if not moved.get(step.params[i], (False, False))[1]]

        for _, changes in step.later(counters):
            leaves = still(self._run(self._with(changes)))
        state = step.start
        for _ in range(_LONG if any(map(self._reaches_state, leaves)) else 0):
            state, _ = step.advance(state)
        return still(self._digests(state))

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

    def _with_other(self, k: int) -> dict[int, tuple[bool, bool]]:
        """What differs after a step with another array at a position of the state."""
        given = self._step.start[k]
        other = like(given, 1 + 1.5 * jnp.abs(jnp.asarray(to_device(given))))
        return self._differing(self._plain, self._run(self._with({k: other})))

    def reads(self, k: int) -> bool:
        """Whether trainable parameters depend on an array of the state."""
        return any(at in self._param_at and hit[1] for at, hit in self._with_other(k).items())

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

    def _notes_of_reactions(
        self, kept: Sequence[int], some_untrained: bool, logged: Sequence[int], flops: tuple[int, int | None]
    ) -> Iterator[str]:
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
        if kept:
            text = counted(len(kept), "trainable leaf", "trainable leaves")
            yield f"the step returns {text} as given: {paths(kept)}"
        if probe.nonzero and not self._moved and not some_untrained:
            yield "trainable parameters do not move in these steps: give more, for gradient accumulation or a warm-up"
        if logged:
            total, of_frozen = flops
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
