"""How an audit reads a program: whose gradient a value is, and what reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_freeze._audit.constant_zeros import constant_zeros
from optax_freeze._audit.gradient_owners import Owners, _is_one_factor
from optax_freeze._audit.readers import Readers
from optax_freeze._program.trace import flatten


def program_of(function, *args):
    return flatten(jax.make_jaxpr(function)(*args))


def test_a_gradient_is_a_multiple_of_a_derivative_at_each_point():
    """The part of the value along the derivative is the same at all points; a part is not along it."""
    slope, other = np.eye(3)[[0, 1, 2]], np.eye(3)[[1, 2, 0]]
    for value, expected in ((2 * slope, True), (2 * slope + other, False)):
        assert _is_one_factor(value, slope[None], slope[None], 1e-7).tolist() == [expected]


@pytest.mark.parametrize(("dtype", "counts"), [(jnp.float32, True), (jnp.bfloat16, True), (jnp.float8_e4m3fn, False)])
def test_what_rounding_explains_is_that_of_the_coarsest_type(dtype, counts):
    program = program_of(lambda x: x.astype(dtype).astype(jnp.float32).sum(), jnp.ones(3))
    expected = jnp.finfo(dtype if counts else jnp.float32).eps
    assert Owners(program, [jnp.ones(3)], {0}, {})._epsilon == float(expected)


def test_what_reads_one_value_alone_and_other_results_of_the_same_operations():
    def function(x, y):
        a, b = jnp.sin(x), jnp.sin(y)
        return a, jnp.cos(b), jnp.cos(a) + y

    arrays = jnp.arange(3.0), jnp.arange(3.0) + 1
    program, everywhere, nowhere = program_of(function, *arrays), np.asarray(True), np.asarray(False)
    counts = Readers(program, {0: everywhere, 1: everywhere}, program.outputs, [nowhere] * 3).counts(arrays)
    of_sign, of_nan = [0], [2]
    assert counts([0], of_sign)[0, :, 1].tolist() == [2, 0, 0]
    assert counts([1], of_sign)[0, :, 1].tolist() == [0, 0, 3]
    assert counts([0, 1], of_nan)[0, :, 1].tolist() == [3, 3, 3]


def test_operations_with_several_results_are_not_taken_for_each_other():
    def function(x, y):
        a, b = jnp.sin(x), jnp.sin(y)
        return *jax.lax.split(a, (2, 2)), *jax.lax.split(y, (2, 2))[:1], b

    arrays = jnp.arange(4.0), jnp.arange(4.0) + 1
    program, everywhere, nowhere = program_of(function, *arrays), np.asarray(True), np.asarray(False)
    counts = Readers(program, {0: everywhere, 1: everywhere}, program.outputs, [nowhere] * 4).counts(arrays)
    assert counts([0, 1], [2])[0, :, 1].tolist() == [2, 2, 2, 4]


def test_zeros_of_a_loop_that_collects_rows():
    """Also a comparison of NaN is False, but of other numbers it is not known."""

    def step(carry, row):
        return carry.at[0].add(row), (jnp.pad(row[:1], (0, 2)), jnp.where(row > 0, row, 0.0))

    program = program_of(lambda x: jax.lax.scan(step, jnp.zeros((3, 2)), x), jnp.ones((4, 2)))
    found = constant_zeros(program, program.outputs)
    carried, padded, selected = (found[n].tolist() for n in program.outputs)
    assert carried == [[False, False], [True, True], [True, True]]
    assert padded == [[False, True, True]] * 4
    assert not selected
