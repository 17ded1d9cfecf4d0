"""Partially frozen leaves: layers of a scan, rows, and single elements, compared with code written by hand.

1. The last block, norm and head of a scanned, rematerialized decoder are trainable, as in ``scale.py``: memory per TPU
   v5e chip with the whole stack differentiated, with the scan split by hand, and with ``fz.restrict`` and the unchanged
   model (arguments + temporaries; ``no``: does not fit; ``alone``: the arguments alone do not fit).
2. 16 new rows of an embedding are trainable, with AdamW; the loss is a lookup and a matmul, or a cross entropy over a
   tied head. Peers, written by hand: masks applied with ``jnp.where``, masks that multiply, rows sliced from the dense
   gradient, and a model in which lookup and head have separate old and new rows.
3. The last rows of a position embedding or an output bias, or the last columns of an untied head, are trainable, with
   and without the layers: the gradient of a network of 4 layers, on 8 sequences of 512 tokens with width 512 and a
   vocabulary of 32,768. Peers: the whole leaf trainable, and the parameter concatenated by hand from a frozen and a
   trainable part. The last column is temporary plus output bytes, because XLA uses output buffers for temporary values
   until it writes the outputs.
4. The gradient of the last of 16 stacked layers: FLOPs with a scan and with a Python loop, on this machine.
5. Half of the elements of a layer are trainable under a dense mask: a step with forward and backward pass, compared
   with the unmasked step; and the size of the executable of an update with a mask, compared with that without.

Compiled for one TPU v5e chip if nothing else is said.

Run with ``python tests/benchmarks/frozen_rows.py``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import jax.numpy as jnp
import optax
import scale
from decoder import ADAMW, adamw_state

import optax_freeze as fz

CHIPS = {"8B": (16, 4), "70B": (64, 32, 16), "405B": (256, 128)}


def whole_stack(loss: Callable[..., jax.Array], params: Any, which: Any) -> scale.Step:
    return scale.by_restrict(loss, params, {**which, "blocks": dict.fromkeys(which["blocks"], True)})


def split_by_hand(loss: Callable[..., jax.Array], params: Any, which: Any) -> scale.Step:
    del which
    last = jax.tree.map(lambda a: a.update(shape=(1, *a.shape[1:])), params["blocks"])
    trainable = {"blocks": last, "norm": params["norm"], "head": params["head"]}

    def of_parts(trainable: Any, rest: Any, tokens: jax.Array) -> jax.Array:
        first = jax.tree.map(lambda a: a[:-1], rest["blocks"])
        return loss({**trainable, "embed": rest["embed"], "blocks": [first, trainable["blocks"]]}, tokens)

    state = adamw_state(trainable, params["norm"].sharding.mesh)
    rest = {"embed": params["embed"], "blocks": params["blocks"]}
    return (trainable, state, rest), measure.stepping(jax.value_and_grad(of_parts), ADAMW)


WAYS = {"whole stack differentiated": whole_stack, "scan split by hand": split_by_hand}
scale.WAYS |= WAYS


def decoders() -> None:
    results, ways = scale.Results(None, to_the_end=False, script=__file__), (*WAYS, "fz.restrict")
    table = measure.table("Last block, norm and head trainable: GiB per TPU v5e chip, of 15.75", *ways)
    for size, numbers in CHIPS.items():
        for chips in numbers:
            cells = (results(scale.Cell(size, "v5e", chips, "last block and head", way)) for way in ways)
            table.add_row(f"{size} on {chips} chips", *map(scale.text, cells))
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


BY_HAND, OURS = "model with old and new rows split by hand", "fz.grad, the model unchanged"


def row_steps(loss: Callable[..., jax.Array], vocabulary: int) -> dict[str, RowStep]:
    """Steps that train only the last rows of an embedding."""
    old = vocabulary - NEW
    frozen = {"embed": fz.rows(slice(0, old)), "out": True}

    def mask_of(embed: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jax.lax.broadcasted_iota(jnp.int32, (vocabulary, 1), 0) < old, embed.shape)

    def masked(zero: Callable[[Any, Any], Any], *, dense: bool = False) -> RowStep:
        """Gradient and update are masked by hand; the optimizer receives the whole leaf."""

        def step(embed: jax.Array, state: Any, out: jax.Array, tokens: jax.Array) -> Any:
            inner, mask = state if dense else (state, mask_of(embed))
            updates, inner = TX.update(zero(mask, jax.grad(loss)(embed, out, tokens)), inner, embed)
            return optax.apply_updates(embed, zero(mask, updates)), (inner, mask) if dense else inner

        return RowStep(step, lambda embed, out: (TX.init(embed), mask_of(embed)) if dense else TX.init(embed))

    def of_rows(gradient: Callable[..., Any]) -> RowStep:
        """The optimizer receives rows, which are added to the leaf."""

        def step(embed: jax.Array, state: Any, out: jax.Array, tokens: jax.Array) -> Any:
            updates, state = TX.update(gradient(embed, out, tokens), state, embed[old:])
            return embed.at[old:].add(updates), state

        return RowStep(step, lambda embed, out: TX.init(embed[old:]))

    def split_rows(embed: jax.Array, out: jax.Array, tokens: jax.Array) -> Any:
        return jax.grad(lambda new: loss(OldAndNew(embed, new), out, tokens))(embed[old:])

    def with_fz(*, restricted: bool = False, full_updates: bool = False) -> RowStep:
        tx = fz.freeze(TX, frozen, full_updates=full_updates)

        def step(embed: jax.Array, state: Any, out: jax.Array, tokens: jax.Array) -> Any:
            params = {"embed": embed, "out": out}
            if restricted:
                grads = fz.grad(lambda p, tokens: loss(p["embed"], p["out"], tokens), frozen)(params, tokens)
            else:
                grads = {"embed": jax.grad(loss)(embed, out, tokens), "out": optax.MaskedNode()}
            updates, state = tx.update(grads, state, params)
            new: Any = optax.apply_updates(params, updates) if full_updates else fz.apply_updates(params, updates)
            return new["embed"], state

        return RowStep(step, lambda embed, out: tx.init({"embed": embed, "out": out}))

    where = lambda mask, x: jnp.where(mask, 0, x)  # noqa: E731
    return {
        "nothing frozen": masked(lambda mask, x: x),
        "masks computed from an iota": masked(where),
        "dense mask, jnp.where": masked(where, dense=True),
        "dense mask, g * (1 - mask), as pruning libraries do": masked(lambda mask, x: x * (1 - mask), dense=True),
        "rows sliced from the dense gradient": of_rows(lambda *args: jax.grad(loss)(*args)[old:]),
        BY_HAND: of_rows(split_rows),
        "fz.freeze, jax.grad, optax.apply_updates": with_fz(full_updates=True),
        "fz.freeze with full_updates=False, jax.grad": with_fz(),
        OURS: with_fz(restricted=True),
    }


def new_rows() -> None:
    embed = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32)
    out = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    tokens = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    cells: dict[str, list[str]] = {}
    for loss in (lookup, tied):
        for name, each in row_steps(loss, VOCABULARY).items():
            state = jax.eval_shape(each.init, embed, out)
            row = measure.figures(each.step, embed, state, out, tokens)
            its = cells.setdefault(name, [f"{measure.nbytes(state) / 1e6:.2f}"])
            its += [f"{row.accessed / 1e9:.3f}", f"{row.temporary / 1e6:.1f}", f"{row.executable / 1e3:.0f}"]
    columns = (
        f"{loss}: {what}"
        for loss in ("lookup", "tied head")
        for what in ("GB accessed", "MB temporary", "kB executable")
    )
    table = measure.table(
        f"One AdamW step, {NEW} new rows of {VOCABULARY:,} x {WIDTH:,} trainable", "state MB", *columns
    )
    for name, figures in cells.items():
        table.add_row(name, *figures)
    measure.show(table)


PARAMS = {
    "positions": jax.ShapeDtypeStruct((512, 512), jnp.float32),
    "layers": jax.ShapeDtypeStruct((4, 512, 512), jnp.float32),
    "head": jax.ShapeDtypeStruct((512, 32_768), jnp.float32),
    "bias": jax.ShapeDtypeStruct((32_768,), jnp.float32),
}


def network(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    x = x + params["positions"]
    for w in params["layers"]:
        x = x + jax.nn.gelu(x @ w)
    logits = x @ params["head"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gradients(leaf: str, axis: int, new: int, layers_train: bool) -> dict[str, Callable[..., Any]]:
    """The gradient of the last rows, and of the layers if they are trainable, computed in three ways."""
    old = PARAMS[leaf].shape[axis] - new
    frozen = {name: name != "layers" or not layers_train for name in PARAMS}

    def by_hand(params: Any, *batch: Any) -> Any:
        first, last = jnp.split(params[leaf], [old], axis)
        trainable = {leaf: last} | ({"layers": params["layers"]} if layers_train else {})

        def of_trainable(trainable: Any) -> jax.Array:
            return network({**params, **trainable, leaf: jnp.concatenate([first, trainable[leaf]], axis)}, *batch)

        return jax.grad(of_trainable)(trainable)

    return {
        "whole leaf trainable": fz.grad(network, {**frozen, leaf: False}),
        "concatenated by hand": by_hand,
        "fz.grad": fz.grad(network, {**frozen, leaf: fz.rows(slice(0, old), axis)}),
    }


def batch_of(sequences: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    shape = (sequences, *PARAMS["positions"].shape)
    return jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:-1], jnp.int32)


def other_rows() -> None:
    table = measure.table("One gradient of other rows", "GFLOP", "GB accessed", "MB temporary + output")
    batch = batch_of(8)
    for leaf, axis, new in (("positions", 0, 128), ("bias", 0, 64), ("head", 1, 64)):
        for layers_train in (False, True):
            where = f"{new} {'columns' if axis else 'rows'} of {leaf}{' and the layers' * layers_train}"
            for name, gradient in gradients(leaf, axis, new, layers_train).items():
                row = measure.figures(gradient, PARAMS, *batch, donate=())
                used = row.temporary + row.output
                cells = [f"{row.flops / 1e9:.1f}", f"{row.accessed / 1e9:.3f}", f"{used / 1e6:.1f}"]
                table.add_row(f"{where}: {name}", *cells)
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
    frozen = fz.rules({"**": fz.rows(slice(0, LAYERS - 1))})
    scan, python = (
        measure.figures(fz.grad(loss, frozen), params, jnp.zeros((512, SMALL)), donate=(), tpu=False).flops
        for loss in (unrolled, loop)
    )
    table = measure.table(f"Gradient of the last of {LAYERS} stacked layers", "FLOPs, scan / Python loop")
    table.add_row("fz.grad, scan unrolled", f"{scan / python:.3f}")
    measure.show(table)


MATRIX = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)


def dense_mask() -> None:
    x = jax.ShapeDtypeStruct((256, len(MATRIX)), jnp.float32)
    mask = jax.random.bernoulli(jax.random.key(0), 0.5, MATRIX.shape)
    tx = fz.freeze(TX, mask)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def accessed(tx: Any, apply: Callable[..., Any]) -> float:
        def step(w: jax.Array, state: Any, x: jax.Array) -> Any:
            updates, state = tx.update(jax.grad(loss)(w, x), state, w)
            return apply(w, updates, state), state

        return measure.figures(step, MATRIX, jax.eval_shape(tx.init, MATRIX), x).accessed

    in_optax = lambda w, updates, state: optax.apply_updates(w, updates)  # noqa: E731
    found = {
        "unmasked AdamW": accessed(TX, in_optax),
        "fz.freeze(mask), optax.apply_updates": accessed(tx, in_optax),
        "fz.freeze(mask), fz.apply_updates": accessed(
            tx, lambda w, updates, state: fz.apply_updates(w, updates, fz.spec_of(state))
        ),
    }
    exact = ("MB accessed", "ratio to the unmasked step plus one read of the mask")
    table = measure.table("One AdamW step, half of 4096 x 4096 elements trainable under a dense mask", *exact)
    for name, its in found.items():
        table.add_row(name, f"{its / 1e6:.0f}", f"{its / (found['unmasked AdamW'] + mask.nbytes):.2f}")
    measure.show(table)


def executables() -> None:
    rows = fz.rows(slice(0, 4000))
    transformations = {
        "no mask": TX,
        "fz.rows(slice)": fz.freeze(TX, rows),
        "fz.rows(slice), full_updates=False": fz.freeze(TX, rows, full_updates=False),
        "fz.elements(array)": fz.freeze(TX, jnp.ones(MATRIX.shape, bool)),
    }
    sizes = {}
    for name, tx in transformations.items():
        step = measure.stepping(lambda params, grads: (None, grads), tx, fz.apply_updates)
        sizes[name] = measure.figures(step, MATRIX, jax.eval_shape(tx.init, MATRIX), MATRIX).executable
    table = measure.table("Executable of an AdamW update of 4096 x 4096", "bytes", "ratio to no mask")
    for name, size in sizes.items():
        table.add_row(name, f"{size:,}", f"{size / sizes['no mask']:.2f}")
    measure.show(table)


def main() -> None:
    if scale.compiled_a_cell():
        return
    if measure.tpu_sharding() is not None:
        decoders()
    new_rows()
    other_rows()
    stacks()
    dense_mask()
    executables()


if __name__ == "__main__":
    main()
