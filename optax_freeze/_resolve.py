"""The one door: a spec meets its parameters, and there is one answer for each leaf.

A *spec* says what is frozen, in whichever form is handiest: a bool, path patterns, a selector, ordered rules, a prefix
tree of bools, or a function of the parameters' shapes. :func:`resolve` turns any of them into an answer per leaf, and
everything else in the library asks it.

Resolution is strict, since a pattern that silently matches nothing is the usual way in which a frozen layer comes to be
trained. It happens once, in ``init``: Optax calls its own label functions again on the updates, whose leaves may be
missing, of other dtypes and at other paths by then.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from optax_freeze import _tree
from optax_freeze._select import Selector, as_bool, as_selector, ask_without_values, is_patterns
from optax_freeze._tree import Leaf, PyTree, message

Spec: TypeAlias = bool | str | Sequence[str] | Selector | Callable[[PyTree], PyTree] | PyTree
"""Every form in which "what is frozen" may be said."""

Tied: TypeAlias = Literal["error", "ignore"]


def resolve(frozen: Spec, params: PyTree) -> PyTree:
    """Says for each leaf of ``params`` whether it is frozen.

    Args:
      frozen: the spec, in any form.
      params: any pytree of arrays or of ``jax.ShapeDtypeStruct``; only paths, shapes and dtypes are looked at.

    Returns:
      A tree of the structure of ``params`` with True (frozen) or False at every leaf. Whatever is no floating-point or
      complex array is True, and so is a hole.

    Raises:
      ValueError: if a pattern matches nothing, a rule is shadowed, a tree does not fit or holds something else than
        bools, or two leaves have the same path.
      TypeError: if a function of the spec looks at values.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"kernel": np.zeros((2, 2), np.float32), "bias": np.zeros(2, np.float32), "steps": np.int32(3)}
      >>> fz.resolve("kernel", params)
      {'bias': False, 'kernel': True, 'steps': True}
    """
    return Resolved.of(frozen, params, tied="ignore").tree()


def labels(frozen: Spec) -> Callable[[PyTree], PyTree]:
    """A label function for ``optax.multi_transform`` (``optax.partition``).

    Optax calls it on the updates again, in every ``update``: :func:`optax_freeze.freeze` resolves once and is the
    better choice where there are no other labels.

    Args:
      frozen: the spec, in any form.

    Returns:
      A function of ``params`` that returns a tree of the same structure with ``"frozen"`` at each frozen leaf or hole
      and ``"trainable"`` at any other.

    Example:
      >>> import optax, optax_freeze as fz
      >>> params = {"encoder": np.float32(1), "head": np.float32(1)}
      >>> fz.labels("encoder")(params)
      {'encoder': 'frozen', 'head': 'trainable'}
      >>> transforms = {"trainable": optax.adam(1e-3), "frozen": optax.set_to_zero()}
      >>> tx = optax.multi_transform(transforms, fz.labels("encoder"))
      >>> state = tx.init(params)
    """

    def label_fn(params: PyTree) -> PyTree:
        return Resolved.of(frozen, params, tied="ignore").labels()

    return label_fn


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Resolved:
    """A spec that has met its parameters: one answer per leaf, and what is needed to recognise the leaves again.

    A pytree node without leaves, so that an optimizer state can carry it through jit, donation and a checkpoint. The
    answer for a tree without leaves equals any other: ``optax.tree_map_params`` builds a state from a placeholder and
    maps it together with the real one.
    """

    leaves: tuple[Leaf, ...]
    frozen: tuple[bool, ...]
    treedef: Any = dataclasses.field(repr=False)  # None in a state that was unpickled

    @classmethod
    def of(cls, frozen: Spec, params: PyTree, *, tied: Tied) -> "Resolved":
        """Resolves ``frozen``; ``tied="error"`` refuses one array that is frozen at one path and trains at another."""
        if tied not in ("error", "ignore"):
            raise ValueError(
                message(
                    "unknown choice", at="tied", got=repr(tied), expected="'error' or 'ignore'", fix="use one of them"
                )
            )
        values, treedef = _tree.flatten(params)
        leaves = _tree.leaves(params)
        chosen = _choose(frozen, params, leaves) if leaves else []
        answers = [not leaf.inexact or choice for leaf, choice in zip(leaves, chosen, strict=True)]
        if tied == "error":
            _refuse_tied(values, leaves, answers)
        return cls(tuple(leaves), tuple(answers), treedef)

    def tree(self) -> PyTree:
        """True or False in the place of every leaf."""
        return jax.tree.unflatten(self.treedef, self.frozen)

    def labels(self, treedef: Any = None) -> PyTree:
        """``"frozen"`` or ``"trainable"`` in the place of every leaf."""
        return jax.tree.unflatten(
            self.treedef if treedef is None else treedef, ["frozen" if f else "trainable" for f in self.frozen]
        )

    def align(self, tree: PyTree, name: str) -> tuple[list[Any], Any]:
        """The leaves and the treedef of a tree that must have the leaves of the parameters; some may be holes."""
        values, treedef = _tree.flatten(tree)
        if self.treedef is None or treedef != self.treedef:
            refuse_other_paths(_tree.paths(tree), [leaf.path for leaf in self.leaves], name)
        for value, leaf, frozen in zip(values, self.leaves, self.frozen, strict=True):
            if not frozen and _tree.is_hole(value):
                raise ValueError(
                    message(
                        f"{name}: a leaf that trains is missing",
                        at=leaf.path,
                        got="a hole (optax.MaskedNode)",
                        expected=f"an array of shape {leaf.shape}",
                        fix="give the same `frozen` to the gradient and to the optimizer",
                    )
                )
        return values, treedef

    def take(self, values: Sequence[Any], treedef: Any) -> PyTree:
        """The trainable part of a tree: holes in the place of what is frozen."""
        return jax.tree.unflatten(treedef, [_tree.HOLE if f else v for v, f in zip(values, self.frozen, strict=True)])

    def leave(self, values: Sequence[Any], treedef: Any) -> PyTree:
        """The frozen part of a tree: holes in the place of what trains."""
        return jax.tree.unflatten(treedef, [v if f else _tree.HOLE for v, f in zip(values, self.frozen, strict=True)])

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Resolved):
            return NotImplemented
        if not self.leaves or not other.leaves:
            return True
        return self.frozen == other.frozen and self.leaves == other.leaves

    def __hash__(self) -> int:
        return hash(Resolved)

    def __reduce__(self) -> Any:
        return Resolved, (self.leaves, self.frozen, None)


def register_with_flax() -> None:
    """Teaches ``flax.serialization``, if Flax is loaded, to pass a :class:`Resolved` by."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is not None:
        serialization.register_serialization_state(Resolved, lambda _: {}, lambda target, _: target, override=True)


def refuse_other_paths(got: list[str], expected: list[str], name: str) -> None:
    """A ``ValueError`` that names the first path at which two trees differ; nothing if they have the same paths."""
    if got == expected:
        return
    missing = [p for p in expected if p not in set(got)]
    unknown = [p for p in got if p not in set(expected)]
    raise ValueError(
        message(
            f"{name}: another structure than the parameters'",
            at=(missing + unknown)[0] if missing or unknown else got[0],
            got=f"{len(got)} leaves" + (f", among them {unknown[:3]}, which the parameters lack" if unknown else ""),
            expected=f"{len(expected)} leaves" + (f", among them {missing[:3]}" if missing else ""),
            fix="pass the tree that belongs to the parameters given to `init`",
        )
    )


def _choose(frozen: Spec, params: PyTree, leaves: Sequence[Leaf]) -> list[bool]:
    """One bool per leaf, before what cannot train anyway is added."""
    if isinstance(frozen, (bool, np.bool_)):
        return [bool(frozen)] * len(leaves)
    if isinstance(frozen, (str, Selector)) or is_patterns(frozen):
        return as_selector(frozen, "frozen").select(leaves)
    if callable(frozen) and not isinstance(frozen, type(params)):  # an Equinox module is a tree that can be called
        function: Callable[[PyTree], PyTree] = frozen
        values, treedef = _tree.flatten(params)
        structs = [leaf.struct if leaf.dtype else value for value, leaf in zip(values, leaves, strict=True)]
        shapes = jax.tree.unflatten(treedef, structs)
        frozen = ask_without_values(lambda: function(shapes), f"the function {function!r}", "frozen")
    return _from_prefix(frozen, params)


def _from_prefix(prefix: PyTree, params: PyTree) -> list[bool]:
    choices, treedef = _tree.flatten(prefix)
    try:
        subtrees = treedef.flatten_up_to(params)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(_no_fit(prefix, params)) from error
    answers: list[bool] = []
    for choice, at, subtree in zip(choices, _tree.paths(prefix), subtrees, strict=True):
        both_holes = _tree.is_hole(choice) and _tree.is_hole(subtree)
        answers += [True if both_holes else as_bool(choice, at)] * len(_tree.flatten(subtree)[0])
    return answers


def _no_fit(prefix: PyTree, params: PyTree) -> str:
    covers, covered = _tree.paths(prefix), _tree.paths(params)
    bare = [p for p in covered if not any(_is_above(c, p) for c in covers)]
    loose = [c for c in covers if not any(_is_above(c, p) for p in covered)]
    if bare or loose:
        at = (bare + loose)[0]
        got = f"no entry for {bare[:3]}" if bare else f"an entry for {loose[:3]}, where the parameters have nothing"
    else:
        at, got = "", f"{type(prefix).__name__}: {jax.tree.structure(prefix)}"
    return message(
        "the tree of bools does not fit the parameters",
        at=at,
        got=got,
        expected=f"the structure of the parameters or a prefix of it, in the same containers ({type(params).__name__})",
        fix="build it from the parameters: jax.tree.map(lambda leaf: ..., params)",
    )


def _is_above(prefix: str, path: str) -> bool:
    return not prefix or path == prefix or path.startswith(prefix + "/")


def _refuse_tied(values: Sequence[Any], leaves: Sequence[Leaf], answers: Sequence[bool]) -> None:
    first: dict[int, int] = {}
    for i, value in enumerate(values):
        if leaves[i].inexact and _tree.is_concrete(value):
            j = first.setdefault(id(value), i)
            if answers[i] != answers[j]:
                frozen, trains = (i, j) if answers[i] else (j, i)
                raise ValueError(
                    message(
                        "one array stands at two paths, of which one is frozen and the other is not",
                        at=leaves[frozen].path,
                        got=f"frozen there, trained at {leaves[trains].path}",
                        expected="tied leaves frozen together or trained together",
                        fix='give both the same answer, copy the array, or pass tied="ignore"',
                    )
                )
