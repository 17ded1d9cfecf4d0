"""The table of operations: which regions of its operands an operation needs for the wanted region of its result.

A rule ``rule(eqn, regions)`` is given the wanted region of each result, None where it is not wanted, and returns how
these are computed from regions of the operands, or None if the operation has to compute everything.
"""

import enum
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from optax_freeze._jax_internals import is_known_primitive
from optax_freeze._program.regions import EVERYTHING, Region, Rows, clipped, is_whole
from optax_freeze._program.symbolic import if_undecided
from optax_freeze._program.trace import Equation, is_inexact, is_reference
from optax_freeze._spec.indexing import of_each_row
from optax_freeze._spec.sharding import cast_to_vary, fitting, sharding_in, varies, with_sharding

COPIES = "convert_element_type copy name stop_gradient"
"""The elementwise operations without arithmetic: they cost nothing beside reading their operand."""

ELEMENTWISE = f"""
{COPIES} abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
conj cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
is_finite le lgamma log log1p log2 logistic lt max min mul mulhi ne neg nextafter not one_minus_square or polygamma
polynomial population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta
"""
"""All elementwise operations."""

_DECIDING = """
acos acosh asin atan2 atanh ceil eq erf_inv floor ge gt is_finite le log log1p lt ne nextafter pow
reduce_precision rem round rsqrt sign sqrt
""".split()  # noqa: SIM905
"""Those that are not continuous, or not defined for all numbers: one bit of an operand may change all of the result."""


class Cost(enum.Enum):
    """What an operation costs. This decides where it is repeated, and what is stored."""

    COPY = enum.auto()  # elementwise, without arithmetic
    MOVE = enum.auto()  # moves numbers, which a compiler does where they are read
    LOOKUP = enum.auto()  # moves rows whose numbers are values of the program
    ELEMENTWISE = enum.auto()
    REDUCTION = enum.auto()
    PRODUCT = enum.auto()  # a compiler fuses elementwise operations after it
    BARRIER = enum.auto()  # costs nothing, but nothing is moved across it
    OTHER = enum.auto()


_CHEAP = {Cost.COPY, Cost.MOVE, Cost.LOOKUP, Cost.ELEMENTWISE}


class Computation(NamedTuple):
    """How an operation computes regions of its results."""

    regions: Sequence[Region | None]  # of each operand; None where it is not needed
    apply: Callable[..., Sequence[Any]]  # of these regions of the operands: the regions of the results
    outputs: Sequence[Region | None] | None = None  # if it computes other regions of its results than the wanted ones


class Rule(NamedTuple):
    """A rule in the table."""

    of: Callable[[Equation, Sequence[Region | None]], Computation | None]
    cost: Cost
    params: frozenset[str]  # all that it knows
    decides: bool = False  # whether one bit of an operand may change all of the result


RULES: dict[str, Rule] = {}
"""The rules by the names of their primitives."""


def rule(*names: str, cost: Cost = Cost.MOVE, params: str = "", decides: bool = False) -> Callable[[Any], Any]:
    """Returns a decorator that registers a function as the rule for the primitives with these names.

    An operation with other ``params`` than these has no rule: what a new one means is not known.
    """

    def register(function: Any) -> Any:
        RULES.update(dict.fromkeys(names, Rule(function, cost, frozenset(params.split()), decides)))
        return function

    return register


def one_result(of: Callable[..., Any], *, is_placed: bool = False) -> Any:
    """The rule of an operation with one result: ``of(eqn, region)`` returns the regions, and a function of them.

    ``is_placed``: the function lays out its result itself, or JAX does.
    """

    @functools.wraps(of)
    def of_regions(eqn: Equation, regions: Sequence[Region | None]) -> Computation | None:
        region = regions[0]
        if region in (None, EVERYTHING) or (given := of(eqn, region)) is None:
            return None
        apply = given[1] if is_placed or not _is_divided(eqn) else functools.partial(_placed, given[1], eqn, region)
        return Computation(given[0], functools.partial(_listed, apply))

    return of_regions


def _is_divided(eqn: Equation) -> bool:
    """Whether a mesh divides an operand or a result by an explicit axis: JAX may refuse the operation for rows."""
    return any(
        sharding is not None and any(sharding.spec) for sharding in map(sharding_in, (*eqn.avals_in, *eqn.avals_out))
    )


def _placed(apply: Callable[..., Any], eqn: Equation, region: Region, *operands: Any) -> Any:
    """``apply(*operands)`` on a mesh: partitioned by XLA, and laid out as a part of the result."""
    places = [i for i, x in enumerate(operands) if isinstance(x, jax.Array)]

    def of_arrays(*arrays: Any) -> Any:
        given = dict(zip(places, arrays, strict=True))
        return apply(*(given.get(i, x) for i, x in enumerate(operands)))

    aval = eqn.avals_out[0]
    return with_sharding(sharding_in(aval, region.shape(aval.shape)), of_arrays, *(operands[i] for i in places))


def each_result(of: Callable[..., Any]) -> Any:
    """The same of an operation whose results are computed one by one: ``of(eqn, place, region)``."""

    @functools.wraps(of)
    def of_regions(eqn: Equation, regions: Sequence[Region | None]) -> Computation | None:
        [(place, region), *others] = [(i, region) for i, region in enumerate(regions) if region is not None]
        found, apply = of(eqn, place, region)
        return None if others else Computation(found, lambda *operands: [apply(*operands)] * len(regions))

    return of_regions


def _listed(apply: Callable[..., Any], *operands: Any) -> list[Any]:
    return [apply(*operands)]


def rule_of(eqn: Any) -> Rule:
    """The rule for an operation; without one, everything has to be computed.

    There is none for a primitive of another library that has the name of one of JAX, nor for unknown params.
    """
    found = RULES.get(eqn.primitive.name, _NO_RULE)
    is_known = found.params.issuperset(eqn.params) and is_known_primitive(eqn.primitive)
    return found if is_known else _NO_RULE


_NO_RULE = Rule(lambda *_: None, Cost.OTHER, frozenset(), decides=True)


@if_undecided(None)
def computation(eqn: Equation, regions: Sequence[Region | None]) -> Computation | None:
    """How an operation computes these regions of its results; None if only everything can be computed."""
    return rule_of(eqn).of(eqn, regions)


def from_rows(eqn: Equation, place: int, cut: Sequence[bool]) -> Computation | None:
    """How all of a result is computed from some rows of one of the marked operands; None if it is not."""
    for axis, size in enumerate(eqn.avals_out[place].shape):
        rows = Rows(axis, np.arange(size))
        found = computation(eqn, [rows if i == place else None for i in range(len(eqn.outputs))])
        reads = zip(found.regions, eqn.avals_in, cut, strict=True) if found else ()
        if found and any(here and r is not None and not is_whole(r, aval.shape) for r, aval, here in reads):
            return found._replace(outputs=None)
    return None


def is_cheap(eqn: Any) -> bool:
    """Whether an operation may be repeated for each wanted region of its result."""
    return rule_of(eqn).cost in _CHEAP


def decides(eqn: Equation) -> bool:
    """Whether one bit of a float operand may change all of a result. Casts to floats of many bits only round."""
    if eqn.primitive.name == "convert_element_type":
        new = eqn.avals_out[0]
        if is_inexact(new) and jnp.finfo(new.dtype).eps <= jnp.finfo(jnp.bfloat16).eps:
            return False
    return rule_of(eqn).decides and any(hasattr(aval, "dtype") and is_inexact(aval) for aval in eqn.avals_in)


def is_move(eqn: Equation) -> bool:
    """Whether an operation moves numbers without arithmetic, so that they are the same bits wherever it is repeated."""
    if eqn.primitive.name == "convert_element_type":
        floats = [jnp.finfo(aval.dtype).bits for aval in (*eqn.avals_in, *eqn.avals_out) if is_inexact(aval)]
        return len(floats) == 2 and floats[0] <= floats[1]
    return rule_of(eqn).cost in _CHEAP - {Cost.ELEMENTWISE}


def _at(sizes: Sequence[Any], axis: int, size: Any) -> tuple[Any, ...]:
    """A shape with another size at one axis."""
    return (*sizes[:axis], size, *sizes[axis + 1 :])


def _laid_out(eqn: Equation, region: Region) -> dict[str, Any]:
    """The params that name the sharding of the whole result, for a region of it."""
    names = [name for name in ("sharding", "out_sharding") if eqn.params.get(name) is not None]
    return dict.fromkeys(names, _layout(eqn, region))


def _layout(eqn: Equation, region: Region) -> NamedSharding | None:
    """The explicit sharding of a region of the result; None where :func:`_placed` lays it out."""
    aval = eqn.avals_out[0]
    return None if _is_divided(eqn) else sharding_in(aval, region.shape(aval.shape))


_OF_ELEMENTWISE = """
accuracy exponent_bits input_dtype mantissa_bits name new_dtype out_dtype rounding_method sharding weak_type y
"""


@rule("convert_element_type", cost=Cost.COPY, params=_OF_ELEMENTWISE, decides=True)
@rule(*COPIES.split(), cost=Cost.COPY, params=_OF_ELEMENTWISE)
@rule(*_DECIDING, cost=Cost.ELEMENTWISE, params=_OF_ELEMENTWISE, decides=True)
@rule(*ELEMENTWISE.split(), cost=Cost.ELEMENTWISE, params=_OF_ELEMENTWISE)
@functools.partial(one_result, is_placed=True)
def elementwise(eqn: Equation, region: Region) -> Any:
    size, changed = eqn.avals_out[0].shape[region.axis], dict.fromkeys(_laid_out(eqn, region))
    regions = [region if aval.shape and aval.shape[region.axis] == size else EVERYTHING for aval in eqn.avals_in]
    return regions, functools.partial(eqn.bind, **changed)


@rule("pvary", params="axes axis_index_groups")
@rule("optimization_barrier", cost=Cost.BARRIER)
@rule("psum", "psum_invariant", "pmax", "pmin", cost=Cost.OTHER, params="axes axis_index_groups")
def each_alone(eqn: Equation, regions: Sequence[Region | None]) -> Computation | None:
    """Each result has the rows of one operand. A reference, which is not a result of a barrier, need not pass it."""
    if eqn.params.get("axis_index_groups") is not None or any(
        not isinstance(a, str) for a in eqn.params.get("axes", ())
    ):
        return None
    results = iter(regions)
    needed = [None if is_reference(aval) else next(results) for aval in eqn.avals_in]

    def apply(*operands: Any) -> list[Any]:
        given = [x for x, region in zip(operands, needed, strict=True) if region is not None]
        outs = iter(eqn.bind_all(*given))
        return [None if region is None else next(outs) for region in regions]

    return Computation(needed, apply)


@rule("sharding_constraint", params="context_mesh layout sharding unconstrained_dims")
@rule("reshard", params="concrete_mesh dst_sharding")
@functools.partial(one_result, is_placed=True)
def sharded(eqn: Equation, region: Region) -> Any:
    [(name, sharding)] = [(name, x) for name, x in eqn.params.items() if name in ("sharding", "dst_sharding")]
    if not isinstance(sharding, NamedSharding) or eqn.params.get("layout") is not None:
        return None
    shape = region.shape(eqn.avals_out[0].shape)
    return [region], functools.partial(eqn.bind, **{name: fitting(sharding, len(shape), shape)})


_OF_SHARDS = "all_gather_dimension axis_index_groups axis_name axis_size scatter_dimension tiled"


@rule(
    *("all_gather", "all_gather_invariant", "reduce_scatter", "unreduced_reduce_scatter"),
    cost=Cost.OTHER,
    params=_OF_SHARDS,
)
@one_result
def shards(eqn: Equation, region: Region) -> Any:
    """Shards inside ``jax.shard_map`` are gathered or scattered along another axis than that of the rows."""
    gathers = "all_gather_dimension" in eqn.params
    along = eqn.params["all_gather_dimension" if gathers else "scatter_dimension"]
    if not eqn.params["tiled"] and not gathers:  # drops the axis
        return [region.along(region.axis + (region.axis >= along))], eqn.bind
    axis = region.axis - (not eqn.params["tiled"] and region.axis > along)  # or adds it
    return ([region.along(axis)], eqn.bind) if region.axis != along else None


@rule("broadcast_in_dim", params="broadcast_dimensions shape sharding")
@one_result
def broadcast_in_dim(eqn: Equation, region: Any) -> Any:
    axes, shape, aval = eqn.params["broadcast_dimensions"], eqn.params["shape"], eqn.avals_in[0]
    of_operand: Region = EVERYTHING
    if region.axis in axes and aval.shape[axes.index(region.axis)] == shape[region.axis]:
        of_operand = region.along(axes.index(region.axis))
    return [of_operand], functools.partial(eqn.bind, shape=region.shape(shape), **_laid_out(eqn, region))


@rule("transpose", params="permutation")
@one_result
def transpose(eqn: Equation, region: Any) -> Any:
    return [region.along(eqn.params["permutation"][region.axis])], eqn.bind


_REDUCTIONS = [f"reduce_{kind}" for kind in ["and", "max", "min", "or", "prod", "sum", "xor"]]


@rule("squeeze", params="dimensions")
@rule("argmax", "argmin", cost=Cost.REDUCTION, params="axes index_dtype", decides=True)
@rule(*_REDUCTIONS, cost=Cost.REDUCTION, params="axes out_sharding")
@one_result
def without_axes(eqn: Equation, region: Region) -> Any:
    dropped = eqn.params["dimensions" if "dimensions" in eqn.params else "axes"]
    kept = [axis for axis in range(len(eqn.avals_in[0].shape)) if axis not in dropped]
    return [region.along(kept[region.axis])], functools.partial(eqn.bind, **_laid_out(eqn, region))


@rule("reshape", params="dimensions new_sizes sharding")
@one_result
def reshape(eqn: Equation, region: Any) -> Any:
    old, new = eqn.avals_in[0].shape, eqn.params["new_sizes"]
    if eqn.params["dimensions"] is not None or 0 in new:
        return None
    size, before = new[region.axis], math.prod(new[: region.axis])
    inner = math.prod(new[region.axis + 1 :])

    def reshaped(x: Any, region: Region = region) -> Any:
        return eqn.bind(x, new_sizes=region.shape(new), **_laid_out(eqn, region))

    for axis, length in enumerate(old):
        if math.prod(old[:axis]) != before:
            continue
        old_inner = math.prod(old[axis + 1 :])
        if old_inner == inner and length == size:
            return [region.along(axis)], reshaped
        if length <= 1 or length * old_inner != size * inner:
            continue
        if length % size == 0:  # a row is some of its rows
            return [region.along(axis).finer(length // size)], reshaped
        if size % length == 0 and isinstance(region, Rows):
            each = size // length  # a row is a part of one of its rows
            coarse = np.unique(region.numbers // each)
            full = Rows(region.axis, (coarse[:, None] * each + np.arange(each)).reshape(-1))
            cut: Any = region.within(full)
            return [Rows(axis, coarse)], lambda x, cut=cut, full=full: cut.take(reshaped(x, full))
    for axis, length in enumerate(old):  # the rows are repeated along axes before them
        outer = math.prod(old[:axis])
        first = region.axis
        while first > 0 and math.prod(new[:first]) > outer:
            first -= 1
        repeats = math.prod(new[first : region.axis])
        same = math.prod(new[:first]) == outer and math.prod(old[axis + 1 :]) == inner
        if same and length == repeats * size:
            return [region.along(axis).repeated(repeats, size)], reshaped
    return None


@rule("slice", params="limit_indices start_indices strides")
@one_result
def slice_(eqn: Equation, region: Any) -> Any:
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(start)
    axis, step = region.axis, strides[region.axis]
    if step == 1:
        rows = region.shifted(start[axis])
    elif isinstance(region, Rows):
        rows = Rows(axis, start[axis] + step * region.numbers)
    else:
        return None
    changed = {
        "start_indices": _at(start, axis, 0),
        "limit_indices": _at(limit, axis, region.count),
        "strides": _at(strides, axis, 1),
    }
    return [rows], lambda x: eqn.bind(x, **changed)


@rule("rev", params="dimensions")
@one_result
def rev(eqn: Equation, region: Any) -> Any:
    if region.axis not in eqn.params["dimensions"]:
        return [region], eqn.bind
    if not isinstance(region, Rows):
        return None
    return [Rows(region.axis, eqn.avals_in[0].shape[region.axis] - 1 - region.numbers[::-1])], eqn.bind


@rule("pad", params="padding_config")
@one_result
def pad(eqn: Equation, region: Any) -> Any:
    config, axis = eqn.params["padding_config"], region.axis
    low, _, between = config[axis]
    size = eqn.avals_in[0].shape[axis]
    others = _at(config, axis, (0, 0, 0))
    if config[axis] == (0, 0, 0):
        return [region, EVERYTHING], eqn.bind

    def padding(_: Any, value: Any) -> Any:
        return jax.lax.broadcast(value, region.shape(eqn.avals_out[0].shape), out_sharding=_layout(eqn, region))

    if not isinstance(region, Rows):
        if between:
            return None
        if not size:
            return [None, EVERYTHING], padding
        inner = region.shifted(-low).clamped(size)
        all_are_there = region.count >= size  # a piece of fewer rows is computed whole

        def select(x: Any, value: Any) -> Any:
            x = eqn.bind(inner.take(x) if all_are_there else x, value, padding_config=others)
            i = region.indices - low
            return jnp.where(of_each_row((i >= 0) & (i < size), axis, x.ndim), x, value)

        return [EVERYTHING if all_are_there else inner, EVERYTHING], select
    found, rest = np.divmod(region.numbers - low, between + 1)
    valid = (rest == 0) & (found >= 0) & (found < size)
    positions = np.flatnonzero(valid)
    if not positions.size:
        return [None, EVERYTHING], padding
    rows, steps = Rows(axis, found[valid]), set(np.diff(positions).tolist())
    if len(steps) <= 1:
        first, last = positions[[0, -1]].tolist()
        edges = (first, region.count - 1 - last, max(steps, default=1) - 1)
        return [rows, EVERYTHING], lambda x, value: eqn.bind(x, value, padding_config=_at(config, axis, edges))

    def scattered(x: Any, value: Any) -> Any:
        x = eqn.bind(x, value, padding_config=_at(config, axis, (0, 1, 0)))  # a row of padding after the others
        order = np.full(region.count, len(positions))
        order[positions] = np.arange(len(positions))
        return jnp.take(x, order, axis=axis)

    return [rows, EVERYTHING], scattered


@rule("concatenate", params="dimension")
@one_result
def concatenate(eqn: Equation, region: Any) -> Any:
    axis, dimension = region.axis, eqn.params["dimension"]
    if axis != dimension:
        return [region] * len(eqn.inputs), eqn.bind
    edges = np.cumsum([0, *(aval.shape[axis] for aval in eqn.avals_in)]).tolist()
    spans = list(itertools.pairwise(edges))
    if isinstance(region, Rows):
        each = [region.numbers[(region.numbers >= a) & (region.numbers < b)] - a for a, b in spans]
        regions = [Rows(axis, numbers) if numbers.size else None for numbers in each]
        return regions, lambda *parts: eqn.bind(*(part for part in parts if part is not None))
    if region.count * sum(a < b for a, b in spans) > edges[-1]:
        return None
    shifted = [region.shifted(-a).clamped(b - a) if a < b else None for a, b in spans]

    def selected(*parts: Any) -> Any:
        (_, out), *others = [(a, part) for (a, _), part in zip(spans, parts, strict=True) if part is not None]
        for a, part in others:
            out = jnp.where(of_each_row(region.indices >= a, axis, out.ndim), part, out)
        return out

    return shifted, selected


@rule("split", params="axis sizes")
@each_result
def split(eqn: Equation, place: int, region: Any) -> Any:
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    start = sum(sizes[:place])
    piece = Rows(axis, np.arange(start, start + sizes[place]))
    if region.axis == axis:
        return [region.shifted(start)], lambda x: x
    return ([piece], lambda x: x) if region is EVERYTHING else ([region], piece.take)


@rule("unstack", params="axis")
@each_result
def unstack(eqn: Equation, place: int, region: Region) -> Any:
    axis = eqn.params["axis"]
    row = functools.partial(jax.lax.index_in_dim, index=place, axis=axis, keepdims=False)
    return [region if region is EVERYTHING else region.along(region.axis + (region.axis >= axis))], row


@rule("iota", params="dimension dtype shape sharding")
@one_result
def iota(eqn: Equation, region: Any) -> Any:
    shape, dimension, dtype = (eqn.params[name] for name in ("shape", "dimension", "dtype"))
    new, layout = region.shape(shape), _layout(eqn, region)

    def numbers(*_: Any) -> Any:
        if dimension != region.axis:
            return jax.lax.broadcasted_iota(dtype, new, dimension, out_sharding=layout)
        return jax.lax.broadcast_in_dim(region.indices.astype(dtype), new, (dimension,), out_sharding=layout)

    return [None] * len(eqn.inputs), numbers


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", cost=Cost.OTHER, params="axis reverse")
@one_result
def cumulative(eqn: Equation, region: Any) -> Any:
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]
    if axis != region.axis:
        return [region], eqn.bind
    if not isinstance(region, Rows) or not region.count:
        return None
    first, last = int(region.numbers[0]), int(region.numbers[-1])
    run = range(first, eqn.avals_in[0].shape[axis]) if reverse else range(last + 1)
    return [Rows(axis, run)], lambda x: region.shifted(-run[0]).take(eqn.bind(x))


def _rank(eqn: Equation) -> int:
    return len(eqn.avals_in[0].shape)


@functools.cache
def _independent_keys() -> Any:
    """The dtype of keys of which each has random numbers of its own.

    A batch of keys of ``rbg`` or ``unsafe_rbg`` has those of its first key; nothing is known about other kinds.
    """
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def _of_keys(eqn: Equation) -> Sequence[int]:
    return range(_rank(eqn)) if eqn.avals_in[0].dtype == _independent_keys() else ()


@rule("random_fold_in", cost=Cost.OTHER)
def random_fold_in(eqn: Equation, regions: Sequence[Region | None]) -> Computation | None:
    return elementwise(eqn, regions) if eqn.avals_in[0].dtype == _independent_keys() else None


def _of_windows(eqn: Equation) -> list[int]:
    names = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1}
    axes = range(len(eqn.avals_out[0].shape))
    return [i for i in axes if all(eqn.params[name][i] == value for name, value in names.items())]


_MATRICES = "cholesky eigh lu qr householder_product svd triangular_solve tridiagonal_solve geqrf"
_WINDOWS = "reduce_window reduce_window_sum reduce_window_max reduce_window_min"
_KEPT_AXES: dict[str, Callable[[Equation], Any]] = {
    **dict.fromkeys(_MATRICES.split(), lambda eqn: range(_rank(eqn) - 2)),
    **dict.fromkeys(_WINDOWS.split(), _of_windows),
    **dict.fromkeys(  # each element becomes several, or several become one, along a new last axis
        ["bitcast_convert_type", "random_wrap", "random_unwrap"],
        lambda eqn: range(min(_rank(eqn), len(eqn.avals_out[0].shape))),
    ),
    "sort": lambda eqn: {*range(_rank(eqn))} - {eqn.params["dimension"]},
    "top_k": lambda eqn: {*range(_rank(eqn))} - {eqn.params.get("axis", -1) % _rank(eqn)},
    "fft": lambda eqn: range(_rank(eqn) - len(eqn.params["fft_lengths"])),
    "random_bits": _of_keys,
    "random_split": _of_keys,
    "tile": lambda eqn: [axis for axis, times in enumerate(eqn.params["reps"]) if times == 1],
}
"""The axes along which all results and operands have the same rows."""


_OF_MATRICES = """
algorithm compute_full_matrices compute_left_eigenvectors compute_right_eigenvectors compute_schur_vectors
compute_uv conjugate_a full_matrices implementation left_side lower pivoting sort_eigenvalues subset_by_index
subset_by_value symmetrize_input symmetrize transpose_a unit_diagonal use_magma
"""
_OF_WINDOWS = """
base_dilation consts jaxpr padding window_dilation window_dimensions window_strides
"""


@rule("tile", params="reps")
@rule("random_wrap", "random_unwrap", params="impl")
@rule("bitcast_convert_type", params="new_dtype", decides=True)
@rule("sort", cost=Cost.OTHER, params="dimension is_stable num_keys", decides=True)
@rule("top_k", cost=Cost.OTHER, params="axis is_stable k", decides=True)
@rule(*_MATRICES.split(), cost=Cost.OTHER, params=_OF_MATRICES, decides=True)
@rule(*_WINDOWS.split(), cost=Cost.OTHER, params=_OF_WINDOWS)
@rule("fft", cost=Cost.OTHER, params="fft_lengths fft_type")
@rule("random_bits", "random_split", cost=Cost.OTHER, params="bit_width shape")
def alike(eqn: Equation, regions: Sequence[Region | None]) -> Computation | None:
    wanted: list[Any] = [region for region in regions if region is not None]
    axes = _KEPT_AXES[eqn.primitive.name](eqn)
    if any(region != wanted[0] for region in wanted) or wanted[0].axis not in axes:
        return None
    starts = len(eqn.inputs) - len(eqn.outputs) if eqn.primitive.name in _WINDOWS.split() else 0
    given = [wanted[0]] * (len(eqn.inputs) - starts)
    return Computation([*given, *[EVERYTHING] * starts], eqn.bind_all, [wanted[0]] * len(regions))


@rule("stack", params="axis")
@one_result
def stack(eqn: Equation, region: Any) -> Any:
    new = eqn.params["axis"]
    given = [region.along(region.axis - (region.axis > new))] * len(eqn.inputs)
    return None if region.axis == new else (given, eqn.bind)


def _of_product(eqn: Equation, numbers: Any, region: Region, free: int) -> list[Region]:
    """The regions of the operands for rows along the free axis of this number."""
    summed, batch = numbers
    ranks = enumerate(len(aval.shape) for aval in eqn.avals_in[:2])
    axes = [(n, i) for n, rank in ranks for i in range(rank) if i not in (*summed[n], *batch[n])]
    operand, axis = axes[free]
    return [region.along(axis) if n == operand else EVERYTHING for n in range(2)]


_OF_PRODUCTS = "out_sharding precision preferred_element_type"


@rule("dot_general", cost=Cost.PRODUCT, params=f"dimension_numbers {_OF_PRODUCTS}")
@one_result
def dot_general(eqn: Equation, region: Any) -> Any:
    _, batch = numbers = eqn.params["dimension_numbers"]
    bind = functools.partial(eqn.bind, **_laid_out(eqn, region))
    if region.axis < len(batch[0]):
        return [region.along(axes[region.axis]) for axes in batch], bind
    return _of_product(eqn, numbers, region, region.axis - len(batch[0])), bind


@rule("ragged_dot_general", cost=Cost.PRODUCT, params=f"group_offset ragged_dot_dimension_numbers {_OF_PRODUCTS}")
@one_result
def ragged_dot_general(eqn: Equation, region: Any) -> Any:
    """The gradient of experts: the experts between those that are wanted are computed as one."""
    ragged = eqn.params["ragged_dot_dimension_numbers"]
    summed, batch = numbers = ragged.dot_dimension_numbers
    if batch[0] or ragged.lhs_ragged_dimensions[0] not in summed[0]:
        return None
    if region.axis > 0:
        return [*_of_product(eqn, numbers, region, region.axis - 1), EVERYTHING], eqn.bind
    if not isinstance(region, Rows):
        return None
    edges = sorted({0, eqn.avals_out[0].shape[0], *region.numbers.tolist(), *(region.numbers + 1).tolist()})
    places = Rows(0, np.searchsorted(edges, region.numbers))

    def together(left: Any, right: Any, sizes: Any) -> Any:
        spans = itertools.pairwise(edges)
        joined = jnp.stack([sizes[a:b].sum(dtype=sizes.dtype) for a, b in spans])
        return places.take(eqn.bind(left, right, joined))

    return [EVERYTHING] * 3, together


_OF_CONVOLUTIONS = f"""
batch_group_count dimension_numbers feature_group_count lhs_dilation padding rhs_dilation window_strides {_OF_PRODUCTS}
"""


@rule("conv_general_dilated", cost=Cost.PRODUCT, params=_OF_CONVOLUTIONS)
@one_result
def conv_general_dilated(eqn: Equation, region: Any) -> Any:
    numbers = eqn.params["dimension_numbers"]
    if eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1:
        return None
    batch, _, *spatial = numbers.out_spec
    if region.axis in spatial:
        return None
    if region.axis == batch:
        return [region.along(numbers.lhs_spec[0]), EVERYTHING], eqn.bind
    return [EVERYTHING, region.along(numbers.rhs_spec[0])], eqn.bind


@rule("dynamic_slice", params="slice_sizes")
@one_result
def dynamic_slice(eqn: Equation, region: Any) -> Any:
    sizes, shape, axis = eqn.params["slice_sizes"], eqn.avals_in[0].shape, region.axis
    starts = [EVERYTHING] * (len(eqn.inputs) - 1)
    start = 0
    if sizes[axis] != shape[axis]:
        if isinstance(eqn.inputs[1 + axis], int):
            return None
        start = int(eqn.inputs[1 + axis].val)
        start = min(max(start, 0), shape[axis] - sizes[axis])
    changed = _at(sizes, axis, region.count)
    return [region.shifted(start), *starts], lambda x, *starts: eqn.bind(x, *starts, slice_sizes=changed)


@rule("dynamic_update_slice", cost=Cost.LOOKUP)
@one_result
def dynamic_update_slice(eqn: Equation, region: Any) -> Any:
    operand, update = (aval.shape for aval in eqn.avals_in[:2])
    axis, starts = region.axis, [EVERYTHING] * (len(eqn.inputs) - 2)
    if not math.prod(update):
        return [region, *[None] * (len(eqn.inputs) - 1)], lambda x, *_: x
    if update[axis] == operand[axis]:
        return [region, region, *starts], eqn.bind

    def written(x: Any, update: Any, *starts: Any) -> Any:
        place = region.indices - clipped(starts[axis], operand[axis] - update.shape[axis])
        new = jnp.take(update, clipped(place, update.shape[axis] - 1), axis=axis, mode="clip")
        zero = cast_to_vary(jnp.zeros((), starts[axis].dtype), varies(jax.typeof(starts[axis])))
        new = eqn.bind(x, new, *starts[:axis], zero, *starts[axis + 1 :])
        return jnp.where(of_each_row((place >= 0) & (place < update.shape[axis]), axis, x.ndim), new, x)

    return [region, EVERYTHING, *starts], lambda x, update, *starts: written(x, update, *map(jnp.asarray, starts))


_OF_LOOKUPS = "dimension_numbers fill_value indices_are_sorted mode slice_sizes unique_indices"


@rule("gather", cost=Cost.LOOKUP, params=_OF_LOOKUPS)
@one_result
def gather(eqn: Equation, region: Any) -> Any:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, axis = eqn.avals_in[0].shape, region.axis
    if axis in numbers.offset_dims:
        hidden = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        of_operand = [i for i in range(len(operand)) if i not in hidden][numbers.offset_dims.index(axis)]
        if sizes[of_operand] != operand[of_operand]:
            return None
        changed = _at(sizes, of_operand, region.count)
        return [region.along(of_operand), EVERYTHING], lambda x, i: eqn.bind(x, i, slice_sizes=changed)
    batch = [i for i in range(len(eqn.avals_out[0].shape)) if i not in numbers.offset_dims].index(axis)
    of_operand = EVERYTHING
    if batch in numbers.start_indices_batching_dims:
        place = numbers.start_indices_batching_dims.index(batch)
        of_operand = region.along(numbers.operand_batching_dims[place])
    return [of_operand, region.along(batch)], eqn.bind


_UPDATES = ("add", "mul", "min", "max", "sub")


@rule(
    *("scatter", *(f"scatter-{kind}" for kind in _UPDATES)),
    cost=Cost.OTHER,
    params=f"update_consts update_jaxpr {_OF_LOOKUPS}",
)
@one_result
def scatter(eqn: Equation, region: Any) -> Any:
    numbers = eqn.params["dimension_numbers"]
    operand, updates = eqn.avals_in[0].shape, eqn.avals_in[2].shape
    axis = region.axis
    batching, hidden = numbers.operand_batching_dims, (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    of_updates = [i for i in range(len(updates)) if i not in numbers.update_window_dims]
    if axis in batching:
        of_indices = numbers.scatter_indices_batching_dims[batching.index(axis)]
        return [region, region.along(of_indices), region.along(of_updates[of_indices])], eqn.bind
    windows = dict(zip([i for i in range(len(operand)) if i not in hidden], numbers.update_window_dims, strict=True))
    if axis in windows and updates[windows[axis]] == operand[axis]:
        return [region, EVERYTHING, region.along(windows[axis])], eqn.bind
    if axis not in numbers.scatter_dims_to_operand_dims:
        return None
    skipped = math.prod(operand) - math.prod(region.shape(operand))
    if math.prod(eqn.avals_in[1].shape[:-1]) > skipped:  # to find the rows costs more than to compute all
        return None
    component = numbers.scatter_dims_to_operand_dims.index(axis)
    sizes = [updates[windows[i]] if i in windows else 1 for i in range(len(operand))]
    last = [operand[i] - sizes[i] for i in numbers.scatter_dims_to_operand_dims]
    changed: dict[str, Any] = {"mode": jax.lax.GatherScatterMode.FILL_OR_DROP}
    order = list(range(len(updates)))
    if sizes[axis] > 1:  # a block of rows has an index for each of them, after the other axes of the indices
        others = [i for i in numbers.update_window_dims if i != windows[axis]]
        order = [*of_updates, windows[axis], *others]
        changed["dimension_numbers"] = jax.lax.ScatterDimensionNumbers(
            tuple(range(len(of_updates) + 1, len(order))),
            tuple(sorted((*numbers.inserted_window_dims, axis))),
            numbers.scatter_dims_to_operand_dims,
            batching,
            numbers.scatter_indices_batching_dims,
        )

    def shifted(x: Any, indices: Any, updates: Any) -> Any:
        indices = jnp.asarray(indices)
        if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            indices = jnp.stack([clipped(indices[..., i], end) for i, end in enumerate(last)], axis=-1)
        elif jnp.issubdtype(indices.dtype, jnp.unsignedinteger) or indices.dtype.itemsize < 4:
            indices = indices.astype(jnp.int32)  # those out of range stay out of range
        start = indices[..., component]
        if sizes[axis] > 1:
            inside = (start >= 0) & (start <= last[component])
            start = jnp.where(inside, start, operand[axis])[..., None] + np.arange(sizes[axis], dtype=np.int32)
            indices = jnp.broadcast_to(indices[..., None, :], (*start.shape, indices.shape[-1]))
        place, distinct = region.find(start, operand[axis])
        indices = indices.at[..., component].set(place.astype(indices.dtype))
        unique, ordered = (eqn.params[name] and distinct for name in ("unique_indices", "indices_are_sorted"))
        ordered = ordered and sizes[axis] == 1  # blocks may overlap
        updates = jax.lax.transpose(updates, order)
        out = eqn.bind(x, indices, updates, unique_indices=unique, indices_are_sorted=ordered, **changed)
        return region.joined(out, operand[axis])

    return [region, EVERYTHING, EVERYTHING], shifted
