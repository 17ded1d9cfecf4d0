"""The file of a patch: safetensors, with a record in its metadata.

Each byte is covered: tensors by their SHA-256 in the record, the record by its own, and the header of the file by
what the record says about names, dtypes and shapes. Only other metadata may be changed.
"""

import contextlib
import functools
import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import counted, described, in_one_line, value_error
from optax_freeze._report.safetensors_format import DTYPES, imported
from optax_freeze._spec.selection import FROZEN
from optax_freeze._verify.one_writer import sync
from optax_freeze._verify.saved_base import FORMAT, Field, LeafRecord, leaves_of_json, refuse_newer
from optax_freeze.patch._layout import TrainedLeaf

KEY = "optax_freeze.patch"
"""The record in the metadata of the file."""
_WRITTEN = {name for code, name in DTYPES.items() if not code.startswith(("F4", "F6_"))}  # of whole bytes


def refuse_unwritable(tensors: Mapping[str, np.ndarray]) -> None:
    for name, array in tensors.items():
        if str(array.dtype) not in _WRITTEN:
            expected = ", ".join(sorted(name for name in _WRITTEN if jnp.issubdtype(name, jnp.inexact)))
            fix = "convert this leaf with .astype, and call patch.apply(params, ..., base=False)"
            what = "safetensors does not have this dtype"
            raise value_error(what, at=name, got=str(array.dtype), expected=expected, fix=fix)


def record_of(leaves: Sequence[LeafRecord], names: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> str:
    named = [leaf.as_json() | ({"name": names[leaf.path]} if leaf.path in names else {}) for leaf in leaves]
    return _with_digest({"format": FORMAT, "leaves": named, "tensors": {n: _digest(x) for n, x in tensors.items()}})


def _digest(array: np.ndarray) -> str:
    data: Any = array.reshape(-1).view(np.uint8)
    return hashlib.sha256(data).hexdigest()


def _with_digest(content: Mapping[str, Any]) -> str:
    text = functools.partial(json.dumps, sort_keys=True, separators=(",", ":"))
    return text({**content, "sha256": hashlib.sha256(text(content).encode()).hexdigest()})


def write(where: str, record: str, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a file that is complete, or does not exist."""
    os.makedirs(os.path.dirname(where), exist_ok=True)
    unfinished = f"{where}.{secrets.token_hex(4)}.new"
    try:
        imported(where).numpy.save_file(dict(tensors), unfinished, metadata={**metadata, KEY: record})
        sync(unfinished)
        os.replace(unfinished, where)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def read(where: str) -> tuple[list[LeafRecord], dict[str, str], dict[str, np.ndarray], dict[str, str]]:
    """The leaves, the names of those that train, the tensors and the other metadata; a ``ValueError`` for damage."""
    safetensors = imported(where)
    with open(where, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        metadata = _metadata(where, file.read(min(length, _LONGEST_HEADER)))
        file.seek(0)
        data = file.read()
    text = metadata.pop(KEY)
    damaged = functools.partial(_damaged, where)
    record = _record(text)
    if record is None:
        raise damaged(KEY, "a record with another SHA-256", "the record that patch.save wrote")
    record = Field(record, damaged)
    refuse_newer(record, where, "the patch was")
    try:
        found = dict(safetensors.deserialize(data))
    except safetensors.SafetensorError as error:
        raise damaged("the tensors", in_one_line(error), "a file of safetensors") from error
    leaves = leaves_of_json(record["leaves"])
    fields = zip(leaves, record["leaves"].items("leaves"), strict=True)
    names = {leaf.path: field["name"].text() for leaf, field in fields if leaf.selection is not FROZEN}
    digests = {name: field.text() for name, field in record["tensors"].entries().items()}
    if {*found} != {*digests}:
        raise damaged("the tensors", described(sorted(found)), described(sorted(digests)))
    tensors = {name: _array(found[name]) for name in sorted(found)}
    _refuse_other_tensors(leaves, names, tensors, damaged)
    differ = [name for name, array in tensors.items() if _digest(array) != digests[name]]
    if differ:
        got = f"{len(differ)} of {counted(len(tensors), 'tensor', 'tensors')} with another SHA-256"
        raise damaged(", ".join(sorted(differ)[:3]), got, "the bytes that patch.save wrote")
    return leaves, names, tensors, metadata


_LONGEST_HEADER = 100_000_000  # as in the library


def _record(text: str) -> Any:
    """The record in a text; None if its SHA-256 is that of another one."""
    try:
        record = json.loads(text)
        is_whole = _with_digest({n: value for n, value in record.items() if n != "sha256"}) == text
    except (ValueError, AttributeError, RecursionError):
        return None
    return record if is_whole else None


def _metadata(where: str, header: bytes) -> dict[str, str]:
    """The metadata of a header with a record; a ``ValueError`` for any other."""
    try:
        found = json.loads(header) if header.rstrip(b" ").endswith(b"}") else None
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        metadata = found.get("__metadata__", {})
        if isinstance(metadata, dict) and KEY in metadata and all(isinstance(x, str) for x in metadata.values()):
            return metadata
    what, got = "the file is not a patch", "a file that is damaged, or not of safetensors"
    fix = "take the file from a copy, or save it again"
    if isinstance(found, dict):
        got = "a file of safetensors without a record of what was trained"
        fix = (
            "save it with patch.save; other tensors: fz.merge_pretrained(params, {name.replace('.', '/'): value for"
            " name, value in safetensors.flax.load_file(path).items()})"
        )
    raise value_error(what, at=where, got=got, expected="a file that patch.save wrote", fix=fix)


def _array(tensor: Mapping[str, Any]) -> np.ndarray:
    dtype = DTYPES.get(tensor["dtype"])
    if dtype not in _WRITTEN:
        return np.frombuffer(tensor["data"], np.uint8)
    return np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])


def _refuse_other_tensors(
    leaves: Sequence[LeafRecord], names: Mapping[str, str], tensors: Mapping[str, np.ndarray], damaged: Any
) -> None:
    own = [TrainedLeaf(leaf, names[leaf.path], tensors) for leaf in leaves if leaf.path in names]
    expected: dict[str, Any] = {}
    for each in own:
        if each.leaf.struct is None:
            raise damaged(f"leaves: {each.leaf.path}", "an object that trains", "an array")
        expected |= each.structs()
    told = [{name: f"{x.dtype}{list(x.shape)}" for name, x in found.items()} for found in (tensors, expected)]
    if differ := sorted(name for name, _ in told[0].items() ^ told[1].items()):
        got, wanted = (each.get(differ[0], "nothing") for each in told)
        raise damaged(differ[0], got, wanted)
    for each in own:
        if not each.numbers_fit():
            raise damaged(each.name, "other numbers", "ascending numbers of rows or elements of the leaf")


def _damaged(where: str, field: str, got: str, expected: str) -> ValueError:
    what, fix = "the patch is damaged", "take the file from a copy, or save it again"
    return value_error(what, at=f"{where}: {field}", got=got, expected=expected, fix=fix)
