"""The recipes, with every form of spec, on several devices: bits, shared buffers, and the packages that log."""

import doctest
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import bits
from flax import jax_utils
from flax.training.dynamic_scale import DynamicScale

import optax_freeze as fz

MASK = np.array([[True, False], [False, True]])
FROZEN = {
    "leaf": "encoder",
    "rows": fz.rules({"embed": fz.rows(slice(0, 4)), "encoder": True}),
    "elements": fz.rules({"encoder": fz.elements(MASK)}),
    "compact": fz.rules({"encoder": fz.elements(MASK, compact=True)}),
}


@pytest.fixture
def params():
    shapes = {"embed": (6, 2), "encoder": (2, 2), "head": (2, 1)}
    return {name: jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(shapes.items())}


def loss(params, tokens):
    return jnp.mean((jnp.tanh(params["embed"][tokens] @ params["encoder"]) @ params["head"] - 1.0) ** 2)


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
class TestDynamicScale:
    def test_a_skip_keeps_every_bit(self, params, frozen):
        tx = fz.freeze(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), frozen)

        def half(params, x):
            params, x = jax.tree.map(lambda a: a.astype(jnp.float16), (params, x))
            return jnp.mean(((x @ params["encoder"]) @ params["head"]).astype(jnp.float32) ** 2)

        @jax.jit
        def step(params, state, scale, x):
            trainable, rest = fz.partition(params, fz.spec_of(state))
            scale, finite, _, grads = scale.value_and_grad(fz.restrict(half, rest))(trainable, x)
            updates, new_state = tx.update(grads, state, params)
            new = optax.apply_updates(params, updates), new_state
            return *jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, state)), scale, finite

        scale = DynamicScale(scale=jnp.float32(64), fin_steps=jnp.int32(0))
        new, state, scale, finite = step(params, tx.init(params), scale, jnp.ones((3, 2)))
        assert finite
        fz.assert_frozen(params, new, frozen)
        assert bits(new["head"]) != bits(params["head"])
        after, after_state, scale, finite = step(new, state, scale, 6e4 * jnp.ones((3, 2)))
        assert not finite
        assert scale.scale == 32
        assert bits(after) == bits(new)
        assert bits(after_state) == bits(state)
        assert step._cache_size() == 1


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
class TestPmap:
    def test_equals_one_device_on_the_whole_batch(self, params, frozen):
        devices = jax.local_device_count()
        assert devices > 1
        tx = fz.freeze(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), frozen, full_updates=False)

        def step(params, state, tokens, mean=lambda grads: grads):
            grads = mean(fz.grad(loss, fz.spec_of(state))(params, tokens))
            updates, state = tx.update(grads, state, params)
            return fz.apply_updates(params, updates, fz.spec_of(state)), state

        mean = lambda grads: jax.lax.pmean(grads, "batch")  # noqa: E731
        parallel = jax.pmap(lambda *args: step(*args, mean), axis_name="batch")
        tokens = jnp.arange(devices * 6).reshape(devices, 6) % 6
        copies, states = jax_utils.replicate((params, tx.init(params)))
        expected, state = params, tx.init(params)
        for _ in range(3):
            copies, states = parallel(copies, states, tokens)
            expected, state = jax.jit(step)(expected, state, tokens.reshape(-1))
        first = jax_utils.unreplicate((copies, states))
        assert bits((copies, states)) == bits(jax_utils.replicate(first))
        new, _ = first
        fz.assert_frozen(params, new, frozen)
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
class TestSharedCopies:
    def test_a_reference_reads_the_frozen_leaves_of_a_donated_policy(self, params, frozen):
        tx, tokens = fz.freeze(optax.adamw(0.1), frozen), jnp.arange(6)

        def compare(policy, reference, tokens):
            return loss(policy, tokens) + (loss(policy, tokens) - loss(reference, tokens)) ** 2

        def shared(policy, start, tokens):
            return compare(policy, fz.combine(start, fz.partition(policy, frozen)[1]), tokens)

        start = jax.tree.map(jnp.copy, fz.partition(params, frozen)[0])
        step = jax.jit(fz.train_step(shared, tx), donate_argnums=(0, 1))
        apart = jax.jit(fz.train_step(compare, tx))
        policy, state = jax.tree.map(jnp.copy, (params, tx.init(params)))
        expected, expected_state = params, tx.init(params)
        for _ in range(3):
            donated = policy
            policy, state, _ = step(policy, state, start, tokens)
            expected, expected_state, _ = apart(expected, expected_state, params, tokens)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
        fz.assert_frozen(params, policy, frozen)
        assert bits(policy["head"]) != bits(params["head"])
        for a, b in zip(jax.tree.leaves(policy), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


LOGGED = {"tensorboardX": "runs/tuned/*", "wandb": "wandb/offline-run-*/files/media/table/*.json"}


@pytest.mark.parametrize("package", LOGGED)
@pytest.mark.filterwarnings("default")  # those of the packages
def test_a_summary_is_logged(package, tmp_path, monkeypatch):
    pytest.importorskip(package, reason=f"{package} is not installed, which this recipe logs to")
    page = pathlib.Path("docs/recipes.md").read_text(encoding="utf-8")
    [block] = re.findall(rf"^```python\n((?:from|import) {package}\b.*?)^```$", page, re.M | re.S)
    setup = doctest.DocTestParser().get_examples(re.search(r"^```pycon\n(.*?)^```$", page, re.M | re.S)[1])
    monkeypatch.chdir(tmp_path)
    exec("".join(example.source for example in setup) + block, {})
    [file] = tmp_path.glob(LOGGED[package])
    assert b"head/kernel" in file.read_bytes()
