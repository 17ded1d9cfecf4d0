"""Partially frozen leaves: the last of scanned layers and new rows of an embedding, compared with code written by hand.

1. The last block, norm and head of a scanned, rematerialized decoder of Llama 3's shape are trainable (bfloat16, AdamW,
   4096 tokens per data shard, FSDP times tensor parallelism): memory per TPU v5e chip with the whole stack
   differentiated, with the scan split by hand, and with ``fz.restrict`` and the unchanged model. In brackets is what a
   step that does not fit would need.
2. 16 new rows of an embedding are trainable, with AdamW; the loss is a lookup and a matmul, or a cross entropy over a
   tied head. Peers are masks, rows sliced from the dense gradient, and a model in which lookup and head are written by
   hand for separate old and new rows. Compiled for one TPU v5e chip.
3. The gradient of the last of 16 stacked layers: FLOPs with a scan and with a Python loop.

Run with ``python tests/benchmarks/frozen_rows.py`` (``--models 8B 70B 405B``: sizes of the decoder; takes minutes).
"""

import argparse
import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import jax.numpy as jnp
import optax
from decoder import ADAMW, SHAPES, Decoder, adamw_state, partition

import optax_freeze as fz

RUNS = {
    "8B": [("v5e:4x4", 4), ("v5e:2x2", 4)],
    "70B": [("v5e:8x8", 8), ("v5e:4x8", 8), ("v5e:4x4", 4)],
    "405B": [("v5e:16x16", 16), ("v5e:8x16", 16)],
}


def gib_per_chip(decoder: Decoder, how: str) -> float | str:
    """Memory of a step: the ``"whole"`` stack differentiated, the scan split ``"by hand"``, or ``"fz.restrict"``.

    If the step does not fit, a text with the memory that the compiler says it would need.
    """
    mesh = decoder.mesh()
    params, loss = decoder.params(mesh), decoder.loss(mesh)
    tokens = decoder.tokens(mesh)
    last = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype, sharding=a.sharding), params["blocks"]
    )

    def split_by_hand(trainable: Any, rest: Any, tokens: jax.Array) -> jax.Array:
        first = jax.tree.map(lambda a: a[:-1], rest["blocks"])
        return loss({**trainable, "embed": rest["embed"], "blocks": [first, trainable["blocks"]]}, tokens)

    def restricted(trainable: Any, rest: Any, tokens: jax.Array) -> jax.Array:
        return fz.restrict(loss, rest)(trainable, tokens)

    if how == "by hand":
        trainable = {"blocks": last, "norm": params["norm"], "head": params["head"]}
        rest: Any = {"embed": params["embed"], "blocks": params["blocks"]}
    else:
        blocks = how == "fz.restrict" and fz.rows(slice(0, decoder.layers - 1))
        frozen = {"embed": True, "blocks": blocks, "norm": False, "head": False}
        trainable, rest = partition(params, frozen)
    state = adamw_state(trainable, mesh)
    value_and_grad = jax.value_and_grad(split_by_hand if how == "by hand" else restricted)

    step = measure.stepping(value_and_grad, ADAMW)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(trainable, state, rest, tokens)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = re.search(r"temporaries \(([\d.]+)G\)", str(error))  # includes the arguments, despite its name
        if needed is None:
            raise
        return f"does not fit ({float(needed[1]):.1f})"
    memory = compiled.memory_analysis()
    assert memory
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return (used - memory.alias_size_in_bytes) / 2**30


def decoders(sizes: list[str]) -> None:
    columns = ("whole stack differentiated", "scan split by hand", "fz.restrict", "fz.restrict / by hand")
    table = measure.table("Last block, norm and head trainable: GiB per TPU v5e chip, of 15.75", *columns)
    for size in sizes:
        for topology, tensor_parallel in RUNS[size]:
            decoder = Decoder(*SHAPES[size], topology, tensor_parallel)
            used = [gib_per_chip(decoder, how) for how in ("whole", "by hand", "fz.restrict")]
            cells = [gib if isinstance(gib, str) else f"{gib:.1f}" for gib in used]
            by_hand, ours = used[1:]
            ratio = "" if isinstance(by_hand, str) or isinstance(ours, str) else f"{ours / by_hand:.2f}"
            table.add_row(f"{size} on {topology}, tensor parallelism {tensor_parallel}", *cells, ratio)
    measure.show(table)


VOCABULARY, WIDTH, NEW = 128_256, 2_048, 16
TX = optax.adamw(1e-3)


def lookup(embed: Any, out: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(embed[tokens] @ out) ** 2)


def tied(embed: Any, out: jax.Array, tokens: jax.Array) -> jax.Array:
    logits = jnp.tanh(embed[tokens] @ out) @ embed.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


@dataclasses.dataclass
class OldAndNew:
    """An embedding written by hand so that only its new rows have a gradient.

    ``old`` has all rows; its last ones are replaced by ``new``.
    """

    old: jax.Array
    new: jax.Array

    @property
    def first_new(self) -> int:
        return self.old.shape[0] - NEW

    def __getitem__(self, tokens: jax.Array) -> jax.Array:
        new = self.new[jnp.clip(tokens - self.first_new, 0, NEW - 1)]
        return jnp.where((tokens >= self.first_new)[..., None], new, self.old[tokens])

    @property
    def T(self) -> "OldAndNew":  # noqa: N802
        return self

    def __rmatmul__(self, h: jax.Array) -> jax.Array:
        start = (0,) * (h.ndim - 1) + (self.first_new,)
        return jax.lax.dynamic_update_slice(h @ self.old.T, h @ self.new.T, start)

    __array_priority__ = 1000


class RowStep(NamedTuple):
    """``step(embed, state, out, tokens)``, and ``init(embed, out)`` for its initial state."""

    step: Callable[..., Any]
    init: Callable[[jax.Array, jax.Array], Any]


def row_steps(loss: Callable[..., jax.Array], vocabulary: int) -> dict[str, RowStep]:
    """Steps that train only the last rows of an embedding."""
    old = vocabulary - NEW
    frozen = {"embed": fz.rows(slice(0, old)), "out": True}
    tx = fz.freeze(TX, frozen, full_updates=False)

    def masked(embed: jax.Array, state: Any, out: jax.Array, tokens: jax.Array) -> Any:
        mask = jax.lax.broadcasted_iota(jnp.int32, (vocabulary, 1), 0) < old
        grads = jnp.where(mask, 0, jax.grad(loss)(embed, out, tokens))
        updates: Any
        updates, state = TX.update(grads, state, embed)
        return embed + jnp.where(mask, 0, updates), state

    def cut_out(embed: jax.Array, state: Any, out: jax.Array, tokens: jax.Array) -> Any:
        updates, state = TX.update(jax.grad(loss)(embed, out, tokens)[old:], state, embed[old:])
        return embed.at[old:].add(updates), state

    def by_hand(embed: jax.Array, state: Any, out: jax.Array, tokens: jax.Array) -> Any:
        grads = jax.grad(lambda new: loss(OldAndNew(embed, new), out, tokens))(embed[old:])
        updates, state = TX.update(grads, state, embed[old:])
        return embed.at[old:].add(updates), state

    def with_fz(embed: jax.Array, state: Any, out: jax.Array, tokens: jax.Array) -> Any:
        params = {"embed": embed, "out": out}
        grads = fz.grad(lambda params, tokens: loss(params["embed"], params["out"], tokens), frozen)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return fz.apply_updates(params, updates)["embed"], state

    return {
        "masks computed from an iota": RowStep(masked, lambda embed, out: TX.init(embed)),
        "rows sliced from the dense gradient": RowStep(cut_out, lambda embed, out: TX.init(embed[old:])),
        "model with old and new rows split by hand": RowStep(by_hand, lambda embed, out: TX.init(embed[old:])),
        "fz.grad, the model unchanged": RowStep(with_fz, lambda embed, out: tx.init({"embed": embed, "out": out})),
    }


def new_rows(chip: Any) -> None:
    embed = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32)
    out = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    tokens = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    columns = ("lookup: GB accessed", "lookup: MB temporary", "tied head: GB accessed", "tied head: MB temporary")
    table = measure.table(f"One AdamW step, {NEW} new rows of {VOCABULARY:,} x {WIDTH:,} trainable", *columns)
    cells: dict[str, list[str]] = {}
    for loss in (lookup, tied):
        for name, each in row_steps(loss, VOCABULARY).items():
            state = jax.eval_shape(each.init, embed, out)
            row = measure.figures(each.step, *measure.on(chip, (embed, state, out, tokens)))
            cells.setdefault(name, []).extend([f"{row.accessed / 1e9:.3f}", f"{row.temporary / 1e6:.1f}"])
    for name, figures in cells.items():
        table.add_row(name, *figures)
    measure.show(table)


LAYERS, SMALL = 16, 256


def stacks() -> None:
    """FLOPs of the gradient of a stack of layers, in a scan and in a Python loop."""

    def block(x: jax.Array, p: Any) -> jax.Array:
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def loop(params: Any, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x = jax.checkpoint(block)(x, jax.tree.map(lambda a, i=i: a[i], params))
        return jnp.mean(x**2)

    def unrolled(params: Any, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(block)(x, p), None), x, params, unroll=LAYERS)
        return jnp.mean(x**2)

    params = {"up": jnp.zeros((LAYERS, SMALL, 4 * SMALL)), "down": jnp.zeros((LAYERS, 4 * SMALL, SMALL))}
    trainable, rest = fz.partition(params, fz.rules({"**": fz.rows(slice(0, LAYERS - 1))}))
    x = jnp.zeros((512, SMALL))

    def flops(loss: Callable[..., jax.Array]) -> float:
        fun = jax.grad(lambda trainable, rest, x: fz.restrict(loss, rest)(trainable, x))
        cost = jax.jit(fun).lower(trainable, rest, x).compile().cost_analysis()
        assert cost
        return cost["flops"]

    table = measure.table(f"Gradient of the last of {LAYERS} stacked layers", "FLOPs, scan / Python loop")
    table.add_row("fz.restrict, scan unrolled", f"{flops(unrolled) / flops(loop):.3f}")
    measure.show(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(RUNS), default=["8B"], help="sizes of the decoder")
    args = parser.parse_args()
    chip = measure.tpu_sharding()
    if chip is not None:
        decoders(args.models)
    new_rows(chip)
    stacks()


if __name__ == "__main__":
    main()
