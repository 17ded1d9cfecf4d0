"""The features of a batch, and whether those that are given belong to the program and the parameters at hand."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax

from optax_freeze._errors import described, is_array, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.selection import FROZEN
from optax_freeze._spec.tree import Part, PyTree

if TYPE_CHECKING:
    from optax_freeze._precompute.divide import Division


@jax.tree_util.register_pytree_node_class
class Features(tuple[Any, ...]):
    """The features of a batch: a tuple of arrays, and a pytree that keeps its type under ``jax.tree.map``.

    Attributes:
      arrays: the arrays in the tuple.
      cut: a digest of the program that computed the features; static.
      leaves: the path and shape of each parameter (a ``jax.ShapeDtypeStruct``, or None for an object), so that frozen
        leaves may be missing later; static.

    Example:
      >>> import jax.numpy as jnp, optax_freeze as fz
      >>> loss = lambda params, x: jnp.sum(jnp.tanh(x @ params["encoder"]) @ params["head"])
      >>> params = {"encoder": jnp.ones((4, 8)), "head": jnp.ones((8, 1))}
      >>> features = fz.precompute(loss, "encoder").before(params, jnp.ones((2, 4)))
      >>> [array.shape for array in features]
      [(2, 8)]
    """

    cut: str
    leaves: tuple[tuple[str, Any], ...]

    def __new__(cls, arrays: Iterable[Any], cut: str, leaves: Sequence[tuple[str, Any]]) -> Self:
        self = super().__new__(cls, arrays)
        self.cut, self.leaves = cut, tuple(leaves)
        return self

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return tuple(self), (self.cut, self.leaves)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Iterable[Any]) -> "Features":
        return cls(arrays, *static)

    def __reduce__(self) -> Any:
        return Features, (tuple(self), self.cut, self.leaves)

    def __repr__(self) -> str:
        return f"Features({tuple.__repr__(self)})"


def with_shapes(params: PyTree, features: PyTree) -> tuple[list[Any], Any]:
    """The leaves of the parameters, with a shape in place of each missing one, and their treedef."""
    values, treedef = _tree.flatten(params)
    if not any(map(_tree.is_masked_node, values)):
        return values, treedef
    if not isinstance(features, Features):
        raise value_error(
            "the shapes of the missing parameters are not known",
            at="features",
            got=described(features),
            expected="the features as `before` or features.read returned them",
            fix="jax.tree.map keeps their type; or give the full parameters",
        )
    expected = [path for path, _ in features.leaves]
    _tree.refuse_other_paths(_tree.paths(params), expected, "params", "give what `needed` returned")
    pairs = zip(values, features.leaves, strict=True)
    return [shape if _tree.is_masked_node(x) and shape is not None else x for x, (_, shape) in pairs], treedef


def refuse_missing(division: "Division", values: Sequence[Any]) -> None:
    read_again, plan = division.read_again, division.plan
    for i, (leaf, selection, value) in enumerate(zip(plan.leaves, plan.selections, values, strict=True)):
        is_missing = isinstance(value, jax.ShapeDtypeStruct)
        trains = selection is not FROZEN and is_missing
        if trains or ((is_missing or isinstance(value, Part)) and i in read_again):
            frozen = f"the leaf: it is read by {read_again.get(i) or 'the result'}"
            raise value_error(
                "a parameter is missing",
                at=leaf.path,
                got="optax.MaskedNode()" if is_missing else "only the trainable rows",
                expected="a trainable leaf" if trains else frozen,
                fix="give what `needed` returned, or the full parameters",
            )


def fitting_arrays(features: PyTree, division: "Division") -> list[Any]:
    """The arrays of the features, if they were computed by this program."""
    if isinstance(features, Features) and features.cut != division.digest:
        raise value_error(
            "the features were computed by another program",
            at="features",
            got=f"features of the program {features.cut[:12]}",
            expected=f"features of the program {division.digest[:12]}, of the same function, spec and shapes",
            fix="compute them with the same fz.precompute, and arguments of the same shapes",
        )
    type_of = lambda x: f"{x.dtype}{list(x.shape)}" if is_array(x) else described(x)  # noqa: E731
    arrays, expected = jax.tree.leaves(features), ", ".join(map(type_of, division.features))
    got = ", ".join(map(type_of, arrays))
    if got != expected:
        raise value_error(
            "the features do not fit",
            at="features",
            got=got or described(features),
            expected=expected,
            fix="give the features that `before` returned for this batch, as the argument after the parameters",
        )
    return arrays
