"""Which outputs of a program depend on some of its inputs.

The gradient of a function, traced, says which parameters it reaches: those whose output depends on the incoming
cotangent. A frozen parameter's is a zero that depends on nothing. What cannot be looked into counts as dependent, and
so does what is read from a reference: what was written to it is not followed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from optax_freeze._jaxpr import scan_counts


def depends_on(jaxpr: ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """For each output of ``jaxpr`` whether it depends on one of the marked inputs.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x, y: (x + 1, jax.jit(lambda a, b: (a, b))(x, y)))(1.0, 2.0)
    >>> depends_on(jaxpr, [True, False])
    [True, True, False]
    """
    return _outputs(jaxpr.jaxpr, inputs)


def _outputs(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    marked = {var for var, mark in zip(jaxpr.invars, inputs, strict=True) if mark}

    def is_marked(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in marked

    for eqn in jaxpr.eqns:
        given = [is_marked(atom) for atom in eqn.invars]
        if any(given) or eqn.effects:
            marked.update(var for var, mark in zip(eqn.outvars, _through(eqn, given), strict=True) if mark)
    return [is_marked(atom) for atom in jaxpr.outvars]


def _through(eqn: Any, given: list[bool]) -> list[bool]:
    """What one equation passes on."""
    if eqn.primitive.name == "cond":
        predicate, *operands = given
        branches = [_outputs(branch.jaxpr, operands) for branch in eqn.params["branches"]]
        return [predicate or any(marks) for marks in zip(*branches, strict=True)]
    inner = list(_programs(eqn.params))
    if len(inner) != 1 or (len(inner[0].invars), len(inner[0].outvars)) != (len(eqn.invars), len(eqn.outvars)):
        return [True] * len(eqn.outvars)
    if eqn.primitive.name != "scan":
        return _outputs(inner[0], given)
    first, carried = scan_counts(eqn.params)
    while True:
        passed = _outputs(inner[0], given)
        carry = [old or new for old, new in zip(given[first : first + carried], passed[:carried], strict=True)]
        if carry == given[first : first + carried]:
            return carry + passed[carried:]
        given = [*given[:first], *carry, *given[first + carried :]]


def _programs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
