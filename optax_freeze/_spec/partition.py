"""Splits parameters into a trainable part and the rest, and combines them again.

This works like ``equinox.partition`` and ``equinox.combine``, but marks a leaf that is in the other part with
``optax.MaskedNode()`` instead of ``None``. Optax's transformations, accumulation, finite checks and line searches
already skip it, and ``None`` keeps its usual meaning.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_freeze._errors import is_array, is_number, type_error, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import is_on_host
from optax_freeze._spec.plan import Plan, refuse_on_host, refuse_other_leaf
from optax_freeze._spec.resolve import Spec, Tied, make_plan, warn_of_extent
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DynamicRowIndex, RowIndex, Selection
from optax_freeze._spec.source import refuse_other_rows
from optax_freeze._spec.tree import Leaf, Part, PyTree, Rest

Tree = TypeVar("Tree")


def partition(params: Tree, frozen: Spec, *, tied: Tied = "error") -> tuple[Tree, Tree]:
    """Splits the parameters into a tree of trainable parameters and a tree of the rest.

    Args:
      params: any pytree of arrays.
      frozen: the spec of the frozen parameters, in any form.
      tied: what to do if the same array object is at two paths and only one of them is frozen: ``"error"`` raises an
        error, ``"ignore"`` allows it. Tracers are never checked.

    Returns:
      ``(trainable, rest)``, two trees with the structure of ``params``. Each has ``optax.MaskedNode()`` (a hole) in
      place of a leaf that is in the other tree. A leaf frozen by rows is in both: its trainable rows in ``trainable``,
      as a :class:`optax_freeze.Part`, and the full array in ``rest``. Leaves that are not floating-point or complex
      arrays or numbers are in ``rest``.

    Raises:
      ValueError: if the spec does not fit the parameters, or if leaves are tied as described above.
      TypeError: if ``params`` contains Optax transformations (``optax.partition`` was meant).

    Warns:
      FreezeWarning: if patterns, a selector or a function freeze nothing or everything.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jax.numpy.ones(2), "head": jax.numpy.zeros(2)}
      >>> trainable, rest = fz.partition(params, "encoder")
      >>> trainable
      {'encoder': MaskedNode(), 'head': Array([0., 0.], dtype=float32)}
      >>> rest
      {'encoder': Array([1., 1.], dtype=float32), 'head': MaskedNode()}
      >>> state = optax.adam(1e-3).init(trainable)
    """
    if isinstance(params, Mapping) and any(isinstance(tx, optax.GradientTransformation) for tx in params.values()):
        raise type_error(
            "fz.partition takes parameters, not Optax transformations",
            at="its first argument",
            got="a dict of Optax transformations",
            expected="a tree of parameters, as in equinox.partition",
            fix="use optax.partition(transforms, fz.labels(frozen)), or fz.freeze(tx, frozen)",
        )
    plan = make_plan(params, frozen, tied=tied)
    warn_of_extent(plan, params, frozen, stacklevel=2)
    return split(params, plan)


def split(params: PyTree, plan: Plan) -> tuple[PyTree, PyTree]:
    """:func:`partition` with a plan instead of a spec."""
    values, treedef = plan.align(params, "params")
    trainable = plan.with_sources(plan.take(values), values)
    return jax.tree.unflatten(treedef, trainable), jax.tree.unflatten(treedef, plan.rest(values))


def combine(trainable: PyTree, rest: PyTree) -> PyTree:
    """Combines the two outputs of :func:`partition` into the full tree of parameters.

    Args:
      trainable: the trainable parameters, with ``optax.MaskedNode()`` (a hole) in place of other leaves.
      rest: all other leaves, with holes in place of trainable leaves.

    Returns:
      The full tree: ``combine(*partition(params, frozen))`` equals ``params`` bit for bit. A leaf that is a hole in
      both trees remains a hole.

    Raises:
      ValueError: if the trees differ in structure, or if both have a leaf at the same path.

    Example:
      >>> import optax_freeze as fz
      >>> fz.combine({"encoder": optax.MaskedNode(), "head": 1.0}, {"encoder": 2.0, "head": optax.MaskedNode()})
      {'encoder': 2.0, 'head': 1.0}
    """
    leaves, treedef = assemble(trainable, rest, lambda rest, part: rest.selection.put(rest.array, part))
    return jax.tree.unflatten(treedef, leaves)


def assemble(trainable: PyTree, rest: PyTree, combine_part: Callable[[Rest, Any], Any]) -> tuple[list[Any], Any]:
    """The leaves and the treedef of :func:`combine`; ``combine_part(rest, part)`` makes a partially frozen leaf."""
    left, treedef = _tree.flatten(trainable)
    right, other = _tree.flatten(rest)
    if treedef != other:
        _tree.refuse_other_structure(trainable, rest, "trainable", "pass the two outputs of one fz.partition")
    whole, paths = [], functools.cache(lambda: _tree.paths(rest))  # only needed for errors and dense masks
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if isinstance(b, Rest) and not _tree.is_hole(a):
            shape, index = jnp.shape(b.array), b.selection.part_index
            if not isinstance(a, Part) or (a.index, a.shape) != (index, shape):
                refuse_other_leaf(a, Leaf(paths()[i], shape, index=index), b.selection, "trainable")
            if isinstance(a, Part) and a.source is not None:
                refuse_other_rows(a, b.selection, paths()[i], "trainable")
            whole.append(combine_part(b, a))
        elif _tree.is_hole(a) and not isinstance(b, Rest):
            whole.append(b)
        elif _tree.is_hole(b):
            whole.append(a)
        else:
            raise value_error(
                "the trainable part of a leaf is missing"
                if isinstance(b, Rest)
                else "`trainable` and `rest` have a leaf at the same path",
                at=paths()[i],
                got=f"{_kind(a)} in `trainable` and {_kind(b)} in `rest`",
                expected="a hole (optax.MaskedNode) in one of them, or both parts of a partially frozen leaf",
                fix="pass the two outputs of one fz.partition",
            )
    return whole, treedef


def stop_gradient(params: Tree, frozen: Spec) -> Tree:
    """Stops the gradient at frozen parameters.

    The gradient of frozen parameters is zero, but an optimizer still updates them, by weight decay or momentum. Use
    this function if only the gradient matters; for training, use :func:`optax_freeze.freeze` or :func:`partition`.

    Args:
      params: any pytree of arrays.
      frozen: the spec of the frozen parameters, in any form.

    Returns:
      ``params`` with ``jax.lax.stop_gradient`` applied to each frozen leaf, and to the frozen elements of partially
      frozen leaves.

    Raises:
      ValueError: if the spec does not fit the parameters.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": 2.0, "head": 3.0}
      >>> params = jax.tree.map(jax.numpy.asarray, params)
      >>> grads = jax.grad(lambda p: (lambda q: q["encoder"] * q["head"])(fz.stop_gradient(p, "encoder")))(params)
      >>> float(grads["encoder"]), float(grads["head"])
      (0.0, 2.0)
    """
    plan = make_plan(params, frozen)
    values, treedef = _tree.flatten(params)
    stopped = [
        value
        if selection is TRAINABLE or leaf.dtype is None or isinstance(value, Part) or is_number(value)
        else selection.choose(jax.lax.stop_gradient(value), value)
        for value, leaf, selection in zip(values, plan.leaves, plan.selections, strict=True)
    ]
    return jax.tree.unflatten(treedef, stopped)


def apply_updates(params: Tree, updates: PyTree, frozen: Spec | None = None) -> Tree:
    """Adds updates to the parameters, like ``optax.apply_updates``, and leaves frozen parameters bitwise unchanged.

    Args:
      params: the full tree of parameters, or only the trainable part.
      updates: a tree of the same structure; it may have holes (``optax.MaskedNode()``).
      frozen: the spec of the frozen parameters. If given, frozen leaves and elements are returned unchanged for every
        bit pattern, whatever their updates. If None, only leaves whose update is a hole are sure to stay unchanged.

    Returns:
      The new parameters, with the structure, shapes and dtypes of ``params``. A Python number that is updated becomes
      an array. Other leaves that are not arrays (bools, strings, functions) are returned unchanged.

    Raises:
      ValueError: if the structures differ, or if the spec does not fit the parameters.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jax.numpy.float32(-0.0), "head": jax.numpy.float32(1)}
      >>> fz.apply_updates(params, {"encoder": 5.0, "head": 0.5}, "encoder")
      {'encoder': Array(-0., dtype=float32), 'head': Array(1.5, dtype=float32)}
    """
    return add_updates(params, updates, None if frozen is None else make_plan(params, frozen).selections)


def add_updates(params: PyTree, updates: PyTree, selections: Sequence[Selection] | None) -> PyTree:
    """:func:`apply_updates` with one selection per leaf instead of a spec; None if all leaves are trainable."""
    values, treedef = _tree.flatten(params)
    changes, other = _tree.flatten_beside(treedef, updates)
    if treedef != other:
        _tree.refuse_other_structure(updates, params, "updates", "pass the updates that belong to these parameters")
    selections = [TRAINABLE] * len(values) if selections is None else selections
    paths = functools.cache(lambda: _tree.paths(params))
    for i, (value, change, selection) in enumerate(zip(values, changes, selections, strict=True)):
        if selection is FROZEN or is_nothing(change) or _stays(value, change):
            continue
        if isinstance(change, Part) and not isinstance(value, Part) and not _tree.is_hole(value):
            index = change.index if selection is TRAINABLE else selection.part_index
            refuse_other_leaf(change, Leaf(paths()[i], jnp.shape(value), index=index), selection, "updates")
            refuse_other_rows(change, selection, paths()[i], "updates")
        elif not _fits(value, change):
            raise value_error(
                "updates: an update does not fit its parameter",
                at=paths()[i],
                got="an update where the parameters have a hole" if _tree.is_hole(value) else _shape(change),
                expected="fz.apply_updates(params, updates)" if _tree.is_hole(value) else _shape(value),
                fix="the parameters come first; pass the updates that belong to these parameters",
            )
        elif is_on_host(value) and not isinstance(change, Part) and jnp.ndim(change):
            refuse_on_host(paths()[i], selection, value)
    return jax.tree.unflatten(treedef, list(map(updated, values, changes, selections)))


def updated(value: Any, change: Any, selection: Selection) -> Any:
    """Returns one leaf with its update added."""
    if selection is FROZEN or is_nothing(change) or _stays(value, change):
        return value
    if isinstance(value, Part):
        return dataclasses.replace(value, values=jax.tree.map(optax.apply_updates, value.values, change.values))
    if isinstance(change, Part) and selection is TRAINABLE:
        selection = _places(change)
    return selection.add(value, change)


def _places(part: Part) -> Selection:
    """Returns the selection of a part's elements in its leaf; raises ``ValueError`` if the part does not contain it."""
    if isinstance(part.index, RowIndex):
        return part.index
    if isinstance(part.index, DynamicRowIndex) and part.trains is not None and part.trains.dtype == bool:
        return part.index.of_rows(part.trains)
    is_rows = isinstance(part.index, DynamicRowIndex)
    raise value_error(
        f"the positions of a Part of {'dynamic rows' if is_rows else 'single elements'} are unknown",
        at=f"a leaf of shape {part.shape}",
        got=f"{'rows' if is_rows else 'a vector of elements'} and "
        + ("no mask with their positions" if part.trains is None else f"a mask of {part.trains.dtype}"),
        expected="`frozen` with the mask that is in the optimizer state",
        fix="fz.apply_updates(params, updates, fz.spec_of(state))",
    )


def _stays(value: Any, change: Any) -> bool:
    """Whether a leaf that is not an array keeps its value; Python numbers do if their update changes nothing."""
    if isinstance(value, Part) or _tree.is_hole(value) or is_array(value):
        return False
    if is_number(value):  # 0.0 added to -0.0 is 0.0
        return is_number(change) and repr(change) == repr(no_change(change))
    return isinstance(value, bool) or not isinstance(value, int) or (isinstance(change, (int, float)) and change == 0)


def no_change(number: Any) -> Any:
    """The Python number that, added to any other of this type, changes nothing."""
    if isinstance(number, complex):
        return complex(-0.0, -0.0)
    return -0.0 if isinstance(number, float) else 0


def _fits(value: Any, change: Any) -> bool:
    """Whether an update can be added to a leaf without changing its shape, or to the same part of a leaf."""
    if isinstance(value, Part):
        return isinstance(change, Part) and change.index == value.index and change.values.shape == value.values.shape
    return not _tree.is_hole(value) and jnp.shape(change) in ((), jnp.shape(value))


def _shape(leaf: Any) -> str:
    return f"part of shape {leaf.values.shape}" if isinstance(leaf, Part) else f"shape {jnp.shape(leaf)}"


def is_nothing(change: Any) -> bool:
    """Whether an update is empty: a hole, None, or the float0 gradient of an integer leaf."""
    return change is None or _tree.is_hole(change) or getattr(change, "dtype", None) == jax.dtypes.float0


def _kind(node: Any) -> str:
    return "a hole" if _tree.is_hole(node) else "a Part" if isinstance(node, (Part, Rest)) else "a leaf"
