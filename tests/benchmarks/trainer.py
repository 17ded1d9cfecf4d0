"""Memory of fine-tuning an 8B decoder in the training step of a trainer on 4 chips of v5e, from the compiler.

The decoder and what is trainable are those of ``scale.py``. All steps donate the full tree of parameters and the
optimizer state:

* ``own step``: ``fz.train_step``, with the clip inside ``fz.freeze``;
* ``loss and optimizer``: the step of a trainer that was given ``fz.freeze_loss(loss, frozen)`` and, after a clip of its
  own, ``fz.freeze(adamw, frozen)``: ``jax.value_and_grad``, ``optax.apply_updates``, and the norm of the gradient as a
  metric;
* ``optimizer``: the same step without ``fz.freeze_loss``.

Run with ``python tests/benchmarks/trainer.py``.
"""

from collections.abc import Callable
from typing import Any

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import jax.numpy as jnp
import optax
import scale
from decoder import ADAMW

import optax_freeze as fz

KINDS = ("last block and head", "16 new tokens")
CLIP, ADAM = optax.clip_by_global_norm(1.0), optax.adamw(1e-5, mu_dtype=jnp.float32)


def own_step(loss: Callable[..., jax.Array], params: Any, which: Any) -> scale.Step:
    tx = fz.freeze(ADAMW, scale.spec(which), full_updates=False)
    return (params, scale.in_float32(tx, params)), fz.train_step(loss, tx)


def of_optimizer(loss: Callable[..., jax.Array], params: Any, which: Any) -> scale.Step:
    tx = optax.chain(CLIP, fz.freeze(ADAM, scale.spec(which)))

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, optax.tree.norm(grads))

    return (params, scale.in_float32(tx, params)), step


def of_both(loss: Callable[..., jax.Array], params: Any, which: Any) -> scale.Step:
    return of_optimizer(fz.freeze_loss(loss, scale.spec(which)), params, which)


WAYS = {"own step": own_step, "loss and optimizer": of_both, "optimizer": of_optimizer}
scale.WAYS |= WAYS


def main() -> None:
    if scale.compiled_a_cell():
        return
    table = measure.table("8B on 4 chips of v5e: GiB per chip", *WAYS, label="trainable")
    for kind in KINDS:
        found = (scale.compile_apart(scale.Cell("8B", "v5e", 4, kind, way), False, __file__) for way in WAYS)
        table.add_row(kind, *(f"{memory.total:.2f}" for memory in found))
    measure.show(table)


if __name__ == "__main__":
    main()
