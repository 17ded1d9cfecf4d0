"""The blocks of ``docs/trainers.md``: they are executed, and the steps that they audit are compiled and measured.

``python tests/gallery/trainers.py`` writes what the blocks print, and the table of the page.
"""

import contextlib
import io
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax

import optax_freeze as fz

TITLES = ("Flax", "Tunix", "Kauldron", "Keras", "Brax", "jax-privacy", "MaxText")
OWN = {"Keras": 0, "MaxText": 0}  # which audited step is the trainer's own; of others the last but one
UNCHANGED = ("Keras",)
PAGE = pathlib.Path(__file__).parents[2] / "docs/trainers.md"


class Audited(NamedTuple):
    """A step that a block of the page audits."""

    step: Callable[..., Any]
    state: Any
    batch: tuple[Any, ...]
    audit: fz.Audit


class Section(NamedTuple):
    """What the blocks of a section gave: their names, their steps, and what each block printed, beside the page."""

    names: dict[str, Any]
    audited: list[Audited]
    printed: list[str]
    shown: list[str]


def blocks() -> dict[str, list[tuple[str, str]]]:
    """By title of a section, the language and the text of its blocks."""
    first, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    found = {"": first} | dict(section.split("\n", 1) for section in sections)
    return {title: re.findall(r"^```(python|text)\n(.*?)^```$", text, re.M | re.S) for title, text in found.items()}


def run(title: str) -> Section:
    """Executes the blocks of a section, after those at the start of the page."""
    section = Section({"__name__": "__main__"}, [], [], [])
    for language, text in blocks()[""] + blocks()[title]:
        if language == "text":
            section.shown[-1] = text
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out, recorded(section.audited):
            exec(compile(text, f"<block of {PAGE.name}>", "exec"), section.names)
        section.printed.append(out.getvalue())
        section.shown.append("")
    return section


@contextlib.contextmanager
def recorded(audited: list[Audited]) -> Iterator[None]:
    """Records the calls of ``fz.audit_step``."""
    audit_step = fz.audit_step

    def record(step: Any, state: Any, *batch: Any, **options: Any) -> fz.Audit:
        audited.append(Audited(step, state, batch, audit_step(step, state, *batch, **options)))
        return audited[-1].audit

    fz.audit_step = record
    try:
        yield
    finally:
        fz.audit_step = audit_step


def cost(audited: Audited) -> tuple[float, int]:
    """The FLOPs of a compiled step with a donated state, and the bytes that it is given, returns and allocates."""
    step = jax.jit(audited.step, donate_argnums=0)
    if nnx := sys.modules.get("flax.nnx"):
        parts = audited.state if isinstance(audited.state, tuple) else ()
        if any(isinstance(part, nnx.Module | nnx.Optimizer) for part in parts):  # which a step changes in place
            step = nnx.jit(audited.step, donate_argnums=0)
    compiled: Any = step.lower(audited.state, *audited.batch).compile()
    compiled = getattr(compiled, "compiled", compiled)  # of nnx.jit
    memory = compiled.memory_analysis()
    nbytes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return compiled.cost_analysis()["flops"], nbytes - memory.alias_size_in_bytes


def row(title: str, section: Section) -> str:
    """The line of a section in the table of the page: the trainer's own step, and the one with the change."""
    own, ours = cost(section.audited[OWN.get(title, -2)]), None if title in UNCHANGED else cost(section.audited[-1])
    cells = [*cells_of(own), *cells_of(ours)]
    return f"| {' | '.join([title, *cells])} |"


def cells_of(figures: tuple[float, int] | None) -> list[str]:
    """FLOPs in millions, and KiB."""
    return ["", ""] if figures is None else [f"{figures[0] / 1e6:.2f} M", f"{figures[1] / 1024:,.0f} KiB"]


def write() -> None:
    """Writes what the blocks print, and the table."""
    rows = []
    for title in TITLES:
        section = run(title)
        outputs = iter(
            [printed.strip() for printed, shown in zip(section.printed, section.shown, strict=True) if shown]
        )
        head, start, rest = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")
        body, end, rest = rest.partition("\n## ")
        first, *others = re.split(r"^```text\n.*?^```$", body, flags=re.M | re.S)
        body = first + "".join(f"```text\n{output}\n```{other}" for output, other in zip(outputs, others, strict=True))
        PAGE.write_text(head + start + body + end + rest, encoding="utf-8")
        rows.append(row(title, section))
    page, _ = PAGE.read_text(encoding="utf-8").split(HEAD.splitlines()[0])
    PAGE.write_text("\n".join([page + HEAD, *rows, ""]), encoding="utf-8")


HEAD = """\
| | its own: FLOPs | memory | this library: FLOPs | memory |
|---|---:|---:|---:|---:|"""

if __name__ == "__main__":
    write()
