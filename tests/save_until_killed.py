"""Saves checkpoints until it is killed. Run by `test_checkpoint.py`."""

import sys

import jax
import jax.numpy as jnp
import optax

import optax_freeze as fz
from optax_freeze import checkpoint

FROZEN = "encoder"
TX = fz.freeze(optax.trace(0.5), FROZEN)


def at_step(step):
    """Parameters and a state whose values depend on the step."""
    params = {"encoder": jnp.arange(50_000.0), "head": {str(i): jnp.full(5_000, step + i / 8) for i in range(8)}}
    return params, jax.tree.map(lambda moment: moment - step, TX.init(params))


if __name__ == "__main__":
    for step in range(10_000):
        params, state = at_step(step)
        checkpoint.save(sys.argv[1], params, FROZEN, step=step, opt_state=state, wait=step % 2 == 0)
        print(step, flush=True)
