"""Functions that are differentiated work for every float type and every way to freeze a part of a leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_freeze as fz

FLOAT8 = [name for name in dir(jnp) if name.startswith("float8_") and name != "float8_e8m0fnu"]  # which has no zero
EXECUTED = ["float8_e4m3fn", "bfloat16", "complex64"]
TRACED = sorted({*FLOAT8, "float16", "float32", "float64"} - {*EXECUTED})
MASK = np.arange(16).reshape(4, 2, 2) % 3 == 0
SPECS = {
    "run": lambda: ~fz.rows([1, 2]),
    "rows": lambda: ~fz.rows([0, 1, 3]),
    "dynamic": lambda: ~fz.rows(jnp.array([3, 1])),
    "dense": lambda: fz.elements(MASK),
    "compact": lambda: fz.elements(MASK, compact=True),
}


@jax.custom_jvp
def custom(x):
    return x * x


@custom.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return x * x, jnp.cumsum(2 * x * t, 0)  # merges the rows of a tangent


def loop(w):
    x = jnp.ones_like(w[0])
    for i in range(len(w)):
        x = x * w[i]
    return x


OPERATIONS = [custom, loop, jnp.square, lambda w: jax.lax.scan(lambda x, p: (x * p, None), w[0], 2 * w)[0]]


def loss(params, operations=(custom,)):
    """Applies operations to each leaf. All values are powers of two, so that the sums are exact in every type."""
    outs = [operation(w) for operation in operations for w in jax.tree.leaves(params)]
    return sum(jnp.real(out).astype(jnp.float32).sum() for out in outs)


def of_operations(params):
    return loss(params, OPERATIONS)


def squares(tree):
    return loss(tree, [jnp.square])


def squared_gradient(gradient):
    return lambda params: squares(gradient(params))


def of_trainable(fun):
    """The gradient of ``fun(trainable, rest)``."""

    def gradient(params, frozen):
        trainable, rest = fz.partition(params, frozen)
        return jax.grad(lambda trainable: fun(trainable, rest))(trainable)

    return gradient


def of_params(fun):
    """The trainable part of the gradient of ``fun(params, frozen)``."""
    return lambda params, frozen: fz.partition(jax.grad(lambda params: fun(params, frozen))(params), frozen)[0]


def of_features(params, frozen):
    once, x = fz.precompute(lambda params, x: loss(params) * jnp.vdot(x, x), frozen), jnp.ones(1)
    return fz.grad(once.after, frozen)(params, once.before(params, x), x)


def of_updates(params, frozen):
    zeros = jax.tree.map(jnp.zeros_like, fz.partition(params, frozen)[0])
    return jax.grad(lambda updates: loss(fz.apply_updates(params, updates, frozen)))(zeros)


FUNCTIONS = {  # each with a function of the full parameters that has the same gradient
    "grad": (lambda params, frozen: fz.grad(of_operations, frozen)(params), of_operations),
    "restrict": (of_trainable(lambda trainable, rest: fz.restrict(of_operations, rest)(trainable)), of_operations),
    "combine": (of_trainable(lambda trainable, rest: loss(fz.combine(trainable, rest))), loss),
    "partition": (of_params(lambda params, frozen: squares(fz.partition(params, frozen)[0])), squares),
    "stop_gradient": (of_params(lambda params, frozen: loss(fz.stop_gradient(params, frozen))), loss),
    "apply_updates": (of_updates, loss),
    "precompute": (of_features, loss),
    "gradient of a gradient": (
        of_params(lambda params, frozen: squared_gradient(fz.grad(loss, frozen))(params)),
        squared_gradient(jax.grad(loss)),
    ),
}


@pytest.mark.parametrize("dtype", [*EXECUTED, *TRACED])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_gradient_is_that_of_the_full_parameters(function, dtype):
    of, full = FUNCTIONS[function]
    with jax.enable_x64(dtype == "float64"):
        params = {name: jnp.resize(jnp.array([1.0, 0.5, 1.0, 2.0, 1.0]), (4, 2, 2)).astype(dtype) for name in SPECS}
        frozen = {name: make() for name, make in SPECS.items()}
        gradient = jax.jit(lambda params: of(params, frozen))
        if dtype in EXECUTED:
            expected = fz.partition(jax.grad(full)(params), frozen)[0]
            jax.tree.map(np.testing.assert_array_equal, gradient(params), expected)
        else:
            gradient.trace(params)
