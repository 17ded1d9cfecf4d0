"""The result of an audit: its leaks, and their text."""

import dataclasses
from typing import Literal, NamedTuple, TypeAlias, get_args

from optax_freeze._errors import counted, listed, message

Kind: TypeAlias = Literal["moved", "changed", "gradient", "state", "untrained"]


class Leak(NamedTuple):
    """A violation of the freeze at one leaf.

    Attributes:
      kind: ``"moved"``: a frozen element has an update; ``"changed"``: the update of trainable elements depends on
        frozen ones; ``"gradient"``: a step uses a gradient of them; ``"state"``: state is stored for them;
        ``"untrained"``: the gradient of trainable elements affects neither updates nor state.
      path: the leaf; of ``"changed"`` and ``"untrained"`` one with trainable elements, of an average that in the state.
      cause: the most likely cause.
      got, expected: what was observed, and what should have been.
      fix: what to do about it.
      elements: the number of elements concerned.
      nbytes, flops: the size of the state, the cost of the gradients of all frozen leaves.
    """

    kind: Kind
    path: str
    cause: str
    got: str
    expected: str
    fix: str
    elements: int
    nbytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Audit:
    """The result of :func:`audit`: true if there is no leak. ``str`` gives a text for logs.

    Attributes:
      leaks: a :class:`Leak` for each leaf and cause.
      leaves: the number of leaves.
      frozen: the number of leaves that are frozen, in whole or in part.
      steps: the steps of each run.
      calls: how often the step was called, of :func:`audit_step`; loggers in it are called, too.
      note: why the runs may not show every leak; empty if there is no reason.

    Example:
      >>> import jax.numpy as jnp, optax, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(3), "head": jnp.ones(2)}
      >>> tx = optax.masked(optax.sgd(0.1), {"encoder": False, "head": True})
      >>> audit = fz.audit(params, "encoder", tx)
      >>> audit.ok, [(leak.kind, leak.path, leak.cause) for leak in audit.leaks]
      (False, [('moved', 'encoder', 'it trains')])
    """

    leaks: tuple[Leak, ...]
    leaves: int
    frozen: int
    steps: int
    note: str = ""
    calls: int = 0

    @property
    def ok(self) -> bool:
        """Whether there is no leak."""
        return not self.leaks

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        groups: dict[tuple[str, str], list[Leak]] = {}
        for leak in sorted(self.leaks, key=lambda leak: get_args(Kind).index(leak.kind)):
            groups.setdefault((leak.kind, leak.cause), []).append(leak)
        found = counted(len(groups), "leak", "leaks") if groups else "no leak"
        steps = counted(self.steps, "step", "steps") + " a run"
        steps += f", {self.calls} calls of the step" * bool(self.calls)
        text = f"audit: {found} ({self.frozen} of {self.leaves} leaves frozen, {steps})"
        text += f"\nnote: {self.note}" * bool(self.note)
        return "\n\n".join([text, *map(_text, groups.values())])

    __repr__ = __str__

    def raise_for_leaks(self) -> None:
        """Raises an ``AssertionError`` that lists the leaks and their fixes, if there is any."""
        if self.leaks:
            raise AssertionError(str(self))


def _text(rows: list[Leak]) -> str:
    """Leaks of one cause as one entry, with the details of the largest."""
    most, paths = max(rows, key=lambda leak: leak.elements), [leak.path or "(all leaves)" for leak in rows]
    got = most.got
    if len(rows) > 1:
        got += f" ({most.path})" + f"; {sum(leak.nbytes for leak in rows):,} bytes in all" * (most.kind == "state")
    return message(f"{most.kind}: {most.cause}", at=listed(paths), got=got, expected=most.expected, fix=most.fix)
