"""Compares patches with the parameters of their base, and puts their values there."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import counted, described, is_array, is_scalar, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.element_masks import elements
from optax_freeze._spec.masks import Elements
from optax_freeze._spec.patterns import nearest
from optax_freeze._spec.pretrained_leaf import dtype_of, grown, growth_of, kind_of, loaded, put, shape_of
from optax_freeze._spec.resolve import plan_of_choices
from optax_freeze._spec.selection import FROZEN, TRAINABLE, RowSelection
from optax_freeze._spec.tree import Leaf, PyTree
from optax_freeze._verify import saved_base
from optax_freeze._verify.saved_base import LeafRecord
from optax_freeze.patch._layout import VALUES, TrainedLeaf
from optax_freeze.patch._patch import Patch

_FIX = "give the parameters that the run started from"


def refuse_missing(patch: Patch, paths: Sequence[str]) -> None:
    known = set(paths)
    missing = [leaf.path for leaf in patch._leaves if leaf.path not in known]
    if missing:
        got = f"{counted(len(missing), 'leaf', 'leaves')} of the patch, of {len(patch._leaves)}"
        fix = f"{_FIX}; nearest paths: {nearest(missing[0], paths)}"
        what, expected = "params: a leaf of the patch is missing", "every leaf that was there when it was taken"
        raise value_error(what, at=missing[:3], got=got, expected=expected, fix=fix)


def refuse_other_base(params: PyTree, patch: Patch, walk: _tree.Walk, leaves: Sequence[Leaf]) -> None:
    saved = {leaf.path: leaf for leaf in patch._leaves}

    def now(spec: Mapping[str, Any], fingerprints: bool) -> list[LeafRecord]:
        plan = plan_of_choices(walk, leaves, [spec.get(path, False) for path in walk.paths], "ignore")
        found = saved_base.leaf_records(params, plan, fingerprints=fingerprints)
        return [leaf for leaf in found if leaf.path in saved]

    fix = f"{_FIX}; or base=False, for another dtype or a longer table"
    got = now({}, fingerprints=False)
    expected = [saved[leaf.path] for leaf in got]
    saved_base.refuse_other_arrays(expected, got, "params", "the patch", fix)
    fix = f"{_FIX}; patches of one base together, patch.apply(params, one, other); or base=False, for another base, or "
    fix += "if the run trained more than is in the patch"
    told = "the frozen bits that were there when the patch was taken"
    saved_base.refuse_other_base(expected, now(patch._choices, fingerprints=True), "the patch", told, fix)


def refuse_misfits(patch: Patch, own: Mapping[str, Any]) -> None:
    for leaf in patch._leaves:
        value, selection, struct = own[leaf.path], leaf.selection, leaf.struct
        if struct is None:
            continue
        is_number = is_array(value) or is_scalar(value)
        longer = growth_of(leaf.path, value, struct) if is_number else None
        fits = is_number and (shape_of(value) == struct.shape or longer is not None)
        if longer is not None and isinstance(selection, RowSelection):
            fits = longer.axis == selection.axis
        kinds = [kind_of(struct.dtype), kind_of(dtype_of(value))] if is_number else []
        if selection is not FROZEN and fits:
            fits = kinds[0] == kinds[1] or kinds == [jnp.floating, jnp.complexfloating]
        if not fits:
            expected = f"an array of {struct.dtype} of shape {struct.shape}, or longer along one axis"
            expected += f", {selection.axis}" if isinstance(selection, RowSelection) else ""
            what = "params: a leaf of the patch does not fit"
            raise value_error(what, at=leaf.path, got=described(value), expected=expected, fix=_FIX)


def refuse_overlap(patches: Sequence[Patch], own: Mapping[str, Any]) -> None:
    found: dict[str, Any] = {}
    for each in patches:
        for its in each._own:
            path = its.leaf.path
            shape = shape_of(own[path])
            here, before = its.trained(shape), found.get(path, np.zeros((1,) * len(shape), bool))
            both = np.broadcast_to(before & here, shape)
            if both.any():
                got = f"{counted(int(both.sum()), 'element', 'elements')} of shape {shape} in two patches"
                what, fix = "two patches have a value for the same element", "apply only one of them"
                raise value_error(what, at=path, got=got, expected="each element in one patch", fix=fix)
            found[path] = before | here


def put_patch(own: Any, trained: TrainedLeaf) -> Any:
    (leaf, name, tensors), shape = trained, shape_of(own)
    fix = "use a wider dtype in `params`"
    if leaf.selection is TRAINABLE:
        value, longer = np.array(tensors[name]), growth_of(leaf.path, own, leaf.struct)
        return loaded(own, value, leaf.path, fix=fix) if longer is None else grown(own, value, *longer[:2], fix)
    choice: Any = trained.choice(shape)
    mask = elements(choice.array, compact=True) if isinstance(choice, Elements) else choice
    selection = mask.fit(Leaf(leaf.path, shape, dtype_of(own)))
    return put(own, tensors[name + VALUES], selection, leaf.path, fix)
