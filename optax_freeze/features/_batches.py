"""The batches whose features are stored: their digests, and the call of ``before``."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from optax_freeze._errors import described, in_one_line, is_array, is_int, value_error
from optax_freeze._precompute.batch_size import shapes_for
from optax_freeze._precompute.given_features import Features
from optax_freeze._precompute.precompute import Precomputed
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.resolve import make_plan
from optax_freeze._spec.selection import TRAINABLE
from optax_freeze._spec.tree import PyTree
from optax_freeze.features._arrays import on_host


def computation(
    once: Precomputed, params: PyTree, others: Sequence[Any], kwargs: Mapping[str, Any], variants: int
) -> Callable:
    """A function of the variants of a batch and its number.

    It returns their digests, the shapes of the features of one variant, and the computation of those of all.
    """
    values, treedef = _tree.flatten(params)
    selections = make_plan(params, once.frozen).in_state.selections
    structs = [*map(_tree.struct_of, values)]
    pairs = enumerate(zip(values, selections, strict=True))
    frozen = {i: x for i, (x, selection) in pairs if selection is not TRAINABLE and is_array(x)}
    beside = _Beside(once, others, kwargs)

    def before(frozen: dict[int, Any], arrays: list[Any], static: Any) -> Features:
        (structure, rest), shapes = static
        left = iter(arrays)
        batch = jax.tree.unflatten(structure, [next(left) if kind is None else value for kind, value in rest])
        full = jax.tree.unflatten(treedef, [frozen.get(i, struct) for i, struct in enumerate(structs)])
        others, kwargs = beside.with_shapes(shapes)
        args, by_name = _arguments(once, batch, others)
        return once.before(full, *args, **by_name, **kwargs)

    jitted = jax.jit(before, static_argnums=2)

    def prepare(batch: Any, at: str) -> tuple[str, Features, Callable[[], Features]]:
        leaves, structure = jax.tree.flatten(batch)
        # A loader may reuse the memory of a NumPy array for the next batch, while this one is computed.
        arrays = [np.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves if is_array(leaf)]
        static = structure, tuple((None, None) if is_array(leaf) else (type(leaf), leaf) for leaf in leaves)
        hashed = hashlib.blake2b(repr([described(leaf) for leaf in leaves]).encode(), digest_size=16)
        for array in arrays:
            hashed.update(on_host(array, "a batch").tobytes())
        found, shapes = beside.fitting(arrays, at, lambda shapes: jitted.eval_shape(frozen, arrays, (static, shapes)))
        return hashed.hexdigest(), found, lambda: jitted(frozen, arrays, (static, shapes))

    def prepare_variants(item: Any, number: int) -> tuple[str, Features, Callable[[], list[Features]]]:
        if variants == 1:
            digest, shapes, compute = prepare(item, f"batch {number}")
            return digest, shapes, lambda: [compute()]
        if not isinstance(item, (list, tuple)) or len(item) != variants:
            raise value_error(
                "a batch is not given in all variants",
                at=f"batch {number}",
                got=f"{len(item)} variants" if isinstance(item, (list, tuple)) else described(item),
                expected=f"a list of {variants}: this batch in each variant",
                fix=f"[view(batch, i) for i in range({variants})] for each batch",
            )
        at = [f"batch {number}, variant {i}" for i in range(variants)]
        digests, shapes, computes = zip(*map(prepare, item, at), strict=True)
        for i, its in enumerate(shapes):
            _refuse_other_variant(its, shapes[0], at[i])
        return " ".join(digests), shapes[0], lambda: [compute() for compute in computes]

    return prepare_variants


def _refuse_other_variant(shapes: Features, first: Features, at: str) -> None:
    if len(shapes[0]) != len(first[0]):
        got, expected = f"{len(shapes[0])} examples", f"{len(first[0])}, as in variant 0"
        fix = "give the same examples in the same order in every variant"
        raise value_error("the variants of a batch differ in size", at=at, got=got, expected=expected, fix=fix)
    if shapes.cut != first.cut:
        raise value_error(
            "the variants of a batch have different programs",
            at=at,
            got=f"the program {shapes.cut[:12]}",
            expected=f"the program {first.cut[:12]} of variant 0: arrays of the same shapes, equal Python values",
            fix="crop all views to one shape; give seeds as random keys, one for each example",
        )


class _Beside:
    """The arguments that do not recur: given once, beside the first batch, and only their shapes are read."""

    def __init__(self, once: Precomputed, others: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = jax.tree.map(_tree.struct_of, (tuple(others), dict(kwargs)))
        with_paths, self._treedef = jax.tree_util.tree_flatten_with_path(given)
        self._leaves = [leaf for _, leaf in with_paths]
        self._arguments = [str(path[:2]) for path, leaf in with_paths if is_array(leaf)]
        self._shapes = [tuple(leaf.shape) for leaf in self._leaves if is_array(leaf)]
        self._axis: Any = once.example_axis
        self._first = 0  # the number of examples in the first batch
        self._found: dict[int, list[tuple[int, ...]]] = {}  # by number of examples

    def with_shapes(self, shapes: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        left = iter(shapes)
        leaves = [jax.ShapeDtypeStruct(next(left), x.dtype) if is_array(x) else x for x in self._leaves]
        return jax.tree.unflatten(self._treedef, leaves)

    def fitting(self, batch: Sequence[Any], at: str, result: Callable[[Any], Features]) -> tuple[Features, Any]:
        """The result for the first shapes that fit a batch, in which axes with one entry per example have its size."""
        count = next((x.shape[self._axis] for x in batch if len(x.shape) > self._axis), None)
        if count == 0:
            got = f"an array of shape {tuple(batch[0].shape)}"
            expected, fix = f"at least one example along axis {self._axis}", "leave empty batches out"
            raise value_error("a batch has no examples", at=at, got=got, expected=expected, fix=fix)
        self._first = self._first or count or 0
        if count is None or count == self._first:
            return result(tuple(self._shapes)), tuple(self._shapes)
        errors: list[Exception] = []
        known = self._found.get(count)
        candidates = shapes_for(count, self._shapes, self._arguments, self._axis, self._first)
        for shapes in candidates if known is None else [known]:
            try:
                features = result(tuple(shapes))
            except Exception as error:
                errors.append(error)
            else:
                self._found[count] = shapes
                return features, tuple(shapes)
        if known is not None or len(errors) == 1:
            raise errors[0]
        message = f"{type(errors[0]).__name__}: {in_one_line(errors[0])[:300]}"
        raise value_error(
            "the other arguments do not fit a batch of another size",
            at=at,
            got=f"{count} examples, and {self._first} in batch 1: {message}",
            expected="other arguments that fit batch 1, and a function of batches of any size",
            fix="name the arguments with one entry per example in `recurring`; a batch is then a tuple of all of these",
        ) from errors[0]


def _arguments(once: Precomputed, batch: Any, others: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments after the parameters: the recurring ones at their positions, the others in between."""
    names = once.arguments.names
    places = {names.index(which) if which in names else which for which in once.arguments.recurring}
    ordered = sorted(places, key=lambda place: (isinstance(place, str), place if is_int(place) else 0))
    items = [batch] if len(ordered) == 1 else batch
    if len(ordered) > 1 and (not isinstance(batch, (tuple, list)) or len(batch) != len(ordered)):
        which = ", ".join(names[place] if is_int(place) and place < len(names) else str(place) for place in ordered)
        at, got = "batches", described(batch)
        expected = f"a tuple of {len(ordered)}: {which}"
        fix = "give batches as tuples, in the order of the arguments of the function"
        raise value_error("a batch must contain all recurring arguments", at=at, got=got, expected=expected, fix=fix)
    args, by_name, left = [], {}, [*others]
    for place, value in zip(ordered, items, strict=True):
        if is_int(place) and not (place < len(names) and names[place] in once.arguments.keyword_only):
            while left and len(args) + 1 < place:
                args.append(left.pop(0))
            if len(args) + 1 == place or place >= len(names):
                args.append(value)
                continue
        by_name[names[place] if is_int(place) else place] = value
    return [*args, *left], by_name
