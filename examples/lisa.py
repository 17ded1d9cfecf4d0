"""LISA: train two layers of a stack at a time, others every few steps, in one compiled program.

A causal transformer over bytes scans its eight layers. It has learned from NumPy's docstrings and
goes on with Python's own documentation: by AdamW of everything, by LISA (Pan et al., 2024: two
random layers, others every ten steps, with embedding, norm and head), and with its last two layers
alone. LISA and the last two layers need the same memory.
"""

from typing import Any

import jax
import optax

import optax_freeze as fz

LAYERS, TRAIN = 8, 2  # layers of the stack, and how many of them train at a time
TWO = ~fz.rows(jax.numpy.arange(TRAIN))  # an array: which ones is data
ANY_TWO = {"embed": False, "layers": TWO, "norm": False, "head": False}


def training(loss: Any, optimizer: Any, frozen: Any = ANY_TWO) -> Any:
    """An optimizer that counts the steps of the layers apart, and a step of those in its state."""
    labels = {name: name == "layers" for name in ANY_TWO}
    inner = optax.multi_transform({True: optimizer, False: optimizer}, labels)
    tx = fz.freeze(inner, frozen)
    return tx, jax.jit(fz.train_step(loss, tx))


def choose_layers(state: Any, tx: Any, params: Any, key: Any) -> Any:
    """The state in which other layers train."""
    chosen = jax.random.permutation(key, LAYERS)[:TRAIN]
    return fz.replace_masks(state, tx, params, {"layers/**": ~fz.rows(chosen)})


# %%
import argparse
import builtins
import inspect
import time

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

EVERY, WIDTH, HEADS, LENGTH, BATCH = 10, 64, 4, 64, 8
LAST_TWO = {"embed": True, "layers": fz.rows(slice(0, LAYERS - TRAIN)), "norm": False, "head": False}


def init(key: jax.Array) -> Any:
    keys = iter(jax.random.split(key, 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
    layers = {  # the first axis is the layer
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


@jax.jit
def loss(params: Any, windows: jax.Array) -> jax.Array:
    x = 8 * params["embed"][windows[:, :-1]] + jnp.sin(jnp.arange(LENGTH)[:, None] / 8.0 ** jnp.linspace(0, 2, WIDTH))
    x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
    logits = normalise(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def windows_of(text: np.ndarray, n: int, seed: int) -> np.ndarray:
    return text[np.random.default_rng(seed).integers(0, len(text) - LENGTH - 1, (n, 1)) + np.arange(LENGTH + 1)]


def documentation(names: list[Any]) -> np.ndarray:
    text = "\n\n".join(inspect.getdoc(member) or "" for thing in names for _, member in inspect.getmembers(thing))
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)


def train(params: Any, method: Any, text: np.ndarray, steps: int, held_out: Any, turns: bool = False) -> Any:
    """Held-out losses before every tenth step and at the end; seconds of each step; bytes of state; parameters."""
    (tx, step), keys = method, jax.random.split(jax.random.key(1), steps)
    state, losses, seconds = jax.jit(tx.init)(params), [], []
    for i, batch in enumerate(windows_of(text, steps * BATCH, seed=0).reshape(steps, BATCH, -1)):
        if i % EVERY == 0:
            losses.append(loss(params, held_out))
            state = jax.jit(choose_layers, static_argnums=1)(state, tx, params, keys[i]) if turns else state
        start = time.perf_counter()
        params, state, _ = jax.block_until_ready(step(params, state, batch))
        seconds.append(time.perf_counter() - start)
    assert step._cache_size() == 1  # one program, whichever layers train
    return [*losses, loss(params, held_out)], seconds, sum(x.nbytes for x in jax.tree.leaves(state)), params


def compare(steps: int) -> dict[str, Any]:
    english, python = documentation([np]), documentation([builtins, *vars(builtins).values()])
    learned, held_out = python[: len(python) * 9 // 10], windows_of(python[len(python) * 9 // 10 :], 64, seed=1)
    kinds = {"AdamW of everything": False, "LISA": ANY_TWO, "the last two layers": LAST_TWO}
    methods = {name: training(loss, optax.adamw(2e-3), frozen) for name, frozen in kinds.items()}
    *_, base = train(jax.jit(init)(jax.random.key(0)), methods["AdamW of everything"], english, steps, held_out)
    return {name: train(base, methods[name], learned, steps, held_out, name == "LISA") for name in kinds}


def report(runs: dict[str, Any]) -> Figure:
    table = Table("", "held-out loss", "a step", "optimizer state", title="nats per byte of Python's documentation")
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    table.add_row("before", f"{next(iter(runs.values()))[0][0]:.3f}")
    for name, (losses, seconds, held, _) in runs.items():
        table.add_row(name, f"{losses[-1]:.3f}", f"{1e3 * np.median(seconds):.0f} ms", f"{held / 1e3:,.0f} kB")
        axes.plot([*range(0, len(seconds), EVERY), len(seconds)], losses, label=name)
    axes.set(xlabel="steps", ylabel="held-out loss, nats per byte")
    axes.legend()
    Console(force_jupyter=False).print(table)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each training")
    parser.add_argument("--picture", default="lisa.png")
    args = parser.parse_args()
    report(compare(args.steps)).savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
