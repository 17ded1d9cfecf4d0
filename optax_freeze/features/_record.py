"""The record of stored features: their program, parameters and batches, and how many batches are complete.

It is JSON and is replaced as a whole after each batch. :func:`read_record` checks every field for damage.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import filelock
import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import counted, described, in_one_line, is_int, value_error
from optax_freeze._precompute.precompute import Features, Precomputed
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.resolve import make_plan
from optax_freeze._spec.selection import Selection
from optax_freeze._spec.selection_record import record_of, selection_of
from optax_freeze._spec.tree import PyTree
from optax_freeze._verify.fingerprint import digests

FORMAT = 1
"""The version of the format of a record; greater where an older release would misread it."""

_FILE = "features.json"
_FIELDS = {
    "complete": bool,
    "cut": str,
    "leaves": list,
    "frozen": dict,
    "features": list,
    "batches": list,
    "examples": int,
}


def of_params(params: PyTree, once: Precomputed) -> dict[str, Any]:
    """The part of a record about the parameters: their leaves, and the fingerprint of each frozen one."""
    plan = make_plan(params, once.frozen)
    fix = "give the full parameters here, and what `needed` returned to `after` alone"
    _tree.refuse_half_a_tree(params, "the features are computed from the full parameters", "the leaf", fix)
    leaves = [
        {
            "path": leaf.path,
            **_array_record(leaf),
            "weak": _tree.is_weak(x),
            "frozen": record_of(selection),
        }
        for leaf, selection, x in zip(plan.leaves, plan.selections, _tree.flatten(params)[0], strict=True)
    ]
    found = digests(params, plan).items()
    return {"leaves": leaves, "frozen": {path: "".join(f"{int(x):08x}" for x in lanes) for path, lanes in found}}


def _array_record(of: Any) -> dict[str, Any]:
    if of.shape is None:
        return {"shape": None, "dtype": None}
    return {"shape": list(of.shape), "dtype": f"key {impl_of(of.dtype)}" if is_key(of.dtype) else str(of.dtype)}


def is_key(dtype: Any) -> bool:
    """Whether it is the dtype of random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def impl_of(dtype: Any) -> str:
    """The name of the generator of random keys."""
    found = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), dtype))
    return found[0]


def _dtype(name: str) -> Any:
    if name.startswith("key "):
        return jax.eval_shape(lambda: jax.random.key(0, impl=name.removeprefix("key "))).dtype
    return jax.dtypes.float0 if name == str(jax.dtypes.float0) else np.dtype(name)


def leaves_of(record: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The path and the shape of each leaf of the parameters."""
    return tuple((leaf["path"], _struct(leaf)) for leaf in record["leaves"])


def _selections_of(record: Mapping[str, Any]) -> list[Selection]:
    """The frozen part of each leaf of the parameters."""
    return [selection_of(leaf["frozen"], leaf["shape"]) for leaf in record["leaves"]]


def structs_of(record: Mapping[str, Any]) -> list[Any]:
    """The features of one example, without values."""
    return list(map(_struct, record["features"]))


def _struct(of: Mapping[str, Any]) -> Any:
    if of["shape"] is None:
        return None
    if not all(is_int(axis) and axis >= 0 for axis in of["shape"]):
        raise ValueError(f"the shape {of['shape']}")
    return jax.ShapeDtypeStruct(tuple(of["shape"]), _dtype(of["dtype"]), weak_type=bool(of.get("weak", False)))


def begin(where: str, shapes: Features, params_record: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a record without batches into a new directory."""
    os.makedirs(where, exist_ok=True)
    record = {"format": FORMAT, "complete": False, "cut": shapes.cut, **params_record}
    record |= {"features": _of_one(shapes), "batches": [], "examples": 0}
    save(where, record)
    return record


def _of_one(shapes: Features) -> list[dict[str, Any]]:
    return [_array_record(jax.ShapeDtypeStruct(struct.shape[1:], struct.dtype)) for struct in shapes]


@contextlib.contextmanager
def only_writer(where: str) -> Iterator[None]:
    """Holds a lock beside a directory: a second writer would mix its features with those of the first.

    The system releases the lock of a process that ends, so a run that was stopped never blocks the next one.
    """
    file = f"{where}.lock"
    os.makedirs(os.path.dirname(where), exist_ok=True)
    lock = filelock.FileLock(file, blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise value_error(
            "another process is writing to this directory",
            at=where,
            got=f"the lock {file}",
            expected="one writer",
            fix="wait until it is done, or use a separate directory for each process",
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # on Windows, where `release` removes the file
            os.unlink(file)
        lock.release()


def save(where: str, record: Mapping[str, Any]) -> None:
    """Replaces the record atomically: after a crash the file contains the old or the new record."""
    file = os.path.join(where, _FILE)
    with open(f"{file}.new", "w", encoding="utf-8") as out:
        json.dump(record, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(f"{file}.new", file)


def read_record(where: str, *, or_none: bool = False) -> Any:
    """The record in a directory; None, if that is allowed, where nothing is stored yet."""
    file = os.path.join(where, _FILE)
    others = sorted({*os.listdir(where)} - {f"{_FILE}.new"}) if os.path.isdir(where) else []
    if not os.path.isfile(file):
        if others:
            raise value_error(
                "the directory holds other files" if or_none else "there is no record of features",
                at=where,
                got=f"{counted(len(others), 'file', 'files')}: {described(others[:3])}",
                expected=f"features written by features.write, with their record {_FILE}",
                fix="use a separate directory for the features"
                if or_none
                else "write the features again, into another directory",
            )
        if or_none:
            return None
        message = value_error(
            "there are no features",
            at=where,
            got="an empty directory" if os.path.isdir(where) else "no such directory",
            expected="a directory written by features.write",
            fix="first call features.write(directory, once, params, batches)",
        )
        raise FileNotFoundError(str(message))
    try:
        with open(file, encoding="utf-8") as lines:
            record: Any = json.load(lines)
        if not is_int(record["format"]):
            raise TypeError(f"format {record['format']!r}")
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(file, _told(error)) from error
    if record["format"] > FORMAT:
        raise value_error(
            "the features were written by a newer optax_freeze",
            at=where,
            got=f"format {record['format']}",
            expected=f"format {FORMAT} or older",
            fix="install the newest release: pip install --upgrade optax-freeze",
        )
    for field, kind in _FIELDS.items():
        if type(record.get(field)) is not kind:
            raise damaged(f"{file}: {field}", described(record.get(field)), f"a {kind.__name__}")
    for field, form in (("leaves", leaves_of), ("leaves", _selections_of), ("features", structs_of)):
        try:
            form(record)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise damaged(f"{file}: {field}", _told(error)) from error
    return record


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {in_one_line(error)[:300]}"


def damaged(at: str, got: str, expected: str = "everything that features.write wrote") -> ValueError:
    """The error for files that were changed since they were written."""
    fix = "write the features again, into another directory; or restore the files from a copy"
    return value_error("the features are damaged", at=at, got=got, expected=expected, fix=fix)


def refuse_other_params(record: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses parameters of other shapes, another spec, or another base."""
    fix = "give the parameters and the spec that the features were written with, or write into another directory"
    got, expected = ([leaf["path"] for leaf in each["leaves"]] for each in (now, record))
    _tree.refuse_other_paths(got, expected, "params", fix)
    for new, old in zip(now["leaves"], record["leaves"], strict=True):
        if (new["shape"], new["dtype"]) != (old["shape"], old["dtype"]):
            got, expected = (f"{each['dtype']} of shape {each['shape']}" for each in (new, old))
            what = "params: a leaf differs from the stored features"
            raise value_error(what, at=new["path"], got=got, expected=expected, fix=fix)
        if new["frozen"] != old["frozen"]:
            got, expected = (f"a leaf that {selection_of(each['frozen'], each['shape'])}" for each in (new, old))
            what = "the spec differs from the spec of the stored features"
            raise value_error(what, at=new["path"], got=got, expected=expected, fix=fix)
    differ = [path for path, digest in now["frozen"].items() if digest != record["frozen"].get(path)]
    if differ:
        count = len(now["frozen"])
        raise value_error(
            "the base differs from the base of the stored features",
            at=", ".join(path or "(the root)" for path in differ[:3]),
            got=f"{len(differ)} of {counted(count, 'frozen leaf', 'frozen leaves')} with a different fingerprint",
            expected="the frozen parameters that the features were computed with",
            fix="load the same base, or write the features of this base into another directory",
        )


def refuse_other_features(record: Mapping[str, Any], shapes: Features, number: int) -> None:
    """Refuses the features of another program, or of examples of another shape."""
    if shapes.cut != record["cut"]:
        raise value_error(
            "the stored features were computed by another program",
            at=f"batch {number}",
            got=f"the program {shapes.cut[:12]}",
            expected=f"the program {record['cut'][:12]}: the same function, and arguments of the same shapes",
            fix="write the features into another directory",
        )


def refuse_other_batch(record: Mapping[str, Any], digest: str, number: int) -> None:
    """Refuses a batch with other values than the one that is stored."""
    stored: Sequence[str] = record["batches"]
    if number > len(stored):
        raise value_error(
            "there are more batches than are stored",
            at=f"batch {number}",
            got="another batch",
            expected=f"{counted(len(stored), 'batch', 'batches')}: these features are complete",
            fix="give the same batches, or write into another directory",
        )
    if digest != stored[number - 1]:
        raise value_error(
            "a batch differs from the one whose features are stored",
            at=f"batch {number} of {len(stored)}",
            got="other values, another shape or another dtype",
            expected="the same batches, in the same order",
            fix="turn shuffling and random augmentation off, or write into another directory",
        )
