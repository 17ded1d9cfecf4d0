"""A digest of all frozen parameters, to compare with a tree that was donated or is elsewhere: :func:`fingerprint`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_freeze._errors import is_array
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.module_parameters import parameters_of_modules, plan_of_parameters
from optax_freeze._spec.numpy_leaves import as_in_jax
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.resolve import Spec, warn_of_no_proof
from optax_freeze._spec.selection import FROZEN, Selection
from optax_freeze._spec.tree import PyTree
from optax_freeze._verify import bits as _bits
from optax_freeze._verify.frozen_leaves import frozen_leaves


def fingerprint(params: PyTree, frozen: Spec) -> jax.Array:
    """Computes a digest of the frozen parameters, which changes if any frozen bit changes.

    The digest depends only on the frozen elements: their bits, their positions, and the path, dtype and shape of their
    leaf. It does not depend on the containers, on the form of a mask (rows, or the same rows as a boolean array), on
    sharding, device, ``jit`` or 64-bit mode, or on trainable elements. Trainable leaves, empty leaves and
    ``MaskedNode`` contribute nothing, so ``rest`` of :func:`optax_freeze.partition` has the fingerprint of the full
    parameters. A Python float or complex number, and a NumPy array of 64-bit numbers, count as the array that JAX makes
    of them, of 64 bits in 64-bit mode.
    Any other leaf that is not an array contributes its path, and the value of an int, a bool or a string, the name of a
    function, or the type of any other object.

    The arrays are read once, without temporary arrays of their size; arrays in host memory are copied to the device in
    blocks. Every element contributes a word to each of four lanes, and a lane is the sum of its words modulo 2**32, so
    the order does not matter. A word is computed from 32 bits of an element by invertible steps (adding values for its
    leaf and position, xor with shifts, multiplication by odd numbers, ``x + 2 * x**2``), so different bits at the same
    position give a different word. Therefore **a change within 32 bits of one element, such as a flipped bit, always
    changes all four lanes**. Larger changes go undetected with a probability below 2**-100. The digest is not secure
    against deliberately constructed collisions.

    Args:
      params: any pytree of JAX or NumPy arrays, which may be traced; of an NNX module only its parameters count
        (``nnx.Param``, ``FrozenParam``). If arrays span processes, every process must call
        this function with the same spec.
      frozen: the spec of the frozen parameters, in any form.

    Returns:
      A ``uint32`` array of shape ``(4,)``; zeros if nothing is frozen. Compare all four values: ``(a == b).all()``.
      Emits a :class:`optax_freeze.FreezeWarning` if patterns, a selector or a function freeze nothing.

    Raises:
      ValueError: if the spec does not fit, or an array was donated.
      TypeError: if arrays have no values, as a ``jax.ShapeDtypeStruct``.

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
    parameters = parameters_of_modules(params)
    plan = plan_of_parameters(parameters, frozen, of=params)
    warn_of_no_proof(plan, parameters, parameters_of_modules(frozen), stacklevel=2)
    found = digests(parameters, plan).values()
    if any(isinstance(digest[0], Tracer) for digest in found):
        return jnp.stack([functools.reduce(jnp.add, lane) for lane in zip(*found, strict=True)])
    # On the host, since leaves may be on different devices.
    lanes = [np.zeros(_bits.LANES, np.uint32), *jax.device_get(list(found))]
    return jnp.asarray(np.array(lanes, np.uint32).sum(axis=0, dtype=np.uint32))


def digests(params: PyTree, plan: Plan) -> dict[str, Any]:
    """The contribution of each frozen leaf to each lane of the fingerprint, by path."""
    found = {}
    for path, (value, selection) in frozen_leaves(plan, _tree.flatten(params)[0], "params", traced=True).items():
        value = as_in_jax(value)
        if not is_array(value):
            found[path] = _bits.hashed("object", path, _name(value))
        else:
            found[path] = array_digest(path, value, selection)
    return found


def array_digest(name: str, value: Any, selection: Selection = FROZEN) -> tuple[Any, ...]:
    """The contribution of the frozen elements of an array to each lane."""
    key = _bits.hashed("array", name, str(value.dtype), value.shape)
    value, selection = _bits.placed(value, selection)
    return _bits.digest(value, key, selection, axis=_bits.block_axis(value))


def as_texts(found: dict[str, Any]) -> dict[str, str]:
    return {name: "".join(f"{int(lane):08x}" for lane in lanes) for name, lanes in jax.device_get(found).items()}


def _name(value: Any) -> str:
    """A string for an object, the same in every process: the value of a number or string, or a name or type."""
    if isinstance(value, (bool, int, str, bytes)):
        return f"{type(value).__name__} {value!r}"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
