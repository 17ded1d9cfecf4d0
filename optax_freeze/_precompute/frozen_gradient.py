"""Refuses gradients of the frozen parameters that features were computed from: they would lack the path through them.

A gradient of a frozen leaf is an error. Of a leaf frozen by rows, the gradient of the trainable rows is that of the
whole leaf, cut by whoever wants it: so there the gradient of the frozen rows exists, and is NaN.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_freeze._errors import value_error
from optax_freeze._gradient.custom_derivative import bind_tangents
from optax_freeze._jax_internals import SymbolicZero
from optax_freeze._program.trace import is_inexact
from optax_freeze._spec.memory_kinds import to_device
from optax_freeze._spec.sharding import explicit_sharding, filled, in_mesh_of, in_this_mesh, with_sharding, zeros


def without_gradient(features: Sequence[Any], frozen: Mapping[str, Any]) -> list[Any]:
    """Features that were computed from frozen leaves, by their paths."""

    def refuse(tangents: Mapping[str, Any], _: Sequence[Any]) -> list[Any]:
        raise value_error(
            "the features were computed with a different spec",
            at=next(iter(tangents)),
            got="a gradient with respect to a leaf that is frozen in fz.precompute",
            expected="gradients of the parameters that are trainable in fz.precompute",
            fix="pass the same `frozen` to fz.precompute and to fz.grad, fz.value_and_grad or fz.freeze",
        )

    return _with_tangents(lambda features, _: features, features, frozen, refuse)


def with_unknown_gradient(features: Sequence[Any], rows: Mapping[str, Any]) -> list[Any]:
    """Features that were computed from frozen rows of leaves, by the paths of these."""

    def unknown(tangents: Mapping[str, Any], out_avals: Sequence[Any]) -> list[Any]:
        """NaN, unless the tangents are zeros: forward mode has no other way to leave out rows."""
        given = [*tangents.values()]
        avals = [jax.typeof(tangent) for tangent in given]
        nan = lambda aval: filled(aval, jnp.nan)  # noqa: E731

        def of_tangents(_: Any, tangents: Sequence[Any]) -> list[Any]:
            are_zero = jnp.stack([jnp.all(x == 0) for x in tangents]).all()
            return [_where(are_zero, zeros(aval), nan(aval)) for aval in out_avals]

        return bind_tangents(of_tangents, lambda *_: list(map(nan, avals)), [], given, out_avals)

    def mapped_alike(features: list[Any], rows: dict[str, Any]) -> list[Any]:
        """`jax.vmap` asks here, and not the derivative, whether the results are mapped: they are if the rows are."""
        one = lambda x: to_device(x.reshape(-1)[:1]).real.sum()  # noqa: E731
        some = functools.reduce(jnp.add, (with_sharding(explicit_sharding(x, ()), one, x) for x in rows.values()))
        return [_where(True, x, some.astype(x.dtype)) if is_inexact(x) else x for x in features]

    return _with_tangents(mapped_alike, features, rows, unknown)


def _where(condition: Any, array: Any, other: Any) -> jax.Array:
    """``jnp.where`` in the mesh of an array."""
    with in_mesh_of(array):
        return jnp.where(*map(in_this_mesh, (jnp.asarray(condition), array, other)))


def _with_tangents(
    fun: Callable[[list[Any], dict[str, Any]], list[Any]],
    features: Sequence[Any],
    frozen: Mapping[str, Any],
    tangents_of: Callable[[Mapping[str, Any], Sequence[Any]], list[Any]],
) -> list[Any]:
    """``fun(features, frozen)``, which are the features, with further tangents where some of ``frozen`` have them."""

    def jvp(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        given = {path: t for path, t in tangents[1].items() if not isinstance(t, SymbolicZero)}
        outs, found = call(*primals), list(tangents[0])  # again with these tangents, for a second derivative
        places = [i for i, out in enumerate(outs) if given and is_inexact(out)]
        new = tangents_of(given, [jax.typeof(outs[i]).to_tangent_aval() for i in places]) if places else []
        for i, tangent in zip(places, new, strict=True):
            found[i] = tangent if isinstance(found[i], SymbolicZero) else found[i] + tangent
        return outs, found

    call = jax.custom_jvp(fun)
    call.defjvp(jvp, symbolic_zeros=True)
    return call(list(features), dict(frozen)) if features and frozen else list(features)
