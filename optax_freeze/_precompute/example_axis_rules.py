"""One rule per operation: the axis of the examples in its results, given their axis in its operands."""

import math
from collections.abc import Callable
from typing import Any

from optax_freeze._gradient.jaxprs import ELEMENTWISE
from optax_freeze._precompute.example_axis import Layout, MixedError, joined, rule


@rule(
    f"{ELEMENTWISE} bessel_i0e bessel_i1e bitcast_convert_type clz complex igamma igammac layout_constraint log2 "
    "mesh_cast pcast polygamma population_count random_bits random_clone random_fold_in random_split random_unwrap "
    "random_wrap regularized_incomplete_beta reshard sharding_constraint shift_left shift_right_arithmetic "
    "shift_right_logical threefry2x32"
)
def _elementwise(eqn: Any, shapes: Any, operands: Any) -> Layout:
    if eqn.primitive.name.startswith("random_") and all(x.axis is None for x in operands):
        return Layout()
    most = max(shapes, key=len)
    shape = [max(of[axis] for of in shapes if of) for axis in range(len(most))]
    return joined(shape, shapes, operands)


@rule("optimization_barrier")
def _each(eqn: Any, shapes: Any, operands: Any) -> list[Layout]:
    return list(operands)


@rule("broadcast_in_dim")
def _broadcast(eqn: Any, shapes: Any, operands: Any) -> Layout:
    shape, to = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    moved = operands[0].moved(dict(enumerate(to)))
    if moved.axis is not None and shape[moved.axis] != shapes[0][operands[0].axis]:
        raise MixedError
    stretched = {axis for axis in range(len(shape)) if axis not in to or shapes[0][to.index(axis)] == 1}
    return moved._replace(uniform=(moved.uniform | stretched) - {moved.axis})


@rule("iota")
def _iota(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return Layout(uniform=frozenset(range(len(eqn.params["shape"]))) - {eqn.params["dimension"]})


@rule("transpose")
def _transpose(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return operands[0].moved({axis: i for i, axis in enumerate(eqn.params["permutation"])})


@rule("squeeze")
def _squeeze(eqn: Any, shapes: Any, operands: Any) -> Layout:
    kept = [axis for axis in range(len(shapes[0])) if axis not in eqn.params["dimensions"]]
    return operands[0].moved({axis: i for i, axis in enumerate(kept)})


@rule("reshape")
def _reshape(eqn: Any, shapes: Any, operands: Any) -> Layout:
    """Finds the new axis with as many elements before it as the old one had. Examples may be merged with other axes."""
    [layout], [old], new = operands, shapes, eqn.params["new_sizes"]
    before = [math.prod(new[:i]) for i in range(len(new))]

    def place(axis: int, fits: Callable[[int], bool]) -> int | None:
        outer = math.prod(old[:axis])
        return next((i for i in range(len(new)) if before[i] == outer and fits(new[i])), None)

    uniform = {i for i, size in enumerate(new) if size == 1}
    for axis in layout.uniform:
        if old[axis] > 1 and (i := place(axis, old[axis].__eq__)) is not None:
            uniform.add(i)
    if layout.axis is None:
        return Layout(uniform=frozenset(uniform))
    count = old[layout.axis] // layout.block
    axis = place(layout.axis, lambda size: count < 2 or (size > 1 and size % count == 0))
    if axis is None:
        raise MixedError
    return Layout(axis, new[axis] // max(count, 1), frozenset(uniform) - {axis})


@rule("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin")
def _reduce(eqn: Any, shapes: Any, operands: Any) -> Layout:
    kept = [axis for axis in range(len(shapes[0])) if axis not in eqn.params["axes"]]
    return operands[0].moved({axis: i for i, axis in enumerate(kept)})


def _along(axis: int, shapes: Any, operands: Any) -> Layout:
    """The layout after an operation along one axis, which must not be the axis of the examples."""
    layout = joined(shapes[0], shapes, operands)
    if layout.axis == axis:
        raise MixedError
    return layout._replace(uniform=layout.uniform - {axis})


@rule("cumsum cumprod cummax cummin cumlogsumexp")
def _cumulative(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return _along(eqn.params["axis"], shapes, operands)


@rule("sort")
def _sort(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return _along(eqn.params["dimension"], shapes, operands)


@rule("top_k")
def _top_k(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return _along(eqn.params.get("axis", len(shapes[0]) - 1) % len(shapes[0]), shapes, operands)


@rule("rev")
def _rev(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return _but_for(eqn.params["dimensions"], operands[0])


@rule("tile")
def _tile(eqn: Any, shapes: Any, operands: Any) -> Layout:
    uniform = operands[0].uniform | {axis for axis, size in enumerate(shapes[0]) if size == 1}
    tiled = {axis for axis, times in enumerate(eqn.params["reps"]) if times > 1}
    return _but_for(tiled, operands[0])._replace(uniform=uniform - {operands[0].axis})


@rule("stack")
def _stack(eqn: Any, shapes: Any, operands: Any) -> Layout:
    layout, new = joined(shapes[0], shapes, operands), eqn.params["axis"]
    return layout.moved({axis: axis + (axis >= new) for axis in range(len(shapes[0]))})


@rule("unstack")
def _unstack(eqn: Any, shapes: Any, operands: Any) -> Layout:
    gone = eqn.params["axis"]
    return operands[0].moved({axis: axis - (axis > gone) for axis in range(len(shapes[0])) if axis != gone})


@rule("split")
def _split(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return _but_for([eqn.params["axis"]], operands[0])


def _but_for(changed: Any, layout: Layout, *, keeps_uniform: bool = False) -> Layout:
    """The layout after an operation that moves elements along these axes, none of which may hold the examples."""
    if layout.axis in changed:
        raise MixedError
    if keeps_uniform:
        return layout
    return layout._replace(uniform=layout.uniform - set(changed))


@rule("slice")
def _slice(eqn: Any, shapes: Any, operands: Any) -> Layout:
    new = eqn.outvars[0].aval.shape
    return _but_for([i for i, size in enumerate(shapes[0]) if new[i] != size], operands[0], keeps_uniform=True)


@rule("pad")
def _pad(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return _but_for([i for i, edges in enumerate(eqn.params["padding_config"]) if any(edges)], operands[0])


@rule("concatenate")
def _concatenate(eqn: Any, shapes: Any, operands: Any) -> Layout:
    axis = eqn.params["dimension"]
    shape = eqn.outvars[0].aval.shape
    like = [(*of[:axis], shape[axis], *of[axis + 1 :]) for of in shapes]
    return _along(axis, like, operands)


@rule("dot_general")
def _dot_general(eqn: Any, shapes: Any, operands: Any) -> Layout:
    contracted, batched = eqn.params["dimension_numbers"]
    places, at = [], len(batched[0])
    for of, summed, batch in zip(shapes, contracted, batched, strict=True):
        free = [axis for axis in range(len(of)) if axis not in (*summed, *batch)]
        places.append({**{axis: i for i, axis in enumerate(batch)}, **{axis: at + i for i, axis in enumerate(free)}})
        at += len(free)
    left, right = (layout.moved(axes) for layout, axes in zip(operands, places, strict=True))
    of_batch = range(len(batched[0]))
    if left.axis is not None and right.axis is not None:
        if left.examples != right.examples or left.axis not in of_batch:
            raise MixedError
    elif (left.axis in of_batch and left.axis not in right.uniform) or (
        right.axis in of_batch and right.axis not in left.uniform
    ):
        raise MixedError
    examples = left if left.axis is not None else right
    alone = {axis for axis in left.uniform | right.uniform if axis not in of_batch}
    uniform = frozenset(alone | (left.uniform & right.uniform)) - {examples.axis}
    return examples._replace(uniform=uniform)


@rule("conv_general_dilated")
def _convolution(eqn: Any, shapes: Any, operands: Any) -> Layout:
    numbers = eqn.params["dimension_numbers"]
    if operands[0].axis is None and operands[1].axis is None:
        return Layout()
    if operands[1].axis is not None or eqn.params["batch_group_count"] != 1:
        raise MixedError
    return operands[0]._replace(uniform=frozenset()).moved({numbers.lhs_spec[0]: numbers.out_spec[0]})


@rule("reduce_window reduce_window_sum reduce_window_max reduce_window_min reduce_window_prod")
def _window(eqn: Any, shapes: Any, operands: Any) -> Layout:
    params, arrays = eqn.params, len(eqn.outvars)
    layout = joined(shapes[0], shapes[:arrays], operands[:arrays])
    if layout.axis is not None:
        trivial = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1}
        if any(params[name][layout.axis] != value for name, value in trivial.items()):
            raise MixedError
    return layout._replace(uniform=frozenset())


@rule("gather")
def _gather(eqn: Any, shapes: Any, operands: Any) -> Layout:
    (array, indices), numbers = operands, eqn.params["dimension_numbers"]
    rank = len(eqn.outvars[0].aval.shape)
    of_indices = dict(enumerate(axis for axis in range(rank) if axis not in numbers.offset_dims))
    taken = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(len(shapes[0])) if axis not in taken]
    of_array = {
        axis: to
        for axis, to in zip(kept, numbers.offset_dims, strict=True)
        if eqn.params["slice_sizes"][axis] == shapes[0][axis]
    }
    return _looked_up(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, array, indices, of_array, of_indices
    )


def _looked_up(
    array_batch: Any,
    indices_batch: Any,
    array: Layout,
    indices: Layout,
    of_array: dict[int, int],
    of_indices: dict[int, int],
) -> Layout:
    """The layout of the result of a lookup. Its axes come from the array or the indices, its batch axes from both."""
    beside = dict(zip(indices_batch, array_batch, strict=True))
    both = {of_indices[i] for i, a in beside.items() if i in indices.uniform and a in array.uniform}
    of_either = {of_indices[i] for i in indices.uniform if i in of_indices and i not in beside} | {
        of_array[a] for a in array.uniform if a in of_array
    }
    uniform = frozenset(both | of_either)
    if array.axis in array_batch:
        place = next(i for i, a in beside.items() if a == array.axis)
        shared = indices.axis is None and place in indices.uniform
        if not shared and indices.examples != (place, array.block):
            raise MixedError
        return Layout(of_indices[place], array.block, uniform - {of_indices[place]})
    if indices.axis in beside and (array.axis is not None or beside[indices.axis] not in array.uniform):
        raise MixedError
    if array.axis is not None and indices.axis is not None:
        raise MixedError
    found = array.moved(of_array) if array.axis is not None else indices.moved(of_indices)
    return found._replace(uniform=uniform - {found.axis})


@rule("dynamic_slice")
def _dynamic_slice(eqn: Any, shapes: Any, operands: Any) -> Layout:
    changed = [i for i, size in enumerate(eqn.params["slice_sizes"]) if size != shapes[0][i]]
    return _but_for([axis for axis in changed if axis == operands[0].axis], operands[0])


@rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: Any, shapes: Any, operands: Any) -> Layout:
    changed = {i for i, size in enumerate(shapes[1]) if size != shapes[0][i]}
    layout = joined(shapes[0], [shapes[0]] * 2, operands[:2])
    return _but_for(changed, layout)


@rule("fft")
def _fft(eqn: Any, shapes: Any, operands: Any) -> Layout:
    rank, last = len(shapes[0]), len(eqn.params["fft_lengths"])
    return _but_for(range(rank - last, rank), operands[0])


@rule("cholesky eigh lu qr householder_product svd triangular_solve tridiagonal_solve geqrf")
def _of_matrices(eqn: Any, shapes: Any, operands: Any) -> Layout:
    found = {layout.examples for layout in operands}
    if len(found) > 1 or operands[0].axis in range(len(shapes[0]) - 2, len(shapes[0])):
        raise MixedError
    return operands[0]._replace(uniform=frozenset())
