"""``fz.precompute`` compared with the step without it, and with a model cut in two by hand.

The rows or columns named ``fz.freeze`` are steps without ``fz.precompute``: ``fz.freeze`` and ``fz.value_and_grad`` of
the loss. *Cut by hand* stores features, and its step receives only these and the trainable parameters. With
``fz.precompute`` the loss is unchanged: ``once.before`` computes the features, and the step differentiates
``once.after`` with respect to the parameters that ``once.needed`` returns. Every step uses AdamW and donates parameters
and optimizer state.

1. The decoder of ``transformer.py``, last block and head trainable. Compiled for one TPU v5e chip.
2. A decoder of Llama 3's shape as in ``scale.py``; the last block of the stack (``fz.rows``), the norm and the head are
   trainable. Memory is what the compiler assigns (``no``, ``alone`` and "host" as in ``scale.md``); FLOPs are those of
   the traced step, with every iteration of a loop counted. ``once.before`` is measured with the parameters on the chips
   and with the frozen stacks in host memory (``fz.offload``); the step reads none of these stacks.
3. Image classifiers on the CPU, 224 x 224 images in batches of 16: CPU seconds of an epoch of 32 images, the minimum of
   several alternating runs. The first epoch, which computes the features, is not included. In brackets: how many times
   faster than without ``fz.precompute``; after it, the ratio to the model cut by hand. A step that trains a head takes
   less time than ``jax.jit`` needs to flatten and rebuild trees with a ``MaskedNode`` for each of 60 to 200 frozen
   leaves (0.2 to 0.4 ms): the last column passes ``jax.tree.leaves`` of parameters and state instead. The ViT
   normalizes all tokens and classifies the first; cut by hand, only the first is stored and normalized. Values and
   gradients of ``once.after`` are compared bit by bit with those of the loss, both jitted.
4. Tracing: ``jax.make_jaxpr`` of value and gradient of ``once.after``, and of ``jax.value_and_grad`` of the loss; then
   the division of a function of 10,000 operations. CPU seconds, medians of alternating runs.

Run with ``python tests/benchmarks/precompute.py`` (``--only NAME ...``: some of the tables).
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import classifiers
import jax.numpy as jnp
import numpy as np
import optax
import scale
import transformer
from classifiers import ByHand, Classifier
from decoder import ADAMW, Decoder, adamw_state, on_device, sharded_like
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze._program.flops import flops

TX = optax.adamw(1e-3)
PLAIN, BY_HAND, OURS, FLAT = "fz.freeze", "cut by hand", "fz.precompute", "fz.precompute, jax.tree.leaves"
Loss = Callable[..., jax.Array]
Step = Callable[..., Any]
"""``step(params, state, *others)`` returns parameters, state and value."""


stepping = functools.partial(measure.stepping, apply=fz.apply_updates)


def on_leaves(step: Step, params: Any, state: Any) -> tuple[Step, list[Any], list[Any]]:
    """The step as a function of the leaves of its parameters and state."""
    treedefs = [jax.tree.structure(tree) for tree in (params, state)]

    def flat(params: Any, state: Any, *others: Any) -> Any:
        trees = (treedef.unflatten(leaves) for treedef, leaves in zip(treedefs, (params, state), strict=True))
        params, state, value = step(*trees, *others)
        return jax.tree.leaves(params), jax.tree.leaves(state), value

    return flat, jax.tree.leaves(params), jax.tree.leaves(state)


def decoder() -> None:
    """The decoder in a Python loop."""
    shapes = jax.eval_shape(transformer.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((transformer.BATCH, transformer.LENGTH), jnp.int32)
    once = fz.precompute(transformer.loss, transformer.FROZEN)
    tx = fz.freeze(TX, transformer.FROZEN)
    needed, features = once.needed(shapes, tokens), jax.eval_shape(once.before, shapes, tokens)
    last = shapes["blocks"][f"{transformer.LAYERS - 1:02d}"]
    trainable = {"block": last, "head": shapes["head"]}
    x = jax.ShapeDtypeStruct((*tokens.shape, transformer.WIDTH), jnp.float32)

    def by_hand(trainable: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
        return transformer.loss_from(x, [trainable["block"]], trainable["head"], tokens)

    init = jax.eval_shape
    steps = {
        BY_HAND: (stepping(jax.value_and_grad(by_hand), TX), (trainable, init(TX.init, trainable), x, tokens), x),
        OURS: (
            stepping(fz.value_and_grad(once.after, transformer.FROZEN), tx),
            (needed, init(tx.init, needed), features, tokens),
            features,
        ),
        PLAIN: (
            stepping(fz.value_and_grad(transformer.loss, transformer.FROZEN), tx),
            (shapes, init(tx.init, shapes), tokens),
            None,
        ),
    }
    columns = ("GFLOP", "MB arguments", "MB temporary", "MB accessed", "MB features")
    table = measure.table(
        "A decoder of 8 layers, last block and head trainable (ratio to the model cut by hand)", *columns
    )
    best: list[float] | None = None
    for name, (step, args, stored) in steps.items():
        row = measure.figures(step, *args)
        found = [row.flops / 1e9, row.argument / 1e6, row.temporary / 1e6, row.accessed / 1e6]
        found.append(measure.nbytes(stored) / 1e6)
        best = best or found
        cells = [measure.with_ratio(mine, its, ".2f") for mine, its in zip(found, best, strict=True)]
        table.add_row(name, *(cells if stored else [*cells[:-1], ""]))
    measure.show(table)


def residual_stream(params: Any) -> jax.ShapeDtypeStruct:
    mesh = params["norm"].sharding.mesh
    shape = (*tokens_on(mesh).shape, *params["norm"].shape)
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp", None, None)))


def tokens_on(mesh: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        (mesh.shape["fsdp"], Decoder.length), jnp.int32, sharding=NamedSharding(mesh, P("fsdp"))
    )


def scanned_by_hand(loss: Loss, params: Any, which: Any) -> scale.Step:
    last = jax.tree.map(lambda a: a.update(shape=(1, *a.shape[1:])), params["blocks"])
    trainable = {"blocks": last, "norm": params["norm"], "head": params["head"]}

    def of_features(trainable: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
        return loss(trainable, tokens, x)

    step = stepping(jax.value_and_grad(of_features), ADAMW, apply=optax.apply_updates)
    return (trainable, adamw_state(trainable, params["norm"].sharding.mesh), residual_stream(params)), step


def scanned_precomputed(loss: Loss, params: Any, which: Any) -> scale.Step:
    frozen, mesh = scale.spec(which), params["norm"].sharding.mesh
    once = fz.precompute(loss, frozen)
    needed = sharded_like(on_device(params), once.needed(params, tokens_on(mesh)))
    before = jax.eval_shape(once.before, params, tokens_on(mesh))
    stream = residual_stream(params)
    features = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=stream.sharding), before)
    step = stepping(fz.value_and_grad(once.after, frozen), ADAMW, apply=optax.apply_updates)
    return (needed, adamw_state(needed, mesh), features), step


def scanned_before(loss: Loss, params: Any, which: Any) -> scale.Step:
    """``once.before`` of a batch, as a step whose donated arguments are empty."""
    once = fz.precompute(loss, scale.spec(which))

    def step(trainable: Any, state: Any, given: Any, tokens: jax.Array) -> Any:
        return trainable, state, once.before(scale.as_of_arrays(given, params), tokens)

    return ({}, {}, params), step


def offloaded(build: Callable[..., scale.Step]) -> Callable[..., scale.Step]:
    return lambda loss, params, which: build(loss, fz.offload(params, scale.spec(which)), which)


BEFORE = "once.before"
WAYS = {
    PLAIN: scale.by_freeze,
    BY_HAND: scanned_by_hand,
    OURS: scanned_precomputed,
    BEFORE: scanned_before,
    f"{BEFORE}, fz.offload": offloaded(scanned_before),
    f"{OURS}, fz.offload": offloaded(scanned_precomputed),
}
scale.WAYS |= WAYS
STEPS = (PLAIN, BY_HAND, OURS)
KIND = "last block and head"
MESHES = {"8B": (1, 2, 4), "70B": (2, 4, 8, 16)}


def traced_flops(cell: scale.Cell) -> int:
    """FLOPs of a step on all chips together."""
    mesh = cell.decoder.mesh()
    given, step = cell.build(cell.decoder.loss(mesh), cell.decoder.params(mesh), scale.trains(KIND, cell.decoder))
    return flops(jax.make_jaxpr(step)(*given, tokens_on(mesh)).eqns)


def scanned() -> None:
    """The decoder of Llama 3's shape."""
    results = scale.Results(None, to_the_end=False, script=__file__)
    memory = measure.table(
        f"Llama 3's shape on v5e, GiB per chip of {scale.HBM['v5e']}: arguments + temporaries = total",
        *WAYS,
        label="size, chips",
    )
    work = measure.table(
        "Llama 3's shape, one sequence of 4,096 tokens",
        *(f"TFLOP, {way}" for way in STEPS),
        f"{BY_HAND} / {OURS}",
        "GB features of 1,000 sequences",
    )
    for size, meshes in MESHES.items():
        for chips in meshes:
            cells = (results(scale.Cell(size, "v5e", chips, KIND, way)) for way in WAYS)
            memory.add_row(f"{size}, {chips}", *map(scale.text, cells))
        first = scale.Cell(size, "v5e", meshes[-1], KIND, OURS)
        mesh = first.decoder.mesh()
        sequences = mesh.shape["fsdp"]
        counts = {way: traced_flops(dataclasses.replace(first, way=way)) / sequences for way in STEPS}
        (_, _, features), _ = scanned_precomputed(
            first.decoder.loss(mesh), first.decoder.params(mesh), scale.trains(KIND, first.decoder)
        )
        work.add_row(
            size,
            *(f"{count / 1e12:.2f}" for count in counts.values()),
            f"{counts[BY_HAND] / counts[OURS]:.3f}",
            f"{measure.nbytes(features) / sequences * 1000 / 1e9:.2f}",
        )
    measure.show(memory)
    measure.show(work)


BATCH, BATCHES, ROUNDS = 16, 2, 5
LEAST = 0.2
"""Seconds: shorter epochs are repeated until a measurement takes this long."""


class Epochs:
    """Epochs of one step function, which continue from its last parameters and state."""

    def __init__(self, step: Step, params: Any, state: Any, batches: list[tuple[Any, ...]]) -> None:
        self.step = jax.jit(step, donate_argnums=(0, 1))
        self.carried, self.batches, self.times = jax.tree.map(jnp.array, (params, state)), batches, 1
        self()
        self.times = max(1, round(LEAST / measure.least_in_turn({"": self}, 1)[""]))

    def __call__(self) -> None:
        value = None
        for _ in range(self.times):
            for batch in self.batches:
                *self.carried, value = self.step(*self.carried, *batch)
            jax.block_until_ready((self.carried, value))


def batches_of(seed: int) -> list[tuple[jax.Array, jax.Array]]:
    random = np.random.default_rng(seed)
    shape = (BATCH, classifiers.SIDE, classifiers.SIDE, 3)
    return [
        (
            jnp.asarray(random.normal(size=shape), jnp.float32),
            jnp.asarray(random.integers(0, classifiers.CLASSES, BATCH), jnp.int32),
        )
        for _ in range(BATCHES)
    ]


def same_bits(loss: Loss, frozen: Any, once: fz.typing.Precomputed, params: Any, batch: Any) -> str:
    """How many leaves of value and gradient have the same bits with ``after`` as with the loss."""
    features = jax.jit(once.before)(params, batch)
    theirs = jax.tree.leaves(jax.jit(fz.value_and_grad(loss, frozen))(params, batch))
    ours = jax.tree.leaves(jax.jit(fz.value_and_grad(once.after, frozen))(once.needed(params, batch), features, batch))
    same = sum(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(ours, theirs, strict=True))
    return f"{same} of {len(theirs)}"


def compared(model: Classifier, hand: ByHand) -> list[str]:
    """The cells of a row: sizes of features, equal bits, and seconds of each step."""

    def loss(params: Any, batch: Any) -> jax.Array:
        return classifiers.cross_entropy(model.logits(params, batch[0]), batch[1])

    def hand_loss(trainable: Any, features: Any, labels: jax.Array) -> jax.Array:
        return classifiers.cross_entropy(hand.logits(trainable, features), labels)

    def hand_loss_of_batch(params: Any, batch: Any) -> jax.Array:
        return hand_loss(hand.trainable(params), hand.features(params, batch[0]), batch[1])

    params, batches, frozen = model.params, batches_of(0), fz.all_except(*hand.paths)
    values = (jax.jit(fun)(params, batches[0]) for fun in (loss, hand_loss_of_batch))
    np.testing.assert_allclose(*values, rtol=1e-5)
    once, tx = fz.precompute(loss, frozen), fz.freeze(TX, frozen)
    needed, trainable = once.needed(params, batches[0]), hand.trainable(params)
    before, features = jax.jit(once.before), jax.jit(hand.features)
    stored = [before(params, batch) for batch in batches]
    by_hand = [(features(params, images), labels) for images, labels in batches]
    with_features = list(zip(stored, batches, strict=True))
    ours = stepping(fz.value_and_grad(once.after, frozen), tx)
    step = stepping(fz.value_and_grad(loss, frozen), tx)
    runs = {
        PLAIN: Epochs(step, params, tx.init(params), [(batch,) for batch in batches]),
        BY_HAND: Epochs(stepping(jax.value_and_grad(hand_loss), TX), trainable, TX.init(trainable), by_hand),
        OURS: Epochs(ours, needed, tx.init(needed), with_features),
        FLAT: Epochs(*on_leaves(ours, needed, tx.init(needed)), with_features),
    }
    least = {name: seconds / runs[name].times for name, seconds in measure.least_in_turn(runs, ROUNDS).items()}
    plain, hand_s = least[PLAIN], least[BY_HAND]
    return [
        *(f"{measure.nbytes(each) / BATCH / 1e3:.1f}" for each in (by_hand[0][0], stored[0])),
        same_bits(loss, frozen, once, params, batches[0]),
        f"{plain:.2f}",
        f"{hand_s:.4f} ({plain / hand_s:.1f})",
        *(f"{least[way]:.4f} ({plain / least[way]:.1f}), {least[way] / hand_s:.2f}" for way in (OURS, FLAT)),
    ]


def epochs() -> None:
    """Epochs of the image classifiers."""
    columns = (f"kB features per image, {BY_HAND}", f"kB features per image, {OURS}", "leaves with the same bits")
    title = f"An epoch after the first, seconds (times faster than {PLAIN}), ratio to the model cut by hand"
    table = measure.table(
        title, *columns, timed=[f"{way}, s" for way in (PLAIN, BY_HAND, OURS, FLAT)], label="trainable"
    )
    for model in (classifiers.vit(), classifiers.resnet()):
        table.add_row(f"[bold]{model.name}")
        for trains, hand in model.by_hand.items():
            table.add_row(trains, *compared(model, hand))
            print(f"{model.name}: {trains}", flush=True)
    measure.show(table)


OPERATIONS = 10_000


def tracing() -> None:
    """Times of tracing, and of dividing a long program."""

    model = classifiers.vit()
    hand = model.by_hand["last block, norm, head"]
    images = jax.ShapeDtypeStruct((BATCH, classifiers.SIDE, classifiers.SIDE, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((BATCH,), jnp.int32)

    def loss(params: Any, batch: Any) -> jax.Array:
        return classifiers.cross_entropy(model.logits(params, batch[0]), batch[1])

    shapes = jax.eval_shape(transformer.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((transformer.BATCH, transformer.LENGTH), jnp.int32)
    cases: dict[str, tuple[Loss, Any, Any, Any]] = {
        "decoder of 8 layers, last block, head": (transformer.loss, transformer.FROZEN, shapes, tokens),
        "ViT-tiny, last block, norm, head": (loss, fz.all_except(*hand.paths), model.params, (images, labels)),
    }
    table = measure.table(
        "Tracing value and gradient", timed=("of the loss, s", "of once.after, s", "once.after / loss")
    )
    for name, (fun, frozen, params, batch) in cases.items():
        once = fz.precompute(fun, frozen)
        needed, features = jax.eval_shape(once.needed, params, batch), jax.eval_shape(once.before, params, batch)
        after = fz.value_and_grad(once.after, frozen)
        median = measure.tracing_in_turn(
            {
                "loss": lambda fun=fun, p=params, b=batch: jax.make_jaxpr(jax.value_and_grad(fun))(p, b),
                "after": lambda f=after, p=needed, x=features, b=batch: jax.make_jaxpr(f)(p, x, b),
            }
        )
        row = [f"{median['loss']:.2f}", f"{median['after']:.2f}", f"{median['after'] / median['loss']:.2f}"]
        table.add_row(name, *row)
    measure.show(table)

    def long(params: Any, x: jax.Array) -> jax.Array:
        for _ in range(OPERATIONS // 4):
            x = jax.lax.tanh(jax.lax.add(jax.lax.dot(x, params["w"]), x))
            x = jax.lax.mul(x, x)
        return jnp.sum(x * params["head"])

    once = fz.precompute(long, "w")
    params = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32), "head": jax.ShapeDtypeStruct((8,), jnp.float32)}
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    median = measure.tracing_in_turn(
        {"trace": lambda: jax.make_jaxpr(long)(params, x), "needed": lambda: once.needed(params, x)}
    )
    table = measure.table(f"Dividing a function of {OPERATIONS:,} operations", timed=("seconds",))
    table.add_row("jax.make_jaxpr of the function", f"{median['trace']:.2f}")
    table.add_row("once.needed, which traces and divides", f"{median['needed']:.2f}")
    table.add_row("the division alone (difference)", f"{median['needed'] - median['trace']:.2f}")
    measure.show(table)


PARTS = {"decoder": decoder, "scanned": scanned, "epochs": epochs, "tracing": tracing}


def main() -> None:
    if scale.compiled_a_cell():
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS), help="which tables")
    for part in parser.parse_args().only:
        PARTS[part]()


if __name__ == "__main__":
    main()
