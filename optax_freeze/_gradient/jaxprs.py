"""Which outputs of a jaxpr depend on which inputs, and params of equations that differ between releases of JAX.

The traced gradient of a function shows which parameters it reaches: those whose gradient depends on the incoming
cotangent. The outputs of a primitive that cannot be looked into count as dependent, and so do reads of a reference.
"""

from collections.abc import Sequence
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
    """Which outputs of one equation depend on marked inputs."""
    if eqn.primitive.name == "cond":
        predicate, *operands = given
        branches = [_outputs(branch.jaxpr, operands) for branch in eqn.params["branches"]]
        return [predicate or any(marks) for marks in zip(*branches, strict=True)]
    programs = (getattr(value, "jaxpr", value) for value in eqn.params.values())
    inner = [program for program in programs if isinstance(program, Jaxpr)]
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


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a ``scan`` are the same in every step, and how many after them are carried."""
    if "ft_in" in params:  # since JAX 0.11
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def opened(program: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A jaxpr and its constants; a ``Jaxpr`` has none before JAX 0.12, and since then is a ``ClosedJaxpr``."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def is_inlined(params: dict[str, Any]) -> bool:
    """Whether a ``jit`` asks for its program to replace the call."""
    inline = params["inline"]
    return inline is True or getattr(inline, "name", "") == "JAX_EARLY"  # an enumeration since JAX 0.11
