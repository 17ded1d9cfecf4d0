"""Rows in the trainers of ``docs/trainers.md``: with the trainer's own freezing, ``fz.freeze``, and both wrappers.

The trainer's own freezing, or ``optax.multi_transform``, chooses whole leaves: it trains those with trainable rows.
``python -m gallery.trainer_rows`` in ``tests/`` writes the table of the page.
"""

import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import optax

import optax_freeze as fz
from gallery import trainers
from gallery.trainers import PAGE, Step, execute, multi_transform, step_of
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

    frozen = execute("Flax", 1, names)["frozen"]

    def of(tx, gradient):
        def make_step(loss):
            def step(state, x):
                value, grads = gradient(loss)(state.params, x)
                return state.apply_gradients(grads=grads), (value, optax.tree.norm(grads))

            return jax.jit(step)

        state = make(apply_fn=model.apply, params=names["params"], tx=tx)
        return Step(make_step, names["loss"], state, (x,), "params", frozen)

    optimizer = optax.chain(clip, fz.freeze(adam, frozen))
    own = of(optax.chain(clip, multi_transform(adam, "params/encoder/bias")), jax.value_and_grad)
    both = of(optimizer, lambda loss: execute("Flax", 1, names | {"loss": loss})["gradient"])
    return Rows(own, of(optimizer, jax.value_and_grad), both, lambda state: state.params)


@rows_of("Tunix")
def tunix() -> Rows:
    names = trainers.tunix().names
    names["config"] = names["TrainingConfig"](eval_every_n_steps=100)
    nnx, tokens = names["nnx"], names["tokens"]
    made = execute("Tunix", 1, names | {"model": names["Model"]()})
    frozen = made["frozen"]

    def of(trainer_of):
        """The step of a trainer of a loss; its model and optimizer are those of the state."""

        def make_step(loss):
            trainer = trainer_of(loss).with_gen_model_input_fn(lambda tokens: {"tokens": tokens})

            def step(state, tokens):
                both = nnx.merge(graphdef, state)
                out = trainer.create_train_step_fn()(*both, tokens)
                return nnx.state(both), out

            return jax.jit(step)

        trainer = trainer_of(names["loss"])
        graphdef, state = nnx.split((trainer.model, trainer.optimizer))
        return Step(make_step, names["loss"], state, (tokens,), "0", frozen)

    def plain(tx):
        make = lambda: names["PeftTrainer"](names["Model"](), tx, names["config"])  # noqa: E731
        return of(lambda loss: make().with_loss_fn(loss))

    own = plain(multi_transform(optax.adamw(1e-3), "head"))
    both = of(lambda loss: execute("Tunix", 1, names | {"loss": loss, "model": names["Model"]()})["trainer"])
    return Rows(own, plain(fz.freeze(optax.adamw(1e-3), frozen)), both, lambda state: nnx.to_pure_dict(state)[0])


@rows_of("Kauldron")
def kauldron() -> Rows:
    from kauldron.train import train_step

    names = trainers.kauldron().names
    kd, clip = names["kd"], optax.clip_by_global_norm(1.0)

    def block(loss):
        with mock.patch.object(train_step, "forward_with_loss", loss):
            return execute("Kauldron", 1, names), train_step.forward_with_loss

    def of(adam, wrapped=lambda loss: loss):
        trainer = names["trainer_of"](kd.optim.named_chain(clip=clip, adam=adam))
        names_of_step = {"trainer": trainer, "train_step": train_step, "state": trainer.trainstep.init(names["shapes"])}
        plain = step_of("Kauldron", batch=names["batch"], frozen=made["frozen"], **names_of_step)
        return dataclasses.replace(plain, make_step=lambda loss: plain.make_step(wrapped(loss)))

    made, _ = block(train_step.forward_with_loss)
    adam = kd.optim.partial_updates(optax.adamw(1e-3), kd.optim.select(["head", "encoder.kernel"]))
    both = of(made["optimizer"], lambda loss: block(loss)[1])
    return Rows(of(adam), of(made["optimizer"]), both, lambda state: state.params)


@rows_of("Brax")
def brax() -> Rows:
    names = trainers.brax().names
    made = execute("Brax", 1, names)
    frozen, params, tx = made["frozen"], names["params"], made["tx"]
    make = functools.partial(names["gradients"].gradient_update_fn, pmap_axis_name=None, has_aux=True)

    def of(update, tx):
        def make_step(loss):
            def step(state, data, key):
                (_, metrics), params, optimizer_state = made_update(state[0], None, data, key, optimizer_state=state[1])
                return (params, optimizer_state), metrics

            made_update = update(loss)
            return jax.jit(step)

        batch = (names["data"], names["key"])
        return Step(make_step, names["loss"], (params, tx.init(params)), batch, "0", frozen)

    clip, adam = optax.clip_by_global_norm(1.0), optax.adam(3e-4)
    own = optax.chain(clip, multi_transform(adam, "policy/params/hidden_[01]/*"))
    both = of(lambda loss: execute("Brax", 1, names | {"loss": loss})["update"], tx)
    return Rows(
        of(lambda loss: make(loss, own), own), of(lambda loss: make(loss, tx), tx), both, lambda state: state[0]
    )


@rows_of("jax-privacy")
def jax_privacy() -> Rows:
    names = trainers.jax_privacy().names
    made = execute("jax-privacy", 1, names)
    frozen, params, privatizer = made["frozen"], names["params"], names["privatizer"]

    def of(gradient, tx):
        def make_step(loss):
            def step(state, x):
                params, noise_state, opt_state = state
                grads, noise_state = privatizer.update(gradient(loss)(params, x), noise_state)
                updates, opt_state = tx.update(grads, opt_state, params)
                return (optax.apply_updates(params, updates), noise_state, opt_state), None

            return jax.jit(step)

        state = (params, privatizer.init(params), tx.init(params))
        return Step(make_step, names["loss"], state, (names["x"],), "0", frozen)

    dense = functools.partial(names["clipped_grad"], l2_clip_norm=1.0)
    both = of(lambda loss: execute("jax-privacy", 1, names | {"loss": loss})["gradient"], made["tx"])
    return Rows(of(dense, optax.adamw(1e-3)), of(dense, made["tx"]), both, lambda state: state[0])


@rows_of("NetKet")
def netket() -> Rows:
    from flax.traverse_util import flatten_dict, unflatten_dict

    names = trainers.netket().names
    nk, vstate, of = names["nk"], names["vstate"], names["of"]
    made, adam = execute("NetKet", 1, names), optax.adam(1e-2)
    frozen, trains = made["frozen"], [("hidden", "kernel"), ("head", "kernel"), ("head", "bias")]
    own = nk.vqs.freeze_parameters(vstate, lambda path, _: path not in trains)
    parts = lambda state: {name: jax.tree.leaves(part) for name, part in state["variables"].items()}  # noqa: E731

    def merged(state):
        variables = state["variables"]
        return unflatten_dict(flatten_dict(variables["params"]) | flatten_dict(variables.get("frozen_params", {})))

    return Rows(
        of(own, adam, params=merged, frozen=frozen),
        of(vstate, fz.freeze(adam, frozen), params=merged, frozen=frozen),
        of(made["vstate"], adam, params=parts, frozen="rest"),
        parts,
    )


@rows_of("NumPyro")
def numpyro() -> Rows:
    names = trainers.numpyro().names
    model, guide, of = names["model"], names["guide"], names["of"]
    frozen, infer = execute("NumPyro", 1, names)["frozen"], names["numpyro"].infer

    def plain(tx):
        def svi_of(_, loss):
            made = infer.SVI(model, guide, tx, infer.Trace_ELBO())
            made.loss.loss = loss
            return made

        return of(svi_of, frozen, {})

    def both(_, loss):
        with mock.patch.object(infer.Trace_ELBO, "loss", staticmethod(loss)):
            return execute("NumPyro", 1, names)["svi"]

    ways = plain(multi_transform(optax.adam(1e-3), "decoder")), plain(fz.freeze(optax.adam(1e-3), frozen))
    return Rows(*ways, of(both, frozen, {}), names["parameters"])


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

    key, names = jax.random.key(0), {"train": train, "nnx": nnx, "TrainStateNNX": TrainStateNNX}
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

            def block(loss):
                with mock.patch.object(train, "loss_fn", loss):
                    return execute("MaxText", 2 + linen, names | {"model": model, "tx": plain_tx}), train.loss_fn

            plain_tx = tx
            made, _ = block(train.loss_fn)
            frozen, tx = made["frozen"], tx if way == "own" else made["tx"]
            if linen:
                graphdef, state, rng = model, TrainState.create(apply_fn=model.apply, params=params, tx=tx), (key,)
            else:
                graphdef, state = nnx.split(TrainStateNNX(model, nnx.Optimizer(model, tx, wrt=nnx.Param)))
                rng = ()

        def make_step(loss):
            loss = block(loss)[1] if way == "both" else loss

            def step(state, data):
                with mock.patch.object(train, "loss_fn", loss):
                    return train.train_step(graphdef, config, None, None, state, dict(data), *rng)

            return jax.jit(step)

        return Step(make_step, train.loss_fn, state, (data,), "params" if linen else "model", frozen)

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
