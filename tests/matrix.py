"""The optimizer matrix: every optimizer, with every form of spec, in two dtypes, with every way to run a step.

A cell trains a few steps twice: with :func:`optax_freeze.freeze` or :func:`optax_freeze.freeze_when` and NaN in place
of every frozen gradient, and with the plain optimizer on the trainable part of :func:`optax_freeze.partition`. Frozen
parameters must keep their bits. Updates, trainable parameters and optimizer state must equal those of the second run:
bit for bit if both run op by op, within rounding if one of them is compiled.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers

import optax_freeze as fz

SPECS = ("whole leaves", "rows", "dense elements", "compact elements", "freeze_when")
DTYPES = ("float32", "bfloat16")
MODES = ("eager", "jit", "scan", "vmap", "MultiSteps", "apply_if_finite", "inject_hyperparams")
OPTIMIZERS = optimizers.found()

_SHAPES = {"bias": (6,), "frozen": (4, 6), "kernel": (4, 6)}
_ROUNDING = {"float32": 3e-5, "bfloat16": 0.03}
"""Allowed error of compiled runs, relative to the largest number of an array: 256 eps (differences cancel), and 4."""


class Cell(NamedTuple):
    """A combination of optimizer, spec, dtype and mode."""

    optimizer: str
    spec: str
    dtype: str
    mode: str

    def __str__(self) -> str:
        return ", ".join(self)

    @property
    def how(self) -> str:
        """How the step is called; the last three modes wrap the optimizer."""
        return self.mode if self.mode in MODES[:4] else "eager"

    @property
    def compiled(self) -> bool:
        """Whether compilation may change rounding: if traced, the update of a group is a compiled loop or branch."""
        return self.mode in ("jit", "scan") or (self.spec == "freeze_when" and self.mode in ("vmap", "apply_if_finite"))


def every_cell() -> Iterator[Cell]:
    """The whole matrix."""
    return itertools.starmap(Cell, itertools.product(OPTIMIZERS, SPECS, DTYPES, MODES))


def pairwise_cells() -> Iterator[Cell]:
    """A subset: each optimizer runs eagerly, by jit or scan, in another mode, in both dtypes and two forms of spec.

    All pairs of form, dtype and mode occur in some cell.
    """
    for i, optimizer in enumerate(OPTIMIZERS):
        spec, dtype = SPECS[i % len(SPECS)], DTYPES[i // len(SPECS) % 2]
        for mode in (MODES[0], MODES[1 + i % 2]):  # these share the second run
            yield Cell(optimizer, spec, dtype, mode)
        other_spec, other_dtype = SPECS[(i + 1) % len(SPECS)], DTYPES[(i // len(SPECS) + 1) % 2]
        yield Cell(optimizer, other_spec, other_dtype, MODES[3:][i % len(MODES[3:])])


def run(cell: Cell) -> str:
    """Runs one cell.

    Returns:
      Nothing if the cell holds; else the error that the optimizer raises by itself, where nothing is frozen.

    Raises:
      AssertionError: if a frozen bit moved, or trainable parameters differ from those trained alone.
    """
    expected = None
    try:
        expected = _alone(cell)
        got = _frozen(cell)
    except Exception as error:
        by_itself = _error_without_freezing(cell)
        if by_itself is None or (expected and type(by_itself) is not type(error)):
            raise
        return f"{type(by_itself).__name__}: {str(by_itself).splitlines()[0]}"
    for name, frozen in _frozen_elements(cell).items():
        old, new = (np.asarray(params[name]) for params in (_problem(cell)[0], got.params))
        assert old[frozen].tobytes() == new[frozen].tobytes(), f"{cell}: frozen elements of {name} moved"
        trained = new[~frozen].astype(float)
        assert np.isfinite(trained).all(), f"{cell}: {name} does not train"
        assert frozen.all() or (trained != old[~frozen]).any(), f"{cell}: {name} does not train"
    if not cell.compiled:
        _compare(str(cell), got, expected)
        return ""
    try:
        _compare(str(cell), got, expected, _ROUNDING[cell.dtype])
    except AssertionError:  # a line search may take another step; a difference of parameters is rounded like them
        _compare(str(cell), got, expected, _ROUNDING[cell.dtype], _alone(cell, jit=True))
    return ""


def sees_zeros(optimizer: str) -> bool:
    """Whether the zeros of a dense mask change the updates of trainable elements, as they change a mean."""
    dense, alone = (_alone(Cell(optimizer, spec, "float32", "eager")).params for spec in SPECS[2:4])
    return not all(np.allclose(dense[name], alone[name], rtol=1e-5, atol=1e-6) for name in dense)


def goes_by_shape(optimizer: str) -> bool:
    """Whether a matrix is updated in another way than a vector of its elements."""
    results, found = [], OPTIMIZERS[optimizer]
    for shape in (_SHAPES["kernel"], (-1,)):
        params, curvature, target = (
            jnp.asarray(_uniform(seed, "float32")["kernel"]).reshape(shape) for seed in (0, 2, 3)
        )
        loss = lambda params, c=curvature, target=target: jnp.sum(c * (params - target) ** 2)  # noqa: E731
        tx = found.make()
        state = tx.init(params)
        for _ in range(2):
            grads = jax.grad(loss)(params)
            extra_args = found.extra(loss(params), grads, loss)
            examples = jnp.stack([grads, 0.5 * grads]) if found.per_example else grads
            updates, state = tx.update(examples, state, params, **extra_args)
            params = optax.apply_updates(params, updates)
        results.append(np.ravel(params))
    return not np.allclose(*results, rtol=1e-5, atol=1e-6)


MARKS = {"zeros": ("dense elements", sees_zeros), "shape": ("compact elements", goes_by_shape)}
"""Marks beside the ticks: at which form of spec they are, and whether an optimizer has them."""


class Run(NamedTuple):
    """The result of training: the last parameters, all updates, the optimizer state."""

    params: Any
    updates: Any
    state: Any


def _compare(at: str, got: Any, expected: Any, rounding: float = 0.0, compiled: Any = None) -> None:
    """Compares trees bit for bit, or inexact arrays within ``rounding``, relative to the largest number of an array.

    ``at`` is a name of the comparison; ``compiled`` is the second run compiled, if its results are allowed, too.
    """
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    got, expected, compiled = (list(map(_as_numpy, jax.tree.leaves(tree))) for tree in (got, expected, compiled))
    shapes, expected_shapes = ([(array.shape, array.dtype) for array in arrays] for arrays in (got, expected))
    assert shapes == expected_shapes, f"{at}: {shapes}, and expected {expected_shapes}"
    for path, a, b, c in itertools.zip_longest(paths, got, expected, compiled):
        if a.tobytes() != b.tobytes():
            within = rounding if jnp.issubdtype(b.dtype, jnp.inexact) else 0.0
            assert within or c is not None, f"{at}: {path}: {a}, and expected bit for bit {b}"
            a, b = a.astype(float), b.astype(float)
            atol = within * np.max(np.abs(b), initial=0, where=np.isfinite(b))
            if c is not None:
                atol += 2 * np.max(np.abs(c.astype(float) - b), initial=0)
            np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=f"{at}: {path}")


def _as_numpy(leaf: Any) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


# The problem: three leaves, a quadratic loss, a spec.


@functools.cache
def _uniform(seed: int, dtype: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.uniform(0.5, 1.5, shape).astype(jnp.dtype(dtype)) for name, shape in _SHAPES.items()}


@functools.cache
def _problem(cell: Cell) -> tuple[dict[str, jax.Array], jax.Array]:
    """The parameters, some of them -0.0, and a mask of the kernel; for ``vmap``, of an ensemble of two."""
    params = {name: jnp.asarray(leaf).at[::3].set(-0.0) for name, leaf in _uniform(0, cell.dtype).items()}
    mask = jnp.asarray(np.random.default_rng(1).uniform(size=_SHAPES["kernel"]) < 0.5)
    if cell.mode != "vmap":
        return params, mask
    return jax.tree.map(lambda leaf: jnp.stack([leaf, 0.7 * leaf]), params), jnp.stack([mask, ~mask])


def _terms(params: Any) -> Iterator[tuple[str, Any, Any]]:
    curvature, target = (_uniform(seed, params["bias"].dtype) for seed in (2, 3))
    return ((name, curvature[name], leaf - target[name]) for name, leaf in params.items())


def _loss(params: Any) -> jax.Array:
    return sum((jnp.sum(c * x**2) for _, c, x in _terms(params)), start=jnp.zeros((), params["bias"].dtype))


def _gradient(params: Any, optimizer: Any) -> Any:
    grads = {name: 2 * c * x for name, c, x in _terms(params)}
    return jax.tree.map(lambda g: jnp.stack([g, 0.5 * g]), grads) if optimizer.per_example else grads


def _take(grads: Any, frozen: Any, optimizer: Any) -> Any:
    """The trainable part of gradients, or of per-example gradients."""
    take = lambda grads: fz.partition(grads, frozen)[0]  # noqa: E731
    return jax.vmap(take)(grads) if optimizer.per_example else take(grads)


def _spec(cell: Cell, mask: Any) -> Any:
    if cell.spec == "rows":
        return {"bias": fz.rows(slice(2)), "frozen": True, "kernel": fz.rows([0, 2])}
    if cell.spec == "dense elements":
        return {"bias": False, "frozen": True, "kernel": fz.elements(mask)}
    if cell.spec == "compact elements":
        mask = _problem(cell._replace(mode="eager"))[1]  # an ensemble shares it: its count is static
        return {"bias": False, "frozen": True, "kernel": fz.elements(mask, compact=True)}
    return "frozen"


def _frozen_elements(cell: Cell) -> dict[str, np.ndarray]:
    """The frozen elements as a boolean array for each leaf, computed without the library."""
    params, mask = _problem(cell)
    frozen = {name: np.full(leaf.shape, name == "frozen") for name, leaf in params.items()}
    if cell.spec == "rows":
        frozen["kernel"][..., [0, 2], :] = True
        frozen["bias"][..., :2] = True
    elif cell.spec == "dense elements":
        frozen["kernel"][:] = mask
    elif cell.spec == "compact elements":
        frozen["kernel"][:] = mask[0] if cell.mode == "vmap" else mask
    return frozen


# The two runs.


def _optimizer(cell: Cell) -> Any:
    optimizer = OPTIMIZERS[cell.optimizer]
    if cell.mode == "inject_hyperparams":
        return optimizer.inject()
    if cell.mode == "apply_if_finite":
        return optax.with_extra_args_support(optax.apply_if_finite(optimizer.make(), 3))
    return optax.MultiSteps(optimizer.make(), 2) if cell.mode == "MultiSteps" else optimizer.make()


def _frozen(cell: Cell) -> Run:
    """The first run: the optimizer in ``freeze`` or ``freeze_when``, with NaN in frozen gradients."""
    optimizer, inner = OPTIMIZERS[cell.optimizer], _optimizer(cell)
    # In full per-example gradients, rows cannot be distinguished from examples: pass only the trainable part.
    narrow = optimizer.per_example and cell.spec in ("rows", "compact elements")

    def transformation(mask: Any) -> optax.GradientTransformationExtraArgs:
        if cell.spec == "freeze_when":
            return fz.freeze_when(inner, {"frozen": True, "kernel": fz.unfreeze_at(1)})
        return fz.freeze(inner, _spec(cell, mask))

    def init(params: Any, mask: Any) -> Any:
        return transformation(mask).init(params)

    def step(params: Any, state: Any, mask: Any, frozen: Any, *_: Any) -> Any:
        grads = _gradient(params, optimizer)
        if narrow:
            grads = _take(grads, fz.spec_of(state), optimizer)
        else:
            grads = {name: jnp.where(frozen[name], jnp.nan, g) for name, g in grads.items()}
        extra_args = optimizer.extra(_loss(params), grads, _loss)
        updates, state = transformation(mask).update(grads, state, params, **extra_args)
        new = optax.apply_updates(params, updates)
        # A group that is frozen at some steps always has updates of the dtype that the optimizer returns.
        updates["frozen"] = updates["frozen"].astype(params["frozen"].dtype)
        return new, state, updates

    params, updates, state = _train(cell, init, step)
    if cell.spec != "freeze_when":
        return Run(params, updates, [state.inner_state])
    before = (jax.vmap(init) if cell.mode == "vmap" else init)(*_problem(cell))
    _compare(f"{cell}: the state of a frozen group", state.groups["frozen"], before.groups["frozen"])
    return Run(params, updates, [state.ungrouped_state, state.groups["kernel"].inner_state])


def _alone(cell: Cell, jit: bool = False) -> Run:
    """The second run: on the trainable part; for ``freeze_when`` on each group alone, the second from step 1."""
    return _alone_by(cell._replace(mode="eager") if cell.mode in ("jit", "scan") else cell, jit)


@functools.lru_cache(maxsize=1)
def _alone_by(cell: Cell, jit: bool) -> Run:
    optimizer, inner = OPTIMIZERS[cell.optimizer], _optimizer(cell)

    def parts(mask: Any) -> list[Any]:
        return [["frozen", "kernel"], ["frozen", "bias"]] if cell.spec == "freeze_when" else [_spec(cell, mask)]

    def init(params: Any, mask: Any) -> Any:
        return [inner.init(fz.partition(params, frozen)[0]) for frozen in parts(mask)]

    def step(params: Any, states: Any, mask: Any, _: Any, is_first: bool) -> Any:
        grads = _gradient(params, optimizer)
        new, all_updates = params, jax.tree.map(lambda leaf: jnp.full_like(leaf, -0.0), params)
        states = list(states)
        for i, frozen in enumerate(parts(mask)):
            if i and is_first:
                continue
            trainable, rest = fz.partition(params, frozen)
            grad = _take(grads, frozen, optimizer)
            extra_args = optimizer.extra(_loss(params), grad, fz.restrict(_loss, rest))
            updates, states[i] = inner.update(grad, states[i], trainable, **extra_args)
            for name, update in updates.items():
                for array in jax.tree.leaves(update):
                    all_updates[name] = jnp.full_like(params[name], -0.0, array.dtype)
            all_updates = fz.combine(updates, fz.partition(all_updates, frozen)[1])
            new = fz.combine(optax.apply_updates(trainable, updates), fz.partition(new, frozen)[1])
        return new, states, all_updates

    return _train(cell, init, step, jit)


def _error_without_freezing(cell: Cell) -> Exception | None:
    optimizer, inner = OPTIMIZERS[cell.optimizer], _optimizer(cell)

    def step(params: Any, state: Any, *_: Any) -> Any:
        grads = _gradient(params, optimizer)
        updates, state = inner.update(grads, state, params, **optimizer.extra(_loss(params), grads, _loss))
        return optax.apply_updates(params, updates), state, updates

    try:
        _train(cell, lambda params, mask: inner.init(params), step)
    except Exception as error:
        return error
    return None


def _train(cell: Cell, init: Callable[..., Any], step: Callable[..., Any], jit: bool = False) -> Run:
    params, mask = _problem(cell)
    frozen, steps = _frozen_elements(cell), 5 if cell.mode == "MultiSteps" else 3
    if cell.how == "vmap":
        init, step = jax.vmap(init), jax.vmap(step, in_axes=(0, 0, 0, 0, None))
    state = init(params, mask)
    if cell.how == "scan":

        def body(carry: Any, _: Any) -> Any:
            params, state, updates = step(*carry, mask, frozen, False)
            return (params, state), updates

        (params, state), updates = jax.lax.scan(body, (params, state), length=steps)
        return Run(params, updates, state)
    if cell.how == "jit" or jit:
        step = jax.jit(step, static_argnums=4)
    history = []
    for i in range(steps):
        params, state, updates = step(params, state, mask, frozen, cell.spec == "freeze_when" and i == 0)
        history.append(updates)
    return Run(params, jax.tree.map(lambda *steps: jnp.stack(steps), *history), state)
