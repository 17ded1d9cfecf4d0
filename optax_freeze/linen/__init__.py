"""Freezing declared where a Flax Linen model is built, so that training needs no knowledge of the architecture.

:class:`Frozen` wraps a module and is otherwise invisible: it stands at the module's own place among the variables, with
the module's paths, initial values, random streams and methods. What changes is what the module reads: each call runs in
``nn.map_variables``, which hands it the frozen parameters as constants and drops what it writes to its statistics.
:func:`freeze_variables` does the same for a module that is not wrapped, and :func:`frozen_mask` reads off a finished
model what its wrappers freeze.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import DenyList, FrozenDict, Scope, apply, unfreeze
from flax.linen.module import TestScope as RehearsalScope
from flax.linen.module import wrap_method_once
from flax.traverse_util import flatten_dict, unflatten_dict

from optax_freeze._errors import described, type_error, value_error
from optax_freeze._gradient.jaxprs import depends_on
from optax_freeze._spec.resolve import Spec, register_with_flax
from optax_freeze._spec.tree import PyTree
from optax_freeze.linen._lift import Freezing, Probe

register_with_flax()


class Frozen(nn.Module):
    """A module whose parameters are constants of the gradient, and whose inputs are not.

    Variables have the paths and initial values that they have without the wrapper, so that a checkpoint of one loads
    into the other. Every method of the module can be called and its attributes can be read. Freezing is per
    application: a module that is used bare as well has the gradient of that use.

    A gradient of zero does not stop weight decay or momentum: train with ``fz.freeze(tx, frozen_mask(model, x))``, or
    give the frozen parameters a ``collection`` of their own, which no optimizer sees.

    Attributes:
      module: the module to freeze. Its name counts; the wrapper has none.
      frozen: what is frozen of it, in any form, with paths relative to the module.
      collection: None keeps the parameters in ``params``. A name moves the frozen ones to a collection of that name,
        which enclosing lifts must carry too (``variable_axes``); whole leaves only.
      stats: ``"frozen"`` keeps the statistics as they are stored: modules with ``use_running_average`` use them in
        whatever mode they are called, and others lose what they write. ``"live"`` leaves both to the caller.
      stats_collections: the collections that hold statistics.

    Raises:
      TypeError: if ``module`` is no instance of a Linen module.
      ValueError: if an option is wrong, a ``name`` is given, the spec does not fit the module's parameters, or the
        collection is one that the module itself uses.

    Example:
      >>> from optax_freeze.linen import Frozen
      >>> model = nn.Sequential([Frozen(nn.Dense(3)), nn.relu, nn.Dense(1)])
      >>> x = jnp.ones((2, 4))
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> grads = jax.grad(lambda params: model.apply({"params": params}, x).sum())(params)
      >>> [float(jnp.abs(grads[layer]["bias"]).sum()) for layer in ("layers_0", "layers_2")]
      [0.0, 2.0]
    """

    module: nn.Module
    frozen: Any = True
    collection: str | None = None
    stats: Literal["frozen", "live"] = "frozen"
    stats_collections: Sequence[str] = ("batch_stats",)

    def __post_init__(self) -> None:
        _check_module(self.module, "Frozen")
        if self.stats not in ("frozen", "live"):
            raise value_error(
                "unknown choice",
                at="stats",
                got=described(self.stats),
                expected="'frozen' or 'live'",
                fix="use one",
            )
        _check_collection(self.collection, self.stats_collections)
        is_new = not isinstance(self.parent, (nn.Module, Scope, type(None)))
        if is_new and self.name is not None:
            raise value_error(
                "a Frozen has no name of its own",
                at="name",
                got=described(self.name),
                expected="a name on the module inside, since parameter paths are those of the bare module",
                fix=f"Frozen({type(self.module).__name__}(..., name={self.name!r}))",
            )
        super().__post_init__()
        if self.module.scope is not None:
            object.__setattr__(self, "scope", self.module.scope)
        object.__setattr__(self, "_place", self.scope)
        if self._state.is_initialized and isinstance(self._innermost.parent, Frozen):
            object.__setattr__(self._innermost, "name", self.name or self.module.name)
        elif self._state.is_initialized or (is_new and self.parent is None):
            object.__setattr__(self, "name", self._innermost.name)

    @nn.nowrap
    def _try_setup(self, shallow: bool = False) -> None:
        """How Linen prepares a module for a call: here ``module`` follows where ``nn.share_scope`` took the wrapper."""
        if self.scope is not self._place:
            object.__setattr__(self, "_place", self.scope)
            nn.share_scope(self, self.module)

    @nn.nowrap
    def _register_submodules(self, name: str, val: Any) -> None:
        """How Linen binds the modules among a module's fields; here in the wrapper's place, and not below it."""
        scope = self.scope
        object.__setattr__(self, "scope", _SamePlace(scope))
        try:
            super()._register_submodules(name, val)
        finally:
            object.__setattr__(self, "scope", scope)

    @nn.nowrap
    def _call_wrapped_method(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """How Linen runs a method: here one of the module's class, when ``apply`` gives it a wrapper as ``self``."""
        return self._run(wrap_method_once(fun), args, kwargs)

    @nn.nowrap
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self._run(lambda module, *args, **kwargs: module(*args, **kwargs), args, kwargs, is_call=True)

    @nn.nowrap
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "module" not in vars(self):
            raise AttributeError(name)
        module = self._innermost
        if module.scope is None:
            return getattr(module, name)
        kind = inspect.getattr_static(type(module), name, None)
        if isinstance(kind, types.FunctionType):

            @functools.wraps(kind)
            def method(frozen: Frozen, *args: Any, **kwargs: Any) -> Any:
                return frozen._run(lambda module, *args, **kwargs: getattr(module, name)(*args, **kwargs), args, kwargs)

            return types.MethodType(method, self)
        if isinstance(kind, (staticmethod, classmethod)) or _is_plain_field(module, name):
            return getattr(module, name)
        return _Member(self, ()).member(name)

    @property
    def variables(self) -> Mapping[str, Any]:
        """The module's variables as it reads them: what is frozen of the parameters is constant."""
        return super().variables if self.collection else self._run(lambda module: module.variables)

    @nn.nowrap
    def get_variable(self, col: str, name: str, default: Any = None) -> Any:
        """A variable as the module reads it."""
        return self._run(lambda module: module.get_variable(col, name, default))

    @property
    def _innermost(self) -> nn.Module:
        self._try_setup()
        return self.module._innermost if isinstance(self.module, Frozen) else self.module

    @nn.nowrap
    def _run(
        self,
        fun: Callable[..., Any],
        args: Any = (),
        kwargs: Mapping[str, Any] = FrozenDict(),
        *,
        is_call: bool = False,
    ) -> Any:
        """``fun(module, *args, **kwargs)`` with the frozen variables."""
        self._try_setup()
        frozen = unfreeze(self.frozen) if isinstance(self.frozen, FrozenDict) else self.frozen
        stats = self.stats_collections if self.stats == "frozen" else ()
        return Freezing(frozen, self.collection, stats).run(fun, self.module, args, kwargs, is_call=is_call)


@contextlib.contextmanager
def freeze_variables(frozen: Spec, collection: str | None = None) -> Iterator[None]:
    """Freezes the parameters of the modules that are applied inside it.

    It acts while JAX traces: open it inside the jitted function. Contexts nest; what any of them freezes is frozen.

    Args:
      frozen: what is frozen, in any form, with paths relative to the outermost module applied inside the context. A
        pattern must match in each such application.
      collection: None keeps the parameters in ``params``, as constants of the gradient. A name moves the frozen ones to
        a collection of that name, under ``init`` as under ``apply``.

    Returns:
      A context manager.

    Raises:
      ValueError: if the spec does not fit, the collection cannot be used, no module is applied inside the context, or
        the outermost one is itself transformed by ``nn.jit``, whose program would be run outside the context too.

    Example:
      >>> from optax_freeze.linen import freeze_variables
      >>> model = nn.Sequential([nn.Dense(3), nn.relu, nn.Dense(1)])
      >>> x = jnp.ones((2, 4))
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> def loss(params):
      ...   with freeze_variables("layers_0"):
      ...     return model.apply({"params": params}, x).sum()
      >>> grads = jax.grad(loss)(params)
      >>> [float(jnp.abs(grads[layer]["bias"]).sum()) for layer in ("layers_0", "layers_2")]
      [0.0, 2.0]
    """
    _check_collection(collection, ())
    freezing = Freezing(frozen, collection)
    inside, applied = False, False

    def interceptor(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        nonlocal inside, applied
        scope = context.module.scope
        if inside or scope is None or isinstance(scope.root, RehearsalScope):
            return next_fun(*args, **kwargs)
        if any("jit(" in name for name in scope.debug_path[-1:]):
            raise value_error(
                "freeze_variables cannot freeze a module that is itself transformed by nn.jit",
                at=type(context.module).__name__,
                got="a program that nn.jit keeps, and runs outside the context too",
                expected="a module that nn.jit leaves alone, or that holds the transformed one",
                fix="nn.Sequential([module]), or Frozen(module)",
            )
        if context.method_name == "setup":
            output = next_fun(*args, **kwargs)
            if collection:
                _refuse_params_of_setup(context.module)
            return output
        inside = applied = True
        try:
            fun, is_call = wrap_method_once(context.orig_method.func), context.method_name == "__call__"
            return freezing.run(fun, context.module, args, kwargs, is_call=is_call)
        finally:
            inside = False

    with nn.intercept_methods(interceptor):
        yield
    if not applied:
        raise value_error(
            "no module was applied inside freeze_variables, and nothing is frozen",
            at="freeze_variables",
            got="a context without a call of a Linen module; a jitted function that is already compiled is none",
            expected="at least one application",
            fix="open the context inside the function that is jitted or differentiated",
        )


def frozen_mask(model: nn.Module, *args: Any, **kwargs: Any) -> PyTree:
    """What the :class:`Frozen` wrappers in a model freeze: the spec for an optimizer that knows nothing of the model.

    Args:
      model: a Linen module.
      *args: the arguments of a call: arrays or ``jax.ShapeDtypeStruct``. No arithmetic is done.
      **kwargs: keyword arguments of the call; ``method`` and ``rngs`` as for ``model.apply``.

    Returns:
      A tree of the structure of the ``params`` collection, a spec for every function of ``optax_freeze``. True where
      each use of a parameter in this call is frozen, or where it stands unused in a frozen module; the element mask
      where each use is frozen in the same part; else False.

    Raises:
      TypeError: if ``model`` is no instance of a Linen module.
      ValueError: if an element mask is not of the parameter's shape, as in a stack of layers.

    Example:
      >>> from optax_freeze.linen import Frozen, frozen_mask
      >>> model = nn.Sequential([Frozen(nn.Dense(3)), nn.relu, nn.Dense(1)])
      >>> frozen_mask(model, jax.ShapeDtypeStruct((2, 4), jnp.float32))
      {'layers_0': {'bias': True, 'kernel': True}, 'layers_2': {'bias': False, 'kernel': False}}
    """
    _check_module(model, "frozen_mask")
    rngs = kwargs.pop("rngs", None)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

    def call(function: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        given = dict(zip(places, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(treedef, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(*args, rngs={"params": jax.random.key(0)} if rngs is None else rngs, **kwargs)

    def init(arrays: Sequence[Any]) -> Any:
        return call(lambda *args, rngs, **kwargs: model.init(rngs, *args, **kwargs), arrays)

    def bound(scope: Scope, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """What ``model.apply`` does, which takes no flags."""
        module = model.copy(parent=scope)
        if isinstance(method, str):
            return getattr(module, method)(*args, **kwargs)
        return getattr(method, "__func__", method or type(model).__call__)(module, *args, **kwargs)

    arrays = [leaves[i] for i in places]
    variables = dict(unfreeze(jax.eval_shape(init, arrays)))
    params = flatten_dict(variables.pop("params", {}))
    inexact = [path for path, leaf in params.items() if all(map(_is_inexact, jax.tree.leaves(leaf)))]

    def reached(probe: Probe) -> set[Any]:
        """The parameters that a gradient comes to."""

        def gradient(params: Any, variables: Any, arrays: Any, scale: Any) -> Any:
            def outputs(moving: Any) -> list[Any]:
                everything = {"params": unflatten_dict({**params, **moving}), **variables}
                run = apply(bound, mutable=bool(variables) and DenyList("params"), flags=probe.flags)
                output = call(functools.partial(run, everything), arrays)
                return [leaf for leaf in jax.tree.leaves(output) if _is_inexact(leaf)]

            values, pullback = jax.vjp(outputs, {path: params[path] for path in inexact})
            return pullback([jnp.full_like(value, scale) for value in values])[0]

        with probe.active():
            jaxpr, grads = jax.make_jaxpr(gradient, return_shape=True)(params, variables, arrays, 1.0)
        marks = depends_on(jaxpr, [False] * (len(jaxpr.in_avals) - 1) + [True])
        marks = jax.tree.unflatten(jax.tree.structure(grads), marks)
        return {path for path in inexact if any(jax.tree.leaves(marks[path]))}

    declared = Probe()
    trains = reached(declared)
    try:
        used = reached(Probe(lambda answer: False))
    except (NotImplementedError, TypeError, ValueError):  # the bare model has no derivative, as that of a while loop
        used = set()
    bare = reached(Probe(lambda answer: answer is not False)) if declared.has_parts else trains
    mask = {}
    for path, leaf in params.items():
        value = nn.meta.unbox(leaf)
        if path in trains and path not in bare:
            mask[path] = declared.part(path, getattr(value, "shape", None))
        else:
            is_frozen = path not in bare and (path in used or declared.is_frozen(path))
            mask[path] = jax.tree.map(lambda _, answer=is_frozen: answer, value)
    return unflatten_dict(mask)


@dataclasses.dataclass(frozen=True)
class _SamePlace:
    """A scope whose children stand where it stands."""

    scope: Any

    @property
    def root(self) -> Any:
        return self.scope.root

    def name_reserved(self, name: str, col: str | None = None) -> bool:
        return False

    def push(self, name: str, reuse: bool = False) -> Any:
        return self.scope


@dataclasses.dataclass(frozen=True)
class _Member:
    """A method, submodule or variable of a frozen module: called, and looked into, with the frozen variables."""

    owner: Frozen
    keys: tuple[Any, ...]
    number: int = dataclasses.field(default_factory=itertools.count().__next__)
    """Never the same: a program that ``nn.jit`` keeps holds the variables of the call that was traced."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._reach(module)(*args, **kwargs)

        return self.owner._run(call, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.member(name)

    def member(self, name: str) -> Any:
        """An attribute, in which methods, modules and variables are members again."""
        here = _Member(self.owner, (*self.keys, jax.tree_util.GetAttrKey(name)))

        def mark(key: Any, leaf: Any) -> Any:
            is_member = isinstance(leaf, (nn.Module, nn.Variable)) or inspect.ismethod(leaf)
            return _Member(self.owner, (*here.keys, *key)) if is_member else leaf

        return self.owner._run(lambda module: jax.tree_util.tree_map_with_path(mark, here._reach(module)))

    def _reach(self, module: Any) -> Any:
        for key in self.keys:
            if isinstance(key, jax.tree_util.GetAttrKey):
                module = getattr(module, key.name)
            else:
                module = module[key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key]
        return module


def _check_module(module: Any, name: str) -> None:
    if isinstance(module, nn.Module):
        return
    is_class = isinstance(module, type) and issubclass(module, nn.Module)
    raise type_error(
        f"{name} takes a Linen module",
        at="its first argument",
        got=described(module),
        expected="an instance of flax.linen.Module",
        fix=f"{name}({module.__name__}(...))" if is_class else "for an NNX module, use optax_freeze.nnx",
    )


def _check_collection(collection: Any, stats_collections: Any) -> None:
    is_sequence = isinstance(stats_collections, Iterable) and not isinstance(stats_collections, str)
    if not is_sequence or not all(isinstance(name, str) for name in stats_collections):
        raise value_error(
            "collections are given by their names",
            at="stats_collections",
            got=described(stats_collections),
            expected="a sequence of names",
            fix='stats_collections=("batch_stats",)',
        )
    is_usable = isinstance(collection, str) and collection not in ("", "params", *stats_collections)
    if (collection is not None and not is_usable) or "params" in stats_collections:
        raise value_error(
            "a collection that cannot be used",
            at="stats_collections" if collection is None else "collection",
            got=repr(stats_collections if collection is None else collection),
            expected="a name of its own, neither that of the parameters nor that of the statistics",
            fix='collection="frozen"; for constants within params, collection=None',
        )


def _is_plain_field(module: nn.Module, name: str) -> bool:
    """Whether an attribute is a value that was given to the constructor, and no module."""
    is_field = name in type(module).__dataclass_fields__ and name in vars(module)
    return is_field and not any(isinstance(leaf, nn.Module) for leaf in jax.tree.leaves(vars(module)[name]))


def _is_inexact(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _refuse_params_of_setup(module: nn.Module) -> None:
    """Linen runs the outermost module's setup before the call that a context can act on."""
    params = module.variables.get("params", {})
    own = [name for name, value in params.items() if not isinstance(value, Mapping)]
    if module.is_initializing() and own:
        raise value_error(
            "a parameter is made in `setup` of the outermost module, where it cannot be moved to a collection",
            at=own[0],
            got=f"self.param({own[0]!r}, ...) in {type(module).__name__}.setup",
            expected="parameters made in a compact method or in submodules",
            fix="wrap the module by Frozen(module, collection=...)",
        )
