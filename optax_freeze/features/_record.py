"""The record of stored features: their base and program, and a line for each batch that is stored completely.

Each line is JSON and a checksum of this line and all before it. The last line may be torn, by a killed process or a
full disk: it is left out, and overwritten by the next.
"""

import dataclasses
import json
import math
import os
import zlib
from collections.abc import Callable
from typing import Any

import jax

from optax_freeze._errors import counted, described, message, value_error
from optax_freeze._precompute.given_features import Features
from optax_freeze._precompute.precompute import Precomputed, full_plan
from optax_freeze._spec.tree import PyTree
from optax_freeze._verify import saved_base
from optax_freeze._verify.one_writer import LOCK, sync

FILE = "features.record"


@dataclasses.dataclass
class Record:
    leaves: list[saved_base.LeafRecord]
    cut: str  # the digest of the program
    features: list[Any]  # the shape and dtype of each feature of one example
    variants: int = 1  # of each example
    batches: list[str] = dataclasses.field(default_factory=list)  # the digests of the variants of each stored batch
    examples: int = 0
    complete: bool = False
    checksum: int = 0  # of the lines of the record
    size: int = 0  # of the lines, in bytes

    @property
    def entries(self) -> int:
        """The stored variants of all examples; those of an example are one after another."""
        return self.examples * self.variants

    def line(self, content: dict[str, Any]) -> bytes:
        """The next line of the record."""
        text = json.dumps(content).encode()
        self.checksum = zlib.crc32(text, self.checksum)
        return b"%s %08x\n" % (text, self.checksum)


def base_of(params: PyTree, once: Precomputed) -> list[saved_base.LeafRecord]:
    return saved_base.leaf_records(params, full_plan(params, once.frozen))


def begin(where: str, shapes: Features, leaves: list[saved_base.LeafRecord], variants: int) -> Record:
    record = Record(leaves, shapes.cut, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in shapes], variants)
    file = os.path.join(where, FILE)
    structs = [saved_base.struct_as_json(struct) for struct in record.features]
    header = {"cut": record.cut, "variants": variants, "features": structs, "format": saved_base.FORMAT}
    header["leaves"] = [leaf.as_json() for leaf in leaves]
    open(f"{file}.new", "wb").close()
    _append(f"{file}.new", record, header)
    sync(f"{file}.new")
    os.replace(f"{file}.new", file)
    return record


def add_batch(where: str, record: Record, digest: str, entries: int) -> None:
    examples = record.examples + entries // record.variants
    _append(os.path.join(where, FILE), record, {"batch": digest, "examples": examples})
    record.batches.append(digest)
    record.examples = examples


def complete(where: str, record: Record) -> None:
    _append(os.path.join(where, FILE), record, {"complete": True})
    sync(os.path.join(where, FILE))
    record.complete = True


def _append(file: str, record: Record, content: dict[str, Any]) -> None:
    line = record.line(content)
    with open(file, "r+b") as out:
        out.seek(record.size)
        out.truncate()
        out.write(line)
    record.size += len(line)


def read_record(
    where: str, *, or_none: bool = False, held: Callable[[str, Record], float] = lambda *_: math.inf
) -> Any:
    """The record in a directory; None, if that is allowed, where nothing is stored yet.

    Batches are left out of which the files do not hold all entries, of the number that they have ``held``.
    """
    file = os.path.join(where, FILE)
    others = sorted({*os.listdir(where)} - {f"{FILE}.new", LOCK}) if os.path.isdir(where) else []
    if not os.path.isfile(file):
        if others:
            what = "the directory holds other files" if or_none else "there is no record of features"
            got = f"{counted(len(others), 'file', 'files')}: {described(others[:3])}"
            expected = f"features written by features.write, with their record {FILE}"
            fix = "use a separate directory" if or_none else "write the features again, into another directory"
            raise value_error(what, at=where, got=got, expected=expected, fix=fix)
        if or_none:
            return None
        got = "an empty directory" if os.path.isdir(where) else "no such directory"
        expected = "a directory written by features.write"
        fix = "first call features.write(directory, once, params, batches)"
        raise FileNotFoundError(message("there are no features", at=where, got=got, expected=expected, fix=fix))
    with open(file, "rb") as stored:
        lines = stored.read().splitlines(keepends=True)
    error = lambda field, got, expected: damaged(f"{file}: {field}", got, expected)  # noqa: E731
    found, checksum, size = [], 0, 0
    for number, line in enumerate(lines, 1):
        text, _, told = line.rpartition(b" ")
        if told != b"%08x\n" % zlib.crc32(text, checksum):
            if 1 < number == len(lines):
                break
            raise damaged(f"{file}: line {number}", f"{len(line)} bytes with another checksum")
        checksum, size = zlib.crc32(text, checksum), size + len(line)
        found.append((saved_base.Field(json.loads(text), error), checksum, size))
    if not found:
        raise damaged(file, "an empty file")
    header, checksum, size = found[0]
    saved_base.refuse_newer(header, where, "the features were")
    record = Record(
        saved_base.leaves_of_json(header["leaves"]),
        header["cut"].text(),
        [feature.struct() for feature in header["features"].items("arrays")],
        header["variants"].number(1),
        checksum=checksum,
        size=size,
    )
    most = held(where, record)
    for line, checksum, size in found[1:]:
        if "complete" in line.entries():
            record.complete = line["complete"].flag()
        elif line["examples"].number(record.examples + 1) * record.variants > most:
            break
        else:
            record.batches.append(line["batch"].text())
            record.examples = line["examples"].number()
        record.checksum, record.size = checksum, size
    return record


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


def refuse_other_params(record: Record, now: list[saved_base.LeafRecord]) -> None:
    where, saved = "the stored features", record.leaves
    fix = "give the parameters and the spec that the features were written with, or write into another directory"
    saved_base.refuse_other_arrays(saved, now, "params", where, fix)
    was, got = ([leaf.selection for leaf in each] for each in (saved, now))
    saved_base.refuse_other_selections(was, got, [leaf.path for leaf in saved], where, fix)
    expected = "the frozen parameters that the features were computed with"
    fix = "load the same base, or write the features of this base into another directory"
    saved_base.refuse_other_base(saved, now, where, expected, fix)


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
