"""Graphs, differential equations, policies, flows and recurrent networks."""

import jax
import jax.numpy as jnp
import numpy as np

import optax_freeze as fz
from gallery.gallery import Model, case, of_equinox

NUMBERS = np.random.default_rng(0)


@case("Neural ODE", "diffrax", "differential equation", "rows of a layer, half of the output biases, the first layer")
def diffrax_ode():
    """The neural differential equation of Diffrax's examples."""
    import diffrax
    import equinox as eqx

    class Field(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, t, y, args):
            return self.mlp(y)

    def loss(field, start):
        def solve(y):
            term, stepsize = diffrax.ODETerm(field), diffrax.PIDController(1e-3, 1e-6)
            solved = diffrax.diffeqsolve(
                term, diffrax.Tsit5(), 0.0, 1.0, 0.1, y, stepsize_controller=stepsize, max_steps=64
            )
            return solved.ys[-1]

        return jnp.mean(jax.vmap(solve)(start) ** 2)

    field = Field(eqx.nn.MLP(16, 16, 64, 2, activation=jax.nn.softplus, key=jax.random.key(0)))
    rows = {"mlp/layers/1/weight": fz.rows(slice(0, 48)), "mlp/layers/2/bias": fz.rows(slice(0, 8))}
    spec = fz.rules({**rows, "mlp/layers/0": True, "**": False})
    return of_equinox(field, loss, NUMBERS.normal(size=(8, 16)).astype(np.float32), spec)


@case("Graph convolution", "jraph haiku", "graph network", "embeddings of old nodes, old outputs")
def graph_network():
    """A graph convolution of jraph with embeddings of its nodes, in Haiku."""
    import haiku as hk
    import jraph

    nodes, edges = 512, 1024
    senders, receivers = NUMBERS.integers(0, nodes, (2, edges))

    def forward():
        embeddings = hk.get_parameter("embeddings", (nodes, 64), init=hk.initializers.RandomNormal())
        ends = {"senders": jnp.asarray(senders), "receivers": jnp.asarray(receivers)}
        sizes = {"n_node": jnp.array([nodes]), "n_edge": jnp.array([edges])}
        graph = jraph.GraphsTuple(nodes=embeddings, edges=None, globals=None, **ends, **sizes)
        for i in range(2):
            layer = hk.Linear(64, name=f"layer_{i}")
            graph = jraph.GraphConvolution(layer, add_self_edges=True)(graph)
            graph = graph._replace(nodes=jax.nn.relu(graph.nodes))
        return hk.Linear(8, name="head")(graph.nodes)

    net = hk.without_apply_rng(hk.transform(forward))
    params = jax.jit(net.init)(jax.random.key(0))

    def loss(params, targets):
        return jnp.mean((net.apply(params) - targets) ** 2)

    rows = {
        "~/embeddings": fz.rows(slice(0, 480)),
        "head/w": fz.rows(slice(0, 6), axis=1),
        "head/b": fz.rows(slice(0, 6)),
    }
    targets = NUMBERS.normal(size=(nodes, 8)).astype(np.float32)
    return Model(params, loss, targets, fz.rules({**rows, "**": False}))


@case("PPO", "brax", "policy and value", "old observations, old actions, a layer of the value")
def brax_ppo():
    """The policy and the value network of Brax's PPO: new observations and new actions."""
    from brax.training.agents.ppo import networks

    nets = networks.make_ppo_networks(24, 8, policy_hidden_layer_sizes=(64, 64), value_hidden_layer_sizes=(64, 64))
    params = {
        "policy": nets.policy_network.init(jax.random.key(0)),
        "value": nets.value_network.init(jax.random.key(1)),
    }
    action = nets.parametric_action_distribution

    def loss(params, batch):
        observations, actions, advantages = batch
        logits = nets.policy_network.apply(None, params["policy"], observations)
        value = nets.value_network.apply(None, params["value"], observations)
        return jnp.mean((value - advantages) ** 2) - jnp.mean(action.log_prob(logits, actions) * advantages)

    rows = {
        "policy/**/hidden_0/kernel": fz.rows(slice(0, 20)),
        "policy/**/hidden_2/kernel": fz.rows([*range(6), *range(8, 14)], axis=1),
        "policy/**/hidden_2/bias": fz.rows([*range(6), *range(8, 14)]),
    }
    sizes = (256, 24), (256, 8), (256,)
    batch = tuple(NUMBERS.normal(size=size).astype(np.float32) for size in sizes)
    return Model(params, loss, batch, fz.rules({**rows, "value/**/hidden_0": True, "**": False}))


@case("Autoregressive flow", "flowjax", "scanned flow", "3 of 4 layers")
def flow():
    """A masked autoregressive flow of FlowJAX: its layers are stacked and scanned, its weights masked."""
    import flowjax.distributions
    import flowjax.flows

    model = flowjax.flows.masked_autoregressive_flow(
        jax.random.key(0), base_dist=flowjax.distributions.Normal(jnp.zeros(8)), flow_layers=4, nn_width=64
    )
    spec = fz.rules({"base_dist": True, "bijection": fz.rows(slice(0, 3))})
    batch = NUMBERS.normal(size=(64, 8)).astype(np.float32)
    return of_equinox(model, lambda model, x: -model.log_prob(x).mean(), batch, spec)


@case("LSTM", "haiku", "recurrent", "old tokens, their columns of the head, 3 of 4 gates")
def haiku_lstm():
    """An LSTM of Haiku, unrolled by scan: one of its gates trains."""
    import haiku as hk

    def forward(tokens):
        x = hk.Embed(256, 64, name="embed")(tokens)
        core = hk.LSTM(64, name="lstm")
        x, _ = hk.dynamic_unroll(core, x, core.initial_state(len(tokens)), time_major=False)
        return hk.Linear(256, name="head")(x)

    net = hk.without_apply_rng(hk.transform(forward))
    tokens = NUMBERS.integers(0, 256, (4, 8))
    params = jax.jit(net.init)(jax.random.key(0), tokens)

    def loss(params, tokens):
        scores = jax.nn.log_softmax(net.apply(params, tokens))
        return -jnp.mean(jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], axis=2))

    spec = {
        "embed": fz.rows(slice(0, 240)),
        "lstm/linear": fz.rows(slice(0, 192), axis=-1),
        "head/w": fz.rows(slice(0, 240), axis=1),
        "head/b": fz.rows(slice(0, 240)),
    }
    return Model(params, loss, tokens, fz.rules(spec))


@case("Equinox attention", "equinox", "attention", "3 of 4 heads")
def equinox_attention():
    """The attention of Equinox: the heads of each projection are its rows."""
    import equinox as eqx

    def loss(attend, x):
        return jnp.mean((jax.vmap(lambda x: attend(x, x, x))(x) - x) ** 2)

    model = eqx.nn.MultiheadAttention(4, 64, key=jax.random.key(0))
    spec = fz.rules({"output_proj": fz.rows(slice(0, 48), axis=1), "*": fz.rows(slice(0, 48))})
    return of_equinox(model, loss, NUMBERS.normal(size=(4, 16, 64)).astype(np.float32), spec)


@case("Flax attention", "flax", "attention", "3 of 4 heads, the output biases")
def flax_attention():
    """The attention of Flax Linen: the heads of each projection are an axis of their own."""
    from flax import linen as nn

    model = nn.MultiHeadDotProductAttention(num_heads=4)
    x = NUMBERS.normal(size=(4, 16, 64)).astype(np.float32)
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]

    def loss(params, x):
        return jnp.mean((model.apply({"params": params}, x) - x) ** 2)

    heads = slice(0, 3)
    spec = {
        "out/kernel": fz.rows(heads),
        "out/bias": True,
        "*/kernel": fz.rows(heads, axis=1),
        "*/bias": fz.rows(heads),
    }
    return Model(params, loss, x, fz.rules(spec))
