"""Refuses gradients of the frozen parameters that features were computed from: they would lack the path through them.

Also the gradient of the trainable rows of a leaf is that of the whole leaf, cut by whoever wants it. So the gradient of
frozen rows is refused only by a program that computes it.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from optax_freeze._errors import value_error
from optax_freeze._gradient.unknown_derivative import without_gradient


def without_gradient_of(features: Sequence[Any], frozen: Mapping[str, Any], *, in_part: bool) -> list[Any]:
    """Features that were computed from these frozen leaves, or frozen rows (``in_part``), by the paths of leaves."""
    refuse = [functools.partial(_refuse_rows if in_part else _refuse_leaf, path) for path in frozen]
    return without_gradient(features, [*frozen.values()], refuse, in_part)


def _refuse_leaf(path: str) -> NoReturn:
    raise value_error(
        "the features were computed with a different spec",
        at=path,
        got="a gradient with respect to a leaf that is frozen in fz.precompute",
        expected="gradients of the parameters that are trainable in fz.precompute",
        fix="pass the same `frozen` to fz.precompute and to fz.grad, fz.value_and_grad or fz.freeze",
    )


def _refuse_rows(path: str) -> NoReturn:
    raise value_error(
        "the features were computed from frozen rows, whose gradient would lack the path through them",
        at=path,
        got="a gradient with respect to all rows of the leaf",
        expected="that of the rows that are trainable in fz.precompute",
        fix="fz.grad(once.after, frozen) with the `frozen` of fz.precompute; or pass what `needed` returned",
    )
