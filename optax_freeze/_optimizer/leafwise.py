"""Optimizers that need no tree: groups give them a list of their leaves, and equal groups share a traced update.

A group's tree has a placeholder for each leaf of the other groups, which Optax maps in each of its operations: the time
to trace all groups would grow with the square of their number. In general an update may read paths. Those of
:func:`leafwise_transformations` do not, which the tests check.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_freeze._spec.plan import Plan
from optax_freeze._spec.tree import PyTree

_LEAF = jax.tree.structure(0)


@functools.cache
def leafwise_transformations() -> tuple[optax.GradientTransformation, ...]:
    """One of each kind of Optax's transformations that map leaves, or add numbers of all leaves."""
    return (
        optax.identity(),
        optax.scale(0.1),
        optax.scale_by_schedule(lambda count: 0.1 * count),
        optax.scale_by_adam(),
        optax.scale_by_amsgrad(),
        optax.scale_by_lion(),
        optax.scale_by_rms(),
        optax.scale_by_sign(),
        optax.scale_by_trust_ratio(),
        optax.trace(0.9),
        optax.ema(0.9),
        optax.add_decayed_weights(0.1),
        optax.clip(0.1),
        optax.clip_by_global_norm(0.1),
        optax.clip_by_block_rms(0.1),
    )


@functools.cache
def _known_code() -> tuple[set[int], set[int]]:
    """The code of functions that do not depend on the tree; and of those that only call others in their closure."""
    plain = optax.GradientTransformation(*optax.identity())
    leafwise = {_code(function) for tx in leafwise_transformations() for function in tx}
    combining = {
        _code(function) for tx in (optax.chain(plain), optax.with_extra_args_support(plain)) for function in tx
    }
    return leafwise, combining - leafwise


def _code(function: Any) -> int:
    """What all functions have in common that one ``def`` makes."""
    return id(getattr(function, "__code__", None))


def is_leafwise(function: Any) -> bool:
    """Whether ``init`` or ``update`` of a transformation does the same for a list of leaves as for any tree of them."""
    leafwise, combining = _known_code()
    if _code(function) not in combining:
        return _code(function) in leafwise
    [content] = [cell.cell_contents for cell in function.__closure__]
    return all(map(is_leafwise, [content.update] if isinstance(content, optax.GradientTransformation) else content))


def state_structure(tx: optax.GradientTransformation) -> Any:
    """The structure of a leafwise transformation's state with a leaf for each tree of the parameters, or None."""
    if not all(map(is_leafwise, tx)):
        return None
    return jax.tree.structure(jax.eval_shape(tx.init, jax.ShapeDtypeStruct((), jnp.float32)))


class Lists(NamedTuple):
    """How a leafwise transformation is called for a plan: with lists of the leaves that train, also in its state."""

    update: Callable[..., Any]
    state: PyTree
    plan: Plan
    structure: Any  # of the state, with a leaf for each list
    treedef: Any  # of the parameters; the state of the group has a tree in place of each list

    @classmethod
    def of(cls, update: Callable[..., Any], structure: Any, plan: Plan, treedef: Any, state: PyTree) -> "Lists | None":
        """None if the state is not that of a leafwise transformation of whole leaves."""
        if structure is None or treedef is None or treedef == _LEAF:
            return None
        tree = jax.tree.structure(jax.tree.unflatten(treedef, plan.full(dict.fromkeys(plan.own, 0))))
        with contextlib.suppress(ValueError, TypeError):
            opened = [jax.tree.flatten(node) for node in structure.flatten_up_to(state)]
            if all(its in (tree, _LEAF) for _, its in opened):
                opened = [leaves if its == tree else leaves[0] for leaves, its in opened]
                return cls(update, structure.unflatten(opened), plan, structure, treedef)
        return None

    def trainable(self, _: Any, values: Sequence[Any]) -> list[Any]:
        """What trains of all leaves."""
        return list(self.plan.trainable_leaves(values).values())

    def flat(self, changes: Sequence[Any]) -> list[Any]:
        """The changes of all leaves."""
        return self.plan.full(dict(zip(self.plan.own, changes, strict=True)))

    def closed(self, state: PyTree) -> PyTree:
        """The state of the group."""
        tree = lambda node: jax.tree.unflatten(self.treedef, self.flat(node)) if isinstance(node, list) else node  # noqa: E731
        return self.structure.unflatten(map(tree, self.structure.flatten_up_to(state)))
