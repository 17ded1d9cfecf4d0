"""Learn ten digits from three labelled images of each, on a trained encoder: unfrozen, frozen, and on its features.

The encoder learns from 1,000 images without labels (SimCLR). The learning rates of the unfrozen and the frozen run are
tuned on validation images and other draws of labels. CPU seconds are of this process, without compilation.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import optax_freeze as fz

FROZEN, LABELS, STEPS, RATES = "encoder", 3, 60, (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
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


def update(tx: Any, grads: Any, state: Any, params: Any) -> Any:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def pretrain(images: Any, tx: Any, steps: int = 400) -> Any:
    keys, rng = jax.random.split(jax.random.key(0), 4 + steps), np.random.default_rng(0)
    w = [jax.random.normal(k, (n, m)) * (2 / n) ** 0.5 for k, n, m in zip(keys, SIZES, SIZES[1:], strict=False)]
    params = {"encoder": w[:2], "first": w[2], "second": w[3]}
    state, step = tx.init(params), jax.jit(lambda p, s, *b: update(tx, jax.grad(contrast)(p, *b), s, p))
    for key in keys[4:]:
        params, state = step(params, state, rng.choice(images, 256, replace=False), key)
    return {"encoder": params["encoder"], "head": jnp.zeros((512, 10))}


def train(params: Any, tx: Any, grad: Any, draws: Any, test: Any, before: Any = lambda *_: ()) -> Any:
    """Parameters of each draw; accuracies and CPU seconds after every sixth step; FLOPs of a step."""
    args = (params, tx.init(params), *before(params, *draws[0]), *draws[0])
    compiled, runs = jax.jit(lambda p, s, *b: update(tx, grad(p, *b), s, p)).lower(*args).compile(), []
    for batch in draws:
        trees, clock, start = [params], [0.0], time.process_time()
        state, features = tx.init(params), jax.block_until_ready(before(params, *batch))
        for _ in range(STEPS):
            new, state = jax.block_until_ready(compiled(trees[-1], state, *features, *batch))
            trees, clock = [*trees, new], [*clock, time.process_time() - start]
        runs.append(
            (trees[-1], [(logits(tree, test[0]).argmax(-1) == test[1]).mean() for tree in trees[::6]], clock[::6])
        )
    last, curves, clocks = zip(*runs, strict=True)
    return last, np.array(curves), np.mean(clocks, 0), (compiled.cost_analysis() or {})["flops"]


def tune(name: str, freeze: Any, grad: Any, params: Any, draws: Any, valid: Any, test: Any) -> Any:
    best = max(RATES, key=lambda rate: train(params, freeze(optax.adam(rate)), grad, draws[:5], valid)[1][:, -1].mean())
    print(f"{name}: learning rate {best:g} of {RATES}")
    return freeze(optax.adam(best)), train(params, freeze(optax.adam(best)), grad, draws[5:], test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, choices=range(1, 101), metavar="N", help="1 to 100")
    parser.add_argument("--picture", default="finetune_digits.png")
    args, rng, names = parser.parse_args(), np.random.default_rng(0), ["unfrozen", "frozen", "features once"]
    pixels, digits = load_digits(return_X_y=True)
    images, labels = (pixels / 16).astype(np.float32)[order := rng.permutation(len(digits))], digits[order]
    pools = [np.flatnonzero(labels[:1000] == digit) for digit in range(10)]
    draws = [np.concatenate([rng.choice(pool, LABELS, False) for pool in pools]) for _ in range(args.draws + 5)]
    *few, valid, test = ((images[i], labels[i]) for i in (*draws, slice(1000, 1400), slice(1400, None)))
    params = pretrain(images[:1000], optax.adamw(1e-3))
    _, unfrozen = tune("unfrozen", lambda tx: tx, jax.grad(loss), params, few, valid, test)
    tx, frozen = tune("frozen", lambda tx: fz.freeze(tx, FROZEN), fz.grad(loss, FROZEN), params, few, valid, test)
    once = fz.precompute(loss, FROZEN, recurring="images", example_axis=0)
    same = train(params, tx, fz.grad(once.after, FROZEN), few[5:], test, jax.jit(lambda *args: (once.before(*args),)))
    trees, curves, clocks, flops = zip(unfrozen, frozen, same, strict=True)
    fz.assert_frozen((params,) * args.draws, trees[1], "*/encoder")
    size: Any = [fz.summary(params, spec, optax.adam(1.0)).state_bytes for spec in (False, FROZEN, FROZEN)]
    for name, curve, clock, held, cost in zip(names, curves, clocks, size, flops, strict=True):
        print(f"{name:14}{curve[:, -1].mean():.1%}, {clock[-1]:.3f} CPU s, {held:,} B, {cost / 1e6:.2f} MFLOP")
    wins, equal = (curves[1] > curves[0])[:, -1].sum(), jax.tree.map(np.array_equal, trees[1], trees[2])
    print(f"frozen is better in {wins} of {args.draws} draws; its encoder kept its bits")
    print(f"features once: {'the same parameters, bit for bit' if jax.tree.all(equal) else 'other roundings'}")
    axes, *bars = (figure := Figure(figsize=(11, 4), layout="constrained")).subplots(1, 3, width_ratios=(2, 1, 1))
    for name, curve, clock, style in zip(names, curves, clocks, ("-", "-", "--"), strict=True):
        axes.plot(clock, curve.mean(0), style, label=name)
    axes.set(xlabel="CPU seconds", ylabel="held-out accuracy", ylim=(0.7, 0.9), title=f"{LABELS} labels per digit")
    axes.legend(loc="lower right")
    values = {"optimizer state, kB": np.divide(size, 1e3).round(1), "step, MFLOP": np.divide(flops, 1e6).round(1)}
    for axis, (title, heights) in zip(bars, values.items(), strict=True):
        axis.set_title(title)
        axis.bar_label(axis.bar(["unfrozen", "frozen", "features\nonce"], heights, color=["C0", "C1", "C2"]))
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
