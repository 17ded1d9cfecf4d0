"""The gallery's harness: one training step of a model that was not written here, checked and measured.

A case says what is frozen. ``check`` trains three steps and compares bits and gradients, ``measure`` compiles the
gradient three times: with the leaves that are frozen by rows trained whole, by ``fz.value_and_grad``, and by hand.
"""

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.update(USE_FLAX="1", USE_TF="0", USE_TORCH="0")  # what transformers imports

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

import optax_freeze as fz

LIMIT = 1.05  # of FLOPs, bytes and memory, to the whole leaf's and to those of the program written by hand
STEPS = 3
ROUNDING = 2e-5
JUDGED = ("flops", "accessed", "memory")
UNMERGED = ("decoder", "encoder", "MoE", "ViT", "convolutional")  # in no model of these kinds is an array merged


class Model(NamedTuple):
    """A model as a tree of parameters and a loss, and what of it is frozen."""

    params: Any
    loss: Callable[[Any, Any], jax.Array]
    batch: Any
    spec: Any


class Case(NamedTuple):
    """One line of the table; the model is made when it runs, since its package may be missing."""

    name: str
    packages: tuple[str, ...]  # as they are imported
    kind: str
    frozen: str
    make: Callable[[], Model]

    @property
    def missing(self) -> str:
        """The packages that are not installed."""
        return ", ".join(name for name in self.packages if importlib.util.find_spec(name) is None)


CASES: list[Case] = []


def case(name: str, packages: str, kind: str, frozen: str) -> Callable[[Callable[[], Model]], Callable[[], Model]]:
    """Makes a function that returns a model a line of the table."""

    def add(make: Callable[[], Model]) -> Callable[[], Model]:
        CASES.append(Case(name, tuple(packages.split()), kind, frozen, make))
        return make

    return add


def of_equinox(model: Any, loss: Callable[[Any, Any], Any], batch: Any, spec: Any) -> Model:
    """A model whose parameters are its floating-point arrays."""
    import equinox as eqx

    params, static = eqx.partition(model, eqx.is_inexact_array)
    return Model(params, lambda params, batch: loss(eqx.combine(params, static), batch), batch, spec)


class Cost(NamedTuple):
    """Of one program, as XLA counts it for the CPU."""

    flops: float
    accessed: float
    memory: float  # temporaries and outputs: XLA uses the buffers of outputs as scratch
    temporary: float

    def over(self, other: "Cost") -> "Cost":
        return Cost(*(ours / max(theirs, 1.0) for ours, theirs in zip(self, other, strict=True)))


class Exceeded(NamedTuple):
    """A ratio that is above the limit, and known to be."""

    measured: float
    reason: str


EXCEPTIONS = {  # (name of the case, compared with, figure)
    ("ESM-2", "by hand", "accessed"): Exceeded(
        1.37,
        "Two loops of layers write what the backward pass needs into one array, in place. Unrolled for the count, "
        "each write is counted as a copy of this array; in the loops the gradient takes 0.58 of the memory.",
    ),
}


class Figures(NamedTuple):
    """What is measured of a case."""

    whole: Cost
    ours: Cost
    by_hand: dict[str, Cost]
    merged: tuple[str, ...]

    @property
    def to_whole(self) -> Cost:
        return self.ours.over(self.whole)

    @property
    def to_hand(self) -> Cost:
        """To the program written by hand that accesses fewer bytes."""
        return self.ours.over(min(self.by_hand.values(), key=lambda cost: cost.accessed))


class Checked(NamedTuple):
    """What is checked of a case."""

    compilations: int
    wrong_bits: int
    gradient_error: float  # of the largest element of each gradient
    unmoved: tuple[str, ...]  # leaves that train in part or whole and did not move


def problems(case: Case, checked: Checked, figures: Figures) -> Iterator[str]:
    """What keeps a case from passing."""
    if checked.compilations != 1:
        yield f"{checked.compilations} compilations in {STEPS} steps"
    if checked.wrong_bits:
        yield f"{checked.wrong_bits} leaves have frozen bits that moved"
    if checked.unmoved:
        yield f"did not train: {', '.join(checked.unmoved)}"
    if not checked.gradient_error <= ROUNDING:
        yield f"a gradient differs by {checked.gradient_error:.1e} of its largest element"
    if figures.merged and any(kind in case.kind for kind in UNMERGED):
        yield f"merged: {', '.join(figures.merged)}"
    for peer, ratios in (("whole leaf", figures.to_whole), ("by hand", figures.to_hand)):
        for name in JUDGED:
            ratio, known = getattr(ratios, name), EXCEPTIONS.get((case.name, peer, name))
            if ratio > (LIMIT if known is None else known.measured + 0.02):
                yield f"{name}: {ratio:.3f} of the {peer}"
            if known is not None and ratio <= LIMIT:
                yield f"{name}: {ratio:.3f} of the {peer} is within the limit: remove it from EXCEPTIONS"


def check(model: Model) -> Checked:
    """Three steps of AdamW in one program."""
    params, loss, batch, spec = model
    tx = fz.freeze(optax.adamw(1e-3), spec, full_updates=False)
    value_and_grad = fz.value_and_grad(loss, spec)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return fz.apply_updates(params, updates), state, value

    new, state = params, tx.init(params)
    for _ in range(STEPS):
        new, state, value = step(new, state, batch)
    assert np.isfinite(value)
    fz.assert_frozen(params, new, spec)
    zeros = jax.tree.map(jnp.zeros_like, params)
    wrong, unmoved, error = 0, [], 0.0
    _, grads = jax.jit(value_and_grad)(params, batch)
    dense = fz.combine(grads, fz.partition(zeros, spec)[1])
    wanted = jax.jit(jax.grad(loss))(params, batch)
    largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(wanted))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    rows = zip(leaves, *map(jax.tree.leaves, (new, trained(params, spec), dense, wanted)), strict=True)
    for (path, old), moved, mask, grad, reference in rows:
        old, moved, grad, reference = map(np.asarray, (old, moved, grad, reference))
        wrong += int(old[~mask].tobytes() != moved[~mask].tobytes())
        if mask.any():
            if not (old[mask] != moved[mask]).any():
                unmoved.append(jax.tree_util.keystr(path, simple=True, separator="/"))
            scale = max(float(np.abs(reference).max()), 1e-2 * largest)  # some are zero but for rounding
            error = float(np.maximum(error, np.abs(grad[mask] - reference[mask]).max() / scale))  # NaN stays
    return Checked(step._cache_size(), wrong, error, tuple(unmoved))


def trained(params: Any, spec: Any) -> Any:
    """For each element, whether it trains."""
    ones, zeros = (jax.tree.map(like, params) for like in (jnp.ones_like, jnp.zeros_like))
    elements = fz.combine(fz.partition(ones, spec)[0], fz.partition(zeros, spec)[1])
    return jax.tree.map(lambda leaf: np.asarray(leaf != 0), elements)


def measure(model: Model) -> Figures:
    """The gradient of the leaves trained whole, ours, and by hand, and the operations that merge rows."""
    params, loss, batch, spec = model
    trains = trained(params, spec)
    whole = jax.tree.map(lambda mask: not mask.any(), trains)
    ways = {
        "combined": functools.partial(combined, loss, spec),
        "joined": functools.partial(joined, loss, spec, trains),
    }
    return Figures(
        cost(fz.value_and_grad(loss, whole), params, batch),
        cost(fz.value_and_grad(loss, spec), params, batch),
        {name: cost(way, params, batch) for name, way in ways.items()},
        merges(model),
    )


def combined(loss: Callable[..., Any], spec: Any, params: Any, batch: Any) -> Any:
    """By hand, without a change of the model: the trainable rows are written into the leaf, as by ``.at[rows].set``."""
    trainable, rest = fz.partition(params, spec)
    return jax.value_and_grad(lambda trainable: loss(fz.combine(trainable, rest), batch))(trainable)


def joined(loss: Callable[..., Any], spec: Any, trains: Any, params: Any, batch: Any) -> Any:
    """By hand, without a change of the model: the stretches of rows are concatenated."""

    def leaf(part: Any, full: Any, mask: np.ndarray) -> Any:
        if isinstance(part, optax.MaskedNode):
            return full
        if not isinstance(part, fz.Part):
            return part
        [axis] = np.flatnonzero(np.array(part.values.shape) != full.shape)
        rows = mask.any(tuple(i for i in range(mask.ndim) if i != axis))
        pieces = []
        for start, stop in itertools.pairwise([0, *np.flatnonzero(np.diff(rows)) + 1, len(rows)]):
            source, at = (part.values, rows[:start].sum()) if rows[start] else (jax.lax.stop_gradient(full), start)
            pieces.append(jax.lax.slice_in_dim(source, at, at + stop - start, axis=axis))
        return jnp.concatenate(pieces, axis)

    def value(trainable: Any) -> Any:
        is_part = lambda node: isinstance(node, (fz.Part, optax.MaskedNode))  # noqa: E731
        return loss(jax.tree.map(leaf, trainable, params, trains, is_leaf=is_part), batch)

    return jax.value_and_grad(value)(fz.partition(params, spec)[0])


def cost(fn: Callable[..., Any], *args: Any) -> Cost:
    """FLOPs and bytes with every scan unrolled, since XLA counts the body of a loop once; temporaries as it is."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    compiled = jax.jit(fn).lower(*args).compile()
    memory, counted = compiled.memory_analysis(), compiled
    if "scan[" in str(jaxpr):
        counted = jax.jit(core.jaxpr_as_fun(_unrolled(jaxpr))).lower(*jax.tree.leaves(args)).compile()
    figures = counted.cost_analysis()
    temporary = memory.temp_size_in_bytes
    return Cost(figures["flops"], figures["bytes accessed"], temporary + memory.output_size_in_bytes, temporary)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))


def _unrolled(jaxpr: Any) -> Any:
    if isinstance(jaxpr, core.ClosedJaxpr):
        return jaxpr.replace(jaxpr=_unrolled(jaxpr.jaxpr))
    eqns = []
    for eqn in jaxpr.eqns:
        params = jax.tree.map(lambda v: _unrolled(v) if _is_jaxpr(v) else v, eqn.params, is_leaf=_is_jaxpr)
        if eqn.primitive.name == "scan":
            params["unroll"] = max(params["length"], 1)
        eqns.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=eqns)


def merges(model: Model) -> tuple[str, ...]:
    """Leaves whose rows are merged, and the operation that merges them."""
    rows = fz.explain(model.loss, model.params, model.spec, model.batch).rows
    return tuple(f"{row.path}: {row.merged}" for row in rows if row.merged)
