"""When a group is frozen: the conditions of :func:`optax_freeze.freeze_when`, and the interface that they share."""

import collections
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import described, is_array, type_error, value_error
from optax_freeze._optimizer.step_conditions import NamedSchedule
from optax_freeze._spec.prefix_tree import NotASpec
from optax_freeze._spec.tree import PyTree


class Condition(NotASpec):
    """Decides whether a group is frozen, from the step and a state of its own in the state of the group.

    Conditions with the same ``call`` decide together: ``frozen`` and ``next`` take and return one item per group, in
    the order of ``place``.
    """

    call: Any = None
    place: int = 0

    takes_norm = False
    """Whether :meth:`next` reads the norm of the gradient."""

    def initial(self) -> PyTree:
        """The state before the first update."""
        return ()

    def frozen(self, step: jax.Array, states: Sequence[Any]) -> list[Any]:
        """Whether each group is frozen in the update after ``step`` updates."""
        raise NotImplementedError

    def next(
        self, step: jax.Array, states: Sequence[Any], frozen: Sequence[Any], norms: Sequence[Any]
    ) -> Sequence[Any]:
        """The states after this update; the norm of a group that was frozen may be anything."""
        return states

    def differs(self, other: "Condition") -> bool:
        """Whether another condition is known not to be the same; functions cannot be compared."""
        return self != other

    @property
    def recorded(self) -> str:
        """What is known of it in every process."""
        return repr(self)

    def check(self) -> None:
        """Raises before the first step if there would be no answer."""


def decide(
    conditions: Sequence[Condition], method: Literal["frozen", "next"], step: jax.Array, *per_group: Sequence[Any]
) -> list[Any]:
    """Calls a method of the conditions, once for all groups that decide together; one result per group."""
    calls: dict[Any, list[int]] = collections.defaultdict(list)
    for i in sorted(range(len(conditions)), key=lambda i: conditions[i].place):
        calls[i if conditions[i].call is None else conditions[i].call].append(i)
    results: dict[int, Any] = {}
    for groups in calls.values():
        lists = [[values[i] for i in groups] for values in per_group]
        results |= zip(groups, getattr(conditions[groups[0]], method)(step, *lists), strict=True)
    return [results[i] for i in range(len(conditions))]


@dataclasses.dataclass(frozen=True)
class Switch(Condition):
    """A bool in the state, which :func:`optax_freeze.set_frozen` sets; ``first`` is its initial value."""

    first: Any = dataclasses.field(compare=False)

    def initial(self) -> jax.Array:
        return jnp.array(self.first)

    def frozen(self, step: jax.Array, states: Sequence[Any]) -> list[Any]:
        return jax.tree.leaves(states)

    @property
    def recorded(self) -> str:
        return "a switch"

    def __str__(self) -> str:
        return "a group controlled by fz.set_frozen"


@dataclasses.dataclass(frozen=True, repr=False)
class FunctionCondition(Condition):
    """A function of the step, and of the gradient statistics of the group if it ``takes_norm``."""

    name: str = dataclasses.field(compare=False)  # of the group, for errors
    function: Callable[..., Any]
    takes_norm: bool

    def initial(self) -> PyTree:
        zero = jnp.zeros([], jnp.float32)
        return GroupStats(jax.device_put(np.float32(np.inf)), zero, jnp.zeros([], jnp.int32)) if self.takes_norm else ()

    def frozen(self, step: jax.Array, states: Sequence[Any]) -> list[Any]:
        stats = [GroupStats(*jax.tree.leaves(states))] if self.takes_norm else []
        try:
            answer = self.function(step, *stats)
        except jax.errors.JAXTypeError as error:
            raise type_error(
                "a condition needs the value of a traced array",
                at=self.name,
                got=described(self.function),
                expected="a function step -> bool or (step, stats) -> bool that jax.jit can trace",
                fix="compare without `if`, `and` and `or`: lambda step: (step < 5) | (step >= 10)",
            ) from error
        refuse_no_bool(self.name, answer, described(self.function))
        return [answer]

    def next(
        self, step: jax.Array, states: Sequence[Any], frozen: Sequence[Any], norms: Sequence[Any]
    ) -> Sequence[Any]:
        if not self.takes_norm:
            return states
        [is_frozen], [norm], old = frozen, norms, GroupStats(*jax.tree.leaves(states))
        trained = ~jnp.asarray(is_frozen)
        counts = trained & jnp.isfinite(norm)
        total = jnp.where(counts, old.total + norm, old.total)
        return [GroupStats(jnp.where(trained, norm, old.norm), total, old.updates + counts.astype(jnp.int32))]

    def differs(self, other: Condition) -> bool:
        if not isinstance(other, FunctionCondition) or self.takes_norm != other.takes_norm:
            return True
        comparable = all(dataclasses.is_dataclass(each.function) for each in (self, other))
        return comparable and self.function != other.function

    @property
    def recorded(self) -> str:
        if isinstance(self.function, NamedSchedule):
            return repr(self.function)
        return "a function of the step and statistics" if self.takes_norm else "a function of the step"

    def check(self) -> None:
        step = jax.ShapeDtypeStruct((), jnp.int32)
        jax.eval_shape(lambda step: jnp.asarray(*self.frozen(step, [self.initial()])), step)

    def __repr__(self) -> str:
        return repr(self.function)

    def __str__(self) -> str:
        return f"the condition {described(self.function)}"


def as_condition(name: str, value: Any) -> Condition:
    """The condition that a user gives for a group: a bool, or a function of (step) or (step, stats)."""
    if isinstance(value, Condition):
        return value
    if callable(value):
        return FunctionCondition(name, value, _takes_stats(value))
    refuse_no_bool(name, value, "fz.freeze_when", "a function step -> bool, or ")
    return Switch(value)


def _takes_stats(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    required = [p for p in positional if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if not positional or len(required) > 2:
        raise type_error(
            "a condition must take (step) or (step, stats)",
            at=described(function),
            got=f"a function of ({', '.join(p.name for p in parameters)})",
            expected="a function of (step) or (step, stats)",
            fix="lambda step, stats: stats.norm < 0.01; set other parameters by functools.partial or a default",
        )
    return len(required) == 2


_COMPARE = "compare: lambda step: step < 100; for elements of a leaf, (element mask, condition)"


def refuse_no_bool(name: str, value: Any, where: str, also: str = "", fix: str = _COMPARE) -> None:
    """A ``TypeError`` for a value that is not a bool, a ``ValueError`` for an array of bools."""
    is_bool = isinstance(value, bool) or (is_array(value) and value.dtype == np.bool_)
    if is_bool and np.shape(value) == ():
        return
    raise (value_error if is_bool else type_error)(
        f"{where}: expected a bool for the group",
        at=name,
        got=described(value),
        expected=f"{also}True (frozen) or False, one for the whole group",
        fix=fix,
    )


class GroupStats(NamedTuple):
    """Gradient statistics of a group, for a condition ``(step, stats) -> bool`` of :func:`optax_freeze.freeze_when`.

    They describe the gradients passed to ``update``, before ``coupled``, and do not change while the group is frozen: a
    condition that only compares them freezes the group forever. ``<`` and ``>`` with NaN are False.

    Attributes:
      norm: float32, the global norm of the gradient in the last update in which the group trained; infinity before the
        first.
      total: float32, the sum of these norms, without those that are infinite or NaN.
      updates: int32, the number of norms in ``total``; their mean is ``total / updates``.

    Example:
      >>> import optax, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(4), "head": jnp.ones(4)}
      >>> tx = fz.freeze_when(optax.sgd(0.1), {"encoder": lambda step, stats: stats.norm < 0.01})
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> state.groups["encoder"].condition_state
      GroupStats(norm=Array(2., dtype=float32), total=Array(2., dtype=float32), updates=Array(1, dtype=int32))
    """

    norm: jax.Array
    total: jax.Array
    updates: jax.Array


def global_norm(gradient: PyTree) -> jax.Array:
    squares = [jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32))) for x in jax.tree.leaves(gradient)]
    return jnp.sqrt(sum(squares, jnp.zeros([], jnp.float32)))
