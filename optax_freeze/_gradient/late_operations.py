"""Delays operations on late frozen arrays until their result is used, and reads them again in the backward pass.

A weight that was copied from the host must not stay on the device until the backward pass. The operation that uses it
is rematerialised: the backward pass copies the weight again and repeats only the computation that the derivative needs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.source_info_util import current
from jax.sharding import NamedSharding

from optax_freeze._gradient.frozen_array import (
    Computed,
    LateOperation,
    Unread,
    has_late,
    is_late,
    read_all,
    record_reads,
    reshaped,
    size_of,
    sources,
)
from optax_freeze._gradient.jaxprs import ELEMENTWISE

_MOST_OPERATIONS = 64  # limit per result, since repeated operations are computed each time


def waiting(name: str, params: dict[str, Any], bind: Callable[..., Any], operands: Sequence[Any]) -> Unread | None:
    """Returns the uncomputed result of an operation on late arrays and numbers; None if it cannot be delayed.

    ``bind`` applies the operation to dense operands, with some of its params changed.
    """
    if not has_late(operands) or (params.get("sharding") is not None and name != "sharding_constraint"):
        return None
    first, *others = operands
    if name == "dynamic_slice" and isinstance(first, Unread):
        is_stretch = params["slice_sizes"][1:] == first.shape[1:] and not has_late(others)
        return _stretch_from(first, others[0], params["slice_sizes"][0]) if is_stretch else None
    if not all(is_late(operand) or is_number(operand) for operand in operands):
        return None
    if sum(size_of(operand) for operand in operands) > _MOST_OPERATIONS:
        return None
    if name in ELEMENTWISE.split():
        return _elementwise(name, bind, operands)
    if name == "custom_jvp_call":
        return _computed(name, bind, operands, lambda *_: None)
    return _OF_ONE[name](first, params, bind) if name in _OF_ONE else None


def read_again(name: str, bind: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """Applies an operation to late operands; those on the host are copied again for its derivative."""
    for operand in operands:
        record_reads(operand, name, current())
    found = [source for operand in operands for source in sources(operand) if source.on_host]
    if not found:
        return bind(*read_all(operands))
    in_loops = all(isinstance(source.start, Tracer) for source in found)
    function = jax.checkpoint(lambda *values: bind(*read_all(values)), prevent_cse=not in_loops)
    return function(*operands)


def is_number(value: Any) -> bool:
    return not isinstance(value, (Tracer, Unread)) and np.shape(value) == ()


def _stretch_from(x: Unread, start: Any, count: int) -> Unread | None:
    last = x.shape[0] - count
    if isinstance(start, Tracer):  # clamped in its own dtype, whose numbers may not fit int32
        zero, most = np.zeros((), start.dtype), np.asarray(min(last, np.iinfo(start.dtype).max), start.dtype)
        return x.stretch(jax.lax.clamp(zero, start, most).astype(np.int32), count)
    return x.stretch(min(max(int(start), 0), last), count)


def _computed(
    name: str, apply: Callable[..., Any], operands: Sequence[Any], stretch: Callable[..., Any]
) -> Computed | None:
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Unread) else x for x in operands]
    out = jax.eval_shape(apply, *structs)
    if isinstance(out, list):
        if len(out) > 1:
            return None
        [out], of_list = out, apply
        apply = lambda *arrays: of_list(*arrays)[0]  # noqa: E731
    struct = jax.ShapeDtypeStruct(out.shape, out.dtype)
    return Computed(tuple(operands), LateOperation(name, apply, struct, stretch))


def _elementwise(name: str, bind: Callable[..., Any], operands: Sequence[Any]) -> Computed | None:
    def stretch(operands: Sequence[Any], start: Any, count: int) -> Any:
        size = max(x.shape[0] for x in operands if isinstance(x, Unread) and x.ndim)
        parts = [
            x.stretch(start, count) if isinstance(x, Unread) and x.ndim and x.shape[0] == size else x for x in operands
        ]
        return None if any(part is None for part in parts) else _elementwise(name, bind, parts)

    return _computed(name, bind, operands, stretch)


def _transpose(x: Unread, params: dict[str, Any], bind: Callable[..., Any]) -> Computed | None:
    def stretch(operands: Sequence[Any], start: Any, count: int) -> Any:
        part = operands[0].stretch(start, count) if params["permutation"][0] == 0 else None
        return None if part is None else _transpose(part, params, bind)

    return _computed("transpose", bind, [x], stretch)


def _sharding_constraint(x: Unread, params: dict[str, Any], bind: Callable[..., Any]) -> Computed | None:
    sharding = params["sharding"]

    def stretch(operands: Sequence[Any], start: Any, count: int) -> Any:
        rows_apart = not isinstance(sharding, NamedSharding) or any(sharding.spec[:1])
        part = None if rows_apart else operands[0].stretch(start, count)
        return None if part is None else _sharding_constraint(part, params, bind)

    return _computed("sharding_constraint", bind, [x], stretch)


def _broadcast_in_dim(x: Unread, params: dict[str, Any], bind: Callable[..., Any]) -> Computed | None:
    shape, axes = params["shape"], params["broadcast_dimensions"]

    def stretch(operands: Sequence[Any], start: Any, count: int) -> Any:
        (x,) = operands
        has_rows = bool(axes) and axes[0] == 0 and x.shape[0] == shape[0]
        part = x.stretch(start, count) if has_rows else x
        return None if part is None else _broadcast_in_dim(part, {**params, "shape": (count, *shape[1:])}, bind)

    return _computed("broadcast_in_dim", lambda x: bind(x, shape=shape), [x], stretch)


def _slice(x: Unread, params: dict[str, Any], bind: Callable[..., Any]) -> Unread | None:
    (start, *starts), (limit, *limits) = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * x.ndim
    part = x.stretch(start, limit - start) if (start, limit) != (0, x.shape[0]) else x
    if strides[0] != 1 or part is None:
        return None
    if (tuple(starts), tuple(limits)) == ((0,) * len(starts), x.shape[1:]) and set(strides) == {1}:
        return part
    return _slice_of_rows(part, starts, limits, strides)


def _slice_of_rows(x: Unread, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int]) -> Computed | None:
    def stretch(operands: Sequence[Any], start: Any, count: int) -> Any:
        part = operands[0].stretch(start, count)
        return None if part is None else _slice_of_rows(part, starts, limits, strides)

    def apply(x: Any) -> Any:
        return jax.lax.slice(x, (0, *starts), (x.shape[0], *limits), strides)

    return _computed("slice", apply, [x], stretch)


def _squeeze(x: Unread, params: dict[str, Any], bind: Callable[..., Any]) -> Unread:
    return reshaped(x, tuple(size for axis, size in enumerate(x.shape) if axis not in params["dimensions"]))


def _reshape(x: Unread, params: dict[str, Any], bind: Callable[..., Any]) -> Unread | None:
    return None if params["dimensions"] is not None else reshaped(x, tuple(params["new_sizes"]))


_OF_ONE: dict[str, Callable[..., Unread | None]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "sharding_constraint": _sharding_constraint,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
}
