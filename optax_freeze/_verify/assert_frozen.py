"""Compares the frozen elements of two trees bit by bit.

``chex.assert_trees_all_equal`` gathers all arrays on the host and compares values, so -0.0 equals 0.0 and any NaN
equals any other. Here bits are compared on the devices of the arrays, and only those of frozen elements.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import is_array, message, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.module_parameters import parameters_of_modules, plan_of_parameters
from optax_freeze._spec.numpy_leaves import AS_ARRAYS_OF_JAX, dtype_in_jax, is_converted
from optax_freeze._spec.resolve import Spec, warn_of_no_proof
from optax_freeze._spec.selection import Selection
from optax_freeze._spec.selector_algebra import Selector
from optax_freeze._spec.tree import PyTree
from optax_freeze._verify import bits as _bits
from optax_freeze._verify.frozen_leaves import frozen_leaves


def assert_frozen(before: PyTree, after: PyTree, frozen: Spec) -> None:
    """Asserts that frozen parameters have not changed: every frozen bit is the same in both trees.

    Since bits are compared, -0.0 differs from 0.0, and a NaN equals only a NaN with the same bits. Sharded arrays are
    compared in place. If the two trees have different shardings, one leaf at a time is moved to the sharding with the
    smaller shards. Arrays in host memory are copied to the device in blocks. Trainable elements are not compared. A
    Python float or complex number is compared as the array that JAX makes of it, which ``jax.jit`` returns. Any other
    leaf that is not an array must be the same object, or equal.

    Args:
      before: the parameters before training; any pytree of JAX or NumPy arrays. If they are donated, keep a copy
        (``jax.tree.map(jnp.copy, params)``), or compare a :func:`optax_freeze.fingerprint` instead.
      after: the parameters now, with the same structure; Linen's metadata boxes may be there or not.
      frozen: the spec of the frozen parameters, in any form.

    Returns:
      None. Emits a :class:`optax_freeze.FreezeWarning` if patterns, a selector or a function freeze nothing, so that
      nothing was compared.

    Raises:
      AssertionError: if a frozen element changed, or a frozen leaf has another shape, dtype or type. The message lists
        every such path with the number of changed elements, and for the first 100 leaves the largest change.
      ValueError: if the structures differ; if the spec does not fit; if an array was donated; if both trees hold the
        same NNX variables, which change in place.
      TypeError: if arrays have no values, because they are traced or a ``jax.ShapeDtypeStruct``.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> fz.assert_frozen(params, {**params, "head": jnp.zeros(2)}, "encoder")
      >>> fz.assert_frozen(params, {**params, "encoder": jnp.array([1.0, 0.5])}, "encoder")
      Traceback (most recent call last):
          ...
      AssertionError: 1 of 1 frozen leaves changed
        at: encoder: 1 of 2 elements, by up to 0.5
      ...
    """
    _refuse_one_set_of_variables(before, after)
    given, before, after = before, parameters_of_modules(before), parameters_of_modules(after)
    (olds, treedef), (news, other) = _tree.flatten(before), _tree.flatten(after)
    if treedef != other:
        fix = "compare one tree before and after: the parameters, not gradients or a state"
        if isinstance(before, (bool, str, Selector)):
            fix = "the spec comes last: fz.assert_frozen(before, after, frozen)"
        _tree.refuse_other_structure(after, before, "after", fix, boxes_are_values=True)
    whole = [new if _tree.is_masked_node(old) else old for old, new in zip(olds, news, strict=True)]
    parameters = jax.tree.unflatten(treedef, whole)
    plan = plan_of_parameters(parameters, frozen, of=given)
    warn_of_no_proof(plan, parameters, parameters_of_modules(frozen), stacklevel=2)
    olds = frozen_leaves(plan, olds, "before", traced=False)
    news = frozen_leaves(plan, news, "after", traced=False)
    missing = sorted(olds.keys() ^ news.keys())
    if missing:
        got = f"optax.MaskedNode() in `{'after' if missing[0] in olds else 'before'}`"
        expected = "the leaf in both trees, or optax.MaskedNode() in both"
        fix = "compare the full parameters: fz.combine(trainable, rest)"
        raise value_error("a frozen leaf is missing", at=missing[0], got=got, expected=expected, fix=fix)
    pairs = [(old, news[path][0], selection) for path, (old, selection) in olds.items()]
    differences = jax.device_get([_difference(*pair) for pair in pairs])
    moved = [(path, pair, by) for path, pair, by in zip(olds, pairs, differences, strict=True) if any(by)]
    if moved:
        told = [f"{path or '(the root)'}: {_tell(*pair, by, far=i < 100)}" for i, (path, pair, by) in enumerate(moved)]
        what = f"{len(moved)} of {len(olds)} frozen leaves changed"
        got = "bits that differ between `before` and `after`"
        expected = "the same bits in all frozen leaves and elements"
        fix = "put the whole optimizer inside fz.freeze; fz.audit(params, frozen, tx) finds the cause; "
        fix += "for running statistics, evaluation mode or Frozen"
        by_jax = [is_converted(old) and dtype_in_jax(old.dtype) == new.dtype for _, (old, new, _), _ in moved]
        if any(by_jax):
            fix = AS_ARRAYS_OF_JAX if all(by_jax) else f"{AS_ARRAYS_OF_JAX}; {fix}"
        raise AssertionError(message(what, at=told, got=got, expected=expected, fix=fix))


def _refuse_one_set_of_variables(before: PyTree, after: PyTree) -> None:
    def variables(tree: PyTree) -> dict[int, Any]:
        nodes = filter(_tree.is_variable, jax.tree.leaves(tree, is_leaf=_tree.is_variable))
        return {id(node): node for node in nodes}

    if "flax.nnx" in sys.modules and variables(before).keys() & variables(after).keys():
        what = "`before` and `after` contain the same NNX variables, so nothing can differ"
        got = "the same module, or an nnx.state of it, whose variables change in place"
        expected = "values from before and after the training"
        fix = "copy the values before training: before = nnx.to_pure_dict(nnx.state(model, nnx.Param))"
        raise value_error(what, at="fz.assert_frozen", got=got, expected=expected, fix=fix)


def _difference(old: Any, new: Any, selection: Selection) -> Any:
    """The number of elements that differ, as two words; where they cannot be compared, a text, empty if equal."""
    if old is new:
        return ""
    if not is_array(old) and not is_array(new):
        return "" if _is_same(old, new) else f"another object: {old!r:.60} became {new!r:.60}"
    was, now = (f"{x.dtype}{list(x.shape)}" if is_array(x) else type(x).__name__ for x in (old, new))
    if was != now:
        return f"{was} became {now}"
    a, b, selection = _bits.placed(old, new, selection)
    return _bits.count(a, b, selection, axis=_bits.block_axis(*jax.tree.leaves((a, b))))


def _is_same(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    try:
        return bool(np.all(old == new))
    except (TypeError, ValueError):
        return False


def _tell(old: Any, new: Any, selection: Selection, difference: Any, *, far: bool) -> str:
    """Describes how many elements changed and, with ``far``, the largest change."""
    if isinstance(difference, str):
        return difference
    low, high = map(int, difference)
    told = f"{low + (high << 32):,} of {old.size:,} elements"
    if not far or not jnp.issubdtype(old.dtype, np.number):
        return told
    a, b, selection = _bits.placed(old, new, selection)
    if isinstance(a, tuple):  # 64-bit numbers without 64-bit mode
        with np.errstate(all="ignore"):
            largest, nan = _bits.distance(np, old, new, np.asarray(_bits.differ(a, b, selection)))
    else:
        largest, nan = jax.device_get(_bits.farthest(a, b, selection, axis=_bits.block_axis(a, b)))
    return told + (f", by up to {largest:.3g}" * bool(largest) + ", to or from NaN" * bool(nan) or ", in bits alone")
