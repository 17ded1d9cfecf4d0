"""Divides a function of parameters and arguments into a part that can be computed beforehand and the rest."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_freeze._errors import value_error
from optax_freeze._precompute.arguments import Argument
from optax_freeze._precompute.batch_size import resized, shapes_for
from optax_freeze._precompute.cut import Cut, NoCut, first_dependent, is_cheap, minimum_cut
from optax_freeze._precompute.digest import digest, text_of, without_count
from optax_freeze._precompute.example_axis import Examples, Mixed, examples_of
from optax_freeze._precompute.graph import Graph, Node, graph
from optax_freeze._precompute.trace import Input, inputs_of, traced
from optax_freeze._program.function import Traced, as_array
from optax_freeze._program.regions import EVERYTHING, Region, Values
from optax_freeze._program.tasks import Schedule
from optax_freeze._spec.memory import is_on_host, to_device
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.tree import Part


class Division(NamedTuple):
    """The traced program of a function, and where it is divided."""

    plan: Plan
    traced: Traced
    graph: Graph
    on_host: Graph | None  # the graph of arrays in host memory, if there are any
    inputs: list[Input]
    cut: Cut
    examples: list[Examples | None]  # in the stored values; None without an example axis
    digest: str

    @property
    def read_again(self) -> dict[int, Node | None]:
        """For each leaf with frozen elements that are read after the cut, the first operation that reads them.

        The operation is None if the leaf is only returned.
        """
        found: dict[int, Node | None] = {}
        readers = [(node, node.reads) for node in self.cut.after]
        for node, numbers in (*readers, (None, self.graph.outputs)):
            for value, region in (self.graph.regions[number] for number in numbers):
                leaf = self.inputs[value].leaf if value < len(self.inputs) else None
                if leaf is not None and self.inputs[value].is_frozen(region):
                    found.setdefault(leaf, node)
        return found

    @property
    def stopped_by(self) -> list[tuple[Node, str]]:
        """On each path, the first operation that cannot be computed beforehand, and why."""
        return first_dependent(self.graph, [given.why for given in self.inputs])

    @property
    def features(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the features."""
        return jax.eval_shape(lambda arrays: self._by_example(arrays), self._structs)

    def before(self) -> list[Any]:
        """Computes the features."""
        tasks = self.graph.tasks(self.cut.before, self.cut.stored)
        if self.on_host is not None:  # the same operations, which read arrays in host memory where they need them
            tasks = self.on_host.schedule.of(tasks.outputs)
        return self._by_example(tasks.run(self._values(tasks)))

    def after(self, features: Sequence[Any]) -> Any:
        """Computes the outputs of the function from the features."""
        tasks = self.graph.schedule._replace(tasks=[node.task for node in self.cut.after])
        values = self._values(tasks)
        for number, array in zip(self.cut.stored, self._by_batch(features), strict=True):
            values.write(*self.graph.regions[number], array)
        return self.traced.result(tasks.run(values))

    def _values(self, tasks: Schedule) -> Values:
        """The inputs that are given and read; the gradient treats frozen leaves as constants."""
        values = Values()
        read = {number for task in tasks.tasks for number in task.read_numbers} | {
            x for x, _ in tasks.outputs if isinstance(x, int)
        }
        for i, given in enumerate(self.inputs):
            if i not in read or isinstance(given.value, jax.ShapeDtypeStruct):
                continue
            if isinstance(given.value, Part):
                assert given.trainable is not None
                values.write(i, given.trainable, given.value.values)
            else:
                array = as_array(given.value if i in tasks.program.on_host else to_device(given.value))
                is_frozen = given.leaf is not None and given.trainable is None and not is_on_host(array)
                values.write_whole(i, jax.lax.stop_gradient(array) if is_frozen else array)
        return values

    @property
    def _structs(self) -> list[jax.ShapeDtypeStruct]:
        stored = self.cut.stored
        return [jax.ShapeDtypeStruct(self.graph.shape(n), self.graph.dtype(n)) for n in stored]

    def _by_example(self, arrays: Sequence[Any]) -> list[Any]:
        """Moves the examples of stored values to the first axis."""
        return [x if at is None else at.first(x) for x, at in zip(arrays, self.examples, strict=True)]

    def _by_batch(self, features: Sequence[Any]) -> list[Any]:
        """Moves the examples of features back to where the program has them."""
        given = zip(features, self.examples, self._structs, strict=True)
        return [x if at is None else at.back(x, struct.shape) for x, at, struct in given]


class _Tracing(NamedTuple):
    """A function to be divided, and how its inputs are numbered."""

    trace: Callable[[Sequence[Input]], Traced]
    of_params: int  # the number of inputs that are parameters
    axis: Any  # of the examples in the batch, or None

    def tasks(self, inputs: Sequence[Input]) -> tuple[Traced, Graph, Graph | None]:
        """Traces the function with these inputs; the division does not depend on the memory that they are in."""
        found = self.trace(inputs)
        in_part = [i for i, given in enumerate(inputs) if given.trainable is not None]
        is_known = lambda i, region: inputs[i].is_known(region)  # noqa: E731
        on_device, on_host = found.program.copy(on_host=()), found.program.copy()
        of_host = graph(on_host, in_part, is_known) if on_host.on_host else None
        return found, graph(on_device, in_part, is_known), of_host

    def cut(self, tasks: Graph, inputs: Sequence[Input]) -> tuple[Cut, list[Examples | None]]:
        """The minimum cut, and where the examples are in the stored values."""
        examples = {} if self.axis is None else self._examples(tasks, inputs)
        cut = self._cut(tasks, inputs, examples)
        return cut, [examples.get(tasks.program.like(tasks.regions[n][0])) for n in cut.stored]

    def count(self, inputs: Sequence[Input]) -> int:
        """The number of examples in the batch."""
        sizes: dict[Any, str] = {}
        for given in inputs[self.of_params :]:
            if not given.why:
                shape = np.shape(given.value)
                sizes.setdefault(shape[self.axis] if self.axis < len(shape) else None, f"{given.name} of shape {shape}")
        if len(sizes) != 1 or None in sizes:
            raise value_error(
                "the recurring arguments have no common axis of examples",
                at=f"example_axis={self.axis}",
                got="; ".join(sizes.values()) or "no array",
                expected=f"arrays with the examples of the batch along axis {self.axis}",
                fix="put arrays that all examples share into the parameters, and freeze them; "
                "give a number as a Python number, which jax.jit must not trace (static_argnames)",
            )
        [count] = sizes
        return count

    def _examples(self, tasks: Graph, inputs: Sequence[Input]) -> dict[int, Any]:
        batch = {i: Examples(self.axis) for i in range(self.of_params, len(inputs)) if not inputs[i].why}
        known = {id(node.eqn): node.eqn for node in tasks.nodes if all(tasks.known[n] for n in node.outputs)}
        return batch | examples_of(tasks.program, known.values(), batch, self.count(inputs))

    def _cut(self, tasks: Graph, inputs: Sequence[Input], examples: dict[int, Any]) -> Cut:
        """The minimum cut; an error if nothing can be computed once, or if an operation mixes examples."""
        of_params_or_batch, of_trunk = self._dependent(tasks, inputs)
        cheap = [is_cheap(node.eqn) or not here for node, here in zip(tasks.nodes, of_params_or_batch, strict=True)]
        cost: list[int | None] = [
            math.prod(tasks.shape(n)) * tasks.dtype(n).itemsize for n in range(len(tasks.regions))
        ]
        at = [examples.get(tasks.program.like(value)) for value, _ in tasks.regions]
        if self.axis is not None:
            at = [x if _has_all(region, x) else Mixed("") for x, (_, region) in zip(at, tasks.regions, strict=True)]
            count = max(self.count(inputs), 1)
            cost = [(size or 0) // count if isinstance(x, Examples) else None for size, x in zip(cost, at, strict=True)]
            for i, node in enumerate(tasks.nodes):
                if all(at[n] is None for n in node.outputs):
                    cheap[i], of_trunk[i] = True, False
        found = minimum_cut(tasks, [not each for each in cheap], cost)
        if isinstance(found, Cut) and not found.stored:
            found = minimum_cut(tasks, of_trunk, cost)
        if self.axis is not None:
            trunk = {id(node) for node, here in zip(tasks.nodes, of_trunk, strict=True) if here}
            mixed = (
                [found.value]
                if isinstance(found, NoCut)
                else [v for n in found.after if id(n) in trunk for v in n.outputs]
            )
            _refuse_mixed([at[value] for value in mixed])
        assert isinstance(found, Cut)
        if not found.stored:
            reasons = "; ".join(
                f"{node}: depends on {why}" for node, why in first_dependent(tasks, [given.why for given in inputs])[:3]
            )
            raise value_error(
                "there is nothing to compute once",
                at="the function",
                got=reasons or "no operation on frozen parameters and recurring arguments",
                expected="an operation that depends only on frozen parameters and recurring arguments",
                fix="freeze the layers at the input, and name in `recurring` every argument that they read",
            )
        return found

    def _dependent(self, tasks: Graph, inputs: Sequence[Input]) -> tuple[list[bool], list[bool]]:
        """For each operation, whether it depends on frozen parameters or recurring arguments, and whether on both."""
        known = [(n, value) for n, (value, _) in enumerate(tasks.regions) if value < len(inputs) and tasks.known[n]]
        frozen = {n for n, value in known if value < self.of_params}
        batch = {n for n, value in known if value >= self.of_params}
        for node in tasks.nodes:
            for found in (frozen, batch):
                if not found.isdisjoint(node.reads):
                    found.update(node.outputs)
        either, both = (
            [not found.isdisjoint(node.outputs) for node in tasks.nodes] for found in (frozen | batch, frozen & batch)
        )
        return either, both

    def for_count(self, count: int, inputs: Sequence[Input]) -> Iterator[list[Input]]:
        """The inputs for a batch of ``count`` examples instead, the likely ones first.

        Only the shapes of what does not recur are not known, and the operations before the cut do not read it. So they
        are the same with any of these inputs for which the function can be traced.
        """
        shapes = [np.shape(given.value) for given in inputs]
        free = [i for i, given in enumerate(inputs) if i >= self.of_params and given.why]
        arguments = [inputs[i].name.split("/")[0] for i in free]
        for found in shapes_for(count, [shapes[i] for i in free], arguments, self.axis, self.count(inputs)):
            new = dict(zip(free, found, strict=True))
            new |= {
                i: resized(shapes[i], [self.axis], count) for i in range(self.of_params, len(inputs)) if i not in new
            }
            yield [
                given
                if new.get(i, shapes[i]) == shapes[i]
                else given._replace(value=jax.ShapeDtypeStruct(new[i], given.value.dtype))
                for i, given in enumerate(inputs)
            ]


def divide(
    fun: Callable[..., Any],
    plan: Plan,
    values: Sequence[Any],
    arguments: Sequence[Argument],
    treedef: Any,
    example_axis: int | None,
) -> Division:
    """Traces ``fun(params, *args, **kwargs)`` without executing anything, and divides its program."""
    inputs = inputs_of(plan, values)
    tracing = _Tracing(functools.partial(traced, fun, plan, values, arguments, treedef), len(inputs), example_axis)
    names = [f"parameters {given.name}" for given in inputs]
    for argument in arguments:
        if argument.is_input:
            why = "" if argument.recurs else f"{argument.name}, which does not recur"
            inputs.append(Input(argument.value, argument.name, why))
            names.append(f"arguments {argument.name}")
    found, tasks, on_host = tracing.tasks(inputs)
    cut, stored = tracing.cut(tasks, inputs)
    text = text_of(tasks, names, cut)
    if example_axis is not None:
        count = tracing.count(inputs)
        more = 2 * count or 2
        for others in tracing.for_count(more, inputs):
            with contextlib.suppress(Exception):  # these shapes do not fit, or only one number of examples does
                _, its_tasks, _ = tracing.tasks(others)
                if len(its_tasks.nodes) == len(tasks.nodes):
                    places = {id(node): i for i, node in enumerate(tasks.nodes)}
                    its_cut = cut._replace(before=[its_tasks.nodes[places[id(node)]] for node in cut.before])
                else:  # inside `jax.shard_map`, where shapes do not vary over the mesh
                    its_cut, _ = tracing.cut(its_tasks, others)
                text = without_count(text, text_of(its_tasks, names, its_cut), count, more)
                break
    return Division(plan, found, tasks, on_host, inputs, cut, stored, digest(text))


def _has_all(region: Region, at: Any) -> bool:
    """Whether a region has all examples."""
    return region is EVERYTHING or not isinstance(at, Examples) or region.axis != at.axis


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
