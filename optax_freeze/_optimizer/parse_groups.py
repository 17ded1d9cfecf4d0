"""The groups as a user gives them to ``freeze_when``, before the parameters are known."""

import functools
import operator
from typing import Any, NamedTuple

from optax_freeze._errors import described, refuse_no_mapping, type_error, value_error
from optax_freeze._optimizer.conditions import Condition, as_condition
from optax_freeze._optimizer.each import Each
from optax_freeze._spec.masks import ElementMask
from optax_freeze._spec.prefix_tree import as_choice
from optax_freeze._spec.selector_algebra import Selectable, Selector, as_selector
from optax_freeze._spec.selectors import path


def each(*patterns: Selectable) -> Selector:
    """Makes each selected leaf a group of its own, as a key of the groups of :func:`optax_freeze.freeze_when`.

    Each group has its own optimizer state and its own gradient statistics, and is named by the path of its leaf. Leaves
    that belong to earlier groups are left out. Call ``init`` before ``optax.tree_map_params``, which otherwise
    does not know the groups.

    Args:
      *patterns: one or more patterns, as in :func:`optax_freeze.path`, or selectors.

    Returns:
      A key for :func:`optax_freeze.freeze_when`, and for :func:`optax_freeze.set_frozen`, which then sets all of these
      groups. It is not a spec.

    Raises:
      TypeError: if an argument is neither a pattern nor a selector, or is made by ``fz.each``; later, if the result is
        used as a spec.
      ValueError: if there is no argument.

    Example:
      >>> import jax.numpy as jnp, optax, optax_freeze as fz
      >>> encoder = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}
      >>> params = {"encoder": encoder, "head": {"kernel": jnp.ones(2)}}
      >>> tx = fz.freeze_when(optax.sgd(0.1), {fz.each("**/kernel"): fz.unfreeze_at(10)})
      >>> fz.currently_frozen(tx.init(params))
      {'encoder/kernel': True, 'head/kernel': True}
    """
    inner = next((pattern for pattern in patterns if isinstance(pattern, Each)), None)
    if not patterns or inner is not None:
        raise (value_error if inner is None else type_error)(
            "fz.each needs a pattern" if inner is None else "fz.each inside fz.each",
            at="fz.each",
            got="nothing" if inner is None else repr(inner),
            expected="one or more patterns or selectors",
            fix="for a group of each leaf: fz.each('**')" if inner is None else f"use {inner.selector!r} in its place",
        )
    if all(isinstance(pattern, str) for pattern in patterns):
        return Each(path(*map(str, patterns)))
    return Each(functools.reduce(operator.or_, (as_selector(pattern, "fz.each") for pattern in patterns)))


def group_name(key: Any) -> str:
    """The name of a group: its pattern, or its selector as it is written."""
    return key if isinstance(key, str) else repr(as_selector(key, "a group"))


class GivenGroup(NamedTuple):
    """A group as it is given to ``freeze_when``: some leaves, or those of their elements at which a mask is True.

    With ``each``, it stands for one group per leaf, named by the path of the leaf.
    """

    name: str
    selector: Selector
    each: bool
    mask: ElementMask | None
    condition: Condition


def parse_groups(groups: Any) -> list[GivenGroup]:
    forms = "{pattern: condition}, {pattern: bool} or {pattern: (element mask, condition)}"
    refuse_no_mapping("fz.freeze_when", groups, forms, fix="for a spec that never changes, fz.freeze(inner, frozen)")
    parsed: dict[str, GivenGroup] = {}
    for key, value in groups.items():
        name, mask, given = group_name(key), None, value
        if isinstance(value, tuple) and len(value) == 2:
            mask, given = as_choice(value[0], name), value[1]
        if isinstance(mask, bool):
            raise value_error(
                "a bool where an element mask is expected",
                at=name,
                got=repr(value),
                expected="(element mask, condition)",
                fix="for whole leaves give the condition alone: {pattern: condition}",
            )
        if name in parsed:
            what, fix = "two groups have the same name", "give each pattern or selector once"
            raise value_error(what, at=name, got=f"{key!r} twice", expected="each group once", fix=fix)
        is_each = isinstance(key, Each)
        condition = as_condition(name, given)
        if is_each and condition.call is not None:
            raise type_error(
                "fz.freeze_converged cannot compare the groups of fz.each",
                at=name,
                got=described(given),
                expected="groups that are listed from the input to the output layers",
                fix="list the layers, or freeze each leaf by its own gradient: lambda step, stats: stats.norm < 0.01",
            )
        selector = key.selector if is_each else as_selector(key, "fz.freeze_when")
        parsed[name] = GivenGroup(name, selector, is_each, mask, condition)
    return list(parsed.values())
