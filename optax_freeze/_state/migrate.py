"""An optimizer state from one spec to another, in mid-training.

With a new spec the state of an optimizer has another structure: made anew, it has no moments and counts from 0. Here
every array of the new state is looked up in the old one by its *address*, its path without what freezing adds, so that
plain optimizers, :func:`optax_freeze.freeze`, :func:`optax_freeze.freeze_when` and ``optax.multi_transform`` can follow
one another. Parts of leaves give the elements that they have.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._errors import described, printable, type_error, value_error
from optax_freeze._optimizer.as_transformation import as_transformation
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.layout import explicit_sharding, laid_out
from optax_freeze._spec.selection import RowSelection
from optax_freeze._spec.tree import Part, PyTree
from optax_freeze._state.entries import Entry, Group, entries_of


@dataclasses.dataclass(frozen=True)
class Migration:
    """What became of a state: the addresses of its arrays; one that survives in part is in two lists.

    Attributes:
      carried: arrays of the new state that come from the old one.
      created: arrays of the new state that are new.
      dropped: arrays of the old state that are not in the new one.
    """

    carried: tuple[str, ...]
    created: tuple[str, ...]
    dropped: tuple[str, ...]

    def __str__(self) -> str:
        lists = dataclasses.asdict(self).items()
        return "\n".join(f"{name}: {', '.join(map(printable, addresses)) or 'nothing'}" for name, addresses in lists)


@overload
def migrate(
    state: optax.OptState, tx: optax.GradientTransformation, params: PyTree, report: Literal[False] = False
) -> optax.OptState: ...
@overload
def migrate(
    state: optax.OptState, tx: optax.GradientTransformation, params: PyTree, report: Literal[True]
) -> tuple[optax.OptState, Migration]: ...
def migrate(
    state: optax.OptState, tx: optax.GradientTransformation | optax.MultiSteps, params: PyTree, report: bool = False
) -> Any:
    """Makes the state for an optimizer with another spec, in mid-training: what survives is kept.

    Moments of what goes on training, counts and steps of schedules are carried over, rows of a leaf by their numbers;
    what thaws gets the state of a new optimizer, and what freezes loses its own. The optimizer itself must be the
    same: one with other transformations is an error. Groups (of :func:`optax_freeze.freeze_when`, labels of
    ``optax.multi_transform``) take the counts of the groups that their leaves come from, and a group of leaves that all
    thaw now counts from 0. Under one count for all, a leaf with fresh moments starts with Adam's correction of its bias
    long gone: its first step is up to 3.2 times the usual one.

    Args:
      state: the old state, outside of jit.
      tx: the new optimizer.
      params: the parameters, as for ``tx.init``: whole, or the trainable part of the new spec.
      report: whether to return what was carried, created and dropped, too.

    Returns:
      The state for ``tx``; with ``report``, a pair of it and a :class:`Migration` of three tuples of addresses.

    Raises:
      ValueError: if the state does not belong to these parameters, or to an optimizer like ``tx``.
      TypeError: if ``tx`` is not an optimizer, or the state and the parameters are swapped.

    Example:
      >>> import optax, optax_freeze as fz
      >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2)}
      >>> tx = fz.freeze(optax.adam(0.1), "encoder")
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> tx = fz.freeze(optax.adam(0.1), False)
      >>> state, report = fz.migrate(state, tx, params, report=True)
      >>> print(report)
      carried: 0/count, 0/mu/head, 0/nu/head
      created: 0/mu/encoder, 0/nu/encoder
      dropped: nothing
    """
    tx = as_transformation(tx, "fz.migrate(state, tx, params)", other=state)
    try:
        fresh = tx.init(params)
        shapes = {leaf.path: leaf.shape for leaf in _tree.leaves(params)}
        old, new = entries_of(state, shapes), entries_of(fresh, shapes)
        _refuse_other_state(old, new, by_type=_tree.has_variables(params))
    except (ValueError, TypeError) as error:
        _refuse_swapped(state, tx, params, error)
        raise
    carry = _Carry(old, new)
    migrated = jax.tree.unflatten(jax.tree.structure(fresh), jax.tree.leaves([carry(entry) for entry in new]))
    if not report:
        return migrated
    dropped = tuple(entry.name for entry in old if entry.is_array and carry.is_left_of(entry))
    return migrated, Migration(tuple(carry.carried), tuple(carry.created), dropped)


def _refuse_swapped(state: PyTree, tx: Any, params: PyTree, error: Exception) -> None:
    """A ``TypeError`` if the parameters were given for the state, and a state of ``tx`` for the parameters."""
    try:
        swapped = jax.tree.structure(jax.eval_shape(tx.init, state)) == jax.tree.structure(params)
    except Exception:  # any optimizer may raise anything on a tree that is not parameters
        return
    if swapped and jax.tree.leaves(params):
        raise type_error(
            "fz.migrate takes the state first and the parameters last",
            at="its first argument",
            got=f"the parameters ({described(state)}), and a state of `tx` as the third argument",
            expected="fz.migrate(state, tx, params)",
            fix="swap the first and the last argument",
        ) from error


def _updates(entries: Sequence[Entry]) -> dict[Group, int]:
    """How many updates each group has taken, from the largest of its counts."""
    updates: dict[Group, int] = {}
    for entry in entries:
        dtype = getattr(entry.value, "dtype", np.dtype(object))
        is_count = _shape(entry.value) == () and jnp.issubdtype(dtype, jnp.integer)
        if entry.leaf is None and not entry.optional and is_count:
            updates[entry.group] = max(updates.get(entry.group, 0), int(entry.value))
    return updates


def _trained(entries: Sequence[Entry]) -> dict[Group, frozenset[str] | None]:
    """The parameters of each group: those that its state has arrays for, else those of the plan around it."""
    known: dict[Group, set[str]] = {}
    for entry in entries:
        if entry.leaf is not None and entry.is_array:
            known.setdefault(entry.group, set()).add(entry.leaf)
        elif entry.leaf is not None or not entry.is_array:
            known.setdefault(entry.group, set())
    return {e.group: frozenset(known[e.group]) if e.group in known else e.group.trains for e in entries}


class _Carry:
    """Carries the values of an old state over to the entries of a new one, and keeps account."""

    def __init__(self, old: Sequence[Entry], new: Sequence[Entry]) -> None:
        self.carried: list[str] = []
        self.created: list[str] = []
        self._old: dict[str, list[Entry]] = {}  # by address
        for entry in old:
            if entry.is_array and entry.address is not None:
                self._old.setdefault(entry.address, []).append(entry)
        self._trained_old, self._trained_new, self._updates = _trained(old), _trained(new), _updates(old)
        at = {(entry.address, entry.group) for entry in new if entry.leaf is None and entry.is_array}
        self._groups_at = collections.Counter(address for address, _ in at)
        self._taken: dict[int, np.ndarray] = {}  # by the id of an old entry: the elements taken
        self._given: set[int] = set()

    def __call__(self, entry: Entry) -> Any:
        """The value of a new entry, out of the old ones at its address."""
        if not entry.is_array or entry.address is None:
            return entry.value
        value, covered = entry.value, np.zeros((), bool)
        for old in self._sources(entry):
            if entry.leaf is None or not (entry.elementwise and old.elementwise):
                if not _alike(entry, old):
                    continue
                value, taken = old.value, entry.held
            else:
                taken = entry.held & old.held
                value = _merge(entry, value, old, taken)
            if taken.any():
                covered = covered | taken
                self._taken[id(old)] = self._taken.get(id(old), np.zeros((), bool)) | taken
        if covered.any():
            self.carried.append(entry.name)
        if (entry.held & ~covered).any():
            self.created.append(entry.name)
        return self._once(value)

    def is_left_of(self, old: Entry) -> bool:
        """Whether there is something in an old entry that nobody took."""
        return old.address is not None and bool((old.held & ~self._taken.get(id(old), np.zeros((), bool))).any())

    def _sources(self, entry: Entry) -> list[Entry]:
        """The old entries from which a new one takes its value."""
        found = self._old.get(str(entry.address), [])
        if entry.leaf is not None or entry.optional:
            return found
        # A count, or something else of a whole group: from the group that has taken the most updates of those that
        # have leaves in common with it.
        related = [old for old in found if self._are_related(entry.group, old.group)]
        if not related and self._groups_at[entry.address] == 1:
            related = found
        same_names = lambda old: old.group.names == entry.group.names  # noqa: E731
        return sorted(related, key=lambda old: (same_names(old), self._updates.get(old.group, 0)))[-1:]

    def _are_related(self, new: Group, old: Group) -> bool:
        """Whether two groups have leaves in common, or one of them does not say which it has."""
        mine, theirs = self._trained_new[new], self._trained_old.get(old)
        return mine is None or theirs is None or bool(mine & theirs)

    def _once(self, value: Any) -> Any:
        """A copy of a value that stands in the new state already: a buffer can be donated once."""
        if any(id(array) in self._given for array in jax.tree.leaves(value)):
            return jax.tree.map(jnp.copy, value)
        self._given.update(id(array) for array in jax.tree.leaves(value))
        return value


def _alike(new: Entry, old: Entry) -> bool:
    """Whether the whole value of an old entry, whose elements are not those of its parameter, fits the new one.

    Raises:
      ValueError: if their shapes differ and neither is a ``Part``; if it is unknown which elements a ``Part`` has.
    """
    same_shape = jax.tree.structure(new.value) == jax.tree.structure(old.value) and all(
        np.shape(a) == np.shape(b) for a, b in zip(jax.tree.leaves(new.value), jax.tree.leaves(old.value), strict=True)
    )
    if any(isinstance(e.value, Part) and e.rows is None and e.frozen is None for e in (new, old)):
        raise value_error(
            "fz.migrate: a state does not say which elements of a leaf it is about",
            at=old.name,
            got="elements, or rows that change, of the trainable part",
            expected="fz.freeze around the optimizer, whose state has the mask",
            fix="train with fz.freeze(tx, frozen), or rows, or fz.elements(mask) without compact",
        )
    in_part = isinstance(new.value, Part) or isinstance(old.value, Part)
    if not same_shape and not in_part:
        raise _no_fit(old, f"shape {_shape(old.value)}", f"shape {_shape(new.value)}")
    return same_shape and np.array_equal(new.held, old.held)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _merge(entry: Entry, value: Any, old: Entry, taken: np.ndarray) -> Any:
    """``value`` of a new entry with the elements that an old one has of it."""
    a, b = old.rows, entry.rows
    if a is not None and b is not None and a.axis == b.axis:
        _, source, target = np.intersect1d(a.indices(), b.indices(), return_indices=True)

        def moved(new: Any, old: Any) -> jax.Array:
            rows = jnp.take(old, source, axis=a.axis)
            here = (slice(None),) * a.axis + (target,)
            return rows if len(source) == b.count else new.astype(rows.dtype).at[here].set(rows)

        values = laid_out(explicit_sharding(value.values), moved, value.values, old.value.values)
        return dataclasses.replace(value, values=values)
    whole = _spread(old, old.value)
    if not taken.all():
        before = _spread(entry, value).astype(whole.dtype)
        whole = laid_out(explicit_sharding(whole), jnp.where, taken, whole, before)
    if not isinstance(value, Part):
        return whole
    return entry.selection.take(whole)


def _spread(entry: Entry, value: Any) -> Any:
    """A value in the shape of its parameter."""
    if not isinstance(value, Part):
        return value
    return entry.selection.spread(value, np.zeros((), value.dtype))


def _refuse_other_state(old: Sequence[Entry], new: Sequence[Entry], *, by_type: bool) -> None:
    """A ``ValueError`` if an array of one state is missing in the other for another reason than freezing.

    ``by_type``: parameters that NNX froze or thawed by their type are not in one of the two states at all.
    """
    for entry in old:
        if entry.leaf is not None and isinstance(entry.value, Part) and _whole_shape(entry.value) != entry.shape:
            raise _no_fit(entry, f"part of shape {_whole_shape(entry.value)}", f"part of shape {entry.shape}")
    trains = {entry.leaf for entry in new if entry.is_array}
    groups = {entry.group.names for entry in new}
    stateless = all(entry.optional for entry in new)
    for entry in _homeless(old, new):
        gone = entry.leaf not in trains if entry.leaf is not None else entry.group.names not in groups
        if stateless or not (gone or (by_type and _is_within(entry, new))):
            raise _no_fit(entry, "an array in the old state alone")
    for entry in _homeless(new, old):
        if entry.leaf is not None and _is_within(entry, old) and not by_type:
            raise _no_fit(entry, "an array in the new state alone")


def _whole_shape(part: Part) -> tuple[int, ...]:
    """The shape of the leaf that a part was taken from."""
    shape = tuple(part.shape or ())
    if not isinstance(part.index, RowSelection):
        return shape
    return (*shape[: part.index.axis], part.index.size, *shape[part.index.axis + 1 :])


def _is_within(entry: Entry, others: Sequence[Entry]) -> bool:
    """Whether an entry of another state would be in one of this state's trees like the parameters."""
    trees = {other.tree for other in others if other.leaf is not None}
    return any(str(entry.address).startswith(f"{tree}/" if tree else "") for tree in trees)


def _homeless(entries: Sequence[Entry], others: Sequence[Entry]) -> list[Entry]:
    """Arrays at whose address the other state has nothing, not even the hole of a frozen leaf or subtree."""
    addresses = {entry.address for entry in others}
    holes = {entry.address for entry in others if not entry.is_array}

    def has_home(address: str) -> bool:
        segments = address.split("/")
        return address in addresses or any("/".join(segments[:n]) in holes for n in range(len(segments)))

    return [entry for entry in entries if entry.is_array and not entry.optional and not has_home(str(entry.address))]


def _no_fit(
    entry: Entry, got: str, expected: str = "the same arrays in the old state and in that of `tx`"
) -> ValueError:
    return value_error(
        "fz.migrate: the state does not belong to these parameters, or to another optimizer",
        at=entry.name,
        got=got,
        expected=expected,
        fix="give the state of the same optimizer for the same model; only what is frozen, and the groups, may differ",
    )
