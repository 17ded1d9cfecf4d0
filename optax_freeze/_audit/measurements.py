"""Describes what one update, or one step, does to one leaf by a few numbers, computed on the device."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._spec.memory_kinds import to_device
from optax_freeze._spec.selection import FROZEN, Selection
from optax_freeze._verify import bits as _bits


class Measurements(NamedTuple):
    """The effect of an update on the frozen and on the trainable elements of a leaf."""

    moved: Any  # number of frozen elements with a nonzero update, or with -0.0 turned into +0.0
    largest: Any  # absolute update of a frozen element; NaN if one is NaN
    reacted: Any  # whether the update of a frozen element differs from the reference run
    rate: Any  # update / parameter, if it is the same for all frozen elements; otherwise 0
    changed: Any  # number of trainable elements whose update differs from the reference run
    difference: Any  # largest absolute difference of these updates
    stopped: Any  # whether every trainable element has an update of zero, unlike in the reference run
    live: Any  # whether a trainable element has a nonzero update
    nan: Any  # whether a trainable element has an update of NaN


@jax.jit
def measure(param: Any, update: Any, reference: Any, frozen: Any) -> Measurements:
    """Measures an update beside that of the reference run; ``frozen`` broadcasts against the leaf."""
    if not jnp.issubdtype(jnp.asarray(param).dtype, jnp.inexact):  # an update that rounds to zero moves no integer
        moved = optax.apply_updates(param, update) != param
        update = jnp.where(moved, jnp.asarray(update, jnp.float32), 0)
        param = reference = jnp.zeros_like(update)
    epsilon = float(jnp.finfo(param.dtype).eps)
    wide = any(x.dtype in (jnp.float64, jnp.complex128) for x in map(jnp.asarray, (param, update, reference)))
    p, u, r = (_as_reals(x, jnp.float64 if wide else jnp.float32) for x in (param, update, reference))
    equal = (u == r) | (jnp.isnan(u) & jnp.isnan(r))
    same_sign = jnp.isnan(u) | (jnp.signbit(u) == jnp.signbit(r))
    loses_sign = (p == 0) & jnp.signbit(p) & (u == 0) & ~jnp.signbit(u)
    return Measurements(
        moved=_count(frozen & ((u != 0) | loses_sign), param),
        largest=jnp.max(jnp.abs(jnp.where(frozen, u, 0)), initial=0),
        reacted=(frozen & (~equal | (loses_sign & ~same_sign))).any(),
        rate=_rate(u, p, frozen & jnp.isfinite(p), 16 * epsilon),
        changed=_count(~frozen & ~(equal & same_sign), param),
        difference=jnp.max(jnp.abs(jnp.where(frozen | equal, 0, u - r)), initial=0),
        stopped=(frozen | (u == 0)).all() & (~frozen & (r != 0)).any(),
        live=(~frozen & (u != 0)).any(),
        nan=(~frozen & jnp.isnan(u)).any(),
    )


def _as_reals(x: Any, dtype: Any) -> jax.Array:
    """An array of real numbers; the parts of a complex one lie along a new first axis."""
    x = jnp.asarray(x)
    return (jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x).astype(dtype)


def _count(hit: jax.Array, param: Any) -> jax.Array:
    return (hit.any(0) if jnp.iscomplexobj(param) else hit).sum()


def _rate(update: jax.Array, param: jax.Array, where: jax.Array, tolerance: float) -> jax.Array:
    ratio = jnp.where(where & (param != 0), update / jnp.where(param == 0, 1, param), jnp.nan)
    low, high = jnp.nanmin(ratio, initial=jnp.inf), jnp.nanmax(ratio, initial=-jnp.inf)
    agree = jnp.isfinite(low) & (high - low <= tolerance * jnp.maximum(jnp.abs(low), jnp.abs(high)))
    not_proportional = where & (jnp.isnan(update) | ((param == 0) & (update != 0)))
    return jnp.where(agree & ~not_proportional.any(), low, 0)


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


def digest_of(value: Any, selection: Selection = FROZEN) -> bytes:
    """A digest of the frozen bits of a leaf."""
    value, selection = _bits.placed(_array(value), selection)
    key, axis = _bits.hashed("fz.audit_step"), _bits.block_axis(*jax.tree.leaves(value))
    return np.asarray(jax.device_get(_bits.digest(value, key, selection, axis=axis))).tobytes()


def how_far(before: Any, after: Any, selection: Selection = FROZEN) -> str:
    """The largest change of a frozen element, for a message."""
    if np.shape(before) != np.shape(after):
        return ", to another shape"
    if not jnp.issubdtype(jnp.result_type(before), jnp.number):
        return ""
    largest = float(_change(*map(to_device, (before, after)), selection)[0])
    return ", to NaN" if np.isnan(largest) else f", by up to {largest:.3g}" * bool(largest)


def in_ulps(before: Any, after: Any, selection: Selection = FROZEN) -> float:
    """The largest change of a frozen element relative to it, in the precision of its dtype."""
    if np.shape(before) != np.shape(after) or not jnp.issubdtype(jnp.result_type(before), jnp.inexact):
        return np.inf
    largest = float(_change(*map(to_device, (before, after)), selection)[1])
    return np.inf if np.isnan(largest) else largest


def decay_rate(before: Any, after: Any, selection: Selection = FROZEN) -> float:
    """The rate at which a leaf moves in proportion to itself, up to rounding; 0 if it does not."""
    if np.shape(before) != np.shape(after) or not jnp.issubdtype(jnp.result_type(before), jnp.inexact):
        return 0.0
    rate, fits = jax.device_get(_change(*map(to_device, (before, after)), selection)[2:])
    return float(rate) if abs(rate) < 1 and bool(fits) else 0.0


def share(shift: Any, plain: Any, shifted: Any) -> float:
    """The share of a shift that remains after a step, if it is one for all elements; otherwise 0."""
    shift, plain, shifted = (np.asarray(to_device(x), np.float64) for x in (shift, plain, shifted))
    shares = (shifted - plain) / shift
    return float(shares.mean()) if np.ptp(shares) <= 1e-2 * abs(shares.mean()) else 0.0


def _array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


@jax.jit
def _change(before: Any, after: Any, selection: Selection) -> Any:
    """The largest change of frozen elements, absolute and in units of the last place; the rate, and whether it fits."""
    before, after = jnp.asarray(before), jnp.asarray(after)
    epsilon = float(jnp.finfo(before.dtype).eps) if jnp.issubdtype(before.dtype, jnp.inexact) else 1.0
    dtype = jnp.float64 if jnp.result_type(before) in (jnp.float64, jnp.complex128) else jnp.float32
    old, new = (_as_reals(x, dtype) for x in (before, after))
    chosen = selection.choose(jnp.ones(before.shape, bool), jnp.zeros(before.shape, bool))
    chosen = jnp.broadcast_to(chosen, old.shape)
    moved = jnp.where(chosen, new - old, 0)
    ulps = jnp.where(moved == 0, 0, jnp.abs(moved) / (epsilon * jnp.abs(old)))
    chosen = chosen & (old != 0)
    scale = jnp.maximum(jnp.max(jnp.abs(jnp.where(chosen, old, 0)), initial=0), jnp.finfo(dtype).tiny)
    a, b = jnp.where(chosen, old / scale, 0), jnp.where(chosen, moved / scale, 0)
    rate = jnp.sum(a * b) / jnp.maximum(jnp.sum(a * a), jnp.finfo(dtype).tiny)
    fits = (jnp.abs(b - rate * a) <= 2 * epsilon * jnp.abs(a)) & (rate * b * a >= 0)
    return jnp.max(jnp.abs(moved), initial=0), jnp.max(ulps, initial=0), rate, (fits | ~chosen).all()
