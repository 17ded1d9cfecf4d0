"""The arrays of stored features: a file of NumPy for each feature, and one of checksums.

All have one entry after another: an example, or a variant of it. A checksum is that of the entry in all features. The
files grow, and get their final shape when all is written.
"""

import io
import math
import os
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optax_freeze._errors import described, in_one_line, value_error
from optax_freeze._verify.saved_base import is_key, key_impl
from optax_freeze.features._record import Record, damaged

_RUN_BYTES = 2**18
"""The bytes that are read at once: so many are still in the cache when their checksums are computed."""

_CHECKSUMS = jax.ShapeDtypeStruct((), np.uint32)


class _File:
    """The file of an array whose first axis grows."""

    def __init__(self, where: str, name: str, struct: Any, flags: int) -> None:
        if is_key(struct):
            struct = jax.eval_shape(jax.random.key_data, struct)
        self.path, self.dtype, self.shape = os.path.join(where, f"{name}.npy"), np.dtype(struct.dtype), struct.shape
        self.size = self.dtype.itemsize * math.prod(self.shape)
        self.begin = len(self.header(0))
        try:
            self.fd = os.open(self.path, flags)
        except FileNotFoundError as error:
            raise damaged(self.path, "no such file") from error
        weakref.finalize(self, os.close, self.fd)

    def header(self, entries: int) -> bytes:
        """The header of the file, of the same length for any number of entries."""
        fields = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (entries, *self.shape),
        }
        out = io.BytesIO()
        np.lib.format.write_array_header_1_0(out, fields)
        return out.getvalue()

    def entries(self) -> int:
        """How many complete entries the file has room for."""
        return (os.fstat(self.fd).st_size - self.begin) // max(self.size, 1)

    def check(self, entries: int) -> None:
        """Raises an error unless it is the file of so many entries."""
        header = io.BytesIO(os.pread(self.fd, self.begin, 0))
        try:
            np.lib.format.read_magic(header)
            shape, _, dtype = np.lib.format.read_array_header_1_0(header)
        except ValueError as error:
            raise damaged(self.path, in_one_line(error)) from error
        expected = np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(self.dtype))
        if (shape, dtype) != ((entries, *self.shape), expected):
            raise damaged(self.path, f"{dtype}{list(shape)}", f"{expected}{[entries, *self.shape]}")
        stored, size = os.fstat(self.fd).st_size, self.begin + entries * self.size
        if stored != size:
            raise damaged(self.path, f"{stored} bytes", f"{size} bytes")

    def write(self, at: int, data: Any) -> None:
        left = memoryview(data)
        while left:
            written = os.pwrite(self.fd, left, at)
            left, at = left[written:], at + written

    def read(self, entry: int, out: memoryview) -> None:
        """Reads as many entries as fit, from this one on."""
        at = self.begin + entry * self.size
        while out:
            count = os.preadv(self.fd, [out], at)
            if not count:
                raise damaged(self.path, f"no entry {entry}")
            out, at = out[count:], at + count

    def read_each(self, entries: Sequence[int], out: memoryview, found: list[int]) -> None:
        """Reads entries, and updates their checksums of what was read before."""
        fd, size, begin = self.fd, self.size, self.begin
        for k, entry in enumerate(entries):
            part = out[k * size : (k + 1) * size]
            if os.preadv(fd, (part,), begin + entry * size) != size:
                self.read(entry, part)
            found[k] = zlib.crc32(part, found[k])

    def read_run(self, entry: int, out: memoryview, found: list[int]) -> None:
        """The same for entries one after another, from this one on."""
        size = max(self.size, 1)
        step = max(_RUN_BYTES // size, 1) * size
        for start in range(0, len(out), step):
            run = out[start : start + step]
            self.read(entry + start // size, run)
            for at in range(0, len(run), size):
                k = (start + at) // size
                found[k] = zlib.crc32(run[at : at + size], found[k])


def _opened(where: str, record: Record, flags: int) -> list[_File]:
    """The file of checksums, and those of the features."""
    structs = {"checksums": _CHECKSUMS, **dict(enumerate(record.features))}
    return [_File(where, str(name), struct, flags) for name, struct in structs.items()]


def held(where: str, record: Record) -> float:
    """How many entries the files hold: after a loss of power, maybe fewer than the record names."""
    try:
        return min(file.entries() if file.size else math.inf for file in _opened(where, record, os.O_RDONLY))
    except ValueError:
        return 0


class Writer:
    """Appends entries to the files."""

    def __init__(self, where: str, record: Record) -> None:
        self._record = record
        self._files = _opened(where, record, os.O_RDWR | os.O_CREAT)
        for file in self._files:
            file.write(0, file.header(0))

    def append(self, arrays: Sequence[np.ndarray]) -> None:
        """Writes entries after those of the record, over what a stopped process may have left there."""
        checksums, *files = self._files
        stored, found = self._record.entries, [0] * len(arrays[0])
        for file, array in zip(files, arrays, strict=True):
            view = _as_bytes(np.ascontiguousarray(array))
            file.write(file.begin + stored * file.size, view)
            rows = (view[k * file.size : (k + 1) * file.size] for k in range(len(found)))
            found = [*map(zlib.crc32, rows, found)]
        checksums.write(checksums.begin + stored * checksums.size, np.array(found, np.uint32))

    def sync(self) -> None:
        for file in self._files:
            os.fsync(file.fd)

    def finish(self) -> None:
        """Gives the files their final shape."""
        entries = self._record.entries
        for file in self._files:
            file.write(0, file.header(entries))
            os.ftruncate(file.fd, file.begin + entries * file.size)
        self.sync()


class Reader:
    """Reads entries of the files, and compares their checksums."""

    def __init__(self, where: str, record: Record) -> None:
        self._where = where
        checksums, *self._files = _opened(where, record, os.O_RDONLY)
        for file in (checksums, *self._files):
            file.check(record.entries)
        self._checksums = np.empty(record.entries, np.uint32)
        checksums.read(0, _as_bytes(self._checksums))

    def read(self, entries: Any) -> list[np.ndarray]:
        """The features of one entry, of a slice of entries, or of several."""
        numbers = np.r_[entries].astype(int).tolist()
        count = len(numbers)
        arrays, found = [np.empty((count, *file.shape), file.dtype) for file in self._files], [0] * count
        for file, array in zip(self._files, arrays, strict=True):
            if isinstance(entries, slice):
                file.read_run(entries.start, _as_bytes(array), found)
            else:
                file.read_each(numbers, _as_bytes(array), found)
        wrong = np.flatnonzero(self._checksums[numbers] != np.array(found, np.uint32))
        if wrong.size:
            raise damaged(self._where, f"entry {numbers[wrong[0]]} with another checksum")
        return [array[0] for array in arrays] if isinstance(entries, int) else arrays


def _as_bytes(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def as_feature(array: Any, struct: Any) -> Any:
    """A feature as ``before`` computed it, from what is stored."""
    if is_key(struct):
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=key_impl(struct.dtype))
    return np.asarray(array)


def by_example(variants: Sequence[np.ndarray]) -> np.ndarray:
    """All variants of an example one after another, from arrays of one variant of each example."""
    if len(variants) == 1:
        return variants[0]
    count, *shape = variants[0].shape
    return np.stack(variants, axis=1).reshape(count * len(variants), *shape)


def on_host(array: Any, what: str) -> np.ndarray:
    """The values of an array; of random keys their data."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        got = f"{described(array)}, of which this process has only a part"
        expected = "arrays that are entirely in this process"
        fix = "each process must write the features of its own batches into its own directory"
        raise value_error("an array is spread over several processes", at=what, got=got, expected=expected, fix=fix)
    if is_key(array):
        array = jax.random.key_data(array)
    return np.asarray(array)
