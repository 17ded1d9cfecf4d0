"""Values that were computed from arrays in a way that is not known here, and so have no derivative.

The gradient of some rows is that of the whole array, cut by whoever wants it. So, of an array of which only a part may
not be differentiated, the cotangent of that part exists, and fails in a program that computes it.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from optax_freeze._gradient.custom_derivative import bind_tangents
from optax_freeze._jax_internals import is_known_primitive
from optax_freeze._program.operations import ELEMENTWISE, computation, each_result, rule
from optax_freeze._program.regions import EVERYTHING, Region, Rows
from optax_freeze._program.trace import Equation, Program, is_inexact
from optax_freeze._spec.sharding import zeros


def without_gradient(
    outs: Sequence[Any], arrays: Sequence[Any], refuse: Sequence[Callable[[], NoReturn]], in_part: bool
) -> list[Any]:
    """``outs``, which were computed from ``arrays`` in a way that is not known here, and so has no derivative.

    For each array a function raises an error if it is differentiated. If the arrays are parts of others, which may be
    differentiated as a whole, only a program that computes their cotangents raises it. In ``jax.shard_map``, and where
    our own evaluation computes more than is wanted, these are NaN; so are tangents in forward mode, unless the given
    ones are zeros.
    """
    return _computed_p.bind(*outs, *arrays, count=len(outs), refuse=tuple(refuse), in_part=in_part, is_cut=False)


_computed_p = Primitive("without_derivative")
"""The first operands, ``count`` of them, which were computed from the others; ``is_cut`` in our own evaluation."""
_computed_p.multiple_results = True


@_computed_p.def_impl
def _first(*args: Any, count: int, **_: Any) -> list[Any]:
    return list(args[:count])


def _jvp_of_first(
    primals: Sequence[Any], tangents: Sequence[Any], *, count: int, refuse: Any, in_part: bool, is_cut: bool
) -> Any:
    found, perturbed = list(tangents[:count]), [type(x) is not ad.Zero for x in tangents[count:]]
    refused = list(compress(refuse, perturbed))
    if refused and not in_part:
        refused[0]()
    places = [i for i, out in enumerate(primals[:count]) if refused and is_inexact(out)]
    avals = [jax.typeof(primals[i]).to_tangent_aval() for i in places]
    given = list(compress(tangents[count:], perturbed))
    new = _unknown_tangents(given, avals, None if is_cut else refused) if places else []
    for i, tangent in zip(places, new, strict=True):
        found[i] = tangent if type(found[i]) is ad.Zero else found[i] + tangent
    return _computed_p.bind(*primals, count=count, refuse=refuse, in_part=in_part, is_cut=is_cut), found


def _unknown_tangents(tangents: Sequence[Any], out_avals: Sequence[Any], refuse: Sequence[Any] | None) -> list[Any]:
    """Without functions that ``refuse`` cotangents, these are NaN."""

    def of_tangents(_: Any, tangents: Sequence[Any]) -> list[Any]:
        are_zero = jnp.stack([jnp.all(x == 0) for x in tangents]).all()
        return [jnp.where(are_zero, zeros(aval), _unknown(aval)) for aval in out_avals]

    def of_cotangents(*_: Any) -> list[Any]:
        if refuse is None or jax.sharding.get_abstract_mesh().manual_axes:
            return list(map(_unknown, avals))
        return [_unknown_p.bind(aval=aval, refuse=each) for aval, each in zip(avals, refuse, strict=True)]

    avals = [jax.typeof(tangent) for tangent in tangents]
    return bind_tangents(of_tangents, of_cotangents, [], tangents, out_avals)


def _unknown(aval: Any, shape: Any = None) -> jax.Array:
    return zeros(aval, shape) + jnp.asarray(jnp.nan, aval.dtype)


_unknown_p = Primitive("unknown_cotangent")
"""A cotangent that is not known, without operands; ``refuse`` raises an error."""


@_unknown_p.def_impl
def _refuse(*, refuse: Callable[[], NoReturn], **_: Any) -> NoReturn:
    refuse()


@rule("unknown_cotangent", params="aval refuse")
@each_result
def _rule_for_unknown(eqn: Equation, place: int, region: Region) -> Any:
    """A cotangent that fails where it is compiled: what is computed of it here is cut away, or else not a number."""
    aval = eqn.avals_out[place]
    return [], lambda: _unknown(aval, region.shape(aval.shape))


@rule("without_derivative", params="count in_part is_cut refuse")
@each_result
def _rule_for_computed(eqn: Equation, place: int, region: Region) -> Any:
    """A value without a derivative: one that is computed of it here is cut away, too, or else not a number."""
    count = len(eqn.outputs)
    regions = [region if i == place else None if i < count else EVERYTHING for i in range(len(eqn.inputs))]

    def apply(*operands: Any) -> Any:
        [out] = eqn.bind(*(x for x in operands if x is not None), count=1, is_cut=True)
        return out

    return regions, apply


_EXACT = {*ELEMENTWISE.split(), "broadcast_in_dim", "concatenate", "pad", "transpose"} - {"select_n"}
"""Operations of which all results depend on all of the regions that they read."""


def refuse_unknown(program: Program, wanted: Iterable[tuple[Any, Region]]) -> None:
    """Raises the error of an unknown cotangent if one of these regions certainly depends on it."""
    if all(eqn.primitive.name != "unknown_cotangent" for eqn in program.eqns):
        return
    made_by, found = program.made_by, set()
    left: list[tuple[Any, Region | None]] = [*wanted]
    while left:
        value, region = key = left.pop()
        eqn = made_by.get(value) if isinstance(value, int) and key not in found else None
        if eqn is None or region is None:
            continue
        found.add(key)
        if eqn.primitive.name == "unknown_cotangent":
            eqn.primitive.impl(**eqn.params)
        if eqn.primitive.name not in _EXACT or not is_known_primitive(eqn.primitive):
            continue
        if isinstance(region, Rows):
            computed = computation(eqn, [region if number == value else None for number in eqn.outputs])
            left += zip(eqn.inputs, computed.regions, strict=True) if computed else ()
        elif region is EVERYTHING:
            left += [(operand, EVERYTHING) for operand in eqn.inputs]


_computed_p.def_abstract_eval(lambda *avals, count, **_: list(avals[:count]))
_unknown_p.def_abstract_eval(lambda *, aval, **_: aval)
ad.primitive_jvps[_computed_p] = _jvp_of_first
batching.primitive_batchers[_computed_p] = lambda args, dims, **params: (
    _computed_p.bind(*args, **params),
    dims[: params["count"]],
)
mlir.register_lowering(_computed_p, mlir.lower_fun(_first, multiple_results=True))
mlir.register_lowering(_unknown_p, mlir.lower_fun(_refuse, multiple_results=False))
