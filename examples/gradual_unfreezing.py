"""Gradual unfreezing of a classifier of handwritten digits: in one program, and in static phases.

A small net learns the digits 0 to 4, then all ten, unfrozen layer by layer from the output end. The same schedule runs
twice: with ``fz.freeze_when``, compiled once, and in phases with ``fz.freeze`` and ``fz.migrate``, each compiled by
itself. The step is the same: what is frozen has no gradient. They differ once a second layer thaws.

Run with ``python examples/gradual_unfreezing.py``.
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_freeze as fz

LAYERS = ["head", "hidden_1", "hidden_0"]  # from the output end
ADAM, BATCH = optax.adam(1e-3), 64


class Classifier(nn.Module):
    """Images of shape (n, 64) to ten logits."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for name in reversed(LAYERS[1:]):
            x = nn.relu(nn.Dense(256, name=name)(x))
        return nn.Dense(10, name=LAYERS[0])(x)


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    logits = jnp.asarray(Classifier().apply({"params": params}, images))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def batches_of(images: np.ndarray, labels: np.ndarray, epochs: int) -> list[Any]:
    """Shuffled batches of one size."""
    rng, used = np.random.default_rng(0), len(labels) // BATCH * BATCH
    orders = [rng.permutation(len(labels))[:used].reshape(-1, BATCH) for _ in range(epochs)]
    return [(images[chosen], labels[chosen]) for chosen in np.concatenate(orders)]


def compiled(tx: Any, *example: Any) -> Any:
    """A training step as a finished program: it cannot compile again, whatever thaws."""

    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        return fz.update_params(tx, fz.grad(loss, fz.spec_of(state))(params, images, labels), state, params)

    return jax.jit(step).lower(*example).compile()


def unfreeze(title: str, params: Any, batches: list[Any], plan: list[Any]) -> tuple[Any, list[Any], list[float]]:
    """The parameters, the programs, and how far the layer that thaws moves in the first step of each phase."""
    tx, state, programs, first_steps = None, None, [], []
    for next_tx, layer in zip(plan, LAYERS, strict=True):
        if next_tx is not tx:  # the first phase, or a static one
            tx = next_tx
            state = tx.init(params) if state is None else fz.migrate(state, tx, params)
            programs.append(compiled(tx, params, state, *batches[0]))
        before = params[layer]["kernel"]
        for i, batch in enumerate(track(batches, f"{title}, {layer} thaws")):
            params, state = programs[-1](params, state, *batch)
            if i == 0:
                first_steps.append(float(jnp.sqrt(((params[layer]["kernel"] - before) ** 2).mean())))
    return params, programs, first_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=16, help="epochs of each of the three phases")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")

    pixels, digits = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = map(np.asarray, train_test_split(pixels / 16.0, digits, random_state=0))
    few, batches = batches_of(images[labels < 5], labels[labels < 5], 10), batches_of(images, labels, args.epochs)
    params = Classifier().init(jax.random.key(0), images[:1])["params"]
    tx = fz.freeze(ADAM, False)
    state = tx.init(params)
    step = compiled(tx, params, state, *few[0])
    for batch in few:
        params, state = step(params, state, *batch)

    every, frozen = len(batches), [fz.only(*LAYERS[:1]), fz.only(*LAYERS[:2]), False]
    plans = {
        "one program": [fz.freeze_when(ADAM, fz.gradual_unfreeze(LAYERS, every))] * 3,
        "static phases": [fz.freeze(ADAM, spec) for spec in frozen],
    }
    runs = [unfreeze(name, params, batches, plan) for name, plan in plans.items()]

    table = Table("", *plans, title=f"{' -> '.join(LAYERS)}, one more every {every} steps")
    table.add_row("compilations", *(str(len(programs)) for _, programs, _ in runs))
    for i, layer in enumerate(LAYERS):
        costs = (programs[i % len(programs)].cost_analysis() for _, programs, _ in runs)
        table.add_row(f"{layer} thaws: MFLOP of a step, at most", *(f"{cost['flops'] / 1e6:.1f}" for cost in costs))
        table.add_row(f"{layer} thaws: its first step", *(f"{first_steps[i]:.6f}" for *_, first_steps in runs))
    logits = (np.asarray(Classifier().apply({"params": params}, test_images)) for params, _, _ in runs)
    table.add_row("held-out accuracy", *(f"{np.mean(rows.argmax(-1) == test_labels):.1%}" for rows in logits))
    Console().print(table)
    print("The one program has a branch for each phase, of which the compiler counts the most expensive.")
    ratio = runs[1][2][1] / runs[0][2][1]
    print(f"In one program, {LAYERS[1]} thaws with an Adam of its own, which counts from 0. In static phases, fresh")
    print(
        f"moments meet the count {every}, by which Adam corrects no bias: the first step is {ratio:.2f} times as long."
    )


if __name__ == "__main__":
    main()
