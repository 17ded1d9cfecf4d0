"""What ``import optax_freeze`` adds to the time of ``import jax, optax``.

CPU times of several processes that import JAX and Optax, then this library, all byte-compiled as in an installed wheel.
In the first row, garbage is collected between the two imports. Otherwise a collection of all objects of JAX and Optax
happens during the second import, whatever is imported; it takes almost half of the time in the second row.

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
BETWEEN = {"garbage collected in between": "import gc; gc.collect()", "no collection in between": ""}


def main() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    table = measure.table("Time of import optax_freeze / time of import jax, optax", timed=("median", "maximum"))
    for name, between in BETWEEN.items():
        run = [sys.executable, "-c", IMPORT.format(between=between)]
        ratios = [float(subprocess.check_output(run, env=env, text=True)) for _ in range(1 + PROCESSES)]
        ratios = ratios[1:]  # the first writes byte code
        table.add_row(name, f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}")
    measure.show(table)


if __name__ == "__main__":
    main()
