"""The batches whose features are stored: their digests, and the call of ``before``."""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from optax_freeze._errors import described, is_array, is_int, value_error
from optax_freeze._precompute.precompute import Features, Precomputed
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.resolve import make_plan
from optax_freeze._spec.selection import TRAINABLE
from optax_freeze._spec.tree import PyTree
from optax_freeze.features._arrays import on_host


def computation(once: Precomputed, params: PyTree, others: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable:
    """A function of a batch that returns its digest, the shapes of its features, and a function that computes them."""
    values, treedef = _tree.flatten(params)
    selections = make_plan(params, once.frozen).selections
    structs = [*map(_tree.struct_of, values)]
    frozen = {
        i: x for i, (x, s) in enumerate(zip(values, selections, strict=True)) if s is not TRAINABLE and is_array(x)
    }
    others, kwargs = jax.tree.map(_tree.struct_of, (tuple(others), dict(kwargs)))

    def before(frozen: dict[int, Any], arrays: list[Any], static: Any) -> Features:
        structure, rest = static
        left = iter(arrays)
        batch = jax.tree.unflatten(structure, [next(left) if kind is None else value for kind, value in rest])
        full = jax.tree.unflatten(treedef, [frozen.get(i, struct) for i, struct in enumerate(structs)])
        args, by_name = _arguments(once, batch, others)
        return once.before(full, *args, **by_name, **kwargs)

    jitted = jax.jit(before, static_argnums=2)

    def of_batch(batch: Any) -> tuple[str, Features, Callable[[], Features]]:
        leaves, structure = jax.tree.flatten(batch)
        # A loader may reuse the memory of a NumPy array for the next batch, while this one is computed.
        arrays = [np.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves if is_array(leaf)]
        static = structure, tuple((None, None) if is_array(leaf) else (type(leaf), leaf) for leaf in leaves)
        hashed = hashlib.blake2b(repr([described(leaf) for leaf in leaves]).encode(), digest_size=16)
        for array in arrays:
            hashed.update(on_host(array, "a batch").tobytes())
        shapes = jitted.eval_shape(frozen, arrays, static)
        return hashed.hexdigest(), shapes, lambda: jitted(frozen, arrays, static)

    return of_batch


def _arguments(once: Precomputed, batch: Any, others: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments after the parameters: the recurring ones at their positions, the others in between."""
    names = once.arguments.names
    places = {names.index(which) if which in names else which for which in once.arguments.recurring}
    ordered = sorted(places, key=lambda place: (isinstance(place, str), place if is_int(place) else 0))
    items = [batch] if len(ordered) == 1 else batch
    if len(ordered) > 1 and (not isinstance(batch, (tuple, list)) or len(batch) != len(ordered)):
        which = ", ".join(names[place] if is_int(place) and place < len(names) else str(place) for place in ordered)
        raise value_error(
            "a batch must contain all recurring arguments",
            at="batches",
            got=described(batch),
            expected=f"a tuple of {len(ordered)}: {which}",
            fix="give batches as tuples, in the order of the arguments of the function",
        )
    kinds = [] if not names else [each.kind for each in inspect.signature(once.fun).parameters.values()]
    args, by_name, left = [], {}, [*others]
    for place, value in zip(ordered, items, strict=True):
        if is_int(place) and not (place < len(kinds) and kinds[place] is inspect.Parameter.KEYWORD_ONLY):
            while left and len(args) + 1 < place:
                args.append(left.pop(0))
            if len(args) + 1 == place or place >= len(names):
                args.append(value)
                continue
        by_name[names[place] if is_int(place) else place] = value
    return [*args, *left], by_name
