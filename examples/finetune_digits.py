"""Learn ten digits from three images of each, on an encoder: unfrozen, frozen, or precomputed.

The encoder learns from 1,000 images without labels (SimCLR). The learning rates of the unfrozen and
the frozen run are tuned on validation images and other draws of labels. CPU seconds are of this
process, without compilation.
"""

from typing import Any

import jax

import optax_freeze as fz

FROZEN = "encoder"  # every parameter below this path


def training(loss: Any, optimizer: Any, frozen: Any = FROZEN) -> Any:
    """The optimizer of the trainable parameters, and a step that computes their gradients alone."""
    tx = fz.freeze(optimizer, frozen)
    return tx, jax.jit(fz.train_step(loss, tx))


# %%
import argparse
import time

import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

LABELS, STEPS, RATES = 3, 60, (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
SIZES, cross_entropy = (64, 512, 512, 128, 64), optax.softmax_cross_entropy_with_integer_labels
encode = jax.jit(lambda encoder, images: jax.nn.relu(jax.nn.relu(images @ encoder[0]) @ encoder[1]))


def logits(params: Any, images: jax.Array) -> jax.Array:
    features = encode(params["encoder"], images)
    return features / jnp.sqrt(jnp.square(features).mean(-1, keepdims=True) + 1e-6) @ params["head"]


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    return cross_entropy(logits(params, images), labels).mean()


def contrast(params: Any, images: jax.Array, key: jax.Array) -> jax.Array:
    count, (bend, shift) = 2 * len(images), jax.random.split(key)  # two distorted views of each image
    bends, shifts = jax.random.normal(bend, (count, 2, 2)), jax.random.normal(shift, (count, 2, 1, 1))
    places = jnp.einsum("nij,jab->niab", jnp.eye(2) + 0.2 * bends, jnp.indices((8, 8)) - 3.5) + 3.5 + 0.7 * shifts
    warp = jax.vmap(lambda image, place: jax.scipy.ndimage.map_coordinates(image, list(place), 1))
    views = warp(jnp.tile(images, (2, 1)).reshape(-1, 8, 8), places).reshape(-1, 64)
    found = jax.nn.relu(encode(params["encoder"], views) @ params["first"]) @ params["second"]
    found /= jnp.linalg.norm(found, axis=-1, keepdims=True)
    similar, same = found @ found.T / 0.2 - 1e9 * jnp.eye(count), jnp.roll(jnp.arange(count), count // 2)
    return cross_entropy(similar, same).mean()


def pretrain(images: Any, steps: int = 400) -> Any:
    keys, rng = jax.random.split(jax.random.key(0), 4 + steps), np.random.default_rng(0)
    w = [jax.random.normal(k, (n, m)) * (2 / n) ** 0.5 for k, n, m in zip(keys, SIZES, SIZES[1:], strict=False)]
    params, (tx, step) = {"encoder": w[:2], "first": w[2], "second": w[3]}, training(contrast, optax.adamw(1e-3), False)
    state = tx.init(params)
    for key in keys[4:]:
        params, state, _ = step(params, state, rng.choice(images, 256, replace=False), key)
    return {"encoder": params["encoder"], "head": jnp.zeros((512, 10))}


def data(count: int) -> Any:
    """Images without labels, three labelled draws for tuning, ``count`` more draws, validation and test images."""
    rng, (pixels, digits) = np.random.default_rng(0), load_digits(return_X_y=True)
    images, labels = (pixels / 16).astype(np.float32)[order := rng.permutation(len(digits))], digits[order]
    pools = [np.flatnonzero(labels[:1000] == digit) for digit in range(10)]
    draws = [np.concatenate([rng.choice(pool, LABELS, False) for pool in pools]) for _ in range(count + 3)]
    *few, valid, test = ((images[i], labels[i]) for i in (*draws, slice(1000, 1400), slice(1400, None)))
    return images[:1000], few[:3], few[3:], valid, test


def train(params: Any, method: Any, draws: Any, test: Any, before: Any = lambda *_: ()) -> Any:
    """Parameters of each draw; accuracies and CPU seconds after every sixth step; bytes of state, FLOPs of a step."""
    (tx, step), runs = method, []
    compiled = step.lower(params, state := tx.init(params), *before(params, *draws[0]), *draws[0]).compile()
    costs = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), (compiled.cost_analysis() or {})["flops"]
    for batch in draws:
        trees, clock, start = [params], [0.0], time.process_time()
        state, features = tx.init(params), jax.block_until_ready(before(params, *batch))
        for _ in range(STEPS):
            new, state, _ = jax.block_until_ready(compiled(trees[-1], state, *features, *batch))
            trees, clock = [*trees, new], [*clock, time.process_time() - start]
        curve = [(logits(tree, test[0]).argmax(-1) == test[1]).mean() for tree in trees[::6]]
        runs.append((trees[-1], curve, clock[::6]))
    last, curves, clocks = zip(*runs, strict=True)
    return last, np.array(curves), np.mean(clocks, 0), *costs


def compare(params: Any, tuning: Any, draws: Any, valid: Any, test: Any, rates: Any = RATES) -> dict[str, Any]:
    runs, adam, best = {}, optax.adam, rates[0]
    for name, frozen in {"unfrozen": False, "frozen": FROZEN}.items():
        found = [train(params, training(loss, adam(rate), frozen), tuning, valid)[1][:, -1].mean() for rate in rates]
        print(f"{name}: learning rate {(best := rates[np.argmax(found)]):g} of {rates}")
        runs[name] = train(params, training(loss, adam(best), frozen), draws, test)
    once = fz.precompute(loss, FROZEN, recurring="images", example_axis=0)  # at the rate of the frozen run
    last = train(params, training(once.after, adam(best)), draws, test, jax.jit(lambda *args: (once.before(*args),)))
    fz.assert_frozen((params,) * len(draws), runs["frozen"][0], f"*/{FROZEN}")
    return {**runs, "precomputed": last}


def report(runs: dict[str, Any]) -> Figure:
    axes, *bars = (figure := Figure(figsize=(11, 4), layout="constrained")).subplots(1, 3, width_ratios=(2, 1, 1))
    for (name, (_, curve, clock, held, cost)), style in zip(runs.items(), ("-", "-", "--"), strict=True):
        print(f"{name:14}{curve[:, -1].mean():.1%}, {clock[-1]:.3f} CPU s, {held:,} B, {cost / 1e6:.2f} MFLOP")
        axes.plot(clock, curve.mean(0), style, label=name)
        heights = {"optimizer state, kB": held / 1e3, "step, MFLOP": cost / 1e6}
        for axis, (title, height) in zip(bars, heights.items(), strict=True):
            axis.bar_label(axis.bar(name, round(height, 1)))
            axis.set_title(title)
            axis.margins(0.08, 0.1)
            axis.tick_params("x", labelsize="small")
    axes.set(xlabel="CPU seconds", ylabel="held-out accuracy", ylim=(0.7, 0.9), title=f"{LABELS} labels per digit")
    axes.legend(loc="lower right")
    trees, curves, *_ = zip(*runs.values(), strict=True)
    wins, differ = (curves[1] > curves[0])[:, -1], jax.tree.map(lambda a, b: abs(a - b).max(), trees[1], trees[2])
    print(f"frozen is better in {wins.sum()} of {len(wins)} draws; its encoder kept its bits")
    print(f"precomputed: the parameters differ by at most {max(jax.tree.leaves(differ)):.0e}")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, choices=range(1, 101), metavar="N", help="1 to 100")
    parser.add_argument("--picture", default="finetune_digits.png")
    args = parser.parse_args()
    images, *labelled = data(args.draws)
    report(compare(pretrain(images), *labelled)).savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
