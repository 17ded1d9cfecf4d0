"""The record of a checkpoint: its base, the arrays of its optimizer state, and a fingerprint of each saved array.

It is compared with the parameters, the spec and the optimizer state given to ``restore``, since Orbax compares only
shapes, and not always; and with the arrays that Orbax reads, for which it has no checksums.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from optax_freeze._errors import counted, in_one_line, is_int, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.masks import choice_of, elements
from optax_freeze._spec.selection import DenseMask, DynamicRowIndex, Selection
from optax_freeze._spec.selection_record import record_of
from optax_freeze._spec.selector_algebra import Choice, Choices, ResolvedSpec
from optax_freeze._spec.tree import Part, PyTree
from optax_freeze._state.entries import entries_of
from optax_freeze._state.own_states import states_in
from optax_freeze._verify import base_record
from optax_freeze._verify.fingerprint import array_digest, as_texts


@dataclasses.dataclass(frozen=True)
class StateRecord:
    """An array of an optimizer state, and the part of a leaf that it holds, as JSON: rows, or a number of elements."""

    path: str
    struct: Any
    part: Any

    def as_json(self) -> dict[str, Any]:
        return {"path": self.path, **base_record.struct_as_json(self.struct), "part": self.part}


@dataclasses.dataclass(frozen=True)
class ArrayRecord:
    """An array that was written: its dtype, and the fingerprint of all of it."""

    dtype: Any
    fingerprint: str

    def as_json(self) -> dict[str, Any]:
        return {"dtype": str(self.dtype), "fingerprint": self.fingerprint}


Written: TypeAlias = Mapping[str, Mapping[str, ArrayRecord]]
"""The arrays of each item of a checkpoint, by the numbers of their nodes."""


@dataclasses.dataclass(frozen=True)
class Record:
    leaves: Sequence[base_record.LeafRecord]
    opt_state: Sequence[StateRecord] | None
    written: Written

    def as_json(self) -> dict[str, Any]:
        leaves, state = ([x.as_json() for x in each or ()] for each in (self.leaves, self.opt_state))
        state = None if self.opt_state is None else state
        written = {item: {n: x.as_json() for n, x in arrays.items()} for item, arrays in self.written.items()}
        return {"format": base_record.FORMAT, "leaves": leaves, "opt_state": state, "written": written}


def array_records(arrays: Mapping[str, Any]) -> dict[str, ArrayRecord]:
    found = as_texts({number: array_digest(number, array) for number, array in arrays.items()})
    return {number: ArrayRecord(arrays[number].dtype, text) for number, text in found.items()}


def target(struct: Any, written: ArrayRecord) -> Any:
    """What Orbax reads an array as: with the dtype in which it was written, in NumPy if JAX would truncate it.

    Without a sharding, also in NumPy: Orbax commits the arrays of JAX to their devices.
    """
    if struct.sharding is None or jax.dtypes.canonicalize_dtype(written.dtype) != written.dtype:
        return np.empty(struct.shape, written.dtype)
    return jax.ShapeDtypeStruct(struct.shape, written.dtype, sharding=struct.sharding)


def refuse_other_bits(
    saved: Mapping[str, ArrayRecord], arrays: Mapping[str, Any], paths: Sequence[str], at: str
) -> None:
    """Raises a ``ValueError`` if arrays differ from those that were written."""
    now = array_records(arrays)
    if differ := [paths[int(number)] for number in arrays if now[number] != saved[number]]:
        raise value_error(
            "the checkpoint is damaged",
            at=f"{at}: {', '.join(path or '(the root)' for path in differ[:3])}",
            got=f"{len(differ)} of {counted(len(arrays), 'array', 'arrays')} with a different fingerprint",
            expected="the bits that checkpoint.save wrote",
            fix="restore another step, or restore the files of this one from a copy",
        )


def _is_leaf_of_state(node: Any) -> bool:
    """Of a part with several arrays each is a leaf: SM3 has one for each axis."""
    return _tree.is_leaf(node) and not (isinstance(node, Part) and len(jax.tree.leaves(node)) > 1)


def flatten_state(opt_state: PyTree) -> tuple[list[Any], Any]:
    """The leaves of a state, of which each has one array or none."""
    return _tree.flatten(opt_state, _is_leaf_of_state)


def paths_of_state(opt_state: PyTree) -> list[str]:
    """The paths of the leaves of a state."""
    return _tree.paths(opt_state, _is_leaf_of_state)


def state_records(opt_state: PyTree) -> list[StateRecord]:
    shapes = {leaf.path: leaf.shape for state in states_in(opt_state) for leaf in state.plan.leaves}
    nodes = [entry.value for entry in entries_of(opt_state, shapes) for _ in entry.arrays]
    pairs = zip(paths_of_state(opt_state), flatten_state(opt_state)[0], strict=True)
    own = [(path, _tree.bare(node)) for path, node in pairs if jax.tree.leaves(node)]
    records = []
    for (path, array), node in zip(own, nodes, strict=True):
        index = node.index if isinstance(node, Part) else None
        part = record_of(index) if isinstance(index, Selection) else index
        records.append(StateRecord(path, jax.ShapeDtypeStruct(np.shape(array), jax.numpy.result_type(array)), part))
    return records


def mask_struct(leaf: base_record.LeafRecord) -> Any:
    """The shape of the mask or row numbers of a leaf, which are stored with the arrays, or ``MaskedNode``."""
    if isinstance(leaf.selection, DenseMask):
        assert leaf.struct is not None
        return jax.ShapeDtypeStruct(leaf.struct.shape, bool)
    if isinstance(leaf.selection, DynamicRowIndex):
        return jax.ShapeDtypeStruct((leaf.selection.count,), jax.numpy.int32)
    return _tree.MASKED_NODE


def spec_of(leaves: Sequence[base_record.LeafRecord], masks: Sequence[Any]) -> ResolvedSpec:
    """The spec that was saved. ``masks`` has the mask or row numbers of each leaf, or ``MaskedNode``."""

    def choice(selection: Selection, mask: Any) -> Choice:
        if isinstance(selection, DenseMask):
            return elements(mask, compact=selection.compact)
        return choice_of(selection.with_array(mask))

    choices = (choice(leaf.selection, mask) for leaf, mask in zip(leaves, masks, strict=True))
    return ResolvedSpec(tuple(leaf.path for leaf in leaves), Choices(choices))


@contextlib.contextmanager
def reading(step: str, item: str) -> Iterator[None]:
    """Converts any error of Orbax while it reads one item of a checkpoint to a ``ValueError``."""
    try:
        yield
    except Exception as error:
        got = f"{type(error).__name__} at {item}: {in_one_line(error)[:300]}"
        expected = "everything that checkpoint.save wrote"
        fix = "the checkpoint is damaged or was not written by checkpoint.save; restore another step"
        raise value_error("the checkpoint cannot be read", at=step, got=got, expected=expected, fix=fix) from error


def read_record(step: str) -> Record:
    """Reads the record of a checkpoint. A ``ValueError`` names a field that is missing or invalid."""

    with reading(step, "spec"), ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        record = base_record.Field(checkpointer.restore(epath.Path(step) / "spec"), functools.partial(damaged, step))
    base_record.refuse_newer(record, step, "the checkpoint was")
    leaves, state = base_record.leaves_of_json(record["leaves"]), record["opt_state"]
    items = {item: arrays.entries() for item, arrays in record["written"].entries().items()}
    written = {
        item: {
            number: ArrayRecord(array["dtype"].dtype(), array["fingerprint"].fingerprint())
            for number, array in arrays.items()
        }
        for item, arrays in items.items()
    }
    return Record(leaves, None if state.value is None else [_state_of_json(x) for x in state.items("arrays")], written)


def damaged(step: str, field: str, got: str, expected: str) -> ValueError:
    what, fix = "the record of the checkpoint is damaged", "restore another step, or restore this file from a copy"
    return value_error(what, at=f"{step}/spec: {field}", got=got, expected=expected, fix=fix)


def _state_of_json(array: base_record.Field) -> StateRecord:
    part = array["part"].checked(
        "rows, a number of elements, or null",
        lambda part: part is None or isinstance(part, dict) or (is_int(part) and part >= 0),
    )
    return StateRecord(array["path"].text(), array.struct(), part)


def refuse_other_state(saved: Sequence[StateRecord] | None, template: PyTree, at: str) -> None:
    if saved is None:
        got = "a template of an optimizer state"
        expected = "opt_state=None, since no state was given to checkpoint.save"
        fix = "create a new state: tx.init(params)"
        raise value_error("no optimizer state in the checkpoint", at=at, got=got, expected=expected, fix=fix)
    fix = "give the state of the optimizer and the spec that were saved; then fz.migrate(opt_state, tx, params)"
    base_record.refuse_other_arrays(saved, state_records(template), "opt_state", "the checkpoint", fix)
