"""Finds the axis of the examples of a batch in each value of a program, and the operations that mix examples.

A value either has one entry per example, along one axis, or is shared by all examples. A shared value may be combined
with per-example values only if it is uniform along the example axis. Otherwise the result for an example would depend
on its position in the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from optax_freeze._gradient.constants import known
from optax_freeze._gradient.jaxprs import opened, scan_counts
from optax_freeze._precompute.program import Node, Program


class Layout(NamedTuple):
    """The position of the examples: along ``axis``, ``block`` entries each. ``axis`` is None for a shared value."""

    axis: int | None = None
    block: int = 1
    uniform: frozenset[int] = frozenset()  # axes along which all entries are equal

    @property
    def examples(self) -> tuple[int, int] | None:
        """The axis and the block, or None."""
        return None if self.axis is None else (self.axis, self.block)

    def moved(self, axes: dict[int, int]) -> "Layout":
        """The layout after axes have moved, as a dict from old to new. An axis that is not in it has been removed.

        Raises:
          MixedError: if the axis of the examples has been removed.
        """
        uniform = frozenset(axes[axis] for axis in self.uniform if axis in axes)
        if self.axis is not None and self.axis not in axes:
            raise MixedError
        return Layout(None if self.axis is None else axes[self.axis], self.block, uniform)


class Mixed(NamedTuple):
    """A value to which several examples contribute, and the operation that mixed them, with its source line."""

    operation: str


class MixedError(Exception):
    """An operation mixes examples."""

    def __init__(self, operation: str = "") -> None:
        self.operation = operation


def layouts(program: Program, inputs: Sequence[Layout]) -> list[Layout | Mixed | None]:
    """The layout of each value of a program that is known beforehand, and None for each other value."""
    found: dict[int, Any] = dict(enumerate(inputs))
    found |= {value: _of_constant(const) for value, const in program.consts.items()}
    for node in program.nodes:
        if not all(program.known[value] for value in node.outputs):
            continue
        operands = [_of_constant(x.val) if isinstance(x, Literal) else found[x] for x in node.inputs]
        if mixed := next((x for x in operands if isinstance(x, Mixed)), None):
            found |= dict.fromkeys(node.outputs, mixed)
            continue
        try:
            found |= zip(node.outputs, _through(node.eqn, operands), strict=True)
        except MixedError as error:
            found |= dict.fromkeys(node.outputs, Mixed(error.operation or str(node)))
    return [found.get(value) for value in range(len(program.avals))]


def _of_constant(const: Any) -> Layout:
    """The layout of a constant: shared, and uniform along each axis along which its bits are equal."""
    is_key = hasattr(const, "dtype") and jnp.issubdtype(const.dtype, jax.dtypes.prng_key)
    const = const if is_key else known(const)
    if not isinstance(const, np.ndarray) or not 0 < const.size <= 2**20:
        return Layout()
    bits = np.frombuffer(np.ascontiguousarray(const).tobytes(), np.uint8).reshape(*const.shape, const.dtype.itemsize)
    return Layout(uniform=frozenset(axis for axis in range(const.ndim) if (bits == bits.take([0], axis)).all()))


def _through(eqn: Any, operands: Sequence[Layout]) -> list[Layout]:
    """The layouts of the outputs of an operation, by its rule."""
    shapes = [tuple(getattr(atom.aval, "shape", ())) for atom in eqn.invars]
    rule = RULES.get(eqn.primitive.name)
    counts: set[int] = {of[x.axis] // x.block for of, x in zip(shapes, operands, strict=True) if x.axis is not None}
    if rule is None:
        if counts:
            raise MixedError
        return [Layout()] * len(eqn.outvars)
    found = rule(eqn, shapes, operands)
    outs = found if isinstance(found, list) else [found] * len(eqn.outvars)
    return [_of_shape(getattr(var.aval, "shape", ()), out, counts) for var, out in zip(eqn.outvars, outs, strict=True)]


def _of_shape(shape: Sequence[int], layout: Layout, counts: set[int]) -> Layout:
    """The layout for a value of this shape, which must have as many examples as the operands."""
    if layout.axis is not None and (
        layout.axis >= len(shape) or {shape[layout.axis]} != {n * layout.block for n in counts}
    ):
        raise MixedError
    return layout._replace(uniform=layout.uniform & frozenset(range(len(shape))))


RULES: dict[str, Callable[[Any, Sequence[Any], Sequence[Layout]], Any]] = {}


def rule(names: str) -> Callable[..., Any]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


def joined(shape: Sequence[int], shapes: Sequence[Any], operands: Sequence[Layout]) -> Layout:
    """The layout of the result of an elementwise operation."""
    axes = range(len(shape))
    found = {(x.axis, x.block) for x in operands if x.axis is not None}
    uniform = [
        x.uniform | {axis for axis in axes if not of or of[axis] == 1} for x, of in zip(operands, shapes, strict=True)
    ]
    if not found:
        return Layout(uniform=frozenset(axes).intersection(*uniform))
    (axis, block), *others = found
    shared = (u for x, u in zip(operands, uniform, strict=True) if x.axis is None)
    if others or not all(axis in u for u in shared):
        raise MixedError
    return Layout(axis, block, frozenset(axes).intersection(*uniform) - {axis})


@rule("jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr checkpoint remat remat2")
def _call(eqn: Any, shapes: Any, operands: Any) -> list[Layout]:
    closed = next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params)
    return _of_program(closed, operands)


def _of_program(program: Any, operands: Sequence[Layout]) -> list[Layout]:
    """The layouts of the outputs of a program that is a parameter of an operation."""
    jaxpr, consts = opened(program)
    found: dict[Any, Layout] = dict(zip(jaxpr.invars, operands, strict=True))
    found |= zip(jaxpr.constvars, map(_of_constant, consts), strict=True)

    def read(atom: Any) -> Layout:
        return _of_constant(atom.val) if isinstance(atom, Literal) else found[atom]

    for eqn in jaxpr.eqns:
        try:
            found |= zip(eqn.outvars, _through(eqn, [read(atom) for atom in eqn.invars]), strict=True)
        except MixedError as error:
            raise MixedError(error.operation or str(Node(eqn, (), (), None, eqn.source_info.traceback))) from None
    return [read(atom) for atom in jaxpr.outvars]


@rule("cond")
def _cond(eqn: Any, shapes: Any, operands: Any) -> list[Layout]:
    which, *others = operands
    if which.axis is not None:
        raise MixedError
    results = zip(*(_of_program(branch, others) for branch in eqn.params["branches"]), strict=True)
    outs = zip(eqn.outvars, results, strict=True)
    return [joined(var.aval.shape, [var.aval.shape] * len(found), found) for var, found in outs]


@rule("scan")
def _scan(eqn: Any, shapes: Any, operands: Any) -> list[Layout]:
    first, carried = scan_counts(eqn.params)
    body, start = eqn.params["jaxpr"], first + carried
    stacked = zip(operands[start:], shapes[start:], strict=True)
    xs = [x.moved({axis: axis - 1 for axis in range(1, len(of))}) for x, of in stacked]
    carry = _carried(body, operands[:first], operands[first:][:carried], xs, shapes[first:][:carried])
    ys = zip(_of_program(body, [*operands[:first], *carry, *xs])[carried:], eqn.outvars[carried:], strict=True)
    return [*carry, *(y.moved({axis: axis + 1 for axis in range(len(var.aval.shape))}) for y, var in ys)]


@rule("while")
def _while(eqn: Any, shapes: Any, operands: Any) -> list[Layout]:
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts, start = operands[of_condition:][:of_body], of_condition + of_body
    carry = _carried(eqn.params["body_jaxpr"], consts, operands[start:], [], shapes[start:])
    if _of_program(eqn.params["cond_jaxpr"], [*operands[:of_condition], *carry])[0].axis is not None:
        raise MixedError
    return carry


def _carried(body: Any, consts: Any, carry: Any, xs: Any, shapes: Any) -> list[Layout]:
    """The layouts of the values that a loop carries, the same before and after each step."""
    carry = list(carry)
    while True:
        outs = _of_program(body, [*consts, *carry, *xs])[: len(carry)]
        new = [joined(of, [of, of], pair) for of, *pair in zip(shapes, carry, outs, strict=True)]
        if new == carry:
            return carry
        carry = new
