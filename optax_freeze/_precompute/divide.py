"""Divides a function of parameters and arguments into a part that can be computed beforehand and the rest.

The function is traced as in :func:`optax_freeze.restrict`, with the frozen and the trainable rows of a leaf as separate
inputs. So the steps of a ``scan`` over frozen rows can be computed beforehand.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import value_error
from optax_freeze._gradient.frozen_array import FrozenArray
from optax_freeze._precompute import example_axis_rules as example_axis_rules
from optax_freeze._precompute.arguments import Argument
from optax_freeze._precompute.batch_size import resized, shapes_for
from optax_freeze._precompute.cut import Cut, NoCut, first_dependent, is_cheap, minimum_cut
from optax_freeze._precompute.digest import digest, text_of, without_count
from optax_freeze._precompute.example_axis import Layout, Mixed, layouts
from optax_freeze._precompute.leaf_parts import LeafParts
from optax_freeze._precompute.program import Node, Program
from optax_freeze._precompute.trace import TRACED, Input, Traced, inputs_of
from optax_freeze._spec.memory import is_on_host
from optax_freeze._spec.plan import Plan


class Division(NamedTuple):
    """The traced program of a function, and where it is divided."""

    program: Program
    inputs: list[Input]
    plan: Plan
    cut: Cut
    layouts: list[Any]  # of the stored values; None without an example axis
    digest: str
    treedef: Any
    flat: list[Any]

    @property
    def read_again(self) -> dict[int, Node | None]:
        """For each leaf whose frozen part is read after the cut, the first operation that reads it.

        The operation is None if the frozen part is only returned.
        """
        found: dict[int, Node | None] = {}
        readers = [(node, node.reads) for node in self.cut.after]
        for node, values in (*readers, (None, {x for x in self.program.outputs if isinstance(x, int)})):
            for value in values:
                if value < len(self.inputs) and (leaf := self.inputs[value].leaf) is not None:
                    found.setdefault(leaf, node)
        return found

    @property
    def stopped_by(self) -> list[tuple[Node, str]]:
        """On each path, the first operation that cannot be computed beforehand, and why."""
        return first_dependent(self.program, [given.why for given in self.inputs])

    @property
    def features(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the features."""
        return jax.eval_shape(lambda arrays: self._by_example(arrays), [self._struct(v) for v in self.cut.stored])

    def before(self) -> list[Any]:
        """Computes the features."""
        known = {i: value for i, value in self._values.items() if not self.inputs[i].why}
        return self._by_example(self.program.evaluate(self.cut.before, known, self.cut.stored))

    def after(self, features: Sequence[Any]) -> Any:
        """Computes the outputs of the function from the features."""
        stored = zip(self.cut.stored, self._by_batch(features), strict=True)
        values = {**self._values, **dict(stored)}
        outs = iter(self.program.evaluate(self.cut.after, values, self.program.outputs))
        return jax.tree.unflatten(self.treedef, [next(outs) if leaf is TRACED else leaf for leaf in self.flat])

    @property
    def _values(self) -> dict[int, Any]:
        """The inputs by number. If a frozen one is in host memory, all frozen ones are read as late as possible."""
        late = any(is_on_host(given.value) for given in self.inputs)
        return {
            i: FrozenArray(given.value, is_late=True, on_host=is_on_host(given.value))
            if late and given.leaf is not None and isinstance(given.value, jax.Array)
            else given.value
            for i, given in enumerate(self.inputs)
        }

    def _struct(self, value: int) -> jax.ShapeDtypeStruct:
        aval = self.program.avals[value]
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    def _by_example(self, arrays: Sequence[Any]) -> list[Any]:
        """Moves the examples of stored values to the first axis."""
        return [_examples_first(array, at) for array, at in zip(arrays, self.layouts, strict=True)]

    def _by_batch(self, features: Sequence[Any]) -> list[Any]:
        """Moves the examples of features back to where the program has them."""
        given = zip(features, self.layouts, self.cut.stored, strict=True)
        return [_as_in_program(array, at, self.program.avals[value].shape) for array, at, value in given]


def _examples_first(array: Any, at: Layout | None) -> Any:
    if at is None:
        return array
    axis, shape = at.axis or 0, array.shape
    if at.block > 1:
        array = array.reshape(*shape[:axis], shape[axis] // at.block, at.block, *shape[axis + 1 :])
    return jnp.moveaxis(array, axis, 0) if axis else array


def _as_in_program(array: Any, at: Layout | None, shape: tuple[int, ...]) -> Any:
    if at is None:
        return array
    array = jnp.moveaxis(array, 0, at.axis) if at.axis else array
    return array.reshape(shape) if at.block > 1 else array


def divide(
    fun: Callable[..., Any],
    plan: Plan,
    parts: Sequence[LeafParts],
    arguments: Sequence[Argument],
    args_treedef: Any,
    example_axis: int | None,
) -> Division:
    """Traces ``fun(params, *args, **kwargs)`` without executing anything, and divides its program."""
    inputs = inputs_of(plan, parts)
    traced = Traced(fun, plan, parts, arguments, args_treedef)
    names = [f"parameters {given.name}" for given in inputs]
    of_params = len(inputs)
    for argument in arguments:
        if argument.is_input:
            why = "" if argument.recurs else f"{argument.name}, which does not recur"
            inputs.append(Input(argument.value, argument.name, why))
            names.append(f"arguments {argument.name}")
    program = traced.program(inputs)
    at = _layouts(program, inputs, of_params, example_axis) if example_axis is not None else None
    cut = _divided(program, inputs, of_params, at)
    stored_at = [None if at is None else at[value] for value in cut.stored]
    text = text_of(program, names, cut)
    if example_axis is not None:
        count = _examples(program, inputs, at)
        more = 2 * count or 2
        for others in _inputs_for(more, inputs, of_params, example_axis, count):
            with contextlib.suppress(Exception):  # these shapes do not fit, or only one number of examples does
                other = traced.again(others)
                if len(other.nodes) == len(program.nodes):
                    places = {id(node): i for i, node in enumerate(program.nodes)}
                    its_cut = cut._replace(before=[other.nodes[places[id(node)]] for node in cut.before])
                else:  # inside `jax.shard_map`, where shapes do not vary over the mesh
                    its_cut = _divided(other, inputs, of_params, _layouts(other, inputs, of_params, example_axis))
                text = without_count(text, text_of(other, names, its_cut), count, more)
                break
    return Division(program, inputs, plan, cut, stored_at, digest(text), traced.treedef, traced.flat)


def _inputs_for(count: int, inputs: Sequence[Input], of_params: int, axis: int, now: int) -> Iterator[list[Input]]:
    """The inputs for a batch of ``count`` examples instead of ``now``, the likely ones first.

    Only the shapes of what does not recur are not known, and the operations before the cut do not read it. So they are
    the same with any of these inputs for which the function can be traced.
    """
    shapes = [np.shape(given.value) for given in inputs]
    free = [i for i, given in enumerate(inputs) if i >= of_params and given.why]
    arguments = [inputs[i].name.split("/")[0] for i in free]
    for found in shapes_for(count, [shapes[i] for i in free], arguments, axis, now):
        new = dict(zip(free, found, strict=True))
        new |= {i: resized(shapes[i], [axis], count) for i in range(of_params, len(inputs)) if i not in new}
        yield [
            given
            if new.get(i, shapes[i]) == shapes[i]
            else given._replace(value=jax.ShapeDtypeStruct(new[i], given.value.dtype))
            for i, given in enumerate(inputs)
        ]


def _layouts(program: Program, inputs: Sequence[Input], of_params: int, axis: int) -> list[Layout | Mixed | None]:
    """The axis of the examples in each value that is known beforehand."""
    sizes: dict[int | None, str] = {}
    given = []
    for i, (each, aval) in enumerate(zip(inputs, program.avals, strict=False)):
        shape = tuple(aval.shape)
        is_batch = i >= of_params and not each.why
        given.append(Layout(axis if is_batch else None))
        if is_batch:
            sizes.setdefault(shape[axis] if axis < len(shape) else None, f"{each.name} of shape {shape}")
    if len(sizes) != 1 or None in sizes:
        raise value_error(
            "the recurring arguments have no common axis of examples",
            at=f"example_axis={axis}",
            got="; ".join(sizes.values()) or "no array",
            expected=f"arrays with the examples of the batch along axis {axis}",
            fix="put arrays that all examples share into the parameters, and freeze them; "
            "give a number as a Python number, which jax.jit must not trace (static_argnames)",
        )
    return layouts(program, given)


def _examples(program: Program, inputs: Sequence[Input], at: Any) -> int:
    """The number of examples in the batch."""
    return next(program.avals[i].shape[at[i].axis] for i in range(len(inputs)) if at[i].axis is not None)


def _divided(program: Program, inputs: Sequence[Input], of_params: int, at: list[Any] | None) -> Cut:
    """The minimum cut of a program; an error if nothing can be computed once, or if an operation mixes examples."""
    of_params_or_batch, of_trunk = _dependent(program, inputs, of_params)
    cheap = [is_cheap(node.eqn) or not here for node, here in zip(program.nodes, of_params_or_batch, strict=True)]
    if at is None:
        cost: list[int | None] = [_bytes(aval) for aval in program.avals]
    else:
        count = _examples(program, inputs, at)
        cost = [
            _bytes(aval) // max(count, 1) if isinstance(x, Layout) and x.axis is not None else None
            for aval, x in zip(program.avals, at, strict=True)
        ]
        for i, node in enumerate(program.nodes):
            if all(isinstance(at[value], Layout) and at[value].axis is None for value in node.outputs):
                cheap[i], of_trunk[i] = True, False
    found = minimum_cut(program, [not each for each in cheap], cost)
    if isinstance(found, Cut) and not found.stored:
        found = minimum_cut(program, of_trunk, cost)
    if at is not None:
        trunk = {id(node) for node, here in zip(program.nodes, of_trunk, strict=True) if here}
        mixed = (
            [found.value] if isinstance(found, NoCut) else [v for n in found.after if id(n) in trunk for v in n.outputs]
        )
        _refuse_mixed([at[value] for value in mixed])
    assert isinstance(found, Cut)
    if not found.stored:
        reasons = "; ".join(
            f"{node}: depends on {why}" for node, why in first_dependent(program, [given.why for given in inputs])[:3]
        )
        raise value_error(
            "there is nothing to compute once",
            at="the function",
            got=reasons or "no operation on frozen parameters and recurring arguments",
            expected="an operation that depends only on frozen parameters and recurring arguments",
            fix="freeze the layers at the input, and name in `recurring` every argument that they read",
        )
    return found


def _refuse_mixed(layouts: Sequence[Any]) -> None:
    """Raises a ``ValueError`` if several examples contribute to one of these values."""
    operation = next((layout.operation for layout in layouts if isinstance(layout, Mixed)), None)
    if operation is not None:
        raise value_error(
            "examples are mixed, so there are no features of single examples",
            at=operation,
            got="an operation along the axis of the examples, or one without a rule that keeps them apart",
            expected="operations on each example separately, such as batch normalization with stored statistics",
            fix="use example_axis=None for the features of whole batches, whose examples must then not be shuffled",
        )


def _bytes(aval: Any) -> int:
    return int(np.prod(aval.shape, dtype=np.int64)) * aval.dtype.itemsize


def _dependent(program: Program, inputs: Sequence[Input], of_params: int) -> tuple[list[bool], list[bool]]:
    """For each operation, whether it depends on frozen parameters or on recurring arguments, and whether on both."""
    frozen = {i for i in range(of_params) if not inputs[i].why}
    batch = {i for i in range(of_params, len(inputs)) if not inputs[i].why}
    for node in program.nodes:
        for found in (frozen, batch):
            if not found.isdisjoint(node.reads):
                found.update(node.outputs)
    either, both = (
        [not found.isdisjoint(node.outputs) for node in program.nodes] for found in (frozen | batch, frozen & batch)
    )
    return either, both
