"""Divides a function of parameters and arguments into a part that can be computed beforehand and the rest."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_freeze._errors import value_error
from optax_freeze._precompute.batch_size import resized, shapes_for
from optax_freeze._precompute.cut import Cut, first_dependent, is_cheap, minimum_cut
from optax_freeze._precompute.cut_explanation import CutExplanation, Feature
from optax_freeze._precompute.digest import digest, text_of, without_count
from optax_freeze._precompute.example_axis import Examples, Mixed, examples_of
from optax_freeze._precompute.flops import flops_of_tasks
from optax_freeze._precompute.graph import Graph, Key, Node, graph
from optax_freeze._precompute.inputs import Input, parameters
from optax_freeze._program.function import Traced, as_array, needs_value
from optax_freeze._program.regions import Rows, Values
from optax_freeze._program.tasks import Schedule
from optax_freeze._spec.memory import is_on_host, to_device
from optax_freeze._spec.plan import Plan, may_stay_on_host
from optax_freeze._spec.tree import Part


class Division(NamedTuple):
    """The traced program of a function, and where it is divided."""

    plan: Plan
    traced: Traced
    graph: Graph
    inputs: list[Input]
    cut: Cut
    examples: list[Examples | None]  # in the stored values; None without an example axis
    digest: str

    @property
    def read_again(self) -> dict[int | None, Node | None]:
        """The parameters whose frozen elements are read after the cut, and the first operation that reads them.

        The operation is None if the parameter is only returned.
        """
        found: dict[int | None, Node | None] = {}
        readers = [(node, node.reads) for node in map(self.graph.nodes.__getitem__, self.cut.after)]
        for node, keys in (*readers, (None, self.graph.outputs)):
            for value, region in keys:
                if value < len(self.inputs) and self.inputs[value].is_frozen(region):
                    found.setdefault(self.inputs[value].leaf, node)
        return found

    @property
    def features(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the features."""
        return jax.eval_shape(self._by_example, list(map(self.graph.struct, self.cut.stored)))

    @property
    def explanation(self) -> CutExplanation:
        """What is computed once, what is stored, and what prevents more from being computed once."""
        made_by = {key: node for node in self.graph.nodes for key in node.writes}
        features = [
            Feature(tuple(struct.shape), struct.dtype, _bytes(struct), str(made_by[key]))
            for struct, key in zip(self.features, self.cut.stored, strict=True)
        ]
        gone = {
            leaf.path: _bytes(leaf) - selection.elements(leaf.shape) * leaf.dtype.itemsize
            for i, (leaf, selection) in enumerate(zip(self.plan.leaves, self.plan.selections, strict=True))
            if leaf.shape is not None and may_stay_on_host(selection) and i not in self.read_again
        }
        return CutExplanation(
            tuple(features),
            flops_of_tasks(self.graph.tasks(self.cut.before)),
            flops_of_tasks(self.graph.tasks(self.cut.after)),
            tuple(gone),
            sum(gone.values()),
            tuple((str(node), why) for node, why in first_dependent(self.graph, self.inputs)),
        )

    def before(self) -> list[Any]:
        """Computes the features."""
        if self.traced.program.on_host:  # the same operations, which read arrays in host memory where they need them
            tasks = graph(self.traced.program.copy(), self.inputs).schedule.of(self.cut.stored)
        else:
            tasks = self.graph.schedule._replace(tasks=self.graph.tasks(self.cut.before), outputs=self.cut.stored)
        return self._by_example(tasks.run(self._values(tasks)))

    def after(self, features: Sequence[Any]) -> Any:
        """Computes the outputs of the function from the features."""
        tasks = self.graph.schedule._replace(tasks=self.graph.tasks(self.cut.after))
        values = self._values(tasks)
        for key, array, at in zip(self.cut.stored, features, self.examples, strict=True):
            values.write(*key, array if at is None else at.back(array, self.graph.struct(key).shape))
        return self.traced.result(tasks.run(values))

    def _by_example(self, arrays: Sequence[Any]) -> list[Any]:
        """Moves the examples of stored values to the first axis."""
        return [x if at is None else at.first(x) for x, at in zip(arrays, self.examples, strict=True)]

    def _values(self, tasks: Schedule) -> Values:
        """The inputs that are given and read; the gradient treats frozen parameters as constants."""
        values = Values()
        read = {number for task in tasks.tasks for number in task.read_numbers}
        read.update(value for value, _ in tasks.outputs if isinstance(value, int))
        for i, given in enumerate(self.inputs):
            if i not in read or isinstance(given.value, jax.ShapeDtypeStruct):
                continue
            if isinstance(given.value, Part):
                assert isinstance(given.trainable, Rows)
                values.write(i, given.trainable, given.value.values)
            else:
                array = as_array(given.value if i in tasks.program.on_host else to_device(given.value))
                is_frozen = given.leaf is not None and given.trainable is None and not is_on_host(array)
                values.write_whole(i, jax.lax.stop_gradient(array) if is_frozen else array)
        return values


class _Function(NamedTuple):
    """A function to be divided, with the leaves of its arguments; constants are no inputs of the program."""

    fun: Callable[..., Any]
    plan: Plan
    treedef: Any
    leaves: Sequence[Input]

    def trace(self, inputs: Sequence[Input]) -> Traced:
        """Traces ``fun(params, *args, **kwargs)`` with these inputs, without executing anything."""

        def of_inputs(*arrays: Any) -> Any:
            given = iter(arrays)
            filled = [leaf.value if leaf.is_constant else next(given) for leaf in self.leaves]
            args, kwargs = jax.tree.unflatten(self.treedef, filled[len(self.plan.leaves) :])
            return self.fun(jax.tree.unflatten(self.plan.treedef, filled[: len(self.plan.leaves)]), *args, **kwargs)

        try:
            return Traced(of_inputs, [given.struct for given in inputs], enter_remat=False)
        except Exception as error:
            if not needs_value(error):
                raise
            raise value_error(
                "the function cannot be traced",
                at=getattr(self.fun, "__qualname__", type(self.fun).__name__),
                got=f"{type(error).__name__}: Python needs the value of a traced array",
                expected="a function that jax.jit can trace",
                fix="if Python branches on an argument, name it in `recurring` and pass a Python value",
            ) from error


def divide(
    fun: Callable[..., Any],
    plan: Plan,
    values: Sequence[Any],
    arguments: Sequence[Input],
    treedef: Any,
    example_axis: int | None,
) -> Division:
    """Divides ``fun(params, *args, **kwargs)``, given the leaves of its arguments."""
    function = _Function(fun, plan, treedef, [*parameters(plan, values), *arguments])
    inputs = [leaf for leaf in function.leaves if not leaf.is_constant]
    traced = function.trace(inputs)
    tasks = _graph(traced, inputs)
    cut, examples = _cut(tasks, inputs, example_axis)
    text = text_of(tasks, inputs, cut)
    if example_axis is not None:
        count = _count(inputs, example_axis)
        more = 2 * count or 2
        for others in _for_count(more, count, inputs, example_axis):
            with contextlib.suppress(Exception):  # these shapes do not fit, or only one number of examples does
                its = _graph(function.trace(others), others)
                is_alike = len(its.nodes) == len(tasks.nodes)  # not in `jax.shard_map`, where shapes do not vary
                its_cut = cut if is_alike else _cut(its, others, example_axis)[0]
                text = without_count(text, text_of(its, inputs, its_cut), count, more)
                break
    return Division(plan, traced, tasks, inputs, cut, examples, digest(text))


def _graph(traced: Traced, inputs: Sequence[Input]) -> Graph:
    """The tasks of a traced function; they do not depend on the memory in which its inputs are."""
    return graph(traced.program.copy(on_host=()), inputs)


def _cut(tasks: Graph, inputs: Sequence[Input], axis: int | None) -> tuple[Cut, list[Examples | None]]:
    """The minimum cut, and where the examples are in the stored values.

    Raises ``ValueError`` if nothing can be computed once, or if an operation mixes examples.
    """
    of_params, of_batch = _depends(tasks, inputs, True), _depends(tasks, inputs, False)
    trunk = [frozen and batch for frozen, batch in zip(of_params, of_batch, strict=True)]
    either = [frozen or batch for frozen, batch in zip(of_params, of_batch, strict=True)]
    dear = [here and not is_cheap(node.eqn) for node, here in zip(tasks.nodes, either, strict=True)]
    cost: dict[Key, int | None] = {key: _bytes(tasks.struct(key)) for key in tasks.known}
    at: dict[Key, Any] = dict.fromkeys(cost)
    divided = tasks
    if axis is not None:
        count = max(_count(inputs, axis), 1)
        at = examples_of(tasks, inputs, axis, count)
        cost = {key: (cost[key] or 0) // count if isinstance(at[key], Examples) else None for key in at}
        divided = tasks.without([key for key in at if isinstance(at[key], Mixed)])
        for i, node in enumerate(tasks.nodes):
            if all(at[key] is None for key in node.writes):  # all examples share the results
                dear[i] = trunk[i] = False
    cut = minimum_cut(divided, dear, cost)
    cut = cut if cut.stored else minimum_cut(divided, trunk, cost)
    _refuse_mixed([at[key] for i in cut.after if trunk[i] for key in tasks.nodes[i].writes])
    if not cut.stored:
        reasons = "; ".join(f"{node}: depends on {why}" for node, why in first_dependent(tasks, inputs)[:3])
        raise value_error(
            "there is nothing to compute once",
            at="the function",
            got=reasons or "no operation on frozen parameters and recurring arguments",
            expected="an operation that depends only on frozen parameters and recurring arguments",
            fix="freeze the layers at the input, and name in `recurring` every argument that they read",
        )
    return cut, [at[key] for key in cut.stored]


def _depends(tasks: Graph, inputs: Sequence[Input], on_params: bool) -> list[bool]:
    """For each node, whether it depends on frozen parameters, or on recurring arguments."""
    given = (key for key, known in tasks.known.items() if known and key[0] < len(inputs))
    found = {key for key in given if (inputs[key[0]].leaf is not None) == on_params}
    for node in tasks.nodes:
        if not found.isdisjoint(node.reads):
            found.update(node.writes)
    return [not found.isdisjoint(node.writes) for node in tasks.nodes]


def _refuse_mixed(examples: Sequence[Any]) -> None:
    """Raises a ``ValueError`` if several examples contribute to one of these values."""
    operations = [at.operation for at in examples if isinstance(at, Mixed)]
    if operations:
        raise value_error(
            "examples are mixed, so there are no features of single examples",
            at=next(filter(None, operations), "an operation on some of the examples"),
            got="an operation along the axis of the examples, or one without a rule that keeps them apart",
            expected="operations on each example separately, such as batch normalization with stored statistics",
            fix="use example_axis=None for the features of whole batches, whose examples must then not be shuffled",
        )


def _count(inputs: Sequence[Input], axis: int) -> int:
    """The number of examples in the batch."""
    sizes: dict[Any, str] = {}
    for given in inputs:
        if given.is_batch:
            shape = np.shape(given.value)
            sizes.setdefault(shape[axis] if axis < len(shape) else None, f"{given.name} of shape {shape}")
    if len(sizes) != 1 or None in sizes:
        raise value_error(
            "the recurring arguments have no common axis of examples",
            at=f"example_axis={axis}",
            got="; ".join(sizes.values()) or "no array",
            expected=f"arrays with the examples of the batch along axis {axis}",
            fix="put arrays that all examples share into the parameters, and freeze them; "
            "give a number as a Python number, which jax.jit must not trace (static_argnames)",
        )
    [count] = sizes
    return count


def _for_count(count: int, now: int, inputs: Sequence[Input], axis: int) -> Iterator[list[Input]]:
    """The inputs for a batch of ``count`` examples instead of ``now``, the likely ones first.

    Only the shapes of what does not recur are not known, and the operations before the cut do not read it. So they
    are the same with any of these inputs for which the function can be traced.
    """
    free = {i: np.shape(x.value) for i, x in enumerate(inputs) if x.leaf is None and x.why}
    batch = {i: resized(np.shape(x.value), [axis], count) for i, x in enumerate(inputs) if x.is_batch}
    arguments = [inputs[i].name.split("/")[0] for i in free]
    for found in shapes_for(count, [*free.values()], arguments, axis, now):
        shapes = batch | dict(zip(free, found, strict=True))
        yield [
            x
            if shapes.get(i, ()) in ((), np.shape(x.value))
            else x._replace(value=jax.ShapeDtypeStruct(shapes[i], x.value.dtype))
            for i, x in enumerate(inputs)
        ]


def _bytes(of: Any) -> int:
    """The bytes of an array, a shape or a leaf."""
    return math.prod(of.shape) * of.dtype.itemsize
