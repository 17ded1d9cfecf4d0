"""Random programs by all ways to compute a gradient, and those that failed once."""

import contextlib
import hashlib
import itertools
import os
import pathlib
import random

import jax
import pytest
from cases import CASES
from conftest import programs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption
from oracle import NotAskedError, judge, made
from programs import (
    BATCH,
    BINARY,
    COMPOSED,
    MESHES,
    NAMESPACE,
    OF_COMPLEX,
    OF_INTEGERS,
    ROWS,
    UNARY,
    Drawn,
    alternatives,
)
from search import OF_JAX, SEARCH, Attack, Choices, FailureError

from optax_freeze._program.operations import RULES

QUICK = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
ELEMENTWISE = [(UNARY, 1.0), (BINARY, 1.0), (OF_INTEGERS, 1), (OF_COMPLEX, 1j)]
LEAVES = {"a": ((6, 4), "float32"), "b": ((3, 4, 4), "float32"), "c": ((6,), "float32")}
NO_PROGRAM_HAS = """
all_gather_invariant copy_p expand_dims geqrf log2 mesh_cast one_minus_square pcast polynomial reduce_window_prod
reshard scatter_add scatter_max scatter_min scatter_mul scatter_sub unknown_cotangent unreduced_reduce_scatter
without_derivative
"""


@st.composite
def drawn(draw):
    return Drawn(lambda n: draw(st.integers(0, n - 1)))


def check(case):
    """Fails unless the library agrees with the oracle, by the Python of the case."""
    name = f"loss_{hashlib.sha256((case.loss + case.case).encode()).hexdigest()[:6]}"
    text = "\n".join([case.loss, "", "", f'CASES["{name[5:]}"] = {case.case}', ""]).replace(
        "loss(p, x)", f"{name}(p, x)"
    )
    text = text.replace("Case(\n    loss,", f"Case(\n    {name},")

    def note(text):
        """Writes what runs now, for `make fuzz` to report it if XLA ends the process."""
        if path := os.environ.get("FUZZ_CURRENT"):
            pathlib.Path(path).write_text(text)

    def of_case():
        note(f"{OF_JAX}\n{text}")
        try:
            judge(made(case.loss, case.case), lambda: note(text))
        except NotAskedError as error:
            raise UnsatisfiedAssumption from error
        finally:
            note("")

    SEARCH.judge(text, of_case, case.rows)


def attack(options, seeds=random):
    """Searches for one failure by independent choices: hypothesis repeats itself, and makes smaller what was found."""
    for _ in range(options.max_examples):
        numbers, choices = random.Random(seeds.randrange(2**64)), []

        def choose(n):
            choices.append(numbers.randrange(n))  # noqa: B023
            return choices[-1]  # noqa: B023

        try:
            check(Drawn(choose))
        except UnsatisfiedAssumption:
            continue
        except FailureError:
            phases = [Phase.reuse, Phase.shrink]
            smaller = settings(options, derandomize=False, database=Choices(choices), phases=phases)
            smaller(given(drawn())(check))()
            raise


ATTACK = Attack("programs", attack, share=2, examples=60)


def test_random_programs():
    attack(QUICK, random.Random(0))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.mesh in (None, *MESHES)])
def test_what_failed_once(name):
    judge(CASES[name])


def primitives(function, *args):
    return {eqn.primitive.name for jaxpr in programs(jax.make_jaxpr(function)(*args).jaxpr) for eqn in jaxpr.eqns}


def test_every_rule_is_drawn():
    """By the alternatives of the elementwise rows, or by one of some programs of each other row."""
    missing = set(RULES) - set(NO_PROGRAM_HAS.split())
    for text, x in ELEMENTWISE:
        for alternative in alternatives(text):
            expression = alternative.format(a="a", b="a")
            function = lambda a, e=expression: eval(e, {**NAMESPACE, "a": a})  # noqa: E731
            missing -= primitives(function, x)
            with contextlib.suppress(TypeError, NotImplementedError):
                missing -= primitives(jax.grad(function), x)
    rows = sorted(ROWS.keys() - COMPOSED)
    for name, tries in [*((name, 10) for name in rows), *((name, 60) for name in reversed(rows))]:
        last = 0
        for seed in itertools.takewhile(lambda seed: missing and seed < last + tries, itertools.count()):  # noqa: B023
            case = Drawn(random.Random(seed).randrange, [name], LEAVES)
            given = {n: jax.ShapeDtypeStruct(*leaf) for n, leaf in case.leaves.items()}
            loss, before = made(case.loss, case.case).loss, len(missing)
            for function in (loss, jax.grad(loss)):
                with contextlib.suppress(Exception):  # JAX cannot differentiate all that it computes
                    missing -= primitives(function, given, BATCH)
            last = last if len(missing) == before else seed
    assert not missing
