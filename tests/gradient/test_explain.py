"""What restrict makes of each leaf frozen by rows."""

import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import optax_freeze as fz

PARAMS = {"embed": jnp.ones((6, 4)), "out": jnp.ones((4, 4)), "bias": jnp.ones(4)}
FROZEN = {"embed": fz.rows(slice(0, 5)), "out": fz.rows([0, 1], axis=1), "bias": False}
TOKENS = jnp.array([0, 5])


def loss(params, tokens, *, power=2):
    x = params["embed"][tokens]
    y = jnp.tanh(x @ params["out"] + params["bias"])
    return jnp.sum(params["out"].reshape(2, 8) @ y.reshape(8, 1)) ** power


def line_of(text):
    lines, start = inspect.getsourcelines(loss)
    return start + next(i for i, line in enumerate(lines) if text in line)


def test_operations_and_source_lines():
    embed, out = fz.explain(loss, PARAMS, FROZEN, TOKENS).rows
    assert (embed.path, embed.rows, embed.trainable_rows) == ("embed", 6, 1)
    assert [operation.name for operation in embed.by_rows][-1] == "scatter-add"
    assert f"test_explain.py:{line_of('tokens]')}" in embed.by_rows[-1].source
    assert embed.merged is None
    assert (out.path, out.rows, out.trainable_rows) == ("out", 4, 2)
    assert "dot_general" in [operation.name for operation in out.by_rows]
    assert out.everything == (out.merged,)
    assert out.merged.name == "reshape"
    assert f"test_explain.py:{line_of('reshape')}" in out.merged.source
    assert "(loss)" in out.merged.source
    text = str(fz.explain(loss, PARAMS, FROZEN, TOKENS)).splitlines()
    assert text[0] == "embed: 1 of 6 rows train; only their gradient is computed"
    assert text[1].startswith("  rows: scatter-add at ")
    assert text[2].startswith("out: 2 of 4 rows train; everything is computed by reshape at ")


def test_equal_layers_are_one_line_with_the_line_that_calls_flax():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = nn.Dense(8)(x)  # the line of the user
            return x

    x = jnp.ones((2, 8))
    params = jax.eval_shape(Stack().init, jax.random.key(0), x)["params"]
    frozen = {name: {"kernel": fz.rows(slice(0, 2), axis=1), "bias": True} for name in params}
    loss = lambda params, x: Stack().apply({"params": params}, x).sum()  # noqa: E731
    _, start = inspect.getsourcelines(Stack)
    lines = str(fz.explain(loss, params, frozen, x)).splitlines()
    assert [re.sub(r"/.*/| \(.*", "", line) for line in lines] == [
        "Dense_0 … Dense_2/kernel: 6 of 8 rows train; only their gradient is computed",
        f"  rows: dot_general at test_explain.py:{start + 4}:20",
    ]


def test_an_operation_of_jax_numpy_has_the_line_that_calls_it():
    def twice(params):
        first = jnp.take(params["embed"], TOKENS, axis=0)
        return first + jnp.take(params["embed"], TOKENS, axis=0)

    params, frozen = {"embed": PARAMS["embed"]}, {"embed": FROZEN["embed"]}
    [row] = fz.explain(twice, params, frozen).rows
    _, start = inspect.getsourcelines(twice)
    lines = {operation.source.split(":")[1] for operation in row.by_rows if operation.name == "scatter-add"}
    assert lines == {str(start + 1), str(start + 2)}


def test_dynamic_rows_that_are_read_one_by_one():
    def one_by_one(params):
        rows = [params["out"][i] for i in range(4)]
        return sum(jnp.sum(jnp.tanh(row @ jnp.ones((4, 4)))) for row in rows)

    params, rows = {"out": PARAMS["out"]}, jnp.array([0, 3])
    [dynamic] = fz.explain(one_by_one, params, {"out": ~fz.rows(rows)}).rows
    [static] = fz.explain(one_by_one, params, {"out": ~fz.rows([0, 3])}).rows
    assert dynamic.merged is not None
    assert static.merged is None


def test_of_shapes():
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    of_shapes = fz.explain(loss, params, FROZEN, jax.ShapeDtypeStruct((2,), jnp.int32), power=3)
    assert of_shapes == fz.explain(loss, PARAMS, FROZEN, TOKENS)
    for frozen in (True, {"embed": np.eye(6, 4, dtype=bool), "out": False, "bias": True}):
        explained = fz.explain(loss, params, frozen, TOKENS)
        assert (explained.rows, str(explained)) == ((), "no leaf is frozen by rows")


def test_executes_nothing():
    """Not even what depends on constants alone."""
    ran = []

    def called(x):
        ran.append(x)
        return np.float32(x)

    def noisy(params):
        number = jax.ShapeDtypeStruct((), jnp.float32)
        for x in (jax.lax.stop_gradient(params["embed"][0, 0]), jnp.float32(1), jnp.ones(3).sum()):
            for ordered in (False, True):
                jax.debug.callback(called, x, ordered=ordered)
                io_callback(called, number, x, ordered=ordered)
            x += jax.pure_callback(called, number, x)
        x = jax.lax.cond(jnp.ones(()) > 0, lambda x: jax.pure_callback(called, number, x), lambda x: x, x)
        return x * jnp.sum(params["embed"][TOKENS])

    def branching(params):
        return noisy(params) if noisy(params) > 0 else 0.0

    for fun in (noisy, jax.jit(noisy), branching):
        [row] = fz.explain(fun, {"embed": PARAMS["embed"]}, {"embed": FROZEN["embed"]}).rows
        jax.effects_barrier()
        assert not ran
        assert (row.merged is None) == (fun is not branching)


def test_auxiliary_outputs_are_not_differentiated():
    def with_aux(params, tokens):
        steps = jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x * 2, params["embed"])
        return loss(params, tokens), {"steps": steps}

    assert (
        fz.explain(with_aux, PARAMS, FROZEN, TOKENS, has_aux=True).lines
        == fz.explain(loss, PARAMS, FROZEN, TOKENS).lines
    )


def test_rows_that_keep_their_state_and_are_read_by_more_than_a_lookup():
    def tied(params, ids):
        x = params["table"].astype(jnp.bfloat16)[ids]
        logits = x @ params["table"].T.astype(jnp.bfloat16)
        return jax.nn.logsumexp(logits).sum() + jnp.square(params["table"]).mean() + params["table"][:3].sum()

    frozen, ids = {"table": ~fz.rows(jnp.arange(2), keep_state=True)}, jnp.array([3, 5])
    params = {"table": jnp.ones((60, 4))}
    [row] = fz.explain(tied, params, frozen, ids).rows
    assert [operation.name for operation in row.whole] == ["dot_general", "reduce_sum"]
    text = str(fz.explain(tied, params, frozen, ids))
    assert "  whole: dot_general at " in text
    assert "; other rows that it reads get no gradient" in text
    [row] = fz.explain(lambda params, ids: jnp.tanh(params["table"][ids]).sum(), params, frozen, ids).rows
    assert row.whole == ()
    [row] = fz.explain(tied, params, {"table": ~fz.rows(jnp.arange(2))}, ids).rows  # these other rows are meant
    assert row.whole == ()
