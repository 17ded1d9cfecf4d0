"""Forty training steps as people write them, twenty of which leak, and what is true of each.

The truth was written by hand, without the audit. ``test_forty_steps.py`` checks it by running the steps.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

import optax_freeze as fz


@dataclasses.dataclass
class StepCase:
    """A training step, and what is true of it.

    A leak is written as ``"kind path"``, and its path may have ``*``.
    """

    make_step: Callable
    loss: Any
    state: Any
    batch: tuple
    frozen: Any
    params: Any = "params"
    leaks: tuple[str, ...] = ()
    """What must be found."""
    beside: tuple[str, ...] = ()
    """What may be found as well: other symptoms of the same causes."""
    note: tuple[str, ...] = ()
    """Words that the note must have."""
    or_note: str = ""
    """Words of the note that may stand for the leaks: what the audit cannot know, it says."""
    kept: tuple[str, ...] = ()
    """Leaves of the state beside the parameters that a right step keeps: copies of frozen leaves."""
    frozen_sum: Any = None
    """For the test of the truth: the sum of the frozen elements in the arguments of each loss."""
    hidden: Callable | None = None
    """A loss that the user forgot: the second argument of ``make_step``, which has it as its default."""


RIGHT: list[Callable[[], StepCase]] = []
LEAKY: list[Callable[[], StepCase]] = []


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def mlp():
    encoder = {"kernel": normal(1, 4, 6), "bias": normal(2, 6)}
    return {"encoder": encoder, "head": {"kernel": normal(3, 6, 3), "bias": normal(4, 3)}}


def forward(params, x):
    hidden = jnp.tanh(x @ params["encoder"]["kernel"] + params["encoder"]["bias"])
    return hidden @ params["head"]["kernel"] + params["head"]["bias"]


def mse(params, x, y):
    return jnp.mean((forward(params, x) - y) ** 2)


X, Y = normal(8, 6, 4), normal(9, 6, 3)
HEAD = ("changed head/kernel", "changed head/bias")
ENCODER_GRADIENT = ("gradient encoder/kernel", "gradient encoder/bias")
ENCODER_STATE = ("state encoder/kernel", "state encoder/bias")
ENCODER_MOVED = ("moved encoder/kernel", "moved encoder/bias")


def encoder_sum(params, *_):
    return jnp.sum(params["encoder"]["kernel"]) + jnp.sum(params["encoder"]["bias"])


def jitted(step):
    """`make_step` of a step whose first arguments are its losses."""
    return lambda *losses: jax.jit(functools.partial(step, *losses))


def of_mlp(make_step, state, **truth):
    return StepCase(make_step, mse, state, (X, Y), "encoder", **truth)


def start(tx, params):
    return {"params": params, "opt": tx.init(params)}


def updated(tx, state, grads):
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}


# Right steps


@jitted
def train_state_step(loss, state, x, y):
    value, grads = jax.value_and_grad(loss)(state.params, x, y)
    return state.apply_gradients(grads=grads), {"loss": value}


@RIGHT.append
def train_state_whose_clip_is_inside():
    tx = fz.freeze(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), "encoder")
    return of_mlp(train_state_step, TrainState.create(apply_fn=forward, params=mlp(), tx=tx))


@RIGHT.append
def only_the_trainable_tree_is_differentiated():
    trainable, rest = fz.partition(mlp(), "encoder")
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    state = {"trainable": trainable, "rest": rest, "opt": tx.init(trainable)}

    @jitted
    def make_step(loss, state, x, y):
        grads = jax.grad(fz.restrict(loss, state["rest"]))(state["trainable"], x, y)
        updates, opt = tx.update(grads, state["opt"], state["trainable"])
        return {**state, "trainable": optax.apply_updates(state["trainable"], updates), "opt": opt}

    def params(state):
        return fz.combine(state["trainable"], state["rest"])

    return of_mlp(make_step, state, params=params)


@RIGHT.append
def stop_gradient_and_a_mask_of_weight_decay():
    """SGD without momentum: the zeros of the frozen gradients meet no state and no decay."""
    decay = optax.add_decayed_weights(1e-2, mask={"encoder": False, "head": True})
    tx = optax.chain(decay, optax.sgd(optax.cosine_decay_schedule(0.1, 10_000_000_000)))

    @jitted
    def make_step(loss, state, x, y):
        def head_loss(params):
            return loss({**params, "encoder": jax.lax.stop_gradient(params["encoder"])}, x, y)

        return updated(tx, state, jax.grad(head_loss)(state["params"]))

    return of_mlp(make_step, start(tx, mlp()))


@RIGHT.append
def wasserstein_gan():
    """Two losses of two subtrees. All weights of the critic are clipped, as the frozen ones were in pretraining."""
    critic = {"backbone": jnp.clip(normal(2, 6, 6), -0.3, 0.3), "out": 0.1 * normal(3, 6)}
    params = {"generator": {"kernel": 0.3 * normal(1, 4, 6)}, "critic": critic}
    critic_tx, generator_tx = fz.freeze(optax.rmsprop(1e-3), "backbone"), optax.adam(1e-3)
    state = {"params": params, "critic": critic_tx.init(params["critic"])}
    state["generator"] = generator_tx.init(params["generator"])

    def score(critic, x):
        return jnp.mean(jnp.tanh(x @ critic["backbone"]) @ critic["out"])

    def critic_loss(critic, generator, z, real):
        return score(critic, jnp.tanh(z @ generator["kernel"])) - score(critic, real)

    def generator_loss(generator, critic, z):
        return -score(critic, jnp.tanh(z @ generator["kernel"]))

    @jitted
    def make_step(critic_loss, generator_loss, state, z, real):
        critic, generator = state["params"]["critic"], state["params"]["generator"]
        grads = jax.grad(critic_loss)(critic, generator, z, real)
        updates, critic_opt = critic_tx.update(grads, state["critic"], critic)
        critic = jax.tree.map(lambda w: jnp.clip(w, -0.3, 0.3), optax.apply_updates(critic, updates))
        grads = jax.grad(generator_loss)(generator, critic, z)
        updates, generator_opt = generator_tx.update(grads, state["generator"])
        params = {"critic": critic, "generator": optax.apply_updates(generator, updates)}
        return {"params": params, "critic": critic_opt, "generator": generator_opt}

    sums = (lambda critic, *_: jnp.sum(critic["backbone"]), lambda _, critic, z: jnp.sum(critic["backbone"]))
    losses, batch = (critic_loss, generator_loss), (X, normal(7, 6, 6))
    return StepCase(make_step, losses, state, batch, "critic/backbone", note=("value",), frozen_sum=sums)


@RIGHT.append
def q_learning_with_a_target_network():
    """The target comes from another checkpoint: its encoder is not that of the parameters, and it moves."""
    params, target = mlp(), jax.tree.map(lambda w: w + 0.1, mlp())
    tx = fz.freeze(optax.adam(1e-2), "encoder")

    def loss(params, target, observation, action, reward, following):
        aim = reward + 0.9 * jnp.max(forward(target, following), axis=-1)
        values = jnp.take_along_axis(forward(params, observation), action[:, None], axis=-1)[:, 0]
        return jnp.mean(optax.losses.huber_loss(values, jax.lax.stop_gradient(aim)))

    @jitted
    def make_step(loss, state, *transition):
        value, grads = jax.value_and_grad(loss)(state["params"], state["target"], *transition)
        state = updated(tx, state, grads)
        return {**state, "target": optax.incremental_update(state["params"], state["target"], 0.01)}, value

    batch = (X, jnp.array([0, 1, 2, 0, 1, 2]), Y[:, 0], normal(7, 6, 4))
    return StepCase(make_step, loss, {**start(tx, params), "target": target}, batch, "encoder")


@RIGHT.append
def averaged_and_pruned():
    """SWA as a mean of differences, which are exactly zero where the average began as a copy; a mask of the head."""
    params = mlp()
    tx = fz.freeze(optax.sgd(0.1, momentum=0.9), "encoder")
    mask = jnp.abs(params["head"]["kernel"]) > 0.3
    params["head"]["kernel"] = params["head"]["kernel"] * mask
    state = {"params": params, "swa": params, "mask": mask, "opt": tx.init(params), "count": jnp.array(1)}

    @jitted
    def make_step(loss, state, x, y):
        updates, opt = tx.update(jax.grad(loss)(state["params"], x, y), state["opt"])
        params = optax.apply_updates(state["params"], updates)
        params["head"]["kernel"] = params["head"]["kernel"] * state["mask"]
        swa = jax.tree.map(lambda mean, w: mean + (w - mean) / (state["count"] + 1), state["swa"], params)
        return {**state, "params": params, "swa": swa, "opt": opt, "count": state["count"] + 1}

    return of_mlp(make_step, state, kept=("swa/encoder/*",))


def lora_loss(params, x, y):
    return jnp.mean((x @ (params["base"]["kernel"] + params["lora"]["a"] @ params["lora"]["b"]) - y) ** 2)


@RIGHT.append
def lora():
    """``b`` begins at zero, so the gradient of ``a`` is zero in the first step."""
    params = {"base": {"kernel": normal(1, 4, 3)}, "lora": {"a": normal(2, 4, 2), "b": jnp.zeros((2, 3))}}
    labels = {"base": "frozen", "lora": "trainable"}
    tx = optax.multi_transform({"frozen": optax.set_to_zero(), "trainable": optax.adam(1e-2)}, labels)

    def make_step(loss):
        @jax.jit
        def step(params, opt, x, y):
            value, grads = jax.value_and_grad(loss)(params, x, y)
            updates, opt = tx.update(grads, opt, params)
            return optax.apply_updates(params, updates), opt, value

        def audited(state, *batch):
            params, opt, value = step(*state, *batch)
            return (params, opt), value

        return audited

    return StepCase(make_step, lora_loss, (params, tx.init(params)), (X, Y), "base", "0")


@RIGHT.append
def scan_of_micro_batches():
    """A clip outside of ``fz.freeze``, which reads the zeros of ``fz.freeze_loss``."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), fz.freeze(optax.adamw(1e-2), "encoder"))

    @jitted
    def make_step(loss, state, x, y):
        gradient = jax.value_and_grad(fz.freeze_loss(loss, "encoder"))

        def micro_step(total, batch):
            value, grads = gradient(state["params"], *batch)
            return jax.tree.map(jnp.add, total, grads), value

        micro_batches = x.reshape(3, 2, -1), y.reshape(3, 2, -1)
        total, values = jax.lax.scan(micro_step, jax.tree.map(jnp.zeros_like, state["params"]), micro_batches)
        return updated(tx, state, jax.tree.map(lambda g: g / 3, total)), jnp.mean(values)

    return of_mlp(make_step, start(tx, mlp()))


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.encoder = nnx.Linear(4, 6, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(jnp.tanh(self.encoder(x))))


def nnx_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def nnx_encoder_sum(model, *_):
    return jnp.sum(model.encoder.kernel[...]) + jnp.sum(model.encoder.bias[...])


def nnx_case(tx, trainable, **truth):
    model = NNXModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=trainable)

    def make_step(loss):
        @nnx.jit
        def step(model, optimizer, x, y):
            value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, trainable))(model, x, y)
            optimizer.update(model, grads)
            return value

        return lambda state, *batch: step(*state, *batch)

    state = (model, optimizer)
    return StepCase(make_step, nnx_loss, state, (X, Y), "encoder", "0", frozen_sum=nnx_encoder_sum, **truth)


@RIGHT.append
def nnx_differentiates_the_head():
    """Dropout counts in the module; these counters are not parameters."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    return nnx_case(tx, nnx.All(nnx.Param, nnx.PathContains("head")))


class EquinoxModel(eqx.Module):
    encoder: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self):
        self.encoder = eqx.nn.Linear(4, 6, key=jax.random.key(1))
        self.head = eqx.nn.Linear(6, 3, key=jax.random.key(2))

    def __call__(self, x):
        return self.head(jnp.tanh(self.encoder(x)))


def equinox_loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@RIGHT.append
def equinox_partition():
    model = EquinoxModel()
    spec = eqx.tree_at(lambda m: m.head, jax.tree.map(lambda _: False, model), jax.tree.map(lambda _: True, model.head))
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))

    def make_step(loss):
        @eqx.filter_jit
        def step(state, x, y):
            trainable, rest = eqx.partition(state["model"], spec)

            @eqx.filter_value_and_grad
            def of_trainable(trainable):
                return loss(eqx.combine(trainable, rest), x, y)

            value, grads = of_trainable(trainable)
            updates, opt = tx.update(grads, state["opt"], trainable)
            return {"model": eqx.combine(eqx.apply_updates(trainable, updates), rest), "opt": opt}, value

        return step

    state = {"model": model, "opt": tx.init(eqx.partition(model, spec)[0])}
    return StepCase(make_step, equinox_loss, state, (X, Y), "encoder", "model")


class BatchNormState(TrainState):
    batch_stats: Any


def batch_norm_case(encoder_trains_its_statistics, **truth):
    class Block(nn.Module):
        evaluates: bool

        @nn.compact
        def __call__(self, x):
            x = nn.Dense(6, name="dense")(x)
            return nn.tanh(nn.BatchNorm(use_running_average=self.evaluates, name="bn")(x))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Block(not encoder_trains_its_statistics, name="encoder")(x)
            return nn.Dense(3, name="out")(Block(False, name="head")(x))

    model = Model()
    variables = model.init(jax.random.key(0), X)
    tx = fz.freeze(optax.adafactor(1e-2, min_dim_size_to_factor=4), "encoder")
    state = BatchNormState.create(apply_fn=model.apply, tx=tx, **variables)

    def loss(params, batch_stats, x, y):
        variables = {"params": params, "batch_stats": batch_stats}
        output, changed = model.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean((output - y) ** 2), changed["batch_stats"]

    @jitted
    def make_step(loss, state, x, y):
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, batch_stats), grads = gradient(state.params, state.batch_stats, x, y)
        return state.apply_gradients(grads=grads).replace(batch_stats=batch_stats), value

    return StepCase(make_step, loss, state, (X, Y), "encoder", **truth)


@RIGHT.append
def linen_frozen_batch_norm_evaluates():
    return batch_norm_case(False, kept=("batch_stats/encoder/*",))


@RIGHT.append
def multi_steps_inside_and_a_logged_norm():
    """``fz.freeze`` is around ``MultiSteps``; the norm of all gradients goes to a logger."""
    logged = []
    tx = fz.freeze(optax.MultiSteps(optax.adam(1e-2), 2), "encoder")

    @jitted
    def make_step(loss, state, x, y):
        value, grads = jax.value_and_grad(loss)(state["params"], x, y)
        jax.debug.callback(logged.append, optax.tree.norm(grads))
        return updated(tx, state, grads), value

    return of_mlp(make_step, start(tx, mlp()), note=("gradient",))


@RIGHT.append
def shard_map_over_the_batch():
    """The gradient of parameters that all devices share is summed by ``shard_map`` itself."""
    tx = fz.freeze(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), "encoder")
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))

    def make_step(loss):
        def local_step(state, x, y):
            def mean_loss(params):
                return jax.lax.pmean(loss(params, x, y), "data")

            value, grads = jax.value_and_grad(mean_loss)(state["params"])
            return updated(tx, state, grads), value

        whole, split = PartitionSpec(), PartitionSpec("data")
        return jax.jit(jax.shard_map(local_step, mesh=mesh, in_specs=(whole, split, split), out_specs=(whole, whole)))

    return of_mlp(make_step, start(tx, mlp()))


@RIGHT.append
def lookahead_with_a_dynamic_number_of_steps():
    """A ``fori_loop`` whose length is data. Half of the way between equal values is that value."""
    params = mlp()
    tx = fz.freeze(optax.sgd(0.05, momentum=0.9), "encoder")

    @jitted
    def make_step(loss, state, x, y, number):
        def fast_step(_, fast):
            updates, opt = tx.update(jax.grad(loss)(fast["params"], x, y), fast["opt"])
            return {"params": optax.apply_updates(fast["params"], updates), "opt": opt}

        fast = jax.lax.fori_loop(0, number, fast_step, {"params": state["slow"], "opt": state["opt"]})
        slow = jax.tree.map(lambda s, f: s + 0.5 * (f - s), state["slow"], fast["params"])
        return {"slow": slow, "opt": fast["opt"]}

    batch = (X, Y, jnp.array(3))
    return StepCase(make_step, mse, {"slow": params, "opt": tx.init(params)}, batch, "encoder", "slow")


@RIGHT.append
def top_layers_of_a_stack_as_one_vector():
    """Stacked layers are divided; the upper ones are one flat vector with momentum, so no frozen layer has any."""
    params = {"layers": {"w": normal(1, 4, 4, 4), "b": normal(2, 4, 4)}, "out": normal(3, 4, 3)}
    frozen = fz.rules({"layers/**": fz.rows(slice(0, 2))})

    def loss(params, x, y):
        for i in range(4):
            x = jnp.tanh(x @ params["layers"]["w"][i] + params["layers"]["b"][i])
        return jnp.mean((x @ params["out"] - y) ** 2)

    def divide(params):
        bottom, top = jax.tree.map(lambda a: a[:2], params["layers"]), jax.tree.map(lambda a: a[2:], params["layers"])
        return bottom, *ravel_pytree({"layers": top, "out": params["out"]})

    @jitted
    def make_step(loss, state, x, y):
        bottom, vector, unravel = divide(state["params"])

        def whole(vector):
            top = unravel(vector)
            layers = jax.tree.map(lambda low, high: jnp.concatenate([low, high]), bottom, top["layers"])
            return {"layers": layers, "out": top["out"]}

        momentum = 0.9 * state["momentum"] + jax.grad(lambda vector: loss(whole(vector), x, y))(vector)
        return {"params": whole(vector - 0.05 * momentum), "momentum": momentum}

    state = {"params": params, "momentum": jnp.zeros_like(divide(params)[1])}
    return StepCase(make_step, loss, state, (X, Y), frozen)


@RIGHT.append
def bias_of_a_router_is_set_by_its_load():
    """The bias has no gradient, as it only chooses the experts; the step itself moves it."""
    router = {"kernel": normal(2, 4, 3), "bias": jnp.zeros(3)}
    params = {"experts": normal(1, 3, 4, 4), "router": router, "out": normal(3, 4, 3)}
    tx = fz.freeze(optax.adam(1e-2), "experts")

    def loss(params, x, y):
        scores = jax.nn.softmax(x @ params["router"]["kernel"])
        chosen = jnp.argmax(scores + params["router"]["bias"], axis=-1)
        gate = jnp.take_along_axis(scores, chosen[:, None], axis=-1)
        hidden = gate * jnp.einsum("bi,bij->bj", x, params["experts"][chosen])
        return jnp.mean((hidden @ params["out"] - y) ** 2), jnp.mean(jax.nn.one_hot(chosen, 3), axis=0)

    @jitted
    def make_step(loss, state, x, y):
        (value, load), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], x, y)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        params["router"]["bias"] = params["router"]["bias"] + 0.01 * jnp.sign(jnp.mean(load) - load)
        return {"params": params, "opt": opt}, value

    batch = (normal(8, 7, 4), normal(9, 7, 3))
    return StepCase(make_step, loss, start(tx, params), batch, "experts")


@RIGHT.append
def tied_embedding_and_warm_up():
    """Muon, whose rate is zero in the first step. The embedding is read at both ends."""
    params = {"embed": normal(1, 8, 6), "block": {"kernel": normal(2, 6, 6), "bias": normal(3, 6)}}
    tx = fz.freeze(optax.contrib.muon(optax.linear_schedule(0.0, 1e-2, 10)), "embed")

    def loss(params, tokens, targets):
        hidden = jnp.tanh(params["embed"][tokens] @ params["block"]["kernel"] + params["block"]["bias"])
        logits = hidden @ params["embed"].T
        return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets))

    @jitted
    def make_step(loss, state, tokens, targets):
        value, grads = jax.value_and_grad(loss)(state["params"], tokens, targets)
        return updated(tx, state, grads), value

    batch = (jnp.array([[0, 3, 5], [1, 2, 7]]), jnp.array([[3, 5, 6], [2, 7, 4]]))
    return StepCase(make_step, loss, start(tx, params), batch, "embed")


@RIGHT.append
def norms_of_all_gradients_are_returned():
    tx = fz.freeze(optax.adamw(1e-2), "encoder")

    @jitted
    def make_step(loss, state, x, y):
        value, grads = jax.value_and_grad(loss)(state["params"], x, y)
        return updated(tx, state, grads), {"loss": value, "norms": jax.tree.map(jnp.linalg.norm, grads)}

    return of_mlp(make_step, start(tx, mlp()), note=("gradient",))


@RIGHT.append
def kernels_in_the_layout_of_pytorch():
    """The step transposes a square kernel, so the frozen rows are columns in what the loss gets."""
    params = {"body": normal(1, 6, 6), "head": normal(2, 3, 6)}
    frozen = fz.rules({"body": fz.rows(slice(0, 4))})
    tx = fz.freeze(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), frozen)

    def loss(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["body"]) @ params["head"] - y) ** 2)

    @jitted
    def make_step(loss, state, x, y):
        grads = jax.grad(lambda params: loss(jax.tree.map(jnp.transpose, params), x, y))(state["params"])
        return updated(tx, state, grads)

    def columns(params, *_):
        return jnp.sum(params["body"][:, :4])

    state, batch = start(tx, params), (normal(7, 5, 6), normal(9, 5, 3))
    return StepCase(make_step, loss, state, batch, frozen, frozen_sum=columns)


@RIGHT.append
def curvature_of_the_head():
    """AdaHessian: a Hessian-vector product, of the head alone."""
    params = mlp()
    state = {"params": params, "curvature": jax.tree.map(jnp.zeros_like, params["head"]), "count": jnp.array(0)}

    @jitted
    def make_step(loss, state, x, y):
        head, count = state["params"]["head"], state["count"]
        gradient = jax.grad(lambda head: loss({**state["params"], "head": head}, x, y))
        keys = jax.tree.map(lambda w: jax.random.fold_in(jax.random.key(w.size), count), head)
        signs = jax.tree.map(lambda w, key: jax.random.rademacher(key, w.shape, w.dtype), head, keys)
        grads, product = jax.jvp(gradient, (head,), (signs,))
        curvature = jax.tree.map(
            lambda old, sign, p: 0.9 * old + 0.1 * (sign * p) ** 2, state["curvature"], signs, product
        )
        head = jax.tree.map(lambda w, g, c: w - 0.01 * g / (jnp.sqrt(c) + 1e-3), head, grads, curvature)
        return {"params": {**state["params"], "head": head}, "curvature": curvature, "count": count + 1}

    return of_mlp(make_step, state)


# Steps with a leak


@LEAKY.append
def train_state_whose_clip_is_outside():
    labels = {"encoder": "frozen", "head": "trainable"}
    freeze = optax.multi_transform({"frozen": optax.set_to_zero(), "trainable": optax.adam(1e-2)}, labels)
    tx = optax.chain(optax.clip_by_global_norm(0.1), freeze)
    state = TrainState.create(apply_fn=forward, params=mlp(), tx=tx)
    return of_mlp(train_state_step, state, leaks=(*HEAD, *ENCODER_GRADIENT))


@LEAKY.append
def average_of_all_weights():
    """0.99 w + 0.01 w is not w: the average rounds away from the frozen values that it began with."""
    params = mlp()
    tx = fz.freeze(optax.adam(1e-2), "encoder")
    state = {**start(tx, params), "ema": params}

    @jitted
    def make_step(loss, state, x, y):
        state = updated(tx, state, jax.grad(loss)(state["params"], x, y))
        return {**state, "ema": jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, state["ema"], state["params"])}

    leaks = ("moved *encoder/kernel", "moved *encoder/bias")
    return of_mlp(make_step, state, leaks=leaks)


@LEAKY.append
def linen_frozen_batch_norm_trains():
    return batch_norm_case(True, leaks=("moved *encoder/bn/mean", "moved *encoder/bn/var"))


@LEAKY.append
def nnx_inverted_labels():
    def labels(params):
        def label(path, _):
            return "trainable" if "encoder" in jax.tree_util.keystr(path) else "frozen"

        return jax.tree_util.tree_map_with_path(label, params)

    tx = optax.multi_transform({"frozen": optax.set_to_zero(), "trainable": optax.adamw(1e-2)}, labels)
    leaks = (*ENCODER_MOVED, "untrained head/kernel", "untrained head/bias")
    return nnx_case(tx, nnx.Param, leaks=leaks, beside=(*ENCODER_STATE, *ENCODER_GRADIENT))


@LEAKY.append
def equinox_zeroed_gradients():
    """Adam holds moments for frozen leaves, which stay zero here, and would move the leaves of a resumed run."""
    model = EquinoxModel()
    tx = optax.adam(1e-2)
    state = {"model": model, "opt": tx.init(eqx.filter(model, eqx.is_inexact_array))}

    def make_step(loss):
        @eqx.filter_jit
        def step(state, x, y):
            value, grads = eqx.filter_value_and_grad(loss)(state["model"], x, y)
            grads = eqx.tree_at(lambda g: g.encoder, grads, jax.tree.map(jnp.zeros_like, grads.encoder))
            updates, opt = tx.update(grads, state["opt"])
            return {"model": eqx.apply_updates(state["model"], updates), "opt": opt}, value

        return step

    leaks, beside = ("state encoder/weight", "state encoder/bias"), ("moved encoder/weight", "moved encoder/bias")
    return StepCase(make_step, equinox_loss, state, (X, Y), "encoder", "model", leaks, beside)


@LEAKY.append
def own_buffer_of_gradients():
    """Two jitted functions, and a buffer that also adds up frozen gradients."""
    params = mlp()
    tx = fz.freeze(optax.adam(1e-2), "encoder")
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {**start(tx, params), "buffer": zeros, "count": jnp.array(0)}

    def make_step(loss):
        gradient = jax.jit(jax.grad(loss))

        @jax.jit
        def add(state, grads):
            buffer = jax.tree.map(lambda total, g: total + g / 2, state["buffer"], grads)

            def update(_):
                updates, opt = tx.update(buffer, state["opt"], state["params"])
                return optax.apply_updates(state["params"], updates), opt, zeros

            def wait(_):
                return state["params"], state["opt"], buffer

            params, opt, buffer = jax.lax.cond(state["count"] % 2 == 1, update, wait, None)
            return {"params": params, "opt": opt, "buffer": buffer, "count": state["count"] + 1}

        return lambda state, x, y: add(state, gradient(state["params"], x, y))

    return of_mlp(make_step, state, leaks=ENCODER_STATE, beside=ENCODER_GRADIENT)


@LEAKY.append
def weight_of_the_second_loss():
    """VQGAN weighs the adversarial loss by the gradients of both losses at the last layer, which is frozen here."""
    params = {"body": normal(1, 4, 6), "last": normal(2, 6, 4)}
    tx = fz.freeze(optax.adam(1e-2), "last")
    state = {"params": params, "discriminator": normal(3, 4), "opt": tx.init(params)}

    def decode(params, z):
        return jnp.tanh(z @ params["body"]) @ params["last"]

    def reconstruction(params, z, x):
        return jnp.mean(jnp.abs(decode(params, z) - x))

    def adversarial(params, discriminator, z):
        return -jnp.mean(jnp.tanh(decode(params, z) @ discriminator))

    @jitted
    def make_step(reconstruction, adversarial, state, z, x):
        of_x = jax.grad(reconstruction)(state["params"], z, x)
        of_critic = jax.grad(adversarial)(state["params"], state["discriminator"], z)
        weight = jnp.linalg.norm(of_x["last"]) / (jnp.linalg.norm(of_critic["last"]) + 1e-4)
        grads = jax.tree.map(lambda a, b: a + jnp.clip(weight, 0.0, 1e4) * b, of_x, of_critic)
        return updated(tx, state, grads)

    losses, leaks = (reconstruction, adversarial), ("changed body", "gradient last")
    return StepCase(make_step, losses, state, (X, normal(7, 6, 4)), "last", leaks=leaks)


@LEAKY.append
def maml_adapts_the_encoder():
    """The inner step moves the frozen encoder too, so the gradient of the head depends on it."""
    params = mlp()
    tx = fz.freeze(optax.adam(1e-2), "encoder")

    def make_step(loss):
        def after_adapting(params, x, y, x_query, y_query):
            grads = jax.grad(loss)(params, x, y)
            return loss(jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), x_query, y_query)

        @jax.jit
        def step(state, tasks):
            def meta_loss(params):
                return jnp.mean(jax.vmap(after_adapting, in_axes=(None, 0, 0, 0, 0))(params, *tasks))

            value, grads = jax.value_and_grad(meta_loss)(state["params"])
            return updated(tx, state, grads), value

        return step

    tasks = (normal(5, 3, 5, 4), normal(6, 3, 5, 3), normal(7, 3, 5, 4), normal(8, 3, 5, 3))
    state = start(tx, params)
    return StepCase(
        make_step, mse, state, (tasks,), "encoder", leaks=HEAD, beside=ENCODER_GRADIENT, or_note="is not known"
    )


@LEAKY.append
def one_vector_with_momentum():
    """The mask comes after the momentum, and the decay, which starts late, has none."""
    vector, unravel = ravel_pytree(mlp())
    head = jax.tree_util.tree_map_with_path(lambda path, w: jnp.full(w.shape, "head" in str(path)), mlp())
    trains = np.asarray(ravel_pytree(head)[0], bool)
    state = {"vector": vector, "momentum": jnp.zeros_like(vector), "count": jnp.array(0)}

    def loss(vector, x, y):
        return mse(unravel(vector), x, y)

    @jitted
    def make_step(loss, state, x, y):
        momentum = 0.9 * state["momentum"] + jax.grad(loss)(state["vector"], x, y)
        vector = state["vector"] - 0.05 * jnp.where(trains, momentum, 0.0)
        vector = vector * (1.0 - jnp.where(state["count"] >= 300, 1e-4, 0.0))
        return {"vector": vector, "momentum": momentum, "count": state["count"] + 1}

    leaks, beside = ("moved ", "state "), ("gradient ",)
    return StepCase(make_step, loss, state, (X, Y), fz.elements(~trains), "vector", leaks, beside)


@LEAKY.append
def langevin_noise():
    """The gradients are masked, and the noise is added to every leaf after that."""
    state = {"params": mlp(), "count": jnp.array(0)}

    @jitted
    def make_step(loss, state, x, y):
        grads = jax.grad(loss)(state["params"], x, y)
        grads["encoder"] = jax.tree.map(jnp.zeros_like, grads["encoder"])
        vector, unravel = ravel_pytree(grads)
        noise = unravel(jax.random.normal(jax.random.fold_in(jax.random.key(0), state["count"]), vector.shape))
        params = jax.tree.map(lambda w, g, n: w - 0.01 * g + 1e-3 * n, state["params"], grads, noise)
        return {"params": params, "count": state["count"] + 1}

    return of_mlp(make_step, state, leaks=ENCODER_MOVED)


@LEAKY.append
def sharpness_aware():
    """SAM: the norm and the perturbation are those of all parameters."""
    tx = fz.freeze(optax.sgd(0.05, momentum=0.9), "encoder")

    @jitted
    def make_step(loss, state, x, y):
        value, grads = jax.value_and_grad(loss)(state["params"], x, y)
        scale = 0.05 / (optax.tree.norm(grads) + 1e-12)
        perturbed = jax.tree.map(lambda w, g: w + scale * g, state["params"], grads)
        return updated(tx, state, jax.grad(loss)(perturbed, x, y)), value

    return of_mlp(make_step, start(tx, mlp()), leaks=(*HEAD, *ENCODER_GRADIENT))


@LEAKY.append
def decay_of_the_float32_copy():
    """The decay moves the float32 copy of the frozen leaves, by less than a rounding of the bfloat16 parameters."""
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), mlp())
    master = jax.tree.map(lambda w: w.astype(jnp.float32), params)
    labels = {"encoder": True, "head": False}
    tx = optax.chain(
        optax.masked(optax.set_to_zero(), labels), optax.add_decayed_weights(1e-3), optax.scale_by_learning_rate(1e-2)
    )
    state = {"params": params, "master": master, "opt": tx.init(master)}

    @jitted
    def make_step(loss, state, x, y):
        grads = jax.grad(loss)(state["params"], x.astype(jnp.bfloat16), y)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt = tx.update(grads, state["opt"], state["master"])
        master = optax.apply_updates(state["master"], updates)
        params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), master)
        return {"params": params, "master": master, "opt": opt}

    leaks = ("moved *encoder/kernel", "moved *encoder/bias")
    return of_mlp(make_step, state, leaks=leaks)


@LEAKY.append
def loss_scale_over_all_gradients():
    """The loss gets bfloat16 leaves whose heads are divided; a frozen overflow skips the step of the head."""
    params = {"attention": {"qkv": normal(1, 4, 12)}, "head": {"kernel": normal(2, 4, 3)}}
    tx = fz.freeze(optax.adam(1e-2), "attention")
    state = {**start(tx, params), "scale": jnp.array(1024.0)}

    def compute(params):
        params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
        return {**params, "attention": {"qkv": params["attention"]["qkv"].reshape(4, 3, 2, 2)}}

    def loss(params, x, y):
        q, k, v = jnp.einsum("bsd,dchk->cbshk", x.astype(jnp.bfloat16), params["attention"]["qkv"])
        weights = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k))
        hidden = jnp.einsum("bhst,bthk->bshk", weights, v).reshape(x.shape)
        return jnp.mean((hidden @ params["head"]["kernel"] - y) ** 2).astype(jnp.float32)

    @jitted
    def make_step(loss, state, x, y):
        scaled, grads = jax.value_and_grad(lambda p: loss(compute(p), x, y) * state["scale"])(state["params"])
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        grads = jax.tree.map(lambda g: g / state["scale"], grads)
        updates, opt = tx.update(grads, state["opt"])
        new = optax.apply_updates(state["params"], updates), opt
        params, opt = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (state["params"], state["opt"]))
        scale = jnp.where(finite, state["scale"], state["scale"] / 2)
        return {"params": params, "opt": opt, "scale": scale}, scaled / state["scale"]

    batch = (normal(8, 2, 3, 4), normal(9, 2, 3, 3))
    leaks, beside = ("changed head/kernel", "gradient attention/qkv"), ("state attention/qkv", "state ")
    case = StepCase(make_step, loss, state, batch, "attention", "params", leaks, beside, or_note="is not known")
    return dataclasses.replace(case, frozen_sum=lambda params, *_: jnp.sum(params["attention"]["qkv"]))


@LEAKY.append
def codebook_by_running_averages():
    """VQ-VAE: the codebook has no gradient, and is set from the batch after the optimizer."""
    params = {"encoder": normal(1, 4, 3), "codebook": normal(2, 5, 3), "decoder": normal(3, 3, 4)}
    tx = fz.freeze(optax.adam(1e-2), "codebook")
    state = {**start(tx, params), "sizes": jnp.ones(5), "sums": params["codebook"]}

    def loss(params, x):
        z = x @ params["encoder"]
        chosen = jnp.argmin(jnp.sum((z[:, None] - params["codebook"]) ** 2, axis=-1), axis=-1)
        quantized = jax.lax.stop_gradient(params["codebook"])[chosen]
        straight = z + jax.lax.stop_gradient(quantized - z)
        value = jnp.mean((straight @ params["decoder"] - x) ** 2) + 0.25 * jnp.mean((z - quantized) ** 2)
        return value, (z, jax.nn.one_hot(chosen, 5))

    @jitted
    def make_step(loss, state, x):
        (value, (z, chosen)), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], x)
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        sizes = 0.99 * state["sizes"] + 0.01 * jnp.sum(chosen, axis=0)
        sums = 0.99 * state["sums"] + 0.01 * chosen.T @ z
        params["codebook"] = sums / sizes[:, None]
        return {"params": params, "opt": opt, "sizes": sizes, "sums": sums}, value

    beside = ("moved sums",)
    return StepCase(make_step, loss, state, (X,), "codebook", leaks=("moved codebook",), beside=beside)


@LEAKY.append
def lora_is_merged_now_and_then():
    """ReLoRA, by Python: every thousand steps the product goes into the frozen kernel."""
    params = {"base": {"kernel": normal(1, 4, 3)}, "lora": {"a": normal(2, 4, 2), "b": normal(4, 2, 3)}}
    tx = fz.freeze(optax.adam(1e-2), "base")
    state = {**start(tx, params), "step": jnp.array(0)}

    def make_step(loss):
        gradient = jax.jit(lambda params, x, y: fz.freeze_loss(loss, "base")(params, x, y))

        def step(state, x, y):
            params, lora = state["params"], state["params"]["lora"]
            value, grads = jax.value_and_grad(gradient)(params, x, y)
            updates, opt = tx.update(grads, state["opt"])
            params = optax.apply_updates(params, updates)
            if int(state["step"]) % 1000 == 999:
                kernel = params["base"]["kernel"] + lora["a"] @ lora["b"]
                params = {"base": {"kernel": kernel}, "lora": {"a": lora["a"], "b": jnp.zeros_like(lora["b"])}}
            return {"params": params, "opt": opt, "step": state["step"] + 1}, float(value)

        return step

    return StepCase(make_step, lora_loss, state, (X, Y), "base", leaks=("moved base/kernel",))


@LEAKY.append
def new_tokens_and_moments_of_all():
    """The updates of the old rows are masked after Adam, whose moments take in their gradients."""
    params = {"embed": normal(1, 8, 4), "head": normal(2, 4, 3)}
    tx = optax.adam(1e-2)
    old = jnp.arange(8)[:, None] < 6
    frozen = fz.rules({"embed": fz.rows(slice(0, 6))})

    def loss(params, tokens, y):
        return jnp.mean((jnp.mean(params["embed"][tokens], axis=1) @ params["head"] - y) ** 2)

    @jitted
    def make_step(loss, state, tokens, y):
        updates, opt = tx.update(jax.grad(loss)(state["params"], tokens, y), state["opt"])
        updates["embed"] = jnp.where(old, 0.0, updates["embed"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    batch = (jnp.array([[0, 3, 7], [6, 2, 7], [1, 6, 4]]), normal(9, 3, 3))
    state = start(tx, params)
    return StepCase(make_step, loss, state, batch, frozen, leaks=("state embed",), beside=("gradient embed",))


@LEAKY.append
def shrinks_all_weights_when_the_loss_explodes():
    """A branch that no usual step takes."""
    tx = fz.freeze(optax.adamw(1e-2), "encoder")

    @jitted
    def make_step(loss, state, x, y):
        value, grads = jax.value_and_grad(loss)(state["params"], x, y)
        state = updated(tx, state, grads)
        shrink, keep = lambda params: jax.tree.map(lambda w: 0.5 * w, params), lambda params: params
        return {**state, "params": jax.lax.cond(value > 1e6, shrink, keep, state["params"])}, value

    return of_mlp(make_step, start(tx, mlp()), leaks=ENCODER_MOVED, or_note="branch")


@LEAKY.append
def pmap_with_a_clip_outside():
    """The state has an axis of devices, and the loss gets the slice of one."""
    devices = jax.devices()[:2]
    tx = optax.chain(optax.clip_by_global_norm(0.1), fz.freeze(optax.sgd(0.05, momentum=0.9), "encoder"))
    params = jax.tree.map(lambda w: jnp.stack([w, w]), mlp())
    state = {"params": params, "opt": jax.pmap(tx.init, devices=devices)(params)}

    def make_step(loss):
        def step(state, x, y):
            value, grads = jax.value_and_grad(loss)(state["params"], x, y)
            grads = jax.lax.pmean(grads, "data")
            return updated(tx, state, grads), value

        return jax.pmap(step, axis_name="data", devices=devices)

    batch = (X.reshape(2, 3, 4), Y.reshape(2, 3, 3))
    return StepCase(make_step, mse, state, batch, "encoder", leaks=(*HEAD, *ENCODER_GRADIENT), frozen_sum=encoder_sum)


def feature_penalty(params, x):
    return jnp.mean(forward(params, x + 0.1) ** 2)


@LEAKY.append
def the_second_loss_was_forgotten():
    """Only the first loss is given; the norm that leaks is that of the second."""
    params = mlp()
    tx = fz.freeze(optax.adam(1e-2), "encoder")

    def make_step(loss, penalty=feature_penalty):
        @jax.jit
        def step(state, x, y):
            grads, of_penalty = jax.grad(loss)(state["params"], x, y), jax.grad(penalty)(state["params"], x)
            scale = 0.1 / jnp.maximum(optax.tree.norm(of_penalty), 0.1)
            grads = jax.tree.map(lambda g, p: g + scale * p, grads, of_penalty)
            return updated(tx, state, grads)

        return step

    state, words = start(tx, params), "without the gradient of a given loss"
    return of_mlp(make_step, state, leaks=HEAD, beside=ENCODER_GRADIENT, or_note=words, hidden=feature_penalty)


@LEAKY.append
def forward_gradient():
    """The derivative along one random direction of all parameters: that of the encoder is in the update of the head."""
    params = mlp()
    tx = fz.freeze(optax.sgd(0.01), "encoder")
    state = {**start(tx, params), "count": jnp.array(0)}

    @jitted
    def make_step(loss, state, x, y):
        vector, unravel = ravel_pytree(state["params"])
        key = jax.random.fold_in(jax.random.key(0), state["count"])
        direction = unravel(jax.random.normal(key, vector.shape))
        value, slope = jax.jvp(lambda params: loss(params, x, y), (state["params"],), (direction,))
        grads = jax.tree.map(lambda d: slope * d, direction)
        return {**updated(tx, state, grads), "count": state["count"] + 1}, value

    return StepCase(
        make_step, mse, state, (X, Y), "encoder", leaks=HEAD, beside=ENCODER_GRADIENT, or_note="is not known"
    )


CASES = {make.__name__: make for make in (*RIGHT, *LEAKY)}
