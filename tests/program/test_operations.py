"""Each operation of the table: a region of its result, computed from regions of its operands, is part of the whole."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.lax import GatherScatterMode as Mode
from jax.sharding import PartitionSpec as P

from optax_freeze._program.operations import ELEMENTWISE, RULES
from optax_freeze._program.regions import EVERYTHING, DynamicRows, Rows, Values, is_whole
from optax_freeze._program.schedule import schedule
from optax_freeze._program.tasks import ALWAYS
from optax_freeze._program.trace import flatten

INEXACT = {"qr", "dot_general", "ragged_dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "cumlogsumexp"}


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


def drawn(keys, numbers):
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys, impl="threefry2x32"), numbers)
    return jax.vmap(lambda key: jax.random.bits(key, (4,)))(jax.vmap(jax.random.split)(keys)[:, 1])


def conv(**params):
    return lambda a, b: lax.conv_general_dilated(a, b, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), **params)


MESH = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


ROWS = (1,), (0,), (0,)  # dimension numbers of w.at[i].add(updates)
BLOCKS = (0, 2), (), (0,)
W, UP = x(6, 4), x(3, 4)
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
    "scatter of a number": (lambda w: w.at[2].set(1.0), [x(6)], "0"),
    "scatter of elements": (
        scattered("mul", ((), (0, 1), (1, 0))),
        [W, ints([3, 5], [4, 0], [0, 2], [-1, 0]), x(4)],
        "0.. 1..",
    ),
    "scatter of blocks": (
        scattered("add", BLOCKS),
        [W, ints([3], [4], [5], [-1]), x(2, 4, 4)],
        "0.. 1.2",
    ),
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
    "sharding": (lambda w: lax.with_sharding_constraint(w, jax.NamedSharding(MESH, P(None, "d"))), [W], "0 1"),
}


def parts_of(size):
    """Rows of an axis of this size, known and dynamic; the last of these have a number out of range."""
    n = np.arange(size)
    known = [n[:1], n[1:], n[::2], n[np.isin(n % 7, (2, 4, 5))]]
    return [rows for rows in known if rows.size], [np.unique([0, size - 1]), np.array([size - 1, size])]


def computed(fun, operands, asked, log=None):
    """These regions of results, each computed on its own; and the regions of the operands for each."""
    leaves = jax.tree.leaves(operands)
    program = flatten(jax.make_jaxpr(fun)(*operands))
    outs, given = [], []
    for place, region in asked:
        found = schedule(program, [(program.outputs[place], region, ALWAYS)], log)
        outs += found.run(Values(dict(enumerate(leaves))))
        given.append([list(found.given.get(i, ())) for i in range(len(leaves))])
    return outs, given, {eqn.primitive.name for eqn in program.eqns}


def shown(regions):
    """The axes of the regions of the operands, as in the table."""
    assert all(len(each) <= 1 for each in regions)
    assert all((np.diff(each[0].numbers) > 0).all() for each in regions if each and isinstance(each[0], Rows))
    return "".join("-" if not each else "." if each[0] is EVERYTHING else str(each[0].axis) for each in regions)


SEEN = {}


def agree(name, fun, operands, axes, dynamic_axes=None):
    """Compares regions with parts of the whole result, and the regions of the operands with those expected."""
    whole, numbers, asked = [np.asarray(out) for out in jax.tree.leaves(jax.jit(fun)(*operands))], [], []
    for place, out in enumerate(whole):
        for axis, size in enumerate(out.shape):
            known, dynamic = parts_of(size)
            asked += [(place, axis, rows) for rows in known]
            asked += [(place, axis, len(numbers) + i) for i in range(len(dynamic))]
            numbers += dynamic

    def run(operands, numbers):
        regions = [(p, DynamicRows(a, numbers[n]) if isinstance(n, int) else Rows(a, n)) for p, a, n in asked]
        outs, given, names = computed(fun, operands, regions)
        cut = {}
        SEEN[name] = names
        of_axes = axes.split(), (dynamic_axes or axes).split()
        for (place, region), each in zip(regions, given, strict=True):
            ranks = [len(out.shape) for out in whole]
            is_apart = len(of_axes[0]) > ranks[place]
            expected = of_axes[isinstance(region, DynamicRows)][region.axis + (sum(ranks[:place]) if is_apart else 0)]
            found = shown(each)
            if not is_whole(region, whole[place].shape):
                key = place, region.axis, type(region), expected
                cut[key] = [a if a.isdigit() else b for a, b in zip(found, cut.get(key, found), strict=True)]
                assert all(a in (b, "-", ".") for a, b in zip(found, expected, strict=True)), (region, found, expected)
        for (*where, expected), found in cut.items():  # rows of an operand are all of them for some regions
            assert all(a in (b, "-") or b == "." for a, b in zip(found, expected, strict=True)), (
                where,
                found,
                expected,
            )
        return outs

    for (place, axis, rows), out in zip(asked, jax.jit(run)(operands, list(map(jnp.asarray, numbers))), strict=True):
        rows = numbers[rows] if isinstance(rows, int) else rows
        inside = rows[rows < whole[place].shape[axis]]
        out, expected = np.take(np.asarray(out), np.arange(len(inside)), axis), np.take(whole[place], inside, axis)
        if SEEN[name] & INEXACT:
            np.testing.assert_allclose(out, expected, rtol=3e-6, atol=1e-6, err_msg=f"{place} {axis} {rows}")
        else:
            np.testing.assert_array_equal(out, expected, f"{place} {axis} {rows}")
            assert out.dtype == expected.dtype


@pytest.mark.parametrize("name", TABLE)
def test_region_of_a_result(name):
    agree(name, *TABLE[name])


SHARDS = {
    "psum": (lambda w, u: lax.psum((w, u), "d"), "0- 1- -0 -1"),
    "pmax": (lambda w, u: lax.pmax(w + u, "d"), "00 11"),
    "pcast": (lambda w, u: lax.pcast(w, "d", to="varying") if hasattr(lax, "pcast") else lax.pvary(w, "d"), "0- 1-"),
    "all_gather": (lambda w, u: lax.all_gather(w, "d", axis=1, tiled=True), "0- .-"),
    "all_gather of a new axis": (lambda w, u: lax.all_gather(w, "d", axis=1), "0- .- 1-"),
    "reduce_scatter": (lambda w, u: lax.psum_scatter(w, "d", scatter_dimension=1, tiled=True), "0- .-"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_between_shards(name):
    fun, axes = SHARDS[name]

    @functools.partial(jax.shard_map, mesh=MESH, in_specs=P(), out_specs=P("d"), check_vma=name == "pcast")
    def run(w, u):
        whole = jax.tree.leaves(fun(w, u))
        asked = [(p, Rows(a, [1])) for p, out in enumerate(whole) for a in range(out.ndim)]
        outs, given, SEEN[name] = computed(fun, [w, u], asked)
        assert list(map(shown, given)) == axes.split()
        same = [jnp.array_equal(out, region.take(whole[p])) for (p, region), out in zip(asked, outs, strict=True)]
        return jnp.stack(same)

    assert np.all(jax.jit(run)(W, W + 1))


FLOATS = """
abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1
floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh
"""
PAIRS = """
add atan2 complex div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne nextafter polygamma pow rem sub zeta
"""
OF_NEWER_JAX = {
    "mulhi": lambda w, n: lax.mulhi(n, n),
    "one_minus_square": lambda w, n: lax.one_minus_square(w),
    "polynomial": lambda w, n: lax.polynomial(w, [1.0, w, w[:1]]),
}
BITS = "bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic shift_right_logical"


def test_elementwise_operations():
    """Each is applied to the rows of all of its operands."""

    def fun(w, n):
        c = lax.complex(w, w)
        others = [
            lax.real(c),
            lax.imag(c),
            lax.clz(n),
            lax.betainc(w, w, w),
            lax.conj(c),
            lax.bitwise_not(n),
            lax.population_count(n),
            w.astype(int),
        ]
        others += [lax.clamp(w, w, w), lax.select_n(n > 1, w, w), lax.reduce_precision(w, 4, 8), w**3, jnp.copy(w)]
        others += [checkpoint_name(w, "name")]
        others += [OF_NEWER_JAX[name](w, n) for name in newer]
        results = [getattr(lax, name)(w) for name in FLOATS.split()]
        results += [getattr(lax, name)(w, w) for name in PAIRS.split()]
        return results + [getattr(lax, name)(n, n) for name in BITS.split()] + others

    newer = [name for name in OF_NEWER_JAX if hasattr(lax, name)]
    operands, log, seen = [W, ints(*range(24)).reshape(6, 4)], [], set()

    def run(*operands):
        asked = [(place, Rows(1, [1, 2])) for place in range(len(fun(*operands)))]
        outs, _, names = computed(fun, operands, asked, log)
        seen.update(names)
        return outs

    outs = jax.eval_shape(run, *operands)
    assert {out.shape for out in outs} == {(6, 2)}
    unused = {"add_any", "copy_p", "log2", "stop_gradient", *OF_NEWER_JAX} - {*newer}
    assert set(ELEMENTWISE.split()) - seen == unused
    assert [eqn.name for eqn, extent in log if extent != "rows"] == []


def test_each_rule_has_a_case():
    if not {*TABLE, *SHARDS} <= SEEN.keys():
        pytest.skip("not all cases were run")
    seen = {RULES[name].of for names in SEEN.values() for name in names if name in RULES}
    of_newer_jax = {"expand_dims", "stack", "tile", "unstack"}
    of_explicit_meshes = {"mesh_cast", "reshard"}
    rules = {name: rule.of for name, rule in RULES.items() if rule.of.__module__.endswith(".operations")}
    assert {name for name, of in rules.items() if of not in seen} <= of_newer_jax | of_explicit_meshes
