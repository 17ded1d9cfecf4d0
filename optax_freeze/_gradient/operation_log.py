"""Records the operations applied to a leaf, and how they read it."""

import dataclasses
from typing import Any, NamedTuple


class Operation(NamedTuple):
    """An operation in a log.

    For a partially frozen leaf, ``effect`` is ``"kept"`` (the result is split, too), ``"read"`` (it read rows),
    ``"whole"`` (it used the whole array in the forward pass) or ``"merged"``. For frozen arrays in host memory it is
    ``"host rows"`` or ``"host whole"``; for those on the device, if others are in host memory, ``"device"``.
    """

    name: str
    effect: str
    source: Any


@dataclasses.dataclass(eq=False)
class OperationLog:
    """The operations applied to an array and to the arrays computed from it.

    The log is a mutable object in a static field of an array. It is compared by identity, so that ``jit`` traces again
    for each log instead of reusing a trace whose operations were recorded in another log.
    """

    is_trial: bool = False  # True if a rule only checks which operations a function would apply
    operations: list[Operation] = dataclasses.field(default_factory=list)

    def with_effect(self, *effects: str) -> list[Operation]:
        """The operations that had one of these effects, in order."""
        return [operation for operation in self.operations if operation.effect in effects]


class Logged:
    """An array with an optional log of the operations that read it."""

    log: OperationLog | None = None

    def record(self, operation: str, effect: str, source: Any) -> None:
        """Adds an operation to the log, if there is one."""
        if self.log is not None:
            self.log.operations.append(Operation(operation, effect, source))
