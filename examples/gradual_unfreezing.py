"""Unfreeze a classifier of handwritten digits layer by layer: in one program, and in static phases.

A small net learns the digits 0 to 4, and then all ten, unfrozen layer by layer from the output end.
The same schedule runs twice: with ``fz.freeze_when``, compiled once, and in phases with
``fz.freeze`` and ``fz.migrate``, each with a program of its own. Both use the same step, which
computes no gradients of frozen layers. The runs differ once a second layer thaws.

Run with ``python examples/gradual_unfreezing.py``; it draws ``gradual_unfreezing.png``.
"""

from typing import Any

import jax
import optax

import optax_freeze as fz

LAYERS, ADAM = ["head", "hidden_1", "hidden_0"], optax.adam(1e-3)  # from the output end


def plans(steps: int) -> dict[str, list[Any]]:
    """The optimizer of each phase of ``steps`` steps: the same one for all, or one for each."""
    one_program = fz.freeze_when(ADAM, fz.gradual_unfreeze(LAYERS, steps))
    specs = [*(fz.all_except(*LAYERS[:count]) for count in range(1, len(LAYERS))), False]
    static = [fz.freeze(ADAM, spec) for spec in specs]
    return {"one program": [one_program] * len(LAYERS), "static phases": static}


def next_state(tx: Any, state: Any, params: Any) -> Any:
    """The state at the start of a static phase: layers that trained before keep their moments."""
    return tx.init(params) if state is None else fz.migrate(state, tx, params)


def step_of(tx: Any, loss: Any) -> Any:
    """A step for both, which computes no gradients of frozen layers."""
    return jax.jit(fz.train_step(loss, tx))


# %%
import argparse

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH = 64


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for name in reversed(LAYERS[1:]):
            x = nn.relu(nn.Dense(256, name=name)(x))
        return nn.Dense(10, name=LAYERS[0])(x)


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jnp.asarray(Classifier().apply({"params": params}, images))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def batches_of(images: np.ndarray, labels: np.ndarray, epochs: int) -> list[list[Any]]:
    """The shuffled batches of each epoch."""
    rng, used = np.random.default_rng(0), len(labels) // BATCH * BATCH
    orders = [rng.permutation(len(labels))[:used].reshape(-1, BATCH) for _ in range(epochs)]
    return [[(images[chosen], labels[chosen]) for chosen in order] for order in orders]


def unfreeze(title: str, params: Any, epochs: list[Any], plan: list[Any], accuracy_of: Any) -> tuple[Any, Any, Any]:
    """The programs, how far the layer that thaws moves in the first step of each phase, and accuracies by epoch."""
    tx, state, programs, first_steps, accuracies = None, None, [], [], [accuracy_of(params)]
    for next_tx, layer in zip(plan, LAYERS, strict=True):
        if next_tx is not tx:  # the first phase, or a static one
            tx, state = next_tx, next_state(next_tx, state, params)
            # A compiled program, unlike a jitted function, cannot compile again, whatever thaws.
            programs.append(step_of(tx, loss).lower(params, state, *epochs[0][0]).compile())
        moved = programs[-1](params, state, *epochs[0][0])[0][layer]["kernel"] - params[layer]["kernel"]
        first_steps.append(float(jnp.sqrt((moved**2).mean())))
        for batches in track(epochs, f"{title}, {layer} thaws"):
            for batch in batches:
                params, state, _ = programs[-1](params, state, *batch)
            accuracies.append(accuracy_of(params))
    return programs, first_steps, accuracies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=16, help="epochs of each of the three phases")
    parser.add_argument("--picture", default="gradual_unfreezing.png")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")
    pixels, digits = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = map(np.asarray, train_test_split(pixels / 16.0, digits, random_state=0))
    few, epochs = batches_of(images[labels < 5], labels[labels < 5], 10), batches_of(images, labels, args.epochs)
    params = Classifier().init(jax.random.key(0), images[:1])["params"]
    tx = fz.freeze(ADAM, False)
    state, step = tx.init(params), step_of(tx, loss)
    for batches in few:
        for batch in batches:
            params, state, _ = step(params, state, *batch)

    every, logits_of = args.epochs * len(epochs[0]), jax.jit(lambda p: Classifier().apply({"params": p}, test_images))
    accuracy_of = lambda params: np.mean(logits_of(params).argmax(-1) == test_labels)
    runs = {name: unfreeze(name, params, epochs, plan, accuracy_of) for name, plan in plans(every).items()}
    table = Table("", *runs, title=f"{' -> '.join(LAYERS)}, one more every {every} steps")
    table.add_row("compilations", *(str(len(programs)) for programs, _, _ in runs.values()))
    costs = [[program.cost_analysis()["flops"] / 1e6 for program in programs] for programs, _, _ in runs.values()]
    for i, layer in enumerate(LAYERS):
        table.add_row(f"{layer} thaws: MFLOP of a step, at most", *(f"{cost[i % len(cost)]:.1f}" for cost in costs))
        table.add_row(f"{layer} thaws: its first step", *(f"{steps[i]:.6f}" for _, steps, _ in runs.values()))
    table.add_row("held-out accuracy", *(f"{accuracies[-1]:.1%}" for *_, accuracies in runs.values()))
    Console().print(table)
    print("The one program has a branch for each phase, of which the compiler counts the most expensive.")
    ratio = runs["static phases"][1][1] / runs["one program"][1][1]
    print(f"In one program, {LAYERS[1]} thaws with its own Adam, which counts from 0. In static phases, new moments")
    print(f"meet the count {every}, at which Adam corrects no bias: the first step is {ratio:.2f} times as long.")

    axes, bars = (figure := Figure(figsize=(9, 4), layout="constrained")).subplots(1, 2, width_ratios=(2, 1))
    for (name, (*_, accuracies)), style in zip(runs.items(), ("-", "--"), strict=True):
        axes.plot(accuracies, style, label=name)
    for i, layer in enumerate(LAYERS):
        axes.axvline(i * args.epochs, color="gray", linewidth=0.5)
        axes.text(i * args.epochs, 0.98, f" {layer} thaws", va="top", transform=axes.get_xaxis_transform())
    axes.set(xlabel="epochs", ylabel="held-out accuracy", ylim=(None, 1.07))
    axes.legend(loc="lower right")
    bars.bar_label(bars.bar(LAYERS, costs[1]), fmt="%.1f")
    bars.margins(y=0.1)
    bars.set(title="static phases", xlabel="layer that thaws", ylabel="MFLOP of a step")
    figure.savefig(args.picture, dpi=100)


if __name__ == "__main__":
    main()
