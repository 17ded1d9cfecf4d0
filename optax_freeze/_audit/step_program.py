"""The gradients in the program of a training step: which are computed, of which parameters, and what reads them.

JAX marks the operations of a backward pass by ``transpose(...)`` in their name stack. A gradient is a value that such
an operation computes, and that an operation after the backward pass reads. The program after it is evaluated with one
of these values changed, and the results that change read it. Norms and finite checks do not depend on a sign, so only
the update and the state of the parameter itself change with the sign of its gradient.
"""

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._audit.constant_zeros import constant_zeros
from optax_freeze._audit.step_runs import State, Step
from optax_freeze._errors import is_array
from optax_freeze._precompute.flops import flops_of_program
from optax_freeze._program.dependence import dependent, programs_in
from optax_freeze._program.trace import Equation, flatten, is_inexact
from optax_freeze._program.traced_function import as_argument
from optax_freeze._spec.sharding import copy_like

HUGE = 1e15


Answer: TypeAlias = frozenset[tuple[str, int | None]]
"""What differs with another gradient: ``frozen`` or ``trainable`` elements of a parameter, or its ``state``, each with
the number of the parameter in the plan; ``other`` state; another ``result`` of the step; ``nan``: there is a NaN."""


def leaves(answers: Iterable[Answer], *names: str) -> set[int]:
    """The parameters that differ in one of these ways in one of some answers."""
    return {i for answer in answers for name, i in answer if name in names and i is not None}


class Gradient(NamedTuple):
    """The gradient of a parameter with frozen elements, and what differs with other values at these elements."""

    leaf: int
    huge: Answer
    nan: Answer
    flops: int | None  # of what nothing but it and the gradients listed before needs; None if it comes from a loop

    def trainable(self, answer: Answer) -> set[int]:
        """The parameters whose trainable elements differ, or the state of which does; of its own leaf not the state."""
        return {
            i for name, i in answer if i is not None and (name == "trainable" or (name == "state" and i != self.leaf))
        }

    @property
    def for_results(self) -> bool:
        """Whether only results beside the state read it."""
        return {name for name, _ in self.huge | self.nan} <= {"result"}


class StepProgram:
    """The program of one step.

    Attributes:
      flops: of a step.
      has_backward: whether there is a backward pass.
      hidden: whether a loop or a branch contains both gradients and the new state.
      ambiguous: the shapes of gradients that may belong to several parameters.
      trained: the parameters whose update changes with the sign of their gradient.
      gradients: the gradients of parameters with frozen elements that something reads.
    """

    def __init__(self, step: Step, states: Sequence[State]) -> None:
        self._step, self._states = step, states[:-1]
        flat, structure = jax.tree.flatten((step.start, step.batch))
        self._inputs = [k for k, value in enumerate(flat) if is_array(value)]
        self._traced: list[int] = []

        def traced(*arrays: Any) -> list[Any]:
            filled = list(flat)
            for k, array in zip(self._inputs, arrays, strict=True):
                filled[k] = array
            new, others = step(*jax.tree.unflatten(structure, filled), copies=False)
            outs = [*new, *others]
            self._traced = [k for k, out in enumerate(outs) if isinstance(out, Tracer)]
            return [outs[k] for k in self._traced]

        closed = jax.make_jaxpr(traced)(*(as_argument(flat[k]) for k in self._inputs))
        self._program = flatten(closed, enter_placed=True)
        self._live = _live(self._program.eqns, self._program.outputs)
        self.flops = flops_of_program(self._live)
        self._ends = self._ends_of_backward()
        self._backward = [eqn for eqn in self._program.eqns if _is_backward(eqn) or _contains_backward(eqn)]
        self.has_backward = bool(self._backward)
        self.ambiguous: set[tuple[int, ...]] = set()
        self.trained: set[int] = set()
        self.gradients = self._gradients()

    def untrained(self) -> list[int]:
        """The trainable parameters that gradients depend on, but whose gradient neither they nor their state reads."""
        place = {k: n for n, k in enumerate(self._inputs)}
        backward = {n for eqn in self._backward for n in eqn.outputs}
        reached = dependent(self._program, backward)
        updated = {self._param_at.get(k, self._step.owner(k)) for k, out in self._outs.items() if out in reached}
        candidates = [i for i in self._step.params if not self._step.is_frozen(i) and i not in updated]
        return [
            i for i in candidates if not dependent(self._program, [place[self._step.params[i]]]).isdisjoint(backward)
        ]

    def sets(self, i: int) -> bool:
        """Whether the new value of a parameter depends on the batch, but not on a gradient."""
        return self.has_backward and self._outs.get(self._step.params[i]) in self._of_batch_alone

    @functools.cached_property
    def _of_batch_alone(self) -> set[int]:
        """The values that depend on the batch, but not on a gradient."""
        batch = [n for n, k in enumerate(self._inputs) if k >= len(self._step.start)]
        return dependent(self._program, batch) - dependent(self._program, self._ends)

    @functools.cached_property
    def _outs(self) -> dict[int, Any]:
        return {k: n for k, n in zip(self._traced, self._program.outputs, strict=True) if isinstance(n, int)}

    @functools.cached_property
    def _param_at(self) -> dict[int, int]:
        return {position: i for i, position in self._step.params.items()}

    def _ends_of_backward(self) -> set[int]:
        """The values of a backward pass that other operations read. Loops and branches may contain all of it."""
        outputs = {out for k, out in self._outs.items() if k < len(self._step.start)}
        read, made, around = set(), set(), set()
        for eqn in self._live:
            if not _is_backward(eqn):
                read |= set() if "jvp(" in str(eqn.source.name_stack) else eqn.reads
                around |= set(eqn.outputs) if _contains_backward(eqn) else set()
            else:
                made |= set(eqn.outputs)
        self._around = around
        self.hidden = not around.isdisjoint(outputs)
        ends = (made & (read | outputs)) | ((around & read) - outputs)
        return {n for n in ends if is_inexact(self._program.avals[n])}

    def _gradients(self) -> list[Gradient]:
        """The gradients of parameters with frozen elements.

        The parameter that answers to the sign of a gradient owns it. If none does, it belongs to one that has the same
        shape and no gradient yet, if all of these are frozen; the paths of two such gradients may be exchanged.
        """
        step, shapes = self._step, {n: self._program.avals[n].shape for n in sorted(self._ends)}
        alike: dict[int, list[int]] = {}
        for n, shape in shapes.items():
            of = {i: step.plan.leaves[i].shape for i in step.params}
            found = [i for i in of if of[i] == shape] or [i for i in of if of[i] == shape[1:]]  # one for each example
            if not set(found).isdisjoint(step.frozen):
                alike[n] = found
        if not alike:
            return []
        read, owners = self._reader([*alike]), {}
        for n, found in alike.items():
            answer = read(n, np.negative)
            if len(own := leaves([answer], *_OF_LEAF) & {*found}) == 1:
                [owners[n]] = own
                self.trained |= own & leaves([answer], "frozen")
            elif own:
                self.ambiguous.add(shapes[n])
        for n in sorted(alike.keys() - owners.keys()):
            left = [i for i in alike[n] if i not in owners.values()]
            answer = read(n, _filled(np.nan))
            if len(own := leaves([answer], *_OF_LEAF)) == 1 and own <= {*left}:
                [owners[n]] = own
            elif left and (own or (("result", None) in answer and n not in self._around)):
                if all(map(step.is_frozen, left)) and shapes[n] not in self.ambiguous:
                    owners[n] = left[0]
                else:
                    self.ambiguous.add(shapes[n])
        gradients, cut, cost = [], set(), self.flops
        for n, i in sorted(owners.items()):
            huge, nan = (read(n, _filled(number), i) if i in step.frozen else frozenset() for number in (HUGE, np.nan))
            if huge | nan:
                cut.add(n)
                left_over = flops_of_program(_live(self._program.eqns, self._program.outputs, cut))
                gradients.append(Gradient(i, huge, nan, None if n in self._around else cost - left_over))
                cost = left_over
        return gradients

    def _reader(self, ends: list[int]) -> Any:
        """Returns a function from a gradient and a change of it, at the frozen elements of a leaf or everywhere.

        Frozen elements that are zeros of the program, whatever its inputs are, remain: nobody computes them.
        The backward pass is evaluated once for each step.
        """
        program = self._program
        reached = dependent(program, ends)
        after = [eqn for eqn in self._live if not reached.isdisjoint(eqn.outputs)]
        later = {n for eqn in after for n in eqn.outputs} | {*ends}
        outputs = [out for out in program.outputs if isinstance(out, int)]
        passed = sorted(({n for eqn in after for n in eqn.reads} | {*outputs}) - later)
        before = _live(program.eqns, [*passed, *ends])

        @jax.jit
        def backward(inputs: Sequence[Any]) -> list[Any]:
            env = {**program.consts, **dict(enumerate(inputs))}
            _evaluate(before, env)
            return [env[n] for n in (*passed, *ends)]

        @jax.jit
        def update(values: Sequence[Any]) -> list[Any]:
            env = dict(zip((*passed, *ends), values, strict=True))
            _evaluate(after, env, keep=ends)
            return [env[n] if isinstance(n, int) else jnp.asarray(n.val) for n in program.outputs]

        points = []
        for leaves in self._states:
            flat = jax.tree.leaves((leaves, self._step.batch))
            values = backward([flat[k] for k in self._inputs])
            points.append((values, update(values)))

        @functools.cache
        def zeros(n: int) -> np.ndarray:
            return constant_zeros(program, n)

        @functools.cache
        def read(n: int, change: Any, i: int | None = None) -> Answer:
            place, answer = len(passed) + ends.index(n), frozenset()
            for values, expected in points:
                new = jnp.asarray(change(values[place]), values[place].dtype)
                if i is not None:
                    computed = self._step.mask(i) & ~zeros(n)
                    if not computed.any():
                        return answer
                    new = copy_like(jnp.where(computed, new, values[place]), values[place])
                outs = update([*values[:place], new, *values[place + 1 :]])
                answer |= self._compare(outs, expected)
            return answer

        return read

    def _compare(self, outs: Sequence[Any], expected: Sequence[Any]) -> Answer:
        answer: set[tuple[str, int | None]] = set()
        for k, *pair in zip(self._traced, outs, expected, strict=True):
            if jnp.issubdtype(pair[0].dtype, jax.dtypes.extended):
                continue
            i = self._param_at.get(k)
            frozen, trainable, nan = _difference(*pair, False if i is None else self._step.mask(i))
            if i is not None:
                answer |= {
                    (name, i) for name, hit in (("frozen", frozen), ("trainable", trainable), ("nan", nan)) if hit
                }
            elif trainable:
                owner = self._step.owner(k)
                name = "result" if k >= len(self._step.start) else "other" if owner is None else "state"
                answer.add((name, owner))
        return frozenset(answer)


_OF_LEAF = "frozen", "trainable", "state"


@functools.cache
def _filled(number: float) -> Any:
    return functools.partial(jnp.full_like, fill_value=number)


def _is_backward(eqn: Equation) -> bool:
    return "transpose(" in str(eqn.source.name_stack) or eqn.primitive.name == "add_any"


def _contains_backward(eqn: Any) -> bool:
    inner = [each for program in programs_in(eqn) for each in program.eqns]
    return any("transpose(" in str(each.source_info.name_stack) or _contains_backward(each) for each in inner)


def _live(eqns: Iterable[Equation], outputs: Iterable[Any], given: Collection[int] = ()) -> list[Equation]:
    """The operations that some values need."""
    wanted, found = {n for n in outputs if isinstance(n, int)} - {*given}, []
    for eqn in reversed([*eqns]):
        if not wanted.isdisjoint(eqn.outputs):
            found.append(eqn)
            wanted |= eqn.reads - {*given}
    return found[::-1]


def _evaluate(eqns: Iterable[Equation], env: dict[int, Any], keep: Collection[int] = ()) -> None:
    for eqn in eqns:
        with eqn.context.manager:
            outs = eqn.bind_all(*(env[x] if isinstance(x, int) else x.val for x in eqn.inputs))
        env.update((n, out) for n, out in zip(eqn.outputs, outs, strict=True) if n not in keep)


@jax.jit
def _difference(a: Any, b: Any, frozen: Any) -> tuple[Any, Any, Any]:
    """Whether two arrays differ at frozen elements, whether elsewhere, and whether the first is NaN elsewhere."""
    differ = ~((a == b) | ((a != a) & (b != b)))
    return (differ & frozen).any(), (differ & ~frozen).any(), ((a != a) & ~frozen).any()
