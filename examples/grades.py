"""GradES: each weight matrix of a transformer freezes by itself, once its gradient is small.

A causal transformer over bytes learns some of Python's documentation. Its four blocks have 28 matrices. Each is a group
of its own, which freezes for good when the norm of its gradient becomes small (GradES, Wen et al., 2025). GradES has
one threshold for all matrices; here it is a share of the mean norm of the matrix's own gradients so far. Any set of
matrices may be frozen, in one compiled program.

Run with ``python examples/grades.py``.
"""

from typing import Any

import jax
import optax

import optax_freeze as fz


def settles(share: float, grace: int) -> Any:
    """The condition of a matrix: after ``grace`` steps, its gradient falls below a share of its mean norm."""
    return lambda step, stats: (step >= grace) & (stats.norm * stats.updates < share * stats.total)


def grades(optimizer: Any, share: float, grace: int) -> optax.GradientTransformation:
    """An optimizer that freezes every matrix of the blocks by its own gradient."""
    return fz.freeze_when(optimizer, {fz.each("blocks/**"): settles(share, grace)})


def training(loss: Any, tx: Any) -> Any:
    """A step that computes and applies the gradients of the matrices that still train."""
    return jax.jit(fz.train_step(loss, tx), donate_argnums=(0, 1))


# %%
import argparse
import builtins
import functools
import inspect
import itertools

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

BLOCKS, WIDTH, LENGTH, WINDOWS = 4, 32, 32, 32
ATTENTION, PERCEPTRON = ("query", "key", "value", "out"), ("gate", "up", "down")
MATRICES = BLOCKS * len(ATTENTION + PERCEPTRON)


def init(key: jax.Array) -> Any:
    keys = iter(jax.random.split(key, 2 + MATRICES))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5  # noqa: E731
    shapes = dict.fromkeys(ATTENTION, (WIDTH, WIDTH))
    shapes |= {"gate": (WIDTH, 2 * WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    blocks = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(BLOCKS)]
    return {"embed": normal(128, WIDTH), "blocks": blocks, "head": normal(WIDTH, 128)}


def normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def block(x: jax.Array, p: Any) -> jax.Array:
    h = normalised(x)
    q, k, v = (h @ p[name] for name in ("query", "key", "value"))
    scores = jnp.where(np.tri(LENGTH, dtype=bool), q @ k.mT * WIDTH**-0.5, -jnp.inf)
    x = x + jax.nn.softmax(scores) @ v @ p["out"] / BLOCKS
    h = normalised(x)
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"] / BLOCKS


def loss(params: Any, windows: jax.Array) -> jax.Array:
    x = 8 * params["embed"][windows[:, :-1]] + jnp.sin(jnp.arange(LENGTH)[:, None] / 8.0 ** jnp.linspace(0, 2, WIDTH))
    for p in params["blocks"]:
        x = block(x, p)
    return optax.softmax_cross_entropy_with_integer_labels(normalised(x) @ params["head"], windows[:, 1:]).mean()


def documentation() -> np.ndarray:
    text = "\n\n".join(inspect.getdoc(each) or "" for _, each in inspect.getmembers(builtins))
    data = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)
    return data[np.random.default_rng(0).integers(0, len(data) - LENGTH - 1, (WINDOWS, 1)) + np.arange(LENGTH + 1)]


def train(tx: Any, windows: np.ndarray, steps: int) -> Any:
    """The loss of each step, and the matrices that are frozen in it."""
    step, params, losses, history = training(loss, tx), jax.jit(init)(jax.random.key(0)), [], []
    state = jax.jit(tx.init)(params)
    for _ in track(range(steps)):
        frozen = [path for path, is_frozen in fz.currently_frozen(state).items() if is_frozen]
        before = jax.device_get(params)
        params, state, value = step(params, state, windows)
        fz.assert_frozen(before, params, frozen or False)
        losses.append(float(value))
        history.append(frozen)
    assert step._cache_size() == 1  # one program, whichever matrices are frozen
    assert all(set(earlier) <= set(later) for earlier, later in itertools.pairwise(history))  # for good
    return losses, history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each training")
    parser.add_argument("--share", type=float, default=0.2, help="freeze below this share of the mean gradient norm")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps: got {args.steps}, expected at least 1")
    windows, adam = documentation(), optax.adam(optax.cosine_decay_schedule(3e-3, args.steps))
    full, _ = train(fz.freeze_when(adam, {}), windows, args.steps)
    losses, history = train(grades(adam, args.share, grace=args.steps // 5), windows, args.steps)

    @functools.cache
    def mflop(*frozen: str) -> float:
        params = jax.eval_shape(init, jax.random.key(0))
        gradient = jax.jit(fz.value_and_grad(loss, frozen or False))
        return (gradient.lower(params, windows).cost_analysis() or {})["flops"] / 1e6

    costs = [mflop(*frozen) for frozen in history]
    table = Table("step", "frozen", "attention", "perceptron", "MFLOP", "loss", "loss if nothing freezes")
    for i in [*range(0, args.steps, max(1, args.steps // 10)), args.steps - 1]:
        kinds = [sum(path.rpartition("/")[2] in names for path in history[i]) for names in (ATTENTION, PERCEPTRON)]
        cells = (f"{len(history[i])} of {MATRICES}", *map(str, kinds), f"{costs[i]:.1f}")
        table.add_row(str(i), *cells, f"{losses[i]:.4f}", f"{full[i]:.4f}")
    Console().print(table)
    saved = 1 - sum(costs) / (costs[0] * len(costs))
    sets = len(set(map(tuple, history)))
    print(f"{sets} sets of frozen matrices, 1 compilation, {saved:.0%} fewer FLOPs of the gradients")


if __name__ == "__main__":
    main()
