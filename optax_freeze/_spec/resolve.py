"""The one door: a spec meets its parameters, and there is one answer for each leaf.

A *spec* says what is frozen, in whichever form is handiest: a bool, path patterns, a selector, ordered rules, a prefix
tree of bools, or a function of the parameters' shapes. :func:`resolve` turns any of them into an answer per leaf, and
everything else in the library asks it.

Resolution is strict, since a pattern that silently matches nothing is the usual way in which a frozen layer comes to be
trained. It happens once, in ``init``: Optax calls its own label functions again on the updates, whose leaves may be
missing, of other dtypes and at other paths by then.
"""

import collections
import dataclasses
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeGuard

import jax
import numpy as np
from jax.core import Tracer

from optax_freeze._errors import described, is_concrete, message, type_error, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.element_index import Answer, Dense, RowIndex, resolve_mask
from optax_freeze._spec.masks import Elements
from optax_freeze._spec.prefix_tree import from_function, from_prefix
from optax_freeze._spec.selector_algebra import Choice, Known, Selector, as_selector, is_selector
from optax_freeze._spec.tree import Leaf, Part, PyTree, Rest

Spec: TypeAlias = bool | str | Sequence[str] | Selector | Callable[[PyTree], PyTree] | PyTree
"""Every form in which "what is frozen" may be said."""

Tied: TypeAlias = Literal["error", "ignore"]


def resolve(params: PyTree, frozen: Spec) -> PyTree:
    """Says for each leaf of ``params`` whether it is frozen.

    Args:
      frozen: the spec, in any form.
      params: any pytree of arrays or of ``jax.ShapeDtypeStruct``; only paths, shapes and dtypes are looked at.

    Returns:
      A tree of the structure of ``params`` with True (frozen), False or an element mask at every leaf. Whatever is no
      floating-point or complex array is True, and so is a hole.

    Raises:
      ValueError: if a pattern matches nothing, a rule is shadowed, a tree does not fit or holds something else than
        bools and element masks, an element mask does not fit its leaf, or two leaves have the same path.
      TypeError: if a function of the spec takes paths, returns one bool for the whole tree or looks at values, or if a
        leaf holds an array and is none (a Keras variable).

    Example:
      >>> import optax_freeze as fz
      >>> params = {"kernel": np.zeros((2, 2), np.float32), "bias": np.zeros(2, np.float32), "steps": np.int32(3)}
      >>> fz.resolve(params, "kernel")
      {'bias': False, 'kernel': True, 'steps': True}
    """
    spec, masks = Resolved.of(frozen, params, tied="ignore")
    return jax.tree.unflatten(spec.treedef, spec.choices(masks))


class FreezeWarning(UserWarning):
    """Patterns, a selector or a function freeze nothing, or everything, of the parameters.

    Given where training begins: by :func:`optax_freeze.partition`, by the ``init`` of :func:`optax_freeze.freeze` and
    :func:`optax_freeze.masked_zero_updates`, and, where nothing is frozen, by ``freeze``, ``Frozen`` and ``trainable``
    of ``optax_freeze.nnx``. ``True``, ``False`` and a tree of them are taken to be meant, and parameters with holes are
    not judged.

    Example:
      >>> import warnings, optax_freeze as fz
      >>> params = {"encoder": np.ones(2, np.float32), "head": np.ones(2, np.float32)}
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("error", fz.FreezeWarning)
      ...     fz.partition(params, fz.where(lambda path, leaf: leaf.ndim == 2))
      Traceback (most recent call last):
      optax_freeze._spec.resolve.FreezeWarning: the spec freezes nothing...
    """


Masks: TypeAlias = Sequence[Any]
"""For each leaf the array of its dense mask, or a hole."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Resolved:
    """A spec that has met its parameters: one answer per leaf, and what is needed to recognise the leaves again.

    A pytree node without leaves, so that an optimizer state can carry it through jit, donation and a checkpoint. The
    arrays of dense masks are kept beside it. The answer for a tree without leaves equals any other:
    ``optax.tree_map_params`` builds a state from a placeholder and maps it together with the real one.
    """

    leaves: tuple[Leaf, ...]
    answers: tuple[Answer, ...]
    treedef: Any = dataclasses.field(repr=False)  # None in a state that was unpickled
    variables: bool = False  # of NNX: `update` is given their values, in other containers

    @classmethod
    def of(
        cls, frozen: Spec, params: PyTree, *, tied: Tied, leaves: Sequence[Leaf] | None = None
    ) -> tuple["Resolved", Masks]:
        """Resolves ``frozen``; ``tied="error"`` refuses one array that is frozen at one path and trains at another.

        ``leaves`` are those of ``params``, where more is known of them than the tree tells.
        """
        if tied not in ("error", "ignore"):
            raise value_error(
                "unknown choice",
                at="tied",
                got=described(tied),
                expected="'error' or 'ignore'",
                fix="use one of them",
            )
        walk = _tree.walk(params)
        leaves = walk.leaves() if leaves is None else leaves
        choices = _choose(frozen, params, leaves) if leaves else []
        pairs = [
            resolve_mask(choice if leaf.inexact else True, leaf) for choice, leaf in zip(choices, leaves, strict=True)
        ]
        answers, masks = tuple(answer for answer, _ in pairs), [mask for _, mask in pairs]
        if tied == "error":
            _refuse_tied(walk.values, leaves, pairs)
        # A state holds the spec: of a `VariableLeaf` only what is static.
        return cls(tuple(Leaf(*leaf) for leaf in leaves), answers, walk.treedef, bool(walk.variables)), masks

    @property
    def in_part(self) -> bool:
        """Whether some leaf is frozen in part."""
        return any(not isinstance(answer, bool) for answer in self.answers)

    def extent(self, params: PyTree) -> Literal["nothing", "everything"] | None:
        """What is frozen of these parameters if it is nothing or everything; None where leaves are missing."""
        answers = [answer for leaf, answer in zip(self.leaves, self.answers, strict=True) if leaf.inexact]
        if answers and not any(map(_tree.is_leaf, _tree.flatten(params)[0])):
            if all(answer is False for answer in answers):
                return "nothing"
            if all(answer is True for answer in answers):
                return "everything"
        return None

    def choices(self, masks: Masks) -> list[Choice]:
        """The answers as a spec says them."""
        return [_as_choice(answer, mask) for answer, mask in zip(self.answers, masks, strict=True)]

    def labels(self, treedef: Any = None) -> PyTree:
        """``"frozen"`` or ``"trainable"`` in the place of every leaf."""
        labels = ["frozen" if answer is True else "trainable" for answer in self.answers]
        return jax.tree.unflatten(self.treedef if treedef is None else treedef, labels)

    def align(self, tree: PyTree, name: str, fix: str | None = None) -> tuple[list[Any], Any]:
        """The leaves and the treedef of a tree that must have the leaves of the parameters; some may be holes.

        ``fix`` is that of the error for a leaf of which something is missing.
        """
        values, treedef = _tree.flatten_beside(self.treedef, tree)
        if self.treedef is None or treedef != self.treedef:
            other = "pass the tree that belongs to the parameters given to `init`"
            if self.variables:
                other += (
                    "; after freezing or thawing a module make the nnx.Optimizer anew (fz.migrate keeps its moments)"
                )
            expected = [leaf.path for leaf in self.leaves]
            extra = [leaf for leaf in _tree.leaves(tree) if leaf.path not in expected]
            if "equinox" in sys.modules and extra and not any(leaf.inexact for leaf in extra):
                other += "; an Equinox module whole in both places, or eqx.filter(model, eqx.is_inexact_array) in both"
            _tree.refuse_other_paths(_tree.paths(tree), expected, name, other)
            if self.treedef is not None and not self.variables:
                _tree.refuse_other_structure(
                    tree, jax.tree.unflatten(self.treedef, range(len(self.leaves))), name, other
                )
        for value, leaf, answer in zip(values, self.leaves, self.answers, strict=True):
            if answer is not True:
                refuse_other_leaf(value, leaf, answer, name, fix=fix)
        return values, treedef

    def take(self, values: Sequence[Any], masks: Masks) -> list[Any]:
        """The trainable part: holes in the place of what is frozen, a ``Part`` of what is frozen in part."""
        return [
            _tree.HOLE
            if answer is True
            else value
            if answer is False or isinstance(value, Part)
            else answer.take(value, mask)
            for value, answer, mask in zip(values, self.answers, masks, strict=True)
        ]

    def leave(self, values: Sequence[Any], masks: Masks) -> list[Any]:
        """The rest: holes in the place of what trains, the full leaf and its mask for what is frozen in part."""
        return [
            value
            if answer is True
            else _tree.HOLE
            if answer is False or isinstance(value, Part)
            else Rest(value, mask, answer)
            for value, answer, mask in zip(values, self.answers, masks, strict=True)
        ]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Resolved):
            return NotImplemented
        if not self.leaves or not other.leaves:
            return True
        return self.answers == other.answers and self.leaves == other.leaves

    def __hash__(self) -> int:
        return hash(Resolved)

    def __reduce__(self) -> Any:
        return Resolved, (self.leaves, self.answers, None, self.variables)


def _as_choice(answer: Answer, mask: Any) -> Choice:
    if isinstance(answer, bool):
        return answer
    return answer.source if isinstance(answer, RowIndex) else Elements(mask, answer.compact, answer.count)


def refuse_other_leaf(
    value: Any, leaf: Leaf, answer: Any, name: str, *, whole: bool = True, fix: str | None = None
) -> None:
    """Refuses what cannot be in the place of a leaf that trains, in whole or in part (``whole``: a full array may)."""
    in_part = not isinstance(answer, bool) or leaf.index is not None
    index = leaf.index if isinstance(answer, bool) else getattr(answer, "part_index", answer)
    is_vector = isinstance(answer, Dense) and answer.compact
    narrow = leaf.index is not None or (not whole and (is_vector or isinstance(answer, RowIndex)))
    what, got = f"{name}: not what trains of the leaf", ""
    if value is None or _tree.is_hole(value):
        what, got = f"{name}: a leaf that trains is missing", "None" if value is None else "a hole (optax.MaskedNode)"
    elif isinstance(value, Part):
        if not in_part or value.index != index or value.shape != leaf.shape:
            rows = f"a leaf frozen by {value.index.source}" if isinstance(value.index, RowIndex) else "single elements"
            got = f"a Part of {rows}, of shape {value.shape}"
    elif narrow or (in_part and not _fits(np.shape(value), leaf, answer, name)):
        got = f"an array of shape {np.shape(value)}"
    if got:
        expected = f"an array of shape {leaf.shape}" + (", or the Part of it that trains" if in_part else "")
        if name == "params" and _tree.is_hole(value):
            fix = "pass the full parameters: fz.combine(trainable, rest)"
        if fix is None or not (isinstance(value, Part) or _tree.is_hole(value)):
            fix = "give the same `frozen` to the gradient, the optimizer and fz.apply_updates"
        raise value_error(what, at=leaf.path, got=got, expected=expected, fix=fix)


def _fits(shape: tuple[int, ...], leaf: Leaf, answer: Any, name: str) -> bool:
    """Whether an array has the leaf's shape; a gradient may have an axis of examples, over which a mask broadcasts."""
    broadcasts = name == "updates" and isinstance(answer, Dense) and not answer.compact
    return shape == leaf.shape or (broadcasts and shape[1:] == leaf.shape)


def warn_of_extent(frozen: Spec, params: PyTree, spec: Resolved, *, stacklevel: int) -> None:
    """Warns if patterns, a selector or a function come to nothing or everything; bools and trees say what they mean."""
    decides = (is_selector(frozen) or _is_function(frozen, params)) and not isinstance(frozen, Known)
    extent = spec.extent(params) if decides else None
    if extent is not None:
        inexact = sum(leaf.inexact for leaf in spec.leaves)
        text = message(
            f"the spec freezes {extent}",
            at="frozen",
            got=f"{described(frozen)}: {inexact if extent == 'everything' else 0} of {inexact} leaves are frozen",
            expected="some frozen leaves and some that train",
            fix=f"correct the spec, or give {extent == 'everything'} if it is meant",
        )
        warnings.warn(text, FreezeWarning, stacklevel=stacklevel + 1)


def register_with_flax(static: type = Resolved) -> None:
    """Teaches ``flax.serialization``, if Flax is loaded, to pass a static node by, and to store a ``Part``."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is not None:
        serialization.register_serialization_state(static, lambda _: {}, lambda target, _: target, override=True)
        serialization.register_serialization_state(
            Part,
            lambda part: {"values": part.values},
            lambda part, state: dataclasses.replace(part, values=state["values"]),
            override=True,
        )


def _choose(frozen: Spec, params: PyTree, leaves: Sequence[Leaf]) -> list[Choice]:
    """One choice per leaf, before what cannot train anyway is added."""
    if isinstance(frozen, (bool, np.bool_)):
        return [bool(frozen)] * len(leaves)
    if is_selector(frozen):
        return as_selector(frozen, "frozen").select(leaves)
    if isinstance(frozen, type):
        raise type_error(
            "a class says nothing about what is frozen",
            at="frozen",
            got=described(frozen),
            expected="a spec: a bool, patterns, a selector, rules, a tree of bools or a function of shapes",
            fix="for NNX variables give their type (nnx.LoRAParam); for each leaf fz.where(lambda path, leaf: ...)",
        )
    if _is_function(frozen, params):
        answer = from_function(frozen, params, leaves)
        return from_prefix(answer, params) if callable(answer) else _choose(answer, params, leaves)
    return from_prefix(frozen, params)


def _is_function(frozen: Spec, params: PyTree) -> TypeGuard[Callable[[PyTree], PyTree]]:
    """Whether a spec is a function of the tree; an Equinox module is a tree that can be called."""
    return callable(frozen) and not isinstance(frozen, type(params))


def _refuse_tied(values: Sequence[Any], leaves: Sequence[Leaf], answers: Sequence[tuple[Answer, Any]]) -> None:
    first: dict[int, int] = {}
    times = collections.Counter(map(id, values))
    for i, value in enumerate(values):
        if times[id(value)] > 1 and leaves[i].inexact and is_concrete(value):
            j = first.setdefault(id(value), i)
            if not _same(answers[i], answers[j]):
                frozen, trains = (j, i) if answers[j][0] is True or answers[i][0] is False else (i, j)
                raise value_error(
                    "one array stands at two paths, and is not frozen alike at both",
                    at=leaves[frozen].path,
                    got=f"frozen there, trained at {leaves[trains].path}, in whole or in part",
                    expected="tied leaves frozen together or trained together",
                    fix='give both the same answer, copy the array, or pass tied="ignore"',
                )


def _same(a: tuple[Answer, Any], b: tuple[Answer, Any]) -> bool:
    if a[0] != b[0] or not isinstance(a[0], Dense) or a[1] is b[1]:
        return a[0] == b[0]
    return not isinstance(a[1], Tracer) and not isinstance(b[1], Tracer) and np.array_equal(a[1], b[1])
