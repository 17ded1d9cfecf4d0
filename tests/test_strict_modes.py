"""The main functions under the strict modes and checks of JAX."""

import contextlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.experimental import checkify

import optax_freeze as fz
import optax_freeze.linen as flinen
import optax_freeze.nnx as fnnx
from optax_freeze import checkpoint

MODES = {  # each has an error of its own
    "of traces": lambda: (
        *(jax.checking_leaks(), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")),
        *(jax.enable_checks(True), jax.debug_key_reuse(True)),
    ),
    "of values": lambda: (jax.debug_infs(True), jax.debug_nans(True)),
    "of transfers": lambda: (jax.transfer_guard("disallow"),),
}
EAGER = ["of traces", "of values"]  # JAX moves the constants of eager operations to the device


@contextlib.contextmanager
def strict(mode):
    with contextlib.ExitStack() as stack:
        for each in MODES[mode]():
            stack.enter_context(each)
        yield


MASK = np.arange(12).reshape(4, 3) % 2 == 0
SPECS = {
    "static rows": lambda: {"stack": ~fz.rows([0, 1, 3]), "table": ~fz.rows([1, 2]), "head": ~fz.rows([1])},
    "dynamic rows": lambda: {"stack": ~fz.rows(jnp.array([3, 1])), "table": ~fz.rows(jnp.array([3, 1])), "head": True},
    "masks": lambda: {
        "stack": True,
        "table": fz.elements(jnp.asarray(MASK)),
        "head": fz.elements(jnp.asarray(MASK.T), compact=True),
    },
}


def params():
    return {"stack": jnp.full((4, 3, 3), 0.25), "table": jnp.full((4, 3), 0.5), "head": jnp.full((3, 4), 0.125)}


def loss(params, tokens):
    x = params["table"][tokens]
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])
    logits = x @ params["head"] + x @ params["table"].T
    of_tokens = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)
    return jnp.sum(params["table"] ** 2) - of_tokens.mean()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_jitted_step(spec, mode):
    """With the spec in the state, and with that of the other functions of a gradient."""
    before, frozen, tokens = params(), SPECS[spec](), jnp.array([0, 3, 1])
    tx = fz.freeze(optax.sgd(0.1, momentum=0.9), frozen)
    state = tx.init(before)
    trainable, rest = fz.partition(before, frozen)

    @jax.jit
    def step(params, state, tokens):
        value, grads = fz.value_and_grad(loss, fz.spec_of(state))(params, tokens)
        updates, state = tx.update(grads, state, params)
        return fz.apply_updates(params, updates, fz.spec_of(state)), state, value

    restricted = jax.jit(lambda trainable, rest, x: jax.grad(fz.restrict(loss, rest), allow_int=True)(trainable, x))
    with strict(mode):
        after, _, _ = step(before, state, tokens)
        restricted(trainable, rest, tokens)
    fz.assert_frozen(before, after, frozen)


def groups():
    tx = fz.freeze_when(optax.sgd(0.1, momentum=0.9), {"stack": fz.unfreeze_at(1), "table": False})
    state = tx.init(params())
    step = jax.jit(fz.train_step(loss, tx))
    for _ in range(2):
        _, state, _ = step(params(), state, jnp.array([0, 3, 1]))
    fz.set_frozen(state, {"table": True})


def rows_that_change():
    frozen = SPECS["dynamic rows"]()
    tx = fz.freeze(optax.sgd(0.1, momentum=0.9), frozen)
    state = fz.replace_masks(tx.init(params()), tx, params(), {"stack": ~fz.rows(jnp.array([0, 1]))})
    fz.update_params(tx, jax.tree.map(jnp.ones_like, params()), state, params())


def features():
    frozen, tokens = {"stack": True, "table": True, "head": False}, jnp.array([0, 3, 1])
    of_lookup = lambda p, tokens: jnp.mean(p["table"][tokens] @ p["stack"][0] @ p["head"])  # noqa: E731
    once = fz.precompute(of_lookup, frozen)
    fz.grad(once.after, frozen)(params(), jax.jit(once.before)(params(), tokens), tokens)


def on_the_host():
    moved = fz.offload(params(), "stack", min_bytes=0)
    fz.grad(loss, "stack")(moved, jnp.array([0, 3, 1]))


def verified():
    for make in SPECS.values():
        fz.assert_frozen(params(), params(), make())
        fz.fingerprint(params(), make())
        str(fz.summary(params(), make()))


def audited():
    spec = SPECS["static rows"]()
    fz.audit(params(), spec, fz.freeze(optax.sgd(0.1, momentum=0.9), spec), steps=1)


def linen():
    model = nn.Sequential([flinen.Frozen(nn.Dense(2)), nn.Dense(1)])
    x = jnp.ones((1, 3))
    variables = model.init(jax.random.key(0), x)
    jax.grad(lambda variables: model.apply(variables, x).sum())(variables)
    flinen.frozen_mask(model, x)


def with_nnx():
    model = fnnx.freeze(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "kernel")
    nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)


def checkpoints():
    with tempfile.TemporaryDirectory() as directory:
        checkpoint.save(directory, params(), SPECS["static rows"](), step=1)
        checkpoint.restore(directory, params())


FUNCTIONS = [groups, rows_that_change, features, on_the_host, verified, audited, linen, with_nnx, checkpoints]


@pytest.mark.parametrize("mode", EAGER)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function, mode):
    with strict(mode):
        function()


def test_a_condition_that_starts_at_infinity():
    """JAX refuses infinity as a result of an operation: `init` only stores it."""
    before, tokens = params(), jnp.array([0, 3, 1])
    tx = fz.freeze_when(optax.sgd(0.1), {name: lambda step, stats: stats.norm < 1e-9 for name in before})
    with jax.debug_infs(True):
        new, state, _ = jax.jit(fz.train_step(loss, tx))(before, tx.init(before), tokens)
    assert np.isfinite(state.groups["head"].condition_state.norm)
    assert not np.array_equal(new["head"], before["head"])


def read(numbers, params):
    start = jnp.sum(numbers)
    of_table = jnp.sin(jax.lax.dynamic_update_slice(params["table"], params["table"][:2] ** 2, (start, 0)))
    return jnp.sum(of_table) + jnp.sum(params["stack"] ** 2)


CHECKED = {
    "partition": lambda n, p: fz.combine(*fz.partition(p, {"stack": fz.rows(n), "table": ~fz.rows(n), "head": False})),
    "grad": lambda n, p: fz.grad(read, {"stack": fz.rows(n), "table": ~fz.rows(n), "head": True}, argnums=1)(n, p),
    "rows that change": lambda n, p: fz.replace_masks(
        fz.freeze(optax.adam(0.1), {"stack": ~fz.rows(jnp.array([0, 3])), "table": True, "head": False}).init(p),
        fz.freeze(optax.adam(0.1), {"stack": ~fz.rows(jnp.array([0, 3])), "table": True, "head": False}),
        p,
        {"stack": ~fz.rows(n)},
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_checkify_finds_no_index_out_of_range(name):
    """Without rows of a lookup or of a batch, of which ``docs/errors.md`` tells."""
    checked = checkify.checkify(CHECKED[name], errors=checkify.index_checks)
    jax.jit(checked)(jnp.array([0, 1]), params())[0].throw()
