"""Which leaf, and which row, of an old model each leaf of the parameters was."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from optax_freeze._errors import counted, described, refuse_no_mapping, type_error, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.rename import renamed
from optax_freeze._spec.resolve import make_plan
from optax_freeze._spec.selection import FROZEN, TRAINABLE, RowIndex
from optax_freeze._spec.selector_algebra import as_selector, first_match
from optax_freeze._spec.tree import Leaf, PyTree
from optax_freeze._state.old_shapes import Shape, searched, shapes_before
from optax_freeze._state.row_axes import Moved, Resized, init_shapes
from optax_freeze._state.state_entries import Entry, Scope, entries_of, join


@dataclasses.dataclass(frozen=True)
class LeavesBefore:
    """The leaves of an old state, and what becomes of them.

    Attributes:
      shapes: the shape of each old leaf, by its old path.
      names: the path of each old leaf in the parameters; None if it is dropped.
      moved: the rows of leaves of which not all are where they were, by the new path.
      anew: the leaves of the parameters that begin anew, also if the state has one of this path.
      paths: those of the parameters.
      floating: those of the parameters that can train.
      lists: addresses of arrays that an optimizer has for a leaf that begins anew, or of which rows have moved.
    """

    shapes: dict[str, Shape]
    names: dict[str, str | None]
    moved: dict[str, Moved]
    anew: frozenset[str]
    paths: frozenset[str]
    floating: frozenset[str]
    lists: frozenset[str] = frozenset()

    @property
    def kept(self) -> set[str]:
        """The leaves of the parameters that the state has."""
        return {new for new in self.names.values() if new is not None} & self.paths

    @property
    def replaced(self) -> set[str]:
        """The old leaves whose path another leaf has now, by ``rename``."""
        return {old for old, new in self.names.items() if new is None}

    def begins_anew(self, entry: Entry) -> bool:
        """Whether an entry of the new state takes nothing from the old one."""
        return entry.leaf in self.anew or entry.address in self.lists

    def with_lists_of_arrays(self, fresh: Sequence[Entry], tx: Any, params: PyTree) -> "LeavesBefore":
        """With :attr:`lists`; a ``ValueError`` for an array about several leaves of which some change."""
        paths = {*self.anew, *self.moved}
        others = [entry for entry in fresh if entry.leaf is None and entry.arrays and entry.address is not None]
        lists = {
            str(entry.address)
            for entry in others
            if self.names.get(str(self._leaf_of_list(str(entry.address)))) in paths
        }
        nodes: list[Any] = []
        if paths and not self.anew >= self.floating:
            resize = {path: Resized(1, self.moved[path].axis if path in self.moved else 0, False) for path in paths}
            with contextlib.suppress(Exception):  # an optimizer or a spec may refuse any number of rows
                nodes = jax.tree.leaves(init_shapes(tx, params, resize).state)
        longer = iter(nodes)
        for entry in fresh if nodes else ():
            shapes = [next(longer).shape for _ in entry.arrays]
            is_other = entry.leaf is None and entry.address is not None and entry.address not in lists
            if is_other and shapes != [np.shape(array) for array in entry.arrays]:
                raise value_error(
                    "an array of the state contains several leaves",
                    at=entry.name,
                    got=f"changes of {sorted(paths)[0]}",
                    expected="an optimizer with an array for each leaf",
                    fix="create a new state: tx.init(params)",
                )
        return dataclasses.replace(self, lists=frozenset(lists))

    def entry(self, entry: Entry) -> Entry:
        """An entry of the old state at the path of its leaf in the parameters."""
        (names, trains), renamed = entry.scope, lambda path: self.names.get(path, path)
        if trains is not None:
            trains = frozenset(new for path in trains if (new := renamed(path)) is not None and new not in self.anew)
        names = tuple(renamed(name) or name for name in names)
        entry = entry._replace(scope=Scope(names, trains))
        path = self._leaf_of_list(str(entry.address)) if entry.leaf is None else entry.leaf
        new = None if path is None else renamed(path)
        if new is not None and new != path:
            tree, _, number = f"{entry.address}/".rpartition(f"{path}/")
            address = join(tree.rstrip("/"), new, number.rstrip("/"))
            entry = entry._replace(address=address, leaf=None if entry.leaf is None else new)
        return entry if entry.leaf is None else entry._replace(moved=self.moved.get(entry.leaf))

    def _leaf_of_list(self, address: str) -> str | None:
        """The old leaf for which an optimizer has a list of arrays, of which this is one."""
        above, _, number = address.rpartition("/")
        return next((path for path in self.names if number.isdigit() and f"/{above}".endswith(f"/{path}")), None)


def leaves_before(
    state: PyTree, fresh: Sequence[Entry], tx: Any, params: PyTree, *, rename: Any, rows: Any, reset: Any
) -> LeavesBefore:
    """Compares the leaves of a state with those of the parameters; ``fresh`` are the entries of a new state."""
    leaves = {leaf.path: leaf for leaf in _tree.leaves(params)}
    shapes = shapes_before(state, fresh)
    names: dict[str, str | None] = dict(zip(shapes, renamed([*shapes], rename, [*leaves], of="state"), strict=True))
    given = {new for old, new in names.items() if old != new}
    names = {old: None if old == new and new in given else new for old, new in names.items()}
    names = {old: new if new in leaves or new == old else None for old, new in names.items()}
    before = {str(new): shapes[old] for old, new in names.items() if new in leaves}
    if any(shape is None for shape in before.values()):
        old = entries_of(state, {path: leaf.shape for path, leaf in leaves.items()} | shapes)
        before |= searched(names, before, old, fresh, tx, params)
        shapes |= {path: before[str(new)] for path, new in names.items() if new in before}
    whole, rows_anew = _resets(reset, params)
    moved = _given_rows(rows, leaves, before)
    floating = frozenset(path for path, leaf in leaves.items() if leaf.inexact)
    anew = whole | {path for path in rows_anew if path not in before}
    for path, was in before.items():
        now = leaves[path].shape
        if path in moved or path in anew or was is None or now is None or was == now:
            continue
        axes = [i for i, pair in enumerate(zip(now, was, strict=False)) if pair[0] != pair[1]]
        if len(now) == len(was) and len(axes) == 1 and now[axes[0]] > was[axes[0]]:
            numbers = np.arange(now[axes[0]])
            moved[path] = Moved(axes[0], np.where(numbers < was[axes[0]], numbers, -1), was[axes[0]])
        else:
            anew.add(path)
    for path, index in rows_anew.items():
        if path not in anew:
            moved[path] = _with_reset(moved.get(path), index, path)
    return LeavesBefore(shapes, names, moved, frozenset(anew), frozenset(leaves), floating)


def _resets(reset: Any, params: PyTree) -> tuple[set[str], dict[str, RowIndex]]:
    """The leaves that begin anew, and the rows of others, which are the frozen ones of a spec."""
    if reset is None:
        return set(), {}
    plan = make_plan(params, reset)
    pairs = [*plan.entries()]
    for leaf, selection in pairs:
        if selection not in (FROZEN, TRAINABLE) and not isinstance(selection, RowIndex):
            raise value_error(
                "reset takes leaves and static rows",
                at=leaf.path,
                got="elements, or rows of a JAX array",
                expected="a spec of leaves and of fz.rows with a list, a slice or a NumPy array",
                fix="fz.rows([0, 1]), or the whole leaf",
            )
    whole = {leaf.path for leaf, selection in pairs if selection is FROZEN and leaf.inexact}
    return whole, {leaf.path: selection for leaf, selection in pairs if isinstance(selection, RowIndex)}


def _with_reset(moved: Moved | None, index: RowIndex, path: str) -> Moved:
    if moved is None:
        moved = Moved(index.axis, np.arange(index.size), index.size)
    if moved.axis != index.axis:
        raise value_error(
            "reset names rows along another axis than that of the rows that moved",
            at=path,
            got=f"rows along axis {index.axis} and along axis {moved.axis}",
            expected="rows along one axis",
            fix="migrate twice: without reset, then with reset alone",
        )
    return moved._replace(rows=np.where(np.isin(np.arange(index.size), index.numbers), moved.rows, -1))


def _given_rows(rows: Any, leaves: Mapping[str, Leaf], before: Mapping[str, Shape]) -> dict[str, Moved]:
    """The rows that a user gives for leaves, along axis 0."""
    if rows is None:
        return {}
    fix = 'rows={"gaussians/**": np.flatnonzero(keep)}'
    refuse_no_mapping("rows", rows, "{path or pattern: numbers of old rows}", at="rows", fix=fix)
    selectors = [as_selector(key, "rows") for key in rows]
    keys, found = [*rows], {}
    for n, leaf in zip(first_match(selectors, [*leaves.values()]), leaves.values(), strict=True):
        if n is not None and leaf.inexact:
            if before and leaf.path not in before:
                got, fix = "a leaf that is not in the state", "leave it out: a new leaf begins as in tx.init(params)"
                raise _bad_rows(leaf.path, got, "a leaf that the state has, or rename=", fix)
            found[leaf.path] = _moved(leaf, before.get(leaf.path), rows[keys[n]], holds_leaves=bool(before))
    return found


def _moved(leaf: Leaf, was: Shape, given: Any, holds_leaves: bool) -> Moved:
    """The old row of each row of a leaf; a state that holds nothing of any leaf does not say how many there were."""
    if isinstance(given, Tracer):
        what, got, fix = "rows takes numbers with values", described(given), "call fz.migrate outside of jit"
        raise type_error(what, at=leaf.path, got=got, expected="a list or an array of ints or bools", fix=fix)
    numbers, now = np.asarray(given), leaf.shape or ()
    if numbers.size == 0:
        numbers = numbers.astype(int)
    if numbers.ndim != 1 or not (np.issubdtype(numbers.dtype, np.integer) or numbers.dtype == np.bool_):
        what, got = "rows takes a vector of ints or bools", described(numbers)
        expected, fix = "the old row of each row", "rows={pattern: [0, 2, 2]}"
        raise type_error(what, at=leaf.path, got=got, expected=expected, fix=fix)
    fix = "give the old row of each row along axis 0, or a bool for each old row"
    if not holds_leaves:
        was = (len(numbers) if numbers.dtype == np.bool_ else int(numbers.max(initial=-1)) + 1, *now[1:])
    if was is None or not now or not was:
        got, expected = "a leaf whose old rows are not known", "a leaf with rows, of a state with moments"
        raise _bad_rows(leaf.path, got, expected, fix)
    if numbers.dtype == np.bool_:
        if len(numbers) != was[0]:
            raise _bad_rows(leaf.path, counted(len(numbers), "bool", "bools"), f"{was[0]}, one for each old row", fix)
        numbers = np.flatnonzero(numbers)
    if was[1:] != now[1:]:
        raise _bad_rows(leaf.path, f"rows of shape {was[1:]} before, {now[1:]} now", "rows of one shape", fix)
    if len(numbers) != now[0]:
        raise _bad_rows(leaf.path, counted(len(numbers), "row", "rows"), f"{now[0]}, as the leaf has now", fix)
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < was[0]:
        got = f"row {numbers.min() if numbers.min() < 0 else numbers.max()}"
        expected = f"numbers from 0 to {was[0] - 1}: there were {was[0]} rows" if holds_leaves else "numbers from 0"
        raise _bad_rows(leaf.path, got, expected, fix)
    return Moved(0, numbers.astype(np.int64), was[0])


def _bad_rows(path: str, got: str, expected: str, fix: str) -> ValueError:
    return value_error("rows that do not fit", at=path, got=got, expected=expected, fix=fix)


def refuse_ambiguous(before: LeavesBefore, old: Sequence[Entry], fresh: Sequence[Entry]) -> None:
    known = {None, *before.kept, *before.anew}
    new = {entry.leaf: entry.shape for entry in fresh if entry.arrays and entry.leaf not in known}
    gone = [path for path, target in before.names.items() if target is not None and target not in before.paths]
    held = {entry.leaf for entry in old if entry.arrays}
    for path in gone:
        for other, shape in new.items():
            if path in held and before.shapes[path] == shape:
                raise value_error(
                    "a leaf is gone, and a new one has its shape",
                    at=path,
                    got=f"{path}, only in the state, and {other}, only in the parameters: shape {shape}",
                    expected="a call that says whether this is the same leaf",
                    fix=f"rename={{{path!r}: {other!r}}} if it is, else reset=[{other!r}]",
                )
