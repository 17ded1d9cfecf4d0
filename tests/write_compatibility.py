"""Runs the whole optimizer matrix and writes ``tests/optimizer_matrix.md``: half an hour on two cores.

The page also serves as a record: the tests parse it and compare it with the installed Optax, and the exceptions that
``docs/compatibility.md`` lists with it.
"""

import concurrent.futures
import itertools
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import optax
from matrix import DTYPES, MARKS, MODES, OPTIMIZERS, SPECS, Cell, every_cell, run

PAGE = pathlib.Path(__file__).parent / "optimizer_matrix.md"


class Record(NamedTuple):
    """The contents of the page.

    Attributes:
      optax: the version of Optax.
      jax: the version of JAX.
      optimizers: the names of the optimizers, and the marks of each.
      limits: the cells whose optimizer fails without freezing, and its errors.
    """

    optax: str
    jax: str
    optimizers: Mapping[str, tuple[str, ...]]
    limits: Mapping[Cell, str]


def main() -> None:
    """Writes the page; if a cell fails, reports it and does not change the page."""
    limits, marks, failures = {}, {}, 0
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as programs,
        concurrent.futures.ProcessPoolExecutor(mp_context=spawn, max_tasks_per_child=1) as processes,
    ):
        # Control flow that runs op by op is compiled in each call.
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": programs, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        for name, found in zip(OPTIMIZERS, processes.map(cells_of, OPTIMIZERS), strict=True):
            print(name, file=sys.stderr, flush=True)
            for failure in found.failures:
                print(f"FAILED: {failure}", file=sys.stderr, flush=True)
            failures += len(found.failures)
            limits |= found.limits
            marks[name] = found.marks
    if failures:
        sys.exit(f"{failures} cells failed")
    PAGE.write_text(render(Record(optax.__version__, jax.__version__, marks, limits)), encoding="utf-8")


class Found(NamedTuple):
    """Results of the cells of one optimizer: its own errors, our failures, its marks."""

    limits: dict[Cell, str]
    failures: list[str]
    marks: tuple[str, ...]


def cells_of(optimizer: str) -> Found:
    """Runs every cell of an optimizer."""
    limits, failures = {}, []
    cells = [cell for cell in every_cell() if cell.optimizer == optimizer]
    for _, of_spec in itertools.groupby(cells, key=lambda cell: cell.spec):
        for cell in of_spec:
            try:
                error = run(cell)
            except Exception as failure:
                failures.append(f"{cell}: {type(failure).__name__}: {failure}")
            else:
                limits |= {cell: one_line(error)} if error else {}
        jax.clear_caches()  # the system limits how many programs a process holds
    return Found(limits, failures, tuple(mark for mark, (_, has) in MARKS.items() if has(optimizer)))


def render(record: Record) -> str:
    """The page."""
    each = len(DTYPES) * len(MODES)
    rows = []
    for name, marks in record.optimizers.items():
        limited = [sum(limit[:2] == (name, spec) for limit in record.limits) for spec in SPECS]
        cells = ["✓" if not count else f"{each - count} of {each}" for count in limited]
        for mark in marks:
            cells[SPECS.index(MARKS[mark][0])] += f" ({mark})"
        rows.append((f"`{name}`", *cells))
    by_error = itertools.groupby(
        sorted(record.limits.items(), key=lambda item: (item[0].optimizer, item[0].mode, item[0].dtype, item[1])),
        key=lambda item: (f"`{item[0].optimizer}`", item[0].mode, item[0].dtype, item[1]),
    )
    limits = []
    for (name, mode, dtype, error), items in by_error:
        specs = {cell.spec for cell, _ in items}
        limits.append((name, mode, dtype, ", ".join(spec for spec in SPECS if spec in specs), f"`{error}`"))
    return _TEXT.format(
        optax=record.optax,
        jax=record.jax,
        cells=f"{len(record.optimizers) * len(SPECS) * each:,}",
        each=each,
        optimizers="\n".join(_table("optimizer", *SPECS, rows=rows)),
        limits="\n".join(_table("optimizer", "mode", "dtype", "frozen", "error", rows=limits)),
    )


def parse(page: str) -> Record:
    """The record on a page."""
    versions, matrix, limits = page.split("\n## ")
    found = re.search(r"Optax\s(\S+)\sand\sJAX\s(\S+)\.", versions)
    assert found, "the page has no versions"
    return Record(
        found[1],
        found[2],
        {name: tuple(mark for mark in MARKS if f"({mark})" in "".join(cells)) for name, *cells in _rows(matrix)},
        {
            Cell(name, spec, dtype, mode): error
            for name, mode, dtype, specs, error in _rows(limits)
            for spec in specs.split(", ")
        },
    )


def _rows(section: str) -> list[list[str]]:
    """The rows of a section's table, without its head."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip("`") for cell in line.strip("| ").split(" | ")] for line in lines[2:]]


def one_line(error: str) -> str:
    """The text of an error in the table."""
    line = re.sub(r"[`|\s]+", " ", error)
    return line if len(line) <= 100 else line[:97].rsplit(" ", 1)[0] + " ..."


def _table(*head: str, rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


_TEXT = """\
# Optimizer matrix

Here you can look up in which cases an Optax optimizer gives the same results with freezing.
[Compatibility](../docs/compatibility.md#optimizers) has the exceptions in short.

Every optimizer of `optax` and `optax.contrib` is tested. They are found by introspection: public functions that return
a gradient transformation and take a learning rate or another transformation, except building blocks such as
`scale_by_*`. Each is run in {each} ways for each form of freezing, {cells} cells in all: in float32 and bfloat16; op by
op, under `jit`, in `lax.scan`, over an ensemble under `vmap`; in `optax.MultiSteps`, in `optax.apply_if_finite`, and
with `optax.inject_hyperparams`, all inside `fz.freeze` or `fz.freeze_when`.

A cell compares two runs of a few steps: one with this library and NaN in place of every frozen gradient, and one with
the plain optimizer on the trainable parameters of `fz.partition`. A tick (✓) means:

- Frozen parameters keep their bits, and their updates are -0.0.
- Each update, each trainable parameter and the whole optimizer state equal those of the second run: bit for bit if run
  op by op, within rounding if compiled.
- A group that `freeze_when` unfreezes is updated as if its optimizer had been created at that step, and the state of a
  frozen group keeps its bits.

`tests/matrix.py` defines a cell, and `make compatibility` runs all cells and writes this page. The tests run a subset
that covers all pairs of form, dtype and mode, and every optimizer in at least four modes. Run with Optax {optax} and
JAX {jax}.

## The matrix

**zeros**: with a dense mask, `fz.elements(mask)`, the optimizer receives the whole leaf with zeros at frozen elements,
in gradients and parameters. Sums and norms are not affected by zeros. If the update of an element depends on the rest
of the leaf in another way (a mean, a factored moment, the shape, random numbers), it differs from an update of the
trainable elements alone. With `compact=True` the optimizer receives only the trainable elements.

**shape**: the optimizer treats a matrix differently from a vector of the same elements. With `compact=True` it receives
a vector, in any shape of the leaf, and so runs as it does for a bias: Muon is Adam and orthogonalizes nothing, GaLore
does not project, Adafactor does not factor its second moment, and SM3 has one accumulator for each element. The tick
says that the result is that of the optimizer on this vector. Use `fz.rows`, or a dense mask, to keep the matrix.

With `fz.rows`, the k trainable rows of an m × n matrix are a k × n matrix, which these optimizers treat as such, but
alone: Muon orthogonalizes the k rows without the frozen ones, and a single row is only normalized; GaLore projects to
at most k dimensions; Adafactor factors if k and n are at least `min_dim_size_to_factor` (128 by default). The rows of a
stack, as of scanned layers, keep all axes of the stack. Give dimension numbers of Muon and GaLore as for the full leaf,
and none for a leaf with `compact=True`.

{optimizers}

Four optimizers are run differently:

- `contrib.dpsgd` takes per-example gradients. For rows and compact elements, these have the structure of the trainable
  part, as from `jax.vmap(fz.grad(loss, fz.spec_of(state)), (None, 0))`, because the rows of a full gradient cannot be
  distinguished from examples.
- `contrib.sam` takes `optax.chain(optax.contrib.normalize(), optax.sgd(0.05))` as its adversary.
- `lookahead` is replaced by a version that keeps its slow parameters in its state (ten lines in `tests/optimizers.py`).
  The one in Optax takes a pair of parameters and the gradient of one of them, which a wrapper cannot pass on.
- `contrib.reduce_on_plateau`, a building block, is run in a chain after Adam.

## Where Optax fails without freezing

These combinations raise the same error without freezing, with the same parameters and the same mode.

{limits}
"""

if __name__ == "__main__":
    main()
