"""Fine-tune a model whose frozen weights do not fit on the chips: they stay in the host's memory.

The last block, the norm and the head of a decoder of Llama 3's shape train. First comes a plan,
made from shapes alone: the memory per chip with and without ``fz.offload``, for 8B, 70B and 405B.
Then a small decoder trains twice, with its blocks on the device and in the host's memory: losses
and parameters are equal up to rounding. If the ``libtpu`` package is installed, the TPU compiler
confirms the size of these blocks on the host.

Run with ``python examples/finetune_beyond_memory.py``.
"""

from typing import Any

import jax
import optax

import optax_freeze as fz

FROZEN = {"blocks": fz.rows(slice(0, -1)), "embed": True, "norm": False, "head": False}


def on_host(params: Any, min_bytes: int = 2**20) -> Any:
    """The parameters, with stacks of frozen blocks in the host's memory."""
    return fz.offload(params, FROZEN, min_bytes=min_bytes)


def train(loss: Any, params: Any, batches: Any) -> tuple[Any, list[jax.Array]]:
    """Trains, one step a batch; a block comes to the device when a step needs it."""
    (trainable, rest), tx = fz.partition(params, FROZEN), optax.adamw(1e-3)

    @jax.jit
    def step(trainable: Any, state: Any, rest: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(fz.restrict(loss, rest))(trainable, batch)
        updates, state = tx.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state, value

    state, losses = tx.init(trainable), []
    for batch in batches:
        trainable, state, value = step(trainable, state, rest, batch)
        losses.append(value)
    return fz.combine(trainable, rest), losses


# %%
import importlib.util
import os

import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from rich.console import Console
from rich.table import Table

LLAMA = {"8B": (32, 4096, 14336), "70B": (80, 8192, 28672), "405B": (126, 16384, 53248)}
CHIPS = [("8B", 1), ("8B", 4), ("70B", 4), ("70B", 8), ("70B", 16), ("405B", 16), ("405B", 32), ("405B", 64)]
TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}


def shapes(layers: int, width: int, hidden: int, kv: int = 1024, vocabulary: int = 128_256, chips: int = 1) -> Any:
    """Shapes of the parameters in bfloat16, the blocks stacked, on a mesh that needs no devices."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(*(None,) * (len(shape) - 1), "chips")
        return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(AbstractMesh((chips,), ("chips",)), spec))

    columns = {"q": width, "k": kv, "v": kv, "out": width, "gate_up": 2 * hidden}
    blocks = {name: leaf(layers, width, n) for name, n in columns.items()}
    blocks |= {"down": leaf(layers, hidden, width), "norms": leaf(layers, 2, width)}
    return {"blocks": blocks, "embed": leaf(vocabulary, width), "norm": leaf(1, width), "head": leaf(width, vocabulary)}


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of the next token, in nats. It does not mention freezing or the host."""

    @jax.checkpoint
    def block(x: jax.Array, p: Any) -> Any:
        h = jax.nn.standardize(x) * p["norms"][0]
        q, k, v = ((h @ p[name]).reshape(*h.shape[:2], -1, 32) for name in "qkv")
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
        gate, up = jnp.split(jax.nn.standardize(x) * p["norms"][1] @ p["gate_up"], 2, -1)
        return x + (jax.nn.silu(gate) * up) @ p["down"], None

    x, _ = jax.lax.scan(block, params["embed"][tokens[:, :-1]], params["blocks"])
    logits = jax.nn.standardize(x) * params["norm"] @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), tokens[:, 1:]).mean()


def planned(params: Any) -> tuple[str, ...]:
    """GiB per chip: all in HBM; with ``fz.offload``, in HBM and on the host. Activations come on top."""
    params = jax.tree.map(lambda x: x.update(shape=x.sharding.shard_shape(x.shape)), on_host(params))
    chip = fz.summary(params, FROZEN)
    trains = (2 + 2 + 2 * 4) * chip.trainable_elements  # bfloat16 weights and gradients, AdamW's moments in float32
    stays = sum(row.frozen_bytes for row in chip.rows if not row.host_bytes)
    return tuple(f"{x / 2**30:.1f}" for x in (chip.frozen_bytes + trains, stays + trains, chip.host_bytes))


def by_tpu_compiler(params: Any) -> str:
    """Bytes of arguments in the host's memory, as XLA for TPU counts them; it needs no TPU."""
    os.environ.update({"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"} | TPU | os.environ)
    chip = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0])
    params = on_host(jax.tree.map(lambda x: x.update(sharding=chip), params), min_bytes=0)
    # JAX traces a shape as if its array were on the device.
    host = lambda p: {**p, "blocks": jax.device_put(p["blocks"], jax.memory.Space.Host)}
    grads = jax.jit(lambda p, tokens: fz.grad(loss, FROZEN)(host(p), tokens))
    memory: Any = grads.lower(params, jax.ShapeDtypeStruct((1, 33), "int32", sharding=chip)).compile().memory_analysis()
    return f"{memory.host_argument_size_in_bytes:,}"


def main() -> None:
    plan = Table("", "chips", "all in HBM", "offloaded: HBM", "host", title="GiB per chip, planned from shapes")
    for name, chips in CHIPS:
        plan.add_row(name, str(chips), *planned(shapes(*LLAMA[name], chips=chips)))
    normal, small = np.random.default_rng(0).normal, shapes(6, 128, 256, kv=64, vocabulary=128)
    params = jax.tree.map(lambda x: jnp.array(normal(size=x.shape) / x.shape[-2] ** 0.5, x.dtype), small)
    batches = np.random.default_rng(0).integers(0, 64, (40, 8, 1)) + np.arange(33)  # sequences that count up
    runs = [train(loss, params, batches), train(loss, host := on_host(params, min_bytes=0), batches)]
    old, new = jax.device_get(runs)
    differ = max(jax.tree.leaves(jax.tree.map(lambda a, b: abs(a - b).max(), old, new)))
    fz.assert_frozen(host, runs[1][0], FROZEN)
    table = Table("a small decoder", "on the device", "from the host")
    table.add_row("first and last loss", *(f"{losses[0]:.3f}, {losses[-1]:.3f}" for _, losses in runs))
    table.add_row("bytes on the host", *(f"{fz.summary(each, FROZEN).host_bytes:,}" for each in (params, host)))
    of_tpu = by_tpu_compiler(small) if importlib.util.find_spec("libtpu") else "left out: no libtpu"
    table.add_row("the same, by the TPU compiler", "", of_tpu)
    table.add_row("frozen weights", *(f"{fz.fingerprint(after, FROZEN)[0]:08x}" for after, _ in runs))
    table.add_row("losses and parameters differ by", "", f"at most {differ:.0e}")
    Console().print(plan, table)


if __name__ == "__main__":
    main()
