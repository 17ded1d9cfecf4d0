"""More rules of the table: operations on each matrix, window or random key of an array.

They occur in the forward pass of a model more than in its gradient.
"""

import functools
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from optax_freeze._program.operations import RULES, Computation, rule
from optax_freeze._program.regions import EVERYTHING, Region
from optax_freeze._spec.layout import fitting


def _all_alike(eqn: Any, regions: Sequence[Region | None], apart: Sequence[int]) -> Computation | None:
    """All results and operands have the same rows, along none of the axes that are not kept ``apart``."""
    wanted = [region for region in regions if region is not None]
    if any(region != wanted[0] for region in wanted) or wanted[0].axis not in apart:
        return None
    return Computation([wanted[0]] * len(eqn.inputs), eqn.bind_all, [wanted[0]] * len(regions))


@rule("top_k", cheap=False, many=True)
def top_k(eqn: Any, regions: Sequence[Region | None]) -> Computation | None:
    axes = list(range(len(eqn.avals_in[0].shape)))
    axes.pop(eqn.params.get("axis", -1))
    return _all_alike(eqn, regions, axes)


_MATRICES = "cholesky eigh lu qr householder_product svd triangular_solve tridiagonal_solve geqrf"


@rule(*_MATRICES.split(), cheap=False, many=True)
def of_matrices(eqn: Any, regions: Sequence[Region | None]) -> Computation | None:
    return _all_alike(eqn, regions, range(len(eqn.avals_in[0].shape) - 2))


@rule("fft", cheap=False)
def fft(eqn: Any, region: Any) -> Any:
    first = len(eqn.avals_in[0].shape) - len(eqn.params["fft_lengths"])
    return ([region], eqn.bind) if region.axis < first else None


_WINDOWS = "reduce_window reduce_window_sum reduce_window_max reduce_window_min reduce_window_prod"


@rule(*_WINDOWS.split(), cheap=False, many=True)
def reduce_window(eqn: Any, regions: Sequence[Region | None]) -> Computation | None:
    names = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1}
    axes = range(len(eqn.avals_out[0].shape))
    apart = [i for i in axes if all(eqn.params[name][i] == value for name, value in names.items())]
    found = _all_alike(eqn, regions, apart)
    arrays = len(eqn.outputs)
    return found and found._replace(regions=[*found.regions[:arrays], *[EVERYTHING] * (len(eqn.inputs) - arrays)])


@rule("tile")
def tile(eqn: Any, region: Any) -> Any:
    return ([region], eqn.bind) if eqn.params["reps"][region.axis] == 1 else None


@rule("stack")
def stack(eqn: Any, region: Any) -> Any:
    new = eqn.params["axis"]
    if region.axis == new:
        return None
    return [region.along(region.axis - (region.axis > new))] * len(eqn.inputs), eqn.bind


@rule("bitcast_convert_type", "random_wrap", "random_unwrap", "random_split", cheap=False)
def of_elements(eqn: Any, region: Any) -> Any:
    """Each element becomes several, or several become one, along a new last axis."""
    is_kept = region.axis < min(len(eqn.avals_in[0].shape), len(eqn.avals_out[0].shape))
    return ([region], eqn.bind) if is_kept else None


@rule("random_bits", cheap=False)
def random_bits(eqn: Any, region: Any) -> Any:
    return ([region], eqn.bind) if region.axis < len(eqn.avals_in[0].shape) else None


_OF_NUMBERS = "bessel_i0e bessel_i1e clz complex log2 polygamma regularized_incomplete_beta random_fold_in"


@rule(*_OF_NUMBERS.split(), cheap=False)
def elementwise(eqn: Any, region: Any) -> Any:
    return RULES["add"].of(eqn, region)


@rule("reshard", "mesh_cast")
def sharded(eqn: Any, region: Any) -> Any:
    sharding, shape = eqn.params["dst_sharding"], region.shape(eqn.avals_out[0].shape)
    if not isinstance(sharding, NamedSharding):
        return None
    return [region], functools.partial(eqn.bind, dst_sharding=fitting(sharding, len(shape), shape))
