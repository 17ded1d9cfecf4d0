"""The parameters in two parts: what trains and the rest.

The same idea as ``equinox.partition`` and ``equinox.combine``, with ``optax.MaskedNode()`` instead of ``None`` in the
place of a leaf that is in the other part: Optax's transformations, accumulation, finite checks and line searches
already skip it, and ``None`` keeps its own meaning.
"""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from optax_freeze import _tree
from optax_freeze._resolve import Resolved, Spec, Tied, refuse_other_paths
from optax_freeze._tree import PyTree, message


def partition(params: PyTree, frozen: Spec, *, tied: Tied = "error") -> tuple[PyTree, PyTree]:
    """Splits the parameters into what trains and the rest.

    Args:
      params: any pytree of arrays.
      frozen: what is frozen, in any form.
      tied: ``"error"`` refuses one array object that stands at two paths of which only one is frozen; ``"ignore"``
        lets it pass. Tracers are never checked.

    Returns:
      ``(trainable, rest)``, both of the structure of ``params``, with a hole (``optax.MaskedNode()``) in the place of
      each leaf that is in the other part. Whatever is no floating-point or complex array is in ``rest``.

    Raises:
      ValueError: if the spec does not fit, or leaves are tied as above.
      TypeError: if ``params`` holds Optax transformations (that is ``optax.partition``).

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jax.numpy.ones(2), "head": jax.numpy.zeros(2)}
      >>> trainable, rest = fz.partition(params, "encoder")
      >>> trainable
      {'encoder': MaskedNode(), 'head': Array([0., 0.], dtype=float32)}
      >>> rest
      {'encoder': Array([1., 1.], dtype=float32), 'head': MaskedNode()}
      >>> state = optax.adam(1e-3).init(trainable)
    """
    if isinstance(params, Mapping) and any(isinstance(tx, optax.GradientTransformation) for tx in params.values()):
        raise TypeError(
            message(
                "fz.partition splits parameters",
                at="its first argument",
                got="a dict of Optax transformations",
                expected="a tree of parameters, as in equinox.partition",
                fix="optax.partition(transforms, fz.labels(frozen)) was meant, or fz.freeze(tx, frozen)",
            )
        )
    return split(params, Resolved.of(frozen, params, tied=tied))


def split(params: PyTree, spec: Resolved) -> tuple[PyTree, PyTree]:
    """:func:`partition` with a spec that is resolved already."""
    values, treedef = spec.align(params, "params")
    return spec.take(values, treedef), spec.leave(values, treedef)


def combine(trainable: PyTree, rest: PyTree) -> PyTree:
    """Puts together again what :func:`partition` took apart.

    Args:
      trainable: the part that trains, with holes in the place of the rest.
      rest: the rest, with holes in the place of what trains.

    Returns:
      The full tree: ``combine(*partition(params, frozen))`` is ``params``, bit for bit. A hole in both stays a hole.

    Raises:
      ValueError: if the parts differ in structure, or both have a leaf at the same path.

    Example:
      >>> import optax_freeze as fz
      >>> fz.combine({"encoder": optax.MaskedNode(), "head": 1.0}, {"encoder": 2.0, "head": optax.MaskedNode()})
      {'encoder': 2.0, 'head': 1.0}
    """
    left, treedef = _tree.flatten(trainable)
    right, other = _tree.flatten(rest)
    if treedef != other:
        refuse_other_paths(_tree.paths(trainable), _tree.paths(rest), "combine's first argument")
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if not _tree.is_hole(a) and not _tree.is_hole(b):
            raise ValueError(
                message(
                    "both parts have a leaf",
                    at=_tree.paths(rest)[i],
                    got="a leaf in `trainable` and a leaf in `rest`",
                    expected="a hole (optax.MaskedNode) in one of them",
                    fix="pass the two parts of one fz.partition",
                )
            )
    return jax.tree.unflatten(treedef, [b if _tree.is_hole(a) else a for a, b in zip(left, right, strict=True)])


def stop_gradient(params: PyTree, frozen: Spec) -> PyTree:
    """Makes constants of the gradient out of what is frozen.

    An optimizer still sees these leaves, with a gradient of zero, and decays them or moves them by momentum: train
    with :func:`optax_freeze.freeze` or on the trainable part, and use this where only the gradient matters.

    Args:
      params: any pytree of arrays.
      frozen: what is frozen, in any form.

    Returns:
      ``params`` with ``jax.lax.stop_gradient`` applied to each frozen array.

    Raises:
      ValueError: if the spec does not fit.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": 2.0, "head": 3.0}
      >>> params = jax.tree.map(jax.numpy.asarray, params)
      >>> grads = jax.grad(lambda p: (lambda q: q["encoder"] * q["head"])(fz.stop_gradient(p, "encoder")))(params)
      >>> float(grads["encoder"]), float(grads["head"])
      (0.0, 2.0)
    """
    spec = Resolved.of(frozen, params, tied="ignore")
    values, treedef = _tree.flatten(params)
    stopped = [
        jax.lax.stop_gradient(value) if frozen and leaf.dtype is not None else value
        for value, leaf, frozen in zip(values, spec.leaves, spec.frozen, strict=True)
    ]
    return jax.tree.unflatten(treedef, stopped)


def apply_updates(params: PyTree, updates: PyTree, frozen: Spec | None = None) -> PyTree:
    """Adds updates to the parameters, as ``optax.apply_updates`` does, and keeps the bits of what is frozen.

    Args:
      params: the parameters, whole or the trainable part.
      updates: a tree of the same structure; it may have holes.
      frozen: what is frozen. Given, frozen leaves come back as they are whatever their updates, bit for bit, for every
        bit pattern; without it, only leaves whose update is a hole do.

    Returns:
      The new parameters, of the structure, shapes and dtypes of ``params``.

    Raises:
      ValueError: if the structures differ or the spec does not fit.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jax.numpy.float32(-0.0), "head": jax.numpy.float32(1)}
      >>> fz.apply_updates(params, {"encoder": 5.0, "head": 0.5}, "encoder")
      {'encoder': Array(-0., dtype=float32), 'head': Array(1.5, dtype=float32)}
    """
    values, treedef = _tree.flatten(params)
    changes, other = _tree.flatten(updates)
    if treedef != other:
        refuse_other_paths(_tree.paths(updates), _tree.paths(params), "updates")
    still = [False] * len(values) if frozen is None else Resolved.of(frozen, params, tied="ignore").frozen
    moving = [
        i
        for i, (value, change) in enumerate(zip(values, changes, strict=True))
        if not (still[i] or _tree.is_hole(value) or _is_nothing(change))
    ]
    moved = optax.apply_updates([values[i] for i in moving], [changes[i] for i in moving])
    return jax.tree.unflatten(treedef, _replace(values, moving, moved))


def _is_nothing(change: Any) -> bool:
    return _tree.is_hole(change) or getattr(change, "dtype", None) == jax.dtypes.float0


def _replace(values: list[Any], places: list[int], new: Any) -> list[Any]:
    values = list(values)
    for i, value in zip(places, new, strict=True):
        values[i] = value
    return values
