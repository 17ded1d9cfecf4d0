"""The arrays of stored features, by TensorStore."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from optax_freeze._errors import described, in_one_line, value_error
from optax_freeze._verify.base_record import is_key, key_impl
from optax_freeze.features._record import Record, damaged

_FILE_BYTES, _READ_BYTES = 2**20, 2**14
"""The bytes of one feature in a file, and in a block of it, which is read as a whole."""


def append(stores: list[Any], record: Record, arrays: Sequence[np.ndarray]) -> None:
    start, stop = record.entries, record.entries + len(arrays[0])
    writes = []
    for i, array in enumerate(arrays):
        stores[i] = stores[i].resize(exclusive_max=[stop, *array.shape[1:]]).result()
        writes.append(stores[i][start:stop].write(array))
    for each in writes:
        each.result()


def open_array(where: str, record: Record, i: int, batch: int | None = None) -> Any:
    """The array of a feature: to read it, or to write about ``batch`` entries at a time.

    A file holds about 1 MiB, in blocks of about 16 KiB that are read one by one and have a checksum each. Files of
    zeros are written too: TensorStore otherwise omits them, and reads a missing file as zeros.
    """
    dtype, shape = _as_stored(record.features[i])
    spec: dict[str, Any] = {"driver": "zarr3", "kvstore": {"driver": "file", "path": os.path.join(where, str(i))}}
    if batch is None:
        spec |= {"fill_missing_data_reads": False}
    else:
        size = max(dtype.itemsize * int(np.prod(shape)), 1)
        few = min(max(_READ_BYTES // size, 1), max(batch, 1))
        many = few * max(min(_FILE_BYTES // size, batch) // few, 1)
        by_few, by_many = ([n, *(max(axis, 1) for axis in shape)] for n in (few, many))
        checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        codec = {"chunk_shape": by_few, "codecs": checked, "index_codecs": checked}
        metadata = {
            "shape": [0, *shape],
            "data_type": ts.dtype(dtype).name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": by_many}},
            "codecs": [{"name": "sharding_indexed", "configuration": codec}],
        }
        begins = not record.batches
        spec |= {"store_data_equal_to_fill_value": True}
        spec |= {"metadata": metadata, "create": True, "delete_existing": True} if begins else {}
    try:
        store = ts.open(spec).result()
    except ValueError as error:
        raise damaged(where, in_one_line(error)) from error
    stored = f"{store.dtype.name}{list(store.shape)}"
    fits = len(store.shape) == len(shape) + 1 and store.shape[1:] == shape and store.dtype.numpy_dtype == dtype
    enough = fits and (store.shape[0] == record.entries if batch is None else store.shape[0] >= record.entries)
    if not enough:
        expected = f"{ts.dtype(dtype).name}{[record.entries, *shape]}"
        raise damaged(os.path.join(where, str(i)), stored, expected)
    return store


def _as_stored(struct: Any) -> tuple[np.dtype, tuple[int, ...]]:
    """The dtype and shape in which a feature of one example is stored: of a key its data."""
    if is_key(struct):
        struct = jax.eval_shape(jax.random.key_data, struct)
    return struct.dtype, struct.shape


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
