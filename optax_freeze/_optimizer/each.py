"""The key of ``freeze_when`` that stands for a group of each leaf; unlike groups that thaw in turn, it has no order."""

import dataclasses
from collections.abc import Sequence

import jax

from optax_freeze._errors import type_error
from optax_freeze._spec.selector_algebra import Choice, Path, Selector
from optax_freeze._spec.tree import Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Each(Selector):
    """A key of the groups of ``freeze_when`` that stands for one group per selected leaf. It is not a spec."""

    selector: Selector

    def select(self, leaves: Sequence[Leaf]) -> list[Choice]:
        raise type_error(
            "fz.each is only a key of the groups of fz.freeze_when",
            at=repr(self),
            got="fz.each where a spec is expected, or inside another selector",
            expected="fz.freeze_when(inner, {fz.each(pattern): condition})",
            fix=f"use the selector alone: {self.selector!r}; combine selectors inside: fz.each(a | b)",
        )

    def __repr__(self) -> str:
        patterns = self.selector.patterns if isinstance(self.selector, Path) else [self.selector]
        return f"fz.each({', '.join(map(repr, patterns))})"
