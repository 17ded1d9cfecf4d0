"""A loss with a custom derivative that closes over an argument, or over what is computed from it."""

import jax
import jax.numpy as jnp
import pytest
from conftest import assert_equal_up_to_rounding
from jax import lax

import optax_freeze as fz

KEYS = jax.random.split(jax.random.key(0), 4)
SHAPES = {"encoder": (4, 4), "middle": (4, 4), "head": (4, 3)}
PARAMS = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(KEYS, SHAPES.items(), strict=False)}
X, NOISE = jax.random.normal(KEYS[3], (5, 4)), jnp.arange(1.0, 4.0)
FROZEN = ["encoder", "middle"]
CLOSES = r"closes over an argument(.|\n)*at: custom_[jv]+p_call(.|\n)*as an argument"


def closing_over(what, in_forward=False, wrap=lambda f: f, kind=jax.custom_vjp):
    """A loss with a straight-through sine, whose derivative is scaled by a value from outside of it."""

    def loss(params, x, noise):
        h = jnp.sort(jnp.tanh(x @ params["encoder"]) @ params["middle"])
        outside = {"leaf": params["middle"], "value": h, "batch": x, "argument": noise, "trained": h @ params["head"]}
        scale = outside[what].mean()

        @kind
        def f(y):
            return jnp.sin(y) * (scale if in_forward else 1)

        if kind is jax.custom_vjp:
            f.defvjp(lambda y: (f(y), y), lambda y, ct: (ct * y * scale,))
        else:
            f.defjvp(lambda ys, ts: (f(*ys), ts[0] * ys[0] * scale))
        value = jnp.sum(wrap(f)(h @ params["head"]) ** 2) + jnp.sum(noise * params["head"])
        return value, {"largest": jnp.argmax(h @ params["head"], 1), "name": "loss", "first": h[:, 0]}

    return loss


def in_a_scan(function):
    return lambda rows: lax.map(function, rows)


def compared(loss, frozen=FROZEN, **options):
    once = fz.precompute(loss, frozen, **options)
    features = jax.jit(once.before)(PARAMS, X, NOISE)
    small = once.needed(PARAMS, X, NOISE)
    return fz.value_and_grad(once.after, frozen, has_aux=True), (small, features, X, NOISE)


class TestGradient:
    @pytest.mark.parametrize(
        ("kind", "wrap"),
        [(jax.custom_vjp, lambda f: f), (jax.custom_vjp, jax.checkpoint), (jax.custom_jvp, lambda f: f)],
        ids=["custom_vjp", "custom_vjp in checkpoint", "custom_jvp"],
    )
    @pytest.mark.parametrize("in_forward", [False, True])
    @pytest.mark.parametrize(
        ("what", "example_axis"),
        [("leaf", None), ("value", None), ("batch", None), ("argument", None), ("leaf", 0), ("argument", 0)],
    )
    def test_is_that_of_the_function(self, what, in_forward, kind, wrap, example_axis):
        loss = closing_over(what, in_forward, wrap, kind)
        value_and_grad, args = compared(loss, example_axis=example_axis)
        (value, aux), grads = value_and_grad(*args)
        (expected, its), of_loss = fz.value_and_grad(loss, FROZEN, has_aux=True)(PARAMS, X, NOISE)
        assert aux.pop("name") == its.pop("name")
        assert_equal_up_to_rounding((value, aux, grads), (expected, its, of_loss))

    def test_in_a_compiled_step_in_vmap_and_in_a_scan_of_steps(self):
        loss = lambda *args: closing_over("value")(*args)[0]  # noqa: E731
        once = fz.precompute(loss, FROZEN)
        args = once.needed(PARAMS, X, NOISE), once.before(PARAMS, X, NOISE), X
        expected = fz.grad(loss, FROZEN)(PARAMS, X, NOISE)
        grad = fz.grad(once.after, FROZEN)
        assert_equal_up_to_rounding(jax.jit(grad)(*args, NOISE), expected)
        mapped = jax.vmap(lambda noise: grad(*args, noise))(jnp.stack([NOISE, NOISE]))
        assert_equal_up_to_rounding(jax.tree.map(lambda x: x[1], mapped), expected)
        _, stacked = lax.scan(lambda _, noise: (None, grad(*args, noise)), None, NOISE[None])
        assert_equal_up_to_rounding(jax.tree.map(lambda x: x[0], stacked), expected)
        assert_equal_up_to_rounding(jax.jit(fz.grad(jax.jit(once.after), FROZEN))(*args, NOISE), expected)
        head = lambda head: once.after({**args[0], "head": head}, *args[1:], NOISE)  # noqa: E731
        of_head = jax.vjp(head, PARAMS["head"])[1](1.0)  # a Python number
        assert_equal_up_to_rounding(of_head, (expected["head"],))

    def test_computes_and_reads_no_more_than_the_rest(self):
        once = fz.precompute(closing_over("value"), FROZEN)
        report = once.explain(PARAMS, X, NOISE)
        assert report.not_needed == ("encoder", "middle")
        assert all("cotangent" not in why for _, why in report.stopped_by)
        plain = fz.precompute(lambda p, x, noise: closing_over("value")(p, x, noise)[0], FROZEN)
        args = plain.needed(PARAMS, X, NOISE), plain.before(PARAMS, X, NOISE), X, NOISE
        text = str(jax.make_jaxpr(fz.grad(plain.after, FROZEN))(*args))
        assert text.count("dot_general") == 2

    def test_in_the_second_call_of_three(self):
        def loss(params, x, noise):
            value, aux = closing_over("value")(params, jax.nn.relu(x), noise)
            return jax.nn.relu(value), aux

        value_and_grad, args = compared(loss)
        assert_equal_up_to_rounding(value_and_grad(*args)[1], fz.grad(loss, FROZEN, has_aux=True)(PARAMS, X, NOISE)[0])

    def test_a_value_of_an_enclosing_trace(self):
        @jax.jit
        def gradients(scale):
            @jax.custom_vjp
            def f(y):
                return jnp.sin(y)

            f.defvjp(lambda y: (f(y), y), lambda y, ct: (ct * y * scale,))
            loss = lambda p, x: jnp.sum(f(jnp.sort(x @ p["encoder"]) @ p["head"]))  # noqa: E731
            frozen = {"encoder": True, "middle": True, "head": fz.rows(0)}
            once = fz.precompute(loss, frozen)
            return fz.grad(once.after, frozen)(PARAMS, once.before(PARAMS, X), X), fz.grad(loss, frozen)(PARAMS, X)

        assert_equal_up_to_rounding(*gradients(2.0))


class TestErrors:
    @pytest.mark.parametrize("wrap", [in_a_scan, jax.jit])
    def test_in_an_inner_program_only_the_value_is_known(self, wrap):
        """As under ``jax.jit``, where JAX cannot differentiate it."""
        loss = closing_over("value", wrap=wrap)
        value_and_grad, args = compared(loss)
        after = fz.precompute(loss, FROZEN).after(*args)
        assert_equal_up_to_rounding(after[0], loss(PARAMS, X, NOISE)[0])
        with pytest.raises(ValueError, match=CLOSES):
            value_and_grad(*args)

    @pytest.mark.parametrize("kind", [jax.custom_vjp, jax.custom_jvp])
    def test_over_what_trains(self, kind):
        value_and_grad, args = compared(closing_over("trained", kind=kind))
        with pytest.raises(ValueError, match=CLOSES):
            jax.jit(lambda *args: value_and_grad(*args)[1])(*args)

    @pytest.mark.parametrize("kind", [jax.custom_vjp, jax.custom_jvp])
    def test_of_a_leaf_frozen_by_rows(self, kind):
        frozen = {"encoder": True, "middle": True, "head": fz.rows(slice(0, 2))}
        value_and_grad, args = compared(closing_over("value", kind=kind), frozen)
        with pytest.raises(ValueError, match=CLOSES):
            value_and_grad(*args)

    def test_of_another_argument(self):
        loss = lambda *args: closing_over("value")(*args)[0]  # noqa: E731
        once = fz.precompute(loss, FROZEN)
        features = once.before(PARAMS, X, NOISE)
        for grad, value in (
            (jax.grad(lambda noise: once.after(PARAMS, features, X, noise)), NOISE),
            (jax.grad(lambda features: once.after(PARAMS, features, X, NOISE)), [*features]),
        ):
            with pytest.raises(ValueError, match=CLOSES):
                grad(value)
        with pytest.raises(ValueError, match="different spec"):
            fz.grad(once.after, "encoder")(PARAMS, features, X, NOISE)

    def test_forward_mode_as_of_the_function(self):
        of_head = self.of_head(closing_over("value"))
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(of_head, (PARAMS["head"],), (PARAMS["head"],))

    def test_a_second_derivative_only_if_the_first_holds_no_tracers(self):
        def second(fun):
            return jax.grad(lambda head: jnp.sum(jax.grad(fun)(head) ** 2))(PARAMS["head"])

        with pytest.raises(ValueError, match=r"a second derivative(.|\n)*as an argument"):
            second(self.of_head(closing_over("value")))

        def loss(params, x, noise):
            scale = jnp.sort(x).mean()
            f = jax.custom_vjp(lambda y: jnp.sin(y))
            f.defvjp(lambda y: (jnp.sin(y), y), lambda y, ct: (ct * y * scale,))
            return (jnp.sum(f(jnp.sort(x @ params["encoder"]) @ params["head"])),)

        of_loss = lambda head: loss({**PARAMS, "head": head}, X, NOISE)[0]  # noqa: E731
        assert_equal_up_to_rounding(second(self.of_head(loss)), second(of_loss))

    def of_head(self, loss):
        once = fz.precompute(lambda *args: loss(*args)[0], FROZEN)
        features = once.before(PARAMS, X, NOISE)
        return lambda head: once.after({**PARAMS, "head": head}, features, X, NOISE)
