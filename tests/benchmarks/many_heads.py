"""Trains 16 heads, and 16 LoRA adapters, on one trunk: the decoder of ``transformer.py``, with AdamW.

``jax.vmap`` of one step, as in ``examples/many_heads.py``, beside 16 steps of their own, and beside one trunk and 16
tails by hand. FLOPs, bytes accessed and bytes in memory (arguments and temporaries), compiled for one TPU v5e chip.

Run with ``python tests/benchmarks/many_heads.py``.
"""

from typing import Any

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import jax.numpy as jnp
import optax
import transformer

import optax_freeze as fz

RUNS, RANK = 16, 8
TX = optax.adamw(1e-3)


def init_lora(key: jax.Array) -> Any:
    params, width = transformer.init(key), transformer.WIDTH
    pair = {"a": jnp.ones((width, RANK)), "b": jnp.zeros((RANK, 3 * width))}
    return {**params, "lora": dict.fromkeys(params["blocks"], pair)}


def of_lora(params: Any, tokens: jax.Array) -> jax.Array:
    """The loss of a model with adapters beside the queries, keys and values of each block."""
    blocks = {}
    for name, p in params["blocks"].items():
        pair = params["lora"][name]
        attention = {**p["attention"], "qkv": p["attention"]["qkv"] + pair["a"] @ pair["b"]}
        blocks[name] = {**p, "attention": attention}
    return transformer.loss({**params, "blocks": blocks}, tokens)


def step_of_heads(params: Any, state: Any, tokens: jax.Array) -> Any:
    """By hand: the trunk once, and a step of each head on its result."""
    x = params["embed"][tokens]
    for name in sorted(params["blocks"]):
        x = transformer.block(x, params["blocks"][name])

    of_head = jax.value_and_grad(lambda head: transformer.loss_from(x, [], head, tokens))
    heads, state, values = jax.vmap(measure.stepping(of_head, TX))(params["head"], state)
    return {**params, "head": heads}, state, values


def main() -> None:
    table = measure.table("A step of 16 of them (ratio to 16 steps)", "GFLOP", "GB accessed", "GB in memory")
    tokens = jax.ShapeDtypeStruct((transformer.BATCH, transformer.LENGTH), jnp.int32)
    for what, init, loss in (("head", transformer.init, transformer.loss), ("lora", init_lora, of_lora)):
        frozen = fz.all_except(what)
        params = jax.eval_shape(init, jax.random.key(0))
        tx = fz.freeze(TX, frozen)
        axes = jax.tree.map(lambda is_frozen: None if is_frozen else 0, fz.resolve(params, frozen))
        many = lambda x, axis: x if axis is None else jax.ShapeDtypeStruct((RUNS, *x.shape), x.dtype)  # noqa: E731
        stacked = jax.tree.map(many, params, axes, is_leaf=lambda x: x is None)
        states = jax.eval_shape(jax.vmap(tx.init, in_axes=(axes,)), stacked)
        vmapped = jax.vmap(fz.train_step(loss, tx), in_axes=(axes, 0, None), out_axes=(axes, 0, 0))
        one = measure.figures(fz.train_step(loss, tx), params, jax.eval_shape(tx.init, params), tokens)
        steps = {f"jax.vmap of fz.train_step, {what}": (vmapped, states)}
        if what == "head":
            by_hand = jax.eval_shape(jax.vmap(TX.init), stacked["head"])
            steps = {"one trunk and 16 tails by hand, head": (step_of_heads, by_hand), **steps}
        for name, (step, state) in steps.items():
            row = measure.figures(step, stacked, state, tokens)
            pairs = [(row.flops, one.flops), (row.accessed, one.accessed)]
            pairs.append((row.argument + row.temporary, one.argument + one.temporary))
            table.add_row(name, *(measure.with_ratio(a / 1e9, RUNS * b / 1e9, ".2f") for a, b in pairs))
    measure.show(table)


if __name__ == "__main__":
    main()
