"""Who owns what: patterns, perhaps with element masks, divide the parameters into groups and the rest.

Every floating-point element belongs to one group or to the rest. Each of them is a resolved spec in which everything
else is frozen, so that what a group holds is taken out and put back as everywhere in this library.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.element_index import Dense, RowIndex, resolve_mask
from optax_freeze._spec.explicit_mesh import explicit_sharding, laid_out
from optax_freeze._spec.masks import Elements, Rows, elements, rows
from optax_freeze._spec.resolve import Masks, Resolved, Tied
from optax_freeze._spec.selector_algebra import Choice, Known, Selector, as_selector
from optax_freeze._spec.tree import Leaf, Part, PyTree


def group_name(key: Any) -> str:
    """What a group is called: its pattern, or its selector as it is written."""
    return key if isinstance(key, str) else repr(as_selector(key, "a group"))


class Claim(NamedTuple):
    """What a group lays claim to: leaves, or those of their elements at which the mask is True."""

    name: str
    selector: Selector
    mask: Rows | Elements | None


@dataclasses.dataclass(frozen=True)
class Division:
    """Parameters divided into groups and the rest; all specs are about the same leaves."""

    whole: Resolved  # everything trains
    specs: tuple[Resolved, ...]  # of each group, then of the rest

    @classmethod
    def of(cls, claims: Sequence[Claim], params: PyTree, *, tied: Tied) -> tuple["Division", list[list[Any]]]:
        """Divides ``params``; also gives each group's arrays of dense masks, True where an element is not its own.

        Raises:
          ValueError: if a group has nothing of its own, masks at one leaf do not go together, or leaves are tied
            across groups.
        """
        values, _ = _tree.flatten(params)
        leaves = _tree.leaves(params)
        whole, _ = Resolved.of(False, params, tied="ignore")
        paths = tuple(leaf.path for leaf in leaves)
        taken: list[Choice] = [False] * len(leaves)
        found = []
        for claim in claims if leaves else ():
            others, hits = _claim(claim, leaves, values, taken)
            found.append(Resolved.of(Known(paths, tuple(others)), params, tied=tied))
            if all(leaves[i].inexact and found[-1][0].answers[i] is True for i in hits):
                raise _nothing_left(claim, leaves, hits)
        found.append(Resolved.of(Known(paths, tuple(taken)), params, tied=tied))
        # Without leaves (`optax.tree_map_params` gives a placeholder) every spec is that of no leaves.
        specs = [spec for spec, _ in found] + [whole] * (len(claims) + 1 - len(found))
        holes = [_tree.HOLE] * len(leaves)
        own = [found[k][1] if leaves and isinstance(claim.mask, Elements) else holes for k, claim in enumerate(claims)]
        return cls(whole, tuple(specs)), own

    def merge(self, i: int, parts: Sequence[Any], masks: Sequence[Masks], like: Any) -> Any:
        """One leaf that trains, out of what its owners have of it, laid out as ``like``."""
        owners = [k for k, spec in enumerate(self.specs) if spec.answers[i] is not True]
        if self.specs[owners[0]].answers[i] is False:
            return parts[owners[0]]
        leaf = self.whole.leaves[i]
        dtype = jnp.result_type(*(parts[k].dtype for k in owners))
        merged = laid_out(explicit_sharding(like), lambda: jnp.zeros(leaf.shape or (), dtype))
        for k in owners:
            answer: Any = self.specs[k].answers[i]
            merged = answer.put(merged, parts[k], masks[k][i])
        return merged


def all_masks(division: Division, own: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The dense masks of every spec, from those of the groups that have some of their own.

    The masks of the rest, and of a group that owns what others leave of a leaf, are what all others do not own.
    """
    holes = [_tree.HOLE] * len(division.whole.leaves)
    masks: list[list[Any]] = [list(arrays or holes) for arrays in [*own, []]]
    for k, spec in enumerate(division.specs):
        for i, answer in enumerate(spec.answers):
            if isinstance(answer, Dense) and _tree.is_hole(masks[k][i]):
                others = [arrays[i] for arrays in own if arrays and not _tree.is_hole(arrays[i])]
                masks[k][i] = ~functools.reduce(jnp.logical_and, others)
    return masks


def _claim(
    claim: Claim, leaves: Sequence[Leaf], values: Sequence[Any], taken: list[Choice]
) -> tuple[list[Choice], list[int]]:
    """What is not the group's at each leaf, and the leaves it names; ``taken`` gains what the group owns."""
    others: list[Choice] = [True] * len(leaves)
    hits = []
    for i, hit in enumerate(claim.selector.select(leaves)):
        if not isinstance(hit, bool):
            raise value_error(
                "a group is named by a pattern or a selector of whole leaves",
                at=leaves[i].path,
                got=f"{claim.name!r}, which selects a part of the leaf",
                expected="the element mask beside the condition",
                fix="fz.freeze_when(inner, {pattern: (mask, condition)})",
            )
        if not hit:
            continue
        hits.append(i)
        before, leaf = taken[i], leaves[i]
        if before is True or not leaf.inexact:
            continue
        if claim.mask is None:
            taken[i], others[i] = True, before
            continue
        if isinstance(values[i], Part):
            raise value_error(
                "an element mask for a leaf of which only a part is here",
                at=leaf.path,
                got=f"{claim.mask!r} in the group {claim.name!r}, and a Part from fz.freeze or fz.partition",
                expected="a full leaf",
                fix="give the group the whole Part: a condition without a mask",
            )
        taken[i], own = (claim.mask, claim.mask) if before is False else _join(before, claim.mask, leaf)
        others[i] = ~own
    return others, hits


def _join(before: Any, mask: Any, leaf: Leaf) -> tuple[Any, Any]:
    """The union of two element masks of a leaf, and what of the second is not in the first."""
    if isinstance(before, Elements) and isinstance(mask, Elements) and before.compact == mask.compact:
        a, b = jnp.asarray(before.array), jnp.asarray(mask.array)
        return elements(a | b, mask.compact), elements(b & ~a, mask.compact)
    if isinstance(before, Rows) and isinstance(mask, Rows) and before.axis % _ndim(leaf) == mask.axis % _ndim(leaf):
        a, b = (_numbers(each, leaf) for each in (before, mask))
        both, new = (rows(np.flatnonzero(named).tolist(), mask.axis) for named in (a | b, b & ~a))
        return both, new
    raise value_error(
        "groups with element masks that do not go together",
        at=leaf.path,
        got=f"{before!r} and {mask!r}",
        expected="rows along one axis, or elements that are all compact or all not",
        fix="give the masks at one leaf as the same kind",
    )


def _ndim(leaf: Leaf) -> int:
    return len(leaf.shape or ()) or 1


def _numbers(mask: Rows, leaf: Leaf) -> np.ndarray:
    """Which rows are named, as booleans."""
    assert leaf.shape is not None
    answer, _ = resolve_mask(mask, leaf)
    named = np.full(leaf.shape[mask.axis], answer is True)
    if isinstance(answer, RowIndex):
        named[:] = answer.picked_train
        for progression in answer.picked:
            named[slice(*progression)] = not answer.picked_train
    return named


def _nothing_left(claim: Claim, leaves: Sequence[Leaf], hits: Sequence[int]) -> ValueError:
    if not hits:
        got, fix = "no leaf that it selects", "correct the pattern, or leave the group out"
    else:
        got = f"{len(hits)} leaves, of which earlier groups have everything"
        fix = "put the narrower group first, or leave this one out"
    return value_error(
        f"the group {claim.name!r} has nothing of its own",
        at=leaves[hits[0]].path if hits else claim.name,
        got=got,
        expected="at least one element that no earlier group has",
        fix=fix,
    )
