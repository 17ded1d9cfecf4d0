"""What is a rule, and which operation has which?

A rule is ``rule(eqn, *operands)``, where some operands are a :class:`SplitArray`. It returns the result, split as long
as the rows stay apart and dense where they are read, or None where the operation needs the merged array. A rule is
exact in both parts, so it holds whichever part is differentiated, and how often.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.extend.source_info_util import current

from optax_freeze._gradient.split_array import SplitArray


class Equation(NamedTuple):
    """An equation of a jaxpr without its operands, and the interpreter, for the programs that it contains."""

    primitive: Any
    params: dict[str, Any]
    evaluate: Callable[..., list[Any]]

    def bind_params(self, **changed: Any) -> tuple[Any, dict[str, Any]]:
        """The arguments of ``primitive.bind``: functions that come before the operands (up to JAX 0.9), and params."""
        bound = self.primitive.get_bind_params({**self.params, **changed})
        return bound if isinstance(bound, tuple) else ((), bound)

    def bind(self, *operands: Any, **changed: Any) -> Any:
        """The operation applied to dense operands, with some of its params changed."""
        functions, params = self.bind_params(**changed)
        return self.primitive.bind(*functions, *operands, **params)

    def bind_parts(self, x: SplitArray, *others: Any, axis: int | None = None, **of_rows: Any) -> SplitArray:
        """The operation applied to both parts of ``x``; ``of_rows`` are the params that differ for the rows."""
        return x.like(self.bind(x.frozen, *others), self.bind(x.rows, *others, **of_rows), axis)

    def record(self, effect: str, *values: Any) -> None:
        """Adds the operation to the logs of the split arrays among the values."""
        for value in values:
            if isinstance(value, SplitArray):
                value.record(self.primitive.name, effect, current())


class Rule(NamedTuple):
    """A rule in the table. One that ``enters`` programs reads frozen arrays and records operations by itself."""

    apply: Callable[..., Any]
    enters: bool


NO_RULE = Rule(lambda eqn, *operands: None, enters=False)

RULES: dict[str, Rule] = {}
"""The rule for each primitive, by the name of the primitive."""


def rule(*names: str, enters: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the rule for the primitives of these names."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, Rule(function, enters)))
        return function

    return register
