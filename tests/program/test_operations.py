"""Each operation of the table: a region of its result, computed from regions of its operands, is part of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P
from operation_cases import MESH, TABLE, W, ints

from optax_freeze._program.operations import ELEMENTWISE, RULES, rule_of
from optax_freeze._program.regions import EVERYTHING, DynamicRows, Rows, Values, is_whole
from optax_freeze._program.tasks import ALWAYS
from optax_freeze._program.trace import flatten
from optax_freeze._program.walk import schedule

INEXACT = {"qr", "dot_general", "ragged_dot_general", "conv_general_dilated", "reduce_sum", "cumsum", "cumlogsumexp"}


def parts_of(size):
    """Rows of an axis of this size, known and dynamic; the last of these have a number out of range."""
    n = np.arange(size)
    known = [n[:1], n[1:], n[::2], n[np.isin(n % 7, (2, 4, 5))]]
    return [rows for rows in known if rows.size], [np.unique([0, size - 1]), np.array([size - 1, size])]


def computed(fun, operands, asked, log=()):
    """These regions of results, each computed on its own; and the regions of the operands for each."""
    leaves = jax.tree.leaves(operands)
    program = flatten(jax.make_jaxpr(fun)(*operands))
    outs, given = [], []
    for place, region in asked:
        found = schedule(program, [(program.outputs[place], region, ALWAYS)])
        log += type(log)((task.eqn, task.extent) for task in found.all_tasks if task.extent)
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
    unused = {"add_any", "log2", "stop_gradient", *OF_NEWER_JAX} - {*newer}
    assert set(ELEMENTWISE.split()) - seen == unused
    assert [eqn.name for eqn, extent in log if extent != "rows"] == []


def cosine(name, **params):
    """A primitive of another library that computes the cosine, with this name and these params."""
    made = Primitive(name)
    made.def_impl(lambda x, **_: jnp.cos(x))
    made.def_abstract_eval(lambda x, **_: x)
    return lambda x: made.bind(x, **params)


@pytest.mark.parametrize(
    ("name", "params"), [("sin", {}), ("pvary", {}), ("squeeze", {"dimensions": (), "reverse": True})]
)
def test_an_operation_that_is_not_known_is_computed_whole(name, params):
    """Primitives that only have the name of one of JAX, which it exports or not."""
    operation, log = cosine(name, **params), []
    [part], [[regions]], _ = computed(operation, [W], [(0, Rows(0, [1]))], log)
    assert regions == [EVERYTHING]
    assert part.tobytes() == jnp.cos(W)[1:2].tobytes()
    assert [(eqn.name, extent) for eqn, extent in log] == [(name, "everything")]


def test_an_operation_with_a_param_of_another_release_has_no_rule():
    [eqn] = jax.make_jaxpr(lambda w: w.T)(W).eqns
    assert rule_of(eqn) is RULES["transpose"]
    assert rule_of(eqn.replace(params={**eqn.params, "reverse": True})) is not RULES["transpose"]


def test_each_rule_has_a_case():
    if not {*TABLE, *SHARDS} <= SEEN.keys():
        pytest.skip("not all cases were run")
    seen = {RULES[name].of for names in SEEN.values() for name in names if name in RULES}
    of_newer_jax = {"stack", "tile", "unstack"}
    of_explicit_meshes = {"reshard"}
    rules = {name: rule.of for name, rule in RULES.items() if rule.of.__module__.endswith(".operations")}
    assert {name for name, of in rules.items() if of not in seen} <= of_newer_jax | of_explicit_meshes
