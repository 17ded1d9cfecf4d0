"""A digest of the program that computes features, the same in every process and for any number of examples.

The program is written as a list of words and sizes. Sizes are ints, so that those that grow with the batch are found by
comparison with the program for a batch of another size.
"""

import fractions
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from optax_freeze._errors import is_int
from optax_freeze._precompute.cut import Cut
from optax_freeze._precompute.graph import Graph, Key
from optax_freeze._precompute.inputs import Input
from optax_freeze._precompute.words import Text, of_constant, of_program, of_type, words
from optax_freeze._program.regions import Rows


def digest(text: Text) -> str:
    return hashlib.sha256("\n".join(map(repr, text)).encode()).hexdigest()[:32]


def text_of(graph: Graph, inputs: Sequence[Input], cut: Cut) -> Text:
    """The operations before a cut, the same in every process."""
    program = graph.program
    of_values = {i: f"{'arguments' if x.leaf is None else 'parameters'} {x.name}" for i, x in enumerate(inputs)}
    of_values |= {value: of_constant(const) for value, const in program.consts.items()}
    names = {key: of_values[key[0]] for key in graph.known if key[0] in of_values}

    def type_of(key: Key) -> Iterator[str | int]:
        yield from of_type(program.avals[key[0]])
        yield from words(key[1].runs if isinstance(key[1], Rows) else ())

    nodes = (graph.nodes[i] for i in cut.before)
    operations = ((node.eqn, node.operands, node.writes) for node in nodes)
    return list(of_program(operations, names, type_of, cut.stored))


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
