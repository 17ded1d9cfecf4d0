"""What a transformation of this library knows of the ones around it and before it.

Inside another one it gets arrays of the elements that train, but its own spec is about the full leaves: it has to know
which elements they are. In an ``optax.chain``, behind another one, it gets updates in which the leaves that it should
train may be zeros.
"""

import contextvars
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax

from optax_freeze._errors import is_array, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.part_source import ArrayNotes
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import shape_of_part
from optax_freeze._spec.tree import PyTree

P = ParamSpec("P")
T = TypeVar("T")


class Around(NamedTuple):
    """The plan of the transformation that calls its inner optimizer, and the structure of the trees that it passes."""

    plan: Plan
    structure: Any
    frozen: Any = None  # the spec, if `fz.freeze` calls `init`


_AROUND: contextvars.ContextVar[Around | None] = contextvars.ContextVar("around", default=None)


def inside(around: Around | None, function: Callable[P, T]) -> Callable[P, T]:
    """A function that is called as the inner optimizer of a transformation, or, with None, as code of the user."""

    @functools.wraps(function)  # Optax reads the names of the arguments of value functions
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        token = _AROUND.set(around)
        try:
            return function(*args, **kwargs)
        finally:
            _AROUND.reset(token)

    return called


def around() -> Around | None:
    """What is around the transformation that is called now."""
    return _AROUND.get()


def as_parts(tree: PyTree, around: Around | None) -> PyTree:
    """A tree from a transformation around this one, with the ``Part`` of leaves that train in part.

    Trees of another structure stay as they are.
    """
    if around is None or not around.plan.has_parts:
        return tree
    values, treedef = _tree.flatten(tree)
    if treedef != around.structure or (len(values) == 1 and not _is_lone_part(values[0], around.plan)):
        return tree
    return jax.tree.unflatten(treedef, around.plan.parts_of(values))


def _is_lone_part(value: Any, plan: Plan) -> bool:
    """Whether a value is the trainable part of the only leaf, and not a number or function of an extra argument."""
    return is_array(value) and value.shape == shape_of_part(plan.part_indices[0], plan.leaves[0].shape or ())


_RETURNED = ArrayNotes[Any]()
"""The specs of the transformations whose updates have made these arrays."""


def remember(updates: Iterable[Any], spec: Any, given: Iterable[Any]) -> None:
    """Notes which arrays of ``updates`` an update has made; those of ``given`` were there before."""
    before = {id(array) for array in given}
    for array in updates:
        if id(array) not in before and isinstance(array, jax.Array):
            _RETURNED[array] = spec


def refuse_updates_of_another(updates: PyTree, differs: Callable[[Any], bool]) -> None:
    """A ``ValueError`` for updates that a transformation with another spec has made, known by the array objects.

    ``differs(spec)`` tells whether a spec is another one.
    """
    for i, array in enumerate(jax.tree.leaves(updates) if _RETURNED else ()):
        spec = _RETURNED.get(array, None)
        if spec is not None and differs(spec):
            raise value_error(
                "two freezing transformations in a chain: each sets to zero what the other trains",
                at=_tree.keystr(jax.tree_util.tree_leaves_with_path(updates)[i][0]),
                got="the updates that another fz.freeze, fz.freeze_when or fz.union, with another spec, has returned",
                expected="gradients",
                fix="fz.union(fz.freeze(a, ...), fz.freeze(b, ...)), or one fz.freeze around all of it: "
                "fz.freeze(optax.multi_transform({...}, labels), frozen)",
            )


OF_PARAMS = ("value_fn", "obj_fn", "grad_fn")
"""The names of these functions."""


def mapped(
    extra_args: dict[str, Any], tree: Callable[[Any], Any], function: Callable[[Any], Any] = lambda fn: fn
) -> dict[str, Any]:
    """The arguments with ``tree`` of each, and of what ``grad_fn`` returns, and ``function`` of each function."""
    found = {name: x if name in OF_PARAMS else tree(x) for name, x in extra_args.items()}
    found |= {name: function(fn) for name, fn in found.items() if name in OF_PARAMS and callable(fn)}
    if callable(grad_fn := found.get("grad_fn")):
        found["grad_fn"] = lambda *args, **kwargs: tree(grad_fn(*args, **kwargs))
    return found
