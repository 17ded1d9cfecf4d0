"""Divides a function of parameters and arguments into a part that can be computed beforehand and the rest."""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.core import Tracer

from optax_freeze._errors import is_int, value_error
from optax_freeze._jax_tracing import needs_value
from optax_freeze._precompute.batch_size import number_of_examples, with_examples
from optax_freeze._precompute.closures import refuse_closures
from optax_freeze._precompute.cut import Cut, first_dependent, is_cheap, minimum_cut
from optax_freeze._precompute.cut_explanation import CutExplanation, Feature
from optax_freeze._precompute.digest import digest, text_of, without_count
from optax_freeze._precompute.example_axis import Examples, Mixed, examples_of
from optax_freeze._precompute.frozen_gradient import with_unknown_gradient, without_gradient
from optax_freeze._precompute.graph import Graph, Key, Node, graph
from optax_freeze._precompute.inputs import Input
from optax_freeze._program.decisions import decisive
from optax_freeze._program.flops import flops_of_tasks
from optax_freeze._program.from_host import evaluate
from optax_freeze._program.regions import EVERYTHING, Rows, Values
from optax_freeze._program.tasks import Schedule
from optax_freeze._program.traced_function import Traced, as_array
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import FROZEN, RowIndex
from optax_freeze._spec.sharding import in_mesh_of_type
from optax_freeze._spec.tree import Part


class Division(NamedTuple):
    """The traced program of a function, and where it is divided."""

    plan: Plan
    traced: Traced
    graph: Graph
    inputs: list[Input]
    cut: Cut
    examples: list[Examples]  # in the stored values
    digest: str

    @property
    def read_again(self) -> dict[int | None, Node | None]:
        """The parameters whose frozen elements are read after the cut, and the first reader; None if returned."""
        found: dict[int | None, Node | None] = {}
        readers = [(node, node.reads) for node in map(self.graph.nodes.__getitem__, self.cut.after)]
        for node, keys in (*readers, (None, self.graph.outputs)):
            for value, region in keys:
                if value < len(self.inputs) and self.inputs[value].is_frozen(region):
                    found.setdefault(self.inputs[value].leaf, node)
        return found

    @property
    def features(self) -> list[jax.ShapeDtypeStruct]:
        return jax.eval_shape(self._by_example, list(map(self.graph.struct, self.cut.stored)))

    @property
    def explanation(self) -> CutExplanation:
        made_by = {key: node for node in self.graph.nodes for key in node.writes}
        features = [
            Feature(tuple(struct.shape), struct.dtype, _bytes(struct), str(made_by[key]))
            for struct, key in zip(self.features, self.cut.stored, strict=True)
        ]
        read_again, gone = self.read_again, {}
        for i, (leaf, selection) in enumerate(zip(self.plan.leaves, self.plan.selections, strict=True)):
            is_frozen = selection is FROZEN or isinstance(selection, RowIndex)
            if is_frozen and leaf.shape is not None and i not in read_again:
                gone[leaf.path] = _bytes(leaf) - selection.elements(leaf.shape) * leaf.dtype.itemsize
        return CutExplanation(
            tuple(features),
            flops_of_tasks(self.graph.tasks(self.cut.before)),
            flops_of_tasks(self.graph.tasks(self.cut.after)),
            tuple(gone),
            sum(gone.values()),
            tuple((str(node), why) for node, why in first_dependent(self.graph, self.inputs)),
        )

    def before(self) -> list[Any]:
        tasks = self.graph.schedule._replace(tasks=self.graph.tasks(self.cut.before), outputs=self.cut.stored)
        return self._by_example(evaluate(tasks.run, self._values(tasks)))

    def after(self, features: Sequence[Any]) -> Any:
        tasks = self.graph.schedule._replace(tasks=self.graph.tasks(self.cut.after))
        values = self._values(tasks)
        features = self._without_gradient(features)
        for key, array, at in zip(self.cut.stored, features, self.examples, strict=True):
            array = in_mesh_of_type(array, tasks.program.avals[key[0]])  # stored ones may have that of the context
            values.write(*key, at.back(array, self.graph.struct(key).shape))
        return self.traced.result(evaluate(tasks.run, values))

    def _without_gradient(self, features: Sequence[Any]) -> list[Any]:
        """The features, whose frozen parameters must not be differentiated, since only a part would be seen here."""
        traced = {i: x for i, x in enumerate(self.inputs) if x.leaf is not None and isinstance(x.value, Tracer)}
        leaves = {x.name: x.value for x in traced.values() if x.trainable is None}
        in_rows = {i: x for i, x in traced.items() if isinstance(x.trainable, Rows)}
        numbers, computed = set(), set()
        for node in map(self.graph.nodes.__getitem__, self.cut.before):
            found = {i for i, _ in node.reads if i in in_rows}
            numbers |= found
            computed.update(node.writes if found or not computed.isdisjoint(node.reads) else ())
        features = without_gradient(features, leaves)
        places = [i for i, key in enumerate(self.cut.stored) if key in computed]
        rows = {in_rows[i].name: in_rows[i].frozen_rows for i in sorted(numbers)}
        of_rows = with_unknown_gradient([features[i] for i in places], rows)
        for i, feature in zip(places, of_rows, strict=False):
            features[i] = feature
        return features

    def _by_example(self, arrays: Sequence[Any]) -> list[Any]:
        """Moves the examples of stored values to the first axis."""
        return [at.first(array) for array, at in zip(arrays, self.examples, strict=True)]

    def _values(self, tasks: Schedule) -> Values:
        """The inputs that are given and read."""
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
                values.write(i, EVERYTHING, as_array(given.value))
        return values


def divide(
    fun: Callable[..., Any], plan: Plan, treedef: Any, leaves: Sequence[Input], example_axis: int | None
) -> Division:
    """Divides ``fun(params, *args, **kwargs)``, given the treedef of ``(args, kwargs)`` and the leaves of all three."""
    trace = functools.partial(_traced, fun, plan, treedef, leaves)
    inputs = [leaf for leaf in leaves if not leaf.is_constant]
    _refuse_symbolic(inputs)
    traced, tasks = trace(inputs)
    trains = [i for i, given in enumerate(inputs) if given.leaf is not None and given.why]
    refuse_closures(traced.program, trains, lambda: trace(inputs)[0].program)
    cut, examples = _cut(tasks, inputs, example_axis)
    text = text_of(tasks, inputs, cut)
    if example_axis is not None:
        count = number_of_examples(inputs, example_axis)
        more = 2 * count or 2
        for others in with_examples(more, inputs, example_axis):
            with contextlib.suppress(Exception):  # these shapes do not fit, or only one number of examples does
                _, its = trace(others)
                is_alike = len(its.nodes) == len(tasks.nodes)  # not in `jax.shard_map`, where shapes do not vary
                its_cut = cut if is_alike else _cut(its, others, example_axis)[0]
                text = without_count(text, text_of(its, inputs, its_cut), count, more)
                break
    return Division(plan, traced, tasks, inputs, cut, examples, digest(text))


def _refuse_symbolic(inputs: Sequence[Input]) -> None:
    """What is stored is chosen by its bytes, and where the examples are by their number."""
    for given in inputs:
        shape = np.shape(given.value)
        if not all(map(is_int, shape)):
            raise value_error(
                "what is computed once depends on the sizes of arrays",
                at=given.name,
                got=f"shape ({', '.join(map(str, shape))})",
                expected="numbers, no symbolic dimensions of jax.export",
                fix="export for each size by itself: "
                f"jax.ShapeDtypeStruct({tuple(n if is_int(n) else 32 for n in shape)}, {str(given.value.dtype)!r})",
            )


def _traced(
    fun: Callable[..., Any], plan: Plan, treedef: Any, leaves: Sequence[Input], inputs: Sequence[Input]
) -> tuple[Traced, Graph]:
    """The program of a function with these inputs, and its tasks, which do not depend on the memory of the inputs."""

    def of_inputs(*arrays: Any) -> Any:
        given, count = iter(arrays), len(plan.leaves)
        filled = [leaf.value if leaf.is_constant else next(given) for leaf in leaves]
        args, kwargs = jax.tree.unflatten(treedef, filled[count:])
        return fun(jax.tree.unflatten(plan.treedef, filled[:count]), *args, **kwargs)

    try:
        traced = Traced(of_inputs, [given.struct for given in inputs], enter_remat=False)
    except Exception as error:
        if not needs_value(error):
            raise
        raise value_error(
            "the function cannot be traced",
            at=getattr(fun, "__qualname__", type(fun).__name__),
            got=f"{type(error).__name__}: Python needs the value of a traced array",
            expected="a function that jax.jit can trace",
            fix="if Python branches on an argument, name it in `recurring` and pass a Python value",
        ) from error
    return traced, graph(traced.program, inputs)


def _cut(tasks: Graph, inputs: Sequence[Input], axis: int | None) -> tuple[Cut, list[Examples]]:
    """The minimum cut, and where the examples are in the stored values.

    Raises ``ValueError`` if nothing can be computed once, or if an operation mixes examples.
    """
    sources = _sources(tasks, inputs)
    trunk = [len(each) == 2 for each in sources]
    dear = [bool(each) and not is_cheap(node.eqn) for node, each in zip(tasks.nodes, sources, strict=True)]
    cost: dict[Key, int | None] = {key: _bytes(tasks.struct(key)) for key in tasks.known}
    at: dict[Key, Any] = dict.fromkeys(cost, Examples(0))
    divided = tasks
    if axis is not None:
        count = max(number_of_examples(inputs, axis), 1)
        at = examples_of(tasks, inputs, axis, count)
        cost = {key: (cost[key] or 0) // count if isinstance(at[key], Examples) else None for key in at}
        divided = tasks.without({key for key in at if isinstance(at[key], Mixed)})
        for i, node in enumerate(tasks.nodes):
            if all(at[key] is None for key in node.writes):  # all examples share the results
                dear[i] = trunk[i] = False
    cut = _minimum_cut(divided, dear, cost)
    # Without an expensive operation, what reads frozen parameters and arguments at once is worth storing.
    cut = cut if cut.stored else _minimum_cut(divided, trunk, cost)
    mixed = [at[key] for i in cut.after if trunk[i] for key in tasks.nodes[i].writes if isinstance(at[key], Mixed)]
    if mixed:
        _refuse_mixed(mixed)
    if not cut.stored:
        _refuse_nothing(tasks, inputs)
    return cut, [at[key] for key in cut.stored]


def _refuse_mixed(mixed: Sequence[Mixed]) -> NoReturn:
    operations = filter(None, (each.operation for each in mixed))
    raise value_error(
        "examples are mixed, so there are no features of single examples",
        at=next(operations, "an operation on some of the examples"),
        got="an operation along the axis of the examples, or one without a rule that keeps them apart",
        expected="operations on each example separately, such as batch normalization with stored statistics",
        fix="use example_axis=None for the features of whole batches, whose examples must then not be shuffled",
    )


def _refuse_nothing(tasks: Graph, inputs: Sequence[Input]) -> NoReturn:
    reasons = "; ".join(f"{node}: depends on {why}" for node, why in first_dependent(tasks, inputs)[:3])
    raise value_error(
        "there is nothing to compute once",
        at="the function",
        got=reasons or "no operation on frozen parameters and recurring arguments",
        expected="an operation that depends only on frozen parameters and recurring arguments",
        fix="freeze the layers at the input, and name in `recurring` every argument that they read",
    )


def _minimum_cut(tasks: Graph, dear: Sequence[bool], cost: Mapping[Key, int | None]) -> Cut:
    """The minimum cut of those in which nothing that decides is computed both before and after it."""
    dear, numbers = [*dear], decisive(tasks.program)
    deciding = {key for key, size in cost.items() if key[0] in numbers and size is not None}
    # A compiler may round an operation otherwise where it is computed again: a maximum would then equal none of its
    # operands, and its gradient would be zero.
    while True:
        cut = minimum_cut(tasks, dear, cost)
        twice = {i for i in {*cut.before} & {*cut.after} if not deciding.isdisjoint(tasks.nodes[i].writes)}
        if all(dear[i] for i in twice):
            return cut
        for i in twice:
            dear[i] = True


def _sources(tasks: Graph, inputs: Sequence[Input]) -> list[set[str]]:
    """On what each node depends: on frozen parameters, on recurring arguments, or on both."""
    kinds = {i: "arguments" if given.leaf is None else "parameters" for i, given in enumerate(inputs)}
    found = {key: {kinds[key[0]]} for key, known in tasks.known.items() if known and key[0] in kinds}
    sources: list[set[str]] = []
    for node in tasks.nodes:
        sources.append(set().union(*(found.get(key, ()) for key in node.reads)))
        found |= dict.fromkeys(node.writes, sources[-1])
    return sources


def _bytes(of: Any) -> int:
    """The bytes of an array, a shape or a leaf."""
    return math.prod(of.shape) * of.dtype.itemsize
