"""Compares a gradient of the library with JAX's dense one, which is cut to what trains, and a step with Optax's."""

import contextlib
import functools
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from conftest import compile_as
from programs import BATCH, LOGS, NAMESPACE, mesh, on_mesh

import optax_freeze as fz
from optax_freeze._precompute.closures import tracers_in

LONG = 5
"""The seconds of JAX's own gradient beyond which a program is not asked: that of `igamma` takes as long."""
ORDER = np.array([3, 1, 5, 0, 2, 4])
REFUSED = "|".join([
    *("examples are mixed", "nothing to compute once", "no common axis of examples"),
    "closes over an argument of the function",
    *("there is nothing to differentiate", "incompatible devices for jitted"),  # the host's arrays and a mesh
])  # fmt: skip
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5, momentum=0.9))


def mask(shape, seed=0):
    """A boolean array, True for about half of the elements."""
    return np.random.default_rng(seed).integers(0, 2, shape).astype(bool)


class Case(NamedTuple):
    """A loss, its parameters, and what is asked of it."""

    loss: Callable[..., Any]
    leaves: dict[str, tuple[tuple[int, ...], str]]
    frozen: Callable[..., Any]  # of the numbers of dynamic rows
    numbers: Sequence[Sequence[int]] = ()
    way: str = "grad"
    how: str = "as users"
    odd: Any = None  # the first element of each leaf
    mesh: str | None = None
    places: Mapping[str, Any] = MappingProxyType({})  # on the mesh: of each leaf, and of what the batch contains

    def inputs(self, seed: int) -> tuple[Any, Any, Any]:
        """Row numbers, parameters and a batch."""
        rng = np.random.default_rng(seed)

        def normal(shape: Any, dtype: Any) -> Any:
            x = np.asarray(rng.normal(size=shape) + (1j * rng.normal(size=shape) if dtype == "complex64" else 0))
            if self.odd is not None and x.size:
                x.flat[0] = self.odd
            with np.errstate(over="ignore"):
                return jnp.asarray(x.astype(jnp.dtype(dtype)))

        params = {name: normal(*leaf) for name, leaf in self.leaves.items()}
        batch = {
            "x": jnp.asarray(rng.normal(size=BATCH["x"].shape), jnp.float32),
            "i": jnp.asarray(rng.integers(-2, 7, BATCH["i"].shape), jnp.int32),
            "k": jnp.asarray(rng.integers(0, 2**32, BATCH["k"].shape, np.uint32)),
        }
        if self.mesh:
            placed = lambda n, x: jax.device_put(x, jax.NamedSharding(mesh(self.mesh), self.places[n]))  # noqa: E731
            params, batch = ({n: placed(n, x) for n, x in tree.items()} for tree in (params, batch))
        return tuple(jnp.array(n, jnp.int32) for n in self.numbers), params, batch


def made(loss: str, case: str) -> Case:
    """The case that Python makes."""
    space = {**NAMESPACE, "fz": fz, "mask": mask, "Case": Case}
    exec(compile(loss, "<loss>", "exec"), space)
    return eval(case, space)


def cut(grads: Any, spec: Any) -> Any:
    return fz.partition(grads, spec)[0]


def in_order(tree: Any, order: Any) -> Any:
    """Batches with their examples in another order; on a mesh, JAX has to be told where they are."""
    place = lambda x: jax.typeof(x).sharding if jax.sharding.get_abstract_mesh().explicit_axes else None  # noqa: E731
    return jax.tree.map(lambda x: x.at[order].get(out_sharding=place(x)), tree)


def with_features(case: Case, spec: Any, params: Any, batch: Any, order: Any = None) -> Any:
    once = fz.precompute(case.loss, spec, example_axis=None if order is None else 0)
    features = once.before(params, batch)
    if order is not None:
        features, batch = in_order((features, batch), order)
    return fz.value_and_grad(once.after, spec)(params, features, batch)


def restricted(case: Case, spec: Any, params: Any, batch: Any) -> Any:
    trainable, rest = fz.partition(params, spec)
    return jax.value_and_grad(fz.restrict(case.loss, rest))(trainable, batch)


def with_zeros(case: Case, spec: Any, params: Any, batch: Any) -> Any:
    value, trainable = dense(case, spec, params, batch)
    return value, fz.combine(trainable, fz.partition(jax.tree.map(jnp.zeros_like, params), spec)[1])


def two_steps(case: Case, step: Callable[..., Any], *carry: Any) -> Any:
    """What two steps return, in a loop: they are traced and compiled once."""
    if case.how == "eager":
        for i in range(2):
            carry, out = step(i, *carry)
        return carry[0], out
    (params, *_), out = jax.lax.scan(lambda c, i: step(i, *c), carry, jnp.arange(2))
    return params, jax.tree.map(lambda x: x[-1], out)


def trained(case: Case, spec: Any, params: Any, batch: Any) -> Any:
    tx = fz.freeze(TX, spec)
    one = fz.train_step(case.loss, tx)

    def step(_: Any, params: Any, state: Any) -> Any:
        params, state, value = one(params, state, batch)
        return (params, state), value

    return two_steps(case, step, params, tx.init(params))


def trained_by_optax(case: Case, spec: Any, params: Any, batch: Any) -> Any:
    def step(_: Any, params: Any, state: Any) -> Any:
        trainable, rest = fz.partition(params, spec)
        value, grads = jax.value_and_grad(case.loss)(params, batch)
        updates, state = TX.update(cut(grads, spec), state, trainable)
        return (fz.combine(optax.apply_updates(trainable, updates), rest), state), value

    return two_steps(case, step, params, TX.init(fz.partition(params, spec)[0]))


CONDITIONS = (True, False, lambda step: step < 1, lambda step: step >= 1)


def in_groups(case: Case, spec: Any, params: Any, batch: Any) -> Any:
    """Each leaf is a group; `spec` says which of the conditions is its own."""
    tx = fz.freeze_when(optax.sgd(0.5, momentum=0.9), {name: CONDITIONS[i] for name, i in spec.items()})
    one = fz.train_step(case.loss, tx)

    def step(_: Any, params: Any, state: Any) -> Any:
        return one(params, state, batch)[:2], None

    return two_steps(case, step, params, tx.init(params))[0]


def in_groups_by_hand(case: Case, spec: Any, params: Any, batch: Any) -> Any:
    def step(i: Any, params: Any, moments: Any) -> Any:
        grads, old, moments = jax.grad(case.loss)(params, batch), (params, moments), dict(moments)
        params = dict(params)
        for name, number in spec.items():
            condition = CONDITIONS[number]
            is_frozen = condition if isinstance(condition, bool) else condition(i)
            moments[name] = jnp.where(
                is_frozen, old[1][name], (0.9 * moments[name] + grads[name]).astype(grads[name].dtype)
            )
            moved = params[name] - (0.5 * moments[name]).astype(params[name].dtype)
            params[name] = jnp.where(is_frozen, old[0][name], moved)
        return (params, moments), None

    return two_steps(case, step, params, jax.tree.map(jnp.zeros_like, params))[0]


def dense(case: Case, spec: Any, params: Any, batch: Any) -> Any:
    value, grads = jax.value_and_grad(case.loss)(params, batch)
    return value, cut(grads, spec)


def shuffled(case: Case, spec: Any, params: Any, batch: Any) -> Any:
    return dense(case, spec, params, in_order(batch, ORDER))


WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "grad": (lambda c, s, p, x: fz.grad(c.loss, s)(p, x), lambda c, s, p, x: cut(jax.grad(c.loss)(p, x), s)),
    "value_and_grad": (lambda c, s, p, x: fz.value_and_grad(c.loss, s)(p, x), dense),
    "restrict": (restricted, dense),
    "freeze_loss": (lambda c, s, p, x: jax.value_and_grad(fz.freeze_loss(c.loss, s))(p, x), with_zeros),
    "train_step": (trained, trained_by_optax),
    "groups": (in_groups, in_groups_by_hand),
    "precompute": (with_features, dense),
    "precompute by example": (lambda c, s, p, x: with_features(c, s, p, x, ORDER), shuffled),
    "from the host": (lambda c, s, p, x: fz.value_and_grad(c.loss, s)(p, x), dense),
}
"""Each way to compute a gradient, and what it has to equal."""


class WrongError(AssertionError):
    """The library and the oracle disagree."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


class NotAskedError(Exception):
    """The program is none, or none that can be judged."""


def run(function: Any, *args: Any) -> list[np.ndarray]:
    """The arrays of its result, and what callbacks were called with."""
    for calls in LOGS.values():
        calls.clear()
    out = jax.block_until_ready(function(*args))
    jax.effects_barrier()
    return [np.asarray(x) for x in jax.tree.leaves(out)] + [
        np.sort(calls) if name == "unordered" else np.array(calls) for name, calls in LOGS.items()
    ]


def shaken(tree: Any, eps: float, seed: int) -> Any:
    """The same floats up to one rounding."""
    rng = np.random.default_rng(seed)

    def shake(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        with np.errstate(all="ignore"):
            new = jnp.asarray((np.asarray(x) * (1 + eps * rng.integers(-1, 2, x.shape))).astype(x.dtype))
        return jax.device_put(new, x.sharding) if x.committed else new

    return jax.tree.map(shake, tree)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(complex if jnp.iscomplexobj(x) else float)


def difference(got: list[np.ndarray], oracle: list[np.ndarray], others: list[list[np.ndarray]], eps: float) -> str:
    """Where results differ by more than the oracle's own results for the same inputs up to rounding, or ""."""
    for i, (a, b) in enumerate(zip(got, oracle, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"result {i} is {a.dtype}{a.shape}, and not {b.dtype}{b.shape}"
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            continue
        a, b, near = wide(a), wide(b), [wide(each[i]) for each in others]
        if any(c.shape != b.shape for c in near):
            continue
        known = np.isfinite(b)
        settled = np.all([np.isfinite(c) == known for c in near], axis=0)
        nan = settled & (np.isnan(a) != np.isnan(b)) & np.all([np.isnan(c) == np.isnan(b) for c in near], axis=0)
        if nan.any():
            return f"result {i} is {a[nan][:3]}, and not {b[nan][:3]}"
        if not known.any() or not (settled & known).any():
            continue
        own = eps if b.size and i < len(got) else 1e-3
        here = settled & known
        moved = max(np.abs(c[here] - b[here]).max() for c in near)
        most = 16 * moved + 48 * own * np.abs(b[here]).max() + 1e-30
        error = np.abs(a[here] - b[here])
        if not (error <= most).all():
            sizes = f"its largest is {np.abs(b[here]).max():.2g}, one rounding moves it by {moved:.2g}"
            return f"result {i} is wrong by {error.max():.2g}; {sizes}"
    return ""


def answered(function: Any, *args: Any) -> Any:
    """The result of the library; `NotAskedError` if it may refuse the program, or XLA cannot compile it.

    XLA does not compile a ``lax.switch`` on explicit and automatic axes of which one branch ends with a sharding
    constraint, and another with a slice.
    """
    try:
        return function(*args)
    except jax.errors.JaxRuntimeError as error:
        if re.search("Unsupported elementwise operation|Inconsistent conditional sharding", str(error)):
            raise NotAskedError from error
        raise
    except ValueError as error:
        if re.search(REFUSED, str(error)):
            raise NotAskedError from error
        raise


def raises(function: Any, *args: Any) -> bool:
    """Whether a call is an error."""
    try:
        function(*args)
    except Exception:
        return True
    return False


def specs(traced: Any) -> list[Any]:
    """Along which explicit axes of the mesh the results are divided."""
    return [aval.sharding.spec for aval in traced.jaxpr.out_avals]


def trace_with_rows(case: Case, inputs: Any) -> None:
    """Raises an error of the library for dynamic rows of each leaf: to trace is cheap, and this asks for the most."""
    numbers = {name: np.array([0, shape[0] - 1][: shape[0]]) for name, (shape, _) in case.leaves.items() if shape}

    def traced(numbers: Any, params: Any, batch: Any) -> Any:
        spec = {name: ~fz.rows(numbers[name]) if name in numbers else False for name in case.leaves}
        return restricted(case, spec, params, batch)

    if numbers:
        answered(jax.eval_shape, traced, numbers, *inputs[1:])


def judge(case: Case, begin_ours: Callable[[], None] = lambda: None) -> None:
    """Raises `WrongError`, or an error of the library, unless both agree; `NotAskedError` if the oracle has none.

    ``begin_ours`` is called once JAX's own program has run.
    """
    try:
        compare(case, begin_ours)
    except (NotAskedError, WrongError):
        raise
    except Exception as error:
        _, params, batch = case.inputs(0)
        with on_mesh(case.mesh):  # a batched `custom_jvp` may have tangents of another shape than its results
            if raises(jax.eval_shape, jax.grad(jax.jit(case.loss)), params, batch):
                raise NotAskedError from error
        raise


def compare(case: Case, begin_ours: Callable[[], None]) -> None:
    """:func:`judge`, also of programs that JAX differentiates only outside of ``jit``."""
    ours, oracle = WAYS[case.way]

    def of(way: Any, case: Case = case) -> Any:
        return lambda numbers, params, batch: way(case, case.frozen(*numbers), params, batch)

    compile_as(users=case.how == "as users", optimized=case.how == "as users")
    mine = of(ours) if case.how == "eager" else jax.jit(of(ours))
    with warnings.catch_warnings(), on_mesh(case.mesh):
        warnings.simplefilter("ignore")
        inputs = case.inputs(0)
        try:
            traced = jax.jit(of(oracle)).trace(*inputs)
            text = str(traced.jaxpr)
        except Exception as error:
            raise NotAskedError from error
        if [*tracers_in(traced.jaxpr)] or len(traced.jaxpr.in_avals) > len(jax.tree.leaves(inputs)):
            raise NotAskedError  # of a trace that has ended: JAX compiles it if they happen not to be used
        if case.way == "from the host" and re.search(r"ordered=True|\bOrderedDebug", text):
            raise NotAskedError  # JAX alone compiles no effects in order beside an array in host memory
        if case.way != "groups":
            trace_with_rows(case, inputs)
        if case.way.startswith("precompute"):  # many programs have nothing to compute once: they are not compiled
            answered(jax.eval_shape, mine, *inputs)
        begin = time.process_time()
        try:
            compiled = traced.lower().compile()
            expected = run(compiled, *inputs)
        except Exception as error:
            raise NotAskedError from error
        if time.process_time() - begin > LONG:
            raise NotAskedError
        begin_ours()
        types = [(2**-5, "reduce_precision"), (2**-8, "bf16"), (2**-11, "f16"), (2**-24, "f32")]
        eps = 2 * next(size for size, name in types if re.search(rf"\b{name}\b", text))
        near = [run(compiled, inputs[0], *shaken(inputs[1:], eps, seed)) for seed in range(3)]
        moved = functools.partial(fz.offload, frozen=case.frozen(*inputs[0]), min_bytes=0)
        place = moved if case.way == "from the host" else lambda params: params
        try:
            got = answered(run, mine, inputs[0], place(inputs[1]), inputs[2])
        except Exception as error:
            if case.how == "eager" and raises(of(oracle), *inputs):  # the operations of JAX, one by one
                raise NotAskedError from error
            raise
        if (
            case.mesh
            and case.how != "eager"
            and (both := [specs(x) for x in (mine.trace(*inputs), traced)])[0] != both[1]
        ):
            raise WrongError("shardings", f"{both[0]}, and not {both[1]}")
        if len(got) != len(expected):
            raise WrongError("structure", f"{len(got)} results, and not {len(expected)}")
        found = difference(got, expected, near, eps)
        if found and case.how == "quick":
            # Without LLVM's optimizations, a CPU's fusions round the value of one operation in several ways: the
            # derivative of a maximum is lost in a program that computes it once.
            judge(case._replace(how="as users"))
            return
        if found and case.odd is not None and "cumprod" in str(jax.make_jaxpr(mine)(*inputs)) and "cumprod" not in text:
            raise NotAskedError  # JAX multiplies in another order where it differentiates
        if found:
            confirm(of, compiled, mine, place, case, eps, found)
        if case.how != "eager":
            numbers, params, batch = case.inputs(9)
            run(mine, numbers, place(params), batch)
            if mine._cache_size() != 1:
                raise WrongError("compilations", f"{mine._cache_size()} for two inputs")
        if case.how == "as users" and case.way == "grad" and not case.mesh:
            compare_costs(case, text, mine, jax.jit(jax.grad(case.loss)), inputs)


INDEXING, INDEXING_OF_A_ROW = 1000, 32
"""The FLOPs of row numbers, which do not grow with the size of a row: the leaves of small programs have 24 elements."""


def compare_costs(case: Case, text: str, mine: Any, whole: Any, inputs: Any) -> None:
    """Raises `WrongError` if rows cost more than the whole gradient does; of loops the compiler counts one step."""
    spec = case.frozen(*inputs[0])
    if re.search(r"\b(scan|while|cond|callback|custom_call)\b", text) or "elements" in repr(spec):
        return
    lowered = [f.lower(*x) for f, x in ((mine, inputs), (whole, inputs[1:]))]
    programs = [[each.compile() for each in lowered]]
    if re.search(r"\b(checkpoint|remat)", text):
        # A CPU merges what `jax.checkpoint` computes again with the first computation, but not rows of it; before
        # that, calls are not counted.
        programs.append(lowered)
    # Of cheap operations of the size of the leaves; a CPU converts those of bfloat16.
    copies = 6 * sum(x.size for x in jax.tree.leaves(inputs[1]))
    axis = max((int(n) for shape in re.findall(r"\[([\d,]+)\]", text) for n in shape.split(",")), default=0)
    rows = axis * sum(
        not isinstance(mask, bool) for mask in spec.values()
    )  # of a value, which may have more than a leaf
    flops = min(
        ([each.cost_analysis().get("flops", 0) for each in pair] for pair in programs), key=lambda x: x[0] - x[1]
    )
    if flops[0] > 1.02 * flops[1] + copies + INDEXING + INDEXING_OF_A_ROW * rows:
        raise WrongError("cost", f"{flops[0]:.0f} FLOPs, and {flops[1]:.0f} of the whole gradient")


def confirm(of: Any, compiled: Any, mine: Any, place: Any, case: Case, eps: float, found: str) -> None:
    """Raises `WrongError` if results differ for most of some inputs, by more than JAX's own do in other programs."""
    again = []
    for seed in range(5):
        numbers, params, batch = case.inputs(seed)
        try:
            near = [run(compiled, numbers, *shaken((params, batch), eps * 2, seed)) for seed in range(8)]
            near.append(run(of(WAYS[case.way][1], case._replace(how="eager")), numbers, params, batch))
        except Exception as error:
            raise NotAskedError from error
        with contextlib.suppress(Exception), jax.disable_jit():  # where XLA does not make `abs(x)` of `sqrt(x * x)`
            near.append(run(of(WAYS[case.way][1], case._replace(how="eager")), numbers, params, batch))
        expected = run(compiled, numbers, params, batch)
        again.append(difference(run(mine, numbers, place(params), batch), expected, near, eps))
    wrong = [each for each in again if each]
    if len(wrong) >= 2:
        raise WrongError("gradient" if "wrong by" in found else "values", f"{wrong[0]} ({len(wrong)} of 5 inputs)")
