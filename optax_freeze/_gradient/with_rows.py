"""A whole array, differentiated with respect to some of its rows: the primitive ``with_rows``.

A primitive and no ``jax.custom_jvp``: JAX drops the rule of the latter from what a scan has computed before its
gradient, and a second derivative there would take the rows for constants.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from optax_freeze._gradient.row_numbers import padding
from optax_freeze._spec.layout import explicit_sharding, laid_out
from optax_freeze._spec.selection import RowIndex, RowSelection
from optax_freeze._spec.tree import Part

_with_rows = Primitive("with_rows")


def with_rows(index: RowSelection, whole: Any, rows: Any) -> jax.Array:
    """``whole``, whose trainable rows are ``rows`` already, differentiated with respect to these."""
    numbers = jax.tree.leaves(index)
    return (
        _with_rows.bind(whole, rows, *numbers, index=index.part_index)
        if jnp.issubdtype(whole.dtype, jnp.inexact)
        else whole
    )


def spread(index: RowSelection, rows: Any, like: Any) -> jax.Array:
    """``rows`` among zeros: an array of the shape of ``like``. The gradient is a slice, or a lookup of the rows."""
    zero, shape = np.zeros((), rows.dtype), jnp.shape(like)
    if isinstance(index, RowIndex) and (edges := padding(index, index.axis, len(shape))):
        return laid_out(explicit_sharding(like), lambda rows: jax.lax.pad(rows, zero, edges), rows)
    return index.spread(Part(rows, index, shape), zero, like)


def spread_tangent(index: RowSelection, of_whole: Any, of_rows: Any, like: Any) -> Any:
    """The tangent of a whole array from those of both parts; None if it is zero."""
    of_rows = None if is_zero(of_rows) else spread(index, of_rows, like)
    if is_zero(of_whole):
        return of_rows
    return index.choose(of_whole, jnp.zeros_like(of_whole) if of_rows is None else of_rows)


def is_zero(tangent: Any) -> bool:
    """Whether a tangent is known to be zero when a program is traced."""
    return isinstance(tangent, (ad.Zero, jax.custom_derivatives.SymbolicZero))


def _jvp(primals: Any, tangents: Any, *, index: Any) -> tuple[Any, Any]:
    out = _with_rows.bind(*primals, index=index)
    of_whole, of_rows, *_ = tangents
    tangent = spread_tangent(index.with_array(*primals[2:]) if primals[2:] else index, of_whole, of_rows, out)
    return out, of_whole if tangent is None else tangent


def _batched(values: Any, axes: Any, *, index: Any) -> tuple[Any, int]:
    whole, rows, *numbers = values
    if numbers and axes[2] is not None:  # each example has rows of its own

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
