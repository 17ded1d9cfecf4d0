"""Traces a function of partly frozen parameters and other arguments.

The function is traced as in :func:`optax_freeze.restrict`, with the frozen and the trainable rows of a leaf as separate
inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_freeze._errors import ASKED_FOR_A_VALUE, value_error
from optax_freeze._gradient.in_parts import call_in_parts
from optax_freeze._precompute.leaf_parts import LeafParts
from optax_freeze._precompute.program import Program, flatten
from optax_freeze._spec.layout import explicit_sharding
from optax_freeze._spec.memory import is_on_host
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, TRAINABLE, RowIndex, Selection
from optax_freeze._spec.tree import HOLE, Leaf, Part, Rest, is_hole


class Input(NamedTuple):
    """An input of the program."""

    value: Any
    name: str
    why: str  # the value is not known beforehand; empty if it is known
    leaf: int | None = None  # the number of the leaf, if the input is its frozen part


TRACED = object()
"""Marks an output that is an array."""


class Traced:
    """A function of the two parts of each leaf and of arguments, with the outputs of its last trace.

    ``treedef`` is the structure of the outputs, and ``flat`` the outputs with ``TRACED`` in place of each array.
    """

    def __init__(self, fun: Any, plan: Plan, parts: Sequence[LeafParts], arguments: Any, args_treedef: Any) -> None:
        self._given = fun, plan, parts, arguments, args_treedef
        self.treedef, self.flat = None, []

    def _call(self, *arrays: Any) -> list[Any]:
        fun, plan, parts, arguments, args_treedef = self._given
        left = iter(arrays)
        leaves = zip(plan.leaves, plan.selections, parts, strict=True)
        pairs = [_traced_parts(leaf, selection, part, left) for leaf, selection, part in leaves]
        trainable, rest = (jax.tree.unflatten(plan.treedef, half) for half in zip(*pairs, strict=True))
        filled = [next(left) if argument.is_input else argument.value for argument in arguments]
        args, kwargs = jax.tree.unflatten(args_treedef, filled)
        outs, self.treedef = jax.tree.flatten(call_in_parts(fun, trainable, rest, args, kwargs))
        self.flat = [TRACED if isinstance(out, Tracer) else out for out in outs]
        return [out for out in outs if isinstance(out, Tracer)]

    def program(self, inputs: Sequence[Input]) -> Program:
        """Traces the function with these inputs."""
        try:
            closed = jax.make_jaxpr(self._call)(*(_as_argument(given.value) for given in inputs))
        except ASKED_FOR_A_VALUE as error:
            fun = self._given[0]
            raise value_error(
                "the function cannot be traced",
                at=getattr(fun, "__qualname__", type(fun).__name__),
                got=f"{type(error).__name__}: Python needs the value of a traced array",
                expected="a function that jax.jit can trace",
                fix="if Python branches on an argument, name it in `recurring` and pass a Python value",
            ) from error
        return flatten(closed, [not given.why for given in inputs])

    def again(self, inputs: Sequence[Input]) -> Program:
        """Traces the function with other inputs, and leaves ``treedef`` and ``flat`` as they are."""
        return Traced(*self._given).program(inputs)


def _as_argument(value: Any) -> Any:
    """An array on the device unchanged, and the shape of one on the host: the trace must not depend on the memory.

    Shapes get a dtype that JAX has: without 64-bit types it warns of float64, which a NumPy array may have.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        value = value.update(dtype=jax.dtypes.canonicalize_dtype(value.dtype, allow_extended_dtype=True))
    if not is_on_host(value):
        return value
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=explicit_sharding(value))


def inputs_of(plan: Plan, parts: Sequence[LeafParts]) -> list[Input]:
    """The arrays of the parameters: for each leaf its trainable part, its frozen part and its mask, if it has them."""
    inputs = []
    for i, (leaf, selection, part) in enumerate(zip(plan.leaves, plan.selections, parts, strict=True)):
        trains = f"{leaf.path or 'the parameters'}, which trains"
        if selection is not FROZEN:
            value = _or_struct(part.trainable, leaf, selection.take)
            inputs.append(Input(value, leaf.path, trains))
        if selection is FROZEN and leaf.dtype is not None:
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            why = f"{leaf.path}, a random key among the parameters" if is_key else ""
            inputs.append(Input(_or_struct(part.frozen, leaf), leaf.path, why, i))
        elif selection.in_part:
            why = "" if isinstance(selection, RowIndex) else trains
            inputs.append(Input(_or_struct(part.frozen, leaf), leaf.path, why, i))
            inputs += [Input(mask, f"the mask of {leaf.path}", trains) for mask in jax.tree.leaves(selection)]
    return inputs


def _or_struct(value: Any, leaf: Leaf, part: Callable[[Any], Any] = lambda whole: whole) -> Any:
    """The array of a leaf or of its part, or its shape if the value is a hole."""
    value = jax.eval_shape(part, leaf.struct) if is_hole(value) else value
    return value.values if isinstance(value, Part) else value


def _traced_parts(leaf: Leaf, selection: Selection, part: LeafParts, arrays: Any) -> tuple[Any, Any]:
    """The leaf of the trainable tree and of the rest, as :func:`optax_freeze.partition` returns them, with tracers."""
    if selection is FROZEN:
        return HOLE, part.frozen if leaf.dtype is None else next(arrays)
    if selection is TRAINABLE:
        return next(arrays), HOLE
    trainable, frozen = next(arrays), next(arrays)
    if selection.part_index is not None:
        trainable = Part(trainable, selection.part_index, leaf.shape)
    structure = jax.tree.structure(selection)
    return trainable, Rest(frozen, jax.tree.unflatten(structure, [next(arrays) for _ in range(structure.num_leaves)]))
