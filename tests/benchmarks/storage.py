"""The speed of features on disk, beside TensorStore and ``numpy.memmap``; and of ``fz.fingerprint``, beside a sum.

Features of 50,000 examples of 4 kB, and of 1,000 of 400 kB, in batches of 256 and of 16: written (for ours with the
computation, which is a small product), read in order and in batches of a random order, of which each is dropped before
the next, all from the cache of the operating system. TensorStore stores zarr with checksums, in files of 16 kB or of
one example. ``numpy.memmap`` has no checksums, and nothing is forced to the disk. The table shows MB/s, in brackets the
ratio to TensorStore.

Then: a batch of one example at the end of 12,000, beside one at the start; and the bytes of float32 that
``fz.fingerprint`` reads in a second, beside ``jnp.sum``.

Run with ``python tests/benchmarks/storage.py``.
"""

import itertools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import measure

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

import optax_freeze as fz
from optax_freeze import features

SIZES = {"50,000 of 4 kB": (50_000, 1_024, 256), "1,000 of 400 kB": (1_000, 102_400, 16)}


def loss(params: Any, x: Any) -> jax.Array:
    return jnp.sum(jnp.tanh(x @ params["encoder"]) * params["head"])


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def each_alone(read: Callable[[Any], Any], indices: Any) -> None:
    for index in indices:
        read(index)


def ours(path: pathlib.Path, count: int, width: int, batch: int) -> Iterator[Any]:
    """Yields what writes the features, then what reads some of them."""
    params = {"encoder": jnp.ones((4, width)), "head": jnp.ones(width)}
    once = fz.precompute(loss, "encoder", example_axis=0)
    batches = [np.random.default_rng(i).normal(size=(batch, 4)).astype(np.float32) for i in range(count // batch)]
    yield lambda: features.write(path, once, params, batches, progress=False)
    found = features.read(path)
    yield lambda index: found[index][0]


def tensorstore(path: pathlib.Path, count: int, width: int, batch: int) -> Iterator[Any]:
    rows = max(2**14 // (4 * width), 1)
    metadata = {
        "shape": [count // batch * batch, width],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [rows, width]}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}, "metadata": metadata, "create": True}
    array, store = np.random.default_rng(0).normal(size=(batch, width)).astype(np.float32), ts.open(spec).result()

    def write() -> None:
        for i in range(count // batch):
            store[i * batch : (i + 1) * batch].write(array).result()

    yield write
    yield lambda index: store[index].read().result()


def memmap(path: pathlib.Path, count: int, width: int, batch: int) -> Iterator[Any]:
    array = np.random.default_rng(0).normal(size=(batch, width)).astype(np.float32)

    def write() -> None:
        stored = np.memmap(path, np.float32, "w+", shape=(count // batch * batch, width))
        for i in range(count // batch):
            stored[i * batch : (i + 1) * batch] = array
        stored.flush()

    yield write
    stored = np.memmap(path, np.float32, "r", shape=(count // batch * batch, width))
    yield lambda index: np.array(stored[index])


def speeds(way: Any, count: int, width: int, batch: int) -> list[float]:
    """MB/s of writing, of reading in order, and of reading in a random order: medians of three runs."""
    total, each = count // batch * batch, count // batch
    slices = [slice(i * batch, (i + 1) * batch) for i in range(each)]
    shuffled = np.random.default_rng(0).permutation(total).reshape(each, batch)
    runs = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as directory:
            steps = way(pathlib.Path(directory) / "stored", count, width, batch)
            taken = [seconds(next(steps))]
            read = next(steps)
            taken += [seconds(lambda i=indices: each_alone(read, i)) for indices in (slices, shuffled)]  # noqa: B023
            runs.append([4e-6 * total * width / each for each in taken])
    return [statistics.median(each) for each in zip(*runs, strict=True)]


def growth() -> float:
    """The time of a batch of one example at the end of 12,000, divided by that of one at the start."""
    params = {"encoder": jnp.ones((4, 8)), "head": jnp.ones(8)}
    once, times = fz.precompute(loss, "encoder", example_axis=0), []

    def batches() -> Iterator[Any]:
        for i in range(12_000):
            times.append(time.perf_counter())
            yield np.full((1, 4), i, np.float32)

    with tempfile.TemporaryDirectory() as directory:
        features.write(f"{directory}/stored", once, params, batches(), progress=False)
    taken = [b - a for a, b in itertools.pairwise(times)]
    return statistics.median(taken[-2_000:]) / statistics.median(taken[1_000:3_000])


def fingerprint() -> tuple[float, float]:
    """GB/s of ``fz.fingerprint`` and of ``jnp.sum``, of 1 GiB of float32: medians of five runs."""
    params = {f"layer {i}": jnp.ones((2**11, 2**13)) * i for i in range(16)}
    found = []
    for function in (jax.jit(lambda p: fz.fingerprint(p, True)), jax.jit(lambda p: jax.tree.map(jnp.sum, p))):
        _, *taken = [seconds(lambda: jax.block_until_ready(function(params))) for _ in range(6)]  # noqa: B023
        found.append(2**30 / 1e9 / statistics.median(taken))
    return found[0], found[1]


def main() -> None:
    ways = {"optax_freeze": ours, "TensorStore": tensorstore, "numpy.memmap": memmap}
    for name, size in SIZES.items():
        table = measure.table(f"{name}: MB/s (of TensorStore's)", timed=["write", "in order", "shuffled"], label="way")
        found = {way: speeds(function, *size) for way, function in ways.items()}
        for way, row in found.items():
            peers = zip(row, found["TensorStore"], strict=True)
            table.add_row(way, *(f"{mine:,.0f} ({mine / peer:.2f})" for mine, peer in peers))
        measure.show(table)
    table = measure.table("Others", timed=["ours", "beside", "ratio"], label="what")
    mine, plain = fingerprint()
    table.add_row("a batch of one example: the last of 12,000, beside the first", "", "", f"{growth():.2f}")
    table.add_row("fz.fingerprint, beside jnp.sum: GB/s", f"{mine:.1f}", f"{plain:.1f}", f"{mine / plain:.2f}")
    measure.show(table)


if __name__ == "__main__":
    main()
