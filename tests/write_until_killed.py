"""Writes features until it is killed. Run by `test_features.py`."""

import sys
import time

import jax
import jax.numpy as jnp

import optax_freeze as fz
from optax_freeze import features

PARAMS = {"encoder": jax.random.normal(jax.random.key(0), (6, 3000)), "head": jnp.ones((3000, 2))}
BATCHES = [jax.random.normal(jax.random.key(i), (50 if i < 40 else 20, 6)) for i in range(41)]
ONCE = fz.precompute(
    lambda params, x: jnp.mean(jnp.tanh(x @ params["encoder"]) @ params["head"]), "encoder", example_axis=0
)


def told():
    for i, batch in enumerate(BATCHES):
        print(i, flush=True)
        time.sleep(0.01)
        yield batch


if __name__ == "__main__":
    features.write(sys.argv[1], ONCE, PARAMS, told(), progress=False)
