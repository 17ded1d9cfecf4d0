"""Programs that failed once, as `make fuzz` wrote them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from oracle import Case
from programs import curved, mesh, total

import optax_freeze as fz

SMALL = {"a": ((6, 4), "float32")}


def float_counter(p, x):
    step = lambda c, _: ((c[0] + p["a"].sum() * jnp.sin(c[1]), c[1] + 1.0), None)  # noqa: E731
    return total(*lax.scan(step, (0.0, 16777216.0), None, length=8)[0])


def keys_of_rbg(p, x):
    noise = jax.vmap(lambda r, k: jnp.sin(r * jax.random.uniform(k, (4,))))
    return total(jax.checkpoint(noise)(p["a"], jax.random.split(jax.random.key(0, impl="rbg"), 6)))


def maximum(p, x):
    return total(jnp.max(p["a"] * p["a"] + 0.3 * p["a"], axis=1))


def sizes_of_numpy(p, x):
    return total(lax.ragged_dot(p["a"], p["b"], np.array([0, 0, 6], "int32")))


def sizes_of_bytes(p, x):
    return total(lax.ragged_dot(p["a"], p["b"], np.array([2, 0, 4], "uint8")))


def no_rows(p, x):
    return total(p["a"][0:0])


def loop_over_no_rows(p, x):
    return total(lax.scan(lambda c, r: (c * jnp.sum(r), None), p["a"], p["a"][0:0])[0])


def no_rows_beside_rows(p, x):
    part = jnp.concatenate([p["a"], p["a"] * 2])
    return total(jnp.sum(part[0:0]) + part)


def carry_read_in_a_branch(p, x):
    def step(carry, row):
        out = lax.cond(row.sum() < 9, lambda: row, lambda: row * carry.max())
        return jnp.full(carry.shape, out.mean()), out

    return lax.scan(step, p["a"], p["a"])[1].sum()


def loop_without_results(p, x):
    lax.scan(lambda c, r: (None, None), None, p["a"])
    return total(p["b"] @ p["b"] * jnp.sum(p["a"]))


def constraint_of_each_row(p, x):
    whole = jax.NamedSharding(mesh(), jax.P())
    return total(jax.vmap(lambda r: lax.with_sharding_constraint(r, whole))(p["a"]))


def indices_beyond_int32(p, x):
    numbers = jnp.asarray([0, 2, 2**32 - 1, 4], jnp.uint32)
    return total(p["a"] * p["a"], jax.vmap(lambda r, i: r[i])(p["a"].T, numbers))


def custom_derivative_of_each_row(p, x):
    def of_row(row):
        @jax.custom_jvp
        def scaled(y):
            return y * jnp.sum(row)

        scaled.defjvp(lambda y, t: (scaled(*y), 2 * jnp.sum(row) * t[0]))
        return scaled(p["a"])

    return total(jax.vmap(of_row)(lax.stop_gradient(p["b"])))


def stack_inside_of_automatic_axes(p, x):
    """A loop reads the rows of a stack, one after the other, of which each is computed inside of automatic axes."""

    def of_row(row):
        step = lambda i, c: 0.6 * c + 0.1 * lax.erf(c) * jnp.mean(row[i % 57])  # noqa: E731
        looped = lax.fori_loop(0, 5, step, row)
        return jax.sharding.auto_axes(jnp.sqrt, axes=("d", "m"), out_sharding=P(None))(0.5 + jnp.abs(looped))

    return total(lax.map(of_row, lax.dynamic_slice_in_dim(p["c"], jnp.array([0], jnp.uint32)[0], 57, 1)))


def groups_inside_of_automatic_axes(p, x):
    inside = jax.sharding.auto_axes(lambda a, b: jnp.sin(a) * b, axes=("d",), out_sharding=P())
    return total(inside(p["a"], p["b"]))


def loop_of_groups_inside_of_automatic_axes(p, x):
    def inside(a, b):
        rows = jnp.sin(a) * b
        return lax.fori_loop(0, 3, lambda i, c: 0.6 * c + 0.1 * jnp.tanh(rows[i % 4] * c), jnp.ones(4))

    return total(jax.sharding.auto_axes(inside, axes=("d",), out_sharding=P())(p["a"], p["b"]))


def loops_inside_of_automatic_axes(p, x):
    def inside(a):
        step = lambda c, r: (jnp.tanh(c + jnp.sin(r)), jnp.sin(r) * c)  # noqa: E731
        carry, rows = lax.scan(step, jnp.ones(4), a)
        return lax.scan(step, carry, rows * rows)[1]

    return total(jax.sharding.auto_axes(inside, axes=("d",), out_sharding=P())(p["a"]))


def steps_inside_of_automatic_axes(p, x):
    def inside(function):
        of_row = lambda c, r, b: jnp.tanh(function(c, r @ b))  # noqa: E731
        automatic = jax.sharding.auto_axes(of_row, axes=("d", "m"), out_sharding=P())
        return lambda c, r: (automatic(c, r, p["b"]), automatic(r, r, p["b"]))

    return total(*(lax.scan(inside(f), jnp.ones(4), p["a"])[n] for n, f in enumerate((jnp.multiply, jnp.add))))


def largest_of_some_rows(p, x):
    return total(lax.top_k(p["a"] * p["a"] + 0.3 * p["a"], 1)[0])


def largest_of_sharded_rows(p, x):
    rows = lax.with_sharding_constraint(p["a"], jax.NamedSharding(mesh(), jax.P(None, "d")))
    return total(jnp.sort(lax.top_k(rows, 2)[0], axis=0))


def empty_piece(p, x):
    return total(*jnp.split(jnp.concatenate([p["a"], p["a"]]), [0]))


def vectors(p, x):
    return total(*[p["a"] + p["a"]] * 3)


def pieces_of_fewer_rows(p, x):
    pieces = [p["a"][i : i + 2] for i in range(0, 8, 2)]
    return total(*(jnp.tanh(jnp.tanh(piece @ p["b"]) @ p["b"]) for piece in pieces))


def two_maxima(p, x):
    """Rows of what is compared with its maximum are computed again beside those of the other one, rounded otherwise."""
    return total(jnp.max(p["a"] * p["a"] - 0.3 * p["a"], axis=0), jnp.max(p["a"] * p["a"] + 0.3 * p["a"], axis=0))


def most_rows_of_maxima(p, x):
    """Numbers of dynamic rows cost more than the few rows save that are left out."""
    v1 = p["a"] * p["a"] + 0.3 * p["a"]
    v2 = p["a"] * 1.3 + jnp.max(v1 * v1 + 0.3 * v1, axis=1) * 0.7
    v3 = jnp.max(p["a"] * p["a"] - 0.3 * p["a"], axis=0)
    return curved(jnp.max(v2 * v2 - 0.3 * v2, axis=0), lax.sort((v3, v3), dimension=0, num_keys=1)[1])


def rows_of_a_stack(p, x):
    return total(*(jnp.tanh(p["a"][i]) for i in range(3)))


def a_lookup_in_each_step(p, x):
    step = lambda c, r: (jnp.tanh(c + total(r.at[x["i"][:4]].get(out_sharding=P(None, "d")))), None)  # noqa: E731
    return total(lax.scan(step, jnp.float32(0), p["a"])[0])


def automatic_axes(p, x):
    inside = jax.sharding.auto_axes(lambda r: jnp.sin(r[::2]), axes=("d", "m"), out_sharding=P())
    return total(lax.scan(lambda c, r: (jnp.tanh(c + total(inside(r))), None), jnp.float32(0), p["a"])[0])


def branch_after_one_step(p, x):
    """What the backward pass computes again from the rows of the leaf is an operand of a branch."""
    step = lambda n, r: (n + 1, jnp.sin(n.astype(jnp.float32)) * r)  # noqa: E731
    rows = lax.scan(step, jnp.int32(0), p["a"])[1]
    return curved(lax.cond(jnp.sum(rows) > 0, jnp.tanh, lambda _: jnp.tanh(p["a"]), rows))


def number_behind_a_barrier(p, x):
    def step(carry, row):
        again = jax.checkpoint(lambda c, n: (n, jnp.sin(row) * n))(carry[0], carry[1])
        return (0.5 * carry[0] + again[1] * again[0], carry[1] + 1.0), None

    return curved(*lax.scan(jax.checkpoint(step), (p["a"], jnp.float32(0)), p["a"])[0])


def lookup_of_a_chain(p, x):
    """The lookup is inside of automatic axes, and what it reads of the host is outside."""
    return curved(jnp.tanh(p["a"]).at[x["i"][:4]].get(out_sharding=P(None, None, None)))


ON_MESH = {"x": P(), "i": P(), "k": P()}

CASES = {
    "a float counter": Case(float_counter, SMALL, lambda: {"a": ~fz.rows([1, 3])}),
    "keys of rbg": Case(keys_of_rbg, SMALL, lambda: {"a": ~fz.rows([1, 3])}),
    "a maximum": Case(maximum, {"a": ((64, 64), "float32")}, lambda n: {"a": ~fz.rows(n)}, ((1, 3),)),
    "two maxima": Case(two_maxima, {"a": ((2, 3, 4), "float32")}, lambda: {"a": ~fz.rows([0], 1)}),
    "most rows of maxima": Case(
        most_rows_of_maxima,
        {"a": ((64, 64), "float32"), "b": ((64, 64), "complex64")},
        lambda n: {"a": fz.rows(n, 1), "b": fz.rows(slice(20, None))},
        ((46, 28, 19),),
    ),
    "sizes of NumPy": Case(
        sizes_of_numpy,
        {**SMALL, "b": ((3, 4, 4), "float32")},
        lambda: {"a": ~fz.rows([0]), "b": ~fz.rows([0])},
        way="restrict",
    ),
    "sizes of one byte": Case(
        sizes_of_bytes,
        {**SMALL, "b": ((3, 4, 4), "float32")},
        lambda n: {"a": False, "b": ~fz.rows(n)},
        ((2, 0),),
        way="restrict",
    ),
    "no rows": Case(no_rows, SMALL, lambda: {"a": ~fz.rows([0])}, way="restrict"),
    "a loop over no rows": Case(
        loop_over_no_rows, {"a": ((3, 4, 4), "float32")}, lambda: {"a": ~fz.rows([0])}, way="from the host"
    ),
    "no rows beside rows": Case(no_rows_beside_rows, SMALL, lambda: {"a": fz.rows(slice(4, None))}, way="precompute"),
    "a carry that a branch reads": Case(
        carry_read_in_a_branch, {"a": ((5, 3, 3), "float32")}, lambda n: {"a": ~fz.rows(n)}, ((0, 4),), way="restrict"
    ),
    "a loop without results": Case(
        loop_without_results,
        {**SMALL, "b": ((6, 6), "float32")},
        lambda: {"a": fz.rows([0]), "b": True},
        way="precompute",
    ),
    "a constraint of each row": Case(
        constraint_of_each_row, SMALL, lambda n: {"a": ~fz.rows(n)}, ((1, 3),), way="restrict"
    ),
    "indices beyond int32": Case(indices_beyond_int32, SMALL, lambda: {"a": ~fz.rows([0])}),
    "a custom derivative of each row": Case(
        custom_derivative_of_each_row,
        {**SMALL, "b": ((3, 4), "float32")},
        lambda: {"a": ~fz.rows([0]), "b": True},
        way="restrict",
    ),
    "the largest of some rows": Case(
        largest_of_some_rows, {"a": ((64, 96), "float32")}, lambda: {"a": fz.rows(slice(28))}
    ),
    "dynamic rows of a vector": Case(
        vectors,
        dict.fromkeys("abc", ((64,), "float32")),
        lambda n: {"a": False, "b": fz.rows(n), "c": False},
        ((0,),),
    ),
    "pieces of fewer rows": Case(
        pieces_of_fewer_rows,
        {"a": ((8, 64), "float32"), "b": ((64, 64), "float32")},
        lambda n: {"a": ~fz.rows(n), "b": True},
        ((0, 1, 2, 4, 5, 7),),
    ),
    "the largest of sharded rows": Case(
        largest_of_sharded_rows, {"a": ((64, 64), "float32")}, lambda n: {"a": ~fz.rows(n)}, ((31, 59),), how="quick"
    ),
    "rows of a stack inside of automatic axes": Case(
        stack_inside_of_automatic_axes,
        {"c": ((64, 64), "float32")},
        lambda n: {"c": ~fz.rows(n, 0)},
        ((4, 10, 53),),
        way="train_step",
        how="quick",
        mesh="explicit",
        places={**ON_MESH, "c": P(None, None)},
    ),
    "the largest of rows that an explicit axis divides": Case(
        largest_of_some_rows,
        {"a": ((64, 64), "float32")},
        lambda n: {"a": ~fz.rows(n, 1)},
        ((36,),),
        way="restrict",
        how="quick",
        mesh="explicit",
        places={**ON_MESH, "a": P("m", None)},
    ),
    "a branch after one step": Case(
        branch_after_one_step, {"a": ((1, 4), "float32")}, lambda n: {"a": ~fz.rows(n)}, ((0,),), way="restrict"
    ),
    "a number behind a barrier": Case(
        number_behind_a_barrier, {"a": ((1, 4), "float32")}, lambda n: {"a": ~fz.rows(n)}, ((0,),), way="restrict"
    ),
    "a lookup of what is computed of the host's rows": Case(
        lookup_of_a_chain,
        {"a": ((3, 4, 4), "float32")},
        lambda: {"a": ~fz.rows([1])},
        way="from the host",
        mesh="explicit",
        places={**ON_MESH, "a": P()},
    ),
    "an empty piece": Case(empty_piece, SMALL, lambda: {"a": ~fz.rows([0])}, how="quick"),
    "rows of a stack on a mesh": Case(
        rows_of_a_stack,
        {"a": ((3, 4, 4), "float32")},
        lambda: {"a": ~fz.rows([1])},
        mesh="explicit",
        places={**ON_MESH, "a": P(None, None, ("d", "m"))},
    ),
    "a lookup in each step on a mesh": Case(
        a_lookup_in_each_step,
        {"a": ((3, 4, 4), "float32")},
        lambda n: {"a": ~fz.rows(n, 2)},
        ((1, 3),),
        way="restrict",
        mesh="mixed",
        places={**ON_MESH, "a": P(None, "m", "d")},
    ),
    "groups inside of automatic axes": Case(
        groups_inside_of_automatic_axes,
        dict.fromkeys("ab", ((4, 4), "float32")),
        lambda: {"a": 0, "b": 3},
        way="groups",
        how="quick",
        mesh="mixed",
        places={**ON_MESH, "a": P(None, "d"), "b": P()},
    ),
    "a loop of groups inside of automatic axes": Case(
        loop_of_groups_inside_of_automatic_axes,
        dict.fromkeys("ab", ((4, 4), "float32")),
        lambda: {"a": 2, "b": 3},
        way="groups",
        how="quick",
        mesh="explicit",
        places={**ON_MESH, "a": P(), "b": P(None, "d")},
    ),
    "features inside of automatic axes": Case(
        loops_inside_of_automatic_axes,
        {"a": ((4, 4), "float32")},
        lambda: {"a": fz.rows([0])},
        way="precompute",
        how="quick",
        mesh="mixed",
        places={**ON_MESH, "a": P(None, "d")},
    ),
    "features inside of automatic axes, without jit": Case(
        loops_inside_of_automatic_axes,
        {"a": ((4, 4), "float32")},
        lambda: {"a": fz.rows([0])},
        way="precompute",
        how="eager",
        mesh="explicit",
        places={**ON_MESH, "a": P()},
    ),
    "steps inside of automatic axes": Case(
        steps_inside_of_automatic_axes,
        dict.fromkeys("ab", ((4, 4), "float32")),
        lambda: {"a": ~fz.rows([1]), "b": True},
        way="train_step",
        how="quick",
        mesh="explicit",
        places={**ON_MESH, "a": P(), "b": P()},
    ),
    "automatic axes of a mesh": Case(
        automatic_axes,
        {"a": ((3, 4, 4), "float32")},
        lambda n: {"a": fz.rows(n, 2)},
        ((0, 2),),
        way="train_step",
        mesh="explicit",
        places={**ON_MESH, "a": P(None, "d", "m")},
    ),
}
