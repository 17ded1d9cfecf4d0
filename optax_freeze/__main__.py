"""``python -m optax_freeze CHECKPOINT``: what a pattern freezes of a checkpoint, before anything is loaded or trained.

Orbax stores the shapes of a checkpoint beside its arrays. A summary needs nothing else, so patterns for a model of
hundreds of gigabytes can be tried on a laptop, in a second.
"""

import argparse
import difflib
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
from optax_freeze._spec import tree as _tree
from optax_freeze.checkpoint._record import mask_struct, read_record, reading, spec_of_record

_EXAMPLES = """\
examples:
  python -m optax_freeze base                                   every leaf, with its path
  python -m optax_freeze base --freeze 'encoder/**'             the encoder frozen
  python -m optax_freeze base --freeze embed --freeze '**/bias' all that one of the patterns matches
  python -m optax_freeze base --only 'head' --optimizer adamw   all but the head, and the state of AdamW
  python -m optax_freeze run/1000 --params state/params         a checkpoint that holds more than parameters
  python -m optax_freeze adapters                               of optax_freeze.checkpoint: what was frozen

CHECKPOINT is a directory that Orbax wrote: of one tree, or of a CheckpointManager, of which the latest step is taken
and the item named params, or the only one. Otherwise name the step and the item: base/1000/default.
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
        elif args.only:
            frozen = fz.only(*args.only)
        tx = _optimizer(args.optimizer) if args.optimizer else None
        found = fz.summary(shapes, frozen, tx, depth=args.depth)
    except (OSError, TypeError, ValueError) as error:
        lines = map(printable, f"error: {error}".split("\n"))  # an error may be that of another library
        print(*lines, sep="\n", file=sys.stderr)
        return 2
    if sys.stdout.isatty():
        from rich import print as show

        show(found)
    else:
        print(found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m optax_freeze",
        description="Says what patterns freeze of a checkpoint. Reads shapes, and no arrays.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory that Orbax wrote")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--freeze", action="append", metavar="PATTERN", help="freeze what it matches; may be repeated")
    which.add_argument("--only", action="append", metavar="PATTERN", help="freeze all but what it matches")
    parser.add_argument("--params", default="", metavar="PATH", help="path of the parameters in the checkpoint")
    parser.add_argument("--optimizer", metavar="NAME", help="count its state: adamw, contrib.muon, ...")
    parser.add_argument("--depth", type=int, metavar="N", help="sum up what is below N segments of a path")
    return parser


def _read(checkpoint: epath.Path, params: str) -> tuple[dict[str, Any], Any]:
    """The leaves of a checkpoint by their paths, and its spec if it has one."""
    if not checkpoint.exists():
        raise _wrong(checkpoint, "no such directory", _what_is_there(checkpoint))
    if not checkpoint.is_dir():
        raise _wrong(checkpoint, "a file", f"give the directory that Orbax wrote: {checkpoint.parent}?")
    step = _latest(checkpoint.resolve())
    if _is_recorded(step):
        return _recorded(step)
    shapes = _shapes(_item(step))
    if params:
        prefix = f"{params.strip('/')}/"
        below = {path.removeprefix(prefix): leaf for path, leaf in shapes.items() if path.startswith(prefix)}
        if not below:
            tops = ", ".join(dict.fromkeys(path.split("/")[0] for path in shapes))
            raise value_error(
                "no such place in the checkpoint",
                at=str(checkpoint),
                got=f"--params {params}",
                expected=f"a path that begins with one of {tops}",
                fix="leave --params out to see every path",
            )
        shapes = below
    return shapes, False


def _latest(checkpoint: epath.Path) -> epath.Path:
    """The latest step of a ``CheckpointManager``'s directory; any other directory itself."""
    steps = [child for child in checkpoint.iterdir() if child.name.isascii() and child.name.isdigit()]
    is_tree = (checkpoint / "_METADATA").exists()
    return max(steps, key=lambda child: int(child.name)) if steps and not is_tree else checkpoint


def _item(step: epath.Path) -> epath.Path:
    """The directory of one tree."""
    if (step / "_METADATA").exists():
        return step
    items = [child for child in step.iterdir() if (child / "_METADATA").exists()]
    named = [item for item in items if item.name == "params"] or items
    if len(named) == 1:
        return named[0]
    if items:
        names = ", ".join(sorted(item.name for item in items))
        raise _wrong(step, f"the items {names}", f"name one: {_listed(items)}")
    deeper = [below.parent for below in step.glob("*/*/_METADATA")]
    fix = f"name one: {_listed(deeper)}" if deeper else "give one that holds _METADATA, by itself or in an item"
    raise _wrong(step, "a directory that Orbax did not write", fix)


def _shapes(item: epath.Path) -> dict[str, Any]:
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.metadata(item).item_metadata.tree  # of some damaged files the metadata are None
    except Exception as error:
        fix = "give another step, or write it again"
        raise _wrong(item, "shapes that Orbax cannot read: a damaged checkpoint", fix) from error
    leaves = dict(zip(_tree.paths(tree), map(_leaf, _tree.flatten(tree)[0]), strict=True))
    if all(path.endswith("/value") for path in leaves):  # an nnx.State
        return {path.removesuffix("/value"): leaf for path, leaf in leaves.items()}
    return leaves


def _leaf(metadata: Any) -> Any:
    if isinstance(metadata, ocp.metadata.value.ScalarMetadata):
        return np.zeros((), metadata.dtype).item()
    if hasattr(metadata, "shape"):
        return jax.ShapeDtypeStruct(metadata.shape, metadata.dtype)
    return metadata


def _is_recorded(step: epath.Path) -> bool:
    """Whether :mod:`optax_freeze.checkpoint` wrote this step: it has a record, and no other items."""
    items = {child.name for child in step.iterdir() if (child / "_METADATA").exists()}
    return (step / "spec" / "metadata").exists() and items <= {"trainable", "masks", "opt_state"}


def _recorded(step: epath.Path) -> tuple[dict[str, Any], Any]:
    """Every leaf of a record, and its spec."""
    records: list[Mapping[str, Any]] = read_record(str(step))["leaves"]
    structs = {str(i): mask_struct(record) for i, record in enumerate(records)}
    masks: dict[str, Any] = {i: np.zeros(s.shape, s.dtype) for i, s in structs.items() if not _tree.is_hole(s)}
    if any(mask.size for mask in masks.values()):
        with reading(str(step), "masks"), ocp.StandardCheckpointer() as checkpointer:
            masks |= checkpointer.restore(step / "masks")
    known = spec_of_record(records, [masks.get(str(i), _tree.HOLE) for i in range(len(records))])
    return {record["path"]: _shape(record) for record in records}, known


def _shape(record: Mapping[str, Any]) -> Any:
    if record["shape"] is None or record["dtype"].startswith("key<"):
        return 0  # no array, and a leaf
    return jax.ShapeDtypeStruct(tuple(record["shape"]), record["dtype"])


def _optimizer(name: str) -> optax.GradientTransformation:
    contrib = {n: getattr(optax.contrib, n) for n in dir(optax.contrib) if not n.startswith("_")}
    factory = contrib.get(name.removeprefix("contrib.")) or vars(optax).get(name)
    if not callable(factory):
        nearest = difflib.get_close_matches(name, [*vars(optax), *contrib, *(f"contrib.{n}" for n in contrib)], 3)
        fix = f"nearest names: {', '.join(nearest)}" if nearest else "for an optimizer of your own call fz.summary"
        raise _no_optimizer(name, "no such function", fix)
    try:
        tx = factory(1e-3)
    except Exception as error:
        got = f"{type(error).__name__}: {in_one_line(error)}"
        raise _no_optimizer(name, got, "call fz.summary with one that you have made") from error
    if not isinstance(tx, optax.GradientTransformation):
        raise _no_optimizer(name, described(tx), "give the name of an optimizer, as adamw")
    return tx


def _no_optimizer(name: str, got: str, fix: str) -> ValueError:
    expected = "a function of optax or optax.contrib that makes an optimizer of a learning rate"
    return value_error("no optimizer", at=f"--optimizer {name}", got=got, expected=expected, fix=fix)


def _what_is_there(missing: epath.Path) -> str:
    """A hint for a path that does not exist: the directories beside its first missing segment."""
    while missing.parent != missing and not missing.parent.exists():
        missing = missing.parent
    above = missing.parent
    beside = {child.name: child for child in above.iterdir() if child.is_dir()} if above.is_dir() else {}
    near = difflib.get_close_matches(missing.name, beside)
    near = near or [name for name, child in beside.items() if any(child.glob("_*METADATA"))]
    return f"there is {_listed([beside[name] for name in near])}" if near else f"look into {above.resolve()}"


def _listed(paths: Sequence[epath.Path]) -> str:
    """Paths, three at most."""
    names = sorted(map(str, paths))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _wrong(checkpoint: epath.Path, got: str, fix: str) -> ValueError:
    return value_error(
        "not the checkpoint of one tree",
        at=str(checkpoint),
        got=got,
        expected="a directory that Orbax wrote, of one tree or of a CheckpointManager",
        fix=fix,
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # nothing is computed: leave the accelerator to others
    logging.getLogger("absl").setLevel(logging.ERROR)
    sys.exit(main())
