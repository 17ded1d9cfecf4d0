"""Compares and hashes the frozen bits of one leaf, on the devices of its arrays.

Every dtype is converted to 32-bit words: as floats, -0.0 equals 0.0 and a NaN does not equal itself. All arithmetic is
``uint32`` modulo 2**32, which gives the same result on every device and in any order.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from optax_freeze._errors import is_array
from optax_freeze._spec.indexing import move_bits
from optax_freeze._spec.memory_kinds import HOST, is_on_host, on_device, to_device
from optax_freeze._spec.selection import DenseMask, Selection
from optax_freeze._spec.sharding import explicit_sharding, replicated

LANES = 4


@functools.partial(jax.jit, static_argnames="axis")
def digest(value: Any, key: Any, selection: Selection, axis: int = 0) -> tuple[jax.Array, ...]:
    """Sums one word per frozen element in each lane, in one pass, so that the leaf is read once.

    Positions are added axis by axis, since a linear index would overflow. The lanes are scalars, which are replicated.
    Two of them are sums of ``x + 2 * x**2``, which is a bijection of 32-bit words, too, and costs one multiplication.
    """

    def per_block(selection: Selection, start: Sequence[Any], value: Any) -> tuple[jax.Array, ...]:
        words = _words(value)
        shape = words[0].shape

        def sums(divided: tuple[int, ...]) -> list[jax.Array]:
            indices = [lax.broadcasted_iota(np.uint32, divided, axis) for axis in range(len(divided))]
            if len(divided) > len(shape):
                indices[:2] = [indices[0] * np.uint32(divided[1]) + indices[1]]
            first, second = key[0], key[1]
            for axis, (index, its_first) in enumerate(zip(indices, start, strict=True)):
                one, other, *_ = hashed("axis", axis)
                first, second = first + (index + its_first) * one, second + (index + its_first) * other
            mixed = []
            for i, word in enumerate(words):
                one, other, *_ = hashed("word", i)
                mixed.append(_mix(word.reshape(divided), first + one, second + other))
            added = [functools.reduce(jnp.add, each) for each in zip(*mixed, strict=True)]
            return [_frozen_alone(each.reshape(shape), selection).reshape(divided) for each in added]

        return _sum(sums, words[0], _add)

    x, squares_of_x, y, squares_of_y = _by_blocks(per_block, _add, axis, selection, value)
    return x, x + 2 * squares_of_x, y, y + 2 * squares_of_y


@functools.partial(jax.jit, static_argnames="axis")
def count(old: Any, new: Any, selection: Selection, axis: int = 0) -> tuple[jax.Array, jax.Array]:
    """Counts the frozen elements that differ, as a 64-bit number in two words, the lower one first."""

    def per_block(selection: Selection, _: Any, old: Any, new: Any) -> tuple[jax.Array, ...]:
        ones = differ(old, new, selection).astype(np.uint32)
        return _sum(lambda divided: [ones.reshape(divided), jnp.zeros(divided, np.uint32)], ones, _carry)

    return _by_blocks(per_block, _carry, axis, selection, old, new)


@functools.partial(jax.jit, static_argnames="axis")
def farthest(old: Any, new: Any, selection: Selection, axis: int = 0) -> tuple[jax.Array, jax.Array]:
    """Computes :func:`distance` over the frozen elements that differ."""

    def per_block(selection: Selection, _: Any, old: Any, new: Any) -> tuple[jax.Array, ...]:
        return distance(jnp, old, new, differ(old, new, selection))

    return _by_blocks(per_block, lambda a, b: (jnp.maximum(a[0], b[0]), a[1] | b[1]), axis, selection, old, new)


@jax.jit
def differ(old: Any, new: Any, selection: Selection) -> jax.Array:
    """True at the frozen elements whose bits differ."""
    pairs = zip(_words(old), _words(new), strict=True)
    return _frozen_alone(functools.reduce(jnp.logical_or, (a != b for a, b in pairs)), selection)


def distance(xp: Any, old: Any, new: Any, differ: Any) -> tuple[Any, Any]:
    """The largest absolute difference where ``differ`` is True, and whether it is NaN there; ``xp`` is (jax.)numpy."""
    if xp.issubdtype(old.dtype, np.integer):
        wide = xp.uint64 if old.dtype.itemsize == 8 else xp.uint32
        up, down = (a.astype(wide) - b.astype(wide) for a, b in ((new, old), (old, new)))  # exact: no overflow
        far = xp.where(new > old, up, down)
    else:
        wide = old.dtype if old.dtype.itemsize >= 4 else np.float32
        far = abs(new.astype(wide) - old.astype(wide))
    nan = xp.isnan(far)
    return xp.max(xp.where(differ & ~nan, far, xp.zeros_like(far))), xp.any(differ & nan)


def _by_blocks(per_block: Callable[..., Any], add: Callable[..., Any], axis: int, selection: Any, *arrays: Any) -> Any:
    """Calls ``per_block(selection, start, *arrays)``, for arrays on the host block by block, and adds the results.

    A block is some rows along ``axis``, which are copied to the device. ``start`` is its first index along each axis.
    """
    shape = jax.tree.leaves(arrays)[0].shape
    on_host = next((array for array in arrays if is_on_host(array)), None)
    if on_host is None or not on_host.size or not shape:
        return per_block(selection, (0,) * len(shape), *map(to_device, arrays))
    rows, mask = shape[axis], selection.frozen(len(shape)) if selection.in_part else None
    most = max(1, _BLOCK_BYTES * rows // on_host.nbytes)
    each = next(n for n in range(min(most, rows), 0, -1) if rows % n == 0)

    def move(start: Any, array: Any) -> Any:
        return to_device(lax.dynamic_slice_in_dim(array, start, each, axis))

    def cut(array: Any, i: Any) -> Any:
        return move_bits(move, i * each, array) if array.shape[axis] == rows else to_device(array)

    def block(i: Any) -> Any:
        start = [jnp.asarray(i * each, np.uint32) if d == axis else 0 for d in range(len(shape))]
        block_selection = selection if mask is None else DenseMask(cut(mask, i), False, None)
        return per_block(block_selection, start, *(cut(array, i) for array in arrays))

    return lax.fori_loop(1, rows // each, lambda i, total: add(total, block(i)), block(0))


_BLOCK_BYTES = 2**24
"""The size of a block of an array on the host. A block has at least one row, even if that is larger."""


def block_axis(*arrays: Any) -> int:
    """The first axis along which no array is sharded, or 0. Arrays on the host are read in blocks along it."""
    shardings = [x.sharding for x in arrays if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    shape = np.shape(arrays[0])
    return next((i for i, n in enumerate(shape) if all(s.shard_shape(shape)[i] == n for s in shardings)), 0)


def hashed(*what: Any) -> np.ndarray:
    """Hashes values such as a path or an axis to an odd word for each lane, the same in every process."""
    found = hashlib.blake2b(repr(what).encode(), digest_size=4 * LANES).digest()
    return np.frombuffer(found, "<u4").astype(np.uint32) | np.uint32(1)


def placed(*nodes: Any) -> tuple[Any, ...]:
    """Moves the arrays of one leaf and its selection to the same devices, in the smallest shards that one of them has.

    Beside arrays in host memory, NumPy arrays are placed there, too. Without any JAX array, 64-bit numbers that JAX
    would truncate become tuples of words.
    """
    arrays = jax.tree.leaves(nodes)
    if any(isinstance(array, Tracer) for array in arrays):
        return nodes
    shape = np.shape(arrays[0])
    placed = [array for array in arrays if isinstance(array, jax.Array)]
    if not placed:
        return jax.tree.map(_on_host, nodes)
    shardings = [array.sharding for array in placed if array.shape == shape] or [placed[0].sharding]
    sharding = min(shardings, key=lambda sharding: math.prod(sharding.shard_shape(shape)))
    there, sharding = any(map(is_on_host, placed)), on_device(sharding)

    def onto(array: Any) -> Any:
        layout = sharding if array.shape == shape else replicated(sharding)
        if is_on_host(array) or (there and not isinstance(array, jax.Array)):
            layout = layout.with_memory_kind(HOST)
        if not isinstance(array, jax.Array):
            return jax.make_array_from_callback(array.shape, layout, lambda index: array[index])
        return array if array.sharding.is_equivalent_to(layout, array.ndim) else jax.device_put(array, layout)

    return jax.tree.map(onto, nodes)


def _on_host(array: Any) -> Any:
    """The words of each element, if JAX would truncate it."""
    if not is_array(array) or jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype:
        return array
    words = np.ascontiguousarray(array).reshape(-1).view(np.uint32).reshape(*array.shape, -1)
    return tuple(words[..., i] for i in range(words.shape[-1]))


def _words(value: Any) -> tuple[jax.Array, ...]:
    """The bits of each element as one or more words."""
    if isinstance(value, tuple):
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(value)
        return tuple(data[..., i] for i in range(data.shape[-1]))
    if jnp.issubdtype(value.dtype, np.complexfloating):
        return _words(jnp.real(value)) + _words(jnp.imag(value))
    if value.dtype.itemsize == 8:
        pair = lax.bitcast_convert_type(value, np.uint32)
        return pair[..., 0], pair[..., 1]
    if jnp.issubdtype(value.dtype, np.floating):
        value = lax.bitcast_convert_type(value, getattr(jnp, f"uint{jnp.finfo(value.dtype).bits}"))
    elif jnp.issubdtype(value.dtype, np.signedinteger):
        value = lax.bitcast_convert_type(value.astype(np.int32), np.uint32)
    return (value.astype(np.uint32),)


def _mix(word: Any, first: Any, second: Any) -> tuple[Any, ...]:
    """Two bijections of a 32-bit word, in which every input bit affects every output bit, each with its square.

    The second is another round of the first after ``second`` is added. The position is part of both, so equal words at
    different positions differ in one of them at least.
    """
    x = scrambled(word + first)
    y = _xor_shift(_xor_shift(x + second, 15) * np.uint32(0x2C1B3C6D), 16)
    return x, x * x, y, y * y


def scrambled(word: Any) -> Any:
    """A bijection of 32-bit words, in which every input bit affects every output bit: Wellons' lowbias32."""
    x = _xor_shift(word, 16) * np.uint32(0x7FEB352D)
    return _xor_shift(_xor_shift(x, 15) * np.uint32(0x846CA68B), 16)


def _xor_shift(x: Any, by: int) -> Any:
    return x ^ (x >> by)


def _frozen_alone(array: jax.Array, selection: Selection) -> jax.Array:
    """The array with zero, or False, at trainable elements."""
    return selection.choose(array, jnp.zeros_like(array))


def _add(a: Any, b: Any) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.add, a, b))


def _carry(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    low = a[0] + b[0]
    return low, a[1] + b[1] + (low < b[0]).astype(np.uint32)


def _sum(arrays: Callable[[tuple[int, ...]], Sequence[jax.Array]], like: Any, add: Callable[..., Any]) -> Any:
    """Sums ``arrays(shape)``, for the shape of ``like`` or for one whose first axis is divided into parts.

    XLA gives each core some elements of a result, so on a CPU a large array is summed part by part.
    """

    def reduced(arrays: Sequence[Any], axes: range) -> Any:
        return lax.reduce(tuple(arrays), (np.uint32(0),) * len(arrays), add, tuple(axes))

    def in_parts(parts: int) -> Any:
        whole = arrays((parts, shape[0] // parts, *shape[1:]))
        return reduced(reduced(whole, range(1, whole[0].ndim)), range(1))

    def at_once() -> Any:
        return reduced(arrays(shape), range(len(shape)))

    shape, parts = like.shape, 1
    if like.size >= _LARGE and explicit_sharding(like) is None:
        few = math.gcd(shape[0], _PARTS)
        parts = shape[0] if few < 8 and shape[0] <= like.size // 1024 else few
    return at_once() if parts == 1 else lax.platform_dependent(cpu=lambda: in_parts(parts), default=at_once)


_LARGE, _PARTS = 2**20, 960
"""How many elements are worth several cores; and a number of parts that most numbers of devices divide."""
