"""A Linen module, run with frozen variables.

One call of a module is put into ``nn.map_variables``: the module reads constants where its parameters are frozen, from
``params`` or from a collection of their own, and what it writes is published only where it may be. Nothing else of the
call changes: scopes, random streams and sown values are those of the bare module.
"""

import contextlib
import contextvars
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import numpy as np
from flax.core import Scope, unfreeze
from flax.linen.transforms import get_module_scopes
from flax.traverse_util import flatten_dict, unflatten_dict

from optax_freeze._errors import value_error
from optax_freeze._spec.masks import Elements, Rows
from optax_freeze._spec.partition import stop_gradient
from optax_freeze._spec.resolve import Spec, resolve
from optax_freeze._spec.selector_algebra import as_selector, is_selector

Path: TypeAlias = tuple[str, ...]
Flat: TypeAlias = dict[Path, Any]


@dataclasses.dataclass(frozen=True)
class Freezing:
    """What is frozen of a module, and where it is kept."""

    frozen: Spec
    collection: str | None
    stats: Sequence[str] = ()

    @property
    def collections(self) -> list[str]:
        """The collections that are not simply passed on."""
        return ["params", *self.stats, *([self.collection] if self.collection else [])]

    def run(self, fun: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, *, is_call: bool = False) -> Any:
        """``fun(module, *args, **kwargs)``, where the module reads frozen variables and writes none.

        ``is_call`` says that it is the module's ``__call__``, by which ``init`` makes all its parameters.
        """
        if module.scope is None:
            raise value_error(
                "a frozen module is used before it belongs to a model",
                at=type(module).__name__,
                got="a module without variables",
                expected="a module within a model under init or apply",
                fix="model.apply(variables, x), or build the module inside setup or a compact method",
            )
        initializing = module.is_initializing()
        stores = [_Store(scope, module.scope.path, self) for scope in _scopes(module)]
        params = {path: leaf for store in stores for path, leaf in store.params.items()}
        answers = self._answers(params) if params and not initializing else {}
        if self.collection and not initializing:
            self._refuse_other_places(
                stores,
                answers,
                "pass the variables as init made them; lifts must name the collection in `variable_axes`",
            )
        probe = _probe.get()
        if probe is None:
            given = _constant(params, answers)
        else:
            probe.record(stores, answers)
            given = _constant(params, {path: probe.stop(answer) for path, answer in answers.items()})

        inward, outward = iter(stores), iter(stores)
        lifted = nn.map_variables(
            self._inside(lambda module: fun(module, *args, **kwargs)),  # modules among the arguments stay as they are
            self.collections,
            lambda _: next(inward).read(given),
            lambda written: next(outward).write(written),
            mutable=True,
        )
        with nn.intercept_methods(_use_stored_statistics) if self.stats else contextlib.nullcontext():
            output = lifted(module)

        fresh = {path: leaf for store in stores for path, leaf in store.fresh("params").items()}
        if (is_call and (fresh or not params)) or (self.collection and (fresh or initializing)):
            answers = self._answers({**params, **fresh})
        if self.collection and initializing:
            self._refuse_no_collection(stores, fresh, answers, is_call)
            if params:
                self._refuse_other_places(stores, answers, "freeze a module alike wherever it is used")
        for store in stores:
            store.publish(given, answers)
        return output

    def _inside(self, fun: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
        """``fun`` as Linen is to run it: not as another method, with intermediates and a row of a table of its own."""

        def run(module: nn.Module) -> Any:
            scopes = {scope.path: scope for scope in _bound_scopes(module)}
            for scope in scopes.values():
                if scope.parent is not None:  # a lift makes a parent for each child: nn.share_scope asks for the one
                    scope.parent = scopes.get(scope.parent.path, scope.parent)
                if self.stats:
                    scope.flags = scope.flags.copy({"stored_statistics": True})  # nn.jit tells programs apart by flags
            return fun(module)

        run.method_handler_wrapped = True  # type: ignore[attr-defined]
        return run

    def _answers(self, params: Flat) -> Flat:
        """For each parameter True, False or, where it is frozen in part, an element mask."""
        if not params and (is_selector(self.frozen)):
            as_selector(self.frozen, "frozen").select([])  # a pattern has nothing to match
        tree = resolve(nn.meta.unbox(unflatten_dict(params)), self.frozen) if params else {}
        answers = {path: _in_one(answer) for path, answer in flatten_dict(tree).items()}
        parts = [path for path, answer in answers.items() if not isinstance(answer, bool)]
        if self.collection and parts:
            raise value_error(
                "a part of a parameter cannot be moved to a collection",
                at="/".join(parts[0]),
                got=repr(answers[parts[0]]),
                expected="True or False, for whole parameters",
                fix="use collection=None",
            )
        return answers

    def _refuse_other_places(self, stores: "Sequence[_Store]", answers: Flat, fix: str) -> None:
        assert self.collection is not None
        moved = {path for store in stores for path in store.before[self.collection]}
        moved.update(path for store in stores for path in store.fresh("params") if answers[path])
        for path in answers or [()]:
            is_frozen = answers.get(path, True)
            if not moved if is_frozen else path in moved:  # some of "params" may be of a module that shares the scope
                here = stores[-1].scope
                raise value_error(
                    f"a parameter is not in the collection {self.collection if is_frozen else 'params'!r}",
                    at="/".join((*here.path, *path)),
                    got=f"variables in {sorted(here.root.variables())}",
                    expected=f"what is frozen in {self.collection!r}, what trains in 'params', at the same paths",
                    fix=fix,
                )

    def _refuse_no_collection(self, stores: "Sequence[_Store]", fresh: Flat, answers: Flat, is_call: bool) -> None:
        assert self.collection is not None
        here = stores[-1].scope
        used = [path for store in stores for path in store.after.get(self.collection, {})]
        moved = [path for path in fresh if answers[path]]
        if used:
            what, at, fix = "the module itself uses the collection of its frozen parameters", used[0], "choose another"
        elif moved and not here.is_mutable_collection(self.collection):
            what, at = "an enclosing lift does not carry the collection, which would come out empty", moved[0]
            fix = f"name it there, as `params` is: variable_axes={{'params': 0, {self.collection!r}: 0}}"
        elif is_call and not any(answers.values()) and not any(store.before[self.collection] for store in stores):
            what, at, fix = "no parameter is frozen, and the collection would be empty", (), "freeze more, or drop it"
        else:
            return
        raise value_error(
            what,
            at="/".join((*here.path, *at)),
            got=f"collection={self.collection!r}",
            expected="a collection for the frozen parameters alone",
            fix=fix,
        )


class _Store:
    """What one scope holds in the mapped collections, before a call and after it; flat, by path from the module."""

    def __init__(self, scope: Scope, home: Path, freezing: Freezing) -> None:
        self.scope = scope
        self.freezing = freezing
        common = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(scope.path, home, strict=False))
        )
        self.prefix = (*[".."] * (len(home) - common), *scope.path[common:])
        variables = scope.variables()
        self.before = {col: self._flat(variables.get(col, {})) for col in freezing.collections}
        self.after: dict[str, Flat] = {}

    @property
    def params(self) -> Flat:
        """The parameters, from wherever they are kept."""
        return {**self.before["params"], **self.before.get(self.freezing.collection or "", {})}

    def below(self, path: Path) -> Path:
        """The path from the scope itself."""
        return path[len(self.prefix) :]

    def read(self, given: Flat) -> dict[str, Any]:
        """The collections as the module sees them."""
        seen = {col: self.before[col] for col in self.freezing.stats}
        seen["params"] = {path: given[path] for path in self.params}
        return {
            col: unflatten_dict({self.below(path): leaf for path, leaf in flat.items()})
            for col, flat in seen.items()
            if flat
        }

    def write(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Keeps what the module wrote; nothing goes out by itself."""
        self.after = {col: self._flat(tree) for col, tree in written.items()}
        return {}

    def fresh(self, col: str) -> Flat:
        """What was not there before."""
        known = self.params if col == "params" else self.before[col]
        return {path: leaf for path, leaf in self.after.get(col, {}).items() if path not in known}

    def publish(self, given: Flat, answers: Flat) -> None:
        """Puts what is new into the scope, and of the rest what trains and was written."""
        changed = {
            path: leaf
            for path, leaf in self.after.get("params", {}).items()
            if path in given and leaf is not given[path] and answers.get(path) is False
        }
        for path, leaf in {**self.fresh("params"), **changed}.items():
            moved = self.freezing.collection if answers.get(path) is True else None
            self._put(moved or "params", path, leaf)
        for col in self.freezing.stats:
            for path, leaf in self.fresh(col).items():
                self._put(col, path, leaf)

    def _put(self, col: str, path: Path, leaf: Any) -> None:
        if self.scope.is_mutable_collection(col):
            ((name, value),) = unflatten_dict({self.below(path): leaf}).items()
            self.scope.put_variable(col, name, value)

    def _flat(self, tree: Any) -> Flat:
        return {(*self.prefix, *path): leaf for path, leaf in flatten_dict(unfreeze(tree)).items()}


@dataclasses.dataclass(frozen=True)
class Probe:
    """Looks on while a model runs: which parameters are frozen, as each application of a frozen module says."""

    stop: Callable[[Any], Any] = lambda answer: answer
    """The answer that is acted on instead."""
    answers: dict[Path, list[Any]] = dataclasses.field(default_factory=dict)
    flags: dict[str, int] = dataclasses.field(default_factory=lambda: {"probe": next(_numbers)})
    """For the scopes: ``nn.jit`` tells programs apart by them, and would run that of another probe."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        token = _probe.set(self)
        try:
            yield
        finally:
            _probe.reset(token)

    def record(self, stores: Sequence[_Store], answers: Flat) -> None:
        for store in stores:
            for path, leaf in store.params.items():
                shape = getattr(nn.meta.unbox(leaf), "shape", None)
                self.answers.setdefault((*store.scope.path, *store.below(path)), []).append((answers[path], shape))

    @property
    def has_parts(self) -> bool:
        """Whether anything is frozen in part."""
        return any(not isinstance(answer, bool) for given in self.answers.values() for answer, _ in given)

    def is_frozen(self, path: Path) -> bool:
        """Whether the parameter is wholly frozen in each application."""
        return all(answer is True for answer, _ in self.answers.get(path, [(False, None)]))

    def part(self, path: Path, shape: tuple[int, ...] | None) -> Any:
        """The element mask of a parameter that is frozen in part in each application."""
        parts = [given for given in self.answers[path] if given[0] is not True]
        (first, inner), others = parts[0], parts[1:]
        if inner != shape or not all(_same(first, other) for other, _ in others):
            raise value_error(
                "no one element mask says what is frozen",
                at="/".join(path),
                got=f"{first!r} for a shape of {inner}" if inner != shape else f"{first!r} and {others[0][0]!r}",
                expected=f"one mask for all uses, of the parameter's shape {shape}",
                fix="give the optimizer the mask itself: fz.freeze(tx, fz.rules({path: mask}))",
            )
        return first


_numbers = itertools.count()
_probe: contextvars.ContextVar[Probe | None] = contextvars.ContextVar("probe", default=None)


def _scopes(module: nn.Module) -> list[Scope]:
    """The scopes that a lift carries, in its order: of submodules that live elsewhere, and last the module's own."""
    scopes = list(dict.fromkeys(get_module_scopes(module)[0]))
    return [scope for scope in scopes if not any(above in scopes for above in _above(scope))]


def _bound_scopes(module: nn.Module) -> Iterator[Any]:
    """The scopes of a module and of those among its fields; without a rehearsal of each setup, which takes time."""
    yield module.scope
    for field in dataclasses.fields(module):
        if field.name != "parent":
            for leaf in jax.tree.leaves(getattr(module, field.name, None)):
                if isinstance(leaf, nn.Module) and leaf.scope is not None:
                    yield from _bound_scopes(leaf)


def _above(scope: Scope) -> Iterator[Scope]:
    while scope.parent is not None:
        scope = scope.parent
        yield scope


def _constant(params: Flat, answers: Flat) -> Flat:
    """The parameters as constants of the gradient where they are frozen."""
    if all(answer is False for answer in answers.values()):
        return params
    tree = unflatten_dict(params)
    stopped = stop_gradient(nn.meta.unbox(tree), unflatten_dict({path: answers.get(path, False) for path in params}))
    return flatten_dict(nn.meta.replace_boxed(tree, stopped))


def _use_stored_statistics(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """A method interceptor: a field and an argument may not both be given, so the argument gives way."""
    name = "use_running_average"
    scope = context.module.scope
    if scope is None or not scope.has_flag("stored_statistics"):
        return next_fun(*args, **kwargs)
    is_field = name in type(context.module).__dataclass_fields__
    if is_field:
        object.__setattr__(context.module, name, True)
    signature = inspect.signature(context.orig_method)
    if name in signature.parameters:
        bound = signature.bind_partial(*args, **kwargs)
        if name in bound.arguments or not is_field:
            bound.arguments[name] = None if is_field else True
        args, kwargs = bound.args, bound.kwargs
    return next_fun(*args, **kwargs)


def _is_mask(answer: Any) -> bool:
    return isinstance(answer, (Rows, Elements))


def _in_one(answer: Any) -> Any:
    """One bool for a parameter that is a tree itself, if its leaves agree."""
    choices = jax.tree.leaves(answer, is_leaf=_is_mask)
    return next((one for one in (True, False) if all(choice is one for choice in choices)), answer)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Elements) and isinstance(b, Elements):
        return a.compact == b.compact and np.array_equal(a.array, b.array)
    return a == b
