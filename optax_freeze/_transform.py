"""Frozen updates for any Optax optimizer: :func:`masked_zero_updates` and :func:`freeze`.

``optax.freeze`` zeroes updates where it stands in a chain, so that it is either too early (weight decay and momentum
come after it) or too late (moments are held, and frozen gradients reach norms and finite checks). :func:`freeze` goes
around the optimizer instead: what is inside never sees a frozen leaf.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze import _tree
from optax_freeze._partition import split
from optax_freeze._resolve import Resolved, Spec, Tied, register_with_flax
from optax_freeze._restrict import restrict
from optax_freeze._tree import Leaf, PyTree, message


class MaskedZeroUpdatesState(NamedTuple):
    """State of :func:`masked_zero_updates`: the resolved spec, a node without leaves."""

    spec: Resolved


def masked_zero_updates(frozen: Spec, *, tied: Tied = "error") -> optax.GradientTransformationExtraArgs:
    """Makes the updates of frozen leaves exactly zero, whatever came in.

    As ``optax.freeze``, by selection and never by multiplication (NaN times zero is NaN). The zeros are -0.0: adding
    one keeps every number as it is, -0.0 among them. Last in a chain it undoes every movement of what is frozen; the
    moments are still held, and frozen gradients still reach what stands before it: see :func:`freeze`.

    Args:
      frozen: what is frozen, in any form.
      tied: ``"error"`` refuses, in ``init``, one array object at two paths of which only one is frozen.

    Returns:
      A transformation. Its ``init`` resolves the spec and raises ``ValueError`` if it does not fit; its ``update``
      takes updates of the parameters' structure. An integer leaf gets a zero of its own dtype, a hole stays one, and
      what has no zero (a PRNG key, an object) gets a hole.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> tx = optax.chain(optax.adamw(0.1), fz.masked_zero_updates("encoder"))
      >>> updates, _ = tx.update(jax.tree.map(lambda p: p * np.nan, params), tx.init(params), params)
      >>> updates["encoder"]
      Array([-0., -0.], dtype=float32)
    """

    def init_fn(params: PyTree) -> PyTree:
        return MaskedZeroUpdatesState(_resolve(frozen, params, tied))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        del params, extra_args
        values, treedef = state.spec.align(updates, "updates")
        zeroed = [
            _zero(leaf, value) if frozen and not _tree.is_hole(value) else value
            for value, leaf, frozen in zip(values, state.spec.leaves, state.spec.frozen, strict=True)
        ]
        return jax.tree.unflatten(treedef, zeroed), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class FreezeState(NamedTuple):
    """State of :func:`freeze`: the resolved spec, a node without leaves, and the state of ``optax.multi_transform``."""

    spec: Resolved
    inner_state: optax.OptState


def freeze(
    inner: optax.GradientTransformation | optax.MultiSteps,
    frozen: Spec | None = None,
    *,
    full_updates: bool = True,
    tied: Tied = "error",
) -> optax.GradientTransformationExtraArgs:
    """Freezes leaves for a whole optimizer: ``inner`` runs on what trains, and what is frozen gets zeros.

    ``optax.multi_transform`` with ``inner`` for what trains, then :func:`masked_zero_updates`. ``inner`` never sees a
    frozen leaf: no moments, no weight decay, no share in a global norm, no NaN. The update and the state of a leaf that
    trains are those of ``inner`` run on the trainable part alone. Wrappers that hold state of the parameters' shape
    (``optax.MultiSteps``, ``optax.contrib.schedule_free``, averages) belong inside.

    Args:
      inner: the optimizer, or an ``optax.MultiSteps``.
      frozen: what is frozen, in any form.
      full_updates: True gives updates of the parameters' structure, -0.0 at what is frozen, for
        ``optax.apply_updates``; False gives the trainable structure, holes at what is frozen, for
        :func:`optax_freeze.apply_updates`.
      tied: ``"error"`` refuses, in ``init``, one array object at two paths of which only one is frozen.

    Returns:
      A transformation. Its ``init`` takes the full parameters, or the trainable part, resolves the spec and raises
      ``ValueError`` if it does not fit. Its ``update`` takes full gradients, or those of the trainable structure
      (:func:`optax_freeze.value_and_grad`); extra arguments reach ``inner`` with the frozen part taken out (trees of
      the gradients' structure, and ``value_fn``, which is called with parameters as given to ``update``).

    Raises:
      TypeError: if ``inner`` is no optimizer.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jnp.ones(3), "head": jnp.ones(2)}
      >>> tx = fz.freeze(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), "encoder")
      >>> state = tx.init(params)
      >>> grads = {"encoder": jnp.full(3, np.nan), "head": jnp.ones(2)}
      >>> updates, state = tx.update(grads, state, params)
      >>> updates["encoder"]
      Array([-0., -0., -0.], dtype=float32)
      >>> [leaf.shape for leaf in jax.tree.leaves(state)]  # a count, two moments of the head
      [(), (2,), (2,)]
    """
    inner = _as_transformation(inner, frozen)

    def transform(labels: PyTree) -> optax.GradientTransformationExtraArgs:
        # A function, since a tree of labels may itself be callable: an Equinox module is.
        return optax.multi_transform({"trainable": inner, "frozen": optax.identity()}, lambda _: labels)

    def init_fn(params: PyTree) -> PyTree:
        spec = _resolve(frozen, params, tied)
        return FreezeState(spec, transform(spec.labels()).init(params))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        spec: Resolved = state.spec
        values, treedef = spec.align(updates, "updates")
        olds = [None] * len(values) if params is None else spec.align(params, "params")[0]
        extra_args = _without_frozen(extra_args, spec, treedef, params)
        tx = transform(spec.labels(treedef))
        try:
            updates, inner_state = tx.update(updates, state.inner_state, params, **extra_args)
        except (ValueError, TypeError, AttributeError) as error:
            if params is not None:
                raise
            raise ValueError(
                message(
                    f"the optimizer inside fz.freeze failed without parameters: {error}",
                    at="the third argument of update",
                    got="params=None",
                    expected="the parameters, if the optimizer uses them (weight decay, a trust ratio)",
                    fix="tx.update(grads, state, params)",
                )
            ) from error
        new = _tree.flatten(updates)[0]
        if full_updates:
            new = [
                _zero(leaf, value, old) if frozen else u
                for u, value, old, leaf, frozen in zip(new, values, olds, spec.leaves, spec.frozen, strict=True)
            ]
            return jax.tree.unflatten(treedef, new), FreezeState(spec, inner_state)
        return spec.take(new, treedef), FreezeState(spec, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _resolve(frozen: Spec, params: PyTree, tied: Tied) -> Resolved:
    register_with_flax()
    return Resolved.of(frozen, params, tied=tied)


def _as_transformation(inner: Any, frozen: Any) -> optax.GradientTransformation:
    if isinstance(inner, optax.GradientTransformation) and frozen is not None:
        return inner
    if isinstance(inner, optax.MultiSteps) and frozen is not None:
        update_fn: Any = inner.update
        return optax.GradientTransformationExtraArgs(inner.init, update_fn)
    if isinstance(inner, (optax.GradientTransformation, optax.MultiSteps)):
        what, got, fix = (
            "fz.freeze was not told what is frozen",
            "an optimizer alone",
            "fz.freeze(optimizer, 'encoder')",
        )
    elif isinstance(frozen, (optax.GradientTransformation, optax.MultiSteps)):
        what, got, fix = "fz.freeze takes the optimizer first", repr(inner), "swap the two arguments"
    elif frozen is None:
        what, got = "fz.freeze goes around an optimizer", repr(inner)
        fix = f"fz.freeze(optimizer, {inner!r}), or fz.masked_zero_updates({inner!r}), which is what optax.freeze does"
    else:
        what, got = "the first argument of fz.freeze is no optimizer", repr(inner)
        fix = "call the factory: optax.adam(1e-3), not optax.adam" if callable(inner) else "pass an Optax optimizer"
    raise TypeError(message(what, at="fz.freeze", got=got, expected="fz.freeze(optimizer, frozen)", fix=fix))


def _without_frozen(extra_args: dict[str, Any], spec: Resolved, treedef: Any, params: PyTree | None) -> dict[str, Any]:
    """The extra arguments of ``inner``: what has the gradients' structure loses its frozen part."""
    taken = {}
    for name, value in extra_args.items():
        if name == "value_fn" and callable(value) and params is not None:
            taken[name] = restrict(value, split(params, spec)[1])
        else:
            values, structure = _tree.flatten(value)
            taken[name] = spec.take(values, structure) if structure == treedef else value
    return taken


def _zero(leaf: Leaf, update: Any, param: Any = None) -> Any:
    """The update that changes no bit of a leaf: -0.0, or the integer 0, in the update's shape and, if it can, dtype.

    A hole where there is no such zero: for PRNG keys, objects and dtypes without a zero.
    """
    is_float0 = getattr(update, "dtype", None) == jax.dtypes.float0
    like: Any = next((x for x in (update, param) if _tree.is_array(x) and not (x is update and is_float0)), leaf)
    dtype = like.dtype if leaf.dtype is None else leaf.dtype
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return _tree.HOLE
    dtype = like.dtype if _adds_exactly(dtype, like.dtype) else dtype
    zero = np.asarray(complex(-0.0, -0.0) if jnp.issubdtype(dtype, jnp.complexfloating) else -0.0).astype(dtype)
    if zero != 0:
        return _tree.HOLE
    return jnp.full(leaf.shape or (), zero, dtype) if like is leaf else jnp.full_like(like, zero, dtype)


def _adds_exactly(param: Any, update: Any) -> bool:
    """Whether JAX adds a -0.0 of the update's dtype to a parameter, and the parameter keeps its bits."""
    if param == update:
        return True
    kinds = (jnp.floating, jnp.complexfloating)
    wide = min(jnp.dtype(param).itemsize, jnp.dtype(update).itemsize) > 1  # JAX promotes no narrower float by itself
    return wide and any(jnp.issubdtype(param, kind) and jnp.issubdtype(update, kind) for kind in kinds)
