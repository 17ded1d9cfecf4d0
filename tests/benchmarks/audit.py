"""What ``fz.audit_step`` costs beside the step that it audits.

1. Time of the audit / time of the step's own: to compile it and to take three steps. The medians over the forty steps
   of ``tests/audit/steps.py``, those without a leak and those with one.
2. The most memory that arrays take while a step of the audit begins, in copies of the state, for a state of 64 MB.

Run with ``python tests/benchmarks/audit.py``.
"""

import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "NPROC": "8"}

import measure

import jax  # isort: skip
import jax.numpy as jnp
import optax

import optax_freeze as fz
from optax_freeze._audit.step import Step

sys.path.append(str(pathlib.Path(__file__).parents[1] / "audit"))


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def times() -> None:
    import steps  # pyright: ignore[reportMissingImports]

    table = measure.table(
        "Time of an audit / time to compile the step and to take three steps", timed=["median", "largest"]
    )
    for name, makes in (("without a leak", steps.RIGHT), ("with a leak", steps.LEAKY)):
        found = []
        for make in makes:
            case = make()
            options = {"params": case.params, "frozen": case.frozen}
            audited = seconds(lambda c=case, o=options: fz.audit_step(c.make_step, c.state, *c.batch, loss=c.loss, **o))
            step = case.make_step(*(case.loss if isinstance(case.loss, tuple) else (case.loss,)))
            own = Step(step, case.state, case.batch, {}, **options)
            found.append(audited / seconds(lambda own=own: jax.block_until_ready([*own.run(3)][-1])))
        table.add_row(name, f"{statistics.median(found):.1f}", f"{max(found):.1f}")
    measure.show(table)


def loss(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["encoder"]) @ params["head"]) ** 2)


def memory() -> None:
    table = measure.table("Most arrays at once, in copies of the state", "copies")
    tx = fz.freeze(optax.adam(1e-3), "encoder")
    params = {"encoder": jnp.ones((2048, 2048)), "head": jnp.ones((2048, 2048))}
    state, x = {"params": params, "opt_state": tx.init(params)}, jnp.ones((8, 2048))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    for name, outside in (
        ("fz.freeze", optax.identity()),
        ("a clip outside of fz.freeze", optax.clip_by_global_norm(1.0)),
    ):
        most = 0

        def make_step(loss: Any, outside: Any = outside) -> Any:
            @jax.jit
            def step(state: Any, x: Any) -> Any:
                grads, _ = outside.update(jax.grad(loss)(state["params"], x), outside.init(state["params"]))
                updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
                return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

            def watched(state: Any, x: Any) -> Any:
                nonlocal most
                new = step(state, x)
                most = max(most, sum(array.nbytes for array in jax.live_arrays()))
                return new

            return watched

        fz.audit_step(make_step, state, x, loss=loss, params="params", frozen="encoder")
        table.add_row(name, f"{most / nbytes:.1f}")
    measure.show(table)


def main() -> None:
    times()
    memory()


if __name__ == "__main__":
    main()
