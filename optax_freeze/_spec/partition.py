"""Splits parameters into a trainable part and the rest, and combines them again.

``optax.MaskedNode()`` stands for a leaf of the other part, and not None as in Equinox: Optax's transformations skip it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._errors import is_number, type_error, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.memory_kinds import to_device, to_memory_of
from optax_freeze._spec.part_source import refuse_other_rows
from optax_freeze._spec.plan import Plan, refuse_other_leaf
from optax_freeze._spec.resolve import Spec, Tied, make_plan, warn_of_extent
from optax_freeze._spec.selection import TRAINABLE, DenseMask, Selection, shape_of_part
from optax_freeze._spec.tree import Leaf, Part, PyTree, Rest

Tree = TypeVar("Tree")


def partition(params: Tree, frozen: Spec, *, as_arrays: bool = False, tied: Tied = "error") -> tuple[Tree, Tree]:
    """Splits the parameters into a tree of trainable parameters and a tree of the rest.

    Args:
      params: any pytree of arrays.
      frozen: the spec of the frozen parameters, in any form.
      as_arrays: if True, the trainable rows of a leaf are an array instead of a :class:`optax_freeze.Part`, as the
        optimizer inside :func:`optax_freeze.freeze` receives them. Such an array may broadcast against the full leaf.
      tied: what to do if the same array object is at two paths and only one of them is frozen: ``"error"`` raises an
        error, ``"ignore"`` allows it. Tracers are never checked.

    Returns:
      ``(trainable, rest)``: trees with the structure of ``params`` and ``optax.MaskedNode()`` in place of a leaf that
      is in the other tree. A leaf frozen by rows is in both: its trainable rows in ``trainable``, as a
      :class:`optax_freeze.Part`, and the full array in ``rest``, with its mask (so map a tree before you partition
      it, and not ``rest``). Leaves that cannot train are in ``rest``.

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
    """
    if isinstance(params, Mapping) and any(isinstance(tx, optax.GradientTransformation) for tx in params.values()):
        what = "fz.partition takes parameters, not Optax transformations"
        at, got = "its first argument", "a dict of Optax transformations"
        fix = "use optax.partition(transforms, fz.labels(frozen)), or fz.freeze(tx, frozen)"
        raise type_error(what, at=at, got=got, expected="a tree of parameters, as in equinox.partition", fix=fix)
    plan = make_plan(params, frozen, tied=tied)
    warn_of_extent(plan, params, frozen, stacklevel=2)
    trainable, rest = split(params, plan)
    return (_tree.as_arrays(trainable) if as_arrays else trainable), rest


def split(params: PyTree, plan: Plan) -> tuple[PyTree, PyTree]:
    """:func:`partition` with a plan instead of a spec."""
    values, treedef = plan.align(params, "params")
    trainable = plan.with_sources(plan.take(values), values)
    return jax.tree.unflatten(treedef, trainable), jax.tree.unflatten(treedef, plan.rest(values))


def combine(trainable: PyTree, rest: PyTree) -> PyTree:
    """Combines the two outputs of :func:`partition` into the full tree of parameters.

    Args:
      trainable: the trainable parameters, or a tree of their structure from the state of an optimizer, with
        ``optax.MaskedNode()`` in place of other leaves. The trainable rows of a leaf are a ``Part`` or an array.
      rest: all other leaves, with ``optax.MaskedNode()`` in place of trainable leaves.

    Returns:
      The full tree: ``combine(*partition(params, frozen))`` is ``params``, bit for bit. Where both have
      ``optax.MaskedNode()``, it stays.

    Raises:
      ValueError: if the trees differ in structure, or if both have a leaf at the same path.

    Example:
      >>> import optax_freeze as fz
      >>> hole = optax.MaskedNode()
      >>> fz.combine({"encoder": hole, "head": 1.0}, {"encoder": 2.0, "head": hole})
      {'encoder': 2.0, 'head': 1.0}
    """
    leaves, treedef = assemble(trainable, rest, put_part)
    return jax.tree.unflatten(treedef, leaves)


def put_part(rest: Rest, part: Any) -> jax.Array:
    array = rest.array
    if rest.dtype is not None and rest.dtype != array.dtype:
        array = to_memory_of(array, to_device(array).astype(rest.dtype))
    return rest.selection.put(array, part)


def assemble(trainable: PyTree, rest: PyTree, combine_part: Callable[[Rest, Any], Any]) -> tuple[list[Any], Any]:
    """The leaves and the treedef of :func:`combine`; ``combine_part(rest, part)`` makes a partially frozen leaf."""
    left, treedef = _tree.flatten(trainable)
    right, other = _tree.flatten(rest)
    if treedef != other:
        _tree.refuse_other_structure(trainable, rest, "trainable", "pass the two outputs of one fz.partition")
    combined, paths = [], functools.cache(lambda: _tree.paths(rest))  # only needed for errors and dense masks
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if isinstance(b, Rest) and not _tree.is_masked_node(a):
            shape, index = jnp.shape(b.array), b.selection.part_index
            if not _tree.is_masked_node(b.selection.array):
                _refuse_mapped_mask(b.selection, paths()[i])
            if index is not None and not isinstance(a, Part) and jnp.shape(a) == shape_of_part(index, shape):
                a = Part(a, index, shape)  # as an optimizer inside `fz.freeze` has it
            if not isinstance(a, Part) or (a.index, a.shape) != (index, shape):
                refuse_other_leaf(a, Leaf(paths()[i], shape, index=index), b.selection, "trainable")
            if isinstance(a, Part) and a.source is not None:
                refuse_other_rows(a, b.selection, paths()[i], "trainable")
            combined.append(combine_part(b, a))
        elif _tree.is_masked_node(a) and not isinstance(b, Rest):
            combined.append(b)
        elif _tree.is_masked_node(b):
            combined.append(a)
        else:
            what = "`trainable` and `rest` have a leaf at the same path"
            what = "the trainable part of a leaf is missing" if isinstance(b, Rest) else what
            at, got = paths()[i], f"{_kind(a)} in `trainable` and {_kind(b)} in `rest`"
            expected = "optax.MaskedNode() in one of them, or both parts of a partially frozen leaf"
            fix = "pass the two outputs of one fz.partition"
            raise value_error(what, at=at, got=got, expected=expected, fix=fix)
    return combined, treedef


def _refuse_mapped_mask(selection: Selection, path: str) -> None:
    kind, expected = (np.bool_, "bool") if isinstance(selection, DenseMask) else (np.integer, "int32")
    if not jnp.issubdtype(selection.array.dtype, kind):
        fix = "map the parameters, and not the masks beside them: fz.partition(jax.tree.map(f, params), frozen)[1]"
        got = str(selection.array.dtype)
        raise value_error("rest: a mask of another dtype", at=path, got=got, expected=expected, fix=fix)


def stop_gradient(params: Tree, frozen: Spec) -> Tree:
    """Stops the gradient at frozen parameters.

    The gradient of frozen parameters is zero, but an optimizer still updates them, by weight decay or momentum: for
    training, use :func:`optax_freeze.freeze` or :func:`partition`.

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
      >>> params = {"encoder": jnp.float32(2), "head": jnp.float32(3)}
      >>> def loss(params):
      ...     params = fz.stop_gradient(params, "encoder")
      ...     return params["encoder"] * params["head"]
      >>> grads = jax.grad(loss)(params)
      >>> float(grads["encoder"]), float(grads["head"])
      (0.0, 2.0)
    """
    plan = make_plan(params, frozen)
    values, treedef = _tree.flatten(params)
    for i, (leaf, selection, value) in enumerate(plan.entries(values)):
        is_whole_array = leaf.dtype is not None and not isinstance(value, Part) and not is_number(value)
        if selection is not TRAINABLE and is_whole_array:
            values[i] = selection.choose(jax.lax.stop_gradient(value), value)
    return jax.tree.unflatten(treedef, values)


def _kind(node: Any) -> str:
    if _tree.is_masked_node(node):
        return "optax.MaskedNode()"
    return "a Part" if isinstance(node, (Part, Rest)) else "a leaf"
