"""Trains the last block and the head of an 8-layer decoder, with this library and with the usual alternatives.

Width 512, vocabulary 8192, batch 4 x 256, float32. The table lists the size of the optimizer state, and FLOPs, bytes
accessed, temporary and output bytes of one training step, compiled for one TPU v5e chip.

The baselines are written by hand: the parameters are split before ``jax.grad``, and the same optimizer runs on the
trainable part. One returns only the trainable parameters, the other the donated full tree. In brackets is the ratio to
the baseline that returns the same.

Run with ``python tests/benchmarks/transformer.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import measure  # first: it sets up the TPU compiler

import equinox as eqx  # isort: skip
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import optax_freeze as fz

WIDTH, LAYERS, VOCABULARY, LENGTH, BATCH, HEADS = 512, 8, 8192, 256, 4, 8
TRAINS = ("head", f"blocks/{LAYERS - 1:02d}")
FROZEN = fz.all_except(*TRAINS)


def init(key: jax.Array, layers: int = LAYERS, width: int = WIDTH, vocabulary: int = VOCABULARY) -> Any:
    """Parameters of the decoder."""
    keys = iter(jax.random.split(key, 4 * layers + 2))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * 0.02

    def layer() -> Any:
        return {
            "attention": {"qkv": normal(width, 3 * width), "out": normal(width, width)},
            "mlp": {"up": normal(width, 4 * width), "down": normal(4 * width, width)},
            "norm": {"before": jnp.ones(width), "between": jnp.ones(width)},
        }

    blocks = {f"{i:02d}": layer() for i in range(layers)}
    return {"embed": normal(vocabulary, width), "blocks": blocks, "head": normal(width, vocabulary)}


def normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale


def attend(x: jax.Array, p: Any) -> jax.Array:
    q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["out"]


def block(x: jax.Array, p: Any) -> jax.Array:
    x = x + attend(normalise(x, p["norm"]["before"]), p["attention"])
    return x + jax.nn.gelu(normalise(x, p["norm"]["between"]) @ p["mlp"]["up"]) @ p["mlp"]["down"]


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of the next token."""
    blocks = [params["blocks"][name] for name in sorted(params["blocks"])]
    return loss_from(params["embed"][tokens], blocks, params["head"], tokens)


def loss_from(x: jax.Array, blocks: Sequence[Any], head: jax.Array, tokens: jax.Array) -> jax.Array:
    """The loss, computed from the residual stream before ``blocks``."""
    for p in blocks:
        x = block(x, p)
    logits = x @ head
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


class Case(NamedTuple):
    """A training step ``step(params, state, *others, tokens)`` and its initial arguments.

    ``start(params)`` returns all arguments but the last. A step that returns the full tree is compared with the
    baseline that does, too.
    """

    name: str
    step: Callable[..., Any]
    start: Callable[[Any], tuple[Any, ...]]
    full_tree: bool = True


def on_full_tree(name: str, tx: Any, value_and_grad: Any = None, apply: Any = optax.apply_updates) -> Case:
    """By default every leaf is differentiated; the optimizer freezes."""
    step = measure.stepping(value_and_grad or jax.value_and_grad(loss), tx, apply)
    return Case(name, step, lambda params: (params, tx.init(params)))


def by_hand(name: str, tx: Any, *, full_tree: bool) -> Case:
    """The baseline: the trainable parameters are taken out before ``jax.grad``."""

    def cut(params: Any) -> tuple[Any, Any]:
        blocks = dict(params["blocks"])
        last = blocks.pop(f"{LAYERS - 1:02d}")
        return {"head": params["head"], "last": last}, {"embed": params["embed"], "blocks": blocks}

    def paste(trainable: Any, rest: Any) -> Any:
        blocks = {**rest["blocks"], f"{LAYERS - 1:02d}": trainable["last"]}
        return {"embed": rest["embed"], "blocks": blocks, "head": trainable["head"]}

    of_parts = measure.stepping(jax.value_and_grad(lambda t, rest, tokens: loss(paste(t, rest), tokens)), tx)

    def of_whole(params: Any, state: Any, tokens: jax.Array) -> Any:
        trainable, rest = cut(params)
        trainable, state, value = of_parts(trainable, state, rest, tokens)
        return paste(trainable, rest), state, value

    if full_tree:
        return Case(name, of_whole, lambda params: (params, tx.init(cut(params)[0])))
    start = lambda params: (cut(params)[0], tx.init(cut(params)[0]), cut(params)[1])  # noqa: E731
    return Case(name, of_parts, start, full_tree=False)


def equinox(name: str, tx: Any) -> Case:
    """``equinox.partition``, with None in place of frozen leaves."""

    def trains(params: Any) -> Any:
        return jax.tree.map(lambda frozen: not frozen, fz.resolve(params, FROZEN))

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        trainable, rest = eqx.partition(params, trains(params))
        value, grads = eqx.filter_value_and_grad(lambda t: loss(eqx.combine(t, rest), tokens))(trainable)
        updates, state = tx.update(grads, state, trainable)
        return eqx.apply_updates(params, updates), state, value

    return Case(name, step, lambda params: (params, tx.init(eqx.filter(params, trains(params)))))


class Decoder(nnx.Module):
    """The same parameters as NNX variables."""

    def __init__(self, params: Any):
        self.params = nnx.data(jax.tree.map(nnx.Param, params))


def nnx_wrt(name: str, tx: Any) -> Case:
    """``nnx.Optimizer(wrt=...)`` and ``nnx.grad`` with the same filter."""

    def wrt(path: Any, value: Any) -> bool:
        return isinstance(value, nnx.Param) and "/".join(map(str, path[1:])).startswith(TRAINS)

    def split(params: Any) -> Any:
        model = Decoder(params)
        return nnx.split((model, nnx.Optimizer(model, tx, wrt=wrt)), nnx.Param, ...)

    graph: Any = split(jax.eval_shape(init, jax.random.key(0)))[0]

    def step(variables: Any, state: Any, tokens: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, variables, state)

        def of_model(model: Decoder) -> jax.Array:
            return loss(nnx.as_pure(nnx.state(model, nnx.Param))["params"], tokens)

        value, grads = nnx.value_and_grad(of_model, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, grads)
        _, variables, state = nnx.split((model, optimizer), nnx.Param, ...)
        return variables, state, value

    return Case(name, step, lambda params: split(params)[1:])


def with_partition(name: str, tx: Any) -> Case:
    """``fz.partition``: the step takes and returns the trainable part."""

    def value_and_grad(trainable: Any, rest: Any, tokens: jax.Array) -> Any:
        return jax.value_and_grad(fz.restrict(loss, rest))(trainable, tokens)

    def start(params: Any) -> Any:
        trainable, rest = fz.partition(params, FROZEN)
        return trainable, tx.init(trainable), rest

    return Case(name, measure.stepping(value_and_grad, tx, fz.apply_updates), start, full_tree=False)


def cases(wrap: Callable[[Any], Any]) -> list[Case]:
    """All ways to write the step, with ``wrap`` around the optimizer; the first two are the baselines."""
    clip, adamw = optax.clip_by_global_norm(1.0), optax.adamw(1e-3)
    both = optax.chain(clip, adamw)
    mask = fz.resolve(jax.eval_shape(init, jax.random.key(0)), FROZEN)

    def with_fz(name: str, tx: Any, gradient: Any) -> Case:
        return on_full_tree(f"fz.freeze, {name}", tx, gradient, fz.apply_updates)

    tx = fz.freeze(wrap(both), FROZEN)
    recommended = Case("fz.freeze, fz.train_step", fz.train_step(loss, tx), lambda params: (params, tx.init(params)))
    gradient = fz.value_and_grad(loss, FROZEN)
    clip_outside = wrap(optax.chain(clip, fz.freeze(adamw, FROZEN, full_updates=False)))
    outside = with_fz("fz.value_and_grad, clip outside", clip_outside, gradient)

    def partition(tx: Any) -> Any:
        return optax.partition({"trainable": tx, "frozen": optax.set_to_zero()}, fz.labels(FROZEN))

    return [
        by_hand("by hand, returns the trainable parameters", wrap(both), full_tree=False),
        by_hand("by hand, returns the donated full tree", wrap(both), full_tree=True),
        on_full_tree("nothing frozen", wrap(both)),
        on_full_tree("optax.partition, clip outside", wrap(optax.chain(clip, partition(adamw)))),
        on_full_tree("optax.partition, clip inside", wrap(partition(both))),
        on_full_tree("optax.partition, everything inside", partition(wrap(both))),
        on_full_tree("chain(clip, adamw, optax.freeze)", wrap(optax.chain(both, optax.freeze(mask)))),
        equinox("equinox.partition", wrap(both)),
        nnx_wrt("nnx.Optimizer(wrt=...), nnx.grad", wrap(both)),
        recommended,
        with_fz("jax.grad", tx, jax.value_and_grad(loss)),
        with_fz("fz.value_and_grad", tx, gradient),
        outside._replace(start=lambda params: (params, clip_outside.init(fz.partition(params, FROZEN)[0]))),
        with_partition("fz.partition, fz.restrict", wrap(both)),
    ]


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "clip_by_global_norm, adamw": lambda tx: tx,
    "in MultiSteps(..., 4)": lambda tx: optax.MultiSteps(tx, 4).gradient_transformation(),
    "in apply_if_finite(..., 4)": lambda tx: optax.apply_if_finite(tx, 4),
}


def main() -> None:
    table = measure.table(
        "One training step (ratio to the step by hand)", "state MB", "GFLOP", "MB accessed", "MB temporary", "MB output"
    )

    shapes = jax.eval_shape(init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    for title, wrap in WRAPPERS.items():
        table.add_section()
        table.add_row(f"[bold]{title}")
        optima: list[list[float]] = []
        for case in cases(wrap):
            args = (*jax.eval_shape(case.start, shapes), tokens)
            row = measure.figures(case.step, *args)
            figures = [row.flops, row.accessed, float(row.temporary)]
            if len(optima) < 2:
                optima.append(figures)
            best = optima[case.full_tree and len(optima) > 1]
            scaled = zip(figures, best, (1e9, 1e6, 1e6), (".1f", ".0f", ".2f"), strict=True)
            compared = [measure.with_ratio(mine / unit, its / unit, form) for mine, its, unit, form in scaled]
            table.add_row(case.name, f"{measure.nbytes(args[1]) / 1e6:.1f}", *compared, f"{row.output / 1e6:.1f}")
            print(f"{title}: {case.name}", flush=True)
    measure.show(table)


if __name__ == "__main__":
    main()
