"""What stands in a checkpoint beside its arrays: which leaves there were, what of each was frozen, and its fingerprint.

It is written as JSON, which a person can read, and compared with the parameters, the spec and the optimizer's state
that a checkpoint is to be restored to. Orbax by itself compares shapes, and not always.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from optax_freeze import _tree
from optax_freeze._masks import Rows, Slice, elements
from optax_freeze._parts import Answer, Dense, RowIndex
from optax_freeze._resolve import Masks, Resolved
from optax_freeze._selector import Choice, Known
from optax_freeze._tree import Leaf, Part, PyTree, message

FORMAT = 1
"""The number of the form of a record: greater where an older release would misread it."""


def leaf_record(leaf: Leaf, answer: Answer) -> dict[str, Any]:
    """A leaf of the parameters, and what of it is frozen."""
    return {**_shape_of(leaf.path, leaf.shape, leaf.dtype), "frozen": _answer_record(answer)}


def state_record(opt_state: PyTree) -> list[dict[str, Any]]:
    """The arrays of an optimizer's state, and which rows each has."""
    records = []
    for path, node in zip(_tree.paths(opt_state), _tree.flatten(opt_state)[0], strict=True):
        array = bare(node)
        if not _tree.is_hole(array):
            part = _answer_record(node.index) if isinstance(node, Part) else None
            records.append({**_shape_of(path, np.shape(array), jax.numpy.result_type(array)), "part": part})
    return records


def is_dense(record: Mapping[str, Any]) -> bool:
    """Whether a leaf has a dense mask, which stands among the arrays."""
    return isinstance(record["frozen"], dict) and "compact" in record["frozen"]


def spec_of_record(records: Sequence[Mapping[str, Any]], masks: Sequence[Any]) -> Known:
    """What was frozen, as it was written."""

    def choice(frozen: Any, mask: Any) -> Choice:
        if isinstance(frozen, bool):
            return frozen
        if "compact" in frozen:
            return elements(mask, frozen["compact"])
        if len(frozen["rows"]) == 1:
            return Rows(Slice(*frozen["rows"][0]), frozen["axis"], frozen["train"])
        numbers = [n for progression in frozen["rows"] for n in range(*progression)]
        return Rows(tuple(numbers), frozen["axis"], frozen["train"])

    choices = (choice(record["frozen"], mask) for record, mask in zip(records, masks, strict=True))
    return Known(tuple(record["path"] for record in records), tuple(choices))


def refuse_newer_format(record: Mapping[str, Any], at: str) -> None:
    """A ``ValueError`` for the record of a release that writes another form."""
    if record["format"] > FORMAT:
        raise ValueError(
            message(
                "the checkpoint is of a newer optax_freeze",
                at=at,
                got=f"format {record['format']}",
                expected=f"format {FORMAT} or older",
                fix="install a newer optax_freeze: pip install --upgrade optax_freeze",
            )
        )


def refuse_other_leaves(records: Sequence[Mapping[str, Any]], params: PyTree) -> None:
    """A ``ValueError`` for parameters of another model."""
    leaves = _tree.leaves(params)
    fix = "give the full parameters of the model that was saved"
    _tree.refuse_other_paths([leaf.path for leaf in leaves], [record["path"] for record in records], "params", fix)
    for leaf, record in zip(leaves, records, strict=True):
        got = _shape_of(leaf.path, leaf.shape, leaf.dtype)
        if any(got[name] != record[name] for name in got):
            raise ValueError(
                message(
                    "params: another leaf than in the checkpoint",
                    at=leaf.path,
                    got=f"{got['dtype']} of shape {got['shape']}",
                    expected=f"{record['dtype']} of shape {record['shape']}",
                    fix=fix,
                )
            )


def refuse_other_spec(saved: tuple[Resolved, Masks], given: tuple[Resolved, Masks]) -> None:
    """A ``ValueError`` for a spec that resolves otherwise."""
    (spec, masks), (other, other_masks) = saved, given
    for leaf, was, now, old, new in zip(spec.leaves, spec.answers, other.answers, masks, other_masks, strict=True):
        if was != now or not (_tree.is_hole(old) or jax.numpy.array_equal(old, new)):
            raise ValueError(
                message(
                    "another spec than that of the checkpoint",
                    at=leaf.path,
                    got=_frozen_text(now),
                    expected=f"{_frozen_text(was)}, as it was saved",
                    fix="restore with the spec that was saved, or None; then fz.migrate(opt_state, tx, params)",
                )
            )


def refuse_other_base(saved: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    """A ``ValueError`` for frozen leaves with other fingerprints."""
    differ = [path for path, digest in got.items() if np.asarray(digest).tolist() != saved[path]]
    if differ:
        raise ValueError(
            message(
                "another base: its frozen bits differ from those of the checkpoint",
                at=", ".join(path or "(the root)" for path in differ[:3]),
                got=f"{_tree.counted(len(differ), 'leaf', 'leaves')} of {len(saved)} with another fingerprint",
                expected="the parameters that the run began with",
                fix="load the same base; if the frozen part moved in the run, fz.audit(tx, params, frozen) says why",
            )
        )


def refuse_other_state(saved: Sequence[Mapping[str, Any]] | None, template: PyTree, at: str) -> None:
    """A ``ValueError`` for the state of another optimizer or spec."""
    if saved is None:
        raise ValueError(
            message(
                "no optimizer state in the checkpoint",
                at=at,
                got="a template of one",
                expected="opt_state=None, since none was given to checkpoint.save",
                fix="begin with a new state: tx.init(params)",
            )
        )
    fix = "give the state of the optimizer and the spec that were saved; then fz.migrate(opt_state, tx, params)"
    got = state_record(template)
    _tree.refuse_other_paths([new["path"] for new in got], [old["path"] for old in saved], "opt_state", fix)
    for new, old in zip(got, saved, strict=True):
        if new != old:
            raise ValueError(
                message(
                    "opt_state: another array than in the checkpoint",
                    at=str(new["path"]),
                    got=f"{new['dtype']} of shape {new['shape']}" + f", rows {new['part']}" * bool(new["part"]),
                    expected=f"{old['dtype']} of shape {old['shape']}" + f", rows {old['part']}" * bool(old["part"]),
                    fix=fix,
                )
            )


def _shape_of(path: str, shape: tuple[int, ...] | None, dtype: Any) -> dict[str, Any]:
    if shape is None:
        return {"path": path, "shape": None, "dtype": None}
    return {"path": path, "shape": list(shape), "dtype": str(dtype)}


def _answer_record(answer: Any) -> Any:
    if isinstance(answer, RowIndex):
        picked = [list(progression) for progression in answer.picked]
        return {"axis": answer.axis, "rows": picked, "train": answer.picked_train}
    if isinstance(answer, Dense):
        return {"compact": answer.compact, "count": answer.count}
    return answer


def _frozen_text(answer: Answer) -> str:
    if isinstance(answer, bool):
        return "frozen" if answer else "trainable"
    return f"frozen by {answer.source}" if isinstance(answer, RowIndex) else "single elements frozen"


def bare(node: Any) -> Any:
    """The array of a ``Part``, or the array itself."""
    return node.values if isinstance(node, Part) else node
