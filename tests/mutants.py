"""One-line mutants of the package, each of which the tests must notice: `make mutants`.

Each mutant replaces one piece of source text in a copy of the working tree and runs the tests named beside it. One that
survives shows a behaviour that no test checks. Not part of `make test`: a run takes about half an hour on two cores.
`tests/mutants.py NAME...` runs those whose file or text contains one of the names.
"""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
COPIED = ("optax_freeze", "tests", "docs", "examples", "pyproject.toml", "README.md", "Makefile")


class Mutant(NamedTuple):
    """``old`` stands once in ``optax_freeze/<file>`` and is replaced by ``new``; ``tests`` are arguments of pytest."""

    file: str
    old: str
    new: str
    tests: str


RULES = "tests/gradient/test_rules.py"
RECORD = "tests/test_checkpoint.py -k Damaged"
MUTANTS = [
    # the gradient
    Mutant(
        "_gradient/interpreter.py",
        "        closed = jax.make_jaxpr(traced)(*",
        "        with jax.ensure_compile_time_eval():\n            closed = jax.make_jaxpr(traced)(*",
        RULES,
    ),
    Mutant(
        "_gradient/interpreter.py", "    except Exception:", "    except jax.errors.ConcretizationTypeError:", RULES
    ),
    Mutant("_gradient/rules_control_flow.py", " or closed.effects:", ":", RULES),
    Mutant("_gradient/rules_control_flow.py", ' or any(params["donated_invars"]):', ":", RULES),
    Mutant(
        "_gradient/rules_control_flow.py",
        "x.like(x.guarded(x.frozen), x.rows) if isinstance(x, Split) else x for x in",
        "x for x in",
        RULES,
    ),
    Mutant(
        "_gradient/rules_control_flow.py",
        "if any(m and isinstance(value, Tracer) for value, m in zip(values, moves, strict=True)):",
        "if False:",
        RULES,
    ),
    Mutant("_gradient/split_array.py", "operand, jax.lax.stop_gradient(operand))", "operand, operand)", RULES),
    Mutant("_gradient/split_array.py", "        if self.in_rule:", "        if False:", RULES),
    Mutant("_gradient/rules_rowwise.py", "frozen.append(first.guarded(value))", "frozen.append(value)", RULES),
    Mutant(
        "_gradient/rules_rowwise.py",
        "value.frozen if value.in_rule else first.guarded(value.frozen)",
        "value.frozen",
        RULES,
    ),
    Mutant("_gradient/rules_rowwise.py", " or len({x.axis for x in splits}) > 1:", ":", RULES),
    Mutant("_gradient/rules_indexing.py", "x.cleared(other, axis)) + rows", "other) + rows", RULES),
    Mutant("_gradient/rules_indexing.py", "number = jnp.clip(number, 0, x.size - 1)", "pass", RULES),
    Mutant("_gradient/rules_indexing.py", "broadcast(trains & (place == i))", "broadcast(place == i)", RULES),
    Mutant(
        "_gradient/explain.py",
        "    except _ASKED_FOR_A_VALUE:",
        "    except KeyError:",
        "tests/gradient/test_explain.py",
    ),
    # checkpoint records
    Mutant(
        "checkpoint/_record.py", '_check(_is_int(record["format"], 1)', '_check(_is_int(record["format"], 0)', RECORD
    ),
    Mutant("checkpoint/_record.py", "_check(is_digest, ", "_check(True, ", RECORD),
    Mutant("checkpoint/_record.py", "_check(len(set(paths)) == len(paths), ", "_check(True, ", RECORD),
    Mutant("checkpoint/_record.py", "sorted(digests) == frozen", "True", RECORD),
    Mutant("checkpoint/_record.py", "all(before[1] <= after[0] for", "all(True for", RECORD),
    Mutant(
        "checkpoint/_record.py",
        "return _tree.is_int(value) and least",
        "return isinstance(value, (int, float)) and least",
        RECORD,
    ),
    Mutant(
        "__main__.py", "child.name.isascii() and child.name.isdigit()", "child.name.isdigit()", "tests/test_main.py"
    ),
    Mutant("__main__.py", ' and items <= {"trainable", "masks", "opt_state"}', "", "tests/test_main.py"),
    Mutant("checkpoint/__init__.py", "if not is_number or step < 0:", "if not is_number:", "tests/test_checkpoint.py"),
    # names in a terminal
    Mutant("_spec/tree.py", "return text if text.isprintable() else repr(text)", "return text", "tests/test_errors.py"),
    Mutant(
        "_spec/tree.py",
        "map(printable, [at] if isinstance(at, str) else at)",
        "map(str, [at] if isinstance(at, str) else at)",
        "tests/test_errors.py",
    ),
    Mutant(
        "_gradient/explain.py",
        'return "\\n".join(map(printable, lines))',
        'return "\\n".join(lines)',
        "tests/test_errors.py",
    ),
    Mutant("_state/migrate.py", "', '.join(map(_tree.printable, places))", "', '.join(places)", "tests/test_errors.py"),
    # the report
    Mutant(
        "_report/summary.py",
        "_state(tx.init, params, keep=_can_train)",
        "_state(tx.init, params, keep=_tree.is_array)",
        "tests/report/test_summary.py",
    ),
    Mutant(
        "_report/summary.py",
        "self.frozen_elements, self.frozen_bytes)",
        "self.frozen_elements, self.trainable_bytes)",
        "tests/report/test_summary.py",
    ),
]


def run(mutant: Mutant) -> str:
    """``killed``, ``survived``, or why the mutant could not be run."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        copy = pathlib.Path(directory)
        for name in COPIED:
            source = ROOT / name
            shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
        path = copy / "optax_freeze" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return f"stands {text.count(mutant.old)} times in {mutant.file}, not once"
        path.write_text(text.replace(mutant.old, mutant.new))
        environment = {**os.environ, "PYTHONPATH": directory, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests.split()]
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    # 1 is "tests failed"; anything else but 0 says that the command itself is wrong, which kills nothing.
    return {0: "survived", 1: "killed"}.get(
        done.returncode, f"pytest exited with {done.returncode}: {done.stdout[-500:]}"
    )


def main(names: list[str]) -> int:
    """Runs the mutants, two at a time, and returns how many were not killed."""
    chosen = [m for m in MUTANTS if not names or any(name in m.file or name in m.old for name in names)]
    left = 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for mutant, outcome in zip(chosen, pool.map(run, chosen), strict=True):
            left += outcome != "killed"
            print(f"{outcome:9} {mutant.file}: {mutant.old.strip()!r} -> {mutant.new.strip()!r}", flush=True)
    print(f"{len(chosen) - left} of {len(chosen)} mutants killed")
    return left


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
