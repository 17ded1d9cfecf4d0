"""Steps of PyTorch with a sparse gradient of an embedding, for ``batch_rows.py``, in a process of its own.

It takes a step for each line on its standard input, and prints its seconds. Arguments: the optimizer (``SparseAdam`` or
``Adagrad``), the rows, the columns and the ids of a batch.
"""

import sys
import time
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]


def serve(optimizer: str, rows: int, columns: int, ids: int) -> None:
    rng, parameter = np.random.default_rng(0), torch.nn.Parameter
    batches = [torch.from_numpy(rng.integers(0, rows, ids)) for _ in range(8)]
    table: Any = torch.nn.Embedding(rows, columns, sparse=True, _weight=torch.full((rows, columns), 0.5))
    head, target = parameter(torch.ones(columns)), torch.ones(ids)
    of_table: Any = getattr(torch.optim, optimizer)(table.parameters(), lr=1e-3)
    of_head: Any = torch.optim.Adam([head], lr=1e-3)
    for n, _ in enumerate(sys.stdin):
        start = time.perf_counter()
        loss = ((table(batches[n % len(batches)]) @ head - target) ** 2).mean()
        of_table.zero_grad()
        of_head.zero_grad()
        loss.backward()
        of_table.step()
        of_head.step()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], *map(int, sys.argv[2:]))
