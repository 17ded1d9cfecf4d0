"""What ``import optax_freeze`` adds to ``import jax, optax``.

Times of the processor: several processes import JAX and Optax, then this library, all of it byte-compiled as in an
installed wheel, with no garbage left in between: after JAX and Optax a collection of all their objects is due (two
thirds of the time in the second row), whatever is imported next. The median of the processes, and the most of any.

Run with ``python tests/benchmarks/import_time.py``.
"""

import os
import statistics
import subprocess
import sys

import measure

PROCESSES = 15
IMPORT = """
import time
start = time.process_time()
import jax, optax
taken = time.process_time() - start
{between}
start = time.process_time()
import optax_freeze
print((time.process_time() - start) / taken)
"""
BETWEEN = {"garbage collected before": "import gc; gc.collect()", "as it comes": ""}


def main() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    table = measure.table("import optax_freeze, to import jax, optax", timed=("median", "most"))
    for name, between in BETWEEN.items():
        run = [sys.executable, "-c", IMPORT.format(between=between)]
        ratios = [float(subprocess.check_output(run, env=env, text=True)) for _ in range(1 + PROCESSES)]
        ratios = ratios[1:]  # the first writes byte code
        table.add_row(name, f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}")
    measure.show(table)


if __name__ == "__main__":
    main()
