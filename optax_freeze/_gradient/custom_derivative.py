"""Calls a function with a backward pass of its own: :func:`call_with_backward`.

``jax.custom_vjp`` refuses forward mode. Here, the map from tangents of the inputs to tangents of the outputs is a
primitive that is linear in the tangents: evaluated, it is ``jax.jvp`` of the function; transposed, the backward pass.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from optax_freeze._program.trace import is_inexact
from optax_freeze._program.traced_function import as_array, filled
from optax_freeze._spec.sharding import zeros
from optax_freeze._spec.tree import PyTree


class NoReverseModeError(Exception):
    """The function cannot be differentiated in reverse mode: JAX says why, if it is asked to."""


def call_with_backward(
    fun: Callable[[PyTree], list[Any]],
    forward: Callable[[PyTree, PyTree], tuple[list[Any], PyTree]],
    backward: Callable[[PyTree, PyTree, list[Any]], PyTree],
    inputs: PyTree,
) -> list[Any]:
    """``fun(inputs)``, with ``backward`` as its reverse mode.

    Args:
      fun: a function of one pytree of arrays, which returns a list of arrays.
      forward: called as ``forward(inputs, perturbed)``, with a bool for each input; returns the outputs and the
        residuals of the backward pass.
      backward: called as ``backward(inputs, residuals, cotangents)``, with the cotangents of the differentiable
        outputs; returns the cotangents of the perturbed inputs, in a pytree with None for the others.
      inputs: the arrays; the functions may not close over tracers.
    """

    def jvp(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        arrays, treedef = jax.tree.flatten(jax.tree.map(as_array, primals[0]))  # of jax.jvp, they may be Python numbers
        tangents = treedef.flatten_up_to(tangents[0])
        perturbed = [not isinstance(t, SymbolicZero) and is_inexact(x) for x, t in zip(arrays, tangents, strict=True)]

        def value_and_tangents(arrays: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            of_perturbed = lambda *some: fun(treedef.unflatten(filled(arrays, perturbed, some)))  # noqa: E731
            return jax.jvp(of_perturbed, tuple(compress(arrays, perturbed)), tuple(tangents))

        try:
            outs, residuals = forward(treedef.unflatten(arrays), treedef.unflatten(perturbed))
        except NoReverseModeError:
            return value_and_tangents(arrays, list(compress(tangents, perturbed)))
        known, residuals_treedef = jax.tree.flatten((treedef.unflatten(arrays), residuals))
        is_out = [is_inexact(out) for out in outs]

        def of_tangents(known: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
            return list(compress(value_and_tangents(known[: len(perturbed)], tangents)[1], is_out))

        def of_cotangents(known: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            inputs, residuals = jax.tree.unflatten(residuals_treedef, known)
            return jax.tree.leaves(backward(inputs, residuals, list(cotangents)))

        found = iter(
            bind_tangents(
                of_tangents,
                of_cotangents,
                known,
                list(compress(tangents, perturbed)),
                [jax.typeof(out).to_tangent_aval() for out in compress(outs, is_out)],
            )
        )
        return outs, [
            next(found) if here else zero_from_primal(x, symbolic_zeros=True)
            for x, here in zip(outs, is_out, strict=True)
        ]

    call = jax.custom_jvp(fun)
    call.defjvp(jvp, symbolic_zeros=True)
    return call(inputs)


_tangents_p = Primitive("tangents")
"""The tangents of the outputs, given known values and the tangents of the perturbed inputs."""
_tangents_p.multiple_results = True

Linear = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def bind_tangents(
    of_tangents: Linear, of_cotangents: Linear, known: Sequence[Any], tangents: Sequence[Any], out_avals: Sequence[Any]
) -> list[Any]:
    """Tangents of types ``out_avals``: ``of_tangents(known, tangents)``, linear in the tangents.

    Transposed, ``of_cotangents(known, cotangents)``.
    """
    return _tangents_p.bind(
        *known,
        *tangents,
        of_tangents=of_tangents,
        of_cotangents=of_cotangents,
        num_known=len(known),
        out_avals=tuple(out_avals),
    )


@_tangents_p.def_impl
def _evaluate(*args: Any, of_tangents: Linear, num_known: int, **_: Any) -> list[Any]:
    return of_tangents(args[:num_known], args[num_known:])


@_tangents_p.def_abstract_eval
def _types(*_: Any, out_avals: Sequence[Any], **__: Any) -> list[Any]:
    return list(out_avals)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, num_known: int, **params: Any) -> Any:
    """Linear in the tangents; with respect to the known values, differentiated by JAX."""

    def bind(known: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        return _tangents_p.bind(*known, *tangents, num_known=num_known, **params)

    known, linear = primals[:num_known], primals[num_known:]
    outs = bind(known, linear)
    found = [None] * len(outs)
    if any(type(t) is not ad.Zero for t in tangents[num_known:]):
        found = bind(known, [ad.instantiate_zeros(t) for t in tangents[num_known:]])
    is_perturbed = [type(t) is not ad.Zero for t in tangents[:num_known]]
    if any(is_perturbed):
        of_perturbed = lambda *some: params["of_tangents"](filled(known, is_perturbed, some), linear)  # noqa: E731
        some = tuple(compress(known, is_perturbed)), tuple(compress(tangents, is_perturbed))
        of_known = jax.jvp(of_perturbed, *some)[1]
        found = [b if a is None else a + b for a, b in zip(found, of_known, strict=True)]
    return outs, found


def _transpose(cotangents: Sequence[Any], *args: Any, of_cotangents: Linear, num_known: int, **_: Any) -> list[Any]:
    given = [zeros(ct.aval) if type(ct) is ad.Zero else ct for ct in cotangents]
    found = of_cotangents(args[:num_known], given)
    wanted = zip(found, args[num_known:], strict=True)
    return [None] * num_known + [ct if ad.is_undefined_primal(x) else None for ct, x in wanted]


def _batch(
    axis: Any,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    of_tangents: Linear,
    of_cotangents: Linear,
    num_known: int,
    out_avals: Sequence[Any],
) -> Any:
    """All results have the axis in front; cotangents of tangents without it are sums over it."""
    if all(dim is None for dim in dims):
        outs = bind_tangents(of_tangents, of_cotangents, args[:num_known], args[num_known:], out_avals)
        return outs, [None] * len(outs)
    known, linear = list(dims[:num_known]), list(dims[num_known:])

    def batched(fun: Linear, *in_axes: Any, out_axes: Any = 0) -> Any:
        return jax.vmap(fun, in_axes, out_axes, axis.name, axis.size, axis.spmd_name)

    def of_batched_cotangents(args: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        found = batched(of_cotangents, known, 0, out_axes=[dim or 0 for dim in linear])(list(args), list(cotangents))
        return [jnp.sum(x, 0) if dim is None else x for x, dim in zip(found, linear, strict=True)]

    types = batched(lambda *_: list(map(zeros, out_avals)), known, linear)
    given = list(args[:num_known]), list(args[num_known:])
    outs = bind_tangents(
        lambda args, tangents: batched(of_tangents, known, linear)(list(args), list(tangents)),
        of_batched_cotangents,
        *given,
        jax.make_jaxpr(types)(*given).out_avals,
    )
    return outs, [0] * len(outs)


ad.primitive_jvps[_tangents_p] = _jvp
ad.primitive_transposes[_tangents_p] = _transpose
batching.fancy_primitive_batchers[_tangents_p] = _batch
mlir.register_lowering(_tangents_p, mlir.lower_fun(_evaluate, multiple_results=True))
