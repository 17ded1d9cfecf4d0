"""``optax-freeze CHECKPOINT``: shows what patterns freeze in a checkpoint, without loading it.

A summary needs paths, shapes and dtypes and nothing else, so patterns for a model of hundreds of gigabytes can be tried
on a laptop, in a second. ``python -m optax_freeze`` is the same program.
"""

import argparse
import difflib
import inspect
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
from etils import epath

import optax_freeze as fz
from optax_freeze._errors import described, in_one_line, printable, value_error
from optax_freeze._report.stored_shapes import latest_step, stored_shapes
from optax_freeze._spec import tree as _tree
from optax_freeze._verify.saved_base import is_key
from optax_freeze.checkpoint._record import mask_struct, read_record, reading, spec_of

_EXAMPLES = """\
examples:
  optax-freeze base                                   every leaf, with its path
  optax-freeze base --freeze 'encoder/**'             the encoder frozen
  optax-freeze base --freeze embed '**/bias'          everything that one of the patterns matches
  optax-freeze base --all-except head --depth 1       all but the head, a row for each name at the top
  optax-freeze base --freeze embed --optimizer adamw  and the state of AdamW
  optax-freeze base --freeze embed --json             the same numbers, for a script
  optax-freeze model.safetensors --freeze '*embed*'   a file: .safetensors, .npz or .msgpack of Flax
  optax-freeze run/1000 --params state/params         a checkpoint that holds more than parameters
  optax-freeze adapters                               of optax_freeze.checkpoint: what was frozen

CHECKPOINT is a file, or a directory that Orbax wrote: of one tree, or of a CheckpointManager, of which the latest step
is taken and the item named params, or the only one. Otherwise name the step and the item: base/1000/default.
A pattern is that of fz.path: * within a segment, ** over segments, ?, [a-c]; encoder is encoder/**.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a summary.

    Args:
      argv: the arguments of the command line, those of the process if None.

    Returns:
      The exit status: 0, or 2 for a wrong pattern, checkpoint or optimizer, with a message on standard error.
    """
    args = _parser().parse_args(argv)
    try:
        shapes, frozen = _read(epath.Path(args.checkpoint), args.params)
        if args.freeze:
            frozen = fz.path(*args.freeze)
        elif args.all_except:
            frozen = fz.all_except(*args.all_except)
        tx = None if args.optimizer is None else _optimizer(args.optimizer)
        found = fz.summary(shapes, frozen, tx, depth=args.depth)
    except (ImportError, OSError, TypeError, ValueError) as error:
        lines = map(printable, f"error: {error}".split("\n"))  # an error may be that of another library
        print(*lines, sep="\n", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(_as_json(found), indent=2))
    elif sys.stdout.isatty():
        from rich import print as show

        show(found)
    else:
        print(found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="optax-freeze",
        usage="%(prog)s CHECKPOINT [--freeze PATTERN ... | --all-except PATTERN ...] [options]",
        description="Shows what patterns freeze in a checkpoint. Reads only shapes, no arrays.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several: dict[str, Any] = {"action": "extend", "nargs": "+", "metavar": "PATTERN"}
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory that Orbax wrote, or a file")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--freeze", **several, help="freeze leaves that any of them matches")
    which.add_argument("--all-except", **several, help="freeze all leaves that none of them matches")
    parser.add_argument("--params", default="", metavar="PATH", help="path of the parameters in the checkpoint")
    parser.add_argument("--optimizer", metavar="NAME", help="count its state: adamw, contrib.muon, ...")
    parser.add_argument("--depth", type=int, metavar="N", help="one row for each path of N segments")
    parser.add_argument("--json", action="store_true", help="print JSON: a row for each leaf, and the totals")
    parser.add_argument("--version", action="version", version=f"optax-freeze {fz.__version__}")
    return parser


def _as_json(found: fz.typing.Summary) -> dict[str, Any]:
    """What a summary prints, as numbers; rows of an optimizer's state only if there is one."""
    rows = [row._asdict() | {"dtype": None if row.dtype is None else str(row.dtype)} for row in found.rows]
    if found.row_state_bytes:
        rows = [row | {"state_bytes": size} for row, size in zip(rows, found.row_state_bytes, strict=True)]
    totals = [f"{kind}{of}" for of in ("elements", "bytes") for kind in ("", "trainable_", "frozen_")]
    return {"rows": rows} | {n: getattr(found, n) for n in (*totals, "state_bytes", "full_state_bytes", "extent")}


def _read(checkpoint: epath.Path, params: str) -> tuple[dict[str, Any], Any]:
    """The leaves of a checkpoint by their paths, and its spec if it has one."""
    step = latest_step(checkpoint)
    if step.is_dir():
        step = step.resolve()
        if _is_recorded(step):
            return _recorded(step)
    shapes = stored_shapes(step)
    if not params:
        return shapes, False
    prefix = f"{params.strip('/')}/"
    below = {path.removeprefix(prefix): leaf for path, leaf in shapes.items() if path.startswith(prefix)}
    if not below:
        tops = ", ".join(dict.fromkeys(path.split("/")[0] for path in shapes))
        at, got = str(checkpoint), f"--params {params}"
        expected, fix = f"a path that begins with one of {tops}", "leave --params out to see every path"
        raise value_error("there is no such path in the checkpoint", at=at, got=got, expected=expected, fix=fix)
    return below, False


def _is_recorded(step: epath.Path) -> bool:
    """Whether :mod:`optax_freeze.checkpoint` wrote this step: it has a record, and no other items."""
    items = {child.name for child in step.iterdir() if (child / "_METADATA").exists()}
    return (step / "spec" / "metadata").exists() and items <= {"trainable", "masks", "opt_state"}


def _recorded(step: epath.Path) -> tuple[dict[str, Any], Any]:
    leaves = read_record(str(step)).leaves
    structs = {str(i): mask_struct(leaf) for i, leaf in enumerate(leaves)}
    masks: dict[str, Any] = {i: np.zeros(s.shape, s.dtype) for i, s in structs.items() if not _tree.is_masked_node(s)}
    if any(mask.size for mask in masks.values()):
        with reading(str(step), "masks"), ocp.StandardCheckpointer() as checkpointer:
            masks |= checkpointer.restore(step / "masks")
    known = spec_of(leaves, [masks.get(str(i), _tree.MASKED_NODE) for i in range(len(leaves))])
    # A number stands for a key, and for a leaf that is not an array.
    return {leaf.path: 0 if leaf.struct is None or is_key(leaf.struct) else leaf.struct for leaf in leaves}, known


def _optimizer(name: str) -> optax.GradientTransformation:
    def wrong(got: str, fix: str) -> ValueError:
        what, expected = "not the name of an optimizer", "a function of Optax that creates one from a learning rate"
        return value_error(what, at=f"--optimizer {name}", got=got, expected=expected, fix=fix)

    short, contrib = name.removeprefix("contrib."), vars(optax.contrib)
    factory = contrib.get(short) or vars(optax).get(name)
    if not callable(factory):
        nearest = _nearest(short.lower(), {**contrib, **vars(optax)})
        fix = f"nearest names: {', '.join(nearest)}" if nearest else "for an optimizer of your own call fz.summary"
        raise wrong("no such function", fix)
    try:
        tx = factory(1e-3)
    except Exception as error:
        got = f"{type(error).__name__}: {in_one_line(error)}"
        raise wrong(got, "create the optimizer yourself and call fz.summary") from error
    if not isinstance(tx, optax.GradientTransformation):
        raise wrong(described(tx), "give the name of an optimizer, for example adamw")
    return tx


def _nearest(name: str, functions: Mapping[str, Any]) -> list[str]:
    """The names of optimizers most like this one; of similar ones those that begin alike."""
    public = {n: f for n, f in functions.items() if inspect.isfunction(f) and not n.startswith(("_", "scale_by_"))}
    names = [n for n, f in public.items() if "learning_rate" in inspect.signature(f).parameters]
    return sorted(difflib.get_close_matches(name, names, 8), key=lambda other: not other.startswith(name[:2]))[:3]


def run() -> int:
    """The program: :func:`main` on the CPU, without the log of Orbax."""
    jax.config.update("jax_platforms", "cpu")  # nothing is computed: leave the accelerator to others
    logging.getLogger("absl").setLevel(logging.ERROR)
    return main()


if __name__ == "__main__":
    sys.exit(run())
