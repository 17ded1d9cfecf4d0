"""Warnings of ``init`` about leaves that will not stay as they are: tied leaves that train, and arrays of NumPy."""

import warnings
from collections.abc import Sequence
from typing import Any

from optax_freeze._errors import counted, message
from optax_freeze._spec.numpy_leaves import AS_ARRAYS_OF_JAX, dtype_in_jax, is_lost
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import FreezeWarning, Tied
from optax_freeze._spec.selection import FROZEN, TRAINABLE
from optax_freeze._spec.tied_leaves import ties


def warn_of_leaves(values: Sequence[Any], trained: Plan, frozen: Plan, tied: Tied, *, stacklevel: int) -> None:
    """Emits a :class:`FreezeWarning` for tied leaves that train, and one for frozen ones that JAX converts.

    The plans differ for groups, which train at some steps and are frozen at others.
    """
    texts = []
    paths = [leaf.path for leaf in trained.leaves]
    pairs = [(i, j) for i, j in ties(values, trained.leaves) if trained.selections[i] is not FROZEN]
    if pairs and tied == "error":
        text = message(
            "one array at two paths that both train: they will differ after the first update",
            at=[paths[each] for each in pairs[0]],
            got=f"the same array at both paths{f', and {len(pairs) - 1} more such pairs' * (len(pairs) > 1)}",
            expected="one leaf for parameters that are shared",
            fix='read it in both places from one leaf; if they shall differ, copy the array, or pass tied="ignore"',
        )
        texts.append(text)
    lost = [i for i, s in enumerate(frozen.selections) if s is not TRAINABLE and is_lost(values[i])]
    if lost:
        dtypes = dict.fromkeys(values[i].dtype for i in lost)
        text = message(
            "a frozen NumPy array will not stay as it is: jax.jit converts it",
            at=[paths[i] for i in lost[:3]],
            got=f"{counted(len(lost), 'leaf', 'leaves')} of {', '.join(map(str, dtypes))}",
            expected=f"{', '.join(str(dtype_in_jax(dtype)) for dtype in dtypes)}, the dtype that JAX makes of it",
            fix=AS_ARRAYS_OF_JAX,
        )
        texts.append(text)
    for text in texts:
        warnings.warn(text, FreezeWarning, stacklevel=stacklevel + 1)
