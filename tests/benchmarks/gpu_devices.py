"""Descriptions of GPUs for which XLA compiles without having one, and the devices of meshes of them.

They hold what the compiler asks of a device: the numbers in XLA's list of GPUs (``xla/backends/gpu/target_config``) for
the H100 and the A100, and NVIDIA's for the GeForce RTX 4090, which is not in this list. Compiling needs JAX's CUDA
packages and no GPU.
"""

import os
from typing import Any, NamedTuple

from jax.experimental import topologies


class Gpu(NamedTuple):
    """What differs between the GPUs; sizes in bytes."""

    name: str
    memory: int
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_memory: int
    shared_memory_per_block: int
    l2_cache: int
    bandwidth: int
    clock: float

    @property
    def config(self) -> str:
        """The description as XLA reads it."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {self.threads_per_core}
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory}
  shared_memory_per_block_optin: {self.shared_memory_per_block} registers_per_core_limit: 65536
  registers_per_block_limit: 65536 core_count: {self.cores} fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024 thread_dim_limit_z: 64 memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2_cache}
  clock_rate_ghz: {self.clock} device_memory_size: {self.memory} name: "{self.name}"
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{self.name}"
"""


GPUS = {
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", 84942979072, (9, 0), 132, 128, 2048, 233472, 232448, 52428800, 3352320000000, 1.98
    ),
    "a100-40": Gpu(
        "NVIDIA A100-SXM4-40GB", 42331013120, (8, 0), 108, 64, 2048, 167936, 166912, 41943040, 1555200000000, 1.41
    ),
    "rtx4090": Gpu(
        "NVIDIA GeForce RTX 4090", 25393692672, (8, 9), 128, 128, 1536, 102400, 101376, 75497472, 1008000000000, 2.52
    ),
}
_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""There is no GPU on which the compiler could try algorithms."""


def devices(kind: str, count: int) -> list[Any]:
    """``count`` GPUs of one kind, connected with each other, to compile for."""
    if _FLAGS not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"  # read by the first compilation
    return topologies.get_topology_desc(
        platform="cuda", target_config=GPUS[kind].config, topology=f"1x1x{count}"
    ).devices
