"""Proof that nothing frozen moved: two trees compared bit by bit, and a small digest of what is frozen.

``chex.assert_trees_all_equal`` compares numbers, on the host: -0.0 equals 0.0 there, one NaN equals another, and every
array is gathered. Here bits are compared where the arrays lie, and only what is frozen, single elements included. A
digest is for when there are no two trees: one was donated, is on another machine, or is in a checkpoint.
"""

import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._errors import is_array, message, type_error, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.element_index import Answer
from optax_freeze._spec.resolve import Masks, Resolved, Spec
from optax_freeze._spec.tree import Leaf, Part, PyTree, Rest
from optax_freeze._verify import bits as _bits


def assert_frozen(before: PyTree, after: PyTree, frozen: Spec) -> None:
    """Asserts that nothing frozen has moved: every bit of it is the same before and after.

    Bits are compared: -0.0 is not 0.0, and a NaN equals only a NaN of the same bits. Sharded arrays are compared where
    they lie; where the two trees are placed differently, one leaf after the other goes to the smaller shards of the
    two. What trains is not looked at. An object that is no array must be the same object, or equal.

    Args:
      before: the parameters as they were; any pytree of arrays, JAX's or NumPy's. Under donation keep a copy,
        ``jax.tree.map(jnp.copy, params)``, or compare a :func:`fingerprint` instead.
      after: the parameters now, in the same structure.
      frozen: what is frozen, in any form.

    Returns:
      None.

    Raises:
      AssertionError: if something frozen moved, or has another shape, dtype or type now. It names every such path and
        how many elements moved; for the first hundred, how far.
      ValueError: if the structures differ, the spec does not fit, an array was donated, or both trees hold the same NNX
        variables, which change in place.
      TypeError: if arrays have no values: under ``jax.jit``, or a ``jax.ShapeDtypeStruct``.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> fz.assert_frozen(params, {**params, "head": jnp.zeros(2)}, "encoder")
      >>> fz.assert_frozen(params, {**params, "encoder": jnp.array([1.0, 0.5])}, "encoder")
      Traceback (most recent call last):
          ...
      AssertionError: 1 of 1 frozen leaves moved
        at: encoder: 1 of 2 elements, by up to 0.5
      ...
    """
    (olds, treedef), (news, other) = _tree.flatten(before), _tree.flatten(after)
    if treedef != other:
        fix = "compare one tree before and after: the parameters, not gradients or a state"
        _tree.refuse_other_structure(after, before, "after", fix)
    _refuse_one_set_of_variables(before, after)
    whole = [new if _tree.is_hole(old) else old for old, new in zip(olds, news, strict=True)]
    resolved = Resolved.of(frozen, jax.tree.unflatten(treedef, whole), tied="ignore")
    olds = _frozen_leaves(*resolved, olds, "before", traced=False)
    news = _frozen_leaves(*resolved, news, "after", traced=False)
    missing = sorted(olds.keys() ^ news.keys())
    if missing:
        raise value_error(
            "a frozen leaf is missing",
            at=missing[0],
            got=f"a hole in `{'after' if missing[0] in olds else 'before'}`",
            expected="the leaf in both trees, or a hole in both",
            fix="compare the full parameters: fz.combine(trainable, rest)",
        )
    pairs = [(old.value, news[path].value, old.mask, old.answer) for path, old in olds.items()]
    differences = jax.device_get([_difference(*pair) for pair in pairs])
    found = zip(olds, pairs, differences, strict=True)
    moved = [(path or "(the root)", pair, difference) for path, pair, difference in found if any(difference)]
    if moved:
        told = [f"{path}: {_tell(*pair, difference, far=i < 100)}" for i, (path, pair, difference) in enumerate(moved)]
        raise AssertionError(
            message(
                f"{len(moved)} of {len(olds)} frozen leaves moved",
                at=told,
                got="other bits than before",
                expected="the same bits wherever `frozen` says so",
                fix="put the whole optimizer inside fz.freeze; fz.audit(tx, params, frozen) says what moves them",
            )
        )


def fingerprint(params: PyTree, frozen: Spec) -> jax.Array:
    """A digest of what is frozen: it changes when a bit of that does, and not otherwise.

    It is a function of the set of frozen elements: of their bits, their places, and the path, dtype and shape of
    their leaf. It does not depend on the containers, on how a mask was said (rows, or the same rows as a boolean
    array), on sharding, device or ``jit``, on 64-bit mode, nor on what trains. A leaf of which nothing is frozen, an
    empty one and a hole contribute nothing, so that ``rest`` of :func:`optax_freeze.partition` has the fingerprint of
    the whole. Of an object that is no array its path counts, with the value of a Python number or string, the name of a
    function, the type of anything else.

    The arrays are read once, and nothing of their size is written. Every element gives a word in each of four lanes,
    and a lane is the sum of its words modulo 2**32, so that their order does not matter. A word is made of the
    element's 32 bits by steps that can each be undone: its leaf and place are added, and the sum is shifted onto
    itself and multiplied by odd numbers. In a given place other bits thus give another word: **a change within 32 bits
    of one element, a flipped bit above all, changes all four lanes with certainty**. Wider changes go unseen with
    a probability near 2**-128. It does not stand against somebody who constructs a collision.

    Args:
      params: any pytree of arrays, JAX's or NumPy's; they may be traced. Where arrays span processes, every process
        must call this, with the same spec.
      frozen: what is frozen, in any form.

    Returns:
      A ``uint32`` array of shape ``(4,)``; zeros if nothing is frozen. Compare all of it: ``(a == b).all()``.

    Raises:
      ValueError: if the spec does not fit, or an array was donated.
      TypeError: if arrays have no values: a ``jax.ShapeDtypeStruct``.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> digest = fz.fingerprint(params, "encoder")
      >>> digest.shape, digest.dtype
      ((4,), dtype('uint32'))
      >>> trained = {**params, "head": jnp.zeros(2)}
      >>> bool((fz.fingerprint(trained, "encoder") == digest).all())
      True
    """
    of_leaves = digests(params, *Resolved.of(frozen, params, tied="ignore")).values()
    if any(isinstance(digest[0], Tracer) for digest in of_leaves):
        return jnp.stack([functools.reduce(jnp.add, lane) for lane in zip(*of_leaves, strict=True)])
    # On the host: leaves may lie on different devices.
    lanes = [np.zeros(_bits.LANES, np.uint32), *jax.device_get(list(of_leaves))]
    return jnp.asarray(np.array(lanes, np.uint32).sum(axis=0, dtype=np.uint32))


def digests(params: PyTree, spec: Resolved, masks: Masks) -> dict[str, Any]:
    """What each frozen leaf adds to the fingerprint, lane by lane, by its path."""
    found = {}
    for path, (leaf, value, answer, mask) in _frozen_leaves(
        spec, masks, _tree.flatten(params)[0], "params", traced=True
    ).items():
        if leaf.dtype is None:
            found[path] = _bits.hashed("object", path, _name(value))
        else:
            [value, mask] = _bits.placed(value, mask)
            found[path] = _bits.digest(value, _bits.hashed("array", path, str(leaf.dtype), leaf.shape), mask, answer)
    return found


class _Frozen(NamedTuple):
    """A leaf that is frozen, at least in part."""

    leaf: Leaf
    value: Any
    answer: Answer
    mask: Any


def _frozen_leaves(spec: Resolved, masks: Masks, values: list[Any], name: str, *, traced: bool) -> dict[str, _Frozen]:
    """What is frozen by its path, without holes; the full array in the place of the ``Rest`` of a leaf."""
    found = {}
    for leaf, value, answer, mask in zip(spec.leaves, values, spec.answers, masks, strict=True):
        if answer is False or _tree.is_hole(value) or leaf.dtype == jax.dtypes.float0:
            continue
        if isinstance(value, Rest):
            answer, mask = (value.answer, value.mask) if answer is True else (answer, mask)
            value = value.array
        _refuse_what_cannot_be_read(value, leaf.path, name, traced)
        _refuse_what_cannot_be_read(mask, leaf.path, "the mask of a leaf", traced)
        found[leaf.path] = _Frozen(leaf, value, answer, mask)
    return found


def _refuse_what_cannot_be_read(value: Any, path: str, name: str, traced: bool) -> None:
    if isinstance(value, Part):
        raise value_error(
            f"{name}: what trains of a leaf, in the place of a leaf that is frozen in part",
            at=path,
            got=f"a Part of a leaf of shape {value.shape}",
            expected="the full leaf",
            fix="pass the full parameters, fz.combine(trainable, rest), or `rest` alone",
        )
    if isinstance(value, jax.ShapeDtypeStruct) or (isinstance(value, Tracer) and not traced):
        raise type_error(
            f"{name}: an array without values",
            at=path,
            got=f"a {type(value).__name__} of shape {value.shape}",
            expected="an array with values",
            fix="call it outside jit; inside, return fz.fingerprint(params, frozen) and compare that outside"
            if isinstance(value, Tracer)
            else "initialise the parameters: model.init, not jax.eval_shape of it",
        )
    if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_deleted():
        raise value_error(
            f"{name}: the array has been deleted",
            at=path,
            got="an array that was donated to a jitted function, which wrote over it",
            expected="an array that still has its values",
            fix="keep a copy beforehand, jax.tree.map(jnp.copy, params), or only fz.fingerprint(params, frozen)",
        )


def _refuse_one_set_of_variables(before: PyTree, after: PyTree) -> None:
    variable = getattr(sys.modules.get("flax.nnx"), "Variable", ())

    def variables(tree: PyTree) -> dict[int, Any]:
        nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, variable))
        return {id(node): node for node in nodes if isinstance(node, variable)}

    if variable and not variables(before).keys().isdisjoint(variables(after)):
        raise value_error(
            "`before` and `after` hold the same NNX variables, so that nothing can differ",
            at="fz.assert_frozen",
            got="a module, or nnx.state of it, twice: its variables change in place, and a state holds those",
            expected="values from before the training, and values from after it",
            fix="keep the values beforehand: before = nnx.to_pure_dict(nnx.state(model, nnx.Param))",
        )


def _difference(old: Any, new: Any, mask: Any, answer: Answer) -> Any:
    """How many elements differ, in two words; for what has none to compare a text, empty where all is well."""
    if old is new:
        return ""
    if not is_array(old) and not is_array(new):
        return "" if _is_same(old, new) else f"another object: {old!r:.60} became {new!r:.60}"
    kinds = [f"{x.dtype}{list(x.shape)}" if is_array(x) else type(x).__name__ for x in (old, new)]
    return _bits.count(*_bits.placed(old, new, mask), answer) if kinds[0] == kinds[1] else " became ".join(kinds)


def _is_same(old: Any, new: Any) -> bool:
    """Whether two objects that are no arrays are the same; numbers by their digits, for -0.0 and NaN."""
    if type(old) is not type(new):
        return False
    if isinstance(old, (float, complex)):
        return repr(old) == repr(new)
    try:
        return bool(np.all(old == new))
    except (TypeError, ValueError):
        return False


def _tell(old: Any, new: Any, mask: Any, answer: Answer, difference: Any, *, far: bool) -> str:
    """How many elements moved, and how far."""
    if isinstance(difference, str):
        return difference
    low, high = map(int, difference)
    told = f"{low + (high << 32):,} of {old.size:,} elements"
    return f"{told}{_how_far(old, new, mask, answer)}" if far and jnp.issubdtype(old.dtype, np.number) else told


def _how_far(old: Any, new: Any, mask: Any, answer: Answer) -> str:
    a, b, mask = _bits.placed(old, new, mask)
    differ = _bits.differ(a, b, mask, answer)
    if isinstance(a, tuple):  # 64-bit numbers without 64-bit mode
        with np.errstate(all="ignore"):
            far, nan = _bits.distance(np, old, new, np.asarray(differ))
    else:
        far, nan = jax.device_get(jax.jit(_bits.distance, static_argnums=0)(jnp, a, b, differ))
    told = f", by up to {far:.3g}" * bool(far) + ", to or from NaN" * bool(nan)
    return told or ", in bits alone"


def _name(value: Any) -> str:
    """What every process knows of an object: a number or string by itself, a function by its name, else the type."""
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return f"{type(value).__name__} {value!r}"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
