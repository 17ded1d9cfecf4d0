"""What the runs of an optimizer say about it: where freezing leaks, why, and what to do about it.

An update proportional to the parameter is weight decay, one that equals the gradient is ``optax.masked``, a NaN under a
NaN alone is a product with a mask. A leak is certain, its cause is the likeliest.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_freeze._audit import causes as _causes
from optax_freeze._audit.causes import Cause
from optax_freeze._audit.measurements import Facts
from optax_freeze._audit.runs import Probe, Run
from optax_freeze._errors import is_array
from optax_freeze._optimizer.freeze_when import FreezeWhenState
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.selection import FROZEN, TRAINABLE, DenseMask
from optax_freeze._spec.tree import Part
from optax_freeze._state.entries import Entry, entries_of
from optax_freeze._state.set_frozen import currently_frozen


class Leak(NamedTuple):
    """One thing that freezing does not hold back, at one leaf.

    Attributes:
      kind: ``"moved"``: a frozen element has an update; ``"changed"``: the update of what trains depends on what is
        frozen; ``"state"``: state is held for what is frozen; ``"untrained"``: the gradient of what trains reaches
        neither an update nor any state.
      path: the leaf; for ``"changed"`` and ``"untrained"`` it is one that trains.
      cause: the likeliest.
      got: what was seen.
      expected: what should have been.
      fix: what to do about it.
      elements: how many elements of the leaf it is about.
      nbytes: the bytes of the state.
    """

    kind: Literal["moved", "changed", "state", "untrained"]
    path: str
    cause: str
    got: str
    expected: str
    fix: str
    elements: int
    nbytes: int = 0


_NOT_FINITE = ("NaN", "inf", "-inf")
_WITH = {
    "zero": "a gradient of zero",
    "ordinary": "an ordinary gradient",
    "huge": "a huge gradient",
    **{fill: f"a gradient of {fill}" for fill in _NOT_FINITE},
    "other": "other frozen parameters and a gradient of zero",
    "warm": "a gradient of zero and a state as of earlier training",
}


def runs_of(probe: Probe) -> dict[str, Run]:
    """All the runs that :func:`leaks_of` looks at; what trains is compared with that named "zero"."""
    base = probe.run("zero", keep=True)
    runs = {"zero": base, "again": probe.run("zero", base), "turned": probe.run("zero", base, turned=True)}
    if any(probe.may_be_filled(i) for i in probe.seen):
        if probe.full_grads:
            runs |= {fill: probe.run(fill, base) for fill in ("ordinary", "huge", *_NOT_FINITE)}
        runs["other"] = probe.run("zero", base, other=True)
        warm = _warmed(probe, base.before)
        if warm is not None:
            runs["warm"] = probe.run("zero", base, state=warm)
    return runs


def leaks_of(probe: Probe, runs: Mapping[str, Run]) -> list[Leak]:
    """The leaks, leaf by leaf, and then the state that is held for nothing."""
    judges = (_moved, _changed, _untrained)
    leaks = [leak for i in probe.seen for judge in judges for leak in judge(probe, runs, i)]
    return [*leaks, *_held(probe, runs["zero"].before)]


def _moved(probe: Probe, runs: Mapping[str, Run], i: int) -> Iterator[Leak]:
    """What moves at the frozen elements of a leaf."""
    frozen, _ = probe.counts[i]
    if not frozen:
        return

    def leak(name: str, cause: Cause) -> Leak:
        step, facts = _first(runs[name], i, "moved")
        got = f"{facts.moved} of {frozen} frozen elements move in step {step + 1} with {_WITH[name]}"
        if facts.largest:
            got += ", to NaN" if np.isnan(facts.largest) else f", by up to {facts.largest:.3g}"
        expected = "an update of zero, whatever the gradient, the parameter and the state"
        return Leak("moved", probe.plan.leaves[i].path, cause.name, got, expected, cause.fix, int(facts.moved))

    if _differs(runs["again"], runs["zero"], i):
        yield leak("zero", _causes.NOISE)
        return
    for name in ("ordinary", "huge"):
        if name in runs and _differs(runs[name], runs["zero"], i):
            ratio = _constant(_first(runs[name], i, "moved")[1].to_grads, probe, i)
            yield leak(name, _causes.RAW if name == "ordinary" and ratio > 0 else _causes.TRAINS)
            return
    for name in ("zero", "other"):
        if name in runs and any(facts[i].moved for facts in runs[name].facts):
            cause = _drift(probe, runs, name, i)
            yield leak(name, cause)
            if cause is _causes.ROUNDING:
                return  # the state holds copies of parameters, and no moments
            break
    for name in _NOT_FINITE:
        if name in runs and _differs(runs[name], runs["zero"], i):
            yield leak(name, _causes.PRODUCT)
            break
    if "warm" in runs and _differs(runs["warm"], runs["zero"], i):
        yield leak("warm", _causes.MOMENTUM)


def _drift(probe: Probe, runs: Mapping[str, Run], name: str, i: int) -> Cause:
    """Why frozen elements move although their gradient is zero."""
    step, facts = _first(runs[name], i, "moved")
    both = [runs[run].facts[step][i] for run in ("zero", "other") if run in runs]
    rates = [_constant(each.to_params, probe, i) for each in both if each.moved]
    if facts.signs == facts.moved:
        return _causes.SIGN
    if facts.clamped:
        return _causes.PROJECTION
    if all(rates) and _constant((min(rates), max(rates)), probe, i):
        return _causes.DECAY
    if facts.rounding:
        return _causes.ROUNDING
    if probe.may_be_filled(i) and len(both) == 2 and both[0].total == both[1].total:
        return _causes.NOISE
    return _causes.OWN_VALUE


def _changed(probe: Probe, runs: Mapping[str, Run], i: int) -> Iterator[Leak]:
    """What reaches the trainable elements of a leaf from frozen ones."""
    frozen, trains = probe.counts[i]
    if not trains or reaches(runs["again"], i):
        return

    def leak(name: str, cause: Cause, when: str = "changed") -> Leak:
        step, facts = _first(runs[name], i, when)
        got = f"{facts.changed} of {trains} elements have another update in step {step + 1} with {_WITH[name]}"
        got += " at the frozen places"
        ratio = _constant(facts.to_reference, probe, i)
        if facts.stopped:
            got += ": none"
        elif facts.spoiled:
            got += f", NaN or infinite at {facts.spoiled}"
        elif ratio and abs(ratio - 1) > 0.01:
            got += f", {ratio:.3g} times the expected one"
        expected = "bit for bit the update that it has with gradients of zero at the frozen places"
        return Leak("changed", probe.plan.leaves[i].path, cause.name, got, expected, cause.fix, int(facts.changed))

    reached = [name for name in ("ordinary", "huge", *_NOT_FINITE, "other") if name in runs and reaches(runs[name], i)]
    finite = [name for name in reached if name in ("ordinary", "huge")]
    if finite:
        yield leak(finite[0], _causes.NORM if not frozen or _crosses_leaves(probe, runs) else _causes.STATISTICS)
    if "NaN" in reached and _first(runs["NaN"], i, "stopped")[1].stopped:
        yield leak("NaN", _causes.REJECTED, "stopped")
    elif reached and not finite:
        if reached != ["other"]:
            yield leak(reached[0], _causes.SPREAD)
        elif probe.extra_args is None:
            yield leak("other", _causes.OF_PARAMS)


def _crosses_leaves(probe: Probe, runs: Mapping[str, Run]) -> bool:
    """Whether a finite frozen gradient reaches a leaf that trains as a whole."""
    whole = [i for i in probe.seen if not probe.counts[i][0]]
    return any(reaches(runs[name], i) for name in ("ordinary", "huge") for i in whole)


def _untrained(probe: Probe, runs: Mapping[str, Run], i: int) -> Iterator[Leak]:
    """Whether nothing becomes of the gradient of what trains."""
    if not _is_deaf(probe, runs, i):
        return
    nothing = all(_is_deaf(probe, runs, k) for k in probe.seen if probe.counts[k][1])
    cause, (_, trains) = _causes.NOTHING if nothing else _causes.DEAF, probe.counts[i]
    got = f"{trains} elements with the same update and state whatever their gradient"
    expected = "an update, or state, that depends on it"
    yield Leak("untrained", probe.plan.leaves[i].path, cause.name, got, expected, cause.fix, trains)


def _is_deaf(probe: Probe, runs: Mapping[str, Run], i: int) -> bool:
    turned, path = runs["turned"], probe.plan.leaves[i].path
    if not probe.counts[i][1] or any(facts[i].changed or facts[i].nan for facts in turned.facts):
        return False
    if path in _waiting(turned.before):
        return False
    pairs = zip(_entries(probe, runs["zero"].after), _entries(probe, turned.after), strict=True)
    return all(
        _same(x, y)
        for a, b in pairs
        if a.leaf == path or a.leaf is None
        for x, y in zip(jax.tree.leaves(a.value), jax.tree.leaves(b.value), strict=True)
        if a.leaf is not None or np.ndim(x)
    )


def _waiting(state: optax.OptState) -> set[str]:
    """The leaves in groups of ``freeze_when`` that are frozen for now."""
    return {
        leaf.path
        for node in _groups(state).values()
        for name, plan in zip(node.spec.names, node.spec.plans, strict=False)
        for leaf, selection in zip(plan.leaves, plan.selections, strict=True)
        if selection is not FROZEN and currently_frozen(node)[name]
    }


def _groups(state: optax.OptState) -> dict[str, Any]:
    """The states of ``freeze_when`` in a state, by their paths."""
    nodes = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, FreezeWhenState))[0]
    return {_tree.keystr(key): node for key, node in nodes if isinstance(node, FreezeWhenState)}


def _held(probe: Probe, state: optax.OptState) -> Iterator[Leak]:
    """State that is held for frozen elements, a row for each leaf."""
    found: dict[tuple[int | None, bool], list[Entry]] = {}
    for _, i, entry in _of_frozen(probe, state):
        found.setdefault((i, entry.tree.endswith("acc_grads")), []).append(entry)
    for (i, accumulated), entries in found.items():
        counts = [probe.counts[k] for k in (probe.seen if i is None else [i])]
        frozen, trains = map(sum, zip(*counts, strict=True))
        nbytes = sum(entry.value.nbytes * frozen // (frozen + trains) for entry in entries)
        moments = _causes.MOMENTS_IN_PART if trains else _causes.MOMENTS
        cause = _causes.FLAT if i is None else _causes.ACCUMULATED if accumulated else moments
        got = f"{nbytes:,} bytes, at {', '.join(entry.tree for entry in entries)}"
        path = "" if i is None else probe.plan.leaves[i].path
        yield Leak("state", path, cause.name, got, "no state for frozen elements", cause.fix, frozen, nbytes)


def _warmed(probe: Probe, state: optax.OptState) -> optax.OptState | None:
    """The state with ones wherever it is about frozen elements, as if these had been trained; None if nowhere."""
    values, treedef = _tree.flatten(state)
    found = [entry for entry in _of_frozen(probe, state) if jnp.issubdtype(entry[2].value.dtype, jnp.inexact)]
    for place, i, entry in found:
        values[place] = jnp.where(True if i is None else probe.frozen[i], jnp.ones_like(entry.value), entry.value)
    return jax.tree.unflatten(treedef, values) if found else None


def _of_frozen(probe: Probe, state: optax.OptState) -> Iterator[tuple[int, int | None, Entry]]:
    """The arrays of a state that are about frozen elements: their index in it, their leaf (None: all), and they.

    A group of ``freeze_when`` keeps its own for later, and a dense mask in this library's ``freeze`` is no less state
    than the leaf: both are so by design.
    """
    leaves = {leaf.path: i for i, leaf in enumerate(probe.plan.leaves)}
    groups = tuple(f"{path}/" if path else "" for path in _groups(state))
    total = sum(map(sum, probe.counts)) if len(probe.seen) > 1 and any(frozen for frozen, _ in probe.counts) else -1
    for place, (path, entry) in enumerate(zip(_tree.paths(state), _entries(probe, state), strict=True)):
        value = entry.value
        if entry.address is None or isinstance(value, Part) or not is_array(value) or path.startswith(groups):
            continue
        if entry.leaf is None:
            if value.shape[-1:] == (total,):
                yield place, None, entry
        elif _is_of_frozen(probe.plan.selections[leaves[entry.leaf]], entry):
            yield place, leaves[entry.leaf], entry


def _is_of_frozen(selection: Any, entry: Entry) -> bool:
    value = entry.value
    if selection is FROZEN:
        number = entry.shape == () and jnp.issubdtype(value.dtype, jnp.inexact)
        return value.size > 0 and (value.ndim > 0 or number)
    by_design = (
        isinstance(selection, DenseMask) and not selection.compact and any(entry.leaf in parts for parts in entry.parts)
    )
    return selection is not TRAINABLE and not by_design and value.shape[value.ndim - len(entry.shape) :] == entry.shape


def _entries(probe: Probe, state: optax.OptState) -> list[Entry]:
    return entries_of(state, {leaf.path: leaf.shape for leaf in probe.plan.leaves})


def _first(run: Run, i: int, name: str) -> tuple[int, Facts]:
    """The first step in which one of the facts of a leaf holds, or the last step, and its facts."""
    steps = [(step, facts[i]) for step, facts in enumerate(run.facts)]
    return next(((step, facts) for step, facts in steps if getattr(facts, name)), steps[-1])


def reaches(run: Run, i: int) -> bool:
    """Whether a trainable element of a leaf has another update than in the reference run."""
    return any(facts[i].changed for facts in run.facts)


def _differs(run: Run, other: Run, i: int) -> bool:
    """Whether frozen elements of a leaf have other updates in one run than in another."""
    pairs = [(a[i], b[i]) for a, b in zip(run.facts, other.facts, strict=True)]
    return any(a.moved != b.moved or not np.array_equal(a.total, b.total, equal_nan=True) for a, b in pairs)


def _constant(ratio: tuple[Any, Any], probe: Probe, i: int) -> float:
    """The ratio, if it is that of all elements within rounding; else 0."""
    leaf, (low, high) = probe.plan.leaves[i], map(float, ratio)
    epsilon = float(jnp.finfo(jax.dtypes.canonicalize_dtype(leaf.dtype)).eps) if leaf.inexact else 0.0
    agree = np.isfinite(low) and np.isfinite(high) and high - low <= 16 * epsilon * max(abs(low), abs(high))
    return low if agree else 0.0


def _same(a: Any, b: Any) -> bool:
    """Whether two arrays hold the same numbers, NaN among them."""
    return bool(jnp.all((a == b) | ((a != a) & (b != b))))
