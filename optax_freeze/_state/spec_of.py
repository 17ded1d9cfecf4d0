"""What the state of a frozen optimizer knows: its spec, and dense masks that can be replaced between steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._errors import is_array, is_concrete, type_error, value_error
from optax_freeze._optimizer.freeze import FreezeState, MaskedZeroUpdatesState, copy_like, masks_of
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.element_index import Dense, resolve_mask
from optax_freeze._spec.masks import Elements, elements
from optax_freeze._spec.selector_algebra import Known, Selector
from optax_freeze._spec.tree import Part, PyTree
from optax_freeze._state.parameter_of import parameter_of


def spec_of(state: optax.OptState) -> Selector:
    """The spec that an optimizer state carries, with its dense masks as they are now.

    Give it to :func:`optax_freeze.value_and_grad` and :func:`optax_freeze.apply_updates` inside a jitted step: the
    masks are then arguments of the program. A mask closed over is a constant of it.

    Args:
      state: from :func:`optax_freeze.freeze` or :func:`optax_freeze.masked_zero_updates`, alone or within another.

    Returns:
      A selector, for trees with the leaves given to ``init``.

    Raises:
      ValueError: if there is no such state in it, or several that differ.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
      >>> state = fz.freeze(optax.sgd(0.1), {"w": jnp.eye(2, dtype=bool), "b": True}).init(params)
      >>> fz.resolve(params, fz.spec_of(state))
      {'b': True, 'w': fz.elements(<bool[2, 2]>)}
    """
    states = [node for node in _states(state) if node.spec.leaves]
    if not states or any(_differ(states[0], other) for other in states[1:]):
        raise value_error(
            "no spec to be found" if not states else "several specs that differ",
            at="state",
            got=f"{len(states)} states of fz.freeze or fz.masked_zero_updates",
            expected="one, or several with the same spec",
            fix="pass the state of fz.freeze (optax.tree_map_params drops its spec until the next update)",
        )
    spec = states[0].spec
    return Known(tuple(leaf.path for leaf in spec.leaves), tuple(spec.choices(masks_of(states[0]))))


def replace_masks(state: optax.OptState, masks: Mapping[str, Any]) -> optax.OptState:
    """Puts other dense masks into an optimizer state, between steps and without recompiling.

    Moments of elements that go on training stay as they are. Where the leaf's elements are compact, their moments move
    to their new places in the vector, and those of elements thawed now are zero.

    Args:
      state: from :func:`optax_freeze.freeze` or :func:`optax_freeze.masked_zero_updates`, alone or within another.
      masks: for each leaf by its path, a boolean array of the leaf's shape, True where frozen.

    Returns:
      The state with the new masks.

    Raises:
      ValueError: if a path has no dense mask in the state, an array is of another shape, or the number of trainable
        elements of a compact mask changes. The state is then as it was.
      TypeError: if an array is not boolean.

    Example:
      >>> import optax_freeze as fz
      >>> params = {"w": jnp.ones((2, 2))}
      >>> tx = fz.freeze(optax.sgd(1.0), {"w": jnp.eye(2, dtype=bool)})
      >>> state = fz.replace_masks(tx.init(params), {"w": ~jnp.eye(2, dtype=bool)})
      >>> updates, state = tx.update(params, state, params)
      >>> optax.apply_updates(params, updates)["w"]
      Array([[0., 1.],
             [1., 0.]], dtype=float32)
    """
    if not isinstance(masks, Mapping):
        raise type_error(
            "fz.replace_masks takes a mapping",
            at="its second argument",
            got=type(masks).__name__,
            expected="{path: boolean array}",
            fix="name each mask by the path of its leaf",
        )
    known = {
        leaf.path
        for node in _states(state)
        for leaf, answer in zip(node.spec.leaves, node.spec.answers, strict=True)
        if isinstance(answer, Dense)
    }
    for path in masks:
        if path not in known:
            raise value_error(
                "no dense mask in the state",
                at=path,
                got=f"a mask for {path!r}",
                expected=f"a path among {sorted(known)}" if known else "a state with dense masks",
                fix="freeze the leaf by fz.elements(...) or a boolean array from the start",
            )
    return jax.tree.map(lambda node: _with_masks(node, masks) if _is_state(node) else node, state, is_leaf=_is_state)


def _differ(a: Any, b: Any) -> bool:
    """Whether two states have other specs or, as far as they have values, other masks."""
    pairs = zip(masks_of(a), masks_of(b), strict=False)
    return a.spec != b.spec or any(is_concrete(x) and is_concrete(y) and not np.array_equal(x, y) for x, y in pairs)


def _is_state(node: Any) -> bool:
    return isinstance(node, (FreezeState, MaskedZeroUpdatesState))


def _states(state: optax.OptState) -> list[Any]:
    return [node for node in jax.tree.leaves(state, is_leaf=_is_state) if _is_state(node)]


def _with_masks(state: Any, new: Mapping[str, Any]) -> Any:
    old, treedef = _tree.flatten(state.masks)
    masks = list(old)
    for i, (leaf, answer) in enumerate(zip(state.spec.leaves, state.spec.answers, strict=True)):
        if leaf.path in new and isinstance(answer, Dense):
            mask = new[leaf.path]
            mask = elements(mask.array if isinstance(mask, Elements) else mask, answer.compact)
            resolve_mask(Elements(mask.array, answer.compact, answer.count), leaf)
            if answer.compact and mask.count != answer.count:
                raise value_error(
                    "the number of trainable elements of a compact mask is fixed",
                    at=leaf.path,
                    got="a traced mask" if mask.count is None else f"{mask.count} trainable elements",
                    expected=f"{answer.count}, as in the state",
                    fix="keep their number and replace it outside jit, or use compact=False",
                )
            masks[i] = copy_like(mask.array, old[i])
    if isinstance(state, FreezeState):
        state = state._replace(inner_state=_moved_parts(state, old, masks))
    return state._replace(masks=jax.tree.unflatten(treedef, masks))


def _moved_parts(state: FreezeState, old: Sequence[Any], new: Sequence[Any]) -> PyTree:
    """The optimizer's state, in which each vector of compact elements is in the order of the new mask."""
    owners = {leaf.path: i for i, leaf in enumerate(state.spec.leaves)}
    replaced = [i for i, answer in enumerate(state.spec.answers) if _is_compact(answer) and old[i] is not new[i]]
    if not replaced:
        return state.inner_state
    nodes, treedef = _tree.flatten(state.inner_state)
    paths = _tree.paths(state.inner_state)
    owner_of = parameter_of(paths, owners)
    for place, path in enumerate(paths):
        owner = owner_of(path)
        i = None if owner is None else owners[owner]
        part = nodes[place]
        values = _tree.bare(part)
        if i in replaced and isinstance(part, Part) and is_array(values):
            answer: Any = state.spec.answers[i]
            count = answer.part_index
            if part.index == count and values.shape == (count,):
                full = answer.put(jnp.zeros(part.shape, values.dtype), Part(values), old[i])
                nodes[place] = jax.tree.unflatten(jax.tree.structure(part), [answer.take(full, new[i]).values])
    return jax.tree.unflatten(treedef, nodes)


def _is_compact(answer: Any) -> bool:
    return isinstance(answer, Dense) and answer.compact
