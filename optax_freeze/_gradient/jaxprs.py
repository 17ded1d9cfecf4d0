"""What a jaxpr says: where releases of JAX say it differently, and which outputs depend on some of the inputs.

The gradient of a function, traced, says which parameters it reaches: those whose output depends on the incoming
cotangent. A frozen parameter's is a zero that depends on nothing. A primitive that cannot be looked into counts as
dependent, and so does a value that is read from a reference: what was written to it is not followed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


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


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a ``scan`` are the same in every step, and how many after them are carried.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda w, c, xs: jax.lax.scan(lambda c, x: (c * w + x, c), c, xs))(1.0, 2.0, jnp.ones(3))
    >>> scan_counts(jaxpr.eqns[-1].params)
    (1, 1)
    """
    if "ft_in" in params:  # since JAX 0.11
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def is_inlined(params: dict[str, Any]) -> bool:
    """Whether a ``jit`` asks for its program to stand in the place of the call.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: jax.jit(lambda x: x + 1)(x))(1.0)
    >>> is_inlined(jaxpr.eqns[-1].params)
    False
    """
    inline = params["inline"]
    return inline is True or getattr(inline, "name", "") == "JAX_EARLY"  # an enumeration since JAX 0.11
