"""LISA: train two layers of a stack at a time, others every few steps, in one compiled program.

A causal transformer over bytes scans its eight layers. It has learned from NumPy's docstrings and goes on with Python's
own documentation: by AdamW of everything, by LISA (Pan et al., 2024: two random layers, others every ten steps, with
embedding, norm and head), and with its last two layers alone. LISA and the last two layers need the same memory.

Run with ``python examples/lisa.py``.
"""

import argparse
import builtins
import inspect
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import optax_freeze as fz

LAYERS, TRAIN, EVERY, WIDTH, HEADS, LENGTH, BATCH = 8, 2, 10, 64, 4, 64, 8


def init(key: jax.Array) -> Any:
    """Parameters; those of the layers have an axis of layers in front."""
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


def normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def layer(x: jax.Array, p: Any) -> jax.Array:
    q, k, v = jnp.split((normalise(x, p["scale"][0]) @ p["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(normalise(x, p["scale"][1]) @ p["up"]) @ p["down"]


def loss(params: Any, windows: jax.Array) -> jax.Array:
    """Mean cross entropy of the next byte, in nats."""
    position = jnp.sin(jnp.arange(LENGTH)[:, None] / 8.0 ** jnp.linspace(0, 2, WIDTH))
    x = 8 * params["embed"][windows[:, :-1]] + position
    x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
    logits = normalise(x, params["norm"]) @ params["head"]
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
    parser.add_argument("--steps", type=int, default=200, help="steps of each training")
    args = parser.parse_args()
    english, python = documentation([np]), documentation([builtins, *vars(builtins).values()])
    learned, held_out = python[: len(python) * 9 // 10], windows_of(python[len(python) * 9 // 10 :], 64, seed=1)

    def train(params: Any, frozen: Any, text: np.ndarray, rate: float, turns: bool = False) -> tuple[Any, str, str]:
        """Trains what is not frozen; the parameters, the time of a step, and the bytes of optimizer state."""
        labels = lambda params: {name: name == "layers" for name in params}  # noqa: E731  (a count of their own)
        inner = optax.multi_transform({True: optax.adamw(rate), False: optax.adamw(rate)}, labels)
        tx = fz.freeze(inner, frozen, full_updates=False)

        @jax.jit
        def step(params: Any, state: Any, windows: jax.Array) -> tuple[Any, Any]:
            grads = fz.grad(loss, fz.spec_of(state))(params, windows)
            updates, state = tx.update(grads, state, params)
            return fz.apply_updates(params, updates), state

        state, seconds, keys = tx.init(params), [], jax.random.split(jax.random.key(1), args.steps)
        windows = windows_of(text, args.steps * BATCH, seed=0).reshape(args.steps, BATCH, -1)
        compiled = step.lower(params, state, windows[0]).compile()  # one program, whichever layers train
        for i, batch in enumerate(windows):
            if turns and i % EVERY == 0:
                chosen = jax.random.choice(keys[i], LAYERS, (TRAIN,), replace=False)
                state = fz.replace_masks(state, {"layers/**": ~fz.rows(chosen)})
            start = time.perf_counter()
            params, state = jax.block_until_ready(compiled(params, state, batch))
            seconds.append(time.perf_counter() - start)
        kept = sum(x.nbytes for x in jax.tree.leaves(state))
        return params, f"{1e3 * np.median(seconds):.0f} ms", f"{kept / 1e3:,.0f} kB"

    base, *_ = train(init(jax.random.key(0)), False, english, 3e-3)
    any_two = {"embed": False, "layers": ~fz.rows(jnp.array([6, 7])), "norm": False, "head": False}
    last_two = {"embed": True, "layers": fz.rows(slice(0, LAYERS - TRAIN)), "norm": False, "head": False}
    kinds = {"AdamW of everything": (False, False), "LISA": (any_two, True), "the last two layers": (last_two, False)}
    table = Table("", "held-out loss", "a step", "optimizer state", title="nats per byte of Python's documentation")
    table.add_row("before", f"{jax.jit(loss)(base, held_out):.3f}")
    for name, (frozen, turns) in kinds.items():
        params, *figures = train(base, frozen, learned, 1e-3, turns)
        table.add_row(name, f"{jax.jit(loss)(params, held_out):.3f}", *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
