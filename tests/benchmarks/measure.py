"""Figures of compiled steps, from the TPU compiler without a TPU, and tables of them.

FLOPs and bytes are exact and repeatable. Times are mostly ratios of alternating runs in one process; their columns are
in italics, on the terminal and in the files of ``tests/benchmarks/results``.
"""

import functools
import importlib.util
import json
import os
import pathlib
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table
from rich.text import Text

RESULTS = "BENCHMARK_RESULTS"
TIMED = "italic"


class Figures(NamedTuple):
    """FLOPs of one program; the other figures are bytes."""

    flops: float
    accessed: float
    temporary: int
    output: int
    executable: int
    argument: int


@functools.cache
def tpu_sharding(topology: str = "v5e:2x2") -> jax.sharding.Sharding | None:
    """One TPU chip to compile for, or None if ``libtpu`` is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        return None
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return jax.sharding.SingleDeviceSharding(chips[0])


def on(sharding: jax.sharding.Sharding | None, tree: Any) -> Any:
    """The shapes of a tree, with this sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def figures(fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (0, 1), tpu: bool = True) -> Figures:
    """The compiler's figures of ``fn`` for one TPU chip, if ``libtpu`` is installed; a loop's body is counted once."""
    compiled = jax.jit(fn, donate_argnums=donate).lower(*on(tpu_sharding() if tpu else None, args)).compile()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    assert cost, "the compiler gives no cost analysis"
    assert memory, "the compiler gives no memory analysis"
    return Figures(
        cost["flops"],
        cost["bytes accessed"],
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        memory.generated_code_size_in_bytes,
        memory.argument_size_in_bytes,
    )


def stepping(value_and_grad: Callable[..., Any], tx: Any, apply: Callable[..., Any] = optax.apply_updates) -> Any:
    """A training step: ``step(params, state, *others)`` returns the new parameters, the new state and the value."""

    def step(params: Any, state: Any, *others: Any) -> Any:
        value, grads = value_and_grad(params, *others)
        updates, state = tx.update(grads, state, params)
        return apply(params, updates), state, value

    return step


def with_ratio(figure: float, base: float, form: str, ratio: str = ".2f") -> str:
    return f"{figure:{form}} ({figure / base:{ratio}})"


def nbytes(shapes: Any) -> int:
    """Bytes of all arrays of a tree of shapes."""
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(shapes))


def clock() -> float:
    """Seconds; on the CPU backend CPU time, which other programs hardly affect."""
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()


def least_in_turn(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The minimum seconds of each call, in alternating runs, without garbage collection."""
    run = lambda call: timeit.timeit(lambda: jax.block_until_ready(call()), timer=clock, number=1)  # noqa: E731
    found = [{name: run(call) for name, call in calls.items()} for _ in range(rounds)]
    return {name: min(times[name] for times in found) for name in calls}


def tracing_in_turn(calls: Mapping[str, Callable[[], Any]], rounds: int = 5) -> dict[str, float]:
    """The median CPU seconds of each call with empty caches, in alternating runs, without garbage collection."""

    def run(call: Callable[[], Any]) -> float:
        jax.clear_caches()
        return timeit.timeit(call, timer=time.process_time, number=1)

    _, *found = [{name: run(call) for name, call in calls.items()} for _ in range(1 + rounds)]
    return {name: statistics.median(times[name] for times in found) for name in calls}


def busy_seconds(profile: Any) -> float:
    """Seconds of a ``jax.profiler.ProfileData`` in which at least one stream of a GPU was busy.

    NaN if the profile has no events of a GPU.
    """
    events = sorted(
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )
    busy, until = 0.0, 0.0
    for start, end in events:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e9 if events else float("nan")


def table(title: str, *columns: str, timed: Sequence[str] = (), label: str = "") -> Table:
    """An empty table: a column of labels, columns of exact figures, and columns of times measured here."""
    empty = Table(title=title)
    empty.add_column(label)
    for column in columns:
        empty.add_column(column, justify="right")
    for column in timed:
        empty.add_column(column, justify="right", style=TIMED, header_style=f"bold {TIMED}")
    return empty


def show(result: Table | str) -> None:
    """Prints a table or a sentence, and adds it to the JSON file named by ``BENCHMARK_RESULTS``, if set."""
    Console(width=150).print(result, highlight=False)
    if path := os.environ.get(RESULTS):
        file = pathlib.Path(path)
        shown = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
        shown.append(result if isinstance(result, str) else contents(result))
        file.write_text(json.dumps(shown), encoding="utf-8")


def contents(table: Table) -> dict[str, Any]:
    """The title, the columns, those of times, and the rows of a table, without markup."""
    plain = lambda markup: Text.from_markup(str(markup)).plain.strip()  # noqa: E731
    return {
        "title": plain(table.title),
        "columns": [plain(column.header) for column in table.columns],
        "timed": [plain(column.header) for column in table.columns if column.style == TIMED],
        "rows": [list(map(plain, row)) for row in zip(*(column.cells for column in table.columns), strict=True)],
    }
