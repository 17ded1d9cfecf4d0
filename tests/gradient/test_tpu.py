"""The training step compiled for TPU, by XLA for TPU, which needs none: nothing in it that freezing should not cost."""

import importlib.util
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmarks.measure import on, tpu_sharding

import optax_freeze as fz

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the libtpu wheel, which compiles for TPU, is not installed"
)
LEAVES_THE_CHIP = re.compile(r"callback\"|\b(?:infeed|outfeed|send|recv)\(")
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
BATCH = jax.ShapeDtypeStruct((8, 128), jnp.float32)
MASK = np.random.default_rng(0).random((1024, 128)) > 0.5


def model():
    kernels = {"embed": (1024, 128), "encoder": (128, 256), "head": (256, 128)}
    return {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in kernels.items()}


def loss(params, x):
    x = jnp.tanh(x @ params["embed"].T) @ params["embed"]
    return jnp.mean((jnp.tanh(x @ params["encoder"]) @ params["head"]) ** 2)


class Step(NamedTuple):
    """A training step of three arguments, and the shapes of the first two, which are donated."""

    function: object
    params: object
    state: object


def of_spec(frozen):
    tx = fz.freeze(TX, frozen)

    def step(params, state, x):
        spec = fz.spec_of(state)
        grads = fz.grad(loss, spec)(params, x)
        updates, state = tx.update(grads, state, params)
        return fz.apply_updates(params, updates, spec), state

    return Step(step, model(), jax.eval_shape(tx.init, model()))


def of_part():
    trainable, rest = jax.eval_shape(lambda params: fz.partition(params, "e*"), model())

    def step(params, state, x):
        trainable, rest = params
        grads = jax.grad(fz.restrict(loss, rest))(trainable, x)
        updates, state = TX.update(grads, state, trainable)
        return (optax.apply_updates(trainable, updates), rest), state

    return Step(step, (trainable, rest), jax.eval_shape(TX.init, trainable))


def of_groups():
    tx = fz.freeze_when(optax.adamw(0.1), {"embed": fz.unfreeze_at(100), "encoder": True})

    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return Step(step, model(), jax.eval_shape(tx.init, model()))


STEPS = {
    "freeze": lambda: of_spec("e*"),
    "partition": of_part,
    "rows": lambda: of_spec(fz.rules({"embed": fz.rows(slice(0, 1016)), "encoder": True})),
    "scattered rows": lambda: of_spec(fz.rules({"embed": ~fz.rows([3, 700, 701, 1023]), "encoder": True})),
    "dense elements": lambda: of_spec({"embed": MASK, "encoder": True, "head": False}),
    "compact elements": lambda: of_spec(
        {"embed": True, "encoder": True, "head": fz.elements(MASK[:256], compact=True)}
    ),
    "freeze_when": of_groups,
}


def largest_constant(program):
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* constant\(", program)
    return max(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


def compiled_text(function, *shapes):
    return jax.jit(function).lower(*on(tpu_sharding(), shapes)).compile().as_text()


def test_the_checks_see_what_they_look_for():
    def calls_back(x):
        jax.debug.callback(print, x)
        return x

    assert LEAVES_THE_CHIP.search(compiled_text(calls_back, BATCH))
    mask = jnp.asarray(MASK)
    assert largest_constant(compiled_text(lambda x: jnp.where(mask, x, 0.0), model()["embed"])) == MASK.size


@pytest.mark.parametrize(
    ("name", "topology"), [*((name, "v5e:2x2") for name in STEPS), ("rows", "v6e:2x2"), ("dense elements", "v6e:2x2")]
)
def test_a_step_has_no_callback_no_mask_and_aliases_all_that_is_donated(name, topology):
    step = STEPS[name]()
    arguments = on(tpu_sharding(topology), (step.params, step.state, BATCH))
    compiled = jax.jit(step.function, donate_argnums=(0, 1)).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == memory.argument_size_in_bytes - BATCH.size * BATCH.dtype.itemsize
    program = compiled.as_text()
    assert not LEAVES_THE_CHIP.search(program)
    assert largest_constant(program) <= 1024


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_donated_stack_are_written_in_place(dtype, topology):
    stack = on(tpu_sharding(topology), jax.ShapeDtypeStruct((16, 512, 512), dtype))
    last = on(stack.sharding, jax.eval_shape(lambda p: fz.partition(p, fz.rows(slice(0, 15)))[0], stack))
    compiled = jax.jit(fz.apply_updates, donate_argnums=0).lower(stack, last).compile()
    memory = compiled.memory_analysis()
    row = stack.size * stack.dtype.itemsize // 16
    assert memory.alias_size_in_bytes == 16 * row
    assert memory.temp_size_in_bytes <= row
    assert compiled.cost_analysis()["bytes accessed"] <= 6 * row


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_head_with_new_columns_is_not_copied(dtype):
    """Its frozen columns and the new ones are put together where the product reads them."""
    head, x = jax.ShapeDtypeStruct((1024, 65536), dtype), jax.ShapeDtypeStruct((16, 1024), dtype)
    trainable, rest = jax.eval_shape(lambda head: fz.partition(head, fz.rows(slice(0, -16), axis=1)), head)

    def grads(trainable, rest, x):
        return jax.grad(fz.restrict(lambda head, x: jnp.tanh(x @ head).astype(jnp.float32).sum(), rest))(trainable, x)

    compiled = jax.jit(grads).lower(*on(tpu_sharding(), (trainable, rest, x))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < head.size * head.dtype.itemsize / 4


class TestOffTheChip:
    """Frozen weights in the host's memory: a chip holds some layers at a time, and copies no stack."""

    LAYERS, WIDTH = 16, 512

    def compiled(self, body, dtype, **options):
        sharding, layers, width = tpu_sharding(), self.LAYERS, self.WIDTH
        shapes = {
            "weights": jax.ShapeDtypeStruct((layers, width, width), dtype, sharding=sharding),
            "lora_a": jax.ShapeDtypeStruct((layers, width, 8), jnp.bfloat16, sharding=sharding),
            "lora_b": jax.ShapeDtypeStruct((layers, 8, width), jnp.bfloat16, sharding=sharding),
        }
        trainable, rest = jax.tree.map(lambda x: x, shapes), optax.MaskedNode()
        trainable["weights"], rest = rest, dict.fromkeys(shapes, rest)
        rest["weights"] = fz.offload(shapes["weights"], True, min_bytes=0)

        def loss(p, x):
            x, _ = jax.lax.scan(lambda x, p: (body(x, p), None), x, p, **options)
            return x.astype(jnp.float32).sum()

        def step(trainable, weights, x):
            # Traced as an array on the host: a shape does not say in which memory its array is.
            of_host = {**rest, "weights": jax.device_put(weights, jax.memory.Space.Host)}
            return jax.value_and_grad(fz.restrict(loss, of_host))(trainable, x)

        x = jax.ShapeDtypeStruct((64, width), jnp.bfloat16, sharding=sharding)
        return jax.jit(step).lower(trainable, rest["weights"], x).compile()

    @staticmethod
    def block(x, p):
        return x + jnp.tanh(x @ p["weights"].astype(jnp.bfloat16) + x @ p["lora_a"] @ p["lora_b"])

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
    @pytest.mark.parametrize(("remat", "reverse"), [(False, True), (True, False)])
    def test_a_scan_over_layers(self, remat, reverse, dtype):
        body = jax.checkpoint(self.block) if remat else self.block
        memory = self.compiled(body, dtype, reverse=reverse).memory_analysis()
        stack = self.LAYERS * self.WIDTH**2 * jnp.dtype(dtype).itemsize
        assert memory.host_argument_size_in_bytes == stack
        assert memory.host_temp_size_in_bytes == 0
        assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < stack / 2

    @staticmethod
    def memory(loss, frozen, shapes, *args, **options):
        """The compiler's figures of a gradient with its frozen leaves on the host."""
        chip = tpu_sharding()
        shapes, args = fz.offload(on(chip, shapes), frozen, **options), on(chip, args)

        def on_host(x, shape):
            return jax.device_put(x, jax.memory.Space.Host) if shape.sharding.memory_kind == "pinned_host" else x

        def step(params, *args):
            return fz.grad(loss, frozen)(jax.tree.map(on_host, params, shapes), *args)

        return jax.jit(step).lower(shapes, *args).compile().memory_analysis()

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
    def test_a_lookup(self, dtype):
        table = jax.ShapeDtypeStruct((8192, 512), dtype)
        shapes = {"embed": table, "head": jax.ShapeDtypeStruct((512, 128), jnp.float32)}
        frozen, tokens = {"embed": True, "head": False}, jax.ShapeDtypeStruct((2, 64), jnp.int32)

        def loss(p, tokens):
            return jnp.mean((jnp.take(p["embed"], tokens, axis=0).astype(jnp.float32) @ p["head"]) ** 2)

        memory = self.memory(loss, frozen, shapes, tokens, tables="embed")
        assert memory.host_argument_size_in_bytes == table.size * table.dtype.itemsize
        assert memory.host_temp_size_in_bytes == 0
        assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < memory.host_argument_size_in_bytes / 2

    def test_experts(self):
        experts, width = jax.ShapeDtypeStruct((2, 16, 512, 512), jnp.bfloat16), 512
        shapes = {"experts": experts, "scale": jax.ShapeDtypeStruct((width,), jnp.bfloat16)}

        def loss(p, x, sizes):
            def layer(x, w):
                return x + jnp.tanh(jax.lax.ragged_dot(x, w, sizes)), None

            return jax.lax.scan(jax.checkpoint(layer), x * p["scale"], p["experts"])[0].astype(jnp.float32).sum()

        tokens = (jax.ShapeDtypeStruct((256, width), jnp.bfloat16), jax.ShapeDtypeStruct((16,), jnp.int32))
        memory = self.memory(loss, {"experts": True, "scale": False}, shapes, *tokens)
        assert memory.host_argument_size_in_bytes == experts.size * 2
        assert memory.host_temp_size_in_bytes == 0
        assert (
            memory.argument_size_in_bytes + memory.temp_size_in_bytes < experts.size / 2
        )  # a quarter; a layer is half
