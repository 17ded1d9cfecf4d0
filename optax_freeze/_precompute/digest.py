"""Which program computed some features? Its digest says, in every process."""

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from optax_freeze._gradient.jaxprs import opened
from optax_freeze._precompute.cut import Cut
from optax_freeze._precompute.program import Program


def digest(program: Program, inputs: Sequence[str], cut: Cut, shapes: Sequence[Any], *, with_sizes: bool) -> str:
    """A digest of the operations before a cut, the same in every process.

    Args:
      program: the program.
      inputs: the names of its inputs.
      cut: where it is divided.
      shapes: the shape of each value, or None if it does not count.
      with_sizes: whether sizes among the params of operations count; they differ with the number of examples.
    """
    names, lines, count = dict(enumerate(inputs)), [], itertools.count()

    def name_of(value: Any) -> str:
        return names.get(value) or names.setdefault(value, f"%{next(count)}")

    def text(value: Any) -> str:
        if isinstance(value, Literal):
            return repr(np.asarray(value.val).tolist())
        return f"{name_of(value)}:{program.avals[value].dtype}{shapes[value]}"

    for node in cut.before:
        if node.eqn.primitive.name in _OF_TYPES:
            names |= zip(node.outputs, map(name_of, node.inputs), strict=True)
            continue
        params = _text(node.eqn.params, with_sizes)
        ins, outs = (" ".join(map(text, values)) for values in (node.inputs, node.outputs))
        lines.append(f"{node.eqn.primitive.name} {params} {ins} -> {outs}")
    lines.append(" ".join(map(text, cut.stored)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


_OF_TYPES = ("pvary", "pcast")
"""Operations that say of a value that it varies over a mesh, inside of ``jax.shard_map``, and compute nothing."""

_WITH_SIZES = ("shape", "new_sizes", "limit_indices", "slice_sizes", "sharding", "out_sharding", "name")


def _text(value: Any, with_sizes: bool) -> str:
    """A text of a param of an operation that is the same in every process."""
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        jaxpr, _ = opened(value)
        numbers: dict[Any, int] = {}

        def name_of(atom: Any) -> str:
            if isinstance(atom, Literal):
                return repr(np.asarray(atom.val).tolist())
            return f"%{numbers.setdefault(atom, len(numbers))}"

        def line(name: str, params: str, ins: Sequence[Any], outs: Sequence[Any]) -> str:
            return f"{name}{params} {' '.join(map(name_of, ins))} -> {' '.join(map(name_of, outs))}"

        eqns = [line(e.primitive.name, _text(e.params, with_sizes), e.invars, e.outvars) for e in jaxpr.eqns]
        return "{" + ";".join([line("", "", jaxpr.invars, ()), *eqns, line("", "", jaxpr.outvars, ())]) + "}"
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if with_sizes or k not in _WITH_SIZES}
        return "[" + ",".join(f"{k}={_text(v, with_sizes)}" for k, v in sorted(kept.items())) + "]"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(_text(item, with_sizes) for item in value) + ")"
    if value is None or isinstance(value, (bool, int, float, str, np.dtype)):
        return repr(value)
    text = str(value)
    return type(value).__name__ if " at 0x" in text or len(text) > 500 else text
