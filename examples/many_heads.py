"""Train 16 heads on one frozen trunk in one program, each with its own learning rate.

A network learns five digits. On its frozen layers, 16 heads learn all ten. ``jax.vmap`` of one step
trains them: the trunk exists once, and runs once for each batch. 16 LoRA adapters share the memory
of the base only. ``python examples/many_heads.py`` draws ``many_heads.png``.
"""

from typing import Any

import jax
import optax

import optax_freeze as fz


def training(loss: Any, params: Any, frozen: Any, rates: Any) -> tuple[Any, Any]:
    """The states of runs, one a rate, and their step; what trains has a first axis of the runs."""
    tx = fz.freeze(optax.inject_hyperparams(optax.adam)(learning_rate=0.0), frozen)
    axes = jax.tree.map(lambda is_frozen: None if is_frozen else 0, fz.resolve(params, frozen))
    states = jax.vmap(tx.init, in_axes=(axes,))(params)
    states = optax.tree.set(states, learning_rate=jax.numpy.array(rates))
    step = jax.vmap(fz.train_step(loss, tx), in_axes=(axes, 0, None, None), out_axes=(axes, 0, 0))
    return states, jax.jit(step, donate_argnums=(0, 1))


# %%
import argparse

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

RUNS, LAYERS, WIDTH, RANK, BATCH = 16, 6, 256, 4, 64
RATES = np.logspace(-4, 0, RUNS, dtype=np.float32)


def init(key: jax.Array) -> Any:
    keys = jax.random.split(key, LAYERS)
    trunk = [jax.random.normal(k, (64 if not i else WIDTH, WIDTH)) / WIDTH**0.5 for i, k in enumerate(keys)]
    return {"trunk": trunk, "head": jnp.zeros((WIDTH, 10))}


def lora(key: jax.Array) -> Any:
    shapes, keys = [(64 if not i else WIDTH, RANK) for i in range(LAYERS)], jax.random.split(key, LAYERS)
    a = [jax.random.normal(k, shape) / WIDTH**0.5 for k, shape in zip(keys, shapes, strict=True)]
    return [{"a": each, "b": jnp.zeros((RANK, WIDTH))} for each in a]


def logits(params: Any, images: Any) -> jax.Array:
    x = images
    for i, kernel in enumerate(params["trunk"]):
        y = x @ kernel
        if "lora" in params:
            y += x @ params["lora"][i]["a"] @ params["lora"][i]["b"]
        x = jnp.tanh(y) + (x if i else 0)
    return x / LAYERS @ params["head"]


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


def batches(images: Any, labels: Any, epochs: int) -> Any:
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        for chosen in rng.permutation(len(labels))[: len(labels) // BATCH * BATCH].reshape(-1, BATCH):
            yield images[chosen], labels[chosen]


def pretrain(images: Any, labels: Any) -> Any:
    """A trunk that tells the digits 0 to 4 apart."""
    params, tx, few = init(jax.random.key(0)), fz.freeze(optax.adam(1e-3), False), labels < 5
    state, step = tx.init(params), jax.jit(fz.train_step(loss, tx))
    for batch in batches(images[few], labels[few], 10):
        params, state, _ = step(params, state, *batch)
    return params["trunk"]


def cost(step: Any, *args: Any) -> np.ndarray:
    """FLOPs of a compiled step, and the bytes of its arguments and temporary arrays."""
    compiled: Any = jax.jit(step).lower(*args).compile()
    memory = compiled.memory_analysis()
    return np.array([compiled.cost_analysis()["flops"], memory.argument_size_in_bytes + memory.temp_size_in_bytes])


def costs(trunk: Any, own: Any, batch: Any) -> dict[str, np.ndarray]:
    """The cost of a step of all runs; of as many steps of one run; and of the trunk once and as many tails."""
    params = {"trunk": trunk, **own}
    many = {"trunk": trunk, **jax.tree.map(lambda leaf: jnp.stack([leaf] * RUNS), own)}
    (states, step), tx = training(loss, many, "trunk", RATES), fz.freeze(optax.adam(1e-3), "trunk")
    once = fz.precompute(loss, "trunk", recurring="images")
    before, features = cost(once.before, params, *batch), once.before(params, *batch)
    tail = cost(fz.train_step(once.after, tx), once.needed(params, *batch), tx.init(params), features, *batch)
    one = cost(fz.train_step(loss, tx), params, tx.init(params), *batch)
    return {"together": cost(step, many, states, *batch), "separate": RUNS * one, "tails": before + RUNS * tail}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, choices=range(1, 1001), metavar="N")
    parser.add_argument("--picture", default="many_heads.png")
    args = parser.parse_args()
    pixels, labels = load_digits(return_X_y=True)
    pixels, (labels, answers) = (pixels / 16).astype(np.float32), (labels[:1400], labels[1400:])
    images, test = pixels[:1400], pixels[1400:]
    trunk, head = pretrain(images, labels), {"head": jnp.zeros((WIDTH, 10))}
    params = {"trunk": trunk, "head": jnp.zeros((RUNS, WIDTH, 10))}
    (states, step), before = training(loss, params, "trunk", RATES), fz.fingerprint(params, "trunk")
    for batch in batches(images, labels, args.epochs):
        params, states, _ = step(params, states, *batch)
    assert (fz.fingerprint(params, "trunk") == before).all()
    right = jax.vmap(lambda head: (logits({**params, "head": head}, test).argmax(-1) == answers).mean())(params["head"])
    best, console = int(right.argmax()), Console()
    console.print(f"{RUNS} heads, one compilation: {step._cache_size()}; no bit of the trunk changed")
    console.print(f"best head: {right[best]:.1%} of held-out digits, learning rate {RATES[best]:.2g}")

    batch = images[:BATCH], labels[:BATCH]
    measured = {"heads": costs(params["trunk"], head, batch)}
    measured["LoRA"] = costs(params["trunk"], head | {"lora": lora(jax.random.key(1))}, batch)
    table = Table("", *(f"{name}: {what}" for name in measured for what in ("MFLOP", "MB")), title="a step")
    for row in measured["heads"]:
        table.add_row(row, *(f"{cell:.2f}" for each in measured.values() for cell in each[row] / 1e6))
    console.print(table)

    axes, *bars = (figure := Figure(figsize=(10, 3.5), layout="constrained")).subplots(1, 3, width_ratios=(2, 1, 1))
    axes.semilogx(RATES, right, ".-")
    axes.set(xlabel="learning rate of the head", ylabel="held-out accuracy", title=f"{RUNS} heads in one program")
    for axis, title, column in zip(bars, ("a step, MFLOP", "memory, MB"), (0, 1), strict=True):
        heights = {f"{RUNS} runs": measured["heads"]["separate"], "together": measured["heads"]["together"]}
        axis.bar_label(axis.bar([*heights], [round(each[column] / 1e6, 1) for each in heights.values()]))
        axis.set_title(title)
        axis.margins(y=0.1)
    figure.savefig(args.picture, dpi=100)


if __name__ == "__main__":
    main()
