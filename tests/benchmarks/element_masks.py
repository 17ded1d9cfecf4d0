"""New embedding rows and dense masks, compared with masks written by hand; executable sizes and tracing times.

1. 16 rows of an embedding are trainable, with AdamW; the loss is a lookup and a matmul, differentiated by ``jax.grad``
   except in the last row. Peers, written by hand: masks applied with ``jnp.where``, masks that multiply, and rows
   sliced from the gradient.
2. Half of the elements of a layer are trainable under a dense mask: a step with forward and backward pass, compared
   with the unmasked step.
3. The size of the executable with a mask, compared with that without.
4. Tracing an update of 1,000 masked leaves, compared with unmasked ones: CPU times, medians of alternating runs.

The first three are compiled for one TPU v5e chip.

Run with ``python tests/benchmarks/element_masks.py`` (``--no-times`` leaves the times out).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import jax.numpy as jnp
import optax

import optax_freeze as fz

VOCABULARY, WIDTH, NEW = 128_256, 2_048, 16
TX = optax.adamw(1e-3)


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """A loss with a lookup and a matmul."""
    return jnp.mean(jnp.tanh(params["embed"][tokens] @ params["out"]) ** 2)


class Case(NamedTuple):
    """``step(embed, state, out, tokens)``, and ``init(embed)`` for its initial state."""

    name: str
    step: Callable[..., Any]
    init: Callable[[Any], Any]


def gradient(embed: jax.Array, out: jax.Array, tokens: jax.Array) -> jax.Array:
    return jax.grad(lambda e: loss({"embed": e, "out": out}, tokens))(embed)


def with_mask(name: str, zero: Callable[[Any, Any], Any], *, dense: bool) -> Case:
    """Gradient and update are masked by hand; the optimizer receives the whole leaf."""

    def mask_of(embed: Any) -> jax.Array:
        return jnp.broadcast_to(jax.lax.broadcasted_iota(jnp.int32, (VOCABULARY, 1), 0) < VOCABULARY - NEW, embed.shape)

    def step(embed: jax.Array, state: Any, out: jax.Array, tokens: jax.Array) -> Any:
        inner, mask = state if dense else (state, mask_of(embed))
        updates, inner = TX.update(zero(mask, gradient(embed, out, tokens)), inner, embed)
        moved = optax.apply_updates(embed, zero(mask, updates))
        return moved, (inner, mask) if dense else inner

    return Case(name, step, lambda embed: (TX.init(embed), mask_of(embed)) if dense else TX.init(embed))


def rows_by_hand(name: str) -> Case:
    """The optimizer runs on rows sliced from the dense gradient."""

    def step(embed: jax.Array, state: Any, out: jax.Array, tokens: jax.Array) -> Any:
        rows = embed[-NEW:]
        updates, state = TX.update(gradient(embed, out, tokens)[-NEW:], state, rows)
        moved: Any = optax.apply_updates(rows, updates)
        return embed.at[-NEW:].set(moved), state

    return Case(name, step, lambda embed: TX.init(embed[-NEW:]))


def with_fz(name: str, mask: Any, *, full_updates: bool = False, restricted: bool = False) -> Case:
    """``fz.freeze`` with rows or elements."""
    frozen = {"embed": mask, "out": True}
    tx = fz.freeze(TX, frozen, full_updates=full_updates)

    def step(embed: jax.Array, state: Any, out: jax.Array, tokens: jax.Array) -> Any:
        params = {"embed": embed, "out": out}
        if restricted:
            grads = fz.grad(loss, frozen)(params, tokens)
        else:
            grads = {"embed": gradient(embed, out, tokens), "out": optax.MaskedNode()}
        updates, state = tx.update(grads, state, params)
        new: Any = optax.apply_updates(params, updates) if full_updates else fz.apply_updates(params, updates)
        return new["embed"], state

    def init(embed: Any) -> Any:
        return tx.init({"embed": embed, "out": jnp.zeros((WIDTH, WIDTH))})

    return Case(name, step, init)


def new_rows(chip: Any) -> None:
    rows = ~fz.rows(slice(VOCABULARY - NEW, None))
    cases = [
        with_fz("nothing frozen", False),
        rows_by_hand("rows sliced by hand from the dense gradient"),
        with_mask("jnp.where by hand, dense mask", lambda m, g: jnp.where(m, 0, g), dense=True),
        with_mask("jnp.where by hand, mask from an iota", lambda m, g: jnp.where(m, 0, g), dense=False),
        with_mask("g * (1 - mask) by hand, as pruning libraries do", lambda m, g: g * (1 - m), dense=True),
        with_fz("fz.freeze(rows, full_updates=False), jax.grad", rows),
        with_fz("fz.freeze(rows), jax.grad, optax.apply_updates", rows, full_updates=True),
        with_fz("fz.freeze(rows, full_updates=False), fz.grad", rows, restricted=True),
    ]
    shapes = (
        jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((4, 256), jnp.int32),
    )
    exact = ("state MB", "GB accessed", "MB temporary", "kB executable")
    table = measure.table(f"One AdamW step, {NEW} rows of {VOCABULARY:,} x {WIDTH:,} trainable", *exact)
    for case in cases:
        state = jax.eval_shape(case.init, shapes[0])
        row = measure.figures(case.step, *measure.on(chip, (shapes[0], state, *shapes[1:])))
        table.add_row(
            case.name,
            f"{measure.nbytes(state) / 1e6:.2f}",
            f"{row.accessed / 1e9:.2f}",
            f"{row.temporary / 1e6:.1f}",
            f"{row.executable / 1e3:.0f}",
        )
    measure.show(table)


def dense_mask(chip: Any) -> None:
    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    x = jax.ShapeDtypeStruct((256, 4096), jnp.float32)
    mask = jax.random.bernoulli(jax.random.key(0), 0.5, shape.shape)

    def of(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def plain(w: jax.Array, state: Any, x: jax.Array) -> Any:
        updates, state = TX.update(jax.grad(of)(w, x), state, w)
        return optax.apply_updates(w, updates), state

    tx = fz.freeze(TX, mask)

    def masked(w: jax.Array, state: Any, x: jax.Array) -> Any:
        updates, state = tx.update(jax.grad(of)(w, x), state, w)
        return optax.apply_updates(w, updates), state

    def masked_bits(w: jax.Array, state: Any, x: jax.Array) -> Any:
        updates, state = tx.update(jax.grad(of)(w, x), state, w)
        return fz.apply_updates(w, updates, fz.spec_of(state)), state

    exact = ("MB accessed", "ratio to the unmasked step plus one read of the mask")
    table = measure.table("One AdamW step, half of 4096 x 4096 elements trainable under a dense mask", *exact)
    base = 0.0
    for name, step, init in (
        ("unmasked AdamW", plain, TX.init),
        ("fz.freeze(mask), optax.apply_updates", masked, tx.init),
        ("fz.freeze(mask), fz.apply_updates", masked_bits, tx.init),
    ):
        args = measure.on(chip, (shape, jax.eval_shape(init, shape), x))
        accessed = measure.figures(step, *args).accessed
        base = base or accessed + mask.nbytes
        table.add_row(name, f"{accessed / 1e6:.0f}", f"{accessed / base:.2f}")
    measure.show(table)


def executables(chip: Any) -> None:
    shape = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    table = measure.table("Executable of an AdamW update of 4096 x 4096", "bytes", "ratio to no mask")
    base = 0
    for name, tx in (
        ("no mask", TX),
        ("fz.rows(slice)", fz.freeze(TX, {"w": fz.rows(slice(0, 4000))})),
        ("fz.rows(slice), full_updates=False", fz.freeze(TX, {"w": fz.rows(slice(0, 4000))}, full_updates=False)),
        ("fz.elements(array)", fz.freeze(TX, {"w": jnp.ones((4096, 4096), bool)})),
    ):

        def step(params: Any, state: Any, grads: Any, tx: Any = tx) -> Any:
            updates, state = tx.update(grads, state, params)
            return fz.apply_updates(params, updates), state

        args = measure.on(chip, (shape, jax.eval_shape(tx.init, shape), shape))
        size = measure.figures(step, *args).executable
        base = base or size
        table.add_row(name, f"{size:,}", f"{size / base:.2f}")
    measure.show(table)


def tracing() -> None:
    params = {f"leaf_{i:04d}": jax.ShapeDtypeStruct((8, 8), jnp.float32) for i in range(1000)}
    masked = {
        "nothing frozen": False,
        "fz.rows in every leaf": fz.rules({"**": fz.rows(slice(0, 4))}),
        "fz.elements in every leaf": fz.rules({"**": jnp.eye(8, dtype=bool)}),
    }
    runs = {name: fz.freeze(TX, spec, full_updates=False) for name, spec in masked.items()}
    states = {name: jax.eval_shape(tx.init, params) for name, tx in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(4):
        for name, tx in runs.items():
            jax.clear_caches()
            start = time.process_time()
            jax.jit(tx.update).trace(params, states[name], params)
            seconds[name].append(time.process_time() - start)
    table = measure.table("Tracing an update of fz.freeze(adamw), 1,000 leaves", timed=["ratio to nothing frozen"])
    medians = {name: statistics.median(measured[1:]) for name, measured in seconds.items()}
    for name, median in medians.items():
        table.add_row(name, f"{median / medians['nothing frozen']:.2f}")
    measure.show(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-times", action="store_true", help="leave out the times on this device")
    times = not parser.parse_args().no_times
    chip = measure.tpu_sharding()
    new_rows(chip)
    dense_mask(chip)
    executables(chip)
    if times:
        tracing()


if __name__ == "__main__":
    main()
