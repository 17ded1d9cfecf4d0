"""Rows in the trainers of ``docs/trainers.md``: with the trainer's own freezing, ``fz.freeze``, and both wrappers.

The trainer's own freezing, or ``optax.multi_transform``, chooses whole leaves: it trains those with trainable rows.
``python -m gallery.trainer_rows`` in ``tests/`` writes the table of the page.
"""

import functools
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_freeze as fz
from gallery import trainers
from gallery.trainers import PAGE, Step, execute, multi_transform
from optax_freeze._program.flops import flops


class Rows(NamedTuple):
    """The steps of three ways, and the parameters of their states by paths of the spec."""

    own: Step
    optimizer: Step
    both: Step
    select: Callable[[Any], Any]


ROWS: dict[str, Callable[[], Rows]] = {}


def rows_of(title: str) -> Callable[[Callable[[], Rows]], Callable[[], Rows]]:
    def register(make: Callable[[], Rows]) -> Callable[[], Rows]:
        ROWS[title] = make
        return make

    return register


@rows_of("Flax")
def flax() -> Rows:
    names = trainers.flax().names
    make, model, x = names["TrainState"].create, names["model"], names["x"]
    adam, clip = optax.adamw(1e-3), optax.clip_by_global_norm(1.0)

    def loss(params, x):
        return jnp.mean((model.apply(params, x) - 1) ** 2)

    names |= execute("Flax", 1, names | {"loss": loss})
    frozen = names["frozen"]

    def of(tx, gradient):
        def step(state, x):
            value, grads = gradient(state.params, x)
            return state.apply_gradients(grads=grads), (value, optax.tree.norm(grads))

        state = make(apply_fn=model.apply, params=names["params"], tx=tx)
        return Step(jax.jit(step), state, (x,), "params", frozen)

    dense = jax.value_and_grad(loss)
    optimizer = optax.chain(clip, fz.freeze(adam, frozen))
    own = of(optax.chain(clip, multi_transform(adam, "params/encoder/bias")), dense)
    return Rows(own, of(optimizer, dense), of(optimizer, names["gradient"]), lambda state: state.params)


@rows_of("Tunix")
def tunix() -> Rows:
    names = trainers.tunix().names
    names["config"] = names["TrainingConfig"](eval_every_n_steps=100)
    nnx, tokens = names["nnx"], names["tokens"]
    made = execute("Tunix", 1, names | {"model": names["Model"]()})
    frozen = made["frozen"]

    def of(trainer):
        trainer = trainer.with_gen_model_input_fn(lambda tokens: {"tokens": tokens})
        graphdef, state = nnx.split((trainer.model, trainer.optimizer))

        def step(state, tokens):
            both = nnx.merge(graphdef, state)
            out = trainer.create_train_step_fn()(*both, tokens)
            return nnx.state(both), out

        return Step(jax.jit(step), state, (tokens,), "0", frozen)

    def plain(tx):
        return of(names["PeftTrainer"](names["Model"](), tx, names["config"]).with_loss_fn(names["loss"]))

    own = plain(multi_transform(optax.adamw(1e-3), "head"))
    both = of(made["trainer"])
    return Rows(own, plain(fz.freeze(optax.adamw(1e-3), frozen)), both, lambda state: nnx.to_pure_dict(state)[0])


@rows_of("Kauldron")
def kauldron() -> Rows:
    from kauldron.train import train_step

    names = trainers.kauldron().names
    kd, clip, plain = names["kd"], optax.clip_by_global_norm(1.0), train_step.forward_with_loss
    try:
        names |= execute("Kauldron", 1, names)
        wrapped = train_step.forward_with_loss
    finally:
        train_step.forward_with_loss = plain

    def of(adam, loss):
        trainstep = names["trainer_of"](kd.optim.named_chain(clip=clip, adam=adam)).trainstep

        def step(state, batch):
            train_step.forward_with_loss = loss
            try:
                return type(trainstep).step.__wrapped__(trainstep, state, batch)
            finally:
                train_step.forward_with_loss = plain

        return Step(jax.jit(step), trainstep.init(names["shapes"]), (names["batch"],), "params", names["frozen"])

    adam = kd.optim.partial_updates(optax.adamw(1e-3), kd.optim.select(["head", "encoder.kernel"]))
    optimizer = names["optimizer"]
    return Rows(of(adam, plain), of(optimizer, plain), of(optimizer, wrapped), lambda state: state.params)


@rows_of("Brax")
def brax() -> Rows:
    names = trainers.brax().names
    made = execute("Brax", 1, names)
    frozen, params, tx = made["frozen"], names["params"], made["tx"]
    make = functools.partial(names["gradients"].gradient_update_fn, pmap_axis_name=None, has_aux=True)

    def of(update, tx):
        def step(state, data, key):
            (_, metrics), params, optimizer_state = update(state[0], None, data, key, optimizer_state=state[1])
            return (params, optimizer_state), metrics

        return Step(jax.jit(step), (params, tx.init(params)), (names["data"], names["key"]), "0", frozen)

    clip, adam = optax.clip_by_global_norm(1.0), optax.adam(3e-4)
    own = optax.chain(clip, multi_transform(adam, "policy/params/hidden_[01]/*"))
    loss = names["loss"]
    return Rows(of(make(loss, own), own), of(make(loss, tx), tx), of(made["update"], tx), lambda state: state[0])


@rows_of("jax-privacy")
def jax_privacy() -> Rows:
    names = trainers.jax_privacy().names
    made = execute("jax-privacy", 1, names)
    frozen, params, privatizer = made["frozen"], names["params"], names["privatizer"]

    def of(gradient, tx):
        def step(state, x):
            params, noise_state, opt_state = state
            grads, noise_state = privatizer.update(gradient(params, x), noise_state)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), noise_state, opt_state), None

        return Step(jax.jit(step), (params, privatizer.init(params), tx.init(params)), (names["x"],), "0", frozen)

    dense = names["clipped_grad"](names["loss"], l2_clip_norm=1.0)
    own, optimizer = of(dense, optax.adamw(1e-3)), of(dense, made["tx"])
    return Rows(own, optimizer, of(made["gradient"], made["tx"]), lambda state: state[0])


@rows_of("NetKet")
def netket() -> Rows:
    names = trainers.netket().names
    nk, vstate, of = names["nk"], names["vstate"], names["of"]
    made, adam = execute("NetKet", 1, names), optax.adam(1e-2)
    frozen, trains = made["frozen"], [("hidden", "kernel"), ("head", "kernel"), ("head", "bias")]
    own = nk.vqs.freeze_parameters(vstate, lambda path, _: path not in trains)
    parts = lambda state: {name: jax.tree.leaves(state[name]) for name in ("params", "rest")}  # noqa: E731
    return Rows(
        of(own, adam, frozen),
        of(vstate, fz.freeze(adam, frozen), frozen),
        of(made["vstate"], adam, "rest", parts),
        parts,
    )


@rows_of("NumPyro")
def numpyro() -> Rows:
    names = trainers.numpyro().names
    svi, model, guide, of = names["numpyro"].infer.SVI, names["model"], names["guide"], names["of"]
    made = execute("NumPyro", 1, names)
    frozen, elbo = made["frozen"], names["numpyro"].infer.Trace_ELBO()
    own = multi_transform(optax.adam(1e-3), "decoder")
    ways = svi(model, guide, own, elbo), svi(model, guide, made["tx"], elbo), made["svi"]
    return Rows(*(of(lambda _, way=way: way, frozen, {}) for way in ways), names["parameters"])


@rows_of("MaxText")
def maxtext() -> Rows:
    return maxtext_with(linen=False)


def maxtext_with(linen: bool) -> Rows:
    """A small decoder whose 4 layers are scanned."""
    from flax import nnx
    from flax.training.train_state import TrainState
    from maxtext.common.train_state_nnx import TrainStateNNX
    from maxtext.trainers.pre_train import train
    from maxtext.utils import max_utils, model_creation_utils

    plain, key = train.loss_fn, jax.random.key(0)
    names = {"train": train, "nnx": nnx, "TrainStateNNX": TrainStateNNX}
    data, options = trainers.maxtext_data(), ["scan_layers=true", "base_num_decoder_layers=4"]
    options += ["pure_nnx=false", "enable_nnx=false", "pure_nnx_decoder=false"] if linen else []

    def of(option, way):
        config, mesh = trainers.maxtext_config(*options, option)
        with jax.set_mesh(mesh):
            if linen:
                model = model_creation_utils.from_config(config, mesh=mesh)
                variables = model.init({"params": key, "dropout": key}, data["inputs"], data["inputs_position"])
                params = {"params": max_utils.unbox_logicallypartioned(variables)["params"]}
            else:
                model = model_creation_utils.create_nnx_abstract_model(config, mesh)[0]()
            tx = trainers.maxtext_optimizer(config, model)
            try:
                made = execute("MaxText", 2 + linen, names | {"model": model, "tx": tx})
                loss = train.loss_fn if way == "both" else plain
            finally:
                train.loss_fn = plain
            frozen, tx = made["frozen"], tx if way == "own" else made["tx"]
            if linen:
                graphdef, state, rng = model, TrainState.create(apply_fn=model.apply, params=params, tx=tx), (key,)
            else:
                graphdef, state = nnx.split(TrainStateNNX(model, nnx.Optimizer(model, tx, wrt=nnx.Param)))
                rng = ()

        def step(state, data):
            train.loss_fn = loss
            try:
                return train.train_step(graphdef, config, None, None, state, dict(data), *rng)
            finally:
                train.loss_fn = plain

        return Step(jax.jit(step), state, (data,), "params" if linen else "model", frozen)

    own = of("trainable_parameters_mask=['.*layers.*','.*token_embedder.*']", "own")
    select = (lambda state: state.params) if linen else (lambda state: nnx.to_pure_dict(state["model"]))
    return Rows(own, of("steps=10", "optimizer"), of("steps=10", "both"), select)


def cost(step: Step) -> tuple[int, int]:
    """The FLOPs of the traced step, each iteration of its loops included, and the bytes of the compiled one."""
    return flops(jax.make_jaxpr(step.run)(step.state, *step.batch).eqns), trainers.cost(step)[1]


def shown(title: str) -> list[str]:
    """The cells of the page's table of rows after the first two."""
    [line] = re.findall(rf"^\| {title} \|.*\|$", PAGE.read_text(encoding="utf-8"), re.M)
    return [cell.strip() for cell in line.split("|")[3:-1]]


def measured(rows: Rows) -> list[str]:
    """The same cells: FLOPs in millions, then KiB, of each way."""
    costs = [cost(step) for step in rows[:3]]
    return [f"{count / 1e6:.2f} M" for count, _ in costs] + [f"{nbytes / 1024:,.0f} KiB" for _, nbytes in costs]


def write() -> None:
    """Writes the table."""
    for title in sys.argv[1:] or ROWS:
        cells, page = measured(ROWS[title]()), PAGE.read_text(encoding="utf-8")
        [line] = re.findall(rf"^\| {title} \|.*\|$", page, re.M)
        new = f"| {title} | {line.split('|')[2].strip()} | {' | '.join(cells)} |"
        PAGE.write_text(page.replace(line, new), encoding="utf-8")


if __name__ == "__main__":
    write()
