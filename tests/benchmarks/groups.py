"""What many groups of ``fz.freeze_when`` cost on the host: tracing a step, and calling the compiled step.

1. Tracing a training step of n residual layers (a kernel, a bias and a scale each), each layer a group with an AdamW of
   its own, compared with tracing ``jax.value_and_grad`` of the loss. Beside it, of 50 layers, the step of the plain
   optimizer and that of ``optax.multi_transform`` with a label for each layer. CPU times; medians of alternating
   runs with empty caches.
2. Calling a jitted step of groups of one leaf of two elements, with donated parameters and state, compared with the
   step of the plain optimizer. The computation takes almost nothing. CPU times; minima of alternating runs. The nodes
   of the state are all that JAX visits in each call: containers, arrays and placeholders.

Run with ``python tests/benchmarks/groups.py``.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import measure
import optax

import optax_freeze as fz

ADAMW = optax.adamw(1e-3)


def layers(n: int) -> Any:
    layer = {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8), "scale": jnp.ones(8)}
    return {f"layer_{i:03d}": layer for i in range(n)}


def loss(params: Any, x: Any) -> Any:
    for layer in params.values():
        x = x + jnp.tanh(x @ layer["kernel"] + layer["bias"]) * layer["scale"]
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return jnp.sum(x**2)


def tracing(n: int, rounds: int, *, others: bool) -> None:
    params, x = layers(n), jnp.ones((2, 8))
    grouped = fz.freeze_when(ADAMW, {name: fz.unfreeze_at(i) for i, name in enumerate(params)})
    labels = {name: dict.fromkeys(layer, name) for name, layer in params.items()}
    labelled = optax.multi_transform(dict.fromkeys(params, ADAMW), labels)
    steps = {"fz.train_step, fz.freeze_when": (fz.train_step(loss, grouped), grouped)}
    if others:
        of_loss = jax.value_and_grad(loss)
        steps["plain optimizer"] = measure.stepping(of_loss, ADAMW), ADAMW
        steps["optax.multi_transform"] = measure.stepping(of_loss, labelled), labelled
    traces = {"jax.value_and_grad": lambda: jax.jit(jax.value_and_grad(loss)).trace(params, x)}
    states = {name: jax.eval_shape(tx.init, params) for name, (_, tx) in steps.items()}
    for name, (step, _) in steps.items():
        traces[name] = functools.partial(lambda step, state: jax.jit(step).trace(params, state, x), step, states[name])

    seconds = measure.tracing_in_turn(traces, rounds)
    table = measure.table(f"Tracing a step of {n} layers, each a group", timed=("seconds", "ratio"))
    for name, median in seconds.items():
        table.add_row(name, f"{median:.2f}", f"{median / seconds['jax.value_and_grad']:.2f}")
    measure.show(table)


def calling(sizes: tuple[int, ...], rounds: int) -> None:
    title = "Calling a jitted step of n groups of one leaf, with donated parameters and state"
    table = measure.table(title, "nodes of the state", timed=("ms", "ratio to plain"), label="n")
    for n in sizes:
        params = {f"leaf_{i:03d}": jnp.full(2, float(i)) for i in range(n)}
        of_sum = lambda params: sum(jnp.sum(x) for x in params.values())  # noqa: E731
        grouped = fz.freeze_when(ADAMW, dict.fromkeys(params, False))

        plain = measure.stepping(jax.value_and_grad(of_sum), ADAMW)
        calls = {
            "plain": Called(plain, params, ADAMW.init(params)),
            "groups": Called(fz.train_step(of_sum, grouped), params, grouped.init(params)),
        }
        seconds = measure.least_in_turn(calls, rounds)
        nodes = jax.tree.structure(calls["groups"].carried[1]).num_nodes
        ratio = seconds["groups"] / seconds["plain"]
        table.add_row(str(n), str(nodes), f"{seconds['groups'] * 1e3:.2f}", f"{ratio:.1f}")
    measure.show(table)


class Called:
    """A step that returns the parameters and the state that it is called with next."""

    def __init__(self, step: Callable[..., Any], params: Any, state: Any) -> None:
        self.step = jax.jit(step, donate_argnums=(0, 1))
        self.carried = jax.tree.map(jnp.copy, (params, state))
        self()

    def __call__(self) -> Any:
        *self.carried, value = self.step(*self.carried)
        return value


def main() -> None:
    tracing(50, 3, others=True)
    tracing(400, 2, others=False)
    calling((28, 200), 100)


if __name__ == "__main__":
    main()
