"""Gradual unfreezing of a classifier of handwritten digits: in one program, and in static phases.

A small net learns the digits 0 to 4, then all ten, unfrozen layer by layer from the output end. The same schedule runs
twice: with ``fz.freeze_when``, compiled once, and in phases with ``fz.freeze`` and ``fz.migrate``, each compiled by
itself, in which what is frozen costs no backward pass. They differ from the moment at which a second layer thaws.

Run with ``python examples/gradual_unfreezing.py``; takes half a minute on two cores.
"""

import argparse
import pathlib
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_freeze as fz

LAYERS = ["head", "hidden_1", "hidden_0"]  # from the output end
BATCH = 64
ADAM = optax.adam(1e-3)


class Classifier(nn.Module):
    """Images of shape (n, 64) to ten logits."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(256, name="hidden_0")(x))
        x = nn.relu(nn.Dense(256, name="hidden_1")(x))
        return nn.Dense(10, name="head")(x)


def load() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Images and labels to train on, and held-out ones."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    train, test = train_test_split(np.arange(len(labels)), random_state=0, stratify=labels)
    return (images[train], labels[train]), (images[test], labels[test])


def batches_of(images: np.ndarray, labels: np.ndarray, epochs: int, seed: int) -> list[Any]:
    """Shuffled batches of one size."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(labels)) for _ in range(epochs)]
    chosen = [order[i : i + BATCH] for order in orders for i in range(0, len(order) - BATCH + 1, BATCH)]
    return [(images[c], labels[c]) for c in chosen]


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    logits = jnp.asarray(Classifier().apply({"params": params}, images))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def accuracy(params: Any, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images that are classified right."""
    logits = jnp.asarray(Classifier().apply({"params": params}, images))
    return float((logits.argmax(-1) == labels).mean())


def pretrain(params: Any, batches: list[Any]) -> Any:
    """Everything trains."""
    state = ADAM.init(params)
    compiled = compile_step(ADAM, jax.value_and_grad(loss), params, state, batches[0])
    for batch in batches:
        params, state, _ = compiled(params, state, *batch)
    return params


class Run(NamedTuple):
    """What a run came to."""

    params: Any
    losses: list[float]
    flops: list[float]  # of a step, for each compilation
    moves: list[float]  # how far the kernel of each layer moved in its first step


def compile_step(tx: Any, value_and_grad: Any, params: Any, state: Any, batch: Any) -> Any:
    """A training step, compiled for arguments like these."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, grads = value_and_grad(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step).lower(params, state, *batch).compile()


def train(compiled: Any, params: Any, state: Any, batches: list[Any], thawing: str, run: Run) -> tuple[Any, Any]:
    """One phase; in its first step a layer moves for the first time."""
    before = params[thawing]["kernel"]
    for i, batch in enumerate(batches):
        params, state, value = compiled(params, state, *batch)
        run.losses.append(float(value))
        if i == 0:
            run.moves.append(float(jnp.sqrt(((params[thawing]["kernel"] - before) ** 2).mean())))
    return params, state


def in_one_program(params: Any, phases: list[list[Any]]) -> Run:
    """The schedule is a value of the program."""
    run = Run(None, [], [], [])
    tx = fz.freeze_when(ADAM, fz.gradual_unfreeze(LAYERS, every=len(phases[0])))
    state = tx.init(params)
    compiled = compile_step(tx, jax.value_and_grad(loss), params, state, phases[0][0])
    run.flops.append(compiled.cost_analysis()["flops"])
    for layer, batches in zip(LAYERS, phases, strict=True):
        assert not fz.currently_frozen(state)[layer]
        params, state = train(compiled, params, state, batches, layer, run)
    return run._replace(params=params)


def in_static_phases(params: Any, phases: list[list[Any]]) -> Run:
    """The schedule is written out: another program, and a migrated state, for each phase."""
    run = Run(None, [], [], [])
    state = None
    for i, (layer, batches) in enumerate(zip(LAYERS, phases, strict=True)):
        frozen = fz.only(*LAYERS[: i + 1])
        tx = fz.freeze(ADAM, frozen)
        state = tx.init(params) if state is None else fz.migrate(state, tx, params)
        compiled = compile_step(tx, fz.value_and_grad(loss, frozen), params, state, batches[0])
        run.flops.append(compiled.cost_analysis()["flops"])
        params, state = train(compiled, params, state, batches, layer, run)
    return run._replace(params=params)


def draw(runs: dict[str, Run], every: int, picture: pathlib.Path) -> None:
    """The losses, and which group trains when."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 5), layout="constrained", height_ratios=[3, 1])
    for (name, run), color in zip(runs.items(), ["tab:blue", "tab:orange"], strict=True):
        smooth = np.convolve(run.losses, np.ones(15) / 15, mode="valid")
        top.plot(np.arange(len(smooth)) + 7, smooth, label=name, color=color)
    top.set(ylabel="training loss", yscale="log", title="Gradual unfreezing")
    top.legend()
    for i, layer in enumerate(reversed(LAYERS)):
        starts = (len(LAYERS) - 1 - i) * every
        bottom.barh(layer, len(LAYERS) * every - starts, left=starts, color="tab:green")
        bottom.barh(layer, starts, color="lightgray")
    bottom.set(xlabel="step", xlim=(0, len(LAYERS) * every), title="trains (green), frozen (gray)")
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=16, help="epochs of each of the three phases")
    parser.add_argument("--picture", type=pathlib.Path, default=pathlib.Path("gradual_unfreezing.png"))
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")

    data, test = load()
    params = Classifier().init(jax.random.key(0), data[0][:1])["params"]
    few = data[1] < 5
    params = pretrain(params, batches_of(data[0][few], data[1][few], 10, 0))
    batches = batches_of(*data, 3 * args.epochs, 1)
    every = len(batches) // 3
    phases = [batches[i * every : (i + 1) * every] for i in range(3)]
    runs = {"one program": in_one_program(params, phases), "static phases": in_static_phases(params, phases)}

    table = Table("", *runs, title=f"{' -> '.join(LAYERS)}, one more every {every} steps")
    table.add_row("compilations", *(str(len(run.flops)) for run in runs.values()))
    for i, layer in enumerate(LAYERS):
        table.add_row(f"MFLOP a step, {layer} thawed", *(f"{(run.flops * 3)[i] / 1e6:.1f}" for run in runs.values()))
    for i, layer in enumerate(LAYERS):
        table.add_row(f"first step of {layer}", *(f"{run.moves[i]:.6f}" for run in runs.values()))
    table.add_row("held-out accuracy", *(f"{accuracy(run.params, *test):.1%}" for run in runs.values()))
    console = Console()
    console.print(table)
    first, second = (run.moves[1] for run in runs.values())
    console.print(
        f"The runs are the same until {LAYERS[1]} thaws at step {every}. In one program it then has an Adam of its "
        f"own, which counts from 0.\nIn static phases its fresh moments meet the count {every}, by which Adam takes "
        f"their bias for corrected: its first step is {second / first:.2f} times\nas long. (Migrated to groups of "
        "fz.freeze_when, or of optax.multi_transform, it counts from 0 as well.)",
        soft_wrap=True,
    )
    draw(runs, every, args.picture)
    console.print(f"which group trains when: {args.picture}")


if __name__ == "__main__":
    main()
