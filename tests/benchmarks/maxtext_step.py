"""Memory and FLOPs of MaxText's own training step, from the compiler, for the last two layers and 16 new tokens.

The step of MaxText for Llama 3.1 (8B, 70B) with scanned layers, compiled as its ``train_compile`` does, for 16 chips of
v5e or 8 H100s: bfloat16, AdamW with float32 moments behind its clip, FSDP, one sequence of 2048 tokens per chip,
``remat_policy=full``. The last two layers and the last 16 rows of the embedding train:

* ``its own mask``: ``trainable_parameters_mask`` of the stacks and the embedding, the least that has these rows;
* ``fz.freeze``: around its optimizer;
* ``and freeze_loss``: ``optax_freeze.nnx.freeze_loss`` around its ``loss_fn``, too.

FLOPs are those of the traced step on all chips, all iterations of its loops included. The memory is that of arguments,
results and temporary arrays on one chip.

Run with ``python tests/benchmarks/maxtext_step.py`` in the environment of the gallery, with libtpu and JAX's CUDA
packages.
"""

import math
import os
import subprocess
import sys
from typing import Any

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import gpu_devices

import optax_freeze as fz
import optax_freeze.nnx as fnnx
from optax_freeze._program.flops import flops

CELLS = [(model, chips) for model in ("8b", "70b") for chips in ("16 v5e", "8 H100")]
WAYS = ("its own mask", "fz.freeze", "and freeze_loss")
FROZEN = fz.rules(
    {"decoder/layers/**": fz.rows(slice(0, -2), axis=1), "token_embedder/embedding": fz.rows(slice(0, -16))},
    default=True,
)


def compile_step(model: str, chips: str, way: str) -> tuple[float, float]:
    """TFLOP of the step, and GiB per chip; infinity if it does not fit."""
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
    from flax.linen import logical_axis_rules
    from maxtext.configs import pyconfig  # type: ignore
    from maxtext.optimizers import optimizers  # type: ignore
    from maxtext.trainers.pre_train import train, train_compile  # type: ignore
    from maxtext.utils import maxtext_utils, sharding  # type: ignore

    options = ["run_name=step", "enable_checkpointing=false", "skip_jax_distributed_system=true", "remat_policy=full"]
    options += [f"model_name=llama3.1-{model}", "weight_dtype=bfloat16", "dtype=bfloat16", "mu_dtype=float32"]
    options += ["scan_layers=true", "max_target_length=2048"]
    if chips == "16 v5e":
        options += ["hardware=tpu", "compile_topology=v5e-16", "compile_topology_num_slices=1"]
        options += ["per_device_batch_size=1"]
    else:  # MaxText counts the devices that are there: one
        options += ["hardware=gpu", "attention=dot_product", "per_device_batch_size=8"]
    if way == "its own mask":
        options.append("trainable_parameters_mask=['.*layers.*','.*token_embedder.*']")
    base = os.path.join(os.path.dirname(pyconfig.__file__), "base.yml")
    config = pyconfig.initialize(["", base, *options])
    if chips == "16 v5e":
        mesh = train_compile.get_topology_mesh(config)
    else:
        devices = maxtext_utils.create_device_mesh(config, gpu_devices.devices("h100", 8))
        mesh = jax.sharding.Mesh(devices, config.mesh_axes)
    if way != "its own mask":
        plain = optimizers.get_optimizer
        optimizers.get_optimizer = lambda *args, **kwargs: fz.freeze(plain(*args, **kwargs), FROZEN)
    if way == "and freeze_loss":
        train.loss_fn = fnnx.freeze_loss(train.loss_fn, FROZEN)
    args, _, shardings, _, graphdef = train_compile.get_shaped_inputs(mesh, config)
    of_params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    given = sharding.build_zero1_input_state_mesh_shardings(config, shardings, of_params)
    of_data = sharding.get_input_data_sharding(config, mesh)
    step, given, returned, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step, of_data, given, graphdef, config, of_params
    )
    with jax.set_mesh(mesh), mesh, logical_axis_rules(config.logical_axis_rules):
        places: dict[str, Any] = {"in_shardings": given, "out_shardings": returned}
        jitted = jax.jit(step, static_argnums=static, donate_argnums=donated, **places)
        traced = jitted.trace(*args)
        count = flops(traced.jaxpr.eqns) / 1e12
        try:
            memory: Any = traced.lower().compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return count, math.inf
    nbytes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return count, (nbytes - memory.alias_size_in_bytes) / 2**30


def main() -> None:
    if arguments := sys.argv[1:]:
        print(*compile_step(*arguments))
        return
    memory = measure.table("GiB per chip", *WAYS, label="step")
    counts = measure.table("TFLOP of a step on all chips", *WAYS, label="step")
    for model, chips in CELLS:
        commands = [[sys.executable, __file__, model, chips, way] for way in WAYS]
        found = [subprocess.run(each, check=True, stdout=subprocess.PIPE, text=True).stdout for each in commands]
        cells = [[float(number) for number in text.splitlines()[-1].split()] for text in found]
        label = f"{model.upper()} on {chips}"
        counts.add_row(label, *(f"{count:,.0f}" for count, _ in cells))
        memory.add_row(label, *(f"{gib:.2f}" if gib < math.inf else "does not fit" for _, gib in cells))
    measure.show(memory)
    measure.show(counts)


if __name__ == "__main__":
    main()
