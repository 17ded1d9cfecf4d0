"""What differs in the results of a step if the gradients of frozen elements have other values."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._spec.sharding import explicit_sharding, with_sharding

CHANGES = ("negative", "huge", "nan", "inf", "signed", "zero")
"""Other values of a gradient; signed: huge, with its own sign."""

Answer: TypeAlias = frozenset[tuple[str, int | None]]
"""What differs with another gradient: ``frozen`` or ``trainable`` elements of a parameter, or its ``state``, each with
the number of the parameter in the plan; ``other`` state; another ``result`` of the step."""


class Gradient(NamedTuple):
    """The gradient of parameters with frozen elements, and what differs with other values at these elements."""

    leaves: tuple[int, ...]
    leaves_call: bool = False  # a jitted function, though nothing reads it
    negative: Answer = frozenset()
    huge: Answer = frozenset()
    nan: Answer = frozenset()
    inf: Answer = frozenset()

    def trainable(self, answer: Answer) -> set[int]:
        """The parameters whose trainable elements differ, or the state of which does; of its own not the state."""
        own = {("state", i) for i in self.leaves}
        return {i for name, i in answer - own if i is not None and name in ("trainable", "state")}

    @property
    def read(self) -> set[str]:
        return {name for name, _ in self.negative | self.huge | self.nan | self.inf}

    @property
    def is_logged(self) -> bool:
        """Whether only results beside the state read it."""
        return self.read == {"result"}


class Gradients(NamedTuple):
    """What is known of the gradients of frozen parameters, and of what else trains."""

    gradients: Sequence[Gradient] = ()
    are_given: bool = False  # to the step, which computes none of them
    by_values: AbstractSet[int] = frozenset()  # parameters whose trainable elements depend on frozen ones
    set_by_batch: AbstractSet[int] = frozenset()  # parameters that depend on the batch without the gradient of a loss
    untrained: Sequence[int] = ()  # trainable parameters that do not move, and whose gradient nothing reads
    flops: tuple[int, int | None] = 0, None  # of a step, and of these gradients in it, if it can be traced
    notes: Sequence[str] = ()  # what is not known, and what is no leak but worth knowing


def changed(value: Any, change: Any) -> Any:
    """Another value of a gradient; ``change`` is a place in ``CHANGES``."""
    huge = min(1e15, float(jnp.finfo(value.dtype).max) / 4)

    def new(value: Any, change: Any) -> Any:
        numbers = jnp.array([0, huge, np.nan, np.inf, 0, 0], value.dtype)[change]
        signed = jnp.where(jnp.real(value) < 0, -huge, huge).astype(value.dtype)
        return jnp.where(change == 0, -value, jnp.where(change == 4, signed, numbers))

    return with_sharding(explicit_sharding(value), new, value, change)


@jax.jit
def difference(a: Any, b: Any, frozen: Any) -> Any:
    """How many elements of two arrays differ where frozen, and how many elsewhere."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = map(jax.random.key_data, (a, b))
        frozen = jnp.asarray(False)
    differ = ~((a == b) | ((a != a) & (b != b)))
    return jnp.stack([x.sum(dtype=jnp.int32) for x in (differ & frozen, differ & ~frozen)])
