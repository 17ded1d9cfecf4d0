"""What stands in a checkpoint beside its arrays: which leaves there were, what of each was frozen, and its fingerprint.

It is written as JSON, which a person can read, and compared with the parameters, the spec and the optimizer's state
that a checkpoint is to be restored to. Orbax by itself compares shapes, and not always. A file can be damaged, or
edited by hand: :func:`read_record` checks every field once, so that nothing below has to.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from optax_freeze._errors import counted, described, in_one_line, is_array, is_int, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.masks import Rows, Slice, elements
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import DenseMask, RowIndex, Selection
from optax_freeze._spec.selector_algebra import Choice, Choices, ResolvedSpec
from optax_freeze._spec.tree import Leaf, Part, PyTree, bare
from optax_freeze._verify.bits import LANES

FORMAT = 1
"""The number of the form of a record: greater where an older release would misread it."""


def leaf_record(leaf: Leaf, selection: Selection) -> dict[str, Any]:
    """A leaf of the parameters, and what of it is frozen."""
    return {**_shape_of(leaf.path, leaf.shape, leaf.dtype), "frozen": _selection_record(selection)}


def state_record(opt_state: PyTree) -> list[dict[str, Any]]:
    """The arrays of an optimizer's state, and which rows each has."""
    records = []
    for path, node in zip(_tree.paths(opt_state), _tree.flatten(opt_state)[0], strict=True):
        array = bare(node)
        if not _tree.is_hole(array):
            part = _selection_record(node.index) if isinstance(node, Part) else None
            records.append({**_shape_of(path, np.shape(array), jax.numpy.result_type(array)), "part": part})
    return records


def is_dense(record: Mapping[str, Any]) -> bool:
    """Whether a leaf has a dense mask, which stands among the arrays."""
    return isinstance(record["frozen"], dict) and "compact" in record["frozen"]


def spec_of_record(records: Sequence[Mapping[str, Any]], masks: Sequence[Any]) -> ResolvedSpec:
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
    return ResolvedSpec(tuple(record["path"] for record in records), Choices(choices))


@contextlib.contextmanager
def reading(step: str, item: str) -> Iterator[None]:
    """A ``ValueError`` for whatever Orbax raises while it reads one item of a checkpoint."""
    try:
        yield
    except Exception as error:
        raise value_error(
            "the checkpoint cannot be read",
            at=step,
            got=f"{type(error).__name__} at {item}: {in_one_line(error)[:300]}",
            expected="all that checkpoint.save wrote",
            fix="it is damaged, or was written by something else: restore another step",
        ) from error


def read_record(step: str) -> Mapping[str, Any]:
    """The record of a checkpoint, each field of which is one that :func:`optax_freeze.checkpoint.save` could write.

    Args:
      step: the directory of the checkpoint.

    Raises:
      ValueError: if there is no such file, or it is not JSON; if a field is missing or wrong, with its name; if a newer
        release wrote it.
    """
    with reading(step, "spec"), ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        record: Any = checkpointer.restore(epath.Path(step) / "spec")
    try:
        _check_fields("", record, "format")
        _check(_is_int(record["format"], 1), "format", record["format"], "a number, 1 or more")
        if record["format"] <= FORMAT:
            _check_record(record)
            return record
    except _Fault as fault:
        field, got, expected = fault.args
        raise value_error(
            "the record of the checkpoint is damaged",
            at=f"{step}/spec: {field or 'the whole file'}",
            got=got,
            expected=expected,
            fix="restore another step, or this file from a copy",
        ) from None
    raise value_error(
        "the checkpoint is of a newer optax_freeze",
        at=step,
        got=f"format {record['format']}",
        expected=f"format {FORMAT} or older",
        fix="install a newer optax_freeze: pip install --upgrade optax_freeze",
    )


class _Fault(Exception):  # noqa: N818
    """A field that is wrong, what it holds, and what it should hold."""


def _check(ok: bool, field: str, got: Any, expected: str) -> None:
    if not ok:
        raise _Fault(field, described(got), expected)


def _check_fields(at: str, record: Any, *names: str) -> None:
    _check(isinstance(record, dict), at, record, "a JSON object")
    for name in names:
        if name not in record:
            raise _Fault(f"{at}.{name}".lstrip("."), "nothing", "a value")


def _check_record(record: Mapping[str, Any]) -> None:
    _check_fields("", record, "leaves", "opt_state", "frozen")
    leaves, opt_state, digests = record["leaves"], record["opt_state"], record["frozen"]
    _check(isinstance(leaves, list), "leaves", leaves, "a list of leaves")
    for i, leaf in enumerate(leaves):
        _check_leaf(f"leaves[{i}]", leaf)
    paths = [leaf["path"] for leaf in leaves]
    _check(len(set(paths)) == len(paths), "leaves", paths, "a path of its own for each leaf")
    _check(isinstance(opt_state, list | None), "opt_state", opt_state, "a list of arrays, or null")
    for i, array in enumerate(opt_state or []):
        _check_array(f"opt_state[{i}]", array, "part")
        part = array["part"]
        if isinstance(part, dict):
            _check_rows(f"opt_state[{i}].part", part, None)
        else:
            _check(part is None or _is_int(part), f"opt_state[{i}].part", part, "rows, a number of elements, or null")
    frozen = sorted(leaf["path"] for leaf in leaves if leaf["frozen"] is not False and leaf["dtype"] != _FLOAT0)
    _check_fields("frozen", digests)
    _check(sorted(digests) == frozen, "frozen", sorted(digests), f"those of the frozen leaves: {described(frozen)}")
    for path, lanes in digests.items():
        is_digest = _are_ints(lanes, 0, 2**32 - 1) and len(lanes) == LANES
        _check(is_digest, f"frozen[{path!r}]", lanes, f"{LANES} numbers of 32 bits")


def _check_leaf(at: str, leaf: Any) -> None:
    _check_array(at, leaf, "frozen")
    frozen, shape = leaf["frozen"], leaf["shape"]
    if isinstance(frozen, bool):
        return
    divisible = isinstance(frozen, dict) and shape is not None and not leaf["dtype"].startswith("key<")
    _check(divisible, f"{at}.frozen", frozen, "true, false, or, of an array of numbers, which part")
    if "compact" not in frozen:
        _check_rows(f"{at}.frozen", frozen, shape)
        return
    compact, most = frozen["compact"], math.prod(shape or ())
    _check(isinstance(compact, bool), f"{at}.frozen.compact", compact, "true or false")
    _check_fields(f"{at}.frozen", frozen, "count")
    is_count = _is_int(frozen["count"], 1, most) if compact else frozen["count"] is None
    _check(is_count, f"{at}.frozen.count", frozen["count"], f"a number from 1 to {most}" if compact else "null")


def _check_array(at: str, array: Any, *names: str) -> None:
    _check_fields(at, array, "path", "shape", "dtype", *names)
    path, shape, dtype = (array[name] for name in ("path", "shape", "dtype"))
    _check(isinstance(path, str), f"{at}.path", path, "a text")
    if "frozen" in names and shape is None:
        _check(dtype is None, f"{at}.dtype", dtype, "null, since the shape is")
    else:
        _check(_are_ints(shape), f"{at}.shape", shape, "a list of sizes")
        _check(_is_dtype(dtype), f"{at}.dtype", dtype, "the name of a dtype")


def _check_rows(at: str, rows: Mapping[str, Any], shape: Sequence[int] | None) -> None:
    """Of rows, within a shape where it is known."""
    _check_fields(at, rows, "axis", "rows", "train")
    axis, runs = rows["axis"], rows["rows"]
    _check(_is_int(axis, 0, math.inf if shape is None else len(shape) - 1), f"{at}.axis", axis, "an axis of the leaf")
    _check(isinstance(rows["train"], bool), f"{at}.train", rows["train"], "true or false")
    size = math.inf if shape is None else shape[axis]
    ascending = isinstance(runs, list) and bool(runs) and all(_is_run(run, size) for run in runs)
    ascending = ascending and all(before[1] <= after[0] for before, after in itertools.pairwise(runs))
    _check(ascending, f"{at}.rows", runs, "ascending [start, stop, step], within the leaf")


def _is_run(run: Any, size: float) -> bool:
    return _are_ints(run, 0, size) and len(run) == 3 and run[0] < run[1] and run[2] > 0


def _are_ints(values: Any, least: int = 0, most: float = math.inf) -> bool:
    return isinstance(values, list) and all(_is_int(value, least, most) for value in values)


def _is_int(value: Any, least: int = 0, most: float = math.inf) -> bool:
    return is_int(value) and least <= value <= most


_FLOAT0 = str(jax.dtypes.float0)


def _is_dtype(name: Any) -> bool:
    if not isinstance(name, str) or name == _FLOAT0 or name.startswith("key<"):
        return isinstance(name, str)
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError, DeprecationWarning):
        return False
    return str(dtype) == name and is_array(jax.ShapeDtypeStruct((), dtype))


def refuse_other_leaves(records: Sequence[Mapping[str, Any]], params: PyTree) -> None:
    """A ``ValueError`` for parameters of another model."""
    leaves = _tree.leaves(params)
    fix = "give the full parameters of the model that was saved"
    _tree.refuse_other_paths([leaf.path for leaf in leaves], [record["path"] for record in records], "params", fix)
    for leaf, record in zip(leaves, records, strict=True):
        got = _shape_of(leaf.path, leaf.shape, leaf.dtype)
        if any(got[name] != record[name] for name in got):
            raise value_error(
                "params: another leaf than in the checkpoint",
                at=leaf.path,
                got=f"{got['dtype']} of shape {got['shape']}",
                expected=f"{record['dtype']} of shape {record['shape']}",
                fix=fix,
            )


def refuse_other_spec(saved: Plan, given: Plan) -> None:
    """A ``ValueError`` for another plan than the one that was saved."""
    for leaf, was, now in zip(saved.leaves, saved.selections, given.selections, strict=True):
        if was != now or not all(map(jax.numpy.array_equal, jax.tree.leaves(was), jax.tree.leaves(now))):
            raise value_error(
                "another spec than that of the checkpoint",
                at=leaf.path,
                got=f"one by which the leaf {now}",
                expected=f"one by which it {was}, as it was saved",
                fix="restore with the spec that was saved, or None; then fz.migrate(opt_state, tx, params)",
            )


def refuse_other_base(saved: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    """A ``ValueError`` for frozen leaves with other fingerprints."""
    differ = [path for path, digest in got.items() if np.asarray(digest).tolist() != saved[path]]
    if differ:
        raise value_error(
            "another base: its frozen bits differ from those of the checkpoint",
            at=", ".join(path or "(the root)" for path in differ[:3]),
            got=f"{counted(len(differ), 'leaf', 'leaves')} of {len(saved)} with another fingerprint",
            expected="the parameters that the run began with",
            fix="load the same base; if the frozen part moved in the run, fz.audit(tx, params, frozen) says why",
        )


def refuse_other_state(saved: Sequence[Mapping[str, Any]] | None, template: PyTree, at: str) -> None:
    """A ``ValueError`` for the state of another optimizer or spec."""
    if saved is None:
        raise value_error(
            "no optimizer state in the checkpoint",
            at=at,
            got="a template of one",
            expected="opt_state=None, since none was given to checkpoint.save",
            fix="begin with a new state: tx.init(params)",
        )
    fix = "give the state of the optimizer and the spec that were saved; then fz.migrate(opt_state, tx, params)"
    got = state_record(template)
    _tree.refuse_other_paths([new["path"] for new in got], [old["path"] for old in saved], "opt_state", fix)
    for new, old in zip(got, saved, strict=True):
        if new != old:
            raise value_error(
                "opt_state: another array than in the checkpoint",
                at=str(new["path"]),
                got=f"{new['dtype']} of shape {new['shape']}" + f", rows {new['part']}" * bool(new["part"]),
                expected=f"{old['dtype']} of shape {old['shape']}" + f", rows {old['part']}" * bool(old["part"]),
                fix=fix,
            )


def _shape_of(path: str, shape: tuple[int, ...] | None, dtype: Any) -> dict[str, Any]:
    if shape is None:
        return {"path": path, "shape": None, "dtype": None}
    return {"path": path, "shape": list(shape), "dtype": str(dtype)}


def _selection_record(selection: Any) -> Any:
    if isinstance(selection, RowIndex):
        picked = [list(progression) for progression in selection.picked]
        return {"axis": selection.axis, "rows": picked, "train": selection.picked_train}
    if isinstance(selection, DenseMask):
        return {"compact": selection.compact, "count": selection.count}
    return selection.as_spec() if isinstance(selection, Selection) else selection
