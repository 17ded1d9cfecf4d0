"""An optimizer as a training step, with gradients that are made up.

Trainable elements get the gradient of a quadratic loss, which line searches can evaluate; frozen elements any other.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._audit import causes
from optax_freeze._audit.reactions import Answer, Gradient, Gradients, changed, difference
from optax_freeze._audit.step import State, Step
from optax_freeze._errors import is_array, is_scalar
from optax_freeze._optimizer.freeze_when import FreezeWhenState
from optax_freeze._optimizer.leaf_updates import is_nothing, zero
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import on_device, to_device
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import FreezeWarning
from optax_freeze._spec.selection import FROZEN, Selection
from optax_freeze._spec.sharding import copy_like
from optax_freeze._spec.tree import Leaf, Part, PyTree
from optax_freeze._state.own_states import outermost_states

ExtraArgs: TypeAlias = Mapping[str, Any] | Callable[[PyTree, PyTree], Mapping[str, Any]] | None

_EXTRA_ARGS = (("value", "grad", "value_fn"), ("value", "grad", "value_fn", "obj_fn"), ("grad_fn",), ("value",), ())
"""Extra arguments of ``tx.update``, tried in this order: line searches and step sizes, Sophia, SAM, others.

A line search refuses arguments that its function does not take, and SAM all but its own, so not all are given at once.
"""


class OptimizerStep(Step):
    """A step whose state are the parameters, the state of an optimizer, and the last updates.

    Its batch are the parameters at the start, the distances of trainable ones from the target of the loss, and the
    gradients of frozen elements.
    """

    is_fresh, other_part, donates = True, causes.AFTER, False

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        plan: Plan,
        start: Sequence[Any],
        treedef: Any,
        extra_args: ExtraArgs,
        full_grads: bool,
    ) -> None:
        self.tx, self.plan, self.treedef, self.extra_args, self.full_grads = tx, plan, treedef, extra_args, full_grads
        self._leaves, self.calls, self.kept, self.entries = start, 0, set(), {}
        self._numbers = [i for i, value in enumerate(start) if _is_number(value)]
        inexact = [i for i in self._numbers if plan.leaves[i].inexact]
        wide = any(jnp.finfo(plan.leaves[i].dtype).bits > 32 for i in inexact)
        self._loss_dtype = jax.dtypes.canonicalize_dtype(jnp.float64 if wide else jnp.float32)
        programs: Any = (jax.jit(self._step, static_argnums=0), self._step)
        self._ways = [*itertools.product(programs, _EXTRA_ARGS)]
        values = {i: start[i] for i in self._numbers}
        self.initial_state = self._init(values)
        walk = _tree.walk(self.initial_state)
        state, self._state_treedef = jax.tree.flatten(self.initial_state)
        paths = [plan.leaves[i].path for i in self._numbers]
        self.params = {i: k for k, i in enumerate(self._numbers) if i in inexact}
        self.bits = {plan.leaves[i].path: k for k, i in enumerate(self._numbers) if i not in inexact}
        first = len(paths)
        self.in_optimizer = {*range(first, first + len(state))}
        self.updates = {k: first + len(state) + n for n, k in enumerate(self.params.values())}
        of_state = [p for p, value in zip(walk.paths, walk.values, strict=True) for _ in jax.tree.leaves(value)]
        self.paths = [*paths, *of_state, *(plan.leaves[i].path for i in inexact)]
        self.index_of = {plan.leaves[i].path: i for i in self._numbers}
        self.start: State = [*values.values(), *state, *(jnp.zeros_like(start[i]) for i in inexact)]
        self._add_entries(self.initial_state, first)
        noise = {i: copy_like(_normal(start[i], i, 0), start[i]) for i in inexact}
        distances = {i: noise[i] for i in inexact if plan.selections[i] is not FROZEN}
        self.batch = ((values, distances, {i: noise[i] for i in self.frozen}), {})

    def __call__(self, leaves: State, batch: Any) -> tuple[State, list[Any]]:
        first, last = len(self._numbers), min(self.updates.values(), default=len(leaves))
        values = dict(zip(self._numbers, leaves, strict=False))
        state = jax.tree.unflatten(self._state_treedef, leaves[first:last])
        updates, state = self._advance(values, state, *batch[0], self.plan.selections)
        if jax.tree.structure(state) != self._state_treedef:
            fix = "return a state of the structure of tx.init(params)"
            _tree.refuse_other_structure(state, self.initial_state, "the new state of tx", fix)
        new = [v if updates[i] is None else _applied(v, updates[i]) for i, v in values.items()]
        shown = [jnp.zeros_like(values[i]) if updates[i] is None else updates[i] for i in self.params]
        return [*new, *jax.tree.leaves(state), *shown], []

    def other_values(self) -> dict[int, Any]:
        """Other frozen values, all of them negative, and the state of an optimizer that starts from them."""

        def other(i: int) -> Any:
            value = self._leaves[i]
            new = (-1 - jnp.abs(_normal(value, i, 1))).astype(jax.dtypes.canonicalize_dtype(value.dtype))
            return copy_like(self.plan.selections[i].choose(new, value), value)

        new = {i: other(i) for i in self.frozen}
        state = jax.tree.leaves(self._init({i: self._leaves[i] for i in self._numbers} | new))
        return {self.params[i]: x for i, x in new.items()} | dict(zip(sorted(self.in_optimizer), state, strict=True))

    def statistics(self) -> list[int]:
        return []

    def _init(self, values: Mapping[int, Any]) -> optax.OptState:
        try:
            with warnings.catch_warnings():  # these arrays will not be trained
                warnings.filterwarnings("ignore", "a frozen NumPy array", FreezeWarning)
                return self.tx.init(self._tree_of(values))
        except Exception as error:
            error.add_note("fz.audit: from tx.init(params)")
            raise

    def _advance(self, *args: Any) -> Any:
        """One step, compiled if the optimizer can be, with the first extra arguments that it accepts."""
        errors = []
        for program, names in self._ways:
            try:
                result = program(names, *args)
            except Exception as error:
                errors.append(error)
            else:
                self._ways = [(program, names)]
                return result
        errors[0].add_note("fz.audit: from tx.update(grads, state, params), with gradients made up by it")
        raise errors[0]

    def _step(
        self,
        names: tuple[str, ...],
        values: Mapping[int, Any],
        state: optax.OptState,
        start: Mapping[int, Any],
        noise: Mapping[int, Any],
        fills: Mapping[int, Any],
        selections: Sequence[Selection],
    ) -> tuple[Any, ...]:
        params = self._tree_of(values)

        def value_fn(params: PyTree) -> jax.Array:
            """Half the squared distance of trainable elements from a target, with ``fills`` as the other gradients."""
            loss = jnp.zeros((), self._loss_dtype)
            for i, value in enumerate(_tree.flatten(params)[0]):
                if i in noise:
                    distance = value - start[i] + noise[i]
                    distance = selections[i].choose(jnp.zeros_like(value), distance)
                    loss += (jnp.abs(distance) ** 2).sum().astype(self._loss_dtype) / 2
                if i in fills and not _tree.is_masked_node(value):
                    gradient = selections[i].choose(fills[i], jnp.zeros_like(value))
                    loss += _zero_with_gradient(self._loss_dtype, value, gradient)
            return loss

        def gradient(i: int) -> Any:
            if i in noise:
                return selections[i].choose(fills.get(i), values[i] - start[i] + noise[i])
            return fills[i] if i in fills else jnp.zeros_like(values[i]) if i in values else _tree.MASKED_NODE

        leaves = [gradient(i) for i in range(len(self._leaves))]
        grads = jax.tree.unflatten(
            self.treedef,
            leaves if self.full_grads else [s.take(leaf) for s, leaf in zip(selections, leaves, strict=True)],
        )
        extra_args = {
            "value": value_fn(params),
            "grad": grads,
            "value_fn": value_fn,
            "obj_fn": value_fn,
            "grad_fn": lambda params, *_: jax.grad(value_fn, allow_int=True)(params),
        }
        given = self.extra_args(params, grads) if callable(self.extra_args) else self.extra_args
        extra_args = {name: extra_args[name] for name in names} | dict(given or {})
        updates, state = self.tx.update(grads, state, params, **extra_args)
        changes, treedef = _tree.flatten_beside(self.treedef, updates)
        if treedef != self.treedef:
            _tree.refuse_other_structure(updates, params, "updates", "return updates of the gradients' structure")
        return {i: self._full_update(i, changes[i], selections[i]) for i in values}, state

    def _tree_of(self, values: Mapping[int, Any]) -> PyTree:
        return jax.tree.unflatten(self.treedef, [values.get(i, value) for i, value in enumerate(self._leaves)])

    def _full_update(self, i: int, change: Any, selection: Selection) -> Any:
        """An update of the leaf's shape, -0.0 at the elements that have none; None if the leaf has none."""
        if is_nothing(change) or not isinstance(change, Part):
            return None if is_nothing(change) else jnp.asarray(change)
        selection = selection if isinstance(change.index, int) else change.index
        return selection.spread(change, zero(Leaf("", (), change.dtype), None))


def given_gradients(step: OptimizerStep, steps: int, values: Mapping[int, Any]) -> Gradients:
    """What differs with other gradients, which are an argument of the step, and with other frozen parameters."""
    _, distances, fills = step.batch[0]
    random = _answer(step, steps)
    live, nan = _of_updates(step, steps)

    def with_changed(change: int) -> Answer:
        return _answer(step, steps, fills={i: changed(fill, change) for i, fill in fills.items()}) - random

    changes = range(4) if fills and step.full_grads else ()
    gradients = [Gradient(tuple(step.frozen), False, *map(with_changed, changes))]
    reached = _answer(step, steps, changes=values) - random if fills and step.extra_args is None else frozenset()
    by_values = {i for name, i in reached if name == "trainable" and i is not None}
    turned = {i for _, i in _answer(step, steps, distances={i: -value for i, value in distances.items()})}
    waits = [*outermost_states(step.initial_state, FreezeWhenState)]  # a group of `freeze_when`
    left = [i for i in step.params if not step.is_frozen(i) and i not in turned and i not in nan]
    untrained = [] if waits or None in turned else left
    notes = []
    if any(name == "trainable" for name, _ in random):
        notes = ["two equal runs gave different updates: what trainable parameters depend on cannot be judged"]
    elif nan:
        notes = ["updates of trainable parameters are NaN whatever is frozen: what they depend on cannot be judged"]
    elif not live and not untrained:
        notes = ["trainable parameters had no update in these steps: give more, for gradient accumulation or a warm-up"]
    return Gradients(gradients, True, by_values, untrained=untrained, notes=notes)


def _answer(
    step: OptimizerStep, steps: int, distances: Any = None, fills: Any = None, changes: Mapping[int, Any] = {}
) -> Answer:
    """What differs in a second run."""
    answer: set[tuple[str, int | None]] = set()
    start, own_distances, own_fills = step.batch[0]
    second = start, own_distances if distances is None else distances, own_fills if fills is None else fills
    param_at = {step.updates[k]: i for i, k in step.params.items()}
    masks = {k: step.mask(i) for k, i in param_at.items()}
    masks |= {k: np.asarray(False) for k in step.in_optimizer if is_array(step.start[k])}
    for a, b in zip(step.run(steps), step.run(steps, changes, (second, {})), strict=True):
        counts = jax.device_get({k: difference(a[k], b[k], mask) for k, mask in masks.items()})
        for k, (in_frozen, elsewhere) in counts.items():
            if k in param_at:
                hits = ("frozen", in_frozen), ("trainable", elsewhere)
                answer |= {(name, param_at[k]) for name, count in hits if count}
            elif elsewhere and ((owner := step.owner(k)) is not None or np.ndim(step.start[k])):
                answer.add(("other" if owner is None else "state", owner))
    return frozenset(answer)


def _of_updates(step: OptimizerStep, steps: int) -> tuple[bool, set[int]]:
    """Whether a trainable element has an update, and the parameters for which one is NaN."""
    live, nan = False, set()
    for state in step.run(steps):
        for i, k in step.params.items():
            update = jnp.where(step.mask(i), 0, state[step.updates[k]])
            live |= bool((update != 0).any())
            nan |= {i} if bool((update != update).any()) else set()
    return live, nan


def _applied(value: Any, update: Any) -> Any:
    """A leaf after an update: the same bits where this is zero, except that -0.0 + 0.0 is 0.0."""
    new: Any = optax.apply_updates(value, update)
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        return new
    sign_of = lambda x: jnp.signbit(jnp.real(x).astype(jnp.float32))  # noqa: E731
    loses_sign = (value == 0) & sign_of(value) & ~sign_of(update)
    return jnp.where((update == 0) & ~loses_sign, value, new)


def made_up(struct: Any) -> Any:
    """An array for a ``jax.ShapeDtypeStruct`` (of a PRNG key, ``MaskedNode``); any other leaf itself, on the device."""
    if not isinstance(struct, jax.ShapeDtypeStruct):
        return to_device(struct)
    if jnp.issubdtype(struct.dtype, jax.dtypes.extended):
        return _tree.MASKED_NODE
    is_inexact = jnp.issubdtype(struct.dtype, jnp.inexact)
    value = jnp.asarray(_normal(struct, 0) if is_inexact else np.zeros(struct.shape, struct.dtype))
    return value if struct.sharding is None else jax.device_put(value, on_device(struct.sharding))


def _normal(like: Any, *seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed).standard_normal
    numbers = np.asarray(draw(like.shape, np.float32))
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        numbers = numbers + 1j * np.asarray(draw(like.shape, np.float32))
    return numbers.astype(like.dtype)


def _is_number(value: Any) -> bool:
    return is_scalar(value) or (is_array(value) and not jnp.issubdtype(value.dtype, jax.dtypes.extended))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _zero_with_gradient(dtype: Any, value: jax.Array, gradient: jax.Array) -> jax.Array:
    """Zero, whose gradient with respect to ``value`` is ``gradient``, be it infinite or NaN."""
    del value, gradient
    return jnp.zeros((), dtype)


@_zero_with_gradient.defjvp
def _zero_with_gradient_jvp(dtype: Any, primals: Any, tangents: Any) -> Any:
    return _zero_with_gradient(dtype, *primals), jnp.real(primals[1] * tangents[0]).sum().astype(dtype)
