"""Converts an optimizer state from one spec to another during training.

With a new spec, the optimizer state has a different structure. A new state from ``init`` would lose the moments and
restart the counts. Here every array of the new state is looked up in the old state by its *address*, its path without
the wrappers that freezing adds. So plain optimizers, :func:`optax_freeze.freeze`, :func:`optax_freeze.freeze_when` and
``optax.multi_transform`` can replace one another. Arrays for parts of leaves are merged element by element.
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
    """Lists which arrays a migration kept, created and dropped, by address.

    An array that is kept in part is in two lists.

    Attributes:
      carried: arrays of the new state with values from the old state.
      created: arrays of the new state with initial values.
      dropped: arrays of the old state that are not in the new state.
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
    """Converts an optimizer state to a different spec during training, and keeps all state that still applies.

    Moments of parameters that stay trainable, counts and schedule steps are carried over; rows of a leaf are matched by
    row number. An array that the rows of a leaf share (a column factor of Adafactor, a norm of NovoGrad, a projection
    of GaLore) is carried over to other rows of the leaf if its shape stays the same, as in
    :func:`optax_freeze.replace_masks`. Newly trainable parameters get the initial state, and the state of newly frozen
    ones is dropped. The optimizer itself must be the same; different transformations raise an error. A group of
    :func:`optax_freeze.freeze_when` or a label of ``optax.multi_transform`` takes the counts of the groups that its
    leaves come from. If all of its leaves are newly trainable, it counts from 0. Where a leaf with new moments shares
    an old count, Adam's bias correction has already faded, and the first step of the leaf is up to 3.2 times the usual
    one.

    Args:
      state: the old state, outside of ``jit``.
      tx: the new optimizer.
      params: the parameters for ``tx.init``: the full parameters, or the trainable part under the new spec.
      report: whether to also return which arrays were carried over, created and dropped.

    Returns:
      The state for ``tx``. With ``report``, a pair of the state and a :class:`Migration`, which has three tuples of
      addresses.

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
    """Raises a ``TypeError`` if the state and the parameters are swapped."""
    try:
        swapped = jax.tree.structure(jax.eval_shape(tx.init, state)) == jax.tree.structure(params)
    except Exception:  # optimizers may raise any error for a tree that is not parameters
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
    """The number of updates of each group: the largest of its counts."""
    updates: dict[Group, int] = {}
    for entry in entries:
        dtype = getattr(entry.value, "dtype", np.dtype(object))
        is_count = _shape(entry.value) == () and jnp.issubdtype(dtype, jnp.integer)
        if entry.leaf is None and not entry.optional and is_count:
            updates[entry.group] = max(updates.get(entry.group, 0), int(entry.value))
    return updates


def _trained(entries: Sequence[Entry]) -> dict[Group, frozenset[str] | None]:
    """The trainable parameters of each group, from the arrays of its state, or else from the plan around it."""
    known: dict[Group, set[str]] = {}
    for entry in entries:
        if entry.leaf is not None and entry.is_array:
            known.setdefault(entry.group, set()).add(entry.leaf)
        elif entry.leaf is not None or not entry.is_array:
            known.setdefault(entry.group, set())
    return {e.group: frozenset(known[e.group]) if e.group in known else e.group.trains for e in entries}


class _Carry:
    """Carries values of an old state over to the entries of a new one, and records which ones."""

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
        self._taken: dict[int, np.ndarray] = {}  # the elements taken from each old entry, by its id
        self._given: set[int] = set()

    def __call__(self, entry: Entry) -> Any:
        """The value of a new entry, taken from the old entries at its address."""
        if not entry.is_array or entry.address is None:
            return entry.value
        value, covered = entry.value, np.zeros((), bool)
        for old in self._sources(entry):
            if entry.leaf is not None and _is_merged(entry, old):
                taken = entry.held & old.held
                value = _merge(entry, value, old, taken)
            elif entry.leaf is None and _contains_other_rows(entry, old):
                raise value_error(
                    "fz.migrate: an array of the state contains the rows of several leaves",
                    at=old.name,
                    got="a spec with other rows",
                    expected="the same rows, or an optimizer with an array for each leaf",
                    fix="create a new state: tx.init(params)",
                )
            elif entry.leaf is not None and _is_shared_by_rows(entry, old):
                value, taken = dataclasses.replace(entry.value, values=old.value.values), entry.held | old.held
            elif _alike(entry, old):
                value, taken = old.value, entry.held
            else:
                continue
            if taken.any():
                covered = covered | taken
                self._taken[id(old)] = self._taken.get(id(old), np.zeros((), bool)) | taken
        if covered.any():
            self.carried.append(entry.name)
        if (entry.held & ~covered).any():
            self.created.append(entry.name)
        return self._once(value)

    def is_left_of(self, old: Entry) -> bool:
        """Whether an old entry has elements that no new entry has taken."""
        return old.address is not None and bool((old.held & ~self._taken.get(id(old), np.zeros((), bool))).any())

    def _sources(self, entry: Entry) -> list[Entry]:
        """The old entries from which a new entry takes its value."""
        found = self._old.get(str(entry.address), [])
        if entry.leaf is not None or entry.optional:
            return found
        # A count, or another value of a whole group, comes from the old group with the most updates among those that
        # share leaves with the new group.
        related = [old for old in found if self._are_related(entry.group, old.group)]
        if not related and self._groups_at[entry.address] == 1:
            related = found
        same_names = lambda old: old.group.names == entry.group.names  # noqa: E731
        return sorted(related, key=lambda old: (same_names(old), self._updates.get(old.group, 0)))[-1:]

    def _are_related(self, new: Group, old: Group) -> bool:
        """Whether two groups share leaves, or the leaves of one of them are unknown."""
        mine, theirs = self._trained_new[new], self._trained_old.get(old)
        return mine is None or theirs is None or bool(mine & theirs)

    def _once(self, value: Any) -> Any:
        """The value, copied if it is already used in the new state, since a buffer can be donated only once."""
        if any(id(array) in self._given for array in jax.tree.leaves(value)):
            return jax.tree.map(jnp.copy, value)
        self._given.update(id(array) for array in jax.tree.leaves(value))
        return value


def _alike(new: Entry, old: Entry) -> bool:
    """Whether a new entry can take the whole value of an old one. Used where entries cannot be merged by element.

    Raises:
      ValueError: if their shapes differ and neither is a ``Part``; if the elements of a ``Part`` are unknown.
    """
    same_shape = jax.tree.structure(new.value) == jax.tree.structure(old.value) and all(
        np.shape(a) == np.shape(b) for a, b in zip(jax.tree.leaves(new.value), jax.tree.leaves(old.value), strict=True)
    )
    if any(isinstance(e.value, Part) and e.rows is None and e.frozen is None for e in (new, old)):
        raise value_error(
            "fz.migrate: the state does not contain the mask of a leaf",
            at=old.name,
            got="compact elements or dynamic rows, without their mask",
            expected="the state of fz.freeze around the optimizer, which has the mask",
            fix="train with fz.freeze(tx, frozen), or rows, or fz.elements(mask) without compact",
        )
    in_part = isinstance(new.value, Part) or isinstance(old.value, Part)
    if not same_shape and not in_part:
        raise _no_fit(old, f"shape {_shape(old.value)}", f"shape {_shape(new.value)}")
    return same_shape and np.array_equal(new.held, old.held)


def _is_merged(new: Entry, old: Entry) -> bool:
    """Whether both entries have one element per element of their parameter, or its rows along one axis."""
    if new.elementwise and old.elementwise:
        return True
    shapes = [
        np.delete(_shape(e.value.values), e.axis_of_rows).tolist() for e in (new, old) if e.axis_of_rows is not None
    ]
    return len(shapes) == 2 and shapes[0] == shapes[1] and _same_axes(new, old)


def _is_shared_by_rows(new: Entry, old: Entry) -> bool:
    """Whether both entries are an array without rows, such as a column factor, for the same or other rows."""
    of_rows = [e for e in (new, old) if e.initial is not None and e.rows is not None and e.axis_of_rows is None]
    return len(of_rows) == 2 and _shape(new.value.values) == _shape(old.value.values) and _same_axes(new, old)


def _contains_other_rows(new: Entry, old: Entry) -> bool:
    """Whether two entries contain the rows of several leaves, as in ``optax.flatten``, and not of the same rows."""
    if all(entry.initial is None or entry.initial.axis is None for entry in (new, old)):
        return False
    rows = [
        {leaf: np.asarray(selection.frozen_rows()).tobytes() for leaf, selection in _rows_around(entry)}
        for entry in (new, old)
    ]
    return rows[0] != rows[1]


def _rows_around(entry: Entry) -> list[tuple[str, RowSelection]]:
    return [
        (leaf, selection)
        for parts in entry.parts
        for leaf, selection in parts.items()
        if isinstance(selection, RowSelection)
    ]


def _same_axes(new: Entry, old: Entry) -> bool:
    return new.axis_of_rows == old.axis_of_rows and getattr(new.rows, "axis", None) == getattr(old.rows, "axis", None)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _merge(entry: Entry, value: Any, old: Entry, taken: np.ndarray) -> Any:
    """``value`` of a new entry, with the elements ``taken`` from an old one."""
    a, b = old.rows, entry.rows
    if a is not None and b is not None and a.axis == b.axis:
        _, source, target = np.intersect1d(a.indices(), b.indices(), return_indices=True)
        axis = a.axis if entry.axis_of_rows is None else entry.axis_of_rows

        def moved(new: Any, old: Any) -> jax.Array:
            rows = jnp.take(old, source, axis=axis)
            here = (slice(None),) * axis + (target,)
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
    """The value in the shape of its parameter, with zeros for missing elements."""
    if not isinstance(value, Part):
        return value
    return entry.selection.spread(value, np.zeros((), value.dtype))


def _refuse_other_state(old: Sequence[Entry], new: Sequence[Entry], *, by_type: bool) -> None:
    """Raises a ``ValueError`` if an array of one state is missing in the other for a reason other than freezing.

    With ``by_type``, parameters may be missing completely, since NNX freezes them by their variable type.
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
            raise _no_fit(entry, "an array that is only in the old state")
    for entry in _homeless(new, old):
        if entry.leaf is not None and _is_within(entry, old) and not by_type:
            raise _no_fit(entry, "an array that is only in the new state")


def _whole_shape(part: Part) -> tuple[int, ...]:
    """The shape of the leaf that a part was taken from."""
    shape = tuple(part.shape or ())
    if not isinstance(part.index, RowSelection):
        return shape
    return (*shape[: part.index.axis], part.index.size, *shape[part.index.axis + 1 :])


def _is_within(entry: Entry, others: Sequence[Entry]) -> bool:
    """Whether the address of an entry lies in a tree of the other state that has the structure of the parameters."""
    trees = {other.tree for other in others if other.leaf is not None}
    return any(str(entry.address).startswith(f"{tree}/" if tree else "") for tree in trees)


def _homeless(entries: Sequence[Entry], others: Sequence[Entry]) -> list[Entry]:
    """Arrays at whose address the other state has neither an array nor the hole of a frozen leaf or subtree."""
    addresses = {entry.address for entry in others}
    holes = {entry.address for entry in others if not entry.is_array}

    def has_home(address: str) -> bool:
        segments = address.split("/")
        return address in addresses or any("/".join(segments[:n]) in holes for n in range(len(segments)))

    return [entry for entry in entries if entry.is_array and not entry.optional and not has_home(str(entry.address))]


def _no_fit(
    entry: Entry, got: str, expected: str = "the same arrays in the old state and in the state of `tx`"
) -> ValueError:
    return value_error(
        "fz.migrate: the state belongs to other parameters or to another optimizer",
        at=entry.name,
        got=got,
        expected=expected,
        fix="give the state of the same optimizer for the same model; only the spec and the groups may differ",
    )
