"""Runs the benchmarks and writes ``docs/benchmarks.md``.

Each script runs in its own process. Its section of the page consists of its docstring, the date and versions of its
run, and everything it passes to ``measure.show``.

Run with ``make bench``. ``python tests/benchmarks/write_page.py --only tracing summary`` runs these two scripts and
keeps the results of the others; ``--only`` without names runs nothing and updates only the docstrings on the page.
"""

import argparse
import ast
import datetime
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping

HERE = pathlib.Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "benchmarks.md"
PACKAGES = ("jax", "jaxlib", "libtpu", "optax", "flax")


SECTIONS = {
    "transformer": "Training the last block and head of a decoder",
    "frozen_rows": "Frozen rows and elements",
    "scale": "Scale",
    "precompute": "Frozen layers computed once",
    "schedules": "Freezing that changes during training",
    "turns": "Different layers in turn",
    "flax_modules": "Frozen Flax modules",
    "overhead": "Overhead in Python",
    "fingerprint": "Fingerprints",
}
"""The title of the section of each script."""

DISCUSSED = {"turns": "rows_and_elements.md", "fingerprint": "checks.md"}
"""The page that discusses a script, if it is not ``performance.md``."""


def main() -> None:
    """Writes the page after each benchmark, so that an interrupted run keeps its finished results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", default=list(SECTIONS))
    chosen = parser.parse_args().only
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"no section for {', '.join(sorted(unknown))}")
    results = parse(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    PAGE.write_text(render(results), encoding="utf-8")
    for name in chosen:
        results[name] = run(name)
        PAGE.write_text(render(results), encoding="utf-8")


def run(name: str) -> str:
    """Runs a benchmark; returns its date, its versions and its results in Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        shown = pathlib.Path(folder) / "shown.md"
        script = (HERE / f"{name}.py").relative_to(PAGE.parent.parent)
        done = subprocess.run(
            [sys.executable, script],
            cwd=PAGE.parent.parent,
            env={**os.environ, "BENCHMARKS_PAGE": str(shown)},
            check=False,
        )
        if done.returncode:
            sys.exit(f"{script} failed: the page keeps its previous results")
        versions = ", ".join(f"{package} {version}" for package, version in _versions())
        ran = f"Run on {datetime.date.today()}: {versions}; {os.cpu_count()} cores."
        return f"{ran}\n\n{shown.read_text(encoding='utf-8').strip()}"


def render(results: Mapping[str, str]) -> str:
    """The page, with a section for each script that has results."""
    sections = (_section(script, results[script]) for script in SECTIONS if script in results)
    return "\n\n".join([_HEAD, *sections]) + "\n"


def parse(page: str) -> dict[str, str]:
    """The results on a page, by script."""
    section = r"^`tests/benchmarks/(\w+)\.py`, .*?^(Run on .*?)\s*(?=^## |\Z)"
    return dict(re.findall(section, page, re.DOTALL | re.MULTILINE))


def _section(script: str, results: str) -> str:
    page = DISCUSSED.get(script, "performance.md")
    where = f"`tests/benchmarks/{script}.py`, discussed in [{page}]({page})."
    return f"## {SECTIONS[script]}\n\n{describe(script)}\n\n{where}\n{results}"


def describe(name: str) -> str:
    """A script's docstring in Markdown, without the paragraph about how to run it."""
    paragraphs = (ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or "").split("\n\n")
    return "\n\n".join(each for each in paragraphs if not each.startswith("Run with")).replace("``", "`")


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"


_HEAD = """\
# Benchmarks

On this page you can look up the figures behind [Performance and scale](performance.md): each benchmark with its peers,
measured in one process, as written by `make bench`.

Upright figures are exact: FLOPs and bytes as the compiler reports them, for one TPU v5e chip unless a table says
otherwise. They need no TPU, and the same versions give the same figures.

*Figures in italics* are times on one machine with the number of cores given in the section. Nearly all are ratios of
CPU times of alternating runs, so that other programs hardly affect them; the text says whether they are minima or
medians. They vary by several percent between runs. A figure in brackets is a ratio to another row of the same table,
unless the title says otherwise."""

if __name__ == "__main__":
    main()
