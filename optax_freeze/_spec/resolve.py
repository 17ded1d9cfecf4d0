"""Resolves a spec of any form into a plan: :func:`make_plan`, which all functions of the library call."""

import collections
import dataclasses
import functools
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeGuard

import jax
import numpy as np

from optax_freeze._errors import (
    counted,
    described,
    in_one_line,
    is_concrete,
    message,
    refuse_unknown_choice,
    type_error,
    value_error,
)
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.masks import ElementMask, Elements, StaticRows, choice_of
from optax_freeze._spec.numpy_leaves import AS_ARRAYS_OF_JAX, dtype_in_jax, is_lost
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.plan_digest import digest_of, refuse_other_plan
from optax_freeze._spec.prefix_tree import from_function, from_prefix, refuse_condition
from optax_freeze._spec.selection import FROZEN, TRAINABLE, Selection
from optax_freeze._spec.selector_algebra import Choice, FilterOfNnx, ResolvedSpec, Selector, as_selector, is_selector
from optax_freeze._spec.tied_leaves import refuse_tied, ties
from optax_freeze._spec.tree import Leaf, Part, PyTree, Walk


class DataclassTree(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


class CustomTree(Protocol):
    def tree_flatten(self) -> Any: ...


Tree: TypeAlias = Mapping[Any, Any] | Sequence[Any] | DataclassTree | CustomTree
"""Containers of bools and element masks. What they hold is checked when they are resolved."""

Spec: TypeAlias = (
    bool
    | np.bool_
    | str
    | Selector
    | ElementMask
    | jax.Array
    | np.ndarray[Any, Any]
    | Callable[[Any], Any]
    | FilterOfNnx
    | Tree
)
"""Every form of "what is frozen". A list of patterns is a ``Sequence``, an ``nnx.State`` a ``Mapping``."""

Tied: TypeAlias = Literal["error", "ignore"]


def resolve(params: PyTree, frozen: Spec) -> PyTree:
    """Resolves a spec: says for each leaf of ``params`` whether it is frozen.

    Args:
      params: any pytree of arrays or of ``jax.ShapeDtypeStruct``; only paths, shapes and dtypes are used.
      frozen: the spec of the frozen parameters, in any form.

    Returns:
      A tree with the structure of ``params``, and with True (frozen), False or an element mask at every leaf. Leaves
      that are not floating-point or complex arrays or numbers are True, as are ``optax.MaskedNode()`` and the Python
      numbers of an Equinox module.

    Raises:
      ValueError: if a pattern matches nothing, a rule is shadowed, a tree or an element mask does not fit, a tree holds
        anything but bools and element masks, two leaves have the same path, or an element mask that lets elements train
        covers only leaves that cannot train.
      TypeError: if a function of the spec takes paths, returns one bool or looks at values, or if a leaf is an object
        that holds an array (a Keras variable).

    Example:
      >>> import optax_freeze as fz
      >>> kernel, bias = np.zeros((2, 2), np.float32), np.zeros(2, np.float32)
      >>> params = {"kernel": kernel, "bias": bias, "steps": np.int32(3)}
      >>> fz.resolve(params, "kernel")
      {'bias': False, 'kernel': True, 'steps': True}
    """
    plan = make_plan(params, frozen)
    return jax.tree.unflatten(plan.treedef, list(map(choice_of, plan.selections)))


class FreezeWarning(UserWarning):
    """The warning that a call will not do what was written.

    It is emitted if patterns, a selector or a function freeze nothing or everything, by :func:`optax_freeze.partition`,
    and by the ``init`` of :func:`optax_freeze.freeze` and :func:`optax_freeze.masked_zero_updates`. If nothing is
    frozen, it is also emitted by :func:`optax_freeze.assert_frozen`, :func:`optax_freeze.fingerprint`,
    :func:`optax_freeze.audit` and :func:`optax_freeze.audit_step`, and by ``freeze``, ``Frozen`` and ``trainable`` of
    ``optax_freeze.nnx``. Not for bools, trees and :func:`optax_freeze.spec_of`, nor for parameters with
    ``optax.MaskedNode()``.

    It is also emitted by the ``init`` of these and of :func:`optax_freeze.freeze_when` if one array is at two paths
    that both train, since they will differ, and for frozen NumPy arrays that ``jax.jit`` converts; and by
    ``checkpoint.restore`` for masks and dynamic rows that differ from those of the template.

    Example:
      >>> import warnings, optax_freeze as fz
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("error", fz.FreezeWarning)
      ...     fz.partition({"bias": np.ones(2)}, fz.where(lambda path, leaf: leaf.ndim == 2))
      Traceback (most recent call last):
      optax_freeze...FreezeWarning: the spec freezes nothing...
    """


def make_plan(params: PyTree, frozen: Spec, *, tied: Tied = "ignore", leaves: Sequence[Leaf] | None = None) -> Plan:
    """The plan of a spec; ``leaves`` are those of ``params``, if the caller knows more than the tree contains."""
    refuse_unknown_choice(tied, ("error", "ignore"), at="tied")
    walk = _tree.walk(params)
    leaves = walk.leaves() if leaves is None else leaves
    choices = choose(frozen, params, leaves) if leaves else []
    # An entry of the spec is refused if no leaf of it can train, and not at each integer beside weights that can.
    covered: dict[int, list[int]] = collections.defaultdict(list)
    for i, choice in enumerate(choices):
        covered[id(choice)].append(i)
    for numbers in covered.values():
        refuse_untrainable(choices[numbers[0]], [leaves[i] for i in numbers])
    try:
        return plan_of_choices(walk, leaves, choices, tied)
    except ValueError as error:
        if isinstance(frozen, StaticRows):
            _refuse_for_all(frozen, leaves, error)
        raise


def refuse_untrainable(choice: Choice, leaves: Sequence[Leaf]) -> None:
    """A ``ValueError`` for an element mask of leaves none of which can train, if some of their elements would."""
    if isinstance(choice, bool) or any(leaf.may_train for leaf in leaves):
        return
    for leaf in leaves:
        if leaf.shape and _would_train(choice, leaf):
            what, got = f"{choice!r} trains a part of a leaf that cannot train", f"{leaf.dtype} of shape {leaf.shape}"
            expected = "a floating-point or complex leaf: any other is frozen as a whole"
            fix = "write True in place of the mask; if the leaf should train, convert it: leaf.astype(jnp.float32)"
            raise value_error(what, at=leaf.path, got=got, expected=expected, fix=fix)


def _would_train(mask: ElementMask, leaf: Leaf) -> bool:
    """Whether a mask lets elements of a leaf train; False if it has no values that say so."""
    if isinstance(mask, Elements):
        return is_concrete(mask.array) and not np.all(mask.array)
    return mask.fit(leaf) is not FROZEN


def _refuse_for_all(rows: StaticRows, leaves: Sequence[Leaf], error: ValueError) -> None:
    """A ``ValueError`` if rows were given alone, and one leaf has them but not every one."""
    for leaf in sorted(leaves, key=lambda leaf: math.prod(leaf.shape or ()), reverse=True):
        try:
            _fit(rows, leaf)
        except ValueError:
            continue
        raise value_error(
            "rows without a leaf are those of every leaf",
            at="frozen",
            got=in_one_line(error).split(" got: ")[0],
            expected="rows that every leaf has, or a leaf for them",
            fix=f"name the leaf: fz.rules({{{leaf.path!r}: {rows!r}}})",
        ) from error


def plan_of_choices(walk: Walk, leaves: Sequence[Leaf], choices: Sequence[Choice], tied: Tied) -> Plan:
    """The plan of one choice per leaf; whatever cannot have a gradient is frozen."""
    pairs = zip(choices, leaves, strict=True)
    selections = [_fit(choice if leaf.inexact else True, leaf) for choice, leaf in pairs]
    if tied == "error":
        refuse_tied(walk.values, leaves, selections)
    # An optimizer state contains the plan, so only the static fields of a `VariableLeaf` are kept.
    kinds = bool(walk.variables), walk.wrapped and not walk.variables
    return Plan(tuple(Leaf(*leaf) for leaf in leaves), tuple(selections), walk.treedef, *kinds)


def _fit(choice: Choice, leaf: Leaf) -> Selection:
    if isinstance(choice, bool):
        return FROZEN if choice else TRAINABLE
    if np.zeros((), leaf.dtype) != 0:
        what, got = "a leaf whose dtype has no zero cannot be frozen in part", f"{choice!r} for {leaf.dtype}"
        fix = "freeze the whole leaf, or train it"
        raise value_error(what, at=leaf.path, got=got, expected="True or False", fix=fix)
    return choice.fit(leaf)


def warn_of_extent(plan: Plan, params: PyTree, frozen: Spec, *, or_everything: bool = True, stacklevel: int) -> None:
    """Emits a :class:`FreezeWarning` if nothing is frozen, or everything; bools and trees are explicit."""
    decides = (is_selector(frozen) or _is_function(frozen, params)) and not isinstance(frozen, ResolvedSpec)
    extent = plan.extent(params) if decides else None
    if extent == "nothing" or (extent == "everything" and or_everything):
        inexact = sum(leaf.inexact for leaf in plan.leaves)
        got = f"{described(frozen)}: {inexact if extent == 'everything' else 0} of {inexact} leaves are frozen"
        expected = "some frozen and some trainable leaves" if or_everything else "at least one frozen leaf"
        fix = f"correct the spec, or pass {extent == 'everything'} if this is intended"
        text = message(f"the spec freezes {extent}", at="frozen", got=got, expected=expected, fix=fix)
        warnings.warn(text, FreezeWarning, stacklevel=stacklevel + 1)


def warn_of_no_proof(plan: Plan, params: PyTree, frozen: Spec, *, stacklevel: int) -> None:
    """Emits a :class:`FreezeWarning` if a spec gives a check nothing to compare, not even an integer."""
    if plan.extent(params) == "nothing":
        leaves = _tree.leaves(params)
        if all(
            choice is False or leaf.inexact for choice, leaf in zip(choose(frozen, params, leaves), leaves, strict=True)
        ):
            warn_of_extent(plan, params, frozen, or_everything=False, stacklevel=stacklevel + 1)


def register_with_flax(static: type = Plan) -> None:
    """Teaches ``flax.serialization``, if Flax is loaded, to store the digest of a plan, and a ``Part``."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is not None:
        register = functools.partial(serialization.register_serialization_state, override=True)

        def compared(plan: Any, state: Any) -> Any:
            fix = "read it into the state of the old optimizer, then state = fz.migrate(state, tx, params)"
            refuse_other_plan(plan, state.get("digest", ()), "the state that is read", fix)
            return plan

        register(static, lambda plan: {"digest": digest_of(plan)}, compared)

        def restored(part: Part, state: Any) -> Part:
            return dataclasses.replace(part, values=serialization.from_state_dict(part.values, state["values"]))

        register(Part, lambda part: {"values": serialization.to_state_dict(part.values)}, restored)


def choose(frozen: Spec, params: PyTree, leaves: Sequence[Leaf]) -> list[Choice]:
    """One choice per leaf, before leaves that cannot train are frozen; a mask is one object for each entry."""
    if isinstance(frozen, (bool, np.bool_)):
        return [bool(frozen)] * len(leaves)
    if is_selector(frozen):
        return as_selector(frozen, "frozen").select(leaves)
    refuse_condition(frozen, "frozen")
    if isinstance(frozen, type):
        expected = "a spec: a bool, patterns, a selector, rules, a tree of bools or a function of shapes"
        fix = "for NNX variables pass their type (nnx.LoRAParam); for each leaf use fz.where(lambda path, leaf: ...)"
        raise type_error("a class is not a spec", at="frozen", got=described(frozen), expected=expected, fix=fix)
    if _is_function(frozen, params):
        answer = from_function(frozen, params, leaves)
        return from_prefix(answer, params) if callable(answer) else choose(answer, params, leaves)
    return from_prefix(frozen, params)


def _is_function(frozen: Spec, params: PyTree) -> TypeGuard[Callable[[PyTree], PyTree]]:
    """Whether a spec is a function of the tree; an Equinox module is a tree that can be called."""
    return callable(frozen) and not isinstance(frozen, type(params))


def warn_of_leaves(values: Sequence[Any], trained: Plan, frozen: Plan, tied: Tied, *, stacklevel: int) -> None:
    """Emits a :class:`FreezeWarning` for tied leaves that train, and one for frozen ones that JAX converts.

    The plans differ for groups, which train at some steps and are frozen at others.
    """
    paths = [leaf.path for leaf in trained.leaves]
    pairs = [(i, j) for i, j in ties(values, trained.leaves) if trained.selections[i] is not FROZEN]
    if pairs and tied == "error":
        text = message(
            "one array at two paths that both train: they will differ after the first update",
            at=[paths[each] for each in pairs[0]],
            got=f"the same array at both paths{f', and {len(pairs) - 1} more such pairs' * (len(pairs) > 1)}",
            expected="one leaf for parameters that are shared",
            fix='read it in both places from one leaf; if they shall differ, copy the array, or pass tied="ignore"',
        )
        warnings.warn(text, FreezeWarning, stacklevel=stacklevel + 1)
    lost = [i for i, s in enumerate(frozen.selections) if s is not TRAINABLE and is_lost(values[i])]
    if lost:
        dtypes = dict.fromkeys(values[i].dtype for i in lost)
        text = message(
            "a frozen NumPy array will not stay as it is: jax.jit converts it",
            at=[paths[i] for i in lost[:3]],
            got=f"{counted(len(lost), 'leaf', 'leaves')} of {', '.join(map(str, dtypes))}",
            expected=f"{', '.join(str(dtype_in_jax(dtype)) for dtype in dtypes)}, the dtype that JAX makes of it",
            fix=AS_ARRAYS_OF_JAX,
        )
        warnings.warn(text, FreezeWarning, stacklevel=stacklevel + 1)
