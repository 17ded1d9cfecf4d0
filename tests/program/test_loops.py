"""Loops and branches: only the steps and the regions that are wanted, and the same results as the plain program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_freeze as fz
from optax_freeze._program import propagation, trace
from optax_freeze._program.dependence import depends_on
from optax_freeze._program.regions import EVERYTHING, DynamicRows, Rows, Values
from optax_freeze._program.tasks import ALWAYS
from optax_freeze._program.trace import flatten
from optax_freeze._program.walk import schedule

RAN = []  # the steps that ran, in order
X = jnp.sin(jnp.arange(24.0)).reshape(8, 3)
LONG = jnp.sin(jnp.arange(36.0)).reshape(12, 3)


def rows(*numbers, axis=0):
    return lambda: Rows(axis, numbers)


def dynamic(*numbers, axis=0):
    return lambda: DynamicRows(axis, jnp.array(numbers, jnp.int32))


def everything():
    return EVERYTHING


def noted(i, value):
    """The value, when it is computed; it is no side effect, so it may be left out."""
    return jax.pure_callback(lambda i, value: (RAN.append(int(i)), value)[1], jax.typeof(value), i, value)


def two_stacks(carry, step):
    i, x = step
    carry = noted(i, jnp.tanh(carry + x))
    return carry, (carry * x, carry + 1)


def loop(x, reverse=False, unroll=1, body=two_stacks):
    return lax.scan(body, jnp.zeros(x.shape[1:], x.dtype), (jnp.arange(len(x)), x), reverse=reverse, unroll=unroll)


@functools.cache
def of_loop(reverse):
    """The results of all steps."""
    return jax.tree.leaves(jax.jit(functools.partial(loop, reverse=reverse))(X))


def parts(fun, operands, wanted, traced=None, whole=None):
    """Parts of the results of a function, from one schedule of them all; the regions of the operands are recorded."""
    program = flatten(jax.make_jaxpr(fun)(*operands))

    def run(operands):
        asked = [(program.outputs[place], region(), ALWAYS) for place, region in wanted]
        found = schedule(program, asked)
        if traced is not None:
            traced.append(found)
        return found.run(Values(dict(enumerate(jax.tree.leaves(operands)))))

    RAN.clear()
    outs = jax.block_until_ready(jax.jit(run)(operands))
    steps = list(RAN)
    whole = whole or jax.tree.leaves(jax.jit(fun)(*operands))
    for (place, region), out in zip(wanted, outs, strict=True):
        expected = region().take(whole[place])
        assert out.dtype == expected.dtype
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7, err_msg=f"result {place}")
    return steps


def upto(stop, start=0):
    return list(range(start, stop))


# What is wanted of the carry (0) and of two stacks (1, 2), and the steps that run, forward and in reverse.
STEPS = {
    "start": ([(1, rows(0, 1))], upto(2), upto(8)),
    "middle": ([(1, rows(2, 3))], upto(4), upto(8, 2)),
    "end": ([(2, rows(7))], upto(8), [7]),
    "apart": ([(1, rows(1, 5))], upto(6), upto(8, 1)),
    "two stacks": ([(1, rows(1, 2)), (2, rows(2, 6))], upto(7), upto(8, 1)),
    "two regions of a stack": ([(1, rows(1, 2)), (1, rows(2, 4))], upto(5), upto(8, 1)),
    "all of one": ([(1, rows(3)), (2, everything)], upto(8), upto(8)),
    "alternating": ([(1, rows(0, 2, 4, 6)), (2, rows(1, 3, 5))], upto(7), upto(8)),
    "inner rows": ([(1, rows(1, axis=1)), (2, rows(3))], upto(8), upto(8)),
    "inner and outer rows": ([(1, rows(1, axis=1)), (1, rows(3))], upto(8), upto(8)),
    "carry": ([(0, everything), (2, rows(2, 3))], upto(8), upto(8)),
    "rows of the carry": ([(0, rows(0, 2)), (2, rows(2, 3))], upto(8), upto(8)),
    "dynamic": ([(1, dynamic(2, 4))], upto(5), upto(8, 2)),
    "dynamic first": ([(1, dynamic(0))], upto(1), upto(8)),
    "dynamic last": ([(1, dynamic(7))], upto(8), [7]),
    "dynamic of no row": ([(1, dynamic(3, 8))], upto(8), upto(8, 3)),
    "dynamic of two stacks": ([(1, dynamic(2, 4)), (2, dynamic(1, 5, 6))], upto(7), upto(8, 1)),
    "dynamic of a stack twice": ([(1, dynamic(2, 4)), (1, dynamic(1, 5))], upto(6), upto(8, 1)),
    "dynamic and carry": ([(1, dynamic(2, 4)), (0, everything)], upto(8), upto(8)),
    "dynamic and all": ([(1, dynamic(2, 4)), (2, everything)], upto(8), upto(8)),
    "dynamic later than known": ([(1, dynamic(4, 5)), (2, rows(1, 2))], upto(6), upto(8, 1)),
    "dynamic before known": ([(1, dynamic(1)), (2, rows(4))], upto(5), upto(8, 1)),
    "dynamic and known of one": ([(1, dynamic(1, 6)), (1, rows(3, 4))], upto(7), upto(8, 1)),
    "dynamic inner rows": ([(1, dynamic(0, 2, axis=1)), (2, rows(3))], upto(8), upto(8)),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    wanted, forward, in_reverse = STEPS[name]
    whole = [of_loop(reverse) for reverse in (False, True)]
    assert parts(loop, [X], wanted, whole=whole[0]) == forward
    assert parts(functools.partial(loop, reverse=True, unroll=3), [X], wanted, whole=whole[1]) == in_reverse[::-1]


def test_of_many_segments_there_is_one():
    """The results between the first and the last wanted row are stored, too."""
    found = []
    steps = parts(loop, [LONG], [(1, rows(1, 3, 5, 7, 9)), (2, rows(9, 10))], found)
    assert steps == upto(11)
    assert sum(task.eqn.name == "scan" for task in found[0].tasks) == 4


def outer_products(x, y, start, stepped):
    """A loop that adds up an accumulator, as the gradient of a constant of a loop is."""

    def body(total, step):
        x, y = step
        return total + stepped(x, y), jnp.sum(total)

    return lax.scan(body, start, (x, y))[0]


@pytest.mark.parametrize("region", [rows(1, 2), rows(0, 2, axis=1), dynamic(0, 3), dynamic(1, axis=1)])
def test_rows_of_a_carry(region):
    """Only these rows are carried; what else depends on the carry is left out."""
    found = []
    operands = [jnp.cos(jnp.arange(32.0)).reshape(8, 4), X, jnp.ones((4, 3))]
    parts(functools.partial(outer_products, stepped=jnp.outer), operands, [(0, region)], found)
    [start] = found[0].given[2]
    assert (type(start), start.axis) == (type(region()), region().axis)


def test_a_carry_that_needs_more_than_it_was_asked_for():
    """Of `a` the rows of `b`, and of `b` all: the regions of the carries are found step by step."""

    def body(carry, x):
        a, b, c = carry
        return (a + b, b + c[::-1], c * x), None

    a = jnp.arange(4.0)
    parts(lambda x, *abc: lax.scan(body, abc, x)[0], [X[:, 0], a, a + 1, a + 2], [(0, rows(0, 1))])
    found = []
    parts(lambda x, *abc: lax.scan(body, abc, x)[0], [X[:1, 0], a, a + 1, a + 2], [(0, rows(0, 1))], found)
    assert [*found[0].given[2]] == [Rows(0, [0, 1])]  # in one step
    assert 3 not in found[0].given


def nested(x, w):
    def outer(c, x):
        c, ys = lax.scan(lambda c, w: (jnp.tanh(c @ w + x), c[0] * w), c, w)
        return c, (ys, c)

    return lax.scan(outer, jnp.ones(3), x)


W = jnp.cos(jnp.arange(45.0)).reshape(5, 3, 3)


@pytest.mark.parametrize(
    "wanted",
    [
        [(1, rows(1, 2, axis=1)), (2, rows(4))],
        [(1, dynamic(1, 3)), (2, rows(2, 5))],
        [(1, dynamic(1, 3, axis=1))],
        [(1, dynamic(0, axis=2)), (0, everything)],
    ],
)
def test_nested(wanted):
    parts(nested, [X, W], wanted)


OTHERS = {
    "no steps": (
        lambda c, x: lax.scan(lambda c, x: (c + x, c * x), c, x),
        [X[0], X[:0]],
        [(0, everything), (1, rows(1, axis=1))],
    ),
    "one step": (lambda x: lax.scan(lambda c, x: (c + x, c * x), x[0], x), [X[:1]], [(0, rows(0, 2)), (1, everything)]),
    "no carry": (lambda x: lax.map(lambda x: (jnp.sort(x), x.sum()), x), [X], [(0, rows(2, 4)), (1, dynamic(3))]),
    "a length only": (lambda x: lax.scan(lambda c, _: (c * 1.5, c + 1), x, None, length=5), [X[0]], [(1, rows(1, 3))]),
    "literals as carries": (
        lambda x: lax.scan(lambda c, x: ((c[0] + 1, c[1] + x, c[2] + x), c), (0, jnp.bfloat16(0), 0.0), x),
        [X[:, 0].astype(jnp.bfloat16)],
        [(3, dynamic(2, 4)), (4, rows(3)), (5, rows(2)), (2, everything)],
    ),
    "constants of which rows are needed": (
        lambda w, x: lax.map(lambda x: w.T @ x, x),
        [W[0], X],
        [(0, rows(1, 2, axis=1))],
    ),
    "a stack of which a part is read": (
        lambda x: lax.scan(lambda c, x: (c + x, c * x), X[0], x @ W[0], reverse=True),
        [X],
        [(1, rows(5))],
    ),
    "an input that is a result": (lambda x: lax.scan(lambda c, x: (c + 1, x), 0, x), [X], [(1, rows(1, 2))]),
    "a step that stores its carry": (lambda x: lax.scan(lambda c, x: (x, c), x[0], x), [X], [(1, rows(0, 3))]),
    "branches": (
        lambda i, x: lax.switch(i, [lambda x: (x * 2, x), lambda x: (x[::-1], x + 1), lambda x: (x, X)], x),
        [jnp.int32(1), X],
        [(0, rows(1, 2)), (1, dynamic(0, 3))],
    ),
    "branches with literals": (
        lambda x: lax.cond(x[0, 0] > 1, lambda: (jnp.bfloat16(0), x), lambda: (x[0, 0], x + 1)),
        [X.astype(jnp.bfloat16)],
        [(0, everything), (1, rows(2))],
    ),
    "a loop in a branch": (
        lambda i, x: lax.cond(i > 0, lambda x: loop(x)[1], lambda x: (x, x - 1), x),
        [jnp.int32(1), X],
        [(0, rows(2, 4)), (1, dynamic(0, 3))],
    ),
    "branches in a loop": (
        lambda x: lax.scan(lambda c, x: (c + 1, lax.cond(c > 2, jnp.sin, jnp.cos, x)), 0, x),
        [X],
        [(1, rows(2, 4)), (1, rows(0, axis=1))],
    ),
    "a while_loop is computed whole": (
        lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, x))[1],
        [X],
        [(0, rows(2, 4))],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    parts(*OTHERS[name])


def test_branches_need_what_one_of_them_needs():
    found = []
    parts(*OTHERS["branches"][:2], [(0, rows(1, 2))], found)
    assert list(found[0].given[1]) == [Rows(0, [1, 2, 5, 6])]


@pytest.mark.parametrize("wanted", [[(0, everything)], [(1, rows(1))], [(1, dynamic(1))], []])
def test_effects_of_all_steps_happen_once_and_in_order(wanted):
    seen = []

    def body(c, x):
        jax.debug.callback(lambda c: seen.append(int(c)), c, ordered=True)
        return c + 1, c * x

    def effects_too(x):
        out = lax.scan(body, 0, x)
        lax.cond(x[0, 0] > 9, lambda: None, lambda: jax.debug.callback(lambda: seen.append(9), ordered=True))
        return out

    program = flatten(jax.make_jaxpr(effects_too)(X))
    asked = [(program.outputs[place], region(), ALWAYS) for place, region in wanted]
    jax.jit(lambda x: schedule(program, asked).run(Values({0: x})))(X)
    jax.effects_barrier()
    assert seen == [*range(8), 9]


def test_an_operation_with_a_program_is_not_a_call():
    def keeps_the_first(x, start):
        return jax.lax.reduce(x, start, lambda a, b: a, (0,))

    closed = jax.make_jaxpr(keeps_the_first)(jnp.ones(3), 0.0)
    assert depends_on(closed, [True, False]) == depends_on(closed, [False, True]) == [True]


def test_each_body_is_listed_once_and_each_question_to_it_is_asked_once(monkeypatch):
    """Those of six loops, one in the other, of their backward passes, and the whole program."""
    listed, list_ = [], trace._Flatten
    monkeypatch.setattr(trace, "_Flatten", lambda *args: listed.append(args) or list_(*args))
    asked, ask = [], propagation.flatten
    monkeypatch.setattr(propagation, "flatten", lambda closed: asked.append(closed) or ask(closed))

    def nested(depth, w, x):
        step = lambda c, _: (nested(depth - 1, w, c), None)  # noqa: E731
        return lax.scan(step, x, None, length=2)[0] if depth else jnp.tanh(x @ w)

    loss = lambda params: jnp.sum(nested(6, params["w"], jnp.ones((2, 4))))  # noqa: E731
    jax.make_jaxpr(fz.grad(loss, {"w": fz.rows([0])}))({"w": jnp.ones((4, 4))})
    assert len(listed) <= 20
    assert len(asked) <= 20
