"""Memory of fine-tuning decoders of 8B to 405B parameters on meshes of TPUs or GPUs, from the compiler.

A decoder of Llama 3's shape (8B, 70B, 405B), scanned and rematerialized; bfloat16, FSDP times tensor parallelism (of 4,
8 and 16), one sequence of 4096 tokens per data shard, AdamW with float32 moments behind ``clip_by_global_norm(1.0)``.
The step donates the trainable parameters and the optimizer state. Trainable is everything; or the last layer of the
stack, the last norm and the head; or 16 rows of the embedding and 16 columns of the head, which is not tied; or the
scales of all norms. Each of these four is written in five ways:

* ``fz.offload``: ``fz.restrict`` on parameters whose frozen stacks ``fz.offload`` has moved to host memory. Full
  fine-tuning has no frozen stacks, so its figures are those of ``fz.restrict``;
* ``fz.restrict``: parameters split by ``fz.partition``, the optimizer unwrapped;
* ``fz.freeze``: the full tree, ``fz.value_and_grad`` and ``fz.apply_updates``;
* ``optax.partition``: ``jax.value_and_grad`` of the full tree, the whole chain inside ``optax.partition``,
  ``set_to_zero`` for frozen leaves;
* ``optax.partition, clip outside``: the clip before ``optax.partition``, so that its norm is that of all gradients.

Optax cannot freeze rows. There, a partially frozen leaf is trained as a whole, and a mask computed from an iota zeroes
its gradient and update at the frozen rows.

In the tables, ``no`` means that the step does not fit, and ``alone`` that its arguments alone exceed the memory, so
that nothing was compiled; "host" is followed by the host memory per chip, in GiB. Meshes that hold the arguments of no
step are left out, and so are those larger than the first on which every step fits.

Each cell is compiled in its own process. The compiler assigns all buffers within seconds and then generates machine
code for a minute or more; the process is stopped when the buffer assignment has been written. ``--to-the-end`` waits
for the machine code and reads ``memory_analysis()``, which agrees to a ten-thousandth. Both include host memory; in the
buffer assignment it is memory space 5. A step fits if it fits both memories. The host has 48 GiB for each v5e chip
(machine types ct5lp-hightpu-1t, -4t and -8t) and 112 GiB for each v5p chip (ct5p-hightpu-4t). Meshes of one and two
chips are part of a topology of four.

GPUs (``--chips h100``) are compiled to the end, with the CUDA packages of JAX. There is no ``fz.offload``, because this
compiler ignores in which memory an argument is, and one step more: any two layers of the stack, as dynamic rows.

Run with ``python tests/benchmarks/scale.py`` (8B on 4 chips of v5e; ``--all``: every size and mesh; ``--sizes`` and
``--chips`` select some; ``--json FILE`` saves each figure and resumes from the file).
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import measure  # first: it sets up the TPU compiler

import jax  # isort: skip
import jax.numpy as jnp
import optax
from decoder import ADAMW, SHAPES, Decoder, adamw_state, partition
from gpu_devices import GPUS, devices
from rich.table import Table

import optax_freeze as fz

TENSOR_PARALLEL = {"8B": 4, "70B": 8, "405B": 16}
TOPOLOGIES = {
    "v5e": {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    "v5p": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"},
}
MESHES = (1, 2, *TOPOLOGIES["v5e"])
"""Numbers of chips. Meshes of one and two are part of the smallest topology."""
HBM = {"v5e": 15.75, "v5p": 95.73}
"""GiB per chip, from the compiler's message when a step does not fit."""

HOST = {"v5e": 48.0, "v5p": 112.0}
"""GiB of host memory per chip, for the machine types of Google Cloud: ct5lp-hightpu-1t, -4t and -8t have 48, 192 and
384 GB, ct5p-hightpu-4t has 448; a GB of Compute Engine is 2**30 bytes."""

for _name, _gpu in GPUS.items():
    TOPOLOGIES[_name] = {chips: str(chips) for chips in (1, 2, 4, 8, 16, 32, 64)}
    HBM[_name], HOST[_name] = _gpu.memory / 2**30, float("inf")

KINDS = ("full", "last block and head", "16 new tokens", "norms")
DYNAMIC = "two layers, dynamic rows"
NEW = 16
LENGTHS = tuple(2**k for k in range(9, 18))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One step to compile."""

    size: str
    chip: str
    chips: int
    kind: str
    way: str
    length: int = 4096

    @property
    def decoder(self) -> Decoder:
        topology = f"{self.chip}:{TOPOLOGIES[self.chip][max(4, self.chips)]}"
        tensor_parallel = min(TENSOR_PARALLEL[self.size], self.chips)
        return Decoder(*SHAPES[self.size], topology, tensor_parallel, self.chips, length=self.length)

    @property
    def build(self) -> "Callable[..., Step]":
        return WAYS[self.way]

    def program(self) -> "Cell":
        """The cell to compile: with nothing frozen, ``fz.offload`` is the program of ``fz.restrict``."""
        return dataclasses.replace(self, way="fz.restrict") if (self.kind, self.way) == ("full", "fz.offload") else self


@dataclasses.dataclass(frozen=True)
class From:
    """The rows of a leaf from ``first`` on are trainable."""

    first: int
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class AnyLayers:
    """So many rows of a leaf are trainable, given by an array."""

    count: int


def trains(kind: str, decoder: Decoder) -> Any:
    """For each leaf, whether it is trainable, or which of its rows are."""
    names = ("q", "k", "v", "o", "gate", "up", "down")
    norms = ("before", "between")
    blocks: Any = dict.fromkeys(names + norms, kind == "full")
    if kind == "last block and head":
        blocks = dict.fromkeys(blocks, From(decoder.layers - 1))
        return {"embed": False, "blocks": blocks, "norm": True, "head": True}
    if kind == "16 new tokens":
        old = decoder.vocabulary - NEW
        return {"embed": From(old), "blocks": blocks, "norm": False, "head": From(old, axis=1)}
    if kind == DYNAMIC:
        blocks = dict.fromkeys(blocks, AnyLayers(2))
        return {"embed": False, "blocks": blocks, "norm": False, "head": False}
    if kind == "norms":
        return {"embed": False, "blocks": blocks | dict.fromkeys(norms, True), "norm": True, "head": False}
    return {"embed": True, "blocks": blocks, "norm": True, "head": True}


def spec(which: Any) -> Any:
    def frozen(trains: Any) -> Any:
        if isinstance(trains, AnyLayers):
            return ~fz.rows(jnp.arange(trains.count))
        return fz.rows(slice(0, trains.first), trains.axis) if isinstance(trains, From) else not trains

    return jax.tree.map(frozen, which)


def in_float32(tx: optax.GradientTransformation, params: Any) -> Any:
    """The shapes of an optimizer state; moments are float32 and sharded like their parameters."""

    def moments(x: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
        dtype = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)

    return jax.tree.map(moments, jax.eval_shape(tx.init, params), fz.state_shardings(tx, params))


Step = tuple[tuple[Any, ...], Callable[..., Any]]
"""Arguments, of which the first two are donated, and a function that returns these two and the loss."""


def on_host(x: jax.ShapeDtypeStruct) -> bool:
    return x.sharding is not None and x.sharding.memory_kind == "pinned_host"


def as_of_arrays(traced: Any, shapes: Any) -> Any:
    """Traced arguments with the types of real arrays; JAX traces shapes as device arrays, whatever their memory."""
    return jax.tree.map(lambda x, s: jax.device_put(x, jax.memory.Space.Host) if on_host(s) else x, traced, shapes)


def by_restrict(loss: Callable[..., jax.Array], params: Any, which: Any) -> Step:
    trainable, placed = partition(params, spec(which))

    def value_and_grad(trainable: Any, rest: Any, tokens: jax.Array) -> Any:
        return jax.value_and_grad(fz.restrict(loss, as_of_arrays(rest, placed)))(trainable, tokens)

    state = adamw_state(trainable, params["norm"].sharding.mesh)
    return (trainable, state, placed), measure.stepping(value_and_grad, ADAMW)


def by_offload(loss: Callable[..., jax.Array], params: Any, which: Any) -> Step:
    return by_restrict(loss, fz.offload(params, spec(which)), which)


def by_freeze(loss: Callable[..., jax.Array], params: Any, which: Any) -> Step:
    frozen = spec(which)
    tx = fz.freeze(ADAMW, frozen, full_updates=False)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, grads = fz.value_and_grad(loss, fz.spec_of(state))(params, tokens)
        updates, state = tx.update(grads, state, params)
        return fz.apply_updates(params, updates), state, value

    return (params, in_float32(tx, params)), step


def by_optax(loss: Callable[..., jax.Array], params: Any, which: Any, clip_around: bool = False) -> Step:
    labels = jax.tree.map(lambda t: "trainable" if t else "frozen", which)
    clip, adamw = optax.clip_by_global_norm(1.0), optax.adamw(1e-5, mu_dtype=jnp.float32)
    tx = optax.partition({"trainable": adamw if clip_around else ADAMW, "frozen": optax.set_to_zero()}, labels)
    tx = optax.chain(clip, tx) if clip_around else tx

    def rows(tree: Any) -> Any:
        def zero(t: Any, x: jax.Array) -> jax.Array:
            if not isinstance(t, From):
                return x
            return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, t.axis) < t.first, 0, x)

        return jax.tree.map(zero, which, tree)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(rows(grads), state, params)
        return optax.apply_updates(params, rows(updates)), state, value

    return (params, in_float32(tx, params)), step


WAYS: dict[str, Callable[..., Step]] = {
    "fz.offload": by_offload,
    "fz.restrict": by_restrict,
    "fz.freeze": by_freeze,
    "optax.partition": by_optax,
    "optax.partition, clip outside": functools.partial(by_optax, clip_around=True),
}


def lower(cell: Cell) -> "tuple[jax.stages.Lowered, Memory]":
    """The lowered step, and the memory of its arguments."""
    decoder = cell.decoder
    mesh = decoder.mesh(devices(cell.chip, cell.chips) if cell.chip in GPUS else None)
    given, step = cell.build(decoder.loss(mesh), decoder.params(mesh), trains(cell.kind, decoder))
    args = (*given, decoder.tokens(mesh))
    back = jax.tree.map(lambda x: x.sharding, args[:2])
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*back, None))
    leaves = jax.tree.leaves(args)
    device, host = (gibibytes(x for x in leaves if on_host(x) == there) for there in (False, True))
    return step.lower(*args), Memory(device, 0.0, 0.0, 0.0, HBM[cell.chip], host, HOST[cell.chip])


def gibibytes(shapes: Iterable[jax.ShapeDtypeStruct]) -> float:
    """GiB of the shards that one chip holds."""
    shards = [jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype) for x in shapes]
    return measure.nbytes(shards) / 2**30


def one_program(chip: str) -> bool:
    """Whether full fine-tuning is the same program with ``fz.freeze`` and ``optax.partition``, ignoring names."""
    cells = (Cell("8B", chip, 4, "full", way) for way in ("fz.freeze", "optax.partition"))
    texts = {re.sub(r'jax\.result_info = "[^"]*"|%\w+', "", lower(cell)[0].as_text()) for cell in cells}
    return len(texts) == 1


OUT_OF_MEMORY = re.compile(r"temporaries \(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)")
ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (?:color (\d+), )?(.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Memory:
    """GiB on one chip, and of host memory per chip. The loss is the only output that does not alias an argument."""

    argument: float
    temporary: float
    output: float
    alias: float
    hbm: float
    host: float = 0.0
    of_host: float = float("inf")

    @property
    def total(self) -> float:
        return self.argument + self.temporary + self.output - self.alias

    @property
    def fits(self) -> bool:
        return self.total <= self.hbm and self.host <= self.of_host


def compile_here(cell: Cell) -> Memory:
    lowered, arguments = lower(cell)
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        found = OUT_OF_MEMORY.search(str(error))
        if found is None:
            raise
        temporary = float(found[1]) - arguments.argument  # the message counts the arguments as temporaries
        return dataclasses.replace(arguments, temporary=temporary, hbm=float(found[2]))
    assert memory, "the compiler gives no memory analysis"
    argument, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    output, alias = memory.output_size_in_bytes, memory.alias_size_in_bytes
    host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    host += memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes
    argument, temporary, output, alias, host = (each / 2**30 for each in (argument, temporary, output, alias, host))
    return Memory(argument, temporary, output, alias, arguments.hbm, host, arguments.of_host)


ON_CHIP, ON_HOST = ("", "0"), "5"
"""Colors of buffers in HBM and in host memory; other colors are faster memory of the chip."""


def from_buffers(assignment: str, chip: str) -> Memory:
    """Memory of the chip and the host, from the compiler's buffer assignment."""
    argument = temporary = output = alias = host = 0
    for size, color, what in ALLOCATION.findall(assignment):
        host += int(size) * (color == ON_HOST)
        if color not in ON_CHIP:
            continue
        if "parameter" in what:
            argument += int(size)
            alias += int(size) * ("maybe-live-out" in what)
        elif "maybe-live-out" in what or what.startswith("output"):
            output += int(size)
        else:
            temporary += int(size)
    sizes = (each / 2**30 for each in (argument, temporary, output + alias, alias, host))
    argument, temporary, output, alias, host = sizes
    return Memory(argument, temporary, output, alias, HBM[chip], host, HOST[chip])


def compile_apart(cell: Cell, to_the_end: bool, script: str = __file__) -> Memory:
    """Compiles in a new process of this script, which is stopped once the buffer assignment is written.

    For a GPU it is not stopped: its compiler takes only seconds.
    """
    to_the_end |= cell.chip in GPUS
    with tempfile.TemporaryDirectory() as folder:
        dump = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text"
        env = os.environ if to_the_end else {**os.environ, "XLA_FLAGS": dump}
        command = [sys.executable, script, "--cell", json.dumps(dataclasses.astuple(cell))]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        while process.poll() is None:
            time.sleep(0.2)
            if list(Path(folder).glob("*jit_step*_after_buffer_assignment.txt")):
                process.kill()
                process.wait()
                [path] = Path(folder).glob("*jit_step*-buffer-assignment.txt")
                return from_buffers(path.read_text(), cell.chip)
        assert process.stdout
        assert process.returncode == 0, f"{cell} failed to compile"
        return Memory(**json.loads(process.stdout.read()))


def compiled_a_cell() -> bool:
    """Whether this process was started for one cell, whose figures it has now printed."""
    if sys.argv[1:2] != ["--cell"]:
        return False
    print(json.dumps(dataclasses.asdict(compile_here(Cell(*json.loads(sys.argv[2]))))))
    return True


class Results:
    """Figures of cells, saved in a file if ``path`` is given."""

    def __init__(self, path: Path | None, to_the_end: bool, script: str = __file__) -> None:
        self.path, self.to_the_end, self.script = path, to_the_end, script
        self.known: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}

    def __call__(self, cell: Cell) -> Memory:
        cell = cell.program()
        name = " | ".join(map(str, dataclasses.astuple(cell)))
        if name not in self.known:
            arguments = lower(cell)[1]
            memory = compile_apart(cell, self.to_the_end, self.script) if arguments.fits else arguments
            self.known[name] = dataclasses.asdict(memory)
            if self.path:
                self.path.write_text(json.dumps(self.known, indent=1))
        return Memory(**self.known[name])


def ways(chip: str) -> list[str]:
    """For GPUs the compiler ignores in which memory an argument is."""
    return [way for way in WAYS if way != "fz.offload" or chip not in GPUS]


def steps(chip: str) -> list[tuple[str, str]]:
    """The kinds and ways of the steps that are compiled for a chip."""
    dynamic = [(DYNAMIC, "fz.freeze")] if chip in GPUS else []
    return [*itertools.product(KINDS, ways(chip)), *dynamic]


def kinds(chip: str) -> list[str]:
    return list(dict.fromkeys(kind for kind, _ in steps(chip)))


def meshes(size: str, chip: str, results: Results) -> dict[int, dict[tuple[str, str], Memory]]:
    """All cells, from the first mesh that fits the arguments of any step to the first on which every step fits."""
    found: dict[int, dict[tuple[str, str], Memory]] = {}
    for chips in TOPOLOGIES[chip] if chip in GPUS else MESHES:
        found[chips] = {each: results(Cell(size, chip, chips, *each)) for each in steps(chip)}
        if all(memory.fits for memory in found[chips].values()):
            break
    return {chips: cells for chips, cells in found.items() if any(memory.temporary for memory in cells.values())}


def figures(size: str, chip: str, found: dict[int, dict[tuple[str, str], Memory]]) -> Table:
    """The table of arguments and temporaries of each step."""
    title = f"{size} on {chip}, GiB per chip of {HBM[chip]:.2f}: arguments + temporaries = total"
    table = measure.table(title, *ways(chip), label="chips, trainable")
    for chips, cells in found.items():
        for kind in kinds(chip):
            shown = (text(cells[kind, way]) if (kind, way) in cells else "" for way in ways(chip))
            table.add_row(f"{chips}, {kind}", *shown)
    return table


def text(memory: Memory) -> str:
    chip = f"{memory.argument:.1f} + {memory.temporary:.1f} = {memory.total:.1f}"
    shown = chip if memory.temporary else f"{memory.argument:.1f} alone"
    host = f", host {memory.host:.1f}" if memory.host else ""
    return f"{shown}{host}{'' if memory.fits else ': no'}"


def smallest(found: dict[tuple[str, str], dict[int, dict[tuple[str, str], Memory]]]) -> Table:
    """The table of the smallest mesh on which each step fits."""
    columns = list(dict.fromkeys(way for _, chip in found for way in ways(chip)))
    table = measure.table("Chips needed", *columns, label="trainable")
    for (size, chip), of_mesh in found.items():
        over = f"over {max(TOPOLOGIES[chip])}"
        for kind in kinds(chip):
            fitting = (
                next((str(chips) for chips, cells in of_mesh.items() if cells[kind, way].fits), over)
                if (kind, way) in steps(chip)
                else ""
                for way in columns
            )
            table.add_row(f"{size} on {chip}, {kind}", *fitting)
    return table


def longest(size: str, chip: str, results: Results) -> Table:
    """The table of the longest sequence with which each step fits on one chip."""
    title = f"{size} on one {chip}, GiB of {HBM[chip]:.1f}: the longest sequence that fits, of powers of two"
    table = measure.table(title, *ways(chip), label="trainable")
    for kind in kinds(chip):
        row = []
        for way in ways(chip):
            fitting = "none" if (kind, way) in steps(chip) else ""
            for length in LENGTHS if fitting else ():
                memory = results(Cell(size, chip, 1, kind, way, length))
                if not memory.fits:
                    break
                fitting = f"{length}: {memory.total:.1f}"
            row.append(fitting)
        table.add_row(kind, *row)
    return table


def tables(sizes: Iterable[str], chips: Iterable[str], results: Results) -> list[Table]:
    found = {(size, chip): meshes(size, chip, results) for size in sizes for chip in chips}
    return [smallest(found), *(figures(*place, of_mesh) for place, of_mesh in found.items())]


def main() -> None:
    if compiled_a_cell():
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every size on every kind of chip")
    parser.add_argument("--sizes", nargs="*", choices=list(SHAPES), help="sizes of the decoder, on every mesh")
    parser.add_argument("--chips", nargs="*", choices=list(TOPOLOGIES), help="kinds of chips, TPUs or GPUs")
    parser.add_argument("--one", choices=list(TOPOLOGIES), help="the longest sequences with which 8B fits on one chip")
    parser.add_argument(
        "--json", type=Path, help="a file in which figures are saved, and from which known ones are read"
    )
    parser.add_argument("--to-the-end", action="store_true", help="also compile machine code: minutes per cell")
    args = parser.parse_args()
    results = Results(args.json, args.to_the_end)
    built = []
    if args.all or args.sizes or args.chips:
        built = tables(args.sizes or SHAPES, args.chips or ("v5e", "v5p"), results)
    elif not args.one:
        built = [figures("8B", "v5e", {4: {each: results(Cell("8B", "v5e", 4, *each)) for each in steps("v5e")}})]
    if args.one:
        built.append(longest("8B", args.one, results))
    for table in built:
        measure.show(table)
    same = "the same program" if one_program((args.chips or [args.one or "v5e"])[0]) else "different programs"
    measure.show(f"Full fine-tuning with fz.freeze and with optax.partition: {same}, ignoring the names of results.")


if __name__ == "__main__":
    main()
