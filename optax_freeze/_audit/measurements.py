"""Describes what a step does to a leaf by a few numbers, computed on the device."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._spec.memory_kinds import to_device
from optax_freeze._spec.selection import FROZEN, Selection
from optax_freeze._verify import bits as _bits


class Change(NamedTuple):
    """The largest change of a frozen element, as a text and in units of the last place; at which rate all decay."""

    far: str
    ulps: float = np.inf
    rate: float = 0.0  # change / parameter, if it is the same for all frozen elements up to rounding


def moved_elements(*pairs: tuple[Any, Any, Selection]) -> list[int]:
    """For each pair of leaves how many frozen elements have other bits; all, if the shape or the dtype is another."""
    counts: list[Any] = []
    for before, after, selection in pairs:
        if np.shape(before) != np.shape(after) or jnp.result_type(before) != jnp.result_type(after):
            counts.append((max(int(np.size(after)), 1), 0))
        elif before is after:
            counts.append((0, 0))
        else:
            a, b, selection = _bits.placed(_array(before), _array(after), selection)
            counts.append(_bits.count(a, b, selection, axis=_bits.block_axis(*jax.tree.leaves((a, b)))))
    return [int(low) + (int(high) << 32) for low, high in jax.device_get(counts)]


def changes_of(*leaves: tuple[Any, Any, Selection, Any]) -> list[tuple[Change, bytes]]:
    """For each leaf before and after a step how frozen elements change, and a digest of their new bits.

    The last item of a tuple is what was added, without rounding, or None.
    """
    raw = []
    for before, after, selection, update in leaves:
        can_differ = np.shape(before) == np.shape(after) and jnp.issubdtype(jnp.result_type(before), jnp.number)
        change = _change(*map(to_device, (before, after)), selection, update) if can_differ else None
        raw.append((change, _digest_on_device(after, selection)))
    pairs = zip(leaves, jax.device_get(raw), strict=True)
    return [(_described(*leaf[:2], change), np.asarray(digest).tobytes()) for leaf, (change, digest) in pairs]


def _digest_on_device(value: Any, selection: Selection) -> Any:
    value, selection = _bits.placed(_array(value), selection)
    key, axis = _bits.hashed("fz.audit_step"), _bits.block_axis(*jax.tree.leaves(value))
    return jnp.stack(_bits.digest(value, key, selection, axis=axis))


def digests_of(value: Any, selection: Selection) -> tuple[Any, Any]:
    nothing = np.zeros(_bits.LANES, np.uint32)
    if not selection.in_part:
        found = _digest_on_device(value, FROZEN)
        return (found, nothing) if selection is FROZEN else (nothing, found)
    frozen = _digest_on_device(value, selection)
    return frozen, _digest_on_device(value, FROZEN) - frozen


def _described(before: Any, after: Any, change: Any) -> Change:
    if change is None:
        return Change(", to another shape" if np.shape(before) != np.shape(after) else "")
    largest, ulps, rate, fits = map(float, change)
    far = ", to NaN" if np.isnan(largest) else f", by up to {largest:.3g}" * bool(largest)
    if not jnp.issubdtype(jnp.result_type(before), jnp.inexact):
        return Change(far)
    return Change(far, np.inf if np.isnan(ulps) else ulps, rate if abs(rate) < 1 and fits else 0.0)


def share(shift: Any, plain: Any, shifted: Any) -> float:
    """The share of a shift that remains after a step, if it is one for all elements; otherwise 0."""
    shift, plain, shifted = (np.asarray(to_device(x), np.float64) for x in (shift, plain, shifted))
    shares = (shifted - plain) / shift
    return float(shares.mean()) if np.ptp(shares) <= 1e-2 * abs(shares.mean()) else 0.0


def is_cast_of(copy: Any, value: Any) -> bool:
    """Whether an array has the values of another one, up to the rounding of a cast to the coarser of their types."""
    a, b = (jnp.asarray(to_device(x)) for x in (copy, value))
    coarser = min((a.dtype, b.dtype), key=lambda dtype: jnp.finfo(dtype).bits)
    return bool((a.astype(coarser) == b.astype(coarser)).all())


def _array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _as_reals(x: Any, dtype: Any) -> jax.Array:
    """An array of real numbers; the parts of a complex one lie along a new first axis."""
    x = jnp.asarray(x)
    return (jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x).astype(dtype)


@jax.jit
def _change(before: Any, after: Any, selection: Selection, update: Any = None) -> Any:
    """The largest change of frozen elements, absolute and in units of the last place; the rate, and whether it fits."""
    before, after = jnp.asarray(before), jnp.asarray(after)
    epsilon = float(jnp.finfo(before.dtype).eps) if jnp.issubdtype(before.dtype, jnp.inexact) else 1.0
    dtype = jnp.float64 if jnp.result_type(before) in (jnp.float64, jnp.complex128) else jnp.float32
    old = _as_reals(before, dtype)
    is_rounded, update = update is None, _as_reals(after, dtype) - old if update is None else _as_reals(update, dtype)
    chosen = selection.choose(jnp.ones(before.shape, bool), jnp.zeros(before.shape, bool))
    chosen = jnp.broadcast_to(chosen, old.shape)
    moved = jnp.where(chosen, update, 0)
    ulps = jnp.where(moved == 0, 0, jnp.abs(moved) / (epsilon * jnp.abs(old)))
    chosen = chosen & (old != 0)
    scale = jnp.maximum(jnp.max(jnp.abs(jnp.where(chosen, old, 0)), initial=0), jnp.finfo(dtype).tiny)
    a, b = jnp.where(chosen, old / scale, 0), jnp.where(chosen, moved / scale, 0)
    rate = jnp.sum(a * b) / jnp.maximum(jnp.sum(a * a), jnp.finfo(dtype).tiny)
    allowed = 2 * epsilon * jnp.abs(a) if is_rounded else 16 * epsilon * jnp.abs(b)
    fits = (jnp.abs(b - rate * a) <= allowed) & (rate * b * a >= 0)
    return jnp.max(jnp.abs(moved), initial=0), jnp.max(ulps, initial=0), rate, (fits | ~chosen).all()
