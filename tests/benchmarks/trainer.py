"""Memory of fine-tuning an 8B decoder in the training step of a trainer on 4 chips of v5e, from the compiler.

The decoder and what is trainable are those of ``scale.py``. All steps donate the full tree of parameters and the
optimizer state:

* ``own step``: ``fz.train_step``, with the clip inside ``fz.freeze``;
* ``loss and optimizer``: the step of a trainer that was given ``fz.freeze_loss(loss, frozen)`` and, after a clip of its
  own, ``fz.freeze(adamw, frozen)``: ``jax.value_and_grad``, ``optax.apply_updates``, and the norm of the gradient as a
  metric;
* ``optimizer``: the same step without ``fz.freeze_loss``.

Then updates of frozen rows, given to ``optax.apply_updates``: the bytes that the compiled addition to a donated leaf
accesses, as parts of the leaf, and whether ``-0.0``, infinity and NaN in frozen rows keep their bits even if the
compiler keeps the addition. ``fz.freeze`` gives the first, the best of those that always keep them. XLA folds an
addition of ``0.0`` around a scatter-add, and then writes only the rows, but not on each device, nor if anything else
reads the update. ``fz.apply_updates`` of the rows needs no fold; a scatter on the CPU is counted with the whole leaf.

Run with ``python tests/benchmarks/trainer.py``.
"""

from collections.abc import Callable
from typing import Any

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
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


def _at_the_end(leaf: Any, rows: Any) -> tuple[int, ...]:
    return (len(leaf) - len(rows), *[0] * (leaf.ndim - 1))


UPDATES: dict[str, Callable[..., Any]] = {
    "pad with -0.0 (fz.freeze)": lambda leaf, rows: jax.lax.pad(
        rows, jnp.asarray(-0.0, leaf.dtype), [(start, 0, 0) for start in _at_the_end(leaf, rows)]
    ),
    "where, else -0.0": lambda leaf, rows: jnp.where(
        (jnp.arange(len(leaf)) >= len(leaf) - len(rows)).reshape(-1, *[1] * (leaf.ndim - 1)),
        jnp.pad(rows, [(start, 0) for start in _at_the_end(leaf, rows)]),
        jnp.asarray(-0.0, leaf.dtype),
    ),
    "scatter into -0.0": lambda leaf, rows: jnp.full_like(leaf, -0.0).at[_numbers(leaf, rows)].set(rows),
    "scatter-add to -0.0": lambda leaf, rows: jnp.full_like(leaf, -0.0).at[_numbers(leaf, rows)].add(rows),
    "scatter-add to 0.0": lambda leaf, rows: jnp.zeros_like(leaf).at[_numbers(leaf, rows)].add(rows),
    "dynamic-update-slice of 0.0": lambda leaf, rows: jax.lax.dynamic_update_slice(
        jnp.zeros_like(leaf), rows, _at_the_end(leaf, rows)
    ),
    "the new leaf minus the leaf": lambda leaf, rows: leaf.at[-len(rows) :].add(rows) - leaf,
}


def _numbers(leaf: Any, rows: Any) -> jax.Array:
    return jnp.arange(len(leaf) - len(rows), len(leaf))


def keeps_bits(update: Callable[..., Any]) -> bool:
    leaf = jnp.array([[-0.0], [jnp.inf], [jnp.nan], [1.0]])
    with jax.disable_jit():
        new = optax.apply_updates(leaf, update(leaf, jnp.ones((1, 1))))
    return np.asarray(new)[:3].tobytes() == np.asarray(leaf)[:3].tobytes()


def show_updates(title: str, shape: tuple[int, ...], count: int) -> None:
    columns = {
        f"{chip}, {dtype}": (chip == "v5e", dtype) for chip in ("CPU", "v5e") for dtype in ("float32", "bfloat16")
    }
    table = measure.table(f"optax.apply_updates, {title}", "keeps bits", *columns, label="update")

    def add(name: str, keeps: bool, apply: Callable[..., Any]) -> None:
        cells = []
        for tpu, dtype in columns.values():
            leaf = jax.ShapeDtypeStruct(shape, dtype)
            found = measure.figures(apply, leaf, leaf.update(shape=(count, *shape[1:])), donate=(0,), tpu=tpu)
            cells.append(f"{found.accessed / measure.nbytes(leaf):.2f}")
        table.add_row(name, "yes" if keeps else "no", *cells)

    for name, update in UPDATES.items():
        add(name, keeps_bits(update), lambda leaf, rows, update=update: optax.apply_updates(leaf, update(leaf, rows)))
    add("fz.apply_updates", True, lambda leaf, rows: _applied(leaf, rows))
    measure.show(table)


def _applied(leaf: Any, rows: Any) -> Any:
    trainable, _ = fz.partition(leaf, fz.rows(slice(0, -len(rows))))
    return fz.apply_updates(leaf, jax.tree.map(lambda _: rows, trainable))


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
    show_updates("2 of 16 layers", (16, 512, 512), 2)
    show_updates("16 of 16,384 tokens", (16384, 512), 16)


if __name__ == "__main__":
    main()
