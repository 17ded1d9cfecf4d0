"""What one update does at one leaf, in a few numbers.

They are reduced on the device, so that no run of ``runs.py`` has to keep its updates, and compiled once
for each shape: like layers share a program.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class Facts(NamedTuple):
    """What an update does at one leaf; ratios as the least and the greatest over its elements."""

    moved: Any  # frozen elements whose update is no zero, or takes the sign from their -0.0
    signs: Any  # of these, the lost signs
    largest: Any  # of the updates of frozen elements; NaN if one is NaN
    total: Any  # of the updates of frozen elements
    to_params: Any  # ratio of the update to the parameter, at frozen elements
    to_grads: Any  # ratio of the update to the gradient, at frozen elements
    clamped: Any  # negative frozen elements become zero, and no other moves
    rounding: Any  # no frozen element moves by more than rounding
    changed: Any  # elements that train and whose update differs from that of the reference run
    spoiled: Any  # of these, those that are no longer finite
    stopped: Any  # no element that trains has an update, and in the reference run some have
    to_reference: Any  # ratio of the update to that of the reference run, at elements that train
    live: Any  # some element that trains has an update
    nan: Any  # some element that trains has one that is NaN


@functools.partial(jax.jit, static_argnames="whole")
def facts_of(param: Any, update: Any, grad: Any, wanted: Any, frozen: Any, whole: bool | None = None) -> Facts:
    """The facts of an update.

    ``wanted`` is that of the reference run, ``frozen`` broadcasts against the leaf. If all of the leaf is frozen, or
    all of it trains, ``whole`` says so: half of the facts then need no program.
    """
    f = frozen if whole is None else np.bool_(whole)
    if not jnp.issubdtype(jnp.asarray(param).dtype, jnp.inexact):  # an addition that rounds to nothing moves nothing
        moved = optax.apply_updates(param, update) != param
        update = jnp.where(moved, jnp.asarray(update, jnp.float32), 0)
        param, grad, wanted = (jnp.zeros_like(update, jnp.float32) for _ in range(3))
    epsilon = float(jnp.finfo(param.dtype).eps)
    wide = any(x.dtype in (jnp.float64, jnp.complex128) for x in map(jnp.asarray, (param, update, grad, wanted)))
    p, u, g, w = (_reals(x, jnp.float64 if wide else jnp.float32) for x in (param, update, grad, wanted))
    signs = f & (p == 0) & (u == 0) & jnp.signbit(p) & ~jnp.signbit(u)
    moved = f & ((u != 0) | signs)
    differs = ~f & ~((u == w) & (jnp.signbit(u) == jnp.signbit(w)) | (jnp.isnan(u) & jnp.isnan(w)))
    clamped = moved.any() & (moved == (f & (p < 0))).all() & (~moved | (p + u == 0)).all()
    return Facts(
        moved=_elements(moved, param),
        signs=_elements(signs, param),
        largest=jnp.max(jnp.abs(jnp.where(f, u, 0)), initial=0),
        total=jnp.where(f, u, 0).sum(),
        to_params=_ratio(u, p, f),
        to_grads=_ratio(u, g, f),
        clamped=clamped,
        rounding=(~f | (jnp.abs(u) <= 4 * epsilon * jnp.abs(p))).all(),
        changed=_elements(differs, param),
        spoiled=_elements(differs & ~jnp.isfinite(u) & jnp.isfinite(w), param),
        stopped=(f | (u == 0)).all() & (~f & (w != 0)).any(),
        to_reference=_ratio(u, w, ~f),
        live=(~f & (u != 0)).any(),
        nan=(~f & jnp.isnan(u)).any(),
    )


def _reals(x: Any, dtype: Any) -> jax.Array:
    """A number as reals wide enough to divide, the two of a complex one along a new axis."""
    x = jnp.asarray(x)
    return (jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x).astype(dtype)


def _elements(hit: jax.Array, param: Any) -> jax.Array:
    return (hit.any(0) if jnp.iscomplexobj(param) else hit).sum()


def _ratio(a: jax.Array, b: jax.Array, where: Any) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest ``a / b``; none that agree if ``a`` is anything where ``b`` is zero."""
    on = where & jnp.isfinite(b)
    ratio = jnp.where(on & (b != 0), a / jnp.where(b == 0, 1, b), jnp.nan)
    stray = (on & (b == 0) & (a != 0)).any() | jnp.isnan(jnp.where(on, a, 0)).any()
    low, high = jnp.nanmin(ratio, initial=jnp.inf), jnp.nanmax(ratio, initial=-jnp.inf)
    return jnp.where(stray, -jnp.inf, low), jnp.where(stray, jnp.inf, high)
