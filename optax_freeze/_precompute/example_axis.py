"""Finds the axis of the examples of a batch in each value of a program, and the operations that mix examples.

For the entries of one example, an operation must need those of the same example, by the table of operations, and do the
same computation. Of an operand that all examples share, it must need the same region, or entries that are equal for all
examples: otherwise a result would depend on the position in the batch.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._jax_internals import Branches, Call, ClosedJaxpr, Loop, While, inside
from optax_freeze._precompute.graph import Graph, Key
from optax_freeze._precompute.inputs import Input
from optax_freeze._precompute.words import values_of
from optax_freeze._program.operations import computation
from optax_freeze._program.propagation import settled
from optax_freeze._program.regions import EVERYTHING, Region, Rows
from optax_freeze._program.trace import Equation, Program, flatten


class Examples(NamedTuple):
    """The position of the examples in a value: along ``axis``, ``block`` entries each."""

    axis: int
    block: int = 1

    def rows(self, k: int) -> Rows:
        """The entries of one example."""
        return Rows(self.axis, self.block * k + np.arange(self.block))

    def moved(self, by: int) -> "Examples":
        """The position after an axis has been added before the others, or removed."""
        if self.axis + by < 0:
            raise Mixed
        return self._replace(axis=self.axis + by)

    def first(self, array: Any) -> Any:
        """An array with the examples along its first axis."""
        axis, shape = self.axis, array.shape
        if self.block > 1:
            array = array.reshape(*shape[:axis], shape[axis] // self.block, self.block, *shape[axis + 1 :])
        return jnp.moveaxis(array, axis, 0) if axis else array

    def back(self, array: Any, shape: tuple[int, ...]) -> Any:
        """An array of this shape, given :meth:`first` of it."""
        array = jnp.moveaxis(array, 0, self.axis) if self.axis else array
        return array.reshape(shape) if self.block > 1 else array


class Mixed(Exception):  # noqa: N818
    """Stands for a value to which several examples contribute, and is raised where an operation mixes them."""

    def __init__(self, operation: str = "") -> None:
        self.operation = operation  # with its source line


class _Value(NamedTuple):
    """Where the examples are in a value; None if all examples share it.

    A shared value has equal entries for all examples where they are at a position if other values do: ``needs`` returns
    these values, each with a position, or None if the entries are not equal.
    """

    at: Examples | Mixed | None
    needs: "Callable[[Examples], _Needs | None]" = lambda at: None

    def has(self, at: Examples, known: "set[Any] | None" = None) -> bool:
        """Whether the entries of the examples are at this position, or would be the same there; adds to ``known``."""
        found, left, known = set(), [(self, at)], set() if known is None else known
        while left:
            if (each := left.pop()) in found or each in known:
                continue
            found.add(each)
            value, at = each
            needed = value.needs(at) if value.at is None else [] if value.at == at else None
            if needed is None:
                return False
            left += needed
        known |= found
        return True

    def moved(self, by: int) -> "_Value":
        """The value after an axis has been added before the others, or removed."""
        if isinstance(self.at, Examples):
            return _Value(self.at.moved(by))
        return self._replace(needs=lambda at: [(self, at.moved(-by))] if at.axis >= by else None)

    def joined(self, other: "_Value") -> "_Value":
        """A value that may be either of two."""
        at = other.at if self.at is None else self.at
        if at is None:
            return _Value(None, lambda at: [(self, at), (other, at)])
        if isinstance(at, Examples) and self.has(at) and other.has(at):
            return _Value(at)
        raise Mixed


_Needs: TypeAlias = list[tuple[_Value, Examples]]


def examples_of(graph: Graph, inputs: Sequence[Input], axis: int, count: int) -> dict[Key, Any]:
    """Where the ``count`` examples are in each region: Examples, Mixed, or None if all examples share it."""
    program = graph.program
    analysis = _Analysis(program, [_Value(Examples(axis) if given.is_batch else None) for given in inputs], count)
    analysis.run({id(node.eqn): node.eqn for node in graph.nodes if node.is_known}.values())

    def of_region(value: int, region: Region) -> Any:
        at = analysis.value(program.like(value)).at
        return Mixed() if isinstance(at, Examples) and region is not EVERYTHING and region.axis == at.axis else at

    return {key: of_region(*key) for key in graph.known}


class _Analysis:
    """The search for the examples in the values of one program."""

    def __init__(self, program: Program, inputs: Sequence[_Value], count: int) -> None:
        self.program, self.count, self.known = program, count, set()
        self.values = dict(enumerate(inputs))
        self.values |= {number: self._of_constant(const) for number, const in program.consts.items()}

    def run(self, eqns: Iterable[Equation]) -> None:
        """Finds the examples in the results of operations; those that are mixed are marked."""
        for eqn in eqns:
            operands = [self.value(x) for x in eqn.inputs]
            mixed = next((x for x in operands if isinstance(x.at, Mixed)), None)
            try:
                found = [mixed] * len(eqn.outputs) if mixed else self._through(eqn, operands)
            except Mixed as error:
                found = [_Value(Mixed(error.operation or str(eqn)))] * len(eqn.outputs)
            self.values |= zip(eqn.outputs, found, strict=True)

    def value(self, x: Any) -> _Value:
        if not isinstance(x, int):
            return self._of_constant(x.val)
        return self.values.get(x, _Value(None))

    def _of_constant(self, const: Any) -> _Value:
        """A constant is shared, and compared bit by bit."""

        def needs(at: Examples) -> _Needs | None:
            array = values_of(const)
            if array is None or not 0 < array.size <= 2**20 or at.axis >= array.ndim:
                return None
            rows = np.moveaxis(array, at.axis, 0).reshape(self.count, -1)
            return [] if len({row.tobytes() for row in rows}) == 1 else None

        return _Value(None, needs)

    def _through(self, eqn: Equation, operands: Sequence[_Value]) -> list[_Value]:
        """Where the examples are in the results of an operation."""
        if eqn.primitive is jax.lax.optimization_barrier_p:
            return list(operands)
        found = inside(eqn)
        if isinstance(found, Call):
            return self.inside(found.program, operands)
        if isinstance(found, Branches):
            return _branches(self, found, operands)
        if isinstance(found, Loop):
            return _loop(self, found, operands)
        if isinstance(found, While):
            return _while(self, found, operands)
        return [self._of_result(eqn, operands, place) for place in range(len(eqn.outputs))]

    def _of_result(self, eqn: Equation, operands: Sequence[_Value], place: int) -> _Value:
        if all(x.at is None for x in operands):
            return _Value(None, functools.cache(lambda at: self._needs(eqn, operands, place, at)))
        shape = getattr(eqn.avals_out[place], "shape", ())
        for axis, size in enumerate(shape):
            at = Examples(axis, size // self.count)
            needed = self._needs(eqn, operands, place, at) if size % self.count == 0 else None
            if needed is not None and all(value.has(at, self.known) for value, at in needed):
                return _Value(at)
        raise Mixed

    def _needs(self, eqn: Equation, operands: Sequence[_Value], place: int, at: Examples) -> _Needs | None:
        """Where the examples must be in the operands, so that each result is computed from those of the same example.

        None if some result is not.
        """
        numbers = sorted({0, self.count - 1})
        wanted = [[at.rows(k) if i == place else None for i in range(len(eqn.outputs))] for k in numbers]
        found: list[Any] = [computation(eqn, regions) for regions in wanted]
        if None in found:
            return None
        needed = []
        for operand, regions in zip(operands, zip(*(each.regions for each in found), strict=True), strict=True):
            first = regions[0]
            if operand.at is None and all(region == first for region in regions):
                continue
            if not isinstance(first, Rows):
                return None
            if self.count == 1 and eqn.primitive is jax.lax.reshape_p and operand.at is not None:
                continue  # all of an array has no other place for one example, whichever axis the rows are along
            at = Examples(first.axis, first.count)
            if regions != tuple(map(at.rows, numbers)):
                return None
            needed.append((operand, at))
        return needed if _is_one_computation(eqn, found) else None

    def inside(self, closed: ClosedJaxpr, operands: Sequence[_Value]) -> list[_Value]:
        """Where the examples are in the results of a program that is a parameter of an operation."""
        program = flatten(closed)
        found = _Analysis(program, operands, self.count)
        found.run(program.eqns)
        outs = [found.value(x) for x in program.outputs]
        for out in outs:
            if isinstance(out.at, Mixed):
                raise Mixed(out.at.operation)
        return outs

    def carried(self, body: Any, consts: Sequence[_Value], carry: Sequence[_Value], xs: Sequence[_Value]) -> Any:
        """Where the examples are in the values that a loop carries, the same at each step, and in its other results."""
        step = lambda carry: self.inside(body, [*consts, *carry, *xs])  # noqa: E731
        is_same = lambda new, old: [x.at for x in new] == [x.at for x in old]  # noqa: E731
        carry = settled(carry, step, _Value.joined, is_same)
        carry = [_Value(x.at) for x in carry]  # whether the first value is the same says nothing of later ones
        return carry, step(carry)[len(carry) :]


def _is_one_computation(eqn: Equation, found: Sequence[Any]) -> bool:
    first, *others = (each.apply for each in found)
    if all(_is_same_function(first, other) for other in others):
        return True

    def text(each: Any) -> Any:
        given = zip(each.regions, eqn.avals_in, strict=True)
        operands = [r and jax.ShapeDtypeStruct(r.shape(aval.shape), aval.dtype) for r, aval in given]
        with eqn.source.scope():
            closed = jax.make_jaxpr(each.apply)(*operands)
        return str(closed), [np.asarray(const).tobytes() for const in closed.consts]

    return all(text(each) == text(found[0]) for each in found[1:])


def _is_same_function(one: Any, other: Any) -> bool:
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        args = zip(one.args, other.args, strict=False)
        is_same = one.func == other.func and one.keywords == other.keywords and len(one.args) == len(other.args)
        return is_same and all(_is_same_function(a, b) for a, b in args)
    return one == other


def _branches(analysis: _Analysis, found: Branches, operands: Sequence[_Value]) -> list[_Value]:
    which, *others = operands
    if which.at is not None:
        raise Mixed
    results = [analysis.inside(branch, others) for branch in found.programs]
    return [functools.reduce(_Value.joined, each) for each in zip(*results, strict=True)]


def _loop(analysis: _Analysis, loop: Loop, operands: Sequence[_Value]) -> list[_Value]:
    xs = [x.moved(-1) for x in operands[loop.stacked :]]
    carry, ys = analysis.carried(loop.body, operands[: loop.consts], operands[loop.consts : loop.stacked], xs)
    return [*carry, *(y.moved(1) for y in ys)]


def _while(analysis: _Analysis, loop: While, operands: Sequence[_Value]) -> list[_Value]:
    consts, carry = operands[loop.condition_consts :][: loop.body_consts], operands[loop.condition_consts :]
    carry, _ = analysis.carried(loop.body, consts, carry[loop.body_consts :], [])
    if analysis.inside(loop.condition, [*operands[: loop.condition_consts], *carry])[0].at is not None:
        raise Mixed
    return carry
