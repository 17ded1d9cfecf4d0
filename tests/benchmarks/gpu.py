"""Training steps of full size on a GPU, in bfloat16, compared with Optax and with steps written by hand.

1. The last block, the norm and the head of a scanned, rematerialized decoder of 1.5 billion parameters are trainable
   (the shape of Llama 3.2 1B with an untied head; 8 sequences of 2048 tokens, ``clip_by_global_norm`` and AdamW). Optax
   freezes whole leaves, so its rows have the layers in two stacks.
2. 16 new rows of an embedding are trainable, with AdamW; the loss is a lookup and a matmul, or a cross entropy over a
   tied head, on 8 sequences of 2048 tokens. The steps are those of ``frozen_rows.py``.

GB: arguments, temporaries and outputs of the compiled step, with donated buffers counted once. Busy ms: the time in
which at least one stream of the device runs something, from a profiler's trace of several steps. Wall ms: the time from
enqueuing several steps until the last is done. Both are per step, and medians of several such runs. In brackets is the
ratio to the first row.

Run with ``python tests/benchmarks/gpu.py`` where JAX has a GPU (``--tiny``: a small model on any device).
"""

import argparse
import functools
import pathlib
import statistics
import tempfile
import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import frozen_rows
import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from decoder import Decoder
from jax.sharding import Mesh

import optax_freeze as fz

CLIP = optax.clip_by_global_norm(1.0)
ADAMW = optax.adamw(1e-5, mu_dtype=jnp.float32)
BOTH = optax.chain(CLIP, ADAMW)


class Size(NamedTuple):
    """Sizes of the models, and numbers of steps and rounds of a measurement."""

    decoder: Decoder
    sequences: int
    vocabulary: int
    width: int
    steps: int
    rounds: int


class Case(NamedTuple):
    """``step(params, state, *others)`` returns new ``params, state`` first; ``start(key)`` returns its arguments."""

    step: Callable[..., Any]
    start: Callable[[jax.Array], tuple[Any, ...]]


def full() -> Size:
    decoder = Decoder(2048, 16, 8192, 32, topology="", tensor_parallel=1, length=2048)
    return Size(decoder, sequences=8, vocabulary=128_256, width=2048, steps=5, rounds=9)


def tiny() -> Size:
    shape = {"kv_heads": 2, "vocabulary": 64, "length": 16, "chunk": 8}
    return Size(Decoder(16, 3, 32, 4, topology="", tensor_parallel=1, **shape), 2, 64, 16, steps=2, rounds=1)


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def decoder_cases(size: Size) -> dict[str, Case]:
    """Steps that train the last block, the norm and the head."""
    shapes, loss = size.decoder.params(one_device()), size.decoder.loss(one_device())

    def one_stack(key: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(shapes)
        keys = jax.random.split(key, len(leaves))
        normal = [jax.random.normal(k, x.shape, x.dtype) * 0.02 for k, x in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, normal)

    def cut_rows(blocks: Any) -> Any:
        return [jax.tree.map(lambda a, at=at: a[at], blocks) for at in (slice(-1), slice(-1, None))]

    def two_stacks(key: jax.Array) -> Any:
        params = one_stack(key)
        return {**params, "blocks": cut_rows(params["blocks"])}

    def starting(params: Callable[..., Any], init: Callable[[Any], Any]) -> Callable[..., Any]:
        def start(key: jax.Array) -> Any:
            tokens = jax.random.randint(key, (size.sequences, size.decoder.length), 0, size.decoder.vocabulary)
            made = params(key)
            return made, init(made), tokens

        return start

    def whole(tx: Any) -> Case:
        """The full gradient; the optimizer freezes."""
        return Case(measure.stepping(jax.value_and_grad(loss), tx), starting(two_stacks, tx.init))

    def by_hand(params: Callable[..., Any], cut: Callable[[Any], Any], paste: Callable[[Any, Any], Any]) -> Case:
        """The gradient of the norm, the head and the second result of ``cut``, the last block."""

        def trainable(params: Any) -> Any:
            return {"last": cut(params["blocks"])[1], "norm": params["norm"], "head": params["head"]}

        def step(params: Any, state: Any, tokens: jax.Array) -> Any:
            def of(t: Any) -> jax.Array:
                blocks = [cut(params["blocks"])[0], t["last"]]
                return loss({"embed": params["embed"], "blocks": blocks, "norm": t["norm"], "head": t["head"]}, tokens)

            t = trainable(params)
            updates, state = BOTH.update(jax.grad(of)(t), state, t)
            new: Any = optax.apply_updates(t, updates)
            blocks = paste(params["blocks"], new["last"])
            return {"embed": params["embed"], "blocks": blocks, "norm": new["norm"], "head": new["head"]}, state

        return Case(step, starting(params, lambda params: BOTH.init(trainable(params))))

    def with_fz(params: Callable[..., Any], frozen: Any) -> Case:
        tx = fz.freeze(BOTH, frozen, full_updates=False)
        step = measure.stepping(fz.value_and_grad(loss, frozen), tx, fz.apply_updates)
        return Case(step, starting(params, tx.init))

    def paste_rows(blocks: Any, last: Any) -> Any:
        return jax.tree.map(lambda a, new: a.at[-1:].set(new), blocks, last)

    leaves = fz.all_except("blocks/1", "norm", "head")
    rows = {"embed": True, "blocks": fz.rows(slice(0, size.decoder.layers - 1)), "norm": False, "head": False}
    partition = optax.partition({"trainable": ADAMW, "frozen": optax.set_to_zero()}, fz.labels(leaves))
    mask = fz.resolve(jax.eval_shape(two_stacks, jax.random.key(0)), leaves)
    return {
        "by hand, two stacks": by_hand(two_stacks, lambda blocks: blocks, lambda blocks, last: [blocks[0], last]),
        "nothing frozen, two stacks": whole(BOTH),
        "chain(clip, optax.partition), two stacks": whole(optax.chain(CLIP, partition)),
        "chain(clip, adamw, optax.freeze), two stacks": whole(optax.chain(BOTH, optax.freeze(mask))),
        "fz.grad, fz.freeze, two stacks": with_fz(two_stacks, leaves),
        "by hand, one stack, scan split": by_hand(one_stack, cut_rows, paste_rows),
        "fz.grad, fz.freeze, one stack, model unchanged": with_fz(one_stack, rows),
    }


MASKS, SLICED = "masks computed from an iota", "rows sliced from the dense gradient"
ROWS = (frozen_rows.BY_HAND, MASKS, SLICED, frozen_rows.OURS)


def row_cases(size: Size, loss: Callable[..., jax.Array]) -> dict[str, Case]:
    """Steps that train the last rows of an embedding."""

    def start(key: jax.Array, init: Callable[..., Any]) -> Any:
        embed = jax.random.normal(key, (size.vocabulary, size.width), jnp.bfloat16) * 0.02
        out = jax.random.normal(key, (size.width, size.width), jnp.bfloat16) * 0.02
        tokens = jax.random.randint(key, (size.sequences, size.decoder.length), 0, size.vocabulary)
        return embed, init(embed, out), out, tokens

    steps = frozen_rows.row_steps(loss, size.vocabulary)
    return {name: Case(steps[name].step, functools.partial(start, init=steps[name].init)) for name in ROWS}


class Measured(NamedTuple):
    """Memory of one step in bytes, and its times in seconds; ``busy`` is NaN if the trace has no device events."""

    memory: float
    busy: float
    wall: float


def measured(case: Case, size: Size) -> Measured | None:
    """The figures of a step, or None if the device has too little memory for it."""
    try:
        args = case.start(jax.random.key(0))
        step = jax.jit(case.step, donate_argnums=(0, 1)).lower(*args).compile()
        memory = step.memory_analysis()
        assert memory
        used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        first, second, *rest = args
        del args

        def run(steps: int) -> None:
            nonlocal first, second
            for _ in range(steps):
                first, second, *_ = step(first, second, *rest)
            jax.block_until_ready((first, second))

        run(1)
        wall = [timeit.timeit(lambda: run(size.steps), number=1) / size.steps for _ in range(size.rounds)]
        busy = []
        for _ in range(size.rounds):
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    run(size.steps)
                (trace,) = pathlib.Path(folder).rglob("*.xplane.pb")
                profile = jax.profiler.ProfileData.from_file(str(trace))
            busy.append(measure.busy_seconds(profile) / size.steps)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    return Measured(used - memory.alias_size_in_bytes, statistics.median(busy), statistics.median(wall))


def show(title: str, cases: dict[str, Case], size: Size) -> None:
    """Shows the table of all cases, with ratios to the first."""
    found = {name: measured(case, size) for name, case in cases.items()}
    peer = next(iter(found.values()))
    table = measure.table(title, "GB", timed=("busy ms", "wall ms"))
    for name, figures in found.items():
        if figures is None:
            table.add_row(name, "does not fit")
            continue
        cells = (f"{figures.memory / 1e9:.2f}", f"{figures.busy * 1e3:.3f}", f"{figures.wall * 1e3:.3f}")
        if peer is not None:
            ratios = (mine / its for mine, its in zip(figures, peer, strict=True))
            cells = (f"{cell} ({ratio:.2f})" for cell, ratio in zip(cells, ratios, strict=True))
        table.add_row(name, *cells)
    measure.show(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, on whatever device there is")
    if parser.parse_args().tiny:
        size = tiny()
    else:
        jax.config.update("jax_platforms", None)  # `make bench` sets it to cpu for the other benchmarks
        if jax.default_backend() != "gpu":
            measure.show("No GPU was at hand.")
            return
        size = full()
    device = jax.devices()[0].device_kind
    cases = decoder_cases(size)
    elements = sum(x.size for x in jax.tree.leaves(size.decoder.params(one_device())))
    show(f"{device}: last block, norm and head of {elements / 1e9:.2f} billion parameters trainable", cases, size)
    for name, loss in (("a lookup", frozen_rows.lookup), ("a tied head", frozen_rows.tied)):
        title = f"{device}: {frozen_rows.NEW} new rows of {size.vocabulary:,} x {size.width:,} trainable, {name}"
        show(title, row_cases(size, loss), size)


if __name__ == "__main__":
    main()
