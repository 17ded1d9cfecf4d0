"""Runs every random test of this folder with fresh seeds for some minutes, and writes each failure as a case.

``python tests/fuzz/run.py MINUTES``, or only one of the tests, ``programs`` or ``states``:
``python tests/fuzz/run.py MINUTES programs``. Each core has a process. A failure that is known already is passed over.
The times that it prints are seconds of a core. A program with which XLA ends the process is a failure, unless that
happens in JAX alone: then it is written to ``not_ours.py``.
"""

import collections
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings

from search import OF_JAX

HERE = pathlib.Path(__file__).parent
FOUND = pathlib.Path(os.environ.get("FUZZ_FOUND", ".venv/fuzz"))


def worker(number: int, until: float, only: str = "*") -> None:
    """One process: searches again and again, and writes what it finds."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import conftest  # noqa: F401, the flags of XLA
    import jax
    from hypothesis import HealthCheck, Phase, settings
    from search import SEARCH, SLOW, FailureError, innermost

    def too_long(*_: object) -> None:
        raise TimeoutError(f"a program takes more than {SLOW} seconds of a core")

    signal.signal(signal.SIGPROF, too_long)  # `Search.judge` sets the timer, which stands if the machine does
    warnings.simplefilter("ignore")
    phases = [Phase.generate, Phase.shrink]
    options = settings(
        phases=phases, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False, print_blob=False,
    )  # fmt: skip
    attacks = [importlib.import_module(path.stem).ATTACK for path in sorted(HERE.glob(f"test_{only}.py"))]
    spent = dict.fromkeys(attacks, 0.0)
    log = open(FOUND / f"log-{number}.jsonl", "a")  # noqa: SIM115
    while time.time() < until:
        attack = min(attacks, key=lambda each: spent[each] / each.share)
        begin = time.process_time()
        SEARCH.begin()
        try:
            attack.run(settings(options, max_examples=attack.examples))
        except Exception as error:
            kind, rows = innermost(error), frozenset()
            if isinstance(error, FailureError):
                SEARCH.known.append(error)
                kind, rows = error.kind, error.rows
            signature = f"{kind} of {', '.join(sorted(rows))}" if rows else kind
            text = "\n".join([str(error) or repr(error), *getattr(error, "__notes__", [])])
            print(json.dumps({"signature": signature, "text": text, "seconds": time.process_time()}), file=log)
        print(json.dumps({"tried": SEARCH.tried, "of": attack.name}), file=log, flush=True)
        spent[attack] += time.process_time() - begin
        SEARCH.tried = 0
        jax.clear_caches()


def main(minutes: str, *only: str) -> int:
    """Starts the processes, and prints what they found."""
    FOUND.mkdir(parents=True, exist_ok=True)
    for path in FOUND.glob("*"):
        path.unlink()
    until, crashes, not_ours = time.time() + 60 * float(minutes), {}, {}

    def start(number: int) -> subprocess.Popen:
        current = str(FOUND / f"current-{number}.py")
        env = {**os.environ, "FUZZ_CURRENT": current}
        return subprocess.Popen([sys.executable, __file__, "--worker", str(number), str(until), *only], env=env)

    running = {number: start(number) for number in range(int(os.environ.get("FUZZ_CORES", os.cpu_count() or 1)))}
    while running:
        time.sleep(1)
        for number, process in list(running.items()):
            if process.poll() is None:
                continue
            current = FOUND / f"current-{number}.py"
            if process.returncode and current.exists() and (text := current.read_text()):
                kinds = not_ours if text.startswith(OF_JAX) else crashes
                kinds[f"exit code {process.returncode}"] = text
            running.pop(number)
            if process.returncode and time.time() < until - 30:
                running[number] = start(number)
    lines = [json.loads(line) for path in sorted(FOUND.glob("log-*.jsonl")) for line in path.read_text().splitlines()]
    failures = {line["signature"]: line["text"] for line in lines if "signature" in line} | crashes
    for name, found in {"failures": failures, "not_ours": not_ours}.items():
        (FOUND / f"{name}.py").write_text("\n\n".join(found.values()))
    tried = collections.Counter()
    for line in lines:
        tried[line.get("of")] += line.get("tried", 0)
    found = f"{len(failures)} kinds of failures" + (f": {FOUND / 'failures.py'}" if failures else "")
    print(", ".join([*(f"{tried[name]} {name}" for name in tried if name), found]))
    for line in lines:
        if "signature" in line:
            print(f"  after {line['seconds']:.0f} s: {line['signature']}")
    return bool(failures)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
    else:
        sys.exit(main(*sys.argv[1:]))
