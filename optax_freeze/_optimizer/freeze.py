"""Frozen updates for any Optax optimizer: :func:`masked_zero_updates` and :func:`freeze`.

``optax.freeze`` zeroes updates where it stands in a chain, so that it is either too early (weight decay and momentum
come after it) or too late (moments are held, and frozen gradients reach norms and finite checks). :func:`freeze` goes
around the optimizer instead: what is inside never sees a frozen leaf.
"""

import collections
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_freeze._errors import described, in_one_line, is_array, is_concrete, type_error, value_error
from optax_freeze._optimizer.inner_update import negative_zero, parts_outside, variables_outside, without_frozen, zero
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.element_index import Answer, RowIndex
from optax_freeze._spec.resolve import Resolved, Spec, Tied, refuse_other_leaf, register_with_flax, warn_of_extent
from optax_freeze._spec.tree import Leaf, Part, PyTree

_Known: TypeAlias = collections.deque[Resolved]
"""The latest specs of states that one transformation made, or took for its own."""


class MaskedZeroUpdatesState(NamedTuple):
    """State of :func:`masked_zero_updates`: the resolved spec, a node without leaves, and its dense masks."""

    spec: Resolved
    masks: PyTree


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
      takes updates of the parameters' structure. An integer leaf gets a zero of its own dtype, a hole stays one, a PRNG
      key gets a hole, and an object that is not an array None, which ``equinox.apply_updates`` skips.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> tx = optax.chain(optax.adamw(0.1), fz.masked_zero_updates("encoder"))
      >>> updates, _ = tx.update(jax.tree.map(lambda p: p * jnp.nan, params), tx.init(params), params)
      >>> updates["encoder"]
      Array([-0., -0.], dtype=float32)
    """

    known = _Known(maxlen=8)

    def init_fn(params: PyTree) -> PyTree:
        return MaskedZeroUpdatesState(*_resolve(frozen, params, tied, known))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        del extra_args
        state = _with_spec(state, MaskedZeroUpdatesState, frozen, params, updates, known)
        spec = state.spec
        values, treedef = spec.align(updates, "updates")
        zeroed = [
            value
            if _tree.is_hole(value) or value is None or isinstance(value, Part)
            else _still(answer, mask, leaf, value)
            for value, leaf, answer, mask in zip(values, spec.leaves, spec.answers, masks_of(state), strict=True)
        ]
        return jax.tree.unflatten(treedef, zeroed), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class FreezeState(NamedTuple):
    """State of :func:`freeze`: the resolved spec, a node without leaves, its dense masks, and the optimizer's state.

    The last is that of ``optax.multi_transform`` around the optimizer.
    """

    spec: Resolved
    masks: PyTree
    inner_state: optax.OptState


def freeze(
    inner: optax.GradientTransformation | optax.MultiSteps,
    frozen: Spec | None = None,
    *,
    full_updates: bool = True,
    tied: Tied = "error",
) -> optax.GradientTransformationExtraArgs:
    """Freezes leaves, or parts of them, for a whole optimizer: ``inner`` runs on what trains, the rest gets zeros.

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
      (:func:`optax_freeze.value_and_grad`). Extra arguments reach ``inner`` with the frozen part taken out: trees of
      the gradients' structure, and the functions ``value_fn``, ``obj_fn`` and ``grad_fn``, which are called with
      parameters as given to ``update``.

    Raises:
      TypeError: if ``inner`` is no optimizer.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"encoder": jnp.ones(3), "head": jnp.ones(2)}
      >>> tx = fz.freeze(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), "encoder")
      >>> state = tx.init(params)
      >>> grads = {"encoder": jnp.full(3, jnp.nan), "head": jnp.ones(2)}
      >>> updates, state = tx.update(grads, state, params)
      >>> updates["encoder"]
      Array([-0., -0., -0.], dtype=float32)
      >>> [leaf.shape for leaf in jax.tree.leaves(state)]  # a count, two moments of the head
      [(), (2,), (2,)]
    """
    inner = _as_transformation(inner, frozen)
    known = _Known(maxlen=8)

    def transform(labels: PyTree) -> optax.GradientTransformationExtraArgs:
        # A function, since a tree of labels may itself be callable: an Equinox module is.
        return optax.multi_transform({"trainable": inner, "frozen": optax.identity()}, lambda _: labels)

    def init_fn(params: PyTree) -> PyTree:
        spec, masks = _resolve(frozen, params, tied, known)
        state = FreezeState(spec, masks, ())
        values, treedef = _tree.flatten(params)
        trainable = jax.tree.unflatten(treedef, spec.take(values, masks_of(state)))
        return state._replace(inner_state=parts_outside(transform(spec.labels(treedef)).init(trainable)))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        state = _with_spec(state, FreezeState, frozen, params, updates, known)
        spec, masks = state.spec, masks_of(state)
        values, treedef = spec.align(updates, "updates")
        extra_args = without_frozen(extra_args, spec, masks, treedef, params)
        trainable, olds = None, [None] * len(values)
        if params is not None:
            olds, params_treedef = spec.align(params, "params")
            trainable = jax.tree.unflatten(params_treedef, spec.take(olds, masks))
        tx = transform(spec.labels(treedef))
        try:
            updates, inner_state = tx.update(
                jax.tree.unflatten(treedef, spec.take(values, masks)),
                variables_outside(state.inner_state),
                trainable,
                **extra_args,
            )
        except (ValueError, TypeError, AttributeError) as error:
            if params is not None:
                raise
            raise (type_error if isinstance(error, TypeError) else value_error)(
                f"the optimizer inside fz.freeze failed, and was given no parameters: {in_one_line(error)}",
                at="update",
                got="params=None",
                expected="the parameters, if the optimizer uses them (weight decay, a trust ratio)",
                fix="if so, tx.update(grads, state, params)",
            ) from error
        new = [
            _finish(full_updates, *leaf)
            for leaf in zip(_tree.flatten(updates)[0], values, olds, spec.leaves, spec.answers, masks, strict=True)
        ]
        return jax.tree.unflatten(treedef, new), state._replace(inner_state=parts_outside(inner_state))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _with_spec(state: Any, kind: type, frozen: Any, params: PyTree | None, updates: PyTree, known: _Known) -> Any:
    """The state with its spec, resolved again after ``optax.tree_map_params``, which drops what is static."""
    if not isinstance(state, kind):
        raise type_error(
            "the state of another transformation",
            at="the second argument of update",
            got=type(state).__name__,
            expected=f"{kind.__name__}, from the init of this transformation",
            fix="state = tx.init(params), anew after wrapping an optimizer; tx.update(grads, state, params)",
        )
    tree = updates if params is None else params
    if not state.spec.leaves:
        return state._replace(spec=Resolved.of(frozen, tree, tied="ignore")[0])
    if not any(state.spec is spec for spec in known):
        _refuse_other_spec(state.spec, frozen, tree)
        known.append(state.spec)
    return state


def _refuse_other_spec(spec: Resolved, frozen: Spec, tree: PyTree) -> None:
    """A ``ValueError`` if a state has another spec than ``frozen``, resolved for the parameters given to its init."""
    try:
        own = Resolved.of(frozen, parameters_of(spec, tree), tied="ignore", leaves=spec.leaves)[0]
    except (ValueError, TypeError) as error:
        if spec.treedef is None:
            return  # unpickled, and the tree at hand may have other containers
        raise value_error(
            "the state of another spec, or of other parameters",
            at="the second argument of update",
            got=f"the state for {[leaf.path for leaf in spec.leaves[:3]]}: {str(error).splitlines()[0]}",
            expected="the state of this transformation",
            fix="state = tx.init(params)",
        ) from error
    for leaf, mine, its in zip(own.leaves, own.answers, spec.answers, strict=True):
        if mine != its:
            raise value_error(
                "the state of another spec",
                at=leaf.path,
                got=f"a state in which it {_said(its)}",
                expected=f"the state of this transformation, in which it {_said(mine)}",
                fix="state = fz.migrate(state, tx, params), whenever what is frozen changes",
            )


def parameters_of(spec: Resolved, tree: PyTree) -> PyTree:
    """The shapes of the parameters given to ``init``; ``tree`` itself where a state was unpickled."""
    if spec.treedef is None:
        return tree
    shapes = [_tree.HOLE if leaf.dtype is None else leaf.struct for leaf in spec.leaves]
    return jax.tree.unflatten(spec.treedef, shapes)


def _said(answer: Answer) -> str:
    if isinstance(answer, bool):
        return "is frozen" if answer else "trains"
    return f"trains in part ({answer.source!r})" if isinstance(answer, RowIndex) else "trains in part"


def masks_of(state: Any) -> list[Any]:
    """For each leaf the array of its dense mask or a hole; a state without dense masks holds none."""
    return _tree.flatten(state.masks)[0] or [_tree.HOLE] * len(state.spec.leaves)


def _resolve(frozen: Spec, params: PyTree, tied: Tied, known: _Known) -> tuple[Resolved, PyTree]:
    """The resolved spec and copies of its dense masks: a tree like the parameters, empty if there are none."""
    register_with_flax()
    spec, masks = Resolved.of(frozen, params, tied=tied)
    warn_of_extent(frozen, params, spec, stacklevel=3)
    known.append(spec)
    values = _tree.flatten(params)[0]
    for value, leaf, answer in zip(values, spec.leaves, spec.answers, strict=True):
        if isinstance(value, Part) and not isinstance(answer, bool):
            refuse_other_leaf(value, leaf, answer, "params")
    copies = [copy_like(mask, value) if is_array(mask) else mask for mask, value in zip(masks, values, strict=True)]
    # `optax.tree_map_params` builds a state from a placeholder without leaves: it takes the place of the masks.
    dense = any(map(is_array, copies if copies else jax.tree.leaves(frozen)))
    return spec, jax.tree.unflatten(spec.treedef, copies) if dense else ()


def copy_like(mask: Any, placed: Any) -> jax.Array:
    """A copy of a mask, placed like another array: its parameter, or the mask before it."""
    copy = jnp.array(mask)
    if is_concrete(copy) and isinstance(placed, jax.Array) and is_concrete(placed) and placed.committed:
        return jax.device_put(copy, placed.sharding)
    return copy


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
        what, got, fix = "fz.freeze takes the optimizer first", described(inner), "swap the two arguments"
    elif frozen is None:
        what, got = "fz.freeze goes around an optimizer", described(inner)
        fix = f"fz.freeze(optimizer, {inner!r}), or fz.masked_zero_updates({inner!r}), which is what optax.freeze does"
    else:
        what, got = "the first argument of fz.freeze is no optimizer", described(inner)
        fix = "call the factory: optax.adam(1e-3), not optax.adam" if callable(inner) else "pass an Optax optimizer"
    raise type_error(what, at="fz.freeze", got=got, expected="fz.freeze(optimizer, frozen)", fix=fix)


def _finish(full_updates: bool, new: Any, update: Any, param: Any, leaf: Leaf, answer: Answer, mask: Any) -> Any:
    """The update of one leaf, from what ``inner`` made of it."""
    if answer is False:
        return new
    if answer is True:
        return zero(leaf, update, param) if full_updates else _tree.HOLE
    if not isinstance(new, Part):
        return _still(answer, mask, leaf, new)
    if not full_updates or leaf.index is not None:
        return new
    like = next((full for full in (param, update) if full is not None and not isinstance(full, Part)), None)
    return answer.spread(new, negative_zero(new.dtype), mask, like)


def _still(answer: Answer, mask: Any, leaf: Leaf, update: Any) -> Any:
    """A full update with zeros at what is frozen."""
    if isinstance(answer, bool):
        return zero(leaf, update) if answer else update
    return answer.choose(negative_zero(update.dtype), update, mask)
