"""A decoder of Llama 3's shape on a mesh of TPU chips, given by shapes alone, for the memory benchmarks."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder of Llama 3's shape with stacked layers, on a mesh of TPU chips."""

    width: int
    layers: int
    hidden: int
    heads: int
    topology: str
    tensor_parallel: int
    chips: int | None = None
    """The number of chips in the mesh; None means all chips of the topology."""
    kv_heads: int = 8
    vocabulary: int = 128_256
    length: int = 4096
    chunk: int = 256

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh of these devices, by default of the TPU chips of the topology."""
        if devices is None:
            devices = topologies.get_topology_desc(platform="tpu", topology_name=self.topology).devices
        chips = np.array(devices[: self.chips])
        return Mesh(chips.reshape(-1, self.tensor_parallel), ("fsdp", "tp"))

    def params(self, mesh: Mesh) -> Any:
        """Shapes of the parameters, with shardings."""
        d, f, n = self.width, self.hidden, self.layers
        head = d // self.heads

        def leaf(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

        into, out = (None, "fsdp", "tp"), (None, "tp", "fsdp")
        blocks = {
            "q": leaf((n, d, self.heads * head), *into),
            "k": leaf((n, d, self.kv_heads * head), *into),
            "v": leaf((n, d, self.kv_heads * head), *into),
            "o": leaf((n, self.heads * head, d), *out),
            "gate": leaf((n, d, f), *into),
            "up": leaf((n, d, f), *into),
            "down": leaf((n, f, d), *out),
            "before": leaf((n, d)),
            "between": leaf((n, d)),
        }
        embed = leaf((self.vocabulary, d), "tp", "fsdp")
        return {"embed": embed, "blocks": blocks, "norm": leaf((d,)), "head": leaf((d, self.vocabulary), "fsdp", "tp")}

    def tokens(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """One sequence per data shard."""
        batch = mesh.devices.size // self.tensor_parallel
        return jax.ShapeDtypeStruct((batch, self.length), jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))

    def loss(self, mesh: Mesh, dot: Callable[..., jax.Array] = jnp.matmul) -> Callable[..., jax.Array]:
        """Mean cross entropy; ``params["blocks"]`` is one stack or several, and ``dot`` multiplies by a matrix.

        ``loss(params, tokens, x)`` starts from ``x``, the residual stream before the blocks.
        """
        head, groups = self.width // self.heads, self.heads // self.kv_heads

        def on(x: jax.Array, *spec: str | None) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

        def normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
            mean = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
            return x * jax.lax.rsqrt(mean + 1e-5).astype(x.dtype) * scale

        def block(x: jax.Array, p: Any) -> jax.Array:
            h = normalise(x, p["before"])
            q = dot(h, p["q"]).reshape(*h.shape[:2], self.kv_heads, groups, head)
            k, v = (dot(h, p[name]).reshape(*h.shape[:2], self.kv_heads, head) for name in "kv")
            if self.kv_heads % self.tensor_parallel == 0:
                q = on(q, "fsdp", None, "tp", None, None)

            @jax.checkpoint
            def attend(q: jax.Array) -> jax.Array:
                scores = jnp.einsum("bqgrh,bkgh->bgrqk", q, k).astype(jnp.float32) / np.sqrt(head)
                return jnp.einsum("bgrqk,bkgh->bqgrh", jax.nn.softmax(scores, -1).astype(v.dtype), v)

            chunks = q.reshape(q.shape[0], self.length // self.chunk, self.chunk, *q.shape[2:]).swapaxes(0, 1)
            mixed = jax.lax.map(attend, chunks).swapaxes(0, 1)
            x = x + dot(mixed.reshape(x.shape[0], self.length, self.heads * head), p["o"])
            h = normalise(x, p["between"])
            return on(x + dot(jax.nn.silu(dot(h, p["gate"])) * dot(h, p["up"]), p["down"]), "fsdp", None, None)

        def loss(params: Any, tokens: jax.Array, x: jax.Array | None = None) -> jax.Array:
            if x is None:
                x = on(jnp.take(params["embed"], tokens, axis=0), "fsdp", None, None)
            stacks = params["blocks"] if isinstance(params["blocks"], list) else [params["blocks"]]
            for stack in stacks:
                x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(block)(x, p), None), x, stack)
            logits = on(normalise(x, params["norm"]) @ params["head"], "fsdp", None, "tp").astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        return loss


SHAPES = {"8B": (4096, 32, 14336, 32), "70B": (8192, 80, 28672, 64), "405B": (16384, 126, 53248, 128)}
"""Width, layers, hidden width and heads of each size."""

ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, mu_dtype=jnp.float32))


def on_device(params: Any) -> Any:
    """The shapes with all arrays in device memory."""
    return jax.tree.map(lambda x: x.update(sharding=x.sharding.with_memory_kind("device")), params)


def sharded_like(params: Any, tree: Any) -> Any:
    """The shapes of a tree that has any subtree in place of each leaf of ``params``, sharded like this leaf."""

    def place(param: jax.ShapeDtypeStruct, node: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=param.sharding), node)

    return jax.tree.map(place, params, tree)


def partition(params: Any, frozen: Any) -> tuple[Any, Any]:
    """The shapes of ``fz.partition``, sharded like their leaves, with trainable parts in device memory."""
    trainable, rest = jax.eval_shape(lambda params: fz.partition(params, frozen), params)
    return sharded_like(on_device(params), trainable), sharded_like(params, rest)


def adamw_state(trainable: Any, mesh: Mesh) -> Any:
    """The shapes of the state of ``ADAMW``; moments are float32 and sharded like their parameters."""
    return optax.tree_map_params(
        ADAMW,
        lambda x, p: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=p.sharding),
        jax.eval_shape(ADAMW.init, trainable),
        trainable,
        transform_non_params=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())),
    )
