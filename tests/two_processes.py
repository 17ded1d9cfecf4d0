"""One of two processes with four devices each: it runs the recipe, then compares, trains, saves and restores.

Run by `test_checkpoint.py`.
"""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_freeze as fz
from optax_freeze import checkpoint, patch

PAGE = pathlib.Path(__file__).parents[1] / "docs/recipes.md"
[RECIPE] = re.findall(r"^```python\n(import sys\n.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
FROZEN = fz.rules({"encoder": True, "embed": fz.rows(slice(0, 56))})
SHAPES = {"embed": (64, 8), "encoder": (8, 16), "head": (16, 8)}


def loss(params, tokens):
    return jnp.mean((jnp.tanh(params["embed"][tokens] @ params["encoder"]) @ params["head"] - 1.0) ** 2)


VALUES = {
    path: np.sin(np.arange(np.prod(shape), dtype=np.float32) * (0.1 + i)).reshape(shape)
    for i, (path, shape) in enumerate(SHAPES.items())
}


def model(mesh, spec, values=VALUES):
    def leaf(array):
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda at: array[at])

    return jax.tree.map(leaf, values)


def compare(base, turned, moved):
    """What is frozen is compared and hashed wherever it is."""
    masked = {"embed": fz.rows(slice(3, 9)), "encoder": VALUES["encoder"] > 0, "head": False}
    for spec in (True, masked):
        assert (fz.fingerprint(base, spec) == fz.fingerprint(VALUES, spec)).all()
        fz.assert_frozen(base, turned, spec)
        fz.assert_frozen(VALUES, base, spec)
    try:
        fz.assert_frozen(base, moved, masked)
    except AssertionError as error:
        print(f"moved: {error}", flush=True)


def say(name, value):
    print(f"{name}: {np.asarray(value).tobytes().hex()}", flush=True)


def whole(array):
    replicated = NamedSharding(array.sharding.mesh, P())
    return jax.device_get(jax.jit(lambda x: x, out_shardings=replicated)(array))


def main(directory):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    exec(RECIPE, {"__name__": "__main__"})  # with the arguments of this script
    directory = pathlib.Path(directory, "next")
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    base = model(mesh, P("data", "model"))
    moved = model(mesh, P(("data", "model")), {**VALUES, "embed": VALUES["embed"] + 1})
    compare(base, model(mesh, P("model", "data")), moved)
    tx = fz.freeze(optax.adam(0.1), FROZEN)
    state = jax.jit(tx.init, out_shardings=fz.state_shardings(tx, base))(base)

    @jax.jit
    def step(params, state, tokens):
        grads = fz.grad(loss, FROZEN)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return fz.apply_updates(params, updates, FROZEN), state

    params = base
    for _ in range(3):
        params, state = step(params, state, jnp.arange(64))
    fz.assert_frozen(base, params, FROZEN)
    say("fingerprint", fz.fingerprint(params, FROZEN))
    checkpoint.save(directory, params, FROZEN, step=3, opt_state=state)

    other = jax.make_mesh((8,), ("all",), axis_types=(AxisType.Auto,))
    again = model(other, P(None, "all"))
    template = jax.jit(tx.init, out_shardings=fz.state_shardings(tx, again))(again)
    restored, restored_state = checkpoint.restore(directory, again, opt_state=template, frozen=FROZEN)
    say("fingerprint", fz.fingerprint(restored, FROZEN))
    pairs = zip(jax.tree.leaves((restored, restored_state)), jax.tree.leaves((params, state)), strict=True)
    for got, expected in pairs:
        assert got.sharding.mesh == other
        assert whole(got).tobytes() == whole(expected).tobytes()

    patch.save(directory.parent / "patch", params, FROZEN)  # process 0 writes what all have
    new = patch.apply(again, patch.load(directory.parent / "patch"))
    for got, expected in zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True):
        assert got.sharding.mesh == other
        assert whole(got).tobytes() == whole(expected).tobytes()

    try:
        checkpoint.save(directory, params, "encoder" if jax.process_index() else FROZEN, step=4)
    except ValueError as error:
        print(f"refused: {error}", flush=True)
    print("latest:", checkpoint.latest_step(directory), flush=True)


if __name__ == "__main__":
    main(sys.argv[-1])
