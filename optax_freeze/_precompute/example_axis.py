"""On which axis of each value do the examples of a batch lie, and which operation mixes them?

A value either belongs to examples, along one axis, or is shared by all. What is shared may be combined with what
belongs to examples only if it is uniform along their axis: else an example's value would depend on its place.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, Literal

from optax_freeze._gradient.constants import known
from optax_freeze._gradient.jaxprs import scan_counts
from optax_freeze._gradient.rules_rowwise import ELEMENTWISE
from optax_freeze._precompute.program import Node, Program


class Layout(NamedTuple):
    """Where the examples lie: along ``axis``, each in ``block`` places of it; None if the value is shared."""

    axis: int | None = None
    block: int = 1
    uniform: frozenset[int] = frozenset()  # axes along which all is the same

    @property
    def examples(self) -> tuple[int, int] | None:
        """Axis and block."""
        return None if self.axis is None else (self.axis, self.block)

    def moved(self, axes: dict[int, int]) -> "Layout":
        """The layout where axes go to other places; a missing axis is gone, and takes the examples with it."""
        uniform = frozenset(axes[axis] for axis in self.uniform if axis in axes)
        if self.axis is not None and self.axis not in axes:
            raise _MixedError
        return Layout(None if self.axis is None else axes[self.axis], self.block, uniform)


class Mixed(NamedTuple):
    """A value to which several examples contribute since an operation: its name, and its place."""

    operation: str


class _MixedError(Exception):
    """An operation mixes examples."""

    def __init__(self, operation: str = "") -> None:
        self.operation = operation


def layouts(program: Program, inputs: Sequence[Layout]) -> list[Layout | Mixed | None]:
    """The layout of each value of a program that is known beforehand; None for the others."""
    found: dict[int, Any] = dict(enumerate(inputs))
    found |= {value: _of_constant(const) for value, const in program.consts.items()}
    for node in program.nodes:
        if not all(program.known[value] for value in node.outputs):
            continue
        operands = [_of_literal(x) if isinstance(x, Literal) else found[x] for x in node.inputs]
        if mixed := next((x for x in operands if isinstance(x, Mixed)), None):
            found |= dict.fromkeys(node.outputs, mixed)
            continue
        try:
            found |= zip(node.outputs, _through(node.eqn, operands), strict=True)
        except _MixedError as error:
            found |= dict.fromkeys(node.outputs, Mixed(error.operation or str(node)))
    return [found.get(value) for value in range(len(program.avals))]


def of_batch(shape: Sequence[int], axis: int) -> Layout:
    """The layout of an argument with examples along ``axis``; one without axes is shared."""
    return Layout(axis if shape else None)


def _of_literal(literal: Any) -> Layout:
    return Layout(uniform=frozenset(range(np.ndim(literal.val))))


def _of_constant(const: Any) -> Layout:
    const = known(const)
    if not isinstance(const, np.ndarray) or not 0 < const.size <= 2**20:
        return Layout()
    return Layout(uniform=frozenset(axis for axis in range(const.ndim) if (const == const.take([0], axis)).all()))


def _through(eqn: Any, operands: Sequence[Layout]) -> list[Layout]:
    """The layouts of the outputs of an operation."""
    shapes = [tuple(getattr(atom.aval, "shape", ())) for atom in eqn.invars]
    rule = _RULES.get(eqn.primitive.name)
    if rule is not None:
        outs = rule(eqn, shapes, operands)
        return outs if isinstance(outs, list) else [outs] * len(eqn.outvars)
    if any(x.axis is not None for x in operands):
        raise _MixedError
    return [Layout()] * len(eqn.outvars)


_RULES: dict[str, Callable[[Any, Sequence[Any], Sequence[Layout]], Any]] = {}


def _rule(names: str) -> Callable[..., Any]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


def _joined(shape: Sequence[int], shapes: Sequence[Any], operands: Sequence[Layout]) -> Layout:
    """The layout of an elementwise result."""
    axes = range(len(shape))
    found = {x.examples for x in operands if x.axis is not None}
    uniform = [
        x.uniform | {axis for axis in axes if not of or of[axis] == 1} for x, of in zip(operands, shapes, strict=True)
    ]
    if not found:
        return Layout(uniform=frozenset(axes).intersection(*uniform))
    (axis, block), *others = found
    shared = (u for x, u in zip(operands, uniform, strict=True) if x.axis is None)
    if others or not all(axis in u for u in shared):
        raise _MixedError
    return Layout(axis, block, frozenset(axes).intersection(*uniform) - {axis})


@_rule(
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
    return _joined(shape, shapes, operands)


@_rule("optimization_barrier")
def _each(eqn: Any, shapes: Any, operands: Any) -> list[Layout]:
    return list(operands)


@_rule("broadcast_in_dim")
def _broadcast(eqn: Any, shapes: Any, operands: Any) -> Layout:
    shape, to = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    moved = operands[0].moved(dict(enumerate(to)))
    if moved.axis is not None and shape[moved.axis] != shapes[0][operands[0].axis]:
        raise _MixedError
    stretched = {axis for axis in range(len(shape)) if axis not in to or shapes[0][to.index(axis)] == 1}
    return moved._replace(uniform=(moved.uniform | stretched) - {moved.axis})


@_rule("iota")
def _iota(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return Layout(uniform=frozenset(range(len(eqn.params["shape"]))) - {eqn.params["dimension"]})


@_rule("transpose")
def _transpose(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return operands[0].moved({axis: i for i, axis in enumerate(eqn.params["permutation"])})


@_rule("squeeze")
def _squeeze(eqn: Any, shapes: Any, operands: Any) -> Layout:
    kept = [axis for axis in range(len(shapes[0])) if axis not in eqn.params["dimensions"]]
    return operands[0].moved({axis: i for i, axis in enumerate(kept)})


@_rule("reshape")
def _reshape(eqn: Any, shapes: Any, operands: Any) -> Layout:
    """An axis goes where the axes before it have as many elements as before; the examples may be joined with others."""
    [layout], [old], new = operands, shapes, eqn.params["new_sizes"]
    before = [math.prod(new[:i]) for i in range(len(new))]

    def place(axis: int, fits: Callable[[int], bool]) -> int | None:
        outer = math.prod(old[:axis])
        return next((i for i in range(len(new)) if before[i] == outer and fits(new[i]) and new[i] > 1), None)

    uniform = {i for i, size in enumerate(new) if size == 1}
    uniform |= {i for axis in layout.uniform if (i := place(axis, old[axis].__eq__)) is not None}
    if layout.axis is None:
        return Layout(uniform=frozenset(uniform))
    count = old[layout.axis] // layout.block
    if count == 1:
        raise _MixedError
    axis = place(layout.axis, lambda size: size % count == 0)
    if axis is None:
        raise _MixedError
    return Layout(axis, new[axis] // count, frozenset(uniform) - {axis})


@_rule("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin")
def _reduce(eqn: Any, shapes: Any, operands: Any) -> Layout:
    kept = [axis for axis in range(len(shapes[0])) if axis not in eqn.params["axes"]]
    return operands[0].moved({axis: i for i, axis in enumerate(kept)})


def _along(axis: int, shapes: Any, operands: Any) -> Layout:
    """The result of an operation along one axis, which the examples must not have."""
    layout = _joined(shapes[0], shapes, operands)
    if layout.axis == axis:
        raise _MixedError
    return layout._replace(uniform=layout.uniform - {axis})


@_rule("cumsum cumprod cummax cummin cumlogsumexp")
def _cumulative(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return _along(eqn.params["axis"], shapes, operands)


@_rule("sort")
def _sort(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return _along(eqn.params["dimension"], shapes, operands)


@_rule("top_k")
def _top_k(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return _along(eqn.params.get("axis", len(shapes[0]) - 1) % len(shapes[0]), shapes, operands)


@_rule("rev")
def _rev(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return _but_for(eqn.params["dimensions"], operands[0])


@_rule("tile")
def _tile(eqn: Any, shapes: Any, operands: Any) -> Layout:
    uniform = operands[0].uniform | {axis for axis, size in enumerate(shapes[0]) if size == 1}
    tiled = {axis for axis, times in enumerate(eqn.params["reps"]) if times > 1}
    return _but_for(tiled, operands[0])._replace(uniform=uniform - {operands[0].axis})


@_rule("stack")
def _stack(eqn: Any, shapes: Any, operands: Any) -> Layout:
    layout, new = _joined(shapes[0], shapes, operands), eqn.params["axis"]
    return layout.moved({axis: axis + (axis >= new) for axis in range(len(shapes[0]))})


@_rule("unstack")
def _unstack(eqn: Any, shapes: Any, operands: Any) -> Layout:
    gone = eqn.params["axis"]
    return operands[0].moved({axis: axis - (axis > gone) for axis in range(len(shapes[0])) if axis != gone})


@_rule("split")
def _split(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return _but_for([eqn.params["axis"]], operands[0])


def _but_for(changed: Any, layout: Layout) -> Layout:
    """The result of an operation that changes places along these axes."""
    if layout.axis in changed:
        raise _MixedError
    return layout._replace(uniform=layout.uniform - set(changed))


@_rule("slice")
def _slice(eqn: Any, shapes: Any, operands: Any) -> Layout:
    axis, params = operands[0].axis, eqn.params
    if axis is not None and params["limit_indices"][axis] - params["start_indices"][axis] != shapes[0][axis]:
        raise _MixedError
    return operands[0]


@_rule("pad")
def _pad(eqn: Any, shapes: Any, operands: Any) -> Layout:
    return _but_for([i for i, edges in enumerate(eqn.params["padding_config"]) if any(edges)], operands[0])


@_rule("concatenate")
def _concatenate(eqn: Any, shapes: Any, operands: Any) -> Layout:
    axis = eqn.params["dimension"]
    shape = eqn.outvars[0].aval.shape
    like = [(*of[:axis], shape[axis], *of[axis + 1 :]) for of in shapes]
    return _along(axis, like, operands)


@_rule("dot_general")
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
            raise _MixedError
    elif (left.axis in of_batch and left.axis not in right.uniform) or (
        right.axis in of_batch and right.axis not in left.uniform
    ):
        raise _MixedError
    examples = left if left.axis is not None else right
    alone = {axis for axis in left.uniform | right.uniform if axis not in of_batch}
    uniform = frozenset(alone | (left.uniform & right.uniform)) - {examples.axis}
    return examples._replace(uniform=uniform)


@_rule("conv_general_dilated")
def _convolution(eqn: Any, shapes: Any, operands: Any) -> Layout:
    numbers = eqn.params["dimension_numbers"]
    if operands[0].axis is None and operands[1].axis is None:
        return Layout()
    if operands[1].axis is not None or eqn.params["batch_group_count"] != 1:
        raise _MixedError
    return operands[0]._replace(uniform=frozenset()).moved({numbers.lhs_spec[0]: numbers.out_spec[0]})


@_rule("reduce_window reduce_window_sum reduce_window_max reduce_window_min reduce_window_prod")
def _window(eqn: Any, shapes: Any, operands: Any) -> Layout:
    params, layout = eqn.params, operands[0]
    if layout.axis is not None:
        trivial = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1}
        if any(params[name][layout.axis] != value for name, value in trivial.items()):
            raise _MixedError
    return layout._replace(uniform=frozenset())


@_rule("gather")
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
    """The result of a lookup: its axes come from the array or from the indices, batch axes from both."""
    if array.axis in array_batch:
        beside = indices_batch[array_batch.index(array.axis)]
        if indices.examples != (beside, array.block) and beside not in indices.uniform:
            raise _MixedError
        return Layout(of_indices[beside], array.block)
    looked_up, found = array.moved(of_array), indices.moved(of_indices)
    if indices.axis in indices_batch and array_batch[indices_batch.index(indices.axis)] not in array.uniform:
        raise _MixedError
    if looked_up.axis is not None and found.axis is not None:
        raise _MixedError
    examples = looked_up if looked_up.axis is not None else found
    return examples._replace(uniform=(looked_up.uniform | found.uniform) - {examples.axis})


@_rule("dynamic_slice")
def _dynamic_slice(eqn: Any, shapes: Any, operands: Any) -> Layout:
    changed = [i for i, size in enumerate(eqn.params["slice_sizes"]) if size != shapes[0][i]]
    return _but_for([axis for axis in changed if axis == operands[0].axis], operands[0])


@_rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: Any, shapes: Any, operands: Any) -> Layout:
    changed = {i for i, size in enumerate(shapes[1]) if size != shapes[0][i]}
    layout = _joined(shapes[0], [shapes[0]] * 2, operands[:2])
    return _but_for(changed, layout)


@_rule("fft")
def _fft(eqn: Any, shapes: Any, operands: Any) -> Layout:
    rank, last = len(shapes[0]), len(eqn.params["fft_lengths"])
    return _but_for(range(rank - last, rank), operands[0])


@_rule("cholesky eigh lu qr householder_product svd triangular_solve tridiagonal_solve geqrf")
def _of_matrices(eqn: Any, shapes: Any, operands: Any) -> Layout:
    found = {layout.examples for layout in operands}
    if len(found) > 1 or operands[0].axis in range(len(shapes[0]) - 2, len(shapes[0])):
        raise _MixedError
    return operands[0]._replace(uniform=frozenset())


@_rule("jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr checkpoint remat remat2")
def _call(eqn: Any, shapes: Any, operands: Any) -> list[Layout]:
    closed = next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params)
    return _of_program(closed, operands)


def _of_program(program: Any, operands: Sequence[Layout]) -> list[Layout]:
    """The layouts of the outputs of a program within an operation."""
    jaxpr, consts = (program, ()) if isinstance(program, Jaxpr) else (program.jaxpr, program.consts)
    found: dict[Any, Layout] = dict(zip(jaxpr.invars, operands, strict=True))
    found |= zip(jaxpr.constvars, map(_of_constant, consts), strict=True)

    def read(atom: Any) -> Layout:
        return _of_literal(atom) if isinstance(atom, Literal) else found[atom]

    for eqn in jaxpr.eqns:
        try:
            found |= zip(eqn.outvars, _through(eqn, [read(atom) for atom in eqn.invars]), strict=True)
        except _MixedError as error:
            raise _MixedError(error.operation or str(Node(eqn, (), (), None, eqn.source_info.traceback))) from None
    return [read(atom) for atom in jaxpr.outvars]


@_rule("cond")
def _cond(eqn: Any, shapes: Any, operands: Any) -> list[Layout]:
    which, *others = operands
    if which.axis is not None:
        raise _MixedError
    results = zip(*(_of_program(branch, others) for branch in eqn.params["branches"]), strict=True)
    outs = zip(eqn.outvars, results, strict=True)
    return [_joined(var.aval.shape, [var.aval.shape] * len(found), found) for var, found in outs]


@_rule("scan")
def _scan(eqn: Any, shapes: Any, operands: Any) -> list[Layout]:
    first, carried = scan_counts(eqn.params)
    body, start = eqn.params["jaxpr"], first + carried
    stacked = zip(operands[start:], shapes[start:], strict=True)
    xs = [x.moved({axis: axis - 1 for axis in range(1, len(of))}) for x, of in stacked]
    carry = _carried(body, operands[:first], operands[first:][:carried], xs, shapes[first:][:carried])
    ys = zip(_of_program(body, [*operands[:first], *carry, *xs])[carried:], eqn.outvars[carried:], strict=True)
    return [*carry, *(y.moved({axis: axis + 1 for axis in range(len(var.aval.shape))}) for y, var in ys)]


@_rule("while")
def _while(eqn: Any, shapes: Any, operands: Any) -> list[Layout]:
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts, start = operands[of_condition:][:of_body], of_condition + of_body
    carry = _carried(eqn.params["body_jaxpr"], consts, operands[start:], [], shapes[start:])
    if _of_program(eqn.params["cond_jaxpr"], [*operands[:of_condition], *carry])[0].axis is not None:
        raise _MixedError
    return carry


def _carried(body: Any, consts: Any, carry: Any, xs: Any, shapes: Any) -> list[Layout]:
    """The layouts of what a loop carries, the same before and after each step."""
    carry = list(carry)
    while True:
        outs = _of_program(body, [*consts, *carry, *xs])[: len(carry)]
        new = [_joined(of, [of, of], pair) for of, *pair in zip(shapes, carry, outs, strict=True)]
        if new == carry:
            return carry
        carry = new
