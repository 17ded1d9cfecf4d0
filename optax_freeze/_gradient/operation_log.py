"""Which operations were applied to a leaf, and how did they read it?"""

import dataclasses
from typing import Any, NamedTuple


class Operation(NamedTuple):
    """An operation in a log.

    On a leaf of which some rows are frozen it ``kept`` the array split, ``read`` rows of it, took the ``whole`` array
    forward or ``merged`` it. From the host's memory it read ``host rows`` or the ``host whole``; beside arrays that
    lie there, a frozen array that is on the ``device``.
    """

    name: str
    effect: str
    source: Any


@dataclasses.dataclass(eq=False)
class OperationLog:
    """The operations applied to an array and to the arrays made of it.

    A mutable object in a static field of an array, compared by identity: ``jit`` then traces again for each log,
    instead of reusing a trace whose operations were recorded elsewhere.
    """

    is_trial: bool = False  # a rule asks which operations a function would apply
    operations: list[Operation] = dataclasses.field(default_factory=list)

    def with_effect(self, *effects: str) -> list[Operation]:
        """The operations that had one of these effects, in order."""
        return [operation for operation in self.operations if operation.effect in effects]


class Logged:
    """An array with a log, if somebody asks which operations read it."""

    log: OperationLog | None = None

    def record(self, operation: str, effect: str, source: Any) -> None:
        """Adds an operation to the log, if there is one."""
        if self.log is not None:
            self.log.operations.append(Operation(operation, effect, source))
