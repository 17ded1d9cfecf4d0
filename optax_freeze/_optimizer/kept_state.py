"""The optimizer state of leaves whose rows keep it: that of the whole leaf, of which an update reads and writes rows.

Along which axis of an array of the state the rows are, is asked of ``init``: its shapes are compared with those for as
many rows as train in one step. An optimizer whose state for a few rows is not the rows of its state for all is refused.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import optax

from optax_freeze._errors import value_error, with_article
from optax_freeze._optimizer.call_init import Init, eval_init, first_difference
from optax_freeze._optimizer.nnx_variables import stored
from optax_freeze._spec.indexing import gather, resized, write
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import Selection, shape_of_part
from optax_freeze._spec.sharding import explicit_sharding, with_sharding
from optax_freeze._spec.tree import Leaf, Part, PyTree

OF_SEVERAL_STEPS = (
    optax.MultiStepsState,
    optax.ApplyEvery,
    optax.LookaheadState,
    optax.ScaleByLBFGSState,
    optax.ScaleByBacktrackingLinesearchState,
    optax.ScaleByZoomLinesearchState,
    optax.contrib.SAMState,
)
"""States of what needs the same rows in several steps, or evaluates the loss at other parameters."""


class RowsOf(NamedTuple):
    """Along which axis an array of a state has the rows of a leaf."""

    leaf: int
    axis: int


class KeptState:
    """What is known of the states of a transformation; it is asked of ``init`` once for each plan."""

    def __init__(self, init_for: Callable[[Plan], Init]) -> None:
        self._init_for = init_for
        self._of_static = functools.cache(self._find)

    def refuse_what_does_not_fit(self, plan: Plan, state: PyTree) -> None:
        is_refused = lambda node: isinstance(node, OF_SEVERAL_STEPS) or hasattr(node, "current_plan")  # noqa: E731
        nodes = filter(is_refused, jax.tree.leaves(state, is_leaf=is_refused))
        if found := [type(node).__name__ for node in nodes]:
            refuse_optimizer(plan, plan.kept[0], f"{with_article(found[0])} in its state")
        self.rows_of(plan)

    def rows_of(self, plan: Plan) -> list[RowsOf | None]:
        """For each array of a state which rows it has, if any."""
        return self._of_static(plan.without_masks())

    def _find(self, plan: Plan) -> list[RowsOf | None]:
        whole = self._shapes(plan, {})
        found: list[RowsOf | None] = [None] * len(whole)
        for i in plan.kept:
            selection: Any = plan.selections[i]
            size, count = selection.size, selection.count
            count += count == size  # as many rows as there are would tell nothing
            others = self._shapes(plan, {i: count})
            if len(others) != len(whole):
                refuse_optimizer(plan, i, "another number of arrays for some rows of a leaf than for all")
            for n, (array, other) in enumerate(zip(whole, others, strict=True)):
                axis = first_difference(array, other)
                if axis is None:
                    continue
                resize = [resized(array.shape, axis, each) for each in (size, count)] if axis != "rank" else []
                if found[n] or axis == "rank" or resize != [array.shape, other.shape]:
                    got = f"an array of shape {array.shape}, and of shape {other.shape} for a batch of {count}"
                    refuse_optimizer(plan, i, got)
                found[n] = RowsOf(i, axis)
        return found

    def _shapes(self, plan: Plan, rows: Mapping[int, int]) -> Sequence[Any]:
        """The shapes of the arrays of a state, for so many rows of some leaves."""
        own = {i: jax.ShapeDtypeStruct(_shape(plan, i, rows.get(i)), plan.leaves[i].dtype) for i in plan.own}
        trainable = stored(plan, plan.treedef, plan.full(own))
        return jax.tree.leaves(eval_init(self._init_for(plan), trainable))


class KeptRows(NamedTuple):
    """The state of whole leaves in an update, which reads and writes the rows that train now."""

    known: KeptState
    plan: Plan
    state: PyTree

    def read(self) -> PyTree:
        """The state of these rows, and what all rows share."""
        arrays, treedef = jax.tree.flatten(self.state)
        each = zip(arrays, self.known.rows_of(self.plan), strict=True)
        return treedef.unflatten([array if rows is None else self._read(array, rows) for array, rows in each])

    def _read(self, array: Any, rows: RowsOf) -> jax.Array:
        numbers: Any = self.plan.selections[rows.leaf].array
        shape = resized(array.shape, rows.axis, len(numbers))
        found = lambda numbers, array: gather(rows.axis, array, numbers)  # noqa: E731
        return with_sharding(explicit_sharding(array, shape), found, numbers, array)

    def written(self, new: PyTree) -> PyTree:
        """The state with these rows of a new one, in place where it is donated."""
        arrays, treedef = jax.tree.flatten(self.state)
        each = zip(arrays, treedef.flatten_up_to(new), self.known.rows_of(self.plan), strict=True)
        return treedef.unflatten([new if rows is None else self._write(old, new, rows) for old, new, rows in each])

    def _write(self, array: Any, new: Any, rows: RowsOf) -> jax.Array:
        numbers: Any = self.plan.selections[rows.leaf].array
        array = array.astype(new.dtype)  # moments of bfloat16 parameters may become float32 in the first update

        def put(array: Any, numbers: Any, new: Any) -> jax.Array:
            return write(rows.axis, array, numbers, jax.lax.optimization_barrier(new))

        return with_sharding(explicit_sharding(array), put, array, numbers, new)


def refuse_part_of_kept(part: Part, leaf: Leaf, selection: Selection) -> None:
    if selection.keep_state:
        raise value_error(
            "keep_state: the state of all rows needs the whole leaf",
            at=leaf.path,
            got=f"a Part of shape {part.shape}",
            expected=f"an array of shape {leaf.shape}",
            fix="tx.init(params), with the full parameters",
        )


def _shape(plan: Plan, i: int, count: int | None) -> tuple[int, ...]:
    leaf, selection, index = plan.leaves[i], plan.selections[i], plan.part_indices[i]
    shape = leaf.shape or ()
    if selection.keep_state:
        return shape if count is None else resized(shape, selection.axis, count)  # type: ignore[attr-defined]
    return shape if index is None else shape_of_part(index, shape)


def refuse_optimizer(plan: Plan, i: int, got: str) -> NoReturn:
    raise value_error(
        "keep_state: this optimizer cannot train other rows in each step",
        at=plan.leaves[i].path,
        got=got,
        expected="a state that has an array with these rows, or arrays that all rows share",
        fix="optax.adam(1e-3) or another optimizer; or ~fz.rows(array) without keep_state, where new rows begin anew",
    )
