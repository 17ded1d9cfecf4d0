"""Converts an optimizer state from one spec to another during training.

Every array of the new state is looked up in the old state by its *address*, its path without the wrappers that freezing
adds. So plain optimizers, :func:`optax_freeze.freeze`, :func:`optax_freeze.freeze_when` and ``optax.multi_transform``
can replace one another.
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._errors import described, is_array, printable, type_error
from optax_freeze._optimizer.call_init import each_once
from optax_freeze._optimizer.transformation import as_transformation
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.folded_paths import fold
from optax_freeze._spec.resolve import Spec
from optax_freeze._spec.tree import Part, PyTree
from optax_freeze._state.carried_values import CarriedValues
from optax_freeze._state.old_leaves import LeavesBefore, leaves_before, refuse_ambiguous
from optax_freeze._state.state_entries import Entry, Scope, entries_of, join, no_fit


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
        lists = {name: ", ".join(_folded(addresses)) for name, addresses in dataclasses.asdict(self).items()}
        return "\n".join(f"{name}: {folded or 'nothing'}" for name, folded in lists.items())


def _folded(addresses: Sequence[str]) -> list[str]:
    """Addresses in which those that differ in a number are one, as in a summary."""
    groups: dict[str, tuple[str, ...]] = {}  # several have a count of their own at one path
    for address in addresses:
        path, sep, names = address.partition(" [")
        groups[path] = (*groups.get(path, ()), sep + names)
    return [printable("/".join(line.path) + group) for line in fold(groups.items()) for group in line.content]


@overload
def migrate(
    state: optax.OptState,
    tx: optax.GradientTransformation | optax.MultiSteps,
    params: PyTree,
    *,
    rename: Mapping[str, str] | None = None,
    rows: Mapping[Any, Any] | None = None,
    reset: Spec | None = None,
    report: Literal[False] = False,
) -> optax.OptState: ...
@overload
def migrate(
    state: optax.OptState,
    tx: optax.GradientTransformation | optax.MultiSteps,
    params: PyTree,
    *,
    rename: Mapping[str, str] | None = None,
    rows: Mapping[Any, Any] | None = None,
    reset: Spec | None = None,
    report: Literal[True],
) -> tuple[optax.OptState, Migration]: ...
def migrate(
    state: optax.OptState,
    tx: optax.GradientTransformation | optax.MultiSteps,
    params: PyTree,
    *,
    rename: Mapping[str, str] | None = None,
    rows: Mapping[Any, Any] | None = None,
    reset: Spec | None = None,
    report: bool = False,
) -> Any:
    """Converts an optimizer state to a different spec or model during training, and keeps all state that still applies.

    Moments of parameters that stay trainable, counts and schedule steps are carried over; rows of a leaf are matched by
    row number. An array that the rows of a leaf share (a column factor of Adafactor, a norm of NovoGrad, a projection
    of GaLore) is carried over to other rows of the leaf if its shape stays the same, and so are SM3's accumulators of a
    leaf with a dense mask. Newly trainable parameters get the initial state, and the state of newly frozen ones is
    dropped. The optimizer itself must be the same; different transformations raise an error. A group of
    :func:`optax_freeze.freeze_when` or a label of ``optax.multi_transform`` takes the counts of the groups that its
    leaves come from. Where a leaf with new moments shares an old count, Adam's bias correction has already faded, and
    the first step of the leaf is up to 3.2 times the usual one.

    An optimizer starts as in ``init`` where it would in :func:`optax_freeze.replace_masks`, and one with a history of
    gradients (L-BFGS) or a line search also if an element is newly frozen, or a group is divided or joined to another.
    Steps of schedules and wrappers continue, except in a group or label of which all leaves are new.

    Of another model, a leaf that is longer along one axis keeps the state of its leading rows, and its new rows begin
    as in ``init``. So do a new leaf, one of another shape, and the rows of an optimizer that does not say which of its
    arrays is about them (factors of Adafactor that change places). The state of a leaf that is gone is dropped.

    Args:
      state: the old state, outside of ``jit``.
      tx: the new optimizer.
      params: the parameters for ``tx.init``: the full parameters, or the trainable part under the new spec.
      rename: the new path of leaves, or the beginning of it, by the old one. An explicit name takes the place of an old
        leaf of this path.
      rows: for leaves whose rows were pruned, reordered or split, by a path, pattern or selector: which old row each
        row along axis 0 was (a number may occur twice), or a bool for each old row, True if it is kept.
      reset: a spec of leaves and static rows that begin as in ``init``, with True where a spec for freezing has it.
        Other leaves keep their state, and counts continue, unless all leaves that share a count begin anew.
      report: whether to also return which arrays were carried over, created and dropped.

    Returns:
      The state for ``tx``. With ``report``, a pair of the state and a report, to be printed, with three tuples of
      addresses: ``carried`` (arrays with values from the old state), ``created`` (with initial values) and ``dropped``
      (arrays of the old state that are not in the new one). An array that is kept in part is in two of them.

    Raises:
      ValueError: if the state does not belong to an optimizer like ``tx``, or has no leaf of the parameters; if a leaf
        is gone beside a new one of its shape that neither ``rename`` nor ``reset`` names; if a name or a pattern
        applies to nothing, or ``rows`` do not fit; if one array of the state is about several leaves of which some
        change (``optax.flatten``).
      TypeError: if ``tx`` is not an optimizer, the state and the parameters are swapped, or an argument is of another
        type.

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
        new = entries_of(fresh, shapes)
        before = leaves_before(state, new, tx, params, rename=rename, rows=rows, reset=reset)
        before_rename = entries_of(state, shapes | before.shapes)
        by_type = bool(_tree.walk(params).variables)
        if not by_type:
            refuse_ambiguous(before, before_rename, new)
        replaced = [entry for entry in before_rename if entry.leaf in before.replaced]
        old = [before.entry(entry) for entry in before_rename if entry.leaf not in before.replaced]
        _refuse_other_state(old, new, before, by_type=by_type)
        before = before.with_lists_of_arrays(new, tx, params)
    except (ValueError, TypeError) as error:
        _refuse_swapped(state, tx, params, error)
        raise
    carry = CarriedValues(new, old, _sources(old, new, before), tx, params)
    carry.anew = {place: bool(anew) for place, anew in carry.anew.items()}
    values = carry.values()
    if before.moved:
        values = map(_placed, values, jax.tree.leaves(fresh))
    migrated = jax.tree.unflatten(jax.tree.structure(fresh), each_once(values))
    return (migrated, _report(carry, old, replaced)) if report else migrated


def _placed(new: Any, fresh: Any) -> Any:
    """An array with rows of one of another shape where the fresh state has it."""
    is_here = not isinstance(fresh, jax.Array) or not isinstance(new, jax.Array) or new.sharding == fresh.sharding
    return new if is_here else jax.device_put(new, fresh.sharding)


def _report(carry: CarriedValues, old: Sequence[Entry], replaced: Sequence[Entry]) -> Migration:
    carried, created = [], []
    taken = collections.defaultdict(lambda: np.zeros((), bool))  # the elements taken from each old entry, by its id
    for entry, sources in zip(carry.entries, carry.sources, strict=True):
        if not entry.arrays or entry.address is None:
            continue
        covered = np.zeros((), bool)
        for source in [] if carry.begins_anew(entry) else sources:
            shared = source.by != "elements" and all(axis is None for axis in source.axes)
            own = entry.held | source.old.held if shared else entry.held & source.old.held
            if own.any():
                covered = covered | own
                taken[id(source.old)] = taken[id(source.old)] | own
        carried += [entry.name] * bool(covered.any())
        created += [entry.name] * bool((entry.held & ~covered).any())
    olds = [entry for entry in old if entry.arrays and entry.address is not None]
    lost = lambda entry: entry.moved is not None and entry.moved.loses_rows  # noqa: E731
    dropped = [entry.name for entry in olds if lost(entry) or (entry.held & ~taken[id(entry)]).any()]
    dropped += [entry.name for entry in replaced if entry.arrays]
    return Migration(tuple(carried), tuple(created), tuple(dropped))


def _refuse_swapped(state: PyTree, tx: Any, params: PyTree, error: Exception) -> None:
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


def _updates(entries: Sequence[Entry]) -> dict[Scope, int]:
    """The number of updates in each scope: the largest of its counts."""
    updates: dict[Scope, int] = collections.defaultdict(int)
    for entry in entries:
        value = entry.value
        is_count = is_array(value) and value.shape == () and jnp.issubdtype(value.dtype, jnp.integer)
        if entry.leaf is None and not entry.optional and is_count:
            updates[entry.scope] = max(updates[entry.scope], int(value))
    return updates


def _trained(entries: Sequence[Entry], anew: Collection[str] = ()) -> dict[Scope, Any]:
    """The trainable parameters of each scope, from the arrays of its state, or else from the plan around it.

    Leaves that begin ``anew`` are not among those of an old state.
    """
    trained: dict[Scope, Any] = {entry.scope: entry.scope.trains for entry in entries}
    of_state = [entry for entry in entries if entry.leaf is not None or not entry.arrays]
    trained |= {entry.scope: set() for entry in of_state}
    for entry in of_state:
        if entry.arrays and entry.leaf not in anew:
            trained[entry.scope] |= {entry.leaf}
    return trained


def _sources(old: Sequence[Entry], new: Sequence[Entry], before: LeavesBefore) -> list[list[Entry]]:
    """For each entry of a new state the entries of the old one from which it takes its values."""
    by_address: dict[str, list[Entry]] = collections.defaultdict(list)
    for entry in old:
        if entry.arrays and entry.address is not None:
            by_address[entry.address].append(entry)
    trained_old, trained_new, updates = _trained(old, before.anew), _trained(new), _updates(old)
    state_of = {entry.leaf for entry in new if entry.leaf is not None and entry.arrays}
    all_anew = bool(before.anew) and not (state_of & before.kept) - before.anew
    shared = {(entry.address, entry.scope) for entry in new if entry.leaf is None and entry.arrays}
    scopes_at = collections.Counter(address for address, _ in shared)

    def are_related(entry: Entry, old: Entry) -> bool:
        """Whether two scopes share leaves, or may share some, since the leaves of one of them are unknown."""
        mine, theirs = trained_new[entry.scope], trained_old.get(old.scope)
        if mine is None or theirs is None:
            return mine != set() and theirs != set()
        return bool(mine & theirs)

    def sources_of(entry: Entry) -> list[Entry]:
        is_new = entry.address is None or all_anew or before.begins_anew(entry)
        found = [] if is_new else by_address.get(str(entry.address), [])
        if entry.leaf is not None or entry.optional:
            return found
        # A count, or another value that leaves share, comes from the old scope with the most updates among those that
        # have some of these leaves.
        related = [old for old in found if are_related(entry, old)]
        if not related and scopes_at[entry.address] == 1:
            related = found
        same_names = lambda old: old.scope.names == entry.scope.names  # noqa: E731
        return sorted(related, key=lambda old: (same_names(old), updates.get(old.scope, 0)))[-1:]

    return list(map(sources_of, new))


def _refuse_other_state(old: Sequence[Entry], new: Sequence[Entry], before: LeavesBefore, *, by_type: bool) -> None:
    """Raises a ``ValueError`` if an array of one state is missing in the other for a reason other than freezing.

    With ``by_type``, parameters may be missing completely, since NNX freezes them by their variable type.
    """
    trains = {entry.leaf for entry in new if entry.arrays}
    held = [entry for entry in old if entry.leaf is not None and entry.arrays]
    if held and trains - {None} and not before.kept and not by_type:
        raise no_fit(held[0], "no leaf in common with the parameters")
    groups = {entry.scope.names for entry in new}
    stateless = all(entry.optional for entry in new)
    for entry in _homeless(old, new):
        gone = entry.leaf not in trains if entry.leaf is not None else entry.scope.names not in groups
        if stateless or not (gone or (by_type and _is_within(entry, new))):
            raise no_fit(entry, "an array that is only in the old state")
    for entry in _homeless(new, old):
        if entry.leaf in before.kept and _is_within(entry, old) and not by_type:
            raise no_fit(entry, "an array that is only in the new state")


def _is_within(entry: Entry, others: Sequence[Entry]) -> bool:
    """Whether the address of an entry lies in a tree of the other state that has the structure of the parameters."""
    trees = {other.tree for other in others if other.leaf is not None}
    return any(str(entry.address).startswith(f"{tree}/" if tree else "") for tree in trees)


def _homeless(entries: Sequence[Entry], others: Sequence[Entry]) -> list[Entry]:
    """Arrays at whose address the other state has no array, and no ``MaskedNode`` of a frozen leaf or subtree.

    Of several arrays for one leaf, those of a ``Part`` are one entry, at the address that others begin with.
    """
    addresses = {entry.address for entry in others}
    around = {entry.address for entry in others if not entry.arrays or isinstance(entry.value, Part)}
    above = {join(*str(address).split("/")[:n]) for address in addresses for n in range(str(address).count("/") + 1)}

    def has_home(entry: Entry) -> bool:
        if entry.address in addresses or (isinstance(entry.value, Part) and entry.address in above):
            return True
        segments = str(entry.address).split("/")
        return any(join(*segments[:n]) in around for n in range(len(segments)))

    return [entry for entry in entries if entry.arrays and not entry.optional and not has_home(entry)]
