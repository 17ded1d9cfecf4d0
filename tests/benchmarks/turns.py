"""A stack of layers of which two are trainable, chosen by dynamic rows.

1. The gradient of a decoder of 16 layers on the device of the machine: time as a fraction of the time of the gradient
   of all layers, with ``fz.grad`` and ``fz.rows`` of a JAX array, and by hand (a scan with a backward loop written for
   this model). The last column has static rows. Times are minima of
   many alternating runs.
2. Llama 8B on four TPU v5e chips with the optimizer of ``scale.py``, any two layers, the norm and the head trainable:
   GiB on one chip, from the compiler, without a TPU.

Run with ``python tests/benchmarks/turns.py``.
"""

import functools
from collections.abc import Callable
from typing import Any

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import scale
import transformer

import optax_freeze as fz

LAYERS, TRAIN, WIDTH, ROUNDS = 16, 2, 256, 20


def loss_of(stack: Callable[..., jax.Array], params: Any, x: jax.Array) -> jax.Array:
    logits = stack(params["layers"], x) @ params["head"]
    return jax.nn.logsumexp(logits, -1).mean() - logits[..., 0].mean()


def scanned(layers: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, p: (transformer.block(x, p), None), x, layers)[0]


def by_hand(params: Any, index: jax.Array, x: jax.Array) -> Any:
    """The gradient of the head and of the layers in ``index``, in ascending order."""
    transpose, again = None, []  # the transpose of a layer, and for each of its residuals the parameter that it is

    def row(i: Any, tree: Any = params["layers"]) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, False), tree)

    def forward(x: jax.Array, i: Any) -> Any:
        nonlocal transpose, again
        p = row(i)
        y, back = jax.vjp(transformer.block, x, p)
        leaves, transpose = jax.tree.flatten(back)
        known = list(map(id, jax.tree.leaves(p)))
        again = [known.index(id(leaf)) if id(leaf) in known else None for leaf in leaves]
        return y, [leaf for leaf in leaves if id(leaf) not in known]

    last, stored = jax.lax.scan(forward, x, jnp.arange(LAYERS))
    value, of_last = jax.value_and_grad(
        lambda last, head: loss_of(lambda *_: last, {"layers": None, "head": head}, x), argnums=(0, 1)
    )(last, params["head"])

    def both(i: Any, ct: jax.Array) -> Any:
        rows, kept = jax.tree.leaves(row(i)), iter(row(i, stored))
        back: Any = jax.tree.unflatten(transpose, [next(kept) if at is None else rows[at] for at in again])
        return back(ct)

    def activations(i: Any, ct: jax.Array) -> Any:
        ct, of_layer = both(i, ct)
        return ct, jax.tree.map(jnp.zeros_like, of_layer)

    def step(state: Any) -> Any:
        i, ct, grads = state
        here = index == i
        ct, new = jax.lax.cond(here.any(), both, activations, i, ct)
        place = jnp.where(here.any(), jnp.argmax(here), TRAIN)
        return i - 1, ct, jax.tree.map(lambda to, row: to.at[place].set(row, mode="drop"), grads, new)

    zeros = jax.tree.map(lambda x: jnp.zeros((TRAIN, *x.shape[1:]), x.dtype), params["layers"])
    _, _, grads = jax.lax.while_loop(lambda state: state[0] >= index[0], step, (LAYERS - 1, of_last[0], zeros))
    return value, {"layers": grads, "head": of_last[1]}


def times() -> None:
    params = transformer.init(jax.random.key(0), LAYERS, WIDTH, vocabulary=128)
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["blocks"].values())
    params, x = {"layers": layers, "head": params["head"]}, jax.random.normal(jax.random.key(1), (8, 64, WIDTH))
    loss = functools.partial(loss_of, scanned)

    def by_turns(params: Any, index: jax.Array, x: jax.Array) -> Any:
        return fz.value_and_grad(loss, {"layers": ~fz.rows(index), "head": False})(params, x)

    turns, hand, everything = jax.jit(by_turns), jax.jit(by_hand), jax.jit(jax.value_and_grad(loss))
    programs = {"everything": lambda: everything(params, x)}
    choices = ([14, 15], [3, 7], [0, 1])
    for rows in choices:
        index, frozen = jnp.array(rows), {"layers": ~fz.rows(rows), "head": False}
        listed = jax.jit(fz.value_and_grad(loss, frozen))
        programs |= {
            f"{rows} fz": functools.partial(turns, params, index, x),
            f"{rows} by hand": functools.partial(hand, params, index, x),
            f"{rows} list": functools.partial(listed, params, x),
        }
        ours, theirs = (jax.tree.leaves(programs[f"{rows} {way}"]()[1]) for way in ("fz", "by hand"))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    least = measure.least_in_turn(programs, ROUNDS)
    columns = {"fz": "fz.rows(array)", "by hand": "by hand", "list": "fz.rows(list)"}
    table = measure.table(
        f"Time of a gradient / time of the gradient of all {LAYERS} layers",
        timed=[*columns.values()],
        label="trainable layers",
    )
    for rows in choices:
        table.add_row(str(rows), *(f"{least[f'{rows} {way}'] / least['everything']:.2f}" for way in columns))
    measure.show(table)


def by_turns(loss: Callable[..., jax.Array], params: Any, which: Any) -> scale.Step:
    """A step of ``scale.py`` that trains any ``TRAIN`` layers, given by an array; ``which`` is not used."""
    del which
    blocks = dict.fromkeys(params["blocks"], scale.AnyLayers(TRAIN))
    return scale.by_freeze(loss, params, {"embed": False, "blocks": blocks, "norm": True, "head": True})


scale.WAYS["two layers by turns"] = by_turns


def memory() -> None:
    results = scale.Results(None, to_the_end=True, script=__file__)
    cells = {
        "any two layers, norm, head": scale.Cell("8B", "v5e", 4, "last block and head", "two layers by turns"),
        "everything": scale.Cell("8B", "v5e", 4, "full", "fz.freeze"),
    }
    table = measure.table("8B on 4 TPU v5e chips, GiB per chip of 15.75", "arguments + temporaries", label="trainable")
    for name, cell in cells.items():
        table.add_row(name, scale.text(results(cell)))
    measure.show(table)


def main() -> None:
    if not scale.compiled_a_cell():
        times()
        memory()


if __name__ == "__main__":
    main()
