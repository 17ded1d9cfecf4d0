"""Fine-tune some channels of each feed-forward layer (S2FT): the first rows of a leaf.

A stack of scanned layers learns scikit-learn's digits, and then digits that are rotated by 90
degrees. S2FT (Yang et al., 2024) trains the same few hidden channels of both matrices of a layer.
Sorted by size, which changes no output, they come first, so one slice names them in all layers. The
compiler counts FLOPs and temporary memory, also for LoRA with as many trainable parameters.

Run with ``python examples/sparse_channels.py``; it draws ``sparse_channels.png``.
"""

from typing import Any

import jax
import jax.numpy as jnp

import optax_freeze as fz


def sorted_channels(layers: Any) -> Any:
    """The layers with the largest channels first: columns of ``up`` and rows of ``down``."""
    up, down, take = layers["up"], layers["down"], jnp.take_along_axis
    sizes = jnp.linalg.norm(up, axis=1) * jnp.linalg.norm(down, axis=2)
    order = jnp.argsort(-sizes, axis=-1)
    return {"up": take(up, order[:, None], axis=2), "down": take(down, order[..., None], axis=1)}


def first_channels(count: int) -> Any:
    """The spec: of each layer, all channels but the first ones are frozen."""
    up, down = ~fz.rows(slice(0, count), axis=2), ~fz.rows(slice(0, count), axis=1)
    return fz.rules({"layers/up": up, "layers/down": down}, default=True)


def training(loss: Any, tx: Any, frozen: Any) -> Any:
    """An optimizer with state for the trainable channels only, and its step."""
    tx = fz.freeze(tx, frozen)
    return tx, jax.jit(fz.train_step(loss, tx), donate_argnums=(0, 1))


# %%
import argparse

import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

LAYERS, WIDTH, HIDDEN, RANK, BATCH, TX = 8, 128, 512, 8, 256, optax.adam(1e-3)
LORA = fz.all_except("ins", "outs")
CHANNELS = RANK * (WIDTH + HIDDEN) // WIDTH  # as many parameters as in adapters of both matrices


def init(key: jax.Array) -> Any:
    keys, normal = jax.random.split(key, 4), lambda key, *shape: jax.random.normal(key, shape) * shape[-2] ** -0.5
    layers = {"up": normal(keys[0], LAYERS, WIDTH, HIDDEN), "down": normal(keys[1], LAYERS, HIDDEN, WIDTH) / LAYERS}
    return {"inputs": normal(keys[2], 64, WIDTH), "layers": layers, "head": normal(keys[3], WIDTH, 10)}


def with_adapters(params: Any) -> Any:
    """LoRA: products of thin matrices, which are added to those of each layer and are zero at first."""
    keys, sizes = jax.random.split(jax.random.key(1)), {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    pairs = zip(keys, sizes.items(), strict=True)
    ins = {name: jax.random.normal(key, (LAYERS, n, RANK)) / RANK for key, (name, (n, _)) in pairs}
    return {**params, "ins": ins, "outs": {name: jnp.zeros((LAYERS, RANK, n)) for name, (_, n) in sizes.items()}}


def logits_of(params: Any, images: Any) -> jax.Array:
    def layer(x: jax.Array, parts: Any) -> tuple[jax.Array, None]:
        weights, *adapters = parts

        def product(x: jax.Array, name: str) -> jax.Array:
            return x @ weights[name] + sum(x @ ins[name] @ outs[name] for ins, outs in [adapters] if ins)

        hidden = jax.nn.relu(product(x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6), "up"))
        return x + product(hidden, "down"), None

    stack = params["layers"], params.get("ins", {}), params.get("outs", {})
    x, _ = jax.lax.scan(jax.checkpoint(layer), images @ params["inputs"], stack)
    return x @ params["head"]


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels).mean()


def train(title: str, params: Any, frozen: Any, data: Any, epochs: int) -> Any:
    """The trained parameters, how many they are, and MFLOP and KiB of temporary memory of a step."""
    tx, step = training(loss, TX, frozen)
    batch = jax.tree.map(lambda array: array[:BATCH], data)
    [costs] = fz.costs(loss, params, {title: frozen}, *batch, tx=TX).rows
    params = jax.tree.map(jnp.copy, params)  # the step takes its arguments
    start, state, rng = jax.device_get(params), tx.init(params), np.random.default_rng(0)
    temporary: Any = step.lower(params, state, *batch).compile().memory_analysis()
    for _ in track(range(epochs), title):
        for chosen in rng.permutation(len(data[0]))[: len(data[0]) // BATCH * BATCH].reshape(-1, BATCH):
            params, state, _ = step(params, state, *(array[chosen] for array in data))
    fz.assert_frozen(start, params, frozen)
    return params, costs.trainable_elements, costs.flops / 1e6, temporary.temp_size_in_bytes / 1024


def draw(rows: dict[str, Any], path: str) -> None:
    figure = Figure(figsize=(9, 3), layout="constrained")
    for axis, title, values in zip(figure.subplots(1, 3), TITLES[1:], np.transpose([*rows.values()]), strict=True):
        axis.bar_label(axis.bar([*rows], values, 0.6, color=["C0", "C1", "C7"]), fmt="%.0f")
        axis.set(title=title, ylim=(0, 1.12 * max(values)))
    figure.savefig(path, dpi=100)


TITLES = ("trainable parameters", "MFLOP of a step", "temporary memory of a step, KiB", "held-out accuracy, %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, choices=range(1, 1001), metavar="N", help="1 to 1000")
    parser.add_argument("--picture", default="sparse_channels.png")
    args = parser.parse_args()
    pixels, digits = load_digits(return_X_y=True)
    split = train_test_split((pixels / 16).astype(np.float32), digits, random_state=0)
    images, held_out, labels, answers = map(np.asarray, split)
    rotated, unseen = (np.rot90(x.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64) for x in (images, held_out))
    base, *_ = train("upright", jax.jit(init)(jax.random.key(0)), False, (images, labels), args.epochs)
    inorder = {**base, "layers": jax.jit(sorted_channels)(base["layers"])}
    change = jnp.abs(logits_of(inorder, unseen) - logits_of(base, unseen)).max()
    print(f"sorting the channels changes a logit by at most {change:.0e}")
    starts = {"S2FT": (inorder, first_channels(CHANNELS)), "LoRA": (with_adapters(base), LORA), "all": (base, False)}
    table, rows = Table("", *TITLES), {}
    for name, (start, frozen) in starts.items():
        params, count, *costs = train(name, start, frozen, (rotated, labels), args.epochs)
        accuracy = 100 * np.mean(np.asarray(logits_of(params, unseen)).argmax(-1) == answers)
        rows[name] = [*costs, accuracy]
        table.add_row(name, f"{count:,}", *(f"{each:,.1f}" for each in rows[name]))
    Console().print(table)
    draw(rows, args.picture)


if __name__ == "__main__":
    main()
