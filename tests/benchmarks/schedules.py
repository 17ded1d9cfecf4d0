"""Cost of ``fz.freeze_when`` and of phases, compared with the plain optimizer and with groups written by hand.

1. Random switches of 8 groups: how often the step is compiled.
2. An update with k of 8 groups frozen, with donated state. By hand, frozen groups are skipped with ``lax.cond``, or
   ``jnp.where`` selects from complete updates. With none frozen: FLOPs, temporary bytes, time, and time including
   ``apply_updates``, compared with the plain optimizer. With k frozen: time compared with the same code and none
   frozen; the ideal is (8 - k) / 8. Compiled for the device of the machine; times are minima of many alternating runs,
   on a CPU in CPU time.
3. Updating parameters that are donated with the state: ``fz.update_params`` compared with ``tx.update`` and
   ``optax.apply_updates``, with none, half and all of 8 groups frozen; times relative to the plain optimizer.
4. A training step of 8 layers with the first k frozen, and of 28 layers with any of them frozen: the gradient with
   ``fz.spec_of(state)`` followed by an update, and ``fz.train_step``, compared with a static phase that freezes the
   same layers (``fz.freeze``, ``fz.apply_updates``). The size of the program (equations, and bytes of compiled text)
   and the time to compile it, compared with the step of the plain optimizer.
5. A training step of the decoder of ``transformer.py``, nothing frozen, compiled for one TPU v5e chip.
6. Static phases of that decoder, unfrozen from the head on: FLOPs of each phase, compared with the phase written by
   hand.

Run with ``python tests/benchmarks/schedules.py``.
"""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax
import transformer

import optax_freeze as fz

GROUPS, ROUNDS = 8, 50
NAMES = [f"group_{i}" for i in range(GROUPS)]
ADAMW = optax.adamw(1e-3)


def toggles() -> None:
    """How often the step is traced in a hundred random switches."""
    params = {name: jnp.ones(8) for name in NAMES}
    tx = fz.freeze_when(ADAMW, dict.fromkeys(NAMES, False))
    traced = []

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        traced.append(True)
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    state, rng = tx.init(params), np.random.default_rng(0)
    for _ in range(100):
        state = fz.set_frozen(state, {name: bool(rng.integers(2)) for name in NAMES})
        params, state = step(params, state)
    measure.show(f"100 random switches of {GROUPS} groups: {len(traced)} compilation.")


def by_hand(tx: Any, decide: Callable[..., Any]) -> tuple[Any, Any]:
    """``init`` and ``update`` of groups with a state each; ``decide`` implements how a frozen group is skipped."""

    def init(params: Any) -> Any:
        return {name: tx.init(leaf) for name, leaf in params.items()}, dict.fromkeys(params, jnp.asarray(False))

    def update(grads: Any, state: Any, params: Any) -> Any:
        new = {name: decide(tx, state[1][name], grads[name], state[0][name], params[name]) for name in params}
        return {name: u for name, (u, _) in new.items()}, ({name: s for name, (_, s) in new.items()}, state[1])

    return init, update


def cond(tx: Any, frozen: Any, grad: Any, state: Any, param: Any) -> Any:
    """Computes only the branch that is taken."""
    still = jnp.zeros_like(grad)
    return jax.lax.cond(frozen, lambda s: (still, s), lambda s: tx.update(grad, s, param), state)


def where(tx: Any, frozen: Any, grad: Any, state: Any, param: Any) -> Any:
    """Computes the update of frozen groups, too, and discards it."""
    new = tx.update(grad, state, param)
    return jax.tree.map(lambda old, new: jnp.where(frozen, old, new), (jnp.zeros_like(grad), state), new)


class Repeated:
    """A step with donated arguments ``carried``, which it returns first, to be repeated; ``like`` has its program."""

    def __init__(self, step: Callable[..., Any], *carried: Any, others: Any = (), like: Any = None) -> None:
        self.carried, self.others = jax.tree.map(jnp.copy, carried), others
        if like is not None:
            self.compiled, self.sizes = like.compiled, like.sizes
            return
        traced = jax.jit(step, donate_argnums=tuple(range(len(carried)))).trace(*carried, *others)
        start = time.process_time()
        self.compiled = traced.lower().compile()
        seconds = time.process_time() - start
        self.sizes = equations(traced.jaxpr.jaxpr), len(self.compiled.as_text() or ""), seconds

    def __call__(self) -> None:
        result = jax.block_until_ready(self.compiled(*self.carried, *self.others))
        self.carried = result[: len(self.carried)]

    @property
    def flops(self) -> float:
        cost: Any = self.compiled.cost_analysis()
        return cost["flops"]

    @property
    def temporary(self) -> str:
        memory: Any = self.compiled.memory_analysis()
        return f"{memory.temp_size_in_bytes / 1e6:.2f}"


def equations(jaxpr: Any) -> int:
    """The number of equations of a program and of the programs in it."""
    inner = [jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr")) for eqn in jaxpr.eqns]
    return len(jaxpr.eqns) + sum(equations(each.jaxpr) for each in itertools.chain(*inner) if hasattr(each, "jaxpr"))


def apply_after(update: Callable[..., Any], apply: Any = optax.apply_updates) -> Callable[..., Any]:
    """``fz.update_params`` as two calls."""

    def update_params(grads: Any, state: Any, params: Any) -> Any:
        updates, state = update(grads, state, params)
        return apply(params, updates), state

    return update_params


def normal(names: list[str], side: int) -> Any:
    return {name: jax.random.normal(jax.random.key(i), (side, side)) for i, name in enumerate(names)}


def frozen_groups(optimizer: str, inner: Any, side: int) -> None:
    """An update with some groups frozen."""
    params, counts = normal(NAMES, side), (0, 2, 4, 6, 8)
    tx = fz.freeze_when(inner, dict.fromkeys(NAMES, False))
    ways = {
        "fz.freeze_when": (tx.init, tx.update),
        "by hand, lax.cond": by_hand(inner, cond),
        "by hand, jnp.where": by_hand(inner, where),
    }

    def start(way: str, init: Callable[..., Any], k: int) -> Any:
        switches = {name: i < k for i, name in enumerate(NAMES)}
        if way == "fz.freeze_when":
            return fz.set_frozen(init(params), switches)
        return init(params)[0], jax.tree.map(jnp.asarray, switches)

    def updating(update: Callable[..., Any], state: Any) -> Repeated:
        return Repeated(lambda s, p, g: update(g, s, p)[::-1], state, others=(params, params))

    def applied(update: Callable[..., Any], state: Any) -> Repeated:
        return Repeated(lambda p, s, g: apply_after(update)(g, s, p), params, state, others=(params,))

    plain = updating(inner.update, inner.init(params))
    runs = {"plain": plain, "plain, applied": applied(inner.update, inner.init(params))}
    for way, (init, update) in ways.items():
        runs[f"{way}, applied"] = applied(update, start(way, init, 0))
        runs |= {f"{way} {k}": updating(update, start(way, init, k)) for k in counts}
    seconds = measure.least_in_turn(runs, ROUNDS)
    table = measure.table(
        f"An update of {optimizer}, {GROUPS} groups of {side} x {side}, k of them frozen",
        *("k = 0: FLOPs / plain", "k = 0: MB temporary"),
        timed=(
            "k = 0: time / plain",
            "k = 0: time with apply_updates / plain",
            *(f"k = {k}: time / k = 0" for k in counts[1:]),
        ),
    )
    table.add_row("plain optimizer", "(1.00)", plain.temporary, "(1.00)", "(1.00)")
    for way in ways:
        none = runs[f"{way} 0"]
        times = [seconds[f"{way} 0"] / seconds["plain"], seconds[f"{way}, applied"] / seconds["plain, applied"]]
        times += [seconds[f"{way} {k}"] / seconds[f"{way} 0"] for k in counts[1:]]
        table.add_row(way, f"({none.flops / plain.flops:.2f})", none.temporary, *(f"({each:.2f})" for each in times))
    measure.show(table)


def in_place(side: int) -> None:
    """An update that is applied to the parameters, with some groups frozen."""
    params, counts = normal(NAMES, side), (0, 4, 8)
    tx = fz.freeze_when(ADAMW, dict.fromkeys(NAMES, False))
    ways = {
        "tx.update, optax.apply_updates": apply_after(tx.update),
        "fz.update_params": functools.partial(fz.update_params, tx),
    }

    def repeated(update: Callable[..., Any], state: Any) -> Repeated:
        return Repeated(lambda p, s, g: update(g, s, p), params, state, others=(params,))

    runs = {"plain": repeated(apply_after(ADAMW.update), ADAMW.init(params))}
    for way, update in ways.items():
        for k in counts:
            state = fz.set_frozen(tx.init(params), {name: i < k for i, name in enumerate(NAMES)})
            runs[f"{way} {k}"] = repeated(update, state)
    seconds = measure.least_in_turn(runs, ROUNDS)
    table = measure.table(
        f"Updating parameters with AdamW, {GROUPS} groups of {side} x {side}, k of them frozen",
        "MB temporary",
        timed=[f"k = {k}: time / plain" for k in counts],
    )
    table.add_row("plain optimizer", runs["plain"].temporary, "(1.00)")
    for way in ways:
        ratios = (f"({seconds[f'{way} {k}'] / seconds['plain']:.2f})" for k in counts)
        table.add_row(f"fz.freeze_when, {way}", runs[f"{way} 0"].temporary, *ratios)
    measure.show(table)


def whole_steps(layers: int, side: int, batch: int, sets: dict[str, list[int]]) -> None:
    """A training step with some layers frozen, compared with a static phase."""
    names = [f"layer_{i:02d}" for i in range(layers)]
    params = jax.tree.map(lambda x: x / side**0.5, normal(names, side))
    x = jax.random.normal(jax.random.key(layers), (batch, side))

    def loss(params: Any, x: Any) -> Any:
        for name in names:
            x = jnp.tanh(x @ params[name])
        return jnp.mean(x**2)

    def stepping(update: Any, p: Any, s: Any, x: Any) -> Any:
        return update(fz.value_and_grad(loss, fz.spec_of(s))(p, x)[1], s, p)

    tx = fz.freeze_when(ADAMW, dict.fromkeys(names, False))
    ways = {
        "tx.update, optax.apply_updates": functools.partial(stepping, apply_after(tx.update)),
        "fz.update_params": functools.partial(stepping, functools.partial(fz.update_params, tx)),
        "fz.train_step": lambda p, s, x: fz.train_step(loss, tx)(p, s, x)[:2],
    }
    first, *_, last = sets
    runs: dict[str, Repeated] = {}
    for label, frozen in sets.items():
        spec = {name: i in frozen for i, name in enumerate(names)}
        phase = fz.freeze(ADAMW, spec, full_updates=False)
        static = functools.partial(stepping, apply_after(phase.update, fz.apply_updates))
        runs[f"phase {label}"] = Repeated(static, params, phase.init(params), others=(x,))
        for way, step in ways.items():
            state, like = fz.set_frozen(tx.init(params), spec), runs.get(f"{way} {first}")
            runs[f"{way} {label}"] = Repeated(step, params, state, others=(x,), like=like)
    plain = lambda p, s, x: apply_after(ADAMW.update)(jax.grad(loss)(p, x), s, p)  # noqa: E731
    everything = Repeated(plain, params, ADAMW.init(params), others=(x,))
    seconds = measure.least_in_turn(runs, ROUNDS)
    table = measure.table(
        f"A training step of {layers} layers of {side} x {side} on {batch} examples, some of them frozen",
        *("MB temporary", "program: equations", "compiled bytes"),
        timed=["time to compile", *(f"{label}: time / static phase" for label in sets)],
    )
    table.add_row("plain optimizer", everything.temporary, *["(1.00)"] * 3)
    static_times = ["(1.00)"] * len(sets)
    table.add_row(f"static phase, fz.freeze, {last}", runs[f"phase {last}"].temporary, "", "", "", *static_times)
    for way in ways:
        run = runs[f"{way} {first}"]
        ratios = [a / b for a, b in zip(run.sizes, everything.sizes, strict=True)]
        ratios += [seconds[f"{way} {label}"] / seconds[f"phase {label}"] for label in sets]
        table.add_row(f"fz.freeze_when, {way}", run.temporary, *(f"({each:.2f})" for each in ratios))
    measure.show(table)


def decoder() -> None:
    """A training step of the decoder, and static phases of it."""
    params = jax.eval_shape(transformer.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((transformer.BATCH, transformer.LENGTH), jnp.int32)
    patterns = ["head", *(f"blocks/{i:02d}" for i in reversed(range(transformer.LAYERS))), "embed"]

    def figures(tx: Any, step: Any, params: Any, *rest: Any) -> measure.Figures:
        return measure.figures(step, params, jax.eval_shape(tx.init, params), tokens, *rest)

    everything = jax.value_and_grad(transformer.loss)
    exact = ("GFLOP", "MB accessed", "MB temporary")
    table = measure.table("A training step of the decoder, nothing frozen (ratio to the plain optimizer)", *exact)
    scheduled = fz.freeze_when(ADAMW, fz.gradual_unfreeze(patterns, every=100))
    rows = []
    for name, tx in (("plain optimizer", ADAMW), (f"fz.freeze_when, {len(patterns)} groups", scheduled)):
        step = measure.stepping(everything, tx)
        row = figures(tx, step, params)
        rows.append((row.flops / 1e9, row.accessed / 1e6, row.temporary / 1e6))
        cells = (f"{a:.1f} ({a / b:.2f})" for a, b in zip(rows[-1], rows[0], strict=True))
        table.add_row(name, *cells)
    measure.show(table)

    exact = ("fz.freeze", "by hand", "fz.freeze / by hand", "fz.freeze / nothing frozen")
    table = measure.table("Static phases of the decoder: GFLOP of a step", *exact, label="trainable")
    for n in (1, 2, 5, 10):
        frozen = fz.all_except(*patterns[:n])
        trainable, rest = fz.partition(params, frozen)

        def value_and_grad(trainable: Any, tokens: Any, rest: Any) -> Any:
            return jax.value_and_grad(lambda t: transformer.loss(fz.combine(t, rest), tokens))(trainable)

        tx, gradient = fz.freeze(ADAMW, frozen), fz.value_and_grad(transformer.loss, frozen)
        phase = figures(tx, measure.stepping(gradient, tx, fz.apply_updates), params)
        hand = figures(ADAMW, measure.stepping(value_and_grad, ADAMW), trainable, rest)
        name = patterns[0] if n == 1 else f"{patterns[0]} to {patterns[n - 1]}"
        table.add_row(
            name,
            f"{phase.flops / 1e9:.1f}",
            f"{hand.flops / 1e9:.1f}",
            f"{phase.flops / hand.flops:.3f}",
            f"{phase.flops / 1e9 / rows[0][0]:.2f}",
        )
    measure.show(table)


def main() -> None:
    toggles()
    frozen_groups("AdamW", ADAMW, 1024)
    frozen_groups("Muon", optax.contrib.muon(1e-3), 256)
    in_place(1024)
    for batch in (64, 512):
        whole_steps(GROUPS, 1024, batch, {f"k = {k}": [*range(k)] for k in (0, 2, 4, 6)})
    mixed = np.flatnonzero(np.random.default_rng(0).integers(2, size=28)).tolist()
    sets = {"none": [], "every second": [*range(0, 28, 2)], f"{len(mixed)} mixed": mixed, "the first 20": [*range(20)]}
    sets |= {"all but the fourth": [*range(3), *range(4, 28)], "all but the last": [*range(27)]}
    whole_steps(28, 512, 256, sets)
    decoder()


if __name__ == "__main__":
    main()
