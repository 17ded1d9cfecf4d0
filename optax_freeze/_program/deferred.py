"""Values that are not read yet: each reader brings to the device, or computes, only the part that it wants."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from optax_freeze._program.regions import EVERYTHING, DynamicRows, Numbers, Region
from optax_freeze._program.trace import Equation
from optax_freeze._spec.sharding import eval_types


class Level:
    """Stands for the evaluation of a program in the values that it makes, which must not keep all others alive.

    ``inside``: evaluates the program of an operation.
    """

    def __init__(self, inside: Callable[..., Any]) -> None:
        self.inside = inside


class Outer(Protocol):
    """What an operation that has programs of its own needs of the evaluation of the program that it is in."""

    level: Level

    def operand(self, x: Any) -> Any: ...
    def is_repeated(self, x: Any) -> bool: ...
    def decide(self, eqn: Equation) -> list[bool]: ...


class Reader(NamedTuple):
    """The operation that reads a deferred value.

    Attributes:
      eqn: the operation.
      beside: another operand of it, which is on the device.
      level: the evaluation of the program that the operation is in.
      reads: where reads of arrays in host memory are noted: their names, the operation, and whether rows are read.
    """

    eqn: Any = None
    beside: Any = None
    level: Level | None = None
    reads: list[tuple[Any, Any, bool]] | None = None


class Deferred:
    """An array of which parts are brought to the device, or computed, where they are read."""

    shape: tuple[int, ...]
    type: Any = None
    """The type on the device, if it is known."""
    operations = 1
    """How many operations, at most, are repeated for each read."""
    on_host = True
    """Whether it is computed from arrays in host memory. Of another one, all is computed once if any part of it is read
    outside of loops."""
    level: Level | None = None
    """The evaluation of the program that it is a value of."""
    computed: Any = None
    """All of it on the device, if it is computed."""

    def enter(self, level: Level) -> None:
        """Makes it a value of this evaluation, unless it is one of another."""
        self.level = level if self.level is None else self.level

    def read(self, region: Region, reader: Reader) -> Any:
        """A region on the device."""
        raise NotImplementedError

    def rows(self, region: Region, is_row: bool = False) -> Any:
        """Rows along the first axis, not read yet if possible; or one row, without this axis."""
        raise NotImplementedError

    def is_by_rows(self, region: Region, in_blocks: bool = False) -> bool:
        """Whether a region is read without reading all of an array in host memory; of a matrix, by ``in_blocks``."""
        raise NotImplementedError

    def has_rows(self, in_blocks: bool = False) -> bool:
        """:meth:`is_by_rows` of a row whose number is a value of the program."""
        return self.is_by_rows(DynamicRows(0, Numbers(None, 1)), in_blocks)

    def row(self, i: jax.Array) -> Any:
        """One row along the first axis, not read yet if possible."""
        return self.rows(DynamicRows(0, i[None]), is_row=True)


def part_of(value: Any, region: Region, reader: Reader) -> Any:
    """A region of a value, which may be an array or a number."""
    return value.read(region, reader) if isinstance(value, Deferred) else region.take(value)


def type_of(value: Any) -> Any:
    """The type of a value on the device, as an argument of ``jax.make_jaxpr``."""
    if not isinstance(value, Deferred):
        return value
    return eval_types(lambda: value.read(EVERYTHING, Reader())) if value.type is None else value.type


class Input(Deferred):
    """An input of a program, which is read once if the program reads all of it; ``note`` is then called.

    ``at_once``: whether all of it is read if any part is; ``is_looked_up``: whether the program reads it only in
    slices, a few lookups, and loops.
    """

    at_once = is_looked_up = False

    def __init__(self, value: Any, note: Callable[[], Any] = lambda: None) -> None:
        self.value, self.note, self.shape = value, note, value.shape
        self.on_host, self.operations = False, 1
        if isinstance(value, Deferred):
            self.on_host, self.operations = value.on_host, value.operations

    def read(self, region: Region, reader: Reader) -> Any:
        if region is EVERYTHING or not self.is_by_rows(region, in_blocks=True):
            self.note()
        is_here = reader.level is not None and reader.level is self.level
        if self.computed is None and is_here and (region is EVERYTHING or self.at_once):
            self.computed = self.whole(reader)
        if self.computed is not None:
            return region.take(self.computed)
        return self.whole(reader) if region is EVERYTHING else part_of(self.value, region, reader)

    def whole(self, reader: Reader) -> Any:
        """All of it."""
        return part_of(self.value, EVERYTHING, reader)

    def rows(self, region: Region, is_row: bool = False) -> Any:
        if isinstance(self.value, Deferred):
            return self.value.rows(region, is_row)
        rows = region.take(self.value)
        return Input(rows[0] if is_row else rows)

    def is_by_rows(self, region: Region, in_blocks: bool = False) -> bool:
        return not isinstance(self.value, Deferred) or self.value.is_by_rows(region, in_blocks)
