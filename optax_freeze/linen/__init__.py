"""Freezes modules of a Flax Linen model where the model is built; training needs no knowledge of the architecture.

:class:`Frozen` wraps a module without changing its paths, initial values, random streams and methods: each call runs in
``nn.map_variables``, where the module reads frozen parameters as constants and its statistics do not change.
:func:`freeze_variables` does the same for a module that is not wrapped, and :func:`frozen_mask` returns what the
wrappers in a model freeze.
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
from flax.core import Scope
from flax.linen.module import TestScope, wrap_method_once
from flax.traverse_util import flatten_dict, unflatten_dict

from optax_freeze._errors import described, refuse_unknown_choice, type_error, value_error
from optax_freeze._spec.resolve import Spec, register_with_flax
from optax_freeze._spec.tree import PyTree, name_of
from optax_freeze.linen._frozen_call import OVERWRITTEN, VariableFreezer
from optax_freeze.linen._recording import ModelCall, Recording

register_with_flax()


class Frozen(nn.Module):
    """Wraps a module so that its parameters are constants of the gradient. Gradients of its inputs do not change.

    Variables have the same paths and initial values as without the wrapper, so checkpoints are interchangeable. All
    methods and attributes of the module are available. If a module is also used without the wrapper, it has the
    gradient of that use.

    A zero gradient does not stop weight decay or momentum. Train with ``fz.freeze(tx, frozen_mask(model, x))``, or move
    the frozen parameters to another ``collection``, which the optimizer does not receive.

    Attributes:
      module: the module to freeze. It may have a name; the wrapper has none.
      frozen: the spec, in any form, with paths relative to the module.
      collection: None keeps the parameters in ``params``. A name moves the frozen ones to a collection of that name,
        which enclosing lifted transformations must list, too (``variable_axes``); whole leaves only.
      stats: ``"frozen"`` keeps the stored statistics: modules with ``use_running_average`` use them in whatever mode
        they are called, and the writes of others are dropped. ``"live"`` leaves both to the caller.
      stats_collections: the collections that hold statistics, or scales of float8 matmuls. Flax returns the new value
        of such a scale as its gradient; if frozen, this gradient is the stored value.

    Raises:
      TypeError: if ``module`` is not an instance of a Linen module.
      ValueError: if an option is wrong, a ``name`` is given, the spec does not fit the module's parameters, or the
        collection is one that the module itself uses.

    Example:
      >>> from optax_freeze.linen import Frozen
      >>> model = nn.Sequential([Frozen(nn.Dense(3)), nn.relu, nn.Dense(1)])
      >>> x = jax.numpy.ones((2, 4))
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> grads = jax.grad(lambda params: model.apply({"params": params}, x).sum())(params)
      >>> [float(jax.numpy.abs(grads[layer]["bias"]).sum()) for layer in ("layers_0", "layers_2")]
      [0.0, 2.0]
    """

    module: nn.Module
    frozen: Any = True
    collection: str | None = None
    stats: Literal["frozen", "live"] = "frozen"
    stats_collections: Sequence[str] = ("batch_stats", OVERWRITTEN)

    def __post_init__(self) -> None:
        _check_module(self.module, "Frozen")
        refuse_unknown_choice(self.stats, ("frozen", "live"), at="stats")
        _check_collection(self.collection, self.stats_collections)
        is_new = not isinstance(self.parent, (nn.Module, Scope, type(None)))
        if is_new and self.name is not None:
            got, fix = described(self.name), f"Frozen({type(self.module).__name__}(..., name={self.name!r}))"
            expected = "the name on the wrapped module, since Frozen is not part of parameter paths"
            raise value_error("Frozen does not take a name", at="name", got=got, expected=expected, fix=fix)
        super().__post_init__()
        if self.module.scope is not None:
            object.__setattr__(self, "scope", self.module.scope)
        object.__setattr__(self, "_shared_scope", self.scope)
        if self._state.is_initialized and isinstance(self._innermost.parent, Frozen):
            object.__setattr__(self._innermost, "name", self.name or self.module.name)
        elif self._state.is_initialized or (is_new and self.parent is None):
            object.__setattr__(self, "name", self._innermost.name)

    @nn.nowrap
    def _try_setup(self, shallow: bool = False) -> None:
        """How Linen prepares a module for a call; here ``module`` gets the scope of the wrapper."""
        if self.scope is not self._shared_scope:
            object.__setattr__(self, "_shared_scope", self.scope)
            nn.share_scope(self, self.module)

    @nn.nowrap
    def _register_submodules(self, name: str, val: Any) -> None:
        """How Linen binds the modules in a module's fields; here to the scope of the wrapper instead of a child."""
        scope = self.scope
        object.__setattr__(self, "scope", _OwnChild(scope))
        try:
            super()._register_submodules(name, val)
        finally:
            object.__setattr__(self, "scope", scope)

    @nn.nowrap
    def _call_wrapped_method(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """How Linen runs a method; here one of the module's class, if ``apply`` passes the wrapper as ``self``."""
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
        kind = inspect.getattr_static(type(module), name, None)
        is_plain = isinstance(kind, (staticmethod, classmethod)) or _is_plain_field(module, name)
        if module.scope is None or is_plain:
            return getattr(module, name)
        if isinstance(kind, types.FunctionType):

            @functools.wraps(kind)
            def method(frozen: Frozen, *args: Any, **kwargs: Any) -> Any:
                return frozen._run(lambda module, *args, **kwargs: getattr(module, name)(*args, **kwargs), args, kwargs)

            return types.MethodType(method, self)
        return _Member(self, ()).member(name)

    @property
    def variables(self) -> Mapping[str, Any]:
        """The module's variables as it reads them: frozen parameters are constants."""
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
    def _run(self, fun: Callable[..., Any], args: Any = (), kwargs: Any = None, *, is_call: bool = False) -> Any:
        """``fun(module, *args, **kwargs)`` with the frozen variables."""
        self._try_setup()
        stats = self.stats_collections if self.stats == "frozen" else ()
        freezer = VariableFreezer(self.frozen, self.collection, stats)
        return freezer.call(fun, self.module, args, kwargs or {}, is_call=is_call)


@contextlib.contextmanager
def freeze_variables(frozen: Spec, collection: str | None = None) -> Iterator[None]:
    """Freezes the parameters of the modules that are applied in this context.

    It takes effect while JAX traces, so open it inside the jitted function. Nested contexts add up.

    Args:
      frozen: the spec, in any form, with paths relative to the outermost module applied in the context. A pattern must
        match in each such application.
      collection: None keeps the parameters in ``params``, as constants of the gradient. A name moves the frozen ones to
        a collection of that name, in ``init`` as in ``apply``.

    Returns:
      A context manager.

    Raises:
      ValueError: if the spec does not fit, the collection cannot be used, no module is applied in the context, or the
        outermost one is itself transformed by ``nn.jit``, whose program would be reused outside of the context.

    Example:
      >>> from optax_freeze.linen import freeze_variables
      >>> with freeze_variables("kernel", collection="constants"):
      ...   variables = nn.Dense(3).init(jax.random.key(0), jax.numpy.ones((2, 4)))
      >>> jax.tree.map(jax.numpy.shape, variables)
      {'constants': {'kernel': (4, 3)}, 'params': {'bias': (3,)}}
    """
    _check_collection(collection, ())
    freezer = VariableFreezer(frozen, collection)
    inside, applied = False, False

    def interceptor(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        nonlocal inside, applied
        module = context.module
        if inside or module.scope is None or isinstance(module.scope.root, TestScope):
            return next_fun(*args, **kwargs)
        _refuse_jitted(module)
        if context.method_name == "setup":
            next_fun(*args, **kwargs)  # returns nothing
            return _refuse_params_of_setup(module) if collection else None
        inside = applied = True
        try:
            fun, is_call = wrap_method_once(context.orig_method.func), context.method_name == "__call__"
            return freezer.call(fun, module, args, kwargs, is_call=is_call)
        finally:
            inside = False

    with nn.intercept_methods(interceptor):
        yield
    if not applied:
        what = "no module was applied inside freeze_variables, so nothing is frozen"
        got = "a context without a call of a Linen module; an already compiled function does not call one"
        fix = "open the context inside the function that is jitted or differentiated"
        raise value_error(what, at="freeze_variables", got=got, expected="at least one call of a module", fix=fix)


def frozen_mask(model: nn.Module, *args: Any, **kwargs: Any) -> PyTree:
    """Returns the spec of the parameters that the :class:`Frozen` wrappers in a model freeze.

    Args:
      model: a Linen module.
      *args: the arguments of a call: arrays or ``jax.ShapeDtypeStruct``. The call is traced, not executed.
      **kwargs: keyword arguments of the call; ``method`` and ``rngs`` as for ``model.apply``.

    Returns:
      A tree of the structure of the ``params`` collection, a spec for every function of ``optax_freeze``. True if each
      use of a parameter in this call is frozen, or if it is unused in a frozen module; the element mask if each use is
      frozen in the same part; else False.

    Raises:
      TypeError: if ``model`` is not an instance of a Linen module.
      ValueError: if an element mask does not have the parameter's shape, as in a stack of layers.

    Example:
      >>> from optax_freeze.linen import Frozen, frozen_mask
      >>> model = nn.Sequential([Frozen(nn.Dense(3)), nn.relu, nn.Dense(1)])
      >>> frozen_mask(model, jax.ShapeDtypeStruct((2, 4), jax.numpy.float32))
      {'layers_0': {'bias': True, 'kernel': True}, 'layers_2': {'bias': False, 'kernel': False}}
    """
    _check_module(model, "frozen_mask")
    call = ModelCall(model, args, kwargs)
    variables = call.variables()
    declared = Recording()
    trains = call.reached(variables, declared)
    trains_whole = trains  # in a use of which no element is frozen
    if declared.has_parts:
        trains_whole = call.reached(variables, Recording(override=lambda answer: answer is not False))
    try:
        used = call.reached(variables, Recording(override=lambda answer: False))
    except (NotImplementedError, TypeError, ValueError):  # without wrappers it has no derivative, as a while loop
        used = set()

    def answer(path: tuple[str, ...], value: Any) -> Any:
        if path in trains and path not in trains_whole:
            return declared.element_mask(path, getattr(value, "shape", None))
        frozen = path not in trains and (path in used or declared.is_frozen(path))
        return jax.tree.map(lambda _: frozen, value)

    params = nn.meta.unbox(flatten_dict(variables.get("params", {})))
    return unflatten_dict({path: answer(path, value) for path, value in params.items()})


@dataclasses.dataclass(frozen=True)
class _OwnChild:
    """A scope that is its own child, whatever the name."""

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
    """A method, submodule or variable of a frozen module, which is called and read with the frozen variables."""

    owner: Frozen
    keys: tuple[Any, ...]
    number: int = dataclasses.field(default_factory=itertools.count().__next__)
    """Makes each member unequal to others: a program kept by ``nn.jit`` holds the variables of the traced call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._get(module)(*args, **kwargs)

        return self.owner._run(call, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.member(name)

    def member(self, name: str) -> Any:
        """An attribute, in which methods, modules and variables are members again."""
        here = _Member(self.owner, (*self.keys, jax.tree_util.GetAttrKey(name)))

        def as_member(key: Any, leaf: Any) -> Any:
            is_member = isinstance(leaf, (nn.Module, nn.Variable)) or inspect.ismethod(leaf)
            return _Member(self.owner, (*here.keys, *key)) if is_member else leaf

        return self.owner._run(lambda module: jax.tree_util.tree_map_with_path(as_member, here._get(module)))

    def _get(self, node: Any) -> Any:
        """What this is a member for, in the module itself."""
        for key in self.keys:
            name = name_of(key)
            node = getattr(node, name) if isinstance(key, jax.tree_util.GetAttrKey) else node[name]
        return node


def _check_module(module: Any, name: str) -> None:
    if isinstance(module, nn.Module):
        return
    is_class = isinstance(module, type) and issubclass(module, nn.Module)
    at, expected = "its first argument", "an instance of flax.linen.Module"
    fix = f"{name}({module.__name__}(...))" if is_class else "for an NNX module, use optax_freeze.nnx"
    raise type_error(f"{name} takes a Linen module", at=at, got=described(module), expected=expected, fix=fix)


def _check_collection(collection: Any, stats_collections: Any) -> None:
    is_sequence = isinstance(stats_collections, Iterable) and not isinstance(stats_collections, str)
    if not is_sequence or not all(isinstance(name, str) for name in stats_collections):
        at, got = "stats_collections", described(stats_collections)
        expected, fix = "a sequence of names", 'stats_collections=("batch_stats",)'
        raise value_error("collections are given by their names", at=at, got=got, expected=expected, fix=fix)
    is_usable = isinstance(collection, str) and collection not in ("", "params", *stats_collections)
    if (collection is not None and not is_usable) or "params" in stats_collections:
        at, got = ("stats_collections", stats_collections) if collection is None else ("collection", collection)
        expected = "a name that is neither 'params' nor a collection of statistics"
        fix = 'collection="frozen"; for constants within params, collection=None'
        raise value_error("this collection cannot be used", at=at, got=repr(got), expected=expected, fix=fix)


def _is_plain_field(module: nn.Module, name: str) -> bool:
    """Whether an attribute is an argument of the constructor that holds no module."""
    is_field = name in type(module).__dataclass_fields__ and name in vars(module)
    return is_field and not any(isinstance(leaf, nn.Module) for leaf in jax.tree.leaves(vars(module)[name]))


def _refuse_jitted(module: nn.Module) -> None:
    """Refuses a module whose calls ``nn.jit`` compiles, and reuses outside of the context."""
    assert isinstance(module.scope, Scope)
    if any("jit(" in name for name in module.scope.debug_path[-1:]):
        what = "freeze_variables cannot freeze a module that is itself transformed by nn.jit"
        at, got = type(module).__name__, "a program that nn.jit caches and also runs outside the context"
        expected = "a module that is not transformed by nn.jit; it may contain transformed modules"
        raise value_error(what, at=at, got=got, expected=expected, fix="nn.Sequential([module]), or Frozen(module)")


def _refuse_params_of_setup(module: nn.Module) -> None:
    """Refuses parameters of the outermost module's ``setup``, which Linen runs before the call that is frozen."""
    params = module.variables.get("params", {})
    own = [name for name, value in params.items() if not isinstance(value, Mapping)]
    if module.is_initializing() and own:
        what = "a parameter is made in `setup` of the outermost module, where it cannot be moved to a collection"
        got = f"self.param({own[0]!r}, ...) in {type(module).__name__}.setup"
        expected = "parameters made in a compact method or in submodules"
        fix = "wrap the module by Frozen(module, collection=...)"
        raise value_error(what, at=own[0], got=got, expected=expected, fix=fix)
