"""Training steps of every kind: those that freeze as they should have no leak, and each leak of the others is named."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_freeze as fz

SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
X, Y = (np.asarray(jax.random.normal(jax.random.key(i), (4, 6))) for i in range(2))
SCALE, KERNEL, HEAD = 1 + 0.1 * np.arange(6, dtype=np.float32), np.cos(np.arange(36.0).reshape(6, 6)), np.eye(6) + 0.1
PARAMS = jax.tree.map(
    lambda x: jnp.asarray(x, jnp.float32), {"base": {"scale": SCALE, "kernel": KERNEL}, "head": {"kernel": HEAD}}
)
FROZEN = "base"
tree = jax.tree.map


def forward(params, x):
    return jnp.tanh(x * params["base"]["scale"] @ params["base"]["kernel"]) @ params["head"]["kernel"]


def loss(params, x, y):
    return jnp.mean((forward(params, x) - y) ** 2)


GRAD = jax.grad(loss)


def make(update, tx=None, grads=GRAD, **more):
    """A jitted step: gradients, what ``update(state, grads, x, y)`` changes in the state, the optimizer."""
    tx = fz.freeze(ADAM, FROZEN) if tx is None else tx

    @jax.jit
    def step(state, x, y):
        found = grads(state["params"], x, y)
        new = update({**state}, found, x, y)
        found = new.pop("grads", found)
        updates, opt = tx.update(found, state["opt"], state["params"])
        return {**new, "params": optax.apply_updates(new["params"], updates), "opt": opt}

    return step, {"params": PARAMS, "opt": tx.init(PARAMS), **more}


def plain(tx=None, grads=GRAD):
    return make(lambda state, *_: state, tx, grads)


# Right steps.


def adversarial():
    """The gradient of the input has the shape of the scale for each example."""

    def grads(params, x, y):
        attack = jax.grad(loss, 1)(params, x, y)
        return jax.grad(loss)(params, x + 0.1 * jnp.sign(attack), y)

    return plain(grads=grads)


def adversarial_by_norm():
    def grads(params, x, y):
        attack = jax.vmap(jax.grad(lambda x, y: loss(params, x[None], y[None])))(x, y)
        attack = attack / (1e-6 + jnp.linalg.norm(attack, axis=1, keepdims=True))
        return jax.grad(loss)(params, x + attack, y)

    return plain(grads=grads)


def virtual_adversarial():
    def grads(params, x, y):
        out = forward(params, x)
        distance = lambda d: jnp.mean((forward(params, x + d) - out) ** 2)  # noqa: E731
        d = jax.grad(distance)(0.1 * y)
        d = d / (1e-6 + optax.tree.norm(d))
        return jax.grad(lambda p: loss(p, x, y) + jnp.mean((forward(p, x + d) - out) ** 2))(params)

    return plain(grads=grads)


def gradient_caching():
    """Gradients of representations first, then of the encoder with these as weights."""

    def grads(params, x, y):
        out = forward(params, x)
        cached = jax.grad(lambda z: jnp.mean((z @ z.T - y @ y.T) ** 2))(out)
        cached = cached / jnp.maximum(optax.tree.norm(cached), 1.0)
        return jax.grad(lambda p: jnp.sum(forward(p, x) * cached))(params)

    return plain(grads=grads)


def energy_model():
    def grads(params, x, y):
        energy = lambda p, x: jnp.mean(jnp.sum(forward(p, x), -1))  # noqa: E731
        sample = y
        for _ in range(2):
            move = jax.grad(energy, 1)(params, sample)
            sample = sample - 0.1 * move / (1 + optax.tree.norm(move))
        return jax.grad(lambda p: energy(p, x) - energy(p, sample))(params)

    return plain(grads=grads)


def single_example_energy():
    """The gradient of a single input has the shape of the scale."""

    def grads(params, x, y):
        move = jax.grad(lambda v: loss(params, v[None], y[:1]))(x[0])
        return jax.grad(loss)(params, x - move / (1 + jnp.linalg.norm(move)), y)

    return plain(grads=grads)


def ddpg():
    """The actor moves along the gradient of the critic's input."""

    def grads(params, x, y):
        action = forward(params, x)
        slope = jax.grad(lambda a: jnp.sum(jnp.tanh(a * params["base"]["scale"])))(action)
        slope = slope / (1e-3 + optax.tree.norm(slope))
        return jax.grad(lambda p: -jnp.sum(forward(p, x) * slope))(params)

    return plain(grads=grads)


def scope_called_as_a_backward_pass():
    _, state = plain()

    @jax.jit
    def named(state, x, y):
        grads = jax.grad(loss)(state["params"], x, y)
        with jax.named_scope("transpose(jvp(k))"):
            updates, opt = fz.freeze(ADAM, FROZEN).update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    return named, state


def target_network(rate, hard=False):
    def update(state, grads, x, y):
        target = tree(lambda t, p: p if hard else t + rate * (p - t), state["target"], state["params"])
        return {**state, "target": target}

    def grads(params, x, y):
        return jax.grad(loss)(params, x, y)

    return make(update, grads=grads, target=PARAMS)


def target_that_the_loss_reads():
    tx = fz.freeze(ADAM, FROZEN)

    @jax.jit
    def step(state, x, y):
        grads = jax.grad(loss)(state["params"], x, forward(state["target"], x))
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        target = tree(lambda t, p: jnp.where(state["n"] % 2 == 0, p, t), state["target"], params)
        return {"params": params, "opt": opt, "target": target, "n": state["n"] + 1}

    return step, {
        "params": PARAMS,
        "opt": tx.init(PARAMS),
        "target": tree(lambda p: p + 0.1, PARAMS),
        "n": jnp.int32(0),
    }


def dpo():
    """A reference policy, which only the loss reads."""
    tx = fz.freeze(ADAM, FROZEN)

    @jax.jit
    def step(state, x, y):
        def of(params):
            margin = jnp.sum((forward(params, x) - forward(state["reference"], x)) * y, -1)
            return -jnp.mean(jax.nn.log_sigmoid(margin))

        grads = jax.grad(of)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}

    return step, {"params": PARAMS, "opt": tx.init(PARAMS), "reference": PARAMS}


def lookahead():
    """Slow weights, which every second step averages with the parameters."""
    tx = fz.freeze(ADAM, FROZEN)

    @jax.jit
    def step(state, x, y):
        updates, opt = tx.update(GRAD(state["params"], x, y), state["opt"], state["params"])
        fast = optax.apply_updates(state["params"], updates)
        sync = state["n"] % 2 == 1
        slow = tree(lambda old, new: jnp.where(sync, 0.5 * old + 0.5 * new, old), state["slow"], fast)
        params = tree(lambda slow, fast: jnp.where(sync, slow, fast), slow, fast)
        return {"params": params, "opt": opt, "slow": slow, "n": state["n"] + 1}

    return step, {"params": PARAMS, "opt": tx.init(PARAMS), "slow": PARAMS, "n": jnp.int32(0)}


def best_so_far():
    def update(state, grads, x, y):
        value = loss(state["params"], x, y)
        better = value < state["value"]
        best = tree(lambda b, p: jnp.where(better, p, b), state["best"], state["params"])
        return {**state, "best": best, "value": jnp.minimum(value, state["value"])}

    return make(update, best=PARAMS, value=jnp.float32(np.inf))


def rollback():
    """The best parameters come back after a loss that is not finite."""
    tx = fz.freeze(ADAM, FROZEN)

    @jax.jit
    def step(state, x, y):
        value, grads = jax.value_and_grad(loss)(state["params"], x, y)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = optax.apply_updates(state["params"], updates)
        new = tree(lambda b, p: jnp.where(jnp.isfinite(value), p, b), state["best"], new)
        return {"params": new, "opt": opt, "best": new}

    return step, {"params": PARAMS, "opt": tx.init(PARAMS), "best": PARAMS}


def with_carry(name, of, start):
    """State that the forward pass of a module computes."""

    def update(state, grads, x, y):
        return {**state, name: tree(lambda old: of(state["params"], old, x), state[name])}

    return make(update, **{name: start})


def decode_cache():
    def of(params, old, x):
        return jax.lax.dynamic_update_slice(old, x[:1] * params["base"]["scale"], (0, 0))

    return with_carry("cache", of, {"base": {"kernel": jnp.zeros((6, 6))}})


def rnn_carry():
    return with_carry(
        "carry", lambda p, old, x: jnp.tanh(old * p["base"]["scale"] + x[0]), {"base": {"h": jnp.ones(6)}}
    )


def codebook():
    """Averages of what is assigned to the codes of a frozen module; its loss reads them."""
    tx = fz.freeze(ADAM, FROZEN)

    @jax.jit
    def step(state, x, y):
        codes = state["codes"]["base"]["embedding"]
        grads = jax.grad(lambda p: loss(p, x, y) + jnp.mean((forward(p, x)[:, None] - codes) ** 2))(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        codes = 0.9 * codes + 0.1 * jnp.mean(forward(state["params"], x), 0)
        new = {"base": {"embedding": codes}}
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "codes": new}

    return step, {"params": PARAMS, "opt": tx.init(PARAMS), "codes": {"base": {"embedding": jnp.ones((6, 6))}}}


def batch_renorm():
    """Batch statistics of a frozen module, which the loss reads."""
    tx = fz.freeze(SGD, FROZEN)

    @jax.jit
    def step(state, x, y):
        mean = state["stats"]["base"]["mean"]

        def of(params):
            shift = jax.lax.stop_gradient(jnp.clip(jnp.mean(x, 0) - mean, -5, 5))
            return loss(params, x - jnp.mean(x, 0) + shift, y)

        updates, opt = tx.update(jax.grad(of)(state["params"]), state["opt"], state["params"])
        stats = {"base": {"mean": 0.9 * mean + 0.1 * jnp.mean(x, 0)}}
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "stats": stats}

    return step, {"params": PARAMS, "opt": tx.init(PARAMS), "stats": {"base": {"mean": jnp.zeros(6)}}}


def router_bias():
    """A bias beside the parameters, which is set by the load, and which the next step reads."""
    tx = fz.freeze(ADAM, FROZEN)

    @jax.jit
    def step(state, x, y):
        def of(params):
            gate = jax.nn.softmax(x @ params["base"]["kernel"] + jax.lax.stop_gradient(state["bias"]))
            return jnp.mean((forward(params, x) * gate - y) ** 2), gate

        grads, gate = jax.grad(of, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        load = jnp.mean(gate, 0)
        bias = state["bias"] + 0.01 * jnp.sign(jnp.mean(load) - load)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "bias": bias}

    return step, {"params": PARAMS, "opt": tx.init(PARAMS), "bias": jnp.zeros(6)}


def actor_critic(actor_tx, critic_tx):
    """Two networks with two losses, of which each has a base, with an optimizer each."""

    @jax.jit
    def step(state, x, y):
        params = state["params"]
        critic = jax.grad(lambda p: jnp.mean((jnp.sum(forward(p, x), -1) - jnp.sum(y, -1)) ** 2))(params["critic"])
        advantage = jax.lax.stop_gradient(jnp.sum(y - forward(params["critic"], x), -1))
        actor = jax.grad(lambda p: -jnp.mean(advantage * jnp.sum(jax.nn.log_softmax(forward(p, x)), -1)))(
            params["actor"]
        )
        u, a = actor_tx.update(actor, state["a"], params["actor"])
        v, c = critic_tx.update(critic, state["c"], params["critic"])
        new = {"actor": optax.apply_updates(params["actor"], u), "critic": optax.apply_updates(params["critic"], v)}
        return {"params": new, "a": a, "c": c}

    params = {"actor": PARAMS, "critic": tree(lambda x: 0.9 * x + 0.05, PARAMS)}
    return step, {"params": params, "a": actor_tx.init(PARAMS), "c": critic_tx.init(PARAMS)}


def gan_step_of_the_discriminator():
    """The generator trains in another step."""
    frozen = fz.freeze(ADAM, FROZEN)

    @jax.jit
    def step(state, x, y):
        of = lambda d: jnp.mean(jax.nn.softplus(forward(d, forward(state["params"]["g"], x))) - forward(d, y))  # noqa: E731
        updates, opt = frozen.update(jax.grad(of)(state["params"]["d"]), state["opt"], state["params"]["d"])
        return {"params": {**state["params"], "d": optax.apply_updates(state["params"]["d"], updates)}, "opt": opt}

    params = {"g": tree(lambda x: x + 0.01, PARAMS), "d": PARAMS}
    return step, {"params": params, "opt": frozen.init(PARAMS)}


def dp_sgd(grad):
    """Gradients of each example, clipped one by one."""

    def grads(params, x, y):
        each = jax.vmap(lambda x, y: grad(loss)(params, x[None], y[None]))(x, y)
        norms = jax.vmap(optax.tree.norm)(each)
        return tree(lambda g: jnp.tensordot(1 / jnp.maximum(1, 10 * norms), g, 1) / 4, each)

    return plain(grads=grads)


def numpyro(zeroed):
    """Adam with its moments in a list of leaves, in an order of its own."""

    def start(params):
        return [(leaf, jnp.zeros_like(leaf), jnp.zeros_like(leaf)) for leaf in jax.tree.leaves(params)[::-1]]

    treedef = jax.tree.structure(PARAMS)
    is_frozen = jax.tree.leaves(fz.resolve(PARAMS, FROZEN))[::-1]

    @jax.jit
    def step(state, x, y):
        params = jax.tree.unflatten(treedef, [leaf[0] for leaf in state["adam"]][::-1])
        grads = jax.tree.leaves(jax.grad(loss)(params, x, y))[::-1]

        def update(leaf, grad, frozen):
            p, m, v = leaf
            if frozen and not zeroed:
                return leaf
            m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
            return (p if frozen else p - 0.1 * m / (1e-8 + jnp.sqrt(v))), m, v

        return {"adam": [update(*each) for each in zip(state["adam"], grads, is_frozen, strict=True)]}

    return step, {"adam": start(PARAMS)}


def of_numpyro(state):
    return jax.tree.unflatten(jax.tree.structure(PARAMS), [leaf[0] for leaf in state["adam"]][::-1])


def moments_of_8_bits(frozen):
    """Codes of 8 bits, with a scale for the leaf."""

    def update(state, grads, x, y):
        def code(old, grad):
            moment = 0.9 * old[0].astype(jnp.float32) * old[1] + 0.1 * grad.ravel()
            scale = jnp.max(jnp.abs(moment)) / 127
            return jnp.round(moment / scale).astype(jnp.int8), scale

        leaves = jax.tree.leaves(grads)
        codes = [
            old if i < frozen else code(old, g) for i, (old, g) in enumerate(zip(state["codes"], leaves, strict=True))
        ]
        return {**state, "codes": codes}

    start = [(jnp.zeros(leaf.size, jnp.int8), jnp.float32(1)) for leaf in jax.tree.leaves(PARAMS)]
    return make(update, codes=start)


def quantized_base(moves, zero_moves=0):
    """Codes of 8 bits, and the code of zero."""
    params = {
        "base": {"codes": jnp.arange(36, dtype=jnp.int8).reshape(6, 6), "zero": jnp.int32(3)},
        "head": PARAMS["head"],
    }

    @jax.jit
    def step(state, x, y):
        codes, zero = state["params"]["base"]["codes"], state["params"]["base"]["zero"]
        of = lambda h: jnp.mean((x @ (codes - zero).astype(jnp.float32) @ h["kernel"] - y) ** 2)  # noqa: E731
        head = tree(lambda h, g: h - 0.1 * g, state["params"]["head"], jax.grad(of)(state["params"]["head"]))
        return {"params": {"base": {"codes": codes + moves, "zero": zero + zero_moves}, "head": head}}

    return step, {"params": params}


def own_check(change=lambda offsets: offsets):
    """A step that refuses offsets that are not sorted."""
    step, state = plain()

    def checked(state, x, y):
        offsets = change(y)
        if not isinstance(offsets, jax.core.Tracer) and bool((jnp.diff(offsets) < 0).any()):
            raise ValueError("offsets must be sorted")
        return step(state, x, x)

    return checked, state


def offloaded():
    tx = fz.freeze(ADAM, "layers")
    params = {"layers": jnp.stack([KERNEL, KERNEL.T]), "head": PARAMS["head"]["kernel"]}
    params = fz.offload(tree(jnp.float32, params), "layers", min_bytes=0)

    def of(params, x, y):
        x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, params["layers"])
        return jnp.mean((x @ params["head"] - y) ** 2)

    def step(state, x, y):
        _, grads = fz.value_and_grad(of, "layers")(state["params"], x, y)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": fz.apply_updates(state["params"], updates, "layers"), "opt": opt}

    return step, {"params": params, "opt": tx.init(params)}


def tied_gradients():
    """A frozen bias and a trainable one with the same gradient."""
    params = {"base": {"bias": jnp.ones(6)}, "head": {"bias": jnp.zeros(6)}}
    tx = fz.freeze(ADAM, FROZEN)

    @jax.jit
    def step(state, x, y):
        of = lambda p: jnp.mean((x + p["base"]["bias"] + p["head"]["bias"] - y) ** 2)  # noqa: E731
        updates, opt = tx.update(jax.grad(of)(state["params"]), state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    return step, {"params": params, "opt": tx.init(params)}


def two_losses():
    """The updates of a second optimizer use parameters after the first."""
    tx = fz.freeze(SGD, FROZEN)

    @jax.jit
    def step(state, x, y):
        params, a, b = state["params"], state["a"], state["b"]
        updates, a = tx.update(jax.grad(loss)(params, x, y), a, params)
        params = optax.apply_updates(params, updates)
        updates, b = tx.update(jax.grad(loss)(params, y, x), b, params)
        return {"params": optax.apply_updates(params, updates), "a": a, "b": b}

    return step, {"params": PARAMS, "a": tx.init(PARAMS), "b": tx.init(PARAMS)}


def in_loop(fun, params, x, y):
    each = jax.lax.scan(lambda carry, xy: (carry, fun(params, *xy)), None, (x[:, None], y[:, None]))[1]
    return tree(lambda g: g.mean(0), each)


def in_nested_loop(fun, *args):
    return in_loop(lambda *args: in_loop(fun, *args), *args)


def cast_outside_loop(fun, params, x, y):
    return in_loop(fun, tree(lambda p: p.astype(jnp.bfloat16), params), x, y)


def in_branch(fun, *args):
    return jax.lax.cond(jnp.sum(args[1]) < 1e9, fun, lambda params, *_: tree(jnp.zeros_like, params), *args)


def mapped(fun, check_vma, *args):
    specs = jax.P(), jax.P("data"), jax.P("data")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=check_vma)(*args)


def in_shard_map(fun, *args):
    """With a sum over the mesh, which JAX adds itself if it checks what varies."""
    return mapped(lambda *args: jax.lax.pmean(fun(*args), "data"), False, *args)


def in_checked_shard_map(fun, *args):
    return mapped(fun, True, *args)


def in_while_loop(fun, params, *args):
    zeros = tree(jnp.zeros_like, params)
    return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, fun(params, *args)), (0, zeros))[1]


def clipped(enter, leaves=("base", "head")):
    """Gradients that are clipped in a loop, a branch or a shard_map, by the norm of those of some leaves."""

    def grads(params, x, y):
        def of_batch(params, x, y):
            found = jax.grad(loss)(params, x, y)
            norm = optax.tree.norm([found[name] for name in leaves])
            return tree(lambda g: g * jnp.minimum(1, 0.01 / norm), found)

        return enter(of_batch, params, x, y)

    return plain(fz.freeze(SGD, FROZEN), grads)


def steps_in_loop(leaves):
    step, state = clipped(lambda fun, *args: fun(*args), leaves)
    return lambda state, x, y: jax.lax.scan(lambda s, _: (step(s, x, y), None), state, None, length=2)[0], state


def steps_in_shard_map(tx):
    step, state = plain(tx)
    return jax.jit(lambda *args: mapped(step, True, *args)), state


RIGHT = {
    "plain": plain,
    "a clip in a loop": lambda: clipped(in_loop, ["head"]),
    "a clip in a loop in a loop": lambda: clipped(in_nested_loop, ["head"]),
    "a clip in a branch": lambda: clipped(in_branch, ["head"]),
    "a clip in a shard_map": lambda: clipped(in_shard_map, ["head"]),
    "a clip in a checked shard_map": lambda: clipped(in_checked_shard_map, ["head"]),
    "a clip in a loop of steps": lambda: steps_in_loop(["head"]),
    "steps in a shard_map": lambda: steps_in_shard_map(fz.freeze(clip(ADAM), FROZEN)),
    "adversarial training": adversarial,
    "adversarial, for each example": adversarial_by_norm,
    "virtual adversarial training": virtual_adversarial,
    "gradient caching": gradient_caching,
    "an energy model": energy_model,
    "a single example": single_example_energy,
    "DDPG": ddpg,
    "a scope with the name of a backward pass": scope_called_as_a_backward_pass,
    "a target network": lambda: target_network(0.5),
    "a target network that is copied": lambda: target_network(0, hard=True),
    "a target network that the loss reads": target_that_the_loss_reads,
    "DPO": dpo,
    "slow weights": lookahead,
    "the best so far": best_so_far,
    "a rollback": rollback,
    "a decode cache": decode_cache,
    "the carry of an RNN": rnn_carry,
    "a codebook": codebook,
    "batch statistics that the loss reads": batch_renorm,
    "a router's bias": router_bias,
    "actor and critic": lambda: actor_critic(fz.freeze(ADAM, FROZEN), fz.freeze(ADAM, FROZEN)),
    "a discriminator": gan_step_of_the_discriminator,
    "DP-SGD": lambda: dp_sgd(lambda loss: fz.grad(loss, FROZEN)),
    "a list of moments": lambda: numpyro(False),
    "moments of 8 bits": lambda: moments_of_8_bits(2),
    "a base of 8 bits": lambda: quantized_base(0),
    "offloaded parameters": offloaded,
    "one gradient of two biases": tied_gradients,
    "two losses": two_losses,
    "SAM": lambda: plain(fz.freeze(optax.chain(optax.clip(1.0), ADAM), FROZEN)),
}
OF_NO_PARAMETER = "to none, and are not judged"  # gradients of intermediate values, of the shape of a frozen leaf
NOTES = {
    "a discriminator": "the step returns 1 trainable leaf as given: g/head/kernel",
    "a codebook": "running averages of a frozen module move, and the loss reads them (codes/base/embedding)",
    "batch statistics that the loss reads": "the loss reads them (stats/base/mean)",
    "virtual adversarial training": OF_NO_PARAMETER,
    "gradient caching": OF_NO_PARAMETER,
    "a single example": OF_NO_PARAMETER,
    "DDPG": OF_NO_PARAMETER,
}


def audited(made, **options):
    step, state = made()
    params = of_numpyro if "adam" in state else "params"
    frozen = options.pop("frozen", None)
    if frozen is None:
        frozen = "layers" if "layers" in state.get("params", {}) else FROZEN
        frozen = ["*/base"] if {"actor", "g"} & {*state.get("params", {})} else frozen
    return fz.audit_step(step, state, X, Y, params=params, frozen=frozen, **options)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_has_no_leak(name):
    report = audited(RIGHT[name])
    assert report, report
    assert NOTES.get(name, "") in report.note
    assert not report.note or name in NOTES


# Leaking steps.


def clip(tx):
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def sr():
    """A preconditioner of all parameters: (S + 1) x = g."""

    def update(state, grads, x, y):
        flat, unravel = jax.flatten_util.ravel_pytree(grads)
        jacobian = jax.vmap(
            lambda x: jax.flatten_util.ravel_pytree(jax.grad(lambda p: jnp.sum(forward(p, x)))(state["params"]))[0]
        )(x)
        return {**state, "grads": unravel(jnp.linalg.solve(jacobian.T @ jacobian + jnp.eye(flat.size), flat))}

    return make(update, fz.freeze(SGD, FROZEN))


def sum_of_gradients():
    def update(state, grads, x, y):
        total = sum(jnp.sum(g) for g in jax.tree.leaves(grads))
        return {**state, "grads": tree(lambda g: g + 1e-3 * total, grads)}

    return make(update, fz.freeze(SGD, FROZEN))


def callback():
    def update(state, grads, x, y):
        jax.debug.callback(lambda norm: None, optax.tree.norm(grads))
        return state

    return make(update)


def gradients_leave():
    tx = fz.freeze(ADAM, FROZEN)
    grad = jax.jit(jax.grad(loss))

    def step(state, x, y):
        updates, opt = tx.update(grad(state["params"], x, y), state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    return step, {"params": PARAMS, "opt": tx.init(PARAMS)}


def late_decay():
    rate = lambda n: jnp.where(n < 50, 0.0, 0.1)  # noqa: E731
    stopped = jax.grad(lambda p, x, y: loss(fz.stop_gradient(p, FROZEN), x, y))
    return plain(optax.chain(optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(rate)), stopped)


def rounding():
    def update(state, grads, x, y):
        base = tree(lambda p: jnp.exp(jnp.log(jnp.abs(p) + 1e-30)) * jnp.sign(p), state["params"]["base"])
        return {**state, "params": {**state["params"], "base": base}}

    return make(update)


def average_that_rounds_here():
    """An average of one bit for which made-up values may not round."""

    def update(state, grads, x, y):
        return {**state, "ema": tree(lambda e, p: 0.9 * e + 0.1 * p, state["ema"], state["params"])}

    return make(update, ema=PARAMS)


def slow_weights():
    """Averages that replace the parameters, as of Lookahead."""

    def update(state, grads, x, y):
        slow = tree(lambda s, p: 0.9 * s + 0.1 * p, state["slow"], state["params"])
        return {**state, "params": slow, "slow": slow}

    return make(update, slow=PARAMS)


def in_bfloat16(params, x, y):
    of_type = tree(lambda leaf: leaf.astype(jnp.bfloat16), (params, x, y))
    return loss(*of_type).astype(jnp.float32)


def frozen_key():
    state = {"params": {**PARAMS, "key": jax.random.key(0)}}

    @jax.jit
    def step(state, x, y):
        of = lambda p: loss({**state["params"], **p}, x, y)  # noqa: E731
        head = tree(
            lambda h, g: h - 0.1 * g, {"head": state["params"]["head"]}, jax.grad(of)({"head": state["params"]["head"]})
        )
        return {**state, "params": {**state["params"], **head, "key": jax.random.split(state["params"]["key"])[0]}}

    return step, state


OF_NORM = {"changed": "a norm", "gradient": "by a norm"}
LEAKS = {
    "a clip in a loop": (lambda: clipped(in_loop), OF_NORM),
    "a clip in a loop in a loop": (lambda: clipped(in_nested_loop), OF_NORM),
    "a clip in a loop after a cast": (lambda: clipped(cast_outside_loop), OF_NORM),
    "a clip in a branch": (lambda: clipped(in_branch), OF_NORM),
    "a clip in a shard_map": (lambda: clipped(in_shard_map), OF_NORM),
    "a clip in a checked shard_map": (lambda: clipped(in_checked_shard_map), OF_NORM),
    "a clip in a loop of steps": (lambda: steps_in_loop(["base", "head"]), OF_NORM),
    "a clip in steps in a shard_map": (lambda: steps_in_shard_map(clip(fz.freeze(ADAM, FROZEN))), OF_NORM),
    "a clip outside": (lambda: plain(clip(fz.freeze(ADAM, FROZEN))), OF_NORM),
    "a preconditioner": (sr, {"changed": "a sum or a preconditioner", "gradient": "a sum or a preconditioner"}),
    "a sum": (sum_of_gradients, {"changed": "a sum or a preconditioner", "gradient": "a sum or a preconditioner"}),
    "DP-SGD": (lambda: dp_sgd(jax.grad), OF_NORM),
    "a list of moments": (lambda: numpyro(True), {"state": "state for", "gradient": "by its state"}),
    "moments of 8 bits": (lambda: moments_of_8_bits(0), {"state": "state for", "gradient": "by its state"}),
    "actor and critic": (
        lambda: actor_critic(fz.freeze(ADAM, FROZEN), optax.chain(ADAM, fz.masked_zero_updates(FROZEN))),
        {"state": "state for", "gradient": "by its state"},
    ),
    "actor without a freeze": (
        lambda: actor_critic(ADAM, fz.freeze(ADAM, FROZEN)),
        {"moved": "it trains", "state": "state for", "gradient": "by its state"},
    ),
    "a base of 8 bits": (lambda: quantized_base(jnp.int8(1)), {"moved": "another part of the step"}),
    "a single integer": (lambda: quantized_base(0, 1), {"moved": "another part of the step"}),
    "a clip in bfloat16": (
        lambda: plain(clip(fz.freeze(ADAM, FROZEN)), jax.grad(in_bfloat16)),
        OF_NORM,
    ),
    "slow weights": (slow_weights, {"moved": "the state of an optimizer", "state": "state for"}),
    "gradients that leave a function": (gradients_leave, {"gradient": "nothing, but it leaves a jitted function"}),
    "decay after a warmup": (late_decay, {"moved": "weight decay"}),
    "rounding": (rounding, {"moved": "rounded"}),
    "an average": (average_that_rounds_here, {"moved": "an average that rounds"}),
}


@pytest.mark.parametrize("name", LEAKS)
def test_each_leak_is_named(name):
    made, expected = LEAKS[name]
    report = audited(made)
    found = {leak.kind: leak.cause for leak in report.leaks}
    assert found.keys() == expected.keys(), report
    for kind, cause in expected.items():
        assert cause in found[kind], report
    assert all("base" in leak.path for leak in report.leaks if leak.kind != "changed")


@pytest.mark.parametrize("flag", [None, True, 1.0], ids=["alone", "bool", "float"])
def test_a_loop_that_adds_up_gradients_of_which_one_is_frozen(flag):
    """The loop is the only operation that computes the frozen one, and it computes others."""
    params = {"base": PARAMS["base"]["kernel"], "head": jnp.ones(6)}
    tx = clip(fz.freeze(optax.sgd(0.1), "base"))
    of_one = lambda p, x: jnp.sum(jnp.tanh(x @ p["base"] + p["head"]) ** 2)  # noqa: E731

    @jax.jit
    def step(state, x):
        def add(carry, row):
            return (tree(jnp.add, carry[0], jax.grad(of_one)(state["params"], row)), flag), None

        (grads, _), _ = jax.lax.scan(add, (tree(jnp.zeros_like, params), flag), x)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    state = {"params": params, "opt_state": tx.init(params)}
    report = fz.audit_step(step, state, X, params="params", frozen="base")
    found = [(leak.kind, leak.path) for leak in report.leaks]
    assert found == [("changed", "head"), ("gradient", "base")], report


def test_an_operation_that_reads_one_gradient_has_a_result_beside_it():
    """What reads the other gradient reads that result."""

    @jax.jit
    def step(state, x):
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["a"] + p["b"]) ** 2) + p["c"])(state["params"])
        body = lambda carry, _: ((carry[0] / 2, carry[1] + x.sum()), None)  # noqa: E731
        (half, others), _ = jax.lax.scan(body, (jnp.sum(grads["a"] ** 2), 1.0), None, length=3)
        return {**state, "one": state["one"] + half, "two": state["two"] + jnp.sum(grads["b"] ** 2) * others}

    params = {"a": PARAMS["base"]["kernel"], "b": jnp.ones(6), "c": jnp.float32(1)}
    state = {"params": params, "one": jnp.float32(0), "two": jnp.float32(0)}
    report = fz.audit_step(step, state, X, params="params", frozen=["a", "b"])
    assert {(leak.kind, leak.path) for leak in report.leaks} == {("gradient", "a"), ("gradient", "b")}, report


def test_a_base_of_8_bit_floats_beside_the_gradients():
    @jax.jit
    def step(state, x):
        grads = jax.grad(lambda p: jnp.mean((x @ (p["base"] + state["q"].astype(jnp.float32)) @ p["head"]) ** 2))
        updates, _ = tx.update(grads(state["params"]), state["opt_state"], state["params"])
        return {**state, "params": fz.apply_updates(state["params"], updates, "base")}

    tx = clip(optax.identity())
    params = {"base": PARAMS["base"]["kernel"], "head": jnp.ones(6)}
    state = {"params": params, "q": jnp.ones((6, 6), jnp.float8_e4m3fn), "opt_state": tx.init(params)}
    report = fz.audit_step(step, state, X, params="params", frozen="base")
    assert ("changed", "head") in [(leak.kind, leak.path) for leak in report.leaks], report


def test_a_key_of_a_frozen_module():
    step, state = frozen_key()
    report = fz.audit_step(step, state, X, Y, params="params", frozen=["base", "key"])
    assert [(leak.kind, leak.path) for leak in report.leaks] == [("moved", "key")]


def test_a_callback_is_in_the_note():
    report = audited(callback)
    assert report
    assert "computed only for results beside the state" in report.note


def test_what_a_while_loop_computes_is_not_known():
    report = audited(lambda: clipped(in_while_loop))
    assert report
    assert "a loop, a branch or a shard_map may compute gradients of frozen parameters" in report.note


def test_a_gradient_of_all_parameters_in_one_vector_is_in_the_note():
    def grads(params, x, y):
        flat, unravel = jax.flatten_util.ravel_pytree(params)
        return unravel(jax.grad(lambda flat: loss(unravel(flat), x, y))(flat))

    report = audited(lambda: plain(grads=grads))
    assert report
    assert "a gradient of 78 numbers may contain those of frozen parameters" in report.note


@pytest.mark.parametrize("dropped", [True, False])
def test_a_step_that_returns_its_gradients(dropped):
    tx = fz.freeze(ADAM, FROZEN)

    @jax.jit
    def step(state, x, y):
        grads = jax.grad(loss)(state["params"], x, y)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, grads

    made = (lambda *args: step(*args)[0]) if dropped else step
    report = audited(lambda: (made, {"params": PARAMS, "opt": tx.init(PARAMS)}))
    assert report, report
    assert dropped or "computed only for results" in report.note


class TestOtherRuns:
    OFFSETS = jnp.array([0, 2, 5])

    def audit(self, **options):
        step, state = own_check()
        return fz.audit_step(step, state, X, self.OFFSETS, params="params", frozen=FROZEN, **options)

    def test_a_step_that_checks_its_batch(self):
        report = self.audit()
        assert report
        assert "does not run with another batch (ValueError: offsets must be sorted)" in report.note
        assert "other_batch=" in report.note

    @pytest.mark.parametrize("other", [False, (X + 1, OFFSETS + 1)])
    def test_another_batch_of_the_user(self, other):
        assert "batch" not in self.audit(other_batch=other).note

    def test_other_values_of_the_user(self):
        calls = []
        step, state = plain()

        def watched(state, x, y):
            calls.append(state["params"]["base"]["scale"])
            return step(state, x, y)

        values = tree(lambda leaf: leaf + 7, PARAMS)
        report = fz.audit_step(watched, state, X, Y, params="params", frozen=FROZEN, other_values=values)
        assert report
        assert report.calls == len(calls)
        assert any(not isinstance(x, jax.core.Tracer) and float(x[0]) == 8 for x in calls)
        off = fz.audit_step(watched, state, X, Y, params="params", frozen=FROZEN, other_values=False)
        assert off.calls == report.calls - off.steps

    def test_keyword_arguments(self):
        step, state = plain()
        with_keyword = lambda state, x, *, y: step(state, x, y)  # noqa: E731
        assert fz.audit_step(with_keyword, state, X, y=Y, params="params", frozen=FROZEN)
