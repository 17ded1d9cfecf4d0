"""Train the last two layers of a scanned transformer, without a change of the model.

A causal transformer over bytes scans its eight layers, whose parameters are stacked: ``layers/qkv``
is one array of shape (8, ...). It learns NumPy's docstrings. Then its last two layers, the norm and
the head continue to train, on Python's own documentation. With JAX alone, the gradient would be
that of the whole stack; here the frozen layers have none.

Run with ``python examples/last_layers_of_a_scanned_transformer.py``.
"""

from typing import Any

import jax
import optax

import optax_freeze as fz

LAYERS, TRAIN = 8, 2
FROZEN = {"embed": True, "layers": fz.rows(slice(0, LAYERS - TRAIN)), "norm": False, "head": False}


def training(loss: Any, frozen: Any, rate: float) -> tuple[Any, Any]:
    """An optimizer with state for the trainable layers only, and its training step."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    tx = fz.freeze(inner, frozen)
    return tx, jax.jit(fz.train_step(loss, tx), donate_argnums=1)


# %%
import argparse
import builtins
import inspect
import time

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

WIDTH, HEADS, LENGTH, BATCH = 64, 4, 64, 16


def init(key: jax.Array) -> Any:
    """The parameters; those of the layers have an axis of layers in front."""
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    layers = {
        "qkv": normal(LAYERS, WIDTH, 3 * WIDTH),
        "out": normal(LAYERS, WIDTH, WIDTH) / LAYERS,
        "up": normal(LAYERS, WIDTH, 4 * WIDTH),
        "down": normal(LAYERS, 4 * WIDTH, WIDTH) / LAYERS,
        "scale": jnp.ones((LAYERS, 2, WIDTH)),
    }
    return {"embed": normal(128, WIDTH), "layers": layers, "norm": jnp.ones(WIDTH), "head": normal(WIDTH, 128)}


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


@jax.checkpoint
def layer(x: jax.Array, p: Any) -> jax.Array:
    """Causal attention and an MLP, computed again in the backward pass."""
    q, k, v = jnp.split((normalize(x, p["scale"][0]) @ p["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(normalize(x, p["scale"][1]) @ p["up"]) @ p["down"]


def loss(params: Any, windows: jax.Array) -> jax.Array:
    """Mean cross entropy of the next byte, in nats."""
    position = jnp.sin(jnp.arange(LENGTH)[:, None] / 8.0 ** jnp.linspace(0, 2, WIDTH))
    x = 8 * params["embed"][windows[:, :-1]] + position
    x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
    logits = normalize(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def documentation(names: list[Any]) -> np.ndarray:
    """Docstrings as bytes below 128."""
    text = "\n\n".join(inspect.getdoc(member) or "" for thing in names for _, member in inspect.getmembers(thing))
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)


def windows_of(text: np.ndarray, n: int, seed: int) -> np.ndarray:
    starts = np.random.default_rng(seed).integers(0, len(text) - LENGTH - 1, n)
    return text[starts[:, None] + np.arange(LENGTH + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps of each training")
    args = parser.parse_args()
    english, python = documentation([np]), documentation([builtins, *vars(builtins).values()])
    learned, held_out = python[: len(python) * 9 // 10], windows_of(python[len(python) * 9 // 10 :], 64, seed=1)

    def train(params: Any, frozen: Any, text: np.ndarray, rate: float) -> tuple[Any, float, float]:
        """The parameters after training, milliseconds of a step, and kilobytes of optimizer state."""
        tx, step = training(loss, frozen, rate)
        state, windows = tx.init(params), windows_of(text, args.steps * BATCH, seed=0).reshape(args.steps, BATCH, -1)
        compiled, seconds = step.lower(params, state, windows[0]).compile(), []
        for batch in windows:
            start = time.perf_counter()
            params, state, _ = jax.block_until_ready(compiled(params, state, batch))
            seconds.append(time.perf_counter() - start)
        kept = sum(x.nbytes for x in jax.tree.leaves(state))
        return params, 1e3 * float(np.median(seconds)), kept / 1e3

    base, *dense = train(init(jax.random.key(0)), False, english, 3e-3)
    print(fz.explain(loss, base, FROZEN, held_out))
    tuned, *in_parts = train(base, FROZEN, learned, 1e-3)

    table = Table("", "before, or all", "after, or the last two", title=f"the last {TRAIN} of {LAYERS} scanned layers")
    losses = (float(jax.jit(loss)(params, held_out)) for params in (base, tuned))
    table.add_row("held-out loss, nats per byte", *(f"{nats:.3f}" for nats in losses))
    table.add_row("a step", f"{dense[0]:.0f} ms", f"{in_parts[0]:.0f} ms")
    table.add_row("optimizer state", f"{dense[1]:,.0f} kB", f"{in_parts[1]:,.0f} kB")
    old, new = (jax.tree.map(lambda a: np.asarray(a[: LAYERS - TRAIN]).tobytes(), p["layers"]) for p in (base, tuned))
    table.add_row("frozen layers", "", "the same bits" if old == new else "MOVED")
    Console().print(table)


if __name__ == "__main__":
    main()
