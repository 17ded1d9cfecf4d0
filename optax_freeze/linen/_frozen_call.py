"""A call of a Linen module with frozen variables.

The call runs in ``nn.map_variables``: the module reads constants where its parameters are frozen, from ``params`` or
from a collection of their own, and what it writes is published only where it may be. Everything else (scopes, random
streams, sown values) is as without freezing.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import flax.linen as nn
import jax
from flax.core import Scope, unfreeze
from flax.linen.transforms import get_module_scopes
from flax.traverse_util import flatten_dict, unflatten_dict

from optax_freeze._errors import value_error
from optax_freeze._spec.masks import ElementMask
from optax_freeze._spec.partition import stop_gradient
from optax_freeze._spec.resolve import Spec, resolve
from optax_freeze._spec.selector_algebra import as_selector, is_selector
from optax_freeze.linen._recording import Path, active_recording

OVERWRITTEN = "_overwrite_with_gradient"
"""The collection whose new value is its gradient, such as the scales of float8 matmuls."""

Flat: TypeAlias = dict[Path, Any]
"""Variables by their paths, relative to the module that is called."""


@dataclasses.dataclass(frozen=True)
class VariableFreezer:
    """Calls modules with frozen variables: what is frozen, in which collection, and which collections do not change."""

    frozen: Spec
    collection: str | None
    stats: Sequence[str] = ()

    @property
    def collections(self) -> list[str]:
        return ["params", *self.stats, *([self.collection] if self.collection else [])]

    def call(self, fun: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, *, is_call: bool = False) -> Any:
        """``fun(module, *args, **kwargs)`` with frozen variables; ``is_call``: by which ``init`` makes all of them."""
        if module.scope is None:
            what, at = "a frozen module is used before it belongs to a model", type(module).__name__
            got, expected = "a module without variables", "a module within a model under init or apply"
            fix = "model.apply(variables, x), or build the module inside setup or a compact method"
            raise value_error(what, at=at, got=got, expected=expected, fix=fix)
        initializing = module.is_initializing()
        scopes = [_ScopeVariables(scope, module.scope.path, self) for scope in _lifted_scopes(module)]
        known = {path: leaf for scope in scopes for path, leaf in scope.params.items()}
        answers = self._answers(known) if known and not initializing else {}
        if self.collection and not initializing:
            fix = "pass the variables as init made them; lifts must name the collection in `variable_axes`"
            self._refuse_misplaced(self.collection, scopes, answers, fix)
        constants = _stop_gradient(known, _recorded(scopes, answers))
        mapped = self._mapped(lambda module: fun(module, *args, **kwargs), scopes, constants)
        with nn.intercept_methods(_use_stored_statistics) if self.stats else contextlib.nullcontext():
            output = mapped(module)
        created = {path: leaf for scope in scopes for path, leaf in scope.created("params").items()}
        is_complete = is_call and (created or not known)
        if is_complete or (self.collection and (created or initializing)):
            answers = self._answers({**known, **created})
        if self.collection and initializing:
            self._refuse_unusable(self.collection, scopes, created, answers, is_call)
            if known:
                self._refuse_misplaced(self.collection, scopes, answers, "freeze a module alike wherever it is used")
        for scope in scopes:
            scope.publish(constants, answers)
        return output

    def _mapped(
        self, fun: Callable[[nn.Module], Any], scopes: "Sequence[_ScopeVariables]", constants: Flat
    ) -> Callable[[nn.Module], Any]:
        """``fun`` as a function of a module whose scopes read ``constants``; what they write stays in ``scopes``."""

        def run(module: nn.Module) -> Any:
            bound = {scope.path: scope for scope in _bound_scopes(module)}
            for scope in bound.values():
                if scope.parent is not None:  # a lift makes a parent for each child, and nn.share_scope needs one
                    scope.parent = bound.get(scope.parent.path, scope.parent)
                if self.stats:
                    scope.flags = scope.flags.copy({"stored_statistics": True})  # nn.jit tells programs apart by flags
            return fun(module)

        run.method_handler_wrapped = True  # type: ignore[attr-defined]  # Linen would treat it as another method
        inputs, outputs = iter(scopes), iter(scopes)
        return nn.map_variables(
            run,
            self.collections,
            lambda _: next(inputs).read(constants),
            lambda written: next(outputs).keep(written),
            mutable=True,
        )

    def _answers(self, params: Flat) -> Flat:
        """For each parameter True, False or, where it is frozen in part, an element mask."""
        if not params and is_selector(self.frozen):
            as_selector(self.frozen, "frozen").select([])  # raises for a pattern, which matches nothing
        tree = resolve(nn.meta.unbox(unflatten_dict(params)), self.frozen) if params else {}
        answers = {path: _one_answer(answer) for path, answer in flatten_dict(tree).items()}
        part = next((path for path, answer in answers.items() if not isinstance(answer, bool)), None)
        if self.collection and part:
            what, at = "part of a parameter cannot be moved to a collection", "/".join(part)
            expected, fix = "True or False, for whole parameters", "use collection=None"
            raise value_error(what, at=at, got=repr(answers[part]), expected=expected, fix=fix)
        return answers

    def _refuse_misplaced(self, collection: str, scopes: "Sequence[_ScopeVariables]", answers: Flat, fix: str) -> None:
        """Refuses trainable parameters in the collection, and one without any, where there should be some."""
        moved = {path for scope in scopes for path in scope.before[collection]}
        moved.update(path for scope in scopes for path in scope.created("params") if answers[path])
        if moved:  # a frozen parameter in "params" may be that of a module that shares the scope
            missing_in, paths = "params", [path for path in answers if not answers[path] and path in moved]
        else:
            missing_in, paths = collection, [path for path in answers if answers[path]] if answers else [()]
        if paths:
            here = scopes[-1].scope
            what, at = f"a parameter is not in the collection {missing_in!r}", "/".join((*here.path, *paths[0]))
            got = f"variables in {sorted(here.root.variables())}"
            expected = f"frozen parameters in {collection!r}, the others in 'params', at the same paths"
            raise value_error(what, at=at, got=got, expected=expected, fix=fix)

    def _refuse_unusable(
        self, collection: str, scopes: "Sequence[_ScopeVariables]", created: Flat, answers: Flat, is_call: bool
    ) -> None:
        """Refuses, in ``init``, a collection that the module uses itself, or that would come out empty."""
        here = scopes[-1].scope
        used = [path for scope in scopes for path in scope.after.get(collection, {})]
        moved = [path for path in created if answers[path]]
        if used:
            what, at, fix = "the module itself uses the collection of its frozen parameters", used[0], "choose another"
        elif moved and not here.is_mutable_collection(collection):
            what, at = "an enclosing lift does not carry the collection, which would come out empty", moved[0]
            fix = f"name it there, as `params` is: variable_axes={{'params': 0, {collection!r}: 0}}"
        elif is_call and not any(answers.values()) and not any(scope.before[collection] for scope in scopes):
            what, at, fix = "no parameter is frozen, and the collection would be empty", (), "freeze more, or drop it"
        else:
            return
        got, expected = f"collection={collection!r}", "a collection for the frozen parameters alone"
        raise value_error(what, at="/".join((*here.path, *at)), got=got, expected=expected, fix=fix)


class _ScopeVariables:
    """The variables of one scope in the mapped collections, before a call and after it."""

    def __init__(self, scope: Scope, home: Path, freezer: VariableFreezer) -> None:
        self.scope = scope
        self.freezer = freezer
        same = [a == b for a, b in zip(scope.path, home, strict=False)]
        common = [*same, False].index(False)
        self.prefix = (*[".."] * (len(home) - common), *scope.path[common:])
        variables = scope.variables()
        self.before = {col: self._flat(variables.get(col, {})) for col in freezer.collections}
        self.after: dict[str, Flat] = {}

    @property
    def params(self) -> Flat:
        return {**self.before["params"], **self.before.get(self.freezer.collection or "", {})}

    def path_in_scope(self, path: Path) -> Path:
        return path[len(self.prefix) :]

    def read(self, constants: Flat) -> dict[str, Any]:
        collections = {col: self.before[col] for col in self.freezer.stats}
        if OVERWRITTEN in collections:
            collections[OVERWRITTEN] = jax.tree.map(_own_gradient, collections[OVERWRITTEN])
        collections["params"] = {path: constants[path] for path in self.params}
        return {col: self._tree(flat) for col, flat in collections.items() if flat}

    def keep(self, written: Mapping[str, Any]) -> dict[str, Any]:
        self.after = {col: self._flat(tree) for col, tree in written.items()}
        return {}

    def created(self, col: str) -> Flat:
        known = self.params if col == "params" else self.before[col]
        return {path: leaf for path, leaf in self.after.get(col, {}).items() if path not in known}

    def publish(self, constants: Flat, answers: Flat) -> None:
        """Puts new variables into the scope, and trainable parameters that were written."""
        params = self.created("params")
        for path, leaf in self.after.get("params", {}).items():
            if path in constants and leaf is not constants[path] and answers.get(path) is False:
                params[path] = leaf
        for path, leaf in params.items():
            self._put((answers.get(path) is True and self.freezer.collection) or "params", path, leaf)
        for col in self.freezer.stats:
            for path, leaf in self.created(col).items():
                self._put(col, path, leaf)

    def _put(self, col: str, path: Path, leaf: Any) -> None:
        if self.scope.is_mutable_collection(col):
            ((name, value),) = self._tree({path: leaf}).items()
            self.scope.put_variable(col, name, value)

    def _tree(self, flat: Flat) -> dict[str, Any]:
        return unflatten_dict({self.path_in_scope(path): leaf for path, leaf in flat.items()})

    def _flat(self, tree: Any) -> Flat:
        return {(*self.prefix, *path): leaf for path, leaf in flatten_dict(unfreeze(tree)).items()}


def _lifted_scopes(module: nn.Module) -> list[Scope]:
    """The scopes that a lift carries, in its order: those of submodules elsewhere, and last the module's own."""
    scopes = list(dict.fromkeys(get_module_scopes(module)[0]))
    return [scope for scope in scopes if not any(above in scopes for above in _above(scope))]


def _bound_scopes(module: nn.Module) -> Iterator[Any]:
    """The scopes of a module and of the modules in its fields; unlike ``get_module_scopes`` it runs no ``setup``."""
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


def _recorded(scopes: Sequence[_ScopeVariables], answers: Flat) -> Flat:
    """The answers to act on: those given, unless a recording is active, which notes them and may replace them."""
    recording = active_recording.get()
    if recording is None:
        return answers
    for scope in scopes:
        for path, leaf in scope.params.items():
            uses = recording.answers.setdefault((*scope.scope.path, *scope.path_in_scope(path)), [])
            uses.append((answers[path], getattr(nn.meta.unbox(leaf), "shape", None)))
    return {path: recording.override(answer) for path, answer in answers.items()}


def _stop_gradient(params: Flat, answers: Flat) -> Flat:
    """The parameters as constants of the gradient where they are frozen."""
    if all(answer is False for answer in answers.values()):
        return params
    tree = unflatten_dict(params)
    stopped = stop_gradient(nn.meta.unbox(tree), unflatten_dict({path: answers.get(path, False) for path in params}))
    return flatten_dict(nn.meta.replace_boxed(tree, stopped))


@jax.custom_vjp
def _own_gradient(value: Any) -> Any:
    """``value``, whose gradient is ``value``."""
    return value


_own_gradient.defvjp(lambda value: (value, value), lambda value, _: (value,))


def _use_stored_statistics(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """A method interceptor. A field and an argument may not both be given, so the argument gives way."""
    name, scope = "use_running_average", context.module.scope
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


def _one_answer(answer: Any) -> Any:
    """One bool for a parameter that is a tree itself, if its leaves agree."""
    leaves = jax.tree.leaves(answer, is_leaf=lambda node: isinstance(node, ElementMask))
    return next((one for one in (True, False) if all(leaf is one for leaf in leaves)), answer)
