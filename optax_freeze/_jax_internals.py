"""What this package knows of the inside of JAX, for all versions: jaxprs, and the programs that equations contain.

No other file but ``_jax_tracing.py`` imports ``jax.extend``, ``jax.interpreters`` or ``jax.custom_derivatives``; the
parameters of operations without programs are known to the table of operations. An equation is one of a jaxpr, or one
that ``_program`` numbered: both have a primitive and its params. Importing this file loads ``jax.extend``, which takes
longer than this package.
"""

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, primitives
from jax.extend.source_info_util import current_name_stack, register_exclusion, summarize, user_context
from jax.interpreters.partial_eval import dce_jaxpr

__all__ = ["ClosedJaxpr", "Jaxpr", "Literal", "SymbolicZero"]

_JAX = os.path.join(os.path.dirname(jax.__file__), "")
register_exclusion(os.path.join(os.path.dirname(__file__), ""))  # the source of an operation is the user's line

_LIBRARIES = re.compile(r"[\\/](site|dist)-packages[\\/](equinox|flax|haiku|keras|optax)[\\/]")
_FRAMES = 50  # of the innermost ones, which of them is the user's

PRIMITIVES = {each.name: each for of in (primitives, jax.lax) for key, each in vars(of).items() if key.endswith("_p")}
"""The primitives that JAX exports, by name."""


@functools.lru_cache(4096)
def is_known_primitive(primitive: Any) -> bool:
    """Whether a primitive is one of JAX or of this package: other libraries have some of the same name."""
    if primitive.name in PRIMITIVES:
        return PRIMITIVES[primitive.name] is primitive
    modules = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] in ("jax", __package__)]
    return any(each is primitive for module in modules for each in [*vars(module).values()])


_INLINED = ("jit", "pjit", "closed_call", "core_call", "call", "eval_jaxpr")
_REMAT = ("checkpoint", "remat", "remat2", "RematTraced")
_CALLS = (*_INLINED, *_REMAT, "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "composite")


FUNCTIONS = "bwd computation fwd fwd_jaxpr_thunk jvp_jaxpr_fun jvp_jaxpr_thunk out_trees".split()  # noqa: SIM905
"""The params of an operation that are Python functions, by which no two operations can be compared."""


def closed_over(eqn: Any) -> int | None:
    """How many of its first operands a ``jax.custom_vjp`` or ``custom_jvp`` closes over; None for another operation."""
    params = operation_of(eqn)[1]
    return params.get("num_consts", 0) if "bwd" in params or "jvp_jaxpr_fun" in params else None


class Call(NamedTuple):
    """An equation that applies its program to its operands, in their order, and returns the results."""

    program: ClosedJaxpr


class Mapped(NamedTuple):
    """A ``jax.shard_map``, whose program is that of one device; the others are arguments of ``jax.shard_map``."""

    program: ClosedJaxpr
    mesh: Any
    in_specs: Sequence[Any]
    out_specs: Sequence[Any]
    check_vma: bool
    axis_names: set[str]

    def map(self, fun: Callable[..., Any], in_specs: Sequence[Any], out_specs: Sequence[Any]) -> Callable[..., Any]:
        """Another function of shards, on the same mesh."""
        return jax.shard_map(
            fun,
            mesh=self.mesh,
            in_specs=tuple(in_specs),
            out_specs=[*out_specs],
            check_vma=self.check_vma,
            axis_names=self.axis_names,
        )


class Branches(NamedTuple):
    """An equation of which the first operand says which program is applied to the others.

    Attributes:
      by_platform: whether the programs are for different platforms, so that some may not compile on this one.
    """

    programs: Sequence[ClosedJaxpr]
    by_platform: bool


class Loop(NamedTuple):
    """A ``scan``: the operands are constants, then what is carried, then what is stacked over the steps.

    The results are what is carried, and then what is stacked.
    """

    body: ClosedJaxpr
    consts: int
    carried: int
    length: int
    reverse: bool
    unroll: int

    @property
    def stacked(self) -> int:
        """The place of the first stacked operand."""
        return self.consts + self.carried


class While(NamedTuple):
    """A ``while_loop``: the operands are constants of the condition, those of the body, and what is carried."""

    condition: ClosedJaxpr
    condition_consts: int
    body: ClosedJaxpr
    body_consts: int


class Others(NamedTuple):
    """An equation whose programs are used in a way that is not known here."""

    programs: Sequence[ClosedJaxpr]


Inside: TypeAlias = Call | Mapped | Branches | Loop | While | Others


def inside(eqn: Any) -> Inside | None:
    """The programs that an equation contains, and how it applies them; None without any."""
    primitive, params = eqn.primitive, eqn.params
    if primitive is primitives.scan_p:
        if "ft_in" in params:  # since JAX 0.11
            consts, carried, _ = map(len, params["ft_in"].unpack())
        else:
            consts, carried = params["num_consts"], params["num_carry"]
        return Loop(closed(params["jaxpr"]), consts, carried, params["length"], params["reverse"], params["unroll"])
    if primitive is primitives.cond_p:
        return Branches([*map(closed, params["branches"])], params.get("branches_platforms") is not None)
    if primitive is primitives.while_p:
        condition, body = closed(params["cond_jaxpr"]), closed(params["body_jaxpr"])
        return While(condition, params["cond_nconsts"], body, params["body_nconsts"])
    programs = programs_in(eqn)
    if primitive.name == "shard_map":
        axes = set(params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"])
        return Mapped(programs[0], params["mesh"], params["in_specs"], params["out_specs"], params["check_vma"], axes)
    if primitive.name in _CALLS and len(programs) == 1:
        return Call(programs[0])
    return Others(programs) if programs else None


def programs_in(eqn: Any) -> list[ClosedJaxpr]:
    """The programs that an equation contains."""
    values = [value if isinstance(value, (tuple, list)) else (value,) for value in eqn.params.values()]
    return [closed(value) for each in values for value in each if isinstance(value, (Jaxpr, ClosedJaxpr))]


def params_of(found: Loop | Branches) -> dict[str, Any]:
    """The params that :func:`inside` reads of a loop or branches. Their equation is evaluated by parts, never bound."""
    if isinstance(found, Branches):
        return {"branches": tuple(found.programs)}
    params = {name: getattr(found, name) for name in ("length", "reverse", "unroll")}
    return {**params, "jaxpr": found.body, "num_consts": found.consts, "num_carry": found.carried}


class Inlined(NamedTuple):
    """A call that is replaced by the equations of its program.

    Attributes:
      scope: the name scope of the equations.
      is_of_jax: whether the called function is one of JAX, so that its lines are not the user's.
      barriers: which operands JAX keeps behind a barrier, so that what a ``remat`` repeats is not merged with the first
        computation.
    """

    program: ClosedJaxpr
    scope: str | None
    is_of_jax: bool
    barriers: Sequence[bool]


def inlined(eqn: Any, enter_remat: bool, enter_placed: bool) -> Inlined | None:
    """How a call is replaced by its equations, or None; ``enter_placed``: with shardings or donation, too."""
    name, params = operation_of(eqn)
    if name in _REMAT and enter_remat:
        program, scope = closed(params["jaxpr"]), "checkpoint"
    elif name in _INLINED and (enter_placed or not _is_placed(params)):
        program, scope = closed(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]), params.get("name")
    else:
        return None
    prevent = params["prevent_cse"] if params.get("differentiated") else False
    barriers = prevent if isinstance(prevent, tuple) else (prevent,) * len(eqn.invars)
    return Inlined(program, scope, _JAX in program.jaxpr.debug_info.func_src_info, barriers)


def _is_placed(params: dict[str, Any]) -> bool:
    """Whether a ``jit`` says where its operands and results are, or donates operands."""
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return any(type(s).__name__ != "UnspecifiedValue" for s in shardings) or any(params.get("donated_invars", ()))


def operation_of(eqn: Any) -> tuple[str, dict[str, Any]]:
    """The name and the params of an operation, also of one that is called by JAX's primitive for all of ``hijax``."""
    if eqn.primitive.name != "call_hi_primitive":
        return eqn.primitive.name, eqn.params
    return type(eqn.params["_prim"]).__name__, eqn.params["_prim"].params


def name_of(eqn: Any) -> str:
    """The name of an operation, or of the called function if it is a call."""
    name, params = operation_of(eqn)
    return params.get("name", name) if name in _INLINED else name


def without_hijax(eqn: Any) -> tuple[Any, dict[str, Any]]:
    """The primitive of an equation and its params; a name for a policy of ``remat`` has one primitive in each mode."""
    name, params = operation_of(eqn)
    return (primitives.name_p, params) if name == "CheckpointName" else (eqn.primitive, eqn.params)


def bind(eqn: Any, *operands: Any, **changed: Any) -> Any:
    """Applies an operation to arrays, with some of its params changed."""
    bound = eqn.primitive.get_bind_params({**eqn.params, **changed})
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # functions: up to JAX 0.9
    return eqn.primitive.bind(*functions, *operands, **params)


def evaluate_program(program: ClosedJaxpr, *operands: Any) -> list[Any]:
    """The results of a program, which JAX differentiates as fast as the functions of ``jax.numpy``.

    Each operation is a ``jit`` of its own: JAX keeps the derivative of one for all that are like it.
    """
    jaxpr = program.jaxpr
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *operands], strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else env[atom]  # noqa: E731
    for eqn in jaxpr.eqns:
        with source_of(eqn).scope():
            outs = _function_of(eqn)(*map(read, eqn.invars))
        env.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
    return [*map(read, jaxpr.outvars)]


def _function_of(eqn: Any) -> Callable[..., Any]:
    """An operation as a function of its operands, the same for all that are like it."""
    is_plain = is_known_primitive(eqn.primitive) and not eqn.effects and not inside(eqn)
    key = key_of(eqn) if is_plain else None
    return functools.partial(bind, eqn) if key is None else _jitted(key)


@functools.lru_cache(4096)
def _jitted(key: tuple[Any, ...]) -> Callable[..., Any]:
    primitive, *params = key
    return jax.jit(functools.partial(primitive.bind, **{name: x for name, _, x in params}), inline=True)


def key_of(eqn: Any) -> tuple[Any, ...] | None:
    """What an operation has in common with those that are like it; None if its params cannot be told from others.

    0.0 equals -0.0; 1 equals True, which has another type.
    """
    if any(isinstance(x, float | complex | np.generic) for x in eqn.params.values()):
        return None
    key = (eqn.primitive, *((name, type(x), x) for name, x in eqn.params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def closed(program: Any) -> ClosedJaxpr:
    """A jaxpr with its constants; before JAX 0.12 a ``Jaxpr`` has none, since then it is a ``ClosedJaxpr``."""
    return program if hasattr(program, "consts") else ClosedJaxpr(program, ())


def without_unused(program: ClosedJaxpr, wanted: Sequence[bool]) -> tuple[ClosedJaxpr, Sequence[bool]]:
    """A program with the wanted results alone, and which of its operands these need."""
    jaxpr, used = dce_jaxpr(program.jaxpr, [*wanted])
    return ClosedJaxpr(jaxpr, program.consts), used


class Source(NamedTuple):
    """The line, the name scopes and the settings of JAX with which an operation was traced."""

    traceback: Any
    name_stack: Any
    settings: Any

    @property
    def line(self) -> str:
        """The line of the user's program, if possible not one of a library that the user's program calls."""
        if not self.traceback:
            return ""
        lines = summarize(self, num_frames=_FRAMES).split("\n")[::-1]  # type: ignore[arg-type]
        return next((line for line in lines if not _LIBRARIES.search(line)), lines[0])

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """A context in which operations have this source."""
        with user_context(self.traceback, name_stack=current_name_stack() + self.name_stack), self.settings.manager:
            yield

    def scopes_inside(self, call: Inlined) -> Any:
        """The name scopes inside of a call with this source."""
        return self.name_stack.extend(call.scope) if call.scope else self.name_stack

    @property
    def transforms(self) -> list[str]:
        """The names of JAX's transformations around the operation, which are of another type than scopes of a user."""
        return [each.name for each in self.name_stack.stack if type(each).__name__ == "Transform"]


def source_of(eqn: Any, stack: Any = None, traceback: Any = None) -> Source:
    """The source of an equation of a jaxpr, inside of a call with these name scopes, at its line if it has one."""
    info = eqn.source_info
    return Source(traceback or info.traceback, info.name_stack if stack is None else stack + info.name_stack, eqn.ctx)


def is_backward(eqn: Any) -> bool:
    """Whether an operation belongs to a backward pass, but not to one inside of another function's forward pass."""
    source = eqn.source if hasattr(eqn, "source") else source_of(eqn)
    found = [name for name in source.transforms if name in ("jvp", "transpose")]
    return found[:1] == ["transpose"] or eqn.primitive.name == "add_any"


def names_axes(effect: Any) -> bool:
    """Whether an effect of an operation is only that it names an axis of a mesh."""
    return type(effect).__name__ == "NamedAxisEffect"


def is_reference(aval: Any) -> bool:
    """Whether a type is that of a mutable array."""
    return hasattr(aval, "inner_aval")
