"""Evaluates a program in which some values are split arrays.

This is the usual interpreter of a jaxpr, except that an operation with a ``SplitArray`` among its operands is evaluated
by its rule. If there is no rule, the operation gets merged arrays.
"""

import os
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal
from jax.extend.source_info_util import current, current_name_stack, register_exclusion, user_context

from optax_freeze._errors import ASKED_FOR_A_VALUE
from optax_freeze._gradient import rules_calls as rules_calls
from optax_freeze._gradient import rules_control_flow as rules_control_flow
from optax_freeze._gradient import rules_indexing as rules_indexing
from optax_freeze._gradient import rules_layout as rules_layout
from optax_freeze._gradient import rules_products as rules_products
from optax_freeze._gradient import rules_rowwise as rules_rowwise
from optax_freeze._gradient import rules_writing as rules_writing
from optax_freeze._gradient.constants import as_array, folded
from optax_freeze._gradient.frozen_array import FrozenArray, has_late, read
from optax_freeze._gradient.operation_log import OperationLog
from optax_freeze._gradient.rules import NO_RULE, RULES, Equation, Whole, static_rows
from optax_freeze._gradient.split_array import dense, has_split, on_device

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
register_exclusion(os.path.join(_PACKAGE, ""))  # report the user's line as the source of an operation

_TRACED = object()
_OF_NO_VALUE = (
    "Tracer.__format__",
    "sequences of concrete values",
    "must be static integers",
    "must have static start/stop/step",
)
"""Texts of other errors about a traced array that has no value: in a string, as a size, or as the edge of a slice."""


def call(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    frozen: Mapping[int, OperationLog | None] = MappingProxyType({}),
    params: Sequence[Any] = (),
    inputs: Sequence[Any] = (),
) -> Any:
    """Calls ``fun`` with split arrays.

    ``fun`` is traced like under ``jit``, which executes nothing, and then the program is evaluated, so effects happen
    once, in order. If ``fun`` needs a value while it is traced (Python branches on it), it is called with the merged
    arrays. Any other error is raised by the first call.

    Args:
      fun: the function of the split arrays.
      leaves: the split arrays, and frozen arrays on the host.
      frozen: the logs of the frozen arrays that ``fun`` closes over, by identity. They are constants of the program
        and not arguments, because ``fun`` cannot branch on the values of arguments, which are tracers.
      params: the other parameters, which are constants for the same reason.
      inputs: the other inputs of ``fun``, also constants; values computed from them are activations.

    Returns:
      The result of ``fun``.
    """
    treedef, flat = None, []

    def traced(*arrays: Any) -> list[Any]:
        nonlocal treedef, flat
        outs, treedef = jax.tree.flatten(fun(*arrays))
        flat = [_TRACED if isinstance(out, Tracer) else out for out in outs]
        return [out for out in outs if isinstance(out, Tracer)]

    try:
        closed = jax.make_jaxpr(traced)(*map(_array, leaves))
    except Exception as error:
        if not _needs_value(error):
            raise
        closed = None
    if closed is None:
        for leaf in leaves:
            leaf.record("Python that needs a value", "host whole" if isinstance(leaf, FrozenArray) else "merged", None)
        return fun(*map(dense, leaves))
    late = any(isinstance(_frozen(leaf), FrozenArray) for leaf in leaves)
    consts = [
        FrozenArray(const, is_late=late, log=frozen[id(const)]) if id(const) in frozen else const
        for const in closed.consts
    ]
    known, unknown = set(map(id, params)), set(map(id, inputs))
    outs = iter(evaluate(closed.jaxpr, consts, leaves, params=known, inputs=unknown))
    return jax.tree.unflatten(treedef, [_result(next(outs)) if leaf is _TRACED else leaf for leaf in flat])


def _needs_value(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that a traced array has no value."""
    if error is None or isinstance(error, ASKED_FOR_A_VALUE):
        return error is not None
    if isinstance(error, TypeError | IndexError) and any(text in str(error) for text in _OF_NO_VALUE):
        return True
    return _needs_value(error.__cause__ or error.__context__)


def _result(value: Any) -> Any:
    return as_array(dense(on_device(value, "the result")))


def _frozen(leaf: Any) -> Any:
    return leaf if isinstance(leaf, FrozenArray) else leaf.frozen


def _array(leaf: Any) -> Any:
    """Returns the full frozen array of a leaf without moving it from its memory."""
    frozen = _frozen(leaf)
    return frozen.array if isinstance(frozen, FrozenArray) else frozen


def evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    values: Sequence[Any],
    source: Any = None,
    params: Container[int] = (),
    inputs: Container[int] = (),
) -> list[Any]:
    """Evaluates a jaxpr under its name scopes and returns its outputs, dense or split.

    ``source`` replaces the source lines of all equations. ``params`` and ``inputs`` contain the identities of values:
    values computed only from parameters and constants are not activations.
    """
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    of_params = {
        v for v, value in env.items() if id(value) in params or not (isinstance(value, Tracer) or id(value) in inputs)
    }
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, Literal)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, Literal)}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for i, eqn in enumerate(jaxpr.eqns):
        name_stack = current_name_stack() + eqn.source_info.name_stack
        with user_context((source or eqn.source_info).traceback, name_stack=name_stack):
            values = [read(v) for v in eqn.invars]
            known = [isinstance(v, Literal) or v in of_params for v in eqn.invars]
            constant = folded(eqn, values)
            outs = apply(eqn, values, known) if constant is None else constant
        if all(known):
            of_params.update(eqn.outvars)
        env.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
        for v in {v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal)}:
            if last.get(v, i) <= i:
                del env[v]
    return [read(v) for v in jaxpr.outvars]


def apply(eqn: Any, values: list[Any], of_params: Sequence[bool] = ()) -> Any:
    """Evaluates an equation. The result is dense, split, or, for late arrays only, not computed yet."""
    equation, rule = Equation(eqn.primitive, eqn.params, evaluate, of_params), RULES.get(eqn.primitive.name, NO_RULE)
    late = has_late(values) and not has_split(values)
    if not rule.enters:
        if late:
            with eqn.ctx.manager:
                return equation.bind(*values)
        values = [read(value) if rule.dynamic else static_rows(equation, read(value)) for value in values]
        values = values if rule.late else [on_device(value, eqn.primitive.name, current()) for value in values]
    out = None
    if rule.enters or has_split(values):
        with eqn.ctx.manager:
            out = rule.apply(equation, *values)
    if out is None:
        equation.record("merged", *values)
        operands = values if late else list(map(equation.dense, values))
        with eqn.ctx.manager:
            return equation.bind(*operands)
    if isinstance(out, Whole):
        equation.record("whole", *values)
        return out.out
    if not rule.enters:
        outs = out if eqn.primitive.multiple_results else [out]
        equation.record("kept" if has_split(outs) else "read", *values)
    return out
