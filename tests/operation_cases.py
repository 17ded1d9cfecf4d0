"""Each operation of ``_program/operations.py``: its regions and its gradient are tested on the same cases."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode as Mode
from jax.sharding import PartitionSpec as P


def x(*shape, dtype=jnp.float32):
    """Different numbers."""
    numbers = np.random.default_rng(len(shape)).permutation(math.prod(shape)) - 3
    return jnp.asarray(numbers.reshape(shape) / 8, dtype)


def ints(*numbers, dtype=jnp.int32):
    return jnp.array(numbers, dtype)


def scattered(kind, dims, **params):
    """A scatter of which the dimension numbers are given."""
    numbers = lax.ScatterDimensionNumbers(*dims)
    scatter = {"add": lax.scatter_add, "set": lax.scatter, "mul": lax.scatter_mul, "max": lax.scatter_max}[kind]
    return lambda w, i, u: scatter(w, i, u, numbers, **params)


def gathered(dims, sizes, **params):
    return lambda w, i: lax.gather(w, i, lax.GatherDimensionNumbers(*dims), slice_sizes=sizes, **params)


def drawn(keys, numbers, impl="threefry2x32"):
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys, impl=impl), numbers)
    return jax.vmap(lambda key: jax.random.bits(key, (4,)))(jax.vmap(jax.random.split)(keys)[:, 1])


def conv(**params):
    return lambda a, b: lax.conv_general_dilated(a, b, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), **params)


MESH = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


ROWS = (1,), (0,), (0,)  # dimension numbers of w.at[i].add(updates)
BLOCKS = (0, 2), (), (0,)
W, UP = x(6, 4), x(3, 4)
KEYS = ints(*range(24), dtype=jnp.uint32).reshape(6, 4)
AT = {  # indices of a scatter
    "negative, twice, out of range": ints([2], [-1], [2]),
    "out of range": ints([5], [0], [6]),
    "bytes": ints([200], [0], [3], dtype=jnp.uint8),
    "short": ints([-3], [0], [3], dtype=jnp.int8),
    "unsigned": ints([2**32 - 2], [0], [3], dtype=jnp.uint32),
}

# Operation: (function, operands, the axis of each operand in which rows of each axis of the result are, and the same
# for dynamic rows if it is different). "." means everything and "-" nothing of an operand.
TABLE = {
    "add": (lax.add, [W, x(6, 4)], "00 11"),
    "where": (jnp.where, [W > 0, W, x(6, 4)], "000 111"),
    "select_n of a scalar": (lambda p, a, b: lax.select_n(p, a, b), [jnp.array(True), W, x(6, 4)], ".00 .11"),
    "clamp": (lambda a, w, b: lax.clamp(a, w, b), [jnp.float32(0), W, jnp.float32(1)], ".0. .1."),
    "clamp by arrays": (lambda a, w, b: lax.clamp(a, w, b), [W, x(6, 4), W + 1], "000 111"),
    "convert": (lambda w: lax.convert_element_type(w, jnp.bfloat16), [W], "0 1"),
    "broadcast of size 1": (lambda b: lax.broadcast_in_dim(b, (6, 4), (0, 1)), [x(1, 4)], ". 1"),
    "broadcast_in_dim": (lambda b: lax.broadcast_in_dim(b, (3, 6, 2), (1,)), [x(6)], ". 0 ."),
    "broadcast in two": (lambda b: lax.broadcast_in_dim(b, (6, 3, 4), (0, 2)), [W], "0 . 1"),
    "transpose": (lambda w: lax.transpose(w, (2, 0, 1)), [x(3, 4, 6)], "2 0 1"),
    "squeeze": (lambda w: lax.squeeze(w, (0, 2)), [x(1, 4, 1, 3)], "1 3"),
    "expand_dims": (lambda w: lax.expand_dims(w, (1, 2)), [W], "0 . . 1"),
    "reshape merges": (lambda w: lax.reshape(w, (6, 5)), [x(2, 3, 5)], "0 2", ". 2"),
    "reshape merges the last": (lambda w: lax.reshape(w, (5, 6)), [x(5, 2, 3)], "0 1", "0 ."),
    "reshape splits": (lambda w: lax.reshape(w, (2, 3, 5)), [x(6, 5)], "0 0 1"),
    "reshape splits the last": (lambda w: lax.reshape(w, (5, 2, 3)), [x(5, 6)], "0 1 1"),
    "reshape of ones": (lambda w: lax.reshape(w, (1, 6, 1, 4, 1)), [W], ". 0 . 1 .", "0 0 1 1 1"),
    "reshape without ones": (lambda w: lax.reshape(w, (6, 4)), [x(1, 6, 1, 4)], "1 3"),
    "reshape merges and splits": (lambda w: lax.reshape(w, (4, 3, 5)), [x(2, 6, 5)], "0 . 2", ". . 2"),
    "reshape of other edges": (lambda w: lax.reshape(w, (4, 6)), [x(3, 8)], ". ."),
    "reshape repeats": (lambda w: lax.reshape(w, (2, 3, 4, 2)), [x(24, 2)], "0 . 0 1"),
    "slice": (lambda w: w[1:5, 1:], [W], "0 1"),
    "slice with strides": (lambda w: lax.slice(w, (1, 0), (6, 4), (2, 3)), [W], "0 1", ". ."),
    "rev": (lambda w: lax.rev(w, (0,)), [W], "0 1", ". 1"),
    "pad": (lambda w, v: lax.pad(w, v, ((2, 1, 0), (0, 3, 0))), [W, jnp.float32(7)], "0. 1."),
    "pad inside": (lambda w, v: lax.pad(w, v, ((2, 0, 1), (1, 2, 2))), [W, jnp.float32(7)], "0. 1.", ".. .."),
    "pad negative": (lambda w, v: lax.pad(w, v, ((-2, 1, 0), (0, -1, 0))), [W, jnp.float32(7)], "0. 1."),
    "pad all": (lambda w, v: lax.pad(w, v, ((-1, 1, 1), (0, 0, 0))), [W, jnp.float32(7)], "0. 1.", ".. 1."),
    "pad of bfloat16": (lambda w: jnp.pad(w, ((1, 2), (0, 0))), [x(5, 4, dtype=jnp.bfloat16)], "0 1"),
    "concatenate": (lambda a, b, c: lax.concatenate([a, b, c], 0), [x(2, 4), x(3, 4), x(1, 4)], "000 111"),
    "concatenate of empty": (lambda a, b, c: lax.concatenate([a, b, c], 0), [x(0, 4), x(3, 4), x(0, 4)], "000 111"),
    "split": (lambda w: lax.split(w, (1, 3, 2), axis=0), [W], "0 1"),
    **({"unstack": (lambda w: lax.unstack(w, axis=1), [x(6, 2, 4)], "0 2")} if hasattr(lax, "unstack") else {}),
    "iota": (lambda w: w * 0 + lax.broadcasted_iota(jnp.float32, (6, 4), 0), [W], "0 1"),
    "reduce_sum": (lambda w: jnp.sum(w, 1), [x(3, 4, 5)], "0 2"),
    "reduce_max": (lambda w: lax.reduce_max(w, (0,)), [x(3, 4, 5)], "1 2"),
    "argmax": (lambda w: lax.argmax(w, 1, jnp.int32), [x(3, 4, 5)], "0 2"),
    "cumsum": (lambda w: lax.cumsum(w, 0), [W], "0 1", ". 1"),
    "cumsum reversed": (lambda w: lax.cumsum(w, 0, reverse=True), [W], "0 1", ". 1"),
    "cummax": (lambda w: lax.cummax(w, 1), [W], "0 1", "0 ."),
    "cumlogsumexp": (lambda w: lax.cumlogsumexp(w, 0, reverse=True), [W], "0 1", ". 1"),
    "sort": (lambda w: lax.sort(w, dimension=1), [W], "0 ."),
    "sort of two": (lambda k, w: lax.sort((k, w), dimension=0, num_keys=1), [W, x(6, 4)], ".. 11"),
    "barrier": (lambda a, b: lax.optimization_barrier((a, b)), [W, UP], "0- 1- -0 -1"),
    "dot": (lambda a, b: a @ b, [W, x(4, 5)], "0. .1"),
    "dot with a batch": (
        lambda a, b: lax.dot_general(a, b, (((2,), (1,)), ((1,), (2,)))),
        [x(3, 6, 4), x(5, 4, 6)],
        "12 0. .0",
    ),
    "dot of vectors": (lambda a, b: jnp.outer(a, b), [x(4), x(5)], "0. .0"),
    "ragged_dot": (lambda a, b, n: lax.ragged_dot(a, b, n), [W, x(2, 4, 3), ints(2, 4)], "... ..."),
    "ragged_dot, gradient": (
        lambda a, b, n, ct: jax.vjp(lambda b: lax.ragged_dot(a, b, n), b)[1](ct)[0],
        [W, x(4, 4, 3), ints(2, 0, 1, 3), x(6, 3)],
        ".-.. 1-.. .-.1",
    ),
    "conv": (conv(), [x(5, 8, 3), x(3, 3, 5)], "0. .. .2"),
    "conv of groups": (conv(feature_group_count=3), [x(2, 8, 3), x(3, 1, 6)], ".. .. .."),
    "dynamic_slice": (lambda w, i: lax.dynamic_slice(w, (i, 0), (2, 4)), [W, jnp.int32(3)], ".. 1."),
    "dynamic_slice at a number": (lambda w, i: lax.dynamic_slice(w, (9, i), (4, 3)), [W, jnp.int32(1)], "0. .."),
    "dynamic_update_slice": (lax.dynamic_update_slice, [W, x(2, 4), [jnp.int32(4), jnp.int32(0)]], "0... 11.."),
    "dynamic_update_slice clamps": (lax.dynamic_update_slice, [W, x(2, 3), [jnp.int8(-3), jnp.int8(9)]], "0... 1..."),
    "dynamic_update_slice of bytes": (
        lax.dynamic_update_slice,
        [x(99, 1), x(2, 1), [jnp.uint8(255), jnp.uint8(9)]],
        "0... ....",
        "0... 11..",
    ),
    "dynamic_update_slice at a number": (lambda w, u: lax.dynamic_update_slice(w, u, (9, -2)), [W, x(2, 2)], "0. 1."),
    "lookup": (lambda w, i: w[i], [W, ints(5, -1, 2, 0)], ".0 1."),
    "lookup of several axes": (lambda w, i: w[:, i], [x(3, 6, 5), ints([5, 0], [2, 2])], "0. .0 .1 2."),
    "lookup of elements": (lambda w, i, j: w[i, j], [W, ints(5, 1, 2), ints(3, 0, 3)], ".00"),
    "take_along_axis": (lambda w, i: jnp.take_along_axis(w, i, 1), [W, x(6, 3).astype(int) % 4], "00 .1"),
    "take of other rows": (functools.partial(jnp.take, axis=0, mode="clip"), [W, ints(9, -7, 2)], ".0 1."),
    "gather of windows": (
        gathered(((0, 2), (), (0,)), (2, 4), mode=Mode.FILL_OR_DROP, fill_value=7),
        [W, ints([4], [5], [-1], [0])],
        ".. .0 1.",
    ),
    **{
        f"scatter {kind}, {mode}, {name}": (scattered(kind, ROWS, mode=mode), [W, at, UP], "0.. 1.1")
        for kind, mode, names in (
            ("add", "drop", AT),
            ("add", "clip", AT),
            ("set", "drop", ["out of range", "short"]),
            ("max", "promise_in_bounds", ["negative, twice, out of range"]),
        )
        for name, at in AT.items()
        if name in names and not (mode == "clip" and name == "unsigned")
    },
    "scatter add, ascending": (
        scattered("add", ROWS, indices_are_sorted=True, unique_indices=True),
        [W, ints([1], [2], [4]), UP],
        "0.. 1.1",
    ),
    "scatter add, bytes, more rows than a byte can number": (
        scattered("add", ROWS),
        [x(300, 2), ints([0], [3], dtype=jnp.uint8), x(2, 2)],
        "0.. 1.1",
    ),
    "scatter of a number": (lambda w: w.at[2].set(1.0), [x(6)], "0"),
    "scatter of elements": (
        scattered("mul", ((), (0, 1), (1, 0))),
        [W, ints([3, 5], [4, 0], [0, 2], [-1, 0]), x(4)],
        "0.. 1..",
    ),
    "scatter of blocks": (scattered("add", BLOCKS), [W, ints([3], [4], [5], [-1]), x(2, 4, 4)], "0.. 1.2"),
    "scatter of blocks, clip": (scattered("set", BLOCKS, mode="clip"), [W, ints([5]), x(2, 1, 4)], "0.. 1.2"),
    "scatter of overlapping blocks": (
        scattered("add", BLOCKS, indices_are_sorted=True),
        [W, ints([0], [1], [2]), x(3, 3, 4)],
        "0.. 1.2",
    ),
    "scatter of blocks of elements": (
        scattered("add", ((0, 1), (), (1, 0)), mode="clip"),
        [W, ints([3, 1], [0, 9]), x(3, 2, 2)],
        "0.. 1..",
    ),
    "scatter of columns in blocks": (
        scattered("add", ((1, 2), (), (0, 1))),
        [W, ints([3, 1], [5, 0], [4, 3]), x(3, 1, 2)],
        "0.. 1..",
    ),
    "scatter with a batch": (
        scattered("add", ((1,), (1,), (1,), (0,), (0,))),
        [x(3, 6, 2), ints([[1], [5]], [[0], [0]], [[-1], [6]]), x(3, 2, 2)],
        "000 1.. 2.1",
    ),
    "top_k": (lambda w: lax.top_k(w, 2), [W], "0 . 0 ."),
    "cholesky": (lambda w: lax.linalg.cholesky(w, symmetrize_input=False), [jnp.stack([jnp.eye(3)] * 5)], "0 . ."),
    "qr": (lambda w: jnp.linalg.qr(w)[1], [x(5, 3, 2)], "0 . ."),
    "triangular_solve": (lax.linalg.triangular_solve, [jnp.stack([jnp.eye(3)] * 5), x(5, 2, 3)], "00 .. .."),
    "fft": (jnp.fft.rfft, [W], "0 ."),
    "reduce_window": (lambda w: lax.reduce_window(w, -jnp.inf, lax.max, (1, 2), (1, 1), "SAME"), [W], "0 ."),
    "bits": (lambda w: lax.bitcast_convert_type(w, jnp.uint8), [W], "0 1 ."),
    "random": (lambda k, n: drawn(k, n), [ints(*range(12), dtype=jnp.uint32).reshape(6, 2), ints(*range(6))], "00 .."),
    **{
        f"random, {impl}": (functools.partial(drawn, impl=impl), [KEYS, ints(*range(6))], ".. ..")
        for impl in ("rbg", "unsafe_rbg")
    },
    "fold_in, rbg": (
        lambda k, n: jax.random.key_data(jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(k, impl="rbg"), n)),
        [KEYS, ints(*range(6))],
        ".. ..",
    ),
    "sharding": (lambda w: lax.with_sharding_constraint(w, jax.NamedSharding(MESH, P(None, "d"))), [W], "0 1"),
}
