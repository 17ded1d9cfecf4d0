"""The record of stored features: their base, program and batches, and how many batches are complete.

It is replaced as a whole after each batch.
"""

import dataclasses
import json
import os
from typing import Any

import jax

from optax_freeze._errors import counted, described, in_one_line, message, value_error
from optax_freeze._precompute.precompute import Features, Precomputed, full_plan
from optax_freeze._spec.tree import PyTree
from optax_freeze._verify import base_record
from optax_freeze._verify.one_writer import LOCK

_FILE = "features.json"


@dataclasses.dataclass
class Record:
    leaves: list[base_record.LeafRecord]
    cut: str  # the digest of the program
    features: list[Any]  # the shape and dtype of each feature of one example
    variants: int = 1  # of each example
    batches: list[str] = dataclasses.field(default_factory=list)  # the digests of the variants of each stored batch
    examples: int = 0
    complete: bool = False

    @property
    def entries(self) -> int:
        """The stored variants of all examples; those of an example are one after another."""
        return self.examples * self.variants

    def as_json(self) -> dict[str, Any]:
        leaves = [leaf.as_json() for leaf in self.leaves]
        features = list(map(base_record.struct_as_json, self.features))
        return {**vars(self), "format": base_record.FORMAT, "leaves": leaves, "features": features}


def base_of(params: PyTree, once: Precomputed) -> list[base_record.LeafRecord]:
    return base_record.leaf_records(params, full_plan(params, once.frozen))


def begin(where: str, shapes: Features, leaves: list[base_record.LeafRecord], variants: int) -> Record:
    record = Record(leaves, shapes.cut, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in shapes], variants)
    save(where, record)
    return record


def save(where: str, record: Record) -> None:
    """Replaces the record atomically: after a crash the file contains the old or the new record."""
    file = os.path.join(where, _FILE)
    with open(f"{file}.new", "w", encoding="utf-8") as out:
        json.dump(record.as_json(), out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(f"{file}.new", file)


def read_record(where: str, *, or_none: bool = False) -> Any:
    """The record in a directory; None, if that is allowed, where nothing is stored yet."""
    file = os.path.join(where, _FILE)
    others = sorted({*os.listdir(where)} - {f"{_FILE}.new", LOCK}) if os.path.isdir(where) else []
    if not os.path.isfile(file):
        if others:
            what = "the directory holds other files" if or_none else "there is no record of features"
            got = f"{counted(len(others), 'file', 'files')}: {described(others[:3])}"
            expected = f"features written by features.write, with their record {_FILE}"
            fix = "use a separate directory" if or_none else "write the features again, into another directory"
            raise value_error(what, at=where, got=got, expected=expected, fix=fix)
        if or_none:
            return None
        got = "an empty directory" if os.path.isdir(where) else "no such directory"
        expected = "a directory written by features.write"
        fix = "first call features.write(directory, once, params, batches)"
        raise FileNotFoundError(message("there are no features", at=where, got=got, expected=expected, fix=fix))
    try:
        with open(file, encoding="utf-8") as lines:
            stored = json.load(lines)
    except json.JSONDecodeError as error:
        raise damaged(file, f"{type(error).__name__}: {in_one_line(error)[:300]}") from error
    record = base_record.Field(stored, lambda field, got, expected: damaged(f"{file}: {field}", got, expected))
    base_record.refuse_newer(record, where, "the features were")
    return Record(
        base_record.leaves_of_json(record["leaves"]),
        record["cut"].text(),
        [feature.struct() for feature in record["features"].items("arrays")],
        record["variants"].number(1),
        [batch.text() for batch in record["batches"].items("digests")],
        record["examples"].number(),
        record["complete"].flag(),
    )


def damaged(at: str, got: str, expected: str = "everything that features.write wrote") -> ValueError:
    fix = "write the features again, into another directory; or restore the files from a copy"
    return value_error("the features are damaged", at=at, got=got, expected=expected, fix=fix)


def refuse_other_variants(record: Record, variants: int) -> None:
    if record.variants != variants:
        raise value_error(
            "the stored features have a different number of variants",
            at="variants",
            got=str(variants),
            expected=f"{record.variants}, as when these features were begun",
            fix=f"give variants={record.variants}, or write into another directory",
        )


def refuse_other_params(record: Record, now: list[base_record.LeafRecord]) -> None:
    where, saved = "the stored features", record.leaves
    fix = "give the parameters and the spec that the features were written with, or write into another directory"
    base_record.refuse_other_arrays(saved, now, "params", where, fix)
    was, got = ([leaf.selection for leaf in each] for each in (saved, now))
    base_record.refuse_other_selections(was, got, [leaf.path for leaf in saved], where, fix)
    expected = "the frozen parameters that the features were computed with"
    fix = "load the same base, or write the features of this base into another directory"
    base_record.refuse_other_base(saved, now, where, expected, fix)


def refuse_other_features(record: Record, shapes: Features, number: int) -> None:
    if shapes.cut != record.cut:
        raise value_error(
            "the stored features were computed by another program",
            at=f"batch {number}",
            got=f"the program {shapes.cut[:12]}",
            expected=f"the program {record.cut[:12]}: the same function, and arguments of the same shapes",
            fix="write the features into another directory",
        )


def refuse_other_batch(record: Record, digest: str, number: int) -> None:
    stored = record.batches
    if number > len(stored):
        at, got = f"batch {number}", "another batch"
        expected = f"{counted(len(stored), 'batch', 'batches')}: these features are complete"
        fix = "give the same batches, or write into another directory"
        raise value_error("there are more batches than are stored", at=at, got=got, expected=expected, fix=fix)
    if digest != stored[number - 1]:
        raise value_error(
            "a batch differs from the one whose features are stored",
            at=f"batch {number} of {len(stored)}",
            got="other values, another shape or another dtype",
            expected="the same batches, in the same order",
            fix="turn shuffling and random augmentation off, or write into another directory",
        )
