"""The minimum cut of random programs is that of all choices of values, tried one by one."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from conftest import bits
from jax import lax

import optax_freeze as fz
from optax_freeze._precompute.cut import is_cheap, minimum_cut
from optax_freeze._precompute.graph import graph
from optax_freeze._precompute.inputs import Input
from optax_freeze._program.trace import flatten

SIZES = st.integers(1, 5)


@st.composite
def programs(draw):
    """A program of cheap and dear operations on vectors; values that are read with the last input are wanted."""
    operations = draw(
        st.lists(st.tuples(st.sampled_from("cdj"), st.integers(0, 9), st.integers(0, 9), SIZES), min_size=1, max_size=6)
    )
    wanted = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))

    def function(x, trained):
        values = [x]
        for kind, i, j, size in operations:
            a, b = values[i % len(values)], values[j % len(values)]
            if kind == "c":
                values.append(jnp.resize(a, (size,)) * 2)
            elif kind == "d":
                values.append(jnp.resize(lax.cumsum(a), (size,)))
            else:
                values.append(jnp.concatenate([a, b])[:size])
        return sum(jnp.sum(values[i % len(values)]) * trained for i in wanted)

    inputs = [Input(jnp.ones(4), "x"), Input(1.0, "trained", "it trains")]
    return graph(flatten(jax.make_jaxpr(function)(*(given.value for given in inputs))), inputs)


@hypothesis.given(programs())
@hypothesis.settings(max_examples=150, deadline=None)
def test_it_is_the_least_of_all(program):
    dear = [not is_cheap(node.eqn) for node in program.nodes]
    cost = {key: 4 * int(np.prod(program.struct(key).shape)) for key in program.known}
    cut = minimum_cut(program, dear, cost)
    made_by = {value: i for i, node in enumerate(program.nodes) if node.is_known for value in node.writes}
    wanted = {value for node in program.nodes if not node.is_known for value in node.reads if value in made_by}

    def suffices(stored):
        def available(value):
            if value in stored or value not in made_by:
                return True
            i = made_by[value]
            return not dear[i] and all(map(available, program.nodes[i].reads))

        return all(map(available, wanted))

    assert suffices(set(cut.stored))
    values = list(made_by)
    if len(values) <= 12:
        subsets = itertools.chain.from_iterable(itertools.combinations(values, n) for n in range(len(values) + 1))
        least = min(sum(cost[value] for value in subset) for subset in subsets if suffices(set(subset)))
        assert sum(cost[value] for value in cut.stored) == least


# Values are small whole numbers, so that every sum and product is exact, and does not depend on the order.
WIDTH = 4
WEIGHTS = {f"w{i}": np.random.RandomState(i).randint(-1, 2, (WIDTH, WIDTH)).astype(np.float32) for i in range(4)}


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def scanned(h, w):
    return lax.scan(lambda h, row: (jnp.clip(h + row, -8, 8), h.sum(0)), h, w)[0]


OPERATIONS = {
    "matmul": lambda h, w, b: jnp.clip(h @ w, -8, 8),
    "relu": lambda h, w, b: jax.nn.relu(h),
    "add": lambda h, w, b: jnp.clip(h + w[0], -8, 8),
    "batch": lambda h, w, b: jnp.clip(h + b, -8, 8),
    "where": lambda h, w, b: jnp.where(b > 0, h, -h),
    "norm": lambda h, w, b: h - h.max(-1, keepdims=True),
    "sort": lambda h, w, b: jnp.sort(h, -1),
    "lookup": lambda h, w, b: w[jnp.abs(b).astype(jnp.int32).sum(-1) % WIDTH] + h,
    "jit": lambda h, w, b: jax.jit(lambda h, w: jnp.clip(h @ w, -8, 8) + 1)(h, w),
    "remat": lambda h, w, b: jax.checkpoint(lambda h, w: jnp.clip(h @ w, -8, 8))(h, w),
    "custom_vjp": lambda h, w, b: jnp.clip(product(h, w), -8, 8),
    "scan": lambda h, w, b: scanned(h, w),
    "cond": lambda h, w, b: lax.cond(b.sum() > 0, lambda h: h @ w, lambda h: h + 1, jnp.clip(h, -2, 2)),
    "cumsum": lambda h, w, b: jnp.clip(jnp.cumsum(h, 0), -8, 8),
}

STEPS = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.sampled_from(sorted(WEIGHTS)), st.sampled_from(["x", "y"]))


def a_loss(steps, skip):
    def loss(params, x, y):
        h, batch = x, {"x": x, "y": y}
        for i, (name, weight, which) in enumerate(steps):
            new = OPERATIONS[name](h, params[weight], batch[which])
            h = jnp.clip(h + new, -8, 8) if i == skip else new
        return jnp.sum(jnp.clip(h, -8, 8) @ params["head"])

    return loss


@hypothesis.given(
    steps=st.lists(STEPS, min_size=1, max_size=6),
    skip=st.integers(0, 6),
    frozen=st.sets(st.sampled_from(sorted(WEIGHTS)), min_size=1),
    rows=st.booleans(),
    recurring=st.sampled_from([1, 2, (1, 2), ("x", "y")]),
)
@hypothesis.settings(max_examples=25, deadline=None)
def test_any_program_any_frozen_leaves_any_recurring_arguments(steps, skip, frozen, rows, recurring):
    params = {name: jnp.asarray(w) for name, w in WEIGHTS.items()} | {"head": jnp.ones((WIDTH, 1))}
    spec = {name: name in frozen for name in params}
    if rows:
        spec[min(frozen)] = fz.rows(slice(0, 2))
    x, y = (jnp.asarray(np.random.RandomState(i).randint(-2, 3, (3, WIDTH)).astype(np.float32)) for i in (8, 9))
    loss, other = a_loss(steps, skip), x * 0 + 1
    once = fz.precompute(loss, spec, recurring)
    varies = {1: (x, other), 2: (other, y)}.get(recurring, (x, y)) if isinstance(recurring, int) else (x, y)
    trainable, rest = fz.partition(params, spec)
    poisoned = fz.combine(jax.tree.map(lambda x: x * np.nan, trainable), rest)
    try:
        needed = once.needed(params, x, y)
    except ValueError as error:
        hypothesis.assume("nothing to compute once" not in str(error))
        raise
    features = jax.jit(once.before)(poisoned, *varies)  # neither trainable parameters nor varying arguments are read
    got = jax.jit(fz.value_and_grad(once.after, spec))(needed, features, x, y)
    assert bits(got) == bits(jax.jit(fz.value_and_grad(loss, spec))(params, x, y))
