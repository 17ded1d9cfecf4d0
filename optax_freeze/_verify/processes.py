"""The processes of one job: they compare what they would write, and one of them writes it."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from optax_freeze._errors import value_error
from optax_freeze._verify.bits import hashed


def refuse_different_processes(what: str, record: Callable[[], Any]) -> None:
    """A ``ValueError`` if ``record()``, a JSON value, differs between processes."""
    if jax.process_count() == 1:
        return
    own = hashed(json.dumps(record(), sort_keys=True))
    first, *others = np.asarray(multihost_utils.process_allgather(own))
    for process, other in enumerate(others, 1):
        if not np.array_equal(other, first):
            at, got = f"process {process}", f"the fingerprint {other.tobytes().hex()}"
            expected = f"{first.tobytes().hex()}, as in process 0"
            fix = "run the same program with the same spec and parameters in every process"
            raise value_error(f"processes differ in {what}", at=at, got=got, expected=expected, fix=fix)


def in_process_0(call: Callable[[], Any], *, otherwise: Callable[[], Exception]) -> None:
    """Calls a function in process 0; if it fails, every process raises an error, the others ``otherwise()``."""
    failed: Exception | None = None
    if jax.process_index() == 0:
        try:
            call()
        except Exception as error:
            failed = error
    if jax.process_count() > 1 and np.any(multihost_utils.process_allgather(np.bool_(failed is not None))):
        failed = failed or otherwise()
    if failed:
        raise failed


def on_host(array: Any) -> np.ndarray:
    """A copy of an array in NumPy, whole in each process; one that is spread over processes is gathered by all."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.array(array, order="C")
