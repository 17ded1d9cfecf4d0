"""Freezing in Flax NNX, where the type of a variable says what it is for.

``nnx.grad`` and ``nnx.Optimizer(wrt=nnx.Param)`` go by that type, so a frozen parameter is a :class:`FrozenParam`, no
``nnx.Param``: nothing has to be masked, and no gradient is computed for it. :func:`freeze` and :func:`thaw` change the
type in place; :class:`Frozen` wraps a module and holds its batch statistics too; :func:`trainable` leaves the types as
they are, and says what trains as an NNX filter.

A variable has one type, so one that several modules share is frozen in all of them. It answers to each of its paths.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import numpy as np
from flax import nnx

from optax_freeze._errors import described, type_error, value_error
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.resolve import Spec, make_plan, register_with_flax, warn_of_extent
from optax_freeze._spec.selection import FROZEN

register_with_flax()

_Module = TypeVar("_Module", bound=nnx.Pytree)
Stats = Literal["frozen", "live"]

_THAWS_TO = "thaws_to"
"""The metadata that keeps the type which a frozen parameter had, if that was not ``nnx.Param`` itself."""


class FrozenParam(nnx.Variable):
    """A parameter that no gradient and no optimizer sees: an ``nnx.Variable`` that is no ``nnx.Param``.

    It keeps the value and the metadata of the parameter it was, and reads and writes as that did: a type of yours that
    overrides ``get_value`` or ``set_value`` still computes the same. One that you make yourself thaws to ``nnx.Param``.

    Example:
      >>> import numpy as np
      >>> from flax import nnx
      >>> import optax_freeze.nnx as fnnx
      >>> linear = fnnx.freeze(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "kernel")
      >>> type(linear.kernel).__name__, type(linear.bias).__name__
      ('FrozenParam', 'Param')
      >>> nnx.to_pure_dict(nnx.grad(lambda linear: linear(np.ones(2)).sum())(linear))
      {'bias': Array([1., 1., 1.], dtype=float32)}
    """

    def get_value(self, **kwargs: Any) -> Any:
        return _thawed(self).get_value(**kwargs)

    def set_value(self, value: Any, **kwargs: Any) -> None:
        param = _thawed(self)
        param.set_value(value, **kwargs)
        self.update_from_state(_frozen(param))


def freeze(module: _Module, frozen: Spec) -> _Module:
    """Freezes parameters of a module in place: ``nnx.Param`` becomes :class:`FrozenParam`.

    Values and paths stay. Freezing again adds to what is frozen; only :func:`thaw` takes from it. An ``nnx.Optimizer``
    that exists already was made for other parameters: make it anew.

    Args:
      module: an NNX module, with parameters frozen or not.
      frozen: what is frozen, in any form but element masks; paths and trees are those of ``module``'s parameters. A
        shared variable is matched by any of its paths. Integer parameters are frozen whatever the spec says.

    Returns:
      ``module`` itself.

    Raises:
      TypeError: if ``module`` is no NNX module.
      ValueError: if the spec does not fit, or freezes elements of a parameter, or one of a Linen module in an
        ``nnx.bridge.ToNNX``, which could not be called any more.

    Example:
      >>> import optax
      >>> from flax import nnx
      >>> import optax_freeze.nnx as fnnx
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs))
      >>> model = fnnx.freeze(model, "layers/0")
      >>> [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
      [('layers', 1, 'bias'), ('layers', 1, 'kernel')]
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    """
    params = _params(module, frozen, "freeze")
    chosen = [p for p in params if p.frozen and not _is_frozen(p.variable)]
    _refuse_bridge(module, chosen)
    _retype(module, {id(p.variable): _frozen(p.variable) for p in chosen})
    return module


def thaw(module: _Module, frozen: Spec = True) -> _Module:
    """Undoes :func:`freeze` in place: :class:`FrozenParam` becomes the type of parameter that it was.

    Values, paths and metadata stay. A :class:`Frozen` goes on holding its batch statistics: take the module out of it
    (``frozen.module``) to release them.

    Args:
      module: an NNX module, with parameters frozen or not.
      frozen: which of the frozen parameters train again, in any form but element masks; True for all. Integer
        parameters, which cannot train, get their type back by True alone.

    Returns:
      ``module`` itself.

    Raises:
      TypeError: if ``module`` is no NNX module.
      ValueError: if the spec does not fit, or names elements of a parameter.

    Example:
      >>> from flax import nnx
      >>> import optax_freeze.nnx as fnnx
      >>> model = fnnx.freeze(nnx.LoRA(2, 1, 2, rngs=nnx.Rngs(0)), True)
      >>> type(fnnx.thaw(model, "lora_a").lora_a).__name__, type(model.lora_b).__name__
      ('LoRAParam', 'FrozenParam')
    """
    params = _params(module, frozen, "thaw")
    everything = isinstance(frozen, (bool, np.bool_)) and bool(frozen)
    chosen = [p for p in params if p.frozen and (p.inexact or everything)]
    _retype(module, {id(p.variable): _thawed(p.variable) for p in chosen if _is_frozen(p.variable)})
    return module


@dataclasses.dataclass(frozen=True, repr=False)
class _Trainable:
    """An NNX filter: the parameters at some paths, as long as they are parameters."""

    paths: frozenset[str]

    def __call__(self, path: tuple[Any, ...], value: Any) -> bool:
        return "/".join(map(str, path)) in self.paths and not _is_frozen(value)

    def __repr__(self) -> str:
        return f"fnnx.trainable(<{len(self.paths)} paths>)"


def trainable(frozen: Spec, module: nnx.Pytree) -> Any:
    """What trains, as an NNX filter for ``nnx.Optimizer(wrt=...)``, ``nnx.split`` and ``nnx.state``.

    The types of the variables stay, so ``nnx.grad`` goes on computing all gradients: take those that the optimizer
    wants by ``nnx.state(grads, wrt)``, or differentiate the state that ``nnx.split`` gives.

    Args:
      frozen: what is frozen, in any form but element masks.
      module: the module that the filter is for; it is not changed.

    Returns:
      A filter, compared by value: True at the paths of the parameters that train, a :class:`FrozenParam` never.

    Raises:
      TypeError: if ``module`` is no NNX module.
      ValueError: if the spec does not fit or freezes elements of a parameter, or if nothing trains.

    Example:
      >>> import numpy as np, optax
      >>> from flax import nnx
      >>> import optax_freeze.nnx as fnnx
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs))
      >>> wrt = fnnx.trainable("layers/0", model)
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=wrt)
      >>> grads = nnx.grad(lambda model: model(np.ones(2)).sum())(model)
      >>> _ = optimizer.update(model, nnx.state(grads, wrt))
    """
    params = _params(module, frozen, "trainable")
    paths = [path for p in params if not p.frozen and not _is_frozen(p.variable) for path in p.paths]
    if not paths:
        raise value_error(
            "nothing trains",
            at=f"trainable({frozen!r}, ...)",
            got=f"{len(params)} parameters, all frozen",
            expected="at least one parameter that trains",
            fix="freeze less: fz.only('head'); or thaw(module) first",
        )
    return _Trainable(frozenset(paths))


class Frozen(nnx.Module):
    """A module whose parameters and batch statistics are held, and through which gradients flow to what is before it.

    Its parameters become :class:`FrozenParam` in place, one segment deeper (``module``). It is called like the module,
    and all methods and attributes of the module can be reached; a submodule comes out wrapped likewise.

    Args:
      module: an NNX module.
      frozen: what is frozen of it, in any form but element masks, relative to the module.
      stats: ``"frozen"`` holds every ``nnx.BatchStat`` during a call, and modules that have ``use_running_average``
        use the stored statistics, whatever ``train()`` or an argument of the call says; ``"live"`` leaves both to the
        caller. Dropout is always the caller's choice, and its counts advance.

    Attributes:
      module: the module itself. What is called on it directly is not held.
      stats: as given.

    Raises:
      TypeError: if ``module`` is no NNX module.
      ValueError: if ``stats`` is unknown, or the spec does not fit.

    Example:
      >>> import numpy as np
      >>> from flax import nnx
      >>> import optax_freeze.nnx as fnnx
      >>> rngs = nnx.Rngs(0)
      >>> norm = nnx.BatchNorm(2, rngs=rngs)
      >>> model = nnx.Sequential(fnnx.Frozen(norm), nnx.Linear(2, 1, rngs=rngs))
      >>> model.train()
      >>> _ = model(np.ones((4, 2)))
      >>> norm.mean[...]
      Array([0., 0.], dtype=float32)
    """

    def __init__(self, module: nnx.Module, frozen: Spec = True, stats: Stats = "frozen"):
        _check_module(module, "Frozen")
        if stats not in get_args(Stats):
            what, fix = "unknown choice", "use one of them"
            raise value_error(what, at="stats", got=repr(stats), expected="'frozen' or 'live'", fix=fix)
        self.module = module
        self.stats: Stats = stats
        if frozen is not False:
            freeze(module, frozen)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._statistics():
            return self.module(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    def __getattr__(self, name: str) -> Any:
        if _is_own(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._through(getattr(self.module, name))

    def __getitem__(self, key: Any) -> Any:
        value = self.module[key]  # pyright: ignore[reportIndexIssue]
        return [self._through(item) for item in value] if isinstance(value, list) else self._through(value)

    def __iter__(self) -> Iterator[Any]:
        return map(self._through, self.module)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def __len__(self) -> int:
        return len(self.module)  # pyright: ignore[reportArgumentType]

    def __bool__(self) -> bool:
        return True

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def _through(self, value: Any) -> Any:
        """A method that holds the statistics while it runs, a submodule that is held likewise, or a plain value."""
        if isinstance(value, nnx.Module):
            return value if isinstance(value, Frozen) else Frozen(value, False, self.stats)
        if not (inspect.ismethod(value) and value.__self__ is self.module):
            return value

        @functools.wraps(value.__func__)
        def method(self: Frozen, *args: Any, **kwargs: Any) -> Any:
            with self._statistics():
                return value.__func__(self.module, *args, **kwargs)

        return types.MethodType(method, self)

    def _statistics(self) -> contextlib.AbstractContextManager[None]:
        return _statistics_held(self.module) if self.stats == "frozen" else contextlib.nullcontext()


def _is_own(name: str) -> bool:
    """Whether an attribute is the wrapper's own, or one by which NNX treats each module of a tree by itself."""
    return name in ("module", "stats", "set_view") or name.startswith(("__", "_pytree__"))


@contextlib.contextmanager
def _statistics_held(module: nnx.Module) -> Iterator[None]:
    """Lets modules with ``use_running_average`` use the stored statistics, and undoes what is written to any."""
    nodes = [node for _, node in nnx.iter_graph(module)]
    norms = [(n, type(n)) for n in nodes if isinstance(n, nnx.Module) and hasattr(n, "use_running_average")]
    before = [(n, n.copy(), jax.tree.leaves(n)) for n in nodes if isinstance(n, nnx.BatchStat)]
    for norm, cls in norms:
        is_pytree = not jax.tree_util.all_leaves([norm])
        object.__setattr__(norm, "__class__", _with_stored_statistics(cls, is_pytree))
    try:
        yield
    finally:
        for norm, cls in norms:
            object.__setattr__(norm, "__class__", cls)
        for variable, copy, leaves in before:
            if any(new is not old for new, old in zip(jax.tree.leaves(variable), leaves, strict=True)):
                variable.update_from_state(copy)


@functools.cache
def _with_stored_statistics(cls: type[nnx.Module], is_pytree: bool) -> type[nnx.Module]:
    """A subclass that uses the stored statistics, whatever its attribute or an argument of its call says.

    The only place at which an argument of the call can be overruled, since Python looks ``__call__`` up in the class.
    """
    signature = inspect.signature(cls.__call__)

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        if "use_running_average" in signature.parameters:
            bound.arguments["use_running_average"] = True
        return cls.__call__(*bound.args, **bound.kwargs)

    def set_attribute(self: Any, value: Any) -> None:
        vars(self)["use_running_average"] = value

    stored = property(lambda self: True, set_attribute)
    body = {"__call__": call, "use_running_average": stored, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (cls,), {"pytree": is_pytree}, lambda namespace: namespace.update(body))


class _Param(NamedTuple):
    """A parameter, frozen or not, with each of its paths, and what a spec says of it."""

    variable: nnx.Variable
    paths: list[str]
    frozen: bool
    inexact: bool


def _params(module: Any, frozen: Any, name: str) -> list[_Param]:
    """Each parameter of a module once, and whether ``frozen`` freezes it."""
    _check_module(module, name, frozen)
    paths: dict[int, dict[str, tuple[Any, ...]]] = {}
    at: dict[str, nnx.Variable] = {}
    for names, variable in _walk(module):
        if isinstance(variable, (nnx.Param, FrozenParam)):
            path = "/".join(map(str, names))
            paths.setdefault(id(variable), {})[path] = names
            at[path] = variable

    tree = nnx.to_pure_dict(nnx.state(module, (nnx.Param, FrozenParam)))
    leaves, found = _tree.leaves(tree), []
    for i, leaf in enumerate(leaves):
        parts = leaf.path.split("/")  # the value of a parameter may be a tree, and the path of its leaf longer
        own = next(prefix for n in range(len(parts), 0, -1) if (prefix := "/".join(parts[:n])) in at)
        found.append(at[own])
        named = paths[id(at[own])]
        others = tuple(path + leaf.path[len(own) :] for path in named if path != own)
        variable = _thawed(at[own]) if _is_frozen(at[own]) else at[own]
        leaves[i] = _tree.VariableLeaf.of(leaf._replace(aliases=others), list(named.values()), variable)
    spec = nnx.to_pure_dict(frozen) if isinstance(frozen, nnx.State) else frozen
    plan = make_plan(tree, spec, leaves=leaves)
    if name != "thaw" and plan.extent(tree) == "nothing":  # a module may be frozen as a whole
        warn_of_extent(plan, tree, frozen, stacklevel=3)

    params: dict[int, _Param] = {}
    for variable, leaf, selection in zip(found, leaves, plan.selections, strict=True):
        param = _Param(variable, list(paths[id(variable)]), selection is FROZEN, leaf.inexact)
        if selection.in_part or params.setdefault(id(variable), param).frozen is not param.frozen:
            raise value_error(
                "a part of a parameter: an NNX variable has one type",
                at=leaf.path,
                got="an element mask" if selection.in_part else f"{param.frozen} here, but not for all of it",
                expected="True (frozen) or False for the whole parameter",
                fix="freeze parts in the optimizer: nnx.Optimizer(model, fz.freeze(tx, frozen), wrt=nnx.Param)",
            )
    return list(params.values())


def _walk(
    node: nnx.Pytree, above: tuple[nnx.Pytree, ...] = (), path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], nnx.Variable]]:
    """Each variable of a module at each of its paths; ``nnx.iter_graph`` gives the first alone."""
    for name, value in vars(node).items():
        index = isinstance(node, nnx.List) and str(name).isdigit()
        for key, leaf in jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_node)[0]:
            here = (*path, int(name) if index else name, *map(_tree.name_of, key))
            if isinstance(leaf, nnx.Variable):
                yield here, leaf
            elif isinstance(leaf, nnx.Pytree) and not any(leaf is other for other in (*above, node)):
                yield from _walk(leaf, (*above, node), here)


def _retype(module: nnx.Pytree, new: dict[int, nnx.Variable]) -> None:
    """Puts other variables in the place of those with these ids, wherever they stand in a module."""
    nodes = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]
    for node in nodes:
        for name, value in list(vars(node).items()):
            if any(id(leaf) in new for leaf in jax.tree.leaves(value, is_leaf=_is_node)):
                replaced = jax.tree.map(lambda leaf: new.get(id(leaf), leaf), value, is_leaf=_is_node)
                if isinstance(name, int):  # an `nnx.List` of older releases of Flax
                    node[name] = replaced  # pyright: ignore[reportIndexIssue]
                else:
                    setattr(node, name, replaced)


def _refuse_bridge(module: nnx.Pytree, params: list[_Param]) -> None:
    """Refuses parameters of a Linen module: a bridge takes variables of one type for ``params``."""
    wanted = {id(param.variable): param.paths[0] for param in params}
    bridges = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.bridge.ToNNX)] if wanted else []
    held = [wanted[id(variable)] for bridge in bridges for _, variable in _walk(bridge) if id(variable) in wanted]
    if held:
        raise value_error(
            "a parameter of a Linen module cannot become a FrozenParam",
            at=held[0],
            got="an nnx.bridge.ToNNX, which gives Linen nothing but nnx.Params as its `params`",
            expected="a module of NNX, or parameters that stay nnx.Params",
            fix="nnx.Optimizer(model, fz.freeze(tx, frozen), wrt=nnx.Param), or wrt=fnnx.trainable(frozen, model)",
        )


def _is_node(value: Any) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def _is_frozen(variable: Any) -> bool:
    return isinstance(variable, FrozenParam)


def _frozen(param: nnx.Variable) -> nnx.Variable:
    was = {} if type(param) is nnx.Param else {_THAWS_TO: type(param)}
    return FrozenParam.from_metadata(_raw(param), {**param.get_metadata(), **was})


def _thawed(param: nnx.Variable) -> nnx.Variable:
    metadata = dict(param.get_metadata())
    return metadata.pop(_THAWS_TO, nnx.Param).from_metadata(_raw(param), metadata)


def _raw(variable: nnx.Variable) -> Any:
    """What a variable holds, before its hooks: Flax has renamed the attribute."""
    return jax.tree.leaves(variable, is_leaf=lambda node: node is not variable)[0]


def _check_module(module: Any, name: str, frozen: Any = None) -> None:
    if isinstance(module, nnx.Pytree):
        return
    got, fix = described(module), "pass an instance of an nnx.Module"
    if isinstance(module, type):
        fix = f"make an instance: {module.__name__}(..., rngs=nnx.Rngs(0))"
    elif isinstance(frozen, nnx.Pytree):
        fix = "swap the arguments: what is frozen comes first in trainable(frozen, module), second everywhere else"
    elif isinstance(module, nnx.State):
        got, fix = "an nnx.State", "pass the module; for a tree of parameters use fz.partition or fz.freeze"
    elif type(module).__module__.startswith("flax.linen") or hasattr(module, "apply"):
        fix = "for a Linen module use optax_freeze.linen"
    raise type_error(f"{name}: no NNX module", at=name, got=got, expected="an nnx.Module", fix=fix)
