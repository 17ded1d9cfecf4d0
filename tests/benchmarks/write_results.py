"""Runs the benchmarks and writes their figures to ``tests/benchmarks/results``, as Markdown and with JSON beside it.

Each script runs in its own process. ``NAME.json`` has the date and the versions of the run and everything the script
passes to ``measure.show``; ``NAME.md`` shows the same below the docstring of the script.

An exact figure that is more than 2 % from the one that was written is reported at the end, and is an error.

Run with ``make bench``. ``python tests/benchmarks/write_results.py turns overhead`` runs these two scripts;
``--render`` runs nothing and writes the Markdown again, as after a change of a docstring.
"""

import argparse
import ast
import datetime
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results"
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "optax", "flax", "maxtext")

SCRIPTS = {
    "transformer": "transformer.py",
    "frozen_rows": "frozen_rows.py",
    "precompute": "precompute.py",
    "schedules": "schedules.py",
    "groups": "groups.py",
    "many_heads": "many_heads.py",
    "turns": "turns.py",
    "audit": "audit.py",
    "batch_rows": "batch_rows.py",
    "flax_modules": "flax_modules.py",
    "overhead": "overhead.py",
    "fingerprint": "fingerprint.py",
    "storage": "storage.py",
    "scale": "scale.py --all",
    "scale_gpu": "scale.py --sizes 8B 70B --chips h100 a100-40 --one rtx4090",
    "trainer": "trainer.py",
    "maxtext_step": "maxtext_step.py",
    "quantized": "quantized.py",
    "gpu": "gpu.py",
}
"""The script of each pair of files, with its arguments."""

APART = ("scale", "scale_gpu", "trainer", "maxtext_step", "quantized", "gpu")
"""Run only if named: they take hours, or need MaxText, JAX's CUDA packages, or, the last, a GPU."""


def main() -> None:
    """Writes the files after each benchmark, so that an interrupted run keeps its finished results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCRIPTS))
    parser.add_argument("--render", action="store_true", help="run nothing; write the Markdown of the JSON again")
    args = parser.parse_args()
    if unknown := set(args.names) - set(SCRIPTS):
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}")
    changed = []
    for name in args.names or [name for name in SCRIPTS if name not in APART or args.render]:
        source = RESULTS / f"{name}.json"
        if not args.render:
            new = run(name)
            old = json.loads(source.read_text(encoding="utf-8"))["results"] if source.exists() else []
            changed += [f"{name}: {each}" for each in differences(old, new["results"])]
            source.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if source.exists():
            text = markdown(name, json.loads(source.read_text(encoding="utf-8")))
            source.with_suffix(".md").write_text(text, encoding="utf-8")
    if changed:
        sys.exit("\n".join(["These figures are not the ones that were written:", *changed]))


def run(name: str) -> dict[str, Any]:
    """Runs a benchmark; returns its date, its versions and its tables."""
    with tempfile.TemporaryDirectory() as folder:
        shown = pathlib.Path(folder) / "shown.json"
        script, *arguments = SCRIPTS[name].split()
        done = subprocess.run(
            [sys.executable, HERE / script, *arguments],
            env={**os.environ, "BENCHMARK_RESULTS": str(shown)},
            check=False,
        )
        if done.returncode:
            sys.exit(f"{script} failed: {name} keeps its previous results")
        return {
            "script": SCRIPTS[name],
            "date": str(datetime.date.today()),
            "versions": _versions(),
            "cores": os.cpu_count(),
            "results": json.loads(shown.read_text(encoding="utf-8")),
        }


def differences(old: list[Any], new: list[Any]) -> list[str]:
    """The exact cells of tables whose numbers are more than 2 %, and more than a rounding, apart; or their words."""
    before, after = map(_exact, (old, new))
    cells = [(" / ".join(key), before.get(key, ""), after.get(key, "")) for key in before | after]
    return [f"{name}: {a or 'nothing'}, now {b or 'nothing'}" for name, a, b in cells if not _is_close(a, b)]


def _exact(results: list[Any]) -> dict[tuple[str, ...], str]:
    """The exact cells by their table, the heading of their group, row and column."""
    found = {}
    for table in (each for each in results if not isinstance(each, str)):
        group = ""
        for label, *cells in table["rows"]:
            group = group if any(cells) else label
            names = ((table["title"], group, label, column) for column in table["columns"][1:])
            found |= {key: cell for key, cell in zip(names, cells, strict=True) if key[-1] not in table["timed"]}
    return found


def _is_close(old: str, new: str) -> bool:
    number = r"\d[\d,]*(?:\.(\d+))?"
    if re.sub(number, "0", old) != re.sub(number, "0", new):
        return False
    pairs = zip(re.finditer(number, old), re.finditer(number, new), strict=True)
    each = ((*(float(x[0].replace(",", "")) for x in pair), len(pair[0][1] or "")) for pair in pairs)
    return all(abs(b - a) <= max(0.02 * a, (digits > 0) * 1.01 * 10**-digits) for a, b, digits in each)


def markdown(name: str, run: dict[str, Any]) -> str:
    """The docstring of the script, its date and versions, and its tables."""
    script = run["script"].split()[0]
    versions = ", ".join(f"{package} {version}" for package, version in run["versions"].items())
    parts = [
        f"# {name}",
        describe(script),
        f"`python tests/benchmarks/{run['script']}`, {run['date']}: {versions}; {run['cores']} cores.",
    ]
    if any(not isinstance(each, str) and each["timed"] for each in run["results"]):
        parts.append("*Figures in italics* are times and vary by several percent; all others are exact.")
    parts += [each if isinstance(each, str) else _table(**each) for each in run["results"]]
    return "\n\n".join(parts) + "\n"


def describe(script: str) -> str:
    """A script's docstring in Markdown, without the paragraph about how to run it."""
    paragraphs = (ast.get_docstring(ast.parse((HERE / script).read_text(encoding="utf-8"))) or "").split("\n\n")
    return "\n\n".join(each for each in paragraphs if not each.startswith("Run with")).replace("``", "`")


def _table(title: str, columns: list[str], timed: list[str], rows: list[list[str]]) -> str:
    """A table whose times are in italics; a row that is only a label is the heading of a group, in bold."""

    def cell(text: str, mark: str) -> str:
        escaped = re.sub(r"([\\*|<])", r"\\\1", text)
        return f"{mark}{escaped}{mark}" if text else ""

    def line(cells: list[str]) -> str:
        label = cell(cells[0], "" if any(cells[1:]) else "**")
        others = (cell(*each) for each in zip(cells[1:], marks, strict=True))
        return f"| {' | '.join([label, *others])} |"

    marks = ["*" if column in timed else "" for column in columns[1:]]
    rule = f"| {' | '.join(['---', *('---:' for _ in marks)])} |"
    return "\n".join([cell(title, "**"), "", line(columns), rule, *map(line, rows)])


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
