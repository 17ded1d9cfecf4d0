"""A digest of the program that computes features, the same in every process."""

import fractions
import functools
import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from optax_freeze._errors import is_int
from optax_freeze._precompute.cut import Cut
from optax_freeze._precompute.graph import Graph, Node
from optax_freeze._program.regions import EVERYTHING, Rows
from optax_freeze._program.tasks import Read
from optax_freeze._program.trace import opened


def digest(text: str) -> str:
    """Hashes the text of a program."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def text_of(graph: Graph, inputs: Sequence[str], cut: Cut) -> str:
    """The operations before a cut as text, the same in every process. ``inputs`` are the names of the inputs."""
    program, lines, count = graph.program, [], itertools.count()
    of_values = dict(enumerate(inputs))
    of_values |= {value: f"constant {_of_constant(const)}" for value, const in program.consts.items()}
    names = {n: of_values[value] for n, (value, _) in enumerate(graph.regions) if value in of_values}

    def name_of(number: int) -> str:
        return names.get(number) or names.setdefault(number, f"%{next(count)}")

    def text(number: int) -> str:
        value, region = graph.regions[number]
        rows = region.runs if isinstance(region, Rows) else "" if region is EVERYTHING else region
        return f"{name_of(number)}:{_type(program.avals[value])}{rows}"

    def operand(number: int | None, read: Read | None) -> str:
        return text(number) if number is not None else "" if read is None else _of_literal(read.value)

    for node in cut.before:
        if node.eqn.primitive.name in _OF_TYPES or _changes_weak_type_alone(node):
            [number] = node.reads
            names |= dict.fromkeys(node.outputs, name_of(number))
            continue
        ins = " ".join(map(operand, node.operands, node.task.reads))
        outs = " ".join(map(text, node.outputs))
        lines.append(f"{node.eqn.primitive.name} {_text(node.eqn.params)} {ins} -> {outs}")
    return "\n".join([*lines, " ".join(map(text, cut.stored))])


def without_count(text: str, other: str, count: int, of_other: int) -> str:
    """Replaces the sizes in ``text`` that depend on the number of examples, so that any number gives the same text.

    ``text`` is the program for ``count`` examples, and ``other`` the program for ``of_other`` examples. Only sizes are
    written with digits: if a value depends on the number of examples, so do the features.
    """
    numbers, others = (re.findall(r"\d+", each) for each in (text, other))
    if re.split(r"\d+", text) != re.split(r"\d+", other):
        return text

    @functools.cache
    def number(a: str, b: str) -> str:
        if a == b:
            return a
        slope = fractions.Fraction(int(b) - int(a), of_other - count)
        return f"<{slope} examples + {int(a) - slope * count}>"

    found = map(number, numbers, others)
    return re.sub(r"\d+", lambda _: next(found), text)


def _type(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}" if hasattr(aval, "dtype") else str(aval)


def _of_literal(literal: Any) -> str:
    return _of_constant(literal.val) if np.ndim(literal.val) else _of_value(np.asarray(literal.val).tolist())


def _of_value(value: Any) -> str:
    """A value as text without digits."""
    return repr(value).translate(_WITHOUT_DIGITS)


def _of_constant(const: Any) -> str:
    """A digest of the values of a constant, without digits. Of a large constant, only some of the values are hashed."""
    const = known(const)
    if const is None:
        return ""
    step = -(-const.nbytes // _MOST_BYTES) or 1
    found = hashlib.sha256(np.ascontiguousarray(const.ravel()[::step]).tobytes()).hexdigest()[:16]
    return found.translate(_WITHOUT_DIGITS)


def known(const: Any) -> np.ndarray | None:
    """The values of a constant, if this process knows them."""
    if isinstance(const, Tracer) or not getattr(const, "is_fully_addressable", True):
        return None
    is_key = hasattr(const, "dtype") and jnp.issubdtype(const.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(const) if is_key else const)


_WITHOUT_DIGITS = str.maketrans("0123456789", "ghijklmnop")
_MOST_BYTES = 2**26

_OF_TYPES = ("pvary", "pcast")
"""Operations inside ``jax.shard_map`` that mark a value as varying over a mesh and compute nothing."""


def _changes_weak_type_alone(node: Node) -> bool:
    """Whether an operation converts an array to its own dtype: one that was made of a Python number."""
    eqn = node.eqn
    return (
        eqn.primitive.name == "convert_element_type"
        and bool(node.reads)
        and eqn.avals_in[0].dtype == eqn.avals_out[0].dtype
    )


def _text(value: Any) -> str:
    """A parameter of an operation as text, the same in every process."""
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        jaxpr, consts = opened(value)
        numbers: dict[Any, int] = {}

        def name_of(atom: Any) -> str:
            if isinstance(atom, Literal):
                return _of_literal(atom)
            return f"%{numbers.setdefault(atom, len(numbers))}:{_type(atom.aval)}"

        def line(name: str, params: str, ins: Sequence[Any], outs: Sequence[Any]) -> str:
            return f"{name}{params} {' '.join(map(name_of, ins))} -> {' '.join(map(name_of, outs))}"

        eqns = [line(e.primitive.name, _text(e.params), e.invars, e.outvars) for e in jaxpr.eqns]
        closed_over = line("", "", jaxpr.constvars, ()) + " ".join(map(_of_constant, consts))
        return (
            "{" + ";".join([closed_over, line("", "", jaxpr.invars, ()), *eqns, line("", "", jaxpr.outvars, ())]) + "}"
        )
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k != "name" and "sharding" not in k}
        return "[" + ",".join(f"{k}={_text(v)}" for k, v in sorted(kept.items())) + "]"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(str(item) if is_int(item) else _text(item) for item in value) + ")"
    if isinstance(value, (int, float)):
        return _of_value(value)
    if value is None or isinstance(value, (str, np.dtype)):
        return repr(value)
    text = str(value)
    return type(value).__name__ if " at 0x" in text or len(text) > 500 else text
