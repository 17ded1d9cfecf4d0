"""Freeze layers as their gradients settle (AutoFreeze, GradES), and run these only once (Egeria).

A net learns the digits 0 to 4, and then all ten. In the second training, its layers freeze from the
input end: ``fz.freeze_converged`` decides every two epochs, and the step, compiled once, computes
no gradients of frozen layers. A third adds ``fz.precompute``: whenever more layers freeze, their
outputs are computed for the whole data set, and the steps start from these. In a fourth, each
matrix freezes for good by its own gradient (GradES, Wen et al., 2025), below a share of the mean
norm of its gradients so far.
"""

from typing import Any

import jax
import optax

import optax_freeze as fz


def autofreeze(adam: Any, layers: list[str], interval: int) -> optax.GradientTransformation:
    """An optimizer that decides every ``interval`` steps which layers freeze: the first ones."""
    return fz.freeze_when(adam, fz.freeze_converged(layers, every=interval))


def grades(adam: Any, share: float, grace: int) -> optax.GradientTransformation:
    """An optimizer that freezes each matrix whose gradient falls below a share of its mean norm."""
    settles = lambda step, its: (step >= grace) & (its.norm * its.updates < share * its.total)
    return fz.freeze_when(adam, {fz.each("**/kernel"): settles})


def run_once(loss: Any, layers: tuple[str, ...], params: Any, data: Any) -> tuple[Any, Any]:
    """Runs the frozen layers for all examples; returns inputs and the loss that takes them."""
    once = fz.precompute(loss, layers, example_axis=0)
    after = lambda params, *batch: once.after(fz.stop_gradient(params, layers), *batch)
    return (jax.jit(once.before)(params, *data), *data), after


# %%
import argparse
import functools

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

LAYERS = ["stem", "block_0", "block_1", "block_2", "head"]  # from the input end
BATCH, ADAM = 64, optax.adam(1e-3)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(256, name=LAYERS[0])(x)
        for name in LAYERS[1:-1]:
            x = x + nn.relu(nn.Dense(256, name=name)(x))
        return nn.Dense(10, name=LAYERS[-1])(x)


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jnp.asarray(Classifier().apply({"params": params}, images))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(title: str, params: Any, tx: Any, data: Any, epochs: int, once: bool = False) -> Any:
    """The parameters, the frozen layers in each epoch, and the loss of each step."""
    state, inputs, step, rng = tx.init(params), data, jax.jit(fz.train_step(loss, tx)), np.random.default_rng(0)
    before, history, losses = [], [], []
    for _ in track(range(epochs), title):
        frozen = tuple(layer for layer, is_frozen in fz.currently_frozen(state).items() if is_frozen)
        if once and frozen and frozen != history[-1]:
            inputs, after = run_once(loss, frozen, params, data)
            step = jax.jit(fz.train_step(after, tx))
        before.append(params)
        history.append(frozen)
        for chosen in rng.permutation(len(data[1]))[: len(data[1]) // BATCH * BATCH].reshape(-1, BATCH):
            batch = jax.tree.map(lambda array, chosen=chosen: array[chosen], inputs)
            params, state, value = step(params, state, *batch)
            losses.append(value)
    for start, frozen in zip(before, history, strict=True):
        fz.assert_frozen(start, params, frozen or False)
    return params, history, np.array(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=16, choices=range(1, 1001), metavar="N", help="with all digits")
    parser.add_argument("--picture", default="autofreeze.png")
    args = parser.parse_args()
    pixels, digits = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = map(np.asarray, train_test_split(pixels / 16, digits, random_state=0))
    plain, few, params = fz.freeze_when(ADAM, {}), labels < 5, jax.jit(Classifier().init)(jax.random.key(0), images[:1])
    params, *_ = train("0-4", params["params"], plain, (images[few], labels[few]), 6)
    data, batch, batches = (images, labels), (images[:BATCH], labels[:BATCH]), len(labels) // BATCH
    tx = autofreeze(ADAM, LAYERS, interval=2 * batches)
    kinds = {"everything trains": (plain, False), "AutoFreeze": (tx, False), "frozen layers run once": (tx, True)}
    kinds["GradES"] = grades(ADAM, share=0.05, grace=2 * batches), False
    runs = {name: train(name, params, kind, data, args.epochs, once) for name, (kind, once) in kinds.items()}
    _, (_, history, losses), (_, same_history, same_losses), (_, by_matrix, _) = runs.values()
    assert history == same_history
    np.testing.assert_allclose(same_losses, losses, rtol=1e-2, atol=1e-4)

    mflop = lambda f, *args: (jax.jit(f).lower(*args).compile().cost_analysis() or {})["flops"] / 1e6
    of_step = functools.cache(lambda *frozen: mflop(fz.value_and_grad(loss, frozen or False), params, *batch))
    by_epoch = [[of_step(*frozen) for frozen in each] for each in ([()] * args.epochs, history, history, by_matrix)]
    steps, first = Table("from epoch", "frozen", *list(runs)[1:3], title="MFLOP of a step"), np.zeros(4)
    for epoch, frozen in enumerate(history):
        by_epoch[2][epoch] = by_epoch[2][max(0, epoch - 1)]
        if frozen and frozen not in history[:epoch]:
            once = fz.precompute(loss, frozen, example_axis=0)
            after, inputs = fz.value_and_grad(once.after, frozen), once.before(params, *batch)
            by_epoch[2][epoch] = mflop(after, params, inputs, *batch)
            first[2] += batches * mflop(once.before, params, *batch)
        if frozen not in history[:epoch]:
            steps.add_row(str(epoch), ", ".join(frozen) or "nothing", *(f"{each[epoch]:.1f}" for each in by_epoch[1:3]))
    table = Table("", *runs)
    table.add_row("GFLOP of the training", *(f"{x / 1e3:.2f}" for x in first + batches * np.sum(by_epoch, axis=1)))
    table.add_row("last loss", *(f"{losses[-1]:.4f}" for *_, losses in runs.values()))
    logits = (np.asarray(Classifier().apply({"params": params}, test_images)) for params, *_ in runs.values())
    table.add_row("held-out accuracy", *(f"{np.mean(rows.argmax(-1) == test_labels):.1%}" for rows in logits))
    Console().print(
        steps, table, f"GradES: {len(by_matrix[-1])} of {len(LAYERS)} matrices are frozen in the last epoch"
    )

    left, right = (figure := Figure(figsize=(9, 4), layout="constrained")).subplots(1, 2)
    for (name, (*_, values)), cost, style in zip(runs.items(), by_epoch, ("-", "-", "--", ":"), strict=True):
        left.stairs(cost, label=name, linestyle=style, baseline=None)
        right.plot(np.arange(1, args.epochs + 1), values.reshape(args.epochs, -1).mean(1), style, label=name)
    left.set(xlabel="epochs", ylabel="MFLOP of a step", ylim=0)
    right.set(xlabel="epochs", ylabel="mean loss of an epoch", yscale="log")
    right.legend(loc="lower left")
    figure.savefig(args.picture, dpi=100)


if __name__ == "__main__":
    main()
