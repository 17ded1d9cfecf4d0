"""Writes ``models.md`` beside it, with the figures that the tests left in a folder.

Run with ``make gallery``.
"""

import datetime
import importlib.metadata
import json
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from gallery import cases, gallery  # noqa: E402

PAGE = HERE / "models.md"
COLUMNS = ("model", "frozen", "compilations", "wrong bits", "gradient")
COLUMNS += ("FLOPs", "bytes", "memory", "temporaries", "everything by")


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    rows = [row(case, json.loads((folder / f"{case.name}.json").read_text())) for case in cases.CASES]
    PAGE.write_text(page(rows), encoding="utf-8")


def row(case: gallery.Case, result: dict[str, Any]) -> list[str]:
    """A line of the table: ratios to the whole leaf, then to what is written by hand."""
    checked, whole, hand = result["checked"], result["whole"], result["hand"]

    def ratios(name: str) -> str:
        return f"{whole[name]:.2f}, {hand[name]:.2f}"

    costs = [ratios(name) for name in gallery.Cost._fields]
    error = checked["gradient_error"]
    exact = [str(checked["compilations"]), str(checked["wrong_bits"]), f"{error:.0e}" if error else "0"]
    merged = sorted({each.split(": ", 1)[1].rpartition(": ")[2].split(" at ")[0] for each in result["merged"]})
    return [f"{case.name} ({case.kind})", case.frozen, *exact, *costs, ", ".join(merged)]


def page(rows: list[list[str]]) -> str:
    """The page in Markdown."""
    rule = ["---" if not 2 <= i < 9 else "---:" for i in range(len(COLUMNS))]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in [COLUMNS, rule, *rows])
    known = [
        textwrap.fill(f"- {name}, {figure} ({peer}): {why.measured:.2f}. {why.reason}", 120, subsequent_indent="  ")
        for (name, peer, figure), why in gallery.EXCEPTIONS.items()
    ]
    above = "\n".join(["", f"Above {gallery.LIMIT}:", "", *known, ""]) if known else ""
    return f"{_HEAD}\n\n{table}\n{above}\nRun on {datetime.date.today()}: {', '.join(versions())}.\n"


def versions() -> Iterator[str]:
    """The packages of requirements.txt, and jaxlib, as they are installed."""
    names = re.findall(r"^([\w-]+)==", (HERE / "requirements.txt").read_text(), re.MULTILINE)
    for name in sorted({*names, "jaxlib"} - {"pytest", "rich"}):
        yield f"{name} {importlib.metadata.version(name)}"


_HEAD = f"""\
# Models of other packages

{len(cases.CASES)} models of other packages, each with a test. `make gallery` installs the packages (Python 3.12,
`tests/gallery/requirements.txt`), runs the tests and writes this page. The models are small and otherwise unchanged;
"-like" means layers of a package that are stacked and scanned as in the named library. Three lines of a training script
change in each case: the gradient (`fz.value_and_grad`), the optimizer (`fz.freeze`) and the update
(`fz.apply_updates`).

Each model trains for three steps with AdamW. The columns:

- **compilations** of the step; **wrong bits**: leaves in which a frozen bit changed.
- **gradient**: the largest difference from `jax.grad` of the whole model, divided by the largest element of the leaf's
  gradient.
- **FLOPs**, **bytes** (accessed) and **memory** of the gradient, as XLA reports them for the CPU; for FLOPs and bytes,
  scans are unrolled. Each cell has two ratios: to the gradient in which every leaf that is frozen by rows trains as a
  whole, and to rows put together by hand inside the loss, with `.at[rows].set` or by concatenation, whichever accesses
  fewer bytes. **Memory** is temporaries plus outputs, because XLA uses output buffers for temporary values and the
  gradient of a whole leaf is an output. **Temporaries** alone are listed, too.
- **everything by**: the operation that computes the gradient of the whole leaf ([how the gradient of rows is
  computed](../../docs/how_it_works.md#how-the-gradient-of-rows-is-computed)); empty if only rows are computed.

The tests require one compilation, no wrong bits, gradients within rounding, and at most {gallery.LIMIT} times the
FLOPs, bytes and memory of both. In decoders, encoders, mixtures of experts (MoE), vision transformers (ViT) and
convolutional networks, the last column must be empty."""

if __name__ == "__main__":
    main()
