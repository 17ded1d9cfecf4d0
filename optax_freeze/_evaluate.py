"""A program evaluated with some of its values in two parts, as long as its operations allow.

The usual interpreter of a jaxpr, but that an operation with a :class:`~optax_freeze._split.Split` among its operands is
done by its rule, and without a rule gets the arrays merged. The operations that hold programs of their own are in the
room below; they are given :func:`evaluate`.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal
from jax.extend.source_info_util import current, current_name_stack, register_exclusion, user_context

from optax_freeze._rules import rule_of
from optax_freeze._split import Frozen, Split, dense

Control = Callable[[Any, dict[str, Any], Sequence[Any]], Any]

CONTROL: dict[str, Control] = {}
"""Rules of the operations that hold programs, by the primitive's name; such a rule may read a :class:`Frozen` itself."""

register_exclusion(os.path.join(os.path.dirname(__file__), ""))  # an operation's source line is the user's


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr, dense or in two parts, under its name scopes."""
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, Literal)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, Literal)}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for i, eqn in enumerate(jaxpr.eqns):
        name_stack = current_name_stack() + eqn.source_info.name_stack
        with user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
            outs = _apply(eqn.primitive, eqn.params, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
        for v in {v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal)}:
            if last.get(v, i) <= i:
                del env[v]
    return [read(v) for v in jaxpr.outvars]


def _apply(primitive: Any, params: dict[str, Any], values: list[Any]) -> Any:
    control = CONTROL.get(primitive.name)
    if control is None:
        values = [value.read() if isinstance(value, Frozen) else value for value in values]
    splits = [value for value in values if isinstance(value, Split)]
    rule = control or (rule_of(primitive) if splits else None)
    out = rule(primitive, params, values) if rule is not None else None
    if out is None or control is None:
        outs = out if primitive.multiple_results and out is not None else [out]
        kept = any(isinstance(part, Split) for part in outs)
        for split in splits:
            split.note(primitive.name, "merged" if out is None else "kept" if kept else "read", current())
    if out is None:
        return bind(primitive, params, [dense(value) for value in values])
    return out


def bind(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> Any:
    """An equation of a jaxpr, as it is."""
    subfunctions, params = bound_params(primitive, params)
    if subfunctions is None:
        return primitive.bind(*values, **params)
    return primitive.bind(*subfunctions, *values, **params)


def bound_params(primitive: Any, params: dict[str, Any]) -> tuple[Sequence[Any] | None, dict[str, Any]]:
    """What ``bind`` takes for the parameters of an equation: functions to stand before the operands, if any, and the rest.

    Before JAX 0.10 the functions stand apart; since then they are one of the parameters.
    """
    bound = primitive.get_bind_params(params)
    return bound if isinstance(bound, tuple) else (None, bound)
