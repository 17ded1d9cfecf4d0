"""Runs of a whole optimizer with made-up gradients.

One program runs several times from the same start, each time with other gradients, parameters or moments at the frozen
elements. Any difference between two runs comes from there, whatever the optimizer: updates are compared bit for bit.
Trainable elements get the gradient of a quadratic loss, which line searches can evaluate.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._audit.measurements import Measurements, measure
from optax_freeze._errors import is_array
from optax_freeze._optimizer.no_update import zero
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.apply_updates import is_nothing
from optax_freeze._spec.memory_kinds import on_device, to_device
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, TRAINABLE, Selection
from optax_freeze._spec.sharding import copy_like
from optax_freeze._spec.tree import Leaf, Part, PyTree

ExtraArgs: TypeAlias = Mapping[str, Any] | Callable[[PyTree, PyTree], Mapping[str, Any]] | None

FILLS = {"zero": 0.0, "ordinary": None, "huge": 1e30, "NaN": np.nan, "inf": np.inf, "-inf": -np.inf}
"""Gradients of frozen elements; None: random numbers."""

_EXTRA_ARGS = (("value", "grad", "value_fn"), ("value", "grad", "value_fn", "obj_fn"), ("grad_fn",), ("value",), ())
"""Extra arguments of ``tx.update``, tried in this order: line searches and step sizes, Sophia, SAM, others.

A line search refuses arguments that its function does not take, and SAM all but its own, so not all are given at once.
"""


class Run(NamedTuple):
    """The measurements of each leaf in each step, the updates of a reference run, and the state before and after."""

    measurements: list[dict[int, Measurements]]
    updates: list[dict[int, Any]]
    before: optax.OptState
    after: optax.OptState

    def shows(self, name: str, i: int) -> bool:
        """Whether a measurement of leaf ``i`` is true or nonzero in some step."""
        return any(getattr(step[i], name) for step in self.measurements)

    def first(self, name: str, i: int) -> tuple[int, Measurements]:
        """The first step, counted from 1, in which a measurement is true, or the last; with its measurements."""
        steps = list(enumerate((step[i] for step in self.measurements), 1))
        return next((step for step in steps if getattr(step[1], name)), steps[-1])


@dataclasses.dataclass(eq=False)
class Simulation:
    """An optimizer and the parameters, as leaves, from which each run starts; neither is changed."""

    tx: optax.GradientTransformationExtraArgs
    plan: Plan
    start: Sequence[Any]
    treedef: Any
    steps: int
    extra_args: ExtraArgs
    full_grads: bool

    def __post_init__(self) -> None:
        leaves = self.plan.leaves
        self.numbers = [i for i, value in enumerate(self.start) if _is_number(value)]
        inexact = [i for i in self.numbers if leaves[i].inexact]
        self.filled = [i for i in inexact if self.plan.selections[i] is not TRAINABLE]  # a gradient has frozen elements
        self._noise = [
            {i: copy_like(_normal(self.start[i], i, step), self.start[i]) for i in inexact}
            for step in range(self.steps + 1)
        ]
        wide = any(jnp.finfo(leaves[i].dtype).bits > 32 for i in inexact)
        self._loss_dtype = jax.dtypes.canonicalize_dtype(jnp.float64 if wide else jnp.float32)
        programs: Any = (jax.jit(self._step, static_argnums=0), self._step)
        self._ways = [*itertools.product(programs, _EXTRA_ARGS)]
        self.paths = [leaf.path for leaf in leaves]
        self.index_of = {path: i for i, path in enumerate(self.paths)}

    @functools.cached_property
    def frozen(self) -> list[Any]:
        """For each leaf a boolean array that broadcasts against it, True where frozen."""
        pairs = zip(self.plan.leaves, self.plan.selections, strict=True)
        return [np.asarray(selection.frozen(len(leaf.shape or ()))) for leaf, selection in pairs]

    @functools.cached_property
    def counts(self) -> list[tuple[int, int]]:
        """For each leaf the number of frozen and of trainable elements."""
        sizes = [int(np.size(value)) if _is_number(value) else 0 for value in self.start]
        frozen = [int(f.sum()) * (size // f.size if f.size else 0) for f, size in zip(self.frozen, sizes, strict=True)]
        return [(n, size - n) for n, size in zip(frozen, sizes, strict=True)]

    @functools.cached_property
    def initial_state(self) -> optax.OptState:
        """The state of the optimizer at the start."""
        return self._init({i: self.start[i] for i in self.numbers})

    def run(
        self,
        fill: str,
        reference: Run | None = None,
        *,
        turned: bool = False,
        other: bool = False,
        state: optax.OptState | None = None,
    ) -> Run:
        """Runs the optimizer for some steps, from ``state`` or a new one.

        The frozen elements have the gradient ``FILLS[fill]`` and, if ``other``, other values, all of them negative.
        ``turned`` gives the gradient of the trainable elements the opposite sign. Updates are compared with those of
        ``reference``; without it, they are kept to be one.
        """
        start = {i: self.start[i] for i in self.numbers}
        if other:
            start |= {i: self._other(i) for i in self.filled}
        if state is None:
            state = self._init(start) if other else self.initial_state
        fills = {i: self._fill(i, fill) for i in self.filled}
        run, values = Run([], [], state, state), start
        for step in range(self.steps):
            trainable = [i for i in self._noise[step] if self.plan.selections[i] is not FROZEN]
            noise = {i: -self._noise[step][i] if turned else self._noise[step][i] for i in trainable}
            updates, new, state = self._advance(values, state, start, noise, fills, self.plan.selections)
            expected = reference.updates[step] if reference else updates
            measured = {i: measure(values[i], updates[i], expected[i], self.frozen[i]) for i in self.numbers}
            run.measurements.append(jax.device_get(measured))
            run.updates.append({} if reference else updates)
            values = new
        return run._replace(after=state)

    def _init(self, values: Mapping[int, Any]) -> optax.OptState:
        try:
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

        leaves = [gradient(i) for i in range(len(self.start))]
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
        full = {i: self._full_update(i, changes[i], value, selections[i]) for i, value in values.items()}
        new = {i: v if is_nothing(changes[i]) else optax.apply_updates(v, full[i]) for i, v in values.items()}
        return full, new, state

    def _tree_of(self, values: Mapping[int, Any]) -> PyTree:
        return jax.tree.unflatten(self.treedef, [values.get(i, value) for i, value in enumerate(self.start)])

    def _full_update(self, i: int, change: Any, value: Any, selection: Selection) -> Any:
        """An update of the leaf's shape, -0.0 at the elements that have none."""
        if is_nothing(change):
            nothing = zero(self.plan.leaves[i], None, value)
            return jnp.full(value.shape, -0.0, jnp.float32) if _tree.is_masked_node(nothing) else nothing
        if not isinstance(change, Part):
            return jnp.asarray(change)
        selection = selection if isinstance(change.index, int) else change.index
        return selection.spread(change, zero(Leaf("", (), change.dtype), None))

    def _fill(self, i: int, fill: str) -> Any:
        number, value = FILLS[fill], self.start[i]
        if number is None:
            return self._noise[0][i]
        if fill == "huge":
            number = min(number, float(jnp.finfo(value.dtype).max) / 4)
        return jnp.full_like(value, number)

    def _other(self, i: int) -> Any:
        value = self.start[i]
        other = (-1 - jnp.abs(self._noise[-1][i])).astype(jax.dtypes.canonicalize_dtype(value.dtype))
        return copy_like(self.plan.selections[i].choose(other, value), value)


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
    if is_array(value):
        return not jnp.issubdtype(value.dtype, jax.dtypes.extended)
    return isinstance(value, (bool, int, float, complex))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _zero_with_gradient(dtype: Any, value: jax.Array, gradient: jax.Array) -> jax.Array:
    """Zero, whose gradient with respect to ``value`` is ``gradient``, be it infinite or NaN."""
    del value, gradient
    return jnp.zeros((), dtype)


@_zero_with_gradient.defjvp
def _zero_with_gradient_jvp(dtype: Any, primals: Any, tangents: Any) -> Any:
    return _zero_with_gradient(dtype, *primals), jnp.real(primals[1] * tangents[0]).sum().astype(dtype)
