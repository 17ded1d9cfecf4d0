"""The record of the parameters that stored arrays belong to: each leaf, its frozen part, and the fingerprint of that.

:mod:`optax_freeze.checkpoint` and :mod:`optax_freeze.features` keep it as JSON beside their arrays. The file may be
damaged or edited by hand, so each value that is read is checked.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_freeze._errors import counted, described, is_array, is_int, type_error, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.numpy_leaves import AS_ARRAYS_OF_JAX, dtype_in_jax
from optax_freeze._spec.plan import Plan
from optax_freeze._spec.plan_digest import record_of
from optax_freeze._spec.selection import TRAINABLE, Selection
from optax_freeze._spec.selection_record import selection_of
from optax_freeze._spec.tree import PyTree
from optax_freeze._verify.bits import LANES
from optax_freeze._verify.fingerprint import as_texts, digests

_DIGITS = frozenset("0123456789abcdef")
FORMAT = 1
"""The version of the form of a record. It is increased when older releases would misread a record."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A value in a record, the error for a wrong one (of the field, what it is, what is expected), and the field."""

    value: Any
    damaged: Callable[[str, str, str], ValueError]
    at: str = ""

    def __getitem__(self, name: str) -> "Field":
        fields = self.entries()
        if name not in fields:
            raise self.damaged(f"{self.at}.{name}".lstrip("."), "nothing", "a value")
        return fields[name]

    def entries(self) -> dict[str, "Field"]:
        record = self.checked("a JSON object", lambda value: isinstance(value, dict))
        return {n: dataclasses.replace(self, value=record[n], at=f"{self.at}.{n}".lstrip(".")) for n in record}

    def checked(self, expected: str, is_valid: Callable[[Any], bool]) -> Any:
        if not is_valid(self.value):
            raise self.damaged(self.at or "the whole file", described(self.value), expected)
        return self.value

    def items(self, of: str) -> list["Field"]:
        values = self.checked(f"a list of {of}", lambda value: isinstance(value, list))
        return [dataclasses.replace(self, value=value, at=f"{self.at}[{i}]") for i, value in enumerate(values)]

    def text(self) -> str:
        return self.checked("a string", lambda value: isinstance(value, str))

    def digits(self) -> bytes:
        """The bytes that are written as hexadecimal digits."""
        is_valid = lambda value: isinstance(value, str) and not len(value) % 2 and not set(value) - _DIGITS  # noqa: E731
        return bytes.fromhex(self.checked("pairs of hexadecimal digits", is_valid))

    def flag(self) -> bool:
        return self.checked("true or false", lambda value: isinstance(value, bool))

    def number(self, least: int = 0) -> int:
        return self.checked(f"a number, {least} or more", lambda value: is_int(value) and value >= least)

    def struct(self, *, or_none: bool = False) -> Any:
        """The shape and dtype of an array; None for another object, if that is allowed."""
        if or_none and self["shape"].value is None:
            return self["dtype"].checked("null, like the shape", lambda name: name is None)
        are_sizes = lambda value: isinstance(value, list) and all(is_int(n) and n >= 0 for n in value)  # noqa: E731
        sizes = self["shape"].checked("a list of sizes", are_sizes)
        return jax.ShapeDtypeStruct(tuple(sizes), self["dtype"].dtype(), weak_type=self["weak"].flag())

    def dtype(self) -> Any:
        return _dtype(self.checked("the name of a dtype", lambda name: _dtype(name) is not None))

    def fingerprint(self) -> str:
        is_valid = lambda value: isinstance(value, str) and len(value) == 8 * LANES and not set(value) - _DIGITS  # noqa: E731
        return self.checked(f"{8 * LANES} hexadecimal digits", is_valid)


def _dtype(name: Any) -> Any:
    """The dtype with this name; None if there is none."""
    try:
        if name.startswith("key "):
            return jax.eval_shape(lambda: jax.random.key(0, impl=name.removeprefix("key "))).dtype
        dtype = jax.dtypes.float0 if name == str(jax.dtypes.float0) else np.dtype(name)
    except (AttributeError, TypeError, ValueError, SyntaxError, DeprecationWarning):
        return None
    return dtype if str(dtype) == name and is_array(jax.ShapeDtypeStruct((), dtype)) else None


def is_key(array: Any) -> bool:
    return is_array(array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def absolute(directory: Any, fix: str, *, local: bool = False) -> str:
    if not isinstance(directory, (str, os.PathLike)):
        at, got = "the first argument", described(directory)
        raise type_error("not a directory", at=at, got=got, expected="the path of a directory", fix=fix)
    where = os.fspath(directory)
    is_address = "://" in where
    if os.path.isfile(where) or (local and is_address):
        got = "an address" if is_address else "a file"
        expected = f"a directory{' on a local disk' if local else ''}, or nothing there"
        raise value_error("not a directory", at=where, got=got, expected=expected, fix=fix)
    return where if is_address else os.path.realpath(where)


def key_impl(dtype: Any) -> str:
    found = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), dtype))
    return found[0]


def struct_as_json(struct: Any) -> dict[str, Any]:
    if struct is None:
        return {"shape": None, "dtype": None}
    dtype = f"key {key_impl(struct.dtype)}" if is_key(struct) else str(struct.dtype)
    return {"shape": list(struct.shape), "dtype": dtype, "weak": bool(struct.weak_type)}


@dataclasses.dataclass(frozen=True)
class LeafRecord:
    """A leaf of the parameters."""

    path: str
    struct: jax.ShapeDtypeStruct | None  # None for an object that is not an array
    selection: Selection  # without the array of a mask
    fingerprint: str | None = None  # of its frozen part, if there is one

    def as_json(self) -> dict[str, Any]:
        frozen = {"frozen": record_of(self.selection), "fingerprint": self.fingerprint}
        return {"path": self.path, **struct_as_json(self.struct), **frozen}


def leaf_records(params: PyTree, plan: Plan, *, fingerprints: bool = True) -> list[LeafRecord]:
    """The records of the parameters, with the fingerprints of their frozen parts or without."""
    found = as_texts(digests(params, plan)) if fingerprints else {}

    def record(leaf: _tree.Leaf, selection: Selection, value: Any) -> LeafRecord:
        weak = bool(_tree.is_weak(value))
        struct = None if leaf.shape is None else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
        return LeafRecord(leaf.path, struct, selection.with_array(_tree.MASKED_NODE), found.get(leaf.path))

    return list(map(record, plan.leaves, plan.selections, _tree.flatten(params)[0]))


def leaves_of_json(leaves: Field) -> list[LeafRecord]:
    records = [_leaf_of_json(leaf) for leaf in leaves.items("leaves")]
    if len({record.path for record in records}) < len(records):
        paths = described([record.path for record in records])
        raise leaves.damaged(leaves.at, paths, "a different path for each leaf")
    return records


def _leaf_of_json(leaf: Field) -> LeafRecord:
    path, struct, frozen = leaf["path"].text(), leaf.struct(or_none=True), leaf["frozen"]
    is_numeric = struct is not None and jnp.issubdtype(struct.dtype, jnp.inexact)
    try:
        selection = selection_of(frozen.value, struct.shape if is_numeric else None)  # type: ignore[union-attr]
    except ValueError:
        expected = f"true{', false, or the frozen part' if is_numeric else ' or false'}"
        raise frozen.damaged(frozen.at, described(frozen.value), expected) from None
    has_bits = selection is not TRAINABLE and (struct is None or struct.dtype != jax.dtypes.float0)
    fingerprint = leaf["fingerprint"]
    if not has_bits:
        fingerprint.checked("null, since nothing is frozen", lambda value: value is None)
    return LeafRecord(path, struct, selection, fingerprint.fingerprint() if has_bits else None)


def refuse_newer(record: Field, where: str, what: str) -> None:
    if (number := record["format"].number(1)) > FORMAT:
        got, expected = f"format {number}", f"format {FORMAT} or older"
        fix = "install the newest release: pip install --upgrade optax-freeze"
        raise value_error(f"{what} written by a newer optax_freeze", at=where, got=got, expected=expected, fix=fix)


def refuse_other_arrays(saved: Sequence[Any], got: Sequence[Any], name: str, where: str, fix: str) -> None:
    """Raises a ``ValueError`` if arrays have other paths, shapes, dtypes or parts than the saved ones."""

    def told(record: Any) -> str:
        if record.struct is None:
            return "an object that is not an array"
        rows = f", rows {record.part}" if getattr(record, "part", None) else ""
        return f"{struct_as_json(record.struct)['dtype']} of shape {list(record.struct.shape)}{rows}"

    _tree.refuse_other_paths([new.path for new in got], [old.path for old in saved], name, fix)
    for new, old in zip(got, saved, strict=True):
        if told(new) != told(old):
            fix = _fix_of_dtype(new.struct, old.struct) or fix
            what = f"{name}: a leaf differs from {where}"
            raise value_error(what, at=new.path, got=told(new), expected=told(old), fix=fix)


def _fix_of_dtype(new: Any, old: Any) -> str:
    """The fix if one of two arrays was of NumPy, and the other is what JAX makes of it."""
    if new is None or old is None or new.dtype == old.dtype:
        return ""
    if dtype_in_jax(new.dtype) == old.dtype:
        return f"{AS_ARRAYS_OF_JAX}, and here"
    return "give the NumPy arrays that were saved" if dtype_in_jax(old.dtype) == new.dtype else ""


def refuse_other_selections(
    saved: Sequence[Selection], got: Sequence[Selection], paths: Sequence[str], where: str, fix: str
) -> None:
    for path, was, now in zip(paths, saved, got, strict=True):
        if was != now or not all(map(jnp.array_equal, jax.tree.leaves(was), jax.tree.leaves(now))):
            what = f"the spec differs from the spec of {where}"
            raise value_error(what, at=path, got=f"a leaf that {now}", expected=f"a leaf that {was}", fix=fix)


def refuse_other_base(
    saved: Sequence[LeafRecord], got: Sequence[LeafRecord], where: str, expected: str, fix: str
) -> None:
    differ = [now.path for was, now in zip(saved, got, strict=True) if was.fingerprint != now.fingerprint]
    if differ:
        leaves = counted(sum(record.fingerprint is not None for record in saved), "frozen leaf", "frozen leaves")
        what, at = f"the base differs from the base of {where}", ", ".join(path or "(the root)" for path in differ[:3])
        told = f"{len(differ)} of {leaves} with a different fingerprint"
        raise value_error(what, at=at, got=told, expected=expected, fix=fix)
