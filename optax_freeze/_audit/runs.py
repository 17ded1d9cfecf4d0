"""A whole optimizer, driven with made-up gradients: what it does to frozen places, and what these do to the others.

One program runs again and again from the same start, with other gradients or other parameters at the frozen places
each time. Whatever then differs between two runs comes from there: no knowledge of the optimizer is needed, and no
tolerance. What trains is given the gradient of a quadratic loss, so that line searches find the loss that they ask for.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._audit.measurements import Facts, facts_of
from optax_freeze._errors import is_array
from optax_freeze._optimizer.inner_update import zero
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.layout import copy_like
from optax_freeze._spec.partition import is_nothing
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, TRAINABLE, Selection
from optax_freeze._spec.tree import Leaf, Part, PyTree

ExtraArgs: TypeAlias = Mapping[str, Any] | Callable[[PyTree, PyTree], Mapping[str, Any]] | None

FILLS = {"zero": 0.0, "ordinary": None, "huge": 1e30, "NaN": np.nan, "inf": np.inf, "-inf": -np.inf}
"""What may stand in the gradient of what is frozen."""


class Run(NamedTuple):
    """What came of the steps of a run: the facts of each leaf in each step, the updates, the state before and after."""

    facts: list[dict[int, Facts]]
    updates: list[dict[int, Any]]
    before: optax.OptState
    after: optax.OptState


@dataclasses.dataclass(eq=False)
class Probe:
    """An optimizer, and the parameters with which it is driven; nothing of either is changed."""

    tx: optax.GradientTransformationExtraArgs
    plan: Plan
    start: Sequence[Any]
    treedef: Any
    steps: int
    extra_args: ExtraArgs
    full_grads: bool

    def __post_init__(self) -> None:
        self._program = jax.jit(self._step)
        self._made: dict[tuple[int, int], jax.Array] = {}
        self._given, self._refused = {"value", "grad", "value_fn"}, set()

    @functools.cached_property
    def seen(self) -> list[int]:
        """The leaves that hold numbers."""
        return [i for i, value in enumerate(self.start) if _is_number(value)]

    @functools.cached_property
    def wide(self) -> Any:
        """The dtype of the loss."""
        wide = any(leaf.inexact and jnp.finfo(leaf.dtype).bits > 32 for leaf in self.plan.leaves)
        return jax.dtypes.canonicalize_dtype(jnp.float64 if wide else jnp.float32)

    @functools.cached_property
    def frozen(self) -> list[Any]:
        """For each leaf a boolean array that broadcasts against it, True where frozen."""
        pairs = zip(self.plan.leaves, self.plan.selections, strict=True)
        return [np.asarray(selection.frozen(len(leaf.shape or ()))) for leaf, selection in pairs]

    @functools.cached_property
    def counts(self) -> list[tuple[int, int]]:
        """For each leaf how many of its elements are frozen, and how many train."""
        shapes = {i: self.plan.leaves[i].shape or () for i in self.seen}
        sizes = [int(np.prod(shapes[i], dtype=int)) if i in shapes else 0 for i in range(len(self.start))]
        frozen = [int(f.sum()) * (size // f.size if f.size else 0) for f, size in zip(self.frozen, sizes, strict=True)]
        return [(n, size - n) for n, size in zip(frozen, sizes, strict=True)]

    def run(
        self,
        fill: str,
        reference: Run | None = None,
        *,
        turned: bool = False,
        other: bool = False,
        state: optax.OptState | None = None,
        keep: bool = False,
    ) -> Run:
        """Drives the optimizer for some steps from the start.

        Args:
          fill: what stands in the gradient of what is frozen, a name in ``FILLS``.
          reference: the run that the updates are compared with.
          turned: whether the gradient of what trains is turned round.
          other: whether the frozen parameters have other values, all of them negative.
          state: the optimizer's state to begin with, instead of a new one.
          keep: whether to keep the updates.
        """
        start = {i: self.start[i] for i in self.seen if is_array(self.start[i])}
        if other:
            start = {i: self._other(i, value) for i, value in start.items()}
        if state is None:
            state = self._init(start)
        fills = {i: self._fill(i, fill) for i in start if self.may_be_filled(i)}
        run = Run([], [], state, state)
        values = start
        for step in range(self.steps):
            noise = {i: self._noise(i, step) for i in start if self.plan.selections[i] is not FROZEN}
            noise = {i: -value if turned else value for i, value in noise.items()}
            grads, updates, new, state = self._take((values, state, start, noise, fills, self.plan.masks))
            wanted = updates if reference is None else reference.updates[step]
            facts = {
                i: facts_of(
                    values.get(i, self.start[i]), updates[i], grads[i], wanted[i], self.frozen[i], self._whole(i)
                )
                for i in self.seen
            }
            run.facts.append(jax.device_get(facts))
            if keep:
                run.updates.append(updates)
            values = new
        return run._replace(after=state)

    def may_be_filled(self, i: int) -> bool:
        """Whether there is a gradient of something frozen in a leaf."""
        return self.plan.leaves[i].inexact and self.plan.selections[i] is not TRAINABLE

    def _init(self, values: Mapping[int, Any]) -> optax.OptState:
        try:
            return self.tx.init(self._tree_of(values))
        except Exception as error:
            error.add_note("fz.audit: from tx.init(params)")
            raise

    def _take(self, args: tuple[Any, ...]) -> Any:
        """One step, compiled if the optimizer can be, with the functions that it asks for."""
        try:
            return self._program(*args)
        except _TRACED:
            self._program = self._step
        except Exception as error:
            # Not all at once: a line search refuses what its function does not take, and SAM what it does not know.
            self._refused |= set(re.findall(r"unexpected keyword argument '(\w+)'", str(error)))
            given = (self._given | set(re.findall(r"\b(?:obj_fn|grad_fn)\b", str(error)))) - self._refused
            if given == self._given:
                error.add_note("fz.audit: from tx.update(grads, state, params), with gradients made up by it")
                raise
            self._given = given
        return self._take(args)

    def _step(
        self,
        values: Mapping[int, Any],
        state: optax.OptState,
        start: Mapping[int, Any],
        noise: Mapping[int, Any],
        fills: Mapping[int, Any],
        masks: Sequence[Any],
    ) -> tuple[Any, ...]:
        params = self._tree_of(values)
        plan = self.plan.with_masks(masks)

        def value_fn(params: PyTree) -> jax.Array:
            """Half the squared distance from a target, for what trains; the gradient of the rest is what fills it."""
            loss = jnp.zeros((), self.wide)
            for i, value in enumerate(_tree.flatten(params)[0]):
                if i in noise:
                    distance = value - start[i] + noise[i]
                    distance = plan.selections[i].choose(jnp.zeros_like(value), distance)
                    loss += (jnp.abs(distance) ** 2).sum().astype(self.wide) / 2
                if i in fills and not _tree.is_hole(value):
                    gradient = plan.selections[i].choose(fills[i], jnp.zeros_like(value))
                    loss += _pull(self.wide, value, gradient)
            return loss

        leaves = [self._gradient(i, plan, values, start, noise, fills) for i in range(len(self.start))]
        grads = jax.tree.unflatten(self.treedef, leaves if self.full_grads else plan.take(leaves))
        extra_args = {
            "value": value_fn(params),
            "grad": grads,
            "value_fn": value_fn,
            "obj_fn": value_fn,
            "grad_fn": lambda params, *_: jax.grad(value_fn, allow_int=True)(params),
        }
        extra_args = {name: extra_args[name] for name in self._given}
        given = self.extra_args(params, grads) if callable(self.extra_args) else self.extra_args
        updates, state = self.tx.update(grads, state, params, **{**extra_args, **(given or {})})
        changes, treedef = _tree.flatten_beside(self.treedef, updates)
        if treedef != self.treedef:
            _tree.refuse_other_structure(updates, params, "updates", "return updates of the gradients' structure")
        full = {i: self._full(i, changes[i], values.get(i, self.start[i]), plan.selections[i]) for i in self.seen}
        new = {i: v if is_nothing(changes[i]) else optax.apply_updates(v, full[i]) for i, v in values.items()}
        return {i: leaves[i] for i in self.seen}, full, new, state

    def _tree_of(self, values: Mapping[int, Any]) -> PyTree:
        return jax.tree.unflatten(self.treedef, [values.get(i, value) for i, value in enumerate(self.start)])

    def _gradient(self, i: int, plan: Plan, values: Any, start: Any, noise: Any, fills: Any) -> Any:
        if i in noise:
            return plan.selections[i].choose(fills.get(i), values[i] - start[i] + noise[i])
        if i in fills:
            return fills[i]
        return jnp.zeros_like(values.get(i, self.start[i])) if i in self.seen else _tree.HOLE

    def _full(self, i: int, change: Any, value: Any, selection: Selection) -> Any:
        """An update of the leaf's shape, -0.0 at what it leaves as it is."""
        if is_nothing(change):
            nothing = zero(self.plan.leaves[i], None, value)
            return jnp.full(value.shape, -0.0, jnp.float32) if _tree.is_hole(nothing) else nothing
        if not isinstance(change, Part):
            return jnp.asarray(change)
        selection = selection if isinstance(change.index, int) else change.index
        return selection.spread(change, zero(Leaf("", (), change.dtype), None))

    def _whole(self, i: int) -> bool | None:
        selection = self.plan.selections[i]
        return None if selection.in_part else selection is FROZEN

    def _noise(self, i: int, step: int) -> Any:
        """Normally distributed numbers in the place of a leaf, the same in each run."""
        value = self.start[i]
        if (i, step) not in self._made:
            self._made[i, step] = copy_like(_normal(value.shape, value.dtype, i, step), value)
        return self._made[i, step]

    def _fill(self, i: int, fill: str) -> Any:
        number, value = FILLS[fill], self.start[i]
        if number is None:
            return self._noise(i, 0)
        if fill == "huge":
            number = min(number, float(jnp.finfo(value.dtype).max) / 4)
        return jnp.full_like(value, number)

    def _other(self, i: int, value: Any) -> Any:
        if not self.may_be_filled(i):
            return value
        other = (-1 - jnp.abs(self._noise(i, self.steps))).astype(jax.dtypes.canonicalize_dtype(value.dtype))
        return copy_like(self.plan.selections[i].choose(other, value), value)


_TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""Errors of an optimizer that looks at values, and cannot be compiled."""


def _normal(shape: tuple[int, ...], dtype: Any, *seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed).standard_normal
    numbers = np.asarray(draw(shape, np.float32))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        numbers = numbers + 1j * np.asarray(draw(shape, np.float32))
    return numbers.astype(dtype)


def made_up(struct: Any) -> Any:
    """An array in the place of a shape of one; a hole for a PRNG key, which no optimizer takes."""
    if not isinstance(struct, jax.ShapeDtypeStruct):
        return struct
    if jnp.issubdtype(struct.dtype, jax.dtypes.extended):
        return _tree.HOLE
    value = np.zeros(struct.shape, struct.dtype)
    if jnp.issubdtype(struct.dtype, jnp.inexact):
        value = _normal(struct.shape, struct.dtype, 0)
    value = jnp.asarray(value)
    return value if struct.sharding is None else jax.device_put(value, struct.sharding)


def _is_number(value: Any) -> bool:
    if is_array(value):
        return not jnp.issubdtype(value.dtype, jax.dtypes.extended)
    return isinstance(value, (bool, int, float, complex))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _pull(dtype: Any, value: jax.Array, gradient: jax.Array) -> jax.Array:
    """Zero, of which ``gradient`` is the gradient, infinite or NaN as it may be."""
    del value, gradient
    return jnp.zeros((), dtype)


@_pull.defjvp
def _pull_jvp(dtype: Any, primals: Any, tangents: Any) -> Any:
    return _pull(dtype, *primals), jnp.real(primals[1] * tangents[0]).sum().astype(dtype)
