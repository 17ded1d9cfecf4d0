"""A digest of the program that computes features, the same in every process and for any number of examples.

The program is written as a list of words and sizes. Sizes are ints, so that those that grow with the batch are found by
comparison with the program for a batch of another size.
"""

import fractions
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from optax_freeze._errors import is_int
from optax_freeze._precompute.cut import Cut
from optax_freeze._precompute.graph import Graph, Key
from optax_freeze._precompute.inputs import Input
from optax_freeze._program.regions import Rows
from optax_freeze._program.trace import flatten, opened

Text: TypeAlias = list[str | int]

_MOST_BYTES = 2**26
"""Of a larger constant, only some of the values are hashed."""


def digest(text: Text) -> str:
    return hashlib.sha256("\n".join(map(repr, text)).encode()).hexdigest()[:32]


def text_of(graph: Graph, inputs: Sequence[Input], cut: Cut) -> Text:
    """The operations before a cut, the same in every process."""
    program = graph.program
    of_values = {i: f"{'arguments' if x.leaf is None else 'parameters'} {x.name}" for i, x in enumerate(inputs)}
    of_values |= {value: _of_constant(const) for value, const in program.consts.items()}
    names = {key: of_values[key[0]] for key in graph.known if key[0] in of_values}

    def type_of(key: Key) -> Iterator[str | int]:
        yield from _type(program.avals[key[0]])
        yield from _words(key[1].runs if isinstance(key[1], Rows) else ())

    nodes = (graph.nodes[i] for i in cut.before)
    operations = ((node.eqn, node.operands, node.writes) for node in nodes)
    return list(_of_program(operations, names, type_of, cut.stored))


def without_count(text: Text, other: Text, count: int, of_other: int) -> Text:
    """Replaces the sizes that depend on the number of examples, so that any number gives the same text.

    ``text`` is the program for ``count`` examples, and ``other`` the program for ``of_other`` examples. If other things
    than sizes depend on the number of examples, so do the features, and the text stays as it is.
    """

    def general(a: Any, b: Any) -> str | int:
        if a == b:
            return a
        slope = fractions.Fraction(b - a, of_other - count)
        return f"{slope} examples + {a - slope * count}"

    pairs = list(zip(text, other, strict=False))
    is_alike = len(text) == len(other) and all(a == b or (is_int(a) and is_int(b)) for a, b in pairs)
    return [general(a, b) for a, b in pairs] if is_alike else text


def values_of(const: Any) -> np.ndarray | None:
    """The values of a constant, if this process knows them."""
    if isinstance(const, Tracer) or not getattr(const, "is_fully_addressable", True):
        return None
    is_key = hasattr(const, "dtype") and jnp.issubdtype(const.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(const) if is_key else const)


def _of_constant(const: Any) -> str:
    array = values_of(const)
    if array is None:
        return "unknown constant"
    step = -(-array.nbytes // _MOST_BYTES) or 1
    return f"constant {hashlib.sha256(np.ascontiguousarray(array.ravel()[::step]).tobytes()).hexdigest()}"


def _of_program(
    operations: Iterable[Any], names: dict[Any, str], type_of: Callable[[Any], Iterator[str | int]], outputs: Any
) -> Iterator[str | int]:
    """Operations ``(eqn, operands, results)`` on values, of which some have ``names``."""
    count = itertools.count()

    def of(x: Any) -> Iterator[str | int]:
        if x is None or isinstance(x, Literal):
            yield "" if x is None else _of_constant(x.val)
        else:
            names[x] = names.get(x) or f"%{next(count)}"
            yield names[x]
            yield from type_of(x)

    for eqn, operands, results in operations:
        given = [x for x in operands if x is not None]
        if _computes_nothing(eqn) and not any(isinstance(x, Literal) for x in given):
            names |= {result: names[x] for result, x in zip(results, given, strict=True)}
            continue
        yield eqn.primitive.name
        yield from _words(eqn.params)
        for x in (*operands, *results):
            yield from of(x)
    for x in outputs:
        yield from of(x)


def _computes_nothing(eqn: Any) -> bool:
    """Whether an operation marks values as varying over a mesh, or an array as not made of a Python number."""
    is_conversion = eqn.primitive.name == "convert_element_type" and eqn.avals_in[0].dtype == eqn.avals_out[0].dtype
    return is_conversion or eqn.primitive.name in ("pvary", "pcast")


def _type(aval: Any) -> Iterator[str | int]:
    yield str(aval.dtype) if hasattr(aval, "dtype") else str(aval)
    yield from getattr(aval, "shape", ())


def _words(value: Any) -> Iterator[str | int]:
    """A parameter of an operation, the same in every process. Ints in a tuple are sizes, others are values."""
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        program = flatten(ClosedJaxpr(*opened(value)))
        names = {n: f"input {n}" for n in range(program.num_inputs)}
        names |= {n: _of_constant(const) for n, const in program.consts.items()}
        operations = ((eqn, eqn.inputs, eqn.outputs) for eqn in program.eqns)
        yield from _of_program(operations, names, lambda n: _type(program.avals[n]), program.outputs)
    elif isinstance(value, dict):
        for name in sorted(value):
            if name != "name" and "sharding" not in name:
                yield name
                yield from _words(value[name])
    elif isinstance(value, (tuple, list, frozenset)):
        yield "("
        for item in sorted(value, key=repr) if isinstance(value, frozenset) else value:
            yield from [int(item)] if is_int(item) else _words(item)
        yield ")"
    else:
        text = repr(value)
        yield type(value).__name__ if " at 0x" in text or len(text) > 500 else text
