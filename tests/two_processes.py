"""One of two processes, four devices each: trains, saves and restores. Run by `test_checkpoint.py`."""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
process, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze import checkpoint

FROZEN = fz.rules({"encoder": True, "embed": fz.rows(slice(0, 56))})
SHAPES = {"embed": (64, 8), "encoder": (8, 16), "head": (16, 8)}


def loss(params, tokens):
    return jnp.mean((jnp.tanh(params["embed"][tokens] @ params["encoder"]) @ params["head"] - 1.0) ** 2)


def model(mesh, spec):
    def leaf(shape, scale):
        array = np.sin(np.arange(np.prod(shape), dtype=np.float32) * scale).reshape(shape)
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda at: array[at])

    return {path: leaf(shape, 0.1 + i) for i, (path, shape) in enumerate(SHAPES.items())}


def say(name, value):
    print(f"{name}: {np.asarray(value).tobytes().hex()}", flush=True)


def whole(tree):
    return jax.device_get(jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(tree))


mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
base = model(mesh, P("data", "model"))
tx = fz.freeze(optax.adam(0.1), FROZEN)
layout = fz.state_shardings(tx, base)
state = jax.jit(tx.init, out_shardings=layout)(base)


@jax.jit
def step(params, state, tokens):
    grads = fz.grad(loss, FROZEN)(params, tokens)
    updates, state = tx.update(grads, state, params)
    return fz.apply_updates(params, updates, FROZEN), state


params = base
for _ in range(3):
    params, state = step(params, state, jnp.arange(64))

fz.assert_frozen(base, params, FROZEN)
say("fingerprint", fz.fingerprint(params, FROZEN))
checkpoint.save(directory, params, FROZEN, step=3, opt_state=state)

other = jax.make_mesh((8,), ("all",), axis_types=(AxisType.Auto,))
again = model(other, P(None, "all"))
template = jax.jit(tx.init, out_shardings=fz.state_shardings(tx, again))(again)
restored, restored_state = checkpoint.restore(directory, again, opt_state=template, frozen=FROZEN)
assert all(leaf.sharding.mesh == other for leaf in jax.tree.leaves((restored, restored_state)))
say("fingerprint", fz.fingerprint(restored, FROZEN))
for got, expected in zip(jax.tree.leaves((restored, restored_state)), jax.tree.leaves((params, state)), strict=True):
    assert whole(got).tobytes() == whole(expected).tobytes()

try:
    checkpoint.save(directory, params, "encoder" if process else FROZEN, step=4)
except ValueError as error:
    print(f"refused: {error}", flush=True)
print("latest:", checkpoint.latest_step(directory), flush=True)
