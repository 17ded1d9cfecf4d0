"""Finds what the wrappers in a model freeze, by tracing a call of the model and its gradient; nothing is computed.

A gradient depends on the cotangent of the outputs exactly where it reaches a parameter past all wrappers. What each
wrapper says of its parameters is recorded while it runs.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import DenyList, Scope, apply, unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from optax_freeze._errors import value_error
from optax_freeze._program.dependence import depends_on
from optax_freeze._spec.masks import Elements

Path: TypeAlias = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Recording:
    """The answers of all frozen modules in a model, for each use of a parameter; active while the model runs."""

    override: Callable[[Any], Any] = lambda answer: answer
    """From an answer to the one that the module acts on instead."""
    answers: dict[Path, list[tuple[Any, Any]]] = dataclasses.field(default_factory=dict)
    """For each parameter the answers, each with the shape that the parameter has there."""
    flags: dict[str, int] = dataclasses.field(default_factory=lambda: {"recording": next(_numbers)})
    """For the scopes: ``nn.jit`` tells programs apart by them, and would reuse that of another recording."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        token = active_recording.set(self)
        try:
            yield
        finally:
            active_recording.reset(token)

    @property
    def has_parts(self) -> bool:
        return any(not isinstance(answer, bool) for uses in self.answers.values() for answer, _ in uses)

    def is_frozen(self, path: Path) -> bool:
        return all(answer is True for answer, _ in self.answers.get(path, [(False, None)]))

    def element_mask(self, path: Path, shape: tuple[int, ...] | None) -> Any:
        """The element mask of a parameter of which each use is frozen, and some in part."""
        (first, inner), *others = [use for use in self.answers[path] if use[0] is not True]
        differ = [other for other, _ in others if not _same_mask(first, other)]
        if inner != shape or differ:
            what, expected = "one element mask does not fit all uses of a parameter", f"one for its shape {shape}"
            got = f"{first!r} for a shape of {inner}" if inner != shape else f"{first!r} and {differ[0]!r}"
            fix = "give the optimizer the mask itself: fz.freeze(tx, fz.rules({path: mask}))"
            raise value_error(what, at="/".join(path), got=got, expected=expected, fix=fix)
        return first


_numbers = itertools.count()
active_recording: contextvars.ContextVar[Recording | None] = contextvars.ContextVar("recording", default=None)


class ModelCall:
    """A call of a Linen model that is only traced: each array among its arguments may be a shape."""

    def __init__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.model = model
        rngs = kwargs.pop("rngs", None)
        given = rngs if isinstance(rngs, Mapping) else {} if rngs is None else {"params": rngs}
        self.rngs = {"params": jax.random.key(0), **given}
        self.leaves, self.treedef = jax.tree.flatten((args, kwargs))
        self.arrays = {i: x for i, x in enumerate(self.leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}

    def variables(self) -> dict[str, Any]:
        """The shapes of the variables that ``model.init`` makes."""

        def init(arrays: Mapping[int, Any]) -> Any:
            return self._call(lambda *args, rngs, **kwargs: self.model.init(rngs, *args, **kwargs), arrays)

        return dict(unfreeze(jax.eval_shape(init, self.arrays)))

    def reached(self, variables: Mapping[str, Any], recording: Recording) -> set[Path]:
        """The paths of the parameters that the gradient of the outputs reaches."""
        params = flatten_dict(variables.get("params", {}))
        others = {name: tree for name, tree in variables.items() if name != "params"}
        inexact = [path for path, leaf in params.items() if all(map(_is_inexact, jax.tree.leaves(leaf)))]
        run = apply(self._bound, mutable=bool(others) and DenyList("params"), flags=recording.flags)

        def gradient(params: Any, others: Any, arrays: Any, cotangent: Any) -> Any:
            def outputs(moving: Any) -> list[Any]:
                variables = {"params": unflatten_dict({**params, **moving}), **others}
                output = self._call(functools.partial(run, variables), arrays)
                return [leaf for leaf in jax.tree.leaves(output) if _is_inexact(leaf)]

            values, pullback = jax.vjp(outputs, {path: params[path] for path in inexact})
            return pullback([jnp.full_like(value, cotangent) for value in values])[0]

        with recording.active():
            jaxpr, grads = jax.make_jaxpr(gradient, return_shape=True)(params, others, self.arrays, 1.0)
        depends = depends_on(jaxpr, [False] * (len(jaxpr.in_avals) - 1) + [True])
        depends = jax.tree.unflatten(jax.tree.structure(grads), depends)
        return {path for path in inexact if any(jax.tree.leaves(depends[path]))}

    def _call(self, function: Callable[..., Any], arrays: Mapping[int, Any]) -> Any:
        """``function`` with the arguments of the call, in which ``arrays`` are the arrays."""
        args, kwargs = jax.tree.unflatten(self.treedef, [arrays.get(i, leaf) for i, leaf in enumerate(self.leaves)])
        return function(*args, rngs=self.rngs, **kwargs)

    def _bound(self, scope: Scope, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """What ``model.apply`` does, which takes no flags."""
        module = self.model.copy(parent=scope)
        if isinstance(method, str):
            return getattr(module, method)(*args, **kwargs)
        return getattr(method, "__func__", method or type(self.model).__call__)(module, *args, **kwargs)


def _is_inexact(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _same_mask(a: Any, b: Any) -> bool:
    if isinstance(a, Elements) and isinstance(b, Elements):
        return a.compact == b.compact and np.array_equal(a.array, b.array)
    return a == b
