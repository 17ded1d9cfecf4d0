"""What training with frozen parameters should give, by hand: Optax alone, on arrays that NumPy has cut.

It imports nothing of the library. An ``Owner`` is one optimizer with its state, on some elements of some leaves.
Parameters are a flat dict by path.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

WRAPPER_NUMBERS = {"mini_step", "gradient_step"}
"""Numbers beside moments, the accumulated gradients, that do not belong to them."""


class Cut(NamedTuple):
    """The elements of a leaf that an optimizer trains: ``trains`` is True there. ``kind`` says what it receives."""

    kind: str  # "whole", "rows" along ``axis``, "compact", "dense", or "moved": dense, and never equal to another
    trains: np.ndarray
    axis: int = 0

    @property
    def is_full(self) -> bool:
        """Whether an optimizer receives an array of the shape of the leaf."""
        return self.kind in ("whole", "dense", "moved")

    def numbers(self) -> list[int]:
        """The numbers of the rows, or of the compact elements."""
        others = tuple(i for i in range(self.trains.ndim) if i != self.axis)
        return np.flatnonzero(self.trains if self.kind == "compact" else self.trains.any(others)).tolist()

    def _at(self) -> Any:
        if self.kind == "compact":
            return np.nonzero(self.trains)
        return (slice(None),) * self.axis + (np.array(self.numbers()),)

    def take(self, leaf: Any) -> Any:
        if self.is_full:
            return jnp.asarray(leaf) if self.kind == "whole" else jnp.where(self.trains, leaf, jnp.zeros_like(leaf))
        return jnp.asarray(leaf)[self._at()]

    def put(self, leaf: Any, part: Any) -> Any:
        if self.is_full:
            return part if self.kind == "whole" else jnp.where(self.trains, part, leaf)
        return jnp.asarray(leaf).at[self._at()].set(part)

    def equals(self, other: "Cut") -> bool:
        return self[::2] == other[::2] and np.array_equal(self.trains, other.trains)


class Owner(NamedTuple):
    """An optimizer of some elements, its state, and whether it runs."""

    cuts: dict[str, Cut]
    state: Any


ANY = object()
"""In place of an array of a state: nothing is promised about it."""


def cut(cuts: dict[str, Cut], tree: dict[str, Any]) -> dict[str, Any]:
    return {path: its.take(tree[path]) for path, its in cuts.items()}


def init(tx: Any, cuts: dict[str, Cut], params: dict[str, Any]) -> Owner:
    try:
        return Owner(cuts, tx.init(cut(cuts, params)))
    except IndexError:  # line searches look at the first leaf
        if cuts:
            raise
        return Owner(cuts, ())


def update(
    tx: Any,
    owner: Owner,
    params: dict[str, Any],
    grads: dict[str, Any],
    updates: dict[str, Any],
    loss: Callable[[Any], Any],
    extra: Any,
) -> tuple[dict[str, Any], Any]:
    """The new values of the elements of an owner, and its new state.

    As in ``optax.chain(coupled, tx)``, ``updates`` come from ``coupled``, and the argument ``grad`` from the loss.
    """
    mine, gradient = cut(owner.cuts, params), cut(owner.cuts, grads)
    whole = lambda part: {**params, **{path: its.put(params[path], part[path]) for path, its in owner.cuts.items()}}  # noqa: E731
    fn = lambda part: loss(whole(part))  # noqa: E731
    every = {"value": loss(params) if extra else None, "grad": gradient, "value_fn": fn, "obj_fn": fn}
    given = {name: every[name] for name in extra}
    updates, state = tx.update(cut(owner.cuts, updates), owner.state, mine, **given)
    return optax.apply_updates(mine, updates), state


def moved(owner: Owner, path: str, axis: int, rows: np.ndarray, old: Any) -> Owner:
    """An owner of a leaf whose row i along an axis was ``rows[i]``, or is new if that is -1."""
    if path not in owner.cuts:
        return owner
    its = owner.cuts[path]
    is_new = np.expand_dims(rows < 0, tuple(i for i in range(np.ndim(old)) if i != axis))

    def of_array(place: Place, array: Any) -> Any:
        if place.param != path:
            return array
        if not place.is_moment or np.shape(array) != np.shape(its.take(old)):
            return ANY
        full = array if its.is_full else its.put(jnp.zeros(np.shape(old), array.dtype), array)
        return jnp.where(is_new, jnp.zeros((), array.dtype), jnp.take(full, np.maximum(rows, 0), axis))

    cuts = owner.cuts | {path: Cut("moved", its.trains.take(np.maximum(rows, 0), axis) & ~is_new)}
    arrays = [of_array(*each) for each in places(owner)]
    return Owner(cuts, jax.tree.unflatten(jax.tree.structure(owner.state), arrays))


class Place(NamedTuple):
    """Where an array of a state is: ``label`` of ``multi_transform``, the path without it, ``param`` in ``tree``."""

    label: str
    address: str
    param: str | None
    tree: str

    @property
    def is_moment(self) -> bool:
        """Whether the array is one of its parameter, or its real or imaginary part; SM3 has lists of other arrays."""
        is_listed = self.address.rpartition("/")[2].isdigit()
        return self.param is not None and (self.address.endswith(self.param) or not is_listed)

    @property
    def around(self) -> str:
        return self.tree.rpartition("/")[0]


def places(owner: Owner) -> list[tuple[Place, Any]]:
    found = []
    for path, array in jax.tree_util.tree_flatten_with_path(owner.state)[0]:
        param = next((key.key for key in path if getattr(key, "key", None) in owner.cuts), None)
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        label = "/".join(re.findall(r"inner_states/(\w+)/inner_state", text))
        address = re.sub(r"inner_states/\w+/inner_state/", "", text)
        tree = address if param is None else re.split(f"/?(?:^|/){re.escape(param)}(?:/|$)", address)[0]
        found.append((Place(label, address, param, tree), array))
    return found


def carry(
    tx: Any,
    fresh: dict[str, Owner],
    olds: dict[str, Owner],
    params: dict[str, Any],
    *,
    replaced: bool = False,
    is_plain: bool = False,
    anew: Collection[str] = (),
) -> dict[str, Owner]:
    """The states of new owners with what survives of the old ones.

    Leaves in ``anew`` begin anew as a whole.

    ``replaced``: each only from that of its name. ``is_plain``: an old state does not say which leaves it is of, so one
    without moments may be of any.
    """
    old = {name: places(owner) for name, owner in olds.items()}
    numbers = {
        (name, place.label, place.address) for name in fresh for place, _ in places(fresh[name]) if place.param is None
    }
    scopes = {name: leaves_of(owner, owner.cuts) for name, owner in fresh.items()}
    scopes_old = {
        name: {label: its - {*anew} for label, its in leaves_of(owner, params if is_plain else owner.cuts).items()}
        for name, owner in olds.items()
    }
    has_same_names = (len(fresh) > 1) == (
        len(olds) > 1
    )  # what has no group and an optimizer without groups are not one

    def sources(name: str, place: Place) -> list[tuple[str, Place, Any]]:
        names = [name] if replaced else list(olds)
        found = [(n, p, a) for n in names for p, a in old[n] if (p.address, p.param) == (place.address, place.param)]
        if replaced or place.param is not None:
            return [each for each in found if not replaced or each[1].label == place.label]
        mine = scopes[name].get(place.label, set())
        related = [each for each in found if mine & scopes_old[each[0]].get(each[1].label, set())]
        if not related and sum(address == place.address for _, _, address in numbers) == 1:
            related = found

        def rank(each: Any) -> tuple[bool, int]:
            counts = [int(a) for p, a in old[each[0]] if p.label == each[1].label and p.param is None and is_count(a)]
            is_same = has_same_names and (each[0], each[1].label) == (name, place.label)
            return is_same, max(counts, default=0)

        related.sort(key=rank)
        if len(related) > 1 and rank(related[-1]) == rank(related[-2]):
            return [(related[-1][0], related[-1][1], ANY)]
        return related[-1:]

    def owner(name: str) -> Owner:
        new = fresh[name]
        arrays = [(place, array, sources(name, place)) for place, array in places(new)]
        carried, places_of = [], collections.defaultdict(_Transformation)
        for place, array, found in arrays:
            its = places_of[place.label, place.around]
            its.fields.add(place.tree.rpartition("/")[2])
            if place.param is None:
                carried.append(found[-1][2] if found else array)
                continue
            now, value, kept = new.cuts[place.param], array, False
            for n, _, before in found:
                value, survives = merged(tx, new, place, value, olds[n].cuts[place.param], before, params, len(found))
                kept |= survives
            shape = np.shape(now.take(params[place.param]))
            its.is_unknown |= value is ANY
            its.kept.append(kept)
            its.changed |= not all(olds[n].cuts[place.param].equals(now) for n, _, _ in found)
            its.origins |= {(n, p.label, p.around) for n, p, _ in found}
            its.is_history |= bool(shape) and np.ndim(array) > len(shape) and np.shape(array)[-len(shape) :] == shape
            its.leaves.add(place.param)
            # Shapes cannot tell the axis of the rows where there are as many as another axis is long.
            count = shape[now.axis] if now.kind == "rows" else 0
            if np.shape(array) not in (shape, ()):
                its.is_unknown |= bool(count) and (count < 3 or shape.count(count) > 1)
            elif shape.count(count) > 1 or count == 2:  # a projection may have the shape of the rows
                its.is_unknown |= axis_of_rows(tx, new, place, params) != now.axis
            carried.append(value)
        for its in places_of.values():
            before = [{p.param for p, _ in old[n] if [p.label, p.around] == at} - {None} for n, *at in its.origins]
            its.changed |= before != [its.leaves]

        def value_of(place: Place, array: Any, value: Any) -> Any:
            its = places_of[place.label, place.around]
            if not (place.param is not None or is_of_moments(place, array)):
                return value
            return ANY if its.is_unknown and its.changed else array if its.begins_anew else value

        wanted = [found[-1][2].dtype if replaced and found else array.dtype for _, array, found in arrays]
        anew = [a if a.dtype == dtype else a.astype(dtype) for (_, a, _), dtype in zip(arrays, wanted, strict=True)]
        each = zip(arrays, anew, carried, strict=True)
        values = [value_of(place, array, value) for (place, _, _), array, value in each]
        return new._replace(state=jax.tree.unflatten(jax.tree.structure(new.state), values))

    return {name: owner(name) for name in fresh}


@dataclasses.dataclass
class _Transformation:
    """The state of one transformation: whether any element of each moment survives, and whether all do."""

    fields: set[str] = dataclasses.field(default_factory=set)
    leaves: set[str] = dataclasses.field(default_factory=set)
    origins: set[tuple[str, str, str]] = dataclasses.field(default_factory=set)
    kept: list[bool] = dataclasses.field(default_factory=list)
    changed: bool = False
    is_history: bool = False
    is_unknown: bool = False

    @property
    def begins_anew(self) -> bool:
        has_history = self.is_history or {"grad", "value"} <= self.fields
        return bool(self.kept) and (not any(self.kept) or (has_history and self.changed))


def is_of_moments(place: Place, number: Any) -> bool:
    """Whether a number beside moments belongs to them."""
    is_key = jnp.issubdtype(number.dtype, jax.dtypes.prng_key)
    return not is_key and place.tree.rpartition("/")[2] not in WRAPPER_NUMBERS


def leaves_of(owner: Owner, every: Collection[str]) -> dict[str, set[str]]:
    """The leaves of each label: those with arrays in its state; if none has any, every one."""
    found: dict[str, set[str]] = {}
    for place, _ in places(owner):
        found.setdefault(place.label, set()).update([place.param] if place.param is not None else [])
    return found if any(found.values()) else {label: {*every} for label in found}


def merged(
    tx: Any, owner: Owner, place: Place, new: Any, before: Cut, old: Any, params: dict[str, Any], sources: int
) -> tuple[Any, bool]:
    """An array of a new state with what survives of that of an old one, and whether anything does."""
    leaf, now = params[place.param], owner.cuts[place.param]
    survives = bool((now.trains & before.trains).any())
    if old is ANY:
        return ANY, survives
    if now.equals(before):
        with_frozen = now.kind == "dense" and place.is_moment and np.shape(old) == np.shape(leaf)
        return jnp.where(now.trains, old, new.astype(old.dtype)) if with_frozen else old, True
    in_parts = [not each.is_full for each in (now, before)]
    is_dense = not any(in_parts)
    shapes = [np.shape(each.take(leaf)) for each in (now, before)]
    if (place.is_moment or all(in_parts)) and [np.shape(new), np.shape(old)] == shapes:
        pairs = (now, new), (before, old)  # an element for each of the parameter
        full = [a if c.is_full else c.put(jnp.zeros(np.shape(leaf), old.dtype), a) for c, a in pairs]
        value = jnp.where(now.trains & before.trains, full[1], full[0].astype(old.dtype))
        return value if now.kind == "dense" else now.take(value), survives
    if sources > 1:
        return ANY, survives
    if is_dense:
        return old, survives
    if (now.kind, now.axis) != (before.kind, before.axis):
        return new, False
    axis = axis_of_rows(tx, owner, place, params)
    if axis is ANY:
        return ANY, survives
    if axis is None:
        return (old, survives) if np.shape(new) == np.shape(old) else (new, False)
    numbers = [each.numbers() for each in (now, before)]
    value, old = jnp.moveaxis(jnp.asarray(new, old.dtype), axis, 0), jnp.moveaxis(old, axis, 0)
    for i, row in enumerate(numbers[0]):
        if row in numbers[1]:
            value = value.at[i].set(old[numbers[1].index(row)])
    return jnp.moveaxis(value, 0, axis), survives


def axis_of_rows(tx: Any, owner: Owner, place: Place, params: dict[str, Any]) -> Any:
    """The axis of an array of a state on which a row of the gradient acts at one index only, by trying it."""
    its = owner.cuts[place.param]
    axis = its.axis if its.kind == "rows" else 0
    part = cut(owner.cuts, params)
    if part[place.param].shape[axis] < 2:
        return ANY
    after = []
    for factor in (1.0, 8.0):
        grads = {path: jnp.arange(1.0, x.size + 1).reshape(x.shape).astype(x.dtype) for path, x in part.items()}
        row = (slice(None),) * axis + (1,)
        grads[place.param] = grads[place.param].at[row].multiply(factor)
        try:
            _, state = tx.update(grads, tx.init(part), part)
        except (TypeError, ValueError, IndexError, DeprecationWarning, jax.errors.JaxRuntimeError):
            # It asks for more arguments, or refuses complex ones or scalars, as XLA may do.
            return ANY
        after.append(next(a for p, a in places(Owner(owner.cuts, state)) if p == place))
    differs = np.asarray(after[0] != after[1])
    for i in range(differs.ndim):
        others = tuple(j for j in range(differs.ndim) if j != i)
        if differs.any(others).tolist() == [k == 1 for k in range(differs.shape[i])] and differs.shape[i] > 1:
            return i
    return None


def is_count(array: Any) -> bool:
    return np.shape(array) == () and jnp.issubdtype(array.dtype, jnp.integer)
