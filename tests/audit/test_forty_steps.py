"""The audit of forty steps, and that their truth is true: that is found by running them, without the audit."""

import collections
import fnmatch
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from steps import CASES, RIGHT, StepCase

import optax_freeze as fz

RIGHT_NAMES = {make.__name__ for make in RIGHT}


@functools.cache
def case_of(name) -> StepCase:
    return CASES[name]()


def leaves_of(tree):
    """The leaves by their paths, as arrays of NumPy; those of an NNX module without ``/value``."""
    tree = nnx.to_pure_dict(nnx.state(tree)) if is_nnx(tree) else tree
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if hasattr(leaf, "dtype"):
            leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            leaves[jax.tree_util.keystr(path, simple=True, separator="/")] = np.asarray(leaf)
    return leaves


def parameters(case, state):
    """The parameters in a state: for an NNX module a dict."""
    if callable(case.params):
        return case.params(state)
    for key in case.params.split("/"):
        state = getattr(state, key) if hasattr(state, key) else state[int(key) if key.isdigit() else key]
    return nnx.to_pure_dict(nnx.state(state, nnx.Param)) if isinstance(state, nnx.Module) else state


def frozen_elements(case):
    """A tree of the parameters' structure: which elements are frozen."""

    def total(params):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(fz.stop_gradient(params, case.frozen)))

    return jax.tree.map(lambda derivative: np.asarray(derivative) == 0, jax.grad(total)(parameters(case, case.state)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def zero(x, derivative):
    return jnp.zeros_like(x)


@zero.defjvp
def _(derivative, primals, tangents):
    return jnp.zeros_like(primals[0]), derivative * tangents[0]


def altered(loss, frozen_sum, derivative):
    """The loss, to whose derivative for each frozen element `derivative` is added."""

    def with_another_derivative(*args):
        result = loss(*args)
        value, *aux = result if isinstance(result, tuple) else (result,)
        value = value + zero(frozen_sum(*args), derivative).astype(value.dtype)
        return (value, *aux) if aux else value

    return with_another_derivative


def altered_step(case, frozen, derivative):
    """The step of losses with other frozen gradients; of the forgotten loss, if there is one."""

    def frozen_sum(params, *_):
        return sum(jax.tree.leaves(jax.tree.map(lambda at, w: jnp.sum(jnp.where(at, w, 0)), frozen, params)))

    losses = case.loss if isinstance(case.loss, tuple) else (case.loss,)
    sums = case.frozen_sum or frozen_sum
    sums = sums if isinstance(sums, tuple) else (sums,) * len(losses)
    if case.hidden:
        return case.make_step(*losses, altered(case.hidden, frozen_sum, derivative))
    return case.make_step(*(altered(*pair, derivative) for pair in zip(losses, sums, strict=True)))


def other(leaf):
    leaf = jnp.asarray(leaf)
    return 0.3 - 0.7 * leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.roll(leaf, 1)


def is_nnx(state):
    return isinstance(state, tuple) and isinstance(state[0], nnx.Module)


def run(case, step, batches, start=None):
    """The state after each step; counters begin with `start`. A step changes NNX modules in place."""
    states = []

    def counted(leaf):
        is_counter = getattr(leaf, "dtype", None) == jnp.int32 and leaf.shape == ()
        return jnp.full_like(leaf, start) if is_counter and start else leaf

    state = nnx.clone(case.state) if is_nnx(case.state) else jax.tree.map(counted, case.state)
    for batch in batches:
        result = step(state, *batch)
        if not is_nnx(state):
            state = result if jax.tree.structure(result) == jax.tree.structure(state) else result[0]
        states.append(nnx.clone(state) if is_nnx(state) else state)
    return states


def differing(before, after, at=None):
    """The paths of the leaves that differ in any bit; only where `at` is True."""
    before, after = leaves_of(before), leaves_of(after)
    at = dict.fromkeys(before, ...) if at is None else leaves_of(at)
    return {path for path in before if before[path][at[path]].tobytes() != after[path][at[path]].tobytes()}


def matching(paths, patterns):
    return {path for path in paths if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)}


@pytest.mark.parametrize("name", CASES)
def test_truth(name):
    case = case_of(name)
    claimed = collections.defaultdict(set)
    for leak in case.leaks:
        kind, path = leak.split(" ", 1)
        claimed[kind].add(path)
    params, frozen = parameters(case, case.state), frozen_elements(case)
    trains = jax.tree.map(np.logical_not, frozen)
    batches = (case.batch, jax.tree.map(other, case.batch), case.batch)
    huge = jax.tree.map(lambda leaf: leaf * 1e5 if leaf.dtype == jnp.float32 else leaf, case.batch)

    step = case.make_step(*(case.loss if isinstance(case.loss, tuple) else (case.loss,)))
    ends = [run(case, step, batches, start)[-1] for start in (None, 100, 999, 720_719_999)]
    ends += run(case, step, [huge])
    moved = set().union(*(differing(params, parameters(case, end), frozen) for end in ends))
    moved_in_state = set().union(*(differing(case.state, end) for end in ends))
    assert moved == matching(moved, claimed["moved"])
    assert all(matching(moved | moved_in_state, [path]) for path in claimed["moved"])
    assert not matching(moved_in_state, case.kept)
    trainable = {path for path, at in leaves_of(trains).items() if at.any()}
    assert trainable - differing(params, parameters(case, ends[0]), trains) == claimed["untrained"]

    plain, tampered = (run(case, altered_step(case, frozen, size), batches[:2]) for size in (1.0, np.nan))
    reacts = set().union(*map(differing, plain, tampered))
    assert differing(parameters(case, plain[-1]), parameters(case, tampered[-1]), trains) == claimed["changed"]
    assert not reacts or name not in RIGHT_NAMES
    assert reacts or not claimed["gradient"]
    for path in claimed["state"]:
        assert reacts or matching(leaves_of(case.state).keys() - leaves_of(params).keys(), [f"opt/*{path}"])


def missing_and_alarms(case, audit):
    """The leaks that are missing, and those that are not one: as ``"kind path"``."""
    found = {f"{leak.kind} {leak.path}" for leak in audit.leaks}
    missing = [leak for leak in case.leaks if not matching(found, [leak])]
    return missing, found - matching(found, (*case.leaks, *case.beside))


@pytest.mark.parametrize("name", CASES)
def test_audit(name):
    case = case_of(name)
    audit = fz.audit_step(
        case.make_step, case.state, *case.batch, loss=case.loss, params=case.params, frozen=case.frozen
    )
    missing, alarms = missing_and_alarms(case, audit)
    assert not alarms
    assert not missing or (case.or_note and case.or_note in audit.note)
    assert all(word in audit.note for word in case.note)
