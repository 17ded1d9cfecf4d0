"""Calls a function with the trainable part and the rest, so that ``jax.grad`` computes only the trainable rows.

A leaf frozen by rows is put together, and the function is traced. In reverse mode, the tasks for the wanted rows that
do not depend on the cotangents are evaluated in the forward pass, and what the others read is stored.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_freeze._gradient.custom_derivative import NoReverseModeError, call_with_backward
from optax_freeze._gradient.gradient_program import divided, gradient_schedule
from optax_freeze._gradient.leaf_in_rows import CompleteLeaf, DeferredLeaf, LeafInRows, types_of
from optax_freeze._jax_internals import ClosedJaxpr, evaluate_program, inside
from optax_freeze._jax_tracing import lacks_reverse_mode, needs_value
from optax_freeze._program.chain import Chain, Recipes
from optax_freeze._program.from_host import evaluate
from optax_freeze._program.host_array import HostArray
from optax_freeze._program.operations import Cost, is_cheap, rule_of
from optax_freeze._program.regions import EVERYTHING, Region, Values, names_of, numbers_of, region_of, zero_outside
from optax_freeze._program.tasks import ALWAYS, Context, Schedule
from optax_freeze._program.trace import Equation, is_inexact
from optax_freeze._program.traced_function import Traced, as_argument, as_array, as_traced, filled
from optax_freeze._program.walk import schedule
from optax_freeze._spec.memory_kinds import is_on_host, to_device, to_memory_of
from optax_freeze._spec.partition import assemble, put_part
from optax_freeze._spec.selection import RowSelection
from optax_freeze._spec.sharding import cast_to_vary, eval_types, varies, zeros
from optax_freeze._spec.tree import PyTree, Rest

T = TypeVar("T")


def call_restricted(fun: Callable[..., T], trainable: PyTree, rest: PyTree, complete: bool = False) -> T:
    """``fun(combine(trainable, rest))``; if ``complete``, the arrays of ``rest`` contain the trainable rows."""

    def combine_part(rest: Rest, part: Any) -> Any:
        if isinstance(rest.selection, RowSelection):
            array = jnp.asarray(rest.array)
            rows = jnp.asarray(part.values, array.dtype if rest.dtype is None else rest.dtype)
            axes = varies(jax.typeof(array)) | varies(jax.typeof(rows))
            cls = CompleteLeaf if complete and not is_on_host(array) else LeafInRows
            return cls(cast_to_vary(array, axes), rest.selection, cast_to_vary(rows, axes))
        return put_part(rest, part)

    leaves, treedef = assemble(trainable, rest, combine_part)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, LeafInRows) or is_on_host(leaf)]

    def of_leaves(*arrays: Any) -> T:
        filled = dict(zip(places, arrays, strict=True))
        return fun(jax.tree.unflatten(treedef, [filled.get(i, leaf) for i, leaf in enumerate(leaves)]))

    found = [leaves[i] for i in places]
    if not places:
        return of_leaves()
    try:
        call = _Call(of_leaves, found)
    except Exception as error:
        if not needs_value(error):
            raise
    else:
        with contextlib.suppress(jax.errors.UnexpectedTracerError):  # only JAX can differentiate the function
            return call(found)
    return of_leaves(*(x.whole() if isinstance(x, LeafInRows) else to_device(x) for x in found))


def _reads_all(eqn: Equation) -> bool:
    return inside(eqn) is None and not is_cheap(eqn) and rule_of(eqn).cost is not Cost.BARRIER


class _Inputs(NamedTuple):
    """The arrays of a call, all explicit: a custom derivative cannot close over tracers."""

    rows: list[Any]  # of each leaf; None of one that is not frozen by rows
    arrays: list[Any]  # of each leaf
    numbers: list[list[Any]]  # of dynamic rows
    others: list[Any]  # the other tracers that the function reads


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Backward:
    """What the backward pass evaluates, and for which of the inputs."""

    schedule: Schedule
    perturbed: _Inputs
    stored: Sequence[tuple[int, Region]]  # what it reads that the forward pass computes
    recipes: Recipes  # of these


class _Call:
    """One call of a function of leaves that are frozen by rows or in host memory.

    Attributes:
      names: of the dynamic rows of each leaf.
      leaves: the types of the leaves that are frozen by rows, in parts; None for others.
      whole: the numbers of leaves, and of other values, of which an operation reads everything.
      others: the numbers of the other tracers that the function reads.
    """

    def __init__(self, fun: Callable[..., Any], leaves: Sequence[Any]) -> None:
        in_rows = [x if isinstance(x, LeafInRows) else None for x in leaves]
        self.names = names_of(x and x.selection for x in in_rows)
        self.leaves, structs = eval_types(types_of, in_rows)
        self.structs = [as_argument(x) if struct is None else struct for x, struct in zip(leaves, structs, strict=True)]
        self.traced = Traced(fun, self.structs)
        self.program = self.traced.program
        # Loops and lookups read rows, and barriers nothing; what cheap operations read is known when they are read.
        self.whole = {number for eqn in self.program.eqns if _reads_all(eqn) for number in eqn.reads}
        self.others = [number for number, const in self.program.consts.items() if isinstance(const, Tracer)]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        in_rows = [x if isinstance(x, LeafInRows) else None for x in leaves]
        inputs = _Inputs(
            [x and x.rows for x in in_rows],
            [as_array(x.array if isinstance(x, LeafInRows) else x) for x in leaves],
            [jax.tree.leaves(x.selection) if x else [] for x in in_rows],
            [self.program.consts[number] for number in self.others],
        )
        return self.traced.result(call_with_backward(self.evaluate, self.forward, self.backward, inputs))

    def given(self, inputs: _Inputs, was_read: bool = False) -> list[Any]:
        """The leaves, of which parts are read, or put together."""
        found, is_mapped = [], jax.sharding.get_abstract_mesh().manual_axes
        each = zip(self.leaves, self.structs, inputs.arrays, inputs.rows, inputs.numbers, strict=True)
        for i, (leaf, struct, array, rows, numbers) in enumerate(each):
            # Inside shard_map, rows whose numbers vary over the mesh would have another type than the leaf.
            on_host = is_on_host(array)
            array = HostArray(array, (lambda _: True) if was_read else None) if on_host else array
            if leaf is not None and not on_host and (i in self.whole or is_mapped or leaf.is_read_whole):
                array = leaf.put_together(array, rows, numbers)
            elif leaf is not None:
                array = DeferredLeaf(leaf, array, rows, numbers, struct)
            found.append(array)
        return found

    def evaluate(self, inputs: _Inputs) -> list[Any]:
        """The outputs of the function."""
        values = Values(dict(enumerate(self.given(inputs))) | dict(zip(self.others, inputs.others, strict=True)))
        tasks = schedule(self.program, [(value, EVERYTHING, ALWAYS) for value in self.program.outputs])
        return evaluate(tasks.run, values)

    def forward(self, inputs: _Inputs, perturbed: _Inputs) -> tuple[list[Any], Any]:
        """The outputs, and what the backward pass reads beside the inputs."""
        outs, context = len(self.program.outputs), self._context(inputs)
        forward, backward = self._gradient(perturbed, inputs.others)
        given = [*self.given(inputs), *inputs.others]
        found = evaluate(lambda values: forward.run(values, context), Values(dict(enumerate(given))), outs)
        # An array of the device that was computed anyway is stored; what only loops read is computed again.
        stored = [x.computed if isinstance(x, Chain) and x.computed is not None else x for x in found[outs:]]
        recipes = Recipes(stored, given, arrays := [])
        return found[:outs], (_Backward(backward, perturbed, forward.outputs[outs:], recipes), arrays)

    def backward(self, inputs: _Inputs, residuals: Any, cotangents: Sequence[Any]) -> _Inputs:
        """The cotangents of the perturbed inputs, given those of the outputs."""
        of, arrays = residuals
        context, given = self._context(inputs), [*self.given(inputs, True), *inputs.others]
        values = Values(dict(enumerate([*given, *cotangents])))
        for (number, region), stored in zip(of.stored, of.recipes(given, arrays), strict=True):
            values.write(number, context.bound(region), stored)
        grads = iter(evaluate(lambda values: of.schedule.run(values, context), values))
        found = _Inputs([], [], [[None] * len(each) for each in inputs.numbers], [])
        marks = zip(self.leaves, of.perturbed.rows, of.perturbed.arrays, inputs.numbers, inputs.arrays, strict=True)
        for leaf, in_rows, in_array, numbers, given in marks:
            grad = next(grads) if in_rows or in_array else None
            rows, array = grad, None
            if leaf is None:  # frozen as a whole, in host memory
                array = grad
            elif in_array:
                selection = leaf.with_numbers(numbers)
                part = selection.take(grad)
                frozen = dataclasses.replace(part, values=jnp.zeros_like(part.values))
                rows, array = part.values, selection.put(grad, frozen)
            elif in_rows:
                rows = zero_outside(leaf.with_numbers(numbers), grad)
            found.rows.append(rows if in_rows else None)
            found.arrays.append(array if array is None else to_memory_of(given, array))
        found.others.extend(next(grads) if here else None for here in of.perturbed.others)
        return found

    def _context(self, inputs: _Inputs) -> Context:
        each = zip(self.leaves, inputs.numbers, strict=True)
        return Context(numbers=numbers_of(self.names, (x and x.with_numbers(numbers) for x, numbers in each)))

    def _gradient(self, perturbed: _Inputs, others: Sequence[Any]) -> tuple[Schedule, Schedule]:
        """Traces the outputs, and the gradients with respect to what is perturbed.

        Raises ``UnexpectedTracerError`` if a custom derivative holds tracers, which no program can have as arguments.
        """
        closed = self.traced.closed
        is_tracer = [isinstance(const, Tracer) for const in closed.consts]
        is_out_inexact = [is_inexact(aval) for aval in closed.out_avals]
        of_leaf = [bool(a or b) for a, b in zip(perturbed.rows, perturbed.arrays, strict=True)]
        marks = [*of_leaf, *perturbed.others]

        def value_and_vjp(*given: Any) -> Any:
            arrays, cotangents = given[: len(marks)], given[len(marks) :]

            def of_perturbed(some: Sequence[Any]) -> Any:
                inputs = filled(arrays, marks, some)
                consts = filled(closed.consts, is_tracer, inputs[len(of_leaf) :])
                outs = evaluate_program(ClosedJaxpr(closed.jaxpr, consts), *inputs[: len(of_leaf)])
                return list(compress(outs, is_out_inexact)), outs

            _, vjp, outs = jax.vjp(of_perturbed, list(compress(arrays, marks)), has_aux=True)
            return as_traced([*outs, *vjp(list(cotangents))[0]])

        cotangents = [zeros(aval) for aval in compress(closed.out_avals, is_out_inexact)]
        try:
            traced = Traced(value_and_vjp, [*self.structs, *others, *cotangents])
        except ValueError as error:
            if not lacks_reverse_mode(error):
                raise
            raise NoReverseModeError from error
        if any(isinstance(const, Tracer) for const in traced.closed.consts):
            raise jax.errors.UnexpectedTracerError(
                "a jax.custom_vjp or custom_jvp function closes over a value of the function that is differentiated; "
                "pass the value to it as an argument"
            )
        leaves = zip(self.names, self.leaves, perturbed.rows, perturbed.arrays, strict=True)
        regions = [EVERYTHING if b else region_of(x.selection, name) for name, x, a, b in leaves if a or b]
        regions += [EVERYTHING for here in perturbed.others if here]
        of_cotangents = range(len(of_leaf) + len(others), traced.program.num_inputs)
        wanted = [(place, region, ALWAYS) for place, region in enumerate(regions)]
        whole = gradient_schedule(traced.program, len(wanted), wanted)
        return divided(whole, len(self.program.outputs), of_cotangents)
