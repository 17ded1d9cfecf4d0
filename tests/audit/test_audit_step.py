"""Training steps that leak in one way each are named with its cause; steps that freeze as they should pass."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_freeze as fz
import optax_freeze.nnx as fnnx

FROZEN = "encoder"
TRUE, FALSE = {"encoder": True, "head": False}, {"encoder": False, "head": True}
SGD, ADAM, ADAMW = optax.sgd(0.1), optax.adam(0.1), optax.adamw(0.1)
X, Y = (np.asarray(jax.random.normal(jax.random.key(i), (4, 3))) for i in range(2))


def numbers(*shape):
    return jnp.cos(jnp.arange(np.prod(shape))).reshape(shape)


PARAMS = {
    "encoder": {"kernel": numbers(3, 3), "bias": jnp.zeros(3)},
    "head": {"kernel": numbers(3, 3) + 0.1, "bias": jnp.zeros(3)},
}


def predict(params, x, stop=lambda x: x):
    x = stop(jnp.tanh(x @ params["encoder"]["kernel"] + params["encoder"]["bias"]))
    return x @ params["head"]["kernel"] + params["head"]["bias"]


def loss(params, x, y, stop=lambda x: x):
    return jnp.mean((predict(params, x, stop) - y) ** 2)


def zero_in_head(params, x, y):
    """One token attends to itself, whatever its scores are."""
    scores = jnp.sum(x * params["head"]["bias"], -1, keepdims=True)
    return loss({**params, "head": {**params["head"], "bias": 0.0}}, x * jax.nn.softmax(scores), y)


def stopped(params, x, y):
    return loss(fz.stop_gradient(params, FROZEN), x, y)


def plain_step(tx, grad=jax.value_and_grad):
    """The usual step: a gradient, an optimizer, new parameters."""

    def make_step(loss):
        @jax.jit
        def step(state, x, y):
            value, grads = grad(loss)(state["params"], x, y)
            updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
            return {**state, "params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value

        return step

    return make_step


def plain(tx, loss=loss, grad=jax.value_and_grad):
    return plain_step(tx, grad), {"params": PARAMS, "opt_state": tx.init(PARAMS)}, loss


def then(change):
    """The usual right step, and what is done to its new state."""
    make_plain, state, _ = plain(fz.freeze(ADAM, FROZEN))

    def make_step(loss):
        step = make_plain(loss)

        def changed(state, x, y):
            new, value = step(state, x, y)
            return change(state, new, x), value

        return changed

    return make_step, state, loss


def average(rate):
    def change(old, new, x):
        return {**new, "ema": jax.tree.map(rate, old["ema"], new["params"])}

    make_step, state, _ = then(change)
    return make_step, {**state, "ema": PARAMS}, loss


def momentum_left():
    tx = optax.chain(optax.masked(optax.set_to_zero(), TRUE), optax.sgd(0.1, momentum=0.9))
    make_step, state, _ = plain(tx)
    _, warm = optax.sgd(0.1, momentum=0.9).update(jax.tree.map(jnp.ones_like, PARAMS), state["opt_state"][1])
    return make_step, {**state, "opt_state": (state["opt_state"][0], warm)}, loss


def another_spec():
    tx = fz.freeze(ADAM, "head")

    def make_step(loss):
        @jax.jit
        def step(state, x, y):
            grads = jax.grad(loss)(state["params"], x, y)
            now = fz.spec_of(state["opt_state"])
            updates, opt_state = fz.freeze(ADAM, now).update(grads, state["opt_state"], state["params"])
            return {"params": fz.apply_updates(state["params"], updates, now), "opt_state": opt_state}

        return step

    return make_step, {"params": PARAMS, "opt_state": tx.init(PARAMS)}, loss


def router(old, new, x):
    """The bias of a router, moved toward the experts with less load."""
    load = jnp.mean(jax.nn.softmax(x @ old["params"]["encoder"]["kernel"]), 0)
    bias = old["params"]["encoder"]["bias"] + 0.01 * jnp.sign(jnp.mean(load) - load)
    return {**new, "params": {**new["params"], "encoder": {**new["params"]["encoder"], "bias": bias}}}


class Norm(nn.Module):
    """A model with batch statistics."""

    train_encoder: bool

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=not self.train_encoder, name="encoder")(x)
        return nn.Dense(3, name="head")(x)


class WithStatistics(TrainState):
    batch_stats: dict


def linen(train_encoder):
    model = Norm(train_encoder)
    variables = model.init(jax.random.key(0), X)
    state = WithStatistics.create(apply_fn=model.apply, tx=fz.freeze(ADAMW, FROZEN), **variables)

    def loss(params, batch_stats, x, y):
        out, new = model.apply({"params": params, "batch_stats": batch_stats}, x, mutable=["batch_stats"])
        return jnp.mean((out - y) ** 2), new

    def make_step(loss):
        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, x, y):
            grad = fz.value_and_grad(loss, FROZEN, has_aux=True)
            (value, new), grads = grad(state.params, state.batch_stats, x, y)
            return state.apply_gradients(grads=grads).replace(**new), value

        return step

    return make_step, state, loss


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.encoder, self.head = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(self.norm(jnp.tanh(self.encoder(x)))))


def modules(freeze, tx):
    """An NNX step, which changes its model and optimizer in place."""
    model = TwoLayers(nnx.Rngs(0))
    if freeze:
        fnnx.freeze(model, FROZEN)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    def make_step(loss):
        @nnx.jit
        def step(state, x, y):
            model, optimizer = state
            value, grads = nnx.value_and_grad(loss)(model, x, y)
            optimizer.update(model, grads)
            return value

        return step

    return make_step, (model, optimizer), loss


def microbatches(tx, grad, begins=1.0):
    """Gradients that a scan over the examples adds up; those of the encoder are ``begins`` times in the first step."""

    def loss_of_one(params, x, y, share):
        return loss(params, x, y, lambda h: share * h + (1 - share) * jax.lax.stop_gradient(h))

    def make_step(loss_of_one):
        @jax.jit
        def step(state, x, y):
            params, opt_state = state
            shares = jnp.ones(len(x)).at[0].set(begins)
            like = jax.tree.map(jnp.zeros_like, jax.eval_shape(grad(loss_of_one), params, x[:1], y[:1], shares[:1]))

            def add(total, xy):
                return jax.tree.map(jnp.add, total, grad(loss_of_one)(params, *(each[None] for each in xy))), None

            grads, _ = jax.lax.scan(add, like, (x, y, shares))
            updates, opt_state = tx.update(grads, opt_state, params)
            return fz.apply_updates(params, updates), opt_state, jnp.zeros(())

        return step

    return make_step, (PARAMS, tx.init(PARAMS)), loss_of_one


def clip(tx):
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def partitioned(tx):
    """Only trainable parameters are in the optimizer and in the average."""
    trainable, rest = fz.partition(PARAMS, FROZEN)

    def make_step(loss):
        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, x, y):
            _, grads = jax.value_and_grad(fz.restrict(loss, state["rest"]))(state["trainable"], x, y)
            updates, opt_state = tx.update(grads, state["opt_state"], state["trainable"])
            trainable = fz.apply_updates(state["trainable"], updates)
            ema = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["ema"], trainable)
            return {**state, "trainable": trainable, "opt_state": opt_state, "ema": ema}, {
                "norm": optax.tree.norm(grads)
            }

        return step

    return make_step, {"trainable": trainable, "rest": rest, "opt_state": tx.init(trainable), "ema": trainable}, loss


def combined(state):
    return fz.combine(state["trainable"], state["rest"])


def labels_that_match_nothing():
    def labels(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "frozen" if "enc/" in str(path) else "train", params)

    return plain(optax.multi_transform({"train": ADAM, "frozen": optax.set_to_zero()}, labels))


def ones_that_decay():
    """A rate of 1e-7, of which rounding leaves one or two bits."""
    make_step, state, _ = plain(optax.adamw(1e-3), stopped)
    return make_step, {**state, "params": jax.tree.map(jnp.ones_like, PARAMS)}, stopped


def frozen_labels():
    labels = {"encoder": "frozen", "head": "frozen"}
    return plain(optax.multi_transform({"train": ADAM, "frozen": optax.set_to_zero()}, labels))


FREEZE = fz.freeze(ADAM, FROZEN)
DECAY = ("moved", "encoder/kernel", "weight decay")
TRAINS = ("moved", "encoder/kernel", "it trains")
STATE = ("state", "encoder/kernel", "state for frozen elements")
NORM = ("changed", "head/kernel", "a norm over frozen gradients")
FINITE = ("changed", "head/kernel", "a finite check over frozen gradients")
MOMENTS = ("moved", "encoder/kernel", "the state of an optimizer after the freeze")
READ_BY_STATE = "a gradient that is read by its state"
READ_BY_NORM = ("gradient", "encoder/kernel", "a gradient that is read by a norm or a finite check")

LEAKS = {
    "decay after stop_gradient": (lambda: plain(ADAMW, stopped), [DECAY, STATE]),
    "decay of one bit": (ones_that_decay, [DECAY, MOMENTS, STATE]),
    "moments behind optax.freeze": (lambda: plain(optax.chain(optax.freeze(TRUE), ADAM)), [MOMENTS, STATE]),
    "a clip outside": (lambda: plain(clip(FREEZE)), [NORM, READ_BY_NORM]),
    "a clip outside, a learning rate of zero": (
        lambda: plain(clip(fz.freeze(optax.sgd(0.0), FROZEN))),
        [NORM, READ_BY_NORM],
    ),
    "MultiSteps outside": (
        lambda: plain(optax.MultiSteps(FREEZE, 2).gradient_transformation()),
        [STATE, ("gradient", "encoder/kernel", "a gradient that is read by its state")],
    ),
    "apply_if_finite outside": (lambda: plain(optax.apply_if_finite(FREEZE, 5)), [FINITE, READ_BY_NORM]),
    "momentum left after freezing": (momentum_left, [MOMENTS, STATE]),
    "optax.masked for a freeze": (lambda: plain(optax.masked(ADAM, FALSE)), [TRAINS]),
    "an average that rounds": (
        lambda: average(lambda old, new: 0.9 * old + 0.1 * new),
        [("moved", "ema/encoder/kernel", "an average that rounds")],
    ),
    "batch statistics": (lambda: linen(True), [("moved", "batch_stats/encoder/mean", "statistics of a frozen module")]),
    "a router's bias": (
        lambda: then(router),
        [("moved", "encoder/bias", "a value from the batch, set outside of the optimizer")],
    ),
    "labels that match nothing": (labels_that_match_nothing, [TRAINS, STATE]),
    "labels that freeze everything": (frozen_labels, [("untrained", "head/kernel", "its gradient is ignored")]),
    "a flag that stops one output": (
        lambda: plain(ADAMW, lambda *args: loss(*args, jax.lax.stop_gradient)),
        [DECAY, STATE],
    ),
    "a resumed state of another spec": (
        another_spec,
        [("moved", "encoder/kernel", "the state of fz.freeze has another spec")],
    ),
    "a product with a mask": (
        lambda: plain(
            optax.chain(SGD, optax.stateless(lambda u, p: {**u, "encoder": optax.tree.scale(0, u["encoder"])}))
        ),
        [("moved", "encoder/kernel", "a product with zero: NaN * 0 is NaN")],
    ),
    "noise": (
        lambda: plain(optax.chain(FREEZE, optax.add_noise(0.1, 0.5, key=0))),
        [("moved", "encoder/kernel", "another part of the step")],
    ),
    "a distance from the start": (
        lambda: plain(optax.chain(optax.contrib.dog(1.0), fz.masked_zero_updates(FROZEN))),
        [NORM, STATE],
    ),
    "a clip of gradients from a scan": (lambda: microbatches(clip(FREEZE), jax.grad), [NORM, READ_BY_NORM]),
    "a clip of gradients that are zero in the first step of a scan": (
        lambda: microbatches(clip(FREEZE), jax.grad, begins=0.0),
        [NORM, READ_BY_NORM],
    ),
    "an NNX model that nothing freezes": (lambda: modules(False, ADAM), [TRAINS, STATE]),
}

RIGHT = {
    "fz.freeze": lambda: plain(fz.freeze(clip(ADAMW), FROZEN)),
    "fz.value_and_grad, a clip outside": lambda: plain(clip(FREEZE), grad=lambda loss: fz.value_and_grad(loss, FROZEN)),
    "MultiSteps inside": lambda: plain(fz.freeze(optax.MultiSteps(ADAMW, 2), FROZEN)),
    "fz.partition, with an average": lambda: partitioned(clip(ADAMW)),
    "optax.multi_transform": lambda: plain(
        optax.multi_transform({"t": ADAMW, "f": optax.set_to_zero()}, {"encoder": "f", "head": "t"})
    ),
    "optax.masked and set_to_zero": lambda: plain(
        optax.chain(optax.masked(ADAMW, FALSE), optax.masked(optax.set_to_zero(), TRUE))
    ),
    "an average that keeps bits": lambda: average(lambda old, new: old + 0.1 * (new - old)),
    "stop_gradient and plain SGD": lambda: plain(SGD, stopped),
    "Linen, statistics kept": lambda: linen(False),
    "NNX, fnnx.freeze": lambda: modules(True, clip(ADAMW)),
    "a gradient of zero": lambda: plain(fz.freeze(ADAM, FROZEN), zero_in_head),
    "a warm-up from zero": lambda: plain(fz.freeze(optax.sgd(optax.linear_schedule(0, 0.1, 10)), FROZEN)),
    "micro-batches": lambda: microbatches(clip(FREEZE), lambda loss: fz.grad(loss, FROZEN)),
    "freeze_when": lambda: plain(fz.freeze_when(ADAM, {"encoder": True})),
    "apply_if_finite inside": lambda: plain(fz.freeze(optax.apply_if_finite(ADAM, 5), FROZEN)),
}


OF_A_GROUP = (
    "gradients of 2 frozen leaves are computed, but no parameter and no state depends on them:"
    " results beside the state, a callback or what did not run may read them"
)


def audit(made, **kwargs):
    make_step, state, loss = made()
    params = "0" if type(state) is tuple else combined if isinstance(state, dict) and "rest" in state else "params"
    return fz.audit_step(make_step, state, X, Y, loss=loss, params=params, frozen=FROZEN, **kwargs)


def found(report):
    return {(leak.kind, leak.path, leak.cause) for leak in report.leaks}


@pytest.mark.parametrize(("made", "expected"), LEAKS.values(), ids=LEAKS)
def test_a_leaking_step_is_named_with_its_cause(made, expected):
    report = audit(made)
    assert set(expected) <= found(report)
    for leak in report.leaks:
        assert leak.got in str(report) or leak.path in str(report)


@pytest.mark.parametrize("made", RIGHT.values(), ids=RIGHT)
def test_a_right_step_passes(made):
    report = audit(made)
    report.raise_for_leaks()
    assert not re.sub(r" \(\d+ of \d+ FLOPs\)", "", report.note).replace(OF_A_GROUP, "")


def test_the_flops_of_frozen_gradients_are_those_that_a_restricted_gradient_saves():
    """The encoder's kernel and bias, and the activations between them and the head."""
    report = audit(lambda: plain(clip(FREEZE)))
    flops = {leak.path: leak.flops for leak in report.leaks if leak.kind == "gradient"}
    matmul = 2 * 4 * 3 * 3
    assert flops["encoder/kernel"] == flops["encoder/bias"] > 2 * matmul


ROWS = {"layers": fz.rows(slice(0, 2)), "head": False}
STACK = {"layers": jnp.stack([numbers(3, 3), numbers(3, 3) + 0.1, numbers(3, 3) - 0.1]), "head": numbers(3, 3)}


@pytest.mark.parametrize(
    ("tx", "zeroed", "expected"),
    [
        (
            clip(fz.freeze(ADAMW, ROWS)),
            False,
            {("changed", "head", NORM[2]), ("changed", "layers", NORM[2]), ("gradient", "layers", READ_BY_NORM[2])},
        ),
        (ADAMW, True, {("moved", "layers", DECAY[2]), ("moved", "layers", MOMENTS[2]), ("state", "layers", STATE[2])}),
        (fz.freeze(clip(ADAMW), ROWS), False, set()),
        (SGD, True, set()),
    ],
    ids=["a clip outside", "rows set to zero before AdamW", "right", "rows set to zero before SGD"],
)
def test_rows(tx, zeroed, expected):
    def loss(params, x, y):
        x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, params["layers"])
        return jnp.mean((x @ params["head"] - y) ** 2)

    def make_step(loss):
        @jax.jit
        def step(state, x, y):
            grads = jax.grad(loss)(state[0], x, y)
            if zeroed:
                grads["layers"] = jnp.where(jnp.arange(3)[:, None, None] < 2, 0, grads["layers"])
            updates, opt_state = tx.update(grads, state[1], state[0])
            return fz.apply_updates(state[0], updates), opt_state

        return step

    state = STACK, tx.init(STACK)
    assert found(fz.audit_step(make_step, state, X, Y, loss=loss, params="0", frozen=ROWS)) == expected


def not_traceable(tx):
    make_plain, state, _ = plain(tx)

    def make_step(loss):
        step = make_plain(loss)

        def reads_the_loss(state, x, y):
            new, value = step(state, x, y)
            return new if float(value) < np.inf else state

        return reads_the_loss

    return make_step, state, loss


def logged(tx, times=1):
    def make_step(loss):
        def one(state, x, y):
            grads = jax.grad(loss)(state[0], x, y)
            updates, opt_state = tx.update(grads, state[1], state[0])
            return (optax.apply_updates(state[0], updates), opt_state), {"norm": optax.tree.norm(grads)}

        several = lambda state, x, y: jax.lax.scan(lambda s, _: one(s, x, y), state, None, length=times)  # noqa: E731
        return jax.jit(one if times == 1 else several)

    return make_step, (PARAMS, tx.init(PARAMS)), loss


def by_hand(loss):
    return lambda params, x, y: (loss(params, x, y), jax.tree.map(jnp.ones_like, params))


def other_loss(tx):
    make_step, state, loss = plain(tx)
    return lambda _: make_step(loss), state, loss


def forward_mode(loss):
    return lambda *args: (loss(*args), jax.jacfwd(loss)(*args))


def with_decay(loss):
    """Beside the gradient of the loss, that of another one, clipped by the norm over all leaves."""

    def grad(params, x, y):
        value, grads = jax.value_and_grad(fz.freeze_loss(loss, FROZEN))(params, x, y)
        size = lambda params: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))  # noqa: E731
        decay, _ = optax.clip_by_global_norm(1.0).update(jax.grad(size)(params), optax.EmptyState())
        return value, jax.tree.map(jnp.add, grads, decay)

    return grad


OF_VALUES = "trainable leaves depend on frozen values without the gradient of a given loss (head/kernel)"
NOT_KNOWN = "which gradients of frozen parameters are computed, and what reads them, is not known"
LOGGED = "but no parameter and no state depends on them: results"


@pytest.mark.parametrize(
    ("made", "note", "leaks"),
    [
        (lambda: not_traceable(FREEZE), "", set()),
        (lambda: not_traceable(ADAMW), "", {TRAINS, STATE, ("gradient", "encoder/kernel", READ_BY_STATE)}),
        (lambda: logged(FREEZE), LOGGED, set()),
        (lambda: logged(FREEZE, times=2), LOGGED, set()),
        (
            lambda: plain(FREEZE, grad=by_hand),
            f"the step takes no gradient of the loss, which it calls: {NOT_KNOWN}",
            set(),
        ),
        (
            lambda: other_loss(FREEZE),
            f"the loss is not called by the step that `make_step` returns: {NOT_KNOWN}",
            set(),
        ),
        (lambda: plain(FREEZE, grad=with_decay), OF_VALUES, set()),
        (lambda: plain(FREEZE, grad=forward_mode), "as in forward mode (TypeError", set()),
    ],
    ids=[
        "not traceable",
        "not traceable, a leak",
        "a logged norm",
        "several steps",
        "by hand",
        "another",
        "decay",
        "forward mode",
    ],
)
def test_what_is_not_known_is_in_the_note(made, note, leaks):
    report = audit(made)
    assert note in report.note
    assert {leak for leak in found(report) if leak[1] == "encoder/kernel"} == leaks


def gradients_leave(loss):
    grad = jax.jit(jax.grad(loss))

    def step(state, x, y):
        updates, opt_state = FREEZE.update(grad(state["params"], x, y), state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    return step


def some_gradients_leave(loss):
    """Of the gradients that leave, a norm reads that of one frozen leaf."""
    grad = jax.jit(jax.grad(loss))

    def step(state, x, y):
        grads = grad(state["params"], x, y)
        grads["head"] = jax.tree.map(lambda g: g / optax.tree.norm(grads["encoder"]["kernel"]), grads["head"])
        updates, opt_state = FREEZE.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    return step


def eagerly(loss):
    def step(state, x, y):
        updates, opt_state = FREEZE.update(jax.grad(loss)(state["params"], x, y), state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    return step


def actor_and_critic(loss_of_actor, loss_of_critic):
    @jax.jit
    def step(state, x, y):
        actor, critic = state["params"]["actor"], state["params"]["critic"]
        grads = {"actor": jax.grad(loss_of_actor)(actor, x, y), "critic": jax.grad(loss_of_critic)(critic, x, y)}
        grads["critic"] = jax.tree.map(lambda g: g / optax.tree.norm(grads["critic"]), grads["critic"])
        updates, opt_state = NETWORKS.update(grads, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    return step


def other_values(loss):
    """What the loss gets has the paths and the shapes of the parameters, but not their order."""

    @jax.jit
    def step(state, x, y):
        grads = jax.grad(lambda params: loss(jax.tree.map(jnp.transpose, params), x, y))(state["params"])
        updates, opt_state = SQUARE.update(grads, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    return step


def quantized(loss):
    """Integers of a frozen module that move, beside a frozen key that does."""

    def step(state, x, y):
        codes, key = state["params"]["codes"], state["params"]["key"]
        return {"params": {**state["params"], "codes": codes + 1, "key": jax.random.split(key)[0]}}

    return step


def a_late_branch(loss):
    @jax.jit
    def step(state, x, y):
        grads = fz.grad(loss, FROZEN)(state["params"], x, y)
        params = fz.apply_updates(state["params"], jax.tree.map(lambda g: -0.1 * g, grads))
        shrunk = lambda params: jax.tree.map(lambda leaf: 0.9 * leaf, params)  # noqa: E731
        params = jax.lax.cond(jnp.max(x) > 50, shrunk, lambda params: params, params)
        return {"params": jax.lax.optimization_barrier(params)}

    return step


CLIPPED = ("changed", "head"), ("gradient", "encoder")


def head_alone(loss):
    """The loss gets a part of the parameters, and the step is random."""

    def step(state, x, y):
        head = jax.tree.map(
            lambda p, g: p - 0.1 * g, state["params"]["head"], jax.grad(loss)(state["params"]["head"], x)
        )
        seen = state["seen"] + RANDOM.random()
        return {"params": {**state["params"], "head": head}, "seen": seen}

    return step


def on_a_device(loss):
    """What the loss gets has no axis of devices; of the second leaf, other devices freeze other rows."""

    @jax.jit
    def step(state, x, y):
        grads = jax.vmap(jax.grad(loss), (0, None))(state["params"], x)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return {"params": fz.apply_updates(state["params"], jax.tree.map(lambda g: g / norm, grads), ON_DEVICES)}

    return step


RANDOM = np.random.default_rng(0)
ON_DEVICES = fz.rules({"a": fz.rows([0], axis=1), "b": fz.rows([0])})
NETWORKS = fz.freeze(optax.sgd(0.1), "*/encoder")
OF_SQUARE = fz.rules({"kernel": fz.rows([0, 1])})
SQUARE = fz.freeze(clip(optax.sgd(0.1)), OF_SQUARE)
MANY = {"head": numbers(3), **{f"layer_{n:02}": numbers(3) + n for n in range(20)}}
HEAD_ALONE = (
    head_alone,
    {"encoder": {"kernel": numbers(3)}, "head": {"weight": numbers(3)}},
    None,
    lambda head, x: jnp.sum((head["weight"] * x) ** 2),
    "encoder",
    set(),
)
BRANCH = "no run took a branch that can write encoder/bias, encoder/kernel: whether it does is not known"


@pytest.mark.parametrize(
    ("make_step", "params", "tx", "loss", "frozen", "expected", "note"),
    [
        (gradients_leave, PARAMS, FREEZE, loss, FROZEN, {"gradient encoder/bias", "gradient encoder/kernel"}, ""),
        (
            some_gradients_leave,
            PARAMS,
            FREEZE,
            loss,
            FROZEN,
            {"gradient encoder/bias", "gradient encoder/kernel", "changed head/bias", "changed head/kernel"},
            "",
        ),
        (eagerly, PARAMS, FREEZE, loss, FROZEN, set(), LOGGED),
        (a_late_branch, PARAMS, None, loss, FROZEN, set(), BRANCH),
        (
            actor_and_critic,
            {"actor": PARAMS, "critic": jax.tree.map(lambda x: x + 0.1, PARAMS)},
            NETWORKS,
            {"actor": loss, "critic": loss},
            "*/encoder",
            {f"{leak} critic/{at}/{name}" for leak, at in CLIPPED for name in ("bias", "kernel")},
            "",
        ),
        (
            actor_and_critic,
            {"actor": PARAMS, "critic": jax.tree.map(lambda x: x + 0.1, PARAMS)},
            NETWORKS,
            (loss, loss),
            "*/encoder",
            set(),
            "what a loss gets may be one of several parts (actor and critic): which gradients of frozen parameters",
        ),
        (
            other_values,
            {"kernel": numbers(3, 3), "out": numbers(3, 3) + 0.1},
            SQUARE,
            lambda params, x, y: jnp.mean((jnp.tanh(x @ params["kernel"]) @ params["out"] - y) ** 2),
            OF_SQUARE,
            set(),
            "a loss gets other values of kernel than the parameters have",
        ),
        (
            *HEAD_ALONE,
            "1 frozen leaf is given to no loss (encoder/kernel): whether a gradient of them is computed is not known",
        ),
        (*HEAD_ALONE, "two equal runs differ (seen): what this depends on is not known"),
        (
            on_a_device,
            {"a": jnp.stack([numbers(3, 2)] * 2), "b": jnp.stack([numbers(3, 2)] * 2)},
            None,
            lambda params, x: jnp.sum((x @ params["a"]) ** 2) + jnp.sum((x @ params["b"]) ** 4),
            ON_DEVICES,
            {"changed a", "changed b", "gradient a"},
            "a loss gets a part of b, of which some elements are frozen",
        ),
        (
            quantized,
            {"codes": jnp.arange(3, dtype=jnp.int8), "key": jax.random.key(0), "head": jnp.ones(3)},
            None,
            loss,
            ["codes", "key"],
            {"moved codes", "moved key"},
            "is not called",
        ),
        (
            plain_step(clip(fz.freeze(ADAM, "layer_*"))),
            MANY,
            clip(fz.freeze(ADAM, "layer_*")),
            lambda params, x, y: sum(jnp.sum((leaf - x[0] * y[0]) ** 2) for leaf in params.values()),
            "layer_*",
            {"changed head", *(f"gradient layer_{n:02}" for n in range(20))},
            "",
        ),
    ],
    ids=[
        *(
            "leave",
            "some leave",
            "eagerly",
            "a branch",
            "by path",
            "of several parts",
            "other values",
            "head alone",
            "random",
            "on a device",
        ),
        *("integers and keys", "many leaves"),
    ],
)
def test_other_steps(make_step, params, tx, loss, frozen, expected, note):
    state = {"params": params} | ({} if tx is None else {"opt_state": tx.init(params)})
    state |= {"seen": jnp.zeros(())} if make_step is head_alone else {}
    report = fz.audit_step(make_step, state, X, Y, loss=loss, params="params", frozen=frozen)
    assert {f"{leak.kind} {leak.path}" for leak in report.leaks} == expected
    assert note in report.note if note else not report.note
    assert ("changed together with" in str(report)) == (len(params) > 16)


class TestOptions:
    def audit(self, change=lambda step: step, **options):
        make_step, state, loss = plain(FREEZE)
        made = lambda loss: change(make_step(loss))  # noqa: E731
        return fz.audit_step(made, state, X, loss=loss, params="params", frozen=FROZEN, **options)

    def test_a_step_that_checks_its_batch(self):
        def checked(step):
            def with_offsets(state, x, offsets):
                if not isinstance(offsets, jax.core.Tracer) and bool((jnp.diff(offsets) < 0).any()):
                    raise ValueError("offsets must be sorted")
                return step(state, x, Y)

            return lambda state, x, *, offsets: with_offsets(state, x, offsets)

        report = self.audit(checked, offsets=jnp.array([0, 2, 5]))
        assert report
        assert "does not run with another batch (ValueError: offsets must be sorted)" in report.note
        assert "batch" not in self.audit(checked, offsets=jnp.array([0, 2, 5]), other_batch=False).note

    def test_other_values_of_the_user(self):
        calls = []

        def watched(step):
            def step_of(state, x, y):
                calls.append(state["params"]["encoder"]["bias"])
                return step(state, x, y)

            return step_of

        values = jax.tree.map(lambda leaf: leaf + 7, PARAMS)
        report = self.audit(watched, y=Y, other_values=values)
        assert report.calls == len(calls)
        assert any(not isinstance(x, jax.core.Tracer) and float(x[0]) == 7 for x in calls)
        assert self.audit(watched, y=Y, other_values=False).calls == report.calls - 3


def test_shared_nnx_variables_stay_shared():
    make_step, (model, _), loss = modules(True, ADAM)
    model.other = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
    model.other.kernel = model.head.kernel
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    assert fz.audit_step(make_step, (model, optimizer), X, Y, loss=loss, params="0", frozen=FROZEN).ok


def test_a_single_trainable_leaf_of_the_shape_of_a_frozen_one():
    make_step, state, _ = plain(clip(fz.freeze(ADAM, fz.all_except("head/bias"))))
    report = fz.audit_step(make_step, state, X, Y, loss=loss, params="params", frozen=fz.all_except("head/bias"))
    paths = {leak.path for leak in report.leaks if leak.kind == "gradient"}
    assert paths == {"encoder/bias", "encoder/kernel", "head/kernel"}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_group_that_thaws_later_is_no_leak(decay):
    """A later step that moves the group by itself is one, also of a leaf of that group."""
    tx = fz.freeze_when(SGD, {FROZEN: fz.unfreeze_at(50)})

    def make_step(loss):
        train = fz.train_step(loss, tx)

        def step(state, x, y):
            params, opt_state, _ = train(state["online"], state["opt"], x, y)
            count = state["count"] + 1
            late = jnp.where(count > 50, 1 - decay, 1.0)
            params["encoder"]["kernel"] *= late
            return {"online": params, "target": state["target"], "opt": opt_state, "count": count}

        return step

    state = {"online": PARAMS, "target": jax.tree.map(jnp.copy, PARAMS), "opt": tx.init(PARAMS), "count": jnp.array(0)}
    both = lambda state: {"online": state["online"], "target": state["target"]}  # noqa: E731
    audit = fz.audit_step(make_step, state, X, Y, loss=loss, params=both, frozen=["online/encoder", "target"])
    found = [(leak.kind, leak.path) for leak in audit.leaks]
    assert found == ([("moved", "online/encoder/kernel")] if decay else [])
    assert "online/encoder/bias moves in a later step (counters at 100), as a schedule may want it" in audit.note


def test_the_state_is_not_changed():
    for made in (lambda: modules(False, ADAM), lambda: linen(True)):
        make_step, state, loss = made()
        numbers = [x for x in jax.tree.leaves(state) if getattr(x, "dtype", None) == np.float32]
        before = list(map(np.array, numbers))
        params = "0" if isinstance(state, tuple) else "params"
        fz.audit_step(make_step, state, X, Y, loss=loss, params=params, frozen=FROZEN, steps=1)
        assert [x.tobytes() for x in before] == [np.asarray(x).tobytes() for x in numbers]


def test_errors_of_the_step_are_passed_on():
    def step(state, x):
        raise KeyError("missing")

    with pytest.raises(KeyError) as error:
        fz.audit_step(step, PARAMS, X, params="", frozen=FROZEN)
    assert error.value.__notes__ == ["fz.audit_step: from step(state, *batch)"]
