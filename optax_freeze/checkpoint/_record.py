"""The record of a checkpoint: its base, the arrays of its optimizer state, and a fingerprint of each saved array.

It is compared with the parameters, the spec and the optimizer state given to ``restore``, since Orbax compares only
shapes, and not always; and with the arrays that Orbax reads, for which it has no checksums.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from optax_freeze._errors import counted, in_one_line, is_concrete, is_int, message, value_error
from optax_freeze._optimizer.group_plans import GroupPlans
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.element_masks import elements
from optax_freeze._spec.masks import choice_of
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.plan_digest import digest_of, record_of, refuse_other_plan
from optax_freeze._spec.resolve import FreezeWarning
from optax_freeze._spec.selection import DenseMask, DynamicRowIndex, Selection
from optax_freeze._spec.selector_algebra import Choice, Choices, ResolvedSpec
from optax_freeze._spec.tree import Part, PyTree
from optax_freeze._state.own_states import masks_in, outermost_states
from optax_freeze._verify import saved_base
from optax_freeze._verify.fingerprint import array_digest, as_texts


@dataclasses.dataclass(frozen=True)
class StateRecord:
    """An array of an optimizer state, and the part of a leaf that it holds, as JSON: rows, or a number of elements."""

    path: str
    struct: Any
    part: Any

    def as_json(self) -> dict[str, Any]:
        return {"path": self.path, **saved_base.struct_as_json(self.struct), "part": self.part}


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
    leaves: Sequence[saved_base.LeafRecord]
    opt_state: Sequence[StateRecord] | None
    plans: Sequence[bytes]  # the digests of those in the state
    written: Written

    def as_json(self) -> dict[str, Any]:
        leaves = [leaf.as_json() for leaf in self.leaves]
        state = None if self.opt_state is None else [array.as_json() for array in self.opt_state]
        written = {item: {n: x.as_json() for n, x in arrays.items()} for item, arrays in self.written.items()}
        plans = [digest.hex() for digest in self.plans]
        return {"format": saved_base.FORMAT, "leaves": leaves, "opt_state": state, "plans": plans, "written": written}


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
    return _tree.paths(opt_state, _is_leaf_of_state)


def state_records(opt_state: PyTree) -> list[StateRecord]:
    records = []
    for path, node in zip(paths_of_state(opt_state), flatten_state(opt_state)[0], strict=True):
        array = _tree.bare(node)
        if not _tree.is_masked_node(array):
            index = node.index if isinstance(node, Part) else None
            part = record_of(index) if isinstance(index, Selection) else index
            records.append(StateRecord(path, jax.ShapeDtypeStruct(np.shape(array), jnp.result_type(array)), part))
    return records


def digests_of(opt_state: PyTree) -> list[bytes]:
    return [digest_of(plan).tobytes() for plan in _plans_of(opt_state)]


def _plans_of(opt_state: PyTree) -> list[Any]:
    return [plan for _, plan in outermost_states(opt_state, (Plan, GroupPlans))]


def mask_struct(leaf: saved_base.LeafRecord) -> Any:
    """The shape of the mask or row numbers of a leaf, which are stored with the arrays, or ``MaskedNode``."""
    if isinstance(leaf.selection, DenseMask):
        assert leaf.struct is not None
        return jax.ShapeDtypeStruct(leaf.struct.shape, bool)
    if isinstance(leaf.selection, DynamicRowIndex):
        return jax.ShapeDtypeStruct((leaf.selection.count,), jnp.int32)
    return _tree.MASKED_NODE


def spec_of(leaves: Sequence[saved_base.LeafRecord], masks: Sequence[Any]) -> ResolvedSpec:
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
        record = saved_base.Field(checkpointer.restore(epath.Path(step) / "spec"), functools.partial(damaged, step))
    saved_base.refuse_newer(record, step, "the checkpoint was")
    leaves, state = saved_base.leaves_of_json(record["leaves"]), record["opt_state"]
    written = {
        item: {
            number: ArrayRecord(array["dtype"].dtype(), array["fingerprint"].fingerprint())
            for number, array in arrays.entries().items()
        }
        for item, arrays in record["written"].entries().items()
    }
    plans = [digest.digits() for digest in record["plans"].items("digests")]
    state = None if state.value is None else [_state_of_json(x) for x in state.items("arrays")]
    return Record(leaves, state, plans, written)


def damaged(step: str, field: str, got: str, expected: str) -> ValueError:
    what, fix = "the record of the checkpoint is damaged", "restore another step, or restore this file from a copy"
    return value_error(what, at=f"{step}/spec: {field}", got=got, expected=expected, fix=fix)


def _state_of_json(array: saved_base.Field) -> StateRecord:
    part = array["part"].checked(
        "rows, a number of elements, or null",
        lambda part: part is None or isinstance(part, dict) or (is_int(part) and part >= 0),
    )
    return StateRecord(array["path"].text(), array.struct(), part)


def refuse_other_state(saved: Record, template: PyTree, at: str) -> None:
    if saved.opt_state is None:
        got = "a template of an optimizer state"
        expected = "opt_state=None, since no state was given to checkpoint.save"
        fix = "create a new state: tx.init(params)"
        raise value_error("no optimizer state in the checkpoint", at=at, got=got, expected=expected, fix=fix)
    fix = "give the state of the optimizer and the spec that were saved; then fz.migrate(opt_state, tx, params)"
    saved_base.refuse_other_arrays(saved.opt_state, state_records(template), "opt_state", "the checkpoint", fix)
    plans = _plans_of(template)
    for plan, digest in zip(plans, saved.plans, strict=False):
        refuse_other_plan(plan, np.frombuffer(digest, np.uint8), "opt_state: the state in the checkpoint", fix)
    if len(plans) != len(saved.plans):
        got, expected = (counted(len(each), "spec", "specs") for each in (plans, saved.plans))
        raise value_error("opt_state: not the state in the checkpoint", at=at, got=got, expected=expected, fix=fix)


def warn_of_other_masks(template: PyTree, state: PyTree) -> None:
    """A :class:`FreezeWarning` if masks or row numbers of a template differ from those of the state that was read."""
    pairs = zip(masks_in(template), masks_in(state), strict=True)
    differ = [path for (path, old), (_, new) in pairs if is_concrete(old) and not jnp.array_equal(old, new)]
    if differ:
        text = message(
            "the masks or rows in the checkpoint differ from those of `opt_state`",
            at=list(dict.fromkeys(differ))[:3],
            got=f"{counted(len(differ), 'mask', 'masks')} of the run that was saved, which the restored state has",
            expected="those of `opt_state`, unless fz.replace_masks changed them during the run",
            fix="to keep them, opt_state=jax.eval_shape(tx.init, params); for others, then fz.replace_masks",
        )
        warnings.warn(text, FreezeWarning, stacklevel=3)
