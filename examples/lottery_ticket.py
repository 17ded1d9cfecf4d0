"""Train a few single weights of a net and freeze the others at their first value.

A net for scikit-learn's digits is trained densely. The weights that moved most are its winning ticket: the net starts
again from the same first values, and only these weights train. The others are frozen where they began, not at zero; the
optimizer holds state for the ticket alone. As many weights chosen at random are trained beside it.

Run with ``python examples/lottery_ticket.py``; takes a minute on two cores.
"""

import argparse
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_freeze as fz

SIZES, BATCH = (64, 128, 64, 10), 64
TX = optax.adam(3e-3)


def init(key: jax.Array) -> Any:
    """A multilayer perceptron."""
    return {
        f"layer_{i}": {"kernel": jax.random.normal(k, (a, b)) * np.sqrt(2 / a), "bias": jnp.zeros(b)}
        for i, (k, a, b) in enumerate(zip(jax.random.split(key, 3), SIZES[:-1], SIZES[1:], strict=True))
    }


def logits_of(params: Any, images: jax.Array) -> jax.Array:
    """Images of shape (n, 64) to ten logits."""
    x = images
    for i in range(len(SIZES) - 1):
        x = (jax.nn.relu(x) if i else x) @ params[f"layer_{i}"]["kernel"] + params[f"layer_{i}"]["bias"]
    return x


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels).mean()


class Run(NamedTuple):
    """What a training came to."""

    params: Any
    accuracy: float
    state_bytes: int


def train(params: Any, frozen: Any, data: Any, epochs: int) -> Run:
    """Trains what is not frozen; masks are arguments of the compiled step, so that all tickets of a size share one."""
    train_x, test_x, train_y, test_y = data
    tx = fz.freeze(TX, frozen, full_updates=False)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        spec = fz.spec_of(state)
        updates, state = tx.update(fz.grad(loss, spec)(params, images, labels), state, params)
        return fz.apply_updates(params, updates, spec), state

    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.dtype != jnp.bool_)
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        order = rng.permutation(len(train_y))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            params, state = step(params, state, train_x[chosen], train_y[chosen])
    return Run(params, float((logits_of(params, test_x).argmax(-1) == test_y).mean()), state_bytes)


def all_but_largest(scores: Any, fraction: float) -> Any:
    """A mask for each leaf: frozen are all elements but the fraction with the largest scores over the whole net."""
    flat = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(scores)])
    threshold = np.sort(flat)[-max(1, round(fraction * flat.size))]
    return jax.tree.map(lambda leaf: fz.elements(np.asarray(leaf) < threshold, compact=True), scores)


def moved_where_frozen(before: Any, after: Any, masks: Any) -> int:
    """How many frozen elements have other bits now."""
    leaves = zip(*(jax.tree.leaves(tree) for tree in (before, after)), jax.tree.leaves(masks), strict=True)
    return sum(int((np.asarray(a).view(np.uint32) != np.asarray(b).view(np.uint32))[m].sum()) for a, b, m in leaves)


def draw(rows: list[tuple[float, Run, Run]], dense: Run, picture: pathlib.Path) -> None:
    """Accuracy against the share of trained weights."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    shares = [100 * share for share, _, _ in rows]
    axes.axhline(dense.accuracy, color="tab:gray", linestyle="--", label="every weight trains")
    axes.plot(shares, [ticket.accuracy for _, ticket, _ in rows], "o-", label="the weights that moved most")
    axes.plot(shares, [random.accuracy for _, _, random in rows], "s-", label="as many at random")
    axes.set(xscale="log", xlabel="weights that train (%)", ylabel="held-out accuracy", title="Tickets on the digits")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="epochs of each training")
    parser.add_argument("--picture", type=pathlib.Path, default=pathlib.Path("lottery_ticket.png"))
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs: got {args.epochs}, expected at least 1")
    console = Console()

    images, labels = load_digits(return_X_y=True)
    data = train_test_split(np.asarray(images, np.float32) / 16, labels, random_state=0, stratify=labels)
    params = init(jax.random.key(0))
    dense = train(params, False, data, args.epochs)
    scores = jax.tree.map(lambda a, b: jnp.abs(a - b), dense.params, params)
    noise = jax.tree.map(lambda leaf: np.random.default_rng(leaf.size).random(leaf.shape), params)

    table = Table("weights that train", "most moved", "at random", "optimizer state", "frozen elements that moved")
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    table.add_row(
        f"{total:,} (100 %)", f"{dense.accuracy:.1%}", f"{dense.accuracy:.1%}", f"{dense.state_bytes:,} bytes", ""
    )
    rows = []
    with Progress(console=console) as progress:
        for share in progress.track([0.005, 0.01, 0.02, 0.05, 0.1, 0.3], description="tickets"):
            masks = [all_but_largest(of, share) for of in (scores, noise)]
            ticket, random = (train(params, mask, data, args.epochs) for mask in masks)
            rows.append((share, ticket, random))
            moved = [moved_where_frozen(params, run.params, m) for run, m in zip((ticket, random), masks, strict=True)]
            table.add_row(
                f"{round(share * total):,} ({share:.1%})",
                f"{ticket.accuracy:.1%}",
                f"{random.accuracy:.1%}",
                f"{ticket.state_bytes:,} bytes",
                f"{sum(moved)}",
            )
    console.print(table)
    draw(rows, dense, args.picture)
    console.print(f"accuracy against the share of weights: {args.picture}")


if __name__ == "__main__":
    main()
