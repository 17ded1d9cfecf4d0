"""Figures of a compiled step: the TPU compiler's own, without a TPU, and times on the device that is there.

The compiler's figures are exact and repeatable; times are given as ratios, measured in one run.
"""

import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies


class Figures(NamedTuple):
    """Of one program: FLOPs, then bytes."""

    flops: float
    accessed: float
    temporary: int
    output: int
    executable: int


def tpu_sharding(topology: str = "v5e:2x2") -> jax.sharding.Sharding | None:
    """One chip of a TPU to compile for, or None without the ``libtpu`` wheel."""
    if importlib.util.find_spec("libtpu") is None:
        return None
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return jax.sharding.SingleDeviceSharding(chips[0])


def on(sharding: jax.sharding.Sharding | None, tree: Any) -> Any:
    """Shapes of a tree, placed."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def figures(fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (0, 1)) -> Figures:
    """What the compiler says of ``fn``; a loop's body is counted once."""
    compiled = jax.jit(fn, donate_argnums=donate).lower(*args).compile()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    assert cost, "the compiler gives no cost analysis"
    assert memory, "the compiler gives no memory analysis"
    return Figures(
        cost["flops"],
        cost["bytes accessed"],
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        memory.generated_code_size_in_bytes,
    )


def nbytes(shapes: Any) -> int:
    """Bytes of all arrays of a tree of shapes."""
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(shapes))


def compile_seconds(fn: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Seconds to trace, lower and compile for the default device, and the compiled step (first two donated)."""
    start = time.perf_counter()
    compiled = jax.jit(fn, donate_argnums=(0, 1)).lower(*args).compile()
    return time.perf_counter() - start, compiled


def step_seconds(compiled: Any, first: Any, second: Any, *rest: Any, steps: int = 4) -> float:
    """The median seconds of a step that returns its two donated arguments first."""
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        first, second, *_ = jax.block_until_ready(compiled(first, second, *rest))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
