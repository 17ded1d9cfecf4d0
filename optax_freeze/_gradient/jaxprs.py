"""Analyzes jaxprs: which outputs depend on which inputs, and equation params that differ between releases of JAX.

The traced gradient of a function shows which parameters the function depends on: those whose gradient depends on the
incoming cotangent. The outputs of an opaque primitive count as dependent, and so do reads of a reference.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.source_info_util import current_name_stack, user_context

OF_ONE = "convert_element_type copy copy_p neg reduce_precision stop_gradient"

ELEMENTWISE = f"""
{OF_ONE} abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp conj cos
cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p
logistic lt max min mul name ne nextafter not or pow pvary real rem round rsqrt select_n
sign sin sinh sqrt square sub tan tanh xor
"""
"""The elementwise operations; those in `OF_ONE` have one operand."""


def depends_on(jaxpr: ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Returns for each output of ``jaxpr`` whether it depends on one of the marked inputs.

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


def bind_params(primitive: Any, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of ``primitive.bind``: functions to pass before the operands (up to JAX 0.9), and params."""
    bound = primitive.get_bind_params(params)
    return bound if isinstance(bound, tuple) else ((), bound)


def outputs_of(program: ClosedJaxpr, wanted: Sequence[int], inputs: Sequence[Any], effects: bool = False) -> list[Any]:
    """Evaluates some outputs of a program without unneeded operations; ``effects`` keeps operations with side effects.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda x, y: (x + 1, x * y))(1, 2)
    >>> outputs_of(program, [0], [1, 2])
    [Array(2, dtype=int32, weak_type=True)]
    """
    jaxpr = program.jaxpr
    outvars = [jaxpr.outvars[i] for i in wanted]
    needed = {v for v in outvars if not isinstance(v, Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if (effects and eqn.effects) or not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *inputs], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for eqn in reversed(eqns):
        functions, params = bind_params(eqn.primitive, eqn.params)
        name_stack = current_name_stack() + eqn.source_info.name_stack
        with user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
            outs = eqn.primitive.bind(*functions, *map(read, eqn.invars), **params)
        env.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
    return [read(v) for v in outvars]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of constant operands of a ``scan`` and the number of carried operands, which follow them."""
    if "ft_in" in params:  # since JAX 0.11
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def opened(program: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns a jaxpr and its constants; before JAX 0.12 a ``Jaxpr`` has none, since then it is a ``ClosedJaxpr``."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def is_inlined(params: dict[str, Any]) -> bool:
    """Whether a ``jit`` requests that its program is inlined."""
    inline = params["inline"]
    return inline is True or getattr(inline, "name", "") == "JAX_EARLY"  # an enumeration since JAX 0.11
