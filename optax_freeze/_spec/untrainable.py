"""Refuses element masks of leaves that cannot train, if they let some of their elements train."""

from collections.abc import Sequence

import numpy as np

from optax_freeze._errors import is_concrete, value_error
from optax_freeze._spec.masks import Choice, ElementMask, Elements
from optax_freeze._spec.selection import FROZEN
from optax_freeze._spec.tree import Leaf


def refuse_untrainable(choice: Choice, leaves: Sequence[Leaf]) -> None:
    """A ``ValueError`` for an element mask of leaves none of which can train, if some of their elements would."""
    if isinstance(choice, bool) or any(leaf.may_train for leaf in leaves):
        return
    for leaf in leaves:
        if leaf.shape and _would_train(choice, leaf):
            what, got = f"{choice!r} trains a part of a leaf that cannot train", f"{leaf.dtype} of shape {leaf.shape}"
            expected = "a floating-point or complex leaf: any other is frozen as a whole"
            fix = "write True in place of the mask; if the leaf should train, convert it: leaf.astype(jnp.float32)"
            raise value_error(what, at=leaf.path, got=got, expected=expected, fix=fix)


def _would_train(mask: ElementMask, leaf: Leaf) -> bool:
    """Whether a mask lets elements of a leaf train; False if it has no values that say so."""
    if isinstance(mask, Elements):
        return is_concrete(mask.array) and not np.all(mask.array)
    return mask.fit(leaf) is not FROZEN
