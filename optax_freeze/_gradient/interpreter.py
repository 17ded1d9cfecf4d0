"""A program evaluated with some of its values in two parts, as long as its operations allow.

The usual interpreter of a jaxpr, but that an operation with a ``Split`` among its operands is
done by its rule, and without a rule gets the arrays merged.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal
from jax.extend.source_info_util import current, current_name_stack, register_exclusion, user_context

import optax_freeze
from optax_freeze._gradient.rules_control_flow import CONTROL, bind
from optax_freeze._gradient.rules_rowwise import rule_of
from optax_freeze._gradient.split_array import Frozen, Split, dense

register_exclusion(os.path.join(os.path.dirname(optax_freeze.__file__), ""))  # an operation's source line is the user's


_TRACED = object()


def call(fun: Callable[..., Any], leaves: Sequence[Split], frozen: Sequence[Any] = ()) -> Any:
    """``fun`` of leaves in two parts.

    It is traced as ``jit`` traces, which executes nothing, and the program is evaluated: effects happen once, in order.
    If it cannot be traced (Python branches on a value), it is called with the merged arrays, as under ``jax.grad``; an
    error of its own is raised there again.

    Args:
      fun: a function of as many arrays; may return anything.
      leaves: the arrays.
      frozen: arrays that ``fun`` closes over and that nothing is differentiated with respect to.
    """
    found: list[Any] = []

    def traced(*arrays: Any) -> list[Any]:
        flat, treedef = jax.tree.flatten(fun(*arrays))
        found[:] = treedef, [_TRACED if isinstance(leaf, Tracer) else leaf for leaf in flat]
        return [leaf for leaf in flat if isinstance(leaf, Tracer)]

    try:
        closed = jax.make_jaxpr(traced)(*(leaf.frozen for leaf in leaves))
    except Exception:
        closed = None
    if closed is None:
        for leaf in leaves:
            leaf.note("Python that needs a value", "merged", None)
        return fun(*(leaf.merged() for leaf in leaves))
    constant = {id(array) for array in frozen}
    consts = [Frozen(const) if id(const) in constant else const for const in closed.consts]
    outs = iter(evaluate(closed.jaxpr, consts, leaves))
    treedef, flat = found
    return jax.tree.unflatten(treedef, [dense(next(outs)) if leaf is _TRACED else leaf for leaf in flat])


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Any], source: Any = None) -> list[Any]:
    """The outputs of a jaxpr, dense or in two parts, under its name scopes; ``source``: the line of all of it."""
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, Literal)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, Literal)}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for i, eqn in enumerate(jaxpr.eqns):
        name_stack = current_name_stack() + eqn.source_info.name_stack
        with user_context((source or eqn.source_info).traceback, name_stack=name_stack):
            outs = _apply(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
        for v in {v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal)}:
            if last.get(v, i) <= i:
                del env[v]
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: Any, values: list[Any]) -> Any:
    primitive, params = eqn.primitive, eqn.params
    control = CONTROL.get(primitive.name)
    if control is None:
        values = [value.read() if isinstance(value, Frozen) else value for value in values]
    splits = [value for value in values if isinstance(value, Split)]
    rule = functools.partial(control, evaluate) if control else rule_of(primitive) if splits else None
    with eqn.ctx.manager:
        out = None if rule is None else rule(primitive, params, values)
    if out is None or control is None:
        outs = out if primitive.multiple_results and out is not None else [out]
        kept = any(isinstance(part, Split) for part in outs)
        for split in splits:
            split.note(primitive.name, "merged" if out is None else "kept" if kept else "read", current())
    if out is None:
        values = [dense(value) for value in values]
        with eqn.ctx.manager:
            return bind(primitive, params, values)
    return out
