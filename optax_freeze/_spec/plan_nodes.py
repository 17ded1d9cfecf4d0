"""Plans in an optimizer state: nodes without leaves, whose place ``optax.tree_map_params`` fills with a placeholder."""

import functools
from typing import Any, TypeVar

import jax
import optax

Node = TypeVar("Node", bound=type)


class _Placeholder:
    """The static data of a plan for a placeholder: the first data that it is compared with takes its place.

    ``optax.tree_map_params`` maps the state of a placeholder together with the real one, which JAX allows only if their
    nodes are equal, and returns the structure of the first. So it returns the plan of the real state.
    """

    def __init__(self, plan: Any) -> None:
        self.plan = plan

    def __eq__(self, other: object) -> bool:
        its: Any = other.plan if isinstance(other, _Placeholder) else other
        if self.plan.is_placeholder:
            self.plan = its
        return self.plan == its

    __hash__ = None  # type: ignore[assignment]


def register_as_static(cls: Node) -> Node:
    """Registers a class as a node without children, which is compared by value."""

    def flatten(plan: Any) -> tuple[Any, Any]:
        return (), _Placeholder(plan) if plan.is_placeholder else plan

    def unflatten(static: Any, _: Any) -> Any:
        return static.plan if isinstance(static, _Placeholder) else static

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


def is_placeholder(treedef: Any) -> bool:
    """Whether this is the structure of the placeholder for parameters of ``optax.tree_map_params``."""
    return treedef is not None and treedef.num_leaves == 0 and treedef == _placeholder()


@functools.cache
def _placeholder() -> Any:
    found = []

    def init(params: Any) -> tuple[()]:
        found.append(jax.tree.structure(params))
        return ()

    optax.tree_map_params(init, lambda leaf: leaf, ())
    return found[0]
