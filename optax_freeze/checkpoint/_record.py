"""The record of a checkpoint: its leaves, the frozen part of each, and the fingerprints of the frozen parts.

The record is readable JSON. It is compared with the parameters, the spec and the optimizer state given to ``restore``,
since Orbax compares only shapes, and not always. The file may be damaged or edited by hand, so :func:`read_record`
checks every field against a schema, and other code can rely on it.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from optax_freeze._errors import counted, described, in_one_line, is_array, is_int, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.masks import elements
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.selection import DenseMask, DynamicRowIndex, Selection
from optax_freeze._spec.selection_record import are_ascending, record_of, selection_of
from optax_freeze._spec.selector_algebra import Choice, Choices, ResolvedSpec
from optax_freeze._spec.tree import Leaf, Part, PyTree
from optax_freeze._verify.bits import LANES

FORMAT = 1
"""The version of the record format. It is increased when older releases would misread a record."""


def leaf_record(leaf: Leaf, selection: Selection) -> dict[str, Any]:
    """The record of a leaf of the parameters, with its frozen part."""
    return {**_array_record(leaf.path, leaf.shape, leaf.dtype), "frozen": record_of(selection)}


def state_record(opt_state: PyTree) -> list[dict[str, Any]]:
    """The records of the arrays of an optimizer state, with the rows or elements of a leaf that each holds."""
    records = []
    for path, node in zip(_tree.paths(opt_state), _tree.flatten(opt_state)[0], strict=True):
        array = _tree.bare(node)
        if not _tree.is_hole(array):
            part = _part_record(node.index) if isinstance(node, Part) else None
            records.append({**_array_record(path, np.shape(array), jax.numpy.result_type(array)), "part": part})
    return records


def _part_record(index: Any) -> Any:
    """The record of the rows of a leaf; of single elements their number."""
    return record_of(index) if isinstance(index, Selection) else index


def _array_record(path: str, shape: tuple[int, ...] | None, dtype: Any) -> dict[str, Any]:
    if shape is None:
        return {"path": path, "shape": None, "dtype": None}
    return {"path": path, "shape": list(shape), "dtype": str(dtype)}


def mask_struct(record: Mapping[str, Any]) -> Any:
    """The shape of the mask or row numbers of a leaf, which are stored with the arrays; a hole if it has none."""
    selection = selection_of(record["frozen"], record["shape"])
    if isinstance(selection, DenseMask):
        return jax.ShapeDtypeStruct(record["shape"], bool)
    if isinstance(selection, DynamicRowIndex):
        return jax.ShapeDtypeStruct((selection.count,), jax.numpy.int32)
    return _tree.HOLE


def spec_of_record(records: Sequence[Mapping[str, Any]], masks: Sequence[Any]) -> ResolvedSpec:
    """The spec that was saved. ``masks`` has the mask or row numbers of each leaf, or a hole."""

    def choice(record: Mapping[str, Any], mask: Any) -> Choice:
        selection = selection_of(record["frozen"], record["shape"])
        return (
            elements(mask, selection.compact)
            if isinstance(selection, DenseMask)
            else selection.with_array(mask).as_spec()
        )

    choices = (choice(record, mask) for record, mask in zip(records, masks, strict=True))
    return ResolvedSpec(tuple(record["path"] for record in records), Choices(choices))


@contextlib.contextmanager
def reading(step: str, item: str) -> Iterator[None]:
    """Converts any error of Orbax while it reads one item of a checkpoint to a ``ValueError``."""
    try:
        yield
    except Exception as error:
        raise value_error(
            "the checkpoint cannot be read",
            at=step,
            got=f"{type(error).__name__} at {item}: {in_one_line(error)[:300]}",
            expected="everything that checkpoint.save wrote",
            fix="the checkpoint is damaged or was not written by checkpoint.save; restore another step",
        ) from error


def read_record(step: str) -> Mapping[str, Any]:
    """Reads the record of a checkpoint. A ``ValueError`` names a field that is missing or invalid."""
    with reading(step, "spec"), ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        record: Any = checkpointer.restore(epath.Path(step) / "spec")
    try:
        _check("", record, {"format": _RECORD["format"]})
        if record["format"] > FORMAT:
            raise value_error(
                "the checkpoint was written by a newer optax_freeze",
                at=step,
                got=f"format {record['format']}",
                expected=f"format {FORMAT} or older",
                fix="install the newest release: pip install --upgrade optax-freeze",
            )
        _check("", record, _RECORD)
        _check_paths(record)
    except _WrongField as wrong:
        field, got, expected = wrong.args
        raise value_error(
            "the record of the checkpoint is damaged",
            at=f"{step}/spec: {field or 'the whole file'}",
            got=got,
            expected=expected,
            fix="restore another step, or restore this file from a copy",
        ) from None
    return record


class _WrongField(Exception):  # noqa: N818
    """Raised with the name of a field, its value, and the expected value."""


class _Value(NamedTuple):
    """The schema of a value that is not a JSON object. ``items`` is the schema of each item of a list."""

    expected: str
    is_valid: Callable[[Any], bool]
    items: Any = None


def _check(at: str, value: Any, schema: Any) -> None:
    """Raises a :class:`_WrongField` for the first field in ``value`` that does not match its schema.

    The schema of a JSON object is a dict with the schema of each field. For a field that depends on others, it has a
    function from the object to the schema.
    """
    if isinstance(schema, _Value):
        if not schema.is_valid(value):
            raise _WrongField(at, described(value), schema.expected)
        for i, item in enumerate((schema.items and value) or ()):
            _check(f"{at}[{i}]", item, schema.items)
        return
    _check(at, value, _OBJECT)
    for name, field in schema.items():
        inner = f"{at}.{name}".lstrip(".")
        if name not in value:
            raise _WrongField(inner, "nothing", "a value")
        _check(inner, value[name], field(value) if callable(field) else field)


def _check_paths(record: Mapping[str, Any]) -> None:
    """Checks that all paths differ, and that exactly the frozen leaves have a fingerprint."""
    leaves, digests = record["leaves"], record["frozen"]
    paths = [leaf["path"] for leaf in leaves]
    _check("leaves", paths, _Value("a different path for each leaf", lambda paths: len(set(paths)) == len(paths)))
    frozen = sorted(leaf["path"] for leaf in leaves if leaf["frozen"] is not False and leaf["dtype"] != _FLOAT0)
    expected = f"the paths of the frozen leaves: {described(frozen)}"
    _check("frozen", sorted(digests), _Value(expected, lambda paths: paths == frozen))
    for path, lanes in digests.items():
        _check(f"frozen[{path!r}]", lanes, _DIGEST)


def _frozen_schema(leaf: Mapping[str, Any]) -> Any:
    frozen, shape = leaf["frozen"], leaf["shape"]
    if not isinstance(frozen, dict) or shape is None or leaf["dtype"].startswith("key<"):
        return _Value("true, false, or, for a numeric array, the frozen part", lambda frozen: isinstance(frozen, bool))
    if "compact" not in frozen:
        return _dynamic_rows_schema(shape) if "dynamic" in frozen else _rows_schema(shape)
    size = math.prod(shape)
    count = _Value(f"a number from 1 to {size}", lambda count: _is_int(count, 1, size))
    return {"compact": _BOOL, "count": lambda frozen: count if frozen["compact"] else _NULL}


def _part_schema(array: Mapping[str, Any]) -> Any:
    if isinstance(array["part"], dict):
        return _dynamic_rows_schema(None) if "dynamic" in array["part"] else _rows_schema(None)
    return _Value("rows, a number of elements, or null", lambda part: part is None or _is_int(part))


def _dynamic_rows_schema(shape: Sequence[int] | None) -> Any:
    """The schema of dynamic rows, of which only the count is stored. They must fit ``shape``, if it is known."""

    def count(record: Mapping[str, Any]) -> _Value:
        size = math.inf if shape is None else shape[record["axis"]]
        return _Value("a number of rows of the leaf", lambda count: _is_int(count, 1, size))

    return {"dynamic": _BOOL, "axis": _axis(shape), "count": count}


def _axis(shape: Sequence[int] | None) -> _Value:
    last = math.inf if shape is None else len(shape) - 1
    return _Value("an axis of the leaf", lambda axis: _is_int(axis, 0, last))


def _rows_schema(shape: Sequence[int] | None) -> Any:
    """The schema of static rows. They must be those of a selection of a leaf of this ``shape``, if it is known."""

    def rows(record: Mapping[str, Any]) -> _Value:
        def are_valid(runs: Any) -> bool:
            if shape is None:
                return isinstance(runs, list) and bool(runs) and are_ascending(runs, math.inf)
            try:
                return bool(selection_of(record, shape))
            except ValueError:
                return False

        return _Value("ascending [start, stop, step], within the leaf", are_valid)

    return {"axis": _axis(shape), "train": _BOOL, "rows": rows}


def _are_ints(values: Any, least: int = 0, most: float = math.inf) -> bool:
    return isinstance(values, list) and all(_is_int(value, least, most) for value in values)


def _is_int(value: Any, least: int = 0, most: float = math.inf) -> bool:
    return is_int(value) and least <= value <= most


def _is_dtype(name: Any) -> bool:
    if not isinstance(name, str) or name == _FLOAT0 or name.startswith("key<"):
        return isinstance(name, str)
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError, DeprecationWarning):
        return False
    return str(dtype) == name and is_array(jax.ShapeDtypeStruct((), dtype))


_FLOAT0 = str(jax.dtypes.float0)
_OBJECT = _Value("a JSON object", lambda value: isinstance(value, dict))
_NULL = _Value("null", lambda value: value is None)
_BOOL = _Value("true or false", lambda value: isinstance(value, bool))
_TEXT = _Value("a string", lambda value: isinstance(value, str))
_SHAPE = _Value("a list of sizes", _are_ints)
_DTYPE = _Value("the name of a dtype", _is_dtype)
_DIGEST = _Value(f"{LANES} numbers of 32 bits", lambda lanes: _are_ints(lanes, 0, 2**32 - 1) and len(lanes) == LANES)
_LEAF = {
    "path": _TEXT,
    "shape": lambda leaf: _NULL if leaf["shape"] is None else _SHAPE,
    "dtype": lambda leaf: _NULL._replace(expected="null, like the shape") if leaf["shape"] is None else _DTYPE,
    "frozen": _frozen_schema,
}
_STATE = {"path": _TEXT, "shape": _SHAPE, "dtype": _DTYPE, "part": _part_schema}
_RECORD = {
    "format": _Value("a number, 1 or more", lambda number: _is_int(number, 1)),
    "leaves": _Value("a list of leaves", lambda leaves: isinstance(leaves, list), _LEAF),
    "opt_state": _Value("a list of arrays, or null", lambda arrays: isinstance(arrays, list | None), _STATE),
    "frozen": _OBJECT,
}


def refuse_other_leaves(saved: Sequence[Mapping[str, Any]], params: PyTree) -> None:
    """Raises a ``ValueError`` if the parameters have other leaves than the saved ones."""
    got = [_array_record(leaf.path, leaf.shape, leaf.dtype) for leaf in _tree.leaves(params)]
    _refuse_other_arrays(saved, got, "params", "a leaf", "give the full parameters of the model that was saved")


def refuse_other_state(saved: Sequence[Mapping[str, Any]] | None, template: PyTree, at: str) -> None:
    """Raises a ``ValueError`` if the template is the state of another optimizer or spec, or no state was saved."""
    if saved is None:
        raise value_error(
            "no optimizer state in the checkpoint",
            at=at,
            got="a template of an optimizer state",
            expected="opt_state=None, since no state was given to checkpoint.save",
            fix="create a new state: tx.init(params)",
        )
    fix = "give the state of the optimizer and the spec that were saved; then fz.migrate(opt_state, tx, params)"
    _refuse_other_arrays(saved, state_record(template), "opt_state", "an array", fix)


def _refuse_other_arrays(
    saved: Sequence[Mapping[str, Any]], got: Sequence[Mapping[str, Any]], name: str, kind: str, fix: str
) -> None:
    def described(record: Mapping[str, Any]) -> str:
        rows = f", rows {record['part']}" if record.get("part") else ""
        return f"{record['dtype']} of shape {record['shape']}{rows}"

    _tree.refuse_other_paths([new["path"] for new in got], [old["path"] for old in saved], name, fix)
    for new, old in zip(got, saved, strict=True):
        if any(new[field] != old[field] for field in new):
            what = f"{name}: {kind} differs from the checkpoint"
            raise value_error(what, at=new["path"], got=described(new), expected=described(old), fix=fix)


def refuse_other_spec(saved: Plan, given: Plan) -> None:
    """Raises a ``ValueError`` if the given spec resolves to other elements than the saved one."""
    for leaf, was, now in zip(saved.leaves, saved.selections, given.selections, strict=True):
        if was != now or not all(map(jax.numpy.array_equal, jax.tree.leaves(was), jax.tree.leaves(now))):
            raise value_error(
                "the spec differs from the spec of the checkpoint",
                at=leaf.path,
                got=f"a leaf that {now}",
                expected=f"a leaf that {was}, as in the checkpoint",
                fix="restore with the spec that was saved, or None; then fz.migrate(opt_state, tx, params)",
            )


def refuse_other_base(saved: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    """Raises a ``ValueError`` if the fingerprints of frozen leaves differ from the saved ones."""
    differ = [path for path, digest in got.items() if np.asarray(digest).tolist() != saved[path]]
    if differ:
        raise value_error(
            "the base differs from the base of the checkpoint",
            at=", ".join(path or "(the root)" for path in differ[:3]),
            got=f"{len(differ)} of {counted(len(saved), 'frozen leaf', 'frozen leaves')} with a different fingerprint",
            expected="the parameters at the start of the run",
            fix="load the same base; if the run changed frozen leaves, fz.audit(tx, params, frozen) finds the cause",
        )
