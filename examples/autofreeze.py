"""Layers that freeze by themselves, and then run once: AutoFreeze, and the stored activations of Egeria.

A net learns the digits 0 to 4, then all ten. In the second training its layers freeze from the input end, as their
gradients settle: ``fz.freeze_converged`` decides every two epochs, and the step, compiled once, differentiates the
others. Then again with ``fz.precompute``: when more layers are frozen, their outputs are computed for the whole data
set, and the steps start from there.

Run with ``python examples/autofreeze.py``.
"""

import argparse
import functools
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


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def step(params: Any, state: Any, batch: Any, tx: Any, fun: Any, frozen: Any) -> Any:
    """A step; ``frozen`` are the layers whose outputs ``fun`` takes instead of running them."""
    value, grads = fz.value_and_grad(fun, frozen or fz.spec_of(state))(params, *batch)
    if frozen:
        grads = fz.combine(grads, jax.tree.map(jnp.zeros_like, fz.partition(params, frozen)[1]))
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def train(title: str, params: Any, tx: Any, data: Any, epochs: int, once: bool = False) -> Any:
    """The parameters, what is frozen in each epoch, and the loss of each step."""
    state, inputs, program, rng = tx.init(params), data, (loss, ()), np.random.default_rng(0)
    before, history, losses = [], [], []
    for _ in track(range(epochs), title):
        frozen = tuple(layer for layer, is_frozen in fz.currently_frozen(state).items() if is_frozen)
        if once and frozen and frozen != history[-1]:
            divided = fz.precompute(loss, frozen, example_axis=0)
            inputs, program = (jax.jit(divided.before)(params, *data), *data), (divided.after, frozen)
        before.append(params)
        history.append(frozen)
        for chosen in rng.permutation(len(data[1]))[: len(data[1]) // BATCH * BATCH].reshape(-1, BATCH):
            batch = jax.tree.map(lambda array, chosen=chosen: array[chosen], inputs)
            params, state, value = step(params, state, batch, tx, *program)
            losses.append(value)
    for start, frozen in zip(before, history, strict=True):
        assert list(frozen) == LAYERS[: len(frozen)], "layers freeze from the input end"
        fz.assert_frozen(start, params, frozen or False)
    return params, history, np.array(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=16, help="epochs of each training with all ten digits")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")
    pixels, digits = load_digits(return_X_y=True)
    split = train_test_split(np.float32(pixels / 16), digits, random_state=0)
    images, test_images, labels, test_labels = map(np.asarray, split)
    plain, few, params = fz.freeze_when(ADAM, {}), labels < 5, jax.jit(Classifier().init)(jax.random.key(0), images[:1])
    params, *_ = train("0-4", params["params"], plain, (images[few], labels[few]), 6)
    data, batch, batches = (images, labels), (images[:BATCH], labels[:BATCH]), len(labels) // BATCH
    tx = fz.freeze_when(ADAM, fz.freeze_converged(LAYERS, interval=2 * batches))
    kinds = {"everything trains": (plain, False), "AutoFreeze": (tx, False), "frozen layers run once": (tx, True)}
    runs = {name: train(name, params, kind, data, args.epochs, once) for name, (kind, once) in kinds.items()}
    _, (_, history, losses), (_, same_history, same_losses) = runs.values()
    assert history == same_history
    np.testing.assert_allclose(same_losses, losses, rtol=1e-2, atol=1e-4)

    mflop = lambda f, *args: (jax.jit(f).lower(*args).compile().cost_analysis() or {})["flops"] / 1e6  # noqa: E731
    table = Table("from epoch", "frozen", *list(runs)[1:], title="MFLOP of a step")
    costs, totals = np.full(3, mflop(fz.value_and_grad(loss, False), params, *batch)), np.zeros(3)
    for epoch, frozen in enumerate(history):
        if frozen and frozen not in history[:epoch]:
            once = fz.precompute(loss, frozen, example_axis=0)
            costs[1] = mflop(fz.value_and_grad(loss, frozen), params, *batch)
            costs[2] = mflop(fz.value_and_grad(once.after, frozen), params, once.before(params, *batch), *batch)
            totals[2] += batches * mflop(once.before, params, *batch)
        if frozen not in history[:epoch]:
            table.add_row(str(epoch), ", ".join(frozen) or "nothing", *(f"{cost:.1f}" for cost in costs[1:]))
        totals += batches * costs
    Console().print(table)
    table = Table("", *runs)
    table.add_row("GFLOP of the training", *(f"{total / 1e3:.2f}" for total in totals))
    table.add_row("last loss", *(f"{losses[-1]:.4f}" for *_, losses in runs.values()))
    logits = (np.asarray(Classifier().apply({"params": params}, test_images)) for params, *_ in runs.values())
    table.add_row("held-out accuracy", *(f"{np.mean(rows.argmax(-1) == test_labels):.1%}" for rows in logits))
    Console().print(table)


if __name__ == "__main__":
    main()
