"""Train a generative adversarial network: two networks freeze in turn, in one compiled program.

The data are eight Gaussians around a circle. A generator learns to place points where the data has
them, and a discriminator to tell the two apart. Each has its own loss. ``fz.freeze_when`` with
``fz.alternate`` freezes one network while the other trains: its bits, and the moments and the count
of its Adam, stay the same, and nothing is compiled again.

Run with ``python examples/gan_alternating.py``; it draws ``gan_alternating.png``.
"""

from typing import Any

import jax
import jax.numpy as jnp

import optax_freeze as fz

TURN = 5  # updates of one network before the other trains
GROUPS = {"generator": fz.alternate(TURN), "discriminator": fz.alternate(TURN, offset=TURN)}


def training(adam: Any, losses: Any) -> tuple[Any, Any]:
    """An Adam for each network, and a step for the one that trains now; ``losses`` returns both."""
    tx = fz.freeze_when(adam, GROUPS)

    def loss(params: Any, frozen: Any, key: jax.Array) -> jax.Array:
        of_generator, of_discriminator = losses(params, key)
        return jnp.where(frozen["generator"], of_discriminator, of_generator)

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array) -> Any:
        return fz.train_step(loss, tx)(params, state, fz.currently_frozen(state), key)

    return tx, step


# %%
import argparse

import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

BATCH, WIDTH = 256, 64
ANGLES = np.arange(8) * np.pi / 4
CENTRES = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)
OUTPUTS = {"generator": 2, "discriminator": 1}


def init(key: jax.Array, sizes: tuple[int, ...]) -> list[Any]:
    """The layers of a multilayer perceptron."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"kernel": jax.random.normal(k, (n, m)) * np.sqrt(2 / n), "bias": jnp.zeros(m)}
        for k, n, m in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def perceptron(layers: list[Any], x: jax.Array) -> jax.Array:
    for i, layer in enumerate(layers):
        x = (jax.nn.leaky_relu(x, 0.2) if i else x) @ layer["kernel"] + layer["bias"]
    return x


def real_points(key: jax.Array, n: int) -> jax.Array:
    """Points of the data: one of eight centres, and a little noise."""
    which, noise = jax.random.split(key)
    return jnp.asarray(CENTRES)[jax.random.randint(which, (n,), 0, 8)] + 0.05 * jax.random.normal(noise, (n, 2))


def fake_points(params: Any, key: jax.Array, n: int) -> jax.Array:
    """Points of the generator, from noise."""
    return perceptron(params["generator"], jax.random.normal(key, (n, 2)))


def losses(params: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The loss of the generator, and the loss of the discriminator."""
    real_key, fake_key = jax.random.split(key)
    on_real = perceptron(params["discriminator"], real_points(real_key, BATCH))
    on_fake = perceptron(params["discriminator"], fake_points(params, fake_key, BATCH))
    return jax.nn.softplus(-on_fake).mean(), (jax.nn.softplus(-on_real) + jax.nn.softplus(on_fake)).mean()


def quality(points: jax.Array) -> tuple[str, str]:
    """The share of points near a centre, and the number of centres with at least a third of their share."""
    near = jnp.linalg.norm(points[:, None] - CENTRES, axis=-1) < 0.2
    return f"{near.any(axis=1).mean():.0%}", f"{(near.mean(axis=0) > 1 / 24).sum()} of 8"


def digest(tree: Any) -> str:
    return np.asarray(fz.fingerprint(tree, True)).tobytes().hex()[:8]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1200, help=f"turns of {TURN} updates, of both networks together")
    parser.add_argument("--picture", default="gan_alternating.png")
    args = parser.parse_args()
    if args.turns < 1:
        parser.error(f"--turns: got {args.turns}, expected at least 1")
    rates = optax.cosine_decay_schedule(4e-3, args.turns * TURN // 2 + 1)
    tx, step = training(optax.adam(rates, b1=0.5, b2=0.9), losses)
    params = start = {name: init(jax.random.key(n), (2, WIDTH, WIDTH, n)) for name, n in OUTPUTS.items()}
    state: Any = tx.init(params)
    turns = Table("turn", "frozen", "generator", "its Adam", "discriminator", "its Adam", title="fingerprints by turn")
    for turn in track(range(args.turns), "turns"):
        [still] = [name for name, frozen in fz.currently_frozen(state).items() if frozen]
        before, before_state = params, state
        for key in jax.random.split(jax.random.fold_in(jax.random.key(2), turn), TURN):
            params, state, _ = step(params, state, key)
        fz.assert_frozen(before, params, still)
        fz.assert_frozen(before_state.groups[still], state.groups[still], True)
        if turn < 4:
            turns.add_row(f"{turn}", still, *(digest(tree[name]) for name in GROUPS for tree in (params, state.groups)))

    console, key = Console(), jax.random.key(3)
    console.print(turns)
    console.print(f"In all {args.turns} turns, no bit of the frozen network and of its Adam moved (fz.assert_frozen).")
    console.print(f"{args.turns * TURN} updates, {step._cache_size()} compilation")
    table = Table("points", "near a centre", "centres reached")
    points = {"before": fake_points(start, key, 5000), "after": fake_points(params, key, 5000)}
    points["data"] = real_points(key, 5000)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (name, each) in zip(figure.subplots(1, 3, sharex=True, sharey=True), points.items(), strict=True):
        table.add_row(name, *quality(each))
        axes.scatter(*each[:1000].T, s=1)
        axes.set(title=name, xlim=(-2, 2), ylim=(-2, 2), aspect="equal")
    console.print(table)
    figure.savefig(args.picture, dpi=100)


if __name__ == "__main__":
    main()
