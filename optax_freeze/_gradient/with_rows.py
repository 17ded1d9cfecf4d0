"""The primitive ``with_rows``: a whole array that is differentiated with respect to some of its rows.

A ``jax.custom_jvp`` would not work: JAX drops its rule from values that a scan computes ahead of its gradient, so
second derivatives would treat the rows as constants.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from optax_freeze._gradient.row_numbers import padding
from optax_freeze._spec.indexing import set_rows
from optax_freeze._spec.layout import explicit_sharding, laid_out
from optax_freeze._spec.selection import RowIndex, RowSelection
from optax_freeze._spec.tree import Part

_with_rows = Primitive("with_rows")


def with_rows(index: RowSelection, whole: Any, rows: Any) -> jax.Array:
    """Returns ``whole``, differentiated with respect to ``rows``, whose values it must already contain."""
    numbers = jax.tree.leaves(index)
    return (
        _with_rows.bind(whole, rows, *numbers, index=index.part_index)
        if jnp.issubdtype(whole.dtype, jnp.inexact)
        else whole
    )


def spread(index: RowSelection, rows: Any, like: Any) -> jax.Array:
    """Puts ``rows`` into zeros of the shape of ``like``. The gradient is a slice or a lookup of the rows.

    The rows may be a tangent, so they are moved as floats: the bitcasts of ``index.spread`` have no transpose.
    """
    shape = jnp.shape(like)
    edges = padding(index, index.axis, len(shape)) if isinstance(index, RowIndex) else None

    def spread(rows: Any, *array: Any) -> jax.Array:
        if edges:
            return jax.lax.pad(rows, np.zeros((), rows.dtype), edges)
        return set_rows(index.axis, index.indices(*array), jnp.zeros(shape, rows.dtype), rows)

    return laid_out(explicit_sharding(like), spread, rows, *jax.tree.leaves(index))


def spread_tangent(index: RowSelection, of_whole: Any, of_rows: Any, like: Any) -> Any:
    """Returns the tangent of a whole array, given the tangents of both parts; None if it is zero."""
    of_rows = None if is_zero(of_rows) else spread(index, of_rows, like)
    if is_zero(of_whole):
        return of_rows
    of_rows = jnp.zeros_like(of_whole) if of_rows is None else of_rows
    return laid_out(explicit_sharding(like), jnp.where, index.frozen(of_whole.ndim), of_whole, of_rows)


def is_zero(tangent: Any) -> bool:
    """Whether a tangent is known at trace time to be zero."""
    return isinstance(tangent, (ad.Zero, jax.custom_derivatives.SymbolicZero))


def _jvp(primals: Any, tangents: Any, *, index: Any) -> tuple[Any, Any]:
    out = _with_rows.bind(*primals, index=index)
    of_whole, of_rows, *_ = tangents
    tangent = spread_tangent(index.with_array(*primals[2:]) if primals[2:] else index, of_whole, of_rows, out)
    return out, of_whole if tangent is None else tangent


def _batched(values: Any, axes: Any, *, index: Any) -> tuple[Any, int]:
    whole, rows, *numbers = values
    if numbers and axes[2] is not None:  # the trainable rows differ between examples

        def put(whole: Any, rows: Any, numbers: Any) -> Any:
            return index.with_array(numbers).put(whole, Part(rows, index, whole.shape))

        return jax.vmap(put, axes)(*values), 0
    of_parts = list(zip((whole, rows), axes, strict=False))
    sizes = [value.shape[axis] for value, axis in of_parts if axis is not None]
    first = [
        jnp.broadcast_to(value, (sizes[0], *value.shape)) if axis is None else jnp.moveaxis(value, axis, 0)
        for value, axis in of_parts
    ]
    return _with_rows.bind(*first, *numbers, index=dataclasses.replace(index, axis=index.axis + 1)), 0


_with_rows.def_impl(lambda whole, rows, *numbers, index: whole)
_with_rows.def_abstract_eval(lambda whole, rows, *numbers, index: whole)
ad.primitive_jvps[_with_rows] = _jvp
batching.primitive_batchers[_with_rows] = _batched
mlir.register_lowering(_with_rows, lambda context, whole, rows, *numbers, index: [whole])
