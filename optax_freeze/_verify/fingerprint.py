"""A small digest of everything frozen, for when there are not two trees to compare.

One of them was donated, is on another machine, or is in a checkpoint.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._spec import tree as _tree
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Spec, make_plan
from optax_freeze._spec.tree import PyTree
from optax_freeze._verify import bits as _bits
from optax_freeze._verify.frozen_leaves import frozen_leaves


def fingerprint(params: PyTree, frozen: Spec) -> jax.Array:
    """A digest of what is frozen: it changes when a bit of that does, and not otherwise.

    It is a function of the set of frozen elements: of their bits, their places, and the path, dtype and shape of
    their leaf. It does not depend on the containers, on the form of a mask (rows, or the same rows as a boolean array),
    on sharding, device, ``jit`` or 64-bit mode, nor on trainable elements. Trainable leaves, empty ones and holes
    contribute nothing, so ``rest`` of :func:`optax_freeze.partition` has the fingerprint of the whole. A leaf that is
    not an array contributes its path, with the value of a Python number or string, the name of a function, or the type
    of anything else.

    The arrays are read once, and nothing of their size is written; those in the host's memory come to the device in
    blocks. Every element gives a word in each of four lanes,
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
    of_leaves = digests(params, make_plan(params, frozen)).values()
    if any(isinstance(digest[0], Tracer) for digest in of_leaves):
        return jnp.stack([functools.reduce(jnp.add, lane) for lane in zip(*of_leaves, strict=True)])
    # On the host: leaves may lie on different devices.
    lanes = [np.zeros(_bits.LANES, np.uint32), *jax.device_get(list(of_leaves))]
    return jnp.asarray(np.array(lanes, np.uint32).sum(axis=0, dtype=np.uint32))


def digests(params: PyTree, plan: Plan) -> dict[str, Any]:
    """The contribution of each frozen leaf to the fingerprint, lane by lane, by its path."""
    found = {}
    for path, (leaf, value, selection) in frozen_leaves(plan, _tree.flatten(params)[0], "params", traced=True).items():
        if leaf.dtype is None:
            found[path] = _bits.hashed("object", path, _name(value))
        else:
            key = _bits.hashed("array", path, str(leaf.dtype), leaf.shape)
            value, selection = _bits.placed(value, selection)
            found[path] = _bits.digest(value, key, selection, axis=_bits.block_axis(value))
    return found


def _name(value: Any) -> str:
    """What every process knows of an object: a number or string by itself, a function by its name, else the type."""
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return f"{type(value).__name__} {value!r}"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
