"""The leaks that the runs of an optimizer show, with the most likely cause and the fix of each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._audit.runs import Run, Simulation
from optax_freeze._errors import is_array
from optax_freeze._optimizer.freeze_when import FreezeWhenState
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask, Selection
from optax_freeze._spec.tree import Part
from optax_freeze._state.entries import Entry, entries_of
from optax_freeze._state.own_states import outermost_states

Kind: TypeAlias = Literal["moved", "changed", "gradient", "state", "untrained"]


class Leak(NamedTuple):
    """A violation of the freeze at one leaf.

    Attributes:
      kind: ``"moved"``: a frozen element has an update; ``"changed"``: the update of trainable elements depends on
        frozen ones; ``"gradient"``: a step uses a gradient of them; ``"state"``: state is stored for them;
        ``"untrained"``: the gradient of trainable elements affects neither updates nor state.
      path: the leaf; of ``"changed"`` and ``"untrained"`` one with trainable elements, of an average that in the state.
      cause: the most likely cause.
      got, expected: what was observed, and what should have been.
      fix: what to do about it.
      elements: the number of elements concerned.
      nbytes, flops: the size of the state, the cost of the gradient.
    """

    kind: Kind
    path: str
    cause: str
    got: str
    expected: str
    fix: str
    elements: int
    nbytes: int = 0
    flops: int = 0


class Cause(NamedTuple):
    """Why an optimizer leaks, and what to do about it."""

    name: str
    fix: str


_EXPECTED: dict[Kind, str] = {
    "moved": "an update of zero, whatever the gradient, the parameter and the state",
    "changed": "bit for bit the update that it has with gradients of zero at the frozen elements",
    "state": "no state for frozen elements",
    "untrained": "an update, or state, that depends on it",
}

TRAINS = Cause(
    "it trains",
    "fz.freeze(tx, frozen), around the whole chain: nothing freezes this leaf, a mask is inverted (here True means"
    " frozen), or optax.masked was taken for a freeze: it passes the gradient on where its mask is False",
)
DECAY = Cause(
    "weight decay",
    "fz.freeze(optax.chain(..., optax.add_decayed_weights(...)), frozen): decay belongs inside the freeze",
)
AFTER = Cause(
    "a transformation after the freeze",
    "fz.freeze(optax.chain(tx, ...), frozen): most likely noise (add_noise), a projection (keep_params_nonnegative), an"
    " optimizer after weight decay, or a wrapper with its own copy of the parameters (schedule_free)",
)
PRODUCT = Cause(
    "a product with zero: NaN * 0 is NaN",
    "fz.freeze(tx, frozen), or fz.masked_zero_updates(frozen), which select: most likely updates are multiplied by a"
    " mask, or by a learning rate of 0",
)
STATE_AFTER = Cause(
    "the state of an optimizer after the freeze",
    "fz.freeze(tx, frozen), or fz.masked_zero_updates(frozen) last: most likely gradients are zeroed only before a"
    " stateful optimizer, whose moments from earlier training, or from a checkpoint, still move frozen parameters",
)
NORM = Cause(
    "a norm over frozen gradients",
    "fz.freeze(optax.chain(optax.clip_by_global_norm(...), ...), frozen): most likely a clip or a normalization is"
    " outside the freeze. Or use fz.value_and_grad, and audit with full_grads=False",
)
FINITE_CHECK = Cause(
    "a finite check over frozen gradients",
    "fz.freeze(optax.apply_if_finite(tx, ...), frozen): most likely a check (apply_if_finite, skip_not_finite), a norm"
    " or a line search is outside the freeze. Or use fz.value_and_grad, and audit with full_grads=False",
)
STATISTIC = Cause(
    "a statistic over frozen elements",
    "fz.freeze(tx, frozen), around the whole chain, by fz.rows or fz.elements(..., compact=True) for a part of a leaf:"
    " most likely a trust ratio, factored moments, or a distance over all parameters",
)
IGNORED = Cause(
    "its gradient is ignored",
    "fz.freeze(tx, frozen) with the spec given here: most likely a mask is inverted, labels match nothing or freeze"
    " more, or optax.selective_transform was given a function as freeze_mask, which freezes everything",
)
STATE = Cause(
    "state for frozen elements",
    "fz.freeze(tx, frozen), with MultiSteps and optax.flatten inside, by fz.rows or fz.elements(..., compact=True) for"
    " a part of a leaf: tx then never sees a frozen element",
)

_FINITE, _NOT_FINITE = ("ordinary", "huge"), ("NaN", "inf", "-inf")
_CONDITION = {
    "zero": "a gradient of zero",
    "ordinary": "an ordinary gradient",
    "huge": "a huge gradient",
    **{fill: f"a gradient of {fill}" for fill in _NOT_FINITE},
    "other": "other frozen parameters and a gradient of zero",
    "warm": "a gradient of zero and a state as of earlier training",
}


class FrozenState(NamedTuple):
    """An array of an optimizer state that holds values for frozen elements."""

    position: int  # among the leaves of the state
    leaf: int | None  # None: of all leaves in one vector
    entry: Entry


def diagnose(simulation: Simulation) -> tuple[list[Leak], dict[str, Run]]:
    """The leaks, leaf by leaf and then those of the state, and the runs that show them."""
    frozen_state = _frozen_state(simulation)
    runs = _run_all(simulation, frozen_state)
    trainable = [i for i in simulation.numbers if not simulation.counts[i][0]]
    crosses = any(runs[name].shows("changed", i) for name in _FINITE if name in runs for i in trainable)
    ignored = _ignored(simulation, runs["zero"], runs["turned"])
    leaks: list[Leak] = []
    for i in simulation.numbers:
        leaks += _moved(simulation, runs, i)
        leaks += _changed(simulation, runs, i, crosses)
        if i in ignored:
            trains = simulation.counts[i][1]
            got = f"{trains} elements with the same update and state whatever their gradient"
            leaks.append(_leak("untrained", IGNORED, simulation.paths[i], got, trains))
    return [*leaks, *_held(simulation, frozen_state)], runs


def _run_all(simulation: Simulation, frozen_state: Sequence[FrozenState]) -> dict[str, Run]:
    zero = simulation.run("zero")
    runs = {"zero": zero, "again": simulation.run("zero", zero), "turned": simulation.run("zero", zero, turned=True)}
    if simulation.filled:
        if simulation.full_grads:
            runs |= {fill: simulation.run(fill, zero) for fill in (*_FINITE, *_NOT_FINITE)}
        runs["other"] = simulation.run("zero", zero, other=True)
        moments = [held for held in frozen_state if jnp.issubdtype(held.entry.value.dtype, jnp.inexact)]
        if moments:
            runs["warm"] = simulation.run("zero", zero, state=_warmed(simulation, moments))
    return runs


def _warmed(simulation: Simulation, moments: Sequence[FrozenState]) -> optax.OptState:
    """The initial state with ones at frozen elements, as if they had been trained."""
    values, treedef = _tree.flatten(simulation.initial_state)
    for position, leaf, entry in moments:
        frozen = True if leaf is None else simulation.frozen[leaf]
        values[position] = jnp.where(frozen, jnp.ones_like(entry.value), entry.value)
    return jax.tree.unflatten(treedef, values)


def _moved(simulation: Simulation, runs: Mapping[str, Run], i: int) -> Iterator[Leak]:
    """Updates of frozen elements."""
    frozen, _ = simulation.counts[i]

    def leak(name: str, cause: Cause) -> Leak:
        step, measured = runs[name].first("moved", i)
        got = f"{measured.moved} of {frozen} frozen elements move in step {step} with {_CONDITION[name]}"
        got += _by_up_to(measured.largest)
        return _leak("moved", cause, simulation.paths[i], got, measured.moved)

    reacting = [name for name, run in runs.items() if run.shows("reacted", i)]
    moving = [name for name in ("zero", "other") if name in runs and runs[name].shows("moved", i)]
    trained = [name for name in _FINITE if name in reacting]
    spoiled = [name for name in _NOT_FINITE if name in reacting]
    if "again" in reacting:  # a random update
        yield leak("zero", AFTER)
    elif trained:
        yield leak(trained[0], TRAINS)
    else:
        if moving:
            step, _ = runs[moving[0]].first("moved", i)
            rates = [float(runs[name].measurements[step - 1][i].rate) for name in moving]
            is_decay = 0 < abs(rates[0]) < 1 and np.allclose(rates, rates[0], rtol=0.1, atol=0)
            yield leak(moving[0], DECAY if is_decay else AFTER)
        if spoiled:
            yield leak(spoiled[0], PRODUCT)
        if "warm" in reacting:
            yield leak("warm", STATE_AFTER)


def _changed(simulation: Simulation, runs: Mapping[str, Run], i: int, crosses: bool) -> Iterator[Leak]:
    """Updates of trainable elements that depend on frozen ones; ``crosses``: also on those of other leaves."""
    frozen, trains = simulation.counts[i]

    def leak(name: str, cause: Cause, when: str = "changed") -> Leak:
        step, measured = runs[name].first(when, i)
        got = f"{measured.changed} of {trains} elements have another update in step {step} with {_CONDITION[name]}"
        got += " at the frozen elements" + (": none" if measured.stopped else _by_up_to(measured.difference))
        return _leak("changed", cause, simulation.paths[i], got, measured.changed)

    reached = [name for name in (*_FINITE, *_NOT_FINITE, "other") if name in runs and runs[name].shows("changed", i)]
    if not reached or runs["again"].shows("changed", i):
        return
    if reached[0] in _FINITE:
        yield leak(reached[0], STATISTIC if frozen and not crosses else NORM)
    if "NaN" in reached and runs["NaN"].shows("stopped", i):
        yield leak("NaN", FINITE_CHECK, "stopped")
    elif reached[0] in _NOT_FINITE:
        yield leak(reached[0], FINITE_CHECK)
    elif reached == ["other"] and simulation.extra_args is None:
        yield leak("other", STATISTIC)


def _leak(kind: Kind, cause: Cause, path: str, got: str, elements: int, nbytes: int = 0) -> Leak:
    return Leak(kind, path, cause.name, got, _EXPECTED[kind], cause.fix, int(elements), nbytes)


def _by_up_to(number: Any) -> str:
    return ", to NaN" if np.isnan(number) else f", by up to {number:.3g}" if number else ""


def _ignored(simulation: Simulation, zero: Run, turned: Run) -> set[int]:
    """The leaves with trainable elements of which another gradient changes neither the update nor any state."""
    if _groups(turned.before):  # a group of `freeze_when` may wait
        return set()
    pairs = zip(_entries(simulation, zero.after), _tree.flatten(turned.after)[0], strict=True)
    known = [(entry, other) for entry, other in pairs if entry.leaf is not None or np.ndim(other)]
    affected = {entry.leaf for entry, other in known if not _equal(entry.value, other)}
    leaves = {i for i in simulation.numbers if simulation.counts[i][1] and not affected & {simulation.paths[i], None}}
    return {i for i in leaves if not turned.shows("changed", i) and not turned.shows("nan", i)}


def _groups(state: optax.OptState) -> list[str]:
    return [path for path, _ in outermost_states(state, FreezeWhenState)]


def _held(simulation: Simulation, frozen_state: Sequence[FrozenState]) -> Iterator[Leak]:
    """State that is held for frozen elements, one leak for each leaf."""
    by_leaf: dict[int | None, list[Entry]] = {}
    for held in frozen_state:
        by_leaf.setdefault(held.leaf, []).append(held.entry)
    for i, entries in by_leaf.items():
        counts = [simulation.counts[k] for k in (simulation.numbers if i is None else [i])]
        frozen, trains = map(sum, zip(*counts, strict=True))
        nbytes = sum(entry.value.nbytes * frozen // (frozen + trains) for entry in entries)
        got = f"{nbytes:,} bytes, at {', '.join(entry.tree for entry in entries)}"
        yield _leak("state", STATE, "" if i is None else simulation.paths[i], got, frozen, nbytes)


def _frozen_state(simulation: Simulation) -> list[FrozenState]:
    """The arrays of the initial state that hold values for frozen elements.

    Groups of ``freeze_when`` keep theirs by design, and so does ``freeze`` with a dense mask.
    """
    state = simulation.initial_state
    groups = tuple(f"{path}/" if path else "" for path in _groups(state))
    size = sum(map(sum, simulation.counts))
    may_be_flat = len(simulation.numbers) > 1 and any(frozen for frozen, _ in simulation.counts)
    found = []
    for position, (path, entry) in enumerate(zip(_tree.paths(state), _entries(simulation, state), strict=True)):
        value = entry.value
        if entry.address is None or isinstance(value, Part) or not is_array(value) or path.startswith(groups):
            continue
        if entry.leaf is None:
            if may_be_flat and value.shape[-1:] == (size,):
                found.append(FrozenState(position, None, entry))
        elif is_of_frozen(simulation.plan.selections[simulation.index_of[entry.leaf]], entry):
            found.append(FrozenState(position, simulation.index_of[entry.leaf], entry))
    return found


def is_of_frozen(selection: Selection, entry: Entry) -> bool:
    value = entry.value
    if selection is FROZEN:
        is_number = entry.shape == () and jnp.issubdtype(value.dtype, jnp.inexact)
        return value.size > 0 and (value.ndim > 0 or is_number)
    is_full = isinstance(selection, DenseMask) and not selection.compact
    by_design = is_full and entry.selection is not TRAINABLE
    return selection is not TRAINABLE and not by_design and value.shape[value.ndim - len(entry.shape) :] == entry.shape


def _entries(simulation: Simulation, state: optax.OptState) -> list[Entry]:
    return entries_of(state, {leaf.path: leaf.shape for leaf in simulation.plan.leaves})


def _equal(a: Any, b: Any) -> bool:
    """Whether two arrays, or two parts, hold the same numbers, NaN among them."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(bool(jnp.all((x == y) | ((x != x) & (y != y)))) for x, y in pairs)
