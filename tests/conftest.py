"""Shared fixtures: a small model, awkward leaves, and a parameter that runs a test eagerly and jitted."""

import atexit
import collections
import ctypes
import functools
import os
import pathlib
import tempfile

FLAGS = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in FLAGS:
    # Eight devices share a few cores with other tests: by default, a collective that takes 40 seconds ends the process.
    devices = "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=300"
    os.environ["XLA_FLAGS"] = f"{FLAGS} {devices}".strip()
# The threads of XLA, by default as many as devices or cores. They run the programs, where they wait for one another in
# collectives, and start further ones, where they wait as soon as a device has 32 of them: with eight, all may wait.
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("KERAS_BACKEND", "jax")

# Compiled programs are on disk, for all processes of a run: the cache in memory is cleared after each file.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    programs = tempfile.TemporaryDirectory(prefix="optax_freeze-programs-", ignore_cleanup_errors=True)
    atexit.register(programs.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
import jax._src.compiler
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

import optax_freeze as fz
from optax_freeze._jax_internals import Branches, Call, Loop, While, inside, programs_in
from optax_freeze._program.flops import flops

SLOW = 3.0
"""The seconds from which a test is on the page that ``--durations-page`` writes."""
OPTIMIZED = (
    "tests/gradient/",
    "tests/fuzz/",
    "tests/precompute/",
    "tests/test_benchmarks.py",
    "tests/test_properties.py",
)
LIBC = ctypes.CDLL(None)
get_compile_options, cache_key = jax._src.compiler.get_compile_options, jax._src.compiler._get_cache_key


def cache_key_of_one_device(options, backend, computation, devices, **kwargs):
    """None for several devices: a program read from disk has lost the order of its collectives, and may never end."""
    return cache_key(options, backend, computation, devices, **kwargs) if devices.size == 1 else None


jax._src.compiler._get_cache_key = cache_key_of_one_device


def compiled_fast(*args, env_options_overrides=None, backend=None, **kwargs):
    """The options of JAX; for the CPU without its fusion emitters, which take most of the time to compile, and YNNPACK.

    YNNPACK, by default since JAX 0.10, now and then ends a process with a segmentation fault, in JAX 0.10.2 and 0.11.0
    (https://github.com/jax-ml/jax/issues/39257). JAX 0.12 has no other way than its fusion emitters.
    """
    if backend is not None and backend.platform == "cpu":
        emitters = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 12) else {}
        ynnpack = {"xla_cpu_experimental_ynn_fusion_type": ""} if jax.__version_info__ >= (0, 10) else {}
        env_options_overrides = {**emitters, **ynnpack, **(env_options_overrides or {})}
    return get_compile_options(*args, env_options_overrides=env_options_overrides, backend=backend, **kwargs)


def compile_as(users=False, optimized=True):
    """Compiles as users do, or fast: with LLVM's optimizations, or without these, too."""
    jax.config.update("jax_disable_most_optimizations", not optimized)
    jax._src.compiler.get_compile_options = get_compile_options if users else compiled_fast


def skip_float16(error):
    """XLA cannot compile float16, nor the float8 that it converts to float16, for a CPU without F16C instructions."""
    is_float16 = "Failed to materialize symbols" in str(error)
    return pytest.skip.Exception("XLA cannot compile float16 for this CPU") if is_float16 else None


if "xla_cpu_max_isa=SSE4_2" in FLAGS:
    jax._src.compiler.register_xla_runtime_error_handler(skip_float16)


def pytest_addoption(parser):
    parser.addoption("--durations-page", metavar="FILE", help=f"write the tests that take {SLOW:g} seconds or more")


def pytest_terminal_summary(terminalreporter):
    """Writes how long the slowest tests took, with their fixtures."""
    page = terminalreporter.config.getoption("--durations-page")
    if page is None:
        return
    reports = [each for several in terminalreporter.stats.values() for each in several if hasattr(each, "duration")]
    seconds = collections.Counter()
    for report in reports:
        seconds[report.nodeid] += report.duration
    slow = [(name, took) for name, took in seconds.most_common() if took >= SLOW]
    share = f"{sum(took for _, took in slow):.0f} of {seconds.total():.0f} seconds of work"
    head = f"Written by the last `make test`: the {len(slow)} tests that took {SLOW:g} seconds or more, {share}."
    table = ["| seconds | test |", "|---:|---|", *(f"| {took:.0f} | `{name}` |" for name, took in slow)]
    text = "\n".join(["# How long tests take", "", head, "", *table, ""])
    pathlib.Path(page).write_text(text, encoding="utf-8")


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_module(request):
    """Limits the programs that a process maps to memory, and optimizes where programs are compared in bits or costs."""
    compile_as(optimized=request.node.nodeid.startswith(OPTIMIZED))
    yield
    jax.clear_caches()
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)  # the memory of freed programs: one process would keep 3 GB of it


@pytest.fixture
def as_users_compile(request):
    """Compiles the programs of a test as users do: it measures them, runs long, or depends on single roundings."""
    jax.clear_caches()  # what other tests compiled stays with them
    compile_as(users=True)
    yield
    jax.clear_caches()
    compile_as(optimized=request.node.nodeid.startswith(OPTIMIZED))


def bits(tree):
    """Path, dtype, shape and bytes of every array, to check that nothing changed."""
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if hasattr(leaf, "dtype"):
            leaf = np.asarray(leaf)
        array = (str(leaf.dtype), leaf.shape, leaf.tobytes()) if isinstance(leaf, np.ndarray) else (leaf,)
        rows.append((jax.tree_util.keystr(path), *array))
    return rows


def by_path(tree):
    """The leaves by their path, so that trees with the same paths in other containers compare equal."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(key, simple=True, separator="/"): leaf for key, leaf in leaves}


def assert_equal_up_to_rounding(got, expected, dtype=None, roundings=16):
    """Compares the results of two programs, which a compiler may round differently, and differently on each CPU.

    Floats may differ by ``roundings`` times the precision of their dtype, or of the coarser ``dtype`` that the programs
    compute in, relative to the largest element of their array. Everything else has the same bits.
    """
    leaves = zip(*map(jax.tree.leaves, (got, expected)), *map(bits, (got, expected)), strict=True)
    for a, b, row, expected_row in leaves:
        if hasattr(b, "dtype") and jnp.issubdtype(b.dtype, jnp.inexact):
            assert row[:3] == expected_row[:3]  # the path, the dtype and the shape
            eps = float(jnp.finfo(dtype or b.dtype).eps)
            a, b = (np.asarray(x).astype(complex if jnp.iscomplexobj(x) else float) for x in (a, b))
            largest = np.abs(b[np.isfinite(b)]).max(initial=0)
            np.testing.assert_allclose(a, b, rtol=0, atol=roundings * eps * largest, err_msg=row[0])
        else:
            assert row == expected_row


def programs(jaxpr):
    """A program and all programs within it."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in programs_in(eqn):
            yield from programs(inner.jaxpr)


def counting_flops(program):
    """A program as a function of its inputs that counts the FLOPs of the branches taken and of all iterations."""

    def call(program, operands, so_far=0):
        jaxpr, total = program.jaxpr, jnp.int32(so_far)
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *operands], strict=True))
        read = lambda atom: atom.val if isinstance(atom, Literal) else env[atom]  # noqa: E731
        for eqn in jaxpr.eqns:
            operands, found = [read(atom) for atom in eqn.invars], inside(eqn)
            if isinstance(found, Branches):
                branches = [functools.partial(call, branch) for branch in found.programs]
                outs, total = jax.lax.switch(operands[0], branches, operands[1:], total)
            elif isinstance(found, While):
                test, n, step, m = found
                ofcond, ofbody, outs = operands[:n], operands[n : n + m], operands[n + m :]
                outs, total = jax.lax.while_loop(
                    lambda state, test=test, consts=ofcond: call(test, [*consts, *state[0]])[0][0],
                    lambda state, step=step, consts=ofbody: call(step, [*consts, *state[0]], state[1]),
                    (outs, total),
                )
            elif isinstance(found, Loop):
                n, m = found.consts, found.carried

                def step(state, rows, body=found.body, consts=operands[:n], m=m):
                    outs, total = call(body, [*consts, *state[0], *rows], state[1])
                    return (outs[:m], total), outs[m:]

                start = operands[n : n + m], total
                (outs, total), rows = jax.lax.scan(step, start, operands[n + m :], reverse=found.reverse)
                outs = [*outs, *rows]
            elif isinstance(found, Call) and eqn.primitive.name in ("jit", "pjit"):
                outs, total = call(found.program, operands, total)
            else:
                total += flops([eqn])
                out = eqn.primitive.bind(*operands, **eqn.params)
                outs = out if eqn.primitive.multiple_results else [out]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars], total

    return jax.jit(lambda *args: call(program, jax.tree.leaves(args))[1])


def state_bytes(state):
    """Bytes of the arrays in an optimizer state, without scalars."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim)


@pytest.fixture(params=["eager", "jitted"])
def compiled(request):
    """``compiled(fn)`` is ``fn``, eagerly or under ``jax.jit``."""
    return jax.jit if request.param == "jitted" else lambda fn: fn


@pytest.fixture
def params():
    """A small model: an encoder of two layers and a head."""
    key = iter(jax.random.split(jax.random.key(0), 5))
    layer = lambda *shape: {"kernel": jax.random.normal(next(key), shape), "bias": jnp.zeros(shape[1])}  # noqa: E731
    return {"encoder": {"layer_0": layer(3, 4), "layer_1": layer(4, 4)}, "head": layer(4, 2)}


@pytest.fixture
def loss():
    """A loss of ``params`` and a batch that depends on every leaf."""

    def loss_fn(params, x):
        for layer in (params["encoder"]["layer_0"], params["encoder"]["layer_1"]):
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean((x @ params["head"]["kernel"] + params["head"]["bias"] - 1.0) ** 2)

    return loss_fn


@pytest.fixture
def batch():
    return jax.random.normal(jax.random.key(7), (5, 3))


@pytest.fixture
def awkward():
    """Leaves that often cause bugs, under ``"frozen"``, and one trainable leaf."""
    shared = jnp.arange(3.0)
    return {
        "frozen": {
            "negative_zero": jnp.array([-0.0, 0.0]),
            "nan": jnp.array([jnp.nan, jnp.inf, -jnp.inf]),
            "integer": jnp.array([2**30 + 1, -3], jnp.int32),
            "boolean": jnp.array([True, False]),
            "bfloat16": jnp.array([-0.0, 1.1], jnp.bfloat16),
            "float16": jnp.array([-0.0, 65504.0], jnp.float16),
            "float8": jnp.array([-0.0, 1.5], jnp.float8_e4m3fn),
            "float8_without_negative_zero": jnp.array([0.0, 1.5], jnp.float8_e4m3fnuz),
            "complex": jnp.array([complex(-0.0, -0.0), complex(-0.0, 1.0)], jnp.complex64),
            "key": jax.random.key(3),
            "scalar": jnp.float32(-0.0),
            "empty": jnp.zeros((0, 3)),
            "tied": shared,
            "tied_too": shared,
            "none": None,
            "numpy": np.array([-0.0, 2.0], np.float32),
        },
        "trains": jnp.ones(2),
    }


@pytest.fixture
def odd_bits():
    """Bit patterns that adding zero does not preserve: denormals and NaN payloads."""
    odd = {"nan_payload": [0x7FC12345, 0xFFC00001], "denormal": [1, 0x80000001]}
    floats = {name: jnp.array(np.array(bits, np.uint32).view(np.float32)) for name, bits in odd.items()}
    return {"frozen": floats, "trains": jnp.ones(2)}


@pytest.fixture
def frozen():
    """The spec that goes with ``params``."""
    return fz.path("encoder")
