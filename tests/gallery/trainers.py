"""The blocks of ``docs/trainers.md``: they are executed, and the steps that they audit are compiled and measured.

``python tests/gallery/trainers.py`` writes the table of the page.
"""

import contextlib
import functools
import io
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

import optax_freeze as fz

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
    """The FLOPs of a compiled step, and its bytes with a donated state: what it is given, returns and needs meanwhile."""
    from flax import nnx  # of which a state may consist

    step = nnx.jit(lambda state, *batch: (state, audited.step(state, *batch)), donate_argnums=0)
    if not has_objects(audited.state):
        step = jax.jit(audited.step, donate_argnums=0)
    compiled = step.lower(audited.state, *audited.batch).compile()
    compiled = getattr(compiled, "compiled", compiled)
    memory = compiled.memory_analysis()
    nbytes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return compiled.cost_analysis()["flops"], nbytes - memory.alias_size_in_bytes


def has_objects(state: Any) -> bool:
    from flax import nnx

    return any(isinstance(part, nnx.Object) for part in (state if isinstance(state, tuple) else [state]))


if __name__ == "__main__":
    for title in sys.argv[1:]:
        section = run(title)
        print("=====", title)
        for printed in section.printed:
            if printed:
                print(printed)
                print("--")
        for audited in section.audited:
            print(cost(audited))
