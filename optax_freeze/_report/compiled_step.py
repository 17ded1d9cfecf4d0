"""Compiles a training step from shapes, and reads the compiler's figures: nothing is allocated, and nothing runs."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_freeze._errors import is_array, is_number
from optax_freeze._memory.offload import default_sharding
from optax_freeze._report.state_bytes import nbytes_of
from optax_freeze._spec.memory_kinds import is_on_host, on_device
from optax_freeze._spec.sharding import replicated
from optax_freeze._spec.tree import PyTree, is_weak


class Figures(NamedTuple):
    """What the compiler says of a program.

    Attributes:
      memory_bytes: of one device; None if the compiler gives no figure.
      host_bytes: of the host, for one device.
      flops: of all devices.
      is_refused: whether the compiler refuses the program, since it needs more memory than a device has.
    """

    memory_bytes: int | None
    host_bytes: int
    flops: int
    is_refused: bool = False


def placed(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
    """The shapes of parameters and batch; parameters without a sharding are replicated over the devices of others."""
    shardings = filter(None, map(_sharding, jax.tree.leaves((params, batch))))
    default = on_device(replicated(next(shardings, default_sharding())))
    as_array = lambda x: jax.eval_shape(jnp.asarray, x) if is_number(x) else x  # noqa: E731
    params = jax.tree.map(lambda x: _shape(as_array(x), default), params)
    return params, jax.tree.map(lambda x: _shape(x, None), batch)


def _sharding(value: Any) -> Any:
    """The sharding that a user gave an array; JAX moves an array that is not committed to its device."""
    return getattr(value, "sharding", None) if getattr(value, "committed", True) else None


def _shape(value: Any, default: Any) -> Any:
    if not is_array(value):
        return value
    dtype = jax.dtypes.canonicalize_dtype(value.dtype, allow_extended_dtype=True)
    if isinstance(value, jax.ShapeDtypeStruct) and value.sharding is not None:
        return value.update(dtype=dtype)
    sharding = _sharding(value) or default
    return jax.ShapeDtypeStruct(value.shape, dtype, sharding=sharding, weak_type=is_weak(value))


def figures(step: Callable[..., Any], params: PyTree, state: PyTree, batch: Sequence[Any]) -> Figures:
    """The figures of ``step(params, state, *batch)``, jitted, which donates the first two and keeps their shardings."""
    from optax_freeze._jax_internals import without_unused  # loads jax.extend: slow
    from optax_freeze._program.flops import flops

    given, fill = zip(*map(_arrays, (params, state, tuple(batch))), strict=True)

    def of_arrays(*arrays: Any) -> Any:
        # JAX traces a shape as an array on the device.
        placed = lambda x, shape: jax.device_put(x, jax.memory.Space.Host) if is_on_host(shape) else x  # noqa: E731
        arrays = jax.tree.map(placed, arrays, given)
        params, state, batch = (with_arrays(each) for with_arrays, each in zip(fill, arrays, strict=True))
        *new, value = step(params, state, *batch)
        leaves = map(jax.tree.leaves, new)
        return *({i: of[i] for i in donated} for of, donated in zip(leaves, given[:2], strict=True)), value

    results = *jax.tree.map(_format, given[:2]), None
    traced = jax.jit(of_arrays, donate_argnums=(0, 1), out_shardings=results).trace(*given)
    program, _ = without_unused(traced.jaxpr, [True] * len(traced.jaxpr.jaxpr.outvars))
    count = flops(program.jaxpr.eqns)
    shapes = filter(is_on_host, jax.tree.leaves(given))
    on_host = sum(nbytes_of(x.sharding.shard_shape(x.shape), x.dtype) for x in shapes)
    try:
        memory = traced.lower().compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or "vmem" in str(error).lower():  # the fast memory of a kernel
            raise
        return Figures(_needed(str(error)), on_host, count, is_refused=True)
    if memory is None:
        return Figures(None, on_host, count)
    used, host = (
        sum(getattr(memory, f"{kind}{part}_size_in_bytes") for part in ("argument", "output", "temp"))
        - getattr(memory, f"{kind}alias_size_in_bytes")
        for kind in ("", "host_")
    )
    if on_host and not memory.host_argument_size_in_bytes:  # a compiler that counts it as memory of the device
        used, host = used - on_host, host + on_host
    return Figures(used, host, count)


def limit(shapes: PyTree) -> int | None:
    """The bytes of the device with the least memory that JAX can use; None if not known, as for a topology."""
    found = {device for x in jax.tree.leaves(shapes) if is_array(x) for device in x.sharding.device_set}
    limits: list[Any] = [_limit(device) for device in found if device.process_index == jax.process_index()]
    return None if not limits or None in limits else min(limits)


def _limit(device: Any) -> int | None:
    try:
        return device.memory_stats()["bytes_limit"]
    except Exception:  # each backend raises another one
        return None


def _arrays(tree: PyTree) -> tuple[dict[int, Any], Callable[[dict[int, Any]], PyTree]]:
    """The arrays of a tree, and a function that puts others in their places: a jitted function takes arrays alone."""
    leaves, treedef = jax.tree.flatten(tree)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if is_array(leaf)}
    return arrays, lambda new: jax.tree.unflatten(treedef, [new.get(i, leaf) for i, leaf in enumerate(leaves)])


def _format(shape: jax.ShapeDtypeStruct) -> Any:
    """The sharding of a shape, with its layout if it has one."""
    given = getattr(shape, "format", None)
    return shape.sharding if getattr(given, "layout", None) is None else given


_NEEDED = re.compile(r"HLO temporaries \(([\d.]+)([KMGT]?)\)")


def _needed(text: str) -> int | None:
    """The bytes of arguments and temporaries, which the TPU compiler's message calls temporaries."""
    found = _NEEDED.search(text)
    return None if found is None else round(float(found[1]) * 1024 ** " KMGT".index(found[2] or " "))
