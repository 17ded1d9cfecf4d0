"""The gradients in the program of a training step: which are computed, of which parameters, and what reads them.

A gradient is a value that a backward pass computes and that an operation after it reads, or that leaves a jitted
function. :mod:`~optax_freeze._audit.gradient_owners` says whose gradient it is. The program after the backward passes
is evaluated with one of these values changed, and the results that change read it. Norms and finite checks do not
depend on a sign, so only the update and the state of the parameter itself, and what mixes gradients of several
parameters, change with the sign of its gradient.
"""

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from optax_freeze._audit.backward import contains_backward, values_of_backward
from optax_freeze._audit.constant_zeros import constant_zeros
from optax_freeze._audit.evaluation import Needed, live
from optax_freeze._audit.gradient_owners import Owners
from optax_freeze._audit.inner_gradients import Frozen, InnerGradients, inner_gradients, reached_from
from optax_freeze._audit.reactions import CHANGES, Answer, Gradient
from optax_freeze._audit.readers import Counts, Readers
from optax_freeze._audit.step import State, Step
from optax_freeze._errors import is_array
from optax_freeze._jax_internals import ClosedJaxpr, with_results
from optax_freeze._program.dependence import dependent, reached
from optax_freeze._program.flops import flops_of_program
from optax_freeze._program.trace import flatten
from optax_freeze._program.traced_function import as_argument
from optax_freeze._spec.memory_kinds import to_device


class StepProgram:
    """The program of one step.

    Attributes:
      flops: of a step.
      has_backward: whether there is a backward pass.
      inner: the gradients that loops and branches compute, whether others may be there that are not known, and the
        results of those loops and branches of which all gradients are known.
      ambiguous: the shapes of gradients that may belong to several parameters, or to none.
      flat: the sizes of gradients of vectors, such as all parameters in one, that may contain those of frozen ones.
      state_of: from the positions of state that reads the gradient of a frozen parameter to this parameter.
    """

    by_values: frozenset[int] = frozenset()

    def __init__(self, step: Step) -> None:
        self._step = step
        self._flat, structure = jax.tree.flatten((step.start, step.batch))
        self._inputs = [k for k, value in enumerate(self._flat) if is_array(value)]
        self._traced: list[int] = []

        def traced(*arrays: Any) -> list[Any]:
            filled = list(self._flat)
            for k, array in zip(self._inputs, arrays, strict=True):
                filled[k] = array
            new, others = step(*jax.tree.unflatten(structure, filled))
            outs = [*new, *others]
            self._traced = [k for k, out in enumerate(outs) if isinstance(out, Tracer)]
            return [outs[k] for k in self._traced]

        closed = jax.make_jaxpr(traced)(*(as_argument(self._flat[k]) for k in self._inputs))
        program = flatten(_with_results_of_calls(closed), enter_placed=True)
        count = len(self._traced)
        self._leaving = {n for n in program.outputs[count:] if isinstance(n, int)}
        effects = [n for eqn in program.eqns if eqn.has_effects for n in sorted(eqn.reads)]
        self._outputs = [*program.outputs[:count], *effects]
        self._results = {n for n in self._outputs if isinstance(n, int)}
        self._program = program
        self._live = live(program.eqns, self._outputs)
        self._flops = {id(eqn): flops_of_program([eqn]) for eqn in program.eqns}
        self.flops = self._cost(self._live)
        self.ambiguous: set[tuple[int, ...]] = set()
        self.state_of: dict[int, int] = {}
        outputs = {out for k, out in self._outs.items() if k < len(step.start)}
        self._made, self._ends, self._around = values_of_backward(program, self._results, self._leaving, outputs)
        self.has_backward = bool(self._made)
        self._inner = self._inner_gradients()
        self._owned = self._owners()
        self._seen: set[tuple[int, ...]] = set()
        self._answers: dict[tuple[int, str], Answer] = {}

    @functools.cached_property
    def _outs(self) -> dict[int, Any]:
        return {k: n for k, n in zip(self._traced, self._outputs, strict=False) if isinstance(n, int)}

    @functools.cached_property
    def _param_at(self) -> dict[int, int]:
        return {position: i for i, position in self._step.params.items()}

    @functools.cached_property
    def _leaf_of(self) -> dict[int, int]:
        """The parameters, by the numbers of the inputs in the program."""
        return {self._place[k]: i for k, i in self._param_at.items() if k in self._place}

    def _given(self, flat: Sequence[Any]) -> list[Any]:
        """The inputs of the program, of the leaves of a state and a batch."""
        return [to_device(flat[k]) for k in self._inputs]

    @functools.cached_property
    def _place(self) -> dict[int, int]:
        """The numbers of the inputs in the program, by their positions among the leaves."""
        return {k: n for n, k in enumerate(self._inputs)}

    def _owners(self) -> dict[int, int]:
        """The gradients of parameters with frozen elements, by their numbers, and the parameters that may own them."""
        step, avals = self._step, self._program.avals
        shapes = {step.plan.leaves[i].shape for i in step.frozen}
        size = sum(math.prod(step.plan.leaves[i].shape or ()) for i in step.frozen)
        given = {avals[n].shape for n in range(len(self._inputs))}
        vectors = {avals[n].shape for n in self._ends if len(avals[n].shape) == 1} - shapes - given
        self.flat = sorted(n for (n,) in vectors if n >= size)
        alike = [n for n in self._ends if {avals[n].shape, avals[n].shape[1:]} & shapes]
        self._found: dict[int, set[int]] = {}
        self._unknown: list[int] = []
        if not alike:
            return {}
        in_loops = {n: each for inner in self._inner for n, each in inner.scalars.items()}
        leaf_of = self._leaf_of
        with jax.debug_nans(False), jax.debug_infs(False):
            found = Owners(self._program, self._given(self._flat), leaf_of, in_loops).find(alike)
        owned: dict[int, int] = {}
        for n in alike:
            numbers = found.get(n, set())
            leaves = {leaf_of[m] for m in numbers if m in leaf_of}
            frozen = leaves & {*step.frozen}
            if not numbers:
                self._unknown.append(n)
            elif frozen and len(leaves) == len(numbers):
                self._found[n] = leaves
                owned[n] = min(frozen - {*owned.values()} or frozen)
        return owned

    def react(self, state: State) -> None:
        """Evaluates the update from a state with other values of the gradients of frozen parameters.

        All of them change at once, and one by one if this shows something that it has not shown before.
        """
        if not (groups := [group for group in ([*self._owned], self._unknown) if group]):
            return
        flat = [*state, *jax.tree.leaves(self._step.batch)]
        with jax.debug_nans(False), jax.debug_infs(False):
            counts = self._readers.counts(self._given(flat))
            for group in groups:
                cells = [*zip(*map(np.ndarray.tolist, np.nonzero(counts(group, range(4)))), strict=True)]
                if self._seen.issuperset(cells):
                    continue
                self._seen.update(cells)
                for n in group:
                    self._ask(n, counts, {cell[1:] for cell in cells if cell[0] > 1})

    def _ask(self, n: int, counts: Counts, by_nan: set[tuple[int, int]]) -> None:
        """Changes one gradient. NaN and infinity are left out if they show nothing, of all gradients, that size does
        not show of this one."""
        rows = dict(enumerate(counts([n], [0, 1])))
        by_size = {*zip(*map(np.ndarray.tolist, np.nonzero(rows[1])), strict=True)}
        more = [2, 3] if not by_nan <= by_size or any(column == 0 for _, column in by_size) else []
        more += [4] if self._may_hold(n) else []
        rows |= zip(more, counts([n], more), strict=True)
        for change, row in rows.items():
            key = n, CHANGES[change]
            self._answers[key] = self._answers.get(key, frozenset()) | self._answer(*key, row.tolist())

    @functools.cached_property
    def _zeros(self) -> dict[int, np.ndarray]:
        return constant_zeros(self._program, [*self._owned])

    def _changed_elements(self, n: int) -> Any:
        """The elements of a gradient that are changed: frozen ones, unless they are zero whatever the inputs are."""
        return self._step.mask(self._owned[n]) & ~self._zeros[n] if n in self._owned else np.asarray(True)

    @functools.cached_property
    def _reading(self) -> list[tuple[int | None, int]]:
        """The results that depend on gradients, with their positions among the leaves; None for what effects read."""
        found = dependent(self._program, [*self._owned, *self._unknown])
        places: list[int | None] = [*self._traced, *[None] * (len(self._outputs) - len(self._traced))]
        return [(k, n) for k, n in zip(places, self._outputs, strict=True) if isinstance(n, int) and n in found]

    @functools.cached_property
    def _readers(self) -> Readers:
        leaves = [None if k is None else self._param_at.get(k) for k, _ in self._reading]
        frozen = [np.asarray(False) if i is None else self._step.mask(i) for i in leaves]
        elements = {n: self._changed_elements(n) for n in (*self._owned, *self._unknown)}
        return Readers(self._program, elements, [n for _, n in self._reading], frozen)

    def _may_hold(self, n: int) -> set[int]:
        """The positions of state that may be that of the frozen parameter which owns a gradient."""
        step, i, size = self._step, self._owned.get(n), int(np.prod(self._program.avals[n].shape))
        if i is None or not size or not step.is_frozen(i):
            return set()
        state = {k for k, _ in self._reading if k is not None and k < len(step.start) and k not in self._param_at}
        return {k for k in state if np.size(step.start[k]) >= size and step.owner(k) in (None, i)}

    def _answer(self, n: int, change: str, row: Sequence[Sequence[int]]) -> Answer:
        answer: set[tuple[str, int | None]] = set()
        size, held = int(np.prod(self._program.avals[n].shape)), self._may_hold(n)
        for (k, _), (in_frozen, elsewhere) in zip(self._reading, row, strict=True):
            i = None if k is None else self._param_at.get(k)
            if i is not None:
                hits = ("frozen", in_frozen), ("trainable", elsewhere)
                answer |= {(name, i) for name, hit in hits if hit}
            elif elsewhere and (k is None or k >= len(self._step.start)):
                answer.add(("result", None))
            elif elsewhere:
                assert k is not None
                owner = self._step.owner(k)
                few = change == "half" and elsewhere == (size + 1) // 2 < size
                if k in held and (few or change == "negative"):
                    self.state_of[k] = self._owned[n]
                    owner = self._owned[n]
                answer.add(("other" if owner is None else "state", owner))
        return frozenset(answer)

    @functools.cached_property
    def gradients(self) -> list[Gradient]:
        """The gradients of parameters with frozen elements that something reads, or that leave a jitted function."""
        found, needed = [], Needed(self._program.eqns, [*self._outputs, *self._leaving])
        self._disown()
        for n, i in sorted(self._owned.items()):
            answers = [self._answers.get((n, change), frozenset()) for change in CHANGES[:4]]
            leaving = n in self._leaving and bool(np.any(self._changed_elements(n)))
            if any(answers) or leaving:
                flops = self._cost(needed.without(n))
                found.append(Gradient.of((i,), answers, None if n in self._around else flops, leaving))
        inner, _, judged = self.inner
        for n in {*self._unknown} - judged:
            reads = self._answers.get((n, "huge"), frozenset()) | self._answers.get((n, "negative"), frozenset())
            if {name for name, _ in reads} - {"result"}:
                self.ambiguous.add(self._program.avals[n].shape)
        return [*found, *inner]

    def _disown(self) -> None:
        """Of several parameters with one gradient the one that answers to its sign owns it, or a frozen one."""
        step = self._step
        for n, leaves in self._found.items():
            if len(leaves) == 1:
                continue
            answer = self._answers.get((n, "negative"), frozenset())
            own = {i for name, i in answer if name in ("frozen", "trainable", "state") and i in leaves}
            if own <= {*step.frozen} and (own or leaves <= {*step.frozen}) and len(own) <= 1:
                self._owned[n] = min(own or leaves)
            else:
                del self._owned[n]
                if not own:
                    self.ambiguous.add(self._program.avals[n].shape)

    @functools.cached_property
    def inner(self) -> tuple[list[Gradient], bool, set[int]]:
        gradients, unknown, judged = list[Gradient](), False, set[int]()
        for each in self._inner:
            unknown |= each.unknown
            judged |= set() if each.unknown else {*each.eqn.outputs}
            for i, changed in each.found:
                answers = [self._follow(numbers) for numbers in changed]
                gradients += [Gradient.of((i,), answers, None)] if any(answers) else []
        return gradients, unknown, judged

    def _inner_gradients(self) -> list[InnerGradients]:
        step, leaves = self._step, self._leaf_of.items()
        frozen = {n: Frozen(i, step.plan.leaves[i].shape or (), step.mask(i)) for n, i in leaves if i in step.frozen}
        with jax.debug_nans(False), jax.debug_infs(False):
            return [*inner_gradients(self._program, self._given(self._flat), frozen, self._results | self._leaving)]

    def _follow(self, numbers: set[int]) -> Answer:
        """The trainable parameters and the results that change with values, other than gradients of frozen ones."""
        found = reached_from(self._program, *(numbers - {*self._owned, *self._unknown}))
        outs = zip(self._traced, self._outputs, strict=False)
        places = [k for k, n in outs if isinstance(n, int) and n in found]
        leaves = {self._param_at[k] for k in places if k in self._param_at}
        answer: set[tuple[str, int | None]] = {("trainable", i) for i in leaves}
        answer |= {("result", None) for k in places if k >= len(self._step.start)}
        for n in numbers & {*self._unknown}:
            answer |= self._answers.get((n, "huge"), frozenset()) | self._answers.get((n, "negative"), frozenset())
        return frozenset(
            (name, i) for name, i in answer if i is None or (name == "trainable" and not self._step.is_frozen(i))
        )

    def _cost(self, eqns: Iterable[Any]) -> int:
        return sum(self._flops[id(eqn)] for eqn in eqns)

    @functools.cached_property
    def untrained(self) -> tuple[list[int], list[int]]:
        """The trainable parameters that gradients depend on, but whose gradient neither they nor their state reads.

        Of these, the second list has those that the step returns as they are given, without a gradient.
        """
        step = self._step
        found = dependent(self._program, self._made)
        updated = {self._param_at.get(k, step.owner(k)) for k, out in self._outs.items() if out in found}
        left = [i for i in step.params if not step.is_frozen(i) and i not in updated]
        left = [i for i in left if self.is_read_by_loss(step.params[i])]
        kept = [i for i in left if self._outs.get(step.params[i]) == self._place[step.params[i]]]
        return [i for i in left if i not in kept], kept

    def sets(self, i: int) -> bool:
        """Whether the new value of a parameter depends on the batch, but not on a gradient."""
        return self.has_backward and self._outs.get(self._step.params[i]) in self._of_batch_alone

    @functools.cached_property
    def _of_batch_alone(self) -> set[int]:
        """The values that depend on the batch, but not on a gradient."""
        batch = [n for n, k in enumerate(self._inputs) if k >= len(self._step.start)]
        return dependent(self._program, batch) - dependent(self._program, self._made)

    def is_read_by_loss(self, k: int) -> bool:
        """Whether a backward pass depends on a leaf of the state."""
        return k in self._place and bool(self._read_by_losses & self._mark(k))

    def is_read_by_update(self, k: int, i: int) -> bool:
        """Whether the new value of a parameter is computed from a leaf of the state, but not by a backward pass."""
        out = self._outs.get(self._step.params[i], -1)
        return k in self._place and bool(self._read_by_update.get(out, 0) & self._mark(k))

    def follows(self, k: int, i: int) -> bool:
        """Whether the new value of a leaf of the state is computed from a parameter, but not by a backward pass."""
        return bool(self._read_by_update.get(self._outs.get(k, -1), 0) & self._mark(self._step.params[i]))

    def _mark(self, k: int) -> int:
        return 2 << self._place[k]  # 1 stands for side effects

    @functools.cached_property
    def _marks(self) -> dict[int, int]:
        return {n: 2 << n for n in range(len(self._inputs))}

    @functools.cached_property
    def _read_by_losses(self) -> int:
        found = reached(self._program, self._marks)
        return functools.reduce(operator.or_, (found.get(n, 0) for n in self._made), 0)

    @functools.cached_property
    def _read_by_update(self) -> dict[int, int]:
        """What each value is computed from, without forward and backward passes."""
        eqns = [eqn for eqn in self._program.eqns if not {"jvp", "transpose"} & {*eqn.source.transforms}]
        return reached(self._program._replace(eqns=eqns), self._marks)

    def paths(self, leaves: Iterable[int]) -> list[str]:
        return [self._step.plan.leaves[i].path for i in leaves]

    @property
    def for_results(self) -> list[Gradient]:
        """The gradients that only results beside the state read."""
        return [g for g in self.gradients if not g.leaves_call and g.read <= {"result"}]


def _with_results_of_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with the results of jitted functions that a step calls, which are computed even if nothing reads
    them. Those of a step that is jitted as a whole are its results."""
    jaxpr = closed.jaxpr
    results = {id(var) for var in jaxpr.outvars}
    calls = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("jit", "pjit") and contains_backward(eqn)]
    calls = [eqn for eqn in calls if results.isdisjoint(map(id, eqn.outvars))]
    inner = [var for eqn in calls for var in eqn.outvars]
    return with_results(closed, inner)
