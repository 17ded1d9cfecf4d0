"""The trainers of ``docs/trainers.md``: each with its own freezing, and with the change that the page shows.

A function per trainer makes a small model, executes the blocks of the page with it, and returns the training steps.
``python tests/gallery/trainers.py`` writes the table of the page.
"""

import dataclasses
import functools
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # of MaxText
os.environ |= {"NETKET_ENABLE_X64": "0", "NETKET_SHARDING": "0"}  # its import would enable 64 bits for all others

import jax
import jax.numpy as jnp
import optax

import optax_freeze as fz

PAGE = pathlib.Path(__file__).parents[2] / "docs/trainers.md"
TRAINERS: dict[str, Callable[[], "Trainer"]] = {}


@dataclasses.dataclass
class Step:
    """A training step, made of its loss, and what ``fz.audit_step`` needs to know of it."""

    make_step: Callable[[Any], Callable[..., Any]]
    loss: Any
    state: Any
    batch: tuple[Any, ...]
    params: Any
    frozen: Any
    steps: int = 3

    @functools.cached_property
    def run(self) -> Callable[..., Any]:
        return self.make_step(self.loss)

    def audit(self) -> fz.typing.Audit:
        options = {"params": self.params, "frozen": self.frozen, "steps": self.steps}
        return fz.audit_step(self.make_step, self.state, *self.batch, loss=self.loss, **options)


class Recorder:
    """The library, whose ``audit_step`` returns the step that it is to audit."""

    def __getattr__(self, name: str) -> Any:
        return getattr(fz, name)

    def audit_step(self, make_step: Any, state: Any, *batch: Any, loss: Any, **options: Any) -> Step:
        return Step(make_step, loss, state, batch, **options)


class Trainer(NamedTuple):
    """The step with the trainer's own freezing, with the change, other steps without a leak, and a training."""

    own: Step
    changed: Step | None
    others: list[Step]
    train: Callable[[], tuple[Any, Any]]  # the parameters before and after
    names: dict[str, Any]  # of the function and of the blocks of the page


def trainer(title: str) -> Callable[[Callable[[], Trainer]], Callable[[], Trainer]]:
    def register(make: Callable[[], Trainer]) -> Callable[[], Trainer]:
        TRAINERS[title] = make
        return make

    return register


def blocks(title: str) -> list[str]:
    """The blocks of a section of the page."""
    [section] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)


def execute(title: str, number: int, names: dict[str, Any]) -> dict[str, Any]:
    """The names after a block of the page, which has the names before, and those that every block has."""
    names = {"jax": jax, "jnp": jnp, "optax": optax, "fz": fz, **names}
    exec(compile(blocks(title)[number], f"<block of {PAGE.name}>", "exec"), names)
    return names


def step_of(title: str, **names: Any) -> Step:
    """The step that the last block of a section audits."""
    return execute(title, -1, {**names, "fz": Recorder()})["audit"]


def multi_transform(optimizer: Any, frozen: Any) -> Any:
    return optax.multi_transform({"trainable": optimizer, "frozen": optax.set_to_zero()}, fz.labels(frozen))


def run_steps(step: Step, select: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The parameters before and after three steps."""
    state, before = step.state, jax.tree.map(jnp.copy, select(step.state))
    for _ in range(3):
        state, _ = step.run(state, *step.batch)
    return before, select(state)


@trainer("Flax")
def flax() -> Trainer:
    import flax.linen as nn
    from flax.training.train_state import TrainState

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, name="head")(nn.tanh(nn.Dense(256, name="encoder")(x)))

    def loss(params, x):
        return jnp.mean((model.apply(params, x) - 1) ** 2)

    model, x, frozen = Net(), jnp.ones((32, 256)), "params/encoder"
    params = model.init(jax.random.key(0), x)
    tx = optax.chain(optax.clip_by_global_norm(1.0), multi_transform(optax.adamw(1e-3), frozen))
    own = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    names = execute("Flax", 0, locals())
    of = lambda state: step_of("Flax", state=state, x=x, loss=loss, frozen=frozen)  # noqa: E731
    changed = of(names["state"])
    return Trainer(of(own), changed, [], lambda: run_steps(changed, lambda state: state.params), names)


@trainer("Tunix")
def tunix() -> Trainer:
    from flax import nnx
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    class Model(nnx.Module):
        def __init__(self, rank=None):
            rngs = nnx.Rngs(0)
            self.embed = nnx.Embed(256, 64, rngs=rngs)
            self.hidden = nnx.LoRALinear(64, 64, lora_rank=rank, rngs=rngs) if rank else nnx.Linear(64, 64, rngs=rngs)
            self.head = nnx.Linear(64, 256, rngs=rngs)

        def __call__(self, tokens):
            return self.head(jnp.tanh(self.hidden(self.embed(tokens))))

    def loss(model, tokens):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def with_loss(trainer):
        return trainer.with_loss_fn(loss).with_gen_model_input_fn(lambda tokens: {"tokens": tokens})

    def of(trainer, frozen):
        return step_of("Tunix", trainer=with_loss(trainer), loss=loss, batch=tokens, frozen=frozen, nnx=nnx)

    def train():
        before = nnx.to_pure_dict(nnx.clone(nnx.state(model := names["model"])))
        with_loss(names["trainer"]).train([tokens] * 4)
        return before, nnx.to_pure_dict(nnx.state(model))

    tokens, frozen = jax.random.randint(jax.random.key(0), (8, 17), 0, 256), fz.all_except("head")
    config = TrainingConfig(eval_every_n_steps=100, gradient_accumulation_steps=2, max_steps=2)
    own = of(PeftTrainer(Model(), multi_transform(optax.adamw(1e-3), frozen), config), frozen)
    lora = PeftTrainer(Model(rank=4), optax.adamw(1e-3), TrainingConfig(eval_every_n_steps=100))
    model = Model()
    names = execute("Tunix", 0, locals())
    return Trainer(own, of(names["trainer"], frozen), [of(lora, fz.all_except("**/lora_*"))], train, names)


@trainer("Kauldron")
def kauldron() -> Trainer:
    import flax.linen as nn
    from kauldron import kd
    from kauldron.train import train_step

    class Net(nn.Module):
        x: kd.kontext.Key = "batch.x"

        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, name="head")(nn.tanh(nn.Dense(256, name="encoder")(x)))

    def trainer_of(optimizer):
        losses = {"l2": kd.losses.L2(preds="preds", targets="batch.y")}
        return kd.train.Trainer(seed=0, train_ds=None, model=Net(), train_losses=losses, optimizer=optimizer)

    def of(optimizer):
        trainer = trainer_of(optimizer)
        state = trainer.trainstep.init(shapes)
        return step_of("Kauldron", trainer=trainer, train_step=train_step, state=state, batch=batch, frozen=frozen)

    batch = {"x": jnp.ones((32, 256)), "y": jnp.ones((32, 1))}
    shapes, frozen = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch), fz.all_except("head")
    partial_updates = kd.optim.partial_updates(optax.adamw(1e-3), kd.optim.select("head"))
    clip, ema = optax.clip_by_global_norm(1.0), kd.optim.ema_params(decay=0.99)
    own = of(kd.optim.named_chain(clip=clip, adam=partial_updates, ema=ema))
    names = execute("Kauldron", 0, locals())
    changed = of(names["optimizer"])
    train = lambda: run_steps(changed, lambda state: state.params)  # noqa: E731
    return Trainer(own, changed, [of(partial_updates)], train, names)


@trainer("Keras")
def keras() -> Trainer:
    import keras
    import keras_hub

    x, y = keras.random.normal((32, 256)), keras.ops.ones((32, 1))
    body = keras.Sequential([keras.layers.Dense(256), keras.layers.BatchNormalization()], name="body")
    head = keras.layers.Dense(1, name="head")
    model = keras.Sequential([keras.Input((256,)), body, keras.layers.ReLU(), head], name="net")
    before = {variable.path: variable.numpy() for variable in model.weights}
    names = execute("Keras", 0, locals())
    groups = {"trainable": model.trainable_variables, "rest": model.non_trainable_variables}
    after = {group: [variable.numpy() for variable in variables] for group, variables in groups.items()}
    before = {group: [before[variable.path] for variable in variables] for group, variables in groups.items()}

    sizes = {"hidden_dim": 16, "intermediate_dim": 32, "num_query_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    backbone = keras_hub.models.GemmaBackbone(vocabulary_size=64, num_layers=2, **sizes)
    backbone.enable_lora(rank=4)
    decoder = keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    decoder.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=entropy)
    tokens = jax.random.randint(jax.random.key(0), (8, 17), 0, 64)
    inputs = {"token_ids": tokens[:, :-1], "padding_mask": jnp.ones((8, 16), jnp.int32)}
    decoder.fit(inputs, tokens[:, 1:], verbose=0)
    lora = step_of("Keras", model=decoder, x=inputs, y=tokens[:, 1:])
    return Trainer(step_of("Keras", **names), None, [lora], lambda: (before, after), names)


@trainer("Brax")
def brax() -> Trainer:
    from brax.training import gradients, types
    from brax.training.agents.ppo import losses, networks

    def of(tx):
        names = {"gradients": gradients, "params": params, "data": data, "key": key, "loss": loss}
        return step_of("Brax", tx=tx, frozen="policy", **names)

    net = networks.make_ppo_networks(8, 2, policy_hidden_layer_sizes=(64, 64), value_hidden_layer_sizes=(64,))
    key = jax.random.key(0)
    params = losses.PPONetworkParams(policy=net.policy_network.init(key), value=net.value_network.init(key))
    normal = functools.partial(jax.random.normal, key)
    sample = {"raw_action": normal((4, 5, 2)), "log_prob": normal((4, 5)), "distribution_params": normal((4, 5, 4))}
    data = types.Transition(
        observation=normal((4, 5, 8)),
        action=jnp.tanh(sample["raw_action"]),
        reward=normal((4, 5)),
        discount=jnp.ones((4, 5)),
        next_observation=normal((4, 5, 8)),
        extras={"policy_extras": sample, "state_extras": {"truncation": jnp.zeros((4, 5))}},
    )
    loss = functools.partial(losses.compute_ppo_loss, ppo_network=net)

    def stopped(loss):
        return lambda params, *args: loss(params.replace(policy=jax.lax.stop_gradient(params.policy)), *args)

    plain = of(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-4)))
    own = dataclasses.replace(plain, make_step=lambda loss: plain.make_step(stopped(loss)))
    names = execute("Brax", 0, locals())
    changed = of(names["tx"])
    return Trainer(own, changed, [], lambda: run_steps(changed, lambda state: state[0]), names)


@trainer("jax-privacy")
def jax_privacy() -> Trainer:
    from jax_privacy import clipped_grad
    from jax_privacy.noise_addition import gaussian_privatizer

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["encoder"]) @ params["head"] - 1) ** 2)

    def of(tx, state, trainable):
        names = {"clipped_grad": clipped_grad, "privatizer": privatizer, "loss": loss, "x": x, "frozen": "encoder"}
        return step_of("jax-privacy", tx=tx, state=state, trainable=trainable, **names)

    params = {"encoder": jax.random.normal(jax.random.key(0), (256, 256)) / 16, "head": jnp.ones((256, 1)) / 16}
    x = jax.random.normal(jax.random.key(1), (32, 256))
    privatizer = gaussian_privatizer(stddev=0.1, prng_key=jax.random.key(2))
    tx = multi_transform(optax.adamw(1e-3), "encoder")
    own = of(tx, (params, privatizer.init(params), tx.init(params)), lambda grads: grads)
    names = execute("jax-privacy", 0, locals())
    changed = of(names["tx"], names["state"], names["trainable"])
    return Trainer(own, changed, [], lambda: run_steps(changed, lambda state: state[0]), names)


@trainer("NetKet")
def netket() -> Trainer:
    import flax.linen as nn
    import netket as nk

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for name in ("encoder", "hidden"):
                x = nn.tanh(nn.Dense(32, name=name)(x))
            return nn.Dense(1, name="head")(x)[..., 0]

    model, hilbert = Net(), nk.hilbert.Spin(0.5, 8)
    energy = nk.operator.IsingJax(hilbert, nk.graph.Chain(8), h=1.0)
    sampler = nk.sampler.MetropolisLocal(hilbert, n_chains=16)
    seeds = {"n_samples": 2048, "sampler_seed": 0, "seed": 0}
    sr = nk.optimizer.SR(diag_shift=0.01, qgt=nk.optimizer.qgt.QGTJacobianDense)
    vstate = nk.vqs.MCState(sampler, model, **seeds)

    def of(vstate, tx, **changes):
        step = step_of("NetKet", nk=nk, energy=energy, sr=sr, vstate=vstate, tx=tx)
        return dataclasses.replace(step, **changes)

    names = locals()
    own = of(execute("NetKet", 0, names)["vstate"], optax.adam(1e-2))
    frozen = execute("NetKet", 1, names)["frozen"]
    of_variables = fz.rules({"**/hidden/kernel": fz.rows(slice(0, -16)), "**/head/**": False}, default=True)
    plain = of(vstate, fz.freeze(optax.adam(1e-2), frozen), params="variables/params", frozen=frozen)
    make_step = lambda apply: plain.make_step(fz.freeze_loss(apply, of_variables))  # noqa: E731
    names |= {"wrapped": dataclasses.replace(plain, make_step=make_step)}
    return Trainer(own, None, [names["wrapped"]], lambda: run_steps(own, lambda state: state["variables"]), names)


@trainer("NumPyro")
def numpyro() -> Trainer:
    import numpyro
    from numpyro import distributions as dist

    def model(x):
        decoder = numpyro.param("decoder", normal(0, 16, 256))
        with numpyro.plate("examples", 32):
            z = numpyro.sample("z", dist.Normal(jnp.zeros(16), 1.0).to_event(1))
            numpyro.sample("x", dist.Normal(z @ decoder, 1.0).to_event(1), obs=x)

    def guide(x):
        encoder = numpyro.param("encoder", normal(1, 256, 256))
        head = numpyro.param("head", normal(2, 256, 16))
        with numpyro.plate("examples", 32):
            numpyro.sample("z", dist.Normal(jnp.tanh(x @ encoder) @ head, 0.1).to_event(1))

    def of(svi_of, frozen, fixed):
        """The step of an SVI, which may hold parameters that it does not train."""

        def make_step(loss):
            @jax.jit
            def step(state, x):
                svi = svi_of(state["fixed"], loss)
                svi.constrain_fn = made.constrain_fn
                svi_state, value = svi.update(state["svi"], x)
                return {"svi": svi_state, "fixed": state["fixed"]}, value

            return step

        loss = numpyro.infer.Trace_ELBO().loss
        made = svi_of(fixed, loss)
        state = {"svi": made.init(jax.random.key(0), x), "fixed": fixed}
        return Step(make_step, loss, state, (x,), parameters, frozen)

    def parameters(state):
        return state["svi"].optim_state[1][0] | state["fixed"]

    def normal(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape) / 16

    def own_svi(pretrained, loss):
        svi = execute("NumPyro", 0, names | {"pretrained": pretrained})["svi"]
        svi.loss.loss = loss
        return svi

    x = normal(3, 32, 256)
    names = locals()
    own = of(own_svi, "encoder", {"encoder": normal(1, 256, 256)})
    return Trainer(own, None, [], lambda: run_steps(own, parameters), names)


def maxtext_config(*options: str) -> tuple[Any, Any]:
    """The configuration of a small decoder, and its mesh."""
    import maxtext as package
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils

    base = os.path.join(os.path.dirname(package.__file__), "configs/base.yml")
    run = ["run_name=small", "enable_checkpointing=false", "skip_jax_distributed_system=true", "hardware=cpu"]
    sizes = ["base_emb_dim=64", "base_mlp_dim=128", "base_num_query_heads=2", "base_num_kv_heads=2", "head_dim=32"]
    batch = ["vocab_size=256", "per_device_batch_size=4", "max_target_length=16", "max_prefill_predict_length=8"]
    kind = ["attention=dot_product", "dtype=float32"]
    config = pyconfig.initialize(["", base, *run, *kind, *sizes, *batch, *options])
    return config, maxtext_utils.get_mesh_from_config(config)


def maxtext_optimizer(config: Any, model: Any) -> Any:
    from maxtext.utils import train_utils

    return train_utils.create_training_optimizer(config, model)[1]


def maxtext_data() -> dict[str, jax.Array]:
    tokens = jax.random.randint(jax.random.key(0), (4, 17), 0, 256)
    data = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    for name in ("inputs", "targets"):
        data[f"{name}_position"] = jnp.broadcast_to(jnp.arange(16), (4, 16))
        data[f"{name}_segmentation"] = jnp.ones((4, 16), jnp.int32)
    return data


@trainer("MaxText")
def maxtext() -> Trainer:
    from flax import nnx
    from maxtext.common.train_state_nnx import TrainStateNNX
    from maxtext.trainers.pre_train import train
    from maxtext.utils import model_creation_utils

    def of(option, block=None, scanned="false"):
        config, mesh = maxtext_config(f"scan_layers={scanned}", "base_num_decoder_layers=2", option)
        with jax.set_mesh(mesh):
            model = model_creation_utils.create_nnx_abstract_model(config, mesh)[0]()
            tx = maxtext_optimizer(config, model)
            names = {"model": model, "tx": tx, "nnx": nnx, "TrainStateNNX": TrainStateNNX}
            if block is None:
                names["state"] = TrainStateNNX(model, nnx.Optimizer(model, tx, wrt=nnx.Param))
            else:
                names = execute("MaxText", block, names)
        step = step_of("MaxText", state=names["state"], train=train, nnx=nnx, config=config, data=data, frozen=frozen)
        return step, names

    data, frozen = maxtext_data(), fz.all_except("**/logits_dense/**")
    own, _ = of("trainable_parameters_mask=['.*logits_dense.*']")
    changed, names = of("steps=10", block=0)
    clipped, _ = of("gradient_clipping_threshold=0", block=1, scanned="true")
    train_it = lambda: run_steps(changed, lambda state: nnx.to_pure_dict(state["model"]))  # noqa: E731
    return Trainer(own, changed, [clipped], train_it, names)


def cost(step: Step) -> tuple[float, int]:
    """The FLOPs of a compiled step with a donated state, and the bytes that it is given, returns and allocates."""
    jitted = jax.jit(step.run, donate_argnums=0)
    if nnx := sys.modules.get("flax.nnx"):
        parts = step.state if isinstance(step.state, tuple) else ()
        if any(isinstance(part, nnx.Module | nnx.Optimizer) for part in parts):  # which a step changes in place
            jitted = nnx.jit(step.run, donate_argnums=0)
    compiled: Any = jitted.lower(step.state, *step.batch).compile()
    compiled = getattr(compiled, "compiled", compiled)  # of nnx.jit
    memory = compiled.memory_analysis()
    nbytes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return compiled.cost_analysis()["flops"], nbytes - memory.alias_size_in_bytes


def shown(title: str) -> list[str]:
    """The cells of the page's table after the first two."""
    [line] = re.findall(rf"^\| \[{title}\]\(.*\|$", PAGE.read_text(encoding="utf-8"), re.M)
    return [cell.strip() for cell in line.split("|")[3:-1]]


def measured(made: Trainer) -> list[str]:
    """The same cells: kinds of leaks of the own freezing; FLOPs in millions and KiB, own and with the change."""
    kinds = dict.fromkeys(leak.kind for leak in made.own.audit().leaks)
    costs = [cost(step) for step in (made.own, made.changed) if step]
    flops = [f"{flops / 1e6:.2f} M" for flops, _ in costs]
    memory = [f"{nbytes / 1024:,.0f} KiB" for _, nbytes in costs]
    nothing = [""] * (2 - len(costs))
    return [", ".join(f"`{kind}`" for kind in kinds) or "no leak", *flops, *nothing, *memory, *nothing]


def write() -> None:
    """Writes the table."""
    for title in sys.argv[1:] or TRAINERS:
        cells, page = measured(TRAINERS[title]()), PAGE.read_text(encoding="utf-8")
        [line] = re.findall(rf"^\| \[{title}\]\(.*\|$", page, re.M)
        first, own = (cell.strip() for cell in line.split("|")[1:3])
        PAGE.write_text(page.replace(line, f"| {' | '.join([first, own, *cells])} |"), encoding="utf-8")


if __name__ == "__main__":
    write()
