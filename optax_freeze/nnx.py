"""Freezes parameters of Flax NNX models, by the types of their variables.

``nnx.grad`` and ``nnx.Optimizer(wrt=nnx.Param)`` select variables by type, so a frozen parameter is a
:class:`FrozenParam`, which is not an ``nnx.Param``. :func:`freeze` and :func:`thaw` change the type in place;
:class:`Frozen` also holds batch statistics; :func:`trainable` leaves the types alone and returns an NNX filter.

A variable has one type: one that several modules share is frozen in all of them. A spec may use any of its paths.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import jax
import numpy as np
import optax
from flax import nnx

from optax_freeze._errors import described, refuse_unknown_choice, type_error, value_error
from optax_freeze._gradient.freeze_loss import call_frozen
from optax_freeze._gradient.grad import refuse_no_function
from optax_freeze._report.costs import Costs
from optax_freeze._report.costs import costs as costs_of_parameters
from optax_freeze._spec import tree as _tree
from optax_freeze._spec.masks import choice_of
from optax_freeze._spec.module_parameters import variables_of
from optax_freeze._spec.resolve import Spec, make_plan, register_with_flax, warn_of_extent
from optax_freeze._spec.selection import FROZEN

register_with_flax()

_Module = TypeVar("_Module", bound=nnx.Pytree)
_P = ParamSpec("_P")
_T = TypeVar("_T")
Stats = Literal["frozen", "live"]

_ORIGINAL_TYPE = "thaws_to"
"""The metadata for the type that a frozen parameter had, unless that was ``nnx.Param`` itself."""


class FrozenParam(nnx.Variable):
    """A frozen parameter: an ``nnx.Variable`` that is not an ``nnx.Param``, so that gradients and optimizers ignore it.

    It keeps the value and metadata of the original parameter, and reads and writes as the original type does, including
    overrides of ``get_value`` and ``set_value``. :func:`thaw` turns one that you created yourself into an
    ``nnx.Param``.

    Example:
      >>> import optax_freeze.nnx as fnnx
      >>> linear = fnnx.freeze(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "kernel")
      >>> type(linear.kernel).__name__, type(linear.bias).__name__
      ('FrozenParam', 'Param')
      >>> nnx.to_pure_dict(nnx.grad(lambda linear: linear(np.ones(2)).sum())(linear))
      {'bias': Array([1., 1., 1.], dtype=float32)}
    """

    def get_value(self, **kwargs: Any) -> Any:
        return _thawed(self, hijax=False).get_value(**kwargs)

    def set_value(self, value: Any, **kwargs: Any) -> None:
        param = _thawed(self, hijax=False)
        param.set_value(value, **kwargs)
        self.update_from_state(_frozen(param))


def freeze(module: _Module, frozen: Spec) -> _Module:
    """Freezes parameters of a module in place: ``nnx.Param`` becomes :class:`FrozenParam`.

    A second call freezes more parameters; only :func:`thaw` unfreezes them. Create the ``nnx.Optimizer`` anew
    afterwards, because its state belongs to the parameters that were trainable before.

    Args:
      module: an NNX module, which may have frozen parameters already.
      frozen: the spec, in any form except element masks, for the tree of ``module``'s parameters. A shared variable is
        matched by any of its paths. Integer parameters are always frozen.

    Returns:
      ``module`` itself.

    Raises:
      TypeError: if ``module`` is not an NNX module.
      ValueError: if the spec does not fit, or freezes elements of a parameter, or a parameter of a Linen module in an
        ``nnx.bridge.ToNNX``, which could not be called any more.

    Example:
      >>> import optax, optax_freeze.nnx as fnnx
      >>> model = fnnx.freeze(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "kernel")
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
      >>> [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
      [('bias',)]
    """
    params = _params(module, frozen, "freeze")
    chosen = [p for p in params if p.frozen and not isinstance(p.variable, FrozenParam)]
    _refuse_linen_params(module, chosen)
    _replace_variables(module, {id(p.variable): _frozen(p.variable) for p in chosen})
    return module


def thaw(module: _Module, frozen: Spec = True) -> _Module:
    """Undoes :func:`freeze` in place: each :class:`FrozenParam` gets its original type back.

    A :class:`Frozen` wrapper still freezes batch statistics; call its ``module`` to update them.

    Args:
      module: an NNX module.
      frozen: which of the frozen parameters train again, in any form except element masks; True for all. Integer
        parameters, which cannot train, get their type back only by True.

    Returns:
      ``module`` itself.

    Raises:
      TypeError: if ``module`` is not an NNX module.
      ValueError: if the spec does not fit, or names elements of a parameter.

    Example:
      >>> import optax_freeze.nnx as fnnx
      >>> model = fnnx.freeze(nnx.LoRA(2, 1, 2, rngs=nnx.Rngs(0)), True)
      >>> type(fnnx.thaw(model, "lora_a").lora_a).__name__, type(model.lora_b).__name__
      ('LoRAParam', 'FrozenParam')
    """
    params = _params(module, frozen, "thaw")
    everything = isinstance(frozen, (bool, np.bool_)) and bool(frozen)
    chosen = [p.variable for p in params if p.frozen and (p.inexact or everything)]
    _replace_variables(module, {id(v): _thawed(v) for v in chosen if isinstance(v, FrozenParam)})
    return module


@dataclasses.dataclass(frozen=True, repr=False)
class _Trainable:
    """An NNX filter for the variables at some paths, unless they are frozen later."""

    paths: frozenset[str]

    def __call__(self, path: tuple[Any, ...], value: Any) -> bool:
        return "/".join(map(str, path)) in self.paths and not isinstance(value, FrozenParam)

    def __repr__(self) -> str:
        return f"fnnx.trainable(<{len(self.paths)} paths>)"


def trainable(module: nnx.Pytree, frozen: Spec) -> Any:
    """Returns an NNX filter for the trainable parameters: for ``nnx.Optimizer(wrt=...)``, ``nnx.split`` and
    ``nnx.state``.

    The types of the variables do not change, so ``nnx.grad`` still computes all gradients. Pass ``nnx.state(grads,
    wrt)`` to the optimizer, or differentiate the state that ``nnx.split`` returns.

    Args:
      module: the module that the filter is for; it is not changed.
      frozen: the spec, in any form except element masks.

    Returns:
      A filter, compared by value: True at the paths of the trainable parameters, never for a :class:`FrozenParam`.

    Raises:
      TypeError: if ``module`` is not an NNX module.
      ValueError: if the spec does not fit or freezes elements of a parameter, or if all parameters are frozen.

    Example:
      >>> import optax, optax_freeze.nnx as fnnx
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> wrt = fnnx.trainable(model, "kernel")
      >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=wrt)
      >>> grads = nnx.grad(lambda model: model(np.ones(2)).sum())(model)
      >>> _ = optimizer.update(model, nnx.state(grads, wrt))
    """
    params = _params(module, frozen, "trainable")
    paths = [path for p in params if not p.frozen and not isinstance(p.variable, FrozenParam) for path in p.paths]
    if not paths:
        at, got = f"trainable(..., {frozen!r})", f"{len(params)} parameters, all frozen"
        expected, fix = "at least one trainable parameter", "freeze less: fz.all_except('head'); or thaw(module) first"
        raise value_error("no parameter is trainable", at=at, got=got, expected=expected, fix=fix)
    return _Trainable(frozenset(paths))


def freeze_loss(fun: Callable[Concatenate[_Module, _P], _T], frozen: Spec) -> Callable[Concatenate[_Module, _P], _T]:
    """:func:`optax_freeze.freeze_loss` for a function of an NNX module: for trainers, and for freezing rows.

    ``nnx.grad`` of it computes only the gradient of the trainable parameters, and gives zeros for frozen ones. Freeze
    the optimizer with the same spec: ``nnx.Optimizer(model, fz.freeze(tx, frozen), wrt=nnx.Param)``. The types of the
    variables do not change.

    Args:
      fun: the function that is differentiated, called as ``fun(module, *args, **kwargs)``. It may return anything, and
        change the variables of its arguments: batch statistics, counts of random streams, caches.
      frozen: the spec for the tree of the module's ``nnx.Param``, in any form except dynamic rows and the spec of a
        :func:`optax_freeze.freeze_when` state. A shared variable has the first of its paths, as in an optimizer.

    Returns:
      A function with the arguments, the result and the side effects of ``fun``.

    Raises:
      TypeError: if ``fun`` is not a function, or if its first argument is not an NNX module.
      ValueError: in the same cases as :func:`optax_freeze.freeze_loss`.

    Example:
      >>> import optax_freeze as fz, optax_freeze.nnx as fnnx
      >>> model = nnx.Embed(4, 1, rngs=nnx.Rngs(0))
      >>> frozen = {"embedding": fz.rows(slice(0, 2))}
      >>> loss = fnnx.freeze_loss(lambda model, tokens: model(tokens).sum(), frozen)
      >>> nnx.grad(loss)(model, np.array([1, 2, 2]))["embedding"][...].ravel()
      Array([0., 0., 2., 0.], dtype=float32)
    """
    refuse_no_function(fun, frozen, "fnnx.freeze_loss(fun, frozen)")
    call: Any = fun

    @functools.wraps(fun)
    @nnx.update_context("freeze_loss")
    def frozen_fn(module: _Module, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        _check_module(module, "freeze_loss", frozen)
        with nnx.split_context("freeze_loss") as context:
            pure, *others = _split(context, (module, args, kwargs))
        params, rest = nnx.split_state(pure.state, nnx.Param, ...)
        before, unchanged, structure = jax.tree.leaves(params), {}, None

        def of_params(params: Any) -> Any:
            nonlocal unchanged, structure
            with nnx.merge_context("freeze_loss", True) as context:
                given = _merge(context, (pure._replace(state=nnx.merge_state(params, rest)), *others))
            module, args, kwargs = given
            out = call(module, *args, **kwargs)
            nodes = [node for node in jax.tree.leaves(given, is_leaf=_is_node) if _is_node(node)]
            with nnx.split_context("freeze_loss") as context:
                leaves, structure = jax.tree.flatten(_split(context, nodes))
                out = _split(context, out)
            places = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(params))}
            unchanged = {i: before[places[id(x)]] for i, x in enumerate(leaves) if id(x) in places}
            return [leaf for i, leaf in enumerate(leaves) if i not in unchanged], out

        changed, out = call_frozen(of_params, params, frozen)
        others = iter(changed)
        leaves = [unchanged[i] if i in unchanged else next(others) for i in range(len(changed) + len(unchanged))]
        with nnx.merge_context("freeze_loss", False) as context:
            _merge(context, jax.tree.unflatten(structure, leaves))
            return _merge(context, out)

    return frozen_fn


def costs(
    loss: Callable[..., Any],
    model: nnx.Pytree,
    specs: Mapping[str, Spec],
    *batch: Any,
    tx: optax.GradientTransformation | optax.MultiSteps,
    memory: float | None = None,
    offload: bool = False,
    has_aux: bool = False,
    extra_args: Sequence[str] = (),
) -> Costs:
    """:func:`optax_freeze.costs` for an NNX model: which specs fit, before a run.

    The step differentiates ``nnx.Param`` alone. Other variables, such as batch statistics and each
    :class:`FrozenParam`, are arguments of the step, and their new values are results. The model is not changed.

    Args:
      loss: the function to differentiate, called as ``loss(model, *batch)``.
      model: an NNX module with arrays, or with the shapes that ``nnx.eval_shape(lambda: Model(...))`` gives it.
      specs: from a name to a spec for the tree of the model's ``nnx.Param``, in any form.
      *batch: the other arguments of ``loss``, arrays or shapes.
      tx, memory, offload, has_aux, extra_args: as in :func:`optax_freeze.costs`.

    Returns:
      A :class:`optax_freeze.typing.Costs`.

    Raises:
      TypeError: if ``model`` is not an NNX module.
      TypeError, ValueError: in the same cases as :func:`optax_freeze.costs`.

    Example:
      >>> import jax, optax, optax_freeze.nnx as fnnx
      >>> model = nnx.eval_shape(lambda: nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
      >>> loss = lambda model, x: (model(x) ** 2).mean()
      >>> x = jax.ShapeDtypeStruct((8, 64), "float32")
      >>> found = fnnx.costs(loss, model, {"bias": "kernel", "all": False}, x, tx=optax.adam(1e-3))
      >>> [(row.name, row.trainable_elements) for row in found.rows]
      [('bias', 32), ('all', 2080)]
    """
    refuse_no_function(loss, model, "fnnx.costs(loss, model, {name: spec}, *batch, tx=tx)")
    _check_module(model, "costs", specs)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def of_params(params: Any, rest: Any, *batch: Any) -> Any:
        module = nnx.merge(graphdef, *jax.tree.map(lambda x: x, (params, rest)))  # new variables, of this trace
        out = loss(module, *batch)
        value, aux = out if has_aux else (out, None)
        before = {*map(id, jax.tree.leaves(rest))}
        after = jax.tree.leaves(nnx.split(module, nnx.Param, ...)[2])
        return value, (aux, [x for x in after if id(x) not in before])

    options: Any = {"memory": memory, "offload": offload, "has_aux": True, "extra_args": extra_args}
    return costs_of_parameters(of_params, params, specs, rest, *batch, tx=tx, **options)


class Frozen(nnx.Module):
    """Wraps a module to freeze its parameters and batch statistics. Gradients of its inputs do not change.

    Its parameters become :class:`FrozenParam` in place, and their paths gain the segment ``module``. The wrapper is
    called like the module and has its methods and attributes; a submodule is returned in a wrapper of its own.

    Args:
      module: an NNX module.
      frozen: the spec, in any form except element masks, relative to the module.
      stats: ``"frozen"`` keeps every ``nnx.BatchStat`` as it is, and modules that have ``use_running_average`` use the
        stored statistics, whatever ``train()`` or an argument of the call says; ``"live"`` leaves both to the caller.
        Dropout is always controlled by the caller, and its counts advance.

    Attributes:
      module: the module itself. A call of it, past the wrapper, updates its statistics.
      stats: as given.

    Raises:
      TypeError: if ``module`` is not an NNX module.
      ValueError: if ``stats`` is unknown, or the spec does not fit.

    Example:
      >>> import optax_freeze.nnx as fnnx
      >>> norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0), use_running_average=False)
      >>> _ = fnnx.Frozen(norm)(np.ones((4, 2)))
      >>> norm.mean[...]
      Array([0., 0.], dtype=float32)
    """

    def __init__(self, module: nnx.Module, frozen: Spec = True, stats: Stats = "frozen"):
        _check_module(module, "Frozen", frozen)
        refuse_unknown_choice(stats, get_args(Stats), at="stats")
        self.module = module
        self.stats: Stats = stats
        if frozen is not False:
            freeze(module, frozen)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _stored_statistics(self):
            return self.module(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    def __getattr__(self, name: str) -> Any:
        if _is_own(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._wrapped(getattr(self.module, name))

    def __getitem__(self, key: Any) -> Any:
        value = self.module[key]  # pyright: ignore[reportIndexIssue]
        return list(map(self._wrapped, value)) if isinstance(value, list) else self._wrapped(value)

    def __iter__(self) -> Iterator[Any]:
        return map(self._wrapped, self.module)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def __len__(self) -> int:
        return len(self.module)  # pyright: ignore[reportArgumentType]

    def __bool__(self) -> bool:
        return True

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def _wrapped(self, value: Any) -> Any:
        """An attribute of the module: a method runs with the stored statistics, a submodule gets a wrapper too."""
        if isinstance(value, nnx.Module):
            return Frozen(value, False, self.stats)
        if not (inspect.ismethod(value) and value.__self__ is self.module):
            return value

        @functools.wraps(value.__func__)
        def method(self: Frozen, *args: Any, **kwargs: Any) -> Any:
            with _stored_statistics(self):
                return value.__func__(self.module, *args, **kwargs)

        return types.MethodType(method, self)


def _is_own(name: str) -> bool:
    """Whether an attribute is the wrapper's own, or one that NNX sets on each module of a tree separately."""
    return name in ("module", "stats", "set_view") or name.startswith(("__", "_pytree__"))


@contextlib.contextmanager
def _stored_statistics(wrapper: Frozen) -> Iterator[None]:
    """Makes modules with ``use_running_average`` use the stored statistics, and restores every ``nnx.BatchStat``."""
    nodes = [node for _, node in nnx.iter_graph(wrapper.module)] if wrapper.stats == "frozen" else []
    modules = [n for n in nodes if isinstance(n, nnx.Module) and not isinstance(n, _Stored)]
    norms = [(n, type(n)) for n in modules if hasattr(n, "use_running_average")]
    before = [(n, n.copy(), jax.tree.leaves(n)) for n in nodes if isinstance(n, nnx.BatchStat)]
    for norm, cls in norms:
        stored = _with_stored_statistics(cls, pytree=not jax.tree_util.all_leaves([norm]))
        object.__setattr__(norm, "__class__", stored)
    try:
        yield
    finally:
        for norm, cls in norms:
            object.__setattr__(norm, "__class__", cls)
        for variable, copy, leaves in before:
            if any(new is not old for new, old in zip(jax.tree.leaves(variable), leaves, strict=True)):
                variable.update_from_state(copy)


class _Stored:
    """A module that uses its stored statistics now: an enclosing wrapper or another thread has changed its class."""


@functools.cache
def _with_stored_statistics(cls: type[nnx.Module], pytree: bool) -> type[nnx.Module]:
    """A subclass that uses the stored statistics, whatever its attribute or an argument of its call says."""
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
    return types.new_class(cls.__name__, (cls, _Stored), {"pytree": pytree}, lambda namespace: namespace.update(body))


class _Param(NamedTuple):
    """A parameter of a module."""

    variable: nnx.Variable
    paths: list[str]
    frozen: bool  # by the spec
    inexact: bool


def _params(module: Any, frozen: Any, name: str) -> list[_Param]:
    """Each parameter of a module once, and whether ``frozen`` freezes it."""
    _check_module(module, name, frozen)
    by_path: dict[str, nnx.Variable] = {}
    names: dict[int, dict[str, tuple[Any, ...]]] = collections.defaultdict(dict)  # of a variable, by its paths
    for keys, variable in variables_of(module):
        if isinstance(variable, (nnx.Param, FrozenParam)):
            path = "/".join(map(str, keys))
            by_path[path] = variable
            names[id(variable)][path] = keys
    tree = nnx.to_pure_dict(nnx.state(module, (nnx.Param, FrozenParam)))
    leaves, variables = _tree.leaves(tree), []
    for i, leaf in enumerate(leaves):
        path = leaf.path
        while path not in by_path:  # a variable may hold a tree, and the path of the leaf be longer
            path = path.rpartition("/")[0]
        variable = by_path[path]
        variables.append(variable)
        aliases = tuple(other + leaf.path[len(path) :] for other in names[id(variable)] if other != path)
        seen = _thawed(variable) if isinstance(variable, FrozenParam) else variable
        leaves[i] = _tree.VariableLeaf.of(leaf._replace(aliases=aliases), list(names[id(variable)].values()), seen)
    spec = nnx.to_pure_dict(frozen) if isinstance(frozen, nnx.State) else frozen
    plan = make_plan(tree, spec, leaves=leaves)
    if name != "thaw":
        warn_of_extent(plan, tree, frozen, or_everything=False, stacklevel=3)  # a module may be frozen as a whole
    params: dict[int, _Param] = {}
    for variable, leaf, selection in zip(variables, leaves, plan.selections, strict=True):
        param = _Param(variable, list(names[id(variable)]), selection is FROZEN, leaf.inexact)
        if selection.in_part or params.setdefault(id(variable), param).frozen is not param.frozen:
            what, at = "an NNX variable cannot be frozen in part", leaf.path
            expected = "True (frozen) or False for the whole parameter"
            got = f"{param.frozen} here, but not for all of it"
            got = repr(choice_of(selection)) if selection.in_part else got
            fix = (
                "freeze parts in the optimizer: nnx.Optimizer(model, fz.freeze(tx, frozen), wrt=nnx.Param), and in the"
            )
            fix += " loss, fnnx.freeze_loss(loss, frozen), so that only their gradient is computed"
            raise value_error(what, at=at, got=got, expected=expected, fix=fix)
    return list(params.values())


def _replace_variables(module: nnx.Pytree, new: Mapping[int, nnx.Variable]) -> None:
    """Replaces the variables with these ids, wherever they occur in a module."""
    for node in [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]:
        for name, value in list(vars(node).items()):
            if any(id(leaf) in new for leaf in jax.tree.leaves(value, is_leaf=_is_node)):
                replaced = jax.tree.map(lambda leaf: new.get(id(leaf), leaf), value, is_leaf=_is_node)
                if isinstance(name, int):  # an `nnx.List` of older releases of Flax
                    node[name] = replaced  # pyright: ignore[reportIndexIssue]
                else:
                    setattr(node, name, replaced)


def _refuse_linen_params(module: nnx.Pytree, params: Sequence[_Param]) -> None:
    """Refuses parameters of a Linen module: its bridge passes only ``nnx.Param`` on as ``params``."""
    paths = {id(param.variable): param.paths[0] for param in params}
    bridges = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.bridge.ToNNX)] if paths else []
    for variable in (variable for bridge in bridges for _, variable in variables_of(bridge)):
        if id(variable) in paths:
            what, at = "a parameter of a Linen module cannot become a FrozenParam", paths[id(variable)]
            got = "an nnx.bridge.ToNNX, which passes only nnx.Params to Linen as `params`"
            expected = "an NNX module, or parameters that remain nnx.Params"
            fix = "nnx.Optimizer(model, fz.freeze(tx, frozen), wrt=nnx.Param), or wrt=fnnx.trainable(model, frozen)"
            raise value_error(what, at=at, got=got, expected=expected, fix=fix)


class _Split(NamedTuple):
    """A module or variable as a pytree."""

    graphdef: Any
    state: Any


def _split(context: Any, tree: Any) -> Any:
    """A tree with its modules and variables split."""
    return jax.tree.map(lambda x: _Split(*context.split(x)) if _is_node(x) else x, tree, is_leaf=_is_node)


def _merge(context: Any, tree: Any) -> Any:
    """The inverse of :func:`_split`; the context knows the modules that already exist, and changes them."""
    is_split = lambda x: isinstance(x, _Split)  # noqa: E731
    return jax.tree.map(lambda x: context.merge(*x) if is_split(x) else x, tree, is_leaf=is_split)


def _is_node(value: Any) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def _frozen(param: nnx.Variable) -> nnx.Variable:
    cls = type(param) if issubclass(type(param), nnx.Variable) else param.type  # of a hijax variable
    original = {} if cls is nnx.Param else {_ORIGINAL_TYPE: cls}
    return FrozenParam.from_metadata(_raw(param), {**param.get_metadata(), **original})


def _thawed(param: nnx.Variable, **metadata: Any) -> nnx.Variable:
    metadata = {**param.get_metadata(), **metadata}
    return metadata.pop(_ORIGINAL_TYPE, nnx.Param).from_metadata(_raw(param), metadata)


def _raw(variable: nnx.Variable) -> Any:
    """The value of a variable without its hooks; the name of the attribute differs between releases of Flax."""
    if hasattr(variable, "get_raw_value"):
        return variable.get_raw_value()
    return jax.tree.leaves(variable, is_leaf=lambda node: node is not variable)[0]


def _check_module(module: Any, name: str, frozen: Any) -> None:
    if isinstance(module, nnx.Pytree):
        return
    got, fix = described(module), "pass an instance of an nnx.Module"
    if isinstance(frozen, nnx.Pytree):
        fix = f"swap the arguments: {name}(module, frozen)"
    elif isinstance(module, type):
        fix = f"make an instance: {module.__name__}(..., rngs=nnx.Rngs(0))"
    elif isinstance(module, nnx.State):
        got, fix = "an nnx.State", "pass the module; for a tree of parameters use fz.partition or fz.freeze"
    elif type(module).__module__.startswith("flax.linen") or hasattr(module, "apply"):
        fix = "for a Linen module use optax_freeze.linen"
    raise type_error(f"{name}: not an NNX module", at=name, got=got, expected="an nnx.Module", fix=fix)
