"""What ``fz.explain`` returns: for each leaf, the operations of which rows or everything is computed or read."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from optax_freeze._errors import printable
from optax_freeze._spec.folded_paths import fold


@dataclasses.dataclass(frozen=True)
class Operation:
    """The name of a JAX operation of the gradient and the line of the user's program that it comes from.

    Attributes:
      is_cheap: whether the operation is elementwise or changes only the layout.
    """

    name: str
    source: str
    is_cheap: bool = False

    def __str__(self) -> str:
        return f"{self.name} at {self.source}" if self.source else self.name


class Explanation:
    """Explains how a function is computed; prints one line for each leaf, stored value or operation.

    The result of :func:`optax_freeze.explain` and of the ``explain`` of :func:`optax_freeze.precompute`.

    Attributes:
      lines: the lines that are printed.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> params = {"embed": jnp.ones((4, 2))}
      >>> fz.explain(lambda p: p["embed"][0].sum(), params, {"embed": fz.rows([1])}).lines
      ['embed: 3 of 4 rows train; only their gradient is computed']
    """

    @property
    def lines(self) -> Sequence[str]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(map(printable, self.lines))


@dataclasses.dataclass(frozen=True)
class LeafExplanation(Explanation):
    """How operations compute the gradient of one leaf that is frozen by rows, or read one frozen leaf.

    Attributes:
      path: the path of the leaf.
      by_rows: the operations of the gradient of which only some rows are computed, or those that copy only some rows at
        a time from the host, in program order.
      everything: the operations of the gradient that compute everything although only some rows are wanted, because
        nothing is known about their rows; the last one in program order is first. Or the operations that copy the whole
        leaf to the device, and for a leaf on the device, those that read it.
      rows: the number of rows, and ``trainable_rows`` of those that train; None for a leaf in ``Explanation.host``.
      on_host: whether the leaf is in host memory.
      whole: for rows that keep their state, the operations of the gradient that read all rows, where a lookup reads
        those of the batch. Through these operations other rows get no gradient.
    """

    path: str
    by_rows: tuple[Operation, ...]
    everything: tuple[Operation, ...]
    rows: int | None = None
    trainable_rows: int | None = None
    on_host: bool = False
    whole: tuple[Operation, ...] = ()

    @property
    def merged(self) -> Operation | None:
        """The last operation of the gradient that computes everything, whose result is cut; None if there is none."""
        return self.everything[0] if self.everything else None

    @property
    def lines(self) -> list[str]:
        return list(_folded([self]))

    @property
    def said(self) -> list[str]:
        """What is said of the leaf: the lines without its path."""
        if self.rows is not None:
            how = f"everything is computed by {self.merged}" if self.merged else "only their gradient is computed"
            costly = [f"  rows: {operation}" for operation in self.by_rows if not operation.is_cheap]
            whole = [f"  whole: {operation}; other rows that it reads get no gradient" for operation in self.whole]
            return [f"{self.trainable_rows} of {self.rows} rows train; {how}", *costly, *whole]
        if not self.on_host:
            return [f"stays on the device, where it is looked up by {self.everything[0]}"]
        how = " and ".join(["by rows"] * bool(self.by_rows) + ["whole"] * bool(self.everything))
        return [
            f"from the host, {how or 'and not read'}",
            *(f"  by rows: {operation}" for operation in self.by_rows),
            *(f"  whole: {operation}; better kept on the device" for operation in self.everything),
        ]


@dataclasses.dataclass(frozen=True)
class GradientExplanation(Explanation):
    """The result of :func:`optax_freeze.explain`.

    Attributes:
      rows: one entry for each leaf that is frozen by rows: its path, its number of rows and of trainable rows, and the
        operations of its gradient (name and source line) of which some rows or everything is computed.
      host: empty if no leaf is in host memory (:func:`optax_freeze.offload`). Otherwise one entry for each leaf in host
        memory, with its path and the operations that read it by rows or as a whole, and one for each frozen leaf on the
        device that is only read by lookups.
    """

    rows: tuple[LeafExplanation, ...]
    host: tuple[LeafExplanation, ...] = ()

    @property
    def lines(self) -> list[str]:
        found = [line for leaves in (self.rows, self.host) for line in _folded(leaves)]
        return found or ["no leaf is frozen by rows"]


def _folded(leaves: Iterable[LeafExplanation]) -> Iterator[str]:
    """The lines of leaves, once for those whose paths differ in a number and whose lines are the same."""
    for path, _, (first, *others) in fold((leaf.path, tuple(leaf.said)) for leaf in leaves):
        yield f"{'/'.join(path) or '(the root)'}: {first}"
        yield from others
