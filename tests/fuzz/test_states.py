"""Random sequences of everything that makes, changes or keeps an optimizer state, against the same by hand.

A failure is printed as the steps that lead to it, which are a test: paste them with ``state = Training()``.
"""

import copy
import functools
import pickle
import tempfile

import by_hand
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
from by_hand import Cut
from conftest import assert_equal_up_to_rounding, bits
from hypothesis import HealthCheck, reject, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from search import SEARCH, Attack

import optax_freeze as fz
from optax_freeze import checkpoint

LEAVES = {
    "a": ("a", (4, 3), "float32"),
    "b": ("n/b", (3, 2), "float32"),
    "c": ("n/c", (4, 4), "bfloat16"),
    "d": ("n/d", (3,), "float32"),
    "i": ("o/i", (2,), "int32"),
    "k": ("o/k", (), "key"),
    "s": ("o/s", (), "float32"),
    "x": ("o/x", (2, 3), "complex64"),
    "y": ("o/y", (4,), "float16"),
    "z": ("o/z", (0, 3), "float32"),
}
RATE = optax.linear_schedule(0.1, 0.0, 4)  # steps are divided by 4 without rounding, compiled or not
FOUND = optimizers.found()
by_rank = lambda tree: jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "vector", tree)  # noqa: E731
COMPOSED = {
    "schedule": lambda: optax.adamw(RATE),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(RATE, momentum=0.9)),
    "every 2": lambda: optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
    "if finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=RATE, weight_decay=0.1),
    "labels": lambda: optax.multi_transform({"matrix": optax.adam(RATE), "vector": optax.sgd(0.1, 0.9)}, by_rank),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "lbfgs without search": lambda: optax.lbfgs(0.1, linesearch=None),
}
NAMES = [*COMPOSED, *sorted({*FOUND} - {"contrib.dpsgd", "flatten"})]
REFUSED = (TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, NotImplementedError)
REFUSED += (jax.errors.JaxRuntimeError,)  # of what XLA does not have
REFUSED += (DeprecationWarning,)  # of complex gradients that `MultiSteps` makes real
COMMON = ["schedule", "clip", "every 2", "labels", "momentum", "adafactor", "lion", "contrib.schedule_free_adamw"]


def transformation(name):
    """An optimizer, and the names of the extra arguments of its update."""
    if name in COMPOSED:
        return optax.with_extra_args_support(COMPOSED[name]()), ()
    tx, asks = FOUND[name].make(), {"polyak_sgd", "lbfgs", "contrib.sophia", "contrib.momo", "contrib.momo_adam"}
    return tx, FOUND[name].extra_args if name in asks or "plateau" in name else ()


def nested(flat):
    return {
        **{path: leaf for path, leaf in flat.items() if "/" not in path},
        **{
            top: {path[2:]: leaf for path, leaf in flat.items() if path.startswith(f"{top}/")}
            for top in {path[0] for path in flat if "/" in path}
        },
    }


def flat(tree):
    return {
        jax.tree_util.keystr(key, simple=True, separator="/"): x for key, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def is_float(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def random_like(rng, leaf):
    """A gradient: of what has none, as by JAX."""
    if not is_float(leaf):
        return np.zeros(leaf.shape, jax.dtypes.float0)
    parts = rng.normal(size=(2, *leaf.shape))
    return jnp.asarray(parts[0] + 1j * parts[1] if jnp.iscomplexobj(leaf) else parts[0]).astype(leaf.dtype)


def loss_of(params, grads, is_quadratic):
    """A loss with the gradient ``grads``, plus 3/4 of the parameters if it is quadratic.

    With the parameters themselves, the first step of L-BFGS would divide the gradient by 0.9, which its line search
    asks for: rounding would decide.
    """
    pairs = [(p, g) for p, g in zip(*map(jax.tree.leaves, (params, grads)), strict=True) if is_float(p)]
    terms = [jnp.real(jnp.sum(jnp.promote_types(p.dtype, jnp.float32).type(1) * p * g)) for p, g in pairs]
    if is_quadratic:
        terms += [0.375 * jnp.sum(jnp.abs(p).astype(jnp.float32) ** 2) for p, _ in pairs]
    return sum(terms, jnp.float32(0))


BOOLS = st.booleans()
ROWS = st.tuples(
    st.just("rows"), st.integers(0, 1), st.integers(1, 14), st.sampled_from(["static", "others", "dynamic"])
)
CHOICES = st.one_of(BOOLS, ROWS, ROWS, st.tuples(st.sampled_from(["dense", "compact"]), st.integers(0, 3)))
CONDITIONS = st.one_of(
    BOOLS,
    BOOLS,
    st.tuples(st.sampled_from(["unfreeze_at", "freeze_at", "updates"]), st.integers(0, 3)),
    st.tuples(st.just("alternate"), st.integers(1, 2), st.integers(0, 2)),
)
GROUPS = st.lists(
    st.tuples(st.one_of(st.integers(0, 3), st.sampled_from(["n", "each"])), CHOICES, CONDITIONS),
    min_size=1,
    max_size=3,
)
ARRANGEMENTS = st.one_of(
    st.tuples(st.sampled_from(["plain", "freeze", "holes"]), st.lists(CHOICES, max_size=4)),
    st.tuples(st.sampled_from(["when", "coupled"]), GROUPS),
    st.tuples(
        st.just("union"), st.lists(st.one_of(st.integers(0, 2), CHOICES.filter(lambda c: c not in (0, 1))), max_size=4)
    ),
)


def cut_of(choice, shape):
    """The elements that a choice does not freeze, or None; a choice that does not fit the leaf counts as False."""
    size = int(np.prod(shape))
    if choice is True:
        return None
    if choice is not False and choice[0] == "rows" and shape and size:
        axis = choice[1] % len(shape)
        frozen = np.array([bool(choice[2] >> i & 1) for i in range(shape[axis])])
        frozen = frozen if frozen.any() and not frozen.all() else np.arange(shape[axis]) == 0
        column = [-1 if i == axis else 1 for i in range(len(shape))]
        return Cut("rows", np.broadcast_to(~frozen.reshape(column), shape).copy(), axis)
    if choice is not False and choice[0] != "rows" and size > 1:
        trains = np.random.default_rng(choice[1]).integers(0, 2, shape).astype(bool)
        trains.flat[0], trains.flat[-1] = False, True
        return Cut(choice[0], trains)
    return Cut("whole", np.ones(shape, bool))


def mask_of(choice, cut):
    """What freezes the other elements than those of a cut, as a user writes it."""
    if cut is None or cut.kind == "whole":
        return cut is None
    if cut.kind != "rows":
        return fz.elements(~cut.trains, compact=cut.kind == "compact")
    if choice[3] == "dynamic":
        return ~fz.rows(jnp.array(cut.numbers()[::-1], jnp.int32), cut.axis)
    others = [i for i in range(cut.trains.shape[cut.axis]) if i not in cut.numbers()]
    return fz.rows(others, cut.axis) if choice[3] == "static" else ~fz.rows(cut.numbers(), cut.axis - cut.trains.ndim)


class Arranged:
    """A transformation of the library for an arrangement, and who owns what."""

    def __init__(self, inner, arrangement, params):
        self.kind, given = arrangement
        self.inner, self.turning, self.conditions = inner, {}, {}
        leaves = {path: leaf for path, leaf in params.items() if is_float(leaf)}
        if self.kind in ("when", "coupled"):
            self._groups(given, leaves)
        elif self.kind == "union":
            self._parts(given, leaves)
        else:
            self._spec(given, leaves)

    def _spec(self, given, leaves):
        choices = dict(zip(sorted(leaves), given, strict=False))
        if self.kind == "plain":  # a plain state does not say which elements a mask selects
            choices = {
                p: c if isinstance(c, bool) else c[0] == "rows" and (*c[:3], "static") for p, c in choices.items()
            }
        cuts = {path: cut_of(choices.get(path, False), leaf.shape) for path, leaf in leaves.items()}
        rules = {path: mask_of(choices[path], cuts[path]) for path in choices}
        self.spec = fz.rules({path: rules[path] for path in rules}) if rules else False
        self.cuts = {"": {path: cut for path, cut in cuts.items() if cut is not None}}
        if not self.cuts[""]:
            reject()
        self.turning = {p: "" for p, c in choices.items() if c is not True and cuts[p].kind in ("dense", "compact")}
        self.turning |= {p: "" for p, c in choices.items() if cuts[p] and cuts[p].kind == "rows" and c[3] == "dynamic"}
        self.tx = (
            self.inner if self.kind == "plain" else fz.freeze(self.inner, self.spec, full_updates=self.kind == "freeze")
        )

    def _parts(self, given, leaves):
        """Of each leaf one part trains all, or none does (2), or the first trains a cut and the second the rest."""
        rules, self.cuts = ({}, {}), {"part 0": {}, "part 1": {}}
        for path, choice in zip(sorted(leaves), [*given, *[0, 1] * 5], strict=False):
            whole = Cut("whole", np.ones(leaves[path].shape, bool))
            cut = whole if isinstance(choice, int) else cut_of(choice, leaves[path].shape)
            of_parts = [cut if choice == n else None for n in range(2)]
            if not isinstance(choice, int):
                of_parts = [cut, None if cut.kind == "whole" else cut._replace(trains=~cut.trains)]
            for n, its in enumerate(of_parts):
                rules[n][path] = its is None if its is None or its.kind == "whole" else mask_of(choice, its)
                self.cuts[f"part {n}"] |= {} if its is None else {path: its}
        if not all(self.cuts.values()):
            reject()
        self.tx = fz.union(*(fz.freeze(self.inner, fz.rules(its)) for its in rules))

    def _groups(self, given, leaves):
        taken, groups, self.cuts = {}, {}, {}
        rest = lambda path: Cut("whole", np.ones(leaves[path].shape, bool)) if path not in taken else taken[path]  # noqa: E731
        for pattern, choice, condition in given:
            pattern = [*sorted(leaves), "n"][pattern % (len(leaves) + 1)] if isinstance(pattern, int) else pattern
            selected = [p for p in leaves if pattern == "each" or p == pattern or p.startswith(f"{pattern}/")]
            selected = [path for path in selected if path not in taken or taken[path] is not None]
            mask = None if len(selected) != 1 or isinstance(choice, bool) else cut_of(choice, leaves[selected[0]].shape)
            mask = None if pattern == "each" or (mask and mask.kind == "whole") else mask
            key = next((k for k in (f"{pattern}/**", pattern) if k not in groups), None)
            key = fz.each("**") if pattern == "each" else key
            if not selected or key is None or any(isinstance(k, type(fz.each("**"))) for k in groups):
                continue
            if mask is not None:
                [path] = selected
                if path in taken:
                    continue
                rows = jnp.array(mask.numbers()[::-1], jnp.int32) if choice[3:] == ("dynamic",) else mask.numbers()
                its = (
                    fz.rows(rows, mask.axis)
                    if mask.kind == "rows"
                    else fz.elements(mask.trains, compact=mask.kind == "compact")
                )
                groups[key], self.cuts[key], taken[path] = (
                    (its, condition),
                    {path: mask},
                    mask._replace(trains=~mask.trains),
                )
                if choice[3:] == ("dynamic",):
                    self.turning[path] = key
                self.conditions[key] = condition
                continue
            groups[key] = condition
            for name, paths in {p: [p] for p in selected}.items() if pattern == "each" else [(key, selected)]:
                self.cuts[name], self.conditions[name] = {path: rest(path) for path in paths}, condition
                taken |= dict.fromkeys(paths)
        if not groups:
            reject()
        self.cuts[""] = {path: rest(path) for path in leaves if rest(path) is not None}
        library = {
            key: (v[0], function(v[1]))
            if isinstance(groups[key], tuple) and len(v) == 2 and not isinstance(v[0], str)
            else function(v)
            for key, v in groups.items()
        }
        coupled = optax.clip_by_global_norm(0.5) if self.kind == "coupled" else None
        self.tx = fz.freeze_when(self.inner, library, coupled)

    def own(self, tree):
        """What `init` gets: everything, or the trainable part."""
        return fz.partition(tree, self.spec)[0] if self.kind == "plain" else tree

    def states(self, state):
        """The states of the owners in that of the library."""
        if self.kind in ("when", "coupled"):
            return {**{name: group.inner_state for name, group in state.groups.items()}, "": state.ungrouped_state}
        if self.kind == "union":
            trained = (part.inner_state.inner_states["trainable"] for part in state.parts)
            return {f"part {n}": each.inner_state for n, each in enumerate(trained)}
        return {"": state if self.kind == "plain" else state.inner_state.inner_states["trainable"].inner_state}


def function(condition):
    if isinstance(condition, bool):
        return condition
    if condition[0] == "updates":
        return lambda step, stats: stats.updates >= condition[1]
    return getattr(fz, condition[0])(*condition[1:])


def frozen_now(condition, step, updates, switch):
    if isinstance(condition, bool):
        return switch
    name, n, *offset = condition
    by_step = {"unfreeze_at": step < n, "freeze_at": step >= n, "updates": (updates or 0) >= n}
    return (step + offset[0]) // n % 2 == 0 if name == "alternate" else by_step[name]


class Training(RuleBasedStateMachine):
    """A training run of the library and one by hand, in step."""

    @initialize(
        name=st.sampled_from(COMMON) | st.sampled_from(NAMES),
        leaves=st.sets(st.sampled_from("abcdikszxy"), min_size=1, max_size=4).map(sorted).map("".join),
        arrangement=ARRANGEMENTS,
        jit=BOOLS,
    )
    def init(self, name, leaves, arrangement, jit):
        SEARCH.tried += 1
        rng = np.random.default_rng(len(leaves))
        self.name, (self.inner, self.extra) = name, transformation(name)
        self.params = {}
        for path, shape, dtype in (LEAVES[letter] for letter in leaves):
            value = jnp.asarray(rng.normal(size=shape).astype("complex64" if dtype == "complex64" else "float32"))
            value = value * 4 if dtype == "int32" else value
            self.params[path] = jax.random.key(1) if dtype == "key" else value.astype(dtype)
            if is_float(self.params[path]) and value.size > 1:
                self.params[path] = self.params[path].at[(0,) * value.ndim].set(-0.0)
        self.step_count, self.switches, self.updates = 0, {}, {}
        self.arrange(arrangement)
        self.owners = {
            name: self.by_hand(by_hand.init, self.inner, cuts, self.params) for name, cuts in self.its.cuts.items()
        }
        init = jax.jit(self.its.tx.init) if jit else self.its.tx.init
        self.state = init(self.its.own(self.tree))
        self.compare(exact=not jit)

    @property
    def tree(self):
        return nested(self.params)

    def arrange(self, arrangement):
        if arrangement[0] == "union" and self.extra:  # a later part sees what an earlier one has updated
            reject()
        self.arrangement = arrangement
        self.its = Arranged(self.inner, arrangement, self.params)
        self.traces, self.types, self.jitted = 0, set(), {}
        given = {name: c for name, c in self.its.conditions.items() if isinstance(c, bool)}
        counted = [name for name, c in self.its.conditions.items() if not isinstance(c, bool) and c[0] == "updates"]
        self.switches = {name: self.switches.get(name, c) for name, c in given.items()}
        self.updates = {name: self.updates.get(name, 0) for name in counted}
        self.step_count = self.step_count if self.its.conditions else 0

    @staticmethod
    def by_hand(fn, *args, **kwargs):
        """What Optax alone refuses is not asked of the library."""
        try:
            return fn(*args, **kwargs)
        except REFUSED:
            reject()

    def frozen(self):
        return {
            name: bool(frozen_now(c, self.step_count, self.updates.get(name), self.switches.get(name)))
            for name, c in self.its.conditions.items()
        }

    def compare(self, exact=True):
        states = self.its.states(self.state)
        assert states.keys() == self.owners.keys()
        for name, owner in self.owners.items():
            got, expected = jax.tree.leaves(states[name]), jax.tree.leaves(owner.state)
            assert len(got) == len(expected), name
            for path, one, other in zip(flat(owner.state), got, expected, strict=True):
                if other is not by_hand.ANY:
                    self.assert_same(one, other, exact, f"{path} of {name!r}")
            copied = jax.tree.map(jnp.copy, got)
            self.owners[name] = owner._replace(state=jax.tree.unflatten(jax.tree.structure(owner.state), copied))
        if self.its.conditions:
            assert fz.currently_frozen(self.state) == self.frozen()
            assert int(self.state.step) == self.step_count

    def assert_same(self, got, expected, exact, where):
        if exact:
            assert bits(got) == bits(expected), f"{where}: {got} instead of {expected}"
        else:
            if self.its.conditions and is_float(expected):  # a program has the types that a state comes to at last
                expected = expected.astype(jnp.promote_types(expected.dtype, got.dtype))
            if self.name == "contrib.galore" and is_float(expected):  # the signs of singular vectors depend on rounding
                got, expected = jnp.abs(got), jnp.abs(expected)
            is_low = any(p.dtype in (jnp.bfloat16, jnp.float16) for p in self.params.values())
            assert_equal_up_to_rounding(got, expected, jnp.bfloat16 if is_low else jnp.float32, 1024)

    def signature(self, is_weak=True):
        leaves, treedef = jax.tree.flatten((self.tree, self.state))
        return treedef, tuple((x.shape, x.dtype, is_weak and x.weak_type) for x in map(jax.typeof, leaves))

    @rule(
        seed=st.integers(0, 3),
        way=st.sampled_from(["update", "holes", "update_params", "train_step"]),
        compiled=st.sampled_from(["eager", "eager", "jit", "donate"]),
    )
    def step(self, seed, way, compiled):
        its, rng, frozen = self.its, np.random.default_rng(seed + 10 * self.step_count), self.frozen()
        grads = {path: random_like(rng, p) for path, p in self.params.items()}
        linear, quadratic = grads, bool(self.extra)
        weights = {path: jnp.zeros(g.shape) if g.dtype == jax.dtypes.float0 else g for path, g in linear.items()}
        loss = lambda p, weights: loss_of(p, weights, quadratic)  # noqa: E731
        if quadratic:
            grads |= jax.grad(lambda p: loss({**self.params, **p}, weights))(
                {p: x for p, x in self.params.items() if is_float(x)}
            )
        # By hand.
        coupled = {path: g for path, g in grads.items() if is_float(g)}
        for name, is_frozen in frozen.items():
            coupled |= {
                p: c.put(coupled[p], jnp.zeros_like(c.take(coupled[p]))) for p, c in its.cuts[name].items() if is_frozen
            }
        if its.kind == "coupled":
            coupled = optax.clip_by_global_norm(0.5).update(coupled, optax.EmptyState())[0]
        new = dict(self.params)
        trees = self.params, grads, coupled if its.kind == "coupled" else grads

        def updated(owner, state, *trees):
            owner = owner._replace(state=state)
            return by_hand.update(self.inner, owner, *trees, lambda p: loss(p, weights), self.extra)

        runs = {name: functools.partial(updated, owner) for name, owner in self.owners.items()}
        expected_owners = {}
        for name, owner in self.owners.items():
            if frozen.get(name) or (its.conditions and not owner.cuts):
                expected_owners[name] = owner
                continue
            run = runs[name] if compiled == "eager" else jax.jit(runs[name])  # both round alike
            parts, state = self.by_hand(run, owner.state, *trees)
            expected_owners[name] = owner._replace(state=state)
            new |= {path: cut.put(new[path], parts[path]) for path, cut in owner.cuts.items()}
            is_low = compiled != "eager" and any(x.dtype == jnp.float16 for x in self.params.values())
            if is_low and not all(np.isfinite(part).all() for part in parts.values()):
                reject()  # divided by what is not normal in float16: as XLA fuses
        # By the library.
        full = dict(grads)
        trains = {path: np.zeros(g.shape, bool) for path, g in full.items()}
        for name, owner in self.owners.items():
            for path, cut in owner.cuts.items():
                trains[path] |= cut.trains & (not frozen.get(name))
        full |= {p: jnp.where(trains[p], g, jnp.nan).astype(g.dtype) for p, g in full.items() if is_float(g)}
        run = self.library_step(way, loss, quadratic)
        exact = compiled == "eager" and not quadratic
        if compiled != "eager":
            run = self.compiled(way, run, compiled == "donate")
            self.types.add((way, compiled, self.signature()))
        state = jax.tree.map(jnp.copy, self.state) if compiled == "donate" else self.state
        try:
            params, self.state = run(jax.tree.map(jnp.copy, self.tree), state, nested(full), nested(weights))
        except REFUSED:
            for name in filter(frozen.get, frozen):  # they are compiled, too
                by_hand_too = runs[name] if compiled == "eager" else jax.jit(runs[name])
                self.by_hand(by_hand_too, self.owners[name].state, *trees)
            raise
        assert self.traces <= len(self.types)
        got = flat(params)
        for path, frozen_at in ((p, ~trains[p]) for p, x in got.items() if x.dtype != self.key):
            assert np.asarray(got[path])[frozen_at].tobytes() == np.asarray(self.params[path])[frozen_at].tobytes(), (
                path
            )
        for path in got:
            self.assert_same(got[path], new[path], exact, path)
        self.params, self.owners = got, expected_owners
        self.updates = {name: n + (not frozen[name]) for name, n in self.updates.items()}
        self.step_count += bool(its.conditions)
        self.compare(exact)

    key = jax.random.key(0).dtype

    def library_step(self, way, loss, quadratic):
        tx, kind, spec = self.its.tx, self.its.kind, getattr(self.its, "spec", None)

        def extra(value, grads, fn):
            every = {"value": value, "grad": grads, "value_fn": fn, "obj_fn": fn}
            return {name: every[name] for name in self.extra}

        def run(params, state, full, weights):
            fn = lambda p: loss(p, weights)  # noqa: E731
            if kind == "plain":
                trainable, rest = fz.partition(params, spec)
                fn = fz.restrict(fn, rest)
                value, grads = jax.value_and_grad(fn)(trainable)
                grads = fz.partition(full, spec)[0] if way in ("update", "update_params") else grads
                updates, state = tx.update(grads, state, trainable, **extra(value, grads, fn))
                return fz.combine(optax.apply_updates(trainable, updates), rest), state
            if way == "train_step":
                params, state, _ = fz.train_step(loss, tx, extra_args=self.extra)(params, state, weights)
                return params, state
            now = fz.spec_of(state)
            grads = fz.grad(fn, now)(params) if way == "holes" else full
            if way == "update_params":
                return fz.update_params(tx, grads, state, params, **extra(fn(params), grads, fn))
            updates, new = tx.update(grads, state, params, **extra(fn(params), grads, fn))
            has_keys = any(p.dtype == self.key for p in self.params.values())
            if way == "update" and kind != "holes" and not has_keys:
                return optax.apply_updates(params, updates), new
            return fz.apply_updates(params, updates, None if self.its.conditions else now), new

        return run

    def compiled(self, way, run, donate):
        def counted(*args):
            self.traces += 1
            return run(*args)

        if (way, donate) not in self.jitted:
            self.jitted[way, donate] = jax.jit(counted, donate_argnums=(0, 1) if donate else ())
        return self.jitted[way, donate]

    @rule(arrangement=ARRANGEMENTS)
    def migrate(self, arrangement):
        olds, was_when, was_plain = self.owners, bool(self.its.conditions), self.its.kind == "plain"
        self.step_count = self.step_count if was_when else 0
        self.arrange(arrangement)
        fresh = {
            name: self.by_hand(by_hand.init, self.inner, cuts, self.params) for name, cuts in self.its.cuts.items()
        }
        self.owners = by_hand.carry(self.inner, fresh, olds, self.params, is_plain=was_plain)
        self.state = fz.migrate(self.state, self.its.tx, self.its.own(self.tree))
        self.compare()

    @rule(
        how=st.sampled_from(["grow", "prune", "split", "reset rows", "reset"]),
        number=st.integers(0, 3),
        axis=st.integers(0, 1),
        seed=st.integers(0, 3),
    )
    def change_the_model(self, how, number, axis, seed):
        leaves = [path for path, x in sorted(self.params.items()) if is_float(x) and x.ndim and x.size > 1]
        if not leaves:
            reject()
        path, rng = leaves[number % len(leaves)], np.random.default_rng(seed)
        old = self.params[path]
        axis = 0 if how in ("prune", "split") else axis % old.ndim
        size = old.shape[axis]
        rows = {
            "grow": np.append(np.arange(size), [-1] * (seed + 1)),
            "prune": np.flatnonzero(np.arange(size) != seed % size),
            "split": np.append(np.arange(size), rng.integers(0, size, 2)),
            "reset rows": np.where(np.arange(size) == seed % size, -1, np.arange(size)),
            "reset": np.full(size, -1),
        }[how]
        held = {place.param for owner in self.owners.values() for place, _ in by_hand.places(owner)} - {None}
        if how == "reset" and held <= {path}:
            reject()  # then everything begins anew
        fill = rng.normal(size=np.shape(rows)) if how == "grow" else np.zeros(len(rows))
        fill = np.expand_dims(fill, tuple(i for i in range(old.ndim) if i != axis))
        if "reset" not in how:
            is_new = np.expand_dims(rows < 0, tuple(i for i in range(old.ndim) if i != axis))
            self.params[path] = jnp.where(is_new, fill.astype(old.dtype), jnp.take(old, np.maximum(rows, 0), axis))
        olds = {name: by_hand.moved(owner, path, axis, rows, old) for name, owner in self.owners.items()}
        is_plain, given = self.its.kind == "plain", {}
        self.arrange(self.arrangement)
        fresh = {
            name: self.by_hand(by_hand.init, self.inner, cuts, self.params) for name, cuts in self.its.cuts.items()
        }
        anew = {path} if how == "reset" else set()
        self.owners = by_hand.carry(self.inner, fresh, olds, self.params, is_plain=is_plain, anew=anew)
        if how in ("prune", "split"):
            given["rows"] = {path: rows}
        elif how == "reset rows":
            given["reset"] = fz.rules({path: fz.rows([seed % size], axis)})
        elif how == "reset":
            given["reset"] = path
        self.state = fz.migrate(self.state, self.its.tx, self.its.own(self.tree), **given)
        self.compare()

    @precondition(lambda self: self.its.turning)
    @rule(shift=st.integers(0, 3), jit=BOOLS)
    def replace(self, shift, jit):
        its, masks = self.its, {}
        cuts = {name: dict(each) for name, each in its.cuts.items()}
        for path, name in its.turning.items():
            old = cuts[name][path]
            rolled = np.roll(old.trains, shift, old.axis if old.kind == "rows" else None)
            cuts[name][path] = old._replace(trains=rolled)
            for other in cuts:
                if other != name and path in cuts[other]:
                    cuts[other][path] = cuts[other][path]._replace(trains=~rolled)
            rows = jnp.array(cuts[name][path].numbers(), jnp.int32)
            masks[path] = (~rolled if old.kind != "rows" else rows, old.kind, old.axis)

        def mask(array, kind, axis):
            rows = fz.rows(array, axis) if kind == "rows" else fz.elements(array, compact=kind == "compact")
            return ~rows if kind == "rows" and not its.conditions else rows

        def replaced(state, params, arrays):
            new = {path: mask(arrays[path], *masks[path][1:]) for path in masks}
            return fz.replace_masks(state, its.tx, params, new)

        before, arrays = self.signature(), {path: each[0] for path, each in masks.items()}
        jit = jit and all(kind != "compact" for _, kind, _ in masks.values())
        self.state = (jax.jit(replaced) if jit else replaced)(self.state, self.tree, arrays)
        assert self.signature() == before
        its.cuts = cuts
        fresh = {name: self.by_hand(by_hand.init, self.inner, each, self.params) for name, each in cuts.items()}
        self.owners = by_hand.carry(self.inner, fresh, self.owners, self.params, replaced=True)
        self.compare(exact=not jit)

    @precondition(lambda self: self.switches)
    @rule(number=st.integers(0, 3), frozen=BOOLS)
    def set_frozen(self, number, frozen):
        name = sorted(self.switches)[number % len(self.switches)]
        before = self.signature()
        self.state = fz.set_frozen(self.state, {name: frozen})
        assert self.signature() == before
        self.switches[name] = frozen
        self.compare()

    @rule(how=st.sampled_from(["copy", "pickle", "flax", "checkpoint"]))
    def save_and_restore(self, how):
        its, before = self.its, self.signature(is_weak=how in ("copy", "pickle"))  # others store arrays
        template = its.tx.init(its.own(self.tree))
        if how == "copy":
            self.state = copy.deepcopy(self.state)
        elif how == "pickle" and all(c != "updates" for c, *_ in map(np.atleast_1d, its.conditions.values())):
            self.state = pickle.loads(pickle.dumps(self.state))
        elif how == "flax" and all(x.dtype != self.key for x in jax.tree.leaves(self.state)):  # Flax stores no keys
            restored = flax.serialization.from_bytes(template, flax.serialization.to_bytes(self.state))
            self.state = jax.tree.map(jnp.asarray, restored)
        elif how == "checkpoint" and jax.tree.map(jax.typeof, template) == jax.tree.map(jax.typeof, self.state):
            frozen = False if its.conditions else its.spec if its.kind == "plain" else fz.spec_of(self.state)
            trains = {path: np.zeros(np.shape(p), bool) for path, p in self.params.items()}
            for cuts in its.cuts.values():
                trains |= {path: trains[path] | cut.trains for path, cut in cuts.items()}
            base = {p: jnp.where(trains[p], 7, x).astype(x.dtype) if is_float(x) else x for p, x in self.params.items()}
            with tempfile.TemporaryDirectory() as directory:
                checkpoint.save(directory, self.tree, frozen, step=1, opt_state=self.state)
                params, self.state = checkpoint.restore(directory, nested(base), opt_state=template, frozen=frozen)
            assert bits(flat(params)) == bits(self.params)
        self.compare()
        if how != "pickle":
            assert self.signature(is_weak=how in ("copy", "pickle")) == before


def attack(options):
    """Searches for one failure."""
    run_state_machine_as_test(Training, settings=settings(options, stateful_step_count=8))


ATTACK = Attack("sequences", attack, share=1, examples=12)


def test_random_sequences():
    attack(
        settings(
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=6,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
    )


def test_a_group_without_leaves_begins_anew():
    state = Training()
    state.init(name="noisy_sgd", leaves="a", arrangement=("plain", []), jit=False)
    state.step(compiled="eager", seed=0, way="update")
    state.migrate(arrangement=("when", [(0, False, False)]))


@pytest.mark.parametrize("name", ["lbfgs", "lbfgs without search"])
def test_a_history_begins_anew_where_leaves_come_or_go(name):
    plain, one = ("plain", []), ("when", [(0, False, False), ("n", False, False)])
    each = ("when", [("each", False, False)])
    for before, after in [(plain, each), (each, one), (one, each), (each, each), (one, plain), (each, plain)]:
        state = Training()
        state.init(name=name, leaves="abc", arrangement=before, jit=False)
        state.step(compiled="eager", seed=0, way="update")
        state.migrate(arrangement=after)


def test_rows_of_a_square_part_beside_a_projection_of_its_shape():
    """It is not known that the axes of the projection are not the rows."""
    state = Training()
    state.init(
        name="contrib.galore", leaves="b", arrangement=("when", [(0, ("rows", 0, 1, "dynamic"), False)]), jit=False
    )
    state.step(compiled="eager", seed=0, way="update")
    state.replace(jit=False, shift=1)


def test_moments_of_frozen_elements_begin_anew_though_their_mask_is_the_same():
    state = Training()
    state.init(name="adabelief", leaves="a", arrangement=("freeze", [("dense", 0)]), jit=False)
    state.step(compiled="eager", seed=0, way="update")
    state.replace(jit=False, shift=0)
    state.migrate(arrangement=("freeze", [("dense", 0)]))


def test_a_plain_state_without_moments_may_be_of_any_leaf():
    state = Training()
    state.init(name="noisy_sgd", leaves="ab", arrangement=("plain", []), jit=False)
    state.migrate(arrangement=("plain", [True]))
    state.step(compiled="eager", seed=0, way="update")
    state.migrate(arrangement=("when", [(0, False, False)]))


@pytest.mark.parametrize("compiled", ["eager", "jit"])
def test_a_group_of_rows_of_which_an_optimizer_has_several_arrays(compiled):
    arrangement = ("when", [(0, ("rows", 0, 1, "static"), False)])
    state = Training()
    state.init(name="sm3", leaves="ab", arrangement=arrangement, jit=False)
    state.step(compiled=compiled, seed=0, way="update")
    state.migrate(arrangement=arrangement)
    state.step(compiled=compiled, seed=1, way="train_step")


@pytest.mark.parametrize(
    ("name", "leaves", "new"),
    [
        ("sm3", "y", ("when", [(0, ("dense", 0), False)])),
        ("sm3", "a", ("freeze", [("compact", 0)])),
        ("adafactor", "a", ("when", [(0, ("compact", 0), False)])),
    ],
)
def test_a_mask_of_a_leaf_of_which_an_optimizer_has_other_arrays(name, leaves, new):
    state = Training()
    state.init(name=name, leaves=leaves, arrangement=("plain", []), jit=False)
    state.step(compiled="eager", seed=0, way="update")
    state.migrate(arrangement=new)


def test_rows_of_which_an_optimizer_has_arrays_of_other_shapes():
    """That they are rows of a leaf says its shape, though no array has it."""
    state = Training()
    rows, whole = ("plain", [("rows", 0, 1, "static")]), ("plain", [])
    state.init(name="contrib.galore", leaves="bc", arrangement=rows, jit=False)
    for arrangement in (whole, rows):
        state.step(compiled="eager", seed=0, way="update")
        state.migrate(arrangement=arrangement)


@pytest.mark.parametrize("leaves", ["x", "ax"])
def test_a_complex_leaf_whose_moments_are_two_arrays(leaves):
    """Both follow the rows of the leaf, also where it grows."""
    rows = ("rows", 0, 1, "static")
    state = Training()
    arrangements = [("plain", []), ("plain", [False, rows][-len(leaves) :])]
    state.init("contrib.split_real_and_imaginary", leaves, arrangements[1], jit=False)
    for arrangement in arrangements:
        state.step(compiled="eager", seed=0, way="update")
        state.migrate(arrangement=arrangement)
    for arrangement in [*arrangements, ("freeze", arrangements[1][1])]:
        state.change_the_model(how="grow", number=-1, axis=0, seed=0)
        state.migrate(arrangement=arrangement)


@pytest.mark.parametrize(("name", "leaves", "axis"), [("contrib.adopt", "ax", 0), ("contrib.mechanize", "x", 1)])
def test_an_optimizer_that_refuses_complex_numbers(name, leaves, axis):
    state = Training()
    state.init(name=name, leaves=leaves, arrangement=("plain", []), jit=False)
    state.migrate(arrangement=("plain", [("rows", axis, 1, "static")]))


@pytest.mark.parametrize("how", ["grow", "prune", "split", "reset rows", "reset"])
@pytest.mark.parametrize("kind", ["freeze", "plain", "union"])
def test_a_model_that_changes(kind, how):
    given = [("rows", 0, 5, "static"), ("rows", 1, 1, "static"), False] if kind != "union" else [("dense", 1), 1, 0]
    state = Training()
    state.init(name="schedule", leaves="abd", arrangement=(kind, given), jit=False)
    state.step(compiled="eager", seed=0, way="update")
    for number in range(3):
        state.change_the_model(how=how, number=number, axis=1, seed=1)
    state.step(compiled="eager", seed=0, way="update_params")
